"""The passes of one rank, each beside its floor: the bytes that must move ÷ the bandwidth measured in the same run.

Three sets of operands and outputs take turns, so that no cache helps. Times are taken by events over many calls back
to back; a figure is the median of several batches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from comm_core import _cuda, jit
from comm_core.errors import CommError
from comm_lowp import kernels
from comm_lowp.bench.goals import GOALS, PASSES, Problem, least_bytes
from comm_lowp.bench.module import BANDWIDTH
from comm_lowp.kernels import Final, Kernels, Scratch
from comm_lowp.sage2 import primitives, reference

__all__ = ["Bandwidth", "measure_bandwidth", "measure_passes"]

_SETS = 3
_BYTES = 1 << 30
_READ_BLOCKS_PER_SM = (0, 4, 6, 8, 16)
"""Ways to launch the kernel that only reads; the fastest gives the floor. 0 is a block for each piece."""


class Bandwidth(NamedTuple):
    """Bytes a second of the device's memory.

    Attributes:
        read: of a kernel that only reads.
        copy: of a copy, bytes read and written together.
    """

    read: float
    copy: float

    def floor_s(self, read: int, written: int) -> float:
        """Return the least seconds for moving that many bytes."""
        return (read + written) / (self.copy if written else self.read)


def _times(work: Callable[[int], None], calls: int, batches: int) -> list[float]:
    """Return seconds a call of each batch, sorted; ``work(i)`` enqueues call i."""
    for number in range(_SETS):
        work(number)
    found: list[float] = []
    for _ in range(batches):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for number in range(calls):
            work(number)
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) * 1e-3 / calls)
    return sorted(found)


def measure_bandwidth(device: torch.device, batches: int) -> Bandwidth:
    """Measure reading and copying of 1 GiB."""
    source = torch.randint(-(2**62), 2**62, (_BYTES // 8,), dtype=torch.int64, device=device)
    into = torch.empty_like(source)
    copied = _times(lambda _: void(into.copy_(source)), 4, batches)
    if not torch.equal(source, into):
        raise CommError("a copy that was to give the floor did not arrive")
    read = jit.load(BANDWIDTH, device).bind("comm_lowp_read_v1")
    sink = torch.zeros(1, dtype=torch.int32, device=device)
    # torch's annotations of it are partial.
    processors = int(cast("Any", torch.cuda).get_device_properties(device).multi_processor_count)
    stream = _cuda.raw_stream(device.index)
    best = min(
        statistics.median(
            _times(
                lambda _, blocks=blocks: read(
                    stream, source.data_ptr(), sink.data_ptr(), _BYTES, blocks * processors
                ),
                4,
                batches,
            )
        )
        for blocks in _READ_BLOCKS_PER_SM
    )
    return Bandwidth(_BYTES / best, 2 * _BYTES / statistics.median(copied))


def void(_: object) -> None:
    """Drop a result."""


@dataclass
class _Set:
    """Operands and outputs that one call in three uses."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    flat: torch.Tensor
    scratch: Scratch
    final: Final
    sent: torch.Tensor
    outs: list[torch.Tensor]


def _sets(loaded: Kernels, problem: Problem) -> Iterator[_Set]:
    grid, dtype = problem.grid, getattr(torch, problem.dtype)
    device = loaded.device
    generator = torch.Generator(device).manual_seed(1)
    b, rows, h, d = grid.shape
    for _ in range(_SETS):
        shape = (b, rows, 3, h, d) if problem.fused else (3, b, rows, h, d)
        values = torch.randn(shape, generator=generator, device=device, dtype=dtype)
        q, k, v = values.unbind(2 if problem.fused else 0)
        shapes, dtypes = grid.output_shapes(grid.used_sequence), reference.output_dtypes()
        yield _Set(
            q,
            k,
            v,
            torch.empty(grid.world_size, grid.statistics_elems, device=device),
            loaded.scratch(grid, dtype),
            loaded.final(grid, dtype),
            torch.empty(grid.world_size, grid.payload.chunk_bytes, dtype=torch.uint8, device=device),
            [torch.empty(shape, dtype=kind, device=device) for shape, kind in zip(shapes, dtypes, strict=True)],
        )


