"""What the tools and the packaging tests share: reading packages, building them, and environments to try them in."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pyright: ignore[reportMissingImports]  # comes with pytest there

ROOT = Path(__file__).resolve().parent.parent
CORE = "comm-core"
HOOK_GROUP = re.compile(r"comm_core\.v\d+")
VERSION_LINE = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)


class WorkspaceError(Exception):
    """Something in the workspace is not as it must be; the text says what and where."""


@dataclass(frozen=True)
class Package:
    """A package of the workspace, as its files describe it."""

    folder: Path

    @cached_property
    def _project(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    @property
    def name(self) -> str:
        """Distribution name, ``comm-nvlink``."""
        return str(self._project["name"])

    @property
    def module(self) -> str:
        """Import name, ``comm_nvlink``."""
        return self.name.replace("-", "_")

    @property
    def stem(self) -> str:
        """What the names of its test files carry, ``nvlink``."""
        return self.module.removeprefix("comm_")

    @property
    def version_file(self) -> Path:
        """The file that holds its version."""
        return self.folder / "src" / self.module / "_version.py"

    @property
    def version(self) -> Version:
        """Its version."""
        match = VERSION_LINE.search(self.version_file.read_text(encoding="utf-8"))
        if match is None:
            raise WorkspaceError(f'{self.version_file} has no line like: __version__ = "0.1.0"')
        return Version(match.group(1))

    @property
    def requirements(self) -> list[Requirement]:
        """What it depends on, with its extras."""
        extras: dict[str, list[str]] = self._project.get("optional-dependencies", {})
        lists = [self._project.get("dependencies", []), *extras.values()]
        return [Requirement(text) for texts in lists for text in texts]

    @property
    def core_requirement(self) -> Requirement | None:
        """What it asks of comm-core, or None."""
        requirements = [Requirement(text) for text in self._project.get("dependencies", [])]
        return next((item for item in requirements if canonicalize_name(item.name) == CORE), None)

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that it registers."""
        groups: dict[str, dict[str, str]] = self._project.get("entry-points", {})
        return tuple(name for group, entries in groups.items() if HOOK_GROUP.fullmatch(group) for name in entries)

    @property
    def smoke_test(self) -> Path:
        """The test that says whether an installed copy works at all."""
        return self.folder / "tests" / f"test_{self.stem}_smoke.py"


def find_packages(root: Path) -> dict[str, Package]:
    """Return the packages of the workspace at `root` by distribution name."""
    found = [Package(path.parent) for path in sorted((root / "packages").glob("*/pyproject.toml"))]
    return {package.name: package for package in found}


def run(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: Path,
    env: dict[str, str] | None = None,
    timeout_s: float = 300,
) -> str:
    """Run `command` and return its standard output.

    Raises:
        WorkspaceError: it failed or took longer than `timeout_s`; the text has its output.
    """
    words = [os.fspath(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise WorkspaceError(f"{' '.join(words)} did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise WorkspaceError(f"{' '.join(words)} failed ({done.returncode}):\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def build(folder: Path, out: Path) -> tuple[Path, Path]:
    """Build the package in `folder` into the empty or missing folder `out`; return (wheel, sdist).

    The wheel is built from the sdist, so an sdist that lacks a file is found out here and not by whoever installs it.
    """
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", out, folder], cwd=folder)
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return wheel, sdist


def third_party_view(target: Path, without: Iterable[str] = ()) -> Path:
    """Fill the folder `target` with links to what the running environment has installed, but for this project's own.

    `without` names further distributions to leave out.

    torch is some hundred megabytes and can't be had without a network, so environments for trying a wheel borrow what
    is installed already. They can't simply have the running environment's folder on their path: it holds the records
    of the packages that were installed there for development, whose plugins would be found beside the wheels.
    """
    target.mkdir(parents=True)
    folders = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    for folder in folders:
        if not folder.is_dir():
            continue
        own = _entries(folder, {canonicalize_name(name) for name in without})
        for path in folder.iterdir():
            link = target / path.name
            # A path's first folder wins, as it does on sys.path; .pth files work only in a real site folder.
            if path.name in own or path.name == "__pycache__" or path.suffix == ".pth" or link.is_symlink():
                continue
            link.symlink_to(path)
    return target


def _entries(folder: Path, without: set[str]) -> set[str]:
    """Return what in the site folder `folder` belongs to this project or to the distributions `without`."""
    own: set[str] = set()
    for distribution in importlib.metadata.distributions(path=[str(folder)]):
        name = canonicalize_name(distribution.name)
        is_plugin = any(HOOK_GROUP.fullmatch(point.group) for point in distribution.entry_points)
        if name == CORE or is_plugin or name in without:
            own |= {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
    return own


class CleanVenv:
    """A new virtual environment that sees the third-party packages of the running one and nothing of this project."""

    def __init__(self, path: Path, view: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        venv.EnvBuilder(with_pip=False, symlinks=True).create(path)
        (site,) = path.glob("lib/python*/site-packages")
        (site / "third_party.pth").write_text(f"{view}\n", encoding="utf-8")

    def run(self, *command: str | os.PathLike[str], timeout_s: float = 120) -> str:
        """Run a command of the environment (``"python"``, ``"commctl"``); return its output; errors as in `run`."""
        kept = {
            key: value
            for key, value in os.environ.items()
            # Nothing of the workspace may get in: neither its sources nor its settings.
            if not key.startswith(("PYTHON", "PIP_", "PYTEST_", "COMM_")) and key != "VIRTUAL_ENV"
        }
        kept |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        program, *arguments = command
        return run([self.path / "bin" / program, *arguments], cwd=self.path, env=kept, timeout_s=timeout_s)

    def install(self, *wheels: Path, check: bool = True) -> None:
        """Install wheels. No index is asked: what they depend on must be there, unless `check` is off."""
        options = ["--no-index", "--no-compile", "--quiet", *([] if check else ["--no-deps"])]
        self.run("python", "-m", "pip", "install", *options, *wheels)

    def uninstall(self, *names: str) -> None:
        """Uninstall distributions."""
        self.run("python", "-m", "pip", "uninstall", "--yes", "--quiet", *names)

    def plugins(self) -> dict[str, dict[str, Any]]:
        """Return what ``commctl plugins --json`` says, by plugin name."""
        listed: list[dict[str, Any]] = json.loads(self.run("commctl", "plugins", "--json"))["plugins"]
        return {str(item["name"]): item for item in listed}

    def pytest(self, tests: Iterable[Path], timeout_s: float = 300) -> str:
        """Run test files against what is installed, away from the workspace and its settings."""
        files = list(tests)
        options = ["-q", "-p", "no:cacheprovider", "-p", "comm_core.testing.plugin", "--import-mode=importlib"]
        settings = ["-c", os.devnull, "--rootdir", str(self.path), "-W", "error"]
        return self.run("python", "-m", "pytest", *options, *settings, *files, timeout_s=timeout_s)
