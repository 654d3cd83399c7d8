"""The driver's own checkpoint of processes that share memory: after ``checkpoint_prepare`` it takes them, and a
captured graph replays afterwards.

``GPU_CHECK_CHECKPOINT=1`` and no MPS: a client of MPS can't be checkpointed. The processes' GPU state goes to host
memory and comes back; the processes themselves go on.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, plugins
from comm_core.testing.device_contract import expected, operand
from comm_core.testing.gpu import shared_gpu_pool
from comm_core.testing.new_groups import new_group_of
from comm_core.testing.ranks import RankPool
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


ranks = shared_gpu_pool(2)


def checkpointed(group: Any) -> str:
    if "mnnvl" not in plugins.registry().transports:
        from comm_mnnvl.plugin import MnnvlPlugin

        plugins.register("mnnvl under test", MnnvlPlugin())
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    comm = UlyssesCommunicator(group, backend="mnnvl", max_bytes=1 << 20, dtype=torch.bfloat16, device=device)
    rank, size = comm.rank, comm.world_size
    x = operand(rank, 0, size, device).clone()
    y = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.scatter_heads(x, out=y)
    comm.checkpoint_prepare()
    torch.cuda.synchronize()
    command = [sys.executable, "-c", _CHILD, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=80)
    group.barrier().wait()
    if done.returncode:
        return done.stderr.strip()[-500:]
    comm.checkpoint_restore(new_group_of(group))
    for round_ in range(1, 4):
        x.copy_(operand(rank, round_, size, device))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(y, expected(rank, round_, size, device))
        assert_same_bits(comm.scatter_heads(x), expected(rank, round_, size, device))
    comm.close()
    return done.stdout.strip()


def test_the_driver_checkpoints_what_was_prepared(ranks: RankPool) -> None:
    """H3: graphs hold addresses of memory that two checkpoints lie between: this package's and the driver's."""
    assert ranks.run(checkpointed, ranks=2, timeout_s=115) == ["restored", "restored"]
