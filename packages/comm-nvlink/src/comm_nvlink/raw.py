"""The raw entry points: one exchange kernel over memory that the caller shares and owns.

They decide nothing and agree on nothing: the caller has verified that all pairs of ranks are connected by NVLink,
shares the memory, and makes the same calls on all ranks. `UlyssesCommunicator` does all of that.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from comm_core import _cuda, _env, jit
from comm_core.errors import ArgumentTypeError, ArgumentValueError, PeerStalledError, UnsupportedError
from comm_core.memory.cudart import CudaRTLibrary
from comm_core.transport.plan import Plan
from comm_core.ulysses import plans
from comm_core.windows.launch import SessionStruct, WindowStruct
from comm_core.windows.signals import RECORD_BYTES, SIGNAL_BYTES, Operation, read_stall
from comm_nvlink.launch import FLAG_BYTES, MAX_PEERS, NO_SOURCES, ULYSSES, Calls, State
from comm_nvlink.routes import route, settings
from comm_nvlink.table import compile_table

__all__ = ["GATHER", "SCATTER", "dispose_ulysses_a2a", "init_ulysses_a2a", "ulysses_a2a", "ulysses_signal_bytes"]

SCATTER, GATHER = 0, 1
"""What `mode` may be."""
_SIZES = (2, 4, 6, 8)
_ONLY_SMS = 1 << 62
"""No exchange has so many bytes that it would use the copy engines, whose destinations nobody agrees on here."""

_handles: dict[int, _Raw] = {}
_numbers = itertools.count(1)
_lock = threading.Lock()


def ulysses_signal_bytes() -> int:
    """Return the bytes that each pointer of `signal_ptrs` must have."""
    return SIGNAL_BYTES + FLAG_BYTES


class _Raw:
    """One handle: the state of its exchanges, and their tables."""

    def __init__(self, staging: Sequence[int], signals: Sequence[int], rank: int, device: torch.device) -> None:
        self.rank, self.size, self.device = rank, len(staging), device
        self.staging = staging[rank]
        base, nbytes = CudaRTLibrary().memory_range(self.staging)
        self.capacity = base + nbytes - self.staging
        self.timeout_s = _env.timeout_s()
        self.calls = Calls(jit.load(ULYSSES, device))
        # Nobody says which ranks share a GPU, so it may be all of them where any may.
        sharing = self.size if _env.allow_shared_gpu() else 1
        self.settings = replace(settings(self.size, sharing), engine_bytes=_ONLY_SMS)
        self.tables: dict[Plan, tuple[torch.Tensor, tuple[int, ...]]] = {}
        packed = WindowStruct.pack(self.capacity, staging)
        self.windows = torch.frombuffer(bytearray(packed), dtype=torch.uint8).to(device)
        self.host_windows = ctypes.create_string_buffer(packed, len(packed))
        self.record = torch.zeros(RECORD_BYTES, dtype=torch.uint8, pin_memory=True)
        self.record_bytes = (ctypes.c_char * RECORD_BYTES).from_address(self.record.data_ptr())
        struct = SessionStruct(
            rank, signals, self.windows.data_ptr(), self.record.data_ptr(), int(self.timeout_s * 1e9),
            _env.on_stall() == "poison",
        )  # fmt: skip
        self.session = ctypes.create_string_buffer(struct.pack(1))
        self.state = State(
            session=ctypes.addressof(self.session),
            windows=ctypes.addressof(self.host_windows),
            flags=(ctypes.c_void_p * MAX_PEERS)(*(pointer + SIGNAL_BYTES for pointer in signals)),
        )
        _cuda.synchronize(device)

    def check(self) -> None:
        stall = read_stall(self.record_bytes.raw)
        if stall is not None:
            raise PeerStalledError(
                f"rank {self.rank}: rank {stall.waited_for} did not come to {stall.operation_text} (operation "
                f"{stall.epoch}) within {self.timeout_s:g} s (COMM_TIMEOUT_S), as rank {stall.reporter} found; this "
                "handle can't be used any more on any rank",
                stall.waited_for,
                stall.reporter,
            )

    def prepared(self, plan: Plan) -> tuple[torch.Tensor, tuple[int, ...]]:
        found = self.tables.get(plan)
        if found is None:
            if _cuda.is_capturing():
                raise UnsupportedError(
                    f"{plan.operation}: this geometry is seen for the first time while a graph is captured: make the "
                    "call once before the capture"
                )
            way = route(plan, self.settings)
            table = compile_table(plan, way)
            data = torch.frombuffer(bytearray(table.data), dtype=torch.uint8).to(self.device)
            _cuda.synchronize(self.device)
            after = (int(Operation.of(plan.operation)), way.senders, way.copiers, 0, 0, table.record_bytes, 0)
            self.tables[plan] = found = (data, after)
        return found


def init_ulysses_a2a(
    out_ptrs: Sequence[int], signal_ptrs: Sequence[int], rank: int, world_size: int, full_nvlink: bool
) -> int:
    """Make a handle for `ulysses_a2a` over memory that all ranks share. Local, on the current device.

    Args:
        out_ptrs: device address of every rank's staging as mapped here, in rank order: at least the bytes of an
            operand each.
        signal_ptrs: the same for signals: `ulysses_signal_bytes()` each, aligned to 128 bytes and zero before the
            first call of any rank.
        rank: this rank.
        world_size: 2, 4, 6 or 8.
        full_nvlink: whether all pairs of ranks are connected by NVLink, which the caller has verified. Ranks that
            share a GPU, for tests, need ``COMM_ALLOW_SHARED_GPU=1`` on every rank, or their kernels do not fit it.

    Returns:
        The handle, an int above 0.

    Raises:
        ArgumentTypeError: an argument is something else.
        ArgumentValueError: a value can't be used.
        UnsupportedError: `full_nvlink` is false.
    """
    if type(rank) is not int or type(world_size) is not int:
        raise ArgumentTypeError(f"rank and world_size must be ints, got {rank!r} and {world_size!r}")
    if world_size not in _SIZES or not 0 <= rank < world_size:
        raise ArgumentValueError(f"rank {rank} of {world_size}: the world size must be one of {_SIZES}")
    if not full_nvlink:
        raise UnsupportedError("the kernel needs NVLink between all pairs of ranks (full_nvlink=True)")
    for name, pointers, alignment in (("out_ptrs", out_ptrs, 16), ("signal_ptrs", signal_ptrs, 128)):
        if (
            not isinstance(pointers, Sequence)  # pyright: ignore[reportUnnecessaryIsInstance]
            or len(pointers) != world_size
            or any(type(pointer) is not int for pointer in pointers)
        ):
            raise ArgumentTypeError(
                f"{name} must be {world_size} addresses (ints), one of each rank, got {pointers!r}"
            )
        if any(pointer <= 0 or pointer % alignment for pointer in pointers):
            raise ArgumentValueError(
                f"{name} must be aligned to {alignment} bytes and not 0, got {', '.join(map(hex, pointers))}"
            )
    device = torch.device("cuda", _cuda.current_device())
    raw = _Raw(list(out_ptrs), list(signal_ptrs), rank, device)
    with _lock:
        handle = next(_numbers)
        _handles[handle] = raw
    return handle


def ulysses_a2a(
    fa: int,
    inp: torch.Tensor,
    out: torch.Tensor,
    B: int,
    S_local: int,
    H: int,
    D: int,
    mode: int,
) -> None:
    """Exchange through the staging, on the current stream. Collective; all ranks make the same calls in one order.

    The calls of a handle must follow each other: the caller orders the streams and threads that it makes them in.

    Args:
        fa: from `init_ulysses_a2a`.
        inp: contiguous ``[B, S_local, H, D]`` for `SCATTER`, ``[B, S_local * W, H / W, D]`` for `GATHER`; elements of
            1, 2 or 4 bytes.
        out: contiguous, of the other of the two shapes and the same dtype; must not overlap `inp`.
        B: batch.
        S_local: sequence of one rank.
        H: heads of all ranks, a multiple of the world size.
        D: head dimension.
        mode: `SCATTER` (0) or `GATHER` (1).

    Raises:
        ArgumentTypeError: an argument is something else.
        ArgumentValueError: the tensors don't fit the sizes, the staging or each other.
        PeerStalledError: a rank did not come to an earlier call.
    """
    raw = _find(fa)
    # What is equal to an int without being one (True, 2.0) would go on into the plan.
    for name, value in (("B", B), ("S_local", S_local), ("H", H), ("D", D), ("mode", mode)):
        if type(value) is not int:
            raise ArgumentTypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if mode not in (SCATTER, GATHER):
        raise ArgumentValueError(f"mode must be 0 (scatter) or 1 (gather), got {mode!r}")
    if min(B, S_local, H, D) < 1 or H % raw.size:
        raise ArgumentValueError(f"sizes ({B}, {S_local}, {H}, {D}) must be positive, and H a multiple of {raw.size}")
    shapes = ((B, S_local, H, D), (B, S_local * raw.size, H // raw.size, D))
    for name, tensor, shape in (("inp", inp, shapes[mode]), ("out", out, shapes[1 - mode])):
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tuple(tensor.shape) != shape or not tensor.is_contiguous() or tensor.device != raw.device:
            raise ArgumentValueError(
                f"{name} must be contiguous, of shape {shape} on {raw.device}; got {tuple(tensor.shape)} with "
                f"strides {tensor.stride()} on {tensor.device}"
            )
        if tensor.is_neg() or tensor.is_conj():
            raise ArgumentValueError(
                f"{name} is a view that torch negates or conjugates only when it is read: call .resolve_neg() or "
                ".resolve_conj()"
            )
    nbytes = inp.numel() * inp.element_size()
    if inp.dtype != out.dtype or inp.element_size() not in (1, 2, 4):
        raise ArgumentValueError(
            f"inp and out must have one dtype of 1, 2 or 4 bytes, got {inp.dtype} and {out.dtype}"
        )
    if nbytes > raw.capacity:
        raise ArgumentValueError(
            f"rank {raw.rank}: {nbytes} bytes do not fit the {raw.capacity} of out_ptrs[{raw.rank}]: make a handle "
            "over larger allocations, or exchange less at once"
        )
    if inp.data_ptr() < out.data_ptr() + nbytes and out.data_ptr() < inp.data_ptr() + nbytes:
        raise ArgumentValueError("inp and out overlap")
    raw.check()
    build = plans.scatter_heads if mode == SCATTER else plans.gather_heads
    plan = build(shapes[mode], inp.element_size(), raw.rank, raw.size)
    table, after = raw.prepared(plan)
    with _cuda.device_guard(raw.device):
        raw.calls.exchange(
            _cuda.raw_stream(raw.device.index), ctypes.addressof(raw.state), table.data_ptr(), 0, 0, inp.data_ptr(),
            *NO_SOURCES[1], raw.staging, out.data_ptr(), 0, nbytes, 0, 0, 0, 0, *after,
        )  # fmt: skip


def dispose_ulysses_a2a(fa: int) -> None:
    """Release a handle. Waits for the device; the shared memory stays the caller's. Local.

    Raises:
        ArgumentValueError: `fa` is no handle, or was disposed before.
    """
    raw = _find(fa)
    _cuda.synchronize(raw.device)
    with _lock:
        _handles.pop(fa, None)


def _find(fa: object) -> _Raw:
    if type(fa) is not int:
        raise ArgumentTypeError(f"fa must be a handle from init_ulysses_a2a, got {fa!r}")
    with _lock:
        raw = _handles.get(fa)
    if raw is None:
        raise ArgumentValueError(f"{fa} is no handle from init_ulysses_a2a, or was disposed")
    return raw
