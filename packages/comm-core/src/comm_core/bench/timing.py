"""Times on a rank: batches that all ranks start together, eager or in a CUDA graph, and the host's share.

A figure is the median of several batches. A batch is a number of calls back to back, long enough for what is not
repeated to vanish, timed by events on the device, after a barrier on the device: without it the first call would wait
for the rank whose host comes last.

A host may take longer to launch a graph of 20 short calls than the device takes to run it. So replays are timed with
all of a batch enqueued before the first one starts, behind a delay on the device: `replayed`.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from comm_core.bench.geometry import MIB
from comm_core.errors import CommError

if TYPE_CHECKING:
    from comm_core.bench.launch import Placement

__all__ = [
    "GRAPH_CALLS",
    "Times",
    "batch_calls",
    "batches",
    "bind",
    "captured",
    "empty_cache",
    "in_a_row",
    "largest",
    "meet",
    "replayed",
    "sets_of",
    "synchronize",
]

GRAPH_CALLS = 20
"""Calls in one graph."""
_SMALL_BYTES = 16 * MIB
_SMALL_REPEATS = 5
_BATCH_S = 0.25
_CACHE_BYTES = 128 * MIB
_MAX_SETS = 16
_REPLAYS = 4
"""Of a graph, in a batch."""
_DELAY_CYCLES = 4_000_000
"""Of the device's clock, some 2 ms: for a host that takes 60 us a launch, with room to spare."""
_DELAYS = 6
"""How often the delay is doubled for a host that takes longer."""


class Times(NamedTuple):
    """Microseconds a call.

    Attributes:
        device: from the start of the first call to the end of the last, by the device's clock.
        host: until the host is free again.
    """

    device: float
    host: float


def bind(group: Any, placement: Placement) -> torch.device:
    """Make this rank's device current and return it."""
    if placement.device == "cpu":
        return torch.device("cpu")
    index = 0 if placement.where == "shared" else placement.device_index(group.rank())
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def synchronize(device: torch.device) -> None:
    """Wait for everything that was enqueued on `device`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give memory that is not used any more back to the device: the next part may need it in another shape."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def largest(group: Any, value: float) -> float:
    """Return the largest of the ranks' values; waits for all ranks on the host. Collective."""
    # torch's annotations of it are partial.
    dist: Any = importlib.import_module("torch.distributed")
    values = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX, group=group)
    return float(values[0])


def meet(group: Any) -> None:
    """Wait for all ranks on the host. Collective."""
    largest(group, 0.0)


def sets_of(operand_bytes: int, cold: bool = False) -> int:
    """Return how many operands and outputs a loop goes round.

    One: a serving process uses the same buffers again and again, and what an exchange sends was computed a moment
    ago. With `cold`, so many that no second-level cache holds all of them.
    """
    if not cold:
        return 1
    return max(2, min(_MAX_SETS, -(-_CACHE_BYTES // (2 * operand_bytes))))


def batch_calls(operand_bytes: int, seconds: float) -> int:
    """Return how many calls a batch has where one takes `seconds`.

    Args:
        operand_bytes: of one rank.
        seconds: as the ranks agreed on, see `largest`.
    """
    most = GRAPH_CALLS * (_SMALL_REPEATS if operand_bytes < _SMALL_BYTES else 1)
    return max(2, min(most, int(_BATCH_S / max(seconds, 1e-9))))


def batches(
    group: Any, device: torch.device, align: Callable[[], None], work: Callable[[], None], calls: int, count: int
) -> Times:
    """Return the medians of `count` batches; `work` does or enqueues `calls` calls. Collective."""
    times: list[float] = []
    host: list[float] = []
    for _ in range(count):
        synchronize(device)
        meet(group)
        align()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            began = time.perf_counter()
            work()
            host.append(time.perf_counter() - began)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
            host.append(times[-1])
    return Times(statistics.median(times) / calls * 1e6, statistics.median(host) / calls * 1e6)


def in_a_row(
    group: Any, device: torch.device, align: Callable[[], None], replay: Callable[[], None], calls: int, count: int
) -> float:
    """Return what `replayed` does, of replays that follow each other as the host launches them. Collective.

    For graphs that a host can't get ahead of. The first replay of a batch does not count: while it runs, the host
    launches the next one.
    """

    def begin() -> None:
        align()
        replay()

    def work() -> None:
        for _ in range(_REPLAYS):
            replay()

    return batches(group, device, begin, work, _REPLAYS * calls, count).device


def replayed(
    group: Any, device: torch.device, align: Callable[[], None], replay: Callable[[], None], calls: int, count: int
) -> float:
    """Return microseconds a call on the device: the median of `count` batches of replays. Collective.

    A batch is enqueued behind a delay, and counts only if the device had not begun it when the last of it was
    enqueued, on any rank; else it is repeated behind a longer delay. So no launch of the host is in the figure.

    Args:
        group: of the ranks.
        device: this rank's, with CUDA.
        align: enqueues what lets the ranks start at once.
        replay: enqueues a graph that was replayed before.
        calls: in the graph.
        count: of batches.

    Raises:
        CommError: a host did not get ahead of its device, however long the delay.
    """
    # torch's annotations leave it out.
    delay: Any = torch.cuda
    cycles, times = _DELAY_CYCLES, list[float]()
    while len(times) < count:
        synchronize(device)
        meet(group)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        delay._sleep(cycles)
        align()
        # Not counted: what a graph does at its first replay after another kernel, it does here.
        replay()
        start.record()
        for _ in range(_REPLAYS):
            replay()
        end.record()
        late = start.query()
        end.synchronize()
        if largest(group, float(late)) == 0:
            times.append(start.elapsed_time(end) * 1e3 / (_REPLAYS * calls))
        elif cycles < _DELAY_CYCLES << _DELAYS:
            cycles *= 2
        else:
            raise CommError(
                f"a host took longer to enqueue {_REPLAYS + 1} replays of a graph than a delay of {cycles} cycles of "
                "its device: times would be the host's; run on a machine that is not so busy"
            )
    return statistics.median(times)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return what `work` enqueues as a graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Only this thread's calls are captured: a watchdog of torch or of ours may look at the device meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    torch.cuda.synchronize()
    return graph
