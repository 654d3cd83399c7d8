"""Layouts of scale factors: against tensors that are cut and turned, and as bijections onto what isn't padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_core.allreduce.patterns import QuantizationSFLayout
from comm_core.allreduce.scales import (
    compute_fp4_swizzled_layout_sf_size,
    packed_scale_shape,
    packed_scale_storage,
    packed_scale_stride,
    scale_offset,
    scale_offsets,
    scale_padding,
    scale_size,
)
from comm_core.errors import ArgumentTypeError, ArgumentValueError

LAYOUTS = list(QuantizationSFLayout)
ROWS = st.integers(0, 300)
COLUMNS = st.integers(0, 21)


def turned(rows: int, columns: int, layout: QuantizationSFLayout) -> torch.Tensor:
    """Return the flat buffer of a layout with ``row * columns + column`` in every place, -1 for padding."""
    matrix = torch.arange(rows * columns).view(rows, columns)
    if layout is QuantizationSFLayout.LINEAR:
        return matrix.flatten()
    tile = 128 if layout is QuantizationSFLayout.SWIZZLED_128x4 else 8
    padded = torch.full((-(-rows // tile) * tile, -(-columns // 4) * 4), -1)
    padded[:rows, :columns] = matrix
    if tile == 8:
        # [row tile, 8, column tile, 4] -> [row tile, column tile, 8, 4]
        return padded.view(padded.shape[0] // 8, 8, padded.shape[1] // 4, 4).permute(0, 2, 1, 3).flatten()
    # [row tile, 4, 32, column tile, 4] -> [row tile, column tile, 32, 4, 4]
    return padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


@pytest.mark.parametrize("layout", LAYOUTS)
@given(rows=ROWS, columns=COLUMNS)
def test_offsets_are_those_of_tiles_that_are_cut_and_turned(
    layout: QuantizationSFLayout, rows: int, columns: int
) -> None:
    expected = turned(rows, columns, layout)
    assert scale_size(rows, columns, layout) == expected.numel()
    offsets = scale_offsets(rows, columns, layout)
    assert (offsets.dtype, tuple(offsets.shape)) == (torch.int64, (rows, columns))
    buffer = torch.full((expected.numel(),), -1)
    buffer[offsets] = torch.arange(rows * columns).view(rows, columns)
    assert torch.equal(buffer, expected)
    assert scale_padding(rows, columns, layout) == int((buffer == -1).sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (8, 4), (9, 5), (127, 4), (128, 8), (129, 9)])
def test_one_offset_is_one_of_all(layout: QuantizationSFLayout, rows: int, columns: int) -> None:
    offsets = scale_offsets(rows, columns, layout).tolist()
    assert offsets == [[scale_offset(r, c, columns, layout) for c in range(columns)] for r in range(rows)]


def test_offsets_written_down() -> None:
    """One tile of 128x4: rows 32 apart are neighbours of 4 bytes, rows are 16 bytes apart."""
    layout = QuantizationSFLayout.SWIZZLED_128x4
    places = {(0, 0): 0, (0, 3): 3, (1, 0): 16, (31, 3): 499, (32, 0): 4, (64, 0): 8, (127, 3): 511, (0, 4): 512}
    assert {at: scale_offset(*at, 8, layout) for at in places} == places
    assert scale_offset(128, 0, 8, layout) == 1024
    layout = QuantizationSFLayout.SWIZZLED_8x4
    places = {(0, 0): 0, (1, 0): 4, (7, 3): 31, (0, 4): 32, (8, 0): 64}
    assert {at: scale_offset(*at, 8, layout) for at in places} == places


@given(rows=ROWS, columns=COLUMNS)
def test_the_size_of_the_swizzled_layout(rows: int, columns: int) -> None:
    size = compute_fp4_swizzled_layout_sf_size(rows, columns)
    assert size == (rows + 127) // 128 * 128 * ((columns + 3) // 4 * 4)
    assert size == scale_size(rows, columns, QuantizationSFLayout.SWIZZLED_128x4)


def test_sizes_beyond_32_bits() -> None:
    assert compute_fp4_swizzled_layout_sf_size(1 << 24, 512) == 1 << 33
    assert scale_offset((1 << 24) - 1, 511, 512, QuantizationSFLayout.SWIZZLED_128x4) == (1 << 33) - 1


@pytest.mark.parametrize("tokens", [0, 1, 3, 4, 5, 17])
@pytest.mark.parametrize("groups", [0, 1, 4, 5, 9])
def test_packed_words_are_column_major_in_columns_of_16_bytes(tokens: int, groups: int) -> None:
    shape, stride = packed_scale_shape(tokens, groups), packed_scale_stride(tokens)
    assert shape == (tokens, (groups + 3) // 4)
    assert stride[0] == 1
    assert stride[1] % 4 == 0 and tokens <= stride[1] < tokens + 4
    last = max((t + w * stride[1] for t in range(tokens) for w in range(shape[1])), default=-1)
    assert packed_scale_storage(tokens, groups) == last + 1


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_what_is_no_size_is_refused(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="rows must be an int"):
        scale_size(value, 1, QuantizationSFLayout.LINEAR)
    with pytest.raises(ArgumentTypeError, match="tokens must be an int"):
        packed_scale_stride(value)


def test_a_negative_size_or_a_column_beyond_the_row_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="columns must not be negative, got -1"):
        scale_offsets(1, -1, QuantizationSFLayout.LINEAR)
    with pytest.raises(ArgumentValueError, match="column must be below columns=4, got 4"):
        scale_offset(0, 4, 4, QuantizationSFLayout.SWIZZLED_8x4)
    with pytest.raises(ArgumentValueError, match="groups must not be negative"):
        packed_scale_shape(1, -1)
