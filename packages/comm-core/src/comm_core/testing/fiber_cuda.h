// CUDA on a host, as much of it as the kernels of this project use: the threads of a block are
// fibers that run in turn, blocks run one after the other, device memory is host memory, a launch
// runs at once. With COMM_HOST_BLOCKS, as many blocks of a launch run at the same time, on threads
// of their own; they start in order, as on a GPU.
//
// A test puts this before a module's source and compiles both with a host compiler
// (comm_core/testing/host_modules.py, compile_with_fibers). What runs is the real code of the
// kernels, apart from the few lines that are written in PTX. Ranks may be threads. Blocks that wait
// for later blocks of their own launch would hang; those that wait for earlier ones, or for the
// same blocks of other ranks, don't. There are no clusters.
#pragma once

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))

#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <thread>
#include <vector>

#if !defined(COMM_HOST_BLOCKS)
#define COMM_HOST_BLOCKS 1
#endif

#define COMM_SPIN() host_spin()
#define COMM_SYNC_WARP() __syncwarp()
#define COMM_DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(host::shared.data())

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct uint2 {
  unsigned x, y;
};
struct uint4 {
  unsigned x, y, z, w;
};

typedef void* cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
struct cudaFuncAttributes {};
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return ""; }
inline const char* cudaGetErrorName(cudaError_t) { return ""; }
inline cudaError_t cudaGetDevice(int* device) { return *device = 0; }
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return 0; }

enum {
  cudaLaunchAttributeClusterDimension = 4,
  cudaLaunchAttributeProgrammaticStreamSerialization = 6
};
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, int, int) {
  return cudaSuccess;
}
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

