"""Group: rank, size, and a gather of JSON with a deadline that names who is missing.

Control data travels through the process group's own key-value store, key by key: no CUDA, no pickle, no collective on
another group. (An object gather over NCCL or gloo takes the whole group timeout and names nobody.)

The outcome of each gather is itself agreed: whoever has read all values, or has given up, settles the gather by
one compare-and-set, and everyone obeys what was settled first. So a rank that comes late learns that the others have
given up, instead of carrying on alone with values that nobody else used.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _env
from comm_core._json import Json, canonical
from comm_core.errors import ArgumentTypeError, ArgumentValueError, CheckpointError, GroupTimeoutError, JointError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["DetachedGroup", "Group", "MemoryStore", "Store", "StoreGroup", "as_group", "thread_groups"]

_OK = "ok"
_PREFIX = "comm_core/1"
GIVE_UP = "give up"
"""Key of a gathered value by which a rank says that it can't take part in what the others are at, and why."""
# A missing rank is usually microseconds away or gone for good, so poll fast at first and then back off. The cap keeps
# the load on the one process that serves the store small: 8 ranks at 20 ms are 400 requests a second.
_POLL_FIRST_S = 0.0002
_POLL_CAP_S = 0.02


class Group(ABC):
    """The ranks that decide and communicate together.

    `rank` is this process's position in the group (0 to ``size - 1``), not its rank in the whole job.
    """

    rank: int
    size: int
    name: str
    timeout_s: float

    @property
    def process_group(self) -> ProcessGroup | None:
        """The torch process group behind this one, where there is one."""
        return None

    @property
    def backends(self) -> dict[str, str]:
        """Device type -> torch.distributed backend, for example ``{"cpu": "gloo", "cuda": "nccl"}``."""
        return {}

    @abstractmethod
    def gather(self, what: str, value: Json, *, timeout_s: float | None = None) -> list[Json]:
        """Give `value`, return every rank's value in rank order. Collective.

        Args:
            what: the step, in words; it names the step in errors and must be equal on all ranks.
            value: JSON; a few kilobytes.
            timeout_s: seconds to wait for the others; None is the group's `timeout_s`.

        Raises:
            GroupTimeoutError: ranks are missing (`missing` names them), on every rank that took part, and on a
                late one when it arrives.
            JointError: the ranks are at different steps.
        """

    def roll_call(self, name: str, *, timeout_s: float) -> tuple[int, ...]:
        """Return the ranks that did not answer under `name` within `timeout_s` seconds.

        For finding out who is missing after something else failed: unlike `gather` it may be called by some ranks
        alone, changes nothing for the gathers that follow, and never raises for a missing rank. `name` must be used
        once.
        """
        return ()

    def token(self) -> str:
        """Return a text that is equal on ranks which are between the same two gathers, and new after each gather."""
        return ""

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Return when every rank has called. Collective; errors as in `gather`."""
        self.gather(what, None, timeout_s=timeout_s)


class DetachedGroup(Group):
    """Stands for a group that was let go: its rank and size are known, and whoever wants to gather is told.

    Args:
        group: the group that it stands for; not kept.
        what: the thing that let it go, in words.
    """

    def __init__(self, group: Group, what: str) -> None:
        self.rank = group.rank
        self.size = group.size
        self.name = group.name
        self.timeout_s = group.timeout_s
        self._what = what

    def gather(self, what: str, value: Json, *, timeout_s: float | None = None) -> list[Json]:
        """Raise: there is nobody to ask.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{what}: {self._what} has no group while its memory is detached")


class Store(ABC):
    """The few operations of a key-value store that a gather needs; torch's stores have them all."""

    @abstractmethod
    def set(self, key: str, value: str) -> None:
        """Store `value` under `key`."""

    @abstractmethod
    def get(self, key: str) -> str:
        """Return the value of a key that exists."""

    @abstractmethod
    def check(self, key: str) -> bool:
        """Return whether `key` exists, without waiting."""

    @abstractmethod
    def settle(self, key: str, value: str) -> str:
        """Store `value` unless `key` exists; return what is stored now. Atomic."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove `key`; a missing key or a store that can't delete is no error."""


