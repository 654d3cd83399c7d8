"""The fused all-reduce over gloo processes: sums, equal replicas, the decision, and ranks that are wrong or gone."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from comm_core import (
    AllReduceBackendError,
    AllReduceFusionPattern,
    CommError,
    JointValueError,
    QuantizationSFLayout,
    TorchDistBackend,
    TransportError,
    allreduce_fusion,
    create_allreduce_fusion_workspace,
)
from comm_core.allreduce import reference
from comm_core.allreduce.patterns import PATTERNS, Quantization
from comm_core.allreduce.scales import packed_scale_shape, packed_scale_storage, packed_scale_stride, scale_size
from comm_core.errors import ArgumentValueError, GroupTimeoutError
from comm_core.testing.ranks import RankPool

BF16, F32 = torch.bfloat16, torch.float32
SIZES = (2, 4, 8)
EXPERTS, TOP_K = 2, 3


@dataclass(frozen=True)
class Case:
    """One call; every rank draws its operands from `seed` and its own number."""

    pattern: AllReduceFusionPattern
    tokens: int
    hidden: int
    dtype: torch.dtype
    seed: int
    integers: bool
    layout: QuantizationSFLayout
    group_size: int
    weight_bias: float
    in_place: bool


@st.composite
def cases(draw: st.DrawFn) -> Case:
    pattern = draw(st.sampled_from(AllReduceFusionPattern))
    fp4 = PATTERNS[pattern].quantization is Quantization.NVFP4
    return Case(
        pattern=pattern,
        tokens=draw(st.integers(1, 9)),
        hidden=16 * draw(st.integers(1, 6)),
        dtype=draw(st.sampled_from(reference.DTYPES[:2] if fp4 else reference.DTYPES)),
        seed=draw(st.integers(0, 1 << 30)),
        integers=draw(st.booleans()),
        layout=draw(st.sampled_from(QuantizationSFLayout)),
        group_size=draw(st.sampled_from((4, 8, 16))),
        weight_bias=draw(st.sampled_from((0.0, 1.0))),
        in_place=draw(st.booleans()),
    )


def values(case: Case, generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Return values of the case's dtype; integers of up to 15, whose sums over 8 ranks are exact in bfloat16."""
    if case.integers:
        return torch.randint(-15, 16, shape, generator=generator).to(case.dtype)
    return torch.randn(shape, generator=generator).to(case.dtype)


def operands(case: Case, rank: int) -> dict[str, Any]:
    """Return rank `rank`'s inputs; what is not its contribution is equal on all ranks."""
    spec = PATTERNS[case.pattern]
    own = torch.Generator().manual_seed(case.seed * 16 + rank)
    common = torch.Generator().manual_seed(case.seed)
    rows = (case.tokens, case.hidden)
    made: dict[str, Any] = {"input": values(case, own, *rows)}
    if spec.has_norm:
        made["residual_in"] = values(case, common, *rows)
        made["rms_gamma"] = values(case, common, case.hidden)
    if "moe_reduction_token_input" in spec.needs:
        made["input"] = None
        made["moe_reduction_device_num_experts"] = EXPERTS
        made["moe_reduction_scale_input"] = torch.rand((EXPERTS, case.tokens), generator=own)
        made["moe_reduction_active_experts_token_input"] = values(case, own, EXPERTS * case.tokens, case.hidden)
        made["moe_reduction_token_input"] = values(case, own, *rows)
    if "expanded_idx_to_permuted_idx" in spec.needs:
        made["input"] = values(case, own, 5, case.hidden)
        index = torch.randint(-1, 5, (case.tokens, TOP_K), generator=own)
        made["expanded_idx_to_permuted_idx"] = index.to(torch.int32)
        made["expert_scale_factor"] = torch.rand((case.tokens, TOP_K), generator=own).to(case.dtype)
        made["shared_expert_output"] = values(case, own, *rows)
    if spec.quantization in (Quantization.FP8, Quantization.NVFP4):
        made["scale_factor"] = torch.tensor([0.25])
    if spec.quantization is Quantization.NVFP4:
        made["layout_code"] = int(case.layout)
    if spec.quantization is Quantization.GROUP_FP8:
        made["block_quant_group_size"] = case.group_size
    return made


