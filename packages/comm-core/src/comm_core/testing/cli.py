"""commctl called in the process of a test, so that fixtures, fakes and captured output reach it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from comm_core.cli.main import main
from comm_core.topology import recorded
from comm_core.topology.facts import RankFacts

__all__ = ["commctl", "topology_file"]


def commctl(*arguments: str) -> int:
    """Run commctl in this process and return its exit code."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    code = ended.value.code
    assert isinstance(code, int)
    return code


def topology_file(folder: Path, facts: Sequence[RankFacts]) -> str:
    """Write `facts` as a recorded topology into `folder` and return its path, an argument for commctl."""
    path = folder / "topology.json"
    recorded.dump(facts, path)
    return str(path)
