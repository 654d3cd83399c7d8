"""commctl pcie plan: the route, the paths and the profile, from here, a recorded topology or sysfs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pcie_sysfs as sysfs
import pytest

from comm_core import plugins
from comm_core.testing import topologies as fake
from comm_core.testing.cli import commctl, topology_file
from comm_pcie.plugin import PciePlugin
from comm_pcie.rdma.facts import ROCE_V2, GidEntry, NicFacts, RdmaFacts


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    plugins.register("pcie under test", PciePlugin())
    yield
    plugins.unregister("pcie under test")


def plan(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    code = commctl("pcie", "plan", "--json", *map(str, arguments))
    return code, json.loads(capsys.readouterr().out)


def test_a_recorded_machine_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = topology_file(tmp_path, fake.pcie_switch_pairs(8))
    code, found = plan("--file", file, capsys=capsys)
    assert code == 0 and found["eligible"] and found["profile"] == "pcieswitch-pairs"
    assert found["plan"]["transport"] == "p2p" and found["plan"]["numa_nodes"] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found["common_ancestors"]["0-1"] == "single" and len(found["common_ancestors"]) == 28
    code, found = plan("--file", file, "--ranks", "0,2,4,6", capsys=capsys)
    assert code == 0 and found["profile"] == "rootcplx-noswitch" and len(found["devices"]) == 4
    code, found = plan("--file", file, "-n", "3", capsys=capsys)
    assert code == 1 and not found["eligible"] and "world size 3" in found["reason"]


@pytest.mark.parametrize("variable", [True, False])
def test_a_route_that_can_not_be_planned_is_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: bool
) -> None:
    """From the option, or as a communicator would take it from the environment."""
    file = topology_file(tmp_path, fake.pcie_switch_pairs(8))
    options = () if variable else ("--route", "hybrid")
    if variable:
        monkeypatch.setenv("COMM_ULYSSES_PCIE_ROUTE", "hybrid")
    code, found = plan("--file", file, *options, capsys=capsys)
    assert code == 1 and "can't be planned" in found["reason"] and found["requested_route"] == "hybrid"
    code, found = plan("--file", file, "--route", "prefer-hybrid", capsys=capsys)
    assert code == 0 and found["plan"]["transport"] == "p2p"


def test_a_recorded_sysfs_gives_paths_nodes_and_hints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = fake.pcie_root_complex(2)
    facts = [replace(r, peers={u: replace(p, common_ancestor=None) for u, p in r.peers.items()}) for r in facts]
    gpus = [record.device.pci_bus_id for record in facts]
    root = sysfs.tree(
        tmp_path / "sys",
        {gpu: f"pci0000:00/0000:00:01.0/0000:80:00.0/0000:90:0{i}.0" for i, gpu in enumerate(gpus)},
        dict.fromkeys(gpus, 1),
    )
    (root / "bus/pci/devices/0000:90:00.0/config").write_bytes(sysfs.acs_config(0b1100))
    file = topology_file(tmp_path, facts)
    code, found = plan("--file", file, "--sysfs", root, capsys=capsys)
    assert code == 0 and found["profile"] == "pcieswitch-pairs" and found["common_ancestors"] == {"0-1": "single"}
    assert [item["numa_node"] for item in found["devices"]] == [1, 1]
    assert found["devices"][1]["pcie_path"].endswith("0000:90:01.0")
    assert "0000:90:00.0" in found["hints"][0]
    assert commctl("pcie", "plan", "--file", file, "--sysfs", str(tmp_path)) == 1
    assert "no sysfs" in capsys.readouterr().err


def test_nics_of_a_recorded_sysfs_are_planned_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NIC and GID of each rank, what the routes over NICs were verified on, and overrides from the environment."""
    facts = fake.pcie_switch_pairs(4)
    gpus = {record.device.pci_bus_id: f"pci0000:{i}0/0000:{i}0:01.0" for i, record in enumerate(facts)}
    root = sysfs.tree(tmp_path / "sys", gpus, dict.fromkeys(gpus, 0))
    for i, bridges in enumerate(gpus.values()):
        table = [("fe80::1", "RoCE v2", "eth0")] * i + [(sysfs.ipv4_gid(f"10.0.0.{i}"), "RoCE v2", "eth0")]
        sysfs.add_nic(root, tmp_path / "dev", f"mlx5_{3 - i}", f"{bridges}/0000:{i}1:00.0", table)
    file = topology_file(tmp_path, facts)
    monkeypatch.setattr("comm_pcie.rdma.probe.library_problem", lambda: "")
    options = ("--file", file, "--sysfs", root, "--dev", tmp_path / "dev")
    code, found = plan(*options, capsys=capsys)
    assert code == 0 and found["plan"]["transport"] == "rdma"
    assert found["plan"]["nic_names"] == ["mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0"]
    assert found["plan"]["gid_indices"] == [0, 1, 2, 3]
    assert any("verified on an emulator only" in line for line in found["nics"])
    assert any(line.startswith("mlx5_0: PCI 0000:31:00.0") for line in found["nics"])
    monkeypatch.setenv("COMM_ULYSSES_PCIE_NICS", "mlx5_0,mlx5_2,mlx5_1,mlx5_3")
    monkeypatch.setenv("COMM_ULYSSES_PCIE_GID_INDICES", "3,1,2,0")
    code, found = plan(*options, "--route", "rdma", capsys=capsys)
    assert code == 0 and found["plan"]["nic_names"] == ["mlx5_0", "mlx5_2", "mlx5_1", "mlx5_3"]
    monkeypatch.setenv("COMM_ULYSSES_PCIE_NICS", "mlx5_0,mlx5_2")
    assert "has 2 entries" in plan(*options, "--route", "rdma", capsys=capsys)[1]["reason"]
    monkeypatch.delenv("COMM_ULYSSES_PCIE_NICS")
    monkeypatch.delenv("COMM_ULYSSES_PCIE_GID_INDICES")
    assert commctl("pcie", "plan", *map(str, options)) == 0
    text = capsys.readouterr().out
    assert "mlx5_3" in text and "emulator only" in " ".join(text.split())


