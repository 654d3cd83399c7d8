"""The prepared exchange: what `prepare_qkv` returns and what `scatter_qkv` does.

A call makes one gather (of statistics) and one exchange (of the payload), and no other collective::

    local statistics -> gather -> final statistics -> quantize and pack -> exchange -> unpack
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, NoReturn, cast

import torch

from comm_core import _cuda
from comm_core._dtypes import dtype_name
from comm_core._json import Json, JsonObject, canonical
from comm_core.consensus import joint
from comm_core.errors import ArgumentTypeError, ArgumentValueError, JointValueError, UnsupportedError
from comm_core.ulysses.codec import CodecHost, CodecWorkspace, EncodedCall
from comm_core.ulysses.validation import byte_range
from comm_lowp import _env, finite
from comm_lowp.known import KnownCall, KnownCalls, Launch
from comm_lowp.pipeline import Pipeline, make_pipeline
from comm_lowp.sage2 import primitives
from comm_lowp.sage2.dispatch import kernels_for
from comm_lowp.sage2.grid import Grid, Layout, PayloadSpec
from comm_lowp.sage2.reference import output_dtypes

if TYPE_CHECKING:
    from comm_lowp.kernels import Kernels

__all__ = ["UlyssesQKV", "UlyssesQKVWorkspace", "prepare"]

_FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


class UlyssesQKV(NamedTuple):
    """Quantized operands for SageAttention2, as `scatter_qkv` returns them.

    The record can't be changed; its tensors are written again where it is passed as ``out=``. The softmax scale is
    not in it: it belongs to the attention call.

    Attributes:
        q: INT8 ``[B, S, H/P, D]``.
        k: INT8 ``[B, S, H/P, D]``, of K minus its global mean.
        v: float8_e4m3fn ``[B, D, H/P, S_pad]``, rows in the consumer's order, zero from S on.
        q_scale: fp32 ``[B, H/P, width]``; the widths follow from `used_sequence`.
        k_scale: fp32 ``[B, H/P, width]``.
        v_scale: fp32 ``[B, H/P, D]``.
        layout: of the consumer, ``"sage2_sm90"`` or ``"sage2_sm89_sm120"``.
        logical_sequence: S, rows of q and k.
        used_sequence: U, live rows: attention uses ``q[:, :U]`` and ``k[:, :U]``.
        input_dtype: of the inputs, and of attention's output.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    layout: str
    logical_sequence: int
    used_sequence: int
    input_dtype: torch.dtype


