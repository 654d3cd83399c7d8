"""Scatter and gather over processes, for any geometry: inverse, and equal to a chunk and cat reference.

The contract suite goes through chosen cases; here hypothesis chooses them: world sizes 1 to 8, groups that are not
WORLD and not consecutive, any batch, every dtype, strided operands of the head-chunk calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_core import UlyssesCommunicator
from comm_core.testing import reference
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import DTYPES, assert_same_bits, make_input


@dataclass(frozen=True)
class Case:
    members: tuple[int, ...]
    batch: int
    sequence: int
    local_heads: int
    head_dim: int
    dtype: torch.dtype
    strided: tuple[bool, bool, bool]
    offset: int
    count: int
    use_out: bool
    use_workspace: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    size = draw(st.integers(1, 8))
    members = tuple(sorted(draw(st.permutations(range(8)))[:size]))
    local = draw(st.integers(1, 4))
    offset = draw(st.integers(0, local - 1))
    return Case(
        members=members,
        batch=draw(st.integers(1, 3)),
        sequence=draw(st.integers(1, 6)),
        local_heads=local,
        head_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
        strided=(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
        offset=offset,
        count=draw(st.integers(1, local - offset)),
        use_out=draw(st.booleans()),
        use_workspace=draw(st.booleans()),
    )


def run_case(group: Any, case: Case) -> int:
    rank, size = group.rank(), group.size()
    shape = (case.batch, case.sequence, size * case.local_heads, case.head_dim)
    seeds = range(3)
    every = [
        [make_input(seed, peer, shape, case.dtype, strided=case.strided[seed]) for peer in range(size)]
        for seed in seeds
    ]
    whole = [[x.contiguous() for x in tensors] for tensors in every]
    nbytes = 3 * whole[0][0].numel() * case.dtype.itemsize
    with UlyssesCommunicator(group, max_bytes=nbytes, dtype=case.dtype, device="cpu") as comm:
        workspace = comm.create_workspace() if case.use_workspace else None
        expected = reference.scatter_heads(whole[0])[rank]
        out = torch.empty_like(expected) if case.use_out else None
        scattered = comm.scatter_heads(whole[0][rank], out=out, workspace=workspace)
        assert_same_bits(scattered, expected)
        assert out is None or scattered is out
        back = comm.gather_heads(scattered, workspace=workspace)
        assert_same_bits(back, whole[0][rank])

        fused = comm.scatter_qkv_head_chunk(
            *(tensors[rank] for tensors in every),
            head_offset=case.offset,
            head_count=case.count,
            workspace=workspace,
        )
        at = slice(case.offset, case.offset + case.count)
        parts = [reference.scatter_heads(tensors)[rank][:, :, at] for tensors in whole]
        assert_same_bits(fused, torch.cat(parts, -1))
        # Zero as bytes: not every dtype has a zero.
        full_bytes = torch.zeros(whole[0][0].numel() * case.dtype.itemsize, dtype=torch.uint8)
        full = full_bytes.view(case.dtype).view(shape)
        band = fused[..., : case.head_dim].clone()
        comm.gather_output_head_chunk(
            band, local_heads=case.local_heads, head_offset=case.offset, out=full, workspace=workspace
        )
        for owner in range(size):
            heads = slice(owner * case.local_heads + case.offset, owner * case.local_heads + case.offset + case.count)
            assert_same_bits(full[:, :, heads], whole[0][rank][:, :, heads])
            full[:, :, heads] = full_bytes.new_zeros(case.dtype.itemsize).view(case.dtype)
        assert not full_bytes.any(), "bytes outside the band were written"
        return comm.bytes_sent


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_any_geometry_on_any_group(ranks: RankPool, case: Case) -> None:
    """D2, D6, D7, D12, D13, D15, C9: and exactly the bytes leave each rank that must."""
    sent = ranks.run(run_case, case, ranks=case.members)
    size = len(case.members)
    element = case.batch * case.sequence * case.head_dim * case.dtype.itemsize
    whole = element * case.local_heads * (size - 1)
    band = element * case.count * (size - 1)
    assert sent == [2 * whole + 4 * band] * size
