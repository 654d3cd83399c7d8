// Ranks that stop, and ranks that come too late, at every point of each protocol. Exits with 0,
// with ThreadSanitizer's code, or with one of ExitCode.
//
// Time is the test's own: it stands still until nothing can happen any more, and then passes all
// deadlines at once. So no result depends on how busy the machine is, and no deadline is ever
// waited for.
//
//   stalls exchange ranks=4 spread=1 victim=0 point=3 omit=look
//   stalls barrier  ranks=4 victim=1
//   stalls allreduce ranks=3 victim=1
//   stalls moments

#include <sched.h>
#include <stdint.h>

uint64_t test_now();
void test_spin();
#define COMM_NOW_NS test_now
#define COMM_SPIN test_spin

#include "world.h"

using namespace comm;

namespace {

constexpr uint64_t kTimeout = 1000;           // on the test's clock
constexpr uint64_t kPatient = 1'000'000'000;  // never comes
constexpr uint32_t kMaxThreads = kMaxRanks * kMaxRanks;

std::atomic<uint64_t> clock_ns{1};

// What the supervisor knows of a thread. A thread that waits advances `looks` with each look at
// what it waits for; one that gets anywhere advances `steps`.
struct Watched {
  std::atomic<uint64_t> looks{0};
  std::atomic<uint64_t> steps{0};
  std::atomic<uint32_t> parked{0};
  std::atomic<uint32_t> ended{0};
};

Watched watched[kMaxThreads];
thread_local Watched* self = nullptr;
thread_local void (*at_next_clock)() = nullptr;

void step() {
  if (self != nullptr) self->steps.fetch_add(1, std::memory_order_relaxed);
}

// Wait until every thread has ended, or is parked, or has looked long enough for something that
// will not come. When all of them looked again after the last one got anywhere, no store is under
// way: nothing will ever change.
void settle(uint32_t threads) {
  // A look at the flag, the abort word and the clock, whatever the phase.
  constexpr uint64_t kLooks = 2 * kSpinsPerCheck + 2;
  for (bool quiet = false; !quiet;) {
    uint64_t steps = 0, again = 0;
    std::vector<uint64_t> looks;
    for (uint32_t i = 0; i < threads; ++i) {
      steps += watched[i].steps.load();
      looks.push_back(watched[i].looks.load());
    }
    for (uint32_t i = 0; i < threads; ++i) {
      while (!watched[i].ended.load() && !watched[i].parked.load() &&
             watched[i].looks.load() < looks[i] + kLooks) {
        usleep(50);
      }
    }
    for (uint32_t i = 0; i < threads; ++i) again += watched[i].steps.load();
    quiet = steps == again;
  }
}

// The way of a rank through an exchange, as seen by one of its blocks.
enum Point : uint32_t {
  kEntry,       // has not called
  kAnnouncing,  // has told some of its peers where it wants its data
  kAnnounced,   // has told all
  kPermitted,   // has been told, and stored nothing
  kStoring,     // has stored a part
  kStored,      // has stored all, and said nothing
  kDone,        // has said so, and waits for the others
  kComplete,    // has got everything, and not left
  kPoints,
};

constexpr uint32_t kStart =
    0xfffffffd;  // the victim's last epoch is the second, so the epochs wrap around
constexpr uint32_t kStopEpoch = kStart + 2;

uint64_t timeout_of(uint32_t rank, uint32_t victim, uint32_t ranks, bool all) {
  return all || rank == (victim + 1) % ranks ? kTimeout : kPatient;
}

struct Stall {
  World& world;
  uint32_t victim;
  uint32_t point;
  bool look;  // the writers look at the abort word
  bool all;   // everybody's deadline passes; otherwise that of one rank, and the others are told
  std::atomic<bool> resume{false};
  std::atomic<uint32_t> stored_after{0};

