"""What several test files of comm-pcie need: its modules, compiled for the host; and what they share, to import.

A module's source is compiled as it is, but for its launches: ``kernel<<<grid, block, shared, stream>>>(arguments)``
becomes a call in stream order of ``kernel(arguments)``, a host function of the same name. ``host_runtime.h`` has
streams, events, graphs, copies and memory.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import comm_core
from comm_core.jit import Module, ModuleSpec
from comm_core.jit.cache import Artifact
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.windows.launch import WINDOWS
from comm_pcie import selftest
from comm_pcie.exchange import EXCHANGE
from comm_pcie.rdma.engine import VerbsApi, VerbsLibraries, load_verbs, require
from comm_pcie.selftest import SELFTEST

HERE = Path(__file__).parent
# The tests of this folder, and of that below it, import its other modules; and so do the ranks of their pools.
sys.path.insert(0, str(HERE))
_LAUNCH = re.compile(r"([\w:]+)<<<(.*?)>>>\((.*?)\);", re.DOTALL)


def emulator() -> Any:
    """The module that builds and runs the verbs emulator; it can be imported once this one is."""
    return importlib.import_module("rdma_emulator")


class Hosted(NamedTuple):
    """The modules of a communicator over ``pcie``."""

    windows: Module
    exchange: Module
    selftest: Module

    @property
    def library(self) -> ctypes.CDLL:
        """The library of the exchange, to order failures and to count."""
        library = ctypes.CDLL(str(self.exchange.artifact.path))
        library.host_fail.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.host_problem.restype = ctypes.c_char_p
        for name in ("host_alive", "host_copied", "host_graphs_launched"):
            getattr(library, name).restype = ctypes.c_uint64
        return library


def loaded(spec: ModuleSpec, library: Path) -> Module:
    return Module(spec, Artifact(spec.name, "host", library, {"archs": []}, {}))


def build(spec: ModuleSpec, kernels: Path, folder: Path, *flags: str) -> Module:
    """Compile a module with its kernels from the header `kernels`."""
    sources: list[str] = []
    for name in spec.sources:
        text, launches = _LAUNCH.subn(
            r"host_launch(HOST_STREAM(\2), std::bind(\1, \3));", spec.read_source(name).decode()
        )
        assert launches and "<<<" not in text, f"{name}: a launch that is spelled otherwise"
        source = folder / f"{Path(name).stem}.cpp"
        runtime = HERE / "host_runtime.h"
        source.write_text(f'#include "{runtime}"\n#include "{kernels}"\n{text}', encoding="utf-8")
        sources.append(str(source))
    includes = [f"-I{resources.files(package) / 'include'}" for package in spec.include_packages]
    library = folder / f"{spec.name}.so"
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wno-unknown-pragmas", "-fPIC", "-shared", "-pthread", *flags]
    subprocess.run([*command, *includes, "-o", str(library), *sources], check=True, timeout=120)
    return loaded(spec, library)


@pytest.fixture(scope="session")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Hosted:
    """The modules, compiled for the host once."""
    folder = lambda name: tmp_path_factory.mktemp(name)  # noqa: E731
    # Links of the test of links can be broken, and its two ends run at the same time.
    flags = ["-DHOST_ASYNC", "-DHOST_COPY=link_copy", '-DHOST_MAY_ACCESS(a,b)=(!link_fault("deny",a,b))']
    declared = folder("links") / "links.h"
    declared.write_text(
        "#include <stddef.h>\n"
        "static inline void link_copy(char*, const char*, size_t, int);\n"
        "static inline bool link_fault(const char*, int, int);\n"
    )
    core = Path(comm_core.__file__).parent
    return Hosted(
        loaded(WINDOWS, compile_for_host(WINDOWS, core, HOST_WINDOWS, folder("windows"))),
        build(EXCHANGE, HERE / "host_exchange.h", folder("exchange"), "-Werror"),
        build(SELFTEST, HERE / "host_selftest.h", folder("selftest"), f"-include{declared}", *flags),
    )


@pytest.fixture(scope="session")
def rdma_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where what tests of the routes over NICs need is compiled, once."""
    return emulator().session_folder(tmp_path_factory)


@pytest.fixture(scope="session")
def library(rdma_folder: Path) -> Path:
    """The emulator."""
    return emulator().build(rdma_folder)


@pytest.fixture(scope="session")
def engine_module(rdma_folder: Path) -> Module:
    """The engine, compiled for the host."""
    return emulator().engine_module(rdma_folder)


@pytest.fixture(scope="session")
def api(library: Path, engine_module: Module) -> VerbsApi:
    """The verbs as the emulator has them."""
    return require(load_verbs(VerbsLibraries(str(library), str(library)), module=engine_module))


@pytest.fixture
def world(library: Path, tmp_path: Path, api: VerbsApi) -> Iterator[Any]:
    """A fabric of three NICs, checked at the end: every rule has fired, no object is left."""
    with emulator().World(library, tmp_path / "fabric", emulator().nics(3)) as made:
        yield made


@pytest.fixture(scope="session")
def rdma_libraries(rdma_folder: Path, library: Path, engine_module: Module) -> dict[str, str]:
    """What whole communicators of the routes over NICs need."""
    windows = compile_for_host(WINDOWS, Path(comm_core.__file__).parent, HOST_WINDOWS, rdma_folder)
    return {"emulator": str(library), "engine": str(engine_module.artifact.path), "windows": str(windows)}


@pytest.fixture
def fabric(rdma_libraries: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    """A fabric; afterwards nothing is left in it, every rule has fired, and no message came before its receive."""
    found = importlib.import_module("rdma_host").Fabric(rdma_libraries, tmp_path)
    yield found
    counters = found.world.counters()
    found.world.close()
    assert counters["rnr_naks"] == 0 and counters["overflows"] == 0


@pytest.fixture(autouse=True)
def _no_verdicts() -> Iterator[None]:
    """Links are tested anew in each test."""
    selftest.forget()
    yield
    selftest.forget()
