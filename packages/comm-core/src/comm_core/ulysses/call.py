"""One call of a communicator, checked and planned; and, in checked mode, agreed by the group before it starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch

from comm_core._json import Json, JsonObject, canonical
from comm_core.consensus import describe
from comm_core.errors import JointValueError
from comm_core.group import Group
from comm_core.transport.plan import Plan
from comm_core.ulysses.workspace import UlyssesWorkspace

__all__ = ["AnyCall", "Call", "Comparable", "agree"]


class Call(NamedTuple):
    """A call whose arguments were found good on this rank.

    Attributes:
        plan: what bytes go where.
        sources: the operands.
        shape: of the output.
        dtype: element type.
        out: the caller's output, or None.
        workspace: the caller's staging, or None.
        geometry: everything that must be equal on all ranks, for the checked mode. The transport sees only bytes:
            equal sizes with different shapes or dtypes would exchange without an error and mean nothing.
    """

    plan: Plan
    sources: Sequence[torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    out: torch.Tensor | None
    workspace: UlyssesWorkspace | None
    geometry: JsonObject


class Comparable(Protocol):
    """A prepared call of any kind."""

    @property
    def geometry(self) -> JsonObject:
        """Everything that must be equal on all ranks."""
        ...


AnyCall = TypeVar("AnyCall", bound=Comparable)


def agree(group: Group, what: str, communicator: str, number: int, prepare: Callable[[], AnyCall]) -> AnyCall:
    """Prepare a call on every rank and compare them, before anything is communicated (``COMM_CHECK=1``). Collective.

    Args:
        group: the ranks.
        what: the operation.
        communicator: which one of this group it is: a text that is equal on all ranks.
        number: of the call on this communicator.
        prepare: checks this rank's arguments.

    Raises:
        CommError: this rank's own arguments are bad; the others raise a `JointValueError` that says so.
        JointValueError: another rank's arguments are bad, or the ranks are not at the same call or geometry.
        GroupTimeoutError: a rank did not call.
    """
    own: Exception | None = None
    call: AnyCall | None = None
    record: dict[str, Json] = {"operation": what, "communicator": communicator, "call": number}
    try:
        call = prepare()
        record["geometry"] = call.geometry
    except Exception as error:
        # Also what torch raises of its own (a tensor without storage): the others wait for this rank's word.
        own = error
        record["error"] = describe(error)
    # One name for every operation: ranks at different operations must meet here to be told apart.
    records = cast("list[Mapping[str, Any]]", group.gather("checked call", record))
    if own is not None:
        raise own
    failed = {rank: str(item["error"]) for rank, item in enumerate(records) if "error" in item}
    if failed:
        raise JointValueError(f"{what}: refused on another rank, nothing was exchanged", failed)
    if len({canonical(item) for item in records}) > 1:
        raise JointValueError(
            f"{what}: the ranks make different calls, nothing was exchanged",
            {rank: _text(item) for rank, item in enumerate(records)},
        )
    assert call is not None
    return call


def _text(record: Mapping[str, Any]) -> str:
    geometry = ", ".join(f"{key}={value}" for key, value in record["geometry"].items())
    return f"call {record['call']} of communicator {record['communicator']}: {record['operation']}({geometry})"
