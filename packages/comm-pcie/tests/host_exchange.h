// The kernels of the exchange as host functions: what they do to memory and signals, in one thread.
#include <string.h>
#include <comm_pcie/exchange.cuh>

namespace comm_pcie {

inline void exchange_open_kernel(const ExchangeParams& p) {
  const comm::Call call = comm::start(p.session, p.operation);
  if (comm::aborted(call)) return;
  comm::announce_to_all(call, p.window, 0);
  for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
    if (peer != p.session.rank) wait_for_output(p, call, peer);
  }
}

inline void exchange_close_kernel(const ExchangeParams& p) {
  const comm::Call call = comm::start(p.session, p.operation);
  for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
    if (peer != p.session.rank) comm::mark_done(call, peer);
  }
  comm::wait_all_done(call);
  if (comm::aborted(call)) drain(p.session, call);
  bool broken = false;
  if (comm::leave(call, 1, &broken) && broken && p.session.poison)
    memset(p.destination, 0xff, p.target_bytes);
}

inline void exchange_local_kernel(const comm::PlanTable* plan, uint32_t rank, char* destination,
                                  const char* source, const uint32_t*) {
  const comm::PlanEntry* entries = comm::plan_entries(plan);
  for (uint32_t i = plan->first[rank]; i < plan->first[rank + 1]; ++i) {
    for (uint32_t row = 0; row < entries[i].rows; ++row) {
      uint64_t from, to;
      comm::locate_row(entries[i], row, &from, &to);
      memcpy(destination + to, source + from, entries[i].row_bytes);
    }
  }
}

}  // namespace comm_pcie
