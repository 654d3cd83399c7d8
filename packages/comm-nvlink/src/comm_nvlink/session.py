"""The NVLink session: exchanges by SMs and copy engines between windows of one host."""

from __future__ import annotations

import ctypes
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from comm_core import _cuda
from comm_core.errors import ArgumentValueError, PeerStalledError, TransportError, UnsupportedError
from comm_core.transport.dist import SMALL_BYTES, check_small
from comm_core.transport.interface import Properties, Staging
from comm_core.transport.plan import Plan
from comm_core.windows import gather
from comm_core.windows.launch import WindowStruct
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import Operation
from comm_core.windows.window import MAX_WINDOWS, MappedWindow
from comm_nvlink import widths
from comm_nvlink.board import Boards, share_boards
from comm_nvlink.launch import FLAG_BYTES, NO_SOURCES, Calls, Places, State
from comm_nvlink.pool import MemoryPool
from comm_nvlink.routes import Route, Settings, route
from comm_nvlink.table import Table, compile_copies, compile_table

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["NvlinkSession"]

_log = logging.getLogger("comm_nvlink")
_STAGING = 0
"""Number of the staging window; `comm_nvlink.launch.Calls` and the session of windows know it too."""
_GATHER_BYTES = 1 << 16
"""Bytes a rank of one round of a small gather, at least; more where the staging window has room."""
_SMALL_BYTES = 8 << 20
"""Bytes of the largest destination whose staging is doubled: what the staging of larger operands is larger by, twice,
and what a gather of 1 MiB from each of eight ranks takes."""
_MEET_NS = 20_000_000
"""How long a rank's host waits for another's place before its SMs do what the copy engines would. A rank that is
that early has nothing to gain: its device would wait for the other rank's announcement just as long."""
_MEET_CAPTURED_NS = 5_000_000_000
"""The same while a graph is captured: what is not known then is slower in every replay."""
_KEPT = 256
"""Geometries whose tables are kept, the last ones used: up to some 200 KB of the device each. Captured calls keep
theirs besides."""


class _Prepared:
    """What a geometry needs at every call.

    Attributes:
        chunks: of the rest; 0 where the SMs do everything.
        senders: blocks of the exchange kernel that serve peers; 0 where there is none.
        table: its table on the device.
        copies: the copy engines' table on the host, or None.
        after: the last fields of a call's arguments, which never change.
    """

    __slots__ = ("after", "chunks", "copies", "copies_address", "senders", "table", "table_address")

    def __init__(self, plan: Plan, way: Route, table: Table, copies: bytes | None, device: torch.device) -> None:
        self.table = torch.frombuffer(bytearray(table.data), dtype=torch.uint8).to(device)
        self.table_address = self.table.data_ptr()
        self.copies = None if copies is None else ctypes.create_string_buffer(copies, len(copies))
        self.copies_address = 0 if self.copies is None else ctypes.addressof(self.copies)
        self.senders, self.chunks = way.senders, way.chunks
        operation = int(Operation.of(plan.operation))
        self.after = (operation, way.senders, way.copiers, _STAGING, way.chunks, table.record_bytes, 0)


