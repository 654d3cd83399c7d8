"""``commctl bench allreduce`` on a rank: the contenders, comparison by value, and their times."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from comm_core.allreduce.front import allreduce_fusion, create_allreduce_fusion_workspace
from comm_core.bench import timing
from comm_core.bench.launch import Placement
from comm_core.bench.ulysses import PartError, Row
from comm_core.errors import CommError

__all__ = ["CASES", "COMPARATORS", "Job", "measure"]

CASES = ("sum", "sum, pdl", "norm", "norm, pdl")
"""What a workspace is measured with: the sum alone, and with residual and RMSNorm; each also launched early."""
COMPARATORS = ("nccl", "torch-one-shot", "torch-two-shot")
"""What torch offers: NCCL's all-reduce, and its kernels over symmetric memory, without multicast."""

_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class Job:
    """One part of the benchmark; equal on all ranks.

    Attributes:
        placement: which ranks run where.
        contender: name of an all-reduce backend, or one of `COMPARATORS`.
        tokens: sizes, in rows.
        hidden: elements of a row.
        batches: that a figure is the median of.
    """

    placement: Placement
    contender: str
    tokens: tuple[int, ...]
    hidden: int
    batches: int

    @property
    def cases(self) -> tuple[str, ...]:
        """What is measured."""
        if self.contender in COMPARATORS:
            return CASES[:1]
        return CASES if self.placement.device == "cuda" and self.contender != "dist" else CASES[::2]


def operand(rank: int, tokens: int, hidden: int, device: torch.device) -> torch.Tensor:
    """Return small integers, whose sums are exact, and which differ for every rank."""
    at = torch.arange(tokens * hidden, device=device, dtype=torch.int32).view(tokens, hidden)
    return ((at * 7 + 3 * rank + 1) % 15 - 7).to(_DTYPE)


