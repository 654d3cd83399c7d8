"""The transport ``mnnvl`` and its memory on real GPUs: contracts, stalls, checkpoint and restore, leaks.

Several ranks share each GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they really run
at the same time. On GPUs of their own the same tests go over NVLink. Nothing here asks for multicast.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import UlyssesCommunicator, plugins
from comm_core._driver import Device
from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import CheckpointError, CommError, CudaCallError, JointError
from comm_core.mapping import Mapping
from comm_core.memory.vmm_fabric import VmmFabricMemory
from comm_core.testing.contract import TransportContract
from comm_core.testing.device_contract import DeviceContract, expected, operand
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.new_groups import new_group_of
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits
from comm_mnnvl import McastGPUBuffer, MnnvlConfig, MnnvlMemory, SymmDeviceMemory

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes()
MIB = 1 << 20


def make_plugin() -> object:
    """Return the plugin, for ranks of a source tree that is not installed."""
    from comm_mnnvl.plugin import MnnvlPlugin

    return MnnvlPlugin()


PLUGIN = None if entry_points(group="comm_core.v1", name="mnnvl") else make_plugin


ranks = shared_gpu_pool(8)


class TestMnnvl(TransportContract):
    """What every transport must do."""

    transport = "mnnvl"
    plugin = PLUGIN
    device_type = "cuda"
    world_sizes = SIZES

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        # The pool has eight ranks, so a group of all of them is WORLD.
        if world_size < ranks.size:
            super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


class TestMnnvlOnDevices(DeviceContract):
    """Graphs, streams, stalls and leaks."""

    transport = "mnnvl"
    plugin = PLUGIN
    world_sizes = SIZES
    cycles = 16


# In a rank


def own_device(group: Any) -> torch.device:
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def open_comm(group: Any, ranks: Any = None, **changes: Any) -> UlyssesCommunicator:
    """Open a communicator of `ranks`, on the device that this rank has in `group`."""
    if "mnnvl" not in plugins.registry().transports:
        plugins.register("mnnvl under test", make_plugin())
    arguments = {"max_bytes": MIB, "dtype": torch.bfloat16, "device": own_device(group), **changes}
    return UlyssesCommunicator(group if ranks is None else ranks, backend="mnnvl", **arguments)


def used_bytes() -> int:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class Counted:
    """Counts what the driver's wrapper makes and gives back, inside a ``with`` block."""

    MADE = (
        ("handles", ("create", "import_descriptor"), "release"),
        ("reservations", ("reserve",), "free_reservation"),
        ("mappings", ("map",), "unmap"),
    )

    def __init__(self) -> None:
        self.alive: Counter[str] = Counter()
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> Counted:
        for name, ups, down in self.MADE:
            for up in ups:
                self._wrap(up, name, 1)
            self._wrap(down, name, -1)
        return self

    def __exit__(self, *error: object) -> None:
        for method, original in self._originals.items():
            setattr(Device, method, original)

    def _wrap(self, method: str, name: str, by: int) -> None:
        original: Callable[..., Any] = getattr(Device, method)
        self._originals[method] = original

        def call(device: Device, *arguments: Any, **keywords: Any) -> Any:
            result = original(device, *arguments, **keywords)
            self.alive[name] += by
            return result

        setattr(Device, method, call)


# Checkpoint and restore


