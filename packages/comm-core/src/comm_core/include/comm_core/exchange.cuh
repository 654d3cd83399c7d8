// The exchange between windows: every rank announces where it wants its data, and stores the peers' data there.
//
// One kernel, whose blocks are divided among the destinations (`blocks_per_peer` each, this rank's own share among
// them):
//
// 1. Block 0 announces this rank's destination (a window and an offset in it) to every peer. Stream order has made
//    sure that nothing reads or writes that memory any more, so the announcement is also the permission to write.
// 2. The blocks of a peer wait for its announcement and store what the plan says into its window.
// 3. The last of them to finish releases `done` at the peer: everything that this rank sends it is there.
// 4. Block 0 waits for `done` of every peer, so that what follows in the stream finds the data.
// 5. The last block to leave advances the epoch.
//
// A rank that gives up or is told of an abort stores no more, fills its destination with NaN bytes, and leaves. The
// memory of a rank that left can still be written by one that looked at its abort word a moment before; it is
// therefore never unmapped without the group's consent (comm_core.consensus.Teardown).
//
// Everything that a launch depends on is equal on all ranks: the plan's geometry, `blocks_per_peer`, the deadline.
// Where the destination lies is not, and travels in the announcement.
#pragma once

#include <stdint.h>

#include <comm_core/plan.cuh>
#include <comm_core/signal.cuh>

