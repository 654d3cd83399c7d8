"""The pytest plugin, seen from outside: each case is a run of pytest in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAD = """
import ctypes, os, signal, time
import pytest
"""


@pytest.fixture
def run(tmp_path):
    """Run pytest with the plugin on a test file; return its exit code and output."""

    def call(body, *options, conftest="", **environment):
        (tmp_path / "test_case.py").write_text(HEAD + body)
        (tmp_path / "conftest.py").write_text(conftest)
        paths = [path for path in sys.path if path]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("COMM_", "PYTEST"))}
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", str(tmp_path)),
                *(
                    "-p",
                    "comm_core.testing.plugin",
                    "-p",
                    "no:cacheprovider",
                    "--import-mode=importlib",
                    "-W",
                    "error",
                ),
                *("--strict-markers", "-rA", *options, str(tmp_path / "test_case.py")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**clean, "PYTHONPATH": os.pathsep.join(paths), **environment},
            timeout=115,
            text=True,
        )
        return done.returncode, done.stdout

    return call


SLOW = """
@pytest.mark.deadline(0.3)
def test_slow():
    while True:
        try:
            here_it_hangs()
        except Exception:
            pass

def here_it_hangs():
    time.sleep(60)

def test_next():
    pass
"""


def test_a_test_that_hangs_fails_with_its_stack_and_the_next_one_runs(run):
    code, output = run(SLOW)
    assert code == 1
    assert "1 failed, 1 passed" in output
    assert "the call of test_case.py::test_slow took more than 0.3 s" in output
    assert "in here_it_hangs" in output


def test_set_up_and_teardown_have_a_deadline_too(run):
    body = """
@pytest.fixture
def slow_to_start():
    time.sleep(60)

@pytest.fixture
def slow_to_end():
    yield
    time.sleep(60)

def test_start(slow_to_start):
    pass

def test_end(slow_to_end):
    pass
"""
    code, output = run(body, "--comm-deadline=0.3")
    assert code == 1
    assert "1 passed, 2 errors" in output
    assert "the set-up of test_case.py::test_start" in output and "the teardown of test_case.py::test_end" in output


def test_a_hang_that_python_can_not_interrupt_ends_the_run_with_all_stacks(run):
    body = """
def test_stuck():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(60)  # holds the interpreter's lock
"""
    conftest = "from comm_core.testing import plugin\nplugin._LAST_RESORT_S = 0.5\n"
    code, output = run(body, "--comm-deadline=0.3", conftest=conftest)
    assert code == 1
    assert "Timeout (" in output and "in test_stuck" in output
    assert "passed" not in output


def test_a_deadline_that_somebody_else_set_is_left_alone(run):
    body = """
@pytest.fixture(autouse=True)
def own_timer():
    def ring(*_):
        pytest.fail("the other timer")
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)

@pytest.mark.deadline(0.1)
def test_slow():
    time.sleep(60)
"""
    code, output = run(body)
    assert code == 1
    assert "the other timer" in output and "took more than" not in output


def test_the_environment_of_the_caller_does_not_reach_tests_and_installed_plugins_are_kept_out(run):
    body = """
def names():
    return {name: value for name, value in os.environ.items() if name.startswith("COMM_")}

def test_isolated():
    assert names() == {"COMM_BLOCK_PLUGINS": "*"}

@pytest.mark.installed_plugins
def test_with_plugins():
    assert names() == {}
"""
    conftest = """
import os
def pytest_unconfigure(config):
    pass
import atexit
atexit.register(lambda: print("at exit:", os.environ["COMM_CHECK"]))
"""
    code, output = run(body, conftest=conftest, COMM_CHECK="1", COMM_TIMEOUT_S="3")
    assert code == 0, output
    assert "comm: removed from the environment: COMM_CHECK, COMM_TIMEOUT_S" in output
    assert "at exit: 1" in output


RANKS = """
from comm_core.testing.ranks import RankPool

@pytest.fixture(scope="session")
def ranks():
    with RankPool(2) as pool:
        yield pool

def block(group):
    if group.rank() == 1:
        inside()

def inside():
    time.sleep(60)

def environment(group):
    return os.environ.get("COMM_BLOCK_PLUGINS")

def test_first(ranks):
    ranks.start()

@pytest.mark.deadline(3)
def test_slow(ranks):
    ranks.run(block, timeout_s=60)

def test_next(ranks, monkeypatch):
    assert ranks.starts == 1 and not ranks.running
    assert ranks.run(environment) == ["*", "*"]
    monkeypatch.setenv("COMM_BLOCK_PLUGINS", "a")
    assert ranks.run(environment) == ["a", "a"]
    assert ranks.starts == 2
"""


def test_a_deadline_in_a_run_shows_the_ranks_and_the_next_test_gets_new_ones(run):
    code, output = run(RANKS)
    assert code == 1
    assert "1 failed, 2 passed" in output
    assert "[rank 1] stacks when Failed interrupted the run" in output and "in inside" in output


def test_a_process_that_does_not_end_makes_the_session_fail(run):
    body = """
import threading

def leave_a_thread(group):
    threading.Thread(target=time.sleep, args=(60,), name="left").start()

def test_fine(ranks):
    ranks.run(leave_a_thread, ranks=1)
"""
    conftest = """
from comm_core.testing import plugin, ranks
plugin.RANKS = 1
ranks.RankPool.close.__defaults__ = (1.0,)
"""
    code, output = run(body, conftest=conftest)
    assert code == 1
    assert "1 passed, 1 error" in output
    assert "ranks did not end in order" in output