class _Contender:
    """One way to reduce `x` into `out`."""

    capturable = True
    runs_ahead = True
    """Whether a host can enqueue its graphs before the device comes to them."""

    def __init__(self, group: Any, job: Job, device: torch.device) -> None:
        self.group, self.job, self.device = group, job, device

    def call(self, case: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Return what makes one call."""
        raise NotImplementedError

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """Return where the sum is."""
        return out

    def align(self) -> None:
        """Let what is enqueued afterwards start on all ranks at once."""

    def check(self) -> None:
        """Raise if something that was enqueued has failed since."""

    def close(self) -> None:
        """Release everything."""


class _Workspace(_Contender):
    """An all-reduce backend."""

    def __init__(self, group: Any, job: Job, device: torch.device) -> None:
        super().__init__(group, job, device)
        most = max(job.tokens)
        self.workspace = create_allreduce_fusion_workspace(
            job.contender, max_token_num=most, hidden_dim=job.hidden, dtype=_DTYPE, group=group, device=device
        )
        self.capturable = device.type == "cuda" and job.contender != "dist"
        self.residual = torch.zeros(most, job.hidden, dtype=_DTYPE, device=device)
        self.norm = torch.empty_like(self.residual)
        self.gamma = torch.ones(job.hidden, dtype=_DTYPE, device=device)
        self.first = torch.zeros(1, job.hidden, dtype=_DTYPE, device=device)

    def call(self, case: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """See `_Contender.call`; with a norm, `out` is the sum with a residual of zeros."""
        early = case.endswith("pdl")
        tokens = int(x.shape[0])
        if case.startswith("sum"):
            return lambda: _done(allreduce_fusion(x, self.workspace, 0, early, output=out))
        residual, norm = self.residual[:tokens], self.norm[:tokens]
        return lambda: _done(
            allreduce_fusion(
                x,
                self.workspace,
                1,
                early,
                residual_in=residual,
                rms_gamma=self.gamma,
                norm_out=norm,
                residual_out=out,
            )
        )

    def align(self) -> None:
        """A small call: nobody has its sum before all are there."""
        allreduce_fusion(self.first, self.workspace, 0, output=self.first)

    def check(self) -> None:
        """See `_Contender.check`."""
        self.workspace.check_usable("benchmark")

    def close(self) -> None:
        """See `_Contender.close`."""
        self.workspace.destroy()


def _done(_: object) -> None:
    """Take no notice of what a call returns."""


class _Nccl(_Contender):
    """``torch.distributed.all_reduce``, in place.

    A graph of NCCL's calls makes the host that launches it wait for what is before it, so no delay hides the launch.
    Its graphs take the device longer than that takes the host, but for the first one of a batch.
    """

    runs_ahead = False

    def __init__(self, group: Any, job: Job, device: torch.device) -> None:
        super().__init__(group, job, device)
        self.dist: Any = importlib.import_module("torch.distributed")
        self.capturable = device.type == "cuda"
        self.zero = torch.zeros(1, device=device)

    def call(self, case: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """See `_Contender.call`: `out` holds the operand first."""
        out.copy_(x)
        return lambda: _done(self.dist.all_reduce(out, group=self.group))

    def align(self) -> None:
        """See `_Contender.align`."""
        self.dist.all_reduce(self.zero, group=self.group)


class _Symmetric(_Contender):
    """torch's kernels over symmetric memory."""

    def __init__(self, group: Any, job: Job, device: torch.device) -> None:
        super().__init__(group, job, device)
        memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.buffer: Any = memory.empty(max(job.tokens), job.hidden, dtype=_DTYPE, device=device)
        self.handle: Any = memory.rendezvous(self.buffer, group)
        # torch's annotations leave out its operators.
        self.operators: Any = torch.ops.symm_mem

    def call(self, case: str, x: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """See `_Contender.call`."""
        source, name = self.buffer[: x.shape[0]], self.group.group_name
        source.copy_(x)
        if self.job.contender == "torch-one-shot":
            return lambda: _done(self.operators.one_shot_all_reduce_out(source, "sum", name, out))
        return lambda: _done(self.operators.two_shot_all_reduce_(source, "sum", name))

    def result(self, out: torch.Tensor) -> torch.Tensor:
        """See `_Contender.result`: two shots work in place."""
        return out if self.job.contender == "torch-one-shot" else self.buffer[: out.shape[0]]

    def align(self) -> None:
        """See `_Contender.align`."""
        self.handle.barrier(channel=1)


def measure(group: Any, job: Job) -> list[Row]:
    """Measure one contender on this rank: a row for each case and size. Collective.

    Raises:
        PartError: it failed; the rows before it are in the error.
    """
    rows: list[Row] = []
    contender: _Contender | None = None
    device = timing.bind(group, job.placement)
    try:
        kind = _Nccl if job.contender == "nccl" else _Symmetric if job.contender in COMPARATORS else _Workspace
        contender = kind(group, job, device)
        for tokens in job.tokens:
            for case in job.cases:
                rows.append(_row(group, job, device, contender, tokens, case))
        contender.close()
    except Exception as error:
        if contender is not None:
            # The first error is what counts.
            with contextlib.suppress(Exception):
                contender.close()
        raise PartError.of(error, rows, opened=contender is not None) from error
    return rows


def _row(group: Any, job: Job, device: torch.device, contender: _Contender, tokens: int, case: str) -> Row:
    began = time.perf_counter()
    ranks = job.placement.ranks
    x = operand(int(group.rank()), tokens, job.hidden, device)
    out = torch.full_like(x, 77.0)
    once = contender.call(case, x, out)
    timing.synchronize(device)
    timing.meet(group)
    once()
    timing.synchronize(device)
    contender.check()
    want = torch.stack([operand(rank, tokens, job.hidden, device).float() for rank in range(ranks)]).sum(0)
    if not torch.equal(contender.result(out).float(), want):
        raise CommError(f"{job.contender}, {case}, {tokens} tokens: the sum is wrong")
    timing.meet(group)

    def several(calls: int) -> Callable[[], None]:
        def work() -> None:
            for _ in range(calls):
                once()

        return work

    calls = timing.GRAPH_CALLS
    eager = timing.batches(group, device, contender.align, several(calls), calls, job.batches)
    graph: float | None = None
    if contender.capturable:
        captured = timing.captured(several(calls))
        captured.replay()
        if contender.runs_ahead:
            graph = timing.replayed(group, device, contender.align, captured.replay, calls, job.batches)
        else:
            graph = timing.in_a_row(group, device, contender.align, captured.replay, calls, job.batches)
    contender.check()
    return {
        "case": case,
        "tokens": tokens,
        "eager_us": eager.device,
        "host_us": eager.host,
        "graph_us": graph,
        "took_s": time.perf_counter() - began,
    }
