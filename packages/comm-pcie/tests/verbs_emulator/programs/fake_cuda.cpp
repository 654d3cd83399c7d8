// The functions of the CUDA driver that the emulator calls, over memory of the host: all memory is
// a device's. Says on standard error, at the end, how it was used.
#include <stdio.h>
#include <string.h>

namespace {

struct Report {
  unsigned long copies = 0, copies_2d = 0, rows = 0, synchronized = 0, opened = 0, closed = 0;
  ~Report() {
    fprintf(stderr, "copies %lu 2d %lu rows %lu synchronized %lu open %lu\n", copies, copies_2d,
            rows, synchronized, opened - closed);
  }
} report;

}  // namespace

#define FAKE extern "C" __attribute__((visibility("default"))) int

struct Handle {
  char bytes[64];
};

FAKE cuPointerGetAttribute(void* data, int, unsigned long long) {
  const unsigned device = 2;
  memcpy(data, &device, sizeof(device));
  return 0;
}

FAKE cuMemGetAddressRange_v2(unsigned long long* base, size_t* size, unsigned long long at) {
  *base = at & ~0xfffull;  // as an allocation that began a little before
  *size = 1 << 20;
  return 0;
}

FAKE cuIpcGetMemHandle(Handle* handle, unsigned long long base) {
  memcpy(handle->bytes, &base, sizeof(base));
  return 0;
}

FAKE cuIpcOpenMemHandle_v2(unsigned long long* base, Handle handle, unsigned flags) {
  if (flags != 1) return 1;
  memcpy(base, handle.bytes, sizeof(*base));
  ++report.opened;
  return 0;
}

FAKE cuIpcCloseMemHandle(unsigned long long) {
  ++report.closed;
  return 0;
}

FAKE cuMemcpy(unsigned long long to, unsigned long long from, size_t length) {
  memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), length);
  ++report.copies;
  return 0;
}

// Twin: CUDA_MEMCPY2D of cuda.h.
struct Copy2D {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  unsigned long long source;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  unsigned target_type;
  void* target_host;
  unsigned long long target;
  void* target_array;
  size_t target_pitch, width, height;
};

FAKE cuMemcpy2DUnaligned_v2(const Copy2D* copy) {
  if (copy->source_type != 4 || copy->target_type != 4 || copy->source_pitch < copy->width ||
      copy->target_pitch < copy->width)
    return 1;
  for (size_t row = 0; row < copy->height; ++row)
    memcpy(reinterpret_cast<char*>(copy->target) + row * copy->target_pitch,
           reinterpret_cast<char*>(copy->source) + row * copy->source_pitch, copy->width);
  ++report.copies_2d;
  report.rows += copy->height;
  return 0;
}

FAKE cuStreamSynchronize(void* stream) {
  ++report.synchronized;
  return stream == nullptr ? 0 : 1;
}
