"""The fused all-reduce in plain PyTorch: what every pattern must return, on the CPU or on CUDA.

No rank, no memory and no communication here. A caller gathers the operands of all ranks, sums them with
`reduce_in_rank_order` and hands the sum to `fuse`. Both are functions of their arguments alone and give the same bits
whatever the number of threads, so ranks that are given equal arguments have equal results.

``T`` tokens, ``H`` hidden_dim, ``dt`` the dtype of the operands (float16, bfloat16 or float32), ``dt(...)`` rounding
to it (to nearest, ties to even, overflow to infinity). The formulas are those of the specified interface::

    sum      = dt(0 + x_0 + x_1 + ... )                      fp32, in the order of ranks, rounded once
    residual = dt(sum + residual_in)                         fp32
    inverse  = 1 / sqrt(sum of residual^2 / H + rms_eps)     fp32
    norm     = dt(residual * inverse * (weight_bias + rms_gamma))
    quant    = encoding of norm, see `comm_core.allreduce.quant`

Two of them say more than usual, so that there is one right answer:

- The sum starts from +0.0: it is never -0.0, even where all operands are. Transports that use -0.0 as "nothing came
  yet" send +0.0 instead, which gives the same sums.
- `inverse` is computed with fp64 squares and sums in one fixed order; the sum is rounded to fp32, and so are the
  quotient, the sum with `rms_eps` and the inverse root. A kernel sums in fp32 in an order of its own, and may differ
  by some units in the last place of `inverse`, which is the tolerance for `norm` and what is made of it. Squares
  that sum beyond the largest fp32 give the infinity that a kernel gives as well, and zeros for `norm`.

NaN and infinities pass through as IEEE arithmetic has it: a NaN in a row makes the row's `norm` NaN; an infinity
makes its own place NaN and the other places 0. Other rows never see them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from comm_core.allreduce.patterns import (
    AllReduceFusionPattern,
    PatternSpec,
    Quantization,
    QuantizationSFLayout,
    check_layout,
    check_pattern,
)
from comm_core.allreduce.quant import (
    MXFP8_BLOCK,
    NVFP4_BLOCK,
    arrange_scales,
    pack_group_scales,
    quantize_fp8,
    quantize_fp8_dynamic,
    quantize_fp8_groups,
    quantize_mxfp8,
    quantize_nvfp4,
)
from comm_core.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "DTYPES",
    "FusionOutputs",
    "fuse",
    "moe_finalize",
    "moe_reduce",
    "quantize",
    "reduce_in_rank_order",
    "rms_norm",
]

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types of operands, residual and norm."""


@dataclass(frozen=True)
class FusionOutputs:
    """What a pattern returns; None where it doesn't.

    Attributes:
        output: the sum, ``dt [T, H]``.
        residual_out: sum and residual, before the norm, ``dt [T, H]``.
        norm_out: ``dt [T, H]``.
        quant_out: float8_e4m3fn ``[T, H]``; NVFP4: uint8 ``[T, H / 2]``.
        scale_out: dynamic FP8: float32 ``[T, 1]``. Grouped FP8: int32, see
            `comm_core.allreduce.quant.pack_group_scales`. NVFP4 and MXFP8: float8_e4m3fn and uint8 (UE8M0 codes),
            ``[T, H / block]`` in LINEAR and flat, with zeros for padding, in the swizzled layouts.
    """

    output: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    norm_out: torch.Tensor | None = None
    quant_out: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None


