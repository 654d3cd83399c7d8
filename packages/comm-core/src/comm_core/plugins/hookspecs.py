"""The hooks that a plugin may implement, and the version of that contract.

The entry-point group carries the major number of the hook API; a plugin object may declare ``comm_api = (major,
minor)``, the lowest API that it needs, and is accepted if the major is equal and the minor is not above ours. A new
hook or a new hook argument raises the minor: pluggy lets an implementation take fewer arguments than the
specification, so older plugins keep working.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from typer import Typer

    from comm_core.allreduce.backend import AllReduceBackend
    from comm_core.jit.spec import ModuleSpec
    from comm_core.transport.interface import Transport

__all__ = ["API_VERSION", "ENTRY_POINT_GROUP", "PROJECT", "CommSpecs", "hookimpl", "hookspec"]

PROJECT = "comm_core"
API_VERSION = (1, 0)
ENTRY_POINT_GROUP = f"comm_core.v{API_VERSION[0]}"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class CommSpecs:
    """The hooks. A plugin implements those that it has something for."""

    @hookspec
    def comm_transports(self) -> Sequence[Transport]:  # pyright: ignore[reportReturnType]
        """Return the transports of this plugin (`comm_core.transport.interface.Transport`)."""

    @hookspec
    def comm_codecs(self) -> Sequence[object]:  # pyright: ignore[reportReturnType]
        """Return the QKV encodings of this plugin; each has a ``name``, a ``version`` and a ``wire`` number."""

    @hookspec
    def comm_allreduce(self) -> Sequence[AllReduceBackend]:  # pyright: ignore[reportReturnType]
        """Return the all-reduce backends of this plugin (`comm_core.allreduce.backend.AllReduceBackend`)."""

    @hookspec
    def comm_modules(self) -> Sequence[ModuleSpec]:  # pyright: ignore[reportReturnType]
        """Return the CUDA modules of this plugin (`comm_core.jit.ModuleSpec`), for ``commctl jit`` to build ahead."""

    @hookspec
    def comm_commands(self) -> Sequence[tuple[str, Typer]]:  # pyright: ignore[reportReturnType]
        """Return subcommands of ``commctl`` as (name, `typer.Typer` application)."""
