"""Encodings of normalized values: against a search for the nearest value, one Python float at a time."""

from __future__ import annotations

import itertools
import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_core.allreduce.patterns import QuantizationSFLayout
from comm_core.allreduce.quant import (
    DYNAMIC_FP8_MIN_SCALE,
    arrange_scales,
    collect_scales,
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    dequantize_nvfp4,
    encode_e2m1,
    encode_e4m3,
    encode_ue8m0,
    pack_e2m1,
    pack_group_scales,
    quantize_fp8,
    quantize_fp8_dynamic,
    quantize_fp8_groups,
    quantize_mxfp8,
    quantize_nvfp4,
    unpack_e2m1,
    unpack_group_scales,
)
from comm_core.allreduce.scales import packed_scale_stride, scale_padding
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.testing import allreduce_naive as naive
from comm_core.testing.reference import assert_same_bits

NAN, INFINITY = math.nan, math.inf
SPECIAL = [0.0, -0.0, NAN, INFINITY, -INFINITY, 3.4028234663852886e38, -1e38, 65504.0, 448.0, -464.0, 1e-10]
SPECIAL += [2.0**-149, -(2.0**-149), 2.0**-126, -(2.0**-127), 2.0**-24, 2.0**-9, 2.0**-10, 6.0, -5.0, 0.25, 1e-38]
SPECIAL = [naive.fp32(value) for value in SPECIAL]
FLOATS = st.one_of(
    st.sampled_from(SPECIAL),
    st.floats(width=32),
    st.floats(-1000, 1000, width=32),
    st.floats(-8, 8, width=16),
)
BITS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=50)


def words(values: list[int]) -> torch.Tensor:
    """Return fp32 numbers with the given bits."""
    return torch.frombuffer(bytearray(struct.pack(f"<{len(values)}I", *values)), dtype=torch.float32)


def codes_of(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


def all_of(dtype: torch.dtype) -> torch.Tensor:
    """Return every value of a 16-bit dtype, widened."""
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype).float()


