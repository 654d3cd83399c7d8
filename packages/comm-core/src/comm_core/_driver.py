"""The one module that touches CUDA's driver API (cuda-bindings): typed, small, and replaceable in tests.

cuda-bindings is imported when it is first needed, and its functions find the driver when they are first called, so
that a machine without either can import this module and is told what is missing.

Calls that act on a device run with that device's primary context pushed and leave the calling thread as it was. The
runtime's way, to set a device and later set the one before it again, would make a context on the latter where there
was none: half a gigabyte on a GPU that belongs to another rank.
"""

# pyright: reportUnknownMemberType=false

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any, cast

from comm_core.errors import CommError, CudaCallError, UnsupportedError

__all__ = ["Device"]

_log = logging.getLogger("comm_core")


def _import_binding() -> Any:
    return importlib.import_module("cuda.bindings.driver")


source: Callable[[], Any] = _import_binding
"""Where this module gets the driver API from: the seam that `comm_core.testing.fake_driver` replaces."""


def _binding() -> Any:
    try:
        return source()
    except ImportError as error:
        raise UnsupportedError(
            f"CUDA's driver API needs the package cuda-bindings (pip install 'comm-core[cuda]'): {error}"
        ) from error


class Device:
    """One GPU through the driver API.

    Args:
        index: CUDA ordinal in this process, counted as the runtime and torch count it.

    Raises:
        UnsupportedError: there is no cuda-bindings, no driver, or the driver is too old for a call.

    Every method that calls CUDA raises `CudaCallError` with the call, the code and CUDA's own text. The device's
    primary context is retained by the first method that needs it, and given back by `close`.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._api = _binding()
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", index)
        self._context: Any = None

    def close(self) -> None:
        """Give the primary context back. The device may be used again; nothing of it may be mapped any more."""
        if self._context is not None:
            # The last one to give it back destroys it, with all memory in it: torch's, where torch has not used CUDA.
            self._call("cuDevicePrimaryCtxRelease", self._device)
            self._context = None

    @contextmanager
    def current(self) -> Generator[None, None, None]:
        """Make the device current for this thread inside a ``with`` block."""
        if self._context is None:
            self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def attribute(self, name: str) -> int:
        """Return a device attribute, ``CU_DEVICE_ATTRIBUTE_<name>``; 0 where the binding does not know it."""
        attribute = getattr(self._api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if attribute is None else int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def synchronize(self) -> None:
        """Wait for all work of the device's primary context; an error of earlier work is raised here."""
        with self.current():
            self._call("cuCtxSynchronize")

    def granularity(self, *, fabric: bool = False) -> int:
        """Return what sizes and addresses of exportable memory are best a multiple of, in bytes."""
        flag = self._api.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with self.current():
            return int(self._call("cuMemGetAllocationGranularity", self._properties(fabric), flag))

    def create(self, nbytes: int, *, fabric: bool = False) -> int:
        """Allocate physical memory that can be exported; return its handle.

        Network cards can reach it where the device supports that.

        Args:
            nbytes: a multiple of `granularity`.
            fabric: whether it is exported as a fabric handle, which other hosts can import, or as a file descriptor.
        """
        return self._make(self.release, "cuMemCreate", nbytes, self._properties(fabric), 0)

    def release(self, handle: int) -> None:
        """Give a handle up. The memory goes when its mappings and everybody's other handles are gone as well."""
        self._give_back("cuMemRelease", handle)

    def export_descriptor(self, handle: int) -> int:
        """Return a new file descriptor that stands for physical memory; the caller closes it."""
        return self._make(os.close, "cuMemExportToShareableHandle", handle, self._handle_type(False), 0)

    def import_descriptor(self, descriptor: int) -> int:
        """Return a handle of the physical memory behind a file descriptor; the descriptor may then be closed."""
        return self._make(self.release, "cuMemImportFromShareableHandle", descriptor, self._handle_type(False))

    def export_fabric(self, handle: int) -> bytes:
        """Return the 64 bytes that stand for physical memory in the whole NVLink fabric; nothing is to be closed."""
        with self.current():
            return bytes(self._call("cuMemExportToShareableHandle", handle, self._handle_type(True), 0).data)

    def import_fabric(self, data: bytes) -> int:
        """Return a handle of the physical memory, of any host of the fabric, that `export_fabric` stands for."""
        return self._make(self.release, "cuMemImportFromShareableHandle", data, self._handle_type(True))

    def reserve(self, nbytes: int, alignment: int) -> int:
        """Reserve addresses with nothing behind them; return the first."""
        return self._make(
            lambda address: self.free_reservation(address, nbytes), "cuMemAddressReserve", nbytes, alignment, 0, 0
        )

    def free_reservation(self, address: int, nbytes: int) -> None:
        """Give back what `reserve` returned, as a whole; nothing may be mapped in it."""
        self._give_back("cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        """Put physical memory behind reserved addresses. No device can use them until `allow_access`."""
        self._make(lambda _: self.unmap(address, nbytes), "cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        """Undo one `map`, as a whole; the addresses stay reserved."""
        self._give_back("cuMemUnmap", address, nbytes)

    def allow_access(self, address: int, nbytes: int) -> None:
        """Let this device read and write what is mapped; the memory may be another device's."""
        access = self._api.CUmemAccessDesc()
        access.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.index
        access.flags = self._api.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with self.current():
            self._call("cuMemSetAccess", address, nbytes, [access], 1)

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        """Return a DMA-BUF file descriptor of device memory; the caller closes it.

        Args:
            address: a multiple of the host's page size.
            nbytes: likewise; all of it allocated.
        """
        kind = self._api.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        return self._make(os.close, "cuMemGetHandleForAddressRange", address, nbytes, kind, 0)

    def synchronize_memory_operations(self, address: int) -> None:
        """Make synchronous copies of the whole allocation at `address` really synchronous, as other devices need it.

        Memory of `create` does not know the attribute.
        """
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        with self.current():
            self._call("cuPointerSetAttribute", True, attribute, address)

    def flush_remote_writes(self) -> None:
        """Wait until what network cards wrote into this device's memory is visible to the device."""
        target = self._api.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        scope = self._api.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        with self.current():
            self._call("cuFlushGPUDirectRDMAWrites", target, scope)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int, stream: int
    ) -> None:
        """Enqueue a copy of `rows` rows between two addresses that this device can reach, by a copy engine.

        Args:
            target: address of the first row.
            target_pitch: bytes from row to row.
            source: likewise.
            source_pitch: likewise.
            row_bytes: bytes of a row.
            rows: how many.
            stream: handle of a stream of this device.
        """
        unified = self._api.CUmemorytype.CU_MEMORYTYPE_UNIFIED
        copy = self._api.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = unified
        copy.srcDevice, copy.srcPitch = source, source_pitch
        copy.dstDevice, copy.dstPitch = target, target_pitch
        copy.WidthInBytes, copy.Height = row_bytes, rows
        with self.current():
            self._call("cuMemcpy2DAsync", copy, self._api.CUstream(stream))

    def multicast_granularity(self, devices: int, nbytes: int, *, fabric: bool) -> int:
        """Return what the memory that is bound to a multicast object must be a multiple of, in bytes."""
        flag = self._api.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM
        with self.current():
            properties = self._multicast_properties(devices, nbytes, fabric)
            return int(self._call("cuMulticastGetGranularity", properties, flag))

    def multicast_create(self, devices: int, nbytes: int, *, fabric: bool) -> int:
        """Make a multicast object for `nbytes` of each of `devices`; return its handle. A machine has few."""
        return self._make(self.release, "cuMulticastCreate", self._multicast_properties(devices, nbytes, fabric))

    def multicast_add(self, handle: int) -> None:
        """Add this device to a multicast object. Nothing may be bound to it before all its devices are there."""
        with self.current():
            self._call("cuMulticastAddDevice", handle, self._device)

    def multicast_bind(self, handle: int, memory: int, nbytes: int) -> None:
        """Let what is stored through a multicast object arrive in this device's physical memory `memory` as well."""
        self._make(
            lambda _: self.multicast_unbind(handle, nbytes), "cuMulticastBindMem", handle, 0, memory, 0, nbytes, 0
        )

    def multicast_unbind(self, handle: int, nbytes: int) -> None:
        """Undo `multicast_bind`."""
        self._give_back("cuMulticastUnbind", handle, self._device, 0, nbytes)

    def is_legacy_ipc_capable(self, pointer: int) -> bool:
        """Return whether the memory that `pointer` lies in can be exported by legacy CUDA IPC."""
        attribute = self._api.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        with self.current():
            return bool(self._call("cuPointerGetAttribute", attribute, pointer))

    def _properties(self, fabric: bool) -> Any:
        properties = self._api.CUmemAllocationProp()
        properties.type = self._api.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.requestedHandleTypes = self._handle_type(fabric)
        properties.location.type = self._api.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self.index
        if self.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"):
            properties.allocFlags.gpuDirectRDMACapable = 1
        return properties

    def _multicast_properties(self, devices: int, nbytes: int, fabric: bool) -> Any:
        properties = self._api.CUmulticastObjectProp()
        properties.numDevices = devices
        properties.size = nbytes
        properties.handleTypes = int(self._handle_type(fabric))
        return properties

    def _handle_type(self, fabric: bool) -> Any:
        kinds = self._api.CUmemAllocationHandleType
        return kinds.CU_MEM_HANDLE_TYPE_FABRIC if fabric else kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _make(self, give_back: Callable[[int], object], name: str, *arguments: object) -> int:
        """Return what a call of the driver makes, 0 where that has no name.

        Where the thread can't be left as it was afterwards, it is given back: who is told of an error has nothing.
        """
        made: list[int] = []
        try:
            with self.current():
                value = self._call(name, *arguments)
                made.append(0 if value is None else int(value))
        except BaseException:
            if made:
                with suppress(CommError):
                    give_back(made[0])
            raise
        return made[0]

    def _give_back(self, name: str, *arguments: object) -> None:
        """Call what gives something back.

        Once that is done, an error would only have it given back again: where the thread can't be left as it was
        afterwards, it is logged.
        """
        done = False
        try:
            with self.current():
                self._call(name, *arguments)
                done = True
        except CommError as error:
            if not done:
                raise
            _log.warning("GPU %d stays current for a thread after %s: %s", self.index, name, error)

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the driver; return its one value, or None where it has none."""
        try:
            code, *values = cast("tuple[Any, ...]", getattr(self._api, name)(*arguments))
        except Exception as error:
            # No driver, or a driver or binding without this function; how that is said differs between releases.
            raise UnsupportedError(f"the CUDA driver can't be called ({name}): {error}") from error
        if int(code) != 0:
            raise CudaCallError(name, int(code), self._text(code))
        return values[0] if values else None

    def _text(self, code: Any) -> str:
        try:
            _, text = cast("tuple[Any, bytes | None]", self._api.cuGetErrorString(code))
        except Exception:
            text = None
        return (text or b"unrecognized error code").decode("utf-8", "replace")
