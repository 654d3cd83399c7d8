"""Peer memory: all ranks get it, or all raise and nothing stays; and nobody frees what a peer still uses."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import _driver, _env
from comm_core.consensus import Teardown, Transaction
from comm_core.errors import CommError, GroupTimeoutError, JointError, JointValueError, UnsupportedError
from comm_core.group import Group, as_group, thread_groups
from comm_core.memory import cuda_ipc, cudart, fd_exchange, in_process, vmm
from comm_core.memory.peer import (
    Mapped,
    MemoryFacts,
    PeerMemory,
    choose_form,
    map_jointly,
    probe_memory,
)
from comm_core.testing.fake_driver import GRANULE, FakeDriver, installed
from comm_core.testing.ranks import RankPool, on_threads, run_threads
from comm_core.topology.facts import HostFacts
from comm_core.topology.probe import host_facts


@pytest.fixture(scope="module")
def so_file(so_file: Path) -> str:
    """The fake runtime, as the string that goes to the ranks and to ctypes."""
    return str(so_file)


class Faked:
    """The fakes of one process, and what is alive in them."""

    def __init__(self, driver: FakeDriver, runtime: Any) -> None:
        self.driver = driver
        self.runtime = runtime

    def alive(self) -> dict[str, int]:
        counts = self.driver.alive()
        counts["descriptors"] = len(list(Path("/proc/self/fd").iterdir()))
        if self.runtime is not None:
            counts["allocations"] = self.runtime.fake_allocations()
            counts["imports"] = self.runtime.fake_imports()
            assert self.runtime.fake_violations() == 0
        assert self.driver.violations == []
        return counts

    def fail(self, call: str, after: int = 0, times: int = 1) -> None:
        if call.startswith("cuda"):
            self.runtime.fake_fail(call.encode() if times else b"", after, times, 2)
        else:
            self.driver.fail(call, after=after, times=times)


@contextlib.contextmanager
def faked(so_file: str | None = None, log: Path | None = None) -> Iterator[Faked]:
    """Replace the driver in this process, and the runtime where there is one."""
    before = cudart._find_library
    if so_file is not None:
        cudart._find_library = lambda: so_file
    try:
        with installed(FakeDriver(log=log)) as driver:
            yield Faked(driver, None if so_file is None else ctypes.CDLL(so_file))
    finally:
        cudart._find_library = before


def own_device(group: Group, form: str) -> torch.device:
    return torch.device("cpu") if form == "in_process" else torch.device("cuda", group.rank)


def make(group: Group, form: str, nbytes: int = 5000, **what: Any) -> tuple[Mapped, Teardown]:
    with Transaction(group, "open transport 'x'") as stages:
        mapped = map_jointly(stages, nbytes, own_device(group, form), form=form, **what)
        return mapped, stages.commit()


def write_and_read(group: Group, mapped: Mapped) -> None:
    """Let every rank write its number into everybody's memory, and check that all of it arrived everywhere."""
    step = mapped.nbytes // group.size // 64 * 64
    for owner, address in enumerate(mapped.addresses):
        ctypes.memset(address + step * group.rank, 16 * owner + group.rank + 1, step)
    group.barrier("written")
    for owner, address in enumerate(mapped.addresses):
        for writer in range(group.size):
            expected = bytes([16 * owner + writer + 1]) * step
            assert ctypes.string_at(address + step * writer, step) == expected, (owner, writer)
    group.barrier("read")


# Bytes are shared, in the right order.


def share(process_group: Any, form: str, so_file: str, nbytes: int) -> list[Any]:
    group = as_group(process_group)
    with faked(so_file) as fakes:
        before = fakes.alive()
        mapped, teardown = make(group, form, nbytes, number=3)
        write_and_read(group, mapped)
        during = fakes.alive()
        fakes.driver.current.append(5)
        teardown.close()
        assert fakes.driver.current.pop() == 5 and not fakes.driver.current
        assert fakes.alive() == before
        assert teardown.closed
        return [mapped.nbytes, mapped.form, mapped.number, {key: n - before.get(key, 0) for key, n in during.items()}]


