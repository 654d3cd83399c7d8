"""What a rank did with a function, and the errors that say so."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from comm_core.errors import CommError

__all__ = ["Kind", "Outcome", "RankError", "RankTimeoutError", "raise_unless_values"]

Kind = Literal["value", "exception", "died", "timeout"]


@dataclass(frozen=True)
class Outcome:
    """What one rank did with a function.

    Attributes:
        rank: group rank.
        kind: ``"value"``: it returned. ``"exception"``: it raised (any `BaseException`, so ``sys.exit`` too).
            ``"died"``: its process ended. ``"timeout"``: it was still busy at the deadline.
        value: what it returned.
        exception: what it raised, rebuilt in this process.
        exit_code: how its process ended; negative is a signal, as in `subprocess`.
        text: the traceback, the stacks at the deadline, or what the process printed last.
        seconds: how long the function ran; 0 where that is unknown.
    """

    rank: int
    kind: Kind
    value: Any = None
    exception: BaseException | None = None
    exit_code: int | None = None
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        """Return one line that says what happened."""
        if self.kind == "value":
            return f"rank {self.rank} returned {self.value!r}"
        if self.kind == "exception":
            return f"rank {self.rank} raised {type(self.exception).__name__}: {self.exception}"
        if self.kind == "died":
            return f"rank {self.rank} {_how_it_ended(self.exit_code)}"
        return f"rank {self.rank} did not return in time"


class RankError(CommError, RuntimeError):
    """Ranks did not do what was asked of them. `outcomes` has what each did, in rank order."""

    def __init__(self, what: str, outcomes: Sequence[Outcome] = ()) -> None:
        self.outcomes = tuple(outcomes)
        order = {"exception": 0, "died": 1, "timeout": 2}
        failed = sorted((o for o in outcomes if o.kind != "value"), key=lambda outcome: order[outcome.kind])
        parts = [f"{what}: {len(failed)} of {len(outcomes)} ranks failed"] if outcomes else [what]
        # Ranks usually hang at the same place, so their stacks are shown once.
        same: dict[tuple[str, str], list[Outcome]] = {}
        for outcome in failed:
            event = str(outcome).removeprefix(f"rank {outcome.rank} ")
            same.setdefault((event, re.sub("0x[0-9a-f]+", "", outcome.text)), []).append(outcome)
        for (event, _), group in same.items():
            ranks = ", ".join(str(outcome.rank) for outcome in group)
            parts.append(f"{'rank' if len(group) == 1 else 'ranks'} {ranks} {event}")
            parts += [f"    {line}" for line in group[0].text.rstrip().splitlines()]
        super().__init__("\n".join(parts))


class RankTimeoutError(RankError, TimeoutError):
    """No rank failed, but some did not return before the deadline; the text has their Python stacks."""


def raise_unless_values(what: str, outcomes: Sequence[Outcome]) -> None:
    kinds = {outcome.kind for outcome in outcomes}
    if kinds <= {"value"}:
        return
    if kinds <= {"value", "timeout"}:
        raise RankTimeoutError(what, outcomes)
    raise RankError(what, outcomes) from next((o.exception for o in outcomes if o.exception is not None), None)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "ended in an unknown way: the process that started it is gone"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
