"""Sessions of the peer-to-peer route, whole, without a GPU: ranks are threads, the modules are compiled for the host.

Entry points, structs, signals, deadlines, streams, events and graphs are the real ones' (see
``host_runtime.h``); so is everything above. Links are tested in a real child process.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, _cuda, jit, plugins
from comm_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    JointError,
    PeerStalledError,
    TransportError,
    UlyssesBackendError,
    UnsupportedError,
)
from comm_core.group import Group
from comm_core.memory import in_process
from comm_core.memory.in_process import InProcessMemory
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import reference
from comm_core.testing.faults import Fault, Injector
from comm_core.testing.half_closed import close_in_two
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.testing.topologies import gpu_uuid
from comm_core.transport.interface import Verdict
from comm_core.windows import session as windows_session
from comm_core.windows.launch import WINDOWS, Calls
from comm_pcie import ExperimentalWarning, RouteWarning, selftest, session
from comm_pcie import warnings as pcie_warnings
from comm_pcie.exchange import EXCHANGE, Engine
from comm_pcie.selftest import SELFTEST
from comm_pcie.session import PcieSession
from comm_pcie.transport import PcieTransport

CPU = torch.device("cpu")
OPERATIONS = ("scatter_heads", "gather_heads", "exchange_chunks")

here = threading.local()
"""What this thread's rank is in the middle of."""


def fire(stage: Any) -> bool:
    injector = getattr(here, "injector", None)
    return injector is not None and injector.fire(stage)


class HostTransport(PcieTransport):
    """The transport for CPU tensors, whose ranks are threads; what goes wrong on which rank can be chosen."""

    experimental = False
    priority = 50

    def __init__(self) -> None:
        self.faults: list[Fault] = []
        self.requested, self.reason = "auto", ""

    def probe(self, context: Any) -> dict[str, Any]:
        return {}

    def assess(self, request: Any, facts: Any) -> Verdict:
        plan = {
            "numa_nodes": [None] * len(facts),
            "nic_names": [None] * len(facts),
            "gid_indices": [],
            "transport": "p2p",
            "requested_route": self.requested,
            "route_reason": self.reason,
            "blocks_per_peer": 1,
            "devices": [gpu_uuid(rank) for rank in range(len(facts))],
            "hints": ["an IOMMU is on"],
        }
        return Verdict(True, "threads share everything", plan)

    def open(self, stages: Any, request: Any, plan: Any, device: torch.device) -> Any:
        here.injector = Injector(stages.group.rank, self.faults)
        return super().open(stages, request, plan, device)


class FaultyCalls(Calls):
    """Delivers a wrong byte in small gathers where the rank has that fault."""

    def exchange(self, *arguments: Any) -> None:
        super().exchange(*arguments)
        if getattr(here, "injector", None) is not None and here.injector.has("selftest", "wrong_data"):
            ctypes.memset(arguments[4] + 5, 0x77, 1)


class FaultyEngine(Engine):
    """Fails in a call, or in a release."""

    def __init__(self, module: Any) -> None:
        fire("arm")
        super().__init__(module)
        real = self.exchange

        def exchange(*fields: Any) -> None:
            fire("exchange")
            real(*fields)
            if here.injector.has("exchange", "wrong_data"):
                outputs = (ctypes.c_void_p * 16).from_address(fields[5])
                ctypes.memset(outputs[here.injector.rank] + 3, 0x77, 1)

        self.exchange = exchange

    def close(self) -> None:
        fire("close")
        super().close()


@pytest.fixture(autouse=True)
def host(modules: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostTransport]:
    """Register the transport; afterwards nothing is left and nothing was done that CUDA would not allow."""
    transport = HostTransport()
    gc.collect()
    before = modules.library.host_alive()

    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[HostTransport]:
            return [transport]

    loaded = {WINDOWS: modules.windows, EXCHANGE: modules.exchange, SELFTEST: modules.selftest}

    def load(spec: Any, device: torch.device) -> Any:
        fire("build")
        return loaded[spec]

    allocate, map_, unmap = InProcessMemory.allocate, InProcessMemory.map, InProcessMemory.unmap

    def allocate_here(self: InProcessMemory, nbytes: int) -> None:
        fire("allocate")
        allocate(self, nbytes)

    def map_here(self: InProcessMemory, exports: Any) -> tuple[int, ...]:
        fire("map")
        return map_(self, exports)

    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(windows_session, "Calls", FaultyCalls)
    monkeypatch.setattr(session, "Engine", FaultyEngine)
    monkeypatch.setattr(InProcessMemory, "allocate", allocate_here)
    monkeypatch.setattr(InProcessMemory, "map", map_here)
    monkeypatch.setattr(InProcessMemory, "unmap", unmap)
    # Threads share one set of filters, so what a communicator warns of is tested by itself.
    monkeypatch.setattr(pcie_warnings, "_given", _Everything())
    plugins.register("pcie under test", Plugin())
    yield transport
    plugins.unregister("pcie under test")
    gc.collect()
    library = modules.library
    assert library.host_problem() is None
    assert library.host_alive() == before, "streams, events or graphs are left"
    in_process._alive.clear()


