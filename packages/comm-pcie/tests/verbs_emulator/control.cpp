// Devices, ports, GIDs, protection domains, regions, keys, completion queues, events.
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>

#include "memory.h"
#include "objects.h"

namespace emu {

namespace {

ibv_device devices[kNics];

int nic_of(const ibv_device* device) { return static_cast<int>(device - devices); }

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attr, size_t size) {
  LocalContext* own = local(context);
  if (port != 1) return fail(EINVAL);
  Lock lock(own->shared);
  const Nic& nic = own->shared->nics[own->nic];
  ibv_port_attr full = {};
  full.state = static_cast<ibv_port_state>(nic.port_state);
  full.max_mtu = IBV_MTU_4096;
  full.active_mtu = static_cast<ibv_mtu>(nic.active_mtu);
  full.gid_tbl_len = kGids;
  full.max_msg_sz = nic.max_msg_sz;
  full.pkey_tbl_len = 1;
  full.link_layer = static_cast<uint8_t>(nic.link_layer);
  full.phys_state = nic.port_state == IBV_PORT_ACTIVE ? 5 : 2;
  full.active_width = 2;
  full.active_speed = 64;
  memcpy(attr, &full, size < sizeof(full) ? size : sizeof(full));
  return 0;
}

int query_device_ex(ibv_context* context, const ibv_query_device_ex_input*,
                    ibv_device_attr_ex* attr, size_t size) {
  memset(attr, 0, size);
  ibv_device_attr& plain = attr->orig_attr;
  snprintf(plain.fw_ver, sizeof(plain.fw_ver), "0.0.emulated");
  plain.max_mr_size = UINT64_MAX;
  plain.vendor_id = 0x02c9;
  plain.max_qp = kQps;
  plain.max_qp_wr = kReceives;
  plain.max_sge = kSges;
  plain.max_cq = kCqs;
  plain.max_cqe = kCompletions;
  plain.max_mr = kKeys;
  plain.max_pd = kPds;
  plain.phys_port_cnt = 1;
  plain.max_pkeys = 1;
  (void)context;
  return 0;
}

int req_notify(ibv_cq*, int) { return 0; }

ibv_qp* create_qp_ex(ibv_context* context, ibv_qp_init_attr_ex* attr) {
  return create_qp(local(context), attr, nullptr);
}

ibv_context* open_device(ibv_device* device) {
  Fabric* shared = fabric();
  if (shared == nullptr || nic_of(device) < 0 || nic_of(device) >= kNics)
    return fail_null<ibv_context*>(ENODEV);
  Lock lock(shared);
  const uint32_t nic = static_cast<uint32_t>(nic_of(device));
  const int ordered = ordered_error(kOpen, nic);
  if (ordered != 0) return fail_null<ibv_context*>(ordered);
  const int slot = take_slot(shared->contexts);
  if (slot < 0) return fail_null<ibv_context*>(EMFILE);
  // Where only ancestors may reach into a process (Yama), others are let in: ranks are siblings.
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  char path[300];
  event_path(static_cast<uint32_t>(slot), path, sizeof(path));
  unlink(path);
  if (mkfifo(path, 0600) != 0) return nullptr;
  // Opened for both directions, so that it never ends.
  const int pipe = open(path, O_RDWR | O_CLOEXEC);
  if (pipe < 0) return nullptr;
  shared->contexts[slot] = {1, nic, getpid()};
  LocalContext* own = new LocalContext();
  own->shared = shared;
  own->slot = static_cast<uint32_t>(slot);
  own->nic = nic;
  own->view.owner = own;
  own->view.verbs.sz = sizeof(verbs_context);
  own->view.verbs.query_port = query_port;
  own->view.verbs.query_device_ex = query_device_ex;
  own->view.verbs.create_qp_ex = create_qp_ex;
  ibv_context& seen = own->view.verbs.context;
  seen.device = device;
  seen.async_fd = pipe;
  seen.cmd_fd = -1;
  seen.num_comp_vectors = 1;
  pthread_mutex_init(&seen.mutex, nullptr);
  seen.abi_compat = __VERBS_ABI_IS_EXTENDED;
  seen.ops.poll_cq = poll_cq;
  seen.ops.req_notify_cq = req_notify;
  seen.ops.post_send = post_send;
  seen.ops.post_recv = post_receive;
  remember(own, true);
  return &seen;
}

ibv_mr* register_region(ibv_pd* pd, uint64_t addr, uint64_t length, int access, Verb verb) {
  LocalContext* context = local(pd->context);
  Fabric* shared = context->shared;
  Lock lock(shared);
  const int ordered = ordered_error(verb, context->nic);
  if (ordered != 0) return fail_null<ibv_mr*>(ordered);
  const int remote = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  if (length == 0 || ((access & remote) != 0 && (access & IBV_ACCESS_LOCAL_WRITE) == 0))
    return fail_null<ibv_mr*>(refuse(EINVAL, "a region of %llu bytes with access 0x%x",
                                     static_cast<unsigned long long>(length), access));
  const int slot = take_slot(shared->keys);
  if (slot < 0) return fail_null<ibv_mr*>(ENOMEM);
  Key& key = shared->keys[slot];
  memset(&key, 0, sizeof(key));
  key.used = 1;
  key.kind = kRegion;
  key.number = key_number(shared, static_cast<uint32_t>(slot));
  key.pd = local(pd)->slot;
  key.nic = context->nic;
  key.access = static_cast<uint32_t>(access);
  key.pid = getpid();
  key.addr = addr;
  key.length = length;
  describe_device_memory(addr, &key);
  LocalMr* own = new LocalMr();
  own->mr = {pd->context, pd,        reinterpret_cast<void*>(addr), length, key.number,
             key.number,  key.number};
  own->slot = static_cast<uint32_t>(slot);
  return &own->mr;
}

}  // namespace

}  // namespace emu

