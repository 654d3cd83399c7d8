// The exchange by copy engines. Python side: comm_pcie/exchange.py.
//
// A call is enqueued in one of two ways, with the same effect:
// - one by one: kernels, copies and events on the caller's stream and the engine's two lanes. So it
//   is done in captures, and for operands that are seen for the first time.
// - as one launch of a graph that was made from just that, and kept for this geometry, operand and
//   output. The copies of a graph can't be given new addresses (CUDA refuses it for pitched ones),
//   so a graph is made for operands that come again, as they do in a loop over preallocated memory.
#include <comm_core/abi.h>
#include <string.h>

#include <new>

#include <comm_pcie/exchange.cuh>

using comm::PlanTable;
using comm::Session;

namespace comm_pcie {

constexpr uint32_t kMaxGraphs = 64;
constexpr uint32_t kMaxSeen = 64;

// One copy of the copy engines: `slices` times `rows` rows. Twin: comm_pcie/copies.py.
struct Copy {
  uint64_t source_offset;
  uint64_t target_offset;
  uint64_t source_pitch;  // from row to row; the row's own bytes where there is one row
  uint64_t target_pitch;
  uint64_t source_height;  // rows from slice to slice; `rows` where there is one slice
  uint64_t target_height;
  uint64_t row_bytes;
  uint32_t rows;
  uint32_t slices;
  uint32_t peer;
  uint32_t lane;  // 0: the caller's stream, 1: the second one
};

static_assert(sizeof(Copy) == 72, "mirrored by comm_pcie.copies");

// What tells one graph from another. Addresses and contents of `copies` and `plan` never change
// while the engine lives.
struct Key {
  const PlanTable* plan;
  const void* source;
  uint32_t window;
  uint32_t operation;

  bool operator==(const Key& other) const {
    return plan == other.plan && source == other.source && window == other.window &&
           operation == other.operation;
  }
};

struct Graph {
  Key key;
  cudaGraphExec_t exec;
  uint64_t used;
};

}  // namespace comm_pcie

using comm_pcie::Copy;
using comm_pcie::ExchangeParams;
using comm_pcie::Graph;
using comm_pcie::Key;

// What Python reads of an engine; its first fields. Twin: comm_pcie/exchange.py.
struct comm_pcie_counters_v1 {
  COMM_ARGS;
  uint64_t single;    // calls that were enqueued one by one
  uint64_t launched;  // calls that were one launch of a graph
  uint64_t built;     // graphs that were made
  uint64_t dropped;   // graphs that made room for others
  uint64_t failed;    // attempts to make one that CUDA refused; after the first there are no more
};

struct comm_pcie_engine {
  comm_pcie_counters_v1 counters;
  cudaStream_t lane;   // half of the peers
  cudaStream_t local;  // this rank's own share
  cudaStream_t build;  // on which calls are captured
  cudaEvent_t started, opened, lane_done, local_done;
  uint64_t clock;
  uint32_t num_graphs;
  uint32_t num_seen;
  Graph graphs[comm_pcie::kMaxGraphs];
  Key seen[comm_pcie::kMaxSeen];  // without a graph so far; a ring
};

struct comm_pcie_open_args_v1 {
  COMM_ARGS;
  comm_pcie_engine** engine;  // where to put it
};

struct comm_pcie_close_args_v1 {
  COMM_ARGS;
  comm_pcie_engine* engine;
};

struct comm_pcie_exchange_args_v1 {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;  // host memory
  comm_pcie_engine* engine;
  const PlanTable* plan;  // device memory; this rank's own share is taken from it
  const Copy* copies;     // host memory
  void* const* outputs;   // host memory: every rank's output, as this rank maps them
  const void* source;
  uint64_t target_bytes;
  uint32_t num_copies;
  uint32_t window;
  uint32_t operation;
  uint32_t local_blocks;
  uint32_t graph;  // whether it may become a graph; never in a capture
  uint32_t unused;
};

