"""Ranks with an engine each in one process, as threads, over the verbs emulator; and what exchanges must do.

The geometries are written down here once more, from the definition of the operations and not from the package: a
rank's share of the heads, rank after rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from comm_pcie.rdma.engine import Memory, Outcome, RdmaEngine, RegisteredPair, Settings, VerbsApi
from comm_pcie.rdma.geometry import Band, Geometry, Transfer

SECOND = 1_000_000_000
LONG = 30 * SECOND
"""For what must not take long, and may on a busy machine."""


class Shape(NamedTuple):
    """An exchange of `size` ranks: `rows` local rows of `size` bands of `width` bytes."""

    operation: str
    size: int
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        """Of an operand and of an output."""
        return self.rows * self.size * self.width

    @property
    def share(self) -> int:
        """Bytes for each peer."""
        return self.rows * self.width

    def geometry(self, rank: int, peers: Iterable[int] | None = None) -> Geometry:
        """Return what `rank` sends and receives."""
        others = [peer for peer in range(self.size) if peer != rank] if peers is None else list(peers)
        pitch, share = self.size * self.width, self.share

        def packed(number: int) -> Band:
            return Band(number * share, 1, share, share)

        def band(number: int) -> Band:
            return Band(number * self.width, self.rows, self.width, pitch)

        source = band if self.operation == "scatter_heads" else packed
        target = band if self.operation == "gather_heads" else packed
        return Geometry(
            tuple((peer, Transfer(source(peer), target(rank))) for peer in others),
            tuple((peer, target(peer)) for peer in others),
        )

    def expected(self, operands: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        """Return `rank`'s whole output, as bytes."""
        size, rows, width = self.size, self.rows, self.width
        if self.operation == "scatter_heads":
            # [rows, bands, width] of each rank; this rank's band of each, rank after rank.
            return torch.cat([item.view(rows, size, width)[:, rank].reshape(-1) for item in operands])
        shares = [item.view(size, rows, width)[rank] for item in operands]
        if self.operation == "gather_heads":
            return torch.stack(shares, dim=1).reshape(-1)
        return torch.cat([item.reshape(-1) for item in shares])


class Ranks:
    """Engines of all ranks, connected, with an output and a landing buffer each of `capacity` bytes."""

    def __init__(self, api: VerbsApi, size: int, capacity: int, **options: Any) -> None:
        self.size = size
        self.engines = engines(api, size, **options)
        connect(self.engines)
        self.landing = [torch.zeros(capacity, dtype=torch.uint8) for _ in range(size)]
        self.output = [torch.zeros(capacity, dtype=torch.uint8) for _ in range(size)]
        self.pairs: list[RegisteredPair] = [
            engine.register(output=memory(output), landing=memory(landing))
            for engine, output, landing in zip(self.engines, self.output, self.landing, strict=True)
        ]
        records = [pair.record for pair in self.pairs]
        for pair in self.pairs:
            pair.attach(records)
        self.epoch = 0

    def each(self, function: Callable[[int], Any]) -> list[Any]:
        """Return what `function` returns for each rank, called in threads at the same time."""
        return on_threads(self.size, function)

    def rebind(self, shape: Shape, timeout_ns: int = LONG) -> list[Outcome]:
        return [self.pairs[rank].rebind(shape.geometry(rank), timeout_ns) for rank in range(self.size)]

    def fill(self, shape: Shape, seed: int = 0) -> list[torch.Tensor]:
        """Put operands into the landing buffers and spoil the outputs; return the operands."""
        operands = []
        for rank in range(self.size):
            generator = torch.Generator().manual_seed(1000 * seed + rank)
            operand = torch.randint(0, 256, (shape.nbytes,), dtype=torch.uint8, generator=generator)
            self.landing[rank][: shape.nbytes] = operand
            self.output[rank].fill_(0xEE)
            operands.append(operand)
        return operands

    def exchange(self, shape: Shape, timeout_ns: int = LONG) -> list[Outcome]:
        """One exchange of all ranks at the same time."""
        self.epoch += 1
        return self.each(lambda rank: self.pairs[rank].exchange(shape.geometry(rank), self.epoch, timeout_ns))

    def check(self, shape: Shape, operands: Sequence[torch.Tensor], ranks: Sequence[int] | None = None) -> None:
        """Compare every byte of the outputs; a rank's own share is not the NIC's business."""
        for rank in range(self.size) if ranks is None else ranks:
            expected = torch.full_like(self.output[rank], 0xEE)
            expected[: shape.nbytes] = shape.expected(operands, rank)
            own = dict(shape.geometry(0, [rank]).receives)[rank]
            for row in range(own.rows):
                start = own.offset + row * own.pitch
                assert (self.output[rank][start : start + own.width] == 0xEE).all()
                expected[start : start + own.width] = 0xEE
            wrong = (self.output[rank] != expected).nonzero()
            assert not wrong.numel(), f"rank {rank}: {wrong.numel()} bytes are wrong, the first at {int(wrong[0])}"

    def run(self, shape: Shape, seed: int = 0) -> None:
        """Bind, exchange and compare."""
        assert all(outcome.ok for outcome in self.rebind(shape))
        operands = self.fill(shape, seed)
        outcomes = self.exchange(shape)
        assert all(outcome.ok for outcome in outcomes), outcomes
        self.check(shape, operands)

    def close(self, *, ranks: Sequence[int] | None = None) -> None:
        """Quiesce and close everything; all of it must work."""
        chosen = range(self.size) if ranks is None else ranks
        for rank in chosen:
            quiesced = self.engines[rank].quiesce(LONG)
            assert quiesced.teardown_safe and not quiesced.outstanding, quiesced
        for rank in chosen:
            self.pairs[rank].close()
            self.engines[rank].close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()


