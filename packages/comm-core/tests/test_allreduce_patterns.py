"""The codes of the fused all-reduce and the table of what every pattern needs and returns."""

from __future__ import annotations

import subprocess
import sys
from enum import IntEnum

import pytest

import comm_core.allreduce
from comm_core.allreduce import patterns
from comm_core.allreduce.patterns import (
    ARGUMENTS,
    OUTPUTS,
    PATTERNS,
    AllReduceFusionOp,
    AllReduceFusionPattern,
    PatternSpec,
    Quantization,
    QuantizationSFLayout,
    check_arguments,
    check_layout,
    check_pattern,
)
from comm_core.errors import ArgumentTypeError, ArgumentValueError

CODES = {
    "AllReduceStrategyType": dict(NCCL=0, MIN_LATENCY=1, UB=2, AUTO=3, ONESHOT=4, TWOSHOT=5, LOWPRECISION=6),
    "AllReduceStrategyConfig": dict(USE_MEMCPY=1, PUSH_MODE=2),
    "AllReduceFusionOp": dict(
        NONE=0,
        RESIDUAL_RMS_NORM=1,
        LAST_PROCESS_FOR_UB=2,
        RESIDUAL_RMS_PREPOST_NORM=3,
        RESIDUAL_RMS_NORM_QUANT_FP8=4,
        RESIDUAL_RMS_NORM_QUANT_NVFP4=5,
        RESIDUAL_RMS_NORM_OUT_QUANT_FP8=6,
        RESIDUAL_RMS_NORM_OUT_QUANT_NVFP4=7,
        MOE_ALLREDUCE_RESIDUAL_RMS_NORM=8,
        MOE_FINALIZE_ALLREDUCE_RESIDUAL_RMS_NORM=9,
    ),
    "AllReduceFusionPattern": dict(
        kAllReduce=0,
        kARResidualRMSNorm=1,
        kARResidualRMSNormFP8Quant=2,
        kARResidualRMSNormFP4Quant=3,
        kARResidualRMSNormOutFP8Quant=4,
        kARResidualRMSNormOutFP4Quant=5,
        kMoEReductionARResidualRMSNorm=6,
        kMoEFinalizeARResidualRMSNorm=7,
        kARResidualRMSNormPerTokenGroupFP8PackedQuant=8,
        kARResidualRMSNormOutPerTokenGroupFP8PackedQuant=9,
        kARResidualRMSNormDynamicFP8Quant=10,
        kARResidualRMSNormOutDynamicFP8Quant=11,
        kMoEFinalizeARResidualRMSNormFP8Quant=12,
    ),
    "QuantizationSFLayout": dict(SWIZZLED_128x4=0, SWIZZLED_8x4=1, LINEAR=2),
    "MNNVLAllreduceFusionStrategy": dict(ONESHOT=0, TWOSHOT=1, AUTO=99),
    "MNNVLQuantType": dict(NONE=0, FP8=1, NVFP4=2, DYNAMIC_FP8=3),
}
"""The numbers of the specified interface, written down once more: callers have them in their own code."""

MOE = {
    "moe_reduction_device_num_experts",
    "moe_reduction_scale_input",
    "moe_reduction_active_experts_token_input",
    "moe_reduction_token_input",
}
NORM = {"input", "residual_in", "rms_gamma"}
RESIDUAL, FULL = {"residual_out"}, {"residual_out", "norm_out"}
TABLE: dict[int, tuple[set[str], set[str], set[str], str, Quantization]] = {
    0: ({"input"}, {"output"}, set(), "output", Quantization.NONE),
    1: (NORM, FULL, set(), "norm_out", Quantization.NONE),
    2: (NORM | {"scale_factor"}, RESIDUAL | {"quant_out"}, {"norm_out"}, "quant_out", Quantization.FP8),
    3: (
        NORM | {"scale_factor"},
        RESIDUAL | {"quant_out", "scale_out"},
        {"norm_out"},
        "quant_out",
        Quantization.NVFP4,
    ),
    4: (NORM | {"scale_factor"}, FULL | {"quant_out"}, set(), "quant_out", Quantization.FP8),
    5: (NORM | {"scale_factor"}, FULL | {"quant_out", "scale_out"}, set(), "quant_out", Quantization.NVFP4),
    6: (NORM - {"input"} | MOE, FULL, {"output", "quant_out", "scale_out"}, "norm_out", Quantization.NVFP4),
    7: (
        NORM | {"expanded_idx_to_permuted_idx"},
        FULL,
        {"quant_out", "scale_out"},
        "norm_out",
        Quantization.NVFP4,
    ),
    8: (
        NORM | {"block_quant_group_size"},
        RESIDUAL | {"quant_out", "scale_out"},
        {"norm_out"},
        "quant_out",
        Quantization.GROUP_FP8,
    ),
    9: (
        NORM | {"block_quant_group_size"},
        FULL | {"quant_out", "scale_out"},
        set(),
        "quant_out",
        Quantization.GROUP_FP8,
    ),
    10: (NORM, RESIDUAL | {"quant_out", "scale_out"}, {"norm_out"}, "quant_out", Quantization.DYNAMIC_FP8),
    11: (NORM, FULL | {"quant_out", "scale_out"}, set(), "quant_out", Quantization.DYNAMIC_FP8),
    12: (
        NORM | {"expanded_idx_to_permuted_idx", "scale_factor"},
        RESIDUAL | {"quant_out"},
        {"norm_out"},
        "quant_out",
        Quantization.FP8,
    ),
}
SPECS = list(PATTERNS.values())


