"""CUDA modules compiled for the host, so that whole sessions run over threads and host memory, without a GPU.

A module's source is compiled as it is, but for its launches: ``kernel<<<grid, block, shared, stream>>>(arguments)``
becomes a call in stream order of ``kernel(arguments)``, a host function of the same name that a header of the test
provides. ``host_cuda.h`` has streams, events, graphs, copies and memory, stricter than CUDA where CUDA is silent::

    module = hosted.build(SPEC, Path(__file__).with_name("host_kernels.h"), tmp_path)
    library = hosted.fakes(module)
    library.host_fail(b"cudaGraphInstantiate", 0)
    assert library.host_alive() == 0
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.jit.spec import INCLUDE, ModuleSpec
from comm_core.windows.launch import WINDOWS

__all__ = ["CUDA_HEADER", "WINDOWS_HEADER", "build", "fakes", "windows"]

CUDA_HEADER = Path(__file__).with_name("host_cuda.h")
"""The CUDA runtime of such a module."""
WINDOWS_HEADER = Path(__file__).with_name("host_windows.h")
"""The kernels of the module of windows, whose launches its tests turn into plain calls."""

_LAUNCH = re.compile(r"([\w:]+)<<<(.*?)>>>\((.*?)\);", re.DOTALL)
_SECONDS = 120


def build(spec: ModuleSpec, kernels: Path, folder: Path, *flags: str) -> Module:
    """Return a module, compiled for the host with ``g++`` and loaded as every module is.

    Args:
        spec: the module; each of its sources is compiled by itself.
        kernels: a header that includes the module's own headers and has its kernels as host functions.
        folder: an empty one, for what is made.
        flags: for the compiler.
    """
    sources: list[Path] = []
    for name in spec.sources:
        text, launches = _LAUNCH.subn(
            r"host_launch(HOST_STREAM(\2), std::bind(\1, \3));", spec.read_source(name).decode()
        )
        assert launches or "<<<" not in text, f"{name}: a launch that is spelled otherwise"
        source = folder / f"{Path(name).stem}.cpp"
        source.write_text(f'#include "{CUDA_HEADER}"\n#include "{kernels}"\n{text}', encoding="utf-8")
        sources.append(source)
    return _compile(spec, sources, folder, ["-Wall", "-Wno-unknown-pragmas", *flags])


def windows(folder: Path) -> Module:
    """Return the module of windows for the host; its launches are plain calls, without ``host_cuda.h``."""
    text = WINDOWS.read_source("csrc/windows.cu").decode()
    source = folder / "windows.cpp"
    calls = re.sub(r"<<<.*?>>>\(", "(", text, flags=re.DOTALL)
    source.write_text(f'#include "{WINDOWS_HEADER}"\n{calls}', encoding="utf-8")
    return _compile(WINDOWS, [source], folder, ["-w"])


def _compile(spec: ModuleSpec, sources: Sequence[Path], folder: Path, flags: Sequence[str]) -> Module:
    includes = [f"-I{resources.files(package) / INCLUDE}" for package in spec.include_packages]
    library = folder / f"{spec.name}.so"
    command = ["g++", "-std=c++17", "-O1", "-fPIC", "-shared", "-pthread", *flags, *includes, "-o", str(library)]
    subprocess.run([*command, *map(str, sources)], check=True, timeout=_SECONDS)
    return Module(spec, Artifact(spec.name, "host", library, {"archs": []}, {}))


def fakes(module: Module) -> ctypes.CDLL:
    """Return the library of a module that was built here, to order failures and to count."""
    library = ctypes.CDLL(str(module.artifact.path))
    library.host_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.host_problem.restype = ctypes.c_char_p
    for name in ("host_alive", "host_copied", "host_graphs_launched"):
        getattr(library, name).restype = ctypes.c_uint64
    return library
