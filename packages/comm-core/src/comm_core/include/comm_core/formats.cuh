// Number formats: the element types that are reduced, and the encodings of normalized values.
//
// Arithmetic is IEEE fp32, every operation rounded to nearest even by itself, subnormals kept:
// nothing is contracted to a fused multiply-add, no division is approximate. On a device that is
// what the _rn intrinsics say; a host compiler needs -ffp-contract=off. The bits of the encodings
// are defined by comm_core/allreduce/quant.py.
//
// The header compiles as device code and with a plain host compiler, where tests compare it with
// that definition.
#pragma once

#include <stdint.h>
#include <string.h>

#include <comm_core/lamport.cuh>
#include <comm_core/rounding.cuh>
#include <comm_core/signal.cuh>

// Loops over arrays that live in registers have to be unrolled; a loop that waits must not be.
#if defined(__CUDA_ARCH__)
#define COMM_UNROLL _Pragma("unroll")
#define COMM_NO_UNROLL _Pragma("unroll 1")
#else
#define COMM_UNROLL
#define COMM_NO_UNROLL
#endif

namespace comm {

// The one operation that is not rounded: within 2^-22 of the value, and one instruction.
COMM_HD float inverse_root(float a) {
#if defined(__CUDA_ARCH__)
  float root;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(a));
  return root;
#else
  return float(1.0 / __builtin_sqrt(double(a)));
#endif
}

COMM_HD uint32_t min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }
COMM_HD uint32_t max_u32(uint32_t a, uint32_t b) { return a < b ? b : a; }

// Element types. A word of two 16-bit values has the one of the lower address in its low half.

struct Bfloat16 {
  static constexpr uint32_t kBytes = 2;

  COMM_HD static float low(uint32_t pair) { return float_of(pair << 16); }
  COMM_HD static float high(uint32_t pair) { return float_of(pair & 0xffff0000u); }

  COMM_HD static uint32_t pack(float low, float high) {
#if defined(__CUDA_ARCH__)
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return narrow(low) | narrow(high) << 16;
#endif
  }

#if defined(__CUDA_ARCH__)
  // Negative zeros become positive ones, any NaN a quiet one; nothing else changes.
  COMM_HD static uint32_t without_negative_zeros(uint32_t pair) {
    uint32_t result;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;"
        : "=r"(result)
        : "r"(pair), "r"(0x3f803f80u), "r"(0));  // times 1, plus 0
    return result;
  }
#else
  static uint32_t narrow(float value) {
    uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }
#endif
};

struct Float16 {
  static constexpr uint32_t kBytes = 2;

#if defined(__CUDA_ARCH__)
  COMM_HD static float low(uint32_t pair) {
    float value;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, low;\n\t}"
        : "=f"(value)
        : "r"(pair));
    return value;
  }
  COMM_HD static float high(uint32_t pair) {
    float value;
    asm("{\n\t.reg .b16 low, high;\n\tmov.b32 {low, high}, %1;\n\tcvt.f32.f16 %0, high;\n\t}"
        : "=f"(value)
        : "r"(pair));
    return value;
  }
  COMM_HD static uint32_t pack(float low, float high) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
  }
  COMM_HD static uint32_t without_negative_zeros(uint32_t pair) {
    uint32_t result;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(pair), "r"(0));
    return result;
  }
#else
  static float low(uint32_t pair) { return widen(pair & 0xffffu); }
  static float high(uint32_t pair) { return widen(pair >> 16); }
  static uint32_t pack(float low, float high) { return narrow(low) | narrow(high) << 16; }

  static float widen(uint32_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16;
    uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // A subnormal is a whole number of 2^-24; a normal one only changes its bias.
    if (magnitude < 0x400u) {
      return float_of(sign | bits_of(float(magnitude) * 5.9604644775390625e-8f));
    }
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
  }

  static uint32_t narrow(float value) {
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    // From 65520 on, which is half-way between the largest value and 2^16.
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {
      // Below 2^-14: whole numbers of 2^-24, rounded by the addition.
      return sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u);
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13);
  }
#endif
};

struct Float32 {
  static constexpr uint32_t kBytes = 4;
};

