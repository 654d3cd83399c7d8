"""The table of a plan: what its bytes say, read by the documented layout and by the device's own arithmetic.

Nothing here needs a GPU or nvcc: ``plan.cuh`` and ``csrc/windows.cu`` are compiled by the host compiler, with the
kernels of ``comm_core/testing/host_windows.h``.
"""

from __future__ import annotations

import ctypes
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import comm_core
from comm_core.errors import UnsupportedError
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host, host_source
from comm_core.transport.plan import Copy, Level, Plan
from comm_core.ulysses import plans
from comm_core.windows import launch, signals, table
from comm_core.windows.launch import WINDOWS
from comm_core.windows.table import PIECE_BYTES, compile_plan

PACKAGE = Path(comm_core.__file__).parent
INCLUDE = PACKAGE / "include"
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def build(folder: Path) -> ctypes.CDLL:
    """Compile the module of windows for the host."""
    _, launches = host_source((PACKAGE / "csrc" / "windows.cu").read_text(encoding="utf-8"), HOST_WINDOWS)
    assert launches == 5
    flags = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    library = compile_for_host(WINDOWS, PACKAGE, HOST_WINDOWS, folder, flags=flags)
    found = ctypes.CDLL(str(library))
    found.host_problem.restype = ctypes.c_char_p
    return found


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The module of windows, compiled for the host."""
    return build(tmp_path_factory.mktemp("host"))


# Plans


@st.composite
def strided(draw: Any, shape: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Strides of a tensor of `shape`: the dimensions in any order, with gaps."""
    strides = [0, 0, 0, 0]
    pitch = draw(st.sampled_from([1, 1, 1, 2, 3]))
    for dim in draw(st.sampled_from([(3, 2, 1, 0), (3, 1, 2, 0), (2, 3, 1, 0), (0, 1, 2, 3), (3, 2, 0, 1)])):
        strides[dim] = pitch
        pitch = pitch * shape[dim] + draw(st.sampled_from([0, 0, 0, 1, 5]))
    return (strides[0], strides[1], strides[2], strides[3])


@st.composite
def ulysses_plans(draw: Any) -> Plan:
    """Any operation of Ulysses, on any rank of 2 to 8."""
    ranks = draw(st.integers(2, 8))
    rank = draw(st.integers(0, ranks - 1))
    itemsize = draw(st.sampled_from([1, 2, 4]))
    b, s, local, d = (draw(st.integers(1, most)) for most in (3, 4, 3, 24))
    offset = draw(st.integers(0, local - 1))
    count = draw(st.integers(1, local - offset))
    kind = draw(st.sampled_from(["scatter", "gather", "chunks", "qkv", "band"]))
    if kind == "scatter":
        return plans.scatter_heads((b, s, ranks * local, d), itemsize, rank, ranks)
    if kind == "gather":
        return plans.gather_heads((b, s * ranks, local, d), itemsize, rank, ranks)
    if kind == "chunks":
        # Around the size of a piece, and odd ones.
        chunk = draw(st.sampled_from([1, 7, 13, 4095, 4096, 4097, 8192, 10001]))
        return plans.exchange_chunks(chunk, itemsize, rank, ranks)
    if kind == "qkv":
        shape = (b, s, ranks * local, d)
        strides = (draw(strided(shape)), draw(strided(shape)), draw(strided(shape)))
        return plans.scatter_qkv_head_chunk(
            shape, strides, itemsize, rank, ranks, head_offset=offset, head_count=count
        )
    band = (b, s * ranks, count, d)
    return plans.gather_output_head_chunk(
        band, draw(strided(band)), itemsize, rank, ranks, local_heads=local, head_offset=offset
    )