class _Everything(set[str]):
    def __contains__(self, item: object) -> bool:
        return True


def communicator(group: Group, backend: str = "pcie", **changes: Any) -> UlyssesCommunicator:
    arguments = {"max_bytes": 1 << 16, "dtype": torch.bfloat16, "device": CPU, **changes}
    return UlyssesCommunicator(group, backend=backend, **arguments)


def opened(comm: UlyssesCommunicator) -> PcieSession:
    found = comm._session
    assert isinstance(found, PcieSession)
    return found


def everyone(seed: int, size: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
    return [make_input(seed, peer, shape, dtype) for peer in range(size)]


# Calls


def operations(group: Group, dtype: torch.dtype) -> int:
    rank, size, checked = group.rank, group.size, 0
    with communicator(group, dtype=dtype) as comm:
        assert (comm.backend, comm.transport) == ("pcie", "p2p")
        for seed, (b, s, h, d) in enumerate([(1, 3, 1, 5), (2, 4, 2, 16), (3, 2, 3, 1)]):
            cases: dict[str, tuple[int, ...]] = {
                "scatter_heads": (b, s, size * h, d),
                "gather_heads": (b, size * s, h, d),
                "exchange_chunks": (1, 1, size, b * s * d),
            }
            for name, shape in cases.items():
                every = everyone(seed, size, shape, dtype)
                expected = getattr(reference, name)(every)[rank]
                out = comm.allocate_output(every[rank], name)
                # The third call of a geometry with the same memory is a graph.
                for _ in range(4):
                    out.view(torch.uint8).fill_(0x5A)
                    opened(comm).barrier()
                    assert_same_bits(getattr(comm, name)(every[rank], out=out), expected, f"{name} {shape} {rank}")
                    checked += 1
        counters = opened(comm).counters
        # The calls, and the two rounds of the self-test.
        assert counters.single + counters.launched == checked + 2
        assert counters.launched > 0 and counters.failed == 0
    return checked


@pytest.mark.parametrize("size", [2, 4, 8])
def test_operations_equal_their_references(modules: Any, size: int) -> None:
    """All dtypes sizes and batches, one by one and by graphs; and nothing stays."""
    for dtype in (torch.bfloat16, torch.int8, torch.float8_e4m3fn) if size < 8 else (torch.float32,):
        assert run_threads(size, operations, dtype, timeout_s=100) == [36] * size
    assert in_process._alive == {}


def counted(group: Group) -> None:
    with communicator(group, max_bytes=1 << 18) as comm:
        size = group.size
        for batch in (1, 3):
            x = make_input(1, group.rank, (batch, 4, 2 * size, 8), torch.bfloat16)
            y = comm.allocate_output(x, "scatter_heads")
            z = comm.allocate_output(y, "gather_heads")
            for _ in range(5):
                comm.scatter_heads(x, out=y)
                comm.gather_heads(y, out=z)
                assert_same_bits(z, x)


def test_one_copy_a_peer_whatever_the_batch(modules: Any) -> None:
    """The fewest that there can be: a copy engine takes rows of rows at once."""
    library = modules.library
    for size in (2, 4, 8):
        before = library.host_copied()
        run_threads(size, counted, timeout_s=60)
        enqueued = library.host_copied() - before
        # A graph's copies are enqueued once, when it is made: calls 1 and 2 of each operand one by one, then graphs.
        assert enqueued == size * (size - 1) * (2 + 2 * 2 * 2)


def rounds(group: Group, count: int) -> int:
    rank, size = group.rank, group.size
    with communicator(group, dtype=torch.int32) as comm:
        out = comm.allocate_output(torch.zeros(1, 1, size, 3, dtype=torch.int32), "exchange_chunks")
        xs = [torch.zeros(1, 1, size, 3, dtype=torch.int32) for _ in range(3)]
        for round_ in range(count):
            x = xs[round_ % 3]
            x.fill_(100 * round_ + rank)
            comm.exchange_chunks(x, out=out)
            assert out[0, 0, :, 1].tolist() == [100 * round_ + peer for peer in range(size)]
            if round_ % 5 == rank % 5:
                time.sleep(0.0005)
            if round_ % 7 == 0:
                opened(comm).barrier()
    return count


def test_calls_follow_each_other_without_synchronization() -> None:
    """G3: a rank that is ahead waits until the others' outputs are free; with ranks out of step."""
    assert run_threads(4, rounds, 150, timeout_s=60) == [150] * 4


# Graphs


def several_operands(group: Group, count: int) -> tuple[int, int, int]:
    size = group.size
    with communicator(group, dtype=torch.uint8) as comm:
        xs = [torch.full((1, 1, size, 4), 10 * i % 200, dtype=torch.uint8) for i in range(count)]
        out = comm.allocate_output(xs[0], "exchange_chunks")
        for _ in range(3):
            for x in xs:
                comm.exchange_chunks(x, out=out)
                assert torch.equal(out, x)
        counters = opened(comm).counters
        return counters.built, counters.dropped, counters.launched


def test_a_graph_is_made_for_operands_that_come_again() -> None:
    """Of memory that is seen once there is none; of what comes again, one each, and the oldest makes room."""
    assert run_threads(4, several_operands, 1) == [(1, 0, 2)] * 4
    assert run_threads(4, several_operands, 64, timeout_s=60) == [(64, 0, 128)] * 4
    # More than are remembered: they are new each time round.
    assert run_threads(4, several_operands, 65, timeout_s=60) == [(0, 0, 0)] * 4
    assert run_threads(2, several_operands, 3) == [(3, 0, 6)] * 2


def crowded(group: Group) -> tuple[int, int]:
    size = group.size
    with communicator(group, dtype=torch.uint8) as comm:
        first = [torch.full((1, 1, size, 4), i, dtype=torch.uint8) for i in range(100)]
        out = comm.allocate_output(first[0], "exchange_chunks")
        for x in first:
            for _ in range(3):
                comm.exchange_chunks(x, out=out)
                assert torch.equal(out, x)
        counters = opened(comm).counters
        return counters.built, counters.dropped


def test_graphs_make_room_for_others() -> None:
    """A serving process that meets ever new memory does not grow."""
    assert run_threads(4, crowded, timeout_s=60) == [(100, 36)] * 4


def by_hand(group: Group) -> tuple[int, int]:
    size = group.size
    with communicator(group, dtype=torch.uint8) as comm:
        x = torch.full((1, 1, size, 4), 9, dtype=torch.uint8)
        out = comm.allocate_output(x, "exchange_chunks")
        for _ in range(6):
            comm.exchange_chunks(x, out=out)
            assert torch.equal(out, x)
        counters = opened(comm).counters
        return counters.launched, counters.failed


@pytest.mark.parametrize("call", [b"cudaStreamBeginCapture", b"cudaStreamEndCapture", b"cudaGraphInstantiate"])
def test_a_rank_that_can_not_make_graphs_goes_on_without(
    modules: Any, caplog: pytest.LogCaptureFixture, call: bytes
) -> None:
    """How a rank enqueues is its own business: peers see no difference. It says so, once."""
    modules.library.host_fail(call, 1)
    with caplog.at_level(logging.WARNING, logger="comm_core"):
        outcomes = run_threads(4, by_hand)
    assert sorted(outcomes) == [(0, 1), (4, 0), (4, 0), (4, 0)] or sorted(outcomes) == [(0, 1), *[(5, 0)] * 3], (
        outcomes
    )
    texts = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    assert len(texts) == 1 and "out of memory" in texts[0]


class Stream:
    """A fake of what `_cuda` says about streams; one for all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing = 0, False
        monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
        monkeypatch.setattr(_cuda, "is_capturing", lambda: self.capturing)
        monkeypatch.setattr(_cuda, "wait_for_stream", lambda device, stream: None)


def captured(group: Group, stream: Stream) -> tuple[int, str]:
    size = group.size
    with communicator(group, dtype=torch.uint8) as comm:
        x = torch.full((1, 1, size, 4), 9, dtype=torch.uint8)
        out = comm.allocate_output(x, "exchange_chunks")
        new = torch.zeros(1, 1, size, 2, dtype=torch.uint8)
        comm.exchange_chunks(x, out=out)
        group.barrier("before")
        stream.capturing = True
        group.barrier("captured")
        before = opened(comm).counters.single
        for _ in range(4):
            comm.exchange_chunks(x, out=out)
        with pytest.raises(UnsupportedError, match="make the call once before the capture") as caught:
            comm.exchange_chunks(new, out=comm_output(comm, new))
        group.barrier("after")
        stream.capturing = False
        group.barrier("end")
        counters = opened(comm).counters
        comm.exchange_chunks(x, out=out)  # nothing is broken
        return counters.single - before, str(caught.value)


def comm_output(comm: UlyssesCommunicator, x: torch.Tensor) -> torch.Tensor:
    # Memory of an earlier registration: allocating is not for captures either.
    window = next(iter(opened(comm)._registered.values()))
    return window.local[: x.numel()].view(x.shape)


def test_captured_calls_are_enqueued_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: the caller's graph holds the copies themselves; a graph in a graph is none of them."""
    stream = Stream(monkeypatch)
    for single, text in run_threads(4, captured, stream):
        assert single == 4 and "exchange_chunks" in text


def bound(group: Group, streams: Any) -> str:
    with communicator(group, dtype=torch.uint8) as comm:
        x = torch.full((1, 1, group.size, 4), 9, dtype=torch.uint8)
        out = comm.allocate_output(x, "exchange_chunks")
        streams.now = 7
        group.barrier("first")
        comm.exchange_chunks(x, out=out)
        group.barrier("second")
        streams.now = 8
        group.barrier("third")
        with pytest.raises(UnsupportedError) as caught:
            comm.exchange_chunks(x, out=out)
        # Gathers and barriers are ordered by the session, on any stream.
        opened(comm).barrier()
        group.barrier("fourth")
        streams.now = 7
        group.barrier("fifth")
        comm.exchange_chunks(x, out=out)
        return str(caught.value)


def test_calls_stay_on_the_first_stream(monkeypatch: pytest.MonkeyPatch, modules: Any) -> None:
    """F2: another stream is refused on every rank, before anything is sent, and the communicator stays good."""

    class Streams:
        now = 0

    streams = Streams()
    monkeypatch.setattr(_cuda, "wait_for_stream", lambda device, stream: None)
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: streams.now)
    # The fake runtime knows no stream 7.
    real = FaultyEngine.__init__

    def on_the_null_stream(self: Engine, module: Any) -> None:
        real(self, module)
        exchange = self.exchange
        self.exchange = lambda stream, *fields: exchange(0, *fields)

    monkeypatch.setattr(FaultyEngine, "__init__", on_the_null_stream)
    texts = run_threads(2, bound, streams)
    assert texts[0] == texts[1] and "0x7" in texts[0] and "0x8" in texts[0]


