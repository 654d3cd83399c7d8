"""The benchmark, as far as it goes without a GPU: what must move, what is compared, and what is printed."""

from __future__ import annotations

from typing import Any

import lowp_host
import pytest
import torch
from typer.testing import CliRunner

from comm_core.errors import CommError
from comm_core.jit import Module
from comm_lowp.bench import command, exchange, passes
from comm_lowp.bench.goals import EXCHANGE_GOAL, EXCHANGES, FULL, GOALS, QUICK, Exchange, Problem, least_bytes
from comm_lowp.kernels import Kernels


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return lowp_host.build(tmp_path_factory.mktemp("host"))


def test_what_must_move_is_the_operands_the_payload_and_the_outputs() -> None:
    problem = Problem(1024, 4, 128, "bfloat16", "sage2_sm90", ranks=2)
    n = 1024 * 4 * 128
    least = least_bytes(problem.grid)
    assert least["statistics"] == (3 * 2 * n, 0)
    payload = 2 * problem.grid.payload.chunk_bytes
    # Codes, and 66 slots of Q and 9 of K for each of two heads and two destinations.
    assert payload == 3 * n + 2 * (-(-(2 * 4 * (65 + 9)) // 128) * 128)
    assert least["quantize and pack"] == (6 * n, payload)
    # Two of four heads of 2048 rows; widths of 128 and 16 slots.
    assert least["unpack"] == (payload, 3 * n + 4 * 2 * (128 + 16))


def test_the_floor_is_of_reading_alone_or_of_both() -> None:
    bandwidth = passes.Bandwidth(read=5e12, copy=4e12)
    assert bandwidth.floor_s(10**9, 0) == pytest.approx(2e-4)
    assert bandwidth.floor_s(10**9, 10**9) == pytest.approx(5e-4)


def test_problems_are_as_large_as_the_goals_ask_for() -> None:
    assert all(problem.elements >= 64 << 20 for problem in (*QUICK, *FULL))
    operands = [2 * shape[1] * shape[2] * shape[3] for shape in (item.shape(2) for item in EXCHANGES[1:])]
    assert min(operands) >= 159 << 20 and EXCHANGE_GOAL == 0.75
    assert set(GOALS) == set(least_bytes(QUICK[0].grid))
    assert Exchange(7, 2).shape(2) == (1, 4, 2, 128)


@pytest.mark.parametrize("problem", [Problem(1, 1), Problem(1, 1, 64, "float16", "sage2_sm89_sm120", ranks=2)])
def test_nothing_is_timed_that_is_not_right(
    module: Module, problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = lowp_host.host_kernels(module, monkeypatch)
    passes._verify(kernels, problem)
    good = Kernels.quant_pack

    def bad(self: Kernels, q: Any, k: Any, v: Any, final: Any, grid: Any, destinations: Any, **more: Any) -> None:
        good(self, q, q, v, final, grid, destinations, **more)

    monkeypatch.setattr(Kernels, "quant_pack", bad)
    with pytest.raises(CommError, match="do not give the bytes of the reference; nothing was timed"):
        passes._verify(kernels, problem)


def test_operands_may_be_views_of_one_projection(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = lowp_host.host_kernels(module, monkeypatch)
    item = next(passes._sets(kernels, Problem(5, 2, 64, fused=True)))
    assert item.q.shape == (1, 5, 2, 64) and item.q.stride() == (5 * 3 * 2 * 64, 3 * 2 * 64, 64, 1)
    assert item.k.data_ptr() - item.q.data_ptr() == 2 * 2 * 64


def test_both_ways_must_give_the_same_bytes() -> None:
    generator = torch.Generator().manual_seed(0)
    one = [torch.randint(-100, 100, (8,), generator=generator, dtype=torch.int8) for _ in range(6)]
    other = [x.clone() for x in one]
    exchange._compare([one], [other])
    other[1] += 2
    exchange._compare([one], [other])
    other[1] += 1
    with pytest.raises(CommError, match="off by 3 codes"):
        exchange._compare([one], [other])
    other[2] += 1
    with pytest.raises(CommError, match="output 2 of scatter_qkv"):
        exchange._compare([one], [other])


def test_what_is_printed_says_whether_goals_were_reached() -> None:
    row = {
        "pass": "unpack",
        "us": 10.0,
        "best_us": 9.0,
        "floor_us": 8.0,
        "over_floor": 1.25,
        "goal": 1.35,
        "host_us": 3.0,
    }
    (_, line) = command.table([row])
    assert line.split() == ["unpack", "10.0", "9.0", "8.0", "1.25", "1.35", "3.0", "reached"]
    (_, line) = command.table([{**row, "over_floor": 1.36}])
    assert line.endswith("missed")
    measured = {
        "scatter_qkv": 70.0,
        "exchange and quantize": 100.0,
        "three exchanges": 60.0,
        "quantization": 40.0,
        "host": 50.0,
        "graph": None,
        "route": "direct",
        "transport": "nvlink",
        "layout": "sage2_sm90",
        "payload_bytes": 1,
    }
    found = exchange.row(EXCHANGES[0], [measured, {**measured, "scatter_qkv": 80.0}])
    assert found["ratio"] == 0.8
    lines = command.exchange_lines(found)
    assert "80.0 µs, not captured" in lines[1] and lines[3].endswith("missed") and lines[4].endswith("missed")


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(command.app, ["--quick"])
    assert result.exit_code == 1 and "torch sees no CUDA device here" in result.output
