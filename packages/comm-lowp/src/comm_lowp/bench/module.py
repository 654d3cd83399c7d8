"""Description of the module that measures memory. Plain data."""

from __future__ import annotations

from comm_core.jit.spec import ModuleSpec

__all__ = ["BANDWIDTH"]

BANDWIDTH = ModuleSpec(
    name="comm_lowp_bandwidth",
    package="comm_lowp",
    sources=("csrc/bandwidth.cu",),
    # stream, data, sink, bytes; blocks
    structs={"comm_lowp_read_args_v1": "II3PQI0Q"},
    entry_points={"comm_lowp_read_v1": "comm_lowp_read_args_v1"},
)
"""Twin: csrc/bandwidth.cu."""
