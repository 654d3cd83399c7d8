"""Calls of a kind that was found good before: they launch what the full checks would, and accept nothing more."""

from __future__ import annotations

import gc
import itertools
import struct
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_core import AllReduceFusionPattern, QuantizationSFLayout, _cuda, allreduce_fusion
from comm_core.allreduce import front
from comm_core.allreduce import known as known_calls
from comm_core.allreduce.kernels import WindowAllReduceWorkspace
from comm_core.allreduce.known import KnownCalls, KnownKind
from comm_core.allreduce.launch import Settings
from comm_core.allreduce.module import PLACES, reduce_module
from comm_core.allreduce.patterns import PATTERNS, Quantization
from comm_core.allreduce.session import ReduceSession
from comm_core.consensus import Transaction
from comm_core.errors import CheckpointError, ClosedError, PeerStalledError, TransportError, UnsupportedError
from comm_core.group import thread_groups
from comm_core.windows.signals import Stall, StallKind

CODE = AllReduceFusionPattern
PLAIN = [pattern for pattern, spec in PATTERNS.items() if not spec.is_moe]
BF16 = torch.bfloat16
T, H = 4, 64
pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
]
SPEC = reduce_module("comm_known")


class Launches:
    """A module that keeps the structs of its launches."""

    spec = SPEC

    def __init__(self) -> None:
        self.made: list[bytes] = []
        self.error: Exception | None = None

    def bind_parts(self, entry_point: str) -> tuple[Callable[..., bytes], Callable[[bytes], None]]:
        def run(packed: bytes) -> None:
            if self.error is not None:
                raise self.error
            self.made.append(packed)

        return partial(struct.Struct(SPEC.structs[SPEC.entry_points[entry_point]]).pack, 0, 1), run


class Untested(ReduceSession):
    def _self_test(self) -> None:
        pass


class Workspace(WindowAllReduceWorkspace):
    name = "known-test"


@pytest.fixture
def launches() -> Launches:
    return Launches()


