"""Memory that every rank can write, in one of several forms, set up and taken down by the whole group in step.

| form | memory | what travels | needs |
|---|---|---|---|
| ``in_process`` | a torch allocation | plain addresses | ranks that are threads of one process |
| ``vmm_fd`` | ``cuMemCreate`` | file descriptors over unix sockets | CUDA VMM, one network or mount namespace |
| ``cuda_ipc`` | ``cudaMalloc`` | legacy IPC handles, through the group | one PID namespace |
| ``vmm_fabric`` | ``cuMemCreate`` | 64 bytes through the group | one NVLink fabric, on one host or several |
| ``host_fd`` | ``memfd_create`` | file descriptors over unix sockets | as ``vmm_fd`` |

The last two are used only where they are asked for by name: looking for a fabric allocates, and no group of one host
needs it; and memory of the host is no device memory.

Two rules hold for all of them. A rank's own address is its own allocation, never an import of it. And memory is freed
only after every rank has waited for its device and has unmapped it: each of the three is agreed by the group before
the next. Where that can't be agreed, because a rank is missing, what that rank may still write is kept until the
process ends. Nothing is released by a finalizer or at exit; an object that is dropped unreleased only warns.
"""

from __future__ import annotations

import importlib
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TypeVar, cast

from comm_core._json import Json, JsonObject
from comm_core.consensus import Transaction, describe
from comm_core.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CommError,
    JointError,
    JointValueError,
    UnsupportedError,
)
from comm_core.memory.fd_exchange import out_of_reach
from comm_core.topology.facts import HostFacts, RankFacts
from comm_core.topology.predicates import cuda_ipc_reachable, single_host
from comm_core.topology.probe import host_facts

if TYPE_CHECKING:
    import torch

__all__ = [
    "AUTO",
    "FABRIC",
    "FORMS",
    "HOST",
    "FormChoice",
    "Mapped",
    "MemoryFacts",
    "PeerMemory",
    "choose_form",
    "map_jointly",
    "probe_memory",
    "unmap_each",
]

_T = TypeVar("_T")

AUTO = "auto"
"""Means the first form of `FORMS` that the group can use."""

FORMS = ("in_process", "vmm_fd", "cuda_ipc")
"""Forms that are looked for, in the order in which they are preferred."""

FABRIC = "vmm_fabric"
"""The form of device memory that is used only by name."""

HOST = "host_fd"
"""Memory of the host. It must be asked for by name: whoever wants device memory must never get it."""

_CLASSES = {
    "in_process": ("comm_core.memory.in_process", "InProcessMemory"),
    "vmm_fd": ("comm_core.memory.vmm", "VmmMemory"),
    "cuda_ipc": ("comm_core.memory.cuda_ipc", "CudaIpcMemory"),
    FABRIC: ("comm_core.memory.vmm_fabric", "VmmFabricMemory"),
    HOST: ("comm_core.memory.host_fd", "HostFdMemory"),
}


