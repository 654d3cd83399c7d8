"""A faked machine, and what NVML (as nvidia-ml-py shows it) and torch.cuda say about it.

`FakeMachine` describes the GPUs once. `FakeNvml` looks like the module ``pynvml`` over it and `FakeTorch` like the
parts of ``torch`` that comm-core uses, each with its own numbering of the GPUs and with faults on demand::

    machine = FakeMachine.mesh(4)
    nvml = FakeNvml(machine)
    nvml.fail("nvmlDeviceGetP2PStatus", NOT_SUPPORTED)
    with installed(nvml, FakeTorch(machine, visible="3,1")):
        facts = probe_rank(0, torch.device("cuda", 0))
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

from comm_core import _cuda, _nvml
from comm_core.testing.topologies import gpu_uuid

__all__ = [
    "FakeFabric",
    "FakeGpu",
    "FakeMachine",
    "FakeNvml",
    "FakeTorch",
    "NVMLError",
    "installed",
]

UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
ARGUMENT_VERSION_MISMATCH = 25
UNKNOWN = 999

_TEXTS = {
    UNINITIALIZED: "Uninitialized",
    INVALID_ARGUMENT: "Invalid Argument",
    NOT_SUPPORTED: "Not Supported",
    NO_PERMISSION: "Insufficient Permissions",
    NOT_FOUND: "Not Found",
    DRIVER_NOT_LOADED: "Driver Not Loaded",
    LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    FUNCTION_NOT_FOUND: "Function Not Found",
    GPU_IS_LOST: "GPU is lost",
    ARGUMENT_VERSION_MISMATCH: "Argument version mismatch",
    UNKNOWN: "Unknown Error",
}
_CAPABILITIES = ("read", "write", "nvlink", "atomics")
_ANCESTORS = {"internal": 0, "single": 10, "multiple": 20, "hostbridge": 30, "node": 40, "system": 50}


def _always(i: int, j: int) -> bool:
    return True


def _never(i: int, j: int) -> bool:
    return False


def _node(i: int, j: int) -> str:
    return "node"


class NVMLError(Exception):
    """An NVML error as the binding raises it: `value` is the code."""

    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(_TEXTS.get(value, f"NVML Error with code {value}"))


@dataclass(frozen=True)
class FakeFabric:
    """What the driver writes into the fabric structure: `state` 3 is completed, `status` 0 is success.

    `cliques` are the (type, id) entries of a driver that has them; without, the one of plain pointers is `clique_id`.
    """

    state: int = 3
    status: int = 0
    cluster_uuid: bytes = bytes(16)
    clique_id: int = 0
    cliques: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True)
class FakeGpu:
    """One GPU. `fabric` None and `mig` None answer "not supported", as old or small GPUs do.

    `slices` are UUIDs of MIG slices; they need `mig` to be true.
    """

    uuid: str
    pci_bus_id: str = "00000000:01:00.0"
    name: str = "Fake GPU"
    capability: tuple[int, int] = (9, 0)
    memory_bytes: int = 80 << 30
    links: int = 18
    fabric: FakeFabric | None = None
    mig: bool | None = False
    slices: tuple[str, ...] = ()


@dataclass
class FakeMachine:
    """GPUs and what connects them. All pairs are ordered and by position in `gpus`.

    Attributes:
        gpus: the GPUs; NVML and CUDA may number them otherwise.
        nvlink: whether the first has NVLink to the second.
        access: whether the first can access the second's memory.
        ancestor: their common ancestor.
        nvml_order: positions in NVML's order (all in order without it).
        cuda_order: positions in CUDA's order before any mask (all in order without it).
    """

    gpus: list[FakeGpu]
    nvlink: Callable[[int, int], bool] = _never
    access: Callable[[int, int], bool] = _always
    ancestor: Callable[[int, int], str] = _node
    nvml_order: Sequence[int] | None = None
    cuda_order: Sequence[int] | None = None
    driver: str = "580.0"
    cuda_driver: int = 13000

    @classmethod
    def of(cls, size: int) -> FakeMachine:
        """Return a machine of `size` equal GPUs with the UUIDs of `comm_core.testing.topologies.gpu_uuid`."""
        return cls([FakeGpu(gpu_uuid(i), f"00000000:{0x10 + i:02X}:00.0") for i in range(size)])

    @classmethod
    def mesh(cls, size: int) -> FakeMachine:
        """Return a machine with NVLink between all GPUs."""
        return replace(cls.of(size), nvlink=_always)

    @classmethod
    def islands(cls, size: int, island: int) -> FakeMachine:
        """Return a machine with NVLink inside islands of `island` GPUs and the CPU interconnect between them."""

        def together(i: int, j: int) -> bool:
            return i // island == j // island

        def ancestor(i: int, j: int) -> str:
            return "node" if together(i, j) else "system"

        return replace(cls.of(size), nvlink=together, ancestor=ancestor)

    def change(self, position: int, **changes: Any) -> None:
        """Replace fields of one GPU."""
        self.gpus[position] = replace(self.gpus[position], **changes)


@dataclass(frozen=True)
class _Handle:
    """An NVML handle; it is good for the initialization that it was obtained in."""

    position: int
    uuid: str
    era: int


class _FabricInfo36(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )

    def __init__(self) -> None:
        super().__init__(version=0x02000024)


class _FabricInfo100(ctypes.Structure):
    """The same with the UUID as 80 characters, as nvidia-ml-py 12.560 declares it; the version tag still says 36."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_char * 80),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint),
        ("healthMask", ctypes.c_uint32),
    )

    def __init__(self) -> None:
        super().__init__(version=0x02000024)


