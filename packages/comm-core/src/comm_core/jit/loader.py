"""Loads a library, checks that it is what Python expects, and calls into it.

Libraries are loaded with ctypes and never unloaded.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from comm_core import _cuda
from comm_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CudaCallError,
    JitCacheError,
    JitMissingError,
    TransportError,
    UnsupportedError,
)
from comm_core.jit import archs as arch_names
from comm_core.jit import toolchain
from comm_core.jit.abi import ABI, CUDA_BASE, PREFIX, Status
from comm_core.jit.cache import Artifact
from comm_core.jit.libraries import obtain
from comm_core.jit.spec import ModuleSpec

if TYPE_CHECKING:
    import torch

__all__ = ["Call", "Module", "load", "open_library"]

Call: TypeAlias = Callable[..., None]
"""A bound entry point: takes the fields of its struct after the prefix, in order, and raises if it fails."""

_INSUFFICIENT_DRIVER = 35


class _StructInfo(ctypes.Structure):
    """Twin: include/comm_core/abi.h, comm_struct_info."""

    _fields_ = (("name", ctypes.c_char_p), ("size", ctypes.c_uint64))


class _ModuleInfo(ctypes.Structure):
    """Twin: include/comm_core/abi.h, comm_module_info."""

    _fields_ = (
        ("struct_size", ctypes.c_uint32),
        ("abi", ctypes.c_uint32),
        ("module", ctypes.c_char_p),
        ("archs", ctypes.c_char_p),
        ("structs", ctypes.POINTER(_StructInfo)),
        ("kernels", ctypes.c_void_p),
        ("num_structs", ctypes.c_uint32),
        ("num_kernels", ctypes.c_uint32),
    )


class Module:
    """A loaded library.

    Attributes:
        spec: its description.
        artifact: where it came from.
        archs: GPU architectures that it has code for, as it says itself.
        num_kernels: kernels that `preload` loads.
    """

    def __init__(self, spec: ModuleSpec, artifact: Artifact) -> None:
        self.spec = spec
        self.artifact = artifact
        try:
            # There is no dlclose, on purpose: the library's CUDA runtime has registered its kernels with the driver
            # and set exit handlers; captured graphs hold its kernels, and other threads may be inside it.
            self._library = ctypes.CDLL(str(artifact.path))
        except OSError as error:
            raise JitCacheError(
                f"{artifact.path} can't be loaded: {error}. If it was built on another system, delete the folder "
                f"{artifact.folder} and it is built anew"
            ) from error
        self._last_error = self._symbol("comm_last_error", ctypes.c_char_p)
        self.archs, self.num_kernels = self._check()
        self._preload = self._symbol(spec.preload_symbol, ctypes.c_int, ctypes.c_int)
        self._preloaded: set[int] = set()

    def _symbol(self, name: str, result: type, *arguments: type) -> Callable[..., Any]:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            self._refuse(f"it does not export {name}")
        function.restype = result
        function.argtypes = list(arguments)
        return function

    def _refuse(self, why: str) -> NoReturn:
        raise JitCacheError(
            f"module {self.spec.name!r} is not used: {why}. Its C sources and package {self.spec.package!r} do not "
            f"belong together (library: {self.artifact.path})"
        )

    def _check(self) -> tuple[tuple[str, ...], int]:
        """Compare what the library says of itself with what Python expects, before anything in it is called."""
        info = self._symbol("comm_module_info_v1", ctypes.POINTER(_ModuleInfo))().contents
        if info.abi != ABI:
            self._refuse(f"it has C interface {info.abi}, this comm-core has {ABI}")
        if info.struct_size < ctypes.sizeof(_ModuleInfo):
            self._refuse(
                f"its description of itself has {info.struct_size} bytes, at least {ctypes.sizeof(_ModuleInfo)} are "
                "expected"
            )
        name = (info.module or b"").decode()
        if name != self.spec.name:
            self._refuse(f"it calls itself {name!r}")
        sizes = {info.structs[i].name.decode(): int(info.structs[i].size) for i in range(info.num_structs)}
        for struct_name, text in self.spec.structs.items():
            expected = struct.calcsize(text)
            size = sizes.pop(struct_name, None)
            if size is None:
                self._refuse(f"it has no struct {struct_name}")
            if size != expected:
                self._refuse(f"struct {struct_name} has {size} bytes in C and {expected} in Python (format {text!r})")
        if sizes:
            self._refuse(f"it has structs that Python does not know: {', '.join(sorted(sizes))}")
        for entry in self.spec.entry_points:
            self._symbol(entry, ctypes.c_int)
        listed = (info.archs or b"").decode()
        return tuple(filter(None, listed.split(","))), int(info.num_kernels)

    def bind(self, entry_point: str) -> Call:
        """Return a function that calls an entry point.

        It takes the fields of the struct after the prefix, in order, as Python numbers (pointers and streams as
        addresses), may be called from several threads at once, and raises what `Status` stands for:

        - `ArgumentValueError`: a field can't be used; nothing was launched.
        - `CudaCallError`: a CUDA call failed.
        - `UnsupportedError`: not on this device or in this build.
        - `TransportError`: the communicator was aborted earlier.
        - `struct.error`: a wrong number of fields, or one that does not fit.

        The caller makes the device of the stream current.

        Raises:
            ArgumentValueError: `entry_point` is none of the module's.
        """
        layout, function = self._entry(entry_point)
        # The struct of each call is a fresh bytes object, whose address ctypes passes without a copy. That is as fast
        # as packing into one kept buffer, and two threads can't overwrite each other's pointers.
        pack, size, abi, fail = layout.pack, layout.size, ABI, self._fail

        def call(*fields: int | float) -> None:
            status = function(pack(size, abi, *fields))
            if status:
                fail(entry_point, status)

        call.__name__ = call.__qualname__ = entry_point
        return call

    def bind_parts(self, entry_point: str) -> tuple[Callable[..., bytes], Callable[[bytes], None]]:
        """Return `bind`'s function in two: one packs the fields, the other one calls with what was packed.

        For who makes one call many times: what was packed may be passed as often as its fields are right.

        Raises:
            ArgumentValueError: `entry_point` is none of the module's.
        """
        layout, function = self._entry(entry_point)
        fail = self._fail

        def run(packed: bytes) -> None:
            status = function(packed)
            if status:
                fail(entry_point, status)

        return partial(layout.pack, layout.size, ABI), run

    def _entry(self, entry_point: str) -> tuple[struct.Struct, Callable[..., Any]]:
        if entry_point not in self.spec.entry_points:
            raise ArgumentValueError(
                f"module {self.spec.name!r} has no entry point {entry_point!r}; it has "
                f"{', '.join(self.spec.entry_points)}"
            )
        layout = struct.Struct(self.spec.structs[self.spec.entry_points[entry_point]])
        return layout, self._symbol(entry_point, ctypes.c_int, ctypes.c_char_p)

    def preload(self, device: torch.device) -> None:
        """Load every kernel on `device`; the first launch of one would otherwise wait for the whole device.

        Raises:
            CudaCallError: a kernel has no code for this device, or CUDA does not work here.
            JitMissingError: the current stream is being captured.
        """
        device = _cuda.normalize_device(device)
        index = device.index
        if index in self._preloaded:
            return
        if _cuda.is_capturing():
            raise JitMissingError(
                f"module {self.spec.name!r} is not loaded on {device} yet, and the current stream is being captured "
                "into a CUDA graph, which loading would break. Make the call once before capturing"
            )
        with _cuda.device_guard(device):
            status = self._preload(index)
        if status:
            self._fail(self.spec.preload_symbol, int(status))
        self._preloaded.add(index)

    def last_error(self) -> str:
        """Return the text of the last failure of this thread in this library."""
        text = self._last_error()
        return text.decode(errors="replace") if isinstance(text, bytes) else ""

    def _fail(self, what: str, status: int) -> NoReturn:
        text = self.last_error()
        if status >= CUDA_BASE:
            code = status - CUDA_BASE
            if code == _INSUFFICIENT_DRIVER:
                nvcc = toolchain.version_of(str(self.artifact.inputs.get("nvcc")))
                text += (
                    f". The library was built by nvcc {nvcc}; where there is a GPU, its driver is older than that: "
                    "build with an older toolkit (COMM_NVCC) or update the driver"
                )
            raise CudaCallError(what, code, text)
        if status == Status.ERROR_ARGUMENT:
            raise ArgumentValueError(f"{what}: {text}")
        if status == Status.ERROR_UNSUPPORTED:
            raise UnsupportedError(f"{what}: {text}")
        if status == Status.ERROR_BROKEN:
            raise TransportError(f"{what}: {text}")
        raise JitCacheError(f"{what} failed with status {status}: {text} (library: {self.artifact.path})")


assert PREFIX == "II"  # what `Module.bind` packs before the caller's fields

_loaded: dict[tuple[ModuleSpec, str], Module] = {}
_remembered: dict[tuple[ModuleSpec, tuple[str, ...]], Module] = {}
_lock = threading.RLock()


def open_library(spec: ModuleSpec, artifact: Artifact) -> Module:
    """Return the library of `artifact`, loaded and checked; once a process.

    Raises:
        JitCacheError: it can't be loaded, or it is not what `spec` describes.
    """
    with _lock:
        # By description too: another one of the same library has still to be compared with it.
        which = spec, str(artifact.path)
        if which not in _loaded:
            _loaded[which] = Module(spec, artifact)
        return _loaded[which]


def load(
    spec: ModuleSpec,
    device: torch.device | None = None,
    *,
    archs: Sequence[str] | None = None,
    timeout_s: float | None = None,
) -> Module:
    """Return the module of `spec`, built if need be, loaded, checked, and with every kernel loaded on `device`.

    Not for the launch path: do it before the communicator is armed. Within a process a module stays what it was when
    it was first loaded, whatever happens to its sources.

    Args:
        spec: the module.
        device: the CUDA device that it is for; it decides the architecture unless ``COMM_CUDA_ARCH_LIST`` does. None
            loads the library without touching CUDA.
        archs: architectures instead of those, as ``COMM_CUDA_ARCH_LIST`` names them.
        timeout_s: seconds for waiting and building together; None is ``COMM_JIT_TIMEOUT_S``.

    Raises:
        JitMissingError: it is not built and must not be built now.
        JitBuildError: it can't be built.
        JitCacheError: the cache can't be used, or what is in it does not belong to this package.
        CudaCallError: its kernels can't be loaded on `device`.
        UnsupportedError: neither a device nor a list says for which architecture.
    """
    if device is not None and device.type != "cuda":
        raise ArgumentTypeError(f"device must be a CUDA device or None, got {device}")
    chosen = arch_names.choose(device) if archs is None else arch_names.parse_list(arch_names.join(archs), "archs")
    with _lock:
        module = _remembered.get((spec, chosen))
    if module is None:
        capability = None if device is None else arch_names.capability_of(device)
        # Outside the lock: another thread's build of another module must not wait for this one.
        artifact = obtain(spec, chosen, capability=capability, timeout_s=timeout_s)
        if not artifact.path.exists():
            # Somebody is cleaning the cache at this moment.
            artifact = obtain(spec, chosen, capability=capability, timeout_s=timeout_s)
        module = open_library(spec, artifact)
        with _lock:
            _remembered[spec, chosen] = module
    if device is not None:
        module.preload(device)
    return module
