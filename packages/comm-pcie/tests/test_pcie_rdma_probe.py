"""The probe of RDMA devices, from trees of sysfs: what is there, what can't be opened, what can't be read."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pcie_sysfs as sysfs
import pytest

from comm_core.testing import topologies as fake
from comm_core.transport.interface import ProbeContext
from comm_pcie import transport
from comm_pcie.rdma import probe
from comm_pcie.rdma.facts import GidEntry, RdmaFacts
from comm_pcie.rdma.planning import choose_gid
from comm_pcie.rdma.probe import PyverbsProbe, SysfsProbe, probe_rdma
from comm_pcie.transport import PcieTransport

EMPTY = "0000:0000:0000:0000:0000:0000:0000:0000"
LOCAL = "fe80:0000:0000:0000:bace:f6ff:fe00:0001"
IPV4 = sysfs.ipv4_gid("192.168.1.7")
USUAL = [
    (LOCAL, "IB/RoCE v1", "eth2"),
    (LOCAL, "RoCE v2", "eth2"),
    (IPV4, "IB/RoCE v1", "eth2"),
    (IPV4, "RoCE v2", "eth2"),
]
PATH = "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0"


def test_a_device_is_read_from_the_tree(tmp_path: Path) -> None:
    sysfs.add_nic(tmp_path / "sys", tmp_path / "dev", "mlx5_1", PATH, [*USUAL, (EMPTY, None, "")], numa=1)
    facts = SysfsProbe(tmp_path / "sys", tmp_path / "dev").facts()
    assert (facts.source, facts.error, len(facts.nics)) == ("sysfs", "", 1)
    nic = facts.nics[0]
    assert (nic.name, nic.port_state, nic.link_layer, nic.netdev) == ("mlx5_1", "ACTIVE", "Ethernet", "eth2")
    assert (nic.numa_node, nic.pci_path, nic.pcie_error, nic.gid_error, nic.problem) == (1, PATH, "", "", "")
    assert [entry.index for entry in nic.gids] == [0, 1, 2, 3]
    assert nic.gids[3] == GidEntry(3, "00000000000000000000ffffc0a80107", "RoCE v2", "eth2")
    assert nic.gids[3].ipv4 == "192.168.1.7" and nic.gids[1].ipv4 == ""
    assert "link-local fe80::bace" in nic.gids[1].text
    assert RdmaFacts.from_json(facts.to_json()) == facts
    assert "0000:18:00.0" in nic.summary and "GID 3 (192.168.1.7)" in nic.summary


def test_entries_that_can_not_be_read_are_passed_over(tmp_path: Path) -> None:
    """J1: reading the type of an empty place gives EINVAL, in containers that of others too; the rest is used."""
    table = [(EMPTY, None, ""), (LOCAL, None, ""), ("nonsense", "RoCE v2", "eth0"), (IPV4, "RoCE v2", "eth0")]
    sysfs.add_nic(tmp_path / "sys", tmp_path / "dev", "mlx5_0", PATH, table)
    nic = SysfsProbe(tmp_path / "sys", tmp_path / "dev").facts().nics[0]
    assert [(entry.index, entry.type) for entry in nic.gids] == [(1, ""), (3, "RoCE v2")]
    assert choose_gid(nic) == (3, "")


def test_a_table_that_can_not_be_read_is_no_error_of_the_place(tmp_path: Path) -> None:
    """A host without verbs can still be planned for routes that need none: the two errors are apart."""
    root = tmp_path / "sys"
    sysfs.add_nic(root, tmp_path / "dev", "mlx5_0", PATH, numa=0)
    (root / "class/infiniband/mlx5_0/ports/1/gids").rmdir()
    nic = SysfsProbe(root, tmp_path / "dev").facts().nics[0]
    assert nic.pcie_error == "" and nic.pci_path == PATH and "GID table can't be read" in nic.gid_error
    assert "can't be read" in choose_gid(nic)[1]


def test_devices_without_a_node_are_shown_and_not_used(tmp_path: Path) -> None:
    """J7: sysfs lists mlx5_0 to mlx5_3, /dev has two."""
    root, dev = tmp_path / "sys", tmp_path / "dev"
    for number in range(4):
        path = f"pci0000:1{number}/0000:1{number}:01.0/0000:1{number}:02.0"
        sysfs.add_nic(root, dev, f"mlx5_{number}", path, USUAL, node=number % 2 == 0)
    nics = SysfsProbe(root, dev).facts().nics
    assert [nic.name for nic in nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]
    assert [bool(nic.problem) for nic in nics] == [False, True, False, True]
    assert "uverbs1 is missing" in nics[1].pcie_error
    for entry in (root / "class/infiniband_verbs").iterdir():
        (entry / "ibdev").unlink()
    assert "ib_uverbs" in SysfsProbe(root, dev).facts().nics[0].pcie_error


def test_a_port_that_is_down_or_of_another_kind(tmp_path: Path) -> None:
    root, dev = tmp_path / "sys", tmp_path / "dev"
    sysfs.add_nic(root, dev, "mlx5_0", PATH, USUAL, state="1: DOWN")
    sysfs.add_nic(root, dev, "mlx5_1", PATH.replace("18", "19"), USUAL, link_layer="InfiniBand")
    first, second = SysfsProbe(root, dev).facts().nics
    assert "DOWN" in first.problem and "InfiniBand" in second.problem


def test_places_that_sysfs_does_not_tell_are_unknown(tmp_path: Path) -> None:
    root, dev = tmp_path / "sys", tmp_path / "dev"
    sysfs.add_nic(root, dev, "mlx5_0", PATH, USUAL)
    (root / "class/infiniband/mlx5_0/device").unlink()
    nic = SysfsProbe(root, dev).facts().nics[0]
    assert (nic.pci_path, nic.numa_node, nic.pcie_error) == ("", None, "")
    (root / "devices/vmbus/0000:18:00.0").mkdir(parents=True)
    (root / "class/infiniband/mlx5_0/device").symlink_to(root / "devices/vmbus/0000:18:00.0")
    assert SysfsProbe(root, dev).facts().nics[0].pci_path == ""


def test_nothing_there_is_nothing_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """J7: no kernel support, no library, no pyverbs."""
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    assert probe_rdma(tmp_path, tmp_path) == RdmaFacts(source="sysfs")


def test_a_library_that_can_not_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """J7: with devices and without libibverbs the reason has its name and its package."""
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    sysfs.add_nic(tmp_path / "sys", tmp_path / "dev", "mlx5_0", PATH, USUAL)
    monkeypatch.setenv("COMM_VERBS_LIBRARY", str(tmp_path / "libnothing.so"))
    facts = probe_rdma(tmp_path / "sys", tmp_path / "dev")
    assert "libnothing.so" in facts.library_error and "apt install" in facts.library_error


def test_a_probe_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Any) -> Any:
        raise PermissionError("no")

    monkeypatch.setattr(SysfsProbe, "nics", broken)
    assert SysfsProbe().facts() == RdmaFacts(source="sysfs", error="PermissionError: no")


# pyverbs, as far as it can be asked without a device: its records, faked


class _Context:
    """What a `pyverbs.device.Context` has of it."""

    opened = 0

    def __init__(self, name: str) -> None:
        if name == "mlx5_1":
            raise RuntimeError("Failed to open mlx5_1. Errno: 13")
        _Context.opened += 1

    def query_port(self, number: int) -> Any:
        return types.SimpleNamespace(state=4, link_layer=2, gid_tbl_len=256)

    def query_gid_table(self, length: int) -> list[Any]:
        assert length == 256
        entries = [(0, LOCAL, 1), (3, IPV4, 2), (1, LOCAL, 2)]
        return [
            types.SimpleNamespace(gid_index=i, gid_str=lambda g=g: g, gid_type=t, ndev_ifindex=5, port_num=1)
            for i, g, t in entries
        ]

    def close(self) -> None:
        _Context.opened -= 1


@pytest.fixture
def faked_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("pyverbs.device")
    module.Context = _Context
    module.get_device_list = lambda: [types.SimpleNamespace(name=b"mlx5_1"), types.SimpleNamespace(name=b"mlx5_0")]
    monkeypatch.setitem(sys.modules, "pyverbs", types.ModuleType("pyverbs"))
    monkeypatch.setitem(sys.modules, "pyverbs.device", module)


def test_pyverbs_gives_the_record_that_sysfs_gives(faked_pyverbs: None, tmp_path: Path) -> None:
    root, dev = tmp_path / "sys", tmp_path / "dev"
    table = [USUAL[0], USUAL[1], (EMPTY, None, ""), USUAL[3]]
    sysfs.add_nic(root, dev, "mlx5_0", PATH, table, numa=1, ifindex=5)
    sysfs.add_nic(root, dev, "mlx5_1", PATH.replace("18", "19"), USUAL, node=False)
    found = PyverbsProbe(root, dev).facts()
    assert found.source == "pyverbs" and found.nics[0] == SysfsProbe(root, dev).facts().nics[0]
    assert "can't be opened" in found.nics[1].pcie_error and found.nics[1].pci_path.endswith("0000:19:00.0")
    assert _Context.opened == 0
    assert probe_rdma(root, dev).source == "pyverbs"


def test_devices_that_libibverbs_leaves_out_are_shown_with_the_reason(faked_pyverbs: None, tmp_path: Path) -> None:
    """J7: it does not list devices without nodes, nor those without a provider; sysfs does, and so do both probes."""
    root, dev = tmp_path / "sys", tmp_path / "dev"
    table = [USUAL[0], USUAL[1], (EMPTY, None, ""), USUAL[3]]
    for number in (0, 1, 2, 10):
        path = f"pci0000:1{number}/0000:1{number}:01.0/0000:1{number}:02.0"
        sysfs.add_nic(root, dev, f"mlx5_{number}", path, table, node=number not in (1, 2), ifindex=5)
    found = PyverbsProbe(root, dev).facts()
    by_sysfs = SysfsProbe(root, dev).facts()
    assert [nic.name for nic in found.nics] == ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_10"]
    assert (found.nics[0], found.nics[2]) == (by_sysfs.nics[0], by_sysfs.nics[2])
    assert "uverbs2 is missing" in found.nics[2].pcie_error
    assert "libibverbs does not list it" in found.nics[3].problem and not by_sysfs.nics[3].problem


def test_sysfs_is_asked_where_pyverbs_finds_nothing_to_ask(
    faked_pyverbs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyverbs that can be imported and fails (no kernel support) is no reason to know nothing."""

    def fails() -> Any:
        raise RuntimeError("Failed to get devices list")

    monkeypatch.setattr(sys.modules["pyverbs.device"], "get_device_list", fails)
    sysfs.add_nic(tmp_path / "sys", tmp_path / "dev", "mlx5_0", PATH, USUAL)
    facts = probe_rdma(tmp_path / "sys", tmp_path / "dev")
    assert facts.source == "sysfs" and len(facts.nics) == 1


