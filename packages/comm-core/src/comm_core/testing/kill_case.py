"""SIGKILL of a rank in the middle of replays, for any transport on GPUs: the others learn it, name it, and leave.

The ranks are processes of their own, on one GPU by turns or on a GPU each. Never under MPS, where what happens to the
other clients of a killed one is undefined: a test that calls `check_kill` lies in a file ``*_kill.py``, which
``python tools/gpu_check.py --only kill`` runs apart.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from comm_core import UlyssesCommunicator, jit, plugins
from comm_core.errors import CommError, PeerStalledError
from comm_core.jit.spec import ModuleSpec
from comm_core.windows.launch import WINDOWS

__all__ = ["check_kill"]

# torch's annotations leave out its stores.
dist: Any = importlib.import_module("torch.distributed")

VICTIM = 1
DEADLINE_S = 3.0
CLOSE_S = 3.0
SLACK_S = 4.0
"""What a loaded machine, ranks that take turns on a GPU and the end of a process may add."""
REPLAYS = 10


def modules_of(plugin: str) -> list[ModuleSpec]:
    """Register the plugin ``module:attribute``, where it is not an installed one, and return what is to be built."""
    if not plugin:
        return [WINDOWS]
    module, name = plugin.split(":")
    made = getattr(importlib.import_module(module), name)
    if not any(point.value == plugin for point in entry_points(group="comm_core.v1")):
        plugins.register("killed", made)
    return [WINDOWS, *made.comm_modules()]


def work(rank: int, size: int, port: int, backend: str, plugin: str = "") -> dict[str, Any]:
    """Replay a graph until a peer is gone, then close; what happened, with the times of the machine's clock."""
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    # What takes its time before the short deadline counts: a context, and a first build.
    for spec in modules_of(plugin):
        jit.load(spec, device)
    dist.barrier()
    comm = UlyssesCommunicator(max_bytes=1 << 22, dtype=torch.bfloat16, backend=backend, device=device)
    x = torch.ones(1, 512, size, 64, dtype=torch.bfloat16, device=device)
    y = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.scatter_heads(x, out=y)
    seen: dict[str, Any] = {"rounds": 0}
    try:
        while True:
            for _ in range(REPLAYS):
                graph.replay()
            torch.cuda.synchronize()
            comm.scatter_heads(x, out=y)  # A replay makes no call that could raise.
            seen["rounds"] += 1
            if seen["rounds"] == 5:
                print("at work", flush=True)
    except PeerStalledError as error:
        seen |= {"waited_for": error.waited_for, "text": str(error)}
    seen["noticed"] = time.monotonic()
    torch.cuda.synchronize()
    seen["poisoned"] = bool(torch.isnan(y).all())
    try:
        comm.close(timeout=CLOSE_S)
        seen["close"] = "closed"
    except CommError as error:
        seen["close"] = f"{type(error).__name__}: {error}"
    seen["left"] = time.monotonic()
    return seen


def start(rank: int, size: int, port: int, folder: Path, *case: str) -> subprocess.Popen[str]:
    """Start a rank."""
    environment = {**os.environ, "COMM_ALLOW_SHARED_GPU": "1", "COMM_TIMEOUT_S": str(DEADLINE_S)}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path)}
    with (folder / f"rank{rank}.err").open("w") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "comm_core.testing.kill_case", str(rank), str(size), str(port), *case],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )


def check_kill(size: int, folder: Path, backend: str, plugin: str = "") -> None:
    """Kill one of `size` ranks. The others raise within the deadline, their outputs are poisoned, and they exit.

    Args:
        size: ranks.
        folder: for what the ranks print.
        backend: the transport, by name.
        plugin: ``module:attribute`` of the plugin that has it; empty for this package's own.
    """
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    ranks = [start(rank, size, store.port, folder, backend, plugin) for rank in range(size)]
    printed = lambda: {rank: (folder / f"rank{rank}.err").read_text()[-2000:] for rank in range(size)}  # noqa: E731
    try:
        for process in ranks:
            assert process.stdout is not None and process.stdout.readline() == "at work\n", printed()
        time.sleep(0.3)
        killed = time.monotonic()
        ranks[VICTIM].kill()
        for rank, process in enumerate(ranks):
            if rank == VICTIM:
                continue
            lines, _ = process.communicate(timeout=DEADLINE_S + CLOSE_S + 3 * SLACK_S)
            ended = time.monotonic()
            assert process.returncode == 0, printed()
            seen = json.loads(lines.splitlines()[-1])
            assert seen["waited_for"] == VICTIM and f"rank {VICTIM}" in seen["text"], seen
            assert seen["rounds"] >= 5 and seen["poisoned"], seen
            assert 0 < seen["noticed"] - killed < DEADLINE_S + SLACK_S, (seen, killed)
            assert seen["close"].startswith("GroupTimeoutError") and "bytes" in seen["close"], seen
            assert seen["left"] - seen["noticed"] < CLOSE_S + SLACK_S, seen
            assert ended - seen["left"] < 2 * SLACK_S, (seen, ended)
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
            if process.stdout is not None:
                process.stdout.close()


if __name__ == "__main__":
    numbers, names = [int(word) for word in sys.argv[1:4]], sys.argv[4:]
    print(json.dumps(work(*numbers, *names)), flush=True)
