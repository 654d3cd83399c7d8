"""Every CUDA module of comm-core, compiled for every architecture: what comes out is as it must be.

The self-check is compiled by ``test_jit_compile.py``; here is everything that does something.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import comm_core
from comm_core import jit
from comm_core.jit import ModuleSpec
from comm_core.jit.cache import Artifact
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing import cubin
from comm_core.windows.launch import WINDOWS
from comm_core.windows.transport import blocks_per_peer

PACKAGE = Path(comm_core.__file__).parent

MODULES = (WINDOWS,)


def test_every_module_is_compiled_here_and_can_be_built_ahead() -> None:
    """A module that nobody lists is not built by ``commctl jit warm``, and not tested by anybody."""
    own = {spec.name: spec for spec in jit.specs().values() if spec.package == "comm_core"}
    assert own == {spec.name: spec for spec in (SELFCHECK, *MODULES)}
    sources = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / "csrc").iterdir()}
    assert sources == {source for spec in own.values() for source in spec.sources}


@pytest.fixture(scope="module", params=MODULES, ids=lambda spec: spec.name)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[ModuleSpec, Artifact]:
    """A module for every architecture, built once."""
    return request.param, cubin.build(request.param, tmp_path_factory.mktemp("cache of the tests"))


def test_it_is_as_every_module_must_be(built: tuple[ModuleSpec, Artifact]) -> None:
    """Five architectures, no spills, sizes as in Python, only entry points exported, no torch, Python or CUDA."""
    spec, library = built
    assert library.archs == cubin.ARCHS
    assert cubin.problems(spec, library) == []
    usage = cubin.kernel_usage(library.log.read_text(encoding="utf-8"))
    # The check can't pass by reading nothing.
    names = {item.name for item in usage if item.kernel}
    assert len(names) >= len(spec.entry_points) and len([item for item in usage if item.kernel]) == 5 * len(names)
    assert all(item.registers > 0 for item in usage if item.kernel)


def test_as_many_blocks_fit_a_gpu_as_the_launch_counts_on(built: tuple[ModuleSpec, Artifact]) -> None:
    """Ranks that share a GPU wait for each other's blocks: two blocks of an exchange must fit each SM at once.

    Every supported SM has 65,536 registers, given out by 256 to a warp; more of them in the kernel would leave room
    for one block, and half of the ranks that wait would never start.
    """
    spec, library = built
    if spec is not WINDOWS:
        return
    text = (PACKAGE / "include" / "comm_core" / "exchange.cuh").read_text(encoding="utf-8")
    threads = int(re.findall(r"kExchangeThreads = (\d+);", text)[0])
    pushes = [item for item in cubin.kernel_usage(library.log.read_text()) if "exchange_push_kernel" in item.name]
    assert len(pushes) == 5
    for item in pushes:
        by_warp = -(-item.registers * 32 // 256) * 256
        assert 2 * by_warp * (threads // 32) <= 65536, item
    assert blocks_per_peer.__doc__  # the promise is made there


def test_the_headers_of_protocols_stand_alone_on_a_host(tmp_path: Path) -> None:
    """Each header includes what it needs and compiles with a plain host compiler, where ThreadSanitizer runs it."""
    for header in sorted((PACKAGE / "include" / "comm_core").iterdir()):
        if header.suffix not in (".h", ".cuh"):
            continue
        source = tmp_path / "alone.cpp"
        source.write_text(f"#include <comm_core/{header.name}>\nint main() {{ return 0; }}\n", encoding="utf-8")
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
        done = subprocess.run(
            [*command, f"-I{PACKAGE / 'include'}", str(source)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, f"{header.name}: {done.stderr}"


def test_describing_the_modules_needs_neither_torch_nor_cuda() -> None:
    """``commctl jit list`` reads descriptions: reading them imports nothing heavy."""
    code = (
        "import sys; from comm_core.windows.launch import WINDOWS; from comm_core.windows import table, watchdog;"
        "print(sorted({'torch', 'pynvml', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
