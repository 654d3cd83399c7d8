"""What commctl prints: readable tables on a terminal or in a pipe, or one JSON document and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import IO, TYPE_CHECKING, cast

from comm_core._json import Json

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "Sheet",
    "columns",
    "console",
    "emit_json",
    "listed",
    "note",
    "paragraph",
    "quiet_stdout",
    "ranks_text",
    "yes_no",
]


class _Trimmed(io.TextIOBase):
    """Standard output without the spaces that a table leaves at the end of its lines."""

    def __init__(self) -> None:
        self._line = ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            sys.stdout.write(line.rstrip(" ") + "\n")
        return len(text)

    def flush(self) -> None:
        sys.stdout.write(self._line)
        self._line = ""
        sys.stdout.flush()


def console() -> Console:
    """Return the console of standard output: plain text and 80 columns where it is no terminal."""
    from rich.console import Console

    file = None if sys.stdout.isatty() else cast("IO[str]", _Trimmed())
    # Facts are shown as they are: "[4026531836]" is no markup and ":gpu:" no picture.
    return Console(file=file, markup=False, emoji=False, highlight=False)


class Sheet:
    """A table below a title; what does not fit is folded, never cut.

    Args:
        title: printed above the table.
        headers: of the columns; none for a list of names and values.
        fixed: headers of columns that are never folded.
    """

    def __init__(self, title: str, *headers: str, fixed: Sequence[str] = ()) -> None:
        from rich import box
        from rich.table import Table

        self._title = title
        self._table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, show_header=bool(headers))
        for header in headers or ("", ""):
            self._table.add_column(header, overflow="fold", no_wrap=header in fixed)
        if not headers:
            self._table.columns[0].no_wrap = True

    def add(self, *cells: str) -> None:
        """Add a row."""
        self._table.add_row(*cells)

    def print(self, out: Console) -> None:
        """Print title and table, and an empty line; nothing where there are no rows."""
        from rich.padding import Padding

        if self._table.row_count:
            out.print(self._title, style="bold")
            out.print(Padding(self._table, (0, 0, 1, 2)))


def columns(title: str, rows: Iterable[tuple[str, str]], out: Console) -> None:
    """Print names and values below a title."""
    sheet = Sheet(title)
    for row in rows:
        sheet.add(*row)
    sheet.print(out)


def paragraph(title: str, lines: Sequence[str], out: Console) -> None:
    """Print `lines` as a list below `title`, wrapped with a hanging indent; nothing where there are none."""
    from rich.padding import Padding
    from rich.table import Table

    if not lines:
        return
    out.print(title, style="bold")
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row("-", line)
    out.print(Padding(grid, (0, 0, 1, 2)))


def note(text: str, out: Console) -> None:
    """Print `text` below a table, indented as it is, and an empty line."""
    from rich.padding import Padding

    out.print(Padding(text, (0, 0, 1, 2)))


def yes_no(value: bool | None) -> str:
    """Return a fact as a word; unknown is a question mark."""
    return "?" if value is None else "yes" if value else "no"


def listed(items: Iterable[str]) -> str:
    """Return `items` with commas, or a dash for none."""
    return ", ".join(items) or "-"


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks with runs of three or more shortened: ``"0-3, 6"``."""
    parts: list[str] = []
    ordered = sorted(ranks)
    start = 0
    while start < len(ordered):
        end = start
        while end + 1 < len(ordered) and ordered[end + 1] == ordered[end] + 1:
            end += 1
        run = ordered[start : end + 1]
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
        start = end + 1
    return ", ".join(parts)


def emit_json(value: Json) -> None:
    """Print one JSON document to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def quiet_stdout() -> Generator[None]:
    """Send what anything prints to standard output to standard error instead, native code included.

    Plugins and the libraries that they load are not ours, and a line of theirs before the JSON would break whoever
    reads it.
    """
    try:
        sys.stdout.flush()
        saved = os.dup(1)
    except (OSError, ValueError):
        # Standard output is closed or is no file: there is nothing to protect.
        with contextlib.redirect_stdout(sys.stderr):
            yield
        return
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        # What C code has buffered would else come out at exit, after the document.
        ctypes.CDLL(None).fflush(None)
        os.dup2(saved, 1)
        os.close(saved)
