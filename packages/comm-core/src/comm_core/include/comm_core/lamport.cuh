// Data as its own flag: the fastest way to move small floating-point operands between ranks.
//
// A receive buffer is filled with a bit pattern that no operand contains. The sender stores its
// operand straight into the receiver's buffer and does nothing else; the receiver reads until the
// pattern is gone. One trip across the link, no flag, no order between any two stores.
//
// What it is for: operands whose bits need not arrive unchanged. The pattern is a negative zero, so
// -0.0 arrives as +0.0 (`lamport_encode_*`); a sum, a maximum or a norm does not care. It is not
// for bytes: integers, packed 8- and 4-bit formats and anything that must be bit-identical can
// contain every pattern, and a word that happens to be the pattern would be waited for until the
// deadline. Those go through an exchange (barrier.cuh).
//
// Invariants:
//
// 1. The unit is the 32-bit word: that much is stored and loaded in one piece. A 16-byte vector may
//    arrive in parts, so a reader waits for each of its words (`lamport_complete`).
// 2. Every rank encodes its own operand as well, though it does not travel. Otherwise ranks would
//    add different zeros and disagree about a sign.
// 3. A word that a call fills has one reader, which empties it ("re-arms") as soon as it has read
//    it. So a call leaves nothing behind, whatever its size, and nobody has to know what the call
//    before it has filled.
// 4. Two halves of the buffer take turns. A peer that fills in call n + 2 what this rank has
//    emptied in call n gets there only after it has read what this rank stored in call n + 1, and
//    that was stored after call n had ended. With one half the peer would fill in call n + 1 what
//    this rank is about to empty in call n.
// 5. So a call may not store before the previous call of this rank has ended: the end of a kernel
//    is what completes its stores into its own memory. A kernel that is launched early
//    (programmatic dependent launch) waits for the previous one first.
// 6. Which half is next is device-resident (a replayed graph goes on with it): the parity of a
//    count of calls.
// 7. All ranks make the same calls, in the same order, of the same sizes.
//
// Who waits, how long, and what for is the caller's: see allreduce.cuh.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm {

constexpr uint32_t kLamportHalves = 2;

// The pattern: -0.0 as a float; as a pair of 16-bit floats, -0.0 in the upper half and +0.0 in the
// lower.
constexpr uint32_t kLamportEmpty = 0x80000000u;

struct alignas(16) Vector {
  uint32_t word[4];
};

static_assert(sizeof(Vector) == 16, "what one load moves");

// Memory operations on vectors: each word by itself is a relaxed access at system scope.

COMM_HD Vector load_vector(const Vector* address) {
  Vector value;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(address)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) value.word[i] = __atomic_load_n(&address->word[i], __ATOMIC_RELAXED);
#endif
  return value;
}

COMM_HD void store_vector(Vector* address, const Vector& value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3])
               : "memory");
#else
  for (int i = 0; i < 4; ++i) __atomic_store_n(&address->word[i], value.word[i], __ATOMIC_RELAXED);
#endif
}

// Replace -0.0 by +0.0 in four floats.
COMM_HD Vector lamport_encode_f32(Vector value) {
  for (int i = 0; i < 4; ++i) {
    if (value.word[i] == kLamportEmpty) value.word[i] = 0;
  }
  return value;
}

// Replace -0.0 by +0.0 in eight 16-bit floats (fp16 or bf16). In all of them, not only where a word
// would be the pattern: what happens to an element must not depend on its neighbour.
COMM_HD Vector lamport_encode_16(Vector value) {
  for (int i = 0; i < 4; ++i) {
    uint32_t word = value.word[i];
    if ((word & 0xffffu) == 0x8000u) word &= 0xffff0000u;
    if ((word >> 16) == 0x8000u) word &= 0x0000ffffu;
    value.word[i] = word;
  }
  return value;
}

// Whether all of a vector is there.
COMM_HD bool lamport_complete(const Vector& value) {
  return value.word[0] != kLamportEmpty && value.word[1] != kLamportEmpty &&
         value.word[2] != kLamportEmpty && value.word[3] != kLamportEmpty;
}

// Send an encoded vector: store it into the receiver's buffer.
COMM_HD void lamport_publish(Vector* slot, const Vector& encoded) { store_vector(slot, encoded); }

// Empty a vector of this rank's own buffer.
COMM_HD void lamport_rearm(Vector* slot) {
  store_vector(slot, {{kLamportEmpty, kLamportEmpty, kLamportEmpty, kLamportEmpty}});
}

}  // namespace comm
