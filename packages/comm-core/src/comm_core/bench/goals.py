"""What exchanges are to reach: times as multiples of the floor. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from comm_core.bench.geometry import Geometry

__all__ = ["EAGER_OVER_GRAPH_US", "Goal", "goal", "verdict"]

_LARGE, _WAN, _D64, _MIDDLE, _SMALL = (
    Geometry(75600, 40),
    Geometry(32760, 40),
    Geometry(32768, 32, 64),
    Geometry(4608, 24),
    Geometry(1024, 24),
)

_NVLINK: Mapping[str, Mapping[Geometry, float]] = {
    "direct": {_LARGE: 1.03, _WAN: 1.06, _D64: 1.12, _MIDDLE: 1.40, _SMALL: 2.4},
    "staged": {_LARGE: 1.10, _WAN: 1.15, _D64: 1.25, _MIDDLE: 1.6, _SMALL: 2.6},
    "max_sms=0": {_LARGE: 1.06, _WAN: 1.10, _D64: 1.25},
}
"""Of calls in a graph, two ranks with a GPU each, all pairs NVLink."""

_PCIE: Mapping[str, Mapping[Geometry, float]] = {"direct": {_LARGE: 1.06, _WAN: 1.12}}
"""The same for transport pcie, which runs over any link: its copies are those of the copy engines alone."""

EAGER_OVER_GRAPH_US: Mapping[Geometry, float] = {_SMALL: 6.0}
"""Microseconds that an eager call of transport nvlink, direct, may take longer than one in a graph."""


class Goal(NamedTuple):
    """What one row of the table is to reach.

    Attributes:
        ratio: the most that a call in a graph may take, as a multiple of the floor; None where nothing is promised.
        eager_over_graph_us: the most that an eager call may take on top of that, in microseconds; None likewise.
    """

    ratio: float | None = None
    eager_over_graph_us: float | None = None


def verdict(value: float | None, limit: float | None) -> str | None:
    """Return ``"met"``, ``"missed"`` or ``"not measured"``; None where there is no limit."""
    if limit is None:
        return None
    return "not measured" if value is None else "met" if value <= limit else "missed"


def goal(backend: str, mode: str, geometry: Geometry, *, ranks: int, where: str) -> Goal:
    """Return what `backend` is to reach; nothing is promised but for two ranks with a GPU each."""
    if ranks != 2 or where != "links":
        return Goal()
    if backend == "pcie":
        return Goal(_PCIE.get(mode, {}).get(geometry))
    if backend != "nvlink":
        return Goal()
    eager = EAGER_OVER_GRAPH_US.get(geometry) if mode == "direct" else None
    return Goal(_NVLINK.get(mode, {}).get(geometry), eager)
