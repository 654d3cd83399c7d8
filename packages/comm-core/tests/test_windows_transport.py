"""Who may use windows: the verdict and the launch plan from gathered facts, and a build that fails on one rank."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator, jit, plugins
from comm_core.errors import UlyssesBackendError
from comm_core.jit.libraries import obtain
from comm_core.plugins.discovery import registry
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing import topologies
from comm_core.testing.fake_nvcc import FakeNvcc
from comm_core.testing.ranks import RankPool
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request, Verdict
from comm_core.windows.launch import WINDOWS
from comm_core.windows.transport import WindowTransport, blocks_per_peer

BLOCKS = 128


def request(size: int, *, shared: bool = False) -> Request:
    return Request("auto", size, "cuda", environment={"COMM_ALLOW_SHARED_GPU": str(int(shared))})


def assess(facts: Sequence[RankFacts], *, shared: bool = False, name: str = "windows") -> Verdict:
    return WindowTransport(name, copy_engines=name == "windows-ce").assess(request(len(facts), shared=shared), facts)


def on_gpus(ranks_of: Sequence[int]) -> list[RankFacts]:
    """Return ranks on the GPUs of one machine: rank i on GPU ``ranks_of[i]``."""
    machine = topologies.nvlink_mesh(max(ranks_of) + 1)
    return [replace(machine[gpu], rank=rank) for rank, gpu in enumerate(ranks_of)]


@pytest.mark.parametrize("size", range(1, 18))
@pytest.mark.parametrize("name", ["windows", "windows-ce"])
def test_groups_of_two_to_sixteen(size: int, name: str) -> None:
    """The signal block and the tables have room for sixteen; one rank has nobody to write to."""
    verdict = assess(topologies.nvlink_mesh(size), name=name)
    assert verdict.eligible == (2 <= size <= 16), verdict
    if verdict.eligible:
        assert verdict.plan == {"blocks_per_peer": BLOCKS // size}
    else:
        assert str(size) in verdict.reason


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (topologies.pcie_root_complex(4), ""),
        (topologies.pcie_switch_pairs(8), ""),
        (topologies.masked_vm(2), ""),
        (topologies.two_islands(8), ""),  # any peer access will do
        (topologies.asymmetric(4), "2→1"),
        (topologies.two_hosts(2), "host"),
        (topologies.mig_slices(2), "MIG"),
        (topologies.cpu_host(2), "CPU|cpu|CUDA|cuda"),
        (topologies.same_gpu(topologies.nvlink_mesh(2)), "same GPU|share|COMM_ALLOW_SHARED_GPU"),
        # Unknown is no yes.
        (topologies.with_pair(topologies.nvlink_mesh(2), 0, 1, peer_access=None, p2p_read=None), "0→1"),
    ],
)
def test_what_a_machine_must_have(facts: list[RankFacts], words: str) -> None:
    """Peer access of every ordered pair on one host; what is missing is said, on every rank in the same words."""
    verdict = assess(facts)
    assert verdict.eligible == (words == ""), verdict
    assert re.search(words, verdict.reason), verdict.reason
    assert not verdict.eligible or verdict.plan == {"blocks_per_peer": BLOCKS // len(facts)}


def test_ranks_on_one_gpu_need_the_opt_in() -> None:
    """And then it is said in the reason."""
    facts = topologies.same_gpu(topologies.nvlink_mesh(8))
    facts = [replace(record, rank=rank) for rank, record in enumerate(facts)]
    assert not assess(facts).eligible
    verdict = assess(facts, shared=True)
    assert verdict.eligible and verdict.plan == {"blocks_per_peer": 2}
    assert "shar" in verdict.reason


def test_the_kernels_of_all_ranks_fit_every_gpu_at_once() -> None:
    """Kernels wait for each other: what does not fit a GPU beside those it waits for never ends.

    Whatever the ranks share, the blocks on one GPU stay within what the smallest supported one holds; where they
    can't, the group is refused. The launch is the same on all ranks and does not depend on their order.
    """
    generator = random.Random(0)
    eligible = 0
    for _ in range(300):
        size = generator.randint(2, 16)
        ranks_of = [generator.randrange(generator.randint(1, 8)) for _ in range(size)]
        facts = on_gpus(ranks_of)
        verdict = assess(facts, shared=True)
        shuffled = [replace(record, rank=rank) for rank, record in enumerate(generator.sample(facts, size))]
        assert assess(shuffled, shared=True).plan == verdict.plan
        most = max(Counter(ranks_of).values())
        assert verdict.eligible == (size * most <= BLOCKS), verdict
        if verdict.eligible:
            eligible += 1
            blocks = int(str((verdict.plan or {})["blocks_per_peer"]))
            assert blocks >= 1 and size * blocks * most <= BLOCKS
            # As many as there is room for.
            assert size * (blocks + 1) * most > BLOCKS
        else:
            assert "don't fit at once" in verdict.reason
    assert 100 < eligible < 300


def test_nothing_local_decides_the_launch() -> None:
    """C7: ranks that launch differently wait for each other for ever. Only who is on which GPU counts."""
    facts = on_gpus([0, 1, 1, 2])
    expected = blocks_per_peer(facts)
    for changes in ({"memory_bytes": 1}, {"index": 7}, {"name": "another"}, {"compute_capability": "8.0"}):
        assert blocks_per_peer(topologies.with_device(facts, 2, **changes)) == expected
    assert expected == BLOCKS // (4 * 2)


def test_they_are_experimental_and_come_before_the_fallbacks() -> None:
    """Nobody gets a reference transport without having asked for it."""
    found = registry().transports
    for name in ("windows", "windows-ce"):
        assert found[name].experimental
        assert found[name].priority > found["nccl"].priority > found["gloo"].priority


def on_cpu(group: Any) -> list[str]:
    texts: list[str] = []
    for name in ("windows", "windows-ce"):
        with pytest.raises(UlyssesBackendError) as caught:
            UlyssesCommunicator(group, max_bytes=64, dtype=torch.uint8, backend=name, device="cpu")
        texts.append(str(caught.value))
    return texts


def test_without_a_gpu_they_are_refused_by_name_on_every_rank(ranks: RankPool) -> None:
    outcomes = ranks.run(on_cpu, ranks=3)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    for name, text in zip(("windows", "windows-ce"), outcomes[0], strict=True):
        assert name in text and ("cpu" in text.lower() or "cuda" in text.lower()), text


# A build that fails on one rank, in processes


class OnCpu(WindowTransport):
    """Windows that say that they can use CPU tensors: far enough to build."""

    experimental = False

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        return Verdict(True, "for a test", {"blocks_per_peer": 1})


class Plugin:
    comm_api = API_VERSION

    @hookimpl
    def comm_transports(self) -> Sequence[OnCpu]:
        return [OnCpu("on-cpu", copy_engines=False)]


def build_on_one(group: Any) -> tuple[str, str, str]:
    load: Callable[..., Any] = jit.load
    jit.load = lambda spec, device: obtain(spec, ("9.0a",))  # what it does before it loads, which a fake can't be
    plugins.register("cpu windows", Plugin())
    arguments = {"max_bytes": 1 << 12, "dtype": torch.float32, "device": "cpu"}
    try:
        with pytest.raises(UlyssesBackendError) as caught:
            UlyssesCommunicator(group, backend="on-cpu", **arguments)
        with UlyssesCommunicator(group, backend="auto", **arguments) as comm:
            x = torch.full((1, 1, group.size(), 2), float(group.rank()))
            assert comm.scatter_heads(x)[0, :, 0, 0].tolist() == [float(peer) for peer in range(group.size())]
            return str(caught.value), comm.backend, str(comm.fallback_reason)
    finally:
        plugins.unregister("cpu windows")
        jit.load = load


@pytest.mark.parametrize("how", ["COMM_JIT", "COMM_NVCC"])
def test_a_rank_that_may_not_or_can_not_build_takes_all_to_the_fallback(
    ranks: RankPool, tmp_path: Path, how: str
) -> None:
    """L14: COMM_JIT=off, or no compiler, on one rank alone. By name all raise its reason; "auto" is gloo for all."""
    nvcc = FakeNvcc(tmp_path / "nvcc")
    env = {"COMM_NVCC": str(nvcc.path), "COMM_CACHE_DIR": str(tmp_path / "cache")}
    broken = {"COMM_CACHE_DIR": str(tmp_path / "other"), how: "off" if how == "COMM_JIT" else str(tmp_path / "none")}
    outcomes = ranks.run(build_on_one, ranks=3, env=env, rank_env={1: {**env, **broken}}, timeout_s=60)
    assert outcomes[0] == outcomes[1] == outcomes[2]
    forced, backend, reason = outcomes[0]
    assert backend == "gloo"
    for text in (forced, reason):
        assert "open transport 'on-cpu': build: rank 1: " in text and how in text and "rank 0:" not in text
    # The others had built it, once: the failure is the rank's and not the source's.
    assert nvcc.made() == [WINDOWS.name]
