"""What a release's version is, and what keeps a package from being released."""

from __future__ import annotations

import os
import subprocess

import pytest
from packaging.version import Version

import release
from workspace import Package


@pytest.mark.parametrize(
    ("current", "kinds", "version"),
    [
        # After a release.
        ("0.1.0", ["bugfix"], "0.1.1"),
        ("0.1.1", ["doc", "misc"], "0.1.2"),
        ("0.1.1", ["feature", "bugfix"], "0.2.0"),
        ("0.1.1", ["deprecation"], "0.2.0"),
        ("0.1.1", ["breaking"], "0.2.0"),
        ("1.2.3", ["bugfix"], "1.2.4"),
        ("1.2.3", ["deprecation"], "1.3.0"),
        ("1.2.3", ["breaking", "feature"], "2.0.0"),
        # A development version is a step ahead already.
        ("0.1.0.dev0", ["feature"], "0.1.0"),
        ("0.1.0.dev0", ["breaking"], "0.1.0"),
        ("0.1.1.dev0", ["bugfix"], "0.1.1"),
        ("1.3.0.dev0", ["feature"], "1.3.0"),
        ("2.0.0.dev0", ["breaking"], "2.0.0"),
        # But it may be too short a step for what has changed since.
        ("0.1.1.dev0", ["feature"], "0.2.0"),
        ("1.3.0.dev0", ["breaking"], "2.0.0"),
        ("1.2.4.dev0", ["breaking"], "2.0.0"),
    ],
)
def test_the_fragments_decide_the_version(current, kinds, version):
    """The number tells users what to expect, so nobody chooses it by hand."""
    assert release.next_version(Version(current), kinds) == Version(version)


def test_fragments_are_read_by_their_names(tmp_path):
    """With and without an issue, and several for one; the page that explains them is none."""
    for name in ("12.feature.md", "12.feature.1.md", "+topic.bugfix.md", "README.md"):
        (tmp_path / name).write_text("Text.\n", encoding="utf-8")
    assert sorted(release.read_fragments(tmp_path)) == ["bugfix", "feature", "feature"]
    assert release.read_fragments(tmp_path / "missing") == []


@pytest.mark.parametrize(
    "name", ["12.features.md", "feature.md", "12.feature.txt", "12.feature", "12.feature.x-y.md"]
)
def test_a_fragment_with_a_wrong_name_is_not_passed_over(tmp_path, name):
    """It would be missing from the notes, and from the version."""
    (tmp_path / name).write_text("Text.\n", encoding="utf-8")
    with pytest.raises(release.ReleaseError, match=r"a fragment is named"):
        release.read_fragments(tmp_path)


