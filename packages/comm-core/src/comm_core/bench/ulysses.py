"""``commctl bench ulysses`` on a rank: operands, comparison by value, and the times of one contender."""

from __future__ import annotations

import contextlib
import importlib
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from comm_core._version import __version__
from comm_core.bench import timing
from comm_core.bench.contenders import AllToAll, Contender, OverCommunicator, SymmetricMemory
from comm_core.bench.geometry import MIB, OPERATIONS, Geometry
from comm_core.bench.launch import Placement
from comm_core.errors import CommError, UnsupportedError
from comm_core.testing import reference

__all__ = ["ALL_TO_ALL", "SYMMETRIC_MEMORY", "Job", "PartError", "Row", "facts", "measure"]

ALL_TO_ALL = "torch-a2a"
"""``all_to_all_single`` and a permutation."""
SYMMETRIC_MEMORY = "torch-symm"
"""Copies into peers' symmetric memory."""

Row = dict[str, Any]
_POISON = 0x5A5A


@dataclass(frozen=True)
class Job:
    """One part of the benchmark; equal on all ranks.

    Attributes:
        placement: which ranks run where.
        backend: name of a transport, or of one of the two comparators.
        modes: how outputs are allocated: ``"direct"``, ``"staged"``, ``"pool"``, ``"max_sms=0"``.
        geometries: to go through.
        operations: to go through.
        batches: that a figure is the median of.
        options: further arguments of the communicator.
        cold: whether a loop goes round so many operands that no cache holds them.
    """

    placement: Placement
    backend: str
    modes: tuple[str, ...]
    geometries: tuple[Geometry, ...]
    batches: int
    operations: tuple[str, ...] = OPERATIONS
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cold: bool = False


class PartError(CommError, RuntimeError):
    """A part of the benchmark failed on this rank.

    Attributes:
        kind: class of what was raised.
        text: its text.
        opened: whether the contender had been opened.
        rows: what had been measured before.
        trace: where it was raised, as Python prints it.
        reason: what the contender lacks here, where that is why it was not opened, else empty.
    """

    def __init__(self, kind: str, text: str, opened: bool, rows: Sequence[Row], trace: str, reason: str = "") -> None:
        # All of it as arguments, so that the error can be rebuilt in the process that collects the results.
        super().__init__(kind, text, opened, list(rows), trace, reason)
        self.kind, self.text, self.opened, self.rows, self.trace = kind, text, opened, list(rows), trace
        self.reason = reason

    @classmethod
    def of(cls, error: Exception, rows: Sequence[Row], *, opened: bool, during: str = "") -> PartError:
        """Return what stands for `error` in the process that collects the results; for its ``except`` block.

        Args:
            error: what was raised.
            rows: what had been measured before.
            opened: whether the contender had been opened.
            during: put in front of the text.
        """
        kind, reason = type(error).__name__, getattr(error, "reason", "")
        return cls(kind, f"{during}{error}", opened, rows, traceback.format_exc(), reason)

    def __str__(self) -> str:
        """Return what was raised."""
        return f"{self.kind}: {self.text}"


def facts(group: Any, placement: Placement) -> Mapping[str, Any]:
    """Return what this rank measures with; no names of hosts, no paths."""
    device = timing.bind(group, placement)
    found: dict[str, Any] = {"comm-core": __version__, "torch": torch.__version__}
    if device.type == "cuda":
        # torch's annotations of these are partial.
        cuda: Any = torch.cuda
        versions: Any = torch.version
        properties = cuda.get_device_properties(device)
        found |= {"GPU": properties.name, "SMs": properties.multi_processor_count, "CUDA of torch": versions.cuda}
        # A build without NCCL has no such module.
        with contextlib.suppress(ImportError, AttributeError, RuntimeError):
            nccl: Any = importlib.import_module("torch.cuda.nccl")
            found["NCCL"] = ".".join(map(str, nccl.version()))
    return found


def operand(
    geometry: Geometry, operation: str, rank: int, ranks: int, number: int, device: torch.device
) -> torch.Tensor:
    """Return bits that differ for every rank and number, and are the same on whatever device they are made.

    Not torch's random numbers: on CUDA they depend on how many SMs a GPU has.
    """
    shape = geometry.shape(operation, ranks)
    bits = torch.arange(torch.Size(shape).numel(), dtype=torch.int32, device=device)
    # A multiplication by an odd number mixes upwards, a shift downwards: two rounds leave no two slices alike.
    bits.add_((1009 * number + rank + 1) * 0x3C6EF35)
    for factor in (0x45D9F3B, 0x119DE1F3):
        bits.bitwise_xor_(bits >> 15).mul_(factor)
    return bits.bitwise_xor_(bits >> 16).to(torch.int16).view(shape).view(torch.bfloat16)


def measure(group: Any, job: Job) -> list[Row]:
    """Measure one contender on this rank: a row for each geometry, operation and mode. Collective.

    Raises:
        PartError: it failed; the rows before it are in the error.
    """
    rows: list[Row] = []
    contender: Contender | None = None
    device = timing.bind(group, job.placement)
    try:
        contender = _open(group, job, device)
        bench = _Bench(group, job, device, contender)
        for mode in contender.modes(job.modes):
            for geometry in job.geometries:
                for operation in job.operations:
                    rows.append(bench.row(geometry, operation, mode))
                    timing.empty_cache(device)
    except Exception as error:
        if contender is not None:
            # The others may have failed elsewhere, so that this is no orderly close; the first error is what counts.
            with contextlib.suppress(Exception):
                contender.close()
        raise PartError.of(error, rows, opened=contender is not None) from error
    try:
        contender.close()
    except Exception as error:
        raise PartError.of(error, rows, opened=True, during="closing: ") from error
    return rows


