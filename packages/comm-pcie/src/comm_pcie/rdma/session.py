"""A session of the routes over NICs: every payload, or those across NUMA nodes, by RDMA writes of each rank's NIC.

A call blocks the host::

    describe the strides to the NIC          what changes with the geometry; a peer writes by keys of this rank
    operand ► landing buffer                 left out where the caller has built it there
    ─── opening barrier ───────────────────  all keys are known, all outputs are free
    own share and mapped peers: copies       enqueued, while the NIC works
    landing buffer ► peers: RDMA writes      each with a message; until those of all peers have come
    flush                                    where the GPU does not order what a NIC writes
    ─── closing barrier ───────────────────  everybody has everything

From the first step on, whatever fails on one rank ends the call on all of them: the rank tells the group, its queue
pairs are stopped and drained, and its output is filled with NaN bytes. The communicator is then broken everywhere.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from comm_core import _cuda
from comm_core.consensus import Transaction, describe, kept_error
from comm_core.errors import (
    ArgumentValueError,
    GroupTimeoutError,
    JointError,
    PeerStalledError,
    TransportError,
    UnsupportedError,
)
from comm_core.transport import strided
from comm_core.transport.interface import Properties, Staging, TransportSession
from comm_core.transport.plan import Plan
from comm_core.windows.base import closed_error
from comm_core.windows.signals import Operation
from comm_core.windows.window import MAX_WINDOWS
from comm_pcie.calls import BoundStream, buffer_bytes, refuse_head_chunks, refuse_output
from comm_pcie.rdma.engine import Counters, Kind, Outcome, Quiesced
from comm_pcie.rdma.outputs import RegisteredOutput, register
from comm_pcie.rdma.transfers import copies_to, refuse

if TYPE_CHECKING:
    from comm_core.consensus import Teardown
    from comm_core.windows.window import MappedWindow
    from comm_pcie.rdma.abort import AbortWords
    from comm_pcie.rdma.engine import RdmaEngine
    from comm_pcie.rdma.geometry import Geometry
    from comm_pcie.rdma.port import DevicePort

__all__ = ["Parts", "RdmaSession", "quiesce_ns"]

_log = logging.getLogger("comm_core")

QUIESCE_S = 10.0
"""Seconds that a NIC has to retire what it was given, once its queue pairs were stopped; see `quiesce_ns`."""

COPIES_S = 0.25
"""Seconds that copies of ranks of the same node, which nobody can call back, have to land before the NaN bytes."""

_leaked: list[RdmaSession] = []
"""Sessions whose NIC may still write: nothing of them may be freed as long as the process lives."""


def quiesce_ns(timeout_s: float) -> int:
    """Return how long a NIC has to retire what it was given, in nanoseconds, for a group's deadline in seconds.

    The others wait for the word of a rank that stops its NIC, in a call and once more in `close`: they must hear
    what it found before they take the rank itself for gone.
    """
    return int(min(QUIESCE_S, timeout_s / 4) * 1e9)


class Parts(NamedTuple):
    """What a session is put together from; all of it belongs to the transaction of the opening.

    Attributes:
        port: of the device.
        engine: the NIC, connected.
        words: the abort words of the hosts.
        route: ``"rdma"`` or ``"hybrid"``.
        peers: ranks that are reached by NIC, in the order in which they are written to.
        mapped: the other ranks, whose outputs are written by copies.
        timeout_s: deadline of an exchange.
        poison: whether an aborted call fills its output with NaN bytes.
    """

    port: DevicePort
    engine: RdmaEngine
    words: AbortWords
    route: str
    peers: tuple[int, ...]
    mapped: tuple[int, ...]
    timeout_s: float
    poison: bool


class RdmaSession(TransportSession):
    """Exchanges over NICs between registered outputs. Opened by `comm_pcie.rdma.opening`; see `TransportSession`.

    Outputs come from `allocate_output`, and all ranks pass the one of the same registration. Calls take one batch,
    stay on the stream of the first one, block the host, and can't be captured.

    Args:
        stages: the transaction of the opening.
        parts: what it is put together from.
    """

    properties = Properties(peer_pointers=True, registered_outputs=True, max_batch=1, shared_resources=True)

    def __init__(self, stages: Transaction, parts: Parts) -> None:
        self._group = stages.group
        self._port = parts.port
        self._engine = parts.engine
        self._words = parts.words
        self._parts = parts
        self.route = parts.route
        self._mapped = (stages.group.rank, *parts.mapped)
        self._timeout_ns = int(parts.timeout_s * 1e9)
        self._bound = BoundStream(parts.port.stream)
        self._outputs: dict[int, RegisteredOutput] = {}
        self._teardowns: list[Teardown] = []
        self._epoch = 0
        self._failure: TransportError | None = None
        self._quiesced: Quiesced | None = None
        # Whether a close was begun, and whether there is nothing left for one to do.
        self._ending = self._closed = False

    @property
    def counters(self) -> Counters:
        """What the NIC has done so far."""
        return self._engine.counters

    @property
    def peers(self) -> tuple[int, ...]:
        """Ranks that are reached by NIC, in the order in which they are written to."""
        return self._parts.peers

    @property
    def teardown_safe(self) -> bool:
        """Whether everything can be released as far as this rank knows: its NIC holds on to nothing."""
        return self._quiesced is None or self._quiesced.teardown_safe

    # Calls

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`. Blocks until the output is complete on every rank.

        Raises:
            UnsupportedError: a capture, another stream, or a head-chunk call; nothing was communicated.
            ArgumentValueError: what NICs can't address (a second batch, rows more than 65,535 bytes apart);
                `destination` is no registered output; the operand lies in its input buffer and does not begin there.
                Nothing was communicated.
            PeerStalledError: a rank did not come or has given up; it is named.
            TransportError: the NIC failed.
        """
        try:
            self.check()
        except TransportError:
            # What the caller takes for a result must not look like one.
            self._spoil(self._outputs.get(destination.data_ptr()))
            raise
        output, geometry = self._admitted(plan, sources[0], destination)
        self.run(plan, geometry, sources[0], output)

    def _admitted(
        self, plan: Plan, source: torch.Tensor, destination: torch.Tensor
    ) -> tuple[RegisteredOutput, Geometry]:
        """Return what a call is made with, or refuse it by its arguments, which are the same on all ranks."""
        refuse_head_chunks(plan)
        if _cuda.is_capturing():
            raise UnsupportedError(
                f"{plan.operation}: route {self.route!r} can't be captured in a CUDA graph: the host posts to the "
                "NIC and waits for it in each call, and a replay would do neither. Use the p2p route "
                "(COMM_ULYSSES_PCIE_ROUTE=p2p), or call it outside of the graph"
            )
        output = self._outputs.get(destination.data_ptr())
        if output is None or plan.target_bytes > output.nbytes:
            inside = self._port.windows.windows.find(destination.data_ptr(), 1)
            raise refuse_output(plan, inside is not None)
        begin, at = output.landing_address, source.data_ptr()
        if at != begin and begin <= at < begin + output.nbytes:
            raise ArgumentValueError(
                f"{plan.operation}: the operand lies {at - begin} bytes inside the input buffer of this output: the "
                "NIC reads the buffer from its beginning on, so build the operand there (input_buffer), or elsewhere"
            )
        geometry = refuse(plan, self._parts.peers, output.nbytes, output.nbytes)
        self._bound.bind()
        return output, geometry

    def run(self, plan: Plan, geometry: Geometry, source: torch.Tensor, output: RegisteredOutput) -> None:
        """Make a call that was admitted; whatever fails in it breaks the session on every rank. Collective."""
        self._epoch += 1
        try:
            self._steps(plan, geometry, source, output, Operation.of(plan.operation))
        except BaseException as error:
            outcome = self._broken(plan, error, output)
            if outcome is error:
                raise
            raise outcome from error

    def _steps(
        self, plan: Plan, geometry: Geometry, source: torch.Tensor, output: RegisteredOutput, operation: Operation
    ) -> None:
        port = self._port
        self._require("its NIC could not be told the strides", output.pair.rebind(geometry, self._timeout_ns))
        if source.data_ptr() != output.landing_address:
            # Operand and output are of one size: each call moves as much away as it gets.
            output.landing[: plan.target_bytes].copy_(strided.byte_view(source, 0, plan.target_bytes))
        port.barrier(operation)
        told = self._told() if self._parts.mapped else None
        if told is not None:
            # Whoever has given up fills its output; copies that begin now would overwrite that.
            raise told
        port.copy(copies_to(plan, self._mapped), source, output.window.peer_pointers, output.output)
        self._require("the exchange failed", output.pair.exchange(geometry, self._epoch, self._timeout_ns))
        port.flush()
        port.barrier(operation)

    def _require(self, what: str, outcome: Outcome) -> None:
        if outcome.ok:
            return
        rank = self._group.rank
        told = self._told() if outcome.kind is Kind.ABORTED else None
        if told is not None:
            raise told
        if outcome.kind is Kind.DEADLINE:
            raise PeerStalledError(
                f"rank {rank} gave up waiting for rank {outcome.peer} (exchange {self._epoch}) after "
                f"{outcome.elapsed_ns / 1e9:.3g} s: {outcome.reason}",
                outcome.peer,
                rank,
            )
        raise _NicError(f"rank {rank}: {what} (exchange {self._epoch}): {outcome.reason}", outcome.peer)

    # Failures

    def _told(self) -> PeerStalledError | None:
        """Return the error of an abort that another rank's host has started, or None."""
        told = self._words.told()
        if told is None:
            return None
        reporter, waited_for = told
        why = "failed" if reporter == waited_for else f"gave up on rank {waited_for}"
        where = f"exchange {self._epoch} of this session"
        text = f"rank {self._group.rank} was told that rank {reporter} {why} ({where})"
        return PeerStalledError(text, waited_for, reporter)

    def _broken(self, plan: Plan, error: BaseException, output: RegisteredOutput | None) -> BaseException:
        """Break the session on all ranks and return what this rank raises."""
        rank = self._group.rank
        waited_for, reporter = rank, rank
        if isinstance(error, (PeerStalledError, _NicError)):
            # A kernel that was stopped, or a NIC whose peer has stopped after it was told, knows less than the hosts
            # have told each other: each tells all before it stops anything.
            error = self._told() or error
        if isinstance(error, PeerStalledError):
            waited_for, reporter = error.waited_for, error.reporter
        elif isinstance(error, _NicError) and error.peer >= 0:
            waited_for = error.peer
        text = f"{plan.operation} over {self.route!r} on rank {rank}: {describe(error)}"
        steps = (
            ("tell the hosts", lambda: self._words.publish(waited_for, reporter)),
            ("tell the kernels", lambda: self._port.windows.give_up(waited_for, reporter)),
            ("stop the NIC", self._quiesce),
            ("spoil the output", lambda: self._spoil(output)),
        )
        for name, step in steps:
            # All of them, whatever one does: the others wait for the first two, and the last two are this rank's own.
            try:
                step()
            except Exception as failure:
                text += f"; could not {name}: {describe(failure)}"
        if not self.teardown_safe:
            assert self._quiesced is not None
            text += f"; its NIC holds on to memory ({self._quiesced.reason}), so this process should end"
        outputs = "the outputs are poisoned" if self._parts.poison else "what the outputs hold is undefined"
        text += f". The communicator is broken on every rank; {outputs}"
        if isinstance(error, PeerStalledError):
            self._failure = PeerStalledError(text, error.waited_for, error.reporter)
        else:
            self._failure = TransportError(text)
        _log.error("%s", text)
        return error if isinstance(error, KeyboardInterrupt) else self._failure

    def _spoil(self, output: RegisteredOutput | None) -> None:
        # After the NIC was stopped: what peers send later must not end up among the bytes that say "this is nothing".
        if output is not None and self._parts.poison:
            if self._parts.mapped:
                time.sleep(COPIES_S)
            output.output.fill_(0xFF)
            self._port.settle()

    def _quiesce(self) -> Quiesced:
        if self._quiesced is None or not self._quiesced.teardown_safe:
            self._quiesced = self._engine.quiesce(quiesce_ns(self._parts.timeout_s))
        return self._quiesced

    def check(self) -> None:
        """See `TransportSession.check`: what an earlier call, a kernel, or an event of the NIC has broken.

        An event (the port went down, the GID changed) is told to the group at once, so that no rank waits for its
        deadline.

        Raises:
            ClosedError: `close` was called, whether or not it succeeded.
        """
        self._check_open("a call")
        if self._failure is not None:
            raise self._failure
        error: TransportError | None = self._told()
        if error is None:
            try:
                self._port.windows.check()
            except PeerStalledError as stalled:
                error = stalled
        problem = "" if error is not None else self._engine.problem
        if problem:
            error = _NicError(f"rank {self._group.rank}: its NIC failed: {problem}", -1)
        if error is not None:
            raise self._broken(_NO_CALL, error, None) from None

    def _check_open(self, call: str) -> None:
        if self._ending or self._closed:
            raise closed_error(self._group.rank, call, f"this session of route {self.route!r}", over=self._closed)

    # The rest of the interface

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`; it goes over the windows' mapped memory."""
        self.check()
        self._port.windows.all_gather_small(value, out)

    def barrier(self) -> None:
        """See `TransportSession.barrier`."""
        self.check()
        self._port.windows.barrier()

    def window(self, nbytes: int) -> MappedWindow:
        """See `TransportSession.window`."""
        self.check()
        return self._port.windows.window(nbytes)

    def launch_context(self) -> tuple[int, int]:
        """See `WindowSession.launch_context`: kernels that store into windows go over the GPUs' mapped memory."""
        self.check()
        return self._port.windows.launch_context()

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a registered output, the only kind that exchanges take, with its landing buffer. Collective.

        Calls of any geometry that fits its bytes can use it: a new geometry is described to the NIC, and nothing is
        registered anew.
        """
        self.check()
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        if len(self._port.windows.windows) >= MAX_WINDOWS:
            raise ArgumentValueError(
                f"all {MAX_WINDOWS} windows of this session are in use: allocate outputs once and reuse them"
            )
        with Transaction(self._group, f"allocate output {len(self._teardowns)}") as stages:
            output = register(stages, self._port, self._engine, nbytes, f"output {len(self._teardowns)}")
            self._teardowns.append(stages.commit())
        self._outputs[output.address] = output
        return output.output.view(dtype).view(tuple(shape))

    def input_buffer(self, out: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the landing buffer behind `out` as a view of `shape`: an operand that is built there is not copied.

        Every exchange into `out` reads it, and one with another operand overwrites it.

        Raises:
            ArgumentValueError: `out` is not exactly what `allocate_output` returned, or `shape` does not fit.
            ClosedError: `close` was called.
        """
        self._check_open("input_buffer")
        output = self._outputs.get(out.data_ptr())
        nbytes = buffer_bytes(out, shape, None if output is None else output.nbytes)
        assert output is not None
        return output.landing[:nbytes].view(out.dtype).view(tuple(shape))

    # The end

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`. May be called again, on all ranks, after it failed.

        First all ranks say whether their NICs are done with the memory. If one can't, nobody releases anything.

        Raises:
            JointError: a NIC is not done, or something could not be released on some rank.
            GroupTimeoutError: a rank did not come.
        """
        if self._closed:
            return
        # Whatever becomes of this: from here on another rank may release what a call would use.
        self._ending = True
        quiesced = self._quiesce()
        vote = {"safe": quiesced.teardown_safe, "reason": quiesced.reason}
        try:
            votes = self._group.gather("close: are the NICs done", vote, timeout_s=timeout_s)
        except GroupTimeoutError as error:
            raise self._abandon(error) from error
        unsafe = {
            rank: str(vote["reason"])
            for rank, vote in enumerate(cast("list[dict[str, object]]", votes))
            if not vote["safe"]
        }
        if unsafe:
            if self not in _leaked:
                _leaked.append(self)
            raise JointError(
                "close: NICs hold on to memory, so nothing was released on any rank",
                unsafe,
                hint="close may be tried again; where that fails too, the processes must exit",
            )
        if self in _leaked:
            _leaked.remove(self)
        with _cuda.device_guard(self._port.device):
            _cuda.synchronize(self._port.device)
            try:
                while self._teardowns:
                    self._teardowns[-1].close(timeout_s)
                    self._teardowns.pop()
            except GroupTimeoutError as error:
                self._teardowns.pop()
                raise self._abandon(error) from error
            # Windows, and with the transaction of the opening everything else.
            self._closed = True
            try:
                self._port.windows.close(timeout_s)
            except JointError:
                self._closed = False
                raise
        self._outputs.clear()

    def _abandon(self, error: GroupTimeoutError) -> GroupTimeoutError:
        """Release what this rank alone uses, if its NIC is done; return `error` with what is kept."""
        self._closed = True
        self._outputs.clear()
        if not self.teardown_safe:
            _leaked.append(self)
            reason = cast("Quiesced", self._quiesced).reason
            text = f"{error}; this rank's NIC holds on to memory too ({reason}): nothing was released, let it exit"
            return GroupTimeoutError(error.what, error.missing, text)
        with _cuda.device_guard(self._port.device):
            kept = sum(teardown.abandon() for teardown in reversed(self._teardowns))
            kept += self._port.windows.abandon()
        self._teardowns.clear()
        return kept_error(error, kept) if kept else error


class _NicError(TransportError):
    """A failure of this rank's NIC, and the peer that it was about, or -1."""

    def __init__(self, text: str, peer: int) -> None:
        self.peer = peer
        super().__init__(text)


_NO_CALL = Plan("between two calls", 0, 1, (), (), 0, 0)
