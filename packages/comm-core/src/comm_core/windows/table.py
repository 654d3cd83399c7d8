"""Compiles a plan into the table that a device (or the copy engines' launcher) executes. Pure.

Twin of ``include/comm_core/plan.cuh``.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from comm_core.errors import UnsupportedError
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.windows.signals import MAX_RANKS

__all__ = [
    "ENTRY_BYTES",
    "HEADER_BYTES",
    "MAX_LEVELS",
    "MAX_SOURCES",
    "PIECE_BYTES",
    "Entry",
    "Table",
    "compile_plan",
    "entries_of",
]

MAX_LEVELS = 4
MAX_SOURCES = 4
PIECE_BYTES = 4096
"""Longer rows are cut into pieces of this size, so that the work divides evenly among the warps."""
_WHOLE_BYTES = 1 << 30
"""Even rows that are left whole are cut into pieces of this size: the device's field for a row has 32 bits."""
_ALIGNMENT = 16
_MAX_ROWS = 2**31 - 1
"""The device counts rows in 32 bits, and a thread steps past the last one before it stops."""

_HEADER = struct.Struct(f"QI{MAX_RANKS + 1}I0Q")
_ENTRY = struct.Struct(f"2Q{MAX_LEVELS}Q{MAX_LEVELS}Q{MAX_LEVELS}I4I0Q")
HEADER_BYTES = _HEADER.size
ENTRY_BYTES = _ENTRY.size


@dataclass(frozen=True)
class Entry:
    """One strided copy to one peer; `levels` are exactly `MAX_LEVELS`, outermost first, padded with repeats of 1."""

    peer: int
    source: int
    source_offset: int
    target_offset: int
    levels: tuple[Level, ...]
    row_bytes: int

    @property
    def rows(self) -> int:
        """Rows of the whole nest."""
        total = 1
        for level in self.levels:
            total *= level.repeat
        return total

    @property
    def alignment(self) -> int:
        """Largest power of two, up to 16, that divides every offset, pitch and row."""
        value = gcd(_ALIGNMENT, self.source_offset, self.target_offset, self.row_bytes)
        for level in self.levels:
            if level.repeat > 1:
                value = gcd(value, level.source_pitch, level.target_pitch)
        return value

    def pack(self) -> bytes:
        """Return the device's form."""
        return _ENTRY.pack(
            self.source_offset,
            self.target_offset,
            *(level.source_pitch for level in self.levels),
            *(level.target_pitch for level in self.levels),
            *(level.repeat for level in self.levels),
            self.rows,
            self.row_bytes,
            self.source,
            self.alignment,
        )


@dataclass(frozen=True)
class Table:
    """A compiled plan.

    Attributes:
        data: the device's form: a header and the entries, by peer.
        entries: the same, readable.
    """

    data: bytes
    entries: tuple[Entry, ...]


def entries_of(copy: Copy, piece_bytes: int = _WHOLE_BYTES) -> Iterator[Entry]:
    """Yield the entries of one copy: long rows become a level of pieces, what is left over an entry of its own.

    Raises:
        UnsupportedError: it has more levels or rows than the device's tables.
    """
    levels = list(copy.levels)
    row = copy.row_bytes
    offset = 0
    if row > piece_bytes:
        pieces, rest = divmod(row, piece_bytes)
        yield _entry(copy, [*levels, Level(pieces, piece_bytes, piece_bytes)], piece_bytes, 0)
        offset, row = pieces * piece_bytes, rest
        if not rest:
            return
    yield _entry(copy, levels, row, offset)


def _entry(copy: Copy, levels: list[Level], row_bytes: int, offset: int) -> Entry:
    if len(levels) > MAX_LEVELS:
        raise UnsupportedError(f"a copy of {len(levels)} levels: at most {MAX_LEVELS} can be executed ({copy})")
    padding = [Level(1, 0, 0)] * (MAX_LEVELS - len(levels))
    entry = Entry(
        copy.peer,
        copy.source,
        copy.source_offset + offset,
        copy.target_offset + offset,
        (*padding, *levels),
        row_bytes,
    )
    if entry.rows > _MAX_ROWS:
        raise UnsupportedError(f"a copy of {entry.rows} rows: at most {_MAX_ROWS} can be executed ({copy})")
    return entry


@lru_cache(256)
def compile_plan(plan: Plan, piece_bytes: int = PIECE_BYTES) -> Table:
    """Return the table of what `plan.rank` sends.

    Args:
        plan: of this rank.
        piece_bytes: longer rows are cut into pieces of this size; 0 leaves them whole (copy engines want that).

    Raises:
        UnsupportedError: the plan has more ranks, sources or levels than the device's tables.
    """
    if plan.world_size > MAX_RANKS or plan.source_count > MAX_SOURCES:
        raise UnsupportedError(
            f"{plan.operation}: {plan.world_size} ranks and {plan.source_count} sources; at most {MAX_RANKS} and "
            f"{MAX_SOURCES} can be executed"
        )
    entries: list[Entry] = []
    first: list[int] = []
    for peer in range(plan.world_size):
        first.append(len(entries))
        for copy in plan.sends:
            if copy.peer == peer:
                entries.extend(entries_of(copy, piece_bytes or _WHOLE_BYTES))
    first.extend([len(entries)] * (MAX_RANKS + 1 - plan.world_size))
    header = _HEADER.pack(plan.target_bytes, len(entries), *first)
    return Table(header + b"".join(entry.pack() for entry in entries), tuple(entries))
