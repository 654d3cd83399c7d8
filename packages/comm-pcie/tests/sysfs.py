"""Fixture trees of sysfs: a few devices with their bridges, as links and folders."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

__all__ = ["acs_config", "tree"]


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
