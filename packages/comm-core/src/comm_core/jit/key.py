"""The identity of a build: everything that decides what the compiler makes, and nothing else. Pure.

A library's key is the digest of its *inputs*, which its manifest keeps in clear. Contents count, never paths or
times: two checkouts of the same sources share one library, and a changed comment makes a new one.

The compiler sees a copy of exactly the files that were read here (see build.py), so a header that the scanner missed
is a compile error and not a stale library.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from comm_core._json import Json, JsonObject, canonical
from comm_core.errors import JitBuildError
from comm_core.jit import abi
from comm_core.jit.spec import INCLUDE, ModuleSpec

__all__ = ["FORMAT", "Snapshot", "differences", "explain", "inputs", "key", "same_code", "scan", "snapshot"]

FORMAT = 1
"""Number of the cache's layout and of the meaning of the inputs; raising it leaves older caches alone."""

COMPILE_FLAGS: tuple[str, ...] = (
    "-std=c++17",
    "-O3",
    "-DNDEBUG",
    # Line numbers in profilers and in compute-sanitizer's reports; about 1 KB a kernel, no instruction changes.
    "-lineinfo",
    # Registers and spills of every kernel go into the build log, where tests read them.
    "-Xptxas=-v",
    "-Xcompiler=-fPIC",
    "-Xcompiler=-fvisibility=hidden",
    "-Xcompiler=-Wall",
)
"""What every source is compiled with, before the module's own flags. No fast math: codecs own their rounding."""

LINK_FLAGS: tuple[str, ...] = (
    "-shared",
    # The library brings its own CUDA runtime, and finds the driver through it: torch's may be another version.
    "--cudart=static",
    # A missing symbol is an error here, not when some rank loads the library.
    "-Xlinker=-z,defs",
    "-Xlinker=--as-needed",
    # A library that somebody loaded globally must not answer calls inside this one.
    "-Xlinker=-Bsymbolic",
    "-Xlinker=--exclude-libs=ALL",
)
"""What every library is linked with."""

_TOOLCHAIN = ("environment", "host_compiler", "libc", "nvcc")
"""Inputs that say who compiled, not what."""


@dataclass(frozen=True)
class Snapshot:
    """The files of a module as they were read once: what is hashed is what is compiled.

    Attributes:
        files: path in the build folder -> contents, sources and headers alike.
        sources: the paths that are compiled, in order.
    """

    files: Mapping[str, bytes]
    sources: tuple[str, ...]


_COMMENT = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])'""", re.DOTALL)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include(?:_next)?\b[ \t]*(.*)$", re.MULTILINE)


def scan(name: str, text: str, packages: Sequence[str]) -> list[str]:
    """Return the project headers that `text` includes, in order, as ``"comm_core/abi.h"``.

    Conditions are not evaluated: a header that is only included for some architecture counts as well.

    Args:
        name: of the file, for errors.
        text: its contents.
        packages: import names whose headers it may include; other angle-bracket includes are the system's.

    Raises:
        JitBuildError: an include that can't be followed.
    """
    text = _COMMENT.sub(_blank_comment, text.replace("\\\n", ""))
    found: list[str] = []
    for match in _INCLUDE.finditer(text):
        what = match[1].strip()
        where = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
        if what.startswith('"'):
            raise JitBuildError(
                f"{where}: #include {what}: project headers are included as <package/header>, so that their place "
                "does not depend on who includes them"
            )
        if not (what.startswith("<") and ">" in what):
            raise JitBuildError(f"{where}: #include {what}: a computed include can't be followed; name the header")
        header = what[1 : what.index(">")]
        package = header.split("/", 1)[0]
        if package not in packages:
            if package.startswith("comm_"):
                raise JitBuildError(
                    f"{where}: #include <{header}>: {package!r} is not among this module's packages "
                    f"({', '.join(packages)}); add it to `includes`"
                )
            continue
        if ".." in header.split("/"):
            raise JitBuildError(f"{where}: #include <{header}>: '..' leaves the package's include folder")
        found.append(header)
    return found


def _blank_comment(match: re.Match[str]) -> str:
    # Strings stay: "http://…" is no comment, and `#include "x"` is to be seen. Lines keep their numbers.
    return match[0] if match[0][0] in "\"'" else " " + "\n" * match[0].count("\n")


def snapshot(spec: ModuleSpec) -> Snapshot:
    """Read a module's sources and all project headers that they reach.

    Raises:
        JitBuildError: an include can't be followed or leads nowhere.
        PluginError: a source is missing.
    """
    files: dict[str, bytes] = {}
    sources = tuple(f"{spec.package}/{source}" for source in spec.sources)
    for path, source in zip(sources, spec.sources, strict=True):
        files[path] = spec.read_source(source)
    pending = list(sources)
    while pending:
        path = pending.pop()
        for header in scan(path, files[path].decode(errors="replace"), spec.include_packages):
            copy = f"{INCLUDE}/{header}"
            if copy in files:
                continue
            contents = spec.read_header(header)
            if contents is None:
                raise JitBuildError(
                    f"module {spec.name!r}: {path} includes <{header}>, which the installed package "
                    f"{header.split('/', 1)[0]!r} does not have: is it the version that this plugin needs?"
                )
            files[copy] = contents
            pending.append(copy)
    return Snapshot(dict(sorted(files.items())), sources)