  // Stop here for as long as the supervisor wants, if this is the victim and it is time.
  void maybe_park(uint32_t rank, uint32_t epoch, uint32_t here) {
    step();
    if (rank != victim || epoch != kStopEpoch || here < point || resume.load()) return;
    self->parked.store(1);
    while (!resume.load()) usleep(50);
    self->parked.store(0);
  }

  Outcome ready(const Call& call, uint32_t peer, Place* place) {
    if (look) return wait_ready(call, peer, &place->window, &place->offset);
    // What a writer would do that takes the flag for the permission.
    const Announcement* ready = &own_block(call)->ready[peer];
    Wait wait =
        wait_flag(&ready->epoch, call.epoch, &own_block(call)->abort.value, call.deadline_ns);
    *place = {ready->window, ready->offset};
    return {wait, peer};
  }

  // Store for one peer. False when there was an abort.
  bool send(const Call& call, uint32_t peer) {
    Place place = {};
    Outcome outcome = ready(call, peer, &place);
    maybe_park(call.rank, call.epoch, kPermitted);
    if (outcome.wait != Wait::kReached) return false;
    uint8_t* slot = world.slot(peer, call.rank, place);
    for (uint32_t at = 0; at < kSlotBytes; ++at) {
      if (at % kChunkBytes == 0) {
        if (at > 0) maybe_park(call.rank, call.epoch, kStoring);
        if (look && aborted(call)) return false;
      }
      slot[at] = byte_of(call.rank, peer, call.epoch, at);
    }
    maybe_park(call.rank, call.epoch, kStored);
    if (last_part(&own_block(call)->sent[peer].value, 1) && !(look && aborted(call)))
      mark_done(call, peer);
    return true;
  }

  void verify(uint32_t rank, uint32_t epoch) {
    for (uint32_t sender = 0; sender < world.ranks; ++sender) {
      if (sender == rank) continue;
      const uint8_t* slot = world.slot(rank, sender, place_of(rank, epoch));
      for (uint32_t at = 0; at < kSlotBytes; ++at) {
        if (slot[at] != byte_of(sender, rank, epoch, at)) {
          fail(kCorrupt, "corrupt: rank %u has a wrong byte from rank %u in epoch %u", rank, sender,
               epoch);
        }
      }
    }
  }

  // One kernel. False after an abort.
  bool exchange(uint32_t rank, uint32_t block, bool spread) {
    uint32_t others = world.ranks - 1;
    Call call = world.call(rank, 1, next_epoch(world.signals[rank]),
                           timeout_of(rank, victim, world.ranks, all));
    maybe_park(rank, call.epoch, kEntry);
    bool good = !(look && aborted(call));
    if (good && block == 0) {
      Place place = place_of(rank, call.epoch);
      for (uint32_t i = 1; i <= others; ++i) {
        announce(call, (rank + i) % world.ranks, place.window, place.offset);
        if (i == 1) maybe_park(rank, call.epoch, kAnnouncing);
      }
      maybe_park(rank, call.epoch, kAnnounced);
    }
    if (spread) {
      good = good && send(call, (rank + 1 + block % others) % world.ranks);
    } else {
      for (uint32_t i = 1; good && i <= others; ++i) good = send(call, (rank + i) % world.ranks);
    }
    maybe_park(rank, call.epoch, kDone);
    if (good && block == 0) good = wait_all_done(call).wait == Wait::kReached;
    maybe_park(rank, call.epoch, kComplete);
    leave(call, world.blocks);
    boundary(rank);
    good = !aborted(call);
    if (good && block == 0) verify(rank, call.epoch);
    boundary(rank);
    return good;
  }

