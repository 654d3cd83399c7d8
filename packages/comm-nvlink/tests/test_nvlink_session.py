"""NVLink sessions, whole, without a GPU: ranks are threads, and the module is compiled for the host.

Entry points, tables, boards, flags, signals and deadlines are the real ones (see ``host_nvlink.h``); so is everything
above. A stream that the module makes runs what it was given when another one waits for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import comm_core
import comm_nvlink
from comm_core import UlyssesCommunicator, _cuda, jit, plugins
from comm_core.consensus import Transaction
from comm_core.errors import (
    ArgumentValueError,
    CommError,
    CudaCallError,
    JitMissingError,
    JointError,
    PeerStalledError,
    TransportError,
    UlyssesBackendError,
    UnsupportedError,
)
from comm_core.group import Group
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.jit.spec import ModuleSpec
from comm_core.memory import in_process
from comm_core.memory.in_process import InProcessMemory
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import reference
from comm_core.testing.every_operation import every_operation
from comm_core.testing.half_closed import close_in_two
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, bits, make_input
from comm_core.transport.interface import Verdict
from comm_core.ulysses import plans
from comm_core.windows.launch import WINDOWS
from comm_core.windows.session import WindowSession
from comm_nvlink import board, session, transport
from comm_nvlink import pool as pools
from comm_nvlink.launch import ULYSSES, Calls
from comm_nvlink.pool import POOL
from comm_nvlink.routes import Settings, route
from comm_nvlink.session import NvlinkSession
from comm_nvlink.transport import NvlinkTransport

CPU = torch.device("cpu")
PACKAGE = Path(comm_nvlink.__file__).parent
HEADER = Path(__file__).with_name("host_nvlink.h")
Modules = dict[str, Module]


def load(spec: ModuleSpec, package: Path, header: Path, folder: Path) -> Module:
    library = compile_for_host(spec, package, header, folder)
    return Module(spec, Artifact(spec.name, "host", library, {"archs": []}, {}))


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> Modules:
    """The modules of windows, of the exchange and of the pool, compiled for the host and loaded as all are."""
    folder = tmp_path_factory.mktemp("host")
    return {
        WINDOWS.name: load(WINDOWS, Path(comm_core.__file__).parent, HOST_WINDOWS, folder),
        ULYSSES.name: load(ULYSSES, PACKAGE, HEADER, folder),
        POOL.name: load(POOL, PACKAGE, Path("comm_core/abi.h"), folder),
    }


@pytest.fixture(autouse=True)
def host(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Every launch goes to one stream that runs it at once; afterwards no access was bad, and nothing is left."""
    library = ctypes.CDLL(str(modules[ULYSSES.name].artifact.path))
    library.host_problem.restype = ctypes.c_char_p
    library.host_copies.restype = ctypes.c_uint64
    library.host_streams.restype = ctypes.c_uint64
    library.host_fail_creation.argtypes = [ctypes.c_uint64]
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    yield library
    library.host_fail_creation(0)
    assert library.host_problem() is None
    assert library.host_streams() == 0
    gc.collect()
    in_process._alive.clear()  # what tests with a missing rank keep


def settings(size: int, *, slices: int = 2, engines: bool = False, **changes: Any) -> Settings:
    """Settings in which an exchange of some kilobytes does what one of megabytes does."""
    options = {"engine_bytes": 0 if engines else 1 << 40, "head_bytes": 2000, **changes}
    return Settings(size, slices * (size - 1), 2 if slices else 0, **options)


@contextlib.contextmanager
def opened(group: Group, modules: Modules, chosen: Settings, **changes: Any) -> Iterator[NvlinkSession]:
    options = {"form": "in_process", "staging_bytes": 1 << 18, "timeout_s": 20.0, **changes}
    with Transaction(group, "open transport 'nvlink'") as stages:
        made = NvlinkSession(
            stages, modules[WINDOWS.name], modules[ULYSSES.name], modules[POOL.name], CPU, settings=chosen, **options
        )
        stages.commit()
    try:
        yield made
    finally:
        made.close(10)


# Through the front: the transport whose ranks are threads


here = threading.local()
"""What this thread's rank is in the middle of."""


def faulty(kind: str) -> bool:
    return getattr(here, "fault", None) == kind


class ThreadTransport(NvlinkTransport):
    """NVLink between threads; how it is divided and what goes wrong on which rank can be chosen."""

    def __init__(self, name: str, priority: int, **choice: Any) -> None:
        self.name = name  # pyright: ignore[reportIncompatibleVariableOverride]
        self.priority = priority  # pyright: ignore[reportIncompatibleVariableOverride]
        self.choice = choice
        self.faults: dict[int, str] = {}

    def probe(self, context: Any) -> Any:
        return {}

    def assess(self, request: Any, facts: Any) -> Verdict:
        chosen = settings(len(facts), **self.choice)
        return Verdict(True, "threads share everything", chosen.to_json())

    def open(self, stages: Any, request: Any, plan: Any, device: torch.device) -> NvlinkSession:
        here.fault = self.faults.get(stages.group.rank)
        try:
            return super().open(stages, request, plan, device)
        finally:
            here.fault = None


class FaultyCalls(Calls):
    """Delivers a wrong byte where the rank has that fault."""

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        exchange = self.exchange

        def call(*arguments: Any) -> None:
            exchange(*arguments)
            engines = arguments[3] != 0
            if faulty("wrong bytes") or (faulty("wrong bytes by engines") and engines):
                ctypes.memset(arguments[10] + 5, 0x77, 1)

        self.exchange = call


