"""Commands that plugins add to ``commctl``. What is wrong with one of them costs that one and no other.

A name of two words is a command below a command of ``commctl`` that takes some: ``bench lowp`` is a benchmark,
``demo lowp`` a demonstration.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import typer

from comm_core.errors import PluginError
from comm_core.plugins.discovery import Registry, registry

__all__ = ["command_apps", "plugin_command", "plugin_commands_below"]

_EXTENSIBLE = ("bench", "demo")
"""Commands of ``commctl`` below which plugins may put theirs."""


def command_apps(plugins: Registry) -> tuple[dict[str, typer.Typer], list[str]]:
    """Return the commands of all plugins by name, and what is wrong with the others."""
    apps: dict[str, typer.Typer] = {}
    wrong: list[str] = []
    for entry in cast("list[object]", plugins.commands):
        parts = cast("tuple[object, ...]", entry) if isinstance(entry, (tuple, list)) else ()
        if len(parts) != 2 or not isinstance(parts[0], str) or not isinstance(parts[1], typer.Typer):
            wrong.append(f"comm_commands must return (name, typer.Typer) pairs, got {entry!r}")
        elif not _can_be_reached(parts[0]):
            below = " or ".join(f"'{name} NAME'" for name in _EXTENSIBLE)
            wrong.append(f"a command's name must be one word, or {below}, got {parts[0]!r}")
        elif parts[0] in apps:
            wrong.append(f"two plugins provide the command {parts[0]!r}; the first one is used")
        else:
            apps[parts[0]] = parts[1]
    return apps, wrong


def _can_be_reached(name: str) -> bool:
    words = name.split()
    if " ".join(words) != name:
        return False
    return len(words) == 1 or (len(words) == 2 and words[0] in _EXTENSIBLE)


def plugin_commands_below(command: str) -> list[str]:
    """Return the names, without the first word, of the plugins' commands below `command`."""
    apps, _ = command_apps(registry())
    return [name.partition(" ")[2] for name in apps if name.startswith(f"{command} ")]


def plugin_command(name: str) -> Any:
    """Return the command `name` of a plugin, as typer dispatches it, or None where none provides it.

    Args:
        name: one word, or two where the first is a command that takes more.

    Raises:
        PluginError: a plugin provides it, and it can't be used.
    """
    plugins = registry()
    apps, _ = command_apps(plugins)
    if name not in apps:
        for report in plugins.reports:
            if report.state not in ("loaded", "blocked"):
                # The command may well be the one that this plugin would bring.
                print(
                    f"commctl: plugin {report.name!r} is {report.state}, so its commands are missing: {report.error}",
                    file=sys.stderr,
                )
        return None
    try:
        command = typer.main.get_command(apps[name])
    except Exception as error:
        raise PluginError(
            f"the command {name!r} of a plugin can't be used: {type(error).__name__}: {error}"
        ) from error
    command.name = name.rpartition(" ")[2]
    return command
