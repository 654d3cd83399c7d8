"""RdmaEngine: one rank's NIC, queue pairs and registered buffers. Local: what other ranks must know are records.

The order of things::

    verbs = load_verbs()                                   # or the reason why not
    engine = RdmaEngine(verbs.api, nic="mlx5_0", gid_index=3, rank=r, world_size=w)
    endpoints = gather(engine.endpoint())                  # all ranks' records, in order of rank
    engine.revalidate()
    engine.connect(endpoints)
    pair = engine.register(output=Memory(...), landing=Memory(...))
    pair.attach(gather(pair.record))
    outcome = pair.rebind(geometry, timeout_ns)            # before the opening barrier
    ...copy the operand into the landing buffer, opening barrier...
    outcome = pair.exchange(geometry, epoch, timeout_ns)   # blocks, without the GIL
    ...flush, closing barrier...
    engine.quiesce(timeout_ns); pair.close(); engine.close()

Misuse raises. What the fabric does to a running exchange is an `Outcome` and raises nothing, so that the caller can
publish its abort first; after one that is not ok the engine is broken and only quiesces and closes.
"""

from __future__ import annotations

import ctypes
import os
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core.errors import ArgumentValueError, ClosedError, TransportError, UnsupportedError
from comm_pcie.rdma import module
from comm_pcie.rdma.geometry import Geometry, problem_of
from comm_pcie.rdma.records import Counters, Kind, Ledger, Memory, Outcome, Quiesced, Settings
from comm_pcie.rdma.verbs import LoadedVerbs, VerbsApi, VerbsLibraries, load_verbs

if TYPE_CHECKING:
    from comm_core._json import Json, JsonObject

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

_TEXT_BYTES = 4096
_MAX_GEOMETRIES = 256
"""Packed geometries that a pair keeps; a program that makes more than that makes them anew."""


