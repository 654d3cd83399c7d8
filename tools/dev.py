#!/usr/bin/env python3
"""Set up this workspace and run what its developers and its CI run. Needs Python 3.10 or newer and nothing else.

    python tools/dev.py demo            the main job on this machine
    python tools/dev.py test            lint, types and every test that runs without a GPU
    python tools/dev.py COMMAND --help  what a command takes

Every command first makes sure that `.venv` beside this folder holds what the packages and `constraints.txt` ask for,
which takes minutes the first time, and neither time nor network after that. It works from any folder.

Where the environment can't be installed because there is no network, but the interpreter already has torch (an image
for GPU machines, for example), `COMM_DEV_SYSTEM=1` or `--system` runs everything from source with that interpreter:
nothing is installed, and what can't run without the missing packages is named and left out.
"""

# Python 3.6 can still parse this file, so that someone with an old `python` gets a sentence and not a SyntaxError:
# hence no `from __future__ import annotations`, and no definition with a newer annotation above the check.

import argparse
import contextlib
import errno
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

MINIMUM_PYTHON = (3, 10)


def python_problem(version, which=shutil.which):  # noqa: ANN001, ANN201
    """Return why an interpreter of `version` (major, minor) can't be used and what to run instead, or None."""
    if tuple(version) >= MINIMUM_PYTHON:
        return None
    newer = [
        found for found in (which(f"python3.{minor}") for minor in range(20, MINIMUM_PYTHON[1] - 1, -1)) if found
    ]
    fix = f"run it as: {newer[0]} tools/dev.py …" if newer else "install one and run it with that"
    return f"Python 3.10 or newer is needed, this is {version[0]}.{version[1]} ({sys.executable}); {fix}"


if __name__ == "__main__" and python_problem(sys.version_info[:2]):
    sys.exit("dev.py: " + str(python_problem(sys.version_info[:2])))


ROOT = Path(__file__).resolve().parent.parent
STATE = "comm-dev.json"
"""File in the environment that says what was made, and whether making it was finished."""
FORMAT = 1
"""Number of the layout of the environment; raising it rebuilds everyone's."""

BUILD_BACKEND = ("hatchling", "editables")
"""What an editable install of the packages needs; installed first, so that no build downloads its own copy."""

DEV_TOOLS = ("build", "clang-format", "pyright[nodejs]", "pytest", "pytest-timeout", "ruff", "towncrier")
"""Lint, test and release tools; `constraints.txt` has their versions."""

EXTRAS = {"comm-core": "cuda,demo,test"}
"""Package folder -> extras that developers get; the others get ``test``."""

RUNTIME_MODULES = ("packaging", "pluggy", "rich", "torch", "typer")
"""What the packages import; all of it must be there to run from source."""

VENV_PACKAGE = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
"""Debian's package of `venv` for this interpreter."""


RDMA_HEADERS = ("infiniband/verbs.h", "infiniband/mlx5dv.h")
RDMA_PACKAGES = "libibverbs-dev ibverbs-providers python3-pyverbs"
"""Debian's packages for the tests of RDMA: `.ci/run` installs them."""


class DevError(Exception):
    """Something that the user can mend; the text says how."""


def say(text: str) -> None:
    """Print a line of progress to standard error, so that a command's own output stays clean."""
    print(f"[dev] {text}", file=sys.stderr, flush=True)


# -- What the environment should be -------------------------------------------------------------------------------


def package_folders(root: Path) -> list[Path]:
    """Return the folders under packages/ that are packages, in order of name."""
    return sorted(path.parent for path in (root / "packages").glob("*/pyproject.toml"))