namespace {

int enqueue_copy(const Copy& copy, void* const* outputs, const void* source, cudaStream_t stream) {
  char* to = static_cast<char*>(outputs[copy.peer]) + copy.target_offset;
  const char* from = static_cast<const char*>(source) + copy.source_offset;
  if (copy.slices > 1) {
    cudaMemcpy3DParms params;
    memset(&params, 0, sizeof params);
    params.srcPtr = make_cudaPitchedPtr(const_cast<char*>(from), copy.source_pitch,
                                        copy.source_pitch, copy.source_height);
    params.dstPtr =
        make_cudaPitchedPtr(to, copy.target_pitch, copy.target_pitch, copy.target_height);
    params.extent = make_cudaExtent(copy.row_bytes, copy.rows, copy.slices);
    params.kind = cudaMemcpyDeviceToDevice;
    COMM_CUDA(cudaMemcpy3DAsync(&params, stream));
  } else if (copy.rows > 1) {
    COMM_CUDA(cudaMemcpy2DAsync(to, copy.target_pitch, from, copy.source_pitch, copy.row_bytes,
                                copy.rows, cudaMemcpyDeviceToDevice, stream));
  } else {
    COMM_CUDA(cudaMemcpyAsync(to, from, copy.row_bytes, cudaMemcpyDeviceToDevice, stream));
  }
  return COMM_OK;
}

// Enqueue everything on `stream`, and on the lanes between two events of it.
int enqueue(const comm_pcie_exchange_args_v1* args, cudaStream_t stream) {
  comm_pcie_engine* engine = args->engine;
  const Session& session = *args->session;
  ExchangeParams params = {};
  params.session = session;
  params.destination = static_cast<char*>(args->outputs[session.rank]);
  params.target_bytes = args->target_bytes;
  params.window = args->window;
  params.operation = args->operation;
  bool second = false;
  for (uint32_t i = 0; i < args->num_copies; ++i) second |= args->copies[i].lane != 0;

  COMM_CUDA(cudaEventRecord(engine->started, stream));
  comm_pcie::exchange_open_kernel<<<1, 32, 0, stream>>>(params);
  COMM_LAUNCHED(exchange_open_kernel);
  if (second) {
    COMM_CUDA(cudaEventRecord(engine->opened, stream));
    COMM_CUDA(cudaStreamWaitEvent(engine->lane, engine->opened, 0));
  }
  for (uint32_t i = 0; i < args->num_copies; ++i) {
    const Copy& copy = args->copies[i];
    int status =
        enqueue_copy(copy, args->outputs, args->source, copy.lane != 0 ? engine->lane : stream);
    if (status != COMM_OK) return status;
  }
  // After the copies: they are what everybody waits for, and the host takes its time for each.
  if (args->local_blocks > 0) {
    COMM_CUDA(cudaStreamWaitEvent(engine->local, engine->started, 0));
    comm_pcie::exchange_local_kernel<<<args->local_blocks, comm_pcie::kThreads, 0, engine->local>>>(
        args->plan, session.rank, params.destination, static_cast<const char*>(args->source),
        &session.signals[session.rank]->abort.value);
    COMM_LAUNCHED(exchange_local_kernel);
    COMM_CUDA(cudaEventRecord(engine->local_done, engine->local));
    COMM_CUDA(cudaStreamWaitEvent(stream, engine->local_done, 0));
  }
  if (second) {
    COMM_CUDA(cudaEventRecord(engine->lane_done, engine->lane));
    COMM_CUDA(cudaStreamWaitEvent(stream, engine->lane_done, 0));
  }
  comm_pcie::exchange_close_kernel<<<1, comm_pcie::kThreads, 0, stream>>>(params);
  COMM_LAUNCHED(exchange_close_kernel);
  return COMM_OK;
}

// Make a graph of the call. Nothing has been launched where it fails.
int build(const comm_pcie_exchange_args_v1* args, cudaGraphExec_t* exec) {
  comm_pcie_engine* engine = args->engine;
  // Relaxed: other threads of the program may do what a capture would forbid them.
  COMM_CUDA(cudaStreamBeginCapture(engine->build, cudaStreamCaptureModeRelaxed));
  int status = enqueue(args, engine->build);
  cudaGraph_t graph = nullptr;
  cudaError_t error = cudaStreamEndCapture(engine->build, &graph);
  if (status == COMM_OK && error != cudaSuccess)
    status = comm_fail_cuda(error, "cudaStreamEndCapture", __FILE__, __LINE__);
  if (status == COMM_OK) {
    error = cudaGraphInstantiate(exec, graph, 0);
    if (error != cudaSuccess)
      status = comm_fail_cuda(error, "cudaGraphInstantiate", __FILE__, __LINE__);
  }
  if (graph != nullptr) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();
  return status;
}

// Whether a call has been seen before; remembers it.
bool seen_before(comm_pcie_engine* engine, const Key& key) {
  uint32_t known = engine->num_seen < comm_pcie::kMaxSeen ? engine->num_seen : comm_pcie::kMaxSeen;
  for (uint32_t i = 0; i < known; ++i) {
    if (engine->seen[i] == key) return true;
  }
  engine->seen[engine->num_seen++ % comm_pcie::kMaxSeen] = key;
  return false;
}

// The graph of a call, or null where there is none (yet).
Graph* graph_of(const comm_pcie_exchange_args_v1* args) {
  comm_pcie_engine* engine = args->engine;
  const Key key = {args->plan, args->source, args->window, args->operation};
  Graph* oldest = nullptr;
  for (uint32_t i = 0; i < engine->num_graphs; ++i) {
    Graph* graph = &engine->graphs[i];
    if (graph->key == key) return graph;
    if (oldest == nullptr || graph->used < oldest->used) oldest = graph;
  }
  if (engine->counters.failed > 0 || !seen_before(engine, key)) return nullptr;
  cudaGraphExec_t exec = nullptr;
  if (build(args, &exec) != COMM_OK) {
    ++engine->counters.failed;
    return nullptr;
  }
  ++engine->counters.built;
  Graph* place = oldest;
  if (engine->num_graphs < comm_pcie::kMaxGraphs) {
    place = &engine->graphs[engine->num_graphs++];
  } else {
    // A launch of it that is still under way ends as it should.
    (void)cudaGraphExecDestroy(place->exec);
    ++engine->counters.dropped;
  }
  *place = {key, exec, 0};
  return place;
}

// Release what there is of an engine. What CUDA refuses is lost with the process: there is nobody
// who could do more.
int release(comm_pcie_engine* engine) {
  int status = COMM_OK;
  for (uint32_t i = 0; i < engine->num_graphs; ++i) {
    if (cudaGraphExecDestroy(engine->graphs[i].exec) != cudaSuccess)
      status = comm_fail(COMM_ERROR_CUDA, "cudaGraphExecDestroy failed");
  }
  engine->num_graphs = 0;
  cudaEvent_t events[] = {engine->started, engine->opened, engine->lane_done, engine->local_done};
  for (cudaEvent_t event : events) {
    if (event != nullptr && cudaEventDestroy(event) != cudaSuccess)
      status = comm_fail(COMM_ERROR_CUDA, "cudaEventDestroy failed");
  }
  cudaStream_t streams[] = {engine->lane, engine->local, engine->build};
  for (cudaStream_t stream : streams) {
    if (stream != nullptr && cudaStreamDestroy(stream) != cudaSuccess)
      status = comm_fail(COMM_ERROR_CUDA, "cudaStreamDestroy failed");
  }
  (void)cudaGetLastError();
  delete engine;
  return status;
}

int set_up(comm_pcie_engine* engine) {
  COMM_CUDA(cudaStreamCreateWithFlags(&engine->lane, cudaStreamNonBlocking));
  COMM_CUDA(cudaStreamCreateWithFlags(&engine->local, cudaStreamNonBlocking));
  COMM_CUDA(cudaStreamCreateWithFlags(&engine->build, cudaStreamNonBlocking));
  COMM_CUDA(cudaEventCreateWithFlags(&engine->started, cudaEventDisableTiming));
  COMM_CUDA(cudaEventCreateWithFlags(&engine->opened, cudaEventDisableTiming));
  COMM_CUDA(cudaEventCreateWithFlags(&engine->lane_done, cudaEventDisableTiming));
  COMM_CUDA(cudaEventCreateWithFlags(&engine->local_done, cudaEventDisableTiming));
  return COMM_OK;
}

}  // namespace

