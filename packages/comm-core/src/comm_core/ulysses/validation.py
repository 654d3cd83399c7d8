"""What a call may be given: every check that needs only this rank's own arguments.

All of it happens before any communication, so a rejected call leaves the communicator as it was. (The other ranks
don't know of it: ``COMM_CHECK=1`` makes a rejection joint.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_core._dtypes import check_dtype, dtype_name
from comm_core.errors import ArgumentTypeError, ArgumentValueError

__all__ = [
    "MAX_BYTES",
    "MAX_ELEMS",
    "Limits",
    "Shape",
    "byte_range",
    "check_band",
    "check_capacity",
    "check_disjoint",
    "check_operand",
    "check_out",
    "check_strided",
    "has_memory",
    "positive_int",
    "strides_of",
]

MAX_ELEMS = 2**31 - 1
"""Elements of one operand: kernels index with 32 bits."""
MAX_BYTES = MAX_ELEMS * 4
"""Largest capacity that can be asked for."""

Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class Limits:
    """What a communicator accepts."""

    device: torch.device
    dtype: torch.dtype
    max_bytes: int

    def element(self, dtype: object) -> torch.dtype:
        """Return the element type of a call: the call's own, else the communicator's."""
        return self.dtype if dtype is None else check_dtype(dtype)


def positive_int(value: object, name: str, maximum: int | None = None) -> int:
    """Return `value` if it is an int (not a bool) of at least 1."""
    if type(value) is not int:
        raise ArgumentTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < 1 or (maximum is not None and value > maximum):
        limit = "" if maximum is None else f" and at most {maximum}"
        raise ArgumentValueError(f"{name} must be at least 1{limit}, got {value}")
    return value


def count(value: object, name: str, maximum: int) -> int:
    """Return `value` if it is an int (not a bool) from 0 to `maximum`."""
    if type(value) is not int:
        raise ArgumentTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if not 0 <= value <= maximum:
        raise ArgumentValueError(f"{name} must be from 0 to {maximum}, got {value}")
    return value


def _tensor(x: object, name: str) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    return x


def _common(x: object, name: str, limits: Limits, dtype: torch.dtype) -> torch.Tensor:
    tensor = _tensor(x, name)
    if tensor.layout != torch.strided or tensor.is_nested:
        raise ArgumentValueError(
            f"{name} must be a dense (strided) tensor, got layout {tensor.layout}"
            + (", nested" if tensor.is_nested else "")
        )
    if tensor.is_neg() or tensor.is_conj():
        raise ArgumentValueError(
            f"{name} is a view that torch negates or conjugates only when it is read, and bytes are moved as they "
            "lie: call .resolve_neg() or .resolve_conj()"
        )
    if tensor.dtype != dtype:
        raise ArgumentValueError(
            f"{name} must have dtype {dtype_name(dtype)}, got {dtype_name(tensor.dtype)} (pass dtype= to override)"
        )
    if tensor.device != limits.device:
        raise ArgumentValueError(f"{name} must be on {limits.device}, the communicator's device, got {tensor.device}")
    if tensor.ndim != 4:
        raise ArgumentValueError(f"{name} must have 4 dimensions, got shape {tuple(tensor.shape)}")
    if min(tensor.shape) < 1:
        raise ArgumentValueError(f"every dimension of {name} must be positive, got shape {tuple(tensor.shape)}")
    if not has_memory(tensor):
        raise ArgumentValueError(
            f"{name} has no memory of its own ({type(tensor).__name__}): pass a plain tensor, of a DTensor "
            ".to_local()"
        )
    return tensor


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether there are bytes behind `tensor`: wrapper subclasses, zero tensors and fake ones have none."""
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def check_capacity(shape: Sequence[int], dtype: torch.dtype, max_bytes: int, name: str) -> None:
    """Check that an operand of `shape` fits the communicator."""
    numel = 1
    for size in shape:
        numel *= size
    if numel > MAX_ELEMS:
        raise ArgumentValueError(f"{name} of shape {tuple(shape)} has {numel} elements; at most {MAX_ELEMS} can be")
    nbytes = numel * dtype.itemsize
    if nbytes > max_bytes:
        raise ArgumentValueError(
            f"{name} of shape {tuple(shape)} and {dtype_name(dtype)} has {nbytes} bytes, the communicator was made "
            f"for max_bytes={max_bytes}"
        )


def _shape(x: torch.Tensor) -> Shape:
    a, b, c, d = x.shape
    return a, b, c, d


def check_operand(x: object, name: str, limits: Limits, dtype: torch.dtype) -> Shape:
    """Check a contiguous 4-D operand and return its shape."""
    tensor = _common(x, name, limits, dtype)
    if not tensor.is_contiguous():
        raise ArgumentValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides {tensor.stride()}; call "
            ".contiguous(), or use the head-chunk calls, which take strided views"
        )
    check_capacity(tensor.shape, dtype, limits.max_bytes, name)
    return _shape(tensor)


def check_strided(x: object, name: str, limits: Limits, dtype: torch.dtype) -> Shape:
    """Check a 4-D operand that may be a view with any positive strides, and return its shape."""
    tensor = _common(x, name, limits, dtype)
    strides = strides_of(tensor)
    if min(strides) < 1:
        raise ArgumentValueError(
            f"{name} must have positive strides, got {tensor.stride()} (an expanded dimension repeats elements)"
        )
    if tensor.numel() > MAX_ELEMS:
        raise ArgumentValueError(f"{name} has {tensor.numel()} elements; at most {MAX_ELEMS} can be")
    return _shape(tensor)


def strides_of(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return the strides in elements, with those of dimensions of size 1, which mean nothing, set as if packed."""
    strides: list[int] = []
    packed = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        strides.append(packed if size == 1 else stride)
        packed *= size
    d, c, b, a = strides
    return a, b, c, d


def check_band(head_offset: object, head_count: object, local_heads: int) -> tuple[int, int]:
    """Check a band of heads within the heads of one rank."""
    if type(head_offset) is not int:
        raise ArgumentTypeError(f"head_offset must be an int, got {type(head_offset).__name__} {head_offset!r}")
    count = positive_int(head_count, "head_count")
    if head_offset < 0 or head_offset + count > local_heads:
        raise ArgumentValueError(
            f"the band head_offset={head_offset}, head_count={count} must lie in the {local_heads} heads of a rank"
        )
    return head_offset, count


def check_out(out: object, shape: Sequence[int], limits: Limits, dtype: torch.dtype) -> torch.Tensor:
    """Check an output: exact shape, dtype and device, contiguous."""
    tensor = _common(out, "out", limits, dtype)
    if tuple(tensor.shape) != tuple(shape):
        raise ArgumentValueError(f"out must have shape {tuple(shape)}, got {tuple(tensor.shape)}")
    if not tensor.is_contiguous():
        raise ArgumentValueError(f"out must be contiguous, got strides {tensor.stride()} for shape {tuple(shape)}")
    return tensor


def byte_range(x: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of `x` and of one past its last."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def check_disjoint(x: torch.Tensor, name: str, other: torch.Tensor, other_name: str) -> None:
    """Refuse tensors that share bytes: one would be overwritten while the other is read."""
    if x.device != other.device:
        return
    start, end = byte_range(x)
    other_start, other_end = byte_range(other)
    if start < other_end and other_start < end:
        raise ArgumentValueError(
            f"{name} must not overlap {other_name}: they share bytes [{max(start, other_start):#x}, "
            f"{min(end, other_end):#x})"
        )
