"""Another thread that is halted in the middle of a call, for tests of what may happen meanwhile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator

__all__ = ["Halt", "halted"]

_SECONDS = 10


class Halt:
    """A place of the code where a thread waits until it is let on."""

    def __init__(self) -> None:
        self._entered, self._on = threading.Event(), threading.Event()

    def here(self) -> None:
        """Wait, in the thread that is to be halted; nothing from the second time on."""
        self._entered.set()
        assert self._on.wait(_SECONDS), "nobody has let this thread on"

    def let_on(self) -> None:
        """Let it go on."""
        self._on.set()

    def wait_until_entered(self) -> None:
        """Wait until the thread is there."""
        assert self._entered.wait(_SECONDS), "the call has not come to the place where it is halted"


@contextlib.contextmanager
def halted(call: Callable[[Halt], object]) -> Generator[Halt]:
    """Run `call` in another thread, which is halted in the block, or until it is let on there; then wait for its end.

    Args:
        call: calls `Halt.here` on its way.
    """
    halt = Halt()
    thread = threading.Thread(target=call, args=(halt,))
    thread.start()
    try:
        halt.wait_until_entered()
        yield halt
    finally:
        halt.let_on()
        thread.join(2 * _SECONDS)
