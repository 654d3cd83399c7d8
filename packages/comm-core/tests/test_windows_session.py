"""Sessions over windows, whole, without a GPU: ranks are threads, and the module is compiled for the host.

The entry points, structs, signals and deadlines are the real ones (see
``comm_core/testing/host_windows.h``); so is everything above.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_core
from comm_core import UlyssesCommunicator, _cuda, jit, plugins
from comm_core.consensus import Transaction
from comm_core.errors import (
    ArgumentValueError,
    CommError,
    GroupTimeoutError,
    JitMissingError,
    JointError,
    JointValueError,
    PeerStalledError,
    TransportError,
    UlyssesBackendError,
    UnsupportedError,
)
from comm_core.group import Group
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.memory import in_process
from comm_core.memory.in_process import InProcessMemory
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import reference
from comm_core.testing.every_operation import every_operation
from comm_core.testing.half_closed import close_in_two
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.transport.interface import Verdict
from comm_core.ulysses import plans
from comm_core.windows import launch, session, window
from comm_core.windows.launch import WINDOWS, Calls
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import RECORD_BYTES, Operation
from comm_core.windows.transport import WindowTransport
from comm_core.windows.window import MAX_WINDOWS

CPU = torch.device("cpu")
PACKAGE = Path(comm_core.__file__).parent


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module of windows, compiled for the host and loaded as every module is."""
    folder = tmp_path_factory.mktemp("host")
    library = compile_for_host(WINDOWS, PACKAGE, HOST_WINDOWS, folder)
    return Module(WINDOWS, Artifact(WINDOWS.name, "host", library, {"archs": []}, {}))


