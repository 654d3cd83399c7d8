"""A session of the all-reduce kernels: a buffer that all ranks write, signals, and launches."""

from __future__ import annotations

import ctypes
import uuid
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
from comm_core.consensus import joint
from comm_core.errors import TransportError, UnsupportedError
from comm_core.memory.detach import Lifecycle, attach_jointly, check_detachable, detach_jointly
from comm_core.windows.base import SignalSession
from comm_core.windows.signals import MAX_RANKS, Operation
from comm_core.windows.watchdog import watch

if TYPE_CHECKING:
    from comm_core.consensus import Transaction
    from comm_core.group import Group
    from comm_core.jit import Module

__all__ = ["ReduceSession"]

_EMPTY = -(1 << 31)
"""What a word of the buffer holds until something comes. Twin: include/comm_core/lamport.cuh, kLamportEmpty."""
_TEST_ELEMENTS = 4099
"""Of the self-test: more than one block, and a last vector that is not whole."""
_WHAT = "this all-reduce workspace"


class ReduceSession(SignalSession):
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
        self._call = ReduceCall(module, table, self._half_bytes // VECTOR_BYTES, Operation.ALLREDUCE)
        stages.step("self-test", self._self_test)
        _, keys = stages.step_shared("name", lambda: uuid.uuid4().hex, str)
        self._lifecycle = Lifecycle(_WHAT, stages.group, str(keys[0]))
        self._usable = True
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
                SignalSession.check(self)
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
        self._call(
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
        self.check()
        self._call(
            self._stream(), self._session, source, output, dtype, shape, launch, epilogue, early=early, lead=lead
        )

    def check(self) -> None:
        """See `SignalSession.check`.

        Raises:
            CheckpointError: the memory is detached, or a checkpoint or restore failed half-way.
            PeerStalledError: as there.
        """
        if not self._usable:
            self._lifecycle.check("allreduce_fusion")
        super().check()

    # Checkpoint

    @property
    def state(self) -> str:
        """``"attached"``, ``"detached"``, ``"failed"`` or ``"closed"``."""
        return self._lifecycle.state

    @property
    def detachable(self) -> bool:
        """Whether the memory can be taken away and brought back."""
        return all(item.memory is not None and item.memory.detachable for item in self.allocations())

    def checkpoint_prepare(self) -> None:
        """Give up the physical memory and keep the addresses. Collective; nothing where that is the state already."""

        def ready() -> None:
            self._check_capture()
            # What was launched ends, by its deadline at the latest; a stall is told before anything is taken away.
            _cuda.synchronize(self._device)
            super(ReduceSession, self).check()
            check_detachable(self.allocations())

        def detach(group: Group) -> None:
            self._usable = False
            detach_jointly(group, f"checkpoint_prepare of {_WHAT}", self.allocations())

        try:
            self._lifecycle.prepare(ready, detach)
        finally:
            if not self._usable:
                self.regroup(self._lifecycle.group)

    def checkpoint_restore(self, group: Group) -> None:
        """Bring the memory back at the same addresses. Collective; nothing where that is the state already."""
        what = f"checkpoint_restore of {_WHAT}"

        def attach(new: Group) -> None:
            attach_jointly(new, what, self.allocations())
            # Nobody signals before this is over on every rank.
            joint(new, f"{what}: clear", self.clear_signals)
            self.regroup(new)
            self._usable = True
            joint(new, f"{what}: self-test", self._self_test)

        try:
            self._lifecycle.restore(group, self._check_capture, attach)
        except BaseException:
            self._usable = self.state == "attached"
            if not self._usable:
                self.regroup(self._lifecycle.group)
            raise

    def _check_capture(self) -> None:
        if _cuda.is_capturing():
            raise UnsupportedError("a CUDA graph is being captured: end the capture first")

    # The end

    def close(self, timeout_s: float | None = None) -> None:
        """See `SignalSession.close`; local while detached."""
        if self.state == "detached":
            self.release_alone()
        elif self.state == "failed":
            self.abandon()
        elif self.state != "closed":
            super().close(timeout_s)
        self._usable = False
        self._lifecycle.close()