def wanted_state(root: Path, python: str) -> dict[str, object]:
    """Return what an environment for `root` and Python `python` ("3.11") must say of itself to be up to date.

    The digest covers everything that decides what gets installed: the constraints, each package's pyproject.toml and
    version (an editable install records both), and the lists in this file.
    """
    sha = hashlib.sha256()
    folders = package_folders(root)
    inputs = [root / "constraints.txt"]
    for folder in folders:
        inputs += [folder / "pyproject.toml", *sorted(folder.glob("src/*/_version.py"))]
    for path in inputs:
        sha.update(f"{path.relative_to(root)}\0{len(path.read_bytes())}\0".encode())
        sha.update(path.read_bytes())
    sha.update(json.dumps([FORMAT, BUILD_BACKEND, DEV_TOOLS, EXTRAS], sort_keys=True).encode())
    return {
        "state": "ready",
        "digest": sha.hexdigest(),
        "python": python,
        "root": str(root),
        "packages": [folder.name for folder in folders],
    }


def decide(exists: bool, found: dict[str, object] | None, wanted: dict[str, object], usable: bool) -> tuple[str, str]:
    """Return what to do about the environment ("keep", "update", "create" or "refuse") and why. Pure.

    Args:
        exists: whether there is anything at its place.
        found: what it says of itself, or None.
        wanted: what it should say.
        usable: whether its interpreter can be run.
    """
    if not exists:
        return "create", "there is none yet"
    if found is None:
        return "refuse", "it was not made by this tool"
    if found.get("state") == "building":
        return "create", "making it was interrupted"
    if found.get("root") != wanted["root"]:
        return "create", f"it was made for {found.get('root')}, and its paths are absolute"
    if found.get("python") != wanted["python"]:
        return "create", f"it is for Python {found.get('python')}, and this is {wanted['python']}"
    if not usable:
        return "create", "its interpreter is gone"
    if found.get("state") != "ready":
        return "update", "the last update failed"
    if found.get("digest") != wanted["digest"]:
        return "update", "the packages or the constraints have changed"
    return "keep", "it is up to date"


