// The exchange over NVLink: stores of the SMs and copies of the copy engines side by side, and the
// way out of staging in the same kernel.
//
// What a rank sends to a peer is cut twice, by a pure function of the plan (comm_nvlink/table.py):
//
// - the *head*, in as many slices as blocks serve the peer. Blocks store it, each its slice.
// - the *rest*, in a few chunks of decreasing size; small exchanges have none. Copy engines move it
//   where the host knew the peer's destination when the call was made, and the same blocks store it
//   where it did not.
//
// A receiver waits for a flag of every slice and of every chunk. It neither knows nor cares who
// moved the bytes, so every sender chooses for itself.
//
// Block b serves one peer: it copies its slice of this rank's own share while the announcements
// travel, then sends its slice to the peer, then waits for the same slice *from* that peer, and for
// the peer's chunks; where the destination is staged, it copies each from staging to the output as
// soon as it is there. No block waits for more than one peer (comm_core/barrier.cuh, invariant 5 of
// the exchange).
//
// Flags of slices and chunks hold the number of the operation and are compared for equality. That
// is exact: a sender writes the flag of a later operation only after this rank has announced that
// one, hence after it has read this flag. And a flag that lies still is not taken for reached after
// 2^31 operations, as one that is compared by order would be (comm_core/signal.cuh, invariant 1).
#pragma once

#include <comm_core/exchange.cuh>

