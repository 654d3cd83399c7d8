"""Measure what this project promises, on a CPU: costs of import and start, the decision, and exchanges over gloo.

    python tools/dev.py bench                           everything, in less than a minute
    python tools/dev.py bench --only exchange overhead  some of it
    python tools/dev.py bench --json FILE               write the numbers as well

Every figure is a median. It stands beside its goal, or beside a floor that no implementation can be under; a missed
time is reported and no more, since the machine may be busy with other things. A count that must hold anywhere (the
tensors that a call allocates) is different: if it is missed, the exit code is 1.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from comm_core.cli import output
from comm_core.demo.ranks import Member, run_ranks
from comm_core.errors import CommError

PARTS = {
    "import": "Import, beside that of torch",
    "help": "commctl --help as a process",
    "front": "CPU time of a call's thread, without transport and launch",
    "resolve": "Decision (resolve_ulysses_backend), slowest rank",
    "exchange": "Exchange over gloo, Wan2.1 at 480p in bfloat16, slowest rank",
    "allocations": "Tensors that a call allocates, given out= and a workspace",
    "overhead": "CPU time of the thread that calls scatter_heads with 256 bytes",
}
"""What can be measured, and its title."""

RAW = "raw"
NOTES = {
    "front": "full checks: the same with an operand that is an nn.Parameter, whose geometry is never taken for known",
    "exchange": "raw: torch.distributed's all_to_all_single of as many bytes; floor: copying in memory what leaves a "
    "rank, on all ranks at once",
    "overhead": "raw: the same for torch.distributed's all_to_all_single of as many bytes",
}
"""What the columns of a part mean."""

_WORLD = 8
_AS_RANK = "--as-rank"
_TIMEOUT_S = 240.0

_IMPORT = """
import json, sys, time
import torch
t = time.perf_counter()
import comm_core
package = time.perf_counter() - t
comm_core.UlyssesCommunicator
print(json.dumps([package, time.perf_counter() - t]))
"""
_HELP = "from comm_core.cli.main import main; main()"


class Geometry(NamedTuple):
    """An attention layer of a model that people run, in bfloat16, over so many ranks."""

    name: str
    tokens: int
    heads: int
    head_dim: int
    ranks: int
    repeat: int


GEOMETRIES = (
    Geometry("1.3B, 1 frame", 1560, 12, 128, 2, 15),
    Geometry("1.3B, 1 frame", 1560, 12, 128, 4, 15),
    Geometry("1.3B, 81 frames", 32760, 12, 128, 4, 3),
    Geometry("14B, 21 frames", 9360, 40, 128, 8, 3),
)


@dataclass(frozen=True)
class Figure:
    """One measured number.

    Attributes:
        part: which of `PARTS`.
        name: of the figure.
        value: in `unit`.
        unit: ``"ms"``, ``"us"`` or empty.
        goal: the most that it may be, or None.
        hard: whether missing the goal fails the run.
        beside: what it is to be compared with, in the same unit.
    """

    part: str
    name: str
    value: float
    unit: str
    goal: float | None = None
    hard: bool = False
    beside: dict[str, float] = field(default_factory=dict[str, float])

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.goal is None else self.value <= self.goal


def exit_code(figures: Sequence[Figure]) -> int:
    """Return 1 if a goal that must hold anywhere is missed, else 0."""
    return int(any(figure.hard and figure.met is False for figure in figures))


def machine() -> dict[str, str]:
    """Return what the numbers were measured on; neither host names nor paths."""
    model = "unknown CPU"
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
            break
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "CPU": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.0f} GiB",
        "load before (1, 5, 15 min)": load,
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "comm-core": importlib.import_module("comm_core._version").__version__,
    }


# -- In this process, and in processes that only start ------------------------------------------------------------


def measure_import(repeat: int = 3) -> list[Figure]:
    """Return what ``import comm_core`` adds to ``import torch``, and what the first use of a class adds."""
    samples = [json.loads(_python(_IMPORT)) for _ in range(repeat)]
    package, use = (statistics.median(sample[i] for sample in samples) * 1e3 for i in (0, 1))
    return [
        Figure("import", "import comm_core", package, "ms", 50.0),
        Figure("import", "first use of UlyssesCommunicator", use - package, "ms"),
    ]


def measure_help(repeat: int = 5) -> list[Figure]:
    """Return how long ``commctl --help`` takes as a process, beside an interpreter that does nothing."""

    def seconds(*arguments: str) -> float:
        times: list[float] = []
        for _ in range(repeat):
            started = time.perf_counter()
            _python(*arguments)
            times.append(time.perf_counter() - started)
        return statistics.median(times) * 1e3

    bare = seconds("pass")
    return [Figure("help", "commctl --help", seconds(_HELP, "--help"), "ms", 500.0, beside={"bare Python": bare})]


def measure_front() -> list[Figure]:
    """Return what calls cost above a transport that moves nothing, and a session's above a launch of nothing."""
    import bench_front

    return [
        Figure("front", name, us, "us", goal, beside={} if full is None else {bench_front.FULL: full})
        for name, us, goal, full in bench_front.measure()
    ]


