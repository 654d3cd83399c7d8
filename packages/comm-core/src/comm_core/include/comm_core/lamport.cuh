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
// 3. Three generations of the buffer take turns. Call n fills generation n and empties again
//    ("re-arms") what call n - 1 filled on this rank, which all ranks fill next in call n + 2. A
//    peer gets there only after it has read what this rank stored in call n + 1, and that was
//    stored after call n had ended. With two generations the peer would fill in call n + 1 what
//    this rank empties in call n, perhaps earlier.
// 4. So a call may not store before the previous call of this rank has ended: the end of a kernel
//    is what completes its stores into its own memory. A kernel that is launched early
//    (programmatic dependent launch) waits for the previous one first.
// 5. What is re-armed is what the previous call filled, not what this one fills: calls differ in
//    size.
// 6. Which generation is next is device-resident (a replayed graph goes on with it) and counts 0,
//    1, 2, 0: a call number modulo three would stumble where the number wraps.
// 7. All ranks make the same calls, in the same order, of the same sizes.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm {

constexpr uint32_t kLamportGenerations = 3;

// The pattern: -0.0 as a float; as a pair of 16-bit floats, -0.0 in the upper half and +0.0 in the
// lower.
constexpr uint32_t kLamportEmpty = 0x80000000u;

struct alignas(16) Vector {
  uint32_t word[4];
};

static_assert(sizeof(Vector) == 16, "what one load moves");

// What a rank knows of its own receive buffer, in its device memory, zero at the start. The buffer
// itself is empty at the start: every word of all generations is `kLamportEmpty`.
struct alignas(kLineBytes) LamportState {
  uint32_t generation;  // that the next call fills
  uint32_t previous;    // vectors that the last call filled, in each rank's slot
  uint32_t exits;       // blocks of the running call that are through
  uint32_t unused[29];
};

static_assert(sizeof(LamportState) == kLineBytes, "one line, one writer");

// The generation that the last call filled, and this one re-arms.
COMM_HD uint32_t lamport_previous(uint32_t generation) {
  return generation == 0 ? kLamportGenerations - 1 : generation - 1;
}

COMM_HD uint32_t lamport_next(uint32_t generation) {
  return generation == kLamportGenerations - 1 ? 0 : generation + 1;
}

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

// Wait for one vector of each of `kRanks` ranks: that of rank r comes to `first[r * stride]`. This
// rank's own does not travel; it stays in values[rank] as the caller put it. One thread.
//
// All loads of a round are under way together, so the time is that of the last to arrive and not
// the sum. On a failure `missing` is the first rank of which something is missing, and values are
// undefined.
template <uint32_t kRanks>
COMM_HD Wait lamport_collect(const Vector* first, uint64_t stride, uint32_t rank,
                             Vector (&values)[kRanks], const uint32_t* abort, uint64_t deadline_ns,
                             uint32_t* missing) {
  while (true) {
    uint64_t now = 0;
#if defined(__CUDA_ARCH__)
#pragma unroll 1  // see wait_flag
#endif
    for (uint32_t spin = 0; spin <= kSpinsPerCheck; ++spin) {
      // The last look of a round comes after the clock, see wait_flag.
      if (spin == kSpinsPerCheck) {
        if (load_relaxed(abort) != 0) return Wait::kAborted;
        now = now_ns();
      }
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (uint32_t peer = 0; peer < kRanks; ++peer) {
        if (peer != rank) values[peer] = load_vector(first + peer * stride);
      }
      uint32_t absent = kRanks;
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
      for (uint32_t i = 0; i < kRanks; ++i) {
        uint32_t peer = kRanks - 1 - i;
        if (peer != rank && !lamport_complete(values[peer])) absent = peer;
      }
      if (absent == kRanks) return Wait::kReached;
      *missing = absent;
      COMM_SPIN();
    }
    if (now >= deadline_ns) return Wait::kTimedOut;
  }
}

// Leave a call that filled `filled` vectors of each slot, one thread of each of its `blocks`
// blocks, after the block's last re-arm: the last one turns to the next generation. Every block has
// read the state before it leaves.
COMM_HD bool lamport_leave(LamportState* state, uint32_t blocks, uint32_t filled) {
  if (!last_part(&state->exits, blocks)) return false;
  state->previous = filled;
  state->generation = lamport_next(state->generation);
  return true;
}

}  // namespace comm