def replays(group: Any, backend: str) -> Any:
    """Capture, prepare, use the memory for other things, restore with a new group, replay; three times."""
    first = new_group_of(group)
    comm = open_comm(first, max_bytes=32 * MIB)
    rank, size, device = comm.rank, comm.world_size, comm.device
    x = operand(rank, 0, size, device).clone()
    y = comm.allocate_output(x, "scatter_heads")
    z = comm.allocate_output(y, "gather_heads")
    plain = torch.empty_like(y)
    for out in (y, plain):
        comm.scatter_heads(x, out=out)
    comm.gather_heads(y, out=z)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.scatter_heads(x, out=y)
        comm.scatter_heads(x, out=plain)
        comm.gather_heads(y, out=z)
    addresses = [item.addresses for item in comm._session.allocations()]  # pyright: ignore
    freed: list[int] = []
    last = first
    for round_ in range(1, 4):
        before = used_bytes()
        comm.checkpoint_prepare()
        freed.append(before - used_bytes())
        # Nobody allocates before all have looked.
        last.barrier().wait()
        dist.destroy_process_group(last)
        for call in (lambda: comm.scatter_heads(x, out=y), lambda: comm.allocate_output(x, "scatter_heads")):
            with pytest.raises(CheckpointError, match="detached"):
                call()
        other = torch.full((48 * MIB,), round_, dtype=torch.uint8, device=device)
        last = new_group_of(group)
        with torch.inference_mode():
            comm.checkpoint_restore(TorchDistBackend(last) if backend == "comm backend" else last)
        assert [item.addresses for item in comm._session.allocations()] == addresses  # pyright: ignore
        for step in range(3):
            x.copy_(operand(rank, 10 * round_ + step, size, device))
            z.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            comm.check()
            result = expected(rank, 10 * round_ + step, size, device)
            assert_same_bits(y, result)
            assert_same_bits(plain, result)
            assert_same_bits(z, x)
            assert_same_bits(comm.scatter_heads(x), result)
        assert bool((other == round_).all()), "somebody wrote into memory that is not theirs"
        del other
    comm.close()
    return freed


@pytest.mark.parametrize("backend", ["process group", "comm backend"])
def test_captured_graphs_replay_after_a_restore_with_a_new_group(ranks: RankPool, backend: str) -> None:
    """H3: at the same addresses, after the physical memory was really given up and used for other things."""
    for size in SIZES if backend == "process group" else SIZES[:1]:
        for freed in ranks.run(replays, backend, ranks=size, timeout_s=110):
            # The staging of this rank alone is as much; the second and third time like the first.
            assert min(freed) >= 32 * MIB, freed


def cycles(group: Any, count: int, seconds: float) -> Any:
    """Prepare and restore over and over in a process that lives on; how often, marks on the way, what is left."""
    with Counted() as counted:
        done, marks = cycle_all(group, count, seconds, counted)
        return done, marks, {name: n for name, n in counted.alive.items() if n}


def cycle_all(group: Any, count: int, seconds: float, counted: Counted) -> Any:
    comm = open_comm(group)
    memory = SymmDeviceMemory(MIB, comm.world_size, comm.rank, comm.device.index, TorchDistBackend(group))
    x = operand(comm.rank, 0, comm.world_size, comm.device).clone()
    y = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        comm.scatter_heads(x, out=y)
    marks: list[Any] = []
    started = time.monotonic()
    for cycle in range(count):
        comm.checkpoint_prepare()
        memory.checkpoint_prepare()
        comm.checkpoint_restore(group)
        memory.checkpoint_restore(TorchDistBackend(group))
        x.copy_(operand(comm.rank, cycle, comm.world_size, comm.device))
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(y, expected(comm.rank, cycle, comm.world_size, comm.device))
        over = torch.tensor([time.monotonic() - started > seconds], dtype=torch.int32)
        group.allreduce([over]).wait()
        if cycle in (4, count - 1) or bool(over.item()):
            group.barrier().wait()
            marks.append((used_bytes(), descriptors(), dict(counted.alive)))
            group.barrier().wait()
        if bool(over.item()):
            break
    memory.close()
    comm.close()
    return cycle + 1, marks


def test_a_hundred_cycles_leak_neither_memory_nor_handles_nor_descriptors(ranks: RankPool) -> None:
    """E4, H2: and afterwards nothing is left at all."""
    outcomes = ranks.run(cycles, 100, 80.0, ranks=2, timeout_s=115, fresh=True)
    for done, marks, left in outcomes:
        assert done == 100, outcomes
        (before, files_before, alive_before), (after, files_after, alive_after) = marks
        assert (files_after, alive_after) == (files_before, alive_before), outcomes
        # The driver's own pools settle in steps of 2 MiB; 95 cycles of 5 MiB would be half a gigabyte.
        assert after - before <= 8 * MIB, outcomes
        assert left == {}, outcomes


