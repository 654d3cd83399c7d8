"""The CUDA runtime by ctypes: the few calls that shared buffers need, with errors instead of codes.

The library is the one that torch has loaded already, so that both see the same device and the same primary context.
Finding and loading it touches no device; a machine without CUDA finds none and is told where it was looked for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from comm_core.errors import ArgumentTypeError, ArgumentValueError, CudaCallError, UnsupportedError

__all__ = ["CudaRTLibrary", "Function", "Pointer", "cudaIpcMemHandle_t"]

Pointer: TypeAlias = "int | ctypes.c_void_p"
"""An address: as an integer, or as `cudaMalloc` and `cudaIpcOpenMemHandle` return it (``.value`` is the integer)."""

_MEMCPY_DEFAULT = 4
"""cudaMemcpyDefault: the runtime tells host from device by the address."""

_LAZY_ENABLE_PEER_ACCESS = 1
"""cudaIpcMemLazyEnablePeerAccess, the only flag that cudaIpcOpenMemHandle takes."""

_ADDRESS_RANGE_VERSION = 3020
"""The CUDA version whose cuMemGetAddressRange has 64-bit sizes."""

_LIBRARY_NAME = re.compile(r"libcudart(-[0-9a-f]+)?\.so(\.[0-9]+)*")
"""Also the renamed copies (``libcudart-d0da41ae.so.11.0``) that wheels used to ship."""


class cudaIpcMemHandle_t(ctypes.Structure):
    """An exported allocation: 64 opaque bytes, ``bytes(handle)`` to send them."""

    # The size is part of the calling convention (the handle is passed by value), so it must be CUDA's 64 exactly.
    _fields_ = [("reserved", ctypes.c_ubyte * 64)]


class Function(NamedTuple):
    """One function of the runtime: what ctypes needs to call it."""

    name: str
    restype: Any
    argtypes: tuple[Any, ...]


_ERROR = ctypes.c_int
_OUT = ctypes.POINTER(ctypes.c_void_p)


class CudaRTLibrary:
    """The CUDA runtime library.

    Args:
        so_file: path of the library, or None for the one that is loaded in this process, else the copy that torch or
            its CUDA wheels brought.

    Raises:
        ArgumentTypeError: `so_file` is no string.
        UnsupportedError: there is no such library, or it lacks a function; the text says what was looked for.

    Every method that calls CUDA raises `CudaCallError` with the call, the code and CUDA's own text. Calls act on the
    current device of the calling thread, which is torch's current device too.
    """

    exported_functions: tuple[Function, ...] = (
        Function("cudaSetDevice", _ERROR, (ctypes.c_int,)),
        Function("cudaGetDevice", _ERROR, (ctypes.POINTER(ctypes.c_int),)),
        Function("cudaGetDeviceCount", _ERROR, (ctypes.POINTER(ctypes.c_int),)),
        Function("cudaDeviceSynchronize", _ERROR, ()),
        Function("cudaDeviceReset", _ERROR, ()),
        Function("cudaGetLastError", _ERROR, ()),
        Function("cudaGetErrorString", ctypes.c_char_p, (_ERROR,)),
        Function("cudaMalloc", _ERROR, (_OUT, ctypes.c_size_t)),
        Function("cudaFree", _ERROR, (ctypes.c_void_p,)),
        Function("cudaMemset", _ERROR, (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)),
        Function("cudaMemcpy", _ERROR, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)),
        Function("cudaIpcGetMemHandle", _ERROR, (ctypes.POINTER(cudaIpcMemHandle_t), ctypes.c_void_p)),
        Function("cudaIpcOpenMemHandle", _ERROR, (_OUT, cudaIpcMemHandle_t, ctypes.c_uint)),
        Function("cudaIpcCloseMemHandle", _ERROR, (ctypes.c_void_p,)),
    )
    """What must be in the library."""

    def __init__(self, so_file: str | None = None) -> None:
        if so_file is not None and not isinstance(cast("object", so_file), str):
            raise ArgumentTypeError(f"so_file must be a path as str or None, got {type(so_file).__name__}")
        self.so_file = _find_library() if so_file is None else so_file
        """Path of the library."""
        try:
            # A library object of its own, so that the types set below are not those of somebody else's. It is never
            # unloaded: the driver keeps addresses into it.
            self._library = ctypes.CDLL(self.so_file)
        except OSError as error:
            raise UnsupportedError(f"the CUDA runtime {self.so_file!r} can't be loaded: {error}") from error
        self._functions = {function.name: self._bind(function) for function in self.exported_functions}
        self._address_range: Callable[..., int] | None = None

    def _bind(self, function: Function) -> Callable[..., Any]:
        try:
            bound = getattr(self._library, function.name)
        except AttributeError:
            raise UnsupportedError(f"{self.so_file!r} is no CUDA runtime: it has no {function.name}") from None
        bound.restype = function.restype
        bound.argtypes = list(function.argtypes)
        return bound

    def CUDART_CHECK(self, result: int, call: str = "a CUDA call") -> None:
        """Raise `CudaCallError` unless `result` is 0; `call` names the function in the text."""
        if result == 0:
            return
        # The runtime also remembers the code, and torch's next kernel launch would report it as its own failure.
        self._functions["cudaGetLastError"]()
        raise CudaCallError(call, result, self.cudaGetErrorString(result))

    def _call(self, name: str, *arguments: object) -> None:
        self.CUDART_CHECK(cast("int", self._functions[name](*arguments)), name)

    def cudaGetErrorString(self, error: int) -> str:
        """Return CUDA's text for an error code."""
        text = cast("bytes | None", self._functions["cudaGetErrorString"](_integer("error", error)))
        return (text or b"unrecognized error code").decode("utf-8", "replace")

    def cudaSetDevice(self, device: int) -> None:
        """Make `device` current for this thread."""
        self._call("cudaSetDevice", _integer("device", device))

    def cudaGetDevice(self) -> int:
        """Return the ordinal of this thread's current device."""
        device = ctypes.c_int(-1)
        self._call("cudaGetDevice", ctypes.byref(device))
        return device.value

    def cudaGetDeviceCount(self) -> int:
        """Return how many devices this process sees."""
        count = ctypes.c_int(0)
        self._call("cudaGetDeviceCount", ctypes.byref(count))
        return count.value

    def cudaDeviceSynchronize(self) -> None:
        """Wait for all work of the current device; an error of earlier work is raised here."""
        self._call("cudaDeviceSynchronize")

    def cudaDeviceReset(self) -> None:
        """Destroy the current device's context, with everything that torch has in it."""
        self._call("cudaDeviceReset")

    def cudaMalloc(self, size: int) -> ctypes.c_void_p:
        """Allocate `size` bytes (at least 1) on the current device; the content is undefined."""
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), _integer("size", size, least=1))
        return pointer

    def cudaFree(self, devPtr: Pointer) -> None:
        """Free what `cudaMalloc` returned. No other process may have it mapped: CUDA does not check that."""
        self._call("cudaFree", _pointer("devPtr", devPtr))

    def cudaMemset(self, devPtr: Pointer, value: int, count: int) -> None:
        """Set `count` bytes to the low byte of `value`. Device memory: returns before it is done."""
        self._call(
            "cudaMemset", _pointer("devPtr", devPtr), _integer("value", value), _integer("count", count, least=0)
        )

    def cudaMemcpy(self, dst: Pointer, src: Pointer, count: int, kind: int = _MEMCPY_DEFAULT) -> None:
        """Copy `count` bytes; `kind` is CUDA's cudaMemcpyKind, by default told by the addresses."""
        self._call(
            "cudaMemcpy",
            _pointer("dst", dst),
            _pointer("src", src),
            _integer("count", count, least=0),
            _integer("kind", kind),
        )

    def cudaIpcGetMemHandle(self, devPtr: Pointer) -> cudaIpcMemHandle_t:
        """Export an allocation, given its base address; `memory_range` tells the base of any address."""
        handle = cudaIpcMemHandle_t()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), _pointer("devPtr", devPtr))
        return handle

    def cudaIpcOpenMemHandle(self, handle: cudaIpcMemHandle_t | bytes) -> ctypes.c_void_p:
        """Map another process's allocation for the current device; close it with `cudaIpcCloseMemHandle`.

        Args:
            handle: what the other process's `cudaIpcGetMemHandle` returned, or its 64 bytes.
        """
        if isinstance(handle, bytes):
            if len(handle) != ctypes.sizeof(cudaIpcMemHandle_t):
                raise ArgumentValueError(f"handle must have 64 bytes, got {len(handle)}")
            handle = cudaIpcMemHandle_t.from_buffer_copy(handle)
        if not isinstance(cast("object", handle), cudaIpcMemHandle_t):
            raise ArgumentTypeError(f"handle must be a cudaIpcMemHandle_t or bytes, got {type(handle).__name__}")
        pointer = ctypes.c_void_p()
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), handle, _LAZY_ENABLE_PEER_ACCESS)
        return pointer

    def cudaIpcCloseMemHandle(self, devPtr: Pointer) -> None:
        """Unmap what `cudaIpcOpenMemHandle` returned."""
        self._call("cudaIpcCloseMemHandle", _pointer("devPtr", devPtr))

    def memory_range(self, devPtr: Pointer) -> tuple[int, int]:
        """Return base address and bytes of the allocation that `devPtr` lies in.

        A handle maps the whole allocation, so whoever exports an address that is not its base must send the offset
        along.

        Raises:
            UnsupportedError: this runtime can't be asked.
        """
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        address = _pointer("devPtr", devPtr).value or 0
        code = self._driver_address_range()(ctypes.byref(base), ctypes.byref(size), address)
        self.CUDART_CHECK(code, "cuMemGetAddressRange")
        return base.value, size.value

    def _driver_address_range(self) -> Callable[..., int]:
        """Return the driver's cuMemGetAddressRange, as the runtime hands it out."""
        if self._address_range is None:
            found, status = ctypes.c_void_p(), ctypes.c_int(-1)
            symbol, flags = b"cuMemGetAddressRange", ctypes.c_ulonglong(0)
            # CUDA 12.5 has a form that takes a version; the older one goes by the runtime's own, and the status that
            # CUDA 12 added to it is ignored by CUDA 11.
            if hasattr(self._library, "cudaGetDriverEntryPointByVersion"):
                name, version = "cudaGetDriverEntryPointByVersion", (ctypes.c_uint(_ADDRESS_RANGE_VERSION),)
            else:
                name, version = "cudaGetDriverEntryPoint", ()
            entry_point = getattr(self._library, name, None)
            if entry_point is None:
                raise UnsupportedError(f"{self.so_file!r} has no {name}, so it can't tell what an address belongs to")
            entry_point.restype = ctypes.c_int
            code = entry_point(symbol, ctypes.byref(found), *version, flags, ctypes.byref(status))
            self.CUDART_CHECK(cast("int", code), name)
            if not found.value:
                raise UnsupportedError(f"the CUDA driver has no {symbol.decode()} for {self.so_file!r}")
            prototype = ctypes.CFUNCTYPE(
                ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64
            )
            self._address_range = cast("Callable[..., int]", prototype(found.value))
        return self._address_range

    @contextmanager
    def device(self, device: int) -> Generator[None, None, None]:
        """Make `device` current inside a ``with`` block, and the one that was current before it again afterwards."""
        before = self.cudaGetDevice()
        if before != device:
            self.cudaSetDevice(device)
        try:
            yield
        finally:
            if before != device:
                self.cudaSetDevice(before)


