"""Who may import whom: a plugin imports comm-core and no other plugin, and comm-core imports no plugin."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import workspace

PACKAGES = workspace.find_packages(workspace.ROOT)


def project_imports(source: str) -> set[str]:
    """Return the top-level names of this project that `source` imports, also by name at run time."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if called in ("import_module", "__import__", "find_spec", "resolve_name", "importorskip"):
                words = [
                    arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
                ]
                found |= {word.partition(".")[0] for word in words}
    return {name for name in found if name.startswith("comm_")}


def files(package: str) -> list[Path]:
    """Return the sources and tests of a package."""
    folder = PACKAGES[package].folder
    return [path for part in ("src", "tests") for path in sorted((folder / part).rglob("*.py"))]


@pytest.mark.parametrize(
    "source",
    [
        "import comm_nvlink",
        "import comm_nvlink.ops as ops",
        "from comm_nvlink.plugin import plugin",
        "def f():\n    from comm_nvlink import x",
        "import importlib\nimportlib.import_module('comm_nvlink.plugin')",
        "__import__('comm_nvlink')",
        "if False:\n    import comm_nvlink",
    ],
)
def test_every_way_to_import_is_seen(source):
    """Or the rule below would be kept in appearance only."""
    assert project_imports(source) == {"comm_nvlink"}
    assert project_imports("import torch\nfrom . import comm_local\nname = 'comm_nvlink'") == set()


@pytest.mark.parametrize("package", list(PACKAGES))
def test_a_package_imports_itself_and_comm_core_alone(package):
    """Whatever two plugins share is an interface of comm-core, or they could not be released one by one."""
    allowed = {PACKAGES[package].module, "comm_core"}
    sources = files(package)
    assert sources
    for path in sources:
        strangers = project_imports(path.read_text(encoding="utf-8")) - allowed
        assert not strangers, f"{path} imports {', '.join(sorted(strangers))}"
