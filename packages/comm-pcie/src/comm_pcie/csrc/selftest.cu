// One link, tested by value: a pattern from one GPU into the memory of another one, by stores of a
// kernel or by a copy engine, announced and waited for as in an exchange. Python side:
// comm_pcie/selftest.py, which calls this in a process of its own.
//
// Both GPUs belong to this process. So there is no way round the link by host memory: the writer
// gets the raw address of the other GPU's memory, which it can only reach through peer access.
#include <comm_core/abi.h>
#include <string.h>

#include <comm_pcie/selftest.cuh>

struct comm_pcie_selftest_result_v1 {
  COMM_ARGS;
  uint64_t wrong;  // words that are not what was written
  uint64_t first;  // the first of them
  uint64_t came;   // whether the writer's flag was seen in time; else nothing was compared
};

struct comm_pcie_selftest_args_v1 {
  COMM_ARGS;
  uint64_t from[2];  // UUIDs as they lie in memory
  uint64_t to[2];
  uint64_t words;  // of 4 bytes; a multiple of 256
  uint64_t timeout_ns;
  comm_pcie_selftest_result_v1* result;
  uint32_t plane;  // 0: stores of a kernel, 1: a copy engine
  uint32_t seed;
  uint32_t spoil;  // for tests of this test: change that word (counted from 1) on its way; 0: none
  uint32_t unused;
};

namespace {

using comm_pcie::TestCounts;

constexpr uint32_t kBlocks = 8;
constexpr uint64_t kRowBytes = 256;  // of the pitched copy

int find_device(const uint64_t* uuid, int* device) {
  int count = 0;
  COMM_CUDA(cudaGetDeviceCount(&count));
  for (*device = 0; *device < count; ++*device) {
    cudaDeviceProp properties;
    COMM_CUDA(cudaGetDeviceProperties(&properties, *device));
    if (memcmp(&properties.uuid, uuid, 16) == 0) return COMM_OK;
  }
  return comm_fail(COMM_ERROR_UNSUPPORTED, "this process does not see the GPU");
}

// One GPU's end: a stream and memory, released when the test is over. Errors of the release are
// nobody's business: the process ends soon.
struct Side {
  int device = 0;
  cudaStream_t stream = nullptr;
  char* memory = nullptr;

  int open(const uint64_t* uuid, uint64_t bytes) {
    if (int status = find_device(uuid, &device)) return status;
    COMM_CUDA(cudaSetDevice(device));
    COMM_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    COMM_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory), bytes));
    return COMM_OK;
  }
  ~Side() {
    (void)cudaSetDevice(device);
    if (memory != nullptr) (void)cudaFree(memory);
    if (stream != nullptr) (void)cudaStreamDestroy(stream);
  }
};

int allow(const Side& from, const Side& to) {
  if (from.device == to.device) return COMM_OK;
  int can = 0;
  COMM_CUDA(cudaDeviceCanAccessPeer(&can, from.device, to.device));
  if (!can) return comm_fail(COMM_ERROR_UNSUPPORTED, "CUDA denies peer access");
  COMM_CUDA(cudaSetDevice(from.device));
  cudaError_t error = cudaDeviceEnablePeerAccess(to.device, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();
    return COMM_OK;
  }
  COMM_CUDA(error);
  return COMM_OK;
}

// Memory of the receiver: the pattern's place, then a line for the flag, then the counts.
struct Places {
  uint32_t* data;
  uint32_t* flag;
  TestCounts* counts;
};

constexpr uint64_t kTail = 2 * comm::kLineBytes;

Places places(char* memory, uint64_t bytes) {
  return {reinterpret_cast<uint32_t*>(memory), reinterpret_cast<uint32_t*>(memory + bytes),
          reinterpret_cast<TestCounts*>(memory + bytes + comm::kLineBytes)};
}

