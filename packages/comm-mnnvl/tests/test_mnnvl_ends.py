"""A `close` that fails, and calls of two threads: what is left is never touched, and no rank waits for nothing."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, _cuda, plugins
from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import CheckpointError, ClosedError, CommError, GroupTimeoutError, JointError
from comm_core.group import Group
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing.fake_driver import FakeDriver
from comm_core.testing.ranks import run_threads
from comm_core.transport.interface import Verdict
from comm_mnnvl import SymmDeviceMemory
from comm_mnnvl.transport import MnnvlTransport


def symmetric(group: Group) -> SymmDeviceMemory:
    return SymmDeviceMemory(5000, group.size, group.rank, group.rank % 8, TorchDistBackend(group))


def refused(memory: SymmDeviceMemory, group: Group) -> None:
    """Raise unless everything that would touch the memory is refused, and nobody is asked."""
    calls: list[Callable[[], object]] = [
        lambda: memory.tensor(1, 0, 1),
        lambda: memory.multicast_tensor(0, 1, torch.uint8),
        lambda: memory.lamport_initialize(group.rank, torch.float32),
        memory.checkpoint_prepare,
        lambda: memory.checkpoint_restore(group),
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert (memory.state, memory.mapped) == ("closed", False)


def left_alone(group: Group, over: threading.Event) -> str:
    memory = symmetric(group)
    if group.rank == 1:
        assert over.wait(30)
        with pytest.raises(GroupTimeoutError, match="came too late"):
            memory.close()
    else:
        with pytest.raises(GroupTimeoutError, match=r"no word from rank 1.* are kept until this process ends"):
            memory.close(timeout=0.2)
        over.set()
    refused(memory, group)
    memory.close()  # Nobody is waited for again: what could be released is released.
    return memory.state


def test_memory_that_was_given_up_at_close_is_closed(kept: FakeDriver) -> None:
    """H5: the peers' memory is unmapped then, so a tensor over it would end the process."""
    assert run_threads(2, left_alone, threading.Event(), timeout_s=60) == ["closed", "closed"]


def restored_and_left_alone(group: Group, over: threading.Event) -> tuple[bool, int]:
    memory = symmetric(group)
    memory.checkpoint_prepare()
    memory.checkpoint_restore(group)
    memory.tensor(group.rank, 0, 1).fill_(40 + group.rank)
    group.barrier("filled")
    own = memory.uc_ptrs[group.rank]
    if group.rank == 1:
        assert over.wait(30)
    with pytest.raises(GroupTimeoutError):
        memory.close(timeout=0.2)
    over.set()
    kept = memory._mapped.memory
    assert kept is not None
    return kept.kept, ctypes.string_at(own, 1)[0] if kept.kept else 0


def test_memory_that_came_back_is_kept_where_a_peer_may_write_it(kept: FakeDriver) -> None:
    """H5: it was exported again, so it is kept as it would have been before the checkpoint."""
    assert run_threads(2, restored_and_left_alone, threading.Event(), timeout_s=60) == [(True, 40), (True, 41)]


COUNTING = threading.Lock()


def descriptors() -> int:
    """Count them; looking is one itself, so one rank looks at a time."""
    with COUNTING:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))


def export_fails(group: Group, driver: FakeDriver) -> tuple[int, str]:
    memory = symmetric(group)
    memory.checkpoint_prepare()
    group.barrier("prepared")
    before = descriptors()
    group.barrier("counted before")
    if group.rank == 0:
        # One of the two ranks' exports, whichever comes first; the other one holds a descriptor and a socket then.
        driver.fail("cuMemExportToShareableHandle")
    group.barrier("spoilt")
    with pytest.raises(CheckpointError) as caught:
        memory.checkpoint_restore(group)
    group.barrier("refused")
    after = descriptors()
    group.barrier("counted")
    memory.close()
    return after - before, str(caught.value)


