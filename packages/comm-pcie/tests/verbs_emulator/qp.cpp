// Queue pairs: made, moved through their states with what each step must and may set, destroyed.
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>

#include "objects.h"

namespace emu {

namespace {

constexpr uint64_t kOps = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
constexpr uint64_t kMlx5Ops =
    MLX5DV_QP_EX_WITH_MR_INTERLEAVED | MLX5DV_QP_EX_WITH_MR_LIST | MLX5DV_QP_EX_WITH_MKEY_CONFIGURE;

struct Step {
  uint32_t from, to;
  int must, may;
};

// Of a reliable connection.
const Step kSteps[] = {
    {IBV_QPS_RESET, IBV_QPS_INIT, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, 0},
    {IBV_QPS_INIT, IBV_QPS_INIT, 0, IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS},
    {IBV_QPS_INIT, IBV_QPS_RTR,
     IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
         IBV_QP_MIN_RNR_TIMER,
     IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PKEY_INDEX},
    {IBV_QPS_RTR, IBV_QPS_RTS,
     IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC,
     IBV_QP_CUR_STATE | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER |
         IBV_QP_PATH_MIG_STATE},
    {IBV_QPS_RTS, IBV_QPS_RTS, 0,
     IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_MIN_RNR_TIMER | IBV_QP_PATH_MIG_STATE},
};

int check_step(uint32_t from, uint32_t to, int mask) {
  mask &= ~IBV_QP_STATE;
  // The kernel's table of steps has none from RESET to ERR.
  if ((to == IBV_QPS_ERR && from != IBV_QPS_RESET) || to == IBV_QPS_RESET)
    return mask == 0 ? 0 : refuse(EINVAL, "to state %u with attributes 0x%x", to, mask);
  for (const Step& step : kSteps) {
    if (step.from != from || step.to != to) continue;
    if ((mask & step.must) != step.must)
      return refuse(EINVAL, "from state %u to %u: attributes 0x%x are missing", from, to,
                    step.must & ~mask);
    if ((mask & ~(step.must | step.may)) != 0)
      return refuse(EINVAL, "from state %u to %u: attributes 0x%x are not allowed", from, to,
                    mask & ~(step.must | step.may));
    return 0;
  }
  return refuse(EINVAL, "there is no step from state %u to %u", from, to);
}

bool has_gid(const Nic& nic, const uint8_t* raw) {
  for (const Gid& gid : nic.gids)
    if (gid.used && memcmp(gid.raw, raw, sizeof(gid.raw)) == 0) return true;
  return false;
}

// The address of the other side: as the kernel finds its hardware address, by a lookup that a
// link-local address of another interface never answers.
int check_route(const Fabric* shared, const Nic& own, const ibv_ah_attr& address) {
  if (!address.is_global) return refuse(EINVAL, "RoCE needs a global route header");
  if (address.port_num != 1) return refuse(EINVAL, "there is no port %u", address.port_num);
  const uint32_t index = address.grh.sgid_index;
  if (index >= kGids || !own.gids[index].used) return refuse(EINVAL, "GID %u is empty", index);
  const uint8_t* to = address.grh.dgid.raw;
  if (to[0] == 0xfe && to[1] == 0x80) return refuse(ETIMEDOUT, "a link-local address");
  for (uint32_t nic_idx = 0; nic_idx < shared->num_nics; ++nic_idx)
    if (has_gid(shared->nics[nic_idx], to)) return 0;
  return refuse(ETIMEDOUT, "nobody has the address");
}

int to_ready_to_receive(Fabric* shared, Qp& qp, const ibv_qp_attr& attr) {
  const Nic& nic = shared->nics[qp.nic];
  const int error = check_route(shared, nic, attr.ah_attr);
  if (error != 0) return error;
  if (attr.path_mtu < IBV_MTU_256 || static_cast<uint32_t>(attr.path_mtu) > nic.active_mtu)
    return refuse(EINVAL, "path MTU %d, the port's is %u", attr.path_mtu, nic.active_mtu);
  if (attr.dest_qp_num >= 1u << 24 || attr.rq_psn >= 1u << 24)
    return refuse(EINVAL, "queue pair 0x%x, sequence 0x%x", attr.dest_qp_num, attr.rq_psn);
  qp.path_mtu = attr.path_mtu;
  qp.dest_qpn = attr.dest_qp_num;
  qp.expected_psn = attr.rq_psn;
  qp.min_rnr_timer = attr.min_rnr_timer;
  qp.sgid_index = attr.ah_attr.grh.sgid_index;
  memcpy(qp.dgid, attr.ah_attr.grh.dgid.raw, sizeof(qp.dgid));
  return 0;
}

}  // namespace

ibv_qp* create_qp(LocalContext* context, ibv_qp_init_attr_ex* attr, mlx5dv_qp_init_attr* mlx5) {
  Fabric* shared = context->shared;
  Lock lock(shared);
  const int ordered = ordered_error(kCreateQp, context->nic);
  if (ordered != 0) return fail_null<ibv_qp*>(ordered);
  const uint64_t ops = attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS ? attr->send_ops_flags : 0;
  const uint64_t mlx5_ops =
      mlx5 != nullptr && (mlx5->comp_mask & MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS) != 0
          ? mlx5->send_ops_flags
          : 0;
  if ((attr->comp_mask & IBV_QP_INIT_ATTR_PD) == 0 || attr->pd == nullptr ||
      attr->send_cq == nullptr || attr->recv_cq == nullptr)
    return fail_null<ibv_qp*>(refuse(EINVAL, "a queue pair without domain or completion queues"));
  if (attr->qp_type != IBV_QPT_RC || attr->srq != nullptr || (ops & ~kOps) != 0 ||
      (mlx5_ops & ~kMlx5Ops) != 0 || (mlx5_ops != 0 && !shared->nics[context->nic].has_interleaved))
    return fail_null<ibv_qp*>(refuse(EOPNOTSUPP,
                                     "a queue pair of type %d with operations 0x%llx "
                                     "and 0x%llx",
                                     attr->qp_type, static_cast<unsigned long long>(ops),
                                     static_cast<unsigned long long>(mlx5_ops)));
  if (attr->cap.max_send_wr > kReceives || attr->cap.max_recv_wr > kReceives ||
      attr->cap.max_send_sge > kSges || attr->cap.max_recv_sge > kSges ||
      attr->cap.max_inline_data > 512)
    return fail_null<ibv_qp*>(refuse(EINVAL, "a queue pair larger than the device allows"));
  const int slot = take_slot(shared->qps);
  if (slot < 0) return fail_null<ibv_qp*>(ENOMEM);
  Qp& qp = shared->qps[slot];
  memset(&qp, 0, offsetof(Qp, receives));
  qp.used = 1;
  shared->qps_high = std::max(shared->qps_high, static_cast<uint32_t>(slot) + 1);
  // Never the number of one that was destroyed a moment ago; its slot is in the low bits.
  qp.qpn = (((++shared->generation & 0xfff) + 1) << 10 | static_cast<uint32_t>(slot)) & 0xffffff;
  qp.nic = context->nic;
  qp.context = context->slot;
  qp.pd = local(attr->pd)->slot;
  qp.send_cq = local(attr->send_cq)->slot;
  qp.recv_cq = local(attr->recv_cq)->slot;
  qp.pid = getpid();
  qp.max_send = attr->cap.max_send_wr;
  qp.max_recv = attr->cap.max_recv_wr;
  qp.max_inline = attr->cap.max_inline_data;
  ++shared->cqs[qp.send_cq].users;
  ++shared->cqs[qp.recv_cq].users;
  LocalQp* own = new LocalQp();
  own->context = context;
  own->slot = static_cast<uint32_t>(slot);
  own->has_ops = ops;
  own->has_mlx5_ops = mlx5_ops;
  own->signal_all = attr->sq_sig_all != 0;
  ibv_qp& base = own->ex.qp_base;
  base.context = &context->view.verbs.context;
  base.qp_context = attr->qp_context;
  base.pd = attr->pd;
  base.send_cq = attr->send_cq;
  base.recv_cq = attr->recv_cq;
  base.qp_num = qp.qpn;
  base.handle = qp.qpn;
  base.qp_type = attr->qp_type;
  install_builders(own);
  context->qps[slot] = own;
  return &base;
}

}  // namespace emu

