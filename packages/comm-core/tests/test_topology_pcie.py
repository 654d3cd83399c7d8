"""PCIe paths: read by the probe, recorded, shown, and compared where NVML has no word."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comm_core.testing import topologies
from comm_core.testing.cli import commctl, topology_file
from comm_core.testing.fake_nvml import FakeMachine, FakeNvml, FakeTorch, installed
from comm_core.topology import recorded
from comm_core.topology.facts import RankFacts
from comm_core.topology.pcie import ancestor, common_ancestor, pcie_path
from comm_core.topology.probe import probe_machine, probe_rank

BRIDGES = "pci0000:00/0000:00:01.0/0000:01:00.0"
"""A root port, and the upper port of a switch."""


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """A tree with two GPUs below one switch."""
    links = tmp_path / "bus/pci/devices"
    links.mkdir(parents=True)
    for number, address in enumerate(("0000:10:00.0", "0000:11:00.0")):
        folder = tmp_path / "devices" / BRIDGES / f"0000:02:0{number}.0" / address
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text("0\n")
        (links / address).symlink_to(folder)
    return tmp_path


def test_the_probes_find_the_path_of_their_device(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a rank, and that of the whole machine, which asks NVML alone."""
    monkeypatch.delenv("COMM_TOPOLOGY_FILE", raising=False)
    machine = FakeMachine.mesh(2)
    with installed(FakeNvml(machine), FakeTorch(machine)):
        found = [probe_rank(rank, torch.device("cuda", rank), sysfs=sysfs) for rank in range(2)]
        assert [record.device.pcie_path for record in probe_machine(sysfs=sysfs)] == [
            record.device.pcie_path for record in found
        ]
    assert [record.device.pcie_path for record in found] == [f"{BRIDGES}/0000:02:0{n}.0" for n in range(2)]
    again = RankFacts.from_json(found[1].to_json())
    assert again == found[1]


def test_a_file_without_paths_is_read_as_unknown() -> None:
    """One that was recorded before there were any."""
    record = topologies.pcie_root_complex(1)[0].to_json()
    device = dict(record["device"])  # pyright: ignore
    del device["pcie_path"]
    assert RankFacts.from_json({**record, "device": device}).device.pcie_path == ""


def test_topo_shows_the_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every bridge, folded where it has to be; nothing where none is known; anonymizing keeps them."""
    facts = topologies.with_device(topologies.pcie_switch_pairs(2), 0, pcie_path=f"{BRIDGES}/0000:02:00.0")
    assert recorded.anonymized(facts)[0].device.pcie_path == facts[0].device.pcie_path
    assert commctl("topo", "--file", topology_file(tmp_path, facts)) == 0
    text = capsys.readouterr().out
    assert "PCIe path" in text and all(part in text for part in facts[0].device.pcie_path.split("/"))
    assert commctl("topo", "--file", topology_file(tmp_path, topologies.pcie_switch_pairs(2))) == 0
    assert "PCIe path" not in capsys.readouterr().out


def test_distances_come_from_the_paths_where_nvml_is_silent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = topologies.pcie_root_complex(2)
    facts = topologies.with_pair(topologies.with_pair(facts, 0, 1, common_ancestor=None), 1, 0, common_ancestor=None)
    for rank in range(2):
        facts = topologies.with_device(facts, rank, pcie_path=f"{BRIDGES}/0000:02:0{rank}.0")
    assert ancestor(facts[0], facts[1]) == "single"
    assert commctl("topo", "--file", topology_file(tmp_path, facts)) == 0
    assert "PIX = one PCIe switch between" in capsys.readouterr().out


def test_no_path_is_no_answer(sysfs: Path) -> None:
    assert pcie_path("0000:12:00.0", sysfs) == "" and common_ancestor("", BRIDGES) is None