def outputs(case: Case) -> dict[str, torch.Tensor]:
    """Return every output of the case, filled with a pattern of bits that no result has by chance."""
    spec = PATTERNS[case.pattern]
    rows = (case.tokens, case.hidden)
    made: dict[str, torch.Tensor] = {}
    for name in (*spec.returns, *spec.may_return):
        if name == "quant_out":
            packed = spec.quantization is Quantization.NVFP4
            shape = (case.tokens, case.hidden // 2) if packed else rows
            made[name] = torch.full(shape, 0x7E, dtype=torch.uint8)
            if not packed:
                made[name] = made[name].view(torch.float8_e4m3fn)
        elif name == "scale_out" and spec.quantization is Quantization.GROUP_FP8:
            groups = case.hidden // case.group_size
            words = torch.full((packed_scale_storage(case.tokens, groups),), 0x55555555, dtype=torch.int32)
            made[name] = words.as_strided(packed_scale_shape(case.tokens, groups), packed_scale_stride(case.tokens))
        elif name == "scale_out" and spec.quantization is Quantization.DYNAMIC_FP8:
            made[name] = torch.full((case.tokens, 1), float("nan"))
        elif name == "scale_out":
            made[name] = torch.full(
                (scale_size(case.tokens, case.hidden // 16, case.layout),), 0x55, dtype=torch.uint8
            )
        else:
            made[name] = torch.full(rows, float("nan"), dtype=case.dtype)
    return made


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def compute(group: Any, chosen: list[Case]) -> list[dict[str, torch.Tensor]]:
    """Run the cases one after the other on one workspace and return the bytes of their outputs."""
    results: list[dict[str, torch.Tensor]] = []
    with create_allreduce_fusion_workspace(
        "dist", max_token_num=9, hidden_dim=96, dtype=F32, group=group, device="cpu"
    ) as workspace:
        for case in chosen:
            given, made = operands(case, group.rank()), outputs(case)
            if case.in_place and "norm_out" in made:
                made["residual_out"] = given["residual_in"]
            returned = allreduce_fusion(
                workspace=workspace, pattern=case.pattern, weight_bias=case.weight_bias, **given, **made
            )
            assert returned is made[PATTERNS[case.pattern].primary]
            results.append({name: as_bytes(x) for name, x in made.items()})
    return results


def contribution(case: Case, rank: int) -> torch.Tensor:
    given = operands(case, rank)
    if "moe_reduction_token_input" in given:
        return reference.moe_reduce(
            given["moe_reduction_active_experts_token_input"],
            given["moe_reduction_scale_input"],
            given["moe_reduction_token_input"],
            EXPERTS,
        )
    if "expanded_idx_to_permuted_idx" in given:
        return reference.moe_finalize(
            given["input"],
            given["expanded_idx_to_permuted_idx"],
            given["expert_scale_factor"],
            given["shared_expert_output"],
        )
    return given["input"]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(SIZES), st.lists(cases(), min_size=6, max_size=12))
def test_all_ranks_have_the_bits_of_the_reference(ranks: RankPool, size: int, chosen: list[Case]) -> None:
    """F15: whatever the pattern, shape, dtype and layout, and however the calls follow each other."""
    everywhere = ranks.run(compute, chosen, ranks=size)
    for number, case in enumerate(chosen):
        spec = PATTERNS[case.pattern]
        contributions = [contribution(case, rank) for rank in range(size)]
        given = operands(case, 0)
        expected = reference.fuse(
            case.pattern,
            reference.reduce_in_rank_order(contributions),
            case.dtype,
            residual_in=given.get("residual_in"),
            rms_gamma=given.get("rms_gamma"),
            weight_bias=case.weight_bias,
            scale_factor=0.25,
            layout_code=case.layout,
            block_quant_group_size=case.group_size,
            wanted=(*spec.returns, *spec.may_return),
        )
        for name in (*spec.returns, *spec.may_return):
            want = as_bytes(getattr(expected, name))
            for rank, results in enumerate(everywhere):
                assert torch.equal(results[number][name], want), f"{case}: {name} on rank {rank}"
        if case.integers and not spec.is_moe:
            # Not by the reference: in whole numbers, without any tolerance.
            total = sum(x.to(torch.int64) for x in contributions)
            name = "output"
            if spec.has_norm:
                total, name = total + given["residual_in"].to(torch.int64), "residual_out"
            got = everywhere[0][number][name].view(case.dtype).view(case.tokens, case.hidden)
            assert torch.equal(got.to(torch.int64), total)


def special(group: Any) -> list[list[float]]:
    """Sum rows of -0.0, NaN, infinities and a sum that overflows float16 on the way."""
    rank, size = group.rank(), group.size()
    nan, infinity = float("nan"), float("inf")
    first = [-0.0, 0.0, nan, infinity, infinity, 60000.0, 1.0]
    second = [-0.0, -0.0, 1.0, 1.0, -infinity, 60000.0, 0.0]
    x = torch.tensor([first if rank == 0 else second if rank == 1 else [0.0] * 6 + [-1.0]], dtype=torch.float16)
    if rank == size - 1 and size > 2:
        x[0, 5] = -60000.0
    with create_allreduce_fusion_workspace(
        "dist", max_token_num=1, hidden_dim=8, dtype=torch.float16, group=group, device="cpu"
    ) as workspace:
        return allreduce_fusion(x, workspace, AllReduceFusionPattern.kAllReduce).tolist()


def test_special_values_go_through_as_in_float32(ranks: RankPool) -> None:
    """A sum is never -0.0, NaN and infinities stay, and only what is too large at the end overflows."""
    for size, last, ones in ((2, float("inf"), 1.0), (4, 60000.0, -1.0)):
        results = ranks.run(special, ranks=size)
        for row in results:
            (got,) = row
            assert str(got[0]) == "0.0" and str(got[1]) == "0.0"
            assert got[2] != got[2] and got[3] == float("inf") and got[4] != got[4]
            assert (got[5], got[6]) == (last, ones)


def order(group: Any) -> float:
    """Sum what depends on the order: (2**24 + 1) - 2**24 is 0 in float32, 2**24 - 2**24 + 1 is 1."""
    x = torch.tensor([[2.0**24, 1.0, -(2.0**24), 0.0][group.rank()]]).view(1, 1)
    with create_allreduce_fusion_workspace(
        "dist", max_token_num=1, hidden_dim=1, dtype=F32, group=group, device="cpu"
    ) as workspace:
        return float(allreduce_fusion(x, workspace, 0))


def test_the_sum_is_in_the_order_of_the_groups_ranks(ranks: RankPool) -> None:
    """C9: of the group, also where it is not the first ranks of the job."""
    assert ranks.run(order, ranks=4) == [0.0] * 4
    assert ranks.run(order, ranks=[1, 3, 4, 6]) == [0.0] * 4


# The decision


def choose(group: Any, case: str) -> tuple[str, str]:
    arguments: dict[str, Any] = {"max_token_num": 4, "hidden_dim": 8, "dtype": BF16, "group": group, "device": "cpu"}
    one = group.rank() == 1
    if case == "bad":
        arguments["max_token_num"] = -1 if one else 4
    elif case == "different":
        arguments["backend"] = "dist" if one else "auto"
    elif case == "option":
        arguments["top_k"] = 8 if one else None
    elif case in ("trtllm", "mnnvl"):
        arguments["backend"] = case
    elif case == "ranks":
        arguments |= {"world_size": group.size(), "rank": group.rank(), "comm_backend": TorchDistBackend(group)}
    elif case == "control":
        arguments |= {"group": None, "comm_backend": TorchDistBackend(group)}
    try:
        with create_allreduce_fusion_workspace(**arguments) as workspace:
            return workspace.backend, workspace.decision.reason if workspace.decision else ""
    except CommError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("case", "name", "text"),
    [
        ("good", "dist", "the process group has gloo for cpu tensors"),
        ("ranks", "dist", "the process group has gloo for cpu tensors"),
        ("control", "dist", "the process group has gloo for cpu tensors"),
        ("bad", "JointValueError", "rank 1: max_token_num must be at least 1, got -1"),
        ("different", "JointValueError", "the ranks disagree on backend: rank 0: backend 'auto'; rank 1: "),
        ("option", "JointValueError", "rank 1: top_k: backend 'auto' takes no options"),
        ("trtllm", "AllReduceBackendError", "not available on any rank"),
        ("mnnvl", "AllReduceBackendError", "not available on any rank"),
    ],
)
def test_all_ranks_decide_alike(ranks: RankPool, case: str, name: str, text: str) -> None:
    """C8, M5: or raise alike, with what was wrong on which rank."""
    outcomes = ranks.run(choose, case, ranks=3)
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0][0] == name and text in outcomes[0][1]
    assert issubclass(AllReduceBackendError, RuntimeError) and issubclass(JointValueError, ValueError)