def test_tables_fit_80_columns_and_cut_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = "pci0000:00/0000:00:01.0/0000:80:00.0/0000:90:00.0/0000:a0:00.0/0000:b0:00.0"
    facts = fake.with_device(fake.pcie_switch_pairs(8), 0, pcie_path=path)
    assert commctl("pcie", "plan", "--file", topology_file(tmp_path, facts)) == 0
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines() if str(tmp_path) not in line) <= 80
    assert "…" not in text and "pcieswitch-pairs" in text
    flat = " ".join(text.split())
    assert all(part in flat for part in path.split("/"))


def test_this_machine_is_asked_without_cuda(capsys: pytest.CaptureFixture[str]) -> None:
    """Here it may have no GPU: then it says so, and exits with 1."""
    code, found = plan(capsys=capsys)
    assert code in (0, 1) and found["eligible"] == (code == 0) and found["reason"]


@pytest.mark.parametrize("command", ["doctor", "topo"])
def test_nics_and_what_their_routes_were_verified_on_are_shown(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody must take a route over NICs for proven: each place that shows it says where it was run."""
    nic = NicFacts("mlx5_0", "ACTIVE", "Ethernet", (GidEntry(3, "0" * 20 + "ffff0a000001", ROCE_V2, "eth0"),), "eth0")
    probe = {"rdma": RdmaFacts((nic,), "sysfs").to_json()}
    facts = [replace(record, plugins={"pcie": probe}) for record in fake.pcie_switch_pairs(2)]
    monkeypatch.setenv("COMM_TOPOLOGY_FILE", topology_file(tmp_path, facts))
    assert commctl(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Transport pcie" in text and "experimental, verified on an emulator only" in text
    assert "mlx5_0: PCI ?, NUMA node ?, port ACTIVE, Ethernet, eth0, IPv4 RoCE v2 GID 3 (10.0.0.1)" in text
    if command == "doctor":
        commctl("doctor", "--json")
        assert json.loads(capsys.readouterr().out)["notes"]["pcie"][0].endswith("verified on an emulator only")
