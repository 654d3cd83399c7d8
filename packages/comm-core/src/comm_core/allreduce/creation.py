"""What a workspace is created with: checked on this rank, and raised, where it is wrong, on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import torch

from comm_core import _cuda
from comm_core._dtypes import dtype_name
from comm_core._json import Json
from comm_core.allreduce.arguments import check_dtype, flag
from comm_core.comm_backend import CommBackend, CommBackendGroup
from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_core.group import Group, as_group
from comm_core.plugins.discovery import registry
from comm_core.ulysses.decision import default_device
from comm_core.ulysses.validation import count, positive_int

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MAX_BYTES", "Arguments", "members_of"]

MAX_BYTES = 1 << 40
"""Largest capacity that can be asked for: more than any device has, so a slip in the units is an error."""


def members_of(group: ProcessGroup | Group | None, comm_backend: CommBackend | None) -> Group:
    """Return the ranks that `group`, else `comm_backend`, else WORLD means.

    Raises:
        ArgumentTypeError: one of them is something else.
        ArgumentValueError: this process is not a member, or torch.distributed is not initialized.
    """
    if group is None and comm_backend is not None:
        return CommBackendGroup(comm_backend)
    return as_group(group)


class Arguments:
    """A rank's arguments, with what is wrong with them collected instead of raised."""

    def __init__(
        self,
        group: Group,
        *,
        backend: object,
        world_size: object,
        rank: object,
        max_token_num: object,
        hidden_dim: object,
        dtype: object,
        gpus_per_node: object,
        comm_backend: CommBackend | None,
        force_oneshot_support: object,
        device: torch.device | str | int | None,
        static_options: Mapping[str, object],
    ) -> None:
        self.errors: list[Exception] = []
        self.dtype: torch.dtype = torch.bfloat16
        self.device: torch.device | None = None
        self.max_bytes = 0
        self.options: dict[str, Json] = {}
        with self._collect():
            self._same_group(group, world_size, rank, comm_backend)
        with self._collect():
            self.dtype = check_dtype(dtype, "dtype")
        with self._collect():
            tokens = positive_int(max_token_num, "max_token_num")
            hidden = positive_int(hidden_dim, "hidden_dim")
            self.options.update(max_token_num=tokens, hidden_dim=hidden)
            self.max_bytes = tokens * hidden * self.dtype.itemsize
            if self.max_bytes > MAX_BYTES:
                raise ArgumentValueError(
                    f"max_token_num={tokens} rows of hidden_dim={hidden} {dtype_name(self.dtype)} are "
                    f"{self.max_bytes} bytes; at most {MAX_BYTES} can be"
                )
        with self._collect():
            if gpus_per_node is not None:
                self.options["gpus_per_node"] = positive_int(gpus_per_node, "gpus_per_node", 1 << 20)
        with self._collect():
            self.options["force_oneshot_support"] = flag(force_oneshot_support, "force_oneshot_support")
        with self._collect():
            self._static(backend, static_options)
        with self._collect():
            self.device = default_device(group) if device is None else _cuda.normalize_device(device)

    @contextlib.contextmanager
    def _collect(self) -> Generator[None]:
        try:
            yield
        except Exception as error:
            # Whatever it is: the others wait for this rank's request.
            self.errors.append(error)

    def raise_first(self) -> None:
        """Raise what was collected first, for a group of one."""
        if self.errors:
            raise self.errors[0]

    @staticmethod
    def _same_group(group: Group, world_size: object, rank: object, comm_backend: CommBackend | None) -> None:
        if world_size is not None and positive_int(world_size, "world_size") != group.size:
            raise ArgumentValueError(f"world_size must be {group.size}, the ranks of the group, got {world_size}")
        if rank is not None and count(rank, "rank", 1 << 30) != group.rank:
            raise ArgumentValueError(f"rank must be {group.rank}, this process's rank within the group, got {rank}")
        if comm_backend is None:
            return
        other = CommBackendGroup(comm_backend)
        if (other.rank, other.size) != (group.rank, group.size):
            raise ArgumentValueError(
                f"comm_backend has rank {other.rank} of {other.size}, the group {group.rank} of {group.size}: they "
                "must be the same ranks"
            )

    def _static(self, backend: object, static_options: Mapping[str, object]) -> None:
        given = {name: value for name, value in static_options.items() if value is not None}
        if not given:
            return
        found = registry().allreduce.get(backend) if type(backend) is str else None
        taken: frozenset[str] = getattr(found, "static_options", frozenset())
        refused = sorted(set(given) - taken)
        if refused:
            raise ArgumentValueError(
                f"{', '.join(refused)}: backend {backend!r} takes no options that are fixed at compile time, only "
                "those of the kind of 'mnnvl-cutedsl' do; leave them out, and pass what belongs to a call (rms_eps, "
                "weight_bias) to allreduce_fusion"
            )
        for name, value in given.items():
            self.options[name] = dtype_name(value) if isinstance(value, torch.dtype) else _json(name, value)


def _json(name: str, value: object) -> Json:
    if not isinstance(value, (bool, int, float, str)):
        raise ArgumentTypeError(
            f"{name} must be a bool, a number, a str or a torch.dtype, got {type(value).__name__}"
        )
    return value
