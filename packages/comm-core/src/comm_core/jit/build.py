"""Compiles a module: a copy of its files, one ninja file, one nvcc a source, one library.

The compiler works on a copy of the files that the key was made from, inside the folder of the build. So nothing that
changes meanwhile gets in, every path in the commands is relative (spaces in a user's paths don't matter), and a
header that is not in the key is not there.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from comm_core.errors import JitBuildError
from comm_core.jit import archs as arch_names
from comm_core.jit import key as keys
from comm_core.jit.cache import LOG
from comm_core.jit.spec import INCLUDE, ModuleSpec
from comm_core.jit.toolchain import Toolchain

__all__ = ["compile_module", "first_error", "hint", "ninja_file"]

_OBJECTS, _TEMPORARY, _EXPORTS, _NINJA = "obj", "tmp", "exports.map", "build.ninja"
_GRACE_S = 3.0
"""How long ninja gets to end its commands before everything is killed."""


def compile_module(
    spec: ModuleSpec,
    files: keys.Snapshot,
    archs: Sequence[str],
    folder: Path,
    toolchain: Toolchain,
    ninja: str,
    deadline: float,
    keep_log: Path,
) -> float:
    """Build `spec` in `folder`, which is left with the library, the log and the sources; return the seconds it took.

    Args:
        spec: the module.
        files: its files.
        archs: normalized.
        folder: empty and private.
        toolchain: what compiles.
        ninja: path of ninja.
        deadline: on the `time.monotonic` clock; what runs then is killed.
        keep_log: where the log of a failed build is put.

    Raises:
        JitBuildError: it failed.
    """
    started = time.monotonic()
    try:
        _write_inputs(spec, files, archs, folder, toolchain)
        code = _run([ninja, "-v", "-j", str(_jobs())], folder, deadline)
    except OSError as error:
        raise JitBuildError(f"module {spec.name!r}: {error}{_full_hint(str(error))}") from error
    log = _read_log(folder / LOG)
    if code != 0 or not (folder / spec.library).is_file():
        kept = _keep(folder / LOG, keep_log)
        seconds = time.monotonic() - started
        raise _failure(spec, code, log, kept, seconds, toolchain)
    for name in (_OBJECTS, _TEMPORARY):
        shutil.rmtree(folder / name, ignore_errors=True)
    for name in (".ninja_log", ".ninja_deps"):
        (folder / name).unlink(missing_ok=True)
    return time.monotonic() - started


def _write_inputs(
    spec: ModuleSpec, files: keys.Snapshot, archs: Sequence[str], folder: Path, toolchain: Toolchain
) -> None:
    for name, contents in files.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    (folder / INCLUDE).mkdir(exist_ok=True)
    (folder / _TEMPORARY).mkdir()
    names = "".join(f"    {name};\n" for name in spec.exports)
    (folder / _EXPORTS).write_text(f"{{\n  global:\n{names}  local:\n    *;\n}};\n", encoding="utf-8")
    (folder / _NINJA).write_text(ninja_file(spec, files.sources, archs, toolchain.nvcc), encoding="utf-8")


def ninja_file(spec: ModuleSpec, sources: Sequence[str], archs: Sequence[str], nvcc: str) -> str:
    """Return the text of the ninja file: paths are relative to it, but for nvcc's own.

    Args:
        spec: the module.
        sources: paths of the copies.
        archs: normalized.
        nvcc: path of the compiler.
    """
    listed = ",".join(archs)
    flags = [*keys.COMPILE_FLAGS, f"-I{INCLUDE}", f'-DCOMM_ARCHS="{listed}"', *arch_names.generate_code(archs)]
    if len(archs) > 1:
        flags.append(f"--threads={min(len(archs), _jobs())}")
    link = [*keys.LINK_FLAGS, f"-Xlinker=--version-script={_EXPORTS}"]
    objects = [f"{_OBJECTS}/{number}-{PurePosixPath(source).stem}.o" for number, source in enumerate(sources)]
    lines = [
        "ninja_required_version = 1.5",
        f"nvcc = {_escaped(shlex.quote(nvcc))}",
        f"flags = {_escaped(shlex.join([*flags, *spec.flags]))}",
        f"link_flags = {_escaped(shlex.join(link))}",
        "rule compile",
        "  command = $nvcc $flags -c $in -o $out",
        "rule link",
        "  command = $nvcc $link_flags $in -o $out",
        *(f"build {out}: compile {_path(source)}" for out, source in zip(objects, sources, strict=True)),
        f"build {spec.library}: link {' '.join(objects)}",
        f"default {spec.library}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("$", "$$")


def _path(text: str) -> str:
    return re.sub(r"([$ :])", r"$\1", text)


def _jobs() -> int:
    return len(os.sched_getaffinity(0))


def _run(command: Sequence[str], folder: Path, deadline: float) -> int:
    """Run ninja with its output in the log; return its exit code. Whatever ends this early ends all of it."""
    variables = {
        name: value
        for name, value in os.environ.items()
        # A make above us would lend ninja its job slots, and ninja would wait for them.
        if name not in ("MAKEFLAGS", "MFLAGS", "NINJA_STATUS")
    }
    # Errors in English, for those who read them in the log and for us. Temporary files stay in the private folder and
    # go with it: nvcc leaves its own behind when it is killed. Relative, since nvcc with several threads does not
    # quote the names of its temporary files.
    variables.update({"LC_ALL": "C", "TMPDIR": _TEMPORARY})
    with (folder / LOG).open("wb") as log:
        run = subprocess.Popen(
            command,
            cwd=folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A session of its own marks everything that it starts; ninja gives each command a process group.
            start_new_session=True,
        )
        try:
            return run.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _end(run)
            log.write(b"\ncomm: killed at the deadline\n")
            return -int(signal.SIGALRM)
        except BaseException:
            _end(run)
            raise


def _end(run: subprocess.Popen[bytes]) -> None:
    """End ninja and all its commands."""
    # ninja passes this on to the groups of its commands; it is still alive to do so.
    with contextlib.suppress(ProcessLookupError):
        run.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(_GRACE_S)
    for pid in _session(run.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(_GRACE_S)


def _session(leader: int) -> list[int]:
    """Return the processes of the session that `leader` started."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The command's name is in parentheses and may hold anything; state, parent, group and session follow.
            fields = path.read_bytes().rsplit(b")", 1)[1].split()
            if int(fields[3]) == leader:
                found.append(int(path.parent.name))
    return found


