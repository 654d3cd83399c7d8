"""Memory by ``cudaMalloc``, shared as legacy CUDA IPC handles.

CUDA's legacy IPC has rules that it does not check, and this module keeps them:

- A handle stands for a whole allocation. So an address travels as (handle, offset), and allocations are whole 2 MiB
  granules: the driver packs smaller ones together, and peers would be given their neighbours as well.
- Memory must come from ``cudaMalloc``. What torch allocates may not (expandable segments, memory pools), so memory
  for sharing is allocated here, and other memory is exported only after the driver was asked about it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

from comm_core import _cuda
from comm_core._driver import Device
from comm_core._json import JsonObject
from comm_core.errors import ArgumentValueError, CommError, UnsupportedError
from comm_core.memory.cudart import CudaRTLibrary
from comm_core.memory.peer import PeerMemory, unmap_each
from comm_core.topology.facts import HostFacts

if TYPE_CHECKING:
    import torch

__all__ = ["CudaIpcMemory", "ImportedPointer", "export_pointer", "import_pointer"]

_GRANULE = 2 << 20
"""What the driver suballocates from; an allocation of whole granules has no neighbour in its own."""


class CudaIpcMemory(PeerMemory):
    """``cudaMalloc`` on this rank's device, opened by the peers."""

    name = "cuda_ipc"

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(device, rank)
        self._cuda = CudaRTLibrary()
        self._mapped: dict[int, int] = {}

    @classmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        """See `PeerMemory.probe`."""
        if device.type != "cuda":
            raise UnsupportedError(f"{device} is no CUDA device")
        CudaRTLibrary()
        return _GRANULE

    def allocate(self, nbytes: int) -> None:
        """See `PeerMemory.allocate`."""
        with _current(self._cuda, self.device):
            self.own = self._cuda.cudaMalloc(nbytes).value or 0
        self.nbytes = nbytes

    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """See `PeerMemory.export`."""
        with _current(self._cuda, self.device):
            return _export(self._cuda, self.own)

    def map(self, exports: Sequence[JsonObject]) -> tuple[int, ...]:
        """See `PeerMemory.map`."""
        addresses: list[int] = []
        with _current(self._cuda, self.device):
            for peer, export in enumerate(exports):
                if peer == self.rank:
                    addresses.append(self.own)
                    continue
                try:
                    base, offset = _open(self._cuda, export)
                except CommError as error:
                    raise CommError(f"the memory of rank {peer} can't be mapped on {self.device}: {error}") from error
                self._mapped[peer] = base
                addresses.append(base + offset)
        return tuple(addresses)

    def settle(self) -> None:
        """See `PeerMemory.settle`."""
        with _current(self._cuda, self.device):
            self._cuda.cudaDeviceSynchronize()

    def unmap(self) -> None:
        """See `PeerMemory.unmap`."""
        if self._mapped:
            with _current(self._cuda, self.device):
                unmap_each(self._mapped, self._cuda.cudaIpcCloseMemHandle)

    def free(self) -> None:
        """See `PeerMemory.free`."""
        if self.own:
            with _current(self._cuda, self.device):
                self._cuda.cudaFree(self.own)
            self.own = 0


def export_pointer(pointer: int, nbytes: int, device: torch.device) -> JsonObject:
    """Return what another process needs to map existing device memory: a handle and where in it the memory lies.

    The memory must stay allocated until every importer has closed it; CUDA does not check that. Importers see the
    whole allocation, with everything else that is in it.

    Args:
        pointer: an address anywhere in an allocation of ``cudaMalloc``, for example a tensor's.
        nbytes: bytes from there on; they must lie in the same allocation.
        device: that the memory belongs to.

    Raises:
        ArgumentValueError: the bytes go beyond the allocation.
        UnsupportedError: memory of this kind can't be exported, or there is no CUDA.
        CudaCallError: CUDA refuses.
    """
    cuda = CudaRTLibrary()
    if _exportable(pointer, device) is False:
        raise UnsupportedError(
            f"the memory at {pointer:#x} on {device} can't be exported by CUDA IPC, because it does not come from "
            "cudaMalloc (torch's expandable_segments:True, a memory pool, cuMemCreate). Copy through memory that was "
            "allocated for sharing, or allocate with PYTORCH_ALLOC_CONF=expandable_segments:False"
        )
    with _current(cuda, device):
        base, size = cuda.memory_range(pointer)
        if not base <= pointer <= pointer + nbytes <= base + size or nbytes < 1:
            raise ArgumentValueError(
                f"{nbytes} bytes at {pointer:#x} are not inside of the allocation, {size} bytes at {base:#x}"
            )
        return {**_export(cuda, pointer), "nbytes": nbytes}


class ImportedPointer:
    """Device memory of another process, mapped into this one until `close`.

    Attributes:
        address: of the memory, in this process.
        nbytes: its size.
        device: that it was mapped for.
    """

    def __init__(self, base: int, address: int, nbytes: int, device: torch.device) -> None:
        self.address = address
        self.nbytes = nbytes
        self.device = device
        self._base = base

    def close(self) -> None:
        """Unmap it. May be called again, also after it failed."""
        if self._base:
            cuda = CudaRTLibrary()
            with _current(cuda, self.device):
                cuda.cudaIpcCloseMemHandle(self._base)
            self._base = 0


def import_pointer(export: JsonObject, device: torch.device) -> ImportedPointer:
    """Map what `export_pointer` exported in another process of this host, for use on `device`.

    CUDA maps an allocation once a process and counts: two exports from one allocation lie at their true distance.

    Raises:
        ArgumentValueError: `export` is no such export.
        CudaCallError: CUDA refuses.
    """
    cuda = CudaRTLibrary()
    with _current(cuda, device):
        base, offset = _open(cuda, export)
    return ImportedPointer(base, base + offset, cast("int", export["nbytes"]), device)


def _export(cuda: CudaRTLibrary, pointer: int) -> dict[str, str | int]:
    try:
        base, _ = cuda.memory_range(pointer)
    except UnsupportedError:
        base = pointer  # A runtime too old to be asked; what cudaMalloc returned is a base.
    return {"handle": bytes(cuda.cudaIpcGetMemHandle(base)).hex(), "offset": pointer - base}


def _open(cuda: CudaRTLibrary, export: JsonObject) -> tuple[int, int]:
    """Return the base of the mapped allocation and the offset of the memory in it."""
    try:
        handle, offset = bytes.fromhex(str(export["handle"])), cast("int", export["offset"])
    except (KeyError, ValueError) as error:
        raise ArgumentValueError(f"{dict(export)!r} is no export of device memory: {error}") from error
    return cuda.cudaIpcOpenMemHandle(handle).value or 0, offset


def _exportable(pointer: int, device: torch.device) -> bool | None:
    """Return whether legacy IPC can export the memory, None where the driver can't be asked (no cuda-bindings)."""
    try:
        own = Device(device.index)
    except UnsupportedError:
        return None
    try:
        return own.is_legacy_ipc_capable(pointer)
    finally:
        own.close()


@contextmanager
def _current(cuda: CudaRTLibrary, device: torch.device) -> Generator[None, None, None]:
    """Make `device` current inside the block, and what was current before it again afterwards."""
    # Where torch uses CUDA its own guard is better: setting the device before again makes a context on that one.
    guard = _cuda.device_guard(device) if _cuda.is_initialized() else cuda.device(device.index)
    with guard:
        yield
