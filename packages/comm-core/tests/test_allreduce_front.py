"""The front of the fused all-reduce on one rank and on threads: arguments, capacity, the choice, and the life cycle.

What needs processes (sums, equal replicas, ranks that are gone) is in test_allreduce_dist.py.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from comm_core import (
    AllReduceBackendError,
    AllReduceFusionPattern,
    AllReduceFusionWorkspace,
    CommError,
    JointValueError,
    QuantizationSFLayout,
    allreduce_fusion,
    compute_fp4_swizzled_layout_sf_size,
    create_allreduce_fusion_workspace,
    plugins,
)
from comm_core.allreduce import reference
from comm_core.allreduce.arguments import prepare
from comm_core.allreduce.backend import AllReduceBackend, FusionCall
from comm_core.allreduce.dist import DistAllReduce, required_bytes
from comm_core.allreduce.patterns import ARGUMENTS, OUTPUTS, PATTERNS
from comm_core.errors import ArgumentTypeError, ArgumentValueError, ClosedError, TransportError, UnsupportedError
from comm_core.group import Group, thread_groups
from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.halts import Halt, halted
from comm_core.testing.ranks import on_threads
from comm_core.transport.interface import Request, Verdict

BF16, F32 = torch.bfloat16, torch.float32
CODE = AllReduceFusionPattern
T, H = 4, 64


def create(group: Group | None = None, **changes: Any) -> AllReduceFusionWorkspace:
    """Return a workspace of one rank, which needs no processes."""
    arguments: dict[str, Any] = {"max_token_num": 8, "hidden_dim": H, "dtype": BF16, "device": "cpu", **changes}
    return create_allreduce_fusion_workspace(group=thread_groups(1)[0] if group is None else group, **arguments)


def good(pattern: AllReduceFusionPattern, tokens: int = T, hidden: int = H, dtype: torch.dtype = BF16) -> Any:
    """Return arguments that `pattern` accepts, every output given."""
    spec = PATTERNS[pattern]
    rows = (tokens, hidden)
    generator = torch.Generator().manual_seed(int(pattern))
    values: dict[str, Any] = {
        "input": torch.randn(rows, generator=generator).to(dtype),
        "residual_in": torch.randn(rows, generator=generator).to(dtype),
        "rms_gamma": torch.randn(hidden, generator=generator).to(dtype),
        "scale_factor": torch.tensor([0.5]),
        "layout_code": QuantizationSFLayout.LINEAR,
        "block_quant_group_size": 16,
        "moe_reduction_device_num_experts": 2,
        "moe_reduction_scale_input": torch.rand((2, tokens), generator=generator),
        "moe_reduction_active_experts_token_input": torch.randn((2 * tokens, hidden), generator=generator).to(dtype),
        "moe_reduction_token_input": torch.randn(rows, generator=generator).to(dtype),
        "expanded_idx_to_permuted_idx": torch.tensor([[0, -1]] * tokens, dtype=torch.int32),
        "expert_scale_factor": torch.rand((tokens, 2), generator=generator).to(dtype),
        "shared_expert_output": torch.randn(rows, generator=generator).to(dtype),
    }
    arguments = {name: values[name] for name in (*spec.needs, *spec.accepts)}
    fp4 = spec.quantization.value == "nvfp4"
    scales = {
        "nvfp4": torch.zeros(tokens * hidden // 16, dtype=torch.uint8),
        "dynamic_fp8": torch.zeros(tokens, 1),
        "group_fp8": torch.zeros(hidden // 64, -(-tokens // 4) * 4, dtype=torch.int32).t()[:tokens],
    }
    outputs = {
        "output": torch.zeros(rows, dtype=dtype),
        "residual_out": torch.zeros(rows, dtype=dtype),
        "norm_out": torch.zeros(rows, dtype=dtype),
        "quant_out": torch.zeros((tokens, hidden // 2), dtype=torch.uint8)
        if fp4
        else torch.zeros(rows, dtype=torch.float8_e4m3fn),
        "scale_out": scales.get(spec.quantization.value),
    }
    arguments |= {name: outputs[name] for name in (*spec.returns, *spec.may_return)}
    # The position of `input` has to be filled, although the MoE reduction does not look at it.
    arguments.setdefault("input", None)
    return arguments


def raw(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


# What comes out


@pytest.mark.parametrize("pattern", CODE)
@pytest.mark.parametrize("dtype", reference.DTYPES)
def test_every_pattern_writes_every_output_and_returns_the_primary_one(pattern: Any, dtype: torch.dtype) -> None:
    """One rank: the sum is the contribution, and what follows it is the reference's."""
    arguments = good(pattern, dtype=dtype)
    spec = PATTERNS[pattern]
    if dtype == F32 and spec.quantization.value == "nvfp4":
        with create(dtype=dtype) as workspace, pytest.raises(ArgumentValueError, match="float32"):
            allreduce_fusion(workspace=workspace, pattern=pattern, **arguments)
        return
    before = {name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor)}
    with create(dtype=dtype) as workspace:
        result = allreduce_fusion(workspace=workspace, pattern=int(pattern), **arguments)
    assert result is arguments[spec.primary]
    for name in (*spec.needs, *spec.accepts):
        if name in before:
            assert torch.equal(before[name], arguments[name]), f"{name} was changed"
    contribution = arguments["input"]
    if "moe_reduction_token_input" in arguments:
        contribution = reference.moe_reduce(
            arguments["moe_reduction_active_experts_token_input"],
            arguments["moe_reduction_scale_input"],
            arguments["moe_reduction_token_input"],
            2,
        )
    elif "expanded_idx_to_permuted_idx" in arguments:
        contribution = reference.moe_finalize(
            contribution,
            arguments["expanded_idx_to_permuted_idx"],
            arguments["expert_scale_factor"],
            arguments["shared_expert_output"],
        )
    norm = {name: arguments[name] for name in ("residual_in", "rms_gamma") if name in arguments}
    expected = reference.fuse(
        pattern,
        reference.reduce_in_rank_order([contribution]),
        dtype,
        **norm,
        scale_factor=0.5,
        layout_code=2,
        block_quant_group_size=16,
        wanted=(*spec.returns, *spec.may_return),
    )
    for name in (*spec.returns, *spec.may_return):
        made = raw(getattr(expected, name)).flatten()
        assert torch.equal(raw(arguments[name]).flatten()[: made.numel()], made) and made.any(), name


