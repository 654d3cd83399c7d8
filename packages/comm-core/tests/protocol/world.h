// Ranks as threads of one process: each with its own signal block and windows, which the others
// write.
//
// A "kernel" of a rank is a set of threads, its blocks; `boundary` is what stream order is on a
// device.
#pragma once

#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "comm_core/allreduce.cuh"
#include "comm_core/barrier.cuh"

constexpr uint32_t kWindows = 2;
constexpr uint32_t kSlotBytes = 96;   // the most that one rank sends to another in an epoch
constexpr uint32_t kChunkBytes = 32;  // a writer looks at the abort word once a chunk
constexpr uint32_t kPlaces = 3;       // offsets that a receiver chooses among; neighbours overlap
constexpr uint32_t kPlaceStep = kSlotBytes / 2;
constexpr uint32_t kWindowBytes = comm::kMaxRanks * kSlotBytes + kPlaces * kPlaceStep;
constexpr uint64_t kMinute = 60ull * 1000 * 1000 * 1000;

enum ExitCode { kCorrupt = 3, kUnexpected = 4, kUsage = 5 };

[[noreturn]] inline void fail(ExitCode code, const char* text, uint32_t a = 0, uint32_t b = 0,
                              uint32_t c = 0) {
  char line[200];
  int length = snprintf(line, sizeof(line), text, a, b, c);
  if (write(STDERR_FILENO, line, size_t(length)) < 0 || write(STDERR_FILENO, "\n", 1) < 0)
    code = kUsage;
  _exit(code);  // not exit: other threads are running, and their destructors would be the next race
}

inline void expect(bool holds, const char* text, uint32_t a = 0, uint32_t b = 0, uint32_t c = 0) {
  if (!holds) fail(kUnexpected, text, a, b, c);
}

// A number that all ranks compute alike.
inline uint32_t mix(uint32_t a, uint32_t b = 0, uint32_t c = 0, uint32_t d = 0) {
  uint64_t x = (uint64_t(a) << 32 | b) * 0x9e3779b97f4a7c15ull + (uint64_t(c) << 32 | d);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return uint32_t((x ^ (x >> 31)) >> 16);
}

struct Place {
  uint32_t window;
  uint64_t offset;
};

// Where rank `rank` wants its data in an epoch. Often the place of the epoch before or one that
// overlaps it: windows in strict alternation would hide a sender that does not wait for its
// permission.
inline Place place_of(uint32_t rank, uint32_t epoch) {
  uint32_t value = mix(rank, epoch, 1);
  return {value % kWindows, uint64_t(value / kWindows % kPlaces) * kPlaceStep};
}

inline uint32_t bytes_of(uint32_t sender, uint32_t receiver, uint32_t epoch) {
  return mix(sender, receiver, epoch, 2) % (kSlotBytes + 1);  // nothing at all is legal too
}

inline uint8_t byte_of(uint32_t sender, uint32_t receiver, uint32_t epoch, uint32_t at) {
  return uint8_t(mix(sender, receiver, epoch, 3) + 7 * at);
}

struct World {
  uint32_t ranks;
  uint32_t blocks;
  std::vector<std::unique_ptr<comm::SignalBlock>> owned;
  comm::SignalBlock* signals[comm::kMaxRanks] = {};
  std::unique_ptr<uint8_t[]> memory[comm::kMaxRanks][kWindows];
  comm::StallRecord records[comm::kMaxRanks] = {};
  std::atomic<uint64_t> at_boundary[comm::kMaxRanks] = {};

  // `start`: how many operations there have been already.
  World(uint32_t ranks, uint32_t blocks, uint32_t start) : ranks(ranks), blocks(blocks) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      owned.push_back(std::make_unique<comm::SignalBlock>());
      comm::SignalBlock* block = owned.back().get();
      signals[rank] = block;
      block->epoch.value = start;
      for (uint32_t peer = 0; peer < comm::kMaxRanks; ++peer) {
        block->arrived[peer].value = block->done[peer].value = block->ready[peer].epoch = start;
      }
      for (auto& window : memory[rank]) window.reset(new uint8_t[kWindowBytes]());
    }
  }

  uint8_t* slot(uint32_t receiver, uint32_t sender, Place place) {
    return memory[receiver][place.window].get() + place.offset + sender * kSlotBytes;
  }

  comm::Call call(uint32_t rank, uint32_t operation, uint32_t epoch, uint64_t timeout_ns) {
    return {signals, &records[rank], comm::now_ns() + timeout_ns, rank, ranks, operation, epoch};
  }

  // The end of a kernel and the start of the next one: every block of the rank is here.
  void boundary(uint32_t rank) {
    if (blocks == 1) return;
    uint64_t arrivals = at_boundary[rank].fetch_add(1, std::memory_order_acq_rel);
    uint64_t all = (arrivals / blocks + 1) * blocks;
    while (at_boundary[rank].load(std::memory_order_acquire) < all) COMM_SPIN();
  }

  // Run `block(rank, block)` on a thread for each.
  template <typename Block>
  void run(Block block) {
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      for (uint32_t b = 0; b < blocks; ++b) threads.emplace_back(block, rank, b);
    }
    for (auto& thread : threads) thread.join();
  }
};

