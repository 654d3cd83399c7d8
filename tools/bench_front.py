"""What a call costs its thread in Python: a communicator above its transport, and a window session and an all-reduce
above their launches.

All are measured with what is below them left out: a transport that moves nothing, and entry points that pack their
struct and launch nothing. So it needs no GPU, and is the figure that a GPU machine has on top of its launches.
"""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from comm_core import UlyssesCommunicator, _cuda, allreduce_fusion
from comm_core.allreduce.kernels import WindowAllReduceWorkspace
from comm_core.allreduce.launch import Settings
from comm_core.allreduce.module import reduce_module
from comm_core.allreduce.session import ReduceSession
from comm_core.consensus import Transaction
from comm_core.group import Group, thread_groups
from comm_core.jit import Module
from comm_core.jit.spec import ModuleSpec
from comm_core.plugins import register, unregister
from comm_core.plugins.hookspecs import API_VERSION, hookimpl
from comm_core.testing.ranks import run_threads
from comm_core.transport.interface import Properties, Staging, Transport, TransportSession, Verdict
from comm_core.transport.plan import Plan
from comm_core.ulysses import plans
from comm_core.windows.launch import WINDOWS
from comm_core.windows.session import WindowSession

__all__ = ["FULL", "Cost", "measure"]

FULL = "full checks"
"""Name of the column of calls whose geometry can't be known: the operand is an `nn.Parameter`."""
_NAME = "bench-nothing"
_WINDOWS = 32
_REPEAT, _INNER = 15, 1000


class Cost(NamedTuple):
    """Microseconds of one call: what they may be, and, of a communicator's, what they are with the full checks."""

    name: str
    us: float
    goal: float
    full: float | None = None


def _us(call: Callable[..., object], *arguments: object) -> float:
    """Return the median over repeats of the thread's time for one call; what was first seen is left out."""
    call(*arguments)
    times: list[float] = []
    for _ in range(_REPEAT):
        started = time.thread_time()
        for _ in range(_INNER):
            call(*arguments)
        times.append((time.thread_time() - started) / _INNER)
    return statistics.median(times) * 1e6


class _Nothing(TransportSession):
    """Moves nothing."""

    properties = Properties(peer_pointers=True)

    def exchange(
        self,
        plan: Plan,
        sources: Sequence[torch.Tensor],
        destination: torch.Tensor,
        *,
        staging: Staging | None = None,
    ) -> None:
        pass

    def all_gather_small(self, value: torch.Tensor, out: torch.Tensor) -> None:
        pass

    def barrier(self) -> None:
        pass


class _NothingTransport(Transport):
    name, version, wire, priority = _NAME, "1", 1, 0

    def assess(self, request: object, facts: object) -> Verdict:
        return Verdict(True, "for measurements")

    def open(self, stages: object, request: object, plan: object, device: object) -> TransportSession:
        return _Nothing()


class _Plugin:
    comm_api = API_VERSION

    @hookimpl
    def comm_transports(self) -> list[Transport]:
        return [_NothingTransport()]


def _open(group: Group) -> UlyssesCommunicator:
    return UlyssesCommunicator(group, max_bytes=1 << 16, dtype=torch.bfloat16, device="cpu", backend=_NAME)


def _communicator() -> list[Cost]:
    register(_NAME, _Plugin())
    try:
        comm, other = run_threads(2, _open)
    finally:
        unregister(_NAME)
    costs: list[Cost] = []
    with comm, other:
        workspace = comm.create_workspace()
        x = torch.ones(1, 8, 4, 16, dtype=torch.bfloat16)
        y, z = torch.empty(1, 16, 2, 16, dtype=x.dtype), torch.empty_like(x)
        chunks = torch.ones(1, 1, 2, 64, dtype=x.dtype)
        received = torch.empty_like(chunks)
        query, key, value = torch.ones(1, 8, 4, 3, 16, dtype=x.dtype).unbind(3)
        fused = torch.empty(1, 16, 1, 48, dtype=x.dtype)
        calls: dict[str, tuple[float, torch.Tensor, Callable[[torch.Tensor], object]]] = {
            "scatter_heads": (5.0, x, lambda x: comm.scatter_heads(x, out=y)),
            "scatter_heads, a workspace": (8.0, x, lambda x: comm.scatter_heads(x, out=y, workspace=workspace)),
            "gather_heads": (5.0, y, lambda y: comm.gather_heads(y, out=z)),
            "exchange_chunks": (5.0, chunks, lambda chunks: comm.exchange_chunks(chunks, out=received)),
            "scatter_qkv_head_chunk": (
                8.0,
                query,
                lambda query: comm.scatter_qkv_head_chunk(query, key, value, head_offset=0, head_count=1, out=fused),
            ),
            "gather_output_head_chunk": (
                8.0,
                y[:, :, :1],
                lambda band: comm.gather_output_head_chunk(band, local_heads=2, head_offset=1, out=z),
            ),
        }
        for name, (goal, operand, call) in calls.items():
            parameter = torch.nn.Parameter(operand, requires_grad=False)
            costs.append(Cost(name, _us(call, operand), goal, _us(call, parameter)))
    return costs


