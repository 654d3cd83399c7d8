"""Calls of kinds that were found good before: what makes the second one of a kind cheap.

As `comm_core.ulysses.geometries` does it: what depends on sizes, dtypes and codes alone is proven once, by the checks
of `comm_core.allreduce.arguments` and of the workspace, and kept under what it depends on. Whatever can differ
between two calls of one kind is looked at each time, by `KnownCall.admit`. It can only say yes: where anything is not
as expected, the full checks decide and word the error.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple, cast

import torch

from comm_core._dtypes import dtype_name
from comm_core.allreduce.backend import FusionCall
from comm_core.allreduce.launch import VECTOR_BYTES, Launch, Settings, Shape
from comm_core.allreduce.module import NO_EPILOGUE, Epilogue
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, QuantizationSFLayout
from comm_core.ulysses.validation import byte_range

__all__ = ["Admitted", "Given", "KnownCall", "key_of"]

_INFINITY = math.inf
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter
_new_tuple = cast("Any", tuple).__new__
"""Makes a named tuple without the function in between, which takes longer than making it."""


class Given(NamedTuple):
    """What a call of `allreduce_fusion` was given, of all that patterns with kernels read. Nothing was checked."""

    pattern: Any
    input: Any
    residual_in: Any
    rms_gamma: Any
    output: Any
    residual_out: Any
    norm_out: Any
    quant_out: Any
    scale_out: Any
    rms_eps: Any
    weight_bias: Any
    scale_factor: Any
    layout_code: Any
    block_quant_group_size: Any
    use_oneshot: Any
    fp32_acc: Any
    launch_with_pdl: Any
    trigger_completion_at_end: Any


def key_of(given: Given) -> Hashable | None:
    """Return what a kind of calls is kept under, or None for a call of no kind.

    It holds all that the full checks read and `KnownCall.admit` does not look at. Types count: True is no 1.
    """
    pattern, x, layout, group = given.pattern, given.input, given.layout_code, given.block_quant_group_size
    oneshot = given.use_oneshot
    if (
        (type(pattern) is not AllReduceFusionPattern and type(pattern) is not int)
        or type(x) is not _Tensor
        or (layout is not None and type(layout) is not QuantizationSFLayout and type(layout) is not int)
        or (group is not None and type(group) is not int)
        or (oneshot is not None and oneshot is not True and oneshot is not False)
    ):
        return None
    return (
        int(pattern), x.shape, x.dtype, given.output is None, given.residual_out is None, given.norm_out is None,
        given.quant_out is None, given.scale_out is None, None if layout is None else int(layout), group, oneshot,
    )  # fmt: skip


class _Expected(NamedTuple):
    """A tensor of a kind of calls.

    Attributes:
        field: of `Given`.
        is_output: whether the call writes it.
        shape: its shape.
        dtype: its element type.
        itemsize: bytes of an element.
        strides: None is contiguous.
        nbytes: from its first byte to one past its last.
        mask: bits of its address that are 0.
        aliases: of an output, whether it may be exactly the input or the residual; of an input, whether it may be.
    """

    field: int
    is_output: bool
    shape: torch.Size
    dtype: torch.dtype
    itemsize: int
    strides: tuple[int, ...] | None
    nbytes: int
    mask: int
    aliases: bool


class Admitted(NamedTuple):
    """The addresses of a call, and what differs from call to call."""

    source: int
    output: int
    epilogue: Epilogue
    early: bool
    lead: bool
    result: torch.Tensor


_FIELDS = {name: number for number, name in enumerate(Given._fields)}
_INPUTS = ("input", "residual_in", "rms_gamma")
_OUTPUTS = ("output", "residual_out", "norm_out", "quant_out", "scale_out")
_SCALE = _FIELDS["scale_factor"]
_COUNT = len(_FIELDS)


def _expected(call: FusionCall, name: str) -> _Expected:
    value: torch.Tensor = getattr(call, name)
    start, end = byte_range(value)
    scales = name == "scale_out"
    return _Expected(
        _FIELDS[name],
        name in _OUTPUTS,
        value.shape,
        value.dtype,
        value.dtype.itemsize,
        value.stride() if scales else None,
        end - start,
        3 if scales else VECTOR_BYTES - 1,
        name in ("input", "residual_in", "output", "residual_out", "norm_out"),
    )


class KnownCall:
    """A kind of calls that was found good.

    Args:
        call: one of the kind, which was found good and was made.
        given: what it was given.
        shape: of its operand.
        launch: of its kernel.
        epilogue: what follows its sum.
        settings: that the launch follows from.
    """

    def __init__(
        self, call: FusionCall, given: Given, shape: Shape, launch: Launch, epilogue: Epilogue, settings: Settings
    ) -> None:
        spec = PATTERNS[call.pattern]
        self.shape, self.launch, self.settings = shape, launch, settings
        self._has_norm = spec.has_norm
        self._device, self.dtype = call.input.device, dtype_name(call.dtype)
        # Inputs first: outputs are compared with what comes before them.
        names = [name for name in (*_INPUTS, *_OUTPUTS) if getattr(call, name) is not None]
        self._expected = [_expected(call, name) for name in names]
        self._made: _Expected | None = None
        self._primary = _FIELDS[spec.primary]
        if given[self._primary] is None:
            self._made = next(item for item in self._expected if item.field == self._primary)
            self._expected.remove(self._made)
        self._scales = call.scale_factor is not None
        self._end = epilogue[_FIXED:]

    def admit(self, given: Given) -> Admitted | None:
        """Return a call of this kind if it is sure to pass every check that its key does not stand for, else None.

        These are: plain tensors of the right kind, on the right device and aligned, whose bytes are theirs and exist;
        outputs that share bytes with nothing, or are exactly what they may be; numbers and flags.

        Args:
            given: of this kind; nothing of it was checked.
        """
        _, _, _, _, _, _, _, _, _, eps, bias, scale, _, _, _, fp32, early, at_end = given
        if (
            type(early) is not bool
            or type(at_end) is not bool
            or type(fp32) is not bool
            or type(eps) is not float
            or not 0.0 <= eps < _INFINITY
        ):
            return None
        if bias is None:
            bias = 0.0
        elif type(bias) is not float or not -_INFINITY < bias < _INFINITY:
            return None
        at = [0] * _COUNT
        taken: list[tuple[int, int, bool]] = []
        value = 0.0
        if self._scales:
            if type(scale) is float:
                if not 0.0 < scale < _INFINITY:
                    return None
                value = scale
            else:
                address = at[_SCALE] = self._scale_address(scale)
                if not address:
                    return None
                taken.append((address, address + 4, False))
        device = self._device
        # In one loop, without a function for each: this is most of what a call costs.
        for field, is_output, shape, dtype, itemsize, strides, nbytes, mask, aliases in self._expected:
            x = given[field]
            if (
                (type(x) is not _Tensor and type(x) is not _Parameter)
                or x.dtype is not dtype
                or x.shape != shape
                or x.device != device
                or not (x.is_contiguous() if strides is None else x.stride() == strides)
                or x.is_neg()
            ):
                return None
            address = at[field] = x.data_ptr()
            # Where the memory was given back, what is left of the address is the offset.
            if address & mask or address == x.storage_offset() * itemsize:
                return None
            end = address + nbytes
            if is_output:
                for start, other_end, other_aliases in taken:
                    if start < end and address < other_end and not (aliases and other_aliases and start == address):
                        return None
                # Whatever an output is, no other output may share bytes with it.
                aliases = False
            taken.append((address, end, aliases))
        made = self._made
        if made is None:
            result = given[self._primary]
        else:
            result = torch.empty(made.shape, dtype=made.dtype, device=self._device)
            address = at[made.field] = result.data_ptr()
            if address & made.mask:
                return None
        _, source, residual, gamma, output, residual_out, norm_out, quant_out, scale_out, *_ = at
        epilogue = NO_EPILOGUE
        if self._has_norm:
            epilogue = _new_tuple(
                Epilogue,
                (
                    residual,
                    residual_out,
                    gamma,
                    norm_out,
                    quant_out,
                    scale_out,
                    at[_SCALE],
                    value,
                    eps,
                    bias,
                    *self._end,
                ),
            )
        return Admitted(source, output, epilogue, early, early and not at_end, result)

    def _scale_address(self, x: Any) -> int:
        if (
            (type(x) is _Tensor or type(x) is _Parameter)
            and x.dtype is torch.float32
            and x.device == self._device
            and x.numel() == 1
            and not x.is_neg()
        ):
            address: int = x.data_ptr()
            if address != x.storage_offset() * 4:
                return address
        return 0


_FIXED = Epilogue._fields.index("encoding")
"""The fields of an epilogue before this one differ from call to call."""
