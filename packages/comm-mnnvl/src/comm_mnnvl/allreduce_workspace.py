"""The workspace of the all-reduce backend ``"mnnvl"``, under its specified name."""

from __future__ import annotations

import math

import torch

from comm_core.allreduce import launch as launches
from comm_core.allreduce.front import create_allreduce_fusion_workspace
from comm_core.allreduce.kernels import WindowAllReduceWorkspace
from comm_core.allreduce.patterns import MNNVLAllreduceFusionStrategy
from comm_core.comm_backend import CommBackend
from comm_core.errors import ArgumentValueError
from comm_core.mapping import Mapping
from comm_mnnvl.backends import default_backend

__all__ = ["MNNVLAllReduceFusionWorkspace", "use_oneshot"]


def use_oneshot(strategy: MNNVLAllreduceFusionStrategy | int) -> bool | None:
    """Return what `strategy` means to `allreduce_fusion`.

    Raises:
        ArgumentValueError: it is no strategy.
    """
    try:
        code = MNNVLAllreduceFusionStrategy(strategy)
    except ValueError:
        names = ", ".join(f"{int(item)} {item.name}" for item in MNNVLAllreduceFusionStrategy)
        raise ArgumentValueError(f"strategy must be one of {names}, got {strategy!r}") from None
    return None if code is MNNVLAllreduceFusionStrategy.AUTO else code is MNNVLAllreduceFusionStrategy.ONESHOT


class MNNVLAllReduceFusionWorkspace(WindowAllReduceWorkspace):
    """What `allreduce_fusion` and the ``trtllm_mnnvl_*`` functions run on. The constructor is collective.

    The memory is of VMM handles: file descriptors on one host, fabric handles between hosts. No multicast.

    Args:
        mapping: says which rank this is, and how many there are: its tensor-parallel ranks.
        max_num_tokens: rows that a call may reduce; or `buffer_size_in_bytes`.
        hidden_dim: elements of a row.
        dtype: element type.
        buffer_size_in_bytes: bytes of a buffer, as `get_required_buffer_size_bytes` has them; there are two.
        comm_backend: the ranks; None is WORLD where torch.distributed is initialized, else ``MPI.COMM_WORLD``.

    Raises:
        ArgumentValueError: neither a size in tokens nor one in bytes was given, or both.
        As `comm_core.create_allreduce_fusion_workspace`.
    """

    name = "mnnvl"

    def __init__(
        self,
        mapping: Mapping,
        max_num_tokens: int | None = None,
        hidden_dim: int | None = None,
        dtype: torch.dtype | None = None,
        buffer_size_in_bytes: int | None = None,
        comm_backend: CommBackend | None = None,
    ) -> None:
        # Nothing is to be destroyed if something below raises.
        self._destroyed = True
        in_tokens = (max_num_tokens, hidden_dim, dtype)
        if (buffer_size_in_bytes is None) == (max_num_tokens is None):
            raise ArgumentValueError(
                "one of max_num_tokens (with hidden_dim and dtype) and buffer_size_in_bytes must be given, got "
                f"max_num_tokens={max_num_tokens}, buffer_size_in_bytes={buffer_size_in_bytes}"
            )
        if buffer_size_in_bytes is not None:
            # The largest operand whose required bytes fit, in elements of one byte pair.
            in_tokens = (max(1, buffer_size_in_bytes // 2), 1, dtype or torch.bfloat16)
        tokens, hidden, element = in_tokens
        self._take(
            create_allreduce_fusion_workspace(
                "mnnvl",
                world_size=mapping.tp_size,
                rank=mapping.tp_rank,
                max_token_num=tokens,
                hidden_dim=hidden,
                dtype=element,
                gpus_per_node=mapping.gpus_per_node,
                comm_backend=default_backend(comm_backend),
            )
        )
        self.tp_size = mapping.tp_size
        if buffer_size_in_bytes is not None:
            # What was asked for is what calls are measured by; more was allocated than it takes.
            self.buffer_bytes = min(self.buffer_bytes, buffer_size_in_bytes)

    @property
    def buffer_size_bytes(self) -> int:
        """Bytes of a buffer."""
        return self.buffer_bytes

    @staticmethod
    def get_required_buffer_size_bytes(
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        strategy: MNNVLAllreduceFusionStrategy = MNNVLAllreduceFusionStrategy.AUTO,
    ) -> int:
        """Return the bytes of a buffer that a call of this size needs. Pure.

        Args:
            tp_size: ranks.
            num_tokens: rows.
            hidden_dim: elements of a row.
            dtype: of the elements.
            strategy: one shot, two shots, or what is chosen by size.

        Raises:
            ArgumentValueError: `strategy` is none, or a size is not positive.
        """
        if min(tp_size, num_tokens, hidden_dim) < 1:
            raise ArgumentValueError(
                f"sizes must be at least 1, got tp_size={tp_size}, num_tokens={num_tokens}, hidden_dim={hidden_dim}"
            )
        nbytes = math.prod((num_tokens, hidden_dim, dtype.itemsize))
        return launches.required_bytes(tp_size, nbytes, use_oneshot(strategy))

    def is_buffer_size_sufficient(
        self,
        tp_size: int,
        num_tokens: int,
        hidden_dim: int,
        dtype: torch.dtype,
        use_oneshot: bool | MNNVLAllreduceFusionStrategy | None = None,
        *,
        strategy: MNNVLAllreduceFusionStrategy | None = None,
    ) -> bool:
        """Return whether a call of this size fits. Local.

        Args:
            tp_size: ranks; another number than the workspace's never fits.
            num_tokens: rows that are reduced.
            hidden_dim: elements of a row.
            dtype: of the elements.
            use_oneshot: as in `allreduce_fusion`; a strategy in its place is one.
            strategy: the same, under this backend's name.
        """
        given = strategy if strategy is not None else use_oneshot
        if given is not None and not isinstance(given, bool):
            given = _use_oneshot(given)
        return super().is_buffer_size_sufficient(tp_size, num_tokens, hidden_dim, dtype, given)


_use_oneshot = use_oneshot
