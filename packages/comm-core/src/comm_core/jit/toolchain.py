"""Finds nvcc, the host compiler behind it, and ninja, and says what they are.

Nothing is derived from where nvcc lies: what is called ``nvcc`` may be a wrapper script far away from any toolkit, so
the toolkit's folder and the host compiler are what nvcc itself reports. What is found is kept for this process only:
a note on disk could not tell that the toolkit behind a wrapper was upgraded.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from comm_core import _env
from comm_core.errors import JitBuildError

__all__ = [
    "Toolchain",
    "compare_cuda",
    "find",
    "find_ninja",
    "find_nvcc",
    "libc_version",
    "missing_headers",
    "version_of",
]

_SECONDS = 60.0
"""Deadline of asking a program for its version; a cold network file system can take a while."""

_FLAG_VARIABLES = ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS")
_STANDARD_PLACE = Path("/usr/local")


@dataclass(frozen=True)
class Toolchain:
    """What compiles here.

    Attributes:
        nvcc: path of the program, as found.
        source: how it was found (``"COMM_NVCC"``, ``"CUDA_HOME"``, ``"PATH"``…).
        version: for example ``"13.0.88"``.
        version_text: all that ``nvcc --version`` says.
        root: folder of the toolkit, as nvcc reports it.
        host_compiler: the program that nvcc uses for host code.
        host_version: the first line of its ``--version``.
        environment: variables that add flags to every nvcc command.
    """

    nvcc: str
    source: str
    version: str
    version_text: str
    root: str
    host_compiler: str
    host_version: str
    environment: tuple[tuple[str, str], ...] = ()


def find_nvcc() -> tuple[str, str]:
    """Return the path of nvcc and how it was found.

    Raises:
        JitBuildError: there is none; the text lists where it was looked for.
    """
    explicit = _env.nvcc()
    if explicit is not None:
        if not _is_program(Path(explicit)):
            raise JitBuildError(f"COMM_NVCC={explicit!r} is no program that can be run: set it to the path of nvcc")
        return str(Path(explicit).absolute()), "COMM_NVCC"
    looked: list[str] = []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        value = os.environ.get(variable, "")
        if not value:
            continue
        if os.pathsep in value:
            raise JitBuildError(
                f"{variable}={value!r} must be one folder, not a list: a ':' makes it none. Set it to the toolkit, "
                f"for example {variable}=/usr/local/cuda, or set COMM_NVCC"
            )
        candidate = Path(value) / "bin" / "nvcc"
        if _is_program(candidate):
            return str(candidate.absolute()), variable
        looked.append(f"{candidate} ({variable})")
    on_path = shutil.which("nvcc")
    if on_path is not None:
        return str(Path(on_path).absolute()), "PATH"
    looked.append("PATH")
    for folder in _standard_folders():
        candidate = folder / "bin" / "nvcc"
        if _is_program(candidate):
            return str(candidate), str(folder)
    looked.append(f"{_STANDARD_PLACE}/cuda*")
    raise JitBuildError(
        f"no nvcc was found; looked at {', '.join(looked)}. Install the CUDA toolkit (its compiler is enough), or "
        "set COMM_NVCC to the path of nvcc, or fill the cache on a machine that has one: commctl jit warm"
    )


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _standard_folders() -> list[Path]:
    def rank(folder: Path) -> tuple[bool, tuple[int, ...]]:
        # The plain name is the administrator's choice; of the others the newest.
        return folder.name == "cuda", tuple(int(part) for part in re.findall(r"\d+", folder.name))

    return sorted(_STANDARD_PLACE.glob("cuda*"), key=rank, reverse=True)


def find_ninja() -> str:
    """Return the path of ninja: the one that was installed for this Python, else the one on PATH.

    Raises:
        JitBuildError: there is none.
    """
    # Beside the interpreter, since a virtual environment that was not activated is not on PATH.
    for folder in (Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))):
        if _is_program(folder / "ninja"):
            return str(folder / "ninja")
    found = shutil.which("ninja")
    if found is None:
        raise JitBuildError(f"ninja was not found beside {sys.executable} or on PATH: pip install ninja")
    return str(Path(found).absolute())


def missing_headers(host_compiler: str, headers: Sequence[str]) -> list[str]:
    """Return those of the system's headers that the host compiler does not find.

    Raises:
        JitBuildError: the compiler does not work.
    """
    # The compiler itself is asked: where it looks depends on how it was built and on variables.
    lines = [
        f"#if !__has_include(<{header}>)\ncomm_missing {number}\n#endif\n" for number, header in enumerate(headers)
    ]
    try:
        done = subprocess.run(
            [host_compiler, "-E", "-P", "-x", "c++", "-std=c++17", "-"],
            input="".join(lines),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise JitBuildError(f"the host compiler {host_compiler} does not work: {error}") from error
    return [headers[int(number)] for number in re.findall(r"^comm_missing (\d+)$", done.stdout, re.MULTILINE)]


def libc_version() -> str | None:
    """Return the C library's version, for example ``"glibc 2.36"``; None where it does not say."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, OSError, ValueError):
        return None


_found: dict[tuple[str | None, ...], Toolchain] = {}
_lock = threading.Lock()


