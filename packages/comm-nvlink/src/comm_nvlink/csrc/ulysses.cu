// The module of the NVLink exchange. Python side: comm_nvlink/launch.py.
#include <comm_core/abi.h>
#include <comm_nvlink/board.h>
#include <comm_nvlink/ulysses.cuh>

using comm::Session;
using comm::WindowEntry;
using comm::nvlink::Board;
using comm::nvlink::ExchangeParams;
using comm::nvlink::Flags;
using comm::nvlink::kMaxPeers;
using comm::nvlink::Table;

// `height` rows of `width` bytes for the copy engines. Written by comm_nvlink.table.
struct comm_nvlink_copy_v1 {
  uint64_t source_offset;
  uint64_t target_offset;
  uint64_t source_pitch;
  uint64_t target_pitch;
  uint64_t width;
  uint64_t height;
  uint64_t source;  // index of the operand
};

// Copies in lists: list i is [first[i], first[i + 1]). List c * ranks + p is chunk c of the rest
// for rank p; list chunks * ranks + p all of its chunks at once; list (chunks + 1) * ranks this
// rank's own share. Written by comm_nvlink.table; followed by first, then the copies, aligned to 8
// bytes.
struct comm_nvlink_copies_v1 {
  uint32_t chunks;
  uint32_t ranks;
  uint32_t num_lists;
  uint32_t unused;
};

// What a session never changes but its windows. Host memory.
struct comm_nvlink_state_v1 {
  const Session* session;
  const WindowEntry* windows;  // host memory, comm::kMaxRanks ranks each
  Flags* flags[kMaxPeers];     // every rank's, as this rank maps them
  Board* boards[kMaxPeers];    // every rank's
  cudaStream_t side;
  cudaEvent_t fork;
  cudaEvent_t join;
};

static_assert(sizeof(comm_nvlink_copy_v1) == 56, "mirrored by comm_nvlink.table");
static_assert(sizeof(comm_nvlink_copies_v1) == 16, "mirrored by comm_nvlink.table");
static_assert(sizeof(comm_nvlink_state_v1) == 168, "mirrored by comm_nvlink.launch");

struct comm_nvlink_open_args_v1 {
  COMM_ARGS;
  comm_nvlink_state_v1* state;
};

struct comm_nvlink_close_args_v1 {
  COMM_ARGS;
  comm_nvlink_state_v1* state;
};

// Where the ranks want the data of a call, as far as their hosts have said so.
struct comm_nvlink_places_v1 {
  uint64_t offset[kMaxPeers];
  uint32_t window[kMaxPeers];
  uint32_t known;  // bit p: rank p has posted
  uint32_t unused;
};

static_assert(sizeof(comm_nvlink_places_v1) == 104, "mirrored by comm_nvlink.launch");

struct comm_nvlink_meet_args_v1 {
  COMM_ARGS;
  const comm_nvlink_state_v1* state;
  comm_nvlink_places_v1* places;  // written
  uint64_t number;                // of the call, from 1, equal on all ranks
  uint64_t wait_ns;
  uint64_t window_offset;
  uint32_t window;
  uint32_t captured;
};

struct comm_nvlink_time_copy_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  void* target;
  const void* source;
  uint64_t target_pitch;
  uint64_t source_pitch;
  uint64_t width;
  uint64_t height;
  float* milliseconds;  // written
  uint32_t pieces;      // that the width is cut into
  uint32_t unused;
};

struct comm_nvlink_exchange_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const comm_nvlink_state_v1* state;
  const Table* table;                   // device memory
  const comm_nvlink_copies_v1* copies;  // host memory; null where the SMs do everything
  const comm_nvlink_places_v1* places;  // host memory; null where the hosts did not meet
  const void* sources[comm::kMaxSources];
  void* landing;
  void* output;
  uint64_t window_offset;
  uint64_t target_bytes;    // as in the table
  uint64_t half_bytes;      // of the landing, where it is doubled; else 0
  uint64_t doubled_offset;  // where in the staging window the doubled staging begins
  uint64_t doubled_bytes;   // of one half of it
  uint32_t window;
  uint32_t operation;
  uint32_t senders;  // 0: no SM is used while the copy engines work
  uint32_t copiers;
  uint32_t staging_window;
  uint32_t chunks;
  uint32_t record_bytes;
  uint32_t unused;
};

