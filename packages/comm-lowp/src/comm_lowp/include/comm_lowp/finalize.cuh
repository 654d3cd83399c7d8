// From the statistics of all ranks to what Q, K and V are quantized with. Every rank evaluates the
// same expressions on the same gathered bits.
//
// Each block computes the mean of its head anew, which is less work than another kernel, and then
// the amax of a few groups of K from their extremes, a warp for each group.
#pragma once

#include <comm_lowp/statistics.cuh>

namespace comm_lowp {

struct FinalizeParams {
  Geometry geometry;
  const float* gathered;  // [P, N]; null: this rank alone counts, and `mean` is given
  const uint16_t* mean;   // [B, H, D]; null: from `gathered`
  Partials partials;      // of this rank; q_amax and k_extremes are read
  uint16_t* k_mean;       // [B, H, D], or null
  float* q_amax;          // [B, H, slots], or null
  float* k_amax;          // [B, H, slots], or null
  float* v_scale;         // [B, H, D], or null
  float* own_v_scale;     // [B, H / P, D] of the heads that this rank will have, or null
};

constexpr uint32_t kFinalizeThreads = 256;
constexpr uint32_t kFinalizeGroups = 16;  // groups of K a block

// Blocks for each batch index and head.
COMM_HD uint32_t finalize_parts(const Geometry& g) {
  return ceil_div(slots(g.local_sequence, g.k_group_log2), kFinalizeGroups);
}

#if defined(__CUDACC__)

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (uint32_t offset = 16; offset >= 1; offset /= 2)
    value = max_of(value, __shfl_xor_sync(0xffffffffu, value, offset));
  return value;
}

// The largest |K - mean| of a group that other ranks may touch too, over the channels of one lane,
// from what every rank that does has gathered.
__device__ __forceinline__ float shared_amax(const FinalizeParams& p, const float* mean,
                                             uint32_t row, uint32_t group, uint32_t lane) {
  const Geometry& g = p.geometry;
  const Statistics at = statistics(g);
  const uint32_t local = g.local_sequence;
  const uint32_t end = last_toucher(group, local, g.world_size, g.k_group_log2);
  float amax = 0.0f;
#pragma unroll 1
  for (uint32_t rank = first_toucher(group, local, g.k_group_log2); rank <= end; ++rank) {
    const uint32_t side = group == first_group(rank, local, g.k_group_log2) ? 0 : 1;
    const float* minmax =
        p.gathered + rank * at.count + at.k_minmax + (uint64_t(row) * 4 + 2 * side) * g.head_dim;
    for (uint32_t d = lane; d < g.head_dim; d += 32) {
      const float least = minmax[d], most = minmax[g.head_dim + d];
      amax = max_of(amax, max_of(sub_rn(most, mean[d]), sub_rn(mean[d], least)));
    }
  }
  return amax;
}

// The same for a group of this rank alone.
template <class T>
__device__ __forceinline__ float own_amax(const FinalizeParams& p, const float* mean, uint32_t row,
                                          uint32_t group, uint32_t lane) {
  float amax = 0.0f;
  for (uint32_t d = lane; d < p.geometry.head_dim; d += 32) {
    float least, most;
    group_extremes<T>(p.geometry, p.partials.k_extremes, row, group, d, &least, &most);
    amax = max_of(amax, max_of(sub_rn(most, mean[d]), sub_rn(mean[d], least)));
  }
  return amax;
}

