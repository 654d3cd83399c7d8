"""RdmaEngine: one rank's NIC, queue pairs and registered buffers. Local: what other ranks must know are records.

The order of things::

    verbs = load_verbs()                                   # or the reason why not
    engine = RdmaEngine(verbs.api, nic="mlx5_0", gid_index=3, rank=r, world_size=w)
    endpoints = gather(engine.endpoint())                  # all ranks' records, in order of rank
    engine.revalidate()
    engine.connect(endpoints)
    pair = engine.register(output=Memory(...), landing=Memory(...))
    pair.attach(gather(pair.record))
    outcome = pair.rebind(geometry, deadline_ns)           # before the opening barrier
    ...copy the operand into the landing buffer, opening barrier...
    outcome = pair.exchange(geometry, epoch, deadline_ns)  # blocks, without the GIL
    ...flush, closing barrier...
    engine.quiesce(deadline_ns); pair.close(); engine.close()

Misuse raises. What the fabric does to a running exchange is an `Outcome` and raises nothing, so that the caller can
publish its abort first; after one that is not ok the engine is broken and only quiesces and closes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from comm_core._json import JsonObject
from comm_pcie.rdma.geometry import Geometry

if TYPE_CHECKING:
    from comm_core.jit import Module

__all__ = [
    "Counters",
    "Kind",
    "Ledger",
    "LoadedVerbs",
    "Memory",
    "Outcome",
    "Quiesced",
    "RdmaEngine",
    "RegisteredPair",
    "Settings",
    "VerbsApi",
    "VerbsLibraries",
    "load_verbs",
]


class VerbsLibraries(NamedTuple):
    """Where the two libraries of rdma-core are loaded from; for tests an emulator's path, twice.

    Attributes:
        ibverbs: file name or path of libibverbs.
        mlx5: of libmlx5.
    """

    ibverbs: str = "libibverbs.so.1"
    mlx5: str = "libmlx5.so.1"

    @classmethod
    def default(cls) -> VerbsLibraries:
        """Return what ``COMM_VERBS_LIBRARY`` names (one path for both; for tests), else the system's."""
        raise NotImplementedError


class VerbsApi:
    """The loaded functions of libibverbs and libmlx5, and the module that calls them. Never unloaded."""

    def __init__(self, module: Module, handle: int, libraries: VerbsLibraries) -> None:
        self.module = module
        self.handle = handle
        self.libraries = libraries

    def devices(self) -> tuple[str, ...]:
        """Return the names of the RDMA devices, as libibverbs lists them; empty where it finds none."""
        raise NotImplementedError


class LoadedVerbs(NamedTuple):
    """What `load_verbs` found.

    Attributes:
        api: the functions, or None.
        reason: why not: a missing header, library or symbol, with the Debian package that has it; else empty.
    """

    api: VerbsApi | None
    reason: str = ""


def load_verbs(libraries: VerbsLibraries | None = None, *, timeout_s: float | None = None) -> LoadedVerbs:
    """Load the module of the engine (built if need be) and the libraries. Raises nothing for what is missing.

    Args:
        libraries: None is `VerbsLibraries.default()`.
        timeout_s: of building; None is ``COMM_JIT_TIMEOUT_S``.
    """
    raise NotImplementedError


class Settings(NamedTuple):
    """Numbers of the queue pairs. The defaults are for a fabric of one host; equal on all ranks.

    Attributes:
        send_depth: work requests in flight to one peer; larger payloads are posted as places become free.
        receive_depth: receives posted ahead to one peer, at least 2: a fast peer's next message finds one.
        timeout: of an unanswered packet, 4.096 us * 2**timeout.
        retry_count: how often it is sent again, at most 7.
        traffic_class: of the global route header, where the fabric has lossless classes.
    """

    send_depth: int = 16
    receive_depth: int = 4
    timeout: int = 18
    retry_count: int = 7
    traffic_class: int = 0


