// Many rounds of each protocol among ranks that are threads. ThreadSanitizer sees what is not
// ordered, and every round checks what has arrived. Exits with 0, with ThreadSanitizer's code, or
// with one of ExitCode.
//
//   rounds exchange ranks=4 blocks=2 spread=1 rounds=1000 start=0 omit=open|close
//   rounds barrier  ranks=4 rounds=1000 start=0 omit=wait
//   rounds allreduce ranks=4 blocks=2 rounds=1000 start=0
//   rounds deadline

#include "world.h"

using namespace comm;

namespace {

// Ranks out of step: one that is slow now and then, and small delays everywhere.
void dawdle(uint32_t rank, uint32_t round, uint32_t slow) {
  uint32_t value = mix(rank, round, 4);
  if (rank == slow && value % 64 == 0) usleep(value / 64 % 200);
  if (value % 4 == 3) sched_yield();
}

void must_reach(Outcome outcome, const char* what) {
  if (outcome.wait != Wait::kReached) fail(kUnexpected, what, outcome.peer);
}

struct Exchange {
  World& world;
  uint32_t rounds;
  bool spread;  // a block serves one peer, as the kernels do; otherwise each serves all in turn
  bool open;
  bool close;

  void verify(uint32_t rank, uint32_t epoch) {
    for (uint32_t sender = 0; sender < world.ranks; ++sender) {
      if (sender == rank) continue;
      const uint8_t* slot = world.slot(rank, sender, place_of(rank, epoch));
      uint32_t bytes = bytes_of(sender, rank, epoch);
      for (uint32_t at = 0; at < bytes; ++at) {
        if (slot[at] != byte_of(sender, rank, epoch, at)) {
          fail(kCorrupt, "corrupt: rank %u has a wrong byte from rank %u in epoch %u", rank, sender,
               epoch);
        }
      }
    }
  }

  void send(const Call& call, uint32_t peer, uint32_t part, uint32_t parts) {
    Place place = place_of(peer, call.epoch);
    if (open) {
      Place announced = {};
      must_reach(wait_ready(call, peer, &announced.window, &announced.offset),
                 "no permission from rank %u");
      if (announced.window != place.window || announced.offset != place.offset) {
        fail(kCorrupt, "corrupt: rank %u was sent to a wrong place of rank %u in epoch %u",
             call.rank, peer, call.epoch);
      }
    }
    uint8_t* slot = world.slot(peer, call.rank, place);
    uint32_t bytes = bytes_of(call.rank, peer, call.epoch);
    for (uint32_t at = part; at < bytes; at += parts)
      slot[at] = byte_of(call.rank, peer, call.epoch, at);
    if (last_part(&own_block(call)->sent[peer].value, parts)) mark_done(call, peer);
  }