# What is refused


def refused(group: Group) -> list[str]:
    size, texts = group.size, []
    with communicator(group) as comm:
        shape = (1, 4, 2 * size, 8)
        x = make_input(1, group.rank, shape, torch.bfloat16)
        out = comm.allocate_output(x, "scatter_heads")
        full = comm.allocate_output(x, "gather_heads")
        large = comm.allocate_output(torch.zeros(1, 8, 2 * size, 8, dtype=torch.bfloat16), "scatter_heads")
        moved = large.view(-1)[8:].narrow(0, 0, out.numel()).view(out.shape)
        band = out[:, :, :1].contiguous()
        calls: list[tuple[type[Exception], Callable[[], object]]] = [
            (ArgumentValueError, lambda: comm.scatter_heads(x)),
            (ArgumentValueError, lambda: comm.scatter_heads(x, out=torch.empty_like(out))),
            (ArgumentValueError, lambda: comm.scatter_heads(x, out=moved)),
            (UnsupportedError, comm.create_workspace),
            (ArgumentValueError, lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=0, head_count=1)),
            (
                UnsupportedError,
                lambda: comm.scatter_qkv_head_chunk(
                    x, x, x, head_offset=0, head_count=1, out=large.view(-1)[: 4 * size * 24].view(1, 4 * size, 1, 24)
                ),
            ),
            (
                UnsupportedError,
                lambda: comm.gather_output_head_chunk(band, local_heads=2, head_offset=0, out=full.view(1, 4, -1, 8)),
            ),
            (ArgumentValueError, lambda: comm.scatter_heads(x, out=out, workspace=workspace())),
        ]
        for error, call in calls:
            with pytest.raises(error) as caught:
                call()
            texts.append(str(caught.value))
            every = everyone(1, size, shape, torch.bfloat16)
            assert_same_bits(comm.scatter_heads(x, out=out), reference.scatter_heads(every)[group.rank])
    return texts


