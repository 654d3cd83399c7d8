"""From what ``gpu.bench_windows`` and ``commctl bench ulysses`` measured to tables and goals. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu.report import Goal, Section, Table

__all__ = ["add", "add_exchanges"]


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
    if found["took"]:
        rows = [[name, seconds] for name, seconds in found["took"].items()]
        section.tables.append(Table("Time of the benchmark of windows itself", ["", "seconds"], rows))


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


_FIGURES = ("graph_us", "graph_over_floor", "eager_us", "host_us")


def add_exchanges(section: Section, found: Mapping[str, Any]) -> None:
    """Add the document of ``commctl bench ulysses`` as tables and goals to `section`."""
    for item in found["errors"]:
        section.fail(f"{item['what']}: {item['why']}")
    section.notes += [f"Not measured: {item['what']}: {item['why']}" for item in found["left_out"]]
    columns = ["geometry", "remote, MiB", "floor", "backend", "outputs"]
    for operation in ("scatter", "gather"):
        columns += [f"{operation}, graph", "/ floor", "eager", "host"]
    lines: dict[tuple[Any, ...], list[Any]] = {}
    for row in found["rows"]:
        name = f"S={row['tokens']} H={row['heads']}" + ("" if row["head_dim"] == 128 else f" D={row['head_dim']}")
        start = (name, row["remote_bytes"] / 2**20, row["floor_us"], row["backend"], row["mode"])
        lines.setdefault(start, list(start)).extend(row[figure] for figure in _FIGURES)
        what = f"{row['backend']}, {row['mode']}, {row['operation']}, {name}"
        if row["goal"] is not None:
            goal = Goal(f"{what}, in a graph", row["graph_over_floor"], row["goal"], "x floor")
            section.goals.append(goal)
        if row["eager_goal_us"] is not None:
            section.goals.append(
                Goal(f"{what}, eager on top of the graph", row["eager_over_graph_us"], row["eager_goal_us"], "us")
            )
    if lines:
        # Sizes together, as they are compared; sorting keeps the order in which the ways to exchange were measured.
        rows = sorted(lines.values(), key=lambda row: -row[1])
        # A part that failed may have ended between the two operations.
        rows = [row + [None] * (len(columns) - len(row)) for row in rows]
        text = found["floor"]["text"] if found["floor"] else "The floor was not measured."
        note = (
            f"Microseconds a call, {found['ranks']} ranks; medians of batches on the slower rank; graph: 20 calls in "
            f"one; host: what an eager call keeps the host busy. {text}."
        )
        section.tables.append(Table("Exchange of heads", columns, _rounded(rows), note))
    if found["seconds"]:
        rows = [[name, seconds] for name, seconds in found["seconds"].items()]
        section.tables.append(Table("Time of commctl bench ulysses itself", ["", "seconds"], rows))


def add_allreduce(section: Section, found: Mapping[str, Any]) -> None:
    """Add the document of ``commctl bench allreduce`` as a table and goals to `section`."""
    for item in found["errors"]:
        section.fail(f"{item['what']}: {item['why']}")
    section.notes += [f"Not measured: {item['what']}: {item['why']}" for item in found["left_out"]]
    columns = ["tokens", "floor", "backend", "case", "graph", "/ NCCL", "/ floor", "eager", "host", "above the sum"]
    figures = ("graph_us", "over_nccl", "over_floor", "eager_us", "host_us", "over_sum_us")
    rows: list[list[Any]] = []
    for row in sorted(found["rows"], key=lambda row: row["tokens"]):
        start = [row["tokens"], row["floor_us"], row["backend"], row["case"]]
        rows.append([*start, *(row[name] for name in figures)])
        if row["goal"] is None:
            continue
        what = f"all-reduce, {row['backend']}, {row['case']}, {row['tokens']} tokens"
        if row["case"].startswith("sum"):
            section.goals.append(Goal(what, _round(row["over_nccl"]), float(row["goal"]), "x NCCL"))
        elif row["goal"].endswith("us"):
            limit = float(row["goal"].split()[0])
            section.goals.append(Goal(f"{what}, above the sum", _round(row["over_sum_us"]), limit, "us"))
        else:
            us = row["eager_us"] if row["graph_us"] is None else row["graph_us"]
            limit = float(row["goal"].split()[0])
            above = 100 * row["over_sum_us"] / (us - row["over_sum_us"])
            section.goals.append(Goal(f"{what}, above the sum", _round(above), limit, "%"))
    if rows:
        note = (
            f"Microseconds a call, {found['ranks']} ranks, bfloat16, hidden {found['hidden']}; medians of batches on "
            "the slower rank; graph: 20 calls in one; norm: the sum with residual and RMSNorm."
        )
        section.tables.append(Table("All-reduce", columns, _rounded(rows), note))


def add_lowp_passes(section: Section, found: Mapping[str, Any]) -> None:
    """Add the document of ``commctl bench lowp`` as a table and goals to `section`."""
    columns = ["problem", "pass", "us", "floor", "/ floor", "host"]
    rows: list[list[Any]] = []
    for row in found["rows"]:
        rows.append([row[name] for name in ("problem", "pass", "us", "floor_us", "over_floor", "host_us")])
        if row["goal"] is not None:
            goal = Goal(f"{row['pass']}, {row['problem']}", row["over_floor"], row["goal"], "x floor")
            section.goals.append(goal)
    reads, copies = (found["bandwidth"][f"{name}_bytes_per_s"] / 1e9 for name in ("read", "copy"))
    note = (
        f"Microseconds on one GPU, whose memory reads {reads:.0f} GB/s and copies {copies:.0f} (read and written): "
        "the floor is what a pass must move at that rate."
    )
    section.tables.append(Table("Passes of low precision", columns, _rounded(rows), note))


def add_lowp_exchange(section: Section, found: Mapping[str, Any]) -> None:
    """Add the document of ``commctl bench lowp --ranks`` as a table and goals to `section`."""
    names = (
        "problem",
        "transport",
        "route",
        "layout",
        "scatter_qkv",
        "graph",
        "exchange and quantize",
        "ratio",
        "host",
    )
    for row in found["rows"]:
        what = f"scatter_qkv, {row['transport']}, {row['problem']}"
        # The goals are a link's; ranks that share a GPU move their bytes within its memory.
        if row["transport"] == "nvlink":
            section.goals.append(Goal(what, row["ratio"], row["goal"], "x of what it replaces"))
        section.goals.append(Goal(f"{what}, host", row["host"], row["host_goal"], "us"))
    rows = [[row[name] for name in names] for row in found["rows"]]
    note = f"Microseconds, {found['ranks']} ranks; it replaces three exchanges of 16 bits and a quantization."
    section.tables.append(Table("Exchange in low precision", list(names), _rounded(rows), note))


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _rounded(rows: list[list[Any]]) -> list[list[Any]]:
    return [[_round(value) if isinstance(value, float) else value for value in row] for row in rows]
