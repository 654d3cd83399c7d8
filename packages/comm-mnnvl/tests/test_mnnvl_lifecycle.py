"""Checkpoint and restore as a state machine: what may follow what, who is told, and what a failure leaves.

Over a fake driver in which memory that was taken away can't be touched, and that counts every handle and mapping.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import _cuda, _driver
from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import (
    ArgumentValueError,
    CheckpointError,
    ClosedError,
    CommError,
    GroupTimeoutError,
    JointError,
    JointValueError,
    UnsupportedError,
)
from comm_core.group import Group, MemoryStore, Store, StoreGroup, thread_groups
from comm_core.mapping import Mapping
from comm_core.memory.detach import Lifecycle, check_detachable
from comm_core.memory.peer import Mapped
from comm_core.testing.fake_driver import FakeDriver, installed
from comm_core.testing.fake_nvml import FakeMachine, FakeTorch
from comm_core.testing.ranks import on_threads, run_threads
from comm_mnnvl import MnnvlConfig, MnnvlMemory, SymmDeviceMemory


class Groups:
    """Fresh groups of the same threads, by name: what a restored job makes anew."""

    def __init__(self, size: int, timeout_s: float = 10.0) -> None:
        self._size, self._timeout_s = size, timeout_s
        self._made: dict[Any, list[StoreGroup]] = {}
        self._lock = threading.Lock()

    def __call__(self, name: Any, rank: int, size: int | None = None) -> StoreGroup:
        with self._lock:
            if name not in self._made:
                self._made[name] = thread_groups(size or self._size, name=str(name), timeout_s=self._timeout_s)
            return self._made[name][rank]


def symmetric(group: Group, nbytes: int = 5000) -> SymmDeviceMemory:
    return SymmDeviceMemory(nbytes, group.size, group.rank, group.rank % 8, TorchDistBackend(group))


def works(memory: SymmDeviceMemory, group: Group) -> None:
    """Every rank stores into everybody's memory, and finds what the others stored."""
    size, rank = group.size, group.rank
    for peer in range(size):
        memory.tensor(peer, rank, 1).fill_(1 + 16 * peer + rank)
    group.barrier("written")
    assert memory.tensor(rank, 0, size).tolist() == [1 + 16 * rank + peer for peer in range(size)]
    group.barrier("read")


# Orders


def detached(group: Group) -> int:
    memory = symmetric(group)
    table = memory.get_buffer_ptrs_dev()
    memory.checkpoint_prepare()
    refusals = 0
    for call in (
        lambda: memory.tensor(0, 0, 1),
        lambda: memory.multicast_tensor(0, 1, torch.uint8),
        lambda: memory.lamport_initialize(group.rank, torch.float32),
        lambda: memory.group.gather("something", None),
    ):
        with pytest.raises(CheckpointError, match="detached"):
            call()
        refusals += 1
    # What says where things are goes on saying it: captured graphs and tables hold it.
    assert memory.get_buffer_ptrs_dev() == table and memory.get_unicast_ptr(0) == memory.uc_ptrs[0]
    assert (memory.group.rank, memory.group.size, memory.comm_backend) == (group.rank, group.size, None)
    memory.checkpoint_restore(group)
    works(memory, group)
    memory.close()
    for call in (memory.checkpoint_prepare, lambda: memory.checkpoint_restore(group), lambda: memory.tensor(0, 0, 1)):
        with pytest.raises(ClosedError):
            call()
    memory.close()
    return refusals


def test_calls_while_detached_are_refused_and_addresses_stay(driver: FakeDriver) -> None:
    """H2: and after closing everything is."""
    assert run_threads(2, detached) == [4, 4]


def repeated(group: Group, groups: Groups) -> int:
    memory = symmetric(group)
    memory.checkpoint_restore(group)  # It is there: nothing to do, and all ranks agree on that.
    for name in range(3):
        for _ in range(3):
            memory.checkpoint_prepare()
        for _ in range(3):
            memory.checkpoint_restore(groups(name, group.rank))
        works(memory, groups(name, group.rank))
    memory.close()
    return memory._lifecycle.cycles