def memory(tensor: torch.Tensor) -> Memory:
    return Memory(tensor.data_ptr(), tensor.numel())


def engines(api: VerbsApi, size: int, settings: Settings | None = None) -> list[RdmaEngine]:
    """Return an engine for each rank, rank n on ``mlx5_n``, not connected."""
    return [
        RdmaEngine(api, nic=f"mlx5_{rank}", gid_index=0, rank=rank, world_size=size, settings=settings)
        for rank in range(size)
    ]


def connect(members: Sequence[RdmaEngine]) -> None:
    endpoints = [engine.endpoint() for engine in members]
    for engine in members:
        engine.revalidate()
        engine.connect(endpoints)


def on_threads(size: int, function: Callable[[int], Any]) -> list[Any]:
    """Return what `function` returns for 0 to `size` - 1, in threads."""
    results: list[Any] = [None] * size
    failures: list[BaseException] = []

    # All start at once: on a busy machine the last thread may come to life long after the first.
    start = threading.Barrier(size)

    def call(rank: int) -> None:
        try:
            start.wait(30)
            results[rank] = function(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=call, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    return results


def loopback(
    api: VerbsApi, capacity: int, *, peers: int = 7, nic: str = "mlx5_0", gid_index: int = 0
) -> tuple[RdmaEngine, RegisteredPair, list[torch.Tensor]]:
    """Return an engine of `peers` + 1 ranks whose queue pairs are connected to themselves.

    A whole exchange then runs in one thread, with all that a rank does and nothing that another one does: what it
    costs is one rank's cost.
    """
    engine = RdmaEngine(api, nic=nic, gid_index=gid_index, rank=0, world_size=peers + 1)
    own = engine.endpoint()
    qps: Any = own["qps"]
    engine.connect([None, *({**own, "qps": [qps[peer]]} for peer in range(1, peers + 1))])
    buffers = [torch.zeros(capacity, dtype=torch.uint8) for _ in range(2)]
    pair = engine.register(output=memory(buffers[0]), landing=memory(buffers[1]))
    bands: Any = pair.record["band_rkeys"]
    pair.attach([None, *({**pair.record, "band_rkeys": [bands[peer]]} for peer in range(1, peers + 1))])
    return engine, pair, buffers


def loopback_geometry(shape: Shape) -> Geometry:
    """Return what rank 0 of a `loopback` exchanges: each peer's share lands where that peer's own would."""
    geometry = shape.geometry(0)
    own = dict(geometry.receives)
    return geometry._replace(
        sends=tuple((peer, transfer._replace(target=own[peer])) for peer, transfer in geometry.sends)
    )


def exchange_with_itself(api: VerbsApi, nic: str, gid_index: int) -> RdmaEngine:
    """Exchange with a NIC's own queue pairs, compare every byte and close; return the closed engine.

    Raises:
        UnsupportedError: the NIC or its GID can't be used.
    """
    engine, pair, (output, landing) = loopback(api, 1 << 16, nic=nic, gid_index=gid_index)
    landing.random_(0, 256)
    for epoch, operation in enumerate(("scatter_heads", "gather_heads", "exchange_chunks")):
        shape = Shape(operation, 8, 24, 96)
        output.fill_(0xEE)
        geometry = loopback_geometry(shape)
        outcome = pair.rebind(geometry, LONG)
        assert outcome.ok, outcome
        outcome = pair.exchange(geometry, epoch, LONG)
        assert outcome.ok and (outcome.sends, outcome.receives) == (7, 7), outcome
        for _, transfer in geometry.sends:
            assert torch.equal(taken(landing, transfer.source), taken(output, transfer.target))
    assert engine.quiesce(LONG).teardown_safe
    pair.close()
    engine.close()
    return engine


def taken(buffer: torch.Tensor, band: Band) -> torch.Tensor:
    """Return the bytes of a band, packed."""
    return torch.cat([buffer[band.offset + row * band.pitch :][: band.width] for row in range(band.rows)])
