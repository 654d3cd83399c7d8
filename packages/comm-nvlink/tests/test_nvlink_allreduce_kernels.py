"""The all-reduce kernels from within, run on a host: which one runs, how lanes stay together, what is stored when.

Launches are made by hand here, past the functions that choose them.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pytest
import torch

from comm_core import allreduce_fusion
from comm_core.allreduce.launch import FUSED_THREADS, ROW_THREADS, Encoding, Launch, Shape, shape_of
from comm_core.allreduce.module import NO_EPILOGUE, Epilogue
from comm_core.allreduce.patterns import AllReduceFusionPattern
from comm_core.errors import ArgumentValueError, PeerStalledError
from comm_core.group import Group
from comm_core.jit.loader import Module
from comm_core.testing import allreduce_cases
from comm_core.testing import allreduce_host as host
from comm_core.testing.allreduce_cases import Case, assert_right, make_operands, make_outputs
from comm_core.testing.ranks import run_threads
from comm_nvlink.allreduce_workspace import TRTLLMAllReduceFusionWorkspace as Workspace

pytestmark = pytest.mark.usefixtures("one_stream")

CODE = AllReduceFusionPattern
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
LANES = 32
SOURCES = {"reduce": 4, "fused": 2}
"""Ranks whose vectors are waited for at once. Twin: include/comm_core/allreduce.cuh, where kernels call sum_slots."""


# Which kernel, and with how many threads

CALLS = {
    Case(CODE.kAllReduce, 2, 64, F16, use_oneshot=True): "reduce_kernel<comm::Float16, false>",
    Case(CODE.kAllReduce, 2, 64, F32, use_oneshot=False): "reduce_kernel<comm::Float32, true>",
    # A row for a block, whether or not it would fit a block of the other kernels.
    Case(CODE.kARResidualRMSNorm, 2, 64, BF16, use_oneshot=True): "vector_kernel<comm::Bfloat16, true>",
    Case(CODE.kARResidualRMSNorm, 1, 8192, F16, use_oneshot=True): "vector_kernel<comm::Float16, true>",
    Case(CODE.kARResidualRMSNorm, 1, 8200, BF16, use_oneshot=True): "fused_kernel<comm::Bfloat16, false, false>",
    Case(CODE.kARResidualRMSNorm, 2, 64, F32, use_oneshot=False): "fused_kernel<comm::Float32, true, false>",
    Case(CODE.kARResidualRMSNormFP8Quant, 2, 64, BF16, use_oneshot=True): "fused_kernel<comm::Bfloat16, false, true>",
    Case(CODE.kARResidualRMSNormFP8Quant, 2, 64, BF16, use_oneshot=False): "fused_kernel<comm::Bfloat16, true, true>",
}


def kernels(group: Group, module: Module) -> list[str]:
    found: list[str] = []
    with host.opened(Workspace, group, module, 8200 * 2) as workspace:
        for case in CALLS:
            operands, made = make_operands(case, group.size, 0), make_outputs(case, host.CPU)
            given = allreduce_cases.arguments(case, operands, host.CPU)
            allreduce_fusion(operands.parts[group.rank], workspace, case.pattern, **given, **made)
            assert_right(case, operands, made)
            found.append(host.launched(module).removeprefix("comm::"))
    return found


def test_each_call_runs_the_kernel_that_is_made_for_it(module: Module) -> None:
    """They give the same bits, so nothing else shows that the fast one for whole rows is ever used."""
    assert run_threads(2, kernels, module, timeout_s=60) == [list(CALLS.values())] * 2


def too_many_threads(group: Group, module: Module) -> None:
    with host.opened(Workspace, group, module, 1 << 16) as workspace:
        x = torch.zeros(1 << 16, dtype=torch.uint8)
        at = x.data_ptr()

        def launch(
            threads: int, row_vectors: int = 0, *, two_shots: bool = False, team: int = 1, **changes: Any
        ) -> None:
            epilogue = Epilogue(at, at, at, at, rows=1, row_vectors=row_vectors, hidden=8 * row_vectors, **changes)
            shape = shape_of(group.size, 16 * (row_vectors or 64), not two_shots)
            made = Launch(team, threads, team, 48 << 10)
            workspace._session.reduce(at, at, "bfloat16", shape, made, epilogue if row_vectors else NO_EPILOGUE)

        bound = rf"{FUSED_THREADS + 32} threads in a block, at most {FUSED_THREADS}"
        for two_shots in (False, True):
            with pytest.raises(ArgumentValueError, match=bound):
                launch(FUSED_THREADS + 32, two_shots=two_shots)
            with pytest.raises(ArgumentValueError, match=bound):
                launch(FUSED_THREADS + 32, 64, two_shots=two_shots, encoding=Encoding.FP8)
        with pytest.raises(ArgumentValueError, match=bound):
            launch(FUSED_THREADS + 32, 64, two_shots=True)
        with pytest.raises(ArgumentValueError, match=bound):
            launch(FUSED_THREADS + 32, 64, team=2)
        with pytest.raises(ArgumentValueError, match=bound):
            launch(FUSED_THREADS + 32, 2 * FUSED_THREADS)
        with pytest.raises(ArgumentValueError, match=f"{ROW_THREADS + 32} threads in a block, at most {ROW_THREADS}"):
            launch(ROW_THREADS + 32, 64)
        # Nothing was launched: the next call is the first.
        assert torch.equal(allreduce_fusion(torch.ones(1, 64, dtype=BF16), workspace, 0), torch.full((1, 64), 2.0))


def test_blocks_larger_than_the_bounds_of_their_kernel_are_refused(module: Module) -> None:
    """By the entry point, with a number in the text; a GPU would only say that the launch failed."""
    run_threads(2, too_many_threads, module)


# Lanes stay together


def plain(workspace: Workspace, source: torch.Tensor, output: torch.Tensor, shape: Shape, threads: int) -> None:
    """Sum in one block."""
    name = str(source.dtype).removeprefix("torch.")
    workspace._session.reduce(source.data_ptr(), output.data_ptr(), name, shape, Launch(1, threads))


def joins(group: Group, module: Module, two_shots: bool) -> list[int]:
    """Sum operands of some sizes; return how often warps have met in each."""
    counts: list[int] = []
    with host.opened(Workspace, group, module, 1 << 14) as workspace:
        for vectors in (1, 33, 200, 800):
            x, out = torch.ones(vectors * 4), torch.zeros(vectors * 4)
            host.meetings(module)
            plain(workspace, x, out, shape_of(group.size, x.nbytes, not two_shots), 64)
            counts.append(host.meetings(module))
            assert bool((out == group.size).all())
    return counts


def joins_expected(ranks: int, rank: int, vectors: int, two_shots: bool) -> int:
    """Return the waits of a call, each counted once for a warp."""
    waits = -(-ranks // SOURCES["reduce"])
    if not two_shots:
        return -(-vectors // LANES) * (1 if ranks == 2 else waits)
    part = -(-vectors // ranks)
    own = max(0, min(part, vectors - rank * part))
    return -(-own // LANES) * waits + -(-vectors // LANES)


@pytest.mark.parametrize("two_shots", [False, True], ids=["one shot", "two shots"])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_the_lanes_of_a_warp_leave_every_wait_together(module: Module, ranks: int, two_shots: bool) -> None:
    """Or what they store for others would travel in pieces. Results don't tell; lanes that met do."""
    for rank, counts in enumerate(run_threads(ranks, joins, module, two_shots, timeout_s=60)):
        expected = [joins_expected(ranks, rank, vectors, two_shots) for vectors in (1, 33, 200, 800)]
        # The first call of all is subtracted: besides waits, a call has meetings that don't depend on its size.
        rest = counts[0] - expected[0]
        assert 0 <= rest <= 2
        assert [count - rest for count in counts] == expected


