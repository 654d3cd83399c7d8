"""comm-mnnvl: symmetric memory over NVLink, on one host or several, that survives a checkpoint; and its all-reduce.

Users construct a `comm_core.UlyssesCommunicator` with ``backend="mnnvl"``; what is here is the memory itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_mnnvl._version import __version__

if TYPE_CHECKING:
    from comm_mnnvl.allreduce_calls import (
        trtllm_mnnvl_all_reduce,
        trtllm_mnnvl_allreduce,
        trtllm_mnnvl_fused_allreduce_add_rmsnorm,
        trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant,
        trtllm_mnnvl_fused_allreduce_rmsnorm,
    )
    from comm_mnnvl.allreduce_workspace import MNNVLAllReduceFusionWorkspace
    from comm_mnnvl.backends import default_backend, mpi_barrier
    from comm_mnnvl.rows import MnnvlConfig, MnnvlMemory
    from comm_mnnvl.symmetric import McastGPUBuffer, SymmDeviceMemory

__all__ = [
    "MNNVLAllReduceFusionWorkspace",
    "McastGPUBuffer",
    "MnnvlConfig",
    "MnnvlMemory",
    "SymmDeviceMemory",
    "__version__",
    "default_backend",
    "mpi_barrier",
    "trtllm_mnnvl_all_reduce",
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant",
    "trtllm_mnnvl_fused_allreduce_rmsnorm",
]

_NAMES: dict[str, str] = {
    "MNNVLAllReduceFusionWorkspace": "comm_mnnvl.allreduce_workspace",
    "McastGPUBuffer": "comm_mnnvl.symmetric",
    "MnnvlConfig": "comm_mnnvl.rows",
    "MnnvlMemory": "comm_mnnvl.rows",
    "SymmDeviceMemory": "comm_mnnvl.symmetric",
    "default_backend": "comm_mnnvl.backends",
    "mpi_barrier": "comm_mnnvl.backends",
    "trtllm_mnnvl_all_reduce": "comm_mnnvl.allreduce_calls",
    "trtllm_mnnvl_allreduce": "comm_mnnvl.allreduce_calls",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm": "comm_mnnvl.allreduce_calls",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant": "comm_mnnvl.allreduce_calls",
    "trtllm_mnnvl_fused_allreduce_rmsnorm": "comm_mnnvl.allreduce_calls",
}
"""Public name -> module that defines it."""

# Imported when they are first used: a plugin's import stays cheap.
__getattr__, __dir__ = attach(__name__, _NAMES)
