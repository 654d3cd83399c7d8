"""The contract of a transport, as tests that every transport's package runs.

A plugin author writes, in a test module of the package::

    from comm_core.testing.contract import TransportContract

    class TestNvlink(TransportContract):
        transport = "nvlink"
        device_type = "cuda"
        world_sizes = (2, 4)

and runs pytest with ``-p comm_core.testing.plugin``. Each test runs on the session's rank pool (the fixture `ranks`;
override it for another backend or size) and uses the public `UlyssesCommunicator` alone, with the transport asked for
by name. A plugin that is not installed, or a variant of it, is named by the attribute `plugin`: a module-level
function that returns the plugin object; every rank registers it for the duration of a test::

    def make_plugin() -> object: ...

    class TestVariant(TransportContract):
        transport = "variant"
        plugin = make_plugin

What a transport can't do is declared by `dtypes`, `max_batch` and `registered_outputs`, and then tested as a refusal
rather than left out. Everything else is asked of every transport:

- all operations equal the references of `comm_core.testing.reference` bit for bit, for every dtype, batch 1 to 3, odd
  and even sizes, with and without ``out=``, strided operands of the head-chunk calls, and operands stay as they were;
- scatter and gather are inverse; calls that follow each other without synchronization don't disturb each other;
- groups that are not WORLD, not consecutive and without rank 0; several communicators at a time; opening again;
- an operand of exactly ``max_bytes`` fits, one more row does not; bad arguments are refused and change nothing;
- ``close`` may be called twice, and everything else is refused after it;
- the decision names the transport and says why; `Transport.assess` depends on its arguments alone;
- the session's `all_gather_small` and `barrier`, which codecs build on.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import pytest
import torch

from comm_core import UlyssesCommunicator, plugins, resolve_ulysses_backend
from comm_core._json import Json, canonical
from comm_core.errors import ArgumentValueError, ClosedError
from comm_core.group import as_group
from comm_core.selection import Asked, resolve
from comm_core.testing import reference
from comm_core.testing.ranks import FunctionRef, RankPool
from comm_core.testing.reference import DTYPES, Layout, assert_same_bits, bits, make_input
from comm_core.topology.facts import RankFacts
from comm_core.transport.dist import SMALL_BYTES
from comm_core.transport.opening import open_transport

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["TransportContract"]

_MAX_BYTES = 1 << 16
_ROUNDS = 12
_TIMEOUT_S = 120.0
_REGISTERED = "contract"

Operation = Literal["scatter_heads", "gather_heads", "exchange_chunks"]

_LAYOUTS: tuple[tuple[bool | Layout, ...], ...] = (
    (False, False, False),
    ("fused", "transposed", "stepped"),
    ("stepped", "fused", False),
)
_REFERENCES: dict[str, Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]] = {
    "scatter_heads": reference.scatter_heads,
    "gather_heads": reference.gather_heads,
    "exchange_chunks": reference.exchange_chunks,
}


@dataclass(frozen=True)
class _Spec:
    """What the ranks need to know about the transport; sent to them."""

    transport: str
    device_type: str
    plugin: FunctionRef | None
    dtypes: tuple[torch.dtype, ...]
    max_batch: int
    registered_outputs: bool

    @contextlib.contextmanager
    def provided(self) -> Generator[None]:
        """Register the plugin, where it is not an installed one."""
        if self.plugin is None:
            yield
            return
        try:
            plugins.register(_REGISTERED, self.plugin.resolve()())
            yield
        finally:
            plugins.unregister(_REGISTERED)

    def device(self, group: ProcessGroup) -> torch.device:
        """Return this rank's device."""
        if self.device_type == "cpu":
            return torch.device("cpu")
        return torch.device("cuda", group.rank() % torch.cuda.device_count())

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(b for b in (1, 2, 3) if not self.max_batch or b <= self.max_batch)


