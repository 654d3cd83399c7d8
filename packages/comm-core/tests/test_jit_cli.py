"""``commctl jit``, and how the modules of plugins get there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comm_core import plugins
from comm_core.cli.jit import app
from comm_core.errors import ArgumentValueError, UnsupportedError
from comm_core.jit import ModuleSpec, specs, toolchain
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.plugins.discovery import _Found as Found
from comm_core.plugins.discovery import discover
from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.fake_nvcc import FakeNvcc
from comm_core.windows.launch import WINDOWS

OTHER = replace(SELFCHECK, name="comm_other_m")


class Plugin:
    """Has one CUDA module and nothing else."""

    def __init__(self, *modules: Any) -> None:
        self.modules = modules

    @hookimpl
    def comm_modules(self) -> Any:
        return self.modules


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNvcc:
    fake = FakeNvcc(tmp_path / "compiler")
    monkeypatch.setenv("COMM_NVCC", str(fake.path))
    monkeypatch.setenv("COMM_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("COMM_JIT", "COMM_CUDA_ARCH_LIST"):
        monkeypatch.delenv(name, raising=False)
    return fake


@pytest.fixture
def with_plugin() -> Iterator[None]:
    plugins.register("other", Plugin(OTHER))
    yield
    plugins.unregister("other")


def run(*arguments: str, code: int = 0) -> Any:
    """Run a command; return its JSON document, or its text."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def states() -> dict[str, str]:
    return {f"{row['module']} {','.join(row['archs'])}": row["state"] for row in run("list", "--json")["modules"]}


def test_modules_of_plugins_are_collected_by_name(with_plugin: None) -> None:
    assert specs() == {"comm_core_selfcheck": SELFCHECK, "comm_core_windows": WINDOWS, "comm_other_m": OTHER}
    (report,) = [item for item in plugins.report() if item.name == "other"]
    assert (report.state, report.modules) == ("loaded", ("comm_other_m",))


@pytest.mark.parametrize(
    ("modules", "state", "error"),
    [
        ((replace(OTHER, flags=("-DX",)),), "duplicate", "'comm_other_m' is already provided"),
        ((replace(OTHER, name="comm_b_m"),) * 2, "duplicate", "'comm_b_m' is already provided"),
        (("comm_b_m",), "broken", "must have 'name' of type str"),
        (5, "broken", "TypeError"),
    ],
)
def test_a_plugin_with_wrong_modules_costs_only_itself(modules: Any, state: str, error: str) -> None:
    """Names are unique, as those of transports are; a module needs no wire number, which would say nothing."""
    bad, third = Plugin(), replace(OTHER, name="comm_c_m")
    bad.modules = modules
    registry = discover(
        [Found("a", lambda: Plugin(OTHER)), Found("b", lambda: bad), Found("c", lambda: Plugin(third))]
    )
    reports = {item.name: item for item in registry.reports}
    assert reports["b"].state == state and error in (reports["b"].error or "")
    assert reports["a"].state == reports["c"].state == "loaded"
    assert registry.modules == {"comm_other_m": OTHER, "comm_c_m": third}


def test_warm_builds_everything_for_given_architectures_without_a_gpu(nvcc: FakeNvcc, with_plugin: None) -> None:
    names = ["comm_core_selfcheck", "comm_core_windows", "comm_other_m"]
    assert states() == {f"{name} ": "not built" for name in names}
    built = run("warm", "--arch", "90a", "--arch", "8.0", "--json")["modules"]
    assert [row["module"] for row in built] == names
    assert all(row["archs"] == ["8.0", "9.0a"] and Path(row["path"]).is_file() for row in built)
    assert states() == {f"{name} 8.0,9.0a": "current" for name in names}
    assert "comm_other_m" in run("warm", "--arch", "8.0", "comm_other_m") and len(nvcc.made()) == 3


