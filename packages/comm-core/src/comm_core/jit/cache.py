"""Where built libraries live: private folders, one a key, published whole by a rename.

    <root>/jit/1/entries/<module>-<key>/   <module>.so, manifest.json, build.log and the sources it was built from
    <root>/jit/1/locks/                    one file a key, locked while it is built, never deleted
    <root>/jit/1/staging/                  folders of builds that are going on, or that were killed
    <root>/jit/1/failed/                   the log and the error of the last failed build, one a key

Nothing here depends on the lock being honoured (on some network file systems it is not): whoever comes second with a
finished build drops it and takes the published one. A builder that is killed leaves a staging folder and nothing
else. Nothing is loaded from a place that another user can write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from comm_core._json import Json, JsonObject
from comm_core.errors import JitBuildError, JitCacheError
from comm_core.jit import key as keys
from comm_core.jit.places import PRIVATE_DIR, Root, check_trusted

__all__ = ["Artifact", "Cache", "Failure"]

MANIFEST = "manifest.json"
LOG = "build.log"

_LAYOUT = ("jit", str(keys.FORMAT))
_ENTRIES, _LOCKS, _STAGING, _FAILED = "entries", "locks", "staging", "failed"
_PRIVATE_FILE = 0o600

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_RACED = (errno.ENOTEMPTY, errno.EEXIST)

_POLL_FIRST_S = 0.005
_POLL_CAP_S = 0.1
_SETTLE_S = 10.0
"""How long a folder that exists may look incomplete: network file systems remember what was not there yet."""

_ABANDONED_S = 24 * 3600.0


@dataclass(frozen=True)
class Artifact:
    """A library in the cache.

    Attributes:
        module: its name.
        key: of its inputs.
        path: of the library.
        inputs: what it was made from.
        built: when, how long it took and with what, for people.
    """

    module: str
    key: str
    path: Path
    inputs: JsonObject
    built: JsonObject

    @property
    def folder(self) -> Path:
        """The folder that holds it."""
        return self.path.parent

    @property
    def archs(self) -> tuple[str, ...]:
        """The architectures that are in it."""
        return tuple(cast("list[str]", self.inputs["archs"]))

    @property
    def log(self) -> Path:
        """What the compilers said, registers and spills of every kernel included."""
        return self.folder / LOG


@dataclass(frozen=True)
class Failure:
    """The last failed build of a key, as another process may have left it."""

    stamp: str
    text: str
    command: str
    log: str


# -- The cache ----------------------------------------------------------------------------------------------------


class Cache:
    """The libraries of one root."""

    def __init__(self, root: Root) -> None:
        self.root = root
        self.base = root.path.joinpath(*_LAYOUT)

    def entry(self, module: str, key: str) -> Path:
        """Return the folder of a library, whether or not it exists."""
        return self.base / _ENTRIES / f"{module}-{key}"

    def find(self, module: str, key: str) -> Artifact | None:
        """Return the library of `key`, or None.

        Raises:
            JitCacheError: it is there, but another user could have put it there.
        """
        return self._read(self.entry(module, key))

    def artifacts(self, module: str | None = None) -> list[Artifact]:
        """Return the libraries here, of one module or of all, newest first; broken folders are left out."""
        try:
            names = sorted(os.listdir(self.base / _ENTRIES))  # noqa: PTH208 - names alone, and an error right here
        except OSError:
            return []
        prefix = "" if module is None else f"{module}-"
        found = [self._read(self.base / _ENTRIES / name) for name in names if name.startswith(prefix)]
        mine = [item for item in found if item is not None and module in (None, item.module)]
        return sorted(mine, key=lambda item: (-_number(item.built.get("time")), item.module, item.key))

    def _read(self, folder: Path) -> Artifact | None:
        try:
            # Before anything in it is believed.
            check_trusted(self.root.path, folder)
            manifest = cast("dict[str, Any]", json.loads((folder / MANIFEST).read_bytes()))
            module, key = str(manifest["module"]), str(manifest["key"])
            library = folder / f"{module}.so"
            inputs, built = cast("JsonObject", manifest["inputs"]), cast("JsonObject", manifest["built"])
            # A folder that a cleaner of old files went through, or that a full disk cut short.
            whole = library.stat().st_size == built["bytes"] and keys.key(inputs) == key
            check_trusted(self.root.path, folder / MANIFEST)
            check_trusted(self.root.path, library)
        except PermissionError as error:
            if not self.root.explicit:
                return None
            raise JitCacheError(
                f"{error.filename} can't be read by user {os.geteuid()}: whoever filled this cache can share it with "
                f"chmod -R go+rX {self.root.path}"
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return Artifact(module, key, library, inputs, built) if whole and folder.name == f"{module}-{key}" else None

    def require_writable(self) -> None:
        """Make the folders that building needs.

        Raises:
            JitCacheError: nothing can be added here.
        """
        if not self.root.writable:
            name = "COMM_CACHE_DIR" if self.root.explicit else "the cache"
            raise JitCacheError(f"{name}={str(self.root.path)!r} can't take a new library: {self.root.note}")
        for folder in (self.root.path / _LAYOUT[0], self.base, *(self.base / name for name in _FOLDERS)):
            try:
                folder.mkdir(PRIVATE_DIR, exist_ok=True)
            except OSError as error:
                raise JitCacheError(f"{folder} can't be made: {error.strerror}") from error
        # Before anything is written: what is built in a place that others can write would not be loaded from there.
        for name in _FOLDERS:
            check_trusted(self.root.path, self.base / name)

    @contextlib.contextmanager
    def lock(self, module: str, key: str, deadline: float) -> Generator[bool]:
        """Hold the lock of a key; gives False, without the lock, once somebody else has published that key.

        The kernel drops the lock with its holder, however that ends. The file stays: whoever waits has it open, and
        after a deletion two processes could each hold a lock of their own.

        Args:
            module: name.
            key: of the build.
            deadline: on the `time.monotonic` clock.

        Raises:
            JitBuildError: the deadline has passed; the text names the holder.
        """
        path = self.base / _LOCKS / f"{module}-{key}.lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, _PRIVATE_FILE)
        except OSError as error:
            raise JitCacheError(f"{path} can't be opened: {error.strerror}") from error
        try:
            held = self._acquire(descriptor, path, module, key, deadline)
            try:
                yield held
            finally:
                if held:
                    # Explicitly: a process that was forked meanwhile has the same lock through its copy.
                    with contextlib.suppress(OSError):
                        fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            os.close(descriptor)

    def _acquire(self, descriptor: int, path: Path, module: str, key: str, deadline: float) -> bool:
        started = time.monotonic()
        pause = _POLL_FIRST_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    # This file system has no locks. Several may build then; publishing sorts that out.
                    return True
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise JitCacheError(f"{path} can't be locked: {error.strerror}") from error
            else:
                _note_holder(descriptor)
                return True
            # The holder may have published and then been stopped.
            if self.find(module, key) is not None:
                return False
            if time.monotonic() >= deadline:
                raise JitBuildError(
                    f"module {module!r} is being built by {_holder(descriptor)}, and that did not end within "
                    f"{time.monotonic() - started:.0f} s: see what that process does, and end it if it hangs. "
                    f"(Its lock is {path}; COMM_JIT_TIMEOUT_S sets the deadline. Deleting the file does not help.)"
                )
            time.sleep(pause)
            pause = min(pause * 2, _POLL_CAP_S)

    @contextlib.contextmanager
    def staging(self, module: str, key: str) -> Generator[Path]:
        """Give an empty private folder to build in; what is left of it in the end is removed."""
        self._remove_dead(f"{module}-{key}.")
        folder = self.base / _STAGING / f"{module}-{key}.{_owner()}-{uuid.uuid4().hex[:8]}"
        try:
            folder.mkdir(PRIVATE_DIR)
        except OSError as error:
            raise JitCacheError(f"{folder} can't be made: {error.strerror}") from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def publish(self, staging: Path, module: str, key: str, inputs: JsonObject, built: JsonObject) -> Artifact:
        """Make a finished build visible to everyone at once, or take the one that came first.

        Args:
            staging: folder of the build, with the library in it.
            module: name.
            key: of `inputs`.
            inputs: for the manifest.
            built: for the manifest; the size of the library is added.

        Raises:
            JitCacheError: what is at its place is neither this library nor can be replaced.
        """
        try:
            size = (staging / f"{module}.so").stat().st_size
            manifest = {"module": module, "key": key, "built": {**built, "bytes": size}, "inputs": inputs}
            text = json.dumps(manifest, indent=2, sort_keys=True) + "\n"
            (staging / MANIFEST).write_text(text, encoding="utf-8")
            _settle(staging)
        except OSError as error:
            raise JitCacheError(f"module {module!r} was built and can't be kept in {staging}: {error}") from error
        entry = self.entry(module, key)
        published = replaced = False
        until = time.monotonic() + _SETTLE_S
        pause = _POLL_FIRST_S
        while True:
            if not published:
                try:
                    staging.rename(entry)
                    published = True
                    _sync(entry.parent)
                except OSError as error:
                    if error.errno not in _RACED:
                        raise JitCacheError(f"{entry} can't be made: {error.strerror}") from error
            found = self.find(module, key)
            if found is not None:
                return found
            if time.monotonic() >= until:
                if published or replaced:
                    raise JitCacheError(f"{entry} can't be read back: delete that folder")
                # It exists and stays unusable, so it is a leftover: put it away, and the next rename succeeds.
                aside = staging.with_name(f"{staging.name}-replaced")
                with contextlib.suppress(OSError):
                    entry.rename(aside)
                shutil.rmtree(aside, ignore_errors=True)
                replaced, until = True, time.monotonic() + _SETTLE_S
                continue
            time.sleep(pause)
            pause = min(pause * 2, _POLL_CAP_S)

    # -- Failures --

    def failure(self, module: str, key: str) -> Failure | None:
        """Return what the last failed build of `key` left, or None."""
        path = self.base / _FAILED / f"{module}-{key}.json"
        try:
            value = cast("dict[str, Any]", json.loads(path.read_bytes()))
            return Failure(*(str(value[name]) for name in ("stamp", "text", "command", "log")))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def failure_log(self, module: str, key: str) -> Path:
        """Return where the log of a failed build is kept."""
        return self.base / _FAILED / f"{module}-{key}.log"

    def note_failure(self, module: str, key: str, error: JitBuildError) -> None:
        """Keep a failure for those who wait for this build, so that not each of them fails anew."""
        value = {"stamp": uuid.uuid4().hex, "text": str(error), "command": error.command, "log": error.log}
        path = self.base / _FAILED / f"{module}-{key}.json"
        fresh = path.with_suffix(f".{uuid.uuid4().hex[:8]}")
        with contextlib.suppress(OSError):
            fresh.write_text(json.dumps(value), encoding="utf-8")
            fresh.replace(path)

    def forget_failure(self, module: str, key: str) -> None:
        """Remove what a failed build of `key` left."""
        for path in (self.base / _FAILED / f"{module}-{key}.json", self.failure_log(module, key)):
            with contextlib.suppress(OSError):
                path.unlink()

    # -- Cleaning --

    def remove(self, artifact: Artifact) -> None:
        """Delete a library. A process that has it loaded keeps it."""
        # Away by one rename, so that nobody finds half of it.
        trash = self.base / _STAGING / f"{artifact.folder.name}.{_owner()}-{uuid.uuid4().hex[:8]}"
        try:
            artifact.folder.rename(trash)
        except OSError as error:
            raise JitCacheError(f"{artifact.folder} can't be removed: {error.strerror}") from error
        shutil.rmtree(trash, ignore_errors=True)

    def leftovers(self) -> list[Path]:
        """Return folders of builds that were killed, and of entries that can't be used."""
        dead = [folder for folder in _folders(self.base / _STAGING) if _is_dead(folder)]
        return dead + [folder for folder in _folders(self.base / _ENTRIES) if self._read(folder) is None]

    def _remove_dead(self, prefix: str) -> None:
        for folder in _folders(self.base / _STAGING):
            if folder.name.startswith(prefix) and _is_dead(folder):
                shutil.rmtree(folder, ignore_errors=True)


