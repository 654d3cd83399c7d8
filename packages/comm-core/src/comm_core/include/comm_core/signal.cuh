// Signals between ranks: flags in memory that peers map, waits that always end, and the word that
// aborts everybody.
//
// The header compiles three ways: as device code (PTX operations), as the host half of a .cu file,
// and with a plain host compiler, where ranks are threads and ThreadSanitizer watches them. So
// there are no fences, only acquire loads and release stores, which are the same contract in both
// worlds.
//
// Invariants, on which every protocol of the project stands:
//
// 1. A flag has one writer and is only ever advanced. Flags count epochs modulo 2^32 and are
//    compared as a signed difference, so they never have to be reset: a captured graph replays
//    correctly, and wrap-around is harmless as long as no flag is ever 2^31 epochs behind. So flags
//    that share a counter are all advanced in each of its epochs, also by a rank that has nothing
//    to say, and kinds of operation that use different flags have counters of their own: a flag
//    that lies still while the others count to 2^31 (a few hours of small operations) reads as
//    reached.
// 2. What a rank wrote before its release of a flag is visible to whoever acquired that value of
//    the flag.
// 3. Every wait ends: the flag is reached, or somebody has given up (the abort word), or the
//    deadline has passed. Who gives up tells every peer first and then leaves; nobody waits for a
//    rank that has left.
// 4. The abort word is never cleared while anything can still be in flight. A session that was
//    aborted stays so. A wait that was reached says nothing about it: who is about to write into a
//    peer's memory looks at the word first.
// 5. Each flag has 128 bytes to itself: two flags in one line would make two writers fight for it.
// 6. Peers' memory is only ever loaded and stored, never modified in place: an atomic on a peer is
//    atomic only where the link has native atomics, which PCIe has not. Counters and elections are
//    the owner's alone.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <time.h>

#if defined(__CUDACC__)
#define COMM_HD __host__ __device__ __forceinline__
#else
#define COMM_HD inline
#endif

// A test may weaken an order, to show that it is found.
#if !defined(COMM_RELEASE_ORDER)
#define COMM_RELEASE_ORDER __ATOMIC_RELEASE
#endif
#if !defined(COMM_ACQUIRE_ORDER)
#define COMM_ACQUIRE_ORDER __ATOMIC_ACQUIRE
#endif
#if !defined(COMM_COUNT_ORDER)
#define COMM_COUNT_ORDER __ATOMIC_ACQ_REL
#endif

// What a thread does between two looks at a flag. Threads of one host share cores, so there they
// let each other run.
#if !defined(COMM_SPIN)
#if defined(__CUDACC__)
#define COMM_SPIN() ((void)0)
#else
#include <sched.h>
#define COMM_SPIN() sched_yield()
#endif
#endif

namespace comm {

constexpr uint32_t kMaxRanks = 16;
constexpr uint32_t kLineBytes = 128;

// Memory operations. System scope, because the other side is another GPU or the host.

COMM_HD uint32_t load_acquire(const uint32_t* address) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  return __atomic_load_n(address, COMM_ACQUIRE_ORDER);
#endif
}

COMM_HD uint32_t load_relaxed(const uint32_t* address) {
#if defined(__CUDA_ARCH__)
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
#else
  return __atomic_load_n(address, __ATOMIC_RELAXED);
#endif
}

COMM_HD void store_relaxed(uint32_t* address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  __atomic_store_n(address, value, __ATOMIC_RELAXED);
#endif
}

COMM_HD void store_release(uint32_t* address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
#else
  __atomic_store_n(address, value, COMM_RELEASE_ORDER);
#endif
}

// Add to a counter and return what it was; orders both ways, so that the one who finds the counter
// full has seen everything that the others did before they added. Only blocks of one GPU count
// together, so the scope is that GPU: what the last one then releases to the whole system covers
// what the others did, because causality is transitive across scopes.
COMM_HD uint32_t add_acq_rel(uint32_t* address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old;
#else
  return __atomic_fetch_add(address, value, COMM_COUNT_ORDER);
#endif
}

// Whether this is the last of `parts` calls for a counter, which then starts from 0 again. The last
// one has seen everything that the others did before they called. The counter belongs to one rank
// and to one kernel at a time.
COMM_HD bool last_part(uint32_t* counter, uint32_t parts) {
  if (add_acq_rel(counter, 1) != parts - 1) return false;
  // Nobody counts before the next kernel, and that one starts after this one has ended.
  store_relaxed(counter, 0);
  return true;
}

