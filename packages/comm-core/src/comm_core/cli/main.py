"""The command line: ``commctl``.

Importing this module must stay cheap, because ``commctl --help`` does it: torch, rich and the plugins are imported by
the commands that need them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from comm_core.cli import bench, demo, jit
from comm_core.errors import CommError

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """Asks the plugins for a command that is not built in; only then are they loaded."""

    # The types of the command-line library are private to typer in newer releases and public in older ones.
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        built_in = super().get_command(ctx, cmd_name)
        if built_in is not None or cmd_name.startswith("-"):
            return built_in
        from comm_core.cli.commands import plugin_command

        return plugin_command(cmd_name)


app = typer.Typer(
    name="commctl",
    cls=_Group,
    help="Show what comm can do on this machine, and why.",
    epilog="Plugins may add commands of their own: `commctl plugins` lists them, `commctl NAME --help` explains one.",
    no_args_is_help=True,
    add_completion=False,
    # Plain help needs no rich, and a traceback with everybody's local variables helps nobody.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(bench.app)
app.add_typer(demo.app)
app.add_typer(jit.app)

_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
_File = Annotated[
    Path | None,
    typer.Option("--file", "-f", metavar="FILE", help="A recorded topology instead of this machine."),
]


class _GroupBackend(str, Enum):
    nccl = "nccl"
    gloo = "gloo"


def _version(wanted: bool) -> None:
    if wanted:
        from comm_core._version import __version__

        print(f"commctl (comm-core) {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Show what comm can do on this machine, and why."""


@app.command()
def plugins(
    json: _Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if a plugin is not loaded.")] = False,
) -> None:
    """List the plugins, and why one is not loaded."""
    from comm_core.cli import plugins as command

    raise typer.Exit(command.run(as_json=json, strict=strict))


@app.command()
def topo(
    file: _File = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Also write it as a recorded topology.")
    ] = None,
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Replace host names, ids and UUIDs, in the file and here.")
    ] = False,
    json: _Json = False,
) -> None:
    """Show the GPUs, their links, the host, and what is unknown.

    Asks NVML alone: CUDA is not initialized. The JSON form is that of a recorded topology.
    """
    from comm_core.cli import topo as command

    raise typer.Exit(command.run(file=file, out=out, anonymize=anonymize, as_json=json))


@app.command()
def decide(
    backend: Annotated[
        str, typer.Option("--backend", "-b", help="'auto' or a transport that must be used.")
    ] = "auto",
    world_size: Annotated[
        int | None,
        typer.Option(
            "--world-size", "-n", min=1, metavar="N", help="Decide for N ranks, the first N of the topology."
        ),
    ] = None,
    ranks: Annotated[
        str | None,
        typer.Option("--ranks", "-r", metavar="0,1,3", help="Decide for these ranks of the topology, in this order."),
    ] = None,
    file: _File = None,
    group_backend: Annotated[
        _GroupBackend | None,
        typer.Option("--group-backend", help="torch.distributed backend of the process group. [nccl for GPUs]"),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="Element type.")] = "bfloat16",
    experimental: Annotated[
        bool, typer.Option("--experimental", help="As with COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1.")
    ] = False,
    json: _Json = False,
) -> None:
    """Show which transport a group would use, and why.

    Every other one is listed with the reason why it is passed over.
    Starts no ranks and opens nothing. Exits with 1 if a backend that was asked for by name is refused.
    """
    from comm_core.cli import decide as command

    chosen = command.Options(
        backend=backend,
        world_size=world_size,
        ranks=ranks,
        file=file,
        group_backend=None if group_backend is None else group_backend.value,
        dtype=dtype,
        experimental=experimental,
    )
    raise typer.Exit(command.run(chosen, as_json=json))


@app.command()
def doctor(
    json: _Json = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if something installed is broken.")] = False,
) -> None:
    """Show what is installed, usable, and why not.

    Versions, environment variables, and what each transport was verified on.
    """
    from comm_core.cli import doctor as command

    raise typer.Exit(command.run(as_json=json, strict=strict))


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run ``commctl`` and exit: 0 fine, 1 failed or refused, 2 wrong usage.

    Args:
        arguments: of the command line, without its name; None takes the process's.
    """
    for stream in (sys.stdout, sys.stderr):
        # A fact that this terminal can't spell must not end the command.
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
    try:
        app(args=None if arguments is None else list(arguments), prog_name="commctl")
    except CommError as error:
        print(f"commctl: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)
    sys.exit(0)
