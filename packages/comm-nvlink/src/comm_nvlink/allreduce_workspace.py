"""The workspace of the backend ``"trtllm"``, under its specified name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comm_core.allreduce.front import create_allreduce_fusion_workspace
from comm_core.allreduce.kernels import WindowAllReduceWorkspace

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from comm_core.comm_backend import CommBackend
    from comm_core.group import Group

__all__ = ["TRTLLMAllReduceFusionWorkspace"]


class TRTLLMAllReduceFusionWorkspace(WindowAllReduceWorkspace):
    """What `allreduce_fusion` runs on over NVLink. The constructor is collective.

    The same as ``create_allreduce_fusion_workspace("trtllm", …)``, which has more arguments.

    Args:
        tp_size: ranks of the group. Another number than it has is refused.
        tp_rank: this rank within it. Another number is refused.
        max_token_num: rows that a call may reduce.
        hidden_dim: elements of a row; together they give the capacity.
        dtype: element type: float16, bfloat16 or float32.
        comm_backend: control plane to use instead of a process group.
        group: process group of the ranks; None is `comm_backend`'s, else WORLD.

    Raises:
        As `comm_core.create_allreduce_fusion_workspace`.
    """

    name = "trtllm"

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype = torch.float16,
        comm_backend: CommBackend | None = None,
        group: ProcessGroup | Group | None = None,
    ) -> None:
        # Nothing is to be destroyed if the next call raises.
        self._destroyed = True
        self._take(
            create_allreduce_fusion_workspace(
                "trtllm",
                world_size=tp_size,
                rank=tp_rank,
                max_token_num=max_token_num,
                hidden_dim=hidden_dim,
                dtype=dtype,
                comm_backend=comm_backend,
                group=group,
            )
        )
