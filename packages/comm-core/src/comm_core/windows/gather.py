"""Small gathers as plans, and the self-test of a session."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

import torch

from comm_core import _cuda
from comm_core.errors import TransportError
from comm_core.transport.dist import SMALL_BYTES, check_small
from comm_core.transport.plan import Copy, Plan

__all__ = ["TEST_BYTES", "check_small", "self_test", "small_plan", "window_bytes"]

TEST_BYTES = 4099
"""A size that needs long and short vectors, and a row longer than one piece."""


def window_bytes(world_size: int) -> int:
    """Return the size of the window of small gathers."""
    return SMALL_BYTES * world_size


@lru_cache(64)
def small_plan(nbytes: int, rank: int, world_size: int) -> Plan:
    """Plan the gather of `nbytes` a rank: rank r's value goes to place r of every destination."""
    sends = tuple(Copy(peer, 0, 0, rank * nbytes, (), nbytes) for peer in range(world_size))
    receives = tuple(Copy(peer, 0, 0, peer * nbytes, (), nbytes) for peer in range(world_size))
    return Plan("all_gather_small", rank, world_size, sends, receives, 1, world_size * nbytes)


class Gathers(Protocol):
    """A session that can gather."""

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        ...

    def check(self) -> None:
        """Raise if the session has stalled."""
        ...


def pattern(rank: int, device: torch.device) -> torch.Tensor:
    """Return the bytes that `rank` sends in the self-test; no two ranks' agree anywhere."""
    at = torch.arange(TEST_BYTES, device=device, dtype=torch.int32)
    return ((at * 131 + rank * 17 + 1) % 251).to(torch.uint8)


def self_test(session: Gathers, device: torch.device, rank: int, world_size: int) -> None:
    """Gather a pattern from all ranks twice and compare every byte, over the path that calls use.

    Raises:
        TransportError: a byte is wrong; the text names the rank that it should have come from.
        PeerStalledError: a rank did not take part.
    """
    out = torch.empty(world_size * TEST_BYTES, dtype=torch.uint8, device=device)
    problem = ""
    for shift in range(2):
        out.fill_(0xEE)
        session.all_gather_small(pattern(rank + shift, device), out)
        _cuda.synchronize(device)
        session.check()
        for peer, received in enumerate(out.view(world_size, TEST_BYTES)):
            wrong = (received != pattern(peer + shift, device)).nonzero()
            if wrong.numel() and not problem:
                problem = (
                    f"{wrong.numel()} of {TEST_BYTES} bytes from rank {peer} are wrong, the first at {int(wrong[0])}"
                )
    # Only now: a rank that left between the rounds would let the others wait for it until their deadline.
    if problem:
        raise TransportError(
            f"self-test: {problem}: stores into peer memory do not arrive on this machine (IOMMU or ACS settings?)"
        )
