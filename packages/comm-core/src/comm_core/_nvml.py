"""The one module that touches NVML: typed, small, tri-state, and replaceable in tests.

NVML is opened for a ``with`` block and closed after it. A query that fails answers "unknown" and leaves a note; it
never spoils another query or a later block. The binding (nvidia-ml-py, imported as ``pynvml``) is trusted with as
little as possible, because its constants and structures have been wrong in releases that people have installed.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from comm_core.topology.facts import FabricFacts, PairFacts, Tri, normalize_pci_bus_id

__all__ = ["Nvml", "NvmlDevice", "session"]

_T = TypeVar("_T")


def _import_binding() -> Any:
    return importlib.import_module("pynvml")


source: Callable[[], Any] = _import_binding
"""Where `session` gets its binding from: the seam that `comm_core.testing.fake_nvml` replaces."""

# Numbers of NVML's C interface, spelled out instead of taken from the binding: in current releases of nvidia-ml-py
# NVML_P2P_CAPS_INDEX_READ is the tuple (0,) because of a stray comma, and ctypes refuses it.
_ERROR_INVALID_ARGUMENT = 2
_ERROR_NOT_SUPPORTED = 3
_ERROR_FUNCTION_NOT_FOUND = 13
_ERROR_VERSION_MISMATCH = 25
_P2P_READ, _P2P_WRITE, _P2P_NVLINK, _P2P_ATOMICS = range(4)
_P2P_OK = 0
_P2P_KNOWN_NO = range(1, 6)  # chipset, GPU, topology, disabled by registry key, not supported; 6 is "unknown"
_ANCESTORS = {0: "internal", 10: "single", 20: "multiple", 30: "hostbridge", 40: "node", 50: "system"}
_FABRIC_STATES = {0: "not_supported", 1: "not_started", 2: "in_progress", 3: "completed"}
# No GPU has as many links, and every driver answers an error beyond its last one. The binding's own bound is no
# better: it has said 18 and 36, and drivers reject link 18 with an error that depends on their age.
_MAX_LINKS = 64


class _FabricInfo2(ctypes.Structure):
    """nvmlGpuFabricInfo_v2_t as C has it. 36 bytes, which is also what its version tag says.

    The binding's own structures are not used: one release declares 100 bytes for this one, so that status, clique and
    state are read far behind what the driver wrote; another declares the UUID as text, which ends at the first zero
    byte; and all declare the one-byte state as four.
    """

    _fields_ = (
        ("version", ctypes.c_uint32),
        ("cluster_uuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint32),
        ("clique_id", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("health_mask", ctypes.c_uint32),
    )


class _FabricInfo3(ctypes.Structure):
    """nvmlGpuFabricInfo_v3_t: the same and a summary of the health, 40 bytes."""

    _fields_ = (*_FabricInfo2._fields_, ("health_summary", ctypes.c_uint8))


class _FabricClique(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint8), ("id", ctypes.c_uint32))


class _FabricInfo4(ctypes.Structure):
    """nvmlGpuFabricInfo_v4_t: without a version, and with a clique for each way of reaching peers."""

    _fields_ = (
        ("cluster_uuid", ctypes.c_uint8 * 16),
        ("status", ctypes.c_uint32),
        ("cliques", _FabricClique * 64),
        ("num_cliques", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
        ("health_mask", ctypes.c_uint32),
        ("health_summary", ctypes.c_uint8),
    )

    @property
    def clique_id(self) -> int | None:
        """The clique within which plain pointers reach the peers' memory, which is what all transports here use."""
        known = list(self.cliques)[: min(self.num_cliques, 64)]
        return next((clique.id for clique in known if clique.type == _UNICAST_POINTER), None)


_UNICAST_POINTER = 0
_OLDER = frozenset({_ERROR_INVALID_ARGUMENT, _ERROR_FUNCTION_NOT_FOUND, _ERROR_VERSION_MISMATCH})
"""How a driver says that it does not know a structure: there is an older one to ask for."""


def _fabric_questions() -> Iterator[tuple[Any, str]]:
    """Yield structures for the fabric information and the functions that fill them, the newest first."""
    yield _FabricInfo4(), "nvmlDeviceGetGpuFabricInfo_v4"
    for number, kind in ((3, _FabricInfo3), (2, _FabricInfo2)):
        yield kind(version=number << 24 | ctypes.sizeof(kind)), "nvmlDeviceGetGpuFabricInfoV"


@dataclass(frozen=True)
class NvmlDevice:
    """A device as NVML knows it. `handle` is good until the session ends."""

    handle: Any
    uuid: str
    pci_bus_id: str
    mig_slice: bool = False


