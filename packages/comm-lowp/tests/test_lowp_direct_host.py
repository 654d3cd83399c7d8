"""scatter_qkv over windows, on a host: ranks are threads, windows and signals are memory of this process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import lowp_cases
import lowp_host
import pytest
import torch
from lowp_cases import Case
from lowp_checks import check, expected, outputs

from comm_core.errors import ArgumentValueError
from comm_core.group import Group
from comm_core.jit import Module
from comm_core.testing.ranks import run_threads
from comm_core.windows.launch import SessionStruct, WindowStruct
from comm_core.windows.signals import RECORD_BYTES, SIGNAL_BYTES, Operation, read_stall
from comm_lowp.kernels import DirectScatter, Kernels, direct_window_bytes
from comm_lowp.testing import oracle

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    return lowp_host.build(tmp_path_factory.mktemp("host"))


@pytest.fixture(scope="module")
def kernels(module: Module) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield lowp_host.host_kernels(module, patch)


class Memory:
    """What all ranks map: a signal block and one window each. The window is number 2 of 3."""

    def __init__(self, ranks: int, nbytes: int) -> None:
        def aligned(size: int) -> torch.Tensor:
            buffer = torch.zeros(size + 128, dtype=torch.uint8)
            return buffer[-buffer.data_ptr() % 128 :][:size]

        self.signals = [aligned(SIGNAL_BYTES) for _ in range(ranks)]
        self.windows = [aligned(nbytes).fill_(0x33) for _ in range(ranks)]


class Window:
    """See `comm_core.windows.window.MappedWindow`."""

    number = 2

    def __init__(self, memory: Memory, rank: int) -> None:
        self.local = memory.windows[rank]
        self.peer_pointers = tuple(window.data_ptr() for window in memory.windows)


class HostSession:
    """A session of one rank over `Memory`."""

    def __init__(self, memory: Memory, rank: int, timeout_s: float, poison: bool = True) -> None:
        self.memory, self.rank = memory, rank
        nbytes = memory.windows[0].numel()
        addresses = [window.data_ptr() for window in memory.windows]
        table = b"".join(
            (WindowStruct.pack(0, [0]), WindowStruct.pack(64, [0]), WindowStruct.pack(nbytes, addresses))
        )
        self.table = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        self.record = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        packed = SessionStruct(
            rank=rank,
            signals=[block.data_ptr() for block in memory.signals],
            windows=self.table.data_ptr(),
            record=self.record.data_ptr(),
            timeout_ns=int(timeout_s * 1e9),
            poison=poison,
        )
        self.packed = ctypes.create_string_buffer(packed.pack(3))

    def window(self, nbytes: int) -> Any:
        assert nbytes == self.memory.windows[0].numel()
        return Window(self.memory, self.rank)

    def launch_context(self) -> tuple[int, int]:
        return 0, ctypes.addressof(self.packed)

    @property
    def stall(self) -> Any:
        return read_stall(bytes(self.record.tolist()))


def session_of(scatter: DirectScatter) -> Any:
    return scatter._session


def prepare(kernels: Kernels, case: Case, timeout_s: float = 30.0, poison: bool = True) -> list[DirectScatter]:
    memory = Memory(case.ranks, direct_window_bytes(case.grids[0])[0])
    return [
        DirectScatter(kernels, HostSession(memory, rank, timeout_s, poison), grid, case.dtype)
        for rank, grid in enumerate(case.grids)
    ]


def exchange(group: Group, scatters: Sequence[DirectScatter], cases: Sequence[Case], skew: bool) -> int:
    """Several calls in a row; the outputs of each are looked at after the next one has begun elsewhere."""
    rank = group.rank
    for number, case in enumerate(cases):
        operands = lowp_cases.operands(case)
        outs = outputs(case.grids[rank], CPU)
        if skew and number % case.ranks == rank:
            threading.Event().wait(0.05)
        scatters[rank](*case.shards(operands, rank), outs)
        check(case, expected(case, *operands), outs, rank)
    return len(cases)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 40, 2, 64, 33, torch.bfloat16, "sage2_sm90", 1),
        Case(2, 2, 65, 3, 128, 129, torch.bfloat16, "sage2_sm90", 2),
        Case(3, 1, 100, 1, 64, 299, torch.float16, "sage2_sm89_sm120", 3, "bias"),
        Case(4, 1, 33, 2, 64, 60, torch.bfloat16, "sage2_sm89_sm120", 4, "zeros"),
        Case(8, 1, 5, 1, 64, 37, torch.float16, "sage2_sm90", 5),
    ],
    ids=lambda case: "-".join(str(part) for part in case),
)
@pytest.mark.parametrize("skew", [False, True])
def test_calls_in_a_row_equal_the_gathered_quantization(kernels: Kernels, case: Case, skew: bool) -> None:
    """The peers' windows are the only way that data takes; a rank that is late reads its own call's."""
    scatters = prepare(kernels, case)
    cases = [case._replace(seed=case.seed + number) for number in range(4)]
    assert run_threads(case.ranks, exchange, scatters, cases, skew) == [4] * case.ranks


@pytest.fixture(scope="module")
def at_once(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The kernels with four blocks of a launch at the same time."""
    module = lowp_host.build(tmp_path_factory.mktemp("at once"), "-DCOMM_HOST_BLOCKS=4", "-pthread")
    with pytest.MonkeyPatch.context() as patch:
        yield lowp_host.host_kernels(module, patch)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 1, 700, 3, 64, 690, torch.bfloat16, "sage2_sm90", 1),
        Case(2, 2, 300, 2, 64, 600, torch.float16, "sage2_sm89_sm120", 2, "bias"),
        Case(3, 1, 70, 1, 128, 199, torch.bfloat16, "sage2_sm90", 3),
    ],
    ids=lambda case: "-".join(str(part) for part in case),
)
def test_blocks_that_run_at_once_find_the_last_one_and_wait_for_the_first_ones(at_once: Kernels, case: Case) -> None:
    """The last block of a row sums it up, the last of all meets the other ranks; pack waits for its first blocks."""
    scatters = prepare(at_once, case)
    cases = [case._replace(seed=case.seed + number) for number in range(6)]
    assert run_threads(case.ranks, exchange, scatters, cases, False) == [6] * case.ranks
    assert not any(scatter.scratch.counters.any() for scatter in scatters)


