"""Opens what was decided; ``"auto"`` falls back where opening fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from comm_core import _cuda
from comm_core.consensus import Transaction, describe
from comm_core.errors import CommError, GroupTimeoutError, PluginError, UlyssesBackendError
from comm_core.group import Group
from comm_core.plugins.discovery import registry
from comm_core.selection.decision import Considered, Decision
from comm_core.transport.interface import TransportSession

if TYPE_CHECKING:
    import torch

__all__ = ["Opened", "open_first", "open_transport"]

_T = TypeVar("_T")

_log = logging.getLogger("comm_core")


@dataclass(frozen=True)
class Opened:
    """An opened transport.

    Attributes:
        decision: as it came out.
        resolved: as it was before anything was opened.
        session: the transport, or None where nothing is exchanged (one rank).
        fallback_reason: why ``"auto"`` did not take what it prefers, or None.
    """

    decision: Decision
    resolved: Decision
    session: TransportSession | None
    fallback_reason: str | None


def open_transport(group: Group, resolved: Decision, device: torch.device) -> Opened:
    """Open the chosen transport, or, for ``"auto"``, the next eligible one until one opens. Collective.

    Opening is one transaction of the group, so every rank fails, and falls back, together.

    Raises:
        UlyssesBackendError: nothing could be opened, or the one that was asked for could not.
        GroupTimeoutError: a rank is missing.
    """
    session, decision, reason = open_first(
        resolved, lambda decision: _open(group, decision, device), UlyssesBackendError
    )
    return Opened(decision, resolved, session, reason)


def open_first(
    resolved: Decision, open_one: Callable[[Decision], _T], error_class: type[CommError]
) -> tuple[_T, Decision, str | None]:
    """Open what was decided or, for ``"auto"``, the next eligible candidate until one opens. Collective.

    Args:
        resolved: the decision.
        open_one: opens what a decision chose; fails on all ranks or on none.
        error_class: raised where nothing could be opened.

    Returns:
        What was opened, the decision as it came out, and why ``"auto"`` did not take what it prefers, or None.
    """
    decision = resolved
    failures: list[str] = []
    while True:
        try:
            opened = open_one(decision)
        except (GroupTimeoutError, KeyboardInterrupt):
            raise
        except BaseException as error:
            failures.append(describe(error))
            after = _without(decision, describe(error))
            if after is None:
                raise error_class("; ".join(failures)) from error
            _log.warning("%s can't be opened, falling back to %s: %s", decision.backend, after.backend, error)
            decision = after
            continue
        return opened, decision, _fallback_reason(decision)


def _open(group: Group, decision: Decision, device: torch.device) -> TransportSession:
    """Open one transport. It fails on all ranks or on none, however its `open` fails on this one."""
    # The caller's current device may be another one: a stream or a kernel of it would be the wrong one.
    with _cuda.device_guard(device), Transaction(group, f"open transport {decision.backend!r}") as stages:
        # In a step, because a plugin can have been unregistered on this rank alone since the decision.
        transport = stages.step("find", lambda: registry().transport(decision.backend))
        session = transport.open(stages, decision.request, decision.plan, device)
        stages.step("ready", lambda: _session(decision.backend, session))
        stages.commit()
    return session


def _session(name: str, opened: object) -> None:
    # Without a session the communicator would take its calls for those of a single rank, and exchange nothing.
    if not isinstance(opened, TransportSession):
        raise PluginError(f"transport {name!r}: open must return a TransportSession, got {type(opened).__name__}")


def _without(decision: Decision, failure: str) -> Decision | None:
    """Return the decision for the next eligible transport, or None."""
    if decision.request.backend != "auto" or not decision.fallbacks:
        return None
    following = decision.fallbacks[0]
    considered = tuple(
        Considered(item.name, False, f"opening it failed: {failure}") if item.name == decision.backend else item
        for item in decision.considered
    )
    return replace(
        decision,
        backend=following.name,
        reason=following.reason,
        plan=following.plan,
        considered=considered,
    )


def _fallback_reason(decision: Decision) -> str | None:
    if decision.request.backend != "auto":
        return None
    reasons = [f"{item.name}: {item.reason}" for item in decision.passed_over]
    return "; ".join(reasons) or None
