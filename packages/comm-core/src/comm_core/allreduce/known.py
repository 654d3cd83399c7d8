"""Calls of kinds that were found good before: what makes the second one of a kind cheap.

As `comm_core.ulysses.geometries` does it: what depends on sizes, dtypes and codes alone is proven once, by the checks
of `comm_core.allreduce.arguments` and of the workspace, and kept under what it depends on. Whatever can differ
between two calls of one kind is looked at each time, by `KnownKind.admit`.

A model's layers come back with the same storage, too. What follows from where all tensors are, beside the kind, is
kept under their addresses: that no two share bytes, and what the kernel is launched with. `KnownCalls.find` looks at
each tensor's type, dtype, shape, strides and device, and at every number and flag.

Both can only say yes: where anything is not as expected, the full checks decide and word the error.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch

from comm_core.allreduce.backend import FusionCall
from comm_core.allreduce.launch import VECTOR_BYTES, Settings
from comm_core.allreduce.module import PLACES, ReduceCall
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, QuantizationSFLayout
from comm_core.ulysses.geometries import Geometries
from comm_core.ulysses.validation import byte_range

__all__ = ["STORAGES", "Given", "KnownCall", "KnownCalls", "KnownKind", "key_of"]

STORAGES = 1024
"""Sets of storage that a workspace remembers; a model's layers use two each. Each takes less than 4 KB."""
_INFINITY = math.inf
_Tensor, _Parameter = torch.Tensor, torch.nn.Parameter


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

    It holds all that the full checks read and `KnownKind.admit` does not look at. Types count: True is no 1.
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
        place: of its address in the fields of a launch.
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
    place: int
    is_output: bool
    shape: torch.Size
    dtype: torch.dtype
    itemsize: int
    strides: tuple[int, ...] | None
    nbytes: int
    mask: int
    aliases: bool


_Seen = tuple[int, torch.dtype, torch.Size, tuple[int, ...] | None]
"""Of a tensor, what `KnownCalls.find` looks at besides address, type and device: field of `Given`, dtype, shape,
strides or None for contiguous (which costs less to ask)."""

_FIELDS = {name: number for number, name in enumerate(Given._fields)}
_INPUTS = ("input", "residual_in", "rms_gamma")
_OUTPUTS = ("output", "residual_out", "norm_out", "quant_out", "scale_out")
_INPUT, _SCALE = _FIELDS["input"], _FIELDS["scale_factor"]
_EARLY, _LEAD = PLACES["early"], PLACES["lead"]
_EPS, _BIAS, _VALUE, _SCALE_AT = (PLACES[name] for name in ("eps", "weight_bias", "scale_value", "scale"))


