"""Symmetric memory between real processes: descriptors over sockets, new gloo groups, and ranks that die half-way.

The driver is faked in each process; its memory is really shared, and its descriptors really travel.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import CheckpointError, CommError
from comm_core.memory import fd_exchange
from comm_core.testing.fake_driver import FakeDriver, installed
from comm_core.testing.new_groups import new_group_of
from comm_core.testing.ranks import RankPool
from comm_mnnvl import McastGPUBuffer, MnnvlMemory, SymmDeviceMemory, default_backend, shared


@contextlib.contextmanager
def faked() -> Generator[FakeDriver]:
    """Replace the driver in this process; tensors over its memory are the CPU's."""
    before = shared.tensor_device
    shared.tensor_device = lambda ordinal: torch.device("cpu")
    try:
        with installed(FakeDriver()) as driver:
            yield driver
            assert driver.violations == []
    finally:
        shared.tensor_device = before


def descriptors() -> list[str]:
    """Return what this process holds of the driver's memory and of unix sockets; gloo's own sockets are others."""
    held: list[str] = []
    sockets = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            target = str(path.readlink())
            if "comm-fake-vmm" in target or target.removeprefix("socket:[").rstrip("]") in sockets:
                held.append(target)
    return sorted(held)


def works(memory: SymmDeviceMemory, group: Any, salt: int) -> None:
    for peer in range(memory.group_size):
        memory.tensor(peer, memory.group_rank, 1).fill_(salt + 16 * peer + memory.group_rank)
    group.barrier().wait()
    own = memory.tensor(memory.group_rank, 0, memory.group_size).tolist()
    assert own == [salt + 16 * memory.group_rank + peer for peer in range(memory.group_size)]
    group.barrier().wait()


def cycles(group: Any, count: int) -> Any:
    """Restore with a new gloo group each time, the old one destroyed before; then count what is left."""
    with faked() as driver:
        group.barrier().wait()
        before = descriptors()
        memory = SymmDeviceMemory(5000, group.size(), group.rank(), group.rank(), TorchDistBackend(group))
        pointers = list(memory.uc_ptrs)
        works(memory, group, 1)
        mapped = driver.alive()
        last: Any = None
        for number in range(count):
            memory.checkpoint_prepare()
            if last is not None:
                dist.destroy_process_group(last)
            # Addresses are all that is left: no handle and no descriptor, which a checkpoint would trip over.
            assert driver.alive() == {"contexts": 1, "reservations": 1}
            last = new_group_of(group)
            memory.checkpoint_restore(TorchDistBackend(last))
            assert memory.uc_ptrs == pointers
            works(memory, group, 2 + number % 7)
        assert driver.alive() == mapped
        assert len(descriptors()) == len(before) + mapped["handles"]
        memory.close()
        dist.destroy_process_group(last)
        group.barrier().wait()
        return driver.alive(), descriptors() == before


@pytest.mark.parametrize("members", [2, (1, 2, 4)], ids=str)
def test_processes_restore_with_new_groups(ranks: RankPool, members: Any) -> None:
    """H2, C9: groups that are not the first ranks too; nothing of any of them stays."""
    outcomes = ranks.run(cycles, 5, ranks=members, timeout_s=60)
    assert outcomes == [({}, True)] * len(outcomes)


def killed(group: Any, when: str) -> str:
    """Rank 1 is killed: before it comes to the restore, or in the middle of it."""
    with faked() as driver:
        memory = SymmDeviceMemory(5000, group.size(), group.rank(), group.rank(), TorchDistBackend(group))
        memory.checkpoint_prepare()
        if group.rank() == 1:
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            fd_exchange.Exchange.run = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        started = time.monotonic()
        with pytest.raises(CommError) as caught:
            memory.checkpoint_restore(TorchDistBackend(group))
        assert time.monotonic() - started < 30
        assert memory.state == ("detached" if when == "before" else "failed")
        memory.close()
        driver.forget()
        return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("when", ["before", "half-way"])
def test_a_killed_rank_is_named_and_nobody_hangs(ranks: RankPool, when: str) -> None:
    """H2, H5: with an exchange of descriptors under way or not."""
    outcomes = ranks.run_outcomes(killed, when, ranks=3, timeout_s=60, env={"COMM_TIMEOUT_S": "5"}, fresh=True)
    for rank in (0, 2):
        text = outcomes[rank].value
        assert text is not None, outcomes
        if when == "before":
            assert text.startswith("GroupTimeoutError") and "no word from rank 1" in text
        else:
            # It is the end for all, whether a rank saw the socket close or waited for the word that never came.
            assert text.startswith("CheckpointError") and "half-way" in text and "rank 1" in text


