"""``commctl demo``: the demonstrations, this package's and those of plugins.

The object `app` is mounted as a command of ``commctl``; importing this stays cheap, the work is imported by what
needs it.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["app"]


class _Demos(TyperGroup):
    """Adds the demonstrations of plugins: commands that they call ``demo NAME``."""

    def list_commands(self, ctx: Any) -> list[str]:
        from comm_core.cli.commands import plugin_commands_below

        own = super().list_commands(ctx)
        return [*own, *(name for name in plugin_commands_below("demo") if name not in own)]

    # The types of the command-line library are private to typer in newer releases and public in older ones.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name.startswith("-"):
            return built_in
        from comm_core.cli.commands import plugin_command

        return plugin_command(f"demo {cmd_name}")


app = typer.Typer(
    name="demo",
    cls=_Demos,
    help="Run something on this machine and check what comes out.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _options() -> None:
    """Run something on this machine and check what comes out."""


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def ulysses(context: typer.Context) -> None:
    """Attention layers over a picture, the sequence shared by several ranks: as python -m comm_core.demo."""
    from comm_core.demo.command import main

    main(context.args)
