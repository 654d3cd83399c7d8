"""comm-mnnvl's wheel in a clean environment: it loads, plans and names its classes, without CUDA, NVML and MPI."""

from __future__ import annotations

import json

import pytest

import workspace

pytestmark = pytest.mark.timeout(300)

TRY = """
import json, sys
sys.modules["cuda"] = sys.modules["pynvml"] = sys.modules["mpi4py"] = None
from comm_core.plugins import registry
from comm_core.testing.topologies import two_hosts
from comm_core.transport.interface import Request
verdict = registry().transport("mnnvl").assess(Request("mnnvl", 4, "cuda"), two_hosts(2))
import comm_mnnvl
print(json.dumps([verdict.eligible, verdict.plan, all(hasattr(comm_mnnvl, name) for name in comm_mnnvl.__all__)]))
"""


def test_it_works_beside_comm_core_alone(core, build, venv):
    """And goes without a trace."""
    venv.install(core.wheel, check=False)
    venv.install(build(workspace.ROOT / "packages" / "comm-mnnvl").wheel, check=False)
    assert venv.plugins()["mnnvl"]["state"] == "loaded"
    eligible, plan, there = json.loads(venv.run("python", "-W", "error", "-c", TRY))
    assert eligible and plan["handle"] == "fabric" and there
    venv.uninstall("comm-mnnvl")
    assert "mnnvl" not in venv.plugins()