class RegisteredPair:
    """An output and the landing buffer of what is sent, known to the NIC. Made by `RdmaEngine.register`.

    Attributes:
        record: JSON, for the other ranks: the output's address, size and key, and for each peer the key of the band
            that this peer writes.
        how: how the output and the landing buffer were registered: ``"dmabuf"`` or ``"peermem"`` for device memory,
            ``"host"`` for host memory.
    """

    def __init__(self, engine: RdmaEngine, output: Memory, landing: Memory) -> None:
        self._engine = engine
        self._call = engine.api.call
        self._sizes = {"output": output.nbytes, "landing": landing.nbytes}
        self._packed: dict[Geometry, ctypes.Array[ctypes.c_char]] = {}
        self._last: tuple[Geometry, ctypes.Array[ctypes.c_char]] | None = None
        self._outcome = ctypes.create_string_buffer(module.OUTCOME.size)
        handle, rkey = ctypes.c_void_p(), ctypes.c_uint32()
        band_rkeys = (ctypes.c_uint32 * max(1, len(engine.peers)))()
        by_dmabuf = (ctypes.c_uint32 * 2)()
        memories = [_buffer(_pack_memory(memory)) for memory in (output, landing)]
        written = (handle, rkey, band_rkeys, by_dmabuf)
        self._call["register"](engine.handle, *map(ctypes.addressof, memories), *map(ctypes.addressof, written))
        self._handle: int | None = handle.value
        bands: list[Json] = [None] * engine.world_size
        for peer, key in zip(engine.peers, band_rkeys, strict=False):
            bands[peer] = key
        self.record: JsonObject = {
            "address": output.address,
            "nbytes": output.nbytes,
            "rkey": rkey.value,
            "band_rkeys": bands,
        }
        self.how: tuple[str, str] = (
            _how(output, bool(by_dmabuf[0])),
            _how(landing, bool(by_dmabuf[1])),
        )

    def attach(self, records: Sequence[JsonObject | None]) -> None:
        """Take the other ranks' records of the same registration, in order of rank; own and non-peers are ignored.

        Raises:
            ArgumentValueError: a record is missing or makes no sense.
        """
        packed = bytearray()
        rank = self._engine.rank
        for peer in self._engine.peers:
            record = _record_of(records, peer, "registration")
            try:
                bands = cast("Sequence[int]", record["band_rkeys"])
                fields = [cast("int", record[name]) for name in ("address", "nbytes")]
                packed += module.ATTACHED.pack(*fields, peer, cast("int", record["rkey"]), bands[rank], 0)
            except (KeyError, IndexError, TypeError, module.StructError) as error:
                raise ArgumentValueError(f"rank {peer}'s registration {record} makes no sense: {error!r}") from error
        remotes = _buffer(packed)
        self._call["attach"](self._open(), ctypes.addressof(remotes), len(self._engine.peers))

    def rebind(self, geometry: Geometry, timeout_ns: int) -> Outcome:
        """Describe the strided bands of `geometry` to the NIC and wait until it knows them. Local; no registration.

        To be called before the opening barrier: a peer writes by the keys described here. A geometry that is bound
        already costs nothing.

        Raises:
            ArgumentValueError: `problem_of` has something to say; nothing was posted, the engine is not broken.
        """
        handle, shares = self._open(), self._shares(geometry)
        at = ctypes.addressof(self._outcome)
        self._call["rebind"](handle, ctypes.addressof(shares), at, timeout_ns, len(self._engine.peers))
        return _outcome(self._outcome)

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
        handle, shares = self._open(), self._shares(geometry)
        at = ctypes.addressof(self._outcome)
        self._call["exchange"](
            handle, ctypes.addressof(shares), at, timeout_ns, len(self._engine.peers), epoch & 0xFFFFFFFF
        )
        return _outcome(self._outcome)

    def close(self) -> None:
        """Give the keys and registrations back; may be called again after it failed, and does the rest then.

        After a success the buffers may be freed. All peers must be done with them.

        Raises:
            TransportError: something can't be given back, or work requests are outstanding (see `quiesce`).
        """
        if self._handle is None:
            return
        self._call["close_pair"](self._handle)
        self._handle = None
        self._packed.clear()
        self._last = None

    def _open(self) -> int:
        if self._handle is None:
            raise ClosedError("this pair of buffers was closed")
        return self._handle

    def _shares(self, geometry: Geometry) -> ctypes.Array[ctypes.c_char]:
        # A loop passes one and the same object; hashing it would cost more than the rest of the call.
        if self._last is not None and self._last[0] is geometry:
            return self._last[1]
        packed = self._packed.get(geometry)
        if packed is None:
            problem = problem_of(geometry, self._sizes)
            if problem:
                raise ArgumentValueError(problem)
            packed = _buffer(self._pack(geometry))
            if len(self._packed) >= _MAX_GEOMETRIES:
                self._packed.clear()
            self._packed[geometry] = packed
        self._last = geometry, packed
        return packed

    def _pack(self, geometry: Geometry) -> bytes:
        receives = dict(geometry.receives)
        peers = [peer for peer, _ in geometry.sends]
        expected = list(self._engine.peers)
        if sorted(peers) != expected or sorted(peer for peer, _ in geometry.receives) != expected:
            raise ArgumentValueError(
                f"a geometry has each of the peers {expected} once, got sends to {peers} and receives from "
                f"{[peer for peer, _ in geometry.receives]}"
            )
        packed = bytearray()
        for peer, transfer in geometry.sends:
            packed += module.SHARE.pack(peer, 0, *transfer.source, *transfer.target, *receives[peer])
        return bytes(packed)


