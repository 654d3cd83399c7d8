"""What this package gives to comm-core: the object that its entry point names."""

from __future__ import annotations

from collections.abc import Sequence

from comm_core.allreduce.backend import AllReduceBackend
from comm_core.jit.spec import ModuleSpec
from comm_core.plugins import hookimpl
from comm_core.transport.interface import Transport
from comm_mnnvl.allreduce import ALLREDUCE, MnnvlAllReduce
from comm_mnnvl.transport import MnnvlTransport

__all__ = ["MnnvlPlugin", "plugin"]


class MnnvlPlugin:
    """The hooks of this plugin."""

    comm_api = (1, 0)
    """The lowest hook API that it needs."""

    @hookimpl
    def comm_transports(self) -> Sequence[Transport]:
        """Return the one transport."""
        return (MnnvlTransport(),)

    @hookimpl
    def comm_allreduce(self) -> Sequence[AllReduceBackend]:
        """Return the one all-reduce backend."""
        return (MnnvlAllReduce(),)

    @hookimpl
    def comm_modules(self) -> Sequence[ModuleSpec]:
        """Return the module of the all-reduce."""
        return (ALLREDUCE,)


plugin = MnnvlPlugin()
