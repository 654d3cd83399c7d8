"""Routes and tables, without a GPU: what each list moves, read from the bytes alone, for all ranks together.

The layout is read as ``include/comm_nvlink/ulysses.cuh`` and ``csrc/ulysses.cu`` document it, not with the code that
writes it.
"""

from __future__ import annotations

import ctypes
import re
import struct
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import comm_nvlink
from comm_core.errors import UnsupportedError
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.ulysses import plans
from comm_core.windows import gather
from comm_nvlink import board, launch, routes, table
from comm_nvlink.routes import Route, Settings, align, canonical, edges, evenly, route
from comm_nvlink.table import compile_copies, compile_table, cut, cut_all

PACKAGE = Path(comm_nvlink.__file__).parent
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

Run = tuple[int, int, int, int]
"""source, offset there, offset in the target, bytes"""


def runs(copies: list[Copy]) -> list[Run]:
    return [
        (copy.source, source, target, copy.row_bytes)
        for copy in copies
        for source, target in copy.rows()
    ]  # fmt: skip


def single(found: list[Run]) -> list[tuple[int, int, int]]:
    """Return every byte of runs apart, in order."""
    return [(source, at + i, to + i) for source, at, to, count in found for i in range(count)]


# Cutting


NESTS = [
    (),
    (Level(3, 7, 9),),
    (Level(2, 40, 30), Level(3, 9, 7)),
    (Level(3, 1, 50), Level(1, 3, 3), Level(2, 8, 16)),
    (Level(2, 100, 200), Level(2, 50, 90), Level(2, 11, 6), Level(2, 3, 3)),
    # A source that is read again and again, and a nest whose inner level is the farther apart.
    (Level(4, 0, 5),),
    (Level(3, 4, 4), Level(2, 60, 60)),
]


@pytest.mark.parametrize("row_bytes", [1, 3])
@pytest.mark.parametrize("levels", NESTS, ids=str)
def test_any_range_of_a_copy_is_cut_out_of_it(levels: tuple[Level, ...], row_bytes: int) -> None:
    """Every begin and every end: the same bytes in the same order, and no empty copies."""
    whole = Copy(3, 1, 5, 6, levels, row_bytes)
    expected = single(runs([whole]))
    for begin, end in product(range(whole.nbytes + 1), repeat=2):
        parts = cut(whole, begin, end)
        assert single(runs(parts)) == expected[begin:end]
        assert all(part.nbytes > 0 and part.peer == 3 for part in parts)
        # A cut makes few copies of many rows, not one of each row.
        assert len(parts) <= 2 * len(levels) + 1


def test_any_range_of_several_copies() -> None:
    copies = [Copy(0, i, i, 100 * i, NESTS[i + 1], 2) for i in range(3)]
    expected = single(runs(copies))
    for begin, end in product(range(len(expected) + 1), repeat=2):
        assert single(runs(cut_all(copies, begin, end))) == expected[begin:end]


LISTS = [
    [Copy(0, 0, 0, 0, (), 7)],
    [Copy(0, 0, 0, 0, (Level(5, 9, 9),), 3)],
    [Copy(0, i, 0, 0, (Level(4, 9, 9),), 3 + i) for i in range(3)],
    [Copy(0, 0, 0, 0, (Level(2, 1 << 20, 1 << 20),), (1 << 16) + 1700)],
]


