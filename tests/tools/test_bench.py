"""The benchmark: a count that must hold fails it, a slow machine does not, and its instrument is itself checked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import bench
from comm_core.errors import CommError

ROOT = Path(__file__).resolve().parents[2]
CALLS = ("scatter_heads", "gather_heads", "exchange_chunks", "scatter_qkv_head_chunk", "gather_output_head_chunk")


def test_only_a_count_that_must_hold_fails_the_run():
    slow = bench.Figure("help", "commctl --help", 900.0, "ms", 500.0)
    none = bench.Figure("allocations", "scatter_heads", 0, "", 0.0, hard=True)
    one = bench.Figure("allocations", "scatter_heads", 1, "", 0.0, hard=True)
    assert (slow.met, none.met, one.met) == (False, True, False)
    assert bench.exit_code([slow, none]) == 0
    assert bench.exit_code([slow, none, one]) == 1


def test_a_repeat_is_as_slow_as_its_slowest_rank():
    results = [{"x": [1.0, 9.0, 2.0]}, {"x": [3.0, 1.0, 1.0]}, {"y": [100.0]}]
    assert bench.slowest(results, "x") == 3.0


@pytest.mark.parametrize(("counts", "expected"), [((0, 0), 0), ((0, 2), 2)])
def test_one_rank_that_allocates_is_enough(counts: tuple[int, int], expected: int, monkeypatch: pytest.MonkeyPatch):
    ranks = [{"allocations": {"scatter_heads": count, "control": 2}} for count in counts]
    monkeypatch.setattr(bench, "run_ranks", lambda *arguments, **options: ranks)
    (figure,) = bench.measure_ranks(["allocations"])
    assert figure.value == expected and figure.met is (expected == 0)


def test_an_instrument_that_sees_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """Zero allocations would mean nothing if the profiler could not count."""
    ranks: list[Any] = [{"allocations": {"scatter_heads": 0, "control": 0}}] * 2
    monkeypatch.setattr(bench, "run_ranks", lambda *arguments, **options: ranks)
    with pytest.raises(CommError, match="counted no allocation"):
        bench.measure_ranks(["allocations"])


def test_calls_are_counted_for_real(tmp_path: Path):
    """Given out= and a workspace a call allocates no tensor; and the run says so in its file and its exit code."""
    out = tmp_path / "bench.json"
    command = [
        sys.executable,
        str(ROOT / "tools" / "bench.py"),
        "--only",
        "allocations",
        "overhead",
        "front",
        "--json",
        str(out),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    figures = {(figure["part"], figure["name"]): figure for figure in document["figures"]}
    for name in CALLS:
        assert figures["allocations", name]["value"] == 0 and figures["allocations", name]["hard"]
    overhead = figures["overhead", "2 ranks"]
    assert overhead["value"] > overhead["beside"]["raw"] > 0
    # A busy machine slows both down.
    reductions = ["allreduce_fusion", "allreduce_fusion, residual and norm", "allreduce_fusion, norm and FP8"]
    for name in (*CALLS, *reductions):
        front = figures["front", name]
        assert 0 < front["value"] < front["beside"]["full checks"], name
    assert max(map(len, done.stdout.splitlines())) <= 80
    # Numbers travel further than the machine that they were measured on.
    text = out.read_text() + done.stdout
    assert str(ROOT) not in text and not any("host" in key.lower() for key in document["machine"])
