// Boards and arenas under threads, and single steps of the exchange, for a host compiler with or
// without ThreadSanitizer. Prints "ok", or what is wrong.
#include <comm_nvlink/arena.h>
#include <comm_nvlink/board.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <chrono>
#include <comm_nvlink/ulysses.cuh>
#include <memory>
#include <thread>

using namespace comm;
using namespace comm::nvlink;

#define EXPECT(condition)                                          \
  do {                                                             \
    if (!(condition)) {                                            \
      printf("line %d: %s does not hold\n", __LINE__, #condition); \
      exit(1);                                                     \
    }                                                              \
  } while (0)

// Fields that belong together: a mixture of two calls' is found.
uint32_t window_of(uint64_t number) { return uint32_t(number * 7 + 1); }
uint64_t offset_of(uint64_t number) { return number * 1000003; }

// A rank that posts far ahead while others read: what they read is of the call they asked for.
void boards_under_threads() {
  auto board = std::make_unique<Board>();
  memset(static_cast<void*>(board.get()), 0, sizeof(Board));
  constexpr uint64_t kCalls = 20000;
  uint64_t seen[2] = {0, 0};
  auto reader = [&](uint64_t* count) {
    for (uint64_t number = 1; number <= kCalls; ++number) {
      uint32_t window = 0, captured = 0;
      uint64_t offset = 0;
      // A record that is gone is never waited for to the end: the writer has passed it.
      if (!await_record(board.get(), number, monotonic_ns() + 200000, &window, &offset, &captured))
        continue;
      EXPECT(window == window_of(number) && offset == offset_of(number));
      EXPECT(captured == number % 2);
      ++*count;
    }
  };
  std::thread first(reader, &seen[0]), second(reader, &seen[1]);
  for (uint64_t number = 1; number <= kCalls; ++number) {
    post(board.get(), number, window_of(number), offset_of(number), number % 2);
    if (number % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  first.join();
  second.join();
  EXPECT(seen[0] > 0 && seen[1] > 0);
}

void records_are_of_one_call() {
  auto board = std::make_unique<Board>();
  memset(static_cast<void*>(board.get()), 0, sizeof(Board));
  uint32_t window = 99, captured = 99;
  uint64_t offset = 99;
  EXPECT(!read(board.get(), 1, &window, &offset, &captured));
  // Not even the record of no call, which a fresh board seems to hold.
  EXPECT(!read(board.get(), kPostings, &window, &offset, &captured));
  post(board.get(), 1, 5, 6, 1);
  EXPECT(read(board.get(), 1, &window, &offset, &captured));
  EXPECT(window == 5 && offset == 6 && captured == 1);
  EXPECT(!read(board.get(), 1 + kPostings, &window, &offset, &captured));
  // Overwritten by one that is as many calls later as there are records.
  post(board.get(), 1 + kPostings, 7, 8, 0);
  EXPECT(!read(board.get(), 1, &window, &offset, &captured));
  // While a record is written, it is nobody's.
  Posting& half = board->postings[1];
  half.number = 0;
  EXPECT(!read(board.get(), 1 + kPostings, &window, &offset, &captured));
  uint64_t before = monotonic_ns();
  EXPECT(!await_record(board.get(), 1, before + 2000000, &window, &offset, &captured));
  EXPECT(monotonic_ns() - before >= 2000000);
}

void arenas_join_what_is_given_back() {
  Arena arena(1 << 20, 8 * 512);
  uint64_t used = 0, refused = 0, at[8];
  for (int i = 0; i < 8; ++i) {
    at[i] = arena.take(i % 2 ? 1 : 512);
    EXPECT(at[i] == uint64_t(1 << 20) + 512u * uint64_t(i));
  }
  EXPECT(arena.take(1) == 0);
  arena.look(&used, &refused);
  EXPECT(used == 8 * 512 && refused == 1);
  arena.look(&used, &refused);
  EXPECT(refused == 0);
  // Every order of giving back makes one piece again.
  int orders[4][8] = {{0, 1, 2, 3, 4, 5, 6, 7},
                      {7, 6, 5, 4, 3, 2, 1, 0},
                      {0, 2, 4, 6, 1, 3, 5, 7},
                      {3, 5, 4, 0, 7, 6, 1, 2}};
  for (auto& order : orders) {
    for (int i : order) EXPECT(arena.give_back(at[i]));
    EXPECT(!arena.give_back(at[0]) && !arena.give_back(1) && !arena.give_back(at[0] + 1));
    EXPECT(arena.take(8 * 512) == at[0]);
    EXPECT(arena.give_back(at[0]));
    for (int i = 0; i < 8; ++i) EXPECT(arena.take(1) == at[i]);
  }
  EXPECT(Arena(512, 0).take(1) == 0);
  // No bytes are a place of their own too.
  Arena small(512, 1024);
  EXPECT(small.take(0) == 512 && small.take(0) == 1024 && small.take(0) == 0);
}

void arenas_under_threads() {
  constexpr uint64_t kBytes = 512 * 64;
  std::unique_ptr<char[]> memory(new char[kBytes + 512]);
  uint64_t base = (reinterpret_cast<uint64_t>(memory.get()) + 511) / 512 * 512;
  Arena arena(base, kBytes);
  open_arena(&arena);
  auto work = [&](unsigned seed) {
    current_arena() = &arena;
    std::vector<char*> held;
    for (int round = 0; round < 4000; ++round) {
      seed = seed * 1664525 + 1013904223;
      uint64_t size = 1 + seed % 3000;
      if (char* place = static_cast<char*>(arena_allocate(ssize_t(size), 0, nullptr))) {
        // Two owners of one byte would be a race.
        for (uint64_t i = 0; i < size; i += 64) place[i] = char(seed);
        held.push_back(place);
      }
      if (held.size() > 8 || (seed >> 16) % 2) {
        if (!held.empty()) arena_free(held.back(), 0, 0, nullptr), held.pop_back();
      }
    }
    for (char* place : held) arena_free(place, 0, 0, nullptr);
    current_arena() = nullptr;
  };
  std::thread a(work, 1), b(work, 2), c(work, 3);
  a.join();
  b.join();
  c.join();
  uint64_t used = 1, refused = 0;
  arena.look(&used, &refused);
  EXPECT(used == 0 && arena.take(kBytes) == base);
  arena.give_back(base);
  EXPECT(close_arena(&arena) && !close_arena(&arena));
}

void* pointer(uint64_t at) { return reinterpret_cast<void*>(at); }

// A tensor that outlives its session, whose addresses a later session's arena has again.
void what_a_tensor_still_holds_is_given_to_nobody() {
  constexpr uint64_t kBase = 1 << 16;
  Arena first(kBase, 8 * 512);
  open_arena(&first);
  uint64_t kept = 0;
  for (int i = 0; i < 3; ++i) {
    uint64_t at = first.take(1024);
    if (i == 1) kept = at;
  }
  first.give_back(kBase);
  first.give_back(kBase + 2048);
  EXPECT(close_arena(&first));
  Arena second(kBase, 8 * 512);
  open_arena(&second);
  EXPECT(second.take(512 * 5) == 0 && second.take(1024) == kBase);
  uint64_t after = second.take(1024);
  EXPECT(after == kept + 1024);
  // The late release gives back the tensor's memory and nothing of the new owners'.
  arena_free(pointer(kept), 0, 0, nullptr);
  EXPECT(second.take(1024) == kept);
  arena_free(pointer(kept), 0, 0, nullptr);
  arena_free(pointer(kBase), 0, 0, nullptr);
  arena_free(pointer(after), 0, 0, nullptr);
  EXPECT(close_arena(&second) && arenas().orphans.empty());
  // One that lies only in part in the later arena.
  Arena third(kBase, 2048);
  open_arena(&third);
  EXPECT(third.take(2048) == kBase);
  EXPECT(close_arena(&third) && arenas().orphans.size() == 1);
  Arena fourth(kBase + 1024, 2048);
  open_arena(&fourth);
  EXPECT(fourth.take(1536) == 0 && fourth.take(1024) == kBase + 2048);
  arena_free(pointer(kBase), 0, 0, nullptr);
  EXPECT(arenas().orphans.empty());
  arena_free(pointer(kBase + 2048), 0, 0, nullptr);
  EXPECT(close_arena(&fourth));
  // A thread whose pool was closed gets nothing, and touches nothing of it.
  current_arena() = &fourth;
  EXPECT(arena_allocate(1, 0, nullptr) == nullptr);
  current_arena() = nullptr;
  EXPECT(arena_allocate(1, 0, nullptr) == nullptr);
}

// A group of three ranks as rank 0 maps it.
struct Three {
  SignalBlock blocks[3] = {};
  WindowEntry windows[2] = {};
  StallRecord record = {};
  comm::nvlink::ExchangeParams params = {};
  Call call = {};

  Three() {
    params.session.rank = 0;
    params.session.world_size = 3;
    params.session.num_windows = 2;
    for (int rank = 0; rank < 3; ++rank) params.session.signals[rank] = &blocks[rank];
    windows[1].bytes = 4096;
    for (uint64_t rank = 0; rank < 3; ++rank) windows[1].address[rank] = 4096 * (rank + 1);
    params.session.windows = windows;
    params.session.record = &record;
    params.session.timeout_ns = 50000000;
    params.target_bytes = 4096;
    params.by_engines = 1 << 1;
    params.expected_window[1] = 1;
    call = start(params.session, 3);
  }
};

// Beside the copies of the copy engines the exchange kernel serves the other peers. One of them may
// be through with this operation, and half-way through announcing the next one.
void the_next_announcement_of_a_peer_of_the_sms_is_not_judged() {
  auto three = std::make_unique<Three>();
  store_announcement(&three->blocks[0].ready[1], three->call.epoch, 1, 0);
  store_announcement(&three->blocks[0].ready[2], three->call.epoch + 1, 1, 64);
  EXPECT(open_engine_peer(three->params, three->call, 1));
  EXPECT(open_engine_peer(three->params, three->call, 2));
  EXPECT(!aborted(three->call) && three->record.state == 0);
  // While one that the copy engines serve is held to its word.
  three = std::make_unique<Three>();
  store_announcement(&three->blocks[0].ready[1], three->call.epoch, 0, 0);
  EXPECT(!open_engine_peer(three->params, three->call, 1));
  EXPECT(aborted(three->call) && three->record.state == 1);
  EXPECT(three->record.operation == (3 | kBadAnnouncement) && three->record.waited_for == 1);
}

// A block that gives up while the last block is already on its way out.
void the_last_block_knows_of_all_that_stopped() {
  auto three = std::make_unique<Three>();
  bool broken = false;
  EXPECT(!aborted(three->call));
  stop(three->call, Wait::kTimedOut, 1);
  EXPECT(!leave(three->call, 2, &broken));
  EXPECT(leave(three->call, 2, &broken) && broken);
}

int main() {
  boards_under_threads();
  records_are_of_one_call();
  arenas_join_what_is_given_back();
  arenas_under_threads();
  what_a_tensor_still_holds_is_given_to_nobody();
  the_next_announcement_of_a_peer_of_the_sms_is_not_judged();
  the_last_block_knows_of_all_that_stopped();
  printf("ok\n");
  return 0;
}