class _Packs:
    """A module whose entry points pack their struct, as those of a real one do, and launch nothing."""

    def __init__(self, spec: ModuleSpec) -> None:
        self.spec = spec

    def bind(self, entry_point: str) -> Callable[..., None]:
        pack = struct.Struct(self.spec.structs[self.spec.entry_points[entry_point]]).pack

        def call(*fields: float) -> None:
            pack(0, 1, *fields)

        return call

    def bind_parts(self, entry_point: str) -> tuple[Callable[..., bytes], Callable[[bytes], None]]:
        pack = struct.Struct(self.spec.structs[self.spec.entry_points[entry_point]]).pack

        def run(packed: bytes) -> None:
            pass

        return partial(pack, 0, 1), run


class _Unlaunched(WindowSession):
    """A session that is not tested when it is opened, since nothing is launched."""

    def _self_test(self) -> None:
        pass


@contextmanager
def _stream_of_its_own() -> Iterator[None]:
    """Let `_cuda` find a current stream, over the path that it takes with a GPU."""
    real = _cuda.source
    fake = SimpleNamespace(
        _C=SimpleNamespace(_cuda_getCurrentRawStream=lambda index: 0),  # pyright: ignore[reportUnknownLambdaType]
        cuda=SimpleNamespace(is_initialized=lambda: False),
    )
    _cuda.source = lambda: fake
    try:
        yield
    finally:
        _cuda.source = real


def _window_session() -> Cost:
    plan = plans.scatter_heads((1, 8, 4, 16), 2, 0, 1)
    sources = (torch.zeros(plan.target_bytes, dtype=torch.uint8),)
    with _stream_of_its_own():
        with Transaction(thread_groups(1)[0], "open a window session") as stages:
            module = cast("Module", cast("Any", _Packs(WINDOWS)))
            session = _Unlaunched(
                stages,
                module,
                torch.device("cpu"),
                form="in_process",
                staging_bytes=1 << 12,
                timeout_s=20.0,
                blocks_per_peer=1,
            )
            stages.commit()
        windows = [session.window(plan.target_bytes) for _ in range(_WINDOWS)]
        out = windows[_WINDOWS // 2].local
        cost = Cost(
            f"exchange of a session with {_WINDOWS} windows", _us(lambda: session.exchange(plan, sources, out)), 4.0
        )
        session.close()
    return cost


class _UnlaunchedReduce(ReduceSession):
    """As `_Unlaunched`."""

    def _self_test(self) -> None:
        pass


class _Reduces(WindowAllReduceWorkspace):
    """An all-reduce that launches nothing."""

    name = _NAME


def _allreduce() -> list[Cost]:
    costs: list[Cost] = []
    spec = reduce_module("comm_nothing")
    half_bytes = 1 << 20
    with _stream_of_its_own():
        with Transaction(thread_groups(1)[0], "open an all-reduce session") as stages:
            session = _UnlaunchedReduce(
                stages,
                cast("Module", cast("Any", _Packs(spec))),
                torch.device("cpu"),
                half_bytes=half_bytes,
                settings=Settings(264, clusters=True),
                form="in_process",
                timeout_s=20.0,
            )
            stages.commit()
        with _Reduces.around(session, 1, 0, torch.bfloat16, half_bytes) as workspace:
            x = torch.ones(4, 512, dtype=torch.bfloat16)
            residual, total, norm = (torch.ones_like(x) for _ in range(3))
            gamma = torch.ones(512, dtype=x.dtype)
            encoded, scale = torch.empty(4, 512, dtype=torch.float8_e4m3fn), torch.ones(1)

            def fused(x: torch.Tensor, pattern: int, encoded: torch.Tensor | None = None) -> None:
                allreduce_fusion(
                    x,
                    workspace,
                    pattern,
                    residual_in=residual,
                    rms_gamma=gamma,
                    residual_out=total,
                    norm_out=norm,
                    quant_out=encoded,
                    scale_factor=scale,
                )

            calls: dict[str, tuple[float, Callable[[torch.Tensor], object]]] = {
                "allreduce_fusion": (5.0, lambda x: allreduce_fusion(x, workspace, 0, output=norm)),
                "allreduce_fusion, residual and norm": (7.0, lambda x: fused(x, 1)),
                "allreduce_fusion, norm and FP8": (8.0, lambda x: fused(x, 4, encoded)),
            }
            for name, (goal, call) in calls.items():
                parameter = torch.nn.Parameter(x, requires_grad=False)
                costs.append(Cost(name, _us(call, x), goal, _us(call, parameter)))
    return costs


def measure() -> list[Cost]:
    """Return the costs of every kind of call, with an output, of a window session's exchange, and of all-reduces."""
    return [*_communicator(), _window_session(), *_allreduce()]