def _open(group: Any, job: Job, device: torch.device) -> Contender:
    ranks = job.placement.ranks
    most = max(geometry.operand_bytes(ranks) for geometry in job.geometries)
    if job.backend == ALL_TO_ALL:
        return AllToAll(group, device, most)
    together = max(
        geometry.operand_bytes(ranks) * timing.sets_of(geometry.operand_bytes(ranks), job.cold)
        for geometry in job.geometries
    )
    if job.backend == SYMMETRIC_MEMORY:
        return SymmetricMemory(group, device, together)
    options = dict(job.options)
    if "pool" in job.modes:
        # For all geometries: what torch has divided for one of them does not always serve the next. And a little more
        # for the steps in which it takes memory.
        sizes = [geometry.operand_bytes(ranks) for geometry in job.geometries]
        options["pool_bytes"] = sum(timing.sets_of(nbytes, job.cold) * nbytes for nbytes in sizes) + 128 * MIB
    return OverCommunicator(group, job.backend, device, most, options)


class _Bench:
    """The measurements of one contender."""

    def __init__(self, group: Any, job: Job, device: torch.device, contender: Contender) -> None:
        self.group, self.job, self.device, self.contender = group, job, device, contender
        self.rank, self.ranks = int(group.rank()), job.placement.ranks

    def row(self, geometry: Geometry, operation: str, mode: str) -> Row:
        began = time.perf_counter()
        nbytes = geometry.operand_bytes(self.ranks)
        numbers = range(timing.sets_of(nbytes, self.job.cold))
        xs = [operand(geometry, operation, self.rank, self.ranks, number, self.device) for number in numbers]
        outs = self.contender.outputs(geometry, mode, xs, operation)

        def several(calls: int) -> Callable[[], None]:
            def work() -> None:
                for index in range(calls):
                    place = index % len(xs)
                    self.contender.call(operation, xs[place], outs[place])

            return work

        every = several(len(xs))
        self.poison(outs)
        every()
        self.compare(geometry, operation, outs)
        calls = timing.batch_calls(nbytes, self.seconds_of(several(2)) / 2)
        eager = self.batches(several(calls), calls)
        graph: timing.Times | None = None
        captured = self.captured(several(timing.GRAPH_CALLS)) if self.contender.capturable else None
        if captured is not None:
            self.poison(outs)
            captured.replay()
            self.compare(geometry, operation, outs[: timing.GRAPH_CALLS])
            replays = max(1, calls // timing.GRAPH_CALLS)

            def replay() -> None:
                for _ in range(replays):
                    captured.replay()

            graph = self.batches(replay, replays * timing.GRAPH_CALLS)
        # Once more, after calls that nothing kept apart.
        self.compare(geometry, operation, outs)
        return {
            "mode": mode,
            "geometry": list(geometry),
            "operation": operation,
            "calls": calls,
            "sets": len(numbers),
            "eager_us": eager.device,
            "host_us": eager.host,
            "graph_us": None if graph is None else graph.device,
            "took_s": time.perf_counter() - began,
        }

    def captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Return the graph of `work`, or None where every rank says that this way to call can't be captured."""
        graph, refused = None, None
        # The hosts of a transport may have to meet while they capture.
        timing.meet(self.group)
        try:
            graph = timing.captured(work)
        except UnsupportedError as error:
            refused = error
        if timing.largest(self.group, float(graph is not None)) and refused is not None:
            raise CommError(f"other ranks have captured what this one can't: {refused}") from refused
        return graph

    def batches(self, work: Callable[[], None], calls: int) -> timing.Times:
        count = self.job.batches
        return timing.batches(self.group, self.device, self.contender.align, work, calls, count)

    def seconds_of(self, work: Callable[[], None]) -> float:
        """Return how long `work` takes, from an idle device to an idle one, on the slowest rank."""
        timing.synchronize(self.device)
        timing.meet(self.group)
        started = time.perf_counter()
        work()
        timing.synchronize(self.device)
        return timing.largest(self.group, time.perf_counter() - started)

    def poison(self, outs: Sequence[torch.Tensor]) -> None:
        """Fill the outputs with what no exchange leaves in them, before any peer may write them."""
        timing.synchronize(self.device)
        timing.meet(self.group)
        for out in outs:
            out.view(torch.int16).fill_(_POISON)
        timing.synchronize(self.device)
        timing.meet(self.group)

    def compare(self, geometry: Geometry, operation: str, outs: Sequence[torch.Tensor]) -> None:
        """Compare every bit with what one process makes of all ranks' operands."""
        timing.synchronize(self.device)
        self.contender.check()
        for number, out in enumerate(outs):
            every = [
                operand(geometry, operation, peer, self.ranks, number, self.device) for peer in range(self.ranks)
            ]
            expected = getattr(reference, operation)(every)[self.rank]
            # On the device: the largest operands would take seconds on the host.
            if not torch.equal(out.view(torch.int16), expected.view(torch.int16)):
                reference.assert_same_bits(out, expected, f"{self.job.backend}, {geometry.name}, {operation}")
        # A peer's next call must not write an output that is still being looked at.
        timing.synchronize(self.device)
        timing.meet(self.group)