def _python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise CommError(f"python -c {arguments[0]!r} failed: {done.stderr.strip()}")
    return done.stdout


# -- Over ranks ---------------------------------------------------------------------------------------------------


def measure_ranks(parts: Sequence[str]) -> list[Figure]:
    """Return what is measured over ranks: 8 processes, in groups of 2, 4 and 8."""
    environment = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, str(Path(__file__).resolve()), _AS_RANK]
    # Overheads and allocations of two ranks don't need eight.
    world = _WORLD if {"resolve", "exchange"} & set(parts) else 2
    results: list[Any] = run_ranks(
        command, world, {"parts": list(parts)}, timeout_s=_TIMEOUT_S, environment=environment
    )
    figures: list[Figure] = []
    if "resolve" in parts:
        for size in (2, 4, 8):
            value = slowest(results, f"resolve {size}") * 1e3
            figures.append(Figure("resolve", f"{size} ranks", value, "ms", 1000.0 if size == 8 else None))
    if "exchange" in parts:
        for number, geometry in enumerate(GEOMETRIES):
            figures += _exchange_figures(results, number, geometry)
    if "allocations" in parts:
        for name, count in results[0]["allocations"].items():
            most = max(count, results[1]["allocations"][name])
            if name == "control":
                # An instrument that sees nothing would make every count a good one.
                if most < 1:
                    raise CommError("the profiler counted no allocation in a call that makes one")
                continue
            figures.append(Figure("allocations", name, most, "", 0.0, hard=True))
    if "overhead" in parts:
        raw = slowest(results, "bare 2") * 1e6
        value = slowest(results, "call 2") * 1e6
        figures.append(Figure("overhead", "2 ranks", value, "us", beside={RAW: raw}))
        value = slowest(results, "call 1") * 1e6
        figures.append(Figure("overhead", "1 rank, nothing is exchanged", value, "us"))
    return figures


def slowest(results: Sequence[dict[str, Any]], name: str) -> float:
    """Return the median over repeats of the slowest rank's seconds."""
    samples = [result[name] for result in results if name in result]
    return statistics.median(max(times) for times in zip(*samples, strict=True))


def _exchange_figures(results: Sequence[dict[str, Any]], number: int, geometry: Geometry) -> list[Figure]:
    raw = slowest(results, f"raw {number}")
    copy = slowest(results, f"copy {number}")
    figures: list[Figure] = []
    for operation in ("scatter_heads", "gather_heads"):
        value = slowest(results, f"{operation} {number}")
        name = f"{geometry.name}, {geometry.ranks} ranks: {operation}"
        beside = {RAW: raw * 1e3, "floor": copy * 1e3}
        figures.append(Figure("exchange", name, value * 1e3, "ms", beside=beside))
    return figures


def rank_main(member: Member) -> Any:
    """Measure as one of the ranks; return the seconds of every repeat by name."""
    import torch

    torch.set_num_threads(1)
    dist: Any = importlib.import_module("torch.distributed")
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=member.store(60.0), rank=member.rank, world_size=member.size, timeout=timeout
    )
    groups = {size: dist.new_group(list(range(size))) for size in (1, 2, 4, 8) if size <= member.size}
    bench = _RankBench(member, dist, groups)
    with torch.inference_mode():
        for part in member.arguments["parts"]:
            member.tell("progress", at=part)
            getattr(bench, part)()
    dist.barrier()
    dist.destroy_process_group()
    return bench.result


