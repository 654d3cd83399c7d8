"""Low-precision encodings of normalized values, in software: the bits that every backend must produce.

All input is fp32 (values of a narrower type, widened), all arithmetic is fp32 with every operation rounded to
nearest, ties to even, subnormals kept, and nothing fused. torch's own casts are not used: what they make of values
beyond the largest one differs between torch versions. The functions run on the CPU and on CUDA, with the same bits.

The element types (OCP "8-bit Floating Point Specification" and "Microscaling Formats (MX) Specification"; conversions
as PTX's ``cvt`` with ``.satfinite``):

- E4M3: 1-4-3 bits, bias 7, largest value 448, no infinity, 0x7F and 0xFF are NaN. Round to nearest even; beyond 448,
  and infinite, becomes 448 with its sign; NaN becomes 0x7F.
- E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives. Round to nearest even; beyond 6, and infinite, becomes 6 with
  its sign; it has no NaN: NaN becomes +6.
- UE8M0: a power of two from 2^-127 (code 0) to 2^127 (code 254); 255 is NaN. Rounded up, so that the block's largest
  value fits; 0 becomes code 0, beyond 2^127 becomes code 254.

Special values, the same rule for all: an infinity in a block counts as its largest value. NaN is left out of a
block's largest value and stays NaN in its own place, where the element type has NaN; NVFP4 elements have none, so
there the block's scale becomes NaN, and with it every value of the block once decoded. -0.0 keeps its sign.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from comm_core.allreduce.patterns import QuantizationSFLayout
from comm_core.allreduce.scales import (
    packed_scale_shape,
    packed_scale_storage,
    packed_scale_stride,
    scale_offsets,
    scale_size,
)
from comm_core.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "DYNAMIC_FP8_MIN_SCALE",
    "E2M1_MAX",
    "E4M3_MAX",
    "GROUP_FP8_MIN_SCALE",
    "MXFP8_BLOCK",
    "NVFP4_BLOCK",
    "arrange_scales",
    "collect_scales",
    "decode_e2m1",
    "decode_e4m3",
    "decode_ue8m0",
    "dequantize_nvfp4",
    "encode_e2m1",
    "encode_e4m3",
    "encode_ue8m0",
    "pack_e2m1",
    "pack_group_scales",
    "quantize_fp8",
    "quantize_fp8_dynamic",
    "quantize_fp8_groups",
    "quantize_mxfp8",
    "quantize_nvfp4",
    "unpack_e2m1",
    "unpack_group_scales",
]

E4M3_MAX = 448.0
E2M1_MAX = 6.0
DYNAMIC_FP8_MIN_SCALE = 2.0**-9 / 448.0
"""Smallest scale of a token: a row of zeros gets it, and no quotient becomes infinite."""
GROUP_FP8_MIN_SCALE = 1e-10
"""Smallest value that is rounded up to a group's UE8M0 scale, which is 2^-33 then."""
NVFP4_BLOCK = 16
"""Values that share an E4M3 scale factor."""
MXFP8_BLOCK = 32
"""Values that share a UE8M0 scale factor."""

_E4M3_NAN = 0x7F
_E4M3_LARGEST = 0x7E
_UE8M0_NAN = 255
_UE8M0_LARGEST = 254
_INFINITY = 0x7F800000


def _e4m3_values() -> list[float]:
    """Return the value of every code."""
    values: list[float] = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        if code == _E4M3_NAN:
            values.append(float("nan"))
        elif exponent:
            values.append((8 + mantissa) * 2.0 ** (exponent - 10))
        else:
            values.append(mantissa * 2.0**-9)
    return values + [-value for value in values]


_E4M3_VALUES = _e4m3_values()
_E2M1_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1_VALUES = _E2M1_MAGNITUDES + [-value for value in _E2M1_MAGNITUDES]
_UE8M0_VALUES = [2.0 ** (code - 127) for code in range(255)] + [float("nan")]