@st.composite
def any_plans(draw: Any) -> Plan:
    """A plan of copies that no operation makes: levels in any order of pitches, with gaps on both sides.

    All sizes are multiples of one unit, but for a few of half of it: so each of them is now and then what decides the
    width of a vector.
    """
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))

    def size(least: int, most: int) -> int:
        return draw(st.integers(least, most)) * (max(1, unit // 2) if draw(st.integers(0, 7)) == 0 else unit)

    def pitches(repeats: list[int], row: int) -> list[int]:
        found, pitch = [0] * len(repeats), row + size(0, 9)
        for at in draw(st.permutations(range(len(repeats)))):
            found[at] = pitch
            pitch = pitch * repeats[at] + size(0, 9)
        return found

    copies: list[Copy] = []
    at = size(0, 9)
    for peer in range(2):
        for _ in range(draw(st.integers(0, 2))):
            repeats = draw(st.lists(st.integers(1, 4), max_size=3))
            row = size(1, 12)
            levels = tuple(map(Level, repeats, pitches(repeats, row), pitches(repeats, row)))
            copy = Copy(peer, draw(st.integers(0, 3)), size(0, 9), at, levels, row)
            copies.append(copy)
            at = copy.target_end + size(0, 9)
    return Plan("any", 0, 2, tuple(copies), (), 4, max(at, 1), False)


def sources_of(plan: Plan) -> list[bytearray]:
    """Return sources of the sizes that `plan` reads, full of different bytes."""
    sizes = [0] * plan.source_count
    for copy in plan.sends:
        sizes[copy.source] = max(sizes[copy.source], copy.source_end)
    return [bytearray((i * 7 + i // 251 + at * 89) % 256 for i in range(size)) for at, size in enumerate(sizes)]


def by_rows(plan: Plan, sources: list[bytearray]) -> list[bytearray]:
    """Execute `plan` row by row, as its documentation says; return what each peer's destination then holds."""
    targets = [bytearray(b"\xa5" * plan.target_bytes) for _ in range(plan.world_size)]
    for copy in plan.sends:
        for source, target in copy.rows():
            row = sources[copy.source][source : source + copy.row_bytes]
            targets[copy.peer][target : target + copy.row_bytes] = row
    return targets


def entries_of(data: bytes) -> list[list[dict[str, Any]]]:
    """Read a table as ``plan.cuh`` documents it; return the entries of each peer."""
    target_bytes, number = struct.unpack_from("=QI", data)
    first = struct.unpack_from("=17I", data, 12)
    assert first[0] == 0 and first[-1] == number and list(first) == sorted(first)
    assert len(data) == 80 + 112 * number
    entries: list[dict[str, Any]] = []
    for at in range(80, len(data), 112):
        values = struct.unpack_from("=2Q4Q4Q4I4I", data, at)
        names = ("source_offset", "target_offset")
        entry: dict[str, Any] = dict(zip(names, values, strict=False))
        entry.update(from_=values[2:6], to=values[6:10], repeat=values[10:14], target_bytes=target_bytes)
        entry.update(zip(("rows", "row_bytes", "source", "alignment"), values[14:], strict=True))
        entries.append(entry)
    return [entries[first[peer] : first[peer + 1]] for peer in range(16)]


def rows_of(entry: dict[str, Any]) -> list[tuple[int, int]]:
    """Return where each row of an entry begins on both sides."""
    rows = [(entry["source_offset"], entry["target_offset"])]
    for repeat, source, target in zip(entry["repeat"], entry["from_"], entry["to"], strict=True):
        rows = [(s + i * source, t + i * target) for s, t in rows for i in range(repeat)]
    assert len(rows) == entry["rows"]
    return rows


@given(st.one_of(ulysses_plans(), any_plans()), st.sampled_from([16, 100, PIECE_BYTES, 0]))
@QUICK
def test_the_bytes_of_a_table_say_what_the_plan_says(plan: Plan, piece_bytes: int) -> None:
    """Every plan, executed from nothing but the bytes of its table; and vectors are as wide as they may be, no wider.

    Wider than is legal is a misaligned access, which ends a CUDA context; narrower is slow for no reason.
    """
    peers = entries_of(compile_plan(plan, piece_bytes).data)
    sources = sources_of(plan)
    targets = [bytearray(b"\xa5" * plan.target_bytes) for _ in range(plan.world_size)]
    assert not any(peers[plan.world_size :])
    for target, entries in zip(targets, peers, strict=False):
        for entry in entries:
            assert entry["target_bytes"] == plan.target_bytes
            assert piece_bytes == 0 or entry["row_bytes"] <= piece_bytes
            rows, size = rows_of(entry), entry["row_bytes"]
            legal = [n for n in (1, 2, 4, 8, 16) if not (size % n or any(s % n or t % n for s, t in rows))]
            assert entry["alignment"] == max(legal)
            for source, at in rows:
                target[at : at + size] = sources[entry["source"]][source : source + size]
    assert targets == by_rows(plan, sources)


@given(st.one_of(ulysses_plans(), any_plans()), st.sampled_from([16, PIECE_BYTES, 0]), st.data())
@QUICK
def test_the_device_s_arithmetic_executes_it(host: ctypes.CDLL, plan: Plan, piece_bytes: int, data: Any) -> None:
    """``plan.cuh`` on a host: the same bytes arrive, for operands at any address, and every vector is aligned."""
    packed = compile_plan(plan, piece_bytes).data
    sources = sources_of(plan)
    kept: list[Any] = []
    addresses = (ctypes.c_void_p * 4)()
    for number, source in enumerate(sources):
        # Views begin anywhere: not only at addresses that are a multiple of 16.
        shift = data.draw(st.integers(0, 16))
        buffer = ctypes.create_string_buffer(bytes(shift) + bytes(source) + b"\0")
        kept.append(buffer)
        addresses[number] = ctypes.addressof(buffer) + shift
    expected = by_rows(plan, sources)
    for peer in range(plan.world_size):
        shift = data.draw(st.integers(0, 16))
        target = ctypes.create_string_buffer(b"\xa5" * (plan.target_bytes + shift + 8))
        host.host_execute(packed, peer, ctypes.c_void_p(ctypes.addressof(target) + shift), addresses)
        assert host.host_problem() is None
        assert target.raw[shift : shift + plan.target_bytes] == bytes(expected[peer])
        assert set(target.raw[:shift] + target.raw[shift + plan.target_bytes : -1]) == {0xA5}


@given(
    st.lists(st.integers(1, 1000), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**42), min_size=8, max_size=8),
    st.integers(0, 2**45),
    st.randoms(use_true_random=False),
)
@QUICK
def test_rows_of_large_operands_are_found(
    host: ctypes.CDLL, repeats: list[int], pitches: list[int], offset: int, random: Any
) -> None:
    """Offsets beyond 4 GiB and more than 2^16 rows: nothing is computed in 32 bits that does not fit them."""
    while _product(repeats) >= 2**31:
        repeats = repeats[1:]
    levels = tuple(map(Level, repeats, pitches, pitches[4:]))
    plan = Plan("large", 0, 1, (Copy(0, 0, offset, offset // 3, levels, 64),), (), 1, 64)
    packed = compile_plan(plan).data
    found = (ctypes.c_uint64 * 2)()
    for row in (0, _product(repeats) - 1, random.randrange(_product(repeats))):
        host.host_locate_row(packed, 0, row, found)
        source, target, rest = offset, offset // 3, row
        for repeat, from_, to in reversed(levels):
            rest, index = divmod(rest, repeat)
            source, target = source + index * from_, target + index * to
        assert (found[0], found[1]) == (source, target)


def _product(values: list[int]) -> int:
    total = 1
    for value in values:
        total *= value
    return total


# Limits


def one(*levels: Level, row_bytes: int = 4, ranks: int = 2, sources: int = 1) -> Plan:
    return Plan("x", 0, ranks, (Copy(1, 0, 0, 0, levels, row_bytes),), (), sources, 1 << 40)


@pytest.mark.parametrize(
    ("fits", "too_much", "words"),
    [
        (one(*[Level(2, 9, 9)] * 4), one(*[Level(2, 9, 9)] * 5), "5 levels: at most 4"),
        # A long row takes a level for its pieces.
        (one(*[Level(2, 9999, 9999)] * 3, row_bytes=9990), one(*[Level(2, 9999, 9999)] * 4, row_bytes=9990), "5 lev"),
        (one(ranks=16), one(ranks=17), "17 ranks and 1 sources; at most 16 and 4"),
        (one(sources=4), one(sources=5), "2 ranks and 5 sources; at most 16 and 4"),
        (one(Level(2**31 - 1, 1, 1)), one(Level(2**16, 1, 1), Level(2**15, 1, 1)), "2147483648 rows: at most"),
    ],
)
def test_what_does_not_fit_a_table_is_refused(fits: Plan, too_much: Plan, words: str) -> None:
    """Before anything is sent, and with the limit; the largest that fits is accepted."""
    assert compile_plan(fits).entries
    with pytest.raises(UnsupportedError, match=words):
        compile_plan(too_much)


def test_rows_of_more_than_four_gigabytes() -> None:
    """The device's field for a row has 32 bits; the copy engines get such a row in a few pieces, the SMs in many."""
    nbytes = (5 << 30) + 3
    plan = plans.exchange_chunks(nbytes, 1, 0, 2)
    for piece_bytes, most in ((0, 4), (PIECE_BYTES, 4)):
        entries = compile_plan(plan, piece_bytes).entries
        assert len(entries) == most  # two a peer: the pieces, and what is left over
        assert all(entry.row_bytes <= 1 << 30 for entry in entries)
        assert sum(entry.rows * entry.row_bytes for entry in entries) == 2 * nbytes


# Twins


def header(name: str) -> str:
    return (INCLUDE / "comm_core" / name).read_text(encoding="utf-8")


def constants() -> dict[str, int]:
    """Return every constant of the headers that is a plain number."""
    text = header("signal.cuh") + header("plan.cuh") + header("exchange.cuh")
    return {name: int(value) for name, value in re.findall(r"constexpr uint32_t (k\w+) = (\d+);", text)}


def test_the_sizes_that_the_headers_claim_are_those_that_python_packs() -> None:
    """A struct that changes on one side only is found before any GPU is: each header asserts its sizes."""
    text = header("signal.cuh") + header("plan.cuh") + header("exchange.cuh")
    claimed = {
        name: eval(size, {"__builtins__": {}}, dict(constants()))
        for name, size in re.findall(r"static_assert\(sizeof\((\w+)\) == ([^,]+),\s+\"mirrored", text)
    }
    session = launch.SessionStruct(0, [1, 2], 3, 4, 5, True)
    assert claimed == {
        "SignalBlock": signals.SIGNAL_BYTES,
        "StallRecord": signals.RECORD_BYTES,
        "PlanEntry": table.ENTRY_BYTES,
        "PlanTable": table.HEADER_BYTES,
        "WindowEntry": launch.WindowStruct.nbytes,
        "Session": len(session.pack(1)),
    }
    assert len(launch.WindowStruct.pack(1, [2])) == claimed["WindowEntry"]
    assert struct.calcsize(launch.WINDOWS.structs["comm_core_session_v1"]) == claimed["Session"]


def test_the_limits_are_the_same_on_both_sides() -> None:
    """One side's larger limit would be the other side's overrun array."""
    found = constants()
    assert found["kMaxRanks"] == signals.MAX_RANKS
    assert found["kMaxLevels"] == table.MAX_LEVELS
    assert found["kMaxSources"] == table.MAX_SOURCES


def test_the_states_of_a_record_mean_the_same_on_both_sides() -> None:
    """What the device writes into a stall record, and what Python makes of it."""
    text = header("signal.cuh")
    comment = re.search(r"uint32_t state;\s*// (.*)", text)[1]  # pyright: ignore[reportOptionalSubscript]
    assert comment.startswith("0: nothing; 1: this rank gave up; 2: it was told")
    assert [kind.name for kind in signals.StallKind][:3] == ["NONE", "GAVE_UP", "ABORTED"]
    bad = re.search(r"kBadAnnouncement = (0x[0-9a-f]+)u", header("exchange.cuh"))
    assert bad is not None
    record = struct.pack("8I", 1, int(bad[1], 16) | signals.Operation.BARRIER, 7, 3, 2, 0, 0, 0)
    assert signals.read_stall(record) == (signals.StallKind.BAD_ANNOUNCEMENT, signals.Operation.BARRIER, 7, 3, 2)


def test_numbers_of_operations_never_change() -> None:
    """They are in records that another version may read: append only."""
    assert [operation.name for operation in signals.Operation] == [
        "SELF_TEST",
        "BARRIER",
        "ALL_GATHER_SMALL",
        "SCATTER_HEADS",
        "GATHER_HEADS",
        "EXCHANGE_CHUNKS",
        "SCATTER_QKV_HEAD_CHUNK",
        "GATHER_OUTPUT_HEAD_CHUNK",
        "OTHER",
        "ALLREDUCE",
    ]
    assert list(signals.Operation) == list(range(1, 11))
    built = {name for name in plans.__all__} | {"all_gather_small"}
    assert all(signals.Operation.of(name).text == name for name in built)
    assert signals.Operation.of("a plugin's own") is signals.Operation.OTHER
    assert signals.Stall(signals.StallKind.GAVE_UP, 77, 1, 0, 1).operation_text == "operation 77"
