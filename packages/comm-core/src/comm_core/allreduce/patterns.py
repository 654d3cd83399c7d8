"""Codes of the fused all-reduce, and what every pattern needs and returns: one table that all validation reads.

The numbers are part of the specified interface: callers store them, and kernels switch on them. None is ever reused
or changed; new ones are added at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, IntEnum, IntFlag
from types import MappingProxyType
from typing import TypeVar

from comm_core.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "ARGUMENTS",
    "MNNVL_ONE_SHOT_THRESHOLD_BYTES",
    "OUTPUTS",
    "PATTERNS",
    "AllReduceFusionOp",
    "AllReduceFusionPattern",
    "AllReduceStrategyConfig",
    "AllReduceStrategyType",
    "MNNVLAllreduceFusionStrategy",
    "MNNVLQuantType",
    "PatternSpec",
    "Quantization",
    "QuantizationSFLayout",
    "check_arguments",
    "check_layout",
    "check_pattern",
]


class AllReduceStrategyType(IntEnum):
    """How the older TensorRT-LLM all-reduce moves its data. Kept for callers of that interface."""

    NCCL = 0
    MIN_LATENCY = 1
    UB = 2
    AUTO = 3
    ONESHOT = 4
    TWOSHOT = 5
    LOWPRECISION = 6


class AllReduceStrategyConfig(IntFlag):
    """Bits that modify an `AllReduceStrategyType`."""

    USE_MEMCPY = 1
    PUSH_MODE = 2


class AllReduceFusionOp(IntEnum):
    """What follows the older TensorRT-LLM all-reduce. Kept for callers of that interface."""

    NONE = 0
    RESIDUAL_RMS_NORM = 1
    LAST_PROCESS_FOR_UB = 2
    RESIDUAL_RMS_PREPOST_NORM = 3
    RESIDUAL_RMS_NORM_QUANT_FP8 = 4
    RESIDUAL_RMS_NORM_QUANT_NVFP4 = 5
    RESIDUAL_RMS_NORM_OUT_QUANT_FP8 = 6
    RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4 = 7
    MOE_ALLREDUCE_RESIDUAL_RMS_NORM = 8
    MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM = 9


class AllReduceFusionPattern(IntEnum):
    """What follows the sum of all ranks. ``Out`` in a name: the normalized values are always returned as well."""

    kAllReduce = 0
    kARResidualRMSNorm = 1
    kARResidualRMSNormFP8Quant = 2
    kARResidualRMSNormFP4Quant = 3
    kARResidualRMSNormOutFP8Quant = 4
    kARResidualRMSNormOutFP4Quant = 5
    kMoEReductionARResidualRMSNorm = 6
    kMoEFinalizeARResidualRMSNorm = 7
    kARResidualRMSNormPerTokenGroupFP8PackedQuant = 8
    kARResidualRMSNormOutPerTokenGroupFP8PackedQuant = 9
    kARResidualRMSNormDynamicFP8Quant = 10
    kARResidualRMSNormOutDynamicFP8Quant = 11
    kMoEFinalizeARResidualRMSNormFP8Quant = 12


class QuantizationSFLayout(IntEnum):
    """Where the scale factors of blocks lie in memory; `comm_core.allreduce.scales` has the formulas."""

    SWIZZLED_128x4 = 0
    SWIZZLED_8x4 = 1
    LINEAR = 2


class MNNVLAllreduceFusionStrategy(IntEnum):
    """How the MNNVL all-reduce moves its data."""

    ONESHOT = 0
    TWOSHOT = 1
    AUTO = 99


class MNNVLQuantType(IntEnum):
    """What ``trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant`` quantizes to: its ``quant_type``."""

    NONE = 0
    FP8 = 1
    NVFP4 = 2
    DYNAMIC_FP8 = 3


MNNVL_ONE_SHOT_THRESHOLD_BYTES = 64 * 1024 * 8 * 2
"""AUTO takes one shot while tokens * hidden_dim * world_size * itemsize is at most this (1 MiB)."""


class Quantization(Enum):
    """What the normalized values are encoded as; `comm_core.allreduce.quant` has the bits."""

    NONE = "none"
    FP8 = "fp8"
    """E4M3 with one given scale."""
    DYNAMIC_FP8 = "dynamic_fp8"
    """E4M3 with an fp32 scale a token, from the token's largest value."""
    GROUP_FP8 = "group_fp8"
    """E4M3 with a UE8M0 scale for every group of a token, four scales in an int32."""
    NVFP4 = "nvfp4"
    """E2M1 with an E4M3 scale for every 16 values."""
    MXFP8 = "mxfp8"
    """E4M3 with a UE8M0 scale for every 32 values. No pattern has it; the MNNVL functions do."""


