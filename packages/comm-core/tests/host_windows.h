// The kernels of windows as host functions: ranks are threads, device memory is host memory, a launch runs at once.
//
// A test puts this before csrc/windows.cu, whose launches it has turned into calls, and compiles both with a host
// compiler. So the entry points, the structs, the signals, the plan's arithmetic and the copies of the copy engines are
// the real ones; what is written anew is how a kernel divides its work among threads.
#include <comm_core/abi.h>
#include <comm_core/exchange.cuh>
#include <stdint.h>
#include <string.h>

typedef void* cudaStream_t;
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice = 3 };
#define COMM_CUDA(call) ((void)(call))
inline int cudaGetLastError() { return 0; }

static uint64_t host_copies_ = 0;
static const char* host_problem_ = nullptr;

inline int cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    __atomic_add_fetch(&host_copies_, 1, __ATOMIC_RELAXED);
    memcpy(to, from, bytes);
    return 0;
}

inline int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                             size_t height, cudaMemcpyKind, cudaStream_t) {
    __atomic_add_fetch(&host_copies_, 1, __ATOMIC_RELAXED);
    // What CUDA refuses.
    if (width > to_pitch || width > from_pitch) host_problem_ = "a pitched copy is wider than its pitch";
    for (size_t row = 0; row < height; ++row) {
        memcpy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    }
    return 0;
}

namespace comm {

// As copy_with: the same choice of a vector, and every access checked. Rows in reverse, since their order means nothing.
inline void copy_with_checks(const PlanEntry& entry, char* target, const char* source) {
    uint64_t bits =
        uint64_t(entry.alignment) | reinterpret_cast<uint64_t>(target) | reinterpret_cast<uint64_t>(source);
    uint32_t vector = uint32_t(bits & (~bits + 1));
    if (vector > 16) vector = 16;
    if (entry.row_bytes % vector != 0) host_problem_ = "a row is no whole number of vectors";
    for (uint32_t row = entry.rows; row-- > 0;) {
        uint64_t from, to;
        locate_row(entry, row, &from, &to);
        if (reinterpret_cast<uint64_t>(source + from) % vector || reinterpret_cast<uint64_t>(target + to) % vector) {
            host_problem_ = "a vector is not aligned";
        }
        memcpy(target + to, source + from, entry.row_bytes);
    }
}

inline void copy_to(const PlanTable* plan, uint32_t peer, char* target, const char* const* sources) {
    const PlanEntry* entries = plan_entries(plan);
    for (uint32_t i = plan->first[peer]; i < plan->first[peer + 1]; ++i) {
        copy_with_checks(entries[i], target, sources[entries[i].source]);
    }
}

inline bool wait_or_leave(const Session& session, const uint32_t* flag, uint32_t epoch, uint32_t peer,
                          uint32_t operation) {
    SignalBlock* own = session.signals[session.rank];
    Wait outcome = wait_flag(flag, epoch, &own->abort.value, now_ns() + session.timeout_ns);
    if (outcome == Wait::kReached) return true;
    if (outcome == Wait::kTimedOut) {
        give_up(session.signals, session.rank, session.world_size, peer, operation, epoch, session.record);
    } else {
        note_abort(own, operation, epoch, session.record);
    }
    return false;
}

inline bool running(const Session& session) { return load_relaxed(&session.signals[session.rank]->abort.value) == 0; }

inline uint32_t next_epoch(const Session& session) {
    return load_relaxed(&session.signals[session.rank]->epoch.value) + 1;
}

inline void announce_to_all(const ExchangeParams& p, uint32_t epoch) {
    for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
        if (peer == p.session.rank) continue;
        Announcement* ready = &p.session.signals[peer]->ready[p.session.rank];
        ready->window = p.window;
        ready->offset = p.window_offset;
        store_release(&ready->epoch, epoch);
    }
}

