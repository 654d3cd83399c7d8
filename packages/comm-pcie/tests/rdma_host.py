"""What tests of the routes over NICs need: the transport on CPU tensors, between processes, over the emulator.

Everything but the memory is the real thing: decision aside, the opening with all its steps, the engine with its queue
pairs and keys, the signals, the aborts and the teardown. The NICs are the emulator's. A rank finds what it needs in
the environment variable `VARIABLE`, as JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import rdma_emulator as emulator
import torch

from comm_core import UlyssesCommunicator, plugins
from comm_core._json import JsonObject
from comm_core.jit import Module
from comm_core.jit.cache import Artifact
from comm_core.memory.peer import HOST
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.transport.interface import Verdict
from comm_core.windows.launch import WINDOWS
from comm_pcie import ExperimentalWarning
from comm_pcie.calls import BoundStream
from comm_pcie.exchange import EXCHANGE
from comm_pcie.rdma.engine import LoadedVerbs, load_verbs
from comm_pcie.rdma.module import RDMA
from comm_pcie.rdma.port import HostPort, PortArguments
from comm_pcie.rdma.session import RdmaSession
from comm_pcie.session import PcieSession
from comm_pcie.transport import Modules, PcieTransport

VARIABLE = "TEST_RDMA"
CPU = torch.device("cpu")
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class Setup:
    """What the ranks are told.

    Attributes:
        windows: the module of windows, compiled for the host.
        engine: the module of the engine, compiled for the host.
        emulator: the emulator.
        route: ``"rdma"`` or ``"hybrid"``.
        requested: as `COMM_ULYSSES_PCIE_ROUTE`.
        nics: of each rank; empty for one after the other.
        exchange: the module of the peer-to-peer route, compiled for the host, for tests that fall back to it.
        gids: of each rank's NIC in hex digits.
        gid_indices: of each rank's NIC.
        numa_nodes: of each rank.
    """

    windows: str
    engine: str
    emulator: str
    route: str
    gids: Sequence[str]
    gid_indices: Sequence[int]
    numa_nodes: Sequence[int]
    requested: str = ""
    nics: Sequence[str] = field(default_factory=tuple)
    exchange: str = ""


def told() -> Setup:
    """What this rank was told."""
    return Setup(**json.loads(os.environ[VARIABLE]))


def loaded(spec: Any, path: str) -> Module:
    return Module(spec, Artifact(spec.name, "host", Path(path), {"archs": []}, {}))


class Fabric:
    """An emulated fabric with a NIC for each of eight ranks, and what the ranks are told of it."""

    def __init__(self, libraries: dict[str, str], folder: Path, **nics: Any) -> None:
        self.world = emulator.World(Path(libraries["emulator"]), folder / "fabric", emulator.nics(8, **nics))
        self.setup = Setup(
            **libraries,
            route="rdma",
            gids=[emulator.gid(f"10.0.0.{rank + 1}").hex() for rank in range(8)],
            gid_indices=[0] * 8,
            numa_nodes=[rank // 4 for rank in range(8)],
        )

    def environment(self, **changes: Any) -> dict[str, str]:
        """What the ranks get; upper case is a variable, lower case a field of the set-up."""
        fields = {name: value for name, value in changes.items() if name.islower()}
        variables = {name: str(value) for name, value in changes.items() if not name.islower()}
        told = json.dumps(asdict(replace(self.setup, **fields)))
        return {VARIABLE: told, "COMM_TIMEOUT_S": "30", **self.world.environment, **variables}


class _HostCopies(PcieSession):
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._bound = BoundStream(lambda: 0)

    def _stream(self) -> int:
        return 0


class HostTransport(PcieTransport):
    """The transport ``pcie`` for CPU tensors with a route over NICs, whatever this machine has."""

    experimental = False
    priority = 50

    def probe(self, context: Any) -> JsonObject:
        return {}

    def assess(self, request: Any, facts: Any) -> Verdict:
        setup, size = told(), len(facts)
        plan: JsonObject = {
            "numa_nodes": list(setup.numa_nodes[:size]),
            "nic_names": list(setup.nics[:size]) or [f"mlx5_{rank}" for rank in range(size)],
            "gid_indices": list(setup.gid_indices[:size]),
            "gids": list(setup.gids[:size]),
            "transport": setup.route,
            "requested_route": setup.requested or setup.route,
            "route_reason": "",
            "blocks_per_peer": 1,
            "devices": [f"cpu {rank}" for rank in range(size)],
            "hints": [],
        }
        return Verdict(True, "the emulator has a NIC for each rank", plan)

    def prepare(self, stages: Any, request: Any, agreed: Any, device: torch.device) -> Modules:
        windows = loaded(WINDOWS, told().windows)
        return Modules(windows, windows)

    def _open_p2p(self, stages: Any, request: Any, agreed: Any, device: Any, modules: Modules) -> Any:
        return _HostCopies(
            stages,
            modules.windows,
            loaded(EXCHANGE, told().exchange),
            device,
            form=HOST,
            timeout_s=request.timeout_s,
            blocks_per_peer=1,
        )

    def load_verbs(self, device: torch.device) -> LoadedVerbs:
        return load_verbs(module=loaded(RDMA, told().engine))

    def make_port(
        self, request: Any, agreed: Any, device: Any, modules: Modules, form: str, stages: Any, api: Any
    ) -> HostPort:
        from comm_core import _env

        # The emulator may hold bytes back that have arrived, until it is told to show them.
        library = ctypes.CDLL(told().emulator)
        arguments = PortArguments("", request.timeout_s, _env.on_stall() == "poison")
        return HostPort(stages, modules.windows, arguments, library.emu_flush)


class RealNicTransport(HostTransport):
    """The same over the NICs of this machine."""

    def make_port(
        self, request: Any, agreed: Any, device: Any, modules: Modules, form: str, stages: Any, api: Any
    ) -> HostPort:
        # The host sees what a NIC has written as soon as it sees the completion.
        return HostPort(stages, modules.windows, PortArguments("", request.timeout_s, True), lambda: None)


def plugin(make: Callable[[], PcieTransport] = HostTransport) -> object:
    """A plugin with the transport."""

    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> Sequence[PcieTransport]:
            return [make()]

    return Plugin()


@contextlib.contextmanager
def installed(make: Callable[[], PcieTransport] = HostTransport) -> Iterator[None]:
    """The transport, registered in this process."""
    plugins.register("rdma under test", plugin(make))
    try:
        # What it warns of is tested where it is the subject.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            yield
    finally:
        plugins.unregister("rdma under test")


def communicator(group: Any, **changes: Any) -> UlyssesCommunicator:
    arguments: dict[str, Any] = {"max_bytes": MAX_BYTES, "dtype": torch.uint8, "device": CPU, "backend": "pcie"}
    return UlyssesCommunicator(group, **{**arguments, **changes})


def session_of(comm: UlyssesCommunicator) -> RdmaSession:
    """The session behind a communicator; a silent fallback to another route fails here."""
    found = comm._session
    assert isinstance(found, RdmaSession), f"transport {comm.transport}: {comm.fallback_reason}"
    assert comm.transport == told().route
    return found


def output_view(out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The same registered output for another geometry: as many of its bytes as that needs."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return out.view(torch.uint8).flatten()[:nbytes].view(dtype).view(tuple(shape))
