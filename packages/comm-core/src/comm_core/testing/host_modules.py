"""Modules compiled for the host, for tests without a GPU: ranks are threads, and device memory is host memory.

A package gives a header with its kernels as host functions; ``host_cuda.h`` beside this file is what the entry points
need of the CUDA runtime. Entry points, structs, signals and deadlines are then the real ones::

    path = compile_for_host(SPEC, Path(comm_nvlink.__file__).parent, HEADER, tmp_path)
    module = Module(SPEC, Artifact(SPEC.name, "host", path, {"archs": []}, {}))
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import comm_core
from comm_core.jit.spec import ModuleSpec

__all__ = ["FIBERS", "FIBER_FLAGS", "HOST_WINDOWS", "compile_fibers", "compile_for_host", "compile_with_fibers"]

_CORE = Path(comm_core.__file__).parent
HOST_WINDOWS = Path(__file__).with_name("host_windows.h")
"""The kernels of windows as host functions."""

FIBERS = Path(__file__).with_name("fiber_cuda.h")
"""CUDA on a host, for kernels that run as they are."""
FIBER_FLAGS = (
    *("-std=c++17", "-O2", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-fPIC", "-g1"),
    *("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-crossjumping", "-fno-tree-tail-merge"),
    "-fcf-protection=none",
    *("-Wall", "-Wno-unknown-pragmas", "-Wno-unused-function", "-Wno-maybe-uninitialized", "-Werror"),
)
"""Without contraction, as the intrinsics on the device; warnings of unrolling mean nothing here.

The header walks up a thread's calls to know where it is, and names that by lines; so calls stay calls, and two of
them are not made one. It counts the no-ops that kernels begin with.
"""

_LAUNCH = re.compile(r"([\w:]+)<<<(.+?),([^,]+),([^,]+),([^,]+?)>>>\(", re.DOTALL)
_SECONDS = 120


def host_source(text: str, header: Path) -> tuple[str, int]:
    """Return a CUDA source with its launches as calls, after `header`; and how many launches there were."""
    calls, launches = _LAUNCH.subn(r"host_launch(\5, \2, \1, ", text)
    return f'#include "{header}"\n{calls}', launches


def compile_for_host(
    spec: ModuleSpec, package: Path, header: Path, folder: Path, *, flags: Sequence[str] = ("-w",)
) -> Path:
    """Compile a module's sources with the host's compiler; return the library.

    Args:
        spec: the module.
        package: the folder of the package that it belongs to.
        header: its kernels as host functions, which includes ``host_cuda.h``.
        folder: where the library goes.
        flags: further flags of the compiler.
    """
    made: list[str] = []
    for source in spec.sources:
        text, _ = host_source((package / source).read_text(encoding="utf-8"), header)
        made.append(str(folder / f"{spec.name}_{Path(source).stem}.cpp"))
        Path(made[-1]).write_text(text, encoding="utf-8")
    library = folder / f"{spec.name}.so"
    includes = [f"-I{_CORE / 'include'}", f"-I{_CORE.parent}", f"-I{package / 'include'}"]
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", *includes, "-o", str(library), *made, *flags]
    subprocess.run(command, check=True, timeout=_SECONDS)
    return library


def compile_with_fibers(spec: ModuleSpec, package: Path, folder: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile a module with its real kernels for the host, a fiber for each thread; return the library.

    Args:
        spec: the module.
        package: the folder of the package that it belongs to.
        folder: where the library goes.
        flags: further flags of the compiler.
    """
    text = "".join(f'#include "{package / item}"\n' for item in spec.sources)
    includes = f"-I{package / 'include'}"
    return compile_fibers(text, folder / f"{spec.name}_fibers", flags=(includes, *flags))


def compile_fibers(text: str, to: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile CUDA source text for the host, a fiber for each thread; return the library, `to` with ``.so``.

    The text begins in the second line of the file that compilers and fibers name.
    """
    source, library = to.with_suffix(".cpp"), to.with_suffix(".so")
    source.write_text(f'#include "{FIBERS}"\n{text}', encoding="utf-8")
    command = ["g++", *FIBER_FLAGS, "-shared", f"-I{_CORE / 'include'}", *flags, str(source), "-o", str(library)]
    subprocess.run(command, check=True, timeout=_SECONDS)
    return library
