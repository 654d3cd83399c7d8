"""The module of the RDMA engine: its description, and the structs that go in and out."""

from __future__ import annotations

import struct
from typing import Final

from comm_core.jit.spec import ModuleSpec

__all__ = [
    "ATTACHED",
    "COUNTERS",
    "ENDPOINT",
    "MEMORY",
    "OUTCOME",
    "POSTED",
    "RDMA",
    "SETTINGS",
    "SHARE",
    "StructError",
]

_STRUCTS: Final = {
    "load": "II3P0Q",
    "devices": "II2PQ0Q",
    "open": "II6P3I0Q",
    "endpoints": "II2P0Q",
    "revalidate": "IIP0Q",
    "connect": "II2PI0Q",
    "register": "II7P0Q",
    "attach": "II2PI0Q",
    "rebind": "II3PQI0Q",
    "exchange": "II3PQ2I0Q",
    "close_pair": "IIP0Q",
    "quiesce": "II3P2Q0Q",
    "heed": "II2P0Q",
    "abort": "II2P0Q",
    "look": "II4PQ0Q",
    "posted": "II2P0Q",
    "close": "IIP0Q",
}

RDMA = ModuleSpec(
    name="comm_pcie_rdma",
    package="comm_pcie",
    sources=("csrc/rdma.cpp", "csrc/rdma_engine.cpp", "csrc/rdma_exchange.cpp", "csrc/rdma_verbs.cpp"),
    structs={f"comm_pcie_rdma_{name}_args_v1": text for name, text in _STRUCTS.items()},
    entry_points={f"comm_pcie_rdma_{name}_v1": f"comm_pcie_rdma_{name}_args_v1" for name in _STRUCTS},
    needs=(("infiniband/verbs.h", "libibverbs-dev"), ("infiniband/mlx5dv.h", "libibverbs-dev")),
)
"""Twin: csrc/rdma.cpp."""

# Twins: include/comm_pcie/rdma_types.h.
SETTINGS = struct.Struct("6I")
ENDPOINT = struct.Struct("16sQ4I")
MEMORY = struct.Struct("3QiI")
SHARE = struct.Struct("2I12Q")
ATTACHED = struct.Struct("2Q4I")
OUTCOME = struct.Struct("IiQII488s")
COUNTERS = struct.Struct("11Q")
POSTED = struct.Struct("2I")

StructError = struct.error
