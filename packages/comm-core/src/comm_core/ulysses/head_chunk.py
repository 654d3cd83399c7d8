"""Layout transforms of head bands on one rank: the local halves of the head-chunk calls."""

from __future__ import annotations

import torch

from comm_core._dtypes import check_dtype
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.ulysses.validation import (
    MAX_BYTES,
    Limits,
    Shape,
    check_band,
    check_disjoint,
    check_operand,
    check_out,
    check_strided,
    positive_int,
)

__all__ = ["check_qkv", "merge_ulysses_output_head_chunk", "pack_ulysses_qkv_head_chunk"]


def check_qkv(query: object, key: object, value: object, limits: Limits, dtype: torch.dtype) -> Shape:
    """Check three operands of one shape, each with its own positive strides, and return the shape."""
    shape = check_strided(query, "query", limits, dtype)
    for operand, name in ((key, "key"), (value, "value")):
        other = check_strided(operand, name, limits, dtype)
        if other != shape:
            raise ArgumentValueError(
                f"{name} must have the shape of query, {shape}, got {other}: grouped-query attention with fewer K/V "
                "heads is not supported by the head-chunk calls; repeat the K/V heads, or scatter Q, K and V apart"
            )
    return shape


def check_heads(heads: int, world_size: int, name: str) -> int:
    """Return the heads of a rank, if `heads` can be split evenly."""
    if heads % world_size:
        raise ArgumentValueError(
            f"{name} has {heads} heads, which {world_size} ranks can't share evenly; pad the heads to "
            f"{-(-heads // world_size) * world_size}, or use a group whose size divides {heads}"
        )
    return heads // world_size


def _limits_of(x: object, name: str) -> Limits:
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return Limits(x.device, check_dtype(x.dtype, f"dtype of {name}"), MAX_BYTES)


def pack_ulysses_qkv_head_chunk(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    world_size: int,
    head_offset: int,
    head_count: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack one band of every rank's heads of Q, K and V, fused in the last dimension.

    The result can be passed to `UlyssesCommunicator.scatter_heads`, which makes ``[B, S_global, head_count, 3 * D]``
    of it. Local; on the current stream; allocates only where `out` is None.

    Args:
        query: ``[B, S_local, H, D]``, any positive strides; ``H % world_size == 0``.
        key: like `query`, with strides of its own.
        value: like `query`, with strides of its own.
        world_size: number of Ulysses ranks.
        head_offset: where the band begins within each rank's ``H / world_size`` heads.
        head_count: heads of the band.
        out: contiguous ``[B, S_local, world_size * head_count, 3 * D]``; must not overlap an operand.

    Returns:
        `out`, or a new tensor of its shape.

    Raises:
        ArgumentTypeError: an operand is no tensor, or an int is none.
        ArgumentValueError: anything else does not fit.
    """
    limits = _limits_of(query, "query")
    b, s, h, d = check_qkv(query, key, value, limits, limits.dtype)
    ranks = positive_int(world_size, "world_size")
    local = check_heads(h, ranks, "query")
    offset, count = check_band(head_offset, head_count, local)
    shape = (b, s, ranks * count, 3 * d)
    if out is None:
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
    else:
        check_out(out, shape, limits, limits.dtype)
        for operand, name in ((query, "query"), (key, "key"), (value, "value")):
            check_disjoint(out, "out", operand, name)
    target = out.view(b, s, ranks, count, 3, d)
    for part, operand in enumerate((query, key, value)):
        heads = operand.view(b, s, ranks, local, d)
        target[:, :, :, :, part].copy_(heads[:, :, :, offset : offset + count])
    return out


def merge_ulysses_output_head_chunk(
    received: torch.Tensor, *, world_size: int, local_heads: int, head_offset: int, out: torch.Tensor
) -> torch.Tensor:
    """Write one gathered band of output heads into the full output.

    Local; on the current stream; allocates nothing. Elements outside the band keep their values.

    Args:
        received: contiguous ``[B, S_local, world_size * head_count, D]``.
        world_size: number of Ulysses ranks.
        local_heads: heads that each rank contributes to the full output.
        head_offset: where the band begins within them.
        out: contiguous ``[B, S_local, world_size * local_heads, D]``; must not overlap `received`.

    Returns:
        `out`.

    Raises:
        ArgumentTypeError: `received` or `out` is no tensor, or an int is none.
        ArgumentValueError: anything else does not fit.
    """
    limits = _limits_of(received, "received")
    b, s, heads, d = check_operand(received, "received", limits, limits.dtype)
    ranks = positive_int(world_size, "world_size")
    local = positive_int(local_heads, "local_heads")
    offset, count = check_band(head_offset, check_heads(heads, ranks, "received"), local)
    check_out(out, (b, s, ranks * local, d), limits, limits.dtype)
    check_disjoint(out, "out", received, "received")
    target = out.view(b, s, ranks, local, d)
    target[:, :, :, offset : offset + count].copy_(received.view(b, s, ranks, count, d))
    return out