namespace comm {
namespace nvlink {

constexpr uint32_t kThreads = 512;
constexpr uint32_t kMaxPeers = 8;    // ranks of a group
constexpr uint32_t kMaxSlices = 160;  // blocks that serve one peer
constexpr uint32_t kMaxChunks = 8;

// A rank's flags, in a window of their own, zero at the start. "by r" is written by rank r,
// everything else by the owner's kernels.
struct Flags {
  SignalLine slice[kMaxPeers][kMaxSlices];  // by r: that slice of r's head is here
  SignalLine chunk[kMaxPeers][kMaxChunks];  // by r: that chunk of r's rest is here
  SignalLine sent[kMaxPeers];               // blocks that have stored their part of a rest
  // What the copy engines deliver to `chunk`, in as many lines, so that one pitched copy can set
  // all flags of a peer: the number of the operation, or something that is no number of it where
  // it was aborted.
  SignalLine token[kMaxChunks];
};

static_assert(sizeof(Flags) == (8 * (160 + 8) + 8 + 8) * 128, "mirrored by comm_nvlink.launch");

// The work of one rank, as lists of plan entries: for list i, entries [first[i], first[i + 1]).
// Written by comm_nvlink.table. The lists, each numbered by block:
//
//   own share | heads | rests | heads received | chunk 0 received | chunk 1 received | ...
struct Table {
  uint64_t target_bytes;
  uint32_t blocks;
  uint32_t slices;  // blocks that serve one peer: blocks / (ranks - 1)
  uint32_t chunks;
  uint32_t num_lists;  // (4 + chunks) * blocks
                       // followed by first[num_lists + 1], then the entries, aligned to 8 bytes
};

static_assert(sizeof(Table) == 24, "mirrored by comm_nvlink.table");

enum List : uint32_t { kOwn = 0, kHead = 1, kRest = 2, kReceived = 3 };

COMM_HD const uint32_t* list_starts(const Table* table) {
  return reinterpret_cast<const uint32_t*>(table + 1);
}

COMM_HD const PlanEntry* list_entries(const Table* table) {
  uint64_t words = (uint64_t(table->num_lists) + 1 + 1) / 2;  // of 8 bytes
  return reinterpret_cast<const PlanEntry*>(reinterpret_cast<const uint64_t*>(table + 1) + words);
}

struct ExchangeParams {
  Session session;
  const Table* table;
  const char* sources[kMaxSources];
  char* landing;  // this rank's memory that the peers write
  char* output;   // where the data ends up; `landing` where the peers write it in place
  Flags* flags[kMaxPeers];  // every rank's, as this rank maps them
  uint64_t window_offset;   // of `landing`
  uint32_t window;
  uint32_t operation;
  uint32_t announces;   // whether the exchange kernel announces, or `open_kernel` beside it
  uint32_t by_engines;  // bit p: the copy engines move the rest for rank p
  // Where the host was told that rank p wants its data, for the ranks of `by_engines`.
  uint64_t expected_offset[kMaxPeers];
  uint32_t expected_window[kMaxPeers];
};

// Wait until `flag` holds exactly `target`; otherwise as wait_flag.
COMM_HD Wait wait_exactly(const uint32_t* flag, uint32_t target, const uint32_t* abort,
                          uint64_t deadline_ns) {
  while (true) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1
#endif
    for (uint32_t spin = 0; spin < kSpinsPerCheck; ++spin) {
      if (load_acquire(flag) == target) return Wait::kReached;
      COMM_SPIN();
    }
    if (load_relaxed(abort) != 0) return Wait::kAborted;
    if (now_ns() >= deadline_ns)
      return load_acquire(flag) == target ? Wait::kReached : Wait::kTimedOut;
  }
}

// Wait for a flag of `sender`. One thread. Whether it was reached.
COMM_HD bool await_flag(const Call& call, const SignalLine& flag, uint32_t sender) {
  Wait wait = wait_exactly(&flag.value, call.epoch, &own_block(call)->abort.value,
                           call.deadline_ns);
  if (wait == Wait::kReached) return true;
  stop(call, wait, wait == Wait::kTimedOut ? culprit(call, sender) : sender);
  return false;
}

// Tell every peer that this rank sends nothing more in this operation. Nobody waits for it here;
// but kernels of other modules on the same signals count on `done` keeping up.
COMM_HD void mark_all_done(const Call& call, uint32_t lane, uint32_t lanes) {
  for (uint32_t peer = lane; peer < call.world_size; peer += lanes) {
    if (peer != call.rank) mark_done(call, peer);
  }
}

// The part of `open_kernel` that concerns one peer: wait for its announcement, and compare it with
// what the host was told, because the copy engines are about to write there. One thread.
COMM_HD bool open_engine_peer(const ExchangeParams& p, const Call& call, uint32_t peer) {
  if (open_peer(p.session, call, peer, p.table->target_bytes) == nullptr) return false;
  if (!((p.by_engines >> peer) & 1)) return true;
  const Announcement& said = own_block(call)->ready[peer];
  if (said.window == p.expected_window[peer] && said.offset == p.expected_offset[peer]) return true;
  Call bad = call;
  bad.operation |= kBadAnnouncement;
  stop(bad, Wait::kTimedOut, peer);
  return false;
}

#if defined(__CUDACC__)

// Copy the entries of a list with all threads of the block. Vectors are numbered through all rows
// of an entry and dealt out one by one, so that a few short rows keep as many threads busy as one
// long row.
template <typename Vector>
__device__ __forceinline__ bool copy_vectors(const PlanEntry& entry, char* target,
                                             const char* source, const uint32_t* abort) {
  constexpr uint32_t kInFlight = 4;
  constexpr uint32_t kRoundsPerCheck = 32;
  const uint32_t units = entry.row_bytes / uint32_t(sizeof(Vector));
  const uint32_t total = entry.rows * units;  // below 2^31, see comm_nvlink/table.py
  uint32_t left = kRoundsPerCheck;
  for (uint32_t base = threadIdx.x; base < total; base += kInFlight * kThreads) {
    Vector held[kInFlight];
    char* to[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      uint32_t at = base + i * kThreads;
      if (at < total) {
        uint32_t row = at / units;
        uint64_t from_row, to_row;
        locate_row(entry, row, &from_row, &to_row);
        uint64_t within = uint64_t(at - row * units) * sizeof(Vector);
        // A plain load: what is copied out of staging was written by a peer while this kernel ran.
        held[i] = *reinterpret_cast<const Vector*>(source + from_row + within);
        to[i] = target + to_row + within;
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) {
      if (base + i * kThreads < total) *reinterpret_cast<Vector*>(to[i]) = held[i];
    }
    if (--left == 0) {
      if (load_relaxed(abort) != 0) return false;
      left = kRoundsPerCheck;
    }
  }
  return true;
}

// Copy list `list`; `sources` are the operands, or the one place that data is copied out of. False
// in some thread where an abort was seen.
__device__ __noinline__ bool copy_list(const Table* table, uint32_t list, char* target,
                                          const char* const* sources, const uint32_t* abort) {
  const uint32_t* first = list_starts(table);
  const uint32_t end = first[list + 1];
  for (uint32_t i = first[list]; i < end; ++i) {
    const PlanEntry& entry = list_entries(table)[i];
    const char* source = sources[entry.source];
    uint64_t bits = uint64_t(entry.alignment) | reinterpret_cast<uint64_t>(target) |
                    reinterpret_cast<uint64_t>(source);
    uint32_t vector = uint32_t(bits & (~bits + 1));
    bool complete;
    if (vector >= 16) {
      complete = copy_vectors<uint4>(entry, target, source, abort);
    } else if (vector == 8) {
      complete = copy_vectors<uint2>(entry, target, source, abort);
    } else if (vector == 4) {
      complete = copy_vectors<uint32_t>(entry, target, source, abort);
    } else if (vector == 2) {
      complete = copy_vectors<uint16_t>(entry, target, source, abort);
    } else {
      complete = copy_vectors<uint8_t>(entry, target, source, abort);
    }
    if (!complete) return false;
  }
  return true;
}

// The end of a kernel that settles the operation, in all threads of every block.
__device__ __forceinline__ void settle(const ExchangeParams& p, const Call& call) {
  enum : uint32_t { kNotLast, kWell, kBroken };
  __shared__ uint32_t end;
  __syncthreads();
  if (threadIdx.x == 0) {
    // The abort word is read before the operation is over, because the next kernel may already look
    // at it then.
    bool broken = aborted(call);
    end = !leave(call, gridDim.x) ? kNotLast : broken ? kBroken : kWell;
  }
  __syncthreads();
  if (end == kWell) mark_all_done(call, threadIdx.x, blockDim.x);
  if (end == kBroken && p.session.poison) poison(p.output, p.table->target_bytes);
}

__global__ void __launch_bounds__(kThreads, 1)
    exchange_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const Table* table = p.table;
  const uint32_t* abort = &own_block(call)->abort.value;
  const uint32_t peers = session.world_size - 1;
  const uint32_t slice = blockIdx.x / peers;
  const uint32_t peer = (session.rank + 1 + blockIdx.x % peers) % session.world_size;
  const uint32_t blocks = gridDim.x;
  const bool staged = p.output != p.landing;
  Flags* own = p.flags[session.rank];
  Flags* theirs = p.flags[peer];

  __shared__ char* target;
  __shared__ bool arrived;
  bool running = !aborted(call);
  running = __syncthreads_and(running);
  if (running && p.announces && blockIdx.x == 0 && threadIdx.x < 32)
    announce_to_all(call, p.window, p.window_offset);

  if (running) running = copy_list(table, kOwn * blocks + blockIdx.x, p.output, p.sources, abort);

  if (threadIdx.x == 0)
    target = running ? open_peer(session, call, peer, table->target_bytes) : nullptr;
  running = __syncthreads_and(running);
  running = running && target != nullptr;

  if (running)
    running = copy_list(table, kHead * blocks + blockIdx.x, target, p.sources, abort);
  running = __syncthreads_and(running);
  if (running && threadIdx.x == 0)
    store_release(&theirs->slice[session.rank][slice].value, call.epoch);

  if (table->chunks != 0 && !((p.by_engines >> peer) & 1)) {
    if (running)
      running = copy_list(table, kRest * blocks + blockIdx.x, target, p.sources, abort);
    running = __syncthreads_and(running);
    // A block that stopped has seen the abort word before it counted, so the last one sees it too.
    if (threadIdx.x == 0 && last_part(&own->sent[peer].value, table->slices) && running &&
        !aborted(call)) {
      for (uint32_t chunk = 0; chunk < table->chunks; ++chunk)
        store_release(&theirs->chunk[session.rank][chunk].value, call.epoch);
    }
  }

  const char* landing[1] = {p.landing};
  for (uint32_t part = 0; running && part <= table->chunks; ++part) {
    if (threadIdx.x == 0) {
      arrived = await_flag(call,
                           part == 0 ? own->slice[peer][slice]
                                     : own->chunk[peer][part - 1],
                           peer);
    }
    __syncthreads();
    running = arrived;
    if (running && staged) {
      running =
          copy_list(table, (kReceived + part) * blocks + blockIdx.x, p.output, landing, abort);
    }
    running = __syncthreads_and(running);
  }
  settle(p, call);
}

// Beside or before the copies of the copy engines: one warp.
__global__ void __launch_bounds__(32) open_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const uint32_t lane = threadIdx.x;
  bool good = !__any_sync(0xffffffffu, aborted(call));
  if (good) {
    announce_to_all(call, p.window, p.window_offset);
    if (lane < session.world_size && lane != session.rank) good = open_engine_peer(p, call, lane);
  }
  good = __all_sync(0xffffffffu, good);
  if (lane < kMaxChunks)
    store_relaxed(&p.flags[session.rank]->token[lane].value, good ? call.epoch : ~call.epoch);
}

// After the copies of the copy engines, where no SM is to be used meanwhile: one warp.
__global__ void __launch_bounds__(32) close_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const uint32_t lane = threadIdx.x;
  Flags* own = p.flags[session.rank];
  bool good = !__any_sync(0xffffffffu, aborted(call));
  if (good && lane < session.world_size && lane != session.rank) {
    for (uint32_t chunk = 0; good && chunk < p.table->chunks; ++chunk)
      good = await_flag(call, own->chunk[lane][chunk], lane);
  }
  settle(p, call);
}

#endif

}  // namespace nvlink
}  // namespace comm