def _verify(loaded: Kernels, problem: Problem) -> None:
    """Compare every byte of a small problem of the same kind, before anything is timed.

    Raises:
        CommError: a byte differs.
    """
    small = Problem(777, 2 * problem.ranks, problem.head_dim, problem.dtype, problem.layout, problem.ranks)
    grid = small.grid
    item = next(_sets(loaded, small))
    flat = torch.empty_like(item.flat[0])
    context = primitives.torch_statistics(item.q, item.k, item.v, grid, flat)
    loaded.statistics(item.q, item.k, item.v, grid, item.flat[0], item.scratch)
    gathered = item.flat[:1].expand_as(item.flat).contiguous()
    record = primitives.torch_final(gathered, context)
    loaded.finalize(gathered, item.scratch, grid, item.final, own_v_scale=item.outs[5])
    loaded.quant_pack(item.q, item.k, item.v, item.final, grid, [chunk.data_ptr() for chunk in item.sent])
    payload = primitives.torch_pack(item.q, item.k, item.v, record, torch.empty_like(item.sent))
    loaded.unpack(item.sent, grid, item.outs[:5])
    outs = [torch.empty_like(out) for out in item.outs]
    primitives.torch_unpack(payload, grid, outs[:5])
    same = torch.equal(item.flat[0], flat) and torch.equal(item.sent, payload)
    for out, other in zip(item.outs[:5], outs, strict=False):
        same = same and torch.equal(out.view(torch.uint8), other.view(torch.uint8))
    if not same:
        raise CommError(f"{small.name}: the kernels do not give the bytes of the reference; nothing was timed")


def measure_passes(
    device: torch.device, problem: Problem, bandwidth: Bandwidth, *, batches: int, pdl: bool | None = None
) -> list[dict[str, Any]]:
    """Return a row for each pass and for what it consists of.

    Args:
        device: a CUDA device.
        problem: the operands.
        bandwidth: of the same run.
        batches: of 9 calls each.
        pdl: programmatic dependent launch; None is the device's choice.

    Raises:
        CommError: the kernels do not give the reference's bytes.
    """
    loaded = kernels.load(device)
    _verify(loaded, problem)
    grid = problem.grid
    items = list(_sets(loaded, problem))
    destinations = [[chunk.data_ptr() for chunk in item.sent] for item in items]

    def statistics_pass(number: int) -> None:
        item = items[number % _SETS]
        loaded.statistics(item.q, item.k, item.v, grid, item.flat[0], item.scratch, pdl=pdl)

    def first_half(number: int) -> None:
        item = items[number % _SETS]
        loaded.statistics(item.q, item.k, item.v, grid, None, item.scratch, pdl=pdl)

    def finalize(number: int) -> None:
        item = items[number % _SETS]
        loaded.finalize(item.flat, item.scratch, grid, item.final, own_v_scale=item.outs[5], pdl=pdl)

    def pack(number: int) -> None:
        item = items[number % _SETS]
        loaded.quant_pack(item.q, item.k, item.v, item.final, grid, destinations[number % _SETS], pdl=pdl)

    def unpack(number: int) -> None:
        item = items[number % _SETS]
        loaded.unpack(item.sent, grid, item.outs[:5], pdl=pdl)

    def everything(number: int) -> None:
        for work in (statistics_pass, finalize, pack, unpack):
            work(number)

    for number in range(_SETS):
        statistics_pass(number)
        # In place of what other ranks would have sent.
        items[number].flat[1:] = items[number].flat[0]
        finalize(number)
        pack(number)
    least = least_bytes(grid)
    rows: list[dict[str, Any]] = []
    works = (
        ("statistics", statistics_pass),
        ("  without the sum of chunks", first_half),
        ("finalize", finalize),
        ("quantize and pack", pack),
        ("unpack", unpack),
        ("all of them", everything),
    )
    for name, work in works:
        # Tuples of sets, so that each batch ends where it began.
        times = _times(work, 3 * _SETS, batches)
        began = time.perf_counter()
        for number in range(30):
            work(number)
        host = (time.perf_counter() - began) / 30
        torch.cuda.synchronize()
        seconds = statistics.median(times)
        floor = None
        if name in least:
            floor = bandwidth.floor_s(*least[name])
        elif name == "all of them":
            floor = sum(bandwidth.floor_s(*least[part]) for part in PASSES)
        rows.append(
            {
                "problem": problem.name,
                "pass": name,
                "us": round(seconds * 1e6, 2),
                "best_us": round(times[0] * 1e6, 2),
                "floor_us": None if floor is None else round(floor * 1e6, 2),
                "over_floor": None if floor is None else round(seconds / floor, 3),
                "goal": GOALS.get(name),
                "host_us": round(host * 1e6, 2),
            }
        )
    items.clear()
    _cuda.synchronize(device)
    torch.cuda.empty_cache()
    return rows
