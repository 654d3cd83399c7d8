"""Frees results of what tells on whose machine they were measured: numbers travel, and errors quote paths."""

from __future__ import annotations

import platform
import re
import socket
from collections.abc import Collection
from typing import Any, cast

__all__ = ["hosts", "leaks", "redact"]

_PATTERNS = (
    ("<uuid>", re.compile(r"(?:(?:GPU|MIG)-)?[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.I)),
    ("<uuid>", re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}\b[0-9a-f-]*", re.I)),
    ("<pci>", re.compile(r"\b(?:[0-9a-f]{4,8}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]\b", re.I)),
    ("<path>", re.compile(r"file://\S+")),
    # A slash that no word comes before: neither GB/s nor tests/gpu/test_x.py nor https://.
    ("<path>", re.compile(r"(?<![\w./<%)\]-])~?/(?=[\w.])[^\s'\"`,;:()\[\]{}|<>]+")),
    (
        "<address>",
        re.compile(r"(?<![\w.])(?!127\.)(?:25[0-5]|2[0-4]\d|1?\d?\d)(?:\.(?:25[0-5]|2[0-4]\d|1?\d?\d)){3}(?![\w.])"),
    ),
)


def hosts() -> frozenset[str]:
    """Return this machine's names."""
    names = {socket.gethostname(), platform.node()}
    names |= {name.split(".")[0] for name in names}
    # Shorter ones and this one are words that say nothing of a machine.
    return frozenset(name for name in names if len(name) > 2 and name != "localhost")


def _patterns(names: Collection[str]) -> list[tuple[str, re.Pattern[str]]]:
    longest_first = sorted(names, key=len, reverse=True)
    own = [("<host>", re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])", re.I)) for name in longest_first]
    return [*own, *_PATTERNS]


def redact(value: Any, names: Collection[str]) -> Any:
    """Return JSON with everything replaced in its texts that tells on whose machine it was written."""
    if isinstance(value, dict):
        return {key: redact(item, names) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [redact(item, names) for item in cast("list[Any]", value)]
    if isinstance(value, str):
        for mark, pattern in _patterns(names):
            value = pattern.sub(mark, value)
    return value


def leaks(value: Any, names: Collection[str]) -> list[str]:
    """Return the texts in JSON, keys included, that `redact` would change."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return [leak for key, item in items for leak in (*leaks(key, names), *leaks(item, names))]
    if isinstance(value, list | tuple):
        return [leak for item in cast("list[Any]", value) for leak in leaks(item, names)]
    return [value] if isinstance(value, str) and redact(value, names) != value else []
