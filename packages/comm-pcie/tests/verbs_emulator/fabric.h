// What all processes of an emulated fabric share: NICs, queue pairs, completion queues, keys and
// faults, in one mapped file under one lock.
//
// A test tool. It executes work requests of real programs, with the checks that a NIC makes; it
// cannot show the order of a NIC's writes on a bus, atomicity, bandwidth, or errors in the syntax
// of firmware commands.
#ifndef VERBS_EMULATOR_FABRIC_H_
#define VERBS_EMULATOR_FABRIC_H_

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace emu {

constexpr uint32_t kMagic = 0x656d7531;
constexpr int kNics = 16, kGids = 16, kContexts = 128, kPds = 128, kCqs = 128, kQps = 1024;
constexpr int kKeys = 8192, kRules = 32, kWithheld = 256, kWithheldBytes = 64;
constexpr int kCompletions = 4096, kReceives = 1024, kSges = 4, kEntries = 4;

struct Gid {
  uint8_t raw[16];
  uint32_t type;  // enum ibv_gid_type
  uint32_t ifindex;
  uint32_t used;
};

struct Nic {
  char name[32];
  uint32_t is_mlx5, has_interleaved, has_dmabuf;
  uint32_t port_state, link_layer, active_mtu, numa;
  uint32_t max_msg_sz;
  Gid gids[kGids];
};

struct Context {
  uint32_t used, nic;
  pid_t pid;
};

struct Pd {
  uint32_t used, context;
};

struct Sge {
  uint64_t addr;
  uint32_t length, lkey;
};

// Of an interleaved key, as the entry of the hardware holds it: 16 bits for stride and count.
struct Entry {
  uint64_t addr;
  uint16_t stride, count;
  uint32_t lkey;
};

enum KeyKind : uint32_t { kRegion = 1, kInterleaved = 2, kList = 3 };

struct Key {
  uint32_t used, kind, number, pd, nic;
  uint32_t access, generation;
  pid_t pid;
  uint64_t addr, length;  // of a region
  // Of an indirect key.
  uint32_t configured, repeat, num_entries, max_entries;
  uint64_t total;  // bytes of the packed stream, before anything was cut to 16 bits
  Entry entries[kEntries];
  Sge list[kEntries];
  uint32_t cuda;  // device memory; other processes open the handle
  uint64_t cuda_offset;
  char cuda_handle[64];
};

struct Completion {
  uint64_t wr_id;
  uint32_t status, opcode, vendor_err, byte_len, imm_be, flags, qpn, src_qp;
  uint32_t qp, frees;  // slot of the queue pair, and places of its send queue that this gives back
};

struct Cq {
  uint32_t used, context, capacity, overflowed, users;
  uint64_t head, tail;  // completions taken, completions put
  Completion ring[kCompletions];
};

struct Receive {
  uint64_t wr_id;
  uint32_t num_sge;
  Sge sge[kSges];
};

struct Qp {
  uint32_t used, qpn, nic, context, pd, send_cq, recv_cq, state;
  pid_t pid;
  uint32_t max_send, max_recv, max_inline, send_used;
  uint64_t receive_head, receive_tail;
  uint32_t access, dest_qpn, sgid_index, path_mtu, rnr_retry, retry_count, timeout, min_rnr_timer;
  uint32_t next_psn, expected_psn;
  uint8_t dgid[16];
  Receive receives[kReceives];
};

enum Verb : uint32_t {
  kWrite,
  kWriteImm,
  kUmr,
  kPostReceive,
  kOpen,
  kAllocPd,
  kRegMr,
  kRegDmabuf,
  kCreateCq,
  kCreateQp,
  kCreateMkey,
  kModifyQp,
  kDestroyQp,
  kDeregMr,
  kDestroyMkey,
  kDestroyCq,
  kDeallocPd,
  kClose,
  kPoll,
  kNumVerbs,
};

enum Action : uint32_t {
  kFail,    // the call returns an error number
  kDelay,   // executed later
  kHold,    // executed, and its completion kept back until `release` or until the queue pair stops
  kDrop,    // not executed; completed only when the queue pair stops
  kLose,    // not executed and never completed
  kStatus,  // completed with another status
  kLate,    // its last bytes are seen only after a flush
  kNotReady,  // as though there were no receive
  kNumActions,
};

struct Rule {
  uint32_t used, action, verb;
  int32_t nic, peer;  // -1: any
  uint32_t value;     // an error number, milliseconds, a status or bytes
  uint32_t after, count, seen, fired;
  char text[160];
};

// Bytes that have arrived and can't be seen yet.
struct Withheld {
  uint32_t used, length;
  pid_t pid;
  uint64_t addr;
  uint8_t bytes[kWithheldBytes];
};

struct Counters {
  uint64_t posted[kNumVerbs];
  uint64_t executed_writes, written_bytes, umrs, completions, errors, flushed, rnr_naks, overflows,
      events, withheld, not_ready_posts;
};

struct Fabric {
  uint32_t magic, size;
  pthread_mutex_t lock;
  uint32_t copies;   // 0: everything but the bytes
  uint32_t shuffle;  // not 0: completions of different queue pairs change places, by this seed
  uint32_t num_nics, generation;
  uint32_t qps_high, cqs_high;  // slots from here on were never used, and are never looked at
  Nic nics[kNics];
  Context contexts[kContexts];
  Pd pds[kPds];
  Key keys[kKeys];
  Rule rules[kRules];
  Withheld withheld[kWithheld];
  Counters counters;
  char problem[512];  // of the last refusal
  Qp qps[kQps];
  Cq cqs[kCqs];
};

// The fabric of this process: of VERBS_EMULATOR, or null where that is not set.
Fabric* fabric();
const char* fabric_path();

class Lock {
 public:
  explicit Lock(Fabric* fabric);
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  Fabric* fabric_;
};

// Keep why a call is refused, for the test that wonders; returns `error`. Under the lock.
int refuse(int error, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The first rule that applies to a call, counted as fired; null for none. Under the lock.
// `peer` is the NIC of the other side, or -1.
Rule* match(Verb verb, uint32_t nic, int32_t peer);

// 0, or the error number that a rule orders for `verb`. Under the lock.
int ordered_error(Verb verb, uint32_t nic);

// Tell a context of an event. `qp` or `cq` is its slot, or -1. Under the lock.
void send_event(uint32_t context, uint32_t type, int32_t qp, int32_t cq, int32_t port = 1);

struct EventRecord {
  uint32_t type;
  int32_t qp, cq, port;
};

void event_path(uint32_t context, char* path, size_t size);

}  // namespace emu

#endif  // VERBS_EMULATOR_FABRIC_H_
