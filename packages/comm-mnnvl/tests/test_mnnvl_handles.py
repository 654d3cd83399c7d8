"""How a group shares memory: descriptors on one host, fabric handles between hosts, and never by one rank's choice.

Over a fake driver and a fake NVML, with ranks that are threads on hosts of their own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import CommError, JointError
from comm_core.group import Group, thread_groups
from comm_core.memory.peer import FORMS, choose_form, probe_memory
from comm_core.testing import topologies
from comm_core.testing.fake_driver import GRANULE
from comm_core.testing.fake_nvml import NOT_SUPPORTED, UNKNOWN
from comm_core.testing.fake_nvml import FakeFabric as FabricInfo
from comm_core.testing.ranks import run_threads
from comm_core.transport.interface import Request
from comm_mnnvl import SymmDeviceMemory
from comm_mnnvl.transport import MnnvlTransport

UUID = bytes(range(16, 32))


def open_and_use(group: Group, cluster: Any, form: str) -> str:
    """Share memory, store into everybody's, go through a checkpoint with a new group, and do it again."""
    cluster.enter(group.rank)
    memory = SymmDeviceMemory(5000, group.size, group.rank, group.rank % 8, TorchDistBackend(group))
    assert memory.form == form
    pointers = list(memory.uc_ptrs)
    for round_ in range(3):
        for peer, address in enumerate(memory.uc_ptrs):
            ctypes.memset(address + group.rank, 1 + 16 * peer + group.rank + round_, 1)
        group.barrier("written")
        own = memory.tensor(group.rank, 0, group.size).tolist()
        assert own == [1 + 16 * group.rank + peer + round_ for peer in range(group.size)]
        group.barrier("read")
        memory.checkpoint_prepare()
        assert not memory.mapped
        memory.checkpoint_restore(group)
        assert memory.uc_ptrs == pointers
    memory.close()
    return memory.form


class Untouchable(dict[str, int]):
    """Attributes of a device of which one must not be asked for."""

    def __getitem__(self, name: str) -> int:
        assert "FABRIC" not in name, "one host, and the fabric was looked at"
        return super().__getitem__(name)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_one_host_passes_descriptors_and_never_looks_at_a_fabric(cluster: Any, size: int) -> None:
    """I3: neither the attribute, nor NVML, nor a handle; so no IMEX channel is needed."""
    made = cluster(1, size)
    for node in made.nodes:
        node.driver.attributes = Untouchable(node.driver.attributes)
        node.driver.fabric = None
    assert run_threads(size, open_and_use, made, "vmm_fd") == ["vmm_fd"] * size
    assert all(node.nvml.calls == [] for node in made.nodes)
    assert made.alive() == {}


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (4, 1)])
def test_several_hosts_pass_fabric_handles(cluster: Any, hosts: int, per_host: int) -> None:
    """I1: with a cluster UUID that begins with a zero byte; also those that share a host."""
    made = cluster(hosts, per_host)
    size = hosts * per_host
    assert run_threads(size, open_and_use, made, "vmm_fabric") == ["vmm_fabric"] * size
    assert made.alive() == {}


def test_the_gpu_is_found_by_its_uuid(cluster: Any) -> None:
    """A2: CUDA_VISIBLE_DEVICES and NVML's order leave its fabric what it is."""
    made = cluster(2, 1)
    for rank, node in enumerate(made.nodes):
        # Only the GPU that CUDA shows as the rank's ordinal is in the fabric; NVML numbers it otherwise.
        machine = node.nvml.machine
        for position in range(8):
            if position != 5:
                machine.change(position, fabric=FabricInfo(state=0))
        node.nvml.machine.nvml_order = [5, *[i for i in range(8) if i != 5]]
        node.torch = type(node.torch)(machine, visible=",".join(["5"] * 1 if rank == 0 else ["3", "5"]))
    assert run_threads(2, open_and_use, made, "vmm_fabric") == ["vmm_fabric"] * 2


def refused(group: Group, cluster: Any) -> str:
    cluster.enter(group.rank)
    with pytest.raises(JointError) as caught:
        SymmDeviceMemory(5000, group.size, group.rank, group.rank % 8, TorchDistBackend(group))
    return str(caught.value)


