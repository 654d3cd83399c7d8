// The CUDA runtime for the modules of this package, compiled for the host (conftest.py). It has
// what comm_core/testing/host_cuda.h has not: captures, graphs, devices, and streams that run by
// themselves.
//
// Device memory is host memory. Work is done at once, in the order in which it is enqueued, by the
// thread that enqueues it; with HOST_ASYNC every stream has a thread of its own, so that kernels of
// different streams can wait for each other within one process. Captures are recorded and run when
// their graph is launched.
//
// Stricter than CUDA: a capture that a stream was drawn into and did not rejoin, a pitched copy
// that is wider than its pitch, a graph that is launched after it was destroyed, and anything that
// was not released are found (host_problem, host_alive). Any call can be made to fail (host_fail).
#pragma once

#define __CUDA_RUNTIME_API_H__  // so that comm_core/status.h has the macros for CUDA calls

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

typedef int cudaError_t;
enum {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorPeerAccessAlreadyEnabled = 704,
  cudaErrorStreamCaptureUnjoined = 904,
};
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed = 2 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

struct HostGraph {
  std::vector<std::function<void()>> work;
};

struct HostStream {
  int device = 0;
  HostGraph* capture = nullptr;    // that it takes part in
  std::vector<HostStream*> drawn;  // of the stream where the capture began: those drawn in
  bool ahead = false;              // has work in the capture that the first stream has not seen
#if defined(HOST_ASYNC)
  std::mutex lock;
  std::condition_variable changed;
  std::deque<std::function<void()>> queue;
  bool running = false, ending = false;
  std::thread thread;
#endif
};

struct HostEvent {
  HostStream* recorded = nullptr;
  HostGraph* capture = nullptr;
};

typedef HostStream* cudaStream_t;
typedef HostEvent* cudaEvent_t;
typedef HostGraph* cudaGraph_t;
typedef HostGraph* cudaGraphExec_t;

struct cudaPitchedPtr {
  void* ptr;
  size_t pitch, xsize, ysize;
};
struct cudaExtent {
  size_t width, height, depth;
};
struct cudaMemcpy3DParms {
  cudaPitchedPtr srcPtr, dstPtr;
  cudaExtent extent;
  cudaMemcpyKind kind;
};
inline cudaPitchedPtr make_cudaPitchedPtr(void* p, size_t pitch, size_t x, size_t y) {
  return {p, pitch, x, y};
}
inline cudaExtent make_cudaExtent(size_t w, size_t h, size_t d) { return {w, h, d}; }

// The tests' own controls and counts.

static std::atomic<uint64_t> host_alive_{0}, host_copies_made_{0}, host_launched_{0};
static std::atomic<const char*> host_problem_text_{nullptr};
static std::mutex host_lock_;
static std::map<std::string, int> host_failures_;
static thread_local int host_device_ = 0;

static inline cudaError_t host_enter(const char* call) {
  std::lock_guard<std::mutex> guard(host_lock_);
  auto found = host_failures_.find(call);
  if (found == host_failures_.end()) return cudaSuccess;
  if (found->second-- > 0) return cudaSuccess;
  host_failures_.erase(found);
  return cudaErrorMemoryAllocation;
}
#define HOST_ENTER() \
  if (cudaError_t host_error_ = host_enter(__func__)) return host_error_

static inline cudaError_t host_wrong(const char* what) {
  host_problem_text_ = what;
  return cudaErrorInvalidValue;
}

extern "C" {
__attribute__((visibility("default"))) inline void host_fail(const char* call, int after) {
  std::lock_guard<std::mutex> guard(host_lock_);
  if (after < 0)
    host_failures_.erase(call);
  else
    host_failures_[call] = after;
}
__attribute__((visibility("default"))) inline const char* host_problem() {
  return host_problem_text_.exchange(nullptr);
}
__attribute__((visibility("default"))) inline uint64_t host_alive() { return host_alive_; }
__attribute__((visibility("default"))) inline uint64_t host_copied() { return host_copies_made_; }
__attribute__((visibility("default"))) inline uint64_t host_graphs_launched() {
  return host_launched_;
}
}
// An inline function that nobody calls is not in the library.
__attribute__((used)) static void* const host_controls_[] = {(void*)host_fail, (void*)host_problem,
                                                             (void*)host_alive, (void*)host_copied,
                                                             (void*)host_graphs_launched};

