"""Memory of ranks that are threads of one process: plain addresses, with nothing to map."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _cuda
from comm_core._json import JsonObject
from comm_core.memory.peer import PeerMemory
from comm_core.topology.facts import HostFacts

if TYPE_CHECKING:
    import torch

__all__ = ["InProcessMemory"]

_GRANULE = 4096
"""A page: what device memory is aligned to at least, so that nothing works here that would not work there."""

_alive: dict[int, torch.Tensor] = {}
_lock = threading.Lock()


class InProcessMemory(PeerMemory):
    """A torch allocation on a CPU, or on the one GPU that all ranks use."""

    name = "in_process"

    @classmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        """See `PeerMemory.probe`; this form works on every device."""
        return _GRANULE

    def allocate(self, nbytes: int) -> None:
        """See `PeerMemory.allocate`."""
        import torch

        tensor = torch.empty(nbytes + _GRANULE, dtype=torch.uint8, device=self.device)
        address = -(-tensor.data_ptr() // _GRANULE) * _GRANULE
        # Not an attribute of this object: memory that is kept for a late peer must outlive whoever dropped it.
        with _lock:
            _alive[address] = tensor
        self.own, self.nbytes = address, nbytes

    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """See `PeerMemory.export`."""
        return {"address": self.own}

    def map(self, exports: Sequence[JsonObject]) -> tuple[int, ...]:
        """See `PeerMemory.map`."""
        return tuple(cast("int", export["address"]) for export in exports)

    def settle(self) -> None:
        """See `PeerMemory.settle`."""
        _cuda.synchronize(self.device)

    def unmap(self) -> None:
        """See `PeerMemory.unmap`; there is nothing to unmap."""

    def free(self) -> None:
        """See `PeerMemory.free`."""
        with _lock:
            _alive.pop(self.own, None)
        self.own = 0
