"""Capacity, algorithm and launch of the all-reduce kernels. Pure functions of what the group agreed on.

What travels is counted in vectors of 16 bytes. One shot: every rank's operand goes into a slot of every other rank's
buffer. Two shots: every rank owns a part of the operand, contributions to it come into slots of that size, and the
sums of all parts into a place for the whole operand. The device's side: ``include/comm_core/allreduce.cuh``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import NamedTuple, cast

from comm_core._json import Json, JsonObject

__all__ = [
    "FUSED_THREADS",
    "HALVES",
    "MAX_SHARED_BYTES",
    "PER_SM",
    "ROW_THREADS",
    "VECTOR_BYTES",
    "Encoding",
    "Launch",
    "Settings",
    "Shape",
    "capacity_bytes",
    "fits_a_block",
    "fused_launch",
    "groups_within_warps",
    "one_shot",
    "one_shot_limit",
    "plain_launch",
    "required_bytes",
    "row_threads",
    "shape_of",
    "shared_bytes",
    "whole_rows",
]

VECTOR_BYTES = 16
HALVES = 2
"""Calls fill the halves of a buffer in turn."""
_THREADS = (128, 256, 384)
"""Of a block without an epilogue. Twin of the last: include/comm_core/allreduce.cuh, kReduceThreads."""
FUSED_THREADS = 384
"""Of a block with an epilogue, at most. Twin: kFusedThreads."""
ROW_THREADS = 1024
"""Of a block that has whole rows, a vector for each thread, at most. Twin: kRowThreads."""
_SHORT_ROW = 512
"""Vectors of a row up to which a block is not slower than a cluster, however few rows there are."""
_FEW_BLOCKS = 4
"""Blocks of short rows to a multiprocessor, at most: more of them are no faster."""
PER_SM = 2
"""Blocks that fit a multiprocessor. Twin: kReduceBlocks."""
_TEAMS = (8, 4, 2)
"""Blocks that may share a row, where rows are few. Twin: include/comm_core/team.cuh, kTeamBlocks."""
MAX_SHARED_BYTES = 96 << 10
"""Shared memory of a block, which every architecture has."""
_SHARED_OF_TWO = 40 << 10
"""The same where two blocks are to fit a multiprocessor."""
_LARGE_BYTES = 6 << 20
"""Of an operand whose rows are shared by fewer blocks."""
_TRADE_BYTES = 960 << 10
"""What a link moves while the second shot's latency passes."""


class Encoding(IntEnum):
    """What the epilogue encodes to. Twin: include/comm_core/epilogue.cuh, Encoding."""

    NONE = 0
    FP8 = 1
    DYNAMIC_FP8 = 2
    GROUP_FP8 = 3
    NVFP4 = 4
    MXFP8 = 5


