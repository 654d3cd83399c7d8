"""The one module that touches torch.cuda: typed, small, and replaceable in tests.

Nothing here runs at import. What initializes CUDA in this process says so; the others may be asked on a machine
without a GPU, without a driver and with a torch that was built without CUDA.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.topology.facts import format_pci_bus_id

if TYPE_CHECKING:
    import torch

__all__ = [
    "DeviceProperties",
    "can_access_peer",
    "current_device",
    "device_count",
    "device_guard",
    "device_properties",
    "is_capturing",
    "is_current",
    "is_initialized",
    "nccl_version",
    "normalize_device",
    "raw_stream",
    "runtime_version",
    "synchronize",
    "wait_for_stream",
]


@cache
def _import_torch() -> Any:
    # Cached, because the current stream is asked for on every call, and even a second import takes a microsecond.
    return importlib.import_module("torch")


source: Callable[[], Any] = _import_torch
"""Where this module gets torch (its ``cuda`` and ``version``) from: the seam that a fake replaces."""


@dataclass(frozen=True)
class DeviceProperties:
    """What CUDA says about one device.

    Attributes:
        index: CUDA ordinal in this process.
        uuid: ``"GPU-…"`` or ``"MIG-…"``, or empty where this torch does not say.
        name: product name.
        pci_bus_id: as in sysfs, or empty.
        compute_capability: for example ``"9.0"``.
        memory_bytes: of the device, or of the slice where it is one.
        multiprocessors: how many it has; 0 where torch does not say.
        note: what could not be established and why, or empty.
    """

    index: int
    uuid: str
    name: str
    pci_bus_id: str
    compute_capability: str
    memory_bytes: int | None
    multiprocessors: int = 0
    note: str = ""


def device_count() -> int:
    """Return the number of CUDA devices that this process sees. Does not initialize CUDA."""
    return int(source().cuda.device_count())


def is_initialized() -> bool:
    """Return whether CUDA is initialized in this process."""
    return bool(source().cuda.is_initialized())


def current_device() -> int:
    """Return the ordinal of the current device. Initializes CUDA."""
    return int(source().cuda.current_device())


def device_properties(index: int) -> DeviceProperties:
    """Return what CUDA says about device `index`. Initializes CUDA, but makes no context on any device."""
    properties = source().cuda.get_device_properties(index)
    name = str(properties.name)
    raw = getattr(properties, "uuid", None)
    note = ""
    uuid = ""
    if raw is None:
        note = f"CUDA device {index}: torch.cuda.get_device_properties(...).uuid does not exist in this torch"
    else:
        # torch writes the 16 bytes without a prefix. NVML tells slices from GPUs; without NVML the name has to.
        uuid = str(raw)
        if not uuid.startswith(("GPU-", "MIG-")):
            uuid = ("MIG-" if " MIG " in f"{name} " else "GPU-") + uuid
    address = [getattr(properties, part, None) for part in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    memory = getattr(properties, "total_memory", None)
    return DeviceProperties(
        index=index,
        uuid=uuid,
        name=name,
        pci_bus_id="" if None in address else format_pci_bus_id(*(int(cast("int", part)) for part in address)),
        compute_capability=f"{int(properties.major)}.{int(properties.minor)}",
        memory_bytes=None if memory is None else int(memory),
        multiprocessors=int(getattr(properties, "multi_processor_count", 0)),
        note=note,
    )


def can_access_peer(index: int, peer: int) -> bool:
    """Return whether device `index` can map memory of device `peer`. Initializes CUDA, but makes no context."""
    return bool(source().cuda.can_device_access_peer(index, peer))


def runtime_version() -> str | None:
    """Return the CUDA version that torch was built with, None for a torch without CUDA."""
    version = source().version.cuda
    return None if version is None else str(version)


def nccl_version() -> str | None:
    """Return the version of NCCL in torch, None for a torch without it."""
    try:
        version = source().cuda.nccl.version()
    except Exception:
        # A torch without NCCL has no such function, and says so in a way that differs between releases.
        return None
    return ".".join(str(part) for part in version)


def is_capturing() -> bool:
    """Return whether the current stream is being captured into a CUDA graph. False without CUDA."""
    cuda = source().cuda
    # Never asked before CUDA is initialized, because a stream that does not exist can't be capturing.
    return bool(cuda.is_initialized()) and bool(cuda.is_current_stream_capturing())


def is_current(index: int) -> bool:
    """Return whether device `index` is the current one, and so needs no guard; -1, a CPU, always is."""
    return index < 0 or source()._C._cuda_getDevice() == index


def raw_stream(index: int) -> int:
    """Return the handle of device `index`'s current stream, without the cost of a `torch.cuda.Stream` object."""
    stream: int = source()._C._cuda_getCurrentRawStream(index)
    return stream


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Return a context manager that makes `device` current, and does nothing for a CPU."""
    if device.type != "cuda":
        return nullcontext()
    return cast("AbstractContextManager[object]", source().cuda.device(device))


def synchronize(device: torch.device) -> None:
    """Wait for all work of `device`; there is none on a CPU."""
    if device.type == "cuda":
        source().cuda.synchronize(device)


def wait_for_stream(device: torch.device, stream: int) -> None:
    """Let what is enqueued on `device`'s current stream from now on wait for what `stream` (a handle) has by now."""
    cuda = source().cuda
    before = cuda.ExternalStream(stream, device=device) if stream else cuda.default_stream(device)
    cuda.current_stream(device).wait_stream(before)


