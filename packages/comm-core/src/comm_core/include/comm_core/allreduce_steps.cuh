// What a thread of the all-reduce does in a call: load its operand, store it for others, wait for
// theirs, add up, leave. The kernels, and the invariants that all of it keeps, are in
// allreduce.cuh.
//
// The header compiles as device code and with a plain host compiler, where ranks are threads.
#pragma once

#include <stdint.h>

#include <comm_core/epilogue.cuh>
#include <comm_core/exchange.cuh>
#include <comm_core/formats.cuh>
#include <comm_core/lamport.cuh>

namespace comm {

struct ReduceParams {
  Session session;
  Vector* buffers[kMaxRanks];  // every rank's, as this rank maps it: two halves
  const void* input;
  void* output;           // without an epilogue
  uint64_t vectors;       // of the operand, the last one perhaps not whole
  uint64_t half_vectors;  // of the buffer
  uint64_t slot_vectors;  // of a slot: the operand in one shot, the part of an owner in two
  uint64_t no_epoch;      // larger than any, see `begin`
  uint32_t tail_bytes;    // of the last vector
  uint32_t two_shots;
  uint32_t operation;
  uint32_t lead;  // whether the next kernel may start before this one has ended
  uint32_t team;  // blocks that share a row
  uint32_t teams;
  uint32_t steps;     // vectors of a row for each thread, at most
  uint32_t parts;     // groups of 32 vectors of a row, those beyond its end included
  float share;        // of an element in the mean of a row
  uint32_t patience;  // nanoseconds between two looks at what has not come
  Epilogue epilogue;
};

// The part of a timeout that waits for sums have on top of it.
constexpr uint64_t kSumsShare = 4;

// One thread's view of a call.
struct Member {
  const ReduceParams& p;
  Call call;
  Vector* half;      // of this rank's own buffer
  uint64_t half_at;  // where it begins, in everybody's
  Wait wait = Wait::kReached;
  bool noted = false;  // that the next field says for whom this thread has waited in vain
  uint32_t missing = 0;

  COMM_HD bool good() const { return wait == Wait::kReached; }
  COMM_HD uint32_t ranks() const { return p.session.world_size; }
  COMM_HD uint32_t rank() const { return p.session.rank; }

  // Slot of `sender` in the buffer of `receiver`. A rank has none in its own.
  COMM_HD uint64_t slot(uint32_t sender, uint32_t receiver) const {
    return (sender < receiver ? sender : sender - 1) * p.slot_vectors;
  }
  // Where sums are put in every rank's buffer in the second shot.
  COMM_HD uint64_t sums() const { return (ranks() - 1) * p.slot_vectors; }
  COMM_HD Vector* at(uint32_t peer) const { return p.buffers[peer] + half_at; }

  // Who owns a vector in two shots.
  COMM_HD uint32_t owner(uint64_t index) const {
    uint32_t rank = 0;
    for (; index >= p.slot_vectors; index -= p.slot_vectors) ++rank;
    return rank;
  }
  // Somebody did not come; the first time counts.
  COMM_HD void note(uint32_t rank) {
    if (!noted) missing = rank;
    noted = true;
  }
};

COMM_HD Member enter(const ReduceParams& p) {
  const Session& session = p.session;
  const SignalBlock* own = session.signals[session.rank];
  // The clock is read when it is needed, after the stores.
  Call call = {session.signals, session.record, 0, session.rank, session.world_size,
               p.operation,     next_epoch(own)};
  const uint64_t half_at = (call.epoch & 1) * p.half_vectors;
  Member member = {p, call, p.buffers[session.rank] + half_at, half_at};
  if (load_relaxed(&own->abort.value) != 0) member.wait = Wait::kAborted;
  return member;
}

COMM_HD Vector empty_vector() {
  return {{kLamportEmpty, kLamportEmpty, kLamportEmpty, kLamportEmpty}};
}

// What takes the place of what did not arrive.
COMM_HD Vector missing_vector(const ReduceParams& p) {
  const uint32_t word = p.session.poison ? 0xffffffffu : 0;
  return {{word, word, word, word}};
}

// This rank's operand; zeros beyond its end. `kTail`: that the last vector may not be whole.
template <bool kTail>
COMM_HD Vector load_words(const ReduceParams& p, uint64_t index) {
  Vector vector;
  if (kTail && p.tail_bytes != 16 && index + 1 == p.vectors) {
    const uint16_t* from = static_cast<const uint16_t*>(p.input) + index * 8;
    for (uint32_t i = 0; i < 4; ++i) vector.word[i] = 0;
    COMM_UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      if (2 * i < p.tail_bytes) vector.word[i / 2] |= uint32_t(from[i]) << (16 * (i % 2));
    }
  } else {
#if defined(__CUDA_ARCH__)
    const uint4 value = static_cast<const uint4*>(p.input)[index];
    vector = {{value.x, value.y, value.z, value.w}};
#else
    memcpy(&vector, static_cast<const Vector*>(p.input) + index, 16);
#endif
  }
  return vector;
}

