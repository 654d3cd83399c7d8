"""``commctl bench ulysses`` with a GPU for each rank. As NCCL is used: without MPS."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comm_core.bench.geometry import Geometry
from comm_core.testing.cli import commctl

pytestmark = pytest.mark.gpu


def test_a_gpu_for_each_rank(tmp_path: Path):
    """No exchange is faster than the link, and what torch offers stands beside."""
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    file = tmp_path / "found.json"
    arguments = ("--where", "links", "--ranks", "2", "--backend", "nccl", "--geometry", "4608x24", "--quick")
    assert commctl("bench", "ulysses", *arguments, "--json", str(file)) == 0
    found = json.loads(file.read_text())
    assert found["floor"]["kind"] == "links"
    assert {row["backend"] for row in found["rows"]} == {"nccl", "torch-a2a", "torch-symm"}
    assert all(row["remote_bytes"] == Geometry(4608, 24).remote_bytes(2) for row in found["rows"])
    assert all(row["graph_over_floor"] > 0.95 for row in found["rows"])
