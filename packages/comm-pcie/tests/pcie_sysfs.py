"""Fixture trees of sysfs: a few devices with their bridges, as links and folders."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["acs_config", "add_nic", "ipv4_gid", "tree"]


def tree(folder: Path, devices: Mapping[str, str], numa: Mapping[str, int] | None = None) -> Path:
    """Return a sysfs in `folder`: PCI address -> bridges above it, with slashes (``"pci0000:00/0000:00:01.0"``)."""
    links = folder / "bus" / "pci" / "devices"
    links.mkdir(parents=True, exist_ok=True)
    for address, path in devices.items():
        parts = [*path.split("/"), address]
        place = folder / "devices"
        for part in parts:
            place = place / part
            place.mkdir(parents=True, exist_ok=True)
            link = links / part
            if not part.startswith("pci") and not link.is_symlink():
                link.symlink_to(place)
        (place / "numa_node").write_text(f"{(numa or {}).get(address, -1)}\n")
    return folder


def acs_config(control: int) -> bytes:
    """Return a configuration space whose second extended capability is ACS with that control register."""
    space = bytearray(4096)
    space[0x100:0x104] = struct.pack("<I", 0x0001 | 1 << 16 | 0x148 << 20)  # advanced error reporting, then
    space[0x148:0x14C] = struct.pack("<I", 0x000D | 1 << 16)
    space[0x148 + 4 : 0x148 + 8] = struct.pack("<HH", 0x001F, control)
    return bytes(space)


def ipv4_gid(address: str) -> str:
    """Return the GID of an IPv4 address, as sysfs spells it."""
    a, b, c, d = map(int, address.split("."))
    return f"0000:0000:0000:0000:0000:ffff:{a:02x}{b:02x}:{c:02x}{d:02x}"


def add_nic(
    sysfs: Path,
    dev: Path,
    name: str,
    path: str,
    gids: Sequence[tuple[str, str | None, str]] = (),
    *,
    numa: int = -1,
    state: str = "4: ACTIVE",
    link_layer: str = "Ethernet",
    ifindex: int = 0,
    node: bool = True,
) -> None:
    """Add an RDMA device to a sysfs.

    Args:
        sysfs: root of it.
        dev: root of the device nodes.
        name: of the device (``"mlx5_0"``).
        path: PCI addresses from the root to the device, with slashes.
        gids: for each index the GID as sysfs spells it, its type (None: reading it fails, as EINVAL does) and its
            network device.
        numa: NUMA node.
        state: of the port.
        link_layer: of the port.
        ifindex: number of the network device, where it has one.
        node: whether there is a device node.
    """
    bridges, _, address = path.rpartition("/")
    tree(sysfs, {address: bridges}, {address: numa})
    place = sysfs / "class/infiniband" / name
    port = place / "ports/1"
    (port / "gids").mkdir(parents=True)
    (place / "device").symlink_to(sysfs / "bus/pci/devices" / address)
    (port / "state").write_text(f"{state}\n")
    (port / "link_layer").write_text(f"{link_layer}\n")
    for kind in ("types", "ndevs"):
        (port / "gid_attrs" / kind).mkdir(parents=True)
    for index, (gid, type_, netdev) in enumerate(gids):
        (port / f"gids/{index}").write_text(f"{gid}\n")
        if type_ is None:
            # A file that can't be read, whoever reads it.
            (port / f"gid_attrs/types/{index}").mkdir()
        else:
            (port / f"gid_attrs/types/{index}").write_text(f"{type_}\n")
            (port / f"gid_attrs/ndevs/{index}").write_text(f"{netdev}\n")
        if netdev and ifindex:
            (sysfs / "class/net" / netdev).mkdir(parents=True, exist_ok=True)
            (sysfs / "class/net" / netdev / "ifindex").write_text(f"{ifindex}\n")
    verbs = sysfs / "class/infiniband_verbs"
    uverbs = f"uverbs{len(list(verbs.glob('*')))}"
    (verbs / uverbs).mkdir(parents=True)
    (verbs / uverbs / "ibdev").write_text(f"{name}\n")
    if node:
        (dev / "infiniband").mkdir(parents=True, exist_ok=True)
        (dev / "infiniband" / uverbs).write_text("")
