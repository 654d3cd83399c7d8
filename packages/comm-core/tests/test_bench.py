"""Benchmarks: the arithmetic around them, and the whole command for real on CPU ranks over gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core.bench import (
    allreduce_command,
    command,
    contenders,
    floor,
    geometry,
    goals,
    launch,
    plot,
    redact,
    report,
    timing,
    ulysses,
)
from comm_core.bench.contenders import AllToAll
from comm_core.bench.floor import Floor
from comm_core.bench.geometry import MIB, OPERATIONS, Geometry
from comm_core.bench.launch import Placement, place
from comm_core.bench.options import SharedOptions
from comm_core.errors import ArgumentValueError, CommError, UnsupportedError
from comm_core.testing import reference
from comm_core.testing.cli import commctl
from comm_core.testing.ranks import run_threads

TINY = Geometry(64, 4, 32)
ON_CPU = Placement("cpu", "shared", 2, 0)
LINKS = Placement("cuda", "links", 2, 2)


# -- Arithmetic ---------------------------------------------------------------------------------------------------


def test_operands_are_those_of_the_geometries():
    """The sizes that goals are written for: 184.6, 80, 32, 6.75 and 1.5 MiB leave each of two ranks."""
    remote = [round(item.remote_bytes(2) / MIB, 2) for item in geometry.DEFAULT]
    assert remote == [184.57, 79.98, 32.0, 6.75, 1.5]
    for item in (*geometry.DEFAULT, *geometry.QUICK, *geometry.CPU):
        for ranks in (2, 4, 8):
            assert item.problem(ranks) is None
            nbytes = item.operand_bytes(ranks)
            assert item.remote_bytes(ranks) * ranks == nbytes * (ranks - 1)
            for operation in OPERATIONS:
                shape, out = item.shape(operation, ranks), item.shape_out(operation, ranks)
                assert torch.Size(shape).numel() * 2 == torch.Size(out).numel() * 2 == nbytes
    assert Geometry(75600, 40).problem(6) == "40 heads don't divide among 6 ranks"
    assert Geometry(7, 4).problem(2) == "7 tokens don't divide among 2 ranks"


def test_a_geometry_is_read_or_refused():
    assert geometry.parse("75600x40") == Geometry(75600, 40, 128)
    assert geometry.parse(" 32768X32x64") == Geometry(32768, 32, 64)
    for text in ("", "12", "0x4", "4x4x0", "-4x2", "1x2x3x4", "4 x 4", "axb"):
        with pytest.raises(ArgumentValueError, match="SxH"):
            geometry.parse(text)


def test_no_loop_fits_a_second_level_cache_and_none_is_endless():
    """A loop over one operand would time the cache."""
    for item in geometry.DEFAULT:
        nbytes = item.operand_bytes(2)
        assert 2 * nbytes * timing.sets_of(nbytes, cold=True) > 90 * MIB
    assert timing.sets_of(1, cold=True) == 16 and timing.sets_of(1 << 40, cold=True) == 2
    assert timing.sets_of(1) == 1
    assert timing.batch_calls(3 * MIB, 1e-5) == 100
    assert timing.batch_calls(369 * MIB, 5e-4) == 20
    assert timing.batch_calls(369 * MIB, 10.0) == 2
    assert timing.batch_calls(3 * MIB, 0.0) == 100


class Event:
    """A CUDA event by the host's clock."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


def test_a_batch_begins_when_all_ranks_are_there_and_is_divided_among_its_calls(monkeypatch: pytest.MonkeyPatch):
    """Idle device, ranks met on the host, ranks aligned on the device, and only then the clock; the median counts."""
    done: list[str] = []
    lengths = iter([0.08, 0.02, 0.02, 0.02, 0.001])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("idle"))
    monkeypatch.setattr(timing, "meet", lambda group: done.append("met"))

    def work() -> None:
        done.append("work")
        time.sleep(next(lengths))

    times = timing.batches(None, torch.device("cuda", 0), lambda: done.append("aligned"), work, 20, 5)
    assert done == ["idle", "met", "aligned", "work"] * 5
    # 20 ms for 20 calls; a loaded machine may sleep longer, never shorter.
    assert 990 < times.host <= times.device < 3900


