"""The one module that touches torch.distributed: typed, small, and replaceable in tests.

torch's annotations are partial here, so strict type checking stops at this file's signatures.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false, reportUnknownVariableType=false
# pyright: reportPrivateImportUsage=false, reportDeprecated=false

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from comm_core.errors import ArgumentValueError, TransportError
from comm_core.group import Store, StoreGroup, _Channel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DistGroup", "TorchStore", "Work", "all_gather_bytes", "all_to_all_bytes", "barrier", "resolve_group"]


@contextlib.contextmanager
def _store_errors() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            f"the key-value store of the process group can't be reached ({error}). One process serves it: rank 0 of "
            "the job, or torchrun. Is that process alive?"
        ) from error


class TorchStore(Store):
    """A torch key-value store (TCPStore, FileStore, HashStore or a prefix of one) as a `Store`."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """See `Store.set`."""
        with _store_errors():
            self._store.set(key, value)

    def get(self, key: str) -> str:
        """See `Store.get`."""
        with _store_errors():
            return self._store.get(key).decode()

    def check(self, key: str) -> bool:
        """See `Store.check`."""
        with _store_errors():
            return bool(self._store.check([key]))

    def settle(self, key: str, value: str) -> str:
        """See `Store.settle`. An empty expected value means "does not exist" to every torch store."""
        with _store_errors():
            return cast("bytes", cast("Any", self._store).compare_set(key, "", value)).decode()

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        try:
            self._store.delete_key(key)
        except RuntimeError:
            # A store without deletion keeps a few hundred bytes a gather until the job ends.
            return


_channels: WeakKeyDictionary[Any, _Channel] = WeakKeyDictionary()


def resolve_group(group: object) -> ProcessGroup | None:
    """Return the process group that `group` means (None is WORLD), or None where it is no process group.

    Raises:
        ArgumentValueError: this process is not a member, or torch.distributed is not initialized.
    """
    if group is None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentValueError(
                "group=None means torch.distributed's WORLD group, and torch.distributed is not initialized: call "
                "torch.distributed.init_process_group first, or pass a group"
            )
        group = dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, int) and not isinstance(group, bool)):
        raise ArgumentValueError("this process is not a member of the group that was passed")
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        rank = dist.get_rank(group)
    except ValueError as error:
        # torch forgets a group that is destroyed, and then says that it was never created.
        raise ArgumentValueError(f"the process group can't be used any more; was it destroyed? ({error})") from error
    if rank < 0:
        raise ArgumentValueError("this process is not a member of the group that was passed")
    return group


class DistGroup(StoreGroup):
    """A torch process group as a `Group`.

    It does not keep the process group alive: one that outlives ``destroy_process_group`` takes gloo's threads into
    the end of the interpreter, which then aborts (SIGABRT, "terminate called without an active exception").
    """

    def __init__(self, process_group: ProcessGroup, *, timeout_s: float | None = None) -> None:
        channel = _channels.get(process_group)
        if channel is None:
            channel = _channels[process_group] = _Channel(TorchStore(c10d._get_process_group_store(process_group)))
        super().__init__(
            channel,
            dist.get_rank(process_group),
            dist.get_world_size(process_group),
            name=str(process_group.group_name),
            timeout_s=timeout_s,
        )
        self._process_group = ref(process_group)

    @property
    def process_group(self) -> ProcessGroup | None:
        """See `Group.process_group`; None after the process group was destroyed."""
        return self._process_group()

    @property
    def backends(self) -> dict[str, str]:
        """See `Group.backends`."""
        process_group = self._process_group()
        if process_group is None:
            return {}
        config = dist.get_backend_config(process_group)
        pairs = (item.partition(":") for item in config.split(","))
        return {device: backend for device, _, backend in pairs if backend}


class Work(Protocol):
    """What is left to wait for."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait on the host (gloo) or order the current stream (NCCL); raises RuntimeError at the deadline."""
        ...


def all_to_all_bytes(
    output: torch.Tensor,
    input_: torch.Tensor,
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    group: ProcessGroup,
) -> Work:
    """Exchange flat contiguous uint8 tensors: peer p gets slice p of `input_`; None is equal slices. Collective."""
    work = dist.all_to_all_single(
        output,
        input_,
        None if output_splits is None else list(output_splits),
        None if input_splits is None else list(input_splits),
        group=group,
        async_op=True,
    )
    return cast("Work", work)


def all_gather_bytes(output: torch.Tensor, input_: torch.Tensor, group: ProcessGroup) -> Work:
    """Concatenate the ranks' flat contiguous uint8 tensors of equal length in rank order. Collective."""
    # torch 2.13 renamed it and warns about the old name, which is the only one that 2.11 has.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast("Work", gather(output, input_, group=group, async_op=True))


def barrier(group: ProcessGroup, device: torch.device) -> Work:
    """Order the ranks. Collective."""
    ids = [device.index] if device.type == "cuda" and dist.get_backend(group) == "nccl" else None
    return cast("Work", dist.barrier(group=group, async_op=True, device_ids=ids))
