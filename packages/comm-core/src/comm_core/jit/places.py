"""Which folder compiled libraries are kept in, and whether nobody else can have put something there."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from comm_core import _env
from comm_core.errors import JitCacheError

__all__ = ["PRIVATE_DIR", "Root", "check_trusted", "roots"]

PRIVATE_DIR = 0o700
"""Mode of every folder that is made for the cache."""


@dataclass(frozen=True)
class Root:
    """A folder for compiled libraries.

    Attributes:
        path: without symbolic links.
        explicit: whether ``COMM_CACHE_DIR`` names it.
        writable: whether libraries can be added.
        note: why it is this one, where it is not the usual one.
    """

    path: Path
    explicit: bool
    writable: bool
    note: str = ""


# -- Which folder -------------------------------------------------------------------------------------------------


def roots(*, make: bool = True) -> list[Root]:
    """Return the folders to look for libraries in, in order; the last one is the one to build in.

    Args:
        make: make what is missing. Without it, the list may be empty, and `writable` is only about what exists.

    Raises:
        JitCacheError: ``COMM_CACHE_DIR`` can't be used, or there is no place at all.
    """
    explicit = _env.cache_dir()
    if explicit is not None:
        path = Path(explicit).expanduser().absolute()
        problem = _prepare(path, make)
        if problem and make and not _is_folder(path):
            raise JitCacheError(f"COMM_CACHE_DIR={explicit!r} can't be used: {problem}")
        return [Root(Path(os.path.realpath(path)), explicit=True, writable=not problem, note=problem)]
    default, problem = _default()
    found: list[Root] = []
    if default is not None:
        problem = _prepare(default, make)
        path = Path(os.path.realpath(default))
        foreign = _foreign_ancestor(path)
        # One that can't be added to may still have something; one that others can replace must not even be read.
        if _is_folder(path) and not foreign:
            found.append(Root(path, explicit=False, writable=not problem, note=problem))
        problem = problem or foreign
        if not problem:
            return found
    temporary = _temporary(problem, make)
    if temporary is not None:
        found.append(Root(temporary, explicit=False, writable=True, note=problem))
    return found


def _is_folder(path: Path) -> bool:
    # Path.is_dir raises where a folder above may not be searched.
    return os.path.isdir(path)  # noqa: PTH112


def _default() -> tuple[Path | None, str]:
    """Return the usual folder, or None and why there is none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification of that variable says to ignore a relative path.
    if base and Path(base).is_absolute():
        return Path(base) / "comm", ""
    try:
        home = Path.home()
    except RuntimeError as error:
        return None, f"there is no home folder: {error}"
    if not _is_folder(home):
        # Not made here: where a home is missing, it is so on purpose, or the disk is not mounted yet.
        return None, f"the home folder {home} does not exist or may not be entered"
    return home / ".cache" / "comm", ""


def _prepare(path: Path, make: bool) -> str:
    """Make `path` if so asked, and return why nothing can be added there, or an empty string."""
    try:
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(PRIVATE_DIR)
    except OSError as error:
        return f"{error.filename or path}: {error.strerror}"
    if not _is_folder(path):
        return f"{path} is no folder" if os.path.lexists(path) else f"{path} does not exist yet"
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"{path} is not writable by user {os.geteuid()}"
    return ""


def _temporary(why: str, make: bool) -> Path | None:
    """Return a folder of our own among the system's temporary files; None if there is none and `make` is off."""
    try:
        base = Path(os.path.realpath(tempfile.gettempdir()))
    except OSError as error:
        raise JitCacheError(f"no folder for compiled libraries: {why}; {error}. Set COMM_CACHE_DIR") from error
    path = base / f"comm-{os.geteuid()}"
    if not make and not path.exists():
        return None
    try:
        with contextlib.suppress(FileExistsError):
            path.mkdir(PRIVATE_DIR)
        found = path.lstat()
    except OSError as error:
        raise JitCacheError(
            f"no folder for compiled libraries: {why}; {path}: {error}. Set COMM_CACHE_DIR"
        ) from error
    # Anybody could have made a folder of this name first.
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise JitCacheError(
            f"no folder for compiled libraries: {why}; and {path} is not a folder of user {os.geteuid()} alone (mode "
            "0700). Remove it, or set COMM_CACHE_DIR to a folder of your own"
        )
    return path


# -- Whom to trust ------------------------------------------------------------------------------------------------


def check_trusted(root: Path, path: Path) -> None:
    """Raise unless nobody but this user and root can have written `path` or anything on the way to it.

    Raises:
        JitCacheError: another user can; the text names the place and the command that changes it.
    """
    problem = _foreign_ancestor(root)
    if problem:
        raise JitCacheError(f"{path} is not loaded: {problem}. Set COMM_CACHE_DIR to a folder below one of your own")
    steps = [root]
    for part in path.relative_to(root).parts:
        steps.append(steps[-1] / part)
    for step in steps:
        found = step.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise JitCacheError(f"{path} is not loaded: {step} is a symbolic link; remove it")
        if found.st_uid not in _trusted_users():
            raise JitCacheError(
                f"{path} is not loaded: {step} belongs to user {found.st_uid}, this is user {os.geteuid()}. Set "
                "COMM_CACHE_DIR to a folder of your own"
            )
        if found.st_mode & 0o022:
            raise JitCacheError(
                f"{path} is not loaded: other users can write {step} (mode {stat.S_IMODE(found.st_mode):04o}), and "
                f"so choose the code that runs here. If only you did: chmod -R go-w {root}"
            )


def _foreign_ancestor(root: Path) -> str:
    """Return which folder above `root` lets another user replace what is below it, or an empty string."""
    for folder in root.parents:
        try:
            found = folder.lstat()
        except OSError as error:
            return f"{folder}: {error.strerror}"
        if found.st_uid not in _trusted_users():
            return f"{folder} belongs to user {found.st_uid}, who can replace what is below it"
        # In a sticky folder (/tmp) everybody can add names, but only their owner can replace them.
        if found.st_mode & stat.S_ISVTX:
            continue
        if found.st_mode & 0o002 or (found.st_mode & 0o020 and not _own_group(found.st_gid)):
            return (
                f"other users can write {folder} (mode {stat.S_IMODE(found.st_mode):04o}) and so replace what is "
                "below it"
            )
    return ""


def _trusted_users() -> tuple[int, ...]:
    # Whoever owns "/" could replace Python itself. That is root; only in a user namespace it goes by another number.
    return 0, os.geteuid(), Path("/").stat().st_uid


def _own_group(gid: int) -> bool:
    """Return whether a group is root's or this user's alone: many systems give each user a group of the same name."""
    if gid == 0:
        return True
    try:
        return grp.getgrgid(gid).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
