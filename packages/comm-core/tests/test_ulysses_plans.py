"""Plans, widely and without processes: every byte of every destination comes from the right place.

The definition of each operation is written here once more, element by element, and compared with the plan executed
row by row; then the two ways of executing a plan (through flat buffers, and directly) are compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.transport import strided
from comm_core.transport.plan import Copy, Level, Plan, collapse
from comm_core.transport.wire import wire
from comm_core.ulysses import plans

DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Geometry:
    world_size: int
    batch: int
    sequence: int
    local_heads: int
    head_dim: int
    itemsize: int

    @property
    def heads(self) -> int:
        return self.world_size * self.local_heads


geometries = st.builds(
    Geometry,
    world_size=st.integers(1, 8),
    batch=st.integers(1, 3),
    sequence=st.integers(1, 5),
    local_heads=st.integers(1, 4),
    head_dim=st.integers(1, 9),
    itemsize=st.sampled_from([1, 2, 4]),
)


def numbered(rank: int, shape: Sequence[int], itemsize: int) -> torch.Tensor:
    """Return a tensor whose elements are all different, between ranks too (as far as the element size allows)."""
    count = int(np.prod(shape))
    values = (torch.arange(count, dtype=torch.int64) * 7 + rank * 100_003) % (1 << (8 * itemsize - 1))
    return values.to(DTYPES[itemsize]).reshape(tuple(shape))


def row_by_row(plan: Plan, others: Sequence[Plan], sources: Sequence[Sequence[torch.Tensor]], out: bytearray) -> None:
    """Execute what all ranks send to `plan.rank`, byte range by byte range, as the docstring of a copy says."""
    for sender, other in enumerate(others):
        images = [as_bytes(tensor) for tensor in sources[sender]]
        for copy in other.sends:
            if copy.peer == plan.rank:
                for at, to in copy.rows():
                    out[to : to + copy.row_bytes] = images[copy.source][at : at + copy.row_bytes]


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the storage of `tensor` from its first element on."""
    skip = tensor.data_ptr() - tensor.untyped_storage().data_ptr()
    return bytes(tensor.untyped_storage().tolist()[skip:])


def through_buffers(
    all_plans: Sequence[Plan], sources: Sequence[Sequence[torch.Tensor]], outs: list[torch.Tensor]
) -> None:
    """Execute the plans of all ranks as torch.distributed does: pack, swap pieces, unpack."""
    layouts = [wire(plan) for plan in all_plans]
    sent: list[torch.Tensor] = []
    for layout, own in zip(layouts, sources, strict=True):
        if layout.send_in_place:
            sent.append(strided.byte_view(own[0], 0, sum(layout.send_bytes)))
            continue
        buffer = torch.full((sum(layout.send_bytes),), 0xEE, dtype=torch.uint8)
        strided.pack(layout.pack, own, buffer)
        sent.append(buffer)
    for rank, layout in enumerate(layouts):
        pieces = [torch.split(buffer, layouts[peer].send_bytes)[rank] for peer, buffer in enumerate(sent)]
        assert tuple(piece.numel() for piece in pieces) == layout.receive_bytes
        received = torch.cat(pieces)
        if layout.receive_in_place:
            strided.byte_view(outs[rank], 0, received.numel()).copy_(received)
        else:
            strided.unpack(layout.unpack, received, outs[rank])


def check(
    plan_of: Callable[[int], Plan],
    sources: Sequence[Sequence[torch.Tensor]],
    expected: Sequence[torch.Tensor],
    initial: Sequence[torch.Tensor],
) -> list[Plan]:
    size = len(sources)
    all_plans = [plan_of(rank) for rank in range(size)]
    for rank, plan in enumerate(all_plans):
        check_shape(plan, expected[rank].numel() * expected[rank].element_size())
        image = bytearray(as_bytes(initial[rank].clone()))
        row_by_row(plan, all_plans, sources, image)
        assert bytes(image) == as_bytes(expected[rank]), f"rank {rank}, row by row"
    outs = [tensor.clone() for tensor in initial]
    through_buffers(all_plans, sources, outs)
    for rank in range(size):
        assert torch.equal(outs[rank], expected[rank]), f"rank {rank}, through buffers"
    return all_plans