@pytest.mark.parametrize("members", [1, 2, 4, (1, 3, 6)], ids=str)
@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
def test_every_rank_writes_into_every_ranks_memory(ranks: RankPool, so_file: str, form: str, members: Any) -> None:
    """Addresses are in group rank order, own memory is not imported, and mapped memory needs no descriptor."""
    size = members if isinstance(members, int) else len(members)
    for nbytes, whole in ((1, GRANULE), (GRANULE, GRANULE), (GRANULE + 1, 2 * GRANULE)):
        for result in ranks.run(share, form, so_file, nbytes, ranks=members):
            assert result[:3] == [whole, form, 3]
            during = {key: count for key, count in result[3].items() if count}
            if form == "vmm_fd":
                # The fake's handles are descriptors themselves.
                things = {"handles": size, "reservations": size, "mappings": size, "descriptors": size}
                assert during == {"contexts": 1, **things}
            else:
                assert during == {"allocations": 1, **({"imports": size - 1} if size > 1 else {})}


@pytest.mark.parametrize("size", [1, 3])
def test_threads_share_plain_addresses(size: int) -> None:
    """The twin for tests without processes: aligned like device memory, and gone after closing."""

    def run(group: Group) -> tuple[int, ...]:
        mapped, teardown = make(group, "in_process", 5000)
        assert mapped.nbytes == 8192
        assert all(address % 4096 == 0 for address in mapped.addresses)
        write_and_read(group, mapped)
        teardown.close()
        return mapped.addresses

    addresses = run_threads(size, run)
    assert len(set(addresses)) == 1 and len(set(addresses[0])) == size
    assert not in_process._alive


def test_threads_can_share_descriptors() -> None:
    """Unlike legacy IPC, a descriptor can be imported by the process that exported it."""

    def run(group: Group) -> None:
        mapped, teardown = make(group, "vmm_fd")
        write_and_read(group, mapped)
        teardown.close()

    with installed() as fake:
        run_threads(3, run)
        assert fake.alive() == {} and fake.violations == []


def test_network_cards_can_reach_it_where_the_device_lets_them() -> None:
    """RDMA registers peer memory; without the flag it can't, and on a device without the feature it is an error."""
    for supported in (1, 0):
        with installed() as fake:
            fake.attributes["GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"] = supported
            make(thread_groups(1)[0], "vmm_fd")[1].close()
            assert fake.rdma_capable == [bool(supported)]


# Order.


def close_with_log(process_group: Any, log: str) -> None:
    group = as_group(process_group)
    with faked(log=Path(log)):
        _, teardown = make(group, "vmm_fd")
        group.barrier("made")
        if group.rank == 0:
            Path(log).write_text("")
        group.barrier("cleared")
        teardown.close()


def test_nobody_frees_before_everybody_has_waited_and_unmapped(ranks: RankPool, tmp_path: Path) -> None:
    """A peer that still writes, or still has the memory mapped, would write into somebody else's (E4)."""
    log = tmp_path / "log"
    ranks.run(close_with_log, str(log), ranks=3)
    lines = [line.split() for line in log.read_text().splitlines()]
    calls = [(pid, call) for pid, call in lines if call in ("cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree")]
    names = [call for _, call in calls]
    assert names[:3] == ["cuCtxSynchronize"] * 3
    # Then each rank takes its two imports down, then each its own memory.
    imports, own = calls[3 : 3 + 12], calls[3 + 12 :]
    for part, times in ((imports, 2), (own, 1)):
        per_rank: dict[str, list[str]] = {}
        for pid, call in part:
            per_rank.setdefault(pid, []).append(call)
        assert list(per_rank.values()) == [["cuMemUnmap", "cuMemAddressFree"] * times] * 3, calls


# Failures.


