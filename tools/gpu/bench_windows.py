"""``python -m gpu.bench_windows``: barriers and call overhead over windows.

    --where shared   all ranks on the first GPU, which needs MPS for times that mean anything
    --where links    a GPU for each rank

A figure is the median of several batches on the slowest rank (`comm_core.bench.timing`). Exchanges are measured by
``commctl bench ulysses``. Writes JSON after each part, so that what was measured survives whatever happens later.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from comm_core import UlyssesCommunicator
from comm_core.bench import launch
from comm_core.bench.geometry import MIB
from comm_core.bench.launch import Placement
from comm_core.bench.timing import batches, bind, captured, meet
from comm_core.errors import CommError

_QUEUE = 200
"""Calls between two synchronizations when the host's time is measured: fewer than a stream queues."""


@dataclass(frozen=True)
class Plan:
    """How much is measured; equal on all ranks."""

    placement: Placement
    batches: int


def slowest(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each figure on the rank where it is largest."""
    return {name: max(result[name] for result in results) for name in results[0]}


# On the ranks


def barriers(group: Any, plan: Plan) -> dict[str, float]:
    """Time a barrier, eager and in a graph, and an empty kernel in a graph."""
    from comm_core import jit
    from comm_core.jit.selfcheck import SELFCHECK

    device = bind(group, plan.placement)
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

        def timed(work: Callable[[], None], calls: int) -> float:
            return batches(group, device, session.barrier, work, calls, 2 * plan.batches + 1).device

        eager = timed(several, 50)
        in_graph = timed(replays, 500)
        kernels = captured(lambda: empty(torch.cuda.current_stream().cuda_stream, 500))
        floor = timed(kernels.replay, 500)
        session.check()
    return {"eager": eager, "graph": in_graph, "floor": floor}


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

    device = bind(group, plan.placement)
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


# In the process that starts them


def measure(where: str, count: int, save: Callable[[dict[str, Any]], None]) -> None:
    """Measure everything; errors of one part are kept beside the results of the others.

    Args:
        where: ``"shared"`` or ``"links"``.
        count: batches of a figure.
        save: is called with what there is after each part.
    """
    gpus = torch.cuda.device_count()
    sizes = (2, 4, 6, 8) if where == "shared" else sorted({2, gpus})
    found: dict[str, Any] = {"errors": {}, "barriers": {}, "overhead": None, "took": {}}

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

    def on_ranks(function: Callable[[Any, Plan], dict[str, float]], size: int) -> dict[str, float]:
        plan = Plan(launch.place("cuda", where, size, gpus=gpus), count)
        results = ranks.run(function, plan, timeout_s=60, ranks=size)
        for rank, result in enumerate(results):
            if result.error is not None:
                raise CommError(f"rank {rank}: {type(result.error).__name__}: {result.error}") from result.error
        return slowest([result.value for result in results])

    def barrier(size: int) -> None:
        found["barriers"][str(size)] = on_ranks(barriers, size)

    def host() -> None:
        found["overhead"] = on_ranks(overhead, 2)

    with launch.ranks(launch.place("cuda", where, max(sizes), gpus=gpus)) as ranks:
        for size in sizes:
            part(f"barrier, {size} ranks", lambda size=size: barrier(size))
        part("overhead", host)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--where", choices=["shared", "links"], required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)

    def save(found: dict[str, Any]) -> None:
        options.json.write_text(json.dumps(found), encoding="utf-8")

    measure(options.where, 3 if options.quick else 5, save)


if __name__ == "__main__":
    main()
