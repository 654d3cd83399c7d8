// The C interface between Python and a module (one shared library, built when it is first needed).
//
// An entry point is `COMM_EXPORT int comm_<plugin>_<operation>_v<N>(const <its arguments>*)`. Its
// arguments are one struct that begins with COMM_ARGS and holds the stream; Python packs it and
// passes one pointer. An entry point that launches allocates nothing, synchronizes nothing and
// keeps no state, so that it can be captured in a CUDA graph.
//
// A module declares itself in one place:
//
//     COMM_MODULE_BEGIN
//     COMM_STRUCT(comm_core_fill_args_v1)
//     COMM_MODULE_KERNELS
//     COMM_KERNEL(fill_kernel)
//     COMM_MODULE_END(comm_core_selfcheck)
//
// which gives it comm_module_info_v1, comm_last_error and <module>_preload_v1.
#ifndef COMM_CORE_ABI_H_
#define COMM_CORE_ABI_H_

#include <comm_core/status.h>
#include <stddef.h>
#include <stdint.h>

// Number of this interface: the prefix of the arguments, the information about a module, the
// meaning of the codes. Twin: comm_core/jit/abi.py, ABI.
#define COMM_ABI 1

// The prefix of every argument struct. Its alignment pads the whole struct to a multiple of 8
// bytes, as the trailing "0Q" of the Python description does; otherwise the two sizes differ where
// the last field is shorter.
typedef struct comm_args {
  uint32_t struct_size;
  uint32_t abi;
} __attribute__((aligned(8))) comm_args;

#define COMM_ARGS comm_args args_

// Leave the entry point with COMM_ERROR_ABI unless `args` was packed for this very struct.
#define COMM_CHECK_ARGS(args, type)                                                                \
  do {                                                                                             \
    if ((args)->args_.struct_size != sizeof(type) || (args)->args_.abi != COMM_ABI)                \
      return comm_fail(COMM_ERROR_ABI, "%s: expected %zu bytes of ABI %d, got %u bytes of ABI %u", \
                       #type, sizeof(type), COMM_ABI, (args)->args_.struct_size,                   \
                       (args)->args_.abi);                                                         \
  } while (0)

typedef struct comm_struct_info {
  const char* name;
  uint64_t size;
} comm_struct_info;

typedef struct comm_kernel_info {
  const char* name;
  const void* function;
} comm_kernel_info;

// What a library says of itself before anything in it is called. Fields are only ever appended.
// Twin: comm_core/jit/load.py, _ModuleInfo.
typedef struct comm_module_info {
  uint32_t struct_size;
  uint32_t abi;
  const char* module;
  const char* archs;  // "8.0,9.0a"
  const comm_struct_info* structs;
  const comm_kernel_info* kernels;
  uint32_t num_structs;
  uint32_t num_kernels;
} comm_module_info;

// The build says which architectures are in the library.
#ifndef COMM_ARCHS
#define COMM_ARCHS ""
#endif

// Both tables end in a null entry, so that they may be empty; it is not counted.
#define COMM_MODULE_BEGIN static const comm_struct_info comm_structs_[] = {
#define COMM_STRUCT(type) {#type, sizeof(type)},
#define COMM_MODULE_KERNELS \
  { NULL, 0 }               \
  }                         \
  ;                         \
  static const comm_kernel_info comm_kernels_[] = {
// Variadic, because an instantiation may have commas.
#define COMM_KERNEL(...) {#__VA_ARGS__, (const void*)(__VA_ARGS__)},
#define COMM_MODULE_END(name)                                                                  \
  {                                                                                            \
    NULL, NULL                                                                                 \
  }                                                                                            \
  }                                                                                            \
  ;                                                                                            \
  __thread char comm_error_text_[COMM_ERROR_TEXT_SIZE] = "";                                   \
  COMM_EXPORT const char* comm_last_error(void) { return comm_error_text_; }                   \
  COMM_EXPORT const comm_module_info* comm_module_info_v1(void) {                              \
    static const comm_module_info info = {sizeof(comm_module_info),                            \
                                          COMM_ABI,                                            \
                                          #name,                                               \
                                          COMM_ARCHS,                                          \
                                          comm_structs_,                                       \
                                          comm_kernels_,                                       \
                                          sizeof(comm_structs_) / sizeof(*comm_structs_) - 1,  \
                                          sizeof(comm_kernels_) / sizeof(*comm_kernels_) - 1}; \
    return &info;                                                                              \
  }                                                                                            \
  COMM_EXPORT int name##_preload_v1(int device) {                                              \
    return comm_preload_(comm_kernels_, sizeof(comm_kernels_) / sizeof(*comm_kernels_) - 1,    \
                         device);                                                              \
  }

// Load every kernel of the module on `device`, which must be current. The runtime would otherwise
// load each at its first launch, which waits for the device: with a kernel running that spins on a
// peer, that is a deadlock.
static inline int comm_preload_(const comm_kernel_info* kernels, size_t count, int device) {
#if defined(__CUDACC__) || defined(__CUDA_RUNTIME_API_H__)
  int current = -1;
  COMM_CUDA(cudaGetDevice(&current));
  // Changing the device here would make a context on whatever was current before.
  COMM_REQUIRE(current == device, "preload: device %d must be current, it is device %d", device,
               current);
  for (size_t kernel_idx = 0; kernel_idx < count; ++kernel_idx) {
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, kernels[kernel_idx].function);
    if (error != cudaSuccess)
      return comm_fail_cuda(error, kernels[kernel_idx].name, __FILE__, __LINE__);
  }
#else
  (void)kernels;
  (void)count;
  (void)device;
#endif
  return COMM_OK;
}

#endif  // COMM_CORE_ABI_H_
