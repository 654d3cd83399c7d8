"""The routes over NICs on real NICs and GPUs. ``COMM_REQUIRE_RDMA=1`` makes it a failure that there are none."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, plugins
from comm_core.testing import reference
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input
from comm_pcie import ExperimentalWarning
from comm_pcie.plugin import PciePlugin
from comm_pcie.rdma.planning import choose_gid
from comm_pcie.rdma.probe import probe_rdma

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """As many ranks as there are GPUs, at most eight."""
    pool = RankPool(min(8, torch.cuda.device_count()), preload=["pytest", "hypothesis"], group_timeout_s=120)
    yield pool
    pool.close()


def exchanged(group: Any, route: str) -> dict[str, int]:
    if "pcie" not in plugins.registry().transports:
        plugins.register("pcie under test", PciePlugin())
    device = torch.device("cuda", group.rank())
    torch.cuda.set_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        comm = UlyssesCommunicator(group, backend="pcie", max_bytes=1 << 26, dtype=torch.bfloat16, device=device)
    with comm:
        assert comm.transport == route, comm.fallback_reason
        session: Any = comm._session
        for seed, (s, heads, dim) in enumerate([(64, 2, 64), (3, 1, 5), (4096, 3, 128)]):
            cases = {
                "scatter_heads": (1, s, comm.world_size * heads, dim),
                "gather_heads": (1, comm.world_size * s, heads, dim),
                "exchange_chunks": (1, 1, comm.world_size, s * heads * dim),
            }
            for operation, shape in cases.items():
                every = [make_input(seed, peer, shape, torch.bfloat16) for peer in range(comm.world_size)]
                x = every[comm.rank].to(device)
                out = comm.allocate_output(x, operation)
                for _ in range(5):
                    out.view(torch.uint8).fill_(0x5A)
                    getattr(comm, operation)(x, out=out)
                    assert_same_bits(out.cpu(), getattr(reference, operation)(every)[comm.rank], operation)
        return session.counters._asdict()


@pytest.mark.parametrize("route", ["rdma", "hybrid"])
def test_operations_equal_their_references(ranks: RankPool, route: str, shell_environment: dict[str, str]) -> None:
    """T4: with GPUDirect RDMA, over every GPU that has a NIC of its own."""
    facts = probe_rdma()
    usable = sum(not nic.problem and choose_gid(nic)[0] is not None for nic in facts.nics)
    size = max((n for n in (2, 4, 8) if n <= min(usable, ranks.size)), default=0)
    if facts.library_error or size < (8 if route == "hybrid" else 2):
        why = f"{usable} usable NICs for {ranks.size} GPUs ({facts.error or facts.library_error or 'too few'})"
        if shell_environment.get("COMM_REQUIRE_RDMA") == "1" and route == "rdma":
            pytest.fail(f"COMM_REQUIRE_RDMA=1: {why}")
        pytest.skip(why)
    counters = ranks.run(exchanged, route, ranks=size, env={"COMM_ULYSSES_PCIE_ROUTE": route}, timeout_s=110)
    assert all(item["writes"] > 0 and item["write_bytes"] > 0 for item in counters), counters
