"""Element types that are moved as bytes: every plain torch dtype of 1, 2 or 4 bytes."""

from __future__ import annotations

import torch

from comm_core.errors import ArgumentTypeError, ArgumentValueError

__all__ = ["ITEMSIZES", "check_dtype", "dtype_name"]

ITEMSIZES = (1, 2, 4)
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for `torch.bfloat16`."""
    return str(dtype).removeprefix("torch.")


def check_dtype(dtype: object, name: str = "dtype") -> torch.dtype:
    """Return `dtype` if its elements can be moved.

    Raises:
        ArgumentTypeError: it is no torch dtype.
        ArgumentValueError: its elements have another size, or carry quantization parameters of their own.
    """
    if not isinstance(dtype, torch.dtype):
        raise ArgumentTypeError(f"{name} must be a torch.dtype, got {type(dtype).__name__} {dtype!r}")
    if dtype.itemsize not in ITEMSIZES or dtype in _QUANTIZED:
        raise ArgumentValueError(f"{name} must be a plain dtype of 1, 2 or 4 bytes an element, got {dtype}")
    return dtype
