// The module of the RDMA routes: what Python calls. Python side: comm_pcie/rdma/module.py.
#include <comm_core/abi.h>
#include <comm_pcie/rdma_engine.h>
#include <errno.h>
#include <string.h>

#include <new>

using comm::pcie::rdma::Attached;
using comm::pcie::rdma::Counters;
using comm::pcie::rdma::Endpoint;
using comm::pcie::rdma::Engine;
using comm::pcie::rdma::Memory;
using comm::pcie::rdma::Outcome;
using comm::pcie::rdma::Pair;
using comm::pcie::rdma::Posted;
using comm::pcie::rdma::Settings;
using comm::pcie::rdma::Share;
using comm::pcie::rdma::VerbsApi;

struct comm_pcie_rdma_load_args_v1 {
  COMM_ARGS;
  const char* ibverbs;
  const char* mlx5;
  VerbsApi** api;  // written; kept for the life of the process
};

struct comm_pcie_rdma_devices_args_v1 {
  COMM_ARGS;
  const VerbsApi* api;
  char* names;  // written: one a line
  uint64_t capacity;
};

struct comm_pcie_rdma_open_args_v1 {
  COMM_ARGS;
  const VerbsApi* api;
  const char* nic;
  const uint32_t* peers;
  const Settings* settings;
  Engine** engine;        // written
  uint64_t* max_message;  // written
  uint32_t num_peers;
  uint32_t gid_index;
  uint32_t rank;
};

struct comm_pcie_rdma_endpoints_args_v1 {
  COMM_ARGS;
  const Engine* engine;
  Endpoint* endpoints;  // written: one a peer
};

struct comm_pcie_rdma_revalidate_args_v1 {
  COMM_ARGS;
  Engine* engine;
};

struct comm_pcie_rdma_connect_args_v1 {
  COMM_ARGS;
  Engine* engine;
  const Endpoint* endpoints;
  uint32_t count;
};

struct comm_pcie_rdma_register_args_v1 {
  COMM_ARGS;
  Engine* engine;
  const Memory* output;
  const Memory* landing;
  Pair** pair;           // written
  uint32_t* rkey;        // written
  uint32_t* band_rkeys;  // written: one a peer
  uint32_t* by_dmabuf;   // written: output, landing
};

struct comm_pcie_rdma_attach_args_v1 {
  COMM_ARGS;
  Pair* pair;
  const Attached* remotes;
  uint32_t count;
};

struct comm_pcie_rdma_rebind_args_v1 {
  COMM_ARGS;
  Pair* pair;
  const Share* shares;
  Outcome* outcome;  // written
  uint64_t timeout_ns;
  uint32_t count;
};

struct comm_pcie_rdma_exchange_args_v1 {
  COMM_ARGS;
  Pair* pair;
  const Share* shares;
  Outcome* outcome;  // written
  uint64_t timeout_ns;
  uint32_t count;
  uint32_t epoch;
};

struct comm_pcie_rdma_close_pair_args_v1 {
  COMM_ARGS;
  Pair* pair;
};

struct comm_pcie_rdma_quiesce_args_v1 {
  COMM_ARGS;
  Engine* engine;
  uint32_t* safe;  // written
  char* reason;    // written
  uint64_t capacity;
  uint64_t timeout_ns;
};

struct comm_pcie_rdma_heed_args_v1 {
  COMM_ARGS;
  Engine* engine;
  const uint32_t* word;
};

struct comm_pcie_rdma_abort_args_v1 {
  COMM_ARGS;
  Engine* engine;
  const char* reason;
};

struct comm_pcie_rdma_look_args_v1 {
  COMM_ARGS;
  const Engine* engine;
  Counters* counters;  // written
  uint32_t* broken;    // written: an OutcomeKind
  char* problem;       // written
  uint64_t capacity;
};

struct comm_pcie_rdma_posted_args_v1 {
  COMM_ARGS;
  const Engine* engine;
  Posted* posted;  // written: one a peer
};

