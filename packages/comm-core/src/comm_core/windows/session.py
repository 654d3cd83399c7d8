"""A session over windows: plans executed on the device, by the SMs or by the copy engines."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from comm_core import _cuda
from comm_core.errors import ArgumentValueError, UnsupportedError
from comm_core.transport import strided
from comm_core.transport.interface import Properties, Staging, TransportSession
from comm_core.transport.plan import Copy, Plan
from comm_core.windows import gather
from comm_core.windows.base import SignalSession
from comm_core.windows.launch import Calls
from comm_core.windows.signals import Operation
from comm_core.windows.table import compile_plan
from comm_core.windows.watchdog import watch
from comm_core.windows.window import MappedWindow

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["WindowSession"]

_log = logging.getLogger("comm_core")
_STAGING = 0
"""Number of the staging window."""
_SMALL = 1
"""Number of the window of small gathers."""


class WindowSession(SignalSession, TransportSession):
    """Plans between windows of one group. Opened by `open`; see `TransportSession`.

    A destination in a window (`allocate_output`, `window`) is written by the peers in place. Any other is staged: the
    peers write the staging window, and this rank copies from there in stream order.

    Args:
        stages: the transaction of the opening.
        module: the loaded module of windows.
        device: this rank's device.
        form: of peer memory.
        staging_bytes: size of the staging window: the largest operand.
        timeout_s: deadline of every wait on the device.
        blocks_per_peer: blocks of an exchange for each destination; equal on all ranks.
        poison: whether an aborted operation fills its destination with NaN bytes.
        copy_engines: whether plans are executed by the copy engines where that is possible.
    """

    properties = Properties(peer_pointers=True, graph_capturable=True, shared_resources=True)

    def __init__(
        self,
        stages: Transaction,
        module: Module,
        device: torch.device,
        *,
        form: str,
        staging_bytes: int,
        timeout_s: float,
        blocks_per_peer: int,
        poison: bool = True,
        copy_engines: bool = False,
    ) -> None:
        self._calls = Calls(module)
        self._blocks_per_peer = blocks_per_peer
        self._copy_engines = copy_engines
        # Never dropped before the end: a captured call keeps the address of its table.
        self._tables: dict[Plan, tuple[int, torch.Tensor, Any]] = {}
        self._staging_bytes = staging_bytes
        super().__init__(stages, device, form=form, timeout_s=timeout_s, poison=poison)
        stages.step("self-test", self._self_test)
        watch(self)

    # Set-up

    def _allocate(self, stages: Transaction) -> None:
        """Allocate the windows that the session begins with; that of number 0 stages outputs."""
        self.windows.add_in(stages, self._staging_bytes, "staging")
        self.windows.add_in(stages, gather.window_bytes(self._group.size), "small gathers")

    def _self_test(self) -> None:
        """Exchange a pattern that differs for every pair, through the very kernel and windows that calls use."""
        gather.self_test(self, self._device, self._group.rank, self._group.size)

    # Calls

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`."""
        self.check()
        found = self.windows.find(destination.data_ptr(), plan.target_bytes)
        operation = Operation.of(plan.operation)
        if found is not None and not self._copy_engines:
            window, offset = found
            self._push(plan, sources, window, offset, operation)
            return
        window = self.windows[_STAGING]
        if plan.target_bytes > window.nbytes:
            raise ArgumentValueError(
                f"{plan.operation}: {plan.target_bytes} bytes do not fit the staging window of {window.nbytes}"
            )
        if self._copy_engines:
            self._copy(plan, sources, window, 0, operation)
        else:
            self._push(plan, sources, window, 0, operation)
        self._unstage(plan, window, destination)

    def _push(
        self, plan: Plan, sources: Sequence[torch.Tensor], window: MappedWindow, offset: int, operation: int
    ) -> None:
        table, _, _ = self._compiled(plan)
        self._calls.exchange(
            self._stream(),
            self._session,
            table,
            [source.data_ptr() for source in sources],
            window.address + offset,
            window.number,
            offset,
            self._blocks_per_peer,
            operation,
        )

    def _copy(
        self, plan: Plan, sources: Sequence[torch.Tensor], window: MappedWindow, offset: int, operation: int
    ) -> None:
        """Exchange by the copy engines; window and offset are the same on all ranks (see exchange_open_kernel)."""
        table, _, whole = self._compiled(plan)
        self._calls.copies(
            self._stream(),
            self._session,
            table,
            ctypes.addressof(whole),
            [source.data_ptr() for source in sources],
            [address + offset for address in window.peer_pointers],
            window.number,
            offset,
            operation,
        )

    def _unstage(self, plan: Plan, window: MappedWindow, destination: torch.Tensor) -> None:
        if plan.covers_target:
            target = strided.byte_view(destination, 0, plan.target_bytes)
            target.copy_(window.local[: plan.target_bytes])
        else:
            written = [_same_place(copy) for copy in plan.receives]
            strided.copy_local(written, (window.local,), destination)
        self._calls.settle(self._stream(), self._session, destination.data_ptr(), plan.target_bytes)

    def _compiled(self, plan: Plan) -> tuple[int, torch.Tensor, Any]:
        """Return the address of the plan's table, the table on the device, and that for copy engines on the host."""
        found = self._tables.get(plan)
        if found is None:
            if _cuda.is_capturing():
                # Nothing was communicated, so this breaks nothing (as a TransportError would).
                raise UnsupportedError(
                    f"{plan.operation}: this geometry is seen for the first time while a graph is captured, and its "
                    "table would have to be copied to the device: make the call once before the capture"
                )
            data = torch.frombuffer(bytearray(compile_plan(plan).data), dtype=torch.uint8)
            whole = ctypes.create_string_buffer(compile_plan(plan, 0).data)
            # It is there on return, since `to` waits for the current stream. Not for the whole device: on another
            # stream a kernel may be waiting for a peer, and that one for this call.
            table = data.to(self._device)
            self._tables[plan] = found = (table.data_ptr(), table, whole)
        return found

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        self.check()
        nbytes = gather.check_small(value, out, self._group.size)
        plan = gather.small_plan(nbytes, self._group.rank, self._group.size)
        window = self.windows[_SMALL]
        # Called by codecs too, whose current device may be another one; so is the barrier.
        with _cuda.device_guard(self._device):
            self._push(plan, (value,), window, 0, Operation.ALL_GATHER_SMALL)
            self._unstage(plan, window, out)

    def barrier(self, operation: Operation = Operation.BARRIER) -> None:
        """See `TransportSession.barrier`; `operation` is what a stall is said to have happened in."""
        self.check()
        with _cuda.device_guard(self._device):
            self._calls.barrier(self._stream(), self._session, operation)

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output in a window of its own, which peers write in place. Collective."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        return self.window(nbytes).local.view(dtype).view(tuple(shape))

    def window(self, nbytes: int) -> MappedWindow:
        """See `TransportSession.window`."""
        self.check()
        window = self.windows.add(nbytes)
        self._pack()
        return window

    # The end

    def release_alone(self) -> None:
        """See `SignalSession.release_alone`."""
        super().release_alone()
        self._tables.clear()

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`. What a lost peer may still write is kept until the process ends."""
        super().close(timeout_s)
        self._tables.clear()


def _same_place(copy: Copy) -> Copy:
    """Return a copy from staging to the destination of what `copy` has written into staging."""
    levels = tuple(level._replace(source_pitch=level.target_pitch) for level in copy.levels)
    return copy._replace(source=0, source_offset=copy.target_offset, levels=levels)
