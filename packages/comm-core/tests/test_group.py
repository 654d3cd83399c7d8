"""Gathers through a store: every wait ends, names who is missing, and ends the same way on every rank."""

from __future__ import annotations

import time
from typing import Any

import pytest

from comm_core import _env
from comm_core.errors import ArgumentTypeError, ArgumentValueError, GroupTimeoutError, JointError
from comm_core.group import Group, MemoryStore, StoreGroup, as_group, thread_groups
from comm_core.testing.ranks import on_threads


@pytest.mark.parametrize("size", [1, 2, 8])
def test_values_come_in_rank_order_and_keep_their_types(size: int) -> None:
    value = {"text": "é", "numbers": [1, 2.5, None, True]}
    results = on_threads(thread_groups(size), lambda group: group.gather("step", [group.rank, value]))
    assert results == [[[rank, value] for rank in range(size)]] * size


def test_a_missing_rank_is_named_and_the_late_one_learns_that_it_is_late() -> None:
    """B4, C1: the others give up at the deadline; the late rank must not carry on alone with their values."""

    def body(group: StoreGroup) -> Any:
        if group.rank == 2:
            time.sleep(0.6)
        return group.gather("handshake", group.rank)

    results = on_threads(thread_groups(3, timeout_s=0.2), body)
    assert all(isinstance(result, GroupTimeoutError) for result in results)
    assert all(result.missing == (2,) for result in results)
    assert "rank 2" in str(results[0]) and "handshake" in str(results[0])
    assert "came too late" in str(results[2])


def test_the_group_is_in_step_again_after_a_timeout() -> None:
    def body(group: StoreGroup) -> Any:
        if group.rank == 1:
            time.sleep(0.5)
        with pytest.raises(GroupTimeoutError):
            group.gather("first", group.rank)
        return group.gather("second", group.rank, timeout_s=10)

    assert on_threads(thread_groups(2, timeout_s=0.2), body) == [[0, 1], [0, 1]]


def test_a_value_that_arrives_between_the_last_look_and_the_verdict_counts() -> None:
    """Two ranks must never disagree on whether a gather came about: the first verdict decides for both."""

    class Race(MemoryStore):
        def settle(self, key: str, value: str) -> str:
            # Rank 1 arrives and completes just before rank 0 reports that it gave up.
            if value != "ok":
                self.set("comm_core/1/0/1", '{"value":"late","what":"step"}')
                super().settle(key, "ok")
            return super().settle(key, value)

    group = StoreGroup(Race(), 0, 2, name="race", timeout_s=0.05)
    assert group.gather("step", "early") == ["early", "late"]


def test_ranks_at_different_steps_are_told_apart_on_every_rank() -> None:
    steps = ["open", "open", "close"]
    results = on_threads(thread_groups(3), lambda group: group.gather(steps[group.rank], None))
    assert all(isinstance(result, JointError) for result in results)
    assert results[0].per_rank == {0: "at 'open'", 1: "at 'open'", 2: "at 'close'"}


def test_gathers_leave_nothing_behind_but_the_last_one() -> None:
    store = MemoryStore()
    groups = [StoreGroup(store, rank, 4, name="g", timeout_s=10) for rank in range(4)]
    on_threads(groups, lambda group: [group.gather(f"step {i}", i) for i in range(20)])
    assert {key.split("/")[2] for key in store.keys()} == {"19"}  # noqa: SIM118 - a store is no dict


def test_a_barrier_waits_for_everyone() -> None:
    arrived: list[int] = []

    def body(group: StoreGroup) -> int:
        time.sleep(0.05 * group.rank)
        arrived.append(group.rank)
        group.barrier("all here")
        return len(arrived)

    assert on_threads(thread_groups(4), body) == [4] * 4


def test_a_roll_call_of_some_ranks_finds_the_missing_and_disturbs_no_gather() -> None:
    """After a failed exchange only the ranks that failed compare notes; the group must stay in step."""

    def body(group: StoreGroup) -> Any:
        missing = group.roll_call(f"{group.token()}/call 3", timeout_s=0.3) if group.rank != 1 else None
        return missing, group.gather("after", group.rank)

    everyone = [0, 1, 2]
    assert on_threads(thread_groups(3), body) == [((1,), everyone), (None, everyone), ((1,), everyone)]


def test_the_deadline_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_TIMEOUT_S", "7.5")
    assert StoreGroup(MemoryStore(), 0, 1, name="g").timeout_s == 7.5
    for wrong in ("0", "-1", "soon", "nan", "1e9"):
        monkeypatch.setenv("COMM_TIMEOUT_S", wrong)
        with pytest.raises(ArgumentValueError, match=f"COMM_TIMEOUT_S.*{wrong}"):
            _env.timeout_s()
        # A group puts up with it: raised here, it would be raised on one rank alone (test_selection has the rest).
        assert StoreGroup(MemoryStore(), 0, 1, name="g").timeout_s == 60


def test_a_rank_that_skipped_a_step_is_in_step_again() -> None:
    """Else it would stay one gather behind the others for good, and every later step would fail."""

    def body(group: StoreGroup) -> Any:
        if group.rank == 1:
            time.sleep(0.5)
        for _ in range(2):
            if group.rank != 1:
                with pytest.raises(GroupTimeoutError):
                    group.gather("skipped", None, timeout_s=0.1)
        return group.gather("next", group.rank, timeout_s=10), group.gather("and next", group.rank, timeout_s=10)

    assert on_threads(thread_groups(3), body) == [([0, 1, 2], [0, 1, 2])] * 3


def test_a_rank_that_skipped_the_first_of_two_tries_joins_the_second() -> None:
    def body(group: StoreGroup) -> Any:
        if group.rank == 1:
            time.sleep(0.4)
            return group.gather("open", 1, timeout_s=10)
        with pytest.raises(GroupTimeoutError):
            group.gather("open", 0, timeout_s=0.1)
        return group.gather("open", 0, timeout_s=10)

    assert on_threads(thread_groups(2), body) == [[0, 1], [0, 1]]


def test_what_is_no_group_is_refused() -> None:
    group: Group = thread_groups(1)[0]
    assert as_group(group) is group
    with pytest.raises(ArgumentTypeError, match="list"):
        as_group([0, 1])  # type: ignore[arg-type]
    with pytest.raises(ArgumentValueError, match="init_process_group"):
        as_group(None)
