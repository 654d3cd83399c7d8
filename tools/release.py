#!/usr/bin/env python3
"""Release one package: version and changelog from its fragments, a commit, a tag, and a wheel and an sdist that work.

    python tools/dev.py release PACKAGE --dry-run     everything but the commit on your branch and the tag
    python tools/dev.py release PACKAGE

What happens, in this order:

1. The package's `changelog.d/` decides the version: a `breaking` fragment raises the major number (the minor one
   while it is 0), `feature` and `deprecation` the minor one, everything else the patch number. A version `X.Y.Z.dev0`
   in the tree becomes `X.Y.Z`, unless the fragments ask for more than that.
2. In a temporary worktree: `_version.py` and CHANGELOG.md are written, committed, and wheel and sdist are built.
3. The wheel is tried in a clean virtual environment: it imports, `commctl plugins` shows what it should, and its
   smoke test passes. A plugin is tried with the comm-core of the tree and with the lowest one that it claims, built
   from its tag. comm-core is tried with the frozen plugin of hook API 1.0.
4. The branch moves to the commit, the tag `PACKAGE-vX.Y.Z` is made, and the two files are put into `dist/`.

Your branch, tags and files change in step 4 alone: what fails before leaves nothing to undo. Nothing is pushed.

After a release the tree keeps the released version. If a plugin comes to need something that comm-core has not
released, set comm-core's version to the next `X.Y.0.dev0` and the plugin's floor to the same; a plugin with such a
floor can't be released before that comm-core is.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from workspace import CORE, ROOT, CleanVenv, Package, WorkspaceError, build, find_packages, run, third_party_view

KINDS = ("breaking", "feature", "deprecation", "bugfix", "doc", "misc")
FROZEN = Path("tests") / "packaging" / "fixtures" / "frozen_plugin_api_1_0"
NOT_FRAGMENTS = {"README.md", ".gitkeep"}


class ReleaseError(WorkspaceError):
    """The package can't be released; the text says why and what to do."""


# -- What the next version is -------------------------------------------------------------------------------------


def next_version(current: Version, kinds: Iterable[str]) -> Version:
    """Return the version that follows `current` with changes of these `kinds`. Pure."""
    found = set(kinds)
    released = Version(current.base_version)
    major, minor, patch = (*released.release, 0, 0)[:3]
    if "breaking" in found:
        level = "major" if major > 0 else "minor"
    elif found & {"feature", "deprecation"}:
        level = "minor"
    else:
        level = "patch"
    # A development version is already a step ahead of the last release; is that step large enough?
    enough = {"patch": True, "minor": patch == 0, "major": patch == 0 and minor == 0}
    if current.is_prerelease and enough[level]:
        return released
    steps = {"major": (major + 1, 0, 0), "minor": (major, minor + 1, 0), "patch": (major, minor, patch + 1)}
    return Version(".".join(map(str, steps[level])))


def read_fragments(folder: Path) -> list[str]:
    """Return the kind of each fragment in ``changelog.d/``, ordered by file name.

    Raises:
        ReleaseError: a file is named like no fragment, or is empty.
    """
    kinds: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name in NOT_FRAGMENTS:
            continue
        # 12.feature.md, +topic.bugfix.md, and 12.feature.1.md for the second one of an issue.
        parts = path.name.split(".")
        if path.suffix != ".md" or len(parts) not in (3, 4) or parts[1] not in KINDS or not parts[-2].isalnum():
            raise ReleaseError(f"{path}: a fragment is named <issue or +word>.<kind>.md, with a kind of {KINDS}")
        if not path.read_text(encoding="utf-8").strip():
            raise ReleaseError(f"{path} is empty: say what changed for users")
        kinds.append(parts[1])
    return kinds


# -- May it be released ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Release:
    """What is to be released, checked before anything is done.

    Attributes:
        package: the package as it is in the tree.
        version: the new version.
        base: commit that it starts from.
        branch: branch that moves to the release.
        floor_tag: for a plugin, the tag of the lowest comm-core that it claims.
    """

    package: Package
    version: Version
    base: str
    branch: str
    floor_tag: str | None

    @property
    def title(self) -> str:
        """What is released, in words."""
        return f"{self.package.name} {self.version}"

    @property
    def tag(self) -> str:
        """The tag of the release."""
        return tag_name(self.package.name, self.version)


def tag_name(package: str, version: Version) -> str:
    """Return the tag of a version of a package."""
    return f"{package}-v{version}"


def git(root: Path, *arguments: str) -> str:
    """Run git in `root`; return what it prints, without the final newline."""
    return run(["git", *arguments], cwd=root).rstrip("\n")


