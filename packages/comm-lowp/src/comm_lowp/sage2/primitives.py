"""The primitives of the Sage2 encoding, with their arguments checked; `comm_lowp.sage2` exports them.

A tensor may be on a CPU or a CUDA device. `layout` is a name of `LAYOUTS`; None is the device's own, on a CPU
``"sage2_sm89_sm120"``. `enable_pdl` asks for programmatic dependent launch of the CUDA kernels; None lets the device
decide, and on a CPU it is ignored. Nothing here communicates.

Letters: B batch, L rows of a rank, P ranks, S = P * L, U live rows of S, H heads in all, h = H / P, D head dimension,
GQ and GK rows of a Q and K group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_lowp.sage2 import reference
from comm_lowp.sage2.dispatch import kernels_for
from comm_lowp.sage2.grid import EPS, LAYOUTS, MAX_ELEMS, SM89_SM120, Grid, Layout, PayloadSpec, touched
from comm_lowp.sage2.grid import payload_spec as make_spec
from comm_lowp.sage2.grid import slots as count_slots

if TYPE_CHECKING:
    from comm_lowp.kernels import Scratch

__all__ = [
    "DTYPES",
    "HEAD_DIMS",
    "FinalStatistics",
    "LocalStatistics",
    "boundary_descriptors",
    "capability",
    "derive_k_boundary_amax",
    "finalize_stats",
    "k_boundary_minmax",
    "k_grouped_amax",
    "k_sum_v_amax",
    "local_stats",
    "merge_boundary_amax",
    "payload_spec",
    "q_grouped_amax",
    "quant_and_pack",
    "quant_kv_into_payload",
    "quant_q_into_payload",
    "quant_qkv_pack",
    "quant_v_fp8_with_scale",
    "scale_widths",
    "slots",
    "unpack_for_sage",
    "verify_duplicate_scale_slots",
    "zero_scale_and_padding",
]

DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128)
_MAX_USED = 1 << 24


# Layouts


def capability(device: torch.device | str | int | None = None) -> dict[str, Any]:
    """Return whether `device` has a Sage2 layout of its own, and which.

    Args:
        device: None is the current CUDA device, or the CPU where there is none.

    Returns:
        ``available`` (bool), ``reason`` (str where it is not available, else None), ``layout`` (name or None) and
        ``compute_capability`` (``"9.0"``, None on a CPU). On a CPU the reference runs, with the layout
        ``"sage2_sm89_sm120"``.
    """
    from comm_core import _cuda

    where = _cuda.normalize_device(device)
    if where.type == "cpu":
        return {"available": True, "reason": None, "layout": SM89_SM120.name, "compute_capability": None}
    text = _cuda.device_properties(where.index).compute_capability
    major, minor = (int(part) for part in text.split("."))
    for layout in LAYOUTS.values():
        if (major, minor) in layout.capabilities:
            return {"available": True, "reason": None, "layout": layout.name, "compute_capability": text}
    have = ", ".join(f"{a}.{b}" for layout in LAYOUTS.values() for a, b in layout.capabilities)
    reason = (
        f"{where} has compute capability {text}; SageAttention2 with FP8 values exists for {have}. "
        f"Name a layout ({' or '.join(LAYOUTS)}) to encode for such a device"
    )
    return {"available": False, "reason": reason, "layout": None, "compute_capability": text}


def find_layout(name: object, device: torch.device) -> Layout:
    """Return the layout called `name`; None is the layout of `device`.

    Raises:
        ArgumentTypeError: it is no str.
        ArgumentValueError: there is no such layout.
        UnsupportedError: `device` has no layout of its own.
    """
    if name is None:
        found = capability(device)
        if found["layout"] is None:
            raise UnsupportedError(found["reason"])
        return LAYOUTS[found["layout"]]
    if not isinstance(name, str):
        raise ArgumentTypeError(f"layout must be a str or None, got {type(name).__name__} {name!r}")
    if name not in LAYOUTS:
        raise ArgumentValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {name!r}")
    return LAYOUTS[name]


def _cpu_layout(name: object) -> Layout:
    return find_layout(name, torch.device("cpu"))


def scale_widths(sequence: int, *, layout: str | None = None) -> tuple[int, int]:
    """Return the widths of the Q and K scales of `sequence` rows, as the consumer derives them.

    Args:
        sequence: rows, 1 or more.
        layout: None is that of the current CUDA device, or of the CPU.
    """
    _positive(sequence, "sequence")
    if layout is None:
        layout = capability()["layout"] or SM89_SM120.name
    return _cpu_layout(layout).scale_widths(sequence)


def slots(local_sequence: int, group: int) -> int:
    """Return how many groups of `group` rows a shard of `local_sequence` rows touches at most."""
    return count_slots(_positive(local_sequence, "local_sequence"), _positive(group, "group"))


def payload_spec(
    *,
    batch_size: int,
    local_sequence: int,
    local_heads: int,
    head_dim: int,
    world_size: int,
    layout: str | None = None,
) -> PayloadSpec:
    """Return where everything is in one rank's payload.

    Args:
        batch_size: B.
        local_sequence: L.
        local_heads: h.
        head_dim: D, 64 or 128.
        world_size: P.
        layout: None is that of the current CUDA device, or of the CPU.

    Raises:
        ArgumentValueError: a number is out of range, or an operand or the payload exceeds the int32 element index.
    """
    if layout is None:
        layout = capability()["layout"] or SM89_SM120.name
    return _spec(_cpu_layout(layout), batch_size, local_sequence, local_heads, head_dim, world_size)


def _spec(layout: Layout, b: object, rows: object, heads: object, d: object, size: object) -> PayloadSpec:
    spec = make_spec(
        layout,
        _positive(b, "batch_size"),
        _positive(rows, "local_sequence"),
        _positive(heads, "local_heads"),
        _head_dim(d),
        _positive(size, "world_size"),
    )
    check_elements(spec)
    return spec


def check_elements(spec: PayloadSpec) -> None:
    """Refuse what 32-bit indices can't reach: an operand's elements, a payload's bytes."""
    operand = spec.k_offset * spec.world_size
    if operand > MAX_ELEMS:
        raise ArgumentValueError(f"an operand of {operand} elements: at most {MAX_ELEMS} can be encoded")
    if spec.payload_bytes > MAX_ELEMS:
        raise ArgumentValueError(f"a payload of {spec.payload_bytes} bytes: at most {MAX_ELEMS} can be exchanged")


