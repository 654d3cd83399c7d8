"""Which NIC and which GID each rank uses, and whether a route over NICs can be planned. Pure: equal on all ranks.

A rank's NIC is the one that is nearest to its GPU in the PCIe tree. Of several that are equally near, the GPU's PCI
bus chooses, and no ordinal does: CUDA_VISIBLE_DEVICES changes those. Whether two ranks have come to the same NIC is
seen only by who looks at all of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from comm_core.topology.facts import RankFacts
from comm_pcie.rdma.facts import ROCE_V2, NicFacts, RdmaFacts, natural

__all__ = [
    "GIDS_VARIABLE",
    "NICS_VARIABLE",
    "Choice",
    "NicPlan",
    "Overrides",
    "choose_gid",
    "choose_nic",
    "distance",
    "nic_sides",
    "plan_nics",
]

NICS_VARIABLE = "COMM_ULYSSES_PCIE_NICS"
"""Environment variable with the NIC of each rank, ``"mlx5_0,mlx5_1"``; equal on all ranks."""
GIDS_VARIABLE = "COMM_ULYSSES_PCIE_GID_INDICES"
"""Environment variable with the GID index of each rank, ``"3,3"``; equal on all ranks."""

_BUS = re.compile(r"[0-9a-f]+:([0-9a-f]{2}):[0-9a-f]{2}\.[0-7]")
_SHOWN = 4
_NEEDED = "an IPv4 RoCE v2 GID is needed (has its network device an IPv4 address?)"


class Overrides(NamedTuple):
    """What the variables ask for, one entry a rank; empty where they are not set."""

    nics: tuple[str, ...] = ()
    gids: tuple[int, ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Overrides:
        """Read what the ranks agreed on; both have been found to be lists."""
        nics = environment.get(NICS_VARIABLE, "")
        gids = environment.get(GIDS_VARIABLE, "")
        return cls(
            tuple(part.strip() for part in nics.split(",")) if nics else (),
            tuple(int(part) for part in gids.split(",")) if gids else (),
        )

    def problem(self, world_size: int) -> str:
        """Return why they don't fit a group, or an empty string."""
        for name, given in ((NICS_VARIABLE, self.nics), (GIDS_VARIABLE, self.gids)):
            if given and len(given) != world_size:
                text = ",".join(map(str, given))
                return f"{name}={text} has {len(given)} entries, one is needed for each of {world_size} ranks"
        return ""


class Choice(NamedTuple):
    """What one rank would use.

    Attributes:
        nic: its device, or None.
        gid_index: of that device, or None.
        pcie_error: why there is no NIC; empty if there is.
        gid_error: why there is no GID; empty if there is, or no NIC.
        gid: the 16 bytes of that GID in hex digits.
    """

    nic: str | None = None
    gid_index: int | None = None
    pcie_error: str = ""
    gid_error: str = ""
    gid: str = ""


class NicPlan(NamedTuple):
    """What a group would use.

    Attributes:
        choices: in rank order.
        reason: why no route over NICs can be planned, the first thing that is missing; empty if one can.
    """

    choices: tuple[Choice, ...]
    reason: str = ""


def distance(a: str, b: str) -> int | None:
    """Return how many bridges and devices two PCI paths do not share, None where one of them is unknown.

    Args:
        a: from the root to the device, with slashes.
        b: likewise.
    """
    if not a or not b:
        return None
    left, right = a.split("/"), b.split("/")
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    return len(left) + len(right) - 2 * common


def choose_nic(facts: RankFacts, rdma: RdmaFacts, wanted: str = "") -> tuple[NicFacts | None, str]:
    """Return the NIC of a rank, or why there is none.

    Args:
        facts: of the rank.
        rdma: what it found.
        wanted: name of the device that the override gives it, or empty.
    """
    if rdma.error:
        return None, f"RDMA devices can't be listed: {rdma.error}"
    if not rdma.nics:
        return None, "there is no RDMA device (nothing in /sys/class/infiniband)"
    if rdma.library_error:
        return None, f"the libraries of rdma-core can't be used: {rdma.library_error}"
    if wanted:
        found = next((nic for nic in rdma.nics if nic.name == wanted), None)
        if found is None:
            have = ", ".join(nic.name for nic in rdma.nics)
            return None, f"{NICS_VARIABLE} names {wanted!r}, and there is {have}"
        return (None, f"{wanted} ({NICS_VARIABLE}): {found.problem}") if found.problem else (found, "")
    usable = [nic for nic in rdma.nics if not nic.problem]
    if not usable:
        problems = [f"{nic.name}: {nic.problem}" for nic in rdma.nics]
        return None, f"no RDMA device can be used: {_listed(problems)}"
    device = facts.device
    own = f"{device.pcie_path}/{device.pci_bus_id}" if device.pcie_path and device.pci_bus_id else ""
    known = [(far, nic) for nic in usable if (far := distance(own, nic.pci_path)) is not None]
    if not known:
        what = "of its GPU" if not own else f"of {_listed([nic.name for nic in usable])}"
        return None, f"the PCI path {what} is unknown, so the nearest NIC is too: name the NICs by {NICS_VARIABLE}"
    nearest = min(far for far, _ in known)
    ties = sorted((nic for far, nic in known if far == nearest), key=lambda nic: natural(nic.name))
    bus = _BUS.fullmatch(device.pci_bus_id)
    return ties[int(bus[1], 16) % len(ties) if bus else 0], ""


