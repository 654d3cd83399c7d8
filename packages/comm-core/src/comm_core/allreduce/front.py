"""The front: creates workspaces through the decision protocol, and hands checked calls to them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from comm_core import _cuda
from comm_core._dtypes import dtype_name
from comm_core.allreduce.arguments import prepare
from comm_core.allreduce.backend import FusionCall
from comm_core.allreduce.creation import Arguments, members_of
from comm_core.allreduce.known import Given
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, QuantizationSFLayout
from comm_core.allreduce.workspace import AllReduceFusionWorkspace
from comm_core.consensus import Transaction
from comm_core.errors import AllReduceBackendError, ArgumentTypeError, PluginError
from comm_core.group import Group
from comm_core.plugins.discovery import registry
from comm_core.selection import Asked, Decision, resolve
from comm_core.selection.family import ALLREDUCE
from comm_core.transport.opening import open_first

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from comm_core.comm_backend import CommBackend

__all__ = ["allreduce_fusion", "create_allreduce_fusion_workspace"]

_WHAT = "create_allreduce_fusion_workspace"
_new_tuple = cast("Any", tuple).__new__
"""Makes a named tuple without the function in between, which takes longer than making it."""


def create_allreduce_fusion_workspace(
    backend: str = "auto",
    world_size: int | None = None,
    rank: int | None = None,
    max_token_num: int | None = None,
    hidden_dim: int | None = None,
    dtype: torch.dtype | None = None,
    gpus_per_node: int | None = None,
    comm_backend: CommBackend | None = None,
    force_oneshot_support: bool = False,
    group: ProcessGroup | Group | None = None,
    *,
    top_k: int | None = None,
    rms_eps: float | None = None,
    weight_bias: float | None = None,
    routed_scaling_factor: float | None = None,
    include_shared_expert: bool | None = None,
    add_residual: bool | None = None,
    write_residual_output: bool | None = None,
    apply_rms_norm: bool | None = None,
    output_dtype: torch.dtype | None = None,
    dynamic_fp8: bool | None = None,
    write_norm_output: bool | None = None,
    config: object = None,
    device: torch.device | str | int | None = None,
) -> AllReduceFusionWorkspace:
    """Decide on an all-reduce backend and open it for a group. Collective.

    All arguments but `rank`, `comm_backend`, `group` and `device` are equal on all ranks. The backend is decided on
    before anything is allocated or compiled; ``"auto"`` falls back together where opening fails.

    Args:
        backend: ``"auto"``, or the name of a backend, which is then used or refused on every rank: ``"dist"`` is
            built in, others come with plugins.
        world_size: ranks of the group; None is what the group has. Another number is refused.
        rank: this process's rank within the group; None is what the group says. Another number is refused.
        max_token_num: rows that a call may reduce.
        hidden_dim: elements of a row; together they give the capacity ``max_token_num * hidden_dim`` in elements of
            `dtype`, and calls may have any shape that fits.
        dtype: element type: float16, bfloat16 or float32.
        gpus_per_node: GPUs a host, for backends that span hosts; None is found out.
        comm_backend: control plane to use instead of a process group (`comm_core.CommBackend`); with `group` it must
            have the same ranks.
        force_oneshot_support: whether the capacity must hold for one-shot, which needs more memory in some backends.
        group: process group of the ranks (or a `comm_core.group.Group`); None is `comm_backend`'s, else WORLD.
        top_k: fixed at compile time; refused by every backend that does not list it, as the next ones.
        rms_eps: as `top_k`.
        weight_bias: as `top_k`.
        routed_scaling_factor: as `top_k`.
        include_shared_expert: as `top_k`.
        add_residual: as `top_k`.
        write_residual_output: as `top_k`.
        apply_rms_norm: as `top_k`.
        output_dtype: as `top_k`.
        dynamic_fp8: as `top_k`.
        write_norm_output: as `top_k`.
        config: as `top_k`.
        device: this rank's device. None is the current CUDA device where the group has NCCL or CUDA is initialized in
            this process, else the CPU. An int is a CUDA ordinal.

    Returns:
        The workspace; ``workspace.backend`` names what was chosen, ``workspace.decision`` says why. Its owner calls
        `destroy`.

    Raises:
        ArgumentTypeError: `group` or `comm_backend` is none (on this rank alone; the rest is raised on every rank).
        JointValueError: a rank's arguments are invalid, or the ranks' arguments, environment or plugins don't fit.
            With one rank, the argument's own error.
        AllReduceBackendError: the backend that was asked for can't be used; the text says on which ranks it is
            missing, and what to install.
        GroupTimeoutError: a rank is missing.
    """
    members = members_of(group, comm_backend)
    arguments = Arguments(
        members,
        backend=backend,
        world_size=world_size,
        rank=rank,
        max_token_num=max_token_num,
        hidden_dim=hidden_dim,
        dtype=dtype,
        gpus_per_node=gpus_per_node,
        comm_backend=comm_backend,
        force_oneshot_support=force_oneshot_support,
        device=device,
        static_options={
            "top_k": top_k,
            "rms_eps": rms_eps,
            "weight_bias": weight_bias,
            "routed_scaling_factor": routed_scaling_factor,
            "include_shared_expert": include_shared_expert,
            "add_residual": add_residual,
            "write_residual_output": write_residual_output,
            "apply_rms_norm": apply_rms_norm,
            "output_dtype": output_dtype,
            "dynamic_fp8": dynamic_fp8,
            "write_norm_output": write_norm_output,
            "config": config,
        },
    )
    if members.size == 1:
        arguments.raise_first()
    asked = Asked(
        _WHAT,
        backend,
        arguments.device,
        dtype_name(arguments.dtype),
        arguments.dtype.itemsize,
        arguments.max_bytes,
        arguments.options,
        tuple(map(str, arguments.errors)),
        ALLREDUCE,
    )
    resolved = resolve(members, asked)
    # The ranks agreed on one device type, so every rank has a device.
    assert arguments.device is not None
    opened, decision, reason = open_first(resolved, partial(_open, members, arguments.device), AllReduceBackendError)
    opened.bind(members, decision, reason)
    return opened


def _open(group: Group, device: torch.device, decision: Decision) -> AllReduceFusionWorkspace:
    """Open one backend. It fails on all ranks or on none, however its `open` fails on this one."""
    name = decision.backend
    # The caller's current device may be another one: a stream or a kernel of it would be the wrong one.
    with _cuda.device_guard(device), Transaction(group, f"open all-reduce backend {name!r}") as stages:
        # In a step, because a plugin can have been unregistered on this rank alone since the decision.
        backend = stages.step("find", lambda: registry().allreduce_backend(name))
        workspace = backend.open(stages, decision.request, decision.plan, device)
        stages.step("ready", lambda: _ready(name, workspace))
        stages.commit()
    return workspace


def _ready(name: str, opened: object) -> None:
    if not isinstance(opened, AllReduceFusionWorkspace):
        raise PluginError(
            f"all-reduce backend {name!r}: open must return an AllReduceFusionWorkspace, got {type(opened).__name__}"
        )


def allreduce_fusion(
    input: torch.Tensor,
    workspace: AllReduceFusionWorkspace,
    pattern: AllReduceFusionPattern | int,
    launch_with_pdl: bool = False,
    trigger_completion_at_end: bool = True,
    output: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
    norm_out: torch.Tensor | None = None,
    quant_out: torch.Tensor | None = None,
    scale_out: torch.Tensor | None = None,
    residual_in: torch.Tensor | None = None,
    rms_gamma: torch.Tensor | None = None,
    rms_eps: float = 1e-6,
    scale_factor: torch.Tensor | float | None = None,
    layout_code: QuantizationSFLayout | int | None = None,
    use_oneshot: bool | None = None,
    fp32_acc: bool = False,
    moe_reduction_device_num_experts: int | None = None,
    moe_reduction_scale_input: torch.Tensor | None = None,
    moe_reduction_active_experts_token_input: torch.Tensor | None = None,
    moe_reduction_token_input: torch.Tensor | None = None,
    expanded_idx_to_permuted_idx: torch.Tensor | None = None,
    expert_scale_factor: torch.Tensor | None = None,
    shared_expert_output: torch.Tensor | None = None,
    block_quant_group_size: int | None = None,
    weight_bias: float | None = 0.0,
    *,
    moe_finalize_backend: str = "trtllm",
) -> torch.Tensor:
    """Add up `input` over the ranks and compute what follows the sum in `pattern`. Collective.

    T tokens of H elements; tensors are contiguous ``[T, H]`` on the workspace's device and of the input's dtype
    unless said otherwise. The sum is in float32, in rank order, and rounded once, so all ranks have the same bits;
    with equal `residual_in` on all ranks so are all outputs. An output may be exactly the tensor `input` or
    `residual_in`. It runs on the current stream and is not differentiable.

    Args:
        input: this rank's contribution; ``[rows, H]`` in the finalize patterns, unused in the MoE reduction.
        workspace: of `create_allreduce_fusion_workspace`; decides on the backend.
        pattern: an `AllReduceFusionPattern`, or its number.
        launch_with_pdl: whether kernels may use programmatic dependent launch; backends without kernels take no
            notice.
        trigger_completion_at_end: False lets a dependent launch start before the call is complete; it must then wait
            for it itself. Taken notice of with `launch_with_pdl` alone.
        output: the sum.
        residual_out: sum and residual.
        norm_out: the norm.
        quant_out: the quantized norm: float8_e4m3fn ``[T, H]``, or for NVFP4 uint8 ``[T, H / 2]``.
        scale_out: its scales: float32 ``[T, 1]`` (dynamic), int32 of `packed_scale_shape` and strides (grouped), or
            the bytes of `layout_code` in any element type (NVFP4).
        residual_in: added to the sum; equal on all ranks.
        rms_gamma: weight of the norm, ``[H]``.
        rms_eps: added to the mean of the squares.
        scale_factor: of FP8 and NVFP4: one float32 element on the device, which a captured graph reads again, or a
            number.
        layout_code: of NVFP4 scales; None is ``SWIZZLED_128x4``.
        use_oneshot: one-shot or two-shot; None is the backend's choice. The bits are the same.
        fp32_acc: accepted; the accumulation is float32 either way.
        moe_reduction_device_num_experts: experts of this rank, E.
        moe_reduction_scale_input: float32 ``[E, T]``.
        moe_reduction_active_experts_token_input: ``[E * T, H]`` or ``[E, T, H]``.
        moe_reduction_token_input: ``[T, H]``.
        expanded_idx_to_permuted_idx: int32 ``[T, top_k]``: rows of `input`, -1 for none.
        expert_scale_factor: ``[T, top_k]``, of the input's dtype or float32.
        shared_expert_output: ``[T, H]``.
        block_quant_group_size: elements that share a scale in the grouped FP8 patterns; divides H.
        weight_bias: added to `rms_gamma`: 0.0 or None is the usual norm, 1.0 Gemma's.
        moe_finalize_backend: ``"trtllm"`` is the backend's own finalize; no package has another.

    Returns:
        `quant_out` of patterns that quantize, else `norm_out` of patterns with a norm, else `output`; allocated where
        it was not given. Patterns that quantize only where `quant_out` is given return `norm_out`.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: an argument is missing, can't be used, does not fit the others or the workspace. Both are
            raised before anything is sent or launched and name the argument; with ``COMM_CHECK=1`` every rank raises.
        UnsupportedError: the workspace's backend does not compute the pattern, or a second thread is in a call.
        ClosedError: the workspace was destroyed.
        TransportError: the call failed on the way; the workspace is then broken.
    """
    short: Given = _new_tuple(Given, (
        pattern, input, residual_in, rms_gamma, output, residual_out, norm_out, quant_out, scale_out, rms_eps,
        weight_bias, scale_factor, layout_code, block_quant_group_size, use_oneshot, fp32_acc, launch_with_pdl,
        trigger_completion_at_end,
    ))  # fmt: skip
    # An abstract class asks longer than a call may take.
    if AllReduceFusionWorkspace in type(workspace).__mro__:
        if moe_finalize_backend == "trtllm":
            result = workspace.run_known(short)
            if result is not None:
                return result
    else:
        raise ArgumentTypeError(
            f"workspace must be an AllReduceFusionWorkspace (create_allreduce_fusion_workspace makes one), got "
            f"{type(workspace).__name__}"
        )

    given: dict[str, object] = short._asdict()
    given |= {
        "moe_reduction_device_num_experts": moe_reduction_device_num_experts,
        "moe_reduction_scale_input": moe_reduction_scale_input,
        "moe_reduction_active_experts_token_input": moe_reduction_active_experts_token_input,
        "moe_reduction_token_input": moe_reduction_token_input,
        "expanded_idx_to_permuted_idx": expanded_idx_to_permuted_idx,
        "expert_scale_factor": expert_scale_factor,
        "shared_expert_output": shared_expert_output,
        "moe_finalize_backend": moe_finalize_backend,
    }

    def checked() -> FusionCall:
        call = prepare(workspace.device, given)
        workspace.check_supported(call)
        return call

    call = workspace.run(checked)
    workspace.keep(short, call)
    return cast("torch.Tensor", getattr(call, PATTERNS[call.pattern].primary))
