// Everything of signal.cuh and barrier.cuh as a kernel would use it, and kernels of allreduce.cuh,
// to be compiled and looked at, not run.

#include "comm_core/allreduce.cuh"
#include "comm_core/barrier.cuh"

namespace comm {

__global__ void exchange_protocol_kernel(const __grid_constant__ Call call, char* const* windows,
                                         const char* source, uint32_t bytes) {
  __shared__ char* target;
  uint32_t peer = blockIdx.x;
  if (blockIdx.x == 0 && threadIdx.x < 32) announce_to_all(call, 0, 64);
  if (threadIdx.x == 0) {
    uint32_t window = 0;
    uint64_t offset = 0;
    bool open = wait_ready(call, peer, &window, &offset).wait == Wait::kReached;
    target = open ? windows[window] + offset : nullptr;
  }
  __syncthreads();
  for (uint32_t at = threadIdx.x; target != nullptr && at < bytes; at += blockDim.x)
    target[at] = source[at];
  __syncthreads();
  if (threadIdx.x == 0 && last_part(&own_block(call)->sent[peer].value, 1) && !aborted(call))
    mark_done(call, peer);
  if (blockIdx.x == 0 && threadIdx.x < 32) wait_all_done(call);
  __syncthreads();
  if (threadIdx.x == 0) leave(call, gridDim.x);
}

__global__ void barrier_protocol_kernel(const __grid_constant__ Call call, Outcome* outcome) {
  *outcome = barrier(call);
}

template __global__ void reduce_kernel<Float32, false>(const __grid_constant__ ReduceParams);
template __global__ void reduce_kernel<Bfloat16, true>(const __grid_constant__ ReduceParams);

// The host half of a .cu file waits as well, and its waits end.
Wait wait_on_host(const uint32_t* flag, const uint32_t* abort) {
  return wait_flag(flag, 1, abort, now_ns() + 1000);
}

}  // namespace comm