def test_outputs_may_be_the_inputs_and_are_allocated_where_the_call_returns_them() -> None:
    arguments = good(CODE.kARResidualRMSNorm)
    with create() as workspace:
        expected = allreduce_fusion(workspace=workspace, pattern=1, **arguments).clone()
        x, residual = arguments["input"], arguments["residual_in"]
        total = arguments["residual_out"].clone()
        gamma = arguments["rms_gamma"]
        alone = allreduce_fusion(x, workspace, 1, residual_in=residual, rms_gamma=gamma)
        assert torch.equal(alone, expected)
        result = allreduce_fusion(
            x, workspace, 1, residual_in=residual, rms_gamma=gamma, norm_out=x, residual_out=residual
        )
        assert result is x and torch.equal(x, expected) and torch.equal(residual, total)


def test_flags_change_no_bits() -> None:
    """`fp32_acc=False` is accepted: the sum is in float32 all the same, and one- and two-shot are one algorithm."""
    arguments = good(CODE.kARResidualRMSNorm)
    with create() as workspace:
        results = [
            allreduce_fusion(workspace=workspace, pattern=1, **arguments, **flags).clone()
            for flags in (
                {},
                {"fp32_acc": True, "use_oneshot": True},
                {"use_oneshot": False, "launch_with_pdl": True, "trigger_completion_at_end": False},
                {"weight_bias": None, "layout_code": QuantizationSFLayout.SWIZZLED_128x4},
            )
        ]
        other = allreduce_fusion(workspace=workspace, pattern=1, **arguments, weight_bias=1.0)
    assert all(torch.equal(item, results[0]) for item in results) and not torch.equal(other, results[0])