def test_repeated_calls_do_nothing(driver: FakeDriver) -> None:
    """H2: in either state, and restored is restored once."""
    assert run_threads(2, repeated, Groups(2)) == [3, 3]


def closed_while_detached(group: Group, first: threading.Event) -> str:
    memory = symmetric(group)
    memory.checkpoint_prepare()
    if group.rank == 1:
        assert first.wait(10)
    memory.close(timeout=0.1)
    first.set()
    return memory.state


def test_closing_while_detached_needs_nobody(driver: FakeDriver) -> None:
    """H2: no rank has anything of another one; the group may be gone."""
    assert run_threads(2, closed_while_detached, threading.Event()) == ["closed", "closed"]


class Destroyed(Store):
    """A store whose owner has gone."""

    def __init__(self) -> None:
        self.gone = False
        self._store = MemoryStore()

    def __getattribute__(self, name: str) -> Any:
        if name in ("set", "get", "check", "settle", "delete"):
            if self.gone:
                raise RuntimeError("the process group was destroyed")
            return getattr(self._store, name)
        return super().__getattribute__(name)

    set = get = check = settle = delete = None  # type: ignore[assignment]


def old_group_gone(group: Group, store: Destroyed, barrier: threading.Barrier) -> bool:
    old = StoreGroup(store, group.rank, group.size, name="old")
    memory = symmetric(old)
    memory.checkpoint_prepare()
    barrier.wait(10)
    store.gone = True
    memory.checkpoint_prepare()
    memory.checkpoint_restore(TorchDistBackend(group))
    works(memory, group)
    memory.checkpoint_prepare()
    memory.checkpoint_restore(group)
    memory.close()
    return True


def test_the_old_group_is_never_used_again(driver: FakeDriver) -> None:
    """H2: it may be destroyed as soon as checkpoint_prepare has returned."""
    assert run_threads(2, old_group_gone, Destroyed(), threading.Barrier(2)) == [True, True]


def mixed(group: Group, calls: tuple[str, str], groups: Groups) -> tuple[str, str]:
    """Make different calls on the ranks; then what is right still works."""
    memory, other = symmetric(group), symmetric(group)
    steps: dict[str, Callable[[], object]] = {
        "prepare": memory.checkpoint_prepare,
        "prepare the other": other.checkpoint_prepare,
        "restore": lambda: memory.checkpoint_restore(group),
        "close": memory.close,
        "barrier": lambda: group.barrier("mine"),
    }
    with pytest.raises(CommError) as caught:
        steps[calls[group.rank % 2]]()
    assert memory.state == other.state == "attached"
    works(memory, group)
    memory.checkpoint_prepare()
    memory.checkpoint_restore(groups("new", group.rank))
    works(memory, group)
    other.close()
    memory.close()
    return type(caught.value).__name__, str(caught.value)


@pytest.mark.parametrize(
    "calls",
    [
        ("prepare", "restore"),
        ("restore", "prepare"),
        ("prepare", "prepare the other"),
        ("close", "prepare"),
        ("prepare", "barrier"),
        ("barrier", "restore"),
    ],
    ids="/".join,
)
def test_ranks_at_different_calls_all_raise_and_nothing_has_changed(
    driver: FakeDriver, calls: tuple[str, str]
) -> None:
    """H2: with what each rank was at."""
    outcomes = run_threads(2, mixed, calls, Groups(2), timeout_s=30)
    assert {name for name, _ in outcomes} == {"JointError"}
    words = "don't mean the same" if calls[1] == "prepare the other" else "different steps"
    assert len({text for _, text in outcomes}) == 1 and words in outcomes[0][1]


