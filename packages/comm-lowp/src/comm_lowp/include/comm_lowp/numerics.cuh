// The arithmetic of the Sage2 encoding, one element or one scalar at a time.
//
// Every operation is a single IEEE fp32 operation, rounded to nearest even, with subnormals: no
// contraction to fused multiply-add, no approximate division. On the device that is what the _rn
// intrinsics say; a host compiler needs -ffp-contract=off. Inputs are finite.
//
// The header compiles as device code and with a plain host compiler, where tests compare it with
// the reference over all bit patterns.
#pragma once

#include <stdint.h>
#include <string.h>

#include <comm_core/rounding.cuh>
#include <comm_core/signal.cuh>

namespace comm_lowp {

// The least amax of a group of Q or K: 1e-7.
constexpr uint32_t kEpsBits = 0x33d6bf95u;
// The scale of a group that no row belongs to: 1e-7 / 127.
constexpr uint32_t kIdleScaleBits = 0x30587076u;

using comm::add_rn;
using comm::bits_of;
using comm::div_rn;
using comm::float_of;
using comm::mul_rn;
using comm::sub_rn;

// Finite operands and infinities; which zero comes out of two is not said.
COMM_HD float max_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fmaxf(a, b);
#else
  return a < b ? b : a;
#endif
}

COMM_HD float min_of(float a, float b) {
#if defined(__CUDA_ARCH__)
  return fminf(a, b);
#else
  return b < a ? b : a;
#endif
}

// The two 16-bit types. A `uint32_t` of two values has the lower address in its low half.

struct Bfloat16 {
  static constexpr uint32_t kInfinity = 0x7f80u;

  COMM_HD static float widen(uint32_t bits) { return float_of(bits << 16); }
  COMM_HD static float low(uint32_t pair) { return float_of(pair << 16); }
  COMM_HD static float high(uint32_t pair) { return float_of(pair & 0xffff0000u); }

  COMM_HD static uint32_t narrow(float value) {
    uint32_t bits = bits_of(value);
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  }

#if defined(__CUDA_ARCH__)
  COMM_HD static uint32_t max_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  COMM_HD static uint32_t min_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("min.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#endif
};

struct Float16 {
  static constexpr uint32_t kInfinity = 0x7c00u;

