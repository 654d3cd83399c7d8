"""Known geometries: a second call is cheap, and accepts and refuses exactly what the first one would have.

Whatever was called before, a `Preparation` must answer as one that has seen nothing: with the same call, or with the
same error in the same words.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_core import UlyssesCommunicator, UlyssesWorkspace, _cuda
from comm_core.errors import ArgumentTypeError, ArgumentValueError, TransportError, UnsupportedError
from comm_core.group import Group, thread_groups
from comm_core.plugins import register, unregister
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing.ranks import run_threads
from comm_core.transport.interface import Properties, Transport, TransportSession, Verdict
from comm_core.ulysses import geometries
from comm_core.ulysses.geometries import Geometries
from comm_core.ulysses.preparation import Preparation
from comm_core.ulysses.validation import Limits

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning"),
]
CPU = torch.device("cpu")
F32 = torch.float32
LIMITS = Limits(CPU, F32, 1 << 12)
SHAPE = (2, 4, 4, 8)
NUMEL = 256


def preparation(size: int = 2, properties: Properties | None = None) -> Preparation:
    return Preparation(LIMITS, size - 1, size, "test", Properties() if properties is None else properties)


def outcome(prepare: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return a call in a form that can be compared, or its error."""
    try:
        made = prepare(*arguments)
    except Exception as error:
        return type(error), str(error)
    workspace = None if made.workspace is None else id(made.workspace)
    out = None if made.out is None else (made.out.data_ptr(), made.out.shape, made.out.stride(), made.out.dtype)
    return made.plan, [id(source) for source in made.sources], made.shape, made.dtype, out, workspace, made.geometry


class Subclass(torch.Tensor):
    pass


