"""The built-in transports with CUDA tensors: NCCL across GPUs, gloo with several ranks on one GPU.

Runs where there are GPUs (``python tools/gpu_check.py``); elsewhere it is skipped, and ``COMM_REQUIRE_GPU=1`` turns
that into a failure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm_core import JointValueError, UlyssesCommunicator, resolve_ulysses_backend
from comm_core.testing.contract import TransportContract
from comm_core.testing.ranks import RankPool

COUNT = torch.cuda.device_count()

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[RankPool]:
    """Ranks with gloo groups, any number of them on a GPU."""
    pool = RankPool(8, preload=["pytest", "hypothesis"])
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[RankPool]:
    """Ranks with NCCL groups, one for each GPU."""
    pool = RankPool(COUNT, backend="cpu:gloo,cuda:nccl", preload=["pytest", "hypothesis"])
    yield pool
    pool.close()


class TestGlooOnCuda(TransportContract):
    """gloo moves CUDA tensors too; several ranks share a GPU here."""

    transport = "gloo"
    device_type = "cuda"
    world_sizes = (2, 4)

    @pytest.fixture
    def ranks(self, shared_ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> RankPool:
        monkeypatch.setenv("COMM_ALLOW_SHARED_GPU", "1")  # the pool passes it on with every run
        return shared_ranks


@pytest.mark.skipif(COUNT < 2, reason="NCCL needs a GPU for each rank, and two ranks")
class TestNccl(TransportContract):
    """NCCL across GPUs."""

    transport = "nccl"
    device_type = "cuda"
    world_sizes = (2,)

    @pytest.fixture
    def ranks(self, nccl_ranks: RankPool) -> RankPool:
        return nccl_ranks

    @pytest.mark.skipif(COUNT < 4, reason="groups of two that are not WORLD need four GPUs")
    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        super().test_groups_that_are_not_the_first_ranks(ranks, world_size)


def decide(group: Any) -> Any:
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)
    decision = resolve_ulysses_backend("auto", group)
    with UlyssesCommunicator(group, max_bytes=1 << 20, dtype=torch.bfloat16) as comm:
        return {
            "backend": decision.backend,
            "considered": [[item.name, item.eligible, item.reason] for item in decision.considered],
            "device": str(comm.device) == str(device),
        }


@pytest.mark.skipif(COUNT < 2, reason="NCCL needs a GPU for each rank, and two ranks")
def test_auto_takes_nccl_and_the_device_is_the_current_one(nccl_ranks: RankPool) -> None:
    outcomes = nccl_ranks.run(decide, ranks=2)
    print(json.dumps(outcomes[0], indent=1))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0]["backend"] == "nccl" and outcomes[0]["device"]


def all_on_one(group: Any) -> str:
    try:
        UlyssesCommunicator(group, max_bytes=1 << 20, dtype=torch.bfloat16, device="cuda:0")
    except JointValueError as error:
        return str(error)
    return "accepted"


@pytest.mark.skipif(COUNT < 2, reason="NCCL needs a GPU for each rank, and two ranks")
def test_a_forgotten_set_device_is_an_error_that_says_so(nccl_ranks: RankPool) -> None:
    """E7: all ranks on cuda:0, which NCCL would answer with a duplicate-GPU error or a hang."""
    outcomes = nccl_ranks.run(all_on_one, ranks=2)
    assert outcomes[0] == outcomes[1] and "set_device" in outcomes[0]


def nothing_allocated(group: Any) -> list[int]:
    """Count the bytes that the caching allocator hands out during calls with out= and a workspace."""
    device = torch.device("cuda", group.rank() % torch.cuda.device_count())
    counts: list[int] = []
    with UlyssesCommunicator(group, max_bytes=1 << 20, dtype=torch.bfloat16, device=device) as comm:
        workspace = comm.create_workspace()
        x = torch.ones(2, 8, 4, 16, dtype=torch.bfloat16, device=device)
        y = torch.empty(2, 8 * comm.world_size, 4 // comm.world_size, 16, dtype=torch.bfloat16, device=device)
        z = torch.empty_like(x)
        for _ in range(3):
            before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
            comm.scatter_heads(x, out=y, workspace=workspace)
            comm.gather_heads(y, out=z, workspace=workspace)
            torch.cuda.synchronize(device)
            counts.append(torch.cuda.memory_stats(device)["allocation.all.allocated"] - before)
        assert torch.equal(x, z)
    return counts


@pytest.mark.skipif(COUNT < 2, reason="NCCL needs a GPU for each rank, and two ranks")
def test_calls_with_output_and_workspace_allocate_nothing_on_the_device(nccl_ranks: RankPool) -> None:
    assert [counts[1:] for counts in nccl_ranks.run(nothing_allocated, ranks=2)] == [[0, 0], [0, 0]]
