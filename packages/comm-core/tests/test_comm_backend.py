"""CommBackend: what is sent arrives as it was, ranks follow the backend, one rank's mistake is everybody's error."""

from __future__ import annotations

import enum
import json
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import TCPStore

from comm_core.comm_backend import (
    CommBackend,
    CommBackendGroup,
    MPIBackend,
    MPIMissingError,
    NoProcessGroupError,
    TorchDistBackend,
)
from comm_core.errors import ArgumentTypeError, CommError, GroupTimeoutError, JointError, JointValueError
from comm_core.group import thread_groups


def on_threads(size: int, work: Callable[[int], Any], seconds: float = 20) -> list[Any]:
    """Run `work(rank)` in a thread a rank; return what each returned or raised."""
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a rank hangs"
    return results


def backends(size: int, **options: Any) -> list[TorchDistBackend]:
    return [TorchDistBackend(group, **options) for group in thread_groups(size)]


def raised(results: Sequence[Any], kind: type[Exception]) -> str:
    """All ranks raised one and the same error of this kind; return its text."""
    assert [type(result) for result in results] == [kind] * len(results), results
    assert len({str(result) for result in results}) == 1
    return str(results[0])


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=70),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.binary(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


def typed(value: Any) -> Any:
    """The value with the types of everything in it: 1 == True == 1.0, and (1,) prints like [1] in JSON."""
    if isinstance(value, dict):
        return [(typed(key), typed(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(item) for item in value]
    return type(value), value


@settings(max_examples=40, deadline=None)
@given(plain, plain)
def test_values_arrive_as_they_were_sent(one: Any, two: Any) -> None:
    """Handles are bytes, keys are integers, and a tuple that arrives as a list is no key any more."""
    ranks = backends(2)
    for got in on_threads(2, lambda rank: ranks[rank].allgather((one, two)[rank])):
        assert typed(got) == typed((one, two))
    for got in on_threads(2, lambda rank: ranks[rank].bcast((one, two)[rank], 1)):
        assert typed(got) == typed(two)


def test_special_values() -> None:
    """JSON has no text for these."""
    ranks = backends(2)
    sent = [(float("inf"), -float("inf"), -0.0), bytearray(b"\xff" * 64)]
    got = on_threads(2, lambda rank: ranks[rank].allgather(sent[rank]))[0]
    assert str(got[0]) == "(inf, -inf, -0.0)"
    assert got[1] == b"\xff" * 64
    nan = on_threads(2, lambda rank: ranks[rank].allgather(float("nan")))[0][0]
    assert nan != nan


class Color(enum.IntEnum):
    RED = 1


Point = namedtuple("Point", "x")
UNSENDABLE = [Color.RED, Point(1), {1}, object(), range(3), [1, {"a": Point(2)}]]


@pytest.mark.parametrize("value", UNSENDABLE, ids=repr)
def test_what_can_not_be_sent_as_it_is_fails_all_ranks(value: Any) -> None:
    """The sender alone would leave the others waiting; and pickle is nothing to fall into unasked."""
    ranks = backends(3)
    text = raised(on_threads(3, lambda rank: ranks[rank].allgather(value if rank == 1 else 0)), JointValueError)
    assert "rank 1: " in text
    assert "can't be sent" in text
    assert "allow_pickle" in text
    assert on_threads(3, lambda rank: ranks[rank].bcast(value if rank else 7, 0)) == [7, 7, 7]


def test_pickle_is_possible_where_all_ranks_allow_it() -> None:
    """And a rank that does not allow it gets none, whatever the others do."""
    ranks = backends(2, allow_pickle=True)
    sent = [Color.RED, [Point(1)]]
    got = on_threads(2, lambda rank: ranks[rank].allgather(sent[rank]))
    assert [typed(list(value)) for value in got] == [typed(sent)] * 2
    groups = thread_groups(2)
    mixed = [TorchDistBackend(groups[0], allow_pickle=True), TorchDistBackend(groups[1])]
    text = raised(on_threads(2, lambda rank: mixed[rank].allgather(Color.RED if rank == 0 else 1)), JointValueError)
    assert "rank 0: allow_pickle=True; rank 1: allow_pickle=False" in text


def test_a_value_that_is_too_large_fails_all_ranks() -> None:
    """The store would reset the connection."""
    ranks = backends(2)
    text = raised(on_threads(2, lambda rank: ranks[rank].allgather(bytes(rank * (4 << 20)))), JointValueError)
    assert "rank 1: a value may take 4194304 characters" in text


@pytest.mark.parametrize(
    ("roots", "words"),
    [
        ((0, 1, 1), "rank 0: root=0; rank 1: root=1; rank 2: root=1"),
        ((0, 0, 3), "rank 2: root must be a rank of the backend, 0..2, got 3"),
        ((0, True, 0), "rank 1: root must be an int, got True"),
    ],
)
def test_the_root_is_agreed(roots: tuple[Any, ...], words: str) -> None:
    """Otherwise half of the ranks would go on with another one's value."""
    ranks = backends(3)
    assert words in raised(on_threads(3, lambda rank: ranks[rank].bcast("x", roots[rank])), JointValueError)


def test_ranks_at_different_calls_are_told() -> None:
    """One rank in bcast and one in allgather would exchange values that mean something else."""
    ranks = backends(2)
    results = on_threads(2, lambda rank: ranks[rank].barrier() if rank else ranks[rank].allgather(1))
    assert "rank 0: at 'CommBackend.allgather'; rank 1: at 'CommBackend.barrier'" in raised(results, JointError)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.none() | st.integers(0, 2), st.integers(-2, 2)), min_size=1, max_size=6))
