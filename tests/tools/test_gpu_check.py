"""The check on GPUs, where there are none: what it writes, how its parts end, and what its silence means."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import gpu_check
import workspace
from comm_core.bench import allreduce_command, floor, launch
from comm_core.bench import report as bench_report
from gpu import bench_rows, bench_windows, junit, mps, processes, report, sections

ROOT = Path(__file__).resolve().parents[2]
UUID = "8a6b1d2e-0c4f-4d6a-9e1b-2f3a4b5c6d7e"
SECRETS = {
    "host": "rank 1 on node-17.example died",
    "short host": "NODE-17: no route",
    "uuid": f"GPU-{UUID} is busy",
    "bare uuid": f"boot {UUID}",
    "short uuid": "MIG-8a6b1d2e",
    "pci": "device 0000:1b:00.0",
    "path": "see /home/someone/comm/x.log, line 3",
    "path after colon": "PYTHONPATH:/opt/a",
    "home": "in ~/.cache/comm",
    "file": "file:///srv/results",
    "address": "connect to 10.1.22.3 failed",
}
HARMLESS = (
    "GB/s, test_a.py::b in packages/comm-core/tests/gpu, 580.159.04, https://a.org/b, 127.0.0.1, scatter / gather"
)
NAMES = frozenset({"node-17.example", "node-17"})


def document(section, **environment):
    return {
        "command": "python tools/gpu_check.py",
        "date": "2026-01-02",
        "environment": {"GPU": "NVIDIA X", "GPUs": 2, "driver": "580.159.04", **environment},
        "sections": [section.to_json()],
    }


# -- The report ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SECRETS.values(), ids=SECRETS)
def test_no_text_tells_on_whose_machine_it_was_written(text: str, tmp_path: Path):
    """Wherever it comes from: a failure's text, a note, a cell, a fact."""
    section = report.Section("x", "X", why=[text], notes=[text])
    section.tables.append(report.Table("t", ["a", "b"], [[1.5, text]], text))
    section.goals.append(report.Goal(text, 1.0, 2.0, "us"))
    assert report.leaks(document(section), NAMES)
    written = report.write(document(section, kernel=text), tmp_path / "r", NAMES)
    for path in written:
        assert not any(report.leaks(line, NAMES) for line in path.read_text().splitlines())
        assert UUID not in path.read_text() and "someone" not in path.read_text()
    assert json.loads(written[0].read_text())["sections"][0]["tables"][0]["rows"][0][0] == 1.5


def test_what_cannot_be_replaced_is_refused(tmp_path: Path):
    """A name of a field stays as it is, so the report is not written."""
    section = report.Section("x", "X")
    section.tables.append(report.Table("t", ["a"], [[{"node-17": 1}]]))
    with pytest.raises(report.ReportError, match="host name"):
        report.write(document(section), tmp_path / "r", NAMES)
    assert not list(tmp_path.iterdir())


def test_harmless_text_is_kept():
    assert report.redact(HARMLESS, NAMES) == HARMLESS


def test_this_machines_own_name_is_known():
    name = os.uname().nodename
    assert name in report.hosts() or len(name) < 3 or name == "localhost"


def test_the_page_says_what_was_met_missed_and_skipped():
    section = report.Section("x", "Part X", "skipped", ["there is one GPU"], seconds=3.2)
    section.goals += [report.Goal(name, value, 2.0, "us") for name, value in (("a", 1.0), ("b", 3.0), ("c", None))]
    page = report.markdown(document(section))
    assert "| a | 2.00 | 1.00 | us | met |" in page and "| b | 2.00 | 3.00 | us | missed |" in page
    assert "| c | 2.00 | - | us | not measured |" in page
    assert "| Part X | skipped | 3 s | there is one GPU |" in page