def wrong_groups(group: Group, groups: Groups) -> list[str]:
    memory = symmetric(group)
    memory.checkpoint_prepare()
    texts: list[str] = []
    with pytest.raises(ArgumentValueError) as caught:
        memory.checkpoint_restore(groups("larger", group.rank, group.size + 1))
    texts.append(str(caught.value))
    turned = (group.rank + 1) % group.size
    with pytest.raises(JointValueError) as joint:
        memory.checkpoint_restore(groups("turned", turned))
    texts.append(str(joint.value))
    for nothing in ("a name", 5, object()):
        with pytest.raises(ArgumentValueError):
            memory.checkpoint_restore(nothing)
    assert memory.state == "detached"
    memory.checkpoint_restore(groups("right", group.rank))
    works(memory, group)
    memory.close()
    return texts


def test_another_size_or_another_order_of_ranks_is_refused(driver: FakeDriver) -> None:
    """H2: on every rank, before anything is touched; the right group still does."""
    texts = run_threads(3, wrong_groups, Groups(3))
    assert {text[0] for text in texts} == {
        "checkpoint_restore: this SymmDeviceMemory was made by 3 ranks, and the new group has 4"
    }
    (order,) = {text[1] for text in texts}
    assert all(f"rank {rank}: was rank {(rank - 1) % 3}, and is rank {rank}" in order for rank in range(3))


def other_memory(group: Group, groups: Groups) -> str:
    one, two = symmetric(group), symmetric(group)
    one.checkpoint_prepare()
    two.checkpoint_prepare()
    with pytest.raises(JointError) as caught:
        (two if group.rank else one).checkpoint_restore(groups("crossed", group.rank))
    for memory in (one, two):
        memory.checkpoint_restore(groups("right", group.rank))
        works(memory, group)
        memory.close()
    return str(caught.value)


def test_ranks_that_restore_different_memory_are_told(driver: FakeDriver) -> None:
    """H2: two owners of one kind; descriptors of one must never end in the other."""
    texts = run_threads(2, other_memory, Groups(2))
    assert texts[0] == texts[1] and "the ranks don't mean the same" in texts[0]


def half_there(group: Group, groups: Groups) -> str:
    memory = symmetric(group)
    memory.checkpoint_prepare()
    text = ""
    if group.rank == 0:
        with pytest.raises(GroupTimeoutError) as caught:
            memory.checkpoint_restore(Groups(2, 0.2)("late", 0))
        text = str(caught.value)
    # Nothing had been touched, so another attempt with everybody there is as good as the first.
    memory.checkpoint_restore(groups("again", group.rank))
    works(memory, group)
    memory.close()
    return text


def test_a_rank_that_does_not_come_at_all_spoils_nothing(driver: FakeDriver) -> None:
    """H5: restoring has a deadline and names who is missing."""
    text = run_threads(2, half_there, Groups(2))[0]
    assert "no word from rank 1" in text and "checkpoint_restore of this SymmDeviceMemory" in text


def capturing(group: Group, groups: Groups, torches: list[FakeTorch], here: threading.local) -> str:
    here.torch = torches[group.rank]
    memory = symmetric(group)
    torches[1].capturing = torches[1].initialized = True
    with pytest.raises(JointError) as caught:
        memory.checkpoint_prepare()
    works(memory, group)
    torches[1].capturing = False
    memory.checkpoint_prepare()
    group.barrier("prepared")
    torches[1].capturing = True
    with pytest.raises(JointError, match="being captured"):
        memory.checkpoint_restore(group)
    torches[1].capturing = False
    memory.checkpoint_restore(groups("new", group.rank))
    works(memory, group)
    memory.close()
    return str(caught.value)


