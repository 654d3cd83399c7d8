"""Every environment variable that comm-lowp reads. Nothing is read at import."""

from __future__ import annotations

import os

from comm_core import _env
from comm_core.errors import ArgumentValueError

__all__ = ["VARIABLES", "build_timeout_s", "kernels", "layout"]

VARIABLES: dict[str, str] = {
    "COMM_LOWP_KERNELS": "try (default): CUDA kernels, else PyTorch; require: kernels or an error; off: PyTorch",
    "COMM_LOWP_LAYOUT": "sage2_sm90 or sage2_sm89_sm120, equal on all ranks: encode for that consumer",
}
"""Name -> what it does."""


def layout() -> str | None:
    """Return ``COMM_LOWP_LAYOUT``, or None where the device decides."""
    return os.environ.get("COMM_LOWP_LAYOUT") or None


def build_timeout_s() -> float:
    """Return the seconds that building the kernels may take."""
    return _env.jit_timeout_s()


def kernels() -> str:
    """Return ``COMM_LOWP_KERNELS``: ``"try"``, ``"require"`` or ``"off"``."""
    value = os.environ.get("COMM_LOWP_KERNELS", "") or "try"
    if value not in ("try", "require", "off"):
        raise ArgumentValueError(f"COMM_LOWP_KERNELS must be try, require or off, got {value!r}")
    return value