_FOLDERS = (_ENTRIES, _LOCKS, _STAGING, _FAILED)


def _folders(path: Path) -> Iterator[Path]:
    try:
        found = sorted(path.iterdir())
    except OSError:
        return iter(())
    return (folder for folder in found if folder.is_dir() and not folder.is_symlink())


def _number(value: Json) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _settle(folder: Path) -> None:
    """Fix the modes of what will be published, and make the disk have it before the name does."""
    for path in (folder, *folder.rglob("*")):
        # A rename keeps the mode, so it must be right before; the umask has no say.
        path.chmod(PRIVATE_DIR if path.is_dir() else _PRIVATE_FILE)
    for name in os.listdir(folder):  # noqa: PTH208 - names alone
        if (folder / name).is_file():
            _sync(folder / name)
    _sync(folder)


def _sync(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno in _FULL:
            raise
    finally:
        os.close(descriptor)


def _namespace() -> str:
    """Return what tells apart two processes of one number: the boot and the PID namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        return f"{boot}{Path('/proc/self/ns/pid').stat().st_ino:x}"
    except OSError:
        return uuid.uuid5(uuid.NAMESPACE_DNS, socket.gethostname()).hex[:8]


def _owner() -> str:
    return f"{_namespace()}-{os.getpid()}"


def _is_dead(folder: Path) -> bool:
    """Return whether the builder of a staging folder is gone: known here, assumed after a day elsewhere."""
    try:
        namespace, pid, _ = folder.name.rsplit(".", 1)[1].split("-", 2)
        if namespace == _namespace():
            os.kill(int(pid), 0)
        return time.time() - folder.stat().st_mtime > _ABANDONED_S
    except ProcessLookupError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def _note_holder(descriptor: int) -> None:
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})
    # For people who wait; nobody relies on it, so a full disk does not matter.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        value = cast("dict[str, Any]", json.loads(os.pread(descriptor, 4096, 0)))
        return f"process {value['pid']} on {value['host']} (since {time.time() - float(value['since']):.0f} s)"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
