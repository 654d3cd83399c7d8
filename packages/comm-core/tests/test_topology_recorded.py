"""Recorded topologies: files round-trip, wrong ones are refused with what was expected, and privacy can be had."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.errors import TopologyFileError
from comm_core.testing import topologies as fake
from comm_core.testing.fake_nvml import FakeMachine, FakeNvml, FakeTorch, installed
from comm_core.topology import predicates, recorded
from comm_core.topology.facts import (
    SCHEMA,
    DeviceFacts,
    FabricFacts,
    HostFacts,
    PairFacts,
    RankFacts,
    format_pci_bus_id,
    normalize_pci_bus_id,
)
from comm_core.topology.probe import probe_machine, probe_rank

MACHINES = {
    "mesh": fake.nvlink_mesh(8),
    "bridges": fake.pairwise_bridges(4),
    "islands": fake.two_islands(8),
    "root complex": fake.pcie_root_complex(4),
    "switches": fake.pcie_switch_pairs(8),
    "two hosts": fake.two_hosts(2),
    "mig": fake.mig_slices(2),
    "vm": fake.masked_vm(2),
    "cpu": fake.cpu_host(3),
    "containers": fake.containers(2),
    "asymmetric": fake.asymmetric(4),
    "masked": fake.mask_per_rank(fake.nvlink_mesh(2)),
    "same gpu": fake.same_gpu(fake.nvlink_mesh(2)),
    "no nvml": fake.without_nvml(fake.nvlink_mesh(2)),
}


def verdicts(facts):
    """Return which backends are eligible, with their plans."""
    return [
        (verdict.eligible, verdict.plan)
        for verdict in (
            predicates.assess_nvlink(facts),
            predicates.assess_pcie(facts),
            predicates.assess_mnnvl(facts),
            predicates.assess_nvlink(facts, allow_shared_gpu=True),
        )
    ]


@pytest.mark.parametrize("facts", MACHINES.values(), ids=MACHINES.keys())
@pytest.mark.parametrize("anonymize", [False, True])
def test_a_dumped_machine_gives_the_same_verdicts(tmp_path, facts, anonymize):
    """A replayed machine must decide as the original, anonymous or not."""
    recorded.dump(facts, tmp_path / "topology.json", anonymize=anonymize)
    loaded = recorded.load(tmp_path / "topology.json")
    assert verdicts(loaded) == verdicts(facts)
    assert (loaded == facts) == (not anonymize)


def test_anonymous_records_hold_no_private_text():
    """Names go from fields, keys, free text and plugin facts; equal ones stay equal and zero stays zero."""
    zero, cluster = "0" * 32, "00112233445566778899aabbccddeeff"
    facts = fake.nvlink_mesh(3)
    uuid = facts[1].device.uuid
    # The shorter of two names comes first, and is the beginning of the longer one.
    facts = fake.with_host(facts, hostname="secret-host", boot_id="5ec2e7b0-07", uid=4242)
    facts = fake.with_host(facts, 2, hostname="secret-host.example", uid=0)
    facts = fake.with_device(facts, fabric=FabricFacts("completed", 0, cluster, 1))
    facts = fake.with_device(facts, 2, fabric=FabricFacts("completed", 0, zero, 0))
    facts = fake.with_pair(facts, 0, 1, error=f"nvlink: {uuid}: failed")
    facts = fake.with_rank(
        facts,
        0,
        notes=(f"NVML does not know {uuid[4:]} on secret-host.example", "a host of 42421 names"),
        error="secret-host is down",
        plugins={"x": {"peer": uuid, "list": [1, None, "secret-host"]}},
    )
    anonymous = recorded.anonymized(facts)
    text = json.dumps([record.to_json() for record in anonymous])
    for private in ("secret", "5ec2e7b0", "4242,", uuid[4:], cluster, "4026531836"):
        assert private not in text
    assert [record.host.uid for record in anonymous] == [0, 0, 1]
    assert [record.host.hostname for record in anonymous] == ["host0", "host0", "host1"]
    assert anonymous[0].notes == (
        f"NVML does not know {anonymous[1].device.uuid[4:]} on host1",
        "a host of 42421 names",
    )
    assert anonymous[0].error == "host0 is down"
    assert anonymous[0].plugins == {"x": {"peer": anonymous[1].device.uuid, "list": [1, None, "host0"]}}
    assert anonymous[0].peers[anonymous[1].device.uuid].error == f"nvlink: {anonymous[1].device.uuid}: failed"
    assert set(anonymous[0].peers) == {anonymous[1].device.uuid, anonymous[2].device.uuid}
    fabrics = [record.device.fabric for record in anonymous]
    assert fabrics[0] == fabrics[1] != fabrics[2] == facts[2].device.fabric
    assert anonymous[0].device.name == "Fake GPU"
    assert recorded.anonymized(anonymous) == anonymous


def test_a_host_named_like_a_word_of_the_form_changes_only_names():
    """A host called "cuda" or "completed" must not eat into the structure."""
    facts = fake.with_host(fake.masked_vm(2), hostname="cuda", boot_id="completed")
    facts = fake.with_device(facts, name="cuda")
    anonymous = recorded.anonymized(facts)
    assert anonymous[0].device.kind == "cuda"
    assert anonymous[0].device.fabric.state == "completed"
    assert anonymous[0].device.name == "cuda"
    assert verdicts(anonymous) == verdicts(facts)


TEXT = st.text(max_size=8)
TRI = st.sampled_from([True, False, None])
COUNT = st.one_of(st.none(), st.integers(0, 2**40))
FACTS = st.builds(
    RankFacts,
    rank=st.integers(0, 7),
    host=st.builds(HostFacts, *[TEXT] * 5, uid=COUNT, network_namespace=TEXT),
    device=st.builds(
        DeviceFacts,
        kind=st.sampled_from(["cuda", "cpu"]),
        index=st.integers(-1, 7),
        uuid=TEXT,
        numa_node=COUNT,
        mig=TRI,
        memory_bytes=COUNT,
        nvlinks=COUNT,
        fabric=st.one_of(st.none(), st.builds(FabricFacts, TEXT, COUNT, TEXT, COUNT)),
    ),
    peers=st.dictionaries(
        TEXT, st.builds(PairFacts, TRI, TRI, TRI, TRI, TRI, st.one_of(st.none(), TEXT)), max_size=3
    ),
    versions=st.dictionaries(TEXT, TEXT, max_size=2),
    environment=st.dictionaries(TEXT, TEXT, max_size=2),
    notes=st.lists(TEXT, max_size=2).map(tuple),
    error=st.one_of(st.none(), TEXT),
    plugins=st.dictionaries(TEXT, st.one_of(st.none(), st.booleans(), st.integers(), TEXT), max_size=2),
    recorded=st.booleans(),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(FACTS, min_size=1, max_size=3))
def test_any_facts_round_trip(tmp_path_factory, facts):
    """What `dump` writes `load` reads back to equal records, tri-state values and odd text included."""
    path = tmp_path_factory.mktemp("topology") / "any.json"
    recorded.dump(facts, path)
    assert recorded.load(path) == facts


GOOD = fake.nvlink_mesh(2)[0].to_json()


def broken(**changes):
    """Return a file's content with one record, changed."""
    return {"schema": SCHEMA, "ranks": [{**GOOD, **changes}]}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "expected JSON"),
        ("{", "expected JSON"),
        ([], "got list"),
        ("null", "got NoneType"),
        ({"ranks": [GOOD]}, '"schema"'),
        ({"schema": "1", "ranks": [GOOD]}, '"schema"'),
        ({"schema": True, "ranks": [GOOD]}, '"schema"'),
        ({"schema": 0, "ranks": [GOOD]}, '"schema"'),
        ({"schema": SCHEMA + 1, "ranks": [GOOD]}, f"schema {SCHEMA + 1} is newer than {SCHEMA}"),
        ({"schema": SCHEMA}, '"ranks": a list'),
        ({"schema": SCHEMA, "ranks": []}, "at least one"),
        ({"schema": SCHEMA, "ranks": {"0": GOOD}}, '"ranks": a list'),
        ({"schema": SCHEMA, "ranks": [GOOD, 3]}, "record 1: RankFacts: expected a JSON object, got int"),
        ({"schema": SCHEMA, "ranks": [{}]}, "'rank' is missing"),
        (broken(rank="0"), "RankFacts.rank: expected int, got str '0'"),
        (broken(rank=True), "RankFacts.rank: expected int, got bool"),
        (broken(host=[]), "HostFacts: expected a JSON object, got list"),
        (broken(host={"uid": "root"}), "HostFacts.uid: expected int | None"),
        (broken(device={"mig": "no"}), "DeviceFacts.mig: expected bool | None, got str 'no'"),
        (broken(device={"mig": 0}), "DeviceFacts.mig: expected bool | None, got int 0"),
        (broken(device={"numa_node": False}), "DeviceFacts.numa_node: expected int | None"),
        (broken(device=None), "DeviceFacts: expected a JSON object"),
        (broken(device={"fabric": 3}), "FabricFacts: expected a JSON object"),
        (broken(device={"fabric": {"cluster_uuid": None}}), "FabricFacts.cluster_uuid: expected str"),
        (broken(peers=[]), "RankFacts.peers: expected a JSON object"),
        (broken(peers={"GPU-1": {"nvlink": 1}}), "PairFacts.nvlink: expected bool | None, got int 1"),
        (broken(notes="text"), "RankFacts.notes: expected a list, got str"),
        (broken(notes=[1]), "RankFacts.notes: expected str"),
        (broken(versions={"torch": 2.13}), "RankFacts.versions['torch']: expected str, got float 2.13"),
        (broken(environment={"NCCL_P2P_DISABLE": 1}), "expected str, got int 1"),
        (broken(error=1), "RankFacts.error: expected str | None"),
        (broken(plugins=[]), "RankFacts.plugins: expected a JSON object"),
        (broken(recorded=None), "RankFacts.recorded: expected bool"),
    ],
)
def test_wrong_files_are_refused(tmp_path, content, text):
    """The error names the file, the record and the field, what was expected and what came."""
    path = tmp_path / "wrong.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(TopologyFileError) as caught:
        recorded.load(path)
    assert text in str(caught.value)
    assert repr(str(path)) in str(caught.value)