@pytest.mark.parametrize(
    ("late", "delays"), [(0, [1, 1, 1]), (1, [1, 2, 2, 2]), (6, [1, 2, 4, 8, 16, 32, 64, 64, 64])]
)
def test_replays_are_timed_behind_a_delay_that_the_host_fits_into(
    monkeypatch: pytest.MonkeyPatch, late: int, delays: list[int]
) -> None:
    """All ranks idle, a delay, the ranks aligned, a replay that does not count, and four that do."""
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append(cycles / 4_000_000))
    monkeypatch.setattr(timing, "meet", lambda group: done.append("met"))
    monkeypatch.setattr(timing, "largest", lambda group, value: value)

    class Replays(Event):
        number = 0

        def record(self) -> None:
            self.at = float(done.count("replay"))
            done.append("mark")

        def query(self) -> bool:
            Replays.number += 1
            return Replays.number <= late

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Replays)
    cuda = torch.device("cuda", 0)
    us = timing.replayed(None, cuda, lambda: done.append("aligned"), lambda: done.append("replay"), 20, 3)
    assert us == 1e3 / 20  # four replays of a millisecond each
    assert [item for item in done if isinstance(item, float)] == delays
    batch = ["idle", "met", 1.0, "aligned", "replay", "mark", *["replay"] * 4, "mark"]
    assert done[: len(batch)] == batch
    assert len(done) == len(batch) * (3 + late)


def test_replays_in_a_row_have_no_delay_and_the_first_one_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: done.append("idle"))
    monkeypatch.setattr(timing, "meet", lambda group: done.append("met"))

    class Replays(Event):
        def record(self) -> None:
            self.at = float(done.count("replay"))
            done.append("mark")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Replays)
    cuda = torch.device("cuda", 0)
    us = timing.in_a_row(None, cuda, lambda: done.append("aligned"), lambda: done.append("replay"), 20, 3)
    assert us == 1e3 / 20  # four replays of a millisecond each
    assert done == ["idle", "met", "aligned", "replay", "mark", *["replay"] * 4, "mark"] * 3


def test_a_host_that_never_gets_ahead_of_its_device_gives_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Event):
        def query(self) -> bool:
            return True

    monkeypatch.setattr(torch.cuda, "Event", Late)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: None)
    monkeypatch.setattr(timing, "meet", lambda group: None)
    monkeypatch.setattr(timing, "largest", lambda group, value: value)
    with pytest.raises(CommError, match="not so busy"):
        timing.replayed(None, torch.device("cuda", 0), lambda: None, lambda: None, 20, 3)


def test_the_floor_counts_the_bytes_that_share_what_bounds_them():
    """Over links those that leave a rank; in one GPU's memory those of all ranks; on the host those of a rank."""
    small = Geometry(1024, 24)
    sent, held = small.remote_bytes(2), small.operand_bytes(2)
    assert Floor("links", 1e12, 1).us(sent, held, 2) == pytest.approx(1.572864)
    assert Floor("device", 1e12, 1).us(sent, held, 2) == pytest.approx(6.291456)
    assert Floor("host", 1e12, 1).us(sent, held, 2) == pytest.approx(3.145728)
    assert "392 GB/s a direction" in Floor("links", 3.92e11, floor.COPY_BYTES).text
    for kind in ("device", "host"):
        assert "says nothing about" in Floor(kind, 1e12, 1).text
    assert floor.COPY_BYTES >= 512 * MIB


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (("auto", None, None, 2), Placement("cuda", "links", 2, 2)),
        (("auto", None, None, 1), Placement("cuda", "shared", 2, 1)),
        (("auto", None, None, 0), Placement("cpu", "shared", 2, 0)),
        (("auto", None, 2, 8), Placement("cuda", "links", 2, 8)),
        (("cuda", "shared", 8, 2), Placement("cuda", "shared", 8, 2)),
        (("cpu", None, 4, 8), Placement("cpu", "shared", 4, 0)),
    ],
)
def test_where_ranks_run(asked: tuple[Any, ...], expected: Placement):
    device, where, count, gpus = asked
    assert place(device, where, count, gpus=gpus) == expected


@pytest.mark.parametrize(
    ("asked", "joined", "why"),
    [
        (("cuda", None, None, 0), None, "no CUDA device"),
        (("auto", "links", 4, 2), None, "torch sees 2 GPUs"),
        (("auto", "links", None, 1), None, "at least 2 ranks"),
        (("cpu", "links", None, 2), None, "a GPU for each rank"),
        (("auto", None, 4, 2), 2, "torchrun has started 2"),
        (("cpu", None, None, 0), 1, "at least 2 ranks"),
    ],
)
def test_what_can_not_run(asked: tuple[Any, ...], joined: int | None, why: str):
    device, where, count, gpus = asked
    with pytest.raises(ArgumentValueError, match=why):
        place(device, where, count, gpus=gpus, joined_ranks=joined)


