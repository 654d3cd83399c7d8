"""The engine of the RDMA routes on the verbs emulator: several ranks in one process, every byte compared."""

from __future__ import annotations

import ctypes
import os
import re
import statistics
import threading
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import pytest
import rdma_emulator as emulator
import rdma_ranks as ranks_of
import torch
from rdma_ranks import LONG, Ranks, Shape

from comm_core.errors import ArgumentValueError, ClosedError, JitBuildError, UnsupportedError
from comm_core.jit import Module
from comm_pcie.rdma import module as packing
from comm_pcie.rdma import verbs
from comm_pcie.rdma.engine import (
    Counters,
    Kind,
    LoadedVerbs,
    Memory,
    RdmaEngine,
    Settings,
    VerbsApi,
    VerbsLibraries,
    load_verbs,
    require,
)
from comm_pcie.rdma.geometry import MAX_STRIDE, Band, Geometry, Transfer, problem_of

OPERATIONS = ("scatter_heads", "gather_heads", "exchange_chunks")


@pytest.fixture
def make_world(library: Path, tmp_path: Path, api: VerbsApi) -> Iterator[Any]:
    """Return what makes a fabric of this test; each is checked at the end."""
    made: list[Any] = []

    def make(size: int = 8, *, copies: bool = True, shuffle: int = 0, **changes: Any) -> Any:
        path, devices = tmp_path / f"fabric{len(made)}", emulator.nics(size, **changes)
        made.append(emulator.World(library, path, devices, copies=copies, shuffle=shuffle))
        return made[-1]

    yield make
    for world in reversed(made):
        world.close()


# -- What an exchange does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_byte_is_where_it_belongs(make_world: Any, api: VerbsApi, operation: str, size: int) -> None:
    world = make_world(size)
    shape = Shape(operation, size, 37, 48)
    with Ranks(api, size, shape.nbytes + 64) as ranks:
        for seed in range(3):
            ranks.run(shape, seed)
        strided = operation != "exchange_chunks"
        for engine in ranks.engines:
            counters = engine.counters
            assert (counters.exchanges, counters.writes, counters.receives_completed) == (
                3,
                3 * (size - 1),
                3 * (size - 1),
            )
            assert counters.write_bytes == 3 * (size - 1) * shape.share
            assert counters.rebinds == strided * (size - 1) and counters.split_writes == 0
            assert all(posted == (0, 4) for posted in engine.ledger.outstanding.values())
            assert engine.problem == ""
        done = world.counters()
    assert done["executed_writes"] == 3 * size * (size - 1) and done["write"] == 0
    assert done["written_bytes"] == 3 * size * (size - 1) * shape.share
    assert done["rnr_naks"] == done["errors"] == done["not_ready_posts"] == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_completions_of_different_peers_come_in_any_order(make_world: Any, api: VerbsApi, seed: int) -> None:
    """Also behind those of the next pieces of a split payload."""
    make_world(5, max_message=150, shuffle=seed)
    with Ranks(api, 5, 5 * 17 * 24) as ranks:
        for operation in OPERATIONS:
            ranks.run(Shape(operation, 5, 17, 24), seed)


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 4096), (513, 1), (2, 3), (64, 1792), (5, 16383)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_odd_shapes(make_world: Any, api: VerbsApi, operation: str, rows: int, width: int) -> None:
    make_world(4)
    shape = Shape(operation, 4, rows, width)
    with Ranks(api, 4, shape.nbytes) as ranks:
        ranks.run(shape)


def test_a_new_geometry_is_a_local_matter(make_world: Any, api: VerbsApi) -> None:
    """No registration, no exchange of keys: only what has changed is described, and a known one costs nothing."""
    world = make_world(4)
    shapes = [Shape(OPERATIONS[number % 3], 4, 3 + number, 16 * (1 + number % 5)) for number in range(12)]
    with Ranks(api, 4, max(shape.nbytes for shape in shapes)) as ranks:
        before = world.counters()
        records = [pair.record for pair in ranks.pairs]
        for seed, shape in enumerate(shapes):
            ranks.run(shape, seed)
        after = world.counters()
        for name in ("reg_mr", "create_mkey", "create_qp", "modify_qp"):
            assert after[name] == before[name]
        assert records == [pair.record for pair in ranks.pairs]
        # Eight strided shapes, twelve pairs of ranks.
        assert after["umrs"] == 8 * 12
        last = shapes[-2]
        ranks.run(last)
        described = world.counters()["umrs"]
        for _ in range(3):
            outcomes = ranks.rebind(last)
            assert all(outcome.ok and outcome.sends == 0 for outcome in outcomes)
        # Linear shapes need no key and forget none.
        ranks.run(Shape("exchange_chunks", 4, 7, 32))
        ranks.run(last)
        assert world.counters()["umrs"] == described


