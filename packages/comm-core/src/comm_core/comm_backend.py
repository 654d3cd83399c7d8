"""CommBackend: the small control-plane interface that workspaces take, over torch.distributed or MPI.

It exchanges handles and settings between ranks, never data. Its methods are named as mpi4py's are, and any object
that has them is one. Ranks and roots are ranks *of the backend*: after `Split`, 0 is the first of one's own part.
"""

from __future__ import annotations

import base64
import json
import math
import pickle
import uuid
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from comm_core import _env
from comm_core._json import Json, canonical
from comm_core.consensus import joint
from comm_core.errors import ArgumentTypeError, ArgumentValueError, JointError, JointValueError, UnsupportedError
from comm_core.group import Group, Store, StoreGroup, as_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "CommBackend",
    "CommBackendGroup",
    "MPIBackend",
    "MPIMissingError",
    "NoProcessGroupError",
    "TorchDistBackend",
    "group_of",
]

_MAX_CHARACTERS = 4 << 20
"""Of one rank's value as text. TCPStore resets the connection at 8 MiB, without an answer."""


class NoProcessGroupError(ArgumentValueError, RuntimeError):
    """There is no process group to use: torch.distributed is not initialized, or this process is not a member."""


class MPIMissingError(UnsupportedError, ImportError):
    """mpi4py, or the MPI library under it, is not there."""


@runtime_checkable
class CommBackend(Protocol):
    """What a workspace needs of a group of ranks. Every method but the first two is collective.

    An object need not inherit from this class; one that does must define every method.
    """

    @abstractmethod
    def Get_rank(self) -> int:
        """Return this process's rank in the backend."""
        ...

    @abstractmethod
    def Get_size(self) -> int:
        """Return the number of ranks."""
        ...

    @abstractmethod
    def allgather(self, data: Any) -> Sequence[Any]:
        """Return every rank's `data`, in rank order."""
        ...

    @abstractmethod
    def bcast(self, data: Any, root: int) -> Any:
        """Return the `data` of rank `root` of the backend; what the others pass is not looked at."""
        ...

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""
        ...

    @abstractmethod
    def Split(self, color: int | None, key: int) -> CommBackend | None:
        """Return the backend of the ranks that passed the same `color`, ordered by `key` and then by rank.

        A rank that passes None takes part and gets None.
        """
        ...