def _check_tensor(
    x: object,
    name: str,
    shape: tuple[int, ...],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
) -> torch.Tensor:
    """Return `x` if it is what is expected; the errors name the argument, what was expected and what came."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != shape:
        raise ArgumentValueError(f"{name} must have the shape {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise ArgumentValueError(f"{name} must be {' or '.join(map(str, dtypes))}, got {x.dtype}")
    if x.device != device:
        raise ArgumentValueError(f"{name} must be on {device}, got {x.device}")
    return x


def _check_operand(x: object, name: str) -> torch.Tensor:
    """Return `x` if it is a matrix of one of `DTYPES`."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != 2:
        raise ArgumentValueError(f"{name} must be [tokens, hidden_dim], got {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise ArgumentValueError(f"{name} must be one of {', '.join(map(str, DTYPES))}, got {x.dtype}")
    return x


def reduce_in_rank_order(operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the fp32 sum ``((0 + x_0) + x_1) + ...`` of one operand of every rank.

    Args:
        operands: in the order of ranks; one shape, one dtype of `DTYPES`, one device.

    Returns:
        float32, the shape of an operand. Every addition rounds to nearest; the result is not yet rounded to the
        operands' dtype. It is never -0.0.

    Raises:
        ArgumentTypeError: an operand is no tensor.
        ArgumentValueError: there is none, or they differ, or have another dtype.
    """
    if not operands:
        raise ArgumentValueError("operands must hold one tensor a rank, got none")
    first = operands[0]
    if not isinstance(first, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"operands[0] must be a tensor, got {type(first).__name__}")
    if first.dtype not in DTYPES:
        raise ArgumentValueError(f"operands must be one of {', '.join(map(str, DTYPES))}, got {first.dtype}")
    total = torch.zeros(first.shape, dtype=torch.float32, device=first.device)
    for rank, x in enumerate(operands):
        _check_tensor(x, f"operands[{rank}]", tuple(first.shape), (first.dtype,), first.device)
        total = total + x.to(torch.float32)
    return total


def _sum_last(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of the last dimension, kept, by halving: `sum` picks an order by the number of threads."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        pairs = x[..., :half] + x[..., half : 2 * half]
        x = torch.cat((pairs, x[..., 2 * half :]), dim=-1) if x.shape[-1] % 2 else pairs
    return x


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, weight_bias: float) -> torch.Tensor:
    """Return ``dt(x * (1 / sqrt(mean of x^2 + eps)) * (weight_bias + gamma))``, over the last dimension.

    Args:
        x: ``dt [T, H]``, `H` > 0.
        gamma: ``[H]``, one of `DTYPES`.
        eps: not negative.
        weight_bias: 0 for the usual norm, 1 where gamma is stored less one (Gemma).

    Returns:
        ``dt [T, H]``; products in fp32, from left to right. See the module's docstring for the statistics.
    """
    values = x.to(torch.float32)
    size, small = (torch.full((), value, dtype=torch.float32, device=x.device) for value in (x.shape[-1], eps))
    squares = _sum_last(values.to(torch.float64).square()).to(torch.float32)
    inverse = (1.0 / (squares / size + small).to(torch.float64).sqrt()).to(torch.float32)
    bias = torch.full((), weight_bias, dtype=torch.float32, device=x.device)
    return (values * inverse * (bias + gamma.to(torch.float32))).to(x.dtype)


def moe_reduce(
    active_experts_token_input: torch.Tensor,
    scale_input: torch.Tensor,
    token_input: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Return a rank's operand of `kMoEReductionARResidualRMSNorm`: its experts' outputs, weighted, and a shared part.

    ``acc = 0``; for every expert ``acc = dt(acc + dt(output * scale))``; then ``dt(acc + token_input)``.

    Args:
        active_experts_token_input: ``dt``, ``num_experts * T * H`` contiguous elements, by expert, then token.
        scale_input: float32, ``num_experts * T`` contiguous elements, by expert, then token.
        token_input: ``dt [T, H]``.
        num_experts: experts of this rank; 0 is allowed.

    Returns:
        ``dt [T, H]``.

    Raises:
        ArgumentTypeError: a tensor is none, or `num_experts` no int.
        ArgumentValueError: an argument, which the text names, has another size, dtype, device or order in memory.
    """
    token_input = _check_operand(token_input, "moe_reduction_token_input")
    name = "moe_reduction_device_num_experts"
    if isinstance(num_experts, bool) or not isinstance(num_experts, int):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"{name} must be an int, got {type(num_experts).__name__} {num_experts!r}")
    if num_experts < 0:
        raise ArgumentValueError(f"{name} must not be negative, got {num_experts}")
    tokens, hidden = token_input.shape
    flat: list[torch.Tensor] = []
    for x, name, shape, dtype in (
        (
            active_experts_token_input,
            "moe_reduction_active_experts_token_input",
            (num_experts, tokens, hidden),
            token_input.dtype,
        ),
        (scale_input, "moe_reduction_scale_input", (num_experts, tokens), torch.float32),
    ):
        if not isinstance(x, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if not x.is_contiguous() or x.numel() != math.prod(shape):
            raise ArgumentValueError(f"{name} must be {shape} contiguous elements, got {tuple(x.shape)}")
        flat.append(_check_tensor(x.reshape(shape), name, shape, (dtype,), token_input.device))
    experts, scales = flat
    acc = torch.zeros_like(token_input)
    for expert in range(num_experts):
        product = (experts[expert].to(torch.float32) * scales[expert, :, None]).to(acc.dtype)
        acc = (acc.to(torch.float32) + product.to(torch.float32)).to(acc.dtype)
    return (acc.to(torch.float32) + token_input.to(torch.float32)).to(acc.dtype)


def moe_finalize(
    permuted: torch.Tensor,
    expanded_idx_to_permuted_idx: torch.Tensor,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    routed_scaling_factor: float | None = None,
) -> torch.Tensor:
    """Return a rank's operand of the finalize patterns: every token's rows of the experts' outputs, weighted.

    ``acc = 0``; for every slot `k` of a token whose index is not -1, ``acc = dt(acc + dt(row * scale))``; then
    ``dt(acc * routed_scaling_factor)`` and ``dt(acc + shared_expert_output)``, where they are given.

    Args:
        permuted: experts' outputs, ``dt [P, H]``; rows that no index names are padding, and never read.
        expanded_idx_to_permuted_idx: int32 ``[T, top_k]``, rows of `permuted`; -1: an expert of another rank.
        expert_scale_factor: ``[T, top_k]``, ``dt`` or float32; None is 1 everywhere.
        shared_expert_output: ``dt [T, H]``.
        routed_scaling_factor: of the experts' sum, without the shared part.

    Returns:
        ``dt [T, H]``.

    Raises:
        ArgumentTypeError: a tensor is none.
        ArgumentValueError: an argument, which the text names, has another shape, dtype or device, or an index is
            outside ``-1 .. P - 1``.
    """
    permuted = _check_operand(permuted, "input")
    index = expanded_idx_to_permuted_idx
    if not isinstance(index, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"expanded_idx_to_permuted_idx must be a tensor, got {type(index).__name__}")
    if index.dim() != 2:
        raise ArgumentValueError(f"expanded_idx_to_permuted_idx must be [tokens, top_k], got {tuple(index.shape)}")
    tokens, top_k = index.shape
    rows, hidden = permuted.shape
    _check_tensor(index, "expanded_idx_to_permuted_idx", (tokens, top_k), (torch.int32,), permuted.device)
    bad = (index < -1) | (index >= rows)
    if bool(bad.any()):
        token, slot = divmod(int(bad.flatten().to(torch.uint8).argmax()), top_k)
        raise ArgumentValueError(
            f"expanded_idx_to_permuted_idx[{token}, {slot}] is {int(index[token, slot])}: expected -1 or a row of "
            f"input, which has {rows}"
        )
    dtype = permuted.dtype
    scale = torch.ones((tokens, top_k), dtype=torch.float32, device=permuted.device)
    if expert_scale_factor is not None:
        scale = _check_tensor(
            expert_scale_factor,
            "expert_scale_factor",
            (tokens, top_k),
            tuple(dict.fromkeys((dtype, torch.float32))),
            permuted.device,
        ).to(torch.float32)
    acc = torch.zeros((tokens, hidden), dtype=dtype, device=permuted.device)
    for slot in range(top_k if rows else 0):
        chosen = index[:, slot].to(torch.int64)
        product = (permuted[chosen.clamp(min=0)].to(torch.float32) * scale[:, slot, None]).to(dtype)
        total = (acc.to(torch.float32) + product.to(torch.float32)).to(dtype)
        acc = torch.where((chosen >= 0)[:, None], total, acc)
    if routed_scaling_factor is not None:
        factor = torch.full((), routed_scaling_factor, dtype=torch.float32, device=permuted.device)
        acc = (acc.to(torch.float32) * factor).to(dtype)
    if shared_expert_output is not None:
        shared = _check_tensor(
            shared_expert_output, "shared_expert_output", (tokens, hidden), (dtype,), permuted.device
        )
        acc = (acc.to(torch.float32) + shared.to(torch.float32)).to(dtype)
    return acc


def quantize(
    norm: torch.Tensor,
    quantization: Quantization,
    *,
    scale_factor: float | torch.Tensor | None = None,
    layout: QuantizationSFLayout = QuantizationSFLayout.SWIZZLED_128x4,
    block_quant_group_size: int | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `quant_out` and `scale_out` of normalized values, in the form in which `FusionOutputs` has them.

    Args:
        norm: ``dt [T, H]``: rounded to the dtype already, so that the result is that of quantizing `norm_out`.
        quantization: the encoding.
        scale_factor: static FP8: the scale. NVFP4: the global scale. A number or one float32 element.
        layout: of NVFP4's and MXFP8's scale factors.
        block_quant_group_size: values a group of grouped FP8.

    Raises:
        ArgumentValueError: a scale or group size is missing or can't be used, or `H` is no multiple of the block.
    """
    values = norm.to(torch.float32)
    if quantization is Quantization.NONE:
        return None, None
    if quantization is Quantization.DYNAMIC_FP8:
        return quantize_fp8_dynamic(values)
    if quantization is Quantization.GROUP_FP8:
        if block_quant_group_size is None:
            raise ArgumentValueError("block_quant_group_size is needed for FP8 with a scale a group, got None")
        quant_out, codes = quantize_fp8_groups(values, block_quant_group_size)
        return quant_out, pack_group_scales(codes)
    if quantization is Quantization.MXFP8:
        _check_hidden(values, MXFP8_BLOCK, "MXFP8")
        quant_out, codes = quantize_mxfp8(values)
        return quant_out, arrange_scales(codes, layout)
    if scale_factor is None:
        raise ArgumentValueError(f"scale_factor is needed for {quantization.value}, got None")
    if quantization is Quantization.FP8:
        return quantize_fp8(values, scale_factor), None
    _check_hidden(values, NVFP4_BLOCK, "NVFP4")
    quant_out, codes = quantize_nvfp4(values, scale_factor)
    return quant_out, arrange_scales(codes, layout).view(torch.float8_e4m3fn)


def _check_hidden(x: torch.Tensor, block: int, name: str) -> None:
    """Refuse rows that are not whole blocks."""
    if x.shape[-1] % block:
        raise ArgumentValueError(f"hidden_dim must be a multiple of {block} for {name}, got {x.shape[-1]}")


def fuse(
    pattern: AllReduceFusionPattern | int,
    reduced: torch.Tensor,
    dtype: torch.dtype,
    *,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    weight_bias: float = 0.0,
    scale_factor: float | torch.Tensor | None = None,
    layout_code: QuantizationSFLayout | int | None = None,
    block_quant_group_size: int | None = None,
    wanted: Collection[str] = (),
    quantization: Quantization | None = None,
) -> FusionOutputs:
    """Return everything that follows the sum of a pattern.

    The MoE patterns differ from the others in their operands only: those come from `moe_reduce` and `moe_finalize`.

    Args:
        pattern: its code.
        reduced: the sum of `reduce_in_rank_order`, float32 ``[T, H]``.
        dtype: of the operands and of what is returned unquantized: ``dt``.
        residual_in: ``dt [T, H]``; not for `kAllReduce`, like the next three.
        rms_gamma: ``dt [H]``.
        rms_eps: added to the mean of squares; not negative.
        weight_bias: added to `rms_gamma`.
        scale_factor: see `quantize`.
        layout_code: of NVFP4's and MXFP8's scale factors; None is SWIZZLED_128x4.
        block_quant_group_size: see `quantize`.
        wanted: outputs that the pattern makes on demand only (`PatternSpec.may_return`): those for which the caller
            has a tensor.
        quantization: another encoding than the pattern's; for functions that offer more than there are patterns.

    Returns:
        The outputs of the pattern, new tensors.

    Raises:
        ArgumentTypeError: an argument, which the text names, has another type.
        ArgumentValueError: the pattern is none, or an argument, which the text names, is missing, has another shape,
            dtype or device, or can't be used.
    """
    spec = check_pattern(pattern)
    if dtype not in DTYPES:
        raise ArgumentValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if not isinstance(reduced, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"reduced must be a tensor, got {type(reduced).__name__}")
    if reduced.dim() != 2 or reduced.dtype is not torch.float32:
        raise ArgumentValueError(
            f"reduced must be float32 [tokens, hidden_dim], got {reduced.dtype} {tuple(reduced.shape)}"
        )
    idle = [name for name in wanted if name not in (*spec.returns, *spec.may_return)]
    if idle:
        raise ArgumentValueError(f"{spec.pattern.name} (code {int(spec.pattern)}) does not make {', '.join(idle)}")
    made = {*spec.returns, *wanted}
    total = reduced.to(dtype, copy=True)
    if not spec.has_norm:
        return FusionOutputs(output=total)
    residual, norm = _residual_and_norm(spec, total, residual_in, rms_gamma, rms_eps, weight_bias)
    encoding = quantization or (spec.quantization if "quant_out" in made else Quantization.NONE)
    quant_out, scale_out = quantize(
        norm,
        encoding,
        scale_factor=scale_factor,
        layout=check_layout(layout_code),
        block_quant_group_size=block_quant_group_size,
    )
    return FusionOutputs(
        output=total if "output" in made else None,
        residual_out=residual,
        norm_out=norm if "norm_out" in made else None,
        quant_out=quant_out,
        scale_out=scale_out,
    )


def _residual_and_norm(
    spec: PatternSpec,
    total: torch.Tensor,
    residual_in: torch.Tensor | None,
    rms_gamma: torch.Tensor | None,
    rms_eps: float,
    weight_bias: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `residual_out` and `norm_out` for the rounded sum."""
    tokens, hidden = total.shape
    for name, x in (("residual_in", residual_in), ("rms_gamma", rms_gamma)):
        if x is None:
            raise ArgumentValueError(f"{spec.pattern.name} (code {int(spec.pattern)}) needs {name}, got None")
    if hidden == 0:
        raise ArgumentValueError("hidden_dim must be positive for a norm, got 0")
    # A negative mean of squares has no root, and NaN would pass unseen.
    if not rms_eps >= 0:
        raise ArgumentValueError(f"rms_eps must not be negative, got {rms_eps}")
    given = _check_tensor(residual_in, "residual_in", (tokens, hidden), (total.dtype,), total.device)
    gamma = _check_tensor(rms_gamma, "rms_gamma", (hidden,), (total.dtype,), total.device)
    residual = (total.to(torch.float32) + given.to(torch.float32)).to(total.dtype)
    return residual, rms_norm(residual, gamma, rms_eps, weight_bias)
