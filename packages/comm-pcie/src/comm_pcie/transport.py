"""The transport ``"pcie"``: whether a group can use it, and what it opens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

from comm_core import _env
from comm_core._json import JsonObject
from comm_core.consensus import Transaction
from comm_core.errors import JointError
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request, Transport, TransportSession, Verdict
from comm_core.windows.transport import blocks_per_peer
from comm_pcie import routes
from comm_pcie._version import __version__
from comm_pcie.hints import hints, read_hints
from comm_pcie.rdma.planning import plan_nics
from comm_pcie.rdma.probe import probe_rdma
from comm_pcie.warnings import ExperimentalWarning, RouteWarning, warn_once

if TYPE_CHECKING:
    import torch

    from comm_core.group import Group
    from comm_core.jit import Module
    from comm_pcie.rdma.engine import LoadedVerbs, VerbsApi
    from comm_pcie.rdma.port import DevicePort

__all__ = ["Modules", "PcieTransport", "nic_lines"]


class PcieTransport(Transport):
    """GPUs of one host with peer access of every ordered pair, over PCIe or any other link."""

    name = "pcie"
    version = __version__
    wire = 2
    priority = 10
    # The peer-to-peer route; those over NICs say of themselves that only an emulator has been seen.
    verified_on = ("several ranks on one GPU", "two GPUs with NVLink")
    experimental = True

    def probe(self, context: ProbeContext) -> JsonObject:
        """See `Transport.probe`: what sysfs says about ACS and the IOMMU, which decides nothing, and the NICs."""
        device = context.facts.device
        if device.kind != "cuda":
            return {}
        rdma = probe_rdma()
        own = plan_nics([context.facts], [rdma]).choices[0]
        nic: JsonObject = {
            "nic_name": own.nic,
            "gid_index": own.gid_index,
            "pcie_error": own.pcie_error or None,
            "gid_error": own.gid_error or None,
        }
        found = cast("JsonObject", read_hints(device.pci_bus_id, device.pcie_path))
        return {**found, "rdma": rdma.to_json(), "nic": nic}

    def remarks(self, facts: Sequence[RankFacts]) -> Sequence[str]:
        """See `Transport.remarks`: what the routes over NICs were verified on, and the NICs of this machine."""
        return nic_lines(facts, self.name)

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`.

        The plan is the JSON form of a `UlyssesPciePlan`, with the PCIe profile, the launch and the devices beside it.
        """
        requested = request.environment.get(routes.VARIABLE) or "auto"
        verdict = predicates.assess_pcie(facts, allow_shared_gpu=request.allow_shared_gpu)
        if not verdict.eligible:
            # Full peer access is needed on every route, for the signals, so it is told first.
            return verdict
        ordered = sorted(facts, key=lambda record: record.rank)
        route = routes.plan_route(requested, ordered, request.environment, self.name)
        if route.transport is None:
            return Verdict(False, route.reason)
        profile = routes.profile(ordered)
        over_nics = route.transport in routes.NIC_ROUTES
        chosen = route.choices if over_nics else ()
        plan: JsonObject = {
            **(verdict.plan or {}),
            "requested_route": requested,
            "transport": route.transport,
            "profile": profile,
            "blocks_per_peer": blocks_per_peer(ordered),
            "devices": [record.device.uuid for record in ordered],
            "hints": list[str](hints(ordered, self.name)),
            "gid_indices": [choice.gid_index for choice in chosen],
            "gids": [choice.gid for choice in chosen],
            "route_reason": route.reason,
        }
        if over_nics:
            plan["nic_names"] = [choice.nic for choice in chosen]
        note = f" ({requested}: {route.reason})" if route.reason else ""
        peers = verdict.reason.removesuffix("; route p2p")
        kind = f" ({routes.VERIFIED})" if over_nics else ""
        return Verdict(True, f"{peers}; route {route.transport}{kind}, {profile}{note}", plan)

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> TransportSession:
        """See `Transport.open`. A route over NICs that was not forced and can't be opened gives way to copies."""
        agreed = cast("JsonObject", plan)
        requested, reason = str(agreed["requested_route"]), str(agreed["route_reason"])
        if not requested.startswith("prefer-"):
            # Nobody has preferred another route: that there are no NICs is in the decision, and no fallback.
            reason = ""
        # In a step, because where warnings are errors they are those of one rank.
        stages.step("warn", lambda: _warn(requested, reason))
        modules = self.prepare(stages, request, agreed, device)
        if agreed["transport"] in routes.NIC_ROUTES:
            try:
                return self._open_nics(stages, request, agreed, device, modules)
            except JointError as error:
                if requested in routes.NIC_ROUTES:
                    raise
                reason = f"route {agreed['transport']!r} can't be opened: {error}"
                stages.step("warn of the route", lambda: _warn_of_route(requested, reason))
        session = self._open_p2p(stages, request, agreed, device, modules)
        session.fallback_reason = reason or None
        return session

    def prepare(self, stages: Transaction, request: Request, agreed: JsonObject, device: torch.device) -> Modules:
        """Build the modules and test the links, which every route needs. Collective."""
        from comm_core import jit
        from comm_core.windows.launch import WINDOWS
        from comm_pcie.exchange import EXCHANGE
        from comm_pcie.selftest import SELFTEST, check_links

        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        windows, exchange, tester = stages.step(
            "build", lambda: [jit.load(spec, device) for spec in (WINDOWS, EXCHANGE, SELFTEST)], timeout_s=seconds
        )
        check_links(
            stages,
            tester.artifact.path,
            cast("Sequence[str]", agreed["devices"]),
            hints=cast("Sequence[str]", agreed["hints"]),
            timeout_s=request.timeout_s,
        )
        return Modules(windows, exchange)

    def _open_p2p(
        self, stages: Transaction, request: Request, agreed: JsonObject, device: torch.device, modules: Modules
    ) -> TransportSession:
        from comm_pcie.session import PcieSession

        return PcieSession(
            stages,
            modules.windows,
            modules.exchange,
            device,
            form=request.environment.get("COMM_PEER_MEMORY", AUTO),
            timeout_s=request.timeout_s,
            blocks_per_peer=cast("int", agreed["blocks_per_peer"]),
            poison=_env.on_stall() == "poison",
        )

    def _open_nics(
        self, stages: Transaction, request: Request, agreed: JsonObject, device: torch.device, modules: Modules
    ) -> TransportSession:
        """Open a route over NICs in a transaction of its own: what it leaves where it fails is nothing."""
        form = request.environment.get("COMM_PEER_MEMORY", AUTO)
        # Memory that can't be registered as a DMA-BUF can be by the peer-memory module, if it is of the older kind.
        forms = (AUTO, "cuda_ipc") if form == AUTO and device.type == "cuda" else (form,)
        session = self._try_nics(stages.group, request, agreed, device, modules, forms)
        # So that what fails after this on some rank takes the session down too.
        return stages.step("keep the route", lambda: session, lambda opened: opened.close())

    def _try_nics(
        self,
        group: Group,
        request: Request,
        agreed: JsonObject,
        device: torch.device,
        modules: Modules,
        forms: Sequence[str],
    ) -> TransportSession:
        from comm_pcie.rdma.opening import NicRoute, open_nics

        build_s = max(request.timeout_s, _env.jit_timeout_s())
        try:
            with Transaction(group, f"open route {agreed['transport']!r}") as stages:
                session = open_nics(
                    stages,
                    NicRoute.of(agreed),
                    partial(self.make_port, request, agreed, device, modules, forms[0]),
                    partial(self.load_verbs, device),
                    timeout_s=request.timeout_s,
                    build_s=build_s,
                    poison=_env.on_stall() == "poison",
                )
                stages.commit()
        except JointError as error:
            if len(forms) == 1 or ": register " not in error.what:
                raise
        else:
            return session
        return self._try_nics(group, request, agreed, device, modules, forms[1:])

    def load_verbs(self, device: torch.device) -> LoadedVerbs:
        """Load the libraries of rdma-core, and the module that calls them. Local."""
        from comm_pcie.rdma.engine import load_verbs

        return load_verbs(device=device if device.type == "cuda" else None, timeout_s=_env.jit_timeout_s())

    def make_port(
        self,
        request: Request,
        agreed: JsonObject,
        device: torch.device,
        modules: Modules,
        form: str,
        stages: Transaction,
        api: VerbsApi,
    ) -> DevicePort:
        """Open the port of this rank's device. Collective."""
        from comm_pcie.rdma.port import CudaPort, PortArguments

        arguments = PortArguments(form, request.timeout_s, _env.on_stall() == "poison")
        return CudaPort(stages, modules.windows, device, arguments, cast("int", agreed["blocks_per_peer"]))