class Memory(NamedTuple):
    """A buffer to register, owned by the caller and kept until `RegisteredPair.close` succeeded.

    Attributes:
        address: as the NIC shall know it: of host memory or a device address.
        nbytes: its size.
        dmabuf_fd: a DMA-BUF that covers it, tried first; the caller closes it after `register`. None: there is none.
        dmabuf_offset: of `address` in that DMA-BUF.
        dmabuf_problem: why there is none for device memory, for the text of an error; empty for host memory.
    """

    address: int
    nbytes: int
    dmabuf_fd: int | None = None
    dmabuf_offset: int = 0
    dmabuf_problem: str = ""


class Kind(IntEnum):
    """How an exchange ended. Twin: include/comm_pcie/rdma_types.h, OutcomeKind."""

    OK = 0
    DEADLINE = 1  # a peer's message or acknowledgement did not come in time
    COMPLETION = 2  # a work request ended with an error of the NIC
    PROTOCOL = 3  # a message of another epoch, opcode or size
    POST = 4  # the library refused a work request
    EVENT = 5  # the port went down, the GID changed, a queue pair or the device failed
    ABORTED = 6  # `abort` was called
    BROKEN = 7  # an earlier call ended with another kind; nothing was posted


class Outcome(NamedTuple):
    """How a call that posts work ended.

    Attributes:
        kind: `Kind.OK` or why not.
        peer: the rank that it is about, or -1.
        reason: as a sentence; empty if ok.
        elapsed_ns: host time in the call.
        sends: work requests that were completed in it.
        receives: messages that came.
    """

    kind: Kind
    peer: int
    reason: str
    elapsed_ns: int
    sends: int
    receives: int

    @property
    def ok(self) -> bool:
        """Whether everything arrived."""
        return self.kind is Kind.OK


class Quiesced(NamedTuple):
    """Whether the NIC is done with the buffers.

    Attributes:
        teardown_safe: every work request was retired. If not, nothing may be deregistered or freed: the buffers must
            outlive the process's use of the NIC, and the process should exit.
        outstanding: peer -> (sends, receives) that were not.
        reason: as a sentence; empty if safe.
    """

    teardown_safe: bool
    outstanding: Mapping[int, tuple[int, int]]
    reason: str


class Ledger(NamedTuple):
    """What is in the NIC's hands now: peer -> (sends, receives) posted and not retired.

    Attributes:
        outstanding: of each peer of the engine.
    """

    outstanding: Mapping[int, tuple[int, int]]


class Counters(NamedTuple):
    """What the engine did since it was opened. Twin: include/comm_pcie/rdma_types.h, Counters.

    Attributes:
        exchanges: that ended well.
        writes: RDMA writes posted, each of them signalled.
        write_bytes: bytes of those.
        rebinds: keys configured (UMR work requests).
        receives_posted: receives posted.
        sends_completed: completions of writes and of UMRs.
        receives_completed: messages received.
        polls: calls of ibv_poll_cq.
        events: asynchronous events that were read.
        registrations: pairs registered and not closed.
        split_writes: writes beyond the first of a payload, for payloads above the port's message limit.
    """

    exchanges: int
    writes: int
    write_bytes: int
    rebinds: int
    receives_posted: int
    sends_completed: int
    receives_completed: int
    polls: int
    events: int
    registrations: int
    split_writes: int


class RegisteredPair:
    """An output and the landing buffer of what is sent, known to the NIC. Made by `RdmaEngine.register`.

    Attributes:
        record: JSON, for the other ranks: the output's address, size and key, and for each peer the key of the band
            that this peer writes.
        how: how the output and the landing buffer were registered: ``"dmabuf"`` or ``"peermem"`` for device memory,
            ``"host"`` for host memory.
    """

    record: JsonObject
    how: tuple[str, str]

    def attach(self, records: Sequence[JsonObject | None]) -> None:
        """Take the other ranks' records of the same registration, in order of rank; own and non-peers are ignored.

        Raises:
            ArgumentValueError: a record is missing or makes no sense.
        """
        raise NotImplementedError

    def rebind(self, geometry: Geometry, timeout_ns: int) -> Outcome:
        """Describe the strided bands of `geometry` to the NIC and wait until it knows them. Local; no registration.

        To be called before the opening barrier: a peer writes by the keys described here. A geometry that is bound
        already costs nothing.

        Raises:
            ArgumentValueError: `problem_of` has something to say; nothing was posted, the engine is not broken.
        """
        raise NotImplementedError

    def exchange(self, geometry: Geometry, epoch: int, timeout_ns: int) -> Outcome:
        """Write each peer's payload, with a message that says so, and wait until all peers' messages have come.

        To be called after the opening barrier. Blocks without the GIL; `RdmaEngine.abort` from another thread ends
        it. What arrived may be visible to the GPU only after the caller's flush.

        Args:
            geometry: the one that was bound last.
            epoch: number of the exchange, equal on all ranks; its low 30 bits are in each message and compared.
            timeout_ns: of the whole call, from its start on.

        Raises:
            ArgumentValueError: `geometry` is not bound, or the pair is not attached; nothing was posted.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give the keys and registrations back; may be called again after it failed, and does the rest then.

        After a success the buffers may be freed. All peers must be done with them.

        Raises:
            TransportError: something can't be given back, or work requests are outstanding (see `quiesce`).
        """
        raise NotImplementedError