// The elements of a vector of 16 bytes as floats, and back.
template <class T>
struct Elements {
  static constexpr uint32_t kCount = 16 / T::kBytes;

  COMM_HD static void unpack(const Vector& vector, float (&values)[kCount]) {
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      values[2 * i] = T::low(vector.word[i]);
      values[2 * i + 1] = T::high(vector.word[i]);
    }
  }

  COMM_HD static Vector pack(const float (&values)[kCount]) {
    Vector vector;
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i) vector.word[i] = T::pack(values[2 * i], values[2 * i + 1]);
    return vector;
  }

  // As lamport.cuh has it.
  COMM_HD static Vector encode(const Vector& vector) {
#if defined(__CUDA_ARCH__)
    Vector encoded;
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i) encoded.word[i] = T::without_negative_zeros(vector.word[i]);
    return encoded;
#else
    return lamport_encode_16(vector);
#endif
  }
};

template <>
struct Elements<Float32> {
  static constexpr uint32_t kCount = 4;

  COMM_HD static void unpack(const Vector& vector, float (&values)[kCount]) {
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i) values[i] = float_of(vector.word[i]);
  }

  COMM_HD static Vector pack(const float (&values)[kCount]) {
    Vector vector;
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i) vector.word[i] = bits_of(values[i]);
    return vector;
  }

  COMM_HD static Vector encode(const Vector& vector) {
#if defined(__CUDA_ARCH__)
    Vector encoded;
    COMM_UNROLL
    for (uint32_t i = 0; i < 4; ++i)
      encoded.word[i] = bits_of(add_rn(float_of(vector.word[i]), 0.0f));
    return encoded;
#else
    return lamport_encode_f32(vector);
#endif
  }
};

// The elements of two vectors added up, each rounded once more where it has 16 bits.
template <class T>
COMM_HD Vector add_vectors(const Vector& a, const Vector& b) {
  using Format = Elements<T>;
  float values[Format::kCount], others[Format::kCount];
  Format::unpack(a, values);
  Format::unpack(b, others);
  COMM_UNROLL
  for (uint32_t j = 0; j < Format::kCount; ++j) values[j] = add_rn(values[j], others[j]);
  return Format::pack(values);
}

// Magnitudes, as bits of non-negative floats: those compare as whole numbers, and every NaN is
// larger than the infinity.

COMM_HD uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffffu; }

constexpr uint32_t kInfinityBits = 0x7f800000u;

// The magnitude, or 0 for a NaN.
COMM_HD uint32_t magnitude_without_nan(float value) {
  uint32_t bits = magnitude(value);
  return bits > kInfinityBits ? 0 : bits;
}

// E4M3: to nearest even; beyond 448, and infinite, becomes 448; NaN becomes 0x7f.

COMM_HD uint32_t encode_e4m3_in_software(float value) {
  const uint32_t bits = bits_of(value), absolute = bits & 0x7fffffffu;
  if (absolute > kInfinityBits) return 0x7fu;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (absolute >= 0x43e00000u) return sign | 0x7eu;  // 448
  // Below 2^-6 the step is 2^-9: adding 2^14, whose last place that is, rounds to it.
  if (absolute < 0x3c800000u) return sign | (bits_of(add_rn(float_of(absolute), 16384.0f)) & 0xfu);
  const uint32_t rounded = absolute + 0x7ffffu + ((absolute >> 20) & 1u);
  return sign | min_u32((rounded >> 20) - ((127 - 7) << 3), 0x7eu);
}

COMM_HD float decode_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 24, absolute = code & 0x7fu;
  if (absolute == 0x7fu) return float_of(sign | 0x7fc00000u);
  if (absolute < 8) return float_of(sign | bits_of(mul_rn(float(absolute), 0.001953125f)));
  return float_of(sign | ((absolute << 20) + ((127 - 7) << 23)));
}

// Two codes, that of `low` in the low byte.
COMM_HD uint32_t encode_e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return encode_e4m3_in_software(low) | encode_e4m3_in_software(high) << 8;
#endif
}

