"""A session over windows whose memory can be taken away and brought back at the same addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core.windows.detachable import DetachableSession
from comm_core.windows.session import WindowSession
from comm_mnnvl.handles import FORMS

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["MnnvlSession"]


class MnnvlSession(DetachableSession, WindowSession):
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

    what = "this session of transport 'mnnvl'"

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
        self._begin_life(stages)
