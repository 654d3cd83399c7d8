"""Geometry of the Sage2 encoding: groups of rows, scale slots, and the payload. Pure; no torch, no device.

A scale belongs to a *group* of rows on the global row grid: row t of rank r is global row ``r * L + t``, and group g
holds the global rows ``[g * G, (g + 1) * G)``. A rank's shard begins and ends anywhere within a group, so two ranks
may share one, or more where shards are shorter than a group. Everything here is counted on the global grid, which is
why a result does not depend on how many ranks there are::

    global rows  0        16        32        48        64        80        96       112       128
    Q groups     |  g0     |  g1     |  g2     |  g3     |  g4     |  g5     |  g6     |  g7     |
    rank 0       |<---------- L = 50 rows ------>|                                    slots 0..3 = g0..g3
    rank 1                                      |<---------- L = 50 rows ------>|     slots 0..3 = g3..g6
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

__all__ = [
    "EPS",
    "IDLE_SCALE_BITS",
    "LAYOUTS",
    "MAX_ELEMS",
    "SM89_SM120",
    "SM90",
    "Grid",
    "Layout",
    "PayloadSpec",
    "ceil_div",
    "first_group",
    "last_group",
    "payload_spec",
    "slots",
    "touched",
    "touchers",
]

EPS = 1e-7
"""Floor of a group's amax, as fp32 (bits 0x33D6BF95)."""
IDLE_SCALE_BITS = 0x30587076
"""fp32 bits of the scale of a group without rows: RN(EPS / 127)."""
MAX_ELEMS = 2**31 - 1
"""Elements of one operand, and bytes of a payload: kernels index with 32 bits."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Layout:
    """What a consumer kernel indexes.

    Attributes:
        name: ``"sage2_sm90"`` or ``"sage2_sm89_sm120"``.
        q_group: rows of a Q group (rows of one warp).
        k_group: rows of a K group (rows of one K tile).
        q_block: rows of Q that a thread block takes: the granule of the Q scales' width.
        v_block: rows of K and V that a thread block takes at once: the granule of V's padding.
        v_max: largest magnitude that V is scaled to. 2.25 keeps an fp16 accumulator of 64 keys finite: the weights
            go up to 448, and 448 * 2.25 * 64 = 64512.
        capabilities: compute capabilities of the devices whose layout this is.
    """

    name: str
    q_group: int
    k_group: int
    q_block: int
    v_block: int
    v_max: float
    capabilities: tuple[tuple[int, int], ...]

    def scale_widths(self, sequence: int) -> tuple[int, int]:
        """Return the widths of the Q and K scales that the consumer expects for `sequence` rows."""
        q = ceil_div(sequence, self.q_block) * (self.q_block // self.q_group)
        return q, ceil_div(sequence, self.k_group)

    def padded(self, sequence: int) -> int:
        """Return the length of V's last dimension for `sequence` rows."""
        return ceil_div(sequence, self.v_block) * self.v_block


SM90 = Layout("sage2_sm90", 16, 128, 64, 128, 448.0, ((9, 0),))
SM89_SM120 = Layout("sage2_sm89_sm120", 32, 64, 128, 64, 2.25, ((8, 9), (12, 0)))
LAYOUTS: dict[str, Layout] = {layout.name: layout for layout in (SM90, SM89_SM120)}


def slots(local_sequence: int, group: int) -> int:
    """Return how many groups a shard of `local_sequence` rows can touch at most, wherever it begins.

    ``1 + ceil((L - 1) / G)``, which is the tight maximum over all offsets.
    """
    return (local_sequence + 2 * group - 2) // group


def first_group(rank: int, local_sequence: int, group: int) -> int:
    """Return the global group of a rank's first row: its slot 0."""
    return rank * local_sequence // group


def last_group(rank: int, local_sequence: int, group: int) -> int:
    """Return the global group of a rank's last row."""
    return ((rank + 1) * local_sequence - 1) // group


def touched(rank: int, local_sequence: int, group: int) -> int:
    """Return how many groups a rank touches: its slots in use."""
    return last_group(rank, local_sequence, group) - first_group(rank, local_sequence, group) + 1