def wrong_order(group: Any) -> list[str]:
    """A capture on one rank, and one rank that prepares another thing: everybody raises, and nothing has changed."""
    comm = open_comm(group)
    memory = SymmDeviceMemory(1000, comm.world_size, comm.rank, comm.device.index, TorchDistBackend(group))
    x = operand(comm.rank, 3, comm.world_size, comm.device).clone()
    y = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=y)
    torch.cuda.synchronize()
    texts: list[str] = []
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(JointError) as caught:
        if comm.rank == 1:
            with torch.cuda.graph(graph):
                # torch warns of empty graphs.
                x.add_(0)
                comm.checkpoint_prepare()
        else:
            comm.checkpoint_prepare()
    texts.append(str(caught.value))
    with pytest.raises(JointError) as caught:
        (comm if comm.rank else memory).checkpoint_prepare()
    texts.append(str(caught.value))
    assert_same_bits(comm.scatter_heads(x), expected(comm.rank, 3, comm.world_size, comm.device))
    memory.close()
    comm.close()
    return texts


def test_a_wrong_order_of_calls_raises_on_every_rank(ranks: RankPool) -> None:
    """H2: and the communicator goes on."""
    outcomes = ranks.run(wrong_order, ranks=2, timeout_s=60, fresh=True)
    assert outcomes[0] == outcomes[1]
    assert "rank 1: a CUDA graph is being captured" in outcomes[0][0]
    assert "the ranks are at different steps" in outcomes[0][1]


def half_way(group: Any) -> str:
    comm = open_comm(group)
    comm.checkpoint_prepare()
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == 1:

            def refuse(self: Device, nbytes: int, *, fabric: bool = False) -> int:
                raise CudaCallError("cuMemCreate", 2, "out of memory, says a test")

            patch.setattr(Device, "create", refuse)
        with pytest.raises(CheckpointError) as caught:
            comm.checkpoint_restore(group)
    with pytest.raises(CommError, match="half-way"):
        comm.checkpoint_restore(group)
    comm.close()
    return str(caught.value)


def test_a_failure_half_way_is_final_and_says_so(ranks: RankPool) -> None:
    """H2: on every rank, with the rank that failed."""
    outcomes = ranks.run(half_way, ranks=2, timeout_s=60, fresh=True)
    assert outcomes[0] == outcomes[1]
    assert "rank 1: cuMemCreate failed" in outcomes[0] and "can't be used, tried again or restored" in outcomes[0]


# Memory


def symmetric(group: Any) -> int:
    """Kernels of one rank store into every other's buffer and pad, before and after a checkpoint."""
    device = own_device(group)
    rank, size = group.rank(), group.size()
    checked = 0
    with McastGPUBuffer(3 * MIB, size, rank, device, TorchDistBackend(group)) as buffer:
        memory = buffer.mcast_device_memory
        assert buffer.buf_size >= 3 * MIB and memory.form == "vmm_fd" and memory.mc_ptr == 0
        own = buffer.get_unicast_buffer((size, 256), torch.float32)
        table = memory.get_buffer_ptrs_dev()
        pointers = list(memory.uc_ptrs)
        for round_ in range(3):
            buffer.lamport_initialize(rank, torch.float32)
            assert bool((own.view(torch.int32) == -0x80000000).all())
            group.barrier().wait()
            for peer in range(size):
                theirs = buffer.get_unicast_buffer((size, 256), torch.float32, rank=peer)
                theirs[rank].copy_(torch.arange(256, device=device) + 1000 * rank + round_)
            torch.cuda.synchronize()
            group.barrier().wait()
            for peer in range(size):
                assert own[peer].tolist() == [float(i + 1000 * peer + round_) for i in range(256)], (round_, peer)
                checked += 1
            pads = memory.tensor((rank + 1) % size, buffer.buf_size, memory.SIGNAL_PAD_SIZE)
            pads.fill_(5)
            torch.cuda.synchronize()
            memory.checkpoint_prepare()
            memory.checkpoint_restore(TorchDistBackend(new_group_of(group)))
            assert memory.uc_ptrs == pointers and memory.get_buffer_ptrs_dev() == table
            assert not bool(memory.tensor(rank, buffer.buf_size, memory.SIGNAL_PAD_SIZE).any())
    return checked


