"""What was measured as one JSON document, and as tables. Pure but for printing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from comm_core.bench.floor import Floor
from comm_core.bench.geometry import MIB, Geometry
from comm_core.bench.goals import goal, verdict

if TYPE_CHECKING:
    from rich.console import Console

    from comm_core.bench.launch import Placement

__all__ = ["SCHEMA", "document", "finished_row", "show", "slowest"]

SCHEMA = 1
_FIGURES = ("eager_us", "host_us", "graph_us")
_HEADS = {"scatter_heads": "scatter", "gather_heads": "gather"}


def slowest(results: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the rows that every rank has, with each figure of the rank where it is largest."""
    rows: list[dict[str, Any]] = []
    for same in zip(*results, strict=False):
        row = dict(same[0])
        for name in _FIGURES:
            values = [other[name] for other in same]
            row[name] = None if None in values else max(values)
        rows.append(row)
    return rows


def finished_row(backend: str, row: Mapping[str, Any], floor: Floor | None, placement: Placement) -> dict[str, Any]:
    """Return a row of the document: what was measured, the floor beside it, and the goal."""
    geometry = Geometry(*row["geometry"])
    ranks = placement.ranks
    sent, held = geometry.remote_bytes(ranks), geometry.operand_bytes(ranks)
    least = None if floor is None else floor.us(sent, held, ranks)
    graph, eager = row["graph_us"], row["eager_us"]
    wanted = goal(backend, row["mode"], geometry, ranks=ranks, where=placement.where)
    ratio = _over(graph, least)
    above = None if graph is None or eager is None else eager - graph
    return {
        "backend": backend,
        "mode": row["mode"],
        "operation": row["operation"],
        "tokens": geometry.tokens,
        "heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "remote_bytes": sent,
        "floor_us": _rounded(least),
        "graph_us": _rounded(graph),
        "graph_over_floor": _rounded(ratio),
        "eager_us": _rounded(eager),
        "eager_over_floor": _rounded(_over(eager, least)),
        "host_us": _rounded(row["host_us"]),
        "calls": row["calls"],
        "goal": wanted.ratio,
        "goal_is": verdict(ratio, wanted.ratio),
        "eager_over_graph_us": _rounded(above),
        "eager_goal_us": wanted.eager_over_graph_us,
        "eager_goal_is": verdict(above, wanted.eager_over_graph_us),
    }


def _over(value: float | None, floor: float | None) -> float | None:
    return None if value is None or not floor else value / floor


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def document(
    placement: Placement,
    *,
    quick: bool,
    environment: Mapping[str, Any],
    floor: Floor | None,
    rows: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, str]],
    errors: Sequence[Mapping[str, str]],
    seconds: Mapping[str, float],
) -> dict[str, Any]:
    """Return the JSON document of ``commctl bench ulysses``."""
    return {
        "benchmark": "ulysses",
        "schema": SCHEMA,
        "device": placement.device,
        "where": placement.where,
        "ranks": placement.ranks,
        "quick": quick,
        "dtype": "bfloat16",
        "environment": dict(environment),
        "floor": None if floor is None else {**floor._asdict(), "text": floor.text},
        "rows": list(rows),
        "left_out": list(left_out),
        "errors": list(errors),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def show(found: Mapping[str, Any], placement: Placement, out: Console) -> None:
    """Print a table for each geometry, what the floor is, and what is missing."""
    from comm_core.cli import output

    environment: Mapping[str, Any] = found["environment"]
    where = ", ".join(filter(None, (placement.text, str(environment.get("GPU", "")))))
    out.print(f"Ulysses exchange, bfloat16, {where}\n", style="bold", soft_wrap=True)
    rows: Sequence[Mapping[str, Any]] = found["rows"]
    geometries = dict.fromkeys(Geometry(row["tokens"], row["heads"], row["head_dim"]) for row in rows)
    for geometry in geometries:
        same = [row for row in rows if (row["tokens"], row["heads"], row["head_dim"]) == geometry]
        _table(geometry, same, out)
    if rows:
        text = found["floor"]["text"] if found["floor"] else "The floor could not be measured, see the errors."
        output.note(
            f"{text}. Times in microseconds a call, medians of batches, the slower rank; 'graph' is 20 calls in one "
            "CUDA graph; 'host' is what an eager call keeps the host busy; 'x' is the multiple of the floor, of the "
            "graph's time where there is one. Every exchange was compared by value.",
            out,
        )
    output.paragraph("Not measured", [_reason(item) for item in found["left_out"]], out)
    output.paragraph("Errors", [_reason(item) for item in found["errors"]], out)


def _reason(item: Mapping[str, str]) -> str:
    return f"{item['what']}: {item['why']}"


def _table(geometry: Geometry, rows: Sequence[Mapping[str, Any]], out: Console) -> None:
    from comm_core.cli import output

    first = rows[0]
    floor = "" if first["floor_us"] is None else f", floor {_us(first['floor_us'])} us"
    title = f"{geometry.name}: {first['remote_bytes'] / MIB:.4g} MiB leave each rank{floor}"
    graphs = any(row["graph_us"] is not None for row in rows)
    goals = any(row["goal_is"] for row in rows)
    # Within 80 columns: one multiple of the floor, that of the graph where there is one.
    heads = ["backend", "mode", "heads", *(["graph"] * graphs), "eager", "host", "x", *(["goal"] * goals)]
    table = output.Sheet(title, *heads, fixed=heads)
    for row in rows:
        cells = [row["backend"], row["mode"], _HEADS[row["operation"]], *([_us(row["graph_us"])] * graphs)]
        ratio = row["eager_over_floor"] if row["graph_us"] is None else row["graph_over_floor"]
        goal_text = "-" if row["goal_is"] is None else f"{row['goal']:.2f} {row['goal_is']}"
        table.add(*cells, _us(row["eager_us"]), _us(row["host_us"]), _ratio(ratio), *([goal_text] * goals))
    table.print(out)
    for row in rows:
        if row["eager_goal_is"] is not None:
            output.note(
                f"{row['backend']}, {row['mode']}, {_HEADS[row['operation']]}: an eager call takes "
                f"{_us(row['eager_over_graph_us'])} us more than one in a graph, at most {row['eager_goal_us']:g}: "
                f"{row['eager_goal_is']}",
                out,
            )


def _us(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"