class RdmaEngine:
    """A NIC with one reliable connection to each peer. Not thread-safe, but for `abort`, `problem` and `counters`.

    Args:
        api: of `load_verbs`.
        nic: name of the device, for example ``"mlx5_0"``; port 1 is used.
        gid_index: of an IPv4 RoCE v2 entry of the port's GID table.
        rank: of this process.
        world_size: of the group, at most 64.
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
        settings: Settings | None = None,
    ) -> None:
        self.handle: int | None = None
        # Of what other threads may call: the engine must not go while they are in it.
        self._alive = threading.Lock()
        self.api = api
        self.nic, self.gid_index, self.rank, self.world_size = nic, gid_index, rank, world_size
        chosen = [peer for peer in range(world_size) if peer != rank] if peers is None else sorted(peers)
        if not 0 <= rank < world_size or any(not 0 <= peer < world_size for peer in chosen):
            raise ArgumentValueError(f"rank {rank} and peers {chosen} must be ranks of a group of {world_size}")
        self._peers = tuple(chosen)
        self._unsafe = False
        handle, max_message = ctypes.c_void_p(), ctypes.c_uint64()
        numbers = (ctypes.c_uint32 * max(1, len(chosen)))(*chosen)
        text = ctypes.create_string_buffer(nic.encode())
        packed = _buffer(module.SETTINGS.pack(*(settings or Settings()), 0))
        addresses = map(ctypes.addressof, (text, numbers, packed, handle, max_message))
        api.call["open"](api.handle, *addresses, len(chosen), gid_index, rank)
        self.handle = handle.value
        self._max_message = max_message.value

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None and not self._unsafe:
            warnings.warn(f"RdmaEngine on {self.nic} was not closed", ResourceWarning, stacklevel=2)

    @property
    def peers(self) -> tuple[int, ...]:
        """The ranks that it talks to, ascending."""
        return self._peers

    @property
    def max_message(self) -> int:
        """Largest message of the port in bytes; larger payloads are split."""
        return self._max_message

    def endpoint(self) -> JsonObject:
        """Return the record that the other ranks need to connect: JSON, made when the engine was opened."""
        size = module.ENDPOINT.size
        buffer = ctypes.create_string_buffer(max(1, len(self._peers)) * size)
        self.api.call["endpoints"](self._open(), ctypes.addressof(buffer))
        qps: list[Json] = [None] * self.world_size
        gid, max_message, mtu = b"", self._max_message, 0
        for number, peer in enumerate(self._peers):
            gid, max_message, mtu, _, qpn, psn = module.ENDPOINT.unpack_from(buffer, number * size)
            qps[peer] = [qpn, psn]
        return {
            "nic": self.nic,
            "gid_index": self.gid_index,
            "gid": gid.hex(),
            "mtu": mtu,
            "max_message": max_message,
            "qps": qps,
        }

    def revalidate(self) -> None:
        """Check that the port and the GID are still what `endpoint` says; to be called just before `connect`.

        Raises:
            TransportError: the port is not active, or its GID or MTU is another one now.
        """
        self.api.call["revalidate"](self._open())

    def connect(self, endpoints: Sequence[JsonObject | None]) -> None:
        """Connect to all peers and post the first receives. A local step: it does not wait for anybody.

        No rank may write before all have connected: put a barrier behind it.

        Args:
            endpoints: all ranks' records in order of rank; own and non-peers are ignored.

        Raises:
            ArgumentValueError: a record is missing or makes no sense.
            TransportError: a queue pair can't be moved to the next state; the text names the peer and the step.
        """
        packed = bytearray()
        for peer in self._peers:
            record = _record_of(endpoints, peer, "endpoint")
            try:
                qpn, psn = cast("Sequence[Sequence[int]]", record["qps"])[self.rank]
                gid = bytes.fromhex(cast("str", record["gid"]))
                numbers = cast("int", record["max_message"]), cast("int", record["mtu"])
                if len(gid) != 16:
                    raise ValueError(f"a GID has 16 bytes, got {len(gid)}")
                packed += module.ENDPOINT.pack(gid, *numbers, peer, qpn, psn)
            except (KeyError, IndexError, TypeError, ValueError, module.StructError) as error:
                raise ArgumentValueError(f"rank {peer}'s endpoint {record} makes no sense: {error!r}") from error
        remotes = _buffer(packed)
        self.api.call["connect"](self._open(), ctypes.addressof(remotes), len(self._peers))

    def register(self, *, output: Memory, landing: Memory) -> RegisteredPair:
        """Register two buffers and make the keys of the strided bands.

        DMA-BUF first, then as memory that the system's peer-memory module knows (or host memory).

        Raises:
            TransportError: neither way worked; the text has both errors. Nothing stays registered.
        """
        self._open()
        try:
            return RegisteredPair(self, output, landing)
        except TransportError as error:
            problems = dict.fromkeys(memory.dmabuf_problem for memory in (output, landing) if memory.dmabuf_problem)
            if not problems:
                raise
            raise TransportError(f"{error}. What the GPU's driver said: {'; '.join(problems)}") from error

    def abort(self, reason: str) -> None:
        """End a running `exchange` or `rebind` of another thread, and break the engine. From any thread."""
        text = ctypes.create_string_buffer(reason.encode())
        with self._alive:
            self.api.call["abort"](self._open(), ctypes.addressof(text))

    def heed(self, address: int) -> None:
        """End calls as `abort` does as soon as a word of host memory is not 0, which any process may set.

        Args:
            address: of an aligned uint32 that lives until `close`.
        """
        self.api.call["heed"](self._open(), address)

    @property
    def problem(self) -> str:
        """Why the engine is broken, or empty. An asynchronous event shows up here without a call."""
        return self._look()[1]

    @property
    def counters(self) -> Counters:
        """What was done so far."""
        return self._look()[0]

    @property
    def ledger(self) -> Ledger:
        """What is posted and not retired."""
        size = module.POSTED.size
        posted = ctypes.create_string_buffer(max(1, len(self._peers)) * size)
        self.api.call["posted"](self._open(), ctypes.addressof(posted))
        return Ledger(
            {
                peer: cast("tuple[int, int]", module.POSTED.unpack_from(posted, number * size))
                for number, peer in enumerate(self._peers)
            }
        )

    def quiesce(self, timeout_ns: int) -> Quiesced:
        """Stop all queue pairs and wait until every work request was retired. Ends the use of the engine.

        May be called again; a later call may find what an earlier one missed.
        """
        safe, reason = ctypes.c_uint32(), ctypes.create_string_buffer(_TEXT_BYTES)
        self.api.call["quiesce"](
            self._open(), ctypes.addressof(safe), ctypes.addressof(reason), _TEXT_BYTES, timeout_ns
        )
        self._unsafe = not safe.value
        outstanding = {peer: posted for peer, posted in self.ledger.outstanding.items() if any(posted)}
        return Quiesced(bool(safe.value), outstanding, os.fsdecode(reason.value))

    def close(self) -> None:
        """Destroy the queue pairs and give the device back; may be called again after it failed.

        Raises:
            TransportError: pairs are still registered, work requests are outstanding (call `quiesce`; if that says
                that teardown is not safe, leak on purpose and exit), or the library refuses.
        """
        with self._alive:
            if self.handle is None:
                return
            self.api.call["close"](self.handle)
            self.handle = None

    def _open(self) -> int:
        if self.handle is None:
            raise ClosedError(f"the engine on {self.nic} was closed")
        return self.handle

    def _look(self) -> tuple[Counters, str]:
        counters = ctypes.create_string_buffer(module.COUNTERS.size)
        broken, text = ctypes.c_uint32(), ctypes.create_string_buffer(_TEXT_BYTES)
        written = map(ctypes.addressof, (counters, broken, text))
        with self._alive:
            self.api.call["look"](self._open(), *written, _TEXT_BYTES)
        return Counters(*module.COUNTERS.unpack_from(counters)), os.fsdecode(text.value)


def require(loaded: LoadedVerbs) -> VerbsApi:
    """Return the functions that were loaded.

    Raises:
        UnsupportedError: with the reason why there are none.
    """
    if loaded.api is None:
        raise UnsupportedError(f"RDMA can't be used: {loaded.reason}")
    return loaded.api


def _buffer(contents: bytes | bytearray) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes(contents), max(1, len(contents)))


def _pack_memory(memory: Memory) -> bytes:
    fd = -1 if memory.dmabuf_fd is None else memory.dmabuf_fd
    return module.MEMORY.pack(memory.address, memory.nbytes, memory.dmabuf_offset, fd, bool(memory.dmabuf_problem))


def _how(memory: Memory, by_dmabuf: bool) -> str:
    if by_dmabuf:
        return "dmabuf"
    return "peermem" if memory.dmabuf_fd is not None or memory.dmabuf_problem else "host"


def _record_of(records: Sequence[JsonObject | None], peer: int, what: str) -> JsonObject:
    record = records[peer] if peer < len(records) else None
    if record is None:
        raise ArgumentValueError(f"rank {peer} is a peer, and its {what} is missing")
    return record


def _outcome(buffer: ctypes.Array[ctypes.c_char]) -> Outcome:
    kind, peer, elapsed_ns, sends, receives, reason = module.OUTCOME.unpack_from(buffer)
    text = reason.split(b"\0", 1)[0].decode(errors="replace")
    return Outcome(Kind(kind), peer, text, elapsed_ns, sends, receives)
