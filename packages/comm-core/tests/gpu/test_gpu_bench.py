"""``commctl bench ulysses`` with all ranks on one GPU: figures that can be true, in graphs too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comm_core.testing.cli import commctl

pytestmark = pytest.mark.gpu


def test_ranks_on_one_gpu(tmp_path: Path):
    """Windows in both modes, eager and in graphs; the floor is that of the one memory."""
    file = tmp_path / "found.json"
    arguments = ("--where", "shared", "--backend", "windows", "--geometry", "4608x24", "--quick", "--json", str(file))
    assert commctl("bench", "ulysses", *arguments) == 0
    found = json.loads(file.read_text())
    assert found["floor"]["kind"] == "device" and found["floor"]["bytes_per_s"] > 5e10
    assert [(row["mode"], row["operation"]) for row in found["rows"]] == [
        (mode, operation) for mode in ("direct", "staged") for operation in ("scatter_heads", "gather_heads")
    ]
    assert all(row["graph_us"] > 0 and row["eager_us"] > 0 and row["host_us"] > 0 for row in found["rows"])