@pytest.fixture
def workspace(launches: Launches, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    with Transaction(thread_groups(1)[0], "open a workspace") as stages:
        session = Untested(
            stages,
            cast("Any", launches),
            torch.device("cpu"),
            half_bytes=1 << 20,
            settings=Settings(264, True),
            form="in_process",
            timeout_s=20.0,
        )
        stages.commit()
    made = Workspace.around(session, 1, 0, BF16, 1 << 20)
    yield made
    made.destroy()


def tensors(pattern: AllReduceFusionPattern, tokens: int = T, hidden: int = H, dtype: torch.dtype = BF16) -> Any:
    """Return arguments that `pattern` accepts, every output given."""
    spec = PATTERNS[pattern]
    rows = (tokens, hidden)
    fp4 = spec.quantization is Quantization.NVFP4
    scales = {
        Quantization.NVFP4: lambda: torch.zeros(128 * hidden // 16, dtype=torch.uint8),
        Quantization.DYNAMIC_FP8: lambda: torch.zeros(tokens, 1),
        Quantization.GROUP_FP8: lambda: torch.zeros(hidden // 64, -(-tokens // 4) * 4, dtype=torch.int32).t()[
            :tokens
        ],
    }
    values: dict[str, Any] = {
        "residual_in": torch.ones(rows, dtype=dtype),
        "rms_gamma": torch.ones(hidden, dtype=dtype),
        "scale_factor": torch.tensor([0.5]),
        "block_quant_group_size": 16,
        "output": torch.zeros(rows, dtype=dtype),
        "residual_out": torch.zeros(rows, dtype=dtype),
        "norm_out": torch.zeros(rows, dtype=dtype),
        "quant_out": torch.zeros((tokens, hidden // 2), dtype=torch.uint8)
        if fp4
        else torch.zeros(rows, dtype=torch.float8_e4m3fn),
    }
    if spec.quantization in scales:
        values["scale_out"] = scales[spec.quantization]()
    names = (*spec.needs, *spec.returns, *spec.may_return)
    return {"pattern": pattern, "input": torch.ones(rows, dtype=dtype)} | {
        name: values[name] for name in names if name in values
    }


def outcome(workspace: Any, launches: Launches, arguments: dict[str, Any]) -> Any:
    """Return what a call launches and returns, or its error."""
    before = len(launches.made)
    try:
        result = allreduce_fusion(workspace=workspace, **arguments)
    except Exception as error:
        assert len(launches.made) == before
        return type(error), str(error)
    (made,) = launches.made[before:]
    which = [name for name, value in arguments.items() if value is result]
    if not which:
        # Allocated by the call, at another address each time.
        made = made.replace(struct.pack("P", result.data_ptr()), bytes(8))
    return made, which, result.shape, result.dtype, result.stride()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that the full checks were made."""
    made: list[int] = []
    real = front.prepare

    def prepare(*arguments: Any) -> Any:
        made.append(1)
        return real(*arguments)

    monkeypatch.setattr(front, "prepare", prepare)
    return made


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that the storage of a known kind was looked at."""
    made: list[int] = []
    real = KnownKind.admit

    def admit(kind: KnownKind, given: Any) -> Any:
        made.append(1)
        return real(kind, given)

    monkeypatch.setattr(KnownKind, "admit", admit)
    return made


@pytest.mark.parametrize("pattern", PLAIN, ids=lambda pattern: pattern.name)
def test_the_second_call_launches_the_same_without_the_checks(
    workspace: Any, launches: Launches, checks: list[int], admitted: list[int], pattern: AllReduceFusionPattern
) -> None:
    """And the third one without a look at where the tensors lie."""
    for dtype, use_oneshot, as_code in itertools.product((BF16, torch.float16), (None, True, False), (True, False)):
        arguments = {**tensors(pattern, dtype=dtype), "use_oneshot": use_oneshot}
        arguments["pattern"] = pattern if as_code else int(pattern)
        workspace._known = KnownCalls()
        checks.clear()
        first = outcome(workspace, launches, arguments)
        assert len(checks) == 1 and isinstance(first[0], bytes)
        for changes in (
            {},
            {"rms_eps": 0.25, "weight_bias": 1.0},
            {"rms_eps": 0.0, "weight_bias": -0.0},
            {"launch_with_pdl": True},
            {"launch_with_pdl": True, "trigger_completion_at_end": False},
            {"trigger_completion_at_end": False, "fp32_acc": True, "weight_bias": None},
            {"scale_factor": 0.125},
        ):
            checks.clear()
            known = outcome(workspace, launches, {**arguments, **changes})
            assert not checks
            admitted.clear()
            assert outcome(workspace, launches, {**arguments, **changes}) == known
            # Zeros are compared by what they are and not by their value, which is the same with any sign.
            assert not admitted and not checks
            kept, workspace._known = workspace._known, KnownCalls()
            assert outcome(workspace, launches, {**arguments, **changes}) == known
            assert len(checks) == 1
            workspace._known = kept
        assert outcome(workspace, launches, arguments) == first


def test_what_the_caller_leaves_out_is_allocated_each_time(
    workspace: Any, launches: Launches, checks: list[int]
) -> None:
    for pattern in PLAIN:
        primary = PATTERNS[pattern].primary
        arguments = {name: value for name, value in tensors(pattern).items() if name != primary}
        if pattern in (CODE.kARResidualRMSNormDynamicFP8Quant, CODE.kARResidualRMSNormOutDynamicFP8Quant):
            continue  # it must be given there
        results = [allreduce_fusion(workspace=workspace, **arguments) for _ in range(3)]
        assert len({result.data_ptr() for result in results}) == 3
        assert len({(result.shape, result.dtype) for result in results}) == 1
        assert all(
            struct.pack("P", result.data_ptr()) in made
            for result, made in zip(results, launches.made[-3:], strict=True)
        )
    assert len(checks) == len(PLAIN) - 2


def freed(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Return a tensor whose memory was given back, with an offset that makes its address look like one."""
    x = torch.ones(torch.Size(shape).numel() + 8, dtype=dtype)[8:].view(shape)
    x.untyped_storage().resize_(0)
    return x


class Subclass(torch.Tensor):
    pass


def others(good: Any) -> dict[str, Any]:
    """Return what may not pass for `good`, and some things that may."""
    shape, dtype = good.shape, good.dtype
    size = shape.numel()
    with FakeTensorMode():
        fake = torch.empty(shape, dtype=dtype)
    made = {
        "another": torch.zeros(shape, dtype=dtype),
        "parameter": torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False),
        "subclass": torch.zeros(shape, dtype=dtype).as_subclass(Subclass),
        "none": None,
        "number": 1.0,
        "list": [1.0],
        "other dtype": torch.zeros(shape, dtype=torch.float64),
        "same size of dtype": torch.zeros(shape, dtype=torch.int16),
        "complex": torch.zeros(shape, dtype=torch.complex64).conj(),
        "meta": torch.empty(shape, dtype=dtype, device="meta"),
        "fake": fake,
        "freed": freed(*shape, dtype=dtype),
        "flat": torch.zeros(size, dtype=dtype),
        "one row more": torch.zeros((shape[0] + 1, *shape[1:]), dtype=dtype),
        "misaligned": torch.zeros(size + 1, dtype=dtype)[1:].view(shape),
        "stepped": torch.zeros(2 * size, dtype=dtype)[::2].view(shape) if len(shape) == 1 else None,
        "columns": torch.zeros((shape[0], 2 * shape[1]), dtype=dtype)[:, : shape[1]] if len(shape) == 2 else None,
        "transposed": torch.zeros(tuple(reversed(shape)), dtype=dtype).t() if len(shape) == 2 else None,
    }
    if dtype.is_floating_point and dtype.itemsize > 1:
        made |= {
            "negated": torch._neg_view(torch.zeros(shape, dtype=dtype)),  # pyright: ignore
            "zero tensor": torch._efficientzerotensor(tuple(shape), dtype=dtype),  # pyright: ignore
            "sparse": torch.zeros(shape, dtype=dtype).to_sparse(),
            "nested": torch.nested.nested_tensor([torch.zeros(shape[1:], dtype=dtype)] * shape[0])
            if len(shape) > 1
            else None,
        }
    return made


def in_place(good: Any) -> dict[str, Any]:
    """Return other views of the bytes of `good`, from the first one on."""
    shape = good.shape
    made = {
        "parameter": torch.nn.Parameter(good.detach(), requires_grad=False),
        "subclass": good.as_subclass(Subclass),
        "part": good[:-1],
        "more dimensions": good[None],
        "strides": good.as_strided(shape, (0,) * len(shape)),
        "bytes": good.view(torch.int8) if good.stride(-1) == 1 else None,
        "same size of dtype": good.view([torch.int8, torch.int16, None, torch.int32][good.itemsize - 1]),
    }
    if len(shape) == 2 and good.is_contiguous():
        made |= {"reshaped": good.view(2 * shape[0], shape[1] // 2) if shape[1] > 1 else None, "transposed": good.t()}
    if good.dtype.is_floating_point and good.itemsize > 1:
        made["negated"] = torch._neg_view(good)  # pyright: ignore
        made["with a gradient"] = good.detach().requires_grad_()
    return made


def variations(pattern: AllReduceFusionPattern, good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a later call of the kind may differ in."""
    named = [name for name, value in good.items() if isinstance(value, torch.Tensor)]
    for name in named:
        for value in in_place(good[name]).values():
            yield {name: value}
        for value in others(good[name]).values():
            yield {name: value}
    for one, two in itertools.permutations(named, 2):
        yield {one: good[two]}  # the very same tensor twice
        if good[one].dtype.itemsize == 2 and good[one].ndim == 2:
            memory = torch.zeros(T + 1, H, dtype=BF16)
            yield {one: memory[:T], two: memory[1:]}
            yield {one: memory[:T], two: memory[0]}
            yield {
                one: memory[:T],
                two: memory[:T].view(good[two].dtype) if good[two].dtype.itemsize == 2 else good[two],
            }
    nothing = [True, None, "1", 1, 0, -1, 1.0, 0.5, 0.0, -0.5, float("nan"), float("inf"), torch.ones(1), [1]]
    for name in (
        "pattern", "rms_eps", "weight_bias", "scale_factor", "layout_code", "block_quant_group_size", "use_oneshot",
        "fp32_acc", "launch_with_pdl", "trigger_completion_at_end", "moe_finalize_backend",
    ):  # fmt: skip
        for value in (*nothing, *QuantizationSFLayout, CODE.kARResidualRMSNorm, 16, 32, 48):
            yield {name: value}
    for name in ("output", "residual_out", "norm_out", "quant_out", "scale_out"):
        if name not in good:
            yield {name: torch.zeros(T, H, dtype=BF16)}
    yield {"shared_expert_output": "not read"}
    yield tensors(pattern, tokens=T + 1)
    yield tensors(pattern, hidden=2 * H)
    yield tensors(pattern, tokens=1 << 15)


@pytest.mark.parametrize("pattern", PLAIN, ids=lambda pattern: pattern.name)
def test_a_good_call_before_loosens_nothing(
    workspace: Any, launches: Launches, pattern: AllReduceFusionPattern
) -> None:
    """Every outcome is the one without it: what is launched, or the error and its text."""
    good = tensors(pattern)
    refused = accepted = 0
    without = [name for name, value in good.items() if isinstance(value, torch.Tensor)]
    for changes in variations(pattern, good):
        arguments = {**good, **changes}
        workspace._known = KnownCalls()
        fresh = outcome(workspace, launches, arguments)
        workspace._known = KnownCalls()
        for _ in range(2):
            assert isinstance(outcome(workspace, launches, good)[0], bytes)
        assert len(workspace._known.kinds) == len(workspace._known) == 1
        assert outcome(workspace, launches, arguments) == fresh, changes
        for name in without:
            x = changes.get(name)
            if isinstance(x, torch.Tensor) and x is not good[name] and "no memory" in str(fresh[1]):
                without = [other for other in without if other != name]
        refused += not isinstance(fresh[0], bytes)
        accepted += isinstance(fresh[0], bytes)
    assert refused > 100 and accepted > 20
    # Of each a tensor whose memory was given back was tried, and refused for that.
    assert not without


@pytest.mark.parametrize("times", [1, 2], ids=["known kind", "known storage"])
def test_where_the_workspace_can_do_nothing_a_known_call_says_so(
    workspace: Any, launches: Launches, times: int
) -> None:
    good = tensors(CODE.kARResidualRMSNorm)
    for _ in range(times):
        allreduce_fusion(workspace=workspace, **good)
    with workspace._busy, pytest.raises(UnsupportedError, match="another thread"):
        allreduce_fusion(workspace=workspace, **good)
    launches.error = TransportError("the launch failed")
    for text in ("the launch failed", "broken since an earlier failure: the launch failed"):
        with pytest.raises(TransportError, match=text):
            allreduce_fusion(workspace=workspace, **good)
    launches.error, workspace._broken = None, None
    allreduce_fusion(workspace=workspace, **good)
    made, session = len(launches.made), workspace._session
    session._stall = Stall(StallKind.GAVE_UP, 1, 1, 0, 0)
    with pytest.raises(PeerStalledError):
        allreduce_fusion(workspace=workspace, **good)
    session._stall = None
    session._record[0] = 1  # as a kernel sets it that gives up
    with pytest.raises(PeerStalledError):
        allreduce_fusion(workspace=workspace, **good)
    session._record.zero_()
    session._stall = None
    session._closed = True
    with pytest.raises(ClosedError):
        allreduce_fusion(workspace=workspace, **good)
    session._closed, session._usable = False, False
    session._lifecycle.state = "detached"
    with pytest.raises(CheckpointError):
        allreduce_fusion(workspace=workspace, **good)
    session._lifecycle.state, session._usable = "attached", True
    assert len(launches.made) == made
    # It was the state that was in the way, and nothing is broken.
    allreduce_fusion(workspace=workspace, **good)
    workspace.destroy()
    with pytest.raises(ClosedError):
        allreduce_fusion(workspace=workspace, **good)


def test_other_settings_make_other_launches_and_a_checked_group_is_asked_each_time(
    workspace: Any, launches: Launches, checks: list[int]
) -> None:
    good = tensors(CODE.kARResidualRMSNorm, tokens=16, hidden=1024)
    first = outcome(workspace, launches, good)
    assert outcome(workspace, launches, good) == first
    workspace._session.settings = Settings(4, True)
    checks.clear()
    assert outcome(workspace, launches, good)[0] != first[0] and len(checks) == 1
    assert outcome(workspace, launches, good)[0] != first[0] and len(checks) == 1
    workspace._checked_group = SimpleNamespace()
    outcome(workspace, launches, good)
    assert len(checks) == 2


def test_where_it_lies_is_looked_at_again_when_anything_moved(
    workspace: Any, launches: Launches, checks: list[int], admitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another stream, a session that has moved its struct: launched as the full checks would, without them."""
    good = tensors(CODE.kARResidualRMSNormFP8Quant)
    current = [0]
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: current[0])
    waited: list[int] = []
    monkeypatch.setattr(_cuda, "wait_for_stream", lambda device, stream: waited.append(stream))
    for _ in range(2):
        outcome(workspace, launches, good)
    checks.clear()
    admitted.clear()
    made = []
    for current[0] in (7, 0, 7):
        made.append(outcome(workspace, launches, good)[0])
    assert made[0] == made[2] != made[1] and waited == [0, 7, 0]
    monkeypatch.setattr(_cuda, "is_capturing", lambda: True)
    for current[0] in (9, 7):  # a capture orders nothing, and what follows it waits for nothing
        made.append(outcome(workspace, launches, good)[0])
    assert made[4] == made[0] != made[3] and waited == [0, 7, 0]
    before, session = workspace._session._packed, workspace._session
    session._pack()
    assert session._packed is not before
    made.append(outcome(workspace, launches, good)[0])
    assert made[5] != made[0] and struct.pack("P", session._session) in made[5]
    assert not checks and not admitted
    workspace._known = KnownCalls()
    assert outcome(workspace, launches, good)[0] == made[5]


def test_equal_numbers_are_known_and_zeros_of_another_sign_are_not(
    workspace: Any, launches: Launches, checks: list[int], admitted: list[int]
) -> None:
    good = tensors(CODE.kARResidualRMSNormFP8Quant) | {"scale_factor": 0.5, "rms_eps": 1e-5, "weight_bias": 1.0}
    first = outcome(workspace, launches, good)
    assert outcome(workspace, launches, good) == first
    admitted.clear()
    same = {"scale_factor": float("0.5"), "rms_eps": float("1e-5"), "weight_bias": float("1.0")}
    assert all(value is not good[name] for name, value in same.items())
    assert outcome(workspace, launches, good | same) == first and not admitted
    for name, (one, two) in itertools.product(("rms_eps", "weight_bias"), itertools.permutations((0.0, -0.0))):
        made = [outcome(workspace, launches, good | {name: value})[0] for value in (one, one, two, two, one)]
        assert made[0] == made[1] == made[4] != made[2] == made[3]
    assert len(checks) == 1
    for name in same:
        ones = good | {name: 1.0}
        for _ in range(3):
            outcome(workspace, launches, ones)
        checks.clear()
        for value in (True, 1, torch.ones(())):
            launched = outcome(workspace, launches, ones | {name: value})
            kept, workspace._known = workspace._known, KnownCalls()
            assert outcome(workspace, launches, ones | {name: value}) == launched
            workspace._known = kept
        # Of a scale, an element on the device is no other kind.
        assert len(checks) == (5 if name == "scale_factor" else 6)


def test_tensors_of_another_class_or_device_are_looked_at_anew(
    workspace: Any, launches: Launches, checks: list[int], admitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = tensors(CODE.kARResidualRMSNormFP8Quant)
    for _ in range(2):
        outcome(workspace, launches, good)
    named = [name for name, value in good.items() if isinstance(value, torch.Tensor)]
    for name in named:
        checks.clear()
        outcome(workspace, launches, good | {name: good[name].as_subclass(Subclass)})
        assert checks, name
    for name in named:
        # As if memory of one device had gone to another one, at the same address.
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "get_device", lambda x, name=name: 1 if x is good[name] else -1)
            admitted.clear()
            outcome(workspace, launches, good)
            assert admitted, name
    checks.clear()
    outcome(workspace, launches, good | {"input": torch.nn.Parameter(good["input"], requires_grad=False)})
    assert checks


def test_storage_that_comes_back_is_known_in_any_shape_and_the_oldest_is_forgotten(
    workspace: Any, launches: Launches, admitted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_calls, "STORAGES", 3)
    source, output = torch.ones(8, H, dtype=BF16), torch.zeros(8, H, dtype=BF16)

    def call(tokens: int, offset: int = 0) -> int:
        admitted.clear()
        allreduce_fusion(source[offset:][:tokens], workspace, 0, output=output[offset:][:tokens])
        return len(admitted)

    for tokens in (1, 2, 3, 1, 2, 3):
        call(tokens)
    assert [call(tokens) for tokens in (2, 3, 1)] == [0, 0, 0]
    assert call(1, offset=4) == 1 and len(workspace._known) == 3 and len(workspace._known.kinds) == 3
    # The one that was not used for longest went.
    assert [call(3), call(1), call(2)] == [0, 0, 1]


def test_a_known_call_keeps_no_tensor_alive_and_little_memory(workspace: Any) -> None:
    def calls() -> list[Any]:
        good = tensors(CODE.kARResidualRMSNormFP8Quant)
        for _ in range(3):
            allreduce_fusion(workspace=workspace, **good)
        return [weakref.ref(value) for value in good.values() if isinstance(value, torch.Tensor)]

    calls()
    tracemalloc.start()
    count = 32
    memory = torch.ones(4 * count, T, H, dtype=BF16)
    gamma = torch.ones(H, dtype=BF16)
    before = tracemalloc.get_traced_memory()[0]
    for i in range(count):
        x, residual, norm, total = memory[4 * i : 4 * i + 4]
        for _ in range(2):
            allreduce_fusion(
                x, workspace, 1, residual_in=residual, rms_gamma=gamma, norm_out=norm, residual_out=total
            )
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(workspace._known) >= count and used < count * 4096
    gc.collect()
    assert not any(reference() is not None for reference in calls())


def test_a_result_that_is_allocated_is_written_wherever_it_lies(
    workspace: Any, launches: Launches, checks: list[int], admitted: list[int]
) -> None:
    for pattern in (CODE.kAllReduce, CODE.kARResidualRMSNorm, CODE.kARResidualRMSNormFP8Quant):
        primary = PATTERNS[pattern].primary
        arguments = {name: value for name, value in tensors(pattern).items() if name != primary}
        for _ in range(2):
            allreduce_fusion(workspace=workspace, **arguments)
        checks.clear()
        admitted.clear()
        kept = []
        for number in range(6):
            result = allreduce_fusion(workspace=workspace, **arguments)
            assert struct.pack("P", result.data_ptr()) in launches.made[-1]
            # Every other one is given back, so that its place is taken again.
            if number % 2:
                kept.append(result)
            fields = struct.unpack(SPEC.structs[SPEC.entry_points["comm_known_allreduce_v1"]], launches.made[-1])
            # Behind the prefix, the stream and the session.
            assert fields[4 + PLACES[primary]] == result.data_ptr()
        assert not checks and not admitted and len({x.data_ptr() for x in kept}) == len(kept)
        with FakeTensorMode():
            fake = outcome(workspace, launches, arguments)
            workspace._known = KnownCalls()
            assert outcome(workspace, launches, arguments) == fake and not isinstance(fake[0], bytes)
