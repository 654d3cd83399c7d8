"""Routes: what may be asked for, what can be planned, and the PCIe profile of a group. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

from comm_core.topology.facts import RankFacts
from comm_core.topology.pcie import SWITCH_LOCAL, ancestor
from comm_core.topology.predicates import PCIE_ROUTES
from comm_pcie.rdma.facts import RdmaFacts
from comm_pcie.rdma.planning import Choice, Overrides, nic_sides, plan_nics

__all__ = [
    "NIC_ROUTES",
    "PROFILES",
    "VARIABLE",
    "VERIFIED",
    "Route",
    "pairs",
    "plan_route",
    "profile",
    "rdma_facts",
    "wanted_of",
]

VARIABLE = "COMM_ULYSSES_PCIE_ROUTE"
"""Environment variable that asks for a route; equal on all ranks."""

PROFILES = ("rootcplx-noswitch", "pcieswitch-pairs")
"""``rootcplx-noswitch``: every pair goes through a root complex. ``pcieswitch-pairs``: some pair shares a switch."""

RDMA_SIZES = (4, 8)
"""Group sizes at which ``auto`` takes NICs where it can; two ranks have one link, which peer access fills."""

NIC_ROUTES = ("rdma", "hybrid")
"""Routes over NICs."""

VERIFIED = "experimental, verified on an emulator only"
"""What is said of routes over NICs wherever they are shown."""


class Route(NamedTuple):
    """What is used for what was asked.

    Attributes:
        transport: the route, or None where it can't be planned.
        reason: why not; for a preference that can't be met, why another route is used; else empty.
        choices: NIC and GID of each rank, in rank order; of a group of several ranks.
    """

    transport: str | None
    reason: str = ""
    choices: tuple[Choice, ...] = ()


def wanted_of(requested: str) -> str:
    """Return the route that a preference is for; any other request as it is."""
    return requested.removeprefix("prefer-")


def plan_route(requested: str, facts: Sequence[RankFacts], environment: Mapping[str, str], name: str) -> Route:
    """Return the route of a group whose GPUs all have peer access to each other. Pure: equal on all ranks.

    Args:
        requested: ``"auto"``, ``"p2p"``, ``"rdma"``, ``"hybrid"`` or a preference.
        facts: in rank order.
        environment: what the ranks agreed on.
        name: of the transport, under which the ranks' probes are.
    """
    if requested not in PCIE_ROUTES:
        return Route(None, f"{VARIABLE} must be one of {', '.join(PCIE_ROUTES)}, got {requested!r}")
    size = len(facts)
    if size == 1:
        return Route("p2p")
    wanted = wanted_of(requested)
    if wanted == "p2p" or (wanted == "auto" and size not in RDMA_SIZES):
        return Route("p2p")
    route = "rdma" if wanted == "auto" else wanted
    rdma = [rdma_facts(record, name) for record in facts]
    nics = plan_nics(facts, rdma, Overrides.of(environment))
    reason = nics.reason or (nic_sides(facts) if route == "hybrid" else "")
    if not reason:
        return Route(route, "", nics.choices)
    if requested == wanted != "auto":
        works = f"p2p, auto or prefer-{wanted} work"
        return Route(
            None, f"{VARIABLE}={requested}: route {wanted!r} can't be planned: {reason}; {works}", nics.choices
        )
    return Route("p2p", f"route {route!r} can't be planned: {reason}", nics.choices)


def rdma_facts(record: RankFacts, name: str) -> RdmaFacts:
    """Return what a rank's probe for transport `name` found of RDMA devices."""
    probe = record.plugins.get(name)
    if isinstance(probe, Mapping) and "rdma" in probe:
        return RdmaFacts.from_json(probe["rdma"])
    if isinstance(probe, Mapping) and "error" in probe:
        return RdmaFacts(error=str(probe["error"]))
    return RdmaFacts(error="no RDMA device was looked for (a record of an older version?)")


def pairs(facts: Sequence[RankFacts]) -> dict[tuple[int, int], str | None]:
    """Return what the GPUs of every two ranks have in common (NVML's words), None where it is unknown."""
    return {(a.rank, b.rank): ancestor(a, b) for a, b in combinations(facts, 2)}


def profile(facts: Sequence[RankFacts]) -> str:
    """Return one of `PROFILES`. What is unknown counts as a root complex, which claims less."""
    return PROFILES[int(any(found in SWITCH_LOCAL for found in pairs(facts).values()))]
