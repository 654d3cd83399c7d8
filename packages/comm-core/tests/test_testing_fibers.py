"""fiber_cuda.h: what a GPU leaves undefined fails the launch and is told with its lines; what it allows does not."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from comm_core.testing.host_modules import compile_fibers

SOURCE = """
struct Params {
  uint32_t* out;
  uint32_t which;
};

inline __attribute__((noinline)) void join() { __syncwarp(); }  // join

inline void wait_and_join(uint32_t spins) {
  for (uint32_t i = 0; i < spins; ++i) COMM_SPIN();
  join();
}

template <bool kLarge>
__global__ void __launch_bounds__(kLarge ? 256 : 96, 1) kernel(const __grid_constant__ Params p) {
  const uint32_t thread = threadIdx.x, lane = thread % 32;
  uint32_t value = thread;
  switch (p.which) {
    case 0:  // lanes that leave loops one by one, and lanes that have ended
      for (uint32_t i = 0; i < 3; ++i) wait_and_join(lane * i);
      if (lane >= 16) return;
      join();
      value = __shfl_xor_sync(0xffffffffu, value, 8);
      value = __syncthreads_or(value == 70) ? value + __any_sync(0xffffffffu, lane == 3) : 0;
      break;
    case 1:  // the same function, called from two places
      if (lane == 5) join();  // one
      else join();            // other
      break;
    case 2:
      if (lane < 2) __syncthreads();  // one
      else __syncwarp();              // other
      break;
    case 3:
      if (thread < 32) __syncthreads();  // one
      else __syncthreads();              // other
      break;
    case 4:
      if (lane == 9) return;
      value = __shfl_xor_sync(0xffffffffu, value, 1);
      break;
    case 5:
      __syncwarp(0x0000ffffu);
      break;
    case 6:  // a lane that goes round a loop once less
      for (uint32_t i = 0; i < (lane == 7 ? 1u : 2u); ++i) join();  // one
      join();                                                       // other
      break;
    case 7:  // the last one doesn't vote, but ends
      if (thread == 0) {
        for (uint32_t i = 0; i < 5; ++i) COMM_SPIN();
        return;
      }
      value = 10 * __syncthreads_and(thread != 0) + __syncthreads_or(thread == 1);
      break;
  }
  p.out[thread] = value;
}

extern "C" __attribute__((visibility("default"))) const char* run(uint32_t which, uint32_t threads,
                                                                  bool large, uint32_t* out) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(threads);
  const Params params = {out, which};
  const int error = cudaLaunchKernelEx(&config, large ? kernel<true> : kernel<false>, params);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}
"""

Run = Callable[..., str]


@pytest.fixture(scope="module", params=[1, 2], ids=["blocks in turn", "blocks at once"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    # A path that a shell would take apart.
    folder: Path = tmp_path_factory.mktemp("the fibers' own")
    flags = ("-Wno-misleading-indentation", f"-DCOMM_HOST_BLOCKS={request.param}")
    function = ctypes.CDLL(str(compile_fibers(SOURCE, folder / "kernel", flags=flags))).run
    function.restype = ctypes.c_char_p

    def call(which: int, threads: int = 64, *, large: bool = False, out: ctypes.Array[ctypes.c_uint32]) -> str:
        return function(which, threads, large, out).decode()

    return call


def words() -> ctypes.Array[ctypes.c_uint32]:
    return (ctypes.c_uint32 * 256)()


def line(mark: str, number: int = 0) -> str:
    """Return where a line of the source is that ends in a comment."""
    found = [i for i, text in enumerate(SOURCE.splitlines(), 2) if text.rstrip().endswith(f"// {mark}")]
    return f"kernel.cpp:{found[number]}"


def test_what_a_gpu_allows_runs(run: Run) -> None:
    """Lanes that come late, and lanes that have ended: those aren't waited for."""
    out = words()
    assert run(0, 96, large=True, out=out) == ""
    expected = [(i ^ 8) + 1 if i % 32 < 16 else 0 for i in range(96)]
    assert list(out[:96]) == expected


def test_a_thread_that_ends_counts_as_one_that_has_voted(run: Run) -> None:
    out = words()
    assert run(7, 64, out=out) == ""
    assert list(out[1:64]) == [11] * 63


@pytest.mark.parametrize(
    ("which", "number", "through"),
    [(1, 0, True), (2, 1, False), (6, 3, True)],
    ids=["two calls of one function", "of the block and of the warp", "a round less"],
)
def test_lanes_that_meet_at_different_places_are_named(run: Run, which: int, number: int, through: bool) -> None:
    """With the calls that lead there: a function that waits is called from many places."""
    text = run(which, out=words())
    match = re.fullmatch(
        r"block 0, warp 1, lane (\d+): meets at \[(.+)\], but lanes ([\d,]+) of its warp wait at \[(.+)\]", text
    )
    assert match is not None, text
    lead = f"{line('join')} < " if through else ""
    assert {match[2], match[4]} == {lead + line("one", number), lead + line("other", number)}
    assert match[1] not in match[3].split(",")


def test_warps_of_a_block_that_meet_at_different_places_are_named(run: Run) -> None:
    text = run(3, out=words())
    assert f"meets at [{line('one', 2)}], but threads of other warps wait at [{line('other', 2)}]" in text


def test_a_shuffle_with_a_lane_that_has_ended_fails(run: Run) -> None:
    text = run(4, out=words())
    assert "lane 8: a shuffle reads from lane 9, which has ended" in text


def test_a_part_of_a_warp_is_not_known_here(run: Run) -> None:
    assert "a mask that is not the whole warp" in run(5, out=words())


def test_a_block_with_more_threads_than_the_kernel_is_bounded_to_fails(run: Run) -> None:
    """As on a GPU, each instantiation by its own bound."""
    assert run(0, 96, out=words()) == ""
    assert run(0, 97, out=words()) == "a block of 97 threads, the kernel is bounded to 96"
    assert run(0, 256, large=True, out=words()) == ""
    assert run(0, 257, large=True, out=words()).endswith("bounded to 256")


def test_the_next_launch_is_as_good_as_the_first(run: Run) -> None:
    """What a launch that failed has left of its threads is forgotten."""
    out = words()
    assert run(1, out=out) != ""
    assert run(0, 64, out=out) == ""
