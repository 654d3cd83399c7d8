"""Pipelines: every combination of encoder and transport gives the same bytes, and which one is taken is agreed.

Ranks are threads; transports are sessions over memory of this process, with the properties of real ones. Kernels are
stood in for by PyTorch behind their interface; `test_lowp_kernels_host` runs the real code.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core.consensus import joint
from comm_core.errors import ArgumentValueError, JitBuildError, JointError, TransportError, UnsupportedError
from comm_core.group import Group
from comm_core.testing.ranks import run_threads, run_threads_outcomes
from comm_core.transport import strided
from comm_core.transport.interface import Properties, TransportSession
from comm_core.transport.plan import Plan
from comm_core.ulysses.codec import CodecHost, EncodedCall
from comm_core.windows.signals import MAX_RANKS
from comm_lowp import kernels as kernels_module
from comm_lowp import pipeline, qkv
from comm_lowp.kernels import Final, Scratch
from comm_lowp.sage2 import dispatch, primitives, reference
from comm_lowp.sage2.grid import Grid
from comm_lowp.testing import oracle
from comm_lowp.testing.cases import Case, check, make, simulate

FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale")
CASE = Case(3, 2, 1, 70, 131, 64, torch.bfloat16, "sage2_sm89_sm120", "graded")

MANY_HEADS = Case(2, 12, 30, 1, 2, 64, layout=CASE.layout)
"""Its statistics are more than a small gather takes."""


class Hub:
    """What the sessions of all ranks share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=20)


class HubSession(TransportSession):
    """Executes plans between threads; strict about where outputs lie, if it registers them."""

    def __init__(self, hub: Hub, rank: int, properties: Properties) -> None:
        self.hub, self.rank, self.properties = hub, rank, properties
        self.registered: list[int] = []
        self.calls: list[str] = []

    def _meet(self, value: Any) -> list[Any]:
        self.hub.slots[self.rank] = value
        self.hub.barrier.wait()
        values = list(self.hub.slots)
        self.hub.barrier.wait()
        return values

    def exchange(
        self, plan: Plan, sources: Sequence[torch.Tensor], destination: torch.Tensor, *, staging: Any = None
    ) -> None:
        if self.properties.registered_outputs and destination.data_ptr() not in self.registered:
            raise TransportError("the output is not registered")
        self.calls.append(plan.operation)
        targets = self._meet(destination)
        for copy in plan.sends:
            strided.copy_local([copy], sources, targets[copy.peer])
        self.hub.barrier.wait()

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        self.calls.append("all_gather_small")
        out.copy_(torch.stack([x.flatten() for x in self._meet(value)]).view_as(out))
        self.hub.barrier.wait()

    def barrier(self) -> None:
        self.hub.barrier.wait()

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        out = torch.empty(tuple(shape), dtype=dtype)
        self.registered.append(out.data_ptr())
        return out


class WindowedSession(HubSession):
    """As one over windows: kernels can be handed what they need to store into the peers' memory."""

    def launch_context(self) -> tuple[int, int]:
        return 0, 0


def memory(address: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)


