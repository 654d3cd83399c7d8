"""Calls of `allreduce_fusion` with all their operands and outputs, and what must come out of them.

For tests of backends on any device. The sum and what is added to it are compared bit for bit. A norm may differ from
the reference by the last places of its inverse root, whose sum a kernel makes in its own order; its encodings must be
those of the norm that the backend itself made, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from comm_core.allreduce import reference
from comm_core.allreduce.patterns import (
    PATTERNS,
    AllReduceFusionPattern,
    PatternSpec,
    Quantization,
    QuantizationSFLayout,
)
from comm_core.allreduce.quant import NVFP4_BLOCK
from comm_core.allreduce.scales import (
    packed_scale_shape,
    packed_scale_storage,
    packed_scale_stride,
    scale_size,
)

__all__ = ["Case", "Operands", "arguments", "assert_right", "make_operands", "make_outputs", "raw"]

_MANTISSA = {torch.float16: 10, torch.bfloat16: 7, torch.float32: 23}
_ROOT_ULPS = 64.0
"""Units in the last place of fp32 by which the inverse root may differ: sums of up to 2^15 squares."""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        pattern: without experts.
        tokens: T.
        hidden: H.
        dtype: element type.
        layout: of NVFP4 scales.
        group_size: of grouped FP8.
        weight_bias: added to gamma.
        eps: added to the mean of squares.
        values: ``"normal"``, ``"integers"`` (whose sums are exact), ``"special"`` (NaN, infinities, both zeros).
        use_oneshot: algorithm, or None.
        scale_on_device: whether the scale factor is a tensor.
    """

    pattern: AllReduceFusionPattern | int
    tokens: int
    hidden: int
    dtype: torch.dtype = torch.bfloat16
    layout: QuantizationSFLayout = QuantizationSFLayout.SWIZZLED_128x4
    group_size: int = 128
    weight_bias: float = 0.0
    eps: float = 1e-6
    values: str = "normal"
    use_oneshot: bool | None = None
    scale_on_device: bool = True

    @property
    def spec(self) -> PatternSpec:
        """The pattern's row in the table of patterns."""
        return PATTERNS[AllReduceFusionPattern(self.pattern)]

    @property
    def quantization(self) -> Quantization:
        """What the pattern encodes to."""
        return self.spec.quantization

    @property
    def scale_factor(self) -> float:
        """Of static encodings."""
        return 0.02 if self.quantization is Quantization.FP8 else 600.0


@dataclass(frozen=True)
class Operands:
    """What all ranks give, on the CPU.

    Attributes:
        parts: every rank's operand.
        residual: equal on all ranks.
        gamma: equal on all ranks.
    """

    parts: tuple[torch.Tensor, ...]
    residual: torch.Tensor
    gamma: torch.Tensor