def workspace() -> Any:
    from comm_core import UlyssesWorkspace

    return UlyssesWorkspace(max_elems=4096, dtype=torch.bfloat16, device="cpu")


def test_what_the_specification_refuses_is_refused_and_changes_nothing() -> None:
    """Ordinary outputs, moved views, workspaces, head chunks: before anything is sent, and nothing breaks."""
    texts = run_threads(2, refused)
    assert texts[0] == texts[1]
    words = ["allocate_output", "ordinary memory", "does not begin where", "no staging", "needs out=", "head-chunk",
             "head-chunk", "workspace must be None"]  # fmt: skip
    assert len(words) == len(texts[0])
    for word, text in zip(words, texts[0], strict=True):
        assert word in text, text


def buffers(group: Group) -> bool:
    with communicator(group) as comm:
        x = make_input(1, group.rank, (1, 4, 2 * group.size, 8), torch.bfloat16)
        out = comm.allocate_output(x, "scatter_heads")
        again = comm.allocate_output(x, "scatter_heads")
        buffer = comm.input_buffer(out, x.shape)
        assert buffer.shape == x.shape and buffer.dtype == out.dtype
        same = comm.input_buffer(out, (x.numel(),)).data_ptr() == buffer.data_ptr()
        other = comm.input_buffer(again, x.shape).data_ptr() != buffer.data_ptr()
        buffer.copy_(x)
        every = everyone(1, group.size, x.shape, torch.bfloat16)
        assert_same_bits(comm.scatter_heads(buffer, out=out), reference.scatter_heads(every)[group.rank])
        for bad, shape in (
            (torch.empty_like(out), x.shape),
            (out[:, 1:], x.shape),
            (out, (*x.shape[:3], 9)),
            (out, (0, 1)),
            (out, (True, 4)),
        ):
            with pytest.raises(ArgumentValueError, match="input_buffer"):
                comm.input_buffer(bad, shape)
        for bad, shape in ((None, x.shape), (out, 4), (out, "4")):
            with pytest.raises(ArgumentTypeError, match="input_buffer"):
                comm.input_buffer(bad, shape)  # pyright: ignore[reportArgumentType]
        return same and other


