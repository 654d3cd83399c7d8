// The threads that share a row: those of one block, or of the blocks of one cluster.
//
// What they come to together does not depend on how many they are: the vectors of a row are grouped
// by 32 neighbours, each group is added up by the lanes of a warp, and the groups' results are
// combined in the order of the groups. So the launch of a call may follow from its size, and bits
// still depend on the row alone.
//
// Blocks of a cluster tell each other without fences: a fence would wait for everything that the
// thread has stored before, also across the link. A store into another block's shared memory counts
// at a barrier there, whose phase ends when all have come.
#pragma once

#include <stdint.h>

#include <comm_core/formats.cuh>

// Storage of a block whose size the launch says. A host compiler brings its own.
#if !defined(COMM_DYNAMIC_SHARED)
#define COMM_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif

namespace comm {

// Results that the threads of a row combine, at most: of groups of 32 vectors, or of warps.
constexpr uint32_t kTeamParts = 128;
constexpr uint32_t kTeamBlocks = 8;

// Whether a team can be more than one block.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
constexpr bool kClusters = true;
#else
constexpr bool kClusters = false;
#endif

#if defined(__CUDACC__)

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

// What the threads of a block share. Two of each take turns: when the first is used again,
// everybody has read it, because every warp of the team has given something since.
struct TeamMemory {
  uint32_t parts[2][kTeamParts];
  uint64_t barriers[2];
};

#if defined(__CUDA_ARCH__)
__device__ __forceinline__ uint32_t shared_address(const void* address) {
  return uint32_t(__cvta_generic_to_shared(address));
}

// The same place in the memory of another block of the cluster. Not computed again where it is
// used.
__device__ __forceinline__ uint32_t remote_address(uint32_t address, uint32_t block) {
  uint32_t remote = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(block));
#endif
  return remote;
}
#endif

// One thread of a team.
struct Team {
  TeamMemory* memory;  // of the block
  uint32_t blocks;     // of the team; 1 where the launch has no clusters
  uint32_t block;      // this one's number within the team
  uint32_t thread;     // within the team
  uint32_t threads;    // of the team, a multiple of 32 in each block
  uint32_t turn = 0;
  uint32_t phases = 0;  // which phase each barrier is in, a bit each

  // Before anything else, all threads of the block; `meet` follows.
  __device__ __forceinline__ void prepare() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks == 1) return;
    if (threadIdx.x == 0) {
      for (uint32_t i = 0; i < 2; ++i) {
        asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(shared_address(&memory->barriers[i]))
                     : "memory");
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  // All blocks of the team have started, and are prepared.
  __device__ __forceinline__ void meet() const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks != 1) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
  }

  // How many parts are given next. All threads, once before each `take`; the sooner, the less is
  // left to do when the last part comes, and some may have come already.
  __device__ __forceinline__ void expect(uint32_t count) const {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks == 1 || threadIdx.x != 0) return;
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(
                     shared_address(&memory->barriers[turn])),
                 "r"(count * 4)
                 : "memory");
#else
    (void)count;
#endif
  }

  // Where the parts and the barriers of the blocks are, a block for each of the first lanes.
  struct Places {
    uint32_t parts, barriers;
  };
  __device__ __forceinline__ Places places() const {
    Places found = {0, 0};
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks != 1) {
      const uint32_t lane = threadIdx.x % 32, other = lane < blocks ? lane : 0;
      found.parts = remote_address(shared_address(memory->parts), other);
      found.barriers = remote_address(shared_address(memory->barriers), other);
    }
#endif
    return found;
  }

  // Give a part to every block of the team. All lanes of a warp, with the same value. Who has
  // registers to spare has looked up the places before.
  __device__ __forceinline__ void put(uint32_t part, uint32_t value) const {
    put(part, value, places());
  }
  __device__ __forceinline__ void put(uint32_t part, uint32_t value, const Places& places) const {
    const uint32_t lane = threadIdx.x % 32;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks != 1) {
      if (lane < blocks) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                places.parts + (turn * kTeamParts + part) * 4),
            "r"(value), "r"(places.barriers + turn * 8)
            : "memory");
      }
      return;
    }
#endif
    (void)places;
    if (lane == 0) memory->parts[turn][part] = value;
  }

  // Combine `count` parts, which are expected and all of which are given by somebody; every thread
  // gets the result.
  template <class Combine>
  __device__ __forceinline__ uint32_t take(uint32_t count, Combine combine) {
    await_parts();
    const uint32_t* parts = memory->parts[turn];
    turn ^= 1;
    const uint32_t lane = threadIdx.x % 32;
    uint32_t value = lane < count ? parts[lane] : 0;
    COMM_NO_UNROLL
    for (uint32_t part = lane + 32; part < count; part += 32) value = combine(value, parts[part]);
    return combine_lanes(value, combine);
  }

  __device__ __forceinline__ float take_sum(uint32_t count) {
    return float_of(take(count, AddBits()));
  }
  __device__ __forceinline__ uint32_t take_max(uint32_t count) { return take(count, MaxBits()); }

  // The same for the lanes of a warp.
  template <class Combine>
  __device__ __forceinline__ static uint32_t combine_lanes(uint32_t value, Combine combine) {
    COMM_UNROLL
    for (uint32_t mask = 16; mask != 0; mask /= 2) {
      value = combine(value, __shfl_xor_sync(0xffffffffu, value, mask));
    }
    return value;
  }

  // Floats as bits; 0 changes nothing.
  struct AddBits {
    __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const {
      return bits_of(add_rn(float_of(a), float_of(b)));
    }
  };
  struct MaxBits {
    __device__ __forceinline__ uint32_t operator()(uint32_t a, uint32_t b) const {
      return max_u32(a, b);
    }
  };

 private:
  __device__ __forceinline__ void await_parts() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    if (blocks != 1) {
      const uint32_t barrier = shared_address(&memory->barriers[turn]);
      uint32_t done = 0;
      while (done == 0) {
        asm volatile(
            "{\n\t.reg .pred done;\n\t"
            "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, done;\n\t}"
            : "=r"(done)
            : "r"(barrier), "r"((phases >> turn) & 1)
            : "memory");
      }
      phases ^= 1u << turn;
      return;
    }
#endif
    __syncthreads();
  }
};

#endif  // __CUDACC__

}  // namespace comm
