"""What every transport on GPUs must do beyond the contract of transports, as tests that its package runs::

    class TestNvlinkOnDevices(DeviceContract):
        transport = "nvlink"
        world_sizes = (2, 4, 8)

Captured graphs among eager calls, destinations that differ between ranks, changing streams, stalls, and leaks. The
fixture `ranks` is a `RankPool` of at least as many ranks as the largest size; the ranks may share GPUs where it
has set ``COMM_ALLOW_SHARED_GPU=1``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import pytest
import torch

from comm_core import UlyssesCommunicator
from comm_core.errors import CommError, PeerStalledError
from comm_core.testing import reference
from comm_core.testing.gpu import registered
from comm_core.testing.ranks import FunctionRef, RankPool
from comm_core.testing.reference import assert_same_bits

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DeviceCase", "DeviceContract", "expected", "operand"]

_SILENT = 1
"""The rank that does not come."""
_TIMEOUT_S = 110.0
_STALL_S = 1.0
"""Deadline of the stall tests."""
_LATE_S = 2.0
_SETTLED = 4
"""Cycles of opening and closing after which no memory of the driver or of Python is new."""
"""How late the late rank is."""


@dataclass(frozen=True)
class DeviceCase:
    """What the ranks need to know about the transport; sent to them.

    Attributes:
        transport: its name.
        options: further arguments of the communicator.
        plugin: makes the plugin, where it is not an installed one.
    """

    transport: str
    options: tuple[tuple[str, Any], ...] = ()
    plugin: FunctionRef | None = None

    def open(self, group: ProcessGroup, **changes: Any) -> UlyssesCommunicator:
        """Return a communicator of 1 MiB on this rank's device, which is made current."""
        device = torch.device("cuda", group.rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
        arguments: dict[str, Any] = {"max_bytes": 1 << 20, "dtype": torch.bfloat16, "device": device}
        return UlyssesCommunicator(group, backend=self.transport, **{**arguments, **dict(self.options), **changes})

    def run(
        self,
        ranks: RankPool,
        function: Callable[..., Any],
        *arguments: Any,
        size: int,
        timeout_s: float = _TIMEOUT_S,
        **options: Any,
    ) -> list[Any]:
        """Run ``function(group, case, *arguments)`` on `size` ranks; `options` are those of `RankPool.run`."""
        named = FunctionRef.of(function)
        return ranks.run(in_case, self, named, *arguments, ranks=size, timeout_s=timeout_s, **options)


def in_case(group: ProcessGroup, case: DeviceCase, function: FunctionRef, *arguments: Any) -> Any:
    """Call a function with the plugin registered, where it is not an installed one."""
    with registered(case.plugin):
        return function.resolve()(group, case, *arguments)


def operand(rank: int, round_: int, size: int, device: torch.device) -> torch.Tensor:
    """Return what `rank` scatters in a round: ``[2, 16, 2 * size, 24]`` of bfloat16, every bit pattern."""
    generator = torch.Generator().manual_seed(1000 * round_ + rank)
    x = torch.randint(-(2**15), 2**15, (2, 16, 2 * size, 24), dtype=torch.int16, generator=generator)
    return x.view(torch.bfloat16).to(device)


def expected(rank: int, round_: int, size: int, device: torch.device) -> torch.Tensor:
    """Return what `rank` gets in a round."""
    return reference.scatter_heads([operand(peer, round_, size, device) for peer in range(size)])[rank]


def replay(group: ProcessGroup, case: DeviceCase, direct: bool) -> int:
    """Capture scatter and gather, and replay them with changed inputs, mixed with eager calls."""
    with case.open(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device).clone()
        y = comm.allocate_output(x, "scatter_heads") if direct else torch.empty_like(expected(rank, 0, size, device))
        z = comm.allocate_output(y, "gather_heads") if direct else torch.empty_like(x)
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


def mixed(group: ProcessGroup, case: DeviceCase) -> int:
    """Some ranks pass outputs in windows and others ordinary ones, differently in every call."""
    with case.open(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device)
        registered = comm.allocate_output(x, "scatter_heads")
        ordinary = torch.empty_like(registered)
        for round_ in range(40):
            out = registered if (rank + round_) % 3 else ordinary
            out.fill_(3)
            comm.scatter_heads(operand(rank, round_, size, device), out=out)
            assert_same_bits(out, expected(rank, round_, size, device))
        return 40


def streams(group: ProcessGroup, case: DeviceCase) -> int:
    """Call on alternating streams, with no synchronization of the caller's."""
    with case.open(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        used = (torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.default_stream())
        outs: list[torch.Tensor] = []
        xs = [operand(rank, round_, size, device) for round_ in range(20)]
        torch.cuda.synchronize()
        for round_, x in enumerate(xs):
            with torch.cuda.stream(used[round_ % 3]):
                outs.append(comm.scatter_heads(x))
        torch.cuda.synchronize()
        for round_, out in enumerate(outs):
            assert_same_bits(out, expected(rank, round_, size, device))
        return len(outs)


def stall(group: ProcessGroup, case: DeviceCase, how: str, captured: bool) -> Any:
    """Rank 1 skips a call, or comes too late; in the third replay of a graph, or eagerly.

    Returns:
        ``(waited_for, what the silent rank owes is NaN, all is NaN, in time)``, or None for a rank that left; and how
        the communicator was closed.
    """
    comm = case.open(group, dtype=torch.float32)
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
    if rank == _SILENT:
        time.sleep(_LATE_S)
        if how == "silent":
            return _close(comm, None)
    started = time.monotonic()
    try:
        if captured:
            graph.replay()
        else:
            comm.scatter_heads(x, out=y)
        torch.cuda.synchronize()
        comm.scatter_heads(x, out=plain)
        return "accepted", ""
    except PeerStalledError as error:
        seconds = time.monotonic() - started
        nan = torch.isnan(y)
        owed = nan[:, 8 * _SILENT : 8 * (_SILENT + 1)]
        return _close(comm, (error.waited_for, bool(owed.all()), bool(nan.all()), seconds < 5 + _STALL_S))


def _close(comm: UlyssesCommunicator, result: Any) -> Any:
    try:
        comm.close(timeout=5)
    except CommError as error:
        return result, type(error).__name__
    return result, "closed"


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


def leak(group: ProcessGroup, case: DeviceCase, cycles: int, seconds: float) -> Any:
    """Open, exchange and close, over and over, in a process that lives on; how far it came, and marks on the way.

    The first mark is made after a few cycles. The ranks stop together once `seconds` are over.
    """
    marks: list[tuple[int, int]] = []
    done, started = 0, time.monotonic()
    for cycle in range(cycles):
        with case.open(group, max_bytes=8 << 20) as comm:
            x = operand(comm.rank, cycle, comm.world_size, comm.device)
            out = comm.allocate_output(x, "scatter_heads")
            comm.scatter_heads(x, out=out)
            torch.cuda.synchronize()
            del x, out
        torch.cuda.empty_cache()
        over = torch.tensor([time.monotonic() - started > seconds], dtype=torch.int32)
        cast("Any", group).allreduce([over]).wait()
        done = cycle + 1
        last = done == cycles or bool(over.item())
        if done == _SETTLED or last:
            marks.append((_used_bytes(), _descriptors()))
        if last:
            break
    return done, marks


class DeviceContract:
    """The tests. See the module for how to use them.

    Attributes:
        transport: name of the transport, asked for by name.
        world_sizes: sizes of groups to test.
        graph_sizes: those in which graphs are tested, which takes longer; None is the first two.
        options: further arguments of the communicator.
        environment: variables of the ranks.
        plugin: a module-level function that returns the plugin, where it is not an installed one.
        poisons_all: whether all of an aborted output is NaN. What the copy engines were given before the abort may
            still arrive after it, so there only what the missing rank owes is.
        host_waits: whether eager calls wait for each other on the host, so that nothing is enqueued without a peer.
        cycles: of the test of leaks.
        cycle_seconds: how long that test may take.
    """

    transport: ClassVar[str]
    world_sizes: ClassVar[tuple[int, ...]] = (2, 4, 8)
    graph_sizes: ClassVar[tuple[int, ...] | None] = None
    options: ClassVar[Mapping[str, Any]] = {}
    environment: ClassVar[Mapping[str, str]] = {}
    plugin: ClassVar[Callable[[], object] | None] = None
    poisons_all: ClassVar[bool] = True
    host_waits: ClassVar[bool] = False
    cycles: ClassVar[int] = 40
    cycle_seconds: ClassVar[float] = 60.0

    @property
    def case(self) -> DeviceCase:
        """What is sent to the ranks."""
        made = cast("Any", type(self)).plugin
        return DeviceCase(self.transport, tuple(self.options.items()), None if made is None else FunctionRef.of(made))

    def run(self, ranks: RankPool, function: Callable[..., Any], *arguments: Any, size: int, **changes: Any) -> Any:
        """Run `function(group, case, *arguments)` on `size` ranks."""
        env = {**self.environment, **changes.pop("env", {})}
        return self.case.run(ranks, function, *arguments, size=size, env=env, **changes)

    @pytest.mark.parametrize("direct", [True, False], ids=["direct", "staged"])
    def test_captured_graphs_replay_among_eager_calls(self, ranks: RankPool, direct: bool) -> None:
        """Captured and eager calls in turns, with changing data."""
        for size in self.world_sizes[:2] if self.graph_sizes is None else self.graph_sizes:
            assert self.run(ranks, replay, direct, size=size) == [5] * size

    def test_the_receiver_says_where_so_ranks_may_differ(self, ranks: RankPool) -> None:
        """Windows on some ranks and ordinary memory on others."""
        for size in self.world_sizes:
            assert self.run(ranks, mixed, size=size) == [40] * size

    def test_changing_streams_are_ordered(self, ranks: RankPool) -> None:
        """F2."""
        assert self.run(ranks, streams, size=2) == [20, 20]

    @pytest.mark.parametrize("captured", [False, True], ids=["eager", "third-replay"])
    @pytest.mark.parametrize("how", ["silent", "late"])
    def test_a_stalled_rank_is_named_outputs_are_poisoned_and_all_leave(
        self, ranks: RankPool, how: str, captured: bool
    ) -> None:
        """F17: nobody spins for ever, and everybody learns who did not come."""
        for size in self.world_sizes:
            env = {"COMM_TIMEOUT_S": f"{_STALL_S:g}"}
            outcomes = self.run(ranks, stall, how, captured, size=size, env=env, fresh=True)
            for rank, (result, closed) in enumerate(outcomes):
                assert closed == "closed", outcomes
                if rank == _SILENT and how == "silent":
                    continue
                waited_for, owed, everything, in_time = result
                assert in_time, outcomes
                if self.host_waits and not captured:
                    # Nothing was enqueued by those who came, and the late rank finds nobody.
                    assert (waited_for == _SILENT) == (rank != _SILENT), outcomes
                    continue
                # The late rank arrives after the others gave up: it stores nothing, and it is told.
                assert waited_for == _SILENT, outcomes
                assert everything if self.poisons_all else owed or rank == _SILENT, outcomes

    def test_cycles_leak_neither_memory_nor_descriptors(self, ranks: RankPool) -> None:
        """E4, E6: what was opened and closed leaves nothing on the GPU and in the process."""
        outcomes = self.run(ranks, leak, self.cycles, self.cycle_seconds, size=2)
        for done, marks in outcomes:
            assert done > 1.5 * _SETTLED, outcomes
            (before, files_before), (after, files_after) = marks
            assert files_after == files_before, outcomes
            # The driver's own pools settle in steps of 2 MiB; 30 cycles of 30 MiB would be a gigabyte.
            assert after - before <= 4 << 20, outcomes