def test_nothing_is_detached_under_a_capture(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """G-H: a phase is under way on one rank: all are told, and go on."""
    here = threading.local()
    monkeypatch.setattr(_cuda, "source", lambda: here.torch)
    torches = [FakeTorch(FakeMachine.mesh(2)) for _ in range(2)]
    texts = run_threads(2, capturing, Groups(2), torches, here)
    assert texts[0] == texts[1] and "rank 1: a CUDA graph is being captured" in texts[0]


# H1


def resets(group: Group, groups: Groups) -> list[int]:
    """Rank 1 is slow to write what its memory must hold; rank 0 uses it at once when the call returns."""
    memory = symmetric(group)
    memory.checkpoint_prepare()

    def reset() -> None:
        if group.rank == 1:
            threading.Event().wait(0.3)
        memory.tensor(group.rank, 0, 4).fill_(40 + group.rank)

    memory.checkpoint_restore(groups("new", group.rank), reset=reset)
    seen = [memory.tensor(peer, 0, 4).tolist()[3] for peer in range(group.size)]
    pads = [memory.tensor(peer, memory.signal_pad_offset, 2048).any().item() for peer in range(group.size)]
    assert pads == [False] * group.size
    memory.close()
    return seen


def test_no_rank_goes_on_before_all_have_filled_their_memory(driver: FakeDriver) -> None:
    """H1: and signal pads begin at zero again."""
    assert run_threads(2, resets, Groups(2)) == [[40, 41]] * 2


# Failures half-way are final


PREPARE = ("cuCtxSynchronize", "cuMemUnmap", "cuMemRelease")
RESTORE = (
    "cuMemCreate",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
)


def fails(group: Group, where: str, drivers: list[FakeDriver], call: str, groups: Groups, here: Any) -> list[str]:
    here.driver = drivers[group.rank]
    memory = symmetric(group)
    if where == "restore":
        memory.checkpoint_prepare()
    if group.rank == 1:
        here.driver.fail(call, times=10)
    texts: list[str] = []
    with pytest.raises(CheckpointError) as caught:
        if where == "prepare":
            memory.checkpoint_prepare()
        else:
            memory.checkpoint_restore(groups("new", group.rank))
    texts.append(str(caught.value))
    here.driver.fail(call, times=0)
    # Whatever is tried now says the same, without asking anybody.
    for again in (
        memory.checkpoint_prepare,
        lambda: memory.checkpoint_restore(groups("never", group.rank)),
        lambda: memory.tensor(0, 0, 1),
    ):
        with pytest.raises(CheckpointError) as caught:
            again()
        assert texts[0] in str(caught.value)
    assert memory.state == "failed" and not memory.mapped
    memory.close(timeout=0.1)
    assert memory.state == "closed"
    return texts


@pytest.mark.parametrize(
    ("where", "call"), [*(("prepare", call) for call in PREPARE), *(("restore", call) for call in RESTORE)], ids=str
)
def test_a_failure_half_way_is_final_on_every_rank(
    host: Any, monkeypatch: pytest.MonkeyPatch, where: str, call: str
) -> None:
    """H2: with the rank and the call that failed, and what to do."""
    here = threading.local()
    monkeypatch.setattr(_driver, "source", lambda: here.driver)
    drivers = [FakeDriver(), FakeDriver()]
    outcomes = run_threads(2, fails, where, drivers, call, Groups(2), here, timeout_s=30)
    assert outcomes[0] == outcomes[1]
    (text,) = outcomes[0]
    assert f"checkpoint_{where} of this SymmDeviceMemory failed half-way" in text
    assert "rank 1: " in text and f"{call} failed with CUDA error 2" in text
    assert "can't be used, tried again or restored: close it, and restart the processes" in text
    for fake in drivers:
        assert fake.violations == []
        fake.forget()


def dies(group: Group, groups: Groups, here: Any) -> str:
    """Rank 1 vanishes between two steps of the restore."""
    memory = symmetric(group)
    memory.checkpoint_prepare()
    if group.rank == 1:
        monkey = memory._mapped.memory
        assert monkey is not None
        monkey.map = lambda exports: (_ for _ in ()).throw(SystemExit("killed"))  # type: ignore[method-assign]
        gone = groups("new", 1)
        # It takes part up to the exchange of descriptors and then never again.
        original = gone.gather

        def gather(what: str, value: Any, **options: Any) -> Any:
            if what.endswith("map"):
                raise SystemExit("killed")
            return original(what, value, **options)

        gone.gather = gather  # type: ignore[method-assign]
        with pytest.raises((SystemExit, CheckpointError)):
            memory.checkpoint_restore(gone)
        memory.close()
        return ""
    with pytest.raises(CheckpointError) as caught:
        memory.checkpoint_restore(groups("new", 0))
    memory.close()
    return str(caught.value)


def test_a_rank_that_dies_half_way_is_named(kept: FakeDriver) -> None:
    """H2, H5: the others end by their deadline, for good."""
    text = run_threads(2, dies, Groups(2, 2.0), None, timeout_s=60)[0]
    assert "half-way" in text and "no word from rank 1" in text


def interrupted(group: Group, groups: Groups) -> str:
    memory = symmetric(group)
    memory.checkpoint_prepare()

    def reset() -> None:
        if group.rank == 0:
            raise KeyboardInterrupt
        raise ValueError("not this either")

    with pytest.raises(BaseException) as caught:
        memory.checkpoint_restore(groups("new", group.rank), reset=reset)
    assert memory.state == "failed"
    with pytest.raises(CheckpointError, match="half-way"):
        memory.tensor(0, 0, 1)
    memory.close()
    return type(caught.value).__name__


def test_an_interrupt_stays_one_and_is_as_final(kept: FakeDriver) -> None:
    assert run_threads(2, interrupted, Groups(2)) == ["KeyboardInterrupt", "CheckpointError"]


# The state machine alone


def test_memory_without_addresses_of_its_own_can_not_be_detached() -> None:
    with pytest.raises(UnsupportedError, match="cuda_ipc, in_process"):
        check_detachable([Mapped((1,), 1, "in_process"), Mapped((1,), 1, "cuda_ipc")])


class Model:
    """What must come of a sequence of calls of all ranks."""

    def __init__(self) -> None:
        self.state = "attached"
        self.cycles = 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["prepare", "restore", "use", "close", "swap"]), st.integers(0, 5)), max_size=12
    )
)
def test_any_sequence_of_calls_is_what_the_model_says(calls: list[tuple[str, int]]) -> None:
    """H2: property: states agree on all ranks, errors come exactly where the model has them, nothing runs twice."""
    groups = Groups(2)

    def run(group: Group) -> list[str]:
        life = Lifecycle("this thing", group, "key")
        model, seen, done = Model(), [], []

        def do(name: str, fail: bool) -> Callable[[Group], None]:
            def step(used: Group) -> None:
                done.append(name)
                used.barrier(name)
                if fail:
                    used.gather("before the failure", None)
                    raise ValueError(f"{name} fails")

            return step

        for number, (call, luck) in enumerate(calls):
            fail = luck == 5
            new = groups(number, group.rank)
            before = len(done)
            try:
                if call == "prepare":
                    life.prepare(lambda: None, do("detach", fail))
                elif call == "restore":
                    life.restore(new, lambda: None, do("attach", fail))
                elif call == "swap":
                    life.restore(groups(number, 1 - group.rank), lambda: None, do("attach", False))
                elif call == "use":
                    life.check("a call")
                else:
                    life.close()
                outcome = "ok"
            except CommError as error:
                outcome = type(error).__name__
            expected, acts = step_of(model, call, fail)
            assert (outcome, life.state, len(done) - before) == (expected, model.state, acts), (number, call)
            assert life.cycles == model.cycles
            seen.append(outcome)
        return seen

    outcomes = run_threads(2, run, timeout_s=30)
    assert outcomes[0] == outcomes[1]


