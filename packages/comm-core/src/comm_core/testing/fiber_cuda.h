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
//
// What a GPU leaves undefined fails the launch, and cudaGetErrorString says what it was: lanes of a
// warp that meet at different places of the code, or threads of a block; a shuffle that reads from
// a lane that has ended; masks other than the whole warp, which no kernel here uses; and a block
// with more threads than the kernel's launch bounds. A lane that has ended is not waited for, as on
// a GPU.
#pragma once

#define __CUDACC__ 1
#define __host__
#define __device__
#define __global__ static
#define __forceinline__ inline
#define __grid_constant__
// A kernel's bound can be read from it: it begins with a no-op for each warp.
#define __launch_bounds__(threads, ...) \
  __attribute__((patchable_function_entry(((threads) + 31) / 32, 0)))
#define __shared__ static thread_local
#define __align__(n) __attribute__((aligned(n)))

#include <dlfcn.h>
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
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
enum { cudaSuccess = 0, cudaErrorLaunchOutOfResources = 701, cudaErrorLaunchFailure = 719 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
struct cudaFuncAttributes {};
namespace host {
inline thread_local std::string problem;  // of the last launch of this thread that failed
}
inline cudaError_t cudaGetLastError() { return 0; }
inline const char* cudaGetErrorString(cudaError_t) { return host::problem.c_str(); }
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorLaunchOutOfResources ? "cudaErrorLaunchOutOfResources"
                                                : "cudaErrorLaunchFailure";
}
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

// Where in the code threads meet, and by which calls: addresses behind calls, innermost first. On a
// device all of that is inlined, and a place of the code by itself.
struct Site {
  static constexpr unsigned kCalls = 8;
  const char* calls[kCalls] = {};

  bool operator==(const Site& other) const {
    return memcmp(calls, other.calls, sizeof(calls)) == 0;
  }
  bool operator<(const Site& other) const { return memcmp(calls, other.calls, sizeof(calls)) < 0; }
};

// What addr2line prints, as "file:line < file:line", files without their folders.
inline std::string lines_from(const std::string& command) {
  FILE* output = popen(command.c_str(), "r");
  if (output == nullptr) return "";
  std::string lines;
  char line[4096];
  while (fgets(line, sizeof(line), output) != nullptr) {
    std::string text(line, strcspn(line, "\n"));
    text = text.substr(0, text.find(" (discriminator"));
    if (text.find("??") != std::string::npos) continue;
    lines += (lines.empty() ? "" : " < ") + text.substr(text.rfind('/') + 1);
  }
  pclose(output);
  return lines;
}

// A site as "file:line < file:line"; empty where it can't be found out. Takes long.
inline std::string lines_of(const Site& site) {
  Dl_info library, other;
  if (dladdr(site.calls[0], &library) == 0) return "";
  std::string command = "addr2line -i -e '";
  for (const char* next = library.dli_fname; *next != '\0'; ++next) {
    command += *next == '\'' ? "'\\''" : std::string(1, *next);
  }
  command += "'";
  char address[32];
  for (const char* call : site.calls) {
    if (call == nullptr || dladdr(call, &other) == 0 || other.dli_fbase != library.dli_fbase) break;
    // Within the call, not behind it.
    snprintf(address, sizeof(address), " %#zx",
             size_t(call - static_cast<const char*>(library.dli_fbase) - 1));
    command += address;
  }
  return lines_from(command + " 2>/dev/null");
}

// Whether two sites are one place of the source, which a compiler may have copied.
inline bool same_place(const Site& one, const Site& other) {
  if (one == other) return true;
  static std::mutex mutex;
  static std::map<Site, std::string> known;
  std::lock_guard<std::mutex> guard(mutex);
  for (const Site* site : {&one, &other}) {
    if (known.find(*site) == known.end()) known[*site] = lines_of(*site);
  }
  return !known[one].empty() && known[one] == known[other];
}

// Meets all fibers of a block or a warp that have not ended.
struct Meeting {
  unsigned expected = 0, arrived = 0, round = 0;

  bool open_if_full() {
    if (expected == 0 || arrived < expected) return false;
    arrived = 0;
    ++round;
    return true;
  }
};

