"""What is to be reached, and the bytes that must move. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from comm_lowp.sage2.grid import LAYOUTS, Grid

__all__ = [
    "EXCHANGES",
    "EXCHANGE_GOAL",
    "FULL",
    "GOALS",
    "HOST_GOAL_US",
    "PASSES",
    "QUICK",
    "Exchange",
    "Problem",
    "least_bytes",
]

PASSES = ("statistics", "quantize and pack", "unpack")
GOALS = {"statistics": 1.25, "quantize and pack": 1.25, "unpack": 1.35}
"""Pass -> the largest time that counts as reached, as a multiple of the floor."""

EXCHANGE_GOAL = 0.75
"""scatter_qkv over NVLink, as a multiple of three 16-bit exchanges and one device's quantization."""
HOST_GOAL_US = 40.0
"""Microseconds of the host that one scatter_qkv over NVLink may take."""


@dataclass(frozen=True)
class Problem:
    """One rank's operands ``[B, L, H, D]``, and how many destinations they are packed for.

    Attributes:
        rows: L.
        heads: H of the whole group.
        head_dim: D.
        dtype: ``"bfloat16"`` or ``"float16"``.
        layout: of the consumer.
        ranks: P; the passes of one rank are measured, with all destinations in its own memory.
        fused: Q, K and V are views of one projection ``[B, L, 3, H, D]``.
    """

    rows: int
    heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"
    layout: str = "sage2_sm90"
    ranks: int = 1
    fused: bool = False

    @property
    def grid(self) -> Grid:
        """Of rank 0; all rows are live."""
        used = self.ranks * self.rows
        return Grid(LAYOUTS[self.layout], 1, self.rows, self.heads, self.head_dim, 0, self.ranks, used)

    @property
    def elements(self) -> int:
        """Of one operand."""
        return self.rows * self.heads * self.head_dim

    @property
    def name(self) -> str:
        """For tables."""
        text = f"L={self.rows} H={self.heads} D={self.head_dim} {self.dtype} {self.layout} P={self.ranks}"
        return text + (" fused" if self.fused else "")


@dataclass(frozen=True)
class Exchange:
    """A global operand ``[1, S, H, D]`` that ranks exchange.

    Attributes:
        tokens: S; they are rounded up to divide.
        heads: H.
        head_dim: D.
        dtype: as in `Problem`.
    """

    tokens: int
    heads: int
    head_dim: int = 128
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """For tables."""
        return f"S={self.tokens} H={self.heads} D={self.head_dim} {self.dtype}"

    def shape(self, ranks: int) -> tuple[int, int, int, int]:
        """Return the shape of one rank's operand."""
        return 1, -(-self.tokens // ranks), self.heads, self.head_dim


EXCHANGES = (Exchange(4608, 24), Exchange(32760, 40), Exchange(75600, 40), Exchange(65520, 40))
QUICK = (Problem(16384, 32), Problem(32768, 32, 64, "float16", "sage2_sm89_sm120", ranks=2))
FULL = (
    Problem(16384, 32),
    Problem(16384, 32, layout="sage2_sm89_sm120"),
    Problem(16384, 32, fused=True),
    Problem(32760, 40, ranks=2),
    Problem(32760, 40, ranks=8),
    Problem(32768, 32, 64),
    Problem(32768, 32, 64, "float16", "sage2_sm89_sm120", ranks=2),
    Problem(75600, 24, ranks=4),
)


def least_bytes(grid: Grid) -> dict[str, tuple[int, int]]:
    """Return (bytes read, bytes written) that each pass can't do without."""
    operands = 3 * 2 * grid.batch_size * grid.local_sequence * grid.heads * grid.head_dim
    payload = grid.payload.payload_bytes
    b, s, h, d = grid.batch_size, grid.sequence, grid.local_heads, grid.head_dim
    widths = sum(grid.layout.scale_widths(grid.used_sequence))
    outputs = b * h * d * (2 * s + grid.padded_sequence) + 4 * b * h * widths
    return {
        "statistics": (operands, 0),
        "quantize and pack": (operands, payload),
        "unpack": (payload, outputs),
    }