// Buffers of the all-reduce, and one call of it: the protocol of include/comm_core/allreduce.cuh as
// its kernels go through it, with a thread for a block.
struct Reduction {
  static constexpr uint64_t kHalf = 64;  // vectors

  World& world;
  std::vector<std::vector<comm::Vector>> buffers;

  explicit Reduction(World& world) : world(world), buffers(world.ranks) {
    for (auto& buffer : buffers) {
      buffer.resize(comm::kLamportHalves * kHalf);
      for (auto& vector : buffer) comm::lamport_rearm(&vector);
    }
  }

  comm::ReduceParams params(uint32_t rank, const void* input, void* output, uint64_t bytes,
                            bool two_shots, uint64_t timeout_ns) {
    comm::ReduceParams p = {};
    p.session.rank = rank;
    p.session.world_size = world.ranks;
    p.session.poison = 1;
    for (uint32_t peer = 0; peer < world.ranks; ++peer) {
      p.session.signals[peer] = world.signals[peer];
      p.buffers[peer] = buffers[peer].data();
    }
    p.session.record = &world.records[rank];
    p.session.timeout_ns = timeout_ns;
    p.input = input;
    p.output = output;
    p.vectors = (bytes + 15) / 16;
    p.tail_bytes = uint32_t(bytes - (p.vectors - 1) * 16);
    p.half_vectors = kHalf;
    p.two_shots = two_shots;
    p.slot_vectors = two_shots ? (p.vectors + world.ranks - 1) / world.ranks : p.vectors;
    p.operation = 10;
    return p;
  }

  // `at(point)` is called before anything (0), after the first stores (1), and, in two shots, after
  // the sums of the own part (2); it returns whether to go on.
  template <class T, class At>
  comm::Wait call(const comm::ReduceParams& p, uint32_t block, uint32_t blocks, At at) {
    if (!at(0)) return comm::Wait::kAborted;
    comm::Member m = comm::enter(p);
    if (p.two_shots && m.good() && block == 0) comm::announce_to_all(m.call, 0, 0);
    if (m.good() && p.two_shots) {
      comm::scatter_operand<T, true>(m, block, blocks);
    } else if (m.good()) {
      for (uint64_t index = block; index < p.vectors; index += blocks) {
        comm::send_to_all(m, index, comm::load_operand<T, true>(p, index));
      }
    }
    comm::count_block(m, blocks);
    m.call.deadline_ns = comm::now_ns() + p.session.timeout_ns;
    at(1);
    if (p.two_shots) comm::reduce_own_part<T, true, 2>(m, block, blocks);
    at(2);
    for (uint64_t index = block; index < p.vectors; index += blocks) {
      const comm::Vector sum =
          p.two_shots ? comm::take_sum(m, index, true) : comm::sum_all<T, true, 4>(m, index, true);
      comm::store_output(p, index, sum);
    }
    comm::leave_call(m);
    return m.wait;
  }
};

// The value of `name=` among the arguments, or `otherwise`.
inline const char* argument(int argc, char** argv, const char* name, const char* otherwise) {
  size_t length = strlen(name);
  for (int i = 2; i < argc; ++i) {
    if (strncmp(argv[i], name, length) == 0 && argv[i][length] == '=') return argv[i] + length + 1;
  }
  return otherwise;
}

inline uint32_t number(int argc, char** argv, const char* name, uint32_t otherwise) {
  const char* text = argument(argc, argv, name, nullptr);
  return text == nullptr ? otherwise : uint32_t(strtoul(text, nullptr, 0));
}
