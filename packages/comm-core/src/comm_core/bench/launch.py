"""The rank processes of a benchmark: one pool for all its parts, or the ranks that torchrun has started.

    with launch.ranks(placement) as ranks:
        outcomes = ranks.run(measure, argument, timeout_s=60)

calls ``measure(group, argument)``, a module-level function, on every rank with a process group of all of them, and
returns what each rank did. A rank that fails costs that part; the next one finds working ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from comm_core.errors import ArgumentValueError, CommError
from comm_core.testing.environment import environment

__all__ = ["Placement", "Ranks", "place", "ranks", "under_torchrun"]

_SHARED_RANKS = 2
_GROUP_TIMEOUT_S = 60.0
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_ENVIRONMENT: Mapping[str, str] = {
    # Multicast over NVLink is no part of what is compared.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
_DEFAULTS: Mapping[str, str] = {"COMM_TIMEOUT_S": "30"}
"""A rank that is lost must not take a minute from those that measure; what the user has set stands."""


@dataclass(frozen=True)
class Placement:
    """Which ranks run where; equal on all ranks.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        where: ``"links"``, a GPU for each rank; ``"shared"``, all ranks on the first GPU, or on the CPU.
        ranks: how many.
        gpus: that each rank sees.
        joined: whether torchrun has started the ranks.
    """

    device: str
    where: str
    ranks: int
    gpus: int
    joined: bool = False

    @property
    def kind(self) -> str:
        """What bounds an exchange: ``"links"``, the ``"device"`` that all share, or the ``"host"``."""
        return "host" if self.device == "cpu" else "links" if self.where == "links" else "device"

    @property
    def group_backend(self) -> str:
        """Of torch.distributed; NCCL takes one rank a GPU."""
        return "cpu:gloo,cuda:nccl" if self.kind == "links" else "gloo"

    @property
    def text(self) -> str:
        """What runs where, in words."""
        if self.device == "cpu":
            return f"{self.ranks} ranks on the CPU"
        return f"{self.ranks} ranks " + ("on one GPU" if self.where == "shared" else "with a GPU each")

    def device_index(self, rank: int) -> int:
        """Return the ordinal of this rank's GPU."""
        return (int(os.environ["LOCAL_RANK"]) if self.joined else rank) % self.gpus


def under_torchrun() -> bool:
    """Return whether torchrun, or another launcher with its variables, has started this process as a rank."""
    return all(name in os.environ for name in _TORCHRUN)


def place(
    device: str, where: str | None, count: int | None, *, gpus: int, joined_ranks: int | None = None
) -> Placement:
    """Return what runs where. Pure.

    Args:
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``, as asked.
        where: ``"links"`` or ``"shared"``, or None: links where there are several GPUs.
        count: ranks, or None: a rank for each GPU over links, else 2.
        gpus: that torch sees.
        joined_ranks: how many ranks torchrun has started; None without it.

    Raises:
        ArgumentValueError: it can't be done.
    """
    if device == "cuda" and not gpus:
        raise ArgumentValueError("--device cuda: torch sees no CUDA device here (`commctl doctor` says more)")
    if joined_ranks is not None and count not in (None, joined_ranks):
        raise ArgumentValueError(f"--ranks {count}: torchrun has started {joined_ranks}; leave --ranks out")
    count = joined_ranks if joined_ranks is not None else count
    joined = joined_ranks is not None
    if device == "cpu" or not gpus:
        if where == "links":
            raise ArgumentValueError("--where links needs a GPU for each rank, and there is none in use")
        chosen = Placement("cpu", "shared", count or _SHARED_RANKS, 0, joined)
    elif (where or ("links" if gpus > 1 else "shared")) == "links":
        chosen = Placement("cuda", "links", count or gpus, gpus, joined)
        # Under torchrun the ranks may be spread over hosts, each of which has its own GPUs.
        if chosen.ranks > gpus and not joined:
            raise ArgumentValueError(f"--where links with {chosen.ranks} ranks: torch sees {gpus} GPUs")
    else:
        chosen = Placement("cuda", "shared", count or _SHARED_RANKS, gpus, joined)
    if chosen.ranks < 2:
        raise ArgumentValueError(f"an exchange needs at least 2 ranks, got {chosen.ranks}")
    return chosen


@dataclass(frozen=True)
class Result:
    """What a rank did.

    Attributes:
        value: what the function returned.
        error: what it raised, or what became of the rank; None where it returned.
    """

    value: Any = None
    error: BaseException | None = None


class Ranks(ABC):
    """Rank processes that run one function after the other."""

    leader = True
    """Whether this process is the one that prints and writes files."""

    @abstractmethod
    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float, ranks: int | None = None
    ) -> list[Result]:
        """Call ``function(group, *arguments)`` on every rank; return what each did, in rank order.

        Args:
            function: module-level function; it gets a torch process group of all ranks.
            arguments: anything that can be pickled.
            timeout_s: hard deadline in seconds for ranks that this process has started.
            ranks: only that many, the first ones; None is all.

        Raises:
            CommError: the ranks can't be started, or are not all there any more.
        """


