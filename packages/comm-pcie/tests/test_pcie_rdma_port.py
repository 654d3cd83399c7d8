"""The port of a GPU, without one: how memory is described to a NIC, when a flush is needed, and copies to peers."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest
import torch

from comm_core import _cuda
from comm_core.errors import CudaCallError, UnsupportedError
from comm_core.transport.plan import Copy, Level
from comm_core.ulysses import plans
from comm_pcie.rdma.port import ALL_DEVICES, OWNER, CudaPort, needs_flush


@pytest.mark.parametrize(
    ("ordering", "options", "expected"),
    [(0, 1, True), (0, 3, True), (50, 1, True), (OWNER, 0, False), (OWNER, 1, False), (ALL_DEVICES, 0, False)],
)
def test_when_the_host_must_flush(ordering: int, options: int, expected: bool) -> None:
    """J5: by the attributes of the device alone; at OWNER and above the device orders such writes itself."""
    assert needs_flush(ordering, options) == expected


@pytest.mark.parametrize("options", [0, 2])
def test_a_gpu_that_can_not_be_flushed_is_refused(options: int) -> None:
    """J5: completion is not visibility, so without either way the route is not used."""
    with pytest.raises(UnsupportedError, match="GPU_DIRECT_RDMA_WRITES_ORDERING is 0"):
        needs_flush(0, options)


class Driver:
    """What the port asks of `comm_core._driver.Device`; memory is the host's."""

    def __init__(self, *, dmabuf: bool = True, sync: bool = True) -> None:
        self.dmabuf, self.sync = dmabuf, sync
        self.flushed = 0
        self.given: list[int] = []

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        assert address % 65536 == 0 and nbytes % 65536 == 0
        if not self.dmabuf:
            raise CudaCallError("cuMemGetHandleForAddressRange", 801, "operation not supported")
        self.given.append(os.memfd_create("dmabuf"))
        return self.given[-1]

    def synchronize_memory_operations(self, address: int) -> None:
        if not self.sync:
            raise CudaCallError("cuPointerSetAttribute", 1, "invalid argument")

    def flush_remote_writes(self) -> None:
        self.flushed += 1

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, row_bytes: int, rows: int, stream: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, row_bytes)


class Windows:
    def __init__(self, form: str) -> None:
        self.memory_form = form


def port(driver: Driver, form: str = "cuda_ipc", rank: int = 0, flushes: bool = True) -> CudaPort:
    found: Any = object.__new__(CudaPort)
    found.device = torch.device("cpu")
    found._driver, found._rank, found._flushes = driver, rank, flushes
    found.windows = Windows(form)
    return found


@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
@pytest.mark.parametrize("dmabuf", [True, False])
@pytest.mark.parametrize("sync", [True, False])
def test_memory_is_described_with_what_the_device_can_do(form: str, dmabuf: bool, sync: bool) -> None:
    """J3: a DMA-BUF first; without one the reason travels, and the registration decides whether it works."""
    driver = Driver(dmabuf=dmabuf, sync=sync)
    with port(driver, form).describe(1 << 20, 1 << 16) as memory:
        assert (memory.address, memory.nbytes, memory.dmabuf_offset) == (1 << 20, 1 << 16, 0)
        assert (memory.dmabuf_fd is not None) == dmabuf
        assert ("cuMemGetHandleForAddressRange failed with CUDA error 801" in memory.dmabuf_problem) == (not dmabuf)
        # Memory of VMM does not know the attribute, and is not asked.
        assert ("cuPointerSetAttribute" in memory.dmabuf_problem) == (form == "cuda_ipc" and not sync)
        if dmabuf:
            os.fstat(driver.given[0])
    for descriptor in driver.given:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_flush_is_made_where_it_is_needed_alone() -> None:
    for flushes in (True, False):
        driver = Driver()
        port(driver, flushes=flushes).flush()
        assert driver.flushed == int(flushes)


@pytest.mark.parametrize("operation", ["scatter_heads", "gather_heads"])
def test_copies_to_peers_are_those_of_the_plan(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hybrid route's share, rows of a width that copy engines are slow at among them."""
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    size, width = 4, 3072
    shape = (1, 8, size, width) if operation == "scatter_heads" else (1, 8 * size, 1, width)
    found = [getattr(plans, operation)(shape, 1, rank, size) for rank in range(size)]
    torch.manual_seed(0)
    operands = [torch.randint(0, 250, shape, dtype=torch.uint8) for _ in range(size)]
    outputs = [torch.zeros(plan.target_bytes, dtype=torch.uint8) for plan in found]
    addresses = [output.data_ptr() for output in outputs]
    for rank, plan in enumerate(found):
        port(Driver(), rank=rank).copy(plan.sends, operands[rank], addresses, outputs[rank])
    for receiver, output in enumerate(outputs):
        for sender, plan in enumerate(found):
            flat = operands[sender].flatten()
            for copy in plan.sends:
                if copy.peer == receiver:
                    for source, target in copy.rows():
                        assert torch.equal(output[target:][: copy.row_bytes], flat[source:][: copy.row_bytes])


def test_slices_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of rows has no third dimension."""
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    source = torch.arange(96, dtype=torch.uint8)
    outputs = [torch.zeros(96, dtype=torch.uint8) for _ in range(2)]
    nested = Copy(1, 0, 4, 8, (Level(2, 48, 32), Level(3, 12, 8)), 5)
    port(Driver()).copy((nested,), source, [output.data_ptr() for output in outputs], outputs[0])
    expected = torch.zeros(96, dtype=torch.uint8)
    for at, to in nested.rows():
        expected[to : to + 5] = source[at : at + 5]
    assert torch.equal(outputs[1], expected)
