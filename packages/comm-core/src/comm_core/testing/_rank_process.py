"""The far side of a rank pool: the nursery, which imports torch once and forks ranks, and the loop of a rank.

Importing torch costs more than a second of one core, so eight ranks that import it each take seconds to start. A
nursery imports it once, stays single-threaded and touches no device, and forks a rank in milliseconds: a test that
breaks its ranks costs little. Ranks of one nursery share its hash seed, which would hide a decision that depends on
the order of a set; a pool therefore has two nurseries with different seeds and deals the ranks out between them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import select
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from comm_core.testing._wire import FunctionRef, Inbox, frame, pack_exception

__all__ = ["DUMP_SIGNAL", "MAX_PACKET", "GroupKey", "RankFiles", "Run", "nursery_main"]

DUMP_SIGNAL = signal.SIGUSR2
"""Makes a rank write the Python stacks of all its threads to its file, even where it hangs in C."""

MAX_PACKET = 1 << 16
_PR_SET_PDEATHSIG = 1

GroupKey = tuple[int, tuple[int, ...]]
"""A process group of the pool: a number that makes it unique, and its ranks."""


@dataclass(frozen=True)
class RankFiles:
    """Where a rank writes: everything it prints, and its stacks."""

    log: str
    stacks: str


@dataclass(frozen=True)
class Run:
    """One function call on the members of a group.

    `arguments` is pickled apart, because it can only be read once the module of `function` has been loaded.
    """

    key: GroupKey
    function: FunctionRef
    arguments: bytes
    environment: Mapping[str, str | None]
    strict_warnings: bool


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        os._exit(1)  # The parent was gone before the kernel knew.


def nursery_main(descriptor: int, parent: int, preload: tuple[str, ...]) -> None:
    """Run a nursery: fork a rank for each request, pass on signals, report who ended and how.

    Requests and reports are packets on the socket `descriptor`. Signals go through here, because this process alone
    knows whether a process id still belongs to the rank that had it. In a forked rank this function returns when the
    rank is done, so that the interpreter ends there as it does in any program.
    """
    _die_with_parent(parent)
    for name in ("torch", "torch.distributed", *preload):
        importlib.import_module(name)
    # A later collection in a rank, one after each run, then looks at the rank's own objects only.
    gc.collect()
    gc.freeze()
    control = socket.socket(fileno=descriptor)
    wake_read, wake_write = socket.socketpair()
    for end in (wake_read, wake_write):
        end.setblocking(False)
    signal.set_wakeup_fd(wake_write.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, _wake)
    children: set[int] = set()
    control.send(pickle.dumps(("ready", len(list(Path("/proc/self/task").iterdir())))))
    while True:
        readable, _, _ = select.select([control, wake_read], [], [])
        if wake_read in readable:
            with contextlib.suppress(BlockingIOError):
                wake_read.recv(4096)
            _report_ended(control, children)
        if control not in readable:
            continue
        packet, descriptors, _, _ = socket.recv_fds(control, MAX_PACKET, 1)
        if not packet:
            return
        match pickle.loads(packet):
            case ("fork", token, files):
                nursery = os.getpid()
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for end in (control, wake_read, wake_write):
                        end.close()
                    _rank_main(socket.socket(fileno=descriptors[0]), nursery, files)
                    return
                os.close(descriptors[0])
                children.add(pid)
                control.send(pickle.dumps(("forked", token, pid)))
            case ("signal", pid, number):
                if pid in children:
                    _send_signal(pid, number)
            case unknown:
                raise RuntimeError(f"unknown request {unknown!r}")


def _wake(number: int, interrupted: object) -> None:
    """Do nothing: a handler has to exist for the wake-up descriptor to be written."""


def _report_ended(control: socket.socket, children: set[int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        children.discard(pid)
        control.send(pickle.dumps(("ended", pid, os.waitstatus_to_exitcode(status))))


def _send_signal(pid: int, number: int) -> None:
    if number == signal.SIGKILL:
        # What the rank itself started goes with it. Its own group exists once it has called setsid.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
    os.kill(pid, number)


def _rank_main(channel: socket.socket, parent: int, files: RankFiles) -> None:
    os.setsid()
    _die_with_parent(parent)
    # An abort in a native library is an expected outcome here, and a core file of torch is large.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(files.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    stacks = Path(files.stacks).open("w")  # noqa: SIM115 - the fault handler writes to it until the process ends
    faulthandler.enable(file=stacks)
    faulthandler.register(DUMP_SIGNAL, file=stacks, all_threads=True, chain=False)
    _Rank(channel).serve()


class _Rank:
    """One rank: it answers the pool's requests one at a time, on the main thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        # Typed as Any: torch's annotations are partial, and only a handful of its functions are used.
        self._dist: Any = importlib.import_module("torch.distributed")
        self._groups: dict[GroupKey, Any] = {}
        self._rank = 0
        self._device: int | None = None
        self._timeout = timedelta(seconds=60)
        self._store: Any = None

    def serve(self) -> None:
        inbox = Inbox()
        while True:
            message = inbox.pop()
            if message is None:
                data = self._channel.recv(1 << 20)
                if not data:
                    return  # The pool gave this rank up without a word.
                inbox.feed(data)
                continue
            if message[0] == "stop":
                self._stop()
                return
            self._answer(message)

    def _answer(self, message: tuple[Any, ...]) -> None:
        try:
            match message:
                case ("store",):
                    reply = ("value", self._serve_store())
                case ("init", rank, size, backend, port, timeout_s):
                    reply = ("value", self._init(rank, size, backend, port, timeout_s))
                case ("group", key):
                    self._groups[key] = self._dist.new_group(list(key[1]), timeout=self._timeout)
                    reply = ("value", None)
                case ("drop", key):
                    self._drop(key)
                    reply = ("value", None)
                case ("run", Run() as run):
                    reply = self._run(run)
                case unknown:
                    raise RuntimeError(f"unknown request {unknown!r}")
        except BaseException as error:
            reply = ("exception", pack_exception(error), traceback.format_exc(), 0.0)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._channel.sendall(frame(reply))

    def _serve_store(self) -> int:
        self._store = self._dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return self._store.port

    def _init(self, rank: int, size: int, backend: str, port: int, timeout_s: float) -> None:
        torch: Any = importlib.import_module("torch")
        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
        self._rank, self._timeout = rank, timedelta(seconds=timeout_s)
        if "nccl" in backend:
            self._device = rank % torch.cuda.device_count()
            torch.cuda.set_device(self._device)
        store = self._store or self._dist.TCPStore("127.0.0.1", port, None, False, timeout=self._timeout)
        self._dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=self._timeout)

    def _drop(self, key: GroupKey) -> None:
        group = self._groups.pop(key)
        # The function that ran may have destroyed it itself; torch calls that an error.
        if group is not self._dist.GroupMember.NON_GROUP_MEMBER:
            with contextlib.suppress(ValueError, AssertionError):
                self._dist.destroy_process_group(group)

    def _stop(self) -> None:
        self._groups.clear()
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _run(self, run: Run) -> tuple[Any, ...]:
        function = run.function.resolve()
        arguments = pickle.loads(run.arguments)
        # What an earlier run that failed left behind in reference cycles must not be blamed on this one.
        gc.collect()
        started = time.monotonic()
        lost: list[str] = []
        try:
            with _surroundings(run.environment), _strict(run.strict_warnings), _uncaught(lost):
                value = function(self._groups[run.key], *arguments)
                payload = pickle.dumps(value)
                del value, arguments
                # What the function left behind is finalized now, so that its warnings belong to this run.
                gc.collect()
        except BaseException as error:
            text = "".join(traceback.format_exception(type(error), error, _inside(error)))
            return "exception", pack_exception(error), text, time.monotonic() - started
        if lost:
            text = "raised where nobody could catch it (a finalizer or a thread):\n" + "\n".join(lost)
            return "exception", pack_exception(RuntimeError(text)), text, time.monotonic() - started
        return "value", payload, "", time.monotonic() - started


