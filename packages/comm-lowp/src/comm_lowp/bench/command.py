"""``commctl bench lowp``: its options, and what is printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from comm_core.errors import CommError
from comm_lowp.bench.goals import EXCHANGES, FULL, QUICK, Exchange

__all__ = ["app", "exchange_lines", "table"]

_EXCHANGE_S = 180.0
"""Seconds that one exchange may take to be prepared, compared and measured."""


class _Where(str, Enum):
    links = "links"
    shared = "shared"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return lines of text, one for each row."""
    lines = [f"{'pass':30}{'µs':>10}{'best':>10}{'floor':>10}{'ratio':>9}{'goal':>7}{'host µs':>9}"]
    for row in rows:
        floor, ratio, goal = row["floor_us"], row["over_floor"], row["goal"]
        verdict = "" if goal is None else "  reached" if ratio <= goal else "  missed"
        lines.append(
            f"{row['pass']:30}{row['us']:>10.1f}{row['best_us']:>10.1f}"
            f"{'' if floor is None else format(floor, '.1f'):>10}{'' if ratio is None else format(ratio, '.2f'):>9}"
            f"{'' if goal is None else format(goal, '.2f'):>7}{row['host_us']:>9.1f}{verdict}"
        )
    return lines


def exchange_lines(row: Mapping[str, Any]) -> list[str]:
    """Return lines of text about one exchange between ranks."""
    reached = "reached" if row["ratio"] <= row["goal"] else "missed"
    host = "reached" if row["host"] <= row["host_goal"] else "missed"
    graph = "not captured" if row["graph"] is None else f"{row['graph']:.1f} µs in a graph"
    return [
        f"{row['problem']} over {row['transport']} ({row['route']}), {row['layout']}",
        f"  scatter_qkv            {row['scatter_qkv']:>9.1f} µs, {graph}",
        f"  what it replaces       {row['exchange and quantize']:>9.1f} µs: three exchanges "
        f"{row['three exchanges']:.1f}, quantization {row['quantization']:.1f}",
        f"  ratio                  {row['ratio']:>9.3f}     goal {row['goal']:.2f}: {reached}",
        f"  host                   {row['host']:>9.1f} µs  goal {row['host_goal']:.0f}: {host}",
    ]


def _exchanges(ranks: int, where: str | None, backend: str | None, problems: Sequence[Exchange], batches: int) -> Any:
    """Measure the exchanges between ranks; print each. Return the rows, or None on ranks that print nothing.

    Raises:
        CommError: a rank failed.
    """
    import os

    import torch

    from comm_core.bench import launch
    from comm_lowp.bench import exchange

    joined = int(os.environ["WORLD_SIZE"]) if launch.under_torchrun() else None
    placement = launch.place("cuda", where, ranks, gpus=torch.cuda.device_count(), joined_ranks=joined)
    chosen = backend or ("nvlink" if placement.where == "links" else "windows")
    rows: list[dict[str, Any]] = []
    with launch.ranks(placement, timeout_s=_EXCHANGE_S, preload=("comm_lowp.bench.exchange",)) as started:
        for problem in problems:
            results = started.run(
                exchange.measure, exchange.Job(problem, placement, chosen, batches), timeout_s=_EXCHANGE_S
            )
            for rank, result in enumerate(results):
                if result.error is not None:
                    raise CommError(f"rank {rank}: {type(result.error).__name__}: {result.error}") from result.error
            rows.append(exchange.row(problem, [result.value for result in results]))
            if started.leader:
                print("\n" + "\n".join(exchange_lines(rows[-1])), flush=True)
        return rows if started.leader else None


@app.command()
def lowp(
    quick: Annotated[bool, typer.Option("--quick", help="Two problems and fewer batches.")] = False,
    ranks: Annotated[
        int, typer.Option("--ranks", "-n", min=1, max=16, help="2 or more: scatter_qkv between that many ranks.")
    ] = 1,
    where: Annotated[
        _Where | None,
        typer.Option("--where", help="A GPU for each rank, or all ranks on one. [links if there are several]"),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option("--backend", "-b", help="Of the ranks. [nvlink over links, windows on one GPU]"),
    ] = None,
    only: Annotated[
        int | None, typer.Option("--only", metavar="N", help="Of the problems only number N, from 0 on.")
    ] = None,
    pdl: Annotated[
        bool | None, typer.Option("--pdl/--no-pdl", help="Programmatic dependent launch. [as the device has it]")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")] = None,
) -> None:
    """Measure the low-precision exchange: its passes on one GPU beside the floor of its memory, or between ranks.

    Between ranks it is compared with three 16-bit exchanges and one device's quantization. The bytes are compared
    before anything is timed. Exits with 1 if that fails or there is no GPU; a missed goal is no failure.
    """
    import torch

    from comm_lowp.bench import passes

    if not torch.cuda.is_available():
        print("bench lowp: torch sees no CUDA device here (`commctl doctor` says more)", file=sys.stderr)
        raise typer.Exit(1)
    device = torch.device("cuda", torch.cuda.current_device())
    batches = 5 if quick else 9
    began = time.monotonic()
    picked = slice(None) if only is None else slice(only, only + 1)
    if ranks > 1:
        exchanges = (EXCHANGES[1:3] if quick else EXCHANGES)[picked]
        try:
            measured = _exchanges(ranks, None if where is None else where.value, backend, exchanges, batches)
        except CommError as error:
            print(f"bench lowp: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        if measured is not None:
            _write(out, torch.cuda.get_device_name(device), measured, ranks=ranks)
            print(f"\n{time.monotonic() - began:.0f} s")
        return
    problems = (QUICK if quick else FULL)[picked]
    rows: list[dict[str, Any]] = []
    try:
        bandwidth = passes.measure_bandwidth(device, batches)
        print(
            f"{torch.cuda.get_device_name(device)}: reads {bandwidth.read / 1e9:.0f} GB/s, copies "
            f"{bandwidth.copy / 1e9:.0f} GB/s (read and written); {time.monotonic() - began:.1f} s with the builds"
        )
        for problem in problems:
            found = passes.measure_passes(device, problem, bandwidth, batches=batches, pdl=pdl)
            rows += found
            print(f"\n{problem.name}, {problem.elements / 2**20:.0f} Mi elements a tensor")
            print("\n".join(table(found)), flush=True)
    except CommError as error:
        print(f"bench lowp: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    rates = {"read_bytes_per_s": bandwidth.read, "copy_bytes_per_s": bandwidth.copy}
    _write(out, torch.cuda.get_device_name(device), rows, ranks=1, bandwidth=rates)
    print(f"\n{time.monotonic() - began:.0f} s")


def _write(out: Path | None, device: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> None:
    if out is not None:
        document = {"benchmark": "lowp", "schema": 1, "device": device, **more, "rows": list(rows)}
        out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
