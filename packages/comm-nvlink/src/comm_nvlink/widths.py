"""Which widths of rows the copy engines are slow at, measured when a session is opened.

A pitched copy runs at the rate of a flat one, but for some widths: on an H200, rows of 10,240 bytes at 0.87 of it, or
rows of 3,072 into a pitched target at 0.8. Cut into pieces, as several pitched copies, such rows can be faster.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence

from comm_nvlink.routes import Widths

__all__ = ["PIECES", "SIDES", "WIDTHS", "Times", "choose", "measure"]

SIDES = ("source", "target")
WIDTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288,
          14336, 15360, 16384, 20480)  # fmt: skip
"""Bytes of a row: heads times head dimension times bytes of an element, as models have them."""
PIECES = (1, 2, 3)
_BYTES = 8 << 20
"""Of one measured copy: some twenty microseconds, of which the start is a fifth."""
_LEAST_BYTES = 4 << 20
"""A session whose staging is smaller has no copies of which this would matter."""
_REPEATS = 2
_WORTH = 0.96
"""More pieces must take at most this share of the time."""

Times = Sequence[Sequence[float]]
"""For each side and width in order, and each number of pieces in order: milliseconds."""


def measure(time_copy: Callable[[int, int, int, int, int, int], float], room: int) -> list[list[float]]:
    """Time copies of all widths. All ranks at the same time, so that both directions of the links are in use.

    Args:
        time_copy: takes target pitch, source pitch, width, rows and pieces, and a buffer's bytes; returns milliseconds.
        room: bytes of the target.

    Returns:
        `Times`; empty where there is too little room.
    """
    if room < _LEAST_BYTES:
        return []
    found: list[list[float]] = []
    for side in SIDES:
        for width in WIDTHS:
            # The pitched side takes twice the room.
            rows = min(_BYTES, room // 2) // width
            pitches = (width, 2 * width) if side == "source" else (2 * width, width)
            found.append([
                min(time_copy(*pitches, width, rows, pieces, 2 * rows * width) for _ in range(_REPEATS))
                for pieces in PIECES
            ])  # fmt: skip
    return found


def choose(everyone: Sequence[Times]) -> dict[tuple[str, int], int]:
    """Return the widths that are cut, from all ranks' times: the same on all ranks."""
    chosen: dict[tuple[str, int], int] = {}
    if not all(everyone):
        return chosen
    keys = [(side, width) for side in SIDES for width in WIDTHS]
    for number, key in enumerate(keys):
        slowest = [max(times[number][i] for times in everyone) for i in range(len(PIECES))]
        best = min(range(len(PIECES)), key=lambda i: (slowest[i], i))
        if slowest[best] <= _WORTH * slowest[0]:
            chosen[key] = PIECES[best]
    return chosen


def as_text(widths: Widths) -> Mapping[str, int]:
    """Return the choice for a log."""
    return {f"{side} {width}": pieces for (side, width), pieces in sorted(widths.items())}


def milliseconds(call: Callable[..., None], *arguments: int) -> float:
    """Call an entry point whose last pointer is where it writes a time."""
    value = ctypes.c_float()
    *fields, pieces = arguments
    call(*fields, ctypes.addressof(value), pieces, 0)
    return value.value
