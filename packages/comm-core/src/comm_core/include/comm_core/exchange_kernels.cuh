// The kernels of the plain exchange between windows (comm_core/exchange.cuh), apart from what other
// modules build on, so that those don't compile them too.
#pragma once

#include <comm_core/exchange.cuh>

// A host compiler has its own in tests (comm_core/testing/host_windows.h).
#if defined(__CUDACC__)

namespace comm {

__global__ void __launch_bounds__(kExchangeThreads, 3)
    exchange_push_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  uint32_t block = blockIdx.x % p.blocks_per_peer;
  // This rank's own share comes last, and the peers in a different order on every rank, so that no
  // two start on one.
  uint32_t peer = (session.rank + 1 + blockIdx.x / p.blocks_per_peer) % session.world_size;
  bool remote = peer != session.rank;

  __shared__ char* target;
  bool running = !aborted(call);
  // Also keeps the lanes of the first warp together for the announcement.
  running = __syncthreads_and(running);
  if (running && blockIdx.x == 0 && threadIdx.x < 32)
    announce_to_all(call, p.window, p.window_offset);
  if (threadIdx.x == 0) {
    target = !running ? nullptr
             : remote ? open_peer(session, call, peer, p.plan->target_bytes)
                      : p.destination;
  }
  __syncthreads();

  bool complete = target != nullptr;
  if (complete) {
    const PlanEntry* entries = plan_entries(p.plan);
    const uint32_t* abort = &own_block(call)->abort.value;
    uint32_t thread = block * blockDim.x + threadIdx.x;
    uint32_t threads = p.blocks_per_peer * blockDim.x;
    for (uint32_t i = p.plan->first[peer]; complete && i < p.plan->first[peer + 1]; ++i) {
      const PlanEntry entry = entries[i];
      complete = copy_with(entry, target, p.sources[entry.source], thread, threads, abort);
    }
  }
  complete = __syncthreads_and(complete);

  if (threadIdx.x == 0 && remote) {
    // A block that stopped has seen the abort word before it counted, so the last one sees it too.
    bool all_there = last_part(&own_block(call)->sent[peer].value, p.blocks_per_peer);
    if (all_there && complete && !aborted(call)) mark_done(call, peer);
  }
  if (blockIdx.x == 0 && threadIdx.x < 32) wait_all_done(call);
  finish(session, call, p.destination, p.plan->target_bytes);
}

// The two ends of an exchange whose bytes are moved by the copy engines between them. One warp
// each.
//
// The copies are enqueued before anybody knows what the peers will announce, so here the place is
// agreed beforehand (the same window and offset on all ranks) and the announcement is only the
// permission.
__global__ void __launch_bounds__(32)
    exchange_open_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  if (__any_sync(0xffffffffu, aborted(call))) return;
  announce_to_all(call, p.window, p.window_offset);
  uint32_t peer = threadIdx.x;
  if (peer < session.world_size && peer != session.rank)
    open_peer(session, call, peer, p.plan->target_bytes);
}

__global__ void __launch_bounds__(32)
    exchange_close_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  uint32_t peer = threadIdx.x;
  if (!__any_sync(0xffffffffu, aborted(call))) {
    if (peer < session.world_size && peer != session.rank) mark_done(call, peer);
    wait_all_done(call);
  }
  finish(session, call, p.destination, p.plan->target_bytes);
}

// After a staged destination has been copied out: spoil it where the exchange was aborted. Peers
// may have stored into the staging memory after it was spoilt, so what was copied out says nothing.
__global__ void __launch_bounds__(kExchangeThreads)
    settle_kernel(const __grid_constant__ Session session, char* destination, uint64_t bytes) {
  if (!session.poison || load_relaxed(&session.signals[session.rank]->abort.value) == 0) return;
  uint64_t stride = uint64_t(gridDim.x) * blockDim.x;
  for (uint64_t at = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x; at < bytes; at += stride)
    destination[at] = char(0xff);
}

// A barrier of the group. One warp.
__global__ void __launch_bounds__(32)
    barrier_kernel(const __grid_constant__ Session session, uint32_t operation) {
  const Call call = start(session, operation);
  barrier(call);
  finish(session, call, nullptr, 0);
}

}  // namespace comm

#endif