def test_input_buffers_belong_to_exactly_one_output() -> None:
    """By its address: a view that begins elsewhere is another tensor, and has no buffer."""
    assert run_threads(2, buffers) == [True] * 2


def mixed_up(group: Group) -> tuple[int, str, bool]:
    comm = communicator(group, dtype=torch.float32)
    x = torch.ones(1, 2, group.size, 4)
    outs = [comm.allocate_output(x, "scatter_heads") for _ in range(2)]
    with pytest.raises(PeerStalledError) as caught:
        # Whoever is behind is told in the call that it is at, and its next one raises.
        for out in (outs[0], outs[group.rank == 1], outs[0], outs[0]):
            comm.scatter_heads(x, out=out)
    poisoned = any(bool(out.isnan().all()) for out in outs)
    del out, outs
    comm.close(timeout=10)
    return caught.value.waited_for, str(caught.value), poisoned


def test_outputs_of_different_registrations_are_found_out() -> None:
    """The announcement says which output it is: no rank takes what lies in the wrong place for a result."""
    outcomes = run_threads(3, mixed_up, timeout_s=30)
    assert any("passed another output" in text and "same allocate_output" in text for _, text, _ in outcomes)
    assert all(poisoned for *_, poisoned in outcomes)


def jointly(group: Group) -> list[str]:
    texts = []
    with communicator(group) as comm:
        x = torch.zeros(1, 2, 2 * group.size, 8, dtype=torch.bfloat16)
        for own, name, element in (
            (x if group.rank else "x", "scatter_heads", None),
            (x, "scatter_heads" if group.rank else "gather", None),
            (x if group.rank else x[:, :1].contiguous(), "scatter_heads", None),
            (x, "scatter_heads" if group.rank else "gather_heads", None),
        ):
            with pytest.raises(ValueError) as caught:
                comm.allocate_output(own, name, dtype=element)  # pyright: ignore[reportArgumentType]
            texts.append(str(caught.value))
        out = comm.allocate_output(x, "scatter_heads")
        comm.scatter_heads(x, out=out)
    return texts


def test_allocating_is_refused_on_every_rank_where_it_is_on_one() -> None:
    """C8: a rank that can't take part would leave the others in the middle of an allocation."""
    outcomes = run_threads(3, jointly, group_timeout_s=20)
    assert outcomes[1] == outcomes[2]
    for text in outcomes[1]:
        assert "rank 0" in text and "allocate_output" in text


# Stalls


def stall(group: Group, how: str, size: int) -> Any:
    comm = communicator(group, dtype=torch.float32)
    x = torch.ones(1, 4, size, 8)
    out, other = comm.allocate_output(x, "scatter_heads"), comm.allocate_output(x, "scatter_heads")
    for _ in range(3):
        comm.scatter_heads(x, out=out)
    if group.rank == 1:
        time.sleep(1.2)
        if how == "silent":
            comm.close(timeout=10)
            return None
    started = time.monotonic()
    comm.scatter_heads(x, out=out)  # the kernel gives up; the host does not know yet
    seconds = time.monotonic() - started
    with pytest.raises(PeerStalledError) as caught:
        comm.scatter_heads(x, out=other)
    with pytest.raises(TransportError, match="broken since an earlier failure"):
        comm.gather_heads(other)
    poisoned = bool(out.isnan().all())
    del out, other
    comm.close(timeout=10)
    return caught.value.waited_for, str(caught.value), poisoned, seconds