def midpoints(values: list[float]) -> torch.Tensor:
    """Return fp32 numbers around everything where rounding changes: values, and the middles between neighbours."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(values)]
    at = torch.tensor([*values, *middles, values[-1] * 1.03, values[-1] * 1.04, values[-1] * 2])
    up, down = torch.tensor(INFINITY), torch.tensor(-INFINITY)
    around = torch.cat((at, at.nextafter(up), at.nextafter(down)))
    return torch.cat((around, -around, torch.tensor(SPECIAL)))


def test_decoding_agrees_with_torch() -> None:
    codes = torch.arange(256).to(torch.uint8)
    assert_same_bits(decode_e4m3(codes)[:127], codes.view(torch.float8_e4m3fn).float()[:127])
    assert torch.equal(decode_e4m3(codes).isnan(), codes.view(torch.float8_e4m3fn).float().isnan())
    assert torch.equal(decode_e4m3(codes)[128:255], -decode_e4m3(codes)[:127])
    assert torch.equal(decode_ue8m0(codes)[:255], codes.view(torch.float8_e8m0fnu).float()[:255])
    assert decode_ue8m0(codes)[255].isnan()
    assert decode_e2m1(codes[:16]).tolist() == [*naive.E2M1, *(-value for value in naive.E2M1)]
    assert decode_e2m1(codes[8:9]).signbit().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_becomes_the_nearest_e4m3(dtype: torch.dtype) -> None:
    x = all_of(dtype)
    assert codes_of(encode_e4m3(x)) == [naive.e4m3(value) for value in x.tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_value_becomes_the_nearest_e2m1(dtype: torch.dtype) -> None:
    x = all_of(dtype)
    assert codes_of(encode_e2m1(x)) == [naive.e2m1(value) for value in x.tolist()]


def test_rounding_at_and_beside_every_middle() -> None:
    x = midpoints(naive.E4M3)
    assert codes_of(encode_e4m3(x)) == [naive.e4m3(value) for value in x.tolist()]
    x = midpoints(naive.E2M1)
    assert codes_of(encode_e2m1(x)) == [naive.e2m1(value) for value in x.tolist()]


def test_codes_of_numbers_worth_knowing() -> None:
    x = torch.tensor(
        [0.0, -0.0, 448.0, 464.0, 465.0, 1e30, INFINITY, -INFINITY, 2.0**-10, 2.0**-10 * 1.01, -(2.0**-6)]
    )
    assert codes_of(encode_e4m3(x)) == [0, 0x80, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0, 1, 0x88]
    x = torch.tensor([0.0, -0.0, 0.25, 0.75, 5.0, 5.1, 1e30, INFINITY, -INFINITY, -1.0])
    assert codes_of(encode_e2m1(x)) == [0, 8, 0, 2, 6, 7, 7, 7, 15, 10]
    x = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 1.0000001, 1.7e38, 2.0**127, 3e38, INFINITY, NAN])
    assert codes_of(encode_ue8m0(x)) == [0, 0, 0, 1, 127, 128, 254, 254, 254, 254, 255]


def test_every_nan_has_one_code_whatever_its_sign_and_payload() -> None:
    x = words([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
    assert codes_of(encode_e4m3(x)) == [0x7F] * 6
    assert codes_of(encode_e2m1(x)) == [7] * 6
    assert codes_of(encode_ue8m0(x)) == [255] * 6


@settings(max_examples=200)
@given(st.lists(BITS, min_size=8, max_size=8))
def test_any_32_bits(bits: list[int]) -> None:
    x = words(bits)
    values = x.tolist()
    assert codes_of(encode_e4m3(x)) == [naive.e4m3(value) for value in values]
    assert codes_of(encode_e2m1(x)) == [naive.e2m1(value) for value in values]
    assert codes_of(encode_ue8m0(x)) == [naive.ue8m0(abs(value)) for value in values]


def test_ue8m0_beside_every_power_of_two() -> None:
    x = words([e << 23 | m for e in range(256) for m in (0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF)])
    assert codes_of(encode_ue8m0(x)) == [naive.ue8m0(value) for value in x.tolist()]


def test_every_code_decodes_to_what_encodes_to_it() -> None:
    codes = torch.arange(256).to(torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F]
    assert torch.equal(encode_e4m3(decode_e4m3(finite)), finite)
    assert torch.equal(encode_e2m1(decode_e2m1(codes[:16])), codes[:16])
    assert torch.equal(encode_ue8m0(decode_ue8m0(codes)), codes)


def test_two_codes_share_a_byte_the_even_one_low() -> None:
    codes = torch.arange(16).to(torch.uint8).view(2, 8)
    packed = pack_e2m1(codes)
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]]
    assert torch.equal(unpack_e2m1(packed), codes)
    with pytest.raises(ArgumentValueError, match="must be even"):
        pack_e2m1(codes[:, :7])


@FEW
@given(st.lists(FLOATS, min_size=12, max_size=12), st.floats(2.0**-20, 2.0**20, width=32))
def test_static_fp8(row: list[float], scale: float) -> None:
    out = quantize_fp8(torch.tensor([row]), scale)
    assert out.dtype is torch.float8_e4m3fn
    assert codes_of(out) == naive.fp8_static(row, scale)
    assert_same_bits(out, quantize_fp8(torch.tensor([row]), torch.tensor([scale])))


@FEW
@given(st.lists(FLOATS, min_size=12, max_size=12))
@example([0.0] * 12)
@example([NAN] * 12)
@example([2.0**-149] * 12)
@example([INFINITY, 1.0, -INFINITY, NAN] * 3)
def test_dynamic_fp8(row: list[float]) -> None:
    out, scale = quantize_fp8_dynamic(torch.tensor([row, row[::-1]]))
    codes, expected = naive.fp8_dynamic(row)
    assert (out.dtype, scale.dtype, tuple(scale.shape)) == (torch.float8_e4m3fn, torch.float32, (2, 1))
    assert codes_of(out) == codes + codes[::-1]
    assert scale.flatten().tolist() == [expected, expected]


@FEW
@given(st.lists(FLOATS, min_size=24, max_size=24), st.sampled_from([1, 2, 3, 4, 8, 12, 24]))
@example([0.0] * 24, 8)
@example([INFINITY, NAN] * 12, 8)
@example([448.0 * 2**-40] * 24, 4)
def test_grouped_fp8(row: list[float], size: int) -> None:
    out, scales = quantize_fp8_groups(torch.tensor([row]), size)
    codes, expected = naive.fp8_groups(row, size)
    assert codes_of(out) == codes
    assert scales.tolist() == [expected]


@FEW
@given(st.lists(FLOATS, min_size=64, max_size=64))
@example([0.0] * 64)
@example([NAN] * 64)
@example([-(2.0**-149), 2.0**-140] * 32)
@example([INFINITY, 3e38] * 32)
@example([448.0] * 32 + [448.00003] * 32)
def test_mxfp8(row: list[float]) -> None:
    out, scales = quantize_mxfp8(torch.tensor([row]))
    codes, expected = naive.mxfp8(row)
    assert codes_of(out) == codes
    assert scales.tolist() == [expected]


@FEW
@given(
    st.lists(FLOATS, min_size=32, max_size=32),
    st.one_of(st.sampled_from([1.0, 448.0, 2688.0]), st.floats(2.0**-20, 2.0**20, width=32)),
)
@example([0.0, -0.0] * 16, 1.0)
@example([NAN] + [1.0] * 31, 1.0)
@example([INFINITY] + [1.0] * 31, 1.0)
@example([2.0**-149, -(2.0**-149)] * 16, 1.0)
def test_nvfp4(row: list[float], scale: float) -> None:
    packed, scales = quantize_nvfp4(torch.tensor([row]), scale)
    expected, factors = naive.nvfp4(row, scale)
    assert (packed.dtype, tuple(packed.shape), tuple(scales.shape)) == (torch.uint8, (1, 16), (1, 2))
    assert packed.tolist() == [expected]
    assert scales.tolist() == [factors]
    assert torch.equal(quantize_nvfp4(torch.tensor([row]), torch.tensor(scale))[0], packed)


def test_a_nan_stays_where_it_is_or_takes_its_block_where_the_elements_have_none() -> None:
    x = torch.ones(1, 64)
    x[0, 3] = NAN
    nans = torch.zeros(1, 64, dtype=torch.bool)
    nans[0, 3] = True
    for out in (
        quantize_fp8(x, 1.0),
        quantize_fp8_dynamic(x)[0],
        quantize_fp8_groups(x, 16)[0],
        quantize_mxfp8(x)[0],
    ):
        assert torch.equal(out.float().isnan(), nans)
    for scales in (quantize_fp8_groups(x, 16)[1], quantize_mxfp8(x)[1]):
        assert (scales == scales[0, -1]).all()
    packed, scales = quantize_nvfp4(x, 1.0)
    assert dequantize_nvfp4(packed, scales, 1.0).isnan().tolist() == [[True] * 16 + [False] * 48]


def test_an_infinity_saturates_or_shows_in_the_whole_row() -> None:
    x = torch.ones(1, 32)
    x[0, 3] = -INFINITY
    assert quantize_fp8(x, 1.0).float()[0, :5].tolist() == [1, 1, 1, -448, 1]
    for out in (quantize_fp8_groups(x, 16)[0], quantize_mxfp8(x)[0]):
        assert out.float()[0, :5].tolist() == [0, 0, 0, -448, 0]
    out, scale = quantize_fp8_dynamic(x)
    assert scale.item() == INFINITY
    assert (out.float() * scale).isnan().all()
    packed, scales = quantize_nvfp4(x, 1.0)
    assert dequantize_nvfp4(packed, scales, 1.0)[0, :5].tolist() == [0, 0, 0, -6 * 448, 0]


def test_a_row_of_zeros_keeps_its_signs_and_has_a_usable_scale() -> None:
    x = torch.zeros(1, 32)
    x[0, 1::2] = -0.0
    signs = [0x00, 0x80] * 16
    out, scale = quantize_fp8_dynamic(x)
    assert (codes_of(out), scale.item()) == (signs, torch.tensor(DYNAMIC_FP8_MIN_SCALE).item())
    out, scales = quantize_fp8_groups(x, 32)
    assert (codes_of(out), scales.tolist()) == (signs, [[94]])
    out, scales = quantize_mxfp8(x)
    assert (codes_of(out), scales.tolist()) == (signs, [[0]])
    packed, scales = quantize_nvfp4(x, 1.0)
    assert (packed.tolist(), scales.tolist()) == ([[0x80] * 16], [[0, 0]])


def test_what_fits_comes_back() -> None:
    """Values that the element type has, with a scale that is a power of two, are kept exactly."""
    row = torch.tensor(naive.E2M1 + [-value for value in naive.E2M1])
    packed, scales = quantize_nvfp4(torch.stack((row, row * 4)), 1.0)
    assert torch.equal(dequantize_nvfp4(packed, scales, 1.0), torch.stack((row, row * 4)))


@pytest.mark.parametrize("layout", QuantizationSFLayout)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (5, 3), (8, 4), (129, 5), (0, 4), (3, 0)])
def test_arranged_scales_come_back_and_padding_is_zero(layout: QuantizationSFLayout, rows: int, columns: int) -> None:
    codes = torch.randint(1, 256, (rows, columns), dtype=torch.uint8)
    buffer = arrange_scales(codes, layout)
    assert torch.equal(collect_scales(buffer, rows, columns, layout), codes)
    assert int((buffer == 0).sum()) == scale_padding(rows, columns, layout)
    with pytest.raises(ArgumentValueError, match=f"in {layout.name} takes"):
        collect_scales(buffer.flatten()[:-1], rows + 1, columns + 1, layout)


@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (3, 4), (5, 9), (4, 8), (0, 4), (2, 0)])
def test_group_scales_lie_four_in_a_word(tokens: int, groups: int) -> None:
    codes = torch.randint(1, 256, (tokens, groups), dtype=torch.uint8)
    words = pack_group_scales(codes)
    assert words.dtype is torch.int32
    assert (tuple(words.shape), words.stride()) == ((tokens, -(-groups // 4)), packed_scale_stride(tokens))
    for token in range(tokens):
        for group in range(groups):
            assert (int(words[token, group // 4]) >> 8 * (group % 4)) & 255 == int(codes[token, group])
    assert torch.equal(unpack_group_scales(words, groups), codes)
    stored = torch.tensor([], dtype=torch.uint8).set_(words.untyped_storage())
    assert int((stored != 0).sum()) == codes.numel()


def test_what_is_no_fp32_or_no_code_is_refused() -> None:
    half, whole = torch.zeros(1, 32, dtype=torch.bfloat16), torch.zeros(1, 32)
    for call in (encode_e4m3, encode_e2m1, encode_ue8m0, quantize_fp8_dynamic, quantize_mxfp8):
        with pytest.raises(ArgumentTypeError, match="must be float32"):
            call(half)
    for call in (decode_e4m3, decode_e2m1, decode_ue8m0, pack_e2m1, unpack_e2m1, pack_group_scales):
        with pytest.raises(ArgumentTypeError, match="must be uint8"):
            call(whole)
    with pytest.raises(ArgumentTypeError, match="words must be int32"):
        unpack_group_scales(whole, 4)
    with pytest.raises(ArgumentValueError, match=r"words must be \[tokens, 2\]"):
        unpack_group_scales(torch.zeros(1, 1, dtype=torch.int32), 5)


def test_scales_and_blocks_that_cant_be_used_are_refused() -> None:
    x = torch.zeros(2, 40)
    with pytest.raises(ArgumentValueError, match="scale must be a number or one float32 element"):
        quantize_fp8(x, torch.ones(2))
    with pytest.raises(ArgumentValueError, match="scale_factor must be a number or one float32 element"):
        quantize_nvfp4(x[:, :32], torch.ones(1, dtype=torch.float64))
    with pytest.raises(ArgumentValueError, match="multiple of 16"):
        quantize_nvfp4(x, 1.0)
    with pytest.raises(ArgumentValueError, match="multiple of 32"):
        quantize_mxfp8(x)
    with pytest.raises(ArgumentValueError, match="multiple of block_quant_group_size=16"):
        quantize_fp8_groups(x, 16)
    with pytest.raises(ArgumentValueError, match="block_quant_group_size must be positive, got 0"):
        quantize_fp8_groups(x, 0)
    with pytest.raises(ArgumentTypeError, match="block_quant_group_size must be an int"):
        quantize_fp8_groups(x, True)
