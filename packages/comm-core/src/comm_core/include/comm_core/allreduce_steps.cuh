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
  uint32_t steps;  // vectors of a row for each thread, at most
  uint32_t parts;  // groups of 32 vectors of a row, those beyond its end included
  float share;     // of an element in the mean of a row
  Epilogue epilogue;
};

constexpr uint32_t kLanes = 32;
// The part of a timeout that waits for sums have on top of it.
constexpr uint64_t kSumsShare = 4;

// One thread's view of a call.
struct Member {
  const ReduceParams& p;
  Call call;
  Vector* half;      // of this rank's own buffer
  uint64_t half_at;  // where it begins, in everybody's
  Wait wait = Wait::kReached;
  uint32_t missing = 0;  // for whom this thread has waited in vain

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

// One vector.
COMM_HD void send_to_all(const Member& m, uint64_t index, const Vector& value) {
  const Vector values[1] = {value};
  send_to_all<1>(m, index, 0, 1, values);
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

// Load this rank's vectors of such places, the first `count` of them.
template <class T, bool kTail, uint32_t kVectors>
COMM_HD void load_operands(const ReduceParams& p, uint64_t index, uint64_t step, uint32_t count,
                           Vector (&values)[kVectors]) {
  COMM_UNROLL
  for (uint32_t i = 0; i < kVectors; ++i) {
    if (i < count) values[i] = load_operand<T, kTail>(p, index + i * step);
  }
}

// All lanes of a warp: go on together. They leave a wait one by one, as what each waits for comes,
// and nothing brings them together again by itself; what follows would be run once for each of
// those groups, so that a warp's stores into peer memory travel in as many pieces.
COMM_HD void join_lanes() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#elif defined(COMM_SYNC_WARP)
  COMM_SYNC_WARP();  // of a host compiler that runs the threads of a block
#endif
}

// Who has waited in vain tells everybody, and who was told of it leaves a record for the host: at
// the end of a call in every thread, and after a wait. The first report counts.
COMM_HD void leave_call(const Member& m) {
  if (m.good()) return;
  const bool late = m.wait == Wait::kTimedOut;
  // In two shots, what is missing may be waiting for a third rank.
  stop(m.call, m.wait, late && m.p.two_shots ? culprit(m.call, m.missing) : m.missing);
}

// Wait until `complete()` says that everything is there, or give up; `absent()` is whom it lacks.
// The deadline is one moment for all waits of a call, counted from its first one. All lanes of a
// warp call it, those that have nothing to wait for as well.
//
// Who has waited in vain says so before it joins the others of its warp: they may wait longer, for
// a sum that is late for the same reason, and would name the wrong rank.
//
// A wait for a sum has longer: what it waits for is kept waiting by a rank that has not come, and
// the wait for that rank's operand is to say so first.
template <class Complete, class Absent>
COMM_HD void await(Member& m, bool for_sums, Complete complete, Absent absent) {
  if (m.good()) {
    const uint64_t more_ns = for_sums ? m.p.session.timeout_ns / kSumsShare : 0;
    m.wait = wait_until(complete, &own_block(m.call)->abort.value, m.call.deadline_ns + more_ns);
    if (!m.good()) {
      m.missing = absent();
      leave_call(m);
    }
  }
  join_lanes();
}

// Wait for the vector at `from`, where `exists`. All lanes of a warp.
template <class Absent>
COMM_HD void await_vector(Member& m, bool for_sums, const Vector* from, bool exists, Vector* got,
                          Absent absent) {
  await(
      m, for_sums,
      [&] {
        if (!exists) return true;
        *got = load_vector(from);
        return lamport_complete(*got);
      },
      absent);
}

// Add up one vector of all ranks, where it `exists`: `slot_index` is its place in every slot,
// `index` that in this rank's operand. `kSources` at a time. All lanes of a warp.
template <class T, bool kTail, uint32_t kSources>
COMM_HD Vector sum_slots(Member& m, uint64_t slot_index, uint64_t index, bool exists) {
  using Format = Elements<T>;
  float total[Format::kCount] = {};
  COMM_NO_UNROLL
  for (uint32_t base = 0; base < m.ranks(); base += kSources) {
    Vector got[kSources];
    Vector* from[kSources];
    COMM_UNROLL
    for (uint32_t k = 0; k < kSources; ++k) {
      const uint32_t sender = base + k;
      const bool other = exists && sender < m.ranks() && sender != m.rank();
      from[k] = other ? m.half + m.slot(sender, m.rank()) + slot_index : nullptr;
      // Loaded again: it would take registers until here.
      if (sender == m.rank() && exists) got[k] = load_operand<T, kTail>(m.p, index);
    }
    uint32_t absent = 0;
    auto complete = [&] {
      COMM_UNROLL
      for (uint32_t k = 0; k < kSources; ++k) {
        if (from[k] != nullptr) got[k] = load_vector(from[k]);
      }
      bool all = true;
      COMM_UNROLL
      for (uint32_t k = 0; k < kSources; ++k) {
        if (from[k] != nullptr && !lamport_complete(got[k])) {
          all = false;
          absent = k;
        }
      }
      return all;
    };
    await(m, false, complete, [&] { return base + absent; });
    // The other lanes of the warp may go on, and wait for this one at every step.
    if (!m.good()) continue;
    COMM_UNROLL
    for (uint32_t k = 0; k < kSources; ++k) {
      if (base + k >= m.ranks()) continue;
      float values[Format::kCount];
      Format::unpack(got[k], values);
      COMM_UNROLL
      for (uint32_t j = 0; j < Format::kCount; ++j) total[j] = add_rn(total[j], values[j]);
      if (from[k] != nullptr) lamport_rearm(from[k]);
    }
  }
  return m.good() ? Format::pack(total) : missing_vector(m.p);
}

// What the other one of two ranks has sent. Returns where it lay, for the caller to empty; null
// where nothing has come. All lanes of a warp.
COMM_HD Vector* take_other(Member& m, uint64_t index, bool exists, Vector* got) {
  const uint32_t peer = 1 - m.rank();
  Vector* from = m.half + m.slot(peer, m.rank()) + index;
  await_vector(m, false, from, exists, got, [&] { return peer; });
  return m.good() && exists ? from : nullptr;
}

// Its sum with this rank's own, which is as the others receive it. Either order gives the same
// bits: neither operand is ever -0.0, and all NaNs become the same one.
template <class T>
COMM_HD Vector sum_of_two(const Member& m, const Vector& own, const Vector& other) {
  return m.good() ? add_vectors<T>(own, other) : missing_vector(m.p);
}

// The sum of one shot, where `index` is that of a slot too. All lanes of a warp.
template <class T, bool kTail, uint32_t kSources>
COMM_HD Vector sum_all(Member& m, uint64_t index, bool exists) {
  if (m.ranks() != 2) return sum_slots<T, kTail, kSources>(m, index, index, exists);
  // Nothing to go through and no order to keep, so there is less to do between the peer's last word
  // and the sum. The operand is under way while the peer is waited for, so it is encoded after.
  const Vector own = exists ? load_words<kTail>(m.p, index) : Vector{};
  Vector got = {};
  Vector* from = take_other(m, index, exists, &got);
  if (from != nullptr) lamport_rearm(from);
  return sum_of_two<T>(m, Elements<T>::encode(own), got);
}

// The sum of the second shot. All lanes of a warp.
COMM_HD Vector take_sum(Member& m, uint64_t index, bool exists) {
  Vector* from = m.half + m.sums() + index;
  Vector sum = {};
  await_vector(m, true, from, exists, &sum, [&] { return m.owner(index); });
  if (!m.good()) return missing_vector(m.p);
  if (exists) lamport_rearm(from);
  return sum;
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

// Whether this round of a loop in which threads take places in turn, neighbours neighbouring ones,
// has a place for a lane of this thread's warp: its lanes wait together, so they stay in the loop
// together.
COMM_HD bool warp_has_any(uint64_t place, uint64_t end) { return place / kLanes * kLanes < end; }

// The sums of the part that this rank owns, for everybody. All threads of a launch.
template <class T, bool kTail, uint32_t kSources>
COMM_HD void reduce_own_part(Member& m, uint64_t thread, uint64_t threads) {
  const uint64_t part = m.p.slot_vectors, first = m.rank() * part;
  const uint64_t end = first + part < m.p.vectors ? first + part : m.p.vectors;
  const uint64_t count = end > first ? end - first : 0;
  COMM_NO_UNROLL
  for (uint64_t place = thread; warp_has_any(place, count); place += threads) {
    const bool exists = place < count;
    const uint64_t index = first + place;
    // Under way while the operands are waited for.
    const bool told = aborted(m.call);
    const Vector sum = sum_slots<T, kTail, kSources>(m, place, index, exists);
    if (told) m.wait = Wait::kAborted;
    if (!m.good() || !exists) continue;
    uint32_t peer = m.rank();
    COMM_NO_UNROLL
    for (uint32_t number = 0; number < m.ranks(); ++number) {
      if (++peer == m.ranks()) peer = 0;
      lamport_publish(m.at(peer) + m.sums() + index, sum);
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

}  // namespace comm