class _Rank:
    """One rank of a case: it opens communicators, and compares what they return with the references."""

    def __init__(self, group: ProcessGroup, spec: _Spec) -> None:
        self.group, self.spec = group, spec
        self.rank, self.size = group.rank(), group.size()
        self.device = spec.device(group)
        self._seed = 0

    def open(self, dtype: torch.dtype, max_bytes: int = _MAX_BYTES) -> UlyssesCommunicator:
        comm = UlyssesCommunicator(
            self.group, max_bytes=max_bytes, dtype=dtype, backend=self.spec.transport, device=self.device
        )
        assert comm.backend == self.spec.transport, comm
        assert (comm.rank, comm.world_size, comm.device) == (self.rank, self.size, self.device)
        return comm

    def inputs(
        self, shape: Sequence[int], dtype: torch.dtype, strided: bool | Layout = False
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return this rank's operand, on its device, and those of all ranks, on the CPU; new data at every call."""
        self._seed += 1
        everyone = [make_input(self._seed, rank, shape, dtype) for rank in range(self.size)]
        return make_input(self._seed, self.rank, shape, dtype, strided, self.device), everyone

    def output(self, comm: UlyssesCommunicator, operation: str, x: torch.Tensor) -> torch.Tensor:
        """Return an output that the transport takes, filled with something that no result equals by accident."""
        out = comm.allocate_output(x, operation)
        bits(out).copy_(~bits(make_input(999, self.rank, out.shape, out.dtype)))
        return out

    def check(
        self, comm: UlyssesCommunicator, operation: Operation, shape: Sequence[int], given: bool
    ) -> torch.Tensor:
        """Call an operation on new data, compare, and return the result."""
        x, everyone = self.inputs(shape, comm.dtype)
        out = self.output(comm, operation, x) if given else None
        result = getattr(comm, operation)(x, **({} if out is None else {"out": out}))
        what = f"{operation} of {tuple(shape)} {comm.dtype} on rank {self.rank} of {self.size}, out given: {given}"
        assert out is None or result is out, f"{what}: the result is not out"
        assert_same_bits(result.cpu(), _REFERENCES[operation](everyone)[self.rank], what)
        assert_same_bits(x.cpu(), everyone[self.rank], f"{what}: the operand afterwards")
        return result

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


@contextlib.contextmanager
def _refused(error: type[BaseException] = ArgumentValueError) -> Generator[None]:
    """Expect that the body is refused with `error`."""
    try:
        yield
    except error:
        return
    raise AssertionError(f"expected {error.__name__}")


def _operations(group: ProcessGroup, spec: _Spec, dtypes: tuple[torch.dtype, ...], thorough: bool = True) -> None:
    """All operations: all shapes and layouts for one dtype of each size, one of each for the others."""
    rank = _Rank(group, spec)
    size = rank.size
    given = (True,) if spec.registered_outputs else (False, True)
    seen: set[int] = set()
    with spec.provided():
        for dtype in dtypes:
            full = thorough and dtype.itemsize not in seen
            seen.add(dtype.itemsize)
            batches = spec.batches if full else spec.batches[-1:]
            shapes = ((3, 1, 5), (4, 2, 16)) if full else ((3, 2, 5),)
            with rank.open(dtype) as comm:
                for batch, (n, h, d), out in itertools.product(batches, shapes, given):
                    rank.check(comm, "scatter_heads", (batch, n, size * h, d), out)
                    rank.check(comm, "gather_heads", (batch, size * n, h, d), out)
                for chunk, out in itertools.product((1, 7, 256) if full else (7,), given):
                    rank.check(comm, "exchange_chunks", (1, 1, size, chunk), out)
                _inverse(rank, comm)
                if not spec.registered_outputs:
                    for batch, layouts in itertools.product(batches, _LAYOUTS if full else _LAYOUTS[-1:]):
                        _head_chunks(rank, comm, batch, layouts)


def _inverse(rank: _Rank, comm: UlyssesCommunicator) -> None:
    """Gathering what was scattered gives the operand back."""
    x, _ = rank.inputs((rank.spec.batches[-1], 5, 2 * rank.size, 3), comm.dtype)
    options: dict[str, Any] = {}
    if rank.spec.registered_outputs:
        options = {"out": rank.output(comm, "scatter_heads", x)}
    scattered = comm.scatter_heads(x, **options)
    if rank.spec.registered_outputs:
        options = {"out": rank.output(comm, "gather_heads", scattered)}
    assert_same_bits(comm.gather_heads(scattered, **options).cpu(), x.cpu(), "gather_heads(scatter_heads(x))")


def _head_chunks(rank: _Rank, comm: UlyssesCommunicator, batch: int, layouts: Sequence[bool | Layout]) -> None:
    """A schedule of bands, with operands that lie in memory in different ways, and the output that it builds."""
    n, h, d = 3, 3, 5
    shape = (batch, n, rank.size * h, d)
    operands = [rank.inputs(shape, comm.dtype, layout) for layout in layouts]
    (q, qs), (k, ks), (v, vs) = operands
    out, outs = rank.inputs(shape, comm.dtype)
    for offset, count in ((2, 1), (0, 2)):
        what = f"head chunk {offset}:{offset + count} of {shape} {comm.dtype} {layouts} on rank {rank.rank}"
        expected = reference.scatter_qkv_head_chunk(qs, ks, vs, head_offset=offset, head_count=count)[rank.rank]
        fused = comm.scatter_qkv_head_chunk(q, k, v, head_offset=offset, head_count=count)
        assert_same_bits(fused.cpu(), expected, what)
        target = torch.empty_like(fused)
        workspace = comm.create_workspace()
        again = comm.scatter_qkv_head_chunk(
            q, k, v, head_offset=offset, head_count=count, out=target, workspace=workspace
        )
        assert again is target
        assert_same_bits(target.cpu(), expected, f"{what} with out and a workspace")
        band, bands = rank.inputs((batch, rank.size * n, count, d), comm.dtype, layouts[0])
        outs = reference.gather_output_head_chunk(bands, outs, local_heads=h, head_offset=offset)
        result = comm.gather_output_head_chunk(band, local_heads=h, head_offset=offset, out=out, workspace=workspace)
        assert result is out
        assert_same_bits(out.cpu(), outs[rank.rank], f"output {what}")
    for operand, everyone in operands:
        assert_same_bits(operand.cpu(), everyone[rank.rank], "operand after the head-chunk calls")


def _groups(group: ProcessGroup, spec: _Spec) -> None:
    """Enough of everything to see a global rank taken for a group rank; opened, closed, and opened again."""
    for _ in range(2):
        _operations(group, spec, spec.dtypes[-1:], thorough=False)


def _back_to_back(group: ProcessGroup, spec: _Spec) -> None:
    """Different data at every call, outputs that stay, no synchronization, and ranks that are late in turn."""
    rank = _Rank(group, spec)
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else spec.dtypes[0]
    results: list[tuple[torch.Tensor, torch.Tensor, str]] = []
    with spec.provided(), rank.open(dtype) as comm, rank.open(dtype) as other:
        calls: list[tuple[UlyssesCommunicator, Operation, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for number in range(_ROUNDS):
            scatter = number % 3 < 2
            shape = (1, 4, 2 * rank.size, 8 + number) if scatter else (1, 4 * rank.size, 2, 8 + number)
            operation: Operation = "scatter_heads" if scatter else "gather_heads"
            x, everyone = rank.inputs(shape, dtype)
            # Two communicators of one group take turns, as the two directions of a pipeline do.
            user = other if number % 4 == 3 else comm
            expected = _REFERENCES[operation](everyone)[rank.rank]
            calls.append((user, operation, x, rank.output(user, operation, x), expected))
        rank.synchronize()
        for number, (user, operation, x, out, expected) in enumerate(calls):
            if number % rank.size == rank.rank:
                _be_late(rank)
            getattr(user, operation)(x, out=out)
            results.append((out, expected, f"call {number}, {operation}, on rank {rank.rank}"))
            # The operand may be reused as soon as the call has returned, in the order of the stream.
            bits(x).zero_()
        rank.synchronize()
        for out, expected, what in results:
            assert_same_bits(out.cpu(), expected, what)


def _be_late(rank: _Rank) -> None:
    if rank.device.type == "cuda":
        torch.cuda._sleep(5_000_000)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    else:
        time.sleep(0.005)


def _limits(group: ProcessGroup, spec: _Spec) -> None:
    """What is refused is refused before anything happens, and what just fits fits."""
    rank = _Rank(group, spec)
    size = rank.size
    dtype = torch.float32 if torch.float32 in spec.dtypes else spec.dtypes[-1]
    shape, large = (1, 3, 2 * size, 8), (1, 4, 2 * size, 8)
    nbytes = 3 * 2 * size * 8 * dtype.itemsize
    other = torch.int16 if dtype.itemsize != 2 else torch.int32
    with spec.provided(), rank.open(dtype, nbytes) as comm:
        given = spec.registered_outputs

        def still_usable() -> None:
            rank.check(comm, "scatter_heads", shape, given)

        still_usable()
        rank.check(comm, "gather_heads", (1, size, 6, 8), given)
        rank.check(comm, "exchange_chunks", (1, 1, size, 48), given)
        x, _ = rank.inputs(shape, dtype)
        out = rank.output(comm, "scatter_heads", x)
        bad: tuple[Callable[[], object], ...] = (
            lambda: comm.scatter_heads(rank.inputs(large, dtype)[0], out=out),
            lambda: comm.exchange_chunks(rank.inputs((1, 1, size, 49), dtype)[0], out=out),
            lambda: comm.scatter_heads(rank.inputs(shape, other)[0], out=out),
            lambda: comm.scatter_heads(x[0], out=out),
            lambda: comm.scatter_heads(x[:, :0], out=out),
            lambda: comm.scatter_heads(x.transpose(1, 2), out=out),
            lambda: comm.scatter_heads(x[:, :, : 2 * size - 1].contiguous(), out=out),
            lambda: comm.gather_heads(rank.inputs((1, size + 1, 1, 8), dtype)[0], out=out),
            lambda: comm.exchange_chunks(x, out=out),
            lambda: comm.scatter_heads(x, out=out[:, :1]),
            lambda: comm.scatter_heads(x, out=x.view(out.shape)),
            lambda: comm.scatter_heads("x", out=out),  # pyright: ignore[reportArgumentType]
            lambda: comm.scatter_heads(x, out=out, dtype=torch.float64),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=True, head_count=1),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=1, head_count=2),
            lambda: comm.scatter_qkv_head_chunk(x, x[:, :1], x, head_offset=0, head_count=1),
            lambda: comm.gather_output_head_chunk(x, local_heads=0, head_offset=0, out=out),
            lambda: comm.allocate_output(x, "scatter"),
        )
        for call in bad:
            with _refused():
                call()
            still_usable()
        if spec.registered_outputs:
            with _refused():
                comm.scatter_heads(x)
        if spec.max_batch:
            batch, _ = rank.inputs((spec.max_batch + 1, 1, size, 1), dtype)
            with _refused():
                comm.scatter_heads(batch, out=rank.output(comm, "scatter_heads", batch))
        still_usable()


def _lifecycle(group: ProcessGroup, spec: _Spec) -> None:
    """Closing: twice, early, and one of several; and nothing works afterwards."""
    rank = _Rank(group, spec)
    dtype, shape = spec.dtypes[-1], (1, 2, rank.size, 3)
    with spec.provided():
        first, second = rank.open(dtype), rank.open(dtype)
        rank.check(first, "scatter_heads", shape, True)
        first.close()
        first.close()
        rank.check(second, "scatter_heads", shape, True)
        x, _ = rank.inputs(shape, dtype)
        for call in (
            lambda: first.scatter_heads(x),
            lambda: first.exchange_chunks(x),
            lambda: first.allocate_output(x, "scatter_heads"),
            first.create_workspace,
        ):
            with _refused(ClosedError):
                call()
        second.close()


def _decision(group: ProcessGroup, spec: _Spec) -> Json:
    """Return what the ranks must agree on, and what `assess` says under circumstances that must not matter."""
    rank = _Rank(group, spec)
    with spec.provided():
        with rank.open(spec.dtypes[-1]) as comm:
            decision = comm.decision
            assert comm.fallback_reason is None, "a transport that was asked for by name is no fallback"
        resolved = resolve_ulysses_backend(spec.transport, group, rank.device)
        assert (resolved.backend, resolved.reason) == (spec.transport, decision.reason), (
            f"deciding twice gave {decision.reason!r}, then {resolved.reason!r}"
        )
        chosen = [item for item in decision.considered if item.name == spec.transport]
        assert len(chosen) == 1 and chosen[0].eligible and decision.reason, decision
        asked = Asked("contract", spec.transport, rank.device, "float32", 4, _MAX_BYTES)
        full = resolve(as_group(group), asked)
        return [decision.reason, _verdicts(spec, full.request, full.facts)]


def _verdicts(spec: _Spec, request: Any, facts: Sequence[RankFacts]) -> Json:
    """Assess true facts and worse ones, in processes whose own state differs; the answers must be equal."""
    transport = plugins.registry().transport(spec.transport)
    size = len(facts)
    # The facts as they come out of the gather are what it decides on, whatever this process is like.
    cases: list[Sequence[RankFacts]] = [facts, [RankFacts.from_json(item.to_json()) for item in facts]]
    for rank in range(size):
        cases.append([replace(item, error="the probe failed") if item.rank == rank else item for item in facts])
        cases.append([replace(item, plugins={}) if item.rank == rank else item for item in facts])
        cases.append(
            [
                replace(item, plugins={spec.transport: {"error": "no"}}) if item.rank == rank else item
                for item in facts
            ]
        )
    answers: list[list[Json]] = []
    for disturb in (lambda: None, _disturb):
        disturb()
        answers.append([_verdict(transport.assess(request, case)) for case in cases])
    assert canonical(answers[0]) == canonical(answers[1]), "assess depends on more than its arguments"
    assert not facts or answers[0][0] == answers[0][1], "assess depends on more than what the facts' JSON holds"
    return answers[0]


def _verdict(verdict: Any) -> Json:
    eligible, reason, plan = verdict
    assert isinstance(reason, str) and reason, "a verdict needs a reason"
    return [bool(eligible), reason, plan]


def _disturb() -> None:
    """Change what a decision must not look at, differently in each process. The pool restores the environment."""
    os.environ["COMM_TIMEOUT_S"] = str(100 + os.getpid() % 100)
    os.environ["CUDA_VISIBLE_DEVICES"] = str(os.getpid() % 8)
    os.environ["NCCL_P2P_DISABLE"] = "1"
    os.chdir("/")
    torch.random.set_rng_state(torch.Generator().manual_seed(os.getpid()).get_state())


def _primitives(group: ProcessGroup, spec: _Spec) -> None:
    """What the session offers beyond plans."""
    rank = _Rank(group, spec)
    members = as_group(group)
    with spec.provided():
        resolved = resolve(members, Asked("contract", spec.transport, rank.device, "uint8", 1, SMALL_BYTES))
        session = open_transport(members, resolved, rank.device).session
        assert session is not None
        assert session.properties.registered_outputs == spec.registered_outputs
        assert session.properties.itemsizes >= {dtype.itemsize for dtype in spec.dtypes}
        try:
            for numel, dtype in ((1, torch.float32), (33, torch.int16), (SMALL_BYTES, torch.uint8)):
                everyone = [make_input(numel, peer, (numel,), dtype) for peer in range(rank.size)]
                out = torch.empty((rank.size, numel), dtype=dtype, device=rank.device)
                session.all_gather_small(everyone[rank.rank].to(rank.device), out)
                assert_same_bits(out.cpu(), torch.stack([bits(x) for x in everyone]).view(dtype), "all_gather_small")
            _barrier(rank, session)
        finally:
            session.close()


def _barrier(rank: _Rank, session: Any) -> None:
    """Nobody leaves a barrier before the last one has come to it."""
    times = torch.zeros(2, dtype=torch.int64)
    if rank.rank == rank.size - 1:
        time.sleep(0.05)
    times[0] = time.monotonic_ns()
    session.barrier()
    rank.synchronize()
    times[1] = time.monotonic_ns()
    everyone = torch.empty((rank.size, 2), dtype=torch.int64, device=rank.device)
    session.all_gather_small(times.to(rank.device), everyone)
    arrived, left = everyone.cpu().unbind(1)
    assert int(left.min()) >= int(arrived.max()), f"a rank left the barrier early: {everyone}"


@pytest.mark.installed_plugins
class TransportContract:
    """The tests; subclass it under a name that pytest collects (``Test…``).

    Attributes:
        transport: name of the transport.
        world_sizes: group sizes to test; the pool must have twice as many ranks for groups with gaps to be tested.
        device_type: ``"cpu"`` or ``"cuda"``.
        plugin: module-level function that returns the plugin object, where the transport is not installed.
        dtypes: element types that it moves: all of 1, 2 and 4 bytes, unless its documentation says otherwise.
        max_batch: largest batch, 0 for any.
        registered_outputs: outputs must come from ``allocate_output``, and there are no head-chunk calls.
    """

    transport: ClassVar[str]
    world_sizes: ClassVar[tuple[int, ...]] = (2, 4)
    device_type: ClassVar[str] = "cpu"
    plugin: ClassVar[Callable[..., object] | None] = None
    dtypes: ClassVar[tuple[torch.dtype, ...]] = DTYPES
    max_batch: ClassVar[int] = 0
    registered_outputs: ClassVar[bool] = False

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each test once a world size."""
        if "world_size" in metafunc.fixturenames:
            metafunc.parametrize("world_size", type(self).world_sizes)

    def _run(
        self, ranks: RankPool, function: Callable[..., Any], members: int | Sequence[int], *more: Any
    ) -> list[Any]:
        cls = type(self)
        plugin = cls.plugin
        spec = _Spec(
            cls.transport,
            cls.device_type,
            None if plugin is None else FunctionRef.of(plugin),
            cls.dtypes,
            cls.max_batch,
            cls.registered_outputs,
        )
        return ranks.run(function, spec, *more, ranks=members, timeout_s=_TIMEOUT_S)

    def test_operations_equal_the_references(self, ranks: RankPool, world_size: int) -> None:
        """Every operation, dtype, batch, layout, with and without out: D6, D7, D13, K10, V15."""
        self._run(ranks, _operations, world_size, type(self).dtypes)

    def test_groups_that_are_not_the_first_ranks(self, ranks: RankPool, world_size: int) -> None:
        """Groups without rank 0, with gaps, overlapping: C1, C9."""
        groups = {
            tuple(range(1, world_size + 1)),
            tuple(range(1, 2 * world_size, 2)),
            tuple(range(0, 2 * world_size, 2)),
        }
        usable = [members for members in sorted(groups) if members[-1] < ranks.size]
        assert usable, (
            f"the pool of {ranks.size} ranks is too small to test groups of {world_size} that are not WORLD"
        )
        for members in usable:
            self._run(ranks, _groups, members)

    def test_calls_in_a_row_do_not_disturb_each_other(self, ranks: RankPool, world_size: int) -> None:
        """No reuse of staging before the peers have read it: G3."""
        self._run(ranks, _back_to_back, world_size)

    def test_limits_are_exact_and_refusals_change_nothing(self, ranks: RankPool, world_size: int) -> None:
        """Exactly max_bytes fits, more is refused, and so is everything else that is wrong: F5, D7."""
        self._run(ranks, _limits, world_size)

    def test_life_cycle(self, ranks: RankPool, world_size: int) -> None:
        """Closing twice, using what is closed, several at a time: E5, H2."""
        self._run(ranks, _lifecycle, world_size)

    def test_decision_is_explained_and_assess_is_pure(self, ranks: RankPool, world_size: int) -> None:
        """All ranks give the same verdicts, whatever their processes are like: C2, C7, F13."""
        results = self._run(ranks, _decision, world_size)
        assert len({canonical(result) for result in results}) == 1, results

    def test_small_gathers_and_barriers(self, ranks: RankPool, world_size: int) -> None:
        """The primitives that codecs use beside plans."""
        self._run(ranks, _primitives, world_size)
