"""The ranks' boards: host memory of every rank that all ranks map. See include/comm_nvlink/board.h."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence

from comm_core.consensus import Transaction
from comm_core.errors import JointError
from comm_core.memory.fd_exchange import exchange_descriptors

__all__ = ["BOARD_BYTES", "Boards", "share_boards"]

BOARD_BYTES = 64 * 256
"""Twin: include/comm_nvlink/board.h, Board."""


class Boards:
    """All ranks' boards as this rank maps them. `close` releases the mappings; it may be called again."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._maps: list[mmap.mmap] = []
        self._views: list[ctypes.c_char] = []
        for descriptor in descriptors:
            self._maps.append(mmap.mmap(descriptor, BOARD_BYTES))
            self._views.append(ctypes.c_char.from_buffer(self._maps[-1]))
        self.addresses = tuple(ctypes.addressof(view) for view in self._views)

    def close(self) -> None:
        """Unmap them; the addresses are not valid any more."""
        self.addresses = ()
        self._views.clear()
        while self._maps:
            self._maps[-1].close()
            self._maps.pop()


def share_boards(stages: Transaction) -> Boards | str:
    """Make this rank's board and map all ranks', as a step of `stages`. Collective.

    Returns:
        The boards, or why the ranks can't pass each other file descriptors; on all ranks alike.
    """
    own: list[int] = []

    def make() -> None:
        own.append(os.memfd_create("comm-nvlink-board", os.MFD_CLOEXEC))
        os.ftruncate(own[0], BOARD_BYTES)

    try:
        stages.step("make a board", make)
        try:
            descriptors = exchange_descriptors(stages.group, own[0])
        except JointError as error:
            return str(error)
    finally:
        # Also where only another rank has none.
        for descriptor in own:
            os.close(descriptor)

    def map_all() -> Boards:
        try:
            return Boards(descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    return stages.step("map the boards", map_all, Boards.close)