class TorchDistBackend:
    """A backend over a torch process group, gloo or NCCL alike.

    Values travel through the group's key-value store, with a deadline (``COMM_TIMEOUT_S``) that names missing ranks:
    no CUDA, no collective of the group, and no pickle. What travels as it is: None, bool, int, float, str, bytes, and
    lists, tuples and dicts of these (a bytearray arrives as bytes); up to 4 MiB a rank. Anything else is refused on
    all ranks, unless all of them pass ``allow_pickle=True``.

    `Split` makes no process groups: its parts share the store. So it needs only the ranks of this backend (torch's
    `new_group` needs the whole job), costs no connections, leaves nothing to destroy, and keeps the order of the keys
    (`new_group` sorts by rank).

    Args:
        group: a process group, a `comm_core` group, or None for WORLD.
        allow_pickle: also send other values, by pickle. Unpickling runs what the sender wrote, so the ranks must
            trust whoever can reach the store. Equal on all ranks.

    Raises:
        NoProcessGroupError: there is no such process group here.
        ArgumentTypeError: `group` is something else.
    """

    def __init__(self, group: ProcessGroup | Group | None = None, *, allow_pickle: bool = False) -> None:
        try:
            self._group = as_group(group)
        except ArgumentTypeError:
            raise
        except ValueError as error:
            raise NoProcessGroupError(str(error)) from error
        self._allow_pickle = allow_pickle

    @property
    def group(self) -> Group:
        """The ranks as a `comm_core` group."""
        return self._group

    @property
    def process_group(self) -> ProcessGroup | None:
        """The torch process group, or None for a part that `Split` made."""
        return self._group.process_group

    def Get_rank(self) -> int:
        """See `CommBackend.Get_rank`."""
        return self._group.rank

    def Get_size(self) -> int:
        """See `CommBackend.Get_size`."""
        return self._group.size

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """See `CommBackend.allgather`.

        Raises:
            JointValueError: a rank's value can't be sent, or is too large. On every rank.
            JointError: the ranks are at different steps. On every rank.
            GroupTimeoutError: a rank did not come.
        """
        what = "CommBackend.allgather"
        records = self._joint(what, lambda: {"value": self._pack(data)})
        self._agree(what, "allow_pickle", records)
        return tuple(_decode(record["value"], self._allow_pickle) for record in records)

    def bcast(self, data: Any, root: int) -> Any:
        """See `CommBackend.bcast`.

        Raises:
            JointValueError: as in `allgather`; also a root that is no rank, or not the same on all ranks.
            JointError: as in `allgather`.
            GroupTimeoutError: as in `allgather`.
        """
        what = "CommBackend.bcast"

        def mine() -> dict[str, Json]:
            rank = _rank("root", root, self._group.size)
            return {"root": rank, "value": self._pack(data) if rank == self._group.rank else None}

        records = self._joint(what, mine)
        self._agree(what, "root", records)
        self._agree(what, "allow_pickle", records)
        return _decode(records[root]["value"], self._allow_pickle)

    def barrier(self) -> None:
        """See `CommBackend.barrier`; errors as in `allgather`."""
        self._group.barrier("CommBackend.barrier")

    def Split(self, color: int | None, key: int) -> TorchDistBackend | None:
        """See `CommBackend.Split`.

        Raises:
            JointValueError: a colour that is neither None nor a non-negative integer, or a key that is no integer, on
                any rank. On every rank.
            GroupTimeoutError: a rank did not come.
        """

        def mine() -> dict[str, Json]:
            return {"color": _color(color), "key": _integer("key", key), "label": uuid.uuid4().hex}

        records = self._joint("CommBackend.Split", mine)
        if color is None:
            return None
        members = sorted((record["key"], rank) for rank, record in enumerate(records) if record["color"] == color)
        position = members.index((key, self._group.rank))
        # The first rank's label tells this call's parts from those of any other call; the colour, from each other.
        store = _Part(_store(self._group), f"comm_core/split/{records[0]['label']}/{color}/")
        part = StoreGroup(
            store, position, len(members), name=f"{self._group.name}/{color}", timeout_s=self._group.timeout_s
        )
        return TorchDistBackend(part, allow_pickle=self._allow_pickle)

    def _joint(self, what: str, make: Any) -> list[dict[str, Any]]:
        def mine() -> dict[str, Json]:
            return {**make(), "allow_pickle": self._allow_pickle}

        return cast("list[dict[str, Any]]", joint(self._group, what, mine, error=JointValueError))

    def _agree(self, what: str, name: str, records: Sequence[dict[str, Any]]) -> None:
        """Raise, on every rank, unless all passed the same `name`."""
        if any(record[name] != records[0][name] for record in records):
            per_rank = {rank: f"{name}={record[name]!r}" for rank, record in enumerate(records)}
            raise JointValueError(f"{what}: {name} must be equal on all ranks", per_rank)

    def _pack(self, data: object) -> Json:
        value = _encode(data, self._allow_pickle)
        size = len(canonical(value))
        if size > _MAX_CHARACTERS:
            raise ArgumentValueError(
                f"a value may take {_MAX_CHARACTERS} characters, got {size}: send data by tensor"
            )
        return value


