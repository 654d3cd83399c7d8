// The module of the Sage2 encoding: statistics, quantize and pack, unpack, and all of it in one
// call over windows. Python side: comm_lowp/kernels.py.
#include <comm_core/abi.h>
#include <comm_lowp/direct.cuh>
#include <comm_lowp/finalize.cuh>
#include <comm_lowp/pack.cuh>
#include <comm_lowp/statistics.cuh>
#include <comm_lowp/unpack.cuh>

using comm_lowp::Bfloat16;
using comm_lowp::Float16;
using comm_lowp::Geometry;
using comm_lowp::Partials;
using comm_lowp::Payload;
using comm_lowp::View;

// Names without a namespace, for the comparison of sizes at load time.
typedef Geometry comm_lowp_geometry_v1;

// Bits of `flags`: which kernels of a call are launched with programmatic dependent launch. Twins:
// comm_lowp/kernels.py, _PDL and _PDL_FIRST.
constexpr uint32_t kProgrammatic = 1;  // those that follow one of the same call
// The first one too. What it follows is somebody else's: if that waits for other ranks and lets its
// successors start early (see `follow`), ranks that share a GPU can come to a standstill.
constexpr uint32_t kProgrammaticFirst = 2;

struct comm_lowp_statistics_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Geometry* geometry;  // host memory, here and below
  View q, k, v;
  Partials partials;
  float* statistics;   // null: the partial results are all that is wanted
  uint32_t* counters;  // [B * H + 1], 0 between launches
  uint32_t flags;
  uint32_t unused;
};

struct comm_lowp_finalize_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Geometry* geometry;
  const float* gathered;
  const uint16_t* mean;
  Partials partials;
  uint16_t* k_mean;
  float* q_amax;
  float* k_amax;
  float* v_scale;
  float* own_v_scale;
  uint32_t flags;
  uint32_t unused;
};

struct comm_lowp_pack_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Geometry* geometry;
  View q, k, v;
  const uint16_t* k_mean;
  const float* q_amax;
  const float* k_amax;
  const float* v_scale;
  void* destinations[comm::kMaxRanks];
  uint32_t flags;
  uint32_t parts;
};

struct comm_lowp_unpack_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Geometry* geometry;
  const uint8_t* received;
  uint8_t* q;
  uint8_t* k;
  uint8_t* v;
  float* q_scale;
  float* k_scale;
  uint32_t scale_sequence;
  uint32_t flags;
};

struct comm_lowp_scatter_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Geometry* geometry;
  const comm::Session* session;  // host memory
  View q, k, v;
  Partials partials;
  uint32_t* counters;  // [B * H + 3], 0 between launches: of `statistics`, and two of `pack`
  uint16_t* k_mean;
  float* q_amax;
  float* k_amax;
  float* v_scale;  // of all heads
  uint8_t* out_q;
  uint8_t* out_k;
  uint8_t* out_v;
  float* out_q_scale;
  float* out_k_scale;
  float* out_v_scale;
  uint8_t* windows[comm::kMaxRanks];  // where the window begins on every rank, as this one maps it
  uint64_t statistics_offset;         // in the window
  uint32_t window;
  uint32_t gather_operation;
  uint32_t close_operation;
  uint32_t flags;
};

namespace {

// The flags of the first kernel of a call, for `launch`.
uint32_t first_of(uint32_t flags) { return flags & kProgrammaticFirst ? kProgrammatic : 0; }

// `flags`: kProgrammatic or nothing.
template <class Params>
int launch(const char* name, void (*kernel)(Params), dim3 grid, uint32_t threads,
           cudaStream_t stream, uint32_t flags, const Params& params) {
  if (grid.x == 0) return COMM_OK;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = flags & kProgrammatic;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params);
  return error == cudaSuccess ? COMM_OK : comm_fail_cuda(error, name, __FILE__, __LINE__);
}

