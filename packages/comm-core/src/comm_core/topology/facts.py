"""What a rank knows about its host, its device and its peers: frozen records that travel as JSON.

Every fact that can't always be established is tri-state: ``True``, ``False`` or ``None`` for unknown. Unknown never
admits a backend. Identity of a device is its UUID; ordinals mean different things in different processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, TypeVar, cast

from comm_core._json import Json, JsonObject

__all__ = ["SCHEMA", "DeviceFacts", "FabricFacts", "HostFacts", "PairFacts", "RankFacts", "Tri"]

SCHEMA = 1
"""Version of the JSON form. A reader refuses a higher one and fills what an older one lacks with unknown."""

Tri: TypeAlias = "bool | None"
"""Yes, no, or unknown."""

_T = TypeVar("_T")


def _build(cls: type[_T], value: Any) -> _T:
    """Build the dataclass `cls` from a JSON object, ignoring keys that it does not know."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{cls.__name__}: expected a JSON object, got {type(value).__name__}")
    source = cast("Mapping[str, Any]", value)
    known = {item.name for item in fields(cast("Any", cls))}
    return cls(**{key: item for key, item in source.items() if key in known})


@dataclass(frozen=True)
class HostFacts:
    """Where a process runs. `boot_id` decides "same host"; namespaces decide what can be shared on it."""

    hostname: str = ""
    boot_id: str = ""
    pid_namespace: str = ""
    ipc_namespace: str = ""
    mount_namespace: str = ""
    uid: int | None = None


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

    `uuid` is ``"GPU-…"`` or ``"MIG-…"``, or empty where it could not be established. `numa_node` is None where the
    system does not say (sysfs -1). `nvlinks` counts active links of the GPU; it says nothing about any pair.
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
        if not isinstance(value, Mapping):
            raise ValueError(f"RankFacts: expected a JSON object, got {type(value).__name__}")
        parts: dict[str, Any] = dict(value)
        parts["host"] = _build(HostFacts, parts.get("host", {}))
        device: dict[str, Any] = dict(cast("Mapping[str, Any]", parts.get("device", {})))
        if device.get("fabric") is not None:
            device["fabric"] = _build(FabricFacts, device["fabric"])
        parts["device"] = _build(DeviceFacts, device)
        peers = cast("Mapping[str, Any]", parts.get("peers", {}))
        parts["peers"] = {uuid: _build(PairFacts, pair) for uuid, pair in peers.items()}
        parts["notes"] = tuple(cast("list[str]", parts.get("notes", ())))
        return _build(cls, parts)
