"""Memory that is taken away from behind its addresses and brought back, over a fake driver; and what goes with it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm_core.comm_backend import MPIBackend, TorchDistBackend, group_of
from comm_core.consensus import Teardown, Transaction
from comm_core.errors import ArgumentTypeError, CheckpointError, CommError, JointError, UnsupportedError
from comm_core.group import DetachedGroup, Group, thread_groups
from comm_core.memory.detach import attach_jointly, check_detachable, detach_jointly
from comm_core.memory.peer import Mapped, map_jointly
from comm_core.testing.fake_driver import GRANULE, FakeDriver, installed
from comm_core.testing.ranks import run_threads


@pytest.fixture
def driver() -> Iterator[FakeDriver]:
    with installed(FakeDriver()) as fake:
        yield fake
        assert fake.violations == []
        assert fake.alive() == {}


def make(group: Group, *sizes: int, **changes: Any) -> tuple[list[Mapped], Teardown]:
    device = torch.device("cuda", group.rank)
    options: dict[str, Any] = {"form": "vmm_fd", **changes}
    with Transaction(group, "open") as stages:
        made = [map_jointly(stages, size, device, what=f"memory {i}", **options) for i, size in enumerate(sizes)]
        return made, stages.commit()


def use(group: Group, mapped: Mapped, salt: int) -> None:
    """Every rank stores a byte into everybody's memory and finds what the others stored, to its end."""
    for peer, address in enumerate(mapped.addresses):
        ctypes.memset(address + mapped.nbytes - 1 - group.rank, salt + 16 * peer + group.rank, 1)
    group.barrier("stored")
    end = mapped.addresses[group.rank] + mapped.nbytes
    found = list(reversed(ctypes.string_at(end - group.size, group.size)))
    assert found == [salt + 16 * group.rank + peer for peer in range(group.size)]
    group.barrier("found")


def cycles(group: Group, driver: FakeDriver, news: list[list[Group]]) -> bool:
    made, teardown = make(group, 1, 3 * GRANULE)
    before = driver.alive() if group.rank == 0 else {}
    for number, members in enumerate(news):
        for item in made:
            use(group, item, number)
        detach_jointly(group, "going", made)
        if group.rank == 0:
            size = group.size
            assert driver.alive() == {"contexts": 2 * size, "reservations": 2 * size * size}
        group = members[group.rank]
        group.barrier("looked")
        attach_jointly(group, "coming", made)
    for item in made:
        use(group, item, 5)
    assert group.rank != 0 or driver.alive() == before
    group.barrier("counted")
    teardown.group = group
    teardown.close()
    return True


@pytest.mark.parametrize("size", [1, 2, 3])
def test_memory_goes_and_comes_back_at_its_addresses(driver: FakeDriver, size: int) -> None:
    """H3: several allocations, a new group each time; in between there are addresses and nothing else."""
    news = [thread_groups(size) for _ in range(3)]
    assert run_threads(size, cycles, driver, news) == [True] * size


def apart(group: Group, asked: int) -> tuple[int, list[int]]:
    (mapped,), teardown = make(group, 5000, stride=asked)
    use(group, mapped, 1)
    detach_jointly(group, "going", [mapped])
    attach_jointly(group, "coming", [mapped])
    use(group, mapped, 2)
    teardown.close()
    return mapped.stride, [b - a for a, b in zip(mapped.addresses, mapped.addresses[1:], strict=False)]


@pytest.mark.parametrize(("asked", "got"), [(1, GRANULE), (GRANULE, GRANULE), (3 * GRANULE - 5, 3 * GRANULE)])
def test_ranks_memory_can_lie_at_equal_distances(driver: FakeDriver, asked: int, got: int) -> None:
    """In one reservation, on every rank alike; over a detachment as well."""
    assert run_threads(3, apart, asked) == [(got, [got, got])] * 3


def test_other_forms_can_neither_be_placed_nor_detached(driver: FakeDriver) -> None:
    def refused(group: Group) -> str:
        with Transaction(group, "open") as stages:
            device = torch.device("cpu")
            mapped = map_jointly(stages, 5000, device, form="in_process", what="memory")
            with pytest.raises(UnsupportedError, match="the form in_process can't be detached"):
                check_detachable([mapped])
            with pytest.raises(JointError) as caught:
                detach_jointly(group, "going", [mapped])
            assert "can't be detached from its addresses" in str(caught.value)
            stages.commit().close()
        with pytest.raises(JointError) as caught, Transaction(group, "open") as stages:
            map_jointly(stages, 5000, device, form="in_process", what="memory", stride=1)
        return str(caught.value)

    texts = run_threads(2, refused)
    assert texts[0] == texts[1] and "can't be placed at chosen addresses" in texts[0]