def injections(fakes: Faked, form: str, size: int, make_one: Callable[[], None]) -> list[tuple[str, int]]:
    """Return every call of a creation that may fail: its name and how many of its kind precede it."""
    if form == "cuda_ipc":
        opens = [("cudaIpcOpenMemHandle", peer) for peer in range(size - 1)]
        return [("cudaMalloc", 0), ("cudaGetDriverEntryPointByVersion", 0), ("cudaIpcGetMemHandle", 0), *opens]
    fakes.driver.calls.clear()
    make_one()
    found: list[tuple[str, int]] = []
    for call, count in sorted(fakes.driver.calls.items()):
        if call == "cuDevicePrimaryCtxRelease":
            continue  # What takes a failed creation down; where it fails as well, the context stays as it is.
        # Every call makes the device current first, so of these a few will do.
        places = {0, count // 2, count - 1} if call == "cuCtxPushCurrent" else range(count)
        found += [(call, place) for place in places]
    return found


def fail_everywhere(process_group: Any, form: str, so_file: str) -> int:
    group = as_group(process_group)
    with faked(so_file) as fakes:
        kept: list[Teardown] = []
        cases = injections(fakes, form, group.size, lambda: kept.append(make(group, form)[1]))
        for teardown in kept:
            teardown.close()
        before = fakes.alive()
        for call, after in cases:
            for culprit in range(group.size):
                if group.rank == culprit:
                    fakes.fail(call, after)
                with pytest.raises(JointError) as caught:
                    make(group, form)
                fakes.fail(call, times=0)
                assert f"{call} failed with CUDA error 2: out of memory" in caught.value.per_rank[culprit]
                assert list(caught.value.per_rank) == [culprit]
                assert fakes.alive() == before, (call, after, culprit)
        mapped, teardown = make(group, form)
        write_and_read(group, mapped)
        teardown.close()
        return len(cases)


@pytest.mark.deadline(240)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
def test_a_failure_of_any_call_on_any_rank_fails_all_and_leaves_nothing(
    ranks: RankPool, so_file: str, form: str, size: int
) -> None:
    """Otherwise the others wait for a rank that is gone, or keep memory that nobody knows of (E6)."""
    cases = ranks.run(fail_everywhere, form, so_file, ranks=size, timeout_s=200)
    assert min(cases) >= (15 if form == "vmm_fd" else size + 1)


def fail_to_release(process_group: Any, form: str, so_file: str) -> None:
    group = as_group(process_group)
    calls = {
        "vmm_fd": ["cuCtxSynchronize", "cuMemUnmap", "cuMemRelease", "cuMemAddressFree", "cuDevicePrimaryCtxRelease"],
        "cuda_ipc": ["cudaDeviceSynchronize", "cudaIpcCloseMemHandle", "cudaFree"],
    }[form]
    with faked(so_file) as fakes:
        before = fakes.alive()
        for call in calls:
            for culprit in range(group.size):
                _, teardown = make(group, form)
                if group.rank == culprit:
                    fakes.fail(call, times=2)
                teardown.close()
                assert fakes.alive() == before, call

                _, teardown = make(group, form)
                if group.rank == culprit:
                    fakes.fail(call, times=1000)
                with pytest.raises(JointError) as caught:
                    teardown.close()
                assert list(caught.value.per_rank) == [culprit]
                assert call in str(caught.value)
                if call in ("cuMemUnmap", "cudaIpcCloseMemHandle"):
                    assert f"the memory of rank {1 - culprit} can't be unmapped" in str(caught.value)
                    # The peer did not free what could not be unmapped.
                    assert fakes.alive().get("handles", 0) + fakes.alive().get("allocations", 0) > 0
                fakes.fail(call, times=0)
                teardown.close()
                assert fakes.alive() == before, call


@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
def test_a_failure_to_release_is_retried_and_can_be_retried(ranks: RankPool, so_file: str, form: str) -> None:
    """Nothing is freed past a failed unmap, and what was released is not released twice."""
    ranks.run(fail_to_release, form, so_file, ranks=2, timeout_s=60)


def fail_the_exchange(process_group: Any) -> str:
    group = as_group(process_group)
    original = fd_exchange._Run._receive

    def receive(self: Any, connection: Any) -> None:
        original(self, connection)
        raise OSError(24, "Too many open files")

    with faked() as fakes:
        before = fakes.alive()
        if group.rank == 1:
            fd_exchange._Run._receive = receive
        with pytest.raises(JointError) as caught:
            make(group, "vmm_fd", what="window 7")
        fd_exchange._Run._receive = original
        assert fakes.alive() == before
        return caught.value.per_rank[1]


def test_descriptors_that_can_not_be_passed_fail_all(ranks: RankPool) -> None:
    """What was received on the way is closed again, and the memory freed."""
    for text in ranks.run(fail_the_exchange, ranks=3):
        assert "Too many open files. This process may have" in text


# Ranks that do not come.


def be_late(process_group: Any, form: str, so_file: str, where: str, late: int) -> list[Any]:
    group = as_group(process_group)
    kind: Any = {"vmm_fd": vmm.VmmMemory, "cuda_ipc": cuda_ipc.CudaIpcMemory}[form]
    original = getattr(kind, where)

    def wait_first(self: Any, *arguments: Any) -> Any:
        time.sleep(1.6)
        return original(self, *arguments)

    with faked(so_file) as fakes:
        before = fakes.alive()
        if group.rank == late:
            setattr(kind, where, wait_first)
        with pytest.raises(GroupTimeoutError) as caught:
            make(group, form)
        setattr(kind, where, original)
        gc.collect()  # What is kept does not warn, and a warning would be an error here.
        after = fakes.alive()
        group.barrier("looked", timeout_s=10)  # Forgetting takes it from under the late one.
        fakes.driver.forget()
        if fakes.runtime is not None:
            fakes.runtime.fake_forget()
        return [str(caught.value), {key: after[key] - before.get(key, 0) for key in after}]


@pytest.mark.parametrize(("form", "where"), [("vmm_fd", "export"), ("vmm_fd", "map"), ("cuda_ipc", "map")])
def test_what_a_late_rank_may_write_is_kept(ranks: RankPool, so_file: str, form: str, where: str) -> None:
    """And nothing else: own imports are unmapped and descriptors closed. The error says how much is kept."""
    outcome = ranks.run(be_late, form, so_file, where, 1, ranks=2, env={"COMM_TIMEOUT_S": "1"})
    assert "no word from rank 1" in outcome[0][0]
    assert "came too late" in outcome[1][0]
    for text, left in outcome:
        assert f"{GRANULE} bytes that a late peer may still write are kept until this process ends" in text
        left = {key: count for key, count in left.items() if count}
        if form == "vmm_fd":
            assert left == {"contexts": 1, "handles": 1, "reservations": 1, "mappings": 1, "descriptors": 1}
        else:
            assert left == {"allocations": 1}


@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
def test_what_no_rank_has_seen_is_not_kept(ranks: RankPool, so_file: str, form: str) -> None:
    """A rank that never came to the export can't write anybody's memory."""
    outcome = ranks.run(be_late, form, so_file, "allocate", 1, ranks=2, env={"COMM_TIMEOUT_S": "1"})
    for text, left in outcome:
        assert "are kept" not in text
        assert not any(left.values()), left


def test_kept_memory_of_threads_outlives_everybody() -> None:
    """A late thread may write long after the others have forgotten the memory."""

    def run(group: Group) -> int:
        mapped, teardown = make(group, "in_process")
        assert teardown.abandon() == mapped.nbytes
        return mapped.addresses[group.rank]

    addresses = run_threads(2, run)
    gc.collect()
    for address in addresses:
        ctypes.memset(address, 1, 8192)
    assert set(in_process._alive) == set(addresses)
    in_process._alive.clear()


def test_forgotten_memory_warns_and_does_nothing_else() -> None:
    """A finalizer that released anything would need the other ranks, which are elsewhere by then (E5)."""
    with installed() as fake:
        _, teardown = make(thread_groups(1)[0], "vmm_fd")
        before = fake.alive()
        assert before["mappings"] == 1
        with pytest.warns(
            ResourceWarning, match=r"2097152 bytes of peer memory \(vmm_fd, cuda:0\) were never released"
        ):
            del teardown, _
            gc.collect()
        assert fake.alive() == before
        fake.forget()


# What the ranks ask for.


def refused(change: Callable[[int], dict[str, Any]], kind: type[JointError] = JointValueError, size: int = 3) -> str:
    """Let all ranks ask, each with what `change` says of it; return the error that all of them raise."""

    def run(group: Group) -> None:
        arguments = {"nbytes": 4096, "device": torch.device("cpu"), **change(group.rank)}
        nbytes, device = arguments.pop("nbytes"), arguments.pop("device")
        with Transaction(group, "open") as stages:
            map_jointly(stages, nbytes, device, **arguments)
            stages.commit()

    errors = on_threads(size, run)
    assert {type(error) for error in errors} == {kind}, errors
    assert len({str(error) for error in errors}) == 1
    return str(errors[0])


@pytest.mark.parametrize(
    ("name", "own", "other"), [("nbytes", 4096, 8192), ("form", "auto", "in_process"), ("number", 1, 2)]
)
def test_ranks_that_ask_for_different_memory_are_all_told(name: str, own: Any, other: Any) -> None:
    """Windows are numbered so that two joint allocations can't be mixed up; nothing is allocated."""
    text = refused(lambda rank: {name: other if rank == 1 else own})
    assert "the ranks asked for different memory" in text
    assert f"{name}={own!r}" in text and f"{name}={other!r}" in text
    assert not in_process._alive


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"nbytes": 0}, "nbytes must be at least 1, got 0"),
        ({"nbytes": -1}, "nbytes must be at least 1, got -1"),
        ({"nbytes": True}, "nbytes must be an int, got True"),
        ({"nbytes": 1.5}, "nbytes must be an int, got 1.5"),
        ({"form": "x"}, "form must be 'auto' or one of in_process, vmm_fd, cuda_ipc, vmm_fabric, host_fd, got 'x'"),
        ({"device": torch.device("cuda")}, "device must have an explicit ordinal, got 'cuda'"),
    ],
    ids=str,
)
def test_a_bad_argument_on_one_rank_is_everybodys_error(bad: dict[str, Any], words: str) -> None:
    """Before anything is allocated, and naming the rank."""
    text = refused(lambda rank: bad if rank == 1 else {}, JointError)
    assert f"rank 1: {words}" in text