struct Warp {
  Meeting own;           // of its lanes alone
  uint32_t waiting = 0;  // lanes that wait, also for the block
  Site site;             // where
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
  std::vector<Warp> warps;
  Meeting all;
  Site site;            // where threads wait for all
  std::string problem;  // what has failed the launch
  uint32_t all_and = 1, all_or = 0, last_and = 0, last_or = 0;
  jmp_buf scheduler;
  unsigned current = 0;
  ptrdiff_t depth = 0;  // of a fiber's stack where it calls the kernel
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

inline thread_local Block* block;  // the running one
inline thread_local uint64_t launches = 1;
inline thread_local uint64_t meetings = 0;         // of warps, not of blocks
inline thread_local const void* kernel = nullptr;  // launched last
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

inline Warp& warp() { return block->warps[block->current / 32]; }

inline void open_block_if_full() {
  Block& own = *block;
  if (!own.all.open_if_full()) return;
  for (Warp& one : own.warps) one.waiting = 0;
  own.last_and = own.all_and;
  own.last_or = own.all_or;
  own.all_and = 1;
  own.all_or = 0;
}

inline void open_warp_if_full(Warp& one) {
  if (!one.own.open_if_full()) return;
  one.waiting = 0;
  ++meetings;
}

// Without the lines of this header, where it begins.
inline std::string name_of(const Site& site) {
  std::string lines = lines_of(site);
  while (lines.compare(0, 13, "fiber_cuda.h:") == 0) {
    const size_t end = lines.find(" < ");
    lines.erase(0, end == std::string::npos ? end : end + 3);
  }
  return lines.empty() ? "unknown" : lines;
}

inline std::string lanes_of(uint32_t mask) {
  std::string lanes;
  for (unsigned lane = 0; lane < 32; ++lane) {
    if (mask >> lane & 1) lanes += (lanes.empty() ? "" : ",") + std::to_string(lane);
  }
  return lanes;
}

inline void describe(const std::string& what) {
  const std::string row = gridDim.y == 1 ? "" : " of row " + std::to_string(blockIdx.y);
  block->problem = "block " + std::to_string(blockIdx.x) + row + ", warp " +
                   std::to_string(block->current / 32) + ", lane " +
                   std::to_string(block->current % 32) + ": " + what;
}

// End the launch: nothing that it would still do is defined.
[[noreturn]] inline void fail() { _longjmp(block->scheduler, 1); }

[[noreturn]] __attribute__((noinline)) inline void diverge(const Site& site) {
  {
    const Warp& own = warp();
    const bool in_warp = own.waiting != 0 && !same_place(own.site, site);
    const std::string others =
        in_warp ? "lanes " + lanes_of(own.waiting) + " of its warp" : "threads of other warps";
    describe("meets at [" + name_of(site) + "], but " + others + " wait at [" +
             name_of(in_warp ? own.site : block->site) + "]");
  }
  fail();
}

// By which calls this fiber has come to `frame`: each frame begins with the address of the one
// before it, and where that one goes on.
inline Site site_of(void* frame) {
  Site site;
  const char* top = &block->stacks[block->current * kStack] + kStack;
  for (unsigned i = 0; i < Site::kCalls; ++i) {
    void* caller = static_cast<void**>(frame)[0];
    if (top - static_cast<const char*>(caller) <= block->depth) break;
    site.calls[i] = static_cast<const char**>(frame)[1];
    frame = caller;
  }
  return site;
}

// Wait for the others of this fiber's block or warp. Never inlined: its own frame is where the way
// to the kernel begins.
__attribute__((noinline)) inline void meet(bool of_block) {
  const Site site = site_of(__builtin_frame_address(0));
  Block& own = *block;
  Warp& mine = warp();
  if (mine.waiting == 0) {
    mine.site = site;
  } else if (!same_place(mine.site, site)) {
    diverge(site);
  }
  if (of_block) {
    if (own.all.arrived == 0) {
      own.site = site;
    } else if (!same_place(own.site, site)) {
      diverge(site);
    }
  }
  mine.waiting |= 1u << own.current % 32;
  Meeting& meeting = of_block ? own.all : mine.own;
  const unsigned round = meeting.round;
  ++meeting.arrived;
  if (of_block) {
    open_block_if_full();
  } else {
    open_warp_if_full(mine);
  }
  while (meeting.round == round) yield();
}

inline void fiber() {
  Block& own = *block;
  own.body(own.argument);
  own.ended[own.current] = true;
  --own.all.expected;
  open_block_if_full();
  --warp().own.expected;
  open_warp_if_full(warp());
  _longjmp(own.scheduler, 1);
}

// Whether it came to its end.
inline bool run_block(unsigned threads, void (*body)(void*), void* argument) {
  Block& own = *block;
  own.body = body;
  own.argument = argument;
  own.ended.assign(threads, false);
  own.warps.assign((threads + 31) / 32, Warp());
  own.problem.clear();
  own.all = Meeting();
  own.all.expected = threads;
  own.all_and = 1;
  own.all_or = 0;
  for (unsigned i = 0; i < threads; ++i) {
    ++own.warps[i / 32].own.expected;
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
      if (!own.problem.empty()) return false;
      if (own.ended[i]) --left;
    }
  }
  return true;
}

// Run blocks on this thread, each the next one of the launch, until there is none left or one has
// failed.
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
    const bool good = run_block(
        threads,
        [](void* argument) {
          Call* call = static_cast<Call*>(argument);
          block->depth = &block->stacks[block->current * kStack] + kStack -
                         static_cast<const char*>(__builtin_frame_address(0));
          call->kernel(*call->params);
        },
        &call);
    if (!good) return;
  }
}

