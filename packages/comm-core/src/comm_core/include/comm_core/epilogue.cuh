// What follows a sum: residual, RMSNorm, quantization. One team of threads a row.
//
//     residual = dt(sum + residual_in)
//     norm     = dt(residual * inverse * (weight_bias + gamma)),
//                inverse = 1 / sqrt(sum of residual^2 / H + eps)
//     quant    = the encoding of norm
//
// A row lies in vectors of 16 bytes: thread t of a team of n has vectors t, t + n, t + 2 n, ... of
// it. Between the two passes over a row its vectors are in shared memory, each read by the thread
// that wrote it.
//
// A row of which something is NaN gets NaN in all places of its norm, and in its encodings as far
// as they have NaN (comm_core/allreduce/quant.py).
#pragma once

#include <stdint.h>

#include <comm_core/formats.cuh>
#include <comm_core/team.cuh>

namespace comm {

// Append only. Twin: comm_core/allreduce/launch.py, Encoding.
enum class Encoding : uint32_t {
  kNone = 0,
  kFp8 = 1,         // E4M3 with one scale
  kDynamicFp8 = 2,  // E4M3 with a scale a token
  kGroupFp8 = 3,    // E4M3 with a UE8M0 scale a group, four of them in a word
  kNvfp4 = 4,       // E2M1 with an E4M3 scale for 16 values
  kMxfp8 = 5,       // E4M3 with a UE8M0 scale for 32 values
};

// Twin: comm_core.allreduce.patterns.QuantizationSFLayout.
enum class ScaleLayout : uint32_t { kSwizzled128x4 = 0, kSwizzled8x4 = 1, kLinear = 2 };

struct Epilogue {
  const void* residual_in;
  void* residual_out;  // outputs: null where nobody wants them
  const void* gamma;
  void* norm_out;
  void* quant_out;
  void* scale_out;
  const float* scale;  // of kFp8 and kNvfp4, on the device; null: `scale_value`
  float scale_value;
  float eps;
  float weight_bias;
  uint32_t encoding;
  uint32_t layout;
  uint32_t group_vectors;  // vectors of a group of kGroupFp8
  uint64_t rows;
  uint32_t row_vectors;
  uint32_t hidden;
};

static_assert(sizeof(Epilogue) == 96, "mirrored by comm_core.allreduce.module");

// Where the scale factor of `row`, `column` lies; `columns` is the number of them in a row.
COMM_HD uint64_t scale_offset(uint64_t row, uint32_t column, uint32_t columns, ScaleLayout layout) {
  if (layout == ScaleLayout::kLinear) return row * columns + column;
  const uint64_t column_tiles = (columns + 3) / 4;
  if (layout == ScaleLayout::kSwizzled8x4) {
    return (row / 8 * column_tiles + column / 4) * 32 + row % 8 * 4 + column % 4;
  }
  return (row / 128 * column_tiles + column / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 +
         column % 4;
}

// Rows beyond the last one that the layout has.
COMM_HD uint32_t padding_rows(uint64_t rows, ScaleLayout layout) {
  if (layout == ScaleLayout::kLinear) return 0;
  const uint32_t tile = layout == ScaleLayout::kSwizzled8x4 ? 8 : 128;
  return uint32_t((tile - rows % tile) % tile);
}

COMM_HD uint64_t group_scale_offset(uint64_t row, uint32_t group, uint64_t rows) {
  return (group / 4 * ((rows + 3) / 4 * 4) + row) * 4 + group % 4;
}

COMM_HD bool groups_within_warps(uint32_t group_vectors) {
  return group_vectors <= 32 && (group_vectors & (group_vectors - 1)) == 0;
}

#if defined(__CUDACC__)

__device__ __forceinline__ void store_plain(void* base, uint64_t index, const Vector& value) {
#if defined(__CUDA_ARCH__)
  static_cast<uint4*>(base)[index] =
      make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
#else
  memcpy(static_cast<Vector*>(base) + index, &value, 16);
#endif
}

__device__ __forceinline__ Vector load_plain(const void* base, uint64_t index) {
#if defined(__CUDA_ARCH__)
  const uint4 value = static_cast<const uint4*>(base)[index];
  return {{value.x, value.y, value.z, value.w}};
#else
  Vector value;
  memcpy(&value, static_cast<const Vector*>(base) + index, 16);
  return value;
#endif
}

// What follows a sum, for one vector.

template <class T>
__device__ __forceinline__ float sum_of_squares(const Vector& vector) {
  using Format = Elements<T>;
  float values[Format::kCount];
  Format::unpack(vector, values);
  COMM_UNROLL
  for (uint32_t j = 0; j < Format::kCount / 2; ++j) {
    values[j] =
        add_rn(mul_rn(values[2 * j], values[2 * j]), mul_rn(values[2 * j + 1], values[2 * j + 1]));
  }
  return Format::kCount == 8 ? add_rn(add_rn(values[0], values[1]), add_rn(values[2], values[3]))
                             : add_rn(values[0], values[1]);
}

template <class T>
__device__ __forceinline__ Vector normalized(const Vector& total, const Vector& gamma, float bias,
                                             float inverse) {
  using Format = Elements<T>;
  float values[Format::kCount], weights[Format::kCount];
  Format::unpack(total, values);
  Format::unpack(gamma, weights);
  COMM_UNROLL
  for (uint32_t j = 0; j < Format::kCount; ++j) {
    values[j] = mul_rn(mul_rn(values[j], inverse), add_rn(bias, weights[j]));
  }
  return Format::pack(values);
}

// One thread's part in what follows the sums of its team's rows. Without `kQuantized` there is no
// encoding: less code for what is called most.
template <class T, bool kQuantized>
struct RowEpilogue {
  using Format = Elements<T>;
  static constexpr uint32_t kCount = Format::kCount;

  const Epilogue& e;
  Team& team;
  Vector* stash;       // of the block: its part of the row, then of gamma
  uint32_t steps;      // vectors of a row for each thread, at most
  uint32_t parts;      // groups of 32 vectors, those beyond the row's end included
  float share;         // of an element in the mean
  float global_scale;  // of kFp8 its inverse

  __device__ __forceinline__ RowEpilogue(const Epilogue& epilogue, Team& threads, Vector* memory,
                                         uint32_t row_steps, uint32_t row_parts, float row_share)
      : e(epilogue),
        team(threads),
        stash(memory),
        steps(row_steps),
        parts(row_parts),
        share(row_share),
        global_scale(0.0f) {}

  __device__ __forceinline__ void load_scale() {
    if (!kQuantized) return;
    global_scale = e.scale != nullptr ? *e.scale : e.scale_value;
    if (Encoding(e.encoding) == Encoding::kFp8) global_scale = div_rn(1.0f, global_scale);
  }

  __device__ __forceinline__ uint32_t place(uint32_t step) const {
    return step * team.threads + team.thread;
  }
  __device__ __forceinline__ Vector& kept(uint32_t step) const {
    return stash[step * blockDim.x + threadIdx.x];
  }
  __device__ __forceinline__ Vector& kept_gamma(uint32_t step) const {
    return stash[(steps + step) * blockDim.x + threadIdx.x];
  }
  // Largest magnitudes of the row's vectors; where groups go beyond a warp.
  __device__ __forceinline__ uint32_t* largest() const {
    return reinterpret_cast<uint32_t*>(stash + 2 * steps * blockDim.x);
  }

  // What does not depend on other ranks, before they are waited for.
  __device__ __forceinline__ void fetch_gamma() const {
    COMM_NO_UNROLL
    for (uint32_t step = 0; step < steps; ++step) {
      if (place(step) < e.row_vectors) fetch(&kept_gamma(step), e.gamma, place(step));
    }
  }
  __device__ __forceinline__ void fetch_residual(uint64_t row) const {
    COMM_NO_UNROLL
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t at = place(step);
      if (at < e.row_vectors) fetch(&kept(step), e.residual_in, row * e.row_vectors + at);
    }
  }
  __device__ __forceinline__ void await_fetched() const { comm::await_fetched(); }

  // The first pass, for one vector and all lanes of a warp; where it exists its residual is there:
  // add it, keep what comes out, and give the squares of 32 neighbours to the team.
  __device__ __forceinline__ void add_residual(uint64_t row, uint32_t step,
                                               const Vector& sum) const {
    const uint32_t at = place(step);
    float squares = 0.0f;
    if (at < e.row_vectors) {
      const Vector total = add_vectors<T>(sum, kept(step));
      if (e.residual_out != nullptr) store_plain(e.residual_out, row * e.row_vectors + at, total);
      kept(step) = total;
      squares = sum_of_squares<T>(total);
    }
    // Every warp gives its part, also where it has none of the row: so none can fall behind the
    // others, who would otherwise not wait for it.
    const uint32_t together = Team::combine_lanes(bits_of(squares), Team::AddBits());
    team.put(at / 32, together);
  }

  // The second pass; all threads of the team.
  __device__ __forceinline__ void finish(uint64_t row) {
    team.expect(parts);
    const float mean = mul_rn(team.take_sum(parts), share);
    const float inverse = inverse_root(add_rn(mean, e.eps));
    const Encoding encoding = kQuantized ? Encoding(e.encoding) : Encoding::kNone;
    const bool late = encoding == Encoding::kDynamicFp8 ||
                      (encoding == Encoding::kGroupFp8 && !groups_within_warps(e.group_vectors));
    uint32_t row_largest = 0;
    COMM_NO_UNROLL
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t at = place(step);
      const bool valid = at < e.row_vectors;
      float values[kCount];
      normalize(row, step, valid, inverse, values);
      if (late) {
        uint32_t most = 0;
        COMM_UNROLL
        for (uint32_t j = 0; j < kCount; ++j)
          most = max_u32(most, magnitude_without_nan(values[j]));
        row_largest = max_u32(row_largest, most);
        if (encoding == Encoding::kGroupFp8 && valid) largest()[at] = most;
      } else if (encoding != Encoding::kNone) {
        encode(encoding, row, at, valid, values);
      }
    }
    if (!kQuantized || !late) return;
    // Also where every group has its own: what the vectors have must be there for others to read.
    team.put(team.thread / 32, Team::combine_lanes(row_largest, Team::MaxBits()));
    team.expect(team.threads / 32);
    row_largest = team.take_max(team.threads / 32);
    const float row_scale = dynamic_fp8_scale(row_largest);
    if (encoding == Encoding::kDynamicFp8 && team.thread == 0)
      static_cast<float*>(e.scale_out)[row] = row_scale;
    COMM_NO_UNROLL
    for (uint32_t step = 0; step < steps; ++step) {
      const uint32_t at = place(step);
      if (at >= e.row_vectors) continue;
      float values[kCount];
      Format::unpack(kept(step), values);
      if (encoding == Encoding::kDynamicFp8) {
        COMM_UNROLL
        for (uint32_t j = 0; j < kCount; ++j) values[j] = div_rn(values[j], row_scale);
        store_e4m3(row, at, values);
      } else {
        const uint32_t first = at / e.group_vectors * e.group_vectors;
        uint32_t most = 0;
        for (uint32_t i = 0; i < e.group_vectors; ++i) most = max_u32(most, largest()[first + i]);
        encode_group(row, at, true, most, values);
      }
    }
  }