# Checks


def _positive(value: object, name: str) -> int:
    if type(value) is not int:
        raise ArgumentTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1:
        raise ArgumentValueError(f"{name} must be at least 1, got {value}")
    return value


def _head_dim(value: object) -> int:
    if _positive(value, "head_dim") not in HEAD_DIMS:
        raise ArgumentValueError(f"head_dim must be 64 or 128, got {value}")
    return int(str(value))


def _rank(rank: object, world_size: object) -> tuple[int, int]:
    size = _positive(world_size, "world_size")
    if type(rank) is not int:
        raise ArgumentTypeError(f"rank must be an int, got {type(rank).__name__} {rank!r}")
    if not 0 <= rank < size:
        raise ArgumentValueError(f"rank must be in [0, {size}), got {rank}")
    return rank, size


def check_operand(x: object, name: str) -> torch.Tensor:
    """Check one of Q, K and V: fp16 or bf16 ``[B, L, H, D]`` with dense, 16-byte aligned rows.

    Raises:
        ArgumentTypeError: it is no tensor.
        ArgumentValueError: anything else.
    """
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in DTYPES:
        raise ArgumentValueError(f"{name} must be float16 or bfloat16, got {x.dtype}")
    if x.dim() != 4 or 0 in x.shape:
        raise ArgumentValueError(f"{name} must have a shape [B, L, H, D] of positive sizes, got {tuple(x.shape)}")
    if x.shape[3] not in HEAD_DIMS:
        raise ArgumentValueError(f"{name} must have a last dimension of 64 or 128, got {tuple(x.shape)}")
    if x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
        raise ArgumentValueError(f"{name} must be a strided CPU or CUDA tensor, got {x.layout} on {x.device}")
    if x.is_neg() or x.is_conj():
        raise ArgumentValueError(f"{name} is a lazily negated view: call resolve_neg() on it first")
    if x.numel() > MAX_ELEMS:
        raise ArgumentValueError(f"{name} has {x.numel()} elements; at most {MAX_ELEMS} can be")
    check_rows(x, name)
    return x


def check_rows(x: torch.Tensor, name: str) -> None:
    """Refuse rows that are not dense or not 16-byte aligned: kernels read them in 16-byte pieces, in place."""
    if x.stride(3) != 1:
        raise ArgumentValueError(f"{name} must have a dense last dimension, got strides {x.stride()}")
    if x.data_ptr() % 16:
        raise ArgumentValueError(f"{name} must begin at a 16-byte aligned address, got {x.data_ptr():#x}")
    bad = [
        dim for dim in range(3) if x.shape[dim] > 1 and (x.stride(dim) < 1 or x.stride(dim) * x.element_size() % 16)
    ]
    if bad:
        raise ArgumentValueError(
            f"{name} must have outer strides that are positive multiples of 16 bytes ({16 // x.element_size()} "
            f"elements), got {x.stride()} for shape {tuple(x.shape)}"
        )


