"""A transport that fails on purpose: at a chosen stage, on a chosen rank, in a chosen way.

Its exchanges are right: they run over torch.distributed. Around them it acts out everything that a real transport
does (a build, shared memory, mappings of the peers' memory, arming, a self-test by value) with stand-ins that leak
like the real ones: every mapping is an open file, and every acquisition and release is in a ledger with its time.

In each rank of a test::

    with installed(dist.get_rank(group), [Fault("map", rank=1, kind="raise")]) as injector:
        try:
            UlyssesCommunicator(group, max_bytes=1 << 16, dtype=torch.float32, backend="fake")
        finally:
            assert injector.ledger.held() == []
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import torch

from comm_core import plugins
from comm_core._json import JsonObject
from comm_core.errors import ArgumentValueError, TransportError
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.transport.dist import DistSession
from comm_core.transport.interface import ProbeContext, Request, Staging, Transport, TransportSession, Verdict
from comm_core.transport.plan import Copy, Plan

if TYPE_CHECKING:
    from comm_core.consensus import Teardown, Transaction
    from comm_core.topology.facts import RankFacts

__all__ = [
    "EXIT_CODE",
    "KINDS",
    "STAGES",
    "Event",
    "Fault",
    "FaultyTransport",
    "InjectedError",
    "Injector",
    "Ledger",
    "every_fault",
    "installed",
]

Stage = Literal[
    "import", "request", "probe", "assess", "open", "build", "allocate", "map", "arm", "selftest", "exchange", "close"
]
Kind = Literal["raise", "exit", "hang", "system_exit", "wrong_data", "late"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""Where a fault can be, in the order in which a transport passes through them:

``import``: loading the plugin. ``request``: what the first gather asks the descriptor for. ``probe`` and ``assess``:
the transport's own. ``open``: in `Transport.open`, between two steps. ``build`` to ``selftest``: in a step of the
opening; ``map`` is passed once for each peer. ``exchange``: in each exchange. ``close``: while memory is released.
"""

KINDS: tuple[Kind, ...] = get_args(Kind)
"""What a fault does: raise `InjectedError`, end the process at once, sleep for ever, raise `SystemExit`, go on with
data that is wrong, or sleep for a while and go on."""

EXIT_CODE = 41
"""Exit code of a process that a fault of kind ``"exit"`` has ended."""

_NO_DATA: tuple[Stage, ...] = ("import", "open", "close")
_WINDOW_BYTES = 4096
_SELF_TEST_BYTES = 64


class InjectedError(RuntimeError):
    """A fault of kind ``"raise"``. Deliberately no `CommError`: real failures are of any type."""


@dataclass(frozen=True)
class Fault:
    """One fault; a plain record that can be sent to the ranks.

    Attributes:
        stage: one of `STAGES`.
        rank: group rank on which it happens.
        kind: one of `KINDS`. There is no ``"wrong_data"`` where a stage makes no data (import, open, close).
        after: passes through the stage that go well before it.
        times: passes that it spoils; 0 is all that follow.
        delay_s: seconds of sleep of kind ``"late"``.
    """

    stage: Stage
    rank: int
    kind: Kind
    after: int = 0
    times: int = 1
    delay_s: float = 0.5

    def __post_init__(self) -> None:
        if (
            self.stage not in STAGES
            or self.kind not in KINDS
            or (self.kind == "wrong_data" and self.stage in _NO_DATA)
        ):
            raise ArgumentValueError(f"there is no fault of kind {self.kind!r} at stage {self.stage!r}")
        if min(self.rank, self.after, self.times) < 0:
            raise ArgumentValueError(f"rank, after and times can't be negative: {self}")

    def hits(self, passed: int) -> bool:
        """Return whether it spoils a pass through its stage that comes after `passed` others."""
        return passed >= self.after and (self.times == 0 or passed < self.after + self.times)


def every_fault(world_size: int, *, stages: Sequence[Stage] = STAGES, kinds: Sequence[Kind] = KINDS) -> list[Fault]:
    """Return every fault of those stages and kinds, on every rank."""
    return [
        Fault(stage, rank, kind)
        for stage, kind, rank in itertools.product(stages, kinds, range(world_size))
        if not (kind == "wrong_data" and stage in _NO_DATA)
    ]


class Event(NamedTuple):
    """An acquisition or release.

    Attributes:
        action: ``"acquire"`` or ``"release"``.
        resource: what, for example ``"window"`` or ``"mapping of rank 1"``.
        time_s: when, on a clock that all processes of a host share.
    """

    action: str
    resource: str
    time_s: float


@dataclass
class Ledger:
    """What the transport holds on this rank, and everything that it ever held."""

    events: list[Event] = field(default_factory=list[Event])

    def acquire(self, resource: str) -> None:
        """Note an acquisition."""
        self.events.append(Event("acquire", resource, time.monotonic()))

    def release(self, resource: str) -> None:
        """Note a release.

        Raises:
            AssertionError: the resource is not held: it was released twice, or never acquired.
        """
        if resource not in self.held():
            raise AssertionError(f"{resource!r} is released and not held: {self.events}")
        self.events.append(Event("release", resource, time.monotonic()))

    def held(self) -> list[str]:
        """Return what is held, in the order of acquisition; empty where nothing leaks."""
        held: list[str] = []
        for action, resource, _ in self.events:
            if action == "acquire":
                held.append(resource)
            else:
                held.remove(resource)
        return held


