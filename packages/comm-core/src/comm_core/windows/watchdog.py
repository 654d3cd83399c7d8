"""One thread a process that looks at the stall records of all open sessions.

A kernel that gives up leaves a record in pinned host memory. The next call of the session would see it; but whoever
replays a captured graph makes no calls, so somebody has to look.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Protocol

__all__ = ["Watched", "watch"]

_PERIOD_S = 0.05


class Watched(Protocol):
    """What can be looked at."""

    def look(self) -> bool:
        """Look for a stall record, report a new one; return whether to go on looking."""
        ...


class _Watchdog:
    """The thread and what it watches. It keeps no session alive, and ends when none is left."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[Callable[[], Watched | None]] = []
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def watch(self, session: Watched) -> None:
        with self._lock:
            self._watched.append(weakref.ref(session))
            if self._thread is None:
                # A daemon: the interpreter must be able to end while a session is open.
                self._thread = threading.Thread(target=self._run, name="comm-watchdog", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            self._wake.wait(_PERIOD_S)
            with self._lock:
                self._watched = [reference for reference in self._watched if _look(reference)]
                if not self._watched:
                    self._thread = None
                    return


def _look(reference: Callable[[], Watched | None]) -> bool:
    session = reference()
    if session is None:
        return False
    try:
        return session.look()
    except Exception:
        # A session that can't be looked at must not take the others' watchdog with it.
        return False


_watchdog = _Watchdog()


def watch(session: Watched) -> None:
    """Look at `session` every 50 ms from now on, until it says that it is done or is gone."""
    _watchdog.watch(session)
