// An ordinary program of libibverbs and libmlx5, linked with both; tests run it with the emulator
// preloaded. One argument names a case; "list" prints all. A case fails by an exit code and a line.
#include <functional>
#include <map>
#include <string>
#include <utility>

#include "sides.h"

using namespace conformance;

namespace {

// -- Cases ----------------------------------------------------------------------------------------

// Write a band through a key of its own and count the bytes that are not where they belong.
size_t wrong_bytes(uint32_t pitch, uint32_t width, uint32_t rows, bool configure, bool target) {
  const size_t bytes = size_t{pitch} * rows;
  Side one(0, Options(), bytes), other(1, Options(), bytes);
  connect(one, other);
  for (size_t index = 0; index < bytes; ++index) one.memory[index] = pattern(index);
  Side& owner = target ? other : one;
  mlx5dv_mkey* key = owner.key();
  if (configure) {
    mlx5dv_mkey_conf_attr attr = {};
    mlx5dv_mr_interleaved entry = {owner.at(width), width, pitch - width, owner.mr->lkey};
    ibv_wr_start(owner.ex);
    owner.ex->wr_id = 77;
    owner.ex->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    mlx5dv_wr_mkey_configure(owner.mx, key, 2, &attr);
    mlx5dv_wr_set_mkey_access_flags(owner.mx, kAll);
    mlx5dv_wr_set_mkey_layout_interleaved(owner.mx, rows, 1, &entry);
    CHECK(ibv_wr_complete(owner.ex) == 0, "configure");
  } else {
    CHECK(owner.interleave(key, owner.at(width), rows, width, pitch, owner.mr->lkey) == 0, "umr");
  }
  const ibv_wc described = owner.poll();
  expect(described, 77, IBV_WC_SUCCESS);
  CHECK(static_cast<int>(described.opcode) == MLX5DV_WC_UMR, "opcode %d", described.opcode);
  CHECK(other.receive(5) == 0, "receive");
  const uint32_t total = width * rows;
  const int error = target ? one.write(6, one.mr->lkey, one.at(0), total, key->rkey, 0, true)
                           : one.write(6, key->lkey, 0, total, other.mr->rkey, other.at(0), true);
  CHECK(error == 0, "write: %s", strerror(error));
  expect(one.poll(), 6, IBV_WC_SUCCESS);
  const ibv_wc arrived = other.poll();
  expect(arrived, 5, IBV_WC_SUCCESS);
  CHECK(arrived.opcode == IBV_WC_RECV_RDMA_WITH_IMM && arrived.byte_len == total &&
            be32toh(arrived.imm_data) == 0x80000001 && (arrived.wc_flags & IBV_WC_WITH_IMM),
        "opcode %d, %u bytes", arrived.opcode, arrived.byte_len);
  size_t wrong = 0;
  for (uint32_t row = 0; row < rows; ++row)
    for (uint32_t column = 0; column < width; ++column) {
      const size_t packed = size_t{row} * width + column;
      const size_t strided = size_t{row} * pitch + width + column;
      const uint8_t expected = target ? pattern(packed) : pattern(strided);
      wrong += other.memory[target ? strided : packed] != expected;
    }
  return wrong;
}

void bands(uint32_t pitch, uint32_t width, uint32_t rows, bool right) {
  for (const bool target : {false, true})
    for (const bool configure : {false, true}) {
      const size_t wrong = wrong_bytes(pitch, width, rows, configure, target);
      CHECK((wrong == 0) == right, "pitch %u: %zu wrong bytes", pitch, wrong);
    }
}

// A write of one side that must end with `status`, and stop the queue pair of this side.
void refused(int status, const std::function<int(Side&, Side&)>& post, bool other_stops,
             const Options& options = Options()) {
  Side one(0, options), other(1, options);
  connect(one, other, options);
  CHECK(one.receive(40) == 0 && other.receive(41) == 0, "receive");
  CHECK(post(one, other) == 0, "the request is not accepted");
  CHECK(one.write(2, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0)) == 0, "second");
  expect(one.poll(), 1, status);
  CHECK(one.state() == IBV_QPS_ERR, "state %d", one.state());
  // The rest is flushed, each with its own number; in which order of the two queues is not said.
  bool sends = false, receives = false;
  for (int number = 0; number < 2; ++number) {
    const ibv_wc wc = one.poll();
    CHECK(wc.status == IBV_WC_WR_FLUSH_ERR && (wc.wr_id == 2 || wc.wr_id == 40), "%d", wc.status);
    (wc.wr_id == 2 ? sends : receives) = true;
  }
  CHECK(sends && receives, "flushed twice");
  if (other_stops) {
    expect(other.poll(), 41, IBV_WC_WR_FLUSH_ERR);
    ibv_async_event event;
    CHECK(ibv_get_async_event(other.context, &event) == 0, "event");
    CHECK(event.event_type == IBV_EVENT_QP_ACCESS_ERR && event.element.qp == other.qp, "%d",
          event.event_type);
    ibv_ack_async_event(&event);
  } else {
    other.none();
    CHECK(other.state() == IBV_QPS_RTS, "state %d", other.state());
  }
}

