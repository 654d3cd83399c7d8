// The kernels of the test of links as host functions, over links that can be broken.
//
// HOST_LINK_FAULT is "<what>:<from>:<to>" (device numbers): drop-stores, flip-stores, drop-copies,
// flip-copies, hang-stores, hang-copies, crash-copies, deny.
#include <stdio.h>
#include <unistd.h>

#include <comm_pcie/selftest.cuh>

static inline bool link_fault(const char* what, int from, int to) {
  const char* text = getenv("HOST_LINK_FAULT");
  char kind[32];
  int a, b;
  return text != nullptr && sscanf(text, "%31[^:]:%d:%d", kind, &a, &b) == 3 &&
         strcmp(kind, what) == 0 && a == from && b == to;
}

static inline void link_copy(char* to, const char* from, size_t bytes, int device) {
  int target = host_device_of(to);
  if (link_fault("hang-copies", device, target)) pause();
  if (link_fault("crash-copies", device, target)) abort();
  if (link_fault("drop-copies", device, target)) return;
  memcpy(to, from, bytes);
  if (link_fault("flip-copies", device, target)) to[bytes / 2] ^= 1;
}

namespace comm_pcie {

inline void selftest_write_kernel(uint32_t* data, uint64_t words, uint32_t seed, uint32_t spoil,
                                  uint32_t*, uint32_t* flag) {
  int target = host_device_of(data);
  if (link_fault("hang-stores", host_device_, target)) pause();
  bool lost = link_fault("drop-stores", host_device_, target);
  for (uint64_t at = 0; at < words && !lost; ++at) {
    data[at] = pattern_word(seed, at) ^ uint32_t(spoil == at + 1);
    if (at == 7 && link_fault("flip-stores", host_device_, target)) data[at] ^= 0x100u;
  }
  if (flag != nullptr) comm::store_release(flag, 1);
}

inline void selftest_release_kernel(uint32_t* flag) {
  // A flag is a store of a kernel too.
  comm::store_release(flag, 1);
}

inline void selftest_check_kernel(const uint32_t* data, uint64_t words, uint32_t seed,
                                  const uint32_t* flag, uint64_t timeout_ns, TestCounts* counts) {
  uint64_t deadline = comm::now_ns() + timeout_ns;
  while (comm::load_acquire(flag) != 1 && comm::now_ns() < deadline) sched_yield();
  counts->came = comm::load_acquire(flag) == 1;
  counts->first = ~0ull;
  if (!counts->came) return;
  for (uint64_t at = 0; at < words; ++at) {
    if (data[at] == pattern_word(seed, at)) continue;
    ++counts->wrong;
    if (counts->first == ~0ull) counts->first = at;
  }
}

}  // namespace comm_pcie
