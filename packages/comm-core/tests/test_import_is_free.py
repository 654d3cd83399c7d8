"""L13: importing any module touches no CUDA, no NVML and no network, and works without torch.distributed."""

from __future__ import annotations

import json
import pkgutil
import subprocess
import sys

import pytest

import comm_core

MODULES = sorted(module.name for module in pkgutil.walk_packages(comm_core.__path__, "comm_core."))
LEFT_OUT = {"comm_core.demo.__main__", "comm_core.testing.plugin"}
"""A program, and a plugin that pytest imports."""

CHECK = """
import importlib, json, socket, sys

try:
    import torch
except ImportError:
    torch = None
# torch brings these itself where they are installed.
before = set(sys.modules)

def refuse(*_, **__):
    raise AssertionError("a network connection")

socket.socket.connect = refuse
names = json.loads(sys.argv[1])
failed = {}
for name in names:
    try:
        importlib.import_module(name)
    except BaseException as error:
        failed[name] = f"{type(error).__name__}: {error}"
new = set(sys.modules) - before
print(json.dumps({
    "failed": failed,
    "cuda": bool(torch and torch.cuda.is_initialized()),
    "imported": sorted(name for name in new if name.split(".")[0] in ("pynvml", "cuda")),
}))
"""


def run(names: list[str], prelude: str = "") -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", prelude + CHECK, json.dumps(names)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_every_module_can_be_imported_on_a_machine_with_nothing() -> None:
    report = run([name for name in MODULES if name not in LEFT_OUT])
    assert report == {"failed": {}, "cuda": False, "imported": []}


def test_a_torch_without_distributed_is_enough_to_decide_and_describe() -> None:
    """torch.distributed is missing on some builds; only what really communicates may need it."""
    prelude = "import sys; sys.modules['torch.distributed'] = None\n"
    names = [
        "comm_core",
        "comm_core.cli.main",
        "comm_core.plugins",
        "comm_core.selection.decide",
        "comm_core.topology",
        "comm_core.transport.interface",
        "comm_core.ulysses.plans",
    ]
    assert run(names, prelude)["failed"] == {}


@pytest.mark.parametrize("name", ["comm_core", "comm_core.plugins", "comm_core.topology", "comm_core.cli.main"])
def test_what_everybody_imports_does_not_import_torch(name: str) -> None:
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