// Every attribute of a step is needed, others are refused, and the state stays.
void masks() {
  Side one(0), other(1);
  ibv_qp_attr attrs[3] = {init_attr(), rtr_attr(other, 200), rts_attr(100)};
  const int needed[3] = {kInitMask, kRtrMask, kRtsMask};
  const int strange[3] = {IBV_QP_SQ_PSN, IBV_QP_TIMEOUT, IBV_QP_DEST_QPN};
  for (int step = 0; step < 3; ++step) {
    for (int bit = 0; bit < 26; ++bit) {
      const int flag = 1 << bit;
      if (flag == IBV_QP_STATE || (needed[step] & flag) == 0) continue;
      ibv_qp_attr attr = attrs[step];
      CHECK(ibv_modify_qp(one.qp, &attr, needed[step] & ~flag) == EINVAL, "without 0x%x", flag);
    }
    ibv_qp_attr attr = attrs[step];
    CHECK(ibv_modify_qp(one.qp, &attr, needed[step] | strange[step]) == EINVAL, "with more");
    const int skipped = (step + 1) % 3;
    attr = attrs[skipped];
    CHECK(ibv_modify_qp(one.qp, &attr, needed[skipped]) == EINVAL, "step %d skipped", step);
    CHECK(one.state() == step, "state %d", one.state());
    attr = attrs[step];
    CHECK(ibv_modify_qp(one.qp, &attr, needed[step]) == 0, "step %d", step);
  }
  CHECK(one.state() == IBV_QPS_RTS, "state %d", one.state());
}

void states() {
  Side one(0), other(1);
  const auto write = [&] {
    return one.write(1, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0));
  };
  CHECK(write() == EINVAL && one.receive(1) == EINVAL, "RESET");
  ibv_qp_attr attr = {};
  attr.qp_state = IBV_QPS_ERR;
  CHECK(ibv_modify_qp(one.qp, &attr, IBV_QP_STATE) == EINVAL, "RESET to ERR");
  attr = init_attr();
  CHECK(ibv_modify_qp(one.qp, &attr, kInitMask) == 0, "INIT");
  CHECK(write() == EINVAL && one.receive(2) == 0, "INIT");
  attr = rtr_attr(other, 200);
  CHECK(ibv_modify_qp(one.qp, &attr, kRtrMask) == 0, "RTR");
  CHECK(write() == EINVAL && one.receive(3) == 0, "RTR");
  attr = {};
  attr.qp_state = IBV_QPS_ERR;
  CHECK(ibv_modify_qp(one.qp, &attr, IBV_QP_STATE) == 0, "ERR");
  expect(one.poll(), 2, IBV_WC_WR_FLUSH_ERR);
  expect(one.poll(), 3, IBV_WC_WR_FLUSH_ERR);
  CHECK(write() == 0 && one.receive(4) == 0, "ERR");
  const uint64_t sum = one.poll().wr_id + one.poll().wr_id;
  CHECK(sum == 5, "flushed %llu", static_cast<unsigned long long>(sum));
}

