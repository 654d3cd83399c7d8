// The functions of libibverbs and libmlx5 that are used, found when they are needed.
//
// Nothing is linked: peer-to-peer routes work on machines without rdma-core, and a missing library
// or symbol is a reason and no failed load. What the headers define inline (ibv_poll_cq, ibv_wr_*,
// mlx5dv_wr_*) goes through the objects that these functions return.
#ifndef COMM_PCIE_VERBS_API_H_
#define COMM_PCIE_VERBS_API_H_

#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>

// Macros of the header over the functions whose addresses are kept here.
#undef ibv_query_port
#undef ibv_reg_mr

namespace comm {
namespace pcie {
namespace rdma {

struct VerbsApi {
  ibv_device** (*get_device_list)(int*);
  void (*free_device_list)(ibv_device**);
  const char* (*get_device_name)(ibv_device*);
  int (*close_device)(ibv_context*);
  int (*query_port)(ibv_context*, uint8_t, _compat_ibv_port_attr*);
  int (*query_gid_ex)(ibv_context*, uint32_t, uint32_t, ibv_gid_entry*, uint32_t, size_t);
  ibv_pd* (*alloc_pd)(ibv_context*);
  int (*dealloc_pd)(ibv_pd*);
  ibv_mr* (*reg_mr)(ibv_pd*, void*, size_t, int);
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t, size_t, uint64_t, int, int);  // may be null
  int (*dereg_mr)(ibv_mr*);
  ibv_cq* (*create_cq)(ibv_context*, int, void*, ibv_comp_channel*, int);
  int (*destroy_cq)(ibv_cq*);
  int (*modify_qp)(ibv_qp*, ibv_qp_attr*, int);
  int (*destroy_qp)(ibv_qp*);
  ibv_qp_ex* (*qp_to_qp_ex)(ibv_qp*);
  const char* (*wc_status_str)(ibv_wc_status);
  const char* (*event_type_str)(ibv_event_type);
  int (*get_async_event)(ibv_context*, ibv_async_event*);
  void (*ack_async_event)(ibv_async_event*);
  bool (*mlx5_is_supported)(ibv_device*);
  ibv_context* (*mlx5_open_device)(ibv_device*, mlx5dv_context_attr*);
  ibv_qp* (*mlx5_create_qp)(ibv_context*, ibv_qp_init_attr_ex*, mlx5dv_qp_init_attr*);
  mlx5dv_qp_ex* (*mlx5_qp_ex_from_ibv_qp_ex)(ibv_qp_ex*);
  mlx5dv_mkey* (*mlx5_create_mkey)(mlx5dv_mkey_init_attr*);
  int (*mlx5_destroy_mkey)(mlx5dv_mkey*);
};

// Fill `api` from the two libraries, which stay loaded; returns false and a text if one of them or
// a symbol is missing.
bool load_verbs(const char* ibverbs, const char* mlx5, VerbsApi* api, char* text, size_t text_size);

}  // namespace rdma
}  // namespace pcie
}  // namespace comm

#endif  // COMM_PCIE_VERBS_API_H_