def inputs(
    spec: ModuleSpec,
    files: Snapshot,
    archs: Sequence[str],
    *,
    machine: str,
    nvcc: str | None,
    host_compiler: str | None,
    libc: str | None,
    environment: Mapping[str, str] | None = None,
) -> JsonObject:
    """Return everything that a library is made from, as JSON.

    Args:
        spec: the module.
        files: what it is compiled from.
        archs: normalized.
        machine: processor architecture, as in ``uname -m``.
        nvcc: text of its version; None where there is none.
        host_compiler: likewise.
        libc: likewise; a library for a newer one can't be loaded on an older system that shares the cache.
        environment: variables that add flags behind our back.
    """
    return {
        "format": FORMAT,
        "abi": abi.ABI,
        "module": spec.name,
        "machine": machine,
        "archs": list(archs),
        "sources": list(files.sources),
        "files": {name: hashlib.sha256(contents).hexdigest() for name, contents in files.files.items()},
        "compile_flags": [*COMPILE_FLAGS, *spec.flags],
        "link_flags": list(LINK_FLAGS),
        "exports": list(spec.exports),
        "nvcc": nvcc,
        "host_compiler": host_compiler,
        "libc": libc,
        "environment": dict(environment or {}),
    }


def key(value: JsonObject) -> str:
    """Return the digest that stands for `inputs`: 20 hexadecimal digits."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:20]


def differences(old: JsonObject, new: JsonObject, ignore: Iterable[str] = ()) -> list[str]:
    """Return the names of the inputs that differ."""
    skip = set(ignore)
    return [name for name in sorted({*old, *new} - skip) if old.get(name) != new.get(name)]


def same_code(old: JsonObject, new: JsonObject) -> bool:
    """Return whether two inputs are one set of sources and flags, whoever compiled them and for which GPUs."""
    return not differences(old, new, (*_TOOLCHAIN, "archs"))


def explain(old: JsonObject, new: JsonObject) -> list[str]:
    """Return what differs between the inputs of two builds, in words; empty if nothing does.

    Args:
        old: of a library that exists.
        new: of the one that is wanted.
    """
    found: list[str] = []
    for name in differences(old, new):
        before, after = old.get(name), new.get(name)
        teller = _TELLERS.get(name)
        found += [f"{_TITLES.get(name, name)}: {_show(before)} is now {_show(after)}"] if teller is None else teller(
            before, after
        )  # fmt: skip
    return found


_TITLES: dict[str, str] = {
    "abi": "number of the C interface",
    "archs": "architectures",
    "format": "format of the cache",
    "host_compiler": "host compiler",
    "libc": "C library",
    "machine": "processor",
}


def _show(value: Json) -> str:
    if value is None:
        return "none"
    if isinstance(value, str):
        return " ".join(value.split())
    if isinstance(value, Sequence):
        return ", ".join(map(str, value))
    return str(value)


def _tell_nvcc(before: Json, after: Json) -> list[str]:
    # The first lines are a title and a copyright; the last two have the version and the build.
    def short(value: Json) -> str:
        return _show(value[value.find("release") :] if isinstance(value, str) and "release" in value else value)

    return [f"nvcc: {short(before)} is now {short(after)}"]


def _tell_files(before: Json, after: Json) -> list[str]:
    old, new = cast("Mapping[str, str]", before or {}), cast("Mapping[str, str]", after or {})
    told = [f"{name} is new" for name in sorted(new.keys() - old.keys())]
    told += [f"{name} is no longer used" for name in sorted(old.keys() - new.keys())]
    return told + [f"{name} has changed" for name in sorted(old.keys() & new.keys()) if old[name] != new[name]]


def _tell_list(what: str) -> Callable[[Json, Json], list[str]]:
    def tell(before: Json, after: Json) -> list[str]:
        old, new = cast("Sequence[str]", before or ()), cast("Sequence[str]", after or ())
        told = [f"{what} {item!r} was added" for item in new if item not in old]
        told += [f"{what} {item!r} was removed" for item in old if item not in new]
        return told or [f"the order of the {what}s has changed: {' '.join(old)} is now {' '.join(new)}"]

    return tell


def _tell_environment(before: Json, after: Json) -> list[str]:
    old, new = cast("Mapping[str, str]", before or {}), cast("Mapping[str, str]", after or {})
    return [
        f"{name}: {old.get(name, '(unset)')!r} is now {new.get(name, '(unset)')!r}"
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    ]


_TELLERS: dict[str, Callable[[Json, Json], list[str]]] = {
    "compile_flags": _tell_list("compiler flag"),
    "environment": _tell_environment,
    "exports": _tell_list("exported name"),
    "files": _tell_files,
    "link_flags": _tell_list("linker flag"),
    "nvcc": _tell_nvcc,
    "sources": _tell_list("source"),
}
