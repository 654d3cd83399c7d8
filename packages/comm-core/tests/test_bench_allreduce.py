"""``commctl bench allreduce``: the goals, and a whole run on the CPU."""

from __future__ import annotations

import json
import pickle
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from comm_core.bench import allreduce, allreduce_command, launch
from comm_core.bench.allreduce_command import Options
from comm_core.bench.launch import Placement, Result
from comm_core.bench.ulysses import PartError
from comm_core.errors import AllReduceBackendError
from comm_core.plugins import discovery


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
    left_out = {item["what"]: item["why"] for item in found["left_out"]}
    for name in allreduce.COMPARATORS:
        assert left_out[name] == "needs a GPU for each rank, and the ranks are on the CPU"
    assert found["errors"] == []
    text = " ".join(capsys.readouterr().out.split())
    assert "3 tokens" in text and "Not measured - " in text
    # Backends of plugins too, where they are installed.
    assert "asked for" not in text and not any("asked for" in why for why in left_out.values())


LACKS = "its kernels need CUDA tensors, and the ranks use cpu"


def lacking() -> PartError:
    """Return what a rank answers that can't open a backend, as it comes from its process."""
    error = AllReduceBackendError(f"backend 'fast' was asked for and can't be used: fast: {LACKS}")
    error.reason = LACKS
    return pickle.loads(pickle.dumps(PartError.of(error, [], opened=False)))


class Answers(launch.Ranks):
    """Two ranks that can open nothing but "dist"; `asked` has what was tried, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def run(self, function: Any, *arguments: Any, timeout_s: float, ranks: int | None = None) -> list[Result]:
        if function is not allreduce.measure:
            return [Result({} if function.__name__ == "facts" else 1e9)] * 2
        (job,) = arguments
        self.asked.append(job.contender)
        if job.contender == "dist":
            return [Result([{**row("dist", "sum", 1, None), "took_s": 0.0}])] * 2
        return [Result(error=lacking())] * 2


@pytest.mark.parametrize(
    ("options", "asked", "left_out", "errors"),
    [
        (Options(compare=False), ["fast", "dist"], {"fast": LACKS}, []),
        (Options(backends=("dist",)), ["dist"], dict.fromkeys(allreduce.COMPARATORS, "GPU for each"), []),
        (Options(backends=("dist", "fast", "dist"), compare=False), ["dist", "fast"], {}, ["fast"]),
        (Options(backends=("nccl", "dist"), compare=False), ["dist"], {}, ["nccl"]),
        (Options(backends=("torch-one-shot",), compare=False), [], {}, ["torch-one-shot"]),
    ],
    ids=["nothing-named", "another-named", "named", "nccl-named", "torch-named"],
)
def test_what_was_named_is_an_error_and_what_was_not_is_left_out_with_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: Options,
    asked: list[str],
    left_out: dict[str, str],
    errors: list[str],
) -> None:
    """Nothing is measured twice, or under the name of something else; what was named and failed is the exit code."""
    ranks, documents = Answers(), list[Any]()

    @contextmanager
    def started(*_: Any, **__: Any) -> Generator[Answers]:
        yield ranks

    backends = {"dist": SimpleNamespace(priority=0), "fast": SimpleNamespace(priority=5)}
    monkeypatch.setattr(discovery, "registry", lambda: SimpleNamespace(allreduce=backends))
    monkeypatch.setattr(launch, "ranks", started)
    monkeypatch.setattr(Options, "place", lambda self: Placement("cpu", "shared", 2, 0))
    monkeypatch.setattr(allreduce_command, "show", lambda found, *_: documents.append(found))
    assert allreduce_command.run(options) == int(bool(errors))
    (found,) = documents
    assert ranks.asked == asked and [item["what"] for item in found["errors"]] == errors
    assert {item["what"] for item in found["left_out"]} == set(left_out)
    for item in found["left_out"]:
        assert left_out[item["what"]] in item["why"] and "asked for" not in item["why"]
    assert all("CUDA tensors" in item["why"] or "GPU for each" in item["why"] for item in found["errors"])


def test_a_contender_that_torch_can_not_open_is_an_error_only_where_it_was_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over links, where all are tried; a backend that was named does not make it so."""
    ranks = Answers()
    backends = {"dist": SimpleNamespace(priority=0)}
    monkeypatch.setattr(discovery, "registry", lambda: SimpleNamespace(allreduce=backends))
    links = Placement("cuda", "links", 2, 2)
    for names, errors in ((("dist",), []), (("dist", "torch-two-shot"), ["torch-two-shot"])):
        found: dict[str, Any] = {"rows": [], "left_out": [], "errors": [], "seconds": {}, "hidden": 8}
        allreduce_command._measure(Options(backends=names), links, ranks, found)
        assert [item["what"] for item in found["errors"]] == errors
        assert len(found["left_out"]) + len(errors) == len(allreduce.COMPARATORS)