def step_of(model: Model, call: str, fail: bool) -> tuple[str, int]:
    """Return what must come of a call, and how often something is done; move the model."""
    if call == "close":
        model.state = "closed"
        return "ok", 0
    if model.state == "closed":
        return "ClosedError", 0
    if model.state == "failed":
        return "CheckpointError", 0
    if call == "use":
        return ("ok" if model.state == "attached" else "CheckpointError"), 0
    if call == "swap":
        return "JointValueError", 0
    wanted = "detached" if call == "prepare" else "attached"
    if model.state == wanted:
        return "ok", 0
    model.state = "failed" if fail else wanted
    model.cycles += call == "restore" and not fail
    return ("CheckpointError" if fail else "ok"), 1


# MnnvlMemory


def rows(group: Group, groups: Groups) -> int:
    mapping = Mapping(group.size, group.rank, tp_size=group.size)
    config = MnnvlConfig(TorchDistBackend(group), fabric_page_size=1 << 23, device_idx=group.rank % 8)
    one, two = MnnvlMemory(mapping, 3 << 20, config), MnnvlMemory(mapping, 4096, config)
    assert one.rank_stride == two.rank_stride == 1 << 23 and one.ptr % (2 << 20) == 0
    a, b = one.as_torch_strided_tensor(torch.int16), two.as_torch_strided_tensor(torch.float32)
    assert a.shape == (group.size, 3 << 19) and b.shape == (group.size, 1024)
    b[group.rank].fill_(group.rank)
    for name in range(2):
        a[group.rank].fill_(name + group.rank)
        group.barrier("filled")
        assert [int(row[-1]) for row in a] == [name + peer for peer in range(group.size)]
        assert [int(row[0]) for row in b] == list(range(group.size))
        group.barrier("seen")
        one.checkpoint_prepare()
        with pytest.raises(CheckpointError):
            one.as_torch_strided_tensor(torch.int16)
        assert [int(row[7]) for row in b] == list(range(group.size))
        one.checkpoint_restore(groups(name, group.rank))
    two.close()
    one.close()
    return name


