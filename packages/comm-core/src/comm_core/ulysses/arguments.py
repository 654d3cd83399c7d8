"""What a communicator is constructed with: checked on this rank, and raised, where it is wrong, on all of them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Generator

import torch

from comm_core import _cuda
from comm_core._dtypes import check_dtype
from comm_core._json import Json
from comm_core.errors import ArgumentValueError
from comm_core.group import Group
from comm_core.ulysses.decision import default_device
from comm_core.ulysses.validation import MAX_BYTES, count, positive_int

__all__ = ["NVLINK_KERNELS", "Arguments"]

NVLINK_KERNELS = ("auto", "portable", "cake")
"""What `nvlink_kernel` may be."""
MAX_SMS = 1024
"""More than any GPU has."""
MAX_POOL_BYTES = 1 << 40


class Arguments:
    """A rank's constructor arguments, with what is wrong with them collected instead of raised."""

    def __init__(
        self,
        max_bytes: object,
        max_elems: object,
        dtype: object,
        nvlink_kernel: object,
        device: torch.device | str | int | None,
        max_sms: object,
        pool_bytes: object,
        group: Group,
    ) -> None:
        self.errors: list[Exception] = []
        self.dtype: torch.dtype = torch.uint8
        self.max_bytes = 0
        self.nvlink_kernel = "auto"
        self.max_sms: int | None = None
        self.pool_bytes = 0
        self.device = torch.device("cpu")
        with self._collect():
            self.dtype = check_dtype(dtype)
        with self._collect():
            self.max_bytes = self._capacity(max_bytes, max_elems)
        with self._collect():
            if type(nvlink_kernel) is not str or nvlink_kernel not in NVLINK_KERNELS:
                raise ArgumentValueError(f"nvlink_kernel must be one of {NVLINK_KERNELS}, got {nvlink_kernel!r}")
            self.nvlink_kernel = str(nvlink_kernel)
        with self._collect():
            self.max_sms = None if max_sms is None else count(max_sms, "max_sms", MAX_SMS)
        with self._collect():
            self.pool_bytes = count(pool_bytes, "pool_bytes", MAX_POOL_BYTES)
        with self._collect():
            self.device = default_device(group) if device is None else _cuda.normalize_device(device)

    @property
    def options(self) -> dict[str, Json]:
        """What belongs to single transports, as it is agreed by the ranks."""
        return {"nvlink_kernel": self.nvlink_kernel, "max_sms": self.max_sms, "pool_bytes": self.pool_bytes}

    @contextlib.contextmanager
    def _collect(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            # Whatever it is, a warning that was made an error included: the others wait for this rank's request.
            self.errors.append(error)

    def _capacity(self, max_bytes: object, max_elems: object) -> int:
        if (max_bytes is None) == (max_elems is None):
            raise ArgumentValueError("pass exactly one of max_bytes and max_elems (deprecated)")
        if max_elems is None:
            return positive_int(max_bytes, "max_bytes", MAX_BYTES)
        warnings.warn(
            "max_elems is deprecated: pass max_bytes, the capacity in bytes", DeprecationWarning, stacklevel=4
        )
        return positive_int(max_elems, "max_elems", MAX_BYTES // self.dtype.itemsize) * self.dtype.itemsize

    def raise_first(self) -> None:
        """Raise what was collected first, for a group of one."""
        if self.errors:
            raise self.errors[0]