def test_several_outputs(make_world: Any, api: VerbsApi) -> None:
    """Each has keys of its own; one is closed while the others stay in use."""
    make_world(2)
    shape = Shape("gather_heads", 2, 9, 40)
    with Ranks(api, 2, shape.nbytes) as ranks:
        first = list(ranks.pairs), list(ranks.output)
        outputs = [torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(2)]
        second = [
            engine.register(output=ranks_of.memory(output), landing=ranks_of.memory(landing))
            for engine, output, landing in zip(ranks.engines, outputs, ranks.landing, strict=True)
        ]
        records = [pair.record for pair in second]
        for pair in second:
            pair.attach(records)
        for seed in range(4):
            ranks.pairs, ranks.output = (second, outputs) if seed % 2 else first
            ranks.run(shape, seed)
        # Receives are outstanding, as they always are; they hold no buffer.
        for pair in second:
            pair.close()
            pair.close()
        with pytest.raises(ClosedError, match="was closed"):
            second[0].rebind(shape.geometry(0), LONG)
        ranks.pairs, ranks.output = first
        ranks.run(shape, 9)
        assert [engine.counters.registrations for engine in ranks.engines] == [1, 1]


def test_peers_that_are_some_of_the_ranks(make_world: Any, api: VerbsApi) -> None:
    """The hybrid route: four ranks of eight are talked to by the NIC."""
    make_world(8)
    shape = Shape("scatter_heads", 8, 11, 24)
    members = [
        RdmaEngine(
            api,
            nic=f"mlx5_{rank}",
            gid_index=0,
            rank=rank,
            world_size=8,
            peers=[peer for peer in range(8) if peer // 4 != rank // 4],
        )
        for rank in range(8)
    ]
    assert members[5].peers == (0, 1, 2, 3)
    ranks_of.connect(members)
    buffers = [[torch.zeros(shape.nbytes, dtype=torch.uint8) for _ in range(8)] for _ in range(2)]
    pairs = [
        member.register(output=ranks_of.memory(buffers[0][rank]), landing=ranks_of.memory(buffers[1][rank]))
        for rank, member in enumerate(members)
    ]
    for pair in pairs:
        pair.attach([other.record for other in pairs])
    for rank in range(8):
        buffers[1][rank].random_(0, 256)
        assert pairs[rank].rebind(shape.geometry(rank, members[rank].peers), LONG).ok
    outcomes = ranks_of.on_threads(
        8, lambda rank: pairs[rank].exchange(shape.geometry(rank, members[rank].peers), 1, LONG)
    )
    assert all(outcome.ok and outcome.receives == 4 for outcome in outcomes)
    for rank in range(8):
        expected = shape.expected(buffers[1], rank).view(8, -1)
        got = buffers[0][rank].view(8, -1)
        for peer in range(8):
            assert torch.equal(got[peer], expected[peer] if peer in members[rank].peers else torch.zeros_like(got[0]))
    for rank, member in enumerate(members):
        assert member.quiesce(LONG).teardown_safe
        pairs[rank].close()
        member.close()


# -- Payloads above the port's limit ------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("send_depth", [1, 3, 16])
def test_a_payload_above_the_limit_is_split(make_world: Any, api: VerbsApi, operation: str, send_depth: int) -> None:
    """By offsets of the packed bytes, in the middle of rows too; the last piece has the message."""
    world = make_world(3, max_message=1000)
    shape = Shape(operation, 3, 101, 77)
    pieces = -(-shape.share // 1000)
    with Ranks(api, 3, shape.nbytes, settings=Settings(send_depth=send_depth)) as ranks:
        assert ranks.engines[0].max_message == 1000
        ranks.run(shape)
        counters = ranks.engines[1].counters
        assert (counters.writes, counters.split_writes) == (2 * pieces, 2 * (pieces - 1))
        done = world.counters()
        assert (done["write"], done["write_imm"]) == (6 * (pieces - 1), 6)
        # A payload of exactly the limit, and of a multiple of it.
        for rows in (10, 20):
            ranks.run(Shape(operation, 3, rows, 100))
        assert ranks.engines[1].counters.split_writes == 2 * (pieces - 1) + 2


def test_the_smaller_of_two_limits_counts(library: Path, tmp_path: Path, api: VerbsApi) -> None:
    devices = [emulator.nics(1, max_message=1000)[0], emulator.nics(2, max_message=300)[1]]
    with emulator.World(library, tmp_path / "fabric", devices):
        shape = Shape("scatter_heads", 2, 13, 61)
        with Ranks(api, 2, shape.nbytes) as ranks:
            ranks.run(shape)
            assert [engine.counters.writes for engine in ranks.engines] == [3, 3]


# -- What a NIC can't address -------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", ["scatter_heads", "gather_heads"])
def test_the_largest_pitch_works_and_one_more_is_refused(make_world: Any, api: VerbsApi, operation: str) -> None:
    """Beyond it a NIC sends wrong bytes without an error (`band_of_65536_is_cut_to_16_bits`): nothing is posted."""
    world = make_world(3)
    fits, wide = Shape(operation, 3, 5, 21845), Shape(operation, 3, 5, 21846)
    assert (fits.size * fits.width, wide.size * wide.width) == (MAX_STRIDE, MAX_STRIDE + 3)
    with Ranks(api, 3, wide.nbytes) as ranks:
        ranks.run(fits)
        before = world.counters()
        for rank, pair in enumerate(ranks.pairs):
            geometry = wide.geometry(rank)
            assert "65535" in problem_of(geometry, {"landing": wide.nbytes, "output": wide.nbytes})
            for call in (lambda: pair.rebind(geometry, LONG), lambda: pair.exchange(geometry, 9, LONG)):  # noqa: B023
                with pytest.raises(ArgumentValueError, match=r"holds at most"):
                    call()
        assert world.counters() == before
        # Contiguous bytes have no pitch.
        ranks.run(Shape("exchange_chunks", 3, 5, 21846))
        ranks.run(fits, 1)


def native_share(share: bytes, pair: Any, api: VerbsApi) -> None:
    """Bind a share past the check in Python."""
    packed = ctypes.create_string_buffer(share, len(share))
    outcome = ctypes.create_string_buffer(packing.OUTCOME.size)
    api.call["rebind"](pair._handle, ctypes.addressof(packed), ctypes.addressof(outcome), LONG, 1)


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        (Band(0, 4, 100, 65536), Band(0, 1, 400, 400), "at most 65535"),
        (Band(0, 2, 65536, 70000), Band(0, 1, 131072, 131072), "at most 65535"),
        (Band(0, 4, 100, 200), Band(0, 4, 100, 65536), "at most 65535"),
        (Band(0, 4, 100, 200), Band(0, 1, 399, 399), "into a band of 399"),
        (Band(0, 0, 100, 200), Band(0, 1, 100, 100), "makes no sense"),
        (Band(0, 4, 0, 200), Band(0, 1, 100, 100), "makes no sense"),
        (Band(0, 4, 100, 50), Band(0, 1, 400, 400), "makes no sense"),
        (Band(1 << 18, 1, 1, 1), Band(0, 1, 1, 1), "ends behind its buffer"),
        (Band(0, 4, 100, 65535), Band((1 << 18) - 399, 1, 400, 400), "ends behind its buffer"),
        (Band(0, 1 << 40, 1 << 40, 1 << 40), Band(0, 1, 400, 400), "makes no sense"),
        (Band((1 << 64) - 1, 1, 2, 2), Band(0, 1, 2, 2), "makes no sense"),
        (Band(0, 1, (1 << 64) - 1, 1), Band(0, 1, (1 << 64) - 1, 1), "makes no sense"),
    ],
)
def test_bad_bands_are_refused_in_both_languages(
    make_world: Any, api: VerbsApi, source: Band, target: Band, text: str
) -> None:
    make_world(2)
    with Ranks(api, 2, 1 << 18) as ranks:
        geometry = Geometry(((1, Transfer(source, target)),), ((1, Band(0, 1, 8, 8)),))
        assert problem_of(geometry, {"landing": 1 << 18, "output": 1 << 18})
        with pytest.raises(ArgumentValueError):
            ranks.pairs[0].rebind(geometry, LONG)
        with pytest.raises(ArgumentValueError, match=text):
            native_share(packing.SHARE.pack(1, 0, *source, *target, 0, 1, 8, 8), ranks.pairs[0], api)
        ranks.run(Shape("scatter_heads", 2, 3, 8))