class Injector:
    """The faults of this rank, and what its transport has done so far."""

    def __init__(self, rank: int, faults: Sequence[Fault]) -> None:
        self.rank = rank
        self.ledger = Ledger()
        self.passes: dict[Stage, int] = dict.fromkeys(STAGES, 0)
        self._faults = [fault for fault in faults if fault.rank == rank]

    def has(self, stage: Stage, kind: Kind) -> bool:
        """Return whether this rank has such a fault."""
        return any(fault.stage == stage and fault.kind == kind for fault in self._faults)

    def fire(self, stage: Stage) -> bool:
        """Pass through `stage`: act out the fault that is there, if any; return whether the data must be wrong."""
        passed = self.passes[stage]
        self.passes[stage] += 1
        wrong = False
        for fault in self._faults:
            if fault.stage == stage and fault.hits(passed):
                wrong |= _act(fault)
        return wrong


def _act(fault: Fault) -> bool:
    match fault.kind:
        case "raise":
            error = TransportError if fault.stage == "exchange" else InjectedError
            raise error(f"injected fault at {fault.stage} on rank {fault.rank}")
        case "system_exit":
            raise SystemExit(f"injected exit at {fault.stage} on rank {fault.rank}")
        case "exit":
            os._exit(EXIT_CODE)
        case "hang":
            while True:
                time.sleep(3600)
        case "late":
            time.sleep(fault.delay_s)
        case "wrong_data":
            return True
    return False


@dataclass
class _Memory:
    """A stand-in for memory that peers map: its handle is what they need, its file what leaks."""

    handle: str
    file: int