class MPIBackend:
    """A backend over an MPI communicator, by mpi4py (which pickles what it sends).

    MPI has no deadlines: a rank that does not come is waited for.

    Args:
        comm: an mpi4py communicator, or None for ``MPI.COMM_WORLD``.

    Raises:
        MPIMissingError: `comm` is None and mpi4py can't be imported.
    """

    def __init__(self, comm: Any = None) -> None:
        self._comm: Any = _mpi().COMM_WORLD if comm is None else comm
        self._owned = False

    @property
    def comm(self) -> Any:
        """The mpi4py communicator."""
        return self._comm

    def Get_rank(self) -> int:
        """See `CommBackend.Get_rank`."""
        return int(self._comm.Get_rank())

    def Get_size(self) -> int:
        """See `CommBackend.Get_size`."""
        return int(self._comm.Get_size())

    def allgather(self, data: Any) -> tuple[Any, ...]:
        """See `CommBackend.allgather`."""
        return tuple(self._comm.allgather(data))

    def bcast(self, data: Any, root: int) -> Any:
        """See `CommBackend.bcast`. A `root` that is no rank raises before anything is sent, on this rank alone."""
        return self._comm.bcast(data, root=_rank("root", root, self.Get_size()))

    def barrier(self) -> None:
        """See `CommBackend.barrier`."""
        self._comm.Barrier()

    def Split(self, color: int | None, key: int) -> MPIBackend | None:
        """See `CommBackend.Split`; ``MPI.UNDEFINED`` is None too. A wrong argument raises on this rank alone."""
        mpi = _mpi()
        chosen = mpi.UNDEFINED if color is None or color == mpi.UNDEFINED else _color(color)
        comm = self._comm.Split(chosen, _integer("key", key))
        if comm == mpi.COMM_NULL:
            return None
        part = MPIBackend(comm)
        part._owned = True
        return part

    def Free(self) -> None:
        """Free the communicator if `Split` made it. Collective. MPI has a few thousand of them."""
        if self._owned:
            self._comm.Free()
            self._owned = False


class CommBackendGroup(Group):
    """Any `CommBackend` as a group of this package, for everything that takes a group.

    Over `TorchDistBackend` it is that backend's own group, deadlines and process group included. Any other backend
    waits as long as it waits: the timeouts of a group mean nothing to it.

    Args:
        backend: the backend.

    Raises:
        ArgumentTypeError: it lacks a method of `CommBackend`.
    """

    def __init__(self, backend: CommBackend) -> None:
        if not isinstance(cast("object", backend), CommBackend):
            missing = [name for name in _METHODS if not callable(getattr(backend, name, None))]
            raise ArgumentTypeError(f"{type(backend).__name__} is no CommBackend: it has no {', '.join(missing)}")
        self.backend = backend
        self._inner = backend.group if isinstance(backend, TorchDistBackend) else None
        self.rank = backend.Get_rank()
        self.size = backend.Get_size()
        self.name = type(backend).__name__ if self._inner is None else self._inner.name
        self.timeout_s = _env.timeout_s() if self._inner is None else self._inner.timeout_s

    @property
    def process_group(self) -> ProcessGroup | None:
        """See `Group.process_group`."""
        return None if self._inner is None else self._inner.process_group

    @property
    def backends(self) -> dict[str, str]:
        """See `Group.backends`."""
        return {} if self._inner is None else self._inner.backends

    def gather(self, what: str, value: Json, *, timeout_s: float | None = None) -> list[Json]:
        """See `Group.gather`."""
        if self._inner is not None:
            return self._inner.gather(what, value, timeout_s=timeout_s)
        answers = self.backend.allgather(canonical({"what": what, "value": value}))
        if len(answers) != self.size:
            raise UnsupportedError(
                f"{self.name}.allgather returned {len(answers)} values for {self.size} ranks, so it is no CommBackend"
            )
        records = [cast("dict[str, Json]", json.loads(answer)) for answer in answers]
        if any(record["what"] != what for record in records):
            raise JointError(
                f"group {self.name!r}: the ranks are at different steps",
                {rank: f"at {record['what']!r}" for rank, record in enumerate(records)},
                hint="Every rank must make the same calls in the same order",
            )
        return [record["value"] for record in records]


def group_of(ranks: CommBackend | ProcessGroup | Group | None) -> Group:
    """Return what stands for a set of ranks as a group: a `CommBackend`, a process group, a group, or None for WORLD.

    Raises:
        ArgumentTypeError: it is none of these.
        ArgumentValueError: this process is not a member, or torch.distributed is not initialized.
    """
    if isinstance(ranks, Group):
        return ranks
    if isinstance(cast("object", ranks), CommBackend):
        return CommBackendGroup(cast("CommBackend", ranks))
    return as_group(cast("ProcessGroup | None", ranks))


