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
// The first blocks serve one peer each: a block sends its slice to the peer, then waits for the
// same slice *from* that peer, and for the peer's chunks; where the destination is staged, it
// copies each from staging to the output as soon as it is there. No block waits for more than one
// peer (comm_core/barrier.cuh, invariant 5 of the exchange). The other blocks copy this rank's own
// share. They are apart because stores to a peer that wait for the link hold up every other store
// of their SM: shared, the SMs would take the time for both, one after the other.
//
// Staging of small exchanges is doubled, one half for even and one for odd operations, and a sender
// that knows (from the hosts, in a captured graph) that a peer stages stores there at once; it sees
// the peer's announcement before it flags the data. That is safe: to have come to operation n + 2,
// it has seen the peer's announcement of n + 1, and the peer announces that after it has copied n
// out.
//
// Flags of slices and chunks hold the number of the operation and are compared for equality. That
// is exact: a sender writes the flag of a later operation only after this rank has announced that
// one, hence after it has read this flag. And a flag that lies still is not taken for reached after
// 2^31 operations, as one that is compared by order would be (comm_core/signal.cuh, invariant 1).
#pragma once

#include <comm_core/exchange.cuh>

namespace comm {
namespace nvlink {

// Few enough that two blocks fit a multiprocessor: then the next kernel's blocks can come and read
// their records while this one's still wait.
constexpr uint32_t kThreads = 256;
constexpr uint32_t kMaxPeers = 8;     // ranks of a group
constexpr uint32_t kMaxSlices = 224;  // blocks that serve one peer
constexpr uint32_t kMaxChunks = 7;

// The flags of one peer's chunks, side by side so that one copy of the copy engines can set them
// all.
struct alignas(kLineBytes) ChunkFlags {
  uint32_t value[kMaxChunks];
  uint32_t unused[32 - kMaxChunks];
};

// A rank's flags, in a window of their own, zero at the start. "by r" is written by rank r,
// everything else by the owner's kernels.
struct Flags {
  SignalLine slice[kMaxPeers][kMaxSlices];  // by r: that slice of r's head is here
  ChunkFlags chunk[kMaxPeers];              // by r: that chunk of r's rest is here
  SignalLine sent[kMaxPeers];               // blocks that have stored their part of a rest
  // What the copy engines deliver to `chunk`: the number of the operation, or something that is no
  // number of it where it was aborted.
  ChunkFlags token;
};

static_assert(sizeof(ChunkFlags) == kLineBytes, "one peer's flags a line");
static_assert(sizeof(Flags) == (8 * 224 + 8 + 8 + 1) * 128, "mirrored by comm_nvlink.launch");

// The work of one rank: a header, and a record for every block. A record is a list of lists of plan
// entries: entries [first[i], first[i + 1]) for list i, with the entries after the starts, aligned
// to 8 bytes. Lists: the block's part of this rank's own share, of the head and of the rest that it
// sends to its peer, of the head that it receives from there, and of every chunk that it receives.
// Written by comm_nvlink.table.
struct Table {
  uint64_t target_bytes;
  uint32_t senders;  // blocks that serve peers
  uint32_t copiers;  // blocks that copy this rank's own share, after them
  uint32_t chunks;
  uint32_t record_bytes;  // of every block's record, a multiple of 16
                          // followed by the records
};

static_assert(sizeof(Table) == 24, "mirrored by comm_nvlink.table");

enum List : uint32_t { kOwn = 0, kHead = 1, kRest = 2, kReceived = 3 };

constexpr uint32_t kMaxLists = kReceived + 1 + kMaxChunks;

struct Record {
  uint32_t first[kMaxLists + 1];
  // followed by the entries
};

static_assert(sizeof(Record) == 48, "mirrored by comm_nvlink.table");

// Where the records begin behind the table's start: at a multiple of 16.
constexpr uint32_t kRecordsAt = 32;

COMM_HD const PlanEntry* entries_of(const Record* record) {
  return reinterpret_cast<const PlanEntry*>(record + 1);
}

struct ExchangeParams {
  Session session;
  const Table* table;
  const char* sources[kMaxSources];
  char* landing;            // this rank's memory that the peers write
  char* output;             // where the data ends up; `landing` where the peers write it in place
  Flags* flags[kMaxPeers];  // every rank's, as this rank maps them
  uint64_t window_offset;   // of `landing`
  uint32_t window;
  uint32_t operation;
  uint64_t target_bytes;  // and what follows: as in the table, which would have to be fetched first
  uint32_t senders;
  uint32_t chunks;
  uint32_t record_bytes;
  uint32_t announces;   // whether the exchange kernel announces, or `open_kernel` beside it
  uint32_t by_engines;  // bit p: the copy engines move the rest for rank p
  // Where the host was told that rank p wants its data, for the ranks of `by_engines`.
  uint64_t expected_offset[kMaxPeers];
  uint32_t expected_window[kMaxPeers];
  // The landing of operation n is `landing + (n % 2) * half_bytes`; 0 where it is not doubled.
  uint64_t half_bytes;
  // Doubled staging of rank p as this rank maps it, where the host was told that p stages this
  // exchange there; else null, and its announcement is waited for.
  char* early[kMaxPeers];
  uint64_t early_half_bytes;
};

// Wait for a flag of `sender`. One thread. Whether it was reached.
COMM_HD bool await_flag(const Call& call, const uint32_t* flag, uint32_t sender) {
  Wait wait = wait_until([&] { return load_acquire(flag) == call.epoch; },
                         &own_block(call)->abort.value, call.deadline_ns);
  if (wait == Wait::kReached) return true;
  stop(call, wait, wait == Wait::kTimedOut ? culprit(call, sender) : sender);
  return false;
}

// Leave the operation, one thread of each of its `blocks` blocks, as `leave` does
// (comm_core/barrier.cuh); but a block says whether it was complete. One that was not has seen the
// abort word, so the last one need not look at it: that look would be the last thing before the
// kernel ends, and as long as a small exchange's handshake.
COMM_HD bool depart(const Call& call, uint32_t blocks, bool complete, bool* broken) {
  constexpr uint32_t kStopped = 1u << 16;  // in the counter of blocks, above their number
  SignalBlock* own = own_block(call);
  uint32_t before = add_acq_rel(&own->exits.value, complete ? 1 : 1 + kStopped);
  if (before % kStopped != blocks - 1) return false;
  store_relaxed(&own->exits.value, 0);
  *broken = !complete || before >= kStopped;
  if (*broken) note_abort(own, call.operation, call.epoch, call.record);
  store_relaxed(&own->epoch.value, call.epoch);
  return true;
}

// Count this operation in the lines by which kernels of other modules on the same signals wait for
// data (comm_core/barrier.cuh, mark_done), so that these never fall behind. Nobody waits for them
// in this operation, so it is done early, when it costs nothing. A group.
COMM_HD void keep_up(const Call& call) {
#if defined(__CUDA_ARCH__)
  uint32_t lane = threadIdx.x % 32;
  if (lane < call.world_size && lane != call.rank)
    store_relaxed(&call.peers[lane]->done[call.rank].value, call.epoch);
#else
  for (uint32_t peer = 0; peer < call.world_size; ++peer) {
    if (peer != call.rank) store_relaxed(&call.peers[peer]->done[call.rank].value, call.epoch);
  }
#endif
}

// A peer announced another place than its host had told this one's: the ranks run different calls.
COMM_HD void refuse_announcement(const Call& call, uint32_t peer) {
  Call bad = call;
  bad.operation |= kBadAnnouncement;
  stop(bad, Wait::kTimedOut, peer);
}

// The part of `open_kernel` that concerns one peer: wait for its announcement, and compare it with
// what the host was told, because the copy engines are about to write there. One thread.
//
// The announcement of a peer that the SMs serve is not looked at: they may have served it by now,
// and it may be announcing the next operation.
COMM_HD bool open_engine_peer(const ExchangeParams& p, const Call& call, uint32_t peer) {
  if (!((p.by_engines >> peer) & 1)) return true;
  if (open_peer(p.session, call, peer, p.target_bytes) == nullptr) return false;
  const Announcement& said = own_block(call)->ready[peer];
  if (said.window == p.expected_window[peer] && said.offset == p.expected_offset[peer]) return true;
  refuse_announcement(call, peer);
  return false;
}

#if defined(__CUDACC__)

// Vectors that a thread has under way, by the levels of the entry. One alone would leave memory and
// link idle most of the time; with many levels there are no registers for more.
template <int kLevels>
constexpr uint32_t kInFlight = kLevels == 1 ? 3 : 2;

// Vectors are numbered through all rows of an entry and dealt out to the threads one by one, so
// that a few short rows keep as many threads busy as one long row. From one of its vectors a thread
// steps to the next by adding: where a vector lies is a number of mixed radix (place in the row,
// row, ...), and divisions for each would cost more than the copy. `kLevels` are the innermost
// levels of the entry; the others don't repeat.
template <typename Vector, int kLevels>
struct Walk {
  static constexpr uint32_t kDigits = kLevels + 1;
  uint32_t digit[kDigits], step[kDigits], radix[kDigits];
  int64_t source_carry[kDigits], target_carry[kDigits];  // what a digit that wraps adds
  const char* from;
  char* to;
  int64_t source_step, target_step;

