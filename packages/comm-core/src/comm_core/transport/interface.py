"""The interface of a transport: a descriptor that decides, and a session that moves bytes.

A transport never knows what Ulysses or an all-reduce is. It says what it is (`Transport`), whether a group can use it
(`probe`, `assess`), and, opened for a group, it executes plans between the ranks (`TransportSession`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from comm_core._json import Json, JsonObject
from comm_core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_core.group import Group
    from comm_core.topology.facts import RankFacts
    from comm_core.transport.plan import Plan

__all__ = [
    "Candidate",
    "ProbeContext",
    "Properties",
    "Request",
    "Staging",
    "Transport",
    "TransportSession",
    "Verdict",
    "Window",
]


_NO_CHECKPOINT = (
    "its memory can't be detached from its addresses; close it before the checkpoint and open it again afterwards, "
    "or use backend 'mnnvl'"
)


@dataclass(frozen=True)
class Request:
    """What the group asks for: equal on all ranks, because it was gathered and compared.

    Attributes:
        backend: ``"auto"`` or a transport name.
        world_size: ranks of the group.
        device_type: ``"cuda"`` or ``"cpu"``.
        group_backends: device type -> torch.distributed backend of the process group; empty without one.
        dtype: name of the default element type (``"bfloat16"``).
        itemsize: its bytes.
        max_bytes: capacity of one operand in bytes.
        options: options that belong to a transport (``{"nvlink_kernel": "auto"}``) or to an operation.
        environment: the variables that change the decision, as the ranks agreed on them.
        timeout_s: the agreed deadline of every step in seconds.
    """

    backend: str
    world_size: int
    device_type: str
    group_backends: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "uint8"
    itemsize: int = 1
    max_bytes: int = 0
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    timeout_s: float = 60.0

    @property
    def allow_experimental_auto(self) -> bool:
        """Whether every rank opted in to experimental transports for ``"auto"``."""
        return self.environment.get("COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS") == "1"

    @property
    def allow_shared_gpu(self) -> bool:
        """Whether every rank allows several ranks on one GPU."""
        return self.environment.get("COMM_ALLOW_SHARED_GPU") == "1"


class Verdict(NamedTuple):
    """A transport's answer to a request.

    Attributes:
        eligible: whether the group can use it.
        reason: what was verified (eligible) or the first thing that is missing, naming ranks (not eligible).
        plan: JSON that `Transport.open` needs, for example routes and NICs; equal on all ranks.
    """

    eligible: bool
    reason: str
    plan: JsonObject | None = None


@dataclass(frozen=True)
class ProbeContext:
    """What a transport's probe may look at: this rank, its device, and what core's own probe found.

    `device_index` is the CUDA ordinal, or -1 where there is none: on a CPU, and in ``commctl``, which asks NVML alone
    and makes no use of CUDA.
    """

    rank: int
    device_type: str
    device_index: int
    facts: RankFacts


class Staging(NamedTuple):
    """Caller-owned scratch of one exchange: flat contiguous uint8 tensors on the communicator's device."""

    send: torch.Tensor
    receive: torch.Tensor


@dataclass(frozen=True)
class Properties:
    """What a session can do; callers ask this, never the type.

    Attributes:
        peer_pointers: device code can store into the peers' windows.
        graph_capturable: an exchange can be captured in a CUDA graph.
        itemsizes: element sizes in bytes that it moves.
        staging: exchanges use caller-owned staging where it is given (else they allocate).
        registered_outputs: outputs must come from `allocate_output`.
        max_batch: largest batch of a plan, 0 for any.
        shared_resources: other ranks hold mappings of this rank's memory, so `close` is collective.
    """

    peer_pointers: bool = False
    graph_capturable: bool = False
    itemsizes: frozenset[int] = frozenset({1, 2, 4})
    staging: bool = False
    registered_outputs: bool = False
    max_batch: int = 0
    shared_resources: bool = False


class Window(ABC):
    """Memory of the same size on every rank that the others can write, with a signal block."""

    number: int
    nbytes: int

    @property
    @abstractmethod
    def local(self) -> torch.Tensor:
        """This rank's memory as a flat uint8 tensor of `nbytes`."""

    @property
    @abstractmethod
    def peer_pointers(self) -> tuple[int, ...]:
        """Device address of every rank's memory as seen from here, in rank order."""