class PeerMemory(ABC):
    """This rank's end of one joint allocation in one form. Every method is local; the order is `map_jointly`'s.

    What releases something does nothing where there is nothing to release, and after a failure it may be called
    again: what was released stays so. The calling thread's current device is the same before and after each call.

    Class attributes:
        name: of the form.
        detachable: whether memory can be taken away from behind its addresses and brought back (`detach`, `attach`).

    Attributes:
        device: this rank's.
        own: address of this rank's memory, 0 while there is none.
        nbytes: its size.
        exported: whether peers have, or may have, what it takes to write it.
        kept: whether it is kept on purpose because a peer may still write it.
    """

    name: ClassVar[str]
    detachable: ClassVar[bool] = False

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device = device
        self.rank = rank
        self.own = 0
        self.nbytes = 0
        self.exported = False
        self.kept = False

    @classmethod
    @abstractmethod
    def probe(cls, device: torch.device, *, trial: bool) -> int:
        """Return what sizes must be a multiple of, in bytes.

        Args:
            device: this rank's.
            trial: whether to try it out as well, with a little memory that is released again.

        Raises:
            CommError: this rank can't use the form on `device`.
        """

    def arrange(self, world_size: int, stride: int) -> None:
        """Before `allocate`: place the memory of `world_size` ranks at addresses that are `stride` bytes apart.

        Raises:
            UnsupportedError: memory of this form lies where it lies.
        """
        raise UnsupportedError(f"memory of the form {self.name!r} can't be placed at chosen addresses")

    @abstractmethod
    def allocate(self, nbytes: int) -> None:
        """Allocate this rank's memory; its content is undefined."""

    @abstractmethod
    def export(self, hosts: Sequence[HostFacts]) -> JsonObject:
        """Return what the peers need to map this rank's memory."""

    def exchange(self, exports: Sequence[JsonObject], timeout_s: float) -> None:  # noqa: B027 - most forms send JSON
        """Pass on what does not travel as JSON; at the same time on all ranks."""

    @abstractmethod
    def map(self, exports: Sequence[JsonObject]) -> tuple[int, ...]:
        """Map every other rank's memory; return the addresses of all ranks' memory in rank order.

        What was mapped before a failure is left to `unmap`.
        """

    @abstractmethod
    def settle(self) -> None:
        """Wait until this rank's device has done all work that was given to it."""

    @abstractmethod
    def unmap(self) -> None:
        """Unmap what `map` mapped, and close what `exchange` received and `map` did not use."""

    def withdraw(self) -> None:  # noqa: B027 - most forms hold nothing
        """Close what this rank holds open only for the peers to get it."""

    @abstractmethod
    def free(self) -> None:
        """Free this rank's memory."""

    def detach_peers(self) -> None:
        """Take every peer's memory away from behind its addresses, which stay this process's.

        Raises:
            UnsupportedError: memory of this form has no addresses without memory.
        """
        raise UnsupportedError(f"memory of the form {self.name!r} can't be detached from its addresses")

    def detach(self) -> None:
        """Give this rank's own memory up and keep its addresses; errors as in `detach_peers`."""
        raise UnsupportedError(f"memory of the form {self.name!r} can't be detached from its addresses")

    def attach(self) -> None:
        """Allocate this rank's memory anew, at its addresses. `export`, `exchange` and `map` follow as at first."""
        raise UnsupportedError(f"memory of the form {self.name!r} can't be detached from its addresses")

    def drop(self) -> None:
        """Free this rank's memory unless peers may have it; then note that it is kept.

        The group frees exported memory as the undoing of the export. Where it is still there after that, the export
        was not undone but abandoned.
        """
        self.withdraw()
        if self.exported and self.own:
            self.kept = True
        else:
            self.free()

    def __del__(self) -> None:
        """Warn where memory was forgotten."""
        if getattr(self, "own", 0) and not self.kept:
            warnings.warn(
                f"{self.nbytes} bytes of peer memory ({self.name}, {self.device}) were never released: close the "
                "teardown of the transaction that they belong to",
                ResourceWarning,
                stacklevel=1,
                source=self,
            )


def unmap_each(mapped: dict[int, _T], unmap: Callable[[_T], None]) -> None:
    """Unmap every peer's memory and forget it. What fails stays in `mapped`, to be tried again.

    Raises:
        CommError: some could not be unmapped; the others were.
    """
    failed: list[str] = []
    for peer, mapping in list(mapped.items()):
        try:
            unmap(mapping)
        except CommError as error:
            failed.append(f"the memory of rank {peer} can't be unmapped: {error}")
        else:
            del mapped[peer]
    if failed:
        raise CommError("; ".join(failed))


def _form(name: str) -> type[PeerMemory]:
    module, cls = _CLASSES[name]
    return cast("type[PeerMemory]", getattr(importlib.import_module(module), cls))


@dataclass(frozen=True)
class MemoryFacts:
    """What decides how one rank can share memory; gathered, then given to `choose_form`.

    Attributes:
        rank: group rank.
        host: where the process runs.
        pid: process id in its own PID namespace.
        device: ``"cuda:1"`` or ``"cpu"``.
        granules: form -> what sizes must be a multiple of, for the forms that this rank can use.
        refusals: form -> why this rank can't use it. A form that is in neither was not looked at.
    """

    rank: int
    host: HostFacts
    pid: int
    device: str
    granules: Mapping[str, int] = field(default_factory=dict[str, int])
    refusals: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_json(self) -> JsonObject:
        """Return the JSON form."""
        return cast("JsonObject", asdict(self))

    @classmethod
    def from_json(cls, value: Json) -> MemoryFacts:
        """Read the JSON form.

        Raises:
            ValueError: it has another shape.
        """
        if not isinstance(value, Mapping) or not isinstance(value.get("rank"), int):
            raise ValueError(f"MemoryFacts: expected a JSON object with a rank, got {value!r}")
        host = RankFacts.from_json({"rank": value["rank"], "host": value.get("host", {})}).host
        return cls(
            cast("int", value["rank"]),
            host,
            cast("int", value.get("pid", 0)),
            str(value.get("device", "")),
            dict(cast("Mapping[str, int]", value.get("granules", {}))),
            dict(cast("Mapping[str, str]", value.get("refusals", {}))),
        )