_DEVICE_TEXT = re.compile(r"(cuda|cpu)(?::([0-9]+))?", re.ASCII)


def normalize_device(device: object, default: torch.device | None = None) -> torch.device:
    """Return `device` as a `torch.device` with an explicit CUDA ordinal, or as plain ``cpu``.

    Args:
        device: a `torch.device`, text (``"cuda"``, ``"cuda:1"``, ``"cpu"``), a CUDA ordinal, or None for `default`.
            ``"cuda"`` without an ordinal is the current device.
        default: what None means; without it, the current CUDA device, or the CPU where there is no CUDA device.

    Raises:
        ArgumentTypeError: it is something else; a `bool` is not an ordinal.
        ArgumentValueError: another device type, or an ordinal that this process does not have.

    Note:
        A `torch.device` keeps its index in a signed byte: ``torch.device("cuda", 300)`` has become ``cuda:44`` before
        it gets here, so that only text and integers can be checked as they were written.
    """
    import torch

    if device is None:
        if default is None:
            default = torch.device("cuda" if device_count() else "cpu")
        device = default
    if isinstance(device, torch.device):
        kind, index = device.type, device.index
    elif isinstance(device, str):
        match = _DEVICE_TEXT.fullmatch(device)
        if match is None:
            raise ArgumentValueError(f"device must be 'cuda', 'cuda:N' or 'cpu', got {device!r}")
        kind, index = match[1], None if match[2] is None else int(match[2])
    elif isinstance(device, int) and not isinstance(device, bool):
        kind, index = "cuda", device
    else:
        raise ArgumentTypeError(
            f"device must be a torch.device, a str, an int (CUDA ordinal) or None, got {type(device).__name__} "
            f"{device!r}"
        )
    if kind == "cpu":
        if index not in (None, 0):
            raise ArgumentValueError(f"device {device!r}: there is only one CPU device, 'cpu'")
        return torch.device("cpu")
    if kind != "cuda":
        raise ArgumentValueError(f"device must be a CUDA device or the CPU, got {device!r}")
    count = device_count()
    if index is None:
        if count == 0:
            raise ArgumentValueError(f"device {device!r}: this process sees no CUDA device")
        index = current_device()
    if not 0 <= index < count:
        has = "no CUDA device" if count == 0 else f"{count} CUDA device{'s' if count > 1 else ''} (0 to {count - 1})"
        raise ArgumentValueError(f"device {device!r}: this process sees {has}")
    return torch.device("cuda", index)
