"""Checks of values, for debugging: NaN and infinity in live rows, and rows of padding that are not zero.

They read the inputs and wait for the device, so they run in checked mode (``COMM_CHECK=1``) only, where a rank that
refuses its arguments makes all ranks raise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comm_core.errors import ArgumentValueError

if TYPE_CHECKING:
    from comm_lowp.sage2.grid import Grid

__all__ = ["check_finite", "check_padding"]


def _first(bad: torch.Tensor) -> list[int]:
    """Return the position of the first True of `bad`."""
    flat = int(bad.flatten().to(torch.uint8).argmax())
    place: list[int] = []
    for size in reversed(bad.shape):
        flat, index = divmod(flat, size)
        place.insert(0, index)
    return place


def check_finite(grid: Grid, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse NaN and infinity in live rows: they would become a scale, or the mean, of everything around them.

    Raises:
        ArgumentValueError: names the rank, the tensor and the first position ``[b, t, h, d]`` of this rank.
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        bad = ~torch.isfinite(x[:, : grid.live_rows])
        if bool(bad.any()):
            place = _first(bad)
            raise ArgumentValueError(
                f"{name}{place} of rank {grid.rank} is {x[tuple(place)].item()} ([b, t, h, d]; {int(bad.sum())} live "
                "values are not finite): sage2 encodes finite values only"
            )


def check_padding(grid: Grid, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse rows beyond the live ones that are not zero: they would get into scales and into the mean.

    Raises:
        ArgumentValueError: names the rank, the tensor and the first position ``[b, t, h, d]`` of this rank.
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        bad = x[:, grid.live_rows :] != 0
        if bool(bad.any()):
            b, t, h, d = _first(bad)
            t += grid.live_rows
            raise ArgumentValueError(
                f"{name}{[b, t, h, d]} of rank {grid.rank} is {x[b, t, h, d].item()}, and this rank's rows from "
                f"{grid.live_rows} on lie beyond used_sequence={grid.used_sequence}: set them to zero before the call"
            )
