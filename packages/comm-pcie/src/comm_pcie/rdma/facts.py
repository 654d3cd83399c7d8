"""What a rank knows about the RDMA devices of its host: records that travel as JSON. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from comm_core._json import Json, JsonObject

__all__ = ["ROCE_V2", "GidEntry", "NicFacts", "RdmaFacts", "natural"]

ROCE_V2 = "RoCE v2"
"""Type of a GID as sysfs spells it; the only one that crosses IP routers, and the only one that is used here."""

_NUMBER = re.compile(r"([0-9]+)$")


def natural(name: str) -> tuple[str, int]:
    """Return the sort key of a device's name: ``mlx5_10`` comes after ``mlx5_9``."""
    found = _NUMBER.search(name)
    return (name, -1) if found is None else (name[: found.start()], int(found[1]))


@dataclass(frozen=True)
class GidEntry:
    """An entry of a port's GID table that is not empty.

    Attributes:
        index: in the table.
        gid: the 16 bytes in 32 hex digits.
        type: ``"RoCE v2"``, ``"IB/RoCE v1"``, or empty where the system does not say.
        netdev: network device that it belongs to, or empty.
    """

    index: int
    gid: str
    type: str = ""
    netdev: str = ""

    @property
    def ipv4(self) -> str:
        """The IPv4 address that it maps (``::ffff:a.b.c.d``), or empty: it maps none, or 0.0.0.0."""
        address = ipaddress.IPv6Address(bytes.fromhex(self.gid)).ipv4_mapped
        return str(address) if address is not None and int(address) else ""

    @property
    def text(self) -> str:
        """What it is, in words."""
        address = ipaddress.IPv6Address(bytes.fromhex(self.gid))
        kind = self.type or "of unknown type"
        if self.ipv4:
            return f"{kind}, {self.ipv4}"
        return f"{kind}, {'link-local' if address.is_link_local else 'IPv6'} {address}"


@dataclass(frozen=True)
class NicFacts:
    """An RDMA device with its port 1.

    Attributes:
        name: ``"mlx5_0"``.
        port_state: ``"ACTIVE"``, ``"DOWN"``…, or empty.
        link_layer: ``"Ethernet"``, ``"InfiniBand"``, or empty.
        gids: the entries of the port's GID table, empty ones left out.
        netdev: network device of the port, or empty.
        numa_node: of the device, None where the system does not say.
        pci_path: PCI addresses from the root to the device, with slashes between; empty where it is unknown.
        pcie_error: why its place, or the device itself, could not be looked at; empty if it could.
        gid_error: why the GID table could not be read; empty if it could.
    """

    name: str
    port_state: str = ""
    link_layer: str = ""
    gids: tuple[GidEntry, ...] = ()
    netdev: str = ""
    numa_node: int | None = None
    pci_path: str = ""
    pcie_error: str = ""
    gid_error: str = ""

    @property
    def summary(self) -> str:
        """What it is, as a sentence for people."""
        node = "?" if self.numa_node is None else str(self.numa_node)
        port = f"port {self.port_state or '?'}, {self.link_layer or '?'}"
        second = [f"{entry.index} ({entry.ipv4})" for entry in self.gids if entry.type == ROCE_V2 and entry.ipv4]
        gids = f"IPv4 RoCE v2 GID {', '.join(second)}" if second else self.gid_error or "no IPv4 RoCE v2 GID"
        place = self.pci_path.rpartition("/")[2] or "?"
        problem = f"; can't be used: {self.problem}" if self.problem else ""
        netdev = f", {self.netdev}" if self.netdev else ""
        return f"{self.name}: PCI {place}, NUMA node {node}, {port}{netdev}, {gids}{problem}"

    @property
    def problem(self) -> str:
        """Why nothing can be sent by it whatever its GIDs are, or empty."""
        if not self.name.startswith("mlx5_"):
            return "it is no mlx5 device, whose interleaved keys are needed"
        if self.pcie_error:
            return self.pcie_error
        if self.port_state != "ACTIVE":
            return f"its port is {self.port_state or 'in an unknown state'}, not ACTIVE"
        if self.link_layer != "Ethernet":
            return f"its link layer is {self.link_layer or 'unknown'}, not Ethernet (RoCE)"
        return ""


@dataclass(frozen=True)
class RdmaFacts:
    """What one rank found.

    Attributes:
        nics: in the order of their numbers.
        source: what was asked: ``"pyverbs"`` or ``"sysfs"``.
        error: why nothing could be found out at all; empty if it could.
        library_error: why the libraries of rdma-core can't be loaded; empty if they can.
    """

    nics: tuple[NicFacts, ...] = ()
    source: str = ""
    error: str = ""
    library_error: str = ""

    def to_json(self) -> JsonObject:
        """Return the JSON form; `from_json` reads it back to an equal record."""
        return cast("JsonObject", asdict(self))

    @classmethod
    def from_json(cls, value: Json) -> RdmaFacts:
        """Read the JSON form. What is no such form is a record with an error, never an exception."""
        try:
            source = _object(value)
            nics = tuple(_nic(_object(item)) for item in _list(source.get("nics", ())))
            texts = {key: str(source.get(key, "")) for key in ("source", "error", "library_error")}
        except (KeyError, TypeError, ValueError) as error:
            return cls(error=f"its record can't be read: {type(error).__name__}: {error}")
        return cls(nics, **texts)


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(f"expected a JSON object, got {type(value).__name__}")
    return cast("Mapping[str, Any]", value)


def _list(value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list, got {type(value).__name__}")
    return cast("Sequence[Any]", value)


def _nic(value: Mapping[str, Any]) -> NicFacts:
    node = value.get("numa_node")
    gids = tuple(_gid(_object(item)) for item in _list(value.get("gids", ())))
    texts = ("port_state", "link_layer", "netdev", "pci_path", "pcie_error", "gid_error")
    found = {key: str(value.get(key, "")) for key in texts}
    return NicFacts(str(value["name"]), gids=gids, numa_node=None if node is None else int(node), **found)


def _gid(value: Mapping[str, Any]) -> GidEntry:
    gid = str(value["gid"])
    if len(bytes.fromhex(gid)) != 16:
        raise ValueError(f"a GID has 16 bytes, got {gid!r}")
    return GidEntry(int(value["index"]), gid, str(value.get("type", "")), str(value.get("netdev", "")))