def missing(group: Group, scatters: Sequence[DirectScatter], case: Case, absent: int, late: bool) -> Any:
    rank = group.rank
    operands = case.shards(lowp_cases.operands(case), rank)
    good, outs = outputs(case.grids[rank], CPU), outputs(case.grids[rank], CPU)
    scatters[rank](*operands, good)
    kept = [out.clone() for out in good]
    # Everybody has finished the good call before anybody can give up on the next one.
    group.barrier("the good call")
    payload = direct_window_bytes(case.grids[rank])[1]
    before = [scatter.window.local[:payload].clone() for scatter in scatters]
    group.barrier("the windows are known")
    if rank == absent:
        if not late:
            return None
        threading.Event().wait(1.5)
    scatters[rank](*operands, outs)
    threading.Event().wait(1.5)
    for out, same in zip(good, kept, strict=True):
        oracle.assert_same_bytes(out, same, "an earlier output")
    unchanged = [torch.equal(x, y.window.local[:payload]) for x, y in zip(before, scatters, strict=True)]
    return outs, session_of(scatters[rank]).stall, all(unchanged)


def poisoned(outs: Sequence[torch.Tensor]) -> bool:
    return all(bool((out.view(torch.uint8) == 0xFF).all()) for out in outs)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_that_does_not_come_is_named_and_outputs_are_poisoned(
    kernels: Kernels, ranks: int, late: bool
) -> None:
    case = Case(ranks, 1, 40, 1, 64, 40 * ranks, torch.bfloat16, "sage2_sm90", 1)
    scatters = prepare(kernels, case, timeout_s=0.5)
    outcomes = run_threads(ranks, missing, scatters, case, 1, late)
    for rank, outcome in enumerate(outcomes):
        if rank == 1 and not late:
            continue
        outs, stall, unchanged = outcome
        assert poisoned(outs), rank
        assert (stall.waited_for, stall.operation) == (1, Operation.ALL_GATHER_SMALL), stall
        assert unchanged, "a payload was stored into the window of a rank that had given up"


def test_outputs_are_left_alone_where_that_was_asked_for(kernels: Kernels) -> None:
    case = Case(2, 1, 40, 1, 64, 80, torch.bfloat16, "sage2_sm90", 1)
    scatters = prepare(kernels, case, timeout_s=0.2, poison=False)
    outs = outputs(case.grids[0], CPU)
    scatters[0](*case.shards(lowp_cases.operands(case), 0), outs)
    assert session_of(scatters[0]).stall.waited_for == 1
    assert not poisoned(outs[:3])


