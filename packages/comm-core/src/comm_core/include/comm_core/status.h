// What a C entry point returns, and how it says why.
//
// Plain C, also for C++ and nvcc. An entry point returns COMM_OK or a code below; the text of the
// last failure of the calling thread is comm_last_error(). Nothing here allocates, exits or throws.
#ifndef COMM_CORE_STATUS_H_
#define COMM_CORE_STATUS_H_

#include <stdarg.h>
#include <stdio.h>

#ifdef __cplusplus
#define COMM_EXTERN_C extern "C"
#else
#define COMM_EXTERN_C
#endif

// The library is linked with everything hidden but the names that its Python description lists.
#define COMM_EXPORT COMM_EXTERN_C __attribute__((visibility("default")))

// Explicit numbers, append only: an older Python must not take one failure for another.
// Twin: comm_core/jit/abi.py, Status.
enum comm_status {
  COMM_OK = 0,
  COMM_ERROR_ARGUMENT = 1,  // a field of the arguments can't be used; nothing was launched
  COMM_ERROR_ABI = 2,       // the caller's struct is not the one that this library was built with
  COMM_ERROR_UNSUPPORTED = 3,  // not on this device or in this build
  COMM_ERROR_BROKEN = 4,       // the communicator was aborted earlier; nothing was launched
  COMM_ERROR_CUDA = 0x10000,   // + cudaError_t; the largest of those is below 0x10000
};

#define COMM_ERROR_TEXT_SIZE 1024

// One buffer a thread and library, so that a rank that is a thread reads its own failure.
// COMM_MODULE_END defines it.
#ifdef __cplusplus
extern "C" {
#endif
extern __thread char comm_error_text_[COMM_ERROR_TEXT_SIZE] __attribute__((visibility("hidden")));
#ifdef __cplusplus
}
#endif

// Keep a text for comm_last_error() and return `status`.
__attribute__((format(printf, 2, 3))) static inline int comm_fail(int status, const char* format,
                                                                  ...) {
  va_list arguments;
  va_start(arguments, format);
  (void)vsnprintf(comm_error_text_, COMM_ERROR_TEXT_SIZE, format, arguments);
  va_end(arguments);
  return status;
}

// Leave the function with COMM_ERROR_ARGUMENT and a text (printf) unless `condition` holds.
#define COMM_REQUIRE(condition, ...)                                      \
  do {                                                                    \
    if (!(condition)) return comm_fail(COMM_ERROR_ARGUMENT, __VA_ARGS__); \
  } while (0)

#if defined(__CUDACC__) || defined(__CUDA_RUNTIME_API_H__)

static inline int comm_fail_cuda(cudaError_t error, const char* call, const char* file, int line) {
  // The runtime keeps the error and would hand it to the next cudaGetLastError(), which has nothing
  // to do with it.
  (void)cudaGetLastError();
  return comm_fail(COMM_ERROR_CUDA + (int)error, "%s at %s:%d: %s (%s)", call, file, line,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

// Make a call of the CUDA runtime; leave the function with its error if it has one.
#define COMM_CUDA(call)                                                                            \
  do {                                                                                             \
    cudaError_t comm_error_ = (call);                                                              \
    if (comm_error_ != cudaSuccess) return comm_fail_cuda(comm_error_, #call, __FILE__, __LINE__); \
  } while (0)

// Leave the function if the launch just made (kernel<<<...>>>(...)) failed.
#define COMM_LAUNCHED(...)                                                               \
  do {                                                                                   \
    cudaError_t comm_error_ = cudaGetLastError();                                        \
    if (comm_error_ != cudaSuccess)                                                      \
      return comm_fail_cuda(comm_error_, "launch of " #__VA_ARGS__, __FILE__, __LINE__); \
  } while (0)

#endif  // CUDA

#endif  // COMM_CORE_STATUS_H_