// Leave the function with the status of a call that failed.
#define COMM_TRY(call)                                  \
  do {                                                  \
    if (int comm_status_ = (call)) return comm_status_; \
  } while (0)

int check_geometry(const Geometry& g) {
  COMM_REQUIRE(g.head_dim == 64 || g.head_dim == 128, "head_dim must be 64 or 128, got %u",
               g.head_dim);
  COMM_REQUIRE(g.world_size >= 1 && g.world_size <= comm::kMaxRanks && g.rank < g.world_size,
               "rank %u of %u: at most %u ranks", g.rank, g.world_size, comm::kMaxRanks);
  COMM_REQUIRE(g.batch >= 1 && g.local_sequence >= 1 && g.heads >= 1 && g.heads % g.world_size == 0,
               "batch %u, sequence %u, heads %u for %u ranks", g.batch, g.local_sequence, g.heads,
               g.world_size);
  // Indices of rows and of blocks have 32 bits.
  COMM_REQUIRE(uint64_t(g.batch) * g.local_sequence * g.heads * g.head_dim < (1ull << 31) &&
                   uint64_t(g.world_size) * g.local_sequence < (1ull << 31),
               "a tensor must have fewer than 2^31 elements and 2^31 global rows");
  COMM_REQUIRE(g.used_sequence >= 1 && g.used_sequence <= g.world_size * g.local_sequence &&
                   g.used_sequence < (1u << 24),
               "used_sequence %u of %u rows: it must be below 2^24", g.used_sequence,
               g.world_size * g.local_sequence);
  COMM_REQUIRE(
      g.q_group_log2 >= 4 && g.q_group_log2 <= 5 && g.k_group_log2 >= 6 && g.k_group_log2 <= 7,
      "groups of 2^%u and 2^%u rows", g.q_group_log2, g.k_group_log2);
  COMM_REQUIRE((g.q_block == 64 || g.q_block == 128) && (g.v_block == 64 || g.v_block == 128),
               "blocks of %u and %u rows", g.q_block, g.v_block);
  return COMM_OK;
}

int check_view(const char* name, const View& view) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(view.data) | uint64_t(2 * view.batch_stride) |
                        uint64_t(2 * view.row_stride) | uint64_t(2 * view.head_stride);
  COMM_REQUIRE(bits % 16 == 0, "%s: rows must be aligned to 16 bytes (address %p)", name,
               static_cast<const void*>(view.data));
  return COMM_OK;
}

int check_aligned(const char* name, const void* address) {
  COMM_REQUIRE(reinterpret_cast<uintptr_t>(address) % 16 == 0,
               "%s must be aligned to 16 bytes, is at %p", name, address);
  return COMM_OK;
}

int check_views(const View& q, const View& k, const View& v) {
  COMM_TRY(check_view("q", q));
  COMM_TRY(check_view("k", k));
  return check_view("v", v);
}

// `params` but for the numbers of blocks, which follow from what is there.
int run_statistics(comm_lowp::StatisticsParams* params, cudaStream_t stream, uint32_t flags) {
  const Geometry& g = params->geometry;
  const uint32_t num_chunks = comm_lowp::chunks(g);
  const uint32_t q_rows = comm_lowp::slots(g.local_sequence, g.q_group_log2) << g.q_group_log2;
  if (params->q.data != nullptr)
    params->q_tiles = comm_lowp::ceil_div(q_rows, comm_lowp::kChunkRows);
  if (params->k.data != nullptr) params->k_chunks = num_chunks;
  if (params->v.data != nullptr) params->v_chunks = num_chunks;
  const uint32_t blocks =
      (params->q_tiles + params->k_chunks + params->v_chunks) * g.heads * g.batch;
  void (*kernel)(comm_lowp::StatisticsParams);
  if (g.head_dim == 64) {
    kernel = g.bfloat16 ? comm_lowp::statistics_kernel<Bfloat16, 64>
                        : comm_lowp::statistics_kernel<Float16, 64>;
  } else {
    kernel = g.bfloat16 ? comm_lowp::statistics_kernel<Bfloat16, 128>
                        : comm_lowp::statistics_kernel<Float16, 128>;
  }
  return launch("statistics_kernel", kernel, dim3(blocks), g.head_dim, stream, flags, *params);
}

