"""Mapping: which rank is what under tensor, context, pipeline and expert parallelism.

A rank is a number with mixed digits, tensor parallelism fastest, then context, then pipeline::

    rank = tp_rank + tp_size * (cp_rank + cp_size * pp_rank)

and inside the tensor-parallel digit, for mixture-of-experts layers::

    tp_rank = moe_ep_rank + moe_ep_size * (moe_cluster_rank + moe_cluster_size * moe_tp_rank)

Every axis is therefore a stride and a size, and every rank and group below follows from that one table. Pure: nothing
here communicates or looks at the machine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping as AbstractMapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["Mapping", "UnsupportedMappingError"]

_UNSET = -1
"""What the specification uses for "derive this size from the others"."""

_INTEGERS = (
    "world_size",
    "rank",
    "gpus_per_node",
    "cp_size",
    "tp_size",
    "pp_size",
    "moe_cluster_size",
    "moe_tp_size",
    "moe_ep_size",
    "attn_tp_size",
    "attn_cp_size",
)
_FLAGS = ("auto_parallel", "enable_attention_dp")


class UnsupportedMappingError(UnsupportedError, NotImplementedError):
    """A combination of sizes that makes sense and that no kernel implements yet."""


class _Axis(NamedTuple):
    """One digit of the rank number."""

    stride: int
    size: int


class Mapping:
    """The place of one rank in a job.

    Everything but `rank` is fixed at construction; `rank` may be assigned, so that one mapping can be copied and
    moved through all ranks. Two mappings are equal when all of their arguments are, `rank` and `cp_config` included,
    so don't assign `rank` to a mapping that is a dictionary key.

    Args:
        world_size: ranks of the job.
        rank: this rank, ``0 <= rank < world_size``.
        gpus_per_node: ranks of one node; node n holds ranks ``n * gpus_per_node`` and up.
        cp_size: context-parallel ranks.
        cp_config: settings of the context parallelism; copied, and readable as `cp_config`.
        tp_size: tensor-parallel ranks.
        pp_size: pipeline stages. ``tp_size * cp_size * pp_size`` must be `world_size`.
        moe_cluster_size: MoE cluster ranks, -1 for 1.
        moe_tp_size: tensor-parallel ranks of MoE layers, -1 for what the other two leave of `tp_size`.
        moe_ep_size: expert-parallel ranks, -1 likewise (and 1 if `moe_tp_size` is not given either).
            ``moe_tp_size * moe_ep_size * moe_cluster_size`` must be `tp_size`.
        attn_tp_size: tensor-parallel ranks of attention, -1 for ``tp_size * cp_size // attn_cp_size``.
        attn_cp_size: context-parallel ranks of attention; only 1 is supported, which is also what -1 means.
        auto_parallel: sizes are chosen later by somebody else: tp_size, cp_size and pp_size must be 1, every rank is
            rank 0 of each axis and alone in its groups.
        enable_attention_dp: attention is data parallel over the tensor-parallel ranks.

    Raises:
        ArgumentTypeError: an argument has the wrong type; a `bool` is not an integer here.
        ArgumentValueError: sizes that don't multiply up, or a rank outside of the job.
        UnsupportedMappingError: expert parallelism together with context parallelism.
    """

    world_size: int
    gpus_per_node: int
    cp_size: int
    tp_size: int
    pp_size: int
    moe_cluster_size: int
    moe_tp_size: int
    moe_ep_size: int
    attn_tp_size: int
    attn_cp_size: int
    auto_parallel: bool
    enable_attention_dp: bool
    cp_config: AbstractMapping[str, Any]
    """Read-only."""
    _rank: int

    def __init__(
        self,
        world_size: int = 1,
        rank: int = 0,
        gpus_per_node: int = 8,
        *,
        cp_size: int = 1,
        cp_config: AbstractMapping[str, Any] | None = None,
        tp_size: int = 1,
        pp_size: int = 1,
        moe_cluster_size: int = _UNSET,
        moe_tp_size: int = _UNSET,
        moe_ep_size: int = _UNSET,
        attn_tp_size: int = _UNSET,
        attn_cp_size: int = _UNSET,
        auto_parallel: bool = False,
        enable_attention_dp: bool = False,
    ) -> None:
        _check_sizes(
            world_size=world_size, gpus_per_node=gpus_per_node, tp_size=tp_size, cp_size=cp_size, pp_size=pp_size
        )
        _check_sizes(
            or_unset=True,
            moe_cluster_size=moe_cluster_size,
            moe_tp_size=moe_tp_size,
            moe_ep_size=moe_ep_size,
            attn_tp_size=attn_tp_size,
            attn_cp_size=attn_cp_size,
        )
        for name, flag in (("auto_parallel", auto_parallel), ("enable_attention_dp", enable_attention_dp)):
            if not isinstance(cast("object", flag), bool):
                raise ArgumentTypeError(f"{name} must be a bool, got {flag!r} ({type(flag).__name__})")
        if cp_config is not None and not isinstance(cast("object", cp_config), AbstractMapping):
            raise ArgumentTypeError(f"cp_config must be a dict or None, got {type(cp_config).__name__}")

        if auto_parallel:
            if (tp_size, cp_size, pp_size) != (1, 1, 1):
                raise ArgumentValueError(
                    "auto_parallel chooses the sizes itself, so tp_size, cp_size and pp_size must be 1, "
                    f"got tp_size={tp_size}, cp_size={cp_size}, pp_size={pp_size}"
                )
        elif tp_size * cp_size * pp_size != world_size:
            raise ArgumentValueError(
                f"tp_size * cp_size * pp_size must be world_size, got {tp_size} * {cp_size} * {pp_size} = "
                f"{tp_size * cp_size * pp_size} and world_size={world_size}"
            )
        moe = _moe_sizes(tp_size, cp_size, moe_cluster_size, moe_tp_size, moe_ep_size)
        attention = _attention_sizes(tp_size * cp_size, attn_tp_size, attn_cp_size)

        values = {
            "world_size": world_size,
            "gpus_per_node": gpus_per_node,
            "cp_size": cp_size,
            "tp_size": tp_size,
            "pp_size": pp_size,
            "auto_parallel": auto_parallel,
            "enable_attention_dp": enable_attention_dp,
            **moe,
            **attention,
            "cp_config": MappingProxyType(copy.deepcopy(dict(cp_config or {}))),
        }
        for name, item in values.items():
            object.__setattr__(self, name, item)
        self.rank = rank

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse everything but `rank`: ranks and groups would no longer follow from what was validated."""
        if name != "rank":
            raise AttributeError(f"{name} of a Mapping can't be assigned; make a new Mapping")
        object.__setattr__(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse."""
        raise AttributeError(f"{name} of a Mapping can't be deleted")

    # The rank and its digits

    @property
    def rank(self) -> int:
        """This rank. Assigning one outside of the job raises `ArgumentValueError`."""
        return self._rank

    @rank.setter
    def rank(self, rank: int) -> None:
        object.__setattr__(self, "_rank", self._check_rank(rank))

    @property
    def tp_rank(self) -> int:
        """Tensor-parallel rank."""
        return self._digit(self._tp)

    @property
    def cp_rank(self) -> int:
        """Context-parallel rank."""
        return self._digit(self._cp)

    @property
    def pp_rank(self) -> int:
        """Pipeline stage."""
        return self._digit(self._pp)

    @property
    def moe_tp_rank(self) -> int:
        """Tensor-parallel rank of MoE layers."""
        return self._digit(self._moe_tp)

    @property
    def moe_cluster_rank(self) -> int:
        """Rank in the MoE cluster."""
        return self._digit(self._moe_cluster)

    @property
    def moe_ep_rank(self) -> int:
        """Expert-parallel rank."""
        return self._digit(self._moe_ep)

    @property
    def node_rank(self) -> int:
        """Node of this rank."""
        return self.rank // self.gpus_per_node

    @property
    def local_rank(self) -> int:
        """Position of this rank on its node."""
        return self.rank % self.gpus_per_node

    def get_node_rank(self, rank: int) -> int:
        """Return the node of `rank`."""
        return self._check_rank(rank) // self.gpus_per_node

    def get_local_rank(self, rank: int) -> int:
        """Return the position of `rank` on its node."""
        return self._check_rank(rank) % self.gpus_per_node

    # This rank's group on each axis, in the order of the axis: group[tp_rank] is this rank

    @property
    def tp_group(self) -> list[int]:
        """Ranks of this rank's tensor-parallel group."""
        return self._group(self._tp, self.rank)

    @property
    def cp_group(self) -> list[int]:
        """Ranks of this rank's context-parallel group."""
        return self._group(self._cp, self.rank)

    @property
    def pp_group(self) -> list[int]:
        """Ranks of this rank's pipeline, first stage first."""
        return self._group(self._pp, self.rank)

    @property
    def moe_tp_group(self) -> list[int]:
        """Ranks of this rank's MoE tensor-parallel group."""
        return self._group(self._moe_tp, self.rank)

    @property
    def moe_cluster_group(self) -> list[int]:
        """Ranks of this rank's MoE cluster."""
        return self._group(self._moe_cluster, self.rank)

    @property
    def moe_ep_group(self) -> list[int]:
        """Ranks of this rank's expert-parallel group."""
        return self._group(self._moe_ep, self.rank)

    # All groups of each axis, ordered by their first rank: what every rank passes to new_group in the same order

    @property
    def tp_groups(self) -> list[list[int]]:
        """All tensor-parallel groups."""
        return self._groups(self._tp)

    @property
    def cp_groups(self) -> list[list[int]]:
        """All context-parallel groups."""
        return self._groups(self._cp)

    @property
    def pp_groups(self) -> list[list[int]]:
        """All pipelines."""
        return self._groups(self._pp)

    @property
    def moe_tp_groups(self) -> list[list[int]]:
        """All MoE tensor-parallel groups."""
        return self._groups(self._moe_tp)

    @property
    def moe_cluster_groups(self) -> list[list[int]]:
        """All MoE clusters."""
        return self._groups(self._moe_cluster)

    @property
    def moe_ep_groups(self) -> list[list[int]]:
        """All expert-parallel groups."""
        return self._groups(self._moe_ep)

    # Questions

    def has_tp(self) -> bool:
        """Return whether there is tensor parallelism."""
        return self.tp_size > 1

    def has_cp(self) -> bool:
        """Return whether there is context parallelism."""
        return self.cp_size > 1

    def has_pp(self) -> bool:
        """Return whether there is pipeline parallelism."""
        return self.pp_size > 1

    def has_moe_tp(self) -> bool:
        """Return whether MoE layers are tensor parallel."""
        return self.moe_tp_size > 1

    def has_moe_cluster(self) -> bool:
        """Return whether there are MoE clusters."""
        return self.moe_cluster_size > 1

    def has_moe_ep(self) -> bool:
        """Return whether there is expert parallelism."""
        return self.moe_ep_size > 1

    def is_multi_node(self) -> bool:
        """Return whether the job spans nodes."""
        return self.world_size > self.gpus_per_node

    def is_first_pp_rank(self) -> bool:
        """Return whether this rank is in the first pipeline stage."""
        return self.pp_rank == 0

    def is_last_pp_rank(self) -> bool:
        """Return whether this rank is in the last pipeline stage."""
        return self.pp_rank == self.pp_size - 1

    def is_second_last_pp_rank(self) -> bool:
        """Return whether this rank is in the last pipeline stage but one (never where there is one stage)."""
        return self.pp_rank == self.pp_size - 2

    def prev_pp_rank(self) -> int:
        """Return the rank of the stage before this one; the first stage's is the last one's."""
        return self.pp_group[self.pp_rank - 1]

    def next_pp_rank(self) -> int:
        """Return the rank of the stage after this one; the last stage's is the first one's."""
        return self.pp_group[(self.pp_rank + 1) % self.pp_size]

    def pp_layers(self, num_layers: int) -> list[int]:
        """Return the layers of this rank's stage: contiguous, the first ``num_layers % pp_size`` stages one more."""
        _check_sizes(least=0, num_layers=num_layers)
        each, extra = divmod(num_layers, self.pp_size)
        first = self.pp_rank * each + min(self.pp_rank, extra)
        return list(range(first, first + each + (self.pp_rank < extra)))

    def ep_experts(self, num_experts: int) -> list[int]:
        """Return the experts of this rank: contiguous and equally many on every expert-parallel rank.

        Raises:
            ArgumentValueError: `moe_ep_size` does not divide `num_experts`, so that some expert would have no rank.
        """
        _check_sizes(least=0, num_experts=num_experts)
        each, rest = divmod(num_experts, self.moe_ep_size)
        if rest:
            raise ArgumentValueError(
                f"moe_ep_size={self.moe_ep_size} must divide num_experts, got {num_experts}: "
                f"{rest} of them would belong to no rank"
            )
        return list(range(self.moe_ep_rank * each, (self.moe_ep_rank + 1) * each))

    # Round trip and identity

    def to_dict(self) -> dict[str, Any]:
        """Return all arguments, with derived sizes filled in; `from_dict` makes an equal mapping of it."""
        values: dict[str, Any] = {name: getattr(self, name) for name in (*_INTEGERS, *_FLAGS)}
        values["cp_config"] = copy.deepcopy(dict(self.cp_config))
        return values

    @classmethod
    def from_dict(cls, mapping: AbstractMapping[str, Any]) -> Mapping:
        """Make a mapping of a dictionary of constructor arguments; absent ones have their defaults.

        Raises:
            ArgumentValueError: it has a key that is no argument.
        """
        unknown = sorted(str(key) for key in mapping if key not in (*_INTEGERS, *_FLAGS, "cp_config"))
        if unknown:
            raise ArgumentValueError(f"a Mapping has no {', '.join(unknown)}")
        return cls(**mapping)

    def __eq__(self, other: object) -> bool:
        """Compare all arguments."""
        if not isinstance(other, Mapping):
            return NotImplemented
        return self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        """Hash all arguments."""
        numbers = tuple(getattr(self, name) for name in (*_INTEGERS, *_FLAGS))
        return hash((numbers, _hashable(self.cp_config)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as the dictionary of arguments."""
        return type(self).from_dict, (self.to_dict(),)

    def __repr__(self) -> str:
        """Show all arguments."""
        return f"Mapping({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"

    # The table of axes, and what follows from it

    @property
    def _tp(self) -> _Axis:
        return _Axis(1, self.tp_size)

    @property
    def _cp(self) -> _Axis:
        return _Axis(self.tp_size, self.cp_size)

    @property
    def _pp(self) -> _Axis:
        return _Axis(self.tp_size * self.cp_size, self.pp_size)

    @property
    def _moe_ep(self) -> _Axis:
        return _Axis(1, self.moe_ep_size)

    @property
    def _moe_cluster(self) -> _Axis:
        return _Axis(self.moe_ep_size, self.moe_cluster_size)

    @property
    def _moe_tp(self) -> _Axis:
        return _Axis(self.moe_ep_size * self.moe_cluster_size, self.moe_tp_size)

    def _digit(self, axis: _Axis) -> int:
        return self.rank // axis.stride % axis.size

    @staticmethod
    def _group(axis: _Axis, rank: int) -> list[int]:
        first = rank - rank // axis.stride % axis.size * axis.stride
        return [first + position * axis.stride for position in range(axis.size)]

    def _groups(self, axis: _Axis) -> list[list[int]]:
        firsts = (rank for rank in range(self.world_size) if rank // axis.stride % axis.size == 0)
        return [self._group(axis, rank) for rank in firsts]

    def _check_rank(self, rank: int) -> int:
        _check_integer("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ArgumentValueError(
                f"rank must be in 0..{self.world_size - 1} (world_size={self.world_size}), got {rank}"
            )
        return rank


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")


def _check_sizes(*, least: int = 1, or_unset: bool = False, **sizes: int) -> None:
    for name, size in sizes.items():
        _check_integer(name, size)
        if size < least and not (or_unset and size == _UNSET):
            choice = " or -1 (derived)" if or_unset else ""
            raise ArgumentValueError(f"{name} must be at least {least}{choice}, got {size}")


def _moe_sizes(tp_size: int, cp_size: int, cluster: int, tensor: int, expert: int) -> dict[str, int]:
    """Fill in and check the sizes of MoE layers, which share out the tensor-parallel ranks."""
    cluster = 1 if cluster == _UNSET else cluster
    if expert == _UNSET:
        expert = 1 if tensor == _UNSET else max(tp_size // (tensor * cluster), 1)
    if tensor == _UNSET:
        tensor = max(tp_size // (expert * cluster), 1)
    if tensor * expert * cluster != tp_size:
        raise ArgumentValueError(
            f"moe_tp_size * moe_ep_size * moe_cluster_size must be tp_size, got {tensor} * {expert} * {cluster} = "
            f"{tensor * expert * cluster} and tp_size={tp_size}"
        )
    if expert > 1 and cp_size > 1:
        raise UnsupportedMappingError(
            f"expert parallelism does not work with context parallelism yet, got moe_ep_size={expert} and "
            f"cp_size={cp_size}: one of them must be 1"
        )
    if expert > 1 and cluster > 1:
        raise ArgumentValueError(
            f"MoE clusters exclude expert parallelism, got moe_cluster_size={cluster} and moe_ep_size={expert}: one "
            "of them must be 1"
        )
    return {"moe_cluster_size": cluster, "moe_tp_size": tensor, "moe_ep_size": expert}


def _attention_sizes(ranks: int, tensor: int, context: int) -> dict[str, int]:
    """Fill in and check the sizes of attention, which shares out the tensor- and context-parallel ranks."""
    if context == _UNSET:
        # Ulysses: context parallelism turns into head parallelism inside attention.
        context = 1 if tensor == _UNSET else max(ranks // tensor, 1)
    if tensor == _UNSET:
        tensor = max(ranks // context, 1)
    if context != 1:
        raise ArgumentValueError(
            f"attn_cp_size must be 1: attention has every token of its heads, got attn_cp_size={context} "
            f"(attn_tp_size={tensor}, tp_size * cp_size={ranks})"
        )
    if tensor != ranks:
        raise ArgumentValueError(
            f"attn_tp_size * attn_cp_size must be tp_size * cp_size, got {tensor} * {context} and {ranks}"
        )
    return {"attn_tp_size": tensor, "attn_cp_size": context}


def _hashable(value: object) -> object:
    """Return something hashable that is equal for equal settings."""
    if isinstance(value, AbstractMapping):
        items = cast("AbstractMapping[object, object]", value).items()
        return frozenset((key, _hashable(item)) for key, item in items)
    if isinstance(value, list | tuple):
        # A list never equals a tuple, so which of them it is belongs to it.
        return isinstance(value, list), tuple(_hashable(item) for item in cast("list[object]", value))
    if isinstance(value, set | frozenset):
        return frozenset(cast("set[object]", value))
    try:
        hash(value)
    except TypeError:
        # Equal values must hash alike, and nothing is known about this type.
        return type(value).__name__
    return value