@pytest.mark.parametrize("how", ["silent", "late"])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_rank_that_does_not_come_is_named_by_all(monkeypatch: pytest.MonkeyPatch, how: str, size: int) -> None:
    """F17: outputs are NaN, the late rank is told too, and all close and free everything."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    outcomes = run_threads(size, stall, how, size, timeout_s=60, group_timeout_s=0.5)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and how == "silent":
            assert outcome is None
            continue
        waited_for, text, poisoned, seconds = outcome
        # What the late rank's copies have overwritten of another rank's is no NaN any more; its own output is.
        assert waited_for == 1 and (poisoned or rank != 1)
        assert seconds < 5 and "waiting for rank 1" in text and "scatter_heads" in text
    if how == "silent":
        assert all(outcome[2] for outcome in outcomes if outcome is not None)
    assert in_process._alive == {}


def replays(group: Group) -> Any:
    """After a stall go on as a graph does, which asks nobody."""
    comm = communicator(group, dtype=torch.float32)
    x = torch.ones(1, 4, group.size, 8)
    out = comm.allocate_output(x, "scatter_heads")
    for _ in range(3):
        comm.scatter_heads(x, out=out)
    if group.rank != 1:
        plan = next(plan for plan in opened(comm)._prepared if plan.operation == "scatter_heads")
        window = next(iter(opened(comm)._registered.values()))
        started = time.monotonic()
        for round_ in range(8):
            time.sleep(0.01 * (round_ % 3) * group.rank)
            opened(comm)._launch(plan, x, window, 4)
        seconds = time.monotonic() - started
        result = bool(out.isnan().all()), seconds
    else:
        time.sleep(2)
        result = None
    del out
    comm.close(timeout=10)
    return result


def test_outputs_stay_spoilt_while_a_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """F17: nobody stops a replay's copies, so each waits for the others' before it spoils; for the lost rank once."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.6")
    outcomes = run_threads(4, replays, timeout_s=60, group_timeout_s=0.6)
    for rank, outcome in enumerate(outcomes):
        assert rank == 1 or (outcome[0] and outcome[1] < 4), outcomes


# Failures on one rank at every stage


def refused_everywhere(group: Group) -> str:
    with pytest.raises(UlyssesBackendError) as caught:
        communicator(group)
    return str(caught.value)


def fallen_back(group: Group) -> tuple[str, str]:
    with communicator(group, "auto") as comm:
        return comm.backend, str(comm.fallback_reason)


STAGES = ("build", "allocate", "map", "arm")


