"""``python -m comm_core.jit``: builds the self-check module, runs it on every GPU and times the way there.

Prints one JSON document without names of hosts or paths; exits with 1 if anything is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from comm_core._json import JsonObject
from comm_core.errors import ArgumentValueError, JitMissingError
from comm_core.jit import Module, load, toolchain
from comm_core.jit.selfcheck import SELFCHECK

_VALUE = 0xDEADBEEF
_CALLS = 10_000
_BATCH = 500
"""Launches between two synchronizations: fewer than the driver queues, so that a launch never waits for a place."""

_WARM = """
import json, sys, time
import torch
torch.cuda.init()
torch.zeros(1, device="cuda")
started = time.perf_counter()
from comm_core import jit
from comm_core.jit.selfcheck import SELFCHECK
imported = time.perf_counter()
module = jit.load(SELFCHECK, archs=sys.argv[1].split(";"))
loaded = time.perf_counter()
module.preload(torch.device("cuda", 0))
torch.cuda.synchronize()
done = time.perf_counter()
print(json.dumps([imported - started, loaded - imported, done - loaded]))
"""


def _torch() -> Any:
    import torch

    return torch


def _fill(torch: Any, module: Module, device: Any) -> None:
    """Check by value that the kernel writes what it should and nothing beside it."""
    fill = module.bind("comm_core_fill_v1")
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device).cuda_stream
        for words in (1, 255, 256, 1_000_003):
            memory = torch.zeros(words + 2, dtype=torch.int32, device=device)
            fill(stream, memory.data_ptr() + 4, words, _VALUE)
            expected = torch.full_like(memory, _VALUE - (1 << 32))
            expected[0] = expected[-1] = 0
            if not torch.equal(memory, expected):
                raise SystemExit(f"{device}: fill of {words} words wrote something else")
        try:
            fill(stream, memory.data_ptr() + 1, 1, 0)
        except ArgumentValueError as error:
            assert "aligned" in str(error), error
        else:
            raise SystemExit("a misaligned address was accepted")
        # The captured launch reads its arguments when it is captured, not when it is replayed.
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        with torch.cuda.graph(graph, stream=side):
            fill(torch.cuda.current_stream(device).cuda_stream, memory.data_ptr(), memory.numel(), 7)
        for _ in range(3):
            memory.zero_()
            graph.replay()
            if not bool((memory == 7).all()):
                raise SystemExit(f"{device}: a replayed fill wrote something else")


def _refusal(torch: Any) -> None:
    """Check that nothing is compiled while a stream is captured."""
    saved = os.environ.get("COMM_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMM_CACHE_DIR"] = folder
        try:
            memory = torch.zeros(1, device="cuda")
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                memory.add_(1)
                try:
                    # Architectures that nothing above has asked for, so that they are not loaded yet.
                    load(SELFCHECK, archs=("8.0", "9.0"))
                except JitMissingError:
                    return
            raise SystemExit("a module was built while a stream was being captured")
        finally:
            del os.environ["COMM_CACHE_DIR"]
            if saved is not None:
                os.environ["COMM_CACHE_DIR"] = saved


def _per_call(torch: Any, batch: Callable[[], object], calls: int) -> float:
    """Return microseconds a call on the host: the median of batches with the device idle before each."""
    times: list[float] = []
    for _ in range(_CALLS // _BATCH):
        torch.cuda.synchronize()
        started = time.perf_counter()
        batch()
        times.append((time.perf_counter() - started) / calls * 1e6)
    return round(median(times), 3)


def _overhead(torch: Any, module: Module) -> JsonObject:
    empty = module.bind("comm_core_empty_v1")
    stream = torch.cuda.current_stream().cuda_stream
    empty(stream, _BATCH)

    def python() -> None:
        for _ in range(_BATCH):
            empty(stream, 1)

    def no_launch() -> None:
        for _ in range(_BATCH):
            empty(stream, 0)

    def current_stream() -> None:
        for _ in range(_BATCH):
            _ = torch.cuda.current_stream().cuda_stream

    launch = _per_call(torch, lambda: empty(stream, _BATCH), _BATCH)
    call = _per_call(torch, python, _BATCH)
    return {
        "launch from C, us": launch,
        "call from Python with one launch, us": call,
        "on top of the launch, us": round(call - launch, 3),
        "call from Python without a launch, us": _per_call(torch, no_launch, _BATCH),
        "torch.cuda.current_stream().cuda_stream, us": _per_call(torch, current_stream, _BATCH),
    }


def _warm_start(archs: str) -> JsonObject:
    """Time a fresh process that finds everything in the cache; torch and the CUDA context are there before."""
    runs: list[list[float]] = []
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", _WARM, archs], stdout=subprocess.PIPE, check=True, timeout=300, text=True
        )
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    imports, loads, preloads = (round(median(column) * 1e3, 1) for column in zip(*runs, strict=True))
    return {"import, ms": imports, "find and load, ms": loads, "load the kernels, ms": preloads}


def main() -> None:
    """Run the checks and print what they measured."""
    parser = argparse.ArgumentParser(prog="python -m comm_core.jit", description=__doc__)
    parser.add_argument("--keep", action="store_true", help="use the usual cache instead of an empty one")
    arguments = parser.parse_args()
    torch = _torch()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing can be launched here")
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.keep:
            os.environ["COMM_CACHE_DIR"] = folder
        torch.zeros(1, device="cuda")
        started = time.perf_counter()
        module = load(SELFCHECK, torch.device("cuda", 0))
        first = time.perf_counter() - started
        for index in range(torch.cuda.device_count()):
            device = torch.device("cuda", index)
            _fill(torch, load(SELFCHECK, device), device)
        _refusal(torch)
        tools = toolchain.find()
        report: JsonObject = {
            "device": torch.cuda.get_device_name(0),
            "devices": torch.cuda.device_count(),
            "archs": list(module.archs),
            "nvcc": tools.version,
            "nvcc and torch": toolchain.compare_cuda(tools.version, torch.version.cuda),
            "first load, s": round(first, 2),
            "compiled in, s": module.artifact.built["seconds"],
            "calls": _overhead(torch, module),
            "warm start": _warm_start(";".join(module.artifact.archs)),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
