// A fixed range of memory from which torch's caching allocator takes its segments.
//
// torch calls the two functions from whatever thread allocates or frees, with its own lock held, so
// they are plain C++: a callback into Python would wait for the interpreter's lock, whose holder
// may wait for torch's.
#pragma once

#include <stdint.h>
#include <sys/types.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

namespace comm {
namespace nvlink {

class Arena {
 public:
  static constexpr uint64_t kGranule = 512;

  Arena(uint64_t base, uint64_t bytes) : base_(base), bytes_(bytes) {
    if (bytes != 0) free_[base] = bytes;
  }

  // The first range that is large enough, or 0.
  uint64_t take(uint64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t size = bytes == 0 ? kGranule : (bytes + kGranule - 1) / kGranule * kGranule;
    for (auto range = free_.begin(); range != free_.end(); ++range) {
      if (range->second < size) continue;
      uint64_t at = range->first, rest = range->second - size;
      free_.erase(range);
      if (rest != 0) free_[at + size] = rest;
      taken_[at] = size;
      used_ += size;
      return at;
    }
    refused_ = bytes;
    return 0;
  }

  // Reserve what a tensor of an arena that was closed still holds of this memory, whose address is
  // used again. It is given back like everything that was taken.
  void reserve(uint64_t at, uint64_t size) {
    std::lock_guard<std::mutex> lock(mutex_);
    // Arenas begin and end at granules, and so does what they give.
    uint64_t begin = std::max(at, base_), end = std::min(at + size, base_ + bytes_);
    for (auto range = free_.begin(); range != free_.end();) {
      uint64_t first = range->first, last = first + range->second;
      if (last <= begin || end <= first) {
        ++range;
        continue;
      }
      range = free_.erase(range);
      if (first < begin) free_[first] = begin - first;
      if (end < last) free_[end] = last - end;
    }
    used_ += end - begin;
    // What lies here only in part is never given back: its beginning or end is not this arena's.
    if (begin == at && end == at + size) taken_[at] = size;
  }

  bool touches(uint64_t at, uint64_t size) const {
    return at < base_ + bytes_ && base_ < at + size;
  }

  // What is still taken.
  std::map<uint64_t, uint64_t> taken() {
    std::lock_guard<std::mutex> lock(mutex_);
    return taken_;
  }

  // Whether `at` was taken from here; it is free again then.
  bool give_back(uint64_t at) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = taken_.find(at);
    if (found == taken_.end()) return false;
    uint64_t size = found->second;
    taken_.erase(found);
    used_ -= size;
    auto next = free_.lower_bound(at);
    if (next != free_.end() && at + size == next->first) {
      size += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      auto before = next;
      --before;
      if (before->first + before->second == at) {
        before->second += size;
        return true;
      }
    }
    free_[at] = size;
    return true;
  }

  uint64_t bytes() const { return bytes_; }

  // Bytes that are taken, and the size of the last request that did not fit (0: none since the last
  // time this was asked).
  void look(uint64_t* used, uint64_t* refused) {
    std::lock_guard<std::mutex> lock(mutex_);
    *used = used_;
    *refused = refused_;
    refused_ = 0;
  }

 private:
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_, taken_;  // address -> bytes
  uint64_t base_, bytes_, used_ = 0, refused_ = 0;
};

// The arenas of all open sessions, since what torch frees comes without a word of where it is from.
// Not on a launch path.
struct Arenas {
  std::mutex mutex;
  std::vector<Arena*> open;
  // What tensors still hold of arenas that were closed: address -> bytes. The same addresses may be
  // those of a later arena, which must neither give them away nor take their release for one of its
  // own.
  std::map<uint64_t, uint64_t> orphans;
};

inline Arenas& arenas() {
  // Never destroyed: torch frees segments until the very end of the process.
  static Arenas* all = new Arenas();
  return *all;
}

// The arena of the innermost pool that this thread is in.
inline Arena*& current_arena() {
  static thread_local Arena* current = nullptr;
  return current;
}

inline void* arena_allocate(ssize_t bytes, int, void*) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  const auto& open = arenas().open;
  // A session may be closed while a thread is in its pool.
  auto found = std::find(open.begin(), open.end(), current_arena());
  return found == open.end() ? nullptr : reinterpret_cast<void*>((*found)->take(uint64_t(bytes)));
}

inline void arena_free(void* pointer, ssize_t, int, void*) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  for (Arena* arena : arenas().open) {
    if (arena->give_back(reinterpret_cast<uint64_t>(pointer))) return;
  }
  // From an arena that was closed with its session: its memory is the session's to release.
  arenas().orphans.erase(reinterpret_cast<uint64_t>(pointer));
}

inline void open_arena(Arena* arena) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  auto& orphans = arenas().orphans;
  for (auto orphan = orphans.begin(); orphan != orphans.end();) {
    if (!arena->touches(orphan->first, orphan->second)) {
      ++orphan;
      continue;
    }
    arena->reserve(orphan->first, orphan->second);
    // Whoever has it whole is who it is given back to.
    orphan = arena->taken().count(orphan->first) ? orphans.erase(orphan) : std::next(orphan);
  }
  arenas().open.push_back(arena);
}

// Whether it was open. The caller deletes it.
inline bool close_arena(Arena* arena) {
  std::lock_guard<std::mutex> lock(arenas().mutex);
  auto& open = arenas().open;
  auto found = std::find(open.begin(), open.end(), arena);
  if (found == open.end()) return false;
  open.erase(found);
  for (const auto& item : arena->taken()) arenas().orphans[item.first] = item.second;
  return true;
}

}  // namespace nvlink
}  // namespace comm
