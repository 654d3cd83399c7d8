"""Device memory that every rank of one host can write: allocate, export and map it jointly, and free it jointly.

CUDA's legacy IPC has three rules that it does not check, and this module keeps them:

- Memory must not be freed while another process has it mapped. So ranks unmap, agree that all have, and only then
  free; what can't be agreed stays allocated until the process ends.
- A handle stands for a whole allocation. So an address travels as (handle, offset), and allocations are whole 2 MiB
  granules: the driver packs smaller ones together, and peers would be given their neighbours as well.
- A handle that can't be opened is found out by the importer alone. So every stage ends in an outcome that the group
  agrees on: all ranks get their pointers, or all raise the same error and everything is taken down again.

Nothing is released by a finalizer or at exit, because releasing takes the other ranks.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from comm_core._json import Json, JsonObject
from comm_core.consensus import Teardown, Transaction, joint
from comm_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    GroupTimeoutError,
    JointError,
    JointValueError,
    UnsupportedError,
)
from comm_core.group import Group, as_group
from comm_core.memory.cudart import CudaRTLibrary

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["create_shared_buffer", "free_shared_buffer"]

_GRANULE = 2 << 20
"""What the driver suballocates from; an allocation of whole granules has no neighbour in its own."""


class _Memory:
    """This rank's allocation and its mappings of the others', all used with one device current."""

    def __init__(self, device: int, cuda: CudaRTLibrary) -> None:
        self.device = device
        self.own = 0
        self._cuda = cuda
        self._mapped: dict[int, int] = {}

    def allocate(self, nbytes: int) -> None:
        with self._cuda.device(self.device):
            self.own = self._cuda.cudaMalloc(nbytes).value or 0

    def free(self) -> None:
        with self._cuda.device(self.device):
            self._cuda.cudaFree(self.own)

    def export(self) -> JsonObject:
        with self._cuda.device(self.device):
            try:
                base, _ = self._cuda.memory_range(self.own)
            except UnsupportedError:
                base = self.own  # A runtime too old to be asked; what cudaMalloc returned is a base.
            return {"handle": bytes(self._cuda.cudaIpcGetMemHandle(base)).hex(), "offset": self.own - base}

    def map(self, exports: Sequence[JsonObject], rank: int) -> list[int]:
        """Map every other rank's export; return the addresses of all ranks' memory, in rank order."""
        pointers: list[int] = []
        with self._cuda.device(self.device):
            for peer, export in enumerate(exports):
                if peer == rank:
                    pointers.append(self.own)
                    continue
                try:
                    mapping = self._cuda.cudaIpcOpenMemHandle(bytes.fromhex(str(export["handle"])))
                except CommError as error:
                    raise CommError(
                        f"the memory of rank {peer} can't be mapped on cuda:{self.device}: {error}"
                    ) from error
                self._mapped[peer] = mapping.value or 0
                pointers.append(self._mapped[peer] + cast("int", export["offset"]))
        return pointers

    def unmap(self) -> None:
        """Unmap what is mapped. What fails stays on the list, so that it can be tried again."""
        failed: list[str] = []
        with self._cuda.device(self.device):
            for peer, mapping in list(self._mapped.items()):
                try:
                    self._cuda.cudaIpcCloseMemHandle(mapping)
                except CommError as error:
                    failed.append(f"the memory of rank {peer} can't be unmapped: {error}")
                else:
                    del self._mapped[peer]
        if failed:
            raise CommError("; ".join(failed))

    def settle(self) -> None:
        """Wait until this rank's device uses no buffer any more."""
        with self._cuda.device(self.device):
            self._cuda.cudaDeviceSynchronize()


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
        JointError: a stage failed on some rank, or the ranks can't share memory (other hosts, other IPC namespaces,
            one process). On every rank; nothing stays allocated or mapped.
        GroupTimeoutError: a rank did not come. Memory that it may have mapped stays allocated.
    """
    ranks = _ranks(group)
    what = "create_shared_buffer"
    sizes = joint(ranks, f"{what}: size_in_bytes", lambda: _size(size_in_bytes), error=JointValueError)
    if len(set(cast("list[int]", sizes))) > 1:
        per_rank = {rank: f"size_in_bytes={size}" for rank, size in enumerate(sizes)}
        raise JointValueError(f"{what}: the ranks asked for different sizes", per_rank)

    found: list[_Memory] = []

    def look() -> JsonObject:
        cuda = CudaRTLibrary()
        found.append(_Memory(cuda.cudaGetDevice(), cuda))
        return {**_host(), "device": found[0].device, "label": uuid.uuid4().hex}

    facts = cast("list[dict[str, Any]]", joint(ranks, f"{what}: CUDA runtime and host", look))
    _require_one_host(what, facts)
    memory = found[0]
    nbytes = -(-size_in_bytes // _GRANULE) * _GRANULE
    with Transaction(ranks, what) as stages:
        stages.step("allocate", lambda: memory.allocate(nbytes), lambda _: memory.free(), shared_bytes=nbytes)
        # The export's undo is to unmap, because mapping may fail half-way and leave something to unmap.
        _, exports = stages.step_shared("export", memory.export, _same, lambda _: memory.unmap())
        shared = cast("list[JsonObject]", exports)
        pointers = stages.step("map", lambda: memory.map(shared, ranks.rank))
        stages.step("wait for the device", lambda: None, lambda _: memory.settle())
        teardown = stages.commit()
    with _lock:
        _buffers[tuple(pointers)] = _Buffer(facts[0]["label"], ranks.rank, ranks.size, memory.device, teardown)
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


def _same(export: JsonObject) -> Json:
    return export


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


def _host() -> dict[str, Json]:
    """Return what decides whether two processes can share memory; an empty string is unknown."""

    def link(name: str) -> str:
        try:
            return str(Path(f"/proc/self/ns/{name}").readlink())
        except OSError:
            return ""

    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot_id = ""
    return {
        "host": socket.gethostname(),
        "boot_id": boot_id,
        "ipc_namespace": link("ipc"),
        "pid_namespace": link("pid"),
        "pid": os.getpid(),
    }


def _require_one_host(what: str, facts: Sequence[dict[str, Any]]) -> None:
    """Raise, on every rank alike, where CUDA IPC can't work; what is unknown is left to the attempt."""
    for fact, name, hint in (
        ("boot_id", "different hosts", "CUDA IPC works inside one host"),
        ("ipc_namespace", "different IPC namespaces", "Start the containers with a shared one (docker: --ipc=host)"),
    ):
        if len({str(rank[fact]) for rank in facts if rank[fact]}) > 1:
            per_rank = {
                rank: f"cuda:{own['device']} on host {own['host']!r}, {fact} {own[fact] or 'unknown'}"
                for rank, own in enumerate(facts)
            }
            raise JointError(f"{what}: the ranks are on {name}", per_rank, hint=hint)
    seen: dict[tuple[object, ...], int] = {}
    for rank, own in enumerate(facts):
        first = seen.setdefault((own["boot_id"], own["pid_namespace"], own["pid"]), rank)
        if first != rank:
            raise JointError(
                f"{what}: CUDA can't map memory into the process that exported it",
                {peer: f"process {own['pid']} of host {own['host']!r}" for peer in (first, rank)},
                hint="Ranks must be processes of their own",
            )
