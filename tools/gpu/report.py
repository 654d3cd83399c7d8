"""The report: what was run, what came out, and nothing that says on whose machine.

Numbers travel: they are kept in the repository. So every text is freed of host names, paths, UUIDs and addresses, and
a report in which something of the kind is left is not written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comm_core.bench.redact import hosts, leaks, redact

__all__ = ["Goal", "ReportError", "Section", "Table", "hosts", "leaks", "markdown", "redact", "slug", "write"]


class ReportError(Exception):
    """The report would say something that it must not."""


@dataclass(frozen=True)
class Table:
    """Rows of results. What is a number stays one in the JSON report."""

    title: str
    columns: list[str]
    rows: list[list[Any]]
    note: str = ""


@dataclass(frozen=True)
class Goal:
    """A number that the project promises.

    Attributes:
        name: what was measured.
        value: in `unit`; None where it could not be measured.
        limit: the most that it may be.
        unit: ``"us"``, ``"ms"``, ``"s"``…
    """

    name: str
    value: float | None
    limit: float
    unit: str

    @property
    def verdict(self) -> str:
        """``"met"``, ``"missed"`` or ``"not measured"``."""
        if self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "missed"


@dataclass
class Section:
    """One part of the check.

    Attributes:
        name: for ``--only``.
        title: for people.
        status: ``"passed"``, ``"failed"`` or ``"skipped"``.
        why: why it was skipped or how it failed, one line each.
        notes: what one has to know to read the numbers.
        seconds: how long it took.
    """

    name: str
    title: str
    status: str = "passed"
    why: list[str] = field(default_factory=list[str])
    notes: list[str] = field(default_factory=list[str])
    tables: list[Table] = field(default_factory=list[Table])
    goals: list[Goal] = field(default_factory=list[Goal])
    seconds: float = 0.0

    def fail(self, why: str) -> None:
        """Note one failure."""
        self.status = "failed"
        self.why.append(why)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "name": self.name,
            "title": self.title,
            "status": self.status,
            "seconds": round(self.seconds, 1),
            "why": list(self.why),
            "notes": list(self.notes),
            "goals": [
                {"name": goal.name, "value": goal.value, "limit": goal.limit, "unit": goal.unit, "is": goal.verdict}
                for goal in self.goals
            ],
            "tables": [
                {"title": table.title, "columns": table.columns, "rows": table.rows, "note": table.note}
                for table in self.tables
            ],
        }


def slug(text: str) -> str:
    """Return `text` as part of a file's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return [*lines, *("| " + " | ".join(map(_cell, row)) + " |" for row in rows), ""]


def markdown(document: dict[str, Any]) -> str:
    """Return the report for people."""
    environment: dict[str, Any] = document["environment"]
    sections: list[dict[str, Any]] = document["sections"]
    lines = [f"# {environment.get('GPU', 'no GPU')}, {environment.get('GPUs', 0)}", ""]
    lines += [f"Written by `{document['command']}` on {document['date']}.", ""]
    lines += _table(["", ""], list(environment.items()))
    goals = [goal for section in sections for goal in section["goals"]]
    if goals:
        lines += ["## Goals", ""]
        rows = [[goal["name"], goal["limit"], goal["value"], goal["unit"], goal["is"]] for goal in goals]
        lines += _table(["", "at most", "measured", "", ""], rows)
    lines += ["## Parts", ""]
    rows = [[item["title"], item["status"], f"{item['seconds']:.0f} s", "; ".join(item["why"])] for item in sections]
    lines += _table(["part", "", "took", "why"], rows)
    for section in sections:
        if not section["tables"] and not section["notes"]:
            continue
        lines += [f"## {section['title']}", ""]
        lines += [*(f"- {note}" for note in section["notes"]), ""] if section["notes"] else []
        for table in section["tables"]:
            lines += [f"### {table['title']}", ""]
            lines += [table["note"], ""] if table["note"] else []
            lines += _table(table["columns"], table["rows"])
    return "\n".join(lines).rstrip() + "\n"


def write(document: dict[str, Any], stem: Path, names: Collection[str]) -> list[Path]:
    """Write ``<stem>.json`` and ``<stem>.md``; return the two.

    Raises:
        ReportError: something that must not be in a report is where it can't be replaced. Nothing was written.
    """
    clean = redact(document, names)
    text = markdown(clean)
    found = [*leaks(clean, names), *(line for line in text.splitlines() if leaks(line, names))]
    if found:
        raise ReportError(f"the report would hold a host name, a path or an identifier: {found[:3]}")
    stem.parent.mkdir(parents=True, exist_ok=True)
    data, page = (stem.with_name(stem.name + suffix) for suffix in (".json", ".md"))
    data.write_text(json.dumps(clean, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    page.write_text(text, encoding="utf-8")
    return [data, page]
