"""The Ulysses operations as plans. Pure functions of the geometry; written once for every transport.

With ``W`` ranks, ``H_local = H / W`` and ``S_global = S_local * W``:

- scatter_heads: ``y_r[b, j * S_local + s, h, d] = x_j[b, s, r * H_local + h, d]``;
- gather_heads is its inverse;
- exchange_chunks: ``y_r[j] = x_j[r]``;
- the head-chunk calls move one band of heads: scatter fuses Q, K and V in the last dimension, gather writes the band
  into a full output.

Every builder takes shapes in elements and returns byte offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from comm_core.transport.plan import Copy, Level, Plan, collapse

__all__ = [
    "exchange_chunks",
    "gather_heads",
    "gather_output_head_chunk",
    "scatter_heads",
    "scatter_qkv_head_chunk",
]

_CACHE = 512
"""Plans kept a builder; a serving process uses a handful of geometries, and a plan is a few kilobytes."""

Strides = tuple[int, int, int, int]


def _contiguous(shape: Sequence[int]) -> Strides:
    _, s, h, d = shape
    return (s * h * d, h * d, d, 1)


def _copy(peer: int, source: int, source_at: int, target_at: int, nest: Sequence[Level], itemsize: int) -> Copy:
    """Return a copy from offsets and pitches in elements; the innermost elements become the row."""
    scaled = [Level(repeat, from_ * itemsize, to * itemsize) for repeat, from_, to in nest]
    levels, row_bytes = collapse(scaled, itemsize)
    return Copy(peer, source, source_at * itemsize, target_at * itemsize, levels, row_bytes)


def _plan(
    operation: str,
    rank: int,
    world_size: int,
    pair: Callable[[int, int, bool], list[Copy]],
    *,
    source_count: int,
    target_bytes: int,
    covers_target: bool,
    batch: int,
) -> Plan:
    """Build the plan of `rank` from `pair(sender, receiver, canonical)`, the copies between two ranks.

    `pair` names the receiver as peer; `canonical` asks for the source side of a contiguous source, which is all that
    a receiver can know of its senders.
    """
    sends = tuple(copy for peer in range(world_size) for copy in pair(rank, peer, False))
    receives = tuple(copy._replace(peer=sender) for sender in range(world_size) for copy in pair(sender, rank, True))
    return Plan(operation, rank, world_size, sends, receives, source_count, target_bytes, covers_target, batch)


@lru_cache(_CACHE)
def scatter_heads(shape: tuple[int, int, int, int], itemsize: int, rank: int, world_size: int) -> Plan:
    """Plan ``[B, S_local, H, D] -> [B, S_global, H_local, D]`` of a contiguous source.

    Args:
        shape: of this rank's operand, ``(B, S_local, H, D)``; ``H % world_size == 0``.
        itemsize: bytes of an element.
        rank: this rank.
        world_size: ranks.
    """
    b, s, h, d = shape
    local = h // world_size

    def pair(sender: int, receiver: int, canonical: bool) -> list[Copy]:
        nest = (
            Level(b, s * h * d, world_size * s * local * d),
            Level(s, h * d, local * d),
            Level(local * d, 1, 1),
        )
        return [_copy(receiver, 0, receiver * local * d, sender * s * local * d, nest, itemsize)]

    return _plan(
        "scatter_heads",
        rank,
        world_size,
        pair,
        source_count=1,
        target_bytes=b * s * h * d * itemsize,
        covers_target=True,
        batch=b,
    )


@lru_cache(_CACHE)
def gather_heads(shape: tuple[int, int, int, int], itemsize: int, rank: int, world_size: int) -> Plan:
    """Plan ``[B, S_global, H_local, D] -> [B, S_local, H, D]`` of a contiguous source.

    Args:
        shape: of this rank's operand, ``(B, S_global, H_local, D)``; ``S_global % world_size == 0``.
        itemsize: bytes of an element.
        rank: this rank.
        world_size: ranks.
    """
    return _gather(
        "gather_heads", shape, _contiguous(shape), itemsize, rank, world_size, local_heads=shape[2], head_offset=0
    )


@lru_cache(_CACHE)
def gather_output_head_chunk(
    shape: tuple[int, int, int, int],
    strides: Strides,
    itemsize: int,
    rank: int,
    world_size: int,
    *,
    local_heads: int,
    head_offset: int,
) -> Plan:
    """Plan one head band ``[B, S_global, head_count, D]`` into ``[B, S_local, W * local_heads, D]``.

    Args:
        shape: of this rank's operand.
        strides: of this rank's operand in elements; positive.
        itemsize: bytes of an element.
        rank: this rank.
        world_size: ranks.
        local_heads: heads that each rank owns in the full output.
        head_offset: where the band begins within them.
    """
    return _gather(
        "gather_output_head_chunk",
        shape,
        strides,
        itemsize,
        rank,
        world_size,
        local_heads=local_heads,
        head_offset=head_offset,
    )


def _gather(
    operation: str,
    shape: tuple[int, int, int, int],
    strides: Strides,
    itemsize: int,
    rank: int,
    world_size: int,
    *,
    local_heads: int,
    head_offset: int,
) -> Plan:
    b, s_global, count, d = shape
    s = s_global // world_size
    h = world_size * local_heads

    def pair(sender: int, receiver: int, canonical: bool) -> list[Copy]:
        sb, ss, sh, sd = _contiguous(shape) if canonical else strides
        nest = (
            Level(b, sb, s * h * d),
            Level(s, ss, h * d),
            Level(count, sh, d),
            Level(d, sd, 1),
        )
        target = (sender * local_heads + head_offset) * d
        return [_copy(receiver, 0, receiver * s * ss, target, nest, itemsize)]

    return _plan(
        operation,
        rank,
        world_size,
        pair,
        source_count=1,
        target_bytes=b * s * h * d * itemsize,
        covers_target=count == local_heads,
        batch=b,
    )


@lru_cache(_CACHE)
def exchange_chunks(chunk: int, itemsize: int, rank: int, world_size: int) -> Plan:
    """Plan ``[1, 1, W, chunk] -> [1, 1, W, chunk]``: chunk r goes to rank r and lands in slot `rank` there.

    Args:
        chunk: elements of one chunk.
        itemsize: bytes of an element.
        rank: this rank.
        world_size: ranks.
    """

    def pair(sender: int, receiver: int, canonical: bool) -> list[Copy]:
        return [_copy(receiver, 0, receiver * chunk, sender * chunk, (Level(chunk, 1, 1),), itemsize)]

    return _plan(
        "exchange_chunks",
        rank,
        world_size,
        pair,
        source_count=1,
        target_bytes=world_size * chunk * itemsize,
        covers_target=True,
        batch=0,
    )


@lru_cache(_CACHE)
def scatter_qkv_head_chunk(
    shape: tuple[int, int, int, int],
    strides: tuple[Strides, Strides, Strides],
    itemsize: int,
    rank: int,
    world_size: int,
    *,
    head_offset: int,
    head_count: int,
) -> Plan:
    """Plan one head band of Q, K and V into a fused ``[B, S_global, head_count, 3 * D]``.

    Args:
        shape: of each of this rank's operands, ``(B, S_local, H, D)``; ``H % world_size == 0``.
        strides: of this rank's Q, K and V in elements; positive.
        itemsize: bytes of an element.
        rank: this rank.
        world_size: ranks.
        head_offset: where the band begins within each rank's ``H / world_size`` heads.
        head_count: heads of the band.
    """
    b, s, h, d = shape
    local = h // world_size

    def pair(sender: int, receiver: int, canonical: bool) -> list[Copy]:
        copies: list[Copy] = []
        for part in range(3):
            sb, ss, sh, sd = _contiguous(shape) if canonical else strides[part]
            nest = (
                Level(b, sb, world_size * s * head_count * 3 * d),
                Level(s, ss, head_count * 3 * d),
                Level(head_count, sh, 3 * d),
                Level(d, sd, 1),
            )
            source = (receiver * local + head_offset) * sh
            target = sender * s * head_count * 3 * d + part * d
            copies.append(_copy(receiver, part, source, target, nest, itemsize))
        return copies

    return _plan(
        "scatter_qkv_head_chunk",
        rank,
        world_size,
        pair,
        source_count=3,
        target_bytes=b * world_size * s * head_count * 3 * d * itemsize,
        covers_target=True,
        batch=b,
    )
