"""``commctl bench``: the benchmarks, this package's and those of plugins.

The object `app` is mounted as a command of ``commctl``; importing this stays cheap, the work is imported by what
needs it.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from comm_core.cli.groups import plugin_group

__all__ = ["app"]


app = plugin_group("bench", "Measure: each time beside the least that the hardware allows, found in the same run.")


class _Where(str, Enum):
    links = "links"
    shared = "shared"


class _Device(str, Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


# What the benchmarks share.
_RanksOn = Annotated[
    _Where | None,
    typer.Option("--where", help="A GPU for each rank, or all ranks on one. [links if there are several]"),
]
_Ranks = Annotated[int | None, typer.Option("--ranks", "-n", min=2, metavar="N", help="[one for each GPU, or 2]")]
_OnDevice = Annotated[_Device, typer.Option("--device", help="auto takes CUDA where torch sees a GPU.")]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and batches.")]
_Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")]
_Plot = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Draw times over sizes; needs matplotlib.")
]
_Timeout = Annotated[
    float, typer.Option("--timeout", min=1.0, max=3600.0, metavar="S", help="Seconds that a part may take.")
]


@app.command()
def ulysses(
    backend: Annotated[
        list[str] | None,
        typer.Option("--backend", "-b", metavar="NAME", help="A transport; may be repeated. [all that can be used]"),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(
            "--mode",
            "-m",
            metavar="MODE",
            help="direct, staged, max_sms=0 or pool; may be repeated. [all but pool]",
        ),
    ] = None,
    geometry: Annotated[
        list[str] | None,
        typer.Option(
            "--geometry", "-g", metavar="SxH[xD]", help="Tokens, heads and head dimension; may be repeated."
        ),
    ] = None,
    where: _RanksOn = None,
    ranks: _Ranks = None,
    device: _OnDevice = _Device.auto,
    quick: _Quick = False,
    cold: Annotated[bool, typer.Option("--cold", help="Go round so many operands that no cache holds them.")] = False,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also measure what torch offers for the same job.")
    ] = True,
    json: _Json = None,
    plot: _Plot = None,
    timeout: _Timeout = 120.0,
) -> None:
    """Measure the exchange of heads over every transport, beside the floor.

    Starts its own ranks, or uses those that torchrun has started. Every exchange is compared by value before it is
    timed. What was found so far is written after each part. Exits with 1 if something that was asked for by name
    failed; a missed goal is no failure.
    """
    from comm_core.bench import command

    chosen = command.Options(
        backends=tuple(backend or ()),
        modes=tuple(mode or ()),
        geometries=tuple(geometry or ()),
        where=None if where is None else where.value,
        device=device.value,
        ranks=ranks,
        quick=quick,
        cold=cold,
        compare=compare,
        json=json,
        plot=plot,
        timeout_s=timeout,
    )
    raise typer.Exit(command.run(chosen))


@app.command()
def allreduce(
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend",
            "-b",
            metavar="NAME",
            help="A backend, nccl, torch-one-shot or torch-two-shot; may be repeated. [all that can be used]",
        ),
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option("--tokens", "-t", min=1, metavar="N", help="Rows; may be repeated.")
    ] = None,
    hidden: Annotated[int | None, typer.Option("--hidden", min=8, metavar="N", help="[8192; 256 on the CPU]")] = None,
    where: _RanksOn = None,
    ranks: _Ranks = None,
    device: _OnDevice = _Device.auto,
    quick: _Quick = False,
    compare: Annotated[
        bool, typer.Option("--compare/--no-compare", help="Also measure NCCL and torch's symmetric memory.")
    ] = True,
    json: _Json = None,
    plot: _Plot = None,
    timeout: _Timeout = 120.0,
) -> None:
    """Measure the all-reduce of every backend, alone and with residual and norm, beside NCCL, torch and the floor.

    Starts its own ranks, or uses those that torchrun has started. Every sum is compared by value before it is timed.
    Exits with 1 if something that was asked for by name failed; a missed goal is no failure.
    """
    from comm_core.bench import allreduce_command

    chosen = allreduce_command.Options(
        backends=tuple(backend or ()),
        tokens=tuple(tokens or ()),
        hidden=hidden,
        where=None if where is None else where.value,
        device=device.value,
        ranks=ranks,
        quick=quick,
        compare=compare,
        json=json,
        plot=plot,
        timeout_s=timeout,
    )
    raise typer.Exit(allreduce_command.run(chosen))
