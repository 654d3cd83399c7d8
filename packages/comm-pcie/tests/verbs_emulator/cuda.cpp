// Device memory behind keys, through the CUDA driver, which is loaded only where
// VERBS_EMULATOR_CUDA is set: to the path of a driver library, or to 1 for the system's.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

namespace emu {

namespace {

// Of cuda.h, which this must build without.
using Device = unsigned long long;
struct IpcHandle {
  char reserved[64];
};
struct Copy2D {
  size_t source_x, source_y;
  unsigned source_type;
  const void* source_host;
  Device source;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  unsigned target_type;
  void* target_host;
  Device target;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};
constexpr int kMemoryTypeAttribute = 2;  // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr unsigned kDeviceMemory = 2;    // CU_MEMORYTYPE_DEVICE
constexpr unsigned kUnified = 4;         // CU_MEMORYTYPE_UNIFIED
constexpr unsigned kLazyPeerAccess = 1;

struct Driver {
  int (*pointer_attribute)(void*, int, Device);
  int (*address_range)(Device*, size_t*, Device);
  int (*ipc_get)(IpcHandle*, Device);
  int (*ipc_open)(Device*, IpcHandle, unsigned);
  int (*ipc_close)(Device);
  int (*copy)(Device, Device, size_t);
  int (*copy_2d)(const Copy2D*);
  int (*synchronize)(void*);
  bool ready;
};

const Driver& driver() {
  static const Driver loaded = [] {
    Driver found = {};
    const char* name = getenv("VERBS_EMULATOR_CUDA");
    if (name == nullptr) return found;
    void* library = dlopen(strcmp(name, "1") == 0 ? "libcuda.so.1" : name, RTLD_NOW);
    if (library == nullptr) return found;
    const auto take = [&](auto* function, const char* symbol) {
      *reinterpret_cast<void**>(function) = dlsym(library, symbol);
      return *reinterpret_cast<void**>(function) != nullptr;
    };
    found.ready = take(&found.pointer_attribute, "cuPointerGetAttribute") &&
                  take(&found.address_range, "cuMemGetAddressRange_v2") &&
                  take(&found.ipc_get, "cuIpcGetMemHandle") &&
                  take(&found.ipc_open, "cuIpcOpenMemHandle_v2") &&
                  take(&found.ipc_close, "cuIpcCloseMemHandle") && take(&found.copy, "cuMemcpy") &&
                  take(&found.copy_2d, "cuMemcpy2DUnaligned_v2") &&
                  take(&found.synchronize, "cuStreamSynchronize");
    return found;
  }();
  return loaded;
}

// Whether `rows` are of one length and one distance, which is written to `pitch`.
bool regular(const std::vector<Segment>& rows, uint64_t* pitch) {
  *pitch = rows.size() > 1 ? rows[1].addr - rows[0].addr : rows[0].length;
  for (size_t row = 1; row < rows.size(); ++row)
    if (rows[row].length != rows[0].length || rows[row].addr - rows[row - 1].addr != *pitch)
      return false;
  return true;
}

}  // namespace

bool describe_device_memory(uint64_t addr, Key* key) {
  unsigned type = 0;
  if (!driver().ready || driver().pointer_attribute(&type, kMemoryTypeAttribute, addr) != 0 ||
      type != kDeviceMemory)
    return false;
  Device base = 0;
  size_t size = 0;
  IpcHandle handle;
  key->cuda = 1;
  // Other processes can't reach memory that has no handle (VMM); threads of this one can.
  if (driver().address_range(&base, &size, addr) == 0 && driver().ipc_get(&handle, base) == 0) {
    key->cuda = 2;
    key->cuda_offset = addr - base;
    memcpy(key->cuda_handle, handle.reserved, sizeof(handle.reserved));
  }
  return true;
}

DeviceMemory::DeviceMemory(const Key& key) {
  if (key.cuda != 2) {
    refuse(0, "device memory of another process has no handle");
    return;
  }
  IpcHandle handle;
  memcpy(handle.reserved, key.cuda_handle, sizeof(handle.reserved));
  const int error = driver().ipc_open(&base_, handle, kLazyPeerAccess);
  if (error != 0) {
    refuse(0, "cuIpcOpenMemHandle: %d", error);
    base_ = 0;
    return;
  }
  addr_ = base_ + key.cuda_offset;
}

DeviceMemory::~DeviceMemory() {
  // Not kept: the owner may free it and get another memory with the same handle.
  if (base_ != 0) driver().ipc_close(base_);
}

bool copy_any(void* to, const void* from, size_t length) {
  // Unified addressing: the driver sees which is which.
  return driver().ready &&
         driver().copy(reinterpret_cast<Device>(to), reinterpret_cast<Device>(from), length) == 0;
}

bool copy_rows(const std::vector<Segment>& from, const std::vector<Segment>& to, int64_t shift) {
  if (!driver().ready || from.empty() || to.empty()) return false;
  if (from.size() != 1 && to.size() != 1) return false;
  Copy2D copy = {};
  uint64_t source_pitch = 0, target_pitch = 0;
  if (!regular(from, &source_pitch) || !regular(to, &target_pitch)) return false;
  const std::vector<Segment>& rows = from.size() > 1 ? from : to;
  copy.width = rows[0].length;
  copy.height = rows.size();
  copy.source_type = copy.target_type = kUnified;
  copy.source = from[0].addr;
  copy.target = to[0].addr + static_cast<uint64_t>(shift);
  copy.source_pitch = from.size() > 1 ? source_pitch : copy.width;
  copy.target_pitch = to.size() > 1 ? target_pitch : copy.width;
  return driver().copy_2d(&copy) == 0;
}

// Copies within device memory return before they are done.
bool finish_copies() { return driver().ready && driver().synchronize(nullptr) == 0; }

}  // namespace emu
