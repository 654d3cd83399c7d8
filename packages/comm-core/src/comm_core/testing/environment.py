"""Variables of this process, for a while."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["environment"]


@contextmanager
def environment(**changes: str) -> Generator[None, None, None]:
    """Set variables of this process inside a ``with`` block; afterwards they are as they were."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