using emu::Fabric;
using emu::fail;
using emu::fail_null;
using emu::local;
using emu::Lock;

// -- Devices --------------------------------------------------------------------------------------

EXPORT ibv_device** ibv_get_device_list(int* count) {
  if (count != nullptr) *count = 0;
  Fabric* shared = emu::fabric();
  // As on a kernel without RDMA.
  if (shared == nullptr) return fail_null<ibv_device**>(ENOSYS);
  ibv_device** list = new ibv_device*[emu::kNics + 1]();
  for (uint32_t nic_idx = 0; nic_idx < shared->num_nics; ++nic_idx) {
    ibv_device& device = emu::devices[nic_idx];
    device.node_type = IBV_NODE_CA;
    device.transport_type = IBV_TRANSPORT_IB;
    snprintf(device.name, sizeof(device.name), "%s", shared->nics[nic_idx].name);
    snprintf(device.dev_name, sizeof(device.dev_name), "uverbs%u", nic_idx);
    list[nic_idx] = &device;
  }
  if (count != nullptr) *count = static_cast<int>(shared->num_nics);
  return list;
}

EXPORT void ibv_free_device_list(ibv_device** list) { delete[] list; }
EXPORT const char* ibv_get_device_name(ibv_device* device) { return device->name; }
EXPORT __be64 ibv_get_device_guid(ibv_device* device) {
  return htobe64(0x1000u + static_cast<uint64_t>(emu::nic_of(device)));
}
EXPORT ibv_context* ibv_open_device(ibv_device* device) { return emu::open_device(device); }

EXPORT bool mlx5dv_is_supported(ibv_device* device) {
  Fabric* shared = emu::fabric();
  const int nic = emu::nic_of(device);
  return shared != nullptr && nic >= 0 && nic < emu::kNics && shared->nics[nic].is_mlx5 != 0;
}

EXPORT ibv_context* mlx5dv_open_device(ibv_device* device, mlx5dv_context_attr* attr) {
  if (!mlx5dv_is_supported(device)) return fail_null<ibv_context*>(EOPNOTSUPP);
  if (attr != nullptr && (attr->flags & ~static_cast<uint32_t>(MLX5DV_CONTEXT_FLAGS_DEVX)) != 0)
    return fail_null<ibv_context*>(EINVAL);
  return emu::open_device(device);
}

EXPORT int ibv_close_device(ibv_context* context) {
  emu::LocalContext* own = local(context);
  {
    Lock lock(own->shared);
    const int ordered = emu::ordered_error(emu::kClose, own->nic);
    if (ordered != 0) return fail(ordered), -1;
    for (const emu::Pd& pd : own->shared->pds)
      if (pd.used && pd.context == own->slot)
        return fail(emu::refuse(EBUSY, "a device is closed that has protection domains")), -1;
    for (const auto& item : own->cqs)
      if (own->shared->cqs[item.first].used)
        return fail(emu::refuse(EBUSY, "a device is closed that has completion queues")), -1;
    own->shared->contexts[own->slot].used = 0;
    emu::remember(own, false);
    char path[300];
    emu::event_path(own->slot, path, sizeof(path));
    unlink(path);
    close(context->async_fd);
  }
  delete own;
  return 0;
}