def test_a_restore_that_fails_leaves_no_descriptor_of_an_exchange(kept: FakeDriver) -> None:
    """E4: where one rank can't export, the others have what they would have passed on, and nobody takes it."""
    outcomes = run_threads(2, export_fails, kept)
    assert outcomes[0][1] == outcomes[1][1]
    # The fake's memory is a descriptor of its own; each rank has allocated its memory again.
    assert [extra for extra, _ in outcomes] == [2, 2]


def half_closed(group: Group, driver: FakeDriver) -> list[str]:
    memory = symmetric(group)
    group.barrier("opened")
    if group.rank == 1:
        driver.fail("cuMemUnmap", times=1000)
    group.barrier("spoilt")
    texts: list[str] = []
    for _ in range(2):
        with pytest.raises(JointError, match="can't be unmapped") as caught:
            memory.close()
        texts.append(str(caught.value))
        refused(memory, group)
    group.barrier("refused")
    driver.fail("cuMemUnmap", times=0)
    group.barrier("mended")
    memory.close()
    memory.close()
    return texts


def test_a_close_that_fails_half_way_can_be_repeated_and_nothing_else(driver: FakeDriver) -> None:
    """E6: and in the end nothing is left."""
    texts = run_threads(2, half_closed, driver, timeout_s=60)
    assert texts[0] == texts[1]


class World:
    """An MPI world of one rank, as mpi4py shows it."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, data: Any) -> list[Any]:
        return [data]


def test_restoring_without_a_backend_is_as_making_without_one(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where torch.distributed is not initialized: the ranks of MPI's world."""
    mpi = SimpleNamespace(COMM_WORLD=World(), COMM_NULL=None)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    with SymmDeviceMemory(5000, 1, 0, 0) as memory:
        memory.checkpoint_prepare()
        memory.checkpoint_restore(None)
        memory.tensor(0, 0, 8).fill_(3)


# Communicators


class HostTransport(MnnvlTransport):
    """The transport for CPU tensors."""

    experimental = False

    def assess(self, request: Any, facts: Any) -> Verdict:
        return Verdict(True, "threads share everything", {"handle": "posix_fd", "blocks_per_peer": 1})


@pytest.fixture
def _transport() -> Iterator[None]:
    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[HostTransport]:
            return [HostTransport()]

    plugins.register("mnnvl over fakes", Plugin())
    yield
    plugins.unregister("mnnvl over fakes")


def communicator(group: Group) -> UlyssesCommunicator:
    return UlyssesCommunicator(
        group, max_bytes=1 << 14, dtype=torch.bfloat16, device=torch.device("cpu"), backend="mnnvl"
    )


def half_closed_communicator(group: Group, driver: FakeDriver) -> bool:
    comm = communicator(group)
    x = torch.zeros(1, 4, 2 * group.size, 8, dtype=comm.dtype)
    out = comm.allocate_output(x, "scatter_heads")
    group.barrier("opened")
    if group.rank == 1:
        driver.fail("cuMemUnmap", times=1000)
    group.barrier("spoilt")
    with pytest.raises(JointError, match="can't be unmapped"):
        comm.close()
    for call in (lambda: comm.scatter_heads(x, out=out), lambda: comm.scatter_heads(x), comm.check):
        with pytest.raises(ClosedError, match="call close on every rank again"):
            call()
    for change in (comm.checkpoint_prepare, lambda: comm.checkpoint_restore(group)):
        with pytest.raises(ClosedError, match=r"closing .* has begun"):
            change()
    driver.fail("cuMemUnmap", times=0)
    group.barrier("mended")
    comm.close()
    return True


@pytest.mark.usefixtures("_transport")
def test_windows_that_are_half_closed_are_not_used(driver: FakeDriver) -> None:
    """E6: some windows are unmapped, so neither a call nor a checkpoint may touch them."""
    assert run_threads(2, half_closed_communicator, driver, timeout_s=60) == [True, True]


