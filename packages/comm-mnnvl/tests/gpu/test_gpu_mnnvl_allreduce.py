"""The all-reduce backend ``mnnvl`` on real GPUs: patterns, the functions of the older names, checkpoint and restore.

The kernels are those of comm-nvlink's backend, whose tests go through sizes, long runs and stalls. What is this
package's own is here: its memory, its workspace, its functions.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comm_mnnvl
from comm_core import allreduce_fusion, create_allreduce_fusion_workspace
from comm_core.allreduce.patterns import PATTERNS, MNNVLAllreduceFusionStrategy, MNNVLQuantType
from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import CheckpointError
from comm_core.mapping import Mapping
from comm_core.testing import allreduce_cases
from comm_core.testing.allreduce_cases import Case, assert_right, make_operands, make_outputs, raw
from comm_core.testing.gpu import plugin_of, run_on_devices, shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_mnnvl.plugin import MnnvlPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes()
PLUGIN = plugin_of("mnnvl", MnnvlPlugin)
PLAIN = [pattern for pattern, spec in PATTERNS.items() if not spec.is_moe]
BF16 = torch.bfloat16
by_size = pytest.mark.parametrize("size", SIZES)


ranks = shared_gpu_pool(8)


def run(ranks: RankPool, size: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
    return run_on_devices(ranks, function, *arguments, size=size, plugin=PLUGIN, **options)


def call(workspace: Any, case: Case, seed: int) -> dict[str, torch.Tensor]:
    operands = make_operands(case, workspace.world_size, seed)
    made = make_outputs(case, workspace.device)
    given = allreduce_cases.arguments(case, operands, workspace.device)
    allreduce_fusion(operands.parts[workspace.rank].to(workspace.device), workspace, case.pattern, **given, **made)
    torch.cuda.synchronize()
    assert_right(case, operands, made)
    return {name: raw(x) for name, x in made.items()}


def patterns(group: Any) -> list[dict[str, torch.Tensor]]:
    device = torch.device("cuda", torch.cuda.current_device())
    with create_allreduce_fusion_workspace(
        "mnnvl", max_token_num=40, hidden_dim=4096, dtype=BF16, group=group, device=device, force_oneshot_support=True
    ) as workspace:
        assert workspace.backend == "mnnvl"
        cases = [Case(pattern, 7, 4096, BF16, use_oneshot=one) for pattern in PLAIN for one in (True, False)]
        return [call(workspace, case, seed) for seed, case in enumerate(cases)]


@by_size
def test_every_pattern_equals_the_reference(ranks: RankPool, size: int) -> None:
    """Replicas are equal to the bit."""
    results = run(ranks, size, patterns)
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def functions(group: Any) -> str:
    """The constructor and the older functions; then the memory goes, comes back, and a graph is replayed."""
    size, rank = group.size(), group.rank()
    mapping = Mapping(world_size=size, rank=rank, tp_size=size)
    workspace = comm_mnnvl.MNNVLAllReduceFusionWorkspace(
        mapping, max_num_tokens=16, hidden_dim=1024, dtype=BF16, comm_backend=TorchDistBackend(group)
    )
    device = workspace.device
    x = torch.full((16, 1024), float(rank + 1), dtype=BF16, device=device)
    total = float(size * (size + 1) // 2)
    residual, gamma = torch.ones_like(x), torch.full((1024,), 2.0, dtype=BF16, device=device)
    for strategy in MNNVLAllreduceFusionStrategy:
        assert bool((comm_mnnvl.trtllm_mnnvl_allreduce(x, workspace, strategy=strategy) == total).all())
        norm, after = comm_mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
            x, residual, gamma, workspace, strategy=strategy
        )
        assert bool((after == total + 1).all())
        assert bool((norm == 2.0).all())
    quantized, scales, _, _ = comm_mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
        x, residual, gamma, workspace, quant_type=MNNVLQuantType.DYNAMIC_FP8
    )
    assert scales is not None
    torch.testing.assert_close(quantized.float() * scales, torch.full_like(x, 2.0).float(), rtol=2**-4, atol=0)
    out = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        comm_mnnvl.trtllm_mnnvl_allreduce(x, workspace, output=out)
    workspace.checkpoint_prepare()
    with pytest.raises(CheckpointError, match="detached since checkpoint_prepare"):
        comm_mnnvl.trtllm_mnnvl_allreduce(x, workspace)
    workspace.checkpoint_restore(TorchDistBackend(group))
    for _ in range(3):
        out.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert bool((out == total).all())
    form = workspace.memory_form
    workspace.destroy()
    return form


@by_size
def test_older_functions_and_a_checkpoint(ranks: RankPool, size: int) -> None:
    assert run(ranks, size, functions) == ["vmm_fd"] * size