// The same as the others receive it.
template <class T, bool kTail>
COMM_HD Vector load_operand(const ReduceParams& p, uint64_t index) {
  return Elements<T>::encode(load_words<kTail>(p, index));
}

COMM_HD void store_output(const ReduceParams& p, uint64_t index, const Vector& value) {
  if (p.tail_bytes != 16 && index + 1 == p.vectors) {
    uint16_t* to = static_cast<uint16_t*>(p.output) + index * 8;
    COMM_UNROLL
    for (uint32_t i = 0; i < 8; ++i) {
      if (2 * i < p.tail_bytes) to[i] = uint16_t(value.word[i / 2] >> (16 * (i % 2)));
    }
    return;
  }
#if defined(__CUDA_ARCH__)
  static_cast<uint4*>(p.output)[index] =
      make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]);
#else
  memcpy(static_cast<Vector*>(p.output) + index, &value, 16);
#endif
}

// Store `count` vectors, each `step` further than the one before, into this rank's slot in every
// other rank's buffer.
template <uint32_t kVectors>
COMM_HD void send_to_all(const Member& m, uint64_t index, uint64_t step, uint32_t count,
                         const Vector (&values)[kVectors]) {
  uint32_t peer = m.rank();
  COMM_NO_UNROLL
  for (uint32_t other = 1; other < m.ranks(); ++other) {
    if (++peer == m.ranks()) peer = 0;
    Vector* to = m.at(peer) + m.slot(m.rank(), peer) + index;
    COMM_UNROLL
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (i < count) lamport_publish(to + i * step, values[i]);
    }
  }
}

// How many of `kVectors` places, each `step` further than the one before, are below `end`.
template <uint32_t kVectors>
COMM_HD uint32_t places_below(uint64_t index, uint64_t step, uint64_t end) {
  uint32_t count = 0;
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) count += index + i * step < end;
  return count;
}

// Look whether somebody has given up, before more is stored for others.
COMM_HD void look(Member& m) {
  if (m.good() && aborted(m.call)) m.wait = Wait::kAborted;
}

// Load them.
template <class T, bool kTail, uint32_t kVectors>
COMM_HD void load_operands(const ReduceParams& p, uint64_t index, uint64_t step, uint32_t count,
                           Vector (&values)[kVectors]) {
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) {
    if (i < count) values[i] = load_operand<T, kTail>(p, index + i * step);
  }
}

// Wait until `complete()` says that everything is there, or give up. It notes in `m.missing` whom
// it lacks. The deadline is one moment for all waits of a call, counted from its first one.
//
// A wait for a sum has longer: what it waits for is kept waiting by a rank that has not come, and
// the wait for that rank's operand is to say so first.
template <class Complete>
COMM_HD void await(Member& m, bool for_sums, Complete complete) {
  if (!m.good()) return;
#if defined(__CUDA_ARCH__)
  const uint32_t patience = m.p.patience;
#endif
  const SignalBlock* own = own_block(m.call);
  m.wait = wait_until(
      [&] {
        if (complete()) return true;
#if defined(__CUDA_ARCH__)
        if (patience != 0) __nanosleep(patience);
#endif
        return false;
      },
      &own->abort.value, m.call.deadline_ns + (for_sums ? m.p.session.timeout_ns / kSumsShare : 0));
}

// Wait for the first `count` of `kVectors` vectors, each `step` further than the one before.
// Returns which of them is missing where this rank does not get all.
template <uint32_t kVectors>
COMM_HD uint32_t await_vectors(Member& m, bool for_sums, const Vector* from, uint64_t step,
                               uint32_t count, Vector (&got)[kVectors]) {
  uint32_t absent = 0;
  await(m, for_sums, [&] {
    COMM_UNROLL
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (i < count) got[i] = load_vector(from + i * step);
    }
    bool all = true;
    COMM_UNROLL
    for (uint32_t i = 0; i < kVectors; ++i) {
      if (i < count && !lamport_complete(got[i])) {
        all = false;
        absent = i;
      }
    }
    return all;
  });
  return absent;
}

