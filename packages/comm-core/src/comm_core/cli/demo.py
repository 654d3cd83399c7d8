"""``commctl demo``: the demonstrations, this package's and those of plugins.

The object `app` is mounted as a command of ``commctl``; importing this stays cheap, the work is imported by what
needs it.
"""

from __future__ import annotations

import typer

from comm_core.cli.groups import plugin_group

__all__ = ["app"]


app = plugin_group("demo", "Run something on this machine and check what comes out.")


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
    add_help_option=False,
)
def ulysses(context: typer.Context) -> None:
    """Attention layers over a picture, the sequence shared by several ranks: as python -m comm_core.demo."""
    from comm_core.demo.command import main

    main(context.args)
