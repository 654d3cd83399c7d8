"""The PCIe transport on real GPUs: contract, graphs, links, stalls, leaks and what a call costs the host.

Several ranks may share a GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they really run
at the same time.
"""

from __future__ import annotations

import os
import statistics
import time
import warnings
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, _cuda, jit, plugins
from comm_core.errors import CommError, PeerStalledError, UlyssesBackendError
from comm_core.testing import reference
from comm_core.testing.contract import TransportContract
from comm_core.testing.device_contract import expected, operand
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits
from comm_pcie import ExperimentalWarning, selftest
from comm_pcie.selftest import SELFTEST, run_tests

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes(among=(2, 4, 8))


ranks = shared_gpu_pool(8)


def make_plugin() -> object:
    """The plugin, in a rank whose warnings are errors; one without hooks where it is installed or registered."""
    from comm_pcie.plugin import PciePlugin

    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    return Nothing() if "pcie" in plugins.registry().transports else PciePlugin()


class Nothing:
    """A plugin of no use."""

    comm_api = (1, 0)


class TestPcie(TransportContract):
    """What every transport must do, with registered outputs."""

    transport = "pcie"
    device_type = "cuda"
    world_sizes = SIZES
    plugin = make_plugin
    registered_outputs = True

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        # The pool has eight ranks, so a group of all of them is WORLD.
        if world_size < ranks.size:
            super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


def open_comm(group: Any, **changes: Any) -> UlyssesCommunicator:
    if "pcie" not in plugins.registry().transports:
        plugins.register("pcie under test", make_plugin())
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    arguments = {"max_bytes": 1 << 20, "dtype": torch.bfloat16, "device": device, **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return UlyssesCommunicator(group, backend="pcie", **arguments)


def replay(group: Any) -> int:
    """Capture scatter and gather, and replay them with changed inputs, mixed with eager calls."""
    with open_comm(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device).clone()
        y = comm.allocate_output(x, "scatter_heads")
        z = comm.allocate_output(y, "gather_heads")
        for _ in range(3):
            comm.scatter_heads(x, out=y)
            comm.gather_heads(y, out=z)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.scatter_heads(x, out=y)
            comm.gather_heads(y, out=z)
        for round_ in range(1, 8):
            x.copy_(operand(rank, round_, size, device))
            z.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(y, expected(rank, round_, size, device))
            assert_same_bits(z, x)
            comm.scatter_heads(x, out=y)
            assert_same_bits(y, expected(rank, round_, size, device))
        session: Any = comm._session
        assert session.counters.failed == 0 and session.counters.launched > 0, session.counters
        return round_


def test_captured_graphs_replay_among_eager_calls(ranks: RankPool) -> None:
    """F2: and eager calls with memory that comes again are one launch."""
    for size in SIZES:
        assert ranks.run(replay, ranks=size, timeout_s=100) == [7] * size


def large(group: Any) -> int:
    """Operands with rows of a slow width, batches and 8-bit elements, some megabytes each, by value."""
    rank, size = group.rank(), group.size()
    checked = 0
    for dtype, shape in (
        (torch.bfloat16, (1, 512, 12 * size, 128)),  # rows of 3,072 bytes
        (torch.bfloat16, (1, 128, 40 * size, 128)),  # of 10,240
        (torch.int8, (3, 257, 5 * size, 96)),
    ):
        with open_comm(group, max_bytes=64 << 20, dtype=dtype) as comm:
            every = [reference.make_input(3, peer, shape, dtype) for peer in range(size)]
            x = every[rank].to(comm.device)
            y = comm.allocate_output(x, "scatter_heads")
            z = comm.allocate_output(y, "gather_heads")
            for _ in range(3):
                y.view(torch.uint8).fill_(0x5A)
                session: Any = comm._session
                session.barrier()
                comm.scatter_heads(x, out=y)
                assert_same_bits(y.cpu(), reference.scatter_heads(every)[rank])
                comm.gather_heads(y, out=z)
                assert_same_bits(z.cpu(), every[rank])
                checked += 1
    return checked


def test_large_operands_and_slow_widths(ranks: RankPool) -> None:
    for size in SIZES[:2]:
        assert ranks.run(large, ranks=size, timeout_s=110) == [9] * size


# Links


def uuids() -> list[str]:
    return [_cuda.device_properties(index).uuid for index in range(torch.cuda.device_count())]


def test_real_links_pass_and_a_changed_word_is_found() -> None:
    """B1: every ordered pair of the GPUs that are here, both planes; with one word changed on its way both fail."""
    library = jit.load(SELFTEST, torch.device("cuda", 0)).artifact.path
    found = uuids()
    pairs = [(a, b) for a in found for b in found if a != b] or [(found[0], found[0])]
    started = time.monotonic()
    outcomes = run_tests(library, pairs)
    print(f"{len(pairs)} pairs in {time.monotonic() - started:.2f} s")
    assert [outcome.problem for outcome in outcomes] == [None] * len(pairs)
    for outcome in run_tests(library, pairs, spoil=77):
        assert outcome.problem is not None and "1 of 1024 words are wrong, the first at" in outcome.problem


def vetoed(group: Any) -> str:
    if group.rank() == 0:
        name = uuids()[0]
        others = uuids()[1:] or [name]
        selftest._known[name, others[0]] = "copy engine: a test says so"
    try:
        open_comm(group).close()
    except UlyssesBackendError as error:
        return str(error)
    finally:
        selftest.forget()
    return "opened"


def test_a_bad_pair_vetoes_on_every_rank(ranks: RankPool) -> None:
    """B1: with its plane and its ranks; nothing is left allocated."""
    outcomes = ranks.run(vetoed, ranks=2, timeout_s=60)
    assert outcomes[0] == outcomes[1] and "ranks 0→1: copy engine: a test says so" in outcomes[0]


# Stalls


def stall(group: Any, how: str, captured: bool) -> Any:
    """Rank 1 skips a call, or comes too late; in the third replay of a graph, or eagerly."""
    comm = open_comm(group, dtype=torch.float32)
    rank, size, device = comm.rank, comm.world_size, comm.device
    x = torch.ones(1, 8, size, 16, device=device)
    y, other = (comm.allocate_output(x, "scatter_heads") for _ in range(2))
    for _ in range(3):
        comm.scatter_heads(x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            comm.scatter_heads(x, out=y)
        for _ in range(2):
            graph.replay()
        torch.cuda.synchronize()
    if rank == 1:
        # Later than the others' deadline and the moment that they wait for copies on their way.
        time.sleep(3.5)
        if how == "silent":
            return _close(comm, None)
    started = time.monotonic()
    try:
        graph.replay() if captured else comm.scatter_heads(x, out=y)
        torch.cuda.synchronize()
        seconds = time.monotonic() - started
        poisoned = bool(torch.isnan(y).all())
        comm.scatter_heads(x, out=other)
        return "accepted", ""
    except PeerStalledError as error:
        return _close(comm, (error.waited_for, poisoned, seconds < 8))


def _close(comm: UlyssesCommunicator, result: Any) -> Any:
    try:
        comm.close(timeout=8)
    except CommError as error:
        return result, f"{type(error).__name__}: {error}"
    return result, "closed"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "third-replay"])