  // Zeros for the places of scales that belong to no row; any of `parts` teams does its share.
  __device__ __forceinline__ void pad_scales(uint64_t part, uint64_t parts) const {
    if (!kQuantized) return;
    const Encoding encoding = Encoding(e.encoding);
    if (encoding != Encoding::kNvfp4 && encoding != Encoding::kMxfp8) return;
    const ScaleLayout layout = ScaleLayout(e.layout);
    const uint32_t columns = e.hidden / (encoding == Encoding::kNvfp4 ? 16 : 32);
    const uint32_t words = (columns + 3) / 4, rows = padding_rows(e.rows, layout);
    for (uint64_t i = part * team.threads + team.thread; i < uint64_t(rows) * words;
         i += parts * team.threads) {
      const uint64_t at =
          scale_offset(e.rows + i / words, uint32_t(i % words) * 4, columns, layout);
      *reinterpret_cast<uint32_t*>(static_cast<char*>(e.scale_out) + at) = 0;
    }
  }

 private:
  __device__ __forceinline__ void normalize(uint64_t row, uint32_t step, bool valid, float inverse,
                                            float (&values)[kCount]) const {
    if (!valid) {
      COMM_UNROLL
      for (uint32_t j = 0; j < kCount; ++j) values[j] = 0.0f;
      return;
    }
    const Vector norm = normalized<T>(kept(step), kept_gamma(step), e.weight_bias, inverse);
    if (e.norm_out != nullptr) store_plain(e.norm_out, row * e.row_vectors + place(step), norm);
    if (!kQuantized) return;
    kept(step) = norm;
    Format::unpack(norm, values);
  }

