"""comm-core decides and plans; plugins move bytes.

Names are imported when they are first used: importing this package touches neither CUDA, NVML, the network nor the
disk, and works without torch.distributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_core._version import __version__

if TYPE_CHECKING:
    # For type checkers and editors only; a test keeps it equal to the table below.
    from comm_core.allreduce.front import allreduce_fusion, create_allreduce_fusion_workspace
    from comm_core.allreduce.patterns import (
        AllReduceFusionOp,
        AllReduceFusionPattern,
        AllReduceStrategyConfig,
        AllReduceStrategyType,
        MNNVLAllreduceFusionStrategy,
        QuantizationSFLayout,
    )
    from comm_core.allreduce.scales import compute_fp4_swizzled_layout_sf_size
    from comm_core.allreduce.workspace import AllReduceFusionWorkspace
    from comm_core.comm_backend import CommBackend, MPIBackend, TorchDistBackend
    from comm_core.errors import (
        AllReduceBackendError,
        CommError,
        GroupTimeoutError,
        JointError,
        JointValueError,
        TransportError,
        UlyssesBackendError,
    )
    from comm_core.group import Group
    from comm_core.mapping import Mapping
    from comm_core.memory.cudart import CudaRTLibrary
    from comm_core.memory.shared_buffer import create_shared_buffer, free_shared_buffer
    from comm_core.memory.strided import pack_strided_memory
    from comm_core.topology.ulysses import UlyssesPciePlan, UlyssesRankTopology, probe_ulysses_rank_topology
    from comm_core.ulysses.communicator import UlyssesCommunicator
    from comm_core.ulysses.decision import UlyssesBackendDecision, decide_ulysses_backend, resolve_ulysses_backend
    from comm_core.ulysses.head_chunk import merge_ulysses_output_head_chunk, pack_ulysses_qkv_head_chunk
    from comm_core.ulysses.workspace import UlyssesWorkspace

__all__ = [
    "AllReduceBackendError",
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceFusionWorkspace",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "CommBackend",
    "CommError",
    "CudaRTLibrary",
    "Group",
    "GroupTimeoutError",
    "JointError",
    "JointValueError",
    "MNNVLAllreduceFusionStrategy",
    "MPIBackend",
    "Mapping",
    "QuantizationSFLayout",
    "TorchDistBackend",
    "TransportError",
    "UlyssesBackendDecision",
    "UlyssesBackendError",
    "UlyssesCommunicator",
    "UlyssesPciePlan",
    "UlyssesRankTopology",
    "UlyssesWorkspace",
    "__version__",
    "allreduce_fusion",
    "compute_fp4_swizzled_layout_sf_size",
    "create_allreduce_fusion_workspace",
    "create_shared_buffer",
    "decide_ulysses_backend",
    "free_shared_buffer",
    "merge_ulysses_output_head_chunk",
    "pack_strided_memory",
    "pack_ulysses_qkv_head_chunk",
    "probe_ulysses_rank_topology",
    "resolve_ulysses_backend",
]

_NAMES: dict[str, str] = {
    "AllReduceBackendError": "comm_core.errors",
    "AllReduceFusionOp": "comm_core.allreduce.patterns",
    "AllReduceFusionPattern": "comm_core.allreduce.patterns",
    "AllReduceFusionWorkspace": "comm_core.allreduce.workspace",
    "AllReduceStrategyConfig": "comm_core.allreduce.patterns",
    "AllReduceStrategyType": "comm_core.allreduce.patterns",
    "CommBackend": "comm_core.comm_backend",
    "CommError": "comm_core.errors",
    "CudaRTLibrary": "comm_core.memory.cudart",
    "Group": "comm_core.group",
    "GroupTimeoutError": "comm_core.errors",
    "JointError": "comm_core.errors",
    "JointValueError": "comm_core.errors",
    "MNNVLAllreduceFusionStrategy": "comm_core.allreduce.patterns",
    "MPIBackend": "comm_core.comm_backend",
    "Mapping": "comm_core.mapping",
    "QuantizationSFLayout": "comm_core.allreduce.patterns",
    "TorchDistBackend": "comm_core.comm_backend",
    "TransportError": "comm_core.errors",
    "UlyssesBackendDecision": "comm_core.ulysses.decision",
    "UlyssesBackendError": "comm_core.errors",
    "UlyssesCommunicator": "comm_core.ulysses.communicator",
    "UlyssesPciePlan": "comm_core.topology.ulysses",
    "UlyssesRankTopology": "comm_core.topology.ulysses",
    "UlyssesWorkspace": "comm_core.ulysses.workspace",
    "allreduce_fusion": "comm_core.allreduce.front",
    "compute_fp4_swizzled_layout_sf_size": "comm_core.allreduce.scales",
    "create_allreduce_fusion_workspace": "comm_core.allreduce.front",
    "create_shared_buffer": "comm_core.memory.shared_buffer",
    "decide_ulysses_backend": "comm_core.ulysses.decision",
    "free_shared_buffer": "comm_core.memory.shared_buffer",
    "merge_ulysses_output_head_chunk": "comm_core.ulysses.head_chunk",
    "pack_strided_memory": "comm_core.memory.strided",
    "pack_ulysses_qkv_head_chunk": "comm_core.ulysses.head_chunk",
    "probe_ulysses_rank_topology": "comm_core.topology.ulysses",
    "resolve_ulysses_backend": "comm_core.ulysses.decision",
}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
