"""The ways to exchange that are compared, each behind the same few calls. On a rank.

A communicator of this project over one transport; torch's own ``all_to_all_single`` with a permutation, which is what
people write by hand; and copies into peers' buffers of torch's symmetric memory.
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_core.bench.geometry import Geometry
from comm_core.errors import UnsupportedError
from comm_core.transport.interface import TransportSession
from comm_core.ulysses.communicator import UlyssesCommunicator

__all__ = ["AllToAll", "Contender", "OverCommunicator", "SymmetricMemory"]


class Contender(ABC):
    """One way to exchange. Every method is collective but `outputs` of the ways that allocate locally."""

    capturable = False
    """Whether calls can be captured in a CUDA graph."""

    @abstractmethod
    def modes(self, asked: Sequence[str]) -> list[str]:
        """Return those of the modes asked for that differ from each other here."""

    @abstractmethod
    def outputs(
        self, geometry: Geometry, mode: str, xs: Sequence[torch.Tensor], operation: str
    ) -> list[torch.Tensor]:
        """Return an output for each of the operands `xs`."""

    @abstractmethod
    def call(self, operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """Exchange `x` into `out`, one of `outputs`, on the current stream."""

    @abstractmethod
    def align(self) -> None:
        """Let what is enqueued afterwards start on all ranks at once."""

    def check(self) -> None:  # noqa: B027 - most raise by themselves
        """Raise if something that was enqueued has failed since."""

    def close(self) -> None:  # noqa: B027 - most own nothing
        """Release everything."""


class OverCommunicator(Contender):
    """`UlyssesCommunicator` over one transport.

    Args:
        group: process group.
        backend: name of the transport.
        device: this rank's.
        max_bytes: of the largest operand.
        options: further arguments of the communicator.
    """

    def __init__(
        self, group: Any, backend: str, device: torch.device, max_bytes: int, options: Mapping[str, Any]
    ) -> None:
        self.comm = UlyssesCommunicator(
            group, max_bytes=max_bytes, dtype=torch.bfloat16, backend=backend, device=device, **options
        )
        session = self.comm._session  # pyright: ignore[reportPrivateUsage]
        assert session is not None, "there are at least two ranks"
        self._session = session
        # NCCL's calls can be captured; gloo's can't, and both are sessions of torch.distributed.
        self.capturable = device.type == "cuda" and (session.properties.graph_capturable or backend == "nccl")
        self._workspace: Any = None
        with contextlib.suppress(UnsupportedError):
            self._workspace = self.comm.create_workspace()
        self._direct: dict[int, list[torch.Tensor]] = {}
        self._ranks = self.comm.world_size

    def modes(self, asked: Sequence[str]) -> list[str]:
        """See `Contender.modes`: where `allocate_output` returns ordinary storage, or must be used, there is one."""
        if self._session.properties.registered_outputs:
            return [mode for mode in asked if mode == "direct"]
        special = type(self._session).allocate_output is not TransportSession.allocate_output
        return list(asked) if special else [mode for mode in asked if mode == "staged"]

    def outputs(
        self, geometry: Geometry, mode: str, xs: Sequence[torch.Tensor], operation: str
    ) -> list[torch.Tensor]:
        """See `Contender.outputs`."""
        if mode == "staged":
            return _ordinary(geometry, xs, operation, self._ranks)
        if mode == "pool":
            with getattr(self.comm, "memory_pool")():  # noqa: B009 - not every version has it
                return _ordinary(geometry, xs, operation, self._ranks)
        # They stay the communicator's until it is closed, so both operations take turns with the same ones.
        kept = self._direct.setdefault(xs[0].numel(), [])
        kept += [self.comm.allocate_output(x, operation) for x in xs[len(kept) :]]
        shape = geometry.shape_out(operation, self._ranks)
        return [out.view(shape) for out in kept[: len(xs)]]

    def call(self, operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Contender.call`."""
        run = self.comm.scatter_heads if operation == "scatter_heads" else self.comm.gather_heads
        run(x, out=out, workspace=self._workspace)

    def align(self) -> None:
        """See `Contender.align`."""
        self._session.barrier()

    def check(self) -> None:
        """See `Contender.check`."""
        self.comm.check()

    def close(self) -> None:
        """See `Contender.close`."""
        self._direct.clear()
        self.comm.close()


def _ordinary(geometry: Geometry, xs: Sequence[torch.Tensor], operation: str, ranks: int) -> list[torch.Tensor]:
    shape = geometry.shape_out(operation, ranks)
    return [torch.empty(shape, dtype=x.dtype, device=x.device) for x in xs]


