"""The real compiler: what comes out of it, loaded and called on a machine without a GPU."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core.errors import ArgumentValueError, CudaCallError, JitBuildError, JitCacheError, JitMissingError
from comm_core.jit import ModuleSpec, build, load, loader, toolchain
from comm_core.jit.abi import ABI, CUDA_BASE, Status
from comm_core.jit.cache import Artifact
from comm_core.jit.libraries import obtain
from comm_core.jit.loader import Module
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing import cubin

DEADLINE = 120


@pytest.fixture(scope="module")
def fat(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """The self-check for every architecture, built once."""
    return cubin.build(SELFCHECK, tmp_path_factory.mktemp("cache of the tests"))


@pytest.fixture
def at_fat(fat: Artifact, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache that has it, as the one of this process."""
    root = fat.path.parents[4]
    monkeypatch.setenv("COMM_CACHE_DIR", str(root))
    monkeypatch.delenv("COMM_JIT", raising=False)
    return root


def test_the_selfcheck_is_as_every_module_must_be(fat: Artifact) -> None:
    """Issue: five architectures, no spills, only entry points exported, no torch, Python or CUDA library needed."""
    assert fat.archs == cubin.ARCHS
    assert cubin.problems(SELFCHECK, fat) == []
    usage = cubin.kernel_usage(fat.log.read_text())
    # The check can't pass by reading nothing.
    assert {(item.arch, item.kernel) for item in usage} == {
        (f"sm_{n}", True) for n in (80, 89, "90a", "100a", "120a")
    }
    assert len(usage) == 2 * len(cubin.ARCHS) and all(item.registers > 0 for item in usage)
    assert cubin.exported_symbols(fat.path) == {
        "comm_core_empty_v1",
        "comm_core_fill_v1",
        "comm_core_selfcheck_preload_v1",
        "comm_last_error",
        "comm_module_info_v1",
    }


def test_the_library_carries_no_path_of_the_machine_that_built_it(fat: Artifact) -> None:
    """Error texts name the source by its place in the package; only line tables know the folder of the build."""
    texts = re.findall(rb"[\x20-\x7e]{4,}", fat.path.read_bytes())
    assert b"comm_core/csrc/selfcheck.cu" in texts
    assert not [text for text in texts if str(fat.folder).encode() in text]


def run(code: str, cache: Path, **variables: str) -> str:
    """Run `code` in a process of its own, which sees no GPU."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "COMM_CACHE_DIR": str(cache),
            "CUDA_VISIBLE_DEVICES": "-1",
            **variables,
        },
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_a_gpu_a_launch_is_an_error_with_cudas_text_and_no_crash(at_fat: Path) -> None:
    """V12: 35 without a driver, 100 with one that shows no device; in both entry points and in the preload."""
    printed = run(
        """
import json
from comm_core.errors import CudaCallError
from comm_core.jit import load
from comm_core.jit.selfcheck import SELFCHECK
module = load(SELFCHECK, archs=["9.0a"])
found = []
for call in (
    lambda: module.bind("comm_core_fill_v1")(0, 4096, 4, 0),
    lambda: module.bind("comm_core_empty_v1")(0, 1),
    lambda: module._fail("preload", module._preload(0)),
):
    try: call()
    except CudaCallError as error: found.append((error.code, str(error)))
print(json.dumps(found))
""",
        at_fat,
    )
    (fill, empty, preload) = json.loads(printed)
    assert fill[0] == empty[0] == preload[0] and fill[0] in (35, 100)
    name = {35: "cudaErrorInsufficientDriver", 100: "cudaErrorNoDevice"}[fill[0]]
    assert re.match(
        rf"comm_core_fill_v1 failed with CUDA error {fill[0]}: launch of fill_kernel at "
        rf"comm_core/csrc/selfcheck\.cu:\d+: .*\({name}\)",
        fill[1],
    )
    assert "launch of empty_kernel" in empty[1] and "cudaGetDevice" in preload[1]
    if fill[0] == 35:
        assert f"built by nvcc {toolchain.find().version}" in fill[1] and "COMM_NVCC" in fill[1]


def test_importing_and_loading_touches_neither_cuda_nor_torch(at_fat: Path) -> None:
    """L13: a plugin's description is read wherever the plugin is; loading without a device needs no torch either."""
    printed = run(
        """
import sys
from comm_core import jit
import comm_core.jit.build, comm_core.cli.jit
from comm_core.jit.selfcheck import SELFCHECK
print(jit.load(SELFCHECK, archs=["8.0"]).archs, sorted({"torch", "cuda", "pynvml"} & set(sys.modules)))
""",
        at_fat,
        COMM_JIT="off",
    )
    assert printed == f"{cubin.ARCHS} []\n"