def test_a_form_that_can_not_work_is_refused_on_all_ranks() -> None:
    """With the reason and who is where, before anything is allocated (E9)."""
    text = refused(lambda rank: {"form": "vmm_fd"}, JointError)
    assert "look at memory: rank 0: cpu is no CUDA device; rank 1: cpu is no CUDA device; rank 2: cpu" in text
    devices = [torch.device("cuda", rank) for rank in range(3)]
    text = refused(lambda rank: {"form": "in_process", "device": devices[rank]}, JointError)
    assert "memory can't be shared in the form 'in_process': the ranks use different devices (cuda:0, cuda:1" in text
    assert f"rank 2: cuda:2 on host {host_facts().hostname!r}, process {os.getpid()}" in text


def choose_by_trial(process_group: Any, so_file: str, call: str) -> tuple[str, str]:
    group = as_group(process_group)
    with faked(so_file) as fakes:
        before = fakes.alive()
        if group.rank == 1 and call:
            fakes.driver.fail(call, times=1000, code=800)
        with Transaction(group, "open") as stages:
            mapped = map_jointly(stages, 5000, torch.device("cuda", group.rank))
            teardown = stages.commit()
        fakes.driver.fail(call, times=0)
        write_and_read(group, mapped)
        teardown.close()
        assert fakes.alive() == before
        return mapped.form, mapped.reason