class TorchKernels:
    """The interface of `comm_lowp.kernels.Kernels`, in PyTorch."""

    def __init__(self) -> None:
        self.contexts: dict[int, Any] = {}

    def scratch(self, grid: Grid, dtype: torch.dtype) -> Scratch:
        none = torch.zeros(0)
        return Scratch(none, none, none, torch.zeros(grid.batch_size, grid.heads, grid.q_slots), none)

    def final(self, grid: Grid, dtype: torch.dtype) -> Final:
        b, h, d = grid.batch_size, grid.heads, grid.head_dim
        return Final(
            torch.zeros(b, h, d, dtype=dtype),
            torch.zeros(b, h, grid.q_slots),
            torch.zeros(b, h, grid.k_slots),
            torch.zeros(b, h, d),
        )

    def statistics(self, q: Any, k: Any, v: Any, grid: Grid, flat: Any, scratch: Scratch, *, pdl: Any = None) -> None:
        some = next(x for x in (q, k, v) if x is not None)
        out = torch.empty(grid.statistics_elems) if flat is None else flat
        blank = torch.zeros_like(some)
        q, k, v = (blank if x is None else x for x in (q, k, v))
        context = primitives.torch_statistics(q, k, v, grid, out)
        scratch.q_amax.copy_(context.partials.q_amax)
        self.contexts[scratch.q_amax.data_ptr()] = context

    def finalize(
        self, gathered: Any, scratch: Scratch, grid: Grid, final: Final, *, own_v_scale: Any = None, pdl: Any = None
    ) -> None:
        stats = primitives.torch_final(gathered, self.contexts[scratch.q_amax.data_ptr()])
        for target, value in zip(final, primitives._final(stats), strict=True):
            target.copy_(value)
        if own_v_scale is not None:
            own_v_scale.copy_(stats.v_scale.chunk(grid.world_size, dim=1)[grid.rank])

    def k_grouped_amax(self, mean: Any, scratch: Scratch, grid: Grid, out: Any, *, pdl: Any = None) -> None:
        context = self.contexts[scratch.q_amax.data_ptr()]
        out.copy_(primitives._k_amax(context.partials.k_minmax, mean, grid))

    def quant_pack(
        self,
        q: Any,
        k: Any,
        v: Any,
        final: Sequence[Any],
        grid: Grid,
        to: Sequence[int],
        *,
        pdl: Any = None,
    ) -> None:
        spec = grid.payload
        send = torch.stack([memory(address, spec.chunk_bytes) for address in to])
        if q is not None:
            primitives._write_q(q, final[1], send, spec, grid)
        if k is not None:
            primitives._write_kv(k, v, final[0], final[2], final[3], send, spec, grid)
        for address, chunk in zip(to, send, strict=True):
            memory(address, spec.chunk_bytes).copy_(chunk)

    def unpack(self, received: Any, grid: Grid, outs: Sequence[Any], *, pdl: Any = None) -> None:
        primitives.torch_unpack(received, grid, outs)

    def direct(self, session: Any, grid: Grid, dtype: torch.dtype) -> Any:
        encoder = pipeline.KernelEncoder(self, grid, dtype)  # type: ignore[arg-type]
        host = SimpleNamespace(session=session, device=torch.device("cpu"), dtype=dtype)
        return pipeline.ExchangePipeline(host, grid, lambda: encoder)  # type: ignore[arg-type]


def host_of(group: Group, session: Any, case: Case = CASE) -> CodecHost:
    def run(operation: str, prepare: Any, *arguments: Any) -> object:
        call = prepare(*arguments)
        assert isinstance(call, EncodedCall)
        return call.execute()

    def launch(operation: str, execute: Any, outputs: Any, sent_bytes: int) -> None:
        execute()

    return CodecHost(group, session, "hub", torch.device("cpu"), case.dtype, 1 << 24, False, run, launch)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_LOWP_LAYOUT", CASE.layout)


PLAIN = Properties()
STAGED = Properties(staging=True)
REGISTERED = Properties(registered_outputs=True)
POINTERS = Properties(peer_pointers=True, shared_resources=True)


def exchange(group: Group, hub: Hub, session: type[HubSession], properties: Properties, case: Case) -> Any:
    rank = group.rank
    mine = session(hub, rank, properties)
    host = host_of(group, mine, case)
    workspace = qkv.prepare(host, (case.batch, case.rows, case.heads, case.head_dim), case.used)
    q, k, v = (x[:, rank * case.rows : (rank + 1) * case.rows] for x in make(case))
    before = len(mine.calls)
    encoded = workspace.scatter_qkv(host, q, k, v, None)
    calls = mine.calls[before:]
    again = workspace.scatter_qkv(host, q, k, v, encoded)
    assert again is encoded
    return [oracle.raw(x).copy() for x in encoded[:6]], calls, workspace.route


@pytest.mark.parametrize(
    ("with_kernels", "session", "properties", "route"),
    [
        (False, HubSession, PLAIN, "exchange"),
        (False, HubSession, STAGED, "exchange"),
        (False, HubSession, REGISTERED, "exchange"),
        (False, WindowedSession, POINTERS, "exchange"),
        (True, HubSession, PLAIN, "exchange"),
        (True, HubSession, REGISTERED, "exchange"),
        (True, HubSession, POINTERS, "exchange"),
        (True, WindowedSession, POINTERS, "direct"),
    ],
)
@pytest.mark.parametrize(
    "case", [CASE, Case(2, 12, 30, 1, 2, 64, layout=CASE.layout)], ids=["small", "large_statistics"]
)
def test_every_encoder_over_every_kind_of_transport_gives_the_same_bytes(
    monkeypatch, with_kernels, session, properties, route, case
):
    made = TorchKernels()
    monkeypatch.setattr(qkv, "kernels_for", lambda device, size: made if with_kernels else None)
    results = run_threads(case.ranks, exchange, Hub(case.ranks), session, properties, case)
    inputs = make(case)
    expected = oracle.encode(*inputs, case.layout, case.used, oracle.mean_of(inputs[1], case.ranks, case.used))
    for rank, (arrays, calls, taken) in enumerate(results):
        assert taken == route
        # Two collectives, and no other.
        assert calls == ["all_gather_small", "exchange_chunks"]
        for name, mine in zip(FIELDS, arrays, strict=True):
            oracle.assert_same_bytes(mine, oracle.heads_of(name, expected[name], case.ranks, rank), f"{rank} {name}")


