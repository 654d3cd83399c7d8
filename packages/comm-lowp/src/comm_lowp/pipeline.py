"""What a prepared exchange runs: encoded and exchanged in steps over any transport, or in one launch over windows.

A `Pipeline` owns the storage of one geometry and is called with the inputs and the six outputs. There are two:

- `ExchangePipeline`: statistics, gather, final statistics, quantize and pack, exchange, unpack. The transport carries
  the gather and the exchange; an `Encoder` does the rest, with the CUDA kernels (`KernelEncoder`) or in PyTorch
  (`TorchEncoder`). All combinations give the same bytes.
- `DirectPipeline`, where all ranks have the kernels and the transport has windows: quantize-and-pack stores straight
  into the peers' windows, so there is neither a send buffer nor a separate exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch

from comm_core.transport.dist import SMALL_BYTES
from comm_core.transport.interface import Staging
from comm_core.ulysses import plans
from comm_core.windows.gather import small_plan
from comm_lowp.sage2 import primitives

if TYPE_CHECKING:
    from comm_core.ulysses.codec import CodecHost
    from comm_lowp.kernels import Kernels, PeerSession
    from comm_lowp.sage2.grid import Grid

__all__ = [
    "DirectPipeline",
    "Encoder",
    "ExchangePipeline",
    "KernelEncoder",
    "Pipeline",
    "TorchEncoder",
    "make_pipeline",
]

Outputs = Sequence[torch.Tensor]
"""q8, k8, v8, q_scale, k_scale, v_scale."""


class Encoder(ABC):
    """The local steps of an exchange of one geometry, in the order in which they are called."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Storage that outputs must not overlap."""

    @abstractmethod
    def statistics(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flat: torch.Tensor) -> None:
        """Write this rank's statistics for the gather into `flat`."""

    @abstractmethod
    def finalize(self, gathered: torch.Tensor, v_scale: torch.Tensor) -> None:
        """Turn all ranks' statistics into the final ones; write V's scales of this rank's heads into `v_scale`."""

    @abstractmethod
    def pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, send: torch.Tensor) -> None:
        """Quantize into ``send[P, chunk_bytes]``, every byte of it."""

    @abstractmethod
    def unpack(self, received: torch.Tensor, outs: Outputs) -> None:
        """Write q8, k8, v8, q_scale and k_scale from ``received[P, chunk_bytes]``."""


class TorchEncoder(Encoder):
    """The steps in PyTorch, on any device. They allocate what they compute."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._context: primitives.LocalStatistics | None = None
        self._final: primitives.FinalStatistics | None = None

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See `Encoder.buffers`: none that outlives a call."""
        return ()

    def statistics(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flat: torch.Tensor) -> None:
        """See `Encoder.statistics`."""
        self._context = primitives.torch_statistics(q, k, v, self._grid, flat)

    def finalize(self, gathered: torch.Tensor, v_scale: torch.Tensor) -> None:
        """See `Encoder.finalize`."""
        assert self._context is not None
        final = primitives.torch_final(gathered, self._context)
        self._context, self._final = None, final
        first = self._grid.rank * self._grid.local_heads
        with _writing((v_scale,)):
            v_scale.copy_(final.v_scale[:, first : first + self._grid.local_heads])

    def pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, send: torch.Tensor) -> None:
        """See `Encoder.pack`."""
        assert self._final is not None
        primitives.torch_pack(q, k, v, self._final, send)
        self._final = None

    def unpack(self, received: torch.Tensor, outs: Outputs) -> None:
        """See `Encoder.unpack`."""
        with _writing(outs):
            primitives.torch_unpack(received, self._grid, outs)


def _writing(outs: Outputs) -> AbstractContextManager[object]:
    """Let torch write `outs`: tensors that were made in inference mode only in that mode."""
    return torch.inference_mode() if any(x.is_inference() for x in outs) else nullcontext()


