"""Windows on real GPUs: the contracts, by stores of the SMs and by the copy engines.

Several ranks share each GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they
really run at the same time.
"""

from __future__ import annotations

import pytest

from comm_core.testing.contract import TransportContract
from comm_core.testing.device_contract import DeviceContract
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool

pytestmark = pytest.mark.gpu

SIZES = sizes()


ranks = shared_gpu_pool(8)


class Contract(TransportContract):
    """The contract in a pool of eight ranks."""

    device_type = "cuda"

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        # The pool has eight ranks, so a group of all of them is WORLD.
        if world_size < ranks.size:
            super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


class TestWindows(Contract):
    """Stores of the SMs."""

    transport = "windows"
    device_type = "cuda"
    world_sizes = SIZES


class TestWindowsCopyEngines(Contract):
    """Copies of the copy engines between one-warp kernels."""

    transport = "windows-ce"
    device_type = "cuda"
    world_sizes = SIZES[:2]


class TestWindowsOnDevices(DeviceContract):
    """Graphs, streams, stalls and leaks, by stores of the SMs."""

    transport = "windows"
    world_sizes = SIZES


class TestWindowsCopyEnginesOnDevices(DeviceContract):
    """The same by copy engines, which always deliver into staging."""

    transport = "windows-ce"
    world_sizes = SIZES[:1]
    cycles = 8
