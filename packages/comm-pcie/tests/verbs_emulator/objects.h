// What a process holds of the fabric: the structures that programs get pointers to.
#ifndef VERBS_EMULATOR_OBJECTS_H_
#define VERBS_EMULATOR_OBJECTS_H_

#include <errno.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

#include <deque>
#include <map>
#include <vector>

#include "fabric.h"

#undef ibv_query_port
#undef ibv_reg_mr

namespace emu {

struct LocalQp;
struct LocalCq;

struct LocalContext;

// What programs see of a context, and whose it is.
struct ContextView {
  LocalContext* owner;
  verbs_context verbs;
};

struct LocalContext {
  Fabric* shared;
  uint32_t slot, nic;
  std::map<int32_t, LocalQp*> qps;  // by slot
  std::map<int32_t, LocalCq*> cqs;
  ContextView view;
};

struct LocalPd {
  ibv_pd pd;
  uint32_t slot;
};

struct LocalMr {
  ibv_mr mr;
  uint32_t slot;
};

struct LocalMkey {
  mlx5dv_mkey mkey;
  LocalContext* context;
  uint32_t slot;
};

struct LocalCq {
  ibv_cq cq;
  uint32_t slot;
};

// A request between posting and execution.
struct Request {
  Verb verb;
  uint64_t wr_id;
  unsigned flags;
  uint32_t rkey, imm_be;
  uint64_t remote_addr;
  std::vector<Sge> sges;
  // Of a description of a key.
  uint32_t key_slot, key_kind, access, repeat;
  uint64_t total;
  std::vector<Entry> entries;
  std::vector<Sge> list;
  uint32_t setters_left, frees;
  // Of a fault.
  uint64_t not_before_ns;
  bool dropped, lost, held, executed;
  uint32_t tries, status, keep;  // `keep`: bytes at the end that are withheld
};

struct LocalQp {
  ibv_qp_ex ex;  // first: programs have a pointer to its base
  mlx5dv_qp_ex mlx5;
  LocalContext* context;
  uint32_t slot;
  uint64_t has_ops, has_mlx5_ops;
  bool signal_all;
  std::vector<Request> building;
  int build_error;
  std::deque<Request> pending;  // posted and not completed, in order
  uint32_t unsignalled;         // places that the next completion gives back
};

inline LocalContext* local(ibv_context* context) {
  char* at = reinterpret_cast<char*>(verbs_get_ctx(context));
  return reinterpret_cast<ContextView*>(at - offsetof(ContextView, verbs))->owner;
}
inline LocalPd* local(ibv_pd* pd) { return reinterpret_cast<LocalPd*>(pd); }
inline LocalMr* local(ibv_mr* mr) { return reinterpret_cast<LocalMr*>(mr); }
inline LocalMkey* local(mlx5dv_mkey* key) { return reinterpret_cast<LocalMkey*>(key); }
inline LocalCq* local(ibv_cq* cq) { return reinterpret_cast<LocalCq*>(cq); }
inline LocalQp* local(ibv_qp* qp) { return reinterpret_cast<LocalQp*>(qp); }
inline LocalQp* local(ibv_qp_ex* qp) { return reinterpret_cast<LocalQp*>(qp); }
inline LocalQp* local(mlx5dv_qp_ex* qp) {
  return reinterpret_cast<LocalQp*>(reinterpret_cast<char*>(qp) - offsetof(LocalQp, mlx5));
}

template <typename Item, size_t kCount>
int take_slot(Item (&items)[kCount]) {
  for (size_t slot = 0; slot < kCount; ++slot)
    if (!items[slot].used) return static_cast<int>(slot);
  return -1;
}

// What a call returns that fails: the number, or null, and the number in errno.
inline int fail(int error) {
  errno = error;
  return error;
}

template <typename Pointer>
Pointer fail_null(int error) {
  errno = error;
  return nullptr;
}

// A new number for the key in `slot`: one that was destroyed is not the next one's.
inline uint32_t key_number(Fabric* shared, uint32_t slot) {
  return (slot + 1) << 8 | (++shared->generation & 0xff);
}

uint64_t now_ns();

// Of qp.cpp.
ibv_qp* create_qp(LocalContext* context, ibv_qp_init_attr_ex* attr, mlx5dv_qp_init_attr* mlx5);

// Of post.cpp.
void install_builders(LocalQp* qp);
int post_send(ibv_qp* qp, ibv_send_wr* request, ibv_send_wr** bad);
int post_receive(ibv_qp* qp, ibv_recv_wr* request, ibv_recv_wr** bad);

// Of testing.cpp: the contexts of this process. Under the lock.
void remember(LocalContext* context, bool alive);

// Of execute.cpp; all under the lock.
void run(LocalQp* qp);                        // executes what is due of its pending requests
void stop(Fabric* shared, uint32_t qp_slot);  // to the error state
void flush(LocalQp* qp);                      // completes what is pending on a stopped one
void release_held(LocalQp* qp);               // completions that a fault kept back
int poll_cq(ibv_cq* cq, int count, ibv_wc* wc);

}  // namespace emu

#endif  // VERBS_EMULATOR_OBJECTS_H_
