"""What each Ulysses operation must return, written down once more with chunk and cat, in one process.

Every function takes the operands of all ranks, in rank order, and returns the results of all ranks. There is no plan,
no offset and no communication here, so that a mistake in those can't be in both. Data is moved as integers of the
element's size: the bits are what counts, and torch can't concatenate every dtype.

Shapes are those of the communicator: ``P`` ranks, ``B`` batch, ``S`` tokens (``L`` on one rank, ``S = P * L``), ``H``
heads (``h`` on one rank, ``H = P * h``), ``D`` the head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from comm_core.errors import ArgumentValueError

__all__ = [
    "DTYPES",
    "STRIDED_LAYOUTS",
    "Layout",
    "assert_same_bits",
    "bits",
    "exchange_chunks",
    "gather_heads",
    "gather_output_head_chunk",
    "make_input",
    "merge_output_head_chunk",
    "pack_qkv_head_chunk",
    "scatter_heads",
    "scatter_qkv_head_chunk",
]

DTYPES: tuple[torch.dtype, ...] = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint16,
    torch.int16,
    torch.float16,
    torch.bfloat16,
    torch.uint32,
    torch.int32,
    torch.float32,
)
"""Every dtype of 1, 2 or 4 bytes an element that holds plain numbers (torch's sub-byte and quantized ones don't)."""

Layout = Literal["fused", "transposed", "stepped"]

STRIDED_LAYOUTS: tuple[Layout, ...] = ("fused", "transposed", "stepped")
"""Ways in which a positive-strided operand can lie in memory; see `make_input`."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_ALPHABET = 256

# Bit patterns that code which computes instead of copying gets wrong: zeros of both signs, infinities, quiet and
# signalling NaNs with payloads, the smallest and largest subnormals, all ones.
_PATTERNS: dict[torch.dtype, tuple[int, ...]] = {
    torch.float16: (0x8000, 0x7C00, 0xFC00, 0x7E01, 0x7C01, 0xFDAB, 0x0001, 0x83FF, 0xFFFF),
    torch.bfloat16: (0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x7F81, 0xFFAB, 0x0001, 0x807F, 0xFFFF),
    torch.float32: (
        *(0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFABCDEF, 0x00000001, 0x807FFFFF),
        0xFFFFFFFF,
    ),
}


def bits(x: torch.Tensor) -> torch.Tensor:
    """Return a view of `x` as integers of the same size.

    Raises:
        ArgumentValueError: its elements are not of 1, 2 or 4 bytes.
    """
    integer = _INTEGERS.get(x.dtype.itemsize)
    if integer is None:
        raise ArgumentValueError(f"elements must have 1, 2 or 4 bytes, got {x.dtype}")
    return x.view(integer)


def _split(x: torch.Tensor, parts: int, dim: int) -> tuple[torch.Tensor, ...]:
    # torch.chunk returns fewer or uneven parts without a word.
    if x.shape[dim] % parts:
        raise ArgumentValueError(f"dimension {dim} of {tuple(x.shape)} can't be split evenly into {parts}")
    return torch.chunk(x, parts, dim=dim)


