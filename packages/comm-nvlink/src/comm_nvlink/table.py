"""Compiles a plan and its route into what the exchange kernel and the copy engines execute. Pure.

Twins: ``include/comm_nvlink/ulysses.cuh`` (Table) and ``csrc/ulysses.cu`` (comm_nvlink_copies_v1).
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from comm_core.errors import UnsupportedError
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.windows.table import Entry, entries_of
from comm_nvlink.routes import Route, Widths, canonical, evenly

__all__ = ["Table", "compile_copies", "compile_table", "cut", "cut_all"]

_HEADER = struct.Struct("Q4I8x")
_RECORD = struct.Struct("12I")
_ENTRY_UNIT = 16
_COPIES = struct.Struct("4I")
_COPY = struct.Struct("7Q")
_ENTRY_LIMIT = 1 << 30
"""Bytes of one entry: the device numbers its vectors, of one byte at worst, in 32 bits with room to step past."""
_MAX_COPIES = 64
"""Copies of the copy engines for one peer and chunk; more of them cost more than they save."""
_MOST_COPIES = 1 << 16
"""The same where nothing else may be used; enqueueing so many takes a tenth of a second."""
_MIN_WIDTH = 512
"""Bytes of a row below which the copy engines are slower than the SMs."""
_MAX_PITCH = 2**31 - 1
"""What CUDA takes as a pitch."""


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


@dataclass(frozen=True)
class Table:
    """What the exchange kernel of one rank executes for a plan.

    Attributes:
        data: for the device.
        record_bytes: of each block's record.
        records: for every block its lists of entries, as in the kernel's header.
    """

    data: bytes
    record_bytes: int
    records: tuple[tuple[tuple[Entry, ...], ...], ...]


def compile_table(plan: Plan, route: Route) -> Table:
    """Return the device's table of a plan: for every block its part of each list (see ulysses.cuh).

    Raises:
        UnsupportedError: the plan has more levels than the device's tables.
    """
    peers = plan.world_size - 1
    sends = [_of_peer(plan.sends, peer) for peer in range(plan.world_size)]
    receives = [[in_place(copy) for copy in _of_peer(plan.receives, peer)] for peer in range(plan.world_size)]
    known = canonical(plan)
    total = sum(copy.nbytes for copy in known)
    records: list[tuple[tuple[Entry, ...], ...]] = []
    if route.senders:
        begin, end = (route.rest[0], route.rest[-1]) if route.rest else (total, total)
        rests = evenly(known, begin, end, route.slices)
        chunks = [
            evenly(known, begin, end, route.slices) for begin, end in zip(route.rest, route.rest[1:], strict=False)
        ]
        for block in range(route.senders):
            peer, part = (plan.rank + 1 + block % peers) % plan.world_size, block // peers
            cuts = [(sends[peer], route.head), (sends[peer], rests)]
            cuts += [(receives[peer], edges) for edges in (route.head, *chunks)]
            records.append(((), *(_list(cut_all(copies, edges[part], edges[part + 1])) for copies, edges in cuts)))
        own = evenly(known, 0, total, route.copiers)
        records += [(_list(cut_all(sends[plan.rank], begin, end)),) for begin, end in itertools.pairwise(own)]
    packed = [_record(lists) for lists in records]
    size = -(-max(map(len, packed), default=0) // _ENTRY_UNIT) * _ENTRY_UNIT
    header = _HEADER.pack(plan.target_bytes, route.senders, route.copiers, route.chunks, size)
    return Table(header + b"".join(data.ljust(size, b"\0") for data in packed), size, tuple(records))


def _list(copies: Sequence[Copy]) -> tuple[Entry, ...]:
    return tuple(_entries(copies))


def _record(lists: Sequence[Sequence[Entry]]) -> bytes:
    starts = [0]
    for entries in lists:
        starts.append(starts[-1] + len(entries))
    starts += [starts[-1]] * (_RECORD.size // 4 - len(starts))
    return _RECORD.pack(*starts) + b"".join(entry.pack() for entries in lists for entry in entries)


class _Copy2D(tuple[int, ...]):
    """source offset, target offset, source pitch, target pitch, width, height, source."""

    __slots__ = ()


def piece_edges(width: int, pieces: int) -> list[int]:
    """Return where the pieces of a row begin, and its end. Twin: csrc/ulysses.cu, piece_edge."""
    return [width * i // pieces // 16 * 16 for i in range(pieces)] + [width]


def _pitched(copy: Copy, widths: Widths, only_engines: bool) -> list[_Copy2D] | None:
    """Return the copies of at most one pitched level that make up `copy`; None where engines are no good for it."""
    if copy.levels and copy.row_bytes < _MIN_WIDTH and not only_engines:
        return None
    level, outer = Level(1, copy.row_bytes, copy.row_bytes), copy.levels
    if copy.levels:
        pitches = copy.levels[-1][1:]
        if min(pitches) >= copy.row_bytes and max(pitches) <= _MAX_PITCH:
            level, outer = copy.levels[-1], copy.levels[:-1]
        elif not only_engines:
            return None
    pitches = (level.source_pitch, level.target_pitch)
    count = 1
    for repeat, _, _ in outer:
        count *= repeat
    if count > (_MOST_COPIES if only_engines else _MAX_COPIES):
        return None
    sides = [side for side, pitch in zip(("source", "target"), pitches, strict=True) if pitch != copy.row_bytes]
    pieces = max((widths.get((side, copy.row_bytes), 1) for side in sides if level.repeat > 1), default=1)
    edges = piece_edges(copy.row_bytes, pieces)
    found: list[_Copy2D] = []
    outside = copy._replace(levels=outer, row_bytes=1)
    for source, target in outside.rows():
        for begin, end in itertools.pairwise(edges):
            place = (source + begin, target + begin, *pitches)
            found.append(_Copy2D((*place, end - begin, level.repeat, copy.source)))
    return found


def compile_copies(plan: Plan, route: Route, widths: Widths) -> bytes | None:
    """Return the launcher's table of the rests and of this rank's own share.

    None where there is no rest, or where the copy engines are no good for the rows of this rank's operands: then its
    SMs store the rests too, and no other rank need know.

    Raises:
        UnsupportedError: there are no SMs to do it, and the engines can't at all.
    """
    if not route.rest:
        return None
    only = route.senders == 0
    ranges = [*zip(route.rest, route.rest[1:], strict=False), (route.rest[0], route.rest[-1])]
    sends = [_of_peer(plan.sends, peer) for peer in range(plan.world_size)]
    own = sends[plan.rank]
    pieces = [
        [] if peer == plan.rank else cut_all(sends[peer], begin, end)
        for begin, end in ranges
        for peer in range(plan.world_size)
    ]
    pieces.append(own if only else [])
    lists: list[list[_Copy2D]] = []
    for copies in pieces:
        made: list[_Copy2D] = []
        for copy in copies:
            pitched = _pitched(copy, widths, only)
            if pitched is None and only:
                raise UnsupportedError(
                    f"{plan.operation}: the copy engines can't move rows of {copy.row_bytes} bytes ({copy.levels}), "
                    "and max_sms=0 leaves nothing else: pass operands with larger rows, or allow some SMs"
                )
            if pitched is None or (len(made) + len(pitched) > _MAX_COPIES and not only):
                return None
            made += pitched
        lists.append(made)
    header = _COPIES.pack(route.chunks, plan.world_size, len(lists), 0)
    return header + _starts(lists) + b"".join(_COPY.pack(*copy) for copies in lists for copy in copies)
