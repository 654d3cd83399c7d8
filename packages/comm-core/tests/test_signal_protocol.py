"""signal.cuh, barrier.cuh and allreduce.cuh: the code itself, with ranks as threads (ThreadSanitizer), and by nvcc.

The programs are under ``protocol/``. What a run on one processor cannot show is explored as a model, in
test_signal_model.py and test_lamport_model.py.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import comm_core

HERE = Path(__file__).parent / "protocol"
INCLUDE = Path(comm_core.__file__).parent / "include"
CORRUPT = 3
"""The programs' exit code for a wrong byte (world.h)."""
RACE = 66
"""ThreadSanitizer's."""


def missing(what: str) -> None:
    """Skip where a tool is not there; but in CI a check that doesn't run would look like one that passes."""
    if os.environ.get("CI", "").lower() in ("true", "1"):
        pytest.fail(f"{what}; CI must have it")
    pytest.skip(what)


@dataclass(frozen=True)
class Checked:
    """A program under ThreadSanitizer."""

    command: Sequence[str]

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run it until the first report."""
        for _ in range(5):
            done = subprocess.run(
                [*self.command, *arguments],
                env={**os.environ, "TSAN_OPTIONS": f"halt_on_error=1 exitcode={RACE}"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=100,
                check=False,
            )
            # It has not started (see `layout`), and where addresses are random the next one may.
            if "FATAL: ThreadSanitizer: unexpected memory mapping" not in done.stdout:
                return done
        pytest.fail(f"ThreadSanitizer does not start here: {done.stdout.strip()[:200]}")

    def passes(self, *arguments: str) -> None:
        """Run it and expect that nothing is found."""
        done = self(*arguments)
        assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout

    def is_caught(self, *arguments: str) -> str:
        """Run it and expect that something is found: a data race or wrong data."""
        done = self(*arguments)
        assert done.returncode in (RACE, CORRUPT), f"exit code {done.returncode}\n{done.stdout}"
        assert ("ThreadSanitizer: data race" if done.returncode == RACE else "corrupt:") in done.stdout
        return done.stdout


Build = Callable[..., Checked]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compile a program, with macros, once."""
    if shutil.which("g++") is None:
        missing("g++ is not installed")
    folder = tmp_path_factory.mktemp("protocol")
    programs: dict[tuple[str, ...], Checked] = {}

    def checked(source: str, *macros: str) -> Checked:
        if (source, *macros) not in programs:
            binary = folder / f"{len(programs)}_{source}"
            flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror"]
            defines = [f"-D{macro}" for macro in macros]
            done = subprocess.run(
                ["g++", *flags, *defines, f"-I{INCLUDE}", str(HERE / f"{source}.cpp"), "-o", str(binary)],
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            if done.returncode != 0 and "tsan" in done.stderr.lower():
                missing(f"g++ has no ThreadSanitizer: {done.stderr.strip().splitlines()[-1]}")
            assert done.returncode == 0, done.stderr
            programs[(source, *macros)] = Checked([*layout(binary), str(binary)])
        return programs[(source, *macros)]

    return checked


def layout(binary: Path) -> list[str]:
    """What to put before a command so that ThreadSanitizer finds its part of the address space free.

    Where the kernel randomizes more than the library was made for, it refuses to start, now and then or always.
    """
    fixed = ["setarch", platform.machine(), "-R"]
    for prefix in ([], fixed) if shutil.which("setarch") is None else (fixed, []):
        done = subprocess.run([*prefix, str(binary)], capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 5:  # the programs' answer to no arguments
            return list(prefix)
    missing(f"programs with ThreadSanitizer don't start here: {done.stderr.strip()[:200]}")
    raise AssertionError


def wrapping(rounds: int) -> str:
    """A start from which epochs pass 2^32 in the middle of the run."""
    return f"start={2**32 - rounds // 2}"


@pytest.mark.parametrize(
    ("shape", "rounds"),
    [
        ("ranks=2", 30_000),
        ("ranks=2 blocks=3", 3_000),
        ("ranks=3", 10_000),
        ("ranks=4 blocks=2", 1_000),
        ("ranks=4 blocks=2 spread=1", 500),
        ("ranks=5", 3_000),
        ("ranks=6", 2_000),
        ("ranks=8", 2_000),
        ("ranks=8 spread=1", 50),
    ],
)
def test_every_byte_of_an_exchange_is_that_epochs(build: Build, shape: str, rounds: int) -> None:
    """With ranks out of step, one or more blocks a rank, receivers that change their mind, and epochs that wrap."""
    build("rounds").passes("exchange", *shape.split(), f"rounds={rounds}", wrapping(rounds))


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 30_000), (3, 10_000), (5, 5_000), (8, 5_000)])
def test_what_was_written_before_a_barrier_is_there_after_it(build: Build, ranks: int, rounds: int) -> None:
    """On all ranks, round after round, across the wrap."""
    build("rounds").passes("barrier", f"ranks={ranks}", f"rounds={rounds}", wrapping(rounds))


@pytest.mark.parametrize(("shape", "rounds"), [("ranks=2 blocks=2", 4_000), ("ranks=3", 4_000), ("ranks=8", 1_000)])
def test_sums_whose_data_is_its_own_flag_are_right(build: Build, shape: str, rounds: int) -> None:
    """In every round, with -0.0 among the operands, types, sizes and algorithms that change, and epochs that wrap."""
    build("rounds").passes("allreduce", *shape.split(), f"rounds={rounds}", wrapping(rounds))


