"""What one exchange moves, as bytes within registered buffers; and what the NIC can't address. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

__all__ = ["MAX_STRIDE", "Band", "Geometry", "Transfer", "problem_of"]

MAX_STRIDE = 65_535
"""Largest pitch and width of a strided band in bytes: an entry of an interleaved key has 16 bits for each, and the
library that fills it in does not look. Larger values would be cut, and wrong bytes sent without an error."""


class Band(NamedTuple):
    """`rows` rows of `width` bytes, `pitch` bytes apart, from `offset` of a buffer on; one row is a linear range.

    Attributes:
        offset: of the first byte, from the start of the buffer.
        rows: at least 1.
        width: bytes of a row.
        pitch: bytes from one row to the next; of no meaning with one row.
    """

    offset: int
    rows: int
    width: int
    pitch: int

    @property
    def nbytes(self) -> int:
        """Bytes that it holds."""
        return self.rows * self.width

    @property
    def end(self) -> int:
        """Offset behind its last byte."""
        return self.offset + (self.rows - 1) * self.pitch + self.width

    @property
    def strided(self) -> bool:
        """Whether it needs an interleaved key."""
        return self.rows > 1 and self.pitch != self.width


class Transfer(NamedTuple):
    """One peer's payload: from this rank's landing buffer to that peer's output.

    Attributes:
        source: band of this rank's landing buffer.
        target: band of the peer's output.
    """

    source: Band
    target: Band


class Geometry(NamedTuple):
    """All that a rank sends and receives in one exchange. Hashable, and kept by the engine once it was used.

    What a rank receives it must know as well: the band that a sender writes by one key is described by its owner.

    Attributes:
        sends: (peer, transfer), each peer of the engine once, in the order in which they are posted.
        receives: (peer, band of this rank's own output that it writes), each peer of the engine once.
    """

    sends: tuple[tuple[int, Transfer], ...]
    receives: tuple[tuple[int, Band], ...]


def problem_of(geometry: Geometry, sizes: Mapping[str, int]) -> str:
    """Return why `geometry` can't be exchanged, or an empty string.

    The same on all ranks for geometries that are the same exchange seen by each of them, since pitches and widths
    are; so a rank may refuse by it before anything is communicated.

    Args:
        geometry: of this rank.
        sizes: bytes of this rank's buffers: ``"landing"``, ``"output"``. Outputs are of one size on all ranks.
    """
    for peer, transfer in geometry.sends:
        if transfer.source.nbytes != transfer.target.nbytes:
            return f"rank {peer} is sent {transfer.source.nbytes} bytes into {transfer.target.nbytes}"
        for name, band, whole in (
            ("source", transfer.source, sizes["landing"]),
            ("target", transfer.target, sizes["output"]),
        ):
            found = _problem_of_band(band, whole)
            if found:
                return f"{name} of what rank {peer} is sent: {found}"
    for peer, band in geometry.receives:
        found = _problem_of_band(band, sizes["output"])
        if found:
            return f"what rank {peer} sends: {found}"
    return ""


def _problem_of_band(band: Band, whole: int) -> str:
    if band.offset < 0 or band.rows < 1 or band.width < 1 or (band.rows > 1 and band.pitch < band.width):
        return f"{band} is no band"
    if band.end > whole:
        return f"it ends at byte {band.end} of a buffer of {whole}"
    if band.strided and band.pitch > MAX_STRIDE:
        return (
            f"rows are {band.pitch} bytes apart, and an interleaved key holds at most {MAX_STRIDE}: use fewer heads, "
            "a smaller head dimension or element, or the p2p route"
        )
    if band.strided and band.rows > 0xFFFFFFFF:
        return f"{band.rows} rows are more than the 32 bits of an interleaved key"
    return ""