def _same(x: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(x, what), getattr(other, what)
        if mine != theirs:
            raise ArgumentValueError(f"{name} and {other_name} must have one {what}, got {mine} and {theirs}")


def _tensor(
    x: object, name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, contiguous: bool = True
) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype or x.device != device:
        raise ArgumentValueError(
            f"{name} must be {dtype} {list(shape)} on {device}, got {x.dtype} {list(x.shape)} on {x.device}"
        )
    if contiguous and not x.is_contiguous():
        raise ArgumentValueError(f"{name} must be contiguous, got strides {x.stride()}")
    return x


def check_used(used_sequence: object, sequence: int) -> int:
    """Return the live rows; None is all of them."""
    if used_sequence is None:
        used_sequence = sequence
    if type(used_sequence) is not int:
        raise ArgumentTypeError(
            f"used_sequence must be an int or None, got {type(used_sequence).__name__} {used_sequence!r}"
        )
    if not 0 < used_sequence <= sequence:
        raise ArgumentValueError(f"used_sequence must be in (0, {sequence}], got {used_sequence}")
    if used_sequence >= _MAX_USED:
        raise ArgumentValueError(f"used_sequence must be below 2**24 to be exact in fp32, got {used_sequence}")
    return used_sequence


def _grid(x: torch.Tensor, rank: object, world_size: object, layout: Layout, used: object = None) -> Grid:
    b, rows, h, d = x.shape
    mine, size = _rank(rank, world_size)
    if h % size:
        raise ArgumentValueError(f"H must be divisible by world_size, got H={h} and world_size={size}")
    return Grid(layout, b, rows, h, d, mine, size, check_used(used, size * rows))


def _payload(send_u8: object, name: str, spec: PayloadSpec, device: torch.device | None = None) -> torch.Tensor:
    if not isinstance(spec, PayloadSpec):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"spec must come from payload_spec, got {type(spec).__name__}")
    where = device if device is not None else getattr(send_u8, "device", torch.device("cpu"))
    x = _tensor(send_u8, name, (spec.world_size, spec.chunk_bytes), torch.uint8, where)
    if x.data_ptr() % 16:
        raise ArgumentValueError(f"{name} must begin at a 16-byte aligned address, got {x.data_ptr():#x}")
    return x


def _matches(x: torch.Tensor, grid: Grid, spec: PayloadSpec) -> None:
    if spec != grid.payload:
        raise ArgumentValueError(f"spec is not that of shape {tuple(x.shape)} with {grid.world_size} ranks: {spec}")


# Statistics


