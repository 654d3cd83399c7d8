// Posting: the builders of requests, and the older calls with lists.
#include <errno.h>
#include <string.h>

#include "objects.h"

namespace emu {

namespace {

Request* last(LocalQp* qp) {
  if (qp->building.empty()) {
    qp->build_error = EINVAL;  // a setter without a request
    return nullptr;
  }
  return &qp->building.back();
}

Request* begin(LocalQp* qp, Verb verb) {
  Request request = {};
  request.verb = verb;
  request.wr_id = qp->ex.wr_id;
  request.flags = qp->ex.wr_flags;
  request.frees = 1;
  qp->building.push_back(request);
  return &qp->building.back();
}

void wr_start(ibv_qp_ex* ex) {
  LocalQp* qp = local(ex);
  qp->building.clear();
  qp->build_error = 0;
}

void wr_abort(ibv_qp_ex* ex) { local(ex)->building.clear(); }

void wr_rdma_write(ibv_qp_ex* ex, uint32_t rkey, uint64_t addr) {
  Request* request = begin(local(ex), kWrite);
  request->rkey = rkey;
  request->remote_addr = addr;
}

void wr_rdma_write_imm(ibv_qp_ex* ex, uint32_t rkey, uint64_t addr, __be32 imm) {
  Request* request = begin(local(ex), kWriteImm);
  request->rkey = rkey;
  request->remote_addr = addr;
  request->imm_be = imm;
}

void wr_set_sge(ibv_qp_ex* ex, uint32_t lkey, uint64_t addr, uint32_t length) {
  Request* request = last(local(ex));
  if (request != nullptr && length != 0) request->sges.push_back({addr, length, lkey});
}

void wr_set_sge_list(ibv_qp_ex* ex, size_t count, const ibv_sge* list) {
  if (count > kSges) local(ex)->build_error = ENOMEM;
  for (size_t sge_idx = 0; sge_idx < count && sge_idx < kSges; ++sge_idx)
    wr_set_sge(ex, list[sge_idx].lkey, list[sge_idx].addr, list[sge_idx].length);
}

// How many entries fit into a description that is part of the request.
uint32_t inline_entries(const LocalQp* qp) {
  const uint32_t bytes = qp->context->shared->qps[qp->slot].max_inline;
  return (bytes + 4) / 16 > 0 ? (bytes + 4) / 16 - 1 : 0;
}

bool begin_key(LocalQp* qp, mlx5dv_mkey* mkey) {
  if ((qp->ex.wr_flags & IBV_SEND_INLINE) == 0) {
    qp->build_error = EOPNOTSUPP;
    return false;
  }
  Request* request = begin(qp, kUmr);
  request->key_slot = local(mkey)->slot;
  return true;
}

void set_interleaved(LocalQp* qp, uint32_t repeat, uint16_t count,
                     const mlx5dv_mr_interleaved* data) {
  Request* request = last(qp);
  if (request == nullptr) return;
  const Key& key = qp->context->shared->keys[request->key_slot];
  // One entry of the key is the repeat block's header.
  if (count + 1u > key.max_entries || count > inline_entries(qp) || count > kEntries ||
      count == 0) {
    qp->build_error = ENOMEM;
    return;
  }
  request->key_kind = kInterleaved;
  request->repeat = repeat;
  uint64_t row = 0;
  for (uint16_t entry_idx = 0; entry_idx < count; ++entry_idx) {
    const mlx5dv_mr_interleaved& item = data[entry_idx];
    // As the hardware's entry and the library that fills it in: 16 bits each, without a check.
    request->entries.push_back({item.addr,
                                static_cast<uint16_t>(item.bytes_count + item.bytes_skip),
                                static_cast<uint16_t>(item.bytes_count), item.lkey});
    row += item.bytes_count;
  }
  request->total = row * repeat;
}

void set_list(LocalQp* qp, uint16_t count, const ibv_sge* list) {
  Request* request = last(qp);
  if (request == nullptr) return;
  const Key& key = qp->context->shared->keys[request->key_slot];
  if (count > key.max_entries || count > inline_entries(qp) + 1 || count > kEntries || count == 0) {
    qp->build_error = ENOMEM;
    return;
  }
  request->key_kind = kList;
  for (uint16_t sge_idx = 0; sge_idx < count; ++sge_idx) {
    request->list.push_back({list[sge_idx].addr, list[sge_idx].length, list[sge_idx].lkey});
    request->total += list[sge_idx].length;
  }
}

void wr_mr_interleaved(mlx5dv_qp_ex* mlx5, mlx5dv_mkey* mkey, uint32_t access, uint32_t repeat,
                       uint16_t count, mlx5dv_mr_interleaved* data) {
  LocalQp* qp = local(mlx5);
  if (!begin_key(qp, mkey)) return;
  last(qp)->access = access;
  set_interleaved(qp, repeat, count, data);
}

void wr_mr_list(mlx5dv_qp_ex* mlx5, mlx5dv_mkey* mkey, uint32_t access, uint16_t count,
                ibv_sge* list) {
  LocalQp* qp = local(mlx5);
  if (!begin_key(qp, mkey)) return;
  last(qp)->access = access;
  set_list(qp, count, list);
}

void wr_mkey_configure(mlx5dv_qp_ex* mlx5, mlx5dv_mkey* mkey, uint8_t setters,
                       mlx5dv_mkey_conf_attr* attr) {
  LocalQp* qp = local(mlx5);
  if (attr == nullptr || attr->conf_flags != 0 || attr->comp_mask != 0) {
    qp->build_error = EOPNOTSUPP;
    return;
  }
  if (begin_key(qp, mkey)) last(qp)->setters_left = setters;
}

// A setter of a description that was begun by wr_mkey_configure.
Request* setter(LocalQp* qp) {
  Request* request = last(qp);
  if (request == nullptr) return nullptr;
  if (request->verb != kUmr || request->setters_left == 0) {
    qp->build_error = EINVAL;
    return nullptr;
  }
  --request->setters_left;
  return request;
}

void wr_set_mkey_access_flags(mlx5dv_qp_ex* mlx5, uint32_t access) {
  Request* request = setter(local(mlx5));
  if (request != nullptr) request->access = access;
}

void wr_set_mkey_layout_interleaved(mlx5dv_qp_ex* mlx5, uint32_t repeat, uint16_t count,
                                    const mlx5dv_mr_interleaved* data) {
  LocalQp* qp = local(mlx5);
  Request* request = setter(qp);
  if (request == nullptr) return;
  if (request->key_kind != 0)
    qp->build_error = EINVAL;  // a second layout
  else
    set_interleaved(qp, repeat, count, data);
}

void wr_set_mkey_layout_list(mlx5dv_qp_ex* mlx5, uint16_t count, const ibv_sge* list) {
  LocalQp* qp = local(mlx5);
  Request* request = setter(qp);
  if (request == nullptr) return;
  if (request->key_kind != 0)
    qp->build_error = EINVAL;
  else
    set_list(qp, count, list);
}

uint64_t milliseconds(uint32_t count) { return uint64_t{count} * 1000000u; }

// What faults do to a request. Returns an error number of the call.
int apply_rule(Fabric* shared, LocalQp* qp, Request* request) {
  ++shared->counters.posted[request->verb];
  int32_t peer = -1;
  const Qp& own = shared->qps[qp->slot];
  const Qp& other = shared->qps[own.dest_qpn % kQps];
  if (request->verb != kUmr && other.used && other.qpn == own.dest_qpn)
    peer = static_cast<int32_t>(other.nic);
  const Rule* rule = match(request->verb, qp->context->nic, peer);
  if (rule == nullptr) return 0;
  switch (rule->action) {
    case kFail:
      return refuse(static_cast<int>(rule->value), "ordered: %s", rule->text);
    case kDelay:
      request->not_before_ns = now_ns() + milliseconds(rule->value);
      break;
    case kHold:
      request->held = true;
      break;
    case kDrop:
      request->dropped = true;
      break;
    case kLose:
      request->dropped = request->lost = true;
      break;
    case kStatus:
      request->status = rule->value;
      break;
    case kNotReady:
      // Always refused, whatever the queue pair says about trying again.
      request->status = IBV_WC_RNR_RETRY_EXC_ERR;
      ++shared->counters.rnr_naks;
      break;
    case kLate:
      request->keep = rule->value;
      break;
  }
  return 0;
}

// Post what was built: all of it or nothing.
int submit(LocalQp* qp) {
  Fabric* shared = qp->context->shared;
  Lock lock(shared);
  Qp& state = shared->qps[qp->slot];
  if (state.state != IBV_QPS_RTS && state.state != IBV_QPS_ERR && state.state != IBV_QPS_SQE) {
    ++shared->counters.not_ready_posts;
    return refuse(EINVAL, "a request is posted in state %u", state.state);
  }
  uint32_t places = static_cast<uint32_t>(qp->building.size());
  if (state.send_used + places > state.max_send)
    return refuse(ENOMEM, "%u requests are posted, and %u more of a queue of %u", state.send_used,
                  places, state.max_send);
  for (Request& request : qp->building) {
    if (request.verb == kUmr && (request.key_kind == 0 || request.setters_left != 0))
      return refuse(EINVAL, "a key is described without layout or with setters missing");
    const int error = apply_rule(shared, qp, &request);
    if (error != 0) return error;
  }
  state.send_used += places;
  for (Request& request : qp->building) qp->pending.push_back(request);
  qp->building.clear();
  run(qp);
  return 0;
}

int wr_complete(ibv_qp_ex* ex) {
  LocalQp* qp = local(ex);
  const int error = qp->build_error != 0 ? qp->build_error : submit(qp);
  qp->building.clear();
  return error;
}

}  // namespace

void install_builders(LocalQp* qp) {
  ibv_qp_ex& ex = qp->ex;
  // Those that were not asked for stay null: a program that forgot to ask dies where it calls them.
  if (qp->has_ops == 0 && qp->has_mlx5_ops == 0) return;
  ex.wr_start = wr_start;
  ex.wr_complete = wr_complete;
  ex.wr_abort = wr_abort;
  ex.wr_set_sge = wr_set_sge;
  ex.wr_set_sge_list = wr_set_sge_list;
  if (qp->has_ops & IBV_QP_EX_WITH_RDMA_WRITE) ex.wr_rdma_write = wr_rdma_write;
  if (qp->has_ops & IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM) ex.wr_rdma_write_imm = wr_rdma_write_imm;
  if (qp->has_mlx5_ops & MLX5DV_QP_EX_WITH_MR_INTERLEAVED)
    qp->mlx5.wr_mr_interleaved = wr_mr_interleaved;
  if (qp->has_mlx5_ops & MLX5DV_QP_EX_WITH_MR_LIST) qp->mlx5.wr_mr_list = wr_mr_list;
  if (qp->has_mlx5_ops & MLX5DV_QP_EX_WITH_MKEY_CONFIGURE) {
    qp->mlx5.wr_mkey_configure = wr_mkey_configure;
    qp->mlx5.wr_set_mkey_access_flags = wr_set_mkey_access_flags;
    qp->mlx5.wr_set_mkey_layout_interleaved = wr_set_mkey_layout_interleaved;
    qp->mlx5.wr_set_mkey_layout_list = wr_set_mkey_layout_list;
  }
}

int post_send(ibv_qp* base, ibv_send_wr* request, ibv_send_wr** bad) {
  LocalQp* qp = local(base);
  for (; request != nullptr; request = request->next) {
    wr_start(&qp->ex);
    qp->ex.wr_id = request->wr_id;
    qp->ex.wr_flags = request->send_flags;
    if (request->opcode == IBV_WR_RDMA_WRITE)
      wr_rdma_write(&qp->ex, request->wr.rdma.rkey, request->wr.rdma.remote_addr);
    else if (request->opcode == IBV_WR_RDMA_WRITE_WITH_IMM)
      wr_rdma_write_imm(&qp->ex, request->wr.rdma.rkey, request->wr.rdma.remote_addr,
                        request->imm_data);
    else
      qp->build_error = EOPNOTSUPP;
    if (qp->build_error == 0)
      wr_set_sge_list(&qp->ex, static_cast<size_t>(request->num_sge), request->sg_list);
    const int error = wr_complete(&qp->ex);
    if (error == 0) continue;
    if (bad != nullptr) *bad = request;
    return error;
  }
  return 0;
}

int post_receive(ibv_qp* base, ibv_recv_wr* request, ibv_recv_wr** bad) {
  LocalQp* own = local(base);
  Fabric* shared = own->context->shared;
  Lock lock(shared);
  Qp& qp = shared->qps[own->slot];
  for (; request != nullptr; request = request->next) {
    if (bad != nullptr) *bad = request;
    const int ordered = ordered_error(kPostReceive, own->context->nic);
    if (ordered != 0) return ordered;
    if (qp.state == IBV_QPS_RESET) return refuse(EINVAL, "a receive is posted in state RESET");
    if (qp.receive_tail - qp.receive_head >= qp.max_recv)
      return refuse(ENOMEM, "%u receives are posted already", qp.max_recv);
    if (request->num_sge > kSges) return refuse(EINVAL, "a receive of %d pieces", request->num_sge);
    Receive& receive = qp.receives[qp.receive_tail++ % kReceives];
    receive.wr_id = request->wr_id;
    receive.num_sge = static_cast<uint32_t>(request->num_sge);
    for (int sge_idx = 0; sge_idx < request->num_sge; ++sge_idx) {
      const ibv_sge& sge = request->sg_list[sge_idx];
      receive.sge[sge_idx] = {sge.addr, sge.length, sge.lkey};
    }
  }
  if (qp.state == IBV_QPS_ERR) flush(own);
  return 0;
}

}  // namespace emu