@pytest.mark.parametrize(
    "call", ["", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemImportFromShareableHandle"]
)
def test_what_is_forbidden_on_one_rank_is_found_out_by_trying(ranks: RankPool, so_file: str, call: str) -> None:
    """A driver that says it can, in a container that does not let it: all ranks take the next form (I3)."""
    outcome = ranks.run(choose_by_trial, so_file, call, ranks=2)
    assert len(set(outcome)) == 1
    form, reason = outcome[0]
    assert form == ("cuda_ipc" if call else "vmm_fd")
    if call:
        assert f"not vmm_fd: rank 1: {call} failed with CUDA error 800: not permitted" in reason
    assert "not in_process: the ranks are 2 processes" in reason


# Choosing, without any rank.

HOST = HostFacts("a", "boot", "pid:[1]", "ipc:[1]", "mnt:[1]", 1000, "net:[1]")
BOTH = {"in_process": 4096, "vmm_fd": GRANULE, "cuda_ipc": GRANULE}


def facts(*changes: dict[str, Any], size: int = 2) -> list[MemoryFacts]:
    """Return the facts of `size` processes on one host; `changes` are for the last ranks."""
    found = [MemoryFacts(rank, HOST, 100 + rank, f"cuda:{rank}", BOTH) for rank in range(size)]
    for rank, change in zip(range(size - len(changes), size), changes, strict=True):
        host = replace(HOST, **{key: value for key, value in change.items() if hasattr(HOST, key)})
        own = {key: value for key, value in change.items() if not hasattr(HOST, key)}
        found[rank] = replace(found[rank], host=host, **own)
    return found


@pytest.mark.parametrize(
    ("change", "form", "words"),
    [
        ({}, "vmm_fd", "vmm_fd works on all ranks; not in_process: the ranks are 2 processes"),
        ({"hostname": "b", "ipc_namespace": "ipc:[2]"}, "vmm_fd", ""),
        ({"network_namespace": "net:[2]"}, "vmm_fd", ""),
        ({"mount_namespace": "mnt:[2]"}, "vmm_fd", ""),
        ({"pid_namespace": "pid:[2]"}, "vmm_fd", ""),
        (
            {"network_namespace": "net:[2]", "mount_namespace": "mnt:[2]"},
            "cuda_ipc",
            "not vmm_fd: the ranks are in 2",
        ),
        ({"uid": 0}, "cuda_ipc", "not vmm_fd: the ranks run as different users (rank 0: 1000, rank 1: 0)"),
        ({"granules": {"cuda_ipc": 1}, "refusals": {"vmm_fd": "no VMM"}}, "cuda_ipc", "not vmm_fd: rank 1: no VMM"),
        ({"granules": {"vmm_fd": 1}, "refusals": {"cuda_ipc": "no"}}, "vmm_fd", ""),
        ({"boot_id": "other"}, None, "not cuda_ipc: the ranks span 2 hosts"),
        ({"boot_id": ""}, None, "the host of rank 1 is unknown"),
        ({"network_namespace": "", "mount_namespace": ""}, "cuda_ipc", "unknown"),
        (
            {"network_namespace": "", "mount_namespace": "", "pid_namespace": ""},
            None,
            "PID namespace of rank 1 is unkno",
        ),
        ({"pid": 100}, "vmm_fd", "not in_process: the ranks use different devices (cuda:0, cuda:1)"),
        ({"pid": 100, "device": "cuda:0"}, "in_process", "in_process works on all ranks"),
        (
            {"granules": {}, "refusals": {"vmm_fd": "x", "cuda_ipc": "y"}},
            None,
            "vmm_fd: rank 1: x; not cuda_ipc: rank 1: y",
        ),
    ],
)
def test_the_form_is_chosen_from_the_facts(change: dict[str, Any], form: str | None, words: str) -> None:
    """What is preferred where it works, and why not otherwise; unknown is no (C10, I3)."""
    chosen = choose_form(facts(change))
    assert chosen.form == form, chosen
    assert words in chosen.reason


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("cuda_ipc", {}, None),
        ("cuda_ipc", {"network_namespace": "net:[2]", "mount_namespace": "mnt:[2]", "uid": 0}, None),
        ("cuda_ipc", {"boot_id": "", "pid_namespace": ""}, None),
        ("cuda_ipc", {"pid_namespace": "pid:[2]"}, "the ranks are in 2 PID namespaces"),
        ("cuda_ipc", {"pid": 100}, "Ranks must be processes of their own"),
        ("vmm_fd", {"pid": 100}, None),
        ("vmm_fd", {"pid_namespace": "pid:[2]"}, None),
        ("vmm_fd", {"boot_id": "", "network_namespace": "", "mount_namespace": ""}, None),
        ("vmm_fd", {"boot_id": "other"}, "the ranks span 2 hosts"),
        ("vmm_fd", {"granules": {}}, "rank 1: not looked at"),
        ("in_process", {}, "the ranks are 2 processes"),
    ],
)
def test_a_form_by_name_is_refused_only_for_what_is_known(
    form: str, change: dict[str, Any], words: str | None
) -> None:
    """What is unknown shows when it is tried, on all ranks together."""
    chosen = choose_form(facts(change), form)
    assert chosen.form == (form if words is None else None), chosen
    assert words is None or words in chosen.reason


