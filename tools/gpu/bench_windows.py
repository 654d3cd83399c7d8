"""``python -m gpu.bench_windows``: barriers, exchanges and call overhead over windows, beside the floor.

    --where shared   all ranks on the first GPU, which needs MPS for times that mean anything
    --where links    a GPU for each rank, and NCCL beside it

Times are taken by events on the device, with all ranks aligned by a barrier on the device before each batch; a figure
is the median of several batches on the slowest rank. Every exchange is compared by value before it is timed. Writes
JSON after each part, so that what was measured survives whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from comm_core import UlyssesCommunicator
from comm_core.testing import reference
from comm_core.testing.ranks import RankPool

MIB = 1 << 20


class Geometry(NamedTuple):
    """A global operand ``[1, S, H, D]`` in bfloat16."""

    tokens: int
    heads: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        return f"S={self.tokens} H={self.heads}" + ("" if self.head_dim == 128 else f" D={self.head_dim}")

    def operand_bytes(self, ranks: int) -> int:
        """Bytes of one rank's operand."""
        return self.tokens // ranks * self.heads * self.head_dim * 2

    def remote_bytes(self, ranks: int) -> int:
        """Bytes of it that leave the rank."""
        return self.operand_bytes(ranks) * (ranks - 1) // ranks

    def shape(self, operation: str, ranks: int) -> tuple[int, ...]:
        """Shape of one rank's operand."""
        if operation == "scatter_heads":
            return (1, self.tokens // ranks, self.heads, self.head_dim)
        return (1, self.tokens, self.heads // ranks, self.head_dim)


GEOMETRIES = (
    Geometry(1024, 24),
    Geometry(4608, 24),
    Geometry(32760, 40),
    Geometry(75600, 40),
    Geometry(118800, 24),
    Geometry(32768, 32, 64),
)
QUICK = (Geometry(4608, 24), Geometry(32760, 40))
OPERATIONS = ("scatter_heads", "gather_heads")
PATHS = {
    "windows, direct": ("windows", True),
    "windows, staged": ("windows", False),
    "windows-ce, staged": ("windows-ce", False),
    "nccl": ("nccl", False),
}
"""Name -> backend, and whether outputs lie in windows."""

_CACHE_BYTES = 192 * MIB
"""What the operands and outputs of one loop have together, at least: several times the largest second-level cache."""
_MAX_SETS = 16
_FLOOR_BYTES = 512 * MIB
_QUEUE = 200
"""Calls between two synchronizations when the host's time is measured: fewer than a stream queues."""


@dataclass(frozen=True)
class Plan:
    """How much is measured; equal on all ranks."""

    shared: bool
    batches: int
    geometries: tuple[Geometry, ...]


def sets_of(operand_bytes: int) -> int:
    """Return how many operands and outputs a loop goes round, so that no cache holds all of them."""
    return max(2, min(_MAX_SETS, -(-_CACHE_BYTES // (2 * operand_bytes))))


def calls_of(operand_bytes: int) -> int:
    """Return how many calls a batch has: fewer where one takes long."""
    return 30 if operand_bytes < 128 * MIB else 10


def floor_us(geometry: Geometry, ranks: int, shared: bool, bytes_per_s: float) -> float:
    """Return the least time of an exchange in microseconds.

    Over links, the bytes that leave a rank, at the rate of the copy engines. On one GPU all the ranks' bytes, their
    own shares among them, go through the same memory, at the rate of a copy within it.
    """
    nbytes = geometry.operand_bytes(ranks) * ranks if shared else geometry.remote_bytes(ranks)
    return nbytes / bytes_per_s * 1e6


def slowest(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure on the rank where it is largest."""
    return {name: max(result[name] for result in results) for name in results[0]}


# On the ranks


def bind(group: Any, shared: bool) -> torch.device:
    """Make this rank's device current and return it."""
    device = torch.device("cuda", 0 if shared else group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def meet(group: Any) -> None:
    """Wait for all ranks on the host, over gloo."""
    torch.distributed.all_reduce(torch.zeros(1), group=group)


def batches(group: Any, align: Callable[[], None], work: Callable[[], None], calls: int, count: int) -> float:
    """Return microseconds a call: the median of `count` batches; `work` enqueues `calls` of them."""
    times: list[float] = []
    for _ in range(count):
        torch.cuda.synchronize()
        meet(group)
        # On the device, or the first call would wait for the rank whose host comes last.
        align()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def captured(work: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Return `work` as a graph."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    torch.cuda.synchronize()
    return graph


def barriers(group: Any, plan: Plan) -> dict[str, float]:
    """Time a barrier, eager and in a graph, and an empty kernel in a graph."""
    from comm_core import jit
    from comm_core.jit.selfcheck import SELFCHECK

    device = bind(group, plan.shared)
    empty = jit.load(SELFCHECK, device).bind("comm_core_empty_v1")
    with UlyssesCommunicator(group, max_bytes=MIB, dtype=torch.bfloat16, backend="windows", device=device) as comm:
        session: Any = comm._session

        def several() -> None:
            for _ in range(50):
                session.barrier()

        several()
        graph = captured(several)

        def replays() -> None:
            for _ in range(10):
                graph.replay()

        replays()
        eager = batches(group, session.barrier, several, 50, 2 * plan.batches + 1)
        in_graph = batches(group, session.barrier, replays, 500, 2 * plan.batches + 1)
        kernels = captured(lambda: empty(torch.cuda.current_stream().cuda_stream, 500))
        floor = batches(group, session.barrier, kernels.replay, 500, 2 * plan.batches + 1)
        session.check()
    return {"eager": eager, "graph": in_graph, "floor": floor}


def operand(geometry: Geometry, operation: str, rank: int, ranks: int, number: int, device: torch.device) -> Any:
    """Return random bits that differ for every rank and number."""
    generator = torch.Generator(device).manual_seed(1009 * number + rank)
    shape = geometry.shape(operation, ranks)
    values = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, device=device, generator=generator)
    return values.view(torch.bfloat16)


def compare(geometry: Geometry, operation: str, comm: UlyssesCommunicator, number: int, out: torch.Tensor) -> None:
    """Compare every bit of `out` with the reference."""
    ranks = comm.world_size
    every = [operand(geometry, operation, peer, ranks, number, comm.device) for peer in range(ranks)]
    expected = getattr(reference, operation)(every)[comm.rank]
    reference.assert_same_bits(out, expected)


def exchanges(group: Any, path: str, plan: Plan) -> dict[str, float]:
    """Time both operations for all geometries over one path; keys are ``"geometry/operation/how"``."""
    device = bind(group, plan.shared)
    backend, direct = PATHS[path]
    ranks = group.size()
    found: dict[str, float] = {}
    most = max(geometry.operand_bytes(ranks) for geometry in plan.geometries)
    with UlyssesCommunicator(group, max_bytes=most, dtype=torch.bfloat16, backend=backend, device=device) as comm:
        session: Any = comm._session
        workspace = comm.create_workspace() if backend == "nccl" else None
        for geometry in plan.geometries:
            for operation in OPERATIONS:
                numbers = range(sets_of(geometry.operand_bytes(ranks)))
                calls = -(-calls_of(geometry.operand_bytes(ranks)) // len(numbers)) * len(numbers)
                xs = [operand(geometry, operation, comm.rank, ranks, number, device) for number in numbers]
                make = comm.allocate_output if direct else _plain_output(geometry, operation, ranks)
                outs = [make(x, operation) for x in xs]
                run = getattr(comm, operation)

                def several(run: Any = run, xs: list[Any] = xs, outs: list[Any] = outs, calls: int = calls) -> None:
                    for index in range(calls):
                        place = index % len(xs)
                        run(xs[place], out=outs[place], workspace=workspace)

                def check(
                    xs: list[Any] = xs, outs: list[Any] = outs, g: Geometry = geometry, o: str = operation
                ) -> None:
                    torch.cuda.synchronize()
                    for number, out in enumerate(outs):
                        compare(g, o, comm, number, out)
                        out.view(torch.int16).fill_(0x5A5A)
                    # A peer's next call must not write an output that is still being looked at or filled.
                    torch.cuda.synchronize()
                    meet(group)

                for out in outs:
                    out.view(torch.int16).fill_(0x5A5A)
                several()
                check()
                graph = captured(several)
                graph.replay()
                check()
                name = f"{geometry.name}/{operation}"
                found[f"{name}/eager"] = batches(group, session.barrier, several, calls, plan.batches)
                found[f"{name}/graph"] = batches(group, session.barrier, graph.replay, calls, plan.batches)
                del graph, xs, outs, several, check
                torch.cuda.empty_cache()
    return found


def _plain_output(geometry: Geometry, operation: str, ranks: int) -> Callable[[torch.Tensor, str], torch.Tensor]:
    other = OPERATIONS[1 - OPERATIONS.index(operation)]
    return lambda x, _: torch.empty(geometry.shape(other, ranks), dtype=x.dtype, device=x.device)


def host_us(group: Any, call: Callable[[], object], rounds: int) -> float:
    """Return microseconds of the host that a call takes, with the device idle before each batch."""
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        meet(group)
        started = time.perf_counter()
        for _ in range(_QUEUE):
            call()
        times.append((time.perf_counter() - started) / _QUEUE * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def overhead(group: Any, plan: Plan) -> dict[str, float]:
    """Time a small call on the host, layer by layer."""
    from comm_core import jit
    from comm_core.jit.selfcheck import SELFCHECK

    device = bind(group, plan.shared)
    rounds = 4 * plan.batches
    stream = torch.cuda.current_stream().cuda_stream
    empty = jit.load(SELFCHECK, device).bind("comm_core_empty_v1")
    with UlyssesCommunicator(group, max_bytes=MIB, dtype=torch.bfloat16, backend="windows", device=device) as comm:
        session: Any = comm._session
        x = torch.ones(1, 2, comm.world_size, 64, dtype=torch.bfloat16, device=device)
        out = comm.allocate_output(x, "scatter_heads")
        # The very arguments of a call: seen once on their way to the entry point, and passed again and again.
        entry, seen = session._calls._exchange, []

        def spy(*fields: int) -> None:
            seen.append(fields)
            entry(*fields)

        session._calls._exchange = spy
        comm.scatter_heads(x, out=out)
        session._calls._exchange = entry
        (fields,) = seen
        for _ in range(20):
            comm.scatter_heads(x, out=out)
        empty(stream, _QUEUE)
        found = {
            "launch": _launch_us(empty, stream, rounds),
            "empty entry": host_us(group, lambda: empty(stream, 1), rounds),
            "exchange entry": host_us(group, lambda: entry(*fields), rounds),
            "session.barrier": host_us(group, session.barrier, rounds),
            "comm.scatter_heads": host_us(group, lambda: comm.scatter_heads(x, out=out), rounds),
        }
        session.check()
    return found


def _launch_us(empty: Callable[..., None], stream: int, rounds: int) -> float:
    """Return microseconds of one launch, many of them from C in one call."""
    times: list[float] = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        started = time.perf_counter()
        empty(stream, _QUEUE)
        times.append((time.perf_counter() - started) / _QUEUE * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def copy_rate(group: Any, shared: bool) -> float:
    """Return bytes a second of copies of 512 MiB: within a GPU, or between two in both directions at once."""
    count = 4
    if shared:
        torch.cuda.set_device(0)
        places = [(0, 0)]
    else:
        places = [(0, 1), (1, 0)]
    lanes: list[tuple[Any, ...]] = []
    for source, target in places:
        # Streams of its own for each direction: torch orders a copy after the current streams of both devices.
        streams = [torch.cuda.Stream(device) for device in dict.fromkeys((source, target))]
        data = torch.randint(0, 255, (_FLOOR_BYTES,), dtype=torch.uint8, device=f"cuda:{source}")
        into = torch.empty(_FLOOR_BYTES, dtype=torch.uint8, device=f"cuda:{target}")
        lanes.append((streams, data, into))
    rates: list[float] = []
    for _ in range(7):
        for index in {index for pair in places for index in pair}:
            torch.cuda.synchronize(index)
        events: list[tuple[Any, Any]] = []
        for streams, _, _ in lanes:
            with torch.cuda.stream(streams[0]):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
            events.append((start, end))
        for _ in range(count):
            for streams, data, into in lanes:
                with torch.cuda.stream(streams[-1]), torch.cuda.stream(streams[0]):
                    into.copy_(data, non_blocking=True)
        for (streams, _, _), (_, end) in zip(lanes, events, strict=True):
            with torch.cuda.stream(streams[0]):
                end.record()
        for _, end in events:
            end.synchronize()
        longest = max(start.elapsed_time(end) for start, end in events) * 1e-3
        rates.append(count * _FLOOR_BYTES / longest)
    for _, data, into in lanes:
        assert torch.equal(data, into.to(data.device)), "a copy did not arrive"
    del lanes, data, into
    torch.cuda.empty_cache()
    return statistics.median(rates[2:])


# In the process that starts them


def measure(plan: Plan, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Measure everything; errors of one part are kept beside the results of the others."""
    count = torch.cuda.device_count()
    size = 8 if plan.shared else count
    found: dict[str, Any] = {
        "errors": {},
        "floor": None,
        "barriers": {},
        "overhead": None,
        "exchanges": {},
        "took": {},
    }
    os.environ["COMM_ALLOW_SHARED_GPU"] = "1"
    backend = "gloo" if plan.shared else "cpu:gloo,cuda:nccl"
    pool = RankPool(size, backend=backend, group_timeout_s=120, strict_warnings=False)

    def part(name: str, work: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            work()
        except Exception as error:
            traceback.print_exc()
            found["errors"][name] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        found["took"][name] = round(time.monotonic() - started, 1)
        print(f"{name}: {found['took'][name]} s", flush=True)
        save(found)

    def floor() -> None:
        (found["floor"],) = pool.run(copy_rate, plan.shared, ranks=1, timeout_s=60)

    def barrier(ranks: int) -> None:
        found["barriers"][str(ranks)] = slowest(pool.run(barriers, plan, ranks=ranks, timeout_s=60))

    def host() -> None:
        found["overhead"] = slowest(pool.run(overhead, plan, ranks=2, timeout_s=60))

    def exchange(path: str) -> None:
        found["exchanges"][path] = slowest(pool.run(exchanges, path, plan, ranks=2, timeout_s=120))

    try:
        part("floor", floor)
        for ranks in (2, 4, 6, 8) if plan.shared else sorted({2, count}):
            part(f"barrier, {ranks} ranks", lambda ranks=ranks: barrier(ranks))
        part("overhead", host)
        for path in PATHS:
            if path != "nccl" or not plan.shared:
                part(path, lambda path=path: exchange(path))
    finally:
        pool.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=["shared", "links"], required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    plan = Plan(options.where == "shared", 3 if options.quick else 5, QUICK if options.quick else GEOMETRIES)

    def save(found: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(found), encoding="utf-8")

    measure(plan, save)


if __name__ == "__main__":
    main()
