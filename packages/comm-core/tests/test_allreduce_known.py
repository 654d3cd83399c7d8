"""Calls of a kind that was found good before: they launch what the full checks would, and accept nothing more."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from comm_core import AllReduceFusionPattern, QuantizationSFLayout, _cuda, allreduce_fusion
from comm_core.allreduce import front
from comm_core.allreduce.kernels import WindowAllReduceWorkspace
from comm_core.allreduce.known import KnownCall
from comm_core.allreduce.launch import Settings
from comm_core.allreduce.module import reduce_module
from comm_core.allreduce.patterns import PATTERNS, Quantization
from comm_core.allreduce.session import ReduceSession
from comm_core.consensus import Transaction
from comm_core.errors import ClosedError, PeerStalledError, TransportError, UnsupportedError
from comm_core.group import thread_groups
from comm_core.ulysses.geometries import Geometries
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

    def bind(self, entry_point: str) -> Callable[..., None]:
        pack = struct.Struct(SPEC.structs[SPEC.entry_points[entry_point]]).pack

        def call(*fields: int) -> None:
            if self.error is not None:
                raise self.error
            self.made.append(pack(0, 1, *fields))

        return call


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


@pytest.mark.parametrize("pattern", PLAIN, ids=lambda pattern: pattern.name)
def test_the_second_call_launches_the_same_without_the_checks(
    workspace: Any, launches: Launches, checks: list[int], pattern: AllReduceFusionPattern
) -> None:
    for dtype, use_oneshot, as_code in itertools.product((BF16, torch.float16), (None, True, False), (True, False)):
        arguments = {**tensors(pattern, dtype=dtype), "use_oneshot": use_oneshot}
        arguments["pattern"] = pattern if as_code else int(pattern)
        workspace._known = Geometries[KnownCall]()
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
            kept, workspace._known = workspace._known, Geometries[KnownCall]()
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


def variations(pattern: AllReduceFusionPattern, good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What a later call of the kind may differ in."""
    named = [name for name, value in good.items() if isinstance(value, torch.Tensor)]
    for name in named:
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
        workspace._known = Geometries[KnownCall]()
        fresh = outcome(workspace, launches, arguments)
        workspace._known = Geometries[KnownCall]()
        assert isinstance(outcome(workspace, launches, good)[0], bytes)
        assert len(workspace._known) == 1
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


def test_where_the_workspace_can_do_nothing_a_known_call_says_so(workspace: Any, launches: Launches) -> None:
    good = tensors(CODE.kARResidualRMSNorm)
    allreduce_fusion(workspace=workspace, **good)
    with workspace._busy, pytest.raises(UnsupportedError, match="another thread"):
        allreduce_fusion(workspace=workspace, **good)
    launches.error = TransportError("the launch failed")
    for text in ("the launch failed", "broken since an earlier failure: the launch failed"):
        with pytest.raises(TransportError, match=text):
            allreduce_fusion(workspace=workspace, **good)
    launches.error, workspace._broken = None, None
    allreduce_fusion(workspace=workspace, **good)
    made = len(launches.made)
    workspace._session._stall = Stall(StallKind.GAVE_UP, 1, 1, 0, 0)
    with pytest.raises(PeerStalledError):
        allreduce_fusion(workspace=workspace, **good)
    workspace._session._stall = None
    assert len(launches.made) == made
    workspace.destroy()
    with pytest.raises(ClosedError):
        allreduce_fusion(workspace=workspace, **good)


def test_other_settings_make_other_launches_and_a_checked_group_is_asked_each_time(
    workspace: Any, launches: Launches, checks: list[int]
) -> None:
    good = tensors(CODE.kARResidualRMSNorm, tokens=16, hidden=1024)
    first = outcome(workspace, launches, good)
    workspace._session.settings = Settings(4, True)
    checks.clear()
    assert outcome(workspace, launches, good)[0] != first[0] and len(checks) == 1
    assert outcome(workspace, launches, good)[0] != first[0] and len(checks) == 1
    workspace._checked_group = SimpleNamespace()
    outcome(workspace, launches, good)
    assert len(checks) == 2
