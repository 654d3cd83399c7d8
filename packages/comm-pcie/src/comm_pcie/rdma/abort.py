"""The abort of a group whose hosts wait in polls of their NICs: a word in each rank's memory that every rank can set.

The signals of windows reach kernels. A host that waits for a completion looks at no device memory, so it has a word
of its own in a page that all ranks map. It is set once and never cleared.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from comm_core.memory.peer import HOST, map_jointly
from comm_core.windows.signals import abort_code, read_abort

if TYPE_CHECKING:
    from comm_core.consensus import Transaction

__all__ = ["AbortWords"]


class AbortWords:
    """The words of all ranks, mapped by this one. Released by the transaction that they were made in.

    Args:
        stages: the transaction.
    """

    def __init__(self, stages: Transaction) -> None:
        self._rank = stages.group.rank
        mapped = map_jointly(
            stages, ctypes.sizeof(ctypes.c_uint32), torch.device("cpu"), form=HOST, what="abort words"
        )
        self.address = mapped.addresses[self._rank]
        """Of this rank's own word."""
        self._words = [ctypes.c_uint32.from_address(address) for address in mapped.addresses]

    def publish(self, waited_for: int, reporter: int | None = None) -> None:
        """Tell every rank that this one has given up on `waited_for`, or what it was told itself before."""
        first = self._rank if reporter is None else reporter
        code = self._words[self._rank].value or abort_code(first, waited_for)
        for word in self._words:
            if not word.value:
                word.value = code

    def told(self) -> tuple[int, int] | None:
        """Return who has given up and on whom, as far as this rank was told; None if nobody has."""
        code = self._words[self._rank].value
        return read_abort(code) if code else None