int run_finalize(const comm_lowp::FinalizeParams& params, cudaStream_t stream, uint32_t flags) {
  const Geometry& g = params.geometry;
  const dim3 grid(comm_lowp::finalize_parts(g), g.batch * g.heads);
  COMM_REQUIRE(grid.y < 65536, "batch * heads must be below 65,536, is %u", grid.y);
  return launch(
      "finalize_kernel",
      g.bfloat16 ? comm_lowp::finalize_kernel<Bfloat16> : comm_lowp::finalize_kernel<Float16>, grid,
      comm_lowp::kFinalizeThreads, stream, flags, params);
}

// `params` but for the fields that `plan_pack` sets.
int run_pack(comm_lowp::PackParams* params, cudaStream_t stream, uint32_t flags) {
  const Geometry& g = params->geometry;
  params->payload = comm_lowp::payload(g);
  comm_lowp::plan_pack(params);
  const uint32_t scale_blocks =
      params->parts & comm_lowp::kPartScales ? comm_lowp::kPackScaleBlocks * g.world_size : 0;
  void (*kernel)(comm_lowp::PackParams);
  if (g.head_dim == 64) {
    kernel =
        g.bfloat16 ? comm_lowp::pack_kernel<Bfloat16, 64> : comm_lowp::pack_kernel<Float16, 64>;
  } else {
    kernel =
        g.bfloat16 ? comm_lowp::pack_kernel<Bfloat16, 128> : comm_lowp::pack_kernel<Float16, 128>;
  }
  return launch("pack_kernel", kernel,
                dim3(params->finalize_blocks + params->data_blocks + scale_blocks),
                comm_lowp::kPackThreads, stream, flags, *params);
}

int run_unpack(comm_lowp::UnpackParams* params, uint32_t scale_sequence, cudaStream_t stream,
               uint32_t flags) {
  const Geometry& g = params->geometry;
  COMM_REQUIRE(scale_sequence >= 1 && scale_sequence <= g.world_size * g.local_sequence,
               "scale_sequence %u of %u rows", scale_sequence, g.world_size * g.local_sequence);
  params->payload = comm_lowp::payload(g);
  comm_lowp::plan_unpack(params, scale_sequence);
  const uint32_t blocks = params->v_blocks + params->copy_blocks + comm_lowp::kUnpackScaleBlocks;
  return launch("unpack_kernel",
                g.head_dim == 64 ? comm_lowp::unpack_kernel<64> : comm_lowp::unpack_kernel<128>,
                dim3(blocks), comm_lowp::kUnpackThreads, stream, flags, *params);
}

}  // namespace

COMM_EXPORT int comm_lowp_statistics_v1(const comm_lowp_statistics_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_statistics_args_v1);
  COMM_TRY(check_geometry(*args->geometry));
  COMM_TRY(check_views(args->q, args->k, args->v));
  COMM_REQUIRE(args->statistics == nullptr || args->counters != nullptr,
               "statistics: there are no counters for those of a whole rank");
  comm_lowp::StatisticsParams params = {};
  params.geometry = *args->geometry;
  params.q = args->q;
  params.k = args->k;
  params.v = args->v;
  params.partials = args->partials;
  params.targets[0] = args->statistics;
  params.num_targets = args->statistics != nullptr;
  params.counters = args->counters;
  return run_statistics(&params, args->stream, first_of(args->flags));
}

COMM_EXPORT int comm_lowp_finalize_v1(const comm_lowp_finalize_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_finalize_args_v1);
  COMM_TRY(check_geometry(*args->geometry));
  COMM_REQUIRE(args->gathered != nullptr || args->mean != nullptr || args->k_amax == nullptr,
               "finalize: the mean of K is neither given nor in gathered statistics");
  comm_lowp::FinalizeParams params = {*args->geometry, args->gathered, args->mean,
                                      args->partials,  args->k_mean,   args->q_amax,
                                      args->k_amax,    args->v_scale,  args->own_v_scale};
  return run_finalize(params, args->stream, first_of(args->flags));
}

