"""The Sage2 encoding of Q, K and V: its geometry and its primitives.

Users of a communicator need none of this: `prepare_qkv` and `scatter_qkv` put it together. It is here for tests, for
benchmarks, and for whoever brings an exchange of their own. docs/lowp.md explains the scheme.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_lowp.sage2.grid import LAYOUTS, SM89_SM120, SM90, Grid, Layout, PayloadSpec

if TYPE_CHECKING:
    # For type checkers and editors only; a test keeps it equal to the table below.
    from comm_lowp.sage2.primitives import (
        FinalStatistics,
        LocalStatistics,
        boundary_descriptors,
        capability,
        derive_k_boundary_amax,
        finalize_stats,
        k_boundary_minmax,
        k_grouped_amax,
        k_sum_v_amax,
        local_stats,
        merge_boundary_amax,
        payload_spec,
        q_grouped_amax,
        quant_and_pack,
        quant_kv_into_payload,
        quant_q_into_payload,
        quant_qkv_pack,
        quant_v_fp8_with_scale,
        scale_widths,
        slots,
        unpack_for_sage,
        verify_duplicate_scale_slots,
        zero_scale_and_padding,
    )
    from comm_lowp.sage2.reference import single_device

__all__ = [
    "LAYOUTS",
    "SM89_SM120",
    "SM90",
    "FinalStatistics",
    "Grid",
    "Layout",
    "LocalStatistics",
    "PayloadSpec",
    "boundary_descriptors",
    "capability",
    "derive_k_boundary_amax",
    "finalize_stats",
    "k_boundary_minmax",
    "k_grouped_amax",
    "k_sum_v_amax",
    "local_stats",
    "merge_boundary_amax",
    "payload_spec",
    "q_grouped_amax",
    "quant_and_pack",
    "quant_kv_into_payload",
    "quant_q_into_payload",
    "quant_qkv_pack",
    "quant_v_fp8_with_scale",
    "scale_widths",
    "single_device",
    "slots",
    "unpack_for_sage",
    "verify_duplicate_scale_slots",
    "zero_scale_and_padding",
]

_DIRECT = {"LAYOUTS", "SM89_SM120", "SM90", "Grid", "Layout", "PayloadSpec"}
_NAMES = {
    name: "comm_lowp.sage2.reference" if name == "single_device" else "comm_lowp.sage2.primitives"
    for name in __all__
    if name not in _DIRECT
}
"""Public name -> module that defines it, for what needs torch."""

__getattr__, __dir__ = attach(__name__, _NAMES)