COMM_HD uint32_t encode_e4m3(float value) { return encode_e4m3_pair(value, 0.0f) & 0xffu; }

// E2M1: to nearest even; beyond 6, and infinite, becomes 6; NaN becomes 7, which is +6.
COMM_HD uint32_t encode_e2m1(float value) {
  const uint32_t bits = bits_of(value), absolute = bits & 0x7fffffffu;
  const float x = float_of(absolute);
  // Midpoints of neighbours; a tie goes to the even code.
  uint32_t code = uint32_t(x > 0.25f) + uint32_t(x >= 0.75f) + uint32_t(x > 1.25f) +
                  uint32_t(x >= 1.75f) + uint32_t(x > 2.5f) + uint32_t(x >= 3.5f) +
                  uint32_t(x > 5.0f);
  code |= (bits >> 28) & 8u;
  return absolute > kInfinityBits ? 7u : code;
}

// Eight codes, the first one lowest.
COMM_HD uint32_t encode_e2m1_eight(const float (&values)[8]) {
  uint32_t codes = 0;
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM120_ALL)
  COMM_UNROLL
  for (uint32_t i = 0; i < 4; ++i) {
    uint32_t pair;
    asm("{\n\t.reg .b8 codes;\n\tcvt.rn.satfinite.e2m1x2.f32 codes, %1, %2;\n\t"
        "cvt.u32.u8 %0, codes;\n\t}"
        : "=r"(pair)
        : "f"(values[2 * i + 1]), "f"(values[2 * i]));
    codes |= pair << (8 * i);
  }
#else
  COMM_UNROLL
  for (uint32_t i = 0; i < 8; ++i) codes |= encode_e2m1(values[i]) << (4 * i);
#endif
  return codes;
}

// UE8M0: a power of two, rounded up; 0 is code 0, beyond 2^127 code 254; NaN 255. Of a magnitude.
COMM_HD uint32_t encode_ue8m0(uint32_t absolute) {
  if (absolute > kInfinityBits) return 255;
  const uint32_t exponent = absolute >> 23, mantissa = absolute & 0x7fffffu;
  // Exponent 0 is fp32's subnormals: 2^-127, the value of code 0, has the mantissa 0x400000.
  if (exponent == 0) return mantissa > 0x400000u ? 1 : 0;
  return min_u32(exponent + (mantissa != 0), 254);
}

// 2^(127 - code): multiplying by it divides by the scale, exactly but for what is subnormal then,
// which is rounded once, as by a division. For codes up to 254.
COMM_HD float ue8m0_inverse(uint32_t code) {
  return code == 254 ? float_of(0x00400000u) : float_of((254 - code) << 23);
}

// Scales are floored at these. Twins: comm_core/allreduce/quant.py.
constexpr uint32_t kDynamicFp8MinScaleBits = 0x36924925u;  // 2^-9 / 448
constexpr uint32_t kGroupFp8MinScaleBits = 0x2edbe6ffu;    // 1e-10
constexpr uint32_t kSixthBits = 0x3e2aaaabu;               // 1 / 6

// The scale of a token for its largest magnitude.
COMM_HD float dynamic_fp8_scale(uint32_t largest) {
  const float scale = div_rn(float_of(largest), 448.0f), least = float_of(kDynamicFp8MinScaleBits);
  return scale < least ? least : scale;
}

// The UE8M0 code of a group for its largest magnitude.
COMM_HD uint32_t group_fp8_code(uint32_t largest) {
  return encode_ue8m0(max_u32(bits_of(div_rn(float_of(largest), 448.0f)), kGroupFp8MinScaleBits));
}

// The E4M3 code of 16 values' scale factor, and what the values are multiplied by. The largest
// magnitude is NaN's where one of the values is.
COMM_HD uint32_t nvfp4_factor(uint32_t largest, float global_scale, float* multiplier) {
  const uint32_t code =
      encode_e4m3(mul_rn(global_scale, mul_rn(float_of(largest), float_of(kSixthBits))));
  const float factor = decode_e4m3(code);
  *multiplier = factor == 0.0f ? 0.0f : div_rn(global_scale, factor);
  return code;
}

}  // namespace comm
