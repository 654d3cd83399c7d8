"""prepare_qkv and scatter_qkv on GPUs: the bytes of the CPU over every transport, graphs, allocation, accuracy.

Ranks share the GPUs there are, as processes; ``python tools/gpu_check.py`` runs this under MPS. NCCL takes one rank a
GPU and runs where there are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_core import UlyssesCommunicator
from comm_core.errors import CommError, UnsupportedError
from comm_core.plugins import register
from comm_core.plugins.discovery import registry
from comm_core.testing.gpu import environment, shared_gpu_pool
from comm_core.testing.ranks import RankPool
from comm_lowp import reference_attention, sage_attention
from comm_lowp.plugin import LowpPlugin
from comm_lowp.sage2 import capability
from comm_lowp.sage2.grid import LAYOUTS
from comm_lowp.testing import oracle
from comm_lowp.testing.cases import DATA, Case, check, make, simulate

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

BF16, F16 = torch.bfloat16, torch.float16
FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


ranks = shared_gpu_pool(4)


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[RankPool]:
    """Two ranks with NCCL groups, one for each GPU."""
    pool = RankPool(2, backend="cpu:gloo,cuda:nccl", preload=["pytest", "hypothesis"])
    yield pool
    pool.close()


# O7: a CPU and a GPU agree


@pytest.mark.parametrize("kernels", ["off", "require"])
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("data", DATA)
def test_a_gpu_has_the_bytes_of_a_cpu(kernels: str, layout: str, data: str) -> None:
    """O7: every primitive, in PyTorch on the GPU and by the kernels, against the oracle and the CPU's payloads."""
    for case in (
        Case(4, 2, 1, 65, 200, 64, BF16, layout, data, 1),
        Case(2, 1, 2, 300, 599, 128, F16, layout, data, 2),
        Case(1, 1, 1, 17, 5, 64, BF16, layout, data, 3),
    ):
        inputs = make(case)
        plain = simulate(case, inputs)
        on_gpu = tuple(x.cuda() for x in inputs)
        with environment(COMM_LOWP_KERNELS=kernels):
            run = simulate(case, (on_gpu[0], on_gpu[1], on_gpu[2]))
            given = simulate(case, (on_gpu[0], on_gpu[1], on_gpu[2]), mean=run.mean)
        check(run, inputs)
        for mine, again, theirs in zip(run.sent, given.sent, plain.sent, strict=True):
            assert torch.equal(mine.cpu(), theirs) and torch.equal(again, mine)
        for x, copy in zip(on_gpu, inputs, strict=True):
            assert torch.equal(x.cpu(), copy)


# Ranks


def open_comm(group: Any, backend: str, q: torch.Tensor) -> UlyssesCommunicator:
    if "sage2" not in registry().codecs:
        register("lowp-here", LowpPlugin())
    return UlyssesCommunicator(group, max_bytes=3 * q.nbytes, dtype=q.dtype, device=q.device, backend=backend)


def operands(case: Case, rank: int) -> list[torch.Tensor]:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return [x[:, rank * case.rows : (rank + 1) * case.rows].to(device) for x in make(case)]


def exchange(group: Any, backend: str, case: Case, kernels: str) -> tuple[list[Any], str, str]:
    """Encode twice, the second time from views into reused storage, on a stream of its own."""
    with environment(COMM_LOWP_LAYOUT=case.layout, COMM_LOWP_KERNELS=kernels):
        q, k, v = operands(case, group.rank())
        with open_comm(group, backend, q) as comm:
            workspace = comm.prepare_qkv(q.shape, used_sequence=case.used)
            encoded = comm.scatter_qkv(q, k, v, workspace=workspace)
            first = [oracle.raw(x).copy() for x in encoded[:6]]
            for x in encoded[:6]:
                x.view(torch.uint8).fill_(0x5A)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                views = torch.cat([q, k, v], dim=2).chunk(3, dim=2)
                comm.scatter_qkv(*views, workspace=workspace, out=encoded)
            torch.cuda.current_stream().wait_stream(stream)
            for name, one, x in zip(FIELDS, first, encoded, strict=False):
                oracle.assert_same_bytes(x, one, f"again: {name}")
            return first, workspace.transport, workspace.route


def compare(case: Case, results: list[Any]) -> None:
    inputs = make(case)
    expected = oracle.encode(*inputs, case.layout, case.used, oracle.mean_of(inputs[1], case.ranks, case.used))
    for rank, (arrays, _, _) in enumerate(results):
        for name, array in zip(FIELDS, arrays, strict=True):
            oracle.assert_same_bytes(array, oracle.heads_of(name, expected[name], case.ranks, rank), f"{rank} {name}")