def test_rows_of_all_ranks_over_a_checkpoint(driver: FakeDriver) -> None:
    """Two memories of one group side by side: one is detached, the other one goes on."""
    assert run_threads(3, rows, Groups(3)) == [1] * 3


def split(group: Group) -> tuple[int, list[int]]:
    """Four ranks in two pipeline stages: two tensor-parallel groups of two, by one call of all."""
    mapping = Mapping(4, group.rank, tp_size=2, pp_size=2)
    config = MnnvlConfig(TorchDistBackend(group), device_idx=group.rank)
    with MnnvlMemory(mapping, 4096, config) as memory:
        rows = memory.as_torch_strided_tensor(torch.int32)
        rows[mapping.tp_rank].fill_(group.rank)
        memory.group.barrier("filled")
        found = [int(row[0]) for row in rows]
        memory.group.barrier("seen")
        return memory.group.size, found


def test_tensor_parallel_ranks_share_and_nobody_else(driver: FakeDriver) -> None:
    """C9: pipeline stages make memory of their own at the same time."""
    assert run_threads(4, split) == [(2, [0, 1]), (2, [0, 1]), (2, [2, 3]), (2, [2, 3])]


def test_a_mapping_that_is_not_the_backends_is_everybodys_error(driver: FakeDriver) -> None:
    def wrong(group: Group) -> str:
        with pytest.raises(JointError) as caught:
            MnnvlMemory(Mapping(2, 0, tp_size=2), 5, MnnvlConfig(TorchDistBackend(group), device_idx=0))
        return str(caught.value)

    texts = on_threads(2, wrong)
    assert texts[0] == texts[1] and "rank 1: the mapping says rank 0 of 2" in texts[0]


def test_no_state_is_kept_on_classes() -> None:
    """C1: what upstream keeps on the class is on the object here; two groups never meet in it."""
    with installed(FakeDriver()):
        for cls in (SymmDeviceMemory, MnnvlMemory):
            kept = {
                name: value
                for name, value in vars(cls).items()
                if not name.startswith("__") and not callable(value) and not isinstance(value, (property, int))
            }
            assert kept == {}, kept
