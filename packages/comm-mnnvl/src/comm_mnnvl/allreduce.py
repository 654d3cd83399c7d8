"""The all-reduce backend ``"mnnvl"``: Lamport kernels over memory that NVLink reaches, on one host or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from comm_core._json import JsonObject
from comm_core.allreduce.kernel_backend import WindowAllReduce
from comm_core.allreduce.module import reduce_module
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request, Verdict
from comm_mnnvl._version import __version__
from comm_mnnvl.handles import FORMS, try_fabric

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_mnnvl.allreduce_workspace import MNNVLAllReduceFusionWorkspace

__all__ = ["ALLREDUCE", "MnnvlAllReduce"]

ALLREDUCE = reduce_module("comm_mnnvl")
"""Twin: csrc/allreduce.cu."""


class MnnvlAllReduce(WindowAllReduce):
    """All-reduce and what follows it over NVLink, in memory that survives a checkpoint of its processes."""

    name = "mnnvl"
    version = __version__
    wire = 1
    priority = 90
    experimental = True
    module = ALLREDUCE

    def admit(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `WindowAllReduce.admit`; the plan says which handles are passed."""
        verdict = predicates.assess_mnnvl(facts, allow_shared_gpu=request.allow_shared_gpu)
        if not verdict.eligible:
            return verdict
        handle = str((verdict.plan or {})["handle"])
        wanted = request.environment.get("COMM_PEER_MEMORY", AUTO)
        if wanted not in (AUTO, FORMS[handle]):
            return Verdict(
                False,
                f"COMM_PEER_MEMORY={wanted} asks for memory of another kind than this backend's ({FORMS[handle]}): "
                "unset it",
            )
        return verdict

    def form(self, request: Request, plan: JsonObject) -> str:
        """See `WindowAllReduce.form`."""
        return FORMS[str(plan["handle"])]

    def prepare(self, stages: Transaction, plan: JsonObject, device: torch.device) -> None:
        """See `WindowAllReduce.prepare`: whether handles of the fabric really can be imported."""
        if plan["handle"] == "fabric":
            try_fabric(stages, device)

    def workspace(self) -> type[MNNVLAllReduceFusionWorkspace]:
        """See `WindowAllReduce.workspace`."""
        from comm_mnnvl.allreduce_workspace import MNNVLAllReduceFusionWorkspace

        return MNNVLAllReduceFusionWorkspace
