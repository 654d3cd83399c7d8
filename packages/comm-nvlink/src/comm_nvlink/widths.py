"""Which widths of rows the copy engines are slow at, measured when a session is opened.

A pitched copy runs at the rate of a flat one, but for some widths: on an H200, rows of 10,240 bytes at 0.87 of it, or
rows of 3,072 into a pitched target at 0.8. Cut into pieces, as several pitched copies, such rows can be faster.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Mapping, Sequence

from comm_nvlink.routes import Widths

__all__ = ["PIECES", "SIDES", "WIDTHS", "Times", "as_text", "choose", "keys", "measure", "milliseconds", "slow"]

SIDES = ("source", "target")
WIDTHS = (256, 512, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 10240, 12288,
          14336, 15360, 16384, 20480)  # fmt: skip
"""Bytes of a row: heads times head dimension times bytes of an element, as models have them."""
PIECES = (2, 3)
"""That slow rows are tried in."""
_BYTES = 24 << 20
"""Of one measured copy: so many that its start is a twentieth of its time."""
_LEAST_BYTES = 32 << 20
"""A session whose staging is smaller has no copies of which this would matter."""
_REPEATS = 3
_SLOW = 0.93
"""Of the usual rate: what is slower is tried in pieces."""
_WORTH = 0.96
"""Pieces must take at most this share of the time."""

Times = Mapping[str, float]
"""``"side width pieces"`` -> milliseconds for a number of bytes that is the same for all."""


def keys() -> list[tuple[str, int]]:
    """Return every side and width."""
    return [(side, width) for side in SIDES for width in WIDTHS]


def measure(
    time_copy: Callable[[int, int, int, int, int, int], float],
    room: int,
    wanted: Sequence[tuple[str, int]],
    pieces: Sequence[int] = (1,),
) -> dict[str, float]:
    """Time copies of the wanted sides and widths. All ranks at once, so that both directions of the links are in use.

    Args:
        time_copy: takes target pitch, source pitch, width, rows and pieces, and a buffer's bytes; returns
            milliseconds.
        room: bytes of the target.
        wanted: sides and widths.
        pieces: that each row is cut into.

    Returns:
        `Times`; empty where there is too little room.
    """
    if room < _LEAST_BYTES:
        return {}
    nbytes = min(_BYTES, room // 2)
    found: dict[str, float] = {}
    for side, width in wanted:
        # The pitched side takes twice the room.
        rows = nbytes // width
        pitches = (width, 2 * width) if side == "source" else (2 * width, width)
        for count in pieces:
            times = [time_copy(*pitches, width, rows, count, 2 * nbytes) for _ in range(_REPEATS)]
            found[f"{side} {width} {count}"] = min(times) * nbytes / (rows * width)
    return found


def slow(everyone: Sequence[Times]) -> list[tuple[str, int]]:
    """Return the sides and widths that are slow on some rank; the same on all ranks."""
    if not all(everyone):
        return []
    slowest = _slowest(everyone)
    usual = statistics.median(slowest.values())
    return [key for key in keys() if _SLOW * slowest[_name(key, 1)] > usual]


def choose(everyone: Sequence[Times], candidates: Sequence[tuple[str, int]]) -> dict[tuple[str, int], int]:
    """Return the pieces for those `candidates` that gain by them, from all ranks' times; the same on all ranks."""
    slowest = _slowest(everyone)
    chosen: dict[tuple[str, int], int] = {}
    for key in candidates:
        best = min(PIECES, key=lambda count: (slowest[_name(key, count)], count))
        if slowest[_name(key, best)] <= _WORTH * slowest[_name(key, 1)]:
            chosen[key] = best
    return chosen


def _name(key: tuple[str, int], pieces: int) -> str:
    return f"{key[0]} {key[1]} {pieces}"


def _slowest(everyone: Sequence[Times]) -> dict[str, float]:
    return {name: max(times[name] for times in everyone) for name in everyone[0]}


def as_text(widths: Widths) -> Mapping[str, int]:
    """Return the choice for a log."""
    return {f"{side} {width}": pieces for (side, width), pieces in sorted(widths.items())}


def milliseconds(call: Callable[..., None], *arguments: int) -> float:
    """Call an entry point whose last pointer is where it writes a time."""
    value = ctypes.c_float()
    *fields, pieces = arguments
    call(*fields, ctypes.addressof(value), pieces, 0)
    return value.value
