// Device memory behind keys, through the CUDA driver, which is loaded only when
// VERBS_EMULATOR_CUDA is set.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <map>
#include <string>

#include "memory.h"

namespace emu {

namespace {

// Of cuda.h, which this must build without.
using Device = unsigned long long;
struct IpcHandle {
  char reserved[64];
};
constexpr int kMemoryType = 2;    // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
constexpr int kDeviceMemory = 2;  // CU_MEMORYTYPE_DEVICE
constexpr unsigned kLazyPeerAccess = 1;

struct Driver {
  int (*pointer_attribute)(void*, int, Device);
  int (*address_range)(Device*, size_t*, Device);
  int (*ipc_get)(IpcHandle*, Device);
  int (*ipc_open)(Device*, IpcHandle, unsigned);
  int (*copy)(Device, Device, size_t);
  int (*synchronize)(void*);
  bool ready;
};

const Driver& driver() {
  static const Driver loaded = [] {
    Driver found = {};
    if (getenv("VERBS_EMULATOR_CUDA") == nullptr) return found;
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) return found;
    const auto take = [&](auto* function, const char* name) {
      *reinterpret_cast<void**>(function) = dlsym(library, name);
      return *reinterpret_cast<void**>(function) != nullptr;
    };
    found.ready = take(&found.pointer_attribute, "cuPointerGetAttribute") &&
                  take(&found.address_range, "cuMemGetAddressRange_v2") &&
                  take(&found.ipc_get, "cuIpcGetMemHandle") &&
                  take(&found.ipc_open, "cuIpcOpenMemHandle_v2") && take(&found.copy, "cuMemcpy") &&
                  take(&found.synchronize, "cuStreamSynchronize");
    return found;
  }();
  return loaded;
}

}  // namespace

bool describe_device_memory(uint64_t addr, Key* key) {
  unsigned type = 0;
  if (!driver().ready || driver().pointer_attribute(&type, kMemoryType, addr) != 0 ||
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

bool open_device_memory(const Key& key, uint64_t* base) {
  static std::map<std::string, Device> opened;  // under the lock of the fabric
  if (key.cuda != 2) return refuse(0, "device memory of another process has no handle") != 0;
  const std::string name(key.cuda_handle, sizeof(key.cuda_handle));
  auto found = opened.find(name);
  if (found == opened.end()) {
    IpcHandle handle;
    memcpy(handle.reserved, key.cuda_handle, sizeof(handle.reserved));
    Device at = 0;
    const int error = driver().ipc_open(&at, handle, kLazyPeerAccess);
    if (error != 0) return refuse(0, "cuIpcOpenMemHandle: %d", error) != 0;
    found = opened.emplace(name, at).first;
  }
  *base = found->second + key.cuda_offset;
  return true;
}

bool copy_any(void* to, const void* from, size_t length) {
  // Unified addressing: the driver sees which is which.
  return driver().ready &&
         driver().copy(reinterpret_cast<Device>(to), reinterpret_cast<Device>(from), length) == 0;
}

// Copies within device memory return before they are done.
bool finish_copies() { return driver().ready && driver().synchronize(nullptr) == 0; }

}  // namespace emu
