"""SymmDeviceMemory and McastGPUBuffer: a buffer and a signal pad on every rank, and everybody's addresses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from comm_core._json import JsonObject
from comm_core.comm_backend import CommBackend, group_of
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_mnnvl.backends import default_backend
from comm_mnnvl.shared import SharedMemory, positive

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["McastGPUBuffer", "SymmDeviceMemory"]

_NEGATIVE_ZERO = {
    torch.bfloat16: (torch.int16, -0x8000),
    torch.float16: (torch.int16, -0x8000),
    torch.float32: (torch.int32, -0x80000000),
}
"""Element type -> the integer type of its width, and -0.0 in it."""


class SymmDeviceMemory(SharedMemory):
    """A buffer and a signal pad of the same size on every rank, mapped on all of them. The constructor is collective.

    Rank r's memory begins at ``uc_ptrs[r]``; the ranks' memory follows one another. The signal pad is its last
    `SIGNAL_PAD_SIZE` bytes, zero at first. The buffer's content is undefined.

    Args:
        buf_size: bytes of the buffer that are needed; equal on all ranks. There may be more
            (`get_usable_buffer_size`).
        group_size: ranks of the backend.
        group_rank: this rank in the backend.
        device_idx: this rank's CUDA device.
        comm_backend_for_handle_transfer: the ranks (a process group or a `comm_core` group does as well). None is
            WORLD where torch.distributed is initialized, else ``MPI.COMM_WORLD``.
        enable_multicast: whether to try for a multicast address as well; equal on all ranks. It is refused, and
            `multicast_reason` says why, where a switch of NCCL, torch or NVSHMEM turns multicast off on any rank, or
            where it does not work. Everything works without it.
        allocate_signal_pads: whether the pointers of the pads are wanted; the pads are there either way.

    Raises:
        JointValueError: an argument that can't be used, or ranks that passed different ones. On every rank.
        JointError: the ranks can't share memory, or a step failed on some rank. On every rank; nothing stays.
        GroupTimeoutError: a rank did not come.
        MPIMissingError: no backend was given, torch.distributed is not initialized, and there is no mpi4py.
    """

    SIGNAL_PAD_ALIGNMENT = 16
    SIGNAL_PAD_SIZE = 2048

    def __init__(
        self,
        buf_size: int,
        group_size: int,
        group_rank: int,
        device_idx: int,
        comm_backend_for_handle_transfer: CommBackend | None = None,
        enable_multicast: bool = False,
        allocate_signal_pads: bool = True,
    ) -> None:
        backend = comm_backend_for_handle_transfer
        group = group_of(default_backend() if backend is None else backend)
        self.comm_backend: CommBackend | None = backend
        self.buf_size = buf_size
        self.group_size = group.size
        self.group_rank = group.rank
        self.device_idx = device_idx

        def asked() -> JsonObject:
            positive("buf_size", buf_size)
            positive("device_idx", device_idx, 0)
            if (group_size, group_rank) != (group.size, group.rank):
                raise ArgumentValueError(
                    f"group_size={group_size} and group_rank={group_rank}, and this is rank {group.rank} of the "
                    f"{group.size} ranks of the backend"
                )
            return {
                "nbytes": _padded(buf_size, self.SIGNAL_PAD_ALIGNMENT) + self.SIGNAL_PAD_SIZE,
                # The ranks' memory follows one another.
                "stride": 1,
                "multicast": bool(enable_multicast),
                "signal_pads": bool(allocate_signal_pads),
            }

        self._pads = bool(allocate_signal_pads)
        super().__init__("SymmDeviceMemory", group, device_idx, asked, self._begin)

    def _begin(self) -> None:
        """Note where everything is, on the host and on the device, and clear the pad."""
        self.allocation_size = self._mapped.nbytes
        self.signal_pad_offset = self.get_usable_buffer_size()
        self.uc_ptrs = list(self._mapped.addresses)
        self.signal_pads = [address + self.signal_pad_offset for address in self.uc_ptrs] if self._pads else []
        # Kept over a checkpoint: captured graphs hold the addresses of the tables.
        self._uc_table = self._upload(tuple(self.uc_ptrs))
        self._pad_table = self._upload(tuple(self.signal_pads)) if self._pads else None
        self._refill()

    @property
    def mc_ptr(self) -> int:
        """The multicast address, or 0."""
        return 0 if self._multicast is None else self._multicast.address

    @property
    def uc_ptrs_dev(self) -> int:
        """Device address of the table of `uc_ptrs`, 8 bytes a rank."""
        return self._uc_table.data_ptr()

    @property
    def signal_pads_dev(self) -> int:
        """Device address of the table of `signal_pads`, 8 bytes a rank; 0 without pads."""
        return 0 if self._pad_table is None else self._pad_table.data_ptr()

    def get_signal_pad_ptrs_host(self) -> list[int]:
        """Return the addresses of all ranks' signal pads."""
        return self.signal_pads

    def get_buffer_ptrs_host(self) -> list[int]:
        """Return the addresses of all ranks' buffers."""
        return self.uc_ptrs

    def get_signal_pad_ptrs_dev(self) -> int:
        """Return the device address of the table of signal pads; see `signal_pads_dev`."""
        return self.signal_pads_dev

    def get_buffer_ptrs_dev(self) -> int:
        """Return the device address of the table of buffers; see `uc_ptrs_dev`."""
        return self.uc_ptrs_dev

    def get_unicast_ptr(self, rank: int) -> int:
        """Return the address of a rank's buffer.

        Raises:
            ArgumentValueError: there is no such rank.
        """
        if not 0 <= rank < self.group_size:
            raise ArgumentValueError(f"rank must be 0 to {self.group_size - 1}, got {rank}")
        return self.uc_ptrs[rank]

    def get_multicast_ptr(self) -> int:
        """Return the multicast address, or 0 where there is none (`multicast_reason` says why)."""
        return self.mc_ptr

    def get_rank(self) -> int:
        """Return this rank."""
        return self.group_rank

    def get_world_size(self) -> int:
        """Return the number of ranks."""
        return self.group_size

    def get_allocation_size(self) -> int:
        """Return the bytes of each rank's memory, the signal pad included."""
        return self.allocation_size

    def get_usable_buffer_size(self) -> int:
        """Return the bytes of each rank's buffer: everything but the signal pad."""
        return self._mapped.nbytes - self.SIGNAL_PAD_SIZE

    def lamport_initialize(self, rank: int, dtype: torch.dtype) -> None:
        """Fill this rank's buffer with -0.0, by which protocols tell what has arrived, and wait until that is done.

        Args:
            rank: this rank; each fills its own.
            dtype: bfloat16, float16 or float32.

        Raises:
            ArgumentValueError: another rank or type.
            ClosedError, CheckpointError: as `check`.
        """
        if rank != self.group_rank:
            raise ArgumentValueError(f"rank must be this rank, {self.group_rank}, got {rank}: each fills its own")
        if dtype not in _NEGATIVE_ZERO:
            raise ArgumentValueError(f"dtype must be bfloat16, float16 or float32, got {dtype}")
        integer, value = _NEGATIVE_ZERO[dtype]
        self._run(lambda: self.tensor(rank, 0, self.get_usable_buffer_size(), integer).fill_(value))

    def multicast_tensor(self, offset: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat tensor over `nbytes` of the multicast address from byte `offset` on, for stores alone.

        Raises:
            UnsupportedError: there is no multicast address.
            ArgumentValueError: bytes beyond the memory.
            ClosedError, CheckpointError: as `check`.
        """
        self.check("multicast_tensor")
        if not self.mc_ptr:
            raise UnsupportedError(f"there is no multicast address: {self.multicast_reason}")
        if offset < 0 or offset + nbytes > self._mapped.nbytes:
            raise ArgumentValueError(
                f"bytes {offset} to {offset + nbytes} are beyond the {self._mapped.nbytes} bytes of the memory"
            )
        return self._view(self.mc_ptr + offset, nbytes, dtype)

    def _refill(self) -> None:
        pad = self._mapped.addresses[self.group_rank] + self.get_usable_buffer_size()
        self._view(pad, self.SIGNAL_PAD_SIZE, torch.uint8).zero_()

    def _own_backend_gone(self) -> None:
        self.comm_backend = None


class McastGPUBuffer:
    """A `SymmDeviceMemory` whose parts are tensors. The constructor is collective.

    Args:
        buf_size: bytes that are needed; `buf_size` afterwards says how many there are.
        group_size: ranks of the backend.
        group_rank: this rank in the backend.
        device: this rank's GPU, with an explicit ordinal.
        comm_backend_for_handle_transfer: as in `SymmDeviceMemory`.
        enable_multicast: as in `SymmDeviceMemory`.

    Raises:
        ArgumentTypeError: `device` is no CUDA device with an ordinal; raised here alone.
        As `SymmDeviceMemory`.
    """

    def __init__(
        self,
        buf_size: int,
        group_size: int,
        group_rank: int,
        device: torch.device,
        comm_backend_for_handle_transfer: CommBackend | None = None,
        enable_multicast: bool = False,
    ) -> None:
        if not isinstance(device, torch.device) or device.type != "cuda" or device.index is None:  # pyright: ignore
            raise ArgumentTypeError(f"device must be a CUDA torch.device with an ordinal, got {device!r}")
        self.mcast_device_memory = SymmDeviceMemory(
            buf_size, group_size, group_rank, device.index, comm_backend_for_handle_transfer, enable_multicast
        )
        self.buf_size = self.mcast_device_memory.get_usable_buffer_size()
        self.local_device = device

    def lamport_initialize(self, rank: int, dtype: torch.dtype) -> None:
        """See `SymmDeviceMemory.lamport_initialize`."""
        self.mcast_device_memory.lamport_initialize(rank, dtype)

    def get_unicast_buffer(
        self, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0, rank: int | None = None
    ) -> torch.Tensor:
        """Return a tensor over a part of a rank's buffer.

        Args:
            sizes: its shape.
            dtype: its element type.
            storage_offset: elements of `dtype` before it.
            rank: whose buffer; None is this rank's.

        Raises:
            ArgumentValueError: it would reach beyond the buffer, or there is no such rank.
            ClosedError, CheckpointError: as `SymmDeviceMemory.check`.
        """
        memory = self.mcast_device_memory
        offset, nbytes = self._part(sizes, dtype, storage_offset)
        return memory.tensor(memory.group_rank if rank is None else rank, offset, nbytes, dtype).view(sizes)

    def get_multicast_buffer(
        self, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        """Return a tensor over a part of the multicast address, for stores; what loads from it give is undefined.

        Args:
            sizes: its shape.
            dtype: its element type.
            storage_offset: elements of `dtype` before it.

        Raises:
            UnsupportedError: there is no multicast address; the text says why.
            As `get_unicast_buffer`.
        """
        memory = self.mcast_device_memory
        memory.check("get_multicast_buffer")
        if not memory.mc_ptr:
            raise UnsupportedError(f"there is no multicast address: {memory.multicast_reason}")
        offset, nbytes = self._part(sizes, dtype, storage_offset)
        return memory.multicast_tensor(offset, nbytes, dtype).view(sizes)

    def get_multicast_ptr(self) -> int:
        """See `SymmDeviceMemory.get_multicast_ptr`."""
        return self.mcast_device_memory.get_multicast_ptr()

    def get_unicast_ptr(self, rank: int) -> int:
        """See `SymmDeviceMemory.get_unicast_ptr`."""
        return self.mcast_device_memory.get_unicast_ptr(rank)

    def get_buffer_ptrs_dev(self) -> int:
        """See `SymmDeviceMemory.get_buffer_ptrs_dev`."""
        return self.mcast_device_memory.get_buffer_ptrs_dev()

    def close(self, timeout: float | None = None) -> None:
        """See `SharedMemory.close`."""
        self.mcast_device_memory.close(timeout)

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def _part(self, sizes: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> tuple[int, int]:
        offset, nbytes = storage_offset * dtype.itemsize, math.prod(sizes) * dtype.itemsize
        if offset < 0 or nbytes < 1 or offset + nbytes > self.buf_size:
            raise ArgumentValueError(
                f"{tuple(sizes)} of {dtype} from element {storage_offset} on is no part of the {self.buf_size} bytes "
                "of the buffer"
            )
        return offset, nbytes


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment
