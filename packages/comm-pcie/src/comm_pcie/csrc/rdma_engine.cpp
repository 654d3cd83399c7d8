// Opening, connecting, registering and closing. What runs in an exchange is rdma_exchange.cpp.
#include <comm_core/status.h>
#include <comm_pcie/rdma_engine.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

namespace comm {
namespace pcie {
namespace rdma {

namespace {

constexpr uint8_t kPort = 1;
constexpr uint32_t kInlineBytes = 128;
// Of libmlx5: a description of a key takes several of the places of a small request.
constexpr uint32_t kMinSendPlaces = 128;
constexpr int kMinCompletions = 256;
constexpr uint16_t kKeyEntries = 2;  // a header and one repeated entry
constexpr int kRemoteAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;

bool is_ipv4(const ibv_gid& gid) {
  static const uint8_t prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return memcmp(gid.raw, prefix, sizeof(prefix)) == 0 &&
         (gid.raw[12] | gid.raw[13] | gid.raw[14] | gid.raw[15]) != 0;
}

std::string gid_text(const ibv_gid& gid) {
  char text[48];
  if (is_ipv4(gid)) {
    snprintf(text, sizeof(text), "%u.%u.%u.%u", gid.raw[12], gid.raw[13], gid.raw[14], gid.raw[15]);
  } else {
    char* at = text;
    for (int byte_idx = 0; byte_idx < 16; ++byte_idx)
      at +=
          snprintf(at, 4, byte_idx % 2 == 1 && byte_idx < 15 ? "%02x:" : "%02x", gid.raw[byte_idx]);
  }
  return text;
}

int query_port(const VerbsApi& api, ibv_context* context, ibv_port_attr* attr) {
  memset(attr, 0, sizeof(*attr));
  // As the header's inline function does it, which would need the library to be linked.
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  if (extended != nullptr) return extended->query_port(context, kPort, attr, sizeof(*attr));
  return api.query_port(context, kPort, reinterpret_cast<_compat_ibv_port_attr*>(attr));
}

}  // namespace

uint64_t now_ns() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

Engine::Engine(const VerbsApi& api, const Settings& settings, uint32_t rank)
    : api_(api), settings_(settings), rank_(rank) {}

Engine::~Engine() { stop_watching(); }

// -- Opening --------------------------------------------------------------------------------------

int Engine::query(Port* port) {
  ibv_port_attr attr;
  int error = query_port(api_, context_, &attr);
  if (error != 0)
    return comm_fail(COMM_ERROR_BROKEN, "port 1 of %s can't be queried: %s", nic_.c_str(),
                     strerror(error));
  if (attr.state != IBV_PORT_ACTIVE)
    return comm_fail(COMM_ERROR_UNSUPPORTED,
                     "port 1 of %s is not active (state %d): check its link", nic_.c_str(),
                     static_cast<int>(attr.state));
  if (attr.link_layer != IBV_LINK_LAYER_ETHERNET)
    return comm_fail(COMM_ERROR_UNSUPPORTED,
                     "port 1 of %s has link layer %u, and RoCE needs Ethernet (%d)", nic_.c_str(),
                     attr.link_layer, IBV_LINK_LAYER_ETHERNET);
  if (gid_index_ >= static_cast<uint32_t>(attr.gid_tbl_len))
    return comm_fail(COMM_ERROR_UNSUPPORTED, "%s has %d GIDs, index %u is none of them",
                     nic_.c_str(), attr.gid_tbl_len, gid_index_);
  ibv_gid_entry entry = {};
  error = api_.query_gid_ex(context_, kPort, gid_index_, &entry, 0, sizeof(entry));
  if (error != 0)
    return comm_fail(COMM_ERROR_UNSUPPORTED, "GID %u of %s can't be read: %s: is the entry empty?",
                     gid_index_, nic_.c_str(), strerror(error));
  if (entry.gid_type != IBV_GID_TYPE_ROCE_V2 || entry.ndev_ifindex == 0 || !is_ipv4(entry.gid))
    return comm_fail(COMM_ERROR_UNSUPPORTED,
                     "GID %u of %s (%s, type %u, interface %u) is no RoCE v2 entry with an IPv4 "
                     "address of an interface",
                     gid_index_, nic_.c_str(), gid_text(entry.gid).c_str(), entry.gid_type,
                     entry.ndev_ifindex);
  port->gid = entry.gid;
  port->mtu = attr.active_mtu;
  port->max_message = attr.max_msg_sz;
  if (port->max_message == 0)
    return comm_fail(COMM_ERROR_UNSUPPORTED, "port 1 of %s says that its largest message is 0",
                     nic_.c_str());
  return COMM_OK;
}

int Engine::open(const char* nic, uint32_t gid_index, const uint32_t* peers, uint32_t num_peers) {
  nic_ = nic;
  gid_index_ = gid_index;
  int count = 0;
  ibv_device** list = api_.get_device_list(&count);
  if (list == nullptr)
    return comm_fail(COMM_ERROR_UNSUPPORTED, "there are no RDMA devices: %s", strerror(errno));
  ibv_device* device = nullptr;
  std::string names;
  for (int device_idx = 0; device_idx < count; ++device_idx) {
    const char* name = api_.get_device_name(list[device_idx]);
    if (nic_ == name) device = list[device_idx];
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  int status = COMM_OK;
  if (device == nullptr) {
    status = comm_fail(COMM_ERROR_UNSUPPORTED, "there is no RDMA device %s; there are: %s", nic,
                       names.empty() ? "none" : names.c_str());
  } else if (!api_.mlx5_is_supported(device)) {
    status = comm_fail(COMM_ERROR_UNSUPPORTED, "%s is no mlx5 device", nic);
  } else {
    mlx5dv_context_attr attr = {};
    // Keys of bands are made by a command of the firmware.
    attr.flags = MLX5DV_CONTEXT_FLAGS_DEVX;
    context_ = api_.mlx5_open_device(device, &attr);
    if (context_ == nullptr)
      status =
          comm_fail(COMM_ERROR_BROKEN, "%s can't be opened with DEVX: %s", nic, strerror(errno));
  }
  api_.free_device_list(list);
  if (status != COMM_OK) return status;

  status = query(&port_);
  if (status != COMM_OK) return status;
  max_message_ = port_.max_message;
  pd_ = api_.alloc_pd(context_);
  if (pd_ == nullptr)
    return comm_fail(COMM_ERROR_BROKEN, "%s: ibv_alloc_pd: %s", nic, strerror(errno));
  const int completions =
      static_cast<int>(num_peers * (settings_.send_depth + settings_.receive_depth));
  cq_ = api_.create_cq(context_, std::max(completions, kMinCompletions), nullptr, nullptr, 0);
  if (cq_ == nullptr)
    return comm_fail(COMM_ERROR_BROKEN, "%s: ibv_create_cq: %s", nic, strerror(errno));
  index_of_.assign(kMaxRanks, -1);
  peers_.resize(num_peers);
  for (uint32_t peer_idx = 0; peer_idx < num_peers; ++peer_idx) {
    Peer& peer = peers_[peer_idx];
    peer.rank = peers[peer_idx];
    peer.index = peer_idx;
    index_of_[peer.rank] = static_cast<int32_t>(peer_idx);
  }
  for (Peer& peer : peers_) {
    status = create_peer(peer);
    if (status != COMM_OK) return status;
  }
  stop_fd_ = eventfd(0, EFD_CLOEXEC);
  const int flags = fcntl(context_->async_fd, F_GETFL);
  if (stop_fd_ < 0 || flags < 0 || fcntl(context_->async_fd, F_SETFL, flags | O_NONBLOCK) < 0)
    return comm_fail(COMM_ERROR_BROKEN, "%s: its events can't be watched: %s", nic,
                     strerror(errno));
  watcher_ = std::thread([this] { watch(); });
  return COMM_OK;
}

int Engine::create_peer(Peer& peer) {
  ibv_qp_init_attr_ex attr = {};
  attr.qp_context = &peer;
  attr.send_cq = attr.recv_cq = cq_;
  attr.cap.max_send_wr = std::max(settings_.send_depth, kMinSendPlaces);
  attr.cap.max_recv_wr = settings_.receive_depth;
  attr.cap.max_send_sge = attr.cap.max_recv_sge = 1;
  attr.cap.max_inline_data = kInlineBytes;
  attr.qp_type = IBV_QPT_RC;
  attr.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
  attr.pd = pd_;
  attr.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
  mlx5dv_qp_init_attr mlx5 = {};
  mlx5.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS;
  mlx5.send_ops_flags = MLX5DV_QP_EX_WITH_MR_INTERLEAVED;
  peer.qp = api_.mlx5_create_qp(context_, &attr, &mlx5);
  if (peer.qp == nullptr)
    return comm_fail(errno == EOPNOTSUPP ? COMM_ERROR_UNSUPPORTED : COMM_ERROR_BROKEN,
                     "%s: no queue pair with interleaved keys for rank %u: %s", nic_.c_str(),
                     peer.rank, strerror(errno));
  peer.ex = api_.qp_to_qp_ex(peer.qp);
  peer.mx = peer.ex == nullptr ? nullptr : api_.mlx5_qp_ex_from_ibv_qp_ex(peer.ex);
  if (peer.mx == nullptr)
    return comm_fail(COMM_ERROR_UNSUPPORTED, "%s: its queue pairs have no builders of requests",
                     nic_.c_str());
  // Packets of an earlier connection of the same number must not be taken for this one's.
  uint32_t random = 0;
  if (getrandom(&random, sizeof(random), 0) != sizeof(random)) random = peer.qp->qp_num * 2654435u;
  peer.psn = random & 0xffffff;
  return COMM_OK;
}

void Engine::endpoints(Endpoint* out) const {
  for (const Peer& peer : peers_) {
    Endpoint& endpoint = out[peer.index];
    memcpy(endpoint.gid, port_.gid.raw, sizeof(endpoint.gid));
    endpoint.max_message = port_.max_message;
    endpoint.mtu = port_.mtu;
    endpoint.rank = peer.rank;
    endpoint.qpn = peer.qp->qp_num;
    endpoint.psn = peer.psn;
  }
}

int Engine::revalidate() {
  Port port = {};
  const int status = query(&port);
  // A port that went away is no more a question of what this machine supports.
  if (status != COMM_OK) return COMM_ERROR_BROKEN;
  if (memcmp(port.gid.raw, port_.gid.raw, sizeof(port.gid.raw)) != 0)
    return comm_fail(
        COMM_ERROR_BROKEN, "GID %u of %s was %s when it was told to the other ranks and is %s now",
        gid_index_, nic_.c_str(), gid_text(port_.gid).c_str(), gid_text(port.gid).c_str());
  if (port.mtu != port_.mtu)
    return comm_fail(COMM_ERROR_BROKEN,
                     "the MTU of %s was %d (enum ibv_mtu) when it was told to the other ranks and "
                     "is %d now",
                     nic_.c_str(), port_.mtu, port.mtu);
  return COMM_OK;
}

// -- Connecting -----------------------------------------------------------------------------------

int Engine::connect(const Endpoint* remotes, uint32_t count) {
  COMM_REQUIRE(count == peers_.size(), "there are %zu peers and %u endpoints", peers_.size(),
               count);
  for (Peer& peer : peers_) {
    const Endpoint& remote = remotes[peer.index];
    COMM_REQUIRE(!peer.connected, "rank %u is connected already", peer.rank);
    COMM_REQUIRE(remote.rank == peer.rank, "endpoint %u is rank %u's, expected rank %u's",
                 peer.index, remote.rank, peer.rank);
    COMM_REQUIRE(remote.qpn < 1u << 24 && remote.psn < 1u << 24 && remote.mtu >= IBV_MTU_256 &&
                     remote.mtu <= IBV_MTU_4096 && remote.max_message > 0,
                 "rank %u's endpoint makes no sense: queue pair %u, sequence %u, MTU %u, largest "
                 "message %llu",
                 peer.rank, remote.qpn, remote.psn, remote.mtu,
                 static_cast<unsigned long long>(remote.max_message));
  }
  for (Peer& peer : peers_) {
    const int status = connect_peer(peer, remotes[peer.index]);
    if (status != COMM_OK) return status;
  }
  return COMM_OK;
}

int Engine::connect_peer(Peer& peer, const Endpoint& remote) {
  const auto modify = [&](const char* state, ibv_qp_attr& attr, int mask) -> int {
    const int error = api_.modify_qp(peer.qp, &attr, mask);
    if (error == 0) return COMM_OK;
    const char* hint = error == ETIMEDOUT ? ": is the peer's address reachable from this GID?" : "";
    return comm_fail(COMM_ERROR_BROKEN, "%s: queue pair for rank %u to %s: %s%s", nic_.c_str(),
                     peer.rank, state, strerror(error), hint);
  };
  ibv_qp_attr init = {};
  init.qp_state = IBV_QPS_INIT;
  init.port_num = kPort;
  init.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
  int status =
      modify("INIT", init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  if (status != COMM_OK) return status;
  peer.in_use = true;
  // Before the peer can send: a message that finds no receive is refused and sent again after the
  // longest wait of the whole exchange.
  peer.max_message = std::min(port_.max_message, remote.max_message);
  while (peer.posted.receives < settings_.receive_depth) {
    status = post_receive(peer);
    if (status != COMM_OK) return status;
  }
  ibv_qp_attr rtr = {};
  rtr.qp_state = IBV_QPS_RTR;
  rtr.path_mtu = static_cast<ibv_mtu>(std::min<uint32_t>(port_.mtu, remote.mtu));
  rtr.dest_qp_num = remote.qpn;
  rtr.rq_psn = remote.psn;
  rtr.max_dest_rd_atomic = 1;
  rtr.min_rnr_timer = 12;  // 0.64 ms
  rtr.ah_attr.is_global = 1;
  memcpy(rtr.ah_attr.grh.dgid.raw, remote.gid, sizeof(remote.gid));
  rtr.ah_attr.grh.sgid_index = static_cast<uint8_t>(gid_index_);
  rtr.ah_attr.grh.hop_limit = 64;
  rtr.ah_attr.grh.traffic_class = static_cast<uint8_t>(settings_.traffic_class);
  rtr.ah_attr.port_num = kPort;
  status = modify("RTR", rtr,
                  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
                      IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  if (status != COMM_OK) return status;
  ibv_qp_attr rts = {};
  rts.qp_state = IBV_QPS_RTS;
  rts.timeout = static_cast<uint8_t>(settings_.timeout);
  rts.retry_cnt = static_cast<uint8_t>(settings_.retry_count);
  rts.rnr_retry = 7;  // without end
  rts.sq_psn = peer.psn;
  rts.max_rd_atomic = 1;
  status = modify("RTS", rts,
                  IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
                      IBV_QP_SQ_PSN | IBV_QP_MAX_QP_RD_ATOMIC);
  peer.connected = status == COMM_OK;
  return status;
}

// -- Memory ---------------------------------------------------------------------------------------

int Engine::register_memory(const Memory& memory, int access, const char* what, ibv_mr** mr,
                            bool* by_dmabuf) {
  std::string dmabuf_error = "none was made";
  if (memory.dmabuf_fd >= 0) {
    if (api_.reg_dmabuf_mr == nullptr) {
      dmabuf_error = "libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 has)";
    } else {
      *mr = api_.reg_dmabuf_mr(pd_, memory.dmabuf_offset, memory.nbytes, memory.address,
                               memory.dmabuf_fd, access);
      *by_dmabuf = *mr != nullptr;
      if (*by_dmabuf) return COMM_OK;
      dmabuf_error = strerror(errno);
    }
  }
  *mr = api_.reg_mr(pd_, reinterpret_cast<void*>(memory.address), memory.nbytes, access);
  if (*mr != nullptr) return COMM_OK;
  const int error = errno;
  if (memory.dmabuf_fd < 0 && memory.device == 0)
    return comm_fail(COMM_ERROR_BROKEN, "%s of %llu bytes can't be registered with %s: %s", what,
                     static_cast<unsigned long long>(memory.nbytes), nic_.c_str(), strerror(error));
  return comm_fail(COMM_ERROR_BROKEN,
                   "%s of %llu bytes can't be registered with %s. By DMA-BUF: %s. By peer memory: "
                   "%s (is nvidia-peermem loaded?)",
                   what, static_cast<unsigned long long>(memory.nbytes), nic_.c_str(),
                   dmabuf_error.c_str(), strerror(error));
}

int Engine::register_pair(const Memory& output, const Memory& landing, Pair** out) {
  COMM_REQUIRE(output.address != 0 && output.nbytes != 0, "the output is empty");
  COMM_REQUIRE(landing.address != 0 && landing.nbytes != 0, "the landing buffer is empty");
  Pair* pair = new Pair;
  pair->engine = this;
  pair->output = output;
  pair->landing = landing;
  pair->keys.resize(peers_.size());
  pair->remotes.resize(peers_.size());
  int status = register_memory(output, kRemoteAccess, "the output", &pair->output_mr,
                               &pair->output_by_dmabuf);
  if (status == COMM_OK)
    status = register_memory(landing, IBV_ACCESS_LOCAL_WRITE, "the landing buffer",
                             &pair->landing_mr, &pair->landing_by_dmabuf);
  for (BandKeys& keys : pair->keys) {
    for (mlx5dv_mkey** key : {&keys.source, &keys.target}) {
      if (status != COMM_OK) break;
      mlx5dv_mkey_init_attr attr = {};
      attr.pd = pd_;
      attr.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT;
      attr.max_entries = kKeyEntries;
      *key = api_.mlx5_create_mkey(&attr);
      if (*key == nullptr)
        status = comm_fail(COMM_ERROR_BROKEN, "%s: a key for a band can't be made: %s",
                           nic_.c_str(), strerror(errno));
    }
  }
  pairs_.push_back(pair);
  counters_.registrations.store(pairs_.size(), std::memory_order_relaxed);
  *out = pair;
  if (status == COMM_OK) return status;
  char cause[COMM_ERROR_TEXT_SIZE];
  snprintf(cause, sizeof(cause), "%s", comm_error_text_);
  *out = nullptr;
  // What can't be given back stays listed, and `close` tries again.
  if (close_pair(pair) != COMM_OK) {
    char second[256];
    snprintf(second, sizeof(second), "%.255s", comm_error_text_);
    return comm_fail(status, "%.700s; and what was registered before can't be given back: %s",
                     cause, second);
  }
  return comm_fail(status, "%s", cause);
}

int Engine::attach(Pair* pair, const Attached* remotes, uint32_t count) {
  COMM_REQUIRE(count == peers_.size(), "there are %zu peers and %u records", peers_.size(), count);
  for (const Peer& peer : peers_) {
    const Attached& remote = remotes[peer.index];
    COMM_REQUIRE(remote.rank == peer.rank, "record %u is rank %u's, expected rank %u's", peer.index,
                 remote.rank, peer.rank);
    COMM_REQUIRE(remote.address != 0 && remote.nbytes == pair->output.nbytes,
                 "rank %u's output has %llu bytes, this rank's has %llu: outputs of one "
                 "registration have one size",
                 peer.rank, static_cast<unsigned long long>(remote.nbytes),
                 static_cast<unsigned long long>(pair->output.nbytes));
  }
  pair->remotes.assign(remotes, remotes + count);
  pair->attached = true;
  return COMM_OK;
}

int Engine::release_keys(Pair* pair) {
  for (BandKeys& keys : pair->keys) {
    for (mlx5dv_mkey** key : {&keys.source, &keys.target}) {
      if (*key == nullptr) continue;
      const int error = api_.mlx5_destroy_mkey(*key);
      if (error != 0)
        return comm_fail(COMM_ERROR_BROKEN, "%s: a key of a band can't be destroyed: %s",
                         nic_.c_str(), strerror(error));
      *key = nullptr;
    }
  }
  return COMM_OK;
}

int Engine::close_pair(Pair* pair) {
  for (const Peer& peer : peers_)
    if (peer.posted.sends != 0)
      return comm_fail(
          COMM_ERROR_BROKEN,
          "%u requests to rank %u are outstanding, and the NIC may still read or write "
          "the buffers: quiesce first",
          peer.posted.sends, peer.rank);
  // Keys before what they refer to.
  const int status = release_keys(pair);
  if (status != COMM_OK) return status;
  for (ibv_mr** mr : {&pair->landing_mr, &pair->output_mr}) {
    if (*mr == nullptr) continue;
    const int error = api_.dereg_mr(*mr);
    if (error != 0)
      return comm_fail(COMM_ERROR_BROKEN, "%s: the %s can't be deregistered: %s", nic_.c_str(),
                       mr == &pair->output_mr ? "output" : "landing buffer", strerror(error));
    *mr = nullptr;
  }
  pairs_.erase(std::find(pairs_.begin(), pairs_.end(), pair));
  counters_.registrations.store(pairs_.size(), std::memory_order_relaxed);
  delete pair;
  return COMM_OK;
}

// -- Closing --------------------------------------------------------------------------------------

int Engine::close() {
  for (const Peer& peer : peers_)
    if (peer.posted.sends != 0 || peer.posted.receives != 0)
      return comm_fail(COMM_ERROR_BROKEN,
                       "%u sends and %u receives of rank %u are outstanding: quiesce first",
                       peer.posted.sends, peer.posted.receives, peer.rank);
  if (!pairs_.empty())
    return comm_fail(COMM_ERROR_BROKEN, "%zu pairs of buffers are still registered: close them",
                     pairs_.size());
  stop_watching();
  // Each step is remembered by its null pointer, so that a second call goes on where this one
  // ended.
  for (Peer& peer : peers_) {
    if (peer.qp == nullptr) continue;
    const int error = api_.destroy_qp(peer.qp);
    if (error != 0)
      return comm_fail(COMM_ERROR_BROKEN, "%s: the queue pair for rank %u can't be destroyed: %s",
                       nic_.c_str(), peer.rank, strerror(error));
    peer.qp = nullptr;
  }
  if (cq_ != nullptr) {
    const int error = api_.destroy_cq(cq_);
    if (error != 0)
      return comm_fail(COMM_ERROR_BROKEN, "%s: ibv_destroy_cq: %s", nic_.c_str(), strerror(error));
    cq_ = nullptr;
  }
  if (pd_ != nullptr) {
    const int error = api_.dealloc_pd(pd_);
    if (error != 0)
      return comm_fail(COMM_ERROR_BROKEN, "%s: ibv_dealloc_pd: %s", nic_.c_str(), strerror(error));
    pd_ = nullptr;
  }
  if (context_ != nullptr) {
    if (api_.close_device(context_) != 0)
      return comm_fail(COMM_ERROR_BROKEN, "%s: ibv_close_device: %s", nic_.c_str(),
                       strerror(errno));
    context_ = nullptr;
  }
  if (stop_fd_ >= 0) ::close(stop_fd_);
  stop_fd_ = -1;
  return COMM_OK;
}

// -- Events ---------------------------------------------------------------------------------------

void Engine::watch() {
  pollfd fds[2] = {{context_->async_fd, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
  while (true) {
    if (poll(fds, 2, -1) < 0) {
      if (errno == EINTR) continue;
      return set_problem(kEvent, -1, nic_ + ": its events can't be watched: " + strerror(errno));
    }
    if (fds[1].revents != 0) return;
    if (fds[0].revents == 0) continue;
    ibv_async_event event = {};
    if (api_.get_async_event(context_, &event) != 0) {
      if (errno == EAGAIN || errno == EINTR) continue;
      // A device that was pulled out ends its events.
      return set_problem(kEvent, -1, nic_ + ": its events ended: " + strerror(errno));
    }
    bump(counters_.events);
    on_event(event);
    api_.ack_async_event(&event);
  }
}

void Engine::on_event(const ibv_async_event& event) {
  const std::string what = nic_ + ": " + api_.event_type_str(event.event_type);
  switch (event.event_type) {
    case IBV_EVENT_PORT_ERR:
      if (event.element.port_num != kPort) return;
      return set_problem(kEvent, -1, what + ": the port went down");
    case IBV_EVENT_DEVICE_FATAL:
    case IBV_EVENT_CQ_ERR:
      return set_problem(kEvent, -1, what);
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: {
      const Peer* peer = static_cast<const Peer*>(event.element.qp->qp_context);
      return set_problem(kEvent, static_cast<int32_t>(peer->rank),
                         what + ": the queue pair for rank " + std::to_string(peer->rank));
    }
    case IBV_EVENT_GID_CHANGE: {
      // Of the whole table; most changes are another interface's.
      ibv_gid_entry entry = {};
      const int error = api_.query_gid_ex(context_, kPort, gid_index_, &entry, 0, sizeof(entry));
      if (error != 0 || memcmp(entry.gid.raw, port_.gid.raw, sizeof(entry.gid.raw)) != 0)
        set_problem(kEvent, -1,
                    what + ": GID " + std::to_string(gid_index_) + " was " + gid_text(port_.gid) +
                        " and is " + (error != 0 ? "gone" : gid_text(entry.gid)));
      return;
    }
    default:
      return;  // counted; nothing that ends a connection
  }
}

void Engine::stop_watching() {
  if (!watcher_.joinable()) return;
  const uint64_t one = 1;
  ssize_t written = 0;
  do written = write(stop_fd_, &one, sizeof(one));
  while (written < 0 && errno == EINTR);
  watcher_.join();
}

void Engine::set_problem(OutcomeKind kind, int32_t peer, const std::string& text) {
  std::lock_guard<std::mutex> lock(problem_mutex_);
  if (problem_kind_.load(std::memory_order_relaxed) != kOk) return;
  problem_ = text;
  problem_peer_ = peer;
  problem_kind_.store(kind, std::memory_order_release);
}

void Engine::abort(const char* reason) { set_problem(kAborted, -1, reason); }

void Engine::heed(const uint32_t* word) { word_ = word; }

uint32_t Engine::problem_kind() {
  // Another process sets it, so nothing but the word tells of it.
  if (word_ != nullptr && __atomic_load_n(word_, __ATOMIC_ACQUIRE) != 0) {
    set_problem(kAborted, -1, "another rank has given up");
  }
  return problem_kind_.load(std::memory_order_acquire);
}

void Engine::problem(uint32_t* kind, char* text, size_t text_size) const {
  std::lock_guard<std::mutex> lock(problem_mutex_);
  *kind = problem_kind_.load(std::memory_order_relaxed);
  snprintf(text, text_size, "%s", problem_.c_str());
}

void Engine::count(Counters* counters) const {
  const auto read = [](const std::atomic<uint64_t>& counter) {
    return counter.load(std::memory_order_relaxed);
  };
  counters->exchanges = read(counters_.exchanges);
  counters->writes = read(counters_.writes);
  counters->write_bytes = read(counters_.write_bytes);
  counters->rebinds = read(counters_.rebinds);
  counters->receives_posted = read(counters_.receives_posted);
  counters->sends_completed = read(counters_.sends_completed);
  counters->receives_completed = read(counters_.receives_completed);
  counters->polls = read(counters_.polls);
  counters->events = read(counters_.events);
  counters->registrations = read(counters_.registrations);
  counters->split_writes = read(counters_.split_writes);
}

void Engine::posted(Posted* posted) const {
  for (const Peer& peer : peers_) posted[peer.index] = peer.posted;
}

}  // namespace rdma
}  // namespace pcie
}  // namespace comm