def test_a_rank_without_kernels_keeps_all_from_the_direct_route(monkeypatch):
    """What one rank launches the others wait for: the route is the group's."""
    made = TorchKernels()

    def here(device: Any, size: int) -> Any:
        return None if threading.current_thread().name == "rank 1" else made

    monkeypatch.setattr(qkv, "kernels_for", here)
    results = run_threads(3, exchange, Hub(3), WindowedSession, POINTERS, CASE)
    assert [taken for _, _, taken in results] == ["exchange"] * 3
    inputs = make(CASE)
    expected = oracle.encode(*inputs, CASE.layout, CASE.used, oracle.mean_of(inputs[1], 3, CASE.used))
    for rank, (arrays, _, _) in enumerate(results):
        for name, array in zip(FIELDS, arrays, strict=True):
            oracle.assert_same_bytes(array, oracle.heads_of(name, expected[name], 3, rank), f"{rank} {name}")


def prepare_only(group: Group, hub: Hub, properties: Properties) -> Any:
    return qkv.prepare(host_of(group, HubSession(hub, group.rank, properties)), (1, 8, 3, 64), None)


def test_a_transport_that_moves_no_bytes_is_refused_on_every_rank():
    """K10."""
    outcomes = run_threads_outcomes(3, prepare_only, Hub(3), Properties(itemsizes=frozenset({2, 4})))
    for outcome in outcomes:
        assert "moves no single bytes" in str(outcome.exception)


