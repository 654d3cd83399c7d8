"""comm-pcie's wheel in a clean environment: it loads, plans and lists its modules, without a library of RDMA."""

from __future__ import annotations

import json

import pytest

import workspace

pytestmark = pytest.mark.timeout(300)

TRY = """
import ctypes.util, json, sys
from comm_core.plugins import registry
from comm_core.testing.topologies import pcie_switch_pairs
from comm_core.transport.interface import Request
verdict = registry().transport("pcie").assess(Request("pcie", 8, "cuda"), pcie_switch_pairs(8))
loaded = [line for line in open("/proc/self/maps") if "ibverbs" in line or "mlx5" in line]
print(json.dumps([verdict.eligible, sorted(registry().modules), loaded, "pyverbs" in sys.modules]))
"""


def test_it_works_beside_comm_core_alone(core, build, venv):
    """And goes without a trace."""
    venv.install(core.wheel, check=False)
    venv.install(build(workspace.ROOT / "packages" / "comm-pcie").wheel, check=False)
    assert venv.plugins()["pcie"]["state"] == "loaded"
    eligible, modules, loaded, pyverbs = json.loads(venv.run("python", "-W", "error", "-c", TRY))
    assert eligible and {"comm_pcie_exchange", "comm_pcie_selftest"} <= set(modules)
    assert loaded == [] and not pyverbs
    assert "--route" in venv.run("commctl", "pcie", "plan", "--help")
    assert "comm_pcie_exchange" in venv.run("commctl", "jit", "list")
    venv.uninstall("comm-pcie")
    assert "pcie" not in venv.plugins()