def test_one_rank_gets_the_same_kind_of_memory_as_many() -> None:
    """A group of one is no reason for memory that peers could not map; on a CPU there is no other."""
    assert choose_form(facts(size=1)).form == "vmm_fd"
    assert choose_form(facts({"device": "cpu"}, size=1)).form == "in_process"
    assert choose_form(facts({"pid": 100, "device": "cpu"}, size=2)[1:]).form == "in_process"


def test_facts_travel_as_json() -> None:
    """They are gathered, and every rank must decide on the same."""
    with installed():
        own = probe_memory(2, torch.device("cuda", 1), forms=("vmm_fd",))
    assert own.granules == {"vmm_fd": GRANULE} and own.pid == os.getpid() and own.host == host_facts()
    assert MemoryFacts.from_json(json.loads(json.dumps(own.to_json()))) == own
    for broken in (None, [], {"host": {}}, {"rank": "1"}):
        with pytest.raises(ValueError, match="MemoryFacts"):
            MemoryFacts.from_json(broken)


def test_a_probe_allocates_only_to_try() -> None:
    """The decision protocol probes before it decides, and allocates nothing."""
    with installed() as fake:
        for trial, created in ((False, 0), (True, 1)):
            found = probe_memory(0, torch.device("cuda", 0), forms=("in_process", "vmm_fd"), trial=trial)
            assert found.granules == {"in_process": 4096, "vmm_fd": GRANULE} and not found.refusals
            assert fake.calls["cuMemCreate"] == created
            assert fake.alive() == {}
        fake.attributes["HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"] = 0
        refusals = probe_memory(0, torch.device("cuda", 0), forms=("vmm_fd",), trial=True).refusals
        assert "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED is 0" in refusals["vmm_fd"]


