"""What this package gives to comm-core: the object that its entry point names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comm_core.jit.spec import ModuleSpec
from comm_core.plugins import hookimpl
from comm_core.transport.interface import Transport
from comm_pcie.exchange import EXCHANGE
from comm_pcie.rdma.module import RDMA
from comm_pcie.selftest import SELFTEST
from comm_pcie.transport import PcieTransport

if TYPE_CHECKING:
    from typer import Typer

__all__ = ["PciePlugin", "plugin"]


class PciePlugin:
    """The hooks of this plugin."""

    comm_api = (1, 0)
    """The lowest hook API that it needs."""

    @hookimpl
    def comm_transports(self) -> Sequence[Transport]:
        """Return the one transport."""
        return (PcieTransport(),)

    @hookimpl
    def comm_modules(self) -> Sequence[ModuleSpec]:
        """Return the modules: of the copy engines, of the self-test, and of the engine for NICs."""
        return (EXCHANGE, SELFTEST, RDMA)

    @hookimpl
    def comm_commands(self) -> Sequence[tuple[str, Typer]]:
        """Return ``commctl pcie``."""
        from comm_pcie.cli import app

        return (("pcie", app),)


plugin = PciePlugin()