def read_state(venv: Path) -> dict[str, object] | None:
    """Return what the environment at `venv` says of itself, or None where it says nothing that can be read."""
    try:
        value = json.loads((venv / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def write_state(venv: Path, state: dict[str, object]) -> None:
    """Replace what the environment says of itself, at once: a reader sees the old text or the new one."""
    temporary = venv / (STATE + ".new")
    temporary.write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
    temporary.replace(venv / STATE)


# -- One at a time ------------------------------------------------------------------------------------------------


class Lock:
    """A lock between processes: shared by those that use the environment, exclusive for the one that changes it.

    The kernel drops it with the last process that has the descriptor, so nothing can leave it behind, and children
    that get the descriptor (pip) keep it when this process is killed. The file is never deleted: whoever waits has it
    open, and would end up holding a lock on a file that nobody else sees.
    """

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def acquire(self, exclusive: bool) -> None:
        """Take the lock, or change the kind that is held; says what it waits for."""
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(self.descriptor, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            holder = os.pread(self.descriptor, 100, 0).decode(errors="replace").strip()
            if exclusive:
                say("the environment must be changed, and another run is using it; waiting for that to end")
            else:
                say(f"another run ({holder or 'unknown'}) is setting up the environment; waiting for it")
            fcntl.flock(self.descriptor, kind)
        if exclusive:
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, f"process {os.getpid()}".encode(), 0)

    def release(self) -> None:
        """Give the lock up."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)


# -- The environment of this workspace ----------------------------------------------------------------------------


class Environment:
    """An interpreter that can import the packages, and the variables to run it with.

    Attributes:
        root: the workspace.
        python: path of the interpreter.
        variables: the environment of its processes.
        descriptor: the lock's descriptor, or -1; processes that inherit it keep the environment from being changed.
    """

    def __init__(self, root: Path, python: Path, variables: dict[str, str], descriptor: int = -1) -> None:
        self.root = root
        self.python = python
        self.variables = variables
        self.descriptor = descriptor

    def has(self, *modules: str) -> list[str]:
        """Return those of `modules` that the interpreter can't import."""
        code = "import importlib.util,sys\nprint(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
        done = subprocess.run(
            [str(self.python), "-c", code, *modules],
            env=self.variables,
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
            text=True,
        )
        return done.stdout.split()

    def call(self, command: list[str]) -> int:
        """Run `command` in the workspace's folder and return its exit code."""
        keep = () if self.descriptor < 0 else (self.descriptor,)
        return subprocess.call(command, cwd=self.root, env=self.variables, pass_fds=keep)

    def become(self, command: list[str], *, in_root: bool) -> int:
        """Replace this process by `command`, so that its exit code, signals and terminal are the user's own."""
        if in_root:
            os.chdir(self.root)
        if self.descriptor >= 0:
            os.set_inheritable(self.descriptor, True)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(command[0], command, self.variables)


class Venv:
    """`.venv`, made and kept up to date by this tool."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = root / ".venv"
        self.python = self.path / "bin" / "python"
        self.lock = Lock(root / ".venv.lock")

    def ensure(self, *, recreate: bool = False) -> Environment:
        """Return the environment, up to date. It can't be changed as long as this process or its child lives."""
        while True:
            wanted = wanted_state(self.root, f"{sys.version_info[0]}.{sys.version_info[1]}")
            self.lock.acquire(exclusive=False)
            if self._decide(wanted)[0] == "keep" and not recreate:
                break
            self.lock.acquire(exclusive=True)
            # Changing the kind of a lock lets others in between, so look again, both here and at the top.
            action, why = ("create", "--recreate") if recreate else self._decide(wanted)
            if action == "refuse":
                raise DevError(
                    f"{self.path} exists, but {why}: move it away, or let `python tools/dev.py setup --recreate` "
                    "delete it and make its own"
                )
            if action != "keep":
                self._make(action, why, wanted)
            recreate = False
        return Environment(self.root, self.python, self._variables(), self.lock.descriptor)

    def _decide(self, wanted: dict[str, object]) -> tuple[str, str]:
        exists = self.path.is_symlink() or self.path.exists()
        return decide(exists, read_state(self.path), wanted, os.access(self.python, os.X_OK))

    def _variables(self) -> dict[str, str]:
        variables = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONHOME", "__PYVENV_LAUNCHER__")
        }
        # What `activate` sets: commands of the environment are found first.
        variables["VIRTUAL_ENV"] = str(self.path)
        variables["PATH"] = os.pathsep.join([str(self.path / "bin"), os.environ.get("PATH", os.defpath)])
        return variables

    def _make(self, action: str, why: str, wanted: dict[str, object]) -> None:
        started = time.monotonic()
        if action == "create":
            problem = venv_problem()
            if problem and not (install_venv_module(problem) and venv_problem() is None):
                raise DevError(problem)
            say(f"step 1 of 3: make {self.path} with Python {platform.python_version()} ({why})")
            self._create(wanted)
        else:
            say(f"step 1 of 3: keep {self.path}, which needs an update ({why})")
        before = read_state(self.path) or {}
        # As long as it says "building", a run that finds it starts anew: what a killed pip leaves can't be trusted.
        write_state(self.path, {**before, "state": "building"})
        try:
            self._install(before)
        except DevError:
            # pip reported the failure and put back what it had removed, so another try may go on from here.
            write_state(self.path, {**before, "state": "stale"})
            raise
        write_state(self.path, wanted)
        say(f"the environment is ready ({time.monotonic() - started:.0f} s); from now on it needs no network")

    def _create(self, wanted: dict[str, object]) -> None:
        # Both ends are renames, so that a kill leaves no folder that this tool would take for somebody else's.
        trash, fresh = self.path.with_name(".venv.trash"), self.path.with_name(".venv.fresh")
        for leftover in (trash, fresh):
            shutil.rmtree(leftover, ignore_errors=True)
        if self.path.is_symlink():
            self.path.unlink()
        elif self.path.exists():
            self.path.rename(trash)
            shutil.rmtree(trash, ignore_errors=True)
        fresh.mkdir()
        # Not yet its digest: an update that fails later must not look like this one.
        write_state(fresh, {**wanted, "state": "building", "digest": "", "packages": []})
        fresh.rename(self.path)
        # The interpreter behind a virtual environment, since ours may be the very one that was just deleted.
        base = getattr(sys, "_base_executable", None) or sys.executable
        self._step("making the virtual environment", [base, "-m", "venv", str(self.path)])

    def _install(self, before: dict[str, object]) -> None:
        pip = [str(self.python), "-m", "pip"]
        install = [*pip, "install", "--constraint", "constraints.txt"]
        recorded = before.get("packages")
        names = [folder.name for folder in package_folders(self.root)]
        gone = [name for name in recorded if name not in names] if isinstance(recorded, list) else []
        if gone:
            # Their entry points would stay, and lead to nothing.
            self._step(f"removing {', '.join(gone)}", [*pip, "uninstall", "--yes", *gone])
        say("step 2 of 3: install the build backend")
        self._step("installing the build backend", [*install, *BUILD_BACKEND])
        say("step 3 of 3: install the packages and the tools (at first some hundred megabytes, most of it torch)")
        editable = [word for name in names for word in ("--editable", f"packages/{name}[{EXTRAS.get(name, 'test')}]")]
        self._step("installing the packages", [*install, "--no-build-isolation", *DEV_TOOLS, *editable])
        self._step("checking the installation", [*pip, "check"])

    def _step(self, what: str, command: list[str]) -> None:
        # A user's settings for pip may name an index, but must not move the installation elsewhere.
        moved = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_PYTHON")
        variables = {key: value for key, value in os.environ.items() if key not in moved}
        variables.update({"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"})
        done = subprocess.run(
            command,
            cwd=self.root,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            pass_fds=(self.lock.descriptor,),
            check=False,
        )
        if done.returncode == 0:
            return
        hint = ""
        if importlib.util.find_spec("torch") is not None:
            hint = " This interpreter has torch: `COMM_DEV_SYSTEM=1` runs from source with it and installs nothing."
        raise DevError(
            f"{what} failed (exit code {done.returncode}); its output is above. The first set-up needs a package "
            f"index that pip can reach. Run the same command again to go on.{hint}"
        )


def venv_problem() -> str | None:
    """Return why this interpreter can't make a virtual environment with pip, or None."""
    importlib.invalidate_caches()
    specs = {name: importlib.util.find_spec(name) for name in ("venv", "ensurepip")}
    # A folder that is left over from a removed package is found as well, but without a file.
    missing = [name for name, spec in specs.items() if spec is None or spec.origin is None]
    if not missing:
        return None
    return (
        f"{sys.executable} can't make a virtual environment, it lacks {' and '.join(missing)}. On Debian and Ubuntu: "
        f"apt-get install python3-venv (for a Python beside the system's own: {VENV_PACKAGE})"
    )


def install_venv_module(problem: str) -> bool:
    """Install what `venv_problem` found missing where that is ours to do: as root, on Debian. Returns success."""
    base = Path(getattr(sys, "_base_executable", None) or sys.executable).resolve()
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists() or base.parent != Path("/usr/bin"):
        return False
    apt = shutil.which("apt-get")
    if apt is None:
        return False
    say(f"{problem}. Doing that now, since this is root")
    variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in ([apt, "update"], [apt, "install", "--yes", "--no-install-recommends", VENV_PACKAGE]):
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), check=False
        )
        if done.returncode != 0:
            return False
    return True