def k_sum_v_amax(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of K and the largest magnitude of V over this rank's rows, both ``[B, H, D]`` fp32.

    The sum has a fixed association (chunks of 256 rows, 8 lanes), so that every implementation has the same bits.

    Args:
        k: ``[B, L, H, D]``.
        v: ``[B, L, H, D]``.
        out: two contiguous fp32 tensors to write instead of new ones.
        enable_pdl: see above.
    """
    _same(check_operand(v, "v"), "v", check_operand(k, "k"), "k")
    b, _, h, d = k.shape
    kernels = kernels_for(k.device)
    if kernels is None:
        results = (reference.k_sum(k), reference.v_amax(v))
    else:
        # Both belong to no grid: any layout would do.
        grid = Grid(SM89_SM120, b, k.shape[1], h, d, 0, 1, k.shape[1])
        flat = torch.empty(grid.statistics_elems, dtype=torch.float32, device=k.device)
        kernels.statistics(None, k, v, grid, flat, kernels.scratch(grid, k.dtype), pdl=enable_pdl)
        results = (flat[: b * h * d].view(b, h, d), flat[b * h * d : 2 * b * h * d].view(b, h, d))
    if out is None:
        return results
    if not isinstance(out, tuple) or len(out) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"out must be a tuple of two tensors, got {type(out).__name__}")
    for target, value, name in zip(out, results, ("out[0]", "out[1]"), strict=True):
        _tensor(target, name, (b, h, d), torch.float32, k.device).copy_(value)
    return out


def q_grouped_amax(
    q: torch.Tensor, *, rank: int, world_size: int, layout: str | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Return max |Q| over this rank's rows of each Q group it touches, ``[B, H, slots(L, GQ)]`` fp32.

    Slots that are not used are 0; nothing is floored yet. Rows of padding are zero and can't raise a maximum.
    """
    found = find_layout(layout, check_operand(q, "q").device)
    grid = _grid(q, rank, world_size, found)
    kernels = kernels_for(q.device)
    if kernels is None:
        return reference.group_amax(q, grid, found.q_group)
    scratch = kernels.scratch(grid, q.dtype)
    kernels.statistics(q, None, None, grid, None, scratch, pdl=enable_pdl)
    return scratch.q_amax


def k_grouped_amax(
    k: torch.Tensor,
    k_mean_global: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    used_sequence: int | None = None,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Return max |K - mean| over this rank's live rows of each K group it touches, ``[B, H, slots(L, GK)]`` fp32.

    Rows of padding do not count, because they are ``|0 - mean|`` once the mean is taken off, which can be far larger
    than any live value. A group without live rows here has 1e-7; the specification leaves groups of padding alone as
    anything, so this is stricter. Slots that are not used are 0.

    Args:
        k: ``[B, L, H, D]``.
        k_mean_global: contiguous ``[B, H, D]`` in the dtype of `k`.
        rank: this rank.
        world_size: P.
        used_sequence: U; None is all rows.
        layout: None is ``"sage2_sm89_sm120"`` on every device: groups of 64 rows, as the specification has it.
        enable_pdl: see above.
    """
    grid = _grid(check_operand(k, "k"), rank, world_size, _cpu_layout(layout), used_sequence)
    b, _, h, d = k.shape
    mean = _tensor(k_mean_global, "k_mean_global", (b, h, d), k.dtype, k.device)
    kernels = kernels_for(k.device)
    if kernels is None:
        return _k_amax(reference.group_minmax(k, grid), mean, grid)
    scratch = kernels.scratch(grid, k.dtype)
    kernels.statistics(None, k, None, grid, None, scratch, pdl=enable_pdl)
    out = torch.empty(b, h, grid.k_slots, dtype=torch.float32, device=k.device)
    kernels.k_grouped_amax(mean, scratch, grid, out, pdl=enable_pdl)
    return out


def _k_amax(minmax: torch.Tensor, mean: torch.Tensor, grid: Grid) -> torch.Tensor:
    amax = reference.centred_amax(minmax, mean.float().unsqueeze(2))
    amax[:, :, touched(grid.rank, grid.local_sequence, grid.layout.k_group) :] = 0.0
    return amax


def boundary_descriptors(
    grouped_amax: torch.Tensor, *, rank: int, local_sequence: int, world_size: int, group: int
) -> torch.Tensor:
    """Return the slots of this rank's first and last group, ``[B, H, slots] -> [B, H, 2]`` fp32."""
    _grouped(grouped_amax, local_sequence, group)
    mine, _ = _rank(rank, world_size)
    return reference.boundary_descriptors(grouped_amax, mine, local_sequence, group)


def _grouped(x: object, local_sequence: object, group: object) -> torch.Tensor:
    count = slots(local_sequence, group)  # type: ignore[arg-type]  # checked there
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"grouped_amax must be a torch.Tensor, got {type(x).__name__}")
    if x.dim() != 3 or x.shape[2] != count or x.dtype != torch.float32:
        raise ArgumentValueError(
            f"grouped_amax must be float32 [B, H, {count}] for {local_sequence} rows in groups of {group}, got "
            f"{x.dtype} {list(x.shape)}"
        )
    return x


def merge_boundary_amax(
    grouped_amax: torch.Tensor,
    gathered_descriptors: torch.Tensor,
    *,
    rank: int,
    local_sequence: int,
    world_size: int,
    group: int,
) -> torch.Tensor:
    """Set this rank's boundary slots to the maximum over all ranks that touch the group.

    Args:
        grouped_amax: fp32 ``[B, H, slots(L, group)]``, updated in place.
        gathered_descriptors: all ranks' `boundary_descriptors`, fp32 ``[P, B, H, 2]``.
        rank: this rank.
        local_sequence: L.
        world_size: P.
        group: rows of a group.

    Returns:
        `grouped_amax`.
    """
    x = _grouped(grouped_amax, local_sequence, group)
    mine, size = _rank(rank, world_size)
    _tensor(
        gathered_descriptors,
        "gathered_descriptors",
        (size, x.shape[0], x.shape[1], 2),
        torch.float32,
        x.device,
        contiguous=False,
    )
    return reference.merge_boundary(x, gathered_descriptors, mine, local_sequence, size, group)


def k_boundary_minmax(
    k: torch.Tensor, *, rank: int, world_size: int, used_sequence: int | None = None, layout: str | None = None
) -> torch.Tensor:
    """Return the smallest and largest live K by channel in this rank's first and last group, ``[B, H, 2, 2, D]``.

    Dimension 2 is first or last group, dimension 3 minimum or maximum. Without live rows: (+inf, -inf). fp32.
    """
    found = find_layout(layout, check_operand(k, "k").device)
    grid = _grid(k, rank, world_size, found, used_sequence)
    return reference.boundary_descriptors(
        reference.group_minmax(k, grid), grid.rank, grid.local_sequence, found.k_group
    )


def derive_k_boundary_amax(
    grouped_amax: torch.Tensor,
    gathered_minmax: torch.Tensor,
    k_mean_global: torch.Tensor,
    *,
    rank: int,
    local_sequence: int,
    world_size: int,
    layout: str | None = None,
) -> torch.Tensor:
    """Set this rank's K boundary slots to what all ranks that touch the group would have measured together.

    ``max over ranks of max(1e-7, max_d max(RN(max_d - m_d), RN(m_d - min_d)))``, which equals the maximum of
    ``|RN(k - m)|`` bit for bit, because rounding is monotone and symmetric. So one gather of raw extremes, before the
    mean is known, replaces a second gather after it.

    Args:
        grouped_amax: fp32 ``[B, H, slots(L, GK)]``, updated in place.
        gathered_minmax: all ranks' `k_boundary_minmax`, fp32 ``[P, B, H, 2, 2, D]``.
        k_mean_global: contiguous ``[B, H, D]`` in the input dtype.
        rank: this rank.
        local_sequence: L.
        world_size: P.
        layout: None is ``"sage2_sm89_sm120"`` on every device, as the specification has it.

    Returns:
        `grouped_amax`.
    """
    group = _cpu_layout(layout).k_group
    x = _grouped(grouped_amax, local_sequence, group)
    mine, size = _rank(rank, world_size)
    mean = _mean(k_mean_global, x)
    shape = (size, x.shape[0], x.shape[1], 2, 2, mean.shape[2])
    _tensor(gathered_minmax, "gathered_minmax", shape, torch.float32, x.device, contiguous=False)
    return reference.derive_boundary(x, gathered_minmax, mean, mine, local_sequence, size, group)


def _mean(mean: object, x: torch.Tensor) -> torch.Tensor:
    if not isinstance(mean, torch.Tensor):
        raise ArgumentTypeError(f"k_mean_global must be a torch.Tensor, got {type(mean).__name__}")
    if mean.dim() != 3 or mean.shape[:2] != x.shape[:2] or mean.dtype not in DTYPES:
        raise ArgumentValueError(
            f"k_mean_global must be float16 or bfloat16 [{x.shape[0]}, {x.shape[1]}, D], got {mean.dtype} "
            f"{list(mean.shape)}"
        )
    return mean


@dataclass(frozen=True)
class TorchPartials:
    """What stays of one rank's statistics where PyTorch computed them.

    Attributes:
        q_amax: `q_grouped_amax`, ``[B, H, slots(L, GQ)]``.
        k_minmax: smallest and largest live K of every group here, ``[B, H, slots(L, GK), 2, D]``, from which every
            group's amax follows without reading K again.
    """

    q_amax: torch.Tensor
    k_minmax: torch.Tensor


@dataclass(frozen=True)
class LocalStatistics:
    """What `local_stats` keeps on this rank for `finalize_stats`.

    Attributes:
        grid: this rank's place.
        dtype: of the inputs.
        partials: by group; the kernels' have a form of their own.
    """

    grid: Grid
    dtype: torch.dtype
    partials: TorchPartials | Scratch


@dataclass(frozen=True)
class FinalStatistics:
    """What quantization needs besides the inputs; equal on all ranks where ranks share it.

    Attributes:
        grid: this rank's place.
        k_mean_global: ``[B, H, D]`` in the input dtype.
        q_amax: ``[B, H, slots(L, GQ)]`` fp32, floored at 1e-7 where used, 0 elsewhere.
        k_amax: ``[B, H, slots(L, GK)]`` fp32, likewise.
        v_scale: ``[B, H, D]`` fp32, of all heads.
    """

    grid: Grid
    k_mean_global: torch.Tensor
    q_amax: torch.Tensor
    k_amax: torch.Tensor
    v_scale: torch.Tensor


def local_stats(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    used_sequence: int | None = None,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> tuple[torch.Tensor, LocalStatistics]:
    """Return everything that one gather must carry, and what stays here.

    Args:
        q: ``[B, L, H, D]``; rows from `used_sequence` on (globally) are zero.
        k: likewise.
        v: likewise.
        rank: this rank.
        world_size: P; H must be divisible by it.
        used_sequence: U; None is all rows.
        layout: see above.
        enable_pdl: see above.

    Returns:
        The flat fp32 statistics ``[B * H * (6 * D + 2)]``: k_sum ``[B, H, D]``, v_amax ``[B, H, D]``, the Q boundary
        maxima ``[B, H, 2]`` and the K boundary extremes ``[B, H, 2, 2, D]``; and the context for `finalize_stats`.
    """
    grid = _qkv_grid(q, k, v, rank, world_size, used_sequence, layout)
    flat = torch.empty(grid.statistics_elems, dtype=torch.float32, device=q.device)
    kernels = kernels_for(q.device, grid.world_size)
    if kernels is None:
        return flat, torch_statistics(q, k, v, grid, flat)
    scratch = kernels.scratch(grid, q.dtype)
    kernels.statistics(q, k, v, grid, flat, scratch, pdl=enable_pdl)
    return flat, LocalStatistics(grid, q.dtype, scratch)


def _qkv_grid(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rank: int, size: int, used: int | None, layout: str | None
) -> Grid:
    check_operand(q, "q")
    _same(check_operand(k, "k"), "k", q, "q")
    _same(check_operand(v, "v"), "v", q, "q")
    return _grid(q, rank, size, find_layout(layout, q.device), used)


def torch_statistics(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grid: Grid, flat: torch.Tensor
) -> LocalStatistics:
    """Write the flat statistics of checked operands into `flat` and return what stays here."""
    rows, layout = grid.local_sequence, grid.layout
    q_amax = reference.group_amax(q, grid, layout.q_group)
    k_minmax = reference.group_minmax(k, grid)
    parts = (
        reference.k_sum(k),
        reference.v_amax(v),
        reference.boundary_descriptors(q_amax, grid.rank, rows, layout.q_group),
        reference.boundary_descriptors(k_minmax, grid.rank, rows, layout.k_group),
    )
    torch.cat([part.flatten() for part in parts], out=flat)
    return LocalStatistics(grid, q.dtype, TorchPartials(q_amax, k_minmax))


def finalize_stats(
    gathered: torch.Tensor, ctx: LocalStatistics, k: torch.Tensor, *, enable_pdl: bool | None = None
) -> FinalStatistics:
    """Turn all ranks' statistics into what quantization needs. The same on every rank, bit for bit.

    Args:
        gathered: fp32 ``[P, B * H * (6 * D + 2)]``, in rank order.
        ctx: of this rank, from `local_stats`.
        k: this rank's K, which must be the one that `ctx` was made from; its values are in `ctx` already.
        enable_pdl: see above.
    """
    if not isinstance(ctx, LocalStatistics):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"ctx must come from local_stats, got {type(ctx).__name__}")
    grid = ctx.grid
    if tuple(check_operand(k, "k").shape) != grid.shape or k.dtype != ctx.dtype:
        raise ArgumentValueError(
            f"k must be the {ctx.dtype} {list(grid.shape)} that ctx was made from, got {k.dtype} {list(k.shape)}"
        )
    _tensor(gathered, "gathered", (grid.world_size, grid.statistics_elems), torch.float32, k.device)
    if isinstance(ctx.partials, TorchPartials):
        return torch_final(gathered, ctx)
    kernels = kernels_for(k.device, grid.world_size)
    assert kernels is not None  # they made the partials
    final = kernels.final(grid, ctx.dtype)
    kernels.finalize(gathered, ctx.partials, grid, final, pdl=enable_pdl)
    return FinalStatistics(grid, *final)


def torch_final(gathered: torch.Tensor, ctx: LocalStatistics) -> FinalStatistics:
    """Finalize checked statistics."""
    grid, partials = ctx.grid, ctx.partials
    assert isinstance(partials, TorchPartials)
    parts: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in grid.statistics:
        count = torch.Size(shape).numel()
        parts[name] = gathered[:, start : start + count].unflatten(1, shape)
        start += count
    rows, rank, size, layout = grid.local_sequence, grid.rank, grid.world_size, grid.layout
    mean = reference.final_mean(parts["k_sum"], grid.used_sequence, ctx.dtype)
    v_scale = reference.final_v_scale(parts["v_amax"].amax(dim=0), layout.v_max)
    q_amax = partials.q_amax.clone()
    reference.merge_boundary(q_amax, parts["q_desc"], rank, rows, size, layout.q_group)
    q_amax[:, :, : touched(rank, rows, layout.q_group)].clamp_(min=EPS)
    k_amax = _k_amax(partials.k_minmax, mean, grid)
    reference.derive_boundary(k_amax, parts["k_minmax"], mean, rank, rows, size, layout.k_group)
    return FinalStatistics(grid, mean, q_amax, k_amax, v_scale)


# Quantization and payload


def zero_scale_and_padding(send_u8: torch.Tensor, spec: PayloadSpec) -> torch.Tensor:
    """Zero every scale slot, the gaps and the tail of ``send_u8[P, chunk_bytes]``, in place; return it."""
    _payload(send_u8, "send_u8", spec)[:, spec.q_scale_offset :] = 0
    return send_u8


def quant_q_into_payload(
    q: torch.Tensor,
    q_amax_final: torch.Tensor,
    send_u8: torch.Tensor,
    spec: PayloadSpec,
    *,
    rank: int,
    world_size: int,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Quantize Q into the payload: its section and its scales, of every destination.

    Args:
        q: ``[B, L, H, D]``.
        q_amax_final: final maxima, fp32 ``[B, H, slots(L, GQ)]``, at least 1e-7 where used and 0 elsewhere.
        send_u8: ``[P, chunk_bytes]``, destination-major, updated in place.
        spec: of the payload.
        rank: this rank.
        world_size: P.
        layout: see above.
        enable_pdl: see above.

    Returns:
        `send_u8`.
    """
    grid = _grid(check_operand(q, "q"), rank, world_size, find_layout(layout, q.device))
    _matches(q, grid, spec)
    b, _, h, _ = q.shape
    amax = _tensor(q_amax_final, "q_amax_final", (b, h, grid.q_slots), torch.float32, q.device)
    send = _payload(send_u8, "send_u8", spec, q.device)
    kernels = kernels_for(q.device, grid.world_size)
    if kernels is None:
        _write_q(q, amax, send, spec, grid)
    else:
        kernels.quant_pack(q, None, None, (None, amax, None, None), grid, chunk_addresses(send), pdl=enable_pdl)
    return send_u8


def _write_q(q: torch.Tensor, amax: torch.Tensor, send: torch.Tensor, spec: PayloadSpec, grid: Grid) -> None:
    parts = reference.sections(send, spec)
    send[:, spec.q_scale_offset : spec.k_scale_offset] = 0  # the gap behind the scales
    parts.q.copy_(reference.by_destination(reference.quantize_q(q, amax, grid), grid.world_size, 2))
    parts.q_scale.copy_(reference.by_destination(reference.scale_of(amax), grid.world_size, 1))


def quant_kv_into_payload(
    k: torch.Tensor,
    v: torch.Tensor,
    k_mean_global: torch.Tensor,
    k_amax_final: torch.Tensor,
    v_scale_global: torch.Tensor,
    send_u8: torch.Tensor,
    spec: PayloadSpec,
    *,
    rank: int,
    world_size: int,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Quantize K and V into the payload: their sections and the K scales, of every destination.

    Args:
        k: ``[B, L, H, D]``.
        v: ``[B, L, H, D]``.
        k_mean_global: contiguous ``[B, H, D]`` in the dtype of `k`.
        k_amax_final: final maxima, fp32 ``[B, H, slots(L, GK)]``, at least 1e-7 where used and 0 elsewhere.
        v_scale_global: fp32 ``[B, H, D]``.
        send_u8: ``[P, chunk_bytes]``, destination-major, updated in place.
        spec: of the payload.
        rank: this rank.
        world_size: P.
        layout: see above.
        enable_pdl: see above.

    Returns:
        `send_u8`.
    """
    _same(check_operand(v, "v"), "v", check_operand(k, "k"), "k")
    grid = _grid(k, rank, world_size, find_layout(layout, k.device))
    _matches(k, grid, spec)
    mean, amax, scale = _kv_statistics(k, k_mean_global, k_amax_final, v_scale_global, grid)
    send = _payload(send_u8, "send_u8", spec, k.device)
    kernels = kernels_for(k.device, grid.world_size)
    if kernels is None:
        _write_kv(k, v, mean, amax, scale, send, spec, grid)
    else:
        kernels.quant_pack(None, k, v, (mean, None, amax, scale), grid, chunk_addresses(send), pdl=enable_pdl)
    return send_u8


def _kv_statistics(
    k: torch.Tensor, mean: object, amax: object, scale: object, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    b, _, h, d = grid.shape
    return (
        _tensor(mean, "k_mean_global", (b, h, d), k.dtype, k.device),
        _tensor(amax, "k_amax_final", (b, h, grid.k_slots), torch.float32, k.device),
        _tensor(scale, "v_scale_global", (b, h, d), torch.float32, k.device),
    )


def _write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    mean: torch.Tensor,
    amax: torch.Tensor,
    scale: torch.Tensor,
    send: torch.Tensor,
    spec: PayloadSpec,
    grid: Grid,
) -> None:
    size = grid.world_size
    parts = reference.sections(send, spec)
    send[:, spec.k_scale_offset :] = 0  # the tail
    parts.k.copy_(reference.by_destination(reference.quantize_k(k, mean, amax, grid), size, 2))
    parts.v.copy_(reference.by_destination(reference.quantize_v(v, scale, grid.layout.v_max), size, 2))
    parts.k_scale.copy_(reference.by_destination(reference.scale_of(amax), size, 1))


def quant_qkv_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_mean_global: torch.Tensor,
    q_amax_final: torch.Tensor,
    k_amax_final: torch.Tensor,
    v_scale_global: torch.Tensor,
    *,
    rank: int,
    world_size: int,
    out: torch.Tensor | None = None,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Quantize Q, K and V into a payload, ``uint8 [P, chunk_bytes]``, destination-major. Every byte is written.

    Args as in `quant_q_into_payload` and `quant_kv_into_payload`; `out` is a payload to write instead of a new one.
    """
    grid = _qkv_grid(q, k, v, rank, world_size, None, layout)
    b, _, h, _ = grid.shape
    amax = _tensor(q_amax_final, "q_amax_final", (b, h, grid.q_slots), torch.float32, q.device)
    mean, k_amax, scale = _kv_statistics(k, k_mean_global, k_amax_final, v_scale_global, grid)
    return quant_and_pack(q, k, v, FinalStatistics(grid, mean, amax, k_amax, scale), out=out, enable_pdl=enable_pdl)


def quant_and_pack(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    stats: FinalStatistics,
    *,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Quantize Q, K and V into a payload by the record of `finalize_stats`; else as `quant_qkv_pack`."""
    if not isinstance(stats, FinalStatistics):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"stats must come from finalize_stats, got {type(stats).__name__}")
    grid = stats.grid
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        if tuple(check_operand(x, name).shape) != grid.shape or x.dtype != stats.k_mean_global.dtype:
            raise ArgumentValueError(
                f"{name} must be {stats.k_mean_global.dtype} {list(grid.shape)} as the statistics are, got {x.dtype} "
                f"{list(x.shape)}"
            )
        if x.device != stats.v_scale.device:
            raise ArgumentValueError(f"{name} is on {x.device}, the statistics are on {stats.v_scale.device}")
    spec = grid.payload
    check_elements(spec)
    if out is None:
        out = torch.empty(spec.world_size, spec.chunk_bytes, dtype=torch.uint8, device=q.device)
    send = _payload(out, "out", spec, q.device)
    kernels = kernels_for(q.device, grid.world_size)
    if kernels is None:
        return torch_pack(q, k, v, stats, send)
    kernels.quant_pack(q, k, v, _final(stats), grid, chunk_addresses(send), pdl=enable_pdl)
    return send


def _final(stats: FinalStatistics) -> tuple[torch.Tensor, ...]:
    return stats.k_mean_global, stats.q_amax, stats.k_amax, stats.v_scale


def chunk_addresses(payload: torch.Tensor) -> tuple[int, ...]:
    """Return the address of every chunk of a contiguous ``payload[P, chunk_bytes]``."""
    start, pitch = payload.data_ptr(), payload.shape[1]
    return tuple(start + rank * pitch for rank in range(payload.shape[0]))


def torch_pack(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stats: FinalStatistics, send: torch.Tensor
) -> torch.Tensor:
    """Write the payload of checked operands into `send`, every byte of it; return `send`."""
    grid, spec = stats.grid, stats.grid.payload
    _write_q(q, stats.q_amax, send, spec, grid)
    _write_kv(k, v, stats.k_mean_global, stats.k_amax, stats.v_scale, send, spec, grid)
    return send


def quant_v_fp8_with_scale(
    v: torch.Tensor,
    v_scale_global: torch.Tensor,
    *,
    layout: str | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Quantize V, ``[B, L, H, D]``, by its scales ``[B, H, D]`` to E4M3 bit patterns ``uint8 [B, L, H, D]``.

    Rows stay in their order. A channel whose scale is 0, or too small for a finite reciprocal, becomes zeros.
    """
    found = find_layout(layout, check_operand(v, "v").device)
    b, _, h, d = v.shape
    scale = _tensor(v_scale_global, "v_scale_global", (b, h, d), torch.float32, v.device)
    return reference.quantize_v(v, scale, found.v_max)


# Receiving


def unpack_for_sage(
    recv_u8: torch.Tensor,
    *,
    batch_size: int,
    local_sequence: int,
    local_heads: int,
    head_dim: int,
    world_size: int,
    aligned: bool | None = None,
    scale_sequence: int | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    enable_pdl: bool | None = None,
    layout: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Turn the chunks of all sources into what the consumer reads.

    Args:
        recv_u8: contiguous uint8 ``[P, chunk_bytes]``, source-major.
        batch_size: B.
        local_sequence: L, with its padding.
        local_heads: h of this destination.
        head_dim: D, 64 or 128.
        world_size: P.
        aligned: True also asserts ``L % 128 == 0``; False and None take any L.
        scale_sequence: U, for scales of exactly the width that the consumer derives from U rows; None is S.
        out: five contiguous tensors of the shapes and dtypes of the result to write instead of new ones.
        enable_pdl: see above.
        layout: None is ``"sage2_sm89_sm120"`` on every device, as the specification has it.

    Returns:
        INT8 q and k ``[B, S, h, D]``; E4M3 v ``[B, D, h, ceil(S / VB) * VB]`` in the consumer's order of rows, zero
        beyond S; fp32 scales ``[B, h, width]``. Scale slots beyond the last row hold the scale of an empty group.
        The scale of V is not part of a payload.
    """
    spec = _spec(_cpu_layout(layout), batch_size, local_sequence, local_heads, head_dim, world_size)
    received = _payload(recv_u8, "recv_u8", spec)
    if aligned is not None and not isinstance(aligned, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"aligned must be a bool or None, got {type(aligned).__name__}")
    if aligned and local_sequence % 128:
        raise ArgumentValueError(f"aligned=True needs a local_sequence divisible by 128, got {local_sequence}")
    used = check_used(scale_sequence, spec.global_sequence)
    grid = Grid(spec.layout, batch_size, local_sequence, local_heads * world_size, head_dim, 0, world_size, used)
    shapes = grid.output_shapes(used)[:5]
    dtypes = reference.output_dtypes()[:5]
    if out is None:
        made = [torch.empty(s, dtype=d, device=received.device) for s, d in zip(shapes, dtypes, strict=True)]
        out = (made[0], made[1], made[2], made[3], made[4])
    elif not isinstance(out, tuple) or len(out) != 5:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"out must be a tuple of five tensors, got {type(out).__name__}")
    for i, (tensor, shape, dtype) in enumerate(zip(out, shapes, dtypes, strict=True)):
        _tensor(tensor, f"out[{i}]", shape, dtype, received.device)
    kernels = kernels_for(received.device)
    if kernels is None:
        torch_unpack(received, grid, out)
        return out
    for i, tensor in enumerate(out[:3]):
        if tensor.data_ptr() % 16:
            raise ArgumentValueError(f"out[{i}] must begin at a 16-byte aligned address, got {tensor.data_ptr():#x}")
    kernels.unpack(received, grid, out, pdl=enable_pdl)
    return out


def torch_unpack(received: torch.Tensor, grid: Grid, outs: Sequence[torch.Tensor]) -> None:
    """Write the five checked outputs; `grid.used_sequence` gives the scales' widths, `grid.rank` is not looked at."""
    q8, k8, v8, q_scale, k_scale = outs[:5]
    widths = grid.layout.scale_widths(grid.used_sequence)
    reference.unpack(received, grid.payload, widths, (q8, k8, v8.view(torch.uint8), q_scale, k_scale))


def verify_duplicate_scale_slots(
    recv_u8: torch.Tensor,
    *,
    batch_size: int,
    local_sequence: int,
    local_heads: int,
    head_dim: int,
    world_size: int,
    layout: str | None = None,
) -> bool:
    """Return whether every scale that several sources carry has the same bits from all of them. For tests.

    It must be asked on the layout's own grid: on another one it compares slots of different groups. Arguments as in
    `unpack_for_sage`; `layout` None is that of the tensor's device.
    """
    device = getattr(recv_u8, "device", torch.device("cpu"))
    spec = _spec(find_layout(layout, device), batch_size, local_sequence, local_heads, head_dim, world_size)
    return reference.duplicates_equal(_payload(recv_u8, "recv_u8", spec), spec)
