// Where the ranks' host threads tell each other where they want the data of a call.
//
// The copy engines get their destinations when a call is enqueued, long before the receiver's
// announcement reaches the device. So every rank posts its destination on a board of its own in
// host memory that all ranks map, and looks at the others'. Who has not posted in time is served by
// the SMs, which wait for the announcement on the device; so nothing here can hang, and nothing
// depends on how fast a rank's host is but which engine moves the bytes.
//
// The record is a hint that is checked: before the copies start, a kernel compares it with the
// announcement (open_kernel).
#pragma once

#include <sched.h>
#include <stdint.h>
#include <time.h>

namespace comm {
namespace nvlink {

constexpr uint32_t kPostings = 256;  // calls that a rank may be ahead without its record being lost

struct alignas(64) Posting {
  uint64_t number;  // of the call, from 1; 0 while the record is written
  uint64_t offset;
  uint32_t window;
  uint32_t captured;  // whether the call was captured in a graph
  uint64_t unused[5];
};

static_assert(sizeof(Posting) == 64, "one record a cache line");

struct Board {
  Posting postings[kPostings];
};

static_assert(sizeof(Board) == 64 * 256, "mirrored by comm_nvlink.board");

// Say where this rank wants the data of call `number`. One thread of the rank at a time.
inline void post(Board* board, uint64_t number, uint32_t window, uint64_t offset,
                 uint32_t captured) {
  Posting* record = &board->postings[number % kPostings];
  __atomic_store_n(&record->number, 0, __ATOMIC_RELAXED);
  // The fields after the 0 that withdraws the old record, and before the number that publishes the
  // new one.
  __atomic_thread_fence(__ATOMIC_RELEASE);
  __atomic_store_n(&record->offset, offset, __ATOMIC_RELAXED);
  __atomic_store_n(&record->window, window, __ATOMIC_RELAXED);
  __atomic_store_n(&record->captured, captured, __ATOMIC_RELAXED);
  __atomic_store_n(&record->number, number, __ATOMIC_RELEASE);
}

// Read what a rank has posted for call `number`; false where it has not, or has gone on so far that
// its record is lost.
inline bool read(const Board* board, uint64_t number, uint32_t* window, uint64_t* offset,
                 uint32_t* captured) {
  const Posting* record = &board->postings[number % kPostings];
  if (__atomic_load_n(&record->number, __ATOMIC_ACQUIRE) != number) return false;
  *offset = __atomic_load_n(&record->offset, __ATOMIC_RELAXED);
  *window = __atomic_load_n(&record->window, __ATOMIC_RELAXED);
  *captured = __atomic_load_n(&record->captured, __ATOMIC_RELAXED);
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
  return __atomic_load_n(&record->number, __ATOMIC_RELAXED) == number;
}

inline uint64_t monotonic_ns() {
  timespec value;
  clock_gettime(CLOCK_MONOTONIC, &value);
  return uint64_t(value.tv_sec) * 1000000000u + uint64_t(value.tv_nsec);
}

// As `read`, but wait for it until `deadline_ns` of the monotonic clock.
inline bool await_record(const Board* board, uint64_t number, uint64_t deadline_ns,
                         uint32_t* window, uint64_t* offset, uint32_t* captured) {
  constexpr uint32_t kSpins = 256;  // some ten microseconds; then let others run
  for (uint32_t spin = 0;; ++spin) {
    if (read(board, number, window, offset, captured)) return true;
    if (spin < kSpins) continue;
    if (monotonic_ns() >= deadline_ns) return false;
    sched_yield();
  }
}

}  // namespace nvlink
}  // namespace comm
