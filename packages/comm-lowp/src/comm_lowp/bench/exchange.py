"""scatter_qkv between ranks, beside what it replaces: three exchanges in 16 bits, then one device's quantization.

Both end in the same six tensors. What it is compared with is as fast as this project can make it: outputs of the
exchanges lie where peers write them in place, and Q and K are quantized straight into their outputs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from comm_core.bench import timing
from comm_core.bench.launch import Placement
from comm_core.errors import CommError, UnsupportedError
from comm_lowp.bench.goals import EXCHANGE_GOAL, HOST_GOAL_US, Exchange

__all__ = ["Job", "measure", "row"]

_SETS = 3
_HOST_CALLS = 30
"""Calls between two synchronizations when the host's time is measured: fewer kernels than a stream queues."""


@dataclass(frozen=True)
class Job:
    """What the ranks measure; equal on all of them.

    Attributes:
        problem: what is exchanged.
        placement: which ranks run where.
        backend: transport.
        batches: of 9 calls each.
    """

    problem: Exchange
    placement: Placement
    backend: str
    batches: int


def _register() -> None:
    """Give the codec to comm-core where this package is used from its source tree."""
    from comm_core.plugins import register
    from comm_core.plugins.discovery import registry

    if "sage2" not in registry().codecs:
        from comm_lowp.plugin import plugin

        register("sage2", plugin)