_METHODS = ("Get_rank", "Get_size", "allgather", "bcast", "barrier", "Split")


class _Part(Store):
    """The keys of one part of a store."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def set(self, key: str, value: str) -> None:
        self._store.set(self._prefix + key, value)

    def get(self, key: str) -> str:
        return self._store.get(self._prefix + key)

    def check(self, key: str) -> bool:
        return self._store.check(self._prefix + key)

    def settle(self, key: str, value: str) -> str:
        return self._store.settle(self._prefix + key, value)

    def delete(self, key: str) -> None:
        self._store.delete(self._prefix + key)


def _store(group: Group) -> Store:
    if not isinstance(group, StoreGroup):
        raise UnsupportedError(f"{type(group).__name__} can't be split: it has no key-value store")
    return group.store


def _mpi() -> Any:
    try:
        from mpi4py import MPI  # pyright: ignore
    except (ImportError, RuntimeError) as error:
        # mpi4py raises RuntimeError where only the MPI library is missing; the rest of its text is a list of places.
        cause = str(error).partition("\n")[0]
        raise MPIMissingError(
            f"MPIBackend needs mpi4py and an MPI library ({cause}): pip install mpi4py, or use TorchDistBackend"
        ) from error
    return cast("Any", MPI)


def _integer(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentTypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    return value


def _rank(name: str, value: object, size: int) -> int:
    rank = _integer(name, value)
    if not 0 <= rank < size:
        raise ArgumentValueError(f"{name} must be a rank of the backend, 0..{size - 1}, got {rank}")
    return rank


def _color(color: object) -> int | None:
    if color is not None and _integer("color", color) < 0:
        raise ArgumentValueError(f"color must be None or at least 0, got {color}")
    return cast("int | None", color)


def _encode(data: object, allow_pickle: bool) -> Json:
    """Return `data` as JSON from which `_decode` makes an equal value of the same types.

    Exact types only: a subclass (an enum, a named tuple) would arrive as something else.
    """
    kind = type(data)
    if data is None or kind in (bool, int, str):
        return cast("Json", data)
    if isinstance(data, float) and kind is float:
        return data if math.isfinite(data) else {"float": repr(data)}
    if isinstance(data, bytes | bytearray) and kind in (bytes, bytearray):
        return {"bytes": base64.b64encode(data).decode("ascii")}
    if isinstance(data, list | tuple) and kind in (list, tuple):
        items = [_encode(item, allow_pickle) for item in cast("list[object]", data)]
        return items if kind is list else {"tuple": items}
    if isinstance(data, dict) and kind is dict:
        pairs = cast("dict[object, object]", data).items()
        return {"dict": [[_encode(key, allow_pickle), _encode(value, allow_pickle)] for key, value in pairs]}
    if allow_pickle:
        return {"pickle": base64.b64encode(pickle.dumps(data)).decode("ascii")}
    raise ArgumentTypeError(
        f"{kind.__module__}.{kind.__qualname__} can't be sent: use None, bool, int, float, str, bytes, and lists, "
        "tuples and dicts of these, or TorchDistBackend(allow_pickle=True) on all ranks"
    )


def _decode(value: Any, allow_pickle: bool) -> Any:
    """Return what `_encode` was given."""
    if isinstance(value, list):
        return [_decode(item, allow_pickle) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = cast("dict[str, Any]", value).items()
    if kind == "float":
        return float(content)
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tuple":
        return tuple(_decode(item, allow_pickle) for item in content)
    if kind == "dict":
        return {_decode(key, allow_pickle): _decode(item, allow_pickle) for key, item in content}
    if not allow_pickle:
        # The ranks have agreed that nobody sends this, so it does not come from one of them.
        raise UnsupportedError("a pickled value arrived, and this backend does not allow pickle")
    return pickle.loads(base64.b64decode(content))
