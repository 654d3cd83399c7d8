// What Python and the engine of the RDMA routes hand to each other: plain data, no verbs.
//
// Twin: comm_pcie/rdma/records.py and comm_pcie/rdma/module.py.
#ifndef COMM_PCIE_RDMA_TYPES_H_
#define COMM_PCIE_RDMA_TYPES_H_

#include <stddef.h>
#include <stdint.h>

namespace comm {
namespace pcie {
namespace rdma {

constexpr uint32_t kMaxRanks = 64;

// An entry of an interleaved key has 16 bits for the distance of two rows and 16 bits for a row's
// width, and the library that fills it in cuts what is larger without a word.
constexpr uint64_t kMaxStride = 65535;

// The highest bit says that it is this protocol's; the rest is the exchange's number.
constexpr uint32_t kImmediateMark = 0x80000000u;
constexpr uint32_t kImmediateMask = 0x3fffffffu;

// Explicit numbers, append only. Twin: comm_pcie/rdma/records.py, Kind.
enum OutcomeKind : uint32_t {
  kOk = 0,
  kDeadline = 1,
  kCompletion = 2,
  kProtocol = 3,
  kPost = 4,
  kEvent = 5,
  kAborted = 6,
  kBroken = 7,
};

struct Outcome {
  uint32_t kind;
  int32_t peer;  // -1: nobody in particular
  uint64_t elapsed_ns;
  uint32_t sends;
  uint32_t receives;
  char reason[488];
};
static_assert(sizeof(Outcome) == 512, "Twin: module.py, OUTCOME");

struct Settings {
  uint32_t send_depth;
  uint32_t receive_depth;
  uint32_t timeout;
  uint32_t retry_count;
  uint32_t traffic_class;
  uint32_t reserved;
};
static_assert(sizeof(Settings) == 24, "Twin: module.py, SETTINGS");

// What is told to one peer, and to all.
struct Endpoint {
  uint8_t gid[16];
  uint64_t max_message;
  uint32_t mtu;  // enum ibv_mtu
  uint32_t rank;
  uint32_t qpn;
  uint32_t psn;
};
static_assert(sizeof(Endpoint) == 40, "Twin: module.py, ENDPOINT");

struct Memory {
  uint64_t address;
  uint64_t nbytes;
  uint64_t dmabuf_offset;
  int32_t dmabuf_fd;  // -1: none
  uint32_t device;    // 1: device memory that has no DMA-BUF; 0: host memory, where dmabuf_fd is -1
};
static_assert(sizeof(Memory) == 32, "Twin: module.py, MEMORY");

struct Band {
  uint64_t offset;
  uint64_t rows;
  uint64_t width;
  uint64_t pitch;

  uint64_t nbytes() const { return rows * width; }
  uint64_t end() const { return offset + (rows - 1) * pitch + width; }
  bool strided() const { return rows > 1 && pitch != width; }
  bool operator==(const Band& other) const {
    return offset == other.offset && rows == other.rows && width == other.width &&
           pitch == other.pitch;
  }
  bool operator!=(const Band& other) const { return !(*this == other); }
};
static_assert(sizeof(Band) == 32, "Three of them are in a share");

// One peer's share of an exchange, both ways.
struct Share {
  uint32_t peer;  // rank
  uint32_t reserved;
  Band source;  // of the landing buffer here
  Band target;  // of the peer's output
  Band own;     // of the output here, which the peer writes
};
static_assert(sizeof(Share) == 104, "Twin: module.py, SHARE");

// What a peer said of its output.
struct Attached {
  uint64_t address;
  uint64_t nbytes;
  uint32_t rank;
  uint32_t rkey;
  uint32_t band_rkey;  // of the band that this rank writes there
  uint32_t reserved;
};
static_assert(sizeof(Attached) == 32, "Twin: module.py, ATTACHED");

// Twin: comm_pcie/rdma/records.py, Counters.
struct Counters {
  uint64_t exchanges;
  uint64_t writes;
  uint64_t write_bytes;
  uint64_t rebinds;
  uint64_t receives_posted;
  uint64_t sends_completed;
  uint64_t receives_completed;
  uint64_t polls;
  uint64_t events;
  uint64_t registrations;
  uint64_t split_writes;
};
static_assert(sizeof(Counters) == 88, "Twin: module.py, COUNTERS");

// What is posted to one peer and not retired.
struct Posted {
  uint32_t sends;
  uint32_t receives;
};
static_assert(sizeof(Posted) == 8, "Twin: module.py, POSTED");

}  // namespace rdma
}  // namespace pcie
}  // namespace comm

#endif  // COMM_PCIE_RDMA_TYPES_H_
