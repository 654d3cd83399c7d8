"""The fused all-reduce in plain PyTorch, against the same formulas one Python float at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, Quantization, QuantizationSFLayout
from comm_core.allreduce.quant import collect_scales, unpack_group_scales
from comm_core.allreduce.reference import (
    DTYPES,
    FusionOutputs,
    fuse,
    moe_finalize,
    moe_reduce,
    reduce_in_rank_order,
    rms_norm,
)
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.testing import allreduce_naive as naive
from comm_core.testing.reference import assert_same_bits

NAN, INFINITY = math.nan, math.inf
TOKENS, HIDDEN = 3, 64
PATTERN = AllReduceFusionPattern
WITH_NORM = [pattern for pattern in PATTERN if pattern is not PATTERN.kAllReduce]
SCALE = 0.37


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(dtype: torch.dtype, hidden: int = HIDDEN) -> dict[str, Any]:
    """Return arguments that serve every pattern with a norm."""
    return dict(
        residual_in=random(TOKENS, hidden, dtype=dtype, seed=1),
        rms_gamma=random(hidden, dtype=dtype, seed=2),
        rms_eps=1e-5,
        weight_bias=0.25,
        scale_factor=SCALE,
        block_quant_group_size=16,
    )


def made(outputs: FusionOutputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(outputs).items() if value is not None}


# The sum.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_sum_is_taken_in_the_order_of_ranks(dtype: torch.dtype, world: int) -> None:
    operands = [random(TOKENS, 5, dtype=dtype, seed=rank) * 4**rank for rank in range(world)]
    total = reduce_in_rank_order(operands)
    expected = [0.0] * total.numel()
    for x in operands:
        expected = [naive.fp32(a + b) for a, b in zip(expected, x.flatten().tolist(), strict=True)]
    assert (total.dtype, tuple(total.shape)) == (torch.float32, (TOKENS, 5))
    assert total.flatten().tolist() == expected


def test_another_order_would_be_another_sum() -> None:
    large, one = torch.full((1, 1), 2.0**24), torch.ones(1, 1)
    assert reduce_in_rank_order([one, large, -large]).item() == 0
    assert reduce_in_rank_order([large, -large, one]).item() == 1


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(0, 1000))
def test_whole_numbers_are_summed_exactly_in_any_order(world: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    operands = [torch.randint(-16, 17, (2, 9), generator=generator).to(torch.float16) for _ in range(world)]
    total = reduce_in_rank_order(operands)
    assert torch.equal(total, reduce_in_rank_order(operands[::-1]))
    assert torch.equal(total.to(torch.int64), sum(x.to(torch.int64) for x in operands))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_never_minus_zero(dtype: torch.dtype) -> None:
    zeros = torch.tensor([[-0.0, 0.0, -0.0, 1.0]], dtype=dtype)
    for operands in ([zeros], [zeros, -zeros], [zeros, zeros], [zeros] * 8):
        total = reduce_in_rank_order(operands)
        assert not (total.signbit() & (total == 0)).any()
        out = fuse(PATTERN.kAllReduce, total, dtype).output
        assert not (out.signbit() & (out == 0)).any()


def test_special_values_sum_as_ieee_has_it() -> None:
    a = torch.tensor([[INFINITY, INFINITY, NAN, 1.0, 3e38]])
    b = torch.tensor([[1.0, -INFINITY, 1.0, NAN, 3e38]])
    total = reduce_in_rank_order([a, b])[0].tolist()
    assert total[0] == INFINITY and total[4] == INFINITY
    assert all(map(math.isnan, total[1:4]))


def test_a_sum_beyond_fp16_is_infinite_and_partial_ones_are_not() -> None:
    big = torch.full((1, 1), 60000.0, dtype=torch.float16)
    assert fuse(PATTERN.kAllReduce, reduce_in_rank_order([big, big]), torch.float16).output.item() == INFINITY
    assert fuse(PATTERN.kAllReduce, reduce_in_rank_order([big, big, -big]), torch.float16).output.item() == 60000


def test_operands_that_cant_be_summed_are_refused() -> None:
    x = torch.zeros(2, 2)
    with pytest.raises(ArgumentValueError, match="one tensor a rank, got none"):
        reduce_in_rank_order([])
    with pytest.raises(ArgumentTypeError, match=r"operands\[0\] must be a tensor, got list"):
        reduce_in_rank_order([[1.0]])
    with pytest.raises(ArgumentTypeError, match=r"operands\[1\] must be a tensor, got NoneType"):
        reduce_in_rank_order([x, None])
    with pytest.raises(ArgumentValueError, match=r"operands\[1\] must have the shape \(2, 2\), got \(2, 3\)"):
        reduce_in_rank_order([x, torch.zeros(2, 3)])
    with pytest.raises(ArgumentValueError, match=r"operands\[1\] must be torch.float32, got torch.float16"):
        reduce_in_rank_order([x, x.half()])
    with pytest.raises(ArgumentValueError, match=r"got torch\.int32"):
        reduce_in_rank_order([x.int()])
    with pytest.raises(ArgumentValueError, match=r"operands\[1\] must be on cpu, got meta"):
        reduce_in_rank_order([x, x.to("meta")])


# The norm.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 2, 7, 64, 257])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_the_norm(dtype: torch.dtype, hidden: int, bias: float) -> None:
    x, gamma = random(TOKENS, hidden, dtype=dtype, seed=3), random(hidden, dtype=dtype, seed=4)
    out = rms_norm(x, gamma, 1e-6, bias)
    assert out.dtype is dtype
    expected = [naive.norm(row, gamma.tolist(), 1e-6, bias, dtype) for row in x.tolist()]
    assert out.tolist() == expected


def test_the_norm_agrees_with_that_of_torch() -> None:
    x, gamma = random(16, 512, seed=5), random(512, seed=6)
    expected = torch.nn.functional.rms_norm(x, (512,), gamma, 1e-6)
    torch.testing.assert_close(rms_norm(x, gamma, 1e-6, 0.0), expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(rms_norm(x, gamma - 1, 1e-6, 1.0), expected, rtol=1e-5, atol=1e-6)


def test_the_norm_is_the_same_with_any_number_of_threads_and_rows() -> None:
    x, gamma = random(2, 8192, seed=7), random(8192, seed=8)
    before = torch.get_num_threads()
    try:
        results: list[torch.Tensor] = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results += [rms_norm(x, gamma, 1e-6, 0.0), rms_norm(x[1:], gamma, 1e-6, 0.0)]
    finally:
        torch.set_num_threads(before)
    for result in results:
        assert_same_bits(result[-1], results[0][-1])


def test_special_values_stay_in_their_row() -> None:
    x = torch.ones(5, 4)
    x[1, 2], x[2, 2] = NAN, INFINITY
    x[3] = torch.tensor([3e38, -3e38, 1.0, 0.0])
    x[4] = 0.0
    out = rms_norm(x, torch.ones(4), 1e-6, 0.0)
    assert_same_bits(out[0], rms_norm(x[:1], torch.ones(4), 1e-6, 0.0)[0])
    assert out[1].isnan().all()
    assert out[2].isnan().tolist() == [False, False, True, False]
    assert out[2, [0, 1, 3]].tolist() == [0, 0, 0]
    # Squares beyond fp32: the mean is infinite and everything finite becomes a zero with its sign.
    assert out[3].tolist() == [0, 0, 0, 0] and out[3].signbit().tolist() == [False, True, False, False]
    assert out[4].tolist() == [0, 0, 0, 0]


# What follows the sum.


def expected_quant(rows: list[list[float]], encoding: Quantization) -> tuple[list[int], list[Any]]:
    """Return the bytes of `quant_out` and the rows of scales."""
    codes: list[int] = []
    scales: list[Any] = []
    for row in rows:
        if encoding is Quantization.FP8:
            codes += naive.fp8_static(row, SCALE)
            continue
        one, scale = {
            Quantization.DYNAMIC_FP8: lambda row=row: naive.fp8_dynamic(row),
            Quantization.GROUP_FP8: lambda row=row: naive.fp8_groups(row, 16),
            Quantization.NVFP4: lambda row=row: naive.nvfp4(row, SCALE),
            Quantization.MXFP8: lambda row=row: naive.mxfp8(row),
        }[encoding]()
        codes += one
        scales.append(scale)
    return codes, scales


def read_scales(out: torch.Tensor, encoding: Quantization, layout: QuantizationSFLayout) -> list[Any]:
    """Return the rows of scales of a `scale_out`."""
    if encoding is Quantization.DYNAMIC_FP8:
        return out.flatten().tolist()
    if encoding is Quantization.GROUP_FP8:
        return unpack_group_scales(out, HIDDEN // 16).tolist()
    block = 16 if encoding is Quantization.NVFP4 else 32
    assert out.dtype is (torch.float8_e4m3fn if block == 16 else torch.uint8)
    return collect_scales(out.view(torch.uint8), TOKENS, HIDDEN // block, layout).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", WITH_NORM)
def test_a_pattern_is_its_formula(pattern: AllReduceFusionPattern, dtype: torch.dtype) -> None:
    spec = PATTERNS[pattern]
    given_arguments = arguments(dtype)
    total = reduce_in_rank_order([random(TOKENS, HIDDEN, dtype=dtype, seed=10 + rank) for rank in range(3)])
    outputs = fuse(pattern, total, dtype, **given_arguments)
    assert set(made(outputs)) == set(spec.returns)
    everything = fuse(pattern, total, dtype, wanted=spec.may_return, **given_arguments)
    assert set(made(everything)) == {*spec.returns, *spec.may_return}
    for name, value in made(outputs).items():
        assert_same_bits(value, getattr(everything, name))

    to = naive.rounder(dtype)
    rows = [[to(value) for value in row] for row in total.tolist()]
    if everything.output is not None:
        assert everything.output.tolist() == rows
    residual = [
        [to(naive.fp32(a + b)) for a, b in zip(row, other, strict=True)]
        for row, other in zip(rows, given_arguments["residual_in"].tolist(), strict=True)
    ]
    assert everything.residual_out.dtype is everything.norm_out.dtype is dtype
    assert everything.residual_out.tolist() == residual
    gamma = given_arguments["rms_gamma"].tolist()
    norm = [naive.norm(row, gamma, 1e-5, 0.25, dtype) for row in residual]
    assert everything.norm_out.tolist() == norm
    if spec.quantization is not Quantization.NONE:
        codes, scales = expected_quant(norm, spec.quantization)
        assert everything.quant_out.view(torch.uint8).flatten().tolist() == codes
        if everything.scale_out is not None:
            layout = QuantizationSFLayout.SWIZZLED_128x4
            assert read_scales(everything.scale_out, spec.quantization, layout) == scales


@pytest.mark.parametrize("layout", QuantizationSFLayout)
@pytest.mark.parametrize("encoding", [Quantization.NVFP4, Quantization.MXFP8])
def test_block_scales_in_every_layout(encoding: Quantization, layout: QuantizationSFLayout) -> None:
    total = reduce_in_rank_order([random(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=20)])
    out = fuse(
        PATTERN.kARResidualRMSNormOutFP4Quant,
        total,
        torch.bfloat16,
        layout_code=int(layout),
        quantization=encoding,
        **arguments(torch.bfloat16),
    )
    codes, scales = expected_quant(out.norm_out.tolist(), encoding)
    assert out.quant_out.view(torch.uint8).flatten().tolist() == codes
    assert out.scale_out.dim() == (2 if layout is QuantizationSFLayout.LINEAR else 1)
    assert read_scales(out.scale_out, encoding, layout) == scales


@pytest.mark.parametrize("pattern", WITH_NORM)
def test_patterns_with_and_without_norm_out_agree_and_inputs_stay(pattern: AllReduceFusionPattern) -> None:
    total, given_arguments = random(TOKENS, HIDDEN), arguments(torch.float32)
    before = total.clone(), given_arguments["residual_in"].clone(), given_arguments["rms_gamma"].clone()
    outputs = made(fuse(pattern, total, torch.float32, wanted=PATTERNS[pattern].may_return, **given_arguments))
    plain = made(fuse(PATTERN.kARResidualRMSNorm, total, torch.float32, **given_arguments))
    assert_same_bits(outputs["norm_out"], plain["norm_out"])
    assert_same_bits(outputs["residual_out"], plain["residual_out"])
    inputs = total, given_arguments["residual_in"], given_arguments["rms_gamma"]
    for x, old in zip(inputs, before, strict=True):
        assert_same_bits(x, old)
        assert all(x.data_ptr() != value.data_ptr() for value in outputs.values())


def test_the_plain_sum_is_a_tensor_of_its_own() -> None:
    total = random(2, 3)
    out = fuse(0, total, torch.float32).output
    assert torch.equal(out, total) and out.data_ptr() != total.data_ptr()
    assert fuse(0, total, torch.bfloat16).output.dtype is torch.bfloat16


@pytest.mark.parametrize("pattern", PATTERN)
def test_no_tokens_are_no_error(pattern: AllReduceFusionPattern) -> None:
    given_arguments = arguments(torch.bfloat16)
    given_arguments["residual_in"] = given_arguments["residual_in"][:0]
    outputs = fuse(pattern, torch.zeros(0, HIDDEN), torch.bfloat16, **given_arguments)
    assert set(made(outputs)) == set(PATTERNS[pattern].returns)
    for name, value in made(outputs).items():
        assert value.shape[0] == 0, name


@pytest.mark.parametrize("pattern", WITH_NORM)
def test_special_values_reach_quantized_rows_of_their_own_only(pattern: AllReduceFusionPattern) -> None:
    total, given_arguments = random(TOKENS, HIDDEN), arguments(torch.float32)
    clean = made(fuse(pattern, total, torch.float32, **given_arguments, layout_code=2))
    total[1, 5] = NAN
    dirty = made(fuse(pattern, total, torch.float32, **given_arguments, layout_code=2))
    for name, value in dirty.items():
        for row in (0, 2):
            assert_same_bits(value[row].contiguous(), clean[name][row].contiguous())
    if "scale_out" in dirty and PATTERNS[pattern].quantization is Quantization.NVFP4:
        assert dirty["scale_out"][1].float().isnan().all()
    elif "quant_out" in dirty:
        assert dirty["quant_out"][1].float().isnan().all()
    else:
        assert dirty["norm_out"][1].isnan().all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(residual_in=None), r"\(code 5\) needs residual_in, got None"),
        (dict(rms_gamma=None), r"\(code 5\) needs rms_gamma, got None"),
        (dict(residual_in=[1]), "residual_in must be a tensor, got list"),
        (dict(residual_in=torch.zeros(1, 2)), r"residual_in must have the shape \(3, 64\), got \(1, 2\)"),
        (dict(residual_in=torch.zeros(TOKENS, HIDDEN)), "residual_in must be torch.bfloat16, got torch.float32"),
        (dict(rms_gamma=torch.zeros(HIDDEN)), "rms_gamma must be torch.bfloat16, got torch.float32"),
        (dict(rms_gamma=torch.zeros(1, HIDDEN)), r"rms_gamma must have the shape \(64,\), got \(1, 64\)"),
        (
            dict(rms_gamma=torch.zeros(HIDDEN, dtype=torch.bfloat16, device="meta")),
            "rms_gamma must be on cpu, got meta",
        ),
        (dict(rms_eps=-1.0), "rms_eps must not be negative, got -1.0"),
        (dict(rms_eps=NAN), "rms_eps must not be negative, got nan"),
        (dict(scale_factor=None), "scale_factor is needed for nvfp4, got None"),
        (dict(scale_factor=torch.ones(2)), "scale_factor must be a number or one float32 element"),
        (dict(layout_code=3), "layout_code=3 is no code"),
        (dict(quantization=Quantization.GROUP_FP8, block_quant_group_size=None), "block_quant_group_size is needed"),
        (dict(quantization=Quantization.GROUP_FP8, block_quant_group_size=48), "block_quant_group_size=48"),
        (dict(wanted=["output"]), r"\(code 5\) does not make output"),
        (dict(dtype=torch.float64), "dtype must be one of torch.float16"),
        (dict(reduced=torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)), "reduced must be float32"),
        (dict(reduced=torch.zeros(HIDDEN)), r"reduced must be float32 \[tokens, hidden_dim\]"),
        (dict(reduced=None), "reduced must be a tensor, got NoneType"),
        (dict(pattern=13), "pattern=13 is no code"),
    ],
)
def test_an_argument_that_cant_be_used_is_named(change: dict[str, Any], text: str) -> None:
    call: dict[str, Any] = dict(
        pattern=PATTERN.kARResidualRMSNormOutFP4Quant,
        reduced=torch.zeros(TOKENS, HIDDEN),
        dtype=torch.bfloat16,
        **arguments(torch.bfloat16),
    )
    fuse(**call)
    with pytest.raises(ArgumentValueError, match=text):
        fuse(**{**call, **change})


@pytest.mark.parametrize(("code", "hidden", "block"), [(3, 24, 16), (3, 8, 16)])
def test_a_row_that_is_no_whole_number_of_blocks_is_refused(code: int, hidden: int, block: int) -> None:
    with pytest.raises(ArgumentValueError, match=f"hidden_dim must be a multiple of {block} for NVFP4, got {hidden}"):
        fuse(code, torch.zeros(TOKENS, hidden), torch.float16, **arguments(torch.float16, hidden))
    with pytest.raises(ArgumentValueError, match=f"hidden_dim must be a multiple of 32 for MXFP8, got {hidden}"):
        fuse(
            code,
            torch.zeros(TOKENS, hidden),
            torch.float16,
            quantization=Quantization.MXFP8,
            **arguments(torch.float16, hidden),
        )


def test_a_norm_of_nothing_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="hidden_dim must be positive"):
        fuse(1, torch.zeros(TOKENS, 0), torch.float16, **arguments(torch.float16, 0))


# Operands of the mixture of experts.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("experts", [0, 1, 3])
def test_the_reduction_of_experts(dtype: torch.dtype, experts: int) -> None:
    outputs, scales = random(experts, TOKENS, 8, dtype=dtype, seed=30), random(experts, TOKENS, seed=31)
    shared = random(TOKENS, 8, dtype=dtype, seed=32)
    to = naive.rounder(dtype)
    expected = [[0.0] * 8 for _ in range(TOKENS)]
    for token in range(TOKENS):
        for column in range(8):
            acc = 0.0
            for expert in range(experts):
                product = to(naive.fp32(outputs[expert, token, column].item() * scales[expert, token].item()))
                acc = to(naive.fp32(acc + product))
            expected[token][column] = to(naive.fp32(acc + shared[token, column].item()))
    out = moe_reduce(outputs, scales, shared, experts)
    assert out.dtype is dtype and out.tolist() == expected
    flat = moe_reduce(outputs.view(experts * TOKENS, 8), scales.flatten(), shared, experts)
    assert_same_bits(flat, out)


def test_what_the_reduction_of_experts_refuses() -> None:
    outputs, scales, shared = torch.zeros(2, TOKENS, 8), torch.zeros(2, TOKENS), torch.zeros(TOKENS, 8)
    prefix = "moe_reduction_"
    with pytest.raises(
        ArgumentValueError, match=f"{prefix}active_experts_token_input must be .* contiguous elements"
    ):
        moe_reduce(outputs, scales, shared, 3)
    with pytest.raises(ArgumentValueError, match=f"{prefix}scale_input must be .* contiguous elements"):
        moe_reduce(outputs, torch.zeros(TOKENS, 2).T, shared, 2)
    with pytest.raises(ArgumentValueError, match=f"{prefix}scale_input must be torch.float32"):
        moe_reduce(outputs, scales.half(), shared, 2)
    with pytest.raises(ArgumentValueError, match=f"{prefix}active_experts_token_input must be torch.float32"):
        moe_reduce(outputs.half(), scales, shared, 2)
    with pytest.raises(ArgumentValueError, match=rf"{prefix}token_input must be \[tokens, hidden_dim\]"):
        moe_reduce(outputs, scales, shared[0], 2)
    with pytest.raises(ArgumentTypeError, match=f"{prefix}device_num_experts must be an int"):
        moe_reduce(outputs, scales, shared, 2.0)
    with pytest.raises(ArgumentValueError, match=f"{prefix}device_num_experts must not be negative"):
        moe_reduce(outputs, scales, shared, -1)
    with pytest.raises(ArgumentTypeError, match=f"{prefix}scale_input must be a tensor"):
        moe_reduce(outputs, None, shared, 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize("scales", [None, "operand", "fp32"])
def test_the_end_of_experts(dtype: torch.dtype, shared: bool, factor: float | None, scales: str | None) -> None:
    rows = random(7, 8, dtype=dtype, seed=40)
    rows[5:] = NAN
    index = torch.tensor([[0, -1, 4], [-1, -1, -1], [3, 3, 2]], dtype=torch.int32)
    weights = None if scales is None else random(3, 3, dtype=dtype if scales == "operand" else torch.float32, seed=41)
    part = random(3, 8, dtype=dtype, seed=42) if shared else None
    to = naive.rounder(dtype)
    expected = [[0.0] * 8 for _ in range(3)]
    for token in range(3):
        for column in range(8):
            acc = 0.0
            for slot in range(3):
                row = int(index[token, slot])
                if row >= 0:
                    weight = 1.0 if weights is None else weights[token, slot].item()
                    acc = to(naive.fp32(acc + to(naive.fp32(rows[row, column].item() * weight))))
            acc = acc if factor is None else to(naive.fp32(acc * factor))
            expected[token][column] = acc if part is None else to(naive.fp32(acc + part[token, column].item()))
    out = moe_finalize(rows, index, weights, part, factor)
    assert out.dtype is dtype and out.tolist() == expected


def test_the_end_of_no_experts_is_the_shared_part() -> None:
    index = torch.full((2, 3), -1, dtype=torch.int32)
    part = random(2, 8)
    assert torch.equal(moe_finalize(torch.zeros(0, 8), index, None, part), part)
    assert torch.equal(moe_finalize(torch.zeros(0, 8), index), torch.zeros(2, 8))
    assert tuple(moe_finalize(torch.zeros(4, 8), index[:0]).shape) == (0, 8)


def test_what_the_end_of_experts_refuses() -> None:
    rows, index = torch.zeros(4, 8), torch.zeros(2, 3, dtype=torch.int32)
    for value in (4, -2):
        bad = index.clone()
        bad[1, 2] = value
        with pytest.raises(
            ArgumentValueError, match=rf"expanded_idx_to_permuted_idx\[1, 2\] is {value}: expected -1"
        ):
            moe_finalize(rows, bad)
    with pytest.raises(ArgumentValueError, match=r"must be \[tokens, top_k\], got \(6,\)"):
        moe_finalize(rows, index.flatten())
    with pytest.raises(ArgumentValueError, match=r"expanded_idx_to_permuted_idx must be torch.int32"):
        moe_finalize(rows, index.long())
    with pytest.raises(ArgumentTypeError, match="expanded_idx_to_permuted_idx must be a tensor"):
        moe_finalize(rows, None)
    with pytest.raises(ArgumentValueError, match=r"expert_scale_factor must have the shape \(2, 3\)"):
        moe_finalize(rows, index, torch.zeros(3, 2))
    with pytest.raises(ArgumentValueError, match=r"expert_scale_factor must be torch.float32, got torch.float16"):
        moe_finalize(rows, index, torch.zeros(2, 3).half())
    with pytest.raises(ArgumentValueError, match=r"shared_expert_output must have the shape \(2, 8\)"):
        moe_finalize(rows, index, None, torch.zeros(3, 8))
    with pytest.raises(ArgumentValueError, match=r"input must be \[tokens, hidden_dim\]"):
        moe_finalize(rows[0], index)
