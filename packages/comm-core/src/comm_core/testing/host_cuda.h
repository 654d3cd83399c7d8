// What CUDA sources need of the runtime, on a host: device memory is host memory, and a stream runs
// everything at once. For tests, see comm_core/testing/host_modules.py.
//
// A stream that the source itself makes is different: what is put there waits until another stream
// waits for an event in it. That is one of the orders that a GPU may choose, and it shows work that
// nothing joins. Streams that a test makes up are small numbers.
#pragma once

#include <comm_core/abi.h>
#include <stdint.h>
#include <string.h>

#include <functional>
#include <vector>

typedef void* cudaStream_t;
typedef struct host_event* cudaEvent_t;
typedef int cudaError_t;
enum { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };
#define COMM_CUDA(call)                                                                         \
  do {                                                                                          \
    int host_error_ = (call);                                                                   \
    if (host_error_ != 0)                                                                       \
      return comm_fail(COMM_ERROR_CUDA + host_error_, "%s failed with %d", #call, host_error_); \
  } while (0)
#define COMM_LAUNCHED(...) ((void)0)

static uint64_t host_copies_ = 0;
static uint64_t host_streams_ = 0;  // streams and events that there are
static uint64_t host_failing_ = 0;  // which creation of one fails, counted down; 0: none
static const char* host_problem_ = nullptr;

// What tests ask.

// The first misuse since this was asked for the last time, or null.
COMM_EXPORT const char* host_problem(void) {
  const char* problem = host_problem_;
  host_problem_ = nullptr;
  return problem;
}

COMM_EXPORT uint64_t host_copies(void) { return __atomic_load_n(&host_copies_, __ATOMIC_RELAXED); }

COMM_EXPORT uint64_t host_streams(void) {
  return __atomic_load_n(&host_streams_, __ATOMIC_RELAXED);
}

COMM_EXPORT void host_fail_creation(uint64_t number) { host_failing_ = number; }

// Streams and events.

struct host_stream {
  std::vector<std::function<void()>> queue;
  bool ordered = false;  // what comes next is ordered after something in another stream
};

struct host_event {
  cudaStream_t stream = nullptr;
};

inline host_stream* host_made(cudaStream_t stream) {
  return reinterpret_cast<uintptr_t>(stream) < 65536 ? nullptr : static_cast<host_stream*>(stream);
}

inline void host_enqueue(cudaStream_t stream, std::function<void()> work) {
  host_stream* made = host_made(stream);
  if (made == nullptr) return work();
  if (!made->ordered) host_problem_ = "work that is ordered after nothing";
  made->queue.push_back(std::move(work));
}

inline int host_create() {
  if (host_failing_ != 0 && --host_failing_ == 0) return 2;  // cudaErrorMemoryAllocation
  __atomic_add_fetch(&host_streams_, 1, __ATOMIC_RELAXED);
  return 0;
}

inline int cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  int status = host_create();
  if (status == 0) *stream = new host_stream();
  return status;
}

inline int cudaStreamDestroy(cudaStream_t stream) {
  if (!host_made(stream)->queue.empty()) host_problem_ = "work that nothing waits for";
  __atomic_sub_fetch(&host_streams_, 1, __ATOMIC_RELAXED);
  delete host_made(stream);
  return 0;
}

inline int cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  int status = host_create();
  if (status == 0) *event = new host_event();
  return status;
}

inline int cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }

inline int cudaEventSynchronize(cudaEvent_t) { return 0; }

// Everything takes as long.
inline int cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return 0;
}

inline int cudaEventDestroy(cudaEvent_t event) {
  __atomic_sub_fetch(&host_streams_, 1, __ATOMIC_RELAXED);
  delete event;
  return 0;
}

inline int cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  event->stream = stream;
  return 0;
}

inline int cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  host_stream* waiting = host_made(stream);
  if (waiting != nullptr) {
    waiting->ordered = true;
    return 0;
  }
  host_stream* awaited = host_made(event->stream);
  if (awaited == nullptr) return 0;
  std::vector<std::function<void()>> queue;
  queue.swap(awaited->queue);
  awaited->ordered = false;
  for (const auto& work : queue) work();
  return 0;
}

inline int cudaGetLastError() { return 0; }

// Copies.

inline int cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                           cudaStream_t stream) {
  __atomic_add_fetch(&host_copies_, 1, __ATOMIC_RELAXED);
  host_enqueue(stream, [=] {
    // A flag is one word, which arrives whole.
    if (bytes == 4) {
      __atomic_store_n(static_cast<uint32_t*>(to),
                       __atomic_load_n(static_cast<const uint32_t*>(from), __ATOMIC_RELAXED),
                       __ATOMIC_RELEASE);
    } else {
      memcpy(to, from, bytes);
      __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
  });
  return 0;
}

inline int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                             size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  __atomic_add_fetch(&host_copies_, 1, __ATOMIC_RELAXED);
  // What CUDA refuses.
  if (width > to_pitch || width > from_pitch)
    host_problem_ = "a pitched copy is wider than its pitch";
  if (to_pitch >= 1ull << 31 || from_pitch >= 1ull << 31)
    host_problem_ = "a pitch is larger than CUDA takes";
  host_enqueue(stream, [=] {
    for (size_t row = 0; row < height; ++row) {
      memcpy(static_cast<char*>(to) + row * to_pitch,
             static_cast<const char*>(from) + row * from_pitch, width);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
  });
  return 0;
}

// Launches: a kernel is a host function; one that divides its work among blocks is told how many.

template <typename Parameters>
void host_launch(cudaStream_t stream, uint32_t, void (*kernel)(const Parameters&),
                 const Parameters& parameters) {
  host_enqueue(stream, [=] { kernel(parameters); });
}

template <typename... Parameters, typename... Arguments>
void host_launch(cudaStream_t stream, uint32_t, void (*kernel)(Parameters...),
                 Arguments... arguments) {
  host_enqueue(stream, [=] { kernel(arguments...); });
}

template <typename Parameters>
void host_launch(cudaStream_t stream, uint32_t blocks, void (*kernel)(const Parameters&, uint32_t),
                 const Parameters& parameters) {
  host_enqueue(stream, [=] { kernel(parameters, blocks); });
}

struct dim3 {
  uint32_t x;
  explicit dim3(uint32_t size = 1) : x(size) {}
};
enum { cudaLaunchAttributeProgrammaticStreamSerialization = 6 };
struct cudaLaunchAttribute {
  int id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

template <typename Kernel, typename Parameters>
int cudaLaunchKernelEx(const cudaLaunchConfig_t* config, Kernel kernel,
                       const Parameters& parameters) {
  host_launch(config->stream, config->gridDim.x, kernel, parameters);
  return 0;
}
