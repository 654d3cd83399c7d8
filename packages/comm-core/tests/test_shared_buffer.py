"""Shared buffers over real processes and a fake CUDA runtime: all ranks get them, or all raise and nothing stays."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from comm_core.errors import CommError, JointError
from comm_core.group import Group, thread_groups
from comm_core.memory import cuda_ipc, cudart, peer, shared_buffer
from comm_core.memory.shared_buffer import create_shared_buffer, free_shared_buffer
from comm_core.topology.probe import host_facts

WORLD = 4
# Name -> global ranks, in group rank order. One is neither WORLD nor consecutive, and does not hold rank 0.
GROUPS = {"world": [0, 1, 2, 3], "low": [0, 1], "apart": [1, 3]}


class Rank:
    """What a rank process does, called by name from the tests."""

    def __init__(self, so_file: str, port: int, rank: int) -> None:
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        self.groups: dict[str, Any] = {"world": None}
        for name in ("low", "apart"):
            self.groups[name] = dist.new_group(GROUPS[name])
        self.rank = rank
        self.fake = ctypes.CDLL(so_file)
        self.so_file = so_file
        cudart._find_library = lambda: so_file
        self.buffers: dict[str, list[int]] = {}
        self.fake.cudaSetDevice(rank)

    def create(self, size: Any = 4096, group: str = "world", name: str = "b") -> int:
        self.buffers[name] = create_shared_buffer(size, self.groups[group])
        return len(self.buffers[name])

    def free(self, group: str = "world", name: str = "b", change: str = "") -> None:
        pointers = list(self.buffers[name])
        if change == "reversed":
            pointers.reverse()
        elif change == "foreign":
            pointers = [item + 64 for item in pointers]
        elif change == "own":
            pointers = pointers[:1]
        free_shared_buffer(pointers, self.groups[group])
        assert change == "", "it should have been refused"

    def write(self, offset: int, name: str = "b") -> None:
        """Write this rank's number into everybody's memory, at `offset` bytes times its number."""
        for pointer in self.buffers[name]:
            ctypes.memset(pointer + offset * self.rank, self.rank + 1, 1)

    def read(self, offset: int, name: str = "b") -> list[list[int]]:
        """Read what everybody's memory has at all ranks' places."""
        return [[ctypes.string_at(p + offset * peer, 1)[0] for peer in range(WORLD)] for p in self.buffers[name]]

    def mark(self, group: str, name: str = "b") -> None:
        """Write into this rank's own memory which global rank it is."""
        ctypes.memset(self.buffers[name][dist.get_rank(self.groups[group])], self.rank + 1, 1)

    def cycles(self, times: int, group: str) -> list[dict[str, int]]:
        seen: list[dict[str, int]] = []
        for number in range(times):
            free_shared_buffer(create_shared_buffer(1 << 20, self.groups[group]), self.groups[group])
            if number in (times // 10, times - 1):
                seen.append(self.counts())
        return seen

    def counts(self) -> dict[str, int]:
        """What is alive in this process."""
        return {
            "allocations": self.fake.fake_allocations(),
            "imports": self.fake.fake_imports(),
            "violations": self.fake.fake_violations(),
            "buffers": len(shared_buffer._buffers),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "mappings": Path("/proc/self/maps").read_text().count("comm-fake"),
        }

    def fail(self, call: str, after: int = 0, times: int = 1) -> None:
        self.fake.fake_fail(call.encode(), after, times, 2)

    def skew(self, nbytes: int) -> None:
        self.fake.fake_skew(ctypes.c_size_t(nbytes))

    def device(self, device: int) -> int:
        """Make `device` current and return which one was."""
        before = ctypes.c_int()
        self.fake.cudaGetDevice(ctypes.byref(before))
        self.fake.cudaSetDevice(device)
        return before.value

    def deadline(self, seconds: float | None) -> None:
        os.environ.pop("COMM_TIMEOUT_S", None)
        if seconds is not None:
            os.environ["COMM_TIMEOUT_S"] = str(seconds)

    def pretend(self, **facts: Any) -> None:
        """Replace facts about this rank's host; nothing means the truth again."""
        peer.host_facts = lambda: replace(host_facts(), **facts)

    def library(self, so_file: str | None) -> None:
        """Make the search for the CUDA runtime find this one; None is the fake."""
        cudart._find_library = lambda: so_file or self.so_file

    def slow(self, seconds: float) -> None:
        """Be late once, in the middle of mapping the peers' memory."""
        memory: Any = cuda_ipc.CudaIpcMemory
        original = memory.map

        def late(*arguments: Any) -> list[int]:
            memory.map = original
            time.sleep(seconds)
            return original(*arguments)

        memory.map = late

    def destroy(self, group: str) -> None:
        dist.destroy_process_group(self.groups[group])

    def forget(self) -> None:
        self.fake.fake_forget()


def serve(so_file: str, port: int, rank: int, descriptor: int) -> None:
    """Answer calls, one JSON line each, until the other end closes."""
    with socket.socket(fileno=descriptor) as channel, channel.makefile("rw") as lines:
        me = Rank(so_file, port, rank)
        print(json.dumps({"value": "ready"}), file=lines, flush=True)
        for line in lines:
            name, arguments = json.loads(line)
            try:
                answer: dict[str, Any] = {"value": getattr(me, name)(**arguments)}
            except Exception as error:
                answer = {"error": [kind.__name__ for kind in type(error).__mro__], "text": str(error)}
                if isinstance(error, JointError):
                    answer["per_rank"] = error.per_rank
            print(json.dumps(answer), file=lines, flush=True)


class Pool:
    """Four rank processes that serve calls; a call that outlasts its deadline kills them all."""

    def __init__(self, so_file: Path, log: Path) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.log = log
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[socket.socket] = []
        environment = {**os.environ, "FAKE_CUDART_LOG": str(log), "PYTHONPATH": os.pathsep.join(sys.path)}
        for rank in range(WORLD):
            ours, theirs = socket.socketpair()
            command = [sys.executable, __file__, str(so_file), str(self.store.port), str(rank), str(theirs.fileno())]
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            self.channels.append(ours)
        self.buffers = [b""] * WORLD
        self._collect(range(WORLD), 90)

    def start(self, name: str, ranks: Iterable[int] = range(WORLD), /, **arguments: Any) -> None:
        """Send a call to `ranks` without waiting for the answers."""
        for rank in ranks:
            self.channels[rank].sendall(json.dumps([name, arguments]).encode() + b"\n")

    def finish(self, ranks: Iterable[int] = range(WORLD), seconds: float = 30) -> list[dict[str, Any]]:
        """Return the answers of `ranks`."""
        return self._collect(ranks, seconds)

    def call(self, name: str, ranks: Iterable[int] = range(WORLD), /, **arguments: Any) -> list[Any]:
        """Call on `ranks` and return their values; an error of any of them fails the test."""
        ranks = list(ranks)
        self.start(name, ranks, **arguments)
        answers = self._collect(ranks, 60)
        assert all("value" in answer for answer in answers), answers
        return [answer["value"] for answer in answers]

    def failures(self, name: str, ranks: Iterable[int] = range(WORLD), /, **arguments: Any) -> list[dict[str, Any]]:
        """Call on `ranks`, which must all raise; return their errors."""
        ranks = list(ranks)
        self.start(name, ranks, **arguments)
        answers = self._collect(ranks, 30)
        assert all("error" in answer for answer in answers), answers
        return answers

    def errors(self, name: str, ranks: Iterable[int] = range(WORLD), /, **arguments: Any) -> dict[str, Any]:
        """Call on `ranks`, which must all raise one and the same error; return it."""
        return one_error(self.failures(name, ranks, **arguments))

    def _collect(self, ranks: Iterable[int], seconds: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + seconds
        answers: list[dict[str, Any]] = []
        for rank in ranks:
            while b"\n" not in self.buffers[rank]:
                ready, _, _ = select.select([self.channels[rank]], [], [], max(deadline - time.monotonic(), 0))
                data = self.channels[rank].recv(1 << 16) if ready else b""
                if not data:
                    self.close()
                    pytest.fail(f"rank {rank} {'ended' if ready else f'did not answer in {seconds} s'}")
                self.buffers[rank] += data
            line, _, self.buffers[rank] = self.buffers[rank].partition(b"\n")
            answers.append(json.loads(line))
        return answers

    def close(self) -> None:
        for channel in self.channels:
            channel.close()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait(5)


def one_error(answers: list[dict[str, Any]]) -> dict[str, Any]:
    assert all("error" in answer for answer in answers), answers
    assert len({(answer["error"][0], answer["text"]) for answer in answers}) == 1, answers
    return answers[0]


@pytest.fixture(scope="module")
def started(so_file: Path) -> Iterator[Pool]:
    pool = Pool(so_file, so_file.with_name("log"))
    yield pool
    pool.close()
    leaked = [path for process in pool.processes for path in Path("/dev/shm").glob(f"comm-fake-{process.pid}-*")]
    assert not leaked


@pytest.fixture
def pool(started: Pool) -> Iterator[Pool]:
    """The rank processes; whatever a test does, it leaves nothing alive in them."""
    before = alive(started)
    yield started
    assert alive(started) == before


def alive(pool: Pool) -> list[dict[str, int]]:
    counts = pool.call("counts")
    assert all(count["violations"] == 0 for count in counts), counts
    return [
        {key: count[key] for key in ("allocations", "imports", "buffers", "mappings", "descriptors")}
        for count in counts
    ]


@pytest.mark.parametrize("size", [64, 4096, 4 << 20])
@pytest.mark.parametrize("skew", [0, 512], ids=["base", "inside of its allocation"])
def test_every_rank_writes_into_every_ranks_memory(pool: Pool, skew: int, size: int) -> None:
    """The list is in rank order, each address is the right rank's memory, and at the right offset in it (E2)."""
    pool.call("skew", nbytes=skew)
    assert pool.call("create", size=size) == [WORLD] * WORLD
    pool.call("write", offset=size // WORLD)
    assert pool.call("read", offset=size // WORLD) == [[[1, 2, 3, 4]] * WORLD] * WORLD
    counts = pool.call("counts")
    assert [(count["allocations"], count["imports"]) for count in counts] == [(1, WORLD - 1)] * WORLD
    pool.call("free")
    pool.call("skew", nbytes=0)


def test_a_group_that_is_not_world_and_not_consecutive(pool: Pool) -> None:
    """Addresses follow the group's ranks, not the job's (C9)."""
    ranks = GROUPS["apart"]
    assert pool.call("create", ranks, group="apart") == [2, 2]
    pool.call("mark", ranks, group="apart")
    assert [[row[0] for row in rows] for rows in pool.call("read", ranks, offset=0)] == [[2, 4], [2, 4]]
    pool.call("free", ranks, group="apart")


def test_nobody_frees_before_everybody_has_waited_and_unmapped(pool: Pool) -> None:
    """A peer that still writes, or still has the memory mapped, would write into somebody else's (E4)."""
    pool.call("create")
    pool.log.write_text("")
    pool.call("free")
    calls = [line.split()[1] for line in pool.log.read_text().splitlines()]
    expected = ["cudaDeviceSynchronize"] * WORLD + ["cudaIpcCloseMemHandle"] * WORLD * (WORLD - 1)
    assert calls == expected + ["cudaFree"] * WORLD


def test_the_device_that_was_current_at_creation_is_used(pool: Pool) -> None:
    """Freeing on another device is an error of CUDA's; and the caller's device is current again afterwards."""
    pool.call("create")
    assert pool.call("device", device=7) == list(range(WORLD))
    pool.call("free")
    for rank in range(WORLD):
        assert pool.call("device", [rank], device=rank) == [7]


def stages(size: int) -> list[tuple[str, int]]:
    """Every call of a creation that may fail: its name and how many of its kind precede it."""
    return [
        ("cudaGetDevice", 0),
        ("cudaMalloc", 0),
        ("cudaGetDriverEntryPointByVersion", 0),
        ("cudaIpcGetMemHandle", 0),
        *(("cudaIpcOpenMemHandle", peer) for peer in range(size - 1)),
    ]


@pytest.mark.parametrize("group", ["low", "world"])
def test_a_failure_at_any_stage_on_any_rank_fails_all_and_leaves_nothing(pool: Pool, group: str) -> None:
    """Otherwise the others wait for a rank that is gone, or keep memory that nobody knows of (E6)."""
    ranks = GROUPS[group]
    before = alive(pool)
    for call, after in stages(len(ranks)):
        for culprit in ranks:
            pool.call("fail", [culprit], call=call, after=after)
            error = pool.errors("create", ranks, group=group)
            assert error["error"][0] == "JointError", error
            assert list(error["per_rank"]) == [str(ranks.index(culprit))], error
            assert f"rank {ranks.index(culprit)}" in error["text"]
            assert f"{call} failed with CUDA error 2: out of memory" in error["text"]
            if call == "cudaIpcOpenMemHandle":
                peer = [r for r in range(len(ranks)) if r != ranks.index(culprit)][after]
                assert f"memory of rank {peer} can't be mapped on cuda:{culprit}" in error["text"]
            assert alive(pool) == before, (call, after, culprit)
    pool.call("create", ranks, group=group)
    pool.call("free", ranks, group=group)


@pytest.mark.parametrize("call", ["cudaDeviceSynchronize", "cudaIpcCloseMemHandle", "cudaFree"])
def test_a_failure_to_release_fails_all_and_can_be_retried(pool: Pool, call: str) -> None:
    """Nothing may be freed past a failed unmap, and what could be released is not released twice."""
    for culprit in range(WORLD):
        pool.call("create")
        pool.call("fail", [culprit], call=call, times=100)
        error = pool.errors("free")
        assert error["error"][0] == "JointError", error
        assert list(error["per_rank"]) == [str(culprit)], error
        counts = pool.call("counts")
        held = {"cudaDeviceSynchronize": WORLD, "cudaIpcCloseMemHandle": WORLD, "cudaFree": 1}[call]
        assert sum(count["allocations"] for count in counts) == held
        pool.call("fail", [culprit], call="", times=0)
        pool.call("free")
    pool.call("create")
    pool.call("fail", [1], call=call, times=2)
    pool.call("free")


def test_memory_that_a_peer_can_not_unmap_is_kept(started: Pool) -> None:
    """After a failed creation too: freeing it would pull it from under the peer."""
    before = alive(started)
    started.call("fail", [2], call="cudaIpcCloseMemHandle", times=100)
    started.call("fail", [3], call="cudaIpcOpenMemHandle", after=1)
    error = started.errors("create")
    assert list(error["per_rank"]) == ["3"]
    for rank, (old, new) in enumerate(zip(before, alive(started), strict=True)):
        assert new["allocations"] == old["allocations"] + 1
        assert new["imports"] == old["imports"] + (WORLD - 1 if rank == 2 else 0)
    started.call("fail", [2], call="", times=0)
    started.call("forget")


def test_a_rank_that_is_late_in_the_middle_keeps_what_it_may_still_write(started: Pool) -> None:
    """The others give up at their deadline and say who is missing; nothing that the late one may map is freed."""
    before = alive(started)
    started.call("deadline", seconds=1)
    started.call("slow", [3], seconds=2)
    for answer in started.failures("create"):
        assert answer["error"][0] == "GroupTimeoutError", answer
        assert "no word from rank 3" in answer["text"]
    for old, new in zip(before, alive(started), strict=True):
        assert (new["allocations"], new["imports"]) == (old["allocations"] + 1, old["imports"])
    started.call("deadline", seconds=None)
    started.call("forget")


def test_a_rank_that_does_not_call_is_named(pool: Pool) -> None:
    """And when it comes at last it is told, and the group works again."""
    pool.call("deadline", seconds=1)
    for answer in pool.failures("create", [0, 1, 2]):
        assert answer["error"][0] == "GroupTimeoutError"
        assert "no word from rank 3" in answer["text"]
    assert "came too late" in pool.failures("create", [3])[0]["text"]
    pool.call("deadline", seconds=None)
    pool.call("create")
    pool.call("free")


@pytest.mark.parametrize(
    ("size", "word"),
    [
        (0, "at least 1, got 0"),
        (-5, "got -5"),
        (True, "must be an int, got True"),
        (4096.0, "4096.0"),
        (8192, "8192"),
    ],
)
def test_sizes_are_agreed(pool: Pool, size: Any, word: str) -> None:
    """A wrong size on one rank is everybody's error, and nothing was allocated."""
    pool.log.write_text("")
    pool.start("create", [0, 1, 3], size=4096)
    pool.start("create", [2], size=size)
    error = one_error(pool.finish())
    assert error["error"][0] == "JointValueError"
    assert "ValueError" in error["error"]
    assert word in error["text"]
    assert pool.log.read_text() == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("reversed", "is not the whole list from create_shared_buffer in its order"),
        ("own", "is not the whole list"),
        ("foreign", "no shared buffer of this process: freed before, or not from here"),
    ],
)
def test_a_list_that_is_no_buffer_is_refused_on_all_ranks(pool: Pool, change: str, words: str) -> None:
    """Nothing is freed, and the right list still works; once freed it is no buffer any more."""
    pool.call("create")
    pool.start("free", [0, 2, 3])
    pool.start("free", [1], change=change)
    error = one_error(pool.finish())
    assert error["error"][0] == "JointValueError"
    assert list(error["per_rank"]) == ["1"]
    assert words in error["text"]
    pool.call("free")
    again = pool.failures("free")
    assert all("freed before" in answer["text"] for answer in again)


def test_all_ranks_free_the_same_buffer_of_the_same_group(pool: Pool) -> None:
    """Two buffers freed crosswise, or by half of their group, would be freed under a peer that uses them."""
    pool.call("create", name="a")
    pool.call("create", name="b")
    pool.start("free", [0, 1, 2], name="a")
    pool.start("free", [3], name="b")
    error = one_error(pool.finish())
    assert error["error"][0] == "JointValueError"
    assert "passed different buffers" in error["text"]
    assert len(error["per_rank"]) == WORLD
    error = pool.errors("free", [0, 1], group="low", name="a")
    assert "rank 0 of 4 (on cuda:0), and this is rank 0 of 2" in error["text"]
    pool.call("free", name="a")
    pool.call("free", name="b")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"boot_id": "another"}, ["the ranks span 2 hosts", "boot ids differ", "rank 2: cuda:2 on host"]),
        ({"pid_namespace": "pid:[1]"}, ["in 2 PID namespaces (containers?): ranks 0, 1, 3 | rank 2", "cuda:2"]),
    ],
)
def test_ranks_that_can_not_share_memory_are_told_why(pool: Pool, facts: dict[str, str], words: list[str]) -> None:
    """Before any handle is made: opening one there fails with nothing but "invalid argument" (E9, C10)."""
    pool.log.write_text("")
    pool.call("pretend", [2], **facts)
    error = pool.errors("create")
    pool.call("pretend", [2])
    assert error["error"][0] == "JointError"
    for word in words:
        assert word in error["text"]
    assert pool.log.read_text() == ""
    pool.call("pretend", [2], **dict.fromkeys(facts, ""))
    pool.call("create")
    pool.call("free")
    pool.call("pretend", [2])