def find() -> Toolchain:
    """Return what compiles here. Runs nvcc and the host compiler once a process and environment.

    Raises:
        JitBuildError: something is missing or does not work; the text says what.
    """
    where = tuple(
        os.environ.get(name)
        for name in ("COMM_NVCC", "CUDA_HOME", "CUDA_PATH", "PATH", "NVCC_CCBIN", *_FLAG_VARIABLES)
    )
    with _lock:
        if where not in _found:
            _found[where] = _ask(*find_nvcc())
        return _found[where]


def _ask(nvcc: str, source: str) -> Toolchain:
    # Short runs side by side; together they are most of what a warm start costs. Which host compiler nvcc uses is
    # only known at the end of one of them, but it is nearly always this one.
    guess = shutil.which("g++")
    with ThreadPoolExecutor(1) as pool:
        guessed = None if guess is None else pool.submit(_host_version, guess)
        with _start([nvcc, "--version"]) as version_run, _start([nvcc, *_DRY_RUN]) as dry_run:
            version_text = _finish(version_run, nvcc, source)
            report = _finish(dry_run, nvcc, source)
        version = version_of(version_text)
        if version is None:
            raise JitBuildError(f"{nvcc} (from {source}) is no nvcc: --version says {version_text[:200]!r}")
        host = _host_compiler(report, nvcc)
        host_version = guessed.result() if guessed is not None and host == guess else _host_version(host)
    return Toolchain(
        nvcc=nvcc,
        source=source,
        version=version,
        version_text=version_text,
        root=_toolkit_root(report, nvcc),
        host_compiler=host,
        host_version=host_version,
        environment=_environment(),
    )


_DRY_RUN = ("--dryrun", "-shared", "comm.o", "-o", "comm.so")
"""Linking, because that reports everything and, unlike compiling, runs no host compiler first. Nothing is read."""


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        raise JitBuildError(f"{command[0]} can't be run: {error}") from error


def _finish(run: subprocess.Popen[str], nvcc: str, source: str) -> str:
    try:
        text, _ = run.communicate(timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        run.kill()
        raise JitBuildError(f"{nvcc} (from {source}) did not answer within {_SECONDS:g} s") from None
    if run.returncode != 0:
        hint = ""
        if "host compiler" in text:
            hint = "; nvcc finds no host compiler: install g++, or set NVCC_CCBIN to one"
        last = " / ".join(line.strip() for line in text.strip().splitlines()[-3:])
        raise JitBuildError(f"{shlex.join(run.args)} failed with {run.returncode}: {last}{hint}")  # pyright: ignore
    return text


def _toolkit_root(report: str, nvcc: str) -> str:
    match = re.search(r"^#\$ TOP=(.*)$", report, re.MULTILINE)
    return os.path.realpath(match[1].strip()) if match else str(Path(nvcc).resolve().parent.parent)


def _host_compiler(report: str, nvcc: str) -> str:
    """Return the program in the command that links, looked up where nvcc would find it."""
    commands = [line[3:] for line in report.splitlines() if line.startswith("#$ ") and " -shared " in line]
    # The device linker's command has "--shared"; the host compiler's comes last.
    words = shlex.split(commands[-1]) if commands else []
    name = words[0] if words else "g++"
    match = re.search(r"^#\$ PATH=(.*)$", report, re.MULTILINE)
    found = shutil.which(name, path=match[1] if match else None)
    if found is None:
        raise JitBuildError(
            f"the host compiler {name!r}, which {nvcc} uses, was not found: install g++, or set NVCC_CCBIN to one"
        )
    return found


def _host_version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            env={**os.environ, "LC_ALL": "C"},
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise JitBuildError(f"the host compiler {program} does not work: {error}") from error
    return (done.stdout.splitlines() or [""])[0].strip()


_CCBIN = re.compile(r"""(-ccbin|--compiler-bindir)[ =]?("[^"]*"|'[^']*'|\S+)""")


def _environment() -> tuple[tuple[str, str], ...]:
    found: list[tuple[str, str]] = []
    for name in _FLAG_VARIABLES:
        # The host compiler counts by its version, wherever it lies.
        value = " ".join(_CCBIN.sub("", os.environ.get(name, "")).split())
        if value:
            found.append((name, value))
    return tuple(found)


def version_of(text: str) -> str | None:
    """Return the version in what ``nvcc --version`` says, for example ``"13.0.88"``; None if there is none."""
    match = re.search(r"\bV(\d+\.\d+\.\d+)", text) or re.search(r"\brelease (\d+\.\d+)", text)
    return match and match[1]


def compare_cuda(nvcc: str, torch_cuda: str | None) -> str:
    """Return a remark about an nvcc whose CUDA differs from torch's in its major, or an empty string. Pure.

    No reason to refuse: a library shares nothing with torch but the driver. The driver is what may be too old.

    Args:
        nvcc: version, for example ``"13.0.88"``.
        torch_cuda: what torch was built with, for example ``"12.8"``; None for a torch without CUDA.
    """
    if torch_cuda is None or nvcc.split(".")[0] == torch_cuda.split(".")[0]:
        return ""
    newer = int(nvcc.split(".")[0]) > int(torch_cuda.split(".")[0])
    risk = "; it needs a driver for that version, which may be newer than the one that torch needs" if newer else ""
    return f"nvcc is of CUDA {'.'.join(nvcc.split('.')[:2])} and torch of CUDA {torch_cuda}{risk}"
