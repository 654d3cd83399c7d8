// Where things are: the global grid of groups, the statistics, the payload, the order of V.
//
// Pure functions of the geometry, for the device and for a plain host compiler. Row t of rank r is
// global row r * L + t; a group is a run of `2^k` global rows, numbered from 0. A rank that touches
// groups first to last keeps them in slots 0 to last - first.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm_lowp {

// Rows of one chunk of the sum of K, and the lanes that take its rows in turn. Both are part of the
// numbers: another split gives another sum.
constexpr uint32_t kChunkRows = 256;
constexpr uint32_t kLanes = 8;
// Groups of K that one chunk can touch, at most (64 rows a group).
constexpr uint32_t kSegments = 5;

// What every kernel gets.
struct Geometry {
  uint32_t batch;
  uint32_t local_sequence;
  uint32_t heads;
  uint32_t head_dim;  // 64 or 128
  uint32_t rank;
  uint32_t world_size;
  uint32_t used_sequence;  // live global rows
  uint32_t bfloat16;       // the dtype of Q, K and V: bfloat16 or float16
  uint32_t q_group_log2;
  uint32_t k_group_log2;
  uint32_t q_block;  // rows of Q that the consumer takes at once
  uint32_t v_block;  // V is padded to a multiple of this
  float v_max;
  uint32_t unused;
};

static_assert(sizeof(Geometry) == 56, "mirrored by comm_lowp.kernels");

COMM_HD uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// The most groups that a run of `rows` rows touches.
COMM_HD uint32_t slots(uint32_t rows, uint32_t log2) {
  return (rows + 2 * (1u << log2) - 2) >> log2;
}

COMM_HD uint32_t first_group(uint32_t rank, uint32_t local, uint32_t log2) {
  return (rank * local) >> log2;
}

COMM_HD uint32_t last_group(uint32_t rank, uint32_t local, uint32_t log2) {
  return ((rank + 1) * local - 1) >> log2;
}

COMM_HD uint32_t touched(uint32_t rank, uint32_t local, uint32_t log2) {
  return last_group(rank, local, log2) - first_group(rank, local, log2) + 1;
}

// The ranks that touch a group: from the first to the last.
COMM_HD uint32_t first_toucher(uint32_t group, uint32_t local, uint32_t log2) {
  return (group << log2) / local;
}

COMM_HD uint32_t last_toucher(uint32_t group, uint32_t local, uint32_t world, uint32_t log2) {
  uint32_t rank = (((group + 1) << log2) - 1) / local;
  return rank < world ? rank : world - 1;
}

// Live rows of this rank, from its first one on.
COMM_HD uint32_t live_rows(const Geometry& g) {
  uint32_t begin = g.rank * g.local_sequence;
  if (g.used_sequence <= begin) return 0;
  uint32_t live = g.used_sequence - begin;
  return live < g.local_sequence ? live : g.local_sequence;
}

COMM_HD uint32_t chunks(const Geometry& g) { return ceil_div(g.local_sequence, kChunkRows); }

// The first group of K that a chunk of this rank touches; segment i of it is group i from there.
COMM_HD uint32_t chunk_group(const Geometry& g, uint32_t chunk) {
  return (g.rank * g.local_sequence + chunk * kChunkRows) >> g.k_group_log2;
}

// The statistics of one rank, as one vector of fp32.
struct Statistics {
  uint64_t v_amax;    // [B, H, D], after k_sum [B, H, D]
  uint64_t q_desc;    // [B, H, 2]
  uint64_t k_minmax;  // [B, H, 2, 2, D]
  uint64_t count;
};

COMM_HD Statistics statistics(const Geometry& g) {
  uint64_t rows = uint64_t(g.batch) * g.heads;
  uint64_t channels = rows * g.head_dim;
  return {channels, 2 * channels, 2 * channels + 2 * rows, 6 * channels + 2 * rows};
}

// The sections of the payload for one destination, in bytes; Q is at 0.
struct Payload {
  uint64_t k;
  uint64_t v;
  uint64_t q_scale;
  uint64_t k_scale;
  uint64_t end;
  uint64_t chunk_bytes;
  uint32_t q_slots;
  uint32_t k_slots;
};

COMM_HD Payload payload(const Geometry& g) {
  uint32_t local_heads = g.heads / g.world_size;
  uint64_t rows = uint64_t(g.batch) * local_heads;
  uint64_t section = rows * g.local_sequence * g.head_dim;
  Payload p;
  p.q_slots = slots(g.local_sequence, g.q_group_log2);
  p.k_slots = slots(g.local_sequence, g.k_group_log2);
  p.k = section;
  p.v = 2 * section;
  p.q_scale = 3 * section;
  p.k_scale = (p.q_scale + 4 * rows * p.q_slots + 15) / 16 * 16;
  p.end = p.k_scale + 4 * rows * p.k_slots;
  p.chunk_bytes = (p.end + 127) / 128 * 128;
  return p;
}

// What the consumer wants.

COMM_HD uint32_t q_scale_width(const Geometry& g, uint32_t sequence) {
  return ceil_div(sequence, g.q_block) * (g.q_block >> g.q_group_log2);
}

COMM_HD uint32_t k_scale_width(const Geometry& g, uint32_t sequence) {
  return ceil_div(sequence, 1u << g.k_group_log2);
}

COMM_HD uint32_t padded_sequence(const Geometry& g) {
  return ceil_div(g.world_size * g.local_sequence, g.v_block) * g.v_block;
}

// The row of a block of 16 that position `x` of V holds.
COMM_HD constexpr uint32_t v_row(uint32_t x) { return 2 * (x / 4) + 8 * ((x % 4) / 2) + x % 2; }

static_assert(v_row(0) == 0 && v_row(2) == 8 && v_row(5) == 3 && v_row(14) == 14 && v_row(15) == 15,
              "0 1 8 9 2 3 10 11 4 5 12 13 6 7 14 15");

}  // namespace comm_lowp
