"""The developers' command, without making a real environment each time."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import dev
import workspace

TOOL = Path(dev.__file__)
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"


@pytest.fixture
def root(tmp_path):
    """A small workspace in a folder with a space, with a core and a plugin."""
    root = tmp_path / "a workspace"
    for name, module in (("comm-core", "comm_core"), ("comm-x", "comm_x")):
        source = root / "packages" / name / "src" / module
        source.mkdir(parents=True)
        (source / "_version.py").write_text('"""Version."""\n\n__version__ = "0.1.0"\n', encoding="utf-8")
        text = f'[project]\nname = "{name}"\n\n[project.entry-points."comm_core.v1"]\nx = "{module}.plugin:plugin"\n'
        (source.parent.parent / "pyproject.toml").write_text(text, encoding="utf-8")
    (root / "constraints.txt").write_text("torch==2.13.0\n", encoding="utf-8")
    (root / "tools").mkdir()
    shutil.copy(TOOL, root / "tools" / "dev.py")
    return root


class FakeVenv(dev.Venv):
    """A `Venv` whose steps are recorded and make just enough to look like an environment."""

    def __init__(self, root, fail=None):
        super().__init__(root)
        self.steps = []
        self.fail = fail

    def _step(self, what, command):
        self.steps.append((what, command))
        state = dev.read_state(self.path)
        assert state is not None and state["state"] == "building", "a kill here must be noticed by the next run"
        if what == self.fail:
            raise dev.DevError(f"{what} failed")
        if "venv" in command:
            self.python.parent.mkdir()
            self.python.write_text("#!/bin/sh\nexit 0\n", encoding="utf-8")
            self.python.chmod(0o755)


# -- Is there something to do -------------------------------------------------------------------------------------


def test_the_digest_covers_what_decides_an_installation(root):
    """Each input changes it; source files that an editable install does not record do not."""
    seen = {dev.wanted_state(root, PYTHON)["digest"]}
    for path in (
        root / "constraints.txt",
        root / "packages" / "comm-x" / "pyproject.toml",
        root / "packages" / "comm-x" / "src" / "comm_x" / "_version.py",
    ):
        path.write_text(path.read_text(encoding="utf-8") + "# changed\n", encoding="utf-8")
        seen.add(dev.wanted_state(root, PYTHON)["digest"])
    assert len(seen) == 4
    (root / "packages" / "comm-x" / "src" / "comm_x" / "code.py").write_text("", encoding="utf-8")
    assert dev.wanted_state(root, PYTHON)["digest"] in seen


@pytest.mark.parametrize(
    ("change", "action"),
    [
        ({}, "keep"),
        ({"digest": "other"}, "update"),
        ({"state": "stale"}, "update"),
        ({"state": "building"}, "create"),
        ({"python": "3.9"}, "create"),
        ({"root": "/elsewhere"}, "create"),
        ({"digest": "other", "python": "3.9"}, "create"),
    ],
)
def test_what_is_done_depends_on_what_the_environment_says_of_itself(root, change, action):
    """As little as possible, but nothing that was half made, moved or for another Python is kept."""
    wanted = dev.wanted_state(root, PYTHON)
    assert dev.decide(True, {**wanted, **change}, wanted, True)[0] == action


def test_an_environment_without_interpreter_is_made_again_and_a_foreign_one_is_refused(root):
    """The first is what a removed Python leaves behind; the second is the user's."""
    wanted = dev.wanted_state(root, PYTHON)
    assert dev.decide(True, wanted, wanted, False)[0] == "create"
    assert dev.decide(True, None, wanted, True)[0] == "refuse"
    assert dev.decide(False, None, wanted, False)[0] == "create"


def test_it_is_made_once(root):
    """The second run does nothing, so it needs neither time nor network."""
    first = FakeVenv(root)
    environment = first.ensure()
    assert [what for what, _ in first.steps] == [
        "making the virtual environment",
        "installing the build backend",
        "installing the packages",
        "checking the installation",
    ]
    assert environment.python == root / ".venv" / "bin" / "python"
    first.lock.release()
    second = FakeVenv(root)
    second.ensure()
    assert second.steps == []


def test_packages_are_installed_editable_with_pins_and_extras(root):
    """The constraints hold for every installation, and a folder with a space is no part of an argument."""
    made = FakeVenv(root)
    made.ensure()
    command = dict(made.steps)["installing the packages"]
    assert command[1:6] == ["-m", "pip", "install", "--constraint", "constraints.txt"]
    assert command[-4:] == [
        "--editable",
        "packages/comm-core[cuda,demo,test]",
        "--editable",
        "packages/comm-x[test]",
    ]
    assert not [word for word in command[1:] if " " in word]


