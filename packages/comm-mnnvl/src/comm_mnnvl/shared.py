"""Memory of all ranks at equal distances, mapped on every rank, which can be taken away and brought back."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from comm_core import _cuda
from comm_core._json import Json, JsonObject
from comm_core.comm_backend import CommBackend, group_of
from comm_core.consensus import Transaction, joint
from comm_core.errors import ArgumentTypeError, ArgumentValueError, JointValueError, UnsupportedError
from comm_core.group import DetachedGroup, Group
from comm_core.memory.detach import Lifecycle, attach_jointly, check_detachable, detach_jointly
from comm_core.memory.peer import Mapped, map_jointly
from comm_core.memory.strided import pack_strided_memory
from comm_mnnvl.backends import default_backend
from comm_mnnvl.handles import agree_form
from comm_mnnvl.multicast import Multicast, open_multicast

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SharedMemory", "positive", "tensor_device"]

_T = TypeVar("_T")
_log = logging.getLogger("comm_core")


def tensor_device(ordinal: int) -> torch.device:
    """Return where tensors over the memory of a CUDA device are: the seam of tests without one."""
    return torch.device("cuda", ordinal)


def positive(name: str, value: object, least: int = 1) -> int:
    """Return an integer argument.

    Raises:
        ArgumentTypeError: it is none.
        ArgumentValueError: it is less than `least`.
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    if value < least:
        raise ArgumentValueError(f"{name} must be at least {least}, got {value}")
    return value


