// scatter_qkv over windows: the statistics and the payload go straight into the memory of the
// peers.
//
//   statistics ► reduce ► gather ► finalize ► pack ► close ► unpack
//
// Two operations of the session, an all-gather of the statistics and the exchange of the payload.
// All signals are in `gather` and `close`; `pack` is the kernel of every other route, with the
// peers' windows as destinations.
//
// Invariants, beyond those of comm_core/barrier.cuh:
//
// 1. A window holds the payloads of all sources, and behind them the statistics of all ranks.
// 2. A rank announces `gather` after its previous `unpack` (stream order), so the announcement
//    permits to write the statistics and the payload. Whoever has left `gather` has seen every
//    announcement, and stores its payload without another handshake.
// 3. The statistics of a call are read by `finalize`, which ends before the rank announces the next
//    call's `gather`.
// 4. `close` starts when all stores of `pack` are done (stream order); its release makes them
//    visible to the peer that acquires it.
// 5. An aborted session stores nothing: `pack` looks at the abort word in every block.
//
// The blocks of `gather` wait for other ranks' blocks. There are so few that 16 ranks that share a
// GPU fit it together.
#pragma once

#include <comm_core/exchange.cuh>
#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>

namespace comm_lowp {

constexpr uint32_t kGatherThreads = comm::kExchangeThreads;
constexpr uint32_t kGatherBlocks = 16;

struct GatherParams {
  comm::Session session;
  const float* statistics;  // of this rank
  uint64_t bytes;           // of it
  uint64_t offset;          // of the statistics of all ranks in the window
  uint32_t window;
  uint32_t operation;
};

struct CloseParams {
  comm::Session session;
  uint32_t window;
  uint32_t operation;
};

#if defined(__CUDACC__)

__global__ void __launch_bounds__(kGatherThreads, 3)
    gather_kernel(const __grid_constant__ GatherParams p) {
  follow<false>();
  const comm::Session& session = p.session;
  const comm::Call call = comm::start(session, p.operation);
  __shared__ char* targets[comm::kMaxRanks];
  // Also keeps the lanes of the first warp together for the announcement.
  bool running = __syncthreads_and(!comm::aborted(call)) != 0;
  if (running && blockIdx.x == 0 && threadIdx.x < 32)
    comm::announce_to_all(call, p.window, p.offset);
  if (threadIdx.x < session.world_size) {
    const uint32_t peer = threadIdx.x;
    char* target = nullptr;
    if (running) {
      target = peer == session.rank
                   ? reinterpret_cast<char*>(session.windows[p.window].address[peer] + p.offset)
                   : comm::open_peer(session, call, peer, session.world_size * p.bytes);
    }
    targets[peer] = target;
  }
  __syncthreads();
  bool complete = running;
  for (uint32_t peer = 0; peer < session.world_size; ++peer)
    complete = complete && targets[peer] != nullptr;
  complete = complete && !comm::aborted(call);
  if (complete) {
    const uint32_t* from = reinterpret_cast<const uint32_t*>(p.statistics);
    const uint32_t count = uint32_t(p.bytes / 4);
    for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += gridDim.x * blockDim.x) {
      const uint32_t value = from[i];
      for (uint32_t step = 1; step <= session.world_size; ++step) {
        const uint32_t peer = (session.rank + step) % session.world_size;
        reinterpret_cast<uint32_t*>(targets[peer] + session.rank * p.bytes)[i] = value;
      }
    }
  }
  complete = __syncthreads_and(complete) != 0;
  if (threadIdx.x < session.world_size && threadIdx.x != session.rank) {
    const uint32_t peer = threadIdx.x;
    const bool all_there = comm::last_part(&comm::own_block(call)->sent[peer].value, gridDim.x);
    if (all_there && complete && !comm::aborted(call)) comm::mark_done(call, peer);
  }
  __syncwarp();
  if (blockIdx.x == 0 && threadIdx.x < 32) comm::wait_all_done(call);
  comm::finish(session, call, nullptr, 0);
}

// The end of the exchange of the payload. One warp.
__global__ void __launch_bounds__(32) close_kernel(const __grid_constant__ CloseParams p) {
  follow<false>();
  const comm::Session& session = p.session;
  const comm::Call call = comm::start(session, p.operation);
  if (!__any_sync(0xffffffffu, comm::aborted(call))) {
    // Nobody writes by this announcement; but every flag moves on in every operation.
    comm::announce_to_all(call, p.window, 0);
    const uint32_t peer = threadIdx.x;
    if (peer < session.world_size && peer != session.rank) comm::mark_done(call, peer);
    __syncwarp();
    comm::wait_all_done(call);
  }
  comm::finish(session, call, nullptr, 0);
}

#endif

}  // namespace comm_lowp
