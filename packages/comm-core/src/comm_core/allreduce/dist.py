"""``backend="dist"``: every pattern over torch.distributed, as the reference computes it.

Each rank gathers what all ranks contribute and adds it up in rank order, in float32, so that all of them have the
same bits. It moves W times the bytes of an all-reduce and is not made for speed: it is what every group can use, on
CPU tensors too, and what the kernels of other backends are tested against.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from comm_core._json import JsonObject
from comm_core._version import __version__
from comm_core.allreduce import reference
from comm_core.allreduce.backend import AllReduceBackend, FusionCall
from comm_core.allreduce.patterns import OUTPUTS
from comm_core.allreduce.workspace import AllReduceFusionWorkspace
from comm_core.consensus import Transaction
from comm_core.errors import ArgumentValueError
from comm_core.topology.facts import RankFacts
from comm_core.transport import strided
from comm_core.transport.dist import DistSession
from comm_core.transport.interface import Request, Verdict

__all__ = ["DistAllReduce", "DistAllReduceFusionWorkspace", "required_bytes"]

_BACKENDS = ("nccl", "gloo")


def required_bytes(world_size: int, num_tokens: int, hidden_dim: int, itemsize: int) -> int:
    """Return the bytes into which the contributions of all ranks are gathered. Pure."""
    return world_size * num_tokens * hidden_dim * itemsize


class DistAllReduce(AllReduceBackend):
    """All-reduce through the group's own all-gather, by NCCL or gloo."""

    name = "dist"
    version = __version__
    wire = 1
    priority = -1
    verified_on = ("CPU processes",)

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Candidate.assess`; needs no facts."""
        if request.world_size == 1:
            return Verdict(True, "one rank has nothing to exchange")
        have = request.group_backends.get(request.device_type)
        if have in _BACKENDS:
            return Verdict(True, f"the process group has {have} for {request.device_type} tensors")
        backends = dict(request.group_backends) or "none"
        return Verdict(
            False,
            f"the process group has neither NCCL nor gloo for {request.device_type} tensors ({backends})",
        )

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> DistAllReduceFusionWorkspace:
        """See `AllReduceBackend.open`."""
        size = request.world_size
        session = None if size == 1 else DistSession(stages.group, device)
        tokens, hidden = (cast("int", request.options[name]) for name in ("max_token_num", "hidden_dim"))
        nbytes = required_bytes(size, tokens, hidden, request.itemsize)
        gathered = stages.step(
            "allocate", lambda: torch.empty(nbytes, dtype=torch.uint8, device=device), lambda _: None
        )
        return DistAllReduceFusionWorkspace(
            size, stages.group.rank, session, gathered, getattr(torch, request.dtype), device
        )


class DistAllReduceFusionWorkspace(AllReduceFusionWorkspace):
    """A workspace over torch.distributed; `create_allreduce_fusion_workspace` makes it.

    Args:
        world_size: ranks of the group.
        rank: this rank.
        session: gathers; None with one rank.
        gathered: flat uint8 buffer for the contributions of all ranks.
        dtype: element type that it was made for; calls may use another one whose bytes fit.
        device: of the tensors.
    """

    def __init__(
        self,
        world_size: int,
        rank: int,
        session: DistSession | None,
        gathered: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(world_size, rank, dtype=dtype, device=device, buffer_bytes=gathered.numel())
        self._session = session
        self._gathered: torch.Tensor | None = gathered

    @property
    def backend(self) -> str:
        """See `AllReduceFusionWorkspace.backend`."""
        return DistAllReduce.name

    def required_bytes(
        self, num_tokens: int, hidden_dim: int, dtype: torch.dtype, use_oneshot: bool | None = None
    ) -> int:
        """See `AllReduceFusionWorkspace.required_bytes`; one- and two-shot are the same here."""
        return required_bytes(self.world_size, num_tokens, hidden_dim, dtype.itemsize)

    def check_call(self, call: FusionCall) -> None:
        """See `AllReduceFusionWorkspace.check_call`: the rows that a finalize names must exist."""
        if call.finalize is None:
            return
        rows, number = call.finalize.rows, int(call.input.shape[0])
        bad = (rows < -1) | (rows >= number)
        if bool(bad.any()):
            where = [int(index) for index in bad.nonzero()[0]]
            raise ArgumentValueError(
                f"expanded_idx_to_permuted_idx{where} is {int(rows[tuple(where)])}: expected -1 or a row of input, "
                f"which has {number}"
            )

    def _run(self, call: FusionCall) -> None:
        """See `AllReduceFusionWorkspace._run`."""
        assert self._gathered is not None
        contribution = _contribution(call)
        nbytes = self.required_bytes(call.tokens, call.hidden, call.dtype)
        gathered = self._gathered[:nbytes].view(call.dtype).view(self.world_size, call.tokens, call.hidden)
        if self._session is None:
            gathered[0].copy_(contribution)
        else:
            self._session.all_gather("allreduce_fusion", contribution, gathered)
        fused = reference.fuse(
            call.pattern,
            reference.reduce_in_rank_order(list(gathered)),
            call.dtype,
            residual_in=call.residual_in,
            rms_gamma=call.rms_gamma,
            rms_eps=call.rms_eps,
            weight_bias=call.weight_bias,
            scale_factor=call.scale_factor,
            layout_code=call.layout,
            block_quant_group_size=call.group_size or None,
            wanted=[name for name in OUTPUTS if getattr(call, name) is not None],
        )
        # All inputs have been read, so outputs may be the same tensors.
        for name in OUTPUTS:
            wanted, made = getattr(call, name), getattr(fused, name)
            if wanted is not None:
                _store(wanted, made)

    def _destroy(self, timeout_s: float | None) -> None:
        self._gathered = None
        self._session = None


def _contribution(call: FusionCall) -> torch.Tensor:
    """Return what this rank adds to the sum: contiguous ``[T, H]``."""
    if call.reduction is not None:
        experts = call.reduction
        return reference.moe_reduce(experts.expert_outputs, experts.scales, experts.token_input, experts.num_experts)
    if call.finalize is not None:
        slots = call.finalize
        return reference.moe_finalize(call.input, slots.rows, slots.scales, slots.shared_expert_output)
    return call.input


def _store(out: torch.Tensor, made: torch.Tensor) -> None:
    """Copy what the reference made into an output, which may have another type of elements for the same bytes."""
    if out.dtype == made.dtype and out.shape == made.shape:
        out.copy_(made)
        return
    nbytes = made.numel() * made.element_size()
    strided.byte_view(out, 0, nbytes).copy_(strided.byte_view(made.contiguous(), 0, nbytes))
