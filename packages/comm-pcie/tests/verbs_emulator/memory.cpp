// Keys to memory, and bytes from one process's memory to another's.
#include "memory.h"

#include <errno.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <memory>

namespace emu {

namespace {

const Key* find_key(const Fabric* shared, uint32_t number) {
  const uint32_t slot = (number >> 8) - 1;
  if (number < 256 || slot >= kKeys) return nullptr;
  const Key& key = shared->keys[slot];
  return key.used && key.number == number ? &key : nullptr;
}

bool deny(const char* format, uint32_t number, uint64_t a, uint64_t b) {
  refuse(0, format, number, static_cast<unsigned long long>(a), static_cast<unsigned long long>(b));
  return false;
}

bool add_region(Fabric* shared, uint32_t number, uint64_t addr, uint64_t length, uint32_t pd,
                uint32_t access, std::vector<Segment>* out) {
  const Key* key = find_key(shared, number);
  if (key == nullptr || key->kind != kRegion)
    return deny("key 0x%x of %llu bytes at 0x%llx is no registered region", number, length, addr);
  if (key->pd != pd)
    return deny("region 0x%x is of protection domain %llu, used in %llu", number, key->pd, pd);
  if ((key->access & access) != access)
    return deny("region 0x%x has access 0x%llx, needed 0x%llx", number, key->access, access);
  if (addr < key->addr || length > key->length || addr - key->addr > key->length - length)
    return deny("region 0x%x is left by %llu bytes at 0x%llx", number, length, addr);
  if (!out->empty() && out->back().region == key && out->back().addr + out->back().length == addr)
    out->back().length += length;
  else
    out->push_back({addr, length, key});
  return true;
}

// A part of the packed stream of an indirect key.
class Walk {
 public:
  Walk(uint64_t skip, uint64_t length) : skip_(skip), left_(length) {}
  bool done() const { return left_ == 0; }
  // Take of a piece of `count` bytes what belongs to the part.
  bool take(Fabric* shared, uint32_t lkey, uint64_t addr, uint64_t count, uint32_t pd,
            uint32_t access, std::vector<Segment>* out) {
    if (skip_ >= count) {
      skip_ -= count;
      return true;
    }
    const uint64_t length = std::min(count - skip_, left_);
    const uint64_t start = addr + skip_;
    skip_ = 0;
    left_ -= length;
    return add_region(shared, lkey, start, length, pd, access, out);
  }

