"""Compiles a plan and its route into what the exchange kernel and the copy engines execute. Pure.

Twins: ``include/comm_nvlink/ulysses.cuh`` (Table) and ``csrc/ulysses.cu`` (comm_nvlink_copies_v1).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from comm_core.transport.plan import Copy, Level, Plan
from comm_core.windows.table import Entry, entries_of
from comm_nvlink.routes import Route, evenly

__all__ = ["Compiled", "compile_copies", "compile_table", "cut"]

_HEADER = struct.Struct("Q4I0Q")
_COPIES = struct.Struct("4I")
_COPY = struct.Struct("7Q")
_ENTRY_LIMIT = 1 << 30
"""Bytes of one entry: the device numbers its vectors, of one byte at worst, in 32 bits with room to step past."""
_MAX_COPIES = 64
"""Copies of the copy engines for one peer and chunk; more of them cost more than they save."""
_MIN_WIDTH = 512
"""Bytes of a row below which the copy engines are slower than the SMs."""
_MAX_PITCH = 2**31 - 1
"""What CUDA takes as a pitch."""


@dataclass(frozen=True)
class Compiled:
    """What one rank executes for a plan.

    Attributes:
        table: for the device.
        copies: for the launcher of the copy engines; None where they are not used.
        blocks: of the exchange kernel.
    """

    table: bytes
    copies: bytes | None
    blocks: int


def cut(copy: Copy, begin: int, end: int) -> list[Copy]:
    """Return copies that move the bytes [begin, end) of `copy`, counted in the order of its rows."""
    if begin >= end:
        return []
    if not copy.levels:
        return [_moved(copy, begin, begin)._replace(row_bytes=end - begin)]
    level, inner = copy.levels[0], copy._replace(levels=copy.levels[1:])
    step = inner.nbytes

    def at(index: int) -> Copy:
        return _moved(inner, index * level.source_pitch, index * level.target_pitch)

    first, last = begin // step, (end - 1) // step
    if first == last:
        return cut(at(first), begin - first * step, end - first * step)
    parts: list[Copy] = []
    if begin > first * step:
        parts += cut(at(first), begin - first * step, step)
        first += 1
    whole = last + (end == (last + 1) * step)
    if whole - first == 1:
        parts.append(at(first))
    elif whole > first:
        parts.append(at(first)._replace(levels=(level._replace(repeat=whole - first), *inner.levels)))
    if whole == last:
        parts += cut(at(last), 0, end - last * step)
    return parts


def _moved(copy: Copy, source: int, target: int) -> Copy:
    return copy._replace(source_offset=copy.source_offset + source, target_offset=copy.target_offset + target)


def cut_all(copies: Sequence[Copy], begin: int, end: int) -> list[Copy]:
    """Return copies that move the bytes [begin, end) of all `copies`, counted in their order."""
    parts: list[Copy] = []
    start = 0
    for copy in copies:
        parts += cut(copy, max(0, begin - start), min(copy.nbytes, end - start))
        start += copy.nbytes
    return parts


def in_place(copy: Copy) -> Copy:
    """Return the copy out of staging of what `copy` has written into it: the same place in the output."""
    levels = tuple(Level(repeat, target, target) for repeat, _, target in copy.levels)
    return copy._replace(source=0, source_offset=copy.target_offset, levels=levels)


def _entries(copies: Sequence[Copy]) -> Iterator[Entry]:
    for copy in copies:
        for begin in range(0, copy.nbytes, _ENTRY_LIMIT):
            for part in cut(copy, begin, min(copy.nbytes, begin + _ENTRY_LIMIT)):
                yield from entries_of(part)


def _of_peer(copies: Sequence[Copy], peer: int) -> list[Copy]:
    return [copy for copy in copies if copy.peer == peer]


def _starts(lists: Sequence[Sequence[object]]) -> bytes:
    """Return where each list starts, and the end of the last; padded to 8 bytes."""
    starts = [0]
    for items in lists:
        starts.append(starts[-1] + len(items))
    return struct.pack(f"{len(starts)}I{len(starts) % 2}I", *starts, *[0] * (len(starts) % 2))


def compile_table(plan: Plan, route: Route) -> bytes:
    """Return the device's table of a plan: for every block its part of each list (see ulysses.cuh).

    Raises:
        UnsupportedError: the plan has more levels than the device's tables.
    """
    peers = plan.world_size - 1
    order = [(plan.rank + 1 + block % peers) % plan.world_size for block in range(route.blocks)]
    slices = [block // peers for block in range(route.blocks)]
    sends = [_of_peer(plan.sends, peer) for peer in range(plan.world_size)]
    receives = [[in_place(copy) for copy in _of_peer(plan.receives, peer)] for peer in range(plan.world_size)]
    known = _of_peer(plan.receives, plan.rank)
    total = sum(copy.nbytes for copy in known)

    def part(copies: Sequence[Copy], cuts: Sequence[int], index: int) -> list[Entry]:
        return list(_entries(cut_all(copies, cuts[index], cuts[index + 1])))

    lists: list[list[Entry]] = []
    if route.blocks:
        own = evenly(known, 0, total, route.blocks)
        lists += [part(sends[plan.rank], own, block) for block in range(route.blocks)]
        lists += [part(sends[peer], route.head, s) for peer, s in zip(order, slices, strict=True)]
        begin, end = (route.rest[0], route.rest[-1]) if route.rest else (total, total)
        rests = evenly(known, begin, end, route.slices)
        lists += [part(sends[peer], rests, s) for peer, s in zip(order, slices, strict=True)]
        lists += [part(receives[peer], route.head, s) for peer, s in zip(order, slices, strict=True)]
        for chunk in range(route.chunks):
            cuts = evenly(known, route.rest[chunk], route.rest[chunk + 1], route.slices)
            lists += [part(receives[peer], cuts, s) for peer, s in zip(order, slices, strict=True)]
    header = _HEADER.pack(plan.target_bytes, route.blocks, route.slices, route.chunks, len(lists))
    return header + _starts(lists) + b"".join(entry.pack() for entries in lists for entry in entries)


class _Copy2D(tuple[int, ...]):
    """source offset, target offset, source pitch, target pitch, width, height, source."""

    __slots__ = ()


def _pitched(copy: Copy, widths: Mapping[int, int]) -> list[_Copy2D] | None:
    """Return the copies of at most one pitched level that make up `copy`; None where engines are no good for it."""
    if copy.levels and copy.row_bytes < _MIN_WIDTH:
        return None
    level = copy.levels[-1] if copy.levels else Level(1, copy.row_bytes, copy.row_bytes)
    pitches = (level.source_pitch, level.target_pitch)
    if level.repeat > 1 and (min(pitches) < copy.row_bytes or max(pitches) > _MAX_PITCH):
        return None
    count = 1
    for outer in copy.levels[:-1]:
        count *= outer.repeat
    if count > _MAX_COPIES:
        return None
    pieces = widths.get(copy.row_bytes, 1) if level.repeat > 1 else 1
    edges = [copy.row_bytes * i // pieces // 16 * 16 for i in range(pieces)] + [copy.row_bytes]
    found: list[_Copy2D] = []
    outside = copy._replace(levels=copy.levels[:-1], row_bytes=1) if copy.levels else copy._replace(row_bytes=1)
    for source, target in outside.rows():
        for begin, end in zip(edges, edges[1:], strict=False):
            place = (source + begin, target + begin, *pitches)
            found.append(_Copy2D((*place, end - begin, level.repeat, copy.source)))
    return found


def compile_copies(plan: Plan, route: Route, widths: Mapping[int, int]) -> bytes | None:
    """Return the launcher's table of the rests and of this rank's own share.

    None where there is no rest, or where the copy engines are no good for the rows of this rank's operands: then its
    SMs store the rests too, and no other rank need know.
    """
    if not route.rest:
        return None
    ranges = [*zip(route.rest, route.rest[1:], strict=False), (route.rest[0], route.rest[-1])]
    lists: list[list[_Copy2D]] = []

    def add(copies: Sequence[Copy], begin: int, end: int) -> bool:
        made: list[_Copy2D] = []
        for copy in cut_all(copies, begin, end):
            pitched = _pitched(copy, widths)
            if pitched is None:
                return False
            made += pitched
        lists.append(made)
        return len(made) <= _MAX_COPIES

    for begin, end in ranges:
        for peer in range(plan.world_size):
            copies = [] if peer == plan.rank else _of_peer(plan.sends, peer)
            if not add(copies, begin, end):
                return None
    own = _of_peer(plan.sends, plan.rank)
    if not add(own if route.blocks == 0 else [], 0, sum(copy.nbytes for copy in own)):
        return None
    header = _COPIES.pack(route.chunks, plan.world_size, len(lists), 0)
    return header + _starts(lists) + b"".join(_COPY.pack(*copy) for copies in lists for copy in copies)
