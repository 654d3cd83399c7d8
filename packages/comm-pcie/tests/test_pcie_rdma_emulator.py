"""The verbs emulator is what it says: programs of the real libraries run on it, and it refuses what a NIC refuses."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator

PROGRAMS = Path(__file__).with_name("verbs_emulator") / "programs"
CASES = re.findall(r'^\s*\{"(\w+)",', (PROGRAMS / "conformance.cpp").read_text(encoding="utf-8"), re.MULTILINE)
MESSAGE = 1 << 20
"""Largest message of the NICs here, as ``conformance.cpp`` has it."""
SYSTEM_PYTHON = "/usr/bin/python3"
SECONDS = 60


@pytest.fixture(scope="module")
def program(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The conformance program, linked with the real libraries and not with the emulator."""
    path = tmp_path_factory.mktemp("programs") / "conformance"
    command = ["g++", "-std=c++17", "-O1", *emulator.WARNINGS, str(PROGRAMS / "conformance.cpp"), "-o", str(path)]
    subprocess.run([*command, "-libverbs", "-lmlx5"], check=True, timeout=120)
    return path


@pytest.fixture
def world(library: Path, tmp_path: Path) -> Iterator[Any]:
    with emulator.World(library, tmp_path / "fabric", emulator.nics(2, max_message=MESSAGE)) as made:
        yield made


def preloaded(library: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # Debian's interpreter must not see the packages of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment.update(variables, LD_PRELOAD=str(library))
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)


@pytest.mark.parametrize("case", CASES)
def test_a_program_of_the_real_libraries(program: Path, library: Path, world: Any, case: str) -> None:
    """What it may do works to the byte, and what it must not do ends with the NIC's status and state.

    ``band_of_65536_is_cut_to_16_bits``: wrong bytes, and every completion a success. That is what the engine's check
    of the pitch is for.
    """
    done = preloaded(library, str(program), case)
    assert (done.returncode, done.stdout) == (0, "ok\n"), f"{done.stdout}{done.stderr}{world.problem()}"
    world.expect_leaks = True  # the program ends with what it has


def test_memory_of_a_device_goes_through_its_driver(program: Path, library: Path, world: Any, tmp_path: Path) -> None:
    """As on a GPU machine, with a driver that has host memory for a device's: a band is one copy with a pitch."""
    fake = tmp_path / "libfake_cuda.so"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", *emulator.WARNINGS]
    subprocess.run(["g++", *flags, "-o", str(fake), str(PROGRAMS / "fake_cuda.cpp")], check=True, timeout=SECONDS)
    done = preloaded(library, str(program), "band_small", VERBS_EMULATOR_CUDA=str(fake))
    # Two ends that are described in two ways each, 64 rows.
    report = "copies 0 2d 4 rows 256 synchronized 4 open 0\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", report), world.problem()
    world.expect_leaks = True


def test_every_case_is_run(program: Path, library: Path) -> None:
    listed = preloaded(library, str(program), "list").stdout.split()
    assert len(listed) > 20 and sorted(listed) == sorted(CASES)


def test_without_the_emulator_there_are_no_devices(program: Path) -> None:
    """The program is linked with the real libraries: on a machine without a NIC its first check fails."""
    if Path("/sys/class/infiniband").is_dir() and any(Path("/sys/class/infiniband").iterdir()):
        pytest.skip("this machine has RDMA devices")
    done = subprocess.run([str(program), "band_small"], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 1 and "devices" in done.stdout


def test_without_a_fabric_the_emulator_has_no_devices(program: Path, library: Path) -> None:
    assert "VERBS_EMULATOR" not in os.environ
    done = preloaded(library, str(program), "band_small")
    assert done.returncode == 1 and "devices" in done.stdout


def require_pyverbs() -> None:
    """Skip the test where Debian's pyverbs is missing; in CI (``CI=true``) fail it."""
    command = [SYSTEM_PYTHON, "-c", "import pyverbs.providers.mlx5.mlx5dv_mkey, pyverbs.qp"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS)
        problem = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    except OSError as error:
        problem = [str(error)]
    if not problem:
        return
    text = f"{SYSTEM_PYTHON} has no pyverbs ({problem[0]}): apt-get install python3-pyverbs"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"CI must look at the emulator with pyverbs: {text}")
    pytest.skip(text)


