// The module of the memory pool: an arena that torch allocates in. Python side:
// comm_nvlink/pool.py.
#include <comm_core/abi.h>
#include <comm_nvlink/arena.h>

#include <new>

using comm::nvlink::Arena;

struct comm_nvlink_arena_open_args_v1 {
  COMM_ARGS;
  uint64_t base;
  uint64_t bytes;
  void** arena;     // written
  void** allocate;  // written: the functions that torch calls
  void** release;
};

struct comm_nvlink_arena_close_args_v1 {
  COMM_ARGS;
  Arena* arena;
};

struct comm_nvlink_arena_enter_args_v1 {
  COMM_ARGS;
  Arena* arena;      // null for none
  Arena** previous;  // written: what this thread was in before
};

struct comm_nvlink_arena_look_args_v1 {
  COMM_ARGS;
  Arena* arena;
  uint64_t* used;     // written
  uint64_t* refused;  // written
};

COMM_EXPORT int comm_nvlink_arena_open_v1(const comm_nvlink_arena_open_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_arena_open_args_v1);
  COMM_REQUIRE(args->base % Arena::kGranule == 0, "an arena begins at a multiple of %llu",
               static_cast<unsigned long long>(Arena::kGranule));
  Arena* arena = new (std::nothrow) Arena(args->base, args->bytes);
  COMM_REQUIRE(arena != nullptr, "no memory for an arena's lists");
  comm::nvlink::open_arena(arena);
  *args->arena = arena;
  *args->allocate = reinterpret_cast<void*>(&comm::nvlink::arena_allocate);
  *args->release = reinterpret_cast<void*>(&comm::nvlink::arena_free);
  return COMM_OK;
}

COMM_EXPORT int comm_nvlink_arena_close_v1(const comm_nvlink_arena_close_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_arena_close_args_v1);
  if (comm::nvlink::close_arena(args->arena)) delete args->arena;  // else it was closed before
  return COMM_OK;
}

COMM_EXPORT int comm_nvlink_arena_enter_v1(const comm_nvlink_arena_enter_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_arena_enter_args_v1);
  *args->previous = comm::nvlink::current_arena();
  comm::nvlink::current_arena() = args->arena;
  return COMM_OK;
}

COMM_EXPORT int comm_nvlink_arena_look_v1(const comm_nvlink_arena_look_args_v1* args) {
  COMM_CHECK_ARGS(args, comm_nvlink_arena_look_args_v1);
  COMM_REQUIRE(args->arena != nullptr, "the memory pool is closed");
  args->arena->look(args->used, args->refused);
  return COMM_OK;
}

COMM_MODULE_BEGIN
COMM_STRUCT(comm_nvlink_arena_open_args_v1)
COMM_STRUCT(comm_nvlink_arena_close_args_v1)
COMM_STRUCT(comm_nvlink_arena_enter_args_v1)
COMM_STRUCT(comm_nvlink_arena_look_args_v1)
COMM_MODULE_KERNELS
COMM_MODULE_END(comm_nvlink_pool)
