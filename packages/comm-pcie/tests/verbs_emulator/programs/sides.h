// Two sides of a connection, for programs that are linked with libibverbs and libmlx5.
#ifndef VERBS_EMULATOR_PROGRAMS_SIDES_H_
#define VERBS_EMULATOR_PROGRAMS_SIDES_H_

#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <vector>

#define CHECK(condition, ...)                                    \
  do {                                                           \
    if (!(condition)) {                                          \
      printf("%s:%d: not %s: ", __FILE__, __LINE__, #condition); \
      printf(__VA_ARGS__);                                       \
      printf("\n");                                              \
      exit(1);                                                   \
    }                                                            \
  } while (0)

namespace conformance {

constexpr int kAll = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
constexpr uint32_t kMaxMessage = 1 << 20;  // of the test's NICs

struct Options {
  uint32_t send_places = 16, receive_places = 4, inline_bytes = 128;
  int completions = 64;
  uint64_t ops = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  uint64_t mlx5_ops = MLX5DV_QP_EX_WITH_MR_INTERLEAVED | MLX5DV_QP_EX_WITH_MKEY_CONFIGURE;
  int access = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  uint8_t rnr_retry = 7;
};

// One side: a NIC with a queue pair and a region of 4 MiB.
struct Side {
  ibv_context* context;
  ibv_pd* pd;
  ibv_cq* cq;
  ibv_qp* qp;
  ibv_qp_ex* ex;
  mlx5dv_qp_ex* mx;
  ibv_mr* mr;
  std::vector<uint8_t> memory;

  explicit Side(int nic, const Options& options = Options(), size_t bytes = 4 << 20)
      : memory(bytes) {
    int count = 0;
    ibv_device** list = ibv_get_device_list(&count);
    CHECK(list != nullptr && count >= 2, "%d devices", count);
    CHECK(mlx5dv_is_supported(list[nic]), "no mlx5");
    mlx5dv_context_attr attr = {};
    attr.flags = MLX5DV_CONTEXT_FLAGS_DEVX;
    context = mlx5dv_open_device(list[nic], &attr);
    CHECK(context != nullptr, "%s", strerror(errno));
    ibv_free_device_list(list);
    pd = ibv_alloc_pd(context);
    cq = ibv_create_cq(context, options.completions, nullptr, nullptr, 0);
    CHECK(pd != nullptr && cq != nullptr, "%s", strerror(errno));
    ibv_qp_init_attr_ex init = {};
    init.send_cq = init.recv_cq = cq;
    init.cap = {options.send_places, options.receive_places, 2, 1, options.inline_bytes};
    init.qp_type = IBV_QPT_RC;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.pd = pd;
    init.send_ops_flags = options.ops;
    mlx5dv_qp_init_attr mlx5 = {};
    mlx5.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS;
    mlx5.send_ops_flags = options.mlx5_ops;
    qp = mlx5dv_create_qp(context, &init, &mlx5);
    CHECK(qp != nullptr, "%s", strerror(errno));
    ex = ibv_qp_to_qp_ex(qp);
    mx = mlx5dv_qp_ex_from_ibv_qp_ex(ex);
    mr = ibv_reg_mr(pd, memory.data(), memory.size(), kAll);
    CHECK(mr != nullptr, "%s", strerror(errno));
  }

  uint64_t at(size_t offset) const { return reinterpret_cast<uint64_t>(memory.data()) + offset; }

  ibv_wc poll(int tries = 100000) {
    ibv_wc wc = {};
    int found = 0;
    for (int number = 0; number < tries && found == 0; ++number) found = ibv_poll_cq(cq, 1, &wc);
    CHECK(found == 1, "%d completions", found);
    return wc;
  }

  void none() {
    ibv_wc wc;
    CHECK(ibv_poll_cq(cq, 1, &wc) == 0, "a completion with status %d", wc.status);
  }

  int state() {
    ibv_qp_attr attr;
    ibv_qp_init_attr init;
    CHECK(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init) == 0, "query");
    return attr.qp_state;
  }

  int receive(uint64_t id) {
    ibv_recv_wr request = {}, *bad = nullptr;
    request.wr_id = id;
    return ibv_post_recv(qp, &request, &bad);
  }

  int write(uint64_t id, uint32_t lkey, uint64_t from, uint32_t length, uint32_t rkey, uint64_t to,
            bool immediate = false, unsigned flags = IBV_SEND_SIGNALED) {
    ibv_wr_start(ex);
    ex->wr_id = id;
    ex->wr_flags = flags;
    if (immediate)
      ibv_wr_rdma_write_imm(ex, rkey, to, htobe32(0x80000001));
    else
      ibv_wr_rdma_write(ex, rkey, to);
    ibv_wr_set_sge(ex, lkey, from, length);
    return ibv_wr_complete(ex);
  }

  int interleave(mlx5dv_mkey* key, uint64_t addr, uint32_t rows, uint32_t width, uint32_t pitch,
                 uint32_t lkey, unsigned flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED,
                 uint64_t id = 77) {
    mlx5dv_mr_interleaved entry = {addr, width, pitch - width, lkey};
    ibv_wr_start(ex);
    ex->wr_id = id;
    ex->wr_flags = flags;
    mlx5dv_wr_mr_interleaved(mx, key, kAll, rows, 1, &entry);
    return ibv_wr_complete(ex);
  }

  mlx5dv_mkey* key(uint16_t entries = 2) {
    mlx5dv_mkey_init_attr attr = {pd, MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT, entries};
    mlx5dv_mkey* made = mlx5dv_create_mkey(&attr);
    CHECK(made != nullptr, "%s", strerror(errno));
    return made;
  }
};

constexpr int kInitMask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
constexpr int kRtrMask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN |
                         IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
constexpr int kRtsMask = IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                         IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC;

inline ibv_qp_attr init_attr(const Options& options = Options()) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_INIT;
  attr.port_num = 1;
  attr.qp_access_flags = static_cast<unsigned>(options.access);
  return attr;
}

