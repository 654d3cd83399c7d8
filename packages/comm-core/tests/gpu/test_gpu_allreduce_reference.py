"""The reference of the fused all-reduce gives the same bits on a GPU as on the CPU.

Runs where there are GPUs (``python tools/gpu_check.py``); elsewhere it is skipped, and ``COMM_REQUIRE_GPU=1`` turns
that into a failure.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_core.allreduce import quant
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, Quantization, QuantizationSFLayout
from comm_core.allreduce.reference import DTYPES, fuse, moe_finalize, moe_reduce, reduce_in_rank_order
from comm_core.testing.reference import assert_same_bits

pytestmark = pytest.mark.gpu


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Return numbers over many powers of two: rounding at every size, subnormal results, saturation."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 12, shape, generator=generator)
    return torch.ldexp(torch.randn(*shape, generator=generator), spread).to(dtype)


def moved(x: Any) -> Any:
    return x.cuda() if isinstance(x, torch.Tensor) else x


def check(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Compare every result of a call on the CPU with that on the GPU."""
    here = call(*args, **kwargs)
    there = call(*map(moved, args), **{name: moved(value) for name, value in kwargs.items()})
    if isinstance(here, torch.Tensor):
        here, there = (here,), (there,)
    elif not isinstance(here, tuple):
        here, there = tuple(vars(here).values()), tuple(vars(there).values())
    assert len(here) == len(there)
    for a, b in zip(here, there, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert b.is_cuda and a.stride() == b.stride()
            # NaN of the two devices may differ in payload, where a result is no code.
            if a.dtype in DTYPES:
                assert torch.equal(a.isnan(), b.cpu().isnan())
                a, b = a.nan_to_num(nan=0.5), b.nan_to_num(nan=0.5)
            assert_same_bits(a.contiguous(), b.cpu().contiguous())


@pytest.mark.parametrize("call", [quant.encode_e4m3, quant.encode_e2m1, quant.encode_ue8m0])
def test_conversions(call: Callable[..., Any]) -> None:
    """Every sign, exponent and upper mantissa, with what is below set to nothing, half a step, and beside it."""
    top = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32) << 16
    for low in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        check(call, (top | low).view(torch.float32))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: quant.quantize_fp8(x, 0.37),
        quant.quantize_fp8_dynamic,
        lambda x: quant.quantize_fp8_groups(x, 16),
        lambda x: quant.quantize_nvfp4(x, 0.37),
        quant.quantize_mxfp8,
    ],
    ids=["fp8", "dynamic_fp8", "group_fp8", "nvfp4", "mxfp8"],
)
def test_encodings_with_special_values(call: Callable[..., Any]) -> None:
    x = random(64, 512, seed=1)
    values = (math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 3e38, 1e-38)
    for row, value in enumerate(values):
        x[row, row * 32 : row * 32 + 3] = value
    x[10], x[11], x[12] = 0.0, 2.0**-140, math.nan
    check(call, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", AllReduceFusionPattern)
def test_patterns(pattern: AllReduceFusionPattern, dtype: torch.dtype) -> None:
    total = reduce_in_rank_order([random(33, 512, dtype=dtype, seed=rank) for rank in range(4)])
    check(
        fuse,
        pattern,
        total,
        dtype,
        residual_in=random(33, 512, dtype=dtype, seed=8),
        rms_gamma=random(512, dtype=dtype, seed=9),
        scale_factor=torch.tensor([0.37]),
        block_quant_group_size=128,
        wanted=PATTERNS[pattern].may_return,
    )


@pytest.mark.parametrize("layout", QuantizationSFLayout)
@pytest.mark.parametrize("encoding", [Quantization.NVFP4, Quantization.MXFP8])
def test_layouts(encoding: Quantization, layout: QuantizationSFLayout) -> None:
    check(
        fuse,
        AllReduceFusionPattern.kARResidualRMSNormFP4Quant,
        random(130, 192, seed=20),
        torch.bfloat16,
        residual_in=random(130, 192, dtype=torch.bfloat16, seed=21),
        rms_gamma=random(192, dtype=torch.bfloat16, seed=22),
        scale_factor=1.0,
        layout_code=layout,
        quantization=encoding,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_and_experts(dtype: torch.dtype) -> None:
    operands = [random(5, 96, dtype=dtype, seed=rank) for rank in range(8)]
    cuda = reduce_in_rank_order([x.cuda() for x in operands])
    assert_same_bits(cuda.cpu(), reduce_in_rank_order(operands))
    check(moe_reduce, random(3, 5, 96, dtype=dtype, seed=30), random(3, 5, seed=31), operands[0], 3)
    index = torch.tensor([[0, -1, 4], [-1, -1, -1], [3, 3, 2]], dtype=torch.int32)
    weights, part = random(3, 3, seed=33), random(3, 96, dtype=dtype, seed=34)
    check(moe_finalize, random(7, 96, dtype=dtype, seed=32), index, weights, part, 2.5)
