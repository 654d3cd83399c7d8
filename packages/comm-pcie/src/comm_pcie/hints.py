"""What sysfs says about settings that break peer-to-peer access: PCI ACS and the IOMMU. Hints for people.

They decide nothing. Peer access works on many machines with ACS on, and fails on some with it off; the self-test
decides. But where it fails, these are the first settings to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from comm_core.topology.facts import RankFacts

__all__ = ["BridgeFacts", "bridge_facts", "hints", "read_hints"]

_SYSFS = Path("/sys")
_EXTENDED = 0x100
_ACS = 0x000D
_ACS_CONTROL = 6
_REDIRECTS = {1 << 2: "request redirect", 1 << 3: "completion redirect"}
"""Bits of the ACS control register that send peer traffic up to the root complex."""


@dataclass(frozen=True)
class BridgeFacts:
    """A bridge above a GPU.

    Attributes:
        address: as in sysfs.
        redirects: what ACS redirects there; None where it can't be read (more than 64 bytes of configuration
            space need CAP_SYS_ADMIN).
    """

    address: str
    redirects: tuple[str, ...] | None


def bridge_facts(address: str, sysfs: Path = _SYSFS) -> BridgeFacts:
    """Return what the configuration space of a bridge says."""
    try:
        config = (sysfs / "bus/pci/devices" / address / "config").read_bytes()
    except OSError:
        return BridgeFacts(address, None)
    if len(config) <= _EXTENDED:
        return BridgeFacts(address, None)
    at, visited = _EXTENDED, set[int]()
    while at and at not in visited and at + _ACS_CONTROL + 2 <= len(config):
        visited.add(at)
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == _ACS:
            control = int.from_bytes(config[at + _ACS_CONTROL : at + _ACS_CONTROL + 2], "little")
            return BridgeFacts(address, tuple(text for bit, text in _REDIRECTS.items() if control & bit))
        at = header >> 20 & ~3
    return BridgeFacts(address, ())


def read_hints(pci_bus_id: str, pcie_path: str, sysfs: Path = _SYSFS) -> dict[str, object]:
    """Return what this machine says about a GPU and the bridges above it, as JSON.

    Args:
        pci_bus_id: of the GPU.
        pcie_path: of the GPU (`comm_core.topology.pcie.pcie_path`).
        sysfs: root of sysfs, for fixtures.
    """
    bridges = [bridge_facts(address, sysfs) for address in pcie_path.split("/")[1:]]
    unread = [item.address for item in bridges if item.redirects is None]
    redirects = {item.address: list(item.redirects) for item in bridges if item.redirects}
    group = sysfs / "bus/pci/devices" / pci_bus_id / "iommu_group"
    return {"iommu": pci_bus_id != "" and group.exists(), "acs": redirects, "acs_unread": unread}


def hints(facts: Sequence[RankFacts], name: str) -> list[str]:
    """Return what may stand in the way of peer-to-peer access, in sentences, from the probes of transport `name`."""
    found: list[str] = []
    redirected: dict[str, list[str]] = {}
    translated: list[int] = []
    unread = False
    for record in facts:
        probe = record.plugins.get(name)
        if not isinstance(probe, Mapping):
            continue
        acs = probe.get("acs")
        if isinstance(acs, Mapping):
            for address, texts in acs.items():
                redirected[address] = [str(text) for text in texts] if isinstance(texts, Sequence) else []
        unread |= bool(probe.get("acs_unread"))
        if probe.get("iommu") is True:
            translated.append(record.rank)
    for address, texts in sorted(redirected.items()):
        found.append(
            f"ACS on the bridge {address} has {' and '.join(texts)} on: traffic between GPUs below it goes through "
            "the root complex, which breaks peer-to-peer access on some machines"
        )
    if unread and not redirected:
        found.append("whether ACS redirects peer traffic can't be read (as root: lspci -vvv, ACSCtl)")
    if translated:
        ranks = ", ".join(map(str, translated))
        found.append(
            f"an IOMMU is on for the GPUs of ranks {ranks}: peer-to-peer access on bare metal needs it off or in "
            "pass-through mode (iommu=pt)"
        )
    return found
