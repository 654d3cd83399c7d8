"""Raw memory as a tensor: equal segments at equal distances, seen as the rows of a matrix.

The memory goes to torch as a DLPack tensor of bytes, and torch's own `view` gives it its type. DLPack has no code
that every torch version reads for bfloat16, fp8 or bool, and a wrong one would come back as another type of the same
width; bytes can't be misread.

Two lifetimes end with the storage, and neither needs Python to be called from C. The DLPack structure is freed by its
deleter, which is the C library's `free`: torch calls a deleter in the middle of whatever else is going on, and one
written in Python turns an exception on its way through into "SystemError: error return without exception set". The
owner is an attribute of torch's own storage object, which lives as long as any view.
"""

# pyright: reportUnknownMemberType=false, reportPrivateUsage=false

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch

from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError

__all__ = ["pack_strided_memory"]

_CPU, _CUDA = 1, 2
_UINT = 1
_ADDRESS_LIMIT = 1 << 63
"""Strides and sizes are signed 64-bit numbers in DLPack and in torch."""

_INTEGERS = frozenset(
    {
        torch.bool,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
    }
)


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("dtype_code", ctypes.c_uint8),
        ("dtype_bits", ctypes.c_uint8),
        ("dtype_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _Block(ctypes.Structure):
    """One allocation: what torch reads and frees, and behind it the arrays that it points to."""

    _fields_ = [("managed", _DLManagedTensor), ("shape", ctypes.c_int64 * 2), ("strides", ctypes.c_int64 * 2)]


_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = [ctypes.c_size_t]
_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value

# A prototype of its own: setting the types of `pythonapi.PyCapsule_New` would set them for everybody.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)
_CAPSULE_NAME = b"dltensor"
"""A capsule keeps the pointer to its name, not a copy, so the name must live in a global."""


def pack_strided_memory(
    ptr: int,
    segment_size: int,
    segment_stride: int,
    num_segments: int,
    dtype: torch.dtype,
    dev_id: int,
    *,
    owner: object = None,
) -> torch.Tensor:
    """Return memory as a tensor ``[num_segments, segment_size // itemsize]`` that shares it.

    Row i begins at ``ptr + i * segment_stride`` bytes.

    Args:
        ptr: address of the first segment, a multiple of the itemsize.
        segment_size: bytes of a segment, a multiple of the itemsize.
        segment_stride: bytes from one segment to the next, a multiple of the itemsize and not less than
            `segment_size`. With one segment it has no meaning and may be anything that fits.
        num_segments: how many segments.
        dtype: of the tensor: any floating-point, complex, integer or bool type of at least a byte.
        dev_id: ordinal of the CUDA device whose memory it is, or -1 for host memory.
        owner: kept alive for as long as any tensor uses the memory, views, detached and typed ones included. It must
            not hold the tensor itself, or neither is ever released. Without an owner, the caller must keep the
            memory valid: torch can't know when it is freed.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentValueError: a size or an address that does not fit the rules above.
        UnsupportedError: torch can't use memory of that device.
    """
    for name, value in (
        ("ptr", ptr),
        ("segment_size", segment_size),
        ("segment_stride", segment_stride),
        ("num_segments", num_segments),
        ("dev_id", dev_id),
    ):
        if not isinstance(cast("object", value), int) or isinstance(value, bool):
            raise ArgumentTypeError(f"{name} must be an int, got {value!r} ({type(value).__name__})")
    itemsize = _itemsize(dtype)
    if not ptr > 0:
        raise ArgumentValueError(f"ptr must be an address, got {ptr:#x}")
    if dev_id < -1:
        raise ArgumentValueError(f"dev_id must be a CUDA device ordinal, or -1 for host memory, got {dev_id}")
    for name, value in (("segment_size", segment_size), ("num_segments", num_segments)):
        if value < 1:
            raise ArgumentValueError(f"{name} must be at least 1, got {value}")
    if num_segments == 1:
        segment_stride = segment_size
    if segment_stride < segment_size:
        raise ArgumentValueError(
            f"segments must not overlap: segment_stride must be at least segment_size={segment_size}, "
            f"got {segment_stride}"
        )
    for name, value in (("ptr", ptr), ("segment_size", segment_size), ("segment_stride", segment_stride)):
        if value % itemsize:
            raise ArgumentValueError(
                f"{name} must be a multiple of the {itemsize} bytes of {dtype}, got {value} (remainder "
                f"{value % itemsize})"
            )
    end = ptr + (num_segments - 1) * segment_stride + segment_size
    if end > _ADDRESS_LIMIT:
        raise ArgumentValueError(
            f"the memory would end at {end:#x}, beyond any address: ptr={ptr:#x}, {num_segments} segments of "
            f"{segment_size} bytes at a distance of {segment_stride}"
        )
    tensor = _bytes_tensor(ptr, (num_segments, segment_size), (segment_stride, 1), dev_id).view(dtype)
    if owner is not None:
        # torch keeps a storage's Python object, with its attributes, until the last tensor of the storage is gone.
        cast("Any", tensor.untyped_storage())._comm_core_owner = owner
    return tensor


def _itemsize(dtype: torch.dtype) -> int:
    if not isinstance(cast("object", dtype), torch.dtype):
        raise ArgumentTypeError(f"dtype must be a torch.dtype, got {dtype!r} ({type(dtype).__name__})")
    if not (dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS):
        raise ArgumentValueError(f"dtype must be a plain number type of at least a byte, got {dtype}")
    return dtype.itemsize


def _bytes_tensor(ptr: int, shape: tuple[int, int], strides: tuple[int, int], dev_id: int) -> torch.Tensor:
    if dev_id >= 0:
        _require_cuda(dev_id)
    address = cast("int | None", _libc.malloc(ctypes.sizeof(_Block)))
    if address is None:
        raise MemoryError
    block = _Block.from_address(address)
    block.shape[:] = shape
    block.strides[:] = strides
    pointer = ctypes.POINTER(ctypes.c_int64)
    device = (_CPU, 0) if dev_id < 0 else (_CUDA, dev_id)
    block.managed = _DLManagedTensor(
        _DLTensor(
            ptr, *device, 2, _UINT, 8, 1, ctypes.cast(block.shape, pointer), ctypes.cast(block.strides, pointer), 0
        ),
        None,
        _FREE,
    )
    # If torch refuses, the block (128 bytes) is left alone: torch does not tell whether it has freed it already.
    return torch.from_dlpack(_new_capsule(address, _CAPSULE_NAME, None))


def _require_cuda(dev_id: int) -> None:
    try:
        torch.cuda.init()
        count = torch.cuda.device_count()
    except (AssertionError, RuntimeError) as error:
        raise UnsupportedError(f"dev_id={dev_id} needs torch with a working CUDA: {error}") from error
    if dev_id >= count:
        raise ArgumentValueError(
            f"dev_id must be a CUDA device ordinal below {count}, or -1 for host memory, got {dev_id}"
        )
