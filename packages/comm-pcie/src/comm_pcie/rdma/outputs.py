"""Registered outputs of the routes over NICs: memory, the landing buffer behind it, and what NICs know of both."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from comm_core.errors import TransportError
from comm_pcie.rdma.engine import RdmaEngine, RegisteredPair
from comm_pcie.rdma.port import DevicePort

if TYPE_CHECKING:
    import torch

    from comm_core._json import JsonObject
    from comm_core.consensus import Transaction
    from comm_core.windows.window import MappedWindow

__all__ = ["RegisteredOutput", "register"]

_ALIGNMENT = 1 << 16
"""Output and landing buffer begin at multiples of so many bytes: a page of any host and GPU, as DMA-BUFs need."""


@dataclass(frozen=True)
class RegisteredOutput:
    """An output and its landing buffer, one behind the other in a window.

    The NIC never reads the caller's memory: that may be shared with others and given back at any time. What is sent
    is copied into the landing buffer, or built there.

    Attributes:
        window: both halves, mapped by all ranks.
        nbytes: of the output, and of the landing buffer.
        half: offset of the landing buffer in the window.
        pair: the registrations.
    """

    window: MappedWindow
    nbytes: int
    half: int
    pair: RegisteredPair

    @cached_property
    def address(self) -> int:
        """Of the output."""
        return self.window.address

    @cached_property
    def landing_address(self) -> int:
        """Of the landing buffer."""
        return self.window.address + self.half

    @cached_property
    def output(self) -> torch.Tensor:
        """The output, flat uint8."""
        return self.window.view(self.address, self.nbytes)

    @cached_property
    def landing(self) -> torch.Tensor:
        """The landing buffer, flat uint8."""
        return self.window.view(self.landing_address, self.nbytes)


def register(stages: Transaction, port: DevicePort, engine: RdmaEngine, nbytes: int, what: str) -> RegisteredOutput:
    """Allocate an output on every rank, register it, and tell all ranks its keys, as steps of `stages`. Collective.

    Args:
        stages: the transaction, which then owns it.
        port: of this rank.
        engine: of this rank, connected.
        nbytes: of the output, equal on all ranks.
        what: the output, in words; equal on all ranks.

    Raises:
        JointError: a step failed on some rank; nothing stays allocated or registered.
    """
    half = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    window = port.allocate(stages, 2 * half, what)

    def make() -> RegisteredPair:
        with ExitStack() as descriptors:
            output = descriptors.enter_context(port.describe(window.address, half))
            landing = descriptors.enter_context(port.describe(window.address + half, half))
            try:
                return engine.register(output=output, landing=landing)
            except TransportError as error:
                raise TransportError(f"{error}{_memlock(str(error), 2 * half)}") from error

    pair, records = stages.step_shared(f"register {what}", make, lambda made: made.record, RegisteredPair.close)
    stages.step(f"attach {what}", lambda: pair.attach(cast("Sequence[JsonObject | None]", records)))
    return RegisteredOutput(window, nbytes, half, pair)


def _memlock(text: str, nbytes: int) -> str:
    """Return what to do where memory can't be locked: the usual limit is a few MiB, and says only "out of memory"."""
    if os.strerror(errno.ENOMEM) not in text:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "any number of" if limit == resource.RLIM_INFINITY else str(limit)
    return (
        f". This process may lock {allowed} bytes of memory (ulimit -l), and this registration alone needs {nbytes}"
    )
