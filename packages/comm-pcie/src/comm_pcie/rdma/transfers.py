"""From a plan to what NICs move: which bytes of the landing buffer go into which bytes of a peer's output. Pure.

A NIC addresses one stride on one side of a write. That is what the whole-head calls are with one batch: scattering
reads strided rows and writes them one after the other, gathering reads them so and writes them apart, and chunks are
contiguous on both sides. A second batch would be a second stride.
"""

from __future__ import annotations

from functools import lru_cache

from comm_core.errors import ArgumentValueError, UnsupportedError
from comm_core.transport.plan import Copy, Plan
from comm_pcie.rdma.geometry import Band, Geometry, Transfer, problem_of

__all__ = ["bands", "copies_to", "geometry_of", "refuse"]


@lru_cache(512)
def geometry_of(plan: Plan, peers: tuple[int, ...]) -> Geometry:
    """Return what the NIC moves of `plan`, whose operand lies at the beginning of the landing buffer.

    Args:
        plan: a whole-head call of one batch.
        peers: ranks that are reached by NIC, in the order in which they are written to.

    Raises:
        ArgumentValueError: it has more than one batch.
        UnsupportedError: it has more strides than a NIC addresses, or several sources.
    """
    if plan.batch > 1:
        raise ArgumentValueError(
            f"{plan.operation}: routes over NICs take one batch, got {plan.batch}: exchange the batches one by one, "
            "or use the p2p route (COMM_ULYSSES_PCIE_ROUTE=p2p)"
        )
    sends = {copy.peer: copy for copy in plan.sends}
    receives = {copy.peer: copy for copy in plan.receives}
    if plan.source_count != 1 or len(sends) != len(plan.sends) or len(receives) != len(plan.receives):
        raise UnsupportedError(f"{plan.operation}: routes over NICs move one piece of one operand to each peer")
    return Geometry(
        tuple((peer, Transfer(*bands(sends[peer]))) for peer in peers),
        tuple((peer, bands(receives[peer])[1]) for peer in sorted(peers)),
    )


@lru_cache(512)
def copies_to(plan: Plan, ranks: tuple[int, ...]) -> tuple[Copy, ...]:
    """Return the copies of `plan` to these ranks, which need no NIC."""
    return tuple(copy for copy in plan.sends if copy.peer in ranks)


def bands(copy: Copy) -> tuple[Band, Band]:
    """Return a copy as a band of its source and one of its target, with the same bytes in the same order.

    Raises:
        UnsupportedError: it has more than one level.
    """
    if len(copy.levels) > 1:
        raise UnsupportedError(
            f"a NIC addresses rows at one distance, this copy has {len(copy.levels)} levels of them"
        )
    if not copy.levels:
        whole = copy.row_bytes
        return Band(copy.source_offset, 1, whole, whole), Band(copy.target_offset, 1, whole, whole)
    repeat, source_pitch, target_pitch = copy.levels[0]
    return (
        _band(copy.source_offset, repeat, copy.row_bytes, source_pitch),
        _band(copy.target_offset, repeat, copy.row_bytes, target_pitch),
    )


def _band(offset: int, rows: int, width: int, pitch: int) -> Band:
    # Rows without anything between them are one: a linear range needs no key and has no limit.
    if pitch == width:
        return Band(offset, 1, rows * width, rows * width)
    return Band(offset, rows, width, pitch)


@lru_cache(512)
def refuse(plan: Plan, peers: tuple[int, ...], landing: int, output: int) -> Geometry:
    """Return `geometry_of` a plan, or refuse it: by what is equal on all ranks, and before anything is communicated.

    Args:
        plan: the call.
        peers: as in `geometry_of`.
        landing: bytes of the landing buffer.
        output: bytes of the output.

    Raises:
        ArgumentValueError: NICs can't move it; the text says what to do.
    """
    geometry = geometry_of(plan, peers)
    problem = problem_of(geometry, {"landing": landing, "output": output})
    if problem:
        raise ArgumentValueError(f"{plan.operation}: {problem}")
    return geometry