// The `part`-th of `finalize_parts` blocks for one batch index and head.
template <class T>
__device__ __forceinline__ void finalize_block(const FinalizeParams& p, uint32_t row, uint32_t part,
                                               uint32_t parts) {
  __shared__ float mean[128];
  const Geometry& g = p.geometry;
  const Statistics at = statistics(g);
  const uint32_t dim = g.head_dim;
  const uint32_t local = g.local_sequence;
  const uint32_t channel = threadIdx.x % dim;
  const uint64_t place = uint64_t(row) * dim + channel;
  if (threadIdx.x < dim) {
    uint32_t bits = 0;
    if (p.mean != nullptr) {
      bits = p.mean[place];
    } else if (p.gathered != nullptr) {
      float total = p.gathered[place];
      for (uint32_t rank = 1; rank < g.world_size; ++rank)
        total = add_rn(total, p.gathered[rank * at.count + place]);
      bits = k_mean<T>(total, g.used_sequence);
    }
    mean[channel] = T::widen(bits);
    if (p.k_mean != nullptr && part == 0) p.k_mean[place] = uint16_t(bits);
  } else if (threadIdx.x < 2 * dim && part == 0 && p.gathered != nullptr) {
    float amax = 0.0f;
    for (uint32_t rank = 0; rank < g.world_size; ++rank)
      amax = max_of(amax, p.gathered[rank * at.count + at.v_amax + place]);
    const float scale = div_rn(amax, g.v_max);
    if (p.v_scale != nullptr) p.v_scale[place] = scale;
    const uint32_t local_heads = g.heads / g.world_size;
    const uint32_t head = row % g.heads - g.rank * local_heads;  // wraps around below its own
    if (p.own_v_scale != nullptr && head < local_heads)
      p.own_v_scale[(uint64_t(row / g.heads) * local_heads + head) * dim + channel] = scale;
  }
  __syncthreads();

  if (p.k_amax != nullptr) {
    const uint32_t num_slots = slots(local, g.k_group_log2);
    const uint32_t first = first_group(g.rank, local, g.k_group_log2);
    const uint32_t last = last_group(g.rank, local, g.k_group_log2);
    const uint32_t lane = threadIdx.x % 32;
    constexpr uint32_t kWarps = kFinalizeThreads / 32;
    const uint32_t end_slot = (part + 1) * kFinalizeGroups;
#pragma unroll 1
    for (uint32_t slot = part * kFinalizeGroups + threadIdx.x / 32;
         slot < end_slot && slot < num_slots; slot += kWarps) {
      const uint32_t group = first + slot;
      float amax = 0.0f;
      if (group <= last) {
        amax = p.gathered != nullptr && (group == first || group == last)
                   ? shared_amax(p, mean, row, group, lane)
                   : own_amax<T>(p, mean, row, group, lane);
        amax = warp_max(max_of(amax, float_of(kEpsBits)));
      }
      if (lane == 0) p.k_amax[uint64_t(row) * num_slots + slot] = amax;
    }
  }

  if (p.q_amax != nullptr) {
    const uint32_t num_slots = slots(local, g.q_group_log2);
    const uint32_t first = first_group(g.rank, local, g.q_group_log2);
    const uint32_t last = last_group(g.rank, local, g.q_group_log2);
    for (uint32_t slot = part * kFinalizeThreads + threadIdx.x; slot < num_slots;
         slot += parts * kFinalizeThreads) {
      const uint32_t group = first + slot;
      float amax = 0.0f;
      if (group <= last) {
        amax = max_of(float_of(kEpsBits), p.partials.q_amax[uint64_t(row) * num_slots + slot]);
        if (p.gathered != nullptr && (group == first || group == last)) {
          const uint32_t end = last_toucher(group, local, g.world_size, g.q_group_log2);
          for (uint32_t rank = first_toucher(group, local, g.q_group_log2); rank <= end; ++rank) {
            const uint32_t side = group == first_group(rank, local, g.q_group_log2) ? 0 : 1;
            amax = max_of(amax, p.gathered[rank * at.count + at.q_desc + 2 * uint64_t(row) + side]);
          }
        }
      }
      p.q_amax[uint64_t(row) * num_slots + slot] = amax;
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kFinalizeThreads)
    finalize_kernel(const __grid_constant__ FinalizeParams p) {
  follow();
  finalize_block<T>(p, blockIdx.y, blockIdx.x, gridDim.x);
}

#endif

}  // namespace comm_lowp
