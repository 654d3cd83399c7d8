// The two ends of a test of one link: who writes a pattern into a peer's memory, and who compares
// it.
//
// Writing and announcing is done as in an exchange: 16-byte stores, counted by the last block,
// which releases a flag at system scope. Comparing begins when that flag was acquired.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm_pcie {

constexpr uint32_t kTestThreads = 256;

// What the receiver has found, in its own memory; zero at the start.
struct TestCounts {
  unsigned long long wrong;
  unsigned long long first;
  unsigned long long came;
};

// Word `index` of a pattern: no two neighbours and no two seeds look alike, so a shifted or stale
// row shows.
COMM_HD uint32_t pattern_word(uint32_t seed, uint64_t index) {
  uint32_t x = uint32_t(index) * 0x9e3779b9u + seed * 0x85ebca6bu + 1u;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

#if defined(__CUDACC__)

// Write the pattern; the last block releases `flag` (null: none).
__global__ void __launch_bounds__(kTestThreads)
    selftest_write_kernel(uint32_t* data, uint64_t words, uint32_t seed, uint32_t spoil,
                          uint32_t* counter, uint32_t* flag) {
  uint64_t stride = uint64_t(gridDim.x) * blockDim.x * 4;
  for (uint64_t at = (uint64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 4; at < words;
       at += stride) {
    uint4 value = make_uint4(pattern_word(seed, at), pattern_word(seed, at + 1),
                             pattern_word(seed, at + 2), pattern_word(seed, at + 3));
    if (spoil > at && spoil <= at + 4) value.x ^= 1u;
    *reinterpret_cast<uint4*>(data + at) = value;
  }
  __syncthreads();
  if (threadIdx.x == 0 && comm::last_part(counter, gridDim.x) && flag != nullptr)
    comm::store_release(flag, 1);
}

// Release a flag behind copies, as the end of an exchange does.
__global__ void selftest_release_kernel(uint32_t* flag) { comm::store_release(flag, 1); }

// Wait for the flag, then compare. One block; leaves at the deadline.
__global__ void __launch_bounds__(kTestThreads)
    selftest_check_kernel(const uint32_t* data, uint64_t words, uint32_t seed, const uint32_t* flag,
                          uint64_t timeout_ns, TestCounts* counts) {
  __shared__ bool came;
  if (threadIdx.x == 0) {
    uint64_t deadline = comm::now_ns() + timeout_ns;
    uint32_t value = comm::load_acquire(flag);
    while (value != 1 && comm::now_ns() < deadline) value = comm::load_acquire(flag);
    came = value == 1;
    counts->came = came;
    counts->first = ~0ull;
  }
  __syncthreads();
  if (!came) return;
  for (uint64_t at = threadIdx.x; at < words; at += blockDim.x) {
    if (data[at] == pattern_word(seed, at)) continue;
    atomicAdd(&counts->wrong, 1ull);
    atomicMin(&counts->first, (unsigned long long)at);
  }
}

#endif

}  // namespace comm_pcie
