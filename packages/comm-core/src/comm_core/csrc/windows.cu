// The module of windows: exchanges between windows, barriers, and plans executed by the copy
// engines. Python side: comm_core/windows/launch.py.
#include <comm_core/abi.h>
#include <comm_core/exchange_kernels.cuh>

using comm::ExchangeParams;
using comm::PlanEntry;
using comm::PlanTable;
using comm::Session;

// Names without a namespace, for the comparison of sizes at load time.
typedef Session comm_core_session_v1;

struct comm_core_exchange_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;  // host memory
  const PlanTable* plan;   // device memory
  const void* sources[comm::kMaxSources];
  void* destination;
  uint64_t window_offset;
  uint32_t window;
  uint32_t blocks_per_peer;
  uint32_t operation;
  uint32_t unused;
};

struct comm_core_exchange_copies_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;   // host memory
  const PlanTable* plan;    // device memory
  const PlanTable* copies;  // host memory: the same plan, rows left whole
  const void* sources[comm::kMaxSources];
  void* destinations[comm::kMaxRanks];  // of every rank, as this rank maps them
  uint64_t window_offset;
  uint32_t window;
  uint32_t operation;
};

struct comm_core_barrier_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;  // host memory
  uint32_t operation;
  uint32_t unused;
};

struct comm_core_settle_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;  // host memory
  void* destination;
  uint64_t bytes;
};

namespace {

constexpr int kSettleBlocks = 32;  // nearly always they leave at once

// Enqueue one entry: the copy engines take one or two pitched levels at once, further ones are
// enqueued one by one.
int enqueue_entry(const PlanEntry& entry, char* target, const char* source, cudaStream_t stream) {
  uint32_t levels[comm::kMaxLevels];
  uint32_t num_levels = 0;
  for (uint32_t level = 0; level < comm::kMaxLevels; ++level) {
    if (entry.repeat[level] > 1) levels[num_levels++] = level;
  }
  const char* from = source + entry.source_offset;
  char* to = target + entry.target_offset;
  if (num_levels == 0) {
    COMM_CUDA(cudaMemcpyAsync(to, from, entry.row_bytes, cudaMemcpyDeviceToDevice, stream));
    return COMM_OK;
  }
  uint32_t inner = levels[num_levels - 1];
  uint32_t outer = 1;
  for (uint32_t i = 0; i + 1 < num_levels; ++i) outer *= entry.repeat[levels[i]];
  for (uint32_t index = 0; index < outer; ++index) {
    uint64_t source_at = 0, target_at = 0;
    uint32_t rest = index;
    for (uint32_t i = num_levels - 1; i-- > 0;) {
      uint32_t step = rest % entry.repeat[levels[i]];
      rest /= entry.repeat[levels[i]];
      source_at += step * entry.source_pitch[levels[i]];
      target_at += step * entry.target_pitch[levels[i]];
    }
    COMM_CUDA(cudaMemcpy2DAsync(to + target_at, entry.target_pitch[inner], from + source_at,
                                entry.source_pitch[inner], entry.row_bytes, entry.repeat[inner],
                                cudaMemcpyDeviceToDevice, stream));
  }
  return COMM_OK;
}

int check_session(const Session* session) {
  COMM_REQUIRE(session->world_size >= 1 && session->world_size <= comm::kMaxRanks &&
                   session->rank < session->world_size,
               "rank %u of %u: at most %u ranks", session->rank, session->world_size,
               comm::kMaxRanks);
  return COMM_OK;
}

}  // namespace

COMM_EXPORT int comm_core_exchange_v1(const comm_core_exchange_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_exchange_args_v1);
  if (int status = check_session(args->session)) return status;
  COMM_REQUIRE(args->blocks_per_peer >= 1, "exchange: blocks_per_peer must be at least 1");
  ExchangeParams params = {};
  params.session = *args->session;
  params.plan = args->plan;
  for (uint32_t i = 0; i < comm::kMaxSources; ++i)
    params.sources[i] = static_cast<const char*>(args->sources[i]);
  params.destination = static_cast<char*>(args->destination);
  params.window_offset = args->window_offset;
  params.window = args->window;
  params.blocks_per_peer = args->blocks_per_peer;
  params.operation = args->operation;
  comm::exchange_push_kernel<<<args->session->world_size * args->blocks_per_peer,
                               comm::kExchangeThreads, 0, args->stream>>>(params);
  COMM_CUDA(cudaGetLastError());
  return COMM_OK;
}

COMM_EXPORT int comm_core_exchange_copies_v1(const comm_core_exchange_copies_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_exchange_copies_args_v1);
  if (int status = check_session(args->session)) return status;
  const Session& session = *args->session;
  ExchangeParams params = {};
  params.session = session;
  params.plan = args->plan;
  params.destination = static_cast<char*>(args->destinations[session.rank]);
  params.window_offset = args->window_offset;
  params.window = args->window;
  params.operation = args->operation;
  comm::exchange_open_kernel<<<1, 32, 0, args->stream>>>(params);
  COMM_CUDA(cudaGetLastError());
  const PlanEntry* entries = comm::plan_entries(args->copies);
  for (uint32_t step = 1; step <= session.world_size; ++step) {
    // The peers in a different order on every rank, this rank's own share last.
    uint32_t peer = (session.rank + step) % session.world_size;
    for (uint32_t i = args->copies->first[peer]; i < args->copies->first[peer + 1]; ++i) {
      int status =
          enqueue_entry(entries[i], static_cast<char*>(args->destinations[peer]),
                        static_cast<const char*>(args->sources[entries[i].source]), args->stream);
      if (status != COMM_OK) return status;
    }
  }
  comm::exchange_close_kernel<<<1, 32, 0, args->stream>>>(params);
  COMM_CUDA(cudaGetLastError());
  return COMM_OK;
}

COMM_EXPORT int comm_core_barrier_v1(const comm_core_barrier_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_barrier_args_v1);
  if (int status = check_session(args->session)) return status;
  comm::barrier_kernel<<<1, 32, 0, args->stream>>>(*args->session, args->operation);
  COMM_CUDA(cudaGetLastError());
  return COMM_OK;
}

COMM_EXPORT int comm_core_settle_v1(const comm_core_settle_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_core_settle_args_v1);
  if (int status = check_session(args->session)) return status;
  comm::settle_kernel<<<kSettleBlocks, comm::kExchangeThreads, 0, args->stream>>>(
      *args->session, static_cast<char*>(args->destination), args->bytes);
  COMM_CUDA(cudaGetLastError());
  return COMM_OK;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_core_exchange_args_v1)
COMM_STRUCT(comm_core_exchange_copies_args_v1)
COMM_STRUCT(comm_core_barrier_args_v1)
COMM_STRUCT(comm_core_session_v1)
COMM_STRUCT(comm_core_settle_args_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(comm::exchange_push_kernel)
COMM_KERNEL(comm::exchange_open_kernel)
COMM_KERNEL(comm::exchange_close_kernel)
COMM_KERNEL(comm::barrier_kernel)
COMM_KERNEL(comm::settle_kernel)
COMM_MODULE_END(comm_core_windows)