# -- Running from source with the machine's own interpreter -------------------------------------------------------


def system_environment(root: Path) -> Environment:
    """Return the environment of this interpreter with the packages' sources on its path; installs nothing."""
    sources = [str(folder / "src") for folder in package_folders(root)]
    metadata = root / ".venv-system"
    registered = write_metadata(root, metadata)
    path = [*sources, str(metadata), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    environment = Environment(root, Path(sys.executable), variables)
    say(f"running from source with {sys.executable}; nothing is installed")
    if not registered:
        say("plugins are not registered: reading their pyproject.toml needs Python 3.11 or newer, or pip")
    missing = environment.has(*RUNTIME_MODULES)
    if missing:
        raise DevError(f"{sys.executable} has no {', '.join(missing)}; running from source needs them")
    return environment


def _toml_loads() -> object | None:
    """Return a function that reads TOML, or None. Python 3.11 and newer have one, and pip carries one."""
    for name in ("tomllib", "tomli", "pip._vendor.tomli"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).loads
    return None


def write_metadata(root: Path, target: Path) -> bool:
    """Write what an installation would record about each package, so that their entry points are found.

    Only the name, the version and the entry points. Returns False where TOML can't be read.
    """
    loads = _toml_loads()
    if not callable(loads):
        return False
    wanted: set[str] = set()
    for folder in package_folders(root):
        project = loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]  # type: ignore[index]
        version = _source_version(folder)
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        lines: list[str] = []
        for group, entries in groups.items():
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
        info = target / f"{project['name'].replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        wanted.add(info.name)
        header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {version}\n"
        for name, text in (("METADATA", header), ("entry_points.txt", "\n".join(lines))):
            temporary = info / f"{name}.{os.getpid()}"
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(info / name)
    for stale in [path for path in target.glob("*.dist-info") if path.name not in wanted]:
        shutil.rmtree(stale, ignore_errors=True)
    return True


