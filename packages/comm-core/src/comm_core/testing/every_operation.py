"""Every operation of a communicator over windows against its reference, for the tests of sessions on a host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_core import UlyssesCommunicator
from comm_core.testing import reference
from comm_core.testing.reference import assert_same_bits, bits, make_input

__all__ = ["every_operation"]


def every_operation(
    comm: UlyssesCommunicator, geometries: Sequence[tuple[int, int, int, int]], *, strided: Callable[[int], bool]
) -> int:
    """Make every call into windows, into ordinary outputs and into new ones, and compare. Collective.

    Args:
        comm: of CPU tensors, whose transport takes any output.
        geometries: ``(B, S_local, H_local, D)`` of the whole-head calls.
        strided: whether the operands of a rank's bands are strided views; else they are contiguous.

    Returns:
        How many results were compared.
    """
    rank, size, dtype, checked = comm.rank, comm.world_size, comm.dtype, 0
    for seed, (b, s, h, d) in enumerate(geometries):
        cases: list[tuple[str, Callable[..., Any], tuple[int, ...]]] = [
            ("scatter_heads", reference.scatter_heads, (b, s, size * h, d)),
            ("gather_heads", reference.gather_heads, (b, size * s, h, d)),
            ("exchange_chunks", reference.exchange_chunks, (1, 1, size, b * s * d)),
        ]
        for name, expect, shape in cases:
            everyone = [make_input(seed, peer, shape, dtype) for peer in range(size)]
            x = everyone[rank]
            # Each rank's choice is its own: the receiver announces.
            for out in (None, comm.allocate_output(x, name), expect(everyone)[rank].clone().zero_())[rank % 2 :]:
                result = getattr(comm, name)(x, **({} if out is None else {"out": out}))
                assert_same_bits(result, expect(everyone)[rank], f"{name} {shape} rank {rank}")
                checked += 1
            if rank % 2:  # as many calls as the others
                assert_same_bits(getattr(comm, name)(x), expect(everyone)[rank])
    for layout in (False, "fused", "transposed", "stepped"):
        b, s, h, d = 2, 3, 3, 8
        full = [[make_input(9 + i, peer, (b, s, size * h, d), dtype) for peer in range(size)] for i in range(3)]
        mine = layout if strided(rank) else False
        q, k, v = (make_input(9 + i, rank, (b, s, size * h, d), dtype, mine) for i in range(3))
        fused = comm.scatter_qkv_head_chunk(q, k, v, head_offset=1, head_count=2)
        parts = [reference.scatter_heads(x)[rank][:, :, 1:3] for x in full]
        assert_same_bits(fused, torch.cat(parts, dim=-1), f"band of {layout}")
        full = [make_input(5, peer, (b, s * size, h, d), dtype) for peer in range(size)]
        for target in (
            torch.empty(b, s, size * h, d, dtype=dtype),
            comm.allocate_output(full[rank], "gather_heads"),
        ):
            bits(target).fill_(0x5A)
            for at, count in ((1, 2), (0, 1)):
                bands = [x[:, :, at : at + count] for x in full]
                before = target.clone()
                comm.gather_output_head_chunk(bands[rank], local_heads=h, head_offset=at, out=target)
                written = target.view(b, s, size, h, d)
                whole = reference.gather_heads(full)[rank].view(b, s, size, h, d)
                assert_same_bits(written[:, :, :, at : at + count], whole[:, :, :, at : at + count])
                other = before.view(b, s, size, h, d)
                kept = [head for head in range(h) if not at <= head < at + count]
                assert_same_bits(written[:, :, :, kept], other[:, :, :, kept], "what the band does not cover")
            assert_same_bits(target, reference.gather_heads(full)[rank])
        checked += 1
    return checked
