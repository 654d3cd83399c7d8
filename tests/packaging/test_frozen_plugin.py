"""A plugin of hook API 1.0 that nobody will ever touch again still works with the current comm-core."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import workspace

# Environments and builds take long on a busy machine.
pytestmark = pytest.mark.timeout(300)

FROZEN = workspace.ROOT / "tests" / "packaging" / "fixtures" / "frozen_plugin_api_1_0"
DIGEST = "07595fcf96be808e3494417032792f314c43f61a0333c0407578b495a3124025"

RUN_A_PLAN = """
import torch
from comm_core.consensus import Transaction
from comm_core.group import thread_groups
from comm_core.plugins import registry
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request
from comm_core.transport.plan import Copy, Level, Plan

transport = registry().transport("frozen")
facts = RankFacts(rank=0)
probe = transport.probe(ProbeContext(rank=0, device_type="cpu", device_index=-1, facts=facts))
assert probe == {"rank": 0, "device_type": "cpu", "host": ""}, probe
request = Request(backend="frozen", world_size=1, device_type="cpu")
verdict = transport.assess(request, [facts])
assert verdict.eligible, verdict
refused = transport.assess(Request(backend="frozen", world_size=2, device_type="cpu"), [facts, RankFacts(rank=1)])
assert not refused.eligible, refused

# Transpose a 2 x 3 matrix of 2-byte elements: rows of one element, two levels.
copy = Copy(0, 0, 0, 0, (Level(2, 6, 2), Level(3, 2, 4)), 2)
plan = Plan("transpose", 0, 1, (copy,), (copy,), 1, 12)
source = torch.arange(6, dtype=torch.int16).reshape(2, 3)
destination = torch.full((3, 2), -1, dtype=torch.int16)
group, = thread_groups(1)
with Transaction(group, "open 'frozen'") as stages:
    session = transport.open(stages, request, verdict.plan, torch.device("cpu"))
    stages.commit()
session.exchange(plan, [source], destination)
assert torch.equal(destination, source.T), destination
assert session.allocate_output((2,), torch.int16, torch.device("cpu")).shape == (2,)
session.close()
print("ran")
"""


def digest(folder: Path) -> str:
    """Return a digest of the names and contents of the files in `folder`."""
    sha = hashlib.sha256()
    paths = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    for path in sorted(paths, key=lambda path: path.relative_to(folder).as_posix()):
        sha.update(f"{path.relative_to(folder).as_posix()}\0{path.stat().st_size}\0".encode())
        sha.update(path.read_bytes())
    return sha.hexdigest()


def test_nobody_has_edited_it():
    """Edited to fit a new comm-core, it would stand for no plugin out there."""
    assert digest(FROZEN) == DIGEST, "restore the folder: git checkout -- tests/packaging/fixtures (see its README)"


def test_it_is_loaded_with_all_it_provides(core, frozen, venv):
    """Its package, its four hooks and its subcommand are understood as they were."""
    venv.install(core.wheel, frozen.wheel)
    found = venv.plugins()["frozen"]
    assert (found["state"], found["error"]) == ("loaded", None)
    assert (found["distribution"], found["version"], found["api"]) == ("comm-frozen", "0.1.0", "1.0")
    assert (found["transports"], found["codecs"]) == (["frozen"], ["frozen-codec"])
    assert venv.run("commctl", "frozen") == "frozen\n"


def test_it_decides_and_runs_a_plan(core, frozen, venv):
    """What it is handed (context, facts, request, stages, plan) has what it uses, and its session is complete."""
    venv.install(core.wheel, frozen.wheel)
    assert venv.run("python", "-W", "error", "-c", RUN_A_PLAN) == "ran\n"