def test_what_was_interrupted_is_made_again(root, capfd):
    """A kill in the middle (here: of the process that runs pip) leaves something that nobody mistakes for whole."""
    made = FakeVenv(root)
    made.ensure()
    dev.write_state(made.path, {**dev.wanted_state(root, PYTHON), "state": "building"})
    (made.path / "half").write_text("", encoding="utf-8")
    made.lock.release()
    again = FakeVenv(root)
    again.ensure()
    assert len(again.steps) == 4
    assert not (again.path / "half").exists()
    assert "was interrupted" in capfd.readouterr().err
    assert [path.name for path in root.glob(".venv.*")] == [".venv.lock"]


def test_a_failed_update_is_tried_again_on_top(root):
    """pip could not reach an index, say: the next run goes on from there and does not start anew."""
    made = FakeVenv(root)
    made.ensure()
    made.lock.release()
    (root / "constraints.txt").write_text("torch==2.14.0\n", encoding="utf-8")
    failing = FakeVenv(root, fail="installing the packages")
    with pytest.raises(dev.DevError, match="installing the packages failed"):
        failing.ensure()
    failing.lock.release()
    again = FakeVenv(root)
    again.ensure()
    assert [what for what, _ in again.steps] == [what for what, _ in failing.steps] + ["checking the installation"]
    state = dev.read_state(again.path)
    assert state == dev.wanted_state(root, PYTHON)


def test_a_package_that_is_gone_is_uninstalled(root):
    """Its entry point would stay and show up as a broken plugin."""
    made = FakeVenv(root)
    made.ensure()
    made.lock.release()
    shutil.rmtree(root / "packages" / "comm-x")
    again = FakeVenv(root)
    again.ensure()
    assert again.steps[0][1][-3:] == ["uninstall", "--yes", "comm-x"]


def test_somebody_elses_environment_is_left_alone(root):
    """A `.venv` that the user made is not ours to change; --recreate is how they say that it is."""
    (root / ".venv").mkdir()
    (root / ".venv" / "mine").write_text("", encoding="utf-8")
    made = FakeVenv(root)
    with pytest.raises(dev.DevError, match="move it away"):
        made.ensure()
    assert (root / ".venv" / "mine").exists()
    made.ensure(recreate=True)
    assert not (root / ".venv" / "mine").exists()
    assert len(made.steps) == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "null"])
def test_an_unreadable_state_is_no_state(root, text):
    """It is refused like a foreign environment and never taken for a finished one."""
    (root / ".venv").mkdir()
    (root / ".venv" / dev.STATE).write_text(text, encoding="utf-8")
    assert dev.read_state(root / ".venv") is None


# -- Two at a time ------------------------------------------------------------------------------------------------

HOLDER = """
import pathlib, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import dev
lock = dev.Lock(pathlib.Path(sys.argv[2]))
lock.acquire(exclusive=True)
child = subprocess.Popen(["sleep", sys.argv[3]], pass_fds=(lock.descriptor,))
print(child.pid, flush=True)
time.sleep(60)
"""