def test_what_is_not_bound_or_attached_is_refused(make_world: Any, api: VerbsApi) -> None:
    make_world(3)
    shape = Shape("scatter_heads", 3, 4, 16)
    with Ranks(api, 3, 1024) as ranks:
        pair, geometry = ranks.pairs[0], shape.geometry(0)
        with pytest.raises(ArgumentValueError, match="rebind first"):
            pair.exchange(geometry, 1, LONG)
        fresh = ranks.engines[0].register(output=Memory(1 << 20, 64), landing=Memory(1 << 21, 64))
        chunks = Shape("exchange_chunks", 3, 1, 8)
        with pytest.raises(ArgumentValueError, match="not attached"):
            fresh.exchange(chunks.geometry(0), 1, LONG)
        with pytest.raises(ArgumentValueError, match="has 1024 bytes"):
            fresh.attach([None, *(other.record for other in ranks.pairs[1:])])
        fresh.close()
        for broken in (
            Geometry(geometry.sends[:1], geometry.receives),
            Geometry(geometry.sends, geometry.receives[:1]),
            Geometry((*geometry.sends[:1], geometry.sends[0]), geometry.receives),
        ):
            with pytest.raises(ArgumentValueError, match="each of the peers"):
                pair.rebind(broken, LONG)
        ranks.run(shape)


