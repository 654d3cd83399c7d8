"""The module of the exchange as Python sees it: its description, and the engine that one session owns."""

from __future__ import annotations

import ctypes
import struct
from typing import TYPE_CHECKING, NamedTuple

from comm_core.jit.spec import ModuleSpec

if TYPE_CHECKING:
    from comm_core.jit import Module

__all__ = ["EXCHANGE", "Counters", "Engine"]

_COUNTERS = "II5Q0Q"

EXCHANGE = ModuleSpec(
    name="comm_pcie_exchange",
    package="comm_pcie",
    sources=("csrc/exchange.cu",),
    structs={
        # where to put the engine
        "comm_pcie_open_args_v1": "IIP0Q",
        # engine
        "comm_pcie_close_args_v1": "IIP0Q",
        # stream, session, engine, plan, copies, outputs, source; bytes;
        # copies, window, operation, blocks, graph, unused
        "comm_pcie_exchange_args_v1": "II7PQ6I0Q",
        # single, launched, built, dropped, failed
        "comm_pcie_counters_v1": _COUNTERS,
    },
    entry_points={
        "comm_pcie_open_v1": "comm_pcie_open_args_v1",
        "comm_pcie_close_v1": "comm_pcie_close_args_v1",
        "comm_pcie_exchange_v1": "comm_pcie_exchange_args_v1",
    },
)
"""Twin: csrc/exchange.cu."""


class Counters(NamedTuple):
    """What an engine has done.

    Attributes:
        single: calls that were enqueued one by one, captured ones included.
        launched: calls that were one launch of a graph.
        built: graphs that were made.
        dropped: graphs that made room for others.
        failed: 1 where CUDA could not make a graph; all later calls are then enqueued one by one.
    """

    single: int
    launched: int
    built: int
    dropped: int
    failed: int


class Engine:
    """Streams, events and graphs of one session, made on the current device. The module allocates, this frees.

    Args:
        module: the loaded module.

    Raises:
        CudaCallError: a stream or an event could not be made; nothing is left.
    """

    def __init__(self, module: Module) -> None:
        self._close = module.bind("comm_pcie_close_v1")
        self.exchange = module.bind("comm_pcie_exchange_v1")
        """Enqueues a call; the fields are those of the struct, in order."""
        self._module = module
        place = ctypes.c_void_p()
        module.bind("comm_pcie_open_v1")(ctypes.addressof(place))
        self.address = place.value or 0
        """Of the engine, for `exchange`."""
        size = struct.calcsize(_COUNTERS)
        self._counters = (ctypes.c_char * size).from_address(self.address)
        # Every call looks at it.
        self._failed = ctypes.c_uint64.from_address(self.address + size - ctypes.sizeof(ctypes.c_uint64))
        self._last = Counters(0, 0, 0, 0, 0)

    @property
    def counters(self) -> Counters:
        """What it has done so far; after `close`, what it had done then."""
        if self.address:
            self._last = Counters(*struct.unpack(_COUNTERS, self._counters.raw)[2:])
        return self._last

    @property
    def graphs_failed(self) -> bool:
        """Whether CUDA could not make a graph. Only while it is open."""
        return self._failed.value != 0

    def why(self) -> str:
        """Return the text of this thread's last failure in the module."""
        return self._module.last_error()

    def close(self) -> None:
        """Release it; its work must be over. A second call does nothing.

        Raises:
            CudaCallError: CUDA could not release something, which is then lost until the process ends.
        """
        if not self.address:
            return
        self._last = self.counters
        address, self.address = self.address, 0
        self._close(address)
