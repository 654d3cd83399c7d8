"""JIT: CUDA modules with a plain C interface, built by nvcc when they are first needed, and cached.

    module = jit.load(SPEC, device)           # built once for all processes, checked, kernels loaded
    exchange = module.bind("comm_x_exchange_v1")
    exchange(stream, table, count)            # one struct, one pointer, one launch

A package describes its modules as `ModuleSpec` (plain data) and hands them out by the ``comm_modules`` hook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach

if TYPE_CHECKING:
    from comm_core.jit.cache import Artifact
    from comm_core.jit.libraries import obtain
    from comm_core.jit.loader import Call, Module, load
    from comm_core.jit.spec import ModuleSpec, specs

__all__ = ["Artifact", "Call", "Module", "ModuleSpec", "load", "obtain", "specs"]

_NAMES = {
    "Artifact": "comm_core.jit.cache",
    "Call": "comm_core.jit.loader",
    "Module": "comm_core.jit.loader",
    "ModuleSpec": "comm_core.jit.spec",
    "load": "comm_core.jit.loader",
    "obtain": "comm_core.jit.libraries",
    "specs": "comm_core.jit.spec",
}

__getattr__, __dir__ = attach(__name__, _NAMES)
