// The kernels of windows as host functions: ranks are threads, device memory is host memory, a
// launch runs at once.
//
// A test puts this before csrc/windows.cu and compiles both with a host compiler
// (comm_core/testing/host_modules.py). So the entry points, the structs, the signals, the plan's
// arithmetic and the copies of the copy engines are the real ones; what is written anew is how a
// kernel divides its work among threads.
#pragma once

#include <comm_core/testing/host_cuda.h>
#include <comm_core/exchange.cuh>

namespace comm {

// As copy_with: the same choice of a vector, and every access checked. Rows in reverse, since their
// order means nothing.
inline void copy_with_checks(const PlanEntry& entry, char* target, const char* source) {
  uint64_t bits = uint64_t(entry.alignment) | reinterpret_cast<uint64_t>(target) |
                  reinterpret_cast<uint64_t>(source);
  uint32_t vector = uint32_t(bits & (~bits + 1));
  if (vector > 16) vector = 16;
  if (entry.row_bytes % vector != 0) host_problem_ = "a row is no whole number of vectors";
  for (uint32_t row = entry.rows; row-- > 0;) {
    uint64_t from, to;
    locate_row(entry, row, &from, &to);
    if (reinterpret_cast<uint64_t>(source + from) % vector ||
        reinterpret_cast<uint64_t>(target + to) % vector) {
      host_problem_ = "a vector is not aligned";
    }
    memcpy(target + to, source + from, entry.row_bytes);
  }
}

inline void copy_to(const PlanTable* plan, uint32_t peer, char* target,
                    const char* const* sources) {
  const PlanEntry* entries = plan_entries(plan);
  for (uint32_t i = plan->first[peer]; i < plan->first[peer + 1]; ++i) {
    copy_with_checks(entries[i], target, sources[entries[i].source]);
  }
}

inline void finish(const Session& session, const Call& call, char* destination, uint64_t bytes) {
  bool broken = aborted(call);
  if (leave(call, 1) && broken && session.poison && bytes) memset(destination, 0xff, bytes);
}

inline void exchange_push_kernel(const ExchangeParams& p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  if (!aborted(call)) announce_to_all(call, p.window, p.window_offset);
  for (uint32_t step = 1; step <= session.world_size && !aborted(call); ++step) {
    uint32_t peer = (session.rank + step) % session.world_size;
    bool remote = peer != session.rank;
    char* target = remote ? open_peer(session, call, peer, p.plan->target_bytes) : p.destination;
    if (target == nullptr) break;
    copy_to(p.plan, peer, target, p.sources);
    if (remote) mark_done(call, peer);
  }
  wait_all_done(call);
  finish(session, call, p.destination, p.plan->target_bytes);
}

inline void exchange_open_kernel(const ExchangeParams& p) {
  const Call call = start(p.session, p.operation);
  if (aborted(call)) return;
  announce_to_all(call, p.window, p.window_offset);
  for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
    if (peer != p.session.rank) open_peer(p.session, call, peer, p.plan->target_bytes);
  }
}

inline void exchange_close_kernel(const ExchangeParams& p) {
  const Call call = start(p.session, p.operation);
  if (!aborted(call)) {
    for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
      if (peer != p.session.rank) mark_done(call, peer);
    }
    wait_all_done(call);
  }
  finish(p.session, call, p.destination, p.plan->target_bytes);
}

inline void barrier_kernel(const Session& session, uint32_t operation) {
  const Call call = start(session, operation);
  barrier(call);
  finish(session, call, nullptr, 0);
}

inline void settle_kernel(const Session& session, char* destination, uint64_t bytes) {
  if (session.poison && load_relaxed(&session.signals[session.rank]->abort.value) != 0) {
    memset(destination, 0xff, bytes);
  }
}

}  // namespace comm

// What tests call directly.

COMM_EXPORT void host_execute(const comm::PlanTable* table, uint32_t peer, char* target,
                              const char* const* sources) {
  comm::copy_to(table, peer, target, sources);
}

COMM_EXPORT void host_locate_row(const comm::PlanTable* table, uint32_t entry, uint32_t row,
                                 uint64_t* found) {
  comm::locate_row(comm::plan_entries(table)[entry], row, &found[0], &found[1]);
}
