"""A session over windows: plans executed on the device, by the SMs or by the copy engines."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from comm_core import _cuda
from comm_core.errors import ArgumentValueError, GroupTimeoutError, PeerStalledError, UnsupportedError
from comm_core.memory.peer import Mapped, map_jointly
from comm_core.transport import strided
from comm_core.transport.interface import Properties, Staging, TransportSession
from comm_core.transport.plan import Copy, Plan
from comm_core.windows import gather
from comm_core.windows.launch import Calls, SessionStruct, WindowStruct
from comm_core.windows.signals import (
    RECORD_BYTES,
    SIGNAL_BYTES,
    Operation,
    Stall,
    StallKind,
    abort_code,
    read_stall,
)
from comm_core.windows.table import compile_plan
from comm_core.windows.watchdog import watch
from comm_core.windows.window import MAX_WINDOWS, MappedWindow, WindowSet

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.group import Group
    from comm_core.jit import Module

__all__ = ["WindowSession"]

_log = logging.getLogger("comm_core")
_STAGING = 0
"""Number of the staging window."""
_SMALL = 1
"""Number of the window of small gathers."""


class WindowSession(TransportSession):
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
        self._group = stages.group
        self._device = device
        self._ordinal: int = device.index
        self._calls = Calls(module)
        self._blocks_per_peer = blocks_per_peer
        self._copy_engines = copy_engines
        self._timeout_s = timeout_s
        self._teardown = stages.teardown
        self._stall: Stall | None = None
        self._closed = False
        # Never dropped before the end: a captured call keeps the address of its table.
        self._tables: dict[Plan, tuple[int, torch.Tensor, Any]] = {}
        self._last_stream: int | None = None
        self._signals = signals = map_jointly(stages, SIGNAL_BYTES, device, form=form, what="signals")
        self.memory_form = signals.form
        self.windows = WindowSet(self._group, device, signals.form, self._view)
        self._allocate(stages, staging_bytes)
        # Nobody signals before this step is over on every rank, so the blocks are zero when the first one does.
        stages.step("clear", self.clear_signals)
        stages.step("arm", self._arm, lambda _: self._disarm())
        self._struct = SessionStruct(
            rank=self._group.rank,
            signals=signals.addresses,
            windows=self._table.data_ptr(),
            record=self._record.data_ptr(),
            timeout_ns=int(timeout_s * 1e9),
            poison=poison,
        )
        self._pack()
        stages.step("self-test", self._self_test)
        watch(self)

    # Set-up

    def _allocate(self, stages: Transaction, staging_bytes: int) -> None:
        """Allocate the windows that the session begins with; that of number 0 stages outputs."""
        self.windows.add_in(stages, staging_bytes, "staging")
        self.windows.add_in(stages, gather.window_bytes(self._group.size), "small gathers")

    def _view(self, address: int, nbytes: int) -> torch.Tensor:
        from comm_core.memory.strided import pack_strided_memory

        # The owner keeps the session, and with it the mapping, alive as long as any view of the memory.
        ordinal = self._device.index if self._device.type == "cuda" else -1
        return pack_strided_memory(address, nbytes, nbytes, 1, torch.uint8, ordinal, owner=self)[0]

    def clear_signals(self) -> None:
        """Set this rank's signal block to its first state. Nobody may signal before all ranks have done it."""
        with _cuda.device_guard(self._device), torch.inference_mode(False):
            self._view(self._signals.addresses[self._group.rank], SIGNAL_BYTES).zero_()
            _cuda.synchronize(self._device)

    def _arm(self) -> None:
        self._record = torch.zeros(RECORD_BYTES, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        self._record_bytes = (ctypes.c_char * RECORD_BYTES).from_address(self._record.data_ptr())
        # The first field: the whole record is read only when it is set, since every call looks at it.
        self._record_state = ctypes.c_uint32.from_address(self._record.data_ptr())
        self._table = torch.zeros(MAX_WINDOWS * WindowStruct.nbytes, dtype=torch.uint8, device=self._device)

    def _disarm(self) -> None:
        self._closed = True
        with _cuda.device_guard(self._device):
            # Kernels that still run end by their own deadline.
            _cuda.synchronize(self._device)

    def _pack(self) -> None:
        """Bring the session's struct and the device's table of windows up to date; outside of any capture."""
        packed = b"".join(window.pack() for window in self.windows)
        host = torch.frombuffer(bytearray(packed), dtype=torch.uint8)
        with _cuda.device_guard(self._device):
            self._table[: len(packed)].copy_(host)
            _cuda.synchronize(self._device)
        # Room for all windows, and not only those that there are: a captured call keeps the struct that it was
        # captured with, and a peer may announce a window that was allocated since. One that does not exist has no
        # bytes.
        self._packed = ctypes.create_string_buffer(self._struct.pack(MAX_WINDOWS))
        self._session = ctypes.addressof(self._packed)

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
            table = data.to(self._device)
            self._tables[plan] = found = (table.data_ptr(), table, whole)
            _cuda.synchronize(self._device)
        return found

    def _stream(self) -> int:
        """Return the current stream, ordered after the session's last one: signals belong to one call at a time."""
        stream = _cuda.raw_stream(self._ordinal)
        # A captured call is ordered by whoever replays the graph: a capture must not touch other streams, and its own
        # stream has run nothing that a later call would have to wait for.
        if stream != self._last_stream and not _cuda.is_capturing():
            if self._last_stream is not None:
                _cuda.wait_for_stream(self._device, self._last_stream)
            self._last_stream = stream
        return stream

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

    def launch_context(self) -> tuple[int, int]:
        """Return the current stream and the host address of the packed ``comm::Session``, for a launch of kernels.

        For whoever brings kernels that signal by this session. The stream is ordered after the session's last one;
        the caller has made the device current. The struct must be copied before the next call of this session (a
        window that is added replaces it), and what is launched must be whole operations: each rank announces to every
        other one and marks its data as done (see ``include/comm_core/barrier.cuh``).

        Raises:
            PeerStalledError: as `check`.
        """
        self.check()
        return self._stream(), self._session

    # Stalls and the end

    def look(self) -> bool:
        """See `comm_core.windows.watchdog.Watched`."""
        if self._closed:
            return False
        if self._stall is None:
            stall = read_stall(self._record_bytes.raw)
            if stall is not None:
                self._stall = stall
                _log.error("%s", self._stall_text(stall))
        return self._stall is None

    def check(self) -> None:
        """Raise if a kernel of this session has given up or was told to.

        Raises:
            PeerStalledError: it names the rank that was waited for.
        """
        if self._stall is None and self._record_state.value:
            self.look()
        if self._stall is not None:
            raise PeerStalledError(self._stall_text(self._stall), self._stall.waited_for, self._stall.reporter)

    def _stall_text(self, stall: Stall) -> str:
        where = f"operation {stall.epoch} of this session, {stall.operation_text}"
        rank = self._group.rank
        if stall.kind == StallKind.BAD_ANNOUNCEMENT:
            return (
                f"rank {rank}: rank {stall.waited_for} announced memory that does not exist ({where}): the ranks run "
                "different calls or versions. The communicator is broken on every rank"
            )
        outputs = "The outputs are poisoned" if self._struct.poison else "What the outputs hold is undefined"
        if stall.kind == StallKind.ABORTED and stall.reporter == stall.waited_for:
            # A host has said so (`give_up`), and of itself.
            return (
                f"rank {rank} was told that rank {stall.reporter} failed ({where}). {outputs} and the communicator "
                "is broken on every rank"
            )
        who = "gave up" if stall.kind == StallKind.GAVE_UP else f"was told that rank {stall.reporter} gave up"
        return (
            f"rank {rank} {who} waiting for rank {stall.waited_for} ({where}) after {self._timeout_s:g} s "
            "(COMM_TIMEOUT_S). That rank died, skipped a call, is late, or its GPU is busy with something that never "
            "ends; kernels that are loaded while others spin can do that too (CUDA_MODULE_LOADING=EAGER avoids it). "
            f"{outputs} and the communicator is broken on every rank"
        )

    def give_up(self, waited_for: int, reporter: int | None = None) -> None:
        """Break the session on every rank from the host, as a kernel does that has waited too long. Local.

        Kernels of the peers that wait end at once, their later calls raise. Called where something else than a kernel
        has failed in the middle of an operation. It does not wait for work on the current stream.

        Args:
            waited_for: the group rank that is to be named.
            reporter: the group rank that has given up first, where this one only passes it on.
        """
        first = self._group.rank if reporter is None else reporter
        word = torch.tensor([abort_code(first, waited_for) - (1 << 32)], dtype=torch.int32)
        code = word.view(torch.uint8)
        if self._device.type != "cuda":
            for address in self._struct.signals:
                self._view(address, code.numel()).copy_(code)
            return
        code = code.pin_memory()
        stream = torch.cuda.Stream(self._device, priority=-1)
        with _cuda.device_guard(self._device), torch.cuda.stream(stream):
            for address in self._struct.signals:
                self._view(address, code.numel()).copy_(code, non_blocking=True)
            stream.synchronize()

    # For who takes the memory away and brings it back

    def allocations(self) -> list[Mapped]:
        """Return all memory that the ranks share, in the order in which it was made."""
        return [self._signals, *(window.mapped for window in self.windows)]

    def regroup(self, group: Group) -> None:
        """Go on with another group of the same ranks in the same order."""
        self._group = group
        self.windows.regroup(group)
        self._teardown.group = group

    def release_alone(self) -> None:
        """Release everything on this rank alone, where no other rank has anything of it mapped.

        Raises:
            CommError: something can't be released; it may be called again.
        """
        self._closed = True
        self.windows.release_alone()
        self._teardown.release_alone()
        self._tables.clear()

    def abandon(self) -> int:
        """Give everything up: keep what a peer may still write until the process ends; return how many bytes."""
        self._closed = True
        return self.windows.abandon() + self._teardown.abandon()

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`. What a lost peer may still write is kept until the process ends."""
        self._closed = True
        with _cuda.device_guard(self._device):
            _cuda.synchronize(self._device)
            try:
                self.windows.close(timeout_s)
            except GroupTimeoutError as error:
                text = f"{error}; so are the {self._teardown.abandon()} bytes that the session was opened with"
                raise GroupTimeoutError(error.what, error.missing, text) from error
            self._teardown.close(timeout_s)
        self._tables.clear()


def _same_place(copy: Copy) -> Copy:
    """Return a copy from staging to the destination of what `copy` has written into staging."""
    levels = tuple(level._replace(source_pitch=level.target_pitch) for level in copy.levels)
    return copy._replace(source=0, source_offset=copy.target_offset, levels=levels)