def strangers(group: Any) -> str:
    """Somebody else connects to every rank's socket in the middle of a restore, and sends something."""
    with faked():
        memory = SymmDeviceMemory(5000, group.size(), group.rank(), group.rank(), TorchDistBackend(group))
        memory.checkpoint_prepare()
        original = fd_exchange.Exchange.run

        def run(self: Any, invitations: Any, *arguments: Any, **options: Any) -> Any:
            for item in invitations:
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
                    connection.connect("\0" + item["name"])
                    connection.send(b"let me in")
            return original(self, invitations, *arguments, **options)

        fd_exchange.Exchange.run = run  # type: ignore[method-assign]
        try:
            memory.checkpoint_restore(TorchDistBackend(group))
        finally:
            fd_exchange.Exchange.run = original  # type: ignore[method-assign]
        works(memory, group, 3)
        memory.close()
        return memory.state


def test_strangers_at_the_sockets_change_nothing(ranks: RankPool) -> None:
    """I5: the restore exchanges descriptors by the same protocol as the opening, with the same checks."""
    assert ranks.run(strangers, ranks=3, timeout_s=60) == ["closed"] * 3


def behaves(group: Any, how: str) -> str:
    """Rank 1 is slow to pass its descriptor on, or does not listen any more."""
    with faked() as driver:
        memory = SymmDeviceMemory(5000, group.size(), group.rank(), group.rank(), TorchDistBackend(group))
        memory.checkpoint_prepare()
        original = fd_exchange.Exchange.run

        def run(self: Any, *arguments: Any, **options: Any) -> Any:
            if how == "slow":
                time.sleep(0.7)
                return original(self, *arguments, **options)
            self.close()
            raise CommError("no descriptors today")

        if group.rank() == 1:
            fd_exchange.Exchange.run = run  # type: ignore[method-assign]
        try:
            memory.checkpoint_restore(TorchDistBackend(group))
            works(memory, group, 3)
        except CheckpointError as error:
            return str(error)
        finally:
            fd_exchange.Exchange.run = original  # type: ignore[method-assign]
            memory.close()
            if memory._teardown.closed is False:
                driver.forget()
        return "works"


def test_a_slow_rank_is_waited_for_and_one_that_refuses_is_named(ranks: RankPool) -> None:
    """I5: in the exchange of a restore as in any other."""
    assert ranks.run(behaves, "slow", ranks=3, timeout_s=60) == ["works"] * 3
    texts = ranks.run(behaves, "refuses", ranks=3, timeout_s=60, fresh=True)
    assert len(set(texts)) == 1 and "rank 1: no descriptors today" in texts[0]
    # Whoever tried it first could not reach it, and may be gone itself when the other one comes.
    assert "rank 0: rank 1 " in texts[0] or "rank 2: rank 1 " in texts[0]


def by_default(group: Any) -> Any:
    """Without a backend the ranks are WORLD's."""
    from comm_core.mapping import Mapping
    from comm_mnnvl import MnnvlConfig

    rank, size = dist.get_rank(), dist.get_world_size()
    with faked():
        assert isinstance(default_backend(), TorchDistBackend)
        with SymmDeviceMemory(5000, size, rank, 0) as memory:
            found = [memory.group.size]
        with McastGPUBuffer(5000, size, rank, torch.device("cuda", 0)) as buffer:
            found.append(buffer.mcast_device_memory.group_size)
        with MnnvlMemory(Mapping(size, rank, tp_size=size), 4096, MnnvlConfig(device_idx=0)) as rows:
            found.append(rows.group.size)
        with pytest.raises(CommError):
            SymmDeviceMemory(5000, size + 1, rank, 0)
        return found


def test_without_a_backend_torch_distributed_is_used_where_it_is_initialized(ranks: RankPool) -> None:
    """Not MPI, which may be there and mean other ranks."""
    assert ranks.run(by_default, ranks=ranks.size, timeout_s=60) == [[ranks.size] * 3] * ranks.size


def half_way_text(group: Any) -> str:
    with faked() as driver:
        memory = SymmDeviceMemory(5000, group.size(), group.rank(), group.rank(), TorchDistBackend(group))
        memory.checkpoint_prepare()
        if group.rank() == 1:
            driver.fail("cuMemImportFromShareableHandle", times=9, code=800)
        with pytest.raises(CheckpointError) as caught:
            memory.checkpoint_restore(TorchDistBackend(group))
        memory.close()
        driver.forget()
        return str(caught.value)


def test_a_failure_in_one_process_is_everybodys_last_word(ranks: RankPool) -> None:
    """H2: the same text everywhere."""
    texts = ranks.run(half_way_text, ranks=3, timeout_s=60, fresh=True)
    assert len(set(texts)) == 1 and "rank 1: " in texts[0] and "restart the processes" in texts[0]