// Replace 0 by `value`; return whether this call did it. Elects one of many threads of one rank.
COMM_HD bool claim(uint32_t* address, uint32_t value) {
#if defined(__CUDA_ARCH__)
  uint32_t old;
  asm volatile("atom.acq_rel.sys.global.cas.b32 %0, [%1], 0, %2;"
               : "=r"(old)
               : "l"(address), "r"(value)
               : "memory");
  return old == 0;
#else
  uint32_t expected = 0;
  return __atomic_compare_exchange_n(address, &expected, value, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE);
#endif
}

// A clock that only goes forward. A test brings its own (COMM_NOW_NS) to decide when a deadline
// passes.
COMM_HD uint64_t now_ns() {
#if defined(__CUDA_ARCH__)
  uint64_t value;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(value));
  return value;
#elif defined(COMM_NOW_NS)
  return COMM_NOW_NS();
#else
  timespec value;
  clock_gettime(CLOCK_MONOTONIC, &value);
  return uint64_t(value.tv_sec) * 1000000000u + uint64_t(value.tv_nsec);
#endif
}

// Whether a counter that is at `value` has reached `target`.
COMM_HD bool reached(uint32_t value, uint32_t target) { return int32_t(value - target) >= 0; }

static_assert(int32_t(uint32_t(0) - uint32_t(0xffffffff)) >= 0, "0 comes after 2^32 - 1");
static_assert(int32_t(uint32_t(0xffffffff) - uint32_t(0)) < 0, "2^32 - 1 comes before 0");

struct alignas(kLineBytes) SignalLine {
  uint32_t value;
  uint32_t unused[31];
};

// Where a receiver wants its data: an offset in one of its windows. `epoch` is the flag. On a
// device the three are stored and loaded as one word of 16 bytes: stored one after the other, the
// flag would wait until the others have crossed the link and back. On the host the rest is written
// before the flag.
struct alignas(kLineBytes) Announcement {
  uint32_t epoch;
  uint32_t window;
  uint64_t offset;
  uint32_t unused[28];
};

// One rank's signal block, zero at the start. "by r" is written by rank r, everything else by the
// owner's kernels.
struct SignalBlock {
  SignalLine abort;               // by anyone: an abort code, or 0
  SignalLine claimed;             // who writes the host's stall record
  SignalLine epoch;               // operations that this rank has finished
  SignalLine exits;               // blocks of the running kernel that are through
  SignalLine sent[kMaxRanks];     // blocks that have finished their part for that peer
  SignalLine arrived[kMaxRanks];  // by r: how many barriers rank r has entered
  SignalLine done[kMaxRanks];     // by r: everything that rank r sends in that epoch is here
  Announcement ready[kMaxRanks];  // by r: where rank r wants what this rank sends it in that epoch
};

static_assert(sizeof(SignalLine) == kLineBytes, "one flag a line");
static_assert(sizeof(Announcement) == kLineBytes, "one flag a line");
static_assert(sizeof(SignalBlock) == (4 + 4 * kMaxRanks) * kLineBytes,
              "mirrored by comm_core.windows.signals");

static_assert(offsetof(Announcement, epoch) == 0 && offsetof(Announcement, window) == 4 &&
                  offsetof(Announcement, offset) == 8,
              "one word of 16 bytes");

// Announce. On a device nothing has to be ordered before it but what earlier kernels of the stream
// did with the memory, and those have ended: so no release, which would wait for the link first.
COMM_HD void store_announcement(Announcement* place, uint32_t epoch, uint32_t window,
                                uint64_t offset) {
#if defined(__CUDA_ARCH__)
  asm volatile(
      "{\n\t.reg .b64 low;\n\t.reg .b128 all;\n\t"
      "mov.b64 low, {%1, %2};\n\t"
      "mov.b128 all, {low, %3};\n\t"
      "st.relaxed.sys.global.b128 [%0], all;\n\t}" ::"l"(place),
      "r"(epoch), "r"(window), "l"(offset)
      : "memory");
#else
  place->window = window;
  place->offset = offset;
  store_release(&place->epoch, epoch);
#endif
}

// What the host is told of a stall, in pinned host memory. Written once, by one thread, `state`
// last.
struct StallRecord {
  uint32_t state;      // 0: nothing; 1: this rank gave up; 2: it was told that another one gave up
  uint32_t operation;  // comm_core.windows.signals.Operation
  uint32_t epoch;
  uint32_t waited_for;  // the rank that did not come
  uint32_t reporter;    // the rank that gave up first, as far as this one knows
  uint32_t unused[3];
};

static_assert(sizeof(StallRecord) == 32, "mirrored by comm_core.windows.signals");

