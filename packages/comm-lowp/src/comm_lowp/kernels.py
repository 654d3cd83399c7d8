"""The CUDA kernels of the Sage2 encoding as Python sees them: the module's description and the calls into it.

Arguments were checked by the callers. A call launches on the current stream of its device, allocates nothing and
waits for nothing, so all of them can be captured in a CUDA graph. ``pdl`` asks for programmatic dependent launch on
devices that have it (compute capability 9.0 and later): True for all kernels of a call, None for those that follow
one of the same call, False for none.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from comm_core import _cuda, jit
from comm_core.errors import ArgumentValueError
from comm_core.windows.signals import MAX_RANKS, Operation
from comm_lowp.module import MODULE
from comm_lowp.sage2.grid import Grid, ceil_div

if TYPE_CHECKING:
    from comm_core.transport.interface import Window

__all__ = [
    "ALL_PARTS",
    "PART_K",
    "PART_Q",
    "PART_SCALES",
    "PART_V",
    "DirectLaunch",
    "DirectScatter",
    "Kernels",
    "PeerSession",
    "Scratch",
    "direct_window_bytes",
    "load",
]

PART_Q = 1
"""Quantize Q. Twins of these bits: include/comm_lowp/pack.cuh, kPartQ and so on."""
PART_K = 2
PART_V = 4
PART_SCALES = 8
"""Also write the scales of Q and K (as far as their amax is given), and the bytes behind them."""
ALL_PARTS = PART_Q | PART_K | PART_V | PART_SCALES

_PDL = 1
_PDL_FIRST = 2
"""Twins: csrc/sage2.cu, kProgrammatic and kProgrammaticFirst."""
_CHUNK_ROWS = 256
_SEGMENTS = 5
"""Twins: include/comm_lowp/geometry.cuh, kChunkRows and kSegments."""
_NO_VIEW = (0, 0, 0, 0)
_GEOMETRY = struct.Struct(f"{MODULE.structs['comm_lowp_geometry_v1']}")


@dataclass(frozen=True)
class Scratch:
    """What the statistics of one geometry leave for `Kernels.finalize`; made by `Kernels.scratch`.

    Attributes:
        k_sums: sums of K by chunk of 256 rows, fp32 ``[B, H, C, D]``.
        k_extremes: (min, max) of live K by group in a chunk, ``[B, H, C, 5, 2, D]`` in the input dtype; of the five
            places only those of groups that the chunk touches are written.
        v_amax: largest magnitude of V by chunk, ``[B, H, C, D]`` in the input dtype.
        q_amax: largest magnitude of Q by group, not floored, fp32 ``[B, H, slots(L, GQ)]``; 0 where not used.
        counters: int32 ``[B * H + 3]``, by which the last of a kernel's blocks finds out that it is the last: 0
            before and after every kernel. Kernels that use one scratch must follow each other.
    """

    k_sums: torch.Tensor
    k_extremes: torch.Tensor
    v_amax: torch.Tensor
    q_amax: torch.Tensor
    counters: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All that is written anew by every pass: all but the counters."""
        return self.k_sums, self.k_extremes, self.v_amax, self.q_amax

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """Addresses. Twin: include/comm_lowp/statistics.cuh, Partials."""
        return self.k_sums.data_ptr(), self.k_extremes.data_ptr(), self.v_amax.data_ptr(), self.q_amax.data_ptr()


class Final(NamedTuple):
    """The final statistics: where `Kernels.finalize` writes and `Kernels.quant_pack` reads. Contiguous.

    Attributes:
        k_mean: ``[B, H, D]`` in the input dtype, 16-byte aligned.
        q_amax: fp32 ``[B, H, slots(L, GQ)]``, floored at 1e-7 where used, 0 elsewhere.
        k_amax: fp32 ``[B, H, slots(L, GK)]``, likewise.
        v_scale: fp32 ``[B, H, D]``, of all heads.
    """

    k_mean: torch.Tensor
    q_amax: torch.Tensor
    k_amax: torch.Tensor
    v_scale: torch.Tensor

    @property
    def pointers(self) -> tuple[int, int, int, int]:
        """Addresses."""
        return self.k_mean.data_ptr(), self.q_amax.data_ptr(), self.k_amax.data_ptr(), self.v_scale.data_ptr()