def plan(root: Path, name: str) -> Release:
    """Return what a release of package `name` would be.

    Raises:
        ReleaseError: it can't be released as the workspace is.
    """
    packages = find_packages(root)
    if name not in packages:
        raise ReleaseError(
            f"there is no package {name!r} under {root / 'packages'}; there are: {', '.join(packages)}"
        )
    package = packages[name]
    changed = git(root, "status", "--porcelain")
    if changed:
        raise ReleaseError(f"the tree has changes that are not committed; commit or stash them first:\n{changed}")
    branch = git(root, "rev-parse", "--abbrev-ref", "HEAD")
    if branch == "HEAD":
        raise ReleaseError("no branch is checked out, so the release commit would belong to none: git switch BRANCH")
    kinds = read_fragments(package.folder / "changelog.d")
    if not kinds:
        raise ReleaseError(f"{package.folder / 'changelog.d'} has no fragments: nothing changed for users, or unsaid")
    tags = set(git(root, "tag", "--list").splitlines())
    current = package.version
    if not current.is_prerelease and tag_name(name, current) not in tags:
        raise ReleaseError(
            f"{package.version_file} says {current}, and there is no tag {tag_name(name, current)}: fetch the tags "
            f"(git fetch --tags), or make it {current}.dev0 if that version was never released"
        )
    version = next_version(current, kinds)
    if tag_name(name, version) in tags:
        raise ReleaseError(
            f"the tag {tag_name(name, version)} exists. If that release was cut short, remove it: "
            f"git tag --delete {tag_name(name, version)}"
        )
    if not package.smoke_test.is_file():
        raise ReleaseError(f"{package.smoke_test} is missing: a release runs it against the installed wheel")
    floor_tag = None if name == CORE else check_floor(package, packages[CORE].version, tags)
    return Release(package, version, git(root, "rev-parse", "HEAD"), branch, floor_tag)


def check_floor(package: Package, core: Version, tags: set[str]) -> str:
    """Return the tag of the lowest comm-core that the plugin `package` claims.

    Raises:
        ReleaseError: the claim has no floor or no cap, the floor was never released, or this tree's comm-core is not
            within it.
    """
    requirement = package.core_requirement
    where = f"{package.folder / 'pyproject.toml'}"
    if requirement is None:
        raise ReleaseError(f"{where} must depend on {CORE}>=a,<b")
    floors = [item for item in requirement.specifier if item.operator == ">="]
    caps = [item for item in requirement.specifier if item.operator == "<"]
    if len(floors) != 1 or len(caps) != 1 or len(requirement.specifier) != 2:
        raise ReleaseError(f"{where}: {str(requirement)!r} must have the form {CORE}>=a,<b")
    floor = Version(floors[0].version)
    if not requirement.specifier.contains(core, prereleases=True):
        raise ReleaseError(f"{where}: {str(requirement)!r} excludes the {CORE} of this tree, {core}")
    for tag in tags:
        prefix, _, text = tag.rpartition("-v")
        try:
            if prefix == CORE and Version(text) == floor:
                return tag
        except InvalidVersion:
            continue
    known = ", ".join(sorted(tag for tag in tags if tag.startswith(f"{CORE}-v"))) or "none"
    raise ReleaseError(
        f"{where}: the floor of {str(requirement)!r} must be a released {CORE}, so that it can be tried; "
        f"released are: {known}"
    )


# -- Doing it ------------------------------------------------------------------------------------------------------


@contextmanager
def worktree(root: Path, path: Path, commit: str) -> Generator[Path]:
    """Check `commit` out at `path`, away from the user's files, and take that down again."""
    git(root, "worktree", "add", "--detach", str(path), commit)
    try:
        yield path
    finally:
        git(root, "worktree", "remove", "--force", str(path))


def commit(tree: Path, release: Release) -> str:
    """Write version and changelog in `tree` and commit them; return the commit."""
    package = find_packages(tree)[release.package.name]
    text = package.version_file.read_text(encoding="utf-8")
    old = f'__version__ = "{package.version}"'
    package.version_file.write_text(text.replace(old, f'__version__ = "{release.version}"'), encoding="utf-8")
    if package.version != release.version:
        raise ReleaseError(f"{package.version_file}: can't replace the line {old}")
    command = [sys.executable, "-m", "towncrier", "build", "--yes", "--version", str(release.version)]
    run([*command, "--dir", str(package.folder)], cwd=tree)
    git(tree, "add", "--all")
    # Hooks look at what a person writes; they may not even find their tools in a temporary worktree.
    git(tree, "commit", "--no-verify", "--message", f"Release {release.title}")
    return git(tree, "rev-parse", "HEAD")


