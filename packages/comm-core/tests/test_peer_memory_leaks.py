"""Peer memory made and released again and again in processes that live on: nothing of it may stay.

The same cycles run over fakes, where every handle, mapping and descriptor is counted, and on a real GPU (``-m gpu``),
where the driver's own count of free memory decides.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core._driver import Device
from comm_core.consensus import Transaction
from comm_core.errors import CudaCallError, JointError
from comm_core.group import Group, as_group
from comm_core.memory import cudart
from comm_core.memory.cudart import CudaRTLibrary
from comm_core.memory.fd_exchange import Exchange
from comm_core.memory.peer import map_jointly
from comm_core.testing.fake_driver import FakeDriver, installed
from comm_core.testing.ranks import RankPool

NBYTES = 3 << 20
SLACK = 8 << 20
"""Bytes by which a GPU's free memory may move by itself; one leaked allocation in ten cycles is more."""

# What fails on the way up, and how many of its kind go well before; and on the way down, where it is tried again.
UP: dict[str, list[tuple[Any, str, int]]] = {
    "vmm_fd": [
        (Device, "create", 0),
        (Device, "reserve", 0),
        (Device, "map", 0),
        (Device, "export_descriptor", 0),
        (Exchange, "run", 0),
        (Device, "import_descriptor", 0),
        (Device, "reserve", 1),
        (Device, "map", 1),
        (Device, "allow_access", 1),
    ],
    "cuda_ipc": [
        (CudaRTLibrary, "cudaMalloc", 0),
        (CudaRTLibrary, "cudaIpcGetMemHandle", 0),
        (CudaRTLibrary, "cudaIpcOpenMemHandle", 0),
    ],
}
DOWN: dict[str, list[tuple[Any, str]]] = {
    "vmm_fd": [(Device, "synchronize"), (Device, "unmap"), (Device, "release"), (Device, "free_reservation")],
    "cuda_ipc": [
        (CudaRTLibrary, "cudaDeviceSynchronize"),
        (CudaRTLibrary, "cudaIpcCloseMemHandle"),
        (CudaRTLibrary, "cudaFree"),
    ],
}


@contextlib.contextmanager
def failing(owner: Any, name: str, after: int, times: int) -> Iterator[None]:
    """Let a call go well `after` times and then fail `times` times, on the wrapper's side of it."""
    original = getattr(owner, name)
    left = [after, times]

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if left[0]:
            left[0] -= 1
        elif left[1]:
            left[1] -= 1
            raise CudaCallError(name, 2, "injected")
        return original(self, *arguments, **keywords)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def surroundings(so_file: str) -> Iterator[Any]:
    """Yield what counts the things alive in this process: of the fakes, or of a real GPU where `so_file` is empty."""
    if not so_file:
        yield count_on_gpu
        return
    runtime = ctypes.CDLL(so_file)
    before = cudart._find_library
    cudart._find_library = lambda: so_file
    try:
        with installed(FakeDriver()) as fake:

            def count(group: Group) -> dict[str, int]:
                assert fake.violations == [] and runtime.fake_violations() == 0
                things = {"allocations": runtime.fake_allocations(), "imports": runtime.fake_imports()}
                return {**fake.alive(), **things, "descriptors": descriptors(), "free": 0}

            yield count
    finally:
        cudart._find_library = before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def count_on_gpu(group: Group) -> dict[str, int]:
    torch.cuda.synchronize()
    group.barrier("idle")  # The memory of a GPU is that of all its processes.
    free = torch.cuda.mem_get_info()[0]
    group.barrier("counted")
    return {"descriptors": descriptors(), "free": free}


def cycle(group: Group, device: torch.device, form: str, number: int, value: int) -> None:
    """Make, write into the next rank's memory, read what the rank before has written, release."""
    with Transaction(group, "open") as stages:
        mapped = map_jointly(stages, NBYTES, device, form=form, number=number)
        teardown = stages.commit()
    runtime = CudaRTLibrary()
    mine = ctypes.create_string_buffer(bytes([value, group.rank]), 2)
    last = mapped.nbytes - 2
    runtime.cudaMemcpy(mapped.addresses[(group.rank + 1) % group.size] + last, ctypes.addressof(mine), 2)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # A copy from pageable memory may return before it has arrived.
    group.barrier("written")
    runtime.cudaMemcpy(ctypes.addressof(mine), mapped.addresses[group.rank] + last, 2)
    assert mine.raw == bytes([value, (group.rank - 1) % group.size])
    teardown.close()


@contextlib.contextmanager
def spoiled(group: Group, form: str, number: int) -> Iterator[None]:
    """Of three cycles let one fail on its way up and one falter on its way down; each call on each rank in turn."""
    cases = [UP[form], [(owner, name, 0) for owner, name in DOWN[form]], []][number % 3]
    if not cases:
        yield
        return
    victim, place = divmod(number // 3, len(cases))
    owner, name, after = cases[place]
    mine = group.rank == victim % group.size
    with failing(owner, name, after, 1 + number % 3) if mine else contextlib.nullcontext():
        if number % 3:
            yield
            return
        try:
            yield
        except JointError as error:
            assert "injected" in str(error)
        else:
            raise AssertionError(f"{name} was to fail, and nothing did")


def cycles(process_group: Any, so_file: str, devices: int, form: str, times: int, failures: bool) -> list[Any]:
    group = as_group(process_group)
    device = torch.device("cuda", group.rank % devices)
    if not so_file:
        torch.cuda.set_device(device)
        torch.cuda.init()
    seen: list[dict[str, int]] = []
    with surroundings(so_file) as count:
        if so_file:
            ctypes.CDLL(so_file).cudaSetDevice(device.index)
        for number in range(times):
            with spoiled(group, form, number) if failures else contextlib.nullcontext():
                cycle(group, device, form, number, number % 251)
            if number in (times // 10, times - 1):
                seen.append(count(group))
    return seen


@pytest.fixture(scope="module")
def so_file(so_file: Path) -> str:
    """The fake runtime, as the string that goes to the ranks and to ctypes."""
    return str(so_file)


@pytest.mark.deadline(300)
@pytest.mark.parametrize("failures", [False, True], ids=["", "with failures"])
@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
@pytest.mark.parametrize("where", ["fake", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_two_hundred_cycles_leak_nothing(
    ranks: RankPool, so_file: str, where: str, form: str, failures: bool
) -> None:
    """A descriptor, a mapping or a handle a cycle ends a long job; so does one for each failure that was survived."""
    size = 3 if failures else 2
    library, devices = (so_file, 8) if where == "fake" else ("", 1)
    for early, late in ranks.run(cycles, library, devices, form, 200, failures, ranks=size, timeout_s=250):
        assert late["free"] >= early["free"] - SLACK, (early, late)
        assert {**late, "free": 0} == {**early, "free": 0}