using emu::Fabric;
using emu::local;
using emu::Lock;

EXPORT ibv_qp* mlx5dv_create_qp(ibv_context* context, ibv_qp_init_attr_ex* attr,
                                mlx5dv_qp_init_attr* mlx5) {
  return emu::create_qp(local(context), attr, mlx5);
}

EXPORT ibv_qp* ibv_create_qp(ibv_pd* pd, ibv_qp_init_attr* attr) {
  ibv_qp_init_attr_ex full = {};
  full.qp_context = attr->qp_context;
  full.send_cq = attr->send_cq;
  full.recv_cq = attr->recv_cq;
  full.srq = attr->srq;
  full.cap = attr->cap;
  full.qp_type = attr->qp_type;
  full.sq_sig_all = attr->sq_sig_all;
  full.comp_mask = IBV_QP_INIT_ATTR_PD;
  full.pd = pd;
  return emu::create_qp(local(pd->context), &full, nullptr);
}

EXPORT ibv_qp_ex* ibv_qp_to_qp_ex(ibv_qp* qp) { return &local(qp)->ex; }
EXPORT mlx5dv_qp_ex* mlx5dv_qp_ex_from_ibv_qp_ex(ibv_qp_ex* qp) { return &local(qp)->mlx5; }

EXPORT int ibv_modify_qp(ibv_qp* base, ibv_qp_attr* attr, int mask) {
  emu::LocalQp* own = local(base);
  Fabric* shared = own->context->shared;
  Lock lock(shared);
  const int ordered = emu::ordered_error(emu::kModifyQp, own->context->nic);
  if (ordered != 0) return ordered;
  emu::Qp& qp = shared->qps[own->slot];
  const uint32_t to = mask & IBV_QP_STATE ? static_cast<uint32_t>(attr->qp_state) : qp.state;
  if ((mask & IBV_QP_CUR_STATE) != 0 && static_cast<uint32_t>(attr->cur_qp_state) != qp.state)
    return emu::refuse(EINVAL, "the state is %u and not %d", qp.state, attr->cur_qp_state);
  int error = emu::check_step(qp.state, to, mask);
  if (error != 0) return error;
  if ((mask & IBV_QP_PORT) != 0 && attr->port_num != 1)
    return emu::refuse(EINVAL, "there is no port %u", attr->port_num);
  if ((mask & IBV_QP_PKEY_INDEX) != 0 && attr->pkey_index != 0)
    return emu::refuse(EINVAL, "there is no partition key %u", attr->pkey_index);
  if (to == IBV_QPS_RTR && qp.state == IBV_QPS_INIT)
    error = emu::to_ready_to_receive(shared, qp, *attr);
  if (error != 0) return error;
  if ((mask & IBV_QP_ACCESS_FLAGS) != 0) qp.access = attr->qp_access_flags;
  if ((mask & IBV_QP_SQ_PSN) != 0) qp.next_psn = attr->sq_psn & 0xffffff;
  if ((mask & IBV_QP_TIMEOUT) != 0) qp.timeout = attr->timeout;
  if ((mask & IBV_QP_RETRY_CNT) != 0) qp.retry_count = attr->retry_cnt;
  if ((mask & IBV_QP_RNR_RETRY) != 0) qp.rnr_retry = attr->rnr_retry;
  if (to == IBV_QPS_ERR) {
    emu::stop(shared, own->slot);
    emu::flush(own);
  } else {
    if (to == IBV_QPS_RESET) {
      own->pending.clear();
      qp.receive_head = qp.receive_tail = 0;
      qp.send_used = 0;
    }
    qp.state = to;
  }
  base->state = static_cast<ibv_qp_state>(qp.state);
  return 0;
}

