"""A picture of the ratios: multiples of the floor over the bytes that leave a rank. Needs matplotlib."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comm_core.bench.geometry import MIB
from comm_core.errors import ArgumentValueError

__all__ = ["check", "draw", "series"]


def check(file: Path) -> None:
    """Raise now, before anything is measured, if no picture could be written to `file` afterwards.

    Raises:
        ArgumentValueError: matplotlib is not installed, or can't write that kind of file.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ArgumentValueError(
            "--plot needs matplotlib, which is not installed: pip install comm-core[plot], or leave --plot out and "
            "draw from the file of --json"
        )
    figures: Any = importlib.import_module("matplotlib.backend_bases")
    kinds = sorted(figures.FigureCanvasBase.get_supported_filetypes())
    if file.suffix.lstrip(".").lower() not in kinds:
        raise ArgumentValueError(f"--plot {file.name}: the name must end in one of {', '.join(kinds)}")


def series(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return for each backend and mode (MiB that leave a rank, multiple of the floor), ordered by size.

    Calls in a graph where there are any, else eager ones; of the two operations the slower one.
    """
    worst: dict[str, dict[float, float]] = {}
    for row in rows:
        graph, eager = row["graph_over_floor"], row["eager_over_floor"]
        value = eager if graph is None else graph
        if value is None:
            continue
        points = worst.setdefault(f"{row['backend']}, {row['mode']}" + (", eager" if graph is None else ""), {})
        size = row["remote_bytes"] / MIB
        points[size] = max(value, points.get(size, 0.0))
    return {name: sorted(points.items()) for name, points in worst.items()}


def draw(found: Mapping[str, Any], title: str, file: Path) -> None:
    """Write the picture of a document's rows to `file`, in the format that its name ends in."""
    # Without pyplot, which would look for a display.
    figures: Any = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, points in series(found["rows"]).items():
        axes.plot([size for size, _ in points], [ratio for _, ratio in points], marker="o", label=name)
    axes.axhline(1.0, color="black", linewidth=1, linestyle="--", label="floor")
    axes.set(xscale="log", xlabel="MiB that leave each rank", ylabel="time ÷ floor", title=title)
    axes.set_ylim(bottom=0)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(file)
