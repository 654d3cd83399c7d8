"""The kernels on a GPU against reference and oracle: every byte; in graphs, at full size, over windows.

``python tools/gpu_check.py`` runs this under MPS, where ranks that share a GPU really run at the same time.
"""

from __future__ import annotations

import time
from typing import Any

import lowp_cases
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from lowp_cases import BF16, F16, Case
from lowp_checks import check, expected, outputs, whole

from comm_core import UlyssesCommunicator
from comm_core.errors import CommError, PeerStalledError
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_lowp import kernels
from comm_lowp.kernels import DirectScatter, Kernels
from comm_lowp.sage2 import primitives, reference
from comm_lowp.sage2.grid import LAYOUTS, SM90

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes(at_most=4)
DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def loaded() -> Kernels:
    return kernels.load(DEVICE)


ranks = shared_gpu_pool(4)


# One process


@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("case", lowp_cases.EDGES, ids=lambda case: "-".join(str(part) for part in case))
def test_edges_equal_the_quantization_of_the_gathered_sequence(loaded: Kernels, case: Case, pdl: bool) -> None:
    whole(loaded, case, pdl=pdl)


@pytest.mark.deadline(300)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=lowp_cases.cases())
def test_any_geometry_equals_the_quantization_of_the_gathered_sequence(loaded: Kernels, case: Case) -> None:
    """O1 and O7."""
    whole(loaded, case)


def test_projection_views_are_read_in_place(loaded: Kernels) -> None:
    """O6: views of one projection, and heads before rows in memory."""
    for layout in sorted(LAYOUTS):
        for dim in (64, 128):
            case = Case(2, 2, 270, 3, dim, 333, BF16, layout, 5)
            values = [x.to(DEVICE) for x in lowp_cases.operands(case)]
            b, s, h, d = values[0].shape
            fused = torch.full((b, s + 3, h, 3 * d + 8), torch.nan, dtype=case.dtype, device=DEVICE)
            views = [fused[:, 1 : 1 + s, :, i * d : (i + 1) * d] for i in range(3)]
            for view, value in zip(views, values, strict=True):
                view.copy_(value)
            turned = values[1].transpose(1, 2).contiguous().transpose(1, 2)
            whole(loaded, case, views[0], turned, views[2])


def test_offsets_beyond_32_bits(loaded: Kernels) -> None:
    """A tensor of 65 rows spread over 6 GiB: where they are counts, not how many elements there are."""
    case = Case(1, 1, 65, 1, 128, 60, BF16, SM90.name, 3)
    q, k, v = lowp_cases.operands(case)
    pitch = 3 << 24  # elements of 2 bytes: 96 MiB a row
    try:
        memory = torch.empty(65 * pitch, dtype=BF16, device=DEVICE)
    except torch.cuda.OutOfMemoryError:
        pytest.skip("needs 6.3 GiB of device memory")
    far = memory.as_strided((1, 65, 1, 128), (0, pitch, 128, 1))
    for x in (q, k, v):
        far.copy_(x)
        spread = [far if y is x else y.to(DEVICE) for y in (q, k, v)]
        whole(loaded, case, *spread)


def end_to_end(loaded: Kernels, case: Case, q: Any, k: Any, v: Any, outs: Any, held: Any) -> None:
    """Run all passes of a single rank with storage that exists already."""
    (grid,) = case.grids
    scratch, final, flat, sent = held
    loaded.statistics(q, k, v, grid, flat[0], scratch)
    loaded.finalize(flat, scratch, grid, final, own_v_scale=outs[5])
    loaded.quant_pack(q, k, v, final, grid, [sent.data_ptr()])
    loaded.unpack(sent, grid, outs[:5])