# Ranks that are wrong, late or gone


def checked(group: Any, case: str) -> tuple[str, str, bool]:
    """Make one call that is wrong on rank 1, and then a good one."""
    x = torch.ones(2, 16)
    with create_allreduce_fusion_workspace(
        max_token_num=4, hidden_dim=16, dtype=F32, group=group, device="cpu"
    ) as workspace:
        given: dict[str, Any] = {"input": x, "pattern": 0}
        if group.rank() == 1:
            given |= {
                "missing": {"pattern": 1},
                "capacity": {"input": torch.ones(5, 16)},
                "dtype": {"input": x.to(BF16)},
                "tokens": {"input": x[:1]},
                "pattern": {"pattern": 1, "residual_in": x, "rms_gamma": x[0]},
                "oneshot": {"use_oneshot": True},
            }[case]
        name, text = "accepted", ""
        try:
            allreduce_fusion(workspace=workspace, **given)
        except CommError as error:
            name, text = type(error).__name__, str(error)
        return name, text, bool((allreduce_fusion(x, workspace, 0) == group.size()).all())


@pytest.mark.parametrize("case", ["missing", "capacity", "dtype", "tokens", "pattern", "oneshot"])
def test_the_checked_mode_refuses_on_every_rank(ranks: RankPool, case: str) -> None:
    """C8, V3, V4: what one rank alone would refuse, or all would sum to nothing; the workspace stays good."""
    outcomes = ranks.run(checked, case, ranks=3, env={"COMM_CHECK": "1"})
    assert [good for _, _, good in outcomes] == [True] * 3
    if case in ("missing", "capacity"):
        assert [name for name, _, _ in outcomes] == ["JointValueError", "ArgumentValueError", "JointValueError"]
        assert "rank 1" in outcomes[0][1]
    else:
        assert {name for name, _, _ in outcomes} == {"JointValueError"}
        assert "make different calls" in outcomes[0][1] and outcomes[0] == outcomes[2]


