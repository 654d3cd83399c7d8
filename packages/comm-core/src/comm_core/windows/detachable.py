"""Sessions whose memory can be taken away for a checkpoint and brought back at the same addresses."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from comm_core import _cuda
from comm_core.consensus import joint
from comm_core.errors import UnsupportedError
from comm_core.memory.detach import Lifecycle, attach_jointly, check_detachable, detach_jointly
from comm_core.windows.base import SignalSession

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.group import Group

__all__ = ["DetachableSession"]

_log = logging.getLogger("comm_core")


class DetachableSession(SignalSession):
    """What such a session has besides; a base class that stands before the one of the session itself.

    Its constructor calls `_begin_life` last.
    """

    _usable = True
    _lifecycle: Lifecycle

    def _begin_life(self, stages: Transaction) -> None:
        """Give the session a name that its ranks share: others than they can't bring it back."""
        _, keys = stages.step_shared("name", lambda: uuid.uuid4().hex, str)
        self._lifecycle = Lifecycle(self.what, stages.group, str(keys[0]))

    @property
    def state(self) -> str:
        """``"attached"``, ``"detached"``, ``"failed"`` or ``"closed"``."""
        return self._lifecycle.state

    def check(self) -> None:
        """See `SignalSession.check`.

        Raises:
            CheckpointError: the memory is detached, or a checkpoint or restore failed half-way.
            ClosedError, PeerStalledError: as there.
        """
        if not self._usable:
            self.check_open()
            self._lifecycle.check(self.call)
        super().check()

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep the addresses. Collective; nothing where that is the state already."""
        # Here, and not as a joint outcome: what a close has begun is at the other ranks' close too.
        self.check_open("checkpoint_prepare")

        def ready() -> None:
            self._check_capture()
            # What was launched ends, by its deadline at the latest; a stall is told before anything is taken away.
            _cuda.synchronize(self._device)
            self.check()
            check_detachable(self.allocations())

        def detach(group: Group) -> None:
            self._usable = False
            detach_jointly(group, f"checkpoint_prepare of {self.what}", self.allocations())

        try:
            self._lifecycle.prepare(ready, detach)
        finally:
            if not self._usable:
                self.regroup(self._lifecycle.group)

    def checkpoint_restore(self, group: Group) -> None:
        """Bring the memory back at the same addresses. Collective; nothing where that is the state already."""
        self.check_open("checkpoint_restore")
        what = f"checkpoint_restore of {self.what}"

        def attach(new: Group) -> None:
            attach_jointly(new, what, self.allocations())
            # Nobody signals before this is over on every rank.
            joint(new, f"{what}: clear", self.clear_signals)
            self.regroup(new)
            self._usable = True
            joint(new, f"{what}: self-test", self._self_test)

        try:
            self._lifecycle.restore(group, self._check_capture, attach)
        except BaseException:
            self._usable = self.state == "attached"
            if not self._usable:
                self.regroup(self._lifecycle.group)
            raise

    def close(self, timeout_s: float | None = None) -> None:
        """See `SignalSession.close`.

        While detached it is local: no rank has anything of another mapped. After a checkpoint or restore that failed
        half-way nobody knows what is, so what a peer may still write is kept until the process ends.
        """
        if self.state == "detached":
            self.release_alone()
        elif self.state == "failed":
            _log.warning("%s: %d bytes are kept until this process ends", self.what, self.abandon())
        elif self.state != "closed":
            super().close(timeout_s)
        self._lifecycle.close()

    def _check_capture(self) -> None:
        if _cuda.is_capturing():
            raise UnsupportedError("a CUDA graph is being captured: end the capture first")
