"""Ranks for tests: a pool of processes that lives for the whole test session, and threads as a faster twin.

A test gives the pool a module-level function and says which ranks run it::

    def exchange(group: ProcessGroup, seed: int) -> int: ...

    def test_exchange(ranks: RankPool) -> None:
        assert ranks.run(exchange, 7, ranks=4) == [0, 1, 2, 3]  # ranks 0 to 3
        assert ranks.run(exchange, 7, ranks=(0, 2, 5)) == [0, 1, 2]  # neither WORLD nor consecutive

Every rank calls ``function(group, *arguments)`` with a torch process group of exactly those ranks. `RankPool.run`
raises if any rank did anything but return; `RankPool.run_outcomes` returns what each rank did, for tests in which a
rank raises, exits, hangs or is killed. Either way nothing outlives its deadline: a rank that does is made to print
its stacks, and the whole pool is killed and started afresh by the next run.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from comm_core.errors import ArgumentTypeError, ArgumentValueError, ClosedError
from comm_core.group import Group, thread_groups
from comm_core.testing._outcome import Outcome, RankError, RankTimeoutError, raise_unless_values
from comm_core.testing._processes import KILL_S, Answer, Nursery, RankHandle, move, stacks_of, tail
from comm_core.testing._rank_process import GroupKey, RankFiles, Run
from comm_core.testing._wire import FunctionRef, frame, unpack_exception

__all__ = [
    "Environment",
    "FunctionRef",
    "Outcome",
    "RankError",
    "RankPool",
    "RankTimeoutError",
    "on_threads",
    "run_threads",
    "run_threads_outcomes",
]

T = TypeVar("T")
Environment = Mapping[str, "str | None"]

# How long `run` waits for the others once a rank has failed: long enough for their own errors to arrive, which often
# tell more, and short enough not to sit through a collective that nobody will complete.
_GRACE_S = 3.0


class RankPool:
    """Persistent rank processes with one WORLD group, for tests.

    Use it on one thread, the main one: the kernel kills the processes when the thread that started them ends. Ranks
    start at the first run. A run that leaves its ranks in doubt (one died, hung, or failed while others succeeded)
    marks the pool broken, and the next run starts fresh processes.

    Args:
        size: ranks of WORLD.
        backend: torch.distributed backend of WORLD and of every group, for example ``"gloo"`` or
            ``"cpu:gloo,cuda:nccl"``; with NCCL each rank's current device is its rank modulo the number of devices.
        start_timeout_s: deadline in seconds for starting the ranks, and for each new group.
        group_timeout_s: torch.distributed's own timeout of a collective in seconds.
        nurseries: processes that import torch and fork the ranks. Ranks of different ones have different hash seeds;
            `size` of them gives each rank an interpreter of its own.
        preload: modules that every rank needs, imported once.
        store: who serves the key-value store: ``"pool"`` (this process, as a launcher with an agent does: it survives
            every rank) or ``"rank0"`` (as after ``init_process_group("tcp://…")``: it dies with rank 0).
        strict_warnings: make a warning in a rank an error.
    """

    def __init__(
        self,
        size: int,
        *,
        backend: str = "gloo",
        start_timeout_s: float = 120.0,
        group_timeout_s: float = 30.0,
        nurseries: int = 2,
        preload: Sequence[str] = (),
        store: Literal["pool", "rank0"] = "pool",
        strict_warnings: bool = True,
    ) -> None:
        if size < 1 or nurseries < 1:
            raise ArgumentValueError(f"a pool needs at least one rank and one nursery, got {size} and {nurseries}")
        self.size = size
        self.backend = backend
        self.starts = 0
        """How often the ranks have been started."""
        self._start_timeout_s = start_timeout_s
        self._group_timeout_s = group_timeout_s
        self._nursery_count = min(nurseries, size)
        self._preload = tuple(preload)
        self._store_at = store
        self._strict_warnings = strict_warnings
        self._folder: Path | None = None
        self._nurseries: list[Nursery] = []
        self._ranks: list[RankHandle] = []
        self._groups: dict[tuple[int, ...], GroupKey] = {}
        self._group_number = 0
        self._store: Any = None
        self._closed = False

    def __repr__(self) -> str:
        """Return the size and state."""
        state = "closed" if self._closed else "running" if self._ranks else "not running"
        return f"RankPool(size={self.size}, backend={self.backend!r}, {state}, starts={self.starts})"

    def __enter__(self) -> RankPool:
        """Return the pool."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pool."""
        self.close()

    def __del__(self) -> None:
        """Warn where the pool was never closed; its processes end with their sockets."""
        if getattr(self, "_nurseries", None):
            warnings.warn(f"{self!r} was not closed", ResourceWarning, stacklevel=1, source=self)

    @property
    def running(self) -> bool:
        """Whether there are processes that the next run would use."""
        return bool(self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, empty while none are running."""
        return [rank.pid for rank in self._ranks if rank.pid is not None]

    def run(
        self,
        function: Callable[..., T],
        *arguments: Any,
        ranks: int | Sequence[int] | None = None,
        timeout_s: float = 30.0,
        env: Environment | None = None,
        rank_env: Mapping[int, Environment] | None = None,
        fresh: bool = False,
        keep: bool = False,
    ) -> list[T]:
        """Call ``function(group, *arguments)`` on each of `ranks` and return their results in rank order.

        Args:
            function: module-level function; it gets a torch process group of exactly those ranks.
            arguments: anything that can be pickled (for a function use `FunctionRef.of`).
            ranks: ascending ranks of WORLD, or a number for the first that many; None is all.
            timeout_s: hard deadline in seconds. After the first failure the others get at most three more.
            env: variables that are set (or with None removed) on every rank for this call. Ranks see this process's
                ``COMM_*`` variables as they are now, and its other ones as they were when the ranks were started.
            rank_env: further ones for single group ranks.
            fresh: make a process group for this call alone, for a function that destroys or spoils its group.
            keep: don't restart the ranks although some failed. They must all have answered; the group is not reused.

        Raises:
            RankError: a rank raised or died. Its cause is the first exception.
            RankTimeoutError: ranks were still busy at the deadline; the text has their stacks.
        """
        outcomes = self._run(function, arguments, ranks, timeout_s, env, rank_env, fresh, keep, _GRACE_S)
        raise_unless_values(str(FunctionRef.of(function)), outcomes)
        return [outcome.value for outcome in outcomes]

    def run_outcomes(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        ranks: int | Sequence[int] | None = None,
        timeout_s: float = 30.0,
        env: Environment | None = None,
        rank_env: Mapping[int, Environment] | None = None,
        fresh: bool = False,
        keep: bool = False,
    ) -> list[Outcome]:
        """As `run`, but return what each rank did, in rank order, and give all of them the whole time."""
        return self._run(function, arguments, ranks, timeout_s, env, rank_env, fresh, keep, None)

    def start(self) -> None:
        """Start the ranks now, unless they are running. `run` does it by itself.

        Raises:
            RankError: they could not be started; the text has what they printed.
        """
        if self._closed:
            raise ClosedError(f"{self!r} was used after close()")
        if self._ranks:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RankError("ranks must be started on the main thread: they are killed when their starter ends")
        self.starts += 1
        deadline = time.monotonic() + self._start_timeout_s
        try:
            self._fork_all(deadline)
            port = self._serve_store(deadline)
            self._require(
                "start",
                deadline,
                {
                    rank.rank: ("init", rank.rank, self.size, self.backend, port, self._group_timeout_s)
                    for rank in self._ranks
                },
            )
        except BaseException:
            self.kill()
            self._end_nurseries()
            raise

    def kill(self) -> None:
        """Kill the ranks, and everything they started. The next run starts new ones.

        Raises:
            RankError: a process could not be killed.
        """
        ranks, self._ranks = self._ranks, []
        self._groups.clear()
        for rank in ranks:
            if rank.pid is not None:
                rank.nursery.signal(rank.pid, signal.SIGKILL)
        self._wait_for_end(ranks, time.monotonic() + KILL_S)
        for rank in ranks:
            rank.channel.close()
        self._store = None
        left = [rank.rank for rank in ranks if not rank.ended]
        if left or any(nursery.gone for nursery in self._nurseries):
            self._end_nurseries()
        if left:
            raise RankError(f"ranks {left} did not end within {KILL_S:g} s of SIGKILL")

    def close(self, timeout_s: float = 20.0) -> None:
        """Let the ranks end by themselves, and kill what has not ended in `timeout_s` seconds. May be called again.

        Raises:
            RankError: a rank had to be killed, or ended in another way than by leaving its main function: something
                that a test left behind keeps a process from ending.
        """
        self._closed = True
        ranks = list(self._ranks)
        try:
            for rank in ranks:
                rank.outbox = memoryview(frame(("stop",)))
                rank.write()
            self._wait_for_end(ranks, time.monotonic() + timeout_s)
            late = [rank for rank in ranks if not rank.ended]
            stacks = stacks_of(late)
            outcomes = [
                Outcome(rank.rank, "timeout", text=stacks[rank.rank])
                if rank in late
                else Outcome(rank.rank, "died", exit_code=rank.exit_code, text=rank.printed())
                for rank in ranks
            ]
        finally:
            self.kill()
            self._end_nurseries()
        bad = [outcome for outcome in outcomes if outcome.exit_code != 0]
        if bad:
            raise RankError("ranks did not end in order when the pool was closed", bad)

    def _run(
        self,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        ranks: int | Sequence[int] | None,
        timeout_s: float,
        env: Environment | None,
        rank_env: Mapping[int, Environment] | None,
        fresh: bool,
        keep: bool,
        grace_s: float | None,
    ) -> list[Outcome]:
        members = self._members(ranks)
        reference = FunctionRef.of(function)
        packed = pickle.dumps(arguments)
        own = {name: value for name, value in os.environ.items() if name.startswith("COMM_")}
        environments = [{**own, **(env or {}), **(rank_env or {}).get(index, {})} for index in range(len(members))]
        key = self._ready(members, fresh)
        try:
            messages = {
                rank: ("run", Run(key, reference, packed, environment, self._strict_warnings))
                for rank, environment in zip(members, environments, strict=True)
            }
            answers = self._converse(messages, time.monotonic() + timeout_s, grace_s)
            busy = [self._ranks[rank] for rank in members if not answers[rank].died and answers[rank].reply is None]
            stacks = stacks_of(busy)
            outcomes = [
                self._outcome(index, self._ranks[rank], answers[rank], stacks) for index, rank in enumerate(members)
            ]
            self._settle(key, outcomes, fresh, keep)
        except BaseException as error:
            # An interrupt or the deadline of the test itself: the ranks are in the middle of something.
            self._print_logs(members)
            if not isinstance(error, RankError):
                for rank, text in stacks_of([self._ranks[rank] for rank in members if self._ranks]).items():
                    print(f"[rank {rank}] stacks when {type(error).__name__} interrupted the run:\n{text}")
            self.kill()
            raise
        return outcomes

    def _ready(self, members: tuple[int, ...], fresh: bool) -> GroupKey:
        """Start the ranks where they don't run, and return a group of `members`.

        Making a group is torch's part and no test's subject. Once in some ten thousand groups gloo's constructor does
        not return on one rank; then the ranks are started afresh, once.
        """
        for attempt in range(2):
            self.start()
            try:
                return self._group(members, fresh)
            except BaseException as error:
                self._print_logs(range(self.size))
                self.kill()
                if attempt or not isinstance(error, RankError):
                    raise
                print(f"starting the ranks afresh, because torch made no group of {members}: {error}")
        raise AssertionError("unreachable")

    def _members(self, ranks: int | Sequence[int] | None) -> tuple[int, ...]:
        if isinstance(ranks, bool):
            raise ArgumentTypeError(f"ranks must be a number or ranks of WORLD, got {ranks!r}")
        count = self.size if ranks is None else ranks
        members = tuple(range(count)) if isinstance(count, int) else tuple(count)
        if not members or not all(0 <= rank < self.size for rank in members):
            raise ArgumentValueError(f"ranks must be in [0, {self.size}) and at least one, got {ranks!r}")
        if list(members) != sorted(set(members)):
            raise ArgumentValueError(
                f"ranks must be ascending and different, got {ranks!r}: torch.distributed sorts the ranks of a "
                "group, so another order would not be the group's order"
            )
        return members

    def _group(self, members: tuple[int, ...], fresh: bool) -> GroupKey:
        key = None if fresh else self._groups.get(members)
        if key is None:
            self._group_number += 1
            key = (self._group_number, members)
            # torch wants every rank of WORLD to take part in making a group, also those that won't be in it.
            self._require_all(("group", key))
            if not fresh:
                self._groups[members] = key
        return key

    def _settle(self, key: GroupKey, outcomes: Sequence[Outcome], fresh: bool, keep: bool) -> None:
        """Decide what can be used again after a run."""
        members = key[1]
        self._print_logs(members)
        kinds = {outcome.kind for outcome in outcomes}
        dead = any(rank.ended or rank.closed for rank in self._ranks)
        if dead or kinds & {"died", "timeout"} or (len(kinds) > 1 and not keep):
            self.kill()
        elif fresh or kinds != {"value"}:
            # Ranks that raised may have left the group at different points of a protocol.
            if not fresh:
                del self._groups[members]
            self._require_all(("drop", key))

    def _fork_all(self, deadline: float) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="comm-ranks-"))
        if not self._nurseries:
            self._nurseries = [Nursery(i, self._folder, self._preload) for i in range(self._nursery_count)]
        if self._store_at == "pool":
            # Here, where the nurseries import it at the same time.
            importlib.import_module("torch.distributed")
        for index in range(self.size):
            nursery = self._nurseries[index % len(self._nurseries)]
            stem = self._folder / f"start{self.starts}-rank{index}"
            near, far = socket.socketpair()
            near.setblocking(False)
            rank = RankHandle(index, nursery, near, RankFiles(f"{stem}.log", f"{stem}.stacks"))
            nursery.pids.pop(index, None)
            self._ranks.append(rank)
            with far, contextlib.suppress(OSError):  # A nursery that is gone is reported below, with its log.
                nursery.fork(index, rank.files, far)
        move(
            self._nurseries,
            self._ranks,
            lambda: all(rank.pid is not None or rank.nursery.gone for rank in self._ranks),
            deadline,
        )
        for nursery in self._nurseries:
            if nursery.gone or nursery.threads is None:
                text = tail(str(nursery.log))
                raise RankError(f"the process that starts ranks failed or took too long:\n{text}")
            if nursery.threads != 1:
                raise RankError(
                    f"the process that starts ranks has {nursery.threads} threads and can't fork safely: a module in "
                    f"preload={self._preload!r} starts threads when it is imported"
                )

    def _serve_store(self, deadline: float) -> int:
        if self._store_at == "rank0":
            return self._require("serve the store", deadline, {0: ("store",)})[0]
        dist: Any = importlib.import_module("torch.distributed")
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return self._store.port

    def _require_all(self, message: tuple[Any, ...]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        self._require(message[0], deadline, dict.fromkeys(range(self.size), message))

    def _require(self, what: str, deadline: float, messages: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        answers = self._converse(messages, deadline, _GRACE_S)
        stacks = stacks_of([self._ranks[rank] for rank, answer in answers.items() if answer == Answer()])
        outcomes = [self._outcome(rank, self._ranks[rank], answer, stacks) for rank, answer in answers.items()]
        raise_unless_values(f"ranks, step {what!r}", outcomes)
        return [outcome.value for outcome in outcomes]

    def _converse(
        self, messages: Mapping[int, tuple[Any, ...]], deadline: float, grace_s: float | None
    ) -> dict[int, Answer]:
        """Send a message to each of some ranks; return what came back by the deadline, in the order of `messages`."""
        ranks = [self._ranks[rank] for rank in messages]
        for rank in ranks:
            rank.outbox = memoryview(frame(messages[rank.rank]))
            rank.write()
        answers: dict[int, Answer] = {}
        limit = deadline

        def complete() -> bool:
            nonlocal limit
            for rank in ranks:
                if rank.rank in answers:
                    continue
                # In this order: a rank that answered and then ended has answered.
                ended = rank.ended
                rank.read()
                reply = rank.inbox.pop()
                if reply is not None:
                    answers[rank.rank] = Answer(reply)
                elif ended:
                    answers[rank.rank] = Answer(died=True, exit_code=rank.exit_code)
                else:
                    continue
                if grace_s is not None and (reply is None or reply[0] != "value"):
                    limit = min(limit, time.monotonic() + grace_s)
            return len(answers) == len(ranks) or time.monotonic() >= limit

        move(self._nurseries, self._ranks, complete, deadline)
        return {rank: answers.get(rank, Answer()) for rank in messages}

    def _wait_for_end(self, ranks: Sequence[RankHandle], deadline: float) -> None:
        move(self._nurseries, ranks, lambda: all(rank.ended or rank.pid is None for rank in ranks), deadline)

    def _outcome(self, index: int, rank: RankHandle, answer: Answer, stacks: Mapping[int, str]) -> Outcome:
        if answer.died:
            text = tail(rank.files.stacks) + tail(rank.files.log)
            return Outcome(index, "died", exit_code=answer.exit_code, text=text)
        if answer.reply is None:
            return Outcome(index, "timeout", text=stacks.get(rank.rank, ""))
        kind, payload, *rest = answer.reply
        if kind == "exception":
            text, seconds = rest
            return Outcome(index, "exception", exception=unpack_exception(payload), text=text, seconds=seconds)
        if not rest:
            return Outcome(index, "value", payload)
        try:
            return Outcome(index, "value", pickle.loads(payload), seconds=rest[1])
        except Exception as error:
            return Outcome(index, "exception", exception=error, text="its result can't be read here")

    def _print_logs(self, members: Sequence[int]) -> None:
        """Show what ranks printed as this process's own output, so that the test runner shows it with the test."""
        for rank in self._ranks:
            if rank.rank in members:
                for line in rank.printed().splitlines():
                    print(f"[rank {rank.rank}] {line}")

    def _end_nurseries(self) -> None:
        nurseries, self._nurseries = self._nurseries, []
        for nursery in nurseries:
            nursery.end()
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None


def run_threads(
    members: int | Sequence[Group],
    function: Callable[..., T],
    *arguments: Any,
    timeout_s: float = 20.0,
    group_timeout_s: float = 10.0,
) -> list[T]:
    """Call ``function(group, *arguments)`` on `size` threads of this process; return their results in rank order.

    The fast twin of a pool, for what needs only a `comm_core.group.Group` and no torch process group.

    Args:
        members: number of ranks, or the group of each.
        function: anything callable; it gets its rank's group.
        arguments: passed to every thread as they are (not copied).
        timeout_s: deadline in seconds. A thread can't be killed: one that hangs stays until the process ends.
        group_timeout_s: default deadline of the group's gathers.

    Raises:
        RankError: a rank raised. Its cause is the first exception.
        RankTimeoutError: ranks were still busy at the deadline; the text has their stacks.
    """
    outcomes = run_threads_outcomes(
        members, function, *arguments, timeout_s=timeout_s, group_timeout_s=group_timeout_s
    )
    raise_unless_values(getattr(function, "__qualname__", repr(function)), outcomes)
    return [outcome.value for outcome in outcomes]


def run_threads_outcomes(
    members: int | Sequence[Group],
    function: Callable[..., Any],
    *arguments: Any,
    timeout_s: float = 20.0,
    group_timeout_s: float = 10.0,
) -> list[Outcome]:
    """As `run_threads`, but return what each rank did, in rank order."""
    outcomes: dict[int, Outcome] = {}

    def call(rank: int, group: Group) -> None:
        started = time.monotonic()
        try:
            outcome = Outcome(rank, "value", function(group, *arguments))
        except BaseException as error:
            outcome = Outcome(rank, "exception", exception=error, text=traceback.format_exc())
        outcomes[rank] = replace(outcome, seconds=time.monotonic() - started)

    groups = thread_groups(members, timeout_s=group_timeout_s) if isinstance(members, int) else members
    threads = [
        threading.Thread(target=call, args=(rank, group), name=f"rank {rank}", daemon=True)
        for rank, group in enumerate(groups)
    ]
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    for rank, thread in enumerate(threads):
        if rank not in outcomes and thread.ident in frames:
            text = "".join(traceback.format_stack(frames[thread.ident]))
            outcomes[rank] = Outcome(rank, "timeout", text=text)
    return [outcomes[rank] for rank in range(len(groups))]


def on_threads(members: int | Sequence[Group], function: Callable[[Any], Any]) -> list[Any]:
    """Call ``function(group)`` on threads; return each rank's value, or the exception that came out of it.

    Raises:
        RankTimeoutError: ranks were still busy at the deadline.
    """
    outcomes = run_threads_outcomes(members, function)
    hung = [outcome for outcome in outcomes if outcome.kind == "timeout"]
    if hung:
        raise_unless_values(getattr(function, "__qualname__", repr(function)), hung)
    return [outcome.value if outcome.kind == "value" else outcome.exception for outcome in outcomes]
