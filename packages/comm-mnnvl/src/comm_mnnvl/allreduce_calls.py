"""The ``trtllm_mnnvl_*`` functions: `allreduce_fusion` on a workspace of this package, under older names."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from comm_core.allreduce.front import allreduce_fusion
from comm_core.allreduce.patterns import (
    AllReduceFusionPattern,
    MNNVLAllreduceFusionStrategy,
    MNNVLQuantType,
    QuantizationSFLayout,
)
from comm_core.allreduce.quant import NVFP4_BLOCK
from comm_core.allreduce.scales import scale_size
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_mnnvl.allreduce_workspace import MNNVLAllReduceFusionWorkspace, use_oneshot

__all__ = [
    "trtllm_mnnvl_all_reduce",
    "trtllm_mnnvl_allreduce",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm",
    "trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant",
    "trtllm_mnnvl_fused_allreduce_rmsnorm",
]

_AUTO = MNNVLAllreduceFusionStrategy.AUTO
_CODE = AllReduceFusionPattern


def _check_workspace(workspace: object) -> MNNVLAllReduceFusionWorkspace:
    if not isinstance(workspace, MNNVLAllReduceFusionWorkspace):
        raise ArgumentTypeError(
            f"workspace must be an MNNVLAllReduceFusionWorkspace, got {type(workspace).__name__}; other workspaces "
            "go to comm_core.allreduce_fusion"
        )
    return workspace


def _eps(x: torch.Tensor, epsilon: float | None) -> float:
    return float(torch.finfo(x.dtype).eps) if epsilon is None else epsilon


def trtllm_mnnvl_allreduce(
    input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    launch_with_pdl: bool = False,
    output: torch.Tensor | None = None,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
) -> torch.Tensor:
    """Return the sum of `input` over the ranks, ``[T, H]``. Collective.

    Args:
        input: this rank's contribution, ``[T, H]``.
        workspace: of this package.
        launch_with_pdl: whether the kernel may start by programmatic dependent launch.
        output: for the sum; allocated where it is None.
        strategy: one shot, two shots, or what is chosen by size; the bits are the same.

    Raises:
        As `comm_core.allreduce_fusion`.
    """
    return allreduce_fusion(
        input,
        _check_workspace(workspace),
        _CODE.kAllReduce,
        launch_with_pdl=launch_with_pdl,
        output=output,
        use_oneshot=use_oneshot(strategy),
    )


def trtllm_mnnvl_fused_allreduce_add_rmsnorm(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of sum and residual, and their sum. Collective.

    Args:
        input: this rank's contribution, ``[T, H]``.
        residual_in: added to the sum, ``[T, H]``, equal on all ranks.
        gamma: weight of the norm, ``[H]``.
        workspace: of this package.
        epsilon: added to the mean of the squares; None is the type's ``torch.finfo(...).eps``.
        output: for the norm; allocated where it is None.
        residual_out: for sum and residual; allocated where it is None.
        launch_with_pdl: whether the kernel may start by programmatic dependent launch.
        strategy: one shot, two shots, or what is chosen by size.
        weight_bias: added to `gamma`.

    Returns:
        The norm and the sum with the residual, both ``[T, H]``.

    Raises:
        As `comm_core.allreduce_fusion`.
    """
    if residual_out is None:
        residual_out = torch.empty_like(residual_in)
    norm = allreduce_fusion(
        input,
        _check_workspace(workspace),
        _CODE.kARResidualRMSNorm,
        launch_with_pdl=launch_with_pdl,
        residual_in=residual_in,
        rms_gamma=gamma,
        rms_eps=_eps(input, epsilon),
        norm_out=output,
        residual_out=residual_out,
        use_oneshot=use_oneshot(strategy),
        weight_bias=weight_bias,
    )
    return norm, residual_out


