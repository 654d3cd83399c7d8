"""Making the calls of a communicator: alone, on its device, without gradients; and whether it still can."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeVar

import torch

from comm_core import _cuda
from comm_core._threads import between_calls
from comm_core.errors import (
    CheckpointError,
    ClosedError,
    CommError,
    CudaCallError,
    GroupTimeoutError,
    TransportError,
    UnsupportedError,
)
from comm_core.group import DetachedGroup, Group
from comm_core.transport import strided
from comm_core.transport.interface import TransportSession
from comm_core.ulysses.call import AnyCall, Call, agree
from comm_core.ulysses.codec import EncodedCall

__all__ = ["Execution"]

# Every call needs these, and finding them in torch takes as long as they do.
_is_grad_enabled = torch.is_grad_enabled
_set_grad_enabled = torch._C._set_grad_enabled  # pyright: ignore[reportPrivateUsage] - what torch.no_grad calls
_increment_version = torch.autograd.graph.increment_version

_T = TypeVar("_T")


class Execution:
    """Makes the calls that `Preparation` has found good, over the session that it owns.

    It is what a communicator can still do: open, in a call of one thread, detached, broken by a failure, or closed.

    Args:
        group: the ranks.
        session: the opened transport, or None where nothing is exchanged (one rank).
        backend: name of the transport, for messages.
        device: this rank's device.
        checked: whether the ranks compare every call before it is made.

    Attributes:
        group: the ranks; while detached, what stands for them.
        session: as given.
        busy: held by the thread that is in a call.
        closed: whether there is nothing left to release.
        bytes_sent: bytes that have left this rank.
    """

    def __init__(
        self, group: Group, session: TransportSession | None, backend: str, device: torch.device, *, checked: bool
    ) -> None:
        self.group = group
        self.session = session
        self.busy = threading.Lock()
        self.closed = False
        self.bytes_sent = 0
        self._backend = backend
        self._device = device
        self._ordinal = device.index if device.type == "cuda" else -1
        self._checked = checked
        self._number = group.token()
        self._calls = 0
        self._detached = False
        self._broken: str | None = None

    # Calls

    def run(self, operation: str, prepare: Callable[..., Call], *arguments: object) -> torch.Tensor:
        """Make the call that `prepare` makes of `arguments`; return its output. Collective.

        Raises:
            CommError: what `prepare` raises; nothing was communicated.
            TransportError: the exchange failed; every further call raises this.
            ClosedError, CheckpointError, UnsupportedError: no call can be made now.
        """
        return self._alone(self._exchange, operation, prepare, arguments)

    def run_encoded(self, operation: str, prepare: Callable[..., EncodedCall], *arguments: object) -> object:
        """Make an encoded call, as `run` does; see `CodecHost.run`."""
        return self._alone(self._encoded, operation, prepare, arguments)

    def _alone(self, execute: Callable[..., _T], operation: str, *arguments: object) -> _T:
        if self.closed or self._detached or self._broken is not None:
            self.check_usable(operation)
        if not self.busy.acquire(False):
            self._refuse_second(operation)
        # Both guards cost more than all checks of a known geometry, so each is taken only where it changes something.
        try:
            if not _cuda.is_current(self._ordinal):
                with self.on_device(), torch.no_grad():
                    return execute(operation, *arguments)
            if not _is_grad_enabled():
                return execute(operation, *arguments)
            _set_grad_enabled(False)
            try:
                return execute(operation, *arguments)
            finally:
                _set_grad_enabled(True)
        finally:
            self.busy.release()

    def _exchange(self, operation: str, prepare: Callable[..., Call], arguments: tuple[object, ...]) -> torch.Tensor:
        call = self._agreed(operation, prepare, arguments) if self._checked else prepare(*arguments)
        self._calls += 1
        if self.session is None:
            return _passthrough(call, self._device)
        plan, sources, shape, dtype, out, workspace, _ = call
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self._device)
        staging = None if workspace is None else workspace.staging
        try:
            self.session.exchange(plan, sources, out, staging=staging)
        except Exception as error:
            self._fail(operation, error)
            raise
        if not out.is_inference():
            # The bytes were written behind autograd's back; its check for tensors changed in place must know.
            _increment_version(out)
        self.bytes_sent += plan.remote_send_bytes
        return out

    def _encoded(self, operation: str, prepare: Callable[..., EncodedCall], arguments: tuple[object, ...]) -> object:
        call = self._agreed(operation, prepare, arguments) if self._checked else prepare(*arguments)
        self._calls += 1
        try:
            result = call.execute()
        except Exception as error:
            self._fail(operation, error)
            raise
        # It knows that tensors made in inference mode have no version.
        _increment_version(call.outputs)
        self.bytes_sent += call.sent_bytes
        return result

    def launch_known(
        self, operation: str, execute: Callable[[], None], outputs: Sequence[torch.Tensor], sent_bytes: int
    ) -> None:
        """Make an encoded call of which nothing is left to check; see `CodecHost.launch`."""
        if self.closed or self._detached or self._broken is not None:
            self.check_usable(operation)
        if not self.busy.acquire(False):
            self._refuse_second(operation)
        try:
            self._calls += 1
            try:
                if _cuda.is_current(self._ordinal):
                    execute()
                else:
                    with self.on_device():
                        execute()
            except Exception as error:
                self._fail(operation, error)
                raise
            _increment_version(outputs)
            self.bytes_sent += sent_bytes
        finally:
            self.busy.release()

    def _agreed(self, operation: str, prepare: Callable[..., AnyCall], arguments: tuple[object, ...]) -> AnyCall:
        return agree(self.group, operation, self._number, self._calls, lambda: prepare(*arguments))

    def _fail(self, operation: str, error: Exception) -> None:
        """Break over an exchange that ended in `error`, unless that only refused the call.

        Raises:
            TransportError: the exchange broke in a way that does not say so itself.
        """
        if isinstance(error, TransportError):
            self._broken = str(error)
        elif not isinstance(error, CommError) or isinstance(error, CudaCallError):
            # After a CUDA error a part may have been enqueued; all other errors of ours come before anything is.
            self._broken = f"{operation} over {self._backend} failed: {type(error).__name__}: {error}"
            raise TransportError(self._broken) from error

    def _refuse_second(self, operation: str) -> NoReturn:
        raise UnsupportedError(
            f"{operation}: another call of this communicator is running in another thread; a communicator takes "
            "one call at a time, make one for each thread"
        )

    def on_device(self) -> contextlib.AbstractContextManager[object]:
        """Make the communicator's device the current one for a block."""
        return _cuda.device_guard(self._device)

    # What it still can

    @property
    def state(self) -> str:
        """``"open"``, ``"detached"``, ``"broken"`` or ``"closed"``."""
        return "closed" if self.closed else "broken" if self._broken else "detached" if self._detached else "open"

    def check_usable(self, operation: str) -> None:
        """Raise unless calls can be made.

        Raises:
            ClosedError: after `close`.
            TransportError: an earlier call has failed.
            CheckpointError: between `checkpoint_prepare` and `checkpoint_restore`.
        """
        if self.closed:
            raise ClosedError(f"{operation}: this communicator is closed")
        if self._broken is not None:
            raise TransportError(f"{operation}: this communicator is broken since an earlier failure: {self._broken}")
        if self._detached:
            raise CheckpointError(
                f"{operation}: this communicator is detached since checkpoint_prepare; call checkpoint_restore on "
                "every rank first"
            )

    def check(self) -> None:
        """See `UlyssesCommunicator.check`."""
        self.check_usable("check")
        if self.session is not None:
            try:
                self.session.check()
            except TransportError as error:
                self._broken = str(error)
                raise

    def checkpoint_prepare(self) -> None:
        """See `UlyssesCommunicator.checkpoint_prepare`."""
        self._transition("checkpoint_prepare", lambda session: session.checkpoint_prepare())
        if self.session is not None:
            self._detached = True
            self.group = DetachedGroup(self.group, "this communicator")

    def checkpoint_restore(self, group: Group) -> None:
        """See `UlyssesCommunicator.checkpoint_restore`."""
        self._transition("checkpoint_restore", lambda session: session.checkpoint_restore(group))
        if self.session is not None and self._detached:
            self._detached = False
            self.group = group
            self._number = group.token()

    def _transition(self, operation: str, run: Callable[[TransportSession], None]) -> None:
        if not self._detached:
            self.check_usable(operation)
        with between_calls(self.busy, operation, "communicator", self.group.timeout_s):
            try:
                if self.session is not None:
                    with self.on_device():
                        run(self.session)
            except CheckpointError as error:
                self._broken = str(error)
                raise

    def close(self, timeout: float | None) -> None:
        """See `UlyssesCommunicator.close`."""
        if self.closed:
            return
        timeout_s = self.group.timeout_s if timeout is None else timeout
        with between_calls(self.busy, "close", "communicator", timeout_s):
            # By another thread, while this one waited.
            if self.closed:
                return
            if self.session is not None:
                try:
                    with self.on_device():
                        self.session.close(timeout)
                except GroupTimeoutError:
                    # What could be released here is released, and the rest never can be: nothing is left to try.
                    self.closed = True
                    raise
            self.closed = True


def _passthrough(call: Call, device: torch.device) -> torch.Tensor:
    """Run a call of one rank: whole-head calls are the identity, head-chunk calls a local copy."""
    source = call.sources[0]
    if call.out is None and len(call.sources) == 1:
        return source
    out = call.out
    if out is None:
        out = torch.empty(call.shape, dtype=call.dtype, device=device)
    if out is not source:
        strided.copy_local(call.plan.sends, call.sources, out)
    return out