EXPORT int ibv_query_device(ibv_context* context, ibv_device_attr* attr) {
  ibv_device_attr_ex full;
  const int error = emu::query_device_ex(context, nullptr, &full, sizeof(full));
  *attr = full.orig_attr;
  return error;
}

EXPORT int mlx5dv_query_device(ibv_context*, mlx5dv_context* attr) {
  const uint64_t wanted = attr->comp_mask;
  (void)wanted;
  memset(attr, 0, sizeof(*attr));
  attr->version = 1;
  return 0;
}

EXPORT int ibv_query_port(ibv_context* context, uint8_t port, _compat_ibv_port_attr* attr) {
  return emu::query_port(context, port, reinterpret_cast<ibv_port_attr*>(attr),
                         offsetof(ibv_port_attr, port_cap_flags2));
}

EXPORT int ibv_query_pkey(ibv_context*, uint8_t, int index, __be16* pkey) {
  *pkey = htobe16(0xffff);
  return index == 0 ? 0 : -1;
}

EXPORT int _ibv_query_gid_ex(ibv_context* context, uint32_t port, uint32_t index,
                             ibv_gid_entry* entry, uint32_t, size_t size) {
  emu::LocalContext* own = local(context);
  if (port != 1 || index >= emu::kGids) return EINVAL;
  Lock lock(own->shared);
  const emu::Gid& gid = own->shared->nics[own->nic].gids[index];
  if (!gid.used) return ENODATA;
  ibv_gid_entry full = {};
  memcpy(full.gid.raw, gid.raw, sizeof(full.gid.raw));
  full.gid_index = index;
  full.port_num = port;
  full.gid_type = gid.type;
  full.ndev_ifindex = gid.ifindex;
  memcpy(entry, &full, size < sizeof(full) ? size : sizeof(full));
  return 0;
}

EXPORT ssize_t _ibv_query_gid_table(ibv_context* context, ibv_gid_entry* entries, size_t most,
                                    uint32_t flags, size_t size) {
  size_t count = 0;
  for (uint32_t index = 0; index < emu::kGids && count < most; ++index) {
    char* at = reinterpret_cast<char*>(entries) + count * size;
    count += _ibv_query_gid_ex(context, 1, index, reinterpret_cast<ibv_gid_entry*>(at), flags,
                               size) == 0;
  }
  return static_cast<ssize_t>(count);
}

EXPORT int ibv_query_gid(ibv_context* context, uint8_t port, int index, ibv_gid* gid) {
  ibv_gid_entry entry = {};
  const int error =
      _ibv_query_gid_ex(context, port, static_cast<uint32_t>(index), &entry, 0, sizeof(entry));
  *gid = entry.gid;  // zero where there is none, as the kernel has it
  return error == ENODATA ? 0 : error == 0 ? 0 : -1;
}

// -- Protection domains, regions, keys ------------------------------------------------------------

EXPORT ibv_pd* ibv_alloc_pd(ibv_context* context) {
  emu::LocalContext* own = local(context);
  Lock lock(own->shared);
  const int ordered = emu::ordered_error(emu::kAllocPd, own->nic);
  if (ordered != 0) return fail_null<ibv_pd*>(ordered);
  const int slot = emu::take_slot(own->shared->pds);
  if (slot < 0) return fail_null<ibv_pd*>(ENOMEM);
  own->shared->pds[slot] = {1, own->slot};
  emu::LocalPd* pd = new emu::LocalPd();
  pd->pd.context = context;
  pd->slot = static_cast<uint32_t>(slot);
  return &pd->pd;
}

EXPORT int ibv_dealloc_pd(ibv_pd* pd) {
  emu::LocalContext* context = local(pd->context);
  const uint32_t slot = local(pd)->slot;
  {
    Lock lock(context->shared);
    const int ordered = emu::ordered_error(emu::kDeallocPd, context->nic);
    if (ordered != 0) return fail(ordered);
    for (const emu::Key& key : context->shared->keys)
      if (key.used && key.pd == slot)
        return fail(
            emu::refuse(EBUSY, "a protection domain is freed that has key 0x%x", key.number));
    for (const auto& item : context->qps)
      if (context->shared->qps[item.first].pd == slot)
        return fail(emu::refuse(EBUSY, "a protection domain is freed that has queue pairs"));
    context->shared->pds[slot].used = 0;
  }
  delete local(pd);
  return 0;
}

