// Finds the functions of libibverbs and libmlx5.
#include <comm_pcie/verbs_api.h>
#include <dlfcn.h>
#include <stdio.h>

namespace comm {
namespace pcie {
namespace rdma {

namespace {

struct Symbol {
  const char* name;
  const char* version;
  size_t offset;
  bool required;
};

#define SYMBOL(name, version, field) {name, version, offsetof(VerbsApi, field), true}

// The versions are those of the declarations in the headers: libibverbs still has functions of its
// first interface under the same names.
const Symbol kIbverbs[] = {
    SYMBOL("ibv_get_device_list", "IBVERBS_1.1", get_device_list),
    SYMBOL("ibv_free_device_list", "IBVERBS_1.1", free_device_list),
    SYMBOL("ibv_get_device_name", "IBVERBS_1.1", get_device_name),
    SYMBOL("ibv_close_device", "IBVERBS_1.1", close_device),
    SYMBOL("ibv_query_port", "IBVERBS_1.1", query_port),
    SYMBOL("_ibv_query_gid_ex", "IBVERBS_1.11", query_gid_ex),
    SYMBOL("ibv_alloc_pd", "IBVERBS_1.1", alloc_pd),
    SYMBOL("ibv_dealloc_pd", "IBVERBS_1.1", dealloc_pd),
    SYMBOL("ibv_reg_mr", "IBVERBS_1.1", reg_mr),
    {"ibv_reg_dmabuf_mr", "IBVERBS_1.12", offsetof(VerbsApi, reg_dmabuf_mr), false},
    SYMBOL("ibv_dereg_mr", "IBVERBS_1.1", dereg_mr),
    SYMBOL("ibv_create_cq", "IBVERBS_1.1", create_cq),
    SYMBOL("ibv_destroy_cq", "IBVERBS_1.1", destroy_cq),
    SYMBOL("ibv_modify_qp", "IBVERBS_1.1", modify_qp),
    SYMBOL("ibv_destroy_qp", "IBVERBS_1.1", destroy_qp),
    SYMBOL("ibv_qp_to_qp_ex", "IBVERBS_1.6", qp_to_qp_ex),
    SYMBOL("ibv_wc_status_str", "IBVERBS_1.1", wc_status_str),
    SYMBOL("ibv_event_type_str", "IBVERBS_1.1", event_type_str),
    SYMBOL("ibv_get_async_event", "IBVERBS_1.1", get_async_event),
    SYMBOL("ibv_ack_async_event", "IBVERBS_1.1", ack_async_event),
};

const Symbol kMlx5[] = {
    SYMBOL("mlx5dv_is_supported", "MLX5_1.8", mlx5_is_supported),
    SYMBOL("mlx5dv_open_device", "MLX5_1.7", mlx5_open_device),
    SYMBOL("mlx5dv_create_qp", "MLX5_1.3", mlx5_create_qp),
    SYMBOL("mlx5dv_qp_ex_from_ibv_qp_ex", "MLX5_1.10", mlx5_qp_ex_from_ibv_qp_ex),
    SYMBOL("mlx5dv_create_mkey", "MLX5_1.10", mlx5_create_mkey),
    SYMBOL("mlx5dv_destroy_mkey", "MLX5_1.10", mlx5_destroy_mkey),
};

template <size_t kCount>
bool find(const char* library, const char* package, const Symbol (&symbols)[kCount], VerbsApi* api,
          char* text, size_t text_size) {
  // There is no dlclose: objects of the library hold threads and handlers of their own.
  void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    snprintf(text, text_size, "%s can't be loaded (%s): install %s", library, dlerror(), package);
    return false;
  }
  for (const Symbol& symbol : symbols) {
    void* found = dlvsym(handle, symbol.name, symbol.version);
    // A library that was built as one file without versions has it unversioned.
    if (found == nullptr) found = dlsym(handle, symbol.name);
    if (found == nullptr && symbol.required) {
      snprintf(text, text_size,
               "%s has no %s (%s): rdma-core 36 or newer is needed, install a newer %s", library,
               symbol.name, symbol.version, package);
      return false;
    }
    *reinterpret_cast<void**>(reinterpret_cast<char*>(api) + symbol.offset) = found;
  }
  return true;
}

}  // namespace

bool load_verbs(const char* ibverbs, const char* mlx5, VerbsApi* api, char* text,
                size_t text_size) {
  return find(ibverbs, "libibverbs1", kIbverbs, api, text, text_size) &&
         find(mlx5, "ibverbs-providers", kMlx5, api, text, text_size);
}

}  // namespace rdma
}  // namespace pcie
}  // namespace comm