def check_shape(plan: Plan, target_bytes: int) -> None:
    """Check what every executor relies on: sends match receives, no byte is written twice, none is out of bounds."""
    assert plan.target_bytes == target_bytes
    own_sends = [(c.target_offset, c.nbytes) for c in plan.sends if c.peer == plan.rank]
    own_receives = [(c.target_offset, c.nbytes) for c in plan.receives if c.peer == plan.rank]
    assert own_sends == own_receives
    written = np.zeros(target_bytes, dtype=np.int8)
    for copy in plan.receives:
        assert copy.target_offset >= 0 and copy.target_end <= target_bytes
        for _, to in copy.rows():
            written[to : to + copy.row_bytes] += 1
    assert written.max() == 1, "a byte is written twice"
    assert bool(written.min()) == plan.covers_target
    assert [copy.peer for copy in plan.sends] == sorted(copy.peer for copy in plan.sends)


@settings(max_examples=60, deadline=None)
@given(geometries)
def test_scatter_and_gather_are_what_they_say_and_inverse(g: Geometry) -> None:
    """D2, D6: for every batch size, and never silently longer or shorter."""
    shape = (g.batch, g.sequence, g.heads, g.head_dim)
    x = [numbered(rank, shape, g.itemsize) for rank in range(g.world_size)]
    y = [
        torch.empty(g.batch, g.sequence * g.world_size, g.local_heads, g.head_dim, dtype=DTYPES[g.itemsize])
        for _ in range(g.world_size)
    ]
    for r, target in enumerate(y):
        for j, source in enumerate(x):
            for s in range(g.sequence):
                for h in range(g.local_heads):
                    target[:, j * g.sequence + s, h] = source[:, s, r * g.local_heads + h]
    junk = [torch.full_like(tensor, 0x55) for tensor in y]
    built = check(lambda r: plans.scatter_heads(shape, g.itemsize, r, g.world_size), [[t] for t in x], y, junk)
    back = check(
        lambda r: plans.gather_heads((*y[0].shape,), g.itemsize, r, g.world_size),
        [[t] for t in y],
        x,
        [torch.full_like(tensor, 0x55) for tensor in x],
    )
    if g.batch == 1:
        assert wire(built[0]).receive_in_place, "one batch is received where it belongs"
        assert wire(back[0]).send_in_place, "one batch is sent from where it lies"
    remote = (g.world_size - 1) * g.batch * g.sequence * g.local_heads * g.head_dim * g.itemsize
    assert built[0].remote_send_bytes == back[0].remote_send_bytes == remote


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_chunks_are_exchanged_in_place(world_size: int, chunk: int, itemsize: int) -> None:
    x = [numbered(rank, (1, 1, world_size, chunk), itemsize) for rank in range(world_size)]
    y = [torch.stack([x[j][0, 0, r] for j in range(world_size)])[None, None] for r in range(world_size)]
    built = check(
        lambda r: plans.exchange_chunks(chunk, itemsize, r, world_size),
        [[t] for t in x],
        y,
        [torch.zeros_like(tensor) for tensor in y],
    )
    assert wire(built[0]).send_in_place and wire(built[0]).receive_in_place and wire(built[0]).equal


@st.composite
def views(draw: st.DrawFn, rank: int, shape: tuple[int, int, int, int], itemsize: int) -> torch.Tensor:
    """Return a tensor of `shape` that is some view: sliced, transposed, or a slice of a fused projection."""
    b, s, h, d = shape
    kind = draw(st.sampled_from(["packed", "fused", "transposed", "step", "padded"]))
    if kind == "fused":
        return numbered(rank, (b, s, 3, h, d), itemsize)[:, :, draw(st.integers(0, 2))]
    if kind == "transposed":
        return numbered(rank, (b, h, s, d), itemsize).transpose(1, 2)
    if kind == "step":
        return numbered(rank, (b, s, h, 2 * d), itemsize)[..., ::2]
    if kind == "padded":
        return numbered(rank, (b, s + 1, h + 2, d + 1), itemsize)[:, 1:, 1:-1, :-1]
    return numbered(rank, shape, itemsize)