def _check_fp32(x: torch.Tensor, name: str) -> None:
    """Refuse another dtype: the definitions are of fp32 arithmetic."""
    if x.dtype is not torch.float32:
        raise ArgumentTypeError(f"{name} must be float32 (widen it first), got {x.dtype}")


def _check_codes(codes: torch.Tensor, name: str) -> None:
    """Refuse codes that are no bytes."""
    if codes.dtype is not torch.uint8:
        raise ArgumentTypeError(f"{name} must be uint8 codes (view them as such), got {codes.dtype}")


def _constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """Return an fp32 constant on the device of `like`.

    A Python number as a divisor won't do: on CUDA torch multiplies by its reciprocal, which rounds differently.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


def _scalar(scale: float | torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    """Return a scale, given as a number or as a tensor of one fp32 element, as a tensor without dimensions."""
    if isinstance(scale, torch.Tensor):
        if scale.dtype is not torch.float32 or scale.numel() != 1:
            raise ArgumentValueError(
                f"{name} must be a number or one float32 element, got {scale.dtype} of shape {tuple(scale.shape)}"
            )
        if scale.device != like.device:
            raise ArgumentValueError(f"{name} must be on {like.device}, got {scale.device}")
        return scale.reshape(())
    return _constant(float(scale), like)


def _table(values: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """Return the values of codes."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]


def _blocks(x: torch.Tensor, block: int, name: str) -> torch.Tensor:
    """Return ``[..., columns]`` as ``[..., columns / block, block]``."""
    _check_fp32(x, "x")
    if isinstance(block, bool) or not isinstance(block, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"{name} must be an int, got {type(block).__name__} {block!r}")
    if block <= 0:
        raise ArgumentValueError(f"{name} must be positive, got {block}")
    if x.dim() == 0 or x.shape[-1] % block:
        raise ArgumentValueError(f"the last dimension must be a multiple of {name}={block}, got {tuple(x.shape)}")
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of the last dimension, NaN left out (as `fmaxf` does), the dimension kept."""
    if x.shape[-1] == 0:
        return x.new_zeros((*x.shape[:-1], 1))
    return torch.where(x.isnan(), torch.zeros_like(x), x.abs()).amax(-1, keepdim=True)


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Return the E4M3 codes of fp32 values: uint8 of the same shape. Nearest even, saturating, NaN is 0x7F.

    Raises:
        ArgumentTypeError: `x` is not float32.
    """
    _check_fp32(x, "x")
    bits = x.contiguous().view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # Round the mantissa from 23 bits to 3 by adding just under half of the last place; a carry moves the exponent on.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = ((rounded >> 20) - ((127 - 7) << 3)).clamp(max=_E4M3_LARGEST)
    # Below 2^-6 the step is 2^-9. The product is exact, and `round` is to nearest even; 8 steps are the code of 2^-6.
    small = x.abs() < 2.0**-6
    subnormal = torch.where(small, x.abs() * 512.0, torch.zeros_like(x)).round().to(torch.int32)
    # The rounding above wraps around for the largest NaNs, so magnitudes from 448 on don't depend on it.
    large = magnitude >= 0x43E00000
    code = torch.where(small, subnormal, torch.where(large, torch.full_like(normal, _E4M3_LARGEST), normal))
    code = code | ((bits >> 24) & 0x80)
    return torch.where(magnitude > _INFINITY, torch.full_like(code, _E4M3_NAN), code).to(torch.uint8)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of E4M3 codes (uint8).

    Raises:
        ArgumentTypeError: `codes` is not uint8.
    """
    _check_codes(codes, "codes")
    return _table(_E4M3_VALUES, codes)


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return the E2M1 codes, 0 to 15, of fp32 values: uint8 of the same shape. Nearest even, saturating.

    NaN becomes 7, which is +6.

    Raises:
        ArgumentTypeError: `x` is not float32.
    """
    _check_fp32(x, "x")
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    # Midpoints of neighbours; a tie goes to the even code, so every second midpoint belongs to the upper one.
    for index, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (magnitude >= midpoint) if index % 2 else (magnitude > midpoint)
    code |= x.signbit().to(torch.uint8) << 3
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of E2M1 codes (uint8, 0 to 15, one a byte).

    Raises:
        ArgumentTypeError: `codes` is not uint8.
    """
    _check_codes(codes, "codes")
    return _table(_E2M1_VALUES, codes & 15)


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Return ``[..., 2 n]`` codes as ``[..., n]`` bytes, the element of even index in the low half.

    Raises:
        ArgumentTypeError: `codes` is not uint8.
        ArgumentValueError: the last dimension is odd.
    """
    _check_codes(codes, "codes")
    if codes.dim() == 0 or codes.shape[-1] % 2:
        raise ArgumentValueError(f"the last dimension of codes must be even, got {tuple(codes.shape)}")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the inverse of `pack_e2m1`.

    Raises:
        ArgumentTypeError: `packed` is not uint8.
    """
    _check_codes(packed, "packed")
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def encode_ue8m0(x: torch.Tensor) -> torch.Tensor:
    """Return the UE8M0 codes of fp32 magnitudes, rounded up: uint8 of the same shape. The sign is not looked at.

    Raises:
        ArgumentTypeError: `x` is not float32.
    """
    _check_fp32(x, "x")
    magnitude = x.contiguous().view(torch.int32) & 0x7FFFFFFF
    exponent, mantissa = magnitude >> 23, magnitude & 0x7FFFFF
    up = exponent + (mantissa != 0)
    # Exponent 0 is fp32's subnormals: 2^-127, the value of code 0, has the mantissa 0x400000.
    code = torch.where(exponent == 0, (mantissa > 0x400000).to(torch.int32), up).clamp(max=_UE8M0_LARGEST)
    return torch.where(magnitude > _INFINITY, torch.full_like(code, _UE8M0_NAN), code).to(torch.uint8)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Return the fp32 values of UE8M0 codes (uint8): ``2 ** (code - 127)``, NaN for 255.

    Raises:
        ArgumentTypeError: `codes` is not uint8.
    """
    _check_codes(codes, "codes")
    return _table(_UE8M0_VALUES, codes)