class SharedMemory:
    """Memory of the same size on every rank, mapped on all of them. The base of what this package shares.

    It belongs to this object and to nothing else: any number of them, of any groups, live side by side.

    Args:
        what: the thing, in words; equal on all ranks.
        group: the ranks.
        ordinal: this rank's CUDA device.
        asked: checks this rank's arguments and returns those that must be equal on all ranks; ``nbytes`` and
            ``stride`` (see `map_jointly`) among them, and ``multicast`` where that is asked for.
        first: what this rank does once the memory is mapped, before any rank goes on.
    """

    def __init__(
        self, what: str, group: Group, ordinal: int, asked: Callable[[], JsonObject], first: Callable[[], None]
    ) -> None:
        self._what = what
        self._group = group
        self._ordinal = ordinal
        self._multicast: Multicast | None = None
        self.multicast_reason = "it was not asked for"
        """Why there is no multicast address, or an empty text."""

        def checked() -> JsonObject:
            wanted = asked()
            _check_ordinal(ordinal)
            return wanted

        agreed = _agree(group, what, checked)
        self._tensors = tensor_device(ordinal)
        nbytes, stride = cast("int", agreed["nbytes"]), cast("int", agreed["stride"])
        device = torch.device("cuda", ordinal)
        with _cuda.device_guard(self._tensors), Transaction(group, f"open {what}") as stages:
            form = agree_form(stages, device)
            self._mapped: Mapped = map_jointly(stages, nbytes, device, form=form, what="memory", stride=stride)
            if agreed.get("multicast"):
                opened, self.multicast_reason = open_multicast(stages, self._mapped, device)
                self._multicast = opened
            # Nobody is told that this is open before it is filled everywhere.
            stages.step("fill", lambda: self._run(first))
            _, keys = stages.step_shared("name", lambda: uuid.uuid4().hex, str)
            self._teardown = stages.commit()
        self._lifecycle = Lifecycle(f"this {what}", group, str(keys[0]))

    @property
    def mapped(self) -> bool:
        """Whether the memory is there: not before `checkpoint_restore` once it was detached."""
        return self._lifecycle.state == "attached"

    @property
    def state(self) -> str:
        """``"attached"``, ``"detached"``, ``"failed"`` or ``"closed"``."""
        return self._lifecycle.state

    @property
    def form(self) -> str:
        """How the ranks share it: ``"vmm_fd"`` on one host, ``"vmm_fabric"`` between hosts."""
        return self._mapped.form

    @property
    def group(self) -> Group:
        """The ranks; while detached, one that knows only rank and size."""
        return self._lifecycle.group

    def check(self, operation: str) -> None:
        """Raise unless the memory is there.

        Args:
            operation: what needs it, for the text.

        Raises:
            ClosedError: it was closed.
            CheckpointError: it is detached, or a checkpoint or restore failed half-way.
        """
        self._lifecycle.check(operation)

    def tensor(self, rank: int, offset: int, nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Return a flat tensor over `nbytes` of a rank's memory from byte `offset` on, which keeps this object alive.

        Raises:
            ArgumentValueError: no such rank, or bytes beyond the memory.
            ClosedError, CheckpointError: as `check`.
        """
        self.check("tensor")
        if not 0 <= rank < self._group_size:
            raise ArgumentValueError(f"rank must be 0 to {self._group_size - 1}, got {rank}")
        if offset < 0 or offset + nbytes > self._mapped.nbytes:
            raise ArgumentValueError(
                f"bytes {offset} to {offset + nbytes} are beyond the {self._mapped.nbytes} bytes of the memory"
            )
        return self._view(self._mapped.addresses[rank] + offset, nbytes, dtype)

    # Checkpoint

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep its addresses, before the process is checkpointed. Collective.

        Waits for the device. Until `checkpoint_restore` nothing may touch the memory, graphs included; what it held
        is lost. The group is let go. Nothing is done where this is the state already.

        Raises:
            JointError: a capture is under way on some rank, or the ranks are at different calls. On every rank;
                nothing has changed.
            CheckpointError: it failed half-way. The memory is then of no more use, on any rank.
            ClosedError: after `close`.
        """

        def ready() -> None:
            self._check_capture()
            _cuda.synchronize(self._tensors)
            check_detachable([self._mapped])

        def detach(group: Group) -> None:
            if self._multicast is not None:
                self._multicast.detach(group)
            detach_jointly(group, f"checkpoint_prepare of this {self._what}", [self._mapped])

        with _cuda.device_guard(self._tensors):
            try:
                self._lifecycle.prepare(ready, detach)
            finally:
                self._let_go()

    def checkpoint_restore(
        self, comm_backend: CommBackend | Any | None, *, reset: Callable[[], None] | None = None
    ) -> None:
        """Bring the memory back at the same addresses, after the process was restored. Collective.

        Args:
            comm_backend: the ranks that share this memory, in their old order: a `CommBackend`, a process group or a
                `comm_core` group; None is WORLD where torch.distributed is initialized, else ``MPI.COMM_WORLD``.
            reset: writes what this rank's memory must hold before any rank uses it (protocols' flags and sentinels);
                it runs after the memory is mapped everywhere and before this returns anywhere.

        Raises:
            ArgumentTypeError, ArgumentValueError: it is no group, or one of another size; nothing was communicated.
            MPIMissingError: as in the constructor.
            JointValueError: a rank has another place in it. On every rank; nothing has changed.
            JointError, CheckpointError, ClosedError: as in `checkpoint_prepare`.
        """
        what = f"checkpoint_restore of this {self._what}"

        def attach(group: Group) -> None:
            attach_jointly(group, what, [self._mapped])
            if self._multicast is not None:
                self._multicast.attach(group)

            def fill() -> None:
                self._refill()
                if reset is not None:
                    reset()

            # Whatever `reset` looks at sees memory that is there.
            self._lifecycle.state = "attached"
            joint(group, f"{what}: fill", lambda: self._run(fill))

        group = group_of(default_backend() if comm_backend is None else comm_backend)
        with _cuda.device_guard(self._tensors):
            try:
                self._lifecycle.restore(group, self._check_capture, attach)
            finally:
                self._let_go()

    def _refill(self) -> None:
        """Write what the memory must hold after it came back."""

    # End of life

    def close(self, timeout: float | None = None) -> None:
        """Release everything. Collective, but local while detached. May be called again after a failure.

        Once anything was released, the memory counts as closed, even where the rest could not be.

        Args:
            timeout: seconds to wait for the other ranks; None is the group's.

        Raises:
            JointError: something can't be released on some rank.
            GroupTimeoutError: a rank did not come; what it may still write is kept until the process ends.
        """
        with _cuda.device_guard(self._tensors):
            if self.state == "detached":
                self._teardown.release_alone()
            elif self.state == "failed":
                kept = self._teardown.abandon()
                _log.warning("this %s: %d bytes are kept until this process ends", self._what, kept)
            elif not self._teardown.closed:
                try:
                    self._teardown.close(timeout)
                finally:
                    # Peers may be unmapped already: whoever used an address now would end the process.
                    if self._teardown.begun:
                        self._lifecycle.close()
        self._lifecycle.close()

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    # What subclasses use

    @property
    def _group_size(self) -> int:
        return len(self._mapped.addresses)

    def _view(self, address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        ordinal = self._ordinal if self._tensors.type == "cuda" else -1
        return pack_strided_memory(address, nbytes, nbytes, 1, dtype, ordinal, owner=self)[0]

    def _upload(self, pointers: tuple[int, ...]) -> torch.Tensor:
        """Return pointers as a tensor on the device."""
        with torch.inference_mode(False):
            return torch.tensor(pointers, dtype=torch.int64).to(self._tensors)

    def _run(self, step: Callable[[], _T]) -> None:
        """Run a step that writes device memory, and wait until that is done."""
        with torch.inference_mode(False), torch.no_grad():
            step()
        _cuda.synchronize(self._tensors)

    def _check_capture(self) -> None:
        if _cuda.is_capturing():
            raise UnsupportedError("a CUDA graph is being captured: end the capture first")

    def _let_go(self) -> None:
        """Forget the group where the lifecycle has, and take the one that it has."""
        group = self._lifecycle.group
        self._group = self._teardown.group = group
        if isinstance(group, DetachedGroup):
            self._own_backend_gone()

    def _own_backend_gone(self) -> None:
        """Drop what a subclass keeps of the group."""


def _check_ordinal(ordinal: int) -> None:
    """Raise where there is no such device: on this rank alone it would be raised too late for the others."""
    if tensor_device(ordinal).type == "cuda" and ordinal >= _cuda.device_count():
        raise ArgumentValueError(f"device_idx={ordinal}: this process sees {_cuda.device_count()} CUDA devices")


def _agree(group: Group, what: str, asked: Callable[[], JsonObject]) -> Mapping[str, Json]:
    """Return what all ranks asked for; raise, on every rank, where one can't be served or they differ."""

    def mine() -> Json:
        return asked()

    records = cast("list[Mapping[str, Json]]", joint(group, f"{what}: arguments", mine, error=JointValueError))
    if any(record != records[0] for record in records):
        texts = {rank: ", ".join(f"{key}={record[key]!r}" for key in record) for rank, record in enumerate(records)}
        raise JointValueError(f"{what}: the ranks asked for different memory", texts)
    return records[0]
