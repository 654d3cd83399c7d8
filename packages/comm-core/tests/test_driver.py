"""The driver's wrapper where a thread can't be left as it was: nothing that was made stays, nothing goes twice."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from comm_core import _driver
from comm_core._driver import Device
from comm_core.errors import CudaCallError

HANDLE, ADDRESS = 71, 1 << 30


class Api:
    """A driver that notes calls; `cuCtxPopCurrent` fails after the calls in `broken`, others where they are named."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.broken: set[str] = set()
        self.failing: set[str] = set()
        self.descriptor = -1
        kinds = SimpleNamespace(CU_MEM_HANDLE_TYPE_FABRIC=8, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
        self.CUmemAllocationHandleType = kinds
        self.CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
        self.CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
        self.CUmemRangeHandleType = SimpleNamespace(CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD=1)
        self.CUdevice_attribute = SimpleNamespace()
        self.CUmemAllocationProp = lambda: SimpleNamespace(location=SimpleNamespace(), allocFlags=SimpleNamespace())
        self.CUmulticastObjectProp = SimpleNamespace

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            if name == "cuCtxPopCurrent":
                return (201 if self.calls[-1][0] in self.broken else 0, None)
            if name == "cuGetErrorString":
                return 0, b"invalid device context"
            if name != "cuCtxPushCurrent":
                self.calls.append((name, arguments))
            return (2 if name in self.failing else 0, *self.values(name))

        return call

    def values(self, name: str) -> tuple[Any, ...]:
        if name in ("cuMemExportToShareableHandle", "cuMemGetHandleForAddressRange"):
            self.descriptor = os.open(os.devnull, os.O_RDONLY)
            return (self.descriptor,)
        makes = {
            "cuMemCreate": HANDLE,
            "cuMemImportFromShareableHandle": HANDLE,
            "cuMulticastCreate": HANDLE,
            "cuMemAddressReserve": ADDRESS,
            "cuDeviceGet": 0,
            "cuDevicePrimaryCtxRetain": 5,
        }
        return (makes[name],) if name in makes else ()

    def since(self, name: str) -> list[tuple[str, tuple[Any, ...]]]:
        """Return the calls after the last `name`."""
        last = max(index for index, (call, _) in enumerate(self.calls) if call == name)
        return self.calls[last + 1 :]


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Api:
    made = Api()
    monkeypatch.setattr(_driver, "source", lambda: made)
    return made


MAKING: dict[str, tuple[Callable[[Device], int], str, str, tuple[Any, ...]]] = {
    "create": (lambda gpu: gpu.create(4096), "cuMemCreate", "cuMemRelease", (HANDLE,)),
    "import_descriptor": (
        lambda gpu: gpu.import_descriptor(3),
        "cuMemImportFromShareableHandle",
        "cuMemRelease",
        (HANDLE,),
    ),
    "import_fabric": (
        lambda gpu: gpu.import_fabric(bytes(64)),
        "cuMemImportFromShareableHandle",
        "cuMemRelease",
        (HANDLE,),
    ),
    "multicast_create": (
        lambda gpu: gpu.multicast_create(2, 4096, fabric=False),
        "cuMulticastCreate",
        "cuMemRelease",
        (HANDLE,),
    ),
    "reserve": (lambda gpu: gpu.reserve(4096, 0), "cuMemAddressReserve", "cuMemAddressFree", (ADDRESS, 4096)),
    "map": (lambda gpu: gpu.map(ADDRESS, 4096, HANDLE) or 0, "cuMemMap", "cuMemUnmap", (ADDRESS, 4096)),
    "multicast_bind": (
        lambda gpu: gpu.multicast_bind(HANDLE, 9, 4096) or 0,
        "cuMulticastBindMem",
        "cuMulticastUnbind",
        (HANDLE, 0, 0, 4096),
    ),
}
LENDING: dict[str, tuple[Callable[[Device], int], str]] = {
    "export_descriptor": (lambda gpu: gpu.export_descriptor(HANDLE), "cuMemExportToShareableHandle"),
    "export_dma_buf": (lambda gpu: gpu.export_dma_buf(ADDRESS, 4096), "cuMemGetHandleForAddressRange"),
}
GIVING_BACK: dict[str, tuple[Callable[[Device], None], str]] = {
    "release": (lambda gpu: gpu.release(HANDLE), "cuMemRelease"),
    "unmap": (lambda gpu: gpu.unmap(ADDRESS, 4096), "cuMemUnmap"),
    "free_reservation": (lambda gpu: gpu.free_reservation(ADDRESS, 4096), "cuMemAddressFree"),
    "multicast_unbind": (lambda gpu: gpu.multicast_unbind(HANDLE, 4096), "cuMulticastUnbind"),
}


@pytest.mark.parametrize("worse", [False, True], ids=["", "and so does giving it back"])
@pytest.mark.parametrize("name", MAKING)
def test_what_was_made_is_given_back(api: Api, name: str, worse: bool) -> None:
    """E6: who is told of an error has no handle or address to give back himself."""
    make, call, back, arguments = MAKING[name]
    gpu = Device(0)
    assert make(gpu) in (HANDLE, ADDRESS, 0) and api.since(call) == []
    api.broken = {call, back} if worse else {call}
    api.failing = {back} if worse else set()
    with pytest.raises(CudaCallError, match=r"cuCtxPopCurrent failed with CUDA error 201: invalid device context"):
        make(gpu)
    assert api.since(call) == [(back, arguments)]
    # What was not made is not given back.
    api.broken, api.failing = set(), {call}
    with pytest.raises(CudaCallError, match=f"{call} failed with CUDA error 2"):
        make(gpu)
    assert api.since(call) == []


@pytest.mark.parametrize("name", LENDING)
def test_a_descriptor_that_nobody_gets_is_closed(api: Api, name: str) -> None:
    lend, call = LENDING[name]
    gpu = Device(0)
    os.close(lend(gpu))
    api.broken = {call}
    with pytest.raises(CudaCallError, match="cuCtxPopCurrent"):
        lend(gpu)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(api.descriptor)


@pytest.mark.parametrize("name", GIVING_BACK)
def test_what_is_given_back_is_not_given_back_twice(api: Api, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """E5: whoever was told that it failed would try again, and in vain for ever."""
    give_back, call = GIVING_BACK[name]
    gpu = Device(0)
    give_back(gpu)
    assert not caplog.records
    api.broken = {call}
    with caplog.at_level(logging.WARNING, "comm_core"):
        give_back(gpu)
    assert f"GPU 0 stays current for a thread after {call}: cuCtxPopCurrent failed" in caplog.text
    api.broken, api.failing = set(), {call}
    with pytest.raises(CudaCallError, match=f"{call} failed"):
        give_back(gpu)