def choose_gid(nic: NicFacts, wanted: int | None = None) -> tuple[int | None, str]:
    """Return the index of the GID of `nic` to use, or why there is none.

    The lowest index whose entry is RoCE v2 and maps an IPv4 address. Link-local entries look usable and run into a
    timeout when a connection is made; IPv6 ones are not supported.

    Args:
        nic: the device.
        wanted: index that the override gives it, or None.
    """
    if nic.gid_error:
        return None, f"{nic.name}: {nic.gid_error}"
    if wanted is not None:
        entry = next((entry for entry in nic.gids if entry.index == wanted), None)
        if entry is None:
            return None, f"{nic.name}: {GIDS_VARIABLE} names index {wanted}, which is empty or does not exist"
        if entry.type != ROCE_V2 or not entry.ipv4:
            return None, (f"{nic.name}: {GIDS_VARIABLE} names index {wanted}, which is {entry.text}: {_NEEDED}")
        return wanted, ""
    second = [entry for entry in nic.gids if entry.type == ROCE_V2]
    usable = [entry.index for entry in second if entry.ipv4]
    if usable:
        return min(usable), ""
    return None, f"{nic.name}: {_why_no_gid(nic, [entry.text for entry in second])}"


def _why_no_gid(nic: NicFacts, second: Sequence[str]) -> str:
    if not nic.gids:
        return f"its GID table is empty: {_NEEDED}"
    if not second:
        return f"it has no RoCE v2 GID ({_listed([entry.text for entry in nic.gids])}): {_NEEDED}"
    if all("link-local" in text for text in second):
        return f"its RoCE v2 GIDs are link-local only: {_NEEDED}"
    return f"its RoCE v2 GIDs are IPv6 only ({_listed(second)}): {_NEEDED}"


def plan_nics(facts: Sequence[RankFacts], rdma: Sequence[RdmaFacts], overrides: Overrides = Overrides()) -> NicPlan:  # noqa: B008
    """Return NIC and GID of every rank, and why no route over NICs can be planned with them.

    Reasons come in a fixed order: no NIC, no GID, overrides that don't fit, a NIC for two ranks.

    Args:
        facts: in rank order.
        rdma: what each rank found, in rank order.
        overrides: what the ranks agreed on.
    """
    size = len(facts)
    misfit = overrides.problem(size)
    used = Overrides() if misfit else overrides
    choices: list[Choice] = []
    for rank in range(size):
        nic, pcie_error = choose_nic(facts[rank], rdma[rank], used.nics[rank] if used.nics else "")
        if nic is None:
            choices.append(Choice(pcie_error=pcie_error))
            continue
        index, gid_error = choose_gid(nic, used.gids[rank] if used.gids else None)
        gid = next((entry.gid for entry in nic.gids if entry.index == index), "")
        choices.append(Choice(nic.name, index, "", gid_error, gid))
    reason = _first("pcie_error", choices) or _first("gid_error", choices) or misfit or _shared(choices)
    return NicPlan(tuple(choices), reason)


def nic_sides(facts: Sequence[RankFacts]) -> str:
    """Return why the group is no 4+4 hybrid, or an empty string: four ranks on each of two NUMA nodes."""
    if len(facts) != 8:
        return f"the hybrid route needs 8 ranks, got {len(facts)}"
    nodes = [record.device.numa_node for record in facts]
    unknown = [rank for rank, node in enumerate(nodes) if node is None]
    if unknown:
        return f"the NUMA node of the GPU of ranks {', '.join(map(str, unknown))} is unknown"
    if len(set(nodes)) != 2 or nodes.count(nodes[0]) != 4:
        return f"the hybrid route needs four ranks on each of two NUMA nodes, the nodes of the ranks are {nodes}"
    return ""


def _first(field: str, choices: Sequence[Choice]) -> str:
    """Return the ranks that have an error, and what, equal ones together."""
    by_text: dict[str, list[int]] = {}
    for rank, choice in enumerate(choices):
        text = str(getattr(choice, field))
        if text:
            by_text.setdefault(text, []).append(rank)
    parts = [
        f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}: {text}"
        for text, ranks in by_text.items()
    ]
    return _listed(parts, "; ")


def _shared(choices: Sequence[Choice]) -> str:
    by_nic: dict[str, list[int]] = {}
    for rank, choice in enumerate(choices):
        by_nic.setdefault(str(choice.nic), []).append(rank)
    shared = [f"{nic} by ranks {', '.join(map(str, ranks))}" for nic, ranks in by_nic.items() if len(ranks) > 1]
    if not shared:
        return ""
    return (
        f"each rank needs a NIC of its own, and they come to share {_listed(shared)} ({NICS_VARIABLE} assigns them)"
    )


def _listed(items: Sequence[str], separator: str = ", ") -> str:
    if len(items) <= _SHOWN:
        return separator.join(items)
    return f"{separator.join(items[:_SHOWN])} and {len(items) - _SHOWN} more"