namespace {

const uint32_t* list_starts(const comm_nvlink_copies_v1* copies) {
  return reinterpret_cast<const uint32_t*>(copies + 1);
}

const comm_nvlink_copy_v1* list_copies(const comm_nvlink_copies_v1* copies) {
  uint64_t words = (uint64_t(copies->num_lists) + 1 + 1) / 2;  // of 8 bytes
  return reinterpret_cast<const comm_nvlink_copy_v1*>(
      reinterpret_cast<const uint64_t*>(copies + 1) + words);
}

// Where piece `piece` of a row begins. Twin: comm_nvlink/table.py, piece_edges.
uint64_t piece_edge(uint64_t width, uint32_t pieces, uint32_t piece) {
  return piece == pieces ? width : width * piece / pieces / 16 * 16;
}

int enqueue_list(const comm_nvlink_copies_v1* copies, uint32_t list, char* target,
                 const void* const* sources, cudaStream_t stream) {
  const uint32_t* first = list_starts(copies);
  for (uint32_t i = first[list]; i < first[list + 1]; ++i) {
    const comm_nvlink_copy_v1& copy = list_copies(copies)[i];
    const char* from = static_cast<const char*>(sources[copy.source]) + copy.source_offset;
    char* to = target + copy.target_offset;
    if (copy.height == 1) {
      COMM_CUDA(cudaMemcpyAsync(to, from, copy.width, cudaMemcpyDeviceToDevice, stream));
    } else {
      COMM_CUDA(cudaMemcpy2DAsync(to, copy.target_pitch, from, copy.source_pitch, copy.width,
                                  copy.height, cudaMemcpyDeviceToDevice, stream));
    }
  }
  return COMM_OK;
}

// Let the copy engines set flags of chunks [chunk, chunk + count) at `peer`, after everything that
// was enqueued before: copies in one stream follow each other, and what the earlier one wrote is
// there when the later one starts.
int enqueue_flags(const comm_nvlink_state_v1* state, uint32_t peer, uint32_t chunk, uint32_t count,
                  cudaStream_t stream) {
  uint32_t rank = state->session->rank;
  COMM_CUDA(cudaMemcpyAsync(&state->flags[peer]->chunk[rank].value[chunk],
                            &state->flags[rank]->token.value[chunk], count * sizeof(uint32_t),
                            cudaMemcpyDeviceToDevice, stream));
  return COMM_OK;
}

// Launch the exchange kernel. Its start may overlap the end of the kernel before it, of whatever
// library: what it does before it waits for that one to be through touches nothing that could
// change.
int launch_exchange(const ExchangeParams& params, uint32_t copiers, cudaStream_t stream) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(params.senders + copiers);
  config.blockDim = dim3(comm::nvlink::kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = params.announces ? 1 : 0;
  COMM_CUDA(cudaLaunchKernelEx(&config, comm::nvlink::exchange_kernel, params));
  return COMM_OK;
}

// Everything that the copy engines send: peers in a different order on every rank, chunk by chunk
// to those that copy each out of staging while the next one travels, all at once to the others.
int enqueue_rests(const comm_nvlink_exchange_args_v1* args, const ExchangeParams& params) {
  const comm_nvlink_state_v1* state = args->state;
  const uint32_t ranks = params.session.world_size, rank = params.session.rank;
  const uint32_t chunks = args->copies->chunks;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    for (uint32_t step = 1; step < ranks; ++step) {
      const uint32_t peer = (rank + step) % ranks;
      if (!((params.by_engines >> peer) & 1)) continue;
      const bool whole = args->places->window[peer] != args->staging_window;
      if (whole && chunk != 0) continue;
      char* target = reinterpret_cast<char*>(
          state->windows[args->places->window[peer]].address[peer] + args->places->offset[peer]);
      const uint32_t list = (whole ? chunks : chunk) * ranks + peer;
      int status = enqueue_list(args->copies, list, target, args->sources, args->stream);
      if (status != COMM_OK) return status;
      status = enqueue_flags(state, peer, chunk, whole ? chunks : 1, args->stream);
      if (status != COMM_OK) return status;
    }
  }
  return COMM_OK;
}

