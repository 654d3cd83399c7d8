// Ranks as threads over the emulator, each with an engine of its own, while others look, send
// events and abort: what a sanitizer should see. Arguments: path of the emulator. The fabric is in
// VERBS_EMULATOR, with a NIC for each of four ranks.
#include <comm_core/status.h>
#include <comm_pcie/rdma_engine.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <condition_variable>
#include <memory>

__thread char comm_error_text_[COMM_ERROR_TEXT_SIZE] = "";

using namespace comm::pcie::rdma;

namespace {

constexpr uint32_t kRanks = 4;
constexpr uint64_t kRows = 23, kWidth = 40, kBytes = kRanks * kRows * kWidth;
constexpr uint64_t kLong = 30000000000u;
constexpr uint32_t kCalls = 40;

#define CHECK(condition)                                                               \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      printf("%s:%d: not %s: %s\n", __FILE__, __LINE__, #condition, comm_error_text_); \
      exit(1);                                                                         \
    }                                                                                  \
  } while (0)

class Barrier {
 public:
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint32_t turn = turn_;
    if (++here_ == kRanks) {
      here_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  uint32_t here_ = 0, turn_ = 0;
};

uint8_t value(uint32_t rank, uint32_t call, uint64_t at) {
  return static_cast<uint8_t>(rank * 59 + call * 13 + at * 7 + (at >> 8));
}

struct Rank {
  std::unique_ptr<Engine> engine;
  Pair* pair = nullptr;
  std::vector<uint8_t> output = std::vector<uint8_t>(kBytes);
  std::vector<uint8_t> landing = std::vector<uint8_t>(kBytes);
};

// Bands of the source in even calls, of the target in odd ones.
std::vector<Share> shares_of(uint32_t rank, uint32_t call) {
  std::vector<Share> shares;
  const uint64_t pitch = kRanks * kWidth, share = kRows * kWidth;
  const auto band = [&](uint64_t number) { return Band{number * kWidth, kRows, kWidth, pitch}; };
  const auto packed = [&](uint64_t number) { return Band{number * share, 1, share, share}; };
  for (uint32_t peer = 0; peer < kRanks; ++peer) {
    if (peer == rank) continue;
    if (call % 2 == 0)
      shares.push_back({peer, 0, band(peer), packed(rank), packed(peer)});
    else
      shares.push_back({peer, 0, packed(peer), band(rank), band(peer)});
  }
  return shares;
}

void check_bytes(const Rank& own, uint32_t rank, uint32_t call) {
  for (const Share& share : shares_of(rank, call)) {
    // What the peer's engine took for this rank, in the order of the packed bytes.
    for (const Share& theirs : shares_of(share.peer, call)) {
      if (theirs.peer != rank) continue;
      for (uint64_t row = 0; row < kRows; ++row)
        for (uint64_t column = 0; column < kWidth; ++column) {
          const auto at = [&](const Band& band) {
            return band.rows == 1 ? band.offset + row * kWidth + column
                                  : band.offset + row * band.pitch + column;
          };
          CHECK(own.output[at(share.own)] == value(share.peer, call, at(theirs.source)));
        }
    }
  }
}

void run(Rank* own, uint32_t rank, Barrier* barrier) {
  for (uint32_t call = 0; call < kCalls; ++call) {
    const std::vector<Share> shares = shares_of(rank, call);
    Outcome outcome = {};
    CHECK(own->engine->rebind(own->pair, shares.data(), kRanks - 1, kLong, &outcome) == COMM_OK);
    CHECK(outcome.kind == kOk);
    for (uint64_t at = 0; at < kBytes; ++at) own->landing[at] = value(rank, call, at);
    barrier->wait();
    CHECK(own->engine->exchange(own->pair, shares.data(), kRanks - 1, call, kLong, &outcome) ==
          COMM_OK);
    CHECK(outcome.kind == kOk && outcome.sends == kRanks - 1 && outcome.receives == kRanks - 1);
    check_bytes(*own, rank, call);
    barrier->wait();
  }
}

}  // namespace