def test_an_empty_fragment_is_not_passed_over(tmp_path):
    """It decides the version and says nothing."""
    (tmp_path / "1.feature.md").write_text(" \n", encoding="utf-8")
    with pytest.raises(release.ReleaseError, match="is empty"):
        release.read_fragments(tmp_path)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a comm-core of 0.1.0, which is tagged, and a plugin; a function that runs git in it."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "A")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "a@b")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=30
        ).stdout

    for name, version, dependency in (
        ("comm-core", "0.1.0", "torch"),
        ("comm-x", "0.1.0.dev0", "comm-core>=0.1,<0.2"),
    ):
        folder = tmp_path / "packages" / name
        module = name.replace("-", "_")
        (folder / "src" / module).mkdir(parents=True)
        (folder / "src" / module / "_version.py").write_text(f'__version__ = "{version}"\n', encoding="utf-8")
        (folder / "changelog.d").mkdir()
        (folder / "changelog.d" / "1.feature.md").write_text("New.\n", encoding="utf-8")
        (folder / "tests").mkdir()
        (folder / "tests" / f"test_{module[5:]}_smoke.py").write_text("", encoding="utf-8")
        text = f'[project]\nname = "{name}"\ndependencies = ["{dependency}"]\n'
        (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    git("init", "--quiet", "--initial-branch=trunk")
    git("add", "--all")
    git("commit", "--quiet", "--message", "Start")
    git("tag", "comm-core-v0.1.0")
    return tmp_path, git


def test_what_may_be_released(repository):
    """The plan names version, tag, branch, and the comm-core that a plugin must be tried with."""
    root, git = repository
    made = release.plan(root, "comm-x")
    assert (str(made.version), made.tag, made.branch) == ("0.1.0", "comm-x-v0.1.0", "trunk")
    assert made.floor_tag == "comm-core-v0.1.0"
    assert made.base == git("rev-parse", "HEAD").strip()
    core = release.plan(root, "comm-core")
    assert (str(core.version), core.floor_tag) == ("0.2.0", None)


def test_a_package_that_does_not_exist(repository):
    """The text lists those that do."""
    with pytest.raises(release.ReleaseError, match="comm-core, comm-x"):
        release.plan(repository[0], "comm-y")


@pytest.mark.parametrize("name", ["changed", "untracked"])
def test_a_tree_with_changes(repository, name):
    """What is tested must be what is tagged."""
    root, _ = repository
    path = {"changed": root / "packages" / "comm-x" / "pyproject.toml", "untracked": root / "new file"}[name]
    with path.open("a", encoding="utf-8") as stream:
        stream.write("# more\n")
    with pytest.raises(release.ReleaseError, match="not committed"):
        release.plan(root, "comm-x")


def test_a_tag_that_exists(repository):
    """A release is made once."""
    root, git = repository
    git("tag", "comm-x-v0.1.0")
    with pytest.raises(release.ReleaseError, match=r"the tag comm-x-v0\.1\.0 exists"):
        release.plan(root, "comm-x")


def test_a_version_without_a_tag(repository):
    """A clone without tags would make the same release again, or let a plugin claim an unreleased floor."""
    root, git = repository
    git("tag", "--delete", "comm-core-v0.1.0")
    with pytest.raises(release.ReleaseError, match="fetch the tags"):
        release.plan(root, "comm-core")


def test_no_branch(repository):
    """The commit would be lost."""
    root, git = repository
    git("switch", "--quiet", "--detach")
    with pytest.raises(release.ReleaseError, match="no branch is checked out"):
        release.plan(root, "comm-x")


def test_no_fragments(repository):
    """A release without notes tells nobody why it exists."""
    root, git = repository
    git("rm", "--quiet", "packages/comm-x/changelog.d/1.feature.md")
    git("commit", "--quiet", "--message", "Remove")
    with pytest.raises(release.ReleaseError, match="has no fragments"):
        release.plan(root, "comm-x")


def test_no_smoke_test(repository):
    """Nothing could say whether the wheel works."""
    root, git = repository
    git("rm", "--quiet", "packages/comm-x/tests/test_x_smoke.py")
    git("commit", "--quiet", "--message", "Remove")
    with pytest.raises(release.ReleaseError, match=r"test_x_smoke\.py is missing"):
        release.plan(root, "comm-x")


@pytest.mark.parametrize(
    ("dependency", "text"),
    [
        ("torch", "must depend on comm-core>=a,<b"),
        ("comm-core", "must have the form"),
        ("comm-core>=0.1", "must have the form"),
        ("comm-core>=0.1,<0.3,!=0.2", "must have the form"),
        ("comm-core==0.1.0", "must have the form"),
        ("comm-core>=0.0.1,<0.2", "must be a released comm-core"),
        ("comm-core>=0.1.0.dev0,<0.2", "must be a released comm-core"),
        ("comm-core>=0.2,<0.3", "excludes the comm-core of this tree, 0.1.0"),
    ],
)
def test_a_floor_that_can_not_be_tried_or_is_not_true(tmp_path, dependency, text):
    """The lowest comm-core that a plugin claims must be one that was released and that it was tried with."""
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "comm-x"\ndependencies = ["{dependency}"]\n', encoding="utf-8"
    )
    with pytest.raises(release.ReleaseError, match=text):
        release.check_floor(Package(tmp_path), Version("0.1.0"), {"comm-core-v0.1.0", "comm-x-v0.0.1", "other"})


def test_publishing_is_undone_where_the_branch_has_moved(repository, tmp_path):
    """Somebody committed during the release: no tag, no files, and their branch as they left it."""
    root, git = repository
    made = release.plan(root, "comm-x")
    git("commit", "--quiet", "--allow-empty", "--message", "The release")
    commit = git("rev-parse", "HEAD").strip()
    git("reset", "--quiet", "--hard", made.base)
    git("commit", "--quiet", "--allow-empty", "--message", "Somebody else's")
    moved = git("rev-parse", "HEAD")
    wheel = tmp_path / "x.whl"
    wheel.write_text("", encoding="utf-8")
    with pytest.raises(release.WorkspaceError, match="ff-only"):
        release.publish(root, made, commit, [wheel])
    assert git("rev-parse", "HEAD") == moved
    assert "comm-x" not in git("tag", "--list")
    assert not (root / "dist" / made.tag).exists()
