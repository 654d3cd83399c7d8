"""Every environment variable that comm-core reads, in one place.

A variable that changes what the group does is read once a communicator, shipped in the first gather and compared:
ranks that disagree raise together. Nothing is read at import.
"""

from __future__ import annotations

import os

from comm_core.errors import ArgumentValueError

__all__ = [
    "VARIABLES",
    "allow_experimental_auto",
    "allow_shared_gpu",
    "blocked_plugins",
    "check",
    "peer_memory",
    "timeout_s",
    "topology_file",
    "trace_hooks",
]

VARIABLES: dict[str, str] = {
    "COMM_TIMEOUT_S": "seconds that a step waits for another rank (default 60)",
    "COMM_CHECK": "1: agree geometry, dtype and call order before each collective",
    "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS": "1 on every rank: 'auto' may choose an experimental transport",
    "COMM_ALLOW_SHARED_GPU": "1 on every rank: several ranks may share a GPU (for testing)",
    "COMM_PEER_MEMORY": "auto, vmm_fd or cuda_ipc, equal on all ranks: how ranks share device memory (default auto)",
    "COMM_TOPOLOGY_FILE": "a recorded topology (JSON) that replaces the probe",
    "COMM_BLOCK_PLUGINS": "comma-separated plugin names that are not loaded",
    "COMM_TRACE_HOOKS": "1: print every plugin hook call to standard error",
}
"""Name -> what it does. `commctl doctor` and the documentation print this table."""

_PEER_MEMORY = ("auto", "vmm_fd", "cuda_ipc")

_MAX_TIMEOUT_S = 24 * 3600.0


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ArgumentValueError(f"{name} must be 0 or 1, got {value!r}")


def timeout_s() -> float:
    """Return ``COMM_TIMEOUT_S``: the seconds that a step waits for another rank."""
    text = os.environ.get("COMM_TIMEOUT_S", "")
    if not text:
        return 60.0
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise ArgumentValueError(f"COMM_TIMEOUT_S must be seconds in (0, {_MAX_TIMEOUT_S:g}], got {text!r}")
    return value


def check() -> bool:
    """Return ``COMM_CHECK``."""
    return _flag("COMM_CHECK")


def allow_experimental_auto() -> bool:
    """Return ``COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS``."""
    return _flag("COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS")


def allow_shared_gpu() -> bool:
    """Return ``COMM_ALLOW_SHARED_GPU``."""
    return _flag("COMM_ALLOW_SHARED_GPU")


def peer_memory() -> str:
    """Return ``COMM_PEER_MEMORY``: the form in which ranks share device memory, or ``"auto"``."""
    value = os.environ.get("COMM_PEER_MEMORY") or "auto"
    if value not in _PEER_MEMORY:
        raise ArgumentValueError(f"COMM_PEER_MEMORY must be one of {', '.join(_PEER_MEMORY)}, got {value!r}")
    return value


def topology_file() -> str | None:
    """Return ``COMM_TOPOLOGY_FILE``, or None where it is not set."""
    return os.environ.get("COMM_TOPOLOGY_FILE") or None


def blocked_plugins() -> frozenset[str]:
    """Return the names in ``COMM_BLOCK_PLUGINS``."""
    return frozenset(name.strip() for name in os.environ.get("COMM_BLOCK_PLUGINS", "").split(",") if name.strip())


def trace_hooks() -> bool:
    """Return ``COMM_TRACE_HOOKS``."""
    return _flag("COMM_TRACE_HOOKS")
