"""The all-reduce of this package: the kernels on a host, the functions of the older names, and the sizes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import comm_mnnvl
from comm_core import _cuda
from comm_core.allreduce import reference
from comm_core.allreduce.patterns import (
    PATTERNS,
    AllReduceFusionPattern,
    MNNVLAllreduceFusionStrategy,
    MNNVLQuantType,
)
from comm_core.allreduce.patterns import QuantizationSFLayout as Layout
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_core.group import Group
from comm_core.jit.loader import Module
from comm_core.mapping import Mapping
from comm_core.testing import allreduce_host as host
from comm_core.testing.cuda_modules import CudaModulesContract
from comm_core.testing.ranks import run_threads
from comm_mnnvl.allreduce import ALLREDUCE, MnnvlAllReduce
from comm_mnnvl.allreduce_workspace import MNNVLAllReduceFusionWorkspace as Workspace
from comm_mnnvl.plugin import plugin

BF16 = torch.bfloat16
Strategy = MNNVLAllreduceFusionStrategy
T, H = 3, 64


class TestModules(CudaModulesContract):
    """The module of the all-reduce."""

    package = comm_mnnvl
    modules = (ALLREDUCE,)
    # The goal is 15 s on two cores, up to 30 of a processor; an idle machine takes 6, a busy one twice that.
    first_build_s = 20.0
    describing = "from comm_mnnvl.plugin import plugin; plugin.comm_modules()"
    # Compiled for every architecture as that of comm-nvlink, from which it differs in its name; it has no headers.
    test_each_is_as_every_module_must_be = None  # pyright: ignore[reportAssignmentType]
    test_the_headers_stand_alone_on_a_host = None  # pyright: ignore[reportAssignmentType]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return host.build(ALLREDUCE, tmp_path_factory.mktemp("host"))


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    yield


def operands(size: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    parts = [torch.randn(T, H, generator=torch.Generator().manual_seed(rank)).to(BF16) for rank in range(size)]
    common = torch.Generator().manual_seed(99)
    return parts, torch.randn(T, H, generator=common).to(BF16), torch.randn(H, generator=common).to(BF16)


def calls(group: Group, module: Module) -> None:
    with host.opened(Workspace, group, module, T * H * 2) as workspace:
        parts, residual, gamma = operands(group.size)
        x, eps = parts[group.rank], float(torch.finfo(BF16).eps)
        total = reference.reduce_in_rank_order(parts)
        fused = reference.fuse(1, total, BF16, residual_in=residual, rms_gamma=gamma, rms_eps=eps, weight_bias=1.0)
        for strategy in Strategy:
            out = torch.empty_like(x)
            assert comm_mnnvl.trtllm_mnnvl_allreduce(x, workspace, False, out, strategy) is out
            assert torch.equal(out, total.to(BF16))
            norm, after = comm_mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm(
                x, residual, gamma, workspace, strategy=strategy, weight_bias=1.0
            )
            assert fused.residual_out is not None and fused.norm_out is not None
            assert torch.equal(after, fused.residual_out)
            torch.testing.assert_close(norm, fused.norm_out, rtol=2**-7, atol=0)
        for kind, pattern in (
            (MNNVLQuantType.FP8, AllReduceFusionPattern.kARResidualRMSNormFP8Quant),
            (MNNVLQuantType.NVFP4, AllReduceFusionPattern.kARResidualRMSNormFP4Quant),
            (MNNVLQuantType.DYNAMIC_FP8, AllReduceFusionPattern.kARResidualRMSNormDynamicFP8Quant),
        ):
            norm = torch.empty_like(x)
            quantized, scales, after, given = comm_mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
                x,
                residual,
                gamma,
                workspace,
                output=norm,
                output_scale=2.0,
                layout_code=Layout.LINEAR,
                quant_type=kind,
            )
            assert given is norm
            want, want_scales = reference.quantize(
                norm,
                PATTERNS[pattern].quantization,
                scale_factor=2.0,
                layout=Layout.LINEAR,
            )
            assert want is not None
            assert torch.equal(quantized.view(torch.uint8), want.view(torch.uint8))
            assert (scales is None) == (want_scales is None)
            if scales is not None and want_scales is not None:
                assert torch.equal(scales.view(torch.uint8), want_scales.view(torch.uint8))
        with pytest.warns(DeprecationWarning):
            before, normed = torch.empty_like(x), torch.empty_like(x)
            comm_mnnvl.trtllm_mnnvl_fused_allreduce_rmsnorm(before, normed, x, workspace, gamma, 1e-6, residual)
        assert torch.equal(before, fused.residual_out)
        with pytest.warns(DeprecationWarning):
            assert torch.equal(comm_mnnvl.trtllm_mnnvl_all_reduce(x, workspace), total.to(BF16))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_older_functions_do_what_allreduce_fusion_does(module: Module, ranks: int) -> None:
    run_threads(ranks, calls, module, timeout_s=60)


def refusals(group: Group, module: Module) -> None:
    with host.opened(Workspace, group, module, T * H * 2) as workspace:
        parts, residual, gamma = operands(group.size)
        x = parts[group.rank]
        with pytest.raises(ArgumentValueError, match="quant_type must be FP8"):
            comm_mnnvl.trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(x, residual, gamma, workspace)
        with pytest.raises(ArgumentValueError, match="strategy must be one of 0 ONESHOT"):
            comm_mnnvl.trtllm_mnnvl_allreduce(x, workspace, strategy=7)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ArgumentTypeError, match="must be an MNNVLAllReduceFusionWorkspace"):
            comm_mnnvl.trtllm_mnnvl_allreduce(x, object())  # pyright: ignore[reportArgumentType]
        with pytest.warns(DeprecationWarning), pytest.raises(UnsupportedError, match="raw pointers are not taken"):
            comm_mnnvl.trtllm_mnnvl_all_reduce(x, 4096, 4096)
        with pytest.warns(DeprecationWarning), pytest.raises(ArgumentValueError, match="nranks must be 2"):
            comm_mnnvl.trtllm_mnnvl_all_reduce(x, workspace, nranks=3)


def test_what_the_older_functions_refuse(module: Module) -> None:
    run_threads(2, refusals, module)


@pytest.mark.parametrize("tp_size", [2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_required_sizes_are_what_the_gate_goes_by(tp_size: int, dtype: torch.dtype) -> None:
    """F4: one function for both; two shots need less than one for large operands of several ranks."""
    required = Workspace.get_required_buffer_size_bytes
    one, two, auto = (required(tp_size, 2048, 8192, dtype, strategy) for strategy in Strategy)
    operand = 2048 * 8192 * dtype.itemsize
    assert (one, two) == ((tp_size - 1) * operand, (2 * tp_size - 1) * operand // tp_size)
    assert auto == (one if tp_size == 2 else two)
    assert required(tp_size, 1, 1, dtype) == 16 * (tp_size - 1)
    with pytest.raises(ArgumentValueError, match="sizes must be at least 1"):
        required(tp_size, 0, 1, dtype)


def test_a_size_is_given_once() -> None:
    for sizes in ({}, {"max_num_tokens": 4, "hidden_dim": 8, "dtype": BF16, "buffer_size_in_bytes": 64}):
        with pytest.raises(ArgumentValueError, match=r"one of max_num_tokens .* must be given"):
            Workspace(Mapping(world_size=1, rank=0, tp_size=1), **sizes)


def test_the_plugin_offers_it() -> None:
    (backend,) = plugin.comm_allreduce()
    assert isinstance(backend, MnnvlAllReduce)
    assert backend.workspace() is Workspace
