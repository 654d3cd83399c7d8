"""A session of the all-reduce kernels: a buffer that all ranks write, signals, and launches."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from comm_core import _cuda
from comm_core._dtypes import dtype_name
from comm_core.allreduce.launch import (
    HALVES,
    VECTOR_BYTES,
    Launch,
    Settings,
    Shape,
    capacity_bytes,
    plain_launch,
    shape_of,
)
from comm_core.allreduce.module import NO_EPILOGUE, Epilogue, ReduceCall
from comm_core.errors import TransportError
from comm_core.windows.detachable import DetachableSession
from comm_core.windows.signals import MAX_RANKS, Operation
from comm_core.windows.watchdog import watch

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.jit import Module

__all__ = ["ReduceSession"]

_EMPTY = -(1 << 31)
"""What a word of the buffer holds until something comes. Twin: include/comm_core/lamport.cuh, kLamportEmpty."""
_TEST_ELEMENTS = 4099
"""Of the self-test: more than one block, and a last vector that is not whole."""


class ReduceSession(DetachableSession):
    """What the kernels of include/comm_core/allreduce.cuh run on. Opened as part of a transaction.

    Args:
        stages: the transaction of the opening.
        module: of `comm_core.allreduce.module.reduce_module`, loaded.
        device: this rank's device.
        half_bytes: of half the buffer, see `comm_core.allreduce.launch.capacity_bytes`.
        settings: what the group agreed on.
        form: of peer memory.
        timeout_s: deadline of every wait on the device.
        poison: whether what did not arrive counts as NaN.
    """

    noun = "workspace"
    what = "this all-reduce workspace"
    call = "allreduce_fusion"

    def __init__(
        self,
        stages: Transaction,
        module: Module,
        device: torch.device,
        *,
        half_bytes: int,
        settings: Settings,
        form: str,
        timeout_s: float,
        poison: bool = True,
    ) -> None:
        self.settings = settings
        # The self-test needs room too.
        half_bytes = max(half_bytes, capacity_bytes(stages.group.size, _TEST_ELEMENTS * 4, True))
        self._half_bytes = -(-half_bytes // VECTOR_BYTES) * VECTOR_BYTES
        self._addresses = (ctypes.c_uint64 * MAX_RANKS)()
        super().__init__(stages, device, form=form, timeout_s=timeout_s, poison=poison)
        for rank, address in enumerate(self._buffer.peer_pointers):
            self._addresses[rank] = address
        table = ctypes.addressof(self._addresses)
        self.entry = ReduceCall(module, table, self._half_bytes // VECTOR_BYTES, Operation.ALLREDUCE)
        stages.step("self-test", self._self_test)
        self._begin_life(stages)
        watch(self)

    @property
    def device(self) -> torch.device:
        """This rank's device."""
        return self._device

    # Set-up

    def _allocate(self, stages: Transaction) -> None:
        self._buffer = self.windows.add_in(stages, HALVES * self._half_bytes, "buffer")

    def clear_signals(self) -> None:
        """See `SignalSession.clear_signals`: empties the buffer as well."""
        with _cuda.device_guard(self._device), torch.inference_mode(False):
            self._buffer.local[: HALVES * self._half_bytes].view(torch.int32).fill_(_EMPTY)
        super().clear_signals()

    def _self_test(self) -> None:
        """Add up a few numbers by both algorithms, in both halves of the buffer, and compare every one.

        Raises:
            TransportError: a sum is wrong.
            PeerStalledError: a rank did not take part.
        """
        rank, size = self._group.rank, self._group.size
        problem = ""
        with _cuda.device_guard(self._device), torch.inference_mode(False):
            at = torch.arange(_TEST_ELEMENTS, dtype=torch.int32, device=self._device)
            for round_ in range(2 * HALVES):
                use_oneshot = round_ < HALVES
                nbytes = _TEST_ELEMENTS * 4
                shape = shape_of(size, nbytes, use_oneshot)
                parts = [((at * 7 + 3 * peer + round_) % 1009).to(torch.float32) for peer in range(size)]
                out = torch.full_like(parts[0], torch.nan)
                self._launch(parts[rank], out, shape, plain_launch(shape, self.settings))
                _cuda.synchronize(self._device)
                self.check()
                wrong = (out != torch.stack(parts).sum(0)).nonzero()
                if wrong.numel() and not problem:
                    kind = "one shot" if use_oneshot else "two shots"
                    problem = (
                        f"{wrong.numel()} of {_TEST_ELEMENTS} sums in {kind} are wrong, the first at "
                        f"{int(wrong[0])}: {float(out[wrong[0]])}"
                    )
        # Only now: a rank that left between the rounds would let the others wait for it until their deadline.
        if problem:
            raise TransportError(
                f"self-test: {problem}: stores into peer memory do not arrive on this machine (IOMMU or ACS "
                "settings?)"
            )

    # Calls

    def _launch(self, source: torch.Tensor, output: torch.Tensor, shape: Shape, launch: Launch) -> None:
        self.entry(
            self._stream(),
            self._session,
            source.data_ptr(),
            output.data_ptr(),
            dtype_name(source.dtype),
            shape,
            launch,
        )

    def reduce(
        self,
        source: int,
        output: int,
        dtype: str,
        shape: Shape,
        launch: Launch,
        epilogue: Epilogue = NO_EPILOGUE,
        *,
        early: bool = False,
        lead: bool = False,
    ) -> None:
        """Launch one all-reduce on the current stream. Collective; the caller has made the device current.

        Args:
            source: address of this rank's operand.
            output: address of the sum, without an epilogue.
            dtype: name of the element type.
            shape: of the operand; it fits (`Shape.used_bytes`).
            launch: of the kernel.
            epilogue: what follows the sum.
            early: whether the kernel may start before the one before it has ended.
            lead: whether it lets the next one do so.

        Raises:
            PeerStalledError: a rank did not come to an earlier call.
            CheckpointError: the memory is detached.
            CudaCallError: the launch failed; nothing was launched.
        """
        context = self.launch_context()
        self.entry(*context, source, output, dtype, shape, launch, epilogue, early=early, lead=lead)

    # Checkpoint

    @property
    def detachable(self) -> bool:
        """Whether the memory can be taken away and brought back."""
        return all(item.memory is not None and item.memory.detachable for item in self.allocations())
