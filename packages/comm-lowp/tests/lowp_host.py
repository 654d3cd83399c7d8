"""The kernels, compiled for the host: their code runs on CPU tensors, one fiber a CUDA thread (fiber_cuda.h)."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import comm_core
import comm_lowp
from comm_core import _cuda
from comm_core.jit import Module
from comm_core.jit.cache import Artifact
from comm_core.testing.host_modules import FIBER_FLAGS, FIBERS
from comm_lowp.kernels import Kernels
from comm_lowp.module import MODULE


def include_flags() -> list[str]:
    return [f"-I{Path(str(package.__file__)).parent / 'include'}" for package in (comm_lowp, comm_core)]


def compile_host(source: Path, output: Path, *flags: str) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    command = ["g++", *FIBER_FLAGS, *flags, *include_flags(), str(source), "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def build(folder: Path, *flags: str) -> Module:
    """Compile the module for the host, with more flags, and load it as every module is."""
    kernels = Path(str(comm_lowp.__file__)).parent / MODULE.sources[0]
    source = folder / "sage2.cpp"
    source.write_text(f'#include "{FIBERS}"\n#include "{kernels}"\n', encoding="utf-8")
    library = folder / "sage2.so"
    compile_host(source, library, "-shared", *flags)
    return Module(MODULE, Artifact(MODULE.name, "host", library, {"archs": []}, {}))


def host_kernels(module: Module, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """Return kernels that run on CPU tensors, at once, as on a device that has programmatic dependent launch."""
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    return Kernels(module, torch.device("cpu"), pdl=True)


def launches(module: Module) -> str:
    """Return what this thread has launched since it last asked: "1" for a kernel that may start early, else "0"."""
    ask = ctypes.CDLL(str(module.artifact.path)).host_launches
    ask.restype = ctypes.c_uint64
    return bin(ask())[3:]
