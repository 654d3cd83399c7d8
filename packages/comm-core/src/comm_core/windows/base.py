"""What every session over windows has: signals, windows, the record of a stall, and an end."""

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, ClassVar

import torch

from comm_core import _cuda
from comm_core.errors import ClosedError, GroupTimeoutError, PeerStalledError
from comm_core.memory.peer import Mapped, map_jointly
from comm_core.windows.launch import SessionStruct, WindowStruct
from comm_core.windows.signals import RECORD_BYTES, SIGNAL_BYTES, Stall, StallKind, abort_code, read_stall
from comm_core.windows.window import MAX_WINDOWS, WindowSet

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.group import Group

__all__ = ["SignalSession", "closed_error"]

_log = logging.getLogger("comm_core")


class SignalSession:
    """Windows and signals of one group, for kernels that are given a ``comm::Session``.

    A subclass allocates its windows in `_allocate`; after this constructor it tests itself and has itself watched
    (`comm_core.windows.watchdog.watch`).

    Args:
        stages: the transaction of the opening.
        device: this rank's device.
        form: of peer memory.
        timeout_s: deadline of every wait on the device.
        poison: whether an aborted operation fills its destination with NaN bytes.
    """

    noun: ClassVar[str] = "communicator"
    """What a stall breaks, for texts."""
    what: ClassVar[str] = "this session"
    """The session, for texts."""
    call: ClassVar[str] = "a call"
    """What is made with it, for texts."""

    def __init__(
        self, stages: Transaction, device: torch.device, *, form: str, timeout_s: float, poison: bool = True
    ) -> None:
        self._group = stages.group
        self._device = device
        self._ordinal: int = device.index
        self._teardown = stages.teardown
        self._stall: Stall | None = None
        self._closed = False
        self._last_stream: int | None = None
        self._signals = signals = map_jointly(stages, SIGNAL_BYTES, device, form=form, what="signals")
        self.memory_form = signals.form
        self.windows = WindowSet(self._group, device, signals.form, self._view)
        self._allocate(stages)
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

    @property
    def _timeout_s(self) -> float:
        """Deadline of every wait on the device, as the kernels are given it."""
        return self._struct.timeout_ns / 1e9

    # Set-up

    def _allocate(self, stages: Transaction) -> None:
        """Allocate the windows that the session begins with."""

    def _self_test(self) -> None:
        """Exchange what can be compared, by the way that calls go; raises where it does not arrive."""
        raise NotImplementedError

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

    # Calls

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

    def launch_context(self) -> tuple[int, int]:
        """Return the current stream and the host address of the packed ``comm::Session``, for a launch of kernels.

        For whoever brings kernels that signal by this session. The stream is ordered after the session's last one;
        the caller has made the device current. The struct must be copied before the next call of this session (a
        window that is added replaces it), and what is launched must be whole operations: each rank announces to every
        other one and marks its data as done (see ``include/comm_core/barrier.cuh``).

        Raises:
            CommError: as `check`, of the kind of session that this is.
        """
        # Not for stalls alone: one that is being closed, or detached, may have no memory behind its addresses.
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
        """Raise if a kernel of this session has given up or was told to, or if its end has begun. Every call does it.

        Raises:
            ClosedError: as `check_open`.
            PeerStalledError: it names the rank that was waited for.
        """
        if self._closed:
            self.check_open()
        if self._stall is None and self._record_state.value:
            self.look()
        if self._stall is not None:
            raise PeerStalledError(self._stall_text(self._stall), self._stall.waited_for, self._stall.reporter)

    def check_open(self, call: str | None = None) -> None:
        """Raise if `close` was called, whether or not it succeeded: peers may have unmapped memory already.

        Args:
            call: what is refused, for the text.

        Raises:
            ClosedError: `close` was called on this rank.
        """
        if self._closed:
            over = self.windows.closed and self._teardown.closed
            raise closed_error(self._group.rank, call or self.call, self.what, over=over)

    def _stall_text(self, stall: Stall) -> str:
        where = f"operation {stall.epoch} of this session, {stall.operation_text}"
        rank = self._group.rank
        if stall.kind == StallKind.BAD_ANNOUNCEMENT:
            return (
                f"rank {rank}: rank {stall.waited_for} announced memory that does not exist ({where}): the ranks run "
                f"different calls or versions. The {self.noun} is broken on every rank"
            )
        outputs = "The outputs are poisoned" if self._struct.poison else "What the outputs hold is undefined"
        if stall.kind == StallKind.ABORTED and stall.reporter == stall.waited_for:
            # A host has said so (`give_up`), and of itself.
            return (
                f"rank {rank} was told that rank {stall.reporter} failed ({where}). {outputs} and the {self.noun} "
                "is broken on every rank"
            )
        who = "gave up" if stall.kind == StallKind.GAVE_UP else f"was told that rank {stall.reporter} gave up"
        return (
            f"rank {rank} {who} waiting for rank {stall.waited_for} ({where}) after {self._timeout_s:g} s "
            "(COMM_TIMEOUT_S). That rank died, skipped a call, is late, or its GPU is busy with something that never "
            "ends; kernels that are loaded while others spin can do that too (CUDA_MODULE_LOADING=EAGER avoids it). "
            f"{outputs} and the {self.noun} is broken on every rank"
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

    def abandon(self) -> int:
        """Give everything up: keep what a peer may still write until the process ends; return how many bytes."""
        self._closed = True
        return self.windows.abandon() + self._teardown.abandon()

    def close(self, timeout_s: float | None = None) -> None:
        """Release everything. Collective. What a lost peer may still write is kept until the process ends.

        Raises:
            JointError: something can't be released on some rank; it may be called again.
            GroupTimeoutError: a rank did not come.
        """
        self._closed = True
        with _cuda.device_guard(self._device):
            _cuda.synchronize(self._device)
            try:
                self.windows.close(timeout_s)
            except GroupTimeoutError as error:
                text = f"{error}; so are the {self._teardown.abandon()} bytes that the session was opened with"
                raise GroupTimeoutError(error.what, error.missing, text) from error
            self._teardown.close(timeout_s)


def closed_error(rank: int, call: str, what: str, *, over: bool) -> ClosedError:
    """Return the error of a call that comes after a `close` was begun.

    Args:
        rank: this rank.
        call: what is refused.
        what: the session, in words.
        over: whether everything was released, or given up, on this rank.
    """
    if over:
        return ClosedError(f"rank {rank}: {call}: {what} is closed")
    return ClosedError(
        f"rank {rank}: {call}: closing {what} has begun and is not over, so other ranks may have unmapped its memory "
        "already; call close on every rank again"
    )
