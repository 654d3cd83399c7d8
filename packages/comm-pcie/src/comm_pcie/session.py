"""A session of the peer-to-peer route: plans as copies of the copy engines, straight into registered outputs."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from comm_core import _cuda
from comm_core.errors import CudaCallError, TransportError, UnsupportedError
from comm_core.transport import strided
from comm_core.transport.interface import Properties, Staging
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import MAX_RANKS, Operation, Stall, StallKind
from comm_core.windows.table import compile_plan
from comm_core.windows.window import MappedWindow
from comm_pcie import copies
from comm_pcie.calls import BoundStream, buffer_bytes, refuse_head_chunks, refuse_output
from comm_pcie.exchange import Counters, Engine

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["PcieSession"]

_log = logging.getLogger("comm_core")

_LOCAL_BLOCKS = 64
"""Blocks that copy this rank's own share beside the copy engines; 32 keep up with NVLink 4."""
_BYTES_PER_BLOCK = 1 << 14
"""Least work of such a block."""
_SMALL = 1
"""Number of the window of small gathers, which the copy engines are tested on."""
_TEST_ROW, _TEST_ROWS = 4099, 3


class _Prepared(NamedTuple):
    """A plan as it is enqueued. What the module is given addresses of is held here.

    Attributes:
        table_at: address of the table.
        packed_at: address of the copies.
        table: on the device.
        packed: the copies, on the host.
        num_copies: how many they are.
        blocks: of the kernel that copies this rank's own share.
    """

    table_at: int
    packed_at: int
    table: torch.Tensor
    packed: ctypes.Array[ctypes.c_char]
    num_copies: int
    blocks: int