// Returns what failed it, or nothing.
template <class Params>
std::string run(dim3 grid, unsigned threads, void (*kernel)(Params), const Params& params) {
  std::atomic<unsigned> next{0};
  if (COMM_HOST_BLOCKS == 1) {
    // Kept: clearing the stacks for each launch takes longer than the launch.
    static thread_local Block kept;
    run_blocks(kept, next, grid, threads, kernel, params);
    return kept.problem;
  }
  const std::vector<uint64_t> dynamic = shared;
  std::vector<std::thread> pool;
  std::mutex mutex;
  std::string problem;
  for (unsigned i = 0; i < COMM_HOST_BLOCKS && i < grid.x * grid.y; ++i) {
    pool.emplace_back([&] {
      Block own;
      shared = dynamic;
      run_blocks(own, next, grid, threads, kernel, params);
      std::lock_guard<std::mutex> guard(mutex);
      if (problem.empty()) problem = own.problem;
    });
  }
  for (std::thread& one : pool) one.join();
  return problem;
}

// Threads of a block, at most, by the kernel's launch bounds.
inline unsigned bound_of(const void* kernel) {
  unsigned warps = 0;
#if defined(__x86_64__)
  const unsigned char* code = static_cast<const unsigned char*>(kernel);
  while (code[warps] == 0x90) ++warps;
#elif defined(__aarch64__)
  const uint32_t* code = static_cast<const uint32_t*>(kernel);
  while (code[warps] == 0xd503201f) ++warps;
#else
#error "the no-op of this processor"
#endif
  return warps == 0 ? 1024 : warps * 32;
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
  host::kernel = reinterpret_cast<const void*>(kernel);
  const unsigned threads = config->blockDim.x, bound = host::bound_of(host::kernel);
  if (threads > bound) {
    host::problem = "a block of " + std::to_string(threads) +
                    " threads, the kernel is bounded to " + std::to_string(bound);
    return cudaErrorLaunchOutOfResources;
  }
  // Unlike a device's, it holds what reads of what nobody has written would show.
  host::shared.assign((config->dynamicSmemBytes + 15) / 8, 0x5a5a5a5a5a5a5a5aull);
  host::problem = host::run(config->gridDim, threads, kernel, params);
  return host::problem.empty() ? cudaSuccess : cudaErrorLaunchFailure;
}

template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __syncthreads() { host::meet(true); }

// The outcome of a vote stands until all have met again.
inline void host_vote(bool value) {
  host::block->all_and &= value;
  host::block->all_or |= value;
}

inline int __syncthreads_and(bool value) {
  host_vote(value);
  host::meet(true);
  return host::block->last_and;
}

inline int __syncthreads_or(bool value) {
  host_vote(value);
  host::meet(true);
  return host::block->last_or;
}

inline void host_require_all(unsigned mask) {
  if (mask == 0xffffffffu) return;
  host::describe("a mask that is not the whole warp");
  host::fail();
}

// Whether a thread of the block takes part in what its warp does.
inline bool host_is_there(unsigned thread) {
  return thread < blockDim.x && !host::block->ended[thread];
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  host_require_all(mask);
  host::meet(false);
}

template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, unsigned lanes) {
  static_assert(sizeof(T) == 4, "one word");
  host::Block& own = *host::block;
  const unsigned source = own.current ^ lanes;
  host_require_all(mask);
  memcpy(&own.exchanged[own.current], &value, 4);
  host::meet(false);
  if (!host_is_there(source)) {
    host::describe("a shuffle reads from lane " + std::to_string(source % 32) +
                   ", which has ended");
    host::fail();
  }
  T other;
  memcpy(&other, &own.exchanged[source], 4);
  host::meet(false);
  return other;
}

inline int __any_sync(unsigned mask, bool value) {
  host::Block& own = *host::block;
  host_require_all(mask);
  own.exchanged[own.current] = value;
  host::meet(false);
  int any = 0;
  for (unsigned lane = 0; lane < 32; ++lane) {
    const unsigned thread = own.current / 32 * 32 + lane;
    if (host_is_there(thread)) any |= own.exchanged[thread];
  }
  host::meet(false);
  return any;
}

// The launches since this was asked for the last time, below a leading 1.
extern "C" __attribute__((visibility("default"))) uint64_t host_launches() {
  uint64_t seen = host::launches;
  host::launches = 1;
  return seen;
}

// The meetings of whole warps since this was asked for the last time: synchronizations, two for
// each shuffle and vote. Of launches whose blocks run one after the other.
extern "C" __attribute__((visibility("default"))) uint64_t host_meetings() {
  uint64_t seen = host::meetings;
  host::meetings = 0;
  return seen;
}

// The kernel that this thread has launched last, as the module's own table has it.
extern "C" __attribute__((visibility("default"))) const void* host_kernel() { return host::kernel; }