  __device__ __forceinline__ void encode(Encoding encoding, uint64_t row, uint32_t at, bool valid,
                                         float (&values)[kCount]) const {
    if (encoding == Encoding::kFp8) {
      COMM_UNROLL
      for (uint32_t j = 0; j < kCount; ++j) values[j] = mul_rn(values[j], global_scale);
      if (valid) store_e4m3(row, at, values);
      return;
    }
    if (encoding == Encoding::kNvfp4) {
      encode_nvfp4(row, at, valid, values);
      return;
    }
    uint32_t most = 0;
    COMM_UNROLL
    for (uint32_t j = 0; j < kCount; ++j) most = max_u32(most, magnitude_without_nan(values[j]));
    // A group's vectors are those of neighbouring lanes, and begin at a multiple of their number.
    const uint32_t span = encoding == Encoding::kMxfp8 ? 32 / kCount : e.group_vectors;
    for (uint32_t mask = 1; mask < span; mask *= 2) {
      most = max_u32(most, __shfl_xor_sync(0xffffffffu, most, mask));
    }
    if (encoding == Encoding::kMxfp8) {
      encode_mxfp8(row, at, valid, most, values);
    } else {
      encode_group(row, at, valid, most, values);
    }
  }

  __device__ __forceinline__ void encode_group(uint64_t row, uint32_t at, bool valid, uint32_t most,
                                               float (&values)[kCount]) const {
    if (!valid) return;
    const uint32_t code = group_fp8_code(most);
    scale_and_store(row, at, code, values);
    const uint32_t group = at / e.group_vectors, groups = e.row_vectors / e.group_vectors;
    if (at % e.group_vectors != 0) return;
    uint8_t* scales = static_cast<uint8_t*>(e.scale_out);
    scales[group_scale_offset(row, group, e.rows)] = uint8_t(code);
    if (group + 1 != groups) return;
    for (uint32_t rest = groups; rest % 4 != 0; ++rest)
      scales[group_scale_offset(row, rest, e.rows)] = 0;
  }

