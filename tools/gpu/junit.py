"""What a pytest run came to, from its JUnit file."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from gpu.report import Table

__all__ = ["Outcome", "read"]

_SLOWEST = 5


@dataclass
class Outcome:
    """Counts, and what needs words.

    Attributes:
        counts: ``"passed"``, ``"failed"``, ``"skipped"`` -> how many, by test file.
        seconds: by test file.
        failed: test -> its error's first line.
        skipped: reason -> how many.
        slowest: seconds and name.
    """

    counts: dict[str, Counter[str]] = field(default_factory=dict[str, "Counter[str]"])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    failed: dict[str, str] = field(default_factory=dict[str, str])
    skipped: Counter[str] = field(default_factory=Counter)
    slowest: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])

    def total(self, kind: str) -> int:
        """Return how many tests passed, failed or were skipped."""
        return sum(counts[kind] for counts in self.counts.values())

    def tables(self, what: str) -> list[Table]:
        """Return it as tables; `what` was run."""
        kinds = ("passed", "failed", "skipped")
        rows = [
            [name, *(counts[kind] for kind in kinds), round(self.seconds[name], 1)]
            for name, counts in sorted(self.counts.items())
        ]
        found = [Table(f"{what}: tests", ["file", *kinds, "seconds"], rows)]
        if self.skipped:
            found.append(
                Table(f"{what}: skipped", ["reason", "tests"], [list(item) for item in self.skipped.items()])
            )
        if self.slowest:
            found.append(Table(f"{what}: slowest", ["seconds", "test"], [list(item) for item in self.slowest]))
        return found


def read(path: Path) -> Outcome | None:
    """Return what a JUnit file says, or None where there is none that can be read."""
    try:
        root = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError):
        return None
    outcome = Outcome()
    times: list[tuple[float, str]] = []
    for case in root.iter("testcase"):
        module, _, rest = case.get("classname", "").partition(".test_")
        file = "test_" + rest.split(".")[0] if rest else module or "collection"
        name = f"{file}::{case.get('name', '')}"
        seconds = float(case.get("time", "0"))
        kind, what = "passed", ""
        for child in case:
            message = (child.get("message") or child.text or "").strip().splitlines()
            first = message[0] if message else ""
            # A test that passed and whose teardown failed has failed.
            if child.tag in ("failure", "error"):
                kind, what = "failed", first
            elif child.tag == "skipped" and kind == "passed":
                kind, what = "skipped", first
        outcome.counts.setdefault(file, Counter())[kind] += 1
        outcome.seconds[file] = outcome.seconds.get(file, 0.0) + seconds
        times.append((round(seconds, 1), name))
        if kind == "failed":
            outcome.failed[name] = what[:300]
        elif kind == "skipped":
            outcome.skipped[what] += 1
    outcome.slowest = [item for item in sorted(times, reverse=True)[:_SLOWEST] if item[0] >= 1.0]
    return outcome
