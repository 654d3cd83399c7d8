"""The backend that plugins instantiate: who may use the kernels over windows, with which launches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from comm_core import _cuda
from comm_core._json import JsonObject
from comm_core.allreduce.backend import AllReduceBackend
from comm_core.allreduce.launch import PER_SM, Settings
from comm_core.memory.peer import AUTO
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request, Verdict
from comm_core.windows.signals import MAX_RANKS

if TYPE_CHECKING:
    import torch

    from comm_core.allreduce.kernels import WindowAllReduceWorkspace
    from comm_core.consensus import Transaction
    from comm_core.jit.spec import ModuleSpec

__all__ = ["WindowAllReduce", "settings_of"]

_SMS = 84
"""Multiprocessors of a device that does not say how many it has: fewer than any that is used for this."""
_CLUSTERS = 9
"""Major compute capability from which on blocks form clusters."""


def settings_of(facts: Sequence[RankFacts], sms: Sequence[int]) -> Settings:
    """Return how launches are made: a function of what the group agreed on alone.

    Args:
        facts: every rank's.
        sms: multiprocessors of every rank's device, 0 where unknown.
    """
    devices = [record.device.uuid for record in facts]
    sharing = max(devices.count(device) for device in devices)
    own = min(count or _SMS for count in sms)
    # All blocks of the ranks that share a device wait for each other, so they must be on it at once; and the blocks
    # of each rank's next call may be there already, waiting for this one's end.
    blocks = PER_SM * own if sharing == 1 else max(1, PER_SM * own // (2 * sharing))
    majors = [record.device.compute_capability.split(".")[0] for record in facts]
    clusters = all(major.isdigit() and int(major) >= _CLUSTERS for major in majors)
    return Settings(blocks, clusters=clusters, shared=sharing > 1)


class WindowAllReduce(AllReduceBackend):
    """All-reduce by the kernels over windows. A plugin says whose memory, which workspace, and which module.

    Class attributes:
        module: of `comm_core.allreduce.module.reduce_module`.
    """

    module: ClassVar[ModuleSpec]

    @abstractmethod
    def admit(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """Say whether the ranks can map each other's memory. Pure. A plan is kept beside the launches' settings."""

    @abstractmethod
    def workspace(self) -> type[WindowAllReduceWorkspace]:
        """Return the class of the workspaces that it opens; imported here, since it needs torch."""

    def form(self, request: Request, plan: JsonObject) -> str:
        """Return the form of peer memory."""
        return request.environment.get("COMM_PEER_MEMORY", AUTO)

    def prepare(self, stages: Transaction, plan: JsonObject, device: torch.device) -> None:
        """Do what must come before the build, as steps of `stages`."""

    def probe(self, context: ProbeContext) -> JsonObject:
        """See `Candidate.probe`: how many multiprocessors there are."""
        if context.device_type != "cuda" or context.device_index < 0:
            return {}
        return {"sms": _cuda.device_properties(context.device_index).multiprocessors}

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Candidate.assess`."""
        if request.device_type != "cuda":
            return Verdict(False, f"its kernels need CUDA tensors, and the ranks use {request.device_type}")
        if len(facts) < 2:
            return Verdict(False, "one rank has nothing to exchange")
        if len(facts) > MAX_RANKS:
            return Verdict(False, f"{len(facts)} ranks: at most {MAX_RANKS} can exchange through windows")
        verdict = self.admit(request, facts)
        if not verdict.eligible:
            return verdict
        said = [cast("JsonObject", record.plugins.get(self.name, {})) for record in facts]
        settings = settings_of(facts, [cast("int", item.get("sms") or 0) for item in said])
        return verdict._replace(plan={**(verdict.plan or {}), "settings": settings.to_json()})

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> WindowAllReduceWorkspace:
        """See `AllReduceBackend.open`."""
        agreed = cast("JsonObject", plan)
        self.prepare(stages, agreed, device)
        return self.workspace().open_in(
            stages,
            request,
            cast("JsonObject", agreed["settings"]),
            device,
            self.module,
            self.form(request, agreed),
        )
