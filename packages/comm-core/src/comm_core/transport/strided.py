"""Executes the blocks of a wire layout with torch copies, on any device.

Bytes are moved in the widest unit that divides every offset, pitch and row, because a strided copy of 8-byte units is
several times faster on a GPU than one of bytes, and a byte view of a strided tensor does not exist in torch anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd

import torch

from comm_core.transport.plan import Copy
from comm_core.transport.wire import Block

__all__ = ["byte_view", "copy_local", "pack", "unpack"]

_UNITS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def byte_view(tensor: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
    """Return `nbytes` of `tensor`'s storage as flat uint8, from `offset` bytes after its first element on."""
    start = tensor.data_ptr() - tensor.untyped_storage().data_ptr() + offset
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (nbytes,), (1,))  # pyright: ignore[reportUnknownMemberType]


@lru_cache(2048)
def _geometry(block: Block, alignment: int) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return (unit bytes, sizes, tensor strides, buffer strides) in units, for addresses of that `alignment`."""
    unit = gcd(8, alignment, block.row_bytes)
    for _, tensor_pitch, buffer_pitch in block.levels:
        unit = gcd(unit, tensor_pitch, buffer_pitch)
    sizes = (*(repeat for repeat, _, _ in block.levels), block.row_bytes // unit)
    tensor_strides = (*(pitch // unit for _, pitch, _ in block.levels), 1)
    buffer_strides = (*(pitch // unit for _, _, pitch in block.levels), 1)
    return unit, sizes, tensor_strides, buffer_strides


def _views(block: Block, tensor: torch.Tensor, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tensor_storage = tensor.untyped_storage()
    buffer_storage = buffer.untyped_storage()
    tensor_at = tensor.data_ptr() + block.tensor_offset
    buffer_at = buffer.data_ptr() + block.buffer_offset
    tensor_start = tensor_at - tensor_storage.data_ptr()
    buffer_start = buffer_at - buffer_storage.data_ptr()
    # Offsets into the storage count in units too, so they must divide as well as the addresses.
    alignment = gcd(8, tensor_at, buffer_at, tensor_start, buffer_start)
    unit, sizes, tensor_strides, buffer_strides = _geometry(block, alignment)
    dtype = _UNITS[unit]
    left = torch.empty(0, dtype=dtype, device=tensor.device)
    right = torch.empty(0, dtype=dtype, device=buffer.device)
    left.set_(tensor_storage, tensor_start // unit, sizes, tensor_strides)  # pyright: ignore[reportUnknownMemberType]
    right.set_(buffer_storage, buffer_start // unit, sizes, buffer_strides)  # pyright: ignore[reportUnknownMemberType]
    return left, right


def pack(blocks: Sequence[Block], sources: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
    """Copy from `sources` into the flat uint8 `buffer`."""
    for block in blocks:
        source, target = _views(block, sources[block.tensor], buffer)
        target.copy_(source)


def unpack(blocks: Sequence[Block], buffer: torch.Tensor, destination: torch.Tensor) -> None:
    """Copy from the flat uint8 `buffer` into `destination`."""
    for block in blocks:
        target, source = _views(block, destination, buffer)
        target.copy_(source)


def copy_local(copies: Sequence[Copy], sources: Sequence[torch.Tensor], destination: torch.Tensor) -> None:
    """Execute `copies` between tensors of one process, with no buffer between."""
    for copy in copies:
        block = Block(copy.source, copy.source_offset, copy.target_offset, copy.levels, copy.row_bytes)
        source, target = _views(block, sources[copy.source], destination)
        target.copy_(source)
