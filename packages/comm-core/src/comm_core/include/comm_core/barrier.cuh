// The protocols over a signal block: the barrier of a group, and the two handshakes of an exchange.
// They move no data.
//
// The same functions are called by kernels and, with ranks as threads, by the tests under
// ThreadSanitizer. A function of "one thread" is just that. A function of "a group" is called by
// all 32 lanes of one converged warp on the device, where lane p deals with rank p, and by one
// thread on the host, which deals with them in turn; the outcome is the same in every lane.
//
// An operation of a rank consists of one or more blocks. A block may use several threads; then the
// threads' writes go before a __syncthreads() and the signal after it, and what was waited for is
// passed on by another one. Releases and acquires are cumulative, so that is enough.
#pragma once

#include <stdint.h>

#include <comm_core/signal.cuh>

namespace comm {

// One operation of one rank.
//
// The deadline is one moment for all waits of the operation, not a new one for each. Then the right
// rank is named: a peer that this rank waits for may itself be kept waiting, but only in an earlier
// operation, which began before this one, so that the peer gives up first and names the rank that
// really did not come.
struct Call {
  SignalBlock* const* peers;  // all ranks' signal blocks as this rank maps them, its own among them
  StallRecord* record;
  uint64_t deadline_ns;
  uint32_t rank;
  uint32_t world_size;
  uint32_t operation;  // for the record
  uint32_t epoch;      // the number of this operation, `next_epoch`
};

// How a wait ended, and whom it was about: the rank that did not come. No one (this rank itself)
// where all came.
struct Outcome {
  Wait wait;
  uint32_t peer;
};

COMM_HD SignalBlock* own_block(const Call& call) { return call.peers[call.rank]; }

// The number of the operation that starts now. Device-resident, so that a replayed graph counts on.
// Every block reads it before it leaves, and only the last to leave advances it.
COMM_HD uint32_t next_epoch(const SignalBlock* own) { return load_relaxed(&own->epoch.value) + 1; }

// Whether somebody has given up. Looked at before the first store into a peer's memory and once a
// chunk after it.
//
// The peer may give up between the look and the store. So what a rank stores may still land in the
// memory of one that has left: that memory must stay mapped, and its contents mean nothing.
COMM_HD bool aborted(const Call& call) { return load_relaxed(&own_block(call)->abort.value) != 0; }

// Leave the operation, one thread of each of its `blocks` blocks. The last one leaves a record
// where the rank was told of an abort, advances the epoch, and gets true; and in `broken` whether
// any block may have stopped half-way.
//
// The abort word is read after all blocks have counted, so that none stops unseen; and before the
// epoch is advanced.
COMM_HD bool leave(const Call& call, uint32_t blocks, bool* broken) {
  SignalBlock* own = own_block(call);
  if (!last_part(&own->exits.value, blocks)) return false;
  *broken = aborted(call);
  if (*broken) note_abort(own, call.operation, call.epoch, call.record);
  // Read by this rank's next kernel, which starts after this one has ended.
  store_relaxed(&own->epoch.value, call.epoch);
  return true;
}

COMM_HD bool leave(const Call& call, uint32_t blocks) {
  bool broken;
  return leave(call, blocks, &broken);
}

// A wait for `waited_for` was in vain: do what is owed to the peers and to the host. One thread.
COMM_HD Outcome stop(const Call& call, Wait wait, uint32_t waited_for) {
  SignalBlock* own = own_block(call);
  if (wait == Wait::kReached) return {wait, call.rank};
  if (wait == Wait::kTimedOut) {
    give_up(call.peers, call.rank, call.world_size, waited_for, call.operation, call.epoch,
            call.record);
    return {wait, waited_for};
  }
  note_abort(own, call.operation, call.epoch, call.record);
  return {wait, abort_waited_for(load_relaxed(&own->abort.value))};
}

// -------------------------------------------------------------------------------------------------
// The exchange: the receiver announces, the sender stores, the receiver waits until all is there.
//
// Invariants:
//
// 1. In every epoch every rank announces to every other rank, and marks every other rank's data as
//    done, also where there is not one byte to send. So `ready` and `done` are never more than one
//    epoch behind, and a rank that has announced nothing has not started the operation.
// 2. An announcement is the permission to write: it is released after everything on this rank that
//    still used the memory, and a sender writes only after it has acquired it.
// 3. The receiver may announce again (and so overwrite the place of the previous announcement)
//    after it has seen `done` of that sender: the sender has read the place before. This is why
//    `done` is released after the last part.
// 4. `done` is released after the last store of all blocks for that peer. Once it has been acquired
//    the data is there.
// 5. A rank waits for nothing before it has announced to all, and what it sends to one peer waits
//    for no other peer (the blocks are divided among the peers). Then the ranks that are in the
//    operation serve each other, and only one that is not, or that stopped, is waited for. Where
//    blocks serve several peers in turn, `culprit` still finds a rank that has not started; but one
//    that stopped when it had announced to some and not to others can get a peer of its named.

// Tell `sender` where this rank wants its data. One thread.
COMM_HD void announce(const Call& call, uint32_t sender, uint32_t window, uint64_t offset) {
  store_announcement(&call.peers[sender]->ready[call.rank], call.epoch, window, offset);
}

// The same to every peer. A group.
COMM_HD void announce_to_all(const Call& call, uint32_t window, uint64_t offset) {
#if defined(__CUDA_ARCH__)
  uint32_t lane = threadIdx.x % 32;
  __syncwarp();
  if (lane < call.world_size && lane != call.rank) announce(call, lane, window, offset);
#else
  for (uint32_t peer = 0; peer < call.world_size; ++peer) {
    if (peer != call.rank) announce(call, peer, window, offset);
  }
#endif
}

// Whom to name when `waited_for` did not come in time: rather a rank that has not even started this
// operation, because that may be what `waited_for` is waiting for. It may be this rank itself, one
// of whose blocks waits for another one's work.
COMM_HD uint32_t culprit(const Call& call, uint32_t waited_for) {
  const SignalBlock* own = own_block(call);
  if (waited_for != call.rank && !reached(load_acquire(&own->ready[waited_for].epoch), call.epoch))
    return waited_for;
  for (uint32_t peer = 0; peer < call.world_size; ++peer) {
    if (peer != call.rank && !reached(load_acquire(&own->ready[peer].epoch), call.epoch))
      return peer;
  }
  return waited_for;
}

// Wait until `receiver` has said where it wants the data of this rank. One thread. When it returns
// kReached, nobody had given up a moment ago, and `window` and `offset` are set.
COMM_HD Outcome wait_ready(const Call& call, uint32_t receiver, uint32_t* window,
                           uint64_t* offset) {
  SignalBlock* own = own_block(call);
  Wait wait = wait_announcement(&own->ready[receiver], call.epoch, &own->abort.value,
                                call.deadline_ns, window, offset);
  if (wait == Wait::kTimedOut) return stop(call, wait, receiver);
  // A rank that comes late finds all announcements of those that have left, so the flag alone
  // permits nothing.
  if (wait == Wait::kAborted || aborted(call)) return stop(call, Wait::kAborted, receiver);
  return {Wait::kReached, call.rank};
}

// Tell `receiver` that everything from this rank is there. One thread, after `last_part` has said
// that it is.
//
// Not after an abort: some block may have stopped half-way.
COMM_HD void mark_done(const Call& call, uint32_t receiver) {
  store_release(&call.peers[receiver]->done[call.rank].value, call.epoch);
}

// Wait until the line of every peer has reached `target`. A group. The outcome names the first of
// the ranks that did not come; nothing has been told to anybody yet.
COMM_HD Outcome wait_lines(const Call& call, const SignalLine* lines, uint32_t target) {
  const uint32_t* abort = &own_block(call)->abort.value;
#if defined(__CUDA_ARCH__)
  uint32_t lane = threadIdx.x % 32;
  Wait wait = Wait::kReached;
  if (lane < call.world_size && lane != call.rank) {
    wait = wait_flag(&lines[lane].value, target, abort, call.deadline_ns);
  }
  uint32_t told = __ballot_sync(0xffffffffu, wait == Wait::kAborted);
  uint32_t late = __ballot_sync(0xffffffffu, wait == Wait::kTimedOut);
  // Orders what each lane has acquired before what the others do next.
  __syncwarp();
  // Told comes first: whoever gave up before this rank waited longer, and knows better.
  if (told != 0) return {Wait::kAborted, call.rank};
  if (late != 0) return {Wait::kTimedOut, uint32_t(__ffs(int(late)) - 1)};
#else
  for (uint32_t peer = 0; peer < call.world_size; ++peer) {
    if (peer == call.rank) continue;
    Wait wait = wait_flag(&lines[peer].value, target, abort, call.deadline_ns);
    if (wait != Wait::kReached) return {wait, peer};
  }
#endif
  return {Wait::kReached, call.rank};
}

// `stop` for a group: one lane does it, all get the outcome.
COMM_HD Outcome stop_group(const Call& call, Outcome outcome) {
#if defined(__CUDA_ARCH__)
  if (threadIdx.x % 32 == 0) outcome = stop(call, outcome.wait, outcome.peer);
  outcome.peer = __shfl_sync(0xffffffffu, outcome.peer, 0);
  return outcome;
#else
  return stop(call, outcome.wait, outcome.peer);
#endif
}

// Wait until everything that the peers send to this rank in this epoch is there. A group.
COMM_HD Outcome wait_all_done(const Call& call) {
  Outcome outcome = wait_lines(call, own_block(call)->done, call.epoch);
  if (outcome.wait == Wait::kReached) return outcome;
  if (outcome.wait == Wait::kTimedOut) outcome.peer = culprit(call, outcome.peer);
  return stop_group(call, outcome);
}

// -------------------------------------------------------------------------------------------------
// The barrier of the whole group.
//
// Invariants:
//
// 1. Barriers have a counter of their own: this rank's own `arrived` line, which says how many
//    barriers it has entered. The exchanges' epoch would not do, because a barrier may be the first
//    after 2^31 exchanges.
// 2. A rank arrives everywhere before it waits for anybody.
// 3. Everything that a rank did before it arrived is visible to every rank that has left the
//    barrier.
// 4. Arriving is not leaving. That this rank has reached the barrier says that nobody will store
//    *data* into its memory any more. It does not say that the others have reached it: one of them
//    may be giving up at this very moment, and is then about to write the abort word here. So
//    memory with a signal block is unmapped or freed only after every rank has told all the others,
//    by way of the host, that its barrier was reached.
// 5. A rank that has been told of an abort does not arrive.
COMM_HD Outcome barrier(const Call& call) {
  SignalBlock* own = own_block(call);
  bool broken = aborted(call);
  uint32_t number = load_relaxed(&own->arrived[call.rank].value) + 1;
#if defined(__CUDA_ARCH__)
  // Also keeps the lane of this rank from counting on before the others have read the counter.
  broken = __any_sync(0xffffffffu, broken);
  __syncwarp();
  if (broken) return stop_group(call, {Wait::kAborted, call.rank});
  uint32_t lane = threadIdx.x % 32;
  if (lane < call.world_size) store_release(&call.peers[lane]->arrived[call.rank].value, number);
#else
  if (broken) return stop_group(call, {Wait::kAborted, call.rank});
  for (uint32_t peer = 0; peer < call.world_size; ++peer) {
    store_release(&call.peers[peer]->arrived[call.rank].value, number);
  }
#endif
  Outcome outcome = wait_lines(call, own->arrived, number);
  return outcome.wait == Wait::kReached ? outcome : stop_group(call, outcome);
}

}  // namespace comm