class JointSession(HubSession):
    """As one over windows: all ranks allocate an output together."""

    group: Group

    def allocate_output(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        joint(self.group, "allocate an output", lambda: None)
        return super().allocate_output(shape, dtype, device)


def prepare_twice(group: Group, hub: Hub, case: Case) -> list[str]:
    session = JointSession(hub, group.rank, REGISTERED)
    session.group = group
    outcomes = []
    for _ in range(2):
        try:
            qkv.prepare(host_of(group, session, case), (case.batch, case.rows, case.heads, case.head_dim), None)
        except JointError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("prepared")
    return outcomes


@pytest.mark.parametrize("case", [CASE, MANY_HEADS], ids=["small", "large_statistics"])
@pytest.mark.parametrize("with_kernels", [False, True])
@pytest.mark.parametrize("after", range(2))
def test_memory_that_one_rank_lacks_is_told_by_all_alike(monkeypatch, case, with_kernels, after):
    """What ranks allocate together comes first: none waits there for a rank that has failed alone."""
    real, calls = torch.empty, []

    def empty(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if threading.current_thread().name == "rank 1":
            calls.append(None)
            if len(calls) == own + after + 1:
                raise MemoryError("there is no more")
        return real(*arguments, **keywords)

    # The outputs of this stand-in are made by the same function; theirs is a joint failure of its own.
    own = 2 if case is MANY_HEADS else 1
    made = TorchKernels()
    monkeypatch.setattr(qkv, "kernels_for", lambda device, size: made if with_kernels else None)
    monkeypatch.setattr(torch, "empty", empty)
    outcomes = run_threads(case.ranks, prepare_twice, Hub(case.ranks), case, group_timeout_s=3)
    assert outcomes == [["prepare_qkv: allocate: rank 1: MemoryError: there is no more", "prepared"]] * case.ranks


# The primitives over kernels


def test_the_primitives_hand_over_to_kernels(monkeypatch):
    """With the interface of the kernels behind them, all bytes are the same."""
    inputs = make(CASE)
    plain = simulate(CASE, inputs)
    made = TorchKernels()
    monkeypatch.setattr(primitives, "kernels_for", lambda device, size=1: made)
    run = simulate(CASE, inputs)
    check(run, inputs)
    assert all(torch.equal(a, b) for a, b in zip(run.sent, plain.sent, strict=True))
    mean = simulate(CASE, inputs, mean=plain.mean)
    assert all(torch.equal(a, b) for a, b in zip(mean.sent, plain.sent, strict=True))
    k, v = (x[:, :70].contiguous() for x in inputs[1:])
    sums, maxima = primitives.k_sum_v_amax(k, v)
    assert torch.equal(sums, reference.k_sum(k)) and torch.equal(maxima, reference.v_amax(v))
    spec = run.final[1].grid.payload
    send = torch.full((3, spec.chunk_bytes), 0x77, dtype=torch.uint8)
    q, k, v = (x[:, 70:140].contiguous() for x in inputs)
    where = {"rank": 1, "world_size": 3, "layout": CASE.layout}
    final = run.final[1]
    primitives.quant_q_into_payload(q, final.q_amax, send, spec, **where)
    mean, _, k_amax, v_scale = primitives._final(final)
    primitives.quant_kv_into_payload(k, v, mean, k_amax, v_scale, send, spec, **where)
    assert torch.equal(send, plain.sent[1])


# Which implementation


CUDA = torch.device("cuda", 0)


def test_kernels_are_for_cuda_devices_and_can_be_switched_off(monkeypatch):
    loaded = object()
    monkeypatch.setattr(kernels_module, "load", lambda device: loaded)
    assert dispatch.kernels_for(torch.device("cpu")) is None
    assert dispatch.kernels_for(CUDA) is loaded and dispatch.kernels_for(CUDA, MAX_RANKS) is loaded
    assert dispatch.kernels_for(CUDA, MAX_RANKS + 1) is None
    monkeypatch.setenv("COMM_LOWP_KERNELS", "require")
    with pytest.raises(UnsupportedError, match=f"at most {MAX_RANKS} ranks"):
        dispatch.kernels_for(CUDA, MAX_RANKS + 1)
    monkeypatch.setenv("COMM_LOWP_KERNELS", "off")
    assert dispatch.kernels_for(CUDA) is None
    monkeypatch.setenv("COMM_LOWP_KERNELS", "never")
    with pytest.raises(ArgumentValueError, match="try, require or off"):
        dispatch.kernels_for(CUDA)


def test_kernels_that_can_not_be_built_are_said_once_or_raise(monkeypatch, caplog):
    def broken(device: torch.device) -> Any:
        raise JitBuildError("no nvcc was found: set COMM_NVCC")

    monkeypatch.setattr(kernels_module, "load", broken)
    monkeypatch.setattr(dispatch, "_warned", set())
    with caplog.at_level(logging.WARNING, "comm_lowp"):
        assert dispatch.kernels_for(CUDA) is None and dispatch.kernels_for(CUDA) is None
    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == ["cuda:0"]
    assert "PyTorch encodes instead" in caplog.text and "no nvcc was found" in caplog.text
    monkeypatch.setenv("COMM_LOWP_KERNELS", "require")
    with pytest.raises(JitBuildError, match="no nvcc"):
        dispatch.kernels_for(CUDA)


@pytest.mark.parametrize(
    ("capability", "layout"),
    [("9.0", "sage2_sm90"), ("8.9", "sage2_sm89_sm120"), ("12.0", "sage2_sm89_sm120"), ("8.0", None), ("10.0", None)],
)
def test_the_device_decides_the_layout(monkeypatch, capability, layout):
    from comm_core import _cuda

    monkeypatch.setattr(_cuda, "normalize_device", lambda device: CUDA)
    monkeypatch.setattr(_cuda, "device_properties", lambda index: SimpleNamespace(compute_capability=capability))
    found = primitives.capability()
    assert (found["layout"], found["available"], found["compute_capability"]) == (
        layout,
        layout is not None,
        capability,
    )
    if layout is None:
        assert capability in found["reason"] and "9.0" in found["reason"] and "sage2_sm90" in found["reason"]
        with pytest.raises(UnsupportedError, match="Name a layout"):
            primitives.find_layout(None, CUDA)
        assert primitives.find_layout("sage2_sm90", CUDA).name == "sage2_sm90"
    else:
        assert primitives.find_layout(None, CUDA).name == layout
