"""Every environment variable that comm-lowp reads. Nothing is read at import."""

from __future__ import annotations

import os

from comm_core import _env

__all__ = ["VARIABLES", "build_timeout_s", "layout"]

VARIABLES: dict[str, str] = {
    "COMM_LOWP_LAYOUT": "sage2_sm90 or sage2_sm89_sm120, equal on all ranks: encode for that consumer",
}
"""Name -> what it does."""


def layout() -> str | None:
    """Return ``COMM_LOWP_LAYOUT``, or None where the device decides."""
    return os.environ.get("COMM_LOWP_LAYOUT") or None


def build_timeout_s() -> float:
    """Return the seconds that building the kernels may take."""
    return _env.jit_timeout_s()