def held_storage(loaded: Kernels, case: Case) -> Any:
    (grid,) = case.grids
    flat = torch.empty(1, grid.statistics_elems, device=DEVICE)
    sent = torch.empty(1, grid.payload.chunk_bytes, dtype=torch.uint8, device=DEVICE)
    return loaded.scratch(grid, case.dtype), loaded.final(grid, case.dtype), flat, sent


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_all_passes_are_captured_and_replayed(loaded: Kernels, layout: str) -> None:
    case = Case(1, 1, 300, 2, 128, 290, BF16, layout, 0)
    (grid,) = case.grids
    q, k, v = (x.to(DEVICE) for x in lowp_cases.operands(case))
    outs, held = outputs(grid, DEVICE), held_storage(loaded, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        end_to_end(loaded, case, q, k, v, outs, held)
    for seed in range(1, 4):
        values = lowp_cases.operands(case._replace(seed=seed))
        for x, value in zip((q, k, v), values, strict=True):
            x.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        check(case, expected(case, *values), outs, 0)


@pytest.mark.parametrize(
    ("dtype", "dim", "layout"), [(BF16, 128, "sage2_sm90"), (F16, 64, "sage2_sm89_sm120"), (BF16, 64, "sage2_sm90")]
)
def test_64_mi_elements_equal_the_reference_on_the_gpu(loaded: Kernels, dtype: Any, dim: int, layout: str) -> None:
    """Full size, with waves of blocks that no small case has; twice, because a race shows now and then."""
    case = Case(1, 1, (64 << 20) // (24 * dim) + 77, 24, dim, (64 << 20) // (24 * dim) - 50, dtype, layout, 0)
    (grid,) = case.grids
    generator = torch.Generator(DEVICE).manual_seed(7)

    def one() -> torch.Tensor:
        x = torch.randn(grid.shape, generator=generator, device=DEVICE) * 3 + 1
        x[:, case.used :] = 0
        return x.to(dtype)

    q, k, v = one(), one(), one()
    flat = torch.empty(grid.statistics_elems, device=DEVICE)
    context = primitives.torch_statistics(q, k, v, grid, flat)
    record = primitives.torch_final(flat.view(1, -1), context)
    payload = torch.empty(1, grid.payload.chunk_bytes, dtype=torch.uint8, device=DEVICE)
    primitives.torch_pack(q, k, v, record, payload)
    wanted = outputs(grid, DEVICE)
    primitives.torch_unpack(payload, grid, wanted[:5])
    held = held_storage(loaded, case)
    for _ in range(2):
        outs = outputs(grid, DEVICE)
        end_to_end(loaded, case, q, k, v, outs, held)
        assert torch.equal(held[2][0], flat)
        assert torch.equal(held[3], payload)
        for out, other in zip(outs[:5], wanted[:5], strict=True):
            assert torch.equal(out.view(torch.uint8), other.view(torch.uint8))
        assert torch.equal(outs[5], record.v_scale)


def test_the_hardware_rounds_e4m3_as_the_reference(loaded: Kernels) -> None:
    """Every value of both types in one channel of each amax that a value can be: the conversion of the device."""
    for dtype in (BF16, F16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        values = values[values.isfinite() & (values.abs() < 2.0**15)]
        generator = torch.Generator().manual_seed(1)
        v = values[torch.randint(0, values.numel(), (4096, 64), generator=generator)].view(1, 4096, 1, 64)
        # Amaxes of all magnitudes.
        v = (v.float() * torch.exp2(-torch.arange(64.0) / 2)).to(dtype)
        for layout in LAYOUTS.values():
            scale = reference.final_v_scale(reference.v_amax(v), layout.v_max)
            codes = primitives.quant_v_fp8_with_scale(v.to(DEVICE), scale.to(DEVICE), layout=layout.name)
            assert torch.equal(codes.cpu(), reference.quantize_v(v, scale, layout.v_max))


# Ranks that share the GPU, over windows


def open_session(group: Any) -> tuple[UlyssesCommunicator, Any]:
    """Return a communicator over windows, and its session, of which the exchange has a window of its own."""
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    comm = UlyssesCommunicator(group, max_bytes=1 << 20, dtype=BF16, backend="windows", device=device)
    return comm, comm._session


def encode(direct: DirectScatter, case: Case, rank: int, device: torch.device, outs: Any = None) -> Any:
    """Exchange the operands of a case."""
    shards = case.shards(lowp_cases.operands(case), rank, device)
    outs = outputs(case.grids[rank], device) if outs is None else outs
    direct(*shards, outs)
    return outs


def verify(case: Case, outs: Any, rank: int) -> None:
    check(case, expected(case, *lowp_cases.operands(case)), outs, rank)


def scatter(group: Any, cases: list[Case], rounds: int, jitter: bool) -> int:
    """Several geometries in turn over one session, each several times; one rank after the other is late."""
    rank, calls = group.rank(), 0
    comm, session = open_session(group)
    with comm:
        loaded = kernels.load(comm.device)
        for case in cases:
            direct = loaded.direct(session, case.grids[rank], case.dtype)
            for number in range(rounds):
                seeded = case._replace(seed=case.seed + number)
                if jitter and number % case.ranks == rank:
                    torch.cuda._sleep(20_000_000)
                outs = encode(direct, seeded, rank, comm.device)
                verify(seeded, outs, rank)
                # Other operations of the session in between.
                value = torch.full((4,), rank, device=comm.device)
                gathered = torch.empty(case.ranks, 4, dtype=value.dtype, device=comm.device)
                session.all_gather_small(value, gathered)
                assert gathered[:, 0].tolist() == list(range(case.ranks))
                calls += 1
    return calls


@pytest.mark.parametrize("jitter", [False, True])
def test_ranks_store_into_each_others_windows(ranks: RankPool, jitter: bool) -> None:
    """O1 over windows: the outputs of every rank equal the quantization of the gathered sequence."""
    for size in SIZES:
        cases = [
            Case(size, 1, 65, 2, 64, 65 * size - 9, BF16, "sage2_sm90", 1),
            Case(size, 2, 257, 3, 128, 257 * size, F16, "sage2_sm89_sm120", 2, "bias"),
            Case(size, 1, 5, 1, 64, 4, BF16, "sage2_sm90", 3),
            Case(size, 1, 700, 9, 128, 300, BF16, "sage2_sm90", 4, "zeros"),
        ]
        assert ranks.run(scatter, cases, 4, jitter, ranks=size, timeout_s=110) == [16] * size


def unchecked(group: Any, case: Case, rounds: int) -> bool:
    """Calls without any synchronization between them, on changing streams."""
    rank = group.rank()
    comm, session = open_session(group)
    with comm:
        direct = kernels.load(comm.device).direct(session, case.grids[rank], case.dtype)
        inputs: list[lowp_cases.Operands] = []
        results: list[Any] = []
        for seed in range(rounds):
            values = lowp_cases.operands(case._replace(seed=seed))
            inputs.append(case.shards(values, rank, comm.device))
            results.append(outputs(case.grids[rank], comm.device))
        streams = [torch.cuda.Stream(), torch.cuda.current_stream()]
        torch.cuda.synchronize()
        for number, (shards, outs) in enumerate(zip(inputs, results, strict=True)):
            with torch.cuda.stream(streams[number // 2 % 2]):
                direct(*shards, outs)
        torch.cuda.synchronize()
        for seed, outs in enumerate(results):
            verify(case._replace(seed=seed), outs, rank)
    return True


def test_calls_follow_each_other_without_synchronization(ranks: RankPool) -> None:
    """No rank overwrites what a peer still unpacks."""
    for size in SIZES:
        case = Case(size, 1, 300, 4, 128, 300 * size, BF16, "sage2_sm90", 0)
        assert ranks.run(unchecked, case, 12, ranks=size, timeout_s=100) == [True] * size


def replay(group: Any, case: Case) -> bool:
    """Capture two calls, and replay them with changed inputs among eager calls."""
    rank = group.rank()
    comm, session = open_session(group)
    with comm:
        direct = kernels.load(comm.device).direct(session, case.grids[rank], case.dtype)
        shards = case.shards(lowp_cases.operands(case), rank, comm.device)
        outs = outputs(case.grids[rank], comm.device)
        direct(*shards, outs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            direct(*shards, outs)
            direct(*shards, outs)
        for seed in range(1, 5):
            seeded = case._replace(seed=seed)
            for x, value in zip(shards, lowp_cases.operands(seeded), strict=True):
                x.copy_(case.shard(value, rank))
            graph.replay()
            torch.cuda.synchronize()
            verify(seeded, outs, rank)
            verify(seeded, encode(direct, seeded, rank, comm.device), rank)
    return True


def test_captured_calls_replay_among_eager_ones(ranks: RankPool) -> None:
    for size in SIZES:
        case = Case(size, 1, 130, 2, 128, 130 * size - 1, BF16, "sage2_sm90", 0)
        assert ranks.run(replay, case, ranks=size, timeout_s=100) == [True] * size


def stall(group: Any, case: Case, captured: bool) -> Any:
    """Rank 1 is too late for its second call, eagerly or in a replay."""
    rank = group.rank()
    comm, session = open_session(group)
    direct = kernels.load(comm.device).direct(session, case.grids[rank], case.dtype)
    shards = case.shards(lowp_cases.operands(case), rank, comm.device)
    outs = outputs(case.grids[rank], comm.device)
    direct(*shards, outs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            direct(*shards, outs)
    if rank == 1:
        time.sleep(2.5)
    result: Any = "accepted"
    try:
        if captured:
            graph.replay()
        else:
            direct(*shards, outs)
        torch.cuda.synchronize()
        direct(*shards, outs)
    except PeerStalledError as error:
        result = error.waited_for, all(bool((out.view(torch.uint8) == 0xFF).all()) for out in outs)
    try:
        comm.close(timeout=5)
    except CommError as error:
        return result, type(error).__name__
    return result, "closed"


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_a_late_rank_is_named_and_outputs_are_poisoned(ranks: RankPool, captured: bool) -> None:
    for size in SIZES:
        case = Case(size, 1, 130, 2, 128, 130 * size, BF16, "sage2_sm90", 0)
        outcomes = ranks.run(stall, case, captured, ranks=size, timeout_s=90, env={"COMM_TIMEOUT_S": "1"}, fresh=True)
        assert outcomes == [((1, True), "closed")] * size
