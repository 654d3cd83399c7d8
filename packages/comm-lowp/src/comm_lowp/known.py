"""Calls whose storage was found good before: what makes the second one with the same storage cheap.

As `comm_core.allreduce.known` does it: what the checks of a call depend on is kept with their outcome, and looked at
each time. It can only say yes. Where anything is not as expected, the full checks decide and word the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["KEPT", "KnownCall", "KnownCalls", "Launch"]

KEPT = 64
"""Sets of storage that a workspace remembers; a model's layers use a few. Each keeps addresses and the arguments of a
launch, less than 4 KB, and no tensor."""

Launch = Callable[[], None]
"""Makes a call with storage that it knows, on the current stream of the current device."""

_Tensor = torch.Tensor
_Expected = tuple[torch.dtype, torch.Size, tuple[int, ...] | None, int]
"""Of a tensor: dtype, shape, strides or None for contiguous (which costs less to ask), ordinal of the device."""


def _of(x: torch.Tensor) -> _Expected:
    return x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.get_device()


class KnownCall(NamedTuple):
    """A call whose storage was found good.

    Attributes:
        launch: makes it; None where the pipeline has to be given the tensors.
        expected: of each tensor, what the checks depend on besides its address.
    """

    launch: Launch | None
    expected: tuple[_Expected, ...]


class KnownCalls:
    """The storage of one workspace's calls that was found good."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, ...], KnownCall] = {}

    def find(self, tensors: Sequence[Any]) -> KnownCall | None:
        """Return the call with this storage if it is sure to pass every check, else None.

        Args:
            tensors: Q, K, V, and the six outputs where they are given; nothing of them was checked.
        """
        try:
            # Where all lies: that nothing overlaps and all is aligned follows from it.
            known = self._calls.get(tuple([x.data_ptr() for x in tensors]))
            if known is None:
                return None
            # In a loop without a function for each: this is most of what a call costs.
            for x, (dtype, shape, strides, device) in zip(tensors, known.expected, strict=True):
                if (
                    type(x) is not _Tensor
                    or x.dtype is not dtype
                    or x.shape != shape
                    or not (x.is_contiguous() if strides is None else x.stride() == strides)
                    or x.get_device() != device
                    or x.is_neg()
                ):
                    return None
        except Exception:
            return None  # what can't be asked such things; the checks say why, where all ranks hear it
        return known

    def keep(self, tensors: Sequence[torch.Tensor], launch: Launch | None) -> None:
        """Keep storage that has passed all checks, and how the call with it is made."""
        if any(type(x) is not _Tensor or x.is_neg() for x in tensors):
            return
        if len(self._calls) >= KEPT:
            self._calls.clear()
        key = tuple([x.data_ptr() for x in tensors])
        self._calls[key] = KnownCall(launch, tuple([_of(x) for x in tensors]))
