"""What several test files of comm-mnnvl need: virtual memory and windows without a GPU.

The driver is `comm_core.testing.fake_driver`'s, so memory that was taken away really can't be touched, and the module
of windows is compiled for the host. Ranks are threads; the memory form, the exchange of descriptors, the session and
everything above are the real ones.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import comm_core
from comm_core import _cuda, _driver, _nvml, jit
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.memory import detach, fd_exchange, peer
from comm_core.memory.vmm import VmmMemory
from comm_core.memory.vmm_fabric import VmmFabricMemory
from comm_core.testing.fake_driver import FakeDriver, FakeFabric, installed
from comm_core.testing.fake_nvml import FakeFabric as FabricInfo
from comm_core.testing.fake_nvml import FakeMachine, FakeNvml, FakeTorch
from comm_core.testing.host_modules import HOST_WINDOWS, compile_for_host
from comm_core.topology.facts import HostFacts
from comm_core.topology.probe import host_facts
from comm_core.windows.launch import WINDOWS
from comm_mnnvl import handles, shared


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


@dataclass
class Node:
    """What one rank sees: its host, its driver, NVML and torch."""

    host: HostFacts
    driver: FakeDriver
    nvml: FakeNvml | None
    torch: FakeTorch


class Cluster:
    """Hosts in one fabric; ranks are threads, and each says which node it is (`enter`) before anything else.

    Rank r is on host ``r // per_host``. What a test changes of a node, it changes before the ranks run.
    """

    def __init__(self, hosts: int, per_host: int) -> None:
        self.fabric = FakeFabric()
        self.nodes: list[Node] = []
        self._local = threading.local()
        for host in range(hosts):
            for _ in range(per_host):
                machine = FakeMachine.mesh(8)
                for position in range(8):
                    uuid = f"GPU-{host:08x}-0000-0000-0000-{position:012x}"
                    machine.change(position, uuid=uuid, fabric=FabricInfo(cluster_uuid=CLUSTER, clique_id=7))
                driver = FakeDriver(name=f"host {host}", fabric=self.fabric)
                facts = replace(host_facts(), hostname=f"host-{host}", boot_id=f"boot {host}")
                self.nodes.append(Node(facts, driver, FakeNvml(machine), FakeTorch(machine)))

    def enter(self, rank: int) -> None:
        """Be a rank."""
        self._local.node = self.nodes[rank]

    @property
    def here(self) -> Node:
        """The calling thread's node."""
        return self._local.node

    def alive(self) -> dict[str, int]:
        """Return what there is on all nodes, and what was done wrong."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            assert node.driver.violations == []
            total.update(node.driver.alive())
        return dict(total)


CLUSTER = bytes([0, 0x11, *range(14)])
"""A cluster's UUID. Its first byte is zero, as one in 256 is."""


@pytest.fixture
def cluster(host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], Cluster]:
    """Make a cluster of so many hosts with so many ranks each."""

    def make(hosts: int, per_host: int) -> Cluster:
        made = Cluster(hosts, per_host)
        for module in (handles, peer, detach, fd_exchange):
            monkeypatch.setattr(module, "host_facts", lambda: made.here.host)
        monkeypatch.setattr(_driver, "source", lambda: made.here.driver)
        monkeypatch.setattr(_cuda, "source", lambda: made.here.torch)

        def binding() -> Any:
            if made.here.nvml is None:
                raise ModuleNotFoundError("No module named 'pynvml'")
            return made.here.nvml

        monkeypatch.setattr(_nvml, "source", binding)
        return made

    return make
