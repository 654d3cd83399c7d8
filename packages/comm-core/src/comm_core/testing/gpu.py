"""What test files for GPUs share: pools whose ranks share the GPUs that there are, sizes, and runs with a plugin.

::

    ranks = shared_gpu_pool(8)
    plugin = plugin_of("nvlink", make_plugin)

    @pytest.mark.parametrize("size", sizes())
    def test_it(ranks: RankPool, size: int) -> None:
        run_on_devices(ranks, function, 3, size=size, plugin=plugin)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
import torch

from comm_core import plugins
from comm_core.testing.environment import environment
from comm_core.testing.ranks import FunctionRef, RankPool

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["environment", "plugin_of", "registered", "run_on_devices", "shared_gpu_pool", "sizes"]

_REGISTERED = "under test on GPUs"


def sizes(at_most: int = 8, among: Collection[int] | None = None) -> tuple[int, ...]:
    """Return the sizes of groups to test: 2, 4 and 8, or those in ``GPU_CHECK_SIZES`` (``"2,3"``).

    Args:
        at_most: larger ones are left out.
        among: others are left out.
    """
    asked = (int(size) for size in os.environ.get("GPU_CHECK_SIZES", "2,4,8").split(","))
    return tuple(size for size in asked if size <= at_most and (among is None or size in among))


def shared_gpu_pool(size: int, **variables: str) -> Callable[[], Iterator[RankPool]]:
    """Return a fixture, one pool for each test file, of ranks that share the GPUs there are.

    Args:
        size: how many ranks.
        variables: of their environment, besides ``COMM_ALLOW_SHARED_GPU=1``.
    """

    @pytest.fixture(scope="module")
    def ranks() -> Iterator[RankPool]:
        with environment(COMM_ALLOW_SHARED_GPU="1", **variables):
            pool = RankPool(size, preload=["pytest", "hypothesis"], group_timeout_s=120)
            yield pool
            pool.close()

    return ranks


def plugin_of(name: str, make: Callable[[], object]) -> FunctionRef | None:
    """Return what makes the plugin in each rank, or None where it is installed.

    Args:
        name: its key among the entry points.
        make: a module-level function that returns the plugin.
    """
    return None if entry_points(group="comm_core.v1", name=name) else FunctionRef.of(make)


@contextmanager
def registered(plugin: FunctionRef | None) -> Generator[None, None, None]:
    """Have a plugin registered inside a ``with`` block; None for one that is installed."""
    if plugin is None:
        yield
        return
    try:
        plugins.register(_REGISTERED, plugin.resolve()())
        yield
    finally:
        plugins.unregister(_REGISTERED)


def run_on_devices(
    ranks: RankPool,
    function: Callable[..., Any],
    *arguments: Any,
    size: int,
    plugin: FunctionRef | None = None,
    timeout_s: float = 100,
    **options: Any,
) -> list[Any]:
    """Run ``function(group, *arguments)`` on `size` ranks, each with its device current; return what they return.

    Args:
        ranks: the pool.
        function: a module-level one.
        arguments: of it.
        size: how many ranks.
        plugin: of `plugin_of`.
        timeout_s: of the run.
        options: of `RankPool.run`.
    """
    return ranks.run(
        _on_device, plugin, FunctionRef.of(function), *arguments, ranks=size, timeout_s=timeout_s, **options
    )


def _on_device(group: ProcessGroup, plugin: FunctionRef | None, function: FunctionRef, *arguments: Any) -> Any:
    torch.cuda.set_device(group.rank() % torch.cuda.device_count())
    with registered(plugin):
        return function.resolve()(group, *arguments)
