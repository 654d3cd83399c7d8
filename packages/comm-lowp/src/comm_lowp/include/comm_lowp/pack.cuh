// Quantizes Q, K and V and writes each destination's payload: into a send buffer, or straight into
// the windows of the peers.
//
// A block takes one tensor, one destination, some neighbouring heads of it (`span`) and a tile of
// rows. Each thread keeps its column of 16 channels, so that the mean of K or the factors of V stay
// in registers, and goes down the rows: two 16-byte loads, one 16-byte store. The threads of a
// block cover whole rows of the span, so that a warp stores up to 512 bytes in a run.
//
// Further blocks write the scales, the bytes between the sections and the tail.
//
// Over windows the first blocks turn the gathered statistics into what the others quantize with,
// and the last block to be through ends the exchange (direct.cuh).
#pragma once

#include <comm_lowp/direct.cuh>
#include <comm_lowp/finalize.cuh>
#include <comm_lowp/geometry.cuh>
#include <comm_lowp/memory.cuh>
#include <comm_lowp/numerics.cuh>

namespace comm_lowp {

// What a launch writes, as bits.
constexpr uint32_t kPartQ = 1;
constexpr uint32_t kPartK = 2;
constexpr uint32_t kPartV = 4;
constexpr uint32_t kPartScales =
    8;  // and the gap and the tail; of Q and K as far as they take part

constexpr uint32_t kPackThreads = 256;
constexpr uint32_t kPackSteps = 16;        // rows of a thread
constexpr uint32_t kPackLoads = 4;         // rows of a thread in flight
constexpr uint32_t kPackColumns = 32;      // of 16 channels, of a span at most
constexpr uint32_t kPackScaleBlocks = 16;  // for each destination
constexpr uint32_t kPackInverses = 128;

struct PackParams {
  Geometry geometry;
  Payload payload;
  View q, k, v;
  const uint16_t* k_mean;                  // [B, H, D]
  const float* q_amax;                     // [B, H, slots]
  const float* k_amax;                     // [B, H, slots]
  const float* v_scale;                    // [B, H, D]
  uint8_t* destinations[comm::kMaxRanks];  // the payload of each destination
  Handshake close;                         // this and the next four: of an exchange over windows
  FinalizeParams finalize;                 // writes k_mean and so on
  uint32_t* blocks_done;                   // 0 between launches: blocks that are through
  uint32_t* finalized;  // 0 between launches: those of the first ones that are through
  uint32_t finalize_parts;
  uint32_t finalize_blocks;  // the first ones
  uint32_t parts;
  uint32_t span_heads;  // heads of a span
  uint32_t spans;       // of a destination
  uint32_t tile_rows;
  uint32_t tiles;
  uint32_t tensors;      // that take part
  uint32_t data_blocks;  // of what comes then; the last ones write scales
  uint32_t unused;
};

static_assert(kPackThreads == kFinalizeThreads, "blocks of one launch do either");

// Divide the heads of a destination into spans of equal size, and the rows into tiles.
COMM_HD void plan_pack(PackParams* p) {
  const Geometry& g = p->geometry;
  const uint32_t columns = g.head_dim / 16;
  const uint32_t local_heads = g.heads / g.world_size;
  p->spans = ceil_div(local_heads * columns, kPackColumns);
  p->span_heads = ceil_div(local_heads, p->spans);
  p->spans = ceil_div(local_heads, p->span_heads);
  p->tile_rows = kPackThreads / (p->span_heads * columns) * kPackSteps;
  p->tiles = ceil_div(g.local_sequence, p->tile_rows);
  p->tensors = (p->parts & 1) + (p->parts >> 1 & 1) + (p->parts >> 2 & 1);
  p->data_blocks = p->tensors * g.batch * p->tiles * g.world_size * p->spans;
}

#if defined(__CUDACC__)

template <class T, uint32_t kDim>
struct PackBlock {
  static constexpr uint32_t kColumns = kDim / 16;

