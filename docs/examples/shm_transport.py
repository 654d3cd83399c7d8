"""A whole transport in one file: plans over shared memory of one Linux host, for CPU tensors.

The plugin guide explains it piece by piece, and the tests run it. It is written to be read, not to be fast.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from comm_core.consensus import Transaction
from comm_core.errors import CommError, TransportError
from comm_core.plugins import hookimpl
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport import strided
from comm_core.transport.interface import (
    ProbeContext,
    Properties,
    Request,
    Staging,
    Transport,
    TransportSession,
    Verdict,
)
from comm_core.transport.plan import Copy, Level, Plan

FOLDER = Path("/dev/shm")
SMALL_BYTES = 1 << 20


class ShmTransport(Transport):
    """Shared memory between the processes of one host."""

    name = "shm"
    version = "0.1.0"
    wire = 1
    priority = 0
    experimental = True

    def probe(self, context: ProbeContext) -> dict[str, bool]:
        """See `Transport.probe`: whether this rank can make files in shared memory."""
        return {"writable": os.access(FOLDER, os.W_OK | os.X_OK)}

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`: CPU tensors, one host, one view of its files, room for everybody."""
        if request.device_type != "cpu":
            return Verdict(False, f"shm moves cpu tensors, the ranks are on {request.device_type}")
        reason = predicates.no_probe_errors(facts) or predicates.single_host(facts)
        if reason is not None:
            return Verdict(False, reason)
        mounts = {record.host.mount_namespace for record in facts}
        if len(mounts) > 1 or "" in mounts:
            return Verdict(False, f"the ranks don't share a mount namespace: {sorted(mounts)}")
        blind = [record.rank for record in facts if record.plugins.get(self.name) != {"writable": True}]
        if blind:
            return Verdict(False, f"{FOLDER} is not writable on ranks {blind}")
        return Verdict(True, f"{len(facts)} ranks on one host share {FOLDER}", {"slot_bytes": request.max_bytes})

    def open(
        self, stages: Transaction, request: Request, plan: Mapping[str, object] | None, device: torch.device
    ) -> TransportSession:
        """See `Transport.open`: allocate, map the peers, prove it by value."""
        assert plan is not None
        session = ShmSession(stages, max(int(str(plan["slot_bytes"])), SMALL_BYTES))
        _, paths = stages.step_shared(
            "allocate",
            session.allocate,
            share=str,
            undo=lambda path: path.unlink(missing_ok=True),
            shared_bytes=session.nbytes,
        )
        stages.step("map peers", lambda: session.map([str(path) for path in paths]), undo=lambda _: session.unmap())
        stages.step("write a test value", session.write_test_value)
        stages.step("read the test values", session.read_test_values)
        return session


class ShmSession(TransportSession):
    """Each rank owns one file: a slot of `slot_bytes` for each rank, into which that rank writes."""

    properties = Properties(shared_resources=True)

    def __init__(self, stages: Transaction, slot_bytes: int) -> None:
        self._group = stages.group
        self._teardown = stages.teardown
        self._slot_bytes = slot_bytes
        self._windows: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's file; pages that nobody writes take no memory."""
        return self._slot_bytes * self._group.size

    def allocate(self) -> Path:
        """Make this rank's file."""
        path = FOLDER / f"comm-shm-{uuid.uuid4().hex}"
        with path.open("xb") as file:
            file.truncate(self.nbytes)
        return path

    def map(self, paths: Sequence[str]) -> None:
        """Map every rank's file, this rank's own among them."""
        for path in paths:
            self._windows.append(torch.from_file(path, shared=True, size=self.nbytes, dtype=torch.uint8))

    def unmap(self) -> None:
        """Drop the mappings; the kernel frees a file's memory when its last one is gone."""
        self._windows.clear()

    def write_test_value(self) -> None:
        """Write to every peer what only this rank would write there."""
        for rank in range(self._group.size):
            self._slot(rank, self._group.rank)[:2] = torch.tensor([self._group.rank, rank])

    def read_test_values(self) -> None:
        """Check that every peer's value arrived: what maps is not always what was meant."""
        for rank in range(self._group.size):
            slot = self._slot(self._group.rank, rank)
            expected, found = (rank, self._group.rank), (int(slot[0]), int(slot[1]))
            if found != expected:
                raise CommError(f"rank {rank} wrote {expected} here, and {found} arrived")

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`: write to the peers, meet, read what they wrote, meet again."""
        filled = [0] * plan.world_size
        for copy in plan.sends:
            slot = self._slot(copy.peer, plan.rank)
            strided.copy_local([_packed(copy, filled[copy.peer])], sources, slot)
            filled[copy.peer] += copy.nbytes
        self.barrier()
        read = [0] * plan.world_size
        for copy in plan.receives:
            slot = self._slot(plan.rank, copy.peer)
            strided.copy_local([_unpacked(copy, read[copy.peer])], [slot], destination)
            read[copy.peer] += copy.nbytes
        self.barrier()

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        nbytes = value.numel() * value.element_size()
        data = strided.byte_view(value, 0, nbytes)
        for rank in range(self._group.size):
            self._slot(rank, self._group.rank)[:nbytes] = data
        self.barrier()
        for rank in range(self._group.size):
            strided.byte_view(out, rank * nbytes, nbytes).copy_(self._slot(self._group.rank, rank)[:nbytes])
        self.barrier()

    def barrier(self) -> None:
        """See `TransportSession.barrier`. Through the group's store: slow, and it names who is missing."""
        try:
            self._group.barrier("shm exchange")
        except CommError as error:
            raise TransportError(f"shm, rank {self._group.rank}: {error}") from error

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`."""
        self._teardown.close(timeout_s)

    def _slot(self, owner: int, writer: int) -> torch.Tensor:
        return self._windows[owner][writer * self._slot_bytes : (writer + 1) * self._slot_bytes]


def _packed_pitches(copy: Copy) -> list[int]:
    """Return the pitch of each level of `copy` where its rows follow each other without gaps."""
    pitches: list[int] = []
    step = copy.row_bytes
    for level in reversed(copy.levels):
        pitches.insert(0, step)
        step *= level.repeat
    return pitches


def _packed(copy: Copy, at: int) -> Copy:
    """Return `copy` into a slot, packed from `at` on, instead of into the receiver's destination."""
    pitches = _packed_pitches(copy)
    levels = [Level(n, source, pitch) for (n, source, _), pitch in zip(copy.levels, pitches, strict=True)]
    return copy._replace(target_offset=at, levels=tuple(levels))


def _unpacked(copy: Copy, at: int) -> Copy:
    """Return `copy` out of a slot, packed from `at` on, instead of from the sender's source."""
    pitches = _packed_pitches(copy)
    levels = [Level(n, pitch, target) for (n, _, target), pitch in zip(copy.levels, pitches, strict=True)]
    return copy._replace(source=0, source_offset=at, levels=tuple(levels))


class ShmPlugin:
    """What an entry point of the group ``comm_core.v1`` names."""

    comm_api = (1, 0)

    @hookimpl
    def comm_transports(self) -> Sequence[Transport]:
        """Return the one transport."""
        return (ShmTransport(),)


plugin = ShmPlugin()
