"""New process groups of some of a pool's ranks, again and again, each as new as after a restart.

torch names a group that only its members make by their ranks and by how many groups there are, and its rendezvous
finds what an earlier group of that name has left in the store: the second one hangs. So each gets a name of its own.
"""

from __future__ import annotations

import importlib
import uuid
from typing import TYPE_CHECKING, Any, cast

from comm_core.comm_backend import TorchDistBackend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["new_group_of"]


def new_group_of(group: ProcessGroup) -> ProcessGroup:
    """Return a new gloo group of the ranks of `group`, which may then be destroyed. Collective over these ranks.

    Args:
        group: a live group of ranks, which agrees on the name.
    """
    dist = cast("Any", importlib.import_module("torch.distributed"))
    c10d = cast("Any", importlib.import_module("torch.distributed.distributed_c10d"))
    name: str = TorchDistBackend(group).bcast(uuid.uuid4().hex, 0)

    def named(ranks: object) -> str:
        return name

    original = c10d._hash_ranks_to_str
    c10d._hash_ranks_to_str = named
    try:
        ranks = dist.get_process_group_ranks(group)
        return cast("ProcessGroup", dist.new_group(ranks, backend="gloo", use_local_synchronization=True))
    finally:
        c10d._hash_ranks_to_str = original
