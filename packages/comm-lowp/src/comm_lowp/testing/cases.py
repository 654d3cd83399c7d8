"""Inputs that show mistakes, and the primitives run for all ranks in one process.

N(0, 1) hides most of what can go wrong: a mean over the wrong number of rows, padding in a group's amax, a shifted
grid. So magnitudes change from group to group, channels have biases, and the live part may be short.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from hypothesis import strategies as st

from comm_lowp.sage2 import primitives
from comm_lowp.sage2.grid import LAYOUTS
from comm_lowp.testing import oracle

__all__ = ["DATA", "Case", "Inputs", "Run", "cases", "check", "make", "simulate"]

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Q, K and V of the whole sequence, ``[B, S, H, D]``."""

DATA = ("normal", "graded", "biased", "constant_k", "zero_v", "zero_channels", "tiny", "outlier", "zeros", "extreme")


@dataclass(frozen=True)
class Case:
    """One geometry and what is in it.

    Attributes:
        ranks: P.
        batch: B.
        local_heads: h.
        rows: L.
        used: U.
        head_dim: D.
        dtype: of the inputs.
        layout: name.
        data: one of `DATA`.
        seed: of the values.
    """

    ranks: int = 2
    batch: int = 1
    local_heads: int = 1
    rows: int = 65
    used: int = 129
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    layout: str = "sage2_sm90"
    data: str = "graded"
    seed: int = 0

    @property
    def sequence(self) -> int:
        """S."""
        return self.ranks * self.rows

    @property
    def heads(self) -> int:
        """H."""
        return self.ranks * self.local_heads


def make(case: Case) -> Inputs:
    """Return the inputs of a case; rows from `used` on are zero."""
    random = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.sequence, case.heads, case.head_dim)
    tiny = torch.finfo(case.dtype).smallest_normal

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    q, k, v = (normal(*shape) for _ in range(3))
    by_row = torch.exp(2.0 * normal(case.batch, case.sequence, 1, 1))
    bias = normal(case.batch, 1, case.heads, case.head_dim)
    if case.data in ("graded", "zero_channels", "outlier"):
        q, k, v = q * by_row, k * by_row.flip(1) + 3.0 * bias, (v + bias) * torch.exp(2.0 * bias)
    if case.data == "biased":
        # Large means and small deviations: |0 - mean| in a row of padding is far above any live value.
        k, v = 0.1 * k + 40.0 * bias, v + 5.0 * bias
    if case.data == "constant_k":
        k = (40.0 * bias).expand(shape).clone()
    if case.data == "zero_v":
        v.zero_()
    if case.data == "zero_channels":
        for x in (q, k, v):
            x[..., ::7] = 0.0
        v[..., 3] = -0.0
    if case.data == "tiny":
        q, k, v = q * tiny, k * tiny, v * tiny * torch.exp(4.0 * bias)
    if case.data == "outlier":
        for x in (q, k, v):
            x[0, case.seed % case.used, 0, 5] = 0.9 * torch.finfo(torch.float16).max
    if case.data == "zeros":
        q, k, v = (torch.zeros(shape) for _ in range(3))
    if case.data == "extreme":
        # Ties of every rounding, and the largest values of fp16.
        q = torch.round(q * 8.0) / 16.0
        v = torch.randint(-65504, 65505, shape, generator=random).float()
    for x in (q, k, v):
        x[:, case.used :] = 0.0
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