@pytest.mark.parametrize("kind", ["raise", "system_exit"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_fails_on_one_rank_fails_on_all(host: HostTransport, stage: Any, rank: int, kind: Any) -> None:
    """C4, E6: by name every rank raises that rank's reason, and nothing is left."""
    host.faults = [Fault(stage, rank, kind, times=0)]
    texts = run_threads(3, refused_everywhere)
    assert len(set(texts)) == 1 and f"rank {rank}: " in texts[0] and "injected" in texts[0], texts
    assert in_process._alive == {}


@pytest.mark.parametrize("after", range(9))
def test_every_allocation_and_mapping_may_fail(host: HostTransport, after: int) -> None:
    """The first of the signals, the windows, and so on: each leaves nothing."""
    host.faults = [Fault("allocate", 1, "raise", after=after, times=1)]
    texts = run_threads(2, opens_or_says)
    assert texts[0] == texts[1] and ("rank 1" in texts[0] or texts[0] == "open")
    assert in_process._alive == {}


def opens_or_says(group: Group) -> str:
    try:
        with communicator(group):
            return "open"
    except UlyssesBackendError as error:
        return str(error)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(("stage", "text"), [("selftest", "stores into peer memory"), ("exchange", "copy engines")])
def test_wrong_bytes_on_one_rank_veto_for_all(host: HostTransport, stage: Any, text: str, rank: int) -> None:
    """B1: both planes are tested over the memory that calls use, by value."""
    host.faults = [Fault(stage, rank, "wrong_data", times=0)]
    texts = run_threads(3, refused_everywhere)
    assert len(set(texts)) == 1 and f"rank {rank}: self-test" in texts[0] and text in texts[0]
    assert "are wrong, the first at" in texts[0] and in_process._alive == {}


@pytest.mark.parametrize("call", [b"cudaStreamCreateWithFlags", b"cudaEventCreateWithFlags"])
@pytest.mark.parametrize("after", [0, 2])
def test_an_engine_that_can_not_be_made_leaves_nothing(modules: Any, call: bytes, after: int) -> None:
    """E6: what it had made by then is released, on the rank that failed and on the others."""
    modules.library.host_fail(call, after)
    texts = run_threads(2, refused_everywhere)
    assert texts[0] == texts[1] and "out of memory" in texts[0] and "engine" in texts[0]


def failing_call(group: Group, rank: int) -> Any:
    comm = communicator(group, dtype=torch.float32)
    x = torch.ones(1, 4, group.size, 8)
    out = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=out)
    here.injector._faults.append(Fault("exchange", rank, "raise", times=0)) if group.rank == rank else None
    text, waited = "", -1
    try:
        comm.scatter_heads(x, out=out)
        comm.scatter_heads(x, out=out)
    except PeerStalledError as error:
        waited = error.waited_for
    except TransportError as error:
        text = str(error)
    del out
    comm.close(timeout=10)
    return waited, text


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_call_that_fails_on_one_rank_ends_on_all(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """F17: the rank itself raises its reason, the others name it at the deadline, and all close."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    outcomes = run_threads(3, failing_call, rank, timeout_s=60, group_timeout_s=5)
    for number, (waited, text) in enumerate(outcomes):
        assert ("injected" in text) if number == rank else waited == rank, outcomes
    assert in_process._alive == {}


def half_enqueued(group: Group, library: Any) -> str:
    comm = communicator(group, dtype=torch.float32)
    x = torch.ones(1, 4, group.size, 8)
    out = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=out)
    group.barrier("before")
    if group.rank == 0:
        library.host_fail(b"cudaMemcpy3DAsync", 0)
    group.barrier("ordered")
    texts = []
    # Memory that is new, so that the copies are enqueued and not put into a graph.
    other = torch.ones_like(x)
    for _ in range(2):
        try:
            comm.scatter_heads(other, out=out)
        except TransportError as error:
            texts.append(str(error))
    del out
    comm.close(timeout=10)
    return " | ".join(texts)


def test_a_copy_that_cuda_refuses_breaks_the_communicator(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no refusal: the rank has announced its output by then. The other one ends at its deadline."""
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.5")
    texts = sorted(run_threads(2, half_enqueued, modules.library, group_timeout_s=5), key=len)
    assert "waiting for rank" in " ".join(texts) and any(
        "out of memory" in text and "broken since an earlier failure" in text for text in texts
    ), texts


def closing(group: Group, rank: int, times: int) -> list[str]:
    comm = communicator(group)
    if group.rank == rank:
        here.injector._faults.append(Fault("close", rank, "raise", times=times))
    texts = []
    for _ in range(3):
        try:
            comm.close(timeout=10)
            texts.append("closed")
        except JointError as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_close_that_fails_on_one_rank_is_tried_again_by_all(rank: int) -> None:
    """E5: three times by itself, then on every rank's next call."""
    for texts in run_threads(2, closing, rank, 2):
        assert texts == ["closed"] * 3
    for texts in run_threads(2, closing, rank, 4):
        assert f"rank {rank}" in texts[0] and "injected" in texts[0] and texts[1:] == ["closed"] * 2
    assert in_process._alive == {}


def half_closed(group: Group, rank: int) -> None:
    comm = communicator(group)
    session, x = opened(comm), torch.zeros(1, 1, group.size, 24, dtype=torch.uint8)
    out = comm.allocate_output(x, "exchange_chunks", dtype=torch.uint8)

    def spoil() -> None:
        if group.rank == rank:
            # The three attempts of one close.
            here.injector._faults.append(Fault("close", rank, "raise", times=3))

    close_in_two(session, group, spoil=spoil, more={"input_buffer": lambda: session.input_buffer(out, x.shape)})
    comm.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_but_close_is_done_after_a_close_that_failed(rank: int) -> None:
    """E6: an engine can't be closed. Every call is refused at once, on every rank, and says what to do."""
    run_threads(2, half_closed, rank)
    assert in_process._alive == {}


def test_a_rank_that_is_missing_from_the_opening_is_named() -> None:
    def rank(group: Group) -> Any:
        if group.rank == 1:
            return None
        with pytest.raises(CommError) as caught:
            communicator(group)
        return getattr(caught.value, "missing", None)

    assert run_threads(3, rank, group_timeout_s=0.5) == [(1,), None, (1,)]


# Links


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("drop-stores", "ranks 1→2: kernel stores: 1024 of 1024 words are wrong"),
        ("flip-stores", "ranks 1→2: kernel stores: 1 of 1024 words are wrong, the first at 7"),
        ("drop-copies", "ranks 1→2: copy engine: 1024 of 1024 words are wrong"),
        ("flip-copies", "ranks 1→2: copy engine: "),
        ("deny", "ranks 1→2: kernel stores: it can't be tested: CUDA denies peer access"),
    ],
)
def test_a_link_that_does_not_work_vetoes_for_the_group(
    monkeypatch: pytest.MonkeyPatch, fault: str, text: str
) -> None:
    """B1: the reason says which plane and which pair, and what may be to blame; nothing was allocated."""
    monkeypatch.setenv("HOST_LINK_FAULT", f"{fault}:1:2")
    texts = run_threads(3, refused_everywhere)
    assert len(set(texts)) == 1 and text in texts[0] and "an IOMMU is on" in texts[0]
    assert in_process._alive == {}


