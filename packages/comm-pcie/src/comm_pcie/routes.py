"""Routes: what may be asked for, what can be planned, and the PCIe profile of a group. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from comm_core.topology.facts import RankFacts
from comm_core.topology.pcie import SWITCH_LOCAL, ancestor
from comm_core.topology.predicates import PCIE_ROUTES

__all__ = ["PROFILES", "VARIABLE", "Route", "pairs", "profile", "route_of"]

VARIABLE = "COMM_ULYSSES_PCIE_ROUTE"
"""Environment variable that asks for a route; equal on all ranks."""

PROFILES = ("rootcplx-noswitch", "pcieswitch-pairs")
"""``rootcplx-noswitch``: every pair goes through a root complex. ``pcieswitch-pairs``: some pair shares a switch."""

_MISSING = (
    "needs the RDMA half of comm-pcie (a NIC of its own for each rank, RoCE v2), which this version does not have yet"
)


class Route(NamedTuple):
    """What is used for what was asked.

    Attributes:
        transport: the route, or None where it can't be planned.
        reason: why not; for a preference that can't be met, why another route is used; else empty.
    """

    transport: str | None
    reason: str = ""


def route_of(requested: str) -> Route:
    """Return the route for what was asked: ``"auto"``, ``"p2p"``, ``"rdma"``, ``"hybrid"`` or a preference."""
    if requested not in PCIE_ROUTES:
        return Route(None, f"{VARIABLE} must be one of {', '.join(PCIE_ROUTES)}, got {requested!r}")
    wanted = requested.removeprefix("prefer-")
    if wanted in ("auto", "p2p"):
        return Route("p2p")
    if requested == wanted:
        return Route(None, f"{VARIABLE}={requested}: route {wanted!r} {_MISSING}; p2p, auto or prefer-{wanted} work")
    return Route("p2p", f"route {wanted!r} {_MISSING}")


def pairs(facts: Sequence[RankFacts]) -> dict[tuple[int, int], str | None]:
    """Return what the GPUs of every two ranks have in common (NVML's words), None where it is unknown."""
    return {(a.rank, b.rank): ancestor(a, b) for a, b in combinations(facts, 2)}


def profile(facts: Sequence[RankFacts]) -> str:
    """Return one of `PROFILES`. What is unknown counts as a root complex, which claims less."""
    return PROFILES[int(any(found in SWITCH_LOCAL for found in pairs(facts).values()))]
