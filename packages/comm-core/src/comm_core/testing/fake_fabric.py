"""What several fake drivers share: an NVLink fabric between "hosts", and multicast objects.

Ranks are threads of one process here, each with a `comm_core.testing.fake_driver.FakeDriver` of its own.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace
from typing import Any, Protocol

__all__ = ["MEMORY_NAME", "FakeFabric", "MulticastCalls", "memory_file"]

MEMORY_NAME = "comm-fake-vmm"
"""Name of the files that stand for device memory."""

_OK, _INVALID, _ILLEGAL_STATE = 0, 1, 401
_GRANULE = 2 << 20
_LEFT = b"\xa5" * (64 << 10)
_TAIL = 4 << 10


def memory_file(nbytes: int) -> int:
    """Return a descriptor of new memory, at whose beginning and end is what somebody has left there."""
    descriptor = os.memfd_create(MEMORY_NAME)
    os.ftruncate(descriptor, nbytes)
    # A driver promises nothing about new memory, and whoever counts on zeros must find that out. Writing all of it
    # would make every test with many allocations slow.
    os.pwrite(descriptor, _LEFT[:nbytes], 0)
    tail = min(nbytes, _TAIL)
    os.pwrite(descriptor, _LEFT[:tail], nbytes - tail)
    return descriptor


class Exporter(Protocol):
    """A driver that has exported something."""

    name: str

    def descriptor(self, handle: int) -> int | None:
        """Return the descriptor behind a handle, or None where there is no such handle any more."""
        ...


class FakeFabric:
    """An NVLink fabric, which the fakes of several "hosts" share; their ranks are threads of one process.

    Attributes:
        unreachable: pairs (exporter, importer) of driver names between which imports are refused.
    """

    def __init__(self) -> None:
        self.unreachable: set[tuple[str, str]] = set()
        self._exported: dict[bytes, tuple[Exporter, int]] = {}

    def export(self, driver: Exporter, handle: int) -> bytes:
        """Return the 64 bytes for a handle."""
        # Begins with a zero byte: who takes it for text sees nothing.
        data = b"\0" + os.urandom(63)
        self._exported[data] = (driver, handle)
        return data

    def open(self, driver: Exporter, data: bytes) -> int | None:
        """Return a new descriptor of what was exported, or None where `driver` may not have it."""
        found = self._exported.get(data)
        if found is None or (found[0].name, driver.name) in self.unreachable:
            return None
        descriptor = found[0].descriptor(found[1])
        return None if descriptor is None else os.dup(descriptor)


class _MulticastGranularity(IntEnum):
    CU_MULTICAST_GRANULARITY_MINIMUM = 0
    CU_MULTICAST_GRANULARITY_RECOMMENDED = 1


def _multicast_properties() -> SimpleNamespace:
    return SimpleNamespace(numDevices=0, size=0, handleTypes=0, flags=0)


@dataclass
class _Multicast:
    """A multicast object: what was added to it, and what is bound."""

    devices: int
    nbytes: int
    added: list[str] = field(default_factory=list[str])
    bound: list[str] = field(default_factory=list[str])


_multicasts: dict[int, _Multicast] = {}
"""By the inode of the memory that stands for an object; shared by all fakes of a process, as ranks are threads."""


class MulticastCalls:
    """The driver's calls for multicast objects."""

    CUmulticastGranularity_flags = _MulticastGranularity
    CUmulticastObjectProp = staticmethod(_multicast_properties)
    name: str
    violations: list[str]
    _handles: dict[int, int]
    _lock: threading.RLock

    @property
    def current(self) -> list[int]:
        """The contexts that are pushed on the calling thread."""
        raise NotImplementedError

    def _enter(self, call: str, *, context: bool = True) -> int:
        raise NotImplementedError

    def _add_handle(self, descriptor: int, kind: int) -> int:
        raise NotImplementedError

    def _violation(self, what: str) -> int:
        self.violations.append(what)
        return _INVALID

    def cuMulticastGetGranularity(self, properties: Any, flag: int) -> tuple[Any, ...]:
        """See CUDA."""
        code = self._enter("cuMulticastGetGranularity")
        return (code, None) if code else (_OK, _GRANULE)

    def cuMulticastCreate(self, properties: Any) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMulticastCreate"):
            return code, None
        if properties.numDevices < 1 or properties.size < 1 or properties.size % _GRANULE:
            return _INVALID, None
        with self._lock:
            descriptor = memory_file(properties.size)
            _multicasts[os.fstat(descriptor).st_ino] = _Multicast(properties.numDevices, properties.size)
            return _OK, self._add_handle(descriptor, properties.handleTypes)

    def cuMulticastAddDevice(self, handle: int, device: int) -> tuple[Any, ...]:
        """See CUDA: a device can't be added twice."""
        if code := self._enter("cuMulticastAddDevice"):
            return (code,)
        found, who = self._multicast(handle), f"{self.name}/{device}"
        if found is None or who in found.added or len(found.added) >= found.devices:
            return (_INVALID,)
        found.added.append(who)
        return (_OK,)

    def cuMulticastBindMem(
        self, handle: int, offset: int, memory: int, memory_offset: int, nbytes: int, flags: int
    ) -> tuple[Any, ...]:
        """See CUDA: all devices must have been added."""
        if code := self._enter("cuMulticastBindMem"):
            return (code,)
        found = self._multicast(handle)
        if found is None or memory not in self._handles or offset + nbytes > found.nbytes:
            return (_INVALID,)
        if len(found.added) != found.devices:
            return (_ILLEGAL_STATE,)
        found.bound.append(f"{self.name}/{self.current[-1]}")
        return (_OK,)

    def cuMulticastUnbind(self, handle: int, device: int, offset: int, nbytes: int) -> tuple[Any, ...]:
        """See CUDA."""
        if code := self._enter("cuMulticastUnbind"):
            return (code,)
        found, who = self._multicast(handle), f"{self.name}/{device}"
        if found is None or who not in found.bound:
            return (self._violation(f"{who} was unbound that is not bound"),)
        found.bound.remove(who)
        return (_OK,)

    def _multicast(self, handle: int) -> _Multicast | None:
        descriptor = self._handles.get(handle)
        return None if descriptor is None else _multicasts.get(os.fstat(descriptor).st_ino)