EXPORT int ibv_query_qp(ibv_qp* base, ibv_qp_attr* attr, int, ibv_qp_init_attr* init) {
  emu::LocalQp* own = local(base);
  Fabric* shared = own->context->shared;
  Lock lock(shared);
  const emu::Qp& qp = shared->qps[own->slot];
  memset(attr, 0, sizeof(*attr));
  attr->qp_state = attr->cur_qp_state = static_cast<ibv_qp_state>(qp.state);
  attr->path_mtu = static_cast<ibv_mtu>(qp.path_mtu);
  attr->rq_psn = qp.expected_psn;
  attr->sq_psn = qp.next_psn;
  attr->dest_qp_num = qp.dest_qpn;
  attr->qp_access_flags = qp.access;
  attr->timeout = static_cast<uint8_t>(qp.timeout);
  attr->retry_cnt = static_cast<uint8_t>(qp.retry_count);
  attr->rnr_retry = static_cast<uint8_t>(qp.rnr_retry);
  attr->min_rnr_timer = static_cast<uint8_t>(qp.min_rnr_timer);
  attr->port_num = 1;
  attr->ah_attr.is_global = 1;
  attr->ah_attr.port_num = 1;
  attr->ah_attr.grh.sgid_index = static_cast<uint8_t>(qp.sgid_index);
  memcpy(attr->ah_attr.grh.dgid.raw, qp.dgid, sizeof(qp.dgid));
  memset(init, 0, sizeof(*init));
  init->send_cq = base->send_cq;
  init->recv_cq = base->recv_cq;
  init->qp_type = base->qp_type;
  init->cap.max_send_wr = qp.max_send;
  init->cap.max_recv_wr = qp.max_recv;
  init->cap.max_inline_data = qp.max_inline;
  attr->cap = init->cap;
  return 0;
}

EXPORT int ibv_destroy_qp(ibv_qp* base) {
  emu::LocalQp* own = local(base);
  Fabric* shared = own->context->shared;
  {
    Lock lock(shared);
    const int ordered = emu::ordered_error(emu::kDestroyQp, own->context->nic);
    if (ordered != 0) return ordered;
    emu::Qp& qp = shared->qps[own->slot];
    --shared->cqs[qp.send_cq].users;
    --shared->cqs[qp.recv_cq].users;
    // Its completions go with it.
    for (uint32_t cq_slot : {qp.send_cq, qp.recv_cq}) {
      emu::Cq& cq = shared->cqs[cq_slot];
      uint64_t kept = cq.head;
      for (uint64_t at = cq.head; at != cq.tail; ++at)
        if (cq.ring[at % emu::kCompletions].qpn != qp.qpn)
          cq.ring[kept++ % emu::kCompletions] = cq.ring[at % emu::kCompletions];
      cq.tail = kept;
    }
    qp.used = 0;
    own->context->qps.erase(static_cast<int32_t>(own->slot));
  }
  delete own;
  return 0;
}
