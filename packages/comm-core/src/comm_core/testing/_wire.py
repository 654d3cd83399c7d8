"""What travels between a rank pool and its processes: framed messages, functions by file, and exceptions.

Plain pickle is not enough. A test module that pytest imported with ``--import-mode=importlib`` can't be imported by
its name in another process, and many exceptions (every one whose ``__init__`` takes more than its message) pickle
without complaint and fail when they are read.
"""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from comm_core.errors import ArgumentValueError

__all__ = ["FunctionRef", "Inbox", "frame", "pack_exception", "unpack_exception"]

_HEADER = struct.Struct("<Q")
_MAIN_ALIAS = "__rank_main__"


def frame(message: object) -> bytes:
    """Return `message` pickled, behind its length."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload)) + payload


class Inbox:
    """Collects the bytes of a stream and yields whole messages; half a message is simply not there yet."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes."""
        self._data += data

    def pop(self) -> tuple[Any, ...] | None:
        """Return the next whole message, or None."""
        if len(self._data) < _HEADER.size:
            return None
        (length,) = _HEADER.unpack_from(self._data)
        end = _HEADER.size + length
        if len(self._data) < end:
            return None
        payload = bytes(memoryview(self._data)[_HEADER.size : end])
        del self._data[:end]
        return pickle.loads(payload)


@dataclass(frozen=True)
class FunctionRef:
    """A module-level function, named by module, file and qualified name, that another process can load.

    Use it to pass a function as an *argument* of a pool's run; the function that runs is converted by the pool.
    """

    module: str
    path: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionRef:
        """Return the reference of `function`.

        Raises:
            ArgumentValueError: another process could not find it: a lambda, a nested function, a bound method, a
                partial, or something whose module has no file.
        """
        name = getattr(function, "__qualname__", None)
        module_name = getattr(function, "__module__", None)
        module = sys.modules.get(module_name) if isinstance(module_name, str) else None
        if not isinstance(name, str) or module is None:
            raise ArgumentValueError(f"a rank can only run a module-level function, got {function!r}")
        path = getattr(module, "__file__", None)
        found: object = module
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not function or not isinstance(path, str):
            raise ArgumentValueError(
                f"{module.__name__}.{name} can't be loaded by another process: a rank can only run a function that a "
                "file defines at its top level, under that name (no lambda, nested function or bound method)"
            )
        return cls(module.__name__, str(Path(path).resolve()), name)

    def resolve(self) -> Callable[..., Any]:
        """Load the module, once a process, and return the function."""
        found: Any = _load(self.module, self.path)
        for part in self.qualname.split("."):
            found = getattr(found, part)
        return cast("Callable[..., Any]", found)

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.qualname}"


def _load(name: str, path: str) -> ModuleType:
    alias = _MAIN_ALIAS if name == "__main__" else name
    loaded = sys.modules.get(alias)
    if loaded is not None:
        origin = getattr(loaded, "__file__", None)
        if isinstance(origin, str) and Path(origin).resolve() == Path(path):
            return loaded
        raise ImportError(f"module {alias!r} is already loaded here from {origin!r}, not from {path!r}")
    if _importable(alias, path):
        return importlib.import_module(alias)
    spec = importlib.util.spec_from_file_location(alias, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path!r} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    # Under the same name as in the sending process, or a class of that module can't be pickled in either direction.
    _register(alias, module)
    if name == "__main__":
        # What the script defines is pickled as __main__.X; its `if __name__ == "__main__"` part must not run here.
        sys.modules["__main__"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[alias]
        raise
    return module


def _importable(name: str, path: str) -> bool:
    """Return whether a plain import of `name` would load exactly this file."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return False
    return spec is not None and spec.origin is not None and Path(spec.origin).resolve() == Path(path)


def _register(name: str, module: ModuleType) -> None:
    """Enter `module`, and empty parents where there are none: unpickling imports the first part of the name."""
    parts = name.split(".")
    for end in range(1, len(parts)):
        parent = ".".join(parts[:end])
        if parent not in sys.modules:
            placeholder = ModuleType(parent)
            placeholder.__path__ = []
            sys.modules[parent] = placeholder
    sys.modules[name] = module


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = cls.__new__(cls, *args)
    error.args = args
    vars(error).update(state)
    return error


def _survives(value: object) -> bool:
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:
        return False
    return True


def pack_exception(error: BaseException) -> bytes:
    """Return `error` in a form from which another process can rebuild it: its type, arguments and attributes.

    The traceback, the cause and the context are not part of it; what can't be pickled is replaced by its ``repr``.
    """
    try:
        data = pickle.dumps(error)
        copy = pickle.loads(data)
        if type(copy) is type(error) and copy.args == error.args:
            return data
    except Exception:
        pass  # The usual case of an `__init__` that wants more than `args`: go round it below.
    args = tuple(arg if _survives(arg) else repr(arg) for arg in error.args)
    state = {name: value for name, value in vars(error).items() if _survives(value)}
    packed = (_rebuild, type(error), args, state)
    if _survives(packed):
        return pickle.dumps(packed)
    return pickle.dumps(RuntimeError(f"{type(error).__module__}.{type(error).__qualname__}: {error}"))


def unpack_exception(data: bytes) -> BaseException:
    """Return the exception that `pack_exception` packed; a RuntimeError if its class is not here."""
    try:
        value = pickle.loads(data)
        if isinstance(value, tuple):
            rebuild, *parts = cast("tuple[Any, ...]", value)
            value = rebuild(*parts)
    except Exception as error:
        return RuntimeError(f"a rank raised an exception that can't be rebuilt here: {error}")
    return cast("BaseException", value)
