"""``commctl bench allreduce``: the goals, and a whole run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comm_core.bench import allreduce_command
from comm_core.bench.allreduce_command import Options


def row(backend: str, case: str, tokens: int, us: float | None, eager: float = 50.0) -> dict[str, Any]:
    return {"backend": backend, "case": case, "tokens": tokens, "graph_us": us, "eager_us": eager, "host_us": 1.0}


def document(*rows: dict[str, Any], ranks: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = {"where": "links", "ranks": ranks, "hidden": 8192, "rows": list(rows)}
    found["floor"] = {"bytes_per_s": 400e9}
    allreduce_command.add_ratios(found)
    return found


def test_goals_are_ratios_to_nccl_in_the_same_run() -> None:
    rows = document(
        row("nccl", "sum", 1, 12.0),
        row("trtllm", "sum", 1, 2.875),
        row("trtllm", "sum, pdl", 1, 3.1),
        row("trtllm", "norm", 1, 4.375),
        row("trtllm", "norm, pdl", 1, 4.7),
        row("torch-one-shot", "sum", 1, 9.0),
    )["rows"]
    assert [item["goal_is"] for item in rows] == [None, "reached", "missed", "reached", "missed", None]
    assert rows[1]["over_nccl"] == pytest.approx(2.875 / 12)
    assert rows[3]["over_sum_us"] == pytest.approx(1.5)
    # 16 KiB reach each of two ranks.
    assert rows[0]["floor_us"] == pytest.approx(16384 / 400e9 * 1e6)


def test_large_norms_may_cost_a_tenth() -> None:
    cases = ((512, 30.0, 33.0, "reached"), (2048, 100.0, 111.0, "missed"), (128, 10.0, 20.0, None))
    for tokens, alone, norm, verdict in cases:
        rows = document(row("trtllm", "sum", tokens, alone), row("trtllm", "norm", tokens, norm))["rows"]
        assert rows[1]["goal_is"] == verdict
        assert rows[0]["goal_is"] is None, "without NCCL in the run there is nothing to compare with"


def test_goals_are_for_two_ranks_over_links() -> None:
    rows = document(row("nccl", "sum", 1, 12.0), row("trtllm", "sum", 1, 2.875), ranks=4)["rows"]
    assert rows[1]["goal"] is None
    assert rows[1]["floor_us"] == pytest.approx(1.5 * 16384 / 400e9 * 1e6)


@pytest.mark.deadline(60)
def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sums over gloo are compared by value; what can't be used is left out with its reason."""
    out = tmp_path / "found.json"
    assert allreduce_command.run(Options(device="cpu", quick=True, tokens=(3,), json=out)) == 0
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(item["backend"], item["case"], item["tokens"]) for item in found["rows"]] == [
        ("dist", "sum", 3),
        ("dist", "norm", 3),
    ]
    assert {"nccl", "torch-one-shot", "torch-two-shot"} <= {item["what"] for item in found["left_out"]}
    assert found["errors"] == []
    assert "3 tokens" in capsys.readouterr().out