@dataclass
class _Fault:
    error: Exception
    when: Callable[..., bool]


@dataclass
class FakeNvml:
    """Looks like the module ``pynvml``.

    Attributes:
        machine: what it tells about.
        fabric_bytes: 36 or 100, the size that this generation of the binding declares for the fabric structure.
        fabric_versions: generations of the fabric structure that the driver knows, of 2, 3 and 4.
        max_links: ``NVML_NVLINK_MAX_LINKS`` of this generation (18 or 36).
        inits: calls of ``nvmlInit`` that succeeded.
        shutdowns: calls of ``nvmlShutdown``.
        calls: names of all calls in order.
    """

    machine: FakeMachine
    fabric_bytes: int = 36
    fabric_versions: frozenset[int] = frozenset({2})
    max_links: int = 36
    inits: int = 0
    shutdowns: int = 0
    calls: list[str] = field(default_factory=list[str])

    NVMLError = NVMLError
    # The stray comma is the binding's.
    NVML_P2P_CAPS_INDEX_READ = (0,)
    NVML_P2P_CAPS_INDEX_WRITE = 1
    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_CAPS_INDEX_ATOMICS = 3

    def __post_init__(self) -> None:
        self._users = 0
        self._era = 0
        self._faults: dict[str, list[_Fault]] = {}

    @property
    def NVML_NVLINK_MAX_LINKS(self) -> int:
        """The bound that the binding suggests for loops over links."""
        return self.max_links

    @property
    def c_nvmlGpuFabricInfoV_t(self) -> type[ctypes.Structure]:
        """The structure as this generation of the binding declares it."""
        return _FabricInfo36 if self.fabric_bytes == 36 else _FabricInfo100

    @property
    def open_users(self) -> int:
        """How many initializations have not been shut down."""
        return self._users

    def fail(self, call: str, error: int | Exception, when: Callable[..., bool] = lambda *arguments: True) -> None:
        """Let `call` raise for arguments of which `when` is true.

        Args:
            call: function name, for example ``"nvmlDeviceGetP2PStatus"``.
            error: NVML error code, or any exception.
            when: is given the call's arguments; handles have a `position` in the machine and a `uuid`.
        """
        if not hasattr(type(self), call):
            raise ValueError(f"FakeNvml has no {call!r}")
        fault = _Fault(NVMLError(error) if isinstance(error, int) else error, when)
        self._faults.setdefault(call, []).append(fault)

    def nvmlInit(self) -> None:
        """Open; counted."""
        self._enter("nvmlInit", initialized=False)
        self.inits += 1
        self._users += 1

    def nvmlShutdown(self) -> None:
        """Close one opening; handles die with the last."""
        self._enter("nvmlShutdown")
        self.shutdowns += 1
        self._users -= 1
        if self._users == 0:
            self._era += 1

    def nvmlSystemGetDriverVersion(self) -> str:
        """Version of the driver."""
        self._enter("nvmlSystemGetDriverVersion")
        return self.machine.driver

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        """Newest CUDA of the driver, as 1000 times the major number plus 10 times the minor."""
        self._enter("nvmlSystemGetCudaDriverVersion")
        return self.machine.cuda_driver

    def nvmlDeviceGetCount(self) -> int:
        """Number of GPUs."""
        self._enter("nvmlDeviceGetCount")
        return len(self._order)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> _Handle:
        """Handle by NVML's own numbering."""
        self._enter("nvmlDeviceGetHandleByIndex", index)
        if not 0 <= index < len(self._order):
            raise NVMLError(INVALID_ARGUMENT)
        return self._handle(self._order[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> _Handle:
        """Handle of a GPU or of a MIG slice; the prefix must be right."""
        self._enter("nvmlDeviceGetHandleByUUID", uuid)
        for position, gpu in enumerate(self.machine.gpus):
            if uuid == gpu.uuid or uuid in gpu.slices:
                return self._handle(position, uuid)
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId(self, pci_bus_id: str) -> _Handle:
        """Handle of the GPU at an address; the width of the domain does not matter."""
        self._enter("nvmlDeviceGetHandleByPciBusId", pci_bus_id)
        for position, gpu in enumerate(self.machine.gpus):
            if gpu.pci_bus_id.lower().lstrip("0") == pci_bus_id.lower().lstrip("0"):
                return self._handle(position)
        raise NVMLError(NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: _Handle) -> str:
        """UUID with its prefix."""
        self._gpu("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle: _Handle) -> SimpleNamespace:
        """PCI information; only ``busId`` is there."""
        return SimpleNamespace(busId=self._gpu("nvmlDeviceGetPciInfo", handle).pci_bus_id)

    def nvmlDeviceGetName(self, handle: _Handle) -> str:
        """Product name."""
        return self._gpu("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetMemoryInfo(self, handle: _Handle) -> SimpleNamespace:
        """Memory; only ``total`` is there."""
        return SimpleNamespace(total=self._gpu("nvmlDeviceGetMemoryInfo", handle).memory_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: _Handle) -> tuple[int, int]:
        """Compute capability."""
        return self._gpu("nvmlDeviceGetCudaComputeCapability", handle).capability

    def nvmlDeviceGetMigMode(self, handle: _Handle) -> list[int]:
        """Current and pending MIG mode."""
        mig = self._gpu("nvmlDeviceGetMigMode", handle).mig
        if mig is None:
            raise NVMLError(NOT_SUPPORTED)
        return [int(mig), int(mig)]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: _Handle) -> _Handle:
        """Handle of the GPU that a slice is part of."""
        gpu = self._gpu("nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle)
        if handle.uuid == gpu.uuid:
            raise NVMLError(INVALID_ARGUMENT)
        return self._handle(handle.position)

    def nvmlDeviceGetNvLinkState(self, handle: _Handle, link: int) -> int:
        """Whether a link is up; beyond the last one "invalid argument"."""
        gpu = self._gpu("nvmlDeviceGetNvLinkState", handle, link)
        if gpu.links == 0:
            raise NVMLError(NOT_SUPPORTED)
        if link >= gpu.links:
            raise NVMLError(INVALID_ARGUMENT)
        return 1

    def nvmlDeviceGetP2PStatus(self, handle: _Handle, peer: _Handle, index: int) -> int:
        """P2P status of a pair: 0 is fine, 5 is "not supported"."""
        if type(index) is not int:
            # What ctypes answers to the binding's own constant.
            raise TypeError(f"argument 3: Don't know how to convert parameter {index!r}")
        self._gpu("nvmlDeviceGetP2PStatus", handle, peer, index)
        a, b = handle.position, peer.position
        access = self.machine.access(a, b)
        nvlink = self.machine.nvlink(a, b)
        answer = {"read": access, "write": access, "nvlink": nvlink, "atomics": access and nvlink}
        return 0 if answer[_CAPABILITIES[index]] else 5

    def nvmlDeviceGetTopologyCommonAncestor(self, handle: _Handle, peer: _Handle) -> int:
        """Common ancestor of a pair."""
        self._gpu("nvmlDeviceGetTopologyCommonAncestor", handle, peer)
        return _ANCESTORS[self.machine.ancestor(handle.position, peer.position)]

    def nvmlDeviceGetGpuFabricInfoV(self, handle: _Handle, reference: object) -> None:
        """Fill a fabric structure as the driver does: 36 or 40 bytes in C's layout, whatever the caller declared."""
        fabric = self._gpu("nvmlDeviceGetGpuFabricInfoV", handle).fabric
        target = cast("ctypes.Structure", cast("Any", reference)._obj)
        address = ctypes.addressof(target)
        version = ctypes.c_uint32.from_address(address).value
        number = {0x02000024: 2, 0x03000028: 3}.get(version)
        if number not in self.fabric_versions or ctypes.sizeof(target) < version & 0xFFFFFF:
            raise NVMLError(ARGUMENT_VERSION_MISMATCH)
        if fabric is None:
            raise NVMLError(NOT_SUPPORTED)
        content = (
            fabric.cluster_uuid
            + fabric.status.to_bytes(4, "little")
            + fabric.clique_id.to_bytes(4, "little")
            # The state is one byte in C. What is in the padding behind it is up to the compiler.
            + bytes([fabric.state, 0xA5, 0xA5, 0xA5])
            + bytes(4)
            + bytes([1, 0xA5, 0xA5, 0xA5]) * (number == 3)
        )
        ctypes.memmove(address + 4, content, len(content))

    def nvmlDeviceGetGpuFabricInfo_v4(self, handle: _Handle, reference: object) -> None:
        """Fill the 548 bytes of the fourth fabric structure in C's layout."""
        fabric = self._gpu("nvmlDeviceGetGpuFabricInfo_v4", handle).fabric
        target = cast("ctypes.Structure", cast("Any", reference)._obj)
        if 4 not in self.fabric_versions:
            raise NVMLError(FUNCTION_NOT_FOUND)
        assert ctypes.sizeof(target) == 548, ctypes.sizeof(target)
        if fabric is None:
            raise NVMLError(NOT_SUPPORTED)
        cliques = ((0, fabric.clique_id),) if fabric.cliques is None else fabric.cliques
        entries = b"".join(bytes([kind, 0xA5, 0xA5, 0xA5]) + number.to_bytes(4, "little") for kind, number in cliques)
        content = (
            fabric.cluster_uuid
            + fabric.status.to_bytes(4, "little")
            # What is behind the last valid entry is nobody's business.
            + entries.ljust(512, b"\0")
            + len(cliques).to_bytes(4, "little")
            + bytes([fabric.state, 0xA5, 0xA5, 0xA5])
            + bytes(4)
            + bytes([1, 0xA5, 0xA5, 0xA5])
        )
        ctypes.memmove(ctypes.addressof(target), content, len(content))

    @property
    def _order(self) -> list[int]:
        order = self.machine.nvml_order
        return list(range(len(self.machine.gpus))) if order is None else list(order)

    def _handle(self, position: int, uuid: str | None = None) -> _Handle:
        return _Handle(position, self.machine.gpus[position].uuid if uuid is None else uuid, self._era)

    def _gpu(self, call: str, handle: _Handle, *others: object) -> FakeGpu:
        self._enter(call, handle, *others)
        for item in (handle, *others):
            if isinstance(item, _Handle) and item.era != self._era:
                raise NVMLError(INVALID_ARGUMENT)
        return self.machine.gpus[handle.position]

    def _enter(self, call: str, *arguments: object, initialized: bool = True) -> None:
        self.calls.append(call)
        if initialized and self._users == 0:
            raise NVMLError(UNINITIALIZED)
        for fault in self._faults.get(call, ()):
            if fault.when(*arguments):
                raise fault.error


@dataclass
class FakeTorch:
    """Looks like ``torch`` where comm-core reads ``torch.cuda`` and ``torch.version``.

    Attributes:
        machine: what it tells about.
        visible: ``CUDA_VISIBLE_DEVICES`` of the process as CUDA reads it, None where it is not set.
        current: the current device.
        has_uuid: whether the properties of a device have a UUID in this torch.
        initialized: whether CUDA is initialized.
        capturing: whether the current stream is being captured.
    """

    machine: FakeMachine
    visible: str | None = None
    current: int = 0
    has_uuid: bool = True
    initialized: bool = False
    capturing: bool = False

    def __post_init__(self) -> None:
        self._devices = self._resolve()
        self._faults: dict[str, Exception] = {}
        self.version = SimpleNamespace(cuda="13.0")
        self.cuda = SimpleNamespace(
            device_count=self._device_count,
            is_initialized=lambda: self.initialized,
            current_device=self._current_device,
            get_device_properties=self._properties,
            can_device_access_peer=self._can_access_peer,
            is_current_stream_capturing=lambda: self.capturing,
            device=self._guard,
            nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        )
        self._C = SimpleNamespace(_cuda_getDevice=lambda: self.current)

    def fail(self, call: str, error: Exception) -> None:
        """Let ``torch.cuda.<call>`` raise `error`."""
        if not hasattr(self.cuda, call):
            raise ValueError(f"FakeTorch has no torch.cuda.{call}")
        self._faults[call] = error

    @property
    def visible_uuids(self) -> list[str]:
        """UUIDs of the devices that the process sees, in the order of their ordinals."""
        return [uuid for _, uuid in self._devices]

    def _resolve(self) -> list[tuple[int, str]]:
        """Return (position, UUID) of each visible device, by CUDA's rules for the variable.

        The first entry that is no device ends the list; a UUID may be shortened as long as it is unambiguous.
        """
        gpus = self.machine.gpus
        order = list(range(len(gpus))) if self.machine.cuda_order is None else list(self.machine.cuda_order)
        every: list[tuple[int, str]] = []
        for position in order:
            gpu = gpus[position]
            every.append((position, gpu.slices[0] if gpu.mig and gpu.slices else gpu.uuid))
        if self.visible is None:
            return every
        found: list[tuple[int, str]] = []
        for text in self.visible.split(","):
            entry = text.strip()
            if entry.startswith("MIG-"):
                matches = [(i, uuid) for i in order for uuid in gpus[i].slices if uuid.startswith(entry)]
            elif entry.startswith("GPU-"):
                matches = [(i, uuid) for i, uuid in every if gpus[i].uuid.startswith(entry)]
            elif entry.isdecimal() and int(entry) < len(every):
                matches = [every[int(entry)]]
            else:
                matches = []
            if len(matches) != 1 or matches[0] in found:
                break
            found.append(matches[0])
        return found

    def _device_count(self) -> int:
        self._check("device_count")
        return len(self._devices)

    def _current_device(self) -> int:
        self._initialize("current_device")
        return self.current

    def _properties(self, index: int) -> SimpleNamespace:
        self._initialize("get_device_properties")
        position, uuid = self._devices[index]
        gpu = self.machine.gpus[position]
        domain, bus, rest = gpu.pci_bus_id.split(":")
        properties = SimpleNamespace(
            name=gpu.name + (" MIG 1g.10gb" if uuid.startswith("MIG-") else ""),
            major=gpu.capability[0],
            minor=gpu.capability[1],
            total_memory=gpu.memory_bytes,
            pci_domain_id=int(domain, 16),
            pci_bus_id=int(bus, 16),
            pci_device_id=int(rest.split(".")[0], 16),
        )
        if self.has_uuid:
            properties.uuid = uuid[4:]
        return properties

    def _can_access_peer(self, index: int, peer: int) -> bool:
        self._initialize("can_device_access_peer")
        return self.machine.access(self._devices[index][0], self._devices[peer][0])

    @contextmanager
    def _guard(self, device: object) -> Generator[None, None, None]:
        self._initialize("device")
        before, self.current = self.current, int(cast("Any", device).index)
        try:
            yield
        finally:
            self.current = before

    def _initialize(self, call: str) -> None:
        self._check(call)
        self.initialized = True

    def _check(self, call: str) -> None:
        if call in self._faults:
            raise self._faults[call]


@contextmanager
def installed(nvml: object | None = None, torch: object | None = None) -> Generator[None, None, None]:
    """Let comm-core see `nvml` as the binding and `torch` as torch within a ``with`` block.

    Args:
        nvml: a `FakeNvml` or anything like it; None means that nvidia-ml-py is not installed.
        torch: a `FakeTorch` or anything like it; None means a torch without CUDA.
    """

    def no_binding() -> object:
        raise ModuleNotFoundError("No module named 'pynvml'")

    nvml_source, cuda_source = _nvml.source, _cuda.source
    fake_torch = FakeTorch(FakeMachine([])) if torch is None else torch
    _nvml.source = no_binding if nvml is None else lambda: nvml
    _cuda.source = lambda: fake_torch
    try:
        yield
    finally:
        _nvml.source, _cuda.source = nvml_source, cuda_source
