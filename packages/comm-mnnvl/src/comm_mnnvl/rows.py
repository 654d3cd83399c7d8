"""MnnvlMemory: a segment on every rank of a tensor-parallel group, all of them as the rows of one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from comm_core import _cuda
from comm_core._json import JsonObject
from comm_core.comm_backend import CommBackend, group_of
from comm_core.errors import ArgumentTypeError, ArgumentValueError, JointError
from comm_core.mapping import Mapping
from comm_core.memory.strided import pack_strided_memory
from comm_mnnvl.backends import default_backend
from comm_mnnvl.shared import SharedMemory, positive

__all__ = ["MnnvlConfig", "MnnvlMemory"]

_FABRIC_PAGE = 1 << 29


@dataclass(frozen=True)
class MnnvlConfig:
    """What `MnnvlMemory` is made with.

    Attributes:
        comm_backend: all ranks of the mapping, in its order; None is WORLD where torch.distributed is initialized,
            else ``MPI.COMM_WORLD``.
        fabric_page_size: what the distance from one rank's segment to the next one's is a multiple of, in bytes. Only
            addresses are spent, not memory.
        device_idx: this rank's CUDA device; None is the current one.
    """

    comm_backend: CommBackend | None = None
    fabric_page_size: int = _FABRIC_PAGE
    device_idx: int | None = None


class MnnvlMemory(SharedMemory):
    """A segment on each tensor-parallel rank, mapped on all of them. The constructor is collective over all ranks.

    The ranks with this rank's pipeline stage and context-parallel place share it; the others make one of their own by
    the same call. Nothing is kept on the class: several live side by side, of equal and of different groups.

    Args:
        mapping: this rank's place in the job.
        size: bytes of the segment; equal on all ranks that share it.
        config: how; equal on all ranks.

    Attributes:
        ptr: address of the first rank's segment, as seen from here.
        rank_stride: bytes from one rank's segment to the next one's.
        segment_size: `size`.

    Raises:
        ArgumentTypeError: `mapping` or `config` is something else; raised here alone.
        JointValueError: an argument that can't be used, or ranks that passed different ones. On every rank.
        JointError: the ranks can't share memory, or a step failed on some rank. On every rank; nothing stays.
        GroupTimeoutError: a rank did not come.
        MPIMissingError: as `default_backend`.
    """

    def __init__(self, mapping: Mapping, size: int, config: MnnvlConfig | None = None) -> None:
        if not isinstance(mapping, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"mapping must be a Mapping, got {type(mapping).__name__}")
        settings = MnnvlConfig() if config is None else config
        if not isinstance(settings, MnnvlConfig):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"config must be a MnnvlConfig, got {type(settings).__name__}")
        self.mapping = mapping
        self.segment_size = size
        ordinal, problem = _device(settings)
        group = group_of(_split(default_backend(settings.comm_backend), mapping))

        def asked() -> JsonObject:
            if problem is not None:
                raise problem
            positive("size", size)
            positive("device_idx", ordinal, 0)
            if (group.size, group.rank) != (mapping.tp_size, mapping.tp_rank):
                raise ArgumentValueError(
                    f"this is rank {group.rank} of {group.size}, and rank {mapping.tp_rank} of {mapping.tp_size} "
                    "tensor-parallel ranks in the mapping"
                )
            return {"nbytes": size, "stride": _stride(size, settings.fabric_page_size)}

        super().__init__("MnnvlMemory", group, ordinal, asked, self._refill)
        self.ptr = self._mapped.addresses[0]
        self.rank_stride = self._mapped.stride

    def as_torch_strided_tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all segments as a tensor ``[tp_size, size // itemsize]``, row r of rank r; it keeps this alive.

        Raises:
            ArgumentValueError: the size is no whole number of elements.
            ClosedError, CheckpointError: as `check`.
        """
        self.check("as_torch_strided_tensor")
        ordinal = self._ordinal if self._tensors.type == "cuda" else -1
        return pack_strided_memory(
            self.ptr, self.segment_size, self.rank_stride, self._group_size, dtype, ordinal, owner=self
        )


def _device(settings: MnnvlConfig) -> tuple[int, Exception | None]:
    """Return this rank's device, or what is to be told to all ranks about it."""
    if settings.device_idx is not None:
        return settings.device_idx, None
    try:
        return _cuda.current_device(), None
    except Exception as error:
        # torch raises whatever it likes where there is no CUDA.
        return -1, error


def _stride(size: int, page: int) -> int:
    positive("fabric_page_size", page)
    return -(-size // page) * page


def _split(backend: CommBackend, mapping: Mapping) -> CommBackend:
    """Return the ranks that share memory with this one. Collective over all ranks of the mapping."""
    what = "MnnvlMemory: the ranks of the mapping"
    group = group_of(backend)
    places = group.gather(what, [mapping.world_size, mapping.rank])
    wrong = {
        rank: f"the mapping says rank {place[1]} of {place[0]}"  # type: ignore[index]
        for rank, place in enumerate(places)
        if place != [group.size, rank]
    }
    if wrong:
        raise JointError(f"{what}: the backend has {group.size}", wrong)
    part = backend.Split(mapping.pp_rank * mapping.cp_size + mapping.cp_rank, mapping.tp_rank)
    assert part is not None
    return part
