"""The workspace: an all-reduce backend opened for a group, under its specified names."""

from __future__ import annotations

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar

import torch

from comm_core import _cuda, _env
from comm_core._dtypes import dtype_name
from comm_core._threads import between_calls
from comm_core.allreduce.patterns import AllReduceFusionPattern
from comm_core.errors import ArgumentValueError, ClosedError, GroupTimeoutError, TransportError, UnsupportedError
from comm_core.ulysses.call import agree

if TYPE_CHECKING:
    from comm_core.allreduce.backend import FusionCall
    from comm_core.allreduce.known import Given
    from comm_core.comm_backend import CommBackend
    from comm_core.group import Group
    from comm_core.selection import Decision

__all__ = ["AllReduceFusionWorkspace"]


class AllReduceFusionWorkspace(ABC):
    """What `allreduce_fusion` runs on: buffers of one group, made by `create_allreduce_fusion_workspace`.

    All ranks make the same calls on it in the same order with the same shapes, one at a time. It may be used for any
    number of tokens and any hidden size whose bytes fit (`is_buffer_size_sufficient`).

    A backend implements `backend`, `required_bytes`, `_run` and, where it owns something, `_destroy`.

    Args:
        world_size: ranks of the group.
        rank: this rank within the group.
        dtype: element type that it was made for.
        device: of the tensors that it takes.
        buffer_bytes: what it holds, in the measure of `required_bytes`.
    """

    patterns: ClassVar[frozenset[AllReduceFusionPattern]] = frozenset(AllReduceFusionPattern)
    """What it computes. The others are refused before anything is sent or launched."""
    shared_resources: ClassVar[bool] = False
    """Whether other ranks hold mappings of this rank's memory, so that `destroy` is collective."""

    def __init__(
        self, world_size: int, rank: int, *, dtype: torch.dtype, device: torch.device, buffer_bytes: int
    ) -> None:
        self.world_size = world_size
        self.rank = rank
        self.dtype = dtype
        self.device = device
        self.buffer_bytes = buffer_bytes
        self.decision: Decision | None = None
        """How the backend was chosen; None for a workspace that was constructed directly."""
        self.fallback_reason: str | None = None
        """Why ``"auto"`` did not take what it prefers, or None where it did or a backend was named."""
        self._destroyed = False
        self._broken: str | None = None
        self._busy = threading.Lock()
        self._calls = 0
        self._checked_group: Group | None = None
        self._number = ""

    # What a backend implements

    @property
    @abstractmethod
    def backend(self) -> str:
        """Name of the backend."""

    @abstractmethod
    def required_bytes(
        self, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> int:
        """Return the bytes of `buffer_bytes` that a call of this size needs.

        Pure, and the only statement of the capacity: `is_buffer_size_sufficient`, the checks of `allreduce_fusion`
        and the backend's own allocation and kernels go by it.

        Args:
            num_tokens: rows that are reduced.
            hidden_dim: elements of a row.
            dtype: of the elements.
            use_oneshot: as in `allreduce_fusion`.
        """

    def check_call(self, call: FusionCall) -> None:  # noqa: B027 - a backend may do all that its patterns need
        """Raise if this backend can't compute `call`, although it has the pattern: architecture, layout, dtype.

        Called before anything is sent or launched; `patterns` and the capacity were checked. The text names the
        argument.

        Raises:
            ArgumentValueError: another argument would do.
            UnsupportedError: this device or build can't.
        """

    @abstractmethod
    def _run(self, call: FusionCall) -> None:
        """Compute `call` into its outputs, on the current stream. Collective; arguments were found good.

        Raises:
            TransportError: it failed on the way; the workspace is then broken.
        """

    def _destroy(self, timeout_s: float | None) -> None:  # noqa: B027 - a workspace may own nothing
        """Release everything; collective where `shared_resources`; may be called again after a failure."""

    # Sizes

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | None = None,
    ) -> bool:
        """Return whether a call of this size fits. Local.

        Args:
            tp_size: ranks; another number than the workspace's never fits.
            num_tokens: rows that are reduced.
            hidden_dim: elements of a row.
            dtype: of the elements.
            use_oneshot: as in `allreduce_fusion`.
        """
        if tp_size != self.world_size or num_tokens < 1 or hidden_dim < 1:
            return False
        return self.required_bytes(num_tokens, hidden_dim, dtype, use_oneshot) <= self.buffer_bytes

    # Calls

    def bind(self, group: Group, decision: Decision, fallback_reason: str | None) -> None:
        """Note how this workspace came about; the factory calls it once, on every rank, after opening."""
        self.decision = decision
        self.fallback_reason = fallback_reason
        self._number = group.token()
        if decision.request.environment.get("COMM_CHECK") == "1":
            self._checked_group = group

    def run(self, prepare: Callable[[], FusionCall]) -> FusionCall:
        """Prepare a call and compute it. Collective.

        Args:
            prepare: checks this rank's arguments and allocates; communicates nothing.

        Raises:
            As `comm_core.allreduce_fusion`.
        """
        what = "allreduce_fusion"

        def ready() -> FusionCall:
            self.check_usable(what)
            return prepare()

        if not self._busy.acquire(blocking=False):
            raise UnsupportedError(
                f"{what}: another thread is in a call of this workspace; a workspace serves one call at a time"
            )
        try:
            with _cuda.device_guard(self.device), torch.no_grad():
                if self._checked_group is None or self.world_size == 1:
                    call = ready()
                else:
                    call = agree(self._checked_group, what, self._number, self._calls, ready)
                self._calls += 1
                try:
                    self._run(call)
                except TransportError as error:
                    self._broken = str(error)
                    raise
            return call
        finally:
            self._busy.release()

    def run_known(self, given: Given) -> torch.Tensor | None:
        """Make a call at once if it is sure to pass all checks, and return what it returns; None: it is not made.

        Args:
            given: its arguments, of which nothing was checked.

        Raises:
            As `comm_core.allreduce_fusion`, on the way.
        """
        return None

    def keep(self, given: Given, call: FusionCall) -> None:  # noqa: B027 - a backend may have no use for it
        """Keep what `run_known` needs to know of a call that was found good and made."""

    def check_usable(self, operation: str) -> None:
        """Raise if nothing can be done with this workspace any more.

        Raises:
            ClosedError: it was destroyed.
            TransportError: an earlier call failed on the way.
        """
        if self._destroyed:
            raise ClosedError(f"{operation}: this workspace is destroyed")
        if self._broken is not None:
            raise TransportError(f"{operation}: this workspace is broken since an earlier failure: {self._broken}")

    def check_supported(self, call: FusionCall) -> None:
        """Raise if this workspace can't compute `call`; nothing was communicated. See `check_call`."""
        if call.pattern not in self.patterns:
            offered = ", ".join(f"{item.name} ({int(item)})" for item in sorted(self.patterns))
            raise UnsupportedError(
                f"pattern {call.pattern.name} ({int(call.pattern)}) is not computed by backend {self.backend!r}, "
                f"which has {offered}; backend='dist' has every pattern"
            )
        if not self.is_buffer_size_sufficient(
            self.world_size, call.tokens, call.hidden, call.dtype, call.use_oneshot
        ):
            needed = self.required_bytes(call.tokens, call.hidden, call.dtype, call.use_oneshot)
            raise ArgumentValueError(
                f"input: {call.tokens} tokens of {call.hidden} {dtype_name(call.dtype)} need {needed} bytes "
                f"(use_oneshot={call.use_oneshot}), the workspace has {self.buffer_bytes}: create it with a larger "
                "max_token_num, or split the call; is_buffer_size_sufficient tells before"
            )
        self.check_call(call)

    # Checkpoint

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep the addresses, before the process is checkpointed. Collective.

        Raises:
            UnsupportedError: this backend has no memory of that kind.
        """
        raise self._no_checkpoint("checkpoint_prepare")

    def checkpoint_restore(self, comm_backend: CommBackend) -> None:
        """Bring back the memory at the same addresses, after the process was restored. Collective.

        Args:
            comm_backend: a fresh control plane with the rank and the world size of the original one.

        Raises:
            UnsupportedError: this backend has no memory of that kind.
        """
        raise self._no_checkpoint("checkpoint_restore")

    def _no_checkpoint(self, operation: str) -> UnsupportedError:
        return UnsupportedError(
            f"{operation}: backend {self.backend!r} can't detach its memory and keep its addresses; destroy the "
            "workspace before the checkpoint and create one afterwards"
        )

    # End of life

    def destroy(self, timeout: float | None = None) -> None:
        """Release everything. Collective where the ranks share memory, else local. Idempotent.

        A call or a `destroy` of another thread is waited for. After a failure it may be called again, by every rank.

        Args:
            timeout: seconds to wait for the other thread, and for the other ranks; None is ``COMM_TIMEOUT_S``.

        Raises:
            UnsupportedError: a call of another thread does not end in that time, on this rank alone.
            JointError: something could not be released on some rank.
            GroupTimeoutError: a rank did not come; what only this rank uses was released.
        """
        if self._destroyed:
            return
        with self._between_calls("destroy", timeout):
            # By another thread, while this one waited.
            if self._destroyed:
                return
            try:
                self._destroy(timeout)
            except GroupTimeoutError:
                # What could be released here is released, and the rest never can be: there is nothing to try again.
                self._destroyed = True
                raise
            self._destroyed = True

    def _between_calls(
        self, operation: str, timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Wait for a call of another thread; see `comm_core._threads.between_calls`."""
        return between_calls(self._busy, operation, "workspace", _env.timeout_s() if timeout_s is None else timeout_s)

    def __enter__(self) -> AllReduceFusionWorkspace:
        """Return the workspace itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Destroy."""
        self.destroy()

    def __del__(self) -> None:
        """Warn about shared memory that was not released; never communicate."""
        if self.shared_resources and not getattr(self, "_destroyed", True):
            warnings.warn(
                f"an all-reduce workspace of backend {self.backend!r} was never destroyed: its shared memory is kept "
                "until the process ends; call destroy() on every rank",
                ResourceWarning,
                source=self,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        """Return rank, backend and state."""
        state = "destroyed" if self._destroyed else "broken" if self._broken else "open"
        return (
            f"{type(self).__name__}(rank={self.rank}/{self.world_size}, backend={self.backend!r}, "
            f"dtype={dtype_name(self.dtype)}, device={self.device}, buffer_bytes={self.buffer_bytes}, {state})"
        )
