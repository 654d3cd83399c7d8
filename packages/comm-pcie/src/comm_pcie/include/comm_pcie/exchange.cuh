// The exchange by copy engines, straight into the final layout.
//
//   caller's stream   open ► copies to half of the peers ───────────────► close
//   second lane            └► copies to the other half ────────────────┘
//   local lane        └► this rank's own share, by the SMs ────────────┘
//
// 1. open: announce this rank's output to every peer, and wait for their announcements. Stream
// order has made sure that nothing uses the output any more, so an announcement is the permission
// to write.
// 2. Copies of the copy engines, with addresses that were known when they were enqueued: all ranks
// pass the output of the same registration, at the same offset. The announcement says which one,
// and an announcement of another one ends the operation.
// 3. close: release `done` at every peer and wait for that of all peers.
//
// Copies can't be called back. A rank that gives up in `open`, or is told to, still makes the
// copies that are enqueued behind it. They go to registered outputs, which stay mapped until the
// whole group has closed. So `close` says `done` in any case, and where the operation was aborted
// it waits a moment for the peers' `done` before it spoils its output: what comes after that is
// from a rank that is very late.
#pragma once

#include <stdint.h>

#include <comm_core/exchange.cuh>

namespace comm_pcie {

constexpr uint32_t kThreads = 256;

struct ExchangeParams {
  comm::Session session;
  char* destination;  // this rank's output
  uint64_t target_bytes;
  uint32_t window;  // that it lies in, from its beginning on
  uint32_t operation;
};

// Whether `receiver` has announced the output that this rank's copies go to. One thread; tells
// everybody where it has not.
COMM_HD bool wait_for_output(const ExchangeParams& p, const comm::Call& call, uint32_t receiver) {
  uint32_t window = 0;  // read only where it was reached, which not every host compiler sees
  uint64_t offset = 0;
  if (comm::wait_ready(call, receiver, &window, &offset).wait != comm::Wait::kReached) return false;
  if (window == p.window && offset == 0) return true;
  comm::Call bad = call;
  bad.operation |= comm::kBadAnnouncement;
  comm::stop(bad, comm::Wait::kTimedOut, receiver);
  return false;
}

// How long an aborted operation waits for copies that are still on their way.
constexpr uint64_t kDrainNs = 1000000000;

// Wait for the peers' copies of an operation that was aborted, so that what spoils the output comes
// last. A group.
//
// `done` after an abort takes nobody in: who gave up first told every rank before it made its
// copies and said `done`, so a rank that has seen `done` of all knows of the abort.
COMM_HD void drain(const comm::Session& session, const comm::Call& call) {
  const comm::SignalBlock* own = comm::own_block(call);
  uint64_t grace = session.timeout_ns < kDrainNs ? session.timeout_ns : kDrainNs;
  uint64_t end = comm::now_ns() + grace;
#if defined(__CUDA_ARCH__)
  uint32_t peer = threadIdx.x % 32;
  uint32_t last = peer + 1;
#else
  uint32_t peer = 0;
  uint32_t last = session.world_size;
#endif
  for (; peer < last; ++peer) {
    if (peer >= session.world_size || peer == session.rank) continue;
    const uint32_t* done = &own->done[peer].value;
    // One that has missed the operation before as well is gone: a graph that goes on being replayed
    // waits for it once.
    if (!comm::reached(comm::load_acquire(done), call.epoch - 1)) continue;
    while (!comm::reached(comm::load_acquire(done), call.epoch) && comm::now_ns() < end) {
      COMM_SPIN();
    }
  }
}

#if defined(__CUDACC__)

// One warp.
__global__ void __launch_bounds__(32)
    exchange_open_kernel(const __grid_constant__ ExchangeParams p) {
  const comm::Call call = comm::start(p.session, p.operation);
  if (__any_sync(0xffffffffu, comm::aborted(call))) return;
  comm::announce_to_all(call, p.window, 0);
  uint32_t peer = threadIdx.x;
  if (peer < p.session.world_size && peer != p.session.rank) wait_for_output(p, call, peer);
}

// One block: its first warp does the handshake, and all of it spoils the output where that failed.
__global__ void __launch_bounds__(kThreads)
    exchange_close_kernel(const __grid_constant__ ExchangeParams p) {
  const comm::Session& session = p.session;
  const comm::Call call = comm::start(session, p.operation);
  if (threadIdx.x < 32) {
    uint32_t peer = threadIdx.x;
    if (peer < session.world_size && peer != session.rank) comm::mark_done(call, peer);
    comm::wait_all_done(call);
    if (__any_sync(0xffffffffu, comm::aborted(call))) drain(session, call);
  }
  __shared__ bool spoil;
  __syncthreads();
  if (threadIdx.x == 0) {
    bool broken = false;
    spoil = comm::leave(call, 1, &broken) && broken && session.poison;
  }
  __syncthreads();
  if (!spoil) return;
  // 16 bytes at a time: an output of some hundred megabytes is spoilt by this block alone. Windows
  // begin at a page.
  const uint4 ones = make_uint4(~0u, ~0u, ~0u, ~0u);
  uint64_t vectors = p.target_bytes / sizeof(uint4);
  for (uint64_t at = threadIdx.x; at < vectors; at += blockDim.x)
    reinterpret_cast<uint4*>(p.destination)[at] = ones;
  for (uint64_t at = vectors * sizeof(uint4) + threadIdx.x; at < p.target_bytes; at += blockDim.x)
    p.destination[at] = char(0xff);
}

// This rank's own share. It waits for nobody: its output is free as soon as the stream gets here.
__global__ void __launch_bounds__(kThreads)
    exchange_local_kernel(const comm::PlanTable* plan, uint32_t rank, char* destination,
                          const char* source, const uint32_t* abort) {
  const comm::PlanEntry* entries = comm::plan_entries(plan);
  uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t threads = gridDim.x * blockDim.x;
  for (uint32_t i = plan->first[rank]; i < plan->first[rank + 1]; ++i) {
    const comm::PlanEntry entry = entries[i];
    if (!comm::copy_with(entry, destination, source, thread, threads, abort)) return;
  }
}

#endif

}  // namespace comm_pcie