COMM_EXPORT int comm_lowp_pack_v1(const comm_lowp_pack_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_pack_args_v1);
  const Geometry& g = *args->geometry;
  COMM_TRY(check_geometry(g));
  COMM_TRY(check_views(args->q, args->k, args->v));
  COMM_TRY(check_aligned("k_mean", args->k_mean));
  comm_lowp::PackParams params = {};
  params.geometry = g;
  params.q = args->q;
  params.k = args->k;
  params.v = args->v;
  params.k_mean = args->k_mean;
  params.q_amax = args->q_amax;
  params.k_amax = args->k_amax;
  params.v_scale = args->v_scale;
  params.parts = args->parts;
  for (uint32_t rank = 0; rank < g.world_size; ++rank) {
    COMM_TRY(check_aligned("a destination", args->destinations[rank]));
    params.destinations[rank] = static_cast<uint8_t*>(args->destinations[rank]);
  }
  return run_pack(&params, args->stream, first_of(args->flags));
}

COMM_EXPORT int comm_lowp_unpack_v1(const comm_lowp_unpack_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_unpack_args_v1);
  COMM_TRY(check_geometry(*args->geometry));
  COMM_TRY(check_aligned("the payload", args->received));
  COMM_REQUIRE((args->q == nullptr) == (args->k == nullptr), "unpack: q and k go together");
  COMM_TRY(check_aligned("q", args->q));
  COMM_TRY(check_aligned("k", args->k));
  COMM_TRY(check_aligned("v", args->v));
  comm_lowp::UnpackParams params = {};
  params.geometry = *args->geometry;
  params.received = args->received;
  params.q = args->q;
  params.k = args->k;
  params.v = args->v;
  params.q_scale = args->q_scale;
  params.k_scale = args->k_scale;
  return run_unpack(&params, args->scale_sequence, args->stream, first_of(args->flags));
}

