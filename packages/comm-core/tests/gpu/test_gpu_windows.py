"""Windows on real GPUs: the contract, graphs, mixed destinations, stalls and leaks.

Several ranks share each GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they
really run at the same time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator
from comm_core.errors import CommError, GroupTimeoutError, PeerStalledError
from comm_core.testing import reference
from comm_core.testing.contract import TransportContract
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits

pytestmark = pytest.mark.gpu

SIZES = tuple(int(size) for size in os.environ.get("GPU_CHECK_SIZES", "2,4,8").split(","))


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Eight ranks that share the GPUs there are."""
    os.environ["COMM_ALLOW_SHARED_GPU"] = "1"
    pool = RankPool(8, preload=["pytest", "hypothesis"], group_timeout_s=120)
    yield pool
    pool.close()
    del os.environ["COMM_ALLOW_SHARED_GPU"]


class Contract(TransportContract):
    """The contract in a pool of eight ranks."""

    device_type = "cuda"

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        # The pool has eight ranks, so a group of all of them is WORLD.
        if world_size < ranks.size:
            super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


class TestWindows(Contract):
    """Stores of the SMs."""

    transport = "windows"
    device_type = "cuda"
    world_sizes = SIZES


class TestWindowsCopyEngines(Contract):
    """Copies of the copy engines between one-warp kernels."""

    transport = "windows-ce"
    device_type = "cuda"
    world_sizes = SIZES[:2]


def open_comm(group: Any, backend: str = "windows", **changes: Any) -> UlyssesCommunicator:
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    arguments = {"max_bytes": 1 << 20, "dtype": torch.bfloat16, "device": device, **changes}
    return UlyssesCommunicator(group, backend=backend, **arguments)


def operand(rank: int, round_: int, size: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    x = torch.randint(-(2**15), 2**15, (2, 16, 2 * size, 24), dtype=torch.int16, generator=generator)
    return x.view(torch.bfloat16).to(device)


def expected(rank: int, round_: int, size: int, device: torch.device) -> torch.Tensor:
    every = [operand(peer, round_, size, device) for peer in range(size)]
    return reference.scatter_heads(every)[rank]


def replay(group: Any, backend: str, direct: bool) -> int:
    """Capture scatter and gather, and replay them with changed inputs, mixed with eager calls."""
    with open_comm(group, backend) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device).clone()
        make = (lambda op, like: comm.allocate_output(like, op)) if direct else (lambda op, like: None)
        y = make("scatter_heads", x)
        if y is None:
            y = torch.empty_like(expected(rank, 0, size, device))
        z = make("gather_heads", y)
        if z is None:
            z = torch.empty_like(x)
        comm.scatter_heads(x, out=y)
        comm.gather_heads(y, out=z)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.scatter_heads(x, out=y)
            comm.gather_heads(y, out=z)
        for round_ in range(1, 6):
            x.copy_(operand(rank, round_, size, device))
            z.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(y, expected(rank, round_, size, device))
            assert_same_bits(z, x)
            eager = comm.scatter_heads(x)
            assert_same_bits(eager, y)
        return 5


@pytest.mark.parametrize("backend", ["windows", "windows-ce"])
@pytest.mark.parametrize("direct", [True, False])
def test_captured_graphs_replay_among_eager_calls(ranks: RankPool, backend: str, direct: bool) -> None:
    for size in SIZES[:2]:
        assert ranks.run(replay, backend, direct, ranks=size, timeout_s=100) == [5] * size


def mixed(group: Any) -> int:
    """Some ranks pass outputs in windows and others ordinary ones, differently in every call."""
    with open_comm(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device)
        registered = comm.allocate_output(x, "scatter_heads")
        ordinary = torch.empty_like(registered)
        for round_ in range(40):
            out = registered if (rank + round_) % 3 else ordinary
            out.fill_(3)
            comm.scatter_heads(operand(rank, round_, size, device), out=out)
            assert_same_bits(out, expected(rank, round_, size, device))
        return round_


def test_the_receiver_says_where_so_ranks_may_differ(ranks: RankPool) -> None:
    for size in SIZES:
        assert ranks.run(mixed, ranks=size, timeout_s=100) == [39] * size


