// Keys to memory, and bytes from one process's memory to another's.
#ifndef VERBS_EMULATOR_MEMORY_H_
#define VERBS_EMULATOR_MEMORY_H_

#include <vector>

#include "fabric.h"

namespace emu {

struct Segment {
  uint64_t addr, length;
  const Key* region;
};

// The memory behind `length` bytes at `addr` of a key, in order; false where the key, its
// protection domain, its access, its range or its description does not allow it, with a text in the
// fabric. `key_nic` is where it is used. Under the lock.
bool translate(Fabric* shared, uint32_t number, uint64_t addr, uint64_t length, uint32_t pd,
               uint32_t access, std::vector<Segment>* out);

// Copy the bytes of `from`, memory of this process, to `to`, memory of process `pid`, but for the
// last `keep` bytes, which are withheld until that process flushes. Returns false if a process's
// memory can't be reached. Under the lock.
bool move_bytes(Fabric* shared, const std::vector<Segment>& from, const std::vector<Segment>& to,
                pid_t pid, uint64_t keep);

// Let this process see what was withheld from it; returns how many pieces that were.
int flush_withheld(Fabric* shared);

// Device memory. All do nothing and return false where VERBS_EMULATOR_CUDA is not set.
bool describe_device_memory(uint64_t addr, Key* key);
// Copy as many rows as one side has, of one length and distance, from or to one range of the other;
// `shift` is added to the addresses of `to`. False where they are not like that.
bool copy_rows(const std::vector<Segment>& from, const std::vector<Segment>& to, int64_t shift);
bool copy_any(void* to, const void* from, size_t length);  // true if it was done
bool finish_copies();

// A region of another process's device memory, mapped here for as long as this lives.
class DeviceMemory {
 public:
  explicit DeviceMemory(const Key& key);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  uint64_t addr() const { return addr_; }  // 0: it can't be mapped

 private:
  unsigned long long base_ = 0;
  uint64_t addr_ = 0;
};

}  // namespace emu

#endif  // VERBS_EMULATOR_MEMORY_H_
