"""The routes over NICs with memory of a GPU: the emulator's NICs write it, several ranks may share a GPU.

The emulator reaches memory of other processes by CUDA IPC, so outputs are of that form here. A NIC's own way to GPU
memory (GPUDirect RDMA, DMA-BUF) is what this can't show; ``test_pcie_rdma_nic.py`` is for machines with NICs.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
import torch

from comm_core import plugins
from comm_core.errors import PeerStalledError, TransportError, UnsupportedError
from comm_core.testing import reference
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Verdict
from comm_pcie import ExperimentalWarning
from comm_pcie.plugin import PciePlugin
from comm_pcie.rdma import port
from comm_pcie.rdma.facts import ROCE_V2, GidEntry, NicFacts, RdmaFacts
from comm_pcie.rdma.planning import NICS_VARIABLE
from comm_pcie.rdma.session import RdmaSession
from comm_pcie.transport import PcieTransport

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes(among=(2, 4, 8))


def _probe(self: PcieTransport, context: Any) -> dict[str, Any]:
    """What a machine would say whose NICs are the emulator's."""
    nics = tuple(
        NicFacts(
            f"mlx5_{number}",
            "ACTIVE",
            "Ethernet",
            (GidEntry(0, emulator.gid(f"10.0.0.{number + 1}").hex(), ROCE_V2, "eth0"),),
        )
        for number in range(8)
    )
    return {"rdma": RdmaFacts(nics, "emulator").to_json()}


_ASSESS = PcieTransport.assess


