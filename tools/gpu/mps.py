"""NVIDIA's Multi-Process Service around a few commands: with it, ranks that share a GPU really run at the same time.

Without it a GPU switches between processes every few milliseconds, and ranks that wait for each other take that long
for each step. The daemon is started with private folders and stopped again; no setting of the device is changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CONTROL", "Mps", "running"]

CONTROL = "nvidia-cuda-mps-control"
_START_S = 20.0
_STOP_S = 20.0


@dataclass
class Mps:
    """Whether MPS runs, and how to reach it.

    Attributes:
        active: whether it runs.
        why: why it does not, or empty.
        environment: what processes must have in their environment to use it.
        stopped: how it ended, in words; set on leaving the context.
    """

    active: bool
    why: str
    environment: dict[str, str]
    stopped: str = ""


@contextlib.contextmanager
def running(environment: Mapping[str, str], *, stop_s: float = _STOP_S) -> Generator[Mps]:
    """Start MPS for the block and stop it afterwards, whatever happens in the block.

    Where it can't be started the block runs all the same; `Mps.why` says so.
    """
    control = shutil.which(CONTROL, path=environment.get("PATH"))
    if control is None:
        yield Mps(False, f"{CONTROL} is not installed", dict(environment))
        return
    # Sockets have short names only, and the folders that TMPDIR points to may be deep.
    short = "/tmp" if os.access("/tmp", os.W_OK | os.X_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mps-", dir=short))
    folders = {
        "CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(folder / "log"),
    }
    inside = {**environment, **folders}
    # The daemon sees all GPUs: clients count among those that it sees.
    outside = {name: value for name, value in inside.items() if name != "CUDA_VISIBLE_DEVICES"}
    for name in ("pipe", "log"):
        (folder / name).mkdir(mode=0o700)
    mps = Mps(False, "", inside)
    try:
        mps.why = _start(control, outside)
        mps.active = not mps.why
        if mps.why:
            mps.environment = dict(environment)
        yield mps
    finally:
        mps.stopped = _stop(control, outside, folder, stop_s)
        shutil.rmtree(folder, ignore_errors=True)


def _start(control: str, environment: Mapping[str, str]) -> str:
    """Start the daemon; return why it does not run, or nothing."""
    try:
        # No pipes: the daemon keeps what it inherits, and whoever reads to the end would wait for the daemon's.
        done = subprocess.run(
            [control, "-d"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL} -d: {type(error).__name__}"
    if done.returncode != 0:
        return f"{CONTROL} -d ended with {done.returncode}"
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if _ask(control, environment, "get_server_list", 5.0) is not None:
            return ""
        time.sleep(0.2)
    return "its daemon does not answer"


def _ask(control: str, environment: Mapping[str, str], command: str, timeout_s: float) -> str | None:
    """Send one command to the daemon; return its answer, or None where there is none."""
    try:
        done = subprocess.run(
            [control],
            env=environment,
            input=f"{command}\n",
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _stop(control: str, environment: Mapping[str, str], folder: Path, timeout_s: float) -> str:
    """Stop the daemon: first by asking, which waits for its clients, then by force; return how it went."""
    asked = _ask(control, environment, "quit", timeout_s)
    if asked is None and not _processes(folder):
        return "it was not running"
    deadline = time.monotonic() + (timeout_s if asked is not None else 1.0)
    while time.monotonic() < deadline:
        if not _processes(folder):
            return "in order"
        time.sleep(0.1)
    for pid in _processes(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    return "killed, because it did not end when asked"


def _processes(folder: Path) -> list[int]:
    """Return the daemon and the servers that were started with these folders: by what they have in their environment.

    Nobody else's processes can be among them, as the folder's name is new.
    """
    mark = f"CUDA_MPS_PIPE_DIRECTORY={folder / 'pipe'}".encode()
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text()
            if name.startswith("nvidia-cuda-mps") and mark in (path / "environ").read_bytes().split(b"\0"):
                found.append(int(path.name))
        except (OSError, ValueError):
            continue
    return found