def test_what_a_kernel_stores_at_another_ranks_address_arrives(ranks: RankPool) -> None:
    """And again after each restore; pads begin at zero."""
    for size in SIZES:
        assert ranks.run(symmetric, ranks=size, timeout_s=60) == [3 * size] * size


def rows(group: Any) -> int:
    """Two memories of one group side by side, each a tensor of all ranks' rows, over a checkpoint of one of them."""
    device = own_device(group)
    rank, size = group.rank(), group.size()
    config = MnnvlConfig(comm_backend=TorchDistBackend(group), device_idx=device.index)
    mapping = Mapping(size, rank, tp_size=size)
    one, other = (MnnvlMemory(mapping, nbytes, config) for nbytes in (5 * MIB, 4096))
    a, b = one.as_torch_strided_tensor(torch.bfloat16), other.as_torch_strided_tensor(torch.int32)
    assert a.shape == (size, 5 * MIB // 2) and b.shape == (size, 1024) and a.stride(0) * 2 == one.rank_stride
    b[rank].fill_(rank + 5)
    for round_ in range(2):
        a[rank].fill_(rank + round_)
        torch.cuda.synchronize()
        group.barrier().wait()
        for peer in range(size):
            assert bool((a[peer] == peer + round_).all()) and bool((b[peer] == peer + 5).all())
        group.barrier().wait()
        one.checkpoint_prepare()
        one.checkpoint_restore(TorchDistBackend(group))
    other.close()
    one.close()
    return round_


def test_all_ranks_rows_are_one_tensor(ranks: RankPool) -> None:
    """And a checkpoint of one memory leaves the other one alone."""
    for size in SIZES:
        assert ranks.run(rows, ranks=size, timeout_s=60) == [1] * size


def two_groups(group: Any) -> int:
    """All ranks, and pairs of them: each with a communicator; one goes through checkpoints while the other works."""
    # Parts share the store of the whole group, so they are groups as any other.
    pair = TorchDistBackend(group).Split(group.rank() // 2, group.rank()).group  # pyright: ignore
    whole, part = open_comm(group), open_comm(group, pair)
    x = operand(whole.rank, 1, whole.world_size, whole.device)
    small = operand(part.rank, 1, part.world_size, part.device)
    for round_ in range(3):
        (whole if round_ % 2 else part).checkpoint_prepare()
        if round_ % 2:
            assert_same_bits(part.scatter_heads(small), expected(part.rank, 1, part.world_size, part.device))
            whole.checkpoint_restore(group)
        else:
            assert_same_bits(whole.scatter_heads(x), expected(whole.rank, 1, whole.world_size, whole.device))
            part.checkpoint_restore(pair)
        assert_same_bits(whole.scatter_heads(x), expected(whole.rank, 1, whole.world_size, whole.device))
        assert_same_bits(part.scatter_heads(small), expected(part.rank, 1, part.world_size, part.device))
    part.close()
    whole.close()
    return round_


def test_two_groups_of_one_process_never_disturb_each_other(ranks: RankPool) -> None:
    """There is no state beside the objects."""
    assert ranks.run(two_groups, ranks=4, timeout_s=90) == [2] * 4


def test_a_fabric_answers_or_says_why_not() -> None:
    """I3: what this machine makes of fabric handles; nothing is left allocated either way."""
    torch.cuda.init()
    before = used_bytes()
    try:
        granule = VmmFabricMemory.probe(torch.device("cuda", 0), trial=True)
        print(f"fabric handles work here, in granules of {granule}")
    except CommError as error:
        print(f"no fabric handles here: {error}")
        assert "imex" in str(error) or "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED is 0" in str(error)
    assert used_bytes() - before <= 4 * MIB