class UlyssesQKVWorkspace(CodecWorkspace):
    """Geometry and reusable storage of prepared exchanges; `UlyssesCommunicator.prepare_qkv` makes it.

    It belongs to its communicator: no other one takes it, nor does its own after `close`. Its metadata can't be
    changed. Calls with it run one after the other. The storage lives as long as the object (outputs that a transport
    registers, and windows, until the communicator is closed); there is nothing to close.
    """

    _host: CodecHost
    _grid: Grid
    _pipeline: Pipeline
    _last_stream: int | None
    # Asked on every call, and looked up once.
    _geometry: JsonObject
    _metadata: tuple[str, int, int, torch.dtype]
    _outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    _sent_bytes: int
    _known: KnownCalls

    def __init__(self, *arguments: object, **keywords: object) -> NoReturn:
        raise ArgumentTypeError("UlyssesQKVWorkspace can't be constructed: prepare_qkv of a communicator makes it")

    # Metadata

    @property
    def qkv_shape(self) -> tuple[int, int, int, int]:
        """Local ``[B, L, H, D]`` of Q, K and V."""
        return self._grid.shape

    @property
    def world_size(self) -> int:
        """P, ranks of the group."""
        return self._grid.world_size

    @property
    def dtype(self) -> torch.dtype:
        """Of Q, K and V."""
        return self._host.dtype

    @property
    def device(self) -> torch.device:
        """Of everything."""
        return self._host.device

    @property
    def used_sequence(self) -> int:
        """U, live global rows."""
        return self._grid.used_sequence

    @property
    def logical_sequence(self) -> int:
        """S = P * L, with the rows of padding."""
        return self._grid.sequence

    @property
    def quantization(self) -> str:
        """Name of the encoding: ``"sage2"``."""
        return "sage2"

    @property
    def layout(self) -> str:
        """Name of the consumer's layout."""
        return self._grid.layout.name

    @property
    def transport(self) -> str:
        """Name of the transport that carries statistics and payload: the communicator's backend."""
        return self._host.backend

    @property
    def route(self) -> str:
        """How the payload travels: ``"exchange"`` (packed, then exchanged) or ``"direct"`` (stored in place)."""
        return self._pipeline.name

    @property
    def payload(self) -> PayloadSpec:
        """Where everything is in one rank's payload."""
        return self._grid.payload

    @property
    def payload_bytes(self) -> int:
        """Bytes of one rank's payload, scales and padding included; what ``max_bytes`` must cover."""
        return self._grid.payload.payload_bytes

    @property
    def statistics_bytes(self) -> int:
        """Bytes of statistics that one rank gives to the gather."""
        return 4 * self._grid.statistics_elems

    @property
    def scratch(self) -> tuple[torch.Tensor, ...]:
        """The storage, for looking at: statistics, payloads, and what else the pipeline reuses."""
        return self._pipeline.buffers

    def __repr__(self) -> str:
        """Return what was prepared."""
        return (
            f"UlyssesQKVWorkspace(qkv_shape={self.qkv_shape}, world_size={self.world_size}, "
            f"dtype={dtype_name(self.dtype)}, device={self.device}, used_sequence={self.used_sequence}, "
            f"layout={self.layout!r}, transport={self.transport!r}, payload_bytes={self.payload_bytes})"
        )

    # Calls

    def scatter_qkv(
        self, host: CodecHost, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: object | None
    ) -> UlyssesQKV:
        """See `UlyssesCommunicator.scatter_qkv`."""
        known = self._find(q, k, v, out)
        if known is not None and known.launch is not None and host is self._host and not host.checked:
            target = cast("UlyssesQKV", out)
            host.launch("scatter_qkv", known.launch, target[:6], self._sent_bytes)
            return target
        return cast("UlyssesQKV", host.run("scatter_qkv", self._prepare, host, known, q, k, v, out))

    def _find(self, q: object, k: object, v: object, out: object | None) -> KnownCall | None:
        """Return the call with this storage if it was found good before; raises nothing."""
        if out is None:
            return self._known.find((q, k, v))
        try:
            if type(out) is not UlyssesQKV or out[6:] != self._metadata:
                return None
        except Exception:
            return None  # fields of types that can't be compared; the checks say so, where all ranks hear it
        return self._known.find((q, k, v, *out[:6]))

    def _prepare(
        self,
        host: CodecHost,
        known: KnownCall | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: object | None,
    ) -> EncodedCall:
        """Check this rank's arguments, unless the same storage was found good before."""
        if host is not self._host:
            raise ArgumentValueError(
                "the workspace belongs to another communicator: prepare_qkv makes one for this communicator"
            )
        if known is None:
            self._check(q, k, v, out)
        target = cast("UlyssesQKV | None", out)
        written = () if target is None else target[:6]
        if known is not None:
            launch = known.launch
        else:
            launch = self._pipeline.prepare(q, k, v, written) if written else None
            self._known.keep((q, k, v, *written), launch)
        if host.checked:
            finite.check_finite(self._grid, q, k, v)
            finite.check_padding(self._grid, q, k, v)
        execute = partial(self._execute, q, k, v, target) if launch is None else partial(_launch, launch, target)
        return EncodedCall(self._geometry, execute, written, self._sent_bytes)

    def _check(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: object | None) -> None:
        for x, name in ((q, "q"), (k, "k"), (v, "v")):
            self._check_operand(x, name)
        if out is not None:
            self._check_out(out, q, k, v)

    def _check_operand(self, x: object, name: str) -> None:
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.device != self.device or x.dtype != self.dtype or tuple(x.shape) != self.qkv_shape:
            raise ArgumentValueError(
                f"{name} must be {self.dtype} {list(self.qkv_shape)} on {self.device} as prepared, got {x.dtype} "
                f"{list(x.shape)} on {x.device}"
            )
        primitives.check_operand(x, name)

    def _check_out(self, out: object, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if not isinstance(out, UlyssesQKV):
            raise ArgumentTypeError(f"out must be a UlyssesQKV, got {type(out).__name__}")
        for name, have, want in zip(UlyssesQKV._fields[6:], out[6:], self._metadata, strict=True):
            if have != want:
                raise ArgumentValueError(f"out.{name} must be {want!r} as prepared, got {have!r}")
        for name, tensor, (shape, dtype) in zip(_FIELDS, out[:6], self._outputs, strict=True):
            if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ArgumentTypeError(f"out.{name} must be a torch.Tensor, got {type(tensor).__name__}")
            if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != self.device:
                raise ArgumentValueError(
                    f"out.{name} must be {dtype} {list(shape)} on {self.device}, got {tensor.dtype} "
                    f"{list(tensor.shape)} on {tensor.device}"
                )
            if not tensor.is_contiguous():
                raise ArgumentValueError(f"out.{name} must be contiguous, got strides {tensor.stride()}")
            if tensor.data_ptr() % 16:
                raise ArgumentValueError(
                    f"out.{name} must begin at a 16-byte aligned address, got {tensor.data_ptr():#x}"
                )
        self._check_apart(out, q, k, v)

    def _check_apart(self, out: UlyssesQKV, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Refuse outputs that share bytes with each other, with an input or with the workspace."""
        outputs = [(*byte_range(t), f"out.{name}") for name, t in zip(_FIELDS, out[:6], strict=True)]
        others = [(*byte_range(t), name) for t, name in ((q, "q"), (k, "k"), (v, "v"))]
        others += [(*byte_range(t), "the workspace's storage") for t in self.scratch]
        for i, (start, end, name) in enumerate(outputs):
            for other_start, other_end, other in (*outputs[:i], *others):
                if start < other_end and other_start < end:
                    raise ArgumentValueError(f"{name} must not overlap {other}")

    def _execute(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: UlyssesQKV | None) -> UlyssesQKV:
        if not self._pipeline.orders_streams:
            self._order_streams()
        result = self._empty() if out is None else out
        self._pipeline(q, k, v, result[:6])
        return result

    def _empty(self) -> UlyssesQKV:
        """Return new outputs, which later calls don't touch."""
        device = self._host.device
        q, k, v, q_scale, k_scale, v_scale = [
            torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self._outputs
        ]
        return UlyssesQKV(q, k, v, q_scale, k_scale, v_scale, *self._metadata)

    def _order_streams(self) -> None:
        """Let the current stream wait for the last one that used the storage."""
        if self.device.type != "cuda" or _cuda.is_capturing():
            return
        stream = _cuda.raw_stream(self.device.index)
        if self._last_stream is not None and stream != self._last_stream:
            _cuda.wait_for_stream(self.device, self._last_stream)
        self._last_stream = stream


def _launch(launch: Launch, out: UlyssesQKV | None) -> UlyssesQKV | None:
    launch()
    return out


# Preparation


def _geometry(grid: Grid, dtype: torch.dtype) -> dict[str, Json]:
    return {
        "qkv_shape": list(grid.shape),
        "dtype": dtype_name(dtype),
        "used_sequence": grid.used_sequence,
        "layout": grid.layout.name,
    }


def prepare(host: CodecHost, qkv_shape: object, used_sequence: object) -> UlyssesQKVWorkspace:
    """See `UlyssesCommunicator.prepare_qkv`: three stages, each with a joint outcome.

    A failure on any rank raises on all of them, and costs nothing but this preparation.
    """
    grids: list[Grid] = []

    def geometry() -> Json:
        grids.append(_check_geometry(host, qkv_shape, used_sequence))
        return _geometry(grids[0], host.dtype)

    what = "prepare_qkv: shape and configuration"
    shared = joint(host.group, what, geometry, error=JointValueError)
    if len({canonical(item) for item in shared}) > 1:
        raise JointValueError(
            f"{what}: the ranks differ", {rank: canonical(item) for rank, item in enumerate(shared)}
        )
    grid = grids[0]
    # A cold build may take longer than a rank may be late.
    seconds = max(host.group.timeout_s, _env.build_timeout_s()) if host.device.type == "cuda" else None
    kernels: list[Kernels] = []

    def load() -> Json:
        found = kernels_for(host.device, grid.world_size)
        kernels.extend(() if found is None else (found,))
        return found is not None

    everywhere = all(joint(host.group, "prepare_qkv: kernels", load, timeout_s=seconds))
    made: list[Pipeline] = []

    def allocate() -> None:
        # Storage that was made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            made.append(make_pipeline(host, grid, kernels[0] if kernels else None, everywhere=everywhere))
        # Counters begin with 0, and calls come on any stream: this one may still be busy with something else.
        _cuda.synchronize(host.device)

    joint(host.group, "prepare_qkv: allocate", allocate)
    return _new_workspace(host, grid, made[0])


def _check_geometry(host: CodecHost, qkv_shape: object, used_sequence: object) -> Grid:
    if _cuda.is_capturing():
        raise UnsupportedError("prepare_qkv can't be captured in a CUDA graph: call it before the capture")
    if host.dtype not in primitives.DTYPES:
        raise ArgumentValueError(f"sage2 encodes float16 and bfloat16, the communicator's dtype is {host.dtype}")
    if isinstance(qkv_shape, (str, bytes)) or not isinstance(qkv_shape, Sequence):
        raise ArgumentTypeError(f"qkv_shape must be a sequence of four ints, got {type(qkv_shape).__name__}")
    sizes = list(cast("Sequence[object]", qkv_shape))
    if len(sizes) != 4 or any(type(size) is not int for size in sizes):
        raise ArgumentTypeError(f"qkv_shape must be four ints [B, L, H, D], got {sizes}")
    b, rows, heads, d = cast("list[int]", sizes)
    if min(b, rows, heads, d) < 1:
        raise ArgumentValueError(f"qkv_shape must be positive, got {sizes}")
    if d not in primitives.HEAD_DIMS:
        raise ArgumentValueError(f"D must be 64 or 128, got {d} in qkv_shape {sizes}")
    size = host.group.size
    if heads % size:
        raise ArgumentValueError(f"H must be divisible by the {size} ranks, got {heads} in qkv_shape {sizes}")
    layout = _layout(host)
    used = primitives.check_used(used_sequence, size * rows)
    grid = Grid(layout, b, rows, heads, d, host.group.rank, size, used)
    primitives.check_elements(grid.payload)
    need = grid.payload.payload_bytes
    if need > host.max_bytes:
        raise ArgumentValueError(
            f"the payload of qkv_shape {sizes} has {need} bytes with scales and padding, and the communicator was "
            f"made for max_bytes={host.max_bytes}: make it with max_bytes={need} or more (3 * q.nbytes is enough)"
        )
    if host.session is not None and 1 not in host.session.properties.itemsizes:
        raise UnsupportedError(f"{host.backend} moves no single bytes, which a payload consists of")
    return grid


def _layout(host: CodecHost) -> Layout:
    return primitives.find_layout(_env.layout(), host.device)


def _new_workspace(host: CodecHost, grid: Grid, pipeline: Pipeline) -> UlyssesQKVWorkspace:
    workspace = object.__new__(UlyssesQKVWorkspace)
    workspace._host = host  # pyright: ignore[reportPrivateUsage]
    workspace._grid = grid  # pyright: ignore[reportPrivateUsage]
    workspace._pipeline = pipeline  # pyright: ignore[reportPrivateUsage]
    workspace._last_stream = None  # pyright: ignore[reportPrivateUsage]
    workspace._geometry = _geometry(grid, host.dtype)  # pyright: ignore[reportPrivateUsage]
    workspace._metadata = (  # pyright: ignore[reportPrivateUsage]
        grid.layout.name,
        grid.sequence,
        grid.used_sequence,
        host.dtype,
    )
    workspace._outputs = tuple(  # pyright: ignore[reportPrivateUsage]
        zip(grid.output_shapes(grid.used_sequence), output_dtypes(), strict=True)
    )
    away = grid.payload.chunk_bytes + 4 * grid.statistics_elems
    workspace._sent_bytes = (grid.world_size - 1) * away  # pyright: ignore[reportPrivateUsage]
    workspace._known = KnownCalls()  # pyright: ignore[reportPrivateUsage]
    return workspace
