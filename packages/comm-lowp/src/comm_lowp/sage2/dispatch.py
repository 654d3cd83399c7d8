"""Which implementation a primitive runs: the CUDA kernels where there are any, else PyTorch; the bytes are equal."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from comm_core.errors import CommError, UnsupportedError
from comm_core.windows.signals import MAX_RANKS
from comm_lowp import _env

if TYPE_CHECKING:
    import torch

    from comm_lowp.kernels import Kernels

__all__ = ["kernels_for"]

_log = logging.getLogger("comm_lowp")
_warned: set[str] = set()


def kernels_for(device: torch.device, world_size: int = 1) -> Kernels | None:
    """Return the kernels of a CUDA device, or None where PyTorch does the work. Builds them at first use.

    PyTorch does it on a CPU, with ``COMM_LOWP_KERNELS=off``, for more ranks than the kernels' tables have room for,
    and where the kernels can't be built or loaded; the reason is then logged once.

    Raises:
        CommError: they can't be built or loaded, or take fewer ranks, and ``COMM_LOWP_KERNELS=require``.
    """
    mode = _env.kernels()
    if device.type != "cuda" or mode == "off":
        return None
    if world_size > MAX_RANKS:
        if mode == "require":
            raise UnsupportedError(f"COMM_LOWP_KERNELS=require: kernels are for at most {MAX_RANKS} ranks")
        return None
    from comm_lowp.kernels import load

    try:
        return load(device)
    except CommError as error:
        if mode == "require":
            raise
        text = f"{device}: no kernels, PyTorch encodes instead, many times slower: {error}"
        if text not in _warned:
            _warned.add(text)
            _log.warning("%s", text)
        return None