def probe_memory(
    rank: int, device: torch.device, *, forms: Sequence[str] = FORMS, trial: bool = False
) -> MemoryFacts:
    """Return what this rank finds out about sharing memory of `device`. Local; never raises for a form.

    Args:
        rank: group rank.
        device: this rank's, with an explicit ordinal.
        forms: the forms to look at.
        trial: whether to try forms out with a little memory: what a driver says it can do may be forbidden in a
            container, and only trying shows it. Without it nothing is allocated.
    """
    granules: dict[str, int] = {}
    refusals: dict[str, str] = {}
    for name in forms:
        try:
            granules[name] = _form(name).probe(device, trial=trial)
        except Exception as error:
            refusals[name] = describe(error)
    return MemoryFacts(rank, host_facts(), os.getpid(), str(device), granules, refusals)


class FormChoice(NamedTuple):
    """The outcome of `choose_form`.

    Attributes:
        form: one of `FORMS`, or None where the group can use none.
        reason: what was found, or why there is none; with the reasons against forms that were passed over.
    """

    form: str | None
    reason: str


def choose_form(facts: Sequence[MemoryFacts], requested: str = AUTO) -> FormChoice:
    """Return the form in which the ranks can share memory. Pure: equal on all ranks for equal arguments.

    Args:
        facts: every rank's, in rank order.
        requested: `AUTO`, one of `FORMS`, or `FABRIC`. For a form by name, what is unknown about a host is left to
            the attempt, which fails on all ranks together; otherwise unknown counts as no.
    """
    if requested != AUTO:
        reason = _against(requested, facts, unknown_too=False)
        return FormChoice(requested, "as requested") if reason is None else FormChoice(None, reason)
    passed_over: list[str] = []
    for form in FORMS:
        # One rank has no peers to be in one process with, and its memory should be as in any other group.
        if form == "in_process" and len(facts) == 1 and facts[0].device != "cpu":
            continue
        reason = _against(form, facts, unknown_too=True)
        if reason is None:
            return FormChoice(form, "; ".join([f"{form} works on all ranks", *passed_over]))
        passed_over.append(f"not {form}: {reason}")
    return FormChoice(None, "; ".join(passed_over))


def _against(form: str, facts: Sequence[MemoryFacts], *, unknown_too: bool) -> str | None:
    """Return why the ranks can't use a form, or None."""
    between = _between(form, facts, unknown_too=unknown_too) if len(facts) > 1 else None
    if between is not None:
        return between
    refused = [item for item in facts if form not in item.granules]
    return "; ".join(f"rank {item.rank}: {item.refusals.get(form, 'not looked at')}" for item in refused) or None


def _between(form: str, facts: Sequence[MemoryFacts], *, unknown_too: bool) -> str | None:
    """Return what stands between the ranks' processes, or None."""
    processes = {(item.host.boot_id, item.host.pid_namespace, item.pid) for item in facts}
    ranks = [RankFacts(item.rank, item.host) for item in facts]
    if form == "in_process":
        devices = {item.device for item in facts}
        if len(processes) > 1:
            return f"the ranks are {len(processes)} processes"
        return f"the ranks use different devices ({', '.join(sorted(devices))})" if len(devices) > 1 else None
    if form == FABRIC:
        return None  # Who asks for it has looked at the fabric, and the imports decide.
    if form in ("vmm_fd", HOST):
        return out_of_reach(ranks, unknown_too=unknown_too)
    if len(processes) < len(facts):
        return "CUDA does not map memory into the process that exported it. Ranks must be processes of their own"
    hosts = [rank for rank in ranks if unknown_too or rank.host.boot_id]
    namespaces = [rank for rank in ranks if unknown_too or rank.host.pid_namespace]
    return single_host(hosts) or cuda_ipc_reachable(namespaces)


@dataclass(frozen=True)
class Mapped:
    """Memory of the same size on every rank, mapped on all of them.

    It is released by the teardown of the transaction that it was made in.

    Attributes:
        addresses: of all ranks' memory in rank order, valid in this process for this rank's device; this rank's own
            at the position of its rank.
        nbytes: of each rank's memory; what was asked for, rounded up alike on all ranks.
        form: one of `FORMS`, or `FABRIC`.
        reason: why that one.
        number: as it was passed.
        stride: bytes from one rank's memory to the next one's; 0 where they were not asked for.
        memory: what this rank holds of it, for who takes it away and brings it back.
    """

    addresses: tuple[int, ...]
    nbytes: int
    form: str
    reason: str = ""
    number: int | None = None
    stride: int = 0
    memory: PeerMemory | None = field(default=None, repr=False, compare=False)