def check_core(wheel: Path, package: Package, frozen: Path, environment: CleanVenv) -> None:
    """Try a comm-core wheel: the frozen plugin is loaded, and the package's smoke test passes."""
    environment.install(wheel, frozen)
    expect(environment, package, "frozen")
    environment.pytest([package.smoke_test])


def check_plugin(wheel: Path, package: Package, core_wheel: Path, environment: CleanVenv) -> None:
    """Try a plugin's wheel with one comm-core: its plugins are loaded, and its smoke test passes."""
    environment.install(core_wheel, wheel)
    for name in package.plugins:
        expect(environment, package, name)
    environment.pytest([package.smoke_test])


def expect(environment: CleanVenv, package: Package, plugin: str) -> None:
    """Check that the package imports as its version and that `plugin` is loaded."""
    code = f"import {package.module} as module; print(module.__version__)"
    version = environment.run("python", "-W", "error", "-c", code).strip()
    if Version(version) != package.version:
        raise ReleaseError(f"the installed {package.name} says it is {version}, not {package.version}")
    found = environment.plugins().get(plugin)
    if found is None:
        raise ReleaseError(f"plugin {plugin!r} is not found; `commctl plugins` shows {sorted(environment.plugins())}")
    if found["state"] != "loaded":
        raise ReleaseError(f"plugin {plugin!r} is {found['state']}: {found['error']}")


def make(root: Path, release: Release, scratch: Path) -> tuple[str, list[Path]]:
    """Commit, build and try the release in worktrees under `scratch`; return the commit and the files."""
    name = release.package.name
    with worktree(root, scratch / "tree", release.base) as tree:
        say("write the version and the changelog, and commit")
        made = commit(tree, release)
        packages = find_packages(tree)
        package = packages[name]
        say("build the sdist, and the wheel from it")
        wheel, sdist = build(package.folder, scratch / "files")
        view = third_party_view(scratch / "third_party")
        if release.floor_tag is None:
            say("try it in a clean environment with the frozen plugin of hook API 1.0")
            frozen, _ = build(tree / FROZEN, scratch / "frozen")
            check_core(wheel, package, frozen, CleanVenv(scratch / "venv", view))
        else:
            say(f"try it in a clean environment with this tree's {CORE}, {packages[CORE].version}")
            core_wheel, _ = build(packages[CORE].folder, scratch / "core")
            check_plugin(wheel, package, core_wheel, CleanVenv(scratch / "venv", view))
            say(f"try it in a clean environment with the lowest {CORE} that it claims, {release.floor_tag}")
            with worktree(root, scratch / "floor", release.floor_tag) as floor:
                floor_wheel, _ = build(find_packages(floor)[CORE].folder, scratch / "floor_core")
            check_plugin(wheel, package, floor_wheel, CleanVenv(scratch / "floor_venv", view))
    return made, [wheel, sdist]


def publish(root: Path, release: Release, made: str, files: list[Path]) -> None:
    """Keep the files, tag, and move the branch. Whatever fails here takes back what was done before it."""
    target = root / "dist" / release.tag
    shutil.rmtree(target, ignore_errors=True)
    try:
        target.mkdir(parents=True)
        for path in files:
            shutil.copy2(path, target / path.name)
            say(f"{target / path.name}")
        git(root, "tag", "--annotate", "--message", release.title, release.tag, made)
        try:
            if git(root, "rev-parse", "--abbrev-ref", "HEAD") != release.branch:
                raise ReleaseError(f"{release.branch} is not checked out any more")
            # Refuses if the branch has moved or a file of the release was changed meanwhile.
            git(root, "merge", "--ff-only", made)
        except BaseException:
            git(root, "tag", "--delete", release.tag)
            raise
    except BaseException:
        shutil.rmtree(target, ignore_errors=True)
        raise


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[release] {text}", flush=True)


def main(argv: list[str]) -> int:
    """Release what `argv` names; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="release.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("package", metavar="PACKAGE", help="distribution name, for example comm-core")
    parser.add_argument("--dry-run", action="store_true", help="build and try it, then leave everything as it was")
    arguments = parser.parse_args(argv)
    try:
        release = plan(ROOT, arguments.package)
        say(f"{release.package.name}: {release.package.version} -> {release.version}, on {release.branch}")
        with tempfile.TemporaryDirectory(prefix="comm-release-") as scratch:
            made, files = make(ROOT, release, Path(scratch))
            if arguments.dry_run:
                say(f"{release.title} would be fine; nothing was changed. Its commit:")
                print(git(ROOT, "show", "--stat", "--format=%s", made), flush=True)
            else:
                publish(ROOT, release, made, files)
                say(f"released {release.title}. To make it public: git push origin {release.branch} {release.tag}")
    except WorkspaceError as error:
        print(f"release.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