class _Channel:
    """The numbered gathers of one set of ranks over one store.

    One channel exists for a process group, however many communicators use it: the number is what keeps the gathers of
    all of them apart, so it must count them all.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lock = threading.Lock()
        self._next = 0
        self._stale: list[int] = []

    @property
    def number(self) -> int:
        """Number of the next gather."""
        return self._next

    def take_number(self) -> int:
        number, self._next = self._next, self._next + 1
        return number

    def leave(self, number: int, rank: int, *, complete: bool) -> None:
        """Note that gather `number` is over here; forget older ones once nobody can still read them."""
        if complete:
            # Everyone has given a value for this gather, so everyone has left all the earlier ones.
            for old in self._stale:
                self.store.delete(f"{_PREFIX}/{old}/{rank}")
                if rank == 0:
                    self.store.delete(f"{_PREFIX}/{old}/verdict")
            self._stale.clear()
        self._stale.append(number)


class StoreGroup(Group):
    """A group whose gathers go through a `Store`.

    Args:
        channel: a store, or the channel of another group of the same ranks.
        rank: group rank of this process.
        size: number of ranks.
        name: for messages.
        timeout_s: default deadline of a gather in seconds; None is ``COMM_TIMEOUT_S``.
    """

    def __init__(
        self, channel: Store | _Channel, rank: int, size: int, *, name: str, timeout_s: float | None = None
    ) -> None:
        self.rank = rank
        self.size = size
        self.name = name
        self.timeout_s = _default_timeout_s() if timeout_s is None else timeout_s
        self._channel = channel if isinstance(channel, _Channel) else _Channel(channel)
        self._store = self._channel.store

    @property
    def store(self) -> Store:
        """The key-value store behind the gathers."""
        return self._store

    def gather(self, what: str, value: Json, *, timeout_s: float | None = None) -> list[Json]:
        """See `Group.gather`."""
        record = canonical({"what": what, "value": value})
        if self.size == 1:
            return [json.loads(record)["value"]]
        with self._channel.lock:
            return self._gather(what, record, self.timeout_s if timeout_s is None else timeout_s)

    def roll_call(self, name: str, *, timeout_s: float) -> tuple[int, ...]:
        """See `Group.roll_call`."""
        prefix = f"{_PREFIX}/roll/{name}"
        self._store.set(f"{prefix}/{self.rank}", "here")
        deadline = time.monotonic() + timeout_s
        while True:
            missing = tuple(rank for rank in range(self.size) if not self._store.check(f"{prefix}/{rank}"))
            if not missing or time.monotonic() >= deadline:
                return missing
            time.sleep(_POLL_CAP_S)

    def token(self) -> str:
        """See `Group.token`."""
        return str(self._channel.number)

    def _gather(self, what: str, record: str, seconds: float) -> list[Json]:
        number = self._channel.take_number()
        while self._missed(number, what):
            number = self._channel.take_number()
        prefix = f"{_PREFIX}/{number}"
        self._store.set(f"{prefix}/{self.rank}", record)
        records, missing = self._collect(prefix, seconds)
        given_up = f"rank {self.rank} gave up after {seconds:g} s at {what!r}: no word from {_ranks(missing)}"
        verdict = self._store.settle(f"{prefix}/verdict", given_up if missing else _OK)
        self._channel.leave(number, self.rank, complete=verdict == _OK)
        if verdict != _OK:
            own = "" if missing else f" (this is rank {self.rank}, which came too late)"
            raise GroupTimeoutError(
                what,
                tuple(missing) or (self.rank,),
                f"group {self.name!r} of {self.size} ranks: {verdict}{own}. Is that process alive, and does it make "
                "the same calls in the same order? COMM_TIMEOUT_S sets the deadline",
            )
        if missing:
            # Somebody has read every value, so every value is there: it came between our last look and the verdict.
            records = [self._store.get(f"{prefix}/{rank}") for rank in range(self.size)]
        return _same_step(self.name, [json.loads(text) for text in cast("list[str]", records)])

    def _missed(self, number: int, what: str) -> bool:
        """Return whether the others gave up gather `number` without this rank and are past it.

        It was another step then, or the same one, which they are trying again. A rank that skipped a step would
        otherwise stay one gather behind for good. One that is merely late is told so by the verdict.
        """
        verdict = f"{_PREFIX}/{number}/verdict"
        if not self._store.check(verdict) or self._store.get(verdict) == _OK:
            return False
        there = self._steps_at(number)
        return what not in there or what in self._steps_at(number + 1)

    def _steps_at(self, number: int) -> set[str]:
        """Return the steps at which the other ranks were, or are, with their gather `number`."""
        keys = [f"{_PREFIX}/{number}/{rank}" for rank in range(self.size) if rank != self.rank]
        return {str(json.loads(self._store.get(key))["what"]) for key in keys if self._store.check(key)}

    def _collect(self, prefix: str, seconds: float) -> tuple[list[str | None], list[int]]:
        """Read every rank's record; return them and the ranks that were missing at the deadline."""
        deadline = time.monotonic() + seconds
        records: list[str | None] = [None] * self.size
        pause = _POLL_FIRST_S
        while True:
            missing = [rank for rank, record in enumerate(records) if record is None]
            found = [rank for rank in missing if self._store.check(f"{prefix}/{rank}")]
            for rank in found:
                records[rank] = self._store.get(f"{prefix}/{rank}")
            if len(found) == len(missing):
                return records, []
            if found:
                pause = _POLL_FIRST_S
                continue
            if time.monotonic() >= deadline or self._store.check(f"{prefix}/verdict"):
                return records, missing
            time.sleep(pause)
            pause = min(pause * 2, _POLL_CAP_S)


