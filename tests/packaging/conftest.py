"""What the packaging tests build once: wheels, and environments that see no source of this workspace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import new_plugin
import workspace

FROZEN = workspace.ROOT / "tests" / "packaging" / "fixtures" / "frozen_plugin_api_1_0"


class Built(NamedTuple):
    """A package and what was built from it."""

    folder: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="session")
def view(tmp_path_factory):
    """A folder with what the running environment has installed, less this project."""
    return workspace.third_party_view(tmp_path_factory.mktemp("view") / "site")


@pytest.fixture(scope="session")
def build(tmp_path_factory):
    """A function that builds a copy of a package folder, so that building writes nothing into the workspace."""

    def build(folder: Path) -> Built:
        # A space in the path: people have them, and build tools trip over them.
        top = tmp_path_factory.mktemp("with space ")
        copy = Path(shutil.copytree(folder, top / folder.name, ignore=shutil.ignore_patterns("__pycache__")))
        return Built(copy, *workspace.build(copy, top / "out"))

    return build


@pytest.fixture(scope="session")
def core(build):
    """comm-core as it is in the workspace."""
    return build(workspace.ROOT / "packages" / "comm-core")


@pytest.fixture(scope="session")
def sample(build, tmp_path_factory):
    """A plugin as `tools/new_plugin.py` writes it."""
    return build(new_plugin.write("sample-link", tmp_path_factory.mktemp("new")))


@pytest.fixture(scope="session")
def frozen(build):
    """The plugin from the time of hook API 1.0."""
    return build(FROZEN)


@pytest.fixture
def venv(view, tmp_path):
    """A clean virtual environment."""
    return workspace.CleanVenv(tmp_path / "clean venv", view)