OUTPUTS = ("output", "residual_out", "norm_out", "quant_out", "scale_out")
"""Every tensor that a pattern can write, by the name of its argument."""

_NORM = ("residual_in", "rms_gamma")
_MOE_REDUCTION = (
    "moe_reduction_device_num_experts",
    "moe_reduction_scale_input",
    "moe_reduction_active_experts_token_input",
    "moe_reduction_token_input",
)

ARGUMENTS = (
    "input",
    *_NORM,
    "scale_factor",
    "layout_code",
    "block_quant_group_size",
    *_MOE_REDUCTION,
    "expanded_idx_to_permuted_idx",
    "expert_scale_factor",
    "shared_expert_output",
)
"""Every argument that some patterns read and others don't, and that a caller gives or leaves out."""


@dataclass(frozen=True)
class PatternSpec:
    """One pattern.

    Attributes:
        pattern: its code.
        needs: arguments that must be given.
        accepts: arguments that are read where they are given.
        returns: outputs that are always made.
        may_return: outputs that are made where the caller gives the tensor for them.
        primary: the output that the call returns.
        quantization: how `quant_out` is encoded, where there is one.
    """

    pattern: AllReduceFusionPattern
    needs: tuple[str, ...]
    accepts: tuple[str, ...]
    returns: tuple[str, ...]
    may_return: tuple[str, ...]
    primary: str
    quantization: Quantization

    @property
    def has_norm(self) -> bool:
        """Whether residual and RMSNorm follow the sum."""
        return "rms_gamma" in self.needs

    @property
    def is_moe(self) -> bool:
        """Whether the ranks' operands are made from experts' outputs first."""
        return "input" not in self.needs or "expanded_idx_to_permuted_idx" in self.needs


def _fused(
    pattern: AllReduceFusionPattern,
    quantization: Quantization = Quantization.NONE,
    *,
    norm_out: bool,
    needs: tuple[str, ...] = (),
    accepts: tuple[str, ...] = (),
    scale_out: bool = False,
) -> PatternSpec:
    """Return the row of a pattern that is sum, residual, norm and perhaps quantization."""
    returns = ["residual_out"]
    returns += ["norm_out"] if norm_out else []
    returns += ["quant_out"] if quantization is not Quantization.NONE else []
    returns += ["scale_out"] if scale_out else []
    primary = "norm_out" if quantization is Quantization.NONE else "quant_out"
    # Callers hand norm_out to the patterns without ``Out`` too. Filled, it is what its name says.
    may_return = () if norm_out else ("norm_out",)
    return PatternSpec(pattern, ("input", *_NORM, *needs), accepts, tuple(returns), may_return, primary, quantization)


def _table() -> dict[AllReduceFusionPattern, PatternSpec]:
    """Return the rows of `PATTERNS`."""
    code = AllReduceFusionPattern
    finalize = ("expanded_idx_to_permuted_idx",)
    finalize_accepts = ("expert_scale_factor", "shared_expert_output")
    fp4 = ("scale_factor", "layout_code")
    rows = [
        PatternSpec(code.kAllReduce, ("input",), (), ("output",), (), "output", Quantization.NONE),
        _fused(code.kARResidualRMSNorm, norm_out=True),
        PatternSpec(
            code.kMoEReductionARResidualRMSNorm,
            (*_NORM, *_MOE_REDUCTION),
            fp4,
            ("residual_out", "norm_out"),
            ("output", "quant_out", "scale_out"),
            "norm_out",
            Quantization.NVFP4,
        ),
        PatternSpec(
            code.kMoEFinalizeARResidualRMSNorm,
            ("input", *_NORM, *finalize),
            (*finalize_accepts, *fp4),
            ("residual_out", "norm_out"),
            ("quant_out", "scale_out"),
            "norm_out",
            Quantization.NVFP4,
        ),
        _fused(
            code.kMoEFinalizeARResidualRMSNormFP8Quant,
            Quantization.FP8,
            norm_out=False,
            needs=(*finalize, "scale_factor"),
            accepts=finalize_accepts,
        ),
    ]
    for norm_out, fp8, nvfp4, group, dynamic in (
        (
            False,
            code.kARResidualRMSNormFP8Quant,
            code.kARResidualRMSNormFP4Quant,
            code.kARResidualRMSNormPerTokenGroupFP8PackedQuant,
            code.kARResidualRMSNormDynamicFP8Quant,
        ),
        (
            True,
            code.kARResidualRMSNormOutFP8Quant,
            code.kARResidualRMSNormOutFP4Quant,
            code.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant,
            code.kARResidualRMSNormOutDynamicFP8Quant,
        ),
    ):
        rows += [
            _fused(fp8, Quantization.FP8, norm_out=norm_out, needs=("scale_factor",)),
            _fused(
                nvfp4,
                Quantization.NVFP4,
                norm_out=norm_out,
                needs=("scale_factor",),
                accepts=("layout_code",),
                scale_out=True,
            ),
            _fused(
                group, Quantization.GROUP_FP8, norm_out=norm_out, needs=("block_quant_group_size",), scale_out=True
            ),
            _fused(dynamic, Quantization.DYNAMIC_FP8, norm_out=norm_out, scale_out=True),
        ]
    return {row.pattern: row for row in sorted(rows, key=lambda row: row.pattern)}