class RdmaEngine:
    """A NIC with one reliable connection to each peer. Not thread-safe, but for `abort`, `problem` and `counters`.

    Args:
        api: of `load_verbs`.
        nic: name of the device, for example ``"mlx5_0"``; port 1 is used.
        gid_index: of an IPv4 RoCE v2 entry of the port's GID table.
        rank: of this process.
        world_size: of the group.
        peers: ranks that are talked to by this NIC; None is all others.
        settings: numbers of the queue pairs.

    Raises:
        UnsupportedError: the device, the port or the GID can't be used; the text says which condition failed.
        TransportError: a call of the library failed.
    """

    def __init__(
        self,
        api: VerbsApi,
        *,
        nic: str,
        gid_index: int,
        rank: int,
        world_size: int,
        peers: Sequence[int] | None = None,
        settings: Settings = Settings(),  # noqa: B008
    ) -> None:
        raise NotImplementedError

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that it talks to, ascending."""
        raise NotImplementedError

    @property
    def max_message(self) -> int:
        """Largest message of the port in bytes; larger payloads are split."""
        raise NotImplementedError

    def endpoint(self) -> JsonObject:
        """Return the record that the other ranks need to connect: JSON, made when the engine was opened."""
        raise NotImplementedError

    def revalidate(self) -> None:
        """Check that the port and the GID are still what `endpoint` says; to be called just before `connect`.

        Raises:
            TransportError: the port is not active, or its GID or MTU is another one now.
        """
        raise NotImplementedError

    def connect(self, endpoints: Sequence[JsonObject | None]) -> None:
        """Connect to all peers and post the first receives. A local step: it does not wait for anybody.

        No rank may write before all have connected: put a barrier behind it.

        Args:
            endpoints: all ranks' records in order of rank; own and non-peers are ignored.

        Raises:
            ArgumentValueError: a record is missing or makes no sense.
            TransportError: a queue pair can't be moved to the next state; the text names the peer and the step.
        """
        raise NotImplementedError

    def register(self, *, output: Memory, landing: Memory) -> RegisteredPair:
        """Register two buffers and make the keys of the strided bands.

        DMA-BUF first, then as memory that the system's peer-memory module knows (or host memory).

        Raises:
            TransportError: neither way worked; the text has both errors. Nothing stays registered.
        """
        raise NotImplementedError

    def abort(self, reason: str) -> None:
        """End a running `exchange` or `rebind` of another thread, and break the engine. From any thread."""
        raise NotImplementedError

    @property
    def problem(self) -> str:
        """Why the engine is broken, or empty. An asynchronous event shows up here without a call."""
        raise NotImplementedError

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        raise NotImplementedError

    @property
    def ledger(self) -> Ledger:
        """What is posted and not retired."""
        raise NotImplementedError

    def quiesce(self, timeout_ns: int) -> Quiesced:
        """Stop all queue pairs and wait until every work request was retired. Ends the use of the engine.

        May be called again; a later call may find what an earlier one missed.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Destroy the queue pairs and give the device back; may be called again after it failed.

        Raises:
            TransportError: pairs are still registered, work requests are outstanding (call `quiesce`; if that says
                that teardown is not safe, leak on purpose and exit), or the library refuses.
        """
        raise NotImplementedError