// The abort word: who gave up, and for whom. Never 0.
COMM_HD uint32_t abort_code(uint32_t reporter, uint32_t waited_for) {
  return 0x80000000u | (waited_for << 8) | reporter;
}
COMM_HD uint32_t abort_reporter(uint32_t code) { return code & 0xffu; }
COMM_HD uint32_t abort_waited_for(uint32_t code) { return (code >> 8) & 0xffu; }

enum class Wait : uint32_t { kReached = 0, kAborted = 1, kTimedOut = 2 };

// How often a spinning thread looks at the clock and the abort word instead of the flag: both cost
// about as much as a look at the flag, which is what the latency of every handshake hangs on.
constexpr uint32_t kSpinsPerCheck = 32;

// Whether `place` has reached `target`; if so, what it says. Acquires.
COMM_HD bool look_announcement(const Announcement* place, uint32_t target, uint32_t* window,
                               uint64_t* offset) {
#if defined(__CUDA_ARCH__)
  uint32_t epoch;
  asm volatile(
      "{\n\t.reg .b64 low;\n\t.reg .b128 all;\n\t"
      "ld.acquire.sys.global.b128 all, [%3];\n\t"
      "mov.b128 {low, %2}, all;\n\t"
      "mov.b64 {%0, %1}, low;\n\t}"
      : "=r"(epoch), "=r"(*window), "=l"(*offset)
      : "l"(place)
      : "memory");
  return reached(epoch, target);
#else
  if (!reached(load_acquire(&place->epoch), target)) return false;
  *window = place->window;
  *offset = place->offset;
  return true;
#endif
}

// Look until `look()` is true, somebody has given up, or the deadline has passed. The one loop that
// every wait for a word of memory is made of; `look` acquires what it waits for.
template <typename Look>
COMM_HD Wait wait_until(Look look, const uint32_t* abort, uint64_t deadline_ns) {
  while (true) {
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // unrolled, the loop is as long as a small kernel, at every place that waits
#endif
    for (uint32_t spin = 0; spin < kSpinsPerCheck; ++spin) {
      if (look()) return Wait::kReached;
      COMM_SPIN();
    }
    if (load_relaxed(abort) != 0) return Wait::kAborted;
    // One more look: this thread may have been off the processor since the last one, and a rank
    // that came in time must not be called late.
    if (now_ns() >= deadline_ns) return look() ? Wait::kReached : Wait::kTimedOut;
  }
}

// Wait until `flag` has reached `target`. Acquires: what its writer did before is visible
// afterwards.
COMM_HD Wait wait_flag(const uint32_t* flag, uint32_t target, const uint32_t* abort,
                       uint64_t deadline_ns) {
  return wait_until([&] { return reached(load_acquire(flag), target); }, abort, deadline_ns);
}

// As wait_flag, for an announcement.
COMM_HD Wait wait_announcement(const Announcement* place, uint32_t target, const uint32_t* abort,
                               uint64_t deadline_ns, uint32_t* window, uint64_t* offset) {
  return wait_until([&] { return look_announcement(place, target, window, offset); }, abort,
                    deadline_ns);
}

// Give up on `waited_for`: tell every rank, then leave a record for the host. Called by any number
// of threads; the first one counts. `peers` are all ranks' signal blocks as this rank maps them,
// its own among them.
//
// Where two ranks give up at the same time, a peer's word says one or the other; which one does not
// matter. A rank that has been told already passes on what it was told, so that the first
// reporter's word stays wherever it can.
COMM_HD void give_up(SignalBlock* const* peers, uint32_t rank, uint32_t world_size,
                     uint32_t waited_for, uint32_t operation, uint32_t epoch, StallRecord* record) {
  SignalBlock* own = peers[rank];
  if (!claim(&own->claimed.value, 1)) return;
  uint32_t told = load_relaxed(&own->abort.value);
  uint32_t code = told != 0 ? told : abort_code(rank, waited_for);
  // The peers before the record: a host that reads the record may start to take things down.
  for (uint32_t peer = 0; peer < world_size; ++peer) {
    store_release(&peers[peer]->abort.value, code);
  }
  record->operation = operation;
  record->epoch = epoch;
  record->waited_for = abort_waited_for(code);
  record->reporter = abort_reporter(code);
  store_release(&record->state, told == 0 ? 1 : 2);
}

// Leave a record of an abort that another rank has started.
COMM_HD void note_abort(SignalBlock* own, uint32_t operation, uint32_t epoch, StallRecord* record) {
  if (!claim(&own->claimed.value, 1)) return;
  uint32_t code = load_acquire(&own->abort.value);
  record->operation = operation;
  record->epoch = epoch;
  record->waited_for = abort_waited_for(code);
  record->reporter = abort_reporter(code);
  store_release(&record->state, 2);
}

}  // namespace comm