# A rank that stops half-way


def stopped(group: Group, module: Module, case: Case) -> int:
    """Rank 1 stores a part of its operand for the others, which ends in the middle of a warp; return who is named."""
    nbytes = case.tokens * case.hidden * case.dtype.itemsize
    with host.opened(Workspace, group, module, nbytes) as workspace:
        shape = shape_of(group.size, nbytes, case.use_oneshot)
        operands, made = make_operands(case, group.size, 1), make_outputs(case, host.CPU)
        part = shape.slot_vectors if shape.two_shots else 0
        # Rank 1 has less to do before its call, and would name who comes late.
        host.set_deadline(workspace, 20 if group.rank == 1 else 2)
        group.barrier("test")
        if group.rank == 1:
            # In two shots, all of the parts of ranks 0 and 1.
            short = shape._replace(vectors=2 * part + 80)
            plain(workspace, operands.parts[1].contiguous(), torch.zeros(nbytes // 4), short, 32)
        elif case.spec.has_norm:
            given = allreduce_cases.arguments(case, operands, host.CPU)
            allreduce_fusion(operands.parts[group.rank], workspace, case.pattern, **given, **made)
        else:
            plain(workspace, operands.parts[group.rank], made["output"], shape, 32)
        group.barrier("test")
        if group.rank == 1:
            return 1
        with pytest.raises(PeerStalledError) as caught:
            workspace.check()
        if "output" in made and not shape.two_shots:
            # What has come is added up, in the warp of which some lanes have waited in vain too.
            few = 80 * 16 // case.dtype.itemsize
            got, want = made["output"].view(-1), torch.stack(operands.parts).sum(0).view(-1)
            assert torch.equal(got[:few], want[:few])
            assert bool(got[few:].isnan().all())
        return caught.value.waited_for


@pytest.mark.parametrize("use_oneshot", [True, False], ids=["one shot", "two shots"])
@pytest.mark.parametrize(
    "pattern", [CODE.kAllReduce, CODE.kARResidualRMSNorm, CODE.kARResidualRMSNormOutFP8Quant], ids=lambda it: it.name
)
def test_lanes_that_wait_in_vain_stay_with_those_that_do_not(module: Module, pattern: int, use_oneshot: bool) -> None:
    """A lane that left a loop at which its warp waits would hang it, or swap values with the wrong lanes."""
    # Several rounds for each thread, in rows and in the parts of the ranks.
    hidden, tokens = (480, 2) if use_oneshot else (640, 6)
    case = Case(pattern, tokens, hidden, F32, values="integers", use_oneshot=use_oneshot)
    assert run_threads(6, stopped, module, case, timeout_s=30) == [1] * 6


def kept_waiting(group: Group, module: Module) -> int:
    """Rank 1 stops after it has stored what rank 0 adds up; rank 0 waits for sums of others, and was here first."""
    ranks, part = group.size, 32
    shape = shape_of(ranks, ranks * part * 16, False)
    x, out = torch.ones(shape.vectors * 4), torch.zeros(shape.vectors * 4)
    with host.opened(Workspace, group, module, x.nbytes) as workspace:
        # A quarter more for sums, much more than a thread may come late by.
        host.set_deadline(workspace, 4)
        group.barrier("test")
        if group.rank != 0:
            time.sleep(0.15)
        plain(workspace, x, out, shape._replace(vectors=2 * part) if group.rank == 1 else shape, 32)
        group.barrier("test")
        if group.rank == 1:
            return 1
        with pytest.raises(PeerStalledError) as caught:
            workspace.check()
        return caught.value.waited_for


def test_who_lacks_a_sum_waits_longer_than_who_lacks_the_operand(module: Module) -> None:
    """Rank 0 has all operands and would name rank 2, which only waits itself, as its own deadline is the first."""
    assert run_threads(3, kept_waiting, module, timeout_s=30) == [1] * 3


EMPTY = 0x80000000
"""Twin: include/comm_core/lamport.cuh, kLamportEmpty."""
GIVEN_UP = -(1 << 31) | 1 << 8 | 1
"""The abort word where rank 1 gives up and names itself. Twin: include/comm_core/signal.cuh, abort_code."""
ROUNDS = 4


class Told:
    """Rank 0 of two in a call that tells itself that rank 1 has given up.

    What it stores in the first round of a loop lies in its own abort word, so that the moment is exact. From rank 1
    everything is there from the beginning.

    Args:
        session: of rank 0.
        vectors: that come from rank 1.
    """

    def __init__(self, session: Any, vectors: int) -> None:
        self.session = session
        self.abort = session._signals.addresses[0]
        epoch = ctypes.c_uint32.from_address(self.abort + 2 * 128).value + 1
        self.half = (epoch & 1) * session._half_bytes
        self.buffers = session._addresses
        mine, theirs = (self.words(self.buffers[rank] + self.half, vectors) for rank in (0, 1))
        assert list(mine) == list(theirs) == [EMPTY] * 4 * vectors
        ctypes.memset(mine, 0, 16 * vectors)
        self.arrived = theirs

    @staticmethod
    def words(address: int, vectors: int) -> ctypes.Array[ctypes.c_uint32]:
        return (ctypes.c_uint32 * (4 * vectors)).from_address(address)

    def sent(self, vector: int) -> bool:
        return list(self.arrived[4 * vector : 4 * vector + 4]) != [EMPTY] * 4


def told_in_rows(told: Told, encoding: Encoding) -> list[bool]:
    """A row is one vector, which one lane has."""
    x, gamma, quantized = torch.ones(ROUNDS, 4), torch.ones(4), torch.zeros(ROUNDS, 4, dtype=torch.uint8)
    residual = torch.zeros(ROUNDS, 4, dtype=torch.int32)
    x[0, 0], residual[0, 0] = 0, GIVEN_UP
    epilogue = Epilogue(
        residual_in=residual.data_ptr(),
        residual_out=told.abort,
        gamma=gamma.data_ptr(),
        quant_out=quantized.data_ptr() if encoding else 0,
        scale_value=1.0,
        encoding=encoding,
        rows=ROUNDS,
        row_vectors=1,
        hidden=4,
    )
    launch = Launch(1, LANES, 1, 2 * LANES * 16)
    told.session.reduce(x.data_ptr(), 0, "float32", Shape(ROUNDS, 16, ROUNDS, False), launch, epilogue)
    return [told.sent(row) for row in range(ROUNDS)]


def told_in_one_shot(told: Told) -> list[bool]:
    """A round is a vector of every lane; here are those of the first one."""
    x = torch.zeros(ROUNDS * LANES, 4, dtype=torch.int32)
    x[0, 0] = GIVEN_UP
    shape = Shape(ROUNDS * LANES, 16, ROUNDS * LANES, False)
    told.session.reduce(x.data_ptr(), told.abort, "float32", shape, Launch(1, LANES))
    return [told.sent(LANES * place) for place in range(ROUNDS)]


def told_in_two_shots(told: Told) -> list[bool]:
    """The same, of the sums that rank 0 owns: it has its signals where it stores those for rank 1."""
    own = ROUNDS * LANES
    x = torch.zeros(2 * own, 4, dtype=torch.int32)
    x[0, 0] = GIVEN_UP
    out = torch.zeros(2 * own, 4)
    # A slot for this rank, and the sums, with signals that have no abort and the epoch that the real ones have.
    arena = torch.full((own * 16 + (1 << 14),), 0x55, dtype=torch.uint8)
    signals = arena.data_ptr() + own * 16
    ctypes.memset(signals, 0, 4 * 128)
    ctypes.memmove(signals + 2 * 128, told.abort + 2 * 128, 4)
    addresses = ctypes.c_uint64.from_address(told.session._session + 16)
    before, peer = addresses.value, told.buffers[1]
    addresses.value, told.buffers[1] = signals, arena.data_ptr() - told.half
    try:
        shape = Shape(2 * own, 16, own, True)
        told.session.reduce(x.data_ptr(), out.data_ptr(), "float32", shape, Launch(1, LANES))
    finally:
        addresses.value, told.buffers[1] = before, peer
    sums = told.words(signals, own)
    assert sums[0] == GIVEN_UP & 0xFFFFFFFF
    return [sums[4 * LANES * place] != 0x55555555 for place in range(ROUNDS)]


def told_in_the_middle(group: Group, module: Module, way: str) -> tuple[str, list[bool]]:
    """Return the kernel that ran, and in which rounds rank 0 stored for rank 1."""
    with host.opened(Workspace, group, module, 1 << 13) as workspace:
        if group.rank == 1:
            group.barrier("test")
            return "", []
        told = Told(workspace._session, ROUNDS * LANES)
        if way == "one shot":
            sent = told_in_one_shot(told)
        elif way == "two shots":
            sent = told_in_two_shots(told)
        else:
            sent = told_in_rows(told, Encoding.FP8 if way == "encoded" else Encoding.NONE)
        kernel = host.launched(module)
        with pytest.raises(PeerStalledError) as caught:
            workspace.check()
        assert caught.value.waited_for == 1
        group.barrier("test")
        return kernel.removeprefix("comm::"), sent


@pytest.mark.parametrize(
    ("way", "kernel", "ahead"),
    [
        ("one shot", "reduce_kernel<comm::Float32, false>", 1),
        # Sums are not sent ahead.
        ("two shots", "reduce_kernel<comm::Float32, true>", 0),
        ("rows", "vector_kernel<comm::Float32, true>", 1),
        ("encoded", "fused_kernel<comm::Float32, false, true>", 1),
    ],
)
def test_a_rank_that_is_told_in_the_middle_of_a_call_stores_nothing_more(
    module: Module, way: str, kernel: str, ahead: int
) -> None:
    """But what it has sent ahead. Who gave up has left, and takes its memory away once all have been told."""
    found = run_threads(2, told_in_the_middle, module, way, timeout_s=30)[0]
    assert found == (kernel, [place <= ahead for place in range(ROUNDS)])
