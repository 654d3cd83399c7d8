"""What test files for GPUs share, where there is none."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core import plugins
from comm_core.plugins.hookspecs import API_VERSION
from comm_core.testing import gpu
from comm_core.testing.gpu import environment, plugin_of, registered, run_on_devices, shared_gpu_pool, sizes
from comm_core.testing.ranks import FunctionRef, RankPool

few = shared_gpu_pool(2, TEST_OF_POOLS="yes")


class Plugin:
    comm_api = API_VERSION


def make_plugin() -> object:
    return Plugin()


# At import, as test files do it, in the ranks too: this module is not complete yet then.
MADE_BY = plugin_of("no plugin of this name", make_plugin)


def names() -> list[str]:
    return [report.name for report in plugins.report()]


@pytest.mark.parametrize(
    ("asked", "options", "expected"),
    [
        (None, {}, (2, 4, 8)),
        (None, {"at_most": 4}, (2, 4)),
        ("2,4,6,8", {}, (2, 4, 6, 8)),
        ("2,4,6,8", {"at_most": 6}, (2, 4, 6)),
        ("2,4,6,8", {"among": (2, 4, 8)}, (2, 4, 8)),
        ("3", {"at_most": 2}, ()),
    ],
)
def test_sizes(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    monkeypatch.delenv("GPU_CHECK_SIZES", raising=False)
    if asked is not None:
        monkeypatch.setenv("GPU_CHECK_SIZES", asked)
    assert sizes(**options) == expected


def test_variables_are_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_A", "before")
    with pytest.raises(KeyError), environment(TEST_A="inside", TEST_B="inside"):
        assert (os.environ["TEST_A"], os.environ["TEST_B"]) == ("inside", "inside")
        raise KeyError
    assert os.environ["TEST_A"] == "before" and "TEST_B" not in os.environ


def told(group: Any) -> tuple[str, str]:
    return os.environ["COMM_ALLOW_SHARED_GPU"], os.environ["TEST_OF_POOLS"]


def test_the_ranks_of_a_pool_may_share_a_gpu(few: RankPool) -> None:
    assert few.size == 2 and few.run(told, ranks=2) == [("1", "yes")] * 2


def looks(group: Any, *arguments: Any) -> Any:
    return gpu._REGISTERED in names(), arguments


@pytest.mark.parametrize("plugin", [MADE_BY, None], ids=["source tree", "installed"])
def test_a_function_runs_on_its_device_with_the_plugin(
    plugin: FunctionRef | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a rank runs it; afterwards the plugin is gone, also where the function raises."""
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    group: Any = SimpleNamespace(rank=lambda: 5)

    def run(function: Any, *arguments: Any, ranks: int, timeout_s: float, env: dict[str, str]) -> list[Any]:
        assert (ranks, timeout_s, env) == (6, 100, {"A": "1"})
        return [function(group, *arguments)]

    pool: Any = SimpleNamespace(run=run)
    found = run_on_devices(pool, looks, 3, "x", size=6, plugin=plugin, env={"A": "1"})
    assert found == [(plugin is not None, (3, "x"))] and devices == [1]
    with pytest.raises(KeyError), registered(plugin):
        raise KeyError
    assert gpu._REGISTERED not in names()


def test_what_is_installed_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "entry_points", lambda **which: [which] if which["name"] == "there" else [])
    assert plugin_of("there", make_plugin) is None
    assert plugin_of("not there", make_plugin) == FunctionRef.of(make_plugin)