  void operator()(uint32_t rank, uint32_t block) {
    uint32_t others = world.ranks - 1;
    for (uint32_t round = 0; round < rounds; ++round) {
      Call call = world.call(rank, 1, next_epoch(world.signals[rank]), kMinute);
      dawdle(rank * world.blocks + block, round, 0);
      if (block == 0) {
        Place place = place_of(rank, call.epoch);
        announce_to_all(call, place.window, place.offset);
      }
      if (spread) {
        send(call, (rank + 1 + block % others) % world.ranks, block / others,
             world.blocks / others);
      } else {
        for (uint32_t i = 0; i < others; ++i)
          send(call, (rank + 1 + i) % world.ranks, block, world.blocks);
      }
      if (block == 0 && close) must_reach(wait_all_done(call), "rank %u did not finish");
      leave(call, world.blocks);
      world.boundary(rank);
      if (round % world.blocks == block) verify(rank, call.epoch);
      world.boundary(rank);
      // Barriers have their own counter, whatever the exchanges' epoch is.
      if (round % 16 == 5 && block == 0)
        must_reach(barrier(call), "rank %u did not come to the barrier");
    }
  }
};

void exchange(int argc, char** argv) {
  uint32_t ranks = number(argc, argv, "ranks", 2);
  bool spread = number(argc, argv, "spread", 0) != 0;
  uint32_t blocks = number(argc, argv, "blocks", 1) * (spread ? ranks - 1 : 1);
  const char* omit = argument(argc, argv, "omit", "");
  World world(ranks, blocks, number(argc, argv, "start", 0));
  world.run(Exchange{world, number(argc, argv, "rounds", 1000), spread, strcmp(omit, "open") != 0,
                     strcmp(omit, "close") != 0});
}

void barriers(int argc, char** argv) {
  uint32_t ranks = number(argc, argv, "ranks", 2);
  uint32_t rounds = number(argc, argv, "rounds", 1000);
  bool wait = strcmp(argument(argc, argv, "omit", ""), "wait") != 0;
  World world(ranks, 1, number(argc, argv, "start", 0));
  // Two cells in turn: one is written again after the next barrier, when all have read it.
  uint32_t cells[2][kMaxRanks] = {};
  world.run([&](uint32_t rank, uint32_t) {
    for (uint32_t round = 1; round <= rounds; ++round) {
      Call call = world.call(rank, 2, 0, kMinute);
      dawdle(rank, round, ranks - 1);
      cells[round % 2][rank] = round;
      if (wait) must_reach(barrier(call), "rank %u did not come to the barrier");
      for (uint32_t peer = 0; peer < ranks; ++peer) {
        uint32_t found = cells[round % 2][peer];
        if (found != round)
          fail(kCorrupt, "corrupt: after barrier %u rank %u still said %u", round, peer, found);
      }
    }
  });
}

// A small number, so that sums are exact in every type; or -0.0, which must not be taken for
// nothing.
float operand(uint32_t rank, uint32_t round, uint32_t at) {
  uint32_t value = mix(rank, round, at, 5);
  return value % 5 == 0 ? -0.0f : float(int(value / 5 % 17) - 8);
}

template <class T>
void reductions(World& world, Reduction& reduction, uint32_t rank, uint32_t block, uint32_t round) {
  using Format = Elements<T>;
  // Fewer vectors than ranks, and a last one that is not whole.
  const uint32_t elements = 1 + mix(round, 6) % (8 * Format::kCount);
  const bool two_shots = mix(round, 7) % 2 == 0;
  const uint32_t bytes = elements * T::kBytes, vectors = (bytes + 15) / 16;
  Vector input[8], output[8];
  for (uint32_t i = 0; i < vectors; ++i) {
    float values[Format::kCount];
    for (uint32_t j = 0; j < Format::kCount; ++j)
      values[j] = operand(rank, round, i * Format::kCount + j);
    input[i] = Format::pack(values);
    output[i] = missing_vector(reduction.params(rank, input, output, bytes, two_shots, kMinute));
  }
  const ReduceParams p = reduction.params(rank, input, output, bytes, two_shots, kMinute);
  Wait wait = reduction.call<T>(p, block, world.blocks, [](uint32_t) { return true; });
  if (wait != Wait::kReached) fail(kUnexpected, "rank %u misses somebody in round %u", rank, round);
  for (uint32_t at = 0; at < elements; ++at) {
    if (at / Format::kCount % world.blocks != block) continue;
    float values[Format::kCount], sum = 0;
    Format::unpack(output[at / Format::kCount], values);
    for (uint32_t peer = 0; peer < world.ranks; ++peer) sum += operand(peer, round, at);
    if (bits_of(values[at % Format::kCount]) != bits_of(sum))
      fail(kCorrupt, "corrupt: rank %u has a wrong sum in round %u at %u", rank, round, at);
  }
}

void allreduce(uint32_t ranks, uint32_t blocks, uint32_t rounds, uint32_t start) {
  World world(ranks, blocks, start);
  Reduction reduction(world);
  world.run([&](uint32_t rank, uint32_t block) {
    for (uint32_t round = 0; round < rounds; ++round) {
      dawdle(rank * blocks + block, round, 0);
      if (round % 3 == 0) {
        reductions<Float32>(world, reduction, rank, block, round);
      } else if (round % 3 == 1) {
        reductions<Bfloat16>(world, reduction, rank, block, round);
      } else {
        reductions<Float16>(world, reduction, rank, block, round);
      }
      world.boundary(rank);
    }
  });
  for (auto& buffer : reduction.buffers) {
    for (auto& vector : buffer) {
      for (uint32_t word : vector.word)
        expect(word == kLamportEmpty, "a call has left something behind");
    }
  }
}

// A wait for nobody ends when the clock says so, and not before.
void deadline() {
  World world(2, 1, 0);
  constexpr uint64_t kTimeout = 50'000'000;
  uint64_t start = now_ns();
  Outcome outcome = barrier(world.call(0, 2, 1, kTimeout));
  uint64_t took = now_ns() - start;
  expect(outcome.wait == Wait::kTimedOut && outcome.peer == 1, "the barrier ended with %u",
         uint32_t(outcome.wait));
  expect(took >= kTimeout, "gave up after %u us", uint32_t(took / 1000));
  expect(took < 200 * kTimeout, "gave up only after %u us", uint32_t(took / 1000));
}

}  // namespace

int main(int argc, char** argv) {
  const char* mode = argc > 1 ? argv[1] : "";
  uint32_t ranks = number(argc, argv, "ranks", 2);
  if (strcmp(mode, "exchange") == 0) {
    exchange(argc, argv);
  } else if (strcmp(mode, "barrier") == 0) {
    barriers(argc, argv);
  } else if (strcmp(mode, "allreduce") == 0) {
    allreduce(ranks, number(argc, argv, "blocks", 1), number(argc, argv, "rounds", 1000),
              number(argc, argv, "start", 0));
  } else if (strcmp(mode, "deadline") == 0) {
    deadline();
  } else {
    return kUsage;
  }
  puts("ok");
  return 0;
}