def half_closed_alone(group: Group, driver: FakeDriver) -> str:
    comm = communicator(group)
    session: Any = comm._session
    comm.checkpoint_prepare()
    group.barrier("detached")
    if group.rank == 1:
        driver.fail("cuMemAddressFree", times=1000)
        with pytest.raises(CommError, match="can't take down"):
            comm.close()
        for change in (comm.checkpoint_prepare, lambda: comm.checkpoint_restore(group), session.check):
            with pytest.raises(ClosedError, match=r"rank 1: .*closing .* has begun"):
                change()
        driver.fail("cuMemAddressFree", times=0)
    group.barrier("mended")
    comm.close()
    with pytest.raises(ClosedError, match=f"rank {group.rank}: a call: this session of transport 'mnnvl' is closed"):
        session.check()
    return session.state


@pytest.mark.usefixtures("_transport")
def test_detached_windows_that_are_half_closed_do_not_come_back(driver: FakeDriver) -> None:
    """H2: closing is local then, so the refusal is: the other ranks are not asked, and may be closed already."""
    assert run_threads(2, half_closed_alone, driver, timeout_s=60) == ["closed", "closed"]


def beside_a_call(group: Group) -> tuple[str, bool]:
    """Rank 1 prepares while a call of another of its threads is under way."""
    with communicator(group) as comm:
        if group.rank == 1:
            comm._execution.busy.acquire()
            threading.Timer(0.3, comm._execution.busy.release).start()
        comm.checkpoint_prepare()
        session: Any = comm._session
        state, free = session.state, comm._execution.busy.acquire(False)
        comm._execution.busy.release()
        comm.checkpoint_restore(group)
        return state, free


@pytest.mark.usefixtures("_transport")
def test_a_call_of_another_thread_is_waited_for(driver: FakeDriver) -> None:
    """H2: refusing it on that rank alone would leave the others waiting until their deadline."""
    assert run_threads(2, beside_a_call, timeout_s=30) == [("detached", True)] * 2


def beside_a_call_without_end(group: Group, told: threading.Event) -> str:
    group.timeout_s = 0.3
    comm = communicator(group)
    if group.rank == 1:
        comm._execution.busy.acquire()
    with pytest.raises(CommError) as caught:
        comm.checkpoint_prepare()
    if group.rank == 1:
        assert told.wait(10)
        comm._execution.busy.release()
    told.set()
    group.timeout_s = 10.0
    group.barrier("over")
    comm.checkpoint_prepare()
    comm.close()
    return str(caught.value)


@pytest.mark.usefixtures("_transport")
def test_a_call_without_end_ends_the_wait_for_it(driver: FakeDriver) -> None:
    """H5: by the deadline, on every rank, and nothing has changed."""
    texts = run_threads(2, beside_a_call_without_end, threading.Event(), timeout_s=30)
    assert "no word from rank 1" in texts[0] and "running in another thread for 0.3 s" in texts[1]


def stalls_late(group: Group, work: list[Callable[[], None]]) -> str:
    comm = communicator(group)
    session: Any = comm._session
    if group.rank == 0:
        work.append(session.barrier)
    group.barrier("launched")
    with pytest.raises(JointError) as caught:
        comm.checkpoint_prepare()
    assert session.state == "attached"
    comm.close()
    return str(caught.value)


@pytest.mark.usefixtures("_transport")
def test_what_was_launched_has_ended_before_anything_is_asked(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H2: a kernel that gives up only while the device is waited for is known before memory is taken away."""
    work: list[Callable[[], None]] = []

    def synchronize(device: torch.device) -> None:
        if work and threading.current_thread().name == "rank 0":
            work.pop()()

    monkeypatch.setattr(_cuda, "synchronize", synchronize)
    monkeypatch.setenv("COMM_TIMEOUT_S", "1")
    texts = run_threads(2, stalls_late, work, timeout_s=60)
    assert texts[0] == texts[1] and "rank 0: rank 0 gave up waiting for rank 1" in texts[0]
