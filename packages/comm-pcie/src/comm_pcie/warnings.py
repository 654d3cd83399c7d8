"""What this package warns of, each once a process."""

from __future__ import annotations

import warnings

__all__ = ["ExperimentalWarning", "RouteWarning", "warn_once"]


class ExperimentalWarning(UserWarning):
    """The transport ``pcie`` is in use, and it is experimental."""


class RouteWarning(UserWarning):
    """A route that was preferred (``prefer-rdma``, ``prefer-hybrid``) can't be used, and another one is."""


_given: set[str] = set()


def warn_once(text: str, category: type[Warning]) -> None:
    """Warn, unless this process has been told the same before."""
    if text not in _given:
        # First the warning: where warnings are errors the next caller must get it too.
        warnings.warn(text, category, stacklevel=3)
        _given.add(text)
