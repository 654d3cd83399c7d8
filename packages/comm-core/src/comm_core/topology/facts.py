"""What a rank knows about its host, its device and its peers: frozen records that travel as JSON.

Every fact that can't always be established is tri-state: ``True``, ``False`` or ``None`` for unknown. Unknown never
admits a backend. Identity of a device is its UUID; ordinals mean different things in different processes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar, cast

from comm_core._json import Json, JsonObject

__all__ = [
    "SCHEMA",
    "DeviceFacts",
    "FabricFacts",
    "HostFacts",
    "PairFacts",
    "RankFacts",
    "Tri",
    "format_pci_bus_id",
    "normalize_pci_bus_id",
]

SCHEMA = 1
"""Version of the JSON form. A reader refuses a higher one and fills what an older one lacks with unknown."""

Tri: TypeAlias = "bool | None"
"""Yes, no, or unknown."""

_T = TypeVar("_T")


_SCALARS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "int | None": (int, type(None)),
    "str | None": (str, type(None)),
    "Tri": (bool, type(None)),
}
"""Annotation of a field (they are text in this module) -> what its JSON may be."""


def _check(where: str, value: object, annotation: str) -> None:
    """Refuse a JSON value that does not fit a scalar annotation.

    A fact of the wrong type would not fail here but much later, on some ranks only, in the middle of a decision.
    """
    allowed = _SCALARS.get(annotation)
    if allowed is None:
        return
    # A bool is an int to Python, and `true` for a NUMA node is a mistake of whoever wrote the file.
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        expected = "bool | None" if annotation == "Tri" else annotation
        raise ValueError(f"{where}: expected {expected}, got {type(value).__name__} {value!r}")


def _object(where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return dict(cast("Mapping[str, Any]", value))


def _texts(where: str, value: object) -> dict[str, str]:
    texts = _object(where, value)
    for key, text in texts.items():
        _check(f"{where}[{key!r}]", text, "str")
    return texts


def _build(cls: type[_T], value: object) -> _T:
    """Build the dataclass `cls` from a JSON object, ignoring keys that it does not know."""
    source = _object(cls.__name__, value)
    known = {item.name: str(item.type) for item in fields(cast("Any", cls))}
    kept = {key: item for key, item in source.items() if key in known}
    for key, item in kept.items():
        _check(f"{cls.__name__}.{key}", item, known[key])
    return cls(**kept)


def format_pci_bus_id(domain: int, bus: int, device: int, function: int = 0) -> str:
    """Return a PCI address as sysfs spells it, for example ``"0000:3b:00.0"``."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.{function:x}"


_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.ASCII | re.IGNORECASE)


def normalize_pci_bus_id(text: str) -> str:
    """Return a PCI address as sysfs spells it; NVML writes an 8-digit domain and upper case. Empty if it is none.

    An address of all ones is empty as well: that is how a hypervisor masks what it does not want to show.
    """
    match = _PCI.fullmatch(text.strip())
    if match is None:
        return ""
    domain, bus, device, function = (int(part or "0", 16) for part in match.groups())
    if bus == 0xFF and device >= 0x1F and domain in (0xFFFF, 0xFFFFFFFF):
        return ""
    return format_pci_bus_id(domain, bus, device, function)


@dataclass(frozen=True)
class HostFacts:
    """Where a process runs. `boot_id` decides "same host"; namespaces decide what can be shared on it.

    A namespace is the target of its link in ``/proc/self/ns`` (``"pid:[4026531836]"``), empty where it is unknown.
    """

    hostname: str = ""
    boot_id: str = ""
    pid_namespace: str = ""
    ipc_namespace: str = ""
    mount_namespace: str = ""
    uid: int | None = None
    network_namespace: str = ""


@dataclass(frozen=True)
class FabricFacts:
    """NVML's fabric information of a GPU (multi-node NVLink).

    `state` is ``"not_supported"``, ``"not_started"``, ``"in_progress"``, ``"completed"`` or ``"unknown"``; `status`
    is the NVML return code (0 is success) or None; `cluster_uuid` is 32 hex digits, all zero on a single node.
    """

    state: str = "unknown"
    status: int | None = None
    cluster_uuid: str = ""
    clique_id: int | None = None