def test_pyverbs_can_look_at_it(library: Path, world: Any) -> None:
    """A second, independent program: it reads port and GIDs, describes a band, writes it and finds its bytes."""
    require_pyverbs()
    done = preloaded(library, SYSTEM_PYTHON, str(PROGRAMS / "look.py"))
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen == {
        "devices": ["mlx5_0", "mlx5_1"],
        "port": [emulator.ACTIVE, emulator.ETHERNET, 5, MESSAGE],
        "gids": [[0, emulator.ROCE_V2, 2, "0000:0000:0000:0000:0000:ffff:0a00:0001"]],
        "umr": [0, 135, 7],
        "sent": [0, 1, 9],
        "received": [0, 129, 8],
        "equal": True,
        "state": 3,
        "refused": False,
    }
    assert world.counters()["written_bytes"] == 32 * 48


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("explode verb=write", "no action"),
        ("fail", "needs verb"),
        ("fail verb=fly value=5", "no verb"),
        ("fail verb=reg_mr", "can't fire"),
        ("fail verb=reg_mr nic=mlx5_7 value=5", "no NIC"),
        ("fail verb=reg_mr value=5 color=red", "no selector"),
        ("fail verb=reg_mr value", "no '='"),
        ("delay verb=write value=0", "can't fire"),
        ("drop verb=open", "can't fire"),
        ("late verb=umr value=8", "can't fire"),
        ("late verb=write_imm value=0", "can't fire"),
        ("late verb=write_imm value=65", "can't fire"),
        ("not_ready verb=write", "can't fire"),
        ("status verb=poll value=5", "can't fire"),
        ("fail verb=reg_mr value=5 peer=mlx5_1", "can't fire"),
    ],
)
def test_a_rule_that_can_not_fire_is_refused(world: Any, text: str, why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        world.rule(text)


def test_a_rule_that_did_not_fire_fails_the_test(library: Path, tmp_path: Path) -> None:
    """A fault that was not injected proves nothing."""
    made = emulator.World(library, tmp_path / "fabric", emulator.nics(1))
    made.rule("fail verb=open value=5 count=2")
    with pytest.raises(AssertionError, match=r"did not fire: fail verb=open .*fired 0 times"):
        made.close()


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_engines_and_the_emulator_under_threads(library: Path, tmp_path: Path, sanitizer: str) -> None:
    """Four ranks, events, somebody who looks and somebody who aborts: no race, no memory that is not theirs."""
    package = Path(str(resources.files("comm_pcie")))
    engine = [package / "csrc" / f"rdma_{name}.cpp" for name in ("engine", "exchange", "verbs")]
    # What is compiled fast runs slowly, and there is little to run.
    flags = ["g++", "-std=c++17", "-O0", "-g1", "-pthread", f"-fsanitize={sanitizer}", *emulator.WARNINGS]
    includes = [f"-I{resources.files(name) / 'include'}" for name in ("comm_core", "comm_pcie")]
    runs = []
    for name, sources, more in (
        ("libemulator.so", sorted(emulator.SOURCES.glob("*.cpp")), ["-fPIC", "-shared"]),
        ("threads", [*engine, PROGRAMS / "threads.cpp"], includes),
    ):
        # As one file: most of the time would go into the same headers again.
        whole = tmp_path / f"{name}.cpp"
        whole.write_text("".join(f'#include "{path}"\n' for path in sources), encoding="utf-8")
        runs.append(subprocess.Popen([*flags, *more, "-o", str(tmp_path / name), str(whole), "-ldl"]))
    assert [run.wait(200) for run in runs] == [0, 0]
    with emulator.World(library, tmp_path / "fabric", emulator.nics(4)) as world:
        # ThreadSanitizer does not start where the kernel randomizes more than it was made for.
        fixed = ["setarch", platform.machine(), "-R"] if shutil.which("setarch") else []
        command = [*fixed, str(tmp_path / "threads"), str(tmp_path / "libemulator.so")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")
        assert world.counters()["executed_writes"] >= 4 * 3 * 40 and world.counters()["events"] > 0


def test_nothing_of_it_is_installed() -> None:
    """It lies in the tests, and the wheel takes only ``src``."""
    import comm_pcie

    package = Path(comm_pcie.__file__).parent
    assert not [path for path in package.rglob("*") if "emulator" in path.name]
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'packages = ["src/comm_pcie"]' in text
