"""What `tools/new_plugin.py` writes is a whole plugin: clean, typed, tested, and working as it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import new_plugin
import workspace

# Environments and builds take long on a busy machine.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def tree(tmp_path):
    """A workspace with comm-core and a plugin whose name sorts before it and has a dash in it."""
    shutil.copy(workspace.ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "comm-core").symlink_to(workspace.ROOT / "packages" / "comm-core")
    new_plugin.write("a-link", packages)
    return tmp_path


def lint(tree, *command):
    """Run a tool in `tree`; return its exit code and what it printed."""
    # What the developers' command sets as well: no look for a newer version on the network.
    env = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=tree, env=env, capture_output=True, text=True, timeout=100
    )
    return done.returncode, done.stdout + done.stderr


def test_it_is_clean_and_typed(tree):
    """Whoever starts from it starts without a debt: format, style, and strict types in its sources."""
    code, output = lint(tree, "ruff", "check", "packages/comm-a-link")
    assert code == 0, output
    code, output = lint(tree, "ruff", "format", "--check", "packages/comm-a-link")
    assert code == 0, output
    settings = {
        "include": ["packages/comm-a-link"],
        "strict": ["packages/comm-a-link/src"],
        "pythonVersion": "3.10",
        "extraPaths": ["packages/comm-core/src", "packages/comm-a-link/src"],
    }
    (tree / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    code, output = lint(tree, "pyright", "--pythonpath", sys.executable)
    assert code == 0, output
    assert "0 errors, 0 warnings" in output


def test_its_own_tests_pass(core, sample, venv):
    """Installed beside comm-core it is discovered, decides, and passes the contract suite over real ranks."""
    venv.install(core.wheel, sample.wheel)
    files = sorted((sample.folder / "tests").glob("test_*.py"))
    assert {path.name for path in files} == {
        "test_sample_link_contract.py",
        "test_sample_link_smoke.py",
        "test_sample_link_transport.py",
    }
    output = venv.pytest(files)
    assert " passed" in output
    assert "skipped" not in output