class KernelEncoder(Encoder):
    """The steps as one kernel each; nothing is allocated in a call."""

    def __init__(self, kernels: Kernels, grid: Grid, dtype: torch.dtype) -> None:
        self._kernels, self._grid = kernels, grid
        self._scratch = kernels.scratch(grid, dtype)
        self._final = kernels.final(grid, dtype)
        self._destinations: tuple[int, ...] = ()
        self._send_address = 0

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See `Encoder.buffers`: partial and final statistics."""
        return (*self._scratch.tensors, self._scratch.counters, *self._final)

    def statistics(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, flat: torch.Tensor) -> None:
        """See `Encoder.statistics`."""
        self._kernels.statistics(q, k, v, self._grid, flat, self._scratch)

    def finalize(self, gathered: torch.Tensor, v_scale: torch.Tensor) -> None:
        """See `Encoder.finalize`."""
        self._kernels.finalize(gathered, self._scratch, self._grid, self._final, own_v_scale=v_scale)

    def pack(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, send: torch.Tensor) -> None:
        """See `Encoder.pack`."""
        self._kernels.quant_pack(q, k, v, self._final, self._grid, primitives.chunk_addresses(send))

    def unpack(self, received: torch.Tensor, outs: Outputs) -> None:
        """See `Encoder.unpack`."""
        self._kernels.unpack(received, self._grid, outs[:5])


class Pipeline(ABC):
    """An exchange of one geometry and its storage."""

    name: str
    """``"exchange"`` or ``"direct"``."""
    orders_streams: bool
    """Whether a call waits for an earlier one on another stream by itself."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """Storage that outputs must not overlap."""

    @abstractmethod
    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outs: Outputs) -> None:
        """Encode and exchange, on the current stream. Collective. Arguments were checked."""

    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outs: Outputs) -> Callable[[], None] | None:
        """Return the call with this storage, to be made any number of times, without keeping the tensors.

        None where it has to be given the tensors each time.
        """
        return None


class ExchangePipeline(Pipeline):
    """Works over any transport: one gather of statistics and one exchange of chunks, and no other collective."""

    name = "exchange"
    orders_streams = False

    def __init__(self, host: CodecHost, grid: Grid, make_encoder: Callable[[], Encoder]) -> None:
        session = self._session = host.session
        spec, device = grid.payload, host.device
        nbytes = 4 * grid.statistics_elems
        # A gather that is not small is an ordinary exchange.
        self._gather_plan = small_plan(nbytes, grid.rank, spec.world_size) if nbytes > SMALL_BYTES else None
        self._plan = plans.exchange_chunks(spec.chunk_bytes, 1, grid.rank, spec.world_size)
        shape, payload_shape = (spec.world_size, grid.statistics_elems), (spec.world_size, spec.chunk_bytes)
        gathered = received = None
        # First what all ranks allocate together: one that fails alone before that is not where the others wait.
        # Staging is sized for payloads, and statistics of very short sequences are larger: an output of the
        # transport's own needs none.
        if session is not None and self._gather_plan is not None:
            gathered = session.allocate_output(shape, torch.float32, device)
        if session is not None and session.properties.registered_outputs:
            received = session.allocate_output(payload_shape, torch.uint8, device)
        self._encoder = make_encoder()
        self._flat = torch.empty(grid.statistics_elems, dtype=torch.float32, device=device)
        self._send = torch.empty(payload_shape, dtype=torch.uint8, device=device)
        self._gathered, self._receive = self._flat.view(1, -1), self._send
        self._gather_staging: Staging | None = None
        if session is None:
            return
        self._gathered = torch.empty(shape, dtype=torch.float32, device=device) if gathered is None else gathered
        self._receive = torch.empty_like(self._send) if received is None else received
        if gathered is not None and session.properties.staging:
            send = torch.empty(spec.world_size * nbytes, dtype=torch.uint8, device=device)
            self._gather_staging = Staging(send, gathered.view(torch.uint8).view(-1))

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See `Pipeline.buffers`: statistics of this rank and of all, payload to send and received, the encoder's."""
        staging = () if self._gather_staging is None else (self._gather_staging.send,)
        return (self._flat, self._gathered, self._send, self._receive, *staging, *self._encoder.buffers)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outs: Outputs) -> None:
        """See `Pipeline`."""
        encoder, session = self._encoder, self._session
        encoder.statistics(q, k, v, self._flat)
        if session is not None:
            if self._gather_plan is None:
                session.all_gather_small(self._flat, self._gathered)
            else:
                session.exchange(self._gather_plan, (self._flat,), self._gathered, staging=self._gather_staging)
        encoder.finalize(self._gathered, outs[5])
        encoder.pack(q, k, v, self._send)
        if session is not None:
            session.exchange(self._plan, (self._send,), self._receive)
        encoder.unpack(self._receive, outs)


class DirectPipeline(Pipeline):
    """All of it in one call of the kernels, over windows of the transport's session."""

    name = "direct"
    # All that uses the storage are operations of the session, which follow each other.
    orders_streams = True

    def __init__(self, kernels: Kernels, session: PeerSession, grid: Grid, dtype: torch.dtype) -> None:
        self._scatter = kernels.direct(session, grid, dtype)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """See `Pipeline.buffers`: the window and the statistics."""
        return self._scatter.buffers

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outs: Outputs) -> None:
        """See `Pipeline`."""
        self._scatter(q, k, v, outs)

    def prepare(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, outs: Outputs) -> Callable[[], None]:
        """See `Pipeline.prepare`."""
        return self._scatter.prepare(q, k, v, outs)


def make_pipeline(host: CodecHost, grid: Grid, kernels: Kernels | None, *, everywhere: bool) -> Pipeline:
    """Return the pipeline of a geometry and allocate its storage. Collective.

    Args:
        host: the communicator.
        grid: this rank's place.
        kernels: of this rank's device, or None where it has none.
        everywhere: whether all ranks have kernels: a direct exchange is all ranks' or nobody's.
    """
    session = host.session
    if kernels is None:
        return ExchangePipeline(host, grid, lambda: TorchEncoder(grid))
    if everywhere and session is not None and session.properties.peer_pointers and hasattr(session, "launch_context"):
        return DirectPipeline(kernels, cast("PeerSession", session), grid, host.dtype)
    return ExchangePipeline(host, grid, lambda: KernelEncoder(kernels, grid, host.dtype))
