"""Which implementation a primitive runs: the CUDA kernels where they can, else the reference."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["kernels_for"]


def kernels_for(device: torch.device) -> Any:
    """Return the loaded kernels of a CUDA device, or None for a CPU. Builds them at first use."""
    if device.type != "cuda":
        return None
    return importlib.import_module("comm_lowp.kernels").load(device)
