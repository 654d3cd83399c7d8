"""What decides whether a library is built anew: contents, flags, architectures, compilers, and no path."""

from __future__ import annotations

import copy
import pickle
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import comm_core
from comm_core._json import canonical
from comm_core.errors import ArgumentValueError, JitBuildError, PluginError, UnsupportedError
from comm_core.jit import ModuleSpec, abi, archs, key
from comm_core.jit.selfcheck import SELFCHECK

INCLUDE = Path(comm_core.__file__).parent / "include" / "comm_core"
TOOLS: dict[str, Any] = {"machine": "x86_64", "nvcc": "V13.0.88", "host_compiler": "g++ 12", "libc": "glibc 2.36"}


def package(root: Path, name: str, files: dict[str, str]) -> None:
    """Write an importable package with data files."""
    for path, text in {"__init__.py": "", **files}.items():
        target = root / name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)


def spec(name: str, **changes: Any) -> ModuleSpec:
    fields: dict[str, Any] = {"sources": ("csrc/m.cu",), "structs": {}, "entry_points": {}, **changes}
    return ModuleSpec(name=f"{name}_m", package=name, **fields)


def inputs(module: ModuleSpec, on: tuple[str, ...] = ("9.0a",), **changes: Any) -> Any:
    return key.inputs(module, key.snapshot(module), on, **{**TOOLS, **changes})


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


# -- The scanner --------------------------------------------------------------------------------------------------


def test_the_scanner_follows_project_headers_and_leaves_the_systems_alone() -> None:
    text = """
    #include <cuda_runtime.h>
    // #include <comm_core/no.h>
    /* #include <comm_core/no.h>
       #include "no.h" */
    const char* url = "http://x"; #define Q '"' // "
      #  include <comm_core/abi.h>  // why
    #if 0
    #include <comm_x/a/b.cuh>
    #endif
    #include \\
      <comm_core/status.h>
    const char* text = "#include <comm_core/no.h>";
    """
    found = key.scan("m.cu", text, ("comm_x", "comm_core"))
    assert found == ["comm_core/abi.h", "comm_x/a/b.cuh", "comm_core/status.h"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ('#include "abi.h"', r'm\.cu:2: #include "abi\.h".*<package/header>'),
        ("#include HEADER(abi)", r"m\.cu:2: .*computed include"),
        ("#include <comm_lowp/codec.cuh>", r"'comm_lowp' is not among this module's packages \(comm_core\)"),
        ("#include <comm_core/../../secret.h>", r"'\.\.' leaves"),
    ],
)
def test_an_include_that_can_not_be_followed_is_refused(line: str, why: str) -> None:
    """A header that the key does not see would leave stale libraries in the cache."""
    with pytest.raises(JitBuildError, match=why):
        key.scan("m.cu", f"\n{line}\n", ("comm_core",))


def test_the_snapshot_is_the_closure_over_packages(on_path: Path) -> None:
    package(on_path, "comm_ja", {"include/comm_ja/deep.cuh": "#include <comm_core/abi.h>"})
    package(on_path, "comm_jb", {
        "csrc/m.cu": "#include <comm_jb/m.cuh>\n#include <comm_jb/m.cuh>",
        "include/comm_jb/m.cuh": "#include <comm_ja/deep.cuh>\n#include <comm_jb/m.cuh>",
        "include/comm_jb/unused.cuh": "",
    })  # fmt: skip
    found = key.snapshot(spec("comm_jb", includes=("comm_ja",)))
    assert found.sources == ("comm_jb/csrc/m.cu",)
    assert set(found.files) == {
        "comm_jb/csrc/m.cu",
        "include/comm_jb/m.cuh",
        "include/comm_ja/deep.cuh",
        "include/comm_core/abi.h",
        "include/comm_core/status.h",
    }


def test_a_header_or_source_that_is_not_installed_is_named(on_path: Path) -> None:
    package(on_path, "comm_jc", {"csrc/m.cu": "#include <comm_core/not_yet.cuh>"})
    with pytest.raises(JitBuildError, match=r"comm_jc/csrc/m\.cu includes <comm_core/not_yet\.cuh>"):
        key.snapshot(spec("comm_jc"))
    with pytest.raises(PluginError, match=r"'comm_jc' lacks 'csrc/gone\.cu'"):
        key.snapshot(spec("comm_jc", sources=("csrc/gone.cu",)))


# -- The key ------------------------------------------------------------------------------------------------------


