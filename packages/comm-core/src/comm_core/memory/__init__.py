"""Memory between processes and packages: the CUDA runtime, buffers that all ranks can write, raw memory as a tensor.

Names are imported when they are first used; importing this package touches neither CUDA nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach

if TYPE_CHECKING:
    from comm_core.memory.cudart import CudaRTLibrary
    from comm_core.memory.shared_buffer import create_shared_buffer, free_shared_buffer
    from comm_core.memory.strided import pack_strided_memory

__all__ = [
    "CudaRTLibrary",
    "create_shared_buffer",
    "free_shared_buffer",
    "pack_strided_memory",
]

_NAMES: dict[str, str] = {
    "CudaRTLibrary": "comm_core.memory.cudart",
    "create_shared_buffer": "comm_core.memory.shared_buffer",
    "free_shared_buffer": "comm_core.memory.shared_buffer",
    "pack_strided_memory": "comm_core.memory.strided",
}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