// Add up `kVectors` vectors of all ranks, of which the first `count` exist: vector i is `step`
// vectors further than the one before, in every slot and in this rank's operand, where the first
// one is `index`.
template <class T, bool kTail, uint32_t kVectors, uint32_t kSources>
COMM_HD void sum_slots(Member& m, uint64_t slot_index, uint64_t index, uint64_t step,
                       uint32_t count, Vector (&sums)[kVectors]) {
  using Format = Elements<T>;
  float total[kVectors][Format::kCount] = {};
  COMM_NO_UNROLL
  for (uint32_t base = 0; base < m.ranks(); base += kSources) {
    Vector got[kSources][kVectors];
    Vector* from[kSources];
    COMM_UNROLL
    for (uint32_t k = 0; k < kSources; ++k) {
      const uint32_t sender = base + k;
      const bool other = sender < m.ranks() && sender != m.rank();
      from[k] = other ? m.half + m.slot(sender, m.rank()) + slot_index : nullptr;
      COMM_UNROLL
      for (uint32_t i = 0; i < kVectors; ++i) {
        // Loaded again: it would take registers until here.
        if (sender == m.rank() && i < count)
          got[k][i] = load_operand<T, kTail>(m.p, index + i * step);
      }
    }
    uint32_t absent = 0;
    await(m, false, [&] {
      COMM_UNROLL
      for (uint32_t k = 0; k < kSources; ++k) {
        COMM_UNROLL
        for (uint32_t i = 0; i < kVectors; ++i) {
          if (from[k] != nullptr && i < count) got[k][i] = load_vector(from[k] + i * step);
        }
      }
      bool all = true;
      COMM_UNROLL
      for (uint32_t k = 0; k < kSources; ++k) {
        COMM_UNROLL
        for (uint32_t i = 0; i < kVectors; ++i) {
          if (from[k] != nullptr && i < count && !lamport_complete(got[k][i])) {
            all = false;
            absent = k;
          }
        }
      }
      return all;
    });
    if (!m.good()) {
      m.note(base + absent);
      break;
    }
    COMM_UNROLL
    for (uint32_t k = 0; k < kSources; ++k) {
      if (base + k >= m.ranks()) continue;
      COMM_UNROLL
      for (uint32_t i = 0; i < kVectors; ++i) {
        float values[Format::kCount];
        Format::unpack(got[k][i], values);
        COMM_UNROLL
        for (uint32_t j = 0; j < Format::kCount; ++j) total[i][j] = add_rn(total[i][j], values[j]);
        if (from[k] != nullptr && i < count) lamport_rearm(from[k] + i * step);
      }
    }
  }
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i)
    sums[i] = m.good() ? Format::pack(total[i]) : missing_vector(m.p);
}

// sum_slots for two ranks: nothing to go through and no order to keep, so there is less to do
// between the peer's last word and the sum. Either order gives the same bits: neither operand is
// ever -0.0, and all NaNs become the same one.
template <class T, bool kTail, uint32_t kVectors>
COMM_HD void sum_of_two(Member& m, uint64_t index, uint64_t step, uint32_t count,
                        Vector (&sums)[kVectors]) {
  const uint32_t peer = 1 - m.rank();
  Vector* from = m.half + m.slot(peer, m.rank()) + index;
  // Under way while the peer is waited for, so not encoded before.
  Vector own[kVectors] = {}, got[kVectors] = {};
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) {
    if (i < count) own[i] = load_words<kTail>(m.p, index + i * step);
  }
  await_vectors<kVectors>(m, false, from, step, count, got);
  if (!m.good()) m.note(peer);
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) {
    sums[i] = m.good() ? add_vectors<T>(Elements<T>::encode(own[i]), got[i]) : missing_vector(m.p);
    if (m.good() && i < count) lamport_rearm(from + i * step);
  }
}

// One vector of it, where `some`: `own` is this rank's operand as the others receive it. Returns
// what the caller empties; null where nothing has come.
template <class T>
COMM_HD Vector* take_other(Member& m, uint64_t index, bool some, const Vector& own, Vector* sum) {
  const uint32_t peer = 1 - m.rank();
  Vector* from = m.half + m.slot(peer, m.rank()) + index;
  Vector got[1] = {};
  if (some) await_vectors<1>(m, false, from, 0, 1, got);
  if (!m.good()) {
    m.note(peer);
    *sum = missing_vector(m.p);
    return nullptr;
  }
  *sum = add_vectors<T>(own, got[0]);
  return some ? from : nullptr;
}

