// The threads that share a row: those of one block, or of the blocks of one cluster.
//
// What they come to together does not depend on how many blocks they are: partial results are made
// by warps of 32 neighbours, numbered through all blocks, and combined in the order of the numbers.
// So the launch of a call may follow from its size, and bits still depend on the row alone.
#pragma once

#include <stdint.h>

#include <comm_core/formats.cuh>

// Storage of a block whose size the launch says. A host compiler brings its own.
#if !defined(COMM_DYNAMIC_SHARED)
#define COMM_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace comm {

// Warps that share a row, at most: their partial results are combined by the lanes of one warp.
constexpr uint32_t kTeamWarps = 32;
constexpr uint32_t kTeamBlocks = 8;

// Whether a team can be more than one block.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

#if defined(__CUDACC__)

// A word that a block of the cluster has in shared memory, at the same place as this block's own.
__device__ __forceinline__ void store_in_block(uint32_t* own, uint32_t block, uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const uint32_t address = uint32_t(__cvta_generic_to_shared(own));
  asm volatile(
      "{\n\t.reg .b32 remote;\n\tmapa.shared::cluster.u32 remote, %0, %1;\n\t"
      "st.shared::cluster.u32 [remote], %2;\n\t}" ::"r"(address),
      "r"(block), "r"(value)
      : "memory");
#else
  (void)block;
  *own = value;
#endif
}

// Copy a vector into shared memory without passing through registers; see await_fetched.
__device__ __forceinline__ void fetch(Vector* to, const void* base, uint64_t index) {
  const Vector* from = static_cast<const Vector*>(base) + index;
#if defined(__CUDA_ARCH__)
  asm volatile(
      "cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))),
      "l"(from)
      : "memory");
#else
  memcpy(to, from, 16);
#endif
}

// Wait until everything that this thread has fetched is there; for this thread alone.
__device__ __forceinline__ void await_fetched() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// All threads of all blocks of the cluster; what they stored before is visible afterwards.
__device__ __forceinline__ void meet_in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// One thread of a team.
struct Team {
  uint32_t* scratch;  // of the block: 2 * kTeamWarps words
  uint32_t blocks;    // of the team; 1 where the launch has no clusters
  uint32_t block;     // this one's number within the team
  uint32_t thread;    // within the team
  uint32_t threads;   // of the team, a multiple of 32 in each block
  uint32_t turn = 0;  // which half of the scratch is next: one may still be read when the other is
                      // written, and before the first is written again all have met

  __device__ __forceinline__ void meet() const {
    if (!kClusters || blocks == 1) {
      __syncthreads();
    } else {
      meet_in_cluster();
    }
  }

  // Combine a word of every thread; every thread gets the result. `combine` is commutative.
  template <class Combine>
  __device__ __forceinline__ uint32_t reduce(uint32_t value, uint32_t identity, Combine combine) {
    const uint32_t lane = threadIdx.x % 32;
    COMM_UNROLL
    for (uint32_t mask = 16; mask != 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    uint32_t* partial = scratch + turn * kTeamWarps;
    turn ^= 1;
    if (!kClusters || blocks == 1) {
      if (lane == 0) partial[thread / 32] = value;
    } else if (lane < blocks) {
      store_in_block(&partial[thread / 32], lane, value);
    }
    meet();
    value = lane < threads / 32 ? partial[lane] : identity;
    COMM_UNROLL
    for (uint32_t mask = 16; mask != 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    return value;
  }

  __device__ __forceinline__ float sum(float value) {
    return float_of(reduce(bits_of(value), 0, [](uint32_t a, uint32_t b) {
      return bits_of(add_rn(float_of(a), float_of(b)));
    }));
  }

  __device__ __forceinline__ uint32_t max(uint32_t value) {
    return reduce(value, 0, [](uint32_t a, uint32_t b) { return max_u32(a, b); });
  }
};

#endif  // __CUDACC__

}  // namespace comm
