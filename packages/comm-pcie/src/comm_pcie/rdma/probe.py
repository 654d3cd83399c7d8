"""The probe of RDMA devices: by pyverbs where it can be imported, by sysfs where not. Both give the same record.

Nothing is allocated and no queue pair is made. What can't be found out about a device is an error in its record, and
other devices are looked at all the same: containers show devices in sysfs that they don't let anybody open.
"""

# pyverbs has no types; what it returns is converted at once.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import contextlib
import ctypes
import importlib
import ipaddress
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comm_pcie.rdma.engine import VerbsLibraries
from comm_pcie.rdma.facts import GidEntry, NicFacts, RdmaFacts, natural

__all__ = ["PyverbsProbe", "RdmaProbe", "SysfsProbe", "library_problem", "probe_rdma"]

_SYSFS = Path("/sys")
_DEV = Path("/dev")
_PORT = 1
_EMPTY = "0" * 32
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_ROOT = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_STATES = ("NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER")
"""Port states by their number, as sysfs spells them."""
_LINK_LAYERS = ("", "InfiniBand", "Ethernet")
_GID_TYPES = ("IB/RoCE v1", "IB/RoCE v1", "RoCE v2")
"""Types of GIDs by their number, as sysfs spells them; sysfs does not tell the first two apart."""


class RdmaProbe(ABC):
    """Finds the RDMA devices of this host. Local; raises nothing.

    Class attributes:
        source: what it asks.
    """

    source: str

    @abstractmethod
    def nics(self) -> Sequence[NicFacts]:
        """Return the devices. May raise where there is nothing to ask."""

    def facts(self) -> RdmaFacts:
        """Return what was found, in the order of the devices' numbers."""
        try:
            found = sorted(self.nics(), key=lambda nic: natural(nic.name))
        except Exception as error:
            return RdmaFacts(source=self.source, error=_text(error))
        return RdmaFacts(tuple(found), self.source)


class SysfsProbe(RdmaProbe):
    """Reads ``/sys/class/infiniband``; needs no library and opens no device.

    Args:
        sysfs: root of sysfs, for fixtures.
        dev: root of the device nodes, for fixtures.
    """

    source = "sysfs"

    def __init__(self, sysfs: Path = _SYSFS, dev: Path = _DEV) -> None:
        self._root = sysfs
        self._dev = dev

    def nics(self) -> Sequence[NicFacts]:
        """See `RdmaProbe.nics`; none where the kernel has no RDMA devices."""
        folder = self._root / "class/infiniband"
        return [self._nic(place) for place in folder.iterdir()] if folder.is_dir() else []

    def _nic(self, place: Path) -> NicFacts:
        port = place / f"ports/{_PORT}"
        gids, gid_error = _read_gids(port)
        nic = NicFacts(
            place.name,
            port_state=_read(port / "state").partition(":")[2].strip(),
            link_layer=_read(port / "link_layer"),
            gids=gids,
            netdev=next((entry.netdev for entry in gids if entry.netdev), ""),
            gid_error=gid_error,
        )
        return replace(with_place(nic, self._root), pcie_error=self._closed(place.name))

    def _closed(self, name: str) -> str:
        """Return why this process can't open the device, or an empty string."""
        for entry in sorted((self._root / "class/infiniband_verbs").glob("uverbs*")):
            if _read(entry / "ibdev") != name:
                continue
            node = self._dev / "infiniband" / entry.name
            if not node.exists():
                return f"{node} is missing (a container that shows devices without their nodes?)"
            return "" if os.access(node, os.R_OK | os.W_OK) else f"{node} can't be opened: permission denied"
        return "it has no device node (is the module ib_uverbs loaded?)"