COMM_EXPORT int comm_lowp_scatter_v1(const comm_lowp_scatter_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_lowp_scatter_args_v1);
  const Geometry& g = *args->geometry;
  const comm::Session& session = *args->session;
  const cudaStream_t stream = args->stream;
  const uint32_t flags = args->flags;
  COMM_TRY(check_geometry(g));
  COMM_TRY(check_views(args->q, args->k, args->v));
  COMM_REQUIRE(session.rank == g.rank && session.world_size == g.world_size,
               "scatter: rank %u of %u, but the session is rank %u of %u", g.rank, g.world_size,
               session.rank, session.world_size);
  COMM_TRY(check_aligned("k_mean", args->k_mean));
  COMM_TRY(check_aligned("out.q", args->out_q));
  COMM_TRY(check_aligned("out.k", args->out_k));
  COMM_TRY(check_aligned("out.v", args->out_v));
  const Payload payload = comm_lowp::payload(g);
  const uint64_t bytes = 4 * comm_lowp::statistics(g).count;
  COMM_REQUIRE(args->statistics_offset >= g.world_size * payload.chunk_bytes &&
                   args->statistics_offset % 16 == 0,
               "scatter: the statistics at %llu of the window overlap the payload of %llu bytes",
               (unsigned long long)args->statistics_offset,
               (unsigned long long)(g.world_size * payload.chunk_bytes));
  // `statistics` and `pack` wait for other ranks at their end. What follows them is not launched
  // early: where ranks share a GPU, its blocks could hold what the other ranks' kernels need.
  constexpr uint32_t kAfterWait = 0;
  const uint32_t rows = g.batch * g.heads;
  comm_lowp::StatisticsParams statistics = {};
  statistics.geometry = g;
  statistics.q = args->q;
  statistics.k = args->k;
  statistics.v = args->v;
  statistics.partials = args->partials;
  statistics.gather = {session, args->statistics_offset, args->window, args->gather_operation};
  statistics.num_targets = g.world_size;
  statistics.counters = args->counters;
  // In a different order on every rank, this rank last.
  for (uint32_t step = 0; step < g.world_size; ++step) {
    uint8_t* window = args->windows[(g.rank + 1 + step) % g.world_size];
    statistics.targets[step] =
        reinterpret_cast<float*>(window + args->statistics_offset + g.rank * bytes);
  }
  COMM_TRY(run_statistics(&statistics, stream, first_of(flags)));
  uint8_t* own = args->windows[g.rank];
  comm_lowp::PackParams pack = {};
  pack.geometry = g;
  pack.q = args->q;
  pack.k = args->k;
  pack.v = args->v;
  pack.k_mean = args->k_mean;
  pack.q_amax = args->q_amax;
  pack.k_amax = args->k_amax;
  pack.v_scale = args->v_scale;
  pack.close = {session, 0, args->window, args->close_operation};
  pack.finalize = {g,
                   reinterpret_cast<const float*>(own + args->statistics_offset),
                   nullptr,
                   args->partials,
                   args->k_mean,
                   args->q_amax,
                   args->k_amax,
                   args->v_scale,
                   args->out_v_scale};
  pack.blocks_done = args->counters + rows + 1;
  pack.finalized = args->counters + rows + 2;
  pack.finalize_parts = comm_lowp::finalize_parts(g);
  pack.finalize_blocks = pack.finalize_parts * rows;
  pack.parts = comm_lowp::kPartQ | comm_lowp::kPartK | comm_lowp::kPartV | comm_lowp::kPartScales;
  for (uint32_t rank = 0; rank < g.world_size; ++rank)
    pack.destinations[rank] = args->windows[rank] + g.rank * payload.chunk_bytes;
  COMM_TRY(run_pack(&pack, stream, kAfterWait));
  comm_lowp::UnpackParams unpack = {};
  unpack.geometry = g;
  unpack.received = own;
  unpack.q = args->out_q;
  unpack.k = args->out_k;
  unpack.v = args->out_v;
  unpack.q_scale = args->out_q_scale;
  unpack.k_scale = args->out_k_scale;
  unpack.v_scale = args->out_v_scale;
  unpack.abort = session.poison ? &session.signals[session.rank]->abort.value : nullptr;
  return run_unpack(&unpack, g.used_sequence, stream, kAfterWait);
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_lowp_finalize_args_v1)
COMM_STRUCT(comm_lowp_geometry_v1)
COMM_STRUCT(comm_lowp_pack_args_v1)
COMM_STRUCT(comm_lowp_scatter_args_v1)
COMM_STRUCT(comm_lowp_statistics_args_v1)
COMM_STRUCT(comm_lowp_unpack_args_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(comm_lowp::statistics_kernel<Bfloat16, 64>)
COMM_KERNEL(comm_lowp::statistics_kernel<Bfloat16, 128>)
COMM_KERNEL(comm_lowp::statistics_kernel<Float16, 64>)
COMM_KERNEL(comm_lowp::statistics_kernel<Float16, 128>)
COMM_KERNEL(comm_lowp::finalize_kernel<Bfloat16>)
COMM_KERNEL(comm_lowp::finalize_kernel<Float16>)
COMM_KERNEL(comm_lowp::pack_kernel<Bfloat16, 64>)
COMM_KERNEL(comm_lowp::pack_kernel<Bfloat16, 128>)
COMM_KERNEL(comm_lowp::pack_kernel<Float16, 64>)
COMM_KERNEL(comm_lowp::pack_kernel<Float16, 128>)
COMM_KERNEL(comm_lowp::unpack_kernel<64>)
COMM_KERNEL(comm_lowp::unpack_kernel<128>)
COMM_MODULE_END(comm_lowp_sage2)