def streams(group: Any) -> int:
    """Calls on alternating streams, with no synchronization of the caller's."""
    with open_comm(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        first, second = torch.cuda.Stream(), torch.cuda.Stream()
        outs, xs = [], [operand(rank, round_, size, device) for round_ in range(20)]
        torch.cuda.synchronize()
        for round_, x in enumerate(xs):
            with torch.cuda.stream((first, second, torch.cuda.default_stream())[round_ % 3]):
                outs.append(comm.scatter_heads(x))
        torch.cuda.synchronize()
        for round_, out in enumerate(outs):
            assert_same_bits(out, expected(rank, round_, size, device))
        return len(outs)


def test_changing_streams_are_ordered(ranks: RankPool) -> None:
    """F2."""
    assert ranks.run(streams, ranks=2, timeout_s=60) == [20, 20]


def stall(group: Any, how: str, captured: bool) -> Any:
    """Rank 1 skips a call, or comes too late; in the third replay of a graph, or eagerly."""
    comm = open_comm(group, dtype=torch.float32)
    rank, size, device = comm.rank, comm.world_size, comm.device
    x = torch.ones(1, 8, size, 16, device=device)
    y = comm.allocate_output(x, "scatter_heads")
    plain = torch.empty_like(y)
    comm.scatter_heads(x, out=y)
    comm.scatter_heads(x, out=plain)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            comm.scatter_heads(x, out=y)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    if rank == 1 and how == "silent":
        time.sleep(2.5)
        return _close(comm, None)
    if rank == 1:
        time.sleep(2.5)
    started = time.monotonic()
    try:
        if captured:
            graph.replay()
        else:
            comm.scatter_heads(x, out=y)
        torch.cuda.synchronize()
        seconds = time.monotonic() - started
        poisoned = bool(torch.isnan(y).all())
        comm.scatter_heads(x, out=plain)
        return "accepted"
    except PeerStalledError as error:
        seconds = time.monotonic() - started
        poisoned = bool(torch.isnan(y).all())
        return _close(comm, (error.waited_for, poisoned, seconds < 6))


def _close(comm: UlyssesCommunicator, result: Any) -> Any:
    try:
        comm.close(timeout=5)
    except (CommError, GroupTimeoutError) as error:
        return result, f"{type(error).__name__}"
    return result, "closed"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "third-replay"])
@pytest.mark.parametrize("how", ["silent", "late"])
def test_a_stalled_rank_is_named_outputs_are_poisoned_and_all_leave(
    ranks: RankPool, how: str, captured: bool
) -> None:
    """F17: nobody spins for ever, and everybody learns who did not come."""
    for size in SIZES:
        outcomes = ranks.run(stall, how, captured, ranks=size, timeout_s=90, env={"COMM_TIMEOUT_S": "1"}, fresh=True)
        for rank, (result, closed) in enumerate(outcomes):
            assert closed == "closed", outcomes
            if rank != 1:
                assert result == (1, True, True), outcomes
            elif how == "late":
                # It arrives after the others gave up: it stores nothing, its output is poisoned, and it is told.
                assert result == (1, True, True), outcomes


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def leak(group: Any, cycles: int) -> Any:
    """Open, exchange and close, over and over, in a process that lives on."""
    files = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731, PTH208
    marks: list[tuple[int, int]] = []
    for cycle in range(cycles):
        with open_comm(group, max_bytes=8 << 20) as comm:
            x = operand(comm.rank, cycle, comm.world_size, comm.device)
            out = comm.allocate_output(x, "scatter_heads")
            comm.scatter_heads(x, out=out)
            torch.cuda.synchronize()
            del x, out
        torch.cuda.empty_cache()
        group.barrier().wait()
        if cycle in (cycles // 4, cycles - 1):
            marks.append((used_bytes(), files()))
    return marks


def test_cycles_leak_neither_memory_nor_descriptors(ranks: RankPool) -> None:
    outcomes = ranks.run(leak, 40, ranks=2, timeout_s=110)
    for (before, files_before), (after, files_after) in outcomes:
        assert files_after == files_before, outcomes
        # The driver's own pools settle in steps of 2 MiB; 30 cycles of 30 MiB would be a gigabyte.
        assert after - before <= 4 << 20, outcomes
