"""Starts rank processes and sees to it that they end: a hard deadline, no orphans, and a clear word on who failed.

Each rank is a process of its own. It gets what it needs as JSON on its command line, tells its progress and its
result as lines of JSON through a pipe, and everything that it prints is kept for the error message. Rank 0 serves the
key-value store on a port of the system's choice and says which; nobody has to guess a free one.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, cast

from comm_core._json import Json, JsonObject
from comm_core.errors import CommError

__all__ = ["Event", "Member", "RanksError", "run_ranks"]

Event = Mapping[str, Any]

_PR_SET_PDEATHSIG = 1
_KEEP = 4000
# A rank that loses another one says which, after it has compared notes with the rest; that takes 3 seconds.
_GRACE_S = 6.0
_KILL_S = 10.0


class RanksError(CommError, RuntimeError):
    """A rank died, failed, or was not done in time; the text says which and what is known of it."""


@dataclass
class _Rank:
    """A rank process, seen from the one that started it."""

    number: int
    process: subprocess.Popen[bytes]
    events: IO[bytes]
    output: IO[bytes]
    open: int = 2
    buffer: bytes = b""
    printed: bytes = b""
    at: str = "starting"
    result: Json = None
    done: bool = False
    error: str | None = None
    failed_at: float = float("inf")

    @property
    def ended(self) -> bool:
        return self.open == 0 and self.process.poll() is not None

    @property
    def failed(self) -> bool:
        return self.error is not None or (self.ended and (not self.done or self.process.returncode != 0))

    def story(self) -> str:
        """Return what is known of its end, in words."""
        if self.error is not None:
            return f"rank {self.number}: {self.error}"
        code = self.process.poll()
        if code is None:
            return f"rank {self.number} was not done, it was at: {self.at}"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        words = self.printed.decode(errors="replace").strip()
        tail = f"; the last that it printed: {' | '.join(words.splitlines()[-3:])}" if words else ""
        return f"rank {self.number} {how} while it was at: {self.at}{tail}"


def run_ranks(
    command: Sequence[str],
    size: int,
    arguments: JsonObject,
    *,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    on_event: Callable[[int, Event], None] | None = None,
) -> list[Json]:
    """Run `size` ranks to their end and return their results in rank order.

    Args:
        command: of a rank process, which calls `Member.run`; its own arguments are appended.
        size: number of ranks.
        arguments: for every rank; JSON.
        timeout_s: seconds that everything may take, starting included.
        environment: variables to add to this process's.
        on_event: is called with rank and event for every event that a rank tells.

    Raises:
        RanksError: a rank failed, died or was not done in time. Every rank has ended by then.
    """
    deadline = time.monotonic() + timeout_s
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as cleanup:
        cleanup.callback(_end, ranks)
        selector = cleanup.enter_context(selectors.DefaultSelector())
        for number in range(size):
            rank = _start(command, number, size, arguments, {**os.environ, **(environment or {})})
            ranks.append(rank)
            for stream in (rank.events, rank.output):
                os.set_blocking(stream.fileno(), False)
                selector.register(stream, selectors.EVENT_READ, (rank, stream))
        _listen(ranks, selector, deadline, on_event or (lambda rank, event: None))
        failed = [rank for rank in ranks if rank.failed]
        if failed or not all(rank.ended for rank in ranks):
            raise RanksError(_verdict(ranks, failed, timeout_s))
    return [rank.result for rank in ranks]


def _verdict(ranks: Sequence[_Rank], failed: Sequence[_Rank], timeout_s: float) -> str:
    """Return the story: all that died without a word, and the first that said something.

    What the others say is mostly a consequence of it: they miss a rank.
    """
    if not failed:
        late = [rank for rank in ranks if not rank.ended]
        return "\n  ".join([f"not done within {timeout_s:g} s", *(rank.story() for rank in late)])
    silent = [rank for rank in failed if rank.error is None]
    spoke = sorted((rank for rank in failed if rank.error is not None), key=lambda rank: rank.failed_at)
    stories = [rank.story() for rank in (*silent, *spoke[:1])]
    others = sorted(rank.number for rank in spoke[1:])
    if others:
        stories.append(f"after that, rank{'s' * (len(others) > 1)} {', '.join(map(str, others))} failed as well")
    return "\n  ".join(stories)


def _start(
    command: Sequence[str], number: int, size: int, arguments: JsonObject, environment: Mapping[str, str]
) -> _Rank:
    read, write = os.pipe()
    spec = {"rank": number, "size": size, "events": write, "parent": os.getpid(), "arguments": arguments}
    try:
        process = subprocess.Popen(
            [*command, json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[write],
            env=environment,
            # Ctrl-C at the terminal is for this process, which then ends them.
            start_new_session=True,
        )
    except OSError:
        os.close(read)
        raise
    finally:
        os.close(write)
    return _Rank(number, process, os.fdopen(read, "rb"), cast("IO[bytes]", process.stdout))


def _listen(
    ranks: Sequence[_Rank],
    selector: selectors.BaseSelector,
    deadline: float,
    on_event: Callable[[int, Event], None],
) -> None:
    """Take in what the ranks say until all have ended, or one has failed and the others had time to say so too."""
    while not all(rank.ended for rank in ranks):
        if any(rank.failed for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return
        # A pipe ends a moment before its process does, so there may be nothing to select on.
        for key, _ in selector.select(min(remaining, 0.2)) if selector.get_map() else ():
            rank, stream = key.data
            data = stream.read(1 << 16)
            if not data:
                selector.unregister(stream)
                rank.open -= 1
            elif stream is rank.output:
                rank.printed = (rank.printed + data)[-_KEEP:]
            else:
                *lines, rank.buffer = (rank.buffer + data).split(b"\n")
                for line in lines:
                    _take(ranks, rank, json.loads(line), on_event)
        if not selector.get_map():
            time.sleep(0.01)


def _take(ranks: Sequence[_Rank], rank: _Rank, event: Event, on_event: Callable[[int, Event], None]) -> None:
    kind = event["event"]
    if kind == "store":
        for other in ranks:
            if other is not rank:
                _send(other, str(event["port"]))
    elif kind == "result":
        rank.result, rank.done = event["value"], True
    elif kind == "error":
        rank.error, rank.failed_at = str(event["text"]), time.monotonic()
    else:
        rank.at = str(event.get("at", rank.at))
        on_event(rank.number, event)


def _send(rank: _Rank, line: str) -> None:
    # One that is gone already is noticed by its exit code.
    with contextlib.suppress(OSError):
        pipe = cast("IO[bytes]", rank.process.stdin)
        pipe.write(line.encode() + b"\n")
        pipe.flush()


def _end(ranks: Sequence[_Rank]) -> None:
    """End every rank, and whatever it has started."""
    for rank in ranks:
        if rank.process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.process.pid, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait(_KILL_S)
        for stream in (rank.events, rank.output, cast("IO[bytes]", rank.process.stdin)):
            with contextlib.suppress(OSError):
                stream.close()


@dataclass
class Member:
    """This process as one of the ranks.

    Attributes:
        rank: of this process.
        size: number of ranks.
        arguments: as given to `run_ranks`.
    """

    rank: int
    size: int
    arguments: Mapping[str, Any]
    _events: IO[str] = field(repr=False)

    @classmethod
    def run(cls, main: Callable[[Member], Json], spec: str) -> None:
        """Run ``main`` as a rank and end the process: 0 if it returned, 1 if it raised.

        Args:
            main: gets this member, returns the rank's result.
            spec: the last argument of the command line.
        """
        values = json.loads(spec)
        _die_with(values["parent"])
        # Line by line, because a rank that dies must have said where it was.
        events = os.fdopen(values["events"], "w", buffering=1)
        member = cls(values["rank"], values["size"], values["arguments"], events)
        code = 0
        try:
            member.tell("result", value=main(member))
        except Exception as error:
            text = str(error) if isinstance(error, CommError) else "".join(traceback.format_exception(error)).strip()
            member.tell("error", text=text)
            code = 1
        for stream in (sys.stdout, sys.stderr, events):
            with contextlib.suppress(OSError):
                stream.flush()
        # Not sys.exit: after a failure a library's threads may never let the interpreter finish.
        os._exit(code)

    def tell(self, event: str, **values: Json) -> None:
        """Tell the starting process something; ``at=`` says what this rank is doing."""
        self._events.write(json.dumps({"event": event, **values}) + "\n")

    def store(self, timeout_s: float) -> Any:
        """Return torch's key-value store of these ranks, served by rank 0. Collective."""
        import importlib
        from datetime import timedelta

        # torch's annotations of it are partial.
        distributed: Any = importlib.import_module("torch.distributed")
        timeout = timedelta(seconds=timeout_s)
        if self.rank == 0:
            store = distributed.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
            self.tell("store", port=store.port)
            return store
        line = sys.stdin.readline()
        if not line.strip():
            raise CommError("rank 0 was gone before it served the store")
        return distributed.TCPStore("127.0.0.1", int(line), None, False, timeout)


def _die_with(parent: int) -> None:
    """Let the kernel end this process when the one that started it ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)  # It was gone before the kernel knew.