inline thread_local dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {

constexpr size_t kStack = 128 << 10;

// Meets all fibers of a block or a warp that have not ended.
struct Meeting {
  unsigned expected = 0, arrived = 0, round = 0;

  void open_if_full() {
    if (expected != 0 && arrived >= expected) {
      arrived = 0;
      ++round;
    }
  }
};

struct Fiber {
  jmp_buf place;
  ucontext_t start;
  bool started = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<char> stacks;
  std::vector<bool> ended;
  std::vector<uint32_t> exchanged;
  std::vector<Meeting> warps;
  Meeting all;
  uint32_t all_and = 1, all_or = 0, last_and = 0, last_or = 0;
  jmp_buf scheduler;
  unsigned current = 0;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

inline thread_local Block* block;  // the running one
inline thread_local uint64_t launches = 1;
inline thread_local std::vector<uint64_t> shared;  // storage of a block whose size the launch says

// Jumps, since swapcontext makes two system calls.
inline void yield() {
  if (_setjmp(block->fibers[block->current].place) == 0) _longjmp(block->scheduler, 1);
}

inline void resume(unsigned i) {
  Fiber& fiber = block->fibers[i];
  if (_setjmp(block->scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.place, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

inline void meet(Meeting& meeting) {
  unsigned round = meeting.round;
  ++meeting.arrived;
  meeting.open_if_full();
  while (meeting.round == round) yield();
}

inline Meeting& warp() { return block->warps[block->current / 32]; }

inline void fiber() {
  Block& own = *block;
  own.body(own.argument);
  own.ended[own.current] = true;
  --own.all.expected;
  own.all.open_if_full();
  --warp().expected;
  warp().open_if_full();
  _longjmp(own.scheduler, 1);
}

inline void run_block(unsigned threads, void (*body)(void*), void* argument) {
  Block& own = *block;
  own.body = body;
  own.argument = argument;
  own.ended.assign(threads, false);
  own.warps.assign((threads + 31) / 32, Meeting());
  own.all = Meeting();
  own.all.expected = threads;
  own.all_and = 1;
  own.all_or = 0;
  for (unsigned i = 0; i < threads; ++i) {
    ++own.warps[i / 32].expected;
    ucontext_t& start = own.fibers[i].start;
    getcontext(&start);
    start.uc_stack.ss_sp = &own.stacks[i * kStack];
    start.uc_stack.ss_size = kStack;
    start.uc_link = nullptr;
    makecontext(&start, fiber, 0);
    own.fibers[i].started = false;
  }
  for (unsigned left = threads; left != 0;) {
    // In reverse, since nothing may hang on the order.
    for (unsigned i = threads; i-- > 0;) {
      if (own.ended[i]) continue;
      own.current = i;
      threadIdx = dim3(i);
      resume(i);
      if (own.ended[i]) --left;
    }
  }
}

// Run blocks on this thread, each the next one of the launch, until there is none left.
template <class Params>
void run_blocks(Block& own, std::atomic<unsigned>& next, dim3 grid, unsigned threads,
                void (*kernel)(Params), const Params& params) {
  struct Call {
    void (*kernel)(Params);
    const Params* params;
  } call = {kernel, &params};
  if (own.fibers.size() < threads) {
    own.fibers.resize(threads);
    own.stacks.resize(threads * kStack);
    own.exchanged.resize(threads);
  }
  block = &own;
  blockDim = dim3(threads);
  gridDim = grid;
  for (unsigned i = next++; i < grid.x * grid.y; i = next++) {
    blockIdx = dim3(i % grid.x, i / grid.x);
    run_block(
        threads,
        [](void* argument) {
          Call* call = static_cast<Call*>(argument);
          call->kernel(*call->params);
        },
        &call);
  }
}

template <class Params>
void run(dim3 grid, unsigned threads, void (*kernel)(Params), const Params& params) {
  std::atomic<unsigned> next{0};
  if (COMM_HOST_BLOCKS == 1) {
    // Kept: clearing the stacks for each launch takes longer than the launch.
    static thread_local Block kept;
    run_blocks(kept, next, grid, threads, kernel, params);
    return;
  }
  const std::vector<uint64_t> dynamic = shared;
  std::vector<std::thread> pool;
  for (unsigned i = 0; i < COMM_HOST_BLOCKS && i < grid.x * grid.y; ++i) {
    pool.emplace_back([&] {
      Block own;
      shared = dynamic;
      run_blocks(own, next, grid, threads, kernel, params);
    });
  }
  for (std::thread& one : pool) one.join();
}

}  // namespace host

// A thread that waits for another rank lets its block's other threads run: what they store may be
// what the other rank waits for.
inline void host_spin() {
  if (host::block != nullptr) host::yield();
  sched_yield();
}

template <class Params>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params),
                               const Params& params) {
  // One bit a launch, the last one lowest: whether it may start early.
  host::launches = host::launches << 1 | config->numAttrs;
  // Unlike a device's, it holds what reads of what nobody has written would show.
  host::shared.assign((config->dynamicSmemBytes + 15) / 8, 0x5a5a5a5a5a5a5a5aull);
  host::run(config->gridDim, config->blockDim.x, kernel, params);
  return cudaSuccess;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __syncthreads() { host::meet(host::block->all); }

// The outcome of a vote stands until the next one has been voted for by all.
inline void host_vote(bool value) {
  host::Block& own = *host::block;
  own.all_and &= value;
  own.all_or |= value;
  if (own.all.arrived + 1 == own.all.expected) {
    own.last_and = own.all_and;
    own.last_or = own.all_or;
    own.all_and = 1;
    own.all_or = 0;
  }
  host::meet(own.all);
}

inline int __syncthreads_and(bool value) {
  host_vote(value);
  return host::block->last_and;
}

inline int __syncthreads_or(bool value) {
  host_vote(value);
  return host::block->last_or;
}

inline void __syncwarp(unsigned = 0) { host::meet(host::warp()); }

template <class T>
T __shfl_xor_sync(unsigned, T value, unsigned mask) {
  static_assert(sizeof(T) == 4, "one word");
  host::Block& own = *host::block;
  memcpy(&own.exchanged[own.current], &value, 4);
  __syncwarp();
  T other;
  memcpy(&other, &own.exchanged[own.current ^ mask], 4);
  __syncwarp();
  return other;
}

inline int __any_sync(unsigned, bool value) {
  host::Block& own = *host::block;
  own.exchanged[own.current] = value;
  __syncwarp();
  int any = 0;
  for (unsigned lane = 0; lane < 32; ++lane) any |= own.exchanged[own.current / 32 * 32 + lane];
  __syncwarp();
  return any;
}

// The launches since this was asked for the last time, below a leading 1.
extern "C" __attribute__((visibility("default"))) uint64_t host_launches() {
  uint64_t seen = host::launches;
  host::launches = 1;
  return seen;
}