@dataclass(frozen=True)
class PairFacts:
    """What one device can do with one other device, in this direction.

    `peer_access` is CUDA's answer for devices that this process sees; the others are NVML's P2P status by UUID.
    `common_ancestor` is NVML's topology level (``"internal"``, ``"single"``, ``"multiple"``, ``"hostbridge"``,
    ``"node"``, ``"system"``) or None.
    """

    peer_access: Tri = None
    p2p_read: Tri = None
    p2p_write: Tri = None
    p2p_atomics: Tri = None
    nvlink: Tri = None
    common_ancestor: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class DeviceFacts:
    """The device that a rank is bound to. `kind` is ``"cuda"`` or ``"cpu"``.

    `uuid` is ``"GPU-…"`` or ``"MIG-…"``, or empty where it could not be established. `pci_bus_id` is spelled as in
    sysfs. `numa_node` is None where the system does not say (sysfs -1). `mig` is whether the device is a MIG slice or
    a GPU that is split into slices. `nvlinks` counts active links of the GPU; it says nothing about any pair.
    `pcie_path` is the bridges above it (`comm_core.topology.pcie`), or empty.
    """

    kind: str = "cpu"
    index: int = -1
    uuid: str = ""
    name: str = ""
    pci_bus_id: str = ""
    numa_node: int | None = None
    mig: Tri = None
    compute_capability: str = ""
    memory_bytes: int | None = None
    nvlinks: int | None = None
    fabric: FabricFacts | None = None
    pcie_path: str = ""


@dataclass(frozen=True)
class RankFacts:
    """Everything that one rank's probe found, as gathered by the group.

    Attributes:
        rank: group rank.
        host: where the process runs.
        device: what it is bound to.
        peers: UUID of another device -> what this rank's device can do with it. A device that this process can't
            see, by CUDA or by NVML, is absent.
        versions: ``{"torch": …, "cuda_driver": …, "nccl": …}``; unknown ones are absent.
        environment: variables that change what a transport may do (``NCCL_P2P_DISABLE``), where they are set.
        notes: what could not be established and why, for people.
        error: set when the probe as a whole failed; such a rank admits no device backend.
        plugins: transport name -> that plugin's own probe (JSON), or ``{"error": text}``.
        recorded: whether this comes from a topology file and not from this machine.
    """

    rank: int
    host: HostFacts = field(default_factory=HostFacts)
    device: DeviceFacts = field(default_factory=DeviceFacts)
    peers: Mapping[str, PairFacts] = field(default_factory=dict[str, PairFacts])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    notes: tuple[str, ...] = ()
    error: str | None = None
    plugins: Mapping[str, Json] = field(default_factory=dict[str, Json])
    recorded: bool = False

    def to_json(self) -> JsonObject:
        """Return the JSON form; `from_json` reads it back to an equal record."""
        value = asdict(self)
        value["notes"] = list(self.notes)
        return cast("JsonObject", value)

    @classmethod
    def from_json(cls, value: Json) -> RankFacts:
        """Read the JSON form.

        Raises:
            ValueError: it is not an object, or a part of it has the wrong shape.
        """
        parts = _object("RankFacts", value)
        if "rank" not in parts:
            raise ValueError("RankFacts: 'rank' is missing")
        parts["host"] = _build(HostFacts, parts.get("host", {}))
        device = _object("DeviceFacts", parts.get("device", {}))
        if device.get("fabric") is not None:
            device["fabric"] = _build(FabricFacts, device["fabric"])
        parts["device"] = _build(DeviceFacts, device)
        peers = _object("RankFacts.peers", parts.get("peers", {}))
        parts["peers"] = {uuid: _build(PairFacts, pair) for uuid, pair in peers.items()}
        parts["versions"] = _texts("RankFacts.versions", parts.get("versions", {}))
        parts["environment"] = _texts("RankFacts.environment", parts.get("environment", {}))
        parts["plugins"] = _object("RankFacts.plugins", parts.get("plugins", {}))
        notes = parts.get("notes", ())
        if not isinstance(notes, (list, tuple)):
            raise ValueError(f"RankFacts.notes: expected a list, got {type(notes).__name__}")
        parts["notes"] = tuple(cast("list[str]", notes))
        for note in parts["notes"]:
            _check("RankFacts.notes", note, "str")
        return _build(cls, parts)
