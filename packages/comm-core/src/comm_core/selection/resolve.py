"""Resolve: the group's decision in at most three gathers, whatever fails on one rank.

1. Requests: arguments, environment, plugins. Invalid or mixed ones raise on every rank.
2. Facts: each rank's probe; a probe that raises or hangs becomes an error fact.
3. Verdicts: every rank evaluates the same pure function; a transport on which the ranks differ is removed.

A group-wide request for a fallback by name (``"nccl"``, ``"gloo"``) ends after the first gather.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, cast

from comm_core import _env
from comm_core._json import Json, JsonObject, canonical
from comm_core._version import __version__
from comm_core.consensus import describe
from comm_core.errors import CommError
from comm_core.group import Group
from comm_core.plugins.discovery import Registry, registry
from comm_core.selection import decide
from comm_core.selection.decision import Decision
from comm_core.selection.family import TRANSPORTS, Family
from comm_core.selection.request import Merged, Offer, RankRequest, merge
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Candidate, ProbeContext

if TYPE_CHECKING:
    import torch

__all__ = ["Asked", "resolve"]

_log = logging.getLogger("comm_core")
_T = TypeVar("_T")

_COMPARED_VARIABLES = ("NCCL_P2P_DISABLE",)
"""Variables of other libraries that change what peers may do, so they must be equal on all ranks."""


@dataclass(frozen=True)
class Asked:
    """What this rank's caller asked for, before the group has agreed.

    Attributes:
        what: the step, for messages; equal on all ranks.
        backend: as the caller passed it; anything.
        device: this rank's device, or None where it could not be determined (then `errors` says why).
        dtype: name of the default element type.
        itemsize: its bytes.
        max_bytes: capacity in bytes.
        options: of transports and operations; JSON.
        errors: what is wrong with this rank's arguments.
        family: what is chosen among; equal on all ranks.
    """

    what: str
    backend: object
    device: torch.device | None
    dtype: str = "uint8"
    itemsize: int = 1
    max_bytes: int = 0
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    errors: tuple[str, ...] = ()
    family: Family = TRANSPORTS


def resolve(group: Group, asked: Asked, plugins: Registry | None = None) -> Decision:
    """Return the decision of `group`. Collective; nothing is allocated, compiled or opened.

    Args:
        group: the ranks.
        asked: what this rank's caller wants.
        plugins: registry to use; None is this process's.

    Raises:
        JointValueError: requests are invalid or differ; on every rank, with the per-rank values.
        CommError: a backend was asked for by name and can't be used, or none can; on every rank, of the class
            ``asked.family.error``.
        GroupTimeoutError: a rank is missing.
    """
    own, plugins = _own_request(group, asked, plugins)
    requests = [RankRequest.from_json(item) for item in group.gather(f"{asked.what}: requests", own.to_json())]
    family = asked.family
    members = family.members(plugins)
    merged = merge(asked.what, requests, group.timeout_s, family)
    request = merged.request
    offer = merged.offers.get(request.backend)
    if offer is not None and offer.fallback:
        considered = decide.assess_all(merged, members, ())
        return decide.choose(request, considered, (), family)
    # The ranks agreed on one device type, so every rank has a device.
    device = cast("torch.device", asked.device)
    facts = _gather_facts(group, asked.what, merged, members, device)
    verdicts = decide.assess_all(merged, members, facts)
    digests = group.gather(f"{asked.what}: verdicts", decide.considered_digests(verdicts))
    decision = decide.choose(request, decide.agree(verdicts, digests), facts, family)
    _log.info("%s: %s (%s)", asked.what, decision.backend, decision.reason)
    return decision


def _own_request(group: Group, asked: Asked, plugins: Registry | None) -> tuple[RankRequest, Registry]:
    """Return this rank's request; whatever fails here travels in it, so that no rank is left waiting."""
    errors = list(asked.errors)
    backend = asked.backend
    if type(backend) is not str:
        errors.append(f"backend must be a str, got {type(backend).__name__}")
        backend = "auto"
    environment: dict[str, str] = {}
    try:
        environment = _environment(group)
    except CommError as error:
        errors.append(str(error))
    if plugins is None:
        try:
            plugins = registry()
        except Exception as error:
            errors.append(f"plugin discovery failed: {describe(error)}")
            plugins = Registry()
    identity = ""
    try:
        identity = _device_identity(asked.device)
    except Exception as error:
        errors.append(f"device {asked.device} can't be asked for its identity: {describe(error)}")
    members = asked.family.members(plugins)
    offers, missing = _offers(members)
    names = {*asked.family.known} | ({backend} - {"auto"})
    missing.update({name: plugins.why_missing(name) for name in names if name not in members})
    request = RankRequest(
        backend=backend,
        device_type="" if asked.device is None else asked.device.type,
        device=identity,
        group_backends=group.backends,
        dtype=asked.dtype,
        itemsize=asked.itemsize,
        max_bytes=asked.max_bytes,
        options=asked.options,
        environment=environment,
        plugins=offers,
        missing=missing,
        versions={"comm-core": __version__},
        errors=tuple(errors),
    )
    try:
        canonical(request.to_json())
    except (TypeError, ValueError) as error:
        request = replace(request, options={}, errors=(*errors, f"options must be JSON: {error}"))
    return request, plugins


