// The kernels of the NVLink exchange as host functions: see comm_core/testing/host_cuda.h.
//
// A launch runs on one thread, so what a GPU does block beside block is done here step by step: all
// blocks send, then all receive. Tables, flags, signals and the checks before the copy engines'
// copies are the real ones.
#pragma once

#include <comm_core/testing/host_windows.h>
#include <comm_nvlink/ulysses.cuh>

namespace comm {
namespace nvlink {

inline void copy_list(const Record* record, uint32_t list, char* target,
                      const char* const* sources) {
  for (uint32_t i = record->first[list]; i < record->first[list + 1]; ++i) {
    const PlanEntry& entry = entries_of(record)[i];
    copy_with_checks(entry, target, sources[entry.source]);
  }
}

inline void settle(const ExchangeParams& p, const Call& call) {
  if (leave(call, 1) && aborted(call) && p.session.poison) memset(p.output, 0xff, p.target_bytes);
}

inline void exchange_kernel(const ExchangeParams& p, uint32_t blocks) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  const Table* table = p.table;
  const uint32_t peers = session.world_size - 1, slices = p.senders / peers;
  const bool staged = p.output != p.landing;
  Flags* own = p.flags[session.rank];
  // What the launcher passes besides the table, and what it says itself.
  if (p.target_bytes != table->target_bytes || p.chunks != table->chunks ||
      p.record_bytes != table->record_bytes || p.senders != table->senders ||
      blocks != table->senders + table->copiers || p.senders != slices * peers || slices == 0)
    host_problem_ = "a launch that does not agree with its table";
  auto record_of = [&](uint32_t block) {
    return reinterpret_cast<const Record*>(reinterpret_cast<const char*>(table) + kRecordsAt +
                                           uint64_t(block) * p.record_bytes);
  };
  std::vector<bool> running(p.senders, !aborted(call));
  if (p.announces && !aborted(call)) {
    announce_to_all(call, p.window, p.window_offset);
    keep_up(call);
  }
  for (uint32_t block = 0; block < p.senders; ++block) {
    const uint32_t peer = (session.rank + 1 + block % peers) % session.world_size;
    char* target = running[block] ? open_peer(session, call, peer, p.target_bytes) : nullptr;
    running[block] = target != nullptr;
    if (running[block]) {
      copy_list(record_of(block), kHead, target, p.sources);
      store_release(&p.flags[peer]->slice[session.rank][block / peers].value, call.epoch);
    }
    if (p.chunks != 0 && !((p.by_engines >> peer) & 1)) {
      if (running[block]) copy_list(record_of(block), kRest, target, p.sources);
      if (last_part(&own->sent[peer].value, slices) && running[block] && !aborted(call)) {
        for (uint32_t chunk = 0; chunk < p.chunks; ++chunk)
          store_release(&p.flags[peer]->chunk[session.rank].value[chunk], call.epoch);
      }
    }
  }
  for (uint32_t block = p.senders; block < blocks && !aborted(call); ++block)
    copy_list(record_of(block), kOwn, p.output, p.sources);
  const char* landing[1] = {p.landing};
  for (uint32_t block = 0; block < p.senders; ++block) {
    const uint32_t peer = (session.rank + 1 + block % peers) % session.world_size;
    for (uint32_t part = 0; running[block] && part <= p.chunks; ++part) {
      const uint32_t* flag =
          part == 0 ? &own->slice[peer][block / peers].value : &own->chunk[peer].value[part - 1];
      running[block] = await_flag(call, flag, peer);
      if (running[block] && staged)
        copy_list(record_of(block), kReceived + part, p.output, landing);
    }
  }
  settle(p, call);
}

inline void open_kernel(const ExchangeParams& p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  bool good = !aborted(call);
  if (good) {
    announce_to_all(call, p.window, p.window_offset);
    keep_up(call);
    for (uint32_t peer = 0; peer < session.world_size; ++peer)
      if (peer != session.rank) good = open_engine_peer(p, call, peer) && good;
  }
  for (uint32_t chunk = 0; chunk < kMaxChunks; ++chunk)
    store_relaxed(&p.flags[session.rank]->token.value[chunk], good ? call.epoch : ~call.epoch);
}

inline void close_kernel(const ExchangeParams& p) {
  const Session& session = p.session;
  const Call call = start(session, p.operation);
  Flags* own = p.flags[session.rank];
  for (uint32_t peer = 0; peer < session.world_size && !aborted(call); ++peer) {
    for (uint32_t chunk = 0; peer != session.rank && chunk < p.chunks; ++chunk)
      if (!await_flag(call, &own->chunk[peer].value[chunk], peer)) break;
  }
  settle(p, call);
}

}  // namespace nvlink
}  // namespace comm