# -- The command --------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_says_so_and_measures_nothing(tmp_path: Path):
    command = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 2, done.stderr
    assert "no CUDA device" in done.stderr and not list(tmp_path.iterdir())


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A check that believes in two GPUs, with parts of our own."""
    monkeypatch.setattr(gpu_check, "environment_facts", lambda folder: {"GPU": "NVIDIA X", "GPUs": 2})
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "results")

    def bad(context: sections.Context, section: report.Section):
        raise ValueError("the first part broke")

    def good(context: sections.Context, section: report.Section):
        section.goals.append(report.Goal("too slow", 9.0, 1.0, "us"))

    monkeypatch.setattr(sections, "SECTIONS", {"bad": ("Bad", bad), "good": ("Good", good)})
    return tmp_path / "results"


def test_a_part_that_fails_does_not_stop_the_others(two_gpus: Path):
    assert gpu_check.main([]) == 1
    found = json.loads((two_gpus / "nvidia-x-2x.json").read_text())
    assert [(part["name"], part["status"]) for part in found["sections"]] == [("bad", "failed"), ("good", "passed")]
    assert "the first part broke" in found["sections"][0]["why"][0]


def test_a_missed_time_alone_is_no_failure_and_a_partial_run_replaces_nothing(
    two_gpus: Path, capsys: pytest.CaptureFixture[str]
):
    assert gpu_check.main(["--only", "good"]) == 0
    assert not two_gpus.exists()
    printed = capsys.readouterr().out
    assert "| too slow | 1.00 | 9.00 | us | missed |" in printed
    assert gpu_check.main(["--only", "good", "--out", str(two_gpus / "elsewhere")]) == 0
    assert (two_gpus / "elsewhere" / "nvidia-x-2x.md").exists()


# -- Processes and MPS --------------------------------------------------------------------------------------------


def ended(pid: int) -> bool:
    """Whether a process is gone, or dead and only waits for whoever inherits it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_what_outlives_its_deadline_is_killed_with_what_it_started(tmp_path: Path):
    code = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\ntime.sleep(60)"
    started = time.monotonic()
    done = processes.run([sys.executable, "-c", code], environment=os.environ, timeout_s=1.5, log=tmp_path / "log")
    assert done.code is None and time.monotonic() - started < 10 and "deadline" in done.verdict
    deadline = time.monotonic() + 5
    while not ended(int(done.text)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended(int(done.text))


def test_children_have_no_settings_of_the_callers(tmp_path: Path):
    inherited = {"COMM_JIT": "off", "PYTEST_ADDOPTS": "-x", "CUDA_MPS_PIPE_DIRECTORY": "/x", "PATH": "/bin"}
    environment = processes.clean_environment(tmp_path, inherited)
    assert environment.keys() == {"PATH", "PYTHONPATH", "XDG_CACHE_HOME", "CUDA_MPS_PIPE_DIRECTORY"}
    # Where no daemon is: one that serves the whole machine must not be used by what has to run without.
    assert environment["CUDA_MPS_PIPE_DIRECTORY"].startswith(str(tmp_path))


def test_children_find_the_plugins_of_this_tree(tmp_path: Path):
    """Whether or not anything is installed: a benchmark without a transport would pass without it."""
    code = (
        "from importlib.metadata import entry_points\n"
        "print(*sorted({point.name for point in entry_points(group='comm_core.v1')}))"
    )
    environment = processes.clean_environment(tmp_path)
    done = processes.run(
        [sys.executable, "-S", "-c", code], environment=environment, timeout_s=30, log=tmp_path / "l"
    )
    packages = (workspace.Package(folder.parent) for folder in ROOT.glob("packages/*/pyproject.toml"))
    wanted = {name for package in packages for name in package.plugins}
    assert done.code == 0 and {"nvlink", "pcie", "sage2"} <= wanted <= set(done.text.split())


DAEMON = """#!/bin/bash
if [ "$1" = "-d" ]; then
    "$0" --serve </dev/null >/dev/null 2>&1 &
    exit 0
fi
if [ "$1" = "--serve" ]; then
    echo "$$ $CUDA_MPS_LOG_DIRECTORY" >"$(dirname "$0")/served"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
    exit 0
fi
read -r command
[ "$command" = "quit" ] && QUIT
exit 0
"""


def control(folder: Path, quit_: str) -> dict[str, str]:
    program = folder / mps.CONTROL
    program.write_text(DAEMON.replace("QUIT", quit_), encoding="utf-8")
    program.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def served(folder: Path) -> tuple[int, Path]:
    deadline = time.monotonic() + 10
    while not (folder / "served").exists() or not (folder / "served").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pid, log = (folder / "served").read_text().split()
    return int(pid), Path(log)


def test_mps_has_private_folders_and_ends_with_the_block_also_on_an_error(tmp_path: Path):
    environment = control(tmp_path, 'touch "$CUDA_MPS_PIPE_DIRECTORY/quit"')
    with pytest.raises(ZeroDivisionError), mps.running(environment) as service:
        assert service.active, service.why
        pid, log = served(tmp_path)
        pipe = Path(service.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert pipe.stat().st_mode & 0o777 == 0o700 and log.is_dir() and not ended(pid)
        # The address of a socket has 107 bytes.
        assert len(str(pipe)) < 80
        _ = 1 / 0
    assert service.stopped == "in order" and ended(pid) and not pipe.exists() and not log.exists()


def test_mps_that_does_not_end_when_asked_is_killed(tmp_path: Path):
    with mps.running(control(tmp_path, "sleep 30"), stop_s=0.5) as service:
        pid, _ = served(tmp_path)
    assert service.stopped.startswith("killed")
    deadline = time.monotonic() + 5
    while not ended(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended(pid)


def test_without_mps_the_block_runs_all_the_same(tmp_path: Path):
    with mps.running({"PATH": str(tmp_path)}) as service:
        assert (
            not service.active and "not installed" in service.why and service.environment == {"PATH": str(tmp_path)}
        )


# -- Tests and their results --------------------------------------------------------------------------------------


TESTS = """
import os
import pytest
def test_good(): assert os.environ["GPU_CHECK_SIZES"] == "2"
def test_bad(): raise RuntimeError("it broke")
@pytest.mark.skip(reason="not here")
def test_skipped(): pass
@pytest.fixture
def left():
    yield
    raise RuntimeError("left something behind")
def test_teardown(left): pass
def test_interrupted():
    import time
    time.sleep(SECONDS)
"""


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that tests run in."""
    monkeypatch.setattr(sections, "ROOT", tmp_path)
    return tmp_path


def run_tests(tmp_path: Path, seconds: str, timeout_s: float) -> report.Section:
    (tmp_path / "test_few.py").write_text(TESTS.replace("SECONDS", seconds), encoding="utf-8")
    environment = {**processes.clean_environment(tmp_path), "GPU_CHECK_SIZES": "2"}
    section = report.Section("tests", "Tests")
    context = sections.Context(tmp_path, environment, 1, False)
    sections._pytest(context, section, "few", [str(tmp_path / "test_few.py")], timeout_s)
    return section


def test_failures_are_named_and_skips_are_counted(root: Path):
    section = run_tests(root, "0", 60)
    assert section.status == "failed"
    assert [why.split(": ")[0] for why in section.why] == ["test_few::test_bad", "test_few::test_teardown"]
    assert "it broke" in section.why[0] and "left something behind" in section.why[1]
    tables = {table.title: table.rows for table in section.tables}
    (row,) = tables["few: tests"]
    assert row[0] == "test_few" and row[1:4] == [2, 2, 1]
    assert tables["few: skipped"] == [["not here", 1]]


def test_a_run_that_hangs_still_says_what_it_had_found(root: Path):
    """It is interrupted before it is killed, so that pytest writes its results."""
    section = run_tests(root, "60", 6)
    assert section.status == "failed" and any("deadline" in why for why in section.why), section.why
    assert any("it broke" in why for why in section.why), section.why


def test_a_run_without_results_has_failed(tmp_path: Path):
    assert junit.read(tmp_path / "none.xml") is None
    (tmp_path / "half.xml").write_text("<testsuite><testcase")
    assert junit.read(tmp_path / "half.xml") is None


# -- The sanitizer ------------------------------------------------------------------------------------------------


CLEAN = "rank 0: ok\nrank 1: ok\n========= ERROR SUMMARY: 0 errors\n"
RACE = "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
PLANTED = "========= Invalid __global__ write of size 4 bytes\n========= ERROR SUMMARY: 2 errors\n"


@pytest.mark.parametrize(
    ("text", "errors"), [(CLEAN, 0), (RACE, 0), (PLANTED, 2), (CLEAN + PLANTED, 2), ("Killed\n", None)]
)
def test_all_summaries_count_and_none_is_no_result(text: str, errors: int | None):
    assert sections.sanitizer_errors(text) == errors


@pytest.mark.parametrize(
    ("memcheck", "planted", "why"),
    [
        (CLEAN, PLANTED, None),
        (CLEAN, CLEAN, "its silence means nothing"),
        ("rank 0: ok\n========= ERROR SUMMARY: 0 errors\n", PLANTED, "memcheck: 0 errors"),
        (CLEAN + PLANTED, PLANTED, "memcheck: 2 errors"),
        ("Killed\n", PLANTED, "memcheck: None errors"),
    ],
)
def test_a_sanitizer_must_see_a_planted_error_and_nothing_else(
    memcheck: str, planted: str, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "compute-sanitizer").write_text("#!/bin/sh\n")
    (tmp_path / "compute-sanitizer").chmod(0o755)
    texts = {"sanitizer, nvlink, 2 ranks, memcheck": memcheck, "sanitizer, a planted error": planted}

    def run(self: sections.Context, name: str, command: list[str], timeout_s: float, interrupt_s: float = 0):
        log = tmp_path / f"{name}.log"
        ranks = int(command[command.index("--ranks") + 1]) if "--ranks" in command else 2
        text = texts.get(name, "".join(f"rank {rank}: ok\n" for rank in range(2, ranks)) + CLEAN)
        log.write_text(text)
        return processes.Done(9 if "Invalid" in text else 0, 1.0, log)

    monkeypatch.setattr(sections.Context, "run", run)
    section = report.Section("sanitizer", "S")
    sections.sanitizer(sections.Context(tmp_path, {"PATH": str(tmp_path)}, 1, False), section)
    assert section.status == ("passed" if why is None else "failed"), section.why
    assert why is None or any(why in text for text in section.why), section.why


# -- Numbers ------------------------------------------------------------------------------------------------------


def test_rows_and_goals_are_of_the_slowest_rank():
    ranks = [{"eager": 7.0, "graph": 20.0, "floor": 1.0}, {"eager": 8.0, "graph": 4.0, "floor": 1.5}]
    found = {
        "errors": {"barrier, 4 ranks": "CommError: rank 1"},
        "barriers": {"8": bench_windows.slowest(ranks)},
        "overhead": {
            **{"launch": 2.0, "empty entry": 3.5, "exchange entry": 6.0},
            **{"session.barrier": 7.0, "comm.scatter_heads": 30.0},
        },
        "took": {},
    }
    section = report.Section("bench", "Benchmarks")
    sections.add_windows(section, found, True)
    assert section.status == "failed" and section.why == ["barrier, 4 ranks: CommError: rank 1"]
    assert [(goal.value, goal.verdict) for goal in section.goals] == [(20.0, "missed"), (4.0, "missed"), (1.5, "met")]
    tables = {table.title: table.rows for table in section.tables}
    assert tables["Barrier"] == [[8, 1.5, 20.0, 8.0]]


LINKS = launch.Placement("cuda", "links", 2, 2)
RATE = floor.Floor("links", 392e9, floor.COPY_BYTES)


def exchange_row(backend: str, operation: str, tokens: int, **figures: float | None):
    row = {"mode": "direct", "geometry": [tokens, 24, 128], "operation": operation, "calls": 20, "host_us": 3.0}
    return bench_report.finished_row(backend, {**row, **figures}, RATE, LINKS)


def test_exchanges_stand_beside_the_floor_with_their_goals():
    """What commctl wrote, by size; a part that failed in the middle keeps what it had."""
    rows = [
        exchange_row("nvlink", "scatter_heads", 1024, graph_us=9.0, eager_us=14.0),
        exchange_row("nvlink", "gather_heads", 1024, graph_us=10.0, eager_us=17.0),
        exchange_row("gloo", "scatter_heads", 4608, graph_us=None, eager_us=900.0),
    ]
    errors = [{"what": "gloo, staged", "why": "died"}]
    left_out = [{"what": "pcie", "why": "one GPU"}]
    found = bench_report.document(
        LINKS, quick=True, environment={}, floor=RATE, rows=rows, left_out=left_out, errors=errors, seconds={"a": 2.0}
    )
    section = report.Section("bench-links", "Benchmarks")
    bench_rows.add_exchanges(section, json.loads(json.dumps(found)))
    assert section.why == ["gloo, staged: died"] and section.notes == ["Not measured: pcie: one GPU"]
    small = "S=1024 H=24"
    assert [(goal.name, goal.limit, goal.verdict) for goal in section.goals] == [
        (f"nvlink, direct, scatter_heads, {small}, in a graph", 2.4, "met"),
        (f"nvlink, direct, scatter_heads, {small}, eager on top of the graph", 6.0, "met"),
        (f"nvlink, direct, gather_heads, {small}, in a graph", 2.4, "missed"),
        (f"nvlink, direct, gather_heads, {small}, eager on top of the graph", 6.0, "missed"),
    ]
    (table,) = [table for table in section.tables if table.title == "Exchange of heads"]
    assert [row[0] for row in table.rows] == ["S=4608 H=24", small]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert table.rows[1][2:] == [4.012, "nvlink", "direct", 9.0, 2.243, 14.0, 3.0, 10.0, 2.492, 17.0, 3.0]
    assert "392 GB/s a direction" in table.note


@pytest.mark.parametrize(
    ("code", "errors", "status"), [(0, [], "passed"), (1, ["x"], "failed"), (None, [], "failed")]
)
def test_the_benchmark_of_exchanges_is_commctl_s(
    code: int | None, errors: list[str], status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is run as users run it; one failure is told once; killed, it says so and what it had is in the report."""
    commands: list[list[str]] = []

    def run(self: sections.Context, name: str, command: list[str], timeout_s: float, interrupt_s: float = 0):
        commands.append(command)
        file = Path(command[command.index("--json") + 1])
        log = tmp_path / "log"
        log.write_text("")
        if "allreduce" in command:
            file.write_text(json.dumps({"errors": [], "left_out": [], "rows": [], "ranks": 2, "hidden": 8192}))
            return processes.Done(0, 1.0, log)
        if "lowp" in command:
            rates = {"read_bytes_per_s": 4e12, "copy_bytes_per_s": 4e12}
            file.write_text(json.dumps({"rows": [], "ranks": 2, "bandwidth": rates}))
            return processes.Done(0, 1.0, log)
        if "ulysses" not in command:
            file.write_text(json.dumps({"errors": {}, "barriers": {}, "overhead": None, "took": {}}))
            return processes.Done(0, 1.0, log)
        failed = [{"what": what, "why": "w"} for what in errors]
        rows = [exchange_row("nccl", "gather_heads", 64, graph_us=1.0, eager_us=1.0)]
        found = bench_report.document(
            LINKS, quick=True, environment={}, floor=RATE, rows=rows, left_out=[], errors=failed, seconds={}
        )
        file.write_text(json.dumps(found))
        return processes.Done(code, 1.0, log)

    monkeypatch.setattr(sections.Context, "run", run)
    section = report.Section("bench-links", "B")
    sections.bench_links(sections.Context(tmp_path, {}, 2, True), section)
    assert section.status == status and len(section.why) == (status == "failed")
    assert [table.title for table in section.tables if table.rows] == ["Exchange of heads"]
    assert commands[1][3:9] == ["bench", "ulysses", "--where", "links", "--ranks", "2"] and "--quick" in commands[1]
    assert commands[2][3:9] == ["bench", "allreduce", "--where", "links", "--ranks", "2"] and "--quick" in commands[2]
    assert [command[3:9] for command in commands[3:]] == [
        ["bench", "lowp", "--quick", "--json", str(tmp_path / "bench-lowp-passes-links.json")],
        ["bench", "lowp", "--quick", "--where", "links", "--ranks"],
    ]


def test_the_all_reduce_has_a_table_and_its_goals():
    rows = [
        {"backend": "nccl", "case": "sum", "tokens": 8, "graph_us": 12.0, "eager_us": 20.0, "host_us": 5.0},
        {"backend": "trtllm", "case": "sum", "tokens": 8, "graph_us": 2.5, "eager_us": 9.0, "host_us": 8.0},
        {"backend": "trtllm", "case": "norm", "tokens": 8, "graph_us": 4.5, "eager_us": 9.0, "host_us": 8.0},
        {"backend": "trtllm", "case": "sum", "tokens": 512, "graph_us": 30.0, "eager_us": 31.0, "host_us": 8.0},
        {"backend": "trtllm", "case": "norm", "tokens": 512, "graph_us": 33.0, "eager_us": 34.0, "host_us": 8.0},
    ]
    found: dict[str, object] = {"where": "links", "ranks": 2, "hidden": 8192, "rows": rows, "floor": None}
    allreduce_command.add_ratios(found)
    section = report.Section("bench-links", "B")
    bench_rows.add_allreduce(section, {**found, "errors": [{"what": "a", "why": "b"}], "left_out": []})
    assert section.why == ["a: b"]
    assert [(goal.name, goal.limit, goal.verdict) for goal in section.goals] == [
        ("all-reduce, trtllm, sum, 8 tokens", 0.25, "met"),
        ("all-reduce, trtllm, norm, 8 tokens, above the sum", 1.5, "missed"),
        ("all-reduce, trtllm, norm, 512 tokens, above the sum", 10.0, "met"),
    ]
    (table,) = section.tables
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_low_precision_has_tables_and_its_goals():
    section = report.Section("bench-links", "B")
    passes = {"problem": "P", "us": 12.5, "best_us": 12.0, "host_us": 9.0}
    rows = [
        {**passes, "pass": "statistics", "floor_us": 10.0, "over_floor": 1.25, "goal": 1.2},
        {**passes, "pass": "finalize", "floor_us": None, "over_floor": None, "goal": None},
    ]
    rates = {"read_bytes_per_s": 4.2e12, "copy_bytes_per_s": 3.9e12}
    bench_rows.add_lowp_passes(section, {"rows": rows, "bandwidth": rates})
    exchange = {
        "problem": "P",
        "transport": "nvlink",
        "route": "direct",
        "layout": "sage2_sm90",
        "scatter_qkv": 60.0,
        "graph": None,
        "exchange and quantize": 100.0,
        "ratio": 0.6,
        "goal": 0.75,
        "host": 41.0,
        "host_goal": 40.0,
    }
    bench_rows.add_lowp_exchange(section, {"rows": [exchange, {**exchange, "transport": "windows"}], "ranks": 2})
    assert [(goal.name, goal.value, goal.verdict) for goal in section.goals] == [
        ("statistics, P", 1.25, "missed"),
        ("scatter_qkv, nvlink, P", 0.6, "met"),
        ("scatter_qkv, nvlink, P, host", 41.0, "missed"),
        ("scatter_qkv, windows, P, host", 41.0, "missed"),
    ]
    assert all(len(row) == len(table.columns) for table in section.tables for row in table.rows)
    assert "reads 4200 GB/s" in section.tables[0].note


def test_an_interrupt_ends_a_part_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def part(context: sections.Context, section: report.Section):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sections, "SECTIONS", {"part": ("Part", part)})
    section = sections.execute("part", sections.Context(tmp_path, {}, 1, False))
    assert (section.status, section.why) == ("failed", ["interrupted"])
