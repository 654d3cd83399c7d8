// The exchange between windows: every rank announces where it wants its data, and stores the peers'
// data there.
//
// One kernel, whose blocks are divided among the destinations (`blocks_per_peer` each, this rank's
// own share among them):
//
// 1. Block 0 announces this rank's destination (a window and an offset in it) to every peer. Stream
// order has made
//    sure that nothing reads or writes that memory any more, so the announcement is also the
//    permission to write.
// 2. The blocks of a peer wait for its announcement and store what the plan says into its window.
// 3. The last of them to finish releases `done` at the peer: everything that this rank sends it is
// there.
// 4. Block 0 waits for `done` of every peer, so that what follows in the stream finds the data.
// 5. The last block to leave advances the epoch.
//
// A rank that gives up or is told of an abort stores no more, fills its destination with NaN bytes,
// and leaves. The memory of a rank that left can still be written by one that looked at its abort
// word a moment before; it is therefore never unmapped without the group's consent
// (comm_core.consensus.Teardown).
//
// Everything that a launch depends on is equal on all ranks: the plan's geometry,
// `blocks_per_peer`, the deadline. Where the destination lies is not, and travels in the
// announcement.
#pragma once

#include <stdint.h>

#include <comm_core/barrier.cuh>
#include <comm_core/plan.cuh>

namespace comm {

// Small enough that several blocks fit an SM: all blocks of all ranks that share a GPU wait for
// each other, so they must all be on it at once (comm_core/windows/transport.py, blocks_per_peer).
constexpr uint32_t kExchangeThreads = 256;

// A window as this rank maps it, on all ranks.
struct WindowEntry {
  uint64_t bytes;
  uint64_t address[kMaxRanks];
  uint64_t unused;
};

static_assert(sizeof(WindowEntry) == 144, "mirrored by comm_core.windows.window");

// What every signalling kernel gets.
struct Session {
  uint32_t rank;
  uint32_t world_size;
  uint32_t num_windows;
  uint32_t poison;                  // fill the destination of an aborted operation with NaN bytes
  SignalBlock* signals[kMaxRanks];  // every rank's block as this rank maps it
  const WindowEntry* windows;       // device memory
  StallRecord* record;              // pinned host memory
  uint64_t timeout_ns;
};

static_assert(sizeof(Session) == 168, "mirrored by comm_core.windows.launch");

// Set in a record's operation when the peer did come, but announced memory that does not exist: the
// ranks run different programs.
constexpr uint32_t kBadAnnouncement = 0x80000000u;

struct ExchangeParams {
  Session session;
  const PlanTable* plan;
  const char* sources[kMaxSources];
  char* destination;       // this rank's own
  uint64_t window_offset;  // where the destination lies
  uint32_t window;
  uint32_t blocks_per_peer;
  uint32_t operation;
  uint32_t unused;
};

// This rank's operation that starts now.
COMM_HD Call start(const Session& session, uint32_t operation) {
  const SignalBlock* own = session.signals[session.rank];
  return {session.signals, session.record,     now_ns() + session.timeout_ns,
          session.rank,    session.world_size, operation,
          next_epoch(own)};
}

// Where `receiver` wants the data of this rank, once it has said so; null where it never does, or
// where what it says can't be. One thread.
COMM_HD char* open_peer(const Session& session, const Call& call, uint32_t receiver,
                        uint64_t bytes) {
  uint32_t window = 0;  // read only where it was reached, which not every host compiler sees
  uint64_t offset = 0;
  if (wait_ready(call, receiver, &window, &offset).wait != Wait::kReached) return nullptr;
  if (window < session.num_windows && offset <= session.windows[window].bytes &&
      bytes <= session.windows[window].bytes - offset) {
    return reinterpret_cast<char*>(session.windows[window].address[receiver] + offset);
  }
  Call bad = call;
  bad.operation |= kBadAnnouncement;
  stop(bad, Wait::kTimedOut, receiver);
  return nullptr;
}

#if defined(__CUDACC__)

// Fill a destination with bytes that are NaN in every floating type. All threads of one block.
__device__ __forceinline__ void poison(char* destination, uint64_t bytes) {
  for (uint64_t at = threadIdx.x; at < bytes; at += blockDim.x) destination[at] = char(0xff);
}

// The end of a kernel, in all threads of every block: the last block settles the operation.
__device__ __forceinline__ void finish(const Session& session, const Call& call, char* destination,
                                       uint64_t bytes) {
  __shared__ bool spoil;
  __syncthreads();
  if (threadIdx.x == 0) {
    bool broken = false;
    spoil = leave(call, gridDim.x, &broken) && broken && session.poison;
  }
  __syncthreads();
  if (spoil) poison(destination, bytes);
}

#endif

}  // namespace comm