@pytest.mark.parametrize("layout", QuantizationSFLayout)
@pytest.mark.parametrize("as_type", [torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_scales_of_every_layout_in_any_type_of_elements(layout: Any, as_type: torch.dtype) -> None:
    arguments = good(CODE.kARResidualRMSNormFP4Quant)
    size = {0: compute_fp4_swizzled_layout_sf_size(T, H // 16), 1: 8 * 4, 2: T * 4}[int(layout)]
    scales = torch.full((size,), 0x55, dtype=torch.uint8).view(as_type)
    swizzled = {**arguments, "layout_code": layout}
    with create() as workspace:
        allreduce_fusion(workspace=workspace, pattern=3, **{**swizzled, "scale_out": scales})
        short = scales.view(torch.uint8)[:-4].view(as_type)
        with pytest.raises(ArgumentValueError, match=f"scale_out must be contiguous and hold {size} bytes"):
            allreduce_fusion(workspace=workspace, pattern=3, **{**swizzled, "scale_out": short})
        linear = arguments["scale_out"]
        allreduce_fusion(workspace=workspace, pattern=3, **arguments)
    values = scales.view(torch.uint8)
    assert sorted(values[values != 0].tolist()) == sorted(linear[linear != 0].tolist())


# What is refused


def wrong(name: str, value: Any, text: str, pattern: int = 1, error: type[Exception] = ArgumentValueError) -> Any:
    return pytest.param(pattern, {name: value}, error, text, id=f"{pattern}-{name}-{text[:24]}")


@pytest.mark.parametrize(
    ("pattern", "changes", "error", "text"),
    [
        wrong("pattern", 13, "pattern=13"),
        wrong("pattern", True, "pattern must be", error=ArgumentTypeError),
        wrong("input", None, "input"),
        wrong("input", [1.0], "input must be a torch.Tensor", error=ArgumentTypeError),
        wrong("input", torch.zeros(T, H, dtype=torch.int32), "input must be one of float16"),
        wrong("input", torch.zeros(T * H, dtype=BF16), "input must have shape"),
        wrong("input", torch.zeros(0, H, dtype=BF16), "at least one of each"),
        wrong("input", torch.zeros(H, T, dtype=BF16).t(), "input must be contiguous"),
        wrong("input", torch.zeros(9, H, dtype=BF16), "output must have shape (9, 64)", pattern=0),
        wrong("input", torch.zeros(T, H, dtype=BF16, device="meta"), "input must be on cpu"),
        wrong("residual_in", None, "needs residual_in"),
        wrong("residual_in", torch.zeros(T, H), "residual_in must have dtype bfloat16"),
        wrong("residual_in", torch.zeros(T - 1, H, dtype=BF16), "residual_in must have shape"),
        wrong("rms_gamma", None, "needs rms_gamma"),
        wrong("rms_gamma", torch.zeros(H - 1, dtype=BF16), "rms_gamma must have shape"),
        wrong("norm_out", torch.zeros(T, H), "norm_out must have dtype"),
        wrong("norm_out", torch.zeros(T, 2 * H, dtype=BF16)[:, :H], "norm_out must be contiguous"),
        wrong("quant_out", torch.zeros(T, H), "does not write quant_out"),
        wrong("rms_eps", -1e-6, "rms_eps must be"),
        wrong("rms_eps", "1e-6", "rms_eps must be a number", error=ArgumentTypeError),
        wrong("weight_bias", float("nan"), "weight_bias must be a finite number"),
        wrong("use_oneshot", 1, "use_oneshot must be a bool", error=ArgumentTypeError),
        wrong("fp32_acc", None, "fp32_acc must be a bool", error=ArgumentTypeError),
        wrong("launch_with_pdl", "yes", "launch_with_pdl must be a bool", error=ArgumentTypeError),
        wrong("moe_finalize_backend", "cake", "no package has another one", error=UnsupportedError),
        wrong("scale_factor", None, "needs scale_factor", pattern=2),
        wrong("scale_factor", 0.0, "scale_factor must be positive", pattern=2),
        wrong("scale_factor", torch.ones(2), "scale_factor must be a number or one float32 element", pattern=2),
        wrong("quant_out", torch.zeros(T, H, dtype=torch.uint8), "must have dtype float8_e4m3fn", pattern=2),
        wrong("scale_out", torch.zeros(T), "does not write scale_out", pattern=2),
        wrong("scale_out", None, "writes scale_out, which must be given", pattern=3),
        wrong("layout_code", 3, "layout_code=3", pattern=3),
        wrong("quant_out", torch.zeros(T, H, dtype=torch.uint8), "quant_out must have shape (4, 32)", pattern=3),
        wrong("norm_out", None, "writes norm_out, which must be given", pattern=4),
        wrong("block_quant_group_size", None, "needs block_quant_group_size", pattern=8),
        wrong("block_quant_group_size", 0, "block_quant_group_size must be at least 1", pattern=8),
        wrong("block_quant_group_size", 48, "block_quant_group_size must divide hidden_dim=64", pattern=8),
        wrong("scale_out", torch.zeros(T, 1, dtype=F32), "scale_out must be int32 of shape (4, 1)", pattern=9),
        wrong("quant_out", None, "writes quant_out, which must be given", pattern=10),
        wrong("residual_out", None, "writes residual_out, which must be given", pattern=11),
        wrong("scale_out", torch.zeros(T), "scale_out must have shape (4, 1)", pattern=11),
        wrong("moe_reduction_scale_input", torch.zeros(T, 2), "moe_reduction_scale_input must have shape", pattern=6),
        wrong("moe_reduction_device_num_experts", torch.tensor(2), "wait for the device", 6, ArgumentTypeError),
        wrong("scale_out", None, "both quant_out and scale_out", pattern=6),
        wrong("scale_factor", None, "scale_factor is needed", pattern=6),
        wrong("expanded_idx_to_permuted_idx", torch.zeros(T, 2), "must have dtype int32", pattern=7),
        wrong("expanded_idx_to_permuted_idx", torch.full((T, 2), T).int(), "expected -1 or a row", pattern=7),
        wrong("expert_scale_factor", torch.zeros(T, 3), "expert_scale_factor must have shape (4, 2)", pattern=7),
        wrong("residual_in", None, "needs residual_in", pattern=12),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    pattern: int, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    """C8: before anything is sent or written, in words that name the argument."""
    arguments = {**good(CODE(pattern)), "pattern": pattern, **changes}
    spec = PATTERNS[CODE(pattern)]
    outputs = [arguments[name] for name in (*spec.returns, *spec.may_return) if arguments.get(name) is not None]
    with create() as workspace:
        with pytest.raises(error) as caught:
            allreduce_fusion(workspace=workspace, **arguments)
        assert text in str(caught.value) and isinstance(caught.value, CommError)
        assert not any(raw(x).any() for x in outputs)
        correct = {**good(CODE(pattern)), "pattern": pattern}
        assert allreduce_fusion(workspace=workspace, **correct) is correct[spec.primary]


def test_outputs_that_overlap_are_refused() -> None:
    memory = torch.zeros(3 * T, H, dtype=BF16)
    arguments = good(CODE.kARResidualRMSNorm)
    with create() as workspace:
        for changes, names in (
            ({"norm_out": memory[:T], "residual_out": memory[1 : T + 1]}, ("residual_out", "norm_out")),
            ({"norm_out": memory[:T], "residual_out": memory[:T]}, ("residual_out", "norm_out")),
            ({"input": memory[:T], "norm_out": memory[1 : T + 1]}, ("norm_out", "input")),
            ({"rms_gamma": memory[0], "norm_out": memory[:T]}, ("norm_out", "rms_gamma")),
        ):
            with pytest.raises(ArgumentValueError) as caught:
                allreduce_fusion(workspace=workspace, pattern=1, **{**arguments, **changes})
            assert all(name in str(caught.value) for name in names)
        assert not memory.any()


@pytest.mark.parametrize("dtype", reference.DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(8, 64), (1, 7), (3, 33)])
def test_the_capacity_is_exact_and_one_function_says_it(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    """F4, F5: exactly what the workspace was made for fits, in any shape, and not one row more."""
    with create(max_token_num=tokens, hidden_dim=hidden, dtype=dtype) as workspace:
        assert workspace.buffer_bytes == required_bytes(1, tokens, hidden, dtype.itemsize)
        for shape in ((tokens, hidden), (tokens * hidden, 1), (1, tokens * hidden)):
            assert workspace.is_buffer_size_sufficient(1, *shape, dtype)
            x = torch.ones(shape, dtype=dtype)
            assert torch.equal(allreduce_fusion(x, workspace, 0), x)
        for shape in ((tokens + 1, hidden), (1, tokens * hidden + 1)):
            assert not workspace.is_buffer_size_sufficient(1, *shape, dtype)
            with pytest.raises(ArgumentValueError, match=r"input: .* need .* the workspace has"):
                allreduce_fusion(torch.ones(shape, dtype=dtype), workspace, 0)
        assert not workspace.is_buffer_size_sufficient(2, 1, 1, dtype)
        if dtype == F32:
            assert workspace.is_buffer_size_sufficient(1, 2 * tokens, hidden, BF16)


# Creation


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"world_size": 2}, ArgumentValueError, "world_size must be 1"),
        ({"rank": 1}, ArgumentValueError, "rank must be 0"),
        ({"max_token_num": None}, ArgumentTypeError, "max_token_num must be an int"),
        ({"max_token_num": 0}, ArgumentValueError, "max_token_num must be at least 1"),
        ({"hidden_dim": 64.0}, ArgumentTypeError, "hidden_dim must be an int"),
        ({"max_token_num": 1 << 30, "hidden_dim": 1 << 20}, ArgumentValueError, "at most"),
        ({"dtype": None}, ArgumentTypeError, "dtype must be a torch.dtype"),
        ({"dtype": torch.int32}, ArgumentValueError, "dtype must be one of float16"),
        ({"gpus_per_node": 0}, ArgumentValueError, "gpus_per_node"),
        ({"force_oneshot_support": 1}, ArgumentTypeError, "force_oneshot_support must be a bool"),
        ({"top_k": 10}, ArgumentValueError, "top_k: backend 'auto' takes no options"),
        ({"backend": "dist", "dynamic_fp8": False, "config": {}}, ArgumentValueError, "config, dynamic_fp8: backend"),
        ({"backend": None}, JointValueError, "backend must be a str"),
        ({"backend": "nope"}, JointValueError, "backend must be one of"),
    ],
)
def test_bad_arguments_of_creation_are_named(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        create(**changes)
    assert text in str(caught.value)


@pytest.mark.parametrize(("name", "package"), [("trtllm", "comm-nvlink"), ("mnnvl", "comm-mnnvl")])
def test_a_backend_that_is_not_there_raises_and_says_why(name: str, package: str) -> None:
    """M5: the package is not installed, or kept out, as it is from this test."""
    with pytest.raises(AllReduceBackendError, match=f"backend '{name}' was asked for.*{package}.*(install|blocked)"):
        create(backend=name)


def test_a_package_that_is_blocked_or_too_old_is_told_from_one_that_is_not_there() -> None:
    """M2: each needs something else to be done."""
    here = plugins.PluginReport("nvlink", "comm-nvlink", "0.1", transports=("nvlink",))
    blocked = plugins.PluginReport("nvlink", "comm-nvlink", "0.1", state="blocked", error="blocked by a variable")
    assert plugins.Registry([here]).why_missing("trtllm") == (
        "comm-nvlink 0.1 is installed and does not provide 'trtllm'; if a later release does: pip install --upgrade "
        "comm-nvlink"
    )
    assert "is blocked: blocked by a variable" in plugins.Registry([blocked]).why_missing("trtllm")
    assert "comm-nvlink is not installed; install it with" in plugins.Registry([]).why_missing("trtllm")


class Doubling(AllReduceFusionWorkspace):
    """Adds to what it is given, so that a test sees who computed."""

    patterns = frozenset({CODE.kAllReduce})
    shared_resources = True

    @property
    def backend(self) -> str:
        return "doubling"

    def required_bytes(self, num_tokens: int, hidden_dim: int, dtype: Any, use_oneshot: bool | None = None) -> int:
        return num_tokens * hidden_dim * dtype.itemsize * (3 if use_oneshot else 1)

    def _run(self, call: FusionCall) -> None:
        assert call.output is not None
        if call.tokens == 2:
            raise TransportError("the link is down")
        call.output.copy_(call.input * 2)


class DoublingBackend(AllReduceBackend):
    name = "doubling"
    version = "1.0"
    wire = 1
    priority = 100
    static_options = frozenset({"top_k", "output_dtype"})

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.options: Any = None

    def assess(self, request: Request, facts: Sequence[Any]) -> Verdict:
        return Verdict(request.device_type == "cpu", "on the CPU")

    def open(self, stages: Any, request: Request, plan: Any, device: torch.device) -> Any:
        self.options = request.options
        if self.fails:
            raise RuntimeError("no memory")
        return Doubling(
            request.world_size, stages.group.rank, dtype=BF16, device=device, buffer_bytes=request.max_bytes
        )


class Plugin:
    def __init__(self, backend: AllReduceBackend) -> None:
        self.backend = backend

    @hookimpl
    def comm_allreduce(self) -> list[AllReduceBackend]:
        return [self.backend]


@pytest.fixture
def installed(request: pytest.FixtureRequest) -> Any:
    backend = DoublingBackend(*getattr(request, "param", ()))
    plugins.register("doubling-plugin", Plugin(backend))
    yield backend
    plugins.unregister("doubling-plugin")


def test_auto_prefers_a_plugin_and_hands_it_checked_calls(installed: DoublingBackend) -> None:
    x = torch.ones(4, H, dtype=BF16)
    workspace = create(top_k=None)
    assert workspace.backend == "doubling"
    assert workspace.decision is not None and workspace.decision.backend == "doubling"
    assert torch.equal(allreduce_fusion(x, workspace, 0), x * 2)
    with pytest.raises(UnsupportedError, match=r"kARResidualRMSNorm \(1\) is not computed by backend 'doubling'"):
        allreduce_fusion(x, workspace, 1, residual_in=x, rms_gamma=x[0])
    with pytest.raises(ArgumentValueError, match="use_oneshot=True"):
        allreduce_fusion(x, workspace, 0, use_oneshot=True)
    with pytest.raises(UnsupportedError, match="destroy the workspace before the checkpoint"):
        workspace.checkpoint_prepare()
    workspace.destroy()
    with create(backend="doubling", top_k=8, output_dtype=F32):
        assert installed.options["top_k"] == 8 and installed.options["output_dtype"] == "float32"
        assert installed.options["max_token_num"] == 8 and installed.options["hidden_dim"] == H
    with create(backend="dist") as plain:
        assert torch.equal(allreduce_fusion(x, plain, 0), x)


@pytest.mark.parametrize("installed", [(True,)], indirect=True)
def test_auto_falls_back_where_opening_fails_and_a_name_raises(installed: DoublingBackend) -> None:
    """F13: with the reason."""
    assert installed.fails
    with create() as workspace:
        assert workspace.backend == "dist" and "no memory" in str(workspace.fallback_reason)
    with pytest.raises(AllReduceBackendError, match="no memory"):
        create(backend="doubling")


def test_a_call_that_failed_on_the_way_breaks_the_workspace(installed: DoublingBackend) -> None:
    workspace = create()
    with pytest.raises(TransportError, match="the link is down"):
        allreduce_fusion(torch.ones(2, H, dtype=BF16), workspace, 0)
    with pytest.raises(TransportError, match="broken since an earlier failure: the link is down"):
        allreduce_fusion(torch.ones(4, H, dtype=BF16), workspace, 0)
    assert "broken" in repr(workspace)
    with pytest.warns(ResourceWarning, match="never destroyed"):
        workspace.__del__()
    workspace.destroy()


def decide(group: Group, backend: str) -> str:
    try:
        create(group, backend=backend, max_token_num=8 + group.rank)
    except JointValueError as error:
        return str(error)
    return "accepted"


def test_ranks_that_ask_for_different_things_raise_together() -> None:
    """C2: with what each rank asked for."""
    texts = on_threads(thread_groups(3), lambda group: decide(group, "auto"))
    assert len(set(texts)) == 1 and "the ranks disagree on options" in texts[0]
    assert "rank 2: options {'force_oneshot_support': False, 'hidden_dim': 64, 'max_token_num': 10}" in texts[0]


def bad_on_one(group: Group) -> str:
    try:
        create(group, dtype=BF16 if group.rank != 1 else torch.int8)
    except JointValueError as error:
        assert set(error.per_rank) == {1}
        return str(error)
    return "accepted"


def test_a_bad_argument_on_one_rank_raises_on_all() -> None:
    """C8: construction is joint."""
    texts = on_threads(thread_groups(3), bad_on_one)
    assert len(set(texts)) == 1 and "rank 1: dtype must be one of float16" in texts[0]


# Life cycle


def test_a_destroyed_workspace_says_so_and_is_destroyed_again_quietly() -> None:
    """H2: and dist's has nothing to detach for a checkpoint."""
    x = torch.ones(T, H, dtype=BF16)
    workspace = create()
    assert "open" in repr(workspace) and (workspace.world_size, workspace.rank) == (1, 0)
    for call in (workspace.checkpoint_prepare, lambda: workspace.checkpoint_restore(None)):  # pyright: ignore
        with pytest.raises(UnsupportedError, match="destroy the workspace before the checkpoint"):
            call()
    workspace.destroy()
    workspace.destroy()
    assert "destroyed" in repr(workspace)
    with pytest.raises(ClosedError, match="destroyed"):
        allreduce_fusion(x, workspace, 0)
    with pytest.raises(ArgumentTypeError, match="workspace must be an AllReduceFusionWorkspace"):
        allreduce_fusion(x, object(), 0)  # pyright: ignore


def in_a_call(workspace: Any, monkeypatch: pytest.MonkeyPatch) -> contextlib.AbstractContextManager[Halt]:
    """Keep another thread in a call for the block, or until it is let on."""
    run = type(workspace)._run

    def call(halt: Halt) -> None:
        def slow(self: Any, call: FusionCall) -> None:
            halt.here()
            run(self, call)

        monkeypatch.setattr(type(workspace), "_run", slow)
        allreduce_fusion(torch.ones(T, H, dtype=BF16), workspace, 0)

    return halted(call)


def test_two_threads_in_one_workspace_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """F2: one collective at a time."""
    x = torch.ones(T, H, dtype=BF16)
    workspace = create()
    with in_a_call(workspace, monkeypatch), pytest.raises(UnsupportedError, match="another thread"):
        allreduce_fusion(x, workspace, 0)
    assert torch.equal(allreduce_fusion(x, workspace, 0), x)


def test_destroying_waits_for_a_call_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the call launches must not find its memory unmapped; two threads that destroy do it once."""
    workspace = create()
    destroyed: list[float | None] = []
    monkeypatch.setattr(type(workspace), "_destroy", lambda self, timeout_s: destroyed.append(timeout_s))
    with in_a_call(workspace, monkeypatch) as halt:
        with pytest.raises(UnsupportedError, match=r"destroy: a call of this workspace .* for 0\.05 s"):
            workspace.destroy(timeout=0.05)
        assert destroyed == []
        other = threading.Thread(target=workspace.destroy)
        other.start()
        threading.Timer(0.1, halt.let_on).start()
        workspace.destroy()
        other.join(20)
    assert destroyed == [None]
    with pytest.raises(ClosedError):
        allreduce_fusion(torch.ones(T, H, dtype=BF16), workspace, 0)


def test_a_thousand_calls_use_the_memory_of_the_first() -> None:
    """F7: nothing is built again for a call."""
    x = torch.ones(T, H, dtype=BF16)
    with create() as workspace:
        buffer = workspace._gathered.data_ptr()  # pyright: ignore
        for _ in range(1000):
            allreduce_fusion(x, workspace, 0, output=x)
        assert workspace._gathered.data_ptr() == buffer  # pyright: ignore


def test_what_dist_needs_of_a_group() -> None:
    backend = DistAllReduce()
    for backends, device, able in (
        ({"cpu": "gloo", "cuda": "gloo"}, "cuda", True),
        ({"cpu": "gloo", "cuda": "nccl"}, "cuda", True),
        ({"cuda": "nccl"}, "cpu", False),
        ({}, "cpu", False),
        ({"cpu": "mpi"}, "cpu", False),
    ):
        verdict = backend.assess(Request("dist", 2, device, group_backends=backends), ())
        assert verdict.eligible == able, backends
    assert backend.assess(Request("dist", 1, "cpu"), ()).eligible


def test_preparation_communicates_nothing_and_is_pure() -> None:
    given: dict[str, Any] = dict.fromkeys((*OUTPUTS, *ARGUMENTS, "use_oneshot"))
    given |= {"rms_eps": 1e-6, "weight_bias": 0.0, "fp32_acc": False, "moe_finalize_backend": "trtllm"}
    given |= {"launch_with_pdl": False, "trigger_completion_at_end": True, "pattern": 0}
    x = torch.ones(T, H, dtype=BF16)
    call = prepare(x.device, {**given, "input": x})
    assert call.input is x and call.output is not None and (call.tokens, call.hidden) == (T, H)
    assert call.geometry == prepare(x.device, {**given, "input": x.clone()}).geometry
