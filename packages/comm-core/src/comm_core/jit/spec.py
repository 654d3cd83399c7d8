"""ModuleSpec: what one shared library is made from, and what Python expects of it."""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING

from comm_core.errors import ArgumentValueError, PluginError
from comm_core.jit.abi import PREFIX

if TYPE_CHECKING:
    from importlib.abc import Traversable

__all__ = ["INCLUDE", "MODULE_SYMBOLS", "ModuleSpec", "specs"]

INCLUDE = "include"
"""Folder of a package that holds its headers, as ``include/<package>/…``."""

MODULE_SYMBOLS = ("comm_last_error", "comm_module_info_v1")
"""What every library exports besides its entry points and its preload function."""

_C_NAME = re.compile(r"comm_[a-z0-9]+(_[a-z0-9]+)*")
# Where headers come from is for the scanner to know: one that it can't see would not be in the key.
_FOREIGN_FLAG = re.compile(r"-I|-isystem|-include|--include|--pre-include|--system-include|-ccbin|--compiler-bindir")
_ARCH_FLAG = re.compile(r"-arch|--gpu-|-gencode|--generate-code|-code\b")


@dataclass(frozen=True)
class ModuleSpec:
    """Describes one shared library: plain data, safe to create at import.

    Everything is checked here, so that a mistake in a plugin's description breaks that plugin when it is loaded and
    not some rank in the middle of opening a communicator.

    Attributes:
        name: of the library, for example ``"comm_nvlink_exchange"``; the prefix of its preload function.
        package: import name of the package that holds the sources and owns the name.
        sources: ``.cu`` and ``.cpp`` files inside the package, each compiled by itself, for example
            ``("csrc/exchange.cu",)``.
        structs: name of each argument struct -> its native `struct` format, which begins with ``II`` (size and ABI
            number) and ends in ``0Q`` (padding as in C).
        entry_points: exported C function -> the struct that it takes a pointer to.
        includes: packages whose headers the sources may include besides the owner's and comm-core's.
        flags: for the compiler, in order, after the ones that every module gets.
        needs: (header, Debian package that has it) of what the sources include of the system's and a machine may
            lack; without it the module is not built, and the text of the error names the package.

    Raises:
        ArgumentValueError: a field can't be used.
    """

    name: str
    package: str
    sources: tuple[str, ...]
    structs: Mapping[str, str] = field(hash=False)
    entry_points: Mapping[str, str] = field(hash=False)
    includes: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for kind in ("structs", "entry_points"):
            # A copy that nobody can change behind the key's back.
            object.__setattr__(self, kind, MappingProxyType(dict(getattr(self, kind))))
        for problem in self._problems():
            raise ArgumentValueError(f"module {self.name!r} of {self.package!r}: {problem}")

    def __reduce__(self) -> tuple[type[ModuleSpec], tuple[object, ...]]:
        # A mapping proxy can't be pickled, and ranks that are spawned get their work by pickle.
        values: dict[str, object] = {item.name: getattr(self, item.name) for item in fields(self)}
        values.update(structs=dict(self.structs), entry_points=dict(self.entry_points))
        return ModuleSpec, tuple(values.values())

    def _problems(self) -> list[str]:
        found: list[str] = []
        names = (self.name, *self.structs, *self.entry_points)
        found += [f"{name!r} is no C name like comm_core_fill_v1" for name in names if not _C_NAME.fullmatch(name)]
        if not self.sources:
            found.append("it has no sources")
        for source in self.sources:
            parts = PurePosixPath(source).parts
            if source.startswith("/") or ".." in parts or PurePosixPath(source).suffix not in (".cu", ".cpp"):
                found.append(f"source {source!r} must be a .cu or .cpp file inside the package")
        for name, text in self.structs.items():
            found += [f"struct {name}: {problem}" for problem in _format_problems(text)]
        for entry, name in self.entry_points.items():
            if name not in self.structs:
                found.append(f"entry point {entry} takes {name!r}, which is not among the structs")
        for flag in self.flags:
            if _FOREIGN_FLAG.match(flag) or _ARCH_FLAG.match(flag):
                found.append(f"flag {flag!r} is not the module's to choose: headers come from `includes`, the "
                             "architectures and the host compiler from whoever builds")  # fmt: skip
        return found

    @property
    def preload_symbol(self) -> str:
        """Name of the function that loads every kernel of the library."""
        return f"{self.name}_preload_v1"

    @property
    def exports(self) -> tuple[str, ...]:
        """Every name that the library exports, sorted; nothing else leaves it."""
        return tuple(sorted({*self.entry_points, *MODULE_SYMBOLS, self.preload_symbol}))

    @property
    def include_packages(self) -> tuple[str, ...]:
        """Packages whose headers can be included: the owner, comm-core, and `includes`."""
        return tuple(dict.fromkeys((self.package, "comm_core", *self.includes)))

    @property
    def library(self) -> str:
        """File name of the library."""
        return f"{self.name}.so"

    def read_source(self, source: str) -> bytes:
        """Return the contents of one of `sources`.

        Raises:
            PluginError: the package lacks it.
        """
        return _read(self.package, source, f"module {self.name!r}")

    def read_header(self, name: str) -> bytes | None:
        """Return the contents of the header ``<name>``, or None where its package has no such file."""
        package = name.split("/", 1)[0]
        path = _at(package, f"{INCLUDE}/{name}")
        return path.read_bytes() if path.is_file() else None


def _format_problems(text: str) -> list[str]:
    if not text.startswith(PREFIX) or not text.endswith("0Q"):
        return [
            f"format {text!r} must be native, begin with {PREFIX!r} (size, ABI) and end in '0Q' (padding as in C)"
        ]
    try:
        struct.calcsize(text)
    except struct.error as error:
        return [f"format {text!r}: {error}"]
    return []


def _at(package: str, name: str) -> Traversable:
    return resources.files(package).joinpath(*name.split("/"))


def _read(package: str, name: str, what: str) -> bytes:
    path = _at(package, name)
    try:
        return path.read_bytes()
    except OSError as error:
        raise PluginError(f"{what}: package {package!r} lacks {name!r} ({error}): is it installed whole?") from error


def specs() -> dict[str, ModuleSpec]:
    """Return the modules of comm-core and of every loaded plugin: name -> spec, in order of name."""
    from comm_core.plugins import registry

    return dict(sorted(registry().modules.items()))