class _RankBench:
    """The measurements of one rank."""

    def __init__(self, member: Member, dist: Any, groups: dict[int, Any]) -> None:
        self.member, self.dist, self.groups = member, dist, groups
        self.result: dict[str, Any] = {}

    def _time(
        self,
        name: str,
        group: Any,
        call: Callable[[], object],
        repeat: int,
        inner: int = 1,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Time `call`, all ranks of `group` together; the first one is for warming up."""
        times: list[float] = []
        for _ in range(repeat + 1):
            self.dist.barrier(group=group)
            started = clock()
            for _ in range(inner):
                call()
            times.append((clock() - started) / inner)
        self.result[name] = times[1:]

    def resolve(self) -> None:
        from comm_core.ulysses.decision import resolve_ulysses_backend

        for size in (2, 4, 8):
            if self.member.rank < size:
                group = self.groups[size]
                self._time(f"resolve {size}", group, lambda g=group: resolve_ulysses_backend("auto", g, "cpu"), 5)
            self.dist.barrier()

    def exchange(self) -> None:
        for number, geometry in enumerate(GEOMETRIES):
            if self.member.rank < geometry.ranks:
                self._geometry(number, geometry)
            self.dist.barrier()

    def _geometry(self, number: int, geometry: Geometry) -> None:
        import torch

        from comm_core.ulysses.communicator import UlyssesCommunicator

        _, tokens, heads, dim, ranks, repeat = geometry
        group = self.groups[ranks]
        x = torch.ones(1, tokens // ranks, heads, dim, dtype=torch.bfloat16)
        nbytes = x.numel() * 2
        with UlyssesCommunicator(group, max_bytes=nbytes, dtype=x.dtype, device="cpu") as comm:
            workspace = comm.create_workspace()
            y = comm.allocate_output(x, "scatter_heads")
            z = comm.allocate_output(y, "gather_heads")
            self._time(
                f"scatter_heads {number}", group, lambda: comm.scatter_heads(x, out=y, workspace=workspace), repeat
            )
            self._time(
                f"gather_heads {number}", group, lambda: comm.gather_heads(y, out=z, workspace=workspace), repeat
            )
            source, target = workspace.send_buffer[: x.numel()], workspace.recv_buffer[: x.numel()]
            self._time(
                f"raw {number}", group, lambda: self.dist.all_to_all_single(target, source, group=group), repeat
            )
            # What leaves a rank must at the least be read and written once.
            remote = x.numel() * (ranks - 1) // ranks
            self._time(f"copy {number}", group, lambda: target[:remote].copy_(source[:remote]), repeat)

    def allocations(self) -> None:
        if self.member.rank < 2:
            self.result["allocations"] = self._count()
        self.dist.barrier()

    def _count(self) -> dict[str, int]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        from comm_core.ulysses.communicator import UlyssesCommunicator

        with UlyssesCommunicator(self.groups[2], max_bytes=1 << 16, dtype=torch.bfloat16, device="cpu") as comm:
            workspace = comm.create_workspace()
            x = torch.ones(1, 8, 4, 16, dtype=torch.bfloat16)
            y = comm.allocate_output(x, "scatter_heads")
            z = comm.allocate_output(y, "gather_heads")
            chunks = torch.ones(1, 1, 2, 64, dtype=torch.bfloat16)
            received = comm.allocate_output(chunks, "exchange_chunks")
            fused = torch.empty(1, 16, 1, 48, dtype=torch.bfloat16)
            calls: dict[str, Callable[[], object]] = {
                "scatter_heads": lambda: comm.scatter_heads(x, out=y, workspace=workspace),
                "gather_heads": lambda: comm.gather_heads(y, out=z, workspace=workspace),
                "exchange_chunks": lambda: comm.exchange_chunks(chunks, out=received),
                "scatter_qkv_head_chunk": lambda: comm.scatter_qkv_head_chunk(
                    x, x, x, head_offset=0, head_count=1, out=fused, workspace=workspace
                ),
                "gather_output_head_chunk": lambda: comm.gather_output_head_chunk(
                    y[:, :, :1], local_heads=2, head_offset=0, out=z, workspace=workspace
                ),
                "control": lambda: comm.scatter_heads(x),
            }
            counts: dict[str, int] = {}
            for name, call in calls.items():
                call()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                        call()
                events: Any = record.events()
                counts[name] = sum(event.cpu_memory_usage > 0 for event in events)
        return counts

    def overhead(self) -> None:
        for size in (2, 1):
            if self.member.rank < size:
                self._overhead(self.groups[size], size)
            self.dist.barrier()

    def _overhead(self, group: Any, size: int) -> None:
        import torch

        from comm_core.ulysses.communicator import UlyssesCommunicator

        # Processor time: most of the wall time of so small an exchange is two processes waking each other.
        clock = time.thread_time
        x = torch.ones(1, 4, 2, 16, dtype=torch.bfloat16)
        with UlyssesCommunicator(group, max_bytes=x.numel() * 2, dtype=x.dtype, device="cpu") as comm:
            workspace = comm.create_workspace()
            y = comm.allocate_output(x, "scatter_heads")
            source, target = workspace.send_buffer, workspace.recv_buffer
            self._time(
                f"call {size}", group, lambda: comm.scatter_heads(x, out=y, workspace=workspace), 9, 100, clock
            )
            self._time(
                f"bare {size}", group, lambda: self.dist.all_to_all_single(target, source, group=group), 9, 100, clock
            )


# -- Report -------------------------------------------------------------------------------------------------------


def show(figures: Sequence[Figure], facts: dict[str, str]) -> None:
    """Print the figures beside their goals."""
    out = output.console()
    output.columns("Machine", facts.items(), out)
    for part, title in PARTS.items():
        own = [figure for figure in figures if figure.part == part]
        beside = list(dict.fromkeys(name for figure in own for name in figure.beside))
        with_goal = any(figure.goal is not None for figure in own)
        table = output.Sheet(
            title, "", "median", *(("goal", "") if with_goal else ()), *beside, fixed=("median", "goal")
        )
        for figure in own:
            goal = "-" if figure.goal is None else _number(figure.goal, figure.unit)
            verdict = {None: "", True: "met", False: "MISSED"}[figure.met]
            others = [_number(figure.beside[name], figure.unit) if name in figure.beside else "-" for name in beside]
            table.add(
                figure.name, _number(figure.value, figure.unit), *((goal, verdict) if with_goal else ()), *others
            )
        table.print(out)
        if own and part in NOTES:
            output.note(NOTES[part], out)
    missed = [figure.name for figure in figures if figure.met is False and not figure.hard]
    if missed:
        out.print(f"Times that missed their goal (is this machine busy?): {'; '.join(missed)}")
    if exit_code(figures):
        out.print("A count that must hold anywhere is missed.", style="bold")


def _number(value: float, unit: str) -> str:
    digits = f"{value:.0f}" if value >= 100 or unit == "" else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"{digits} {unit}".strip()


def main(argv: Sequence[str]) -> int:
    """Measure and report; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE as well")
    options = parser.parse_args(argv)
    facts = machine()
    began = time.monotonic()
    figures: list[Figure] = []
    try:
        if "import" in options.only:
            figures += measure_import()
        if "help" in options.only:
            figures += measure_help()
        if "front" in options.only:
            figures += measure_front()
        over_ranks = [part for part in list(PARTS)[3:] if part in options.only]
        if over_ranks:
            figures += measure_ranks(over_ranks)
    except CommError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    show(figures, facts)
    print(f"({time.monotonic() - began:.0f} s)")
    if options.json is not None:
        document = {
            "machine": facts,
            "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return exit_code(figures)


if __name__ == "__main__":
    if sys.argv[1:2] == [_AS_RANK]:
        Member.run(rank_main, sys.argv[-1])
    sys.exit(main(sys.argv[1:]))