class PyverbsProbe(RdmaProbe):
    """Asks libibverbs by pyverbs, and sysfs for what verbs don't know: the place in the PCIe tree, and other devices.

    libibverbs leaves out devices whose nodes this process does not have, without a word.

    Args:
        sysfs: root of sysfs, for fixtures.
        dev: root of the device nodes, for fixtures.

    Raises:
        ImportError: pyverbs is not there, or does not fit the rdma-core of this system.
    """

    source = "pyverbs"

    def __init__(self, sysfs: Path = _SYSFS, dev: Path = _DEV) -> None:
        self._root = sysfs
        self._others = SysfsProbe(sysfs, dev)
        self._device: Any = importlib.import_module("pyverbs.device")

    def nics(self) -> Sequence[NicFacts]:
        """See `RdmaProbe.nics`."""
        listed = [_name(item.name) for item in self._device.get_device_list()]
        return [*map(self._nic, listed), *(_unlisted(nic) for nic in self._others.nics() if nic.name not in listed)]

    def _nic(self, name: str) -> NicFacts:
        nic = with_place(NicFacts(name), self._root)
        try:
            context = self._device.Context(name=name)
        except Exception as error:
            return replace(nic, pcie_error=f"it can't be opened: {_text(error)}")
        with contextlib.closing(context):
            try:
                port = context.query_port(_PORT)
            except Exception as error:
                return replace(nic, pcie_error=f"its port {_PORT} can't be queried: {_text(error)}")
            gids, gid_error = self._gids(context, int(port.gid_tbl_len))
            return replace(
                nic,
                port_state=_of(_STATES, int(port.state)),
                link_layer=_of(_LINK_LAYERS, int(port.link_layer)),
                gids=gids,
                netdev=next((entry.netdev for entry in gids if entry.netdev), ""),
                gid_error=gid_error,
            )

    def _gids(self, context: Any, length: int) -> tuple[tuple[GidEntry, ...], str]:
        try:
            table = context.query_gid_table(max(1, length))
        except Exception as error:
            return (), f"the GID table can't be read: {_text(error)}"
        names = _interfaces(self._root)
        found = [
            GidEntry(
                int(entry.gid_index),
                _digits(str(entry.gid_str())),
                _of(_GID_TYPES, int(entry.gid_type)),
                names.get(int(entry.ndev_ifindex), ""),
            )
            for entry in table
            if int(entry.port_num) == _PORT
        ]
        return tuple(sorted((entry for entry in found if entry.gid != _EMPTY), key=lambda entry: entry.index)), ""


def probe_rdma(sysfs: Path = _SYSFS, dev: Path = _DEV) -> RdmaFacts:
    """Return what this process finds out about RDMA devices: by pyverbs, else by sysfs. Local; raises nothing.

    Args:
        sysfs: root of sysfs, for fixtures.
        dev: root of the device nodes, for fixtures.
    """
    facts = RdmaFacts(source="pyverbs", error="not asked")
    # Where it can't be imported, or finds nothing to ask, sysfs may still say what there is and why it is no use.
    with contextlib.suppress(ImportError, OSError):
        facts = PyverbsProbe(sysfs, dev).facts()
    if facts.error:
        facts = SysfsProbe(sysfs, dev).facts()
    return replace(facts, library_error=library_problem()) if facts.nics else facts


def library_problem() -> str:
    """Return why the libraries of rdma-core can't be loaded, or an empty string. They stay loaded."""
    try:
        for path in dict.fromkeys(VerbsLibraries.default()):
            ctypes.CDLL(path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
    except OSError as error:
        return f"{error} (Debian and Ubuntu: apt install ibverbs-providers)"
    return ""


def _unlisted(nic: NicFacts) -> NicFacts:
    """Return a device that sysfs has and libibverbs does not list, with a reason why it can't be used."""
    why = nic.pcie_error or "libibverbs does not list it (is its provider installed? apt install ibverbs-providers)"
    return replace(nic, pcie_error=why)


def with_place(nic: NicFacts, sysfs: Path) -> NicFacts:
    """Return `nic` with its place in the PCIe tree as sysfs has it."""
    device = sysfs / "class/infiniband" / nic.name / "device"
    try:
        parts = device.resolve(strict=True).parts
        node = int(_read(device / "numa_node") or -1)
    except (OSError, RuntimeError, ValueError):
        return nic
    roots = [place for place, part in enumerate(parts) if _ROOT.fullmatch(part)]
    path = parts[roots[0] :] if roots else ()
    if len(path) < 2 or not all(_ADDRESS.fullmatch(part) for part in path[1:]):
        path = ()
    return replace(nic, pci_path="/".join(path), numa_node=node if node >= 0 else None)


def _read_gids(port: Path) -> tuple[tuple[GidEntry, ...], str]:
    folder = port / "gids"
    try:
        names = [entry.name for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError as error:
        return (), f"the GID table can't be read: {error.strerror or error}"
    found: list[GidEntry] = []
    for index in sorted(map(int, names)):
        gid = _digits(_read(folder / str(index)))
        if gid == _EMPTY:
            continue
        # The type of an empty place can't be read (EINVAL), and in containers that of some others can't either.
        kind = _read(port / f"gid_attrs/types/{index}")
        found.append(GidEntry(index, gid, kind, _read(port / f"gid_attrs/ndevs/{index}")))
    return tuple(found), ""


def _digits(text: str) -> str:
    """Return the 32 hex digits of a GID as sysfs or pyverbs write it; of what is none, those of an empty one."""
    try:
        return ipaddress.IPv6Address(text.strip()).packed.hex()
    except ValueError:
        return _EMPTY


def _interfaces(sysfs: Path) -> dict[int, str]:
    """Return the names of the network devices by their number."""
    found: dict[int, str] = {}
    for place in (sysfs / "class/net").glob("*"):
        with contextlib.suppress(ValueError):
            found[int(_read(place / "ifindex"))] = place.name
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _name(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _of(names: Sequence[str], number: int) -> str:
    return names[number] if 0 <= number < len(names) else ""


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip()}" if str(error).strip() else type(error).__name__
