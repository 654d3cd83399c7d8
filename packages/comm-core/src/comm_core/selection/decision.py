"""The decision: which transport, why, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass, field

from comm_core._json import JsonObject
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import Request

__all__ = ["Considered", "Decision"]


@dataclass(frozen=True)
class Considered:
    """One transport that was looked at.

    Attributes:
        name: of the transport.
        eligible: whether the group could use it.
        reason: what was verified, or what is missing.
        plan: what its `open` needs, where it is eligible.
    """

    name: str
    eligible: bool
    reason: str
    plan: JsonObject | None = None


@dataclass(frozen=True)
class Decision:
    """The outcome of `resolve`, equal on all ranks.

    Attributes:
        backend: name of the chosen transport.
        reason: why it was chosen.
        plan: what its `open` needs.
        considered: every transport that was looked at, in the order of preference, the chosen one among them.
        request: what the group asked for, as agreed.
        facts: what the ranks found, in rank order; empty where the decision needed none.
        shared_gpu: whether ranks share a GPU because ``COMM_ALLOW_SHARED_GPU=1``.
        recorded: whether the facts come from a topology file.
    """

    backend: str
    reason: str
    plan: JsonObject | None
    considered: tuple[Considered, ...]
    request: Request
    facts: tuple[RankFacts, ...] = field(default=(), repr=False)
    shared_gpu: bool = False
    recorded: bool = False

    @property
    def passed_over(self) -> tuple[Considered, ...]:
        """What was preferred over the chosen transport and could not be used."""
        names = [item.name for item in self.considered]
        end = names.index(self.backend) if self.backend in names else len(names)
        return self.considered[:end]

    @property
    def fallbacks(self) -> tuple[Considered, ...]:
        """Eligible transports after the chosen one, in the order in which ``"auto"`` would fall back to them."""
        names = [item.name for item in self.considered]
        start = names.index(self.backend) + 1 if self.backend in names else 0
        return tuple(item for item in self.considered[start:] if item.eligible)
