"""From what ``gpu.bench_windows`` measured to tables and goals. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.report import Goal, Section, Table

__all__ = ["add"]

_SHARED_NOTE = (
    "Microseconds a call, two ranks; medians of batches on the slower rank. Both ranks share the GPU's memory, so "
    "the floor is all bytes of both ranks at the rate of a copy within the GPU, measured in this run: {rate} GB/s "
    "copied."
)
_LINKS_NOTE = (
    "Microseconds a call, two ranks, a GPU each; medians of batches on the slower rank. The floor is the bytes that "
    "leave a rank at the rate of the copy engines between the two GPUs, both directions at once, 512 MiB, measured "
    "in this run: {rate} GB/s a direction."
)


def add(
    section: Section, found: Mapping[str, Any], shared: bool, *, barrier_goal_us: float, call_goal_us: float
) -> None:
    """Add tables and goals to `section`."""
    where = "on one GPU" if shared else "a GPU each"
    barriers: Mapping[str, Mapping[str, float]] = found["barriers"]
    if barriers:
        rows = [[int(ranks), times["floor"], times["graph"], times["eager"]] for ranks, times in barriers.items()]
        note = (
            f"Microseconds a barrier of the group, {where}, back to back; medians of batches on the slowest rank. "
            "The floor is an empty kernel in a graph, on all ranks at once."
        )
        section.tables.append(Table("Barrier", ["ranks", "floor", "in a graph", "eager"], _rounded(rows), note))
    if shared:
        value = barriers.get("8", {}).get("graph")
        section.goals.append(Goal("barrier of 8 ranks on one GPU, in a graph", _round(value), barrier_goal_us, "us"))
    if found["overhead"]:
        _overhead(section, found["overhead"], where, call_goal_us)
    _exchanges(section, found, shared)
    if found["took"]:
        rows = [[name, seconds] for name, seconds in found["took"].items()]
        section.tables.append(Table("Time of the benchmark itself", ["", "seconds"], rows))


def _overhead(section: Section, times: Mapping[str, float], where: str, goal_us: float) -> None:
    launch = times["launch"]
    labels = {
        "launch": "one launch of an empty kernel, from C",
        "empty entry": "entry of an empty kernel, from Python",
        "exchange entry": "entry of an exchange, from Python",
        "session.barrier": "session.barrier()",
        "comm.scatter_heads": "comm.scatter_heads(x, out=)",
    }
    rows = [[label, times[name], times[name] - launch] for name, label in labels.items()]
    note = "Microseconds of the host a call, with the device idle at the start; 200 calls between synchronizations."
    section.tables.append(Table("Call overhead", ["", "us", "on top of the launch"], _rounded(rows), note))
    for name, label in (("exchange entry", "the entry of an exchange"), ("empty entry", "an empty entry")):
        value = _round(times[name] - launch)
        section.goals.append(Goal(f"a call of {label}, on top of the launch, {where}", value, goal_us, "us"))


def _exchanges(section: Section, found: Mapping[str, Any], shared: bool) -> None:
    from gpu.bench_windows import GEOMETRIES, OPERATIONS, floor_us

    exchanges: Mapping[str, Mapping[str, float]] = found["exchanges"]
    rate = found["floor"]
    if not exchanges or not rate:
        return
    note = (_SHARED_NOTE if shared else _LINKS_NOTE).format(rate=f"{rate / 1e9:.0f}")
    columns = ["geometry", "remote, MiB", "floor", "path", "scatter, graph", "/ floor", "scatter, eager"]
    columns += ["gather, graph", "/ floor", "gather, eager"]
    rows: list[list[Any]] = []
    for geometry in GEOMETRIES:
        floor = floor_us(geometry, 2, shared, rate)
        for path, times in exchanges.items():
            if f"{geometry.name}/{OPERATIONS[0]}/graph" not in times:
                continue
            row: list[Any] = [geometry.name, geometry.remote_bytes(2) / 2**20, floor, path]
            for operation in OPERATIONS:
                graph, eager = (times[f"{geometry.name}/{operation}/{how}"] for how in ("graph", "eager"))
                row += [graph, graph / floor, eager]
            rows.append(row)
    section.tables.append(Table("Exchange of heads", columns, _rounded(rows), note))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _rounded(rows: list[list[Any]]) -> list[list[Any]]:
    return [[_round(value) if isinstance(value, float) else value for value in row] for row in rows]