class AllToAll(Contender):
    """``all_to_all_single`` of torch.distributed, with a permutation before (scatter) or after it (gather)."""

    def __init__(self, group: Any, device: torch.device, max_bytes: int) -> None:
        self._dist: Any = importlib.import_module("torch.distributed")
        self._group = group
        self._ranks = int(group.size())
        self._packed = torch.empty(max_bytes // 2, dtype=torch.bfloat16, device=device)
        self._aligned = torch.zeros(1, device=device)
        self.capturable = device.type == "cuda"

    def modes(self, asked: Sequence[str]) -> list[str]:
        """See `Contender.modes`."""
        return [mode for mode in asked if mode == "staged"]

    def outputs(
        self, geometry: Geometry, mode: str, xs: Sequence[torch.Tensor], operation: str
    ) -> list[torch.Tensor]:
        """See `Contender.outputs`."""
        return _ordinary(geometry, xs, operation, self._ranks)

    def call(self, operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Contender.call`; ``P`` ranks, ``L`` tokens of one rank, ``h`` heads of one rank."""
        _, tokens, heads, dim = x.shape
        size = self._ranks
        packed = self._packed[: x.numel()]
        if operation == "scatter_heads":
            # [L, P, h, D] -> [P, L, h, D]
            by_rank = packed.view(size, tokens, heads // size, dim)
            by_rank.copy_(x.view(tokens, size, heads // size, dim).permute(1, 0, 2, 3))
            self._dist.all_to_all_single(out.view(-1), packed, group=self._group)
        else:
            self._dist.all_to_all_single(packed, x.view(-1), group=self._group)
            # [P, L, h, D] -> [L, P, h, D]
            by_rank = packed.view(size, tokens // size, heads, dim)
            out.view(tokens // size, size, heads, dim).copy_(by_rank.permute(1, 0, 2, 3))

    def align(self) -> None:
        """See `Contender.align`."""
        self._dist.all_reduce(self._aligned, group=self._group)


class SymmetricMemory(Contender):
    """Each rank copies its heads straight into the peers' outputs, which lie in torch's symmetric memory.

    A barrier of that memory before and after makes it an exchange with the same promises as the others: the peers'
    outputs are free to be written, and complete afterwards.

    Args:
        group: process group.
        device: this rank's.
        nbytes: of all outputs of one geometry and operation together, at most.
    """

    capturable = True

    def __init__(self, group: Any, device: torch.device, nbytes: int) -> None:
        # Not public in torch, and absent from some builds; both end as the error of this contender alone.
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self._rank, self._ranks = int(group.rank()), int(group.size())
        self._memory: Any = symmetric.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
        self._handle: Any = symmetric.rendezvous(self._memory, group)
        self._peers: dict[int, list[torch.Tensor]] = {}

    def modes(self, asked: Sequence[str]) -> list[str]:
        """See `Contender.modes`."""
        return [mode for mode in asked if mode == "direct"]

    def outputs(
        self, geometry: Geometry, mode: str, xs: Sequence[torch.Tensor], operation: str
    ) -> list[torch.Tensor]:
        """See `Contender.outputs`: consecutive parts of the memory, at the same places on all ranks."""
        self._peers.clear()
        shape = geometry.shape_out(operation, self._ranks)
        found: list[torch.Tensor] = []
        for number, x in enumerate(xs):
            offset = number * x.numel()
            views = [
                self._handle.get_buffer(peer, shape, torch.bfloat16, storage_offset=offset)
                for peer in range(self._ranks)
            ]
            found.append(views[self._rank])
            self._peers[views[self._rank].data_ptr()] = views
        return found

    def call(self, operation: str, x: torch.Tensor, out: torch.Tensor) -> None:
        """See `Contender.call`."""
        views = self._peers[out.data_ptr()]
        self._handle.barrier(channel=0)
        for step in range(self._ranks):
            # Everyone begins with another peer, so that no link carries everybody's first copy.
            peer = (self._rank + step) % self._ranks
            if operation == "scatter_heads":
                tokens, heads = x.shape[1], x.shape[2] // self._ranks
                source = x[:, :, peer * heads : (peer + 1) * heads]
                target = views[peer][:, self._rank * tokens : (self._rank + 1) * tokens]
            else:
                tokens, heads = x.shape[1] // self._ranks, x.shape[2]
                source = x[:, peer * tokens : (peer + 1) * tokens]
                target = views[peer][:, :, self._rank * heads : (self._rank + 1) * heads]
            target.copy_(source)
        self._handle.barrier(channel=0)

    def align(self) -> None:
        """See `Contender.align`."""
        self._handle.barrier(channel=1)