class Candidate(ABC):
    """What the decision protocol chooses among: a transport, or a backend of an operation that opens by itself.

    Class attributes:
        name: entry-point key, and what users pass as ``backend=``.
        version: of the package that provides it.
        wire: number of its protocol between ranks; ranks with different numbers don't use it together.
        priority: ``"auto"`` tries higher ones first; ties go by name.
        experimental: ``"auto"`` tries it last, and only with the opt-in.
        verified_on: what it has been run on with all its tests passing, in words for people: ``"CPU processes"``,
            ``"emulator"``, ``"one GPU with many ranks"``, ``"NVLink"``, ``"real NIC"``. Empty where nobody has.
            ``commctl doctor`` shows it; it decides nothing.
    """

    name: str
    version: str
    wire: int
    priority: int
    experimental: bool = False
    verified_on: tuple[str, ...] = ()

    def probe(self, context: ProbeContext) -> JsonObject:
        """Return facts of this rank that `assess` needs beyond core's own. Local; no allocation; may raise."""
        return {}

    def remarks(self, facts: Sequence[RankFacts]) -> Sequence[str]:
        """Return what people should know about this machine for it, in sentences; ``commctl`` shows them.

        Pure, and decides nothing. `facts` are as in `assess`.
        """
        return ()

    @abstractmethod
    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """Say whether the group can use this candidate.

        Pure: the same arguments give the same verdict in every process. `facts` is in rank order and holds every
        rank's probe; this candidate's own part is ``facts[i].plugins[self.name]``.
        """


class Transport(Candidate):
    """Describes a way to move bytes and opens it for a group. Stateless and cheap to import.

    What it says of itself, `probe` and `assess` are those of a `Candidate`.
    """

    @abstractmethod
    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> TransportSession:
        """Open for a group. Collective and staged.

        Everything that can fail, and everything that must be taken down again, is a step of `stages`: it ends in a
        joint outcome, and a failure on any rank, in a step or between two, takes down every rank's steps in reverse
        order and in step with each other. The session keeps ``stages.teardown`` for its own `close`.

        Args:
            stages: the transaction around the whole opening; ``stages.group`` is the group.
            request: what the ranks asked for.
            plan: the plan of the verdict that admitted this transport.
            device: this rank's device.
        """


class TransportSession(ABC):
    """A transport opened for a group: it executes plans. Owns its resources until `close`."""

    properties: Properties
    route: str | None = None
    """Which of the transport's own routes is used (``"p2p"``, ``"rdma"``…), where it has several."""
    kernel: str | None = None
    """Which of its kernels is launched, where it has several."""
    fallback_reason: str | None = None
    """Why another of its routes is used than the one that is preferred or was asked for, where that is so."""

    @abstractmethod
    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """Execute `plan`: this rank's bytes to every peer, and every peer's bytes into `destination`.

        Collective, on the current stream of the device; the destination is complete for work enqueued after it.
        Arguments were validated by the caller: dtype, shapes, device, capacity, no overlap.

        Raises:
            TransportError: the exchange failed; the session is then broken.
        """

    @abstractmethod
    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """Gather equal-sized contiguous tensors of up to 1 MiB: ``out[r]`` is rank r's `value`. Collective."""

    @abstractmethod
    def barrier(self) -> None:
        """Order the ranks: work enqueued after it starts after all ranks have reached it. Collective."""

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an output that exchanges write without staging, where the transport has such. May be collective."""
        import torch

        return torch.empty(tuple(shape), dtype=dtype, device=device)

    def input_buffer(self, out: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the input staging behind a registered output as a view of `shape`.

        Raises:
            UnsupportedError: the transport stages no inputs.
        """
        raise UnsupportedError(f"{type(self).__name__} stages no inputs")

    def memory_pool(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's allocations come from memory that exchanges write in place. Local.

        Raises:
            UnsupportedError: the transport has no such memory, or was not asked to have any.
        """
        raise UnsupportedError(f"{type(self).__name__} has no memory pool: pass outputs from allocate_output")

    def window(self, nbytes: int) -> Window:
        """Allocate a window of `nbytes` on every rank. Collective.

        Raises:
            UnsupportedError: the transport has no memory that peers can write.
        """
        raise UnsupportedError(
            f"{type(self).__name__} has no windows: its peers can't write this rank's memory "
            "(properties.peer_pointers is false)"
        )

    def check(self) -> None:  # noqa: B027 - a session on which nothing can stall has nothing to say
        """Raise if an operation that was launched earlier has stalled since. Local.

        Raises:
            PeerStalledError: it names the rank that was waited for.
        """

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep its addresses, before the process is checkpointed. Collective.

        Until `checkpoint_restore`, every call but this one and `close` raises `CheckpointError`, and the group is not
        used. Nothing is done where that is the state already.

        Raises:
            UnsupportedError: the transport's memory can't be detached.
            CheckpointError: it failed half-way, which is final.
            JointError: a rank is not ready, or the ranks are at different calls; nothing has changed.
        """
        raise UnsupportedError(f"{type(self).__name__}: {_NO_CHECKPOINT}")

    def checkpoint_restore(self, group: Group) -> None:
        """Bring the memory back at the same addresses. Collective. What it held is lost.

        Args:
            group: the ranks in their old order; the old group may be gone.

        Raises:
            As `checkpoint_prepare`; ArgumentValueError: the group has another size.
        """
        raise UnsupportedError(f"{type(self).__name__}: {_NO_CHECKPOINT}")

    def close(self, timeout_s: float | None = None) -> None:  # noqa: B027 - a session may own nothing
        """Release everything. Collective where `properties.shared_resources`; may be called again after a failure.

        Where it is collective, every other call raises `ClosedError` once it was called, whatever became of it:
        another rank may have released what the call would use.
        """
