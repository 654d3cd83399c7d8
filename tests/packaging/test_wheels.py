"""What is in the wheels and sdists, for every package of the workspace and for a plugin that was just generated."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import workspace
from comm_core import known

PACKAGES = workspace.find_packages(workspace.ROOT)
NOT_PLUGINS = {"all", "cuda", "demo", "plot", "test"}
"""Extras of comm-core that stand for no single plugin."""


@pytest.fixture(scope="session", params=[*PACKAGES, "generated"])
def built(request, build):
    """Each package, built."""
    name = request.param
    if name == "generated":
        return request.getfixturevalue("sample")
    return request.getfixturevalue("core") if name == workspace.CORE else build(PACKAGES[name].folder)


def contents(wheel: Path) -> dict[str, bytes]:
    """Return file name -> bytes of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: Path) -> Message:
    """Return a wheel's METADATA."""
    (text,) = [data for name, data in contents(wheel).items() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(text.decode())


def test_the_sdist_builds_back_to_the_same_wheel(built, tmp_path):
    """Whoever builds from the sdist gets what we tested: the sdist lacks nothing that the wheel has."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, built.folder]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (direct,) = tmp_path.glob("*.whl")
    assert contents(direct) == contents(built.wheel)  # `built` made its wheel from the sdist


def test_a_wheel_holds_the_package_and_nothing_else(built):
    """It is for every Python 3 and machine, typed and licensed, and has no tests and no stray files."""
    package = workspace.Package(built.folder)
    assert built.wheel.name == f"{package.module}-{package.version}-py3-none-any.whl"
    names = set(contents(built.wheel))
    info = f"{package.module}-{package.version}.dist-info"
    assert {name.split("/")[0] for name in names} == {package.module, info}
    assert {f"{package.module}/py.typed", f"{package.module}/_version.py", f"{info}/licenses/LICENSE"} <= names
    assert not [name for name in names if re.search(r"(^|/)tests?/|(^|/)test_|__pycache__", name)]


def test_no_path_of_the_building_machine_gets_into_a_wheel(built):
    """A wheel is the same wherever it was built."""
    roots = {str(workspace.ROOT), str(built.folder.parent), str(Path.home()), sys.prefix}
    for name, data in contents(built.wheel).items():
        # "/root" or "/" alone would be found by chance.
        found = [root for root in roots if root.count("/") > 1 and root.encode() in data]
        assert not found, f"{name} names {found}"


def test_an_sdist_holds_what_a_packager_needs_and_nothing_else(built):
    """Sources, tests, licence and changelog; no fragments, caches or build output."""
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "PKG-INFO"}
    assert needed <= names
    tops = {name.split("/")[0] for name in names}
    assert tops <= needed | {"src", "tests", ".gitignore"}  # hatchling adds the last one


def test_the_metadata_says_what_the_files_say(built):
    """Version and Python floor come from one place each; a plugin says which comm-core it is for."""
    package = workspace.Package(built.folder)
    data = metadata(built.wheel)
    assert (data["Name"], data["Version"], data["Requires-Python"]) == (package.name, str(package.version), ">=3.10")
    assert data["License-Expression"] == "Apache-2.0"
    if package.name != workspace.CORE:
        assert package.plugins
        requirement = package.core_requirement
        assert requirement is not None
        assert sorted(item.operator for item in requirement.specifier) == ["<", ">="]


def test_the_licence_is_the_whole_licence(built):
    """Each package carries the text itself, since it is distributed alone."""
    text = (workspace.ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (built.folder / "LICENSE").read_text(encoding="utf-8") == text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_readme_justifies_every_dependency(built):
    """Each package that an installation brings along has a line that says why."""
    package = workspace.Package(built.folder)
    readme = (built.folder / "README.md").read_text(encoding="utf-8")
    lines = {match[1] for match in re.finditer(r"^\| ([a-z0-9-]+) \| .*\w+ .*\|$", readme, re.MULTILINE)}
    needed = {Requirement(text).name for text in metadata(built.wheel).get_all("Requires-Dist", [])}
    if package.name == workspace.CORE:
        needed -= {entry.distribution for entry in (*known.TRANSPORTS.values(), *known.CODECS.values())}
    assert needed - lines == set()


def test_the_extras_are_the_known_plugins(core):
    """`install it with comm-core[x]` in an error text must be true, and nothing known may lack its extra."""
    by_extra: dict[str, set[str]] = {}
    for text in metadata(core.wheel).get_all("Requires-Dist", []):
        requirement = Requirement(text)
        match = re.search(r"""extra == ['"]([a-z0-9-]+)['"]""", str(requirement.marker or ""))
        if match:
            by_extra.setdefault(match[1], set()).add(requirement.name)
    entries = [*known.TRANSPORTS.values(), *known.CODECS.values()]
    wanted = {entry.extra: {entry.distribution} for entry in entries if not entry.built_in}
    assert {extra: names for extra, names in by_extra.items() if extra not in NOT_PLUGINS} == wanted
    assert by_extra["cuda"] == {"cuda-bindings", "ninja", "nvidia-ml-py"}
    assert by_extra["all"] == by_extra["cuda"].union(*wanted.values())