def test_files_that_can_not_be_read(tmp_path):
    """Missing, a folder, not UTF-8: each is the one error that names the path."""
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "missing.json", tmp_path, tmp_path / "bytes.json"):
        with pytest.raises(TopologyFileError, match=str(path)):
            recorded.load(path)


def test_older_and_newer_writers_of_the_same_schema(tmp_path):
    """Fields that a file lacks are unknown, fields that this version does not know are ignored."""
    path = tmp_path / "sparse.json"
    path.write_text(json.dumps({"schema": SCHEMA, "ranks": [{"rank": 0, "device": {"kind": "cuda"}, "new": [1]}]}))
    (facts,) = recorded.load(path)
    assert facts == RankFacts(rank=0, device=DeviceFacts(kind="cuda"))
    assert not predicates.assess_nvlink([facts]).eligible


def test_a_file_replaces_the_probe(tmp_path, monkeypatch):
    """COMM_TOPOLOGY_FILE: another machine's decision is replayed here, and neither CUDA nor NVML is asked."""
    path = tmp_path / "mesh.json"
    recorded.dump(fake.nvlink_mesh(4), path)
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", str(path))
    nvml, cuda = FakeNvml(FakeMachine.of(1)), FakeTorch(FakeMachine.of(1))
    with installed(nvml, cuda):
        facts = [probe_rank(rank, torch.device("cuda", 0)) for rank in range(4)]
        machine = probe_machine()
    assert (nvml.calls, cuda.initialized) == ([], False)
    assert facts == [replace(record, recorded=True) for record in fake.nvlink_mesh(4)] == machine
    assert predicates.assess_nvlink(facts).eligible


