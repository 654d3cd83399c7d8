// The smallest module: it shows that building, loading and launching work, and how a module is
// written. Python side: comm_core/jit/selfcheck.py.
#include <comm_core/abi.h>

namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;

__global__ void empty_kernel() {}

__global__ void fill_kernel(uint32_t* data, uint64_t count, uint32_t value) {
  const uint64_t stride = uint64_t{gridDim.x} * blockDim.x;
  for (uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride)
    data[i] = value;
}

}  // namespace

struct comm_core_empty_args_v1 {
  COMM_ARGS;
  void* stream;
  uint32_t launches;  // 0 measures the call alone
};

struct comm_core_fill_args_v1 {
  COMM_ARGS;
  void* stream;
  uint32_t* data;
  uint64_t count;  // of words
  uint32_t value;
};

COMM_EXPORT int comm_core_empty_v1(const comm_core_empty_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_empty_args_v1);
  for (uint32_t i = 0; i < args->launches; ++i) {
    empty_kernel<<<1, 1, 0, static_cast<cudaStream_t>(args->stream)>>>();
    COMM_LAUNCHED(empty_kernel);
  }
  return COMM_OK;
}

COMM_EXPORT int comm_core_fill_v1(const comm_core_fill_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_fill_args_v1);
  COMM_REQUIRE(
      args->data != nullptr && reinterpret_cast<uintptr_t>(args->data) % sizeof(uint32_t) == 0,
      "fill: data must be the address of aligned 32-bit words, got %p",
      static_cast<void*>(args->data));
  if (args->count == 0) return COMM_OK;
  const uint64_t wanted = (args->count + kThreads - 1) / kThreads;
  const int blocks = wanted < kMaxBlocks ? static_cast<int>(wanted) : kMaxBlocks;
  fill_kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(args->stream)>>>(
      args->data, args->count, args->value);
  COMM_LAUNCHED(fill_kernel);
  return COMM_OK;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_core_empty_args_v1)
COMM_STRUCT(comm_core_fill_args_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(empty_kernel)
COMM_KERNEL(fill_kernel)
COMM_MODULE_END(comm_core_selfcheck)
