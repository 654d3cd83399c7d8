"""Which GPU architectures a library is built for. Pure but for `choose`, which may ask the device.

An architecture is written as in ``COMM_CUDA_ARCH_LIST``: ``"9.0a"`` (machine code), ``"8.0+PTX"`` (machine code, and
PTX that newer devices compile when they load it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from comm_core import _env
from comm_core.errors import ArgumentValueError, UnsupportedError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARCH_LIST",
    "capability_of",
    "choose",
    "choose_for_machine",
    "for_device",
    "generate_code",
    "join",
    "normalize",
    "parse_list",
    "runs_on",
]

ARCH_LIST = "COMM_CUDA_ARCH_LIST"

_PTX = "+PTX"
_ARCH = re.compile(r"(\d{1,2})\.(\d)([af]?)(\+PTX)?|(\d{1,2})(\d)([af]?)(\+PTX)?", re.ASCII | re.IGNORECASE)
_SEPARATORS = re.compile(r"[;,\s]+")


def parse_list(text: str, what: str = ARCH_LIST) -> tuple[str, ...]:
    """Return the architectures of a list such as ``"9.0a;8.0"``, ``"90a"`` or ``"8.0+PTX"``, sorted.

    Raises:
        ArgumentValueError: it is no such list; the text names `what`.
    """
    found: set[str] = set()
    for word in filter(None, _SEPARATORS.split(text)):
        match = _ARCH.fullmatch(word)
        if match is None:
            raise ArgumentValueError(
                f"{what}: {word!r} is no architecture; write for example 9.0a, 8.0+PTX or 8.0;9.0a (got {text!r})"
            )
        major, minor, suffix, ptx = match.groups()[:4] if match[1] else match.groups()[4:]
        found.add(f"{int(major)}.{minor}{suffix.lower()}{_PTX if ptx else ''}")
    if not found:
        raise ArgumentValueError(f"{what} names no architecture: {text!r}")
    return normalize(found)


def normalize(archs: Iterable[str]) -> tuple[str, ...]:
    """Return `archs` sorted and without repetition: their order decides nothing."""
    return tuple(sorted(set(archs), key=_split))


def join(archs: Sequence[str]) -> str:
    """Return a list as ``COMM_CUDA_ARCH_LIST`` and ``--arch`` take it."""
    return ";".join(archs)


def _split(arch: str) -> tuple[int, int, str, bool]:
    """Return (major, minor, suffix, whether PTX is included)."""
    base = arch.removesuffix(_PTX)
    number = base.rstrip("af")
    major, minor = number.split(".")
    return int(major), int(minor), base[len(number) :], base != arch


def for_device(capability: str) -> str:
    """Return the architecture to build for a device of compute capability `capability` (``"9.0"``).

    From 9.0 on that is the "a" form: instructions such as wgmma and setmaxnreg exist in no other.
    """
    return f"{capability}a" if _split(capability)[0] >= 9 else capability


def runs_on(archs: Iterable[str], capability: str) -> bool:
    """Return whether code for `archs` runs on a device of compute capability `capability`.

    Machine code runs on its own and on later minor versions of one major; the "a" forms on exactly their own, the "f"
    forms (a family) like plain ones. PTX runs on everything that is not older, its "a" form on its own alone.
    """
    major, minor, _, _ = _split(capability)
    for arch in archs:
        own_major, own_minor, suffix, ptx = _split(arch)
        if (own_major, own_minor) == (major, minor):
            return True
        if suffix == "a":
            continue
        if own_major == major and own_minor <= minor:
            return True
        if ptx and not suffix and (own_major, own_minor) <= (major, minor):
            return True
    return False


def generate_code(archs: Sequence[str]) -> list[str]:
    """Return nvcc's flags for `archs`."""
    flags: list[str] = []
    for arch in archs:
        major, minor, suffix, ptx = _split(arch)
        number = f"{major}{minor}{suffix}"
        code = f"[sm_{number},compute_{number}]" if ptx else f"sm_{number}"
        flags.append(f"--generate-code=arch=compute_{number},code={code}")
    return flags


def choose(device: torch.device | None = None) -> tuple[str, ...]:
    """Return what to build for `device`, or for whatever ``COMM_CUDA_ARCH_LIST`` names.

    Args:
        device: a CUDA device, which an explicit list must cover; None without one.

    Raises:
        ArgumentValueError: the list is malformed or lacks the device's architecture.
        UnsupportedError: there is neither a list nor a device to ask.
    """
    text = _env.cuda_arch_list()
    capability = None if device is None or device.type != "cuda" else capability_of(device)
    if text is None:
        if capability is None:
            raise UnsupportedError(
                "for which GPU architecture? There is no CUDA device to ask: set "
                f"{ARCH_LIST}, for example {ARCH_LIST}=9.0a (or give --arch to `commctl jit warm`)"
            )
        return (for_device(capability),)
    archs = parse_list(text)
    if capability is not None and not runs_on(archs, capability):
        raise ArgumentValueError(
            f"{ARCH_LIST}={text!r} does not cover {device}, which has compute capability {capability}: add "
            f"{for_device(capability)} to it, or unset it to build for the device in use"
        )
    return archs


def choose_for_machine() -> tuple[str, ...]:
    """Return what to build ahead: what ``COMM_CUDA_ARCH_LIST`` names, else all GPUs that this process sees.

    Raises:
        ArgumentValueError: the list is malformed.
        UnsupportedError: there is neither a list nor a GPU.
    """
    from comm_core import _cuda

    if _env.cuda_arch_list() is None:
        found = [_cuda.device_properties(index).compute_capability for index in range(_cuda.device_count())]
        if found:
            return normalize(map(for_device, found))
    return choose()


def capability_of(device: torch.device) -> str:
    """Return the compute capability of a CUDA device, for example ``"9.0"``. Initializes CUDA."""
    from comm_core import _cuda

    return _cuda.device_properties(_cuda.normalize_device(device).index).compute_capability
