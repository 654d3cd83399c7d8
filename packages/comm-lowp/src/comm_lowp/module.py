"""Description of the CUDA module of the Sage2 encoding. Plain data; importing it imports neither torch nor CUDA."""

from __future__ import annotations

from comm_core.jit.spec import ModuleSpec
from comm_core.windows.signals import MAX_RANKS

__all__ = ["MODULE"]

_VIEW = "P3q"  # data, strides of batch, rows and heads
_QKV = _VIEW * 3
_PARTIALS = "4P"

MODULE = ModuleSpec(
    name="comm_lowp_sage2",
    package="comm_lowp",
    sources=("csrc/sage2.cu",),
    structs={
        # B, L; H, D, rank, P, U, bfloat16, log2 of groups, blocks; largest magnitude of V, unused
        "comm_lowp_geometry_v1": "II10If1I0Q",
        # stream, geometry; q, k, v; partials, statistics, counters; flags, unused
        "comm_lowp_statistics_args_v1": f"II2P{_QKV}{_PARTIALS}2P2I0Q",
        # stream, geometry, gathered, mean; partials; k_mean, q_amax, k_amax, v_scale, own_v_scale; flags, unused
        "comm_lowp_finalize_args_v1": f"II4P{_PARTIALS}5P2I0Q",
        # stream, geometry; q, k, v; k_mean, q_amax, k_amax, v_scale; destinations; flags, parts
        "comm_lowp_pack_args_v1": f"II2P{_QKV}4P{MAX_RANKS}Q2I0Q",
        # stream, geometry, received, q, k, v, q_scale, k_scale; scale_sequence, flags
        "comm_lowp_unpack_args_v1": "II8P2I0Q",
        # stream, geometry, session; q, k, v; partials, counters, k_mean, q_amax, k_amax, v_scale; six outputs;
        # windows, offset of the statistics; window, two operations, flags
        "comm_lowp_scatter_args_v1": f"II3P{_QKV}{_PARTIALS}5P6P{MAX_RANKS}QQ4I0Q",
    },
    entry_points={
        "comm_lowp_statistics_v1": "comm_lowp_statistics_args_v1",
        "comm_lowp_finalize_v1": "comm_lowp_finalize_args_v1",
        "comm_lowp_pack_v1": "comm_lowp_pack_args_v1",
        "comm_lowp_unpack_v1": "comm_lowp_unpack_args_v1",
        "comm_lowp_scatter_v1": "comm_lowp_scatter_args_v1",
    },
)
"""Twin: csrc/sage2.cu."""