@settings(max_examples=60, deadline=None)
@given(geometries, st.data())
def test_head_bands_of_any_views(g: Geometry, data: st.DataObject) -> None:
    """D7, D13: independent strided views, different ones on each rank; only the band is written."""
    offset = data.draw(st.integers(0, g.local_heads - 1))
    count = data.draw(st.integers(1, g.local_heads - offset))
    shape = (g.batch, g.sequence, g.heads, g.head_dim)
    qkv = [
        [data.draw(views(rank * 3 + part, shape, g.itemsize)) for part in range(3)] for rank in range(g.world_size)
    ]
    fused: list[torch.Tensor] = []
    for r in range(g.world_size):
        at = r * g.local_heads + offset
        parts = [
            torch.cat([qkv[j][part][:, :, at : at + count] for j in range(g.world_size)], 1) for part in range(3)
        ]
        fused.append(torch.cat(parts, -1))
    built = check(
        lambda r: plans.scatter_qkv_head_chunk(
            shape,
            tuple(strides(t) for t in qkv[r]),  # type: ignore[arg-type]
            g.itemsize,
            r,
            g.world_size,
            head_offset=offset,
            head_count=count,
        ),
        qkv,
        fused,
        [torch.full_like(tensor, 0x55) for tensor in fused],
    )
    if g.batch == 1:
        assert wire(built[0]).receive_in_place, "the receive buffer of a workspace can be the result"

    band = (g.batch, g.sequence * g.world_size, count, g.head_dim)
    x = [data.draw(views(rank, band, g.itemsize)) for rank in range(g.world_size)]
    before = [torch.full(shape, 0x2A, dtype=DTYPES[g.itemsize]) for _ in range(g.world_size)]
    after = [tensor.clone() for tensor in before]
    for r, target in enumerate(after):
        for j in range(g.world_size):
            at = j * g.local_heads + offset
            target[:, :, at : at + count] = x[j][:, r * g.sequence : (r + 1) * g.sequence]
    check(
        lambda r: plans.gather_output_head_chunk(
            band, strides(x[r]), g.itemsize, r, g.world_size, local_heads=g.local_heads, head_offset=offset
        ),
        [[t] for t in x],
        after,
        before,
    )


def strides(tensor: torch.Tensor) -> tuple[int, int, int, int]:
    a, b, c, d = tensor.stride()
    return a, b, c, d


nests = st.lists(st.builds(Level, st.integers(1, 3), st.integers(0, 40), st.integers(0, 40)), max_size=4)


@settings(max_examples=200, deadline=None)
@given(nests, st.integers(1, 8))
def test_collapsing_a_nest_changes_no_byte_and_no_order(levels: list[Level], row: int) -> None:
    def offsets(levels: Sequence[Level], row_bytes: int) -> list[tuple[int, int]]:
        copy = Copy(0, 0, 0, 0, tuple(levels), row_bytes)
        return [(a + i, b + i) for a, b in copy.rows() for i in range(row_bytes)]

    short, row_bytes = collapse(levels, row)
    assert offsets(short, row_bytes) == offsets(levels, row)
    assert all(level.repeat > 1 for level in short) and len(short) <= len(levels)


def test_a_packed_operand_collapses_to_long_rows() -> None:
    """What makes copies fast: [B, S, H, D] at B = 1 is one level of rows of H_local * D elements."""
    plan = plans.scatter_heads((1, 4608, 24, 128), 2, 0, 8)
    assert {copy.levels for copy in plan.sends} == {(Level(4608, 24 * 128 * 2, 3 * 128 * 2),)}
    assert {copy.row_bytes for copy in plan.sends} == {3 * 128 * 2}
    assert len(wire(plan).pack) == 1, "all peers fold into one strided copy"


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8])
def test_odd_addresses_are_copied_in_units_that_fit(offset: int) -> None:
    """A view that begins anywhere in its storage must not be read in units that straddle its elements."""
    storage = torch.arange(64 + offset, dtype=torch.uint8)
    x = storage[offset : offset + 64].view(1, 4, 4, 4)
    plan = plans.scatter_heads((1, 4, 4, 4), 1, 0, 2)
    buffer = torch.zeros(64, dtype=torch.uint8)
    strided.pack(wire(plan).pack, (x,), buffer)
    assert torch.equal(buffer, torch.cat([x[:, :, :2].reshape(-1), x[:, :, 2:].reshape(-1)]))


def test_plans_are_cached_by_geometry() -> None:
    first = plans.scatter_heads((2, 3, 4, 5), 2, 1, 4)
    assert plans.scatter_heads((2, 3, 4, 5), 2, 1, 4) is first
    assert plans.scatter_heads((2, 3, 4, 5), 4, 1, 4) is not first