class Nvml:
    """NVML inside a `session`. Each query answers a value, or None for unknown; none of them raises.

    Attributes:
        available: whether NVML could be opened. If not, every query answers "unknown".
        reason: why not.
        notes: what could not be established and why, in the order it was found.
    """

    def __init__(self, binding: object | None, reason: str = "") -> None:
        self._binding = cast("Any", binding)
        self.available = binding is not None
        self.reason = reason
        self.notes: list[str] = []

    def driver_version(self) -> str | None:
        """Return the version of the kernel driver, for example ``"580.159.04"``."""
        return self._text("driver version", lambda n: n.nvmlSystemGetDriverVersion())

    def cuda_driver_version(self) -> str | None:
        """Return the newest CUDA version that the driver supports, for example ``"13.0"``."""
        number = self._ask("CUDA driver version", lambda n: int(n.nvmlSystemGetCudaDriverVersion()))
        return None if number is None else f"{number // 1000}.{number % 1000 // 10}"

    def devices(self) -> list[NvmlDevice]:
        """Return the GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.

        The order is NVML's. It is not CUDA's and need not survive a reboot, so no caller may take a position in it
        for anything. A GPU that does not answer is left out, with a note.
        """
        count = self._ask("number of GPUs", lambda n: int(n.nvmlDeviceGetCount())) or 0
        found: list[NvmlDevice] = []
        for i in range(count):
            handle = self._ask(f"GPU {i} of {count}", lambda n, i=i: n.nvmlDeviceGetHandleByIndex(i))
            device = None if handle is None else self._describe(handle)
            if device is not None:
                found.append(device)
        return found

    def find(self, uuid: str, pci_bus_id: str = "") -> NvmlDevice | None:
        """Return the device with this UUID, or, where the UUID is unknown, the GPU at this PCI address.

        `uuid` may lack the right prefix: CUDA reports the same 16 bytes for ``"GPU-…"`` and ``"MIG-…"``. A GPU at
        the address that has another UUID is not the device (it is the parent of a MIG slice), so it is not returned.
        """
        if not self.available:
            return None
        bare = uuid[4:] if uuid.startswith(("GPU-", "MIG-")) else uuid
        for spelling in (f"GPU-{bare}", f"MIG-{bare}") if bare else ():
            handle, _ = self._try(lambda n, spelling=spelling: n.nvmlDeviceGetHandleByUUID(spelling))
            device = None if handle is None else self._describe(handle)
            if device is not None:
                return device
        if pci_bus_id:
            handle = self._ask(f"GPU at {pci_bus_id}", lambda n: n.nvmlDeviceGetHandleByPciBusId(pci_bus_id))
            device = None if handle is None else self._describe(handle)
            if device is not None and bare in ("", device.uuid[4:]):
                return device
        self.notes.append(f"NVML does not know the device {uuid or pci_bus_id or '(no UUID, no PCI id)'}")
        return None

    def name(self, device: NvmlDevice) -> str | None:
        """Return the product name."""
        return self._text("name", lambda n: n.nvmlDeviceGetName(device.handle))

    def memory_bytes(self, device: NvmlDevice) -> int | None:
        """Return the device memory in bytes."""
        return self._ask("memory", lambda n: int(n.nvmlDeviceGetMemoryInfo(device.handle).total))

    def compute_capability(self, device: NvmlDevice) -> str | None:
        """Return the compute capability, for example ``"9.0"``."""

        def query(n: Any) -> str:
            major, minor = n.nvmlDeviceGetCudaComputeCapability(device.handle)
            return f"{int(major)}.{int(minor)}"

        return self._ask("compute capability", query)

    def mig(self, device: NvmlDevice) -> Tri:
        """Return whether `device` is a MIG slice or a GPU that is split into slices."""
        if device.mig_slice:
            return True
        value, error = self._try(lambda n: bool(n.nvmlDeviceGetMigMode(device.handle)[0]))
        if error is None:
            return value
        if _code(error) == _ERROR_NOT_SUPPORTED:
            # This is how a GPU without MIG answers.
            return False
        self.notes.append(f"MIG mode: {_describe_error(error)}")
        return None

    def nvlinks(self, device: NvmlDevice) -> int | None:
        """Return how many NVLinks of the GPU are up. It says nothing about any pair of GPUs."""
        active = 0
        for link in range(_MAX_LINKS):
            state, error = self._try(lambda n, link=link: int(n.nvmlDeviceGetNvLinkState(device.handle, link)))
            if state is None or error is not None:
                # Any error ends the count: which one a driver answers beyond the last link depends on its age. Only
                # the first link tells "no NVLink" from "can't tell".
                if link == 0 and error is not None and _code(error) != _ERROR_NOT_SUPPORTED:
                    self.notes.append(f"NVLink count: {_describe_error(error)}")
                    return None
                break
            active += bool(state)
        return active

    def pair(self, device: NvmlDevice, peer: NvmlDevice) -> PairFacts:
        """Return what NVML says about `device` reaching `peer`, in this direction; `peer_access` is not its business.

        A query that fails makes that one fact unknown. `error` is set for those that decide something: a common
        ancestor or atomics that can't be queried (virtual machines, WSL) are no reason to give up NVLink.
        """
        errors: list[str] = []
        values: dict[str, Tri] = {}
        for name, index, decides in (
            ("p2p_read", _P2P_READ, True),
            ("p2p_write", _P2P_WRITE, True),
            ("p2p_atomics", _P2P_ATOMICS, False),
            ("nvlink", _P2P_NVLINK, True),
        ):
            status, error = self._try(
                lambda n, index=index: int(n.nvmlDeviceGetP2PStatus(device.handle, peer.handle, index))
            )
            values[name] = True if status == _P2P_OK else False if status in _P2P_KNOWN_NO else None
            text = None
            if error is not None:
                text = f"{name}: {_describe_error(error)}"
            elif values[name] is None:
                text = f"{name}: NVML answered {'unknown' if status == 6 else f'status {status}'}"
            if text is not None and decides:
                errors.append(text)
            elif text is not None:
                self.notes.append(f"{device.uuid} to {peer.uuid}: {text}")
        level, _ = self._try(lambda n: int(n.nvmlDeviceGetTopologyCommonAncestor(device.handle, peer.handle)))
        return PairFacts(
            **values,
            common_ancestor=None if level is None else _ANCESTORS.get(level),
            error="; ".join(errors) or None,
        )

    def fabric(self, device: NvmlDevice) -> FabricFacts:
        """Return the fabric information (multi-node NVLink) of the GPU."""
        info: Any = None
        error: Exception | None = None
        for info, name in _fabric_questions():
            _, error = self._try(lambda n, name=name, info=info: getattr(n, name)(device.handle, ctypes.byref(info)))
            # An older binding has no function for a newer structure, an older driver refuses it.
            if not isinstance(error, AttributeError) and (error is None or _code(error) not in _OLDER):
                break
        if error is not None:
            if _code(error) == _ERROR_NOT_SUPPORTED:
                return FabricFacts(state="not_supported")
            self.notes.append(f"fabric information: {_describe_error(error)}")
            return FabricFacts()
        state = _FABRIC_STATES.get(info.state, "unknown")
        if state != "completed":
            # The rest is only filled in by a registration that has finished.
            return FabricFacts(state=state)
        return FabricFacts(
            state=state, status=info.status, cluster_uuid=bytes(info.cluster_uuid).hex(), clique_id=info.clique_id
        )

    def _describe(self, handle: object) -> NvmlDevice | None:
        uuid = self._text("UUID", lambda n: n.nvmlDeviceGetUUID(handle))
        if uuid is None:
            return None
        mig_slice = uuid.startswith("MIG-")
        if mig_slice:
            # A slice has no PCI address of its own; its parent has.
            handle_of_pci = self._ask(
                "parent of a MIG slice", lambda n: n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            )
        else:
            handle_of_pci = handle
        pci = None
        if handle_of_pci is not None:
            pci = self._text("PCI id", lambda n: n.nvmlDeviceGetPciInfo(handle_of_pci).busId)
        return NvmlDevice(handle, uuid, normalize_pci_bus_id(pci or ""), mig_slice)

    def _try(self, query: Callable[[Any], _T]) -> tuple[_T | None, Exception | None]:
        if not self.available:
            return None, RuntimeError(self.reason)
        try:
            return query(self._binding), None
        except Exception as error:
            # Whatever it is: an NVMLError, a function that the binding or the driver lacks, text that does not
            # decode. One answer is unknown then, and the next question may be asked.
            return None, error

    def _ask(self, what: str, query: Callable[[Any], _T]) -> _T | None:
        value, error = self._try(query)
        if error is not None and self.available:
            self.notes.append(f"{what}: {_describe_error(error)}")
        return value

    def _text(self, what: str, query: Callable[[Any], Any]) -> str | None:
        def decoded(n: Any) -> str:
            value = query(n)
            return value.decode() if isinstance(value, bytes) else str(value)

        return self._ask(what, decoded)


def _code(error: Exception) -> int | None:
    """Return the NVML code of an error, None for any other kind."""
    value = getattr(error, "value", None)
    return value if isinstance(value, int) else None


def _describe_error(error: Exception) -> str:
    return f"NVML: {error}" if _code(error) is not None else f"{type(error).__name__}: {error}"


@contextmanager
def session() -> Generator[Nvml, None, None]:
    """Open NVML for a ``with`` block. Yields an `Nvml` with `available` false where that is not possible.

    NVML counts its users, so a block may be inside another one or inside a program that uses NVML itself; exactly
    what this block opened is closed again. Nothing is remembered: a later block tries again.
    """
    binding, reason = _open()
    try:
        yield Nvml(binding, reason)
    finally:
        if binding is not None:
            with suppress(Exception):
                binding.nvmlShutdown()


def _open() -> tuple[Any, str]:
    try:
        binding = source()
        binding.nvmlInit()
    except ImportError:
        return None, "NVML: the Python package nvidia-ml-py is not installed (comm-core[cuda] brings it)"
    except Exception as error:
        return None, _describe_error(error)
    return binding, ""