@dataclass(frozen=True)
class Settings:
    """How launches are made; equal on all ranks.

    Attributes:
        blocks: that are all on the device at once, two to a multiprocessor, whatever else the ranks run there. Of
            short whole rows there may be more (`whole_rows`).
        clusters: whether every rank's device has clusters.
        trade_bytes: see `one_shot_limit`.
        shared: whether ranks share a device. Then no block may need more than half a multiprocessor: one that needs
            all of it would wait for the smaller blocks of other ranks to leave, and they for it.
    """

    blocks: int
    clusters: bool = False
    trade_bytes: int = _TRADE_BYTES
    shared: bool = False

    @property
    def sms(self) -> int:
        """Multiprocessors."""
        return max(1, self.blocks // PER_SM)

    def to_json(self) -> JsonObject:
        """Return the JSON form."""
        return cast("JsonObject", asdict(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Settings:
        """Read the JSON form."""
        return cls(**{field.name: value[field.name] for field in fields(cls)})  # pyright: ignore[reportArgumentType]


class Shape(NamedTuple):
    """An operand in vectors.

    Attributes:
        vectors: of the whole operand.
        tail_bytes: of the last one.
        slot_vectors: of a slot.
        two_shots: which algorithm.
    """

    vectors: int
    tail_bytes: int
    slot_vectors: int
    two_shots: bool

    def used_bytes(self, world_size: int) -> int:
        """Return the bytes of half a buffer that a call fills."""
        return VECTOR_BYTES * ((world_size - 1) * self.slot_vectors + (self.vectors if self.two_shots else 0))


class Launch(NamedTuple):
    """A launch.

    Attributes:
        blocks: of the grid.
        threads: of a block.
        team: blocks that share a row, with an epilogue.
        shared_bytes: of a block.
    """

    blocks: int
    threads: int
    team: int = 1
    shared_bytes: int = 0


# Algorithm and capacity


def one_shot_limit(world_size: int, trade_bytes: int = _TRADE_BYTES) -> int | None:
    """Return the bytes of the largest operand for which one shot is chosen; None for two ranks: any size.

    One shot moves ``W - 1`` operands to each rank, two shots ``2 (W - 1) / W``, with one more trip across the link.
    The first is faster while what it moves more takes less time than that trip.

    Args:
        world_size: W.
        trade_bytes: what a link moves in that time.
    """
    if world_size <= 2:
        return None
    return trade_bytes * world_size // ((world_size - 1) * (world_size - 2))


def one_shot(world_size: int, nbytes: int, use_oneshot: bool | None, trade_bytes: int = _TRADE_BYTES) -> bool:
    """Return whether an operand of `nbytes` is reduced in one shot."""
    if use_oneshot is not None:
        return use_oneshot
    limit = one_shot_limit(world_size, trade_bytes)
    return limit is None or nbytes <= limit


def shape_of(world_size: int, nbytes: int, use_oneshot: bool | None, trade_bytes: int = _TRADE_BYTES) -> Shape:
    """Return an operand in vectors, and how it is reduced."""
    vectors = -(-nbytes // VECTOR_BYTES)
    tail = nbytes - (vectors - 1) * VECTOR_BYTES
    if one_shot(world_size, nbytes, use_oneshot, trade_bytes):
        return Shape(vectors, tail, vectors, False)
    return Shape(vectors, tail, -(-vectors // world_size), True)


def required_bytes(world_size: int, nbytes: int, use_oneshot: bool | None, trade_bytes: int = _TRADE_BYTES) -> int:
    """Return the bytes of half a buffer that an operand of `nbytes` takes."""
    return shape_of(world_size, nbytes, use_oneshot, trade_bytes).used_bytes(world_size)


def capacity_bytes(world_size: int, nbytes: int, force_oneshot: bool, trade_bytes: int = _TRADE_BYTES) -> int:
    """Return the bytes of half a buffer for operands of up to `nbytes`.

    Args:
        world_size: ranks.
        nbytes: of the largest operand.
        force_oneshot: whether that must fit in one shot too, and not only what is chosen by size.
    """
    limit = one_shot_limit(world_size, trade_bytes)
    largest = nbytes if force_oneshot or limit is None else min(nbytes, limit)
    one = required_bytes(world_size, largest, True) if largest else 0
    return max(one, required_bytes(world_size, nbytes, False))


# Launches


def plain_launch(shape: Shape, settings: Settings) -> Launch:
    """Return the launch of a sum without an epilogue."""
    if not shape.two_shots:
        for threads in _THREADS:
            blocks = -(-shape.vectors // threads)
            if blocks <= settings.sms:
                return Launch(blocks, threads)
    most = _THREADS[-1]
    return Launch(min(settings.blocks, -(-shape.vectors // most)), most)


def groups_within_warps(group_vectors: int) -> bool:
    """Return whether neighbouring lanes of a warp can see to a group. Twin: include/comm_core/epilogue.cuh."""
    return group_vectors <= 32 and group_vectors & (group_vectors - 1) == 0


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def row_threads(row_vectors: int, team: int) -> int:
    """Return the threads of each of `team` blocks that share a row: as many as have a vector in every step."""
    most = team * FUSED_THREADS
    steps = -(-row_vectors // most)
    return _up(-(-row_vectors // (team * steps)), 32)


def shared_bytes(row_vectors: int, team: int, threads: int, group_vectors: int = 0) -> int:
    """Return the shared memory of a block that has its part of a row and of gamma."""
    nbytes = 2 * -(-row_vectors // (team * threads)) * threads * VECTOR_BYTES
    return nbytes + (0 if groups_within_warps(group_vectors) else 4 * row_vectors)


def fits_a_block(row_vectors: int, group_vectors: int = 0) -> bool:
    """Return whether a block has room for a row."""
    return shared_bytes(row_vectors, 1, row_threads(row_vectors, 1), group_vectors) <= MAX_SHARED_BYTES


def whole_rows(rows: int, row_vectors: int, settings: Settings) -> Launch | None:
    """Return the launch of a sum with an epilogue that has a block for a row, a thread for each vector of it.

    None where a block has no room for that.
    """
    threads = _up(row_vectors, 32)
    if threads > (ROW_THREADS // PER_SM if settings.shared else ROW_THREADS):
        return None
    most = settings.blocks if settings.shared else settings.sms * min(_FEW_BLOCKS, ROW_THREADS // threads)
    return Launch(min(rows, most), threads)


def fused_launch(
    rows: int,
    row_vectors: int,
    settings: Settings,
    group_vectors: int = 0,
    *,
    two_shots: bool = False,
    encoded: bool = False,
) -> Launch:
    """Return the launch of a sum with an epilogue: a row for a team of blocks.

    Args:
        rows: tokens.
        row_vectors: vectors of a token.
        settings: of the group.
        group_vectors: vectors that share a scale, else 0.
        two_shots: which algorithm. In two shots all blocks wait for each other's sums, so all must be on the device
            at once; how many clusters are depends on how its multiprocessors are grouped, so there are none. In one
            shot a row is waited for by the blocks of that row alone, and blocks start in the order of the rows.
        encoded: whether the norm is quantized. Else, in one shot, a row of which every thread has one vector stays
            in registers.
    """
    in_registers = not (two_shots or encoded)
    teams = settings.clusters and not two_shots and groups_within_warps(group_vectors)
    # More blocks than groups of 32 vectors would have nothing to do.
    fits = [size for size in _TEAMS if teams and rows * size <= settings.blocks and row_vectors >= 32 * size]
    team = max(fits, default=1)
    whole = whole_rows(rows, row_vectors, settings) if in_registers else None
    if whole is not None and (row_vectors <= _SHORT_ROW or team < 4):
        return whole
    if teams and not fits:
        # Many rows: teams for what each block has in flight, the fewer the more there is.
        many = 4 if rows * row_vectors * VECTOR_BYTES <= _LARGE_BYTES else 2
        team = many if many <= settings.blocks and row_vectors >= 32 * many else 1
    threads = row_threads(row_vectors, team)
    in_registers = in_registers and row_vectors <= team * threads
    nbytes = 0 if in_registers else shared_bytes(row_vectors, team, threads, group_vectors)
    most = settings.blocks if nbytes <= _SHARED_OF_TWO else settings.sms
    blocks = min(max(most // team, 1), rows) * team
    return Launch(blocks, threads, team, nbytes)