def test_two_checkouts_share_a_library_and_no_path_is_in_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contents count: the same files in another folder are the same module."""
    found: list[Any] = []
    for place in ("one", "another place"):
        root = tmp_path / place
        package(root, "comm_jd", {"csrc/m.cu": "#include <comm_jd/m.h>", "include/comm_jd/m.h": "int x;"})
        with monkeypatch.context() as patch:
            patch.syspath_prepend(str(root))
            patch.delitem(sys.modules, "comm_jd", raising=False)
            found.append(inputs(spec("comm_jd")))
            patch.delitem(sys.modules, "comm_jd", raising=False)
    assert key.key(found[0]) == key.key(found[1])
    assert str(tmp_path) not in canonical(found[0])


def test_every_input_that_changes_the_result_changes_the_key_and_is_explained(on_path: Path) -> None:
    """L11, and an edited header: a library that is stale in any way is not found."""
    package(on_path, "comm_je", {"csrc/m.cu": "#include <comm_je/m.h>", "include/comm_je/m.h": "int x;"})
    base = spec("comm_je", structs={"comm_je_args_v1": "IIP0Q"}, entry_points={"comm_je_go_v1": "comm_je_args_v1"})
    old = inputs(base)
    changed = {
        r"architectures: 9\.0a is now 8\.0, 9\.0a": inputs(base, ("8.0", "9.0a")),
        r"nvcc: V12\.8 is now V13\.0\.88": (inputs(base, nvcc="V12.8"), old),
        r"host compiler: g\+\+ 12 is now g\+\+ 13": inputs(base, host_compiler="g++ 13"),
        r"C library: glibc 2\.36 is now glibc 2\.39": inputs(base, libc="glibc 2.39"),
        r"processor: x86_64 is now aarch64": inputs(base, machine="aarch64"),
        r"compiler flag '-DX' was added": inputs(replace(base, flags=("-DX",))),
        r"the order of the compiler flags has changed": (
            inputs(replace(base, flags=("-DX", "-DY"))),
            inputs(replace(base, flags=("-DY", "-DX"))),
        ),
        r"exported name 'comm_je_go_v1' was removed": inputs(replace(base, entry_points={})),
        r"NVCC_APPEND_FLAGS: '\(unset\)' is now '-g'": inputs(base, environment={"NVCC_APPEND_FLAGS": "-g"}),
    }
    for words, pair in changed.items():
        before, after = pair if isinstance(pair, tuple) else (old, pair)
        assert key.key(before) != key.key(after), words
        (told,) = key.explain(before, after)
        assert re.search(words, told), told
    (on_path / "comm_je/include/comm_je/m.h").write_text("int y;")
    assert key.explain(old, inputs(base)) == ["include/comm_je/m.h has changed"]
    (on_path / "comm_je/csrc/m.cu").write_text("#include <comm_core/status.h>")
    assert key.explain(old, inputs(base)) == [
        "include/comm_core/status.h is new",
        "include/comm_je/m.h is no longer used",
        "comm_je/csrc/m.cu has changed",
    ]
    assert key.explain(old, old) == []


def test_a_compiler_or_an_architecture_is_no_other_code_but_a_flag_is() -> None:
    """What is found without a compiler at hand must come from the same sources and flags."""
    old = inputs(SELFCHECK)
    assert key.same_code(old, inputs(SELFCHECK, ("8.0",), nvcc=None, host_compiler=None, libc=None))
    assert not key.same_code(old, inputs(replace(SELFCHECK, flags=("-DX",))))


# -- The description ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"sources": ()}, "no sources"),
        ({"sources": ("../x.cu",)}, "inside the package"),
        ({"sources": ("csrc/x.cuh",)}, r"must be a \.cu or \.cpp"),
        ({"structs": {"comm_a": "IIP"}}, "end in '0Q'"),
        ({"structs": {"comm_a": "PII0Q"}}, "begin with 'II'"),
        ({"structs": {"comm_a": "IIw!0Q"}}, "bad char in struct format"),
        ({"entry_points": {"comm_x_v1": "comm_a"}}, "takes 'comm_a', which is not among the structs"),
        ({"structs": {"Args": "II0Q"}}, "no C name"),
        ({"flags": ("-I/usr/x",)}, "not the module's to choose"),
        ({"flags": ("--gpu-architecture=sm_80",)}, "not the module's to choose"),
    ],
)
def test_a_wrong_description_is_refused_where_it_is_written(change: dict[str, Any], why: str) -> None:
    """So it breaks its plugin when that is loaded, and no rank in the middle of opening a communicator."""
    with pytest.raises(ArgumentValueError, match=rf"module 'comm_x_m' of 'comm_x': .*{why}"):
        spec("comm_x", **change)


def test_a_description_can_be_hashed_compared_copied_and_sent_to_a_rank_but_not_changed() -> None:
    twin = pickle.loads(pickle.dumps(SELFCHECK))
    assert twin == SELFCHECK and hash(twin) == hash(SELFCHECK) and copy.deepcopy(SELFCHECK) == SELFCHECK
    with pytest.raises(TypeError):
        SELFCHECK.structs["comm_core_fill_args_v1"] = "II0Q"  # type: ignore[index]


def test_python_and_c_agree_on_the_interface_number_and_the_codes() -> None:
    """The twins that the comments name."""
    header = (INCLUDE / "abi.h").read_text()
    assert re.findall(r"^#define COMM_ABI (\d+)$", header, re.MULTILINE) == [str(abi.ABI)]
    codes = re.findall(r"^  COMM_(\w+) = (\w+),", (INCLUDE / "status.h").read_text(), re.MULTILINE)
    assert {name: int(value, 0) for name, value in codes} == {item.name: int(item) for item in abi.Status}
    assert struct.calcsize(abi.PREFIX) == abi.PREFIX_BYTES


# -- Architectures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.0", ("9.0",)),
        ("9.0a", ("9.0a",)),
        ("90a", ("9.0a",)),
        ("8.0;9.0a", ("8.0", "9.0a")),
        ("9.0a, 8.0 8.0", ("8.0", "9.0a")),
        ("8.0+PTX", ("8.0+PTX",)),
        ("100a;120A;9.0", ("9.0", "10.0a", "12.0a")),
        ("10.3f", ("10.3f",)),
    ],
)
def test_lists_of_architectures(text: str, expected: tuple[str, ...]) -> None:
    """L9: what people write for torch is understood, and order and repetition decide nothing."""
    assert archs.parse_list(text) == expected
    assert archs.parse_list(archs.join(expected)) == expected


@pytest.mark.parametrize("text", ["garbage", "Hopper", "9", "9.0b", "sm_90", "9.0a:8.0", "9.0+ptxx", " ; "])
def test_a_list_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentValueError, match="COMM_CUDA_ARCH_LIST"):
        archs.parse_list(text)


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("9.0a", "9.0", True),
        ("9.0", "9.0", True),
        ("8.0", "8.9", True),
        ("8.9", "8.0", False),
        ("8.0", "9.0", False),
        ("8.0+PTX", "9.0", True),
        ("10.0a", "10.3", False),
        ("10.0a+PTX", "12.0", False),
        ("10.0f", "10.3", True),
        ("10.0f", "12.0", False),
    ],
)
def test_which_code_runs_on_which_device(built: str, capability: str, runs: bool) -> None:
    assert archs.runs_on([built], capability) is runs


def test_nvcc_is_told_machine_code_and_ptx() -> None:
    assert archs.generate_code(("8.0+PTX", "12.0a")) == [
        "--generate-code=arch=compute_80,code=[sm_80,compute_80]",
        "--generate-code=arch=compute_120a,code=sm_120a",
    ]


@given(st.lists(st.sampled_from(["7.5", "8.0", "8.0+PTX", "9.0a", "9.0", "10.0f", "12.0a"]), min_size=1))
def test_the_order_of_a_list_decides_nothing(words: list[str]) -> None:
    assert archs.parse_list(";".join(words)) == archs.parse_list(";".join(sorted(words)))


class _Cuda:
    """As much of torch as the choice of an architecture looks at."""

    def __init__(self, *capabilities: str) -> None:
        self.capabilities = capabilities
        self.cuda, self.version = self, self

    def device_count(self) -> int:
        return len(self.capabilities)

    def is_initialized(self) -> bool:
        return True

    def get_device_properties(self, index: int) -> Any:
        major, minor = map(int, self.capabilities[index].split("."))
        return type("P", (), {"major": major, "minor": minor, "name": "fake", "total_memory": 0})()


def test_the_device_decides_the_architecture_and_an_explicit_list_must_cover_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """L9: of the tensor's device, not of device 0; the "a" form from 9.0 on; a list without it fails early."""
    import torch

    from comm_core import _cuda

    monkeypatch.setattr(_cuda, "source", lambda: _Cuda("8.6", "9.0"))
    monkeypatch.delenv("COMM_CUDA_ARCH_LIST", raising=False)
    second = torch.device("cuda", 1)
    assert archs.choose(second) == ("9.0a",)
    assert archs.choose(torch.device("cuda", 0)) == ("8.6",)
    assert archs.choose_for_machine() == ("8.6", "9.0a")
    monkeypatch.setenv("COMM_CUDA_ARCH_LIST", "8.0;9.0")
    assert archs.choose(second) == archs.choose_for_machine() == ("8.0", "9.0")
    monkeypatch.setenv("COMM_CUDA_ARCH_LIST", "8.0")
    with pytest.raises(ArgumentValueError, match=r"'8\.0' does not cover cuda:1, .*capability 9\.0: add 9\.0a"):
        archs.choose(second)


def test_without_a_gpu_and_without_a_list_the_error_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """V12: torch's own way ends in an IndexError."""
    from comm_core import _cuda

    monkeypatch.setattr(_cuda, "source", lambda: _Cuda())
    for text in (None, "", "  "):
        if text is not None:
            monkeypatch.setenv("COMM_CUDA_ARCH_LIST", text)
        with pytest.raises(UnsupportedError, match=r"COMM_CUDA_ARCH_LIST=9\.0a.*--arch"):
            archs.choose_for_machine()
