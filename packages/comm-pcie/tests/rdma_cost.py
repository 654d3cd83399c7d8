"""What posting and polling one exchange with seven peers costs the host, on the emulator without copies.

    python packages/comm-pcie/tests/rdma_cost.py [--calls 20000]

Prints one line of JSON: microseconds in the C call and for all of Python's call, median and 99th percentile. The
emulator's own work is in the figures, so a NIC's host costs less than this, or as much.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import rdma_emulator as emulator
import rdma_ranks as ranks_of

from comm_pcie.rdma.engine import VerbsLibraries, load_verbs, require

GOAL_US = 20.0
SECOND = 1_000_000_000


def measure(calls: int, folder: Path) -> dict[str, float]:
    """Return the figures."""
    library = emulator.build(folder, "-O2")
    module = emulator.engine_module(folder, "-O3")
    with emulator.World(library, folder / "fabric", emulator.nics(1), copies=False):
        api = require(load_verbs(VerbsLibraries(str(library), str(library)), module=module))
        shape = ranks_of.Shape("scatter_heads", 8, 1024, 1792)
        engine, pair, _ = ranks_of.loopback(api, shape.nbytes)
        geometry = ranks_of.loopback_geometry(shape)
        outcome = pair.rebind(geometry, SECOND)
        native: list[float] = []
        whole: list[float] = []
        for epoch in range(calls):
            started = time.perf_counter_ns()
            outcome = pair.exchange(geometry, epoch, SECOND)
            whole.append((time.perf_counter_ns() - started) * 1e-3)
            native.append(outcome.elapsed_ns * 1e-3)
            if not outcome.ok:
                raise SystemExit(outcome.reason)
        engine.quiesce(SECOND)
        pair.close()
        engine.close()
    return {
        "peers": 7,
        "calls": calls,
        "native_median_us": round(statistics.median(native), 2),
        "native_p99_us": round(statistics.quantiles(native, n=100)[98], 2),
        "python_median_us": round(statistics.median(whole), 2),
        "python_p99_us": round(statistics.quantiles(whole, n=100)[98], 2),
        "goal_us": GOAL_US,
    }


def main() -> int:
    """Print the figures; 1 if the goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    calls = parser.parse_args().calls
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(calls, Path(folder))
    print(json.dumps(figures))
    return int(figures["python_median_us"] > GOAL_US)


if __name__ == "__main__":
    sys.exit(main())
