"""Attention over encoded operands in plain PyTorch: exact, and as the SageAttention2 kernels compute it.

Both are for checking accuracy where no such kernel can run. They take minutes where a kernel takes milliseconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_lowp.sage2.grid import LAYOUTS, Layout, ceil_div
from comm_lowp.sage2.reference import V_SOURCE_ROWS

if TYPE_CHECKING:
    from comm_lowp.qkv import UlyssesQKV

__all__ = ["check_encoded", "dequantize", "emulated_attention", "reference_attention", "softmax_scale"]

_ROWS = 1024
"""Rows of Q at once: bounds the memory for logits."""
_WEIGHT_EXPONENT = 8.807
"""The kernels scale softmax weights by 2**8.807 (447.9) before they become E4M3, whose largest value is 448."""


def check_encoded(encoded: object) -> tuple[UlyssesQKV, Layout]:
    """Return `encoded` and its layout if its parts fit each other as the consumer will index them.

    Raises:
        ArgumentTypeError: it is no `UlyssesQKV`.
        ArgumentValueError: a shape or dtype is not what layout and lengths ask for. A kernel would not notice: it
            derives strides from the lengths alone.
    """
    from comm_lowp.qkv import UlyssesQKV

    if not isinstance(encoded, UlyssesQKV):
        raise ArgumentTypeError(
            f"encoded must be a UlyssesQKV, as scatter_qkv returns it; got {type(encoded).__name__}"
        )
    layout = LAYOUTS.get(encoded.layout)
    if layout is None:
        raise ArgumentValueError(f"encoded.layout must be one of {', '.join(LAYOUTS)}, got {encoded.layout!r}")
    s, used = encoded.logical_sequence, encoded.used_sequence
    if encoded.q.dim() != 4 or encoded.q.shape[1] != s or not 0 < used <= s:
        raise ArgumentValueError(
            f"encoded.q must be [B, {s}, h, D] for logical_sequence={s} and used_sequence={used}, got "
            f"{list(encoded.q.shape)}"
        )
    b, _, h, d = encoded.q.shape
    wq, wk = layout.scale_widths(used)
    expected = {
        "q": ((b, s, h, d), torch.int8),
        "k": ((b, s, h, d), torch.int8),
        "v": ((b, d, h, layout.padded(s)), torch.float8_e4m3fn),
        "q_scale": ((b, h, wq), torch.float32),
        "k_scale": ((b, h, wk), torch.float32),
        "v_scale": ((b, h, d), torch.float32),
    }
    for name, (shape, dtype) in expected.items():
        x = getattr(encoded, name)
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != encoded.q.device or not x.is_contiguous():
            raise ArgumentValueError(
                f"encoded.{name} must be contiguous {dtype} {list(shape)} on {encoded.q.device} for used_sequence="
                f"{used} of {s} in layout {layout.name}, got {x.dtype} {list(x.shape)} with strides {x.stride()} on "
                f"{x.device}"
            )
    return encoded, layout


def softmax_scale(sm_scale: float | None, head_dim: int) -> float:
    """Return the factor of the logits; None is ``head_dim ** -0.5``."""
    scale = head_dim**-0.5 if sm_scale is None else float(sm_scale)
    if not math.isfinite(scale):
        raise ArgumentValueError(f"sm_scale must be finite, got {sm_scale}")
    return scale


def _rows_of_v(encoded: UlyssesQKV) -> torch.Tensor:
    """Return V's codes as fp32 rows in natural order, ``[B, h, U, D]``, without the scale."""
    b, d, h, padded = encoded.v.shape
    stored = encoded.v.float().view(b, d, h, padded // 16, 16)
    natural = torch.empty_like(stored)
    natural[..., list(V_SOURCE_ROWS)] = stored
    return natural.view(b, d, h, padded)[..., : encoded.used_sequence].permute(0, 2, 3, 1)


def _by_row(scale: torch.Tensor, group: int, rows: int) -> torch.Tensor:
    """Return every row's scale, ``[B, h, width] -> [B, h, rows, 1]``."""
    return scale.repeat_interleave(group, dim=2)[:, :, :rows].unsqueeze(-1)


def dequantize(encoded: UlyssesQKV) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the live rows of Q, of K minus its mean, and of V, as fp32 ``[B, U, h, D]``.

    Args:
        encoded: as `scatter_qkv` returns it.
    """
    checked, layout = check_encoded(encoded)
    used = checked.used_sequence
    q = checked.q[:, :used].float() * _by_row(checked.q_scale, layout.q_group, used).transpose(1, 2)
    k = checked.k[:, :used].float() * _by_row(checked.k_scale, layout.k_group, used).transpose(1, 2)
    v = _rows_of_v(checked).transpose(1, 2) * checked.v_scale.transpose(1, 2).unsqueeze(1).transpose(2, 3)
    return q, k, v


def reference_attention(encoded: UlyssesQKV, sm_scale: float | None = None) -> torch.Tensor:
    """Attend over the dequantized operands in fp32: what is lost is lost by the encoding alone.

    Args:
        encoded: as `scatter_qkv` returns it.
        sm_scale: factor of the logits; None is ``D ** -0.5``.

    Returns:
        ``[B, S, H/P, D]`` in `encoded.input_dtype`, rows from U on zero: an operand of `gather_heads`.

    Raises:
        ArgumentTypeError: `encoded` is something else.
        ArgumentValueError: its parts don't fit each other.
    """
    q, k, v = (x.transpose(1, 2) for x in dequantize(encoded))
    scale = softmax_scale(sm_scale, q.shape[3])
    out = _output(encoded)
    for start in range(0, encoded.used_sequence, _ROWS):
        logits = q[:, :, start : start + _ROWS] @ k.transpose(2, 3) * scale
        rows = torch.softmax(logits, dim=-1) @ v
        out[:, start : start + rows.shape[2]] = rows.transpose(1, 2).to(out.dtype)
    return out


def _output(encoded: UlyssesQKV) -> torch.Tensor:
    return torch.zeros(encoded.q.shape, dtype=encoded.input_dtype, device=encoded.q.device)


def emulated_attention(encoded: UlyssesQKV, sm_scale: float | None = None) -> torch.Tensor:
    """Attend as the SageAttention2 kernels of `encoded.layout` do, step by step; else as `reference_attention`.

    Integer dot products; logits in base 2; an online softmax over tiles of keys; weights scaled by 2**8.807 and
    rounded to E4M3 for the product with V, but not for the denominator; an accumulator a tile that is fp32
    (``"sage2_sm90"``) or fp16 in steps of 32 keys (``"sage2_sm89_sm120"``), added to an fp32 one; V's scale last.
    """
    checked, layout = check_encoded(encoded)
    scale = softmax_scale(sm_scale, checked.q.shape[3]) * math.log2(math.e)
    used, tile = checked.used_sequence, layout.v_block
    # Products of codes are exact in fp32: 128 of at most 127 * 127 stay below 2**24.
    q, k = (x[:, :used].float().transpose(1, 2) for x in (checked.q, checked.k))
    v = _rows_of_v(checked)
    q_scale = _by_row(checked.q_scale, layout.q_group, used)
    k_scale = _by_row(checked.k_scale, layout.k_group, used).transpose(2, 3)
    out = _output(checked)
    for start in range(0, used, _ROWS):
        rows = slice(start, min(start + _ROWS, used))
        top = torch.full_like(q_scale[:, :, rows], -math.inf)
        weight_sum = torch.zeros_like(top)
        total = torch.zeros_like(q[:, :, rows])
        for index in range(ceil_div(used, tile)):
            keys = slice(index * tile, min((index + 1) * tile, used))
            dots = q[:, :, rows] @ k[:, :, keys].transpose(2, 3)
            logits = dots * (q_scale[:, :, rows] * k_scale[..., keys]) * scale
            new_top = torch.maximum(top, logits.amax(dim=-1, keepdim=True))
            shrink = torch.exp2(top - new_top)
            weights = torch.exp2(logits - new_top + _WEIGHT_EXPONENT)
            weight_sum = weight_sum * shrink + weights.sum(dim=-1, keepdim=True)
            codes = weights.clamp(max=448.0).to(torch.float8_e4m3fn).float()
            total = total * shrink + _tile_product(codes, v[:, :, keys], layout)
            top = new_top
        result = total / weight_sum * checked.v_scale.unsqueeze(2)
        out[:, rows] = result.transpose(1, 2).to(out.dtype)
    return out


def _tile_product(weights: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return weights times V of one tile of keys, with the rounding of the layout's accumulator."""
    if layout.name == "sage2_sm90":
        return weights @ v
    half: torch.Tensor | None = None
    for step in range(0, weights.shape[-1], 32):
        part = weights[..., step : step + 32] @ v[:, :, step : step + 32]
        half = part.half() if half is None else (half.float() + part).half()
    assert half is not None
    return half.float()