class PeerSession(Protocol):
    """A transport session whose windows kernels can write, as `comm_core.windows.session.WindowSession` is."""

    def window(self, nbytes: int) -> Window:
        """See `TransportSession.window`. Collective."""
        ...

    def launch_context(self) -> tuple[int, int]:
        """Return the current stream and the host address of the packed session."""
        ...


@lru_cache(256)
def _geometry(grid: Grid, dtype: torch.dtype) -> ctypes.Array[ctypes.c_char]:
    """Return the packed geometry. Twin: include/comm_lowp/geometry.cuh, Geometry."""
    layout = grid.layout
    data = _GEOMETRY.pack(
        grid.batch_size,
        grid.local_sequence,
        grid.heads,
        grid.head_dim,
        grid.rank,
        grid.world_size,
        grid.used_sequence,
        int(dtype == torch.bfloat16),
        layout.q_group.bit_length() - 1,
        layout.k_group.bit_length() - 1,
        layout.q_block,
        layout.v_block,
        layout.v_max,
        0,
    )
    return ctypes.create_string_buffer(data, len(data))


def _address(grid: Grid, dtype: torch.dtype) -> int:
    # The cache keeps the buffer; an entry may be dropped, but not before this call's launch has copied it: the
    # caller's own reference would be needed for that only if 256 other geometries came in between.
    return ctypes.addressof(_geometry(grid, dtype))


def _view(x: torch.Tensor | None) -> tuple[int, int, int, int]:
    """Return the address and the strides of one operand. Twin: include/comm_lowp/memory.cuh, View."""
    if x is None:
        return _NO_VIEW
    batch, rows, heads, _ = x.shape
    sb, sl, sh, _ = x.stride()
    # The stride of a dimension of size 1 means nothing, and need not be aligned.
    return x.data_ptr(), sb if batch > 1 else 0, sl if rows > 1 else 0, sh if heads > 1 else 0


def direct_window_bytes(grid: Grid) -> tuple[int, int]:
    """Return the bytes of a window of `DirectScatter`, and where in it the statistics of all ranks begin.

    The payloads of all sources come first. Twin: include/comm_lowp/direct.cuh.
    """
    offset = grid.payload.payload_bytes
    return offset + 4 * grid.statistics_elems * grid.world_size, offset


