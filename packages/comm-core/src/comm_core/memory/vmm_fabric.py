"""Memory by CUDA's virtual memory management, shared as fabric handles: between the hosts of one NVLink fabric.

Whether a fabric handle can be used shows only in using it. A device says that it supports them where no fabric is
(virtual machines with passed-through GPUs), and a container without an IMEX channel is refused at the allocation or,
worse, only at the import of a peer's handle. So what is refused here names the channels, and whoever wants to know
makes and maps a little memory with all ranks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core._driver import Device
from comm_core._json import JsonObject
from comm_core.errors import CommError, CudaCallError, UnsupportedError
from comm_core.memory.vmm import VmmMemory
from comm_core.topology.facts import HostFacts

if TYPE_CHECKING:
    import torch

__all__ = ["VmmFabricMemory"]

_NEEDED = ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_FABRIC_SUPPORTED")
_HANDLE_BYTES = 64
_NOT_PERMITTED, _NOT_SUPPORTED = 800, 801


class VmmFabricMemory(VmmMemory):
    """``cuMemCreate`` on this rank's device, imported by the peers, on any host of the fabric, from 64 bytes."""

    name = "vmm_fabric"

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
            granule = own.granularity(fabric=True)
            if trial:
                _try_out(own, granule)
            return granule
        finally:
            own.close()

    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """See `PeerMemory.export`."""
        return {"fabric_handle": self._device.export_fabric(self.handle).hex()}

    def exchange(self, exports: Sequence[JsonObject], timeout_s: float) -> None:
        """See `PeerMemory.exchange`; handles travel as JSON."""

    def _granularity(self) -> int:
        return self._device.granularity(fabric=True)

    def _create(self, nbytes: int) -> int:
        try:
            return self._device.create(nbytes, fabric=True)
        except CudaCallError as error:
            raise _explained("memory for the NVLink fabric can't be allocated", error) from error

    def _import(self, peer: int, exports: Sequence[JsonObject]) -> int:
        try:
            data = bytes.fromhex(cast("str", exports[peer]["fabric_handle"]))
        except (KeyError, TypeError, ValueError):
            data = b""
        if len(data) != _HANDLE_BYTES:
            raise CommError(f"rank {peer} sent no fabric handle of {_HANDLE_BYTES} bytes; do the versions differ?")
        try:
            return self._device.import_fabric(data)
        except CudaCallError as error:
            raise _explained("its fabric handle can't be imported", error) from error


def _try_out(device: Device, nbytes: int) -> None:
    """Create memory and export it; release everything. To import one's own handle always works and proves nothing."""
    try:
        handle = device.create(nbytes, fabric=True)
    except CudaCallError as error:
        raise _explained("memory for the NVLink fabric can't be allocated", error) from error
    try:
        device.export_fabric(handle)
    finally:
        device.release(handle)


def _explained(what: str, error: CudaCallError) -> CommError:
    text = f"{what}: {error}"
    if error.code in (_NOT_PERMITTED, _NOT_SUPPORTED):
        text += (
            ". Does this process have an IMEX channel (/dev/nvidia-caps-imex-channels/channel*, the same number on "
            "all hosts; a container needs it passed in), and does nvidia-imex run on every host?"
        )
    return CommError(text)