  __device__ __forceinline__ Walk(const PlanEntry& entry, char* target, const char* source,
                                  uint32_t first, uint32_t stride) {
    from = source + entry.source_offset;
    to = target + entry.target_offset;
    source_step = target_step = 0;
    int64_t source_unit = sizeof(Vector), target_unit = sizeof(Vector);
#pragma unroll
    for (uint32_t i = 0; i < kDigits; ++i) {
      radix[i] = i == 0 ? entry.row_bytes / uint32_t(sizeof(Vector)) : entry.repeat[kMaxLevels - i];
      const bool last = i + 1 == kDigits;  // the outermost digit never wraps
      uint32_t over = last ? 0 : first / radix[i];
      digit[i] = first - over * radix[i];
      first = over;
      uint32_t over_step = last ? 0 : stride / radix[i];
      step[i] = stride - over_step * radix[i];
      stride = over_step;
      from += digit[i] * source_unit;
      to += digit[i] * target_unit;
      source_step += step[i] * source_unit;
      target_step += step[i] * target_unit;
      if (!last) {
        int64_t source_next = int64_t(entry.source_pitch[kMaxLevels - 1 - i]);
        int64_t target_next = int64_t(entry.target_pitch[kMaxLevels - 1 - i]);
        source_carry[i] = source_next - int64_t(radix[i]) * source_unit;
        target_carry[i] = target_next - int64_t(radix[i]) * target_unit;
        source_unit = source_next;
        target_unit = target_next;
      }
    }
  }

