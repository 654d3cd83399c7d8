"""The built-in plugin: torch.distributed's NCCL and gloo as transports."""

from __future__ import annotations

from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.transport.dist import DistTransport
from comm_core.transport.interface import Transport

__all__ = ["comm_api", "comm_transports"]

comm_api = API_VERSION


@hookimpl
def comm_transports() -> list[Transport]:
    """Return the fallbacks. Negative priorities put them after everything that somebody installs on purpose."""
    return [
        DistTransport("nccl", ("cuda",), priority=-1, verified_on=("two GPUs with NVLink",)),
        DistTransport(
            "gloo", ("cpu", "cuda"), priority=-2, verified_on=("CPU processes", "several ranks on one GPU")
        ),
    ]