# -- The host's part ----------------------------------------------------------------------------------------------


def test_a_message_never_finds_no_receive(make_world: Any, api: VerbsApi) -> None:
    """Peers that are far ahead: the next receive is posted when the last was used, not when this rank gets to it."""
    world = make_world(4)
    shape = Shape("exchange_chunks", 4, 1, 64)
    calls = 60
    with Ranks(api, 4, shape.nbytes, settings=Settings(receive_depth=2)) as ranks:
        barrier = threading.Barrier(4)

        def run(rank: int) -> None:
            for call in range(calls):
                barrier.wait(30)
                if call % 4 == rank:
                    time.sleep(0.002)  # the others' messages are here before this rank asks for them
                assert ranks.pairs[rank].exchange(shape.geometry(rank), call, LONG).ok
                barrier.wait(30)

        ranks.each(run)
        done = world.counters()
        assert done["rnr_naks"] == 0 and done["write_imm"] == 12 * calls
        for engine in ranks.engines:
            assert engine.counters.receives_posted == 3 * (2 + calls)


def test_the_interpreter_runs_while_an_exchange_waits(make_world: Any, api: VerbsApi) -> None:
    """The GIL is released: another thread counts while this one waits for a peer that does not come."""
    make_world(2)
    shape = Shape("exchange_chunks", 2, 1, 64)
    with Ranks(api, 2, shape.nbytes) as ranks:
        ticks, stop = [0], threading.Event()

        def count() -> None:
            while not stop.is_set():
                ticks[0] += 1
                time.sleep(0.001)

        thread = threading.Thread(target=count)
        thread.start()
        outcome = ranks.pairs[0].exchange(shape.geometry(0), 1, 300_000_000)
        stop.set()
        thread.join()
        assert outcome.kind is Kind.DEADLINE and 0.3e9 <= outcome.elapsed_ns < 10e9
        assert ticks[0] >= 20


def test_posting_and_polling_cost_little(make_world: Any, api: VerbsApi) -> None:
    """20 µs for seven peers (``rdma_cost.py`` prints it): the best tenth, since others use the machine as well."""
    make_world(1, copies=False)
    shape = Shape("scatter_heads", 8, 256, 1024)
    engine, pair, _ = ranks_of.loopback(api, shape.nbytes)
    geometry = ranks_of.loopback_geometry(shape)
    assert pair.rebind(geometry, LONG).ok
    samples = []
    for epoch in range(200):
        outcome = pair.exchange(geometry, epoch, LONG)
        assert (outcome.kind, outcome.sends, outcome.receives) == (Kind.OK, 7, 7)
        samples.append(outcome.elapsed_ns)
    assert statistics.quantiles(samples, n=10)[0] <= 20_000
    assert engine.quiesce(LONG).teardown_safe
    pair.close()
    engine.close()


# -- Twins --------------------------------------------------------------------------------------------------------


