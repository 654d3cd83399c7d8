"""Faked topologies: lists of `RankFacts` of machines that one rarely has at hand, and ways to change them.

Every builder makes one rank a GPU, in order. The functions below the builders take such a list and return a changed
copy, so that they can be put together::

    facts = with_pair(nvlink_mesh(4), 2, 1, nvlink=False)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from comm_core.topology.facts import DeviceFacts, FabricFacts, HostFacts, PairFacts, RankFacts

__all__ = [
    "asymmetric",
    "containers",
    "cpu_host",
    "gpu_ranks",
    "gpu_uuid",
    "mask_per_rank",
    "masked_vm",
    "mig_slices",
    "nvlink_mesh",
    "pairwise_bridges",
    "pcie_root_complex",
    "pcie_switch_pairs",
    "same_gpu",
    "select",
    "two_hosts",
    "two_islands",
    "with_device",
    "with_environment",
    "with_host",
    "with_pair",
    "with_rank",
    "without_nvml",
]

NVLINK = PairFacts(True, True, True, True, True, "node")
"""A pair that NVLink connects."""
PCIE = PairFacts(True, True, True, False, False, "hostbridge")
"""A pair with peer access through a PCIe host bridge."""
APART = PairFacts(False, False, False, False, False, "system")
"""A pair without any peer access."""


def gpu_uuid(index: int, host: int = 0) -> str:
    """Return the UUID of GPU `index` of faked host `host`."""
    return f"GPU-{index:08x}-c0de-4a11-8000-{host:012x}"


def gpu_ranks(size: int, pair: Callable[[int, int], PairFacts], *, host: int = 0) -> list[RankFacts]:
    """Return one rank for each of `size` GPUs of one host; ``pair(i, j)`` is what GPU i can do with GPU j."""
    nvlink = any(pair(i, j).nvlink for i in range(size) for j in range(size) if i != j)
    return [
        RankFacts(
            rank=i,
            host=_host(host),
            device=DeviceFacts(
                kind="cuda",
                index=i,
                uuid=gpu_uuid(i, host),
                name="Fake GPU",
                pci_bus_id=f"0000:{0x10 + i:02x}:00.0",
                numa_node=2 * i // size,
                mig=False,
                compute_capability="9.0",
                memory_bytes=80 << 30,
                nvlinks=18 if nvlink else 0,
                fabric=FabricFacts(state="not_supported"),
            ),
            peers={gpu_uuid(j, host): pair(i, j) for j in range(size) if j != i},
            versions={"torch": "2.13.0", "cuda_runtime": "13.0", "nvidia_driver": "580.0", "nccl": "2.28.9"},
        )
        for i in range(size)
    ]


def nvlink_mesh(size: int = 8, *, host: int = 0) -> list[RankFacts]:
    """Every GPU has NVLink to every other."""
    return gpu_ranks(size, lambda i, j: NVLINK, host=host)


def pairwise_bridges(size: int = 4) -> list[RankFacts]:
    """NVLink bridges join GPUs 0-1, 2-3 and so on; the rest goes over PCIe. Every GPU has active links."""
    return gpu_ranks(size, lambda i, j: NVLINK if i // 2 == j // 2 else replace(PCIE, common_ancestor="node"))


def two_islands(size: int = 8) -> list[RankFacts]:
    """Two halves with full NVLink inside and the CPU interconnect between."""
    half = size // 2
    return gpu_ranks(size, lambda i, j: NVLINK if i // half == j // half else replace(PCIE, common_ancestor="system"))


def pcie_root_complex(size: int = 4) -> list[RankFacts]:
    """No NVLink; all GPUs hang off one root complex and have peer access."""
    return gpu_ranks(size, lambda i, j: PCIE)


def pcie_switch_pairs(size: int = 8) -> list[RankFacts]:
    """No NVLink; a PCIe switch for each two GPUs, a host bridge for each half, the CPU interconnect between."""

    def pair(i: int, j: int) -> PairFacts:
        half = size // 2
        ancestor = "single" if i // 2 == j // 2 else "node" if i // half == j // half else "system"
        return replace(PCIE, common_ancestor=ancestor)

    return gpu_ranks(size, pair)


def asymmetric(size: int = 4, missing: Sequence[tuple[int, int]] = ((2, 1),)) -> list[RankFacts]:
    """A mesh in which the ordered pairs `missing` have no peer access, while the other direction has."""
    return gpu_ranks(size, lambda i, j: APART if (i, j) in missing else NVLINK)


def two_hosts(per_host: int = 4, *, fabric: bool = True) -> list[RankFacts]:
    """NVLink inside each of two hosts; with `fabric` all GPUs are in one multi-node NVLink clique."""
    facts = [*nvlink_mesh(per_host, host=0), *nvlink_mesh(per_host, host=1)]
    state = FabricFacts("completed", 0, "00112233445566778899aabbccddeeff", 7) if fabric else None
    return [
        replace(record, rank=rank, device=replace(record.device, fabric=state or record.device.fabric))
        for rank, record in enumerate(facts)
    ]


def mig_slices(size: int = 2) -> list[RankFacts]:
    """`size` MIG slices of one GPU: equal PCI id and host, different UUIDs, no peers."""
    facts = gpu_ranks(size, lambda i, j: APART)
    return [
        replace(
            record,
            device=replace(
                record.device,
                index=0,
                uuid=record.device.uuid.replace("GPU-", "MIG-"),
                name="Fake GPU MIG 1g.10gb",
                pci_bus_id=facts[0].device.pci_bus_id,
                numa_node=0,
                mig=True,
                memory_bytes=10 << 30,
            ),
            peers={},
        )
        for record in facts
    ]


def masked_vm(size: int = 2) -> list[RankFacts]:
    """H200s passed through to a virtual machine, as one really answers: no NUMA node, no cluster, NVLink up."""
    facts = gpu_ranks(size, lambda i, j: replace(NVLINK, common_ancestor="hostbridge"))
    return [
        replace(
            record,
            host=replace(record.host, hostname="vm"),
            device=replace(
                record.device,
                name="NVIDIA H200",
                pci_bus_id=f"0000:00:{6 + record.rank:02x}.0",
                numa_node=None,
                memory_bytes=150109880320,
                fabric=FabricFacts("completed", 0, "0" * 32, 0),
            ),
        )
        for record in facts
    ]


def cpu_host(size: int = 4) -> list[RankFacts]:
    """Ranks on the CPU of one host, with neither CUDA nor NVML."""
    return [RankFacts(rank=rank, host=_host(0), versions={"torch": "2.13.0+cpu"}) for rank in range(size)]


def containers(size: int = 2, *, share_pid: bool = False, share_network: bool = False) -> list[RankFacts]:
    """A mesh whose ranks are each in a container of their own: one boot id, different host names and namespaces."""
    facts = nvlink_mesh(size)
    return [
        replace(
            record,
            host=replace(
                record.host,
                hostname=f"container{record.rank}",
                pid_namespace=record.host.pid_namespace if share_pid else f"pid:[{500 + record.rank}]",
                ipc_namespace=f"ipc:[{600 + record.rank}]",
                mount_namespace=f"mnt:[{700 + record.rank}]",
                network_namespace=record.host.network_namespace if share_network else f"net:[{800 + record.rank}]",
            ),
        )
        for record in facts
    ]


def mask_per_rank(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return `facts` as if each process saw only its own GPU, as ordinal 0: NVML still answers, CUDA does not."""
    return [
        replace(
            record,
            device=replace(record.device, index=0),
            peers={uuid: replace(pair, peer_access=None) for uuid, pair in record.peers.items()},
            environment={**record.environment, "CUDA_VISIBLE_DEVICES": "set"},
        )
        for record in facts
    ]


