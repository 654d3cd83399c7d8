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
from typing import Any, Generic, TypeVar, cast

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
        itemsize: bytes of an element.
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
    itemsize: int
    out_bytes: int
    numel: int
    geometry: JsonObject
    device: torch.device
    registered: bool

    def admits(self, operands: Sequence[torch.Tensor], out: Any, workspace: object) -> bool:
        """Return whether a call of this geometry is sure to pass every check that is no matter of geometry.

        These are: a plain tensor on the right device whose bytes are its values and exist; an output that is
        contiguous and of the right shape; a workspace that fits; no two that share bytes.

        Args:
            operands: of exactly this geometry.
            out: what was passed as output.
            workspace: what was passed as workspace.
        """
        dtype, device, itemsize = self.dtype, self.device, self.itemsize
        start = end = 0
        if out is not None:
            start = _plain_address(out, dtype, device, itemsize)
            if not start or out.shape != self.shape or not out.is_contiguous():
                return False
            end = start + self.out_bytes
        elif self.registered:
            return False
        for operand, nbytes in zip(operands, self.extents):  # noqa: B905 - strict takes as long as a check
            address = _plain_address(operand, dtype, device, itemsize)
            if not address or (start < address + nbytes and address < end):
                return False
        return workspace is None or self._admits_workspace(operands, out, workspace)

    def call(self, operands: Sequence[torch.Tensor], out: Any, workspace: Any) -> Call:
        """Return the call of this geometry, for arguments that it admits."""
        call: Call = _new_tuple(Call, (self.plan, operands, self.shape, self.dtype, out, workspace, self.geometry))
        return call

    def _admits_workspace(
        self, operands: Sequence[torch.Tensor], out: torch.Tensor | None, workspace: object
    ) -> bool:
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
_new_tuple = cast("Any", tuple).__new__
"""Makes a `Call` as its class does, without the function in between, which takes longer than making it."""


def _plain_address(x: Any, dtype: torch.dtype, device: torch.device, itemsize: int) -> int:
    """Return the address of `x`, or 0 unless it is a plain tensor, of that dtype, there, whose bytes are its values.

    A tensor that is not dense has no address or no shape, and raises where it is asked for one.
    """
    if (
        type(x) is _Tensor
        and x.dtype is dtype
        and x.device == device
        and not x.is_neg()
        # Only these can be conjugated lazily, and asking the others takes longer than asking the dtype.
        and not (dtype.is_complex and x.is_conj())
    ):
        address = x.data_ptr()
        # Where the memory was given back, what is left of the address is the offset.
        if address != x.storage_offset() * itemsize:
            return address
    return 0


_Known = TypeVar("_Known")


class Geometries(Generic[_Known]):
    """The last `KEPT` geometries of one communicator or workspace. Used by one thread at a time."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are kept."""
        return len(self._known)

    def find(self, key: Hashable) -> _Known | None:
        """Return what is known of `key`, which then is the last one used."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    def keep(self, key: Hashable, known: _Known) -> None:
        """Keep a geometry that was found good, in place of the one that was not used for longest."""
        self._known[key] = known
        if len(self._known) > KEPT:
            self._known.popitem(last=False)
