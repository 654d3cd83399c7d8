"""How a plan travels through flat buffers: packed by the sender, unpacked by the receiver. Pure.

torch.distributed moves one contiguous piece a peer. Both ends must agree on the order of bytes inside a piece without
talking, so it follows from what they share: the destination side of the plan. (Source strides are the sender's own.)

- If the bytes of a pair fill one gapless interval of the destination, the piece is that interval. Where the intervals
  of all peers stand in rank order and fill the destination, it is received in place, with no unpacking at all.
- Else the copies follow each other, each in the order of its rows.

A piece that lies in the only source exactly as it is needed on the wire is sent from there, with no packing at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from comm_core.transport.plan import Copy, Level, Plan, collapse

__all__ = ["Block", "Wire", "wire"]


@dataclass(frozen=True)
class Block:
    """A strided copy between a tensor and a flat buffer, with the peers folded into its outermost level.

    Attributes:
        tensor: index of the source tensor (for packing), 0 for the destination.
        tensor_offset: bytes.
        buffer_offset: bytes.
        levels: outermost first; the source pitch is the tensor's, the target pitch the buffer's, also for unpacking.
        row_bytes: contiguous bytes.
    """

    tensor: int
    tensor_offset: int
    buffer_offset: int
    levels: tuple[Level, ...]
    row_bytes: int


@dataclass(frozen=True)
class Wire:
    """A plan ready for flat buffers.

    Attributes:
        pack: copies from the sources into the send buffer; empty where `send_in_place`.
        unpack: copies from the receive buffer into the destination; empty where `receive_in_place`.
        send_bytes: bytes to each peer, in rank order.
        receive_bytes: bytes from each peer, in rank order.
        send_in_place: the only source is the send buffer as it is.
        receive_in_place: the destination is the receive buffer as it is.
        equal: all pieces have the same size, so no list of sizes need be passed on.
    """

    pack: tuple[Block, ...]
    unpack: tuple[Block, ...]
    send_bytes: tuple[int, ...]
    receive_bytes: tuple[int, ...]
    send_in_place: bool
    receive_in_place: bool
    equal: bool


def wire(plan: Plan) -> Wire:
    """Return how `plan` travels through flat buffers."""
    pack = _blocks(plan.sends, plan.send_bytes, packing=True)
    unpack = _blocks(plan.receives, plan.receive_bytes, packing=False)
    send_in_place = plan.source_count == 1 and _is_identity(pack, sum(plan.send_bytes))
    receive_in_place = _is_identity(unpack, plan.target_bytes)
    return Wire(
        pack=() if send_in_place else pack,
        unpack=() if receive_in_place else unpack,
        send_bytes=plan.send_bytes,
        receive_bytes=plan.receive_bytes,
        send_in_place=send_in_place,
        receive_in_place=receive_in_place,
        equal=len({*plan.send_bytes, *plan.receive_bytes}) == 1,
    )


def _is_identity(blocks: Sequence[Block], nbytes: int) -> bool:
    return len(blocks) == 1 and blocks[0] == Block(0, 0, 0, (), nbytes)


def _blocks(copies: Sequence[Copy], piece_bytes: Sequence[int], *, packing: bool) -> tuple[Block, ...]:
    """Return the copies between tensors and one flat buffer that holds the pieces in rank order."""
    groups: list[list[Block]] = []
    base = 0
    for peer, nbytes in enumerate(piece_bytes):
        own = [copy for copy in copies if copy.peer == peer]
        groups.append(_piece(own, base, packing=packing))
        base += nbytes
    if len({len(group) for group in groups}) > 1:
        return tuple(block for group in groups for block in group)
    return tuple(block for column in zip(*groups, strict=True) for block in _fold(column))


def _piece(copies: Sequence[Copy], base: int, *, packing: bool) -> list[Block]:
    """Return the blocks of one peer's piece, which begins at `base` in the buffer."""
    if not copies:
        return []
    low = min(copy.target_offset for copy in copies)
    nbytes = sum(copy.nbytes for copy in copies)
    gapless = max(copy.target_end for copy in copies) - low == nbytes
    if gapless and not packing:
        return [Block(0, low, base, (), nbytes)]
    blocks: list[Block] = []
    position = base
    for copy in copies:
        buffer_offset = base + copy.target_offset - low if gapless else position
        pitches = [level.target_pitch for level in copy.levels] if gapless else _packed_pitches(copy)
        tensor_pitches = [level.source_pitch if packing else level.target_pitch for level in copy.levels]
        levels = [
            Level(level.repeat, tensor_pitch, pitch)
            for level, tensor_pitch, pitch in zip(copy.levels, tensor_pitches, pitches, strict=True)
        ]
        short, row_bytes = collapse(levels, copy.row_bytes)
        blocks.append(
            Block(
                copy.source if packing else 0,
                copy.source_offset if packing else copy.target_offset,
                buffer_offset,
                short,
                row_bytes,
            )
        )
        position += copy.nbytes
    return blocks


def _packed_pitches(copy: Copy) -> list[int]:
    pitches: list[int] = []
    step = copy.row_bytes
    for level in reversed(copy.levels):
        pitches.append(step)
        step *= level.repeat
    return pitches[::-1]


def _fold(column: Sequence[Block]) -> tuple[Block, ...]:
    """Fold the same block of all peers into one with a level for the peers, where they are evenly spaced."""
    first = column[0]
    if len(column) == 1:
        return (first,)
    tensor_pitch = column[1].tensor_offset - first.tensor_offset
    buffer_pitch = column[1].buffer_offset - first.buffer_offset
    for number, block in enumerate(column):
        expected = Block(
            first.tensor,
            first.tensor_offset + number * tensor_pitch,
            first.buffer_offset + number * buffer_pitch,
            first.levels,
            first.row_bytes,
        )
        if block != expected or tensor_pitch < 0 or buffer_pitch < 0:
            return tuple(column)
    levels = [Level(len(column), tensor_pitch, buffer_pitch), *first.levels]
    short, row_bytes = collapse(levels, first.row_bytes)
    return (Block(first.tensor, first.tensor_offset, first.buffer_offset, short, row_bytes),)