  void boundary(uint32_t rank) {
    world.boundary(rank);
    step();
  }
};

// What the others must have recorded: that one or more of them gave up on the victim, and the rest
// were told.
void check_records(const World& world, uint32_t victim, bool victim_too) {
  uint32_t gave_up = 0;
  for (uint32_t rank = 0; rank < world.ranks; ++rank) {
    if (rank == victim && !victim_too) continue;
    const StallRecord& record = world.records[rank];
    expect(record.state == 1 || record.state == 2, "rank %u recorded state %u", rank, record.state);
    expect(record.waited_for == victim, "rank %u blames rank %u for what rank %u did", rank,
           record.waited_for, victim);
    expect(record.reporter != victim, "rank %u was told by rank %u", rank, victim);
    expect((record.state == 1) == (record.reporter == rank), "rank %u: state %u, reporter %u", rank,
           record.state, record.reporter);
    expect(record.state == 2 || rank != victim, "the late rank %u gave up", rank);
    gave_up += record.state == 1;
    expect(load_relaxed(&world.signals[rank]->abort.value) != 0, "rank %u was not told", rank);
  }
  expect(gave_up > 0, "nobody gave up");
}

template <typename Body>
std::vector<std::thread> start(const World& world, Body body) {
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < world.ranks * world.blocks; ++i) {
    watched[i].looks = watched[i].steps = 0;
    watched[i].parked = watched[i].ended = 0;
    threads.emplace_back([&world, i, body] {
      self = &watched[i];
      body(i / world.blocks, i % world.blocks);
      self->ended = 1;
    });
  }
  return threads;
}

// Run until nothing happens any more, let all deadlines pass, see the others off, and wake the
// victim. `snapshot` is taken between the two and compared at the end.
template <typename Snapshot>
void play(const World& world, std::vector<std::thread>& threads, uint32_t victim,
          std::atomic<bool>& resume, Snapshot snapshot) {
  settle(uint32_t(threads.size()));
  clock_ns.fetch_add(2 * kTimeout);
  for (uint32_t i = 0; i < threads.size(); ++i) {
    if (i / world.blocks != victim) threads[i].join();
  }
  check_records(world, victim, false);
  auto before = snapshot();
  resume = true;
  for (uint32_t i = 0; i < threads.size(); ++i) {
    if (i / world.blocks == victim) threads[i].join();
  }
  check_records(world, victim, true);
  if (before != snapshot())
    fail(kCorrupt, "corrupt: rank %u wrote into memory of ranks that had left", victim);
}

void exchange(uint32_t ranks, bool spread, uint32_t victim, uint32_t point, bool look, bool all) {
  World world(ranks, spread ? ranks - 1 : 1, kStart);
  Stall stall{world, victim, point, look, all};
  auto threads = start(world, [&stall, spread](uint32_t rank, uint32_t block) {
    while (stall.exchange(rank, block, spread)) {
    }
  });
  play(world, threads, victim, stall.resume, [&world, victim] {
    std::vector<uint8_t> bytes;
    for (uint32_t rank = 0; rank < world.ranks; ++rank) {
      if (rank == victim) continue;
      for (auto& window : world.memory[rank])
        bytes.insert(bytes.end(), &window[0], &window[0] + kWindowBytes);
      // What the victim could tell of data that nobody wants any more.
      bytes.push_back(uint8_t(world.signals[rank]->done[victim].value));
    }
    return bytes;
  });
}

void barriers(uint32_t ranks, uint32_t victim, bool all) {
  World world(ranks, 1, kStart);
  std::atomic<bool> resume{false};
  auto threads = start(world, [&](uint32_t rank, uint32_t) {
    for (uint32_t round = 0; round < 4; ++round) {
      Call call = world.call(rank, 2, round, timeout_of(rank, victim, ranks, all));
      step();
      if (rank == victim && round == 2) {
        self->parked = 1;
        while (!resume) usleep(50);
      }
      Outcome outcome = barrier(call);
      if (outcome.wait == Wait::kReached) continue;
      expect(round == 2, "rank %u did not get through barrier %u", rank, round);
      expect(rank == victim || outcome.peer == victim, "rank %u waited for rank %u", rank,
             outcome.peer);
      expect(rank != victim || outcome.wait == Wait::kAborted, "the late rank %u was not told",
             rank);
      return;
    }
    fail(kUnexpected, "rank %u got through a barrier to which rank %u did not come", rank, victim);
  });
  play(world, threads, victim, resume, [&world, victim] {
    std::vector<uint32_t> arrived;
    for (uint32_t rank = 0; rank < world.ranks; ++rank)
      arrived.push_back(world.signals[rank]->arrived[victim].value);
    return arrived;
  });
}

