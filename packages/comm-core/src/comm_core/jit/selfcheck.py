"""The module of the self-check: two kernels that show whether building, loading and launching work here."""

from __future__ import annotations

from comm_core.jit.spec import ModuleSpec

__all__ = ["SELFCHECK", "SPECS"]

SELFCHECK = ModuleSpec(
    name="comm_core_selfcheck",
    package="comm_core",
    sources=("csrc/selfcheck.cu",),
    structs={
        # stream, launches
        "comm_core_empty_args_v1": "IIPI0Q",
        # stream, data, words, value
        "comm_core_fill_args_v1": "IIPPQI0Q",
    },
    entry_points={
        "comm_core_empty_v1": "comm_core_empty_args_v1",
        "comm_core_fill_v1": "comm_core_fill_args_v1",
    },
)
"""Twin: csrc/selfcheck.cu."""

SPECS: tuple[ModuleSpec, ...] = (SELFCHECK,)
"""The modules of comm-core itself."""
