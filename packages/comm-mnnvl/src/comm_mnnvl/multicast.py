"""A multicast address over symmetric memory: what is stored there arrives in every rank's memory.

Never made unless somebody asked for it, and not where a switch of NCCL, torch or NVSHMEM turns multicast off on any
rank: on hosts that are shared, objects are few, and a bind that fails can leave a device in a state that only a reset
mends. Where it can't be had, everything goes on with the ranks' own addresses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_core.group import Group
    from comm_core.memory.peer import Mapped

__all__ = ["SWITCHES", "Multicast", "open_multicast", "switched_off"]

SWITCHES: Mapping[str, str] = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variable of another library -> the value that turns multicast off there, and here as well."""


def switched_off() -> str:
    """Return the switch of this process that turns multicast off, or an empty text."""
    for name, value in SWITCHES.items():
        if os.environ.get(name, "").strip() == value:
            return f"{name}={value}"
    return ""


class Multicast:
    """Placeholder of the next step."""

    address = 0

    def detach(self, group: Group) -> None:
        """Take it away."""

    def attach(self, group: Group) -> None:
        """Bring it back."""


def open_multicast(stages: Transaction, mapped: Mapped, device: torch.device) -> tuple[Multicast | None, str]:
    """Return a multicast address, or None and the reason why there is none. Collective."""
    return None, "not yet"
