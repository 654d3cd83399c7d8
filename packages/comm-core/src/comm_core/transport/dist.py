"""The reference transport: executes plans over torch.distributed (NCCL or gloo).

It is what every group can use, what the others are compared with, and what a new plugin starts from.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from comm_core import _dist
from comm_core._json import JsonObject
from comm_core._version import __version__
from comm_core.consensus import Transaction
from comm_core.errors import ArgumentValueError, TransportError
from comm_core.group import Group
from comm_core.topology.facts import RankFacts
from comm_core.transport import strided
from comm_core.transport.interface import Properties, Request, Staging, Transport, TransportSession, Verdict
from comm_core.transport.plan import Plan
from comm_core.transport.wire import Wire, wire

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["SMALL_BYTES", "DistSession", "DistTransport", "check_small"]

SMALL_BYTES = 1 << 20
"""Largest operand of `all_gather_small` in bytes."""

# How long the ranks of a failed exchange wait for each other's word on where they are. Whoever can answer is already
# in the same failed call, so this only has to cover their different deadlines.
_DIAGNOSIS_S = 2.0

_wire = lru_cache(512)(wire)


def check_small(value: torch.Tensor, out: torch.Tensor, world_size: int) -> int:
    """Check the tensors of a small gather and return the bytes a rank.

    Raises:
        ArgumentValueError: they are too large, not contiguous, or don't fit each other.
    """
    nbytes = value.numel() * value.element_size()
    if nbytes > SMALL_BYTES:
        raise ArgumentValueError(f"all_gather_small takes up to {SMALL_BYTES} bytes a rank, got {nbytes}")
    total = nbytes * world_size
    if not value.is_contiguous() or not out.is_contiguous() or out.numel() * out.element_size() != total:
        raise ArgumentValueError(
            f"all_gather_small needs contiguous tensors and an output of {total} bytes, got {tuple(value.shape)} and "
            f"{tuple(out.shape)} of {out.dtype}"
        )
    return nbytes


class DistTransport(Transport):
    """torch.distributed with one backend: ``"nccl"`` on CUDA tensors, ``"gloo"`` on CPU or CUDA tensors."""

    version = __version__
    wire = 1

    def __init__(
        self, name: str, device_types: tuple[str, ...], priority: int, verified_on: tuple[str, ...] = ()
    ) -> None:
        self.name = name
        self.device_types = device_types
        self.priority = priority
        self.verified_on = verified_on

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`; needs no facts."""
        if request.device_type not in self.device_types:
            can = " or ".join(self.device_types)
            return Verdict(False, f"{self.name} moves {can} tensors, the ranks are on {request.device_type}")
        have = request.group_backends.get(request.device_type)
        if have == self.name:
            return Verdict(True, f"the process group has {self.name} for {request.device_type} tensors")
        backends = dict(request.group_backends) or "none"
        return Verdict(False, f"the process group has no {self.name} for {request.device_type} tensors ({backends})")

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> DistSession:
        """See `Transport.open`; sets nothing up, so there is nothing to take down."""
        return DistSession(stages.group, device)


class DistSession(TransportSession):
    """Plans over ``all_to_all_single``: pack, exchange, unpack; pieces that lie right already are not copied.

    Args:
        group: a group with a torch process group behind it.
        device: of the tensors.

    Raises:
        ArgumentValueError: the group has no process group.
    """

    properties = Properties(staging=True)

    def __init__(self, group: Group, device: torch.device) -> None:
        if group.process_group is None:
            raise ArgumentValueError(f"group {group.name!r} has no torch.distributed process group")
        self._group = group
        self._device = device
        self._backend = group.backends.get(device.type, "")
        self._calls = 0
        self._token = group.token()

    def _process_group(self, operation: str) -> ProcessGroup:
        process_group = self._group.process_group
        if process_group is None:
            raise TransportError(
                f"{operation}: the process group {self._group.name!r} was destroyed; make a new group and a new "
                "communicator"
            )
        return process_group

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `TransportSession.exchange`."""
        layout = _wire(plan)
        send = self._send_buffer(layout, sources, staging)
        receive = self._receive_buffer(layout, plan, destination, staging)
        strided.pack(layout.pack, sources, send)
        self._all_to_all(plan.operation, layout, send, receive)
        strided.unpack(layout.unpack, receive, destination)

    def _send_buffer(self, layout: Wire, sources: Sequence[torch.Tensor], staging: Staging | None) -> torch.Tensor:
        nbytes = sum(layout.send_bytes)
        if layout.send_in_place:
            return strided.byte_view(sources[0], 0, nbytes)
        if staging is not None:
            return staging.send[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _receive_buffer(
        self, layout: Wire, plan: Plan, destination: torch.Tensor, staging: Staging | None
    ) -> torch.Tensor:
        nbytes = sum(layout.receive_bytes)
        if layout.receive_in_place:
            return strided.byte_view(destination, 0, nbytes)
        if staging is not None:
            return staging.receive[:nbytes]
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _all_to_all(self, operation: str, layout: Wire, send: torch.Tensor, receive: torch.Tensor) -> None:
        splits = (None, None) if layout.equal else (layout.receive_bytes, layout.send_bytes)
        work = _dist.all_to_all_bytes(receive, send, *splits, self._process_group(operation))
        self._finish(operation, work)

    def _finish(self, operation: str, work: _dist.Work) -> None:
        """Wait as the backend needs it: NCCL by stream order alone, gloo on the host and with the agreed deadline."""
        self._calls += 1
        try:
            if self._backend == "nccl":
                work.wait()
            else:
                work.wait(timedelta(seconds=self._group.timeout_s))
        except RuntimeError as error:
            raise self._diagnose(operation, error) from error

    def _diagnose(self, operation: str, error: RuntimeError) -> TransportError:
        """Return an error that names the ranks that are not in this call, which the backend's own text does not."""
        where = f"{self._backend} {operation}, call {self._calls} of this communicator, rank {self._group.rank}"
        try:
            missing = self._group.roll_call(f"{self._token}/{self._calls}", timeout_s=_DIAGNOSIS_S)
            ranks = ", ".join(map(str, missing))
            gone = f"no word from rank {ranks}: it died, skipped the call or is late"
            who = gone if missing else "every rank reports it"
        except RuntimeError as failure:
            who = f"the ranks could not compare notes ({failure})"
        return TransportError(
            f"{where} failed: {who}. {error}. The communicator can't be used any more; COMM_CHECK=1 finds ranks that "
            "make different calls, COMM_TIMEOUT_S sets the deadline"
        )

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        """See `TransportSession.all_gather_small`."""
        check_small(value, out, self._group.size)
        self.all_gather("all_gather_small", value, out)

    def all_gather(self, operation: str, value: torch.Tensor, out: torch.Tensor) -> None:
        """Gather equal-sized contiguous tensors of any size: ``out[r]`` is rank r's `value`. Collective.

        Args:
            operation: what it is done for, for errors.
            value: this rank's tensor.
            out: contiguous, of the ranks' bytes in rank order.

        Raises:
            TransportError: the gather failed; the session is then broken.
        """
        nbytes = value.numel() * value.element_size()
        source = strided.byte_view(value, 0, nbytes)
        target = strided.byte_view(out, 0, nbytes * self._group.size)
        self._finish(operation, _dist.all_gather_bytes(target, source, self._process_group(operation)))

    def barrier(self) -> None:
        """See `TransportSession.barrier`."""
        self._finish("barrier", _dist.barrier(self._process_group("barrier"), self._device))