// The all-reduce: a rank that has stored nothing (point 0), or whose block has and then stops
// before it adds up its own part (point 1) or takes the others' sums (point 2). Where a point keeps
// nobody waiting, all get through that call, and wait for the rank in the next one.
void reductions(uint32_t ranks, uint32_t blocks, uint32_t victim, uint32_t point, bool two_shots,
                bool all) {
  World world(ranks, blocks, kStart);
  Reduction reduction(world);
  std::atomic<bool> resume{false};
  auto threads = start(world, [&](uint32_t rank, uint32_t block) {
    for (uint32_t round = 0; round < 5; ++round) {
      static float outputs[kMaxRanks][16];
      float input[16], *output = outputs[rank];
      for (uint32_t i = 0; i < 16; ++i) input[i] = float(rank + i + round);
      const ReduceParams p = reduction.params(rank, input, output, sizeof(input), two_shots,
                                              timeout_of(rank, victim, ranks, all));
      Wait wait = reduction.call<Float32>(p, block, blocks, [&](uint32_t here) {
        step();
        if (rank != victim || round != 2 || here != point || resume) return true;
        self->parked = 1;
        while (!resume) usleep(50);
        return true;
      });
      if (wait == Wait::kReached) {
        for (uint32_t i = 0; i < 16; ++i) {
          if (i / 4 % blocks != block) continue;
          float sum = 0;
          for (uint32_t peer = 0; peer < ranks; ++peer) sum += float(peer + i + round);
          if (output[i] != sum) fail(kCorrupt, "corrupt: rank %u in round %u", rank, round);
        }
        world.boundary(rank);
        continue;
      }
      expect(round >= 2, "rank %u did not get through round %u", rank, round);
      // Each block's first vector or its last one.
      const uint32_t first = 4 * block, last = 4 * (4 - blocks + block);
      expect(output[first] != output[first] || output[last] != output[last], "rank %u has no NaN",
             rank);
      return;
    }
    fail(kUnexpected, "rank %u got through everything", rank);
  });
  play(world, threads, victim, resume, [&] {
    std::vector<uint32_t> words;
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      // Its own it may empty.
      if (rank == victim) continue;
      for (auto& vector : reduction.buffers[rank])
        words.insert(words.end(), vector.word, vector.word + 4);
    }
    return words;
  });
}

World* moment = nullptr;

