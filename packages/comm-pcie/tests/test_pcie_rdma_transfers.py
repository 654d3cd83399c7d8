"""Plans as bands of bytes for NICs: every geometry against a permutation by torch, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.errors import ArgumentValueError, UnsupportedError
from comm_core.testing import reference
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.ulysses import plans
from comm_pcie import copies
from comm_pcie.rdma.geometry import MAX_STRIDE, Band
from comm_pcie.rdma.opening import NicRoute, pattern_plans, peers_of
from comm_pcie.rdma.transfers import bands, geometry_of, refuse

SIZES = st.sampled_from([2, 4, 8])


def read(memory: torch.Tensor, band: Band) -> torch.Tensor:
    """The bytes that a key of `band` stands for, one after the other, as a NIC reads them."""
    rows = [memory[band.offset + row * band.pitch :][: band.width] for row in range(band.rows)]
    return torch.cat(rows)


def write(memory: torch.Tensor, band: Band, stream: torch.Tensor) -> None:
    """Write a stream of bytes through a key of `band`."""
    for row in range(band.rows):
        memory[band.offset + row * band.pitch :][: band.width] = stream[row * band.width : (row + 1) * band.width]


def everyone(plan_of: Sequence[Plan], operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange as NICs would, through nothing but geometries; each writer's band as its owner describes it."""
    size = len(operands)
    landing = [operand.contiguous().view(torch.uint8).flatten() for operand in operands]
    outputs = [torch.full((plan.target_bytes,), 0xEE, dtype=torch.uint8) for plan in plan_of]
    geometries = [geometry_of(plan, copies.peers(rank, size)) for rank, plan in enumerate(plan_of)]
    for rank, geometry in enumerate(geometries):
        for peer, transfer in geometry.sends:
            described = dict(geometries[peer].receives)[rank]
            assert described == transfer.target
            write(outputs[peer], described, read(landing[rank], transfer.source))
        for own in plan_of[rank].sends:
            if own.peer == rank:
                source, target = bands(own)
                write(outputs[rank], target, read(landing[rank], source))
    return outputs


