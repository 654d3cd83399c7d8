"""CUDA's driver API for machines without a GPU: the calls that `comm_core._driver` makes, on host memory.

"Device memory" is a memfd, and an exported descriptor is a real one, so that ranks which are processes really share
bytes, and really leak descriptors where they leak. Addresses are host addresses: ``ctypes`` can read and write them.

It is strict where the driver is silent or undefined. A call without a current context, a size that is no whole
number of granules, an unmap of a part, a reservation given back with something mapped in it, a handle released twice:
each is an error, and those that the real driver need not report are noted as violations as well. Memory that was
mapped and not made accessible can't be touched. What a `FakeFabric` and multicast objects stand for is shared by
ranks that are threads, each with a driver of its own.

In each rank of a test::

    with installed() as fake:
        fake.fail("cuMemMap", after=1)
        ...
        assert fake.alive() == {}
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comm_core import _driver
from comm_core.testing.fake_fabric import MEMORY_NAME, FakeFabric, MulticastCalls, memory_file

__all__ = ["GRANULE", "FakeDriver", "FakeFabric", "installed"]

GRANULE = 2 << 20
"""What sizes and addresses must be a multiple of; that of current GPUs."""


class _Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_INVALID_HANDLE = 400
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801
    CUDA_ERROR_SYSTEM_NOT_READY = 802


_OK = _Result.CUDA_SUCCESS
_INVALID = _Result.CUDA_ERROR_INVALID_VALUE


class _DeviceAttribute(IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128
    CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED = 132


class _PointerAttribute(IntEnum):
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10


class _AllocationType(IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class _HandleType(IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


class _LocationType(IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class _AccessFlags(IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class _Granularity(IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


def _location() -> SimpleNamespace:
    return SimpleNamespace(type=0, id=-1)


def _properties() -> SimpleNamespace:
    flags = SimpleNamespace(gpuDirectRDMACapable=0)
    return SimpleNamespace(type=0, requestedHandleTypes=0, location=_location(), allocFlags=flags)


@dataclass
class _Reservation:
    nbytes: int
    mappings: dict[int, int] = field(default_factory=dict[int, int])
    """First address -> bytes of what is mapped."""


@dataclass
class _Failure:
    after: int
    times: int
    code: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_PROT_NONE = 0
_MAP_FIXED = 0x10
_NOTHING = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_FAILED = ctypes.c_void_p(-1).value


def _place(address: int, nbytes: int, flags: int, descriptor: int = -1) -> int:
    placed = _libc.mmap(address or None, nbytes, _PROT_NONE, flags, descriptor, 0)
    if placed in (None, _FAILED):
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(placed)


class FakeDriver(MulticastCalls):
    """What ``cuda.bindings.driver`` is to `comm_core._driver`: the same names, the same results.

    Args:
        devices: how many there are.
        log: a file that every process appends its calls to, in order: process id and name, a line each.
        name: of the host or container, for `fabric`.
        fabric: the fabric that it has an IMEX channel of; without, fabric handles are not permitted, whatever the
            device's attribute says.

    Attributes:
        calls: name -> how often it was called.
        attributes: device attribute (without its prefix) -> value; change them to take a feature away.
        rdma_capable: for each allocation so far, whether it was asked for with that flag.
        violations: what was done wrong that a real driver would let pass.
    """

    CUresult = _Result
    CUdevice_attribute = _DeviceAttribute
    CUpointer_attribute = _PointerAttribute
    CUmemAllocationType = _AllocationType
    CUmemAllocationHandleType = _HandleType
    CUmemLocationType = _LocationType
    CUmemAccess_flags = _AccessFlags
    CUmemAllocationGranularity_flags = _Granularity
    CUmemAllocationProp = staticmethod(_properties)

    def __init__(
        self, *, devices: int = 8, log: Path | None = None, name: str = "", fabric: FakeFabric | None = None
    ) -> None:
        self.devices = devices
        self.name = name
        self.fabric = fabric
        self.attributes = {item.name[len("CU_DEVICE_ATTRIBUTE_") :]: 1 for item in _DeviceAttribute}
        self.calls: Counter[str] = Counter()
        self.rdma_capable: list[bool] = []
        self.violations: list[str] = []
        self._log = log
        self._handles: dict[int, int] = {}  # handle -> memfd
        self._kinds: dict[int, int] = {}  # handle -> as what it can be exported
        self._next = 1000
        self._reservations: dict[int, _Reservation] = {}
        self._contexts = dict.fromkeys(range(devices), 0)
        self._failures: dict[str, _Failure] = {}
        self._initialized = False
        self._thread = threading.local()
        self._lock = threading.RLock()

    # What tests ask and order.

    def fail(self, call: str, *, after: int = 0, times: int = 1, code: int = 2) -> None:
        """Let `call` succeed `after` times and then fail `times` times with `code`; 0 times undoes it."""
        self._failures[call] = _Failure(after, times, code)

    def alive(self) -> dict[str, int]:
        """Return how many of each thing exist in this process; what there is none of is absent."""
        counts = {
            "contexts": sum(self._contexts.values()),
            "handles": len(self._handles),
            "reservations": len(self._reservations),
            "mappings": sum(len(item.mappings) for item in self._reservations.values()),
        }
        return {name: count for name, count in counts.items() if count}

    def forget(self) -> None:
        """Give back everything that a test has left behind on purpose."""
        for first, item in self._reservations.items():
            _libc.munmap(first, item.nbytes)
        for descriptor in self._handles.values():
            os.close(descriptor)
        self._reservations.clear()
        self._handles.clear()
        self._kinds.clear()
        self._contexts = dict.fromkeys(self._contexts, 0)

    def descriptor(self, handle: int) -> int | None:
        """Return the descriptor behind a handle, or None where there is no such handle any more."""
        return self._handles.get(handle)

    @property
    def current(self) -> list[int]:
        """The contexts that are pushed on the calling thread, the current one last."""
        return vars(self._thread).setdefault("stack", [])

    # The driver.

    def CUmemAccessDesc(self) -> SimpleNamespace:
        """See CUDA."""
        return SimpleNamespace(location=_location(), flags=0)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        """See CUDA."""
        code = self._enter("cuInit", context=False)
        self._initialized = True
        return (code,)

    def cuGetErrorString(self, code: int) -> tuple[Any, ...]:
        """See CUDA."""
        name = _Result(code).name if code in set(_Result) else "unrecognized error code"
        return _OK, name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    def cuDeviceGet(self, ordinal: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuDeviceGet", context=False):
            return code, None
        return (_OK, ordinal) if ordinal in self._contexts else (_Result.CUDA_ERROR_INVALID_DEVICE, None)

    def cuDeviceGetAttribute(self, attribute: _DeviceAttribute, device: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuDeviceGetAttribute", context=False):
            return code, None
        return _OK, self.attributes[attribute.name[len("CU_DEVICE_ATTRIBUTE_") :]]

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuDevicePrimaryCtxRetain", context=False):
            return code, None
        with self._lock:
            self._contexts[device] += 1
        return _OK, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuDevicePrimaryCtxRelease", context=False):
            return (code,)
        with self._lock:
            if not self._contexts[device]:
                return (self._violation("a context was released that nobody has"),)
            self._contexts[device] -= 1
        return (_OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuCtxPushCurrent", context=False):
            return (code,)
        self.current.append(context)
        return (_OK,)

    def cuCtxPopCurrent(self) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuCtxPopCurrent"):
            return code, None
        return _OK, self.current.pop()

    def cuCtxSynchronize(self) -> tuple[Any, ...]:
        """See CUDA."""
        return (self._enter("cuCtxSynchronize"),)

    def cuMemGetAllocationGranularity(self, properties: Any, flag: int) -> tuple[Any, ...]:
        """See CUDA."""
        code = self._enter("cuMemGetAllocationGranularity")
        return (code, None) if code else (_OK, GRANULE)

    def cuMemCreate(self, nbytes: int, properties: Any, flags: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemCreate"):
            return code, None
        if nbytes < 1 or nbytes % GRANULE or properties.location.id not in self._contexts:
            return _INVALID, None
        if properties.location.id != self.current[-1]:
            return self._violation("memory of another device than the current one"), None
        kind = properties.requestedHandleTypes
        if kind == _HandleType.CU_MEM_HANDLE_TYPE_FABRIC and self.fabric is None:
            return _Result.CUDA_ERROR_NOT_PERMITTED, None
        with self._lock:
            self.rdma_capable.append(bool(properties.allocFlags.gpuDirectRDMACapable))
            return _OK, self._add_handle(memory_file(nbytes), kind)

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemRelease"):
            return (code,)
        with self._lock:
            if handle not in self._handles:
                return (self._violation(f"handle {handle} was released that does not exist"),)
            self._kinds.pop(handle)
            os.close(self._handles.pop(handle))
        return (_OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemExportToShareableHandle"):
            return code, None
        if handle not in self._handles or kind != self._kinds[handle]:
            return _INVALID, None
        if kind == _HandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            assert self.fabric is not None
            return _OK, SimpleNamespace(data=self.fabric.export(self, handle))
        return _OK, os.dup(self._handles[handle])

    def cuMemImportFromShareableHandle(self, what: int | bytes, kind: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemImportFromShareableHandle"):
            return code, None
        if kind == _HandleType.CU_MEM_HANDLE_TYPE_FABRIC:
            opened = self.fabric.open(self, what) if self.fabric is not None and isinstance(what, bytes) else None
            if opened is None:
                return _Result.CUDA_ERROR_NOT_PERMITTED, None
            with self._lock:
                return _OK, self._add_handle(opened, kind)
        try:
            is_memory = MEMORY_NAME in str(Path(f"/proc/self/fd/{what!r}").readlink())
        except OSError:
            is_memory = False
        if not is_memory or kind != _HandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR:
            return _INVALID, None
        with self._lock:
            return _OK, self._add_handle(os.dup(int(what)), kind)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemAddressReserve"):
            return code, None
        if nbytes < 1 or nbytes % GRANULE or alignment % GRANULE:
            return _INVALID, None
        alignment = max(alignment, GRANULE)
        wide = _place(0, nbytes + alignment, _NOTHING)
        first = -(-wide // alignment) * alignment
        # Only the aligned middle is kept.
        if first > wide:
            _libc.munmap(wide, first - wide)
        if wide + alignment > first:
            _libc.munmap(first + nbytes, wide + alignment - first)
        with self._lock:
            self._reservations[first] = _Reservation(nbytes)
        return _OK, first

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemAddressFree"):
            return (code,)
        with self._lock:
            reservation = self._reservations.get(address)
            if reservation is None or reservation.nbytes != nbytes:
                return (_INVALID,)
            if reservation.mappings:
                return (self._violation(f"the reservation {address:#x} was given back with something mapped in it"),)
            _libc.munmap(address, nbytes)
            del self._reservations[address]
        return (_OK,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemMap"):
            return (code,)
        with self._lock:
            reservation = self._reservation(address, nbytes)
            if reservation is None or handle not in self._handles or offset or nbytes % GRANULE:
                return (_INVALID,)
            taken = any(a < address + nbytes and address < a + n for a, n in reservation.mappings.items())
            if taken or os.fstat(self._handles[handle]).st_size != nbytes:
                return (_INVALID,)
            _place(address, nbytes, mmap.MAP_SHARED | _MAP_FIXED, self._handles[handle])
            reservation.mappings[address] = nbytes
        return (_OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemUnmap"):
            return (code,)
        with self._lock:
            reservation = self._reservation(address, nbytes)
            if reservation is None or reservation.mappings.get(address) != nbytes:
                return (_INVALID,)
            _place(address, nbytes, _NOTHING | _MAP_FIXED)
            del reservation.mappings[address]
        return (_OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMemSetAccess"):
            return (code,)
        with self._lock:
            reservation = self._reservation(address, nbytes)
            if reservation is None or address not in reservation.mappings or len(access) != count:
                return (_INVALID,)
            if [item.location.id for item in access] != [self.current[-1]]:
                return (self._violation("access for another device than the current one"),)
            if access[0].flags == _AccessFlags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE:
                _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        return (_OK,)

    def cuPointerGetAttribute(self, attribute: int, pointer: int) -> tuple[Any, ...]:
        """See CUDA; memory that is not mapped here counts as ``cudaMalloc``'s."""
        if code := self._enter("cuPointerGetAttribute"):
            return code, None
        with self._lock:
            return _OK, self._reservation(pointer, 1) is None

    def _enter(self, call: str, *, context: bool = True) -> int:
        """Note a call; return the code that it fails with, or 0."""
        if self._log is not None:
            with self._log.open("a") as log:
                log.write(f"{os.getpid()} {call}\n")
        with self._lock:
            self.calls[call] += 1
            failure = self._failures.get(call)
            if failure is not None and failure.times > 0:
                failure.after -= 1
                if failure.after < 0:
                    failure.times -= 1
                    return failure.code
        if not self._initialized and call != "cuInit":
            return _Result.CUDA_ERROR_NOT_INITIALIZED
        return _Result.CUDA_ERROR_INVALID_CONTEXT if context and not self.current else 0

    def _add_handle(self, descriptor: int, kind: int) -> int:
        self._next += 1
        self._handles[self._next] = descriptor
        self._kinds[self._next] = kind
        return self._next

    def _reservation(self, address: int, nbytes: int) -> _Reservation | None:
        for first, item in self._reservations.items():
            if first <= address and address + nbytes <= first + item.nbytes:
                return item
        return None


@contextmanager
def installed(fake: FakeDriver | None = None) -> Generator[FakeDriver, None, None]:
    """Make `comm_core._driver` use a fake inside the block, a new one unless it is given."""
    fake = FakeDriver() if fake is None else fake
    before = _driver.source
    _driver.source = lambda: fake
    try:
        yield fake
    finally:
        _driver.source = before