// Single moments that interleavings rarely hit.
void moments() {
  {
    // The peer comes between the last look at its flag and the look at the clock, which says that
    // it is too late.
    World world(2, 1, 7);
    moment = &world;
    Call call = world.call(0, 2, 1, kTimeout);
    at_next_clock = [] {
      clock_ns.fetch_add(2 * kTimeout);
      store_release(&moment->signals[0]->arrived[1].value, 8);
    };
    Outcome outcome = barrier(call);
    expect(outcome.wait == Wait::kReached, "a rank that came in time was called late");
    expect(world.records[0].state == 0, "a record of nothing");
  }
  {
    // The first barrier after more than 2^31 exchanges: flags that lay still meanwhile have not
    // been reached.
    World world(2, 1, 0);
    world.signals[0]->epoch.value = 0x80000005u;
    Call call = world.call(0, 2, next_epoch(world.signals[0]), kTimeout);
    at_next_clock = [] { clock_ns.fetch_add(2 * kTimeout); };
    Outcome outcome = barrier(call);
    expect(outcome.wait == Wait::kTimedOut && outcome.peer == 1,
           "a barrier with a rank that never came: %u", uint32_t(outcome.wait));
  }
  {
    // Gives up when it has just been told by rank 2 that rank 1 does not come: the first word
    // stands, everywhere.
    World world(4, 1, 0);
    Call call = world.call(0, 2, 1, kTimeout);
    store_release(&world.signals[0]->abort.value, abort_code(2, 1));
    stop(call, Wait::kTimedOut, 3);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      expect(world.signals[rank]->abort.value == abort_code(2, 1),
             "rank %u was told something else", rank);
    }
    const StallRecord& record = world.records[0];
    expect(record.state == 2 && record.reporter == 2 && record.waited_for == 1,
           "rank 0 recorded state %u", record.state);
    // Only the first of a rank's threads writes the record.
    stop(call, Wait::kTimedOut, 2);
    expect(record.waited_for == 1, "the record was overwritten");
  }
  {
    // Permitted long ago by a rank that has left since.
    World world(2, 1, 0);
    Call call = world.call(0, 1, 1, kTimeout);
    announce(world.call(1, 1, 1, kTimeout), 0, 1, 16);
    store_release(&world.signals[0]->abort.value, abort_code(1, 0));
    Place place = {};
    Outcome outcome = wait_ready(call, 1, &place.window, &place.offset);
    expect(outcome.wait == Wait::kAborted && outcome.peer == 0, "a late rank was let in: %u",
           uint32_t(outcome.wait));
    expect(world.records[0].state == 2, "rank 0 recorded state %u", world.records[0].state);
  }
  {
    // Waits in vain for rank 1, which is served by nobody because rank 2 has not even started:
    // names rank 2.
    World world(3, 1, 0);
    Call call = world.call(0, 1, 1, kTimeout);
    announce_to_all(call, 0, 0);
    announce(world.call(1, 1, 1, kTimeout), 0, 0, 0);
    at_next_clock = [] { clock_ns.fetch_add(2 * kTimeout); };
    Outcome outcome = wait_all_done(call);
    expect(outcome.wait == Wait::kTimedOut && outcome.peer == 2, "named rank %u", outcome.peer);
  }
}

}  // namespace

uint64_t test_now() {
  if (at_next_clock != nullptr) {
    auto call = at_next_clock;
    at_next_clock = nullptr;
    call();
  }
  return clock_ns.load(std::memory_order_relaxed);
}

void test_spin() {
  if (self != nullptr) self->looks.fetch_add(1, std::memory_order_relaxed);
  sched_yield();
}

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  uint32_t ranks = number(argc, argv, "ranks", 2);
  uint32_t victim = number(argc, argv, "victim", 0);
  bool look = strcmp(argument(argc, argv, "omit", ""), "look") != 0;
  if (strcmp(mode, "exchange") == 0) {
    uint32_t first = number(argc, argv, "point", 0),
             last = number(argc, argv, "point", kPoints - 1);
    bool spread = number(argc, argv, "spread", 1) != 0;
    for (uint32_t point = first; point <= last; ++point) {
      // Where peers are served in turn, those that the victim did not tell keep the others waiting,
      // and one of them may be named in its place (invariant 5 of the exchange).
      if (!spread && point == kAnnouncing) continue;
      for (bool all : {true, false}) exchange(ranks, spread, victim, point, look, all);
    }
  } else if (strcmp(mode, "barrier") == 0) {
    for (bool all : {true, false}) barriers(ranks, victim, all);
  } else if (strcmp(mode, "allreduce") == 0) {
    for (uint32_t point = 0; point < 3; ++point) {
      for (bool two_shots : {false, true}) {
        for (bool all : {true, false}) {
          reductions(ranks, 1, victim, point, two_shots, all);
          // Where one block of a rank waits for another one's sums.
          if (point == 0) reductions(ranks, 2, victim, point, two_shots, all);
        }
      }
    }
  } else if (strcmp(mode, "moments") == 0) {
    moments();
  } else {
    return kUsage;
  }
  puts("ok");
  return 0;
}