struct comm_pcie_rdma_close_args_v1 {
  COMM_ARGS;
  Engine* engine;  // gone after a success
};

COMM_EXPORT int comm_pcie_rdma_load_v1(const comm_pcie_rdma_load_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_load_args_v1);
  VerbsApi* api = new VerbsApi();
  char text[512];
  if (!comm::pcie::rdma::load_verbs(args->ibverbs, args->mlx5, api, text, sizeof(text))) {
    delete api;
    return comm_fail(COMM_ERROR_UNSUPPORTED, "%s", text);
  }
  *args->api = api;
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_devices_v1(const comm_pcie_rdma_devices_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_devices_args_v1);
  COMM_REQUIRE(args->capacity > 0, "there is no room for names");
  args->names[0] = '\0';
  int count = 0;
  ibv_device** list = args->api->get_device_list(&count);
  // The kernel without RDMA answers with an error; that is no device as well.
  if (list == nullptr) return COMM_OK;
  uint64_t used = 0;
  for (int device_idx = 0; device_idx < count; ++device_idx) {
    const char* name = args->api->get_device_name(list[device_idx]);
    const int written = snprintf(args->names + used, args->capacity - used, "%s\n", name);
    if (written < 0 || used + static_cast<uint64_t>(written) >= args->capacity) break;
    used += static_cast<uint64_t>(written);
  }
  args->api->free_device_list(list);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_open_v1(const comm_pcie_rdma_open_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_open_args_v1);
  const Settings& settings = *args->settings;
  COMM_REQUIRE(settings.send_depth >= 1 && settings.send_depth <= 1024,
               "send_depth must be 1 to 1024, got %u", settings.send_depth);
  COMM_REQUIRE(settings.receive_depth >= 2 && settings.receive_depth <= 1024,
               "receive_depth must be 2 to 1024, got %u", settings.receive_depth);
  COMM_REQUIRE(settings.timeout <= 31, "timeout must be 0 to 31, got %u", settings.timeout);
  COMM_REQUIRE(settings.retry_count <= 7, "retry_count must be 0 to 7, got %u",
               settings.retry_count);
  COMM_REQUIRE(settings.traffic_class <= 255, "traffic_class must be 0 to 255, got %u",
               settings.traffic_class);
  COMM_REQUIRE(args->gid_index <= 255, "a GID index is 0 to 255, got %u", args->gid_index);
  uint64_t seen = 0;
  for (uint32_t peer_idx = 0; peer_idx < args->num_peers; ++peer_idx) {
    const uint32_t peer = args->peers[peer_idx];
    COMM_REQUIRE(peer < comm::pcie::rdma::kMaxRanks && peer != args->rank,
                 "rank %u can't be a peer of rank %u", peer, args->rank);
    COMM_REQUIRE((seen >> peer & 1) == 0, "rank %u is listed twice", peer);
    seen |= uint64_t{1} << peer;
  }
  Engine* engine = new Engine(*args->api, settings, args->rank);
  const int status = engine->open(args->nic, args->gid_index, args->peers, args->num_peers);
  if (status == COMM_OK) {
    *args->engine = engine;
    *args->max_message = engine->max_message();
    return COMM_OK;
  }
  char cause[COMM_ERROR_TEXT_SIZE];
  snprintf(cause, sizeof(cause), "%s", comm_error_text_);
  // What can't be destroyed stays: there is nobody to try again.
  if (engine->close() == COMM_OK) delete engine;
  return comm_fail(status, "%s", cause);
}

COMM_EXPORT int comm_pcie_rdma_endpoints_v1(const comm_pcie_rdma_endpoints_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_endpoints_args_v1);
  args->engine->endpoints(args->endpoints);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_revalidate_v1(const comm_pcie_rdma_revalidate_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_revalidate_args_v1);
  return args->engine->revalidate();
}

COMM_EXPORT int comm_pcie_rdma_connect_v1(const comm_pcie_rdma_connect_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_connect_args_v1);
  return args->engine->connect(args->endpoints, args->count);
}