@settings(deadline=None)
@given(
    SIZES,
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([torch.uint8, torch.int16, torch.int32]),
)
def test_whole_head_calls_equal_a_permutation(size: int, s: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """T0: scatter reads strided rows, gather writes them, chunks are whole; every byte is where torch puts it."""
    shapes = {
        "scatter_heads": (1, s, size * heads, dim),
        "gather_heads": (1, size * s, heads, dim),
        "exchange_chunks": (1, 1, size, heads * dim),
    }
    for name, shape in shapes.items():
        operands = [
            (torch.arange(1, 1 + torch.Size(shape).numel()) * (7 + 2 * rank) % 97 + rank).to(dtype).reshape(shape)
            for rank in range(size)
        ]
        if name == "exchange_chunks":
            found = [plans.exchange_chunks(shape[-1], dtype.itemsize, rank, size) for rank in range(size)]
        else:
            found = [getattr(plans, name)(shape, dtype.itemsize, rank, size) for rank in range(size)]
        expected = getattr(reference, name)(operands)
        for rank, out in enumerate(everyone(found, operands)):
            assert torch.equal(out, expected[rank].contiguous().view(torch.uint8).flatten()), (name, rank)


def test_which_side_is_strided() -> None:
    """Scattering needs keys at the sender, gathering at the receiver, chunks none at all."""
    scatter = geometry_of(plans.scatter_heads((1, 6, 8, 16), 2, 1, 4), (0, 2, 3))
    assert all(t.source.strided and not t.target.strided for _, t in scatter.sends)
    assert scatter.sends[0][1].source == (0, 6, 64, 256) and scatter.sends[0][1].target == (384, 1, 384, 384)
    gather = geometry_of(plans.gather_heads((1, 8, 2, 16), 2, 1, 4), (0, 2, 3))
    assert all(not t.source.strided and t.target.strided for _, t in gather.sends)
    assert gather.receives[0] == (0, (0, 2, 64, 256)) and [peer for peer, _ in gather.receives] == [0, 2, 3]
    chunks = geometry_of(plans.exchange_chunks(1 << 20, 4, 1, 4), (0, 2, 3))
    assert not any(t.source.strided or t.target.strided for _, t in chunks.sends)


def test_self_test_covers_both_sides_with_odd_rows() -> None:
    for rank in range(4):
        for apart, plan in zip((True, False), pattern_plans(rank, 4), strict=True):
            transfers = [transfer for _, transfer in geometry_of(plan, copies.peers(rank, 4)).sends]
            assert all(t.source.strided == apart and t.target.strided != apart for t in transfers)
            assert all(t.source.width % 2 for t in transfers)


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("name", "side"), [("scatter_heads", "source"), ("gather_heads", "target")])
def test_rows_as_far_apart_as_sixteen_bits_say_and_one_byte_further(name: str, side: str, heads: int) -> None:
    """The library that packs a key cuts larger numbers silently, so they are refused before anything is sent."""
    size = 2
    most = MAX_STRIDE // (size * heads)
    for dim, refused in ((most, False), (most + 1, True)):
        pitch = size * heads * dim
        shape = (1, 2, size * heads, dim) if name == "scatter_heads" else (1, 4, heads, dim)
        plan = getattr(plans, name)(shape, 1, 0, size)
        if not refused:
            geometry = refuse(plan, (1,), plan.target_bytes, plan.target_bytes)
            assert getattr(geometry.sends[0][1], side).pitch == pitch
            continue
        with pytest.raises(ArgumentValueError, match=f"{name}: .*{pitch} bytes apart.*65535.*p2p"):
            refuse(plan, (1,), plan.target_bytes, plan.target_bytes)
    odd = plans.scatter_heads((1, 2, 3, MAX_STRIDE // 3), 1, 0, 3)
    assert refuse(odd, (1, 2), odd.target_bytes, odd.target_bytes).sends[0][1].source.pitch == MAX_STRIDE
    # Chunks and single rows have no distance, so they have no limit.
    chunks = plans.exchange_chunks(1 << 20, 1, 0, size)
    assert refuse(chunks, (1,), 2 << 20, 2 << 20)
    single = plans.scatter_heads((1, 1, 4, 1 << 17), 1, 0, size)
    assert refuse(single, (1,), 1 << 19, 1 << 19)


def test_a_second_batch_is_refused_alike_on_all_ranks() -> None:
    for rank in range(4):
        for plan in (plans.scatter_heads((2, 1, 4, 8), 2, rank, 4), plans.gather_heads((2, 4, 1, 8), 2, rank, 4)):
            with pytest.raises(ArgumentValueError, match=r"take one batch, got 2.*COMM_ULYSSES_PCIE_ROUTE=p2p"):
                geometry_of(plan, copies.peers(rank, 4))
    nested = Copy(1, 0, 0, 0, (Level(2, 100, 10), Level(2, 20, 5)), 5)
    with pytest.raises(UnsupportedError, match="2 levels"):
        bands(nested)
    several = Plan("pair", 0, 2, (nested._replace(levels=()),) * 2, (), 1, 10)
    with pytest.raises(UnsupportedError, match="one piece of one operand"):
        geometry_of(several, (1,))


def test_what_does_not_fit_is_refused() -> None:
    plan = plans.scatter_heads((1, 4, 4, 8), 2, 0, 4)
    with pytest.raises(ArgumentValueError, match="of a buffer of 255"):
        refuse(plan, (1, 2, 3), 255, 255)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_all_ranks_write_to_different_peers_at_each_step(size: int) -> None:
    nodes = tuple(rank % 2 for rank in range(size))
    rdma = NicRoute("rdma", ("nic",) * size, (3,) * size, ("",) * size, nodes)
    for step in range(size - 1):
        assert len({peers_of(rdma, rank)[0][step] for rank in range(size)}) == size
    if size < 8:
        return
    hybrid = rdma._replace(route="hybrid")
    for rank in range(size):
        far, near = peers_of(hybrid, rank)
        assert {nodes[peer] for peer in far} == {1 - nodes[rank]} and len(far) == 4
        assert {nodes[peer] for peer in near} == {nodes[rank]} and len(near) == 3 and rank not in near