def make_operands(case: Case, ranks: int, seed: int) -> Operands:
    """Return operands that differ for every rank and seed."""
    shape = (case.tokens, case.hidden)
    parts: list[torch.Tensor] = []
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        if case.values == "integers":
            x = torch.randint(-7, 8, shape, generator=generator).to(case.dtype)
        else:
            x = torch.randn(shape, generator=generator).to(case.dtype)
        if case.values == "special":
            x.view(-1)[torch.randperm(x.numel(), generator=generator)[: x.numel() // 3]] = -0.0
            # Whole rows stay ordinary, so that one sees that they do.
            for row in range(0, case.tokens, 3):
                place = int(torch.randint(case.hidden, (1,), generator=generator))
                x[row, place] = (torch.nan, torch.inf, -torch.inf)[(row // 3 + rank) % 3]
        parts.append(x)
    common = torch.Generator().manual_seed(1000 * seed + 999)
    residual = torch.randn(shape, generator=common).to(case.dtype)
    gamma = torch.randn(case.hidden, generator=common).to(case.dtype)
    return Operands(tuple(parts), residual, gamma)


def make_outputs(case: Case, device: torch.device) -> dict[str, torch.Tensor]:
    """Return every output that the pattern can write, filled with what no call leaves in them."""
    spec, shape = case.spec, (case.tokens, case.hidden)
    made: dict[str, torch.Tensor] = {}
    for name in (*spec.returns, *spec.may_return):
        if name == "scale_out":
            made[name] = _scale_out(case, device)
        elif name == "quant_out" and case.quantization is Quantization.NVFP4:
            made[name] = torch.full((case.tokens, case.hidden // 2), 0x5A, dtype=torch.uint8, device=device)
        elif name == "quant_out":
            filled = torch.full(shape, 0x5A, dtype=torch.uint8, device=device)
            made[name] = filled.view(torch.float8_e4m3fn)
        else:
            made[name] = torch.full(shape, 77.0, dtype=case.dtype, device=device)
    return made


def _scale_out(case: Case, device: torch.device) -> torch.Tensor:
    if case.quantization is Quantization.DYNAMIC_FP8:
        return torch.full((case.tokens, 1), 77.0, device=device)
    if case.quantization is Quantization.GROUP_FP8:
        groups = case.hidden // case.group_size
        words = torch.full((packed_scale_storage(case.tokens, groups),), 0x5A5A5A5A, dtype=torch.int32, device=device)
        return words.as_strided(packed_scale_shape(case.tokens, groups), packed_scale_stride(case.tokens))
    size = scale_size(case.tokens, case.hidden // NVFP4_BLOCK, case.layout)
    return torch.full((size,), 0x5A, dtype=torch.uint8, device=device)


def arguments(case: Case, operands: Operands, device: torch.device) -> dict[str, Any]:
    """Return the arguments of a call besides the operand, the workspace, the pattern and the outputs."""
    given: dict[str, Any] = {"use_oneshot": case.use_oneshot}
    if case.spec.has_norm:
        given |= {
            "residual_in": operands.residual.to(device),
            "rms_gamma": operands.gamma.to(device),
            "rms_eps": case.eps,
            "weight_bias": case.weight_bias,
        }
    if case.quantization in (Quantization.FP8, Quantization.NVFP4):
        factor = case.scale_factor
        given["scale_factor"] = torch.tensor([factor], device=device) if case.scale_on_device else factor
    if case.quantization is Quantization.NVFP4:
        given["layout_code"] = case.layout
    if case.quantization is Quantization.GROUP_FP8:
        given["block_quant_group_size"] = case.group_size
    return given


def raw(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's elements on the CPU, in the order of its indices."""
    return x.detach().cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_right(case: Case, operands: Operands, made: dict[str, torch.Tensor]) -> None:
    """Compare what a call has written with the reference.

    Raises:
        AssertionError: it names the output, and the first place that is wrong.
    """
    got = {name: x.detach().cpu() for name, x in made.items()}
    reduced = reference.reduce_in_rank_order(operands.parts)
    total = reduced.to(case.dtype)
    if "output" in got:
        _same_values(got["output"], total, "output")
    if not case.spec.has_norm:
        return
    residual = (total.to(torch.float32) + operands.residual.to(torch.float32)).to(case.dtype)
    if "residual_out" in got:
        _same_values(got["residual_out"], residual, "residual_out")
    norm = got.get("norm_out")
    if norm is None:
        return
    _assert_norm(case, operands, norm, residual)
    quant_out, scale_out = reference.quantize(
        norm,
        case.quantization,
        scale_factor=torch.tensor(case.scale_factor),
        layout=case.layout,
        block_quant_group_size=case.group_size,
    )
    for name, want in (("quant_out", quant_out), ("scale_out", scale_out)):
        if want is not None and name in got:
            have, expected = raw(got[name]), raw(want)
            assert have.numel() == expected.numel(), f"{name}: {have.numel()} bytes, expected {expected.numel()}"
            wrong = (have != expected).nonzero()
            assert not wrong.numel(), (
                f"{name}: {wrong.numel()} bytes are not the encoding of norm_out, the first at {int(wrong[0])}: "
                f"{int(have[wrong[0]]):#x}, expected {int(expected[wrong[0]]):#x}"
            )


def _place(index: torch.Tensor) -> tuple[int, ...]:
    return tuple(map(int, index))


def _same_values(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """Equal bits, but for which NaN it is."""
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    same = (got.view(integers) == want.view(integers)) | (got.isnan() & want.isnan())
    wrong = (~same).nonzero()
    assert not wrong.numel(), (
        f"{name}: {len(wrong)} of {got.numel()} values are wrong, the first at {_place(wrong[0])}: "
        f"{float(got[tuple(wrong[0])])!r}, expected {float(want[tuple(wrong[0])])!r}"
    )


def _assert_norm(case: Case, operands: Operands, norm: torch.Tensor, residual: torch.Tensor) -> None:
    """Within the rounding of the root, and of the product to the element type."""
    want = reference.rms_norm(residual, operands.gamma, case.eps, case.weight_bias)
    special = ~want.isfinite()
    kinds = (norm.isnan() == want.isnan()) & ((norm == want) | ~special | want.isnan())
    assert bool(kinds.all()), (
        f"norm_out: NaN or infinity at other places, the first at {_place((~kinds).nonzero()[0])}"
    )
    exact = want.to(torch.float64)
    steps = exact.abs() * (2.0 ** -_MANTISSA[case.dtype] + _ROOT_ULPS * 2.0**-24)
    # The smallest subnormal of the type: below it nothing can be told apart.
    least = torch.finfo(case.dtype).smallest_normal * 2.0 ** -_MANTISSA[case.dtype]
    wrong = ((norm.to(torch.float64) - exact).abs() > steps + least) & ~special
    assert not bool(wrong.any()), (
        f"norm_out: {int(wrong.sum())} values are off, the first at {_place(wrong.nonzero()[0])}: "
        f"{float(norm[tuple(wrong.nonzero()[0])])!r}, expected {float(want[tuple(wrong.nonzero()[0])])!r}"
    )