// The copy engines and the SMs side by side: the former in the caller's stream, the latter in the
// session's own, forked off and joined by events, which a capture follows.
int exchange_by_engines(const comm_nvlink_exchange_args_v1* args, const ExchangeParams& params) {
  const comm_nvlink_state_v1* state = args->state;
  COMM_CUDA(cudaEventRecord(state->fork, args->stream));
  COMM_CUDA(cudaStreamWaitEvent(state->side, state->fork, 0));
  comm::nvlink::open_kernel<<<1, 32, 0, args->stream>>>(params);
  COMM_LAUNCHED(open_kernel);
  if (args->senders != 0) {
    int status = launch_exchange(params, args->copiers, state->side);
    if (status != COMM_OK) return status;
  } else {
    uint32_t own = (args->copies->chunks + 1) * params.session.world_size;
    int status = enqueue_list(args->copies, own, params.output, args->sources, state->side);
    if (status != COMM_OK) return status;
  }
  int status = enqueue_rests(args, params);
  if (status != COMM_OK) return status;
  COMM_CUDA(cudaEventRecord(state->join, state->side));
  COMM_CUDA(cudaStreamWaitEvent(args->stream, state->join, 0));
  if (args->senders == 0) {
    comm::nvlink::close_kernel<<<1, 32, 0, args->stream>>>(params);
    COMM_LAUNCHED(close_kernel);
  }
  return COMM_OK;
}

// Where a small exchange goes at peers that are known to stage it (see ulysses.cuh, early).
void set_early(const comm_nvlink_exchange_args_v1* args, ExchangeParams* params) {
  params->early_half_bytes = args->doubled_bytes;
  if (args->chunks != 0 || args->places == nullptr || args->target_bytes > args->doubled_bytes)
    return;
  const Session& session = *args->state->session;
  for (uint32_t peer = 0; peer < session.world_size; ++peer) {
    if (peer == session.rank || !((args->places->known >> peer) & 1)) continue;
    if (args->places->window[peer] != args->staging_window) continue;
    if (args->places->offset[peer] != args->doubled_offset) continue;
    params->early[peer] = reinterpret_cast<char*>(
        args->state->windows[args->staging_window].address[peer] + args->doubled_offset);
  }
}

// The ranks whose rest the copy engines can move: those whose place is known.
uint32_t engine_peers(const comm_nvlink_exchange_args_v1* args, uint32_t rank) {
  if (args->copies == nullptr || args->places == nullptr) return 0;
  return args->places->known & ~(1u << rank);
}

}  // namespace

COMM_EXPORT int comm_nvlink_open_v1(const comm_nvlink_open_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_open_args_v1);
  comm_nvlink_state_v1* state = args->state;
  COMM_CUDA(cudaStreamCreateWithFlags(&state->side, cudaStreamNonBlocking));
  COMM_CUDA(cudaEventCreateWithFlags(&state->fork, cudaEventDisableTiming));
  COMM_CUDA(cudaEventCreateWithFlags(&state->join, cudaEventDisableTiming));
  return COMM_OK;
}

// May be called again after a failure, and after an `open` that failed half-way.
COMM_EXPORT int comm_nvlink_close_v1(const comm_nvlink_close_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_close_args_v1);
  comm_nvlink_state_v1* state = args->state;
  if (state->join != nullptr) COMM_CUDA(cudaEventDestroy(state->join));
  state->join = nullptr;
  if (state->fork != nullptr) COMM_CUDA(cudaEventDestroy(state->fork));
  state->fork = nullptr;
  if (state->side != nullptr) COMM_CUDA(cudaStreamDestroy(state->side));
  state->side = nullptr;
  return COMM_OK;
}

// Time one pitched copy. Waits for the stream: for set-up alone.
COMM_EXPORT int comm_nvlink_time_copy_v1(const comm_nvlink_time_copy_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_time_copy_args_v1);
  cudaEvent_t begin = nullptr, end = nullptr;
  COMM_CUDA(cudaEventCreate(&begin));
  cudaError_t error = cudaEventCreate(&end);
  if (error == cudaSuccess) error = cudaEventRecord(begin, args->stream);
  for (uint32_t piece = 0; error == cudaSuccess && piece < args->pieces; ++piece) {
    uint64_t from = piece_edge(args->width, args->pieces, piece);
    uint64_t to = piece_edge(args->width, args->pieces, piece + 1);
    error = cudaMemcpy2DAsync(static_cast<char*>(args->target) + from, args->target_pitch,
                              static_cast<const char*>(args->source) + from, args->source_pitch,
                              to - from, args->height, cudaMemcpyDeviceToDevice, args->stream);
  }
  if (error == cudaSuccess) error = cudaEventRecord(end, args->stream);
  if (error == cudaSuccess) error = cudaEventSynchronize(end);
  if (error == cudaSuccess) error = cudaEventElapsedTime(args->milliseconds, begin, end);
  (void)cudaEventDestroy(begin);
  if (end != nullptr) (void)cudaEventDestroy(end);
  COMM_CUDA(error);
  return COMM_OK;
}