PATTERNS: Mapping[AllReduceFusionPattern, PatternSpec] = MappingProxyType(_table())
"""Every pattern, in the order of the codes."""

_Code = TypeVar("_Code", bound=IntEnum)


def _check_code(value: object, codes: type[_Code], name: str) -> _Code:
    """Return `value` as a member of `codes`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ArgumentTypeError(f"{name} must be a code of {codes.__name__}, got {type(value).__name__} {value!r}")
    if isinstance(value, IntEnum) and not isinstance(value, codes):
        raise ArgumentTypeError(f"{name} must be a code of {codes.__name__}, got {value!r} of another enumeration")
    try:
        return codes(value)
    except ValueError:
        known = ", ".join(f"{int(code)} {code.name}" for code in codes)
        raise ArgumentValueError(f"{name}={value} is no code of {codes.__name__} ({known})") from None


def check_pattern(pattern: object) -> PatternSpec:
    """Return the row of `PATTERNS` for a code, given as an `AllReduceFusionPattern` or as a plain int.

    Raises:
        ArgumentTypeError: it is something else: a bool, a float, a code of another enumeration.
        ArgumentValueError: no pattern has this code.
    """
    return PATTERNS[_check_code(pattern, AllReduceFusionPattern, "pattern")]


def check_layout(layout_code: object) -> QuantizationSFLayout:
    """Return the layout for a code; None is the default, SWIZZLED_128x4.

    Raises:
        ArgumentTypeError: it is no int, or a code of another enumeration.
        ArgumentValueError: no layout has this code.
    """
    if layout_code is None:
        return QuantizationSFLayout.SWIZZLED_128x4
    return _check_code(layout_code, QuantizationSFLayout, "layout_code")


def check_arguments(spec: PatternSpec, given: Collection[str]) -> None:
    """Refuse a call that lacks what its pattern needs, or asks for what its pattern doesn't make.

    Arguments of `ARGUMENTS` that the pattern doesn't read are no error: callers pass one set for all patterns.

    Args:
        spec: the row of the pattern.
        given: names, from `ARGUMENTS` and `OUTPUTS`, of what the caller gave.

    Raises:
        ArgumentValueError: names every missing argument, or every output that the pattern can't fill; a tensor that
            stayed as it was would pass for a result.
    """
    unknown = sorted(set(given) - {*ARGUMENTS, *OUTPUTS})
    if unknown:
        raise ArgumentValueError(f"{', '.join(unknown)}: no argument of a pattern; known are {ARGUMENTS + OUTPUTS}")
    missing = [name for name in spec.needs if name not in given]
    if missing:
        raise ArgumentValueError(
            f"{spec.pattern.name} (code {int(spec.pattern)}) needs {', '.join(missing)}, got None. "
            f"It needs {', '.join(spec.needs)}"
        )
    made = {*spec.returns, *spec.may_return}
    idle = [name for name in OUTPUTS if name in given and name not in made]
    if idle:
        raise ArgumentValueError(
            f"{spec.pattern.name} (code {int(spec.pattern)}) does not write {', '.join(idle)}; it writes "
            f"{', '.join(name for name in OUTPUTS if name in made)}. Leave the others out or choose another pattern"
        )
    if ("quant_out" in given) != ("scale_out" in given) and {"quant_out", "scale_out"} <= set(spec.may_return):
        raise ArgumentValueError(
            f"{spec.pattern.name} (code {int(spec.pattern)}) quantizes where both quant_out and scale_out are given, "
            "got one of them"
        )