def _integer(name: str, value: object, *, least: int | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if least is not None and value < least:
        raise ArgumentValueError(f"{name} must be at least {least}, got {value}")
    return value


def _pointer(name: str, value: object) -> ctypes.c_void_p:
    if isinstance(value, ctypes.c_void_p):
        return value
    address = _integer(name, value, least=0)
    if address >> 64:
        raise ArgumentValueError(f"{name} must be an address, got {address:#x}")
    return ctypes.c_void_p(address)


def _find_library() -> str:
    loaded = _loaded_libraries()
    if loaded:
        return loaded[0]
    searched = ["libraries loaded in this process (/proc/self/maps)"]
    for pattern_folder in _wheel_folders():
        found = sorted(path for path in pattern_folder.glob("libcudart*") if _LIBRARY_NAME.fullmatch(path.name))
        if found:
            # libcudart.so, .so.12 and .so.12.9 are one library; the longest name is the file itself.
            return str(max(found, key=lambda path: len(path.name)))
        searched.append(str(pattern_folder))
    raise UnsupportedError(
        "there is no CUDA runtime (libcudart) here: this needs a build of torch with CUDA. Looked for it in: "
        + "; ".join(searched)
    )


def _loaded_libraries(maps: Path = Path("/proc/self/maps")) -> list[str]:
    """Return the paths of the CUDA runtimes that this process has loaded, first loaded first in address order."""
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    # address, permissions, offset, device and inode, then the path, which may hold spaces.
    paths = (line.split(maxsplit=5)[5] for line in lines if "libcudart" in line and len(line.split(maxsplit=5)) == 6)
    return list(dict.fromkeys(path for path in paths if _LIBRARY_NAME.fullmatch(Path(path).name)))


def _wheel_folders() -> list[Path]:
    """Return where torch and NVIDIA's wheels keep the runtime, without importing either."""
    folders: list[Path] = []
    for package, places in (("torch", ("lib",)), ("nvidia", ("cuda_runtime/lib", "cu13/lib", "cu12/lib"))):
        spec = importlib.util.find_spec(package)
        for root in (spec and spec.submodule_search_locations) or ():
            folders += [Path(root) / place for place in places]
    return folders