COMM_EXPORT int comm_nvlink_meet_v1(const comm_nvlink_meet_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_meet_args_v1);
  const comm_nvlink_state_v1* state = args->state;
  const uint32_t ranks = state->session->world_size, rank = state->session->rank;
  comm_nvlink_places_v1* places = args->places;
  places->known = 0;
  comm::nvlink::post(state->boards[rank], args->number, args->window, args->window_offset,
                     args->captured);
  const uint64_t deadline = comm::nvlink::monotonic_ns() + args->wait_ns;
  for (uint32_t step = 1; step < ranks; ++step) {
    const uint32_t peer = (rank + step) % ranks;
    uint32_t captured = 0;
    // A call that is captured here and not there is paired with another one on the device.
    if (comm::nvlink::await_record(state->boards[peer], args->number, deadline,
                                   &places->window[peer], &places->offset[peer], &captured) &&
        captured == args->captured && places->window[peer] < state->session->num_windows &&
        state->windows[places->window[peer]].address[peer] != 0) {
      places->known |= 1u << peer;
    }
  }
  return COMM_OK;
}

COMM_EXPORT int comm_nvlink_exchange_v1(const comm_nvlink_exchange_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_exchange_args_v1);
  const comm_nvlink_state_v1* state = args->state;
  const Session& session = *state->session;
  COMM_REQUIRE(session.world_size >= 2 && session.world_size <= kMaxPeers &&
                   session.rank < session.world_size,
               "rank %u of %u: 2 to %u ranks", session.rank, session.world_size, kMaxPeers);
  COMM_REQUIRE(args->senders % (session.world_size - 1) == 0 &&
                   args->senders / (session.world_size - 1) <= comm::nvlink::kMaxSlices,
               "%u blocks for the peers: a multiple of %u, at most %u for each", args->senders,
               session.world_size - 1, comm::nvlink::kMaxSlices);
  COMM_REQUIRE((args->senders == 0) == (args->copiers == 0), "%u blocks for the peers and %u more",
               args->senders, args->copiers);
  ExchangeParams params = {};
  params.session = session;
  params.table = args->table;
  for (uint32_t i = 0; i < comm::kMaxSources; ++i)
    params.sources[i] = static_cast<const char*>(args->sources[i]);
  params.landing = static_cast<char*>(args->landing);
  params.output = static_cast<char*>(args->output);
  for (uint32_t peer = 0; peer < session.world_size; ++peer)
    params.flags[peer] = state->flags[peer];
  params.window_offset = args->window_offset;
  params.window = args->window;
  params.operation = args->operation;
  params.target_bytes = args->target_bytes;
  params.half_bytes = args->half_bytes;
  params.senders = args->senders;
  params.chunks = args->chunks;
  params.record_bytes = args->record_bytes;
  params.by_engines = engine_peers(args, session.rank);
  if (params.by_engines != 0) {
    for (uint32_t peer = 0; peer < session.world_size; ++peer) {
      params.expected_window[peer] = args->places->window[peer];
      params.expected_offset[peer] = args->places->offset[peer];
    }
    return exchange_by_engines(args, params);
  }
  COMM_REQUIRE(args->senders != 0, "no blocks, and nothing that the copy engines could do");
  params.announces = 1;
  set_early(args, &params);
  return launch_exchange(params, args->copiers, args->stream);
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_nvlink_open_args_v1)
COMM_STRUCT(comm_nvlink_close_args_v1)
COMM_STRUCT(comm_nvlink_time_copy_args_v1)
COMM_STRUCT(comm_nvlink_meet_args_v1)
COMM_STRUCT(comm_nvlink_exchange_args_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(comm::nvlink::exchange_kernel)
COMM_KERNEL(comm::nvlink::open_kernel)
COMM_KERNEL(comm::nvlink::close_kernel)
COMM_MODULE_END(comm_nvlink_ulysses)
