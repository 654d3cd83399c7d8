"""What an object that takes one call at a time does with its other threads."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator

from comm_core.errors import UnsupportedError

__all__ = ["between_calls"]


@contextlib.contextmanager
def between_calls(busy: threading.Lock, operation: str, noun: str, timeout_s: float) -> Generator[None]:
    """Wait for a call of another thread, and let none begin in the block.

    For what takes memory away: a call that has passed its checks would launch on what is gone. A refusal of this rank
    alone would leave the others to their deadline, so the call is waited for.

    Args:
        busy: held by the thread that is in a call.
        operation: for the text.
        noun: what the calls are of.
        timeout_s: seconds to wait.

    Raises:
        UnsupportedError: the call does not end in that time.
    """
    if not busy.acquire(timeout=max(0.0, timeout_s)):
        raise UnsupportedError(
            f"{operation}: a call of this {noun} has been running in another thread for {timeout_s:g} s "
            "(COMM_TIMEOUT_S)"
        )
    try:
        yield
    finally:
        busy.release()
