"""The start of an all-reduce in two shots, as kernels do it: lanes that have read different things stay together."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable

import pytest

from comm_core.testing.host_modules import compile_fibers

RANKS = 3
SOURCE = """
#include <comm_core/allreduce.cuh>

namespace comm {

struct Params {
  ReduceParams reduce;
  uint32_t told;
};

__global__ void start_kernel(const __grid_constant__ Params p) {
  Member m = enter(p.reduce);
  if (p.told >> threadIdx.x % 32 & 1) m.wait = Wait::kAborted;
  announce_start(m);
  __syncthreads();
}

}  // namespace comm

extern "C" __attribute__((visibility("default"))) const char* start(uint32_t told, uint32_t* epochs) {
  constexpr uint32_t kRanks = 3;
  static comm::SignalBlock blocks[kRanks];
  memset(static_cast<void*>(blocks), 0, sizeof(blocks));
  comm::Params params = {};
  params.told = told;
  params.reduce.session.world_size = kRanks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) params.reduce.session.signals[rank] = &blocks[rank];
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = dim3(64);
  const int error = cudaLaunchKernelEx(&config, comm::start_kernel, params);
  for (uint32_t rank = 0; rank < kRanks; ++rank) epochs[rank] = blocks[rank].ready[0].epoch;
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
"""
Start = Callable[[int], list[int]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    function = ctypes.CDLL(str(compile_fibers(SOURCE, tmp_path_factory.mktemp("start") / "start"))).start
    function.restype = ctypes.c_char_p

    def call(told: int) -> list[int]:
        epochs = (ctypes.c_uint32 * RANKS)()
        assert function(told, epochs) == b""
        return list(epochs)

    return call


def test_a_rank_that_starts_announces_it_to_all_others(start: Start) -> None:
    assert start(0) == [0, 1, 1]


@pytest.mark.parametrize("told", [0xFFFFFFFF, 1, 1 << 31, 1 << 1, 0x0000FFFF], ids=hex)
def test_lanes_of_which_some_were_told_of_an_abort_stay_together(start: Start, told: int) -> None:
    """None announces, and none waits for the others at a place that they never reach."""
    assert start(told) == [0, 0, 0]
