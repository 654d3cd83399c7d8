// The all-reduce as an entry point of a module. A plugin's csrc/allreduce.cu is
//
//     #include <comm_core/allreduce_module.cuh>
//     COMM_ALLREDUCE_MODULE(comm_nvlink)
//
// Python side: comm_core/allreduce/module.py.
#pragma once

#include <comm_core/abi.h>
#include <comm_core/allreduce.cuh>

#if defined(__CUDACC__)

namespace comm {

// Append only. Twin: comm_core/allreduce/module.py, _DTYPES.
enum class ReduceType : uint32_t { kFloat16 = 0, kBfloat16 = 1, kFloat32 = 2 };

struct ReduceArgs {
  COMM_ARGS;
  cudaStream_t stream;
  const Session* session;  // host memory
  Vector* const* buffers;  // host memory: every rank's, as this rank maps it
  const void* input;
  void* output;
  uint64_t vectors;
  uint64_t half_vectors;
  uint64_t slot_vectors;
  uint32_t tail_bytes;
  uint32_t two_shots;
  uint32_t operation;
  uint32_t type;
  uint32_t fused;  // whether there is an epilogue
  uint32_t blocks;
  uint32_t threads;
  uint32_t team;
  uint32_t early;  // whether it may start before the kernel before it has ended
  uint32_t lead;   // whether it lets the next one do so
  uint32_t shared_bytes;
  Epilogue epilogue;
};

typedef void (*ReduceKernel)(ReduceParams);

// Vectors of a row for each thread.
inline uint32_t steps_of(const ReduceArgs* args) {
  const uint32_t threads = args->team * args->threads;
  return (args->epilogue.row_vectors + threads - 1) / threads;
}

// Whether rows stay in registers: every thread has one vector of them.
inline bool one_vector(const ReduceArgs* args) {
  return args->fused && !args->two_shots && steps_of(args) == 1 &&
         Encoding(args->epilogue.encoding) == Encoding::kNone;
}

template <class T>
ReduceKernel choose_kernel(const ReduceArgs* args) {
  if (args->fused) {
    if (Encoding(args->epilogue.encoding) == Encoding::kNone) {
      if (args->two_shots) return fused_kernel<T, true, false>;
      if (!one_vector(args)) return fused_kernel<T, false, false>;
      return args->team == 1 ? vector_kernel<T, true> : vector_kernel<T, false>;
    }
    return args->two_shots ? fused_kernel<T, true, true> : fused_kernel<T, false, true>;
  }
  return args->two_shots ? reduce_kernel<T, true> : reduce_kernel<T, false>;
}

inline int check_reduce(const ReduceArgs* args) {
  const Session& session = *args->session;
  const Epilogue& e = args->epilogue;
  COMM_REQUIRE(session.world_size >= 2 && session.world_size <= kMaxRanks &&
                   session.rank < session.world_size,
               "rank %u of %u: 2 to %u ranks", session.rank, session.world_size, kMaxRanks);
  COMM_REQUIRE(args->type <= uint32_t(ReduceType::kFloat32), "element type %u", args->type);
  COMM_REQUIRE(args->vectors != 0 && args->tail_bytes != 0 && args->tail_bytes <= 16 &&
                   args->tail_bytes % 2 == 0,
               "%llu vectors, the last one of %u bytes", (unsigned long long)args->vectors,
               args->tail_bytes);
  const uint64_t slots = session.world_size - 1;
  const uint64_t least = args->two_shots
                             ? (args->vectors + session.world_size - 1) / session.world_size
                             : args->vectors;
  const uint64_t used = slots * args->slot_vectors + (args->two_shots ? args->vectors : 0);
  COMM_REQUIRE(args->slot_vectors >= least && used <= args->half_vectors,
               "%llu vectors in slots of %llu do not fit half a buffer of %llu",
               (unsigned long long)args->vectors, (unsigned long long)args->slot_vectors,
               (unsigned long long)args->half_vectors);
  COMM_REQUIRE(args->blocks != 0 && args->threads % 32 == 0 && args->threads != 0,
               "%u blocks of %u threads", args->blocks, args->threads);
  COMM_REQUIRE(args->team != 0 && args->team <= kTeamBlocks && args->blocks % args->team == 0 &&
                   (args->team & (args->team - 1)) == 0 && (args->fused || args->team == 1),
               "%u blocks in teams of %u", args->blocks, args->team);
  const uint32_t most = !args->fused                          ? kReduceThreads
                        : one_vector(args) && args->team == 1 ? kRowThreads
                                                              : kFusedThreads;
  COMM_REQUIRE(args->threads <= most, "%u threads in a block, at most %u", args->threads, most);
  if (!args->fused) return COMM_OK;
  const uint32_t steps = steps_of(args);
  COMM_REQUIRE(args->tail_bytes == 16 && e.rows * e.row_vectors == args->vectors &&
                   steps * args->team * args->threads <= kTeamParts * 32,
               "%llu rows of %u vectors, %llu in all", (unsigned long long)e.rows, e.row_vectors,
               (unsigned long long)args->vectors);
  if (one_vector(args)) return COMM_OK;
  uint32_t needed = 2 * steps * args->threads * uint32_t(sizeof(Vector));
  if (Encoding(e.encoding) == Encoding::kGroupFp8) {
    COMM_REQUIRE(e.group_vectors != 0 && e.row_vectors % e.group_vectors == 0,
                 "groups of %u vectors in rows of %u", e.group_vectors, e.row_vectors);
    if (!groups_within_warps(e.group_vectors)) {
      COMM_REQUIRE(args->team == 1, "groups beyond a warp in teams of %u blocks", args->team);
      needed += e.row_vectors * uint32_t(sizeof(uint32_t));
    }
  }
  COMM_REQUIRE(args->shared_bytes >= needed, "%u bytes of shared memory, %u are needed",
               args->shared_bytes, needed);
  COMM_REQUIRE(
      Encoding(e.encoding) != Encoding::kNvfp4 || ReduceType(args->type) != ReduceType::kFloat32,
      "NVFP4 of float32");
  return COMM_OK;
}

inline int launch_reduce(const ReduceArgs* args) {
  int status = check_reduce(args);
  if (status != COMM_OK) return status;
  const Session& session = *args->session;
  ReduceParams params = {};
  params.session = session;
  for (uint32_t peer = 0; peer < session.world_size; ++peer)
    params.buffers[peer] = args->buffers[peer];
  params.input = args->input;
  params.output = args->output;
  params.vectors = args->vectors;
  params.half_vectors = args->half_vectors;
  params.slot_vectors = args->slot_vectors;
  params.no_epoch = ~uint64_t(0);
  params.tail_bytes = args->tail_bytes;
  params.two_shots = args->two_shots;
  params.operation = args->operation;
  params.lead = args->lead;
  params.team = args->team;
  params.teams = args->blocks / args->team;
  params.steps = steps_of(args);
  params.parts = params.steps * args->team * args->threads / 32;
  params.share = args->fused ? 1.0f / float(args->epilogue.hidden) : 0.0f;
  params.epilogue = args->epilogue;
  ReduceKernel kernel = nullptr;
  switch (ReduceType(args->type)) {
    case ReduceType::kFloat16:
      kernel = choose_kernel<Float16>(args);
      break;
    case ReduceType::kBfloat16:
      kernel = choose_kernel<Bfloat16>(args);
      break;
    case ReduceType::kFloat32:
      kernel = choose_kernel<Float32>(args);
      break;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(args->blocks);
  config.blockDim = dim3(args->threads);
  config.dynamicSmemBytes = args->fused ? args->shared_bytes : 0;
  config.stream = args->stream;
  config.attrs = attributes;
  if (args->early) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  if (args->team != 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = args->team;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  // More than a kernel has without asking for it, what it has of itself included.
  if (config.dynamicSmemBytes + sizeof(TeamMemory) > 48 * 1024) {
    COMM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                   int(config.dynamicSmemBytes)));
  }
  COMM_CUDA(cudaLaunchKernelEx(&config, kernel, params));
  return COMM_OK;
}

}  // namespace comm