class Kernels:
    """The kernels on one device; `load` makes it.

    Args:
        module: the loaded library.
        device: of all tensors.
        pdl: whether the device has programmatic dependent launch.
    """

    def __init__(self, module: jit.Module, device: torch.device, *, pdl: bool) -> None:
        self.device = device
        self.pdl = pdl
        self._index = device.index
        self._statistics = module.bind("comm_lowp_statistics_v1")
        self._finalize = module.bind("comm_lowp_finalize_v1")
        self._pack = module.bind("comm_lowp_pack_v1")
        self._unpack = module.bind("comm_lowp_unpack_v1")
        self.scatter = module.bind_parts("comm_lowp_scatter_v1")

    def _guard(self) -> AbstractContextManager[object]:
        if self.device.type != "cuda" or _cuda.current_device() == self._index:
            return nullcontext()
        return _cuda.device_guard(self.device)

    def _flags(self, pdl: bool | None) -> int:
        if not self.pdl or pdl is False:
            return 0
        return _PDL if pdl is None else _PDL | _PDL_FIRST

    # Storage

    def scratch(self, grid: Grid, dtype: torch.dtype) -> Scratch:
        """Allocate what the statistics leave."""
        b, h, d = grid.batch_size, grid.heads, grid.head_dim
        chunks = ceil_div(grid.local_sequence, _CHUNK_ROWS)

        def new(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=of, device=self.device)

        return Scratch(
            new(b, h, chunks, d),
            new(b, h, chunks, _SEGMENTS, 2, d, of=dtype),
            new(b, h, chunks, d, of=dtype),
            new(b, h, grid.q_slots),
            torch.zeros(b * h + 3, dtype=torch.int32, device=self.device),
        )

    def final(self, grid: Grid, dtype: torch.dtype) -> Final:
        """Allocate the final statistics."""
        b, h, d = grid.batch_size, grid.heads, grid.head_dim
        return Final(
            torch.empty(b, h, d, dtype=dtype, device=self.device),
            torch.empty(b, h, grid.q_slots, dtype=torch.float32, device=self.device),
            torch.empty(b, h, grid.k_slots, dtype=torch.float32, device=self.device),
            torch.empty(b, h, d, dtype=torch.float32, device=self.device),
        )

    # Passes

    def statistics(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        grid: Grid,
        flat: torch.Tensor | None,
        scratch: Scratch,
        *,
        pdl: bool | None = None,
    ) -> None:
        """Compute this rank's statistics in one pass over Q, K and V.

        Args:
            q: ``[B, L, H, D]`` on 16-byte aligned rows, any strides; None: it is not read, and what comes of it is
                not written.
            k: likewise.
            v: likewise.
            grid: this rank's place.
            flat: fp32 ``[grid.statistics_elems]`` for the gather; None leaves it out.
            scratch: written.
            pdl: see above.
        """
        some = next(x for x in (q, k, v) if x is not None)
        sums, extremes, v_amax, q_amax = scratch.pointers
        partials = (
            sums if k is not None else 0,
            extremes if k is not None else 0,
            v_amax if v is not None else 0,
            q_amax if q is not None else 0,
        )
        with self._guard():
            self._statistics(
                _cuda.raw_stream(self._index),
                _address(grid, some.dtype),
                *_view(q),
                *_view(k),
                *_view(v),
                *partials,
                0 if flat is None else flat.data_ptr(),
                scratch.counters.data_ptr(),
                self._flags(pdl),
                0,
            )

    def finalize(
        self,
        gathered: torch.Tensor,
        scratch: Scratch,
        grid: Grid,
        final: Final,
        *,
        own_v_scale: torch.Tensor | None = None,
        pdl: bool | None = None,
    ) -> None:
        """Turn all ranks' statistics into what quantization needs.

        Args:
            gathered: fp32 ``[P, grid.statistics_elems]``, in rank order, contiguous.
            scratch: of this rank's statistics.
            grid: this rank's place.
            final: written.
            own_v_scale: fp32 ``[B, H / P, D]``, contiguous: the scales of V of the heads that this rank will have; or
                None.
            pdl: see above.
        """
        with self._guard():
            self._finalize(
                _cuda.raw_stream(self._index),
                _address(grid, final.k_mean.dtype),
                gathered.data_ptr(),
                0,
                *scratch.pointers,
                *final.pointers,
                0 if own_v_scale is None else own_v_scale.data_ptr(),
                self._flags(pdl),
                0,
            )

    def k_grouped_amax(
        self, mean: torch.Tensor, scratch: Scratch, grid: Grid, out: torch.Tensor, *, pdl: bool | None = None
    ) -> None:
        """Write this rank's own amax of K - mean by group, from the extremes in `scratch`.

        Args:
            mean: ``[B, H, D]`` in the input dtype, contiguous.
            scratch: of `statistics` over K.
            grid: this rank's place.
            out: fp32 ``[B, H, slots(L, GK)]``, contiguous: floored at 1e-7 where used, 0 elsewhere.
            pdl: see above.
        """
        with self._guard():
            self._finalize(
                _cuda.raw_stream(self._index),
                _address(grid, mean.dtype),
                0,
                mean.data_ptr(),
                *scratch.pointers,
                0,
                0,
                out.data_ptr(),
                0,
                0,
                self._flags(pdl),
                0,
            )

    def quant_pack(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        final: Sequence[torch.Tensor | None],
        grid: Grid,
        destinations: Sequence[int],
        *,
        scales: bool = True,
        pdl: bool | None = None,
    ) -> None:
        """Quantize, and write each destination's payload; see `comm_lowp.sage2.grid.PayloadSpec`.

        Args:
            q: ``[B, L, H, D]`` on 16-byte aligned rows, any strides; None leaves its section alone.
            k: likewise.
            v: likewise.
            final: k_mean, q_amax, k_amax, v_scale as in `Final`; what nothing needs may be None.
            grid: this rank's place.
            destinations: P addresses of `chunk_bytes` each, 16-byte aligned: of a send buffer's chunks, or in the
                peers' windows.
            scales: whether to write the scales of Q and K too, of those whose amax is given, with the bytes behind
                them. With all operands and all of `final` every byte of the payload is written.
            pdl: see above.
        """
        some = next(x for x in (q, k, v) if x is not None)
        parts = sum(part for part, x in ((PART_Q, q), (PART_K, k), (PART_V, v)) if x is not None)
        with self._guard():
            self._pack(
                _cuda.raw_stream(self._index),
                _address(grid, some.dtype),
                *_view(q),
                *_view(k),
                *_view(v),
                *(0 if x is None else x.data_ptr() for x in final),
                *_padded(destinations),
                self._flags(pdl),
                parts | (PART_SCALES if scales else 0),
            )

    def unpack(
        self, received: torch.Tensor, grid: Grid, outs: Sequence[torch.Tensor | None], *, pdl: bool | None = None
    ) -> None:
        """Turn the payloads of all sources into what the consumer reads.

        Args:
            received: uint8 ``[P, chunk_bytes]``, source-major, contiguous.
            grid: `used_sequence` gives the scales' widths; `rank` is not looked at.
            outs: q8, k8, v8, q_scale, k_scale as ``grid.output_shapes``, contiguous, the first three 16-byte aligned.
                q8 and k8 may be None, both together: where the payload of a single rank was quantized in their place.
            pdl: see above.
        """
        with self._guard():
            self._unpack(
                _cuda.raw_stream(self._index),
                # The payload has no dtype any more.
                _address(grid, torch.bfloat16),
                received.data_ptr(),
                *(0 if out is None else out.data_ptr() for out in outs),
                grid.used_sequence,
                self._flags(pdl),
            )

    def direct(self, session: PeerSession, grid: Grid, dtype: torch.dtype) -> DirectScatter:
        """Prepare exchanges of one geometry that store straight into the peers' windows. Collective.

        Errors as in `TransportSession.window`.
        """
        return DirectScatter(self, session, grid, dtype)


