"""The all-reduce over any group, with CUDA tensors: NCCL across GPUs, gloo with several ranks on one GPU.

Runs where there are GPUs (``python tools/gpu_check.py``); elsewhere it is skipped, and ``COMM_REQUIRE_GPU=1`` turns
that into a failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from comm_core import AllReduceFusionPattern, allreduce_fusion, create_allreduce_fusion_workspace
from comm_core.allreduce import reference
from comm_core.allreduce.patterns import PATTERNS
from comm_core.allreduce.scales import packed_scale_shape, packed_scale_storage, packed_scale_stride
from comm_core.errors import ArgumentValueError
from comm_core.testing.ranks import RankPool

COUNT = torch.cuda.device_count()
CODE = AllReduceFusionPattern
T, H = 33, 256
BF16 = torch.bfloat16

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def shared_ranks() -> Iterator[RankPool]:
    """Ranks with gloo groups, any number of them on a GPU."""
    pool = RankPool(4, preload=["pytest"])
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[RankPool]:
    """Ranks with NCCL groups, one for each GPU."""
    pool = RankPool(COUNT, backend="cpu:gloo,cuda:nccl", preload=["pytest"])
    yield pool
    pool.close()


def outputs(pattern: AllReduceFusionPattern, device: torch.device) -> dict[str, torch.Tensor]:
    """Return every output of a pattern without experts."""
    spec = PATTERNS[pattern]
    kind = spec.quantization.value
    made: dict[str, torch.Tensor] = {}
    for name in (*spec.returns, *spec.may_return):
        if name == "scale_out" and kind == "group_fp8":
            words = torch.zeros(packed_scale_storage(T, H // 64), dtype=torch.int32, device=device)
            made[name] = words.as_strided(packed_scale_shape(T, H // 64), packed_scale_stride(T))
        elif name == "scale_out":
            shape, dtype = ((T, 1), torch.float32) if kind == "dynamic_fp8" else ((128 * 16,), torch.uint8)
            made[name] = torch.zeros(shape, dtype=dtype, device=device)
        elif name == "quant_out":
            packed = kind == "nvfp4"
            dtype = torch.uint8 if packed else torch.float8_e4m3fn
            made[name] = torch.zeros((T, H // 2 if packed else H), dtype=dtype, device=device)
        else:
            made[name] = torch.zeros((T, H), dtype=BF16, device=device)
    return made


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def compute(group: Any) -> int:
    """Compare every pattern without experts with the CPU's reference, bit for bit; return how many were."""
    rank, size = group.rank(), group.size()
    device = torch.device("cuda", torch.cuda.current_device())
    parts = [torch.randn((T, H), generator=torch.Generator().manual_seed(peer)).to(BF16) for peer in range(size)]
    common = torch.Generator().manual_seed(99)
    residual, gamma = (torch.randn(shape, generator=common).to(BF16) for shape in ((T, H), (H,)))
    reduced = reference.reduce_in_rank_order(parts)
    patterns = [pattern for pattern, spec in PATTERNS.items() if not spec.is_moe]
    with create_allreduce_fusion_workspace(
        "dist", max_token_num=T, hidden_dim=H, dtype=BF16, group=group, device=device
    ) as workspace:
        for pattern in patterns:
            made = outputs(pattern, device)
            norm = {} if pattern == CODE.kAllReduce else {"residual_in": residual, "rms_gamma": gamma}
            factor = torch.tensor([0.25])
            allreduce_fusion(
                parts[rank].to(device),
                workspace,
                pattern,
                **{name: x.to(device) for name, x in norm.items()},
                scale_factor=factor.to(device),
                block_quant_group_size=64,
                **made,
            )
            expected = reference.fuse(
                pattern,
                reduced,
                BF16,
                **norm,
                scale_factor=factor,
                block_quant_group_size=64,
                wanted=tuple(made),
            )
            for name, x in made.items():
                want = raw(getattr(expected, name))
                assert torch.equal(raw(x)[: want.numel()], want), f"{pattern.name}: {name}"
        with pytest.raises(ArgumentValueError, match="input must be on cuda"):
            allreduce_fusion(parts[rank], workspace, 0)
    return len(patterns)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_that_share_a_gpu(shared_ranks: RankPool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """F15: over gloo."""
    monkeypatch.setenv("COMM_ALLOW_SHARED_GPU", "1")  # the pool passes it on with every run
    assert shared_ranks.run(compute, ranks=size, timeout_s=60) == [10] * size


@pytest.mark.skipif(COUNT < 2, reason="needs two GPUs")
def test_ranks_with_a_gpu_each(nccl_ranks: RankPool) -> None:
    """F15: over NCCL."""
    assert nccl_ranks.run(compute, timeout_s=60) == [10] * COUNT
