// A plan on the device: what bytes this rank copies to which peer. Written by
// comm_core.windows.table, field by field; the sizes are compared when the module is loaded.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm {

constexpr uint32_t kMaxLevels = 4;
constexpr uint32_t kMaxSources = 4;

// One strided copy: a nest of levels around rows of contiguous bytes
// (comm_core.transport.plan.Copy). Offsets and pitches are bytes.
struct PlanEntry {
  uint64_t source_offset;
  uint64_t target_offset;
  uint64_t source_pitch[kMaxLevels];
  uint64_t target_pitch[kMaxLevels];
  uint32_t repeat[kMaxLevels];  // outermost first; 1 where there is no level
  uint32_t rows;                // product of the repeats
  uint32_t row_bytes;
  uint32_t source;     // index of the source tensor
  uint32_t alignment;  // power of two up to 16 that divides every offset, pitch and row
};

static_assert(sizeof(PlanEntry) == 112, "mirrored by comm_core.windows.table");

struct PlanTable {
  uint64_t target_bytes;  // size of the destination
  uint32_t num_entries;
  uint32_t first[kMaxRanks + 1];  // entries of peer p: [first[p], first[p + 1])
                                  // followed by the entries, aligned to 8 bytes
};

static_assert(sizeof(PlanTable) == 80, "mirrored by comm_core.windows.table");

COMM_HD const PlanEntry* plan_entries(const PlanTable* table) {
  return reinterpret_cast<const PlanEntry*>(table + 1);
}

// Where row `row` of an entry begins on both sides.
COMM_HD void locate_row(const PlanEntry& entry, uint32_t row, uint64_t* source, uint64_t* target) {
  uint64_t from = entry.source_offset;
  uint64_t to = entry.target_offset;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int level = kMaxLevels - 1; level > 0; --level) {
    if (entry.repeat[level] > 1) {
      uint32_t outer = row / entry.repeat[level];
      uint32_t inner = row - outer * entry.repeat[level];
      from += inner * entry.source_pitch[level];
      to += inner * entry.target_pitch[level];
      row = outer;
    }
  }
  *source = from + row * entry.source_pitch[0];
  *target = to + row * entry.target_pitch[0];
}

#if defined(__CUDACC__)

// Copy a row of `units` vectors with the `width` lanes of a group (a power of two up to 32; `lane`
// is this one).
template <typename Vector>
__device__ __forceinline__ void copy_row(char* target, const char* source, uint32_t units,
                                         uint32_t lane, uint32_t width) {
  Vector* to = reinterpret_cast<Vector*>(target);
  const Vector* from = reinterpret_cast<const Vector*>(source);
  constexpr uint32_t kInFlight =
      4;  // loads that a lane has under way: one would leave the link waiting for memory
  uint32_t at = lane;
  for (; at + (kInFlight - 1) * width < units; at += kInFlight * width) {
    Vector held[kInFlight];
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) held[i] = __ldg(from + at + i * width);
#pragma unroll
    for (uint32_t i = 0; i < kInFlight; ++i) to[at + i * width] = held[i];
  }
  for (; at < units; at += width) to[at] = __ldg(from + at);
}

// Copy the rows of `entry` that fall to this group of lanes: row `first`, `first + stride` and so
// on. Looks at the abort word now and then, and returns false as soon as it is set.
template <typename Vector>
__device__ bool copy_entry(const PlanEntry& entry, char* target, const char* source, uint32_t group,
                           uint32_t groups, uint32_t lane, uint32_t width, const uint32_t* abort) {
  constexpr uint32_t kRowsPerCheck = 64;
  uint32_t units = entry.row_bytes / uint32_t(sizeof(Vector));
  uint32_t left = kRowsPerCheck;
  for (uint32_t row = group; row < entry.rows; row += groups) {
    uint64_t from, to;
    locate_row(entry, row, &from, &to);
    copy_row<Vector>(target + to, source + from, units, lane, width);
    if (--left == 0) {
      if (load_relaxed(abort) != 0) return false;
      left = kRowsPerCheck;
    }
  }
  return true;
}

// How many lanes share a row of `units` vectors: enough to use them all, and no more, so that short
// rows don't leave most of a warp idle.
__device__ __forceinline__ uint32_t lanes_per_row(uint32_t units) {
  uint32_t width = 1;
  while (width < units && width < 32) width <<= 1;
  return width;
}

// Copy one entry with `threads` threads of which this is number `thread`. The vector width follows
// from the entry and from the two addresses, which only this rank knows, so nothing that ranks must
// agree on depends on it.
__device__ __forceinline__ bool copy_with(const PlanEntry& entry, char* target, const char* source,
                                          uint32_t thread, uint32_t threads,
                                          const uint32_t* abort) {
  uint64_t bits = uint64_t(entry.alignment) | reinterpret_cast<uint64_t>(target) |
                  reinterpret_cast<uint64_t>(source);
  uint32_t vector = uint32_t(bits & (~bits + 1));
  if (vector > 16) vector = 16;
  uint32_t width = lanes_per_row(entry.row_bytes / vector);
  uint32_t group = thread / width, groups = threads / width, lane = thread % width;
  switch (vector) {
    case 16:
      return copy_entry<uint4>(entry, target, source, group, groups, lane, width, abort);
    case 8:
      return copy_entry<uint2>(entry, target, source, group, groups, lane, width, abort);
    case 4:
      return copy_entry<uint32_t>(entry, target, source, group, groups, lane, width, abort);
    case 2:
      return copy_entry<uint16_t>(entry, target, source, group, groups, lane, width, abort);
    default:
      return copy_entry<uint8_t>(entry, target, source, group, groups, lane, width, abort);
  }
}

#endif

}  // namespace comm