def test_warm_builds_although_compiling_is_switched_off(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of COMM_JIT=off prints this command, to be run in the same shell."""
    monkeypatch.setenv("COMM_JIT", "off")
    run("warm", "--arch", "9.0a")
    assert nvcc.made() == ["comm_core_selfcheck", "comm_core_windows"]


def test_warm_goes_on_after_a_failure_and_says_so_in_its_exit_code(nvcc: FakeNvcc, with_plugin: None) -> None:
    nvcc.fail('case "$(pwd)" in *selfcheck*) echo "a.cu(1): error: no"; exit 2;; esac')
    first, *others = run("warm", "--arch", "9.0a", "--json", code=1)["modules"]
    assert "a.cu(1): error: no" in first["error"] and first["path"] is None
    assert all(row["error"] is None for row in others) and nvcc.made() == ["comm_core_windows", "comm_other_m"]
    assert "comm_core_selfcheck: failed" in run("warm", "--arch", "9.0a", code=1)


def test_warm_leaves_out_what_needs_headers_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most users don't need that module; who asks for it by name is told which package has the header."""
    fake = FakeNvcc(tmp_path / "compiler", host=shutil.which("g++"))
    monkeypatch.setenv("COMM_NVCC", str(fake.path))
    monkeypatch.setenv("COMM_CACHE_DIR", str(tmp_path / "cache"))
    needs = (("stdio.h", "libc6-dev"), ("no/such.h", "libnone-dev"), ("no/other.h", "libnone-dev"))
    plugins.register("other", Plugin(replace(OTHER, needs=needs)))
    try:
        rows = run("warm", "--arch", "9.0a", "--json")["modules"]
        assert [row["left_out"] for row in rows] == [False, False, True]
        assert "no no/such.h, no/other.h. On Debian" in rows[2]["error"] and rows[2]["path"] is None
        assert "apt-get install libnone-dev" in rows[2]["error"] and "libc6" not in rows[2]["error"]
        assert fake.made() == ["comm_core_selfcheck", "comm_core_windows"]
        assert "comm_other_m: left out" in run("warm", "--arch", "9.0a")
        assert "comm_other_m: failed" in run("warm", "--arch", "9.0a", "comm_other_m", code=1)
        plugins.unregister("other")
        plugins.register("other", Plugin(replace(OTHER, needs=needs[:1])))
        run("warm", "--arch", "9.0a", "comm_other_m")
        assert fake.made()[2:] == ["comm_other_m"]
    finally:
        plugins.unregister("other")


def test_warm_needs_to_know_for_what(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """V12; a list in the environment does as well, and nonsense is refused before anything runs."""
    from comm_core import _cuda

    monkeypatch.setattr(_cuda, "device_count", lambda: 0)
    with pytest.raises(UnsupportedError, match="COMM_CUDA_ARCH_LIST"):
        run("warm")
    with pytest.raises(ArgumentValueError, match="--arch: 'hopper' is no architecture"):
        run("warm", "--arch", "hopper")
    monkeypatch.setenv("COMM_CUDA_ARCH_LIST", "12.0a")
    assert run("warm", "--json")["modules"][0]["archs"] == ["12.0a"]


def test_an_unknown_module_names_the_known_ones_and_the_plugins_that_are_broken(nvcc: FakeNvcc) -> None:
    plugins.register("sad", Plugin(5))
    try:
        with pytest.raises(
            ArgumentValueError,
            match=r"no module 'comm_sad_m'; there are: comm_core_selfcheck, comm_core_windows; plugin 'sad' is br",
        ):
            run("explain", "comm_sad_m", "--arch", "9.0a")
    finally:
        plugins.unregister("sad")


def test_explain_says_what_has_changed_since_the_last_build(nvcc: FakeNvcc) -> None:
    """L11, and whoever wonders why the second start compiled again."""
    said = run("explain", "comm_core_selfcheck", "--arch", "9.0a")
    assert "not built, and no other build of it is in the cache" in said
    (row,) = run("warm", "comm_core_selfcheck", "--arch", "9.0a", "--json")["modules"]
    explained = run("explain", "comm_core_selfcheck", "--arch", "9.0a", "--json")
    assert (explained["path"], explained["key"], explained["changes"]) == (row["path"], row["key"], [])
    FakeNvcc(nvcc.folder, version="13.1.5")
    toolchain._found.clear()
    said = run("explain", "comm_core_selfcheck", "--arch", "8.0")
    assert f"compared with the newest build, {row['key']}" in said
    assert "- architectures: 9.0a is now 8.0\n" in said
    assert "- nvcc: release 13.0, V13.0.88 is now release 13.1, V13.1.5\n" in said


def test_explain_and_list_work_without_a_compiler(nvcc: FakeNvcc, monkeypatch: pytest.MonkeyPatch) -> None:
    """L6."""
    (row,) = run("warm", "comm_core_selfcheck", "--arch", "9.0a", "--json")["modules"]
    monkeypatch.setenv("COMM_NVCC", "/nowhere/nvcc")
    assert states() == {"comm_core_selfcheck 9.0a": "current", "comm_core_windows ": "not built"}
    listed = run("list")
    assert "COMM_NVCC='/nowhere/nvcc' is no program" in listed and row["key"] in listed
    explained = run("explain", "comm_core_selfcheck", "--arch", "9.0a", "--json")
    assert explained["path"] == row["path"] and "COMM_NVCC" in explained["compiler_problem"]


def test_list_only_looks(nvcc: FakeNvcc, tmp_path: Path) -> None:
    run("list")
    run("clean")
    assert not (tmp_path / "cache").exists()


def test_clean_removes_what_nothing_would_load_and_all_removes_everything(
    nvcc: FakeNvcc, tmp_path: Path, with_plugin: None
) -> None:
    run("warm", "--arch", "9.0a")
    FakeNvcc(nvcc.folder, version="13.1.5")
    toolchain._found.clear()
    run("warm", "--arch", "9.0a")
    base = tmp_path / "cache/jit/1"
    (base / "staging/comm_x-k.0000-1-ab").mkdir()
    os.utime(base / "staging/comm_x-k.0000-1-ab", (0, 0))
    (base / "entries/comm_x-broken").mkdir()
    plugins.unregister("other")
    listed = [row["state"] for row in run("list", "--json")["modules"]]
    assert sorted(listed) == ["current", "current", "stale", "stale", "unknown module", "unknown module"]
    removed = run("clean", "--json")["removed"]
    assert sorted(row["why"] for row in removed) == [
        *["stale"] * 2,
        *["unfinished or broken"] * 2,
        *["unknown module"] * 2,
    ]
    assert states() == {"comm_core_selfcheck 9.0a": "current", "comm_core_windows 9.0a": "current"}
    assert "2 folders" in run("clean", "--all")
    assert list((base / "entries").iterdir()) == list((base / "staging").iterdir()) == []


def test_a_description_in_a_plugin_is_only_data(with_plugin: None) -> None:
    """Listing the modules reads no source: that is for whoever builds."""
    gone = ModuleSpec(name="comm_gone_m", package="comm_gone", sources=("csrc/m.cu",), structs={}, entry_points={})
    plugins.register("gone", Plugin(gone))
    try:
        assert "comm_gone_m" in specs()
    finally:
        plugins.unregister("gone")
