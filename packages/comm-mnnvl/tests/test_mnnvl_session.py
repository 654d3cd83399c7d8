"""Sessions of transport ``mnnvl``, whole, over a fake driver: operations, checkpoint, restore, every wrong order."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, _cuda, jit, plugins
from comm_core.comm_backend import CommBackendGroup, TorchDistBackend
from comm_core.errors import (
    CheckpointError,
    ClosedError,
    CommError,
    JointError,
    TransportError,
    UlyssesBackendError,
    UnsupportedError,
)
from comm_core.group import Group, StoreGroup, thread_groups
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import reference
from comm_core.testing.every_operation import every_operation
from comm_core.testing.fake_driver import FakeDriver
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.transport.interface import Verdict
from comm_core.windows import launch, session
from comm_core.windows.launch import Calls
from comm_mnnvl.transport import MnnvlTransport

CPU = torch.device("cpu")
_STRUCT = struct.calcsize(launch._SESSION)


class HostTransport(MnnvlTransport):
    """The transport for CPU tensors."""

    experimental = False

    def assess(self, request: Any, facts: Any) -> Verdict:
        return Verdict(True, "threads share everything", {"handle": "posix_fd", "blocks_per_peer": 1})


@pytest.fixture(autouse=True)
def _transport() -> Iterator[None]:
    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[HostTransport]:
            return [HostTransport()]

    installed = plugins.registry().transports.get("mnnvl")
    assert installed is None, "these tests bring the plugin themselves"
    plugins.register("mnnvl over fakes", Plugin())
    yield
    plugins.unregister("mnnvl over fakes")


def communicator(group: Group, **changes: Any) -> UlyssesCommunicator:
    arguments = {"max_bytes": 1 << 16, "dtype": torch.bfloat16, "device": CPU, **changes}
    return UlyssesCommunicator(group, backend="mnnvl", **arguments)


class Groups:
    """Fresh groups of the same threads, as many as a test wants: what a restored job makes anew."""

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        self._size, self._timeout_s = size, timeout_s
        self._made: dict[Any, list[StoreGroup]] = {}
        self._lock = threading.Lock()

    def __call__(self, key: Any, rank: int, size: int | None = None) -> StoreGroup:
        """Return the member `rank` of the group named `key`."""
        with self._lock:
            if key not in self._made:
                self._made[key] = thread_groups(size or self._size, name=f"group {key}", timeout_s=self._timeout_s)
            return self._made[key][rank]


def operations(group: Group, dtype: torch.dtype) -> int:
    with communicator(group, dtype=dtype) as comm:
        assert (comm.backend, comm.transport) == ("mnnvl", "posix_fd")
        return every_operation(comm, [(1, 3, 1, 5), (2, 4, 2, 16), (3, 2, 3, 1)], strided=lambda rank: True)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_operations_equal_their_references(driver: FakeDriver, size: int) -> None:
    """Through the same plans as every transport, over memory that the driver maps; and nothing stays."""
    for dtype in (torch.bfloat16, torch.int8) if size < 8 else (torch.float32,):
        assert min(run_threads(size, operations, dtype, timeout_s=60)) > 20


# Checkpoint and restore


class Recorder(Calls):
    """Keeps the last launch with all its arguments, as a captured graph does, and can make it again."""

    last: tuple[Any, ...] = ()

    def exchange(self, *arguments: Any) -> None:
        # By value, as a graph has it: the session makes a new struct when it gets a window.
        stream, struct_at, *rest = arguments
        held = ctypes.create_string_buffer(ctypes.string_at(struct_at, _STRUCT), _STRUCT)
        self.last = (held, stream, ctypes.addressof(held), *rest)
        super().exchange(*arguments)

    def replay(self) -> None:
        super().exchange(*self.last[1:])


def expected(comm: UlyssesCommunicator, seed: int, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    everyone = [make_input(seed, peer, shape, comm.dtype) for peer in range(comm.world_size)]
    return everyone[comm.rank], reference.scatter_heads(everyone)[comm.rank]


def cycle(group: Group, groups: Groups, driver: FakeDriver, cycles: int) -> list[dict[str, int]]:
    """Capture, prepare, use memory for other things, restore with a new group, replay, call; over and over."""
    comm = communicator(group)
    session: Any = comm._session
    calls = session._calls
    shape = (2, 4, 2 * comm.world_size, 8)
    x, _ = expected(comm, 0, shape)
    x = x.clone()
    out = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=out)
    captured = calls.last
    addresses = [item.addresses for item in session.allocations()]
    marks: list[dict[str, int]] = []
    for number in range(cycles):
        comm.checkpoint_prepare()
        comm.checkpoint_prepare()
        with pytest.raises(CheckpointError, match="detached since checkpoint_prepare"):
            comm.scatter_heads(x, out=out)
        with pytest.raises(CheckpointError):
            comm.allocate_output(x, "scatter_heads")
        assert session.state == "detached" and "detached" in repr(comm)
        assert (comm.rank, comm.world_size) == (group.rank, group.size)
        # Whoever allocates now may get the physical memory, never the addresses.
        other = torch.full((1 << 20,), number, dtype=torch.uint8)
        fresh = groups(number, group.rank)
        comm.checkpoint_restore(fresh)
        comm.checkpoint_restore(fresh)
        assert session.state == "attached"
        assert [item.addresses for item in session.allocations()] == addresses
        data, result = expected(comm, number + 1, shape)
        x.copy_(data)
        calls.last = captured
        calls.replay()
        assert_same_bits(out, result)
        assert_same_bits(comm.scatter_heads(x), result)
        later = comm.allocate_output(x, "scatter_heads") if number == 0 else out
        assert_same_bits(comm.scatter_heads(x, out=later), result)
        addresses = [item.addresses for item in session.allocations()]
        fresh.barrier("done")
        assert int(other[0]) == number % 256
        if group.rank == 0 and number in (1, cycles - 1):
            marks.append({**driver.alive(), "descriptors": len(list(Path("/proc/self/fd").iterdir()))})
        fresh.barrier("marked")
    comm.close()
    return marks


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "Calls", Recorder)


@pytest.mark.parametrize("size", [2, 4])
def test_captured_calls_replay_after_a_restore_with_a_new_group(
    driver: FakeDriver, recorded: None, size: int
) -> None:
    """H3: at the same addresses, with right results; repeated calls do nothing; the old group is never used again."""
    run_threads(size, cycle, Groups(size), driver, 3, timeout_s=60)


def test_a_hundred_cycles_leave_nothing_behind(driver: FakeDriver, recorded: None) -> None:
    """E4, H2: neither a handle, nor a mapping, nor a reservation, nor a descriptor."""
    marks = run_threads(2, cycle, Groups(2), driver, 100, timeout_s=110)[0]
    assert len(marks) == 2 and marks[0] == marks[1]


# Orders and failures, through the front


def refusals(group: Group, groups: Groups) -> int:
    comm = communicator(group)
    session: Any = comm._session
    shape = (1, 4, 2 * comm.world_size, 8)
    x, result = expected(comm, 1, shape)
    out = comm.allocate_output(x, "scatter_heads")
    comm.checkpoint_prepare()
    calls: list[Callable[[], object]] = [
        lambda: comm.scatter_heads(x, out=out),
        lambda: comm.gather_heads(x),
        lambda: comm.exchange_chunks(torch.zeros(1, 1, comm.world_size, 4, dtype=comm.dtype)),
        lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=0, head_count=1),
        lambda: comm.allocate_output(x, "scatter_heads"),
        lambda: comm.create_workspace(),
        lambda: comm.prepare_qkv((1, 4, 2 * comm.world_size, 8)),
        lambda: comm.check(),
        # What stands on the session itself, as codecs and all-reduce do.
        lambda: session.barrier(),
        lambda: session.window(64),
        lambda: session.launch_context(),
        lambda: session.all_gather_small(torch.zeros(4), torch.zeros(4 * comm.world_size)),
        lambda: session._group.gather("anything", None),
    ]
    for call in calls:
        with pytest.raises(CheckpointError):
            call()
    comm.checkpoint_restore(groups("new", group.rank))
    assert_same_bits(comm.scatter_heads(x, out=out), result)
    session.window(64)
    comm.close()
    for call in (comm.checkpoint_prepare, lambda: comm.checkpoint_restore(groups("never", group.rank))):
        with pytest.raises(ClosedError):
            call()
    return len(calls)


def test_every_call_while_detached_is_refused(driver: FakeDriver) -> None:
    """H2: nothing is enqueued for memory that is not there, and nothing is asked of a group that may be gone."""
    assert run_threads(2, refusals, Groups(2)) == [13, 13]


def closes_detached(group: Group, first: threading.Event) -> str:
    comm = communicator(group)
    comm.allocate_output(torch.zeros(1, 4, 2 * group.size, 8, dtype=comm.dtype), "scatter_heads")
    comm.checkpoint_prepare()
    if group.rank:
        assert first.wait(10)
    comm.close(timeout=0.1)
    first.set()
    return comm._session.state  # pyright: ignore


def test_closing_while_detached_needs_nobody(driver: FakeDriver) -> None:
    """H2: windows that were added later included."""
    assert run_threads(2, closes_detached, threading.Event()) == ["closed", "closed"]


def checked(group: Group, groups: Groups) -> bool:
    """COMM_CHECK=1 agrees on every call through the group, so through the new one after a restore."""
    comm = communicator(group)
    x, result = expected(comm, 1, (1, 4, 2 * comm.world_size, 8))
    assert_same_bits(comm.scatter_heads(x), result)
    comm.checkpoint_prepare()
    comm.checkpoint_restore(CommBackendGroup(TorchDistBackend(groups("new", group.rank))))
    assert_same_bits(comm.scatter_heads(x), result)
    with pytest.raises(JointError):
        comm.scatter_heads(x if group.rank else x[:, :2].contiguous())
    comm.close()
    return True


def test_checked_mode_goes_on_through_the_new_group(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_CHECK", "1")
    assert run_threads(2, checked, Groups(2)) == [True, True]


def stalled(group: Group) -> str:
    comm = communicator(group)
    x, _ = expected(comm, 1, (1, 4, 2 * comm.world_size, 8))
    if group.rank == 0:
        comm.scatter_heads(x)
    group.barrier("rank 0 has given up", timeout_s=10)
    with pytest.raises((JointError, TransportError)) as caught:
        comm.checkpoint_prepare()
    assert comm._session.state == "attached"  # pyright: ignore
    comm.close()
    return str(caught.value)


def test_a_stalled_session_is_not_detached(driver: FakeDriver) -> None:
    """H2: it is broken, and everybody hears why instead of losing the memory as well."""
    texts = run_threads(2, stalled, timeout_s=60, group_timeout_s=2.0)
    assert all("gave up" in text and "waiting for rank 1" in text for text in texts)


class Wrong(Calls):
    """Delivers a wrong byte on rank 1 from a certain moment on."""

    spoil = threading.Event()

    def exchange(self, *arguments: Any) -> None:
        super().exchange(*arguments)
        if self.spoil.is_set() and threading.current_thread().name == "rank 1":
            ctypes.memset(arguments[4] + 5, 0x77, 1)


def wrong_after_restore(group: Group, groups: Groups) -> str:
    comm = communicator(group)
    comm.checkpoint_prepare()
    group.barrier("prepared")
    Wrong.spoil.set()
    with pytest.raises(CheckpointError) as caught:
        comm.checkpoint_restore(groups("new", group.rank))
    x = torch.zeros(1, 4, 2 * group.size, 8, dtype=comm.dtype)
    for call in (lambda: comm.scatter_heads(x), comm.checkpoint_prepare, lambda: comm.checkpoint_restore(group)):
        with pytest.raises(CommError, match="half-way"):
            call()
    assert comm._session.state == "failed" and "broken" in repr(comm)  # pyright: ignore
    comm.close(timeout=0.1)
    # Nobody knows what is mapped where, so a peer may still write it.
    assert all(item.memory.kept for item in comm._session.allocations())  # pyright: ignore
    return str(caught.value)


def test_what_comes_back_is_tested_by_value(kept: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """H1, B1: bytes that do not arrive after a restore end it on every rank, and that is final."""
    monkeypatch.setattr(session, "Calls", Wrong)
    try:
        texts = run_threads(2, wrong_after_restore, Groups(2), timeout_s=30)
    finally:
        Wrong.spoil.clear()
    assert texts[0] == texts[1] and "self-test" in texts[0] and "rank 1: " in texts[0] and "half-way" in texts[0]


def two_groups(group: Group, groups: Groups) -> int:
    """A communicator of all ranks and one of each pair; one is detached while the other works."""
    pair = groups(("pair", group.rank // 2), group.rank % 2, 2)
    whole, part = communicator(group), communicator(pair)
    for round_ in range(4):
        one, other = (whole, part) if round_ % 2 else (part, whole)
        members = group if round_ % 2 else pair
        one.checkpoint_prepare()
        x, result = expected(other, round_, (1, 4, 2 * other.world_size, 8))
        assert_same_bits(other.scatter_heads(x), result)
        one.checkpoint_restore(members)
        for comm in (one, other):
            x, result = expected(comm, round_, (1, 4, 2 * comm.world_size, 8))
            assert_same_bits(comm.scatter_heads(x), result)
    part.close()
    whole.close()
    return round_


def test_two_groups_of_one_process_never_disturb_each_other(driver: FakeDriver) -> None:
    """C1: overlapping groups, each with its own memory and its own checkpoints."""
    assert run_threads(4, two_groups, Groups(4), timeout_s=60) == [3] * 4


def between_hosts(group: Group, cluster: Any, groups: Groups) -> int:
    cluster.enter(group.rank)
    comm = communicator(group)
    assert comm.transport == "fabric"
    count = every_operation(comm, [(1, 3, 1, 5), (2, 4, 2, 16)], strided=lambda rank: True)
    comm.checkpoint_prepare()
    comm.checkpoint_restore(groups("new", group.rank))
    count += every_operation(comm, [(2, 4, 2, 16)], strided=lambda rank: False)
    comm.close()
    return count


def test_the_same_plans_run_between_hosts(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fabric handles instead of descriptors, and nothing else is different."""

    def fabric(self: HostTransport, request: Any, facts: Any) -> Verdict:
        return Verdict(True, "one fabric", {"handle": "fabric", "blocks_per_peer": 1})

    monkeypatch.setattr(HostTransport, "assess", fabric)
    monkeypatch.setattr(_cuda, "is_current", lambda index: True)
    made = cluster(2, 2)
    assert min(run_threads(4, between_hosts, made, Groups(4), timeout_s=60)) > 20
    assert made.alive() == {}


