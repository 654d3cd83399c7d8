"""The memory pool: torch allocates tensors in a window of the session, which the peers write in place."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from comm_core.jit.spec import ModuleSpec

if TYPE_CHECKING:
    import torch

    from comm_core.jit import Module

__all__ = ["POOL", "MemoryPool"]

POOL = ModuleSpec(
    name="comm_nvlink_pool",
    package="comm_nvlink",
    sources=("csrc/pool.cpp",),
    structs={
        "comm_nvlink_arena_open_args_v1": "II2Q3P0Q",
        "comm_nvlink_arena_close_args_v1": "IIP0Q",
        "comm_nvlink_arena_enter_args_v1": "II2P0Q",
        "comm_nvlink_arena_look_args_v1": "II3P0Q",
    },
    entry_points={
        "comm_nvlink_arena_open_v1": "comm_nvlink_arena_open_args_v1",
        "comm_nvlink_arena_close_v1": "comm_nvlink_arena_close_args_v1",
        "comm_nvlink_arena_enter_v1": "comm_nvlink_arena_enter_args_v1",
        "comm_nvlink_arena_look_v1": "comm_nvlink_arena_look_args_v1",
    },
)
"""Twin: csrc/pool.cpp."""


@cache
def _torch_allocator(allocate: int, release: int) -> Any:
    """Return torch's allocator over two C functions; torch's own class takes only the path of a library.

    One for all pools, and kept: torch's allocator has its bare address wherever a tensor of a pool is left, which may
    be freed after the pool and the session are gone.
    """
    import torch

    return torch._C._cuda_customAllocator(allocate, release)  # pyright: ignore


class Arena:
    """The C side of a pool: a range of memory, and which thread allocates in it. Local."""

    def __init__(self, module: Module, base: int, nbytes: int) -> None:
        self._enter = module.bind("comm_nvlink_arena_enter_v1")
        self._look = module.bind("comm_nvlink_arena_look_v1")
        self._close = module.bind("comm_nvlink_arena_close_v1")
        self.nbytes = nbytes
        arena, allocate, release = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        places = (ctypes.addressof(place) for place in (arena, allocate, release))
        module.bind("comm_nvlink_arena_open_v1")(base, nbytes, *places)
        self._handle = arena.value or 0
        self.functions = (allocate.value or 0, release.value or 0)

    @contextmanager
    def entered(self) -> Generator[None]:
        """Let torch's allocations of this thread come from here, where torch asks the pool at all."""
        previous = ctypes.c_void_p()
        self._enter(self._handle, ctypes.addressof(previous))
        try:
            yield
        finally:
            unused = ctypes.c_void_p()
            self._enter(previous.value or 0, ctypes.addressof(unused))

    def look(self) -> tuple[int, int]:
        """Return the bytes in use, and the size of a request that did not fit since the last look, or 0."""
        used, refused = ctypes.c_uint64(), ctypes.c_uint64()
        self._look(self._handle, ctypes.addressof(used), ctypes.addressof(refused))
        return used.value, refused.value

    def close(self) -> None:
        """Forget the arena; what torch frees later is ignored. May be called again."""
        if self._handle:
            self._close(self._handle)
            self._handle = 0


class MemoryPool:
    """torch's pool over an arena. Its memory belongs to the session and lasts until the session's end."""

    def __init__(self, module: Module, base: int, nbytes: int) -> None:
        import torch

        self.arena = Arena(module, base, nbytes)
        try:
            self._pool: Any = torch.cuda.MemPool(_torch_allocator(*self.arena.functions))
        except BaseException:
            self.arena.close()
            raise

    @contextmanager
    def allocating(self, device: torch.device) -> Generator[None]:
        """Let this thread's allocations on `device` come from the pool.

        Raises:
            torch.OutOfMemoryError: the arena is exhausted; the text says which argument to raise.
        """
        import torch

        self.arena.look()
        try:
            with self.arena.entered(), torch.cuda.use_mem_pool(self._pool, device):
                yield
        except torch.OutOfMemoryError as error:
            used, refused = self.arena.look()
            if not refused:
                raise
            raise torch.OutOfMemoryError(
                f"the memory pool of {self.arena.nbytes} bytes is exhausted: {used} are in use and {refused} more "
                "were asked for in one piece. Raise pool_bytes of the communicator, or free tensors of the pool"
            ) from error

    def close(self) -> None:
        """Give torch's segments up. May be called again."""
        self._pool = None
        self.arena.close()