int write(const comm_pcie_selftest_args_v1* args, const Side& from, const Places& target) {
  uint64_t bytes = args->words * 4;
  uint32_t* counter = reinterpret_cast<uint32_t*>(from.memory + bytes);
  COMM_CUDA(cudaSetDevice(from.device));
  COMM_CUDA(cudaMemsetAsync(counter, 0, kTail, from.stream));
  if (args->plane == 0) {
    comm_pcie::selftest_write_kernel<<<kBlocks, comm_pcie::kTestThreads, 0, from.stream>>>(
        target.data, args->words, args->seed, args->spoil, counter, target.flag);
    COMM_LAUNCHED(selftest_write_kernel);
    return COMM_OK;
  }
  // Half of it in one piece, half as a pitched copy whose rows stay where they are.
  uint32_t* own = reinterpret_cast<uint32_t*>(from.memory);
  comm_pcie::selftest_write_kernel<<<kBlocks, comm_pcie::kTestThreads, 0, from.stream>>>(
      own, args->words, args->seed, args->spoil, counter, nullptr);
  COMM_LAUNCHED(selftest_write_kernel);
  uint64_t half = bytes / 2;
  COMM_CUDA(cudaMemcpyAsync(target.data, own, half, cudaMemcpyDeviceToDevice, from.stream));
  COMM_CUDA(cudaMemcpy2DAsync(target.data + half / 4, 2 * kRowBytes, own + half / 4, 2 * kRowBytes,
                              kRowBytes, half / (2 * kRowBytes), cudaMemcpyDeviceToDevice,
                              from.stream));
  COMM_CUDA(cudaMemcpy2DAsync(target.data + (half + kRowBytes) / 4, 2 * kRowBytes,
                              own + (half + kRowBytes) / 4, 2 * kRowBytes, kRowBytes,
                              half / (2 * kRowBytes), cudaMemcpyDeviceToDevice, from.stream));
  comm_pcie::selftest_release_kernel<<<1, 1, 0, from.stream>>>(target.flag);
  COMM_LAUNCHED(selftest_release_kernel);
  return COMM_OK;
}

}  // namespace

COMM_EXPORT int comm_pcie_selftest_v1(const comm_pcie_selftest_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_selftest_args_v1);
  uint64_t bytes = args->words * 4;
  COMM_REQUIRE(bytes > 0 && bytes % (4 * kRowBytes) == 0 && args->plane <= 1,
               "selftest: %llu words by plane %u", (unsigned long long)args->words, args->plane);
  Side from, to;
  if (int status = to.open(args->to, bytes + kTail)) return status;
  if (int status = from.open(args->from, bytes + kTail)) return status;
  if (int status = allow(from, to)) return status;
  // Spoil the place first: what an earlier test has left there must not pass for what arrives.
  const Places target = places(to.memory, bytes);
  COMM_CUDA(cudaSetDevice(to.device));
  COMM_CUDA(cudaMemsetAsync(to.memory, 0xee, bytes, to.stream));
  COMM_CUDA(cudaMemsetAsync(target.flag, 0, kTail, to.stream));
  COMM_CUDA(cudaStreamSynchronize(to.stream));
  // The writer first: on one GPU, or under a tool that runs one kernel at a time, it must not be
  // kept from starting by who waits for it.
  if (int status = write(args, from, target)) return status;
  COMM_CUDA(cudaSetDevice(to.device));
  comm_pcie::selftest_check_kernel<<<1, comm_pcie::kTestThreads, 0, to.stream>>>(
      target.data, args->words, args->seed, target.flag, args->timeout_ns, target.counts);
  COMM_LAUNCHED(selftest_check_kernel);
  TestCounts counts;
  COMM_CUDA(
      cudaMemcpyAsync(&counts, target.counts, sizeof counts, cudaMemcpyDeviceToHost, to.stream));
  COMM_CUDA(cudaStreamSynchronize(to.stream));
  args->result->wrong = counts.wrong;
  args->result->first = counts.first;
  args->result->came = counts.came;
  return COMM_OK;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_pcie_selftest_args_v1)
COMM_STRUCT(comm_pcie_selftest_result_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(comm_pcie::selftest_write_kernel)
COMM_KERNEL(comm_pcie::selftest_release_kernel)
COMM_KERNEL(comm_pcie::selftest_check_kernel)
COMM_MODULE_END(comm_pcie_selftest)