  __device__ __forceinline__ void advance() {
    from += source_step;
    to += target_step;
    bool carry = false;
#pragma unroll
    for (uint32_t i = 0; i + 1 < kDigits; ++i) {
      digit[i] += step[i] + (carry ? 1 : 0);
      carry = digit[i] >= radix[i];
      if (carry) {
        digit[i] -= radix[i];
        from += source_carry[i];
        to += target_carry[i];
      }
    }
  }
};

// Vectors of `Vector` in an entry. Below 2^31, see comm_nvlink/table.py.
template <typename Vector>
__device__ __forceinline__ uint32_t vectors_of(const PlanEntry& entry) {
  return entry.rows * (entry.row_bytes / uint32_t(sizeof(Vector)));
}

// This thread's part of an entry, but for its first `skip` vectors.
template <typename Vector, int kLevels>
__device__ __forceinline__ bool copy_vectors(const PlanEntry& entry, char* target,
                                             const char* source, const uint32_t* abort,
                                             uint32_t skip = 0) {
  constexpr uint32_t kMany = kInFlight<kLevels>;
  constexpr uint32_t kRoundsPerCheck = 32;
  const uint32_t total = vectors_of<Vector>(entry);
  const uint32_t first = threadIdx.x + skip * kThreads;
  if (first >= total) return true;
  uint32_t left = (total - first + kThreads - 1) / kThreads;
  Walk<Vector, kLevels> walk(entry, target, source, first, kThreads);
  for (uint32_t round = 1; left >= kMany; left -= kMany, ++round) {
    Vector held[kMany];
    char* to[kMany];
#pragma unroll
    for (uint32_t i = 0; i < kMany; ++i) {
      // A plain load: what is copied out of staging was written by a peer while this kernel ran.
      held[i] = *reinterpret_cast<const Vector*>(walk.from);
      to[i] = walk.to;
      walk.advance();
    }
#pragma unroll
    for (uint32_t i = 0; i < kMany; ++i) *reinterpret_cast<Vector*>(to[i]) = held[i];
    if (round % kRoundsPerCheck == 0 && load_relaxed(abort) != 0) return false;
  }
  Vector held[kMany - 1];
  char* to[kMany - 1];
#pragma unroll
  for (uint32_t i = 0; i < kMany - 1; ++i) {
    if (i < left) {
      held[i] = *reinterpret_cast<const Vector*>(walk.from);
      to[i] = walk.to;
      walk.advance();
    }
  }
#pragma unroll
  for (uint32_t i = 0; i < kMany - 1; ++i) {
    if (i < left) *reinterpret_cast<Vector*>(to[i]) = held[i];
  }
  return true;
}

// Whether rows follow each other at one pitch, as nearly all do.
__device__ __forceinline__ bool one_level(const PlanEntry& entry) {
  return entry.repeat[kMaxLevels - 2] == 1 && entry.repeat[kMaxLevels - 3] == 1 &&
         entry.repeat[0] == 1;
}

// The largest power of two that divides everything about an entry, between `target` and `source`.
__device__ __forceinline__ uint64_t alignment_of(const PlanEntry& entry, const char* target,
                                                 const char* source) {
  uint64_t bits = uint64_t(entry.alignment) | reinterpret_cast<uint64_t>(target) |
                  reinterpret_cast<uint64_t>(source);
  return bits & (~bits + 1);
}

// This thread's part of list `list`, but for the first `skip` vectors of its first entry; `sources`
// are the operands, or the one place that data is copied out of. False where an abort was seen.
__device__ __noinline__ bool copy_list(const Record* record, uint32_t list, char* target,
                                       const char* const* sources, const uint32_t* abort,
                                       uint32_t skip = 0) {
  const uint32_t end = record->first[list + 1];
  for (uint32_t i = record->first[list]; i < end; ++i, skip = 0) {
    const PlanEntry& entry = entries_of(record)[i];
    const char* source = sources[entry.source];
    uint32_t vector = uint32_t(alignment_of(entry, target, source));
    bool complete;
    if (vector >= 16 && one_level(entry)) {
      complete = copy_vectors<uint4, 1>(entry, target, source, abort, skip);
    } else if (vector >= 16) {
      complete = copy_vectors<uint4, kMaxLevels>(entry, target, source, abort);
    } else if (vector == 8) {
      complete = copy_vectors<uint2, kMaxLevels>(entry, target, source, abort);
    } else if (vector == 4) {
      complete = copy_vectors<uint32_t, kMaxLevels>(entry, target, source, abort);
    } else if (vector == 2) {
      complete = copy_vectors<uint16_t, kMaxLevels>(entry, target, source, abort);
    } else {
      complete = copy_vectors<uint8_t, kMaxLevels>(entry, target, source, abort);
    }
    if (!complete) return false;
  }
  return true;
}

// The first vectors that this thread sends, read before it is known where to: the way to memory and
// back takes as long as a peer's announcement, and so they take that time together. Of the first
// entry of the head alone, where it is the common kind.
struct Ahead {
  static constexpr uint32_t kMany = 3;
  uint4 held[kMany];
  bool any;  // the same in all threads of a block

