"""The all-reduce kernels, run on a host as they are: every pattern against the reference, replicas bit for bit."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest
import torch

from comm_core import allreduce_fusion
from comm_core.allreduce.launch import Settings
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, QuantizationSFLayout
from comm_core.errors import ArgumentValueError, PeerStalledError, UnsupportedError
from comm_core.group import Group
from comm_core.jit.loader import Module
from comm_core.testing import allreduce_cases
from comm_core.testing import allreduce_host as host
from comm_core.testing.allreduce_cases import Case, assert_right, make_operands, make_outputs, raw
from comm_core.testing.ranks import run_threads
from comm_core.windows.signals import MAX_RANKS
from comm_nvlink.allreduce_workspace import TRTLLMAllReduceFusionWorkspace as Workspace

pytestmark = pytest.mark.usefixtures("one_stream")

CODE = AllReduceFusionPattern
PLAIN = [pattern for pattern, spec in PATTERNS.items() if not spec.is_moe]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
FP4 = (CODE.kARResidualRMSNormFP4Quant, CODE.kARResidualRMSNormOutFP4Quant)


def call(workspace: Any, case: Case, seed: int) -> dict[str, torch.Tensor]:
    """Make a call and compare what it wrote; return it."""
    operands = make_operands(case, workspace.world_size, seed)
    made = make_outputs(case, host.CPU)
    given = allreduce_cases.arguments(case, operands, host.CPU)
    allreduce_fusion(operands.parts[workspace.rank], workspace, case.pattern, **given, **made)
    assert_right(case, operands, made)
    return made


def calls(group: Group, module: Module, cases: list[Case], settings: Settings = host.ONE_BLOCK) -> list[Any]:
    nbytes = max(case.tokens * case.hidden * case.dtype.itemsize for case in cases)
    with host.opened(Workspace, group, module, nbytes) as workspace:
        # The self-test is over: several blocks run one after the other here, which two shots do not bear.
        workspace._session.settings = settings
        return [{name: raw(x) for name, x in call(workspace, case, seed).items()} for seed, case in enumerate(cases)]


def same_on_all(results: list[list[dict[str, torch.Tensor]]]) -> None:
    """Replicas are equal to the bit, encodings and scales too."""
    for other in results[1:]:
        for mine, theirs in zip(results[0], other, strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def run(ranks: int, module: Module, cases: list[Case], settings: Settings = host.ONE_BLOCK) -> None:
    same_on_all(run_threads(ranks, calls, module, cases, settings, timeout_s=60))


@pytest.mark.parametrize("use_oneshot", [True, False], ids=["one shot", "two shots"])
@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_pattern_equals_the_reference(
    module: Module, ranks: int, dtype: torch.dtype, use_oneshot: bool
) -> None:
    """Rows of a length that fills neither warps nor vectors of a thread evenly."""
    patterns = [pattern for pattern in PLAIN if dtype != F32 or pattern not in FP4]
    cases = [
        Case(pattern, 3, 208, dtype, group_size=16, values=values, use_oneshot=use_oneshot)
        for pattern, values in itertools.product(patterns, ("normal", "special"))
    ]
    run(ranks, module, cases)


@pytest.mark.parametrize("layout", list(QuantizationSFLayout), ids=lambda layout: layout.name)
def test_scales_of_nvfp4_lie_where_the_layout_says_and_padding_is_zero(
    module: Module, layout: QuantizationSFLayout
) -> None:
    cases = [
        Case(FP4[1], tokens, hidden, dtype, layout=layout, scale_on_device=on_device)
        for (tokens, hidden), dtype, on_device in zip(
            [(1, 16), (7, 48), (9, 208), (130, 80)], [F16, BF16] * 2, [True, False] * 2, strict=True
        )
    ]
    run(2, module, cases)


def test_groups_of_any_size(module: Module) -> None:
    """Within a vector's neighbours, within a warp, beyond it, and of no power of two; the last word not full."""
    pattern = CODE.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant
    sizes = [(8, 72), (16, 80), (64, 192), (24, 120), (256, 768), (512, 512), (40, 320)]
    cases = [Case(pattern, 5, hidden, BF16, group_size=size) for size, hidden in sizes]
    cases += [Case(pattern, 6, 96, F32, group_size=size) for size in (4, 12, 32, 96)]
    run(2, module, cases)


def test_norms_with_a_bias_and_any_eps(module: Module) -> None:
    cases = [
        Case(CODE.kARResidualRMSNorm, 2, 64, dtype, weight_bias=bias, eps=eps)
        for dtype, bias, eps in itertools.product([F16, F32], [1.0, -0.25], [0.0, 0.5])
    ]
    run(2, module, cases)


