"""What is exchanged: sizes of the global operand, and the bytes that follow from them. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from comm_core.errors import ArgumentValueError

__all__ = ["CPU", "CPU_QUICK", "DEFAULT", "ITEMSIZE", "MIB", "OPERATIONS", "QUICK", "Geometry", "parse"]

MIB = 1 << 20
ITEMSIZE = 2
"""Bytes of an element: everything is measured in bfloat16."""
OPERATIONS = ("scatter_heads", "gather_heads")
_FORM = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")


class Geometry(NamedTuple):
    """A global operand ``[1, S, H, D]`` in bfloat16."""

    tokens: int
    heads: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        return f"S={self.tokens} H={self.heads}" + ("" if self.head_dim == 128 else f" D={self.head_dim}")

    def problem(self, ranks: int) -> str | None:
        """Return why `ranks` ranks can't exchange it, or None."""
        if self.tokens % ranks:
            return f"{self.tokens} tokens don't divide among {ranks} ranks"
        if self.heads % ranks:
            return f"{self.heads} heads don't divide among {ranks} ranks"
        return None

    def operand_bytes(self, ranks: int) -> int:
        """Bytes of one rank's operand."""
        return self.tokens // ranks * self.heads * self.head_dim * ITEMSIZE

    def remote_bytes(self, ranks: int) -> int:
        """Bytes of it that leave the rank."""
        return self.operand_bytes(ranks) // ranks * (ranks - 1)

    def shape(self, operation: str, ranks: int) -> tuple[int, int, int, int]:
        """Shape of one rank's operand."""
        if operation == "scatter_heads":
            return (1, self.tokens // ranks, self.heads, self.head_dim)
        return (1, self.tokens, self.heads // ranks, self.head_dim)

    def shape_out(self, operation: str, ranks: int) -> tuple[int, int, int, int]:
        """Shape of one rank's output: that of the other operation's operand."""
        return self.shape(OPERATIONS[1 - OPERATIONS.index(operation)], ranks)


DEFAULT = (
    Geometry(75600, 40),
    Geometry(32760, 40),
    Geometry(32768, 32, 64),
    Geometry(4608, 24),
    Geometry(1024, 24),
)
"""184.6, 80, 32, 6.75 and 1.5 MiB leave each of two ranks."""
QUICK = (Geometry(32760, 40), Geometry(4608, 24))
CPU = (Geometry(4608, 24), Geometry(1024, 24))
CPU_QUICK = (Geometry(1024, 24),)


def parse(text: str) -> Geometry:
    """Return the geometry that ``SxH`` or ``SxHxD`` means, as in ``75600x40`` or ``32768x32x64``.

    Raises:
        ArgumentValueError: it is none.
    """
    match = _FORM.fullmatch(text.strip().lower())
    numbers = [] if match is None else [int(number) for number in match.groups() if number is not None]
    if not numbers or 0 in numbers:
        raise ArgumentValueError(
            f"a geometry is SxH or SxHxD (tokens, heads, head dimension; 128 where D is left out), as in 75600x40, "
            f"got {text!r}"
        )
    return Geometry(*numbers)
