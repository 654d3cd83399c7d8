"""The built-in plugin: NCCL and gloo as transports, all-reduce over them, and the CUDA modules of comm-core."""

from __future__ import annotations

from comm_core.allreduce.backend import AllReduceBackend
from comm_core.allreduce.dist import DistAllReduce
from comm_core.jit.selfcheck import SPECS
from comm_core.jit.spec import ModuleSpec
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.transport.dist import DistTransport
from comm_core.transport.interface import Transport
from comm_core.windows.launch import WINDOWS
from comm_core.windows.transport import WindowTransport

__all__ = ["comm_allreduce", "comm_api", "comm_modules", "comm_transports"]

comm_api = API_VERSION


@hookimpl
def comm_transports() -> list[Transport]:
    """Return the plain transports over windows, and the fallbacks.

    Negative priorities put the fallbacks after everything that somebody installs on purpose.
    """
    return [
        WindowTransport("windows", copy_engines=False),
        WindowTransport("windows-ce", copy_engines=True),
        DistTransport("nccl", ("cuda",), priority=-1, verified_on=("two GPUs with NVLink",)),
        DistTransport(
            "gloo", ("cpu", "cuda"), priority=-2, verified_on=("CPU processes", "several ranks on one GPU")
        ),
    ]


@hookimpl
def comm_allreduce() -> list[AllReduceBackend]:
    """Return the all-reduce that every group can use."""
    return [DistAllReduce()]


@hookimpl
def comm_modules() -> tuple[ModuleSpec, ...]:
    """Return the modules of comm-core itself."""
    return (*SPECS, WINDOWS)