class Modules(NamedTuple):
    """The loaded modules that a session is made with."""

    windows: Module
    exchange: Module


def nic_lines(facts: Sequence[RankFacts], name: str) -> list[str]:
    """Return what the routes over NICs were verified on, and, of ranks with a GPU, their NICs, a sentence each."""
    on_gpu = [record for record in facts if record.device.kind == "cuda"]
    lines = [f"routes rdma and hybrid: {routes.VERIFIED}"]
    seen: dict[str, list[int]] = {}
    for record in on_gpu:
        found = routes.rdma_facts(record, name)
        texts = [nic.summary for nic in found.nics] or [found.error or "no RDMA device"]
        for text in (*texts, *([found.library_error] if found.library_error else [])):
            seen.setdefault(text, []).append(record.rank)
    for text, ranks in seen.items():
        where = "" if len(ranks) == len(on_gpu) else f" (ranks {', '.join(map(str, ranks))})"
        lines.append(f"{text}{where}")
    return lines


def _warn(requested: str, reason: str) -> None:
    warn_once(
        "backend 'pcie' is experimental: it has been run on few machines. It tests every link before it is used",
        ExperimentalWarning,
    )
    if reason:
        _warn_of_route(requested, reason)


def _warn_of_route(requested: str, reason: str) -> None:
    warn_once(f"{routes.VARIABLE}={requested}: using route 'p2p': {reason}", RouteWarning)
