"""How a payload gets to its destinations: packed and exchanged, or stored straight into the peers' memory.

A route owns its buffers. There is one seam: `PayloadRoute.exchange` takes the inputs and the final statistics and
returns what arrived, source-major. What comes before (statistics) and after (unpacking) is the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from comm_core.ulysses import plans
from comm_lowp.sage2 import primitives
from comm_lowp.sage2.dispatch import kernels_for

if TYPE_CHECKING:
    from comm_core.ulysses.codec import CodecHost
    from comm_lowp.sage2.grid import Grid
    from comm_lowp.sage2.primitives import FinalStatistics

__all__ = ["ExchangeRoute", "PayloadRoute", "choose_route"]


class PayloadRoute(ABC):
    """One way of a payload from this rank to all ranks, for one geometry."""

    name: str

    @property
    @abstractmethod
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The storage that outputs must not overlap."""

    @abstractmethod
    def exchange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stats: FinalStatistics
    ) -> torch.Tensor:
        """Quantize, and bring every destination its chunk. Collective, on the current stream.

        Returns:
            uint8 ``[P, chunk_bytes]``, source-major, complete for work enqueued afterwards and good until the next
            call.
        """


class ExchangeRoute(PayloadRoute):
    """Packs into a send buffer and hands it to the transport as one exchange of chunks. Works over any transport."""

    name = "exchange"

    def __init__(self, host: CodecHost, grid: Grid) -> None:
        spec = grid.payload
        shape = (spec.world_size, spec.chunk_bytes)
        self._session = host.session
        self._send = torch.empty(shape, dtype=torch.uint8, device=host.device)
        if self._session is None:
            self._receive = self._send
        elif self._session.properties.registered_outputs:
            self._receive = self._session.allocate_output(shape, torch.uint8, host.device)
        else:
            self._receive = torch.empty(shape, dtype=torch.uint8, device=host.device)
        self._plan = plans.exchange_chunks(spec.chunk_bytes, 1, grid.rank, grid.world_size)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See `PayloadRoute.buffers`: send and receive buffer."""
        return (self._send, self._receive)

    def exchange(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, stats: FinalStatistics
    ) -> torch.Tensor:
        """See `PayloadRoute.exchange`."""
        primitives.pack_into(q, k, v, stats, self._send)
        if self._session is not None:
            self._session.exchange(self._plan, (self._send,), self._receive)
        return self._receive


def choose_route(host: CodecHost, grid: Grid) -> PayloadRoute:
    """Return the route of a geometry. Collective: a function of what the group agreed on alone.

    Kernels may offer a route of their own where the transport has peer pointers: ``direct_route(host, grid)``, or
    None where it does not apply.
    """
    session = host.session
    if session is not None and session.properties.peer_pointers:
        kernels = kernels_for(host.device)
        direct: Callable[[CodecHost, Grid], PayloadRoute | None] | None = getattr(kernels, "direct_route", None)
        if direct is not None:
            route = direct(host, grid)
            if route is not None:
                return route
    return ExchangeRoute(host, grid)