class _Baseline:
    """Three exchanges of heads, and the quantization of what arrived by this rank alone."""

    def __init__(self, comm: Any, layout: str, operands: Sequence[Sequence[torch.Tensor]]) -> None:
        from comm_lowp import kernels
        from comm_lowp.sage2.grid import LAYOUTS, Grid

        self._comm = comm
        device, size = comm.device, comm.world_size
        b, rows, heads, d = operands[0][0].shape
        self._kernels = kernels.load(device)
        self._grid = grid = Grid(LAYOUTS[layout], b, size * rows, heads // size, d, 0, 1, size * rows)
        dtype = operands[0][0].dtype
        self._flat = torch.empty(1, grid.statistics_elems, device=device)
        self._scratch = self._kernels.scratch(grid, dtype)
        self._final = self._kernels.final(grid, dtype)
        self._sent = torch.empty(1, grid.payload.chunk_bytes, dtype=torch.uint8, device=device)
        self._arrived = [[comm.allocate_output(x, "scatter_heads") for x in three] for three in operands]
        self._operands = operands

    def exchange(self, number: int) -> None:
        """Exchange Q, K and V."""
        place = number % _SETS
        for x, out in zip(self._operands[place], self._arrived[place], strict=True):
            self._comm.scatter_heads(x, out=out)

    def quantize(self, number: int, outs: Sequence[torch.Tensor]) -> None:
        """Quantize what arrived."""
        q, k, v = self._arrived[number % _SETS]
        grid, final, loaded = self._grid, self._final, self._kernels
        spec = grid.payload
        loaded.statistics(q, k, v, grid, self._flat[0], self._scratch)
        loaded.finalize(self._flat, self._scratch, grid, final, own_v_scale=outs[5])
        # The sections of Q and of K in place of the outputs; V and all scales for the receiver's pass.
        loaded.quant_pack(q, None, None, final, grid, [outs[0].data_ptr()], scales=False)
        loaded.quant_pack(None, k, None, final, grid, [outs[1].data_ptr() - spec.k_offset], scales=False)
        loaded.quant_pack(None, None, v, final, grid, [self._sent.data_ptr()])
        loaded.unpack(self._sent, grid, (None, None, *outs[2:5]))


def measure(group: Any, job: Job) -> dict[str, Any]:
    """Measure on one rank; collective. Times in microseconds.

    Raises:
        CommError: the two ways do not give the same bytes of Q and V.
    """
    from comm_core import UlyssesCommunicator
    from comm_lowp.sage2 import reference

    _register()
    problem, rank = job.problem, int(group.rank())
    device = timing.bind(group, job.placement)
    shape = problem.shape(int(group.size()))
    dtype = getattr(torch, problem.dtype)
    nbytes = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    with UlyssesCommunicator(
        group, max_bytes=3 * nbytes, dtype=dtype, backend=cast("Any", job.backend), device=device
    ) as comm:
        session: Any = comm._session  # pyright: ignore[reportPrivateUsage]
        workspace: Any = comm.prepare_qkv(shape)
        generator = torch.Generator(device).manual_seed(rank)
        operands: list[Any] = [
            [torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in range(3)]
            for _ in range(_SETS)
        ]
        encoded: list[Any] = [comm.scatter_qkv(*three, workspace=workspace) for three in operands]
        baseline = _Baseline(comm, workspace.layout, operands)
        grid = baseline._grid  # pyright: ignore[reportPrivateUsage]
        shapes = grid.output_shapes(grid.used_sequence)
        others = [
            [torch.empty(s, dtype=t, device=device) for s, t in zip(shapes, reference.output_dtypes(), strict=True)]
            for _ in range(_SETS)
        ]

        def scatter(number: int) -> None:
            place = number % _SETS
            comm.scatter_qkv(*operands[place], workspace=workspace, out=encoded[place])

        def both(number: int) -> None:
            baseline.exchange(number)
            baseline.quantize(number, others[number % _SETS])

        for number in range(_SETS):
            both(number)
        torch.cuda.synchronize()
        _compare(encoded, others)

        def timed(work: Callable[[int], None]) -> float:
            return _median(session.barrier, work, job.batches)

        found: dict[str, Any] = {
            "scatter_qkv": timed(scatter),
            "exchange and quantize": timed(both),
            "three exchanges": timed(baseline.exchange),
            "quantization": timed(lambda number: baseline.quantize(number, others[number % _SETS])),
            "host": _host(scatter),
        }
        found["graph"] = _graph(session.barrier, scatter, job.batches)
        session.check()
        return {
            **found,
            "route": workspace.route,
            "transport": workspace.transport,
            "layout": workspace.layout,
            "payload_bytes": workspace.payload_bytes,
        }


def _compare(encoded: Sequence[Any], others: Sequence[Sequence[torch.Tensor]]) -> None:
    """Compare what does not hang on the mean of K, whose last bit depends on how many ranks add it up."""
    for one, other in zip(encoded, others, strict=True):
        for index in (0, 2, 3, 5):
            if not torch.equal(one[index].view(torch.uint8), other[index].view(torch.uint8)):
                raise CommError(f"output {index} of scatter_qkv is not what one device makes; nothing was timed")
        far = (one[1].int() - other[1].int()).abs().max()
        if int(far) > 2:
            raise CommError(f"K of scatter_qkv is off by {int(far)} codes from what one device makes")


def _median(align: Callable[[], None], work: Callable[[int], None], batches: int) -> float:
    """Return microseconds a call of the median batch; all ranks start each together."""
    times: list[float] = []
    calls = 3 * _SETS
    for number in range(_SETS):
        work(number)
    for _ in range(batches):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        align()
        start.record()
        for number in range(calls):
            work(number)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def _host(work: Callable[[int], None]) -> float:
    """Return microseconds of the host that a call takes while the device has room for more."""
    times: list[float] = []
    for _ in range(9):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for number in range(_HOST_CALLS):
            work(number)
        times.append((time.perf_counter() - began) / _HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(times)


def _graph(align: Callable[[], None], work: Callable[[int], None], batches: int) -> float | None:
    """Return microseconds a call in a replayed graph of one call for each set; None where it can't be captured."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for number in range(_SETS):
                work(number)
    except UnsupportedError:
        return None
    return _median(align, lambda _: graph.replay(), batches) / _SETS


def row(problem: Exchange, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what was measured, each figure of the rank where it is largest, and what was to be reached."""
    largest: dict[str, Any] = {
        name: None if results[0][name] is None else max(float(result[name]) for result in results)
        for name in ("scatter_qkv", "exchange and quantize", "three exchanges", "quantization", "host", "graph")
    }
    ratio = float(largest["scatter_qkv"]) / float(largest["exchange and quantize"])
    return {
        "problem": problem.name,
        **{name: None if value is None else round(value, 2) for name, value in largest.items()},
        **{name: results[0][name] for name in ("route", "transport", "layout", "payload_bytes")},
        "ratio": round(ratio, 3),
        "goal": EXCHANGE_GOAL,
        "host_goal": HOST_GOAL_US,
    }