def scatter_heads(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[B, L, H, D]`` on each rank -> ``[B, S, h, D]``: rank r gets the r-th head slice of every token."""
    size = len(xs)
    slices = [_split(bits(x), size, 2) for x in xs]
    return [torch.cat([slices[s][r] for s in range(size)], dim=1).view(xs[0].dtype) for r in range(size)]


def gather_heads(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[B, S, h, D]`` on each rank -> ``[B, L, H, D]``: rank r gets all heads of the r-th slice of tokens."""
    size = len(xs)
    shards = [_split(bits(x), size, 1) for x in xs]
    return [torch.cat([shards[s][r] for s in range(size)], dim=2).view(xs[0].dtype) for r in range(size)]


def exchange_chunks(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``[1, 1, P, C]`` on each rank -> the same shape: slot s of rank r gets what rank s had in slot r."""
    size = len(xs)
    return [torch.stack([bits(xs[s])[:, :, r] for s in range(size)], dim=2).view(xs[0].dtype) for r in range(size)]


def pack_qkv_head_chunk(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, world_size: int, head_offset: int, head_count: int
) -> torch.Tensor:
    """Three times ``[B, L, H, D]`` -> ``[B, L, P * head_count, 3 * D]``: the same head band of every rank's slice."""
    parts: list[torch.Tensor] = []
    for slices in zip(*(_split(bits(x), world_size, 2) for x in (query, key, value)), strict=True):
        parts.append(torch.cat([part.narrow(2, head_offset, head_count) for part in slices], dim=3))
    return torch.cat(parts, dim=2).view(query.dtype)


def merge_output_head_chunk(
    received: torch.Tensor, out: torch.Tensor, *, world_size: int, local_heads: int, head_offset: int
) -> torch.Tensor:
    """``[B, L, P * head_count, D]`` -> a copy of `out` ``[B, L, P * local_heads, D]`` with that band replaced."""
    slices = [part.clone() for part in _split(bits(out), world_size, 2)]
    for part, band in zip(slices, _split(bits(received), world_size, 2), strict=True):
        if part.shape[2] != local_heads:
            raise ArgumentValueError(f"out has {part.shape[2]} heads a rank, expected {local_heads}")
        part[:, :, head_offset : head_offset + band.shape[2]] = band
    return torch.cat(slices, dim=2).view(out.dtype)


def scatter_qkv_head_chunk(
    queries: Sequence[torch.Tensor],
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    *,
    head_offset: int,
    head_count: int,
) -> list[torch.Tensor]:
    """Three times ``[B, L, H, D]`` on each rank -> ``[B, S, head_count, 3 * D]``: one band of rank r's heads."""
    size = len(queries)
    packed = [
        pack_qkv_head_chunk(q, k, v, world_size=size, head_offset=head_offset, head_count=head_count)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    return scatter_heads(packed)


def gather_output_head_chunk(
    xs: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], *, local_heads: int, head_offset: int
) -> list[torch.Tensor]:
    """``[B, S, head_count, D]`` on each rank -> copies of `outs` ``[B, L, P * local_heads, D]`` with that band."""
    return [
        merge_output_head_chunk(band, out, world_size=len(xs), local_heads=local_heads, head_offset=head_offset)
        for band, out in zip(gather_heads(xs), outs, strict=True)
    ]


def make_input(
    seed: int,
    rank: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    strided: bool | Layout = False,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return an operand that shows whether bits are moved unchanged, and to the right place.

    Every 256 bytes hold each byte value once, in an order that differs for every `seed` and `rank`; elements of the
    16- and 32-bit float formats also take the patterns that arithmetic does not keep (NaNs with payloads, signalling
    NaNs, -0, subnormals). Values of `torch.bool` are 0 and 1.

    Args:
        seed: chooses the data.
        rank: chooses the data as well, so that every rank can compute the input of every other.
        shape: of the operand.
        dtype: one of `DTYPES`.
        strided: False: contiguous. Else a view with positive strides and the same elements: ``"fused"``, one of
            three along a new dimension before the last two (a fused QKV projection; so is True); ``"transposed"``,
            dimensions 1 and 2 swapped in memory; ``"stepped"``, every second element of the last dimension. Memory
            between the elements is filled with other data.
        device: where to put it.
    """
    numel = math.prod(shape)
    generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)
    blocks = -(-numel * dtype.itemsize // _ALPHABET)
    order = torch.rand((blocks, _ALPHABET), generator=generator, dtype=torch.float64).argsort(dim=1)
    flat = order.to(torch.uint8).flatten()[: numel * dtype.itemsize].clone()
    if dtype == torch.bool:
        flat &= 1
    elements = flat.view(_INTEGERS[dtype.itemsize])
    patterns = _PATTERNS.get(dtype, ())
    if patterns and numel:
        # At most half of the elements, so that small operands still differ between ranks.
        places = torch.randperm(numel, generator=generator)[: min(numel // 2, len(patterns))]
        sign = 1 << (8 * dtype.itemsize - 1)
        signed = [(pattern ^ sign) - sign for pattern in patterns[: len(places)]]
        elements[places] = torch.tensor(signed, dtype=elements.dtype)
    return _lay_out(elements.view(tuple(shape)).to(device), strided).view(dtype)


def _lay_out(x: torch.Tensor, strided: bool | Layout) -> torch.Tensor:
    """Return a tensor equal to the contiguous integer tensor `x`, laid out as asked."""
    if strided is False:
        return x
    if strided is True or strided == "fused":
        place = max(x.dim() - 2, 0)
        view = torch.stack([~x, x, ~x], dim=place).select(place, 1)
    elif strided == "transposed":
        view = x.transpose(1, 2).contiguous().transpose(1, 2)
    else:
        view = torch.stack([x, ~x], dim=-1).select(-1, 0)
    return view


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "result") -> None:
    """Raise unless two tensors are equal in shape, dtype and every bit: NaN payloads and the sign of zero count.

    Raises:
        AssertionError: they differ; the text has the first index, the bits there, and how many elements differ.
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: expected {tuple(expected.shape)} {expected.dtype}, got {tuple(actual.shape)} {actual.dtype}"
        )
    a, b = bits(actual.detach()).cpu(), bits(expected.detach()).cpu()
    wrong = (a != b).nonzero()
    if len(wrong) == 0:
        return
    index = tuple(int(i) for i in wrong[0])
    mask, digits = (1 << 8 * actual.dtype.itemsize) - 1, 2 * actual.dtype.itemsize
    raise AssertionError(
        f"{what}: {len(wrong)} of {a.numel()} elements differ; the first at {index}: expected "
        f"0x{int(b[index]) & mask:0{digits}x} ({expected[index].item()!r}), got "
        f"0x{int(a[index]) & mask:0{digits}x} ({actual[index].item()!r})"
    )
