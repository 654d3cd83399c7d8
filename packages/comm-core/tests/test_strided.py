"""pack_strided_memory: the right type over the right bytes, an owner that lives as long as the memory is used."""

from __future__ import annotations

import ctypes
import gc
import mmap
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_core.errors import ArgumentTypeError, ArgumentValueError, CommError, UnsupportedError
from comm_core.memory.strided import pack_strided_memory

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e8m0fnu,
    torch.complex32,
    torch.complex64,
    torch.complex128,
]


class Owner:
    """Memory of its own, 16-byte aligned and more, filled with a byte pattern."""

    def __init__(self, nbytes: int) -> None:
        self.map = mmap.mmap(-1, nbytes)
        self.map[:] = bytes((i * 7 + 1) % 251 for i in range(nbytes))
        self.view = (ctypes.c_uint8 * nbytes).from_buffer(self.map)
        self.address = ctypes.addressof(self.view)


@given(st.sampled_from(DTYPES), st.integers(1, 6), st.integers(1, 5), st.integers(0, 3), st.integers(0, 2))
def test_every_dtype_sees_the_bytes_that_are_there(
    dtype: torch.dtype, segments: int, elements: int, gap: int, start: int
) -> None:
    """A 16-bit type must not come back as another 16-bit type, and each row begins where it was said to."""
    item = dtype.itemsize
    size, stride = elements * item, (elements + gap) * item
    owner = Owner(start * item + segments * stride)
    got = pack_strided_memory(owner.address + start * item, size, stride, segments, dtype, -1, owner=owner)
    assert (got.dtype, tuple(got.shape), got.device) == (dtype, (segments, elements), torch.device("cpu"))
    assert got.data_ptr() == owner.address + start * item
    for i in range(segments):
        begin = start * item + i * stride
        expected = torch.frombuffer(bytearray(owner.map[begin : begin + size]), dtype=torch.uint8)
        assert torch.equal(got.view(torch.uint8)[i], expected)
    got.view(torch.uint8)[-1].zero_()
    begin = start * item + (segments - 1) * stride
    assert owner.map[begin : begin + size] == bytes(size), "it shares the memory, it does not copy it"


def test_values_are_the_types_own() -> None:
    """The widths alone would not tell bfloat16 from float16, or e4m3 from e5m2."""
    owner = Owner(16)
    for dtype, pattern, value in [
        (torch.bfloat16, b"\x80\x3f", 1.0),
        (torch.float16, b"\x00\x3c", 1.0),
        (torch.float8_e4m3fn, b"\x38", 1.0),
        (torch.float8_e5m2, b"\x3c", 1.0),
        (torch.bool, b"\x01", True),
        (torch.complex64, b"\x00\x00\x80\x3f\x00\x00\x00\x40", 1 + 2j),
    ]:
        owner.map[: len(pattern)] = pattern
        got = pack_strided_memory(owner.address, len(pattern), len(pattern), 1, dtype, -1, owner=owner)
        assert got.item() == value


def _views(tensor: torch.Tensor) -> list[Callable[[], Any]]:
    return [
        lambda: tensor[1],
        lambda: tensor.t()[1:],
        lambda: tensor.detach(),
        lambda: tensor.view(torch.uint8),
        lambda: tensor.as_strided((2,), (1,)),
        lambda: tensor.untyped_storage(),
        lambda: tensor.numpy(),
        lambda: torch.from_dlpack(tensor),
        lambda: tensor.__dlpack__(),
    ]


@pytest.mark.parametrize("which", range(len(_views(torch.empty(1)))))
def test_the_owner_lives_as_long_as_any_view_and_no_longer(which: int) -> None:
    """Freeing memory under a view corrupts it; keeping it for ever leaks it."""
    owner = Owner(64)
    gone = weakref.ref(owner)
    tensor = pack_strided_memory(owner.address, 16, 32, 2, torch.float32, -1, owner=owner)
    view = _views(tensor)[which]()
    del owner, tensor
    gc.collect()
    assert gone() is not None
    del view
    assert gone() is None


def test_without_an_owner_nothing_is_kept() -> None:
    """The caller said that it keeps the memory itself."""
    owner = Owner(32)
    gone = weakref.ref(owner)
    tensor = pack_strided_memory(owner.address, 16, 16, 2, torch.int32, -1)
    del owner
    assert gone() is None
    del tensor


