"""The specified topology records of Ulysses, and their conversions from and to `RankFacts`.

The records hold yes and no only, so a conversion to them turns unknown into absent or no. What they have no field for
(boot ids, namespaces, the environment) is taken on trust on the way back: equal host names mean one host there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

from comm_core._json import Json, JsonObject
from comm_core.topology.facts import DeviceFacts, HostFacts, PairFacts, RankFacts

if TYPE_CHECKING:
    import torch

__all__ = [
    "RDMA_PROBE_MISSING",
    "UlyssesPciePlan",
    "UlyssesRankTopology",
    "probe_ulysses_rank_topology",
    "rank_facts_to_ulysses",
    "ulysses_to_rank_facts",
]

RDMA_PROBE_MISSING = "not probed: comm-core has no RDMA probe, comm-pcie provides it"
"""What `pcie_error` and `gid_error` say where nothing could look for a NIC."""


@dataclass(frozen=True)
class UlyssesRankTopology:
    """One rank's probe as the specification has it.

    Attributes:
        rank: group rank.
        hostname: host that the rank runs on.
        device_index: CUDA ordinal in that process; -1 with an empty UUID and no error is a rank on a CPU.
        device_uuid: ``"GPU-…"`` (``"MIG-…"`` for a slice), or empty where it could not be established.
        pci_bus_id: PCI address as in sysfs, or empty.
        peer_p2p: UUID of another GPU -> whether this one can access its memory. Absent counts as no.
        peer_nvlink: UUID of another GPU -> whether NVLink connects them. Absent counts as no.
        pair_errors: UUID of another GPU -> why something about that pair could not be found out.
        probe_error: why the probe as a whole failed, or None.
        numa_node: of the GPU, None where it is unknown or was not asked for.
        nic_name: RDMA device that this rank would use, or None.
        gid_index: RoCE v2 GID of that device that this rank would use, or None.
        pcie_error: why there is no NIC, or None.
        gid_error: why there is no GID, or None.
    """

    rank: int
    hostname: str
    device_index: int
    device_uuid: str
    pci_bus_id: str
    peer_p2p: Mapping[str, bool] = field(default_factory=dict[str, bool])
    peer_nvlink: Mapping[str, bool] = field(default_factory=dict[str, bool])
    pair_errors: Mapping[str, str] = field(default_factory=dict[str, str])
    probe_error: str | None = None
    numa_node: int | None = None
    nic_name: str | None = None
    gid_index: int | None = None
    pcie_error: str | None = None
    gid_error: str | None = None


@dataclass(frozen=True)
class UlyssesPciePlan:
    """Route plan of the whole group for the PCIe backend; the tuples are indexed by group rank.

    Attributes:
        numa_nodes: NUMA node of each rank's GPU, None where it is unknown.
        nic_names: RDMA device of each rank, None where the route needs none.
        transport: ``"p2p"``, ``"hybrid"`` or ``"rdma"``.
        gid_indices: GID of each rank; empty on the P2P route, which opens no queue pair.
        requested_route: the route that was asked for (``"auto"`` or a transport).
    """

    numa_nodes: tuple[int | None, ...]
    nic_names: tuple[str | None, ...]
    transport: str = "hybrid"
    gid_indices: tuple[int, ...] = ()
    requested_route: str = "auto"

    def to_json(self) -> JsonObject:
        """Return the JSON form; `from_json` reads it back to an equal plan."""
        return {
            "numa_nodes": list(self.numa_nodes),
            "nic_names": list(self.nic_names),
            "transport": self.transport,
            "gid_indices": list(self.gid_indices),
            "requested_route": self.requested_route,
        }

    @classmethod
    def from_json(cls, value: Json) -> UlyssesPciePlan:
        """Read the JSON form.

        Raises:
            ValueError: it is not the form of a plan.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"UlyssesPciePlan: expected a JSON object, got {type(value).__name__}")
        try:
            return cls(
                numa_nodes=tuple(cast("list[int | None]", value["numa_nodes"])),
                nic_names=tuple(cast("list[str | None]", value["nic_names"])),
                transport=str(value["transport"]),
                gid_indices=tuple(cast("list[int]", value["gid_indices"])),
                requested_route=str(value["requested_route"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"UlyssesPciePlan: {type(error).__name__}: {error}") from error


def rank_facts_to_ulysses(facts: RankFacts, *, probe_pcie: bool = True) -> UlyssesRankTopology:
    """Return the specified record of `facts`; what is unknown about a pair becomes no.

    Args:
        facts: one rank's probe.
        probe_pcie: whether to fill in what only the PCIe backend wants.
    """
    on_gpu = facts.device.kind == "cuda"
    pcie = probe_pcie and on_gpu
    nic = _nic_of(facts) if pcie else dict[str, Json]()
    return UlyssesRankTopology(
        rank=facts.rank,
        hostname=facts.host.hostname,
        device_index=facts.device.index if on_gpu else -1,
        device_uuid=facts.device.uuid,
        pci_bus_id=facts.device.pci_bus_id,
        peer_p2p={uuid: _mapped(pair) for uuid, pair in facts.peers.items()},
        peer_nvlink={uuid: pair.nvlink is True for uuid, pair in facts.peers.items()},
        pair_errors={uuid: pair.error for uuid, pair in facts.peers.items() if pair.error},
        probe_error=facts.error,
        numa_node=facts.device.numa_node if pcie else None,
        nic_name=cast("str | None", nic.get("nic_name")),
        gid_index=cast("int | None", nic.get("gid_index")),
        pcie_error=cast("str | None", nic.get("pcie_error")),
        gid_error=cast("str | None", nic.get("gid_error")),
    )


def _with_nic(facts: RankFacts) -> RankFacts:
    """Return `facts` with the probe of transport ``pcie``, where it is installed and works."""
    from comm_core.plugins.discovery import registry
    from comm_core.transport.interface import ProbeContext

    device = facts.device
    if device.kind != "cuda" or "pcie" in facts.plugins:
        return facts
    try:
        transport = registry().transports.get("pcie")
        if transport is None:
            return facts
        found: Json = transport.probe(ProbeContext(facts.rank, device.kind, device.index, facts))
    except Exception as error:
        found = {"nic": {"pcie_error": f"{type(error).__name__}: {error}"}}
    return replace(facts, plugins={**facts.plugins, "pcie": found})


def _nic_of(facts: RankFacts) -> Mapping[str, Json]:
    """Return what the probe of transport ``pcie`` says of the rank's NIC, under the names of the record."""
    probe = facts.plugins.get("pcie")
    if isinstance(probe, Mapping):
        nic = probe.get("nic")
        if isinstance(nic, Mapping):
            return nic
    return {"pcie_error": RDMA_PROBE_MISSING, "gid_error": RDMA_PROBE_MISSING}


def ulysses_to_rank_facts(topology: UlyssesRankTopology) -> RankFacts:
    """Return `topology` as facts, so that the general predicates can answer about it.

    The record knows one name of a host and nothing about boots, namespaces or MIG mode. Its host name therefore
    stands for all of them, and a device is a MIG slice if its UUID says so.
    """
    on_gpu = topology.device_index >= 0 or topology.device_uuid != "" or topology.probe_error is not None
    host = f"hostname:{topology.hostname}" if topology.hostname else ""
    peers: dict[str, PairFacts] = {}
    for uuid in {**topology.peer_p2p, **topology.peer_nvlink, **topology.pair_errors}:
        access = topology.peer_p2p.get(uuid, False)
        peers[uuid] = PairFacts(
            peer_access=access,
            p2p_read=access,
            p2p_write=access,
            nvlink=topology.peer_nvlink.get(uuid, False),
            error=topology.pair_errors.get(uuid),
        )
    return RankFacts(
        rank=topology.rank,
        host=HostFacts(
            hostname=topology.hostname,
            boot_id=host,
            pid_namespace=host,
            ipc_namespace=host,
            mount_namespace=host,
            network_namespace=host,
        ),
        device=DeviceFacts(
            kind="cuda" if on_gpu else "cpu",
            index=topology.device_index,
            uuid=topology.device_uuid,
            pci_bus_id=topology.pci_bus_id,
            numa_node=topology.numa_node,
            mig=topology.device_uuid.startswith("MIG-") if on_gpu else None,
        ),
        peers=peers,
        error=topology.probe_error,
    )


def probe_ulysses_rank_topology(
    device: torch.device | str | int | None, rank: int, *, probe_pcie: bool = True
) -> UlyssesRankTopology:
    """Probe this rank's GPU and what it can reach among the other GPUs. Never raises; local.

    Args:
        device: the rank's device; None is the current CUDA device, or the CPU where there is none.
        rank: group rank to record.
        probe_pcie: whether to fill in what only the PCIe backend wants (NUMA node, NIC, GID).

    Returns:
        The record; whatever failed, the device argument included, is in `probe_error`.
    """
    from comm_core import _cuda
    from comm_core.topology.probe import host_facts, probe_rank

    try:
        bound = _cuda.normalize_device(device)
    except Exception as error:
        facts = RankFacts(rank=rank, host=host_facts(), error=f"{type(error).__name__}: {error}")
    else:
        facts = probe_rank(rank, bound)
        if probe_pcie:
            facts = _with_nic(facts)
    return rank_facts_to_ulysses(facts, probe_pcie=probe_pcie)


def _mapped(pair: PairFacts) -> bool:
    """Whether CUDA can map the peer's memory and NVML does not object."""
    return pair.peer_access is True and pair.p2p_read is not False and pair.p2p_write is not False
