// scatter_qkv over windows: the statistics and the payload go straight into the memory of the
// peers.
//
//   statistics ► pack ► unpack
//
// Two operations of the session: `gather`, of the statistics, which the last block of `statistics`
// does, and `close`, the end of the exchange of the payload, which the last block of `pack` does.
// No other block of a call waits for another rank. The first blocks of `pack` finalize the
// statistics, and its others wait for them: that is a wait within one launch, for blocks that have
// started before and wait for nothing.
//
// A launch costs the host several microseconds, so what is small has no kernel of its own.
//
// Invariants, beyond those of comm_core/barrier.cuh:
//
// 1. A window holds the payloads of all sources, and behind them the statistics of all ranks.
// 2. A rank stores its statistics into the peers' windows without asking. What it may overwrite
//    there was read by the blocks of a peer that finalize, which were through before that peer's
//    `close`; and whoever stores the statistics of the next call has left that `close`.
// 3. A rank takes part in `gather` after its previous `unpack` (stream order), so its mark there
//    permits to store the payload. Whoever has left `gather` has seen every mark, and stores its
//    payload without another handshake.
// 4. A mark is released after the last block has found that all blocks are through (`last_block`),
//    and so after all their stores; it makes them visible to the peer that acquires it.
// 5. An aborted session stores nothing: every block looks at the abort word before it stores into a
//    peer's memory. It is counted all the same, so that the operation is settled.
// 6. What follows a kernel that may wait for other ranks is not launched early (csrc/sage2.cu): its
//    blocks would hold what is left of a GPU that the other ranks' kernels may need to come at all.
//
// One block of a rank waits at a time, so ranks that share a GPU fit it, however many they are.
#pragma once

#include <comm_core/exchange.cuh>
#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>

namespace comm_lowp {

// One operation of the session, as the last block of a kernel does it.
struct Handshake {
  comm::Session session;  // its world_size is 0 in a kernel of another route
  uint64_t offset;        // announced: where in the window the data of the operation lies
  uint32_t window;
  uint32_t operation;
};

COMM_HD bool present(const Handshake& handshake) { return handshake.session.world_size != 0; }

COMM_HD bool aborted(const Handshake& handshake) {
  const comm::Session& session = handshake.session;
  return comm::load_relaxed(&session.signals[session.rank]->abort.value) != 0;
}

#if defined(__CUDACC__)

// Tell every peer that what this rank sends it in this operation is there, and wait until the peers
// have said so. All threads of the last block.
__device__ __forceinline__ void shake_hands(const Handshake& handshake) {
  if (threadIdx.x >= 32) return;
  const comm::Session& session = handshake.session;
  const comm::Call call = comm::start(session, handshake.operation);
  if (!__any_sync(0xffffffffu, comm::aborted(call))) {
    // Nobody waits for this before it stores; but every flag moves on in every operation, and it
    // says who has come (`culprit`).
    comm::announce_to_all(call, handshake.window, handshake.offset);
    const uint32_t peer = threadIdx.x;
    if (peer < session.world_size && peer != session.rank) comm::mark_done(call, peer);
    __syncwarp();
    comm::wait_all_done(call);
  }
  __syncwarp();
  // One block settles the operation for all; the others have looked at the abort word before they
  // were counted.
  if (threadIdx.x == 0) comm::leave(call, 1);
}

#endif

}  // namespace comm_lowp