@pytest.mark.parametrize(
    ("macro", "arguments"),
    [
        ("COMM_RELEASE_ORDER=__ATOMIC_RELAXED", "exchange ranks=3"),
        ("COMM_RELEASE_ORDER=__ATOMIC_RELAXED", "barrier ranks=2"),
        ("COMM_ACQUIRE_ORDER=__ATOMIC_RELAXED", "exchange ranks=3"),
        ("COMM_ACQUIRE_ORDER=__ATOMIC_RELAXED", "barrier ranks=2"),
        ("COMM_COUNT_ORDER=__ATOMIC_RELAXED", "exchange ranks=2 blocks=2"),
    ],
)
def test_a_weakened_order_is_found(build: Build, macro: str, arguments: str) -> None:
    """So that the runs above mean something. On this processor the data may still be right; the race is reported."""
    assert "ThreadSanitizer: data race" in build("rounds", macro).is_caught(*arguments.split(), "rounds=2000")


@pytest.mark.parametrize(
    "arguments", ["exchange ranks=3 omit=open", "exchange ranks=3 omit=close", "barrier ranks=3 omit=wait"]
)
def test_a_missing_wait_is_found(build: Build, arguments: str) -> None:
    """The permission to write, the wait for the data, and the barrier itself."""
    build("rounds").is_caught(*arguments.split(), "rounds=2000")


@pytest.mark.parametrize(
    ("ranks", "victims", "shape"),
    [
        (2, (0, 1), "spread=1"),
        (3, (0, 1, 2), "spread=1"),
        (4, (0, 3), "spread=1"),
        (5, (2,), "spread=0"),
        (6, (5,), "spread=0"),
        (7, (0,), "spread=0"),
        (8, (6,), "spread=1"),
    ],
)
def test_a_rank_that_stops_is_named_and_writes_nothing_when_it_wakes(
    build: Build, ranks: int, victims: Sequence[int], shape: str
) -> None:
    """At every point of an exchange: the others all end, their records name it, and it finds the abort word."""
    for victim in victims:
        build("stalls").passes("exchange", f"ranks={ranks}", f"victim={victim}", shape)


@pytest.mark.parametrize("point", [3, 4], ids=["before it stores", "between two chunks"])
def test_a_late_writer_that_does_not_look_is_found(build: Build, point: int) -> None:
    """So that the test above would see it."""
    output = build("stalls").is_caught("exchange", "ranks=3", "victim=1", f"point={point}", "omit=look")
    assert "wrote into memory of ranks that had left" in output or "data race" in output


@pytest.mark.parametrize(("ranks", "victim"), [(2, 1), (4, 0), (8, 3)])
def test_a_rank_that_misses_a_barrier_is_named_and_does_not_arrive_later(
    build: Build, ranks: int, victim: int
) -> None:
    """A barrier that has failed for one has failed for the late rank too."""
    build("stalls").passes("barrier", f"ranks={ranks}", f"victim={victim}")


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_that_stops_in_an_all_reduce_is_named(build: Build, ranks: int) -> None:
    """Each in turn, in one shot and in two: data as flag ends like any other wait, and what did not arrive is NaN.

    Never a rank that only waits itself, nor the one that waits.
    """
    for victim in range(ranks):
        build("stalls").passes("allreduce", f"ranks={ranks}", f"victim={victim}")


def test_single_moments(build: Build) -> None:
    """Reached while the clock is read; a barrier after 2^31 exchanges; two who give up; whom to name."""
    build("stalls").passes("moments")


def test_a_deadline_is_kept_by_the_real_clock(build: Build) -> None:
    """Not before it, and soon after."""
    build("rounds").passes("deadline")


def test_the_device_code_has_the_operations_it_promises(tmp_path: Path) -> None:
    """The headers compile without a warning or a spill, and order by operations only: no fence, nothing volatile."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        missing("nvcc is not installed")
    assert nvcc is not None
    flags = [
        "-std=c++17",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-Werror",
        "all-warnings",
        "-Xcompiler",
        "-Wall",
        "-Xptxas",
        "-v",
    ]
    done = subprocess.run(
        [nvcc, *flags, f"-I{INCLUDE}", "-keep", "-keep-dir", str(tmp_path), "-c", str(HERE / "device.cu")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert set(re.findall(r"(\d+) bytes spill", done.stderr)) == {"0"}, done.stderr
    assert set(re.findall(r"(\d+) bytes stack frame", done.stderr)) == {"0"}, done.stderr
    (ptx,) = tmp_path.glob("*.ptx")
    operations = re.findall(r"\b(?:ld|st|atom|red|fence|membar)\.[a-z0-9_.:]+", ptx.read_text())
    ordering = re.compile(r"fence|membar|\.volatile|\.(?:cta|cluster|gpu|sys)\b")
    found = {operation for operation in operations if ordering.search(operation)}
    assert found == {
        "atom.relaxed.gpu.global.add.u32",
        "ld.acquire.sys.global.u32",
        "ld.relaxed.sys.global.u32",
        "ld.acquire.sys.global.b128",
        "ld.relaxed.sys.global.v4.u32",
        "st.release.sys.global.u32",
        "st.relaxed.sys.global.u32",
        "st.relaxed.sys.global.b128",
        "st.relaxed.sys.global.v4.u32",
        "atom.acq_rel.gpu.global.add.u32",
        "atom.acq_rel.sys.global.cas.b32",
    }