// Errors.

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "error of the fake runtime";
}
inline const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorFake";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// Work in stream order.

inline void host_enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream != nullptr && stream->capture != nullptr) {
    stream->capture->work.push_back(std::move(work));
    stream->ahead = true;
    return;
  }
#if defined(HOST_ASYNC)
  if (stream != nullptr) {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->queue.push_back(std::move(work));
    stream->changed.notify_all();
    return;
  }
#endif
  work();
}

#define HOST_STREAM(grid, block, shared, stream) (stream)

template <typename Work>
void host_launch(cudaStream_t stream, Work work) {
  host_enqueue(stream, work);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  HOST_ENTER();
  *stream = new HostStream();
  (*stream)->device = host_device_;
  ++host_alive_;
#if defined(HOST_ASYNC)
  HostStream* own = *stream;
  own->thread = std::thread([own] {
    host_device_ = own->device;
    std::unique_lock<std::mutex> guard(own->lock);
    while (true) {
      own->changed.wait(guard, [own] { return own->ending || !own->queue.empty(); });
      if (own->queue.empty()) return;
      auto work = std::move(own->queue.front());
      own->queue.pop_front();
      own->running = true;
      guard.unlock();
      work();
      guard.lock();
      own->running = false;
      own->changed.notify_all();
    }
  });
#endif
  return cudaSuccess;
}

inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  HOST_ENTER();
  if (stream->capture != nullptr) return host_wrong("a stream was destroyed in a capture");
#if defined(HOST_ASYNC)
  {
    std::lock_guard<std::mutex> guard(stream->lock);
    stream->ending = true;
    stream->changed.notify_all();
  }
  stream->thread.join();
#endif
  delete stream;
  --host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  HOST_ENTER();
#if defined(HOST_ASYNC)
  std::unique_lock<std::mutex> guard(stream->lock);
  stream->changed.wait(guard, [stream] { return stream->queue.empty() && !stream->running; });
#else
  (void)stream;
#endif
  return cudaSuccess;
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  HOST_ENTER();
  *event = new HostEvent();
  ++host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  HOST_ENTER();
  delete event;
  --host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  HOST_ENTER();
  event->recorded = stream;
  event->capture = stream == nullptr ? nullptr : stream->capture;
  return cudaSuccess;
}

inline cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  HOST_ENTER();
  HostGraph* capture = event->capture;
  if (capture == nullptr || stream == nullptr) return cudaSuccess;
  if (stream->capture == nullptr) {
    // Drawn into the capture of the stream that the event was recorded on.
    stream->capture = capture;
    stream->ahead = true;
    event->recorded->drawn.push_back(stream);
  } else if (stream->capture != capture) {
    return host_wrong("a capture waits for an event of another one");
  } else {
    event->recorded->ahead = false;
  }
  return cudaSuccess;
}

// Graphs.

inline cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  HOST_ENTER();
  if (stream == nullptr || stream->capture != nullptr) return host_wrong("a capture in a capture");
  stream->capture = new HostGraph();
  ++host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = stream->capture;
  stream->capture = nullptr;
  bool unjoined = false;
  for (HostStream* other : stream->drawn) {
    unjoined |= other->ahead;
    other->capture = nullptr;
    other->ahead = false;
  }
  stream->drawn.clear();
  stream->ahead = false;
  cudaError_t error = host_enter(__func__);
  if (unjoined && error == cudaSuccess) {
    host_problem_text_ = "a stream did not rejoin the capture";
    error = cudaErrorStreamCaptureUnjoined;
  }
  if (error != cudaSuccess) {
    delete *graph;
    *graph = nullptr;
    --host_alive_;
  }
  return error;
}

inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                        unsigned long long) {
  HOST_ENTER();
  *exec = new HostGraph(*graph);
  ++host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  --host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  HOST_ENTER();
  exec->work = {[] { host_wrong("a graph was launched after it was destroyed"); }};
  delete exec;
  --host_alive_;
  return cudaSuccess;
}

inline cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  HOST_ENTER();
  ++host_launched_;
  for (const auto& work : exec->work) host_enqueue(stream, work);
  return cudaSuccess;
}

// Copies. A test may put something between (HOST_COPY): a link that loses or changes what it
// carries.

#if !defined(HOST_COPY)
#define HOST_COPY(to, from, bytes, device) memcpy(to, from, bytes)
#endif

