"""Whether an installed copy works at all: a release runs this file against the built wheel."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import comm_lowp
from comm_core.plugins import registry, report
from comm_lowp import sage2


@pytest.mark.installed_plugins
def test_the_entry_point_leads_to_the_codec():
    """What is installed is found under its name, is loaded, and carries this package's version."""
    (found,) = [item for item in report() if item.name == "sage2"]
    assert (found.state, found.error) == ("loaded", None)
    assert (found.distribution, found.codecs) == ("comm-lowp", ("sage2",))
    assert registry().codecs["sage2"].version == comm_lowp.__version__


@pytest.mark.parametrize("module", [comm_lowp, sage2], ids=lambda module: module.__name__)
def test_public_names_are_the_same_for_readers_type_checkers_and_users(module):
    """The lazy table, ``__all__``, and the imports that only type checkers see."""
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    typed = {alias.name: node.module for node in imports for alias in node.names}
    assert typed == module._NAMES
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module._NAMES) <= set(module.__all__) <= set(dir(module))


def test_importing_the_package_and_its_plugin_costs_nothing():
    """L13: no torch, no CUDA; discovery imports this in every program."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import comm_lowp, comm_lowp.plugin, comm_lowp.sage2, comm_lowp.sage2.grid\n"
        "assert [c.name for c in comm_lowp.plugin.plugin.comm_codecs()] == ['sage2']\n"
        "assert comm_lowp.plugin.plugin.comm_modules()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
