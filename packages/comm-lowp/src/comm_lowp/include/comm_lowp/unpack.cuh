// From the payloads of all sources to what the consumer takes.
//
// Q and K are copied. V is transposed to [B, D, h, S_pad] and its rows are permuted within blocks
// of 16 global rows, which may straddle two sources: a tile of 32 KiB goes through shared memory,
// read in rows, and is turned in registers, 4 x 4 bytes at a time. Scales are gathered from the
// first source that has the group.
#pragma once

#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>
#include <comm_lowp/numerics.cuh>

namespace comm_lowp {

constexpr uint32_t kUnpackThreads = 256;
constexpr uint32_t kUnpackLoads = 8;
constexpr uint32_t kTileBytes = kUnpackThreads * kUnpackLoads * 16;
constexpr uint32_t kUnpackScaleBlocks = 16;

struct UnpackParams {
  Geometry geometry;
  Payload payload;
  const uint8_t* received;  // [P, chunk_bytes]
  uint8_t* q;               // [B, S, h, D], or null: neither Q nor K is copied
  uint8_t* k;
  uint8_t* v;      // [B, D, h, S_pad]
  float* q_scale;  // [B, h, width]
  float* k_scale;
  float* v_scale;         // [B, h, D]: spoilt where the exchange was aborted, or null
  const uint32_t* abort;  // outputs are filled with NaN bytes where it is not 0; or null
  uint32_t q_width, k_width;
  uint32_t v_tiles;
  uint32_t v_blocks;     // the first ones
  uint32_t piece_count;  // of what one source sends of Q or K for one batch index
  uint32_t copy_blocks;  // the next ones
};

// `scale_sequence`: the rows that the widths of the scales follow.
COMM_HD void plan_unpack(UnpackParams* p, uint32_t scale_sequence) {
  const Geometry& g = p->geometry;
  const uint32_t local_heads = g.heads / g.world_size;
  const uint64_t section = uint64_t(g.local_sequence) * local_heads * g.head_dim;
  p->q_width = q_scale_width(g, scale_sequence);
  p->k_width = k_scale_width(g, scale_sequence);
  p->v_tiles = ceil_div(padded_sequence(g), kTileBytes / g.head_dim);
  p->v_blocks = p->v_tiles * local_heads * g.batch;
  p->piece_count = uint32_t((section + kTileBytes - 1) / kTileBytes);
  p->copy_blocks = p->q == nullptr ? 0 : 2 * g.world_size * g.batch * p->piece_count;
}

#if defined(__CUDACC__)

__device__ __forceinline__ Vector nan_bytes() {
  return {{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}};
}

// A tile is padded by 16 bytes after each 16 rows, so that the words of eight blocks of rows lie in
// different banks.
template <uint32_t kDim>
__device__ __forceinline__ void unpack_v(const UnpackParams& p, uint32_t block, bool broken,
                                         uint8_t* shared) {
  constexpr uint32_t kRows = kTileBytes / kDim;
  constexpr uint32_t kUnits = kDim / 16;
  const Geometry& g = p.geometry;
  const uint32_t local_heads = g.heads / g.world_size;
  const uint32_t sequence = g.world_size * g.local_sequence;
  const uint32_t padded = padded_sequence(g);
  const uint32_t head = block % local_heads;
  const uint32_t origin = block / local_heads % p.v_tiles * kRows;
  const uint32_t batch = block / local_heads / p.v_tiles;

  Vector x[kUnpackLoads];
#pragma unroll
  for (uint32_t n = 0; n < kUnpackLoads; ++n) {
    const uint32_t unit = threadIdx.x + n * kUnpackThreads;
    const uint32_t row = origin + unit / kUnits;
    x[n] = Vector{};
    if (row < sequence) {
      const uint32_t source = row / g.local_sequence;
      const uint64_t local = uint64_t(batch) * g.local_sequence + row % g.local_sequence;
      x[n] = load_once(p.received + source * p.payload.chunk_bytes + p.payload.v +
                       (local * local_heads + head) * kDim + 16 * (unit % kUnits));
    }
    if (broken) x[n] = nan_bytes();
  }
#pragma unroll
  for (uint32_t n = 0; n < kUnpackLoads; ++n) {
    const uint32_t unit = threadIdx.x + n * kUnpackThreads;
    *reinterpret_cast<Vector*>(shared + 16 * unit + unit / kUnits / 16 * 16) = x[n];
  }
  __syncthreads();

  // A thread turns 16 rows of four channels. Eight lanes take neighbouring blocks of rows, so that
  // they store 128 bytes in a run; four take neighbouring channels.
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t n = 0; n < 2; ++n) {
    const uint32_t part = threadIdx.x / 32 + n * (kUnpackThreads / 32);
    const uint32_t rows = part % (kRows / 128) * 8 + lane % 8;
    const uint32_t channel = 4 * (part / (kRows / 128) * 4 + lane / 8);
    const uint8_t* from = shared + rows * (16 * kDim + 16) + channel;
    uint32_t turned[4][4];
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
#pragma unroll
      for (uint32_t j = 0; j < 4; ++j)
        turned[i][j] = *reinterpret_cast<const uint32_t*>(from + v_row(4 * i + j) * kDim);
      transpose_bytes(turned[i]);
    }
    const uint32_t position = origin + 16 * rows;
    if (position >= padded) continue;
#pragma unroll
    for (uint32_t c = 0; c < 4; ++c) {
      uint8_t* to =
          p.v + ((uint64_t(batch) * kDim + channel + c) * local_heads + head) * padded + position;
      store(to, Vector{{turned[0][c], turned[1][c], turned[2][c], turned[3][c]}});
    }
  }
}