def test_creating_many_does_not_grow() -> None:
    """Twenty thousand forgotten descriptors would be two megabytes and more."""
    owner = Owner(64)

    def make(times: int) -> int:
        for _ in range(times):
            pack_strided_memory(owner.address, 16, 32, 2, torch.bfloat16, -1, owner=owner)[1].sum()
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = make(2000)
    assert make(20000) - before < 1 << 20


def test_an_exception_passes_through_unharmed() -> None:
    """Tensors are released while an exception is on its way; a deleter that calls Python would replace it."""
    owner = Owner(64)

    def make(*_: object) -> torch.Tensor:
        return pack_strided_memory(owner.address, 16, 32, 2, torch.int8, -1, owner=owner)

    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        make(make(), fail())
    with pytest.raises(KeyError, match="mine"):
        _ = [make(), fail()]
    with pytest.raises(KeyError, match="mine"):
        list(make() if i < 2 else fail() for i in range(3))


def test_a_tensor_may_outlive_the_interpreter() -> None:
    """A tensor in a global is released when everything else is already gone."""
    code = """
        import ctypes, torch
        from comm_core.memory.strided import pack_strided_memory
        class Owner:
            memory = (ctypes.c_uint8 * 64)()
            def __del__(self):
                print("released", flush=True)
        tensor = pack_strided_memory(ctypes.addressof(Owner.memory), 16, 32, 2, torch.int8, -1, owner=Owner())
        torch.kept = tensor[1]
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"segment_size": 6}, ValueError, ["segment_size", "multiple of the 4 bytes of torch.float32", "got 6"]),
        ({"segment_stride": 18}, ValueError, ["segment_stride", "got 18", "remainder 2"]),
        ({"ptr": 4098}, ValueError, ["ptr", "got 4098", "remainder 2"]),
        ({"ptr": 4104, "dtype": torch.complex128, "segment_stride": 16}, ValueError, ["ptr", "16 bytes"]),
        ({"segment_stride": 8}, ValueError, ["must not overlap", "segment_size=16", "got 8"]),
        ({"segment_stride": -16}, ValueError, ["got -16"]),
        ({"num_segments": 0}, ValueError, ["num_segments", "got 0"]),
        ({"segment_size": 0}, ValueError, ["segment_size", "got 0"]),
        ({"ptr": 0}, ValueError, ["ptr", "0x0"]),
        ({"num_segments": 1 << 60}, ValueError, ["beyond any address", str(1 << 60)]),
        ({"segment_stride": 1 << 63}, ValueError, ["beyond any address"]),
        ({"dev_id": -2}, ValueError, ["dev_id", "-2"]),
        ({"dtype": torch.quint8}, ValueError, ["dtype", "torch.quint8"]),
        ({"dtype": torch.bits8}, ValueError, ["dtype", "torch.bits8"]),
        ({"dtype": "float32"}, TypeError, ["dtype", "'float32'", "str"]),
        ({"ptr": True}, TypeError, ["ptr", "True", "bool"]),
        ({"num_segments": 2.0}, TypeError, ["num_segments", "2.0", "float"]),
        ({"ptr": ctypes.c_void_p(4096)}, TypeError, ["ptr", "c_void_p"]),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    """Rounding down, as a plain division would, shows the wrong memory."""
    arguments: dict[str, Any] = {
        "ptr": 4096,
        "segment_size": 16,
        "segment_stride": 32,
        "num_segments": 2,
        "dtype": torch.float32,
        "dev_id": -1,
    }
    with pytest.raises(error) as caught:
        pack_strided_memory(**{**arguments, **change})
    assert isinstance(caught.value, CommError)
    assert isinstance(caught.value, ArgumentTypeError if error is TypeError else ArgumentValueError)
    for word in words:
        assert word in str(caught.value)


def test_one_segment_needs_no_stride() -> None:
    """A stride between fewer than two segments means nothing, so none is wrong."""
    owner = Owner(32)
    got = pack_strided_memory(owner.address, 32, 0, 1, torch.int64, -1, owner=owner)
    assert got.shape == (1, 4)
    assert got.is_contiguous()


@pytest.mark.skipif(torch.cuda.is_available(), reason="asserts what happens where torch has no CUDA")
def test_memory_of_a_device_that_torch_can_not_use() -> None:
    """The owner is not kept by a tensor that never existed."""
    owner = Owner(32)
    with pytest.raises(UnsupportedError, match="dev_id=0 needs torch with a working CUDA"):
        pack_strided_memory(owner.address, 16, 16, 2, torch.int8, 0, owner=owner)
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None
