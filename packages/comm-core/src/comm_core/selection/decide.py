"""The pure part of the decision: order of preference, verdicts, choice. No I/O, no clock, no environment."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace

from comm_core import known
from comm_core._json import Json, JsonObject, digest
from comm_core.consensus import describe
from comm_core.selection.decision import Considered, Decision
from comm_core.selection.family import TRANSPORTS, Family
from comm_core.selection.request import Merged, Offer
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Candidate, Request, Verdict

__all__ = ["agree", "assess_all", "choose", "considered_digests"]


def assess_all(
    merged: Merged, transports: Mapping[str, Candidate], facts: Sequence[RankFacts]
) -> tuple[Considered, ...]:
    """Return this rank's verdict on every transport, in the order of preference.

    What is not a candidate (not installed everywhere, different protocols) is listed first, with the reason. A
    transport whose `assess` raises is not eligible.
    """
    request = merged.request
    absent = [
        Considered(name, False, reason + _topology_says(name, request, facts))
        for name, reason in sorted(merged.absent.items())
        if request.backend in ("auto", name)
    ]
    names = [name for name in merged.common if request.backend in ("auto", name)]
    return (*absent, *(_assess(transports[name], merged.offers[name], request, facts) for name in names))


def _topology_says(name: str, request: Request, facts: Sequence[RankFacts]) -> str:
    """Return whether installing `name` would help, where its predicates are known and there are facts to ask."""
    ask = predicates.KNOWN.get(name)
    if ask is None or not facts:
        return ""
    verdict = ask(facts, allow_shared_gpu=request.allow_shared_gpu)
    if verdict.eligible:
        return f". The topology would admit it ({verdict.reason})"
    return f". It would not help here: {verdict.reason}"


def _assess(transport: Candidate, offer: Offer, request: Request, facts: Sequence[RankFacts]) -> Considered:
    if request.backend == "auto" and offer.experimental and not request.allow_experimental_auto:
        return Considered(
            transport.name, False, "experimental: 'auto' takes it only with COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1"
        )
    try:
        # A copy: what a plugin does to its argument must not change what the others, or core, go by.
        private = replace(
            request,
            group_backends=dict(request.group_backends),
            options=copy.deepcopy(dict(request.options)),
            environment=dict(request.environment),
        )
        verdict = Verdict(*transport.assess(private, facts))
        digest(verdict.plan)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # It must end in a verdict on this rank too, or the others wait for its digests.
        return Considered(transport.name, False, f"its assessment failed: {describe(error)}")
    return Considered(transport.name, bool(verdict.eligible), str(verdict.reason), verdict.plan)


def considered_digests(considered: Sequence[Considered]) -> JsonObject:
    """Return what the ranks compare: transport -> digest of its verdict."""
    return {item.name: digest([item.eligible, item.reason, item.plan]) for item in considered}


def agree(considered: Sequence[Considered], digests: Sequence[Json]) -> tuple[Considered, ...]:
    """Return `considered` without eligibility where the ranks came to different verdicts.

    Args:
        considered: this rank's verdicts.
        digests: every rank's `considered_digests`, in rank order; an entry with the key "error" is a rank that could
            not decide at all.
    """
    result: list[Considered] = []
    for item in considered:
        values: list[Json] = [_digest_of(entry, item.name) for entry in digests]
        if len({str(value) for value in values}) == 1 and values[0] is not None:
            result.append(item)
            continue
        texts = ", ".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        result.append(Considered(item.name, False, f"the ranks came to different verdicts ({texts})"))
    return tuple(result)


def _digest_of(entry: Json, name: str) -> Json:
    if not isinstance(entry, Mapping):
        return None
    return entry.get(name)


def choose(
    request: Request,
    considered: Sequence[Considered],
    facts: Sequence[RankFacts],
    family: Family = TRANSPORTS,
) -> Decision:
    """Return the decision: the first eligible candidate.

    Raises:
        CommError: a backend was asked for by name and is not eligible, or nothing is; of the class `family.error`.
    """
    recorded = any(item.recorded for item in facts)
    uuids = [item.device.uuid for item in facts if item.device.uuid]
    shared_gpu = request.allow_shared_gpu and request.device_type == "cuda" and len(set(uuids)) < len(uuids)
    for item in considered:
        if item.eligible:
            return Decision(
                item.name, item.reason, item.plan, tuple(considered), request, tuple(facts), shared_gpu, recorded
            )
    reasons = "; ".join(f"{item.name}: {item.reason}" for item in considered) or f"no {family.noun} is installed"
    if request.backend == "auto":
        raise family.error(
            f"no {family.noun} can serve {request.world_size} ranks on {request.device_type} tensors: {reasons}"
        )
    hint = known.install_hint(request.backend) if "not installed" in reasons else ""
    error = family.error(
        f"backend {request.backend!r} was asked for and can't be used: {reasons}"
        + (f". {hint}" if hint and hint not in reasons else "")
    )
    error.reason = "; ".join(item.reason for item in considered) or reasons
    raise error