// A piece of what one source sends of Q or K: one run of bytes here and there.
__device__ __forceinline__ void unpack_copy(const UnpackParams& p, uint32_t block, bool broken) {
  const Geometry& g = p.geometry;
  const uint64_t bytes = uint64_t(g.local_sequence) * (g.heads / g.world_size) * g.head_dim;
  uint32_t i = block;
  const uint64_t begin = uint64_t(i % p.piece_count) * kTileBytes;
  i /= p.piece_count;
  const uint32_t batch = i % g.batch;
  i /= g.batch;
  const uint32_t source = i % g.world_size;
  const bool is_k = i / g.world_size != 0;
  const uint8_t* from = p.received + source * p.payload.chunk_bytes + (is_k ? p.payload.k : 0) +
                        batch * bytes + begin;
  uint8_t* to = (is_k ? p.k : p.q) + (uint64_t(batch) * g.world_size + source) * bytes + begin;
  const uint32_t vectors = uint32_t((bytes - begin < kTileBytes ? bytes - begin : kTileBytes) / 16);
  Vector x[kUnpackLoads];
#pragma unroll
  for (uint32_t n = 0; n < kUnpackLoads; ++n) {
    const uint32_t at = threadIdx.x + n * kUnpackThreads;
    x[n] = at < vectors && !broken ? load_once(from + 16 * at) : nan_bytes();
  }
#pragma unroll
  for (uint32_t n = 0; n < kUnpackLoads; ++n) {
    const uint32_t at = threadIdx.x + n * kUnpackThreads;
    if (at < vectors) store(to + 16 * at, x[n]);
  }
}

__device__ __forceinline__ void unpack_scales(const UnpackParams& p, bool is_k, bool broken,
                                              uint32_t thread, uint32_t threads) {
  const Geometry& g = p.geometry;
  const uint32_t local_heads = g.heads / g.world_size;
  const uint32_t log2 = is_k ? g.k_group_log2 : g.q_group_log2;
  const uint32_t num_slots = is_k ? p.payload.k_slots : p.payload.q_slots;
  const uint32_t width = is_k ? p.k_width : p.q_width;
  const uint32_t groups = ceil_div(g.world_size * g.local_sequence, 1u << log2);
  const uint64_t section = is_k ? p.payload.k_scale : p.payload.q_scale;
  float* to = is_k ? p.k_scale : p.q_scale;
  for (uint32_t i = thread; i < g.batch * local_heads * width; i += threads) {
    const uint32_t group = i % width;
    uint32_t bits = kIdleScaleBits;
    if (group < groups) {
      const uint32_t source = first_toucher(group, g.local_sequence, log2);
      const uint32_t slot = group - first_group(source, g.local_sequence, log2);
      const uint8_t* from = p.received + source * p.payload.chunk_bytes + section;
      bits = reinterpret_cast<const uint32_t*>(from)[uint64_t(i / width) * num_slots + slot];
    }
    to[i] = float_of(broken ? 0xffffffffu : bits);
  }
}

template <uint32_t kDim>
__global__ void __launch_bounds__(kUnpackThreads, 4)
    unpack_kernel(const __grid_constant__ UnpackParams p) {
  __shared__ __align__(16) uint8_t shared[kTileBytes + kTileBytes / kDim];
  // What comes next is somebody else's.
  follow<false>();
  const bool broken = p.abort != nullptr && __syncthreads_or(comm::load_relaxed(p.abort) != 0) != 0;
  uint32_t block = blockIdx.x;
  if (block < p.v_blocks) {
    unpack_v<kDim>(p, block, broken, shared);
    return;
  }
  block -= p.v_blocks;
  if (block < p.copy_blocks) {
    unpack_copy(p, block, broken);
    return;
  }
  const uint32_t thread = (block - p.copy_blocks) * kUnpackThreads + threadIdx.x;
  const uint32_t threads = kUnpackScaleBlocks * kUnpackThreads;
  unpack_scales(p, false, broken, thread, threads);
  unpack_scales(p, true, broken, thread, threads);
  if (broken && p.v_scale != nullptr) {
    const Geometry& g = p.geometry;
    for (uint32_t i = thread; i < g.batch * (g.heads / g.world_size) * kDim; i += threads)
      p.v_scale[i] = float_of(0xffffffffu);
  }
}

#endif

}  // namespace comm_lowp
