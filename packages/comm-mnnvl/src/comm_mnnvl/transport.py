"""The transport ``"mnnvl"``: whether a group can use it, and what it opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _env
from comm_core._json import JsonObject
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request, Transport, Verdict
from comm_core.windows.signals import MAX_RANKS
from comm_core.windows.transport import blocks_per_peer
from comm_mnnvl._version import __version__
from comm_mnnvl.handles import FORMS, try_fabric

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_mnnvl.session import MnnvlSession

__all__ = ["MnnvlTransport"]


class MnnvlTransport(Transport):
    """Plans between windows of virtual memory that NVLink reaches, on one host or between the hosts of a fabric."""

    name = "mnnvl"
    version = __version__
    wire = 1
    priority = 90
    experimental = True
    verified_on = ("several ranks on one GPU", "two GPUs with NVLink")

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`. The plan says which handles are passed, and how large launches are."""
        verdict = predicates.assess_mnnvl(facts, allow_shared_gpu=request.allow_shared_gpu)
        if not verdict.eligible:
            return verdict
        if len(facts) > MAX_RANKS:
            return Verdict(False, f"{len(facts)} ranks: at most {MAX_RANKS} can exchange through windows")
        handle = str(cast("JsonObject", verdict.plan)["handle"])
        wanted = request.environment.get("COMM_PEER_MEMORY", AUTO)
        if wanted not in (AUTO, FORMS[handle]):
            return Verdict(
                False,
                f"COMM_PEER_MEMORY={wanted} asks for memory of another kind than this transport's "
                f"({FORMS[handle]}): unset it",
            )
        plan: JsonObject = {"handle": handle, "blocks_per_peer": blocks_per_peer(facts)}
        return verdict._replace(plan=plan)

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> MnnvlSession:
        """See `Transport.open`."""
        from comm_core import jit
        from comm_core.windows.launch import WINDOWS
        from comm_mnnvl.session import MnnvlSession

        agreed = cast("JsonObject", plan)
        handle = str(agreed["handle"])
        if handle == "fabric":
            # Before a build that takes minutes, and before memory of the size that was asked for.
            try_fabric(stages, device)
        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        module = stages.step("build", lambda: jit.load(WINDOWS, device), timeout_s=seconds)
        return MnnvlSession(
            stages,
            module,
            device,
            handle=handle,
            staging_bytes=request.max_bytes,
            timeout_s=request.timeout_s,
            blocks_per_peer=cast("int", agreed["blocks_per_peer"]),
            poison=_env.on_stall() == "poison",
        )