@st.composite
def cases(
    draw: Callable[[Any], Any], *, max_elements: int = 400_000, ranks: tuple[int, ...] = (1, 2, 4, 6, 8)
) -> Case:
    """Return a strategy for cases: all edges of the geometry, small enough to run many."""
    world = int(draw(st.sampled_from(ranks)))
    edges = (1, 2, 5, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 257, 300, 513)
    head_dim = int(draw(st.sampled_from((64, 128))))
    batch, local_heads = int(draw(st.integers(1, 2))), int(draw(st.integers(1, 2)))
    most = max(1, max_elements // (world * world * batch * local_heads * head_dim))
    rows = int(draw(st.sampled_from([edge for edge in edges if edge <= most])))
    sequence = world * rows
    around = {1, sequence, max(1, sequence - 1), max(1, rows), min(sequence, rows + 1), max(1, (world - 1) * rows)}
    around |= {min(sequence, max(1, group + shift)) for group in (16, 32, 64, 128) for shift in (-1, 0, 1)}
    used = int(draw(st.one_of(st.sampled_from(sorted(around)), st.integers(1, sequence))))
    return Case(
        world,
        batch,
        local_heads,
        rows,
        used,
        head_dim,
        cast("torch.dtype", draw(st.sampled_from((torch.bfloat16, torch.float16)))),
        str(draw(st.sampled_from(sorted(LAYOUTS)))),
        str(draw(st.sampled_from(DATA))),
        int(draw(st.integers(0, 1000))),
    )


@dataclass(frozen=True)
class Run:
    """What the primitives made of a case.

    Attributes:
        case: the case.
        sent: each rank's payload.
        received: each rank's payload after the exchange.
        outputs: each rank's (q8, k8, v8, q_scale, k_scale, v_scale), scales for `case.used` rows.
        final: each rank's final statistics.
    """

    case: Case
    sent: list[torch.Tensor]
    received: list[torch.Tensor]
    outputs: list[tuple[torch.Tensor, ...]]
    final: list[primitives.FinalStatistics]

    @property
    def mean(self) -> torch.Tensor:
        """The mean of K."""
        return self.final[0].k_mean_global


def simulate(case: Case, inputs: Inputs, *, mean: torch.Tensor | None = None) -> Run:
    """Encode on every rank of a case, exchange by indexing, and unpack; `mean` replaces the mean of K."""
    size, rows = case.ranks, case.rows
    shards: list[Inputs] = []
    for r in range(size):
        q, k, v = (x[:, r * rows : (r + 1) * rows].contiguous() for x in inputs)
        shards.append((q, k, v))
    local = [
        primitives.local_stats(q, k, v, rank=r, world_size=size, used_sequence=case.used, layout=case.layout)
        for r, (q, k, v) in enumerate(shards)
    ]
    gathered = torch.stack([flat for flat, _ in local])
    final = [primitives.finalize_stats(gathered, local[r][1], shards[r][1]) for r in range(size)]
    if mean is not None:
        final = [_with_mean(case, shards, record, mean) for record in final]
    sent = [primitives.quant_and_pack(q, k, v, final[r]) for r, (q, k, v) in enumerate(shards)]
    received = [torch.stack([sent[source][r] for source in range(size)]) for r in range(size)]
    outputs: list[tuple[torch.Tensor, ...]] = []
    for r in range(size):
        parts = unpack(case, received[r], case.used)
        heads = slice(r * case.local_heads, (r + 1) * case.local_heads)
        outputs.append((*parts, final[r].v_scale[:, heads].contiguous()))
    return Run(case, sent, received, outputs, final)


def unpack(case: Case, received: torch.Tensor, used: int | None) -> tuple[torch.Tensor, ...]:
    """Return q8, k8, v8, q_scale and k_scale of one destination, scales for `used` rows."""
    return primitives.unpack_for_sage(
        received,
        batch_size=case.batch,
        local_sequence=case.rows,
        local_heads=case.local_heads,
        head_dim=case.head_dim,
        world_size=case.ranks,
        scale_sequence=used,
        layout=case.layout,
    )


def _with_mean(
    case: Case, shards: list[Inputs], record: primitives.FinalStatistics, mean: torch.Tensor
) -> primitives.FinalStatistics:
    """Return final statistics for another mean of K, by the single primitives."""
    rank, size = record.grid.rank, case.ranks
    k_amax = primitives.k_grouped_amax(
        shards[rank][1], mean, rank=rank, world_size=size, used_sequence=case.used, layout=case.layout
    )
    extremes = torch.stack(
        [
            primitives.k_boundary_minmax(
                shards[r][1], rank=r, world_size=size, used_sequence=case.used, layout=case.layout
            )
            for r in range(size)
        ]
    )
    primitives.derive_k_boundary_amax(
        k_amax, extremes, mean, rank=rank, local_sequence=case.rows, world_size=size, layout=case.layout
    )
    return replace(record, k_mean_global=mean, k_amax=k_amax)


def check(run: Run, inputs: Inputs, *, mean: torch.Tensor | None = None) -> None:
    """Compare every output byte of a run with the oracle on the gathered sequence.

    Raises:
        AssertionError: a byte differs; the text says where.
    """
    case = run.case
    centre = oracle.mean_of(inputs[1], case.ranks, case.used) if mean is None else oracle.numbers(mean)
    oracle.assert_same_bytes(run.mean.float(), centre, "k_mean")
    expected = oracle.encode(*inputs, case.layout, case.used, centre)
    for rank, outputs in enumerate(run.outputs):
        for name, tensor in zip(expected, outputs, strict=True):
            part = oracle.heads_of(name, expected[name], case.ranks, rank)
            oracle.assert_same_bytes(tensor, part, f"{name} of rank {rank}")
