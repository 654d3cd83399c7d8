// All-reduce over windows: the sum of all ranks' operands in rank order, and what follows it, in
// one kernel. Data is its own flag (lamport.cuh), stores are unicast.
//
// One shot: every rank stores its operand into a slot of every other rank's buffer, and adds up
// what comes into its own. At two ranks that moves the fewest bytes that can be moved, at every
// size. Two shots, for large operands of more ranks: every rank owns an equal part of the operand;
// the others store their contributions to it into slots at the owner, which stores the sum into
// every rank's buffer.
//
// Invariants:
//
// 1. What is where in a buffer follows from the operand's size, the number of ranks and the
//    algorithm, which all ranks have from the same function. How many threads and blocks do it does
//    not matter to the others.
// 2. Every word of a buffer that a call fills has one reader, which empties it as soon as it has
//    read it. So a call leaves its half of the buffer empty, and calls of different sizes and
//    algorithms can follow each other in any order.
// 3. The two halves take turns. A peer fills the half of this call again in the next call but one;
//    it gets there only after it has a sum of the next call, to which this rank contributes after
//    this call has ended, its emptying stores included. With a single half the peer could fill in
//    the next call what this rank has still to empty.
// 4. So a call stores nothing before the previous call of this rank has ended: a kernel that is
//    launched early waits for the previous one first.
// 5. Which half is next is the parity of the epoch, device-resident, so that a replayed graph goes
//    on with it. The last block to count advances it; each block counts after it has read it.
// 6. Sums begin with +0.0, in fp32, and are rounded once; so no sum is ever -0.0, and the second
//    shot can travel as the first one does. A rank adds its own operand as the others receive it.
// 7. No thread waits before its block has stored all that it owes to others in the first shot. All
//    blocks of a launch are on the device at once, but for those of whole rows: those wait only for
//    the same rows, and start in their order. So every wait is for a rank that has not come, or for
//    a wait of the second shot behind it.
//
// What did not arrive counts as NaN, in every place that depends on it.
#pragma once

#include <stdint.h>

#include <comm_core/allreduce_steps.cuh>
#include <comm_core/epilogue.cuh>
#include <comm_core/team.cuh>

namespace comm {

// Threads of a block without an epilogue and of one with, at most, and how many blocks fit a
// multiprocessor. Twins: comm_core/allreduce/launch.py.
constexpr uint32_t kReduceThreads = 384;
constexpr uint32_t kFusedThreads = 384;
constexpr uint32_t kReduceBlocks = 2;
// Threads of a block that has a whole row, a vector for each, at most. Twin:
// comm_core/allreduce/launch.py.
constexpr uint32_t kRowThreads = 1024;
// Rows of a team that are sent before its threads wait for one.
constexpr uint32_t kRowsAhead = 1;

#if defined(__CUDACC__)

// Nothing of an earlier kernel's may be read, and nothing stored, above this line.
__device__ __forceinline__ void follow() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// After the first stores: count the block, and start the clock. All threads.
//
// The condition is never true, but every thread must have the epoch to know: so none can still be
// reading it when the block counts.
__device__ __forceinline__ void begin(Member& m) {
  if (__syncthreads_or(m.call.epoch > m.p.no_epoch)) return;
  if (threadIdx.x == 0) count_block(m, gridDim.x);
  if (m.p.lead) let_next_start();
  m.call.deadline_ns = now_ns() + m.p.session.timeout_ns;
}

// Before the first stores of two shots: that this rank has come, for `culprit`. A warp, all lanes
// or none: each has read for itself whether somebody has given up, and what they saw may differ.
__device__ __forceinline__ void announce_start(const Member& m) {
  if (blockIdx.x != 0 || threadIdx.x >= 32) return;
  if (!__any_sync(0xffffffffu, !m.good())) announce_to_all(m.call, 0, 0);
}

// The sum alone. Vectors are dealt to the threads of all blocks in turn.
template <class T, bool kTwoShots>
__global__ __launch_bounds__(kReduceThreads, kReduceBlocks) void reduce_kernel(
    const __grid_constant__ ReduceParams p) {
  follow();
  const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
  uint64_t index = uint64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  // The epoch is under way while the operand is loaded.
  Member m = enter(p);
  if (kTwoShots) {
    announce_start(m);
    if (m.good()) scatter_operand<T, true>(m, index, threads);
  } else if (index < p.vectors) {
    const Vector own = load_operand<T, true>(p, index);
    if (m.good()) send_to_all(m, index, own);
  }
  begin(m);
  if (kTwoShots) reduce_own_part<T, true, 4>(m, index, threads);
  COMM_NO_UNROLL
  for (; warp_has_any(index, p.vectors); index += threads) {
    const bool exists = index < p.vectors;
    Vector sum;
    if (kTwoShots) {
      sum = take_sum(m, index, exists);
    } else {
      if (index + threads < p.vectors) {
        // What is sent ahead keeps the link busy while this thread waits.
        const Vector own = load_operand<T, true>(p, index + threads);
        look(m);
        if (m.good()) send_to_all(m, index + threads, own);
      }
      sum = sum_all<T, true, 4>(m, index, exists);
    }
    if (exists) store_output(p, index, sum);
  }
  leave_call(m);
}

// The number of this block within its cluster, and of the cluster.
__device__ __forceinline__ void place_in_cluster(uint32_t blocks, uint32_t* block,
                                                 uint32_t* cluster) {
  *block = 0;
  *cluster = blockIdx.x;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (blocks == 1) return;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(*block));
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(*cluster));
#endif
}

