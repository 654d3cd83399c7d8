"""NVLink sessions on real GPUs: the contracts by every route, pools, strided inputs, long runs and large operands.

Several ranks share each GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they really run
at the same time. On GPUs of their own the same tests go over NVLink.
"""

from __future__ import annotations

import os
from types import MappingProxyType
from typing import Any

import pytest
import torch

from comm_core.testing import reference
from comm_core.testing.contract import TransportContract
from comm_core.testing.device_contract import DeviceCase, DeviceContract, expected, operand
from comm_core.testing.gpu import plugin_of, shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes()
ENGINES = {"COMM_NVLINK_ENGINE_BYTES": "0"}


def make_plugin() -> object:
    """Return the plugin, for ranks of a source tree that is not installed."""
    from comm_nvlink.plugin import NvlinkPlugin

    return NvlinkPlugin()


MADE_BY = plugin_of("nvlink", make_plugin)
PLUGIN = None if MADE_BY is None else make_plugin


ranks = shared_gpu_pool(8)


class TestNvlink(TransportContract):
    """The contract by the default route: small operands, so by the SMs."""

    transport = "nvlink"
    plugin = PLUGIN
    device_type = "cuda"
    world_sizes = SIZES

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        # The pool has eight ranks, so a group of all of them is WORLD.
        if world_size < ranks.size:
            super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