def trtllm_mnnvl_fused_allreduce_add_rmsnorm_quant(
    input: torch.Tensor,
    residual_in: torch.Tensor,
    gamma: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    epsilon: float | None = None,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    output_scale: torch.Tensor | float | None = None,
    layout_code: QuantizationSFLayout | int = QuantizationSFLayout.SWIZZLED_128x4,
    quant_type: MNNVLQuantType | int = MNNVLQuantType.NONE,
    launch_with_pdl: bool = False,
    strategy: MNNVLAllreduceFusionStrategy = _AUTO,
    weight_bias: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """Return the quantized norm of sum and residual, its scales, sum and residual, and the norm. Collective.

    Args:
        input: this rank's contribution, ``[T, H]``.
        residual_in: added to the sum, ``[T, H]``, equal on all ranks.
        gamma: weight of the norm, ``[H]``.
        workspace: of this package.
        epsilon: added to the mean of the squares; None is the type's ``torch.finfo(...).eps``.
        output: for the norm; not written where it is None.
        residual_out: for sum and residual; allocated where it is None.
        quant_out: float8_e4m3fn ``[T, H]``, or for NVFP4 uint8 ``[T, H / 2]``; allocated where it is None.
        scale_out: float32 ``[T, 1]`` for dynamic FP8, those of `layout_code` for NVFP4; allocated where it is None.
        output_scale: of FP8 and NVFP4: a number, or one float32 element on the device; None is 1.
        layout_code: of NVFP4 scales.
        quant_type: FP8, NVFP4 or DYNAMIC_FP8.
        launch_with_pdl: whether the kernel may start by programmatic dependent launch.
        strategy: one shot, two shots, or what is chosen by size.
        weight_bias: added to `gamma`.

    Returns:
        ``quant_out``, ``scale_out`` (None for FP8), ``residual_out`` and ``output`` (None unless given).

    Raises:
        ArgumentValueError: `quant_type` is none of the three.
        As `comm_core.allreduce_fusion`.
    """
    try:
        kind = MNNVLQuantType(quant_type)
    except ValueError:
        kind = MNNVLQuantType.NONE
    if kind is MNNVLQuantType.NONE:
        raise ArgumentValueError(
            f"quant_type must be FP8 (1), NVFP4 (2) or DYNAMIC_FP8 (3), got {quant_type!r}; without quantization it "
            "is trtllm_mnnvl_fused_allreduce_add_rmsnorm"
        )
    given: dict[str, Any] = {"norm_out": output, "quant_out": quant_out}
    rows, hidden = (int(input.shape[0]), int(input.shape[-1])) if input.ndim == 2 else (1, 1)
    if residual_out is None:
        residual_out = torch.empty_like(residual_in)
    if kind is MNNVLQuantType.DYNAMIC_FP8:
        pattern = _CODE.kARResidualRMSNormDynamicFP8Quant
        if quant_out is None:
            given["quant_out"] = torch.empty_like(input, dtype=torch.float8_e4m3fn)
        if scale_out is None:
            scale_out = torch.empty((rows, 1), dtype=torch.float32, device=input.device)
        given["scale_out"] = scale_out
    else:
        given["scale_factor"] = 1.0 if output_scale is None else output_scale
        pattern = _CODE.kARResidualRMSNormFP8Quant
        if kind is MNNVLQuantType.NVFP4:
            pattern = _CODE.kARResidualRMSNormFP4Quant
            if scale_out is None:
                size = scale_size(rows, hidden // NVFP4_BLOCK, QuantizationSFLayout(layout_code))
                linear = QuantizationSFLayout(layout_code) is QuantizationSFLayout.LINEAR
                shape = (rows, hidden // NVFP4_BLOCK) if linear else (size,)
                scale_out = torch.empty(shape, dtype=torch.float8_e4m3fn, device=input.device)
            given |= {"scale_out": scale_out, "layout_code": layout_code}
    quantized = allreduce_fusion(
        input,
        _check_workspace(workspace),
        pattern,
        launch_with_pdl=launch_with_pdl,
        residual_in=residual_in,
        rms_gamma=gamma,
        rms_eps=_eps(input, epsilon),
        residual_out=residual_out,
        use_oneshot=use_oneshot(strategy),
        weight_bias=weight_bias,
        **given,
    )
    return quantized, None if kind is MNNVLQuantType.FP8 else scale_out, residual_out, output


def trtllm_mnnvl_fused_allreduce_rmsnorm(
    prenorm_output: torch.Tensor,
    normed_output: torch.Tensor,
    shard_input: torch.Tensor,
    workspace: MNNVLAllReduceFusionWorkspace,
    gamma: torch.Tensor,
    epsilon: float,
    residual: torch.Tensor,
    launch_with_pdl: bool = False,
) -> None:
    """Write the norm of sum and residual, and their sum, in two shots. Collective; deprecated.

    Args:
        prenorm_output: for sum and residual, ``[T, H]``.
        normed_output: for the norm, ``[T, H]``.
        shard_input: this rank's contribution, ``[T, H]``.
        workspace: of this package. The pointers that stood here are refused: nobody can tell whose memory they are.
        gamma: weight of the norm, ``[H]``.
        epsilon: added to the mean of the squares.
        residual: added to the sum, ``[T, H]``.
        launch_with_pdl: whether the kernel may start by programmatic dependent launch.

    Raises:
        As `trtllm_mnnvl_fused_allreduce_add_rmsnorm`.
    """
    warnings.warn(
        "trtllm_mnnvl_fused_allreduce_rmsnorm is deprecated: use trtllm_mnnvl_fused_allreduce_add_rmsnorm",
        DeprecationWarning,
        stacklevel=2,
    )
    trtllm_mnnvl_fused_allreduce_add_rmsnorm(
        shard_input,
        residual,
        gamma,
        workspace,
        epsilon,
        normed_output,
        prenorm_output,
        launch_with_pdl,
        MNNVLAllreduceFusionStrategy.TWOSHOT,
    )


def trtllm_mnnvl_all_reduce(
    inp: torch.Tensor,
    multicast_buffer_ptr: object = None,
    buffer_ptrs_dev: object = None,
    buffer_M: int = 0,
    buffer_flags_mnnvl: object = None,
    nranks: int = 0,
    rank: int = -1,
    wait_for_results: bool = True,
    launch_with_pdl: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add up `inp` over the ranks. Collective; deprecated.

    The pointers of the older interface say nothing about size, order of ranks or who else uses the memory, so calls
    take a workspace in the first one's place: ``multicast_buffer_ptr=workspace``.

    Args:
        inp: this rank's contribution, ``[T, H]``.
        multicast_buffer_ptr: a workspace of this package.
        buffer_ptrs_dev: not looked at.
        buffer_M: not looked at.
        buffer_flags_mnnvl: not looked at.
        nranks: ranks of the workspace, or 0.
        rank: this rank, or -1.
        wait_for_results: must be True: a sum that nobody waits for can't be had.
        launch_with_pdl: whether the kernel may start by programmatic dependent launch.
        out: for the sum; allocated where it is None.

    Raises:
        ArgumentValueError: `nranks` or `rank` are not the workspace's.
        UnsupportedError: pointers instead of a workspace, or `wait_for_results` is False; the text says what to call.
    """
    warnings.warn(
        "trtllm_mnnvl_all_reduce is deprecated: use trtllm_mnnvl_allreduce", DeprecationWarning, stacklevel=2
    )
    workspace = multicast_buffer_ptr
    if not isinstance(workspace, MNNVLAllReduceFusionWorkspace):
        raise UnsupportedError(
            "trtllm_mnnvl_all_reduce: raw pointers are not taken, since nothing tells whose memory they are; make an "
            "MNNVLAllReduceFusionWorkspace and call trtllm_mnnvl_allreduce(input, workspace), or pass the workspace "
            "as multicast_buffer_ptr"
        )
    if not wait_for_results:
        raise UnsupportedError("trtllm_mnnvl_all_reduce: wait_for_results must be True; there is no separate wait")
    for name, value, own in (("nranks", nranks or None, workspace.world_size), ("rank", rank, workspace.rank)):
        if value not in (None, -1, own):
            raise ArgumentValueError(f"{name} must be {own}, the workspace's, got {value}")
    return trtllm_mnnvl_allreduce(inp, workspace, launch_with_pdl, out)
