"""The specified Ulysses records: their fields, the probe behind them, and conversions that never gain a yes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from comm_core.testing import topologies as fake
from comm_core.testing.fake_nvml import FakeMachine, FakeNvml, FakeTorch, installed
from comm_core.topology import predicates
from comm_core.topology.ulysses import (
    RDMA_PROBE_MISSING,
    UlyssesPciePlan,
    UlyssesRankTopology,
    probe_ulysses_rank_topology,
    rank_facts_to_ulysses,
    ulysses_to_rank_facts,
)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in ("COMM_TOPOLOGY_FILE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def test_the_fields_are_the_specified_ones():
    """Users build these records by position and by name."""
    assert [field.name for field in dataclasses.fields(UlyssesRankTopology)] == [
        "rank",
        "hostname",
        "device_index",
        "device_uuid",
        "pci_bus_id",
        "peer_p2p",
        "peer_nvlink",
        "pair_errors",
        "probe_error",
        "numa_node",
        "nic_name",
        "gid_index",
        "pcie_error",
        "gid_error",
    ]
    assert [field.name for field in dataclasses.fields(UlyssesPciePlan)] == [
        "numa_nodes",
        "nic_names",
        "transport",
        "gid_indices",
        "requested_route",
    ]
    record = UlyssesRankTopology(1, "host", 0, "GPU-1", "0000:01:00.0")
    assert (record.peer_p2p, record.peer_nvlink, record.pair_errors, record.probe_error) == ({}, {}, {}, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.rank = 2  # type: ignore[misc]


def group(size: int, **first: object) -> list[UlyssesRankTopology]:
    """Return the records of an NVLink mesh as a user's test would write them; `first` changes rank 0's."""
    uuids = [f"GPU-{rank}" for rank in range(size)]
    records = [
        UlyssesRankTopology(
            rank,
            "host",
            rank,
            uuids[rank],
            f"0000:0{rank}:00.0",
            {uuid: True for uuid in uuids if uuid != uuids[rank]},
            {uuid: True for uuid in uuids if uuid != uuids[rank]},
        )
        for rank in range(size)
    ]
    return [dataclasses.replace(records[0], **first), *records[1:]]


def assess(records):
    """Return the verdict about NVLink for Ulysses records."""
    return predicates.assess_nvlink([ulysses_to_rank_facts(record) for record in records])


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_a_hand_written_mesh_is_eligible(size):
    """A record says nothing about boots, namespaces or MIG: its one host name stands for them."""
    assert assess(group(size)).eligible


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"hostname": "other"}, "span 2 hosts: other (rank 0), host (rank 1)"),
        ({"hostname": ""}, "host of rank 0 is unknown"),
        ({"device_uuid": ""}, "GPU of rank 0 is unknown"),
        ({"device_uuid": "GPU-1"}, "ranks 0, 1 are on GPU-1"),
        ({"device_uuid": "MIG-1"}, "MIG"),
        ({"probe_error": "boom"}, "rank 0: boom"),
        ({"rank": 1}, "exactly 0 to 1"),
        ({"device_index": -1, "device_uuid": ""}, "rank 0 is not on a CUDA device"),
        ({"peer_p2p": {"GPU-1": False}}, "denies peer access for 0→1"),
        ({"peer_p2p": {}}, "denies peer access for 0→1"),
        ({"peer_p2p": {}, "peer_nvlink": {}}, "0→1"),
        ({"peer_nvlink": {"GPU-1": False}}, "no NVLink between ranks 0→1"),
        ({"peer_nvlink": {}}, "no NVLink between ranks 0→1"),
        ({"pair_errors": {"GPU-1": "NVML: Unknown Error"}}, "0→1 (NVML: Unknown Error)"),
    ],
)
def test_each_condition_refuses_with_its_own_reason(change, text):
    """One condition broken on rank 0 is one reason; a peer that is absent counts as no."""
    verdict = assess(group(2, **change))
    assert not verdict.eligible
    assert text in verdict.reason


TOPOLOGIES = {
    "mesh": fake.nvlink_mesh(4),
    "islands": fake.two_islands(4),
    "asymmetric": fake.asymmetric(4),
    "root complex": fake.pcie_root_complex(4),
    "two hosts": fake.two_hosts(2),
    "mig": fake.mig_slices(2),
    "cpu": fake.cpu_host(2),
    "masked": fake.mask_per_rank(fake.nvlink_mesh(2)),
    "same gpu": fake.same_gpu(fake.nvlink_mesh(2)),
    "no nvml": fake.without_nvml(fake.nvlink_mesh(2)),
    "read denied": fake.with_pair(fake.nvlink_mesh(2), 0, 1, p2p_read=False),
    "error": fake.with_pair(fake.nvlink_mesh(2), 1, 0, nvlink=None, error="nvlink: NVML: Unknown Error"),
    "no uuid": fake.with_device(fake.nvlink_mesh(2), 0, uuid=""),
    "failed": fake.with_rank(fake.nvlink_mesh(2), 0, error="RuntimeError: x"),
}


@pytest.mark.parametrize("facts", TOPOLOGIES.values(), ids=TOPOLOGIES.keys())
def test_records_keep_the_nvlink_verdict(facts):
    """Through the specified records and back the verdict about NVLink stays what it was."""
    records = [rank_facts_to_ulysses(record) for record in facts]
    assert assess(records).eligible == predicates.assess_nvlink(facts).eligible
    assert [rank_facts_to_ulysses(ulysses_to_rank_facts(record)) for record in records] == records


def test_a_cpu_rank_and_a_failed_gpu_rank_are_told_apart():
    """Index -1 with no UUID is a CPU only if nothing failed."""
    cpu = ulysses_to_rank_facts(UlyssesRankTopology(0, "host", -1, "", ""))
    failed = ulysses_to_rank_facts(UlyssesRankTopology(0, "host", -1, "", "", probe_error="no driver"))
    assert (cpu.device.kind, failed.device.kind) == ("cpu", "cuda")


def test_probing_a_gpu():
    """The record of a healthy GPU: identity, both matrices by UUID, and who provides the RDMA probe."""
    machine = FakeMachine.islands(4, 2)
    with installed(FakeNvml(machine), FakeTorch(machine, current=2)):
        record = probe_ulysses_rank_topology(None, 5)
    assert (record.rank, record.device_index, record.device_uuid) == (5, 2, fake.gpu_uuid(2))
    assert record.probe_error is None
    assert record.peer_p2p == {fake.gpu_uuid(i): True for i in (0, 1, 3)}
    assert record.peer_nvlink == {fake.gpu_uuid(0): False, fake.gpu_uuid(1): False, fake.gpu_uuid(3): True}
    assert (record.nic_name, record.gid_index) == (None, None)
    assert (record.pcie_error, record.gid_error) == (RDMA_PROBE_MISSING, RDMA_PROBE_MISSING)
    assert "comm-pcie" in RDMA_PROBE_MISSING


def test_probing_without_the_pcie_part():
    """probe_pcie=False leaves out what only PCIe wants, without an error about it."""
    machine = FakeMachine.mesh(2)
    with installed(FakeNvml(machine), FakeTorch(machine)):
        record = probe_ulysses_rank_topology("cuda:1", 1, probe_pcie=False)
    assert (record.device_index, record.numa_node, record.pcie_error, record.gid_error) == (1, None, None, None)


@pytest.mark.parametrize("device", ["cuda:9", True, "gpu", 3.5, torch.device("meta")])
def test_a_wrong_device_is_a_probe_error(device):
    """Never raises, not for the device argument either; the host name is there all the same."""
    machine = FakeMachine.mesh(2)
    with installed(FakeNvml(machine), FakeTorch(machine)):
        record = probe_ulysses_rank_topology(device, 0)
    assert record.probe_error is not None
    assert record.hostname


def test_probing_a_machine_without_gpus():
    """None is the CPU where there is no CUDA device: index -1, no UUID, no error."""
    with installed():
        record = probe_ulysses_rank_topology(None, 0)
    assert (record.device_index, record.device_uuid, record.probe_error) == (-1, "", None)
    assert (record.pcie_error, record.gid_error) == (None, None)


def test_plans_round_trip_as_json():
    """A plan travels in a verdict and comes back equal; something else is refused."""
    plan = UlyssesPciePlan((0, None), ("mlx5_0", None), "rdma", (3, 4), "rdma")
    assert UlyssesPciePlan.from_json(plan.to_json()) == plan
    assert UlyssesPciePlan((0, 1), (None, None)) == UlyssesPciePlan((0, 1), (None, None), "hybrid", (), "auto")
    for wrong in (None, [], {}, {"numa_nodes": 3}, {**plan.to_json(), "gid_indices": None}):
        with pytest.raises(ValueError, match="UlyssesPciePlan"):
            UlyssesPciePlan.from_json(wrong)
