"""Both probes of RDMA devices give one record: pyverbs of the emulator, sysfs of a tree made from the same NICs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pcie_sysfs as sysfs
import pytest
import rdma_emulator as emulator

from comm_pcie.rdma.facts import RdmaFacts
from comm_pcie.rdma.probe import SysfsProbe

DEBIAN = "/usr/lib/python3/dist-packages"
"""Where Debian's python3-pyverbs is; the interpreter of a virtual environment does not look there."""

CHILD = """
import json, sys
from pathlib import Path
try:
    import pyverbs.device
except ImportError:
    sys.path.append(sys.argv[2])
from comm_pcie.rdma.probe import PyverbsProbe
try:
    print(json.dumps(PyverbsProbe(Path(sys.argv[1]), Path(sys.argv[1]).with_name("dev")).facts().to_json()))
except ImportError as error:
    sys.exit(f"no pyverbs: {error}")
"""

TYPES = {0: "IB/RoCE v1", 1: "IB/RoCE v1", 2: "RoCE v2"}
LAYERS = {emulator.ETHERNET: "Ethernet", emulator.INFINIBAND: "InfiniBand"}
STATES = {emulator.ACTIVE: "4: ACTIVE", emulator.DOWN: "1: DOWN"}


def machines() -> dict[str, list[Any]]:
    """NICs of several machines."""
    Nic, Entry = emulator.Nic, emulator.Entry
    local, ipv6, ipv4 = "fe80::bace:f6ff:fe00:1", "2001:db8::7", "192.168.1.7"
    return {
        "usual": [Nic("mlx5_0", (Entry(0, local, 1), Entry(1, local), Entry(2, ipv4, 1), Entry(3, ipv4)), numa=1)],
        "late and apart": [Nic("mlx5_0", (Entry(4, ipv4, 2, 7), Entry(9, "10.0.0.1"))), Nic("mlx5_11", (ipv4,))],
        "no address": [Nic("mlx5_0", (Entry(1, local),)), Nic("mlx5_1", (Entry(3, ipv6),)), Nic("mlx5_2", ())],
        "down": [Nic("mlx5_0", (ipv4,), state=emulator.DOWN)],
        "InfiniBand": [Nic("mlx5_1", (ipv4,), link_layer=emulator.INFINIBAND)],
    }  # fmt: skip


def tree(nics: list[Any], root: Path, dev: Path) -> None:
    """The sysfs of a machine with these NICs."""
    for number, nic in enumerate(nics):
        table: list[tuple[str, str | None, str]] = [("::", None, "")] * 16
        for entry in nic.entries:
            table[entry.index] = (entry.address, TYPES[entry.type], f"eth{entry.ifindex}")
            if ":" not in entry.address:
                table[entry.index] = (sysfs.ipv4_gid(entry.address), TYPES[entry.type], f"eth{entry.ifindex}")
        sysfs.add_nic(
            root,
            dev,
            nic.name,
            f"pci0000:1{number}/0000:1{number}:01.0/0000:1{number}:02.0",
            table,
            numa=nic.numa,
            state=STATES[nic.state],
            link_layer=LAYERS[nic.link_layer],
        )
        for entry in nic.entries:
            place = root / f"class/net/eth{entry.ifindex}"
            place.mkdir(parents=True, exist_ok=True)
            (place / "ifindex").write_text(f"{entry.ifindex}\n")


@pytest.mark.parametrize("name", machines())
def test_pyverbs_and_sysfs_agree_on_the_emulator(name: str, library: Path, tmp_path: Path) -> None:
    """Names, states, link layers, every entry of every table, network devices, NUMA nodes and PCI paths."""
    nics = machines()[name]
    tree(nics, tmp_path / "sys", tmp_path / "dev")
    with emulator.World(library, tmp_path / "fabric", nics) as world:
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path / "sys"), DEBIAN],
            env={**os.environ, **world.environment, "LD_PRELOAD": str(library)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    if "no pyverbs" in child.stderr:
        pytest.skip(child.stderr.strip())
    assert child.returncode == 0, child.stderr
    by_pyverbs = RdmaFacts.from_json(json.loads(child.stdout))
    by_sysfs = SysfsProbe(tmp_path / "sys", tmp_path / "dev").facts()
    assert by_pyverbs.source == "pyverbs" and len(by_sysfs.nics) == len(nics)
    assert by_pyverbs == replace(by_sysfs, source="pyverbs")
