"""The geometry, exhaustively: groups, slots, widths and payloads, against counting."""

from __future__ import annotations

import pytest

from comm_lowp.sage2.grid import (
    LAYOUTS,
    SM89_SM120,
    SM90,
    Grid,
    ceil_div,
    first_group,
    last_group,
    payload_spec,
    slots,
    touched,
    touchers,
)

GROUPS = (16, 32, 64, 128)


@pytest.mark.parametrize(
    ("rows", "sm90", "sm89"),
    [
        (1, (4, 1), (4, 1)),
        (65, (8, 1), (4, 2)),
        (129, (12, 2), (8, 3)),
        (511, (32, 4), (16, 8)),
        (513, (36, 5), (20, 9)),
        (1000, (64, 8), (32, 16)),
    ],
)
def test_scale_widths_are_those_that_the_consumers_derive(rows, sm90, sm89):
    assert SM90.scale_widths(rows) == sm90
    assert SM89_SM120.scale_widths(rows) == sm89


def test_the_padding_of_v_follows_the_whole_sequence():
    assert [SM90.padded(n) for n in (1, 128, 129)] == [128, 128, 256]
    assert [SM89_SM120.padded(n) for n in (1, 64, 65)] == [64, 64, 128]
    grid = Grid(SM90, 1, 65, 8, 64, 0, 8, 3)
    assert grid.output_shapes(3)[2] == (1, 64, 1, 640)


@pytest.mark.parametrize("group", GROUPS)
def test_slots_is_the_tight_bound_of_what_a_shard_can_touch(group):
    """Over all offsets of a shard within a group."""
    for rows in range(1, 300):
        most = max((offset + rows - 1) // group + 1 for offset in range(group))
        assert slots(rows, group) == most


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 6, 8])
def test_groups_are_those_of_the_rows(group, ranks):
    """First, last, touched and touchers, by looking at every row."""
    for rows in (*range(1, 70), 100, 127, 128, 129, 257):
        owners: dict[int, list[int]] = {}
        for rank in range(ranks):
            groups = sorted({(rank * rows + t) // group for t in range(rows)})
            assert groups == list(range(first_group(rank, rows, group), last_group(rank, rows, group) + 1))
            assert len(groups) == touched(rank, rows, group) <= slots(rows, group)
            for index in groups:
                owners.setdefault(index, []).append(rank)
        for index, found in owners.items():
            assert list(touchers(index, rows, group, ranks)) == found
            # Two descriptors a rank are enough, because a shared group is a boundary of all that share it.
            if len(found) > 1:
                edges = [(first_group(rank, rows, group), last_group(rank, rows, group)) for rank in found]
                assert all(index in edge for edge in edges)


def test_the_map_of_groups_of_eight_ranks_with_65_rows():
    def spans(group: int) -> list[tuple[int, int]]:
        return [(first_group(rank, 65, group), last_group(rank, 65, group)) for rank in range(8)]

    assert spans(16) == [(4 * rank, 4 * rank + 4) for rank in range(8)]
    assert spans(128) == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (3, 4)]
    assert spans(32) == [(2 * rank, 2 * rank + 2) for rank in range(8)]
    assert spans(64) == [(rank, rank + 1) for rank in range(8)]


@pytest.mark.parametrize(
    ("layout", "geometry", "offsets", "end", "chunk", "counts"),
    [
        (SM90, (2, 65, 2, 64, 8), (0, 16640, 33280, 49920, 50000), 50032, 50048, (5, 2)),
        (SM89_SM120, (2, 65, 2, 64, 8), (0, 16640, 33280, 49920, 49968), 50000, 50048, (3, 2)),
        (SM90, (1, 8192, 3, 128, 8), None, None, 9_444_224, (513, 65)),
        (SM89_SM120, (1, 8192, 3, 128, 8), None, None, 9_441_920, (257, 129)),
    ],
)
def test_payloads_have_the_documented_layout(layout, geometry, offsets, end, chunk, counts):
    spec = payload_spec(layout, *geometry)
    found = (spec.q_offset, spec.k_offset, spec.v_offset, spec.q_scale_offset, spec.k_scale_offset)
    assert offsets in (None, found) and end in (None, spec.end)
    assert (spec.chunk_bytes, spec.q_scale_slots, spec.k_scale_slots) == (chunk, *counts)
    assert spec.payload_bytes == geometry[4] * chunk
    assert spec.global_sequence == geometry[4] * geometry[1]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_sections_are_aligned_apart_and_within_the_budget(layout):
    """Three 16-bit operands always have room for a payload: the budget that the documentation names."""
    for ranks in (1, 2, 4, 6, 8):
        for heads in (1, 2, 3, 5):
            for d in (64, 128):
                for b in (1, 2, 3):
                    for rows in (*range(1, 70), 127, 128, 129, 299, 1000, 4096):
                        spec = payload_spec(layout, b, rows, heads, d, ranks)
                        n = b * rows * heads * d
                        assert (spec.q_offset, spec.k_offset, spec.v_offset, spec.q_scale_offset) == (
                            0,
                            n,
                            2 * n,
                            3 * n,
                        )
                        q_end = 3 * n + 4 * b * heads * spec.q_scale_slots
                        assert q_end <= spec.k_scale_offset < q_end + 16
                        assert spec.end == spec.k_scale_offset + 4 * b * heads * spec.k_scale_slots
                        assert spec.end <= spec.chunk_bytes < spec.end + 128
                        assert n % 16 == spec.k_scale_offset % 16 == spec.chunk_bytes % 128 == 0
                        if ranks > 1:
                            assert spec.payload_bytes <= 6 * n * ranks, spec


def test_the_grid_of_a_rank():
    grid = Grid(SM90, 2, 65, 16, 64, 3, 8, 200)
    assert grid.shape == (2, 65, 16, 64) and grid.local_heads == 2 and grid.sequence == 520
    assert grid.padded_sequence == 640 and (grid.q_slots, grid.k_slots) == (5, 2)
    assert [Grid(SM90, 2, 65, 16, 64, rank, 8, 200).live_rows for rank in range(8)] == [65, 65, 65, 5, 0, 0, 0, 0]
    assert grid.statistics_elems == 2 * 16 * (6 * 64 + 2) == sum(_size(shape) for _, shape in grid.statistics)
    assert grid.payload == payload_spec(SM90, 2, 65, 2, 64, 8)
    assert ceil_div(0, 3) == 0 and ceil_div(4, 3) == 2


def _size(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