def test_a_split_is_ordered_by_key_and_then_by_rank(parts: list[tuple[int | None, int]]) -> None:
    """As MPI orders it; torch's new_group would order by rank alone."""
    ranks = backends(len(parts))

    def work(rank: int) -> Any:
        part = ranks[rank].Split(*parts[rank])
        if part is None:
            return None
        # The roots are ranks of the part, and so is what a further split starts from.
        again = part.Split(0, -part.Get_rank())
        assert again is not None
        part.barrier()
        return part.Get_rank(), part.Get_size(), part.allgather(rank), part.bcast(rank, 0), again.allgather(rank)

    for rank, (result, (color, _)) in enumerate(zip(on_threads(len(parts), work), parts, strict=True)):
        if color is None:
            assert result is None
            continue
        members = [r for r, part in enumerate(parts) if part[0] == color]
        expected = sorted(members, key=lambda r: (parts[r][1], r))
        position = expected.index(rank)
        reverse = tuple(reversed(expected))
        assert result == (position, len(expected), tuple(expected), expected[0], reverse)


@pytest.mark.parametrize(
    ("color", "key", "words"),
    [
        (-1, 0, "color must be None or at least 0, got -1"),
        (True, 0, "color must be an int, got True"),
        (0, 1.0, "key must be an int, got 1.0"),
    ],
)
def test_a_wrong_split_fails_all_ranks(color: Any, key: Any, words: str) -> None:
    """And the backend stays usable."""
    ranks = backends(2)
    results = on_threads(2, lambda rank: ranks[rank].Split(color, key) if rank else ranks[rank].Split(0, 0))
    assert f"rank 1: {words}" in raised(results, JointValueError)
    assert on_threads(2, lambda rank: ranks[rank].allgather(rank)) == [(0, 1)] * 2


def test_parts_of_one_group_do_not_hear_each_other() -> None:
    """Two backends over one group, split twice: each part has gathers of its own."""
    groups = thread_groups(2)

    def work(rank: int) -> list[Any]:
        parts = [TorchDistBackend(groups[rank]).Split(0, 0) for _ in range(2)]
        parts.append(TorchDistBackend(groups[rank]).Split(0, 0))
        order = [2, 0, 1]
        return [part.allgather((rank, n)) for n in order if (part := parts[n]) is not None]

    assert on_threads(2, work) == [[((0, n), (1, n)) for n in (2, 0, 1)]] * 2


def test_without_a_process_group() -> None:
    """The error is what callers of either kind catch."""
    assert not dist.is_initialized()
    with pytest.raises(NoProcessGroupError, match="init_process_group") as caught:
        TorchDistBackend()
    assert isinstance(caught.value, RuntimeError | ValueError)
    with pytest.raises(ArgumentTypeError, match="got str"):
        TorchDistBackend("world")  # type: ignore[arg-type]


class OfTheUser:
    """A backend as users write them: no base class, lists for tuples."""

    def __init__(self, inner: TorchDistBackend) -> None:
        self.inner = inner

    def Get_rank(self) -> int:
        return self.inner.Get_rank()

    def Get_size(self) -> int:
        return self.inner.Get_size()

    def allgather(self, data: Any) -> list[Any]:
        return list(self.inner.allgather(data))

    def bcast(self, data: Any, root: int) -> Any:
        return self.inner.bcast(data, root)

    def barrier(self) -> None:
        self.inner.barrier()

    def Split(self, color: int | None, key: int) -> OfTheUser:
        return self


