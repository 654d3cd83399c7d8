"""The Sage2 arithmetic in plain PyTorch, on any device: what every kernel equals byte for byte.

All of it is fp32 with every operation rounded by itself (to nearest even, subnormals kept), as elementwise torch
operations are. Three things make it reproducible, and each has its reason where it is done: sums have a fixed
association, divisors are tensors (torch multiplies by the reciprocal of a scalar on CUDA), and casts saturate before
they are made. Arguments were checked by `comm_lowp.sage2.primitives`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from comm_lowp.sage2.grid import (
    EPS,
    IDLE_SCALE_BITS,
    Grid,
    Layout,
    PayloadSpec,
    ceil_div,
    first_group,
    last_group,
    slots,
    touched,
    touchers,
)

__all__ = [
    "V_SOURCE_ROWS",
    "Sections",
    "boundary_descriptors",
    "by_destination",
    "centred_amax",
    "derive_boundary",
    "duplicates_equal",
    "final_mean",
    "final_v_scale",
    "group_amax",
    "group_minmax",
    "k_sum",
    "merge_boundary",
    "output_dtypes",
    "quantize_k",
    "quantize_q",
    "quantize_v",
    "scale_of",
    "sections",
    "single_device",
    "unpack",
    "v_amax",
]

_CHUNK = 256
_LANES = 8
_CODE_MAX = 127.0
_E4M3_MAX = 448.0

V_SOURCE_ROWS = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
"""Row of a block of 16 that is stored at each position: ``2 * (x // 4) + 8 * (x % 4 // 2) + x % 2``.

A thread of the consumer has the scores of columns {2t, 2t+1, 2t+8, 2t+9}, and uses them as the 8-bit operand whose
four bytes are neighbours."""


def _like(x: torch.Tensor, value: float) -> torch.Tensor:
    """Return `value` as a divisor: a tensor, because CUDA divides by a scalar by multiplying with its reciprocal."""
    return torch.full_like(x, value)


# Statistics of one rank


def k_sum(k: torch.Tensor) -> torch.Tensor:
    """Return the sum of K over its rows, ``[B, L, H, D] -> [B, H, D]`` fp32, in the fixed association.

    Chunks of 256 rows; in each, lane j adds rows j, j + 8, … in order, from +0.0 on; then the 8 lanes are added in
    order, then the chunks. The shape of this tree is that of a thread block with 8 rows in flight.
    """
    b, rows, h, d = k.shape
    chunks = ceil_div(rows, _CHUNK)
    total = torch.zeros(b, h, d, dtype=torch.float32, device=k.device)
    for chunk in range(chunks):
        part = k[:, chunk * _CHUNK : (chunk + 1) * _CHUNK]
        lanes = torch.zeros(b, _LANES, h, d, dtype=torch.float32, device=k.device)
        for start in range(0, part.shape[1], _LANES):
            step = part[:, start : start + _LANES].float()
            # A lane without a row here is left alone: adding +0.0 would be the same, a sum is never -0.0.
            lanes[:, : step.shape[1]] += step
        summed = lanes[:, 0].clone()
        for lane in range(1, _LANES):
            summed += lanes[:, lane]
        total = summed if chunk == 0 else total + summed
    return total


def v_amax(v: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of V by channel, ``[B, L, H, D] -> [B, H, D]`` fp32."""
    return v.abs().amax(dim=1).float()


def _by_group(x: torch.Tensor, grid: Grid, group: int, fill: float) -> torch.Tensor:
    """Lay the rows of ``x[B, L, ...]`` out by slot, ``[B, slots, group, ...]``, with `fill` where a rank has none."""
    count = slots(grid.local_sequence, group)
    lead = grid.rank * grid.local_sequence - first_group(grid.rank, grid.local_sequence, group) * group
    padded = torch.full((x.shape[0], count * group, *x.shape[2:]), fill, dtype=x.dtype, device=x.device)
    padded[:, lead : lead + x.shape[1]] = x
    return padded.view(x.shape[0], count, group, *x.shape[2:])


def group_amax(x: torch.Tensor, grid: Grid, group: int) -> torch.Tensor:
    """Return the largest magnitude by group, ``[B, L, H, D] -> [B, H, slots]`` fp32; 0 without rows."""
    rows = x.abs().amax(dim=3).float()
    return _by_group(rows, grid, group, 0.0).amax(dim=2).transpose(1, 2).contiguous()


def group_minmax(k: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return each K group's smallest and largest live value by channel, ``[B, L, H, D] -> [B, H, slots, 2, D]`` fp32.

    A group without live rows here has (+inf, -inf).
    """
    live = k[:, : grid.live_rows].float()
    low = _by_group(live, grid, grid.layout.k_group, math.inf).amin(dim=2)
    high = _by_group(live, grid, grid.layout.k_group, -math.inf).amax(dim=2)
    return torch.stack((low, high), dim=2).permute(0, 3, 1, 2, 4).contiguous()


def centred_amax(minmax: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return max |RN(k - mean)| over the values behind `minmax`, ``[..., 2, D] -> [...]``, floored at EPS.

    Exact without the values: rounding is monotone and symmetric, so |k - mean| is largest at an extreme of k.
    (+inf, -inf) gives -inf on both sides, hence EPS.

    Args:
        minmax: smallest and largest raw values.
        mean: broadcastable to ``[..., D]``, rounded to the input dtype, as fp32.
    """
    low, high = minmax.unbind(-2)
    return torch.maximum(high - mean, mean - low).amax(dim=-1).clamp(min=EPS)


def boundary_descriptors(grouped: torch.Tensor, rank: int, local_sequence: int, group: int) -> torch.Tensor:
    """Return slots 0 and ``touched - 1`` of ``grouped[B, H, slots, ...]`` as ``[B, H, 2, ...]``."""
    return grouped[:, :, [0, touched(rank, local_sequence, group) - 1]].contiguous()


# From the gathered statistics


def _boundaries(rank: int, local_sequence: int, group: int) -> tuple[tuple[int, int], ...]:
    """Return (slot, global group) of a rank's boundary groups: one or two."""
    first, last = (f(rank, local_sequence, group) for f in (first_group, last_group))
    return ((0, first),) if first == last else ((0, first), (last - first, last))


def _descriptor_of(gathered: torch.Tensor, rank: int, index: int, local_sequence: int, group: int) -> torch.Tensor:
    """Return what `rank` said about group `index`: a shared group is the first or the last of all that touch it."""
    return gathered[rank][:, :, 0 if index == first_group(rank, local_sequence, group) else 1]


def merge_boundary(
    grouped: torch.Tensor, gathered: torch.Tensor, rank: int, local_sequence: int, world_size: int, group: int
) -> torch.Tensor:
    """Set the boundary slots of `grouped` to the maximum over all ranks that touch the group; return `grouped`."""
    for slot, index in _boundaries(rank, local_sequence, group):
        parts = [
            _descriptor_of(gathered, peer, index, local_sequence, group)
            for peer in touchers(index, local_sequence, group, world_size)
        ]
        grouped[:, :, slot] = torch.stack(parts).amax(dim=0)
    return grouped


def derive_boundary(
    grouped: torch.Tensor,
    gathered: torch.Tensor,
    mean: torch.Tensor,
    rank: int,
    local_sequence: int,
    world_size: int,
    group: int,
) -> torch.Tensor:
    """Set the K boundary slots of `grouped` from all ranks' raw minima and maxima; return `grouped`.

    Args:
        grouped: ``[B, H, slots]``, updated in place.
        gathered: ``[P, B, H, 2, 2, D]``.
        mean: ``[B, H, D]`` in the input dtype.
        rank: this rank.
        local_sequence: L.
        world_size: P.
        group: rows of a K group.
    """
    for slot, index in _boundaries(rank, local_sequence, group):
        parts = [
            centred_amax(_descriptor_of(gathered, peer, index, local_sequence, group), mean.float())
            for peer in touchers(index, local_sequence, group, world_size)
        ]
        grouped[:, :, slot] = torch.stack(parts).amax(dim=0)
    return grouped


def final_mean(sums: torch.Tensor, used_sequence: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the mean of K from all ranks' sums ``[P, B, H, D]``, rounded to the input dtype.

    Added in rank order by explicit additions (``sum(dim=0)`` has no documented association), divided by the live
    rows: rows beyond them are zero and must not count.
    """
    total = sums[0].clone()
    for part in sums[1:]:
        total += part
    return (total / _like(total, float(used_sequence))).to(dtype)


def final_v_scale(amax: torch.Tensor, v_max: float) -> torch.Tensor:
    """Return V's scale RN(amax / v_max): what the consumer multiplies by."""
    return amax / _like(amax, v_max)


# Quantization


def scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the scale RN(amax / 127) of final group maxima; 0 stays 0, for slots that are not used."""
    return amax / _like(amax, _CODE_MAX)


def _codes(x: torch.Tensor, amax: torch.Tensor, grid: Grid, group: int) -> torch.Tensor:
    """Return INT8 codes of fp32 rows ``[B, L, H, D]`` by their groups' amax ``[B, H, slots]``."""
    start = grid.rank * grid.local_sequence
    rows = torch.arange(start, start + grid.local_sequence, device=x.device)
    slot = rows // group - first_group(grid.rank, grid.local_sequence, group)
    inverse = _like(amax, _CODE_MAX) / amax
    scaled = x * inverse[:, :, slot].transpose(1, 2).unsqueeze(-1)
    # round() is half to even. A cast to int8 wraps, and rows beyond the live ones may exceed their group's amax.
    return scaled.round().clamp(-128.0, 127.0).to(torch.int8)


def quantize_q(q: torch.Tensor, amax: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return INT8 codes ``[B, L, H, D]`` of Q by final group maxima ``[B, H, slots]``."""
    return _codes(q.float(), amax, grid, grid.layout.q_group)


def quantize_k(k: torch.Tensor, mean: torch.Tensor, amax: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Return INT8 codes ``[B, L, H, D]`` of K minus its rounded mean; the difference stays fp32."""
    return _codes(k.float() - mean.float().unsqueeze(1), amax, grid, grid.layout.k_group)


def quantize_v(v: torch.Tensor, scale: torch.Tensor, v_max: float) -> torch.Tensor:
    """Return E4M3 bit patterns ``[B, L, H, D]`` uint8 of V by its scales ``[B, H, D]``, rows in natural order.

    ``e4m3(RN(v * RN(v_max / amax)))`` with the amax that the scale was made from: rounding ``scale * v_max`` to the
    input dtype gives back exactly that, for every finite fp16 and bf16 value. A channel that is zero, or so small
    that the reciprocal is not finite, becomes zeros.
    """
    amax = (scale * _like(scale, v_max)).to(v.dtype).float()
    reciprocal = _like(amax, v_max) / amax
    alive = torch.isfinite(reciprocal)
    scaled = v.float() * torch.where(alive, reciprocal, torch.zeros_like(reciprocal)).unsqueeze(1)
    codes = scaled.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    # A zero channel is 0x00 throughout, also where v is -0.0.
    return torch.where(alive.unsqueeze(1), codes, torch.zeros_like(codes))


# Payload


class Sections(NamedTuple):
    """Views of one chunk of a payload, or of all chunks (then with a first dimension for the rank)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor


def sections(payload: torch.Tensor, spec: PayloadSpec) -> Sections:
    """Return the sections of ``payload[P, chunk_bytes]`` as typed views ``[P, B, ...]``."""
    ranks = payload.shape[0]
    b, h = spec.batch_size, spec.local_heads
    n = spec.k_offset
    tensor = (ranks, b, spec.local_sequence, h, spec.head_dim)

    def part(offset: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        # Of one chunk the section is contiguous; the chunks are `chunk_bytes` apart.
        flat = payload[:, offset : offset + nbytes].view(dtype)
        return flat.view(ranks, *shape[1:])

    nq, nk = spec.q_scale_slots, spec.k_scale_slots
    return Sections(
        part(spec.q_offset, n, torch.int8, tensor),
        part(spec.k_offset, n, torch.int8, tensor),
        part(spec.v_offset, n, torch.uint8, tensor),
        part(spec.q_scale_offset, 4 * b * h * nq, torch.float32, (ranks, b, h, nq)),
        part(spec.k_scale_offset, 4 * b * h * nk, torch.float32, (ranks, b, h, nk)),
    )


def by_destination(x: torch.Tensor, world_size: int, dim: int) -> torch.Tensor:
    """Split the heads of `x` (dimension `dim`) by destination: ``[..., H, ...] -> [P, ..., H / P, ...]``."""
    heads = x.shape[dim] // world_size
    split = x.reshape(*x.shape[:dim], world_size, heads, *x.shape[dim + 1 :])
    return split.movedim(dim, 0)


def unpack(received: torch.Tensor, spec: PayloadSpec, widths: tuple[int, int], outs: Sequence[torch.Tensor]) -> None:
    """Write q8, k8, v8, q_scale and k_scale from the chunks of all sources, ``received[P, chunk_bytes]``.

    Args:
        received: source-major.
        spec: of the payload.
        widths: of the Q and K scales.
        outs: the five outputs; v8 as uint8 ``[B, D, h, S_pad]``.
    """
    q8, k8, v8, q_scale, k_scale = outs
    parts = sections(received, spec)
    q8.copy_(parts.q.movedim(0, 1).flatten(1, 2))
    k8.copy_(parts.k.movedim(0, 1).flatten(1, 2))
    rows = parts.v.movedim(0, 1).flatten(1, 2)
    b, _, h, d = rows.shape
    padded = v8.shape[3]
    block = torch.zeros(b, padded, h, d, dtype=torch.uint8, device=rows.device)
    block[:, : spec.global_sequence] = rows
    # Permuted on global rows: a block of 16 may hold rows of several ranks.
    order = torch.tensor(V_SOURCE_ROWS, device=rows.device)
    block = block.view(b, padded // 16, 16, h, d)[:, :, order].view(b, padded, h, d)
    v8.copy_(block.permute(0, 3, 2, 1))
    _gather_scales(parts.q_scale, spec, spec.layout.q_group, widths[0], q_scale)
    _gather_scales(parts.k_scale, spec, spec.layout.k_group, widths[1], k_scale)


def _gather_scales(parts: torch.Tensor, spec: PayloadSpec, group: int, width: int, out: torch.Tensor) -> None:
    """Write ``out[B, h, width]``: each group's scale from the lowest rank that touches it, idle ones after them."""
    rows = spec.local_sequence
    live = min(width, ceil_div(spec.global_sequence, group))
    ranks = [index * group // rows for index in range(live)]
    places = [index - first_group(rank, rows, group) for index, rank in enumerate(ranks)]
    device = parts.device
    out[:, :, :live] = parts[torch.tensor(ranks, device=device), :, :, torch.tensor(places, device=device)].permute(
        1, 2, 0
    )
    out[:, :, live:].view(torch.int32).fill_(IDLE_SCALE_BITS)


def duplicates_equal(received: torch.Tensor, spec: PayloadSpec) -> bool:
    """Return whether every group that several ranks touch has the same scale bits from all of them."""
    parts = sections(received, spec)
    rows, size = spec.local_sequence, spec.world_size
    for scales, group in ((parts.q_scale, spec.layout.q_group), (parts.k_scale, spec.layout.k_group)):
        bits = scales.contiguous().view(torch.int32)
        for rank in range(size):
            for _, index in _boundaries(rank, rows, group):
                first = index * group // rows
                own = bits[rank, :, :, index - first_group(rank, rows, group)]
                theirs = bits[first, :, :, index - first_group(first, rows, group)]
                if not torch.equal(own, theirs):
                    return False
    return True


def output_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes of (q8, k8, v8, q_scale, k_scale, v_scale)."""
    return torch.int8, torch.int8, torch.float8_e4m3fn, torch.float32, torch.float32, torch.float32


def single_device(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    *,
    used_sequence: int | None = None,
    mean: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Quantize a whole sequence ``[B, S, H, D]`` on one device, without payload, slots or ranks.

    What a distributed exchange must equal, and a baseline for its speed.

    Args:
        q: fp16 or bf16; rows from `used_sequence` on are zero.
        k: likewise.
        v: likewise.
        layout: of the consumer.
        used_sequence: live rows; None is all of them.
        mean: of K, ``[B, H, D]`` in the input dtype; None computes it as one rank would.

    Returns:
        (q8, k8, v8, q_scale, k_scale, v_scale) of all heads, with scales for `used_sequence` rows.
    """
    b, s, h, d = q.shape
    used = s if used_sequence is None else used_sequence
    centre = final_mean(k_sum(k).unsqueeze(0), used, k.dtype) if mean is None else mean
    wq, wk = layout.scale_widths(used)
    maxima: list[torch.Tensor] = []
    for x, group in ((q.float(), layout.q_group), ((k.float() - centre.float().unsqueeze(1)), layout.k_group)):
        whole = torch.zeros(b, ceil_div(s, group) * group, h, d, device=q.device)
        whole[:, :used] = x[:, :used]
        maxima.append(whole.view(b, -1, group, h, d).abs().amax(dim=(2, 4)).transpose(1, 2).clamp(min=EPS))
    grid = Grid(layout, b, s, h, d, 0, 1, used)
    v_scale = final_v_scale(v_amax(v), layout.v_max)
    padded = torch.zeros(b, layout.padded(s), h, d, dtype=torch.uint8, device=q.device)
    padded[:, :s] = quantize_v(v, v_scale, layout.v_max)
    order = torch.tensor(V_SOURCE_ROWS, device=q.device)
    v8 = padded.view(b, -1, 16, h, d)[:, :, order].reshape(b, -1, h, d).permute(0, 3, 2, 1).contiguous()
    scales: list[torch.Tensor] = []
    for amax, width in zip(maxima, (wq, wk), strict=True):
        wide = torch.full((b, h, max(width, amax.shape[2])), EPS, device=q.device)
        wide[:, :, : amax.shape[2]] = amax
        scales.append(scale_of(wide)[:, :, :width].contiguous())
    return (
        quantize_q(q, maxima[0], grid),
        quantize_k(k, centre, maxima[1], grid),
        v8.view(torch.float8_e4m3fn),
        *scales,
        v_scale,
    )