def freed(shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor whose memory was given back, with an offset that makes its address look like one."""
    x = torch.ones(math.prod(shape) + 3)[3:].view(*shape)
    x.untyped_storage().resize_(0)
    return x


def lazily_negated(shape: Sequence[int]) -> torch.Tensor:
    return torch._neg_view(torch.ones(*shape))  # pyright: ignore


def wrong_tensors(shape: Sequence[int]) -> dict[str, Any]:
    """Return what must not pass for a tensor of this shape, and some things that may."""
    a, b, c, d = shape
    with FakeTensorMode():
        fake = torch.empty(*shape)
    return {
        "good": torch.ones(*shape),
        "good and another": torch.zeros(*shape),
        "channels last": torch.ones(*shape).contiguous(memory_format=torch.channels_last),
        "requires grad": torch.ones(*shape, requires_grad=True),
        "subclass": torch.ones(*shape).as_subclass(Subclass),
        "parameter": torch.nn.Parameter(torch.ones(*shape)),
        "list": [1.0],
        "number": 7,
        "dtype": torch.ones(*shape, dtype=torch.float16),
        "other size of dtype": torch.ones(*shape, dtype=torch.int32),
        "unknown dtype": torch.ones(*shape, dtype=torch.float64),
        "complex": torch.ones(*shape, dtype=torch.complex64).conj(),
        "meta": torch.empty(*shape, device="meta"),
        "fake": fake,
        "not contiguous": torch.ones(a, c, b, d).transpose(1, 2),
        "stepped": torch.ones(a, b, c, 2 * d)[..., ::2],
        "expanded": torch.ones(1, b, c, d).expand(*shape),
        "negated": lazily_negated(shape),
        "conjugate's part": torch.complex(torch.ones(*shape), torch.ones(*shape)).conj().imag,
        "zero tensor": torch._efficientzerotensor(tuple(shape)),  # pyright: ignore
        "freed": freed(shape),
        "sparse": torch.ones(*shape).to_sparse(),
        "nested": torch.nested.nested_tensor([torch.ones(b, c, d)] * a),
        "three dimensions": torch.ones(a * b, c, d),
        "empty": torch.ones(a, 0, c, d),
        "odd": torch.ones(a, b + 1, c + 1, d),
        "large": torch.ones(8 * a, b, c, d),
    }


@pytest.fixture
def full_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The full checks that were made, by name."""
    made: list[str] = []

    def spied(name: str) -> None:
        real = getattr(Preparation, name)

        def check(self: Preparation, *arguments: Any) -> Any:
            made.append(name)
            return real(self, *arguments)

        monkeypatch.setattr(Preparation, name, check)

    for name in ("_check_whole", "_check_scatter_qkv", "_check_gather_output"):
        spied(name)
    yield made


SHAPES_OUT = {"scatter_heads": (2, 8, 2, 8), "gather_heads": (2, 2, 8, 8), "exchange_chunks": (1, 1, 2, 128)}


@pytest.mark.parametrize("properties", [Properties(), Properties(registered_outputs=True)], ids=["", "registered"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("operation", SHAPES_OUT)
def test_whole_calls_are_taken_and_refused_as_by_one_that_knows_nothing(
    operation: str, size: int, properties: Properties
) -> None:
    """Every operand with every output, dtype and workspace, all of them after calls that were good."""
    shape = (1, 1, size, NUMEL // size) if operation == "exchange_chunks" else SHAPE
    shape_out = shape if size == 1 else SHAPES_OUT[operation]
    storage = torch.ones(4 * NUMEL)
    workspace = UlyssesWorkspace(max_elems=NUMEL, dtype=F32, device="cpu")
    xs = {**wrong_tensors(shape), "view": storage[:NUMEL].view(shape), "send": workspace.send_buffer.view(shape)}
    outs = {
        "none": None,
        **wrong_tensors(shape_out),
        "apart": storage[NUMEL : 2 * NUMEL].view(shape_out),
        "shares a byte": storage[NUMEL - 1 : 2 * NUMEL - 1].view(shape_out),
        "the operand": xs["view"],
        "receive": workspace.recv_buffer.view(shape_out),
        "more": torch.ones(4, 8, 2, 8),
    }
    workspaces = (
        None,
        workspace,
        UlyssesWorkspace(max_elems=NUMEL - 1, dtype=F32, device="cpu"),
        UlyssesWorkspace(max_elems=NUMEL, dtype=torch.int32, device="cpu"),
        object(),
    )
    warm = preparation(size, properties)
    accepted: set[str] = set()
    for x, dtype in itertools.product(xs, (None, F32, torch.float16, torch.int32, torch.float64, "float32", [])):
        for out, staging in itertools.product(outs, workspaces):
            if dtype not in (None, F32) and staging is not None:
                continue
            arguments = operation, xs[x], outs[out], dtype, staging
            expected = outcome(preparation(size, properties).whole, arguments)
            assert outcome(warm.whole, arguments) == expected, (x, out, dtype, staging)
            if not isinstance(expected[0], type):
                accepted.add(x)
    assert {
        "good",
        "good and another",
        "requires grad",
        "parameter",
        "view",
        "dtype",
        "other size of dtype",
    } <= accepted
    assert accepted.isdisjoint({"freed", "negated", "zero tensor", "meta", "sparse", "nested", "large", "fake"})
    # With one long dimension, every stride that means something is right.
    assert ("not contiguous" in accepted) == (operation == "exchange_chunks")


@pytest.mark.parametrize("which", ["query", "key", "value", "out"])
def test_qkv_chunks_are_taken_and_refused_as_by_one_that_knows_nothing(which: str) -> None:
    storage = torch.ones(4 * NUMEL)
    workspace = UlyssesWorkspace(max_elems=384, dtype=F32, device="cpu")
    small = UlyssesWorkspace(max_elems=383, dtype=F32, device="cpu")
    shape_out = (2, 8, 1, 24)
    views = {
        "view": storage[:NUMEL].view(SHAPE),
        "shares a byte": storage[NUMEL - 1 : 2 * NUMEL - 1].view(SHAPE),
        "a part of fused ones": torch.ones(2, 4, 4, 3, 8)[:, :, :, 1],
        "send": workspace.send_buffer[:NUMEL].view(SHAPE),
        "none": None,
    }
    out = storage[NUMEL : NUMEL + 384].view(shape_out)
    changes = {**wrong_tensors(SHAPE), **views}
    if which == "out":
        changes = {**wrong_tensors(shape_out), "none": None, "receive": workspace.recv_buffer.view(shape_out)}
    warm = preparation()
    bands = [(0, 1), (1, 1), (True, 1), (0, True), (2, 1), (-1, 1), (0, 0), (0, 2), (0.0, 1), (None, 1), ([], 1)]
    base = {name: torch.ones(*SHAPE) for name in ("query", "key", "value")}
    for change, band, staging in itertools.product(changes, bands, (None, workspace, small)):
        given = {**base, "out": out, which: changes[change]}
        arguments = (*(given[name] for name in ("query", "key", "value")), *band, given["out"], staging)
        expected = outcome(preparation().scatter_qkv_head_chunk, arguments)
        assert outcome(warm.scatter_qkv_head_chunk, arguments) == expected, (change, band, staging)


def test_operands_of_different_extent_are_compared_with_the_output_each_by_its_own() -> None:
    """Q in one piece, K and V spread, and an output that moves over all of them."""
    storage = torch.zeros(8 * NUMEL)
    shape, shape_out = (1, 2, 2, 4), (1, 4, 1, 12)
    query = storage[:16].view(shape)
    key = storage[100:].as_strided(shape, (48, 24, 12, 2), 100)
    value = storage.as_strided(shape, (96, 48, 24, 1), 300)
    warm = preparation()
    taken = 0
    for start in range(450):
        out = storage[start : start + 48].view(shape_out)
        arguments = (query, key, value, 0, 1, out, None)
        expected = outcome(preparation().scatter_qkv_head_chunk, arguments)
        assert outcome(warm.scatter_qkv_head_chunk, arguments) == expected, start
        taken += not isinstance(expected[0], type)
    assert 100 < taken < 300


def test_a_result_in_the_workspace_stays_there_when_the_geometry_is_known() -> None:
    properties = Properties(staging=True)
    warm = preparation(properties=properties)
    workspace = UlyssesWorkspace(max_elems=NUMEL, dtype=F32, device="cpu")
    x, out = torch.ones(1, 4, 4, 8), torch.empty(1, 8, 1, 24)
    for target in (out, None, out, None):
        arguments = (x, x, x, 0, 1, target, workspace)
        expected = outcome(preparation(properties=properties).scatter_qkv_head_chunk, arguments)
        assert outcome(warm.scatter_qkv_head_chunk, arguments) == expected
        made = warm.scatter_qkv_head_chunk(*arguments).out
        assert made is not None
        assert made.data_ptr() == (workspace.recv_buffer if target is None else out).data_ptr()


@pytest.mark.parametrize("which", ["x", "out"])
def test_output_chunks_are_taken_and_refused_as_by_one_that_knows_nothing(which: str) -> None:
    storage = torch.ones(4 * NUMEL)
    shape, shape_out = (2, 4, 1, 8), (2, 2, 4, 8)
    workspace = UlyssesWorkspace(max_elems=64, dtype=F32, device="cpu")
    small = UlyssesWorkspace(max_elems=63, dtype=F32, device="cpu")
    out = storage[64 : 64 + 128].view(shape_out)
    views = {
        "view": storage[:64].view(shape),
        "shares a byte": storage[1:65].view(shape),
        "a band": torch.ones(2, 4, 2, 8)[:, :, 1:],
        "a band over the output": storage[:128].view(2, 4, 2, 8)[:, :, :1],
        "send": workspace.send_buffer.view(shape),
    }
    changes = {**wrong_tensors(shape), **views} if which == "x" else {**wrong_tensors(shape_out), "none": None}
    warm = preparation()
    bands = [(2, 0), (2, 1), (1, 0), (True, 0), (2, True), (2, 2), (0, 0), (2, -1), (2.0, 0), ([], 0)]
    base = {"x": torch.ones(*shape), "out": out}
    for change, band, staging in itertools.product(changes, bands, (None, workspace, small)):
        given = {**base, which: changes[change]}
        arguments = (given["x"], *band, given["out"], staging)
        expected = outcome(preparation().gather_output_head_chunk, arguments)
        assert outcome(warm.gather_output_head_chunk, arguments) == expected, (change, band, staging)


def test_a_known_geometry_is_not_checked_in_full_again(full_checks: list[str]) -> None:
    """Also for other tensors, with and without a dtype, an output and a workspace."""
    warm = preparation()
    workspace = UlyssesWorkspace(max_elems=512, dtype=F32, device="cpu")

    def calls() -> None:
        x, out, full = torch.ones(*SHAPE), torch.empty(2, 8, 2, 8), torch.empty(2, 2, 4, 8)
        for dtype, target, staging in itertools.product((None, F32), (None, out), (None, workspace)):
            warm.whole("scatter_heads", x, target, dtype, staging)
        warm.whole("gather_heads", x, torch.empty(2, 2, 8, 8), None, None)
        warm.whole("exchange_chunks", torch.ones(1, 1, 2, 5), None, None, None)
        query, key, value = torch.ones(2, 4, 4, 3, 8).unbind(3)
        for staging in (None, workspace):
            warm.scatter_qkv_head_chunk(query, key, value, 1, 1, torch.empty(2, 8, 1, 24), staging)
            warm.gather_output_head_chunk(torch.ones(2, 4, 2, 8)[:, :, :1], 2, 1, full, staging)

    calls()
    assert sorted(set(full_checks)) == ["_check_gather_output", "_check_scatter_qkv", "_check_whole"]
    assert len(full_checks) == 5  # each geometry once
    full_checks.clear()
    calls()
    assert full_checks == []


def test_subclasses_are_always_checked_in_full(full_checks: list[str]) -> None:
    """What they say of themselves may be anything."""
    warm = preparation()
    plain, out = torch.ones(*SHAPE), torch.empty(2, 8, 2, 8)
    warm.whole("scatter_heads", plain, out, None, None)
    full_checks.clear()
    warm.whole("scatter_heads", plain.as_subclass(Subclass), out, None, None)
    warm.whole("scatter_heads", torch.nn.Parameter(plain), out, None, None)
    warm.whole("scatter_heads", plain, out.as_subclass(Subclass), None, None)
    assert len(full_checks) == 3


def test_bytes_are_shared_or_not_to_the_byte_and_devices_are_compared(full_checks: list[str]) -> None:
    limits = Limits(CPU, torch.uint8, 64)
    warm = Preparation(limits, 0, 2, "test", Properties())
    storage = torch.zeros(64, dtype=torch.uint8)
    x = storage[20:36].view(1, 1, 2, 8)
    warm.whole("exchange_chunks", x, None, None, None)
    full_checks.clear()
    for start in range(64 - 16 + 1):
        out = storage[start : start + 16].view(x.shape)
        if start <= 4 or start >= 36:
            assert warm.whole("exchange_chunks", x, out, None, None).out is out
            continue
        with pytest.raises(ArgumentValueError, match="overlap"):
            warm.whole("exchange_chunks", x, out, None, None)
        assert full_checks.pop() == "_check_whole"
    assert full_checks == []
    known = warm._geometries.find(("exchange_chunks", x.shape, torch.uint8))
    assert known is not None and known.admits((x,), x.clone(), None)
    elsewhere = replace(known, device=torch.device("cuda", 0))
    assert not elsewhere.admits((x,), x.clone(), None)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_lazily_conjugated_tensors_are_refused_when_their_geometry_is_known() -> None:
    """A complex32 has four bytes, and so can be moved."""
    warm = preparation()
    x, out = torch.zeros(*SHAPE, dtype=torch.complex32), torch.zeros(2, 8, 2, 8, dtype=torch.complex32)
    for _ in range(2):
        warm.whole("scatter_heads", x, out, torch.complex32, None)
        for name, source, target in (("x", x.conj(), out), ("out", x, out.conj())):
            with pytest.raises(ArgumentValueError, match=f"{name} is a view .*resolve_conj"):
                warm.whole("scatter_heads", source, target, torch.complex32, None)


def test_nothing_that_was_refused_is_known() -> None:
    warm = preparation()
    for x in (torch.ones(2, 4, 3, 8), torch.ones(*SHAPE).transpose(1, 2), torch.ones(16, 4, 4, 8)):
        with pytest.raises(ArgumentValueError):
            warm.whole("scatter_heads", x, None, None, None)
    with pytest.raises(ArgumentTypeError):
        warm.gather_output_head_chunk(torch.ones(2, 4, 1, 8), 2, 0, None, None)
    assert len(warm._geometries) == 0


def test_as_many_are_kept_as_there_is_room_for_the_last_ones_used(
    monkeypatch: pytest.MonkeyPatch, full_checks: list[str]
) -> None:
    monkeypatch.setattr(geometries, "KEPT", 2)
    warm = preparation()

    def call(heads: int) -> int:
        full_checks.clear()
        warm.whole("scatter_heads", torch.ones(1, 1, heads, 1), None, None, None)
        return len(full_checks)

    assert [call(2), call(4), call(2), call(6)] == [1, 1, 0, 1]
    assert len(warm._geometries) == 2
    assert [call(2), call(6), call(4), call(2)] == [0, 0, 1, 1]
    assert len(Geometries()) == 0


# Through the front


class Watched(TransportSession):
    """Says what a call finds when it gets here; may fail."""

    properties = Properties()

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.error: Exception | None = None

    def exchange(self, plan: Any, sources: Any, destination: Any, *, staging: Any = None) -> None:
        self.seen.append((plan.operation, torch.is_grad_enabled(), staging is not None))
        if self.error is not None:
            raise self.error

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        raise NotImplementedError

    def barrier(self) -> None:
        raise NotImplementedError


@pytest.fixture
def watched() -> Iterator[None]:
    class Watching(Transport):
        name, version, wire, priority = "watched", "1", 1, 5

        def assess(self, request: Any, facts: Any) -> Verdict:
            return Verdict(True, "always")

        def open(self, stages: Any, request: Any, plan: Any, device: Any) -> Watched:
            return Watched()

    class Plugin:
        comm_api = API_VERSION

        @hookimpl
        def comm_transports(self) -> list[Transport]:
            return [Watching()]

    register("watched", Plugin())
    yield
    unregister("watched")


def opened(group: Group) -> tuple[UlyssesCommunicator, Watched]:
    comm = UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu", backend="watched")
    session = comm._session
    assert isinstance(session, Watched)
    return comm, session


@pytest.mark.usefixtures("watched")
def test_calls_run_without_gradients_and_leave_the_mode_as_it_was() -> None:
    """Known or not, good, refused or failed; a call counts as a change of its output and only of that."""

    def rank(group: Group) -> None:
        comm, session = opened(group)
        x, out = torch.ones(*SHAPE, requires_grad=True), torch.empty(2, 8, 2, 8)
        for enabled, inference, times in ((True, False, 3), (False, False, 2), (True, True, 2)):
            context = torch.inference_mode() if inference else nullcontext()
            with torch.set_grad_enabled(enabled), context:
                before = torch.is_grad_enabled()
                for _ in range(times):
                    version, sent = out._version, comm.bytes_sent
                    assert comm.scatter_heads(x, out=out) is out
                    assert out._version > version and x._version == 0
                    assert comm.bytes_sent == sent + NUMEL * 4 // 2
                    assert torch.is_grad_enabled() == before
                with pytest.raises(ArgumentValueError, match="overlap"):
                    comm.scatter_heads(x, out=x.detach().view(2, 8, 2, 8))
                assert torch.is_grad_enabled() == before
        assert session.seen == [("scatter_heads", False, False)] * 7
        with torch.inference_mode():
            new = torch.empty(2, 8, 2, 8)
            assert comm.scatter_heads(x, out=new) is new and new.is_inference()
        session.error = UnsupportedError("not now")
        with pytest.raises(UnsupportedError, match="not now"):
            comm.scatter_heads(x, out=out)
        session.error = ZeroDivisionError("a bug")
        with pytest.raises(TransportError, match="scatter_heads over watched failed: ZeroDivisionError: a bug"):
            comm.scatter_heads(x, out=out)
        assert torch.is_grad_enabled()
        session.error = None
        with pytest.raises(TransportError, match="broken since an earlier failure"):
            comm.scatter_heads(x, out=out)
        comm.close()

    # Gradients are enabled or not for each thread.
    run_threads(2, rank)


@pytest.mark.usefixtures("watched")
def test_the_device_is_made_current_only_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    comms = run_threads(2, opened)
    comm, session = comms[0]
    guards: list[torch.device] = []
    current = True
    monkeypatch.setattr(_cuda, "device_guard", lambda device: guards.append(device) or nullcontext())
    monkeypatch.setattr(_cuda, "is_current", lambda index: current)
    x = torch.ones(*SHAPE)
    comm.scatter_heads(x)
    assert guards == []
    current = False
    comm.scatter_heads(x)
    with pytest.raises(ArgumentTypeError):
        comm.scatter_heads(7)  # type: ignore[arg-type]
    assert guards == [CPU, CPU] and torch.is_grad_enabled()
    assert session.seen == [("scatter_heads", False, False)] * 2
    for each, _ in comms:
        each.close()


@pytest.mark.usefixtures("watched")
def test_the_checked_mode_compares_known_geometries_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_CHECK", "1")

    def rank(group: Group) -> str:
        comm, session = opened(group)
        for heads in (2, 4, 2, 4):
            comm.scatter_heads(torch.ones(1, 1, heads, 2))
        with pytest.raises(ArgumentValueError if group.rank else Exception) as caught:
            comm.scatter_heads(torch.ones(1, 1, 3 if group.rank else 2, 2))
        assert "3 heads" in str(caught.value)
        with pytest.raises(Exception, match="different calls") as caught:
            comm.scatter_heads(torch.ones(1, 1, 4 if group.rank else 2, 2))
        assert len(session.seen) == 4
        comm.close()
        return str(caught.value)

    texts = run_threads(2, rank)
    assert texts[0] == texts[1]
    assert "shape=[1, 1, 2, 2]" in texts[0] and "shape=[1, 1, 4, 2]" in texts[0]


def test_one_rank_returns_its_operand_and_copies_into_an_output_of_its_own() -> None:
    """Also when the geometry is known."""
    comm = UlyssesCommunicator(thread_groups(1)[0], max_bytes=1 << 12, dtype=F32, device="cpu")
    for fill in (1.0, 2.0, 3.0):
        x, out = torch.full(SHAPE, fill), torch.zeros(SHAPE)
        assert comm.scatter_heads(x) is x and comm.scatter_heads(x, out=x) is x
        assert comm.scatter_heads(x, out=out) is out and torch.equal(out, x)
        band = comm.scatter_qkv_head_chunk(x, x, x, head_offset=1, head_count=2)
        assert torch.equal(band[..., 8:16], x[:, :, 1:3])
