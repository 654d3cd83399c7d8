"""The watchdog: one thread looks at all sessions, keeps none alive, and ends when there is nothing to look at."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from comm_core.windows import watchdog


class Session:
    """Counts how often it is looked at; can end, or fail."""

    def __init__(self, looks: int = 10**9, fails: bool = False) -> None:
        self.looked, self.looks, self.fails = 0, looks, fails

    def look(self) -> bool:
        self.looked += 1
        if self.fails:
            raise RuntimeError("can't be looked at")
        return self.looked < self.looks


@pytest.fixture
def dog(monkeypatch: pytest.MonkeyPatch) -> watchdog._Watchdog:
    """One of its own, in a hurry."""
    monkeypatch.setattr(watchdog, "_PERIOD_S", 0.005)
    return watchdog._Watchdog()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 5 s"
        time.sleep(0.002)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "comm-watchdog"]


def test_one_thread_for_all_sessions_that_ends_with_the_last(dog: watchdog._Watchdog) -> None:
    """A process without open sessions has no thread; one that opens a session later has one again."""
    before = len(threads())
    first, second = Session(looks=3), Session(looks=6)
    dog.watch(first)
    dog.watch(second)
    assert len(threads()) == before + 1 and all(thread.daemon for thread in threads())
    wait_until(lambda: dog._thread is None)
    # Who said that it is done is not asked again.
    assert (first.looked, second.looked) == (3, 6)
    third = Session(looks=2)
    dog.watch(third)
    wait_until(lambda: dog._thread is None)
    assert third.looked == 2
    wait_until(lambda: len(threads()) == before)


def test_a_session_that_fails_does_not_take_the_others_with_it(dog: watchdog._Watchdog) -> None:
    bad, good = Session(fails=True), Session(looks=5)
    dog.watch(bad)
    dog.watch(good)
    wait_until(lambda: dog._thread is None)
    assert (bad.looked, good.looked) == (1, 5)


def test_a_session_that_is_dropped_is_forgotten(dog: watchdog._Watchdog) -> None:
    """It must not live on because somebody looks at it: its memory would never be released."""
    session = Session()
    gone = weakref.ref(session)
    dog.watch(session)
    while session.looked < 2:
        time.sleep(0.002)
    del session
    # The thread may hold it for the moment of a look.
    wait_until(lambda: gc.collect() >= 0 and gone() is None)
    wait_until(lambda: dog._thread is None)


def test_sessions_that_come_while_it_ends_are_looked_at(dog: watchdog._Watchdog) -> None:
    """No session falls between the last look of an ending thread and the start of the next one."""
    for _ in range(100):
        session = Session(looks=1)
        dog.watch(session)
        wait_until(lambda session=session: session.looked == 1)
