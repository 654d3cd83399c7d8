"""``commctl bench allreduce``: what is measured in which order, the goals, and what is printed."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comm_core.bench import floor, launch, redact, report
from comm_core.bench.launch import Placement
from comm_core.bench.options import SharedOptions
from comm_core.errors import ArgumentValueError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["GOALS", "Options", "add_ratios", "run"]

TOKENS = (1, 4, 8, 32, 128, 512, 2048)
_QUICK = (1, 32, 512)
_CPU = (1, 16)
HIDDEN = 8192
_CPU_HIDDEN = 256
GOALS: Mapping[int, float] = {1: 0.25, 4: 0.25, 8: 0.25, 32: 0.34, 128: 0.32, 512: 0.58, 2048: 0.70}
"""Tokens of 8192 -> at most so much of NCCL's time, for two ranks over links."""
_NORM_US, _NORM_UP_TO = 1.5, 32
_NORM_RATIO, _NORM_FROM = 1.10, 512


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The options of the command line."""

    tokens: tuple[int, ...] = ()
    hidden: int | None = None


def run(options: Options) -> int:
    """Measure, print, and write; return the exit code: 1 if something that was asked for failed.

    Raises:
        ArgumentValueError: the options make no sense here. Nothing was measured.
        CommError: the ranks could not be started.
    """
    placement = options.place()
    found: dict[str, Any] = {
        "benchmark": "allreduce",
        "schema": report.SCHEMA,
        "device": placement.device,
        "where": placement.where,
        "ranks": placement.ranks,
        "quick": options.quick,
        "dtype": "bfloat16",
        "hidden": options.hidden or (_CPU_HIDDEN if placement.device == "cpu" else HIDDEN),
        "environment": {},
        "floor": None,
        "rows": [],
        "left_out": [],
        "errors": [],
        "seconds": {},
    }
    with launch.ranks(placement, timeout_s=options.timeout_s, preload=("comm_core.bench.allreduce",)) as ranks:
        try:
            _measure(options, placement, ranks, found)
        finally:
            add_ratios(found)
            if ranks.leader:
                _publish(options, placement, found)
    return int(bool(found["errors"]) or not found["rows"])


def _measure(options: Options, placement: Placement, ranks: launch.Ranks, found: dict[str, Any]) -> None:
    from comm_core.bench import allreduce, ulysses

    known = ranks.run(ulysses.facts, placement, timeout_s=60.0)
    rates = ranks.run(floor.measure, placement, timeout_s=60.0)
    if all(result.error is None for result in (*known, *rates)):
        size = floor.HOST_COPY_BYTES if placement.kind == "host" else floor.COPY_BYTES
        least = floor.Floor(placement.kind, min(result.value for result in rates), size)
        found["environment"] = dict(known[0].value)
        found["floor"] = {**least._asdict(), "text": least.text}
    tokens = options.tokens or (_CPU if placement.device == "cpu" else _QUICK if options.quick else TOKENS)
    for name, why in _contenders(options, placement):
        named = name in options.backends
        if why:
            found["errors" if named else "left_out"].append({"what": name, "why": why})
            continue
        began = time.monotonic()
        job = allreduce.Job(placement, name, tuple(tokens), found["hidden"], 3 if options.quick else 5)
        results = ranks.run(allreduce.measure, job, timeout_s=options.timeout_s)
        measured = [getattr(item.error, "rows", ()) if item.error else item.value for item in results]
        found["rows"] += [{"backend": name, **row} for row in report.slowest(measured)]
        failed = {rank: item.error for rank, item in enumerate(results) if item.error is not None}
        if failed:
            first = failed[min(failed)]
            text = f"rank {min(failed)}: {first}"
            refused = not named and all(not getattr(error, "opened", True) for error in failed.values())
            if refused:
                # Nobody asked for it, which the error's own text says of every name.
                text = getattr(first, "reason", "") or text
            found["left_out" if refused else "errors"].append({"what": name, "why": " ".join(text.split())})
        found["seconds"][name] = round(time.monotonic() - began, 1)
        if ranks.leader:
            print(f"{name}: {found['seconds'][name]:.1f} s", file=sys.stderr, flush=True)


def _contenders(options: Options, placement: Placement) -> list[tuple[str, str]]:
    """Return (name, why not) of what there is to measure, in order, each once."""
    from comm_core.bench import allreduce
    from comm_core.plugins.discovery import registry

    backends = registry().allreduce
    names = list(options.backends) or sorted(backends, key=lambda name: (-backends[name].priority, name))
    comparators = allreduce.COMPARATORS
    chosen: dict[str, str] = {}
    for name in (*names, *(comparators if options.compare else ())):
        chosen[name] = ""
        if name in comparators and placement.kind != "links":
            # In the group of such ranks, all_reduce would be gloo's.
            on_cpu = ", and the ranks are on the CPU" if placement.kind == "host" else ""
            chosen[name] = f"needs a GPU for each rank{on_cpu}"
        elif name == "dist" and placement.device == "cuda" and not options.backends:
            chosen[name] = "not made for speed; --backend dist measures it"
    return list(chosen.items())


def add_ratios(found: dict[str, Any]) -> None:
    """Add floor, ratios and goals to the rows of a document. Pure."""
    rows: list[dict[str, Any]] = found["rows"]
    nccl = {row["tokens"]: _time(row) for row in rows if row["backend"] == "nccl"}
    sums = {(row["backend"], row["case"], row["tokens"]): _time(row) for row in rows}
    applies = (found["where"], found["ranks"], found["hidden"]) == ("links", 2, HIDDEN)
    for row in rows:
        us, base = _time(row), nccl.get(row["tokens"])
        row["over_nccl"] = None if base is None else us / base
        row["floor_us"] = _floor(found, row["tokens"])
        row["over_floor"] = None if not row["floor_us"] else us / row["floor_us"]
        row["goal"] = row["goal_is"] = row["over_sum_us"] = None
        if row["backend"] == "nccl" or row["backend"].startswith("torch"):
            continue
        if row["case"].startswith("norm"):
            alone = sums.get((row["backend"], row["case"].replace("norm", "sum"), row["tokens"]))
            if alone is not None:
                row["over_sum_us"] = us - alone
                if applies and row["tokens"] <= _NORM_UP_TO:
                    row["goal"] = f"+{_NORM_US:g} us"
                    row["goal_is"] = "reached" if us - alone <= _NORM_US else "missed"
                elif applies and row["tokens"] >= _NORM_FROM:
                    row["goal"] = f"+{round(_NORM_RATIO * 100 - 100)} %"
                    row["goal_is"] = "reached" if us <= _NORM_RATIO * alone else "missed"
        elif applies and row["tokens"] in GOALS and row["over_nccl"] is not None:
            row["goal"] = f"{GOALS[row['tokens']]:.2f}"
            row["goal_is"] = "reached" if row["over_nccl"] <= GOALS[row["tokens"]] else "missed"


def _time(row: Mapping[str, Any]) -> float:
    graph = row["graph_us"]
    return float(row["eager_us"] if graph is None else graph)


def _floor(found: Mapping[str, Any], tokens: int) -> float | None:
    """Return the least time: the bytes that must reach each rank, which two shots of W ranks move."""
    if found["floor"] is None:
        return None
    ranks = int(found["ranks"])
    nbytes = 2 * (ranks - 1) / ranks * tokens * int(found["hidden"]) * 2
    return nbytes / float(found["floor"]["bytes_per_s"]) * 1e6


def _publish(options: Options, placement: Placement, found: dict[str, Any]) -> None:
    from comm_core.cli import output

    document = redact.redact(found, redact.hosts())
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ArgumentValueError(f"can't write {str(options.json)!r}: {error.strerror or error}") from error
    show(document, placement, output.console())
    if options.plot is not None and document["rows"]:
        _draw(document, options.plot)


def show(found: Mapping[str, Any], placement: Placement, out: Console) -> None:
    """Print a table for each size, and what is missing."""
    from comm_core.cli import output

    out.print(f"All-reduce, bfloat16, hidden {found['hidden']}, {placement.text}\n", style="bold", soft_wrap=True)
    heads = ["backend", "case", "graph", "eager", "host", "/ NCCL", "/ floor", "goal"]
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        least = _floor(found, tokens)
        title = f"{tokens} tokens" + ("" if least is None else f", floor {least:.2f} us")
        table = output.Sheet(title, *heads, fixed=heads)
        for row in (row for row in rows if row["tokens"] == tokens):
            goal = "-" if row["goal"] is None else f"{row['goal']} {row['goal_is']}"
            figures = [_figure(row[name]) for name in ("graph_us", "eager_us", "host_us", "over_nccl", "over_floor")]
            table.add(row["backend"], row["case"], *figures, goal)
        table.print(out)
    output.note(
        "Times in microseconds a call, medians of batches, the slower rank; 'graph' is 20 calls in one CUDA graph; "
        "'norm' is the sum with residual and RMSNorm. Floor: the bytes that must reach each rank at the rate of the "
        "copy engines. Every sum was compared by value.",
        out,
    )
    for title, key in (("Not measured", "left_out"), ("Errors", "errors")):
        output.paragraph(title, [f"{item['what']}: {item['why']}" for item in found[key]], out)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _draw(found: Mapping[str, Any], file: Path) -> None:
    """Draw times over sizes."""
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in found["rows"]:
        lines.setdefault(f"{row['backend']}, {row['case']}", []).append((row["tokens"], _time(row)))
    for name, points in lines.items():
        axes.plot([tokens for tokens, _ in points], [us for _, us in points], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel=f"tokens of {found['hidden']}", ylabel="us a call")
    axes.grid(True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file)
    except OSError as error:
        raise ArgumentValueError(f"can't write {str(file)!r}: {error.strerror or error}") from error