@pytest.mark.parametrize(
    ("backend", "kernels", "route"),
    [
        ("gloo", "off", "exchange"),
        ("gloo", "require", "exchange"),
        ("windows", "require", "direct"),
        ("windows", "off", "exchange"),
    ],
)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_every_transport_gives_the_bytes_of_one_device(
    ranks: RankPool, backend: str, kernels: str, route: str, layout: str
) -> None:
    for size in (2, 4):
        _exchange_and_compare(ranks, size, backend, kernels, route, layout)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL takes one rank a GPU, and there is one GPU")
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_nccl_gives_the_bytes_of_one_device(nccl_ranks: RankPool, layout: str) -> None:
    _exchange_and_compare(nccl_ranks, 2, "nccl", "require", "exchange", layout)


def _exchange_and_compare(pool: RankPool, size: int, backend: str, kernels: str, route: str, layout: str) -> None:
    case = Case(size, 2, 2, 65, size * 65 - 9, 128, BF16, layout, "biased", 4)
    small = replace(case, rows=5, used=size * 5 - 1, dtype=F16, data="graded")
    for one in (case, small):
        results = pool.run(exchange, backend, one, kernels, ranks=size)
        assert {(transport, taken) for _, transport, taken in results} == {(backend, route)}
        compare(one, results)


def captured(group: Any, case: Case) -> tuple[list[list[Any]], int]:
    """Capture a call over windows, replay it with changed inputs; count what eager calls allocate.

    The first of the results is of an eager call with the same storage on another stream.
    """
    with environment(COMM_LOWP_LAYOUT=case.layout, COMM_LOWP_KERNELS="require"):
        q, k, v = operands(case, group.rank())
        with open_comm(group, "windows", q) as comm:
            workspace = comm.prepare_qkv(q.shape, used_sequence=case.used)
            encoded = comm.scatter_qkv(q, k, v, workspace=workspace)
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            for _ in range(3):
                comm.scatter_qkv(q, k, v, workspace=workspace, out=encoded)
            allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
            for x in encoded[:6]:
                x.view(torch.uint8).fill_(0x5A)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                comm.scatter_qkv(q, k, v, workspace=workspace, out=encoded)
            torch.cuda.current_stream().wait_stream(stream)
            found = [[oracle.raw(x).copy() for x in encoded[:6]]]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                comm.scatter_qkv(q, k, v, workspace=workspace, out=encoded)
            for seed in (5, 6, 7):
                for x, y in zip((q, k, v), operands(replace(case, seed=seed), group.rank()), strict=True):
                    x.copy_(y)
                graph.replay()
                torch.cuda.synchronize()
                found.append([oracle.raw(x).copy() for x in encoded[:6]])
                comm.check()
            with pytest.raises(CommError, match="capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=comm.device)  # torch warns of a graph without anything
                comm.prepare_qkv(q.shape)
            return found, allocated


def test_calls_over_windows_allocate_nothing_and_can_be_captured(ranks: RankPool) -> None:
    case = Case(2, 1, 2, 130, 250, 64, BF16, "sage2_sm90", "graded")
    results = ranks.run(captured, case, ranks=2)
    assert [allocated for _, allocated in results] == [0, 0]
    for number, seed in enumerate((case.seed, 5, 6, 7)):
        compare(replace(case, seed=seed), [(found[number], "", "") for found, _ in results])


def attention(group: Any, case: Case) -> torch.Tensor:
    with environment(COMM_LOWP_LAYOUT=case.layout):
        q, k, v = operands(case, group.rank())
        with open_comm(group, "windows", q) as comm:
            encoded = comm.scatter_qkv(q, k, v, workspace=comm.prepare_qkv(q.shape, used_sequence=case.used))
            try:
                out = sage_attention(encoded)
            except UnsupportedError as error:
                assert "sageattention" in str(error)
                out = reference_attention(encoded)
            return comm.gather_heads(out).cpu()


def test_attention_over_ranks_is_that_of_one_process(ranks: RankPool) -> None:
    """With SageAttention where it is installed."""
    layout = capability()["layout"] or "sage2_sm90"
    case = Case(2, 1, 2, 512, 1000, 128, BF16, layout, "normal")
    out = torch.cat(ranks.run(attention, case, ranks=2), dim=1)
    q, k, v = (x[:, :1000].transpose(1, 2).double() for x in make(case))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    live = out[:, :1000].double()
    assert not out[:, 1000:].any()
    assert torch.nn.functional.cosine_similarity(live.flatten(), exact.flatten(), dim=0) >= 0.999
    assert (live - exact).norm() / exact.norm() <= 0.045