def unfinished(group: Group, scatters: Sequence[DirectScatter], case: Case) -> Any:
    rank = group.rank
    outs = outputs(case.grids[rank], CPU)
    if rank == 0:
        # As if one of the blocks that finalize the statistics never came.
        scatters[0].scratch.counters[-1] -= 1
    scatters[rank](*case.shards(lowp_cases.operands(case), rank), outs)
    group.barrier("all have given up")
    return poisoned(outs), session_of(scatters[rank]).stall, scatters[rank].scratch.counters.any().item()


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_wait_for_blocks_of_the_same_launch_ends_at_the_deadline(kernels: Kernels, ranks: int) -> None:
    case = Case(ranks, 1, 40, 1, 64, 40 * ranks, torch.bfloat16, "sage2_sm90", 1)
    scatters = prepare(kernels, case, timeout_s=0.5)
    before = [scatter.window.local[: direct_window_bytes(case.grids[0])[1]].clone() for scatter in scatters]
    for rank, (spoilt, stall, counts) in enumerate(run_threads(ranks, unfinished, scatters, case)):
        # Who waits for this rank's payload may have given up a moment before.
        assert spoilt, rank
        assert (stall.waited_for, stall.operation) == (0, Operation.EXCHANGE_CHUNKS), (rank, stall)
        assert not counts, "the next launch would count wrongly"
    chunk = case.grids[0].payload.chunk_bytes
    for window, old in zip(scatters, before, strict=True):
        assert torch.equal(window.window.local[:chunk], old[:chunk]), "rank 0 stored a payload without statistics"


def refused(change: Callable[[DirectScatter], None], kernels: Kernels, case: Case, text: str) -> None:
    scatter = prepare(kernels, case)[0]
    change(scatter)
    signals = [block.clone() for block in session_of(scatter).memory.signals]
    with pytest.raises(ArgumentValueError, match=text):
        scatter(*case.shards(lowp_cases.operands(case), 0), outputs(case.grids[0], CPU))
    for block, before in zip(session_of(scatter).memory.signals, signals, strict=True):
        assert torch.equal(block, before)


def test_mistakes_are_refused_before_a_signal_is_given(kernels: Kernels) -> None:
    case = Case(2, 1, 40, 1, 64, 80, torch.bfloat16, "sage2_sm90", 1)

    def offset(scatter: Any) -> None:
        scatter._tail = (*scatter._tail[:16], 64, *scatter._tail[17:])

    def rank(scatter: Any) -> None:
        scatter._session = HostSession(session_of(scatter).memory, 1, 1.0)

    refused(offset, kernels, case, "overlap the payload")
    refused(rank, kernels, case, "rank 0 of 2, but the session is rank 1 of 2")


def again(group: Group, scatters: Sequence[DirectScatter], case: Case) -> int:
    """A call that was prepared once, with operands that change, and a session that moves its struct."""
    rank = group.rank
    operands = case.shards(lowp_cases.operands(case), rank)
    outs = outputs(case.grids[rank], CPU)
    launch = scatters[rank].prepare(*operands, outs)
    session = session_of(scatters[rank])
    packed = []
    for seed in range(4):
        seeded = case._replace(seed=seed)
        values = lowp_cases.operands(seeded)
        for x, value in zip(operands, case.shards(values, rank), strict=True):
            x.copy_(value)
        launch()
        check(seeded, expected(seeded, *values), outs, rank)
        packed.append(launch._packed)
        if seed == 1:
            session.moved, session.packed = session.packed, ctypes.create_string_buffer(session.packed.raw)
            ctypes.memset(session.moved, 0xFF, len(session.moved))
    assert packed[0] is packed[1] and packed[2] is packed[3] and packed[1] != packed[2]
    return len(packed)


def test_a_prepared_call_is_made_any_number_of_times(kernels: Kernels) -> None:
    """It is packed once, and anew where the session's struct lies elsewhere: the old one is of no use any more."""
    case = Case(2, 1, 40, 2, 64, 70, torch.bfloat16, "sage2_sm90", 1)
    assert run_threads(case.ranks, again, prepare(kernels, case), case) == [4, 4]


@pytest.mark.parametrize(("pdl", "expected_launches"), [(None, "000"), (True, "100"), (False, "000")])
def test_a_call_is_three_kernels_and_what_follows_a_wait_for_other_ranks_does_not_start_early(
    module: Module, kernels: Kernels, pdl: bool | None, expected_launches: str
) -> None:
    """Statistics and pack wait at their end. The first kernel follows somebody else's, which may wait as well."""
    case = Case(1, 1, 40, 1, 64, 40, torch.bfloat16, "sage2_sm90", 1)
    (scatter,) = prepare(kernels, case)
    lowp_host.launches(module)
    scatter(*case.shards(lowp_cases.operands(case), 0), outputs(case.grids[0], CPU), pdl=pdl)
    assert lowp_host.launches(module) == expected_launches