  // 16 values of a row as they lie in memory.
  struct Row {
    Vector half[2];
  };

  static __device__ __forceinline__ Row load_row(const char* address) {
    return {{load_once(address), load_once(address + 16)}};
  }

  template <bool kCentered>
  static __device__ __forceinline__ Vector int8_row(const Row& x, const Row& mean, float inverse) {
    Vector out;
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      uint32_t code[4];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t pair = x.half[w / 2].word[w % 2 * 2 + i];
        float low = T::low(pair), high = T::high(pair);
        if (kCentered) {
          const uint32_t center = mean.half[w / 2].word[w % 2 * 2 + i];
          low = sub_rn(low, T::low(center));
          high = sub_rn(high, T::high(center));
        }
        code[2 * i] = int8_code(mul_rn(low, inverse));
        code[2 * i + 1] = int8_code(mul_rn(high, inverse));
      }
      out.word[w] = pack_bytes(code[0], code[1], code[2], code[3]);
    }
    return out;
  }

  static __device__ __forceinline__ Vector e4m3_row(const Row& x, const float (&factor)[16],
                                                    const Vector& mask) {
    Vector out;
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      uint32_t pair[2];
#pragma unroll
      for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t values = x.half[w / 2].word[w % 2 * 2 + i];
        pair[i] = e4m3_pair(mul_rn(T::low(values), factor[4 * w + 2 * i]),
                            mul_rn(T::high(values), factor[4 * w + 2 * i + 1]));
      }
      out.word[w] = (pair[0] | pair[1] << 16) & mask.word[w];
    }
    return out;
  }

  struct Place {
    uint32_t batch, destination, head, heads, begin, end;  // heads and rows of the block
  };

  // Call `row(slot_row, values)` for the rows of this thread, a few in flight, and store what it
  // returns.
  template <class Function>
  static __device__ __forceinline__ void rows(const PackParams& p, const View& view,
                                              const Place& at, uint64_t section,
                                              const Function& row) {
    const Geometry& g = p.geometry;
    const uint32_t width = at.heads * kColumns;
    // Rows are laid out by the full width, also in a last span that is narrower.
    const uint32_t pass = kPackThreads / (p.span_heads * kColumns);
    const uint32_t first = threadIdx.x / width;
    if (first >= pass) return;
    const uint32_t column = threadIdx.x % width;
    const uint32_t local_heads = g.heads / g.world_size;
    const uint32_t head = at.head + column / kColumns;
    const char* from =
        row_of(view, at.batch, 0, at.destination * local_heads + head) + 32 * (column % kColumns);
    const int64_t pitch = 2 * view.row_stride;
    uint8_t* to = p.destinations[at.destination] + section +
                  (uint64_t(at.batch) * g.local_sequence * local_heads + head) * kDim +
                  16 * (column % kColumns);
    const uint64_t to_pitch = uint64_t(local_heads) * kDim;
#pragma unroll 1
    for (uint32_t t = at.begin + first; t < at.end; t += kPackLoads * pass) {
      Row x[kPackLoads];
#pragma unroll
      for (uint32_t n = 0; n < kPackLoads; ++n) {
        const uint32_t at_row = t + n * pass;
        if (at_row < at.end) x[n] = load_row(from + int64_t(at_row) * pitch);
      }
#pragma unroll
      for (uint32_t n = 0; n < kPackLoads; ++n) {
        const uint32_t at_row = t + n * pass;
        if (at_row < at.end) store(to + at_row * to_pitch, row(at_row, x[n]));
      }
    }
  }

  template <bool kIsK>
  static __device__ __forceinline__ void int8_tile(const PackParams& p, const Place& at) {
    __shared__ float inverses[kPackInverses];
    const Geometry& g = p.geometry;
    const uint32_t log2 = kIsK ? g.k_group_log2 : g.q_group_log2;
    const uint32_t num_slots = kIsK ? p.payload.k_slots : p.payload.q_slots;
    const uint32_t origin = g.rank * g.local_sequence;
    const uint32_t local_heads = g.heads / g.world_size;
    const uint32_t first = (origin + at.begin) >> log2;
    const uint32_t groups = ((origin + at.end - 1) >> log2) - first + 1;
    const uint32_t base = (at.batch * g.heads + at.destination * local_heads + at.head);
    const float* amaxes = (kIsK ? p.k_amax : p.q_amax) + (first - (origin >> log2));
    for (uint32_t i = threadIdx.x; i < at.heads * groups; i += kPackThreads)
      inverses[i] = int8_inverse(amaxes[uint64_t(base + i / groups) * num_slots + i % groups]);
    __syncthreads();
    const uint32_t column = threadIdx.x % (at.heads * kColumns);
    Row mean = {};
    if (kIsK) {
      const uint16_t* values =
          p.k_mean + uint64_t(base + column / kColumns) * kDim + 16 * (column % kColumns);
      mean.half[0] = *reinterpret_cast<const Vector*>(values);
      mean.half[1] = *reinterpret_cast<const Vector*>(values + 8);
    }
    const float* own = inverses + column / kColumns * groups;
    rows(p, kIsK ? p.k : p.q, at, kIsK ? p.payload.k : 0, [&](uint32_t row, const Row& x) {
      return int8_row<kIsK>(x, mean, own[((origin + row) >> log2) - first]);
    });
  }

  static __device__ __forceinline__ void e4m3_tile(const PackParams& p, const Place& at) {
    __shared__ __align__(16) float factors[kPackColumns * 16];
    const Geometry& g = p.geometry;
    const uint32_t local_heads = g.heads / g.world_size;
    const uint32_t base = at.batch * g.heads + at.destination * local_heads + at.head;
    for (uint32_t i = threadIdx.x; i < at.heads * kDim; i += kPackThreads)
      factors[i] = v_factor<T>(p.v_scale[uint64_t(base) * kDim + i], g.v_max);
    __syncthreads();
    const uint32_t column = threadIdx.x % (at.heads * kColumns);
    float factor[16];
    Vector mask;
#pragma unroll
    for (uint32_t w = 0; w < 4; ++w) {
      mask.word[w] = 0;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        factor[4 * w + i] = factors[16 * column + 4 * w + i];
        // A product with 0 would keep the sign.
        if (factor[4 * w + i] != 0.0f) mask.word[w] |= 0xffu << (8 * i);
      }
    }
    rows(p, p.v, at, p.payload.v,
         [&](uint32_t, const Row& x) { return e4m3_row(x, factor, mask); });
  }
};

