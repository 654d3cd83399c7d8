"""UlyssesCommunicator over gloo processes: everything but the bits, which the contract suite checks.

Bad arguments of every kind, construction that fails on one rank, the checked mode, workspaces and aliases, threads,
closing, and a peer that dies.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from comm_core import (
    CommError,
    JointValueError,
    TransportError,
    UlyssesBackendError,
    UlyssesCommunicator,
    UlyssesWorkspace,
    merge_ulysses_output_head_chunk,
    pack_ulysses_qkv_head_chunk,
)
from comm_core._dist import TorchStore
from comm_core.errors import ArgumentTypeError, ArgumentValueError, ClosedError, GroupTimeoutError, UnsupportedError
from comm_core.group import thread_groups
from comm_core.plugins import register, unregister
from comm_core.plugins.discovery import Registry
from comm_core.plugins.hookspecs import hookimpl
from comm_core.testing.halts import Halt, halted
from comm_core.testing.ranks import RankPool
from comm_core.transport.dist import DistSession
from comm_core.transport.interface import Transport, Verdict
from comm_core.ulysses import codec, validation
from comm_core.ulysses.execution import Execution

F32 = torch.float32


def single(**changes: Any) -> UlyssesCommunicator:
    """Return a communicator of one rank, which needs no processes."""
    arguments: dict[str, Any] = {"max_bytes": 1 << 16, "dtype": F32, "device": "cpu", **changes}
    return UlyssesCommunicator(thread_groups(1)[0], **arguments)


# Construction


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_bytes": None}, ArgumentValueError, "exactly one"),
        ({"max_bytes": 8, "max_elems": 2}, ArgumentValueError, "exactly one"),
        ({"max_bytes": 0}, ArgumentValueError, "got 0"),
        ({"max_bytes": -4}, ArgumentValueError, "got -4"),
        ({"max_bytes": True}, ArgumentTypeError, "bool True"),
        ({"max_bytes": 8.0}, ArgumentTypeError, "float"),
        ({"max_bytes": (2**31 - 1) * 4 + 1}, ArgumentValueError, "8589934589"),
        ({"dtype": torch.int64}, ArgumentValueError, "torch.int64"),
        ({"dtype": torch.complex64}, ArgumentValueError, "torch.complex64"),
        ({"dtype": "float32"}, ArgumentTypeError, "str"),
        ({"dtype": None}, ArgumentTypeError, "NoneType"),
        ({"device": "cuda:999"}, ArgumentValueError, "cuda"),
        ({"device": "meta"}, ArgumentValueError, "meta"),
        ({"device": True}, ArgumentValueError, "bool"),
        ({"nvlink_kernel": "fast"}, ArgumentValueError, "fast"),
        ({"backend": "warp"}, JointValueError, "warp"),
        ({"backend": None}, JointValueError, "NoneType"),
        ({"backend": "nccl"}, UlyssesBackendError, "cpu"),
        ({"backend": "mnnvl"}, UlyssesBackendError, "comm-mnnvl"),
    ],
)
def test_bad_constructor_arguments_name_the_value(
    arguments: dict[str, Any], error: type[CommError], text: str
) -> None:
    """D17: argument errors show with one rank and on the CPU."""
    with pytest.raises(error, match=text) as caught:
        single(**arguments)
    assert isinstance(caught.value, (ValueError, RuntimeError))


def test_the_deprecated_capacity_still_works_and_warns() -> None:
    with pytest.warns(DeprecationWarning, match="max_bytes"):
        comm = single(max_bytes=None, max_elems=10)
    assert comm.max_bytes == 40 and comm.max_elems == 10
    assert single(max_bytes=(2**31 - 1) * 4).max_elems == 2**31 - 1


def construct_badly(group: Any, culprit: int, arguments: dict[str, Any]) -> Any:
    mine = {"max_bytes": 64, "dtype": F32, "device": "cpu", **(arguments if group.rank() == culprit else {})}
    try:
        UlyssesCommunicator(group, **mine)
    except CommError as error:
        outcome: Any = (type(error).__name__, str(error), sorted(getattr(error, "per_rank", {})))
    else:
        outcome = None
    # The group is as good as before: the same ranks construct a communicator that works.
    with UlyssesCommunicator(group, max_bytes=64, dtype=F32, device="cpu") as comm:
        comm.scatter_heads(torch.ones(1, 1, comm.world_size, 1))
    return outcome


@pytest.mark.parametrize(
    "arguments",
    [{"max_bytes": True}, {"max_bytes": 32}, {"dtype": torch.int64}, {"backend": "nccl"}, {"nvlink_kernel": "cake"}],
    ids=lambda arguments: next(iter(arguments)) + "=" + str(next(iter(arguments.values()))),
)
def test_one_rank_with_bad_or_other_arguments_raises_everywhere(ranks: RankPool, arguments: dict[str, Any]) -> None:
    """C8: on every rank with one text, and the group can go on."""
    for size in (2, 4):
        outcomes = ranks.run(construct_badly, size - 1, arguments, ranks=size)
        assert outcomes[0] is not None and len({str(outcome) for outcome in outcomes}) == 1
        assert outcomes[0][0] == "JointValueError" and size - 1 in outcomes[0][2]


def construct_in_two_groups(group: Any) -> Any:
    import torch.distributed as dist

    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank >= 2:
        time.sleep(0.5)
    mine = halves[rank // 2]
    with UlyssesCommunicator(mine, max_bytes=64, dtype=F32, device="cpu") as comm:
        out = comm.scatter_heads(torch.full((1, 1, 2, 1), float(rank)))
    other = halves[1 - rank // 2]
    with contextlib.suppress(CommError):
        UlyssesCommunicator(other, max_bytes=64, dtype=F32, device="cpu")
        return "a stranger got in"
    return out.flatten().tolist()


def test_subgroups_do_not_hear_each_other(ranks: RankPool) -> None:
    """C1: nothing collective runs on WORLD; a process that is no member is told so."""
    values = ranks.run(construct_in_two_groups, ranks=4)
    assert values == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]


# Calls with bad arguments


def x4(*shape: int, dtype: torch.dtype = F32) -> torch.Tensor:
    return torch.ones(shape or (1, 2, 4, 8), dtype=dtype)


BAD_OPERANDS: list[tuple[str, Any, type[CommError], str]] = [
    ("list", [1.0], ArgumentTypeError, "list"),
    ("dtype", x4(dtype=torch.float16), ArgumentValueError, "float16"),
    ("device", torch.empty(1, 2, 4, 8, device="meta"), ArgumentValueError, "meta"),
    ("three dimensions", torch.ones(2, 4, 8), ArgumentValueError, r"\(2, 4, 8\)"),
    ("empty dimension", x4(1, 0, 4, 8), ArgumentValueError, r"\(1, 0, 4, 8\)"),
    ("not contiguous", x4(1, 4, 2, 8).transpose(1, 2), ArgumentValueError, "contiguous"),
    ("expanded", torch.ones(1, 2, 1, 8).expand(1, 2, 4, 8), ArgumentValueError, "contiguous"),
    ("too large", x4(1, 64, 64, 8), ArgumentValueError, "131072 bytes.*max_bytes=65536"),
    ("sparse", torch.ones(1, 2, 4, 8).to_sparse(), ArgumentValueError, "layout"),
]


@pytest.mark.parametrize(("name", "x", "error", "text"), BAD_OPERANDS, ids=[case[0] for case in BAD_OPERANDS])
def test_bad_operands_are_refused_and_leave_the_communicator_usable(
    name: str, x: Any, error: type[CommError], text: str
) -> None:
    with single() as comm:
        for call in (comm.scatter_heads, comm.gather_heads, comm.exchange_chunks):
            with pytest.raises(error, match=text):
                call(x)
        good = x4()
        assert comm.scatter_heads(good) is good


BAD_OUTPUTS: list[tuple[str, Callable[[torch.Tensor], Any], type[CommError], str]] = [
    ("list", lambda x: [x], ArgumentTypeError, "list"),
    ("shape", lambda x: x4(1, 4, 2, 8), ArgumentValueError, r"\(1, 2, 4, 8\), got \(1, 4, 2, 8\)"),
    ("dtype", lambda x: x4(dtype=torch.int32), ArgumentValueError, "int32"),
    ("strides", lambda x: x4(1, 4, 2, 8).transpose(1, 2), ArgumentValueError, "contiguous"),
    ("overlap", lambda x: torch.as_strided(x, x.shape, x.stride(), 0).view(x.shape), ArgumentValueError, "overlap"),
]


@pytest.mark.parametrize(("name", "out", "error", "text"), BAD_OUTPUTS, ids=[case[0] for case in BAD_OUTPUTS])
def test_bad_outputs_are_refused(name: str, out: Any, error: type[CommError], text: str) -> None:
    """D7, V5: a strided output would be filled in storage order without a word."""
    x = x4()
    with single() as comm, pytest.raises(error, match=text):
        comm.scatter_heads(x, out=out(x))


def bad_calls(group: Any) -> list[str]:
    """Run every refused call on two ranks and check that nothing was communicated: the next good call is right."""
    texts: list[str] = []
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        x = x4(2, 3, 4, 8)
        workspace = comm.create_workspace()
        half = UlyssesWorkspace(max_elems=1 << 10, dtype=torch.float16, device="cpu")
        small = UlyssesWorkspace(max_elems=4, dtype=F32, device="cpu")
        band = {"head_offset": 0, "head_count": 1}
        full = x4(2, 3, 4, 8)
        storage = torch.ones(2 * 3 * 4 * 8 * 2)
        attempts: list[Callable[[], Any]] = [
            lambda: comm.scatter_heads(x4(2, 3, 3, 8)),
            lambda: comm.gather_heads(x4(2, 3, 4, 8)),
            lambda: comm.exchange_chunks(x4(1, 1, 3, 8)),
            lambda: comm.exchange_chunks(x4(1, 2, 2, 8)),
            lambda: comm.scatter_heads(x, out=storage[: x.numel()].view(2, 6, 2, 8), workspace=half),
            lambda: comm.scatter_heads(x, workspace=small),
            lambda: comm.scatter_heads(x, workspace=object()),  # type: ignore[arg-type]
            lambda: comm.scatter_heads(workspace.send_buffer[: x.numel()].view(x.shape), workspace=workspace),
            lambda: comm.scatter_heads(
                x, out=workspace.recv_buffer[: x.numel()].view(2, 6, 2, 8), workspace=workspace
            ),
            lambda: comm.scatter_heads(x, dtype=torch.float64),
            lambda: comm.scatter_heads(x, dtype="float32"),  # type: ignore[arg-type]
            lambda: comm.scatter_heads(x, out=x.view(2, 6, 2, 8)),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=2, head_count=1),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=-1, head_count=1),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=True, head_count=1),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=0, head_count=0),
            lambda: comm.scatter_qkv_head_chunk(x, x4(2, 3, 2, 8), x, **band),
            lambda: comm.scatter_qkv_head_chunk(x, x[:, :, :1].expand(2, 3, 4, 8), x, **band),
            lambda: comm.scatter_qkv_head_chunk(x, x, x, **band, out=storage[:288].view(2, 6, 1, 24)[:, :, :, :8]),
            lambda: comm.scatter_qkv_head_chunk(
                storage[:192].view(2, 3, 4, 8), x, x, **band, out=storage[8:296].view(2, 6, 1, 24)
            ),
            lambda: comm.gather_output_head_chunk(x4(2, 6, 2, 8), local_heads=2, head_offset=1, out=full),
            lambda: comm.gather_output_head_chunk(x4(2, 6, 1, 8), local_heads=3, head_offset=0, out=full),
            lambda: comm.gather_output_head_chunk(x4(2, 5, 1, 8), local_heads=2, head_offset=0, out=full),
            lambda: comm.gather_output_head_chunk(x4(2, 6, 1, 8), local_heads=True, head_offset=0, out=full),
            lambda: comm.allocate_output(x, "all_reduce"),
            lambda: comm.allocate_output(x4(2, 3, 3, 8), "scatter_heads"),
            lambda: comm.create_workspace(max_elems=comm.max_elems + 1),
            lambda: comm.create_workspace(max_elems=0),
            lambda: comm.input_buffer(full, (1, 2, 3, 4)),
        ]
        for number, attempt in enumerate(attempts):
            try:
                attempt()
            except CommError as error:
                texts.append(f"{type(error).__name__}: {error}")
            else:
                raise AssertionError(f"attempt {number} was accepted")
            assert comm.bytes_sent == 0
        y = comm.scatter_heads(x * group.rank())
        assert sorted(y.unique().tolist()) == [0.0, 1.0]
    return texts


def test_refused_calls_communicate_nothing_and_say_why(ranks: RankPool) -> None:
    """D1, D3, D4: what does not divide is refused with what would fit, before anything is sent."""
    texts, others = ranks.run(bad_calls, ranks=2)
    assert [text.split(":")[0] for text in texts] == [text.split(":")[0] for text in others]
    joined = "\n".join(texts)
    for needle in (
        "3 heads, which 2 ranks can't share evenly; pad the heads to 4",
        "global sequence of 3",
        "pad to 4",
        "(1, 1, 2, chunk)",
        "holds 4 elements, the call needs 192",
        "grouped-query attention",
        "positive strides",
        "the workspace's send buffer",
        "comm-pcie",
    ):
        assert needle in joined, f"{needle!r} is in none of:\n{joined}"


# Workspaces, outputs, allocation


def workspace_alias(group: Any) -> tuple[bool, bool, bool]:
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        workspace = comm.create_workspace()
        x = torch.full((1, 3, 4, 8), float(group.rank()))
        first = comm.scatter_qkv_head_chunk(x, x, x, head_offset=0, head_count=1, workspace=workspace)
        aliased = first.data_ptr() == workspace.recv_buffer.data_ptr()
        kept = first.clone()
        second = comm.scatter_qkv_head_chunk(x + 5, x, x, head_offset=1, head_count=1, workspace=workspace)
        overwritten = second.data_ptr() == first.data_ptr() and not torch.equal(first, kept)
        batches = x.expand(2, 3, 4, 8).contiguous()
        both = comm.scatter_qkv_head_chunk(
            batches, batches, batches, head_offset=0, head_count=1, workspace=workspace
        )
        return aliased, overwritten, both.data_ptr() != workspace.recv_buffer.data_ptr()


def test_one_batch_with_a_workspace_is_the_receive_buffer_itself(ranks: RankPool) -> None:
    """D13: specified, so that a pipeline pays for no copy; it lives until the workspace is used again."""
    assert ranks.run(workspace_alias, ranks=2) == [(True, True, True)] * 2


def allocations(group: Any, batch: int) -> dict[str, int]:
    """Count the memory events of each call that is given out= and a workspace."""
    counted: dict[str, int] = {}
    with UlyssesCommunicator(group, max_bytes=1 << 16, dtype=F32, device="cpu") as comm:
        workspace = comm.create_workspace()
        x = torch.ones(batch, 4, 4, 8)
        y = torch.empty(batch, 4 * comm.world_size, 4 // comm.world_size, 8)
        z = torch.empty_like(x)
        fused = torch.empty(batch, 4 * comm.world_size, 1, 24)
        chunks = torch.ones(1, 1, comm.world_size, 16)
        chunks_out = torch.empty_like(chunks)
        local = 4 // comm.world_size
        calls: dict[str, Callable[[], Any]] = {
            "scatter_heads": lambda: comm.scatter_heads(x, out=y, workspace=workspace),
            "gather_heads": lambda: comm.gather_heads(y, out=z, workspace=workspace),
            "exchange_chunks": lambda: comm.exchange_chunks(chunks, out=chunks_out),
            "scatter_qkv_head_chunk": lambda: comm.scatter_qkv_head_chunk(
                x, x, x, head_offset=0, head_count=1, out=fused, workspace=workspace
            ),
            "gather_output_head_chunk": lambda: comm.gather_output_head_chunk(
                y[:, :, :1], local_heads=local, head_offset=0, out=z, workspace=workspace
            ),
        }
        for name, call in calls.items():
            call()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
                    call()
            events = [event for event in record.events() if event.cpu_memory_usage > 0]  # type: ignore[union-attr]
            counted[name] = len(events)
    return counted


@pytest.mark.parametrize("batch", [1, 2])
def test_a_call_with_output_and_workspace_allocates_nothing(ranks: RankPool, batch: int) -> None:
    for counted in ranks.run(allocations, batch, ranks=2):
        assert counted == dict.fromkeys(counted, 0)


def test_pack_and_merge_are_the_local_halves_of_the_chunk_calls() -> None:
    g = torch.Generator().manual_seed(1)
    b, s, ranks_, local, d = 2, 3, 4, 3, 5
    fused = torch.randn(b, s, 3, ranks_ * local, d, generator=g)
    q, k, v = (fused[:, :, part] for part in range(3))
    packed = pack_ulysses_qkv_head_chunk(q, k, v, world_size=ranks_, head_offset=1, head_count=2)
    assert packed.shape == (b, s, ranks_ * 2, 3 * d) and packed.is_contiguous()
    for rank in range(ranks_):
        for h in range(2):
            expected = torch.cat([t[:, :, rank * local + 1 + h] for t in (q, k, v)], -1)
            assert torch.equal(packed[:, :, rank * 2 + h], expected)
    out = torch.empty_like(packed)
    assert pack_ulysses_qkv_head_chunk(q, k, v, world_size=ranks_, head_offset=1, head_count=2, out=out) is out
    assert torch.equal(out, packed)
    full = torch.zeros(b, s, ranks_ * local, d)
    for offset, count in ((0, 1), (1, 2)):
        band = torch.cat([q[:, :, r * local + offset : r * local + offset + count] for r in range(ranks_)], 2)
        merge_ulysses_output_head_chunk(
            band.contiguous(), world_size=ranks_, local_heads=local, head_offset=offset, out=full
        )
    assert torch.equal(full, q)
    with pytest.raises(ArgumentValueError, match="overlap"):
        merge_ulysses_output_head_chunk(full, world_size=ranks_, local_heads=local, head_offset=0, out=full)
    with pytest.raises(ArgumentValueError, match="12 heads, which 5 ranks"):
        pack_ulysses_qkv_head_chunk(q, k, v, world_size=5, head_offset=0, head_count=1)


# One rank


def test_one_rank_is_a_passthrough() -> None:
    """D15: no copy and no allocation; an output is filled, and only `x` itself may be its own output."""
    with single() as comm:
        x = torch.randn(1, 3, 2, 4)
        assert comm.backend == "gloo" and comm.transport is None and comm.nvlink_kernel is None
        assert "passthrough" in (comm.fallback_reason or "")
        for call in (comm.scatter_heads, comm.gather_heads):
            assert call(x) is x and call(x, out=x) is x
            out = torch.empty_like(x)
            assert call(x, out=out) is out and torch.equal(out, x)
        chunks = torch.randn(1, 1, 1, 5)
        assert comm.exchange_chunks(chunks) is chunks
        with pytest.raises(ArgumentValueError, match="overlap"):
            comm.scatter_heads(x, out=x.view(x.shape))
        fused = comm.scatter_qkv_head_chunk(x, x * 2, x * 3, head_offset=1, head_count=1)
        assert torch.equal(fused, torch.cat([x, x * 2, x * 3], -1)[:, :, 1:])
        full = torch.zeros(1, 3, 2, 4)
        comm.gather_output_head_chunk(x[:, :, 1:], local_heads=2, head_offset=1, out=full)
        assert torch.equal(full[:, :, 1], x[:, :, 1]) and not full[:, :, 0].any()
        assert comm.bytes_sent == 0


# Checked mode


def checked(group: Any, case: str) -> Any:
    rank = group.rank()
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        x = x4(1, 4, 4, 2)
        bands: dict[str, Callable[[], Any]] = {
            "geometry": lambda: comm.scatter_heads(x.view(1, 8, 2, 2) if rank else x),
            "dtype": lambda: comm.scatter_heads(
                x.view(torch.int32) if rank else x, dtype=torch.int32 if rank else torch.float32
            ),
            "operation": lambda: comm.gather_heads(x) if rank else comm.scatter_heads(x),
            "order": lambda: comm.scatter_qkv_head_chunk(x, x, x, head_offset=rank % 2, head_count=1),
            "rejected": lambda: comm.scatter_heads(x.double() if rank else x),
            "closed": lambda: comm.scatter_heads([x] if rank else x),  # type: ignore[arg-type]
        }
        try:
            bands[case]()
        except CommError as error:
            outcome = f"{type(error).__name__}: {error}"
        else:
            outcome = "accepted"
        assert comm.bytes_sent == 0
        return outcome, comm.scatter_heads(x).shape


@pytest.mark.parametrize("case", ["geometry", "dtype", "operation", "order", "rejected", "closed"])
def test_the_checked_mode_refuses_on_every_rank_what_would_be_garbage(ranks: RankPool, case: str) -> None:
    """V2, V3, V4, D9, D13, C8: torch.distributed alone returns garbage, aborts the process or hangs for these."""
    outcomes = ranks.run(checked, case, ranks=2, env={"COMM_CHECK": "1"})
    for outcome, shape in outcomes:
        assert shape == (1, 8, 2, 2), "the communicator is as good as before"
        assert outcome != "accepted"
    if case in ("rejected", "closed"):
        assert "rank 1" in outcomes[0][0] and outcomes[1][0].startswith("Argument")
    else:
        assert outcomes[0][0].split("(", 1)[1] == outcomes[1][0].split("(", 1)[1]
        assert "rank 0: call 0" in outcomes[0][0] and "rank 1: call 0" in outcomes[0][0]


def skips_a_call(group: Any) -> Any:
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        if group.rank() == 1:
            return None
        started = time.monotonic()
        try:
            comm.scatter_heads(x4(1, 4, 4, 2))
        except GroupTimeoutError as error:
            return error.missing, time.monotonic() - started < 10
        return "accepted"


def test_the_checked_mode_names_a_rank_that_skips_a_call(ranks: RankPool) -> None:
    env = {"COMM_CHECK": "1", "COMM_TIMEOUT_S": "1"}
    assert ranks.run(skips_a_call, ranks=3, env=env) == [((1,), True), None, ((1,), True)]


# Stalls and deaths, without the checked mode


def stalls(group: Any, how: str) -> Any:
    comm = UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu")
    x = x4(1, 4, 4, 2)
    comm.scatter_heads(x)
    if group.rank() == 1:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4)
        return "skipped"
    started = time.monotonic()
    try:
        comm.scatter_heads(x)
    except TransportError as error:
        seconds = time.monotonic() - started
        try:
            comm.scatter_heads(x)
        except TransportError as again:
            broken = "broken since an earlier failure" in str(again)
        comm.close()
        return str(error), seconds, broken
    return "accepted"


@pytest.mark.parametrize("how", ["skips", "dies"])
def test_a_rank_that_is_gone_or_silent_ends_in_an_error_that_names_it(ranks: RankPool, how: str) -> None:
    """F17, V6: torch.distributed waits for its own timeout, minutes by default, and names nobody."""
    outcomes = ranks.run_outcomes(stalls, how, ranks=2, env={"COMM_TIMEOUT_S": "1.5"}, timeout_s=40, fresh=True)
    text, seconds, broken = outcomes[0].value
    assert "no word from rank 1" in text and broken and seconds < 10


# Threads and life cycle


def in_a_call(comm: UlyssesCommunicator) -> contextlib.AbstractContextManager[Halt]:
    """Keep another thread in a call for the block, or until it is let on."""

    def call(halt: Halt) -> None:
        class Slow(torch.Tensor):
            @classmethod
            def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                halt.here()
                return super().__torch_function__(function, types, args, kwargs or {})

        comm.scatter_heads(x4().as_subclass(Slow))

    return halted(call)


def test_two_threads_in_one_communicator_are_refused() -> None:
    """F2: one collective at a time."""
    comm = single()
    with in_a_call(comm), pytest.raises(UnsupportedError, match="another thread"):
        comm.scatter_heads(x4())
    x = x4()
    assert comm.scatter_heads(x) is x


def test_closing_waits_for_a_call_of_another_thread() -> None:
    """What the call launches must not find its memory unmapped."""
    comm = single()
    with in_a_call(comm) as halt:
        with pytest.raises(UnsupportedError, match=r"close: a call .* another thread for 0\.05 s"):
            comm.close(timeout=0.05)
        assert comm._execution.state == "open"
        threading.Timer(0.1, halt.let_on).start()
        comm.close()
    assert comm._execution.state == "closed"


def test_two_threads_that_close_do_it_once() -> None:
    closed: list[float | None] = []
    both = threading.Barrier(2)

    class Session:
        def close(self, timeout_s: float | None) -> None:
            closed.append(timeout_s)
            time.sleep(0.1)

    execution = Execution(thread_groups(1)[0], cast("Any", Session()), "fake", torch.device("cpu"), checked=False)

    def close() -> None:
        both.wait(10)
        execution.close(None)

    threads = [threading.Thread(target=close) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert closed == [None] and execution.state == "closed"


def test_a_closed_communicator_says_so_and_closes_again_quietly() -> None:
    comm = single()
    with comm as same:
        assert same is comm and "open" in repr(comm)
    comm.close()
    assert "closed" in repr(comm) and comm.nvlink_kernel is None
    for call in (
        lambda: comm.scatter_heads(x4()),
        lambda: comm.create_workspace(),
        lambda: comm.allocate_output(x4(), "scatter_heads"),
        lambda: comm.prepare_qkv((1, 2, 3, 64)),
    ):
        with pytest.raises(ClosedError, match="closed"):
            call()


def test_a_known_encoded_call_keeps_the_communicators_promises() -> None:
    """One call at a time, counted and known to autograd; an error of ours refuses it, any other one breaks."""
    made: list[str] = []
    outputs = [torch.zeros(2), torch.zeros(3)]
    with torch.inference_mode():
        outputs.append(torch.zeros(4))

    def fail(error: Exception) -> Callable[[], None]:
        def execute() -> None:
            raise error

        return execute

    with single() as comm:
        launch = comm._host.launch
        launch("scatter_qkv", lambda: made.append("one"), outputs, 24)
        assert made == ["one"] and comm.bytes_sent == 24 and [x._version for x in outputs[:2]] == [1, 1]
        with (
            comm._execution.busy,
            pytest.raises(UnsupportedError, match=r"scatter_qkv: another call .* in another thread"),
        ):
            launch("scatter_qkv", lambda: made.append("two"), outputs, 24)
        with pytest.raises(UnsupportedError, match="not now"):
            launch("scatter_qkv", fail(UnsupportedError("not now")), outputs, 24)
        launch("scatter_qkv", lambda: made.append("three"), outputs, 24)
        with pytest.raises(TransportError, match=r"scatter_qkv over .* failed: OSError: gone"):
            launch("scatter_qkv", fail(OSError("gone")), outputs, 24)
        with pytest.raises(TransportError, match=r"broken since an earlier failure: .* gone"):
            launch("scatter_qkv", lambda: made.append("four"), outputs, 24)
        assert made == ["one", "three"] and comm.bytes_sent == 48 and outputs[0]._version == 2
    with pytest.raises(ClosedError, match="closed"):
        launch("scatter_qkv", lambda: made.append("five"), outputs, 24)


def test_encodings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    # comm-lowp may well be installed here.
    monkeypatch.setattr(codec, "registry", Registry)
    with single() as comm:
        with pytest.raises(CommError, match="pip install comm-lowp"):
            comm.prepare_qkv((1, 2, 4, 64))
        with pytest.raises(CommError, match="quantization must be a str, got int"):
            comm.prepare_qkv((1, 2, 4, 64), quantization=4)
        with pytest.raises(ArgumentTypeError, match="prepare_qkv"):
            comm.scatter_qkv(x4(), x4(), x4(), workspace=object())
        with pytest.raises(UnsupportedError, match="comm-pcie"):
            comm.input_buffer(x4(), (1, 2, 4, 8))


def close_after_destroy(group: Any) -> str:
    """Drop, destroy and close in the wrong order."""
    import torch.distributed as dist

    mine = dist.new_group([0, 1])
    comm = UlyssesCommunicator(mine, max_bytes=64, dtype=F32, device="cpu")
    dropped = UlyssesCommunicator(mine, max_bytes=64, dtype=F32, device="cpu")
    dist.destroy_process_group(mine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del dropped
        gc.collect()
    if group.rank() == 0:
        comm.close()
        comm.close()
    return "fine"


def test_nothing_is_collective_in_finalizers_and_a_local_close_needs_no_group(ranks: RankPool) -> None:
    """E5: the last reference, a destroyed group, a close on one rank only."""
    assert ranks.run(close_after_destroy, ranks=2) == ["fine", "fine"]


# What must not be taken for good


@pytest.mark.parametrize("where", ["x", "out", "query"])
def test_views_that_torch_negates_when_they_are_read_are_refused(where: str) -> None:
    """Bytes are moved as they lie in memory, so the result would have the wrong sign."""
    with single() as comm:
        plain, lazy = (
            torch.ones(1, 2, 2, 3),
            torch.complex(torch.ones(1, 2, 2, 3), torch.ones(1, 2, 2, 3)).conj().imag,
        )
        assert lazy.is_neg()
        with pytest.raises(ArgumentValueError, match=f"{where}.*resolve_neg"):
            if where == "x":
                comm.scatter_heads(torch._neg_view(plain))  # pyright: ignore
            elif where == "out":
                out = torch._neg_view(torch.empty(1, 2, 2, 3))  # pyright: ignore
                comm.scatter_heads(plain, out=out)
            else:
                comm.scatter_qkv_head_chunk(lazy, plain, plain, head_offset=0, head_count=1)
        assert torch.equal(comm.scatter_qkv_head_chunk(*[plain] * 3, head_offset=0, head_count=2)[..., :3], plain)


def crosses_communicators(group: Any) -> str:
    first, second = (UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") for _ in range(2))
    with first, second:
        try:
            (first if group.rank() else second).scatter_heads(torch.zeros(1, 4, 4, 2))
        except JointValueError as error:
            return str(error)
    return "accepted"


def test_the_checked_mode_tells_communicators_of_one_group_apart(ranks: RankPool) -> None:
    outcomes = ranks.run(crosses_communicators, ranks=2, env={"COMM_CHECK": "1"})
    assert outcomes[0] == outcomes[1] and "different calls" in outcomes[0]


def has_no_storage(group: Any) -> tuple[str, bool]:
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        plain = torch.zeros(1, 4, 4, 2)
        x = torch._efficientzerotensor(plain.shape) if group.rank() else plain  # pyright: ignore
        try:
            comm.scatter_heads(x)
        except Exception as error:
            text = type(error).__name__
        else:
            text = "accepted"
        return text, comm.scatter_heads(plain).shape == (1, 8, 2, 2)


def test_the_checked_mode_shares_that_a_tensor_has_no_memory(ranks: RankPool) -> None:
    assert ranks.run(has_no_storage, ranks=2, env={"COMM_CHECK": "1", "COMM_TIMEOUT_S": "5"}) == [
        ("JointValueError", True),
        ("ArgumentValueError", True),
    ]


def outlives_its_group(group: Any) -> Any:
    own = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
    alive = weakref.ref(own)
    comm = UlyssesCommunicator(own, max_bytes=1 << 12, dtype=F32, device="cpu")
    comm.scatter_heads(torch.zeros(1, 4, 4, 2))
    dist.destroy_process_group(own)
    del own
    gc.collect()
    try:
        comm.scatter_heads(torch.zeros(1, 4, 4, 2))
    except TransportError as error:
        text = str(error)
    else:
        text = "accepted"
    comm.close()
    return alive() is None, text


def test_a_communicator_does_not_keep_its_process_group_alive(ranks: RankPool) -> None:
    """E5: one that lives until the interpreter ends aborts the process, in the threads of gloo."""
    for gone, text in ranks.run(outlives_its_group, ranks=2):
        assert gone and "was destroyed" in text


def opens_nothing(group: Any) -> str:
    class Forgetful(Transport):
        name, version, wire, priority = "forgetful", "1", 1, 5

        def assess(self, request: Any, facts: Any) -> Verdict:
            return Verdict(True, "always")

        def open(self, stages: Any, request: Any, plan: Any, device: Any) -> Any:
            return None if group.rank() else DistSession(stages.group, device)

    class Plugin:
        @hookimpl
        def comm_transports(self) -> list[Transport]:
            return [Forgetful()]

    register("forgetful", Plugin())
    try:
        UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu", backend="forgetful")
    except UlyssesBackendError as error:
        return str(error)
    finally:
        unregister("forgetful")
    return "accepted"


def test_a_transport_that_opens_no_session_is_refused_on_every_rank(ranks: RankPool) -> None:
    """D12: without a session a call would return its operand, as with one rank."""
    outcomes = ranks.run(opens_nothing, ranks=2)
    assert outcomes[0] == outcomes[1] and "rank 1: transport 'forgetful': open must return" in outcomes[0]


def test_a_store_that_is_gone_says_so() -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            def fail(*arguments: Any) -> None:
                raise RuntimeError("Connection reset by peer")

            return fail

    store = TorchStore(Gone())  # pyright: ignore[reportArgumentType]
    for call in (lambda: store.set("k", "v"), lambda: store.get("k"), lambda: store.check("k")):
        with pytest.raises(TransportError, match="rank 0 of the job, or torchrun"):
            call()


def test_limits_of_sizes_and_overlaps_are_exact() -> None:
    validation.check_capacity((2**31 - 1, 1, 1, 1), torch.int8, validation.MAX_BYTES, "x")
    with pytest.raises(ArgumentValueError, match="2147483648 elements"):
        validation.check_capacity((2**31, 1, 1, 1), torch.int8, validation.MAX_BYTES, "x")
    storage = torch.zeros(9, dtype=torch.uint8)
    left, right = storage[:5], storage[4:]
    with pytest.raises(ArgumentValueError, match="overlap"):
        validation.check_disjoint(left, "left", right, "right")
    validation.check_disjoint(storage[:4], "left", right, "right")
    odd = torch.empty(2 * 7).as_strided((2, 1, 7, 1), (7, 999, 1, 123))
    assert validation.strides_of(odd) == (7, 7, 1, 1)


def written_versions(group: Any) -> list[bool]:
    """Return whether autograd learns that outputs were written, and that an operand in use by it was not."""
    with UlyssesCommunicator(group, max_bytes=1 << 12, dtype=F32, device="cpu") as comm:
        x = x4(1, 2, 2 * comm.world_size, 3)
        out = torch.empty(1, 2 * comm.world_size, 2, 3)
        before = out._version, x._version
        comm.scatter_heads(x, out=out)
        return [out._version > before[0], x._version == before[1]]


def test_autograd_knows_of_written_outputs(ranks: RankPool) -> None:
    """Its check for tensors that were changed in place would otherwise let wrong gradients through."""
    assert ranks.run(written_versions, ranks=2) == [[True, True]] * 2


def construct_with(group: Any) -> str:
    try:
        UlyssesCommunicator(group, max_bytes=64, dtype=F32, device="cpu")
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def test_a_wrong_variable_on_one_rank_raises_everywhere(ranks: RankPool) -> None:
    outcomes = ranks.run(construct_with, ranks=3, rank_env={1: {"COMM_TIMEOUT_S": "soon"}})
    assert outcomes[0] == outcomes[1] == outcomes[2]
    assert outcomes[0].startswith("JointValueError") and "rank 1" in outcomes[0] and "'soon'" in outcomes[0]
