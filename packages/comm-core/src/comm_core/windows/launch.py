"""The module of windows as Python sees it: its description, and the calls into it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comm_core.jit.spec import ModuleSpec
from comm_core.windows.signals import MAX_RANKS
from comm_core.windows.table import MAX_SOURCES

if TYPE_CHECKING:
    from comm_core.jit import Module

__all__ = ["WINDOWS", "Calls", "SessionStruct", "WindowStruct"]

# rank, ranks, windows, poison; signals; windows, record, timeout
_NO_SOURCES = tuple((0,) * (MAX_SOURCES - count) for count in range(MAX_SOURCES + 1))
"""What fills the array of sources, by how many there are."""
_SESSION = f"4I{MAX_RANKS}Q3Q0Q"

WINDOWS = ModuleSpec(
    name="comm_core_windows",
    package="comm_core",
    sources=("csrc/windows.cu",),
    structs={
        # stream, session, plan, sources, destination, offset; window, blocks a peer, operation, unused
        "comm_core_exchange_args_v1": f"II3P{MAX_SOURCES}QQQ4I0Q",
        # stream, session, plan, copies, sources, destinations, offset; window, operation
        "comm_core_exchange_copies_args_v1": f"II4P{MAX_SOURCES}Q{MAX_RANKS}QQ2I0Q",
        # stream, session; operation, unused
        "comm_core_barrier_args_v1": "II2P2I0Q",
        # stream, session, destination, bytes
        "comm_core_settle_args_v1": "II2PQQ0Q",
        "comm_core_session_v1": f"II2I{MAX_RANKS}Q3Q0Q",
    },
    entry_points={
        "comm_core_exchange_v1": "comm_core_exchange_args_v1",
        "comm_core_exchange_copies_v1": "comm_core_exchange_copies_args_v1",
        "comm_core_barrier_v1": "comm_core_barrier_args_v1",
        "comm_core_settle_v1": "comm_core_settle_args_v1",
    },
)
"""Twin: csrc/windows.cu."""


@dataclass
class SessionStruct:
    """Packs the struct of a session. Twin: include/comm_core/exchange.cuh, Session."""

    rank: int
    signals: Sequence[int]
    windows: int
    record: int
    timeout_ns: int
    poison: bool

    def pack(self, num_windows: int) -> bytes:
        """Return the struct for `num_windows` windows."""
        padded = [*self.signals, *[0] * (MAX_RANKS - len(self.signals))]
        return struct.pack(
            _SESSION,
            self.rank,
            len(self.signals),
            num_windows,
            int(self.poison),
            *padded,
            self.windows,
            self.record,
            self.timeout_ns,
        )


class WindowStruct:
    """Packs an entry of the table of windows. Twin: include/comm_core/exchange.cuh, WindowEntry."""

    _layout = struct.Struct(f"Q{MAX_RANKS}QQ0Q")
    nbytes = _layout.size

    @classmethod
    def pack(cls, nbytes: int, addresses: Sequence[int]) -> bytes:
        """Return the entry of a window of `nbytes` at `addresses`, in rank order."""
        return cls._layout.pack(nbytes, *addresses, *[0] * (MAX_RANKS - len(addresses)), 0)


class Calls:
    """The entry points of a loaded module, with the arguments that one session passes."""

    def __init__(self, module: Module) -> None:
        self._exchange = module.bind("comm_core_exchange_v1")
        self._copies = module.bind("comm_core_exchange_copies_v1")
        self._barrier = module.bind("comm_core_barrier_v1")
        self._settle = module.bind("comm_core_settle_v1")

    def exchange(
        self,
        stream: int,
        session: int,
        plan: int,
        sources: Sequence[int],
        destination: int,
        window: int,
        window_offset: int,
        blocks_per_peer: int,
        operation: int,
    ) -> None:
        """Launch an exchange by stores of the SMs; see csrc/windows.cu."""
        self._exchange(
            stream,
            session,
            plan,
            *sources,
            *_NO_SOURCES[len(sources)],
            destination,
            window_offset,
            window,
            blocks_per_peer,
            operation,
            0,
        )

    def copies(
        self,
        stream: int,
        session: int,
        plan: int,
        copies: int,
        sources: Sequence[int],
        destinations: Sequence[int],
        window: int,
        window_offset: int,
        operation: int,
    ) -> None:
        """Enqueue an exchange by the copy engines; see csrc/windows.cu."""
        padded = (*sources, *_NO_SOURCES[len(sources)])
        targets = (*destinations, *(0,) * (MAX_RANKS - len(destinations)))
        self._copies(stream, session, plan, copies, *padded, *targets, window_offset, window, operation)

    def barrier(self, stream: int, session: int, operation: int) -> None:
        """Launch a barrier."""
        self._barrier(stream, session, operation, 0)

    def settle(self, stream: int, session: int, destination: int, nbytes: int) -> None:
        """Spoil a destination that was copied out of staging, where the exchange was aborted."""
        self._settle(stream, session, destination, nbytes)
