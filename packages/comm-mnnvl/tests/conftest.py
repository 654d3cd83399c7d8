"""What several test files of comm-mnnvl need: virtual memory and windows without a GPU.

The driver is `comm_core.testing.fake_driver`'s, so memory that was taken away really can't be touched, and the module
of windows is compiled for the host. Ranks are threads; the memory form, the exchange of descriptors, the session and
everything above are the real ones.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_core
from comm_core import _cuda, jit
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.memory import peer
from comm_core.memory.vmm import VmmMemory
from comm_core.memory.vmm_fabric import VmmFabricMemory
from comm_core.testing.fake_driver import FakeDriver, installed
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.windows.launch import WINDOWS
from comm_mnnvl import shared


class _OnHost:
    """Lets a form of virtual memory serve CPU tensors: each rank is on a device of the fake's."""

    def __init__(self, device: torch.device, rank: int) -> None:
        super().__init__(torch.device("cuda", rank % 8), rank)  # type: ignore[call-arg]

    @classmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        return super().probe(torch.device("cuda", 0), trial=trial)  # type: ignore[misc]


class HostVmm(_OnHost, VmmMemory):  # type: ignore[misc]
    """Memory shared by descriptors."""


class HostFabric(_OnHost, VmmFabricMemory):  # type: ignore[misc]
    """Memory shared by fabric handles."""


@pytest.fixture(scope="session")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """The module of windows, compiled for the host and loaded as every module is."""
    library = compile_for_host(
        WINDOWS, Path(comm_core.__file__).parent, HOST_WINDOWS, tmp_path_factory.mktemp("host")
    )
    return Module(WINDOWS, Artifact(WINDOWS.name, "host", library, {"archs": []}, {}))


@pytest.fixture
def host(module: Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    """Launches run at once on the host, and memory of virtual addresses serves CPU tensors."""
    library = ctypes.CDLL(str(module.artifact.path))
    library.host_problem.restype = ctypes.c_char_p
    form, look = peer._form, peer._check
    forms: dict[str, type] = {"vmm_fd": HostVmm, "vmm_fabric": HostFabric}
    monkeypatch.setattr(peer, "_form", lambda name: forms.get(name) or form(name))
    monkeypatch.setattr(peer, "_check", lambda nbytes, device, name: look(nbytes, torch.device("cpu"), name))
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    monkeypatch.setattr(jit, "load", lambda spec, device: module)
    monkeypatch.setattr(shared, "tensor_device", lambda ordinal: torch.device("cpu"))
    yield library
    assert library.host_problem() is None


@pytest.fixture
def driver(host: ctypes.CDLL) -> Iterator[FakeDriver]:
    """One fake driver for all ranks of a test; nothing is left in it, and nothing was done that is wrong."""
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    with installed(FakeDriver()) as fake:
        yield fake
        gc.collect()
        assert fake.violations == []
        assert fake.alive() == {}
        assert len(list(Path("/proc/self/fd").iterdir())) == before


@pytest.fixture
def kept(host: ctypes.CDLL) -> Iterator[FakeDriver]:
    """The same where a test leaves memory on purpose, as after a failure that is final."""
    with installed(FakeDriver()) as fake:
        yield fake
        gc.collect()
        assert fake.violations == []
        fake.forget()


@pytest.fixture
def alive(driver: FakeDriver) -> Callable[[], Any]:
    """Return what there is of each thing."""
    return lambda: {**driver.alive(), "descriptors": len(list(Path("/proc/self/fd").iterdir()))}
