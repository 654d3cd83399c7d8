"""Operands and geometries that tests of the kernels share, on a host and on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from comm_lowp.sage2.grid import LAYOUTS, SM89_SM120, SM90, Grid

BF16, F16 = torch.bfloat16, torch.float16
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Case(NamedTuple):
    """A global problem; heads are of one destination."""

    ranks: int
    batch: int
    rows: int
    local_heads: int
    dim: int
    used: int
    dtype: torch.dtype
    layout: str
    seed: int = 0
    kind: str = "graded"

    @property
    def grids(self) -> list[Grid]:
        """One a rank."""
        heads = self.ranks * self.local_heads
        layout = LAYOUTS[self.layout]
        return [
            Grid(layout, self.batch, self.rows, heads, self.dim, rank, self.ranks, self.used)
            for rank in range(self.ranks)
        ]

    def shard(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        """Return a rank's rows of a gathered tensor: a view."""
        return x[:, rank * self.rows : (rank + 1) * self.rows]

    def shards(self, values: Sequence[torch.Tensor], rank: int, device: torch.device | None = None) -> Operands:
        """Return a rank's rows of gathered q, k and v: views, or on another device copies."""
        q, k, v = (self.shard(x, rank) if device is None else self.shard(x, rank).to(device) for x in values)
        return q, k, v


KINDS = ("graded", "bias", "zeros", "constant", "outlier", "tiny")


def operands(case: Case) -> Operands:
    """Return gathered q, k and v ``[B, S, H, D]``, zero from the used rows on.

    Magnitudes change by row and channels have biases, because plain random numbers hide mistakes of group and mean.
    """
    generator = torch.Generator().manual_seed(case.seed)
    shape = (case.batch, case.ranks * case.rows, case.ranks * case.local_heads, case.dim)

    def one() -> torch.Tensor:
        x = torch.randn(shape, generator=generator)
        if case.kind != "bias":
            x *= torch.exp2(torch.randint(-6, 7, (1, shape[1], 1, 1), generator=generator).float())
        x += 5 * torch.randn((1, 1, *shape[2:]), generator=generator)
        return x

    q, k, v = one(), one(), one()
    if case.kind == "bias":
        k = 30 * torch.sign(k) + 0.5 * torch.randn(shape, generator=generator)
    elif case.kind == "zeros":
        v[..., ::3] = 0.0
        v[..., 1::3] = -0.0
        q[:, ::2] = 0.0
    elif case.kind == "constant":
        k = k[:, :1].expand(shape).clone()
        v[:] = 0.0
    elif case.kind == "outlier":
        for x in (q, k, v):
            x.view(-1)[int(torch.randint(0, x.numel(), (1,), generator=generator))] = 3e4
    elif case.kind == "tiny":
        # Subnormals of both types, and channels whose factor overflows.
        q, k, v = (x * 2.0 ** (-124 if case.dtype == BF16 else -20) for x in (q, k, v))
    for x in (q, k, v):
        x[:, case.used :] = 0.0
    return q.to(case.dtype), k.to(case.dtype), v.to(case.dtype)


@st.composite
def cases(draw: st.DrawFn, elements: int = 300_000, ranks: tuple[int, ...] = (1, 2, 3, 4, 6, 8)) -> Case:
    """Geometries of at most `elements` elements a gathered tensor."""
    size = draw(st.sampled_from(ranks))
    dim = draw(st.sampled_from((64, 128)))
    heads = draw(st.sampled_from((1, 2, 3, 5, 9)))
    batch = draw(st.sampled_from((1, 1, 2, 3)))
    most = max(elements // (size * size * heads * dim * batch), 2)
    edges = [rows for rows in (1, 2, 5, 16, 65, 127, 128, 129, 255, 256, 257, 513, 600) if rows <= most]
    rows = draw(st.one_of(st.sampled_from(edges), st.integers(1, min(most, 700))))
    total = size * rows
    used = draw(st.one_of(st.just(total), st.integers(1, total), st.integers(1, -(-total // 64)).map(
        lambda groups: min(groups * 64, total))))  # fmt: skip
    return Case(
        size,
        batch,
        rows,
        heads,
        dim,
        used,
        draw(st.sampled_from((BF16, F16))),
        draw(st.sampled_from(sorted(LAYOUTS))),
        draw(st.integers(0, 2**31)),
        draw(st.sampled_from(KINDS)),
    )


EDGES = (
    Case(8, 2, 65, 2, 64, 511, BF16, SM90.name, 1, "zeros"),
    Case(4, 1, 129, 7, 128, 257, F16, SM89_SM120.name, 2, "zeros"),
    Case(2, 1, 257, 4, 128, 513, BF16, SM90.name, 3, "constant"),
    Case(8, 1, 1, 1, 64, 1, BF16, SM90.name, 4),
    Case(8, 1, 2, 1, 128, 16, F16, SM90.name, 5),
    Case(6, 1, 5, 3, 64, 29, BF16, SM89_SM120.name, 6, "bias"),
    Case(1, 1, 700, 2, 128, 700, F16, SM90.name, 7, "outlier"),
    Case(2, 1, 600, 1, 64, 100, BF16, SM89_SM120.name, 8, "bias"),  # a rank without a live row
    Case(4, 1, 128, 1, 128, 384, F16, SM90.name, 9, "tiny"),
    Case(3, 2, 100, 5, 64, 299, BF16, SM89_SM120.name, 10, "tiny"),
    Case(1, 1, 300, 40, 64, 290, BF16, SM90.name, 11),  # several spans of heads
)