@pytest.mark.parametrize("hidden", [3072, 4352, 8192, 12000, 24576])
def test_rows_of_several_vectors_a_thread(module: Module, hidden: int) -> None:
    cases = [
        Case(CODE.kARResidualRMSNormOutDynamicFP8Quant, 2, hidden),
        Case(CODE.kARResidualRMSNorm, 2, hidden, use_oneshot=True),
        Case(CODE.kARResidualRMSNorm, 3, hidden // 2, F32, use_oneshot=False),
    ]
    run(2, module, cases)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_of_any_number_of_elements(module: Module, ranks: int) -> None:
    """Vectors that are not whole, fewer vectors than ranks, more than a block; integers, so exact."""
    shapes = [(1, 1), (1, 7), (1, 8), (1, 9), (3, 5), (2, 12), (1, 129), (5, 411), (2, 4099)]
    cases = [
        Case(CODE.kAllReduce, tokens, hidden, dtype, values="integers", use_oneshot=one)
        for (tokens, hidden), dtype, one in itertools.product(shapes, [BF16, F32], [True, False])
    ]
    run(ranks, module, cases)


def test_blocks_and_threads_do_not_change_a_bit(module: Module) -> None:
    """The launch of a call may follow from its size: one block, or several."""
    cases = [
        Case(pattern, 9, 512, BF16, use_oneshot=True)
        for pattern in (CODE.kAllReduce, CODE.kARResidualRMSNorm, CODE.kARResidualRMSNormOutFP8Quant)
    ]
    results = [run_threads(2, calls, module, cases, Settings(blocks), timeout_s=60) for blocks in (1, 2, 10, 128)]
    same_on_all([each for result in results for each in result])


def test_algorithms_give_the_same_bits(module: Module) -> None:
    both = [
        [Case(pattern, 4, 256, BF16, group_size=64, use_oneshot=one) for pattern in PLAIN] for one in (True, False)
    ]
    results = [run_threads(4, calls, module, cases, timeout_s=60) for cases in both]
    same_on_all([each for result in results for each in result])


def in_place(group: Group, module: Module) -> None:
    case = Case(CODE.kARResidualRMSNorm, 4, 128)
    with host.opened(Workspace, group, module, 4 * 128 * 2) as workspace:
        for seed, one in enumerate((True, False, None)):
            operands = make_operands(case, group.size, seed)
            x, residual = operands.parts[group.rank].clone(), operands.residual.clone()
            norm = allreduce_fusion(
                x,
                workspace,
                1,
                residual_in=residual,
                rms_gamma=operands.gamma,
                norm_out=x,
                residual_out=residual,
                use_oneshot=one,
            )
            assert norm is x
            assert_right(case, operands, {"norm_out": x, "residual_out": residual})
            x = operands.parts[group.rank].clone()
            allreduce_fusion(x, workspace, 0, output=x, use_oneshot=one)
            assert_right(Case(CODE.kAllReduce, 4, 128), operands, {"output": x})


@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_may_be_the_inputs(module: Module, ranks: int) -> None:
    run_threads(ranks, in_place, module, timeout_s=60)


def rounds(group: Group, module: Module, count: int) -> None:
    """Sizes, algorithms, types and patterns at random, equal on all ranks; no rank waits for another in between."""
    generator = torch.Generator().manual_seed(5)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    with host.opened(
        Workspace, group, module, 6 * 256 * 4, force_oneshot=False, settings=Settings(1, trade_bytes=512)
    ) as made:
        for seed in range(count):
            case = Case(
                pick(*PLAIN[:3], *PLAIN[-2:]),
                pick(1, 1, 2, 6),
                pick(64, 128, 256),
                pick(F16, BF16, F32) if seed % 2 else BF16,
                use_oneshot=pick(None, None, None, False),
            )
            call(made, case, seed)


def repeated(group: Group, module: Module) -> None:
    """Make calls with the same storage and other values, those of two sets of storage in turn."""
    cases = [
        Case(CODE.kARResidualRMSNorm, 3, 208),
        Case(CODE.kARResidualRMSNormOutFP8Quant, 2, 64, scale_on_device=True),
        Case(CODE.kAllReduce, 5, 411),
    ]
    with host.opened(Workspace, group, module, 1 << 14) as workspace:
        storage = []
        for case in cases * 2:
            operands = make_operands(case, group.size, 0)
            given = allreduce_cases.arguments(case, operands, host.CPU)
            storage.append((case, operands.parts[group.rank].clone(), given, make_outputs(case, host.CPU)))
        for seed in range(1, 5):
            for case, source, given, made in storage:
                operands = make_operands(case, group.size, seed)
                source.copy_(operands.parts[group.rank])
                for name, value in allreduce_cases.arguments(case, operands, host.CPU).items():
                    if isinstance(value, torch.Tensor):
                        given[name].copy_(value)
                allreduce_fusion(source, workspace, case.pattern, **given, **made)
                assert_right(case, operands, made)
        assert len(workspace._known) == len(storage)


def test_calls_with_known_storage_compute_what_is_in_it(module: Module) -> None:
    run_threads(2, repeated, module, timeout_s=60)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls_of_any_size_follow_each_other(module: Module, ranks: int) -> None:
    run_threads(ranks, rounds, module, 60, timeout_s=100)


# What is refused


def refusals(group: Group, module: Module) -> None:
    with host.opened(Workspace, group, module, 8 * 64 * 2, force_oneshot=False) as workspace:
        x, gamma = torch.ones(4, 64, dtype=BF16), torch.ones(64, dtype=BF16)
        norm = {"residual_in": x.clone(), "rms_gamma": gamma}
        for pattern in (6, 7, 12):
            spec = PATTERNS[CODE(pattern)]
            given: dict[str, Any] = {**norm, "scale_factor": 1.0}
            if pattern == 6:
                given |= {
                    "moe_reduction_device_num_experts": 1,
                    "moe_reduction_scale_input": torch.ones(1, 4),
                    "moe_reduction_active_experts_token_input": x.clone(),
                    "moe_reduction_token_input": x.clone(),
                }
            else:
                given["expanded_idx_to_permuted_idx"] = torch.zeros(4, 1, dtype=torch.int32)
            with pytest.raises(UnsupportedError, match=rf"{spec.pattern.name} .* backend='dist' has every pattern"):
                allreduce_fusion(x, workspace, pattern, **given)
        # Half a buffer holds 8 tokens in two shots, which is 12 in one.
        for tokens, one in ((12, True), (12, None), (8, False)):
            assert workspace.is_buffer_size_sufficient(2, tokens, 64, BF16, one)
            large = torch.ones(tokens, 64, dtype=BF16)
            assert torch.equal(allreduce_fusion(large, workspace, 0, use_oneshot=one), 2 * large)
            more = torch.ones(tokens + 1, 64, dtype=BF16)
            assert not workspace.is_buffer_size_sufficient(2, tokens + 1, 64, BF16, one)
            with pytest.raises(
                ArgumentValueError, match=rf"input: {tokens + 1} tokens of 64 bfloat16 need .* has 1536"
            ):
                allreduce_fusion(more, workspace, 0, use_oneshot=one)
        shifted = torch.ones(257, dtype=BF16)[1:].view(4, 64)
        with pytest.raises(ArgumentValueError, match="input must begin at a multiple of 16 bytes"):
            allreduce_fusion(shifted, workspace, 0)
        with pytest.raises(ArgumentValueError, match="output must begin at a multiple of 16 bytes"):
            allreduce_fusion(x, workspace, 0, output=shifted)
        odd, short = torch.ones(4, 60, dtype=BF16), torch.ones(60, dtype=BF16)
        with pytest.raises(ArgumentValueError, match="hidden_dim that is a multiple of 8 for bfloat16"):
            allreduce_fusion(odd, workspace, 1, residual_in=odd.clone(), rms_gamma=short)
        words = torch.zeros(16 * 4, dtype=torch.int32).as_strided((4, 4), (1, 4))
        with pytest.raises(ArgumentValueError, match=r"block_quant_group_size .* must be a multiple of 8"):
            allreduce_fusion(x, workspace, 8, **norm, block_quant_group_size=4, scale_out=words)
        # It is as good as before.
        assert torch.equal(allreduce_fusion(x, workspace, 0), x * group.size)


def test_what_it_can_not_compute_is_refused_before_a_launch(module: Module) -> None:
    run_threads(2, refusals, module)


def long_row(group: Group, module: Module) -> None:
    hidden = 24576
    with host.opened(Workspace, group, module, (hidden + 8) * 2) as workspace:
        x = torch.ones(1, hidden + 8, dtype=BF16)
        with pytest.raises(
            ArgumentValueError, match=r"hidden_dim=24584 bfloat16 does not fit a block .* 24576 elements"
        ):
            allreduce_fusion(x, workspace, 1, residual_in=x.clone(), rms_gamma=x[0].clone())


def test_rows_that_no_block_has_room_for_are_refused(module: Module) -> None:
    run_threads(2, long_row, module)


# Stalls


def before_a_stall(workspace: Any, case: Case) -> tuple[torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
    """Make one call that is right, and what a second one takes: whoever came late to that would be named too."""
    call(workspace, case, 0)
    host.set_deadline(workspace, 1)
    operands, made = make_operands(case, workspace.world_size, 1), make_outputs(case, host.CPU)
    return operands.parts[workspace.rank], allreduce_cases.arguments(case, operands, host.CPU), made


def silent(group: Group, module: Module, pattern: int, use_oneshot: bool, poison: bool) -> tuple[int, list[Any]]:
    """Rank 1 makes one call less; the others name it, and what they have is NaN."""
    case = Case(CODE(pattern), 4, 128, use_oneshot=use_oneshot)
    with host.opened(Workspace, group, module, 4 * 128 * 4, poison=poison) as workspace:
        operand, given, made = before_a_stall(workspace, case)
        group.barrier("test")
        if group.rank == 1:
            group.barrier("test")
            return 1, []
        allreduce_fusion(operand, workspace, pattern, **given, **made)
        with pytest.raises(PeerStalledError, match=f"rank {group.rank}: |waiting for rank 1") as caught:
            allreduce_fusion(operand, workspace, pattern, **given, **made)
        assert "the workspace is broken on every rank" in str(caught.value)
        group.barrier("test")
        return caught.value.waited_for, list(made.values())


@pytest.mark.parametrize("use_oneshot", [True, False], ids=["one shot", "two shots"])
@pytest.mark.parametrize(("pattern", "ranks"), [(0, 2), (0, 4), (1, 3), (11, 2)])
def test_a_rank_that_does_not_come_is_named_and_nothing_looks_right(
    module: Module, pattern: int, ranks: int, use_oneshot: bool
) -> None:
    results = run_threads(ranks, silent, module, pattern, use_oneshot, True, timeout_s=30)
    assert [waited_for for waited_for, _ in results] == [1] * ranks
    for rank, (_, outputs) in enumerate(results):
        if rank == 1:
            continue
        for output in outputs:
            wide = output.to(torch.float32)
            # A scale a token says nothing without its values.
            assert bool(wide.isnan().all()) or output.shape == (4, 1), output


def test_without_poison_outputs_are_left_to_chance(module: Module) -> None:
    for _, outputs in run_threads(2, silent, module, 1, True, False, timeout_s=30)[:1]:
        assert not any(bool(output.to(torch.float32).isnan().any()) for output in outputs)


_READY = (4 + 3 * MAX_RANKS) * 128
"""Where the announcements of a signal block begin. Twin: include/comm_core/signal.cuh, SignalBlock."""


def starts_and_stops(group: Group, module: Module) -> int:
    """Rank 1 announces that it has started a call and stores nothing; return who is named.

    Half a warp at most has a vector of this rank's part: the other half has only a sum to wait for, and longer.
    """
    case = Case(CODE.kAllReduce, 4, 128, use_oneshot=False)
    with host.opened(Workspace, group, module, 4 * 128 * 4) as workspace:
        blocks = workspace._session._signals.addresses
        operand, given, made = before_a_stall(workspace, case)
        group.barrier("test")
        if group.rank == 1:
            epoch = ctypes.c_uint32.from_address(blocks[1] + 2 * 128).value + 1
            for rank in {*range(group.size)} - {1}:
                ctypes.c_uint32.from_address(blocks[rank] + _READY + 128).value = epoch
            group.barrier("test")
            return 1
        allreduce_fusion(operand, workspace, case.pattern, **given, **made)
        group.barrier("test")
        with pytest.raises(PeerStalledError) as caught:
            workspace.check()
        return caught.value.waited_for


@pytest.mark.parametrize("ranks", [3, 4, 5])
def test_a_rank_that_stops_after_its_announcement_is_named(module: Module, ranks: int) -> None:
    """Who lacks its operand says so before those do who lack a sum for the same reason."""
    assert run_threads(ranks, starts_and_stops, module, timeout_s=60) == [1] * ranks


def late(group: Group, module: Module) -> None:
    """A rank that comes after the deadline is told, and writes no result either."""
    case = Case(CODE.kAllReduce, 2, 64)
    with host.opened(Workspace, group, module, 2 * 64 * 4) as workspace:
        host.set_deadline(workspace, 1)
        group.barrier("test")
        operands = make_operands(case, group.size, 0)
        if group.rank == 1:
            group.barrier("test")
        out = torch.zeros(2, 64, dtype=BF16)
        allreduce_fusion(operands.parts[group.rank], workspace, 0, output=out)
        if group.rank != 1:
            group.barrier("test")
        assert bool(out.isnan().all())
        with pytest.raises(PeerStalledError) as caught:
            workspace.check()
        assert caught.value.waited_for == 1
        group.barrier("test")


def test_a_late_rank_is_told(module: Module) -> None:
    run_threads(3, late, module, timeout_s=30)
