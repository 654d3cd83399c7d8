"""Memory between processes and packages: memory that all ranks can write, the CUDA runtime, raw memory as a tensor.

Names are imported when they are first used; importing this package touches neither CUDA nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach

if TYPE_CHECKING:
    from comm_core.memory.cuda_ipc import export_pointer, import_pointer
    from comm_core.memory.cudart import CudaRTLibrary
    from comm_core.memory.fd_exchange import exchange_descriptors
    from comm_core.memory.peer import Mapped, MemoryFacts, choose_form, map_jointly, probe_memory
    from comm_core.memory.shared_buffer import create_shared_buffer, free_shared_buffer
    from comm_core.memory.strided import pack_strided_memory

__all__ = [
    "CudaRTLibrary",
    "Mapped",
    "MemoryFacts",
    "choose_form",
    "create_shared_buffer",
    "exchange_descriptors",
    "export_pointer",
    "free_shared_buffer",
    "import_pointer",
    "map_jointly",
    "pack_strided_memory",
    "probe_memory",
]

_NAMES: dict[str, str] = {
    "CudaRTLibrary": "comm_core.memory.cudart",
    "Mapped": "comm_core.memory.peer",
    "MemoryFacts": "comm_core.memory.peer",
    "choose_form": "comm_core.memory.peer",
    "create_shared_buffer": "comm_core.memory.shared_buffer",
    "exchange_descriptors": "comm_core.memory.fd_exchange",
    "export_pointer": "comm_core.memory.cuda_ipc",
    "free_shared_buffer": "comm_core.memory.shared_buffer",
    "import_pointer": "comm_core.memory.cuda_ipc",
    "map_jointly": "comm_core.memory.peer",
    "pack_strided_memory": "comm_core.memory.strided",
    "probe_memory": "comm_core.memory.peer",
}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