def _inside(error: BaseException) -> Any:
    """Return the traceback of `error` without this file's own frames at its head."""
    head = error.__traceback__
    while head is not None and head.tb_frame.f_code.co_filename == __file__:
        head = head.tb_next
    return head


@contextlib.contextmanager
def _surroundings(changes: Mapping[str, str | None]) -> Generator[None]:
    """Apply changes to the environment; afterwards undo them and whatever the function changed itself."""
    environment, folder = dict(os.environ), Path.cwd()
    try:
        for name, value in changes.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        os.chdir(folder)


@contextlib.contextmanager
def _strict(enabled: bool) -> Generator[None]:
    """Make warnings errors, as they are in the process that runs the tests."""
    with warnings.catch_warnings():
        if enabled:
            warnings.simplefilter("error")
        yield


@contextlib.contextmanager
def _uncaught(lost: list[str]) -> Generator[None]:
    """Collect the exceptions of finalizers and threads; by default they are printed and forgotten."""

    def in_finalizer(event: Any) -> None:
        _note(lost, str(event.err_msg or event.object), event.exc_value)

    def in_thread(event: threading.ExceptHookArgs) -> None:
        _note(lost, f"thread {event.thread.name if event.thread else '?'}", event.exc_value)

    before = sys.unraisablehook, threading.excepthook
    sys.unraisablehook, threading.excepthook = in_finalizer, in_thread
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before


def _note(lost: list[str], where: str, error: BaseException | None) -> None:
    text = "".join(traceback.format_exception(error)) if error is not None else "unknown exception\n"
    lost.append(f"{where}\n{text}")
