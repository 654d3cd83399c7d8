"""The references against a second formulation, element by element, and the helpers that make and compare data."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

from comm_core.errors import ArgumentValueError
from comm_core.testing import reference
from comm_core.testing.reference import DTYPES, STRIDED_LAYOUTS, assert_same_bits, bits, make_input

SHAPES = [(size, b, n, h) for size in (1, 2, 3, 4) for b, n, h in ((1, 2, 1), (2, 1, 3), (3, 2, 2))]


def operands(size, shape, dtype=torch.int16, seed=0):
    return [make_input(seed, rank, shape, dtype) for rank in range(size)]


def build(shape, dtype, element):
    """Return the tensor whose element at each index is ``element(*index)``."""
    values = [element(*index) for index in itertools.product(*map(range, shape))]
    return torch.stack(values).view(shape).to(dtype)


@pytest.mark.parametrize(("size", "b", "n", "h"), SHAPES)
def test_head_transforms_move_every_element_to_its_place(size, b, n, h):
    xs = operands(size, (b, n, size * h, 5))
    scattered = reference.scatter_heads(xs)
    for rank, actual in enumerate(scattered):
        expected = build(
            (b, size * n, h, 5), xs[0].dtype, lambda i, s, k, d, r=rank: xs[s // n][i, s % n, r * h + k, d]
        )
        assert_same_bits(actual, expected)
    gathered = reference.gather_heads(scattered)
    for rank, actual in enumerate(gathered):
        expected = build(
            (b, n, size * h, 5), xs[0].dtype, lambda i, s, k, d, r=rank: scattered[k // h][i, r * n + s, k % h, d]
        )
        assert_same_bits(actual, expected)
        # The inverse gives back what there was at first.
        assert_same_bits(actual, xs[rank])


@pytest.mark.parametrize("size", [1, 2, 5])
def test_exchange_chunks_swaps_slot_and_rank(size):
    xs = operands(size, (1, 1, size, 7))
    for rank, actual in enumerate(reference.exchange_chunks(xs)):
        assert_same_bits(actual, build((1, 1, size, 7), xs[0].dtype, lambda _, __, s, c, r=rank: xs[s][0, 0, r, c]))


@pytest.mark.parametrize(("size", "b", "n", "h"), SHAPES)
def test_head_chunks_of_a_schedule_are_the_whole(size, b, n, h):
    d, shape = 3, (b, n, size * h, 3)
    q, k, v = (operands(size, shape, seed=seed) for seed in (1, 2, 3))
    whole = [reference.scatter_heads(xs) for xs in (q, k, v)]
    outs = [make_input(9, rank, shape, torch.int16) for rank in range(size)]
    untouched = [out.clone() for out in outs]
    for offset, count in [(0, 1), (1, h - 1)] if h > 1 else [(0, 1)]:
        fused = reference.scatter_qkv_head_chunk(q, k, v, head_offset=offset, head_count=count)
        bands = []
        for rank in range(size):
            for part, full in zip(fused[rank].split(d, dim=-1), whole, strict=True):
                assert_same_bits(part, full[rank][:, :, offset : offset + count])
            bands.append(fused[rank][..., :d].contiguous())
        before = outs
        outs = reference.gather_output_head_chunk(bands, outs, local_heads=h, head_offset=offset)
        for rank in range(size):
            for head in range(size * h):
                inside = offset <= head % h < offset + count
                assert_same_bits(outs[rank][:, :, head], (q if inside else before)[rank][:, :, head])
    for rank in range(size):
        assert_same_bits(outs[rank], q[rank])
        assert not torch.equal(untouched[rank], outs[rank])


def test_uneven_splits_are_refused():
    with pytest.raises(ArgumentValueError, match="can't be split evenly into 2"):
        reference.scatter_heads(operands(2, (1, 2, 3, 4)))
    with pytest.raises(ArgumentValueError, match="can't be split evenly into 2"):
        reference.gather_heads(operands(2, (1, 3, 2, 4)))


def test_the_list_of_dtypes_is_complete():
    # A dtype that a later torch adds has to be added, or excluded here with a reason.
    excluded = re.compile(r"u?int[1-7]|bits?\w*|qu?int\w+|float4\w+|complex32")  # sub-byte, quantized, pairs
    names = {
        str(value).removeprefix("torch.")
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and value.itemsize in (1, 2, 4)
    }
    plain = {name for name in names if not excluded.fullmatch(name)}
    assert plain == {str(dtype).removeprefix("torch.") for dtype in DTYPES}


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_hold_every_byte_and_differ_between_ranks_and_seeds(dtype):
    shape = (2, 3, 64, 8)
    x = make_input(1, 0, shape, dtype)
    assert x.shape == shape and x.dtype == dtype and x.is_contiguous()
    every = x.view(torch.uint8).unique()
    assert len(every) == (2 if dtype == torch.bool else 256)
    assert torch.equal(bits(x), bits(make_input(1, 0, shape, dtype)))
    for other in (make_input(1, 1, shape, dtype), make_input(2, 0, shape, dtype)):
        # Far from equal: a row that went to the wrong place can't pass by accident.
        assert (bits(x) != bits(other)).float().mean() > (0.3 if dtype == torch.bool else 0.9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_inputs_hold_what_arithmetic_does_not_keep(dtype):
    for shape in ((1, 3, 4, 8), (2, 3, 64, 8)):
        x = make_input(0, 1, shape, dtype)
        assert x.isnan().sum() >= 4
        assert (bits(x)[x == 0] < 0).any(), "no negative zero"
        assert x.isinf().sum() >= 2


@pytest.mark.parametrize("layout", [True, *STRIDED_LAYOUTS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_inputs_are_equal_and_not_contiguous(dtype, layout):
    x = make_input(3, 2, (2, 3, 4, 5), dtype, strided=layout)
    assert not x.is_contiguous()
    assert all(stride > 0 for stride in x.stride())
    assert_same_bits(x, make_input(3, 2, (2, 3, 4, 5), dtype))


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (torch.float16, 0x7E01, 0x7E02),  # NaN payload
        (torch.bfloat16, 0x7FC1, 0x7F81),  # quiet or signalling NaN
        (torch.float32, 0x7FC00001, 0x7FC00003),
        (torch.float32, 0x00000000, -0x80000000),  # 0 and -0
        (torch.float8_e5m2, 0x7D, 0x7E),  # two NaNs
        (torch.float8_e8m0fnu, 0x01, 0x02),
        (torch.bool, 0, 1),
        (torch.uint16, 0, 1),
    ],
)
def test_one_bit_is_a_difference(dtype, one, other):
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    a = torch.full((2, 3), one, dtype=integer).view(dtype)
    b = a.clone()
    assert_same_bits(a, b)
    bits(b)[1, 2] = other
    with pytest.raises(AssertionError, match=r"result: 1 of 6 elements differ; the first at \(1, 2\): expected 0x"):
        assert_same_bits(a, b)


def test_shape_and_dtype_are_part_of_it():
    a = torch.zeros(2, 3)
    with pytest.raises(AssertionError, match=r"expected \(3, 2\) torch.float32, got \(2, 3\) torch.float32"):
        assert_same_bits(a, torch.zeros(3, 2))
    with pytest.raises(AssertionError, match=r"what: expected .* torch.int32, got .* torch.float32"):
        assert_same_bits(a, a.view(torch.int32), "what")
    with pytest.raises(ArgumentValueError, match="float64"):
        bits(torch.zeros(1, dtype=torch.float64))


def test_the_reference_uses_no_plan():
    # It could not catch a mistake that it shares.
    text = Path(reference.__file__).read_text()
    assert "comm_core.transport" not in text and "comm_core.ulysses" not in text