def test_both_languages_mean_the_same() -> None:
    """Sizes of structs, numbers of outcomes, names of counters and the largest stride."""
    path = Path(str(resources.files("comm_pcie"))) / "include" / "comm_pcie" / "rdma_types.h"
    text = path.read_text(encoding="utf-8")
    sizes = re.findall(r'sizeof\((\w+)\) == (\d+), "Twin: module.py, (\w+)"', text)
    assert len(sizes) == 8 and all(name.upper() == twin for name, _, twin in sizes)
    assert all(getattr(packing, twin).size == int(size) for _, size, twin in sizes)
    kinds = dict(re.findall(r"^  k(\w+) = (\d+),", text, re.MULTILINE))
    assert {name.upper(): int(number) for name, number in kinds.items()} == {kind.name: kind for kind in Kind}
    (fields,) = re.findall(r"struct Counters \{(.*?)\};", text, re.DOTALL)
    assert tuple(re.findall(r"uint64_t (\w+);", fields)) == Counters._fields
    assert re.findall(r"kMaxStride = (\d+);", text) == [str(MAX_STRIDE)]


# -- Loading ------------------------------------------------------------------------------------------------------


def test_a_missing_library_or_symbol_is_a_reason(api: VerbsApi, engine_module: Module, library: Path) -> None:
    good = str(library)
    for names, texts in (
        (VerbsLibraries("libnone.so.7", good), ("libnone.so.7", "install libibverbs1")),
        (VerbsLibraries(good, "libnone.so.7"), ("libnone.so.7", "install ibverbs-providers")),
        (VerbsLibraries("libm.so.6", good), ("libm.so.6 has no ibv_get_device_list", "rdma-core 36")),
        (VerbsLibraries(good, "libm.so.6"), ("libm.so.6 has no mlx5dv_is_supported", "rdma-core 36")),
    ):
        found = load_verbs(names, module=engine_module)
        assert found.api is None and all(text in found.reason for text in texts), found.reason
        with pytest.raises(UnsupportedError, match="RDMA can't be used"):
            require(found)


def test_missing_headers_are_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: object) -> Module:
        raise JitBuildError("no header", lacking=("libibverbs-dev",))

    monkeypatch.setattr(verbs, "_load_module", lacking)
    found = load_verbs()
    assert found == LoadedVerbs(None, "the headers of rdma-core are missing: apt-get install libibverbs-dev")


def test_the_variable_names_one_library_for_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verbs.LIBRARY, raising=False)
    assert VerbsLibraries.default() == ("libibverbs.so.1", "libmlx5.so.1")
    monkeypatch.setenv(verbs.LIBRARY, "/x/y.so")
    assert VerbsLibraries.default() == ("/x/y.so", "/x/y.so")


def test_the_real_libraries_have_what_is_needed(engine_module: Module) -> None:
    """The symbols and versions of the table, in rdma-core as it is installed here."""
    found = load_verbs(VerbsLibraries(), module=engine_module)
    assert found.reason == "" and found.api is not None
    nics = Path("/sys/class/infiniband")
    assert len(found.api.devices()) == (len(list(nics.iterdir())) if nics.is_dir() else 0)


def test_devices_are_listed(make_world: Any, api: VerbsApi) -> None:
    assert api.devices() == ()
    make_world(3)
    assert api.devices() == ("mlx5_0", "mlx5_1", "mlx5_2")
    assert os.environ[verbs.LIBRARY] == api.libraries.ibverbs


def test_a_nic_that_talks_to_itself(make_world: Any, api: VerbsApi) -> None:
    """What the tier of real hardware does, on the emulator."""
    world = make_world(1)
    ranks_of.exchange_with_itself(api, "mlx5_0", 0)
    assert world.counters()["executed_writes"] == 21


def test_a_real_nic(engine_module: Module, shell_environment: dict[str, str]) -> None:
    """The tier of real hardware: eight ranks' exchange over a NIC of this machine, with itself.

    ``COMM_REQUIRE_RDMA=1`` makes it an error that there is none.
    """
    wanted = shell_environment.get("COMM_REQUIRE_RDMA") == "1"
    found = load_verbs(VerbsLibraries(), module=engine_module)
    names = () if found.api is None else found.api.devices()
    if not names:
        text = f"no RDMA device is here ({found.reason or 'libibverbs lists none'})"
        _left_out(text, wanted)
    assert found.api is not None
    problems = []
    for name in names:
        for index in range(16):
            try:
                ranks_of.exchange_with_itself(found.api, name, index)
            except UnsupportedError as error:
                problems.append(str(error))
            else:
                return
    _left_out(f"no NIC of {names} can be used: {problems}", wanted)


def _left_out(text: str, wanted: bool) -> NoReturn:
    if wanted:
        pytest.fail(f"COMM_REQUIRE_RDMA=1: {text}")
    pytest.skip(text)