COMM_EXPORT int comm_pcie_rdma_register_v1(const comm_pcie_rdma_register_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_register_args_v1);
  Pair* pair = nullptr;
  const int status = args->engine->register_pair(*args->output, *args->landing, &pair);
  if (status != COMM_OK) return status;
  *args->pair = pair;
  *args->rkey = pair->output_mr->rkey;
  for (size_t peer_idx = 0; peer_idx < pair->keys.size(); ++peer_idx)
    args->band_rkeys[peer_idx] = pair->keys[peer_idx].target->rkey;
  args->by_dmabuf[0] = pair->output_by_dmabuf;
  args->by_dmabuf[1] = pair->landing_by_dmabuf;
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_attach_v1(const comm_pcie_rdma_attach_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_attach_args_v1);
  return args->pair->engine->attach(args->pair, args->remotes, args->count);
}

COMM_EXPORT int comm_pcie_rdma_rebind_v1(const comm_pcie_rdma_rebind_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_rebind_args_v1);
  return args->pair->engine->rebind(args->pair, args->shares, args->count, args->timeout_ns,
                                    args->outcome);
}

COMM_EXPORT int comm_pcie_rdma_exchange_v1(const comm_pcie_rdma_exchange_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_exchange_args_v1);
  return args->pair->engine->exchange(args->pair, args->shares, args->count, args->epoch,
                                      args->timeout_ns, args->outcome);
}

COMM_EXPORT int comm_pcie_rdma_close_pair_v1(const comm_pcie_rdma_close_pair_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_close_pair_args_v1);
  return args->pair->engine->close_pair(args->pair);
}

COMM_EXPORT int comm_pcie_rdma_quiesce_v1(const comm_pcie_rdma_quiesce_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_quiesce_args_v1);
  return args->engine->quiesce(args->timeout_ns, args->safe, args->reason, args->capacity);
}

COMM_EXPORT int comm_pcie_rdma_heed_v1(const comm_pcie_rdma_heed_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_heed_args_v1);
  args->engine->heed(args->word);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_abort_v1(const comm_pcie_rdma_abort_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_abort_args_v1);
  args->engine->abort(args->reason);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_look_v1(const comm_pcie_rdma_look_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_look_args_v1);
  args->engine->count(args->counters);
  args->engine->problem(args->broken, args->problem, args->capacity);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_posted_v1(const comm_pcie_rdma_posted_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_posted_args_v1);
  args->engine->posted(args->posted);
  return COMM_OK;
}

COMM_EXPORT int comm_pcie_rdma_close_v1(const comm_pcie_rdma_close_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_rdma_close_args_v1);
  const int status = args->engine->close();
  if (status == COMM_OK) delete args->engine;
  return status;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_pcie_rdma_load_args_v1)
COMM_STRUCT(comm_pcie_rdma_devices_args_v1)
COMM_STRUCT(comm_pcie_rdma_open_args_v1)
COMM_STRUCT(comm_pcie_rdma_endpoints_args_v1)
COMM_STRUCT(comm_pcie_rdma_revalidate_args_v1)
COMM_STRUCT(comm_pcie_rdma_connect_args_v1)
COMM_STRUCT(comm_pcie_rdma_register_args_v1)
COMM_STRUCT(comm_pcie_rdma_attach_args_v1)
COMM_STRUCT(comm_pcie_rdma_rebind_args_v1)
COMM_STRUCT(comm_pcie_rdma_exchange_args_v1)
COMM_STRUCT(comm_pcie_rdma_close_pair_args_v1)
COMM_STRUCT(comm_pcie_rdma_quiesce_args_v1)
COMM_STRUCT(comm_pcie_rdma_heed_args_v1)
COMM_STRUCT(comm_pcie_rdma_abort_args_v1)
COMM_STRUCT(comm_pcie_rdma_look_args_v1)
COMM_STRUCT(comm_pcie_rdma_posted_args_v1)
COMM_STRUCT(comm_pcie_rdma_close_args_v1)
COMM_MODULE_KERNELS
COMM_MODULE_END(comm_pcie_rdma)
