"""The modules of comm-pcie, compiled for every architecture: what comes out is as it must be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import rdma_emulator as emulator
import rdma_ranks as ranks_of

import comm_pcie
from comm_core.jit import ModuleSpec
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import open_library
from comm_core.testing import cubin
from comm_pcie.exchange import EXCHANGE
from comm_pcie.plugin import plugin
from comm_pcie.rdma.module import RDMA
from comm_pcie.rdma.verbs import VerbsLibraries, load_verbs
from comm_pcie.selftest import SELFTEST

PACKAGE = Path(comm_pcie.__file__).parent
MODULES = (EXCHANGE, SELFTEST, RDMA)
OF_VERBS = ("verbs_api.h", "rdma_engine.h")
"""Headers that include those of rdma-core."""


def test_every_module_is_listed_and_every_source_is_a_module_s() -> None:
    assert tuple(plugin.comm_modules()) == MODULES
    sources = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / "csrc").iterdir()}
    assert sources == {source for spec in MODULES for source in spec.sources}


_artifacts: dict[str, Artifact] = {}


def artifact_of(spec: ModuleSpec, factory: pytest.TempPathFactory) -> Artifact:
    """The module for every architecture, built once."""
    if spec.needs:
        emulator.require_headers()
    if spec.name not in _artifacts:
        _artifacts[spec.name] = cubin.build(spec, factory.mktemp("cache of the tests"))
    return _artifacts[spec.name]


@pytest.fixture(params=MODULES, ids=lambda spec: spec.name)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleSpec, Artifact]:
    return request.param, artifact_of(request.param, tmp_path_factory)


def test_it_is_as_every_module_must_be(built: tuple[ModuleSpec, Artifact]) -> None:
    """Five architectures, no spills, sizes as in Python, only entry points exported, no torch, Python or verbs."""
    spec, library = built
    assert library.archs == cubin.ARCHS
    assert cubin.problems(spec, library) == []
    usage = [item for item in cubin.kernel_usage(library.log.read_text(encoding="utf-8")) if item.kernel]
    kernels = 3 if any(source.endswith(".cu") for source in spec.sources) else 0
    assert len(usage) == 5 * kernels and all(item.registers > 0 for item in usage)
    needed = cubin.needed_libraries(library.path)
    assert needed and not [name for name in needed if "verbs" in name or "mlx5" in name or "cuda" in name]


def test_the_engine_that_nvcc_has_built_moves_bytes(
    library: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    """What users get, by the JIT's own flags; the other tests of it compile it with the host's compiler."""
    module = open_library(RDMA, artifact_of(RDMA, tmp_path_factory))
    loaded = load_verbs(VerbsLibraries(str(library), str(library)), module=module)
    assert loaded.api is not None, loaded.reason
    with emulator.World(library, tmp_path / "fabric", emulator.nics(1)) as world:
        ranks_of.exchange_with_itself(loaded.api, "mlx5_0", 0)
        assert world.counters()["executed_writes"] == 21


def test_the_headers_stand_alone_on_a_host(tmp_path: Path) -> None:
    import comm_core

    core = Path(comm_core.__file__).parent / "include"
    for header in sorted((PACKAGE / "include" / "comm_pcie").iterdir()):
        if header.name in OF_VERBS:
            emulator.require_headers()
        source = tmp_path / "alone.cpp"
        source.write_text(f"#include <comm_pcie/{header.name}>\nint main() {{ return 0; }}\n", encoding="utf-8")
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        done = subprocess.run(
            [*command, f"-I{PACKAGE / 'include'}", f"-I{core}", str(source)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{header.name}: {done.stderr}"


def test_importing_touches_nothing() -> None:
    """L13: neither CUDA, NVML, torch nor a library of RDMA."""
    code = (
        "import sys, comm_pcie, comm_pcie.plugin, comm_pcie.routes, comm_pcie.hints, comm_pcie.selftest;"
        "import comm_pcie.rdma.module, comm_pcie.rdma.verbs;"
        "print(sorted({'torch', 'pynvml', 'cuda', 'typer', 'pyverbs'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_the_child_imports_nothing_of_the_project() -> None:
    """It must start in a moment, and hang or die alone."""
    text = (PACKAGE / "selftest_child.py").read_text(encoding="utf-8")
    imported = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imported == [
        "from __future__ import annotations",
        "import ctypes",
        "import json",
        "import struct",
        "import sys",
    ]