namespace comm {

constexpr uint32_t kExchangeThreads = 512;

// A window as this rank maps it, on all ranks.
struct WindowEntry {
    uint64_t bytes;
    uint64_t address[kMaxRanks];
    uint64_t unused;
};

static_assert(sizeof(WindowEntry) == 144, "mirrored by comm_core.windows.window");

// What every signalling kernel gets.
struct Session {
    uint32_t rank;
    uint32_t world_size;
    uint32_t num_windows;
    uint32_t poison;                  // fill the destination of an aborted operation with NaN bytes
    SignalBlock* signals[kMaxRanks];  // every rank's block as this rank maps it
    const WindowEntry* windows;       // device memory
    StallRecord* record;              // pinned host memory
    uint64_t timeout_ns;
};

static_assert(sizeof(Session) == 168, "mirrored by comm_core.windows.launch");

// The record's state when a peer announced memory that does not exist: the ranks run different programs.
constexpr uint32_t kStateBadAnnouncement = 3;

struct ExchangeParams {
    Session session;
    const PlanTable* plan;
    const char* sources[kMaxSources];
    char* destination;          // this rank's own
    uint64_t window_offset;     // where the destination lies
    uint32_t window;
    uint32_t blocks_per_peer;
    uint32_t operation;
    uint32_t unused;
};

#if defined(__CUDACC__)

// Announce this rank's destination to peer `peer`.
__device__ __forceinline__ void announce(const Session& session, uint32_t peer, uint32_t epoch, uint32_t window,
                                         uint64_t offset) {
    Announcement* ready = &session.signals[peer]->ready[session.rank];
    ready->window = window;
    ready->offset = offset;
    store_release(&ready->epoch, epoch);
}

// Wait for a flag; on failure leave the records that the protocol owes. One thread.
__device__ __forceinline__ bool wait_or_leave(const Session& session, const uint32_t* flag, uint32_t epoch,
                                              uint32_t peer, uint32_t operation) {
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

// Where peer `peer` wants its data, once it has said so; null where it never does. One thread.
__device__ __forceinline__ char* open_peer(const Session& session, uint32_t peer, uint32_t epoch, uint64_t bytes,
                                           uint32_t operation) {
    SignalBlock* own = session.signals[session.rank];
    const Announcement* ready = &own->ready[peer];
    if (!wait_or_leave(session, &ready->epoch, epoch, peer, operation)) return nullptr;
    uint32_t window = ready->window;
    uint64_t offset = ready->offset;
    if (window < session.num_windows && offset <= session.windows[window].bytes &&
        bytes <= session.windows[window].bytes - offset) {
        return reinterpret_cast<char*>(session.windows[window].address[peer] + offset);
    }
    give_up(session.signals, session.rank, session.world_size, peer, operation, epoch, session.record);
    store_release(&session.record->state, kStateBadAnnouncement);
    return nullptr;
}

// Fill a destination with bytes that are NaN in every floating type. All threads of one block.
__device__ __forceinline__ void poison(char* destination, uint64_t bytes) {
    for (uint64_t at = threadIdx.x; at < bytes; at += blockDim.x) destination[at] = char(0xff);
}

// The end of a kernel, in every block: the last one settles the operation.
__device__ __forceinline__ void leave(const Session& session, uint32_t epoch, uint32_t operation, char* destination,
                                      uint64_t bytes) {
    __shared__ bool last;
    SignalBlock* own = session.signals[session.rank];
    __syncthreads();
    if (threadIdx.x == 0) {
        last = add_acq_rel(&own->exits.value, 1) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last) return;
    if (load_relaxed(&own->abort.value) != 0) {
        if (threadIdx.x == 0) note_abort(own, operation, epoch, session.record);
        if (session.poison) poison(destination, bytes);
    }
    if (threadIdx.x == 0) {
        own->exits.value = 0;
        store_release(&own->epoch.value, epoch);
    }
}

__global__ void __launch_bounds__(kExchangeThreads) exchange_push_kernel(const __grid_constant__ ExchangeParams p) {
    const Session& session = p.session;
    SignalBlock* own = session.signals[session.rank];
    uint32_t block = blockIdx.x % p.blocks_per_peer;
    // This rank's own share comes last, and the peers in a different order on every rank, so that no two start on one.
    uint32_t peer = (session.rank + 1 + blockIdx.x / p.blocks_per_peer) % session.world_size;
    bool remote = peer != session.rank;
    uint32_t epoch = load_relaxed(&own->epoch.value) + 1;
    bool running = load_relaxed(&own->abort.value) == 0;

    __shared__ char* target;
    if (running) {
        if (blockIdx.x == 0 && threadIdx.x < session.world_size && threadIdx.x != session.rank) {
            announce(session, threadIdx.x, epoch, p.window, p.window_offset);
        }
        if (threadIdx.x == 0) {
            target = remote ? open_peer(session, peer, epoch, p.plan->target_bytes, p.operation) : p.destination;
        }
    } else if (threadIdx.x == 0) {
        target = nullptr;
    }
    __syncthreads();

    bool complete = target != nullptr;
    if (complete) {
        const PlanEntry* entries = plan_entries(p.plan);
        uint32_t thread = block * blockDim.x + threadIdx.x;
        uint32_t threads = p.blocks_per_peer * blockDim.x;
        for (uint32_t i = p.plan->first[peer]; complete && i < p.plan->first[peer + 1]; ++i) {
            const PlanEntry entry = entries[i];
            complete = copy_with(entry, target, p.sources[entry.source], thread, threads, &own->abort.value);
        }
    }
    complete = __syncthreads_and(complete);

    if (threadIdx.x == 0 && remote) {
        bool all_here = add_acq_rel(&own->sent[peer].value, 1) == p.blocks_per_peer - 1;
        if (all_here) {
            own->sent[peer].value = 0;
            // A block that gave up has set the abort word before it added to the counter.
            if (complete && load_acquire(&own->abort.value) == 0) {
                store_release(&session.signals[peer]->done[session.rank].value, epoch);
            }
        }
    }
    if (blockIdx.x == 0 && threadIdx.x < session.world_size && threadIdx.x != session.rank) {
        wait_or_leave(session, &own->done[threadIdx.x].value, epoch, threadIdx.x, p.operation);
    }
    leave(session, epoch, p.operation, p.destination, p.plan->target_bytes);
}

// The two ends of an exchange whose bytes are moved by the copy engines between them. One warp each.
//
// The copies are enqueued before anybody knows what the peers will announce, so here the place is agreed beforehand
// (the same window and offset on all ranks) and the announcement is only the permission.
__global__ void __launch_bounds__(32) exchange_open_kernel(const __grid_constant__ ExchangeParams p) {
    const Session& session = p.session;
    SignalBlock* own = session.signals[session.rank];
    uint32_t epoch = load_relaxed(&own->epoch.value) + 1;
    uint32_t peer = threadIdx.x;
    if (peer >= session.world_size || peer == session.rank || load_relaxed(&own->abort.value) != 0) return;
    announce(session, peer, epoch, p.window, p.window_offset);
    open_peer(session, peer, epoch, p.plan->target_bytes, p.operation);
}

__global__ void __launch_bounds__(32) exchange_close_kernel(const __grid_constant__ ExchangeParams p) {
    const Session& session = p.session;
    SignalBlock* own = session.signals[session.rank];
    uint32_t epoch = load_relaxed(&own->epoch.value) + 1;
    uint32_t peer = threadIdx.x;
    bool running = load_relaxed(&own->abort.value) == 0;
    if (running && peer < session.world_size && peer != session.rank) {
        store_release(&session.signals[peer]->done[session.rank].value, epoch);
        wait_or_leave(session, &own->done[peer].value, epoch, peer, p.operation);
    }
    leave(session, epoch, p.operation, p.destination, p.plan->target_bytes);
}

// A barrier of the group. One warp.
__global__ void __launch_bounds__(32) barrier_kernel(const __grid_constant__ Session session, uint32_t operation) {
    SignalBlock* own = session.signals[session.rank];
    uint32_t epoch = load_relaxed(&own->epoch.value) + 1;
    uint32_t peer = threadIdx.x;
    bool running = load_relaxed(&own->abort.value) == 0;
    if (running && peer < session.world_size && peer != session.rank) {
        store_release(&session.signals[peer]->arrived[session.rank].value, epoch);
        wait_or_leave(session, &own->arrived[peer].value, epoch, peer, operation);
    }
    leave(session, epoch, operation, nullptr, 0);
}

#endif

}  // namespace comm
