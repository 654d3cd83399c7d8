"""Capacity, algorithm and launches of the all-reduce kernels: pure functions, over all sizes that matter."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import comm_core
from comm_core.allreduce import launch
from comm_core.allreduce.kernel_backend import settings_of
from comm_core.allreduce.launch import Settings
from comm_core.topology.facts import DeviceFacts, RankFacts

HEADERS = Path(comm_core.__file__).parent / "include" / "comm_core"
SIZES = st.integers(2, 16)
BYTES = st.integers(1, 1 << 40)
GPU = Settings(264, clusters=True)


def number(header: str, name: str) -> int:
    (value,) = re.findall(rf"{name} = (\d+);", (HEADERS / header).read_text(encoding="utf-8"))
    return int(value)


def test_numbers_are_those_of_the_kernels() -> None:
    assert number("allreduce.cuh", "kReduceThreads") == launch._THREADS[-1]
    assert number("allreduce.cuh", "kFusedThreads") == launch.FUSED_THREADS
    assert number("allreduce.cuh", "kRowThreads") == launch.ROW_THREADS
    assert number("allreduce.cuh", "kReduceBlocks") == launch.PER_SM
    assert number("lamport.cuh", "kLamportHalves") == launch.HALVES
    assert number("team.cuh", "kTeamBlocks") == max(launch._TEAMS)
    # A row that a block has room for has no more groups of 32 vectors than the kernels count.
    rows = launch.MAX_SHARED_BYTES // (2 * launch.VECTOR_BYTES)
    assert rows <= 32 * number("team.cuh", "kTeamParts")


@given(ranks=SIZES, nbytes=BYTES, use_oneshot=st.sampled_from([None, True, False]))
def test_slots_hold_the_operand_and_sums_all_of_it(ranks: int, nbytes: int, use_oneshot: bool | None) -> None:
    shape = launch.shape_of(ranks, nbytes, use_oneshot)
    assert (shape.vectors - 1) * 16 + shape.tail_bytes == nbytes
    assert 1 <= shape.tail_bytes <= 16
    parts = ranks if shape.two_shots else 1
    assert shape.slot_vectors * parts >= shape.vectors > (shape.slot_vectors - 1) * parts
    assert shape.used_bytes(ranks) == launch.required_bytes(ranks, nbytes, use_oneshot)
    assert use_oneshot is None or shape.two_shots is not use_oneshot


@given(ranks=SIZES, nbytes=st.integers(1, 1 << 32), smaller=st.floats(0, 1), force=st.booleans())
def test_what_was_asked_for_fits(ranks: int, nbytes: int, smaller: float, force: bool) -> None:
    """F4: every size up to the largest, as it is chosen; in two shots; and in one where that was asked for."""
    capacity = launch.capacity_bytes(ranks, nbytes, force)
    size = max(1, int(nbytes * smaller))
    ways = [None, False, *([True] if force else [])]
    assert all(launch.required_bytes(ranks, size, way) <= capacity for way in ways)


@pytest.mark.parametrize(("ranks", "limit"), [(2, None), (3, 1474560), (4, 655360), (8, 187245)])
def test_one_shot_up_to_where_its_bytes_cost_more_than_a_trip(ranks: int, limit: int | None) -> None:
    assert launch.one_shot_limit(ranks) == limit
    for nbytes in (1, *((limit, limit + 1) if limit else (1 << 40,))):
        assert launch.one_shot(ranks, nbytes, None) == (limit is None or nbytes <= limit)


@given(
    ranks=SIZES, nbytes=st.integers(1, 1 << 36), blocks=st.integers(1, 600), one=st.sampled_from([None, True, False])
)
def test_plain_launches_fit_the_device(ranks: int, nbytes: int, blocks: int, one: bool | None) -> None:
    """All blocks are on the device at once, whatever the size: they wait for each other."""
    shape = launch.shape_of(ranks, nbytes, one)
    made = launch.plain_launch(shape, Settings(blocks))
    assert 1 <= made.blocks <= blocks
    assert made.threads % 32 == 0
    assert made.threads <= launch._THREADS[-1]
    assert (made.team, made.shared_bytes) == (1, 0)


@given(
    rows=st.integers(1, 5000),
    row_vectors=st.integers(1, 3072),
    blocks=st.integers(1, 600),
    clusters=st.booleans(),
    group=st.sampled_from([0, 1, 8, 16, 24, 64]),
)
def test_fused_launches_fit_the_device(rows: int, row_vectors: int, blocks: int, clusters: bool, group: int) -> None:
    settings = Settings(blocks, clusters)
    assert launch.fused_launch(rows, row_vectors, settings, group, two_shots=True, encoded=True).team == 1
    made = launch.fused_launch(rows, row_vectors, settings, group, encoded=True)
    assert 1 <= made.blocks <= blocks
    assert made.blocks % made.team == 0
    assert made.team == 1 or (clusters and launch.groups_within_warps(group))
    assert made.threads % 32 == 0
    assert made.threads <= launch.FUSED_THREADS
    steps = -(-row_vectors // (made.team * made.threads))
    assert made.shared_bytes >= 2 * steps * made.threads * 16
    # Two of them to a multiprocessor only where it has room for both.
    assert made.blocks <= max(1, blocks // 2) or made.shared_bytes <= 48 << 10


@given(
    rows=st.integers(1, 5000), row_vectors=st.integers(1, 3072), blocks=st.integers(1, 600), clusters=st.booleans()
)
@example(rows=3, row_vectors=1025, blocks=3, clusters=False)
def test_launches_with_a_norm_alone_fit_the_device(rows: int, row_vectors: int, blocks: int, clusters: bool) -> None:
    settings = Settings(blocks, clusters)
    shared = launch.fused_launch(rows, row_vectors, replace(settings, shared=True))
    # Half a multiprocessor each, and no more than there may be.
    assert shared.threads <= launch.ROW_THREADS // 2
    assert shared.blocks <= blocks
    made = launch.fused_launch(rows, row_vectors, settings)
    steps = -(-row_vectors // (made.team * made.threads))
    assert made.blocks % made.team == 0
    assert 1 <= made.blocks <= rows * made.team
    assert made.threads % 32 == 0
    # What the kernels accept (include/comm_core/allreduce_module.cuh, check_reduce).
    whole = steps == 1 and made.team == 1
    assert made.threads <= (launch.ROW_THREADS if whole else launch.FUSED_THREADS)
    assert steps == 1 or made.shared_bytes >= 2 * steps * made.threads * 16
    # Whole rows have the registers of 1024 threads on each of half as many multiprocessors as there may be blocks.
    most = settings.sms * launch.ROW_THREADS if whole else blocks * launch.FUSED_THREADS
    assert made.blocks * made.threads <= max(most, made.team * made.threads)
    # A row that fits a block is never gone through in steps, where nothing has to be kept for an encoding.
    assert steps == 1 or row_vectors > launch.ROW_THREADS


def test_launches_of_the_sizes_that_count() -> None:
    """Rows of 8192 16-bit elements on a GPU of 132 multiprocessors."""
    plain = {
        tokens: launch.plain_launch(launch.shape_of(2, tokens * 16384, None), GPU)[:2]
        for tokens in (1, 32, 128, 2048)
    }
    assert plain == {1: (8, 128), 32: (128, 256), 128: (264, 384), 2048: (264, 384)}
    fused = {tokens: launch.fused_launch(tokens, 1024, GPU) for tokens in (1, 32, 64, 128, 512, 2048)}
    assert fused == {
        1: (8, 128, 8, 0),
        32: (256, 128, 8, 0),
        64: (256, 256, 4, 0),
        128: (128, 1024, 1, 0),
        512: (132, 1024, 1, 0),
        2048: (132, 1024, 1, 0),
    }
    assert launch.fused_launch(1, 512, GPU) == (1, 512, 1, 0)
    assert launch.fused_launch(2048, 128, GPU) == (528, 128, 1, 0)
    encoded = {tokens: launch.fused_launch(tokens, 1024, GPU, encoded=True)[:3] for tokens in (1, 128, 512, 2048)}
    assert encoded == {1: (8, 128, 8), 128: (256, 256, 2), 512: (264, 256, 2), 2048: (264, 256, 2)}
    # Without clusters.
    old = Settings(216)
    assert launch.fused_launch(8, 1024, old) == (8, 1024, 1, 0)
    assert launch.fused_launch(8, 1024, old, encoded=True)[:3] == (8, 352, 1)


def test_rows_that_a_block_has_room_for() -> None:
    assert launch.fits_a_block(3072)
    assert not launch.fits_a_block(3073)
    assert not launch.fits_a_block(3072, 64)


def facts(uuids: list[str], capability: str = "9.0") -> list[RankFacts]:
    return [
        RankFacts(rank, device=DeviceFacts(uuid=uuid, compute_capability=capability))
        for rank, uuid in enumerate(uuids)
    ]


def test_settings_follow_from_the_facts() -> None:
    """All ranks' blocks that share a device are on it at once, those of the next call too; the smallest counts."""
    assert settings_of(facts(["a", "b"]), [132, 132]) == Settings(264, clusters=True)
    assert settings_of(facts(["a", "b"]), [132, 108]) == Settings(216, clusters=True)
    assert settings_of(facts(["a"] * 8), [132] * 8) == Settings(16, clusters=True, shared=True)
    assert settings_of(facts(["a"] * 3 + ["b"]), [132] * 4).blocks == 44
    assert settings_of(facts(["a", "b"], "8.0"), [108, 108]) == Settings(216, clusters=False)
    assert settings_of(facts(["a", "b"], ""), [0, 132]) == Settings(168, clusters=False)
    assert Settings.from_json(GPU.to_json()) == GPU