// The scales of Q or K for one destination, and the bytes from their end to the next section.
__device__ __forceinline__ void write_scales(const PackParams& p, uint32_t destination, bool is_k,
                                             uint32_t thread, uint32_t threads) {
  const Geometry& g = p.geometry;
  const uint32_t local_heads = g.heads / g.world_size;
  const uint32_t log2 = is_k ? g.k_group_log2 : g.q_group_log2;
  const uint32_t num_slots = is_k ? p.payload.k_slots : p.payload.q_slots;
  const uint32_t num_touched = touched(g.rank, g.local_sequence, log2);
  const uint64_t begin = is_k ? p.payload.k_scale : p.payload.q_scale;
  const uint64_t end = is_k ? p.payload.chunk_bytes : p.payload.k_scale;
  const float* amaxes = is_k ? p.k_amax : p.q_amax;
  float* to = reinterpret_cast<float*>(p.destinations[destination] + begin);
  const uint32_t scales = g.batch * local_heads * num_slots;
  for (uint32_t i = thread; i < (end - begin) / 4; i += threads) {
    float value = 0.0f;
    const uint32_t slot = i % num_slots;
    if (i < scales && slot < num_touched) {
      const uint32_t row = i / num_slots;
      const uint32_t head = destination * local_heads + row % local_heads;
      value = int8_scale(amaxes[(uint64_t(row / local_heads) * g.heads + head) * num_slots + slot]);
    }
    to[i] = value;
  }
}