def map_jointly(
    stages: Transaction,
    nbytes: int,
    device: torch.device,
    *,
    form: str = AUTO,
    what: str = "memory",
    number: int | None = None,
    stride: int = 0,
    timeout_s: float | None = None,
) -> Mapped:
    """Allocate memory on every rank and map it on all ranks, as steps of `stages`. Collective.

    The content is undefined. Whoever ends the transaction decides how long the memory lives: until the teardown that
    `Transaction.commit` returns is closed.

    Args:
        stages: the transaction; a failure on any rank takes its steps down on all ranks.
        nbytes: bytes of each rank's memory, equal on all ranks; at least 1.
        device: this rank's, with an explicit ordinal.
        form: `AUTO`, one of `FORMS`, or `FABRIC`, or on a CPU `HOST`; equal on all ranks.
        what: the memory, in words, for the names of steps; unique in the transaction and equal on all ranks.
        number: of the allocation, equal on all ranks: what tells joint allocations apart.
        stride: bytes from one rank's memory to the next one's on every rank, rounded up to what is possible and at
            least the memory itself; 0 for wherever it comes to lie. Only forms of virtual memory can.
        timeout_s: seconds that passing file descriptors may take; None is the group's `timeout_s`.

    Raises:
        JointValueError: an argument that can't be used, or ranks that passed different ones. On every rank.
        JointError: the ranks can't share memory in this form, or a step failed on some rank. On every rank.
        GroupTimeoutError: a rank did not come.
    """
    group = stages.group
    seconds = group.timeout_s if timeout_s is None else timeout_s

    def look() -> JsonObject:
        _check(nbytes, device, form)
        looked_at = FORMS if form == AUTO else (form,)
        facts = probe_memory(group.rank, device, forms=looked_at, trial=form == AUTO)
        if form in facts.refusals:
            raise UnsupportedError(facts.refusals[form])  # Asked for by name, so this rank alone decides.
        request: JsonObject = {"nbytes": nbytes, "form": form, "number": number, "stride": stride}
        return {"facts": facts.to_json(), "request": request}

    _, records = stages.step_shared(f"look at {what}", look, _same)
    facts = _agreed(what, cast("list[Mapping[str, Json]]", records))
    chosen, reason = choose_form(facts, form)
    if chosen is None:
        where = {item.rank: f"{item.device} on host {item.host.hostname!r}, process {item.pid}" for item in facts}
        raise JointError(f"{what} can't be shared in the form {form!r}: {reason}", where)
    granule = math.lcm(*(item.granules[chosen] for item in facts))
    size = -(-nbytes // granule) * granule
    apart = max(-(-stride // granule) * granule, size) if stride else 0

    def allocate() -> PeerMemory:
        memory = _form(chosen)(device, group.rank)
        if apart:
            memory.arrange(group.size, apart)
        memory.allocate(size)
        return memory

    # Steps are taken down in reverse order: all ranks wait for their devices, then all unmap, then all free. What
    # unmaps belongs to the step before the mapping, because a mapping that fails half-way leaves something to unmap.
    memory = stages.step(f"allocate {what}", allocate, PeerMemory.drop)

    def export() -> JsonObject:
        value = memory.export([item.host for item in facts])
        memory.exported = True
        return value

    _, exports = stages.step_shared(f"export {what}", export, _same, lambda _: memory.free(), shared_bytes=size)
    shared = cast("list[JsonObject]", exports)
    stages.step(f"exchange {what}", lambda: memory.exchange(shared, seconds), lambda _: memory.unmap())
    addresses = stages.step(f"map {what}", lambda: memory.map(shared), lambda _: memory.settle())
    return Mapped(addresses, size, chosen, reason, number, apart, memory)


def _same(value: JsonObject) -> Json:
    return value


def _check(nbytes: object, device: torch.device, form: object) -> None:
    """Raise where an argument can't be used."""
    if not isinstance(nbytes, int) or isinstance(nbytes, bool):
        raise ArgumentTypeError(f"nbytes must be an int, got {nbytes!r} ({type(nbytes).__name__})")
    if nbytes < 1:
        raise ArgumentValueError(f"nbytes must be at least 1, got {nbytes}")
    if device.type == "cuda" and cast("int | None", device.index) is None:
        raise ArgumentValueError(f"device must have an explicit ordinal, got {str(device)!r}")
    if form != AUTO and form not in _CLASSES:
        raise ArgumentValueError(f"form must be {AUTO!r} or one of {', '.join(_CLASSES)}, got {form!r}")


def _agreed(what: str, records: Sequence[Mapping[str, Json]]) -> list[MemoryFacts]:
    """Return every rank's facts; raise, on every rank alike, where the ranks asked for different things."""
    requests = [cast("Mapping[str, Json]", record["request"]) for record in records]
    if any(request != requests[0] for request in requests):
        texts = {rank: ", ".join(f"{key}={item[key]!r}" for key in item) for rank, item in enumerate(requests)}
        raise JointValueError(f"{what}: the ranks asked for different memory", texts)
    try:
        return [MemoryFacts.from_json(record["facts"]) for record in records]
    except ValueError as error:
        raise CommError(f"{what}: the ranks' facts can't be read ({error}); do their versions differ?") from error
