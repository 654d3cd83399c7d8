"""Backend selection under its specified names, on top of the general decision protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from comm_core import _cuda, known
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UlyssesBackendError
from comm_core.group import Group, as_group
from comm_core.selection import Asked, Considered, Decision, resolve
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.topology.ulysses import UlyssesPciePlan, UlyssesRankTopology, ulysses_to_rank_facts
from comm_core.transport.interface import Request, Verdict

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "UlyssesBackendDecision",
    "decide_ulysses_backend",
    "default_device",
    "passthrough",
    "resolve_ulysses_backend",
]

_WORLD_SIZES = (2, 4, 6, 8)


@dataclass(frozen=True)
class UlyssesBackendDecision:
    """Outcome of backend selection.

    Attributes:
        backend: name of the transport.
        reason: what was verified (a transport of its own) or why it was chosen (a fallback).
        pcie_plan: the route plan of ``"pcie"``, else None.
        considered: everything that was looked at, in the order of preference, with the reasons.
    """

    backend: str
    reason: str
    pcie_plan: UlyssesPciePlan | None = None
    considered: tuple[Considered, ...] = ()

    @classmethod
    def of(cls, decision: Decision) -> UlyssesBackendDecision:
        """Return the specified form of a general decision."""
        return _with_plan(cls(decision.backend, decision.reason, None, decision.considered), decision)


def _with_plan(result: UlyssesBackendDecision, decision: Decision) -> UlyssesBackendDecision:
    if decision.backend != "pcie" or decision.plan is None:
        return result
    return replace(result, pcie_plan=UlyssesPciePlan.from_json(decision.plan))


def default_device(group: Group) -> torch.device:
    """Return the device of a rank that names none.

    The current CUDA device where the group has NCCL or CUDA is already in use in this process, else the CPU. (A gloo
    group also accepts CUDA tensors, so gloo alone says nothing.)
    """
    wants_cuda = group.backends.get("cuda") == "nccl" or _cuda.is_initialized()
    if wants_cuda and _cuda.device_count() > 0:
        return _cuda.normalize_device("cuda")
    return torch.device("cpu")


def passthrough(asked: Asked, device: torch.device) -> Decision:
    """Return the decision of a single rank that names no backend: nothing is exchanged, so nothing is chosen."""
    name = "nccl" if device.type == "cuda" else "gloo"
    reason = "world size 1 is a passthrough: nothing is exchanged"
    request = Request(
        backend="auto",
        world_size=1,
        device_type=device.type,
        dtype=asked.dtype,
        itemsize=asked.itemsize,
        max_bytes=asked.max_bytes,
        options=asked.options,
    )
    return Decision(name, reason, None, (Considered(name, True, reason),), request)


def resolve_ulysses_backend(
    backend: str = "auto",
    group: ProcessGroup | Group | None = None,
    device: torch.device | str | int | None = None,
) -> UlyssesBackendDecision:
    """Decide on the backend of `group`, consistently on all ranks. Collective; allocates and compiles nothing.

    At most three gathers of JSON through the group's key-value store, in the same order on every rank, whatever fails
    locally: requests, topology, verdicts. A group-wide ``"nccl"`` or ``"gloo"`` ends after the first. A transport on
    which the ranks come to different verdicts is passed over, or refused where it was asked for.

    Args:
        backend: ``"auto"`` or the name of a transport.
        group: the ranks; None is WORLD.
        device: this rank's device; None as in `UlyssesCommunicator`.

    Raises:
        JointValueError: requests are invalid or differ, with the per-rank values.
        UlyssesBackendError: the backend that was asked for can't be used.
        GroupTimeoutError: a rank is missing.
    """
    members = as_group(group)
    errors: list[str] = []
    bound: torch.device | None = None
    try:
        bound = default_device(members) if device is None else _cuda.normalize_device(device)
    except ArgumentValueError as error:
        errors.append(str(error))
    asked = Asked("resolve_ulysses_backend", backend, bound, errors=tuple(errors))
    return UlyssesBackendDecision.of(resolve(members, asked))


def decide_ulysses_backend(
    requested: str,
    topologies: Sequence[UlyssesRankTopology],
    supported_world_sizes: Sequence[int] = _WORLD_SIZES,
    allow_experimental_auto: bool = False,
) -> UlyssesBackendDecision:
    """Decide from gathered topologies alone. Pure: the same arguments give the same decision everywhere.

    Answers what the topology admits, whether or not the packages are installed; `resolve_ulysses_backend` also needs
    them. Anything unknown selects the fallback.

    Args:
        requested: ``"auto"``, ``"nvlink"``, ``"pcie"``, ``"mnnvl"``, ``"nccl"`` or ``"gloo"``.
        topologies: one record a rank.
        supported_world_sizes: sizes that the NVLink kernels exist for.
        allow_experimental_auto: whether ``"auto"`` may select ``"pcie"``.

    Raises:
        ArgumentValueError: `requested` is unknown or `topologies` is empty.
        UlyssesBackendError: a device backend was asked for by name and the topology does not admit it.
    """
    names = ("auto", *known.TRANSPORTS)
    if type(requested) is not str:
        raise ArgumentTypeError(f"requested must be a str, got {type(requested).__name__}")
    if requested not in names:
        raise ArgumentValueError(f"requested must be one of {names}, got {requested!r}")
    if not topologies:
        raise ArgumentValueError("topologies must hold one record a rank, got none")
    facts = [ulysses_to_rank_facts(item) for item in topologies]
    if requested in ("nccl", "gloo"):
        return UlyssesBackendDecision(requested, f"{requested} was asked for")
    order = (requested,) if requested != "auto" else ("nvlink", "pcie")
    considered = tuple(
        _assess(name, facts, supported_world_sizes, requested == "auto" and not allow_experimental_auto)
        for name in order
    )
    for item in considered:
        if item.eligible:
            plan = UlyssesPciePlan.from_json(item.plan) if item.name == "pcie" and item.plan is not None else None
            return UlyssesBackendDecision(item.name, item.reason, plan, considered)
    if requested != "auto":
        reason = considered[0].reason
        error = UlyssesBackendError(f"backend {requested!r} was asked for and can't be used: {reason}")
        error.reason = reason
        raise error
    fallback = "gloo" if all(item.device.kind == "cpu" for item in facts) else "nccl"
    reason = "every rank is on the CPU" if fallback == "gloo" else considered[0].reason
    return UlyssesBackendDecision(fallback, reason, None, (*considered, Considered(fallback, True, reason)))


def _assess(name: str, facts: Sequence[RankFacts], sizes: Sequence[int], barred: bool) -> Considered:
    if name == "pcie" and barred:
        return Considered(
            name, False, "experimental: 'auto' takes it only with COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1"
        )
    verdict: Verdict
    if name == "nvlink":
        verdict = predicates.assess_nvlink(facts, sizes=tuple(sizes))
    elif name == "pcie":
        verdict = predicates.assess_pcie(facts)
    else:
        verdict = predicates.assess_mnnvl(facts)
    return Considered(name, verdict.eligible, verdict.reason, verdict.plan)
