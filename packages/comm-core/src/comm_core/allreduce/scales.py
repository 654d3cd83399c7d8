"""Where scale factors lie: sizes and offsets of every layout. Pure arithmetic on shapes, no tensors of values.

A block-scaled tensor of `rows` x `columns * block` values has one scale factor (SF) for every `block` consecutive
values of a row, so a matrix of `rows` x `columns` SFs, one byte each. Offsets count SFs from the start of the buffer:

- LINEAR: ``row * columns + column``; nothing is padded.
- SWIZZLED_128x4: tiles of 128 rows and 4 columns, 512 bytes each, tiles in row-major order; in a tile
  ``row % 32 * 16 + row % 128 // 32 * 4 + column % 4``. Rows are padded to 128 and columns to 4. It is the layout that
  block-scaled matrix multiplications of SM100 read (cuBLAS: "1D Block Scaling Factors Layout"; PTX: tcgen05.mma).
- SWIZZLED_8x4: tiles of 8 rows and 4 columns, 32 bytes each, tiles in row-major order; in a tile
  ``row % 8 * 4 + column % 4``. Rows are padded to 8 and columns to 4.

Per-token-group FP8 has a layout of its own, see `packed_scale_stride`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core.allreduce.patterns import QuantizationSFLayout
from comm_core.errors import ArgumentTypeError, ArgumentValueError

if TYPE_CHECKING:
    import torch

__all__ = [
    "compute_fp4_swizzled_layout_sf_size",
    "packed_scale_shape",
    "packed_scale_storage",
    "packed_scale_stride",
    "scale_offset",
    "scale_offsets",
    "scale_padding",
    "scale_size",
]

_COLUMNS = 4
_ROWS = {QuantizationSFLayout.SWIZZLED_128x4: 128, QuantizationSFLayout.SWIZZLED_8x4: 8}


def _check_sizes(**sizes: object) -> None:
    """Refuse what is no size: `range` and shapes would take a negative one for empty."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int):
            raise ArgumentTypeError(f"{name} must be an int, got {type(size).__name__} {size!r}")
        if size < 0:
            raise ArgumentValueError(f"{name} must not be negative, got {size}")


def _round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


def compute_fp4_swizzled_layout_sf_size(total_row: int, total_column: int) -> int:
    """Return how many scale factors a SWIZZLED_128x4 buffer holds, padding included; one byte each.

    Args:
        total_row: rows of the tensor.
        total_column: scale factors a row: ``hidden_dim // 16`` for NVFP4.

    Returns:
        ``round_up(total_row, 128) * round_up(total_column, 4)``.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    return scale_size(total_row, total_column, QuantizationSFLayout.SWIZZLED_128x4)


def scale_size(rows: int, columns: int, layout: QuantizationSFLayout) -> int:
    """Return how many scale factors the buffer holds, padding included.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    _check_sizes(rows=rows, columns=columns)
    if layout is QuantizationSFLayout.LINEAR:
        return rows * columns
    return _round_up(rows, _ROWS[layout]) * _round_up(columns, _COLUMNS)


def scale_offset(row: int, column: int, columns: int, layout: QuantizationSFLayout) -> int:
    """Return where the scale factor of `row`, `column` lies; `columns` is the number of them in a row, unpadded.

    Raises:
        ArgumentValueError: a number is no int or negative, or the column is beyond the row.
    """
    _check_sizes(row=row, column=column, columns=columns)
    if column >= columns:
        raise ArgumentValueError(f"column must be below columns={columns}, got {column}")
    if layout is QuantizationSFLayout.LINEAR:
        return row * columns + column
    rows = _ROWS[layout]
    tile = row // rows * (_round_up(columns, _COLUMNS) // _COLUMNS) + column // _COLUMNS
    # 128x4 interleaves quarters of 32 rows, so that the 16 bytes of a lane hold rows r, r+32, r+64 and r+96.
    inner = row % rows if rows <= 32 else row % 32 * (rows // 32) + row % rows // 32
    return tile * rows * _COLUMNS + inner * _COLUMNS + column % _COLUMNS


def scale_offsets(
    rows: int, columns: int, layout: QuantizationSFLayout, device: torch.device | None = None
) -> torch.Tensor:
    """Return `scale_offset` of all scale factors: int64 ``[rows, columns]`` on `device` (default: the CPU).

    ``buffer[scale_offsets(...)]`` reads the matrix out of a flat buffer, and assigning to it writes the matrix and
    leaves the padding alone.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    _check_sizes(rows=rows, columns=columns)
    import torch

    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    column = torch.arange(columns, dtype=torch.int64, device=device)[None, :]
    if layout is QuantizationSFLayout.LINEAR:
        return row * columns + column
    tile_rows = _ROWS[layout]
    tile = row // tile_rows * (_round_up(columns, _COLUMNS) // _COLUMNS) + column // _COLUMNS
    inner = row % tile_rows if tile_rows <= 32 else row % 32 * (tile_rows // 32) + row % tile_rows // 32
    return tile * tile_rows * _COLUMNS + inner * _COLUMNS + column % _COLUMNS


def scale_padding(rows: int, columns: int, layout: QuantizationSFLayout) -> int:
    """Return how many scale factors of the buffer are padding.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    return scale_size(rows, columns, layout) - rows * columns


def packed_scale_shape(tokens: int, groups: int) -> tuple[int, int]:
    """Return the shape of `scale_out` of per-token-group FP8: int32 ``[tokens, ceil(groups / 4)]``.

    Group `g` of a token is byte ``g % 4`` of word ``g // 4``, the least significant byte first; the bytes beyond the
    last group are 0.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    _check_sizes(tokens=tokens, groups=groups)
    return tokens, -(-groups // 4)


def packed_scale_stride(tokens: int) -> tuple[int, int]:
    """Return the strides of `scale_out` of per-token-group FP8, in words: ``(1, round_up(tokens, 4))``.

    Column-major with columns that start at multiples of 16 bytes, which TMA loads of a column need.

    Raises:
        ArgumentValueError: `tokens` is no int, or negative.
    """
    _check_sizes(tokens=tokens)
    return 1, _round_up(tokens, 4)


def packed_scale_storage(tokens: int, groups: int) -> int:
    """Return how many words `scale_out` of per-token-group FP8 spans: the last column has no padding.

    Raises:
        ArgumentValueError: a size is no int, or negative.
    """
    _, words = packed_scale_shape(tokens, groups)
    return (words - 1) * packed_scale_stride(tokens)[1] + tokens if words and tokens else 0
