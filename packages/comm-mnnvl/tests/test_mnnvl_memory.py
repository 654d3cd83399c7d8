"""SymmDeviceMemory, McastGPUBuffer and MnnvlMemory over a fake driver."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core.comm_backend import CommBackend, MPIBackend, MPIMissingError, TorchDistBackend
from comm_core.errors import ArgumentValueError, JointError, JointValueError
from comm_core.group import Group
from comm_core.mapping import Mapping
from comm_core.testing.fake_driver import GRANULE, FakeDriver
from comm_core.testing.ranks import run_threads
from comm_mnnvl import McastGPUBuffer, MnnvlConfig, MnnvlMemory, SymmDeviceMemory, mpi_barrier, shared


def backend(group: Group) -> CommBackend:
    return TorchDistBackend(group)


def symmetric(group: Group, nbytes: int = 5000, **changes: Any) -> SymmDeviceMemory:
    arguments = {"comm_backend_for_handle_transfer": backend(group), **changes}
    return SymmDeviceMemory(nbytes, group.size, group.rank, group.rank % 8, **arguments)


def layout(group: Group, nbytes: int) -> tuple[int, int]:
    with symmetric(group, nbytes) as memory:
        size, rank = group.size, group.rank
        assert memory.mapped and memory.form == "vmm_fd" and memory.mc_ptr == memory.get_multicast_ptr() == 0
        assert (memory.get_rank(), memory.get_world_size()) == (rank, size)
        # One after the other, each with its pad at its end, behind everything that may be used.
        assert [b - a for a, b in zip(memory.uc_ptrs, memory.uc_ptrs[1:], strict=False)] == [
            memory.get_allocation_size()
        ] * (size - 1)
        usable = memory.get_usable_buffer_size()
        assert usable >= nbytes and usable + 2048 == memory.get_allocation_size()
        assert memory.get_signal_pad_ptrs_host() == [address + usable for address in memory.get_buffer_ptrs_host()]
        assert all(pad % SymmDeviceMemory.SIGNAL_PAD_ALIGNMENT == 0 for pad in memory.signal_pads)
        for table, pointers in (
            (memory.get_buffer_ptrs_dev(), memory.uc_ptrs),
            (memory.get_signal_pad_ptrs_dev(), memory.signal_pads),
        ):
            assert list((ctypes.c_uint64 * size).from_address(table)) == pointers
        assert ctypes.string_at(memory.signal_pads[rank], 2048) == bytes(2048)
        for peer in range(size):
            ctypes.memset(memory.get_unicast_ptr(peer) + rank, 10 * peer + rank + 1, 1)
        group.barrier("written")
        assert memory.tensor(rank, 0, size).tolist() == [10 * rank + peer + 1 for peer in range(size)]
        for wrong in (-1, size):
            with pytest.raises(ArgumentValueError):
                memory.get_unicast_ptr(wrong)
        group.barrier("read")
        return memory.get_allocation_size(), usable


@pytest.mark.parametrize("size", [1, 2, 4])
def test_buffers_and_pads_lie_where_they_should(driver: FakeDriver, size: int) -> None:
    """And what a rank stores at an address of another's arrives there; nothing stays."""
    for nbytes, whole in ((1, 1), (GRANULE - 2048, 1), (GRANULE - 2047, 2), (GRANULE, 2)):
        assert run_threads(size, layout, nbytes) == [(whole * GRANULE, whole * GRANULE - 2048)] * size


