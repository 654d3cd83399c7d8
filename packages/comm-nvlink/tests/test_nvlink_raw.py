"""The raw entry points without a GPU: ranks are threads, and the module is compiled for the host."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import comm_nvlink
from comm_core import _cuda, jit
from comm_core.errors import ArgumentTypeError, ArgumentValueError, PeerStalledError, UnsupportedError
from comm_core.group import Group
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.testing import reference
from comm_core.testing.host_modules import compile_for_host
from comm_core.testing.ranks import run_threads
from comm_core.testing.reference import assert_same_bits, make_input
from comm_core.windows.signals import SIGNAL_BYTES
from comm_nvlink import dispose_ulysses_a2a, init_ulysses_a2a, raw, ulysses_a2a, ulysses_signal_bytes
from comm_nvlink.launch import FLAG_BYTES, ULYSSES

CPU = torch.device("cpu")
ROOM = 1 << 16


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Module:
    header = Path(__file__).with_name("host_nvlink.h")
    library = compile_for_host(ULYSSES, Path(comm_nvlink.__file__).parent, header, tmp_path_factory.mktemp("host"))
    return Module(ULYSSES, Artifact(ULYSSES.name, "host", library, {"archs": []}, {}))


class Memory:
    """What the caller of the entry points shares: staging and signals of every rank."""

    def __init__(self, size: int) -> None:
        self._kept: list[Any] = []
        self.staging = [self._take(ROOM) for _ in range(size)]
        self.signals = [self._take(ulysses_signal_bytes()) for _ in range(size)]

    def _take(self, nbytes: int) -> int:
        buffer = ctypes.create_string_buffer(nbytes + 127)
        self._kept.append(buffer)
        return -(-ctypes.addressof(buffer) // 128) * 128


@pytest.fixture(autouse=True)
def host(module: Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.CDLL]:
    library = ctypes.CDLL(str(module.artifact.path))
    library.host_problem.restype = ctypes.c_char_p
    zeros = lambda count, dtype, pin_memory: torch.zeros(count, dtype=dtype)  # noqa: E731
    fake = SimpleNamespace(
        device=lambda kind, index: CPU,
        frombuffer=torch.frombuffer,
        uint8=torch.uint8,
        zeros=zeros,
        Tensor=torch.Tensor,
    )
    monkeypatch.setattr(raw, "torch", fake)
    # An allocation is as large as its rank's staging.
    ranges = SimpleNamespace(memory_range=lambda place: (place, ROOM))
    monkeypatch.setattr(raw, "CudaRTLibrary", lambda: ranges)
    monkeypatch.setattr(jit, "load", lambda spec, device: module)
    monkeypatch.setattr(_cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_cuda, "raw_stream", lambda index: 0)
    monkeypatch.setattr(_cuda, "is_capturing", lambda: False)
    yield library
    assert library.host_problem() is None
    assert not raw._handles


def exchanges(group: Group, memory: Memory) -> int:
    rank, size, checked = group.rank, group.size, 0
    handle = init_ulysses_a2a(memory.staging, memory.signals, rank, size, full_nvlink=True)
    for seed, (b, s, h, d) in enumerate([(1, 1, 1, 1), (2, 3, 1, 5), (1, 4, 2, 16), (3, 2, 2, 33)]):
        for dtype in (torch.int8, torch.bfloat16, torch.float32):
            for mode, expect in enumerate((reference.scatter_heads, reference.gather_heads)):
                shape = (b, s * size, h, d) if mode else (b, s, size * h, d)
                everyone = [make_input(seed, peer, shape, dtype) for peer in range(size)]
                wanted = expect(everyone)[rank]
                out = torch.empty_like(wanted)
                ulysses_a2a(handle, everyone[rank], out, b, s, size * h, d, mode)
                assert_same_bits(out, wanted, f"mode {mode} {shape} {dtype} rank {rank}")
                checked += 1
    group.barrier("done")
    dispose_ulysses_a2a(handle)
    with pytest.raises(ArgumentValueError, match="was disposed"):
        dispose_ulysses_a2a(handle)
    return checked


@pytest.mark.parametrize("size", [2, 4, 6, 8])
def test_it_exchanges_what_the_communicator_does(size: int) -> None:
    assert run_threads(size, exchanges, Memory(size), timeout_s=100) == [24] * size


def test_what_a_call_is_given_is_checked() -> None:
    memory = Memory(2)
    handle = init_ulysses_a2a(memory.staging, memory.signals, 0, 2, full_nvlink=True)
    x, y = torch.zeros(1, 4, 2, 8), torch.zeros(1, 8, 1, 8)
    good = [handle, x, y, 1, 4, 2, 8, 0]
    big, bits64 = torch.zeros(1, 4, 2, 1 << 13), torch.zeros(1, 4, 2, 8, dtype=torch.int64)
    wrong: list[tuple[dict[int, Any], type[Exception], str]] = [
        ({0: "1"}, ArgumentTypeError, "must be a handle"),
        ({0: handle + 99}, ArgumentValueError, "is no handle"),
        ({7: 2}, ArgumentValueError, "mode must be 0"),
        ({7: True}, ArgumentTypeError, "mode must be an int, got bool True"),
        ({5: 2.0}, ArgumentTypeError, "H must be an int, got float 2.0"),
        ({3: None}, ArgumentTypeError, "B must be an int, got NoneType"),
        ({5: 3}, ArgumentValueError, "H a multiple of 2"),
        ({4: 0}, ArgumentValueError, "must be positive"),
        ({1: [1]}, ArgumentTypeError, "inp must be a torch.Tensor, got list"),
        ({7: 1}, ArgumentValueError, "inp must be contiguous, of shape"),
        ({1: x.transpose(1, 3).contiguous().transpose(1, 3)}, ArgumentValueError, "with strides"),
        ({1: torch._neg_view(x)}, ArgumentValueError, "resolve_neg"),  # pyright: ignore
        ({2: y.half()}, ArgumentValueError, "one dtype of 1, 2 or 4 bytes"),
        ({1: bits64, 2: bits64.view(1, 8, 1, 8)}, ArgumentValueError, "one dtype of 1, 2 or 4 bytes"),
        ({2: x.view(1, 8, 1, 8)}, ArgumentValueError, "overlap"),
        ({1: big, 2: big.view(1, 8, 1, -1), 6: 1 << 13}, ArgumentValueError, "262144 bytes do not fit the 65536"),
    ]
    for change, error, text in wrong:
        arguments = [change.get(at, value) for at, value in enumerate(good)]
        with pytest.raises(error, match=text):
            ulysses_a2a(*arguments)
    dispose_ulysses_a2a(handle)


def test_a_geometry_is_seen_before_it_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(2)
    handle = init_ulysses_a2a(memory.staging, memory.signals, 0, 2, full_nvlink=True)
    monkeypatch.setattr(_cuda, "is_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="make the call once before the capture"):
        ulysses_a2a(handle, torch.zeros(1, 4, 2, 8), torch.zeros(1, 8, 1, 8), 1, 4, 2, 8, 0)
    dispose_ulysses_a2a(handle)


def test_a_rank_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMM_TIMEOUT_S", "0.3")
    memory = Memory(2)
    handle = init_ulysses_a2a(memory.staging, memory.signals, 1, 2, full_nvlink=True)
    x, y = torch.zeros(1, 4, 2, 8), torch.zeros(1, 8, 1, 8)
    ulysses_a2a(handle, x, y, 1, 4, 2, 8, 0)
    assert y.isnan().all()
    with pytest.raises(PeerStalledError, match=r"rank 0 did not come to scatter_heads .* within 0.3 s") as caught:
        ulysses_a2a(handle, x, y, 1, 4, 2, 8, 0)
    assert (caught.value.waited_for, caught.value.reporter) == (0, 1)
    dispose_ulysses_a2a(handle)


# What is refused before anything is launched


GOOD: dict[str, Any] = {
    "out_ptrs": [1 << 20, 2 << 20],
    "signal_ptrs": [3 << 20, 4 << 20],
    "rank": 1,
    "world_size": 2,
    "full_nvlink": True,
}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rank": True}, ArgumentTypeError, "ints"),
        ({"rank": 2}, ArgumentValueError, "rank 2 of 2"),
        ({"rank": -1}, ArgumentValueError, "rank -1 of 2"),
        ({"world_size": 3}, ArgumentValueError, "world size"),
        ({"full_nvlink": False}, UnsupportedError, "full_nvlink"),
        ({"out_ptrs": [1 << 20]}, ArgumentTypeError, "out_ptrs must be 2 addresses"),
        ({"out_ptrs": 1 << 20}, ArgumentTypeError, "out_ptrs must be 2 addresses .* got 1048576"),
        ({"signal_ptrs": [3 << 20, "x"]}, ArgumentTypeError, "signal_ptrs must be 2 addresses"),
        ({"out_ptrs": [1 << 20, 0]}, ArgumentValueError, "out_ptrs must be aligned to 16 bytes and not 0"),
        ({"out_ptrs": [1 << 20, (2 << 20) + 8]}, ArgumentValueError, "aligned to 16 bytes"),
        ({"signal_ptrs": [3 << 20, (4 << 20) + 64]}, ArgumentValueError, "aligned to 128 bytes"),
    ],
)
def test_bad_arguments_of_init_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        comm_nvlink.init_ulysses_a2a(**{**GOOD, **change})


@pytest.mark.parametrize("handle", [0, 7, -1])
def test_handles_that_were_never_made_are_refused(handle: int) -> None:
    x = torch.empty(1, 2, 2, 4)
    with pytest.raises(ArgumentValueError, match=f"{handle} is no handle"):
        comm_nvlink.ulysses_a2a(handle, x, x, 1, 2, 2, 4, 0)
    with pytest.raises(ArgumentValueError, match=f"{handle} is no handle"):
        comm_nvlink.dispose_ulysses_a2a(handle)


def test_handles_are_ints() -> None:
    with pytest.raises(ArgumentTypeError, match="handle"):
        comm_nvlink.dispose_ulysses_a2a("1")  # pyright: ignore[reportArgumentType]


def test_signals_hold_the_block_and_the_flags() -> None:
    assert comm_nvlink.ulysses_signal_bytes() == SIGNAL_BYTES + FLAG_BYTES
    assert SIGNAL_BYTES % 128 == 0


def test_importing_the_package_imports_no_torch_cuda_code() -> None:
    """The names are there, and the module behind them is imported when one is used."""
    assert {"init_ulysses_a2a", "ulysses_a2a", "dispose_ulysses_a2a"} <= set(dir(comm_nvlink))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = comm_nvlink.nothing_like_this  # pyright: ignore