class FaultyTransport(Transport):
    """The transport ``"fake"``, over a group with gloo or NCCL.

    Args:
        injector: this rank's faults.
        name: of the transport.
        priority: as in `Transport`.
    """

    version = "1.0"
    experimental = False

    def __init__(self, injector: Injector, *, name: str = "fake", priority: int = 0) -> None:
        self.name = name
        self._injector = injector
        self._priority = priority
        self._windows = itertools.count()
        self.wire = 2 if injector.has("request", "wrong_data") else 1

    @property
    def priority(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The priority: a descriptor may compute what it is asked for, so asking for it is the stage ``request``."""
        self._injector.fire("request")
        return self._priority

    def probe(self, context: ProbeContext) -> JsonObject:
        """See `Transport.probe`."""
        if self._injector.fire("probe"):
            return cast("JsonObject", {"answer": object()})
        return {"answer": context.rank}

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`: eligible where every rank's probe has answered."""
        wrong = self._injector.fire("assess")
        for rank, item in enumerate(facts):
            part = item.plugins.get(self.name)
            if not isinstance(part, Mapping) or part.get("answer") != rank:
                return Verdict(False, f"rank {rank}: the probe of {self.name!r} gave {part!r}")
        reason = f"all {request.world_size} ranks answered"
        return Verdict(True, f"{reason} (or so rank {self._injector.rank} thinks)" if wrong else reason)

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> FaultySession:
        """See `Transport.open`."""
        opening = _Opening(self._injector, stages, next(self._windows), device)
        return opening.run()


class _Opening:
    """The steps of one opening on one rank."""

    def __init__(self, injector: Injector, stages: Transaction, number: int, device: torch.device) -> None:
        self._injector = injector
        self._ledger = injector.ledger
        self._stages = stages
        self._rank, self._size = stages.group.rank, stages.group.size
        self._number = number
        self._device = device

    def run(self) -> FaultySession:
        _, keys = self._stages.step_shared("build", self._build, lambda key: key, self._unload)
        self._equal("build", keys)
        _, handles = self._stages.step_shared(
            "allocate", self._allocate, lambda memory: memory.handle, self._free, shared_bytes=_WINDOW_BYTES
        )
        self._injector.fire("open")
        self._stages.step("map", lambda: self._map(cast("list[str]", handles)), self._unmap)
        _, epochs = self._stages.step_shared("arm", self._arm, lambda epoch: epoch, self._disarm)
        self._equal("arm", epochs)
        session = FaultySession(self._injector, self._stages, self._device)
        # Two steps: what can fail on one rank alone is agreed before any rank enters the exchange and waits in it.
        wrong = self._stages.step("selftest", lambda: self._injector.fire("selftest"))
        self._stages.step("selftest by value", lambda: session.self_test(wrong))
        return session

    def _equal(self, stage: str, values: Sequence[Any]) -> None:
        """Raise, on every rank alike and between two steps, where the ranks shared different values."""
        if len(set(values)) > 1:
            texts = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise TransportError(f"{stage}: the ranks have different values ({texts})")

    def _build(self) -> str:
        wrong = self._injector.fire("build")
        self._ledger.acquire("module")
        return "another key" if wrong else "key"

    def _unload(self, key: str) -> None:
        self._ledger.release("module")

    def _allocate(self) -> _Memory:
        wrong = self._injector.fire("allocate")
        memory = _Memory(self._handle(self._rank, wrong), os.memfd_create("comm-fake-window"))
        os.ftruncate(memory.file, _WINDOW_BYTES)
        self._ledger.acquire("window")
        return memory

    def _handle(self, rank: int, wrong: bool = False) -> str:
        return f"window {self._number} of rank {'?' if wrong else rank}"

    def _free(self, memory: _Memory) -> None:
        self._injector.fire("close")
        os.close(memory.file)
        self._ledger.release("window")

    def _map(self, handles: Sequence[str]) -> list[tuple[str, int]]:
        mapped: list[tuple[str, int]] = []
        try:
            for peer in range(self._size):
                if peer == self._rank:
                    continue
                wrong = self._injector.fire("map")
                if handles[peer] != self._handle(peer) or wrong:
                    raise TransportError(f"{handles[peer]!r} can't be mapped as the window of rank {peer}")
                resource = f"mapping of rank {peer}"
                self._ledger.acquire(resource)
                mapped.append((resource, os.memfd_create("comm-fake-mapping")))
        except BaseException:
            # The step takes down what it returned; what a step that failed half-way holds is its own to release.
            self._unmap(mapped)
            raise
        return mapped

    def _unmap(self, mapped: Sequence[tuple[str, int]]) -> None:
        for resource, file in reversed(mapped):
            os.close(file)
            self._ledger.release(resource)

    def _arm(self) -> int:
        wrong = self._injector.fire("arm")
        self._ledger.acquire("armed")
        return 1 if wrong else 0

    def _disarm(self, epoch: int) -> None:
        self._ledger.release("armed")


class FaultySession(TransportSession):
    """A session of `FaultyTransport`: torch.distributed's, with faults in `exchange` and `close`."""

    def __init__(self, injector: Injector, stages: Transaction, device: torch.device) -> None:
        self._injector = injector
        self._inner = DistSession(stages.group, device)
        self._teardown: Teardown = stages.teardown
        self._rank, self._size = stages.group.rank, stages.group.size
        self._device = device
        self.properties = replace(self._inner.properties, shared_resources=True)

    def self_test(self, wrong: bool) -> None:
        """Exchange known bytes with every rank and compare them; with `wrong`, after one of them has changed."""
        n = _SELF_TEST_BYTES
        copies = [Copy(peer, 0, peer * n, self._rank * n, (), n) for peer in range(self._size)]
        arrivals = [Copy(peer, 0, self._rank * n, peer * n, (), n) for peer in range(self._size)]
        plan = Plan("selftest", self._rank, self._size, tuple(copies), tuple(arrivals), 1, self._size * n)
        # Byte i of the piece from rank s to rank r is s + 16 * r + i.
        ranks, places = torch.arange(self._size), torch.arange(n)
        send = (self._rank + 16 * ranks[:, None] + places).to(torch.uint8).to(self._device)
        expected = (ranks[:, None] + 16 * self._rank + places).to(torch.uint8).to(self._device)
        received = torch.zeros_like(expected)
        self._inner.exchange(plan, [send], received)
        if wrong:
            received[-1, -1] ^= 1
        if not torch.equal(received, expected):
            raise TransportError(f"self-test: rank {self._rank} received wrong bytes")

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`."""
        wrong = self._injector.fire("exchange")
        self._inner.exchange(plan, sources, destination, staging=staging)
        if wrong:
            first = destination.view(torch.uint8).view(-1)[:1]
            first ^= 1

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        self._inner.all_gather_small(value, out)

    def barrier(self) -> None:
        """See `TransportSession.barrier`."""
        self._inner.barrier()

    def close(self, timeout_s: float | None = None) -> None:
        """See `TransportSession.close`."""
        if not self._teardown.closed:
            self._teardown.close(timeout_s)


def _plugin(make: Callable[[], FaultyTransport], injector: Injector) -> type:
    class FaultyPlugin:
        """Discovery makes an instance when it loads the plugin: that is the stage ``import``."""

        comm_api = API_VERSION

        def __init__(self) -> None:
            injector.fire("import")

        @hookimpl
        def comm_transports(self) -> list[Transport]:
            return [make()]

    return FaultyPlugin


@contextlib.contextmanager
def installed(
    rank: int, faults: Sequence[Fault] = (), *, name: str = "fake", priority: int = 0
) -> Generator[Injector]:
    """Provide a `FaultyTransport` as a plugin of this process.

    Args:
        rank: this process's rank in the group that the faults speak of.
        faults: of all ranks.
        name: of the transport and its plugin.
        priority: as in `Transport`; the built-in fallbacks have negative ones.
    """
    injector = Injector(rank, faults)
    plugin = _plugin(lambda: FaultyTransport(injector, name=name, priority=priority), injector)
    try:
        plugins.register(name, plugin)
        yield injector
    finally:
        plugins.unregister(name)
