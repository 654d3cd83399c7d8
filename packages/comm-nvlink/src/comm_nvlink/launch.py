"""The module of the NVLink exchange as Python sees it: its description, its structs, and the calls into it."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from comm_core.jit.spec import ModuleSpec
from comm_core.windows.table import MAX_SOURCES
from comm_nvlink.routes import MAX_SLICES

if TYPE_CHECKING:
    from comm_core.jit import Module

__all__ = ["FLAG_BYTES", "MAX_PEERS", "NO_SOURCES", "ULYSSES", "Calls", "Places", "State"]

MAX_PEERS = 8
"""Ranks of a group. Twin: include/comm_nvlink/ulysses.cuh, kMaxPeers."""
_LINE = 128
FLAG_BYTES = (MAX_PEERS * MAX_SLICES + MAX_PEERS + MAX_PEERS + 1) * _LINE
"""Size of a rank's flags. Twin: include/comm_nvlink/ulysses.cuh, Flags."""

ULYSSES = ModuleSpec(
    name="comm_nvlink_ulysses",
    package="comm_nvlink",
    sources=("csrc/ulysses.cu",),
    structs={
        # state
        "comm_nvlink_open_args_v1": "IIP0Q",
        "comm_nvlink_close_args_v1": "IIP0Q",
        # stream, target, source, pitches, width, height, milliseconds; pieces, unused
        "comm_nvlink_time_copy_args_v1": "II3P4QP2I0Q",
        # state, places, number, wait, offset; window, captured
        "comm_nvlink_meet_args_v1": "II2P3Q2I0Q",
        # stream, state, table, copies, places, sources, landing, output, offset, target bytes, half bytes, doubled
        # offset, doubled bytes;
        # window, operation, senders, copiers, staging window, chunks, record bytes, unused
        "comm_nvlink_exchange_args_v1": f"II5P{MAX_SOURCES}Q7Q8I0Q",
    },
    entry_points={
        "comm_nvlink_open_v1": "comm_nvlink_open_args_v1",
        "comm_nvlink_close_v1": "comm_nvlink_close_args_v1",
        "comm_nvlink_time_copy_v1": "comm_nvlink_time_copy_args_v1",
        "comm_nvlink_meet_v1": "comm_nvlink_meet_args_v1",
        "comm_nvlink_exchange_v1": "comm_nvlink_exchange_args_v1",
    },
)
"""Twin: csrc/ulysses.cu."""


class State(ctypes.Structure):
    """What a session passes with every call. Twin: csrc/ulysses.cu, comm_nvlink_state_v1."""

    _fields_ = (
        ("session", ctypes.c_void_p),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_void_p * MAX_PEERS),
        ("boards", ctypes.c_void_p * MAX_PEERS),
        ("side", ctypes.c_void_p),
        ("fork", ctypes.c_void_p),
        ("join", ctypes.c_void_p),
    )


class Places(ctypes.Structure):
    """Where the ranks want the data of a call. Twin: csrc/ulysses.cu, comm_nvlink_places_v1."""

    _fields_ = (
        ("offset", ctypes.c_uint64 * MAX_PEERS),
        ("window", ctypes.c_uint32 * MAX_PEERS),
        ("known", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


NO_SOURCES = tuple((0,) * (MAX_SOURCES - count) for count in range(MAX_SOURCES + 1))
"""What fills up the sources of a call that has fewer."""


class Calls:
    """The entry points of a loaded module; they take the fields of their structs in order."""

    def __init__(self, module: Module) -> None:
        self.open = module.bind("comm_nvlink_open_v1")
        self.close = module.bind("comm_nvlink_close_v1")
        self.time_copy = module.bind("comm_nvlink_time_copy_v1")
        self.meet = module.bind("comm_nvlink_meet_v1")
        self.exchange = module.bind("comm_nvlink_exchange_v1")
