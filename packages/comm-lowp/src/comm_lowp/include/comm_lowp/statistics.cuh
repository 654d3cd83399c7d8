// The statistics of one rank: one pass over Q, K and V.
//
// `statistics_kernel` reads each tensor once. A block takes one head of one tensor:
//
//   Q: 256 rows that begin on the edge of a group. A warp takes a whole group and leaves its amax.
//   K: one chunk of 256 local rows, which is what the sum is defined over. Eight lanes of threads
//      take the rows in turn and their sums are added in order. Beside it the least and the largest
//      value of each channel in each group that the chunk touches, among live rows: with them every
//      amax of K - mean follows once the mean is known, without reading K again (RN subtraction is
//      monotone and odd).
//   V: one chunk, the largest magnitude of each channel.
//
// What a block leaves is small (K's extremes are the most, 4 % of K), and kept in the 16-bit type,
// which loses nothing. The last block of each batch index and head adds the chunks up, in order,
// into the vector that ranks gather: most of that is over while other blocks still read. Over
// windows it stores into those of all ranks, and the last block of all makes the gather an
// operation of the session.
#pragma once

#include <comm_lowp/direct.cuh>
#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>
#include <comm_lowp/numerics.cuh>

namespace comm_lowp {

// What `statistics_kernel` leaves; C is chunks(), all dense.
struct Partials {
  float* k_sums;         // [B, H, C, D]
  uint16_t* k_extremes;  // [B, H, C, kSegments, 2, D], (min, max)
  uint16_t* v_amax;      // [B, H, C, D]
  float* q_amax;         // [B, H, slots(L, q group)], not floored; 0 where no row is
};

struct StatisticsParams {
  Geometry geometry;
  View q, k, v;
  Partials partials;  // what is null is left out
  Handshake gather;
  float* targets[comm::kMaxRanks];  // where the statistics of this rank go
  uint32_t num_targets;             // 0: the partial results are all that is wanted
  uint32_t q_tiles;                 // 0 where there is no Q
  uint32_t k_chunks;                // 0 where there is no K
  uint32_t v_chunks;
  uint32_t*
      counters;  // [B * H + 1], 0 between launches: blocks of a row that are through, and rows
};

COMM_HD uint64_t extremes_at(const Geometry& g, uint32_t row, uint32_t chunk, uint32_t segment) {
  uint64_t place = (uint64_t(row) * chunks(g) + chunk) * kSegments + segment;
  return place * 2 * g.head_dim;
}

// The extremes of one channel over the live rows of this rank in a group; infinities where there is
// no such row. A group spans two chunks at most.
template <class T>
COMM_HD void group_extremes(const Geometry& g, const uint16_t* extremes, uint32_t row,
                            uint32_t group, uint32_t channel, float* least, float* most) {
  uint32_t origin = g.rank * g.local_sequence;
  uint32_t begin = group << g.k_group_log2;
  uint32_t end = (group + 1) << g.k_group_log2;
  begin = begin > origin ? begin - origin : 0;
  end = end - origin < g.local_sequence ? end - origin : g.local_sequence;
  *least = float_of(0x7f800000u);
  *most = float_of(0xff800000u);
  for (uint32_t chunk = begin / kChunkRows; chunk <= (end - 1) / kChunkRows; ++chunk) {
    const uint16_t* at = extremes + extremes_at(g, row, chunk, group - chunk_group(g, chunk));
    *least = min_of(*least, T::widen(at[channel]));
    *most = max_of(*most, T::widen(at[g.head_dim + channel]));
  }
}

#if defined(__CUDACC__)

// The larger of both halves, over the lanes of a warp whose numbers differ in the bits of `from`
// down to `to`.
template <class T>
__device__ __forceinline__ uint32_t warp_max_pair(uint32_t value, uint32_t from, uint32_t to) {
#pragma unroll
  for (uint32_t offset = from; offset >= to; offset /= 2)
    value = max_pair<T>(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

template <class T>
__device__ __forceinline__ uint32_t warp_min_pair(uint32_t value, uint32_t from, uint32_t to) {
#pragma unroll
  for (uint32_t offset = from; offset >= to; offset /= 2)
    value = min_pair<T>(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

template <class T, uint32_t kDim>
struct StatisticsBlock {
  static constexpr uint32_t kThreads = kDim;
  static constexpr uint32_t kRowThreads = kDim / 8;  // 16 bytes each
  static constexpr uint32_t kWarps = kDim / 32;
  static constexpr uint32_t kWarpRows = 32 / kRowThreads;
  static constexpr uint32_t kLoads = 8;  // of a thread, in flight

  // Rows `row`, `row + stride` and so on, as far as they are below `end`; zeros in place of the
  // others. `at` is the address of the first one.
  template <uint32_t kCount>
  static __device__ __forceinline__ void load_rows(Vector (&x)[kCount], const char* at,
                                                   int64_t pitch, uint32_t row, uint32_t stride,
                                                   uint32_t end) {
    const int64_t step = int64_t(stride) * pitch;
#pragma unroll
    for (uint32_t n = 0; n < kCount; ++n, at += step) {
      x[n] = Vector{};
      if (row + n * stride < end) x[n] = load_once(at);
    }
  }

  static __device__ __forceinline__ void q_tile(const StatisticsParams& p, uint32_t batch,
                                                uint32_t head, uint32_t tile) {
    const Geometry& g = p.geometry;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t group_rows = 1u << g.q_group_log2;
    const uint32_t num_slots = slots(g.local_sequence, g.q_group_log2);
    const uint32_t first = first_group(g.rank, g.local_sequence, g.q_group_log2);
    const char* base = row_of(p.q, batch, 0, head) + 16 * (lane % kRowThreads);
    const int64_t pitch = 2 * p.q.row_stride;
    // A batch of loads never leaves its group: the smallest has 16 rows.
    constexpr uint32_t kBatch = 16 / kWarpRows < kLoads ? 16 / kWarpRows : kLoads;
    for (uint32_t i = warp; i < kChunkRows >> g.q_group_log2; i += kWarps) {
      const uint32_t slot = tile * (kChunkRows >> g.q_group_log2) + i;
      if (slot >= num_slots) break;
      // Wraps around below the rank's first row, and is out of range there as well.
      const uint32_t begin =
          ((first + slot) << g.q_group_log2) - g.rank * g.local_sequence + lane / kRowThreads;
      uint32_t amax = 0;
      for (uint32_t row = 0; row < group_rows; row += kBatch * kWarpRows) {
        Vector x[kBatch];
        const uint32_t t = begin + row;
        load_rows(x, base + int64_t(int32_t(t)) * pitch, pitch, t, kWarpRows, g.local_sequence);
#pragma unroll
        for (uint32_t n = 0; n < kBatch; ++n) {
#pragma unroll
          for (uint32_t w = 0; w < 4; ++w) amax = max_magnitude<T>(x[n].word[w], amax);
        }
      }
      amax = max_pair<T>(amax, amax >> 16 | amax << 16);
      amax = warp_max_pair<T>(amax, 16, 1);
      if (lane == 0)
        p.partials.q_amax[(uint64_t(batch) * g.heads + head) * num_slots + slot] =
            T::widen(amax & 0xffffu);
    }
  }

  // One row more in the sums of two channels and in their extremes.
  static __device__ __forceinline__ void add_pair(float (&sum)[8], uint32_t (&least)[4],
                                                  uint32_t (&most)[4], uint32_t w, uint32_t x,
                                                  uint32_t low, uint32_t high) {
    sum[2 * w] = add_rn(sum[2 * w], T::low(x));
    sum[2 * w + 1] = add_rn(sum[2 * w + 1], T::high(x));
    least[w] = min_pair<T>(least[w], low);
    most[w] = max_pair<T>(most[w], high);
  }

  static __device__ __forceinline__ void k_chunk(const StatisticsParams& p, uint32_t batch,
                                                 uint32_t head, uint32_t chunk) {
    __shared__ __align__(16) float sums[kLanes][kDim];
    __shared__ __align__(16) uint16_t extremes[kSegments][kWarps][2][kDim];
    const Geometry& g = p.geometry;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row_lane = threadIdx.x / kRowThreads;
    const uint32_t channel = 8 * (threadIdx.x % kRowThreads);
    const char* base = row_of(p.k, batch, 0, head) + 2 * channel;
    const int64_t pitch = 2 * p.k.row_stride;
    const uint32_t begin = chunk * kChunkRows;
    const uint32_t end =
        begin + kChunkRows < g.local_sequence ? begin + kChunkRows : g.local_sequence;
    const uint32_t live = live_rows(g);
    const uint32_t origin = g.rank * g.local_sequence;
    const uint32_t first = chunk_group(g, chunk);
    const uint32_t num_segments = ((origin + end - 1) >> g.k_group_log2) - first + 1;
    constexpr uint32_t kAbove = T::kInfinity | T::kInfinity << 16;
    constexpr uint32_t kBelow = kAbove | 0x80008000u;

    float sum[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sum[i] = 0.0f;
    for (uint32_t segment = 0; segment < num_segments; ++segment) {
      const uint32_t edge = (first + segment) << g.k_group_log2;
      const uint32_t group_end = ((first + segment + 1) << g.k_group_log2) - origin;
      const uint32_t from = edge > origin + begin ? edge - origin : begin;
      const uint32_t to = group_end < end ? group_end : end;
      const uint32_t counted = live < to ? live : to;  // rows from here on are padding
      uint32_t least[4], most[4];
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        least[w] = kAbove;
        most[w] = kBelow;
      }
      // The first row of this lane. Lanes count from the chunk's first row.
      uint32_t t = from + ((row_lane - (from - begin)) & (kLanes - 1));
      for (; t < to; t += kLoads * kLanes) {
        Vector x[kLoads];
        // A row too many adds +0, which changes no sum.
        load_rows(x, base + int64_t(t) * pitch, pitch, t, kLanes, to);
        if (t + (kLoads - 1) * kLanes < counted) {
#pragma unroll
          for (uint32_t n = 0; n < kLoads; ++n) {
#pragma unroll
            for (uint32_t w = 0; w < 4; ++w)
              add_pair(sum, least, most, w, x[n].word[w], x[n].word[w], x[n].word[w]);
          }
        } else {
#pragma unroll
          for (uint32_t n = 0; n < kLoads; ++n) {
            const bool counts = t + n * kLanes < counted;
#pragma unroll
            for (uint32_t w = 0; w < 4; ++w)
              add_pair(sum, least, most, w, x[n].word[w], counts ? x[n].word[w] : kAbove,
                       counts ? x[n].word[w] : kBelow);
          }
        }
      }
      // The lanes have left the loop one by one.
      __syncwarp();
#pragma unroll
      for (uint32_t w = 0; w < 4; ++w) {
        least[w] = warp_min_pair<T>(least[w], 16, kRowThreads);
        most[w] = warp_max_pair<T>(most[w], 16, kRowThreads);
      }
      if (lane < kRowThreads) {
        *reinterpret_cast<Vector*>(&extremes[segment][warp][0][channel]) =
            Vector{{least[0], least[1], least[2], least[3]}};
        *reinterpret_cast<Vector*>(&extremes[segment][warp][1][channel]) =
            Vector{{most[0], most[1], most[2], most[3]}};
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) sums[row_lane][channel + i] = sum[i];
    __syncthreads();

    // One channel a thread.
    const uint32_t row = batch * g.heads + head;
    float total = sums[0][threadIdx.x];
#pragma unroll
    for (uint32_t i = 1; i < kLanes; ++i) total = add_rn(total, sums[i][threadIdx.x]);
    p.partials.k_sums[(uint64_t(row) * chunks(g) + chunk) * kDim + threadIdx.x] = total;
    for (uint32_t segment = 0; segment < num_segments; ++segment) {
      uint32_t least = kAbove, most = kBelow;
#pragma unroll
      for (uint32_t w = 0; w < kWarps; ++w) {
        least = min_pair<T>(least, extremes[segment][w][0][threadIdx.x]);
        most = max_pair<T>(most, extremes[segment][w][1][threadIdx.x]);
      }
      uint16_t* at = p.partials.k_extremes + extremes_at(g, row, chunk, segment);
      at[threadIdx.x] = uint16_t(least);
      at[kDim + threadIdx.x] = uint16_t(most);
    }
  }

  static __device__ __forceinline__ void v_chunk(const StatisticsParams& p, uint32_t batch,
                                                 uint32_t head, uint32_t chunk) {
    __shared__ __align__(16) uint16_t amaxes[kWarps][kDim];
    const Geometry& g = p.geometry;
    const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const uint32_t row_lane = threadIdx.x / kRowThreads;
    const uint32_t channel = 8 * (threadIdx.x % kRowThreads);
    const char* base = row_of(p.v, batch, 0, head) + 2 * channel;
    const int64_t pitch = 2 * p.v.row_stride;
    const uint32_t begin = chunk * kChunkRows;
    const uint32_t end =
        begin + kChunkRows < g.local_sequence ? begin + kChunkRows : g.local_sequence;
    uint32_t amax[4] = {0, 0, 0, 0};
    for (uint32_t t = begin + row_lane; t < end; t += kLoads * kLanes) {
      Vector x[kLoads];
      load_rows(x, base + int64_t(t) * pitch, pitch, t, kLanes, end);
#pragma unroll
      for (uint32_t n = 0; n < kLoads; ++n) {
#pragma unroll
        for (uint32_t w = 0; w < 4; ++w) amax[w] = max_magnitude<T>(x[n].word[w], amax[w]);
      }
    }
    __syncwarp();
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) amax[w] = warp_max_pair<T>(amax[w], 16, kRowThreads);
    if (lane < kRowThreads)
      *reinterpret_cast<Vector*>(&amaxes[warp][channel]) =
          Vector{{amax[0], amax[1], amax[2], amax[3]}};
    __syncthreads();
    uint32_t total = amaxes[0][threadIdx.x];
#pragma unroll
    for (uint32_t w = 1; w < kWarps; ++w) total = max_pair<T>(total, amaxes[w][threadIdx.x]);
    const uint64_t row = uint64_t(batch) * g.heads + head;
    p.partials.v_amax[(row * chunks(g) + chunk) * kDim + threadIdx.x] = uint16_t(total);
  }

  // What ranks gather of one batch index and head, once all of its blocks are through.
  static __device__ __forceinline__ void sum_up(const StatisticsParams& p, uint32_t row) {
    const Geometry& g = p.geometry;
    const Partials& from = p.partials;
    const Statistics at = statistics(g);
    const uint32_t num_chunks = chunks(g);
    const uint32_t num_targets = present(p.gather) && aborted(p.gather) ? 0 : p.num_targets;
    const auto put = [&](uint64_t place, float value) {
#pragma unroll 1
      for (uint32_t target = 0; target < num_targets; ++target) p.targets[target][place] = value;
    };
    // The additions have one order; their operands come many at a time.
    constexpr uint32_t kSums = 32;
    if (from.k_sums != nullptr) {
      const float* sums = from.k_sums + uint64_t(row) * num_chunks * kDim + threadIdx.x;
      float total = sums[0];
      uint32_t chunk = 1;
      for (; chunk + kSums <= num_chunks; chunk += kSums) {
        float x[kSums];
#pragma unroll
        for (uint32_t n = 0; n < kSums; ++n) x[n] = sums[uint64_t(chunk + n) * kDim];
#pragma unroll
        for (uint32_t n = 0; n < kSums; ++n) total = add_rn(total, x[n]);
      }
#pragma unroll 4
      for (; chunk < num_chunks; ++chunk) total = add_rn(total, sums[uint64_t(chunk) * kDim]);
      put(uint64_t(row) * kDim + threadIdx.x, total);
    }
    if (threadIdx.x < 2 && from.q_amax != nullptr) {
      const uint32_t num_slots = slots(g.local_sequence, g.q_group_log2);
      const uint32_t last = touched(g.rank, g.local_sequence, g.q_group_log2) - 1;
      put(at.q_desc + 2 * uint64_t(row) + threadIdx.x,
          from.q_amax[uint64_t(row) * num_slots + (threadIdx.x == 0 ? 0 : last)]);
    }
    // Whole warps, each with half of the threads' work.
    constexpr uint32_t kHalf = kDim / 2;
    if (threadIdx.x < kHalf) {
      if (from.v_amax == nullptr) return;
      // Two channels a thread.
      const uint32_t* amaxes =
          reinterpret_cast<const uint32_t*>(from.v_amax + uint64_t(row) * num_chunks * kDim) +
          threadIdx.x;
      uint32_t total = 0;
#pragma unroll 16
      for (uint32_t chunk = 0; chunk < num_chunks; ++chunk)
        total = max_pair<T>(total, amaxes[uint64_t(chunk) * kHalf]);
      put(at.v_amax + uint64_t(row) * kDim + 2 * threadIdx.x, T::low(total));
      put(at.v_amax + uint64_t(row) * kDim + 2 * threadIdx.x + 1, T::high(total));
    } else if (from.k_extremes != nullptr) {
      for (uint32_t i = threadIdx.x - kHalf; i < 2 * kDim; i += kHalf) {
        const uint32_t side = i / kDim;
        const uint32_t group = side == 0 ? first_group(g.rank, g.local_sequence, g.k_group_log2)
                                         : last_group(g.rank, g.local_sequence, g.k_group_log2);
        float least, most;
        group_extremes<T>(g, from.k_extremes, row, group, i % kDim, &least, &most);
        const uint64_t to = at.k_minmax + (uint64_t(row) * 4 + 2 * side) * kDim + i % kDim;
        // Of the two zeros the positive one, whichever was met.
        put(to, add_rn(least, 0.0f));
        put(to + kDim, add_rn(most, 0.0f));
      }
    }
  }
};

// Heads are the fastest index of a block: neighbours read whole rows of the tensor together.
template <class T, uint32_t kDim>
__global__ void __launch_bounds__(kDim, 896 / kDim)
    statistics_kernel(const __grid_constant__ StatisticsParams p) {
  using Block = StatisticsBlock<T, kDim>;
  follow();
  const uint32_t tiles = p.q_tiles + p.k_chunks + p.v_chunks;
  const uint32_t head = blockIdx.x % p.geometry.heads;
  const uint32_t tile = blockIdx.x / p.geometry.heads % tiles;
  const uint32_t batch = blockIdx.x / p.geometry.heads / tiles;
  if (tile < p.q_tiles) {
    Block::q_tile(p, batch, head, tile);
  } else if (tile < p.q_tiles + p.k_chunks) {
    Block::k_chunk(p, batch, head, tile - p.q_tiles);
  } else {
    Block::v_chunk(p, batch, head, tile - p.q_tiles - p.k_chunks);
  }
  if (p.num_targets == 0) return;
  const uint32_t row = batch * p.geometry.heads + head;
  const uint32_t rows = p.geometry.batch * p.geometry.heads;
  if (!last_block(&p.counters[row], tiles)) return;
  Block::sum_up(p, row);
  if (!present(p.gather)) return;
  if (last_block(&p.counters[rows], rows)) shake_hands(p.gather);
}

#endif

}  // namespace comm_lowp