def test_kinds_follow_from_the_placement():
    assert (LINKS.kind, LINKS.group_backend) == ("links", "cpu:gloo,cuda:nccl")
    shared = Placement("cuda", "shared", 2, 1)
    assert (shared.kind, shared.group_backend) == ("device", "gloo")
    assert (ON_CPU.kind, ON_CPU.group_backend) == ("host", "gloo")
    # Ranks of several hosts under torchrun.
    assert place("auto", None, None, gpus=2, joined_ranks=4) == Placement("cuda", "links", 4, 2, True)


def test_goals_are_for_two_ranks_with_a_gpu_each():
    """A goal beside a number that it is not for would judge the wrong thing."""
    largest, smallest = Geometry(75600, 40), Geometry(1024, 24)
    assert goals.goal("nvlink", "direct", largest, ranks=2, where="links") == goals.Goal(1.03)
    assert goals.goal("nvlink", "direct", smallest, ranks=2, where="links") == goals.Goal(2.4, 6.0)
    assert goals.goal("nvlink", "max_sms=0", smallest, ranks=2, where="links") == goals.Goal()
    for backend, ranks, where in (("nccl", 2, "links"), ("nvlink", 4, "links"), ("nvlink", 2, "shared")):
        assert goals.goal(backend, "direct", largest, ranks=ranks, where=where) == goals.Goal()
    assert all(goals.goal("nvlink", "staged", item, ranks=2, where="links").ratio for item in geometry.DEFAULT)
    assert [goals.verdict(value, 2.4) for value in (2.4, 2.41, None)] == ["met", "missed", "not measured"]
    assert goals.verdict(9.0, None) is None


def measured(**figures: Any) -> dict[str, Any]:
    row = {"mode": "direct", "geometry": [75600, 40, 128], "operation": "scatter_heads", "calls": 20, "sets": 2}
    return {**row, "eager_us": 510.0, "host_us": 20.0, "graph_us": 505.0, **figures}


def test_figures_are_of_the_slower_rank_and_rows_of_all_ranks():
    """Also where a rank failed earlier than the others, and where a figure is missing on one."""
    ranks = [
        [measured(), measured(graph_us=None)],
        [measured(eager_us=530.0, graph_us=500.0), measured()],
        [measured()],
    ]
    assert report.slowest(ranks) == [measured(eager_us=530.0)]
    assert [row["graph_us"] for row in report.slowest(ranks[:2])] == [505.0, None]
    assert report.slowest([[], [measured()]]) == []


def test_a_row_has_the_floor_and_the_goal_beside_the_figure():
    row = report.finished_row("nvlink", measured(), Floor("links", 392e9, floor.COPY_BYTES), LINKS)
    assert row["floor_us"] == pytest.approx(493.7, abs=0.1)
    assert row["graph_over_floor"] == pytest.approx(1.0229, abs=1e-3)
    assert (row["goal"], row["goal_is"]) == (1.03, "met")
    assert (row["eager_over_graph_us"], row["eager_goal_us"], row["eager_goal_is"]) == (5.0, None, None)
    small = report.finished_row("nvlink", measured(geometry=[1024, 24, 128]), Floor("links", 392e9, 1), LINKS)
    assert (small["eager_goal_us"], small["eager_goal_is"]) == (6.0, "met")
    without = report.finished_row("nvlink", measured(), None, LINKS)
    assert (without["floor_us"], without["graph_over_floor"], without["goal_is"]) == (None, None, "not measured")