  COMM_HD static float low(uint32_t pair) { return widen(pair & 0xffffu); }
  COMM_HD static float high(uint32_t pair) { return widen(pair >> 16); }

#if defined(__CUDA_ARCH__)
  COMM_HD static float widen(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(uint16_t(bits)));
    return value;
  }
  COMM_HD static uint32_t narrow(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
  }
  COMM_HD static uint32_t max_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("max.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
  COMM_HD static uint32_t min_pair(uint32_t a, uint32_t b) {
    uint32_t out;
    asm("min.f16x2 %0, %1, %2;" : "=r"(out) : "r"(a), "r"(b));
    return out;
  }
#else
  COMM_HD static float widen(uint32_t bits) {
    uint32_t sign = (bits & 0x8000u) << 16;
    uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) return float_of(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    // A subnormal is a whole number of 2^-24; a normal one only changes its bias.
    if (magnitude < 0x400u) {
      uint32_t value = bits_of(float(magnitude) * 5.9604644775390625e-8f);
      return float_of(sign | value);
    }
    return float_of(sign | ((magnitude << 13) + 0x38000000u));
  }
  COMM_HD static uint32_t narrow(float value) {
    uint32_t bits = bits_of(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    // From 65520 on, which is half-way between the largest value and 2^16.
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
    if (magnitude < 0x38800000u) {
      // Below 2^-14: whole numbers of 2^-24, rounded by the addition.
      float shifted = float_of(magnitude) + 0.5f;
      return sign | (bits_of(shifted) - 0x3f000000u);
    }
    uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return sign | ((rounded - 0x38000000u) >> 13);
  }
#endif
};

#if !defined(__CUDA_ARCH__)
template <class T, bool kMax>
inline uint32_t extreme_pair(uint32_t a, uint32_t b) {
  uint32_t out = 0;
  for (int half = 0; half < 2; ++half) {
    uint32_t x = (a >> (16 * half)) & 0xffffu, y = (b >> (16 * half)) & 0xffffu;
    bool second = kMax ? T::widen(x) < T::widen(y) : T::widen(y) < T::widen(x);
    out |= (second ? y : x) << (16 * half);
  }
  return out;
}
#endif

// The larger (smaller) of each half. Which zero comes out of two is not said.
template <class T>
COMM_HD uint32_t max_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return T::max_pair(a, b);
#else
  return extreme_pair<T, true>(a, b);
#endif
}

template <class T>
COMM_HD uint32_t min_pair(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return T::min_pair(a, b);
#else
  return extreme_pair<T, false>(a, b);
#endif
}

// The larger of each half's magnitude with `b`, whose halves are not negative.
template <class T>
COMM_HD uint32_t max_magnitude(uint32_t a, uint32_t b) {
  return max_pair<T>(a & 0x7fff7fffu, b);
}

// Scales. `amax` is floored at EPS.
COMM_HD float int8_scale(float amax) { return div_rn(amax, 127.0f); }
COMM_HD float int8_inverse(float amax) { return div_rn(127.0f, amax); }

// clamp(rint_half_even(y), -128, 127), in the low byte of the result; the rest of it is undefined.
//
// Clamped first, which is the same because the bounds are whole numbers; then the addition of
// 1.5 * 2^23, whose unit is 1, rounds to nearest even and leaves the number in the low bits.
COMM_HD uint32_t int8_code(float y) {
  return bits_of(add_rn(min_of(max_of(y, -128.0f), 127.0f), 12582912.0f));
}

// The mean of K of one channel, as bits of T.
template <class T>
COMM_HD uint32_t k_mean(float sum, uint32_t used_sequence) {
  return T::narrow(div_rn(sum, float(used_sequence)));
}

// What V is multiplied by. The amax is recovered from the scale: amax is a value of T, and rounding
// to T finds it again whatever the division by v_max has lost. 0 for a channel whose bytes are all
// 0: one without a value, or so small that the factor overflows.
template <class T>
COMM_HD float v_factor(float v_scale, float v_max) {
  float amax = T::widen(T::narrow(mul_rn(v_scale, v_max)));
  float factor = div_rn(v_max, amax);
  return bits_of(factor) >= 0x7f800000u ? 0.0f : factor;
}

// S1E4M3 "fn", to nearest even, saturating at 448.
COMM_HD uint32_t e4m3_code(float x) {
  uint32_t bits = bits_of(x);
  uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x43e00000u) magnitude = 0x43e00000u;
  if (magnitude < 0x3c800000u) {
    // Below 2^-6: whole numbers of 2^-9, rounded by the addition of a number whose unit that is.
    return sign | (bits_of(add_rn(float_of(magnitude), 16384.0f)) - bits_of(16384.0f));
  }
  uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u);
  return sign | ((rounded >> 20) - (120u << 3));
}

// Two codes, the first in the low byte.
COMM_HD uint32_t e4m3_pair(float first, float second) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return e4m3_code(first) | (e4m3_code(second) << 8);
#endif
}

// Bytes of two words picked by four nibbles of `selector`: 0 to 3 from `a`, 4 to 7 from `b`.
COMM_HD uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(a, b, selector);
#else
  uint64_t both = uint64_t(b) << 32 | a;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    out |= uint32_t((both >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
  }
  return out;
#endif
}

// The low bytes of four words.
COMM_HD uint32_t pack_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return pick_bytes(pick_bytes(a, b, 0x0040u), pick_bytes(c, d, 0x0040u), 0x5410u);
}

// Four words of four bytes as a 4 x 4 matrix, transposed: byte i of row j becomes byte j of row i.
COMM_HD void transpose_bytes(uint32_t (&rows)[4]) {
  uint32_t ab_low = pick_bytes(rows[0], rows[1], 0x5140u);
  uint32_t cd_low = pick_bytes(rows[2], rows[3], 0x5140u);
  uint32_t ab_high = pick_bytes(rows[0], rows[1], 0x7362u);
  uint32_t cd_high = pick_bytes(rows[2], rows[3], 0x7362u);
  rows[0] = pick_bytes(ab_low, cd_low, 0x5410u);
  rows[1] = pick_bytes(ab_low, cd_low, 0x7632u);
  rows[2] = pick_bytes(ab_high, cd_high, 0x5410u);
  rows[3] = pick_bytes(ab_high, cd_high, 0x7632u);
}

}  // namespace comm_lowp
