"""What this package gives to comm-core: the object that its entry point names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comm_core.plugins import hookimpl
from comm_lowp.bench.module import BANDWIDTH
from comm_lowp.codec import Sage2Codec
from comm_lowp.module import MODULE

if TYPE_CHECKING:
    from typer import Typer

    from comm_core.jit.spec import ModuleSpec

__all__ = ["LowpPlugin", "plugin"]


class LowpPlugin:
    """The hooks of this plugin."""

    comm_api = (1, 0)
    """The lowest hook API that it needs."""

    @hookimpl
    def comm_codecs(self) -> Sequence[object]:
        """Return the one encoding."""
        return (Sage2Codec(),)

    @hookimpl
    def comm_modules(self) -> Sequence[ModuleSpec]:
        """Return the CUDA modules: the encoding's, and the benchmark's."""
        return (MODULE, BANDWIDTH)

    @hookimpl
    def comm_commands(self) -> Sequence[tuple[str, Typer]]:
        """Return the subcommands of ``commctl``."""
        from comm_lowp.bench.command import app as bench
        from comm_lowp.demo.command import app as demo

        return (("bench lowp", bench), ("demo lowp", demo))


plugin = LowpPlugin()
