"""Turns a plan into the copies of the copy engines: one a peer, in an order that crowds no peer. Pure.

A copy engine moves a box of bytes at once: rows, rows of rows (slices), and nothing deeper. All plans of the
whole-head calls are such boxes.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from comm_core.transport.plan import Copy, Level, Plan

__all__ = ["COPY_BYTES", "LANES", "SLOW_ROWS", "Box", "boxes", "boxes_of", "pack", "peers"]

LANES = 2
"""Streams that the copies to the peers are spread over."""

SLOW_ROWS = {3072: 2, 10240: 2}
"""Row bytes that copy engines are slow at -> parts to cut such rows into.

Measured on H200, 80 MiB and more to a peer: rows of 10,240 bytes run at 335 GB/s and rows of 3,072 at 311, all others
between 1 and 20 KiB at 385 to 390; 10,240 as two halves, at 385.
"""

_MAX_PITCH = 2**31 - 1
"""Bytes from row to row that CUDA takes at most."""

_COPY = struct.Struct("7Q4I0Q")
COPY_BYTES = _COPY.size


class Box(NamedTuple):
    """One copy: `slices` times `rows` rows of `row_bytes`, to one peer. Twin: csrc/exchange.cu, Copy.

    Attributes:
        peer: whose output it goes to.
        lane: of the streams, 0 is the caller's.
        source_offset: bytes from the operand's beginning.
        target_offset: bytes from the output's beginning.
        source_pitch: bytes from row to row.
        target_pitch: bytes from row to row.
        source_height: rows from slice to slice.
        target_height: rows from slice to slice.
        row_bytes: contiguous bytes on both sides.
        rows: of a slice.
        slices: how many.
    """

    peer: int
    lane: int
    source_offset: int
    target_offset: int
    source_pitch: int
    target_pitch: int
    source_height: int
    target_height: int
    row_bytes: int
    rows: int
    slices: int

    @property
    def nbytes(self) -> int:
        """Bytes that it moves."""
        return self.row_bytes * self.rows * self.slices


def peers(rank: int, world_size: int) -> tuple[int, ...]:
    """Return the other ranks in the order in which `rank` sends to them.

    In every step all ranks send to different ones. Where the group's size is a power of two, the step is an exchange
    between pairs (rank XOR step), so each link is used in both directions at once.
    """
    if world_size & (world_size - 1) == 0:
        return tuple(rank ^ step for step in range(1, world_size))
    return tuple((rank + step) % world_size for step in range(1, world_size))


@lru_cache(256)
def boxes(plan: Plan) -> tuple[Box, ...]:
    """Return the copies of `plan` to other ranks, in the order in which they are enqueued."""
    found: list[Box] = []
    for step, peer in enumerate(peers(plan.rank, plan.world_size)):
        for copy in plan.sends:
            if copy.peer == peer:
                found.extend(_cut(copy, step % LANES))
    return tuple(found)


def boxes_of(copy: Copy) -> tuple[Box, ...]:
    """Return one copy as boxes of a single slice, for whoever enqueues rows alone; all in lane 0."""
    return tuple(
        box._replace(
            source_offset=box.source_offset + slice_ * box.source_height * box.source_pitch,
            target_offset=box.target_offset + slice_ * box.target_height * box.target_pitch,
            slices=1,
        )
        for box in _cut(copy, 0)
        for slice_ in range(box.slices)
    )


def pack(copies: tuple[Box, ...]) -> bytes:
    """Return the form that the module reads."""
    return b"".join(
        _COPY.pack(
            box.source_offset,
            box.target_offset,
            box.source_pitch,
            box.target_pitch,
            box.source_height,
            box.target_height,
            box.row_bytes,
            box.rows,
            box.slices,
            box.peer,
            box.lane,
        )
        for box in copies
    )


def _cut(copy: Copy, lane: int) -> Iterator[Box]:
    """Yield the boxes of one copy: outer levels one by one, rows of a slow width in parts."""
    levels = list(copy.levels)
    parts = SLOW_ROWS.get(copy.row_bytes, 1) if levels else 1
    width = copy.row_bytes // parts
    if levels and max(levels[-1].source_pitch, levels[-1].target_pitch) <= _MAX_PITCH:
        inner = levels.pop()
    else:
        inner = Level(1, copy.row_bytes, copy.row_bytes)
    slices, heights = 1, (inner.repeat, inner.repeat)
    if inner.repeat > 1 and levels and _is_slice(levels[-1], inner):
        outer = levels.pop()
        slices = outer.repeat
        heights = (outer.source_pitch // inner.source_pitch, outer.target_pitch // inner.target_pitch)
    for steps in itertools.product(*(range(level.repeat) for level in levels)):
        source = copy.source_offset + sum(i * level.source_pitch for i, level in zip(steps, levels, strict=True))
        target = copy.target_offset + sum(i * level.target_pitch for i, level in zip(steps, levels, strict=True))
        for part in range(parts):
            yield Box(
                copy.peer,
                lane,
                source + part * width,
                target + part * width,
                inner.source_pitch,
                inner.target_pitch,
                *heights,
                width,
                inner.repeat,
                slices,
            )


def _is_slice(outer: Level, inner: Level) -> bool:
    """Whether `outer` can be the third dimension: a whole number of rows apart on both sides."""
    return all(
        pitch % row == 0 and pitch // row >= inner.repeat
        for pitch, row in ((outer.source_pitch, inner.source_pitch), (outer.target_pitch, inner.target_pitch))
    )