def test_a_field_that_can_not_be_used_is_an_argument_error_and_the_next_call_works(at_fat: Path) -> None:
    fill = load(SELFCHECK, archs=["9.0a"]).bind("comm_core_fill_v1")
    with pytest.raises(ArgumentValueError, match=r"comm_core_fill_v1: fill: data must be .* aligned .*, got 0x1001"):
        fill(0, 0x1001, 1, 0)
    fill(0, 0x1000, 0, 0)


def test_what_was_packed_once_may_be_passed_again(at_fat: Path) -> None:
    module = load(SELFCHECK, archs=["9.0a"])
    pack, run = module.bind_parts("comm_core_fill_v1")
    good, bad = pack(0, 0x1000, 0, 0), pack(0, 0x1001, 1, 0)
    for _ in range(2):
        run(good)
        with pytest.raises(ArgumentValueError, match=r"comm_core_fill_v1: fill: data must be .* aligned"):
            run(bad)
    with pytest.raises(ArgumentValueError, match="no entry point 'comm_core_x_v1'"):
        module.bind_parts("comm_core_x_v1")


def test_the_text_of_an_error_is_the_threads_own(at_fat: Path) -> None:
    """Ranks can be threads of one process."""
    module = load(SELFCHECK, archs=["9.0a"])
    fill = module.bind("comm_core_fill_v1")
    seen: list[str] = []
    before = module.last_error()
    turn = threading.Barrier(2, timeout=20)

    def rank(address: int) -> None:
        try:
            turn.wait()
            fill(0, address, 1, 0)
        except ArgumentValueError:
            turn.wait()
            seen.append(f"{address:#x}" if module.last_error().endswith(f"got {address:#x}") else module.last_error())

    threads = [threading.Thread(target=rank, args=(address,)) for address in (0x1001, 0x2002)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == ["0x1001", "0x2002"] and module.last_error() == before


def test_a_module_is_loaded_once_and_stays(at_fat: Path) -> None:
    module = load(SELFCHECK, archs=["9.0a"])
    assert load(SELFCHECK, archs=["90a"]) is module and load(SELFCHECK, archs=["8.9"]) is module
    with pytest.raises(ArgumentValueError, match="no entry point 'comm_core_x_v1'; it has comm_core_empty_v1"):
        module.bind("comm_core_x_v1")


def test_preload_makes_the_device_current_and_happens_once(at_fat: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank would otherwise make a context on GPU 0."""
    module = Module(SELFCHECK, load(SELFCHECK, archs=["9.0a"]).artifact)
    events: list[object] = []

    class Guard:
        def __enter__(self) -> None:
            events.append("current")

        def __exit__(self, *_: object) -> None:
            events.append("back")

    monkeypatch.setattr(loader._cuda, "normalize_device", lambda device: device)
    monkeypatch.setattr(loader._cuda, "device_guard", lambda device: Guard())
    monkeypatch.setattr(module, "_preload", lambda index: events.append(index) or 0)
    with monkeypatch.context() as patch:
        # Loading a kernel breaks a capture.
        patch.setattr(loader._cuda, "is_capturing", lambda: True)
        with pytest.raises(JitMissingError, match=r"not loaded on cuda:3 yet, .*captured"):
            module.preload(torch.device("cuda", 3))
    for _ in range(2):
        module.preload(torch.device("cuda", 3))
    assert events == ["current", 3, "back"]
    monkeypatch.setattr(module, "_preload", lambda index: CUDA_BASE + 209)
    for _ in range(2):
        # One that failed is tried again.
        with pytest.raises(CudaCallError, match="comm_core_selfcheck_preload_v1 failed with CUDA error 209"):
            module.preload(torch.device("cuda", 4))


# -- The handshake ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"structs": {**SELFCHECK.structs, "comm_core_fill_args_v1": "IIPPQIQ0Q"}},
            r"struct comm_core_fill_args_v1 has 40 bytes in C and 48 in Python \(format 'IIPPQIQ0Q'\)",
        ),
        (
            {"structs": {**SELFCHECK.structs, "comm_core_more_args_v1": "IIQ0Q"}},
            "it has no struct comm_core_more_args_v1",
        ),
        (
            {"structs": {"comm_core_fill_args_v1": "IIPPQI0Q"}, "entry_points": {}},
            "it has structs that Python does not know: comm_core_empty_args_v1",
        ),
        (
            {"entry_points": {**SELFCHECK.entry_points, "comm_core_gone_v1": "comm_core_fill_args_v1"}},
            "it does not export comm_core_gone_v1",
        ),
        ({"name": "comm_core_other"}, "it calls itself 'comm_core_selfcheck'"),
    ],
)
def test_a_library_that_python_does_not_describe_is_refused_before_it_is_called(
    fat: Artifact, change: dict[str, Any], why: str
) -> None:
    """Issue: a struct of another size would hand the kernel other bytes than the caller meant."""
    with pytest.raises(JitCacheError, match=why):
        Module(replace(SELFCHECK, **change), fat)


def test_a_library_of_another_interface_number_is_refused(fat: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "ABI", ABI + 1)
    with pytest.raises(JitCacheError, match=f"it has C interface {ABI}, this comm-core has {ABI + 1}"):
        Module(SELFCHECK, fat)


def test_the_c_side_refuses_a_struct_that_is_not_its_own(fat: Artifact) -> None:
    """The second line of defence, for callers that are not this Python."""
    library = ctypes.CDLL(str(fat.path))
    library.comm_last_error.restype = ctypes.c_char_p
    for prefix in ((40, ABI + 1), (48, ABI)):
        fields = (ctypes.c_uint32 * 10)(*prefix)
        assert library.comm_core_fill_v1(fields) == Status.ERROR_ABI
        expected = f"comm_core_fill_args_v1: expected 40 bytes of ABI {ABI}, got {prefix[0]} bytes of ABI {prefix[1]}"
        assert library.comm_last_error().decode() == expected


def test_what_can_not_be_loaded_names_the_folder_to_delete(fat: Artifact, tmp_path: Path) -> None:
    copy = tmp_path / "entry" / fat.path.name
    copy.parent.mkdir()
    copy.write_text("of another system")
    with pytest.raises(JitCacheError, match=f"can't be loaded: .*delete the folder {copy.parent}"):
        Module(SELFCHECK, replace(fat, path=copy))


# -- Modules of a plugin ------------------------------------------------------------------------------------------

SOURCE = """
#include <comm_core/abi.h>
#include <comm_jit_x/part.cuh>
struct comm_jit_x_go_args_v1 {{ COMM_ARGS; void* stream; uint32_t n; }};
COMM_EXPORT int comm_jit_x_go_v1(const comm_jit_x_go_args_v1* args) {{
  COMM_CHECK_ARGS(args, comm_jit_x_go_args_v1);
  return comm_jit_x_other(args->n);
}}
int comm_jit_x_not_exported() {{ return 0; }}
{more}
COMM_MODULE_BEGIN
COMM_STRUCT(comm_jit_x_go_args_v1)
COMM_MODULE_KERNELS
{kernels}
COMM_MODULE_END(comm_jit_x)
"""
PART = "int comm_jit_x_other(unsigned n);\n"
OTHER = """
#include <comm_core/status.h>
#include <comm_jit_x/part.cuh>
#include <stdexcept>
#include <string>
int comm_jit_x_other(unsigned n) {
  COMM_REQUIRE(n < 3, "go: n must be below 3, got %u", n);
  return std::stoi(std::string("0"));
}
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleSpec]:
    """Write a package with a module of two sources, in folders with spaces, and return its description."""
    cubin.require_nvcc()
    monkeypatch.setenv("COMM_CACHE_DIR", str(tmp_path / "the cache"))
    root = tmp_path / "site packages"
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delitem(sys.modules, "comm_jit_x", raising=False)

    def make(more: str = "", kernels: str = "", other: str = OTHER) -> ModuleSpec:
        files = {"csrc/a.cu": SOURCE.format(more=more, kernels=kernels), "csrc/other.cpp": other}
        for name, text in {"__init__.py": "", "include/comm_jit_x/part.cuh": PART, **files}.items():
            path = root / "comm_jit_x" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return ModuleSpec(
            name="comm_jit_x",
            package="comm_jit_x",
            sources=("csrc/a.cu", "csrc/other.cpp"),
            structs={"comm_jit_x_go_args_v1": "IIPI0Q"},
            entry_points={"comm_jit_x_go_v1": "comm_jit_x_go_args_v1"},
        )

    return make


def test_a_module_of_two_sources_shares_its_error_text_and_hides_everything_else(
    plugin: Callable[..., ModuleSpec],
) -> None:
    """A host-only source included; templates of the C++ library must not leak out of the library either."""
    spec = plugin()
    artifact = obtain(spec, ["9.0a"])
    assert cubin.problems(spec, artifact) == []
    go = load(spec, archs=["9.0a"]).bind("comm_jit_x_go_v1")
    go(0, 2)
    with pytest.raises(ArgumentValueError, match="comm_jit_x_go_v1: go: n must be below 3, got 7"):
        go(0, 7)


SPILLING = """
template <int N>
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float* p) {
  float x[N];
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < N; ++i) p[i * 1024 + threadIdx.x] = x[i] * x[(i * 7) % N];
}
__global__ void forgotten_kernel(float* p) { *p = 0; }
void comm_jit_x_launch(float* p) { forgotten_kernel<<<1, 1>>>(p); }
"""


def test_what_is_wrong_with_a_library_is_found(plugin: Callable[..., ModuleSpec]) -> None:
    """The checks that the plugins' tests rely on can fail: spills, kernels that nobody preloads, exports, sizes."""
    spec = plugin(SPILLING, "COMM_KERNEL(spilling_kernel<64>)")
    artifact = obtain(spec, ["9.0a"])
    found = cubin.problems(spec, artifact)
    assert len(found) == 2
    assert "2 kernels were compiled for sm_90a, the module declares 1" in found
    assert re.search(r"spilling_kernel.* for sm_90a spills: \d+ bytes stored, \d+ loaded, 32 registers", str(found))
    assert len(cubin.problems(spec, artifact, may_spill=["spilling_kernel"])) == 1
    wrong = replace(spec, structs={"comm_jit_x_go_args_v1": "IIP0Q"}, entry_points={})
    found = cubin.problems(wrong, artifact)
    assert "struct comm_jit_x_go_args_v1 has 24 bytes in C and 16 in Python" in found[0]
    assert "comm_jit_x_go_v1 is exported, and is no entry point" in found


@pytest.mark.parametrize(
    ("more", "other", "error"),
    [
        ("int x = undefined_name;", OTHER, r'comm_jit_x/csrc/a\.cu\(\d+\): error: identifier "undefined_name"'),
        ("#include <no_such_header.h>", OTHER, r"a\.cu:\d+:\d+: fatal error: no_such_header\.h: No such file"),
        ("", "#error stop here", r"comm_jit_x/csrc/other\.cpp:1:2: error: #error stop here"),
        ("", "", r"undefined reference to `comm_jit_x_other"),
    ],
    ids=["syntax", "header", "host", "link"],
)
def test_the_first_error_of_the_compiler_is_in_the_text(
    plugin: Callable[..., ModuleSpec], more: str, other: str, error: str
) -> None:
    """L7, with what the real programs print; also a symbol that nobody defines, before anything is loaded."""
    with pytest.raises(JitBuildError, match=f"can't be built: .*{error}") as caught:
        obtain(plugin(more, other=other), ["9.0a"])
    assert Path(caught.value.log).is_file() and "nvcc" in caught.value.command


def test_an_architecture_that_this_nvcc_does_not_know_is_said_so(plugin: Callable[..., ModuleSpec]) -> None:
    with pytest.raises(JitBuildError, match=r"(?s)nvcc fatal.*compute_20.*hint: .*COMM_CUDA_ARCH_LIST"):
        obtain(plugin(), ["2.0"])


def test_a_host_compiler_that_does_not_exist_is_named(
    plugin: Callable[..., ModuleSpec], monkeypatch: pytest.MonkeyPatch
) -> None:
    """L7: as the variable of nvcc says."""
    monkeypatch.setenv("NVCC_CCBIN", "/nowhere/g++")
    with pytest.raises(JitBuildError, match=r"no host compiler|NVCC_CCBIN"):
        obtain(plugin(), ["9.0a"])


def test_the_headers_are_plain_c_and_compile_without_cuda(tmp_path: Path) -> None:
    """A module without kernels (verbs, descriptors) uses the same interface."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        cubin.require_nvcc()
        pytest.skip("there is no C compiler here")
    include = Path(build.__file__).parents[1] / "include"
    text = "#include <comm_core/abi.h>\nCOMM_MODULE_BEGIN\nCOMM_MODULE_KERNELS\nCOMM_MODULE_END(comm_x)\n"
    for name, standard in (("m.c", "c99"), ("m.c", "c17"), ("m.cpp", "c++11"), ("m.cpp", "c++20")):
        (tmp_path / name).write_text(text)
        flags = [f"-std={standard}", "-Wall", "-Wextra", "-Werror", f"-I{include}", "-fPIC", "-shared"]
        subprocess.run(
            [compiler, *flags, str(tmp_path / name), "-o", str(tmp_path / "m.so")], check=True, timeout=DEADLINE
        )
        library = ctypes.CDLL(str(tmp_path / "m.so"))
        assert library.comm_x_preload_v1(0) == Status.OK


def test_sources_and_headers_are_files_of_the_package() -> None:
    """Hatchling puts every file below the package into the wheel; elsewhere they would be missing once installed."""
    root = Path(build.__file__).parents[1]
    for source in SELFCHECK.sources:
        assert (root / source).is_file()
    assert {path.name for path in (root / "include/comm_core").iterdir()} >= {"abi.h", "status.h"}
