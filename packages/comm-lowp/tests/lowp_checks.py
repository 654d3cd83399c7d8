"""What the kernels give, compared byte by byte with the reference and the oracle; on a host and on GPUs."""

from __future__ import annotations

from typing import Any

import lowp_cases
import torch
from lowp_cases import Case

from comm_lowp.kernels import Kernels
from comm_lowp.sage2 import primitives, reference
from comm_lowp.sage2.grid import Grid
from comm_lowp.testing import oracle

NAMES = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


def outputs(grid: Grid, device: torch.device) -> list[torch.Tensor]:
    """Return the six outputs of a rank, full of bytes that no result has throughout."""
    shapes, dtypes = grid.output_shapes(grid.used_sequence), reference.output_dtypes()
    made = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True)]
    for out in made:
        out.view(torch.uint8).fill_(0x77)
    return made


def expected(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Any]:
    """Return the quantization of the gathered sequence, by the oracle."""
    return oracle.encode(q, k, v, case.layout, case.used, oracle.mean_of(k, case.ranks, case.used))


def check(case: Case, wanted: dict[str, Any], outs: Any, rank: int) -> None:
    """Compare a rank's six outputs."""
    for name, out in zip(NAMES, outs, strict=True):
        own = oracle.heads_of(name, wanted[name], case.ranks, rank)
        oracle.assert_same_bytes(out, own, f"{name} of rank {rank}")


def whole(
    kernels: Kernels, case: Case, q: Any = None, k: Any = None, v: Any = None, *, pdl: bool | None = None
) -> None:
    """The kernels, on every rank in turn, give the quantization of the gathered sequence.

    Statistics and payloads equal the reference's on the way, and inputs stay what they were.
    """
    device, size = kernels.device, case.ranks
    if q is None:
        q, k, v = (x.to(device) for x in lowp_cases.operands(case))
    before = (q.cpu(), k.cpu(), v.cpu())
    shards = [case.shards((q, k, v), rank) for rank in range(size)]
    flats, scratches, contexts = [], [], []
    for rank, grid in enumerate(case.grids):
        scratch = kernels.scratch(grid, case.dtype)
        for tensor in scratch.tensors:
            tensor.fill_(torch.nan)
        flat = torch.full((grid.statistics_elems,), torch.nan, device=device)
        kernels.statistics(*shards[rank], grid, flat, scratch, pdl=pdl)
        wanted = torch.empty(grid.statistics_elems)
        context = primitives.torch_statistics(*case.shards(before, rank), grid, wanted)
        assert torch.equal(flat.cpu(), wanted)
        assert torch.equal(scratch.q_amax.cpu(), context.partials.q_amax)
        flats.append(flat)
        scratches.append(scratch)
        contexts.append(context)
    gathered = torch.stack(flats)
    sent = torch.full((size, size, case.grids[0].payload.chunk_bytes), 0x5A, dtype=torch.uint8, device=device)
    scales = []
    for rank, grid in enumerate(case.grids):
        final = kernels.final(grid, case.dtype)
        own = torch.empty(case.batch, case.local_heads, case.dim, device=device)
        kernels.finalize(gathered, scratches[rank], grid, final, own_v_scale=own, pdl=pdl)
        kernels.quant_pack(*shards[rank], final, grid, [chunk.data_ptr() for chunk in sent[rank]], pdl=pdl)
        record = primitives.torch_final(gathered.cpu(), contexts[rank])
        assert torch.equal(final.k_mean.cpu(), record.k_mean_global)
        assert torch.equal(final.q_amax.cpu(), record.q_amax)
        assert torch.equal(final.k_amax.cpu(), record.k_amax)
        assert torch.equal(final.v_scale.cpu(), record.v_scale)
        payload = torch.empty(size, grid.payload.chunk_bytes, dtype=torch.uint8)
        primitives.torch_pack(*case.shards(before, rank), record, payload)
        oracle.assert_same_bytes(sent[rank], payload, f"payload of rank {rank}")
        scales.append(own)
    wanted = expected(case, *before)
    for peer, grid in enumerate(case.grids):
        received = sent[:, peer].contiguous()
        outs = outputs(grid, device)
        outs[5] = scales[peer]
        kernels.unpack(received, grid, outs[:5], pdl=pdl)
        check(case, wanted, outs, peer)
    for x, y in zip((q, k, v), before, strict=True):
        assert torch.equal(x.cpu(), y)