inline char* open_peer(const ExchangeParams& p, uint32_t peer, uint32_t epoch) {
    const Session& session = p.session;
    const Announcement* ready = &session.signals[session.rank]->ready[peer];
    if (!wait_or_leave(session, &ready->epoch, epoch, peer, p.operation)) return nullptr;
    const WindowEntry& window = session.windows[ready->window];
    if (ready->window < session.num_windows && ready->offset <= window.bytes &&
        p.plan->target_bytes <= window.bytes - ready->offset) {
        return reinterpret_cast<char*>(window.address[peer] + ready->offset);
    }
    give_up(session.signals, session.rank, session.world_size, peer, p.operation, epoch, session.record);
    store_release(&session.record->state, kStateBadAnnouncement);
    return nullptr;
}

inline void leave(const Session& session, uint32_t epoch, uint32_t operation, char* destination, uint64_t bytes) {
    SignalBlock* own = session.signals[session.rank];
    if (!running(session)) {
        note_abort(own, operation, epoch, session.record);
        if (session.poison && bytes) memset(destination, 0xff, bytes);
    }
    store_release(&own->epoch.value, epoch);
}

inline void exchange_push_kernel(const ExchangeParams& p) {
    const Session& session = p.session;
    uint32_t epoch = next_epoch(session);
    if (running(session)) announce_to_all(p, epoch);
    for (uint32_t step = 1; step <= session.world_size && running(session); ++step) {
        uint32_t peer = (session.rank + step) % session.world_size;
        bool remote = peer != session.rank;
        char* target = remote ? open_peer(p, peer, epoch) : p.destination;
        if (target == nullptr) break;
        copy_to(p.plan, peer, target, p.sources);
        if (remote) store_release(&session.signals[peer]->done[session.rank].value, epoch);
    }
    for (uint32_t peer = 0; peer < session.world_size; ++peer) {
        if (peer == session.rank) continue;
        wait_or_leave(session, &session.signals[session.rank]->done[peer].value, epoch, peer, p.operation);
    }
    leave(session, epoch, p.operation, p.destination, p.plan->target_bytes);
}

inline void exchange_open_kernel(const ExchangeParams& p) {
    if (!running(p.session)) return;
    uint32_t epoch = next_epoch(p.session);
    announce_to_all(p, epoch);
    for (uint32_t peer = 0; peer < p.session.world_size; ++peer) {
        if (peer != p.session.rank) open_peer(p, peer, epoch);
    }
}

inline void exchange_close_kernel(const ExchangeParams& p) {
    const Session& session = p.session;
    uint32_t epoch = next_epoch(session);
    if (running(session)) {
        for (uint32_t peer = 0; peer < session.world_size; ++peer) {
            if (peer != session.rank) store_release(&session.signals[peer]->done[session.rank].value, epoch);
        }
        for (uint32_t peer = 0; peer < session.world_size; ++peer) {
            if (peer == session.rank) continue;
            wait_or_leave(session, &session.signals[session.rank]->done[peer].value, epoch, peer, p.operation);
        }
    }
    leave(session, epoch, p.operation, p.destination, p.plan->target_bytes);
}

inline void barrier_kernel(const Session& session, uint32_t operation) {
    uint32_t epoch = next_epoch(session);
    if (running(session)) {
        for (uint32_t peer = 0; peer < session.world_size; ++peer) {
            if (peer != session.rank) store_release(&session.signals[peer]->arrived[session.rank].value, epoch);
        }
        for (uint32_t peer = 0; peer < session.world_size; ++peer) {
            if (peer == session.rank) continue;
            wait_or_leave(session, &session.signals[session.rank]->arrived[peer].value, epoch, peer, operation);
        }
    }
    leave(session, epoch, operation, nullptr, 0);
}

}  // namespace comm

// What tests call directly.

COMM_EXPORT void host_execute(const comm::PlanTable* table, uint32_t peer, char* target, const char* const* sources) {
    comm::copy_to(table, peer, target, sources);
}

COMM_EXPORT void host_locate_row(const comm::PlanTable* table, uint32_t entry, uint32_t row, uint64_t* found) {
    comm::locate_row(comm::plan_entries(table)[entry], row, &found[0], &found[1]);
}

COMM_EXPORT const char* host_problem(void) {
    const char* problem = host_problem_;
    host_problem_ = nullptr;
    return problem;
}

COMM_EXPORT uint64_t host_copies(void) { return __atomic_load_n(&host_copies_, __ATOMIC_RELAXED); }
