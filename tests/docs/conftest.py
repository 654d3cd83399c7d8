"""Reads the documentation: pages, and the code blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        page: path of its page from the root of the workspace.
        line: of its first line of text in the page.
        language: first word behind the fence, or "".
        kind: the other words.
        text: what it holds.
    """

    page: str
    line: int
    language: str
    kind: str
    text: str


def pages() -> list[str]:
    """Return every page that people read, as paths from the root of the workspace."""
    patterns = ("README.md", "CONTRIBUTING.md", "packages/*/README.md", "docs/**/*.md")
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def blocks_of(page: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks: list[Block] = []
    for match in _FENCE.finditer(text):
        language, _, kind = match["info"].partition(" ")
        line = text.count("\n", 0, match.start("text")) + 1
        blocks.append(Block(page, line, language, kind.strip(), match["text"]))
    return blocks


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test with the argument `page` once for each page, `runnable` for each page with code that runs."""
    if "page" in metafunc.fixturenames:
        metafunc.parametrize("page", pages())
    if "runnable" in metafunc.fixturenames:
        runs = [(block.page, block.language, block.kind) for page in pages() for block in blocks_of(page)]
        found = {page for page, language, kind in runs if language == "python" and kind in ("", "ranks")}
        metafunc.parametrize("runnable", sorted(found))


@pytest.fixture(scope="session")
def root() -> Path:
    """The workspace."""
    return ROOT


@pytest.fixture(scope="session")
def read_blocks():
    """`blocks_of`, for tests."""
    return blocks_of


@pytest.fixture(scope="session")
def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in pages() for block in blocks_of(page)]