def filled(group: Group, dtype: torch.dtype, word: bytes) -> bool:
    with symmetric(group) as memory:
        with torch.inference_mode():
            memory.lamport_initialize(group.rank, dtype)
        usable = memory.get_usable_buffer_size()
        right = ctypes.string_at(memory.uc_ptrs[group.rank], usable) == word * (usable // len(word))
        pads = ctypes.string_at(memory.signal_pads[group.rank], 2048) == bytes(2048)
        with pytest.raises(ArgumentValueError, match="each fills its own"):
            memory.lamport_initialize(group.rank + 1, dtype)
        with pytest.raises(ArgumentValueError, match="bfloat16, float16 or float32"):
            memory.lamport_initialize(group.rank, torch.int8)
        return right and pads


@pytest.mark.parametrize(
    ("dtype", "word"),
    [(torch.bfloat16, b"\0\x80"), (torch.float16, b"\0\x80"), (torch.float32, b"\0\0\0\x80")],
    ids=str,
)
def test_lamport_buffers_begin_as_negative_zero(driver: FakeDriver, dtype: torch.dtype, word: bytes) -> None:
    """The whole buffer, and not the pad."""
    assert run_threads(2, filled, dtype, word) == [True, True]


def wrong_arguments(group: Group, make: Callable[[Group], Any]) -> str:
    with pytest.raises(JointValueError) as caught:
        make(group)
    return str(caught.value)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda g: symmetric(g, 0 if g.rank else 5), "rank 1: buf_size must be at least 1, got 0"),
        (lambda g: symmetric(g, 5000 * (1 + 100 * GRANULE * g.rank)), "the ranks asked for different memory"),
        (lambda g: symmetric(g, enable_multicast=g.rank == 0), "multicast=True"),
        (
            lambda g: SymmDeviceMemory(5, 2 + g.rank, g.rank, 0, backend(g)),
            "rank 1: group_size=3 and group_rank=1, and this is rank 1 of the 2 ranks",
        ),
        (lambda g: SymmDeviceMemory(5, 2, 0, 0, backend(g)), "rank 1: group_size=2 and group_rank=0"),
        (lambda g: SymmDeviceMemory(5.0, 2, g.rank, 0, backend(g)), "buf_size must be an int"),
    ],
    ids=["size", "sizes", "multicast", "group size", "group rank", "type"],
)
def test_what_can_not_be_is_everybodys_error(driver: FakeDriver, make: Any, words: str) -> None:
    """C2, C8: before anything is allocated, with the same text on every rank."""
    texts = run_threads(2, wrong_arguments, make)
    assert texts[0] == texts[1] and words in texts[0]


# The default backend


def test_without_a_backend_it_is_torch_or_else_mpi(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is initialized here, so it is MPI; and where there is no mpi4py, that is said."""
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    for make in (
        lambda: SymmDeviceMemory(5, 1, 0, 0),
        lambda: McastGPUBuffer(5, 1, 0, torch.device("cuda", 0)),
        lambda: MnnvlMemory(Mapping(), 5, MnnvlConfig(device_idx=0)),
        mpi_barrier,
    ):
        with pytest.raises(MPIMissingError, match="pip install mpi4py, or use TorchDistBackend"):
            make()


class FakeComm:
    """An MPI world of one rank, as mpi4py shows it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, data: Any) -> list[Any]:
        self.calls.append("allgather")
        return [data]

    def Barrier(self) -> None:
        self.calls.append("Barrier")

    def Split(self, color: int, key: int) -> FakeComm:
        self.calls.append(f"Split {color} {key}")
        return self


def test_where_torch_is_not_initialized_the_ranks_are_those_of_mpi(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As specified: and the barrier is that of MPI's world."""
    world = FakeComm()
    mpi = SimpleNamespace(COMM_WORLD=world, COMM_NULL=None, UNDEFINED=-32766)
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))
    mpi_barrier()
    assert world.calls == ["Barrier"]
    with SymmDeviceMemory(5000, 1, 0, 0) as memory:
        memory.checkpoint_prepare()
        memory.checkpoint_restore(MPIBackend())
        memory.tensor(0, 0, 8).fill_(3)
    assert set(world.calls[1:]) == {"allgather"}
    with MnnvlMemory(Mapping(), 4096, MnnvlConfig(device_idx=0)) as rows:
        assert rows.as_torch_strided_tensor(torch.int32).shape == (1, 1024)
    assert "Split 0 0" in world.calls


def failing_table(group: Group, here: Any) -> str:
    """The table of pointers does not fit on rank 1's device."""
    here.rank = group.rank
    with pytest.raises(JointError) as caught:
        symmetric(group)
    return str(caught.value)


def test_a_table_that_one_rank_can_not_have_takes_everything_down(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E6: no rank is left with memory that the others don't have."""
    here = threading.local()
    upload = SymmDeviceMemory._upload

    def refuse(self: SymmDeviceMemory, pointers: tuple[int, ...]) -> torch.Tensor:
        if here.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return upload(self, pointers)

    monkeypatch.setattr(SymmDeviceMemory, "_upload", refuse)
    texts = run_threads(2, failing_table, here)
    assert texts[0] == texts[1] and "rank 1: OutOfMemoryError: CUDA out of memory" in texts[0]


@pytest.mark.parametrize("make", ["symmetric", "rows"])
def test_a_device_that_is_not_there_is_everybodys_error(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, make: str
) -> None:
    """C8: also where it would have been found too late, and where there is no current one."""
    monkeypatch.setattr(shared, "tensor_device", lambda ordinal: torch.device("cuda", ordinal))

    def one(group: Group) -> Any:
        if make == "symmetric":
            return symmetric(group)
        return MnnvlMemory(Mapping(2, group.rank, tp_size=2), 5, MnnvlConfig(backend(group)))

    texts = run_threads(2, wrong_arguments, one)
    assert texts[0] == texts[1] and "rank 1: " in texts[0]
    assert ("this process sees 0 CUDA devices" in texts[0]) == (make == "symmetric")