@pytest.mark.parametrize(
    ("value", "form"), [(None, "auto"), ("", "auto"), ("vmm_fd", "vmm_fd"), ("cuda_ipc", "cuda_ipc")]
)
def test_the_variable(monkeypatch: pytest.MonkeyPatch, value: str | None, form: str) -> None:
    """COMM_PEER_MEMORY names a form; threads are never asked for by it."""
    monkeypatch.delenv("COMM_PEER_MEMORY", raising=False)
    if value is not None:
        monkeypatch.setenv("COMM_PEER_MEMORY", value)
    assert _env.peer_memory() == form
    monkeypatch.setenv("COMM_PEER_MEMORY", "in_process")
    with pytest.raises(ValueError, match="must be one of auto, vmm_fd, cuda_ipc, got 'in_process'"):
        _env.peer_memory()


# Memory that exists already.


def share_pointers(process_group: Any, so_file: str) -> None:
    group = as_group(process_group)
    device = torch.device("cuda", group.rank)
    sizes = [64, 4096, 4096, 1 << 20, 1 << 21]
    offsets = [512 * (1 + 5 * place) + sum(sizes[:place]) for place in range(len(sizes))]
    with faked(so_file) as fakes:
        before = fakes.alive()
        runtime = cudart.CudaRTLibrary()
        fakes.runtime.cudaSetDevice(group.rank)
        base = runtime.cudaMalloc(8 << 20).value or 0
        exports: list[Any] = []
        for place, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            ctypes.memset(base + offset, 10 * group.rank + place + 1, size)
            exports.append(cuda_ipc.export_pointer(base + offset, size, device))
        theirs: Any = group.gather("exports", exports)[1 - group.rank]
        imported = [cuda_ipc.import_pointer(export, device) for export in theirs]
        for place, (item, size) in enumerate(zip(imported, sizes, strict=True)):
            assert item.nbytes == size
            assert ctypes.string_at(item.address, size) == bytes([10 * (1 - group.rank) + place + 1]) * size
            assert item.address - imported[0].address == offsets[place] - offsets[0]
        assert fakes.runtime.fake_imports() == 1, "one allocation is mapped once"
        for item in imported:
            item.close()
            item.close()
        group.barrier("closed")
        with pytest.raises(ValueError, match="are not inside of the allocation"):
            cuda_ipc.export_pointer(base + (8 << 20) - 64, 65, device)
        with pytest.raises(ValueError, match="is no export of device memory"):
            cuda_ipc.import_pointer({"handle": "xyz", "offset": 0}, device)
        runtime.cudaFree(base)
        assert fakes.alive() == before


def test_a_pointer_inside_of_an_allocation_arrives_where_it_points(ranks: RankPool, so_file: str) -> None:
    """A handle maps the whole block; without the offset a small tensor's peer reads its neighbour (E2)."""
    ranks.run(share_pointers, so_file, ranks=2)