def same_gpu(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return `facts` as if every rank had forgotten to choose its device: all on the GPU of the first."""
    first = facts[0]
    return [replace(record, device=first.device, peers=first.peers) for record in facts]


def without_nvml(facts: Sequence[RankFacts]) -> list[RankFacts]:
    """Return `facts` as if NVML were missing: only CUDA's peer access is known."""
    return [
        replace(
            record,
            device=replace(record.device, mig=None, nvlinks=None, fabric=None),
            peers={uuid: PairFacts(peer_access=pair.peer_access) for uuid, pair in record.peers.items()},
            notes=("NVML: NVML Shared Library Not Found",),
        )
        for record in facts
    ]


def with_pair(
    facts: Sequence[RankFacts],
    source: int,
    target: int,
    *,
    both: bool = False,
    remove: bool = False,
    **changes: object,
) -> list[RankFacts]:
    """Change what rank `source`'s device can do with rank `target`'s.

    Args:
        facts: the ranks.
        source: position of the rank that has the fact.
        target: position of the other one.
        both: change the other direction as well.
        remove: forget the pair altogether, as if the peer were invisible.
        changes: fields of `PairFacts`.
    """
    result = list(facts)
    for a, b in ((source, target), (target, source)) if both else ((source, target),):
        uuid = result[b].device.uuid
        peers = dict(result[a].peers)
        pair = peers.pop(uuid)
        if not remove:
            peers[uuid] = replace(pair, **changes)
        result[a] = replace(result[a], peers=peers)
    return result


def with_device(facts: Sequence[RankFacts], *ranks: int, **changes: object) -> list[RankFacts]:
    """Change fields of the device of `ranks` (all without any); peers are not renamed with a UUID."""
    return [
        replace(record, device=replace(record.device, **changes)) if not ranks or i in ranks else record
        for i, record in enumerate(facts)
    ]


def with_host(facts: Sequence[RankFacts], *ranks: int, **changes: object) -> list[RankFacts]:
    """Change fields of the host of `ranks` (all without any)."""
    return [
        replace(record, host=replace(record.host, **changes)) if not ranks or i in ranks else record
        for i, record in enumerate(facts)
    ]


def with_rank(facts: Sequence[RankFacts], *ranks: int, **changes: object) -> list[RankFacts]:
    """Change fields of the record of `ranks` (all without any)."""
    return [replace(record, **changes) if not ranks or i in ranks else record for i, record in enumerate(facts)]


def with_environment(facts: Sequence[RankFacts], *ranks: int, **variables: str) -> list[RankFacts]:
    """Set environment variables on `ranks` (all without any)."""
    return [
        replace(record, environment={**record.environment, **variables}) if not ranks or i in ranks else record
        for i, record in enumerate(facts)
    ]


def select(facts: Sequence[RankFacts], ranks: Sequence[int]) -> list[RankFacts]:
    """Return the records of `ranks` as a group of its own: renumbered in the order given."""
    return [replace(facts[old], rank=new) for new, old in enumerate(ranks)]


def _host(number: int) -> HostFacts:
    return HostFacts(
        hostname=f"node{number}",
        boot_id=f"b007{number:04x}-0000-4000-8000-000000000000",
        pid_namespace="pid:[4026531836]",
        ipc_namespace="ipc:[4026531839]",
        mount_namespace="mnt:[4026531841]",
        uid=1000,
        network_namespace="net:[4026531840]",
    )
