"""``python -m gpu.bench_jit FILE``: how long the first build of comm-core's modules takes, and a warm start.

The build runs on two cores and in an empty cache, whatever the machine has. A warm start is a fresh process in which
torch and, where there is a GPU, a CUDA context are there already.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_CORES = 2
_STARTS = 5
_WARM = """
import json, sys, time
import torch
gpu = torch.cuda.is_available()
if gpu:
    torch.zeros(1, device="cuda")
archs = sys.argv[1].split(";")
started = time.perf_counter()
from comm_core import jit
from comm_core.jit.selfcheck import SPECS
from comm_core.windows.launch import WINDOWS
modules = [jit.load(spec, archs=archs) for spec in {*SPECS, WINDOWS}]
loaded = time.perf_counter()
for module in modules:
    if gpu:
        module.preload(torch.device("cuda", 0))
done = time.perf_counter()
print(json.dumps([loaded - started, done - loaded]))
"""


def core_modules() -> list[Any]:
    """Return the descriptions of all modules of comm-core."""
    from comm_core.jit import specs
    from comm_core.windows.launch import WINDOWS

    found = {**specs(), WINDOWS.name: WINDOWS}
    return [spec for spec in found.values() if spec.package == "comm_core"]


def cold(archs: list[str]) -> dict[str, float]:
    """Build every module, one after the other as they are first needed; return seconds."""
    from comm_core.jit import obtain

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:_CORES])
    try:
        seconds: dict[str, float] = {}
        for spec in core_modules():
            started = time.perf_counter()
            obtain(spec, archs, may_build=True, timeout_s=200)
            seconds[spec.name] = time.perf_counter() - started
        return seconds
    finally:
        os.sched_setaffinity(0, cores)


def warm(archs: list[str]) -> dict[str, float]:
    """Return milliseconds of a start that finds everything built: medians.

    With byte code, as an installed package has it: in a folder of its own, filled by a start that does not count.
    """
    runs: list[list[float]] = []
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        for _ in range(1 + _STARTS):
            done = subprocess.run(
                [sys.executable, "-c", _WARM, ";".join(archs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                check=True,
                timeout=120,
                text=True,
                env=environment,
            )
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    del runs[0]
    load, preload = (statistics.median(column) * 1e3 for column in zip(*runs, strict=True))
    return {"import, find and load": load, "load the kernels": preload}


def main() -> None:
    """Measure and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--arch", help="default: that of the first GPU")
    options = parser.parse_args()
    if options.arch:
        archs = [options.arch]
    else:
        import torch

        from comm_core.jit import archs as arch_names

        archs = list(arch_names.choose(torch.device("cuda", 0)))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["COMM_CACHE_DIR"] = folder
        found: dict[str, Any] = {"archs": archs, "cold": cold(archs)}
        found["warm"] = warm(archs)
    options.file.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
