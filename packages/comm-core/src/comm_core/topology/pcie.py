"""Where GPUs sit in the PCIe tree: the path of one device, and what two paths have in common.

NVML answers the same question for pairs (its common ancestor); sysfs answers it where NVML does not, and for a
recorded machine. A path is the bridges between the root and the device as sysfs nests them, with slashes between::

    pci0000:40/0000:40:01.1/0000:41:00.0/0000:42:04.0
    root        root port    switch, up   switch, down      ► the GPU

Virtual machines show a tree that is not the real one, or none; what is not known is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from comm_core.topology.facts import RankFacts

__all__ = ["SWITCH_LOCAL", "ancestor", "common_ancestor", "pcie_path"]

_SYSFS = Path("/sys")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_DEVICE = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

SWITCH_LOCAL = ("internal", "single", "multiple")
"""Common ancestors below a host bridge: traffic between the two stays within PCIe switches."""


def pcie_path(pci_bus_id: str, sysfs: Path = _SYSFS) -> str:
    """Return the bridges above a PCI device, the root first, or an empty string where sysfs does not say.

    Args:
        pci_bus_id: address as in sysfs (``"0000:3b:00.0"``).
        sysfs: root of sysfs, for fixtures.
    """
    if not pci_bus_id:
        return ""
    try:
        parts = (sysfs / "bus/pci/devices" / pci_bus_id).resolve(strict=True).parts
    except (OSError, RuntimeError):
        return ""
    roots = [place for place, part in enumerate(parts) if _ROOT.fullmatch(part)]
    if not roots or parts[-1] != pci_bus_id:
        return ""
    bridges = parts[roots[0] : -1]
    return "/".join(bridges) if all(_DEVICE.fullmatch(part) for part in bridges[1:]) else ""


def common_ancestor(a: str, b: str, numa: Sequence[int | None] = (None, None)) -> str | None:
    """Return what two devices on one host have in common, in NVML's words; None where it is unknown.

    Args:
        a: path of the one device, as `pcie_path` returns it.
        b: path of the other one.
        numa: NUMA nodes of the two.

    Returns:
        ``"single"`` with one switch between them, ``"multiple"`` with several, ``"hostbridge"`` under one root
        without a common bridge, ``"node"`` under different roots of one NUMA node, ``"system"`` across nodes.
    """
    if not a or not b:
        return None
    left, right = a.split("/"), b.split("/")
    common = 0
    while common < min(len(left), len(right)) and left[common] == right[common]:
        common += 1
    if common == 0:
        if None in numa:
            return None
        return "node" if numa[0] == numa[1] else "system"
    if common == 1:
        return "hostbridge"
    # Below the last common bridge a switch has one port on each side; every further switch brings two more.
    return "single" if max(len(left), len(right)) - common <= 1 else "multiple"


def ancestor(a: RankFacts, b: RankFacts) -> str | None:
    """Return what the GPUs of two ranks have in common: NVML's word, else sysfs's; None for unknown or one GPU."""
    if a.device.uuid and a.device.uuid == b.device.uuid:
        return None
    for one, other in ((a, b), (b, a)):
        pair = one.peers.get(other.device.uuid)
        if pair is not None and pair.common_ancestor is not None:
            return pair.common_ancestor
    if not a.host.boot_id or a.host.boot_id != b.host.boot_id:
        return None
    return common_ancestor(a.device.pcie_path, b.device.pcie_path, (a.device.numa_node, b.device.numa_node))
