"""Sessions of transport ``mnnvl``, whole, over a fake driver: operations, checkpoint, restore, every wrong order."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, plugins
from comm_core.errors import (
    CheckpointError,
)
from comm_core.group import Group, StoreGroup, thread_groups
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import reference
from comm_core.testing.every_operation import every_operation
from comm_core.testing.fake_driver import FakeDriver
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.transport.interface import Verdict
from comm_core.windows import launch
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
    from comm_core.windows import session

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
