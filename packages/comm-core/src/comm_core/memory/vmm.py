"""Memory by CUDA's virtual memory management, shared as POSIX file descriptors.

Addresses and the memory behind them are separate things here: each is reserved, created, mapped and given back by
itself. Physical memory lives as long as anybody has a handle or a mapping of it, so a peer's mapping would survive
the owner; it is taken down in the same order as every other form all the same.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comm_core._driver import Device
from comm_core._json import JsonObject
from comm_core.errors import CommError, UnsupportedError
from comm_core.memory.passing import Passing
from comm_core.memory.peer import PeerMemory, unmap_each
from comm_core.topology.facts import HostFacts

if TYPE_CHECKING:
    import torch

__all__ = ["VmmMemory"]

_NEEDED = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")


@dataclass
class _Segment:
    """A stretch of addresses and the memory behind it, each part there or not.

    Attributes:
        device: that uses it.
        nbytes: of both, a multiple of the granularity.
        handle: of the physical memory, or None.
        address: first reserved address, or 0.
        mapped: whether the memory is behind the addresses.
        lent: whether the addresses are part of a larger reservation, which is somebody else's to give back.
    """

    device: Device
    nbytes: int
    handle: int | None = None
    address: int = 0
    mapped: bool = False
    lent: bool = False

    def place(self, alignment: int) -> None:
        """Reserve addresses where there are none yet, put the memory behind them, and let the device use them."""
        if not self.address:
            self.address = self.device.reserve(self.nbytes, alignment)
        assert self.handle is not None
        self.device.map(self.address, self.nbytes, self.handle)
        self.mapped = True
        self.device.allow_access(self.address, self.nbytes)

    def vacate(self) -> None:
        """Take the memory away from behind the addresses, which stay reserved, and give up its handle."""
        if self.mapped:
            self.device.unmap(self.address, self.nbytes)
            self.mapped = False
        if self.handle is not None:
            self.device.release(self.handle)
            self.handle = None

    def release(self) -> None:
        """Give everything back."""
        self.vacate()
        if self.address and not self.lent:
            self.device.free_reservation(self.address, self.nbytes)
        self.address = 0


class VmmMemory(PeerMemory):
    """``cuMemCreate`` on this rank's device, imported by the peers from file descriptors."""

    name = "vmm_fd"
    detachable = True

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._device = Device(device.index)
        self._granule = 0
        self._segment: _Segment | None = None
        self._imported: dict[int, _Segment] = {}
        self._range: tuple[int, int] | None = None
        """Address and bytes of one reservation for the memory of all ranks."""
        self._stride = 0
        self._passing = Passing(rank)

    @property
    def handle(self) -> int:
        """Handle of this rank's physical memory; another one after each `attach`."""
        assert self._segment is not None and self._segment.handle is not None
        return self._segment.handle

    @classmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        """See `PeerMemory.probe`."""
        if device.type != "cuda":
            raise UnsupportedError(f"{device} is no CUDA device")
        own = Device(device.index)
        lacking = [name for name in _NEEDED if not own.attribute(name)]
        if lacking:
            raise UnsupportedError(f"{device} can't do it: CU_DEVICE_ATTRIBUTE_{' and '.join(lacking)} is 0")
        try:
            granule = own.granularity()
            if trial:
                _try_out(own, granule)
            return granule
        finally:
            own.close()

    def arrange(self, world_size: int, stride: int) -> None:
        """See `PeerMemory.arrange`."""
        nbytes = world_size * stride
        try:
            self._range = (self._device.reserve(nbytes, self._granularity()), nbytes)
        except BaseException:
            self.free()
            raise
        self._stride = stride

    def allocate(self, nbytes: int) -> None:
        """See `PeerMemory.allocate`."""
        try:
            self._granule = self._granularity()
            self._segment = self._stretch(self.rank, nbytes)
            self._segment.handle = self._create(nbytes)
            self._segment.place(self._granule)
        except BaseException:
            self.free()
            raise
        self.own, self.nbytes = self._segment.address, nbytes

    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """See `PeerMemory.export`."""
        return self._passing.offer(self._device.export_descriptor(self.handle), hosts)

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
            # One that is there already has the addresses that it had before its memory was taken away.
            segment = self._imported.setdefault(peer, self._stretch(peer, self.nbytes))
            try:
                segment.handle = self._import(peer, exports)
                segment.place(self._granule)
            except CommError as error:
                raise CommError(f"the memory of rank {peer} can't be mapped on {self.device}: {error}") from error
            addresses.append(segment.address)
        return tuple(addresses)

    def settle(self) -> None:
        """See `PeerMemory.settle`."""
        self._device.synchronize()

    def unmap(self) -> None:
        """See `PeerMemory.unmap`."""
        self._passing.close()
        unmap_each(self._imported, _Segment.release)

    def withdraw(self) -> None:
        """See `PeerMemory.withdraw`."""
        self._passing.withdraw()

    def free(self) -> None:
        """See `PeerMemory.free`."""
        self.withdraw()
        if self._segment is not None:
            self._segment.release()
            self._segment = None
        if self._range is not None:
            self._device.free_reservation(*self._range)
            self._range = None
        self.own = 0
        self._device.close()

    # Detached and attached again

    def detach_peers(self) -> None:
        """See `PeerMemory.detach_peers`."""
        for segment in self._imported.values():
            segment.vacate()

    def detach(self) -> None:
        """See `PeerMemory.detach`."""
        if self._segment is not None:
            self._segment.vacate()
        self.exported = False

    def attach(self) -> None:
        """See `PeerMemory.attach`."""
        assert self._segment is not None
        self._segment.handle = self._create(self.nbytes)
        self._segment.place(self._granule)

    # What forms by virtual memory differ in

    def _granularity(self) -> int:
        return self._device.granularity()

    def _create(self, nbytes: int) -> int:
        return self._device.create(nbytes)

    def _import(self, peer: int, exports: Sequence[JsonObject]) -> int:
        with self._passing.take(peer) as descriptor:
            return self._device.import_descriptor(descriptor)

    def _stretch(self, rank: int, nbytes: int) -> _Segment:
        """Return the place for a rank's memory: in the common range, or one that is still to be reserved."""
        if self._range is None:
            return _Segment(self._device, nbytes)
        return _Segment(self._device, nbytes, address=self._range[0] + rank * self._stride, lent=True)


def _try_out(device: Device, nbytes: int) -> None:
    """Create memory, export and import it; release everything."""
    handle = device.create(nbytes)
    try:
        descriptor = device.export_descriptor(handle)
        try:
            device.release(device.import_descriptor(descriptor))
        finally:
            os.close(descriptor)
    finally:
        device.release(handle)