class NvlinkSession(WindowSession):
    """Plans between windows over NVLink. See `WindowSession`, whose windows, signals and end it has.

    Args:
        stages: the transaction of the opening.
        windows_module: the loaded module of windows.
        module: the loaded module of the NVLink exchange.
        pool_module: the loaded module of the memory pool; None where there is none.
        device: this rank's device.
        settings: what the group agreed on.
        form: of peer memory.
        staging_bytes: of the largest operand.
        pool_bytes: of the arena of `memory_pool`; 0 for none.
        timeout_s: deadline of every wait on the device.
        poison: whether an aborted operation fills its destination with NaN bytes.
    """

    properties = Properties(peer_pointers=True, graph_capturable=True, shared_resources=True)
    kernel = "portable"

    def __init__(
        self,
        stages: Transaction,
        windows_module: Module,
        module: Module,
        pool_module: Module | None,
        device: torch.device,
        *,
        settings: Settings,
        form: str,
        staging_bytes: int,
        pool_bytes: int = 0,
        timeout_s: float,
        poison: bool = True,
    ) -> None:
        self._nvlink = Calls(module)
        self._exchange = self._nvlink.exchange
        self._pool_module = pool_module
        self._pool: MemoryPool | None = None
        self._settings = settings
        self._pool_bytes = pool_bytes
        self._prepared: OrderedDict[Plan, _Prepared] = OrderedDict()
        # Of captured calls, whose graphs have the addresses of their tables.
        self._held: set[_Prepared] = set()
        self._boards: Boards | None = None
        # Eager calls that were enqueued, those of them that the hosts met for, and calls that were captured since the
        # last of them.
        self._eager = self._met = self._captured = 0
        self._state = State()
        self._state_address = ctypes.addressof(self._state)
        self._places = Places()
        self._places_address = ctypes.addressof(self._places)
        self._host_windows = ctypes.create_string_buffer(MAX_WINDOWS * WindowStruct.nbytes)
        super().__init__(
            stages,
            windows_module,
            device,
            form=form,
            staging_bytes=staging_bytes,
            timeout_s=timeout_s,
            blocks_per_peer=1,
            poison=poison,
        )
        if settings.measured and self._boards is not None:
            chosen = self._choose_widths(stages)
            self._settings = replace(settings, widths=chosen)
            _log.info("rows that the copy engines get in pieces: %s", widths.as_text(chosen))

    # Set-up

    def _allocate(self, stages: Transaction) -> None:
        size, staging_bytes = self._group.size, self._staging_bytes
        # The staging of large exchanges, where there can be any, and doubled staging for small ones: apart, because a
        # small one is stored while its receiver may still be copying a large one out.
        needed = -(-max(staging_bytes, _GATHER_BYTES * size) // 512) * 512
        all_small = needed <= _SMALL_BYTES and self._settings.senders and self._settings.engine_bytes > needed
        self._doubled_bytes = needed if all_small else min(_SMALL_BYTES, needed // 1024 * 512)
        self._doubled_offset = 0 if all_small else needed
        self.windows.add_in(stages, self._doubled_offset + 2 * self._doubled_bytes, "staging")
        self._flags = self.windows.add_in(stages, FLAG_BYTES, "flags")
        self.arena: MappedWindow | None = None
        if self._pool_bytes:
            self.arena = self.windows.add_in(stages, self._pool_bytes, "memory pool")
        boards = share_boards(stages)
        if isinstance(boards, Boards):
            self._boards = boards
        elif self._settings.senders == 0:
            raise UnsupportedError(
                f"max_sms=0 needs the copy engines, whose destinations the ranks' hosts tell each other: {boards}"
            )
        else:
            _log.warning("the copy engines are not used, so large exchanges are some 5 %% slower: %s", boards)

    def clear_signals(self) -> None:
        """See `SignalSession.clear_signals`: the flags of this transport as well."""
        with _cuda.device_guard(self._device):
            self._flags.local[:FLAG_BYTES].zero_()
        super().clear_signals()

    def _arm(self) -> None:
        super()._arm()
        for rank in range(self._group.size):
            self._state.flags[rank] = self._flags.peer_pointers[rank]
            if self._boards is not None:
                self._state.boards[rank] = self._boards.addresses[rank]
        self._state.windows = ctypes.addressof(self._host_windows)
        try:
            with _cuda.device_guard(self._device):
                self._nvlink.open(self._state_address)
            if self.arena is not None and self._pool_module is not None:
                self._pool = MemoryPool(self._pool_module, self.arena.address, self.arena.nbytes)
        except BaseException:
            # The step that fails is not undone.
            self._release()
            raise

    def _disarm(self) -> None:
        super()._disarm()
        self._release()

    def _release(self) -> None:
        if self._pool is not None:
            self._pool.close()
        with _cuda.device_guard(self._device):
            self._nvlink.close(self._state_address)

    def _pack(self) -> None:
        super()._pack()
        packed = b"".join(window.pack() for window in self.windows)
        ctypes.memmove(self._host_windows, packed, len(packed))
        self._state.session = self._session

    def _choose_widths(self, stages: Transaction) -> dict[tuple[str, int], int]:
        """Find out which rows the copy engines are slow at, and in how many pieces they are faster. Collective."""
        _, first = stages.step_shared("measure copies", lambda: self._measure(widths.keys(), (1,)), dict)
        everyone = cast("list[widths.Times]", first)
        candidates = widths.slow(everyone)
        if not candidates:
            return {}
        pieces = stages.step_shared("measure pieces", lambda: self._measure(candidates, widths.PIECES), dict)[1]
        parts = cast("list[widths.Times]", pieces)
        return widths.choose([{**a, **b} for a, b in zip(everyone, parts, strict=True)], candidates)

    def _measure(self, wanted: Sequence[tuple[str, int]], pieces: Sequence[int]) -> dict[str, float]:
        """Time pitched copies into the next rank's staging window, at the same time as all the others."""
        window = self.windows[_STAGING]
        target = window.peer_pointers[(self._group.rank + 1) % self._group.size]
        source = torch.empty(0, dtype=torch.uint8, device=self._device)

        def time_copy(target_pitch: int, source_pitch: int, width: int, rows: int, count: int, room: int) -> float:
            nonlocal source
            if source.numel() < room:
                source = torch.zeros(room, dtype=torch.uint8, device=self._device)
            self.barrier()
            return widths.milliseconds(
                self._nvlink.time_copy, self._stream(), target, source.data_ptr(), target_pitch, source_pitch, width,
                rows, count,
            )  # fmt: skip

        with _cuda.device_guard(self._device):
            found = widths.measure(time_copy, window.nbytes, wanted, pieces)
            # Nobody may write a peer's staging once that peer makes calls.
            self.barrier()
            _cuda.synchronize(self._device)
        self.check()
        return found

    def _self_test(self) -> None:
        """Exchange patterns that differ for every pair: by the SMs alone, and by the copy engines and the SMs."""
        problem: TransportError | None = None
        try:
            super()._self_test()
        except PeerStalledError:
            raise
        except TransportError as error:
            # A rank that left now would let the others wait for it until their deadline, and hide why.
            problem = error
        if self._boards is not None:
            size, rank = self._group.size, self._group.rank
            plan = replace(gather.small_plan(gather.TEST_BYTES, rank, size), operation="self_test")
            self._prepare(plan, replace(self._settings, engine_bytes=0))
            gather.self_test(_EngineTest(self, plan), self._device, rank, size)
        if problem is not None:
            raise problem

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
        prepared = self._prepared.get(plan)
        if prepared is None:
            prepared = self._prepare(plan)
        else:
            self._prepared.move_to_end(plan)
        output = destination.data_ptr()
        found = self.windows.find(output, plan.target_bytes)
        half = 0
        if found is not None:
            window, offset = found
            landing = output
        else:
            window = self.windows[_STAGING]
            small = plan.target_bytes <= self._doubled_bytes and prepared.chunks == 0
            offset, half = (self._doubled_offset, self._doubled_bytes) if small else (0, 0)
            landing = window.address + offset
            if plan.target_bytes > max(self._doubled_bytes, self._doubled_offset):
                raise ArgumentValueError(
                    f"rank {self._group.rank}: {plan.operation}: an output of {plan.target_bytes} bytes does not fit "
                    f"the staging of {max(self._doubled_bytes, self._doubled_offset)}: raise max_bytes of the "
                    "communicator, or take an output from allocate_output or memory_pool, which needs no staging"
                )
        places, captured = 0, _cuda.is_capturing()
        # Every rank meets for the same calls: those that use the copy engines and, in a captured graph, small ones.
        meets = prepared.chunks != 0 or (captured and plan.target_bytes <= self._doubled_bytes)
        if meets and self._boards is not None:
            places = self._meet(plan, window.number, offset, captured)
        # Without SMs the data is left in staging by the copy engines, and copied out once it is all there.
        later = found is None and prepared.senders == 0
        self._exchange(
            self._stream(),
            self._state_address,
            prepared.table_address,
            prepared.copies_address if places else 0,
            places,
            *(
                (sources[0].data_ptr(), 0, 0, 0)
                if len(sources) == 1
                else (*[source.data_ptr() for source in sources], *NO_SOURCES[len(sources)])
            ),
            landing,
            landing if later else output,
            offset,
            plan.target_bytes,
            half,
            self._doubled_offset,
            self._doubled_bytes,
            window.number,
            *prepared.after,
        )
        # Only now: a call that was interrupted before it was enqueued is made again under the same number.
        if captured:
            self._held.add(prepared)
            self._captured += 1
        else:
            self._eager, self._captured = self._eager + 1, 0
            self._met += places != 0
        if later:
            self._unstage(plan, window, destination)

    def _prepare(self, plan: Plan, settings: Settings | None = None) -> _Prepared:
        """Compile the plan's tables and bring them to the device."""
        settings = settings or self._settings
        if _cuda.is_capturing():
            # Nothing was communicated, so this breaks nothing (as a TransportError would).
            raise UnsupportedError(
                f"{plan.operation}: this geometry is seen for the first time while a graph is captured, and its "
                "table would have to be copied to the device: make the call once before the capture"
            )
        way = route(plan, settings)
        copies = compile_copies(plan, way, settings.widths)
        table = compile_table(plan, way)
        prepared = _Prepared(plan, way, table, copies, self._device)
        _cuda.synchronize(self._device)
        self._prepared[plan] = prepared
        if len(self._prepared) > _KEPT:
            # The device has just been waited for, so no kernel reads the table that goes.
            self._prepared.popitem(last=False)
        return prepared

    def _meet(self, plan: Plan, window: int, offset: int, captured: bool) -> int:
        """Tell the other hosts where this rank wants its data, and learn where they want it.

        Returns:
            The address of what was learned.
        """
        # Captured calls are counted apart: they happen on the device when they are replayed. And they are counted
        # anew after every eager call: where a capture failed on some ranks alone, the ranks have made different
        # numbers of them, but of eager calls as many, since those are paired on the device.
        number = 1 + ((self._eager << 32) + self._captured if captured else self._met)
        limit_ns = int(self._timeout_s * 1e9)
        wait_ns = _MEET_CAPTURED_NS if captured else _MEET_NS
        if self._settings.senders == 0:
            wait_ns = limit_ns
        self._nvlink.meet(
            self._state_address,
            self._places_address,
            2 * number + captured,
            min(wait_ns, limit_ns),
            offset,
            window,
            captured,
        )
        if self._settings.senders == 0:
            self._all_known(plan)
        return self._places_address

    def _all_known(self, plan: Plan) -> None:
        """Raise where a rank's place is unknown: without SMs nothing else can serve it."""
        missing = [rank for rank in range(self._group.size) if not self._places.known >> rank & 1]
        missing.remove(self._group.rank)
        if missing:
            raise PeerStalledError(
                f"rank {self._group.rank}: {plan.operation} with max_sms=0: rank {missing[0]} did not make this call "
                f"within {self._timeout_s:g} s (COMM_TIMEOUT_S), or not in the same way (captured in a graph or not)",
                missing[0],
                self._group.rank,
            )

    def close(self, timeout_s: float | None = None) -> None:
        """See `WindowSession.close`."""
        super().close(timeout_s)
        self._prepared.clear()
        self._held.clear()

    def memory_pool(self) -> AbstractContextManager[object]:
        """See `TransportSession.memory_pool`."""
        self.check()
        if self._pool is None:
            raise UnsupportedError(
                "this communicator has no memory pool: give it one with pool_bytes= (bytes, equal on all ranks), or "
                "allocate outputs with allocate_output"
            )
        return self._pool.allocating(self._device)

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        size = self._group.size
        nbytes = check_small(value, out, size)
        room = min(max(self._doubled_bytes, self._doubled_offset) // size, SMALL_BYTES)
        with _cuda.device_guard(self._device):
            if nbytes <= room:
                self.exchange(gather.small_plan(nbytes, self._group.rank, size), (value,), out)
                return
            flat = value.contiguous().view(-1).view(torch.uint8)
            slots = out.view(size, -1).view(torch.uint8)
            for begin in range(0, nbytes, room):
                part = flat[begin : begin + room]
                plan = gather.small_plan(part.numel(), self._group.rank, size)
                received = torch.empty(size, part.numel(), dtype=torch.uint8, device=self._device)
                self.exchange(plan, (part,), received)
                slots[:, begin : begin + room].copy_(received)


class _EngineTest:
    """What the self-test needs of a session, with every gather over the copy engines."""

    def __init__(self, session: NvlinkSession, plan: Plan) -> None:
        self._session = session
        self._plan = plan
        self.check = session.check

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Gather `value`; the plan is that of its size."""
        self._session.exchange(self._plan, (value,), out)
