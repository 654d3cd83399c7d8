"""The Python half of ``include/comm_core/abi.h`` and ``status.h``; a test compares the two."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["ABI", "CUDA_BASE", "PREFIX", "PREFIX_BYTES", "Status"]

ABI = 1
"""Number of the C interface. Twin: include/comm_core/abi.h, COMM_ABI."""

PREFIX = "II"
"""`struct` format of what every argument struct begins with: its size and the ABI number."""

PREFIX_BYTES = 8


class Status(IntEnum):
    """What a C entry point returns. Twin: include/comm_core/status.h, comm_status; explicit and append-only."""

    OK = 0
    ERROR_ARGUMENT = 1
    ERROR_ABI = 2
    ERROR_UNSUPPORTED = 3
    ERROR_BROKEN = 4
    ERROR_CUDA = 0x10000


CUDA_BASE = int(Status.ERROR_CUDA)
"""A status from here on is this plus the CUDA error code."""