def test_a_rank_that_the_file_lacks_is_an_error_fact(tmp_path, monkeypatch):
    """A file of two ranks can't serve four; the third learns it as a fact, because a probe must not raise."""
    path = tmp_path / "two.json"
    recorded.dump(fake.nvlink_mesh(2), path)
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", str(path))
    facts = probe_rank(2, torch.device("cpu"))
    assert facts.error is not None
    assert "no record of rank 2; it has 2 records, of ranks 0, 1" in facts.error
    assert str(path) in facts.error
    assert (facts.rank, facts.recorded) == (2, True)
    assert "rank 2" in (predicates.no_probe_errors([facts]) or "")
    with pytest.raises(TopologyFileError, match="no record of rank 2"):
        recorded.read_rank(path, 2)


def test_records_are_found_by_their_rank(tmp_path):
    """The order in the file does not matter."""
    path = tmp_path / "reversed.json"
    recorded.dump(list(reversed(fake.nvlink_mesh(3))), path)
    assert recorded.read_rank(path, 0).device.uuid == fake.gpu_uuid(0)


def test_a_missing_file_is_an_error_fact(tmp_path, monkeypatch):
    """A mistyped path is not silently a probe of this machine."""
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", str(tmp_path / "typo.json"))
    assert "No such file" in (probe_rank(0, torch.device("cpu")).error or "")
    (facts,) = probe_machine()
    assert "typo.json" in (facts.error or "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("3b:00.1", "0000:3b:00.1"),
        ("3b:00", "0000:3b:00.0"),
        ("00010000:01:1F.7", "10000:01:1f.7"),
        ("FFFFFFFF:FF:FF.F", ""),
        ("FFFFFFFF:FF:1F.7", ""),
        ("FFFF:FF:1F.0", ""),
        ("", ""),
        ("not an address", ""),
    ],
)
def test_pci_addresses(text, expected):
    """NVML's spelling becomes sysfs's; a masked address is no address."""
    assert normalize_pci_bus_id(text) == expected
    assert normalize_pci_bus_id(expected) == expected


@given(st.integers(0, 0xFFFE), st.integers(0, 0xFF), st.integers(0, 0x1F), st.integers(0, 7))
def test_pci_addresses_from_numbers(domain, bus, device, function):
    """CUDA's numbers and NVML's text of one device become equal."""
    text = f"{domain:08X}:{bus:02X}:{device:02X}.{function:X}"
    assert normalize_pci_bus_id(text) == format_pci_bus_id(domain, bus, device, function)
