"""The engine of the RDMA routes between processes: each rank's memory is its own, and the NICs reach into it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
import rdma_ranks as ranks_of
import torch
import torch.distributed as dist
from rdma_ranks import LONG, Shape

from comm_core.jit import Module
from comm_core.testing.ranks import RankPool
from comm_pcie.rdma.engine import Kind, RdmaEngine, VerbsLibraries, load_verbs, require

SHAPES = (("scatter_heads", 31, 40), ("gather_heads", 17, 96), ("exchange_chunks", 5, 333), ("gather_heads", 3, 8))
CAPACITY = 1 << 17


class Rank:
    """This process's rank, connected, with buffers registered."""

    def __init__(self, group: dist.ProcessGroup, folder: str) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        library = str(emulator.build(Path(folder)))
        module = emulator.engine_module(Path(folder))
        api = require(load_verbs(VerbsLibraries(library, library), module=module))
        self.engine = RdmaEngine(api, nic=f"mlx5_{self.rank}", gid_index=0, rank=self.rank, world_size=self.size)
        endpoints = self.gather(self.engine.endpoint())
        self.engine.revalidate()
        self.engine.connect(endpoints)
        self.barrier()
        # At another address in each process.
        self.padding = torch.zeros(4096 * (self.rank + 1), dtype=torch.uint8)
        self.output, self.landing = (torch.zeros(CAPACITY, dtype=torch.uint8) for _ in range(2))
        self.pair = self.engine.register(output=ranks_of.memory(self.output), landing=ranks_of.memory(self.landing))
        self.pair.attach(self.gather(self.pair.record))

    def gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.group)

    def exchange(self, shape: Any, epoch: int, timeout_ns: int = LONG) -> Any:
        assert self.pair.rebind(shape.geometry(self.rank), LONG).ok
        operands = [operand(shape, rank, epoch) for rank in range(self.size)]
        self.landing[: shape.nbytes] = operands[self.rank]
        self.output.fill_(0xEE)
        self.barrier()
        outcome = self.pair.exchange(shape.geometry(self.rank), epoch, timeout_ns)
        if not outcome.ok:
            return outcome
        self.barrier()
        own = dict(shape.geometry(0, [self.rank]).receives)[self.rank]
        expected = shape.expected(operands, self.rank)
        got = self.output[: shape.nbytes].clone()
        for row in range(own.rows):
            start = own.offset + row * own.pitch
            assert (got[start : start + own.width] == 0xEE).all()
            got[start : start + own.width] = expected[start : start + own.width]
        assert torch.equal(got, expected) and (self.output[shape.nbytes :] == 0xEE).all()
        return outcome

    def close(self) -> None:
        assert self.engine.quiesce(LONG).teardown_safe
        # Nobody frees what another one may still write.
        self.barrier()
        self.pair.close()
        self.engine.close()


def operand(shape: Any, rank: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(0, 256, (shape.nbytes,), dtype=torch.uint8, generator=generator)


def exchange_all(group: dist.ProcessGroup, folder: str) -> tuple[int, int, int]:
    """Rank function: every shape twice; returns writes, bytes and bands described."""
    rank = Rank(group, folder)
    for epoch in range(2 * len(SHAPES)):
        operation, rows, width = SHAPES[epoch % len(SHAPES)]
        assert rank.exchange(Shape(operation, rank.size, rows, width), epoch).ok
    counters = rank.engine.counters
    rank.close()
    return counters.writes, counters.write_bytes, counters.rebinds


def exchange_with_a_death(group: dist.ProcessGroup, folder: str, victim: int) -> tuple[int, int, str, bool]:
    """Rank function: one rank is killed when the others write to it; returns how this rank's exchange ended."""
    rank = Rank(group, folder)
    shape = Shape("scatter_heads", rank.size, 16, 64)
    assert rank.exchange(shape, 1).ok
    rank.barrier()
    if rank.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = rank.pair.exchange(shape.geometry(rank.rank), 2, 1_000_000_000)
    safe = rank.engine.quiesce(LONG).teardown_safe
    rank.pair.close()
    rank.engine.close()
    return int(outcome.kind), outcome.peer, outcome.reason, safe


@pytest.fixture
def folder(rdma_folder: Path, library: Path, engine_module: Module) -> Path:
    """Where the ranks find both built."""
    return rdma_folder


@pytest.fixture
def world(library: Path, tmp_path: Path) -> Iterator[Any]:
    with emulator.World(library, tmp_path / "fabric", emulator.nics(8)) as made:
        yield made


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_byte_between_processes(world: Any, folder: Path, ranks: RankPool, size: int) -> None:
    results = ranks.run(exchange_all, str(folder), ranks=size, env=world.environment, timeout_s=90)
    calls = 2 * len(SHAPES)
    nbytes = 2 * (size - 1) * sum(rows * width for _, rows, width in SHAPES)
    # The first scatter stays described beside the gathers, which describe another key anew each time.
    described = (size - 1) * (1 + 4)
    assert results == [(calls * (size - 1), nbytes, described)] * size
    done = world.counters()
    assert done["executed_writes"] == size * (size - 1) * calls and done["written_bytes"] == size * nbytes
    assert done["rnr_naks"] == done["errors"] == done["overflows"] == 0


def test_a_rank_that_is_killed_is_named(world: Any, folder: Path, ranks: RankPool) -> None:
    """The others end by themselves, well within their deadline or at it, and close everything."""
    outcomes = ranks.run_outcomes(exchange_with_a_death, str(folder), 2, ranks=4, env=world.environment, timeout_s=90)
    for rank, outcome in enumerate(outcomes):
        if rank == 2:
            assert outcome.kind == "died", outcome
            continue
        kind, peer, reason, safe = outcome.value
        assert kind in (Kind.DEADLINE, Kind.COMPLETION) and f"rank {peer}" in reason and safe
    # An engine knows its own peers alone, and one that has stopped because of rank 2 is the next one's reason: it is
    # the session that tells the group.
    assert 2 in {outcome.value[1] for rank, outcome in enumerate(outcomes) if rank != 2}
    assert world.reap() == 1