def test_a_rank_without_cuda_fails_all(pool: Pool) -> None:
    """It has nothing to export, and the others must not wait for it."""
    pool.call("library", [1], so_file="/nowhere/libcudart.so.13")
    error = pool.errors("create")
    pool.call("library", [1], so_file=None)
    assert error["error"][0] == "JointError"
    assert "rank 1: the CUDA runtime '/nowhere/libcudart.so.13' can't be loaded" in error["text"]


def test_two_hundred_cycles_leak_nothing(pool: Pool) -> None:
    """A descriptor or a mapping a cycle ends a long job."""
    ranks = GROUPS["low"]
    for early, late in pool.call("cycles", ranks, times=200, group="low"):
        assert late == early


def test_freeing_after_the_group_was_destroyed_says_so(started: Pool) -> None:
    """One clear message, and no wait for ranks that can't be reached any more (E5)."""
    ranks = GROUPS["apart"]
    started.call("create", ranks, group="apart")
    started.call("destroy", ranks, group="apart")
    before = time.monotonic()
    for answer in started.failures("free", ranks, group="apart"):
        assert answer["error"][0] == "ArgumentValueError"
        assert "was it destroyed?" in answer["text"], answer
    assert time.monotonic() - before < 5
    started.call("forget", ranks)


@pytest.fixture
def fake(so_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """The fake runtime in this process."""
    monkeypatch.setattr(cudart, "_find_library", lambda: str(so_file))
    fake = ctypes.CDLL(str(so_file))
    yield fake
    assert (fake.fake_allocations(), fake.fake_imports()) == (0, 0)


def test_a_group_of_one(fake: ctypes.CDLL) -> None:
    """One rank shares with nobody, and the same calls work."""
    (alone,) = thread_groups(1)
    (pointer,) = create_shared_buffer(100, alone)
    ctypes.memset(pointer, 1, 100)
    # Less than that would share its granule with memory that no peer is meant to see.
    assert cudart.CudaRTLibrary().memory_range(pointer) == (pointer, 2 << 20)
    free_shared_buffer([pointer], alone)
    with pytest.raises(ValueError, match="freed before"):
        free_shared_buffer([pointer], alone)
    with pytest.raises(ValueError, match="got NoneType"):
        free_shared_buffer(None, alone)  # type: ignore[arg-type]


def test_ranks_of_one_process_are_refused(fake: ctypes.CDLL) -> None:
    """CUDA does not open a handle in the process that made it."""
    errors: list[CommError] = []

    def run(group: Group) -> None:
        try:
            create_shared_buffer(100, group)
        except CommError as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(group,)) for group in thread_groups(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert [type(error) for error in errors] == [JointError, JointError]
    assert "Ranks must be processes of their own" in str(errors[0])


def test_nothing_happens_by_itself_at_exit(so_file: Path, tmp_path: Path) -> None:
    """A finalizer would wait for ranks that are gone, or free what they use (E5)."""
    code = """
        import sys
        from comm_core.group import thread_groups
        from comm_core.memory import cudart, create_shared_buffer
        cudart._find_library = lambda: sys.argv[1]
        kept = create_shared_buffer(100, thread_groups(1)[0])
        cudart.ctypes.CDLL(sys.argv[1]).fake_forget()
        print("created")
    """
    log = tmp_path / "log"
    environment = {**os.environ, "FAKE_CUDART_LOG": str(log), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(so_file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "created", "")
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["cudaMalloc", "cudaIpcGetMemHandle"]


if __name__ == "__main__":
    serve(sys.argv[1], *map(int, sys.argv[2:]))
