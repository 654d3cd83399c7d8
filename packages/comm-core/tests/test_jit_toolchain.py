"""Finding the compilers: whatever the environment looks like, the right ones or a sentence that says what to set."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from comm_core.errors import JitBuildError
from comm_core.jit import key, libraries, toolchain
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing.fake_nvcc import FakeNvcc

GXX = str(shutil.which("g++"))
"""As it is found before the path is emptied."""

VARIABLES = ("COMM_NVCC", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN", "NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No compiler anywhere, not even where toolkits are usually installed."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(toolchain, "_STANDARD_PLACE", tmp_path / "nothing")


def test_each_place_is_looked_at_and_the_more_explicit_one_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6."""
    local = tmp_path / "usr local"
    for name in ("cuda-12.9", "cuda-13.0", "cuda-9.2", "path", "home", "cuda_path", "explicit"):
        FakeNvcc(local / name)
    monkeypatch.setattr(toolchain, "_STANDARD_PLACE", local)
    assert toolchain.find_nvcc() == (str(local / "cuda-13.0/bin/nvcc"), str(local / "cuda-13.0"))
    (local / "cuda").symlink_to("cuda-12.9")
    assert toolchain.find_nvcc()[0] == str(local / "cuda/bin/nvcc")
    monkeypatch.setenv("PATH", str(local / "path/bin"))
    assert toolchain.find_nvcc() == (str(local / "path/bin/nvcc"), "PATH")
    monkeypatch.setenv("CUDA_PATH", str(local / "cuda_path") + "/")
    assert toolchain.find_nvcc() == (str(local / "cuda_path/bin/nvcc"), "CUDA_PATH")
    monkeypatch.setenv("CUDA_HOME", str(local / "home"))
    assert toolchain.find_nvcc() == (str(local / "home/bin/nvcc"), "CUDA_HOME")
    monkeypatch.setenv("COMM_NVCC", str(local / "explicit/bin/nvcc"))
    assert toolchain.find_nvcc() == (str(local / "explicit/bin/nvcc"), "COMM_NVCC")


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
@pytest.mark.parametrize("value", [":/usr/local/cuda", "/usr/local/cuda:/opt/cuda"])
def test_a_list_of_folders_is_no_toolkit(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6: a leading ':' comes from appending to an empty variable; elsewhere it ends up in the command line."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(JitBuildError, match=rf"{variable}='{value}' must be one folder, not a list"):
        toolchain.find_nvcc()


def test_without_nvcc_the_error_lists_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_HOME", "/nowhere/cuda/")
    with pytest.raises(
        JitBuildError, match=r"/nowhere/cuda/bin/nvcc \(CUDA_HOME\), PATH, .*COMM_NVCC.*commctl jit warm"
    ):
        toolchain.find()
    monkeypatch.setenv("COMM_NVCC", "/nowhere/nvcc")
    with pytest.raises(JitBuildError, match="COMM_NVCC='/nowhere/nvcc' is no program"):
        toolchain.find()


def test_the_toolkit_is_where_nvcc_says_and_not_where_it_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is called nvcc can be a wrapper script; the folder above it is then no toolkit."""
    nvcc = FakeNvcc(tmp_path / "wrapped nvcc")
    monkeypatch.setenv("COMM_NVCC", str(nvcc.path))
    found = toolchain.find()
    assert found.root == str(nvcc.folder / "toolkit")
    assert found.host_compiler == str(nvcc.folder / "bin/host-g++")
    assert (found.version, found.host_version) == ("13.0.88", "g++ (fake) 12.2.0")


def test_a_host_compiler_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L7."""
    monkeypatch.setenv("COMM_NVCC", str(FakeNvcc(tmp_path, host="g++-99").path))
    monkeypatch.setenv("PATH", str(Path(shutil.which("sh", path="/bin:/usr/bin") or "/bin/sh").parent))
    with pytest.raises(
        JitBuildError, match=r"host compiler 'g\+\+-99'.* was not found: install g\+\+, or set NVCC_CCBIN"
    ):
        toolchain.find()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("#!/bin/sh\necho hello\n", "is no nvcc: --version says 'hello"),
        ("#!/bin/sh\necho nvcc fatal: no host compiler >&2; exit 1\n", r"failed with 1: .*NVCC_CCBIN"),
        ("not a program", "can't be run"),
    ],
)
def test_what_is_no_nvcc_is_said_so(text: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvcc"
    program.write_text(text)
    program.chmod(0o755)
    monkeypatch.setenv("COMM_NVCC", str(program))
    with pytest.raises(JitBuildError, match=why):
        toolchain.find()


def test_an_upgraded_toolkit_makes_a_new_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """L11: and the wrapper's path and time say nothing about it, so nothing is remembered beyond the process."""
    monkeypatch.setenv("COMM_NVCC", str(FakeNvcc(tmp_path, version="12.8.61").path))
    old = libraries.wanted(SELFCHECK, ["9.0a"])
    FakeNvcc(tmp_path, version="13.0.88")
    toolchain._found.clear()
    new = libraries.wanted(SELFCHECK, ["9.0a"])
    assert old.key != new.key
    assert key.explain(old.inputs, new.inputs) == ["nvcc: release 12.8, V12.8.61 is now release 13.0, V13.0.88"]


def test_flags_from_the_environment_are_in_the_key_but_the_place_of_the_host_compiler_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMM_NVCC", str(FakeNvcc(tmp_path).path))
    plain = libraries.wanted(SELFCHECK, ["9.0a"])
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin '/opt/my gcc/bin/g++'")
    assert libraries.wanted(SELFCHECK, ["9.0a"]).key == plain.key
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/opt/gcc -g")
    other = libraries.wanted(SELFCHECK, ["9.0a"])
    assert other.key != plain.key and other.inputs["environment"] == {"NVCC_PREPEND_FLAGS": "-g"}


@pytest.mark.parametrize(
    ("nvcc", "torch_cuda", "told"),
    [
        ("13.0.88", "13.0", ""),
        ("13.1.0", "13.0", ""),
        ("13.0.88", "12.8", "nvcc is of CUDA 13.0 and torch of CUDA 12.8; it needs a driver"),
        ("12.8.61", "13.0", "nvcc is of CUDA 12.8 and torch of CUDA 13.0"),
        ("13.0.88", None, ""),
    ],
)
def test_an_nvcc_of_another_major_than_torchs_is_a_remark_and_no_refusal(
    nvcc: str, torch_cuda: str | None, told: str
) -> None:
    """L12: a library with a plain C interface and its own run time shares nothing with torch but the driver."""
    found = toolchain.compare_cuda(nvcc, torch_cuda)
    assert found.startswith(told) and bool(found) == bool(told)


def test_ninja_is_found_beside_the_interpreter_of_an_environment_that_is_not_activated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L6."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(toolchain.sysconfig, "get_path", lambda name: str(tmp_path / "scripts"))
    with pytest.raises(JitBuildError, match="pip install ninja"):
        toolchain.find_ninja()
    for folder in ("on path", "scripts", "venv/bin"):
        program = tmp_path / folder / "ninja"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        if folder == "on path":
            monkeypatch.setenv("PATH", str(program.parent))
        assert toolchain.find_ninja() == str(program)


def test_headers_are_looked_for_by_the_compiler_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it looks depends on its own settings and on variables."""
    monkeypatch.setenv("PATH", str(Path(GXX).parent))
    wanted = ("vector", "mine/own.h", "sys/types.h", "no/such.h")
    assert toolchain.missing_headers(GXX, wanted) == ["mine/own.h", "no/such.h"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "own.h").touch()
    monkeypatch.setenv("CPLUS_INCLUDE_PATH", str(tmp_path))
    assert toolchain.missing_headers(GXX, wanted) == ["no/such.h"]
    with pytest.raises(JitBuildError, match="does not work"):
        toolchain.missing_headers("/bin/false", wanted)
    with pytest.raises(JitBuildError, match="does not work"):
        toolchain.missing_headers(str(tmp_path / "none"), wanted)
