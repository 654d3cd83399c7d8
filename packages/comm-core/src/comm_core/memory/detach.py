"""Memory that goes and comes back while its addresses stay: what a checkpoint of the process needs.

A process can't be checkpointed while it has memory of other processes mapped, and captured graphs hold addresses. So
every rank takes all of it away, the peers' and its own, and keeps the reservations; later it allocates anew and maps
everything at the same addresses. What the memory held is lost.

Both ways go step by step and in step with each other, each step ended by a joint outcome. A failure on the way leaves
the ranks' memory in different states, which nothing can mend: whoever calls this must end there (see `Lifecycle`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import cast

from comm_core._json import Json, JsonObject
from comm_core.consensus import describe, joint
from comm_core.errors import (
    ArgumentValueError,
    CheckpointError,
    ClosedError,
    CommError,
    GroupTimeoutError,
    JointError,
    JointValueError,
    UnsupportedError,
)
from comm_core.group import DetachedGroup, Group
from comm_core.memory.fd_exchange import out_of_reach
from comm_core.memory.peer import FABRIC, Mapped, PeerMemory
from comm_core.topology.facts import RankFacts
from comm_core.topology.probe import host_facts

__all__ = ["Lifecycle", "attach_jointly", "check_detachable", "detach_jointly"]


def detach_jointly(group: Group, what: str, allocations: Sequence[Mapped]) -> None:
    """Take memory away from behind its addresses, on all ranks. Collective.

    Args:
        group: the ranks.
        what: the thing that does it, in words; equal on all ranks.
        allocations: what was mapped, in the same order on all ranks; `check_detachable` has passed.

    Raises:
        JointError: a step failed on some rank. On every rank; what is mapped is then unknown.
        GroupTimeoutError: a rank did not come.
    """

    def every(step: Callable[[PeerMemory], None]) -> Callable[[], None]:
        def run() -> None:
            for item in allocations:
                step(_memory(item))

        return run

    # Nobody unmaps anything while a device still writes it, and nobody gives memory up that is mapped somewhere.
    joint(group, f"{what}: wait for the devices", every(lambda memory: memory.settle()))
    joint(group, f"{what}: unmap", every(lambda memory: memory.detach_peers()))
    joint(group, f"{what}: release", every(lambda memory: memory.detach()))


def attach_jointly(group: Group, what: str, allocations: Sequence[Mapped]) -> None:
    """Allocate memory anew and map it on all ranks, at the addresses that it had. Collective.

    Args:
        group: the ranks, in the order in which they were; it need not be the group that the memory was made with.
        what: as in `detach_jointly`.
        allocations: as in `detach_jointly`.

    Raises:
        JointError: the ranks can't share memory any more (they came back on several hosts), or a step failed on some
            rank. On every rank; what is mapped is then unknown.
        GroupTimeoutError: a rank did not come.
    """
    found = joint(group, f"{what}: look", lambda: cast("Json", asdict(host_facts())))
    hosts = [RankFacts.from_json({"rank": rank, "host": host}) for rank, host in enumerate(found)]
    if any(item.form != FABRIC for item in allocations):
        reason = out_of_reach(hosts, unknown_too=False)
        if reason is not None:
            where = {host.rank: f"host {host.host.hostname!r}" for host in hosts}
            raise JointError(f"{what}: memory can't be shared as it was: {reason}", where)
    for number, item in enumerate(allocations):
        _attach(group, f"{what}: memory {number + 1} of {len(allocations)}", item, hosts)


def _attach(group: Group, what: str, mapped: Mapped, hosts: Sequence[RankFacts]) -> None:
    memory = _memory(mapped)

    def export() -> Json:
        memory.attach()
        value = memory.export([host.host for host in hosts])
        memory.exported = True
        return value

    def map_again() -> None:
        addresses = memory.map(exports)
        # Before anything is written: captured graphs and tables hold the old ones.
        if addresses != mapped.addresses:
            raise CommError(f"memory came back at other addresses: {addresses}, and was at {mapped.addresses}")

    try:
        exports = cast("list[JsonObject]", joint(group, f"{what}, allocate and export", export))
        joint(group, f"{what}, exchange", lambda: memory.exchange(exports, group.timeout_s))
        joint(group, f"{what}, map", map_again)
    finally:
        memory.withdraw()


def _memory(mapped: Mapped) -> PeerMemory:
    assert mapped.memory is not None
    return mapped.memory


class Lifecycle:
    """Whether memory is there, and who may do what when: attached, detached, failed, closed.

    ``checkpoint_prepare`` goes from attached to detached, ``checkpoint_restore`` back; an exception on the way ends
    in failed, and `close` ends everything from every state.

    Each transition is agreed by the group before anything is touched: ranks that are at different calls, in different
    states, or that mean different memory, all raise, and nothing has changed. Once it has begun, an exception is
    final.

    Args:
        what: the thing, in words; equal on all ranks.
        group: the ranks.
        key: a text that is equal on all ranks and different for any other thing of these ranks.

    Attributes:
        group: the ranks; while detached, and after a failure, one that knows only rank and size.
        state: ``"attached"``, ``"detached"``, ``"failed"`` or ``"closed"``.
        cause: what failed, and what to do.
        cycles: how often it was restored.
    """

    def __init__(self, what: str, group: Group, key: str) -> None:
        self.what = what
        self.key = key
        self.group: Group = group
        self.state = "attached"
        self.cause = ""
        self.cycles = 0

    def check(self, operation: str) -> None:
        """Raise unless the memory is there.

        Raises:
            ClosedError: it was closed.
            CheckpointError: it is detached, or a transition failed.
        """
        if self.state == "closed":
            raise ClosedError(f"{operation}: {self.what} is closed")
        if self.state == "failed":
            raise CheckpointError(f"{operation}: {self.cause}")
        if self.state == "detached":
            raise CheckpointError(
                f"{operation}: {self.what} is detached since checkpoint_prepare; call checkpoint_restore on every "
                "rank first"
            )

    def prepare(self, ready: Callable[[], None], detach: Callable[[Group], None]) -> bool:
        """Detach. Collective; nothing happens where that is the state already.

        Args:
            ready: raises where this rank must not do it now; nothing has been touched then.
            detach: does it.

        Returns:
            Whether anything was done.

        Raises:
            ClosedError: it was closed.
            CheckpointError: it failed now, or earlier: it is of no more use.
            JointError: a rank is not ready, or the ranks don't mean the same. On every rank; nothing has changed.
            GroupTimeoutError: a rank did not come; nothing has changed.
        """
        operation = "checkpoint_prepare"
        if self.state == "detached":
            return False
        self.check(operation)
        self._agree(self.group, operation, ready)
        with self._final(operation):
            detach(self.group)
        # Not kept: it may be destroyed before the process is checkpointed.
        self.group = DetachedGroup(self.group, self.what)
        self.state = "detached"
        return True

    def restore(self, group: Group, ready: Callable[[], None], attach: Callable[[Group], None]) -> bool:
        """Attach, with a group of the same ranks. Collective; nothing happens where that is the state already.

        Args:
            group: the ranks; its rank and size must be those of the original one.
            ready: as in `prepare`.
            attach: does it.

        Returns:
            Whether anything was done.

        Raises:
            ArgumentValueError: the group has another size; nothing was communicated.
            ClosedError: it was closed.
            CheckpointError: it failed now, or earlier: it is of no more use.
            JointValueError: a rank has another place in the group. On every rank; nothing has changed.
            JointError: a rank is not ready, or the ranks don't mean the same. On every rank; nothing has changed.
            GroupTimeoutError: a rank did not come. Before the first change that changes nothing.
        """
        operation = "checkpoint_restore"
        if self.state != "detached":
            self.check(operation)
        if group.size != self.group.size:
            raise ArgumentValueError(
                f"{operation}: {self.what} was made by {self.group.size} ranks, and the new group has {group.size}"
            )
        if not self._agree(group, operation, ready):
            return False
        with self._final(operation):
            attach(group)
        self.group = group
        self.state = "attached"
        self.cycles += 1
        return True

    def close(self) -> str:
        """Note the end; return the state before it."""
        before, self.state = self.state, "closed"
        return before

    def _agree(self, group: Group, operation: str, ready: Callable[[], None]) -> bool:
        """Return whether every rank is to go on; raise, on every rank, where they don't agree."""
        what = f"{operation} of {self.what}"

        def mine() -> JsonObject:
            ready()
            return {"was": self.group.rank, "is": [self.state, self.cycles, self.key]}

        records = cast("list[Mapping[str, Json]]", joint(group, what, mine))
        moved = {
            rank: f"was rank {record['was']}, and is rank {rank} of this group"
            for rank, record in enumerate(records)
            if record["was"] != rank
        }
        if moved:
            raise JointValueError(f"{what}: the ranks must be in the order that they were in", moved)
        states = [cast("list[Json]", record["is"]) for record in records]
        if any(state != states[0] for state in states):
            per_rank = {
                rank: f"{state}, restored {cycles} times, memory {str(key)[:8]}"
                for rank, (state, cycles, key) in enumerate(states)
            }
            raise JointError(f"{what}: the ranks don't mean the same", per_rank)
        return operation == "checkpoint_prepare" or self.state == "detached"

    def _final(self, operation: str) -> _Final:
        return _Final(self, operation)


class _Final:
    """A transition under way: an exception ends the lifecycle, and says so."""

    def __init__(self, lifecycle: Lifecycle, operation: str) -> None:
        self._lifecycle = lifecycle
        self._operation = operation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        own = self._lifecycle
        own.state = "failed"
        # Where this rank failed itself and others did not even answer, who they are is not in its own error.
        missing = error.__cause__ if isinstance(error.__cause__, GroupTimeoutError) else None
        also = "" if missing is None else f" (and {missing})"
        own.cause = (
            f"{self._operation} of {own.what} failed half-way: {describe(error)}{also}. What is mapped on which rank "
            "is unknown, so this can't be used, tried again or restored: close it, and restart the processes"
        )
        own.group = DetachedGroup(own.group, own.what)
        if isinstance(error, Exception):
            raise CheckpointError(own.cause) from error


def check_detachable(allocations: Sequence[Mapped]) -> None:
    """Raise where memory can't be detached.

    Raises:
        UnsupportedError: memory of its form has no addresses without memory.
    """
    fixed = sorted({item.form for item in allocations if item.memory is None or not item.memory.detachable})
    if fixed:
        raise UnsupportedError(f"memory of the form {', '.join(fixed)} can't be detached from its addresses")