def test_memory_that_legacy_ipc_can_not_export_is_refused(so_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver would say "invalid argument", and only when it is too late (E1)."""
    with faked(so_file) as fakes:
        mapped, teardown = make(thread_groups(1)[0], "vmm_fd")
        with pytest.raises(UnsupportedError, match=r"expandable_segments:True.*Copy through memory"):
            cuda_ipc.export_pointer(mapped.addresses[0], 64, torch.device("cuda", 0))
        teardown.close()
        # Where the driver can't be asked, the runtime decides.
        monkeypatch.setattr(_driver, "source", no_binding)
        runtime = cudart.CudaRTLibrary()
        base = runtime.cudaMalloc(1 << 21).value or 0
        assert cuda_ipc.export_pointer(base + 64, 64, torch.device("cuda", 0))["offset"] == 64
        runtime.cudaFree(base)
        assert fakes.runtime.fake_allocations() == 0


def no_binding() -> Any:
    raise ModuleNotFoundError("No module named 'cuda'")


# The driver, and how true its fake is.


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the package, without a driver, or with one that lacks a call (L13)."""
    monkeypatch.setattr(_driver, "source", no_binding)
    with pytest.raises(
        UnsupportedError, match=r"needs the package cuda-bindings \(pip install 'comm-core\[cuda\]'\)"
    ):
        _driver.Device(0)

    def no_driver(*_: Any) -> Any:
        raise RuntimeError('Failed to dlopen "libcuda.so.1"')

    monkeypatch.setattr(_driver, "source", lambda: types.SimpleNamespace(cuInit=no_driver))
    with pytest.raises(UnsupportedError, match=r"can't be called \(cuInit\): Failed to dlopen"):
        _driver.Device(0)
    monkeypatch.setattr(_driver, "source", types.SimpleNamespace)
    with pytest.raises(UnsupportedError, match="cuInit"):
        _driver.Device(0)


def test_the_real_binding_is_spelled_like_its_fake() -> None:
    """Everything that the wrapper uses exists there, and its numbers are the same."""
    driver = pytest.importorskip("cuda.bindings.driver")
    checked = 0
    for name in vars(FakeDriver):
        if name.startswith(("cu", "CU")) and name != "current":
            assert hasattr(driver, name), name
    for name in vars(FakeDriver):
        own = getattr(FakeDriver, name)
        for item in own if isinstance(own, type) and issubclass(own, IntEnum) else ():
            checked += 1
            assert int(getattr(getattr(driver, name), item.name)) == item.value, item
    assert checked > 15
    properties, fake = driver.CUmemAllocationProp(), FakeDriver.CUmemAllocationProp()
    properties.allocFlags.gpuDirectRDMACapable = 1
    for part in vars(fake):
        assert hasattr(properties, part), part


def test_the_fake_is_strict() -> None:
    """What a driver leaves undefined must not pass here, or tests prove nothing."""
    with installed() as fake:
        device = _driver.Device(0)
        handle = device.create(GRANULE)
        address = device.reserve(2 * GRANULE, GRANULE)
        device.map(address, GRANULE, handle)
        with device.current():
            assert fake.cuMemAddressFree(address, 2 * GRANULE)[0] == 1, "something is mapped in it"
            assert fake.cuMemUnmap(address, GRANULE // 2)[0] == 1, "a part"
            assert fake.cuMemMap(address, GRANULE, 0, handle, 0)[0] == 1, "taken"
            assert fake.cuMemMap(address + GRANULE, 2 * GRANULE, 0, handle, 0)[0] == 1, "beyond the reservation"
            assert fake.cuMemCreate(GRANULE + 1, fake.CUmemAllocationProp(), 0)[0] == 1
            with Path("/dev/null").open() as other:
                assert fake.cuMemImportFromShareableHandle(other.fileno(), 1)[0] == 1, "no memory"
        assert fake.cuMemUnmap(address, GRANULE)[0] == 201, "no context"
        assert len(fake.violations) == 1
        device.unmap(address, GRANULE)
        device.release(handle)
        with pytest.raises(CommError, match="cuMemRelease failed with CUDA error 1: invalid value"):
            device.release(handle)
        device.free_reservation(address, 2 * GRANULE)
        device.close()
        device.close()
        assert fake.alive() == {} and len(fake.violations) == 2


def test_peer_memory_is_abstract() -> None:
    """A form that lacks a part can't be made."""
    with pytest.raises(TypeError, match="abstract"):
        PeerMemory(torch.device("cpu"), 0)  # type: ignore[abstract]
