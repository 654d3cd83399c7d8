"""The least time of an exchange, from a rate that is measured in the same run.

Over links that is the rate at which copy engines move large blocks between two GPUs, both directions at once; see
docs/benchmarks.md.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from comm_core.bench.geometry import MIB
from comm_core.errors import CommError

if TYPE_CHECKING:
    from comm_core.bench.launch import Placement

__all__ = ["COPY_BYTES", "HOST_COPY_BYTES", "Floor", "measure"]

COPY_BYTES = 512 * MIB
"""Bytes of a copy: from there on the rate does not grow any more."""
HOST_COPY_BYTES = 64 * MIB
_COPIES = 6
_BATCHES = 5
_LEAD_S = 2e-3


class Floor(NamedTuple):
    """A rate, and what it is the rate of.

    Attributes:
        kind: ``"links"``: copies between GPUs, both directions at once; ``"device"``: copies within the one GPU that
            all ranks share; ``"host"``: copies in the host's memory by all ranks at once.
        bytes_per_s: of one direction, of the whole GPU, or of one rank.
        copy_bytes: of each copy.
    """

    kind: str
    bytes_per_s: float
    copy_bytes: int

    def us(self, sent: int, held: int, ranks: int) -> float:
        """Return the least time in microseconds.

        Args:
            sent: bytes that leave each rank.
            held: bytes of each rank's result: where all ranks share a memory, their own shares go through it too.
            ranks: of the group.
        """
        nbytes = {"links": sent, "device": held * ranks, "host": held}[self.kind]
        return nbytes / self.bytes_per_s * 1e6

    @property
    def text(self) -> str:
        """What the floor is, in words."""
        size = f"copies of {self.copy_bytes // MIB} MiB, in this run: {self.bytes_per_s / 1e9:.4g} GB/s"
        if self.kind == "links":
            return (
                "floor = bytes that leave a rank ÷ rate of the copy engines while each rank copies to the next one's "
                f"GPU, {size} a direction"
            )
        if self.kind == "device":
            return (
                "All ranks share one GPU, so this says nothing about links: floor = bytes of all ranks ÷ rate of "
                f"copies within the GPU, {size}"
            )
        return (
            "On the CPU, so this says nothing about GPUs: floor = bytes of a rank's result ÷ rate at which it copies "
            f"in memory while all the others do, {size}"
        )


def measure(group: Any, placement: Placement) -> float:
    """Return this rank's rate in bytes a second, measured while the other ranks measure theirs. On every rank.

    Raises:
        CommError: this rank does not see the next rank's GPU, or a copy did not arrive.
    """
    import torch

    from comm_core.bench import timing

    device = timing.bind(group, placement)
    target = device
    nbytes, copies = COPY_BYTES, _COPIES
    if placement.kind == "host":
        nbytes = HOST_COPY_BYTES
    elif placement.kind == "links":
        target = _next_gpu(placement, device)
    if placement.kind == "device" and group.rank():
        timing.meet(group)
        return float("inf")
    source = torch.arange(nbytes // 8, dtype=torch.int64, device=device)
    into = torch.empty_like(source, device=target)
    rates: list[float] = []
    for number in range(_BATCHES + 2):
        timing.synchronize(device)
        if placement.kind != "device":
            _start_together(group)
        started = time.perf_counter()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(copies):
                into.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) * 1e-3
        else:
            into.copy_(source)
            seconds = (time.perf_counter() - started) * copies
        if number >= 2:
            rates.append(copies * nbytes / seconds)
    if not torch.equal(into.to(device), source):
        raise CommError("a copy that was to give the floor did not arrive")
    del into, source
    timing.empty_cache(device)
    timing.meet(group)
    return statistics.median(rates)


def _next_gpu(placement: Placement, device: Any) -> Any:
    import torch

    seen = torch.cuda.device_count()
    if seen < 2:
        raise CommError(
            "each rank must see the GPU of the next one to measure the floor, and this one sees its own only: start "
            "the ranks with the same CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", (device.index + 1) % min(seen, placement.ranks))


def _start_together(group: Any) -> None:
    """Return on all ranks of one host within microseconds of each other: at a time of the clock that they share."""
    from comm_core.bench import timing

    start = timing.largest(group, time.monotonic()) + _LEAD_S
    while time.monotonic() < start:
        pass
