// What runs in an exchange: describing bands, posting, polling; and stopping.
#include <comm_core/status.h>
#include <comm_pcie/rdma_engine.h>
#include <endian.h>
#include <errno.h>
#include <sched.h>
#include <stdarg.h>
#include <string.h>

#include <algorithm>

namespace comm {
namespace pcie {
namespace rdma {

namespace {

constexpr int kBatch = 16;
// Polls that find nothing before the processor is offered to others: ranks may share it, and what
// they wait for may be each other.
constexpr uint32_t kSpins = 64;

// A request's number: which peer's, what it is, and of which exchange.
uint64_t pack(uint32_t index, uint64_t request, uint32_t epoch) {
  return static_cast<uint64_t>(epoch) << 32 | request << 16 | index;
}

uint64_t last_message(uint64_t nbytes, uint64_t max_message) {
  return nbytes - (nbytes - 1) / max_message * max_message;
}

double milliseconds(uint64_t ns) { return static_cast<double>(ns) * 1e-6; }

}  // namespace

// -- Why it ended ---------------------------------------------------------------------------------

void Engine::fail(Outcome* out, OutcomeKind kind, int32_t peer, const char* format, ...) {
  char text[sizeof(out->reason)];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  set_problem(kind, peer, text);
  out->kind = kind;
  out->peer = peer;
  memcpy(out->reason, text, sizeof(text));
}

bool Engine::broken(Outcome* out) {
  memset(out, 0, sizeof(*out));
  out->peer = -1;
  if (stopped_) {
    out->kind = kBroken;
    snprintf(out->reason, sizeof(out->reason), "%s was stopped: its queue pairs take no work",
             nic_.c_str());
    return true;
  }
  if (problem_kind() == kOk) return false;
  std::lock_guard<std::mutex> lock(problem_mutex_);
  out->kind = problem_kind_.load(std::memory_order_relaxed) == kAborted ? kAborted : kBroken;
  out->peer = problem_peer_;
  snprintf(out->reason, sizeof(out->reason), "%s", problem_.c_str());
  return true;
}

// An event or an abort in the middle of a call.
bool Engine::interrupted(Outcome* out) {
  const uint32_t kind = problem_kind();
  if (kind == kOk) return false;
  std::lock_guard<std::mutex> lock(problem_mutex_);
  out->kind = kind;
  out->peer = problem_peer_;
  snprintf(out->reason, sizeof(out->reason), "%s", problem_.c_str());
  return true;
}

void Engine::fail_completion(Outcome* out, const ibv_wc& wc, const Peer& peer, Request request) {
  static const char* const kinds[] = {"a write to", "the description of a band for",
                                      "a receive from"};
  const char* hint = "";
  if (wc.status == IBV_WC_RETRY_EXC_ERR) hint = ": the rank's NIC does not answer";
  if (wc.status == IBV_WC_WR_FLUSH_ERR) hint = ": the queue pair was stopped";
  if (wc.status == IBV_WC_REM_ACCESS_ERR) hint = ": its key or range was refused there";
  fail(out, kCompletion, static_cast<int32_t>(peer.rank),
       "%s: %s rank %u ended with '%s' (status %d, vendor code 0x%x)%s", nic_.c_str(),
       kinds[static_cast<int>(request)], peer.rank, api_.wc_status_str(wc.status), wc.status,
       wc.vendor_err, hint);
}

void Engine::name_the_late(uint64_t timeout_ns, uint32_t epoch, Outcome* out) {
  std::string silent, unacknowledged;
  int32_t first = -1;
  for (const Peer& peer : peers_) {
    const bool unsent = peer.share != nullptr && peer.sent < peer.share->source.nbytes();
    if (peer.arrived && peer.posted.sends == 0 && !unsent) continue;
    if (first < 0 || (!peer.arrived && silent.empty())) first = static_cast<int32_t>(peer.rank);
    std::string& list = peer.arrived ? unacknowledged : silent;
    list += (list.empty() ? "" : ", ") + std::to_string(peer.rank);
  }
  std::string text;
  if (!silent.empty()) text += "no message from rank " + silent;
  if (!unacknowledged.empty())
    text += (text.empty() ? "" : "; ") + ("no acknowledgement of writes by rank " + unacknowledged);
  fail(out, kDeadline, first, "%s: exchange %u was not complete after %.1f ms: %s", nic_.c_str(),
       epoch, milliseconds(timeout_ns), text.c_str());
}

// -- Requests -------------------------------------------------------------------------------------

int Engine::post_receive(Peer& peer) {
  ibv_recv_wr request = {};
  // A write with an immediate puts nothing where the receive points to; it needs no memory.
  request.wr_id = pack(peer.index, static_cast<uint64_t>(Request::kReceive), 0);
  ibv_recv_wr* bad = nullptr;
  const int error = ibv_post_recv(peer.qp, &request, &bad);
  if (error != 0)
    return comm_fail(COMM_ERROR_BROKEN, "%s: a receive for rank %u can't be posted: %s",
                     nic_.c_str(), peer.rank, strerror(error));
  ++peer.posted.receives;
  bump(counters_.receives_posted);
  return COMM_OK;
}

// Returns the library's error; 0 if it was posted.
int Engine::post_write(Pair& pair, Peer& peer, uint32_t immediate) {
  const Share& share = *peer.share;
  const uint64_t total = share.source.nbytes();
  const uint64_t length = std::min(total - peer.sent, peer.max_message);
  const bool last = peer.sent + length == total;
  const Attached& remote = pair.remotes[peer.index];
  const BandKeys& keys = pair.keys[peer.index];
  // A key of a band addresses the packed bytes, from 0 on.
  const bool strided_source = share.source.strided(), strided_target = share.target.strided();
  const uint32_t rkey = strided_target ? remote.band_rkey : remote.rkey;
  const uint64_t to = peer.sent + (strided_target ? 0 : remote.address + share.target.offset);
  const uint32_t lkey = strided_source ? keys.source->lkey : pair.landing_mr->lkey;
  const uint64_t from =
      peer.sent + (strided_source ? 0 : pair.landing.address + share.source.offset);
  ibv_qp_ex* qp = peer.ex;
  ibv_wr_start(qp);
  qp->wr_id = pack(peer.index, static_cast<uint64_t>(Request::kWrite), immediate);
  qp->wr_flags = IBV_SEND_SIGNALED;
  if (last)
    ibv_wr_rdma_write_imm(qp, rkey, to, htobe32(immediate));
  else
    ibv_wr_rdma_write(qp, rkey, to);
  ibv_wr_set_sge(qp, lkey, from, static_cast<uint32_t>(length));
  const int error = ibv_wr_complete(qp);
  if (error != 0) return error;
  ++peer.posted.sends;
  bump(counters_.writes);
  bump(counters_.write_bytes, length);
  if (peer.sent != 0) bump(counters_.split_writes);
  peer.sent += length;
  return 0;
}

// Returns the library's error; 0 if it was posted.
int Engine::post_key(Pair& pair, Peer& peer, bool source, const Band& band) {
  BandKeys& keys = pair.keys[peer.index];
  const Memory& memory = source ? pair.landing : pair.output;
  mlx5dv_mr_interleaved entry = {};
  entry.addr = memory.address + band.offset;
  entry.bytes_count = static_cast<uint32_t>(band.width);
  entry.bytes_skip = static_cast<uint32_t>(band.pitch - band.width);
  entry.lkey = source ? pair.landing_mr->lkey : pair.output_mr->lkey;
  const uint32_t access =
      source ? IBV_ACCESS_LOCAL_WRITE : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  ibv_wr_start(peer.ex);
  peer.ex->wr_id = pack(peer.index, static_cast<uint64_t>(Request::kKey), 0);
  peer.ex->wr_flags = IBV_SEND_INLINE | IBV_SEND_SIGNALED;
  mlx5dv_wr_mr_interleaved(peer.mx, source ? keys.source : keys.target, access,
                           static_cast<uint32_t>(band.rows), 1, &entry);
  const int error = ibv_wr_complete(peer.ex);
  if (error != 0) return error;
  ++peer.posted.sends;
  bump(counters_.rebinds);
  return 0;
}

// Count a completion; returns whose it is, or null for one of nobody's.
Peer* Engine::retire(const ibv_wc& wc, Request* request) {
  const uint32_t index = wc.wr_id & 0xffff;
  const uint64_t kind = wc.wr_id >> 16 & 0xffff;
  if (index >= peers_.size() || kind > static_cast<uint64_t>(Request::kReceive)) return nullptr;
  *request = static_cast<Request>(kind);
  Peer& peer = peers_[index];
  uint32_t& posted = *request == Request::kReceive ? peer.posted.receives : peer.posted.sends;
  if (posted == 0) return nullptr;
  --posted;
  bump(*request == Request::kReceive ? counters_.receives_completed : counters_.sends_completed);
  return &peer;
}

// -- Geometry -------------------------------------------------------------------------------------

int Engine::check_shares(const Pair& pair, const Share* shares, uint32_t count) {
  COMM_REQUIRE(count == peers_.size(), "there are %zu peers and %u shares", peers_.size(), count);
  uint64_t seen = 0;
  for (uint32_t share_idx = 0; share_idx < count; ++share_idx) {
    const Share& share = shares[share_idx];
    COMM_REQUIRE(share.peer < kMaxRanks && index_of_[share.peer] >= 0, "rank %u is no peer",
                 share.peer);
    COMM_REQUIRE((seen >> share.peer & 1) == 0, "rank %u has two shares", share.peer);
    seen |= uint64_t{1} << share.peer;
    COMM_REQUIRE(peers_[index_of_[share.peer]].connected, "rank %u is not connected", share.peer);
    struct {
      const char* name;
      const Band& band;
      uint64_t whole;
    } const bands[] = {{"source", share.source, pair.landing.nbytes},
                       {"target", share.target, pair.output.nbytes},
                       {"own band", share.own, pair.output.nbytes}};
    for (const auto& item : bands) {
      const Band& band = item.band;
      const uint64_t most = uint64_t{1} << 48;  // so that nothing below overflows
      COMM_REQUIRE(band.rows >= 1 && band.rows <= 0xffffffffu && band.width >= 1 &&
                       band.width < most && band.offset < most && band.pitch < most &&
                       (band.rows == 1 || (band.pitch >= band.width && band.pitch <= item.whole)),
                   "the %s of rank %u makes no sense: %llu rows of %llu bytes, %llu apart",
                   item.name, share.peer, static_cast<unsigned long long>(band.rows),
                   static_cast<unsigned long long>(band.width),
                   static_cast<unsigned long long>(band.pitch));
      COMM_REQUIRE(band.rows <= item.whole && band.end() <= item.whole,
                   "the %s of rank %u ends behind its buffer of %llu bytes", item.name, share.peer,
                   static_cast<unsigned long long>(item.whole));
      // The NIC's entry has 16 bits: a larger value would be cut, and wrong bytes sent.
      COMM_REQUIRE(!band.strided() || (band.pitch <= kMaxStride && band.width <= kMaxStride),
                   "the %s of rank %u has rows of %llu bytes, %llu apart; an interleaved key can "
                   "hold at most %llu",
                   item.name, share.peer, static_cast<unsigned long long>(band.width),
                   static_cast<unsigned long long>(band.pitch),
                   static_cast<unsigned long long>(kMaxStride));
    }
    COMM_REQUIRE(share.source.nbytes() == share.target.nbytes(),
                 "rank %u is sent %llu bytes into a band of %llu", share.peer,
                 static_cast<unsigned long long>(share.source.nbytes()),
                 static_cast<unsigned long long>(share.target.nbytes()));
  }
  return COMM_OK;
}

int Engine::rebind(Pair* pair, const Share* shares, uint32_t count, uint64_t timeout_ns,
                   Outcome* out) {
  const uint64_t started = now_ns();
  const int status = check_shares(*pair, shares, count);
  if (status != COMM_OK) return status;
  if (broken(out)) return COMM_OK;
  uint32_t waiting = 0;
  const auto finish = [&] {
    out->elapsed_ns = now_ns() - started;
    return COMM_OK;
  };
  for (uint32_t share_idx = 0; share_idx < count; ++share_idx) {
    const Share& share = shares[share_idx];
    Peer& peer = peers_[index_of_[share.peer]];
    BandKeys& keys = pair->keys[peer.index];
    for (const bool source : {true, false}) {
      const Band& band = source ? share.source : share.own;
      Band& bound = source ? keys.bound_source : keys.bound_target;
      if (!band.strided() || bound == band) continue;
      // Until it is described, nobody knows what the key means.
      bound = {};
      const int error = post_key(*pair, peer, source, band);
      if (error != 0) {
        fail(out, kPost, static_cast<int32_t>(peer.rank),
             "%s: the description of a band for rank %u can't be posted: %s", nic_.c_str(),
             peer.rank, strerror(error));
        return finish();
      }
      ++waiting;
    }
  }
  ibv_wc completions[kBatch];
  for (uint32_t idle = 0; waiting != 0;) {
    if (interrupted(out)) return finish();
    const int found = ibv_poll_cq(cq_, kBatch, completions);
    bump(counters_.polls);
    if (found < 0) {
      fail(out, kCompletion, -1, "%s: ibv_poll_cq failed (%d)", nic_.c_str(), found);
      return finish();
    }
    for (int wc_idx = 0; wc_idx < found; ++wc_idx) {
      const ibv_wc& wc = completions[wc_idx];
      Request request = Request::kWrite;
      Peer* peer = retire(wc, &request);
      if (out->kind != kOk) continue;  // counted all the same
      if (peer == nullptr) {
        fail(out, kProtocol, -1, "%s: a completion (0x%llx) of no request", nic_.c_str(),
             static_cast<unsigned long long>(wc.wr_id));
      } else if (wc.status != IBV_WC_SUCCESS) {
        fail_completion(out, wc, *peer, request);
      } else if (request != Request::kKey ||
                 static_cast<uint32_t>(wc.opcode) != static_cast<uint32_t>(MLX5DV_WC_UMR)) {
        fail(out, kProtocol, static_cast<int32_t>(peer->rank),
             "%s: rank %u's message came before this rank was at the exchange: the barrier before "
             "it is missing",
             nic_.c_str(), peer->rank);
      } else {
        --waiting;
        ++out->sends;
      }
    }
    if (out->kind != kOk) return finish();
    if (found != 0) {
      idle = 0;
    } else if (++idle > kSpins) {
      if (now_ns() - started > timeout_ns) {
        int32_t late = -1;
        for (const Peer& peer : peers_)
          if (late < 0 && peer.posted.sends != 0) late = static_cast<int32_t>(peer.rank);
        fail(out, kDeadline, late, "%s: %u bands were not described after %.1f ms", nic_.c_str(),
             waiting, milliseconds(timeout_ns));
        return finish();
      }
      sched_yield();
    }
  }
  for (uint32_t share_idx = 0; share_idx < count; ++share_idx) {
    const Share& share = shares[share_idx];
    BandKeys& keys = pair->keys[index_of_[share.peer]];
    if (share.source.strided()) keys.bound_source = share.source;
    if (share.own.strided()) keys.bound_target = share.own;
  }
  return finish();
}

// -- The exchange ---------------------------------------------------------------------------------

// Account for one completion of an exchange; returns false once it has failed.
bool Engine::take(const ibv_wc& wc, uint32_t immediate, uint32_t* waiting, Outcome* out) {
  Request request = Request::kWrite;
  Peer* peer = retire(wc, &request);
  if (out->kind != kOk) return false;  // counted all the same
  if (peer == nullptr) {
    fail(out, kProtocol, -1, "%s: a completion (0x%llx) of no request", nic_.c_str(),
         static_cast<unsigned long long>(wc.wr_id));
    return false;
  }
  if (wc.status != IBV_WC_SUCCESS) {
    fail_completion(out, wc, *peer, request);
    return false;
  }
  const int32_t rank = static_cast<int32_t>(peer->rank);
  if (request != Request::kReceive) {
    if (wc.opcode != IBV_WC_RDMA_WRITE || wc.wr_id >> 32 != immediate) {
      fail(out, kProtocol, rank, "%s: a write to rank %d came back with opcode %d, number 0x%x",
           nic_.c_str(), rank, wc.opcode, static_cast<uint32_t>(wc.wr_id >> 32));
      return false;
    }
    ++out->sends;
    if (peer->posted.sends == 0 && peer->sent == peer->share->source.nbytes()) --*waiting;
    return true;
  }
  const uint32_t got = wc.wc_flags & IBV_WC_WITH_IMM ? be32toh(wc.imm_data) : 0;
  if (wc.opcode != IBV_WC_RECV_RDMA_WITH_IMM || got != immediate || peer->arrived) {
    fail(out, kProtocol, rank,
         "%s: rank %d sent message 0x%x (opcode %d), expected one message 0x%x: are the ranks at "
         "different calls?",
         nic_.c_str(), rank, got, wc.opcode, immediate);
    return false;
  }
  if (wc.byte_len != peer->last_message) {
    fail(out, kProtocol, rank,
         "%s: the last message of rank %d has %u bytes, expected %llu: do the ranks exchange the "
         "same shapes?",
         nic_.c_str(), rank, wc.byte_len, static_cast<unsigned long long>(peer->last_message));
    return false;
  }
  peer->arrived = true;
  ++out->receives;
  --*waiting;
  // At once: the next message may come as soon as this exchange's closing barrier is passed.
  if (post_receive(*peer) != COMM_OK) {
    fail(out, kPost, rank, "%s", comm_error_text_);
    return false;
  }
  return true;
}

int Engine::exchange(Pair* pair, const Share* shares, uint32_t count, uint32_t epoch,
                     uint64_t timeout_ns, Outcome* out) {
  const uint64_t started = now_ns();
  const int status = check_shares(*pair, shares, count);
  if (status != COMM_OK) return status;
  COMM_REQUIRE(pair->attached, "the other ranks' records are not attached yet");
  for (uint32_t share_idx = 0; share_idx < count; ++share_idx) {
    const Share& share = shares[share_idx];
    const BandKeys& keys = pair->keys[index_of_[share.peer]];
    COMM_REQUIRE((!share.source.strided() || share.source == keys.bound_source) &&
                     (!share.own.strided() || share.own == keys.bound_target),
                 "the bands of rank %u are not bound: rebind first", share.peer);
  }
  if (broken(out)) return COMM_OK;
  const uint32_t immediate = kImmediateMark | (epoch & kImmediateMask);
  for (uint32_t share_idx = 0; share_idx < count; ++share_idx) {
    Peer& peer = peers_[index_of_[shares[share_idx].peer]];
    peer.share = &shares[share_idx];
    peer.sent = 0;
    peer.arrived = false;
    peer.last_message = last_message(peer.share->own.nbytes(), peer.max_message);
  }
  uint32_t waiting = 2 * count;  // each peer's message, and each peer's writes
  bool unposted = true;
  ibv_wc completions[kBatch];
  for (uint32_t idle = 0; waiting != 0 && !interrupted(out);) {
    if (unposted) {
      unposted = false;
      for (uint32_t share_idx = 0; share_idx < count && out->kind == kOk; ++share_idx) {
        Peer& peer = peers_[index_of_[shares[share_idx].peer]];
        const uint64_t total = peer.share->source.nbytes();
        while (peer.sent < total && peer.posted.sends < settings_.send_depth) {
          const int error = post_write(*pair, peer, immediate);
          if (error == 0) continue;
          fail(out, kPost, static_cast<int32_t>(peer.rank),
               "%s: a write to rank %u can't be posted: %s", nic_.c_str(), peer.rank,
               strerror(error));
          break;
        }
        unposted = unposted || peer.sent < total;
      }
      if (out->kind != kOk) break;
    }
    const int found = ibv_poll_cq(cq_, kBatch, completions);
    bump(counters_.polls);
    if (found < 0) {
      fail(out, kCompletion, -1, "%s: ibv_poll_cq failed (%d): did the completion queue overflow?",
           nic_.c_str(), found);
      break;
    }
    for (int wc_idx = 0; wc_idx < found; ++wc_idx)
      take(completions[wc_idx], immediate, &waiting, out);
    if (out->kind != kOk) break;
    if (found != 0) {
      idle = 0;
    } else if (++idle > kSpins) {
      if (now_ns() - started > timeout_ns) {
        name_the_late(timeout_ns, epoch, out);
        break;
      }
      sched_yield();
    }
  }
  if (out->kind == kOk) bump(counters_.exchanges);
  for (Peer& peer : peers_) peer.share = nullptr;
  out->elapsed_ns = now_ns() - started;
  return COMM_OK;
}

// -- Stopping -------------------------------------------------------------------------------------

int Engine::quiesce(uint64_t timeout_ns, uint32_t* safe, char* reason, size_t reason_size) {
  const uint64_t started = now_ns();
  stopped_ = true;
  *safe = 0;
  snprintf(reason, reason_size, "%s", "");
  std::string unstopped;
  for (Peer& peer : peers_) {
    // One that was never connected takes no work, and the kernel refuses to stop it: there is no
    // step from RESET to ERR.
    if (peer.qp == nullptr || peer.stopped || !peer.in_use) continue;
    ibv_qp_attr attr = {};
    attr.qp_state = IBV_QPS_ERR;
    const int error = api_.modify_qp(peer.qp, &attr, IBV_QP_STATE);
    peer.stopped = error == 0;
    if (error != 0)
      unstopped += " the queue pair for rank " + std::to_string(peer.rank) +
                   " can't be stopped: " + strerror(error) + ";";
  }
  const auto outstanding = [this] {
    return std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
      return peer.posted.sends != 0 || peer.posted.receives != 0;
    });
  };
  ibv_wc completions[kBatch];
  // An empty poll proves nothing: the NIC flushes when it gets to it. Only the count does.
  for (uint32_t idle = 0; outstanding();) {
    const int found = ibv_poll_cq(cq_, kBatch, completions);
    bump(counters_.polls);
    if (found < 0) {
      unstopped += " the completion queue can't be polled;";
      break;
    }
    for (int wc_idx = 0; wc_idx < found; ++wc_idx) {
      Request request = Request::kWrite;
      retire(completions[wc_idx], &request);
    }
    if (found != 0) {
      idle = 0;
    } else if (++idle > kSpins) {
      if (now_ns() - started > timeout_ns) break;
      sched_yield();
    }
  }
  if (!outstanding() && unstopped.empty()) {
    *safe = 1;
    return COMM_OK;
  }
  std::string text = nic_ + ":" + unstopped;
  for (const Peer& peer : peers_)
    if (peer.posted.sends != 0 || peer.posted.receives != 0)
      text += " " + std::to_string(peer.posted.sends) + " sends and " +
              std::to_string(peer.posted.receives) + " receives of rank " +
              std::to_string(peer.rank) + " were not given back;";
  text += " the NIC may still use the buffers, so nothing is freed and the process must exit";
  snprintf(reason, reason_size, "%s", text.c_str());
  return COMM_OK;
}

}  // namespace rdma
}  // namespace pcie
}  // namespace comm
