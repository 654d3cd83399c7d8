"""The one descriptor of a rank's memory on its way to all other ranks, and theirs on their way to this one."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from comm_core._json import JsonObject
from comm_core.memory.fd_exchange import Exchange
from comm_core.topology.facts import HostFacts

__all__ = ["Passing"]


class Passing:
    """What the forms of peer memory have whose handle is a file descriptor. Owns every descriptor that it knows.

    `offer` on all ranks, `run` on all ranks, then `take` each peer's; `withdraw` and `close` at any time, any number
    of times. It can be gone through again.

    Args:
        rank: this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._offered = -1
        self._exchange: Exchange | None = None
        self._received: dict[int, int] = {}

    def offer(self, descriptor: int, hosts: Sequence[HostFacts]) -> JsonObject:
        """Listen for the peers; return what they need to know. The descriptor is this object's, also where it fails.

        Args:
            descriptor: of this rank's memory.
            hosts: where the ranks run.

        Raises:
            CommError: no socket can be had; nothing stays open.
        """
        self.withdraw()
        self._offered = descriptor
        try:
            self._exchange = Exchange(self._rank, hosts)
        except BaseException:
            self.withdraw()
            raise
        return self._exchange.invitation

    def run(self, invitations: Sequence[JsonObject], timeout_s: float) -> None:
        """Send the descriptor to every peer and receive theirs, then withdraw; at the same time on all ranks.

        Raises:
            CommError: as `comm_core.memory.fd_exchange.Exchange.run`; nothing stays open.
        """
        assert self._exchange is not None
        own = {peer: self._offered for peer in range(len(invitations)) if peer != self._rank}
        try:
            self._received = self._exchange.run(invitations, own, timeout_s=timeout_s)
        finally:
            self.withdraw()

    @contextmanager
    def take(self, peer: int) -> Generator[int, None, None]:
        """Yield what `peer` sent; it is closed after the block."""
        descriptor = self._received.pop(peer)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def withdraw(self) -> None:
        """Close what is open only for the peers to get it."""
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None
        if self._offered >= 0:
            os.close(self._offered)
            self._offered = -1

    def close(self) -> None:
        """Close what was received and not taken."""
        while self._received:
            os.close(self._received.popitem()[1])