template <class T, uint32_t kDim>
__device__ __forceinline__ void pack_block(const PackParams& p, uint32_t number) {
  using Block = PackBlock<T, kDim>;
  const Geometry& g = p.geometry;
  if (number >= p.data_blocks) {
    const uint32_t block = number - p.data_blocks;
    const uint32_t thread = block % kPackScaleBlocks * kPackThreads + threadIdx.x;
    const uint32_t threads = kPackScaleBlocks * kPackThreads;
    if (p.q_amax != nullptr) write_scales(p, block / kPackScaleBlocks, false, thread, threads);
    if (p.k_amax != nullptr) write_scales(p, block / kPackScaleBlocks, true, thread, threads);
    return;
  }
  uint32_t i = number;
  typename Block::Place at;
  const uint32_t span = i % p.spans;
  i /= p.spans;
  // In a different order on every rank, so that no two start with one destination.
  at.destination = (i + g.rank + 1) % g.world_size;
  i /= g.world_size;
  const uint32_t tile = i % p.tiles;
  i /= p.tiles;
  at.batch = i % g.batch;
  uint32_t tensor = i / g.batch;
  // The n-th of the tensors that take part.
  if (!(p.parts & kPartQ)) ++tensor;
  if (tensor >= 1 && !(p.parts & kPartK)) ++tensor;
  at.head = span * p.span_heads;
  const uint32_t heads_left = g.heads / g.world_size - at.head;
  at.heads = heads_left < p.span_heads ? heads_left : p.span_heads;
  at.begin = tile * p.tile_rows;
  at.end = at.begin + p.tile_rows < g.local_sequence ? at.begin + p.tile_rows : g.local_sequence;
  if (tensor == 0) {
    Block::template int8_tile<false>(p, at);
  } else if (tensor == 1) {
    Block::template int8_tile<true>(p, at);
  } else {
    Block::e4m3_tile(p, at);
  }
}

// Wait for the blocks that finalize; whether the exchange goes on. All threads of a block.
//
// They come first, in the order in which a GPU starts the blocks of a launch, and wait for nothing.
// If one were missing all the same, this ends at the deadline, as every wait does.
__device__ __forceinline__ bool finalized(const PackParams& p) {
  const bool early = threadIdx.x == 0 && comm::load_acquire(p.finalized) != p.finalize_blocks;
  // All threads of a block store, or none.
  if (!__syncthreads_or(aborted(p.close) || early)) return true;
  if (threadIdx.x == 0) {
    const comm::Session& session = p.close.session;
    const comm::Call call = comm::start(session, p.close.operation);
    const comm::Wait wait = comm::wait_flag(p.finalized, p.finalize_blocks,
                                            &comm::own_block(call)->abort.value, call.deadline_ns);
    comm::stop(call, wait, session.rank);
  }
  return !__syncthreads_or(aborted(p.close));
}

template <class T, uint32_t kDim>
__global__ void __launch_bounds__(kPackThreads, 3)
    pack_kernel(const __grid_constant__ PackParams p) {
  follow();
  const bool closes = present(p.close);
  bool packs = true;
  if (blockIdx.x < p.finalize_blocks) {
    finalize_block<T>(p.finalize, blockIdx.x / p.finalize_parts, blockIdx.x % p.finalize_parts,
                      p.finalize_parts);
    __syncthreads();
    if (threadIdx.x == 0) comm::add_acq_rel(p.finalized, 1);
    packs = false;
  } else if (closes) {
    packs = finalized(p);
  }
  if (packs) pack_block<T, kDim>(p, blockIdx.x - p.finalize_blocks);
  if (!closes || !last_block(p.blocks_done, gridDim.x)) return;
  if (threadIdx.x == 0) comm::store_relaxed(p.finalized, 0);
  shake_hands(p.close);
}

#endif

}  // namespace comm_lowp
