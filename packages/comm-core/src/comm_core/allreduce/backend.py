"""The interface of an all-reduce backend: what a plugin implements to serve `allreduce_fusion`.

A backend is decided on like a transport (`probe`, `assess`), and opened for a group it is a workspace
(`comm_core.allreduce.workspace.AllReduceFusionWorkspace`), which is handed calls whose arguments were found good.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comm_core._json import JsonObject
from comm_core.allreduce.patterns import AllReduceFusionPattern, QuantizationSFLayout
from comm_core.transport.interface import Candidate, Request

if TYPE_CHECKING:
    import torch

    from comm_core.allreduce.workspace import AllReduceFusionWorkspace
    from comm_core.consensus import Transaction

__all__ = ["AllReduceBackend", "FusionCall", "MoEFinalize", "MoEReduction"]


@dataclass(frozen=True)
class MoEReduction:
    """The operands of `kMoEReductionARResidualRMSNorm`: what this rank's experts computed for every token.

    Attributes:
        num_experts: experts of this rank, E.
        scales: ``[E, T]`` float32, the weight of each expert for each token.
        expert_outputs: ``[E * T, H]``, expert by expert.
        token_input: ``[T, H]``, added to the experts' weighted sum.
    """

    num_experts: int
    scales: torch.Tensor
    expert_outputs: torch.Tensor
    token_input: torch.Tensor


@dataclass(frozen=True)
class MoEFinalize:
    """The operands of the finalize patterns; the call's `input` holds the permuted rows of this rank's experts.

    Attributes:
        rows: ``[T, K]`` int32: row of `input` of each token's slot, -1 where another rank has it.
        scales: ``[T, K]`` of the input's dtype or float32: weight of each slot; None is 1.
        shared_expert_output: ``[T, H]``, added once a rank, or None.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    shared_expert_output: torch.Tensor | None


@dataclass(frozen=True)
class FusionCall:
    """One call whose arguments were found good on this rank; outputs that the pattern returns are there.

    ``T`` tokens of ``H`` elements, ``[T, H]`` contiguous and of `dtype` unless said otherwise. An output may be the
    very same tensor as an input (`norm_out` as `input`, `residual_out` as `residual_in`); other overlaps are refused.

    Attributes:
        pattern: what to compute.
        tokens: T.
        hidden: H.
        input: this rank's contribution; with `finalize` ``[rows, H]``.
        output: the sum, where the pattern has it.
        residual_in: what is added to the sum, equal on all ranks.
        residual_out: sum and residual, or None where nobody wants it.
        norm_out: the norm, where the pattern has it.
        quant_out: the quantized norm, where the pattern has it.
        scale_out: its scales, where the pattern has them.
        rms_gamma: ``[H]``.
        rms_eps: added to the mean of the squares.
        weight_bias: added to `rms_gamma` in float32; 1.0 is Gemma's norm.
        scale_factor: one float32 element on the device (read when the call runs, so a captured graph follows it), or
            a float; None where the pattern has none.
        layout: of NVFP4 scales.
        group_size: elements that share a scale, in the grouped FP8 patterns; else 0.
        use_oneshot: True and False ask for one-shot and two-shot, None is the backend's choice.
        launch_with_pdl: whether kernels may start by programmatic dependent launch.
        trigger_completion_at_end: whether dependents start when the call is complete, or may start earlier.
        reduction: operands of the MoE reduction, in its pattern.
        finalize: operands of the MoE finalize, in its patterns.
    """

    pattern: AllReduceFusionPattern
    tokens: int
    hidden: int
    input: torch.Tensor
    output: torch.Tensor | None = None
    residual_in: torch.Tensor | None = None
    residual_out: torch.Tensor | None = None
    norm_out: torch.Tensor | None = None
    quant_out: torch.Tensor | None = None
    scale_out: torch.Tensor | None = None
    rms_gamma: torch.Tensor | None = None
    rms_eps: float = 1e-6
    weight_bias: float = 0.0
    scale_factor: torch.Tensor | float | None = None
    layout: QuantizationSFLayout = QuantizationSFLayout.SWIZZLED_128x4
    group_size: int = 0
    use_oneshot: bool | None = None
    launch_with_pdl: bool = False
    trigger_completion_at_end: bool = True
    reduction: MoEReduction | None = None
    finalize: MoEFinalize | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Element type of what is reduced."""
        return self.input.dtype

    @property
    def geometry(self) -> JsonObject:
        """Everything that must be equal on all ranks, for the checked mode."""
        # Imported here: it imports torch, and plugins that describe a backend must be cheap to import.
        from comm_core._dtypes import dtype_name

        return {
            "pattern": self.pattern.name,
            "tokens": self.tokens,
            "hidden_dim": self.hidden,
            "dtype": dtype_name(self.dtype),
            "rms_eps": self.rms_eps,
            "weight_bias": self.weight_bias,
            "layout_code": int(self.layout),
            "block_quant_group_size": self.group_size,
            "use_oneshot": self.use_oneshot,
        }


class AllReduceBackend(Candidate):
    """Describes an all-reduce backend and opens it for a group. Stateless and cheap to import.

    What it says of itself, `probe` and `assess` are those of a `Candidate`. Its `name` is what users pass as
    ``backend=`` and what the workspaces that it opens have as theirs.

    Class attributes:
        static_options: names of the keyword-only arguments of `create_allreduce_fusion_workspace` that it takes.
            They fix at compile time what a workspace computes; an option that the backend does not list is refused.
    """

    static_options: frozenset[str] = frozenset()

    @abstractmethod
    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> AllReduceFusionWorkspace:
        """Open for a group. Collective and staged, as `comm_core.transport.interface.Transport.open` is.

        Args:
            stages: the transaction around the whole opening; ``stages.group`` is the group, and the workspace keeps
                ``stages.teardown`` for its `destroy` where there is something to take down.
            request: what the ranks asked for. ``request.dtype`` is the element type, ``request.options`` has
                ``max_token_num``, ``hidden_dim``, ``gpus_per_node``, ``force_oneshot_support`` and the backend's
                `static_options`.
            plan: the plan of the verdict that admitted this backend.
            device: this rank's device.
        """
