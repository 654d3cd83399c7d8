"""Groups of commands that plugins extend: a plugin's command named ``bench NAME`` appears under ``commctl bench``."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

__all__ = ["plugin_group"]


class _PluginGroup(TyperGroup):
    """Adds the commands that plugins put below this group's name; they can't replace its own."""

    def list_commands(self, ctx: Any) -> list[str]:
        from comm_core.cli.commands import plugin_commands_below

        own = super().list_commands(ctx)
        return [*own, *(name for name in plugin_commands_below(self.name or "") if name not in own)]

    # The types of the command-line library are private to typer in newer releases and public in older ones.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name.startswith("-"):
            return built_in
        from comm_core.cli.commands import plugin_command

        return plugin_command(f"{self.name} {cmd_name}")


def plugin_group(name: str, text: str) -> typer.Typer:
    """Return the group ``commctl NAME``; its own commands are added by whoever gets it.

    Args:
        name: of the group.
        text: its help.
    """
    group = typer.Typer(
        name=name,
        cls=_PluginGroup,
        help=text,
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    # A callback keeps it a group where it has a single command of its own.
    @group.callback()
    def _options() -> None:  # pyright: ignore[reportUnusedFunction]
        pass

    return group