@pytest.mark.parametrize("how", ["silent", "late"])
def test_a_stalled_rank_is_named_outputs_are_poisoned_and_all_leave(
    ranks: RankPool, how: str, captured: bool
) -> None:
    """F17: nobody spins for ever, and everybody learns who did not come."""
    for size in SIZES:
        outcomes = ranks.run(stall, how, captured, ranks=size, timeout_s=100, env={"COMM_TIMEOUT_S": "1"}, fresh=True)
        for rank, (result, closed) in enumerate(outcomes):
            assert closed == "closed", outcomes
            if rank != 1 or how == "late":
                assert result == (1, True, True), outcomes


# The rest


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def leak(group: Any, cycles: int) -> Any:
    """Open, exchange (by graphs too) and close, over and over, in a process that lives on."""
    files = lambda: len(os.listdir("/proc/self/fd"))  # noqa: E731, PTH208
    marks: list[tuple[int, int]] = []
    for cycle in range(cycles):
        with open_comm(group, max_bytes=8 << 20) as comm:
            x = operand(comm.rank, cycle, comm.world_size, comm.device)
            out = comm.allocate_output(x, "scatter_heads")
            for _ in range(4):
                comm.scatter_heads(x, out=out)
            torch.cuda.synchronize()
            del x, out
        torch.cuda.empty_cache()
        group.barrier().wait()
        if cycle in (cycles // 4, cycles - 1):
            marks.append((used_bytes(), files()))
    return marks


def test_cycles_leak_neither_memory_nor_descriptors(ranks: RankPool) -> None:
    outcomes = ranks.run(leak, 24, ranks=4, timeout_s=110)
    for (before, files_before), (after, files_after) in outcomes:
        assert files_after == files_before, outcomes
        # The driver's own pools settle in steps of 2 MiB; 18 cycles of 4 ranks would be a gigabyte.
        assert after - before <= 8 << 20, outcomes


def host_cost(group: Any, calls: int) -> float:
    """Microseconds of the host for an eager call: fewer calls than a stream queues, so that nobody is waited for."""
    with open_comm(group) as comm:
        x = operand(comm.rank, 0, comm.world_size, comm.device)
        y = comm.allocate_output(x, "scatter_heads")
        for _ in range(4):
            comm.scatter_heads(x, out=y)
        times: list[float] = []
        for _ in range(9):
            torch.cuda.synchronize()
            group.barrier().wait()
            started = time.perf_counter()
            for _ in range(calls):
                comm.scatter_heads(x, out=y)
            times.append((time.perf_counter() - started) / calls * 1e6)
        torch.cuda.synchronize()
        return statistics.median(times)


def test_what_an_eager_call_costs_the_host(ranks: RankPool) -> None:
    """At most 25 µs, where each rank has a core of its own; the figures are printed."""
    for size in SIZES:
        found = ranks.run(host_cost, 40, ranks=size, timeout_s=60)
        print(f"{size} ranks: eager call, host: {[round(value, 1) for value in found]} us")
        if (os.cpu_count() or 1) >= 2 * size:
            assert statistics.median(found) <= 25.0, found
