"""The pytest plugin of the testing kit: ``pytest -p comm_core.testing.plugin``.

It needs pytest alone. What it does:

- The fixture `ranks`: one `RankPool` of eight ranks for the whole session, started by the first test that uses it;
  smaller cases run on sub-groups. At the end every process is joined with a deadline, killed if it has to be, and a
  process that did not end by itself is an error.
- A hard deadline for the set-up, the call and the teardown of every test (``comm_deadline_s`` in the ini file,
  ``--comm-deadline``, or ``@pytest.mark.deadline(seconds)``; default 120 seconds, 0 is none). At the deadline all
  stacks are printed and the test fails; where it hangs in C code, all stacks are printed and the run ends. Where
  another plugin (pytest-timeout, or pytest's own ``faulthandler_timeout``) already guards the test, that one is used.
- ``COMM_*`` variables of the caller's shell are removed for the session, so that they can't change what is tested.
- Installed transport plugins are kept out of every test that is not marked ``installed_plugins``.
"""

from __future__ import annotations

import faulthandler
import importlib.util
import os
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from comm_core.errors import ArgumentValueError
from comm_core.testing.ranks import RankPool

__all__ = ["isolated_plugins", "ranks", "shell_environment"]

RANKS = 8
"""Ranks of the session's pool."""

_DEFAULT_DEADLINE_S = 120.0
# Between failing a test from Python and giving up on the process: pools are killed and stacks collected in it.
_LAST_RESORT_S = 60.0
_PREFIX = "COMM_"
_BLOCK = "COMM_BLOCK_PLUGINS"

_removed = pytest.StashKey[dict[str, str]]()
_stderr = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the deadline's option and ini value."""
    text = "seconds that a test's set-up, call and teardown may each take (0: no deadline)"
    parser.addini("comm_deadline_s", text, default=str(_DEFAULT_DEADLINE_S))
    parser.getgroup("comm").addoption("--comm-deadline", type=float, default=None, metavar="SECONDS", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and clean the environment."""
    config.addinivalue_line("markers", "deadline(seconds): hard deadline of each phase of this test")
    config.addinivalue_line("markers", "gpu: needs at least one CUDA device")
    config.addinivalue_line("markers", "installed_plugins: run with the transport plugins that are installed")
    removed = {name: value for name, value in os.environ.items() if name.startswith(_PREFIX)}
    for name in removed:
        del os.environ[name]
    config.stash[_removed] = removed
    # Now, while nothing is captured: the last resort must reach the terminal.
    config.stash[_stderr] = os.dup(2)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Undo what `pytest_configure` did."""
    if _removed in config.stash:
        os.environ.update(config.stash[_removed])
    if _stderr in config.stash:
        os.close(config.stash[_stderr])
        del config.stash[_stderr]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Say which variables were removed."""
    removed = ", ".join(sorted(config.stash[_removed]))
    return [f"comm: removed from the environment: {removed}"] if removed else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests that need a GPU where there is none; with ``COMM_REQUIRE_GPU=1`` that is an error instead."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.cuda.device_count() > 0:
        return
    if config.stash[_removed].get("COMM_REQUIRE_GPU") == "1":
        raise pytest.UsageError("COMM_REQUIRE_GPU=1, and torch sees no CUDA device")
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="there is no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """Guard the set-up of a test."""
    with _deadline(item, "set-up"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Guard a test."""
    with _deadline(item, "call"):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Any, Any]:
    """Guard the teardown of a test."""
    with _deadline(item, "teardown"):
        return (yield)


def _seconds(item: pytest.Item) -> float:
    marker = item.get_closest_marker("deadline")
    if marker is not None:
        return float(marker.args[0])
    option = item.config.getoption("--comm-deadline")
    return float(item.config.getini("comm_deadline_s") if option is None else option)


@contextmanager
def _deadline(item: pytest.Item, phase: str) -> Generator[None]:
    seconds = _seconds(item)
    if seconds < 0:
        raise ArgumentValueError(f"a deadline must be positive, or 0 for none, got {seconds:g}")
    guarded = signal.getitimer(signal.ITIMER_REAL)[0] > 0
    if seconds == 0 or guarded or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(*_: object) -> None:
        # pytest's own exception is no `Exception`: code under test that catches everything does not swallow it.
        pytest.fail(f"the {phase} of {item.nodeid} took more than {seconds:g} s\n{_stacks()}")

    last_resort = not float(item.config.getini("faulthandler_timeout") or 0.0)
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    if last_resort:
        # It runs without the interpreter, so also where that is stuck in C code. Ranks end with this process.
        faulthandler.dump_traceback_later(seconds + _LAST_RESORT_S, exit=True, file=item.config.stash[_stderr])
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGALRM) is expire:  # Else a fixture has set a timer of its own meanwhile.
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
        if last_resort:
            faulthandler.cancel_dump_traceback_later()


def _stacks() -> str:
    """Return the stacks of all threads but the main one, whose traceback pytest shows."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()


@pytest.fixture(scope="session")
def shell_environment(pytestconfig: pytest.Config) -> dict[str, str]:
    """Return the ``COMM_*`` variables of the caller's shell, as ``COMM_REQUIRE_RDMA``; tests run without them."""
    return dict(pytestconfig.stash[_removed])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The session's pool of eight rank processes; it starts them when it is first used."""
    # Modules that test modules import anyway: once here instead of once in every rank.
    preload = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name)]
    pool = RankPool(RANKS, preload=preload)
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def isolated_plugins(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Keep installed transport plugins out of a test, unless it is marked ``installed_plugins``.

    A unit test must not depend on what else is installed. Plugins that a test registers by code are not affected.
    Ranks take the variable over. The value says whether the test is isolated.
    """
    isolated = request.node.get_closest_marker("installed_plugins") is None
    before = os.environ.get(_BLOCK)
    if isolated:
        os.environ[_BLOCK] = "*"
    yield isolated
    if before is None:
        os.environ.pop(_BLOCK, None)
    else:
        os.environ[_BLOCK] = before
