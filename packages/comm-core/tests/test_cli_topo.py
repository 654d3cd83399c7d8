"""commctl topo: every fact is shown, whatever the machine, and what is written is a recorded topology."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from comm_core.cli.output import ranks_text
from comm_core.cli.topo import link
from comm_core.testing import topologies
from comm_core.testing.cli import commctl, topology_file
from comm_core.topology import recorded
from comm_core.topology.facts import PairFacts

MACHINES = {
    "mesh": topologies.nvlink_mesh(8),
    "bridges": topologies.pairwise_bridges(8),
    "switches": topologies.pcie_switch_pairs(8),
    "vm": topologies.masked_vm(8),
    "mig": topologies.mig_slices(4),
    "hosts": topologies.two_hosts(),
    "cpu": topologies.cpu_host(4),
}


@pytest.mark.parametrize("name", MACHINES)
def test_tables_fit_80_columns_and_cut_nothing(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """A fact that is cut off is no fact: it must be there in full, folded where it has to be."""
    facts = MACHINES[name]
    assert commctl("topo", "--file", topology_file(tmp_path, facts)) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert "…" not in text and "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())
    for record in facts:
        assert record.device.uuid in text
        assert record.device.pci_bus_id in text
        assert record.host.boot_id in text
        for version in record.versions.values():
            assert version in text


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        (PairFacts(True, True, True, True, True), "NVLink"),
        (PairFacts(True, None, None, None, True), "NVLink"),
        (PairFacts(True, True, True, True, False), "P2P"),
        (PairFacts(True, True, True, True, None), "P2P?"),
        (PairFacts(False, True, True, True, True), "SYS"),
        (PairFacts(True, False, True, True, True), "SYS"),
        (PairFacts(None, True, True, True, True), "?"),
        (None, "?"),
    ],
)
def test_a_link_never_promises_more_than_is_known(pair: PairFacts | None, word: str):
    """NVLink without access is of no use, and unknown is not no."""
    first, second = topologies.nvlink_mesh(2)
    first = replace(first, peers={} if pair is None else {second.device.uuid: pair})
    assert link(first, second) == word


def test_two_ranks_on_one_gpu_are_the_same_device():
    first, second = topologies.same_gpu(topologies.nvlink_mesh(2))
    assert link(first, second) == "same"


def test_the_matrix_has_a_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Rows are the ranks that access, columns those that are accessed: the two can differ."""
    facts = topologies.with_pair(topologies.nvlink_mesh(2), 1, 0, peer_access=False)
    assert commctl("topo", "--file", topology_file(tmp_path, facts)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0", ".", "NVLink"] in lines and ["1", "SYS", "."] in lines


def test_what_could_not_be_established_is_said_once_with_its_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    facts = [replace(record, notes=("NVML is tired",)) for record in topologies.nvlink_mesh(4)]
    facts[2] = replace(facts[2], error="RuntimeError: the driver hung", plugins={"pcie": {"error": "no NIC"}})
    assert commctl("topo", "--file", topology_file(tmp_path, facts)) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("- NVML is tired") == 1
    assert "- rank 2: the probe failed: RuntimeError: the driver hung" in text
    assert "- rank 2: the probe of transport 'pcie': no NIC" in text


def test_json_and_out_are_recorded_topologies(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What topo says can be replayed: by --file, or by COMM_TOPOLOGY_FILE."""
    facts = topologies.pairwise_bridges(4)
    out = tmp_path / "again.json"
    assert commctl("topo", "--file", topology_file(tmp_path, facts), "--out", str(out), "--json") == 0
    assert recorded.load(out) == facts
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_anonymize_covers_the_file_and_the_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    facts = topologies.two_hosts()
    out = tmp_path / "anonymous.json"
    assert commctl("topo", "--file", topology_file(tmp_path, facts), "--out", str(out), "--anonymize") == 0
    for text in (out.read_text(), capsys.readouterr().out):
        for record in facts:
            assert record.device.uuid not in text
            assert record.host.boot_id not in text


def test_the_topology_file_variable_replaces_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", topology_file(tmp_path, topologies.nvlink_mesh(2)))
    assert commctl("topo") == 0
    assert "COMM_TOPOLOGY_FILE" in capsys.readouterr().out.splitlines()[0]
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", str(tmp_path / "missing.json"))
    assert commctl("topo") == 1
    assert "missing.json" in capsys.readouterr().err


def test_a_file_that_can_not_be_written_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert commctl("topo", "--out", str(tmp_path / "no" / "folder.json")) == 1
    assert "can't write" in capsys.readouterr().err


def test_this_machine_can_be_asked(capsys: pytest.CaptureFixture[str]):
    """Whatever machine the tests run on: there is at least one record, of this boot."""
    assert commctl("topo", "--json") == 0
    ranks = json.loads(capsys.readouterr().out)["ranks"]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert ranks and all(record["host"]["boot_id"] == boot for record in ranks)


def test_ranks_are_shortened_and_not_lost():
    assert ranks_text([3, 0, 1, 2, 6, 8, 9]) == "0-3, 6, 8, 9"
    assert ranks_text([5]) == "5"