def _padded(addresses: Sequence[int]) -> tuple[int, ...]:
    if len(addresses) > MAX_RANKS:
        raise ArgumentValueError(f"at most {MAX_RANKS} ranks, got {len(addresses)}")
    return (*addresses, *(0,) * (MAX_RANKS - len(addresses)))


class DirectScatter:
    """scatter_qkv over windows: no send buffer, no separate exchange, no other collective; `Kernels.direct` makes it.

    A call is three kernels, in one call into the library: statistics and their gather; what follows from them,
    quantize and pack into the peers' windows, and the end of the exchange; unpack. It is two operations of the
    session. A session that stalls fills the outputs with NaN bytes, as in every exchange over windows.

    Args:
        kernels: of this rank's device.
        session: a window is allocated of it, which lives as long as the session.
        grid: this rank's place.
        dtype: of the operands.
    """

    def __init__(self, kernels: Kernels, session: PeerSession, grid: Grid, dtype: torch.dtype) -> None:
        nbytes, offset = direct_window_bytes(grid)
        self._kernels = kernels
        self._session = session
        self.window = session.window(nbytes)
        self.scratch = kernels.scratch(grid, dtype)
        self.final = kernels.final(grid, dtype)
        # Kept here too, so that its address stays good.
        self._geometry = _geometry(grid, dtype)
        self._geometry_address = ctypes.addressof(self._geometry)
        self._storage = (*self.scratch.pointers, self.scratch.counters.data_ptr(), *self.final.pointers)
        number: int = self.window.number  # type: ignore[attr-defined]  # windows of such sessions are numbered
        self._tail: tuple[int, ...] = (
            *_padded(self.window.peer_pointers),
            offset,
            number,
            Operation.ALL_GATHER_SMALL,
            Operation.EXCHANGE_CHUNKS,
        )

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        outs: Sequence[torch.Tensor],
        *,
        pdl: bool | None = None,
    ) -> None:
        """Encode and exchange, on the current stream. Collective.

        Args:
            q: ``[B, L, H, D]`` on 16-byte aligned rows, any strides.
            k: likewise.
            v: likewise.
            outs: q8, k8, v8, q_scale, k_scale, v_scale as ``grid.output_shapes(grid.used_sequence)``, contiguous,
                16-byte aligned.
            pdl: see above.

        Raises:
            PeerStalledError: an earlier operation of the session has stalled.
        """
        launch = self.prepare(q, k, v, outs, pdl=pdl)
        with self._kernels._guard():  # pyright: ignore[reportPrivateUsage]
            launch()

    def prepare(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        outs: Sequence[torch.Tensor],
        *,
        pdl: bool | None = None,
    ) -> DirectLaunch:
        """Return a call with this storage, to be made any number of times; arguments as of `__call__`."""
        fields = (
            *_view(q),
            *_view(k),
            *_view(v),
            *self._storage,
            *[out.data_ptr() for out in outs],
            *self._tail,
            self._kernels._flags(pdl),  # pyright: ignore[reportPrivateUsage]
        )
        return DirectLaunch(self, self._kernels.scatter, self._session, self._geometry_address, fields)

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The storage that outputs must not overlap."""
        return (self.window.local, *self.scratch.tensors, self.scratch.counters, *self.final)


class DirectLaunch:
    """A call of a `DirectScatter` whose storage is known; `DirectScatter.prepare` makes it.

    It keeps addresses and not the tensors. Calling it is collective, and makes the call on the current stream; the
    caller has made the device current, and raises what `DirectScatter` does.
    """

    __slots__ = ("_context", "_fields", "_geometry", "_owner", "_pack", "_packed", "_run", "_session")

    def __init__(
        self,
        owner: DirectScatter,
        parts: tuple[Callable[..., bytes], Callable[[bytes], None]],
        session: PeerSession,
        geometry: int,
        fields: tuple[int, ...],
    ) -> None:
        self._owner = owner  # which has the storage behind the addresses
        self._pack, self._run = parts
        self._session = session
        self._geometry = geometry
        self._fields = fields
        self._context: tuple[int, int] | None = None
        self._packed = b""

    def __call__(self) -> None:
        """Make the call."""
        # As `comm_core.allreduce.known.KnownCall.launch` does it. A base class for the two was tried: it has one more
        # function on this path, and one more constructor where an all-reduce meets new storage, for these few lines.
        context = self._session.launch_context()
        if context != self._context:
            # On another stream, or after the session has moved its struct.
            stream, session = context
            self._packed = self._pack(stream, self._geometry, session, *self._fields)
            self._context = context
        self._run(self._packed)


@lru_cache(64)
def load(device: torch.device) -> Kernels:
    """Return the kernels on a CUDA device; they are built at first use, and loaded.

    Errors as in `comm_core.jit.load`.
    """
    normalized = _cuda.normalize_device(device)
    module = jit.load(MODULE, normalized)
    major = int(_cuda.device_properties(normalized.index).compute_capability.split(".")[0])
    return Kernels(module, normalized, pdl=major >= 9)
