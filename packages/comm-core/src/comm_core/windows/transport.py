"""The plain transport over windows: ``backend="windows"`` and ``backend="windows-ce"``.

It is a reference and a starting point: every plan runs as one kernel of stores (``"windows"``), or as copies of the
copy engines between two one-warp kernels (``"windows-ce"``), with no tuning by size and no overlap. Both are
experimental: ``"auto"`` takes them only with the opt-in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _env
from comm_core._json import JsonObject
from comm_core._version import __version__
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request, Transport, Verdict
from comm_core.windows.signals import MAX_RANKS

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_core.windows.session import WindowSession

__all__ = ["WindowTransport", "blocks_per_peer"]

_SIZES = tuple(range(2, MAX_RANKS + 1))
_BLOCKS = 256
"""Blocks of all ranks' kernels that share one GPU. They wait for each other, so all of them must be on the GPU at
once. Three of 256 threads fit an SM (exchange_push_kernel's launch bounds), so 256 need 86 SMs; an A100 has 108."""


def blocks_per_peer(facts: Sequence[RankFacts]) -> int:
    """Return the blocks of an exchange for each destination: a function of what the group agreed on alone.

    At least 1 for every group that the tables of the device have room for, even with all ranks on one GPU.
    """
    devices = [record.device.uuid for record in facts]
    most = max(devices.count(device) for device in devices)
    return _BLOCKS // (len(facts) * most)


class WindowTransport(Transport):
    """Plans between windows of one host, over any peer access that CUDA offers."""

    version = __version__
    wire = 1
    priority = 1
    experimental = True
    verified_on = ("several ranks on one GPU", "two GPUs with NVLink")

    def __init__(self, name: str, *, copy_engines: bool) -> None:
        self.name = name
        self._copy_engines = copy_engines

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`."""
        shared = request.allow_shared_gpu
        verdict = predicates.assess_peers(facts, sizes=_SIZES, allow_shared_gpu=shared)
        if not verdict.eligible:
            return verdict
        return verdict._replace(plan={"blocks_per_peer": blocks_per_peer(facts)})

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> WindowSession:
        """See `Transport.open`."""
        from comm_core import jit
        from comm_core.windows.launch import WINDOWS
        from comm_core.windows.session import WindowSession

        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        module = stages.step("build", lambda: jit.load(WINDOWS, device), timeout_s=seconds)
        agreed = cast("JsonObject", plan)
        form = request.environment.get("COMM_PEER_MEMORY", AUTO)
        return WindowSession(
            stages,
            module,
            device,
            form=form,
            staging_bytes=request.max_bytes,
            timeout_s=request.timeout_s,
            blocks_per_peer=cast("int", agreed["blocks_per_peer"]),
            poison=_env.on_stall() == "poison",
            copy_engines=self._copy_engines,
        )
