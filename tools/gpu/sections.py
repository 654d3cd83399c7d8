"""The parts of the check. Each runs in processes of its own that have a hard end, and no part depends on another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpu import bench_rows, junit, mps
from gpu.processes import ROOT, Done, run
from gpu.report import Goal, Section, Table

__all__ = ["SECTIONS", "Context", "sanitizer_errors"]

_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
_PORT = re.compile(r"--(?:base-)?port\b")
_FIRST_PORT, _PORTS = 40000, 200
_BARRIER_GOAL_US = 15.0
_CALL_GOAL_US = 3.0
_BUILD_GOAL_S = 10.0
_START_GOAL_MS = 50.0


@dataclass(frozen=True)
class Context:
    """What every part is given.

    Attributes:
        folder: for whatever it writes; removed at the end.
        environment: of its children.
        gpus: how many there are.
        quick: whether to do less.
        packages: whose tests to run, by the names of their folders; empty for all.
    """

    folder: Path
    environment: Mapping[str, str]
    gpus: int
    quick: bool
    packages: tuple[str, ...] = ()

    def changed(self, **changes: str) -> Context:
        """Return it with further variables in the environment."""
        return replace(self, environment={**self.environment, **changes})

    def on_one_gpu(self, index: int = 0) -> Context:
        """Return it with only one GPU in sight: the first, or another of those that are there."""
        seen = self.environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(max(1, self.gpus))))
        return self.changed(CUDA_VISIBLE_DEVICES=seen.split(",")[index])

    def run(self, name: str, command: Sequence[str], timeout_s: float, interrupt_s: float = 0.0) -> Done:
        """Run a command, with what it prints in a file of that name."""
        log = self.folder / f"{name}.log"
        done = run(command, environment=self.environment, timeout_s=timeout_s, log=log, interrupt_s=interrupt_s)
        if done.code != 0:
            print(f"--- {name}: {done.verdict}; the end of what it printed:\n{done.tail}\n---", flush=True)
        return done


def _module(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", name, *arguments]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# Tests


def _pytest(
    context: Context, section: Section, name: str, paths: Sequence[str], timeout_s: float, *options: str
) -> None:
    """Run tests and add what they came to."""
    results = context.folder / f"{name}.xml"
    # The settings of the workspace's own pytest are not used: they name plugins that need not be there.
    command = _module("pytest", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "comm_core.testing.plugin")
    command += ["-p", "no:cacheprovider", "--import-mode=importlib", "-W", "error", "-q", "-rfE", "--tb=short"]
    command += [f"--junitxml={results}", "--comm-deadline=120", *options, *paths]
    done = context.changed(COMM_REQUIRE_GPU="1").run(name, command, timeout_s, interrupt_s=20)
    outcome = junit.read(results)
    if outcome is None:
        section.fail(f"{name}: {done.verdict}, without results")
        return
    section.tables += outcome.tables(name)
    for test, what in outcome.failed.items():
        section.fail(f"{test}: {what}")
    if done.code is None:
        section.fail(f"{name}: {done.verdict}; {outcome.total('passed')} tests had passed")
    elif done.code != 0 and not outcome.failed:
        section.fail(f"{name}: {done.verdict}")
    elif outcome.total("passed") == 0:
        section.fail(f"{name}: no test ran")


def _test_folders(context: Context) -> list[str]:
    found = sorted(ROOT.glob("packages/*/tests/gpu"))
    return [
        str(path.relative_to(ROOT)) for path in found if not context.packages or path.parts[-3] in context.packages
    ]


def _less(context: Context) -> list[str]:
    return ["-k", "not leak and not cycles"] if context.quick else []


def _test_package(context: Context, section: Section, where: str, folder: str, *options: str) -> None:
    """Run the tests of one package."""
    limit = 110 if context.quick else 300
    name = f"{where}, {Path(folder).parts[-3]}"
    _pytest(context, section, name, [folder], limit, _KILLS, *options, *_less(context))


_KILLS = "--ignore-glob=*_kill.py"
_PLAIN = ("test_gpu_dist.py", "test_gpu_bench_links.py")
"""Tests with NCCL."""


def _note_mps(section: Section, service: mps.Mps) -> None:
    if not service.active:
        section.notes.append(f"Without MPS, so that ranks on one GPU took turns: {service.why}.")


def tests(context: Context, section: Section) -> None:
    """Run the tests with all ranks on one GPU."""
    sizes = "2,8" if context.quick else "2,4,6,8"
    waiting = _test_folders(context)
    parts = {name: Section(section.name, section.title) for name in waiting}
    with mps.running(context.environment) as service:
        _note_mps(section, service)
        context = replace(context, environment=service.environment).changed(GPU_CHECK_SIZES=sizes)

        def work(index: int) -> None:
            # `pop` of a list is one step: no two GPUs get the same package.
            while waiting:
                with contextlib.suppress(IndexError):
                    name = waiting.pop()
                    _test_package(context.on_one_gpu(index), parts[name], "one GPU", name)

        # Each package has one GPU to itself; several GPUs only make it sooner.
        with ThreadPoolExecutor(context.gpus) as pool:
            list(pool.map(work, range(context.gpus)))
    for part in parts.values():
        section.tables += part.tables
        for why in part.why:
            section.fail(why)
    section.notes += [f"MPS was stopped: {service.stopped}."] if service.stopped.startswith("killed") else []


def links(context: Context, section: Section) -> None:
    """Run the tests with the ranks spread over the GPUs, and the transports of torch.distributed."""
    if context.gpus < 2:
        section.status, section.why = "skipped", ["there is one GPU"]
        return
    sizes = ",".join(map(str, sorted({2, context.gpus} if context.quick else {2, context.gpus, 8})))
    folders = _test_folders(context)
    found = [path for name in _PLAIN for folder in folders for path in sorted((ROOT / folder).glob(name))]
    plain = [str(path.relative_to(ROOT)) for path in found]
    # NCCL is tested as it is used: one process on each GPU, no MPS.
    if plain:
        _pytest(context, section, "torch.distributed", plain, 120)
    with mps.running(context.environment) as service:
        _note_mps(section, service)
        inside = replace(context, environment=service.environment).changed(GPU_CHECK_SIZES=sizes)
        for folder in folders:
            _test_package(inside, section, "across GPUs", folder, *(f"--ignore-glob=*{name}" for name in _PLAIN))


def kill(context: Context, section: Section) -> None:
    """Kill a rank that is at work."""
    # Under MPS, what happens to the others is undefined.
    _without_mps(context.changed(GPU_CHECK_KILL="1"), section, "SIGKILL", "*_kill.py")


def checkpoint(context: Context, section: Section) -> None:
    """Let the driver take ranks that are detached, and bring them back."""
    # It refuses clients of MPS.
    _without_mps(context.changed(GPU_CHECK_CHECKPOINT="1"), section, "checkpoint", "*_checkpoint.py")


def _without_mps(context: Context, section: Section, name: str, pattern: str) -> None:
    section.notes.append("Without MPS: ranks on one GPU take turns.")
    files = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob(f"packages/*/tests/gpu/{pattern}"))]
    _pytest(context, section, name, files, 300)


# The sanitizer


def sanitizer_errors(text: str) -> int | None:
    """Return how many errors compute-sanitizer reports in all its summaries, or None where it made none."""
    found = [int(errors or hazards) for errors, hazards in _SUMMARY.findall(text)]
    return sum(found) if found else None


_SANITIZED: Mapping[str, tuple[int, ...]] = {
    "windows": (2, 4, 8),
    "nvlink": (2, 4, 6, 8),
    "pcie": (2, 4, 8),
    "mnnvl": (2, 4, 8),
    "allreduce": (2, 4, 8),
    "lowp": (2, 4),
}
"""Case of `gpu.sanitizer_case` -> how many ranks it is run with."""
_PLANTED = "a planted error"


@dataclass(frozen=True)
class _Sanitized:
    """A run under the sanitizer."""

    tool: str
    command: Sequence[str]
    ranks: int


def sanitizer(context: Context, section: Section) -> None:
    """Run ranks under compute-sanitizer: two, and then more."""
    program = shutil.which("compute-sanitizer", path=context.environment.get("PATH"))
    if program is None:
        section.status, section.why = "skipped", ["compute-sanitizer is not installed"]
        return
    # Allocations of their own size, so that a step past the end of a tensor is one past the end of an allocation.
    context = context.changed(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    case = _module("gpu.sanitizer_case")
    # Alone first: the case itself must pass, and the compiler must not run under the sanitizer.
    for name in _SANITIZED:
        done = context.on_one_gpu().run(f"sanitizer case, {name} alone", [*case, "--backend", name], 90)
        if done.code != 0 or done.text.count(": ok") != 2:
            section.fail(f"the case of {name} does not pass by itself: {done.verdict}")
            return
    runs = {_PLANTED: _Sanitized("memcheck", [*case, "--plant"], 2)}
    for name, sizes in _SANITIZED.items():
        for ranks in sizes[:1] if context.quick else reversed(sizes):
            for tool in ("memcheck", "synccheck") if context.quick else ("memcheck", "synccheck", "racecheck"):
                command = [*case, "--backend", name, "--ranks", str(ranks)]
                runs[f"{name}, {ranks} ranks, {tool}"] = _Sanitized(tool, command, ranks)
    port = _PORT.search(context.run("sanitizer, help", [program, "--help"], 20).text)

    def check(number: int, name: str) -> Done:
        options = [program, "--tool", runs[name].tool, "--target-processes", "all", "--error-exitcode", "9"]
        if runs[name].tool == "memcheck":
            # Libraries ask the driver for entry points that it may not have; what it answers is no error of memory.
            options += ["--report-api-errors", "no"]
        # Two at the same time must not find each other's programs.
        options += [port.group(), f"@{_FIRST_PORT + _PORTS * number}"] if port else []
        here = context.on_one_gpu(number % max(1, context.gpus))
        return here.run(f"sanitizer, {name}", [*runs[name].command, "--under", json.dumps(options)], 280)

    # At the same time: most of it is the start of Python and the patching of kernels, on the host.
    at_once = max(2, (os.cpu_count() or 1) // 4) if port else 1
    with ThreadPoolExecutor(at_once) as pool:
        finished = dict(zip(runs, pool.map(check, range(len(runs)), runs), strict=True))
    rows: list[list[Any]] = []
    for name, done in finished.items():
        errors = sanitizer_errors(done.text)
        rows.append([name, errors, round(done.seconds, 1)])
        if name == _PLANTED:
            # Rank 1 makes it: not the first process that is started.
            if not errors or "Invalid __global__ write" not in done.text:
                section.fail("the sanitizer does not report a planted write out of bounds: its silence means nothing")
        elif done.code != 0 or errors != 0 or done.text.count(": ok") != runs[name].ranks:
            section.fail(f"{name}: {errors} errors, {done.verdict}")
    note = "Each transport by each route: direct and staged outputs, head chunks, a small gather, a barrier."
    section.tables.append(Table("compute-sanitizer", ["run", "errors", "seconds"], rows, note))


# The JIT


def jit(context: Context, section: Section) -> None:
    """Build, load and launch the self-check, and time the way there."""
    done = context.run("jit self-check", _module("comm_core.jit"), 120)
    if done.code != 0:
        section.fail(f"python -m comm_core.jit: {done.verdict}")
        return
    found = json.loads(done.text[done.text.index("{") :])
    rows = [[key, value] for key, value in found.items() if not isinstance(value, dict)]
    rows += [[f"{key}: {inner}", value] for key in ("calls", "warm start") for inner, value in found[key].items()]
    section.tables.append(Table("Self-check module", ["", ""], rows))
    section.goals.append(
        Goal("a call of an empty entry from Python, on top of the launch",
             found["calls"]["on top of the launch, us"], _CALL_GOAL_US, "us")
    )  # fmt: skip


def build(context: Context, section: Section) -> None:
    """Time a first build and a warm start."""
    results = context.folder / "build.json"
    done = context.run("build", _module("gpu.bench_jit", str(results)), 150)
    found = _read_json(results)
    if done.code != 0 or found is None:
        section.fail(f"the build's timing: {done.verdict}")
        return
    whole, start = sum(found["cold"].values()), sum(found["warm"].values())
    rows = [[f"first build of {name}, s", round(seconds, 2)] for name, seconds in found["cold"].items()]
    rows += [[f"warm start, all modules: {name}, ms", round(value, 1)] for name, value in found["warm"].items()]
    section.tables.append(Table(f"All modules of comm-core for {';'.join(found['archs'])}", ["", ""], rows))
    section.goals += [
        Goal(
            "first build of all modules of comm-core on 2 cores, one architecture",
            round(whole, 2),
            _BUILD_GOAL_S,
            "s",
        ),
        Goal("warm start of all modules of comm-core", round(start, 1), _START_GOAL_MS, "ms"),
    ]


# Benchmarks


def bench(context: Context, section: Section) -> None:
    """Time barriers, calls and exchanges with all ranks on one GPU."""
    with mps.running(context.on_one_gpu().environment) as service:
        if not service.active:
            section.status = "skipped"
            section.why = [f"without MPS the times would be those of taking turns: {service.why}"]
            return
        _bench(replace(context, environment=service.environment), section, "shared")


def bench_links(context: Context, section: Section) -> None:
    """Time barriers, calls and exchanges with a GPU for each rank."""
    if context.gpus < 2:
        section.status, section.why = "skipped", ["there is one GPU"]
        return
    _bench(context, section, "links")


_COMMCTL = "from comm_core.cli.main import main; main()"


def _bench(context: Context, section: Section, where: str) -> None:
    quick = ["--quick"] if context.quick else []
    windows, ulysses = (context.folder / f"{name}-{where}.json" for name in ("bench-windows", "bench-ulysses"))
    command = _module("gpu.bench_windows", "--where", where, "--json", str(windows), *quick)
    done = context.run(f"bench, windows, {where}", command, 60 if context.quick else 120)
    found = _read_json(windows)
    if found is not None:
        add_windows(section, found, where == "shared")
    if done.code != 0:
        section.fail(f"the benchmark of windows: {done.verdict}")
    # Two ranks: what the goals are for, and what reports of different machines have in common.
    command = [sys.executable, "-c", _COMMCTL, "bench", "ulysses", "--where", where, "--ranks", "2"]
    # At its deadline it is interrupted, and writes what it has.
    done = context.run(
        f"bench, exchanges, {where}", [*command, "--json", str(ulysses), *quick], 90 if context.quick else 240, 20
    )
    found = _read_json(ulysses)
    if found is not None:
        bench_rows.add_exchanges(section, found)
    if done.code != 0 and (found is None or not found["errors"]):
        section.fail(f"commctl bench ulysses: {done.verdict}")
    _bench_allreduce(context, section, where)
    _bench_lowp(context, section, where)


def _bench_allreduce(context: Context, section: Section, where: str) -> None:
    """Time the all-reduce, two ranks."""
    results = context.folder / f"bench-allreduce-{where}.json"
    command = [sys.executable, "-c", _COMMCTL, "bench", "allreduce", "--where", where, "--ranks", "2"]
    command += ["--json", str(results), *(["--quick"] if context.quick else [])]
    done = context.run(f"bench, all-reduce, {where}", command, 60 if context.quick else 120, 20)
    found = _read_json(results)
    if found is not None:
        bench_rows.add_allreduce(section, found)
    if done.code != 0 and (found is None or not found["errors"]):
        section.fail(f"commctl bench allreduce: {done.verdict}")


def _bench_lowp(context: Context, section: Section, where: str) -> None:
    """Time the passes of low precision on one GPU, and its exchange between two ranks."""
    parts = (
        ("passes", [], bench_rows.add_lowp_passes),
        ("exchange", ["--where", where, "--ranks", "2"], bench_rows.add_lowp_exchange),
    )
    for name, words, add in parts:
        results = context.folder / f"bench-lowp-{name}-{where}.json"
        command = [sys.executable, "-c", _COMMCTL, "bench", "lowp", "--quick", *words, "--json", str(results)]
        done = context.run(f"bench, low precision, {name}, {where}", command, 60)
        found = _read_json(results)
        if found is not None:
            add(section, found)
        if done.code != 0:
            section.fail(f"commctl bench lowp, {name}: {done.verdict}")


def add_windows(section: Section, found: Mapping[str, Any], shared: bool) -> None:
    """Add what ``gpu.bench_windows`` found as tables and goals."""
    for name, error in found["errors"].items():
        section.fail(f"{name}: {error}")
    bench_rows.add(section, found, shared, barrier_goal_us=_BARRIER_GOAL_US, call_goal_us=_CALL_GOAL_US)


SECTIONS: Mapping[str, tuple[str, Callable[[Context, Section], None]]] = {
    "jit": ("JIT self-check", jit),
    "build": ("First build and warm start", build),
    "tests": ("Tests, all ranks on one GPU", tests),
    "links": ("Tests across GPUs", links),
    "kill": ("SIGKILL of a rank", kill),
    "checkpoint": ("The driver's own checkpoint", checkpoint),
    "sanitizer": ("compute-sanitizer", sanitizer),
    "bench": ("Benchmarks, all ranks on one GPU", bench),
    "bench-links": ("Benchmarks, a GPU for each rank", bench_links),
}
"""Name for ``--only`` -> title and function, in the order in which they run."""


def execute(name: str, context: Context) -> Section:
    """Run one part; whatever goes wrong in it is its failure and nobody else's."""
    title, function = SECTIONS[name]
    section = Section(name, title)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            function(context, section)
        except Exception as error:
            section.fail(f"{type(error).__name__}: {error}")
        return section
    section.fail("interrupted")
    return section
