"""Which engine moves what: pure functions of the geometry and of what the group has agreed on.

Measured on two H200 with NVLink 4 (docs/nvlink.md): stores of the SMs reach 0.93 of what the copy engines do, but
the copy engines need some ten microseconds to start and to be followed by a kernel. So small exchanges are stored by
the SMs alone, and large ones are moved by the copy engines, beside which the SMs store a first part (the *head*)
while the engines start. What follows the head (the *rest*) is cut into chunks of decreasing size, so that a receiver
that copies out of staging does so while the next chunk travels, and little is left to do after the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, cast

from comm_core._json import Json, JsonObject
from comm_core.transport.plan import Copy, Plan

__all__ = ["MAX_CHUNKS", "MAX_SLICES", "PER_SM", "Route", "Settings", "Widths", "route", "settings"]

MAX_SLICES = 224
"""Twin: include/comm_nvlink/ulysses.cuh, kMaxSlices."""
MAX_CHUNKS = 7
"""Twin: include/comm_nvlink/ulysses.cuh, kMaxChunks."""

PER_SM = 2
"""Blocks of the exchange kernel that fit a multiprocessor. Twin: its launch bounds in ulysses.cuh."""
_SMS = 96
"""Multiprocessors of an exchange on a GPU of its own, of 132 on an H100 or H200, 148 on a B200 and 108 on an A100. A
third of them copies this rank's own share."""
_SHARED_SMS = 48
"""The same for all ranks' kernels that share one GPU: they wait for each other, so all must be on it at once. From
compute capability 9.0 on the blocks of each rank's next call may be there already, waiting for the current one: twice
as many."""

Widths: TypeAlias = Mapping[tuple[str, int], int]

_MIB = 1 << 20
_FEW_BYTES = 4 * _MIB
"""Remote bytes below which an exchange gets a part of the blocks."""


@dataclass(frozen=True)
class Settings:
    """What the ranks agreed on when the session was opened.

    Attributes:
        ranks: of the group.
        senders: blocks that serve the peers, a multiple of their number; 0 where no SM may be used during a transfer.
        copiers: blocks that copy a rank's own share.
        engine_bytes: remote bytes from which on the copy engines are used.
        head_bytes: remote bytes of an exchange that the SMs store while the copy engines start.
        measured: whether the session measures `widths` when it is opened.
        chunks: share of each chunk of the rest, by the remote bytes from which on it is cut so.
        widths: (which side is pitched, bytes of a row) -> pieces that a pitched copy of such rows is cut into, for
            the widths at which the copy engines are slow (`comm_nvlink.widths`).
    """

    ranks: int
    senders: int
    copiers: int
    engine_bytes: int = 20 * _MIB
    head_bytes: int = 6 * _MIB
    measured: bool = False
    chunks: tuple[tuple[int, tuple[float, ...]], ...] = (
        (0, (0.85, 0.15)),
        (64 * _MIB, (0.8, 0.2)),
        (128 * _MIB, (0.65, 0.27, 0.08)),
    )
    widths: Widths = field(default_factory=dict[tuple[str, int], int])

    def changed(self, values: Mapping[str, Json]) -> Settings:
        """Return it with other numbers: `values` are plain numbers, `engine_bytes` or `head_bytes`."""
        return replace(self, **cast("dict[str, Any]", dict(values)))

    def to_json(self) -> JsonObject:
        """Return the numbers, for a decision's plan."""
        return {
            "senders": self.senders,
            "copiers": self.copiers,
            "engine_bytes": self.engine_bytes,
            "head_bytes": self.head_bytes,
            "measured": self.measured,
        }


