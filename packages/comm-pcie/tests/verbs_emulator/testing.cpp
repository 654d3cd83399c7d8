// What tests ask of the fabric and do to it. All return -1 where there is none.
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "memory.h"
#include "objects.h"

using emu::Fabric;
using emu::Lock;

namespace {

std::map<emu::LocalContext*, bool>& contexts_here() {
  static std::map<emu::LocalContext*, bool> known;
  return known;
}

}  // namespace

namespace emu {

void remember(LocalContext* context, bool alive) {
  if (alive)
    contexts_here()[context] = true;
  else
    contexts_here().erase(context);
}

}  // namespace emu

// Let this process see what has arrived: what a GPU does when it is told to flush.
EXPORT int emu_flush() {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  return emu::flush_withheld(shared);
}

// Pieces that are withheld from this process.
EXPORT int emu_withheld() {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  int count = 0;
  for (const emu::Withheld& item : shared->withheld) count += item.used && item.pid == getpid();
  return count;
}

EXPORT int emu_release() {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  for (const auto& item : contexts_here())
    if (item.first->shared == shared)
      for (const auto& qp : item.first->qps) emu::release_held(qp.second);
  return 0;
}

// All counters in order: posted by verb, then the others.
EXPORT int emu_counters(uint64_t* out, int most) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  const int count = sizeof(emu::Counters) / sizeof(uint64_t);
  if (most < count) return -1;
  memcpy(out, &shared->counters, sizeof(emu::Counters));
  return count;
}

EXPORT void emu_problem(char* out, size_t size) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return;
  Lock lock(shared);
  snprintf(out, size, "%s", shared->problem);
}

// Objects that exist: contexts, domains, regions, indirect keys, completion queues, queue pairs.
EXPORT int emu_alive(int32_t out[6]) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  memset(out, 0, 6 * sizeof(*out));
  for (const emu::Context& item : shared->contexts) out[0] += item.used != 0;
  for (const emu::Pd& item : shared->pds) out[1] += item.used != 0;
  for (const emu::Key& item : shared->keys)
    out[item.kind == emu::kRegion ? 2 : 3] += item.used != 0;
  for (uint32_t slot = 0; slot < shared->cqs_high; ++slot) out[4] += shared->cqs[slot].used != 0;
  for (uint32_t slot = 0; slot < shared->qps_high; ++slot) out[5] += shared->qps[slot].used != 0;
  return 0;
}

// The texts of rules that did not fire as often as they should, one a line; returns how many.
EXPORT int emu_unfired(char* out, size_t size) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  int count = 0;
  size_t used = 0;
  out[0] = '\0';
  for (const emu::Rule& rule : shared->rules) {
    if (!rule.used || rule.fired >= (rule.count == 0 ? 1 : rule.count)) continue;
    ++count;
    if (used < size)
      used += static_cast<size_t>(
          snprintf(out + used, size - used, "%s (fired %u times)\n", rule.text, rule.fired));
  }
  return count;
}

EXPORT int emu_clear_rules() {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  memset(shared->rules, 0, sizeof(shared->rules));
  return 0;
}

// Free what a process that ended left behind, as the kernel does; returns how many contexts it had.
EXPORT int emu_reap() {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  int count = 0;
  for (uint32_t slot = 0; slot < emu::kContexts; ++slot) {
    emu::Context& context = shared->contexts[slot];
    if (!context.used || kill(context.pid, 0) == 0 || errno != ESRCH) continue;
    ++count;
    for (uint32_t qp_idx = 0; qp_idx < shared->qps_high; ++qp_idx)
      if (shared->qps[qp_idx].context == slot) shared->qps[qp_idx].used = 0;
    for (uint32_t cq_idx = 0; cq_idx < shared->cqs_high; ++cq_idx)
      if (shared->cqs[cq_idx].context == slot) shared->cqs[cq_idx].used = 0;
    for (emu::Key& key : shared->keys)
      if (key.used && shared->pds[key.pd].context == slot) key.used = 0;
    for (emu::Pd& pd : shared->pds)
      if (pd.used && pd.context == slot) pd.used = 0;
    char path[300];
    emu::event_path(slot, path, sizeof(path));
    unlink(path);
    context.used = 0;
  }
  return count;
}

// Change a port: its state (enum ibv_port_state) and MTU (0: as it is). Tells all its contexts.
EXPORT int emu_set_port(const char* nic_name, uint32_t state, uint32_t mtu) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  for (uint32_t nic_idx = 0; nic_idx < shared->num_nics; ++nic_idx) {
    emu::Nic& nic = shared->nics[nic_idx];
    if (strcmp(nic.name, nic_name) != 0) continue;
    if (mtu != 0) nic.active_mtu = mtu;
    if (state == nic.port_state) return 0;
    nic.port_state = state;
    const uint32_t type = state == IBV_PORT_ACTIVE ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR;
    for (uint32_t slot = 0; slot < emu::kContexts; ++slot)
      if (shared->contexts[slot].used && shared->contexts[slot].nic == nic_idx)
        emu::send_event(slot, type, -1, -1);
    return 0;
  }
  return -1;
}

// Change an entry of a GID table (null: empty it) and tell the NIC's contexts.
EXPORT int emu_set_gid(const char* nic_name, uint32_t index, const uint8_t* raw, uint32_t type,
                       uint32_t ifindex) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr || index >= emu::kGids) return -1;
  Lock lock(shared);
  for (uint32_t nic_idx = 0; nic_idx < shared->num_nics; ++nic_idx) {
    emu::Nic& nic = shared->nics[nic_idx];
    if (strcmp(nic.name, nic_name) != 0) continue;
    emu::Gid& gid = nic.gids[index];
    gid.used = raw != nullptr;
    if (raw != nullptr) memcpy(gid.raw, raw, sizeof(gid.raw));
    gid.type = type;
    gid.ifindex = ifindex;
    for (uint32_t slot = 0; slot < emu::kContexts; ++slot)
      if (shared->contexts[slot].used && shared->contexts[slot].nic == nic_idx)
        emu::send_event(slot, IBV_EVENT_GID_CHANGE, -1, -1);
    return 0;
  }
  return -1;
}

// An event of one NIC's contexts, about their first queue pair where the type is about one; a fatal
// one stops that queue pair.
EXPORT int emu_event(const char* nic_name, uint32_t type, uint32_t port) {
  Fabric* shared = emu::fabric();
  if (shared == nullptr) return -1;
  Lock lock(shared);
  int count = 0;
  for (uint32_t slot = 0; slot < emu::kContexts; ++slot) {
    const emu::Context& context = shared->contexts[slot];
    if (!context.used || strcmp(shared->nics[context.nic].name, nic_name) != 0) continue;
    int32_t about = -1;
    if (type == IBV_EVENT_QP_FATAL || type == IBV_EVENT_QP_REQ_ERR ||
        type == IBV_EVENT_QP_ACCESS_ERR) {
      for (uint32_t qp_idx = 0; qp_idx < shared->qps_high && about < 0; ++qp_idx)
        if (shared->qps[qp_idx].used && shared->qps[qp_idx].context == slot)
          about = static_cast<int32_t>(qp_idx);
      if (about < 0) continue;
      emu::stop(shared, static_cast<uint32_t>(about));
    }
    emu::send_event(slot, type, about, -1, static_cast<int32_t>(port));
    ++count;
  }
  return count;
}