// The sum and what follows it. Rows are dealt to teams of `p.team` blocks, one at a time.
template <class T, bool kTwoShots, bool kQuantized>
__global__ __launch_bounds__(kFusedThreads, kReduceBlocks) void fused_kernel(
    const __grid_constant__ ReduceParams p) {
  COMM_DYNAMIC_SHARED(Vector, stash);
  __shared__ TeamMemory memory;
  const Epilogue& e = p.epilogue;
  uint32_t block, first;
  place_in_cluster(p.team, &block, &first);
  Team team = {&memory, p.team, block, block * blockDim.x + threadIdx.x, p.team * blockDim.x};
  team.prepare();
  follow();
  // The epoch is under way while the operand is loaded.
  Member m = enter(p);
  RowEpilogue<T, kQuantized> epilogue(e, team, stash, p.steps, p.parts, p.share);
  const uint32_t span = team.threads;
  // Two vectors at a time: those that most rows have for each thread.
  Vector own[2];
  auto load = [&](uint64_t row, uint32_t at) {
    const uint32_t count = places_below<2>(at, span, e.row_vectors);
    load_operands<T, false, 2>(p, row * e.row_vectors + at, span, count, own);
  };
  auto send = [&](uint64_t row, uint32_t at) {
    if (!m.good()) return;
    const uint32_t count = places_below<2>(at, span, e.row_vectors);
    send_to_all<2>(m, row * e.row_vectors + at, span, count, own);
  };
  auto load_and_send = [&](uint64_t row, uint32_t at) {
    COMM_NO_UNROLL
    for (; row < e.rows && at < e.row_vectors; at += 2 * span) {
      load(row, at);
      look(m);
      send(row, at);
    }
  };
  if (!kTwoShots && first < e.rows) load(first, team.thread);
  epilogue.fetch_gamma();
  if (kTwoShots) {
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    announce_start(m);
    if (m.good())
      scatter_operand<T, false>(m, uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads);
  } else if (first < e.rows) {
    send(first, team.thread);
    load_and_send(first, team.thread + 2 * span);
  }
  begin(m);
  if (kTwoShots) {
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    reduce_own_part<T, false, 2>(m, uint64_t(blockIdx.x) * blockDim.x + threadIdx.x, threads);
  }
  epilogue.load_scale();
  team.meet();
  COMM_NO_UNROLL
  for (uint64_t row = first; row < e.rows; row += p.teams) {
    epilogue.fetch_residual(row);
    if (!kTwoShots) load_and_send(row + p.teams, team.thread);
    COMM_NO_UNROLL
    for (uint32_t step = 0; step < p.steps; ++step) {
      const uint32_t at = epilogue.place(step);
      const uint64_t index = row * e.row_vectors + at;
      const bool exists = at < e.row_vectors;
      Vector sum;
      if (kTwoShots) {
        sum = take_sum(m, index, exists);
      } else if (kQuantized) {
        // As many at once as there are registers for, which an encoding needs as well.
        sum = sum_slots<T, false, 2>(m, index, index, exists);
      } else {
        sum = sum_all<T, false, 2>(m, index, exists);
      }
      if (step == 0) epilogue.await_fetched();
      epilogue.add_residual(row, step, sum);
    }
    epilogue.finish(row);
  }
  epilogue.pad_scales(first, p.teams);
  leave_call(m);
}