def settings(ranks: int, sharing: int, max_sms: int | None = None) -> Settings:
    """Return how exchanges of a group are divided.

    Args:
        ranks: of the group.
        sharing: ranks that share the GPU that has most of them.
        max_sms: multiprocessors that an exchange may use; None for as many as pay.
    """
    sms = _SMS if sharing == 1 else max(_SHARED_SMS // sharing, ranks // PER_SM)
    blocks = PER_SM * (sms if max_sms is None else min(sms, max_sms))
    peers = ranks - 1
    copiers = min(max(1, blocks // 3), blocks - peers) if blocks else 0
    slices = min(MAX_SLICES, (blocks - copiers) // peers)
    # Ranks that share a GPU have no link to measure.
    return Settings(ranks, slices * peers, copiers, measured=sharing == 1)


@dataclass(frozen=True)
class Route:
    """How one exchange is divided. Equal on all ranks.

    Attributes:
        senders: blocks that serve the peers; 0 for none.
        copiers: blocks that copy the rank's own share; 0 where the copy engines do.
        head: edges of the slices of a peer's head, from 0 on: slice s is the bytes ``[head[s], head[s + 1])`` of what
            goes to that peer, counted in the order of its copies.
        rest: edges of the chunks of the rest, from the end of the head on; empty where the SMs store everything.
    """

    senders: int
    copiers: int
    head: tuple[int, ...]
    rest: tuple[int, ...]

    @property
    def slices(self) -> int:
        """Blocks that serve one peer."""
        return len(self.head) - 1

    @property
    def chunks(self) -> int:
        """Chunks of a rest."""
        return max(0, len(self.rest) - 1)


def _granule(copy: Copy) -> int:
    """Return where a copy may be cut: between rows, and within long ones at whole lines of memory."""
    return copy.row_bytes if copy.row_bytes <= 1 << 16 else 512


def align(copies: Sequence[Copy], at: int) -> int:
    """Return the last place up to `at`, in bytes of all `copies` in their order, where they may be cut."""
    start = 0
    for copy in copies:
        if at < start + copy.nbytes:
            granule = _granule(copy)
            return start + (at - start) // granule * granule
        start += copy.nbytes
    return start


def edges(copies: Sequence[Copy], begin: int, end: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Cut [begin, end) of `copies` into parts of the given shares, which add up to 1, as nearly as can be."""
    cut = [begin]
    total = 0.0
    for share in shares[:-1]:
        total += share
        at = align(copies, begin + int((end - begin) * total))
        cut.append(min(end, max(cut[-1], at)))
    return (*cut, end)


def evenly(copies: Sequence[Copy], begin: int, end: int, parts: int) -> tuple[int, ...]:
    """Cut [begin, end) of `copies` into `parts` equal parts, as nearly as can be."""
    cut = [min(end, max(begin, align(copies, begin + (end - begin) * i // parts))) for i in range(1, parts)]
    return (begin, *cut, end)


def canonical(plan: Plan) -> list[Copy]:
    """Return the copies of one pair of ranks as every rank knows them: those of this rank to itself, as received.

    The copies of all pairs have the same rows, only elsewhere; and they are as if the source were contiguous, so the
    strides of a rank's own operands change nothing.
    """
    return [copy for copy in plan.receives if copy.peer == plan.rank]


def route(plan: Plan, settings: Settings) -> Route:
    """Return how `plan` is executed."""
    copies = canonical(plan)
    each = sum(copy.nbytes for copy in copies)
    peers = settings.ranks - 1
    slices = settings.senders // peers
    if slices == 0:
        return Route(0, 0, (0,), (0, each))
    remote = each * peers
    copiers = settings.copiers
    if remote < _FEW_BYTES:
        # Fewer blocks start sooner, and are enough.
        slices, copiers = max(1, slices // 2), max(1, copiers // 4)
    blocks = (slices * peers, copiers)
    if remote < settings.engine_bytes:
        return Route(*blocks, evenly(copies, 0, each, slices), ())
    head = align(copies, min(settings.head_bytes, remote // 4) // peers)
    shares = next(shares for least, shares in reversed(settings.chunks) if remote >= least)
    return Route(*blocks, evenly(copies, 0, head, slices), edges(copies, head, each, shares))