def _source_version(folder: Path) -> str:
    for path in folder.glob("src/*/_version.py"):
        match = re.search(r'^__version__ = "([^"]+)"$', path.read_text(encoding="utf-8"), re.MULTILINE)
        if match:
            return match.group(1)
    raise DevError(f'{folder}/src/*/_version.py has no line like: __version__ = "0.1.0"')


# -- Commands -----------------------------------------------------------------------------------------------------


def setup(environment: Environment, rest: list[str]) -> int:
    """Make or update the environment and nothing else (--recreate: start anew)."""
    if rest:
        raise DevError(f"setup takes --recreate alone, got {' '.join(rest)}")
    say(f"interpreter: {environment.python}")
    return 0


def demo(environment: Environment, rest: list[str]) -> int:
    """Run the main job: sequence-parallel attention over a real picture. Arguments go to comm_core.demo."""
    return environment.become([str(environment.python), "-m", "comm_core.demo", *rest], in_root=False)


def commctl(environment: Environment, rest: list[str]) -> int:
    """Run commctl of this tree, with the plugins of this tree. Arguments go to it."""
    code = "from comm_core.cli.main import main; main()"
    return environment.become([str(environment.python), "-c", code, *rest], in_root=False)


def lint(environment: Environment, rest: list[str]) -> int:
    """Check format, style and types (--fix: mend what can be mended)."""
    if rest not in ([], ["--fix"]):
        raise DevError(f"lint takes --fix alone, got {' '.join(rest)}")
    missing = environment.has("ruff", "pyright")
    if missing:
        raise DevError(f"{environment.python} has no {', '.join(missing)}")
    # The PyPI package of pyright carries pyright itself; the first variable keeps it from asking the network for a
    # newer one, and without the others it would fetch a version that is not the pinned one.
    environment.variables["PYRIGHT_PYTHON_IGNORE_WARNINGS"] = "1"
    for name in ("PYRIGHT_PYTHON_FORCE_VERSION", "PYRIGHT_PYTHON_PYLANCE_VERSION"):
        environment.variables.pop(name, None)
    python = str(environment.python)
    checks = [
        ("ruff check", [python, "-m", "ruff", "check", *rest, "."]),
        ("ruff format", [python, "-m", "ruff", "format", *([] if rest else ["--check"]), "."]),
        # Named, since a pyrightconfig.json in a folder above would be preferred.
        ("pyright", [python, "-m", "pyright", "--project", "pyproject.toml", "--pythonpath", python]),
    ]
    files = native_sources(environment.root)
    if files:
        binary = str(environment.python.parent / "clang-format")
        checks.append(("clang-format", [binary, *(["-i"] if rest else ["--dry-run", "-Werror"]), *files]))
    failed = []
    for name, command in checks:
        say(f"lint: {name}")
        if environment.call(command) != 0:
            failed.append(name)
    if failed:
        say(f"lint failed: {', '.join(failed)}" + ("" if rest else " (`python tools/dev.py lint --fix` mends some)"))
    return 1 if failed else 0


def native_sources(root: Path) -> list[str]:
    """Return the C, C++ and CUDA files of the workspace, relative to it."""
    suffixes = {".c", ".cpp", ".cu", ".cuh", ".h"}
    found = [path for top in ("packages", "tests") for path in (root / top).rglob("*") if path.suffix in suffixes]
    return sorted(str(path.relative_to(root)) for path in found)


