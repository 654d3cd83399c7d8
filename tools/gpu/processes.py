"""Child processes with a hard end, and the environment that they get."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import dev

__all__ = ["ROOT", "Done", "clean_environment", "run"]

ROOT = Path(__file__).resolve().parents[2]
_REMOVED = ("COMM_", "PYTEST_", "CUDA_MPS_", "GPU_CHECK_")
_TAIL = 6000


@dataclass(frozen=True)
class Done:
    """How a process ended.

    Attributes:
        code: its exit code, or None where it had to be killed at its deadline.
        seconds: how long it ran.
        log: the file with everything that it printed.
    """

    code: int | None
    seconds: float
    log: Path

    @property
    def text(self) -> str:
        """Everything that it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def tail(self) -> str:
        """The end of what it printed."""
        return self.text[-_TAIL:]

    @property
    def verdict(self) -> str:
        """How it ended, in words."""
        if self.code is None:
            return f"killed at its deadline, after {self.seconds:.0f} s"
        return f"exit code {self.code} after {self.seconds:.0f} s"


def clean_environment(folder: Path, inherited: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of children: this source tree, a cache in `folder`, and no settings of the caller's.

    Nothing needs to be installed: the plugins of this tree are found by what an installation would record about them.
    The cache is named by XDG_CACHE_HOME, because the pytest plugin removes COMM_*.
    `folder` is also where children that need no MPS look for its daemon, and don't find one.
    """
    kept = os.environ if inherited is None else inherited
    environment = {name: value for name, value in kept.items() if not name.startswith(_REMOVED)}
    sources = [str(path) for path in sorted((ROOT / "packages").glob("*/src"))]
    metadata = folder / "metadata"
    dev.write_metadata(ROOT, metadata)
    environment["PYTHONPATH"] = os.pathsep.join([*sources, str(ROOT / "tools"), str(metadata)])
    environment["XDG_CACHE_HOME"] = str(folder / "cache")
    environment["CUDA_MPS_PIPE_DIRECTORY"] = str(folder / "no-mps")
    return environment


def run(
    command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float, log: Path, interrupt_s: float = 0.0
) -> Done:
    """Run `command` in the source tree until it ends or its time is up; never raises because of what it does.

    At the deadline it is interrupted, if `interrupt_s` says for how long it may then still write its results, and
    killed with its process group.
    """
    started = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
            if interrupt_s:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(interrupt_s)
        finally:
            # Also where this process is interrupted, and where the command left something behind in its group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
    return Done(code, time.monotonic() - started, log)
