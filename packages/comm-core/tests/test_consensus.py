"""Joint outcomes: one rank's failure is everybody's, with one error, and everything is taken down in step."""

from __future__ import annotations

import time
from typing import Any

import pytest

from comm_core.consensus import Transaction, joint
from comm_core.errors import GroupTimeoutError, JointError, JointValueError
from comm_core.group import StoreGroup, thread_groups
from comm_core.testing.ranks import on_threads

STAGES = ("build", "allocate", "map")


def test_all_values_come_back_where_nobody_fails() -> None:
    assert on_threads(thread_groups(3), lambda group: joint(group, "probe", lambda: group.rank)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), OSError(2, "gone")])
def test_one_failure_raises_the_same_error_everywhere(error: BaseException) -> None:
    def body(group: StoreGroup) -> Any:
        def make() -> int:
            if group.rank == 1:
                raise error
            return 0

        return joint(group, "probe", make, error=JointValueError)

    results = on_threads(thread_groups(3), body)
    assert {str(result) for result in results} == {str(results[0])}
    assert all(isinstance(result, JointValueError) for result in results)
    assert results[0].per_rank.keys() == {1}
    assert type(error).__name__ in str(results[0])
    assert results[1].__cause__ is error and results[0].__cause__ is None


class Resources:
    """What one rank holds; the order in which all ranks let go is recorded in one list."""

    def __init__(self, rank: int, log: list[tuple[str, int]]) -> None:
        self.rank = rank
        self.log = log
        self.held: list[str] = []

    def take(self, name: str) -> str:
        self.held.append(name)
        return name

    def drop(self, name: str) -> None:
        self.held.remove(name)
        self.log.append((name, self.rank))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("stage", [*STAGES, "between"])
def test_a_failure_at_any_stage_on_any_rank_takes_everything_down_in_step(size: int, stage: str) -> None:
    """E6: injected at each stage on each rank; nothing is held afterwards, and no rank is ahead of another."""
    for culprit in range(size):
        log: list[tuple[str, int]] = []
        resources = [Resources(rank, log) for rank in range(size)]

        def body(group: StoreGroup, culprit: int = culprit, resources: list[Resources] = resources) -> Any:
            own = resources[group.rank]

            def make(name: str) -> str:
                if group.rank == culprit and name == stage:
                    raise MemoryError(f"no room in {name}")
                return own.take(name)

            with Transaction(group, "open 'x'") as stages:
                for name in STAGES:
                    stages.step(name, lambda name=name: make(name), own.drop)
                    if stage == "between" and group.rank == culprit and name == "allocate":
                        raise RuntimeError("a bug between two steps")
                return stages.commit()

        results = on_threads(thread_groups(size), body)
        assert all(isinstance(result, Exception) for result in results), results
        assert [own.held for own in resources] == [[]] * size
        assert [name for name, _ in log] == sorted((name for name, _ in log), key=STAGES.index, reverse=True)
        assert {str(result) for result in results} == {str(results[0])}
        cause = "RuntimeError: a bug between two steps" if stage == "between" else f"MemoryError: no room in {stage}"
        assert results[0].per_rank == {culprit: cause}
        assert cause.endswith(str(results[culprit].__cause__))


def test_a_committed_teardown_closes_in_reverse_and_once() -> None:
    log: list[tuple[str, int]] = []

    def body(group: StoreGroup) -> Any:
        own = Resources(group.rank, log)
        with Transaction(group, "open 'x'") as stages:
            for name in STAGES:
                stages.step(name, lambda name=name: own.take(name), own.drop)
            teardown = stages.commit()
        assert not teardown.closed
        teardown.close()
        teardown.close()
        return teardown.closed, own.held

    assert on_threads(thread_groups(3), body) == [(True, [])] * 3
    assert len(log) == 9 and [name for name, _ in log[::3]] == ["map", "allocate", "build"]


@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_a_step_that_resists_is_tried_three_times_by_all_and_can_be_tried_again(failures: int) -> None:
    def body(group: StoreGroup) -> Any:
        left = [failures if group.rank == 0 else 0]

        def undo(_: None) -> None:
            if left[0]:
                left[0] -= 1
                raise OSError("busy")

        with Transaction(group, "open 'x'") as stages:
            stages.step("map", lambda: None, undo)
            teardown = stages.commit()
        if failures >= 3:
            with pytest.raises(JointError, match="rank 0: OSError: busy"):
                teardown.close()
            assert teardown.closed == (group.rank != 0)
        teardown.close()
        return teardown.closed

    assert on_threads(thread_groups(2), body) == [True, True]


def test_memory_that_a_lost_peer_may_still_write_is_kept_and_counted() -> None:
    """E4: without the whole group's word nothing shared is released; what only this rank uses is."""
    released: list[str] = []

    def body(group: StoreGroup) -> Any:
        with Transaction(group, "open 'x'") as stages:
            stages.step("private", lambda: "private", released.append)
            stages.step("window", lambda: "window", released.append, shared_bytes=4096)
            teardown = stages.commit()
        if group.rank == 1:
            return None
        with pytest.raises(GroupTimeoutError, match="4096 bytes") as caught:
            teardown.close(timeout_s=0.2)
        assert teardown.closed
        return caught.value.missing

    assert on_threads(thread_groups(2), body) == [(1,), None]
    assert released == ["private"]


def test_a_rank_that_never_comes_ends_the_transaction_within_the_deadline() -> None:
    def body(group: StoreGroup) -> Any:
        started = time.monotonic()
        if group.rank == 1:
            time.sleep(0.8)
        with pytest.raises(GroupTimeoutError), Transaction(group, "open 'x'", timeout_s=0.3) as stages:
            stages.step("build", lambda: None)
        return time.monotonic() - started

    seconds = on_threads(thread_groups(2), body)
    assert max(seconds) < 3


def test_leaving_without_commit_is_a_failure() -> None:
    def body(group: StoreGroup) -> Any:
        own = Resources(group.rank, [])
        with pytest.raises(JointError, match="without commit"), Transaction(group, "open 'x'") as stages:
            stages.step("build", lambda: own.take("build"), own.drop)
        return own.held

    assert on_threads(thread_groups(2), body) == [[], []]


def test_an_interrupt_is_shared_and_stays_an_interrupt() -> None:
    def body(group: StoreGroup) -> Any:
        def make() -> int:
            if group.rank == 1:
                raise KeyboardInterrupt
            return 0

        try:
            return joint(group, "probe", make)
        except KeyboardInterrupt:
            return "interrupted"

    results = on_threads(thread_groups(2), body)
    assert results[1] == "interrupted" and isinstance(results[0], JointError)
