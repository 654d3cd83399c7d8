// Executing requests, as the NICs of both sides do it, and handing out completions.
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include <utility>

#include "memory.h"
#include "objects.h"

namespace emu {

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

namespace {

// There is no receive yet, and the request is to be tried again; not a status of the interface.
constexpr int kTryAgain = -1;

// Of the codes of a refused receive; the shortest ones are what programs use.
uint64_t rnr_wait_ns(uint32_t code) {
  static const uint32_t hundredths[32] = {65536, 1,    2,    3,     4,     6,     8,     12,
                                          16,    24,   32,   48,    64,    96,    128,   192,
                                          256,   384,  512,  768,   1024,  1536,  2048,  3072,
                                          4096,  6144, 8192, 12288, 16384, 24576, 32768, 49152};
  return uint64_t{hundredths[code & 31]} * 10000u;
}

void push(Fabric* shared, uint32_t slot, const Completion& completion) {
  Cq& cq = shared->cqs[slot];
  if (cq.tail - cq.head >= cq.capacity) {
    if (!cq.overflowed) send_event(cq.context, IBV_EVENT_CQ_ERR, -1, static_cast<int32_t>(slot));
    cq.overflowed = 1;
    ++shared->counters.overflows;
    return;
  }
  cq.ring[cq.tail++ % kCompletions] = completion;
  ++shared->counters.completions;
  // Nothing is said about the order of different queue pairs; that of one stays.
  for (uint64_t at = cq.tail - 1; shared->shuffle != 0 && at > cq.head; --at) {
    Completion& before = cq.ring[(at - 1) % kCompletions];
    shared->shuffle = shared->shuffle * 1664525u + 1013904223u;
    if (before.qpn == completion.qpn || (shared->shuffle >> 16) % 4 == 0) break;
    std::swap(before, cq.ring[at % kCompletions]);
  }
}

uint32_t opcode_of(Verb verb) {
  const int opcode = verb == kUmr ? static_cast<int>(MLX5DV_WC_UMR) : IBV_WC_RDMA_WRITE;
  return static_cast<uint32_t>(opcode);
}

void complete(LocalQp* qp, const Request& request, uint32_t status) {
  Fabric* shared = qp->context->shared;
  if (status != IBV_WC_SUCCESS) ++shared->counters.errors;
  if (status == IBV_WC_SUCCESS && (request.flags & IBV_SEND_SIGNALED) == 0 && !qp->signal_all) {
    // Its place comes back with the next completion.
    qp->unsignalled += request.frees;
    return;
  }
  const Qp& state = shared->qps[qp->slot];
  Completion completion = {};
  completion.wr_id = request.wr_id;
  completion.status = status;
  completion.opcode = opcode_of(request.verb);
  completion.vendor_err = status == IBV_WC_SUCCESS ? 0 : 0x80 + status;
  completion.qpn = state.qpn;
  completion.qp = qp->slot;
  completion.frees = request.frees + qp->unsignalled;
  qp->unsignalled = 0;
  push(shared, state.send_cq, completion);
}

void flush_receives(Fabric* shared, uint32_t slot) {
  Qp& qp = shared->qps[slot];
  for (; qp.receive_head != qp.receive_tail; ++qp.receive_head) {
    Completion completion = {};
    completion.wr_id = qp.receives[qp.receive_head % kReceives].wr_id;
    completion.status = IBV_WC_WR_FLUSH_ERR;
    completion.opcode = IBV_WC_RECV;
    completion.qpn = qp.qpn;
    completion.qp = slot;
    ++shared->counters.flushed;
    push(shared, qp.recv_cq, completion);
  }
}

int execute_key(Fabric* shared, const Qp& qp, const Request& request) {
  Key& key = shared->keys[request.key_slot];
  if (!key.used || key.kind == kRegion || key.pd != qp.pd) return IBV_WC_LOC_PROT_ERR;
  const auto usable = [&](uint32_t number) {
    const uint32_t slot = (number >> 8) - 1;
    if (number < 256 || slot >= kKeys) return false;
    const Key& region = shared->keys[slot];
    return region.used && region.number == number && region.pd == qp.pd && region.kind == kRegion;
  };
  for (const Entry& entry : request.entries)
    if (!usable(entry.lkey)) return IBV_WC_LOC_PROT_ERR;
  for (const Sge& item : request.list)
    if (!usable(item.lkey)) return IBV_WC_LOC_PROT_ERR;
  key.kind = request.key_kind;
  key.access = request.access;
  key.repeat = request.repeat;
  key.total = request.total;
  key.num_entries = static_cast<uint32_t>(request.entries.size() + request.list.size());
  for (size_t entry_idx = 0; entry_idx < request.entries.size(); ++entry_idx)
    key.entries[entry_idx] = request.entries[entry_idx];
  for (size_t item_idx = 0; item_idx < request.list.size(); ++item_idx)
    key.list[item_idx] = request.list[item_idx];
  key.configured = 1;
  ++shared->counters.umrs;
  return IBV_WC_SUCCESS;
}

// The other end of the connection, or null with a reason where no packet arrives.
Qp* find_other(Fabric* shared, const Qp& own) {
  const auto lost = [](const char* why) {
    refuse(0, "a packet is lost: %s", why);
    return nullptr;
  };
  const Nic& nic = shared->nics[own.nic];
  if (nic.port_state != IBV_PORT_ACTIVE) return lost("this port is down");
  const Gid& gid = nic.gids[own.sgid_index];
  if (!gid.used || gid.type != IBV_GID_TYPE_ROCE_V2) return lost("this GID is not of RoCE v2");
  Qp& other = shared->qps[own.dest_qpn % kQps];
  if (!other.used || other.qpn != own.dest_qpn) return lost("there is no such queue pair");
  if (other.state != IBV_QPS_RTR && other.state != IBV_QPS_RTS)
    return lost("the other queue pair is not ready to receive");
  const Nic& there = shared->nics[other.nic];
  if (there.port_state != IBV_PORT_ACTIVE) return lost("the other port is down");
  bool addressed = false;
  for (const Gid& candidate : there.gids)
    addressed =
        addressed || (candidate.used && memcmp(candidate.raw, own.dgid, sizeof(own.dgid)) == 0);
  if (!addressed) return lost("the address is not the other port's");
  if (other.dest_qpn != own.qpn) return lost("the other queue pair is another one's");
  if (other.expected_psn != own.next_psn)
    return lost("the sequence number is not the expected one");
  if (other.pid != getpid() && kill(other.pid, 0) != 0 && errno == ESRCH)
    return lost("the other process is gone");
  return &other;
}

// The responder refuses: it stops, and its program hears of it.
int refuse_access(Fabric* shared, const Qp& other) {
  const uint32_t slot = static_cast<uint32_t>(&other - shared->qps);
  const uint32_t context = other.context;
  stop(shared, slot);
  send_event(context, IBV_EVENT_QP_ACCESS_ERR, static_cast<int32_t>(slot), -1);
  return IBV_WC_REM_ACCESS_ERR;
}

int execute_write(Fabric* shared, LocalQp* qp, Request& request) {
  Qp& own = shared->qps[qp->slot];
  std::vector<Segment> from, to;
  uint64_t length = 0;
  for (const Sge& sge : request.sges) {
    if (!translate(shared, sge.lkey, sge.addr, sge.length, own.pd, 0, &from))
      return IBV_WC_LOC_PROT_ERR;
    length += sge.length;
  }
  if (length > shared->nics[own.nic].max_msg_sz) {
    refuse(0, "a message of %llu bytes", static_cast<unsigned long long>(length));
    return IBV_WC_LOC_LEN_ERR;
  }
  Qp* other = find_other(shared, own);
  if (other == nullptr) return IBV_WC_RETRY_EXC_ERR;
  if (other->path_mtu != own.path_mtu) {
    refuse(0, "the path MTUs are %u and %u", own.path_mtu, other->path_mtu);
    return IBV_WC_REM_INV_REQ_ERR;
  }
  if ((other->access & IBV_ACCESS_REMOTE_WRITE) == 0) return refuse_access(shared, *other);
  if (length != 0 && !translate(shared, request.rkey, request.remote_addr, length, other->pd,
                                IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_LOCAL_WRITE, &to))
    return refuse_access(shared, *other);
  const bool immediate = request.verb == kWriteImm;
  if (immediate && other->receive_head == other->receive_tail) {
    ++shared->counters.rnr_naks;
    refuse(0, "there is no receive for a message with an immediate");
    if (own.rnr_retry != 7 && request.tries++ >= own.rnr_retry) return IBV_WC_RNR_RETRY_EXC_ERR;
    request.not_before_ns = now_ns() + rnr_wait_ns(other->min_rnr_timer);
    return kTryAgain;
  }
  if (shared->copies && length != 0 && !move_bytes(shared, from, to, other->pid, request.keep))
    return IBV_WC_RETRY_EXC_ERR;
  ++shared->counters.executed_writes;
  shared->counters.written_bytes += length;
  own.next_psn = (own.next_psn + 1) & 0xffffff;
  other->expected_psn = (other->expected_psn + 1) & 0xffffff;
  if (!immediate) return IBV_WC_SUCCESS;
  Completion completion = {};
  completion.wr_id = other->receives[other->receive_head++ % kReceives].wr_id;
  completion.opcode = IBV_WC_RECV_RDMA_WITH_IMM;
  completion.byte_len = static_cast<uint32_t>(length);
  completion.imm_be = request.imm_be;
  completion.flags = IBV_WC_WITH_IMM;
  completion.qpn = other->qpn;
  completion.src_qp = own.qpn;
  completion.qp = static_cast<uint32_t>(other - shared->qps);
  push(shared, other->recv_cq, completion);
  return IBV_WC_SUCCESS;
}

}  // namespace

void stop(Fabric* shared, uint32_t slot) {
  shared->qps[slot].state = IBV_QPS_ERR;
  flush_receives(shared, slot);
}

void flush(LocalQp* qp) {
  Fabric* shared = qp->context->shared;
  std::deque<Request> lost;
  for (const Request& request : qp->pending) {
    if (request.lost) {
      lost.push_back(request);
      continue;
    }
    ++shared->counters.flushed;
    complete(qp, request, IBV_WC_WR_FLUSH_ERR);
  }
  qp->pending.swap(lost);
  flush_receives(shared, qp->slot);
}

void run(LocalQp* qp) {
  Fabric* shared = qp->context->shared;
  Qp& state = shared->qps[qp->slot];
  while (!qp->pending.empty()) {
    if (state.state == IBV_QPS_ERR) return flush(qp);
    Request& request = qp->pending.front();
    if (request.dropped || request.executed) return;  // and what comes after it waits
    if (request.not_before_ns != 0 && request.not_before_ns > now_ns()) return;
    int status = static_cast<int>(request.status);
    if (status == IBV_WC_SUCCESS)
      status = request.verb == kUmr ? execute_key(shared, state, request)
                                    : execute_write(shared, qp, request);
    if (status == kTryAgain) return;
    if (request.held && status == IBV_WC_SUCCESS) {
      request.executed = true;
      return;
    }
    complete(qp, request, static_cast<uint32_t>(status));
    qp->pending.pop_front();
    if (status != IBV_WC_SUCCESS) stop(shared, qp->slot);
  }
}

void release_held(LocalQp* qp) {
  while (!qp->pending.empty() && qp->pending.front().executed) {
    complete(qp, qp->pending.front(), IBV_WC_SUCCESS);
    qp->pending.pop_front();
    run(qp);
  }
}

int poll_cq(ibv_cq* base, int count, ibv_wc* wc) {
  LocalContext* context = local(base->context);
  Fabric* shared = context->shared;
  Lock lock(shared);
  Cq& cq = shared->cqs[local(base)->slot];
  if (cq.overflowed) return -1;
  const Rule* rule = match(kPoll, context->nic, -1);
  if (rule != nullptr) return -static_cast<int>(rule->value);
  for (const auto& item : context->qps)
    if (!item.second->pending.empty()) run(item.second);
  int taken = 0;
  for (; taken < count && cq.head != cq.tail; ++taken) {
    const Completion& from = cq.ring[cq.head++ % kCompletions];
    ibv_wc& to = wc[taken];
    memset(&to, 0, sizeof(to));
    to.wr_id = from.wr_id;
    to.status = static_cast<ibv_wc_status>(from.status);
    to.opcode = static_cast<ibv_wc_opcode>(from.opcode);
    to.vendor_err = from.vendor_err;
    to.byte_len = from.byte_len;
    to.imm_data = from.imm_be;
    to.qp_num = from.qpn;
    to.src_qp = from.src_qp;
    to.wc_flags = from.flags;
    Qp& qp = shared->qps[from.qp];
    if (qp.used && qp.qpn == from.qpn) qp.send_used -= from.frees;
  }
  return taken;
}

}  // namespace emu
