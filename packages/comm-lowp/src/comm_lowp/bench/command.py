"""``commctl bench lowp``: its options, and what is printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from comm_core.errors import CommError
from comm_lowp.bench.goals import FULL, QUICK

__all__ = ["app", "table"]

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


@app.command()
def lowp(
    quick: Annotated[bool, typer.Option("--quick", help="Two problems and fewer batches.")] = False,
    only: Annotated[
        int | None, typer.Option("--only", metavar="N", help="Of the problems only number N, from 0 on.")
    ] = None,
    pdl: Annotated[
        bool | None, typer.Option("--pdl/--no-pdl", help="Programmatic dependent launch. [as the device has it]")
    ] = None,
    out: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results.")] = None,
) -> None:
    """Measure the passes of the low-precision exchange on one GPU, beside the floor of its memory.

    The bytes are compared with the reference before anything is timed. Exits with 1 if that fails or there is no GPU;
    a missed goal is no failure.
    """
    import torch

    from comm_lowp.bench import passes

    if not torch.cuda.is_available():
        print("bench lowp: torch sees no CUDA device here (`commctl doctor` says more)", file=sys.stderr)
        raise typer.Exit(1)
    device = torch.device("cuda", torch.cuda.current_device())
    problems = QUICK if quick else FULL
    if only is not None:
        problems = problems[only : only + 1]
    batches = 5 if quick else 9
    began = time.monotonic()
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
    if out is not None:
        document = {
            "benchmark": "lowp",
            "schema": 1,
            "device": torch.cuda.get_device_name(device),
            "bandwidth": {"read_bytes_per_s": bandwidth.read, "copy_bytes_per_s": bandwidth.copy},
            "rows": rows,
        }
        out.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"\n{time.monotonic() - began:.0f} s")