class _Pool(Ranks):
    """Ranks that this process starts, on this host."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float, ranks: int | None = None
    ) -> list[Result]:
        # The pool passes on what ranks print, and standard output is for results.
        with contextlib.redirect_stdout(sys.stderr):
            outcomes = self._pool.run_outcomes(function, *arguments, timeout_s=timeout_s, ranks=ranks)
        return [self._result(outcome, timeout_s) for outcome in outcomes]

    @staticmethod
    def _result(outcome: Any, timeout_s: float) -> Result:
        if outcome.kind == "value":
            return Result(outcome.value)
        if outcome.kind == "exception":
            return Result(error=outcome.exception)
        last = ([line for line in outcome.text.splitlines() if line.strip()] or ["it printed nothing"])[-1]
        how = f"was not done within {timeout_s:g} s" if outcome.kind == "timeout" else "died"
        code = "" if outcome.exit_code is None else f" with exit code {outcome.exit_code}"
        return Result(error=CommError(f"rank {outcome.rank} {how}{code}: {last.strip()}"))


class _Joined(Ranks):
    """This process as one of the ranks that torchrun has started: every one runs the same program."""

    def __init__(self, placement: Placement, timeout_s: float) -> None:
        self._dist: Any = importlib.import_module("torch.distributed")
        self._placement = placement
        if placement.device == "cuda":
            torch: Any = importlib.import_module("torch")
            torch.cuda.set_device(0 if placement.where == "shared" else placement.device_index(0))
        self._owned = not self._dist.is_initialized()
        if self._owned:
            self._dist.init_process_group(placement.group_backend, timeout=timedelta(seconds=_GROUP_TIMEOUT_S))
        # Ranks that fail at different places of a part meet here, the last one when its collectives have timed out.
        limit = timedelta(seconds=timeout_s + 2 * _GROUP_TIMEOUT_S)
        self._results = self._dist.new_group(backend="gloo", timeout=limit)
        self.leader = self._dist.get_rank() == 0

    def run(
        self, function: Callable[..., Any], *arguments: Any, timeout_s: float, ranks: int | None = None
    ) -> list[Result]:
        from comm_core.testing._wire import pack_exception, unpack_exception

        if ranks not in (None, self._placement.ranks):
            raise CommError(f"torchrun has started {self._placement.ranks} ranks, and all of them run everything")
        # A group of its own: one in which a rank has failed is not used again.
        group = self._dist.new_group(
            backend=self._placement.group_backend, timeout=timedelta(seconds=_GROUP_TIMEOUT_S)
        )
        try:
            own: tuple[Any, bytes | None] = (function(group, *arguments), None)
        except Exception as error:
            own = (None, pack_exception(error))
        gathered: list[Any] = [None] * self._placement.ranks
        try:
            self._dist.all_gather_object(gathered, own, group=self._results)
        except RuntimeError as error:
            raise CommError(f"the ranks that torchrun has started are not all there any more: {error}") from error
        return [
            Result(value) if packed is None else Result(error=unpack_exception(packed)) for value, packed in gathered
        ]

    def close(self) -> None:
        """Leave torch.distributed, if this process was not in it before."""
        if self._owned and self._dist.is_initialized():
            self._dist.destroy_process_group()


@contextlib.contextmanager
def ranks(placement: Placement, *, timeout_s: float = 120.0, preload: Sequence[str] = ()) -> Generator[Ranks]:
    """Provide rank processes for the block.

    Args:
        placement: which ranks run where.
        timeout_s: the longest that a part takes, in seconds.
        preload: modules with the functions that will run, imported once for all ranks.

    Raises:
        CommError: the ranks can't be started.
    """
    changes = {**{name: value for name, value in _DEFAULTS.items() if name not in os.environ}, **_ENVIRONMENT}
    if placement.kind == "device":
        changes["COMM_ALLOW_SHARED_GPU"] = "1"
    with environment(**changes), contextlib.ExitStack() as stack:
        if placement.joined:
            joined = _Joined(placement, timeout_s)
            stack.callback(joined.close)
            yield joined
            return
        from comm_core.testing.ranks import RankPool

        pool = RankPool(
            placement.ranks,
            backend=placement.group_backend,
            group_timeout_s=_GROUP_TIMEOUT_S,
            preload=preload,
            strict_warnings=False,
        )
        stack.callback(_close, pool)
        yield _Pool(pool)


def _close(pool: Any) -> None:
    """Close the pool; ranks that don't end in order have given their results already."""
    with contextlib.suppress(CommError, AssertionError):
        pool.close()
