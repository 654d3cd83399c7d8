"""What `allreduce_fusion` may be given: every check that needs only this rank's own arguments.

All of it happens before any communication, so a rejected call leaves the workspace as it was. (The other ranks don't
know of it: ``COMM_CHECK=1`` makes a rejection joint.) Each error begins with the name of the argument or names it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from comm_core._dtypes import dtype_name
from comm_core.allreduce.backend import FusionCall, MoEFinalize, MoEReduction
from comm_core.allreduce.patterns import (
    ARGUMENTS,
    OUTPUTS,
    PatternSpec,
    Quantization,
    QuantizationSFLayout,
    check_arguments,
    check_layout,
    check_pattern,
)
from comm_core.allreduce.quant import NVFP4_BLOCK
from comm_core.allreduce.reference import DTYPES
from comm_core.allreduce.scales import packed_scale_shape, packed_scale_stride, scale_size
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_core.ulysses.validation import byte_range, count, positive_int

__all__ = ["check_dtype", "flag", "number", "prepare"]

_E4M3 = (torch.float8_e4m3fn,)
# Sub-byte values travel in bytes; torch's own type for two E2M1 values in a byte is newer than the oldest torch here.
_E2M1 = tuple(
    dtype for dtype in (torch.uint8, getattr(torch, "float4_e2m1fn_x2", None)) if isinstance(dtype, torch.dtype)
)


def check_dtype(dtype: object, name: str) -> torch.dtype:
    """Return `dtype` if its elements can be reduced.

    Raises:
        ArgumentTypeError: it is no torch dtype.
        ArgumentValueError: another one.
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"{name} must be a torch.dtype, got {type(dtype).__name__} {dtype!r}")
    if dtype not in DTYPES:
        raise ArgumentValueError(f"{name} must be one of {_names(DTYPES)}, got {dtype_name(dtype)}")
    return dtype


def flag(value: object, name: str) -> bool:
    """Return `value` if it is a bool."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be a bool, got {type(value).__name__} {value!r}")
    return value


def number(value: object, name: str, minimum: float = -math.inf) -> float:
    """Return `value` as a float if it is a finite number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentTypeError(f"{name} must be a number, got {type(value).__name__} {value!r}")
    if not math.isfinite(value) or value < minimum:
        limit = "" if minimum == -math.inf else f" of at least {minimum:g}"
        raise ArgumentValueError(f"{name} must be a finite number{limit}, got {value}")
    return float(value)


def prepare(device: torch.device, given: Mapping[str, object]) -> FusionCall:
    """Check the arguments of one call, allocate what the caller left to it, and return the call.

    Args:
        device: the workspace's.
        given: the arguments of `allreduce_fusion` by name, but the workspace; None is one that was left out.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: an argument is missing, can't be used or does not fit the others.
        UnsupportedError: what was asked for exists in no package.
    """
    spec = check_pattern(given["pattern"])
    finalize_backend = given["moe_finalize_backend"]
    if finalize_backend != "trtllm":
        raise UnsupportedError(
            "moe_finalize_backend must be 'trtllm', the workspace's own finalize: no package has another one, got "
            f"{finalize_backend!r}"
        )
    check_arguments(spec, [name for name in (*ARGUMENTS, *OUTPUTS) if given.get(name) is not None])
    flag(given["fp32_acc"], "fp32_acc")
    return _Preparation(spec, device, given).call()