 private:
  uint64_t skip_, left_;
};

}  // namespace

bool translate(Fabric* shared, uint32_t number, uint64_t addr, uint64_t length, uint32_t pd,
               uint32_t access, std::vector<Segment>* out) {
  const Key* key = find_key(shared, number);
  if (key == nullptr)
    return deny("there is no key 0x%x (%llu bytes at 0x%llx)", number, length, addr);
  if (key->kind == kRegion) return add_region(shared, number, addr, length, pd, access, out);
  if (key->pd != pd)
    return deny("key 0x%x is of protection domain %llu, used in %llu", number, key->pd, pd);
  if (!key->configured)
    return deny("key 0x%x is not configured (%llu, %llu)", number, length, addr);
  if ((key->access & access) != access)
    return deny("key 0x%x has access 0x%llx, needed 0x%llx", number, key->access, access);
  // From 0 on: an indirect key addresses its stream, not memory.
  if (addr > key->total || length > key->total - addr)
    return deny("the stream of key 0x%x is left by %llu bytes at %llu", number, length, addr);
  Walk walk(addr, length);
  // What it refers to needs no remote access of its own.
  const uint32_t inner = access & IBV_ACCESS_LOCAL_WRITE;
  if (key->kind == kList) {
    for (uint32_t item_idx = 0; item_idx < key->num_entries && !walk.done(); ++item_idx) {
      const Sge& item = key->list[item_idx];
      if (!walk.take(shared, item.lkey, item.addr, item.length, pd, inner, out)) return false;
    }
  } else {
    if (!shared->copies && key->num_entries == 1 && key->repeat > 1 && length != 0) {
      // Nothing is moved: whether the first and the last row are allowed is whether all are, and a
      // measurement of the host's cost should not contain the way through the others.
      const Entry& entry = key->entries[0];
      const uint64_t last = static_cast<uint64_t>(key->repeat - 1) * entry.stride;
      return add_region(shared, entry.lkey, entry.addr, entry.count, pd, inner, out) &&
             add_region(shared, entry.lkey, entry.addr + last, entry.count, pd, inner, out);
    }
    for (uint32_t row = 0; row < key->repeat && !walk.done(); ++row) {
      for (uint32_t entry_idx = 0; entry_idx < key->num_entries && !walk.done(); ++entry_idx) {
        const Entry& entry = key->entries[entry_idx];
        const uint64_t start = entry.addr + static_cast<uint64_t>(row) * entry.stride;
        if (!walk.take(shared, entry.lkey, start, entry.count, pd, inner, out)) return false;
      }
    }
  }
  return walk.done() ||
         deny("key 0x%x has fewer bytes than it says (%llu at %llu)", number, length, addr);
}

namespace {

bool write_remote(pid_t pid, const std::vector<iovec>& from, const std::vector<iovec>& to,
                  uint64_t total) {
  // Both lists advance byte by byte in step, so a partial call is continued where it ended.
  size_t from_idx = 0, to_idx = 0;
  uint64_t from_skip = 0, to_skip = 0;
  const auto window = [](const std::vector<iovec>& list, size_t first, uint64_t skip,
                         std::vector<iovec>* out) {
    out->assign(list.begin() + static_cast<ptrdiff_t>(first),
                list.begin() + static_cast<ptrdiff_t>(std::min(list.size(), first + IOV_MAX)));
    (*out)[0].iov_base = static_cast<char*>((*out)[0].iov_base) + skip;
    (*out)[0].iov_len -= skip;
  };
  const auto advance = [](const std::vector<iovec>& list, size_t* index, uint64_t* skip,
                          uint64_t by) {
    *skip += by;
    while (*index < list.size() && *skip >= list[*index].iov_len) *skip -= list[(*index)++].iov_len;
  };
  std::vector<iovec> local, remote;
  while (total != 0) {
    window(from, from_idx, from_skip, &local);
    window(to, to_idx, to_skip, &remote);
    const ssize_t done =
        process_vm_writev(pid, local.data(), local.size(), remote.data(), remote.size(), 0);
    if (done <= 0) {
      refuse(0, "process %d: process_vm_writev: %s", static_cast<int>(pid), strerror(errno));
      return false;
    }
    total -= static_cast<uint64_t>(done);
    advance(from, &from_idx, &from_skip, static_cast<uint64_t>(done));
    advance(to, &to_idx, &to_skip, static_cast<uint64_t>(done));
  }
  return true;
}

bool withhold(Fabric* shared, pid_t pid, uint64_t addr, const void* bytes, uint64_t length) {
  for (Withheld& item : shared->withheld) {
    if (item.used) continue;
    item.used = 1;
    item.pid = pid;
    item.addr = addr;
    item.length = static_cast<uint32_t>(length);
    if (!copy_any(item.bytes, bytes, length)) memcpy(item.bytes, bytes, length);
    ++shared->counters.withheld;
    return true;
  }
  refuse(0, "more than %d pieces are withheld", kWithheld);
  return false;
}

// Call `function(source, target, length, tail)` for each piece that is contiguous on both sides, in
// order; `tail` says that it belongs to the last `keep` bytes, whose pieces are small.
template <typename Function>
bool each_piece(const std::vector<Segment>& from, const std::vector<Segment>& to, uint64_t total,
                uint64_t keep, const Function& function) {
  for (uint64_t position = 0, from_idx = 0, to_idx = 0, from_at = 0, to_at = 0; position < total;) {
    const Segment &source = from[from_idx], &target = to[to_idx];
    uint64_t length = std::min(source.length - from_at, target.length - to_at);
    const bool tail = position >= total - keep;
    length = std::min<uint64_t>(length, tail ? kWithheldBytes : total - keep - position);
    if (!function(source.addr + from_at, target.addr + to_at, length, tail)) return false;
    position += length;
    if ((from_at += length) == source.length) ++from_idx, from_at = 0;
    if ((to_at += length) == target.length) ++to_idx, to_at = 0;
  }
  return true;
}

// Where one side or both are memory of a GPU. The target of one write is one region.
bool move_device_bytes(Fabric* shared, const std::vector<Segment>& from,
                       const std::vector<Segment>& to, pid_t pid, uint64_t total, uint64_t keep) {
  const Key& region = *to[0].region;
  int64_t shift = 0;
  std::unique_ptr<DeviceMemory> mapped;
  if (pid != getpid()) {
    mapped.reset(new DeviceMemory(region));
    if (mapped->addr() == 0) return false;
    shift = static_cast<int64_t>(mapped->addr() - region.addr);
  }
  const bool done = (keep == 0 && copy_rows(from, to, shift)) ||
                    each_piece(from, to, total, keep,
                               [&](uint64_t source, uint64_t target, uint64_t length, bool tail) {
                                 const void* bytes = reinterpret_cast<void*>(source);
                                 if (tail) return withhold(shared, pid, target, bytes, length);
                                 const uint64_t there = target + static_cast<uint64_t>(shift);
                                 return copy_any(reinterpret_cast<void*>(there), bytes, length);
                               });
  // Before the mapping goes.
  if (done && finish_copies()) return true;
  refuse(0, "bytes of device memory can't be copied");
  return false;
}

}  // namespace

bool move_bytes(Fabric* shared, const std::vector<Segment>& from, const std::vector<Segment>& to,
                pid_t pid, uint64_t keep) {
  uint64_t total = 0;
  for (const Segment& segment : from) total += segment.length;
  keep = std::min(keep, total);
  const bool here = pid == getpid();
  bool device = false;
  for (const std::vector<Segment>* list : {&from, &to})
    for (const Segment& segment : *list) device = device || segment.region->cuda != 0;
  if (device) return move_device_bytes(shared, from, to, pid, total, keep);
  std::vector<iovec> local, remote;
  uint64_t moved = 0;
  const bool done = each_piece(
      from, to, total, keep, [&](uint64_t source, uint64_t target, uint64_t length, bool tail) {
        if (tail) return withhold(shared, pid, target, reinterpret_cast<void*>(source), length);
        if (here) {
          memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), length);
          return true;
        }
        local.push_back({reinterpret_cast<void*>(source), length});
        remote.push_back({reinterpret_cast<void*>(target), length});
        moved += length;
        return true;
      });
  return done && (moved == 0 || write_remote(pid, local, remote, moved));
}

int flush_withheld(Fabric* shared) {
  int count = 0;
  for (Withheld& item : shared->withheld) {
    if (!item.used || item.pid != getpid()) continue;
    void* to = reinterpret_cast<void*>(item.addr);
    if (!copy_any(to, item.bytes, item.length)) memcpy(to, item.bytes, item.length);
    item.used = 0;
    ++count;
  }
  return count;
}

}  // namespace emu