#define COMM_ALLREDUCE_KERNELS(type)                  \
  COMM_KERNEL(comm::reduce_kernel<type, false>)       \
  COMM_KERNEL(comm::reduce_kernel<type, true>)        \
  COMM_KERNEL(comm::vector_kernel<type, false>)       \
  COMM_KERNEL(comm::vector_kernel<type, true>)        \
  COMM_KERNEL(comm::fused_kernel<type, false, false>) \
  COMM_KERNEL(comm::fused_kernel<type, true, false>)  \
  COMM_KERNEL(comm::fused_kernel<type, false, true>)  \
  COMM_KERNEL(comm::fused_kernel<type, true, true>)

// The whole module of a plugin.
#define COMM_ALLREDUCE_MODULE(plugin)                                             \
  typedef comm::Session comm_core_session_v1;                                     \
  typedef comm::ReduceArgs plugin##_allreduce_args_v1;                            \
  COMM_EXPORT int plugin##_allreduce_v1(const plugin##_allreduce_args_v1* args) { \
    COMM_CHECK_ARGS(args, plugin##_allreduce_args_v1);                            \
    return comm::launch_reduce(args);                                             \
  }                                                                               \
  COMM_MODULE_BEGIN                                                               \
  COMM_STRUCT(plugin##_allreduce_args_v1)                                         \
  COMM_STRUCT(comm_core_session_v1)                                               \
  COMM_MODULE_KERNELS                                                             \
  COMM_ALLREDUCE_KERNELS(comm::Float16)                                           \
  COMM_ALLREDUCE_KERNELS(comm::Bfloat16)                                          \
  COMM_ALLREDUCE_KERNELS(comm::Float32)                                           \
  COMM_MODULE_END(plugin##_allreduce)

#endif  // __CUDACC__
