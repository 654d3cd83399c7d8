"""Plans: what bytes go where, as data. Pure; no torch, no device.

A plan describes one exchange from the point of view of one rank. It holds the copies that this rank *sends* (from
its sources into each peer's destination) and those that it *receives* (from each peer into its own destination). Both
come from the same pure function of the geometry, so each rank knows, without asking, what every peer will send it.

A copy is a nest of levels around rows of contiguous bytes::

    for i0 in range(repeat0):                         # levels[0], outermost
        for i1 in range(repeat1):                     # levels[1]
            source = source_offset + i0 * source_pitch0 + i1 * source_pitch1
            target = target_offset + i0 * target_pitch0 + i1 * target_pitch1
            destination[target : target + row_bytes] = sources[source_index][source : source + row_bytes]

All offsets and pitches are bytes. Source pitches may differ between ranks (each rank's strided views are its own
business); everything about the destination is equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Copy", "Level", "Plan", "collapse"]


class Level(NamedTuple):
    """One level of a copy's nest: how often, and how far apart in bytes on each side."""

    repeat: int
    source_pitch: int
    target_pitch: int


class Copy(NamedTuple):
    """A strided copy between one source of the sender and the destination of the receiver.

    Attributes:
        peer: the other rank: where the bytes go (in `Plan.sends`) or where they come from (in `Plan.receives`).
        source: index of the sender's source tensor.
        source_offset: bytes from the first element of that source.
        target_offset: bytes from the first element of the receiver's destination.
        levels: the nest, outermost first; empty for one row.
        row_bytes: contiguous bytes on both sides.
    """

    peer: int
    source: int
    source_offset: int
    target_offset: int
    levels: tuple[Level, ...]
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that this copy moves."""
        total = self.row_bytes
        for level in self.levels:
            total *= level.repeat
        return total

    @property
    def target_end(self) -> int:
        """One past the last destination byte that this copy writes."""
        return self.target_offset + self.row_bytes + sum((n - 1) * pitch for n, _, pitch in self.levels)

    @property
    def source_end(self) -> int:
        """One past the last source byte that this copy reads."""
        return self.source_offset + self.row_bytes + sum((n - 1) * pitch for n, pitch, _ in self.levels)

    def rows(self) -> Iterator[tuple[int, int]]:
        """Yield (source offset, target offset) of every row, in order."""

        def walk(depth: int, source: int, target: int) -> Iterator[tuple[int, int]]:
            if depth == len(self.levels):
                yield source, target
                return
            repeat, source_pitch, target_pitch = self.levels[depth]
            for i in range(repeat):
                yield from walk(depth + 1, source + i * source_pitch, target + i * target_pitch)

        return walk(0, self.source_offset, self.target_offset)


def collapse(levels: Sequence[Level], row_bytes: int) -> tuple[tuple[Level, ...], int]:
    """Return the shortest equal nest: drop levels of one, merge what is contiguous on both sides.

    The order of rows is kept, so a packed copy of the result has the same bytes as one of the argument.
    """
    merged: list[Level] = []
    for level in reversed([level for level in levels if level.repeat != 1]):
        repeat, source_pitch, target_pitch = level
        if merged:
            inner = merged[-1]
            if (
                source_pitch == inner.repeat * inner.source_pitch
                and target_pitch == inner.repeat * inner.target_pitch
            ):
                merged[-1] = Level(repeat * inner.repeat, inner.source_pitch, inner.target_pitch)
                continue
        elif source_pitch == row_bytes and target_pitch == row_bytes:
            row_bytes *= repeat
            continue
        merged.append(level)
    return tuple(reversed(merged)), row_bytes


@dataclass(frozen=True)
class Plan:
    """One exchange as seen by one rank.

    Attributes:
        operation: name for messages, for example ``"scatter_heads"``.
        rank: this rank.
        world_size: ranks of the group.
        sends: copies out of this rank's sources, by peer in rank order; the copies to itself are among them.
        receives: copies into this rank's destination, by peer in rank order; the copies from itself are among them,
            equal to those in `sends` but for the source side, which is canonical (a contiguous source) because the
            strides of a peer's sources are unknown here.
        source_count: how many source tensors there are.
        target_bytes: size of the destination.
        covers_target: whether the receives write every byte of the destination.
        batch: batch size, for transports that take only one (0 where it has no meaning).
    """

    operation: str
    rank: int
    world_size: int
    sends: tuple[Copy, ...]
    receives: tuple[Copy, ...]
    source_count: int
    target_bytes: int
    covers_target: bool = True
    batch: int = 0

    def __hash__(self) -> int:
        """Return a hash that is computed once: plans are looked up on every call."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.operation, self.rank, self.world_size, self.sends, self.receives, self.target_bytes))

    @cached_property
    def send_bytes(self) -> tuple[int, ...]:
        """Bytes that go to each peer, in rank order."""
        return self._per_peer(self.sends)

    @cached_property
    def receive_bytes(self) -> tuple[int, ...]:
        """Bytes that come from each peer, in rank order."""
        return self._per_peer(self.receives)

    @cached_property
    def remote_send_bytes(self) -> int:
        """Bytes that leave this rank."""
        return sum(self.send_bytes) - self.send_bytes[self.rank]

    def _per_peer(self, copies: Sequence[Copy]) -> tuple[int, ...]:
        totals = [0] * self.world_size
        for copy in copies:
            totals[copy.peer] += copy.nbytes
        return tuple(totals)
