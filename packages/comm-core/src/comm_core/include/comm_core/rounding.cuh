// IEEE fp32 operations, each rounded to nearest even by itself, and the bits of a float. On a
// device that is what the _rn intrinsics say; a host compiler needs -ffp-contract=off.
#pragma once

#include <stdint.h>
#include <string.h>

#include <comm_core/signal.cuh>

namespace comm {

COMM_HD float float_of(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float value;
  memcpy(&value, &bits, 4);
  return value;
#endif
}

COMM_HD uint32_t bits_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(value);
#else
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
#endif
}

#if defined(__CUDA_ARCH__)
COMM_HD float add_rn(float a, float b) { return __fadd_rn(a, b); }
COMM_HD float sub_rn(float a, float b) { return __fsub_rn(a, b); }
COMM_HD float mul_rn(float a, float b) { return __fmul_rn(a, b); }
COMM_HD float div_rn(float a, float b) { return __fdiv_rn(a, b); }
#else
COMM_HD float add_rn(float a, float b) { return a + b; }
COMM_HD float sub_rn(float a, float b) { return a - b; }
COMM_HD float mul_rn(float a, float b) { return a * b; }
COMM_HD float div_rn(float a, float b) { return a / b; }
#endif

}  // namespace comm