@pytest.mark.parametrize("copies", LISTS, ids=lambda copies: f"{len(copies)}x{copies[0].row_bytes}")
def test_cuts_lie_between_rows_or_at_whole_lines(copies: list[Copy]) -> None:
    """`align` gives the last such place; short rows stay whole, and long ones keep vectors of 16 bytes."""
    places, start = [0], 0
    for copy in copies:
        within = range(0, copy.row_bytes, 512 if copy.row_bytes > 1 << 16 else copy.row_bytes)
        for _ in range(copy.nbytes // copy.row_bytes):
            places += [start + at for at in within]
            start += copy.row_bytes
    places.append(start)
    step = max(1, start // 3000)
    for at in [*range(0, start + 2, step), *places]:
        found = align(copies, at)
        if copies[0].row_bytes > 1 << 16:
            # Lines are counted from where the copy begins.
            assert found <= at and (at - found < 512 or at > start) and (found % 512 == 0 or found == start)
        else:
            assert found == max(place for place in places if place <= at)


@given(st.data())
@QUICK
def test_parts_are_in_order_complete_and_near_what_was_asked_for(data: Any) -> None:
    row = data.draw(st.sampled_from([1, 6, 64, 1000, 1 << 16, (1 << 16) + 512]))
    copies = [Copy(0, 0, 0, 0, (Level(data.draw(st.integers(1, 9)), row, row),), row) for _ in range(2)]
    total = sum(copy.nbytes for copy in copies)
    ends = sorted(align(copies, data.draw(st.integers(0, total))) for _ in range(2))
    if data.draw(st.booleans()):
        parts = data.draw(st.integers(1, 40))
        shares, found = [1 / parts] * parts, evenly(copies, ends[0], ends[1], parts)
    else:
        shares = data.draw(st.sampled_from([(1.0,), (0.65, 0.35), (0.5, 0.35, 0.15), (0.4, 0.3, 0.2, 0.1)]))
        found = edges(copies, ends[0], ends[1], shares)
    assert found[0] == ends[0] and found[-1] == ends[1] and list(found) == sorted(found)
    assert len(found) == len(shares) + 1
    granule = max(512 if row > 1 << 16 else row, 1)
    wanted = 0.0
    for share, place in zip(shares, found[1:], strict=True):
        wanted += share
        assert abs(place - (ends[0] + wanted * (ends[1] - ends[0]))) <= granule + 2


# Whole groups


@dataclass
class Everyone:
    """The plans of all ranks of a group for one call."""

    plans: list[Plan]

    @property
    def size(self) -> int:
        return len(self.plans)


def strides_of(shape: tuple[int, int, int, int], order: tuple[int, ...], gap: int) -> tuple[int, int, int, int]:
    strides, pitch = [0, 0, 0, 0], 1 + gap // 3
    for dim in order:
        strides[dim] = pitch
        pitch = pitch * shape[dim] + gap
    return (strides[0], strides[1], strides[2], strides[3])


@st.composite
def groups(draw: Any, sizes: tuple[int, ...] = (2, 4, 6, 8), wide: bool = False) -> Everyone:
    """Any operation by all ranks of a group; each rank's operands have strides of their own."""
    size = draw(st.sampled_from(sizes))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    b, s, local = (draw(st.integers(1, most)) for most in (3, 3, 3))
    d = draw(st.sampled_from([128, 256, 520] if wide else [1, 3, 8, 24, 130]))
    offset = draw(st.integers(0, local - 1))
    count = draw(st.integers(1, local - offset))
    kind = draw(st.sampled_from(["scatter", "gather", "chunks", "small", "qkv", "band"]))
    # The long ones are cut within a row; with few ranks, so that nothing takes long.
    chunk = draw(st.sampled_from([1, 13, 4096, 10001] if size > 2 else [(1 << 16) + 3, 1 << 17]))

    def strides(shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
        orders = [(3, 2, 1, 0), (3, 2, 1, 0), (3, 1, 2, 0), (3, 2, 0, 1), (0, 1, 2, 3)]
        return strides_of(shape, draw(st.sampled_from(orders)), draw(st.sampled_from([0, 0, 1, 4, 8])))

    def one(rank: int) -> Plan:
        if kind == "scatter":
            return plans.scatter_heads((b, s, size * local, d), itemsize, rank, size)
        if kind == "gather":
            return plans.gather_heads((b, s * size, local, d), itemsize, rank, size)
        if kind == "chunks":
            return plans.exchange_chunks(chunk, itemsize, rank, size)
        if kind == "small":
            return gather.small_plan(chunk, rank, size)
        if kind == "qkv":
            shape = (b, s, size * local, d)
            return plans.scatter_qkv_head_chunk(
                shape, (strides(shape), strides(shape), strides(shape)), itemsize, rank, size,
                head_offset=offset, head_count=count,
            )  # fmt: skip
        band = (b, s * size, count, d)
        return plans.gather_output_head_chunk(
            band, strides(band), itemsize, rank, size, local_heads=local, head_offset=offset
        )

    return Everyone([one(rank) for rank in range(size)])


@st.composite
def settings_for(draw: Any, size: int, engines: bool | None = None) -> Settings:
    slices = draw(st.sampled_from([1, 1, 2, 3, 7]))
    engines = draw(st.booleans()) if engines is None else engines
    return Settings(
        size,
        slices * (size - 1),
        draw(st.sampled_from([1, 2, 5])),
        engine_bytes=0 if engines else 1 << 40,
        head_bytes=draw(st.sampled_from([0, 100, 5000, 1 << 30])),
        chunks=draw(st.sampled_from([((0, (1.0,)),), Settings(size, 0, 0).chunks, ((0, (0.4, 0.3, 0.2, 0.1)),)])),
        widths=draw(
            st.sampled_from([{}, {(side, width): 3 for side in ("source", "target") for width in (512, 520, 1040)}])
        ),
    )


@dataclass
class Lists:
    """A device's table, read: for each block its lists."""

    target_bytes: int
    senders: int
    copiers: int
    chunks: int
    records: list[list[list[Run]]]

    def of(self, kind: int, block: int) -> list[Run]:
        """Return a list of a block: own shares are those of the copiers, all others those of the senders."""
        assert block < self.senders or kind == 0
        return self.records[block + (self.senders if kind == 0 else 0)][kind]


def records_of(data: bytes) -> tuple[tuple[int, ...], list[list[list[tuple[int, ...]]]]]:
    """Read a table as ``ulysses.cuh`` documents it; return the header, and each block's lists of entries' fields."""
    target_bytes, senders, copiers, chunks, size = struct.unpack_from("=Q4I", data)
    assert len(data) == 32 + (senders + copiers) * size and size % 16 == 0
    records: list[list[list[tuple[int, ...]]]] = []
    for at in range(32, len(data), size or 1):
        first = struct.unpack_from("=12I", data, at)
        assert first[0] == 0 and list(first) == sorted(first)
        # What a kernel of more chunks would read: nothing.
        assert len(set(first[4 + chunks :])) == 1 and 48 + 112 * first[-1] <= size
        entries = [struct.unpack_from("=2Q4Q4Q4I4I", data, at + 48 + 112 * number) for number in range(first[-1])]
        records.append([entries[a:b] for a, b in pairwise(first)])
        assert not any(record[0] for record in records[:senders])
    assert not any(entries for record in records[senders:] for entries in record[1:])
    return (target_bytes, senders, copiers, chunks, size), records


def read_table(data: bytes) -> Lists:
    """Read a table, with every row of its entries."""
    header, records = records_of(data)

    def rows_of(values: tuple[int, ...]) -> list[Run]:
        rows = [(values[0], values[1])]
        for repeat, source, target in zip(values[10:14], values[2:6], values[6:10], strict=True):
            rows = [(s + i * source, t + i * target) for s, t in rows for i in range(repeat)]
        total, row_bytes, source, alignment = values[14:]
        assert total == len(rows) and row_bytes > 0 and row_bytes * total <= 1 << 30
        assert row_bytes % alignment == 0 and all(s % alignment == t % alignment == 0 for s, t in rows)
        return [(source, s, t, row_bytes) for s, t in rows]

    return Lists(
        header[0],
        header[1],
        header[2],
        header[3],
        [[[run for entry in entries for run in rows_of(entry)] for entries in lists] for lists in records],
    )


@dataclass
class Pitched:
    """A launcher's table, read; `lists` as pitched copies, source last."""

    chunks: int
    ranks: int
    lists: list[list[tuple[int, ...]]]

    def runs(self, number: int) -> list[Run]:
        return [
            (source, at + row * pitch, to + row * to_pitch, width)
            for at, to, pitch, to_pitch, width, height, source in self.lists[number]
            for row in range(height)
        ]


def read_copies(data: bytes) -> Pitched:
    """Read a table as ``ulysses.cu`` documents it."""
    chunks, ranks, count, _ = struct.unpack_from("=4I", data)
    assert count == (chunks + 1) * ranks + 1
    first = struct.unpack_from(f"={count + 1}I", data, 16)
    at = 16 + (count + 2) // 2 * 8
    assert first[0] == 0 and list(first) == sorted(first) and len(data) == at + 56 * first[-1]
    copies = [struct.unpack_from("=7Q", data, at + 56 * number) for number in range(first[-1])]
    return Pitched(chunks, ranks, [copies[a:b] for a, b in pairwise(first)])


class Memory:
    """A destination in which every byte may be written once."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(b"\xa5" * nbytes)
        self.written = bytearray(nbytes)

    def write(self, found: list[Run], sources: list[bytes]) -> None:
        for source, at, to, count in found:
            assert at + count <= len(sources[source]) and to + count <= len(self.data)
            assert not any(self.written[to : to + count]), "a byte is written twice"
            self.data[to : to + count] = sources[source][at : at + count]
            self.written[to : to + count] = b"\1" * count


def written(nbytes: int, found: list[Run]) -> bytes:
    memory = Memory(nbytes)
    memory.write(found, [bytes(nbytes)] * 4 if found else [])
    return bytes(memory.written)


def targets(nbytes: int, found: list[Run]) -> bytes:
    """Return which bytes of a target the runs write."""
    return written(nbytes, [(0, 0, to, count) for _, _, to, count in found])


def sources_of(plan: Plan) -> list[bytes]:
    sizes = [0] * plan.source_count
    for copy in plan.sends:
        sizes[copy.source] = max(sizes[copy.source], copy.source_end)
    salt = plan.rank * 31
    pattern = [bytes((i * 7 + i // 251 + at * 89 + salt) % 256 for i in range(min(size, 1 << 16)))
               for at, size in enumerate(sizes)]  # fmt: skip
    return [(part * (size // max(1, len(part)) + 1))[:size] for part, size in zip(pattern, sizes, strict=True)]


def by_rows(group: Everyone) -> list[Memory]:
    """Execute the plans row by row, as their documentation says."""
    found = [Memory(plan.target_bytes) for plan in group.plans]
    for plan in group.plans:
        for copy in plan.sends:
            found[copy.peer].write(runs([copy]), sources_of(plan))
    return found


def block_of(rank: int, size: int, peer: int, slice_: int) -> int:
    """Return the block of `rank` that serves that slice of `peer`: peers in turn, from the next rank on."""
    return slice_ * (size - 1) + (peer - rank - 1) % size


@given(st.data())
@QUICK
def test_all_ranks_together_move_every_byte_of_the_plan_once(data: Any) -> None:
    """Whoever moves the rests, and wherever the data lands: the plan's rows, every byte once, and nothing else.

    Each pair chooses its engine for itself; and of what arrives in staging, exactly that is copied out.
    """
    group = data.draw(groups(wide=data.draw(st.booleans())))
    size = group.size
    chosen = data.draw(settings_for(size))
    ways = [route(plan, chosen) for plan in group.plans]
    assert len(set(ways)) == 1, "ranks would wait for flags that nobody sets"
    way = ways[0]
    tables = [read_table(compile_table(plan, way).data) for plan in group.plans]
    engines = [compile_copies(plan, way, chosen.widths) for plan in group.plans]
    expected = by_rows(group)
    direct = [Memory(plan.target_bytes) for plan in group.plans]
    for plan, own, copies in zip(group.plans, tables, engines, strict=True):
        rank, sources = plan.rank, sources_of(plan)
        assert (own.target_bytes, own.senders, own.copiers, own.chunks) == (
            plan.target_bytes, way.senders, way.copiers, way.chunks,
        )  # fmt: skip
        for block in range(own.copiers):
            direct[rank].write(own.of(0, block), sources)
        for peer in range(size):
            if peer == rank:
                continue
            for slice_ in range(way.slices):
                direct[peer].write(own.of(1, block_of(rank, size, peer, slice_)), sources)
            if copies is not None and data.draw(st.booleans()):
                read = read_copies(copies)
                if data.draw(st.booleans()):
                    for chunk in range(own.chunks):
                        direct[peer].write(read.runs(chunk * size + peer), sources)
                else:
                    direct[peer].write(read.runs(own.chunks * size + peer), sources)
            else:
                for slice_ in range(way.slices):
                    direct[peer].write(own.of(2, block_of(rank, size, peer, slice_)), sources)
    for mine, reference in zip(direct, expected, strict=True):
        assert mine.data == reference.data and mine.written == reference.written
    # Out of staging: what lies in it comes to the same place of the output.
    for plan, own in zip(group.plans, tables, strict=True):
        out = Memory(plan.target_bytes)
        for block in range(own.copiers):
            out.write(own.of(0, block), sources_of(plan))
        for block in range(own.senders):
            for part in range(3, 4 + own.chunks):
                assert all(source == 0 and at == to for source, at, to, _ in own.of(part, block))
                out.write(own.of(part, block), [bytes(direct[plan.rank].data)])
        assert out.data == expected[plan.rank].data and out.written == expected[plan.rank].written


@given(st.data())
@QUICK
def test_what_a_flag_stands_for_is_the_same_on_both_sides(data: Any) -> None:
    """Slice by slice and chunk by chunk: the bytes that were sent before a flag are those that are read after it.

    Also where the sender's operands are strided in another way than the receiver can know.
    """
    group = data.draw(groups(wide=data.draw(st.booleans())))
    size, plan = group.size, group.plans[0]
    chosen = data.draw(settings_for(size, engines=True))
    way = route(plan, chosen)
    nbytes = plan.target_bytes
    sender, receiver = data.draw(st.permutations(range(size)))[:2]
    sent = read_table(compile_table(group.plans[sender], way).data)
    got = read_table(compile_table(group.plans[receiver], way).data)
    engines = compile_copies(group.plans[sender], way, chosen.widths)
    here = [block_of(sender, size, receiver, i) for i in range(way.slices)]
    there = [block_of(receiver, size, sender, i) for i in range(way.slices)]
    for mine, theirs in zip(here, there, strict=True):
        assert targets(nbytes, sent.of(1, mine)) == targets(nbytes, got.of(3, theirs))
    chunks = [[run for block in there for run in got.of(4 + chunk, block)] for chunk in range(way.chunks)]
    rest = [run for block in here for run in sent.of(2, block)]
    assert targets(nbytes, rest) == targets(nbytes, [run for chunk in chunks for run in chunk])
    if engines is not None:
        read = read_copies(engines)
        for number, chunk in enumerate(chunks):
            assert targets(nbytes, read.runs(number * size + receiver)) == targets(nbytes, chunk)


@given(st.data())
@QUICK
def test_copy_engines_alone_move_everything(data: Any) -> None:
    """``max_sms=0``: no list for blocks, this rank's own share among the copies, rows of any width."""
    group = data.draw(groups(wide=data.draw(st.booleans())))
    size = group.size
    chosen = Settings(size, 0, 0, widths=data.draw(st.sampled_from([{}, {("target", 520): 2, ("source", 1040): 3}])))
    expected = by_rows(group)
    found = [Memory(plan.target_bytes) for plan in group.plans]
    for plan in group.plans:
        way = route(plan, chosen)
        assert (way.senders, way.copiers, way.slices, way.chunks) == (0, 0, 0, 1)
        empty = read_table(compile_table(plan, way).data)
        assert (empty.senders, empty.copiers, empty.chunks, empty.records) == (0, 0, 1, [])
        read = read_copies(compile_copies(plan, way, chosen.widths))
        for peer in range(size):
            assert bool(read.lists[peer]) == (peer != plan.rank)
            assert read.lists[peer] == read.lists[size + peer], "one chunk is all of them"
            found[peer].write(read.runs(peer), sources_of(plan))
        found[plan.rank].write(read.runs(2 * size), sources_of(plan))
    for mine, reference in zip(found, expected, strict=True):
        assert mine.data == reference.data and mine.written == reference.written


@given(st.data())
@QUICK
def test_pitched_copies_are_as_cuda_wants_them_and_as_wide_as_is_fast(data: Any) -> None:
    """No width beyond a pitch, no pitch beyond the limit; rows of slow widths in pieces, at multiples of 16."""
    group = data.draw(groups(wide=True))
    slow = (512, 1040, 2080)
    widths = {(side, width): 3 for side in ("source", "target") for width in slow}
    chosen = Settings(group.size, group.size - 1, 1, engine_bytes=0, head_bytes=0, widths=widths)
    for plan in group.plans:
        way = route(plan, chosen)
        copies = compile_copies(plan, way, widths)
        narrow = any(copy.levels and copy.row_bytes < 512 for copy in plan.sends if copy.peer != plan.rank)
        whole = compile_copies(plan, way, {})
        assert narrow <= (copies is None)
        if copies is None:
            # Too narrow, or with the pieces more copies than are worth it.
            most = 65 if whole is None else 3 * max(len(found) for found in read_copies(whole).lists)
            assert narrow or most > 64
            continue
        read = read_copies(copies)
        for number, found in enumerate(read.lists):
            for _, _, pitch, to_pitch, width, height, _ in found:
                assert width > 0 and height > 0
                assert height == 1 or (width <= min(pitch, to_pitch) and max(pitch, to_pitch) < 2**31)
                # The width that is slow is not left, where one side is pitched at all.
                assert height == 1 or width not in slow or pitch == to_pitch == width
            assert len(read_copies(whole).lists[number]) <= len(found)


def test_rows_of_a_slow_width_are_cut_into_as_many_pieces_as_the_table_says() -> None:
    plan = plans.gather_heads((1, 8, 1, 1040), 1, 0, 2)
    way = Route(1, 1, (0, 0), (0, 4 * 1040))
    (copy,) = read_copies(compile_copies(plan, way, {("source", 1040): 2})).lists[1]
    assert copy == (4 * 1040, 0, 1040, 2080, 1040, 4, 0)
    pieces = read_copies(compile_copies(plan, way, {("target", 1040): 3})).lists[1]
    assert [(at - 4160, to, width, height) for at, to, _, _, width, height, _ in pieces] == [
        (0, 0, 336, 4), (336, 336, 352, 4), (688, 688, 352, 4),
    ]  # fmt: skip


# What the engines are no good for


def strided(source_pitch: int, row: int, repeat: int = 3, outer: int = 1) -> Plan:
    levels = (Level(outer, 1 << 20, 1 << 20), Level(repeat, source_pitch, row)) if outer > 1 else (
        Level(repeat, source_pitch, row),
    )  # fmt: skip
    copies = tuple(Copy(peer, 0, 0, 0, levels, row) for peer in range(2))
    return Plan("any", 0, 2, copies, copies, 1, 1 << 40)


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (strided(1000, 511), "rows below the least width"),
        (strided(100, 600), "rows that overlap in the source"),
        (strided(2**31, 600), "a pitch that CUDA refuses"),
        (strided(1000, 600, outer=65), "too many copies"),
    ],
)
def test_a_rank_whose_rows_do_not_suit_the_engines_uses_its_sms(plan: Plan, why: str) -> None:
    """Its peers need not know: they wait for the same flags. Without SMs the engines do it all the same."""
    total = plan.sends[0].nbytes
    assert compile_copies(plan, Route(1, 1, (0, 0), (0, total)), {}) is None, why
    assert compile_copies(strided(1000, 600), Route(1, 1, (0, 0), (0, 1800)), {}) is not None
    read = read_copies(compile_copies(plan, Route(0, 0, (0,), (0, total)), {}))
    assert single(read.runs(1)) == single(runs([plan.sends[1]]))
    assert all(height == 1 or width <= min(a, b) for _, _, a, b, width, height, _ in read.lists[1])


def test_more_copies_than_may_be_enqueued_are_refused_with_the_way_out() -> None:
    plan = strided(1000, 600, outer=(1 << 16) + 1)
    with pytest.raises(UnsupportedError, match=r"max_sms=0 leaves nothing else: pass operands with larger rows"):
        compile_copies(plan, Route(0, 0, (0,), (0, plan.sends[0].nbytes)), {})


def test_entries_of_large_operands_keep_to_what_the_device_counts() -> None:
    """More than 1 GiB for one block: several entries, whose vectors are numbered in 32 bits."""
    nbytes = (5 << 30) + 3
    plan = plans.exchange_chunks(nbytes, 1, 1, 2)
    way = route(plan, Settings(2, 1, 1, engine_bytes=1 << 60))
    _, (sender, copier) = records_of(compile_table(plan, way).data)
    lists = [copier[0], *sender[1:]]
    # own share, head, no rest, received: source offset, target offset, rows, bytes of a row
    read = [[(values[0], values[1], values[14], values[15]) for values in entries] for entries in lists]
    for number, count in ((0, nbytes), (1, nbytes), (2, 0), (3, nbytes)):
        assert sum(rows * row for _, _, rows, row in read[number]) == count
        assert all(rows * row <= 1 << 30 for _, _, rows, row in read[number])
    assert max(source for source, _, _, _ in read[0]) > 8 << 30


# Routes


@given(st.data())
@QUICK
def test_a_route_is_the_same_on_all_ranks_and_within_the_device_s_limits(data: Any) -> None:
    """It depends on the geometry and the settings alone: not on the rank, and not on strides."""
    group = data.draw(groups(wide=data.draw(st.booleans())))
    peers = group.size - 1
    chosen = Settings(
        group.size,
        peers * data.draw(st.integers(0, routes.MAX_SLICES)),
        7,
        engine_bytes=data.draw(st.sampled_from([0, 5000, 1 << 40])),
        head_bytes=data.draw(st.sampled_from([0, 999, 1 << 40])),
    )
    first = route(group.plans[0], chosen)
    assert all(route(plan, chosen) == first for plan in group.plans)
    each = sum(copy.nbytes for copy in canonical(group.plans[0]))
    assert all(amount == each for plan in group.plans for amount in plan.receive_bytes)
    assert first.senders == first.slices * peers <= chosen.senders
    assert first.copiers in ((1, 7) if first.senders else (0,))
    assert first.slices <= routes.MAX_SLICES and first.chunks <= routes.MAX_CHUNKS
    ends = [first.head[0], first.head[-1], *(first.rest[:1] + first.rest[-1:])]
    if first.rest:
        assert ends == [0, ends[1], ends[1], each]
    else:
        assert ends == [0, each] and each * peers < chosen.engine_bytes
    assert bool(first.rest) == (chosen.senders == 0 or each * peers >= chosen.engine_bytes)
    if chosen.senders and first.rest:
        assert ends[1] * peers <= min(chosen.head_bytes, each * peers // 4)


def test_chunks_are_those_of_the_size() -> None:
    mib = 1 << 20
    for remote, chunks in ((19, 0), (20, 2), (63, 2), (64, 2), (127, 2), (128, 3), (2000, 3)):
        plan = plans.exchange_chunks(remote * mib, 1, 0, 2)
        assert route(plan, Settings(2, 96, 32)).chunks == chunks
    for _, shares in Settings(2, 96, 32).chunks:
        assert abs(sum(shares) - 1) < 1e-9 and list(shares) == sorted(shares, reverse=True)
        assert len(shares) <= routes.MAX_CHUNKS


def test_settings_travel_in_a_decision() -> None:
    """What was agreed on comes back as it was from a plan's JSON."""
    chosen = Settings(4, 96, 32, engine_bytes=7, head_bytes=5, measured=True)
    assert Settings(4, 1, 1).changed(chosen.to_json()) == chosen


# Twins


def text_of(*names: str) -> str:
    return "".join((PACKAGE / name).read_text(encoding="utf-8") for name in names)


def test_the_sizes_that_the_sources_claim_are_those_that_python_packs() -> None:
    """A struct that changes on one side only is found before any GPU is."""
    text = text_of("include/comm_nvlink/ulysses.cuh", "include/comm_nvlink/board.h", "csrc/ulysses.cu")
    claimed = {
        name: eval(size, {"__builtins__": {}})
        for name, size in re.findall(r"static_assert\(sizeof\((\w+)\) == ([^,]+),\s+\"mirrored", text)
    }
    assert claimed == {
        "Flags": launch.FLAG_BYTES,
        "Table": 24,
        "Record": table._RECORD.size,
        "Board": board.BOARD_BYTES,
        "comm_nvlink_copy_v1": table._COPY.size,
        "comm_nvlink_copies_v1": table._COPIES.size,
        "comm_nvlink_state_v1": ctypes.sizeof(launch.State),
        "comm_nvlink_places_v1": ctypes.sizeof(launch.Places),
    }


def test_the_limits_are_the_same_on_both_sides() -> None:
    text = text_of("include/comm_nvlink/ulysses.cuh")
    found = {name: int(value) for name, value in re.findall(r"constexpr uint32_t (k\w+) = (\d+);", text)}
    assert found["kMaxPeers"] == launch.MAX_PEERS == 8
    assert found["kMaxSlices"] == routes.MAX_SLICES
    assert found["kMaxChunks"] == routes.MAX_CHUNKS
    # What `records_of` above counts on.
    assert table._HEADER.size == found["kRecordsAt"] == 32
    assert "enum List : uint32_t { kOwn = 0, kHead = 1, kRest = 2, kReceived = 3 };" in text


def test_fields_are_in_the_same_order_on_both_sides() -> None:
    """Sizes alone would not notice two fields that changed places."""
    text = text_of("csrc/ulysses.cu")
    for name, twin in (("comm_nvlink_state_v1", launch.State), ("comm_nvlink_places_v1", launch.Places)):
        body = re.search(rf"struct {name} {{(.*?)\n}};", text, re.DOTALL)
        assert body is not None
        fields = re.findall(r"(\w+)(?:\[\w+\])?;", re.sub(r"//.*", "", body[1]))
        assert fields == [field[0] for field in twin._fields_]


def test_every_block_serves_one_peer_and_every_pair_meets() -> None:
    """For each slice the blocks of a rank serve all its peers; that of the peer for this rank has the same slice."""
    for size, slices in product((2, 4, 6, 8), (1, 3)):
        for sender, receiver in permutations(range(size), 2):
            blocks = {block_of(sender, size, receiver, i) for i in range(slices)}
            assert {(sender + 1 + block % (size - 1)) % size for block in blocks} == {receiver}
            assert {block // (size - 1) for block in blocks} == set(range(slices))