inline ibv_qp_attr rtr_attr(Side& other, uint32_t psn) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_RTR;
  attr.path_mtu = IBV_MTU_1024;
  attr.dest_qp_num = other.qp->qp_num;
  attr.rq_psn = psn;
  attr.max_dest_rd_atomic = 1;
  attr.min_rnr_timer = 1;
  attr.ah_attr.is_global = 1;
  attr.ah_attr.port_num = 1;
  attr.ah_attr.grh.hop_limit = 64;
  CHECK(ibv_query_gid(other.context, 1, 0, &attr.ah_attr.grh.dgid) == 0, "gid");
  return attr;
}

inline ibv_qp_attr rts_attr(uint32_t psn, const Options& options = Options()) {
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_RTS;
  attr.timeout = 14;
  attr.retry_cnt = 7;
  attr.rnr_retry = options.rnr_retry;
  attr.sq_psn = psn;
  attr.max_rd_atomic = 1;
  return attr;
}

inline void connect(Side& one, Side& other, const Options& options = Options(),
                    uint32_t one_psn = 100, uint32_t other_psn = 200) {
  for (int turn = 0; turn < 2; ++turn) {
    Side &own = turn == 0 ? one : other, &peer = turn == 0 ? other : one;
    const uint32_t own_psn = turn == 0 ? one_psn : other_psn;
    const uint32_t peer_psn = turn == 0 ? other_psn : one_psn;
    ibv_qp_attr attr = init_attr(options);
    CHECK(ibv_modify_qp(own.qp, &attr, kInitMask) == 0, "INIT");
    attr = rtr_attr(peer, peer_psn);
    CHECK(ibv_modify_qp(own.qp, &attr, kRtrMask) == 0, "RTR");
    attr = rts_attr(own_psn, options);
    CHECK(ibv_modify_qp(own.qp, &attr, kRtsMask) == 0, "RTS");
  }
}

inline void expect(const ibv_wc& wc, uint64_t id, int status) {
  CHECK(wc.wr_id == id && wc.status == status, "request %llu ended with %d (%s), expected %llu, %d",
        static_cast<unsigned long long>(wc.wr_id), wc.status, ibv_wc_status_str(wc.status),
        static_cast<unsigned long long>(id), status);
}

// Without a period that is a power of two.
inline uint8_t pattern(size_t index) { return static_cast<uint8_t>((index * 2654435761u) >> 13); }

}  // namespace conformance

#endif  // VERBS_EMULATOR_PROGRAMS_SIDES_H_