// The sums of one shot, where `index` is that of a slot too.
template <class T, bool kTail, uint32_t kVectors, uint32_t kSources>
COMM_HD void sum_all(Member& m, uint64_t index, uint64_t step, uint32_t count,
                     Vector (&sums)[kVectors]) {
  if (m.ranks() == 2) {
    sum_of_two<T, kTail, kVectors>(m, index, step, count, sums);
  } else {
    sum_slots<T, kTail, kVectors, kSources>(m, index, index, step, count, sums);
  }
}

// The sums of the second shot.
template <uint32_t kVectors>
COMM_HD void take_sums(Member& m, uint64_t index, uint64_t step, uint32_t count,
                       Vector (&sums)[kVectors]) {
  Vector* from = m.half + m.sums() + index;
  const uint32_t absent = await_vectors<kVectors>(m, true, from, step, count, sums);
  if (!m.good()) m.note(m.owner(index + absent * step));
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) {
    if (!m.good()) {
      sums[i] = missing_vector(m.p);
    } else if (i < count) {
      lamport_rearm(from + i * step);
    }
  }
}

// The first shot of two: contributions to the parts that others own. Thread `thread` of `threads`.
template <class T, bool kTail>
COMM_HD void scatter_operand(const Member& m, uint64_t thread, uint64_t threads) {
  const uint64_t part = m.p.slot_vectors;
  // Every rank begins with another peer.
  uint32_t peer = m.rank();
  COMM_NO_UNROLL
  for (uint32_t other = 1; other < m.ranks(); ++other) {
    if (++peer == m.ranks()) peer = 0;
    const uint64_t first = peer * part;
    const uint64_t end = first + part < m.p.vectors ? first + part : m.p.vectors;
    Vector* to = m.at(peer) + m.slot(m.rank(), peer);
    COMM_NO_UNROLL
    for (uint64_t index = first + thread; index < end; index += 2 * threads) {
      const uint32_t count = places_below<2>(index, threads, end);
      Vector values[2];
      load_operands<T, kTail, 2>(m.p, index, threads, count, values);
      COMM_UNROLL
      for (uint32_t i = 0; i < 2; ++i) {
        if (i < count) lamport_publish(to + (index - first) + i * threads, values[i]);
      }
    }
  }
}

// The sums of the part that this rank owns, for everybody.
template <class T, bool kTail, uint32_t kSources>
COMM_HD void reduce_own_part(Member& m, uint64_t thread, uint64_t threads) {
  const uint64_t part = m.p.slot_vectors, first = m.rank() * part;
  const uint64_t end = first + part < m.p.vectors ? first + part : m.p.vectors;
  COMM_NO_UNROLL
  for (uint64_t index = first + thread; index < end; index += threads) {
    Vector sum[1];
    // Under way while the operands are waited for.
    const bool told = aborted(m.call);
    sum_slots<T, kTail, 1, kSources>(m, index - first, index, 0, 1, sum);
    if (told) m.wait = Wait::kAborted;
    if (!m.good()) return;
    uint32_t peer = m.rank();
    COMM_NO_UNROLL
    for (uint32_t number = 0; number < m.ranks(); ++number) {
      if (++peer == m.ranks()) peer = 0;
      lamport_publish(m.at(peer) + m.sums() + index, sum[0]);
    }
  }
}

// One more block of `blocks` has read the epoch. One thread of it, after the others have; the last
// one advances it. Relaxed: nothing is handed on, and a release would wait for the stores to the
// peers to be acknowledged.
COMM_HD void count_block(const Member& m, uint32_t blocks) {
  SignalBlock* own = own_block(m.call);
#if defined(__CUDA_ARCH__)
  uint32_t before;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(&own->exits.value)
               : "memory");
#else
  uint32_t before = __atomic_fetch_add(&own->exits.value, 1, __ATOMIC_RELAXED);
#endif
  if (before != blocks - 1) return;
  // Read by this rank's next kernel, which does not look before this one has ended.
  store_relaxed(&own->exits.value, 0);
  store_relaxed(&own->epoch.value, m.call.epoch);
}

// The end of a call in every thread: who has waited in vain tells everybody.
COMM_HD void leave_call(const Member& m) {
  if (m.good()) return;
  const bool late = m.wait == Wait::kTimedOut;
  // In two shots, what is missing may be waiting for a third rank.
  stop(m.call, m.wait, late && m.p.two_shots ? culprit(m.call, m.missing) : m.missing);
}

}  // namespace comm
