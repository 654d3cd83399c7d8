"""What may be generated where. That the result works is tested with the packages."""

from __future__ import annotations

import re

import pytest

import new_plugin
import workspace
from comm_core.known import CODECS, TRANSPORTS
from comm_core.plugins.hookspecs import ENTRY_POINT_GROUP


@pytest.mark.parametrize("name", ["fastlink", "fast-link", "x", "rdma2", "a-1-b"])
def test_names_that_pip_and_python_take(name):
    """The package is comm-NAME, the module the same with underscores."""
    new_plugin.check_name(name)


@pytest.mark.parametrize(
    "name",
    ["", "Fast", "fast_link", "fast.link", "-fast", "fast-", "fast--link", "2fast", "fast link", "schnell-ü", "a/b"],
)
def test_names_that_are_no_names(name):
    """They would be normalized by pip to something else, or be no module."""
    with pytest.raises(new_plugin.PluginNameError, match="can't be a plugin's name"):
        new_plugin.check_name(name)


@pytest.mark.parametrize("name", [*TRANSPORTS, *CODECS, "lowp", "auto", "core", "dist"])
def test_names_that_are_taken(name):
    """Two plugins with one name are both refused by comm-core, so none is generated."""
    with pytest.raises(new_plugin.PluginNameError, match=r"reserved|comm_core/known\.py"):
        new_plugin.check_name(name)


@pytest.mark.parametrize(
    ("version", "requirement"),
    [
        ("0.1.0.dev0", "comm-core>=0.1.0.dev0,<0.2"),
        ("0.3.2", "comm-core>=0.3.2,<0.4"),
        ("1.4.0", "comm-core>=1.4.0,<2"),
    ],
)
def test_a_plugin_asks_for_the_core_that_it_was_made_with(version, requirement):
    """And not for the first one that may break it."""
    assert new_plugin.core_requirement(version) == requirement


def test_a_package_is_written_once(tmp_path, capsys):
    """A second call must not touch what somebody has worked on since."""
    assert new_plugin.main(["fast-link", "--into", str(tmp_path)]) == 0
    folder = tmp_path / "comm-fast-link"
    assert str(folder) in capsys.readouterr().out
    (folder / "README.md").write_text("mine", encoding="utf-8")
    assert new_plugin.main(["fast-link", "--into", str(tmp_path)]) == 1
    assert "exists; it is left as it is" in capsys.readouterr().err
    assert (folder / "README.md").read_text(encoding="utf-8") == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["comm-fast-link"]


def test_a_package_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    """A half-written folder would be taken for a package by everything that looks under packages/."""

    def fail(text, values):
        if "comm_transports" in text:
            raise OSError("disk full")
        return text

    monkeypatch.setattr(new_plugin, "_fill", fail)
    with pytest.raises(OSError, match="disk full"):
        new_plugin.write("fast-link", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_package_describes_itself(tmp_path):
    """Names, entry point and first fragment fit together; nothing of the templates is left."""
    folder = new_plugin.write("fast-link", tmp_path)
    package = workspace.Package(folder)
    assert (package.name, package.module, package.plugins) == ("comm-fast-link", "comm_fast_link", ("fast-link",))
    assert package.smoke_test.is_file()
    assert f'[project.entry-points."{ENTRY_POINT_GROUP}"]' in (folder / "pyproject.toml").read_text(encoding="utf-8")
    requirement = package.core_requirement
    assert requirement is not None
    core = workspace.find_packages(workspace.ROOT)["comm-core"].version
    assert requirement.specifier.contains(core, prereleases=True)
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) == 14
    for path in files:
        assert not re.search(r"@[a-z_]+@", path.read_text(encoding="utf-8")), path
        assert path.suffix != ".tmpl"
