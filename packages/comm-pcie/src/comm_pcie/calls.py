"""What the sessions of every route ask of a call, with the words in which they refuse one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from comm_core import _cuda
from comm_core.errors import ArgumentValueError, UnsupportedError
from comm_core.transport.plan import Plan

__all__ = ["BoundStream", "buffer_bytes", "refuse_head_chunks", "refuse_output"]

_REFUSED = frozenset({"scatter_qkv_head_chunk", "gather_output_head_chunk"})


class BoundStream:
    """Keeps the calls of a communicator on the stream of the first one.

    Args:
        current: returns the handle of the current stream of the communicator's device.
    """

    def __init__(self, current: Callable[[], int]) -> None:
        self._current = current
        self._stream: int | None = None

    def bind(self) -> None:
        """Take the current stream for that of this communicator, or refuse it.

        Raises:
            UnsupportedError: the first call was on another one.
        """
        stream = self._current()
        # Captured calls are ordered by whoever replays the graph.
        if stream == self._stream or _cuda.is_capturing():
            return
        if self._stream is not None:
            raise UnsupportedError(
                f"a communicator over 'pcie' stays on the stream of its first call ({self._stream:#x}), this "
                f"one is on {stream:#x}: use that stream, or a communicator for each"
            )
        self._stream = stream


def refuse_head_chunks(plan: Plan) -> None:
    """Refuse the calls that no route of this transport has.

    Raises:
        UnsupportedError: it is one of them.
    """
    if plan.operation in _REFUSED:
        raise UnsupportedError(
            f"{plan.operation}: 'pcie' has no head-chunk calls: pack the band and use scatter_heads, or "
            "gather_heads and merge it (pack_ulysses_qkv_head_chunk, merge_ulysses_output_head_chunk), or "
            "exchange_chunks"
        )


def refuse_output(plan: Plan, inside: bool) -> ArgumentValueError:
    """Return the refusal of an output that is no registered one, or too small.

    Args:
        plan: the call.
        inside: whether the memory is that of some output.
    """
    what = "is a view that does not begin where the output does" if inside else "is ordinary memory"
    return ArgumentValueError(
        f"{plan.operation}: 'pcie' writes outputs from allocate_output alone, from their beginning on and of at "
        f"least {plan.target_bytes} bytes; this one {what}, or is too small"
    )


def buffer_bytes(out: torch.Tensor, shape: Sequence[int], capacity: int | None) -> int:
    """Return the bytes of an operand of `shape` in the input buffer behind `out`.

    Args:
        out: the output.
        shape: of the operand, in elements of `out`'s type.
        capacity: bytes of the buffer, None where `out` is no registered output.

    Raises:
        ArgumentValueError: there is no such buffer, or `shape` does not fit it.
    """
    if capacity is None:
        raise ArgumentValueError(
            "input_buffer: out must be an output of this communicator's allocate_output, and begin where it does"
        )
    nbytes = out.element_size()
    for size in shape:
        if type(size) is not int or size < 1:
            raise ArgumentValueError(f"input_buffer: shape must be positive ints, got {tuple(shape)}")
        nbytes *= size
    if nbytes > capacity:
        raise ArgumentValueError(
            f"input_buffer: {tuple(shape)} has {nbytes} bytes, the buffer of this output {capacity}"
        )
    return nbytes