def _offers(members: Mapping[str, Candidate]) -> tuple[dict[str, Offer], dict[str, str]]:
    """Return what this rank has, and why it lacks a transport that can't even say what it is."""
    offers: dict[str, Offer] = {}
    missing: dict[str, str] = {}
    for name, transport in members.items():
        try:
            offer = Offer(transport.version, transport.wire, int(transport.priority), bool(transport.experimental))
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            # A descriptor is the plugin's code, and nothing of a plugin may keep this rank from the first gather.
            missing[name] = f"its description can't be read: {describe(error)}"
        else:
            offers[name] = offer
    return offers, missing


def _environment(group: Group) -> dict[str, str]:
    import os

    _env.timeout_s()  # the group has put up with a wrong one, so that it is reported here, to all
    values = {
        "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS": str(int(_env.allow_experimental_auto())),
        "COMM_ALLOW_SHARED_GPU": str(int(_env.allow_shared_gpu())),
        "COMM_CHECK": str(int(_env.check())),
        "COMM_PEER_MEMORY": _env.peer_memory(),
        "COMM_ULYSSES_PCIE_ROUTE": _env.pcie_route(),
        "COMM_ULYSSES_PCIE_NICS": _env.pcie_nics(),
        "COMM_ULYSSES_PCIE_GID_INDICES": _env.pcie_gid_indices(),
        "COMM_TIMEOUT_S": f"{group.timeout_s:g}",
    }
    for name in _COMPARED_VARIABLES:
        values[name] = os.environ.get(name, "")
    return values


def _device_identity(device: torch.device | None) -> str:
    """Return the UUID of a CUDA device, or an empty string where it is unknown or a topology file replaces it."""
    if device is None or device.type != "cuda" or _env.topology_file():
        return ""
    from comm_core import _cuda

    return _cuda.device_properties(device.index).uuid


def _gather_facts(
    group: Group, what: str, merged: Merged, members: Mapping[str, Candidate], device: torch.device
) -> tuple[RankFacts, ...]:
    # Leave the others a margin: a probe that hangs here must become a fact before they give up on this rank.
    seconds = group.timeout_s / 2
    own = _probe(group.rank, device, merged, members, seconds)
    gathered = group.gather(f"{what}: facts", own.to_json())
    return tuple(RankFacts.from_json(item) for item in gathered)


def _probe(
    rank: int, device: torch.device, merged: Merged, members: Mapping[str, Candidate], seconds: float
) -> RankFacts:
    def core() -> RankFacts:
        from comm_core.topology.probe import probe_rank

        return probe_rank(rank, device)

    candidates = [name for name in merged.common if merged.request.backend in ("auto", name)]
    probing = [name for name in candidates if type(members[name]).probe is not Candidate.probe]
    # All of them together must be over in `seconds`, and one that hangs must leave time to the others.
    deadline = time.monotonic() + seconds
    facts, error = _bounded(core, seconds / (1 + len(probing)))
    if facts is None:
        facts = RankFacts(rank=rank, error=f"the topology probe failed: {error}")
    results: dict[str, Json] = dict(facts.plugins)
    for number, name in enumerate(probing):
        if facts.recorded and name in results:
            continue
        probe = members[name].probe
        context = ProbeContext(rank, device.type, device.index if device.type == "cuda" else -1, facts)
        share = (deadline - time.monotonic()) / (len(probing) - number)
        value, error = _bounded(lambda probe=probe, context=context: _checked(probe(context)), share)
        results[name] = value if value is not None else {"error": error}
    return replace(facts, plugins=results)


def _checked(value: JsonObject) -> JsonObject:
    canonical(value)
    return value


def _bounded(call: Callable[[], _T], seconds: float) -> tuple[_T | None, str]:
    """Return (`call()`, "") or (None, why not), within `seconds`.

    A probe can hang in a driver call that nothing interrupts; its thread is then left behind as a daemon.
    """
    box: list[_T] = []
    errors: list[str] = []

    def run() -> None:
        try:
            box.append(call())
        except BaseException as error:
            errors.append(describe(error))

    thread = threading.Thread(target=run, name="comm-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    if box:
        return box[0], ""
    return None, errors[0] if errors else f"no answer within {seconds:g} s"
