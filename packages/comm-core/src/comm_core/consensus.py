"""Joint outcomes: a step that fails on one rank fails on all of them, with one error, and nothing is left behind.

A rank-local failure in the middle of a collective set-up would leave the other ranks waiting. So every step that can
fail runs inside `joint` or a `Transaction`: each rank tells the group how its own part went, and all ranks go on or
all of them take down what was set up, in reverse order and in step with each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, TypeVar, cast

from comm_core._json import Json
from comm_core.errors import CommError, GroupTimeoutError, JointError
from comm_core.group import GIVE_UP, Group

__all__ = ["Teardown", "Transaction", "joint"]

_T = TypeVar("_T")
_ATTEMPTS = 3


def describe(error: BaseException) -> str:
    """Return an error as text for the other ranks: the type where the message alone would not say what it is."""
    text = str(error).strip()
    if isinstance(error, CommError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def joint(
    group: Group,
    what: str,
    make: Callable[[], Json],
    *,
    error: type[JointError] = JointError,
    timeout_s: float | None = None,
) -> list[Json]:
    """Run `make` on every rank and return all ranks' values, or raise the same error on every rank. Collective.

    Args:
        group: the ranks.
        what: the step, in words; equal on all ranks.
        make: this rank's part; returns JSON. Only `KeyboardInterrupt` is not shared with the others as a failure of
            this rank alone: it is shared, and then raised here.
        error: class of the joint error.
        timeout_s: as in `Group.gather`.

    Raises:
        JointError: `make` failed on some rank (`per_rank` names them). This rank's own exception, if it had one, is
            the cause.
        GroupTimeoutError: a rank is missing.
    """
    _, values = _run(group, what, make, lambda value: value, error, timeout_s)
    return values


def _run(
    group: Group,
    what: str,
    make: Callable[[], _T],
    share: Callable[[_T], Json],
    error: type[JointError],
    timeout_s: float | None,
) -> tuple[_T, list[Json]]:
    failure: BaseException | None = None
    value: Any = None
    shared: Json = None
    try:
        value = make()
        shared = share(value)
    except BaseException as caught:
        failure = caught
    outcome: Json = {"ok": shared} if failure is None else {"error": describe(failure)}
    try:
        outcomes = group.gather(what, outcome, timeout_s=timeout_s)
    except CommError as caught:
        if failure is None:
            raise
        # The others are gone or elsewhere; this rank's own failure is the better story.
        raise failure from caught
    if isinstance(failure, KeyboardInterrupt):
        raise failure
    raise_failures(what, outcomes, error, failure)
    return cast("_T", value), [cast("dict[str, Json]", item)["ok"] for item in outcomes]


def raise_failures(
    what: str, outcomes: list[Json], error: type[JointError] = JointError, cause: BaseException | None = None
) -> None:
    """Raise `error` if any of the gathered `outcomes` ({"ok": …} or {"error": text}) is a failure."""
    failed = {
        rank: str(outcome["error"])
        for rank, outcome in enumerate(cast("list[dict[str, Json]]", outcomes))
        if "error" in outcome
    }
    if failed:
        raise error(what, failed) from cause


def kept_error(error: GroupTimeoutError, kept: int) -> GroupTimeoutError:
    """Return `error` with the bytes that are kept because a late peer may still write them."""
    text = f"{error}; {kept} bytes that a late peer may still write are kept until this process ends"
    return GroupTimeoutError(error.what, error.missing, text)


@dataclass
class _Step:
    name: str
    undo: Callable[[], None] | None
    shared_bytes: int
    done: bool = False


@dataclass
class Teardown:
    """What a committed transaction set up, and how to take it down again.

    `close` may be called again after it failed: steps that were taken down stay so.

    Attributes:
        group: the ranks.
        what: the thing that was opened, for messages.
    """

    group: Group
    what: str
    _steps: list[_Step] = field(default_factory=list[_Step])

    def add(self, step: _Step) -> None:
        """Note one more step to take down."""
        self._steps.append(step)

    @property
    def closed(self) -> bool:
        """Whether everything was taken down on this rank."""
        return all(step.done for step in self._steps)

    @property
    def begun(self) -> bool:
        """Whether anything was taken down on this rank; what is left may only be closed then."""
        return any(step.done for step in self._steps)

    def close(self, timeout_s: float | None = None) -> None:
        """Take everything down, last step first. Collective.

        A step that fails somewhere is tried three times by the whole group. If it still fails, every rank raises and
        may call again. If a rank is missing, what only this rank uses is released here, what peers may still write is
        kept until the process ends, and the error says how many bytes that is.

        Raises:
            JointError: a step can't be taken down on some rank.
            GroupTimeoutError: a rank did not come.
        """
        try:
            # Nobody may release anything while a peer can still be using it. A rank that left a transaction between
            # two steps knows fewer of them than the others; it takes part in taking down the rest all the same.
            names = self.group.gather(f"close {self.what}", [step.name for step in self._steps], timeout_s=timeout_s)
            longest = max(cast("list[list[str]]", names), key=len)
            self._steps.extend(_Step(name, None, 0, done=True) for name in longest[len(self._steps) :])
            for step in reversed(self._steps):
                self._undo(step, timeout_s)
        except GroupTimeoutError as error:
            raise kept_error(error, self.abandon()) from error

    def _undo(self, step: _Step, timeout_s: float | None) -> None:
        what = f"close {self.what}: take down {step.name!r}"
        for attempt in range(_ATTEMPTS):
            failure = _attempt(step)
            outcomes = self.group.gather(
                f"{what}, attempt {attempt + 1}",
                {"ok": None} if failure is None else {"error": describe(failure)},
                timeout_s=timeout_s,
            )
            if all("ok" in cast("dict[str, Json]", outcome) for outcome in outcomes):
                return
            if attempt == _ATTEMPTS - 1:
                raise_failures(what, outcomes, cause=failure)

    def release_alone(self) -> None:
        """Take everything down on this rank alone, last step first. May be called again after it failed.

        For what no other rank has any part in: memory that was detached. Anything else needs `close`.

        Raises:
            CommError: a step can't be taken down; the ones before it in order are left too.
        """
        for step in reversed(self._steps):
            failure = _attempt(step)
            if failure is not None:
                # What earlier steps made may be needed to take this one down.
                raise CommError(f"close {self.what}: can't take down {step.name!r}: {describe(failure)}") from failure

    def abandon(self) -> int:
        """Release, on this rank alone, what no peer can touch; return the bytes that are kept. Never raises."""
        kept = 0
        for step in reversed(self._steps):
            if step.done:
                continue
            if step.shared_bytes:
                kept += step.shared_bytes
                step.done = True
            else:
                _attempt(step)
                step.done = True
        return kept


def _attempt(step: _Step) -> BaseException | None:
    if step.done:
        return None
    try:
        if step.undo is not None:
            step.undo()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # SystemExit too: the others wait for this rank's word.
        return error
    step.done = True
    return None


class Transaction:
    """A set-up in steps, each ended by a joint outcome; used as a context manager around all of them.

    ::

        with Transaction(group, "open transport 'x'") as stages:
            memory = stages.step("allocate", allocate, undo=free, shared_bytes=nbytes)
            handles = stages.step_shared("map", export, share=as_json)[1]
            teardown = stages.commit()

    A failure on any rank takes down, on every rank and in step, everything that was set up, and raises the same
    `JointError` everywhere. Leaving the block without `commit` is a failure too.

    Attributes:
        group: the ranks.
        teardown: what was set up so far; whoever owns it after `commit` closes it.
    """

    def __init__(self, group: Group, what: str, *, timeout_s: float | None = None) -> None:
        self.group = group
        self.teardown = Teardown(group, what)
        self._what = what
        self._timeout_s = timeout_s
        self._committed = False
        self._agreed = True

    def __enter__(self) -> Transaction:
        """Start."""
        return self

    def step(
        self,
        name: str,
        make: Callable[[], _T],
        undo: Callable[[_T], None] | None = None,
        *,
        shared_bytes: int = 0,
        timeout_s: float | None = None,
    ) -> _T:
        """Run one step on every rank. Collective.

        Args:
            name: of the step; equal on all ranks.
            make: this rank's part.
            undo: takes `make`'s value down again; called at most once successfully.
            shared_bytes: bytes of this rank's memory that peers may write once the step is over; such memory is
                never released unless the whole group agrees that it is not used any more.
            timeout_s: deadline of this step in seconds, for one that may take longer than others (a build); None is
                the transaction's.

        Raises:
            JointError: the step failed on some rank; everything is being taken down.
        """
        return self.step_shared(name, make, lambda _: None, undo, shared_bytes=shared_bytes, timeout_s=timeout_s)[0]

    def step_shared(
        self,
        name: str,
        make: Callable[[], _T],
        share: Callable[[_T], Json],
        undo: Callable[[_T], None] | None = None,
        *,
        shared_bytes: int = 0,
        timeout_s: float | None = None,
    ) -> tuple[_T, list[Json]]:
        """Like `step`, and return also what each rank shares of its value (`share`), in rank order."""
        record = _Step(name, None, shared_bytes, done=True)
        self.teardown.add(record)

        def run() -> _T:
            value = make()
            record.done = False
            record.undo = None if undo is None else partial(undo, value)
            return value

        self._agreed = False
        what = f"{self._what}: {name}"
        seconds = self._timeout_s if timeout_s is None else timeout_s
        result = _run(self.group, what, run, share, JointError, seconds)
        self._agreed = True
        return result

    def commit(self) -> Teardown:
        """Keep what was set up; the caller owns the returned teardown."""
        self._committed = True
        return self.teardown

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take everything down unless committed."""
        if self._committed:
            return
        if isinstance(error, GroupTimeoutError):
            kept = self.teardown.abandon()
            if kept:
                raise kept_error(error, kept) from error
            return
        joint_error: JointError | None = None
        if self._agreed:
            # This rank leaves between two steps, where the others don't expect it: tell them at their next step.
            cause = RuntimeError("left without commit") if error is None else error
            word: Json = {"error": describe(cause), GIVE_UP: True}
            try:
                self.group.gather(self._what, word, timeout_s=self._timeout_s)
            except JointError as given_up:
                joint_error = given_up
            except CommError:
                self.teardown.abandon()
                return
        try:
            self.teardown.close(self._timeout_s)
        except CommError as failure:
            if error is not None and hasattr(error, "add_note"):
                error.add_note(f"taking it down again failed as well: {failure}")  # pyright: ignore
        if joint_error is not None and not isinstance(error, (JointError, KeyboardInterrupt)):
            # The same error as the others raise; this rank's own is its cause.
            raise joint_error from error
