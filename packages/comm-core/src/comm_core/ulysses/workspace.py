"""Reusable staging for transports that pack: two flat buffers, owned by the caller."""

from __future__ import annotations

import torch

from comm_core import _cuda
from comm_core._dtypes import check_dtype, dtype_name
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.transport import strided
from comm_core.transport.interface import Staging
from comm_core.ulysses.validation import MAX_ELEMS, Limits, positive_int

__all__ = ["UlyssesWorkspace", "check_workspace"]


class UlyssesWorkspace:
    """Send and receive staging of Ulysses calls over transports that pack (``"nccl"``, ``"gloo"``).

    Passing one removes the two staging allocations of a call. Other transports own their staging; they check the
    workspace and don't use it. A workspace is local: it has no process group and no stream. Calls that follow each
    other may share it, calls that run at the same time may not.

    Args:
        max_elems: capacity of each buffer in elements, at most 2**31 - 1.
        dtype: element type, 1, 2 or 4 bytes.
        device: of the buffers; None is the current CUDA device, or the CPU where CUDA is not in use.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: an argument is out of range.
    """

    def __init__(self, *, max_elems: int, dtype: torch.dtype, device: torch.device | str | int | None = None) -> None:
        self._max_elems = positive_int(max_elems, "max_elems", MAX_ELEMS)
        self._dtype = check_dtype(dtype)
        self._device = _cuda.normalize_device(device)
        self._send = torch.empty(self._max_elems, dtype=self._dtype, device=self._device)
        self._receive = torch.empty(self._max_elems, dtype=self._dtype, device=self._device)
        nbytes = self._max_elems * self._dtype.itemsize
        self._staging = Staging(strided.byte_view(self._send, 0, nbytes), strided.byte_view(self._receive, 0, nbytes))

    @property
    def max_elems(self) -> int:
        """Capacity of each buffer in elements."""
        return self._max_elems

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the buffers."""
        return self._device

    @property
    def send_buffer(self) -> torch.Tensor:
        """Flat send staging ``[max_elems]``, for looking at."""
        return self._send

    @property
    def recv_buffer(self) -> torch.Tensor:
        """Flat receive staging ``[max_elems]``, for looking at."""
        return self._receive

    @property
    def staging(self) -> Staging:
        """Both buffers as flat uint8, as a transport takes them."""
        return self._staging


def check_workspace(workspace: object, numel: int, limits: Limits, dtype: torch.dtype) -> UlyssesWorkspace:
    """Check a workspace for a call that moves `numel` elements of `dtype`."""
    if not isinstance(workspace, UlyssesWorkspace):
        raise ArgumentTypeError(
            f"workspace must be a UlyssesWorkspace (create_workspace makes one), got {type(workspace).__name__}"
        )
    if workspace.device != limits.device:
        raise ArgumentValueError(f"the workspace is on {workspace.device}, the communicator on {limits.device}")
    if workspace.dtype != dtype:
        raise ArgumentValueError(
            f"the workspace has dtype {dtype_name(workspace.dtype)}, the call moves {dtype_name(dtype)}"
        )
    if workspace.max_elems < numel:
        raise ArgumentValueError(f"the workspace holds {workspace.max_elems} elements, the call needs {numel}")
    return workspace