@pytest.fixture(autouse=True)
def host(module: Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Every launch goes to one stream that runs it at once; afterwards no memory is left, and no access was bad."""
    library = ctypes.CDLL(str(module.artifact.path))
    library.host_problem.restype = ctypes.c_char_p
    library.host_copies.restype = ctypes.c_uint64
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    yield library
    assert library.host_problem() is None
    gc.collect()
    in_process._alive.clear()  # what tests with a missing rank keep


def open_session(group: Group, module: Module, **changes: Any) -> WindowSession:
    options = {"form": "in_process", "staging_bytes": 1 << 16, "timeout_s": 20.0, "blocks_per_peer": 1, **changes}
    with Transaction(group, "open transport 'host'") as stages:
        opened = WindowSession(stages, module, CPU, **options)
        stages.commit()
    return opened


# Through the front: a transport whose ranks are threads


class HostTransport(WindowTransport):
    """Windows for CPU tensors; what goes wrong on which rank can be chosen."""

    experimental = False

    def __init__(self, name: str, *, copy_engines: bool = False, priority: int = 5) -> None:
        super().__init__(name, copy_engines=copy_engines)
        self.priority = priority
        self.faults: dict[int, str] = {}

    def assess(self, request: Any, facts: Any) -> Verdict:
        return Verdict(True, "threads share everything", {"blocks_per_peer": 1})

    def open(self, stages: Any, request: Any, plan: Any, device: torch.device) -> WindowSession:
        here.rank = stages.group.rank
        here.fault = self.faults.get(stages.group.rank)
        try:
            return super().open(stages, request, plan, device)
        finally:
            here.fault = None


here = threading.local()
"""What this thread's rank is in the middle of."""


def faulty(kind: str) -> bool:
    return getattr(here, "fault", None) == kind


class FaultyCalls(Calls):
    """Delivers a wrong byte where the rank has that fault."""

    def exchange(self, *arguments: Any) -> None:
        super().exchange(*arguments)
        if faulty("wrong bytes"):
            ctypes.memset(arguments[4] + 5, 0x77, 1)


@pytest.fixture
def transports(module: Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, HostTransport]]:
    """Three transports over windows of threads, as a plugin: by stores, by copies, and a second choice."""
    made = {
        "host": HostTransport("host"),
        "host-ce": HostTransport("host-ce", copy_engines=True, priority=4),
        "second": HostTransport("second", priority=3),
    }

    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[HostTransport]:
            return list(made.values())

    def load(spec: Any, device: torch.device) -> Module:
        assert spec is WINDOWS
        if faulty("build"):
            raise JitMissingError("module 'comm_core_windows' is not built and COMM_JIT=off")
        return module

    allocate, map_, free = InProcessMemory.allocate, InProcessMemory.map, InProcessMemory.free

    def allocate_here(self: InProcessMemory, nbytes: int) -> None:
        if faulty("allocate"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(self, nbytes)

    def map_here(self: InProcessMemory, exports: Any) -> tuple[int, ...]:
        if faulty("map"):
            raise CommError("cuIpcOpenMemHandle failed with CUDA error 201: invalid device context")
        return map_(self, exports)

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(session, "Calls", FaultyCalls)
    monkeypatch.setattr(InProcessMemory, "allocate", allocate_here)

    def free_here(self: InProcessMemory) -> None:
        if faulty("free"):
            raise CommError("cudaFree failed with CUDA error 1: invalid argument")
        free(self)

    monkeypatch.setattr(InProcessMemory, "map", map_here)
    monkeypatch.setattr(InProcessMemory, "free", free_here)
    plugins.register("threads", Plugin())
    yield made
    plugins.unregister("threads")


def communicator(group: Group, backend: str, **changes: Any) -> UlyssesCommunicator:
    arguments = {"max_bytes": 1 << 16, "dtype": torch.bfloat16, "device": CPU, **changes}
    return UlyssesCommunicator(group, backend=backend, **arguments)


def operations(group: Group, backend: str, dtype: torch.dtype) -> int:
    with communicator(group, backend, dtype=dtype) as comm:
        return every_operation(comm, [(1, 3, 1, 5), (2, 4, 2, 16), (3, 2, 3, 1)], strided=lambda rank: True)


@pytest.mark.parametrize("backend", ["host", "host-ce"])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_operations_equal_their_references(
    transports: dict[str, HostTransport], host: ctypes.CDLL, backend: str, size: int
) -> None:
    """By stores and by copies, all layouts and bands, destinations that differ between ranks; and nothing stays."""
    before = host.host_copies()
    for dtype in (torch.bfloat16, torch.int8) if size < 8 else (torch.float32,):
        assert min(run_threads(size, operations, backend, dtype, timeout_s=60)) > 20
    assert (host.host_copies() > before) == (backend == "host-ce")
    assert in_process._alive == {}


def rounds(group: Group, module: Module, count: int) -> int:
    opened = open_session(group, module)
    out = torch.empty(group.size, 3, dtype=torch.int32)
    for round_ in range(count):
        opened.all_gather_small(torch.tensor([round_, group.rank, 7 * round_], dtype=torch.int32), out)
        expected = [[round_, peer, 7 * round_] for peer in range(group.size)]
        assert out.tolist() == expected
        if round_ % 5 == group.rank % 5:
            time.sleep(0.0005)
        if round_ % 3 == 0:
            opened.barrier()
    with pytest.raises(ArgumentValueError):
        opened.all_gather_small(torch.zeros((1 << 20) + 1, dtype=torch.uint8), out)
    opened.close()
    return count


def test_calls_follow_each_other_without_synchronization(module: Module) -> None:
    """G3: a rank that is ahead waits until the others' destinations are free; with ranks out of step."""
    assert run_threads(4, rounds, module, 200, timeout_s=60) == [200] * 4


# Windows


def several(group: Group, module: Module) -> tuple[list[int], list[bool]]:
    opened = open_session(group, module)
    made = [opened.window(1000), opened.window(5), opened.window(4097)]
    assert [item.number for item in made] == [2, 3, 4]
    found = [
        opened.windows.find(made[0].address, 1000) == (made[0], 0),
        opened.windows.find(made[2].address + 96, 4001) == (made[2], 96),
        # One byte too many is no destination: peers would write over the end.
        opened.windows.find(made[2].address + 96, 4002) is None,
        opened.windows.find(made[1].address - 1, 2) is None,
        all(item.peer_pointers[group.rank] == item.address == item.local.data_ptr() for item in made),
        [item.local.numel() for item in made] == [1000, 5, 4097],
    ]
    with pytest.raises(JointValueError) as caught:
        opened.window(8 if group.rank else 9)
    assert caught.value.per_rank == {rank: f"{8 if rank else 9} bytes" for rank in range(group.size)}
    with pytest.raises(JointValueError, match="at least 1 byte"):
        opened.window(0)
    numbers = [item.number for item in opened.windows]
    # The memory of a window is the ranks': what one stores there, its owner reads.
    ctypes.memset(made[0].peer_pointers[(group.rank + 1) % group.size], group.rank + 1, 10)
    opened.barrier()
    found.append(made[0].local[:10].tolist() == [(group.rank - 1) % group.size + 1] * 10)
    opened.barrier()
    opened.close()
    return numbers, found


def test_windows_are_numbered_alike_and_found_by_their_bytes(module: Module) -> None:
    for numbers, found in run_threads(3, several, module):
        assert numbers == [0, 1, 2, 3, 4] and all(found), found
    assert in_process._alive == {}


def exhausted(group: Group, module: Module) -> str:
    opened = open_session(group, module)
    for _ in range(3):
        opened.window(1)
    with pytest.raises(JointValueError) as caught:
        opened.window(1)
    opened.close()
    return str(caught.value)


def test_the_last_window_is_refused_on_every_rank(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's table has room for so many, and one more would be written behind it."""
    monkeypatch.setattr(window, "MAX_WINDOWS", 5)
    texts = run_threads(2, exhausted, module)
    assert len(set(texts)) == 1 and "all 5 windows of this session are in use" in texts[0]


def failing_window(group: Group, module: Module) -> tuple[str, int]:
    opened = open_session(group, module)
    here.fault = "allocate" if group.rank == 1 else None
    try:
        with pytest.raises(JointError) as caught:
            opened.window(1 << 12)
    finally:
        here.fault = None
    # The session goes on as if nothing had happened, on all ranks with the same numbers.
    number = opened.window(64).number
    opened.barrier()
    opened.close()
    return str(caught.value), number


def test_a_window_that_one_rank_can_not_allocate_is_nobodys(
    module: Module, transports: dict[str, HostTransport]
) -> None:
    """E6: no rank is left with a window, or with a number, that the others don't have."""
    outcomes = run_threads(3, failing_window, module)
    assert len(set(outcomes)) == 1
    assert "rank 1" in outcomes[0][0] and "out of memory" in outcomes[0][0] and outcomes[0][1] == 2
    assert in_process._alive == {}


def old_struct(group: Group, module: Module) -> bool:
    opened = open_session(group, module)
    captured = bytes(opened._packed.raw)
    plan = plans.exchange_chunks(16, 1, group.rank, group.size)
    late = opened.window(plan.target_bytes)
    sources = (torch.full((1, 1, group.size, 16), group.rank, dtype=torch.uint8),)
    if group.rank == 0:
        # As a replayed graph does, which was captured before the window was there.
        held = ctypes.create_string_buffer(captured)
        opened._session = ctypes.addressof(held)
        opened.exchange(plan, sources, torch.empty(plan.target_bytes, dtype=torch.uint8))
        result = True
    else:
        opened.exchange(plan, sources, late.local)
        result = late.local.view(group.size, 16)[:, 0].tolist() == list(range(group.size))
    opened.close()
    return result


def test_a_graph_reaches_windows_that_are_younger(module: Module) -> None:
    """A captured call keeps its struct; a peer that calls eagerly may announce a window that came later."""
    assert run_threads(3, old_struct, module) == [True] * 3


def launches(group: Group, module: Module) -> tuple[bool, bool, str]:
    """What kernels of others get before and after a window was added, and after a stall."""
    opened = open_session(group, module)
    before = opened.launch_context()[1]
    first = ctypes.string_at(before, len(opened._packed.raw)) == opened._packed.raw
    opened.window(16)
    after = opened.launch_context()[1]
    second = ctypes.string_at(after, len(opened._packed.raw)) == opened._packed.raw
    opened._record_bytes[:4] = (1).to_bytes(4, "little")
    text = ""
    try:
        opened.launch_context()
    except PeerStalledError as error:
        text = str(error)
    opened.close()
    return first, second, text


def test_kernels_of_others_get_the_sessions_struct(module: Module) -> None:
    """The struct in force, also after a window was added; and nothing after a stall."""
    for first, second, text in run_threads(2, launches, module):
        assert first and second and "gave up waiting for rank 0" in text


# Stalls


def stall(group: Group, how: str, size: int) -> Any:
    comm = communicator(group, "host", dtype=torch.float32)
    x = torch.ones(1, 4, size, 8)
    direct, plain = comm.allocate_output(x, "scatter_heads"), torch.zeros(1, 4 * size, 1, 8)
    comm.scatter_heads(x, out=direct)
    comm.scatter_heads(x, out=plain)
    if group.rank == 1:
        time.sleep(1.2)
        if how == "silent":
            comm.close(timeout=10)
            return None
    started = time.monotonic()
    comm.scatter_heads(x, out=direct)  # the kernel gives up; the host does not know yet
    seconds = time.monotonic() - started
    with pytest.raises(PeerStalledError) as caught:
        comm.scatter_heads(x, out=plain)
    with pytest.raises(TransportError, match="broken since an earlier failure"):
        comm.gather_heads(plain)
    poisoned = bool(direct.isnan().all())
    del direct
    comm.close(timeout=10)
    return caught.value.waited_for, caught.value.reporter, str(caught.value), poisoned, seconds


@pytest.mark.parametrize("how", ["silent", "late"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_that_does_not_come_is_named_by_all(
    transports: dict[str, HostTransport], monkeypatch: pytest.MonkeyPatch, how: str, size: int
) -> None:
    """F17: outputs are NaN, the late rank stores nothing and is told too, and all close and free everything."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    outcomes = run_threads(size, stall, how, size, timeout_s=60, group_timeout_s=0.5)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and how == "silent":
            assert outcome is None
            continue
        waited_for, reporter, text, poisoned, seconds = outcome
        assert waited_for == 1 and reporter != 1 and poisoned
        assert seconds < (0.3 if rank == 1 else 5)
        gave_up = f"rank {rank} gave up" if reporter == rank else f"was told that rank {reporter} gave up"
        assert gave_up in text and "waiting for rank 1" in text and "scatter_heads" in text
        assert "after 0.5 s (COMM_TIMEOUT_S)" in text and "CUDA_MODULE_LOADING=EAGER" in text
        assert "outputs are poisoned" in text
    assert in_process._alive == {}


def unpoisoned(group: Group, module: Module) -> tuple[bool, str]:
    opened = open_session(group, module, timeout_s=0.2, poison=False)
    plan = plans.exchange_chunks(8, 1, group.rank, group.size)
    out = torch.full((plan.target_bytes,), 3, dtype=torch.uint8)
    text = ""
    if group.rank:
        opened.exchange(plan, (torch.zeros(plan.target_bytes, dtype=torch.uint8),), out)
        with pytest.raises(PeerStalledError) as caught:
            opened.check()
        text = str(caught.value)
    opened.close(10)
    return bool((out == 0xFF).any()), text


def test_outputs_are_left_alone_where_that_was_asked_for(module: Module) -> None:
    """COMM_ON_STALL=status: the error is the only sign, and it says so."""
    for rank, (poisoned, text) in enumerate(run_threads(3, unpoisoned, module)):
        assert not poisoned
        assert rank == 0 or ("What the outputs hold is undefined" in text and "poisoned" not in text)


def liar(group: Group, module: Module) -> tuple[int, str]:
    opened = open_session(group, module, timeout_s=5)
    plan = plans.exchange_chunks(8, 1, group.rank, group.size)
    out = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    if group.rank == 2:
        calls: Any = opened._calls
        announce = calls.exchange

        def elsewhere(*arguments: Any) -> None:
            announce(*arguments[:5], 200, *arguments[6:])

        calls.exchange = elsewhere
    opened.exchange(plan, (torch.zeros(plan.target_bytes, dtype=torch.uint8),), out)
    with pytest.raises(PeerStalledError) as caught:
        opened.check()
    opened.close(10)
    return caught.value.waited_for, str(caught.value)


def test_memory_that_does_not_exist_is_never_written(module: Module) -> None:
    """A peer that runs another program, or another version, is named by all; nobody follows its address."""
    outcomes = run_threads(3, liar, module)
    assert {waited_for for waited_for, _ in outcomes} == {2}
    assert any("rank 2 announced memory that does not exist" in text for _, text in outcomes)


def watched(group: Group, module: Module) -> bool:
    opened = open_session(group, module, timeout_s=0.2)
    if group.rank:
        opened.barrier()
        deadline = time.monotonic() + 5
        while opened._stall is None and time.monotonic() < deadline:
            time.sleep(0.01)
    stalled = opened._stall is not None
    opened.close(10)
    return stalled


def test_the_watchdog_says_it_although_nobody_calls(module: Module, caplog: pytest.LogCaptureFixture) -> None:
    """F17: whoever replays a captured graph makes no calls; the log has it within a moment, once."""
    with caplog.at_level(logging.ERROR, logger="comm_core"):
        assert run_threads(3, watched, module) == [False, True, True]
        time.sleep(0.2)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and all("waiting for rank 0" in text and "barrier" in text for text in texts)


def torn(group: Group, module: Module) -> str:
    opened = open_session(group, module)
    record = opened._record
    assert record.numel() == RECORD_BYTES == 32
    # The device writes the state last: a record without one says nothing yet.
    record.view(torch.int32)[1:5] = torch.tensor([Operation.GATHER_HEADS, 9, 1, 0], dtype=torch.int32)
    opened.check()
    record.view(torch.int32)[0] = 1
    with pytest.raises(PeerStalledError) as caught:
        opened.check()
    assert not opened.look()
    opened._record.zero_()
    with pytest.raises(PeerStalledError):  # What happened once stays so.
        opened.barrier()
    opened.close()
    return str(caught.value)


def test_a_record_counts_when_its_state_is_there(module: Module) -> None:
    for rank, text in enumerate(run_threads(2, torn, module)):
        assert text.startswith(f"rank {rank} gave up waiting for rank 1 (operation 9 of this session, gather_heads)")


# The end


def recorded(group: Group, module: Module, log: list[tuple[int, str]]) -> None:
    opened = open_session(group, module)
    here.rank = group.rank
    opened.window(64)
    opened.window(32)
    log.append((group.rank, "close"))
    opened.close()


def test_the_device_is_waited_for_before_windows_go_and_those_before_the_signals(
    module: Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E4: nothing is freed while a kernel of the session may run; later windows go first, the signals last."""
    log: list[tuple[int, str]] = []
    real_free, synchronize = InProcessMemory.free, _cuda.synchronize

    def freed(self: InProcessMemory) -> None:
        if self.own:  # It is freed as the undoing of the export; that of the allocation then finds nothing.
            log.append((self.rank, f"free {self.nbytes}"))
        real_free(self)

    def synchronized(device: torch.device) -> None:
        log.append((getattr(here, "rank", -1), "synchronize"))
        synchronize(device)

    monkeypatch.setattr(InProcessMemory, "free", freed)
    monkeypatch.setattr(_cuda, "synchronize", synchronized)
    run_threads(2, recorded, module, log)
    for rank in range(2):
        mine = [what for who, what in log if who == rank]
        ending = mine[mine.index("close") + 1 :]
        assert ending[0] == "synchronize"
        sizes = [int(what.split()[1]) for what in ending if what.startswith("free ")]
        signals = -(-(4 + 4 * 16) * 128 // 4096) * 4096
        assert sizes == [4096, 4096, 2 << 20, 1 << 16, signals], ending


def alone(group: Group, module: Module) -> Any:
    opened = open_session(group, module, timeout_s=0.3)
    opened.window(5000)
    opened.window(100)
    if group.rank == 1:
        opened._teardown.abandon()
        for teardown in opened.windows._teardowns:
            teardown.abandon()
        return None
    started = time.monotonic()
    with pytest.raises(GroupTimeoutError) as caught:
        opened.close(0.5)
    assert opened.windows._teardowns == []
    seconds = time.monotonic() - started
    numbers = [int(number) for number in re.findall(r"(\d+) bytes", str(caught.value))]
    return caught.value.missing, sum(numbers), seconds


def test_closing_alone_ends_in_time_and_keeps_what_a_peer_may_write(module: Module) -> None:
    """F17, E4: nothing is freed, nothing is forgotten, the error counts all of it, and no finalizer complains."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)
        outcomes = run_threads(2, alone, module, timeout_s=30)
        gc.collect()
    missing, kept, seconds = outcomes[0]
    assert missing == (1,) and seconds < 2
    signals = -(-(4 + 4 * 16) * 128 // 4096) * 4096
    assert kept == signals + (1 << 16) + (2 << 20) + 2 * 4096 + 4096
    assert len(in_process._alive) == 10  # of both ranks


def test_closing_twice_and_a_session_nobody_closed(module: Module) -> None:
    """A second close finds nothing to do; a session that is dropped warns, and its memory stays."""

    def twice(group: Group) -> bool:
        opened = open_session(group, module)
        opened.close()
        opened.close()
        return not opened.look()

    assert run_threads(2, twice) == [True, True]

    def dropped(group: Group) -> None:
        open_session(group, module)

    run_threads(2, dropped)
    with pytest.warns(ResourceWarning, match="never released"):
        gc.collect()


def half_closed(group: Group, module: Module, copy_engines: bool) -> None:
    opened = open_session(group, module, copy_engines=copy_engines)
    plan = plans.exchange_chunks(8, 1, group.rank, group.size)
    source = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    staged = torch.empty_like(source)

    def fail(kind: str | None) -> None:
        here.fault = kind if group.rank == 1 else None

    close_in_two(
        opened,
        group,
        spoil=lambda: fail("free"),
        mend=lambda: fail(None),
        more={"exchange by staging": lambda: opened.exchange(plan, (source,), staged)},
    )


@pytest.mark.parametrize("copy_engines", [False, True])
def test_nothing_but_close_is_done_after_a_close_that_failed(
    module: Module, transports: dict[str, HostTransport], copy_engines: bool
) -> None:
    """E6: rank 1 can't free a window that others have unmapped. Every call is refused at once, on every rank."""
    run_threads(2, half_closed, module, copy_engines)
    assert in_process._alive == {}


# Streams and captures


class Stream:
    """A fake of what `_cuda` says about streams, for one thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing, self.waits = 0, False, []
        monkeypatch.setattr(_cuda, "raw_stream", lambda index: self.now)
        monkeypatch.setattr(_cuda, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(_cuda, "wait_for_stream", lambda device, stream: self.waits.append((self.now, stream)))


def test_a_change_of_streams_is_ordered_and_a_capture_is_not(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the signals serve one call at a time. What was captured does not hide the eager call before it."""
    stream = Stream(monkeypatch)

    def rank(group: Group) -> None:
        opened = open_session(group, module)
        opened.barrier()
        assert stream.waits == []
        for stream.now in (5, 5, 0, 5):
            opened.barrier()
        assert stream.waits == [(5, 0), (0, 5), (5, 0)]
        stream.waits.clear()
        stream.now, stream.capturing = 9, True
        opened.barrier()
        stream.capturing = False
        assert stream.waits == []
        stream.now = 6
        opened.barrier()
        # For the eager call before the capture: the stream of the capture has run nothing.
        assert stream.waits == [(6, 5)]
        opened.close()

    run_threads(1, rank)


@pytest.mark.parametrize("copy_engines", [False, True])
def test_a_geometry_is_seen_before_it_is_captured(
    module: Module, monkeypatch: pytest.MonkeyPatch, copy_engines: bool
) -> None:
    """A table can't be copied to the device inside of a capture: refused, with the fix, and nothing is broken."""
    stream = Stream(monkeypatch)

    def rank(group: Group) -> None:
        opened = open_session(group, module, copy_engines=copy_engines)
        plan = plans.exchange_chunks(8, 1, 0, 1)
        x, out = torch.arange(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
        stream.capturing = True
        with pytest.raises(UnsupportedError, match="make the call once before the capture"):
            opened.exchange(plan, (x,), out)
        assert not out.any()
        stream.capturing = False
        opened.exchange(plan, (x,), out)
        stream.capturing = True
        opened.exchange(plan, (x + 1,), out)
        assert out.tolist() == list(range(1, 9))
        stream.capturing = False
        opened.close()

    run_threads(1, rank)


def too_large(group: Group, module: Module) -> None:
    opened = open_session(group, module, staging_bytes=100)
    plan = plans.exchange_chunks(101, 1, group.rank, group.size)
    x = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    with pytest.raises(ArgumentValueError, match="202 bytes do not fit the staging window of 100"):
        opened.exchange(plan, (x,), x.clone())
    # A destination in a window needs no staging.
    opened.exchange(plan, (x,), opened.window(plan.target_bytes).local)
    opened.close()


def test_only_staged_operands_must_fit_the_staging(module: Module) -> None:
    run_threads(2, too_large, module)


# Set-up that fails on one rank


FAULTS = {
    "build": "is not built and COMM_JIT=off",
    "allocate": "out of memory",
    "map": "cuIpcOpenMemHandle failed",
    "wrong bytes": "bytes from rank 0 are wrong, the first at 5",
}


def forced(group: Group) -> str:
    with pytest.raises(UlyssesBackendError) as caught:
        communicator(group, "host")
    return str(caught.value)


def fallen_back(group: Group) -> tuple[str, str, str]:
    with communicator(group, "auto") as comm:
        x = make_input(1, group.rank, (1, 2, group.size, 4), torch.bfloat16)
        everyone = [make_input(1, peer, (1, 2, group.size, 4), torch.bfloat16) for peer in range(group.size)]
        assert_same_bits(comm.scatter_heads(x), reference.scatter_heads(everyone)[group.rank])
        return comm.backend, comm.topology_decision.backend, str(comm.fallback_reason)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_what_fails_on_one_rank_fails_or_falls_back_on_all(
    transports: dict[str, HostTransport], fault: str, rank: int
) -> None:
    """L14, E6, F13, B1: nothing built, allocated or mapped on one rank, or a wrong byte in the self-test.

    By name every rank raises that rank's reason; "auto" takes the next transport everywhere, with the reason.
    """
    transports["host"].faults = {rank: fault}
    texts = run_threads(3, forced)
    assert len(set(texts)) == 1
    assert f"rank {rank}: " in texts[0] and FAULTS[fault] in texts[0]
    assert in_process._alive == {}
    transports["host-ce"].faults = {1: fault}
    outcomes = run_threads(3, fallen_back)
    assert len(set(outcomes)) == 1
    backend, preferred, reason = outcomes[0]
    assert (backend, preferred) == ("second", "host")
    assert reason.count(FAULTS[fault]) == 2 and "host-ce: " in reason
    assert in_process._alive == {}


def test_a_rank_that_is_missing_from_the_opening_is_named(module: Module) -> None:
    """Nobody waits longer than the deadline, and nothing that the missing rank may map is freed."""

    def rank(group: Group) -> Any:
        if group.rank == 1:
            return None
        with pytest.raises(GroupTimeoutError) as caught:
            open_session(group, module)
        return caught.value.missing

    assert run_threads(3, rank, group_timeout_s=0.5) == [(1,), None, (1,)]


def test_structs_have_room_for_every_rank() -> None:
    """Sixteen ranks fill the arrays; a seventeenth is refused before it would shift the fields behind them."""
    full = launch.SessionStruct(15, list(range(16)), 1, 2, 3, False)
    assert len(full.pack(MAX_WINDOWS)) == 168
    with pytest.raises(Exception, match="pack expected"):
        launch.SessionStruct(16, list(range(17)), 1, 2, 3, False).pack(1)
    with pytest.raises(Exception, match="pack expected"):
        launch.WindowStruct.pack(1, list(range(17)))