def _assess(self: PcieTransport, request: Any, facts: Sequence[RankFacts]) -> Verdict:
    """The real decision; for the hybrid route on a machine whose GPUs are in two halves."""
    if os.environ.get("TEST_HALVES") == "1":
        facts = [replace(r, device=replace(r.device, numa_node=r.rank // 4)) for r in facts]
    return _ASSESS(self, request, facts)


ranks = shared_gpu_pool(8)


@pytest.fixture
def world(library: Path, tmp_path: Path) -> Iterator[Any]:
    """A fabric with a NIC a rank; at the end nothing is left in it."""
    with emulator.World(library, tmp_path / "fabric", emulator.nics(8)) as found:
        yield found
        assert found.counters()["rnr_naks"] == 0


def environment(world: Any, size: int, route: str = "rdma", **more: str) -> dict[str, str]:
    return {
        **world.environment,
        "VERBS_EMULATOR_CUDA": "1",
        "COMM_ULYSSES_PCIE_ROUTE": route,
        NICS_VARIABLE: ",".join(f"mlx5_{number}" for number in range(size)),
        "COMM_PEER_MEMORY": "cuda_ipc",
        "TEST_HALVES": str(int(route == "hybrid")),
        **more,
    }


def open_comm(group: Any, **changes: Any) -> Any:
    from comm_core import UlyssesCommunicator

    # The transport as it is, installed or not, but for the NICs that it finds. Virtual machines may say that a NIC's
    # writes can't be made visible; the emulator's are copies by CUDA. Where a flush is possible it is made.
    PcieTransport.probe, PcieTransport.assess = _probe, _assess
    port.needs_flush = lambda ordering, options: bool(options & 1)
    if "pcie" not in plugins.registry().transports:
        plugins.register("pcie under test", PciePlugin())
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    arguments = {"max_bytes": 1 << 24, "dtype": torch.bfloat16, "device": device, **changes}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        comm = UlyssesCommunicator(group, backend="pcie", **arguments)
    route = os.environ["COMM_ULYSSES_PCIE_ROUTE"]
    assert isinstance(comm._session, RdmaSession) and comm.transport == route, comm.fallback_reason
    return comm


def operations(group: Any, names: Sequence[str]) -> int:
    done = 0
    with open_comm(group) as comm:
        session, size, rank = comm._session, comm.world_size, comm.rank
        moved = session.counters.write_bytes
        expected_bytes = 0
        for name in names:
            dtype = getattr(torch, name)
            for seed, (s, heads, dim) in enumerate([(3, 1, 5), (64, 2, 64), (1, 1, 8)]):
                cases = {
                    "scatter_heads": (1, s, size * heads, dim),
                    "gather_heads": (1, size * s, heads, dim),
                    "exchange_chunks": (1, 1, size, s * heads * dim),
                }
                for operation, shape in cases.items():
                    every = [make_input(seed, peer, shape, dtype) for peer in range(size)]
                    x = every[rank].to(comm.device)
                    out = comm.allocate_output(x, operation, dtype=dtype)
                    expected = getattr(reference, operation)(every)[rank].to(comm.device)
                    for built in (False, True):
                        out.view(torch.uint8).fill_(0x5A)
                        source = x
                        if built:
                            source = comm.input_buffer(out, shape)
                            source.copy_(x)
                        getattr(comm, operation)(source, out=out, dtype=dtype)
                        assert_same_bits(out, expected, f"{operation} {shape} {name}")
                        done += 1
                        expected_bytes += x.numel() * dtype.itemsize * len(session.peers) // size
        assert session.counters.write_bytes - moved == expected_bytes and session.counters.exchanges == done + 2
    return done


@pytest.mark.parametrize("size", SIZES)
def test_operations_equal_their_references(ranks: RankPool, world: Any, size: int) -> None:
    """Memory of the GPU, the kernels' barriers, landing buffers; every byte that crosses is moved by a NIC."""
    names = ("bfloat16", "float32", "uint8") if size < 8 else ("bfloat16",)
    done = ranks.run(operations, names, ranks=size, env=environment(world, size), timeout_s=110)
    assert done == [18 * len(names)] * size
    assert world.counters()["executed_writes"] == (18 * len(names) + 2) * size * (size - 1)


@pytest.mark.skipif(8 not in SIZES, reason="GPU_CHECK_SIZES leaves out 8 ranks, which the hybrid route has")
def test_the_hybrid_route_copies_within_a_node(ranks: RankPool, world: Any) -> None:
    """Copy engines to three peers while the NIC writes to four."""
    done = ranks.run(operations, ("bfloat16",), ranks=8, env=environment(world, 8, "hybrid"), timeout_s=110)
    assert done == [18] * 8 and world.counters()["executed_writes"] == 20 * 8 * 4


def refusals(group: Any) -> None:
    with open_comm(group) as comm:
        x = torch.zeros(1, 1, comm.world_size, 64, dtype=torch.bfloat16, device=comm.device)
        out = comm.allocate_output(x, "exchange_chunks")
        comm.exchange_chunks(x, out=out)
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="can't be captured"), torch.cuda.graph(graph):
            x.mul_(1)  # An empty graph would be a warning.
            comm.exchange_chunks(x, out=out)
        with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(UnsupportedError, match="stays on the stream"):
            comm.exchange_chunks(x, out=out)
        comm.exchange_chunks(x, out=out)


def test_captures_and_other_streams_are_refused(ranks: RankPool, world: Any) -> None:
    ranks.run(refusals, ranks=2, env=environment(world, 2))


def broken(group: Any, culprit: int, how: str) -> tuple[str, bool, float]:
    comm = open_comm(group)
    session = comm._session
    x = make_input(1, comm.rank, (1, 4, 2 * comm.world_size, 64), torch.bfloat16).to(comm.device)
    out = comm.allocate_output(x, "scatter_heads")
    comm.scatter_heads(x, out=out)
    session.barrier()
    torch.cuda.synchronize()
    begin = time.monotonic()
    if comm.rank == culprit:
        if how == "late":
            time.sleep(4)
        else:

            def fail() -> None:
                raise RuntimeError("injected")

            session._port.flush = fail
    text, kind = "", ""
    for _ in range(2):
        try:
            comm.scatter_heads(x, out=out)
        except TransportError as error:
            text, kind = text or str(error), kind or type(error).__name__
    seconds = time.monotonic() - begin
    torch.cuda.synchronize()
    poisoned = bool((out.view(torch.uint8) == 0xFF).all())
    comm.close(20)
    assert kind == PeerStalledError.__name__ or comm.rank == culprit, text
    return text, poisoned, seconds


@pytest.mark.parametrize("how", ["late", "fails"])
def test_an_abort_reaches_hosts_and_kernels(ranks: RankPool, world: Any, how: str) -> None:
    """A host that fails between the barriers releases the kernels that wait in the closing one."""
    env = environment(world, 2, COMM_TIMEOUT_S="2" if how == "late" else "30")
    found = ranks.run(broken, 1, how, ranks=2, env=env, timeout_s=100)
    assert all("rank 1" in text and poisoned for text, poisoned, _ in found), found
    assert how == "late" or all(seconds < 10 for _, _, seconds in found), found
