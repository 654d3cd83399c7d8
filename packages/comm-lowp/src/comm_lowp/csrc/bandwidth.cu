// What `commctl bench lowp` measures memory with: a kernel that only reads. Python side:
// comm_lowp/bench/module.py.
#include <comm_core/abi.h>
#include <comm_lowp/memory.cuh>

namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kLoads = 8;

// Blocks take pieces of 32 KiB in turn.
__global__ void __launch_bounds__(kThreads, 6)
    read_kernel(const char* data, uint64_t pieces, uint32_t* sink) {
  uint32_t folded = 0;
  for (uint64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    const char* from = data + piece * (kThreads * kLoads * 16) + 16 * threadIdx.x;
    comm_lowp::Vector x[kLoads];
#pragma unroll
    for (uint32_t n = 0; n < kLoads; ++n) x[n] = comm_lowp::load_once(from + n * kThreads * 16);
#pragma unroll
    for (uint32_t n = 0; n < kLoads; ++n)
      folded ^= x[n].word[0] ^ x[n].word[1] ^ x[n].word[2] ^ x[n].word[3];
  }
  // Never true for what is measured; but the compiler can't know.
  if (folded == 0x9e3779b9u) *sink = folded;
}

}  // namespace

struct comm_lowp_read_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const void* data;
  uint32_t* sink;
  uint64_t bytes;   // whole pieces of 32 KiB are read
  uint32_t blocks;  // 0: one for each piece
};

COMM_EXPORT int comm_lowp_read_v1(const comm_lowp_read_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_read_args_v1);
  const uint64_t pieces = args->bytes / (kThreads * kLoads * 16);
  COMM_REQUIRE(pieces >= 1 && pieces < (1u << 31), "read: %llu bytes",
               (unsigned long long)args->bytes);
  const uint32_t blocks = args->blocks != 0 ? args->blocks : uint32_t(pieces);
  read_kernel<<<blocks, kThreads, 0, args->stream>>>(static_cast<const char*>(args->data), pieces,
                                                     args->sink);
  COMM_LAUNCHED(read_kernel);
  return COMM_OK;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_lowp_read_args_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(read_kernel)
COMM_MODULE_END(comm_lowp_bandwidth)