def other_addresses(group: Group) -> str:
    (mapped,), teardown = make(group, 5000)
    detach_jointly(group, "going", [mapped])
    memory = mapped.memory
    assert memory is not None
    original = memory.map
    if group.rank == 1:
        memory.map = lambda exports: tuple(address + GRANULE for address in original(exports))  # type: ignore
    with pytest.raises(JointError) as caught:
        attach_jointly(group, "coming", [mapped])
    teardown.close()
    return str(caught.value)


def test_other_addresses_are_an_error_before_anything_is_written(driver: FakeDriver) -> None:
    """H1: captured graphs and tables hold the old ones."""
    texts = run_threads(2, other_addresses)
    assert texts[0] == texts[1] and "rank 1: memory came back at other addresses" in texts[0]


def alone(group: Group, driver: FakeDriver, last: int) -> list[str]:
    made, teardown = make(group, 1, 1)
    detach_jointly(group, "going", made)
    texts: list[str] = []
    if group.rank == last:
        driver.fail("cuMemAddressFree", times=1)
        with pytest.raises(CommError) as caught:
            teardown.release_alone()
        texts.append(str(caught.value))
        group.barrier("failed once")
    else:
        group.barrier("failed once")
    teardown.release_alone()
    assert teardown.closed
    return texts


def test_what_was_detached_is_released_without_the_others(driver: FakeDriver) -> None:
    """H2: and what can't be released is tried again by the next call."""
    texts = run_threads(2, alone, driver, 1)[1]
    assert len(texts) == 1 and "can't take down" in texts[0] and "cuMemAddressFree failed" in texts[0]


def test_a_group_that_was_let_go_knows_who_it_was() -> None:
    first, second = thread_groups(2)
    gone = DetachedGroup(second, "this thing")
    assert (gone.rank, gone.size, gone.process_group) == (1, 2, None)
    for call in (lambda: gone.gather("a step", None), lambda: gone.barrier("a step")):
        with pytest.raises(CheckpointError, match="a step: this thing has no group while its memory is detached"):
            call()
    assert first.rank == 0


def test_whatever_stands_for_ranks_is_a_group() -> None:
    """What `checkpoint_restore` takes."""
    (group,) = thread_groups(1)
    assert group_of(group) is group
    assert group_of(TorchDistBackend(group)).gather("step", 3) == [3]

    class Comm:
        def Get_rank(self) -> int:
            return 0

        def Get_size(self) -> int:
            return 1

        def allgather(self, data: Any) -> list[Any]:
            return [data]

    assert group_of(MPIBackend(Comm())).gather("step", [1, None]) == [[1, None]]
    for wrong in ("gloo", 5.0, object()):
        with pytest.raises(ArgumentTypeError):
            group_of(wrong)  # type: ignore[arg-type]


def in_step(group: Group, log: list[str]) -> bool:
    """Rank 0 is slow with every step; nobody may be at the next one meanwhile."""
    (mapped,), teardown = make(group, 5000)
    memory: Any = mapped.memory

    def noted(name: str) -> None:
        original = getattr(memory, name)

        def run() -> None:
            if group.rank == 0:
                threading.Event().wait(0.2)
            original()
            log.append(name)

        setattr(memory, name, run)

    steps = ("settle", "detach_peers", "detach")
    for name in steps:
        noted(name)
    detach_jointly(group, "going", [mapped])
    for name in steps:
        delattr(memory, name)
    attach_jointly(group, "coming", [mapped])
    teardown.close()
    return True


def test_nobody_gives_memory_up_while_somebody_has_it_mapped(driver: FakeDriver) -> None:
    """E4: nor unmaps it while a device may still write it: each step is over everywhere before the next."""
    log: list[str] = []
    assert run_threads(2, in_step, log) == [True, True]
    assert log == ["settle"] * 2 + ["detach_peers"] * 2 + ["detach"] * 2