def missing_rdma_headers() -> list[str]:
    """Return the headers of rdma-core that the host's compiler does not find; all of them without a compiler."""
    text = "".join(
        f"#if !__has_include(<{header}>)\nmissing {number}\n#endif\n" for number, header in enumerate(RDMA_HEADERS)
    )
    try:
        done = subprocess.run(
            ["g++", "-E", "-P", "-x", "c++", "-"], input=text, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return list(RDMA_HEADERS)
    return [RDMA_HEADERS[int(number)] for number in re.findall(r"^missing (\d+)$", done.stdout, re.MULTILINE)]


def test(environment: Environment, rest: list[str]) -> int:
    """Run lint, then every test that runs without a GPU. Arguments go to pytest, which runs in the workspace."""
    system = environment.descriptor < 0
    missing = environment.has("ruff", "pyright") if system else []
    if missing:
        say(f"LEFT OUT: lint, since {', '.join(missing)} can't be imported here")
    elif lint(environment, []) != 0:
        return 1
    command = [str(environment.python), "-m", "pytest", *rest]
    missing = environment.has("build", "hatchling", "towncrier") if system else []
    if missing:
        say(f"LEFT OUT: tests/packaging, since {', '.join(missing)} can't be imported here")
        command.append("--ignore=tests/packaging")
    missing = missing_rdma_headers()
    if missing:
        # pytest names each of them at the end; with CI=true they fail.
        say(
            "LEFT OUT: the tests of RDMA on the emulator (packages/comm-pcie/tests/test_pcie_rdma_*.py), since there "
            f"is no {', '.join(missing)}: apt-get install {RDMA_PACKAGES}"
        )
        if os.environ.get("CI", "").lower() in ("1", "true"):
            raise DevError("CI=true, and the tests of RDMA can't run")
    return environment.become(command, in_root=True)


def _script(name: str, *, in_root: bool) -> object:
    def run(environment: Environment, rest: list[str]) -> int:
        command = [str(environment.python), str(environment.root / "tools" / name), *rest]
        return environment.become(command, in_root=in_root)

    return run


COMMANDS = {
    "setup": (setup, "make or update .venv and nothing else (--recreate: delete it first)"),
    "demo": (demo, "run the main job on this machine; arguments go to comm_core.demo"),
    "commctl": (commctl, "run commctl of this tree; arguments go to it"),
    "test": (test, "lint, then every test that runs without a GPU; arguments go to pytest"),
    "lint": (lint, "check format, style and types (--fix: mend what can be mended)"),
    "bench": (_script("bench.py", in_root=True), "measure what the project promises; arguments go to tools/bench.py"),
    "new-plugin": (_script("new_plugin.py", in_root=False), "write a new plugin package (tools/new_plugin.py)"),
    "release": (_script("release.py", in_root=True), "release one package (tools/release.py)"),
}


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; everything behind the command is the command's own."""
    commands = "\n".join(f"  {name:12}{text}" for name, (_, text) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="dev.py",
        description=__doc__,
        epilog=f"commands:\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--system",
        action="store_true",
        default=os.environ.get("COMM_DEV_SYSTEM", "") not in ("", "0"),
        help="run from source with this interpreter, install nothing (as COMM_DEV_SYSTEM=1)",
    )
    parser.add_argument("command", choices=list(COMMANDS), metavar="COMMAND", help="see below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="arguments of the command")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Run the command in `argv`; returns the exit code unless the command took this process over."""
    arguments = parse(argv)
    run = COMMANDS[arguments.command][0]
    rest = list(arguments.rest)
    try:
        if arguments.system:
            environment = system_environment(ROOT)
        else:
            recreate = arguments.command == "setup" and "--recreate" in rest
            rest = [item for item in rest if not recreate or item != "--recreate"]
            environment = Venv(ROOT).ensure(recreate=recreate)
        return run(environment, rest)  # type: ignore[operator]
    except DevError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