@pytest.fixture
def transports(modules: Modules, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ThreadTransport]]:
    """Transports as a plugin: by the SMs, by both, by the copy engines alone, and a second choice."""
    made = {
        "sms": ThreadTransport("sms", 10),
        "both": ThreadTransport("both", 9, engines=True),
        "engines": ThreadTransport("engines", 8, slices=0),
        "second": ThreadTransport("second", 3, slices=1),
    }

    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[ThreadTransport]:
            return list(made.values())

    def load(spec: ModuleSpec, device: torch.device) -> Module:
        if faulty(f"build {spec.name}"):
            raise JitMissingError(f"module {spec.name!r} is not built and COMM_JIT=off")
        return modules[spec.name]

    allocate, free = InProcessMemory.allocate, InProcessMemory.free

    def allocate_here(self: InProcessMemory, nbytes: int) -> None:
        if faulty("allocate"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        allocate(self, nbytes)

    def free_here(self: InProcessMemory) -> None:
        if faulty("free"):
            raise CommError("cudaFree failed with CUDA error 1: invalid argument")
        free(self)

    clear = NvlinkSession.clear_signals

    def clear_here(self: NvlinkSession) -> None:
        if faulty("clear"):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        clear(self)

    mapped = board.Boards.__init__

    def map_here(self: board.Boards, descriptors: Any) -> None:
        if faulty("map the boards"):
            raise OSError(12, "Cannot allocate memory")
        mapped(self, descriptors)

    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(session, "Calls", FaultyCalls)
    monkeypatch.setattr(InProcessMemory, "allocate", allocate_here)
    monkeypatch.setattr(InProcessMemory, "free", free_here)
    monkeypatch.setattr(NvlinkSession, "clear_signals", clear_here)
    monkeypatch.setattr(board.Boards, "__init__", map_here)
    plugins.register("nvlink threads", Plugin())
    yield made
    plugins.unregister("nvlink threads")


def communicator(group: Group, backend: str, **changes: Any) -> UlyssesCommunicator:
    arguments = {"max_bytes": 1 << 18, "dtype": torch.bfloat16, "device": CPU, **changes}
    return UlyssesCommunicator(group, backend=backend, **arguments)


def operations(group: Group, backend: str, dtype: torch.dtype) -> int:
    with communicator(group, backend, dtype=dtype) as comm:
        # Other strides on every rank.
        checked = every_operation(
            comm, [(1, 3, 1, 5), (2, 4, 2, 16), (1, 2, 2, 300)], strided=lambda rank: rank % 2 == 1
        )
        assert comm.backend == backend
        return checked


@pytest.mark.parametrize("backend", ["sms", "both", "engines"])
@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_operations_equal_their_references(
    transports: dict[str, ThreadTransport], host: ctypes.CDLL, backend: str, size: int
) -> None:
    """B1: by whatever moves the bytes, all layouts and bands, destinations that differ between ranks."""
    for dtype in (torch.bfloat16, torch.int8) if size < 6 else (torch.float32,):
        assert min(run_threads(size, operations, backend, dtype, timeout_s=100)) > 20
    assert in_process._alive == {}


def counted(group: Group, modules: Modules, host: ctypes.CDLL, chosen: Settings) -> int:
    """Return the copies of the copy engines that one exchange of long rows makes, of all ranks together."""
    plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
    x = torch.full((plan.target_bytes,), group.rank, dtype=torch.uint8)
    with opened(group, modules, chosen) as made:
        made.barrier()
        before = host.host_copies()
        made.barrier()
        out = torch.empty_like(x)
        made.exchange(plan, (x,), out)
        made.barrier()
        assert out.view(group.size, -1)[:, 0].tolist() == list(range(group.size))
        found = host.host_copies() - before
        made.barrier()
    return found


def test_who_moves_what_follows_the_settings(modules: Modules, host: ctypes.CDLL) -> None:
    """A test above could pass without one copy of the copy engines."""
    copies = lambda chosen: run_threads(2, counted, modules, host, chosen)  # noqa: E731
    assert copies(settings(2)) == [0, 0]
    # Two chunks with a flag each, for one peer, by two ranks; and with no SM this rank's own share besides.
    assert copies(settings(2, engines=True)) == [8, 8] or copies(settings(2, engines=True))[0] >= 4
    assert copies(Settings(2, 0, 0)) == [6, 6]


def rounds(group: Group, modules: Modules, chosen: Settings, count: int) -> int:
    """Calls in a row with changing data, destinations and ranks out of step."""
    rank, size = group.rank, group.size
    plan = plans.exchange_chunks(3000, 1, rank, size)
    with opened(group, modules, chosen) as made:
        windows = [made.window(plan.target_bytes).local for _ in range(2)]
        ordinary = torch.empty(plan.target_bytes, dtype=torch.uint8)
        for round_ in range(count):
            x = torch.arange(size, dtype=torch.uint8).repeat_interleave(3000) * 16 + (rank * 3 + round_) % 251
            out = (*windows, ordinary)[(round_ + rank) % 3]
            out.fill_(255)
            made.exchange(plan, (x,), out)
            expected = [(rank * 16 + (peer * 3 + round_) % 251) % 256 for peer in range(size)]
            view = out.view(size, 3000)
            assert view[:, 0].tolist() == expected and bool((view == view[:, :1]).all()), round_
            if round_ % 5 == rank % 5:
                time.sleep(0.0005)
            if round_ % 7 == 0:
                made.barrier()
    return count


@pytest.mark.parametrize("chosen", ["sms", "both", "engines"])
def test_calls_follow_each_other_without_synchronization(modules: Modules, chosen: str) -> None:
    """G3: nobody writes before the receiver has announced; more calls than a board has records."""
    choice = {"sms": settings(3), "both": settings(3, engines=True), "engines": Settings(3, 0, 0)}[chosen]
    assert run_threads(3, rounds, modules, choice, 300, timeout_s=100) == [300] * 3


def crossing(group: Group, modules: Modules) -> list[int]:
    """Calls of sizes on both sides of the threshold in a random order, with barriers and gathers among them."""
    rank, size, found = group.rank, group.size, [0, 0]
    order = torch.Generator().manual_seed(3)
    with opened(group, modules, settings(size, engine_bytes=8000)) as made:
        for round_ in range(120):
            chunk = int(torch.randint(1, 4000, (1,), generator=order)) * 4
            plan = plans.exchange_chunks(chunk, 1, rank, size)
            x = torch.full((plan.target_bytes,), rank * 50 + round_ % 50, dtype=torch.uint8)
            out = torch.zeros_like(x)
            made.exchange(plan, (x,), out)
            expected = [peer * 50 + round_ % 50 for peer in range(size)]
            view = out.view(size, chunk)
            assert view[:, 0].tolist() == expected and bool((view == view[:, :1]).all())
            found[made._prepared[plan].chunks != 0] += 1
            if round_ % 9 == 0:
                made.barrier()
                gathered = torch.zeros(size, dtype=torch.uint8)
                made.all_gather_small(torch.tensor(rank, dtype=torch.uint8), gathered)
                assert gathered.tolist() == list(range(size))
    return found


def test_sizes_that_cross_the_threshold_in_every_call(modules: Modules) -> None:
    """F9: routes share the number of the operation, so none falls behind."""
    for below, above in run_threads(3, crossing, modules, timeout_s=60):
        assert below > 20 and above > 20


def test_it_can_do_what_windows_can() -> None:
    """As docs/backends.md says."""
    assert NvlinkSession.properties == WindowSession.properties


# Hosts that come late


def late(group: Group, modules: Modules, host: ctypes.CDLL) -> tuple[int, int]:
    """Rank 1's host makes each call later than the others wait for it."""
    plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
    known = []
    with opened(group, modules, settings(group.size, engines=True)) as made:
        meet = made._nvlink.meet

        def met(*arguments: Any) -> None:
            if group.rank == 1:
                time.sleep(0.6)
            meet(*arguments)
            known.append(made._places.known)

        made._nvlink.meet = met
        for round_ in range(4):
            x = torch.full((plan.target_bytes,), group.rank * 20 + round_, dtype=torch.uint8)
            out = torch.zeros_like(x)
            made.exchange(plan, (x,), out)
            expected = [peer * 20 + round_ for peer in range(group.size)]
            assert out.view(group.size, -1)[:, 7777].tolist() == expected
    return min(known), max(known)


def test_who_comes_late_is_served_by_the_sms(
    modules: Modules, host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair is served for itself: the late rank knows of all, the others of each other only."""
    # Longer than a thread of a busy machine waits for a processor.
    monkeypatch.setattr(session, "_MEET_NS", 150_000_000)
    outcomes = run_threads(3, late, modules, host)
    assert outcomes == [(0b100, 0b100), (0b101, 0b101), (0b001, 0b001)]


def odd_rows(group: Group, modules: Modules) -> list[bool]:
    """Rank 1's operands are strided so that the copy engines are no good for them; nobody else need know."""
    b, s, h, d = 1, 6, 2 * group.size, 300
    shape = (b, s, h, d)
    full = [[make_input(i, peer, shape, torch.bfloat16) for peer in range(group.size)] for i in range(3)]
    mine = [x[group.rank] for x in full]
    if group.rank == 1:
        mine = [x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) for x in mine]
    strides = tuple(x.stride() for x in mine)
    plan = plans.scatter_qkv_head_chunk(shape, strides, 2, group.rank, group.size, head_offset=0, head_count=2)
    with opened(group, modules, settings(group.size, engines=True)) as made:
        out = torch.empty(b, s * group.size, 2, 3 * d, dtype=torch.bfloat16)
        for _ in range(3):
            bits(out).fill_(0)
            made.exchange(plan, mine, out)
            parts = [reference.scatter_heads(x)[group.rank] for x in full]
            assert_same_bits(out, torch.cat(parts, dim=-1))
        return [made._prepared[plan].copies is None]


def test_a_rank_may_be_alone_in_having_rows_that_do_not_suit_the_engines(modules: Modules) -> None:
    assert run_threads(3, odd_rows, modules) == [[False], [True], [False]]


def changed(group: Group, modules: Modules) -> tuple[int, str]:
    """Rank 2's device announces another place than its host has told the others."""
    plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
    x = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    with opened(group, modules, settings(group.size, engines=True), timeout_s=5.0) as made:
        spare = made.window(plan.target_bytes * 2)
        made.exchange(plan, (x,), spare.local[: plan.target_bytes])
        made.check()
        if group.rank == 2:
            exchange = made._exchange

            def elsewhere(*arguments: Any) -> None:
                # landing, output, offset
                moved = [arguments[9] + 64, arguments[10] + 64, arguments[11] + 64]
                exchange(*arguments[:9], *moved, *arguments[12:])

            made._exchange = elsewhere
        made.exchange(plan, (x,), spare.local[: plan.target_bytes])
        with pytest.raises(PeerStalledError) as caught:
            made.check()
    return caught.value.waited_for, str(caught.value)


def test_an_announcement_that_is_not_what_the_host_was_told_is_found(modules: Modules) -> None:
    """The copy engines have their destinations from the hosts, and the device compares before it says so."""
    outcomes = run_threads(3, changed, modules)
    assert {waited_for for waited_for, _ in outcomes} == {2}
    assert any("rank 2 announced memory" in text for _, text in outcomes)


def no_boards(group: Group, modules: Modules, chosen: Settings) -> Any:
    try:
        with opened(group, modules, chosen) as made:
            plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
            x = torch.full((plan.target_bytes,), group.rank, dtype=torch.uint8)
            out = torch.empty_like(x)
            made.exchange(plan, (x,), out)
            return out.view(group.size, -1)[:, 3].tolist()
    except JointError as error:
        return str(error)


def test_ranks_that_can_not_pass_descriptors_do_without_the_engines(
    modules: Modules, host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Slower and said so; with max_sms=0 there is nothing else, and all ranks refuse."""

    def refused(group: Group, descriptors: Any) -> Any:
        raise JointError("exchange file descriptors: the ranks share no network", {})

    monkeypatch.setattr("comm_nvlink.board.exchange_descriptors", refused)
    before = host.host_copies()
    with caplog.at_level(logging.WARNING, "comm_nvlink"):
        assert run_threads(2, no_boards, modules, settings(2, engines=True)) == [[0, 1]] * 2
    assert host.host_copies() == before
    assert "the copy engines are not used" in caplog.text and "share no network" in caplog.text
    texts = run_threads(2, no_boards, modules, Settings(2, 0, 0))
    assert len(set(texts)) == 1 and "max_sms=0 needs the copy engines" in texts[0]
    assert in_process._alive == {}


# Small gathers


def gathers(group: Group, modules: Modules, chosen: Settings) -> list[int]:
    rank, size, epochs = group.rank, group.size, []
    with opened(group, modules, chosen, staging_bytes=1) as made:
        for count in (1, 37, (1 << 16) - 1, 1 << 16, (1 << 16) + 4, 1 << 20):
            value = (torch.arange(count, dtype=torch.int64) * 7 + rank * 31).to(torch.uint8)
            for out in (torch.zeros(size, count, dtype=torch.uint8), None):
                # A view into a window of larger outputs is one as well.
                out = made.window(size * count).local.view(size, count) if out is None else out
                made.all_gather_small(value, out)
                for peer in range(size):
                    at = torch.arange(count, dtype=torch.int64)
                    assert torch.equal(out[peer], (at * 7 + peer * 31).to(torch.uint8)), (count, peer)
        floats = torch.tensor(1.5 + rank)
        found = torch.zeros(size)
        made.all_gather_small(floats, found)
        epochs = [int(item * 2) for item in found.tolist()]
        with pytest.raises(ArgumentValueError):
            made.all_gather_small(torch.zeros((1 << 20) + 1, dtype=torch.uint8), found)
    return epochs


@pytest.mark.parametrize("chosen", ["sms", "both", "engines"])
def test_small_gathers_of_any_size_go_in_rounds(modules: Modules, chosen: str) -> None:
    """Up to 1 MiB a rank, through a staging window of 64 KiB a rank."""
    choice = {"sms": settings(3), "both": settings(3, engines=True), "engines": Settings(3, 0, 0)}[chosen]
    assert run_threads(3, gathers, modules, choice, timeout_s=100) == [[3, 5, 7]] * 3


# Stalls


def stall(group: Group, how: str, backend: str) -> Any:
    size = group.size
    comm = communicator(group, backend, dtype=torch.float32)
    x = torch.ones(1, 4, size, 300)
    direct, plain = comm.allocate_output(x, "scatter_heads"), torch.zeros(1, 4 * size, 1, 300)
    comm.scatter_heads(x, out=direct)
    comm.scatter_heads(x, out=plain)
    if group.rank == 1:
        time.sleep(1.5)
        if how == "silent":
            comm.close(timeout=10)
            return None
    started = time.monotonic()
    text, waited_for, reporter = "", -1, -1
    try:
        comm.scatter_heads(x, out=direct)  # the kernel gives up; the host does not know yet
        seconds = time.monotonic() - started
        poisoned = bool(direct.isnan().all())
        comm.scatter_heads(x, out=plain)
    except PeerStalledError as error:
        # With max_sms=0 the hosts wait for each other, and nothing was enqueued.
        seconds = time.monotonic() - started
        poisoned = bool(direct.isnan().all())
        text, waited_for, reporter = str(error), error.waited_for, error.reporter
    with pytest.raises(TransportError, match="broken since an earlier failure"):
        comm.gather_heads(plain)
    del direct
    comm.close(timeout=10)
    return waited_for, reporter, text, poisoned, seconds


@pytest.mark.parametrize("how", ["silent", "late"])
@pytest.mark.parametrize("backend", ["sms", "both"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_that_does_not_come_is_named_by_all(
    transports: dict[str, ThreadTransport], monkeypatch: pytest.MonkeyPatch, how: str, backend: str, size: int
) -> None:
    """F17: outputs are NaN, the late rank is told too, and all close and free everything."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    outcomes = run_threads(size, stall, how, backend, timeout_s=60, group_timeout_s=0.5)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and how == "silent":
            assert outcome is None
            continue
        waited_for, reporter, text, poisoned, seconds = outcome
        assert waited_for == 1 and reporter != 1 and poisoned, (rank, outcome)
        assert seconds < (0.4 if rank == 1 else 5)
        gave_up = f"rank {rank} gave up" if reporter == rank else f"was told that rank {reporter} gave up"
        assert gave_up in text and "waiting for rank 1" in text and "scatter_heads" in text
    assert in_process._alive == {}


def test_without_sms_the_hosts_miss_each_other(
    transports: dict[str, ThreadTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """F17, max_sms=0: the copy engines must know where to, so the host waits, to the deadline, and names the rank."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    outcomes = run_threads(3, stall, "silent", "engines", timeout_s=60, group_timeout_s=0.5)
    for rank in (0, 2):
        waited_for, reporter, text, _, seconds = outcomes[rank]
        assert (waited_for, reporter) == (1, rank) and seconds < 5
        assert "scatter_heads with max_sms=0: rank 1 did not make this call within 0.5 s" in text
    assert in_process._alive == {}


def unpoisoned(group: Group, modules: Modules, chosen: Settings) -> tuple[bool, str]:
    plan = plans.exchange_chunks(3000, 1, group.rank, group.size)
    out = torch.full((plan.target_bytes,), 3, dtype=torch.uint8)
    text = ""
    with opened(group, modules, chosen, timeout_s=0.3, poison=False) as made:
        if group.rank:
            made.exchange(plan, (torch.zeros(plan.target_bytes, dtype=torch.uint8),), out)
            with pytest.raises(PeerStalledError) as caught:
                made.check()
            text = str(caught.value)
    return bool((out == 0xFF).any()), text


def test_outputs_are_left_alone_where_that_was_asked_for(modules: Modules) -> None:
    """COMM_ON_STALL=status."""
    for engines in (False, True):
        for rank, (poisoned, text) in enumerate(run_threads(3, unpoisoned, modules, settings(3, engines=engines))):
            assert not poisoned
            assert rank == 0 or "waiting for rank 0" in text


# Streams and captures


class Stream:
    """A fake of what `_cuda` says about streams, for all threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing, self.waits = 0, False, []
        monkeypatch.setattr(_cuda, "raw_stream", lambda index: self.now)
        monkeypatch.setattr(_cuda, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(_cuda, "wait_for_stream", lambda device, stream: self.waits.append((self.now, stream)))


@pytest.mark.parametrize("engines", [False, True])
def test_a_geometry_is_seen_before_it_is_captured(
    modules: Modules, monkeypatch: pytest.MonkeyPatch, engines: bool
) -> None:
    """A table can't be copied to the device inside of a capture: refused, with the fix, and nothing is broken."""
    stream = Stream(monkeypatch)
    meeting = threading.Barrier(2)

    def switch(capturing: bool) -> None:
        meeting.wait(20)
        stream.capturing = capturing
        meeting.wait(20)

    def rank(group: Group) -> None:
        plan = plans.exchange_chunks(1000, 1, group.rank, 2)
        x, out = torch.full((2000,), group.rank + 1, dtype=torch.uint8), torch.zeros(2000, dtype=torch.uint8)
        with opened(group, modules, settings(2, engines=engines)) as made:
            switch(True)
            with pytest.raises(UnsupportedError, match="make the call once before the capture"):
                made.exchange(plan, (x,), out)
            assert not out.any()
            switch(False)
            made.exchange(plan, (x,), out)
            switch(True)
            made.exchange(plan, (x + 1,), out)
            switch(False)
            assert out.view(2, 1000)[:, 5].tolist() == [2, 3]

    run_threads(2, rank)


def captured_by_one(group: Group, modules: Modules) -> tuple[int, list[int]]:
    plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
    x = torch.full((plan.target_bytes,), group.rank, dtype=torch.uint8)
    with opened(group, modules, settings(group.size, engines=True)) as made:
        out = torch.empty_like(x)
        made.exchange(plan, (x,), out)
        meet = made._nvlink.meet
        # As rank 0's capture would post it.
        made._nvlink.meet = lambda *arguments: meet(*arguments[:-1], group.rank == 0)
        made.exchange(plan, (x,), out)
        return made._places.known, out.view(group.size, -1)[:, 0].tolist()


def test_a_call_that_one_rank_captures_is_no_partner_for_one_that_another_makes(modules: Modules) -> None:
    """Its place is that of a later replay, so hosts don't use it."""
    outcomes = run_threads(3, captured_by_one, modules)
    assert [known for known, _ in outcomes] == [0, 0b100, 0b010]
    assert all(values == [0, 1, 2] for _, values in outcomes)


def captured_again(group: Group, modules: Modules, chosen: Settings) -> list[int]:
    """Rank 0 captures a call into staging while rank 1's capture is refused; both make it once and capture anew."""
    plan = plans.exchange_chunks(2000, 1, group.rank, 2)
    x = torch.full((plan.target_bytes,), group.rank + 1, dtype=torch.uint8)
    with opened(group, modules, chosen, timeout_s=5.0) as made:
        direct, plain = made.window(plan.target_bytes).local, torch.zeros_like(x)
        if group.rank == 0:
            made.exchange(plan, (x,), plain)
            here.capturing, exchange = True, made._exchange
            made._exchange = lambda *arguments: None  # in a graph that is thrown away
            made.exchange(plan, (x,), plain)
            made._exchange = exchange
        else:
            made.exchange(plan, (x,), plain)
        here.capturing = False
        made.exchange(plan, (x,), plain)
        here.capturing = True
        out = plain if group.rank else direct
        for round_ in range(3):
            made.exchange(plan, (x + round_,), out)
            assert out.view(2, -1)[:, 7].tolist() == [1 + round_, 2 + round_]
            assert made._places.known == 2 - group.rank, "each knows where the other wants this very call"
        here.capturing = False
        made.check()
        return out.view(2, -1)[:, 1999].tolist()


@pytest.mark.parametrize("engines", [False, True])
def test_a_capture_that_failed_on_one_rank_is_no_partner_of_the_next(
    modules: Modules, monkeypatch: pytest.MonkeyPatch, engines: bool
) -> None:
    """After an eager call the ranks agree again on which captured call is which."""
    monkeypatch.setattr(_cuda, "is_capturing", lambda: getattr(here, "capturing", False))
    monkeypatch.setattr(session, "_MEET_CAPTURED_NS", 300_000_000)
    assert run_threads(2, captured_again, modules, settings(2, engines=engines), timeout_s=60) == [[3, 4]] * 2


def interrupted(group: Group, modules: Modules) -> list[int]:
    plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
    x = torch.full((plan.target_bytes,), group.rank + 1, dtype=torch.uint8)
    known = []
    with opened(group, modules, settings(group.size, engines=True), timeout_s=5.0) as made:
        outs = [made.window(plan.target_bytes).local for _ in range(2)]
        exchange = made._exchange

        def interrupt(*arguments: Any) -> None:
            made._exchange = exchange
            raise KeyboardInterrupt

        if group.rank == 1:
            made._exchange = interrupt
            with pytest.raises(KeyboardInterrupt):
                made.exchange(plan, (x,), outs[0])
        for round_ in range(4):
            out = outs[round_ % 2]
            made.exchange(plan, (x + round_,), out)
            assert out.view(group.size, -1)[:, 5].tolist() == [peer + 1 + round_ for peer in range(group.size)]
            known.append(made._places.known)
        made.check()
    return known


def test_a_call_that_is_made_again_after_an_interrupt_has_the_same_number(modules: Modules) -> None:
    """The hosts go on to tell each other the places of one and the same call."""
    assert run_threads(3, interrupted, modules) == [[0b110] * 4, [0b101] * 4, [0b011] * 4]


def many_geometries(group: Group, modules: Modules) -> tuple[int, int]:
    with opened(group, modules, settings(2)) as made:
        held: list[Any] = []
        for round_ in range(12):
            plan = plans.exchange_chunks(10 + round_ % 9, 1, group.rank, 2)
            x = torch.full((plan.target_bytes,), group.rank + round_, dtype=torch.uint8)
            out = torch.empty_like(x)
            made.exchange(plan, (x,), out)
            assert out.view(2, -1)[:, 3].tolist() == [round_, round_ + 1]
            if round_ == 2:
                here.capturing = True
                made.exchange(plan, (x,), out)
                here.capturing = False
                held.append(made._prepared[plan])
        assert plans.exchange_chunks(12, 1, group.rank, 2) not in made._prepared or round_ > 10
        assert set(held) == made._held
        return len(made._prepared), len(made._held)


def test_tables_of_the_last_geometries_and_of_captured_calls_are_kept(
    modules: Modules, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server with ever new lengths needs no more and more memory; a graph has the address of its table."""
    monkeypatch.setattr(_cuda, "is_capturing", lambda: getattr(here, "capturing", False))
    monkeypatch.setattr(session, "_KEPT", 4)
    assert run_threads(2, many_geometries, modules) == [(4, 1)] * 2


def too_large(group: Group, modules: Modules) -> None:
    plan = plans.exchange_chunks(1 << 17, 1, group.rank, group.size)
    x = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    with opened(group, modules, settings(group.size), staging_bytes=100) as made:
        with pytest.raises(ArgumentValueError, match=r"262144 bytes does not fit the staging of 131072.*max_bytes"):
            made.exchange(plan, (x,), x.clone())
        # A destination in a window needs no staging.
        made.exchange(plan, (x,), made.window(plan.target_bytes).local)


def test_only_staged_operands_must_fit_the_staging(modules: Modules) -> None:
    run_threads(2, too_large, modules)


def graph_of_before(group: Group, modules: Modules) -> list[int]:
    """A call whose struct was captured before a window was made reaches it all the same."""
    plan = plans.exchange_chunks(3000, 1, group.rank, group.size)
    x = torch.full((plan.target_bytes,), group.rank + 1, dtype=torch.uint8)
    with opened(group, modules, settings(group.size, engines=True)) as made:
        held = ctypes.create_string_buffer(bytes(made._packed.raw))
        late = made.window(plan.target_bytes)
        if group.rank == 0:
            made._state.session = ctypes.addressof(held)
        out = late.local if group.rank else torch.empty_like(x)
        made.exchange(plan, (x,), out)
        return out.view(group.size, -1)[:, 1].tolist()


def test_a_graph_reaches_windows_that_are_younger(modules: Modules) -> None:
    assert run_threads(3, graph_of_before, modules) == [[1, 2, 3]] * 3


def half_enqueued(group: Group) -> list[str]:
    """A CUDA call fails when a part of the exchange was enqueued: no later call could pair with the peers'."""
    texts: list[str] = []
    comm = communicator(group, "both", dtype=torch.float32)
    x = torch.ones(1, 4, group.size, 300)
    comm.scatter_heads(x)
    made = comm._session
    assert isinstance(made, NvlinkSession)

    def fails(*arguments: Any) -> None:
        raise CudaCallError("comm_nvlink_exchange_v1", 700, "an illegal memory access was encountered")

    made._exchange = fails
    for _ in range(2):
        with pytest.raises(TransportError) as caught:
            comm.scatter_heads(x)
        texts.append(str(caught.value))
    comm.close(timeout=10)
    return texts


def test_a_cuda_error_in_a_call_breaks_the_communicator(transports: dict[str, ThreadTransport]) -> None:
    for first, second in run_threads(2, half_enqueued):
        assert "scatter_heads over both failed: CudaCallError" in first and "illegal memory access" in first
        assert "broken since an earlier failure" in second


# Set-up that fails on one rank


FAULTS = {
    "build comm_core_windows": "'comm_core_windows' is not built and COMM_JIT=off",
    "build comm_nvlink_ulysses": "'comm_nvlink_ulysses' is not built and COMM_JIT=off",
    "allocate": "out of memory",
    "map the boards": "Cannot allocate memory",
    "clear": "illegal memory access",
    "wrong bytes": "are wrong, the first at",
    "wrong bytes by engines": "are wrong, the first at",
}


def forced(group: Group, backend: str) -> str:
    with pytest.raises(UlyssesBackendError) as caught:
        communicator(group, backend)
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
    transports: dict[str, ThreadTransport], host: ctypes.CDLL, fault: str, rank: int
) -> None:
    """E6, F13, B1, L14: every stage of the opening, a wrong byte in either self-test among them.

    By name every rank raises that rank's reason; "auto" takes the next transport everywhere, with the reason.
    """
    for name in ("sms", "both", "engines"):
        transports[name].faults = {rank: fault}
    texts = run_threads(3, forced, "sms")
    assert len(set(texts)) == 1
    assert f"rank {rank}: " in texts[0] and FAULTS[fault] in texts[0]
    assert in_process._alive == {} and host.host_streams() == 0
    outcomes = run_threads(3, fallen_back)
    assert len(set(outcomes)) == 1
    backend, preferred, reason = outcomes[0]
    assert (backend, preferred) == ("second", "sms")
    assert reason.count(FAULTS[fault]) == 3 and "engines: " in reason
    assert in_process._alive == {}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_stream_that_can_not_be_made_leaves_nothing(
    transports: dict[str, ThreadTransport], host: ctypes.CDLL, number: int
) -> None:
    """The step that fails on one rank is undone there too: no stream and no event stays."""
    host.host_fail_creation(number)
    texts = run_threads(2, forced, "sms")
    assert len(set(texts)) == 1 and "failed with 2" in texts[0]
    assert host.host_streams() == 0 and in_process._alive == {}


# The memory pool


class FakePools:
    """Stands for torch's allocator: what is allocated in a pool comes from its C functions, here called at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered: list[Any] = []
        monkeypatch.setattr(pools, "_torch_allocator", self.allocator)
        monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: allocator)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", self.use)

    def allocator(self, allocate: int, release: int) -> Any:
        signature = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        return SimpleNamespace(
            take=ctypes.CFUNCTYPE(ctypes.c_void_p, *signature)(allocate),
            free=ctypes.CFUNCTYPE(None, ctypes.c_void_p, *signature)(release),
        )

    @contextlib.contextmanager
    def use(self, pool: Any, device: torch.device) -> Iterator[None]:
        self.entered.append((pool, device))
        yield

    def take(self, made: NvlinkSession, nbytes: int) -> int:
        found = made._pool._pool.take(nbytes, 0, None)
        if not found:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return found


def tensor_at(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def pooled(group: Group, modules: Modules, fake: FakePools, chosen: Settings) -> str:
    rank, size = group.rank, group.size
    plan = plans.exchange_chunks(3000, 1, rank, size)
    with opened(group, modules, chosen, pool_bytes=1 << 16) as made:
        outs: list[tuple[int, torch.Tensor]] = []
        with made.memory_pool():
            # Every rank's tensors lie elsewhere.
            first = fake.take(made, 512 * (1 + rank))
            outs = [(place, tensor_at(place, plan.target_bytes)) for place in
                    (fake.take(made, plan.target_bytes) for _ in range(3))]  # fmt: skip
        for round_ in range(6):
            place, out = outs[round_ % 3]
            out.fill_(0)
            assert made.windows.find(place, plan.target_bytes)[0] is made.arena
            x = torch.full((plan.target_bytes,), rank * 16 + round_, dtype=torch.uint8)
            made.exchange(plan, (x,), out)
            assert out.view(size, -1)[:, 9].tolist() == [peer * 16 + round_ for peer in range(size)]
        with pytest.raises(torch.OutOfMemoryError) as caught, made.memory_pool():
            fake.take(made, 1 << 16)
        with pytest.raises(ZeroDivisionError), made.memory_pool():
            assert 1 / 0
        # An error of another kind of memory stays what it is.
        with pytest.raises(torch.OutOfMemoryError, match="of something else"), made.memory_pool():
            raise torch.OutOfMemoryError("of something else")
        for place in (first, *(place for place, _ in outs)):
            made._pool._pool.free(place, 0, 0, None)
        with made.memory_pool():
            # It is one piece again.
            assert fake.take(made, 1 << 16) == made.arena.address
        made._pool._pool.free(made.arena.address, 0, 0, None)
    return str(caught.value)


@pytest.mark.parametrize("engines", [False, True])
def test_pool_tensors_are_written_in_place_at_any_offset(
    modules: Modules, monkeypatch: pytest.MonkeyPatch, engines: bool
) -> None:
    """No staging for them; an arena that is full says by how much, and which argument to raise."""
    fake = FakePools(monkeypatch)
    texts = run_threads(2, pooled, modules, fake, settings(2, engines=engines))
    for rank, text in enumerate(texts):
        used = 512 * (1 + rank) + 3 * 6144
        assert f"pool of 65536 bytes is exhausted: {used} are in use and 65536 more" in text
        assert "Raise pool_bytes of the communicator" in text


def test_a_session_without_a_pool_says_how_to_get_one(modules: Modules) -> None:
    def rank(group: Group) -> None:
        with opened(group, modules, settings(2)) as made, pytest.raises(UnsupportedError, match="pool_bytes="):
            made.memory_pool()

    run_threads(2, rank)


# What the transport agrees on


def facts(uuids: Sequence[str], engine_bytes: Any = None) -> Any:
    return [
        SimpleNamespace(
            device=SimpleNamespace(uuid=uuid), plugins={"nvlink": {"engine_bytes": engine_bytes}}, rank=rank
        )
        for rank, uuid in enumerate(uuids)
    ]


def request_of(**options: Any) -> Any:
    return SimpleNamespace(options=options)


@pytest.mark.parametrize("size", [2, 4, 6, 8])
@pytest.mark.parametrize("max_sms", [None, 0, 8, 9, 16, 1024])
def test_blocks_keep_to_what_was_agreed(size: int, max_sms: int | None) -> None:
    """A whole number of blocks for each peer, some for the own share, no more than allowed, all at once."""
    own = transport.settings_of(request_of(max_sms=max_sms), facts([f"GPU-{rank}" for rank in range(size)]))
    shared = transport.settings_of(request_of(max_sms=max_sms), facts(["GPU-0"] * size))
    for chosen, most in ((own, 2 * 96), (shared, 2 * max(48 // size, size // 2))):
        blocks = chosen.senders + chosen.copiers
        assert chosen.ranks == size and chosen.senders % (size - 1) == 0
        assert (chosen.senders == 0) == (chosen.copiers == 0) == (max_sms == 0)
        assert blocks <= (most if max_sms is None else min(most, 2 * max_sms))
        assert chosen.to_json()["senders"] == chosen.senders
    # What `test_nvlink_modules.py` counts on. Ranks on one GPU measure no link.
    assert (shared.senders + shared.copiers) * size <= 2 * 48
    assert own.measured and not shared.measured


def test_the_variable_is_read_once_and_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """COMM_NVLINK_ENGINE_BYTES: a number of bytes, in the decision's plan, and no other value on another rank."""
    probed = NvlinkTransport().probe
    assert probed(None) == {"engine_bytes": None}
    monkeypatch.setenv("COMM_NVLINK_ENGINE_BYTES", "4096")
    assert probed(None) == {"engine_bytes": 4096}
    assert transport.settings_of(request_of(), facts(["a", "b"], 4096)).engine_bytes == 4096
    for wrong in ("-1", "1e6", "4 MiB"):
        monkeypatch.setenv("COMM_NVLINK_ENGINE_BYTES", wrong)
        with pytest.raises(ArgumentValueError, match=f"must be a number of bytes, got '{wrong}'"):
            probed(None)


def test_the_pure_route_of_a_call_is_what_the_session_prepared(modules: Modules) -> None:
    def rank(group: Group) -> bool:
        plan = plans.exchange_chunks(20000, 1, group.rank, group.size)
        x = torch.zeros(plan.target_bytes, dtype=torch.uint8)
        with opened(group, modules, settings(group.size, engines=True)) as made:
            made.exchange(plan, (x,), x.clone())
            prepared, way = made._prepared[plan], route(plan, made._settings)
            return (prepared.senders, prepared.chunks) == (way.senders, way.chunks) and way.chunks > 0

    assert run_threads(2, rank) == [True, True]


def test_closing_forgets_what_was_prepared(modules: Modules) -> None:
    """A session that is closed holds no memory of the device, however long its communicator is kept."""
    kept: list[NvlinkSession] = []

    def rank(group: Group) -> None:
        with opened(group, modules, settings(2, engines=True)) as made:
            kept.append(made)
        made.close()

    run_threads(2, rank)
    assert all(not made._prepared and not made._held and not made.look() for made in kept)


def half_closed(group: Group, modules: Modules, chosen: Settings) -> None:
    def fail(kind: str | None) -> None:
        here.fault = kind if group.rank == 1 else None

    with opened(group, modules, chosen) as made:
        # A real one needs a torch with CUDA.
        pool: Any = SimpleNamespace(allocating=lambda device: contextlib.nullcontext(), close=lambda: None)
        made._pool = pool
        more = {"memory_pool": made.memory_pool}
        close_in_two(made, group, spoil=lambda: fail("free"), mend=lambda: fail(None), more=more)


@pytest.mark.parametrize("engines", [False, True])
def test_nothing_but_close_is_done_after_a_close_that_failed(
    modules: Modules, transports: dict[str, ThreadTransport], engines: bool
) -> None:
    """E6: rank 1 can't free a window that others have unmapped. Every call is refused at once, on every rank."""
    run_threads(2, half_closed, modules, settings(2, engines=engines))
    assert in_process._alive == {}
