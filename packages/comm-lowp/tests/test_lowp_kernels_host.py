"""The kernels' own code, run on a host, against the reference and the oracle: every byte."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import lowp_cases
import lowp_host
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from lowp_cases import Case
from lowp_checks import outputs, whole

from comm_core.errors import ArgumentValueError
from comm_core.jit import Module
from comm_lowp.kernels import Final, Kernels
from comm_lowp.sage2 import primitives, reference
from comm_lowp.sage2.grid import LAYOUTS, Grid


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return lowp_host.build(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def kernels(module: Module) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield lowp_host.host_kernels(module, patch)


@pytest.mark.parametrize("case", lowp_cases.EDGES, ids=lambda case: "-".join(str(part) for part in case))
def test_edges_equal_the_quantization_of_the_gathered_sequence(kernels: Kernels, case: Case) -> None:
    whole(kernels, case)


@pytest.mark.deadline(300)
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=lowp_cases.cases(elements=120_000))
def test_any_geometry_equals_the_quantization_of_the_gathered_sequence(kernels: Kernels, case: Case) -> None:
    """O1, with the kernels on every rank; statistics, payloads and outputs equal the reference on the way."""
    whole(kernels, case)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("dim", [64, 128])
def test_projection_views_are_read_in_place(kernels: Kernels, layout: str, dim: int) -> None:
    """O6: Q, K and V as views of one projection; what lies between their rows is NaN."""
    case = Case(2, 2, 70, 3, dim, 133, torch.bfloat16, layout, 5)
    values = lowp_cases.operands(case)
    b, s, h, d = values[0].shape
    fused = torch.full((b, s + 3, h, 3 * d + 8), torch.nan, dtype=case.dtype)
    views = [fused[:, 1 : 1 + s, :, i * d : (i + 1) * d] for i in range(3)]
    for view, value in zip(views, values, strict=True):
        view.copy_(value)
    # Heads before rows in memory.
    turned = values[1].transpose(1, 2).contiguous().transpose(1, 2)
    whole(kernels, case, views[0], turned, views[2])
    whole(kernels, case, *views)


def test_strides_of_single_dimensions_need_not_be_aligned(kernels: Kernels) -> None:
    case = Case(1, 1, 40, 1, 64, 40, torch.float16, "sage2_sm90", 5)
    q, k, v = lowp_cases.operands(case)
    odd = torch.empty(40 * 64, dtype=case.dtype).as_strided((1, 40, 1, 64), (3, 64, 7, 1))
    odd.copy_(q)
    whole(kernels, case, odd, k, v)


def single(kernels: Kernels, layout: str) -> tuple[Case, Grid, lowp_cases.Operands, Final]:
    case = Case(1, 2, 90, 3, 64, 90, torch.bfloat16, layout, 12)
    (grid,) = case.grids
    values = lowp_cases.operands(case)
    flat, scratch = torch.empty(1, grid.statistics_elems), kernels.scratch(grid, case.dtype)
    kernels.statistics(*values, grid, flat, scratch)
    final = kernels.final(grid, case.dtype)
    kernels.finalize(flat, scratch, grid, final)
    return case, grid, values, final


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_part_leaves_the_other_sections_alone(kernels: Kernels, layout: str) -> None:
    _, grid, (q, k, v), final = single(kernels, layout)
    spec = grid.payload
    full = torch.empty(1, spec.chunk_bytes, dtype=torch.uint8)
    kernels.quant_pack(q, k, v, final, grid, [full.data_ptr()])
    ends = [0, spec.k_offset, spec.v_offset, spec.q_scale_offset, spec.k_scale_offset, spec.chunk_bytes]
    for parts, with_q, with_k, scales in itertools.product(range(1, 8), *[(False, True)] * 3):
        a, b, c = (x if parts >> i & 1 else None for i, x in enumerate((q, k, v)))
        if (a is not None and not with_q) or (b is not None and not with_k):
            continue  # they can't be quantized
        some = torch.full_like(full, 0xA5)
        given = final.k_mean, final.q_amax if with_q else None, final.k_amax if with_k else None, final.v_scale
        kernels.quant_pack(a, b, c, given, grid, [some.data_ptr()], scales=scales)
        written = [a is not None, b is not None, c is not None, scales and with_q, scales and with_k]
        for i, was in enumerate(written):
            section = slice(ends[i], ends[i + 1])
            expected = full[:, section] if was else torch.full_like(full[:, section], 0xA5)
            assert torch.equal(some[:, section], expected), (parts, with_q, with_k, scales, i)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_single_statistics_equal_their_primitives(kernels: Kernels, layout: str) -> None:
    """Each tensor by itself; what the others would have written is left alone."""
    case = Case(3, 1, 300, 1, 64, 700, torch.float16, layout, 4, "bias")
    values = lowp_cases.operands(case)
    for rank, grid in enumerate(case.grids):
        q, k, v = (case.shard(x, rank) for x in values)
        scratch = kernels.scratch(grid, case.dtype)
        kernels.statistics(q, None, None, grid, None, scratch)
        expected = reference.group_amax(q, grid, grid.layout.q_group)
        assert torch.equal(scratch.q_amax, expected)
        flat = torch.full((grid.statistics_elems,), torch.nan)
        kernels.statistics(None, k, v, grid, flat, scratch)
        channels = grid.batch_size * grid.heads * grid.head_dim
        assert torch.equal(flat[:channels], reference.k_sum(k).flatten())
        assert torch.equal(flat[channels : 2 * channels], reference.v_amax(v).flatten())
        assert flat[2 * channels : 2 * channels + 2 * grid.heads].isnan().all()
        mean = reference.final_mean(torch.stack([reference.k_sum(k)]), 300, case.dtype)
        out = torch.full((grid.batch_size, grid.heads, grid.k_slots), torch.nan)
        kernels.k_grouped_amax(mean, scratch, grid, out)
        amax = primitives.k_grouped_amax(k, mean, rank=rank, world_size=3, used_sequence=case.used, layout=layout)
        assert torch.equal(out, amax)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_v_alone_in_its_own_order(kernels: Kernels, layout: str) -> None:
    """A payload of one rank whose section of V is the whole output."""
    _, grid, (_, _, v), final = single(kernels, layout)
    out = torch.empty(v.shape, dtype=torch.uint8)
    kernels.quant_pack(
        None, None, v, (None, None, None, final.v_scale), grid, [out.data_ptr() - grid.payload.v_offset], scales=False
    )
    assert torch.equal(out, reference.quantize_v(v, final.v_scale, grid.layout.v_max))


def test_mistakes_are_refused_before_anything_is_launched(kernels: Kernels) -> None:
    case, grid, (q, k, v), final = single(kernels, "sage2_sm90")
    scratch, flat = kernels.scratch(grid, case.dtype), torch.zeros(grid.statistics_elems)
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    with pytest.raises(ArgumentValueError, match="q: rows must be aligned to 16 bytes"):
        kernels.statistics(shifted, k, v, grid, flat, scratch)
    narrow = torch.empty(2, 90, 3, 68, dtype=q.dtype)[..., :64]
    with pytest.raises(ArgumentValueError, match="k: rows must be aligned to 16 bytes"):
        kernels.statistics(q, narrow, v, grid, flat, scratch)
    with pytest.raises(ArgumentValueError, match="a destination must be aligned"):
        kernels.quant_pack(q, k, v, final, grid, [8])
    changes: list[tuple[dict[str, int], str]] = [
        ({"head_dim": 96}, "head_dim must be 64 or 128, got 96"),
        ({"rank": 1}, "rank 1 of 1"),
        ({"world_size": 2, "used_sequence": 1}, "heads 3 for 2 ranks"),
        ({"local_sequence": 0}, "sequence 0"),
        ({"used_sequence": 91}, "used_sequence 91 of 90"),
        ({"used_sequence": 0}, "used_sequence 0"),
        ({"batch_size": 2**17}, "fewer than 2\\^31 elements"),
    ]
    for change, text in changes:
        with pytest.raises(ArgumentValueError, match=text):
            kernels.statistics(q, k, v, dataclasses.replace(grid, **change), flat, scratch)
    assert not flat.any()


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_single_rank_needs_no_copy_of_q_and_k(kernels: Kernels, layout: str) -> None:
    """They are quantized in place, and only V and the scales are unpacked."""
    _, grid, (q, k, v), final = single(kernels, layout)
    spec = grid.payload
    sent = torch.empty(1, spec.chunk_bytes, dtype=torch.uint8)
    kernels.quant_pack(q, k, v, final, grid, [sent.data_ptr()])
    wanted = outputs(grid, kernels.device)
    kernels.unpack(sent, grid, wanted[:5])
    outs = outputs(grid, kernels.device)
    kernels.quant_pack(q, None, None, final, grid, [outs[0].data_ptr()], scales=False)
    kernels.quant_pack(None, k, None, final, grid, [outs[1].data_ptr() - spec.k_offset], scales=False)
    kernels.unpack(sent, grid, (None, None, *outs[2:5]))
    for out, other in zip(outs[:5], wanted[:5], strict=True):
        assert torch.equal(out.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize(("pdl", "first"), [(None, "0"), (True, "1"), (False, "0")])
def test_what_somebody_elses_kernel_may_wait_for_does_not_start_early(
    module: Module, kernels: Kernels, pdl: bool | None, first: str
) -> None:
    """Each pass is one kernel. It follows one of another library, which may be waiting for other ranks."""
    case, grid, (q, k, v), final = single(kernels, "sage2_sm90")
    flat, scratch = torch.empty(1, grid.statistics_elems), kernels.scratch(grid, case.dtype)
    sent = torch.empty(1, grid.payload.chunk_bytes, dtype=torch.uint8)
    lowp_host.launches(module)
    kernels.statistics(q, k, v, grid, flat, scratch, pdl=pdl)
    assert lowp_host.launches(module) == first
    kernels.finalize(flat, scratch, grid, final, pdl=pdl)
    kernels.quant_pack(q, k, v, final, grid, [sent.data_ptr()], pdl=pdl)
    kernels.unpack(sent, grid, outputs(grid, kernels.device)[:5], pdl=pdl)
    assert lowp_host.launches(module) == first * 3
    without = Kernels(module, kernels.device, pdl=False)
    without.statistics(q, k, v, grid, flat, scratch, pdl=pdl)
    assert lowp_host.launches(module) == "0"