def spec_id(spec: PatternSpec) -> str:
    return spec.pattern.name


@pytest.mark.parametrize("name", CODES)
def test_codes_are_the_specified_ones(name: str) -> None:
    assert {member.name: int(member) for member in getattr(patterns, name)} == CODES[name]


def test_the_threshold_of_one_shot_is_a_mebibyte() -> None:
    assert patterns.MNNVL_ONE_SHOT_THRESHOLD_BYTES == 1 << 20


@pytest.mark.parametrize("code", range(13))
def test_what_a_pattern_needs_and_returns(code: int) -> None:
    spec = PATTERNS[AllReduceFusionPattern(code)]
    needs, returns, may_return, primary, quantization = TABLE[code]
    assert set(spec.needs) == needs
    assert set(spec.returns) == returns
    assert set(spec.may_return) == may_return
    assert (spec.primary, spec.quantization) == (primary, quantization)
    assert spec.has_norm == (code != 0)
    assert spec.is_moe == (code in (6, 7, 12))


def test_the_table_is_whole_and_speaks_of_known_arguments() -> None:
    assert list(PATTERNS) == sorted(AllReduceFusionPattern)
    for spec in SPECS:
        assert {*spec.needs, *spec.accepts} <= set(ARGUMENTS)
        assert {*spec.returns, *spec.may_return} <= set(OUTPUTS)
        assert not set(spec.needs) & set(spec.accepts)
        assert not set(spec.returns) & set(spec.may_return)
        assert spec.primary in spec.returns
    with pytest.raises(TypeError):
        PATTERNS[AllReduceFusionPattern.kAllReduce] = SPECS[1]  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize("code", range(13))
def test_a_pattern_is_found_by_number_and_by_name(code: int) -> None:
    assert (
        check_pattern(code) is check_pattern(AllReduceFusionPattern(code)) is PATTERNS[AllReduceFusionPattern(code)]
    )


@pytest.mark.parametrize("value", [True, 1.0, "kAllReduce", None, AllReduceFusionOp.NONE])
def test_what_is_no_code_is_refused_by_type(value: object) -> None:
    with pytest.raises(ArgumentTypeError, match="pattern must be a code of AllReduceFusionPattern, got"):
        check_pattern(value)


@pytest.mark.parametrize("value", [-1, 13, 1 << 40])
def test_a_number_that_is_no_code_is_refused_and_told_the_codes(value: int) -> None:
    with pytest.raises(ArgumentValueError, match=rf"pattern={value} is no code .*0 kAllReduce.*12 kMoE"):
        check_pattern(value)


@pytest.mark.parametrize("layout", QuantizationSFLayout)
def test_layouts_are_found_by_number_and_the_first_is_the_default(layout: QuantizationSFLayout) -> None:
    assert check_layout(int(layout)) is check_layout(layout) is layout
    assert check_layout(None) is QuantizationSFLayout.SWIZZLED_128x4


def test_what_is_no_layout_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="layout_code=3 is no code of QuantizationSFLayout"):
        check_layout(3)
    with pytest.raises(ArgumentTypeError, match="another enumeration"):
        check_layout(AllReduceFusionPattern.kAllReduce)
    with pytest.raises(ArgumentTypeError, match="bool"):
        check_layout(False)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_what_is_needed_is_enough_with_any_output_that_is_made(spec: PatternSpec) -> None:
    check_arguments(spec, spec.needs)
    check_arguments(spec, {*spec.needs, *spec.returns, *spec.may_return})
    check_arguments(spec, {*ARGUMENTS, *spec.returns})


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_every_missing_argument_is_named(spec: PatternSpec) -> None:
    for name in spec.needs:
        with pytest.raises(ArgumentValueError, match=rf"\(code {int(spec.pattern)}\) needs {name}, got None"):
            check_arguments(spec, set(spec.needs) - {name})
    with pytest.raises(ArgumentValueError, match=f"needs {', '.join(spec.needs)}, got None"):
        check_arguments(spec, ())


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_an_output_that_would_stay_as_it_was_is_refused(spec: PatternSpec) -> None:
    idle = [name for name in OUTPUTS if name not in (*spec.returns, *spec.may_return)]
    for name in idle:
        with pytest.raises(ArgumentValueError, match=f"does not write {name}; it writes"):
            check_arguments(spec, {*spec.needs, name})


@pytest.mark.parametrize("code", [6, 7])
@pytest.mark.parametrize("name", ["quant_out", "scale_out"])
def test_half_of_an_optional_quantization_is_refused(code: int, name: str) -> None:
    spec = check_pattern(code)
    with pytest.raises(ArgumentValueError, match="both quant_out and scale_out"):
        check_arguments(spec, {*spec.needs, name})


def test_a_name_that_is_no_argument_is_refused() -> None:
    with pytest.raises(ArgumentValueError, match="gamma: no argument of a pattern"):
        check_arguments(SPECS[0], {"input", "gamma"})


def test_public_names_are_found_without_torch() -> None:
    for name in comm_core.allreduce.__all__:
        assert getattr(comm_core.allreduce, name).__name__ == name
    assert set(comm_core.allreduce.__all__) <= set(dir(comm_core.allreduce))
    assert issubclass(comm_core.allreduce.AllReduceFusionPattern, IntEnum)
    code = (
        "import sys, comm_core.allreduce as a; [getattr(a, n) for n in a.__all__]; "
        "a.compute_fp4_swizzled_layout_sf_size(1, 1); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