def cut_off(group: Group, cluster: Any) -> str:
    cluster.enter(group.rank)
    with pytest.raises(UlyssesBackendError) as caught:
        communicator(group)
    return str(caught.value)


def test_a_fabric_that_fails_is_everybodys_reason(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C3, C4: asked for by name it raises on every rank, before anything is built or allocated; nothing stays."""

    def fabric(self: HostTransport, request: Any, facts: Any) -> Verdict:
        return Verdict(True, "one fabric", {"handle": "fabric", "blocks_per_peer": 1})

    monkeypatch.setattr(HostTransport, "assess", fabric)
    made = cluster(2, 1)
    made.fabric.unreachable.add(("host 1", "host 0"))

    def build(spec: Any, device: torch.device) -> Any:
        raise AssertionError("the kernels are built before the fabric was tried")

    monkeypatch.setattr(jit, "load", build)
    texts = run_threads(2, cut_off, made)
    assert texts[0] == texts[1] and "rank 0: the memory of rank 1 can't be mapped" in texts[0]
    assert "imex" in texts[0] and made.alive() == {}


def test_other_transports_say_that_they_can_not(ranks: Any) -> None:
    """H2: on every rank, and the communicator goes on."""
    assert ranks.run(over_gloo, ranks=2) == [True, True]


def over_gloo(process_group: Any) -> bool:
    with UlyssesCommunicator(
        process_group, max_bytes=1 << 12, dtype=torch.float32, device=CPU, backend="gloo"
    ) as comm:
        for call in (comm.checkpoint_prepare, lambda: comm.checkpoint_restore(process_group)):
            with pytest.raises(UnsupportedError, match="use backend 'mnnvl'"):
                call()
        x, result = expected(comm, 1, (1, 4, 4, 8))
        assert_same_bits(comm.scatter_heads(x), result)
    return True