def test_any_backend_is_a_group() -> None:
    """What takes a group takes every backend, with the values of all ranks and the check of the step."""
    ranks = [CommBackendGroup(OfTheUser(backend)) for backend in backends(3)]
    assert [(group.rank, group.size, group.name) for group in ranks] == [(rank, 3, "OfTheUser") for rank in range(3)]
    values = on_threads(3, lambda rank: ranks[rank].gather("step", {"rank": rank, "x": [None, 1.5]}))
    assert values == [[{"rank": rank, "x": [None, 1.5]} for rank in range(3)]] * 3
    assert on_threads(3, lambda rank: ranks[rank].barrier("done")) == [None] * 3
    text = raised(on_threads(3, lambda rank: ranks[rank].barrier(f"step {rank // 2}")), JointError)
    assert "rank 1: at 'step 0'; rank 2: at 'step 1'" in text


def test_a_torch_backend_as_a_group_keeps_its_deadline() -> None:
    """Over the store a missing rank is named; another backend could only wait."""
    ranks = [CommBackendGroup(backend) for backend in backends(2)]
    result = on_threads(1, lambda rank: ranks[rank].gather("alone", 1, timeout_s=0.2))[0]
    assert isinstance(result, GroupTimeoutError)
    assert result.missing == (1,)


def test_what_is_no_backend_is_refused() -> None:
    """By what it lacks."""

    class Half:
        def Get_rank(self) -> int:
            return 0

        def allgather(self, data: Any) -> list[Any]:
            return [data]

    with pytest.raises(ArgumentTypeError, match="Half is no CommBackend: it has no Get_size, bcast, barrier, Split"):
        CommBackendGroup(Half())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        type("Part", (CommBackend,), {"Get_rank": lambda self: 0})()
    assert isinstance(OfTheUser(backends(1)[0]), CommBackend)
    assert isinstance(backends(1)[0], CommBackend)