void routes() {
  Side one(0), other(1);
  ibv_qp_attr attr = init_attr();
  CHECK(ibv_modify_qp(one.qp, &attr, kInitMask) == 0, "INIT");
  const auto to_rtr = [&](const std::function<void(ibv_qp_attr&)>& change) {
    ibv_qp_attr changed = rtr_attr(other, 200);
    change(changed);
    return ibv_modify_qp(one.qp, &changed, kRtrMask);
  };
  CHECK(to_rtr([](ibv_qp_attr& a) { a.ah_attr.is_global = 0; }) == EINVAL, "no header");
  CHECK(to_rtr([](ibv_qp_attr& a) { a.ah_attr.grh.sgid_index = 9; }) == EINVAL, "empty entry");
  CHECK(to_rtr([](ibv_qp_attr& a) { a.ah_attr.port_num = 2; }) == EINVAL, "port");
  CHECK(to_rtr([](ibv_qp_attr& a) { a.path_mtu = static_cast<ibv_mtu>(9); }) == EINVAL, "MTU");
  CHECK(to_rtr([](ibv_qp_attr& a) { a.ah_attr.grh.dgid.raw[15] ^= 0x55; }) == ETIMEDOUT, "nobody");
  CHECK(to_rtr([](ibv_qp_attr& a) {
          memset(a.ah_attr.grh.dgid.raw, 0, 16);
          a.ah_attr.grh.dgid.raw[0] = 0xfe;
          a.ah_attr.grh.dgid.raw[1] = 0x80;
        }) == ETIMEDOUT,
        "link-local");
  CHECK(to_rtr([](ibv_qp_attr&) {}) == 0, "right");
}

// A queue pair whose packets do not arrive: the other is not there, not ready, or expects others.
void lost(const std::function<void(Side&, Side&)>& prepare) {
  Side one(0), other(1);
  prepare(one, other);
  CHECK(one.write(1, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0)) == 0, "post");
  expect(one.poll(), 1, IBV_WC_RETRY_EXC_ERR);
  CHECK(one.state() == IBV_QPS_ERR, "state %d", one.state());
}

void rnr() {
  Options options;
  options.rnr_retry = 0;
  {
    Side one(0, options), other(1);
    connect(one, other, options);
    CHECK(one.write(1, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0), true) == 0, "post");
    expect(one.poll(), 1, IBV_WC_RNR_RETRY_EXC_ERR);
  }
  Side one(0), other(1);
  connect(one, other);
  one.memory[0] = 42;
  CHECK(one.write(1, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0), true) == 0, "post");
  one.none();
  CHECK(other.memory[0] == 0, "a refused message has written");
  CHECK(other.receive(9) == 0, "receive");
  expect(one.poll(100000000), 1, IBV_WC_SUCCESS);
  expect(other.poll(), 9, IBV_WC_SUCCESS);
  CHECK(other.memory[0] == 42, "nothing was written");
}

void places() {
  Options options;
  options.send_places = 2;
  Side one(0, options), other(1, options);
  connect(one, other);
  const auto write = [&](uint64_t id, unsigned flags) {
    return one.write(id, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0), false, flags);
  };
  // A place is free again when the completion was taken, and an unsignalled one with the next.
  CHECK(write(1, 0) == 0 && write(2, IBV_SEND_SIGNALED) == 0 && write(3, 0) == ENOMEM, "full");
  expect(one.poll(), 2, IBV_WC_SUCCESS);
  CHECK(write(3, IBV_SEND_SIGNALED) == 0 && write(4, IBV_SEND_SIGNALED) == 0, "free");
  expect(one.poll(), 3, IBV_WC_SUCCESS);
  expect(one.poll(), 4, IBV_WC_SUCCESS);
  for (uint64_t id = 0; id < 4; ++id) CHECK(other.receive(id) == 0, "receive");
  CHECK(other.receive(4) == ENOMEM, "a fifth of four");
}

void overflow() {
  Options options;
  options.completions = 4;
  Side one(0, options), other(1);
  connect(one, other);
  for (int number = 0; number < 5; ++number)
    CHECK(one.write(1, one.mr->lkey, one.at(0), 8, other.mr->rkey, other.at(0)) == 0, "post");
  ibv_async_event event;
  CHECK(ibv_get_async_event(one.context, &event) == 0, "event");
  CHECK(event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == one.cq, "%d", event.event_type);
  ibv_ack_async_event(&event);
  ibv_wc wc;
  CHECK(ibv_poll_cq(one.cq, 1, &wc) < 0, "an overflowed queue can be polled");
}

