"""Releases in a repository of their own: comm-core, then a plugin, then one that must not come out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import workspace

# Environments and builds take long on a busy machine.
pytestmark = pytest.mark.timeout(300)

IDENTITY = {
    f"GIT_{who}_{what}": text for who in ("AUTHOR", "COMMITTER") for what, text in (("NAME", "A"), ("EMAIL", "a@b"))
}


class Repository:
    """A copy of the workspace, as its own repository on a branch of its own."""

    core_released_from: str
    plugin_output: str

    def __init__(self, root: Path) -> None:
        self.root = root
        # The user's and the machine's settings (hooks, signing) are not what is tested.
        self.env = {**os.environ, **IDENTITY, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
        for name in ("LICENSE", "pyproject.toml", "tools", "packages/comm-core", "tests/packaging/fixtures"):
            source, target = workspace.ROOT / name, root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".*cache", "dist"))
            else:
                shutil.copy(source, target)
        (root / ".gitignore").write_text("__pycache__/\ndist/\n", encoding="utf-8")
        self.git("init", "--quiet", "--initial-branch=trunk")
        self.commit()

    def git(self, *arguments: str) -> str:
        """Run git and return what it prints."""
        done = subprocess.run(
            ["git", *arguments], cwd=self.root, env=self.env, check=True, capture_output=True, text=True, timeout=60
        )
        return done.stdout.strip()

    def commit(self) -> None:
        """Commit everything."""
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "Change")

    def tool(self, name: str, *arguments: str) -> tuple[int, str]:
        """Run a tool of the copy; return its exit code and everything that it printed."""
        command = [sys.executable, self.root / "tools" / f"{name}.py", *arguments]
        done = subprocess.run(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300
        )
        return done.returncode, done.stdout

    def state(self) -> tuple[str, ...]:
        """Return all that a release changes: commits, tags, files, worktrees, what is in dist/."""
        built = sorted(path.relative_to(self.root).as_posix() for path in self.root.glob("dist/*/*"))
        asked = ("rev-parse HEAD", "tag --list", "status --porcelain", "worktree list", "branch --list")
        return (*(self.git(*line.split()) for line in asked), *built)

    def prepare(self, package: str, kind: str, text: str = "Something changed.") -> None:
        """Add a fragment and commit it with whatever else has changed."""
        path = self.root / "packages" / package / "changelog.d" / f"+change.{kind}.md"
        path.write_text(f"{text}\n", encoding="utf-8")
        self.commit()


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The workspace as it is."""
    return Repository(tmp_path_factory.mktemp("release ") / "repository")


@pytest.fixture(scope="module")
def with_core(repository):
    """The repository after a release of comm-core, with what that printed."""
    repository.prepare("comm-core", "bugfix", "A remarkable repair.")
    before = repository.git("rev-parse", "HEAD")
    code, output = repository.tool("release", "comm-core")
    assert code == 0, output
    repository.core_released_from = before
    return repository


@pytest.fixture(scope="module")
def with_plugin(with_core):
    """The repository after the release of a new plugin, made while comm-core has moved on."""
    repository = with_core
    code, output = repository.tool("new_plugin", "sample")
    assert code == 0, output
    version_file = repository.root / "packages" / "comm-core" / "src" / "comm_core" / "_version.py"
    text = version_file.read_text(encoding="utf-8")
    version_file.write_text(text.replace('"0.1.0"', '"0.1.1.dev0"') + '\nNEW = "since 0.1.1"\n', encoding="utf-8")
    repository.prepare("comm-core", "feature")
    code, output = repository.tool("release", "comm-sample")
    assert code == 0, output
    repository.plugin_output = output
    return repository


def test_a_dry_run_tries_everything_and_changes_nothing(repository):
    """One can look before one releases."""
    before = repository.state()
    code, output = repository.tool("release", "comm-core", "--dry-run")
    assert code == 0, output
    assert "frozen plugin" in output
    assert re.search(r"Release comm-core \d+\.\d+\.\d+$", output, re.MULTILINE)
    assert repository.state() == before


def test_comm_core_is_released(with_core):
    """The development version becomes a release with notes, a tag on its commit, and two files."""
    repository = with_core
    released = repository.git("rev-parse", "comm-core-v0.1.0^{commit}")
    assert repository.git("rev-parse", f"{released}^") == repository.core_released_from
    assert repository.git("merge-base", "trunk", released) == released
    show = ("show", f"{released}:packages/comm-core/CHANGELOG.md")
    notes = repository.git(*show)
    assert re.search(r"## 0\.1\.0 \(\d{4}-\d\d-\d\d\)[\s\S]*### Fixed[\s\S]*A remarkable repair\.", notes)
    left = repository.git("ls-tree", "--name-only", released, "packages/comm-core/changelog.d/")
    assert left == "packages/comm-core/changelog.d/README.md"
    assert sorted(path.name for path in (repository.root / "dist" / "comm-core-v0.1.0").iterdir()) == [
        "comm_core-0.1.0-py3-none-any.whl",
        "comm_core-0.1.0.tar.gz",
    ]


def test_a_plugin_is_released_on_its_own(with_plugin):
    """It is tried with the tree's comm-core, which has moved on, and with the one that it claims as its floor."""
    repository = with_plugin
    assert "comm-core, 0.1.1.dev0" in repository.plugin_output
    assert "comm-core-v0.1.0" in repository.plugin_output
    assert repository.git("tag", "--list").split() == ["comm-core-v0.1.0", "comm-sample-v0.1.0"]
    versions = {name: str(package.version) for name, package in workspace.find_packages(repository.root).items()}
    assert versions == {"comm-core": "0.1.1.dev0", "comm-sample": "0.1.0"}
    assert repository.git("status", "--porcelain") == ""
    assert repository.git("worktree", "list").count("\n") == 0


def test_a_plugin_that_needs_more_than_its_floor_is_not_released(with_plugin):
    """It passes with the comm-core beside it and fails with its floor: nothing is left of the attempt."""
    repository = with_plugin
    smoke = repository.root / "packages" / "comm-sample" / "tests" / "test_sample_smoke.py"
    needs_more = "\n\ndef test_new():\n    from comm_core._version import NEW\n\n    assert NEW\n"
    smoke.write_text(smoke.read_text(encoding="utf-8") + needs_more, encoding="utf-8")
    repository.prepare("comm-sample", "feature")
    before = repository.state()
    code, output = repository.tool("release", "comm-sample")
    assert code == 1
    assert "lowest comm-core that it claims" in output
    assert "cannot import name 'NEW'" in output
    assert repository.state() == before