def _expected(call: FusionCall, name: str) -> _Expected:
    value: torch.Tensor = getattr(call, name)
    start, end = byte_range(value)
    scales = name == "scale_out"
    return _Expected(
        _FIELDS[name],
        PLACES["gamma" if name == "rms_gamma" else name],
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
    """A call whose storage was found good; `KnownKind.admit` makes it.

    It keeps addresses and numbers, and no tensor.

    Args:
        kind: that it is of.
        given: what it was given.
        seen: of each tensor but the input, what is looked at again.
        scale_at: address of the scale; 0 where it is a number, None where it is not read.
        fields: of its launch, behind the stream and the session.
    """

    __slots__ = (
        "_context", "_fields", "_kind", "_packed", "_scale", "_scale_at", "at_end", "bias", "dtype", "early",
        "eps", "fp32", "group", "layout", "oneshot", "ordinal", "pattern", "seen", "settings",
    )  # fmt: skip

    def __init__(
        self,
        kind: KnownKind,
        given: Given,
        seen: tuple[_Seen, ...],
        scale_at: int | None,
        fields: list[int | float],
    ) -> None:
        self._kind = kind
        self.settings, self.dtype, self.ordinal = kind.settings, kind.dtype, kind.ordinal
        self.seen = seen
        (
            self.pattern, _, _, _, _, _, _, _, _, self.eps, self.bias, scale, self.layout, self.group, self.oneshot,
            self.fp32, self.early, self.at_end,
        ) = given  # fmt: skip
        self._scale = scale if scale_at == 0 else None
        self._scale_at = scale_at
        self._fields = fields
        self._context: tuple[int, int] | None = None
        self._packed = b""

    def has_scale(self, scale: Any) -> bool:
        """Return whether a scale is this call's number, or lies where its scale does. No tensor may raise."""
        at = self._scale_at
        if at is None:
            return True
        if at:
            return scale.data_ptr() == at
        return scale is self._scale or (type(scale) is float and scale == self._scale)

    def result(self, given: Given) -> torch.Tensor | None:
        """Return what the call returns, allocated where it was not given; None: it has no address of the kind's."""
        made = self._kind.made
        if made is None:
            given_result: torch.Tensor = given[self._kind.primary]
            return given_result
        result = torch.empty(made.shape, dtype=made.dtype, device=self._kind.device)
        address = result.data_ptr()
        if not address or address & made.mask:
            return None
        if self._fields[made.place] != address:
            self._fields[made.place] = address
            self._context = None
        return result

    def launch(self, entry: ReduceCall, context: tuple[int, int]) -> None:
        """Launch it.

        Args:
            entry: of the session.
            context: stream, and host address of the packed session.
        """
        if context != self._context:
            # The first time, on another stream, after the session has moved its struct, or for another result.
            self._packed = entry.pack(*context, *self._fields)
            self._context = context
        entry.run(self._packed)


class KnownKind:
    """A kind of calls that was found good.

    Args:
        call: one of the kind, which was found good and was made.
        given: what it was given.
        fields: `ReduceCall.fields` of its launch.
        settings: that the launch follows from.
    """

    def __init__(self, call: FusionCall, given: Given, fields: tuple[int | float, ...], settings: Settings) -> None:
        spec = PATTERNS[call.pattern]
        self.settings = settings
        self.device = call.input.device
        self._fields = list(fields)
        self._has_norm = spec.has_norm
        # Inputs first: outputs are compared with what comes before them.
        names = [name for name in (*_INPUTS, *_OUTPUTS) if getattr(call, name) is not None]
        self._expected = [_expected(call, name) for name in names]
        self.made: _Expected | None = None
        self.primary = _FIELDS[spec.primary]
        if given[self.primary] is None:
            self.made = next(item for item in self._expected if item.field == self.primary)
            self._expected.remove(self.made)
        self._scales = call.scale_factor is not None
        self.dtype, self.ordinal = call.dtype, call.input.get_device()
        self._seen: tuple[_Seen, ...] = tuple(
            (item.field, item.dtype, item.shape, item.strides) for item in self._expected if item.field != _INPUT
        )

    def admit(self, given: Given) -> KnownCall | None:
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
        fields = self._fields.copy()
        taken: list[tuple[int, int, bool]] = []
        value, scale_at, seen = 0.0, None, self._seen
        device = self.device
        if self._scales:
            scale_at = 0
            if type(scale) is float:
                if not 0.0 < scale < _INFINITY:
                    return None
                value = scale
            else:
                scale_at = self._scale_address(scale)
                if not scale_at:
                    return None
                taken.append((scale_at, scale_at + 4, False))
                seen = (*seen, (_SCALE, torch.float32, scale.shape, None))
        # In one loop, without a function for each: this is most of what a call costs.
        for field, place, is_output, shape, dtype, itemsize, strides, nbytes, mask, aliases in self._expected:
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
            address = fields[place] = x.data_ptr()
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
        fields[_EARLY], fields[_LEAD] = early, early and not at_end
        if self._has_norm:
            fields[_SCALE_AT], fields[_VALUE], fields[_EPS], fields[_BIAS] = scale_at or 0, value, eps, bias
        return KnownCall(self, given, seen, scale_at, fields)

    def _scale_address(self, x: Any) -> int:
        if (
            (type(x) is _Tensor or type(x) is _Parameter)
            and x.dtype is torch.float32
            and x.device == self.device
            and x.numel() == 1
            and not x.is_neg()
        ):
            address: int = x.data_ptr()
            if address != x.storage_offset() * 4:
                return address
        return 0


class KnownCalls:
    """The calls of one workspace that were found good: the last kinds, and the last `STORAGES` sets of storage.

    Where the addresses are those of a call that was found good, and dtypes, shapes and strides too, the same bytes
    are shared as were then, and what was aligned is. Memory that was given back has no such address. Used by one
    thread at a time.
    """

    def __init__(self) -> None:
        self.kinds = Geometries[KnownKind]()
        self._calls: OrderedDict[Hashable, KnownCall] = OrderedDict()

    def __len__(self) -> int:
        """Return how many sets of storage are kept."""
        return len(self._calls)

    def find(self, given: Given, settings: Settings) -> KnownCall | None:
        """Return the call if it is sure to pass every check, else None.

        Args:
            given: nothing of it was checked.
            settings: of the session.
        """
        (
            pattern, x, residual, gamma, output, residual_out, norm_out, quant_out, scale_out, eps, bias, scale,
            layout, group, oneshot, fp32, early, at_end,
        ) = given  # fmt: skip
        if type(x) is not _Tensor:
            return None
        try:
            # None is no address: an argument that is left out is another one than a tensor without memory.
            key = (
                x.shape,
                x.data_ptr(),
                None if residual is None else residual.data_ptr(),
                None if gamma is None else gamma.data_ptr(),
                None if output is None else output.data_ptr(),
                None if residual_out is None else residual_out.data_ptr(),
                None if norm_out is None else norm_out.data_ptr(),
                None if quant_out is None else quant_out.data_ptr(),
                None if scale_out is None else scale_out.data_ptr(),
            )
            known = self._calls.get(key)
            if (
                known is not None
                and known.settings is settings
                # The very objects, as a model passes them; else, of numbers, equal ones (0.0 is equal to -0.0).
                and pattern is known.pattern
                and (eps is known.eps or (type(eps) is float and eps == known.eps != 0.0))
                and (bias is known.bias or (type(bias) is float and bias == known.bias != 0.0))
                and layout is known.layout
                and group is known.group
                and oneshot is known.oneshot
                and fp32 is known.fp32
                and early is known.early
                and at_end is known.at_end
                and known.has_scale(scale)
                and x.dtype is known.dtype
                and x.is_contiguous()
                and x.get_device() == known.ordinal
                and not x.is_neg()
            ):
                # In a loop without a function for each: this is most of what a call costs.
                ordinal = known.ordinal
                for field, dtype, shape, strides in known.seen:
                    other = given[field]
                    if (
                        (type(other) is not _Tensor and type(other) is not _Parameter)
                        or other.dtype is not dtype
                        or other.shape != shape
                        or not (other.is_contiguous() if strides is None else other.stride() == strides)
                        or other.get_device() != ordinal
                        or other.is_neg()
                    ):
                        break
                else:
                    self._calls.move_to_end(key)
                    return known
            kind_key = key_of(given)
            kind = None if kind_key is None else self.kinds.find(kind_key)
            if kind is None or kind.settings is not settings:
                return None
            known = kind.admit(given)
        except Exception:
            return None  # a tensor that can't be asked such things; the checks say why
        if known is not None:
            self._calls[key] = known
            self._calls.move_to_end(key)
            if len(self._calls) > STORAGES:
                self._calls.popitem(last=False)
        return known

    def keep(self, given: Given, kind: Callable[[], KnownKind]) -> None:
        """Keep the kind of a call that was found good and made, where it is of one.

        Args:
            given: what it was given.
            kind: makes it.
        """
        key = key_of(given)
        if key is not None:
            self.kinds.keep(key, kind())