def alone(group: Any) -> tuple[str, tuple[int, ...]]:
    if group.rank() == 1:
        return "", ()
    try:
        create_allreduce_fusion_workspace(max_token_num=4, hidden_dim=16, dtype=F32, group=group, device="cpu")
    except GroupTimeoutError as error:
        return type(error).__name__, error.missing
    return "accepted", ()


def test_a_rank_that_does_not_create_is_named(ranks: RankPool) -> None:
    """F10: a creation that one rank skips is no hang."""
    outcomes = ranks.run(alone, ranks=3, env={"COMM_TIMEOUT_S": "1"}, fresh=True)
    assert outcomes == [("GroupTimeoutError", (1,)), ("", ()), ("GroupTimeoutError", (1,))]


def stalls(group: Any, how: str) -> Any:
    workspace = create_allreduce_fusion_workspace(
        max_token_num=4, hidden_dim=16, dtype=F32, group=group, device="cpu"
    )
    x = torch.ones(2, 16)
    allreduce_fusion(x, workspace, 0)
    if group.rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        return "skipped"
    started = time.monotonic()
    broken = False
    try:
        allreduce_fusion(x, workspace, 0)
    except TransportError as error:
        seconds = time.monotonic() - started
        try:
            allreduce_fusion(x, workspace, 0)
        except TransportError as again:
            broken = "broken since an earlier failure" in str(again)
        workspace.destroy()
        return str(error), seconds, broken
    return "accepted"


@pytest.mark.parametrize("how", ["skips", "dies"])
def test_a_rank_that_is_gone_or_silent_ends_in_an_error_that_names_it(ranks: RankPool, how: str) -> None:
    """F17, V6: at the agreed deadline, and the workspace is broken."""
    outcomes = ranks.run_outcomes(stalls, how, ranks=2, env={"COMM_TIMEOUT_S": "1.5"}, timeout_s=40, fresh=True)
    text, seconds, broken = outcomes[0].value
    assert "allreduce_fusion" in text and "no word from rank 1" in text and broken and seconds < 10


def crosses(group: Any, rounds: int) -> int:
    """Calls of changing size and pattern back to back, with ranks out of step; return how many were exact."""
    generator = torch.Generator().manual_seed(7)
    exact = 0
    with create_allreduce_fusion_workspace(
        max_token_num=64, hidden_dim=32, dtype=BF16, group=group, device="cpu"
    ) as workspace:
        for number in range(rounds):
            tokens, oneshot = (int(torch.randint(1, 65, (1,), generator=generator)) for _ in range(2))
            x = torch.full((tokens, 32), float(group.rank() + number % 8)).to(BF16)
            if number % group.size() == group.rank():
                time.sleep(0.0005)
            total = allreduce_fusion(x, workspace, 0, use_oneshot=oneshot % 2 == 0)
            want = sum(rank + number % 8 for rank in range(group.size()))
            exact += int(bool((total == want).all()))
    return exact


def test_calls_of_changing_sizes_follow_each_other(ranks: RankPool) -> None:
    """F9, G3: thresholds crossed at random, ranks out of step."""
    assert ranks.run(crosses, 200, ranks=4) == [200] * 4


def test_the_error_of_a_bad_call_is_this_ranks_alone_without_the_checked_mode(ranks: RankPool) -> None:
    """Nothing was sent, so the ranks can go on together with the next call."""
    assert ranks.run(refused_everywhere, ranks=2) == [True, True]


def refused_everywhere(group: Any) -> bool:
    x = torch.ones(2, 16)
    with create_allreduce_fusion_workspace(
        max_token_num=4, hidden_dim=16, dtype=F32, group=group, device="cpu"
    ) as workspace:
        with pytest.raises(ArgumentValueError, match="needs residual_in, rms_gamma"):
            allreduce_fusion(x, workspace, 1)
        return bool((allreduce_fusion(x, workspace, 0) == 2).all())