def _read_log(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _keep(log: Path, place: Path) -> str:
    try:
        shutil.copyfile(log, place)
    except OSError:
        return ""
    return str(place)


# -- What went wrong ----------------------------------------------------------------------------------------------

_TIMED_OUT = -int(signal.SIGALRM)
_FAILED = re.compile(r"^FAILED: .*\n(.+)$", re.MULTILINE)
_ERROR = re.compile(
    r"\berror\b|\bfatal\b|undefined reference|cannot find -l|: not found|No space left|Killed", re.IGNORECASE
)
_NO_ERROR = re.compile(r"\bwarning\b|^FAILED:|^ninja:", re.IGNORECASE)

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: make room, or set COMM_CACHE_DIR to a folder on another one",
    ),
    (
        r"died due to signal 9|Killed signal terminated|code=137|^Killed|\bexit code:? 137",
        "a compiler was killed, most often because memory ran out (in a container: its limit)",
    ),
    (
        r"host compiler|compiler-bindir|unsupported GNU version|unsupported clang version|cc1plus|"
        r"(?:g\+\+|gcc|cc|c\+\+): (?:command )?not found",
        "nvcc can't use the host compiler: install a g++ that this CUDA supports, or set NVCC_CCBIN to one",
    ),
    (
        r"Unsupported gpu architecture|is not defined for option 'gpu",
        "this nvcc does not know that architecture: use a newer or older toolkit (COMM_NVCC), or name others in "
        "COMM_CUDA_ARCH_LIST",
    ),
)


def hint(log: str) -> str:
    """Return what to do about the failure that `log` tells of, or an empty string."""
    for pattern, text in _HINTS:
        if re.search(pattern, log, re.MULTILINE):
            return text
    return ""


def _full_hint(text: str) -> str:
    found = hint(text)
    return f": {found}" if found else ""


def first_error(log: str) -> str:
    """Return the first line of `log` that is an error; without one, its last line."""
    # After "FAILED:" come the command and what it printed; before that, what others printed.
    match = _FAILED.search(log)
    lines = [line.strip() for line in (log[match.end() :] if match else log).splitlines() if line.strip()]
    for line in lines:
        if _ERROR.search(line) and not _NO_ERROR.search(line):
            return line
    return lines[-1] if lines else ""


def _failure(spec: ModuleSpec, code: int, log: str, kept: str, seconds: float, toolchain: Toolchain) -> JitBuildError:
    match = _FAILED.search(log)
    command = match[1].strip() if match else ""
    if code == _TIMED_OUT:
        what = (
            f"module {spec.name!r} was not built within its deadline ({seconds:.0f} s were left for it): everything "
            "it ran was killed. COMM_JIT_TIMEOUT_S sets the deadline; `commctl jit warm` builds ahead of time"
        )
    else:
        what = f"module {spec.name!r} can't be built: {first_error(log) or f'ninja ended with {code}'}"
        advice = hint(log) or hint(f"exit code {code}")
        what += f"\n  hint: {advice}" if advice else ""
    what += f"\n  nvcc: {toolchain.nvcc} ({toolchain.version}, found by {toolchain.source})"
    what += f"\n  command: {command}" if command else ""
    what += f"\n  log: {kept}" if kept else ""
    return JitBuildError(what, command=command, log=kept)