  __device__ __forceinline__ void encode_mxfp8(uint64_t row, uint32_t at, bool valid, uint32_t most,
                                               float (&values)[kCount]) const {
    if (!valid) return;
    const uint32_t code = encode_ue8m0(bits_of(div_rn(float_of(most), 448.0f)));
    scale_and_store(row, at, code, values);
    if (at % (32 / kCount) == 0) store_scale(row, at / (32 / kCount), e.hidden / 32, code);
  }

  __device__ __forceinline__ void encode_nvfp4(uint64_t row, uint32_t at, bool valid,
                                               float (&values)[kCount]) const {
    // Rows of 32-bit elements are never encoded so: the launcher refuses them.
    if constexpr (kCount == 8) {
      uint32_t most = 0;
      COMM_UNROLL
      for (uint32_t j = 0; j < kCount; ++j) most = max_u32(most, magnitude(values[j]));
      most = max_u32(most, __shfl_xor_sync(0xffffffffu, most, 1));
      if (!valid) return;
      float multiplier;
      const uint32_t code = nvfp4_factor(most, global_scale, &multiplier);
      COMM_UNROLL
      for (uint32_t j = 0; j < kCount; ++j) values[j] = mul_rn(values[j], multiplier);
      static_cast<uint32_t*>(e.quant_out)[row * e.row_vectors + at] = encode_e2m1_eight(values);
      if (at % 2 == 0) store_scale(row, at / 2, e.hidden / 16, code);
    }
  }

  // A scale factor, and zeros after the last one of a row.
  __device__ __forceinline__ void store_scale(uint64_t row, uint32_t column, uint32_t columns,
                                              uint32_t code) const {
    const ScaleLayout layout = ScaleLayout(e.layout);
    uint8_t* scales = static_cast<uint8_t*>(e.scale_out);
    scales[scale_offset(row, column, columns, layout)] = uint8_t(code);
    if (column + 1 != columns || layout == ScaleLayout::kLinear) return;
    for (uint32_t rest = columns; rest % 4 != 0; ++rest)
      scales[scale_offset(row, rest, columns, layout)] = 0;
  }

  __device__ __forceinline__ void scale_and_store(uint64_t row, uint32_t at, uint32_t code,
                                                  float (&values)[kCount]) const {
    const float inverse = ue8m0_inverse(code);
    COMM_UNROLL
    for (uint32_t j = 0; j < kCount; ++j) values[j] = mul_rn(values[j], inverse);
    store_e4m3(row, at, values);
  }

  __device__ __forceinline__ void store_e4m3(uint64_t row, uint32_t at,
                                             const float (&values)[kCount]) const {
    uint32_t* out = static_cast<uint32_t*>(e.quant_out) + (row * e.row_vectors + at) * kCount / 4;
    COMM_UNROLL
    for (uint32_t j = 0; j < kCount / 4; ++j) {
      out[j] = encode_e4m3_pair(values[4 * j], values[4 * j + 1]) |
               encode_e4m3_pair(values[4 * j + 2], values[4 * j + 3]) << 16;
    }
  }
};

#endif  // __CUDACC__

}  // namespace comm