inline cudaError_t cudaMemcpy3DAsync(const cudaMemcpy3DParms* p, cudaStream_t stream) {
  HOST_ENTER();
  cudaMemcpy3DParms q = *p;
  if (q.extent.width > q.srcPtr.pitch || q.extent.width > q.dstPtr.pitch)
    return host_wrong("a pitched copy is wider than its pitch");
  if (q.extent.height > q.srcPtr.ysize || q.extent.height > q.dstPtr.ysize)
    return host_wrong("a slice is higher than its pitch");
  if (q.extent.width == 0 || q.extent.height == 0 || q.extent.depth == 0)
    return host_wrong("an empty copy");
  ++host_copies_made_;
  host_enqueue(stream, [q] {
    for (size_t z = 0; z < q.extent.depth; ++z) {
      for (size_t y = 0; y < q.extent.height; ++y) {
        char* to = (char*)q.dstPtr.ptr + (z * q.dstPtr.ysize + y) * q.dstPtr.pitch;
        const char* from = (const char*)q.srcPtr.ptr + (z * q.srcPtr.ysize + y) * q.srcPtr.pitch;
        HOST_COPY(to, from, q.extent.width, host_device_);
      }
    }
  });
  return cudaSuccess;
}

inline cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                                     size_t width, size_t height, cudaMemcpyKind kind,
                                     cudaStream_t stream) {
  HOST_ENTER();
  cudaMemcpy3DParms p = {};
  p.srcPtr = make_cudaPitchedPtr(const_cast<void*>(from), from_pitch, width, height);
  p.dstPtr = make_cudaPitchedPtr(to, to_pitch, width, height);
  p.extent = make_cudaExtent(width, height, 1);
  p.kind = kind;
  return cudaMemcpy3DAsync(&p, stream);
}

inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                   cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}

inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  HOST_ENTER();
  host_enqueue(stream, [=] { memset(to, value, bytes); });
  return cudaSuccess;
}

// Devices: as many as HOST_DEVICES says, with the UUIDs of comm_core.testing.topologies.

struct cudaUUID_t {
  char bytes[16];
};
struct cudaDeviceProp {
  cudaUUID_t uuid;
};
struct cudaFuncAttributes {
  int unused;
};

static inline int host_devices() {
  const char* text = getenv("HOST_DEVICES");
  return text == nullptr ? 8 : atoi(text);
}
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = host_device_;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int device) {
  HOST_ENTER();
  host_device_ = device;
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceCount(int* count) {
  HOST_ENTER();
  *count = host_devices();
  return cudaSuccess;
}
inline cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  HOST_ENTER();
  const unsigned char rest[12] = {0xc0, 0xde, 0x4a, 0x11, 0x80};
  const unsigned char first[4] = {0, 0, 0, (unsigned char)device};
  memcpy(properties->uuid.bytes, first, 4);
  memcpy(properties->uuid.bytes + 4, rest, 12);
  return cudaSuccess;
}

static std::map<char*, std::pair<size_t, int>> host_memory_;  // address -> bytes, device

inline cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  HOST_ENTER();
  *pointer = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  std::lock_guard<std::mutex> guard(host_lock_);
  host_memory_[(char*)*pointer] = {bytes, host_device_};
  ++host_alive_;
  return cudaSuccess;
}
inline cudaError_t cudaFree(void* pointer) {
  HOST_ENTER();
  {
    std::lock_guard<std::mutex> guard(host_lock_);
    if (host_memory_.erase((char*)pointer) == 0) {
      host_problem_text_ = "memory was freed that is not there";
      return cudaErrorInvalidValue;
    }
  }
  free(pointer);
  --host_alive_;
  return cudaSuccess;
}
// The device whose memory an address lies in, or -1.
static inline int host_device_of(const void* address) {
  std::lock_guard<std::mutex> guard(host_lock_);
  for (const auto& item : host_memory_) {
    if ((char*)address >= item.first && (char*)address < item.first + item.second.first)
      return item.second.second;
  }
  return -1;
}
inline cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  HOST_ENTER();
  return cudaSuccess;
}
#if !defined(HOST_MAY_ACCESS)
#define HOST_MAY_ACCESS(from, to) 1
#endif
inline cudaError_t cudaDeviceCanAccessPeer(int* can, int from, int to) {
  HOST_ENTER();
  (void)from, (void)to;
  *can = HOST_MAY_ACCESS(from, to);
  return cudaSuccess;
}
