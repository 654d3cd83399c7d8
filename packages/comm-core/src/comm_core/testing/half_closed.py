"""What a session must refuse once its close was begun: everything but another close, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from comm_core.errors import ClosedError, JointError
from comm_core.group import Group
from comm_core.ulysses import plans

__all__ = ["close_in_two"]

Calls = Mapping[str, Callable[[], object]]

_BYTES = 24
"""Of each rank's part of the exchange."""


def close_in_two(
    session: Any,
    group: Group,
    *,
    spoil: Callable[[], None] = lambda: None,
    mend: Callable[[], None] = lambda: None,
    more: Calls | None = None,
    output: Callable[[], torch.Tensor] | None = None,
) -> None:
    """Close a session in which something can't be released at first, and make every call in between and afterwards.

    Asserts that all of them worked before, and that each is refused from then on with an error that names this rank
    and says what to do. Collective.

    Args:
        session: of the kind of `comm_core.windows.session.WindowSession`.
        group: its group.
        spoil: makes a release fail, on any rank, until `mend`.
        mend: lets it succeed.
        more: calls that this kind of session has besides, by name.
        output: allocates an output of an exchange of 24 bytes a rank; `allocate_output` unless given.
    """
    device = torch.device("cpu")
    plan = plans.exchange_chunks(_BYTES, 1, group.rank, group.size)
    out = session.allocate_output((plan.target_bytes,), torch.uint8, device) if output is None else output()
    source = torch.zeros(plan.target_bytes, dtype=torch.uint8)
    gathered = torch.zeros(group.size, 4, dtype=torch.uint8)
    calls: dict[str, Callable[[], object]] = {
        "exchange": lambda: session.exchange(plan, (source,), out),
        "all_gather_small": lambda: session.all_gather_small(gathered[0], gathered),
        "barrier": session.barrier,
        "allocate_output": lambda: session.allocate_output((1,), torch.uint8, device),
        "window": lambda: session.window(1),
        "launch_context": session.launch_context,
        "check": session.check,
        **(more or {}),
    }
    for call in calls.values():
        call()
    spoil()
    try:
        session.close()
    except JointError:
        pass
    else:
        raise AssertionError("the first close has succeeded: nothing was spoilt")
    mend()
    _assert_refused(calls, group.rank, "call close on every rank again")
    session.close()
    _assert_refused(calls, group.rank, "is closed")
    session.close()


def _assert_refused(calls: Calls, rank: int, why: str) -> None:
    for name, call in calls.items():
        try:
            call()
        except ClosedError as error:
            text = str(error)
            assert f"rank {rank}: " in text and why in text, f"{name}: {text}"
        else:
            raise AssertionError(f"{name} was not refused")