EXPORT ibv_mr* ibv_reg_mr(ibv_pd* pd, void* addr, size_t length, int access) {
  return emu::register_region(pd, reinterpret_cast<uint64_t>(addr), length, access, emu::kRegMr);
}

EXPORT ibv_mr* ibv_reg_mr_iova2(ibv_pd* pd, void* addr, size_t length, uint64_t iova,
                                unsigned access) {
  if (iova != reinterpret_cast<uint64_t>(addr)) return fail_null<ibv_mr*>(EOPNOTSUPP);
  return ibv_reg_mr(pd, addr, length, static_cast<int>(access));
}

EXPORT ibv_mr* ibv_reg_dmabuf_mr(ibv_pd* pd, uint64_t offset, size_t length, uint64_t iova,
                                 int file, int access) {
  if (!local(pd->context)->shared->nics[local(pd->context)->nic].has_dmabuf)
    return fail_null<ibv_mr*>(EOPNOTSUPP);
  struct stat found;
  if (fstat(file, &found) != 0) return fail_null<ibv_mr*>(EBADF);
  if (found.st_size != 0 && offset + length > static_cast<uint64_t>(found.st_size))
    return fail_null<ibv_mr*>(EINVAL);
  // The kernel has the address of the NIC start at the same place of a page as the memory does.
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (offset % page != iova % page) return fail_null<ibv_mr*>(EINVAL);
  return emu::register_region(pd, iova, length, access, emu::kRegDmabuf);
}

EXPORT int ibv_dereg_mr(ibv_mr* mr) {
  emu::LocalContext* context = local(mr->context);
  {
    Lock lock(context->shared);
    const int ordered = emu::ordered_error(emu::kDeregMr, context->nic);
    if (ordered != 0) return fail(ordered);
    context->shared->keys[local(mr)->slot].used = 0;
  }
  delete local(mr);
  return 0;
}

EXPORT mlx5dv_mkey* mlx5dv_create_mkey(mlx5dv_mkey_init_attr* attr) {
  emu::LocalContext* context = local(attr->pd->context);
  Fabric* shared = context->shared;
  Lock lock(shared);
  const int ordered = emu::ordered_error(emu::kCreateMkey, context->nic);
  if (ordered != 0) return fail_null<mlx5dv_mkey*>(ordered);
  if (attr->create_flags != MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT || attr->max_entries == 0)
    return fail_null<mlx5dv_mkey*>(emu::refuse(EOPNOTSUPP, "an mkey with flags 0x%x and %u entries",
                                               attr->create_flags, attr->max_entries));
  const int slot = emu::take_slot(shared->keys);
  if (slot < 0) return fail_null<mlx5dv_mkey*>(ENOMEM);
  emu::Key& key = shared->keys[slot];
  memset(&key, 0, sizeof(key));
  key.used = 1;
  key.kind = emu::kInterleaved;
  key.number = emu::key_number(shared, static_cast<uint32_t>(slot));
  key.pd = local(attr->pd)->slot;
  key.nic = context->nic;
  key.pid = getpid();
  key.max_entries = attr->max_entries;
  emu::LocalMkey* own = new emu::LocalMkey();
  own->mkey = {key.number, key.number};
  own->context = context;
  own->slot = static_cast<uint32_t>(slot);
  return &own->mkey;
}

EXPORT int mlx5dv_destroy_mkey(mlx5dv_mkey* mkey) {
  emu::LocalMkey* own = local(mkey);
  {
    Lock lock(own->context->shared);
    const int ordered = emu::ordered_error(emu::kDestroyMkey, own->context->nic);
    if (ordered != 0) return fail(ordered);
    own->context->shared->keys[own->slot].used = 0;
  }
  delete own;
  return 0;
}

// -- Completion queues ----------------------------------------------------------------------------

