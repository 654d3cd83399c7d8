// The data plane of the RDMA routes: one NIC, one reliable connection to each peer.
//
// Every work request is signalled and counted until the NIC has given it back, so that the engine
// can say whether memory may be freed. Receives are posted ahead: whichever peer is faster, its
// message finds one. One thread calls; `abort`, `problem` and the counters may be used by others.
//
// Functions return a code of comm_core/status.h with a text for comm_last_error(), or write an
// Outcome. After an outcome that is not kOk the engine is broken: it only quiesces and closes.
#ifndef COMM_PCIE_RDMA_ENGINE_H_
#define COMM_PCIE_RDMA_ENGINE_H_

#include <comm_pcie/rdma_types.h>
#include <comm_pcie/verbs_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace comm {
namespace pcie {
namespace rdma {

uint64_t now_ns();

// What is described to the NIC for one peer. Keys keep their numbers when they are described anew,
// so a new geometry needs no exchange between ranks.
struct BandKeys {
  mlx5dv_mkey* source = nullptr;  // of the landing buffer, read by this rank's writes
  mlx5dv_mkey* target = nullptr;  // of the output, written by the peer
  Band bound_source = {};         // rows == 0: not described yet
  Band bound_target = {};
};

class Engine;

// An output and a landing buffer.
struct Pair {
  Engine* engine = nullptr;
  Memory output = {};
  Memory landing = {};
  ibv_mr* output_mr = nullptr;
  ibv_mr* landing_mr = nullptr;
  bool output_by_dmabuf = false;
  bool landing_by_dmabuf = false;
  bool attached = false;
  std::vector<BandKeys> keys;     // by index of the peer
  std::vector<Attached> remotes;  // likewise
};

struct Peer {
  uint32_t rank = 0;
  uint32_t index = 0;
  ibv_qp* qp = nullptr;
  ibv_qp_ex* ex = nullptr;
  mlx5dv_qp_ex* mx = nullptr;
  uint32_t psn = 0;
  bool in_use = false;  // its queue pair has left its first state
  bool connected = false;
  bool stopped = false;
  uint64_t max_message = 0;  // the smaller of the two ports'
  Posted posted = {};

  // Of the running exchange.
  const Share* share = nullptr;
  uint64_t sent = 0;  // bytes posted
  uint64_t last_message = 0;
  bool arrived = false;
};

class Engine {
 public:
  Engine(const VerbsApi& api, const Settings& settings, uint32_t rank);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int open(const char* nic, uint32_t gid_index, const uint32_t* peers, uint32_t num_peers);
  void endpoints(Endpoint* out) const;  // one a peer, in order of the peers
  int revalidate();
  int connect(const Endpoint* remotes, uint32_t count);
  int register_pair(const Memory& output, const Memory& landing, Pair** out);
  int attach(Pair* pair, const Attached* remotes, uint32_t count);
  int close_pair(Pair* pair);

  int rebind(Pair* pair, const Share* shares, uint32_t count, uint64_t timeout_ns, Outcome* out);
  int exchange(Pair* pair, const Share* shares, uint32_t count, uint32_t epoch, uint64_t timeout_ns,
               Outcome* out);
  int quiesce(uint64_t timeout_ns, uint32_t* safe, char* reason, size_t reason_size);
  int close();

  void abort(const char* reason);
  // A word of memory that ends calls as `abort` does once it is not 0; must outlive the engine.
  void heed(const uint32_t* word);
  // From any thread.
  void problem(uint32_t* kind, char* text, size_t text_size) const;
  void count(Counters* counters) const;
  // From the thread that calls.
  void posted(Posted* posted) const;
  uint64_t max_message() const { return max_message_; }
  const std::vector<Peer>& peers() const { return peers_; }

 private:
  enum class Request : uint64_t { kWrite = 0, kKey = 1, kReceive = 2 };
  struct Port {
    ibv_gid gid;
    ibv_mtu mtu;
    uint64_t max_message;
  };

  int query(Port* port);
  int create_peer(Peer& peer);
  int connect_peer(Peer& peer, const Endpoint& remote);
  int register_memory(const Memory& memory, int access, const char* what, ibv_mr** mr,
                      bool* by_dmabuf);
  int release_keys(Pair* pair);
  int check_shares(const Pair& pair, const Share* shares, uint32_t count);
  int post_receive(Peer& peer);
  int post_write(Pair& pair, Peer& peer, uint32_t immediate);
  int post_key(Pair& pair, Peer& peer, bool source, const Band& band);
  Peer* retire(const ibv_wc& wc, Request* request);
  bool broken(Outcome* out);
  uint32_t problem_kind();
  void fail(Outcome* out, OutcomeKind kind, int32_t peer, const char* format, ...)
      __attribute__((format(printf, 5, 6)));
  bool interrupted(Outcome* out);
  void fail_completion(Outcome* out, const ibv_wc& wc, const Peer& peer, Request request);
  bool take(const ibv_wc& wc, uint32_t immediate, uint32_t* waiting, Outcome* out);
  void name_the_late(uint64_t timeout_ns, uint32_t epoch, Outcome* out);
  void watch();
  void on_event(const ibv_async_event& event);
  void set_problem(OutcomeKind kind, int32_t peer, const std::string& text);
  void stop_watching();

  // One writer each, so that an addition needs no locked instruction.
  static void bump(std::atomic<uint64_t>& counter, uint64_t by = 1) {
    counter.store(counter.load(std::memory_order_relaxed) + by, std::memory_order_relaxed);
  }

  const VerbsApi api_;
  const Settings settings_;
  const uint32_t rank_;
  std::string nic_;
  uint32_t gid_index_ = 0;
  Port port_ = {};
  uint64_t max_message_ = 0;
  ibv_context* context_ = nullptr;
  ibv_pd* pd_ = nullptr;
  ibv_cq* cq_ = nullptr;
  std::vector<Peer> peers_;
  std::vector<int32_t> index_of_;  // rank -> index of the peer, or -1
  std::vector<Pair*> pairs_;
  bool stopped_ = false;

  std::thread watcher_;
  int stop_fd_ = -1;
  // What ended the use of the engine: of an outcome, an event or an abort, whichever was first.
  std::atomic<uint32_t> problem_kind_{kOk};
  const uint32_t* word_ = nullptr;
  mutable std::mutex problem_mutex_;
  std::string problem_;
  int32_t problem_peer_ = -1;

  struct {
    std::atomic<uint64_t> exchanges{0}, writes{0}, write_bytes{0}, rebinds{0}, receives_posted{0},
        sends_completed{0}, receives_completed{0}, polls{0}, events{0}, registrations{0},
        split_writes{0};
  } counters_;
};

}  // namespace rdma
}  // namespace pcie
}  // namespace comm

#endif  // COMM_PCIE_RDMA_ENGINE_H_
