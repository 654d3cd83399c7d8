"""A session over windows whose memory can be taken away and brought back at the same addresses."""

from __future__ import annotations

import logging
import uuid
from typing import TYPE_CHECKING

from comm_core import _cuda
from comm_core.consensus import joint
from comm_core.errors import ClosedError, UnsupportedError
from comm_core.group import Group
from comm_core.memory.detach import Lifecycle, attach_jointly, check_detachable, detach_jointly
from comm_core.windows.session import WindowSession
from comm_mnnvl.handles import FORMS

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["MnnvlSession"]

_log = logging.getLogger("comm_core")
_WHAT = "this session of transport 'mnnvl'"


class MnnvlSession(WindowSession):
    """Plans between windows of virtual memory. Opened by `MnnvlTransport.open`; see `WindowSession`.

    Args:
        stages: the transaction of the opening.
        module: the loaded module of windows.
        device: this rank's device.
        handle: how memory is passed, one of `comm_mnnvl.handles.FORMS`.
        staging_bytes: size of the staging window: the largest operand.
        timeout_s: deadline of every wait on the device.
        blocks_per_peer: blocks of an exchange for each destination; equal on all ranks.
        poison: whether an aborted operation fills its destination with NaN bytes.
    """

    _usable = True

    def __init__(
        self,
        stages: Transaction,
        module: Module,
        device: torch.device,
        *,
        handle: str,
        staging_bytes: int,
        timeout_s: float,
        blocks_per_peer: int,
        poison: bool = True,
    ) -> None:
        super().__init__(
            stages,
            module,
            device,
            form=FORMS[handle],
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            blocks_per_peer=blocks_per_peer,
            poison=poison,
        )
        self.route = handle
        _, keys = stages.step_shared("name", lambda: uuid.uuid4().hex, str)
        self._lifecycle = Lifecycle(_WHAT, stages.group, str(keys[0]))

    @property
    def state(self) -> str:
        """``"attached"``, ``"detached"``, ``"failed"`` or ``"closed"``."""
        return self._lifecycle.state

    def check(self) -> None:
        """See `WindowSession.check`.

        Raises:
            CheckpointError: the memory is detached, or a checkpoint or restore failed half-way.
            ClosedError: it was closed, or closing it failed: peers may be unmapped already.
            PeerStalledError: as there.
        """
        if not self._usable:
            self._lifecycle.check("a call")
            raise ClosedError(f"a call: closing {_WHAT} has begun and is not over; call close on every rank again")
        super().check()

    def checkpoint_prepare(self) -> None:
        """See `TransportSession.checkpoint_prepare`."""

        def ready() -> None:
            self._check_capture()
            # What was launched ends, by its deadline at the latest; a stall is told before anything is taken away.
            _cuda.synchronize(self._device)
            self.check()
            check_detachable(self.allocations())

        def detach(group: Group) -> None:
            self._usable = False
            detach_jointly(group, f"checkpoint_prepare of {_WHAT}", self.allocations())

        try:
            self._lifecycle.prepare(ready, detach)
        finally:
            if not self._usable:
                self.regroup(self._lifecycle.group)

    def checkpoint_restore(self, group: Group) -> None:
        """See `TransportSession.checkpoint_restore`."""
        what = f"checkpoint_restore of {_WHAT}"

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
        """See `TransportSession.close`.

        While detached it is local: no rank has anything of another mapped. After a checkpoint or restore that failed
        half-way nobody knows what is, so what a peer may still write is kept until the process ends.
        """
        if self.state == "detached":
            self.release_alone()
        elif self.state == "failed":
            _log.warning("%s: %d bytes are kept until this process ends", _WHAT, self.abandon())
        elif self.state != "closed":
            self._usable = False
            super().close(timeout_s)
        self._usable = False
        self._lifecycle.close()

    def _check_capture(self) -> None:
        if _cuda.is_capturing():
            raise UnsupportedError("a CUDA graph is being captured: end the capture first")