class _Preparation:
    """The checks of one call; the reduced operand decides on tokens, hidden size and element type."""

    def __init__(self, spec: PatternSpec, device: torch.device, given: Mapping[str, object]) -> None:
        self.spec = spec
        self.device = device
        self.given = given
        # What is in these rows can be an output as well: each row is read before it is written, and by itself.
        self.in_place: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        leading = "residual_in" if spec.is_moe else "input"
        first = self._plain(leading)
        check_dtype(first.dtype, leading)
        if first.ndim != 2 or min(first.shape) < 1:
            raise ArgumentValueError(
                f"{leading} must have shape [tokens, hidden_dim] with at least one of each, got {tuple(first.shape)}"
            )
        self.tokens, self.hidden = (int(size) for size in first.shape)
        self.dtype = first.dtype

    def call(self) -> FusionCall:
        """Check the rest and return the call."""
        spec, given, rows = self.spec, self.given, (self.tokens, self.hidden)
        reduction, finalize = self._reduction(), self._finalize()
        source = self._source(reduction, finalize)
        residual_in = rms_gamma = None
        if spec.has_norm:
            residual_in = self.in_place["residual_in"] = self._operand("residual_in", rows)
            rms_gamma = self._operand("rms_gamma", (self.hidden,))
        quantization = self._quantization()
        layout = QuantizationSFLayout.SWIZZLED_128x4
        if quantization is Quantization.NVFP4:
            layout = check_layout(given["layout_code"])
        group_size = self._group_size(quantization)
        scale_factor = self._scale_factor(quantization)
        outputs = self._outputs(quantization, layout, group_size)
        self._check_overlap(outputs)
        oneshot = given["use_oneshot"]
        return FusionCall(
            pattern=spec.pattern,
            tokens=self.tokens,
            hidden=self.hidden,
            input=source,
            output=outputs.get("output"),
            residual_in=residual_in,
            residual_out=outputs.get("residual_out"),
            norm_out=outputs.get("norm_out"),
            quant_out=outputs.get("quant_out"),
            scale_out=outputs.get("scale_out"),
            rms_gamma=rms_gamma,
            rms_eps=number(given["rms_eps"], "rms_eps", 0.0),
            weight_bias=0.0 if given["weight_bias"] is None else number(given["weight_bias"], "weight_bias"),
            scale_factor=scale_factor,
            layout=layout,
            group_size=group_size,
            use_oneshot=None if oneshot is None else flag(oneshot, "use_oneshot"),
            launch_with_pdl=flag(given["launch_with_pdl"], "launch_with_pdl"),
            trigger_completion_at_end=flag(given["trigger_completion_at_end"], "trigger_completion_at_end"),
            reduction=reduction,
            finalize=finalize,
        )

    # Operands

    def _plain(self, name: str) -> torch.Tensor:
        """Return a tensor argument that has bytes of its own on the workspace's device."""
        value = self.given[name]
        if not isinstance(value, torch.Tensor):
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
        if value.layout != torch.strided or value.is_nested or value.is_neg() or value.is_conj():
            raise ArgumentValueError(
                f"{name} must be a dense tensor without lazy negation, got layout {value.layout}"
            )
        if value.device != self.device:
            raise ArgumentValueError(f"{name} must be on {self.device}, the workspace's device, got {value.device}")
        return value

    def _operand(
        self, name: str, shape: Sequence[int], dtypes: tuple[torch.dtype, ...] | None = None
    ) -> torch.Tensor:
        """Return a contiguous tensor argument of `shape`; no `dtypes` is the element type of the call."""
        value = self._plain(name)
        allowed = (self.dtype,) if dtypes is None else dtypes
        if value.dtype not in allowed:
            raise ArgumentValueError(
                f"{name} must have dtype {_names(allowed)} in this call, got {dtype_name(value.dtype)}"
            )
        if tuple(value.shape) != tuple(shape):
            raise ArgumentValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
        if not value.is_contiguous():
            raise ArgumentValueError(f"{name} must be contiguous, got strides {value.stride()}: call .contiguous()")
        if name not in OUTPUTS:
            self.inputs[name] = value
        return value

    def _source(self, reduction: MoEReduction | None, finalize: MoEFinalize | None) -> torch.Tensor:
        if reduction is not None:
            return reduction.token_input
        if finalize is None:
            source = self.in_place["input"] = self._operand("input", (self.tokens, self.hidden))
            return source
        value = self._plain("input")
        # Its rows are the experts', padded as they like, so only the width follows from the call.
        rows = int(value.shape[0]) if value.ndim == 2 else 0
        return self._operand("input", (max(rows, 1), self.hidden))

    def _reduction(self) -> MoEReduction | None:
        if "moe_reduction_token_input" not in self.spec.needs:
            return None
        name = "moe_reduction_device_num_experts"
        value = self.given[name]
        if isinstance(value, torch.Tensor):
            raise ArgumentTypeError(
                f"{name} must be an int, got a tensor: reading it would wait for the device; pass the number"
            )
        experts = count(value, name, 1 << 30)
        return MoEReduction(
            experts,
            self._operand("moe_reduction_scale_input", (experts, self.tokens), (torch.float32,)),
            self._operand("moe_reduction_active_experts_token_input", self._expert_rows(experts)),
            self._operand("moe_reduction_token_input", (self.tokens, self.hidden)),
        )

    def _expert_rows(self, experts: int) -> tuple[int, ...]:
        """Return the shape of the experts' outputs: as given with three dimensions, or else with two."""
        value = self._plain("moe_reduction_active_experts_token_input")
        three = (experts, self.tokens, self.hidden)
        return three if value.ndim == 3 else (experts * self.tokens, self.hidden)

    def _finalize(self) -> MoEFinalize | None:
        name = "expanded_idx_to_permuted_idx"
        if name not in self.spec.needs:
            return None
        value = self._plain(name)
        top_k = int(value.shape[1]) if value.ndim == 2 else 0
        rows = self._operand(name, (self.tokens, max(top_k, 1)), (torch.int32,))
        scales = shared = None
        if self.given["expert_scale_factor"] is not None:
            dtypes = tuple(dict.fromkeys((self.dtype, torch.float32)))
            scales = self._operand("expert_scale_factor", (self.tokens, top_k), dtypes)
        if self.given["shared_expert_output"] is not None:
            shared = self._operand("shared_expert_output", (self.tokens, self.hidden))
        return MoEFinalize(rows, scales, shared)

    # Quantization

    def _quantization(self) -> Quantization:
        """Return what this call quantizes to: patterns that may quantize do where the outputs are given."""
        wanted = "quant_out" in self.spec.returns or self.given["quant_out"] is not None
        quantization = self.spec.quantization if wanted else Quantization.NONE
        if quantization is Quantization.NVFP4:
            if self.dtype == torch.float32:
                raise ArgumentValueError(
                    f"input: {self.spec.pattern.name} quantizes float16 and bfloat16 to NVFP4, got float32"
                )
            if self.hidden % NVFP4_BLOCK:
                raise ArgumentValueError(
                    f"input: {self.spec.pattern.name} needs a hidden_dim that is a multiple of {NVFP4_BLOCK}, got "
                    f"{self.hidden}"
                )
        return quantization

    def _group_size(self, quantization: Quantization) -> int:
        if quantization is not Quantization.GROUP_FP8:
            return 0
        size = positive_int(self.given["block_quant_group_size"], "block_quant_group_size")
        if self.hidden % size:
            raise ArgumentValueError(f"block_quant_group_size must divide hidden_dim={self.hidden}, got {size}")
        return size

    def _scale_factor(self, quantization: Quantization) -> torch.Tensor | float | None:
        if quantization not in (Quantization.FP8, Quantization.NVFP4):
            return None
        value = self.given["scale_factor"]
        if value is None:
            raise ArgumentValueError(f"scale_factor is needed by {self.spec.pattern.name} to quantize, got None")
        if not isinstance(value, torch.Tensor):
            factor = number(value, "scale_factor")
            if factor <= 0:
                raise ArgumentValueError(f"scale_factor must be positive, got {factor:g}")
            return factor
        self._plain("scale_factor")
        if value.dtype != torch.float32 or value.numel() != 1:
            raise ArgumentValueError(
                f"scale_factor must be a number or one float32 element, got {dtype_name(value.dtype)} of shape "
                f"{tuple(value.shape)}"
            )
        self.inputs["scale_factor"] = value
        return value

    # Outputs

    def _outputs(
        self, quantization: Quantization, layout: QuantizationSFLayout, group_size: int
    ) -> dict[str, torch.Tensor]:
        """Return the call's outputs: the caller's own, and the one that the call returns where it is not given."""
        spec, given = self.spec, self.given
        rows = (self.tokens, self.hidden)
        packed = quantization is Quantization.NVFP4
        quant_shape = (self.tokens, self.hidden // 2) if packed else rows
        quant_dtypes = _E2M1 if packed else _E4M3
        # Nobody could get at these if the call allocated them: it returns one tensor.
        needed = {name for name in ("norm_out", "scale_out") if name in spec.returns and name != spec.primary}
        if quantization is Quantization.DYNAMIC_FP8:
            needed |= {"residual_out", "quant_out"}
        missing = [name for name in OUTPUTS if name in needed and given[name] is None]
        if missing:
            raise ArgumentValueError(
                f"{spec.pattern.name} (code {int(spec.pattern)}) writes {', '.join(missing)}, which must be given, "
                "got None"
            )
        outputs: dict[str, torch.Tensor] = {}
        for name in OUTPUTS:
            if given[name] is None:
                if name == spec.primary:
                    shape, dtype = (quant_shape, quant_dtypes[0]) if name == "quant_out" else (rows, self.dtype)
                    outputs[name] = torch.empty(shape, dtype=dtype, device=self.device)
            elif name == "quant_out":
                outputs[name] = self._operand(name, quant_shape, quant_dtypes)
            elif name == "scale_out":
                outputs[name] = self._scale_out(quantization, layout, group_size)
            else:
                outputs[name] = self._operand(name, rows)
        return outputs

    def _scale_out(self, quantization: Quantization, layout: QuantizationSFLayout, group_size: int) -> torch.Tensor:
        if quantization is Quantization.DYNAMIC_FP8:
            return self._operand("scale_out", (self.tokens, 1), (torch.float32,))
        value = self._plain("scale_out")
        if quantization is Quantization.GROUP_FP8:
            shape = packed_scale_shape(self.tokens, self.hidden // group_size)
            stride = packed_scale_stride(self.tokens)
            # The stride of a dimension of one element says nothing.
            fits = all(
                size == 1 or got == want for size, got, want in zip(shape, value.stride(), stride, strict=False)
            )
            if tuple(value.shape) != shape or not fits or value.dtype != torch.int32:
                raise ArgumentValueError(
                    f"scale_out must be int32 of shape {shape} and strides {stride} (columns of words, padded to "
                    f"four tokens each), got {dtype_name(value.dtype)} of shape {tuple(value.shape)} and strides "
                    f"{value.stride()}"
                )
            return value
        needed = scale_size(self.tokens, self.hidden // NVFP4_BLOCK, layout)
        nbytes = value.numel() * value.element_size()
        if not value.is_contiguous() or nbytes < needed:
            raise ArgumentValueError(
                f"scale_out must be contiguous and hold {needed} bytes in layout {layout.name} (any element type), "
                f"got {nbytes} bytes, strides {value.stride()}"
            )
        return value

    def _check_overlap(self, outputs: Mapping[str, torch.Tensor]) -> None:
        """Refuse outputs that share bytes with each other, or with an input that is not exactly the same tensor."""
        tensors = {**self.inputs, **outputs}
        ranges = {name: byte_range(value) if value.numel() else (0, 0) for name, value in tensors.items()}
        names = list(outputs)
        for position, name in enumerate(names):
            start, end = ranges[name]
            for other in (*names[position + 1 :], *self.inputs):
                other_start, other_end = ranges[other]
                if start >= other_end or other_start >= end:
                    continue
                same = self.in_place.get(other)
                if same is not None and other not in outputs and _same(outputs[name], same):
                    continue
                exact = " or ".join(self.in_place)
                raise ArgumentValueError(
                    f"{name} shares memory with {other}: outputs must not overlap each other or an input; one output "
                    f"may be exactly the tensor {exact}"
                )


def _same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.dtype == y.dtype


def _names(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(dtype_name(dtype) for dtype in dtypes)
