"""Every environment variable that comm-core reads, in one place.

A variable that changes what the group does is read once a communicator, shipped in the first gather and compared:
ranks that disagree raise together. Nothing is read at import.
"""

from __future__ import annotations

import os
import re

from comm_core.errors import ArgumentValueError

__all__ = [
    "VARIABLES",
    "allow_experimental_auto",
    "allow_shared_gpu",
    "blocked_plugins",
    "cache_dir",
    "check",
    "cuda_arch_list",
    "jit_off",
    "jit_timeout_s",
    "nvcc",
    "on_stall",
    "pcie_gid_indices",
    "pcie_nics",
    "pcie_route",
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
    "COMM_ON_STALL": "poison (default): a stalled operation fills its outputs with NaN bytes; status: it does not",
    "COMM_PEER_MEMORY": "auto, vmm_fd or cuda_ipc, equal on all ranks: how ranks share device memory (default auto)",
    "COMM_ULYSSES_PCIE_ROUTE": "auto, p2p, rdma, hybrid, prefer-rdma or prefer-hybrid, on all ranks: how 'pcie' goes",
    "COMM_ULYSSES_PCIE_NICS": "NIC of each rank for the RDMA routes of 'pcie', as in 'mlx5_0,mlx5_3'; on all ranks",
    "COMM_ULYSSES_PCIE_GID_INDICES": "GID index of each rank for those routes, as in '3,5'; equal on all ranks",
    "COMM_TOPOLOGY_FILE": "a recorded topology (JSON) that replaces the probe",
    "COMM_BLOCK_PLUGINS": "comma-separated plugin names that are not loaded",
    "COMM_TRACE_HOOKS": "1: print every plugin hook call to standard error",
    "COMM_JIT": "off: never compile; use the libraries that are in the cache (default on)",
    "COMM_JIT_TIMEOUT_S": "seconds that building one library may take, waiting for another process included (600)",
    "COMM_CACHE_DIR": "folder for compiled libraries (default $XDG_CACHE_HOME/comm or ~/.cache/comm)",
    "COMM_CUDA_ARCH_LIST": "GPU architectures to compile for, as in '9.0a;8.0' (default: the device in use)",
    "COMM_NVCC": "path of nvcc (default: from CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda*)",
}
"""Name -> what it does. `commctl doctor` and the documentation print this table."""

_PCIE_ROUTES = ("auto", "p2p", "rdma", "hybrid", "prefer-rdma", "prefer-hybrid")
_PEER_MEMORY = ("auto", "vmm_fd", "cuda_ipc")

_MAX_TIMEOUT_S = 24 * 3600.0


def _flag(name: str) -> bool:
    value = os.environ.get(name, "")
    if value in ("", "0"):
        return False
    if value == "1":
        return True
    raise ArgumentValueError(f"{name} must be 0 or 1, got {value!r}")


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= _MAX_TIMEOUT_S:
        raise ArgumentValueError(f"{name} must be seconds in (0, {_MAX_TIMEOUT_S:g}], got {text!r}")
    return value


def timeout_s() -> float:
    """Return ``COMM_TIMEOUT_S``: the seconds that a step waits for another rank."""
    return _seconds("COMM_TIMEOUT_S", 60.0)


def check() -> bool:
    """Return ``COMM_CHECK``."""
    return _flag("COMM_CHECK")


def allow_experimental_auto() -> bool:
    """Return ``COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS``."""
    return _flag("COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS")


def allow_shared_gpu() -> bool:
    """Return ``COMM_ALLOW_SHARED_GPU``."""
    return _flag("COMM_ALLOW_SHARED_GPU")


def on_stall() -> str:
    """Return ``COMM_ON_STALL``: ``"poison"`` or ``"status"``."""
    value = os.environ.get("COMM_ON_STALL", "") or "poison"
    if value not in ("poison", "status"):
        raise ArgumentValueError(f"COMM_ON_STALL must be 'poison' or 'status', got {value!r}")
    return value


def peer_memory() -> str:
    """Return ``COMM_PEER_MEMORY``: the form in which ranks share device memory, or ``"auto"``."""
    value = os.environ.get("COMM_PEER_MEMORY") or "auto"
    if value not in _PEER_MEMORY:
        raise ArgumentValueError(f"COMM_PEER_MEMORY must be one of {', '.join(_PEER_MEMORY)}, got {value!r}")
    return value


def pcie_route() -> str:
    """Return ``COMM_ULYSSES_PCIE_ROUTE``: the route that is asked of the PCIe transport, or ``"auto"``."""
    value = os.environ.get("COMM_ULYSSES_PCIE_ROUTE") or "auto"
    if value not in _PCIE_ROUTES:
        raise ArgumentValueError(f"COMM_ULYSSES_PCIE_ROUTE must be one of {', '.join(_PCIE_ROUTES)}, got {value!r}")
    return value


def pcie_nics() -> str:
    """Return ``COMM_ULYSSES_PCIE_NICS``: names of RDMA devices with commas between, one a rank, or empty."""
    value = os.environ.get("COMM_ULYSSES_PCIE_NICS", "").strip()
    if value and not re.fullmatch(r"[\w.-]+(\s*,\s*[\w.-]+)*", value, re.ASCII):
        raise ArgumentValueError(f"COMM_ULYSSES_PCIE_NICS must be names with commas between, got {value!r}")
    return "".join(value.split())


def pcie_gid_indices() -> str:
    """Return ``COMM_ULYSSES_PCIE_GID_INDICES``: numbers with commas between, one a rank, or empty."""
    value = os.environ.get("COMM_ULYSSES_PCIE_GID_INDICES", "").strip()
    if value and not re.fullmatch(r"[0-9]{1,5}(\s*,\s*[0-9]{1,5})*", value, re.ASCII):
        raise ArgumentValueError(f"COMM_ULYSSES_PCIE_GID_INDICES must be numbers with commas between, got {value!r}")
    return "".join(value.split())


def topology_file() -> str | None:
    """Return ``COMM_TOPOLOGY_FILE``, or None where it is not set."""
    return os.environ.get("COMM_TOPOLOGY_FILE") or None


def blocked_plugins() -> frozenset[str]:
    """Return the names in ``COMM_BLOCK_PLUGINS``."""
    return frozenset(name.strip() for name in os.environ.get("COMM_BLOCK_PLUGINS", "").split(",") if name.strip())


def trace_hooks() -> bool:
    """Return ``COMM_TRACE_HOOKS``."""
    return _flag("COMM_TRACE_HOOKS")


def jit_off() -> bool:
    """Return whether ``COMM_JIT`` forbids compiling."""
    value = os.environ.get("COMM_JIT", "")
    if value in ("", "on"):
        return False
    if value == "off":
        return True
    raise ArgumentValueError(f"COMM_JIT must be on or off, got {value!r}")


def jit_timeout_s() -> float:
    """Return ``COMM_JIT_TIMEOUT_S``: the seconds that building one library may take."""
    return _seconds("COMM_JIT_TIMEOUT_S", 600.0)


def cache_dir() -> str | None:
    """Return ``COMM_CACHE_DIR``, or None where it is not set."""
    return os.environ.get("COMM_CACHE_DIR") or None


def cuda_arch_list() -> str | None:
    """Return ``COMM_CUDA_ARCH_LIST``, or None where it is not set or blank."""
    return os.environ.get("COMM_CUDA_ARCH_LIST", "").strip() or None


def nvcc() -> str | None:
    """Return ``COMM_NVCC``, or None where it is not set."""
    return os.environ.get("COMM_NVCC") or None
