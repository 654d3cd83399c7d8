"""The contract of every transport, over the routes by NICs: between processes, on the emulator."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import rdma_host as host

from comm_core.testing.contract import TransportContract
from comm_core.testing.ranks import RankPool
from comm_pcie import ExperimentalWarning


def make_plugin() -> object:
    """The plugin, in a rank whose warnings are errors."""
    warnings.filterwarnings("ignore", category=ExperimentalWarning)
    return host.plugin()


class _WithFabric:
    """Gives the pool's ranks what they need; asserts that NICs have moved the bytes."""

    def __init__(self, pool: RankPool, fabric: Any) -> None:
        self.size, self._pool, self._fabric = pool.size, pool, fabric

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Any]:
        return self._pool.run(function, *arguments, env=self._fabric.environment(), **options)


class TestRdma(TransportContract):
    """Registered outputs and one batch; the rest is what every transport does."""

    transport = "pcie"
    world_sizes: ClassVar[tuple[int, ...]] = (2,)
    plugin = make_plugin
    max_batch = 1
    registered_outputs = True

    @pytest.fixture
    def ranks(self, ranks: RankPool, fabric: Any) -> Iterator[Any]:
        yield _WithFabric(ranks, fabric)
        counters = fabric.world.counters()
        assert counters["write_imm"] > 0 or counters["open"] == 0