EXPORT ibv_cq* ibv_create_cq(ibv_context* context, int entries, void* cq_context,
                             ibv_comp_channel* channel, int vector) {
  emu::LocalContext* own = local(context);
  Lock lock(own->shared);
  const int ordered = emu::ordered_error(emu::kCreateCq, own->nic);
  if (ordered != 0) return fail_null<ibv_cq*>(ordered);
  if (entries <= 0 || entries > emu::kCompletions || vector != 0 || channel != nullptr)
    return fail_null<ibv_cq*>(EINVAL);
  const int slot = emu::take_slot(own->shared->cqs);
  if (slot < 0) return fail_null<ibv_cq*>(ENOMEM);
  emu::Cq& cq = own->shared->cqs[slot];
  cq.used = 1;
  own->shared->cqs_high = std::max(own->shared->cqs_high, static_cast<uint32_t>(slot) + 1);
  cq.context = own->slot;
  cq.capacity = static_cast<uint32_t>(entries);
  cq.overflowed = cq.users = 0;
  cq.head = cq.tail = 0;
  emu::LocalCq* made = new emu::LocalCq();
  made->cq.context = context;
  made->cq.cq_context = cq_context;
  made->cq.cqe = entries;
  made->slot = static_cast<uint32_t>(slot);
  own->cqs[slot] = made;
  return &made->cq;
}

EXPORT int ibv_destroy_cq(ibv_cq* cq) {
  emu::LocalContext* context = local(cq->context);
  {
    Lock lock(context->shared);
    const int ordered = emu::ordered_error(emu::kDestroyCq, context->nic);
    if (ordered != 0) return fail(ordered);
    if (context->shared->cqs[local(cq)->slot].users != 0)
      return fail(emu::refuse(EBUSY, "a completion queue is destroyed that has queue pairs"));
    context->shared->cqs[local(cq)->slot].used = 0;
    context->cqs.erase(static_cast<int32_t>(local(cq)->slot));
  }
  delete local(cq);
  return 0;
}

// -- Events ---------------------------------------------------------------------------------------

EXPORT int ibv_get_async_event(ibv_context* context, ibv_async_event* event) {
  emu::EventRecord record;
  if (read(context->async_fd, &record, sizeof(record)) != sizeof(record)) return -1;
  emu::LocalContext* own = local(context);
  Lock lock(own->shared);
  event->event_type = static_cast<ibv_event_type>(record.type);
  event->element.port_num = record.port;
  const auto qp = own->qps.find(record.qp);
  const auto cq = own->cqs.find(record.cq);
  if (qp != own->qps.end()) event->element.qp = &qp->second->ex.qp_base;
  if (cq != own->cqs.end()) event->element.cq = &cq->second->cq;
  return 0;
}

EXPORT void ibv_ack_async_event(ibv_async_event*) {}

EXPORT const char* ibv_event_type_str(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR:
      return "CQ error";
    case IBV_EVENT_QP_FATAL:
      return "local work queue catastrophic error";
    case IBV_EVENT_QP_REQ_ERR:
      return "invalid request local work queue error";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "local access violation work queue error";
    case IBV_EVENT_DEVICE_FATAL:
      return "local catastrophic error";
    case IBV_EVENT_PORT_ACTIVE:
      return "port active";
    case IBV_EVENT_PORT_ERR:
      return "port error";
    case IBV_EVENT_GID_CHANGE:
      return "GID table change";
    default:
      return "another event";
  }
}

EXPORT const char* ibv_port_state_str(ibv_port_state state) {
  return state == IBV_PORT_ACTIVE ? "PORT_ACTIVE" : "PORT_DOWN";
}

EXPORT const char* ibv_wc_status_str(ibv_wc_status status) {
  switch (status) {
    case IBV_WC_SUCCESS:
      return "success";
    case IBV_WC_LOC_LEN_ERR:
      return "local length error";
    case IBV_WC_LOC_QP_OP_ERR:
      return "local QP operation error";
    case IBV_WC_LOC_PROT_ERR:
      return "local protection error";
    case IBV_WC_WR_FLUSH_ERR:
      return "Work Request Flushed Error";
    case IBV_WC_REM_INV_REQ_ERR:
      return "remote invalid request error";
    case IBV_WC_REM_ACCESS_ERR:
      return "remote access error";
    case IBV_WC_REM_OP_ERR:
      return "remote operation error";
    case IBV_WC_RETRY_EXC_ERR:
      return "transport retry counter exceeded";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "RNR retry counter exceeded";
    case IBV_WC_FATAL_ERR:
      return "fatal error";
    default:
      return "another error";
  }
}
