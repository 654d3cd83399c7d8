"""Host memory that processes share as file descriptors: anonymous memory files, mapped by everybody.

It is no device memory. It is there for words that hosts tell each other without a device (whoever waits in a poll
must learn that the group has given up), and for ranks whose device is the CPU.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from comm_core._json import JsonObject
from comm_core.errors import CommError, UnsupportedError
from comm_core.memory.passing import Passing
from comm_core.memory.peer import PeerMemory, unmap_each
from comm_core.topology.facts import HostFacts

if TYPE_CHECKING:
    import torch

__all__ = ["HostFdMemory"]


class HostFdMemory(PeerMemory):
    """``memfd_create``, mapped by its owner and, from a descriptor, by the peers. Zero at the beginning."""

    name = "host_fd"

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._descriptor = -1
        self._own: mmap.mmap | None = None
        self._imported: dict[int, mmap.mmap] = {}
        self._passing = Passing(rank)

    @classmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        """See `PeerMemory.probe`."""
        if device.type != "cpu":
            raise UnsupportedError(f"{device} is no CPU: host_fd is memory of the host")
        return mmap.PAGESIZE

    def allocate(self, nbytes: int) -> None:
        """See `PeerMemory.allocate`."""
        try:
            self._descriptor = os.memfd_create(f"comm-rank{self.rank}", os.MFD_CLOEXEC)
            os.ftruncate(self._descriptor, nbytes)
            self._own = mmap.mmap(self._descriptor, nbytes)
        except (OSError, ValueError) as error:
            self.free()
            raise CommError(f"{nbytes} bytes of shared host memory can't be had: {error}") from error
        self.own, self.nbytes = _address(self._own), nbytes

    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """See `PeerMemory.export`."""
        descriptor, self._descriptor = self._descriptor, -1
        return self._passing.offer(descriptor, hosts)

    def exchange(self, exports: Sequence[JsonObject], timeout_s: float) -> None:
        """See `PeerMemory.exchange`."""
        self._passing.run(exports, timeout_s)

    def map(self, exports: Sequence[JsonObject]) -> tuple[int, ...]:
        """See `PeerMemory.map`."""
        addresses: list[int] = []
        for peer in range(len(exports)):
            if peer == self.rank:
                addresses.append(self.own)
                continue
            try:
                with self._passing.take(peer) as descriptor:
                    self._imported[peer] = mmap.mmap(descriptor, self.nbytes)
            except (OSError, ValueError) as error:
                raise CommError(f"the shared memory of rank {peer} can't be mapped: {error}") from error
            addresses.append(_address(self._imported[peer]))
        return tuple(addresses)

    def settle(self) -> None:
        """See `PeerMemory.settle`; the host does nothing behind its own back."""

    def unmap(self) -> None:
        """See `PeerMemory.unmap`."""
        self._passing.close()
        unmap_each(self._imported, mmap.mmap.close)

    def withdraw(self) -> None:
        """See `PeerMemory.withdraw`."""
        self._passing.withdraw()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def free(self) -> None:
        """See `PeerMemory.free`."""
        self.withdraw()
        if self._own is not None:
            self._own.close()
            self._own = None
        self.own = 0


def _address(mapping: mmap.mmap) -> int:
    # Nothing keeps the ctypes object: while it lived, the mapping could not be closed.
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
