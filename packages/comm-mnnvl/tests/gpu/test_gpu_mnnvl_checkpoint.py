"""The driver's own checkpoint of processes that share memory: after ``checkpoint_prepare`` it takes them, and a
captured graph replays afterwards.

``python tools/gpu_check.py --only checkpoint`` runs this, with ``GPU_CHECK_CHECKPOINT=1`` and no MPS: a client of MPS
can't be checkpointed. The processes' GPU state goes to host memory and comes back; the processes themselves go on.

Processes need a GPU each. Without MPS those that share one take turns on it every few milliseconds; after the driver
has restored one, its kernels run to their end instead, so two that wait for each other do so in vain
(`test_kernels_take_turns_until_the_driver_restores_a_process`). Ranks that are threads of one process need no turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, plugins
from comm_core.group import Group, thread_groups
from comm_core.testing.device_contract import expected, operand
from comm_core.testing.gpu import shared_gpu_pool
from comm_core.testing.new_groups import new_group_of
from comm_core.testing.ranks import RankPool, run_threads
from comm_core.testing.reference import assert_same_bits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.installed_plugins,
    pytest.mark.skipif(os.environ.get("GPU_CHECK_CHECKPOINT") != "1", reason="needs a run of its own without MPS"),
]

_CHILD = """
import sys
from cuda.bindings import driver
pid = int(sys.argv[1])
def call(name, *arguments):
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        sys.exit(f"{name}: CUDA error {int(code)} ({driver.cuGetErrorString(code)[1]!r})")
    return values[0] if values else None
call("cuInit", 0)
lock = driver.CUcheckpointLockArgs()
lock.timeoutMs = 20000
call("cuCheckpointProcessLock", pid, lock)
call("cuCheckpointProcessCheckpoint", pid, None)
assert int(call("cuCheckpointProcessGetState", pid)) == 2, "not checkpointed"
call("cuCheckpointProcessRestore", pid, None)
call("cuCheckpointProcessUnlock", pid, None)
print("restored")
"""


ranks = shared_gpu_pool(2, COMM_TIMEOUT_S="40")


def driver_checkpoint(pid: int) -> None:
    """Let the driver take a process and bring it back, from another one."""
    command = [sys.executable, "-c", _CHILD, str(pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80)
    assert (done.returncode, done.stdout.strip()) == (0, "restored"), done.stderr[-500:]


def detached_and_restored(
    group: Any,
    device: torch.device,
    meet: Callable[[], object],
    new_group: Callable[[], Any],
    between: Callable[[], None],
) -> None:
    """Exchange, capture, detach, run `between`, restore, and replay.

    Args:
        group: of the ranks.
        device: of this rank.
        meet: returns when every rank has called it. Comparing loads kernels, and where ranks are threads that waits
            for those that run; so none is waiting for a peer then.
        new_group: returns the group to restore with.
        between: what to do while detached.
    """
    comm = UlyssesCommunicator(group, backend="mnnvl", max_bytes=1 << 20, dtype=torch.bfloat16, device=device)
    rank, size = comm.rank, comm.world_size
    rounds = [(operand(rank, each, size, device), expected(rank, each, size, device)) for each in range(4)]
    x = rounds[0][0].clone()
    y = comm.allocate_output(x, "scatter_heads")
    stream = torch.cuda.current_stream()
    stream.synchronize()
    meet()
    comm.scatter_heads(x, out=y)
    stream.synchronize()
    meet()
    assert_same_bits(y, rounds[0][1])
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode="thread_local")
    comm.scatter_heads(x, out=y)
    graph.capture_end()
    comm.checkpoint_prepare()
    between()
    comm.checkpoint_restore(new_group())
    for operand_, expected_ in rounds[1:]:
        x.copy_(operand_)
        meet()
        graph.replay()
        eager = comm.scatter_heads(x)
        stream.synchronize()
        meet()
        assert_same_bits(y, expected_)
        assert_same_bits(eager, expected_)
    comm.close()


def register() -> None:
    if "mnnvl" not in plugins.registry().transports:
        from comm_mnnvl.plugin import MnnvlPlugin

        plugins.register("mnnvl under test", MnnvlPlugin())


def checkpointed_processes(group: Any) -> None:
    register()
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)

    def meet() -> None:
        group.barrier().wait()

    def between() -> None:
        try:
            driver_checkpoint(os.getpid())
        finally:
            meet()

    with torch.cuda.stream(torch.cuda.Stream()):
        detached_and_restored(group, device, meet, lambda: new_group_of(group), between)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a GPU for each process: see this file's beginning")
def test_the_driver_checkpoints_what_was_prepared(ranks: RankPool) -> None:
    """H3: graphs hold addresses of memory that two checkpoints lie between: this package's and the driver's."""
    ranks.run(checkpointed_processes, ranks=2, timeout_s=115)


def checkpointed_threads(process_group: Any) -> None:
    register()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    again = thread_groups(2, name="restored")

    def run(group: Group) -> None:
        torch.cuda.set_device(device)

        def meet() -> None:
            group.barrier("test")

        def between() -> None:
            meet()
            try:
                if group.rank == 0:
                    driver_checkpoint(os.getpid())
            finally:
                meet()

        with torch.cuda.stream(torch.cuda.Stream()):
            detached_and_restored(group, device, meet, lambda: again[group.rank], between)

    run_threads(2, run, timeout_s=100, group_timeout_s=90)


def test_the_driver_checkpoints_a_process_of_two_ranks(ranks: RankPool) -> None:
    """H3: as above, of ranks that are threads, whose kernels run at the same time on one GPU."""
    ranks.run(checkpointed_threads, ranks=1, timeout_s=115)


_SLEEPER = """
import sys, time, torch
torch.cuda._sleep(1000)
torch.cuda.synchronize()
print("ready", flush=True)
sys.stdin.readline()
started = time.monotonic()
torch.cuda._sleep(int(sys.argv[1]))
torch.cuda.synchronize()
print(time.monotonic() - started, flush=True)
"""
_CYCLES = 2_000_000_000
"""About a second."""


def slept(checkpoint: bool) -> float:
    """Run two processes with one kernel each, that counts the clock, on one GPU; return the longer one's seconds."""
    command = [sys.executable, "-c", _SLEEPER, str(_CYCLES)]
    sleepers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        for sleeper in sleepers:
            assert sleeper.stdout is not None and sleeper.stdout.readline() == "ready\n"
        if checkpoint:
            for sleeper in sleepers:
                driver_checkpoint(sleeper.pid)
        for sleeper in sleepers:
            assert sleeper.stdin is not None
            sleeper.stdin.write("go\n")
            sleeper.stdin.flush()
        return max(float(sleeper.communicate(timeout=30)[0]) for sleeper in sleepers)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.communicate()


def test_kernels_take_turns_until_the_driver_restores_a_process() -> None:
    """The driver's fact on which it hangs that ranks that share a GPU can't be restored; nothing of ours takes part.

    Kernels that take turns count the same clock, so two end when one would. Where this fails because they take turns
    after a restore as well, the driver has learned it: run the test of processes on one GPU too.
    """
    before, after = slept(checkpoint=False), slept(checkpoint=True)
    assert after > 1.6 * before, (before, after)
