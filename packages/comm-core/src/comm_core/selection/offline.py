"""Offline: the decision of a group that does not exist, from facts alone. Pure.

The same functions as in `comm_core.selection.resolve`, without the gathers: every rank is taken to have this
process's plugins and to ask for the same thing, so the ranks can't disagree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from comm_core import known
from comm_core._json import Json
from comm_core.errors import ArgumentValueError
from comm_core.plugins.discovery import Registry
from comm_core.selection import decide
from comm_core.selection.decision import Considered, Decision
from comm_core.selection.request import Merged, Offer, RankRequest, merge
from comm_core.topology.facts import RankFacts

__all__ = ["Outlook", "Wanted", "look"]


@dataclass(frozen=True)
class Wanted:
    """What all ranks of the imagined group ask for.

    Attributes:
        backend: ``"auto"`` or the name of a transport.
        group_backends: device type -> torch.distributed backend of the process group.
        dtype: name of the element type.
        itemsize: its bytes.
        max_bytes: capacity of one operand in bytes.
        options: of transports and operations.
        environment: variables that change the decision, see `comm_core.transport.interface.Request`.
    """

    backend: str = "auto"
    group_backends: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "uint8"
    itemsize: int = 1
    max_bytes: int = 0
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Outlook:
    """What the ranks' requests and facts come to, before a choice is made.

    Attributes:
        merged: the request, and which transports are candidates.
        facts: what the decision rests on, in rank order; empty where a fallback is asked for by name.
        considered: the verdict on every transport, in the order of preference.
    """

    merged: Merged
    facts: tuple[RankFacts, ...]
    considered: tuple[Considered, ...]

    def choose(self) -> Decision:
        """Return the decision.

        Raises:
            UlyssesBackendError: the backend that was asked for can't be used, or nothing can.
        """
        return decide.choose(self.merged.request, self.considered, self.facts)


def look(facts: Sequence[RankFacts], plugins: Registry, wanted: Wanted, *, timeout_s: float = 60.0) -> Outlook:
    """Return what a group of these ranks would find if every rank had `plugins` and asked for `wanted`.

    Args:
        facts: one record a rank, in rank order (0 to ``len(facts) - 1``), with the findings of transports that have a
            probe of their own, where there are any.
        plugins: what is installed on every rank.
        wanted: what every rank asks for.
        timeout_s: the deadline of the request.

    Raises:
        ArgumentValueError: there are no ranks, or they are not in order.
        JointValueError: the request is invalid for these ranks: an unknown backend, ranks on a CPU and on a GPU, two
            ranks on one GPU without the opt-in.
    """
    if not facts or [item.rank for item in facts] != list(range(len(facts))):
        raise ArgumentValueError(f"needs one record a rank, ranks 0 to n - 1 in order, got {[r.rank for r in facts]}")
    names = {*known.TRANSPORTS} | ({wanted.backend} - {"auto"})
    offers = {
        name: Offer(item.version, item.wire, item.priority, item.experimental)
        for name, item in plugins.transports.items()
    }
    missing = {name: plugins.why_missing(name) for name in names if name not in offers}
    requests = [
        RankRequest(
            backend=wanted.backend,
            device_type=item.device.kind,
            device=item.device.uuid,
            group_backends=wanted.group_backends,
            dtype=wanted.dtype,
            itemsize=wanted.itemsize,
            max_bytes=wanted.max_bytes,
            options=wanted.options,
            environment={**wanted.environment, "NCCL_P2P_DISABLE": item.environment.get("NCCL_P2P_DISABLE", "")},
            plugins=offers,
            missing=missing,
        )
        for item in facts
    ]
    merged = merge("decide", requests, timeout_s)
    offer = merged.offers.get(wanted.backend)
    # A fallback that is asked for by name is answered from the requests alone, as in `resolve`.
    seen = () if offer is not None and offer.fallback else tuple(facts)
    return Outlook(merged, seen, decide.assess_all(merged, plugins.transports, seen))
