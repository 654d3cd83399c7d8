// Everything of signal.cuh, barrier.cuh and lamport.cuh as a kernel would use it, to be compiled
// and looked at, not run.

#include "comm_core/barrier.cuh"
#include "comm_core/lamport.cuh"

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

template <uint32_t kRanks>
__global__ void lamport_protocol_kernel(const __grid_constant__ Call call, LamportState* state,
                                        Vector* buffer, Vector* const* peers, Vector* operand,
                                        uint64_t stride) {
  uint32_t missing = call.rank;
  Vector values[kRanks];
  values[0] = lamport_encode_f32(lamport_encode_16(operand[threadIdx.x]));
  uint32_t generation = state->generation;
  if (threadIdx.x < state->previous)
    lamport_rearm(buffer + lamport_previous(generation) * stride + threadIdx.x);
  for (uint32_t peer = 1; peer < kRanks; ++peer)
    lamport_publish(peers[peer] + threadIdx.x, values[0]);
  Wait wait = lamport_collect<kRanks>(buffer + generation * stride + threadIdx.x, stride, 0, values,
                                      &own_block(call)->abort.value, call.deadline_ns, &missing);
  if (wait != Wait::kReached) {
    stop(call, wait, missing);
  } else {
    Vector sum = values[0];
    for (uint32_t peer = 1; peer < kRanks; ++peer) {
      for (int i = 0; i < 4; ++i) sum.word[i] += values[peer].word[i];
    }
    operand[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) lamport_leave(state, gridDim.x, blockDim.x);
}

template __global__ void lamport_protocol_kernel<2>(const __grid_constant__ Call, LamportState*,
                                                    Vector*, Vector* const*, Vector*, uint64_t);
template __global__ void lamport_protocol_kernel<8>(const __grid_constant__ Call, LamportState*,
                                                    Vector*, Vector* const*, Vector*, uint64_t);

// The host half of a .cu file waits as well, and its waits end.
Wait wait_on_host(const uint32_t* flag, const uint32_t* abort) {
  return wait_flag(flag, 1, abort, now_ns() + 1000);
}

}  // namespace comm