  // Vectors of this thread in an entry.
  static __device__ __forceinline__ uint32_t count(const PlanEntry& entry) {
    const uint32_t total = vectors_of<uint4>(entry);
    return threadIdx.x < total ? (total - threadIdx.x + kThreads - 1) / kThreads : 0;
  }

  __device__ __forceinline__ void read(const Record* record, const char* const* sources) {
    const PlanEntry& entry = entries_of(record)[record->first[kHead]];
    any = record->first[kHead] != record->first[kHead + 1] && one_level(entry) &&
          alignment_of(entry, nullptr, sources[entry.source]) >= 16;
    if (!any) return;
    const uint32_t left = count(entry);
    Walk<uint4, 1> walk(entry, nullptr, sources[entry.source], threadIdx.x, kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kMany; ++i) {
      if (i < left) {
        held[i] = *reinterpret_cast<const uint4*>(walk.from);
        walk.advance();
      }
    }
  }

  // Store them behind `target`; how many of the entry's vectors are then done in each thread.
  __device__ __forceinline__ uint32_t store(const Record* record, char* target) const {
    if (!any || reinterpret_cast<uint64_t>(target) % 16 != 0) return 0;
    const PlanEntry& entry = entries_of(record)[record->first[kHead]];
    const uint32_t left = count(entry);
    // Places are walked to once more: to hold them meanwhile there are no registers.
    Walk<uint4, 1> walk(entry, target, nullptr, threadIdx.x, kThreads);
#pragma unroll
    for (uint32_t i = 0; i < kMany; ++i) {
      if (i < left) {
        *reinterpret_cast<uint4*>(walk.to) = held[i];
        walk.advance();
      }
    }
    return kMany;
  }
};

// The end of a kernel that settles the operation, in all threads of every block; `complete`:
// nothing was left out in this block.
__device__ __forceinline__ void settle(const ExchangeParams& p, const Call& call, bool complete) {
  complete = __syncthreads_and(complete);
  if (threadIdx.x >= 32) return;
  bool spoil = false;
  if (threadIdx.x == 0) {
    bool broken;
    spoil = depart(call, gridDim.x, complete, &broken) && broken && p.session.poison;
  }
  if (!__any_sync(0xffffffffu, spoil)) return;
  for (uint64_t at = threadIdx.x; at < p.target_bytes; at += 32) p.output[at] = char(0xff);
}

// Bytes of a block's record that are brought to shared memory; one that is larger is read where it
// is.
constexpr uint32_t kRecordBytes = 4096;

// The part of a block that serves `peer`. Whether everything was sent and has arrived.
__device__ __forceinline__ bool serve(const ExchangeParams& p, const Call& call,
                                      const Record* record, uint32_t peer, bool running) {
  __shared__ char* target;
  __shared__ bool arrived;
  const Session& session = p.session;
  const uint32_t* abort = &own_block(call)->abort.value;
  const uint32_t slices = p.senders / (session.world_size - 1);
  const uint32_t slice = blockIdx.x / (session.world_size - 1);
  Flags* own = p.flags[session.rank];
  Flags* theirs = p.flags[peer];

  const uint64_t half = (call.epoch & 1) * p.half_bytes;
  char* early = p.early[peer];
  if (early != nullptr) {
    early += (call.epoch & 1) * p.early_half_bytes;
    running = running && copy_list(record, kHead, early, p.sources, abort);
  }
  Ahead ahead;
  ahead.any = false;
  // Only of small exchanges: beside the copy engines the head is not what is waited for.
  if (running && early == nullptr && p.chunks == 0) ahead.read(record, p.sources);
  if (threadIdx.x == 0) {
    target = running ? open_peer(session, call, peer, p.target_bytes) : nullptr;
    if (target != nullptr && early != nullptr && target != early) {
      refuse_announcement(call, peer);
      target = nullptr;
    }
  }
  running = __syncthreads_and(running);
  running = running && target != nullptr;
  if (early == nullptr) {
    const uint32_t done = running ? ahead.store(record, target) : 0;
    running = running && copy_list(record, kHead, target, p.sources, abort, done);
    running = __syncthreads_and(running);
  }
  if (running && threadIdx.x == 0)
    store_release(&theirs->slice[session.rank][slice].value, call.epoch);

  if (p.chunks != 0 && !((p.by_engines >> peer) & 1)) {
    running = running && copy_list(record, kRest, target, p.sources, abort);
    running = __syncthreads_and(running);
    // A block that stopped has seen the abort word before it counted, so the last one sees it too.
    if (threadIdx.x == 0 && last_part(&own->sent[peer].value, slices) && running &&
        !aborted(call)) {
      for (uint32_t chunk = 0; chunk < p.chunks; ++chunk)
        store_release(&theirs->chunk[session.rank].value[chunk], call.epoch);
    }
  }

  const bool staged = p.output != p.landing;
  const char* landing[1] = {p.landing + half};
  for (uint32_t part = 0; running && part <= p.chunks; ++part) {
    if (threadIdx.x == 0) {
      const uint32_t* flag =
          part == 0 ? &own->slice[peer][slice].value : &own->chunk[peer].value[part - 1];
      arrived = await_flag(call, flag, peer);
    }
    __syncthreads();
    running = arrived;
    if (running && staged) running = copy_list(record, kReceived + part, p.output, landing, abort);
    running = __syncthreads_and(running);
  }
  return running;
}

__global__ void __launch_bounds__(kThreads, 2)
    exchange_kernel(const __grid_constant__ ExchangeParams p) {
  __shared__ alignas(16) char held[kRecordBytes];
  const Session& session = p.session;
  const char* place =
      reinterpret_cast<const char*>(p.table) + kRecordsAt + uint64_t(blockIdx.x) * p.record_bytes;
  const Record* record = reinterpret_cast<const Record*>(place);
  // Tables never change, so this need not wait for what is before this kernel in the stream.
  if (p.record_bytes <= kRecordBytes) {
    for (uint32_t at = threadIdx.x * 16; at < p.record_bytes; at += kThreads * 16)
      *reinterpret_cast<uint4*>(held + at) = *reinterpret_cast<const uint4*>(place + at);
    record = reinterpret_cast<const Record*>(held);
  }
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
  const Call call = start(session, p.operation);
  bool running = !aborted(call);
  if (p.announces && blockIdx.x == 0 && threadIdx.x < 32 && __all_sync(0xffffffffu, running)) {
    announce_to_all(call, p.window, p.window_offset + (call.epoch & 1) * p.half_bytes);
    keep_up(call);
  }
  __syncthreads();  // the record is there

  if (blockIdx.x < p.senders) {
    const uint32_t peer =
        (session.rank + 1 + blockIdx.x % (session.world_size - 1)) % session.world_size;
    running = serve(p, call, record, peer, running);
  } else {
    running =
        running && copy_list(record, kOwn, p.output, p.sources, &own_block(call)->abort.value);
  }
  settle(p, call, running);
}

// Before the copies of the copy engines: one warp.
__global__ void __launch_bounds__(32) open_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const uint32_t lane = threadIdx.x;
  bool good = !__any_sync(0xffffffffu, aborted(call));
  if (good) {
    announce_to_all(call, p.window, p.window_offset);
    keep_up(call);
    if (lane < session.world_size && lane != session.rank) good = open_engine_peer(p, call, lane);
  }
  good = __all_sync(0xffffffffu, good);
  if (lane < kMaxChunks)
    store_relaxed(&p.flags[session.rank]->token.value[lane], good ? call.epoch : ~call.epoch);
}

// After the copies of the copy engines, where no SM is to be used meanwhile: one warp.
__global__ void __launch_bounds__(32) close_kernel(const __grid_constant__ ExchangeParams p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const uint32_t lane = threadIdx.x;
  Flags* own = p.flags[session.rank];
  bool good = !__any_sync(0xffffffffu, aborted(call));
  if (good && lane < session.world_size && lane != session.rank) {
    for (uint32_t chunk = 0; good && chunk < p.chunks; ++chunk)
      good = await_flag(call, &own->chunk[lane].value[chunk], lane);
  }
  settle(p, call, good);
}

#endif

}  // namespace nvlink
}  // namespace comm