// fused_kernel in one shot and without an encoding, for rows of which every thread has one vector:
// from the operand to the norm it stays in registers. What can be done before the peers' data is
// there, or while the team's parts are on their way, is done then; what is left in between is
// short. `kWhole`: a block has a whole row, so there are no clusters to be started and met.
template <class T, bool kWhole>
__global__ __launch_bounds__(
    kWhole ? kRowThreads : kFusedThreads,
    kWhole ? 1 : kReduceBlocks) void vector_kernel(const __grid_constant__ ReduceParams p) {
  __shared__ TeamMemory memory;
  const Epilogue& e = p.epilogue;
  const uint32_t blocks = kWhole ? 1 : p.team;
  uint32_t block, first;
  place_in_cluster(blocks, &block, &first);
  Team team = {&memory, blocks, block, block * blockDim.x + threadIdx.x, blocks * blockDim.x};
  team.prepare();
  follow();
  Member m = enter(p);
  const bool some = team.thread < e.row_vectors;
  const uint64_t stride = uint64_t(p.teams) * e.row_vectors;
  uint64_t index = uint64_t(first) * e.row_vectors + team.thread;
  // Whether there is a vector for this thread: rows end where the operand does.
  auto exists = [&](uint64_t place) { return some && place < p.vectors; };
  auto load = [&](uint64_t place) {
    return exists(place) ? load_words<false>(p, place) : Vector{};
  };
  auto load_residual = [&](uint64_t place) {
    return exists(place) ? load_plain(e.residual_in, place) : Vector{};
  };
  auto send = [&](uint64_t place, Vector& value) {
    value = Elements<T>::encode(value);
    if (m.good() && exists(place)) send_to_all(m, place, value);
  };
  // Operands of this row, of those that are sent already, and of the one that is sent next. What is
  // loaded is not touched before it is needed: that would wait for it.
  Vector own[kRowsAhead + 1];
  own[0] = load(index);
  send(index, own[0]);
  begin(m);
  COMM_UNROLL
  for (uint32_t i = 1; i < kRowsAhead; ++i) {
    own[i] = load(index + i * stride);
    send(index + i * stride, own[i]);
  }
  own[kRowsAhead] = load(index + kRowsAhead * stride);
  Vector residual = load_residual(index);
  const Vector gamma = some ? load_plain(e.gamma, team.thread) : Vector{};
  const uint32_t* abort = &own_block(m.call)->abort.value;
  uint32_t told = load_relaxed(abort);
  // Every warp gives a part, also where it has none of the row: so none can fall behind.
  const uint32_t parts = p.parts;
  const Team::Places places = team.places();
  team.meet();
  COMM_NO_UNROLL
  for (uint64_t row = first; row < e.rows; row += p.teams, index += stride) {
    team.expect(parts);
    if (told != 0 && m.good()) m.wait = Wait::kAborted;
    send(index + kRowsAhead * stride, own[kRowsAhead]);
    Vector sum;
    Vector* emptied = nullptr;
    if (m.ranks() == 2) {
      Vector other = {};
      emptied = take_other(m, index, some, &other);
      sum = sum_of_two<T>(m, own[0], other);
    } else {
      sum = sum_slots<T, false, 2>(m, index, index, some);
    }
    const Vector total = add_vectors<T>(sum, residual);
    const float squares = some ? sum_of_squares<T>(total) : 0.0f;
    team.put(team.thread / 32, Team::combine_lanes(bits_of(squares), Team::AddBits()), places);
    // While the parts are on their way.
    if (emptied != nullptr) lamport_rearm(emptied);
    if (e.residual_out != nullptr && some) store_plain(e.residual_out, index, total);
    COMM_UNROLL
    for (uint32_t i = 0; i < kRowsAhead; ++i) own[i] = own[i + 1];
    own[kRowsAhead] = load(index + (kRowsAhead + 1) * stride);
    residual = load_residual(index + stride);
    // Whether the next row may be stored for others.
    if (row + p.teams < e.rows) told = load_relaxed(abort);
    const float mean = mul_rn(team.take_sum(parts), p.share);
    const float inverse = inverse_root(add_rn(mean, e.eps));
    if (e.norm_out != nullptr && some)
      store_plain(e.norm_out, index, normalized<T>(total, gamma, e.weight_bias, inverse));
  }
  leave_call(m);
}

#endif  // __CUDACC__

}  // namespace comm