def _default_timeout_s() -> float:
    try:
        return _env.timeout_s()
    except ArgumentValueError:
        # Raised here it would be raised on this rank alone. The first gather of whoever decides reports it to all.
        return 60.0


def _same_step(name: str, records: Sequence[dict[str, Json]]) -> list[Json]:
    given_up = {
        rank: str(record["value"]["error"])
        for rank, record in enumerate(records)
        if isinstance(record["value"], dict) and record["value"].get(GIVE_UP) is True
    }
    if given_up:
        raise JointError(str(records[min(given_up)]["what"]), given_up)
    steps = [str(record["what"]) for record in records]
    if len(set(steps)) > 1:
        raise JointError(
            f"group {name!r}: the ranks are at different steps",
            {rank: _where(record) for rank, record in enumerate(records)},
            hint="Every rank must make the same calls in the same order",
        )
    return [record["value"] for record in records]


def _where(record: dict[str, Json]) -> str:
    value = record["value"]
    error = value.get("error") if isinstance(value, dict) else None
    return f"at {record['what']!r}" + (f" ({error})" if error else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class MemoryStore(Store):
    """A store for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        """See `Store.set`."""
        with self._lock:
            self._values[key] = value

    def get(self, key: str) -> str:
        """See `Store.get`."""
        with self._lock:
            return self._values[key]

    def check(self, key: str) -> bool:
        """See `Store.check`."""
        with self._lock:
            return key in self._values

    def settle(self, key: str, value: str) -> str:
        """See `Store.settle`."""
        with self._lock:
            return self._values.setdefault(key, value)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        with self._lock:
            self._values.pop(key, None)

    def keys(self) -> list[str]:
        """Return the keys that exist, for tests of what is left behind."""
        with self._lock:
            return sorted(self._values)


def thread_groups(size: int, *, name: str = "threads", timeout_s: float = 10.0) -> list[StoreGroup]:
    """Return the `size` members of a group whose ranks are threads of this process.

    The in-process twin of a process group, for tests and for trying a decision without launching anything.
    """
    store = MemoryStore()
    return [StoreGroup(store, rank, size, name=name, timeout_s=timeout_s) for rank in range(size)]


def as_group(group: ProcessGroup | Group | None, *, timeout_s: float | None = None) -> Group:
    """Return `group` as a `Group`.

    Args:
        group: a torch process group that this process is a member of, a `Group`, or None for
            ``torch.distributed.group.WORLD``.
        timeout_s: default deadline of a gather in seconds; None is ``COMM_TIMEOUT_S``.

    Raises:
        ArgumentTypeError: it is something else.
        ArgumentValueError: this process is not a member, or torch.distributed is not initialized.
    """
    if isinstance(group, Group):
        return group
    from comm_core import _dist

    process_group = _dist.resolve_group(group)
    if process_group is None:
        raise ArgumentTypeError(
            f"group must be a torch.distributed process group, a comm_core Group or None, got {type(group).__name__}"
        )
    return _dist.DistGroup(process_group, timeout_s=timeout_s)
