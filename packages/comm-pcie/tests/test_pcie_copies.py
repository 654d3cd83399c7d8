"""Plans as copies of the copy engines: the same bytes, the fewest copies, in an order that crowds nobody."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_core.transport.plan import Copy, Level, Plan
from comm_core.ulysses import plans
from comm_pcie import copies
from comm_pcie.copies import SLOW_ROWS, Box, boxes, pack, peers

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def rows(box: Box) -> list[tuple[int, int]]:
    """Return (source, target) of every row of a box, as a copy engine goes over it."""
    return [
        (
            box.source_offset + (z * box.source_height + y) * box.source_pitch,
            box.target_offset + (z * box.target_height + y) * box.target_pitch,
        )
        for z in range(box.slices)
        for y in range(box.rows)
    ]


def as_bytes(plan: Plan) -> dict[int, list[tuple[int, int]]]:
    """Return peer -> (source byte, target byte) of everything that goes there, by the plan's own nests."""
    found: dict[int, list[tuple[int, int]]] = {}
    for copy in plan.sends:
        if copy.peer != plan.rank:
            for source, target in copy.rows():
                found.setdefault(copy.peer, []).extend((source + i, target + i) for i in range(copy.row_bytes))
    return {peer: sorted(pairs) for peer, pairs in found.items()}


def by_boxes(found: tuple[Box, ...]) -> dict[int, list[tuple[int, int]]]:
    result: dict[int, list[tuple[int, int]]] = {}
    for box in found:
        for source, target in rows(box):
            result.setdefault(box.peer, []).extend((source + i, target + i) for i in range(box.row_bytes))
    return {peer: sorted(pairs) for peer, pairs in result.items()}


@st.composite
def whole_head_plans(draw: Any) -> Plan:
    ranks = draw(st.sampled_from([2, 3, 4, 8]))
    rank = draw(st.integers(0, ranks - 1))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    b, s, local, d = (draw(st.integers(1, most)) for most in (3, 4, 3, 12))
    kind = draw(st.sampled_from(["scatter", "gather", "chunks"]))
    if kind == "scatter":
        return plans.scatter_heads((b, s, ranks * local, d), itemsize, rank, ranks)
    if kind == "gather":
        return plans.gather_heads((b, s * ranks, local, d), itemsize, rank, ranks)
    return plans.exchange_chunks(b * s * d, itemsize, rank, ranks)


@QUICK
@given(whole_head_plans())
def test_they_move_what_the_plan_says_with_one_copy_a_peer(plan: Plan) -> None:
    found = boxes(plan)
    assert by_boxes(found) == as_bytes(plan)
    assert [box.peer for box in found] == list(peers(plan.rank, plan.world_size))
    for box in found:
        # What CUDA demands of a pitched copy.
        assert min(box.source_pitch, box.target_pitch) >= box.row_bytes > 0
        assert min(box.source_height, box.target_height) >= box.rows > 0 and box.slices > 0
        assert box.nbytes == plan.send_bytes[box.peer]


@QUICK
@given(st.data())
def test_any_nest_is_moved_whatever_its_pitches(data: Any) -> None:
    """Deeper nests, and slices that are no whole number of rows apart, take more copies and the same bytes."""
    row = data.draw(st.integers(1, 9))
    levels: list[Level] = []
    source_step = target_step = row
    for _ in range(data.draw(st.integers(0, 4))):
        repeat = data.draw(st.integers(2, 3))
        source, target = (step + data.draw(st.sampled_from([0, 0, 1, row])) for step in (source_step, target_step))
        levels.insert(0, Level(repeat, source, target))
        source_step, target_step = source * repeat, target * repeat
    copy = Copy(1, 0, data.draw(st.integers(0, 5)), data.draw(st.integers(0, 5)), tuple(levels), row)
    plan = Plan("test", 0, 2, (copy,), (), 1, copy.target_end)
    assert by_boxes(boxes(plan)) == as_bytes(plan)


@pytest.mark.parametrize("size", [2, 3, 4, 6, 8, 16])
def test_no_two_ranks_send_to_one_at_the_same_step(size: int) -> None:
    """And where pairs can be made, the two of a pair send to each other."""
    orders = [peers(rank, size) for rank in range(size)]
    for rank, order in enumerate(orders):
        assert sorted(order) == [peer for peer in range(size) if peer != rank]
    for step in range(size - 1):
        at = [order[step] for order in orders]
        assert sorted(at) == list(range(size))
        if size & (size - 1) == 0:
            assert all(at[at[rank]] == rank for rank in range(size))


@pytest.mark.parametrize("width", sorted(SLOW_ROWS))
def test_rows_that_copy_engines_are_slow_at_are_cut(width: int) -> None:
    """Into equal parts that are none of the slow ones; a single row is no pitched copy and stays whole."""
    levels = (Level(5, 2 * width, width),)
    plan = Plan("test", 0, 2, (Copy(1, 0, 0, 0, levels, width),), (), 1, 5 * width)
    found = boxes(plan)
    assert len(found) == SLOW_ROWS[width] and {box.row_bytes for box in found} == {width // SLOW_ROWS[width]}
    assert found[0].row_bytes not in SLOW_ROWS and by_boxes(found) == as_bytes(plan)
    whole = Plan("test", 0, 2, (Copy(1, 0, 0, 0, (), width),), (), 1, width)
    assert [box.row_bytes for box in boxes(whole)] == [width]


def test_rows_that_are_too_far_apart_go_one_by_one() -> None:
    """CUDA refuses a pitch of 2 GiB; a whole operand of 8 GiB may have one."""
    far = 1 << 31
    for pitches in ((far, 16), (16, far)):
        copy = Copy(1, 0, 0, 0, (Level(2, 4 * far, 4 * far), Level(3, *pitches)), 16)
        found = boxes(Plan("test", 0, 2, (copy,), (), 1, copy.target_end))
        assert len(found) == 6 and {(box.rows, box.slices) for box in found} == {(1, 1)}
        assert by_boxes(found) == as_bytes(Plan("test", 0, 2, (copy,), (), 1, copy.target_end))
    near = Copy(1, 0, 0, 0, (Level(3, far - 1, 16),), 16)
    assert len(boxes(Plan("test", 0, 2, (near,), (), 1, near.target_end))) == 1


def test_lanes_share_the_peers() -> None:
    for size in (2, 4, 8):
        lanes = [box.lane for box in boxes(plans.exchange_chunks(4, 2, 0, size))]
        assert lanes == [step % copies.LANES for step in range(size - 1)]


def test_the_module_reads_what_is_packed() -> None:
    found = boxes(plans.scatter_heads((2, 3, 8, 4), 2, 1, 4))
    assert len(pack(found)) == len(found) * copies.COPY_BYTES == 3 * 72
