"""What this package gives to comm-core: the object that its entry point names."""

from __future__ import annotations

from collections.abc import Sequence

from comm_core.allreduce.backend import AllReduceBackend
from comm_core.jit.spec import ModuleSpec
from comm_core.plugins import hookimpl
from comm_core.transport.interface import Transport
from comm_nvlink.allreduce import ALLREDUCE, TrtllmAllReduce
from comm_nvlink.launch import ULYSSES
from comm_nvlink.pool import POOL
from comm_nvlink.transport import NvlinkTransport

__all__ = ["NvlinkPlugin", "plugin"]


class NvlinkPlugin:
    """The hooks of this plugin."""

    comm_api = (1, 0)
    """The lowest hook API that it needs."""

    @hookimpl
    def comm_transports(self) -> Sequence[Transport]:
        """Return the one transport."""
        return (NvlinkTransport(),)

    @hookimpl
    def comm_allreduce(self) -> Sequence[AllReduceBackend]:
        """Return the one all-reduce backend."""
        return (TrtllmAllReduce(),)

    @hookimpl
    def comm_modules(self) -> Sequence[ModuleSpec]:
        """Return the modules of the exchange, of the memory pool and of the all-reduce."""
        return (ULYSSES, POOL, ALLREDUCE)


plugin = NvlinkPlugin()
