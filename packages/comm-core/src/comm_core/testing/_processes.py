"""This side of a rank pool's processes: nurseries, ranks, and moving bytes to and from them without ever blocking."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

from comm_core.testing import _rank_process
from comm_core.testing._rank_process import DUMP_SIGNAL, MAX_PACKET, RankFiles
from comm_core.testing._wire import Inbox

__all__ = ["KILL_S", "Answer", "Nursery", "RankHandle", "move", "stacks_of", "tail"]

KILL_S = 10.0
"""Seconds in which a killed process must be gone."""

_STACKS_S = 2.0
_LOG_TAIL = 4000
_NURSERY = "import sys; sys.path[:] = {path!r}; from {module} import nursery_main; nursery_main({arguments})"


class Nursery:
    """A process that imports torch once and forks ranks; see `comm_core.testing._rank_process`."""

    def __init__(self, index: int, folder: Path, preload: Sequence[str]) -> None:
        self.log = folder / f"nursery{index}.log"
        self.control, child = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = ", ".join(map(repr, (child.fileno(), os.getpid(), tuple(preload))))
        code = _NURSERY.format(path=sys.path, module="comm_core.testing._rank_process", arguments=arguments)
        # What the project itself reads is passed with each run, so that a test can change it.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("COMM_")}
        # More threads than cores only slow small cases down, and a nursery that starts any could not fork safely.
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment[name] = "1"
        # Ranks are on one machine; its host name need not resolve to anything that gloo can listen on.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        seed = environment.get("PYTHONHASHSEED", "random")
        environment["PYTHONHASHSEED"] = str(int(seed) + index) if seed.isdigit() else "random"
        with child, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=[child.fileno()],
                start_new_session=True,
            )
        self.control.setblocking(False)
        self.threads: int | None = None
        self.pids: dict[int, int] = {}
        self.ended: dict[int, int] = {}
        self.gone = False

    def fork(self, token: int, files: RankFiles, channel: socket.socket) -> None:
        socket.send_fds(self.control, [pickle.dumps(("fork", token, files))], [channel.fileno()])

    def signal(self, pid: int, number: int) -> None:
        if pid not in self.ended and not self.gone:
            with contextlib.suppress(OSError):
                self.control.send(pickle.dumps(("signal", pid, int(number))))

    def read(self) -> None:
        """Take in every report that is there."""
        while True:
            try:
                packet = self.control.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self.gone = True
                return
            kind, *values = pickle.loads(packet)
            if kind == "ready":
                (self.threads,) = values
            elif kind == "forked":
                token, pid = values
                self.pids[token] = pid
                self.ended.pop(pid, None)  # An earlier rank may have had the same process id.
            else:
                pid, code = values
                self.ended[pid] = code

    def end(self) -> int:
        """End the process, and with it every rank that is left; return its exit code."""
        self.control.close()
        try:
            return self.process.wait(KILL_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(KILL_S)


class Answer(NamedTuple):
    """What came back from a rank: a reply, or the way in which its process ended, or neither (no answer in time)."""

    reply: tuple[Any, ...] | None = None
    died: bool = False
    exit_code: int | None = None


@dataclass(eq=False)
class RankHandle:
    """This side of a rank process."""

    rank: int
    nursery: Nursery
    channel: socket.socket
    files: RankFiles
    inbox: Inbox = field(default_factory=Inbox)
    outbox: memoryview = field(default_factory=lambda: memoryview(b""))
    closed: bool = False
    shown: int = 0

    @property
    def pid(self) -> int | None:
        return self.nursery.pids.get(self.rank)

    @property
    def ended(self) -> bool:
        return self.nursery.gone or self.pid in self.nursery.ended

    @property
    def exit_code(self) -> int | None:
        return None if self.pid is None else self.nursery.ended.get(self.pid)

    def write(self) -> None:
        try:
            while self.outbox:
                self.outbox = self.outbox[self.channel.send(self.outbox) :]
        except BlockingIOError:
            return
        except OSError:
            self.closed, self.outbox = True, memoryview(b"")

    def read(self) -> None:
        try:
            while data := self.channel.recv(1 << 20):
                self.inbox.feed(data)
        except BlockingIOError:
            return
        except OSError:
            pass  # A reset connection ends the stream like an orderly end does.
        self.closed = True

    def printed(self) -> str:
        """Return what the rank has printed since the last call."""
        with contextlib.suppress(FileNotFoundError), Path(self.files.log).open("rb") as log:
            log.seek(self.shown)
            data = log.read()
            self.shown += len(data)
            return data.decode(errors="replace")
        return ""


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _own_frames(stacks: str) -> str:
    """Drop the frames of the machinery that called the function."""
    machinery = (f'File "{_rank_process.__file__}"', 'File "<string>"')
    return "".join(line for line in stacks.splitlines(keepends=True) if not line.lstrip().startswith(machinery))


def _size(path: str) -> int:
    try:
        return Path(path).stat().st_size
    except FileNotFoundError:
        return 0


def tail(path: str) -> str:
    with contextlib.suppress(FileNotFoundError):
        return Path(path).read_text(errors="replace")[-_LOG_TAIL:]
    return ""


def move(
    nurseries: Sequence[Nursery], ranks: Sequence[RankHandle], done: Callable[[], bool], deadline: float
) -> None:
    """Move bytes in both directions until ``done()`` or the deadline."""
    while True:
        for nursery in nurseries:
            nursery.read()
        for rank in ranks:
            rank.read()
            rank.write()
        remaining = deadline - time.monotonic()
        if done() or remaining <= 0:
            return
        # Streams that have ended would be readable for ever.
        streams = [nursery.control for nursery in nurseries if not nursery.gone]
        streams += [rank.channel for rank in ranks if not rank.closed]
        blocked = any(rank.outbox for rank in ranks)
        connection.wait(streams, min(remaining, 0.01 if blocked else 0.25))


def stacks_of(ranks: Sequence[RankHandle]) -> dict[int, str]:
    """Make ranks that hang write their stacks; return them by rank."""
    stopped = {rank.rank for rank in ranks if rank.pid is not None and _is_stopped(rank.pid)}
    sizes = {rank.rank: _size(rank.files.stacks) for rank in ranks}
    for rank in ranks:
        if rank.pid is not None:
            rank.nursery.signal(rank.pid, DUMP_SIGNAL)
            rank.nursery.signal(rank.pid, signal.SIGCONT)
    deadline = time.monotonic() + (_STACKS_S if ranks else 0.0)
    before: dict[int, int] = {}
    while time.monotonic() < deadline:
        now = {rank.rank: _size(rank.files.stacks) for rank in ranks}
        # The fault handler says nothing when it is done, so "grown, and not growing any more" has to do.
        if now == before and all(now[rank] > sizes[rank] for rank in now):
            break
        before = now
        time.sleep(0.05)
    texts: dict[int, str] = {}
    for rank in ranks:
        head = "it was stopped by a signal; its stacks after SIGCONT:\n" if rank.rank in stopped else ""
        with contextlib.suppress(FileNotFoundError):
            text = _own_frames(Path(rank.files.stacks).read_text(errors="replace")[sizes[rank.rank] :])
            texts[rank.rank] = head + (text or "it did not react to the signal that makes it print its stacks")
    return texts
