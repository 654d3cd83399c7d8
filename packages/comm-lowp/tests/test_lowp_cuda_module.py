"""The CUDA module, compiled for every architecture: what comes out is as it must be. Needs nvcc, but no GPU."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import lowp_host
import pytest

import comm_lowp
from comm_core.jit import toolchain
from comm_core.jit.cache import Artifact
from comm_core.jit.key import COMPILE_FLAGS
from comm_core.testing import cubin
from comm_lowp.bench.module import BANDWIDTH
from comm_lowp.module import MODULE
from comm_lowp.plugin import plugin

PACKAGE = Path(str(comm_lowp.__file__)).parent
HEADERS = PACKAGE / "include" / "comm_lowp"


def test_the_module_can_be_built_ahead() -> None:
    """A module that nobody lists is not built by ``commctl jit warm``."""
    modules = list(plugin.comm_modules())
    assert modules == [MODULE, BANDWIDTH]
    sources = {str(path.relative_to(PACKAGE)) for path in (PACKAGE / "csrc").iterdir()}
    assert sources == {source for spec in modules for source in spec.sources}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    cubin.require_nvcc()
    return cubin.build(MODULE, tmp_path_factory.mktemp("cache of the tests"))


def test_it_is_as_every_module_must_be(library: Artifact) -> None:
    """Five architectures, no spills, sizes as in Python, only entry points exported, no torch, Python or CUDA."""
    assert library.archs == cubin.ARCHS
    assert cubin.problems(MODULE, library) == []
    usage = [item for item in cubin.kernel_usage(library.log.read_text(encoding="utf-8")) if item.kernel]
    # The check can't pass by reading nothing.
    assert len({item.name for item in usage}) >= 12 and len(usage) % 5 == 0
    assert all(item.registers > 0 and item.stack_bytes == 0 for item in usage if "comm_lowp" in item.name)


def test_the_benchmarks_module_is_as_every_module_must_be(tmp_path: Path) -> None:
    cubin.require_nvcc()
    assert cubin.problems(BANDWIDTH, cubin.build(BANDWIDTH, tmp_path)) == []


def blocks_that_fit(registers: int, threads: int) -> int:
    """Every supported SM has 65,536 registers, given out by 256 to a warp, and room for 48 warps at least."""
    warps = threads // 32
    return min(65536 // (warps * (-(-registers * 32 // 256) * 256)), 48 // warps)


@pytest.mark.parametrize(
    ("kernel", "threads", "least"),
    [("statistics_kernelI\\w*Lj128", 128, 7), ("statistics_kernelI\\w*Lj64", 64, 14), ("pack_kernel", 256, 3),
     ("unpack_kernel", 256, 4)],
)  # fmt: skip
def test_enough_blocks_fit_an_sm_to_keep_memory_busy(
    library: Artifact, kernel: str, threads: int, least: int
) -> None:
    usage = [item for item in cubin.kernel_usage(library.log.read_text(encoding="utf-8")) if item.kernel]
    found = [item for item in usage if re.search(f"comm_lowp\\d+{kernel}", item.name)]
    assert found
    for item in found:
        assert blocks_that_fit(item.registers, threads) >= least, item


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> str:
    cubin.require_nvcc()
    output = tmp_path_factory.mktemp("ptx") / "sage2.ptx"
    flags = [*(flag for flag in COMPILE_FLAGS if not flag.startswith("-Xptxas")), "-arch=sm_90a"]
    source = str(PACKAGE / "csrc" / "sage2.cu")
    command = [toolchain.find().nvcc, *flags, *lowp_host.include_flags(), "-ptx", source, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return output.read_text(encoding="utf-8")


def test_no_operation_of_the_arithmetic_is_contracted_or_approximate(ptx: str) -> None:
    """In PTX, where every operation carries its rounding; what is said there to be rounded stays so."""
    for needed in ("div.rn.f32", "add.rn.f32", "sub.rn.f32", "mul.rn.f32", "cvt.rn.satfinite.e4m3x2"):
        assert needed in ptx, needed
    for wrong in ("div.approx", "div.full", "rcp.approx", ".ftz", "fma.", "mad.rn.f32"):
        assert wrong not in ptx, wrong


def test_what_somebody_else_launches_does_not_start_early(ptx: str) -> None:
    """It may wait for other ranks, and its blocks could keep their kernels off a GPU that they share.

    What follows a kernel of our own that waits: test_lowp_direct_host.py.
    """
    bodies = re.split(r"\.visible \.entry ", ptx)[1:]
    leads = {body.split("(")[0]: "griddepcontrol.launch_dependents" in body for body in bodies}
    assert all("griddepcontrol.wait" in body for body in bodies) and len(leads) == 12
    for name, lead in leads.items():
        assert lead is not ("unpack_kernel" in name), name


def test_headers_stand_alone_on_a_host(tmp_path: Path) -> None:
    """Each header includes what it needs and compiles with a plain host compiler."""
    for header in sorted(HEADERS.iterdir()):
        source = tmp_path / "alone.cpp"
        source.write_text(f"#include <comm_lowp/{header.name}>\nint main() {{ return 0; }}\n", encoding="utf-8")
        lowp_host.compile_host(source, tmp_path / "alone", "-Wextra", "-fsyntax-only")


def test_describing_the_module_needs_neither_torch_nor_cuda() -> None:
    code = (
        "import sys; from comm_lowp.module import MODULE; assert MODULE.entry_points;"
        "print(sorted({'torch', 'pynvml', 'cuda'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