def hold(path, child_s):
    """Start a process that holds the lock and has a child that inherits it; return it and the child's pid."""
    command = [sys.executable, "-c", HOLDER, str(TOOL.parent), str(path), str(child_s)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def test_a_second_run_waits_and_says_for_whom(tmp_path, capfd):
    """Also when the first one is killed: its pip goes on for a while, and nobody may delete what that works on."""
    path = tmp_path / "lock"
    process, _ = hold(path, child_s=1.5)
    try:
        started = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        lock = dev.Lock(path)
        lock.acquire(exclusive=False)
        assert 0.5 < time.monotonic() - started < 30
        assert f"process {process.pid}" in capfd.readouterr().err
        assert path.exists()
    finally:
        process.kill()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()


def test_users_of_the_environment_do_not_wait_for_each_other(tmp_path, capfd):
    """A demo and a test run side by side; only a change waits for both."""
    first, second = dev.Lock(tmp_path / "lock"), dev.Lock(tmp_path / "lock")
    first.acquire(exclusive=False)
    second.acquire(exclusive=False)
    assert capfd.readouterr().err == ""
    for lock in (first, second):
        lock.release()


# -- The interpreter -----------------------------------------------------------------------------------------------


def test_an_old_python_gets_a_sentence(root):
    """The file is still valid syntax there, and the text says what is needed and what to run."""
    ast.parse(TOOL.read_text(encoding="utf-8"), feature_version=(3, 6))
    assert "\nfrom __future__" not in TOOL.read_text(encoding="utf-8")
    found = {"python3.12": "/usr/bin/python3.12", "python3.11": "/usr/bin/python3.11"}
    text = dev.python_problem((3, 9), found.get)
    assert text is not None
    assert "3.10 or newer is needed, this is 3.9" in text
    assert "/usr/bin/python3.12 tools/dev.py" in text
    assert "install one" in str(dev.python_problem((3, 9), lambda name: None))
    assert dev.python_problem((3, 10)) is None
    assert dev.python_problem((3, 13)) is None


def test_a_python_without_venv_names_the_package(monkeypatch):
    """Debian splits it off."""
    real = importlib.util.find_spec
    monkeypatch.setattr(
        dev.importlib.util, "find_spec", lambda name, *rest: None if name == "ensurepip" else real(name, *rest)
    )
    text = dev.venv_problem()
    assert text is not None
    assert "lacks ensurepip" in text
    assert "apt-get install python3-venv" in text
    monkeypatch.undo()
    assert dev.venv_problem() is None


def test_nothing_is_installed_into_the_system_without_being_root(monkeypatch):
    """Nor for an interpreter that is not the system's own, whose package would be another."""
    monkeypatch.setattr(dev.subprocess, "run", lambda *args, **kwargs: pytest.fail("ran something"))
    monkeypatch.setattr(dev.os, "geteuid", lambda: 1000)
    assert not dev.install_venv_module("problem")
    monkeypatch.setattr(dev.os, "geteuid", lambda: 0)
    monkeypatch.setattr(dev.sys, "_base_executable", "/opt/python/bin/python3", raising=False)
    assert not dev.install_venv_module("problem")


# -- Running commands ---------------------------------------------------------------------------------------------


def call(root, *arguments, cwd, python=sys.executable, **variables):
    """Run the tool of the workspace `root`; return its exit code and its two outputs."""
    env = {key: value for key, value in os.environ.items() if key not in ("COMM_DEV_SYSTEM", "PYTHONPATH")}
    done = subprocess.run(
        [python, root / "tools" / "dev.py", *arguments],
        cwd=cwd,
        env={**env, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def ready(root):
    """The workspace with a finished environment, whose interpreter says how it was called and fails with 7."""
    made = FakeVenv(root)
    made.ensure()
    made.lock.release()
    os.close(made.lock.descriptor)
    made.python.write_text('#!/bin/sh\npwd\nprintf "%s\\n" "$@"\nexit 7\n', encoding="utf-8")
    return root


def test_the_demo_takes_arguments_and_gives_its_exit_code_from_any_folder(ready, tmp_path):
    """Paths that the user passes are relative to where the user is."""
    code, output, errors = call(ready, "demo", "--ranks", "2", "--help", cwd=tmp_path)
    assert (code, errors) == (7, "")
    assert output.splitlines() == [str(tmp_path), "-m", "comm_core.demo", "--ranks", "2", "--help"]


def test_bench_runs_the_script_of_the_workspace(ready, tmp_path):
    """With the environment's interpreter, in the workspace's folder."""
    code, output, _ = call(ready, "bench", "--quick", cwd=tmp_path)
    assert code == 7
    assert output.splitlines() == [str(ready), str(ready / "tools" / "bench.py"), "--quick"]


@pytest.mark.parametrize("arguments", [["setup", "--what"], ["lint", "--what"], ["no-such-command"], []])
def test_what_is_not_understood_is_an_error(ready, tmp_path, arguments):
    """A typo does not pass for success in a script."""
    code, _, errors = call(ready, *arguments, cwd=tmp_path)
    assert code in (1, 2)
    assert errors


# -- Running from source ------------------------------------------------------------------------------------------


def test_plugins_are_registered_without_an_installation(root):
    """Entry points are found by what lies beside the sources, and what was removed is found no more."""
    target = root / ".venv-system"
    assert dev.write_metadata(root, target)
    found = list(importlib.metadata.distributions(path=[str(target)]))
    assert sorted((item.name, item.version) for item in found) == [("comm-core", "0.1.0"), ("comm-x", "0.1.0")]
    values = sorted(point.value for item in found for point in item.entry_points if point.group == "comm_core.v1")
    assert values == ["comm_core.plugin:plugin", "comm_x.plugin:plugin"]
    shutil.rmtree(root / "packages" / "comm-x")
    assert dev.write_metadata(root, target)
    assert [item.name for item in importlib.metadata.distributions(path=[str(target)])] == ["comm-core"]


def test_from_source_the_packages_are_on_the_path_and_nothing_is_installed(root, tmp_path):
    """An image with torch and without a network: the interpreter that was called runs what is in the tree."""
    (root / "packages" / "comm-core" / "src" / "comm_core" / "__init__.py").write_text("", encoding="utf-8")
    demo = (
        "import importlib.metadata, sys\nprint(sys.executable, sys.argv[1:], importlib.metadata.version('comm-x'))\n"
    )
    (root / "packages" / "comm-core" / "src" / "comm_core" / "demo.py").write_text(demo, encoding="utf-8")
    for how in ({"COMM_DEV_SYSTEM": "1"}, {}):
        arguments = ["demo", "--fast"] if how else ["--system", "demo", "--fast"]
        code, output, errors = call(root, *arguments, cwd=tmp_path, **how)
        assert (code, output) == (0, f"{sys.executable} ['--fast'] 0.1.0\n"), errors
        assert "nothing is installed" in errors
    assert not (root / ".venv").exists()


def test_from_source_what_is_missing_is_named(root, tmp_path):
    """Without torch nothing runs, and the text says so instead of a traceback from the middle of an import."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "bare")
    python = tmp_path / "bare" / "bin" / "python"
    code, output, errors = call(root, "--system", "demo", cwd=tmp_path, python=python)
    assert (code, output) == (1, "")
    assert f"{python} has no packaging, pluggy, rich, torch, typer" in errors


def test_from_source_what_is_left_out_is_named(root, monkeypatch, capfd):
    """An image for GPU machines has pytest, but may lack the tools of lint and of packaging."""
    monkeypatch.setattr(
        dev.Environment, "has", lambda self, *modules: sorted({"pyright", "hatchling"} & set(modules))
    )
    commands = []
    monkeypatch.setattr(dev.Environment, "become", lambda self, command, in_root: commands.append(command) or 0)
    assert dev.test(dev.Environment(root, Path(sys.executable), {}), ["-k", "word"]) == 0
    assert commands == [[sys.executable, "-m", "pytest", "-k", "word", "--ignore=tests/packaging"]]
    errors = capfd.readouterr().err
    assert "LEFT OUT: lint, since pyright can't be imported here" in errors
    assert "LEFT OUT: tests/packaging, since hatchling can't be imported here" in errors


def test_tests_of_rdma_that_can_not_run_are_named_and_fail_in_ci(root, monkeypatch, capfd):
    """Headers of rdma-core are no part of the environment that this tool makes."""
    monkeypatch.setattr(dev.Environment, "has", lambda self, *modules: [])
    monkeypatch.setattr(dev.Environment, "call", lambda self, command: 0)
    ran = []
    monkeypatch.setattr(dev.Environment, "become", lambda self, command, in_root: ran.append(command) or 0)
    monkeypatch.setattr(dev, "RDMA_HEADERS", ("stdio.h", "infiniband/none.h"))
    monkeypatch.delenv("CI", raising=False)
    environment = dev.Environment(root, Path(sys.executable), {}, 0)
    assert dev.test(environment, []) == 0 and len(ran) == 1
    errors = capfd.readouterr().err
    assert "LEFT OUT: the tests of RDMA" in errors and "no infiniband/none.h: apt-get install libib" in errors
    monkeypatch.setenv("CI", "true")
    with pytest.raises(dev.DevError, match="tests of RDMA can't run"):
        dev.test(environment, [])
    assert len(ran) == 1
    monkeypatch.setattr(dev, "RDMA_HEADERS", ("stdio.h",))
    assert dev.test(environment, []) == 0 and len(ran) == 2
    monkeypatch.setenv("PATH", "")
    assert dev.missing_rdma_headers() == ["stdio.h"]


def test_tests_do_not_run_where_lint_fails(root, monkeypatch):
    """What CI runs fails with the first that fails, and in a finished environment nothing is left out."""
    monkeypatch.setattr(dev.Environment, "has", lambda self, *modules: [])
    monkeypatch.setattr(dev.Environment, "call", lambda self, command: int("pyright" in command))
    monkeypatch.setattr(dev.Environment, "become", lambda self, command, in_root: pytest.fail("ran the tests"))
    assert dev.test(dev.Environment(root, Path(sys.executable), {}, 0), []) == 1


# -- The pins -----------------------------------------------------------------------------------------------------


def test_every_direct_dependency_is_pinned_within_its_range():
    """What CI uses is what the packages allow, and nothing that we name is left to the day of the set-up."""
    lines = (workspace.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {item.name: item for item in (Requirement(line) for line in lines if line and not line.startswith("#"))}
    assert all([part.operator for part in item.specifier] == ["=="] for item in pins.values())
    needed = [Requirement(text) for text in (*dev.BUILD_BACKEND, *dev.DEV_TOOLS)]
    packages = workspace.find_packages(workspace.ROOT)
    for package in packages.values():
        needed += [item for item in package.requirements if not item.name.startswith("comm-")]
    assert {item.name for item in needed} - set(pins) == set()
    for item in needed:
        (pin,) = pins[item.name].specifier
        assert item.specifier.contains(pin.version), f"{pins[item.name]} is outside {item}"
