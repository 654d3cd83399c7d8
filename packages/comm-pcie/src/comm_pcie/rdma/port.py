"""The device port: what the routes over NICs need of a device and its memory, and no more.

There are two. `CudaPort` is the real one. `HostPort` does the same with memory of the host, shared by processes, so
that the whole protocol (queue pairs, keys, ledger, signals, aborts, teardown) runs where there is no GPU: for tests,
with the module of windows compiled for the host. Both stand on a session of windows, whose memory, signals,
deadlines and aborts they use.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from comm_core import _cuda
from comm_core.errors import CommError, UnsupportedError
from comm_core.memory.peer import HOST
from comm_core.transport import strided
from comm_core.transport.plan import Copy
from comm_core.windows.session import WindowSession
from comm_core.windows.signals import Operation
from comm_core.windows.window import MappedWindow
from comm_pcie import copies
from comm_pcie.rdma.engine import Memory

if TYPE_CHECKING:
    from comm_core._driver import Device
    from comm_core.consensus import Transaction
    from comm_core.jit import Module
    from comm_core.windows.session import WindowSession as Session

__all__ = ["CudaPort", "DevicePort", "HostPort", "PortArguments", "needs_flush"]

OWNER, ALL_DEVICES = 100, 200
"""Scopes in which what a NIC has written is ordered by itself; smaller ones need a flush."""
_FLUSH_BY_HOST = 1


class PortArguments(NamedTuple):
    """What a port's session of windows is opened with.

    Attributes:
        form: of peer memory.
        timeout_s: deadline of every wait.
        poison: whether an aborted operation fills its output with NaN bytes.
    """

    form: str
    timeout_s: float
    poison: bool


class DevicePort(ABC):
    """A device and its memory, for one session. Owns the session of windows that it opens.

    Attributes:
        windows: memory that peers map, and signals.
        device: this rank's.
    """

    windows: Session
    device: torch.device

    @abstractmethod
    def describe(self, address: int, nbytes: int) -> contextlib.AbstractContextManager[Memory]:
        """Return how a NIC can be told about memory of a window; the descriptor in it lives as long as the block."""

    @abstractmethod
    def copy(self, pieces: Sequence[Copy], source: torch.Tensor, outputs: Sequence[int], own: torch.Tensor) -> None:
        """Enqueue copies from `source` into the outputs of this rank and of peers whose memory is mapped.

        Args:
            pieces: copies of a plan.
            source: the operand.
            outputs: address of each rank's output, as this rank maps it.
            own: this rank's output.
        """

    @abstractmethod
    def flush(self) -> None:
        """Make what the NIC has written, and reported as complete, visible to the device."""

    @abstractmethod
    def settle(self) -> None:
        """Wait for what was enqueued on the current stream."""

    @abstractmethod
    def stream(self) -> int:
        """Return the handle of the current stream."""

    def allocate(self, stages: Transaction, nbytes: int, what: str) -> MappedWindow:
        """Allocate memory on every rank as part of a transaction. Collective."""
        return self.windows.windows.add_in(stages, nbytes, what)

    def barrier(self, operation: Operation) -> None:
        """Wait, on the host, until all ranks are here and what they had enqueued before is done. Collective.

        Raises:
            PeerStalledError: a rank did not come before the deadline, or the group has given up.
        """
        self.windows.barrier(operation)
        self.settle()
        self.windows.check()


class _HostWindows(WindowSession):
    def _stream(self) -> int:
        # There is one order of things on a CPU, the program's.
        return 0


class HostPort(DevicePort):
    """Memory of the host, shared by processes (``host_fd``).

    Args:
        stages: the transaction of the opening.
        module: the module of windows, compiled for the host.
        arguments: of the session; its form is not looked at.
        flush: makes late writes visible, where the fabric holds some back.
    """

    def __init__(
        self, stages: Transaction, module: Module, arguments: PortArguments, flush: Callable[[], object]
    ) -> None:
        self.device = torch.device("cpu")
        self._flush = flush
        self.windows = _HostWindows(
            stages,
            module,
            self.device,
            form=HOST,
            staging_bytes=1,
            timeout_s=arguments.timeout_s,
            blocks_per_peer=1,
            poison=arguments.poison,
        )
        self._rank = stages.group.rank

    @contextlib.contextmanager
    def describe(self, address: int, nbytes: int) -> Generator[Memory]:
        """See `DevicePort.describe`."""
        yield Memory(address, nbytes)

    def copy(self, pieces: Sequence[Copy], source: torch.Tensor, outputs: Sequence[int], own: torch.Tensor) -> None:
        """See `DevicePort.copy`; it is done when it returns."""
        for piece in pieces:
            if piece.peer == self._rank:
                strided.copy_local((piece,), (source,), own)
                continue
            for box in copies.boxes_of(piece):
                target, start = outputs[piece.peer] + box.target_offset, source.data_ptr() + box.source_offset
                for row in range(box.rows):
                    ctypes.memmove(target + row * box.target_pitch, start + row * box.source_pitch, box.row_bytes)

    def flush(self) -> None:
        """See `DevicePort.flush`."""
        self._flush()

    def settle(self) -> None:
        """See `DevicePort.settle`."""

    def stream(self) -> int:
        """See `DevicePort.stream`; a CPU has one order of things."""
        return 0


class CudaPort(DevicePort):
    """Memory of a GPU, which NICs reach by GPUDirect RDMA.

    Args:
        stages: the transaction of the opening.
        module: the module of windows.
        device: this rank's.
        arguments: of the session.
        blocks_per_peer: blocks of a small gather for each destination; equal on all ranks.
    """

    def __init__(
        self,
        stages: Transaction,
        module: Module,
        device: torch.device,
        arguments: PortArguments,
        blocks_per_peer: int,
    ) -> None:
        self.device = device
        self.windows = WindowSession(
            stages,
            module,
            device,
            form=arguments.form,
            staging_bytes=1,
            timeout_s=arguments.timeout_s,
            blocks_per_peer=blocks_per_peer,
            poison=arguments.poison,
        )
        self._rank = stages.group.rank
        self._driver = stages.step("look at the device", self._open, lambda driver: driver.close())

    def _open(self) -> Device:
        from comm_core._driver import Device

        driver = Device(self.device.index)
        ordering = driver.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING")
        self._flushes = needs_flush(ordering, driver.attribute("GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS"))
        return driver

    @contextlib.contextmanager
    def describe(self, address: int, nbytes: int) -> Generator[Memory]:
        """See `DevicePort.describe`. A DMA-BUF where the device has them, else what the NIC's driver knows itself."""
        descriptor, problem = None, ""
        try:
            descriptor = self._driver.export_dma_buf(address, nbytes)
        except CommError as error:
            problem = str(error)
        try:
            if self.windows.memory_form == "cuda_ipc":
                # Memory of the older allocator can be pinned by the peer-memory module too, and must then not be
                # written by copies that have only seemed to be over.
                try:
                    self._driver.synchronize_memory_operations(address)
                except CommError as error:
                    problem = f"{problem}; {error}" if problem else str(error)
            yield Memory(address, nbytes, descriptor, 0, problem)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def copy(self, pieces: Sequence[Copy], source: torch.Tensor, outputs: Sequence[int], own: torch.Tensor) -> None:
        """See `DevicePort.copy`. The own share goes by the SMs, those of peers by copy engines."""
        stream = self.stream()
        for piece in pieces:
            if piece.peer == self._rank:
                continue
            for box in copies.boxes_of(piece):
                self._driver.copy_rows(
                    outputs[piece.peer] + box.target_offset,
                    box.target_pitch,
                    source.data_ptr() + box.source_offset,
                    box.source_pitch,
                    box.row_bytes,
                    box.rows,
                    stream,
                )
        strided.copy_local([piece for piece in pieces if piece.peer == self._rank], (source,), own)

    def flush(self) -> None:
        """See `DevicePort.flush`. Nothing where the device orders such writes itself."""
        if self._flushes:
            self._driver.flush_remote_writes()

    def settle(self) -> None:
        """See `DevicePort.settle`."""
        torch.cuda.current_stream(self.device).synchronize()

    def stream(self) -> int:
        """See `DevicePort.stream`."""
        return _cuda.raw_stream(self.device.index)


def needs_flush(ordering: int, options: int) -> bool:
    """Return whether the host must flush before a kernel may read what a NIC has written.

    A completion says that the NIC has sent the bytes on, not that the GPU can see them. Pure.

    Args:
        ordering: ``GPU_DIRECT_RDMA_WRITES_ORDERING`` of the device.
        options: ``GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`` of the device.

    Raises:
        UnsupportedError: it must, and the device does not let the host do it.
    """
    if ordering >= OWNER:
        return False
    if not options & _FLUSH_BY_HOST:
        raise UnsupportedError(
            f"this GPU orders nothing that a NIC writes (GPU_DIRECT_RDMA_WRITES_ORDERING is {ordering}, and at least "
            f"{OWNER} is needed) and can't be told to by the host either (GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS is "
            f"{options}): routes over NICs can't be used on it"
        )
    return True