void builders() {
  Options plain;
  plain.ops = IBV_QP_EX_WITH_RDMA_WRITE;
  plain.mlx5_ops = MLX5DV_QP_EX_WITH_MR_INTERLEAVED;
  Side one(0, plain), other(1);
  CHECK(one.ex->wr_rdma_write != nullptr && one.ex->wr_rdma_write_imm == nullptr &&
            one.ex->wr_rdma_read == nullptr && one.ex->wr_send == nullptr,
        "builders that were not asked for");
  CHECK(one.mx->wr_mr_interleaved != nullptr && one.mx->wr_mkey_configure == nullptr, "of mlx5");
  Side full(0);
  connect(full, other);
  mlx5dv_mkey* key = full.key();
  CHECK(full.interleave(key, full.at(0), 4, 16, 32, full.mr->lkey, IBV_SEND_SIGNALED) == EOPNOTSUPP,
        "without IBV_SEND_INLINE");
  CHECK(full.interleave(full.key(1), full.at(0), 4, 16, 32, full.mr->lkey) == ENOMEM,
        "a key of one entry");
  mlx5dv_mr_interleaved entry = {full.at(0), 16, 16, full.mr->lkey};
  for (const int layouts : {0, 2}) {
    mlx5dv_mkey_conf_attr attr = {};
    ibv_wr_start(full.ex);
    full.ex->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
    mlx5dv_wr_mkey_configure(full.mx, key, 2, &attr);
    for (int number = 0; number < layouts; ++number)
      mlx5dv_wr_set_mkey_layout_interleaved(full.mx, 4, 1, &entry);
    CHECK(ibv_wr_complete(full.ex) == EINVAL, "%d layouts of 2 setters", layouts);
  }
  full.none();
}

void order_of_closing() {
  Side one(0);
  CHECK(ibv_destroy_cq(one.cq) == EBUSY, "a queue in use");
  CHECK(ibv_dealloc_pd(one.pd) == EBUSY, "a domain in use");
  CHECK(ibv_close_device(one.context) != 0, "a device in use");
  mlx5dv_mkey* key = one.key();
  CHECK(mlx5dv_destroy_mkey(key) == 0 && ibv_destroy_qp(one.qp) == 0, "key, queue pair");
  CHECK(ibv_dereg_mr(one.mr) == 0 && ibv_destroy_cq(one.cq) == 0, "region, queue");
  CHECK(ibv_dealloc_pd(one.pd) == 0 && ibv_close_device(one.context) == 0, "domain, device");
}

int write_to(Side& one, uint32_t rkey, uint64_t to, uint32_t length = 8) {
  return one.write(1, one.mr->lkey, one.at(0), length, rkey, to);
}

