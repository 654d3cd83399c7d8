"""The transport ``"pcie"``: whether a group can use it, and what it opens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _env
from comm_core._json import JsonObject
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request, Transport, TransportSession, Verdict
from comm_core.windows.transport import blocks_per_peer
from comm_pcie import routes
from comm_pcie._version import __version__
from comm_pcie.hints import hints, read_hints
from comm_pcie.warnings import ExperimentalWarning, RouteWarning, warn_once

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction

__all__ = ["PcieTransport"]


class PcieTransport(Transport):
    """GPUs of one host with peer access of every ordered pair, over PCIe or any other link."""

    name = "pcie"
    version = __version__
    wire = 1
    priority = 10
    experimental = True

    def probe(self, context: ProbeContext) -> JsonObject:
        """See `Transport.probe`: what sysfs says about ACS and the IOMMU, which decides nothing."""
        device = context.facts.device
        if device.kind != "cuda":
            return {}
        return cast("JsonObject", read_hints(device.pci_bus_id, device.pcie_path))

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`.

        The plan is the JSON form of a `UlyssesPciePlan`, with the PCIe profile, the launch and the devices beside it.
        """
        requested = request.environment.get(routes.VARIABLE) or "auto"
        route = routes.route_of(requested)
        verdict = predicates.assess_pcie(facts, allow_shared_gpu=request.allow_shared_gpu)
        if not verdict.eligible:
            # Full peer access is needed on every route, so it is told first.
            return verdict
        if route.transport is None:
            return Verdict(False, route.reason)
        ordered = sorted(facts, key=lambda record: record.rank)
        profile = routes.profile(ordered)
        plan: JsonObject = {
            **(verdict.plan or {}),
            "requested_route": requested,
            "transport": route.transport,
            "profile": profile,
            "blocks_per_peer": blocks_per_peer(ordered),
            "devices": [record.device.uuid for record in ordered],
            "hints": list[str](hints(ordered, self.name)),
        }
        note = f" ({requested}: {route.reason})" if route.reason else ""
        return Verdict(True, f"{verdict.reason}, {profile}{note}", plan)

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> TransportSession:
        """See `Transport.open`."""
        from comm_core import jit
        from comm_core.windows.launch import WINDOWS
        from comm_pcie.exchange import EXCHANGE
        from comm_pcie.selftest import SELFTEST, check_links
        from comm_pcie.session import PcieSession

        agreed = cast("JsonObject", plan)
        # In a step, because where warnings are errors they are those of one rank.
        stages.step("warn", lambda: _warn(str(agreed["requested_route"])))
        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        windows, module, tester = stages.step(
            "build", lambda: [jit.load(spec, device) for spec in (WINDOWS, EXCHANGE, SELFTEST)], timeout_s=seconds
        )
        check_links(
            stages,
            tester.artifact.path,
            cast("Sequence[str]", agreed["devices"]),
            hints=cast("Sequence[str]", agreed["hints"]),
            timeout_s=request.timeout_s,
        )
        return PcieSession(
            stages,
            windows,
            module,
            device,
            form=request.environment.get("COMM_PEER_MEMORY", AUTO),
            timeout_s=request.timeout_s,
            blocks_per_peer=cast("int", agreed["blocks_per_peer"]),
            poison=_env.on_stall() == "poison",
        )


def _warn(requested: str) -> None:
    warn_once(
        "backend 'pcie' is experimental: it has been run on few machines. It tests every link before it is used",
        ExperimentalWarning,
    )
    route = routes.route_of(requested)
    if route.reason:
        warn_once(f"{routes.VARIABLE}={requested}: using route {route.transport!r}: {route.reason}", RouteWarning)