def test_tables_have_what_is_known(capsys: pytest.CaptureFixture[str]):
    """Goals only where there are some, graphs only where calls were captured; nothing is cut off."""
    rate = Floor("links", 392e9, floor.COPY_BYTES)
    rows = [
        report.finished_row("nvlink", measured(), rate, LINKS),
        report.finished_row("torch-symm", measured(), rate, LINKS),
        report.finished_row("nvlink", measured(geometry=[1024, 24, 128], mode="max_sms=0"), rate, LINKS),
        report.finished_row("nvlink", measured(geometry=[1024, 24, 128]), rate, LINKS),
        report.finished_row("gloo", measured(geometry=list(TINY), graph_us=None), rate, LINKS),
    ]
    found = report.document(
        LINKS, quick=True, environment={"GPU": "NVIDIA X"}, floor=rate, rows=rows,
        left_out=[{"what": "pcie", "why": "no"}], errors=[{"what": "nccl, staged", "why": "broke"}],
        seconds={"a": 1.23},
    )  # fmt: skip
    from comm_core.cli import output

    report.show(found, LINKS, output.console())
    text = capsys.readouterr().out
    large, smallest, small = re.split("S=1024 H=24|S=64 H=4 D=32", text)
    assert "more than one in a graph, at most 6: met" in " ".join(smallest.split())
    assert "S=75600 H=40: 184.6 MiB leave each rank, floor 493.7 us" in large
    (line,) = [line for line in large.splitlines() if "nvlink" in line]
    assert line.split() == ["nvlink", "direct", "scatter", "505.0", "510.0", "20.0", "1.02", "1.03", "met"]
    assert "torch-symm" in large and max(map(len, text.splitlines())) <= 80
    assert "graph" in large and "goal" in large
    assert "graph " not in small.split("floor = ")[0] and "goal" not in small
    assert "pcie: no" in small and "nccl, staged: broke" in small
    assert found["seconds"] == {"a": 1.2}


# -- The plot -----------------------------------------------------------------------------------------------------


def test_a_plot_has_the_slower_operation_by_size():
    rate = Floor("links", 392e9, floor.COPY_BYTES)
    rows = [
        report.finished_row("nvlink", measured(graph_us=value, geometry=size, operation=operation), rate, LINKS)
        for size, operation, value in (
            ([75600, 40, 128], "scatter_heads", 500.0),
            ([75600, 40, 128], "gather_heads", 600.0),
            ([1024, 24, 128], "scatter_heads", 10.0),
        )
    ]
    rows += [report.finished_row("nccl", measured(graph_us=None), rate, LINKS)]
    rows += [report.finished_row("gloo", measured(), None, LINKS)]
    found = plot.series(rows)
    assert list(found) == ["nvlink, direct", "nccl, direct, eager"]
    sizes, ratios = zip(*found["nvlink, direct"], strict=True)
    assert sizes == pytest.approx((1.5, 184.57), abs=0.01) and ratios[1] == pytest.approx(600 / 493.7, abs=1e-3)