def fabric(**changes: Any) -> Callable[[Any], None]:
    """Return what makes another fabric of a node's GPUs."""

    def change(node: Any) -> None:
        machine = node.nvml.machine
        for position, gpu in enumerate(machine.gpus):
            machine.change(position, fabric=None if gpu.fabric is None else replace(gpu.fabric, **changes))

    return change


def no_binding(node: Any) -> None:
    node.nvml = None


def no_attribute(node: Any) -> None:
    node.driver.attributes["HANDLE_TYPE_FABRIC_SUPPORTED"] = 0


def no_channel(node: Any) -> None:
    node.driver.fabric = None


def not_supported(node: Any) -> None:
    for call in ("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo_v4"):
        node.nvml.fail(call, NOT_SUPPORTED)


def unknown(node: Any) -> None:
    for call in ("nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo_v4"):
        node.nvml.fail(call, UNKNOWN)


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_attribute, "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED is 0"),
        (fabric(state=2), "fabric registration is in_progress"),
        (fabric(state=1), "fabric registration is not_started"),
        (not_supported, "fabric registration is not_supported"),
        (unknown, "fabric information is unknown"),
        (no_binding, "fabric information is unknown"),
        (fabric(status=999), "fabric registration ended with NVML status 999"),
        (fabric(cluster_uuid=bytes(16)), "its UUID is zero, as on a single node"),
        (fabric(cluster_uuid=UUID), "in clique 7 of cluster 10111213"),
        (fabric(clique_id=8), "in clique 8 of cluster 0011"),
    ],
    ids=[
        *("attribute 0", "in progress", "not started", "not supported", "unknown", "no binding", "status"),
        *("zero UUID", "another cluster", "another clique"),
    ],
)
def test_a_rank_outside_of_the_fabric_is_everybodys_error(
    cluster: Any, spoil: Callable[[Any], None], words: str, generation: int
) -> None:
    """C3, I1, I8: whatever the driver's generation, with the same reason on every rank and nothing allocated."""
    made = cluster(3, 1)
    for node in made.nodes:
        node.nvml.fabric_versions = frozenset(range(2, generation + 1))
    spoil(made.nodes[1])
    texts = run_threads(3, refused, made)
    assert len(set(texts)) == 1 and words in texts[0] and "ank 1" in texts[0], texts
    assert made.alive() == {}
    assert all(node.driver.calls["cuMemCreate"] == 0 for node in made.nodes)


def test_an_attribute_that_promises_too_much_is_found_out(cluster: Any) -> None:
    """I3, A13: attribute 1 and no IMEX channel on one rank: the error names the channels, and nothing stays."""
    made = cluster(2, 1)
    no_channel(made.nodes[1])
    texts = run_threads(2, refused, made)
    assert texts[0] == texts[1]
    assert "rank 1: memory for the NVLink fabric can't be allocated" in texts[0]
    assert "/dev/nvidia-caps-imex-channels" in texts[0] and "rank 0" not in texts[0].partition("allocate")[2]
    assert made.alive() == {}


@pytest.mark.parametrize("pairs", [[("host 0", "host 1")], [("host 2", "host 0"), ("host 2", "host 1")]], ids=str)
def test_only_importing_a_peers_handle_proves_anything(cluster: Any, pairs: list[tuple[str, str]]) -> None:
    """C4, I4: containers cut off from each other can export and import their own; the vote names the pair."""
    made = cluster(3, 1)
    made.fabric.unreachable.update(pairs)
    texts = run_threads(3, refused, made)
    assert len(set(texts)) == 1
    exporter, importer = (int(name[-1]) for name in pairs[0])
    assert f"rank {importer}: the memory of rank {exporter} can't be mapped" in texts[0]
    assert "its fabric handle can't be imported" in texts[0] and "imex" in texts[0]
    # It was a little memory that was tried, not what was asked for.
    assert "try fabric handles" in texts[0]
    assert made.alive() == {}


@pytest.mark.parametrize("shared", ["nothing", "network", "mount"])
def test_containers_of_one_host_need_a_way_for_descriptors(cluster: Any, shared: str) -> None:
    """C10, I5: equal boot ids do; with neither a network nor a mount namespace in common the reason is that."""
    made = cluster(1, 2)
    host = made.nodes[1].host
    changes = {"hostname": "container"}
    if shared != "network":
        changes["network_namespace"] = "net:[9]"
    if shared != "mount":
        changes["mount_namespace"] = "mnt:[9]"
    made.nodes[1].host = replace(host, **changes)
    if shared != "nothing":
        assert run_threads(2, open_and_use, made, "vmm_fd") == ["vmm_fd"] * 2
        return
    texts = run_threads(2, refused, made)
    assert texts[0] == texts[1] and "2 network namespaces (containers?)" in texts[0]
    assert made.alive() == {}