int main(int argc, char** argv) {
  CHECK(argc == 2);
  VerbsApi api = {};
  char text[512];
  CHECK(load_verbs(argv[1], argv[1], &api, text, sizeof(text)));
  using SetGid = int (*)(const char*, uint32_t, const uint8_t*, uint32_t, uint32_t);
  const SetGid set_gid = reinterpret_cast<SetGid>(dlsym(dlopen(argv[1], RTLD_NOW), "emu_set_gid"));
  CHECK(set_gid != nullptr);
  const Settings settings = {4, 2, 18, 7, 0, 0};
  std::vector<Rank> ranks(kRanks);
  std::vector<std::vector<Endpoint>> told(kRanks, std::vector<Endpoint>(kRanks - 1));
  const auto index_in = [](uint32_t of, uint32_t rank) { return rank < of ? rank : rank - 1; };
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    std::vector<uint32_t> peers;
    for (uint32_t peer = 0; peer < kRanks; ++peer)
      if (peer != rank) peers.push_back(peer);
    ranks[rank].engine.reset(new Engine(api, settings, rank));
    const std::string nic = "mlx5_" + std::to_string(rank);
    CHECK(ranks[rank].engine->open(nic.c_str(), 0, peers.data(), kRanks - 1) == COMM_OK);
    ranks[rank].engine->endpoints(told[rank].data());
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    std::vector<Endpoint> remotes;
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      remotes.push_back(told[peer][index_in(peer, rank)]);
      remotes.back().rank = peer;
    }
    Rank& own = ranks[rank];
    CHECK(own.engine->revalidate() == COMM_OK);
    CHECK(own.engine->connect(remotes.data(), kRanks - 1) == COMM_OK);
    const auto memory = [](std::vector<uint8_t>& bytes) {
      return Memory{reinterpret_cast<uint64_t>(bytes.data()), bytes.size(), 0, -1, 0};
    };
    CHECK(own.engine->register_pair(memory(own.output), memory(own.landing), &own.pair) == COMM_OK);
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    std::vector<Attached> records;
    for (uint32_t peer = 0; peer < kRanks; ++peer) {
      if (peer == rank) continue;
      const Pair& pair = *ranks[peer].pair;
      records.push_back({pair.output.address, pair.output.nbytes, peer, pair.output_mr->rkey,
                         pair.keys[index_in(peer, rank)].target->rkey, 0});
    }
    CHECK(ranks[rank].engine->attach(ranks[rank].pair, records.data(), kRanks - 1) == COMM_OK);
  }

  // Others look at the engines and change entries that are nobody's, all the while.
  std::atomic<bool> stop{false};
  std::thread watcher([&] {
    const uint8_t gid[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 9, 9};
    for (uint32_t turn = 0; !stop.load(); ++turn) {
      for (Rank& rank : ranks) {
        uint32_t broken = 0;
        char problem[256];
        rank.engine->problem(&broken, problem, sizeof(problem));
        CHECK(broken == kOk);
      }
      set_gid("mlx5_1", 7, turn % 2 == 0 ? gid : nullptr, 2, 3);
      std::this_thread::yield();
    }
  });
  Barrier barrier;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kRanks; ++rank)
    threads.emplace_back([&, rank] { run(&ranks[rank], rank, &barrier); });
  for (std::thread& thread : threads) thread.join();
  stop.store(true);
  watcher.join();

  // A rank that waits for others that never come, and is aborted.
  Outcome outcome = {};
  const std::vector<Share> shares = shares_of(0, kCalls);
  CHECK(ranks[0].engine->rebind(ranks[0].pair, shares.data(), kRanks - 1, kLong, &outcome) ==
        COMM_OK);
  std::thread waiting([&] {
    CHECK(ranks[0].engine->exchange(ranks[0].pair, shares.data(), kRanks - 1, kCalls, kLong,
                                    &outcome) == COMM_OK);
  });
  ranks[0].engine->abort("enough");
  waiting.join();
  CHECK((outcome.kind == kAborted || outcome.kind == kBroken) &&
        strcmp(outcome.reason, "enough") == 0);
  for (Rank& rank : ranks) {
    uint32_t safe = 0;
    CHECK(rank.engine->quiesce(kLong, &safe, text, sizeof(text)) == COMM_OK && safe == 1);
    CHECK(rank.engine->close_pair(rank.pair) == COMM_OK);
    CHECK(rank.engine->close() == COMM_OK);
  }
  printf("ok\n");
  return 0;
}
