"""From a caller's arguments to a `Call`: every check, in order, and the plan; at once where the geometry is known."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from comm_core._dtypes import dtype_name
from comm_core._json import Json, JsonObject
from comm_core.errors import ArgumentValueError
from comm_core.transport.interface import Properties
from comm_core.transport.plan import Plan
from comm_core.ulysses import plans, validation
from comm_core.ulysses.call import Call
from comm_core.ulysses.geometries import Geometries, Known
from comm_core.ulysses.head_chunk import check_heads, check_qkv
from comm_core.ulysses.validation import Limits, Shape, byte_range, check_disjoint, positive_int, strides_of
from comm_core.ulysses.workspace import UlyssesWorkspace, check_workspace

__all__ = ["WHOLE_HEAD_CALLS", "Preparation"]

WHOLE_HEAD_CALLS = ("scatter_heads", "gather_heads", "exchange_chunks")
"""Operations whose output's shape follows from the operand's alone."""


class Preparation:
    """Checks and plans the calls of one communicator. Local; used by one thread at a time.

    Args:
        limits: what the communicator accepts.
        rank: this rank.
        world_size: ranks of the group.
        backend: name of the transport, for messages.
        properties: of the transport's session; None where nothing is exchanged (one rank).
    """

    def __init__(
        self, limits: Limits, rank: int, world_size: int, backend: str, properties: Properties | None
    ) -> None:
        self._limits = limits
        self._rank = rank
        self._size = world_size
        self._backend = backend
        self._packs = properties is not None and properties.staging
        self._registered = properties is not None and properties.registered_outputs
        self._geometries = Geometries[Known]()

    # Each of these three looks for a known geometry first. Its key must hold everything that the checks below it read
    # and `Known.admits` does not: what is missing would be taken as it was in an earlier call.

    def whole(self, operation: str, x: object, out: object, dtype: object, workspace: object) -> Call:
        """Prepare a whole-head call; the arguments are those of `UlyssesCommunicator.scatter_heads`."""
        key = None
        if type(x) is torch.Tensor:
            try:
                element = x.dtype
                key = (operation, x.shape, element)
                known = self._geometries.find(key)
                if (
                    known is not None
                    and (dtype is element or (dtype is None and element is self._limits.dtype))
                    and x.is_contiguous()
                    and known.admits((x,), out, workspace)
                ):
                    return known.call((x,), out, workspace)
            except (RuntimeError, NotImplementedError):
                pass  # a tensor that can't be asked such things; the checks say why
        return self._check_whole(key, operation, x, out, dtype, workspace)

    def scatter_qkv_head_chunk(
        self,
        query: object,
        key: object,
        value: object,
        head_offset: object,
        head_count: object,
        out: object,
        workspace: object,
    ) -> Call:
        """Prepare a call of `UlyssesCommunicator.scatter_qkv_head_chunk`."""
        which = None
        if (
            type(query) is torch.Tensor
            and type(key) is torch.Tensor
            and type(value) is torch.Tensor
            # True and 1 are one key.
            and type(head_offset) is type(head_count) is int
        ):
            try:
                shape = query.shape
                strides = query.stride(), key.stride(), value.stride()
                which = ("scatter_qkv_head_chunk", shape, strides, head_offset, head_count)
                known = self._geometries.find(which)
                operands = (query, key, value)
                if (
                    known is not None
                    and key.shape == shape
                    and value.shape == shape
                    # Without an output, where the result goes depends on the workspace.
                    and out is not None
                    and known.admits(operands, out, workspace)
                ):
                    return known.call(operands, out, workspace)
            except (RuntimeError, NotImplementedError):
                pass
        return self._check_scatter_qkv(which, query, key, value, head_offset, head_count, out, workspace)

    def gather_output_head_chunk(
        self, x: object, local_heads: object, head_offset: object, out: object, workspace: object
    ) -> Call:
        """Prepare a call of `UlyssesCommunicator.gather_output_head_chunk`."""
        key = None
        if type(x) is torch.Tensor and type(local_heads) is type(head_offset) is int:
            try:
                key = ("gather_output_head_chunk", x.shape, x.stride(), local_heads, head_offset)
                known = self._geometries.find(key)
                if known is not None and out is not None and known.admits((x,), out, workspace):
                    return known.call((x,), out, workspace)
            except (RuntimeError, NotImplementedError):
                pass
        return self._check_gather_output(key, x, local_heads, head_offset, out, workspace)

    def output(self, x: object, operation: str, dtype: object) -> tuple[Shape, torch.dtype]:
        """Return shape and element type of an output for whole-head calls like ``operation(x)``.

        Raises:
            ArgumentTypeError, ArgumentValueError: there are no such calls.
        """
        if operation not in WHOLE_HEAD_CALLS:
            raise ArgumentValueError(f"op must be one of {WHOLE_HEAD_CALLS}, got {operation!r}")
        element = self._limits.element(dtype)
        return self._output_shape(operation, validation.check_operand(x, "x", self._limits, element)), element

    # The full checks

    def _check_whole(
        self, key: Hashable, operation: str, x: object, out: object, dtype: object, workspace: object
    ) -> Call:
        element = self._limits.element(dtype)
        shape = validation.check_operand(x, "x", self._limits, element)
        assert isinstance(x, torch.Tensor)
        shape_out = self._output_shape(operation, shape)
        target = None if out is None else validation.check_out(out, shape_out, self._limits, element)
        if target is not None and not (self._size == 1 and target is x):
            check_disjoint(target, "out", x, "x")
        staging = self._check_staging(workspace, x.numel(), element, (x, "x"), (target, "out"))
        self._check_registered(target)
        if operation == "exchange_chunks":
            plan = plans.exchange_chunks(shape[3], element.itemsize, self._rank, self._size)
        else:
            build = plans.scatter_heads if operation == "scatter_heads" else plans.gather_heads
            plan = build(shape, element.itemsize, self._rank, self._size)
        geometry: dict[str, Json] = {"shape": list(shape), "dtype": dtype_name(element)}
        return self._found_good(key, plan, (x,), shape_out, element, x.numel(), geometry, target, staging)

    def _output_shape(self, operation: str, shape: Shape) -> Shape:
        """Return what a whole-head operation makes of `shape`.

        Raises:
            ArgumentValueError: it can't be split evenly.
        """
        a, b, c, d = shape
        size = self._size
        if operation == "scatter_heads":
            return (a, b * size, check_heads(c, size, "x"), d)
        if operation == "gather_heads":
            if b % size:
                raise ArgumentValueError(
                    f"x has a global sequence of {b}, which {size} ranks can't share evenly: uneven sequences "
                    f"are not supported yet; pad to {-(-b // size) * size} before scatter_heads and cut it later"
                )
            return (a, b // size, c * size, d)
        if (a, b, c) != (1, 1, size):
            raise ArgumentValueError(f"x must have shape (1, 1, {size}, chunk), got {shape}")
        return shape

    def _check_scatter_qkv(
        self,
        which: Hashable,
        query: object,
        key: object,
        value: object,
        head_offset: object,
        head_count: object,
        out: object,
        workspace: object,
    ) -> Call:
        element = self._limits.dtype
        shape = check_qkv(query, key, value, self._limits, element)
        assert isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)
        b, s, h, d = shape
        offset, count = validation.check_band(head_offset, head_count, check_heads(h, self._size, "query"))
        shape_out = (b, s * self._size, count, 3 * d)
        validation.check_capacity(shape_out, element, self._limits.max_bytes, "the fused payload")
        operands = ((query, "query"), (key, "key"), (value, "value"))
        target = None
        if out is not None:
            target = validation.check_out(out, shape_out, self._limits, element)
            for operand, name in operands:
                check_disjoint(target, "out", operand, name)
        numel = shape_out[0] * shape_out[1] * shape_out[2] * shape_out[3]
        staging = self._check_staging(workspace, numel, element, *operands, (target, "out"))
        self._check_registered(target)
        strides = (strides_of(query), strides_of(key), strides_of(value))
        plan = plans.scatter_qkv_head_chunk(
            shape, strides, element.itemsize, self._rank, self._size, head_offset=offset, head_count=count
        )
        geometry: dict[str, Json] = {
            "shape": list(shape),
            "dtype": dtype_name(element),
            "head_offset": offset,
            "head_count": count,
        }
        if target is None and staging is not None and b == 1 and self._packs:
            target = staging.recv_buffer[:numel].view(shape_out)
        return self._found_good(
            which, plan, (query, key, value), shape_out, element, numel, geometry, target, staging
        )

    def _check_gather_output(
        self, key: Hashable, x: object, local_heads: object, head_offset: object, out: object, workspace: object
    ) -> Call:
        element = self._limits.dtype
        shape = validation.check_strided(x, "x", self._limits, element)
        assert isinstance(x, torch.Tensor)
        validation.check_capacity(shape, element, self._limits.max_bytes, "x")
        b, s, h, d = self._output_shape("gather_heads", shape)
        local = positive_int(local_heads, "local_heads")
        offset, _ = validation.check_band(head_offset, shape[2], local)
        shape_out = (b, s, self._size * local, d)
        target = validation.check_out(out, shape_out, self._limits, element)
        check_disjoint(target, "out", x, "x")
        numel = b * s * h * d
        staging = self._check_staging(workspace, numel, element, (x, "x"), (target, "out"))
        self._check_registered(target)
        plan = plans.gather_output_head_chunk(
            shape,
            strides_of(x),
            element.itemsize,
            self._rank,
            self._size,
            local_heads=local,
            head_offset=offset,
        )
        geometry: dict[str, Json] = {
            "shape": list(shape),
            "dtype": dtype_name(element),
            "local_heads": local,
            "head_offset": offset,
        }
        return self._found_good(key, plan, (x,), shape_out, element, numel, geometry, target, staging)

    def _check_staging(
        self,
        workspace: object,
        numel: int,
        element: torch.dtype,
        *operands: tuple[torch.Tensor | None, str],
    ) -> UlyssesWorkspace | None:
        if workspace is None:
            return None
        if self._registered:
            raise ArgumentValueError(f"{self._backend} has no staging: workspace must be None")
        staging = check_workspace(workspace, numel, self._limits, element)
        for tensor, name in operands:
            if tensor is not None:
                check_disjoint(tensor, name, staging.send_buffer, "the workspace's send buffer")
                check_disjoint(tensor, name, staging.recv_buffer, "the workspace's receive buffer")
        return staging

    def _check_registered(self, out: torch.Tensor | None) -> None:
        if out is None and self._registered:
            raise ArgumentValueError(f"{self._backend} needs out= from allocate_output")

    def _found_good(
        self,
        key: Hashable,
        plan: Plan,
        operands: Sequence[torch.Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        numel: int,
        geometry: JsonObject,
        out: torch.Tensor | None,
        workspace: UlyssesWorkspace | None,
    ) -> Call:
        """Return the call, and keep its geometry where it has a key."""
        if key is not None:
            extents: list[int] = []
            for operand in operands:
                start, end = byte_range(operand)
                extents.append(end - start)
            out_bytes = dtype.itemsize
            for size in shape:
                out_bytes *= size
            known = Known(
                plan=plan,
                shape=shape,
                dtype=dtype,
                extents=tuple(extents),
                itemsize=dtype.itemsize,
                out_bytes=out_bytes,
                numel=numel,
                geometry=geometry,
                device=self._limits.device,
                registered=self._registered,
            )
            self._geometries.keep(key, known)
        return Call(plan, operands, shape, dtype, out, workspace, geometry)