def moved(group: Group, cluster: Any, groups: list[Group]) -> str:
    cluster.enter(group.rank)
    memory = SymmDeviceMemory(5000, group.size, group.rank, group.rank % 8, TorchDistBackend(group))
    memory.checkpoint_prepare()
    if group.rank == 1:
        node = cluster.here
        node.host = replace(node.host, hostname="elsewhere", boot_id="another boot")
    with pytest.raises(CommError) as caught:
        memory.checkpoint_restore(groups[group.rank])
    memory.close()
    return str(caught.value)


def test_ranks_that_come_back_on_several_hosts_can_not_share_descriptors(cluster: Any) -> None:
    """H2: a restored process may be elsewhere; every rank learns why it is over, and nothing is left."""
    made = cluster(1, 2)
    texts = run_threads(2, moved, made, thread_groups(2))
    assert texts[0] == texts[1] and "the ranks span 2 hosts" in texts[0] and "half-way" in texts[0]
    assert made.alive() == {}


def look(group: Group, cluster: Any) -> Any:
    cluster.enter(group.rank)
    return probe_memory(group.rank, torch.device("cuda", 0))


def test_nobody_gets_a_fabric_without_asking_for_it_by_name(cluster: Any) -> None:
    """I3: `auto` looks for descriptors and IPC alone, on hosts with a fabric as well."""
    made = cluster(2, 1)
    facts = run_threads(2, look, made)
    assert all(set(item.granules) | set(item.refusals) == set(FORMS) for item in facts)
    choice = choose_form(facts)
    assert choice.form is None and "span 2 hosts" in choice.reason
    assert choose_form(facts, "vmm_fabric").form is None  # Nobody has looked.


# The transport's decision


def request(size: int, **environment: str) -> Request:
    return Request("mnnvl", size, "cuda", environment=environment)


def test_the_plan_says_which_handles() -> None:
    """C7: a pure function of what was gathered."""
    transport = MnnvlTransport()
    for facts, handle in (
        (topologies.nvlink_mesh(4), "posix_fd"),
        (topologies.masked_vm(2), "posix_fd"),
        (topologies.two_hosts(2), "fabric"),
    ):
        verdict = transport.assess(request(len(facts)), facts)
        assert verdict.eligible, verdict
        assert verdict.plan is not None and verdict.plan["handle"] == handle
        assert verdict == transport.assess(request(len(facts)), facts)
        wanted = {"posix_fd": "cuda_ipc", "fabric": "vmm_fd"}[handle]
        other = transport.assess(request(len(facts), COMM_PEER_MEMORY=wanted), facts)
        assert not other.eligible and f"COMM_PEER_MEMORY={wanted}" in other.reason
    assert transport.assess(request(4, COMM_PEER_MEMORY="vmm_fd"), topologies.nvlink_mesh(4)).eligible


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (topologies.two_hosts(2, fabric=False), "no common NVLink fabric"),
        (topologies.nvlink_mesh(17), "at most 16 can exchange through windows"),
        (topologies.pcie_root_complex(4), "no NVLink between ranks"),
        (topologies.cpu_host(2), "not on a CUDA device"),
        (topologies.nvlink_mesh(1), "at least 2 ranks"),
    ],
    ids=["no fabric", "too many", "PCIe", "CPU", "alone"],
)
def test_why_a_group_can_not(facts: Any, words: str) -> None:
    verdict = MnnvlTransport().assess(request(len(facts)), facts)
    assert not verdict.eligible and words in verdict.reason


def test_sizes_are_whole_granules(cluster: Any) -> None:
    """Both forms round alike."""
    made = cluster(2, 1)

    def size(group: Group) -> int:
        made.enter(group.rank)
        with SymmDeviceMemory(GRANULE, 2, group.rank, 0, TorchDistBackend(group)) as memory:
            return memory.get_allocation_size()

    assert run_threads(2, size) == [2 * GRANULE] * 2
