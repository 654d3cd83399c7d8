"""All-reduce with what follows it: residual, RMSNorm, quantization.

Names are imported when they are first used; importing this package touches neither CUDA nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach

if TYPE_CHECKING:
    from comm_core.allreduce.patterns import (
        AllReduceFusionOp,
        AllReduceFusionPattern,
        AllReduceStrategyConfig,
        AllReduceStrategyType,
        MNNVLAllreduceFusionStrategy,
        MNNVLQuantType,
        QuantizationSFLayout,
    )
    from comm_core.allreduce.scales import compute_fp4_swizzled_layout_sf_size

__all__ = [
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "MNNVLAllreduceFusionStrategy",
    "MNNVLQuantType",
    "QuantizationSFLayout",
    "compute_fp4_swizzled_layout_sf_size",
]

_NAMES: dict[str, str] = {
    "AllReduceFusionOp": "comm_core.allreduce.patterns",
    "AllReduceFusionPattern": "comm_core.allreduce.patterns",
    "AllReduceStrategyConfig": "comm_core.allreduce.patterns",
    "AllReduceStrategyType": "comm_core.allreduce.patterns",
    "MNNVLAllreduceFusionStrategy": "comm_core.allreduce.patterns",
    "MNNVLQuantType": "comm_core.allreduce.patterns",
    "QuantizationSFLayout": "comm_core.allreduce.patterns",
    "compute_fp4_swizzled_layout_sf_size": "comm_core.allreduce.scales",
}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