const std::map<std::string, std::function<void()>>& cases() {
  static const std::map<std::string, std::function<void()>> all = {
      {"band_small", [] { bands(512, 96, 64, true); }},
      {"band_of_the_largest_pitch", [] { bands(65535, 4097, 16, true); }},
      {"band_of_65536_is_cut_to_16_bits", [] { bands(65536, 4096, 16, false); }},
      {"every_attribute_of_a_step", masks},
      {"what_may_be_posted_in_which_state", states},
      {"routes", routes},
      {"key_unknown_to_the_other",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               return write_to(one, other.mr->rkey + 0x100, other.at(0));
             },
             true);
       }},
      {"key_of_a_region_that_is_gone",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               ibv_mr* mr = ibv_reg_mr(other.pd, other.memory.data(), 64, kAll);
               const uint32_t rkey = mr->rkey;
               CHECK(ibv_dereg_mr(mr) == 0, "dereg");
               return write_to(one, rkey, other.at(0));
             },
             true);
       }},
      {"region_of_another_domain",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               ibv_mr* mr = ibv_reg_mr(ibv_alloc_pd(other.context), other.memory.data(), 64, kAll);
               return write_to(one, mr->rkey, other.at(0));
             },
             true);
       }},
      {"region_without_remote_access",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               ibv_mr* mr = ibv_reg_mr(other.pd, other.memory.data(), 64, IBV_ACCESS_LOCAL_WRITE);
               return write_to(one, mr->rkey, other.at(0));
             },
             true);
       }},
      {"queue_pair_without_remote_access",
       [] {
         Options options;
         options.access = 0;
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) { return write_to(one, other.mr->rkey, other.at(0)); },
             true, options);
       }},
      {"one_byte_behind_the_region",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               return write_to(one, other.mr->rkey, other.at(other.memory.size() - 7));
             },
             true);
       }},
      {"band_that_was_never_described",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) { return write_to(one, other.key()->rkey, 0); }, true);
       }},
      {"one_byte_behind_the_band",
       [] {
         refused(
             IBV_WC_REM_ACCESS_ERR,
             [](Side& one, Side& other) {
               mlx5dv_mkey* key = other.key();
               CHECK(other.interleave(key, other.at(0), 4, 16, 32, other.mr->lkey) == 0, "umr");
               expect(other.poll(), 77, IBV_WC_SUCCESS);
               return write_to(one, key->rkey, 60);
             },
             true);
       }},
      {"own_key_unknown",
       [] {
         refused(
             IBV_WC_LOC_PROT_ERR,
             [](Side& one, Side& other) {
               return one.write(1, one.mr->lkey + 0x100, one.at(0), 8, other.mr->rkey, other.at(0));
             },
             false);
       }},
      {"own_region_left",
       [] {
         refused(
             IBV_WC_LOC_PROT_ERR,
             [](Side& one, Side& other) {
               return one.write(1, one.mr->lkey, one.at(one.memory.size() - 7), 8, other.mr->rkey,
                                other.at(0));
             },
             false);
       }},
      {"description_by_an_unknown_region",
       [] {
         refused(
             IBV_WC_LOC_PROT_ERR,
             [](Side& one, Side&) {
               const int error = one.interleave(one.key(), one.at(0), 4, 16, 32, 0x12345600,
                                                IBV_SEND_INLINE | IBV_SEND_SIGNALED, 1);
               return error;
             },
             false);
       }},
      {"message_above_the_port_s_limit",
       [] {
         refused(
             IBV_WC_LOC_LEN_ERR,
             [](Side& one, Side& other) {
               return write_to(one, other.mr->rkey, other.at(0), kMaxMessage + 1);
             },
             false);
       }},
      {"other_not_connected",
       [] {
         lost([](Side& one, Side& other) {
           ibv_qp_attr attr = init_attr();
           CHECK(ibv_modify_qp(one.qp, &attr, kInitMask) == 0, "INIT");
           attr = rtr_attr(other, 200);
           CHECK(ibv_modify_qp(one.qp, &attr, kRtrMask) == 0, "RTR");
           attr = rts_attr(100);
           CHECK(ibv_modify_qp(one.qp, &attr, kRtsMask) == 0, "RTS");
         });
       }},
      {"other_expects_another_sequence",
       [] {
         lost([](Side& one, Side& other) {
           connect(one, other);
           Side third(0);
           ibv_qp_attr attr = init_attr();
           CHECK(ibv_modify_qp(third.qp, &attr, kInitMask) == 0, "INIT");
           attr = rtr_attr(other, 200);
           CHECK(ibv_modify_qp(third.qp, &attr, kRtrMask) == 0, "RTR");
           attr = rts_attr(101);
           CHECK(ibv_modify_qp(third.qp, &attr, kRtsMask) == 0, "RTS");
           // The same destination from a queue pair that it was not connected to.
           std::swap(one.qp, third.qp);
           std::swap(one.ex, third.ex);
           std::swap(one.mr, third.mr);
           one.memory.swap(third.memory);
           std::swap(one.cq, third.cq);
         });
       }},
      {"other_was_stopped",
       [] {
         lost([](Side& one, Side& other) {
           connect(one, other);
           ibv_qp_attr attr = {};
           attr.qp_state = IBV_QPS_ERR;
           CHECK(ibv_modify_qp(other.qp, &attr, IBV_QP_STATE) == 0, "ERR");
         });
       }},
      {"no_receive", rnr},
      {"places_in_the_queues", places},
      {"completions_overflow", overflow},
      {"builders", builders},
      {"order_of_closing", order_of_closing},
  };
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc == 2 ? argv[1] : "";
  if (name == "list") {
    for (const auto& item : cases()) printf("%s\n", item.first.c_str());
    return 0;
  }
  const auto found = cases().find(name);
  if (found == cases().end()) return printf("there is no case %s\n", name.c_str()), 2;
  found->second();
  printf("ok\n");
  return 0;
}
