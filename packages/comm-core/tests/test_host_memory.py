"""Memory of the host that processes share, and a session of windows that a host gives up on."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_core
from comm_core.consensus import Transaction
from comm_core.errors import CommError, JointError, PeerStalledError
from comm_core.group import Group, as_group
from comm_core.jit import Module
from comm_core.jit.cache import Artifact
from comm_core.memory import host_fd, passing
from comm_core.memory.peer import AUTO, FORMS, HOST, map_jointly, probe_memory
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.testing.ranks import RankPool, run_threads
from comm_core.windows.launch import WINDOWS
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import abort_code, read_abort

CPU = torch.device("cpu")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def shared(group: Any) -> list[int]:
    """Each rank writes its own word at every rank's memory; all see all."""
    ranks = as_group(group)
    with Transaction(ranks, "share") as stages:
        mapped = map_jointly(stages, 64, CPU, form=HOST, what="words", number=3)
        teardown = stages.commit()
    assert (mapped.form, mapped.number, mapped.nbytes) == (HOST, 3, os.sysconf("SC_PAGE_SIZE"))
    words = [(ctypes.c_uint32 * 16).from_address(address) for address in mapped.addresses]
    assert list(words[ranks.rank]) == [0] * 16
    ranks.gather("zero", None)
    for word in words:
        word[ranks.rank] = 100 + ranks.rank
    ranks.gather("written", None)
    found = list(words[ranks.rank])[: ranks.size]
    teardown.close()
    return found


def shared_and_counted(group: Any) -> list[int]:
    before = descriptors()
    found = shared(group)
    assert descriptors() == before
    return found


def test_processes_see_each_others_words(ranks: RankPool) -> None:
    """Nothing is inherited: the memory is passed on as descriptors, which are closed again."""
    assert ranks.run(shared_and_counted, ranks=3) == [[100, 101, 102]] * 3


def test_threads_can_share_it_as_well() -> None:
    assert run_threads(2, shared) == [[100, 101]] * 2


def test_device_memory_is_never_mistaken_for_it() -> None:
    """It is not among the forms that are chosen, and a GPU has none of it."""
    assert HOST not in FORMS
    facts = probe_memory(0, torch.device("cuda", 0), forms=(HOST,))
    assert "is no CPU" in facts.refusals[HOST] and facts.granules == {}


def fails_at(group: Group, step: str, monkeypatch: Any) -> str:
    with pytest.raises(JointError) as refused, Transaction(group, "share") as stages:
        map_jointly(stages, 64, CPU, form=HOST)
    return str(refused.value)


@pytest.mark.parametrize("step", ["memfd_create", "mmap"])
def test_what_the_system_refuses_is_everybodys_error(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(24, "Too many open files")

    before = descriptors()
    if step == "mmap":
        monkeypatch.setattr(host_fd.mmap, "mmap", refuse)
    else:
        monkeypatch.setattr(host_fd.os, step, refuse)
    found = run_threads(2, fails_at, step, monkeypatch)
    assert found[0] == found[1] and "Too many open files" in found[0]
    assert descriptors() == before


@pytest.mark.parametrize("step", ["listen", "run", "map"])
def test_no_descriptor_stays_where_passing_them_fails(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On any way out: the own one that is on offer, and those of the peers that were not mapped yet."""
    lock, calls = threading.Lock(), [0]

    class FailsLater(mmap.mmap):
        def __new__(cls, *arguments: Any) -> Any:
            with lock:
                calls[0] += 1
                # Each rank maps its own first, and one of them then one of its peers'.
                if calls[0] > 4:
                    raise OSError(12, "Cannot allocate memory")
            return super().__new__(cls, *arguments)

    def refuse(*_: Any, **__: Any) -> Any:
        raise CommError(f"no {step} today")

    before = descriptors()
    if step == "map":
        monkeypatch.setattr(host_fd.mmap, "mmap", FailsLater)
    else:
        monkeypatch.setattr(passing.Exchange, {"listen": "__init__", "run": "run"}[step], refuse)
    found = run_threads(3, fails_at, step, monkeypatch)
    assert len(set(found)) == 1
    assert ("Cannot allocate memory" if step == "map" else f"no {step} today") in found[0]
    gc.collect()
    assert descriptors() == before


def test_auto_stays_auto() -> None:
    def look(group: Group) -> str:
        with Transaction(group, "share") as stages:
            mapped = map_jointly(stages, 64, CPU, form=AUTO)
            stages.commit().close()
        return mapped.form

    assert run_threads(2, look) == ["in_process"] * 2


# Giving up from the host


def test_the_abort_word_is_that_of_the_kernels() -> None:
    for reporter, waited_for in ((0, 0), (3, 15), (15, 3)):
        code = abort_code(reporter, waited_for)
        assert code == 0x80000000 | waited_for << 8 | reporter and read_abort(code) == (reporter, waited_for)


class HostSession(WindowSession):
    """A session over shared memory of the host."""

    def _stream(self) -> int:
        return 0


def gives_up(group: Any, library: str) -> tuple[str, int, int]:
    ranks = as_group(group)
    module = Module(WINDOWS, Artifact(WINDOWS.name, "host", Path(library), {"archs": []}, {}))
    with Transaction(ranks, "open") as stages:
        session = HostSession(stages, module, CPU, form=HOST, staging_bytes=1 << 12, timeout_s=30, blocks_per_peer=1)
        stages.commit()
    session.barrier()
    gathered = torch.zeros(ranks.size, 2, dtype=torch.uint8)
    session.all_gather_small(torch.tensor([ranks.rank, 7], dtype=torch.uint8), gathered)
    assert gathered.tolist() == [[rank, 7] for rank in range(ranks.size)]
    # A rank that gives up breaks what the others have not left yet.
    ranks.gather("all through", None)
    if ranks.rank == 1:
        session.give_up(2)
        session.barrier()
    else:
        # These wait for rank 1, whose host says that nothing more will come.
        session.barrier()
    with pytest.raises(PeerStalledError) as stalled:
        session.check()
    with pytest.raises(CommError):
        session.barrier()
    session.close(10)
    return type(stalled.value).__name__, stalled.value.waited_for, stalled.value.reporter


def test_a_host_that_gives_up_releases_the_kernels_of_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """At once, and not at their deadline; the reporter and the rank that is blamed are told."""
    library = compile_for_host(WINDOWS, Path(comm_core.__file__).parent, HOST_WINDOWS, tmp_path)
    assert ranks.run(gives_up, str(library), ranks=3, timeout_s=20) == [("PeerStalledError", 2, 1)] * 3


def abandons(group: Any, library: str) -> int:
    ranks = as_group(group)
    module = Module(WINDOWS, Artifact(WINDOWS.name, "host", Path(library), {"archs": []}, {}))
    with Transaction(ranks, "open") as stages:
        session = HostSession(stages, module, CPU, form=HOST, staging_bytes=1, timeout_s=5, blocks_per_peer=1)
        stages.commit()
    session.window(1 << 16)
    return session.abandon()


def test_what_late_peers_may_write_is_kept_and_counted(ranks: RankPool, tmp_path: Path) -> None:
    library = compile_for_host(WINDOWS, Path(comm_core.__file__).parent, HOST_WINDOWS, tmp_path)
    kept = ranks.run(abandons, str(library), ranks=2)
    assert kept[0] == kept[1] >= 1 << 16
