"""Wheels in clean environments: core alone, a plugin that comes and goes."""

from __future__ import annotations

import json
import re
import shutil

import pytest

import workspace

# Environments and builds take long on a busy machine.
pytestmark = pytest.mark.timeout(300)

ONLY_IN_EXTRAS = ("cuda-bindings", "cuda-pathfinder", "hypothesis", "matplotlib", "nvidia-ml-py", "pytest")

REPORT = """
import json
from comm_core.plugins import report
fields = ("distribution", "version", "api", "state", "error")
print(json.dumps({item.name: [getattr(item, field) for field in fields] for item in report()}))
"""


def test_a_clean_environment_sees_nothing_of_the_workspace(venv):
    """Or every test here would test the sources, which are installed for development in the running environment."""
    venv.run("python", "-c", "import torch, typer, pluggy")
    with pytest.raises(workspace.WorkspaceError, match="No module named 'comm_core'"):
        venv.run("python", "-c", "import comm_core")


def test_core_alone_works_without_what_only_its_extras_bring(core, tmp_path):
    """A CPU user installs comm-core and nothing more: it imports, finds no plugin, and its commands answer."""
    view = workspace.third_party_view(tmp_path / "view", without=ONLY_IN_EXTRAS)
    venv = workspace.CleanVenv(tmp_path / "clean venv", view)
    # Unchecked, since a CUDA build of torch asks for cuda-bindings itself.
    venv.install(core.wheel, check=False)
    for module in ("pynvml", "cuda.bindings", "matplotlib", "hypothesis", "pytest"):
        with pytest.raises(workspace.WorkspaceError, match="No module named"):
            venv.run("python", "-c", f"import {module}")
    code = "import comm_core; print(comm_core.__file__); [getattr(comm_core, name) for name in comm_core.__all__]"
    assert venv.run("python", "-W", "error", "-c", code).startswith(str(venv.path))
    assert {item["distribution"] for item in venv.plugins().values()} == {"comm-core"}
    assert {item["state"] for item in venv.plugins().values()} == {"loaded"}
    assert "plugins" in venv.run("commctl", "--help")


def test_a_plugin_comes_and_goes(core, sample, venv):
    """Installing a package is all it takes to add its transport, and uninstalling it leaves no trace."""
    venv.install(core.wheel)
    before = venv.plugins()
    assert "sample-link" not in before

    venv.install(sample.wheel)
    found = venv.plugins()
    assert set(found) == {*before, "sample-link"}
    added = found["sample-link"]
    assert (added["distribution"], added["version"]) == ("comm-sample-link", "0.1.0.dev0")
    assert (added["state"], added["error"], added["api"]) == ("loaded", None, "1.0")
    assert (added["transports"], added["codecs"]) == (["sample-link"], [])
    told = json.loads(venv.run("python", "-c", REPORT))
    assert told["sample-link"] == ["comm-sample-link", "0.1.0.dev0", "1.0", "loaded", None]

    venv.uninstall("comm-sample-link")
    assert set(venv.plugins()) == set(before)
    with pytest.raises(workspace.WorkspaceError, match="No module named 'comm_sample_link'"):
        venv.run("python", "-c", "import comm_sample_link")


def test_a_plugin_for_another_comm_core_is_refused_by_pip(core, sample, venv, tmp_path):
    """The range that a plugin declares is what keeps it away from a comm-core that would break it."""
    folder = shutil.copytree(sample.folder, tmp_path / "for another core")
    pyproject = folder / "pyproject.toml"
    text, count = re.subn(r'"comm-core>=[^"]+"', '"comm-core>=7,<8"', pyproject.read_text(encoding="utf-8"))
    assert count == 1
    pyproject.write_text(text, encoding="utf-8")
    wheel, _ = workspace.build(folder, tmp_path / "out")
    venv.install(core.wheel)
    with pytest.raises(workspace.WorkspaceError, match=r"comm-core<8,>=7"):
        venv.install(wheel)
    assert "sample-link" not in venv.plugins()
