// Loads and stores of the kernels, and how a kernel follows the one before it.
#pragma once

#include <stdint.h>
#include <string.h>

#include <comm_core/signal.cuh>

namespace comm_lowp {

struct alignas(16) Vector {
  uint32_t word[4];
};

// One of Q, K and V: [B, L, H, D] of a 16-bit type, D dense, every row aligned to 16 bytes. Strides
// in elements. `data` is null where the tensor takes no part.
struct View {
  const char* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
};

static_assert(sizeof(View) == 32, "mirrored by comm_lowp.kernels");

COMM_HD const char* row_of(const View& view, uint32_t batch, uint32_t row, uint32_t head) {
  return view.data + 2 * (int64_t(batch) * view.batch_stride + int64_t(row) * view.row_stride +
                          int64_t(head) * view.head_stride);
}

// Data that is read once: it is not kept in the first-level cache. The loads are volatile because
// the compiler may move others above `follow`.
COMM_HD Vector load_once(const void* address) {
  Vector v;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address));
#else
  memcpy(&v, address, 16);
#endif
  return v;
}

COMM_HD void store(void* address, const Vector& v) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#else
  memcpy(address, &v, 16);
#endif
}

// The first thing that every kernel does. Launched with programmatic dependent launch, a kernel
// starts before the previous one has ended; nothing of that one's may be read or overwritten above
// this line. `kLead`: the next kernel may start early as well, and waits here in turn.
//
// A kernel that somebody else's may follow does not lead: what comes next may wait for other ranks.
template <bool kLead = true>
COMM_HD void follow() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (kLead) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

#if defined(__CUDACC__)

// Whether this is the last of `parts` blocks to count, in all its threads. The last one sees what
// the others have written before they counted, and the counter is 0 again. It belongs to one kernel
// at a time.
__device__ __forceinline__ bool last_block(uint32_t* counter, uint32_t parts) {
  __syncthreads();
  return __syncthreads_or(threadIdx.x == 0 && comm::last_part(counter, parts)) != 0;
}

#endif

}  // namespace comm_lowp
