"""The all-reduce kernels on real GPUs: every pattern, sizes around every threshold, long runs, graphs, stalls.

Several ranks share each GPU, as processes; ``python tools/gpu_check.py`` runs this under MPS, where they really run
at the same time. On GPUs of their own the same tests go over NVLink.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import Any

import pytest
import torch

from comm_core import allreduce_fusion, create_allreduce_fusion_workspace
from comm_core.allreduce import launch
from comm_core.allreduce.patterns import PATTERNS, AllReduceFusionPattern, QuantizationSFLayout
from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import PeerStalledError, UnsupportedError
from comm_core.testing import allreduce_cases
from comm_core.testing.allreduce_cases import Case, assert_right, make_operands, make_outputs, raw
from comm_core.testing.gpu import plugin_of, run_on_devices, shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_nvlink.plugin import NvlinkPlugin

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes()
PLUGIN = plugin_of("nvlink", NvlinkPlugin)
CODE = AllReduceFusionPattern
PLAIN = [pattern for pattern, spec in PATTERNS.items() if not spec.is_moe]
FP4 = (CODE.kARResidualRMSNormFP4Quant, CODE.kARResidualRMSNormOutFP4Quant)
GROUPS = (CODE.kARResidualRMSNormPerTokenGroupFP8PackedQuant, CODE.kARResidualRMSNormOutPerTokenGroupFP8PackedQuant)
BF16 = torch.bfloat16
by_size = pytest.mark.parametrize("size", SIZES)


ranks = shared_gpu_pool(8)


def run(ranks: RankPool, size: int, function: Any, *arguments: Any, **options: Any) -> list[Any]:
    return run_on_devices(ranks, function, *arguments, size=size, plugin=PLUGIN, **options)


def opened(group: Any, tokens: int, hidden: int, dtype: torch.dtype = BF16, **options: Any) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    return create_allreduce_fusion_workspace(
        "trtllm", max_token_num=tokens, hidden_dim=hidden, dtype=dtype, group=group, device=device, **options
    )


def call(workspace: Any, case: Case, seed: int) -> str:
    """Make a call, compare it, and return a digest of everything that it wrote."""
    operands = make_operands(case, workspace.world_size, seed)
    made = make_outputs(case, workspace.device)
    given = allreduce_cases.arguments(case, operands, workspace.device)
    x = operands.parts[workspace.rank].to(workspace.device)
    torch.cuda.synchronize()
    allreduce_fusion(x, workspace, case.pattern, **given, **made)
    torch.cuda.synchronize()
    workspace.check()
    assert_right(case, operands, made)
    digest = hashlib.sha256()
    for name in sorted(made):
        digest.update(raw(made[name]).numpy().tobytes())
    return digest.hexdigest()


def many(group: Any, cases: list[Case], options: dict[str, Any]) -> list[str]:
    nbytes = max(case.tokens * case.hidden * case.dtype.itemsize for case in cases)
    with opened(group, nbytes // 4, 1, torch.float32, force_oneshot_support=True, **options) as workspace:
        return [call(workspace, case, seed) for seed, case in enumerate(cases)]


def same(results: list[list[str]]) -> None:
    """Replicas are equal to the bit."""
    assert all(result == results[0] for result in results)


# Every pattern


@pytest.mark.parametrize("dtype", [torch.float16, BF16, torch.float32], ids=str)
@by_size
def test_every_pattern_equals_the_reference(ranks: RankPool, size: int, dtype: torch.dtype) -> None:
    """By both algorithms, with rows shared by several blocks and by one, special values and ordinary ones."""
    patterns = [pattern for pattern in PLAIN if dtype != torch.float32 or pattern not in FP4]
    cases = [
        Case(pattern, tokens, hidden, dtype, values=values, use_oneshot=one)
        for pattern, one, (tokens, hidden, values) in itertools.product(
            patterns,
            (True, False),
            [(1, 8192, "normal"), (5, 1024, "special"), (3, 4096, "special"), (33, 5120, "normal")],
        )
        if hidden * dtype.itemsize <= 40960
    ]
    same(run(ranks, size, many, cases, {}))


@by_size
def test_layouts_groups_and_odd_sizes(ranks: RankPool, size: int) -> None:
    layouts = [
        Case(FP4[1], tokens, hidden, dtype, layout=layout, scale_on_device=on_device)
        for layout, (tokens, hidden, dtype, on_device) in itertools.product(
            QuantizationSFLayout, [(1, 8192, BF16, True), (7, 208, torch.float16, False), (130, 720, BF16, True)]
        )
    ]
    groups = [
        Case(GROUPS[1], 6, hidden, BF16, group_size=group)
        for group, hidden in [(8, 72), (64, 7168), (128, 8192), (24, 120), (512, 4096), (1024, 24576 // 2)]
    ]
    odd = [
        Case(CODE.kAllReduce, tokens, hidden, dtype, values="integers", use_oneshot=one)
        for (tokens, hidden), dtype, one in itertools.product(
            [(1, 1), (1, 9), (3, 5), (1, 4099), (7, 1023)], [BF16, torch.float32], [True, False, None]
        )
    ]
    norms = [Case(CODE.kARResidualRMSNorm, 4, 24576, weight_bias=1.0), Case(CODE.kARResidualRMSNorm, 2, 8, eps=0.0)]
    same(run(ranks, size, many, [*layouts, *groups, *odd, *norms], {}))


@by_size
def test_launches_do_not_change_a_bit(ranks: RankPool, size: int) -> None:
    """A token has the same bits whatever is reduced with it, by either algorithm, and also quantized or not."""
    results = run(ranks, size, batches)
    same(results)


def batches(group: Any) -> list[str]:
    case = Case(CODE.kARResidualRMSNormOutFP8Quant, 300, 7168)
    operands = make_operands(case, group.size(), 3)
    digests: list[str] = []
    with opened(group, 300, 7168, force_oneshot_support=True) as workspace:
        device = workspace.device
        x, residual, gamma = (t.to(device) for t in (operands.parts[group.rank()], operands.residual, operands.gamma))
        first: torch.Tensor | None = None
        patterns = (CODE.kARResidualRMSNorm, case.pattern)
        for pattern, tokens, one in itertools.product(patterns, (1, 2, 9, 40, 140, 300), (True, False)):
            norm = torch.empty(tokens, 7168, dtype=BF16, device=device)
            allreduce_fusion(
                x[:tokens],
                workspace,
                pattern,
                residual_in=residual[:tokens],
                rms_gamma=gamma,
                norm_out=norm,
                scale_factor=0.5,
                use_oneshot=one,
            )
            torch.cuda.synchronize()
            first = norm[0].clone() if first is None else first
            assert torch.equal(norm[0].view(torch.int16), first.view(torch.int16)), (pattern, tokens, one)
            digests.append(hashlib.sha256(raw(norm).numpy().tobytes()).hexdigest())
    return digests


# Sizes and long runs: integers on the device, so that sums are exact


class Pool:
    """Operands of small integers, and their sums over the ranks; a call takes the first rows of one of them."""

    def __init__(self, group: Any, tokens: int, hidden: int, count: int, device: torch.device) -> None:
        at = torch.arange(tokens * hidden, device=device, dtype=torch.int64).view(tokens, hidden)
        self.count = count
        self.xs: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        for number in range(count):
            parts = [((at * 7 + at // 13 * 5 + 3 * peer + 11 * number) % 15 - 7) for peer in range(group.size())]
            self.xs.append(parts[group.rank()].to(BF16))
            self.sums.append(torch.stack(parts).sum(0).to(BF16))


def around(values: list[int], most: int) -> list[int]:
    return sorted({value + step for value in values for step in (-1, 0, 1) if 1 <= value + step <= most})


def token_counts(group: Any, hidden: int) -> list[int]:
    """Return counts around every threshold of the choice of an algorithm and of the launch."""
    size, row = group.size(), hidden * 2 // 16
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    budgets = {sms, max(1, sms // (2 * size)), max(1, 2 * sms // (2 * size))}
    values = [1, 8, 32, 128, 512, 2048, 4095]
    limit = launch.one_shot_limit(size)
    values += [limit // (hidden * 2)] if limit else []
    values += [threads * blocks // row for threads in (128, 256, 512, 1024) for blocks in budgets]
    return around(values, 4096)


def every_size(group: Any, hidden: int) -> list[int]:
    counts = token_counts(group, hidden)
    with opened(group, 4096, hidden) as workspace:
        pool = Pool(group, 4096, hidden, 2, workspace.device)
        gamma = torch.ones(hidden, dtype=BF16, device=workspace.device)
        out, norm = (torch.empty(4096, hidden, dtype=BF16, device=workspace.device) for _ in range(2))
        for number, tokens in enumerate(counts):
            x, want = (t[number % 2][:tokens] for t in (pool.xs, pool.sums))
            out.fill_(77)
            norm.fill_(77)
            allreduce_fusion(x, workspace, 0, output=out[:tokens])
            assert torch.equal(out[:tokens], want), f"{tokens} tokens"
            assert bool((out[tokens:] == 77).all()), f"{tokens} tokens: stores beyond the output"
            allreduce_fusion(
                x,
                workspace,
                1,
                residual_in=torch.zeros_like(want),
                rms_gamma=gamma,
                residual_out=out[:tokens],
                norm_out=norm[:tokens],
            )
            assert torch.equal(out[:tokens], want), f"{tokens} tokens, fused"
            wide = want.to(torch.float32)
            exact = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
            assert bool(((norm[:tokens] - exact).abs() <= exact.abs() * 2**-7).all()), f"{tokens} tokens, norm"
            assert bool((norm[tokens:] == 77).all()), f"{tokens} tokens: stores beyond the norm"
    return counts


@by_size
def test_token_counts_around_every_threshold(ranks: RankPool, size: int) -> None:
    """F5: 1 to 4096 tokens."""
    counts = run(ranks, size, every_size, 1024)[0]
    assert counts[0] == 1
    assert counts[-1] == 4096


def long_run(group: Any, rounds: int, skew: bool, pdl: bool) -> int:
    """Sizes and algorithms at random, without a pause; some ranks are late at some calls."""
    hidden, generator = 512, torch.Generator().manual_seed(11)
    with opened(group, 700, hidden) as workspace:
        device = workspace.device
        pool = Pool(group, 700, hidden, 16, device)
        out = torch.zeros(700, hidden, dtype=BF16, device=device)
        bad = torch.zeros((), dtype=torch.int64, device=device)
        picks = torch.randint(1 << 30, (rounds, 4), generator=generator).tolist()
        for a, b, c, late in picks:
            tokens = (1 + a % 8, 1 + a % 40, 1 + a % 700)[b % 3]
            one = (None, None, False, None)[c % 4]
            if skew and late % 97 == group.rank():
                torch.cuda._sleep(late % 200_000)
            allreduce_fusion(
                pool.xs[c % 16][:tokens],
                workspace,
                0,
                output=out[:tokens],
                use_oneshot=one,
                launch_with_pdl=pdl,
                trigger_completion_at_end=late % 2 == 0,
            )
            bad += (out[:tokens] != pool.sums[c % 16][:tokens]).sum()
        torch.cuda.synchronize()
        workspace.check()
        return int(bad)


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@by_size
def test_ten_thousand_calls_without_a_pause(ranks: RankPool, size: int, pdl: bool) -> None:
    """F1, F8, F9: thresholds crossed at random, ranks late at random; the outputs are read right away."""
    assert run(ranks, size, long_run, 10_000, True, pdl, timeout_s=110) == [0] * size


def chain(group: Any, pdl: bool) -> int:
    """Calls that read what the call before has written, fused ones among them, eagerly and in a replayed graph."""
    hidden, tokens = 1024, 24
    with opened(group, tokens, hidden) as workspace:
        device, size = workspace.device, group.size()
        x = torch.ones(tokens, hidden, dtype=BF16, device=device)
        y, z, residual = (torch.empty_like(x) for _ in range(3))
        gamma = torch.full((hidden,), 2.0, dtype=BF16, device=device)
        options = {"launch_with_pdl": pdl}

        def work() -> None:
            for early in (True, False):
                options["trigger_completion_at_end"] = early
                allreduce_fusion(x, workspace, 0, output=y, **options)
                allreduce_fusion(y, workspace, 0, output=z, use_oneshot=False, **options)
                allreduce_fusion(
                    z, workspace, 1, residual_in=y, rms_gamma=gamma, norm_out=y, residual_out=residual, **options
                )
                allreduce_fusion(y[:3], workspace, 0, output=z[:3], **options)

        def check(value: float, what: str) -> None:
            torch.cuda.synchronize()
            workspace.check()
            # Rows of equal values have a norm of gamma, whatever the value.
            assert bool((y == 2.0).all()), what
            assert bool((z[:3] == 2.0 * size).all()), what
            assert bool((residual == value * (size**3 + size)).all()), what

        work()
        check(1, "eager")
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            work()
        for round_ in range(200):
            value = float(1 << round_ % 3)  # sums of which every bit is kept
            x.fill_(value)
            graph.replay()
            check(value, f"replay {round_}")
            if round_ % 7 == 0:
                work()
                check(value, f"eager after replay {round_}")
        return 200


@pytest.mark.parametrize("pdl", [False, True], ids=["plain", "pdl"])
@by_size
def test_calls_that_depend_on_each_other_in_graphs(ranks: RankPool, size: int, pdl: bool) -> None:
    """F8, F9: captured, replayed with changed inputs, among eager calls."""
    assert run(ranks, size, chain, pdl) == [200] * size


def replayed(group: Any, replays: int) -> int:
    """Graphs of calls of several sizes, replayed without a pause, ranks skewed."""
    hidden = 512
    with opened(group, 600, hidden) as workspace:
        pool = Pool(group, 600, hidden, 8, workspace.device)
        out = torch.zeros(600, hidden, dtype=BF16, device=workspace.device)
        bad = torch.zeros((), dtype=torch.int64, device=workspace.device)
        graphs: list[torch.cuda.CUDAGraph] = []
        for number in range(4):
            graphs.append(torch.cuda.CUDAGraph())
            torch.cuda.synchronize()
            with torch.cuda.graph(graphs[-1]):
                for inner in range(5):
                    place = (number + inner) % 8
                    tokens = (1, 17, 600, 90, 3)[(number + inner) % 5]
                    allreduce_fusion(pool.xs[place][:tokens], workspace, 0, output=out[:tokens])
                    bad.add_((out[:tokens] != pool.sums[place][:tokens]).sum())
        for round_ in range(replays):
            if round_ % 5 == group.rank():
                torch.cuda._sleep(50_000)
            graphs[round_ * 7 % 4].replay()
        torch.cuda.synchronize()
        workspace.check()
        return int(bad)


@by_size
def test_graphs_replayed_without_a_pause(ranks: RankPool, size: int) -> None:
    assert run(ranks, size, replayed, 400) == [0] * size


# Streams, allocations, checkpoints


def housekeeping(group: Any) -> str:
    """Streams that nobody orders; no allocation in a call; memory that goes and comes back."""
    hidden, tokens = 1024, 16
    with opened(group, tokens, hidden) as workspace:
        pool = Pool(group, tokens, hidden, 4, workspace.device)
        outs = [torch.zeros(tokens, hidden, dtype=BF16, device=workspace.device) for _ in range(12)]
        streams = [torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.current_stream()]
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for round_, out in enumerate(outs):
            with torch.cuda.stream(streams[round_ % 3]):
                allreduce_fusion(pool.xs[round_ % 4], workspace, 0, output=out)
        torch.cuda.synchronize()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        for round_, out in enumerate(outs):
            assert torch.equal(out, pool.sums[round_ % 4]), round_
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            allreduce_fusion(pool.xs[1], workspace, 0, output=outs[0])
        form = workspace.memory_form
        if form != "vmm_fd":
            with pytest.raises(UnsupportedError, match="can't detach its memory"):
                workspace.checkpoint_prepare()
            return form
        workspace.checkpoint_prepare()
        workspace.checkpoint_prepare()
        with pytest.raises(Exception, match="detached since checkpoint_prepare"):
            allreduce_fusion(pool.xs[1], workspace, 0, output=outs[1])
        workspace.checkpoint_restore(TorchDistBackend(group))
        outs[0].zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(outs[0], pool.sums[1])
        allreduce_fusion(pool.xs[2], workspace, 0, output=outs[1])
        assert torch.equal(outs[1], pool.sums[2])
        return form


@pytest.mark.parametrize("memory", ["auto", "cuda_ipc"])
@by_size
def test_streams_allocations_and_checkpoints(ranks: RankPool, size: int, memory: str) -> None:
    """F2, F7."""
    forms = run(ranks, size, housekeeping, env={"COMM_PEER_MEMORY": memory})
    assert len(set(forms)) == 1
    assert memory == "auto" or forms[0] == memory


# Stalls


def silent(group: Any, pattern: int, use_oneshot: bool, captured: bool) -> int:
    """Rank 1 makes one call less."""
    case = Case(CODE(pattern), 4, 1024, use_oneshot=use_oneshot)
    workspace = opened(group, 4, 1024)
    # Of the kernels alone: opening may take its time.
    workspace._session._struct.timeout_ns = int(1e9)
    workspace._session._pack()
    call(workspace, case, 0)
    operands = make_operands(case, group.size(), 1)
    made = make_outputs(case, workspace.device)
    given = allreduce_cases.arguments(case, operands, workspace.device)
    x = operands.parts[group.rank()].to(workspace.device)

    def work() -> None:
        allreduce_fusion(x, workspace, pattern, **given, **made)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        work()
    torch.distributed.barrier(group)
    if group.rank() == 1:
        time.sleep(2.5)
    else:
        began = time.monotonic()
        graph.replay() if captured else work()
        torch.cuda.synchronize()
        assert time.monotonic() - began < 5
        for name, output in made.items():
            wide = output.to(torch.float32)
            assert bool(wide.isnan().all()), f"{name}: {wide.flatten()[:8]}"
        with pytest.raises(PeerStalledError, match="rank 1") as caught:
            workspace.check()
        assert caught.value.waited_for == 1
    with pytest.raises(PeerStalledError, match="broken on every rank") as caught:
        work()
        torch.cuda.synchronize()
        workspace.check()
    workspace.destroy()
    return caught.value.waited_for


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("use_oneshot", [True, False], ids=["one shot", "two shots"])
@pytest.mark.parametrize("pattern", [0, 4])
@by_size
def test_a_rank_that_does_not_come_is_named(
    ranks: RankPool, size: int, pattern: int, use_oneshot: bool, captured: bool
) -> None:
    """F17: within the deadline, with outputs that are NaN; the late rank is told."""
    named = run(ranks, size, silent, pattern, use_oneshot, captured)
    assert named == [1] * size
