"""Geometries that were found good before: what makes the second call of a kind cheap.

A model makes the same few calls over and over. Everything that depends on geometry alone (shapes, strides, dtype,
integers) is proven once, by the checks of `comm_core.ulysses.preparation`, and kept here under what it depends on.
Whatever can differ between two calls of one geometry is looked at each time, by `Known.admits`.

It can only say yes. Where anything is not as expected, the full checks decide and word the error, so that no
argument is accepted, and no error text reads differently, because of what was called before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from comm_core._json import JsonObject
from comm_core.transport.plan import Plan
from comm_core.ulysses.call import Call
from comm_core.ulysses.workspace import UlyssesWorkspace

__all__ = ["KEPT", "Geometries", "Known"]

KEPT = 256
"""Geometries kept a communicator, the last ones used. Each keeps a plan of a few kilobytes; a process that has more
pays the full checks again (some 10 us) and nothing else."""


@dataclass(frozen=True, slots=True)
class Known:
    """A geometry that was found good.

    Attributes:
        plan: what bytes go where.
        shape: of the output.
        dtype: element type of the operands and the output.
        extents: bytes from the first of each operand to one past its last.
        out_bytes: size of the output.
        numel: elements that a workspace must hold.
        geometry: as in `Call`.
        device: where all tensors are.
        registered: whether the transport takes registered outputs only, and no workspace.
    """

    plan: Plan
    shape: tuple[int, ...]
    dtype: torch.dtype
    extents: tuple[int, ...]
    out_bytes: int
    numel: int
    geometry: JsonObject
    device: torch.device
    registered: bool

    def admits(self, operands: Sequence[torch.Tensor], out: object, workspace: object) -> bool:
        """Return whether a call of this geometry is sure to pass every check that is no matter of geometry.

        These are: a plain tensor on the right device whose bytes are its values and exist; an output that is
        contiguous and of the right shape; a workspace that fits; no two that share bytes.

        Args:
            operands: of exactly this geometry.
            out: what was passed as output.
            workspace: what was passed as workspace.
        """
        dtype, device = self.dtype, self.device
        start = end = 0
        if out is not None:
            if not is_plain(out, dtype, device) or out.shape != self.shape or not out.is_contiguous():
                return False
            start = out.data_ptr()
            end = start + self.out_bytes
        elif self.registered:
            return False
        at = 0
        for operand in operands:
            if not is_plain(operand, dtype, device):
                return False
            address = operand.data_ptr()
            if start < address + self.extents[at] and address < end:
                return False
            at += 1
        return workspace is None or self._admits_workspace(operands, out, workspace)

    def call(self, operands: Sequence[torch.Tensor], out: Any, workspace: Any) -> Call:
        """Return the call of this geometry, for arguments that it admits."""
        return Call(self.plan, operands, self.shape, self.dtype, out, workspace, self.geometry)

    def _admits_workspace(self, operands: Sequence[torch.Tensor], out: torch.Tensor | None, workspace: object) -> bool:
        if (
            self.registered
            or type(workspace) is not UlyssesWorkspace
            or workspace.dtype is not self.dtype
            or workspace.device != self.device
            or workspace.max_elems < self.numel
        ):
            return False
        spans = [(x.data_ptr(), nbytes) for x, nbytes in zip(operands, self.extents, strict=True)]
        if out is not None:
            spans.append((out.data_ptr(), self.out_bytes))
        size = workspace.max_elems * self.dtype.itemsize
        for buffer in (workspace.send_buffer, workspace.recv_buffer):
            start = buffer.data_ptr()
            for address, nbytes in spans:
                if start < address + nbytes and address < start + size:
                    return False
        return True


_Tensor = torch.Tensor
_strided = torch.strided


def is_plain(x: object, dtype: torch.dtype, device: torch.device) -> TypeGuard[torch.Tensor]:
    """Return whether `x` is no subclass, dense, of that dtype, there, and its bytes are its values and exist."""
    return (
        type(x) is _Tensor
        and x.dtype is dtype
        and x.layout is _strided
        and not x.is_nested
        and x.device == device
        and not x.is_neg()
        and not x.is_conj()
        and x.untyped_storage().data_ptr() != 0
    )


class Geometries:
    """The last `KEPT` geometries of one communicator. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, Known] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._known)

    def find(self, key: Hashable) -> Known | None:
        """Return what is known of `key`, which then is the last one used."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def keep(self, key: Hashable, known: Known) -> None:
        """Keep a geometry that was found good, in place of the one that was not used for longest."""
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