def quantize_fp8(x: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """Static FP8: ``e4m3(x * (1 / scale))``, the reciprocal rounded first.

    Args:
        x: fp32, any shape.
        scale: a number or one fp32 element; the value of code ``c`` is ``c * scale``.

    Returns:
        float8_e4m3fn of the same shape.

    Raises:
        ArgumentTypeError: `x` is not float32.
        ArgumentValueError: `scale` is a tensor of several elements, another dtype or on another device.
    """
    _check_fp32(x, "x")
    divisor = _scalar(scale, x, "scale")
    return encode_e4m3(x * (torch.ones_like(divisor) / divisor)).view(torch.float8_e4m3fn)


def quantize_fp8_dynamic(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a scale a token: ``scale = max(amax / 448, 2^-9 / 448)``, ``e4m3(x / scale)``.

    A row with an infinity has the scale infinity: its finite values become 0 and the infinity NaN, so that an
    overflow shows in every decoded value of the row instead of passing for a very large number.

    Args:
        x: fp32 ``[tokens, hidden_dim]``.

    Returns:
        float8_e4m3fn ``[tokens, hidden_dim]`` and float32 scales ``[tokens, 1]``.

    Raises:
        ArgumentTypeError: `x` is not float32.
    """
    _check_fp32(x, "x")
    scale = torch.maximum(_largest(x) / _constant(E4M3_MAX, x), _constant(DYNAMIC_FP8_MIN_SCALE, x))
    return encode_e4m3(x / scale).view(torch.float8_e4m3fn), scale


def quantize_fp8_groups(x: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 with a power-of-two scale for every group: ``scale = up(max(amax / 448, 1e-10))``, ``e4m3(x / scale)``.

    Args:
        x: fp32 ``[tokens, hidden_dim]``.
        group_size: consecutive values of a row that share a scale; divides `hidden_dim`.

    Returns:
        float8_e4m3fn ``[tokens, hidden_dim]`` and UE8M0 codes, uint8 ``[tokens, hidden_dim / group_size]``; see
        `pack_group_scales` for the form in which they are handed out.

    Raises:
        ArgumentTypeError: `x` is not float32, or `group_size` no int.
        ArgumentValueError: `group_size` is not positive or does not divide the row.
    """
    groups = _blocks(x, group_size, "block_quant_group_size")
    smallest = _constant(GROUP_FP8_MIN_SCALE, x)
    codes = encode_ue8m0(torch.maximum(_largest(groups) / _constant(E4M3_MAX, x), smallest))
    values = encode_e4m3(groups / decode_ue8m0(codes)).flatten(-2)
    return values.view(torch.float8_e4m3fn), codes.squeeze(-1)


def quantize_nvfp4(x: torch.Tensor, global_scale: float | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """NVFP4: for every 16 values ``sf = e4m3(S * (amax * fp32(1/6)))`` and ``e2m1(x * (S / sf))``; 0 where sf is 0.

    Args:
        x: fp32 ``[tokens, hidden_dim]``, `hidden_dim` a multiple of 16.
        global_scale: ``S``, a number or one fp32 element; a value is ``code * sf / S``. ``448 * 6 / amax`` of the
            whole tensor uses the range of both types.

    Returns:
        E2M1, two in a byte, uint8 ``[tokens, hidden_dim / 2]``, and E4M3 codes of the scale factors, uint8
        ``[tokens, hidden_dim / 16]``; see `arrange_scales` for the form in which they are handed out.

    Raises:
        ArgumentTypeError: `x` is not float32.
        ArgumentValueError: the row is no multiple of 16, or `global_scale` is a tensor of several elements, another
            dtype or on another device.
    """
    blocks = _blocks(x, NVFP4_BLOCK, "16 (NVFP4's block)")
    scale = _scalar(global_scale, x, "scale_factor")
    # `amax` of torch carries NaN, which here has to reach the scale factor.
    largest = blocks.abs().amax(-1, keepdim=True)
    codes = encode_e4m3(scale * (largest * _constant(1.0 / E2M1_MAX, x)))
    factor = decode_e4m3(codes)
    multiplier = torch.where(factor == 0, torch.zeros_like(factor), scale / factor)
    return pack_e2m1(encode_e2m1(blocks * multiplier).flatten(-2)), codes.squeeze(-1)


def dequantize_nvfp4(
    packed: torch.Tensor, scale_codes: torch.Tensor, global_scale: float | torch.Tensor
) -> torch.Tensor:
    """Return fp32 ``code * sf / S`` ``[tokens, hidden_dim]`` for the two results of `quantize_nvfp4`.

    Raises:
        ArgumentTypeError: codes are not uint8.
    """
    values = _blocks(decode_e2m1(unpack_e2m1(packed)), NVFP4_BLOCK, "16 (NVFP4's block)")
    factor = decode_e4m3(scale_codes).unsqueeze(-1) / _scalar(global_scale, values, "scale_factor")
    return (values * factor).flatten(-2)


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MXFP8: for every 32 values ``sf = up(amax / 448)``, a power of two, and ``e4m3(x / sf)``.

    The quotient by 448 is rounded to nearest, which never turns a number above a power of two into that power; an
    approximate reciprocal would.

    Args:
        x: fp32 ``[tokens, hidden_dim]``, `hidden_dim` a multiple of 32.

    Returns:
        float8_e4m3fn ``[tokens, hidden_dim]`` and UE8M0 codes, uint8 ``[tokens, hidden_dim / 32]``.

    Raises:
        ArgumentTypeError: `x` is not float32.
        ArgumentValueError: the row is no multiple of 32.
    """
    blocks = _blocks(x, MXFP8_BLOCK, "32 (MXFP8's block)")
    codes = encode_ue8m0(_largest(blocks) / _constant(E4M3_MAX, x))
    # A power of two divides exactly, and quotients of subnormal values don't overflow: the largest is 448 by choice.
    values = encode_e4m3(blocks / decode_ue8m0(codes)).flatten(-2)
    return values.view(torch.float8_e4m3fn), codes.squeeze(-1)


def arrange_scales(codes: torch.Tensor, layout: QuantizationSFLayout) -> torch.Tensor:
    """Return scale factors in a layout: ``[rows, columns]`` for LINEAR, else flat with padding, which is 0.

    Args:
        codes: uint8 ``[rows, columns]``.
        layout: where each of them goes, see `comm_core.allreduce.scales`.

    Raises:
        ArgumentTypeError: `codes` is not uint8.
        ArgumentValueError: `codes` is no matrix.
    """
    _check_codes(codes, "codes")
    if codes.dim() != 2:
        raise ArgumentValueError(f"codes must be [rows, columns], got {tuple(codes.shape)}")
    if layout is QuantizationSFLayout.LINEAR:
        return codes.contiguous()
    rows, columns = codes.shape
    flat = codes.new_zeros(scale_size(rows, columns, layout))
    flat[scale_offsets(rows, columns, layout, codes.device)] = codes
    return flat


def collect_scales(buffer: torch.Tensor, rows: int, columns: int, layout: QuantizationSFLayout) -> torch.Tensor:
    """Return the ``[rows, columns]`` scale factors that lie in a buffer of a layout: the inverse of `arrange_scales`.

    Raises:
        ArgumentTypeError: `buffer` is not uint8.
        ArgumentValueError: `buffer` is smaller than the layout.
    """
    _check_codes(buffer, "buffer")
    needed = scale_size(rows, columns, layout)
    if buffer.numel() < needed:
        raise ArgumentValueError(
            f"scale_out of {rows} x {columns} scale factors in {layout.name} takes {needed}, got {buffer.numel()}"
        )
    return buffer.reshape(-1)[scale_offsets(rows, columns, layout, buffer.device)]


def pack_group_scales(codes: torch.Tensor) -> torch.Tensor:
    """Return UE8M0 codes ``[tokens, groups]`` four in a word, column-major: int32 with `packed_scale_stride`.

    The bytes beyond the last group and the words between columns are 0.

    Raises:
        ArgumentTypeError: `codes` is not uint8.
        ArgumentValueError: `codes` is no matrix.
    """
    _check_codes(codes, "codes")
    if codes.dim() != 2:
        raise ArgumentValueError(f"codes must be [tokens, groups], got {tuple(codes.shape)}")
    tokens, groups = codes.shape
    shape = packed_scale_shape(tokens, groups)
    padded = torch.zeros((*shape, 4), dtype=torch.int32, device=codes.device)
    padded.view(tokens, shape[1] * 4)[:, :groups] = codes
    # Shifts, not a view of bytes as words: torch refuses that for strides of empty and of single rows.
    words = padded[..., 0] | padded[..., 1] << 8 | padded[..., 2] << 16 | padded[..., 3] << 24
    storage = torch.zeros(packed_scale_storage(tokens, groups), dtype=torch.int32, device=codes.device)
    return storage.as_strided(shape, packed_scale_stride(tokens)).copy_(words)


def unpack_group_scales(words: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the ``[tokens, groups]`` codes of `pack_group_scales`.

    Raises:
        ArgumentTypeError: `words` is not int32.
        ArgumentValueError: it is no matrix of ``ceil(groups / 4)`` columns.
    """
    if words.dtype is not torch.int32:
        raise ArgumentTypeError(f"words must be int32, got {words.dtype}")
    if words.dim() != 2 or words.shape != packed_scale_shape(words.shape[0], groups):
        raise ArgumentValueError(f"words must be [tokens, {-(-groups // 4)}], got {tuple(words.shape)}")
    parts = torch.stack([(words >> shift) & 255 for shift in (0, 8, 16, 24)], dim=-1)
    return parts.reshape(words.shape[0], words.shape[1] * 4)[:, :groups].to(torch.uint8)