def test_auto_takes_something_else_where_a_link_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: and says why. Threads have no gloo, so there is nothing else here."""
    monkeypatch.setenv("HOST_LINK_FAULT", "drop-copies:0:1")

    def rank(group: Group) -> str:
        with pytest.raises(UlyssesBackendError) as caught:
            communicator(group, "auto")
        return str(caught.value)

    texts = run_threads(2, rank)
    assert texts[0] == texts[1] and "ranks 0→1: copy engine" in texts[0]


@pytest.mark.parametrize("fault", ["hang-stores", "hang-copies"])
def test_a_link_that_hangs_is_ended_and_vetoes(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """B2: the test runs in a process of its own, which is killed when it does not answer; nobody hangs with it."""
    monkeypatch.setenv("HOST_LINK_FAULT", f"{fault}:1:0")
    monkeypatch.setattr(selftest, "_QUIET_S", 1.5)
    monkeypatch.setenv("COMM_TIMEOUT_S", "3")
    started = time.monotonic()
    texts = run_threads(2, refused_everywhere, group_timeout_s=3)
    assert time.monotonic() - started < 15
    plane = "kernel stores" if "stores" in fault else "copy engine"
    assert texts[0] == texts[1] and f"ranks 1→0: {plane}: no answer within 1.5 s" in texts[0]


def test_a_test_that_dies_vetoes_and_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    """B2: a driver that ends the process that tests names the pair; one that never begins is no verdict on any."""
    monkeypatch.setenv("HOST_LINK_FAULT", "crash-copies:1:0")
    texts = run_threads(2, refused_everywhere)
    assert texts[0] == texts[1] and "ranks 1→0: copy engine: the test ended with signal 6" in texts[0]
    selftest.forget()
    with pytest.raises(TransportError, match=r"did not begin: the test ended with exit code 1 \(.*no such library"):
        selftest.run_tests(Path("/no such library"), [(gpu_uuid(0), gpu_uuid(1))])
    assert selftest._known == {}


def test_verdicts_are_kept_a_process_and_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second communicator tests nothing, a larger group only the pairs that are new, and a bad pair stays so."""
    asked: list[list[tuple[str, str]]] = []
    real = selftest.run_tests

    def run_tests(library: Any, pairs: Any, **more: Any) -> Any:
        asked.append(list(pairs))
        return real(library, pairs, **more)

    monkeypatch.setattr(selftest, "run_tests", run_tests)
    for size in (2, 2, 4, 2):
        run_threads(size, opens_or_says)
    assert [len(pairs) for pairs in asked] == [2, 0, 10, 0]
    selftest._known[gpu_uuid(1), gpu_uuid(0)] = "copy engine: wrong"
    assert "ranks 1→0: copy engine: wrong" in run_threads(2, opens_or_says)[1]


# Warnings


def test_it_warns_once_that_it_is_experimental(host: HostTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a process, by name or by "auto"; and of a preference that can't be met."""
    monkeypatch.setattr(pcie_warnings, "_given", set())
    host.requested, host.reason = "prefer-rdma", "there is no RDMA device"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for backend in ("pcie", "auto"):
            run_threads(2, opens_with, backend)
    kinds = [item.category for item in caught]
    # Two ranks of one process may both be the first.
    assert set(kinds) == {ExperimentalWarning, RouteWarning} and len(kinds) <= 4, kinds
    texts = [str(item.message) for item in caught if item.category is RouteWarning]
    assert "prefer-rdma" in texts[0] and "'p2p'" in texts[0] and "no RDMA device" in texts[0]


def opens_with(group: Group, backend: str) -> None:
    with communicator(group, backend) as comm:
        assert (comm.backend, comm.transport) == ("pcie", "p2p")
        assert str(comm.fallback_reason).endswith("there is no RDMA device")


def test_where_warnings_are_errors_it_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's filter must not leave the others in the opening."""
    monkeypatch.setattr(pcie_warnings, "_given", set())
    texts = run_threads(2, refused_everywhere)
    assert texts[0] == texts[1] and "experimental" in texts[0] and "open transport 'pcie': warn" in texts[0]