class PcieSession(WindowSession):
    """Copies between registered outputs of one group. Opened by `PcieTransport.open`; see `TransportSession`.

    Outputs come from `allocate_output`, and all ranks pass the one of the same registration. Calls stay on the stream
    of the first one. Small gathers and barriers are those of `WindowSession`.

    Args:
        stages: the transaction of the opening.
        windows: the loaded module of windows.
        module: the loaded module of the exchange.
        device: this rank's device.
        form: of peer memory.
        timeout_s: deadline of every wait on the device.
        blocks_per_peer: blocks of a small gather for each destination; equal on all ranks.
        poison: whether an aborted operation fills its output with NaN bytes.
    """

    properties = Properties(peer_pointers=True, graph_capturable=True, registered_outputs=True, shared_resources=True)
    route = "p2p"

    def __init__(
        self,
        stages: Transaction,
        windows: Module,
        module: Module,
        device: torch.device,
        *,
        form: str,
        timeout_s: float,
        blocks_per_peer: int,
        poison: bool = True,
    ) -> None:
        self._prepared: dict[Plan, _Prepared] = {}
        self._outputs: dict[int, ctypes.Array[ctypes.c_void_p]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._registered: dict[int, MappedWindow] = {}
        self._bound = BoundStream(lambda: _cuda.raw_stream(device.index))
        self._graphs_failed = False
        super().__init__(
            stages,
            windows,
            device,
            form=form,
            # Nothing is staged: outputs are registered.
            staging_bytes=1,
            timeout_s=timeout_s,
            blocks_per_peer=blocks_per_peer,
            poison=poison,
        )
        self._engine = stages.step("engine", lambda: self._make_engine(module), lambda engine: self._end(engine))
        stages.step("self-test of the copies", self._test_copies)

    # Set-up

    def _make_engine(self, module: Module) -> Engine:
        with _cuda.device_guard(self._device):
            return Engine(module)

    def _end(self, engine: Engine) -> None:
        with _cuda.device_guard(self._device):
            # Its graphs and lanes must be idle; what waits on a peer ends by its own deadline.
            _cuda.synchronize(self._device)
            engine.close()

    def _test_copies(self) -> None:
        """Exchange a pattern by pitched copies of the copy engines, as calls do, and compare every byte, twice.

        Raises:
            TransportError: a byte is wrong; the text names the rank that it should have come from.
            PeerStalledError: a rank did not take part.
        """
        rank, size = self._group.rank, self._group.size
        window = self.windows[_SMALL]
        plan = _test_plan(rank, size)
        problem = ""
        for shift in range(2):
            own = _pattern(rank + shift, self._device)
            window.local.fill_(0xEE)
            # Nobody may write here before it has been spoilt; the announcement comes after it in the stream.
            self._launch(plan, own, window, Operation.SELF_TEST)
            _cuda.synchronize(self._device)
            self.check()
            received = window.local[: plan.target_bytes].view(_TEST_ROWS, size, _TEST_ROW)
            for peer in range(size):
                expected = _pattern(peer + shift, self._device)
                wrong = (received[:, peer].reshape(-1) != expected).nonzero()
                if wrong.numel() and not problem:
                    problem = (
                        f"{wrong.numel()} of {expected.numel()} bytes from rank {peer} are wrong, the first at "
                        f"{int(wrong[0])}"
                    )
        # Only now: a rank that left between the rounds would let the others wait for it until their deadline.
        if problem:
            raise TransportError(
                f"self-test of the copy engines: {problem}: what copy engines write into peer memory does not arrive "
                "on this machine (IOMMU or ACS settings?)"
            )

    # Calls

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`.

        Raises:
            UnsupportedError: a head-chunk call, another stream than the first call's, or a geometry that is new
                inside of a capture; nothing was communicated.
            ArgumentValueError: `destination` is no registered output.
        """
        self.check()
        window = self._registered.get(destination.data_ptr())
        refuse_head_chunks(plan)
        if window is None or plan.target_bytes > window.nbytes:
            found = self.windows.find(destination.data_ptr(), plan.target_bytes)
            raise refuse_output(plan, found is not None)
        self._bound.bind()
        self._launch(plan, sources[0], window, Operation.of(plan.operation))

    def _launch(self, plan: Plan, source: torch.Tensor, window: MappedWindow, operation: int) -> None:
        prepared = self._prepared.get(plan) or self._prepare(plan)
        engine = self._engine
        try:
            engine.exchange(
                self._stream(),
                self._session,
                engine.address,
                prepared.table_at,
                prepared.packed_at,
                ctypes.addressof(self._outputs.get(window.number) or self._add_outputs(window)),
                source.data_ptr(),
                plan.target_bytes,
                prepared.num_copies,
                window.number,
                operation,
                prepared.blocks,
                # One copy, with its kernels and events, costs the host 42 us, its graph 18 (two H200).
                not _cuda.is_capturing(),
                0,
            )
        except CudaCallError as error:
            # Part of it may be under way, so this is no refusal: the peers wait for the rest until their deadline.
            raise TransportError(f"{plan.operation}: {error}") from error
        if not self._graphs_failed and engine.graphs_failed:
            self._graphs_failed = True
            _log.warning("pcie: calls are enqueued one by one from now on: a graph can't be made: %s", engine.why())

    def _prepare(self, plan: Plan) -> _Prepared:
        if _cuda.is_capturing():
            # Nothing was communicated, so this breaks nothing (as a TransportError would).
            raise UnsupportedError(
                f"{plan.operation}: this geometry is seen for the first time while a graph is captured, and its "
                "table would have to be copied to the device: make the call once before the capture"
            )
        found = copies.boxes(plan)
        table = torch.frombuffer(bytearray(compile_plan(plan).data), dtype=torch.uint8).to(self._device)
        packed = ctypes.create_string_buffer(copies.pack(found))
        local = plan.send_bytes[plan.rank]
        prepared = _Prepared(
            table.data_ptr(),
            ctypes.addressof(packed),
            table,
            packed,
            len(found),
            min(_LOCAL_BLOCKS, -(-local // _BYTES_PER_BLOCK)),
        )
        _cuda.synchronize(self._device)
        self._prepared[plan] = prepared
        return prepared

    def _add_outputs(self, window: MappedWindow) -> ctypes.Array[ctypes.c_void_p]:
        addresses = (*window.peer_pointers, *[0] * (MAX_RANKS - len(window.peer_pointers)))
        return self._outputs.setdefault(window.number, (ctypes.c_void_p * MAX_RANKS)(*addresses))

    # Memory

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output in a window of its own; the only kind that exchanges take. Collective."""
        nbytes = dtype.itemsize
        for size in shape:
            nbytes *= size
        window = self.window(nbytes)
        self._registered[window.address] = window
        return window.local.view(dtype).view(tuple(shape))

    def input_buffer(self, out: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return memory to build the operand of a call into `out` in, as a view of `shape`. Local.

        This route reads operands where they are, so the buffer is ordinary memory and using it saves nothing here; it
        is there so that callers need not tell the routes apart. One buffer a registered output, of its size.

        Raises:
            ArgumentValueError: `out` is not exactly what `allocate_output` returned (a view of it that begins
                elsewhere is not), or `shape` does not fit.
            ClosedError: `close` was called.
        """
        self.check_open("input_buffer")
        window = self._registered.get(out.data_ptr())
        nbytes = buffer_bytes(out, shape, None if window is None else window.nbytes)
        assert window is not None
        buffer = self._inputs.get(window.number)
        if buffer is None:
            buffer = torch.empty(window.nbytes, dtype=torch.uint8, device=self._device)
            self._inputs[window.number] = buffer
        return strided.byte_view(buffer, 0, nbytes).view(out.dtype).view(tuple(shape))

    # The end

    @property
    def counters(self) -> Counters:
        """How calls were enqueued so far."""
        return self._engine.counters

    def _stall_text(self, stall: Stall) -> str:
        if stall.kind == StallKind.BAD_ANNOUNCEMENT:
            return (
                f"rank {self._group.rank}: rank {stall.waited_for} passed another output than this rank (operation "
                f"{stall.epoch} of this session, {stall.operation_text}): all ranks must pass the output of the same "
                "allocate_output. The communicator is broken on every rank, and registered outputs may be overwritten"
            )
        return super()._stall_text(stall)

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`."""
        super().close(timeout_s)
        self._prepared.clear()
        self._outputs.clear()
        self._inputs.clear()
        self._registered.clear()


def _test_plan(rank: int, world_size: int) -> Plan:
    """Plan a gather of rows that lie apart at the receiver: row i of rank r is row ``i * world_size + r`` there."""
    levels = (Level(_TEST_ROWS, _TEST_ROW, world_size * _TEST_ROW),)
    sends = tuple(Copy(peer, 0, 0, rank * _TEST_ROW, levels, _TEST_ROW) for peer in range(world_size))
    receives = tuple(Copy(peer, 0, 0, peer * _TEST_ROW, levels, _TEST_ROW) for peer in range(world_size))
    return Plan("self_test", rank, world_size, sends, receives, 1, world_size * _TEST_ROWS * _TEST_ROW)


def _pattern(rank: int, device: torch.device) -> torch.Tensor:
    """Return the bytes that `rank` sends in the self-test; no two ranks' agree anywhere."""
    at = torch.arange(_TEST_ROW * _TEST_ROWS, device=device, dtype=torch.int32)
    return ((at * 137 + rank * 19 + 3) % 251).to(torch.uint8)
