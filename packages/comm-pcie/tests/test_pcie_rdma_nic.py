"""The real-NIC tier: what the emulator can't show. Opt-in: ``COMM_REQUIRE_RDMA=1`` makes a missing NIC a failure.

Two ranks, each with a NIC of its own of this machine (RoCE v2 with IPv4), exchange memory of the host over them. With
GPUs as well, ``gpu/test_gpu_pcie_rdma_nic.py`` opens the transport as it is.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Any

import pytest
import rdma_host as host
import torch

from comm_core.testing import reference
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input
from comm_pcie.rdma.planning import choose_gid
from comm_pcie.rdma.probe import probe_rdma


def real_nics() -> tuple[list[tuple[str, int, str]], str]:
    """(name, GID index, GID) of each NIC that could be used, and why there are not enough."""
    facts = probe_rdma()
    found: list[tuple[str, int, str]] = []
    problems = [text for text in (facts.error, facts.library_error) if text]
    for nic in facts.nics:
        index, why = choose_gid(nic)
        if nic.problem or index is None:
            problems.append(f"{nic.name}: {nic.problem or why}")
        else:
            found.append((nic.name, index, next(entry.gid for entry in nic.gids if entry.index == index)))
    if len(found) >= 2 and not facts.library_error:
        return found, ""
    return found, f"two NICs with an IPv4 RoCE v2 GID are needed, there are {len(found)} ({'; '.join(problems)})"


def exchanged(group: Any) -> dict[str, int]:
    with host.installed(host.RealNicTransport), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        for seed, (s, heads, dim) in enumerate([(64, 2, 96), (3, 1, 5), (257, 4, 128)]):
            cases = {
                "scatter_heads": (1, s, size * heads, dim),
                "gather_heads": (1, size * s, heads, dim),
                "exchange_chunks": (1, 1, size, s * heads * dim),
            }
            for operation, shape in cases.items():
                every = [make_input(seed, peer, shape, torch.uint8) for peer in range(size)]
                out = comm.allocate_output(every[rank], operation)
                for _ in range(3):
                    out.fill_(0x5A)
                    getattr(comm, operation)(every[rank], out=out)
                    assert_same_bits(out, getattr(reference, operation)(every)[rank], operation)
        return session.counters._asdict()


def test_two_nics_of_this_machine_exchange(
    ranks: RankPool, request: pytest.FixtureRequest, shell_environment: dict[str, str]
) -> None:
    """T4: the same calls as over the emulator, by real NICs."""
    found, problem = real_nics()
    if problem and shell_environment.get("COMM_REQUIRE_RDMA") == "1":
        pytest.fail(f"COMM_REQUIRE_RDMA=1: {problem}")
    if problem:
        pytest.skip(problem)
    libraries = request.getfixturevalue("rdma_libraries")
    setup = host.Setup(
        **{**libraries, "emulator": ""},
        route="rdma",
        gids=[gid for _, _, gid in found],
        gid_indices=[index for _, index, _ in found],
        numa_nodes=[0, 0],
        nics=[name for name, _, _ in found],
    )
    env = {host.VARIABLE: json.dumps(asdict(setup)), "COMM_TIMEOUT_S": "30"}
    counters = ranks.run(exchanged, ranks=2, env=env)
    assert all(item["writes"] == 27 + 2 and item["write_bytes"] > 0 for item in counters), counters
    assert "COMM_VERBS_LIBRARY" not in os.environ