class FakeComm:
    """The part of an mpi4py communicator that is used, for ranks that are threads."""

    UNDEFINED = -32766
    NULL = object()

    def __init__(self, shared: dict[str, Any], rank: int, size: int) -> None:
        self.shared, self.rank, self.size = shared, rank, size
        self.step = 0
        self.freed = False

    @staticmethod
    def world(size: int) -> list[FakeComm]:
        shared = {"barrier": threading.Barrier(size)}
        return [FakeComm(shared, rank, size) for rank in range(size)]

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def allgather(self, data: Any) -> list[Any]:
        self.step += 1
        self.shared[f"{self.step}/{self.rank}"] = pickle.dumps(data)
        self.Barrier()
        return [pickle.loads(self.shared[f"{self.step}/{rank}"]) for rank in range(self.size)]

    def bcast(self, data: Any, root: int = 0) -> Any:
        return self.allgather(data)[root]

    def Barrier(self) -> None:
        self.shared["barrier"].wait(10)

    def Split(self, color: int, key: int) -> Any:
        everybody = self.allgather((color, key, self.rank))
        members = sorted((k, r) for c, k, r in everybody if c == color)
        shared = self.shared.setdefault(f"split {self.step}/{color}", {"barrier": threading.Barrier(len(members))})
        rank = members.index((key, self.rank))
        return self.NULL if color == self.UNDEFINED else FakeComm(shared, rank, len(members))

    def Free(self) -> None:
        self.freed = True


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A stand-in for mpi4py; its COMM_WORLD is set by the test."""
    module: Any = types.ModuleType("mpi4py")
    module.MPI = types.SimpleNamespace(UNDEFINED=FakeComm.UNDEFINED, COMM_NULL=FakeComm.NULL, COMM_WORLD=None)
    monkeypatch.setitem(sys.modules, "mpi4py", module)
    return module.MPI


def test_mpi(mpi: types.SimpleNamespace) -> None:
    """The same interface over mpi4py, and no state that two backends share."""
    world = FakeComm.world(3)
    mpi.COMM_WORLD = world[2]
    assert MPIBackend().comm is world[2]
    ranks = [MPIBackend(comm) for comm in world]
    assert isinstance(ranks[0], CommBackend)
    assert (
        on_threads(3, lambda rank: ranks[rank].allgather((rank, b"\x00")))
        == [((0, b"\0"), (1, b"\0"), (2, b"\0"))] * 3
    )
    assert on_threads(3, lambda rank: ranks[rank].bcast(rank, 1)) == [1, 1, 1]
    assert on_threads(3, lambda rank: ranks[rank].barrier()) == [None] * 3
    colors = [0, None, 0]

    def split(rank: int) -> Any:
        part = ranks[rank].Split(colors[rank], -rank)
        if part is None:
            return None
        got = part.Get_rank(), part.Get_size(), part.allgather(rank)
        part.Free()
        assert part.comm.freed
        return got

    assert on_threads(3, split) == [(1, 2, (2, 0)), None, (0, 2, (2, 0))]
    ranks[0].Free()
    assert not world[0].freed, "a communicator of the caller's is not ours to free"
    group = [CommBackendGroup(backend) for backend in ranks]
    assert on_threads(3, lambda rank: group[rank].gather("step", rank)) == [[0, 1, 2]] * 3
    with pytest.raises(ValueError, match=r"0\.\.2, got 3"):
        ranks[0].bcast(1, 3)


def test_mpi_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only who asks for MPI needs it, and is told what is missing."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MPIMissingError, match="pip install mpi4py, or use TorchDistBackend") as caught:
        MPIBackend()
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, CommError)

    class NoLibrary(types.ModuleType):
        @property
        def MPI(self) -> Any:
            raise RuntimeError("cannot load MPI library")

    monkeypatch.setitem(sys.modules, "mpi4py", NoLibrary("mpi4py"))
    with pytest.raises(MPIMissingError, match="cannot load MPI library"):
        MPIBackend()


def gloo_rank(rank: int, port: int) -> dict[str, Any]:
    """What each of four processes does, and what it saw."""
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    world = TorchDistBackend()
    seen: dict[str, Any] = {"world": (world.Get_rank(), world.Get_size())}
    handle = bytes([rank]) * 64
    seen["handles"] = world.allgather(handle) == tuple(bytes([peer]) * 64 for peer in range(4))
    # Ranks 3, 1 in this order, and 2 alone; rank 0 is in neither.
    part = world.Split({3: 0, 1: 0, 2: 1}.get(rank), -rank)
    if part is not None:
        seen["part"] = part.Get_rank(), part.allgather(rank), part.bcast(f"from {rank}", 0)
        part.barrier()
        assert part.process_group is None
    # A group that is not WORLD and without rank 0: its roots are its own ranks, and nobody else takes part.
    apart: Any = dist.new_group([1, 3])
    if rank in (1, 3):
        backend = TorchDistBackend(apart)
        assert backend.process_group is apart
        again = backend.Split(0, -backend.Get_rank())
        assert again is not None
        seen["apart"] = backend.Get_rank(), backend.bcast(rank, 0), again.allgather(rank)
    group = CommBackendGroup(world)
    assert group.process_group is dist.group.WORLD
    assert group.backends["cpu"] == "gloo"
    seen["gathered"] = group.gather("facts", {"rank": rank})
    # Rank 3 comes late, by far: the others name it at their deadline, and it is told.
    os.environ["COMM_TIMEOUT_S"] = "1"
    if rank == 3:
        time.sleep(3)
    try:
        TorchDistBackend().barrier()
    except GroupTimeoutError as error:
        seen["missing"] = error.missing
    dist.destroy_process_group()
    return seen


def test_over_gloo_processes() -> None:
    """The same over real processes: handles, splits, sub-groups, and a rank that does not come."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "error", __file__, str(rank), str(server.port)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    seen: list[dict[str, Any]] = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
            seen.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.wait(5)
    assert [one["world"] for one in seen] == [[rank, 4] for rank in range(4)]
    assert all(one["handles"] for one in seen)
    assert [one.get("part") for one in seen] == [
        None,
        [1, [3, 1], "from 3"],
        [0, [2], "from 2"],
        [0, [3, 1], "from 3"],
    ]
    assert [one.get("apart") for one in seen] == [None, [0, 1, [3, 1]], None, [1, 1, [3, 1]]]
    assert all(one["gathered"] == [{"rank": rank} for rank in range(4)] for one in seen)
    assert [one.get("missing") for one in seen] == [[3]] * 4


if __name__ == "__main__":
    print(json.dumps(gloo_rank(int(sys.argv[1]), int(sys.argv[2]))))
