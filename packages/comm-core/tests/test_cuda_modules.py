"""Every CUDA module of comm-core, compiled for every architecture: what comes out is as it must be.

The self-check is compiled by ``test_jit_compile.py``; here is everything that does something.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import comm_core
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing import cubin
from comm_core.testing.cuda_modules import CudaModulesContract
from comm_core.windows import transport
from comm_core.windows.launch import WINDOWS

PACKAGE = Path(comm_core.__file__).parent


class TestModules(CudaModulesContract):
    """The module of windows."""

    package = comm_core
    modules = (WINDOWS,)
    elsewhere = (SELFCHECK,)
    describing = "from comm_core.windows.launch import WINDOWS; from comm_core.windows import table, watchdog"

    def test_as_many_blocks_fit_a_gpu_as_the_launch_counts_on(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        """Ranks that share a GPU wait for each other's blocks: all must be on it at once, or half never start.

        Every supported SM has 65,536 registers, given out by 256 to a warp, and room for 48 warps at least; an A100
        has 108 SMs, the fewest of the GPUs that are shared.
        """
        library = self.built(WINDOWS, tmp_path_factory)
        folder = PACKAGE / "include" / "comm_core"
        (threads,) = re.findall(r"kExchangeThreads = (\d+);", (folder / "exchange.cuh").read_text(encoding="utf-8"))
        kernels = (folder / "exchange_kernels.cuh").read_text(encoding="utf-8")
        (fit,) = re.findall(r"__launch_bounds__\(kExchangeThreads, (\d+)\)\s+exchange_push_kernel", kernels)
        warps = int(fit) * int(threads) // 32
        usage = cubin.kernel_usage(library.log.read_text(encoding="utf-8"))
        pushes = [item for item in usage if "exchange_push_kernel" in item.name]
        assert len(pushes) == 5 and warps <= 48
        for item in pushes:
            assert warps * (-(-item.registers * 32 // 256) * 256) <= 65536, item
        assert 108 * int(fit) >= transport._BLOCKS