@pytest.mark.parametrize("name", ["ulysses", "allreduce"])
def test_a_plot_that_can_not_be_drawn_is_refused_before_anything_is_measured(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(launch, "ranks", lambda *_, **__: pytest.fail("ranks were started"))
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    assert commctl("bench", name, "--device", "cpu", "--plot", str(tmp_path / "x.png")) == 1
    assert "pip install comm-core[plot]" in capsys.readouterr().err
    monkeypatch.undo()
    monkeypatch.setattr(launch, "ranks", lambda *_, **__: pytest.fail("ranks were started"))
    assert commctl("bench", name, "--device", "cpu", "--json", str(tmp_path / "no" / "x.json")) == 1
    assert "its folder does not exist" in capsys.readouterr().err


SHARED = "-b gloo -n 3 --where shared --device cpu --quick --no-compare --json {0}/a --plot {0}/b.svg --timeout 7"


@pytest.mark.parametrize("module", [command, allreduce_command], ids=["ulysses", "allreduce"])
def test_what_the_benchmarks_share_means_the_same_to_both(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every option that is declared for both reaches its field, and without any of them both begin alike."""
    seen: list[SharedOptions] = []
    monkeypatch.setattr(module, "run", lambda options: seen.append(options) or 0)
    name = "ulysses" if module is command else "allreduce"
    assert commctl("bench", name, *SHARED.format(tmp_path).split()) == commctl("bench", name) == 0
    shared, default = ({field.name: getattr(item, field.name) for field in fields(SharedOptions)} for item in seen)
    assert default == asdict(SharedOptions())
    assert shared == {
        "backends": ("gloo",),
        "ranks": 3,
        "where": "shared",
        "device": "cpu",
        "quick": True,
        "compare": False,
        "json": tmp_path / "a",
        "plot": tmp_path / "b.svg",
        "timeout_s": 7.0,
    }


def test_a_plot_must_be_of_a_kind_that_can_be_written():
    pytest.importorskip("matplotlib", exc_type=ModuleNotFoundError)
    plot.check(Path("a.svg"))
    with pytest.raises(ArgumentValueError, match="must end in one of"):
        plot.check(Path("a.doc"))


# -- On ranks -----------------------------------------------------------------------------------------------------


def job(backend: str, *geometries: Geometry, ranks: int = 2) -> ulysses.Job:
    placement = Placement("cpu", "shared", ranks, 0)
    return ulysses.Job(placement, backend, ("direct", "staged"), geometries or (TINY,), 2)


@pytest.mark.parametrize("backend", ["gloo", ulysses.ALL_TO_ALL])
@pytest.mark.parametrize("size", [2, 4])
def test_ways_to_exchange_are_right_and_timed(ranks: Any, backend: str, size: int):
    """On a CPU there is neither a graph nor memory that is written directly, so one mode is left."""
    results = ranks.run(ulysses.measure, job(backend, TINY, Geometry(32, 8, 16), ranks=size), ranks=size)
    for rows in results:
        assert [(row["geometry"], row["operation"]) for row in rows] == [
            (list(item), operation) for item in (TINY, Geometry(32, 8, 16)) for operation in OPERATIONS
        ]
        for row in rows:
            assert row["mode"] == "staged" and row["graph_us"] is None
            assert row["eager_us"] > 0 and row["host_us"] == row["eager_us"] and row["calls"] >= 2


class Wrong(AllToAll):
    """Gathers with two tokens of the last operand swapped, on one rank."""

    def call(self, operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
        super().call(operation, x, out)
        if operation == "gather_heads" and torch.distributed.get_rank(self._group) == 1:
            out.copy_(out.roll(1, dims=1))


def measure_wrong(group: Any, asked: ulysses.Job) -> Any:
    ulysses.AllToAll = Wrong
    try:
        return ulysses.measure(group, asked)
    finally:
        ulysses.AllToAll = AllToAll


class Graph:
    """A graph that does its calls when it is replayed, as on a CPU there is no other."""

    def __init__(self, work: Any) -> None:
        self.replay = work


class Capturable(AllToAll):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.capturable = True


def measure_captured(group: Any, asked: ulysses.Job, refused_on: tuple[int, ...]) -> Any:
    def capture(work: Any) -> Graph:
        if group.rank() in refused_on:
            raise UnsupportedError("can't be captured")
        return Graph(work)

    before = timing.captured
    ulysses.AllToAll, timing.captured = Capturable, capture
    try:
        return ulysses.measure(group, asked)
    finally:
        ulysses.AllToAll, timing.captured = AllToAll, before


def test_graphs_are_compared_and_timed_and_may_be_refused_by_all_or_none(ranks: Any):
    asked = job(ulysses.ALL_TO_ALL)
    assert all(row["graph_us"] > 0 for rows in ranks.run(measure_captured, asked, (), ranks=2) for row in rows)
    for rows in ranks.run(measure_captured, asked, (0, 1), ranks=2):
        assert [row["graph_us"] for row in rows] == [None, None] and all(row["eager_us"] > 0 for row in rows)
    _, second = ranks.run_outcomes(measure_captured, asked, (1,), ranks=2, timeout_s=4)
    assert "other ranks have captured what this one can't: can't be captured" in str(second.exception)


def test_a_wrong_exchange_is_never_timed(ranks: Any):
    """B1: one rank's wrong result is an error with the first element, and what was right before it stands."""
    first, second = ranks.run_outcomes(measure_wrong, job(ulysses.ALL_TO_ALL), ranks=2, timeout_s=5)
    error = second.exception
    assert isinstance(error, ulysses.PartError) and error.opened and "elements differ" in str(error)
    assert [row["operation"] for row in error.rows] == ["scatter_heads"]
    assert "in compare" in error.trace
    # The other rank waits for it until its own deadline, or loses it.
    assert first.kind in ("exception", "timeout")


class FakeSymmetricMemory:
    """torch's symmetric memory among threads: what `contenders.SymmetricMemory` calls of it, with real barriers."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.memories: dict[int, torch.Tensor] = {}
        self.barriers = {channel: threading.Barrier(size) for channel in (0, 1)}

    def empty(self, numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    def rendezvous(self, memory: torch.Tensor, group: Any) -> FakeSymmetricMemory:
        self.memories[group.rank()] = memory
        self.barrier(1)
        return self

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        numel = torch.Size(sizes).numel()
        return self.memories[rank][storage_offset : storage_offset + numel].view(sizes)

    def barrier(self, channel: int = 0) -> None:
        self.barriers[channel].wait(10)


class Member:
    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


@pytest.mark.parametrize("size", [2, 4])
def test_copies_into_peers_put_every_band_in_its_place(size: int, monkeypatch: pytest.MonkeyPatch):
    """Over symmetric memory each operand has an output of its own, and later calls write no other one."""
    fake = FakeSymmetricMemory(size)
    monkeypatch.setattr(contenders.importlib, "import_module", lambda name: fake)
    item, cpu = Geometry(16, 8, 4), torch.device("cpu")

    def exchange(group: Any) -> dict[str, list[torch.Tensor]]:
        member = Member(group.rank, size)
        way = contenders.SymmetricMemory(member, cpu, 3 * item.operand_bytes(size))
        assert way.modes(("direct", "staged")) == ["direct"]
        found: dict[str, list[torch.Tensor]] = {}
        for operation in OPERATIONS:
            xs = [ulysses.operand(item, operation, group.rank, size, number, cpu) for number in range(3)]
            outs = way.outputs(item, "direct", xs, operation)
            for x, out in zip(xs, outs, strict=True):
                way.call(operation, x, out)
            way.align()
            found[operation] = [out.clone() for out in outs]
            way.align()
        return found

    results = run_threads(size, exchange)
    for operation in OPERATIONS:
        for number in range(3):
            xs = [ulysses.operand(item, operation, rank, size, number, cpu) for rank in range(size)]
            for rank, expected in enumerate(getattr(reference, operation)(xs)):
                reference.assert_same_bits(results[rank][operation][number], expected)


def test_operands_differ_between_ranks_numbers_and_slices():
    """A piece that came from the wrong place must look wrong."""
    item, cpu = Geometry(1024, 24), torch.device("cpu")
    bits = [
        ulysses.operand(item, "scatter_heads", rank, 2, number, cpu).view(torch.int16)
        for rank in range(2)
        for number in range(16)
    ]
    alike = [float((a == b).float().mean()) for i, a in enumerate(bits) for b in bits[:i]]
    assert max(alike) < 1e-3
    heads = bits[0].view(-1, 24, 128)
    assert max(float((heads[:, i] == heads[:, j]).float().mean()) for i in range(24) for j in range(i)) < 1e-2
    assert max(float((heads[i] == heads[i + 1]).float().mean()) for i in range(500)) < 1e-2


def die_on_the_last(group: Any, how: str) -> int:
    if group.rank() == group.size() - 1 and how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise CommError("on purpose")
    return group.rank()


def test_a_part_that_fails_costs_itself_and_the_next_one_finds_ranks():
    with launch.ranks(ON_CPU) as started:
        assert os.environ["NCCL_NVLS_ENABLE"] == "0" and os.environ["COMM_TIMEOUT_S"] == "30"
        died = started.run(die_on_the_last, "die", timeout_s=20)
        assert died[0].value == 0 and re.match("rank 1 died with exit code -9", str(died[1].error))
        raised = started.run(die_on_the_last, "raise", timeout_s=20)
        assert [str(result.error) for result in raised] == ["on purpose"] * 2
        assert [result.value for result in started.run(die_on_the_last, "", timeout_s=20)] == [0, 1]
    assert "NCCL_NVLS_ENABLE" not in os.environ and "COMM_TIMEOUT_S" not in os.environ


def test_the_floor_is_a_rate_that_ranks_measure_together(ranks: Any):
    rates = ranks.run(floor.measure, ON_CPU, ranks=2)
    assert all(1e8 < rate < 1e13 for rate in rates)


# -- The command --------------------------------------------------------------------------------------------------


def test_the_command_measures_for_real(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Everything at once: tables, JSON without names or paths, a plot, what is left out and what failed."""
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    arguments = ["bench", "ulysses", "--device", "cpu", "--quick", "--geometry", "64x4x32", "--geometry", "7x3"]
    arguments += ["--backend", "nvlink", "--backend", "gloo", "--json", str(file), "--plot", str(picture)]
    # What was asked for by name and can't be had is a failure; all the rest is there.
    assert commctl(*arguments) == 1
    captured = capsys.readouterr()
    found = json.loads(file.read_text())
    assert {row["backend"] for row in found["rows"]} == {"gloo", ulysses.ALL_TO_ALL}
    for row in found["rows"]:
        assert row["eager_over_floor"] == pytest.approx(row["eager_us"] / row["floor_us"], rel=1e-3)
        assert row["remote_bytes"] == TINY.remote_bytes(2) and row["goal_is"] is None
    # Once: what can't be opened is not tried in further modes.
    assert [item["what"] for item in found["errors"]] == ["nvlink, direct and staged"]
    assert "7 tokens don't divide among 2 ranks" in {item["why"] for item in found["left_out"]}
    assert (found["ranks"], found["where"], found["device"]) == (2, "shared", "cpu")
    assert found["floor"]["kind"] == "host" and found["environment"]["torch"] == torch.__version__
    assert redact.leaks(found, redact.hosts()) == [] and str(tmp_path) not in file.read_text()
    assert "S=64 H=4 D=32: 0.003906 MiB leave each rank" in captured.out
    assert "nvlink, direct and staged" in captured.out and "nvlink, direct and staged" in captured.err
    # A refusal needs no stacks.
    assert "Traceback" not in captured.err
    assert "<svg" in picture.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.svg"]


def test_what_nobody_named_is_left_out_with_the_reason(capsys: pytest.CaptureFixture[str]):
    assert commctl("bench", "ulysses", "--device", "cpu", "--quick", "--geometry", "64x4x32", "--no-compare") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Not measured - " in text and "- nccl, staged: nccl moves cuda tensors" in text
    assert "windows, direct and staged:" in text and "Errors" not in text and ulysses.ALL_TO_ALL not in text
    assert "asked for" not in text


def test_under_torchrun_the_ranks_are_those_that_it_has_started(tmp_path: Path):
    """One table and one file, from rank 0; a refusal on all ranks keeps them in step."""
    file = tmp_path / "found.json"
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python", sys.executable]
    words += ["-c", "from comm_core.cli.main import main; main()", "bench", "ulysses", "--device", "cpu", "--quick"]
    words += ["--geometry", "64x4x32", "--json", str(file)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Ulysses exchange") == 1
    found = json.loads(file.read_text())
    assert found["ranks"] == 2 and {row["backend"] for row in found["rows"]} == {"gloo", ulysses.ALL_TO_ALL}
    assert {item["what"] for item in found["left_out"]} >= {"nccl, staged", "windows, direct and staged"}


@pytest.mark.parametrize(
    ("arguments", "code", "why"),
    [
        (("--geometry", "12"), 1, "SxH"),
        (("--geometry", "7x3"), 1, "no geometry is left"),
        (("--mode", "fast"), 1, "--mode must be one of"),
        (("--where", "links"), 1, "a GPU for each rank"),
        (("--where", "moon"), 2, "moon"),
        (("--ranks", "1"), 2, "ranks"),
        (("--json", "/nowhere/at/all.json"), 1, "does not exist"),
    ],
)
def test_wrong_options_start_no_ranks(
    arguments: tuple[str, ...], code: int, why: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setattr(launch, "ranks", lambda *_, **__: pytest.fail("ranks were started"))
    assert commctl("bench", "ulysses", "--device", "cpu", *arguments) == code
    captured = capsys.readouterr()
    assert why in captured.err and "Traceback" not in captured.err and captured.out == ""


def test_modes_follow_what_the_communicator_can_do(monkeypatch: pytest.MonkeyPatch):
    """A mode whose argument does not exist is left out, or refused where it was asked for."""
    from comm_core.ulysses import communicator

    class Small:
        def __init__(self, group: Any = None, *, max_bytes: int) -> None: ...

    class Large:
        def __init__(self, group: Any = None, *, max_sms: int | None = None, pool_bytes: int = 0) -> None: ...

    monkeypatch.setattr(communicator, "UlyssesCommunicator", Small)
    assert command.modes_of(()) == ("direct", "staged")
    with pytest.raises(ArgumentValueError, match="no argument max_sms"):
        command.modes_of(("max_sms=0",))
    monkeypatch.setattr(communicator, "UlyssesCommunicator", Large)
    assert command.modes_of(()) == ("direct", "staged", "max_sms=0")
    assert command.modes_of(("pool", "direct", "pool")) == ("pool", "direct")
