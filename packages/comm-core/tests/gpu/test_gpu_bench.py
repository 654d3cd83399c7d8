"""``commctl bench ulysses`` on GPUs: figures that can be true, in graphs too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from comm_core.bench.geometry import Geometry
from comm_core.testing.cli import commctl

COUNT = torch.cuda.device_count()

pytestmark = pytest.mark.gpu


def run(tmp_path: Path, *arguments: str) -> dict:
    file = tmp_path / "found.json"
    assert commctl("bench", "ulysses", "--geometry", "4608x24", "--quick", "--json", str(file), *arguments) == 0
    return json.loads(file.read_text())


def test_ranks_on_one_gpu(tmp_path: Path):
    """Windows in both modes, eager and in graphs; the floor is that of the one memory."""
    found = run(tmp_path, "--where", "shared", "--backend", "windows")
    assert found["floor"]["kind"] == "device" and found["floor"]["bytes_per_s"] > 5e10
    assert [(row["mode"], row["operation"]) for row in found["rows"]] == [
        (mode, operation) for mode in ("direct", "staged") for operation in ("scatter_heads", "gather_heads")
    ]
    assert all(row["graph_us"] > 0 and row["eager_us"] > 0 and row["host_us"] > 0 for row in found["rows"])


def test_a_gpu_for_each_rank(tmp_path: Path):
    """No exchange is faster than the link, and NCCL and torch's symmetric memory stand beside."""
    if COUNT < 2:
        pytest.skip("there is one GPU")
    found = run(tmp_path, "--where", "links", "--ranks", "2", "--backend", "nccl")
    assert found["floor"]["kind"] == "links"
    backends = {row["backend"] for row in found["rows"]}
    assert backends == {"nccl", "torch-a2a", "torch-symm"}
    assert all(row["remote_bytes"] == Geometry(4608, 24).remote_bytes(2) for row in found["rows"])
    assert all(row["graph_over_floor"] > 0.95 for row in found["rows"])