# What the transport says


def test_the_transport_tells_nics_and_what_its_routes_were_verified_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, dev = tmp_path / "sys", tmp_path / "dev"
    sysfs.add_nic(root, dev, "mlx5_0", PATH, USUAL)
    found = SysfsProbe(root, dev).facts()
    monkeypatch.setattr(transport, "probe_rdma", lambda: found)
    gpu = fake.pcie_root_complex(2)
    gpu = [replace(r, device=replace(r.device, pcie_path="pci0000:16/0000:16:01.0")) for r in gpu]
    probed = [PcieTransport().probe(ProbeContext(r.rank, "cuda", 0, r)) for r in gpu]
    assert probed[0]["nic"] == {"nic_name": "mlx5_0", "gid_index": 3, "pcie_error": None, "gid_error": None}
    facts = [replace(r, plugins={"pcie": value}) for r, value in zip(gpu, probed, strict=True)]
    lines = PcieTransport().remarks(facts)
    assert "verified on an emulator only" in lines[0] and lines[1].startswith("mlx5_0: PCI 0000:18:00.0")
    assert len(lines) == 2 and PcieTransport().remarks(fake.cpu_host(2)) == lines[:1]
    without = [replace(r, plugins={"pcie": {"rdma": RdmaFacts().to_json()}}) for r in gpu]
    assert PcieTransport().remarks(without)[1:] == ["no RDMA device"]
    assert "ranks 1" in PcieTransport().remarks([facts[0], without[1]])[2]


def test_probing_the_real_machine_raises_nothing() -> None:
    facts = probe.probe_rdma()
    assert RdmaFacts.from_json(facts.to_json()) == facts
