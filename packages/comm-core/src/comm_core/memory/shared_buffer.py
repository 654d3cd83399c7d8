"""Device memory that every rank of one host can write, as a list of addresses: made jointly and freed jointly.

The memory is shared by legacy CUDA IPC, whatever other forms there are: what this returns may be handed to code that
exports it again. `comm_core.memory.peer` does the work; all ranks get their pointers, or all raise the same error and
everything is taken down again.

Nothing is released by a finalizer or at exit, because releasing takes the other ranks.
"""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from comm_core._json import JsonObject
from comm_core.consensus import Teardown, Transaction, joint
from comm_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    GroupTimeoutError,
    JointValueError,
)
from comm_core.group import Group, as_group
from comm_core.memory.cudart import CudaRTLibrary
from comm_core.memory.peer import map_jointly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["create_shared_buffer", "free_shared_buffer"]


@dataclass(frozen=True)
class _Buffer:
    """What `create_shared_buffer` returned a list for, until it is freed. `label` is the same on all ranks."""

    label: str
    rank: int
    size: int
    device: int
    teardown: Teardown


_buffers: dict[tuple[int, ...], _Buffer] = {}
_lock = threading.Lock()


def create_shared_buffer(size_in_bytes: int, group: ProcessGroup | Group | None = None) -> list[int]:
    """Allocate memory on every rank's current device and map it on all ranks. Collective.

    The content is undefined. Free it with `free_shared_buffer`, on all ranks, before the process group is destroyed:
    a process that ends without doing so takes the memory from under the others.

    Args:
        size_in_bytes: bytes of each rank's memory, equal on all ranks; at least 1. What is allocated is a multiple of
            2 MiB.
        group: the ranks, all of them processes of one host; None is WORLD.

    Returns:
        One address a rank, in group rank order, valid in this process for its current device; this rank's own at the
        position of its rank.

    Raises:
        JointValueError: a size that is no positive integer, or sizes that differ between the ranks.
        JointError: a stage failed on some rank, or the ranks can't share memory (other hosts, other PID namespaces,
            one process). On every rank; nothing stays allocated or mapped.
        GroupTimeoutError: a rank did not come. Memory that it may have mapped stays allocated.
    """
    import torch

    ranks = _ranks(group)
    what = "create_shared_buffer"
    sizes = joint(ranks, f"{what}: size_in_bytes", lambda: _size(size_in_bytes), error=JointValueError)
    if len(set(cast("list[int]", sizes))) > 1:
        per_rank = {rank: f"size_in_bytes={size}" for rank, size in enumerate(sizes)}
        raise JointValueError(f"{what}: the ranks asked for different sizes", per_rank)

    def look() -> JsonObject:
        return {"device": CudaRTLibrary().cudaGetDevice(), "label": uuid.uuid4().hex}

    found = cast("list[dict[str, Any]]", joint(ranks, f"{what}: CUDA runtime", look))
    device = int(found[ranks.rank]["device"])
    with Transaction(ranks, what) as stages:
        mapped = map_jointly(stages, size_in_bytes, torch.device("cuda", device), form="cuda_ipc", what="the buffer")
        teardown = stages.commit()
    pointers = list(mapped.addresses)
    with _lock:
        _buffers[tuple(pointers)] = _Buffer(found[0]["label"], ranks.rank, ranks.size, device, teardown)
    return pointers


def free_shared_buffer(pointers: list[int], group: ProcessGroup | Group | None = None) -> None:
    """Free what `create_shared_buffer` returned. Collective: all ranks free the same buffer.

    Waits for the devices, unmaps on all ranks, and frees only when all ranks have unmapped.

    Args:
        pointers: the list as it was returned on this rank.
        group: the ranks that created it.

    Raises:
        JointValueError: on some rank it is no live buffer of this group (foreign, freed before), or the ranks passed
            different buffers. On every rank; nothing is freed.
        JointError: something can't be released on some rank. On every rank; call again to retry.
        GroupTimeoutError: a rank did not come, or went away half-way. In the second case this rank's memory stays
            allocated until the process ends, and the text says how many bytes; the list is then no buffer any more.
    """
    ranks = _ranks(group)
    what = "free_shared_buffer"
    labels = joint(ranks, f"{what}: pointers", lambda: _find(pointers, ranks).label, error=JointValueError)
    if len(set(cast("list[str]", labels))) > 1:
        per_rank = {rank: f"buffer {str(label)[:8]}" for rank, label in enumerate(labels)}
        raise JointValueError(f"{what}: the ranks passed different buffers", per_rank)
    buffer = _find(pointers, ranks)
    try:
        buffer.teardown.close()
    except GroupTimeoutError:
        _forget(pointers)
        raise
    # After a joint failure the buffer stays known on every rank, also where everything is released already: a retry
    # takes all of them.
    _forget(pointers)


def _ranks(group: ProcessGroup | Group | None) -> Group:
    try:
        return as_group(group)
    except CommError:
        raise
    except ValueError as error:
        # torch forgets a group that is destroyed, and then says that it was never created.
        raise ArgumentValueError(f"the process group can't be used any more; was it destroyed? ({error})") from error


def _forget(pointers: list[int]) -> None:
    with _lock:
        del _buffers[tuple(pointers)]


def _size(size_in_bytes: object) -> int:
    if not isinstance(size_in_bytes, int) or isinstance(size_in_bytes, bool):
        raise ArgumentTypeError(
            f"size_in_bytes must be an int, got {size_in_bytes!r} ({type(size_in_bytes).__name__})"
        )
    if size_in_bytes < 1:
        raise ArgumentValueError(f"size_in_bytes must be at least 1, got {size_in_bytes}")
    return size_in_bytes


def _find(pointers: object, ranks: Group) -> _Buffer:
    """Return the live buffer that `pointers` is the list of.

    Raises:
        ArgumentValueError: it is none of this group.
    """
    if not isinstance(pointers, list | tuple):
        raise ArgumentTypeError(f"pointers must be the list from create_shared_buffer, got {type(pointers).__name__}")
    key = tuple(cast("list[object]", pointers))
    text = "[" + ", ".join(f"{item:#x}" if isinstance(item, int) else repr(item) for item in key) + "]"
    with _lock:
        buffer = _buffers.get(cast("tuple[int, ...]", key))
        others = [known for known in _buffers if set(known) & set(key)]
    if buffer is None and others:
        raise ArgumentValueError(
            f"{text} is not the whole list from create_shared_buffer in its order, [{', '.join(map(hex, others[0]))}]"
        )
    if buffer is None:
        raise ArgumentValueError(f"{text} is no shared buffer of this process: freed before, or not from here")
    if (buffer.rank, buffer.size) != (ranks.rank, ranks.size):
        raise ArgumentValueError(
            f"the buffer was created by rank {buffer.rank} of {buffer.size} (on cuda:{buffer.device}), and this is "
            f"rank {ranks.rank} of {ranks.size}: pass the group that it was created with"
        )
    return buffer
