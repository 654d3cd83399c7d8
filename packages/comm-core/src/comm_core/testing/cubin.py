"""What compiled modules must look like, for the tests of every package that has some. Needs nvcc, but no GPU.

@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return cubin.build(SPEC, tmp_path_factory.mktemp("jit"))

def test_the_library_is_as_it_should_be(library):
    assert cubin.problems(SPEC, library) == []
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from comm_core.errors import CommError, JitBuildError
from comm_core.jit import toolchain
from comm_core.jit.cache import Artifact
from comm_core.jit.libraries import obtain
from comm_core.jit.loader import open_library
from comm_core.jit.spec import ModuleSpec

__all__ = [
    "ARCHS",
    "KernelUsage",
    "build",
    "exported_symbols",
    "kernel_usage",
    "needed_libraries",
    "problems",
    "require_nvcc",
]

ARCHS: tuple[str, ...] = ("8.0", "8.9", "9.0a", "10.0a", "12.0a")
"""What every kernel of this project must compile for."""

_ALLOWED_LIBRARIES = re.compile(r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux[-\w]*)\.so[.\d]*")
"""The C and C++ run time. Not the driver: it is found at run time, so that a machine without it can load a module."""

_SECONDS = 60


@dataclass(frozen=True)
class KernelUsage:
    """What ptxas says about one function for one architecture.

    Attributes:
        name: mangled.
        arch: for example ``"sm_90a"``.
        kernel: whether it is a kernel; a device function that was not inlined is none.
        registers: for each thread; 0 where ptxas does not say (device functions).
        stack_bytes: of local memory for each thread: arrays with a computed index, and spills.
        spill_store_bytes: written to local memory because registers ran out.
        spill_load_bytes: read back.
    """

    name: str
    arch: str
    kernel: bool
    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def require_nvcc() -> None:
    """Skip the test where there is no compiler; in CI (``CI=true``) fail it, because there it must not be missing."""
    import pytest

    try:
        toolchain.find()
        toolchain.find_ninja()
    except JitBuildError as error:
        if os.environ.get("CI", "").lower() in ("1", "true"):
            pytest.fail(f"CI must compile the CUDA modules: {error}")
        pytest.skip(f"CUDA modules can't be compiled here: {error}")


def build(spec: ModuleSpec, folder: Path, archs: Sequence[str] = ARCHS) -> Artifact:
    """Return the library of `spec` for all of `archs`, built in a cache of its own in `folder`.

    Skips or fails like `require_nvcc` where there is no compiler.
    """
    import pytest

    require_nvcc()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMM_CACHE_DIR", str(folder))
        return obtain(spec, archs, may_build=True)


_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def kernel_usage(log: str) -> list[KernelUsage]:
    """Return what ptxas says in a build's log (``-Xptxas -v``) about every function, in order."""
    found: list[KernelUsage] = []
    kernel = arch = function = ""
    numbers: tuple[int, int, int] | None = None

    def note(registers: int) -> None:
        nonlocal numbers
        if numbers is not None:
            found.append(KernelUsage(function, arch, function == kernel, registers, *numbers))
        numbers = None

    for line in log.splitlines():
        if match := _ENTRY.search(line):
            note(0)
            kernel, arch = match[1], match[2]
        elif match := _PROPERTIES.search(line):
            note(0)
            function = match[1]
        elif match := _SPILLS.search(line):
            numbers = int(match[1]), int(match[2]), int(match[3])
        elif match := _REGISTERS.search(line):
            note(int(match[1]))
    note(0)
    return found


def exported_symbols(library: Path) -> set[str]:
    """Return the names that a shared library defines for others."""
    return {line.split()[-1] for line in _output("nm", "-D", "--defined-only", str(library)).splitlines()}


def needed_libraries(library: Path) -> set[str]:
    """Return the shared libraries that a shared library needs."""
    return set(re.findall(r"\(NEEDED\).*\[([^\]]+)\]", _output("readelf", "-d", str(library))))


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=_SECONDS).stdout


def problems(spec: ModuleSpec, library: Artifact, *, may_spill: Collection[str] = ()) -> list[str]:
    """Return what is wrong with a built library, in words; an empty list if nothing is.

    Checked: it loads and its structs have the sizes that Python packs; every kernel that it declares was compiled for
    every architecture and keeps its registers; it exports what the module lists and nothing else; it needs neither
    torch nor Python nor a CUDA library.

    Args:
        spec: the module.
        library: built with `build`.
        may_spill: parts of kernel names that are allowed to spill; the reason belongs beside the test.
    """
    found: list[str] = []
    kernels = 0
    try:
        kernels = open_library(spec, library).num_kernels
    except CommError as error:
        found.append(str(error))
    usage = kernel_usage(library.log.read_text(encoding="utf-8", errors="replace"))
    for arch in library.archs:
        compiled = {item.name for item in usage if item.kernel and item.arch == _sm(arch)}
        if len(compiled) != kernels:
            # Also a kernel that nobody preloads: its first launch would wait for the whole device.
            found.append(f"{len(compiled)} kernels were compiled for {_sm(arch)}, the module declares {kernels}")
    for item in usage:
        spilled = item.spill_store_bytes + item.spill_load_bytes
        if spilled and not any(part in item.name for part in may_spill):
            found.append(
                f"{item.name} for {item.arch} spills: {item.spill_store_bytes} bytes stored, "
                f"{item.spill_load_bytes} loaded, {item.registers} registers"
            )
    exported = exported_symbols(library.path)
    found += [f"{name} is not exported" for name in sorted(set(spec.exports) - exported)]
    found += [f"{name} is exported, and is no entry point" for name in sorted(exported - set(spec.exports))]
    needed = needed_libraries(library.path)
    return found + [f"it needs {name}" for name in sorted(needed) if not _ALLOWED_LIBRARIES.fullmatch(name)]


def _sm(arch: str) -> str:
    return "sm_" + arch.removesuffix("+PTX").replace(".", "")