def touchers(index: int, local_sequence: int, group: int, world_size: int) -> range:
    """Return the ranks that have rows of global group `index`."""
    first = index * group // local_sequence
    last = min(world_size - 1, ((index + 1) * group - 1) // local_sequence)
    return range(first, last + 1)


@dataclass(frozen=True)
class Grid:
    """One rank's place on the global grid: everything that a kernel must know besides its pointers and strides.

    Attributes:
        layout: of the consumer.
        batch_size: B.
        local_sequence: L, rows of a rank.
        heads: H of the whole group.
        head_dim: D, 64 or 128.
        rank: this rank.
        world_size: P.
        used_sequence: U, live global rows; the input rows from there on are zero.
    """

    layout: Layout
    batch_size: int
    local_sequence: int
    heads: int
    head_dim: int
    rank: int
    world_size: int
    used_sequence: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of one operand: ``(B, L, H, D)``."""
        return self.batch_size, self.local_sequence, self.heads, self.head_dim

    @property
    def local_heads(self) -> int:
        """Heads of one destination, H / P."""
        return self.heads // self.world_size

    @property
    def sequence(self) -> int:
        """S = P * L, the logical length of the whole sequence."""
        return self.world_size * self.local_sequence

    @property
    def padded_sequence(self) -> int:
        """Length of V's last dimension; from S, never from U."""
        return self.layout.padded(self.sequence)

    @property
    def live_rows(self) -> int:
        """How many of this rank's rows are live, 0 to L: its first ones."""
        return min(max(self.used_sequence - self.rank * self.local_sequence, 0), self.local_sequence)

    @property
    def q_slots(self) -> int:
        """Slots of Q scales a rank."""
        return slots(self.local_sequence, self.layout.q_group)

    @property
    def k_slots(self) -> int:
        """Slots of K scales a rank."""
        return slots(self.local_sequence, self.layout.k_group)

    @property
    def statistics(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and shape of the parts of the statistics that a rank gathers, in their order in memory."""
        b, h, d = self.batch_size, self.heads, self.head_dim
        return (
            ("k_sum", (b, h, d)),
            ("v_amax", (b, h, d)),
            ("q_desc", (b, h, 2)),
            ("k_minmax", (b, h, 2, 2, d)),
        )

    @property
    def statistics_elems(self) -> int:
        """fp32 values of one rank's gathered statistics: ``B * H * (6 * D + 2)``."""
        return self.batch_size * self.heads * (6 * self.head_dim + 2)

    @property
    def payload(self) -> PayloadSpec:
        """The payload of one rank."""
        return payload_spec(
            self.layout, self.batch_size, self.local_sequence, self.local_heads, self.head_dim, self.world_size
        )

    def output_shapes(self, used_sequence: int) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of (q8, k8, v8, q_scale, k_scale, v_scale) for scales of `used_sequence` rows."""
        b, s, h, d = self.batch_size, self.sequence, self.local_heads, self.head_dim
        wq, wk = self.layout.scale_widths(used_sequence)
        return (b, s, h, d), (b, s, h, d), (b, d, h, self.padded_sequence), (b, h, wq), (b, h, wk), (b, h, d)


@dataclass(frozen=True)
class PayloadSpec:
    """The chunk that one rank sends to one destination: five sections without a header, and a zero tail.

    ====================  ================================  ===================
    section               offset in bytes                   shape
    ====================  ================================  ===================
    Q, int8               `q_offset` (0)                    ``[B, L, h, D]``
    K, int8               `k_offset`                        ``[B, L, h, D]``
    V, e4m3, rows as is   `v_offset`                        ``[B, L, h, D]``
    Q scales, fp32        `q_scale_offset`                  ``[B, h, q_scale_slots]``
    K scales, fp32        `k_scale_offset` (16-aligned)     ``[B, h, k_scale_slots]``
    zeros                 `end`                             to `chunk_bytes`
    ====================  ================================  ===================

    Attributes:
        layout: of the consumer.
        batch_size: B.
        local_sequence: L, rows of a source rank.
        global_sequence: S = P * L.
        local_heads: h, heads of the destination.
        head_dim: D.
        world_size: P.
        q_offset: see above; the other offsets likewise.
        end: bytes of the sections; the tail begins there.
        chunk_bytes: of one destination, a multiple of 128.
        payload_bytes: of all P destinations.
        q_scale_slots: slots of Q scales.
        k_scale_slots: slots of K scales.
    """

    layout: Layout
    batch_size: int
    local_sequence: int
    global_sequence: int
    local_heads: int
    head_dim: int
    world_size: int
    q_offset: int
    k_offset: int
    v_offset: int
    q_scale_offset: int
    k_scale_offset: int
    end: int
    chunk_bytes: int
    payload_bytes: int
    q_scale_slots: int
    k_scale_slots: int


@lru_cache(256)
def payload_spec(
    layout: Layout, batch_size: int, local_sequence: int, local_heads: int, head_dim: int, world_size: int
) -> PayloadSpec:
    """Return the payload of one geometry; the arguments are positive and D is 64 or 128."""
    n = batch_size * local_sequence * local_heads * head_dim
    nq = slots(local_sequence, layout.q_group)
    nk = slots(local_sequence, layout.k_group)
    k_scale = ceil_div(3 * n + 4 * batch_size * local_heads * nq, 16) * 16
    end = k_scale + 4 * batch_size * local_heads * nk
    chunk = ceil_div(end, 128) * 128
    return PayloadSpec(
        layout=layout,
        batch_size=batch_size,
        local_sequence=local_sequence,
        global_sequence=world_size * local_sequence,
        local_heads=local_heads,
        head_dim=head_dim,
        world_size=world_size,
        q_offset=0,
        k_offset=n,
        v_offset=2 * n,
        q_scale_offset=3 * n,
        k_scale_offset=k_scale,
        end=end,
        chunk_bytes=chunk,
        payload_bytes=world_size * chunk,
        q_scale_slots=nq,
        k_scale_slots=nk,
    )