class TestNvlinkEngines(TestNvlink):
    """The contract with the copy engines for everything they can move."""

    world_sizes = SIZES[:1]

    @pytest.fixture(autouse=True)
    def engines(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COMM_NVLINK_ENGINE_BYTES", "0")


class TestOnDevices(DeviceContract):
    """Graphs, streams and stalls by the default route; leaks are below."""

    transport = "nvlink"
    plugin = PLUGIN
    world_sizes = SIZES
    graph_sizes = SIZES
    test_cycles_leak_neither_memory_nor_descriptors = None  # pyright: ignore[reportAssignmentType]


class TestEnginesOnDevices(DeviceContract):
    """The same with the copy engines beside the SMs."""

    transport = "nvlink"
    plugin = PLUGIN
    world_sizes = SIZES[:1]
    graph_sizes = SIZES[-1:]
    environment = ENGINES
    poisons_all = False
    cycles = 8


class TestNoSmsOnDevices(DeviceContract):
    """The same with the copy engines alone."""

    transport = "nvlink"
    plugin = PLUGIN
    world_sizes = SIZES[:1]
    graph_sizes = SIZES[-1:]
    options = MappingProxyType({"max_sms": 0})
    poisons_all = False
    host_waits = True
    cycles = 8


def run(
    ranks: RankPool, function: Any, *arguments: Any, size: int, timeout_s: float = 60, **options: Any
) -> list[Any]:
    environment = options.pop("env", None)
    case = DeviceCase("nvlink", tuple(options.items()), MADE_BY)
    return case.run(ranks, function, *arguments, size=size, timeout_s=timeout_s, env=environment)


ROUTES = pytest.mark.parametrize("env", [{}, ENGINES], ids=["default", "engines"])

# The memory pool


def pooled(group: Any, case: DeviceCase) -> list[str]:
    """Outputs of the pool at any offset, eagerly and in a graph, and a pool that is full."""
    texts: list[str] = []
    with case.open(group) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        x = operand(rank, 0, size, device).clone()
        shape = expected(rank, 0, size, device).shape
        with comm.memory_pool():
            # Different offsets on every rank.
            held = torch.empty(1000 * (rank + 1), dtype=torch.uint8, device=device)
            outs = [torch.empty(shape, dtype=x.dtype, device=device) for _ in range(3)]
        session: Any = comm._session
        arena = session.arena
        assert all(arena.address <= out.data_ptr() < arena.address + arena.nbytes for out in (held, *outs))
        assert torch.empty(1, device=device).data_ptr() not in range(arena.address, arena.address + arena.nbytes)
        for round_ in range(9):
            out = outs[round_ % 3]
            out.fill_(3)
            comm.scatter_heads(operand(rank, round_, size, device), out=out)
            assert_same_bits(out, expected(rank, round_, size, device))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            comm.scatter_heads(x, out=outs[1])
        for round_ in range(3):
            x.copy_(operand(rank, 20 + round_, size, device))
            graph.replay()
            torch.cuda.synchronize()
            assert_same_bits(outs[1], expected(rank, 20 + round_, size, device))
        with pytest.raises(torch.OutOfMemoryError) as caught, comm.memory_pool():
            torch.empty(arena.nbytes, dtype=torch.uint8, device=device)
        texts.append(str(caught.value))
        # It goes on after that, on all ranks.
        comm.scatter_heads(x, out=outs[0])
        assert_same_bits(outs[0], expected(rank, 22, size, device))
        torch.cuda.synchronize()
    # A tensor outlives the session; its memory is not given to the next pool while it is there.
    late, outs = outs[2], []
    place = (late.data_ptr(), late.data_ptr() + late.numel() * late.itemsize)
    with case.open(group) as comm:
        with comm.memory_pool():
            again = [torch.empty(shape, dtype=torch.bfloat16, device=comm.device) for _ in range(3)]
        assert not any(place[0] < out.data_ptr() + out.numel() * 2 and out.data_ptr() < place[1] for out in again)
        del late, again
    return texts


@ROUTES
def test_tensors_of_the_pool_are_written_in_place(ranks: RankPool, env: dict[str, str]) -> None:
    for size in SIZES[:2]:
        for (text,) in run(ranks, pooled, size=size, pool_bytes=32 << 20, env=env):
            assert "the memory pool of 33554432 bytes is exhausted" in text and "Raise pool_bytes" in text


# Strided inputs


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the same view of the same storage on a device; `to` would make most of them contiguous."""
    whole = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def bands(group: Any, case: DeviceCase, layouts: list[Any]) -> int:
    """Head bands from views of every layout, each rank another; rows short and long enough for copy engines."""
    with case.open(group, max_bytes=8 << 20) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        for d in (8, 128, 512):
            b, s, h = 2, 16, 4
            shape = (b, s, size * h, d)
            full = [[make_input(i, peer, shape, torch.bfloat16) for peer in range(size)] for i in range(3)]
            for turn in range(len(layouts)):
                mine = layouts[(rank + turn) % len(layouts)]
                q, k, v = (moved(make_input(i, rank, shape, torch.bfloat16, mine), device) for i in range(3))
                fused = comm.scatter_qkv_head_chunk(q, k, v, head_offset=1, head_count=2)
                parts = [reference.scatter_heads(x)[rank][:, :, 1:3] for x in full]
                assert_same_bits(fused.cpu(), torch.cat(parts, dim=-1), f"{d} {mine}")
                whole = [make_input(7, peer, (b, s * size, h, d), torch.bfloat16) for peer in range(size)]
                for out in (
                    torch.zeros(b, s, size * h, d, dtype=torch.bfloat16, device=device),
                    comm.allocate_output(whole[rank].to(device), "gather_heads"),
                ):
                    for at, count in ((0, 3), (3, 1)):
                        # A view of the bands of a larger tensor.
                        band = whole[rank].to(device)[:, :, at : at + count]
                        comm.gather_output_head_chunk(band, local_heads=h, head_offset=at, out=out)
                    assert_same_bits(out.cpu(), reference.gather_heads(whole)[rank])
        return 1


@pytest.mark.parametrize("options", [{}, {"env": ENGINES}, {"max_sms": 0}], ids=["default", "engines", "no SMs"])
def test_bands_of_views_that_differ_between_ranks(ranks: RankPool, options: dict[str, Any]) -> None:
    for size in SIZES[:2]:
        assert run(ranks, bands, [False, "fused", "transposed", "stepped"], size=size, **options) == [1] * size


# Long runs


def rounds(group: Any, case: DeviceCase, count: int, elements: int) -> int:
    """Calls in a row, no host in between, with data that changes and ranks that are late in turns.

    What every rank should get follows from the round, so it is compared on the device, and looked at once at the end.
    """
    with case.open(group, dtype=torch.int32, max_bytes=4 << 20) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        base = torch.arange(size * elements, dtype=torch.int32, device=device).view(1, 1, size, elements)
        # What peer p sends in round n is base + 1000003 * n + p << 20, in int32 arithmetic.
        peers = torch.arange(size, dtype=torch.int32, device=device).view(1, 1, -1, 1)
        owed = base[:, :, rank : rank + 1] + (peers << 20)
        outs = [comm.allocate_output(base, "exchange_chunks"), torch.empty_like(base)]
        x, wrong = torch.empty_like(base), torch.zeros((), dtype=torch.int64, device=device)
        busy = torch.empty(1 << 20, device=device)
        for round_ in range(count):
            shift = round_ * 1000003 % (1 << 30)
            torch.add(base, shift + (rank << 20), out=x)
            if round_ % 7 == rank % 7:
                # This rank's device is late.
                for _ in range(3):
                    busy.mul_(1.0)
            out = outs[(round_ + rank) % 3 % 2]
            comm.exchange_chunks(x, out=out)
            wrong += (out != owed + shift).sum()
        assert int(wrong) == 0
        return count


@pytest.mark.parametrize(
    ("options", "rate"), [({}, 1), ({"env": ENGINES}, 10), ({"max_sms": 0}, 20)], ids=["default", "engines", "no SMs"]
)
def test_rounds_with_ranks_out_of_step(ranks: RankPool, options: dict[str, Any], rate: int) -> None:
    """G3: 10,000 rounds of two ranks, fewer of more. The data of every round is another's nowhere."""
    for size in SIZES:
        count = (10_000 if size == 2 else 800) // rate
        # About 6 KiB a pair: several slices, and rows that the copy engines take.
        assert run(ranks, rounds, count, 1500, size=size, timeout_s=110, **options) == [count] * size


# Large operands


def large(group: Any, case: DeviceCase) -> int:
    """2^31 - 2 elements of one byte, which two ranks can halve; every byte is compared."""
    elements = (1 << 30) - 1
    with case.open(group, dtype=torch.uint8, max_bytes=2 * elements) as comm:
        rank, size, device = comm.rank, comm.world_size, comm.device
        # A period that is no power of two: data of another place is another's.
        unit = (torch.arange(251 * 4099, dtype=torch.int64, device=device) * 131 % 251).to(torch.uint8)
        pattern = unit.repeat(elements // unit.numel() + 2)
        x = torch.empty(1, 1, size, elements, dtype=torch.uint8, device=device)
        for peer in range(size):
            x[0, 0, peer] = pattern[rank * 17 + peer * 5 : rank * 17 + peer * 5 + elements]
        out = torch.empty_like(x)
        comm.exchange_chunks(x, out=out)
        for peer in range(size):
            want = pattern[peer * 17 + rank * 5 : peer * 17 + rank * 5 + elements]
            assert torch.equal(out[0, 0, peer], want), peer
        return elements


def test_operands_of_almost_two_to_the_31_elements(ranks: RankPool) -> None:
    """Offsets inside are 64 bits wide. About 7 GiB a rank; skipped where a GPU has less than two ranks need."""
    free = min(torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count()))
    if free < 24 << 30:
        pytest.skip(f"{free >> 30} GiB of GPU memory are free, 24 are needed")
    assert run(ranks, large, size=2, timeout_s=110) == [(1 << 30) - 1] * 2


# Opening and closing


class TestManyCycles(DeviceContract):
    """200 times open, exchange and close, or as many as fit GPU_CHECK_CYCLE_SECONDS (0.25 each)."""

    transport = "nvlink"
    plugin = PLUGIN
    world_sizes = SIZES[:1]
    options = MappingProxyType({"pool_bytes": 4 << 20})
    cycles = 200
    cycle_seconds = float(os.environ.get("GPU_CHECK_CYCLE_SECONDS", "15"))

    # The rest is tested above.
    test_captured_graphs_replay_among_eager_calls = None  # pyright: ignore[reportAssignmentType]
    test_the_receiver_says_where_so_ranks_may_differ = None  # pyright: ignore[reportAssignmentType]
    test_changing_streams_are_ordered = None  # pyright: ignore[reportAssignmentType]
    test_a_stalled_rank_is_named_outputs_are_poisoned_and_all_leave = None  # pyright: ignore[reportAssignmentType]
