"""The modules of comm-nvlink, compiled for every architecture."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import comm_nvlink
from comm_core.allreduce import launch
from comm_core.testing import cubin
from comm_core.testing.cuda_modules import CudaModulesContract
from comm_nvlink import routes
from comm_nvlink.allreduce import ALLREDUCE
from comm_nvlink.launch import ULYSSES
from comm_nvlink.plugin import plugin
from comm_nvlink.pool import POOL

PACKAGE = Path(comm_nvlink.__file__).parent


class TestModules(CudaModulesContract):
    """The exchange, the memory pool, which is plain C++, and the all-reduce."""

    package = comm_nvlink
    modules = (ULYSSES, POOL, ALLREDUCE)
    # The goal is 15 s on two cores, up to 30 of a processor; an idle machine takes 10, a busy one twice that.
    first_build_s = 20.0
    describing = "from comm_nvlink.plugin import plugin; plugin.comm_modules()"

    def test_the_plugin_lists_them(self) -> None:
        assert tuple(plugin.comm_modules()) == self.modules

    def test_all_blocks_of_ranks_that_share_a_gpu_are_on_it_at_once(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """They wait for each other: one that finds no room would never start, and the others wait for it.

        An SM has 65,536 registers. From compute capability 9.0 on the next call's blocks come early and wait for this
        call's end, so there must be room for both: on the 132 SMs of an H100 or H200. An A100 has 108.
        """
        library = self.built(ULYSSES, tmp_path_factory)
        text = (PACKAGE / "include" / "comm_nvlink" / "ulysses.cuh").read_text(encoding="utf-8")
        (threads,) = re.findall(r"kThreads = (\d+);", text)
        usage = cubin.kernel_usage(library.log.read_text(encoding="utf-8"))
        found = [item for item in usage if "exchange_kernel" in item.name and item.kernel]
        assert len(found) == 5
        for item in found:
            warps = int(threads) // 32
            fit = min(65536 // (warps * (-(-item.registers * 32 // 256) * 256)), 48 // warps)
            early = item.arch not in ("sm_80", "sm_89")
            assert (132 if early else 108) * fit >= (2 if early else 1) * routes.PER_SM * routes._SHARED_SMS, item

    def test_blocks_of_the_all_reduce_have_the_registers_that_launches_count_on(
        self, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """Blocks wait for each other, so as many must fit a multiprocessor as launches go by; whole rows take one."""
        usage = cubin.kernel_usage(self.built(ALLREDUCE, tmp_path_factory).log.read_text(encoding="utf-8"))
        found = [item for item in usage if item.kernel]
        rows = [item for item in found if "vector_kernel" in item.name and "Lb1E" in item.name]
        assert (len(found), len(rows)) == (24 * len(cubin.ARCHS), 3 * len(cubin.ARCHS))
        for item in found:
            # All that start together: a block of a whole row, or two others. Warps get 256 registers at a time.
            threads = launch.ROW_THREADS if item in rows else launch.PER_SM * launch.FUSED_THREADS
            assert threads // 32 * (-(-item.registers * 32 // 256) * 256) <= 65536, item
