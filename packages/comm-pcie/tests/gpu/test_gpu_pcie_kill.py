"""SIGKILL of a rank over PCIe; ``python tools/gpu_check.py --only kill`` runs this file apart, without MPS."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from comm_core.testing.kill_case import check_kill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.installed_plugins,
    pytest.mark.skipif(os.environ.get("GPU_CHECK_KILL") != "1", reason="needs a run of its own without MPS"),
]


@pytest.mark.parametrize("size", [2, 4])
def test_a_killed_rank_is_named_and_the_others_end(tmp_path: Path, size: int) -> None:
    """F17: within the deadline they raise, their outputs are poisoned, close ends in its time, and they exit."""
    check_kill(size, tmp_path, "pcie", "comm_pcie.plugin:plugin")