// Make an engine on the current device.
COMM_EXPORT int comm_pcie_open_v1(const comm_pcie_open_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_open_args_v1);
  comm_pcie_engine* engine = new (std::nothrow) comm_pcie_engine();
  COMM_REQUIRE(engine != nullptr, "open: no memory for an engine");
  engine->counters.args_.struct_size = sizeof(comm_pcie_counters_v1);
  engine->counters.args_.abi = COMM_ABI;
  int status = set_up(engine);
  if (status != COMM_OK) {
    char text[COMM_ERROR_TEXT_SIZE];
    memcpy(text, comm_error_text_, sizeof text);
    (void)release(engine);
    memcpy(comm_error_text_, text, sizeof text);
    return status;
  }
  *args->engine = engine;
  return COMM_OK;
}

// Release an engine. Its work must be over; graphs that were captured by the caller hold none of
// it.
COMM_EXPORT int comm_pcie_close_v1(const comm_pcie_close_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_close_args_v1);
  return release(args->engine);
}

COMM_EXPORT int comm_pcie_exchange_v1(const comm_pcie_exchange_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_pcie_exchange_args_v1);
  const Session* session = args->session;
  COMM_REQUIRE(session->world_size >= 2 && session->world_size <= comm::kMaxRanks &&
                   session->rank < session->world_size,
               "rank %u of %u: 2 to %u ranks", session->rank, session->world_size, comm::kMaxRanks);
  for (uint32_t i = 0; i < args->num_copies; ++i)
    COMM_REQUIRE(args->copies[i].peer < session->world_size, "copy %u goes to rank %u of %u", i,
                 args->copies[i].peer, session->world_size);
  comm_pcie_engine* engine = args->engine;
  Graph* graph = args->graph ? graph_of(args) : nullptr;
  if (graph != nullptr) {
    COMM_CUDA(cudaGraphLaunch(graph->exec, args->stream));
    graph->used = ++engine->clock;
    ++engine->counters.launched;
    return COMM_OK;
  }
  ++engine->counters.single;
  return enqueue(args, args->stream);
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_pcie_open_args_v1)
COMM_STRUCT(comm_pcie_close_args_v1)
COMM_STRUCT(comm_pcie_exchange_args_v1)
COMM_STRUCT(comm_pcie_counters_v1)
COMM_MODULE_KERNELS
COMM_KERNEL(comm_pcie::exchange_open_kernel)
COMM_KERNEL(comm_pcie::exchange_close_kernel)
COMM_KERNEL(comm_pcie::exchange_local_kernel)
COMM_MODULE_END(comm_pcie_exchange)
