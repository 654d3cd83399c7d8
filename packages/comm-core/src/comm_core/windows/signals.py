"""The signal block and the stall record as Python sees them. Pure.

Twins of the structs in ``include/comm_core/signal.cuh``; the module's own description is compared when it is loaded.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

__all__ = [
    "MAX_RANKS",
    "RECORD_BYTES",
    "SIGNAL_BYTES",
    "Operation",
    "Stall",
    "StallKind",
    "abort_code",
    "read_abort",
    "read_stall",
]

MAX_RANKS = 16
_LINE = 128
SIGNAL_BYTES = (4 + 4 * MAX_RANKS) * _LINE
"""Size of a rank's signal block."""

_RECORD = struct.Struct("5I3I")
RECORD_BYTES = _RECORD.size
"""Size of a stall record."""


class Operation(IntEnum):
    """What a kernel was doing, as recorded by the device. Append only."""

    SELF_TEST = 1
    BARRIER = 2
    ALL_GATHER_SMALL = 3
    SCATTER_HEADS = 4
    GATHER_HEADS = 5
    EXCHANGE_CHUNKS = 6
    SCATTER_QKV_HEAD_CHUNK = 7
    GATHER_OUTPUT_HEAD_CHUNK = 8
    OTHER = 9
    ALLREDUCE = 10

    @property
    def text(self) -> str:
        """Name for messages."""
        return self.name.lower()

    @classmethod
    def of(cls, name: str) -> Operation:
        """Return the operation of a plan's name."""
        return _operation(name)


@lru_cache(64)
def _operation(name: str) -> Operation:
    # Cached: it is asked for on every call.
    return Operation.__members__.get(name.upper(), Operation.OTHER)


_BAD_ANNOUNCEMENT = 0x80000000
"""Set in a record's operation. Twin: include/comm_core/exchange.cuh, kBadAnnouncement."""


class StallKind(IntEnum):
    """What a stall record says. 0 to 2 are the record's state."""

    NONE = 0
    GAVE_UP = 1
    """This rank waited until the deadline."""
    ABORTED = 2
    """Another rank gave up and told this one."""
    BAD_ANNOUNCEMENT = 3
    """A peer announced memory that does not exist: the ranks run different programs."""


class Stall(NamedTuple):
    """A stall record.

    Attributes:
        kind: what happened.
        operation: number of the `Operation` during which it happened on this rank.
        epoch: how many operations of the session it was.
        waited_for: the group rank that did not come.
        reporter: the group rank that gave up first.
    """

    kind: StallKind
    operation: int
    epoch: int
    waited_for: int
    reporter: int

    @property
    def operation_text(self) -> str:
        """Name of the operation."""
        try:
            return Operation(self.operation).text
        except ValueError:
            return f"operation {self.operation}"


def abort_code(reporter: int, waited_for: int) -> int:
    """Return the abort word: who gave up, and for whom. Never 0. Twin: include/comm_core/signal.cuh, abort_code."""
    return 0x80000000 | waited_for << 8 | reporter


def read_abort(code: int) -> tuple[int, int]:
    """Return the reporter and the rank that was waited for of an abort word that is not 0."""
    return code & 0xFF, code >> 8 & 0xFF


def read_stall(record: bytes | bytearray | memoryview) -> Stall | None:
    """Return what a record says, or None while it says nothing."""
    state, operation, epoch, waited_for, reporter, *_ = _RECORD.unpack_from(record)
    if state == StallKind.NONE:
        return None
    kind = StallKind.BAD_ANNOUNCEMENT if operation & _BAD_ANNOUNCEMENT else StallKind(state)
    return Stall(kind, operation & ~_BAD_ANNOUNCEMENT, epoch, waited_for, reporter)
