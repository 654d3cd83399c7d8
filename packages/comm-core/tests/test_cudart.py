"""CudaRTLibrary: which library it finds, what it passes to C, and what it makes of an error code."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from comm_core.errors import ArgumentTypeError, ArgumentValueError, CudaCallError, UnsupportedError
from comm_core.memory.cudart import CudaRTLibrary, cudaIpcMemHandle_t


@pytest.fixture
def cuda(so_file: Path) -> Iterator[CudaRTLibrary]:
    library = CudaRTLibrary(str(so_file))
    yield library
    fake = ctypes.CDLL(str(so_file))
    assert fake.fake_allocations() == 0
    fake.fake_fail(b"", 0, 0, 0)


@pytest.fixture
def fake(so_file: Path) -> ctypes.CDLL:
    """The controls of the same library."""
    return ctypes.CDLL(str(so_file))


def test_memory_is_allocated_set_copied_and_freed(cuda: CudaRTLibrary, fake: ctypes.CDLL) -> None:
    """Addresses are accepted in both forms that callers have them in."""
    pointer = cuda.cudaMalloc(64)
    assert pointer.value is not None
    cuda.cudaMemset(pointer, 0x107, 64)
    cuda.cudaMemset(pointer.value + 32, 9, 32)
    host = (ctypes.c_uint8 * 64)()
    cuda.cudaMemcpy(ctypes.addressof(host), pointer, 64)
    assert bytes(host) == b"\x07" * 32 + b"\x09" * 32
    assert fake.fake_allocations() == 1
    cuda.cudaFree(pointer.value)
    cuda.cudaDeviceSynchronize()


def test_a_handle_is_cudas_64_bytes_and_arrives_whole(cuda: CudaRTLibrary) -> None:
    """It is passed by value: a struct of another size is another calling convention."""
    assert ctypes.sizeof(cudaIpcMemHandle_t) == 64
    pointer = cuda.cudaMalloc(4096)
    handle = cuda.cudaIpcGetMemHandle(pointer)
    # The fake first checks a sum over all 64 bytes, and then refuses its own handles, as CUDA does.
    for form in (handle, bytes(handle)):
        with pytest.raises(CudaCallError, match="invalid device context") as caught:
            cuda.cudaIpcOpenMemHandle(form)
        assert caught.value.code == 201
    damaged = bytearray(bytes(handle))
    damaged[63] ^= 1
    with pytest.raises(
        CudaCallError, match="cudaIpcOpenMemHandle failed with CUDA error 400: invalid resource handle"
    ):
        cuda.cudaIpcOpenMemHandle(bytes(damaged))
    with pytest.raises(ArgumentValueError, match="64 bytes, got 63"):
        cuda.cudaIpcOpenMemHandle(bytes(handle)[:63])
    with pytest.raises(ArgumentTypeError, match="got int"):
        cuda.cudaIpcOpenMemHandle(7)  # type: ignore[arg-type]
    with pytest.raises(CudaCallError, match="cudaIpcCloseMemHandle"):
        cuda.cudaIpcCloseMemHandle(pointer)
    cuda.cudaFree(pointer)


def test_an_error_says_call_code_and_text_and_leaves_nothing_behind(cuda: CudaRTLibrary, fake: ctypes.CDLL) -> None:
    """A code that stays in the runtime is reported by torch's next kernel launch as its own failure."""
    fake.fake_fail(b"cudaMalloc", 1, 1, 2)
    first = cuda.cudaMalloc(16)
    with pytest.raises(CudaCallError) as caught:
        cuda.cudaMalloc(16)
    assert (caught.value.call, caught.value.code) == ("cudaMalloc", 2)
    assert str(caught.value) == "cudaMalloc failed with CUDA error 2: out of memory"
    assert isinstance(caught.value, RuntimeError)
    assert fake.cudaPeekAtLastError() == 0
    cuda.cudaFree(first)
    with pytest.raises(CudaCallError, match="cudaFree failed with CUDA error 1: invalid argument"):
        cuda.cudaFree(first)
    with pytest.raises(CudaCallError, match="CUDA error 101: invalid device ordinal"):
        cuda.CUDART_CHECK(101)
    cuda.CUDART_CHECK(0)
    assert cuda.cudaGetErrorString(2) == "out of memory"


def test_the_device_is_put_back(cuda: CudaRTLibrary) -> None:
    """Code around a guarded call must find its own device current again, an exception or not."""
    assert cuda.cudaGetDeviceCount() > 3
    cuda.cudaSetDevice(1)
    with pytest.raises(KeyError), cuda.device(3):
        assert cuda.cudaGetDevice() == 3
        raise KeyError
    assert cuda.cudaGetDevice() == 1
    with pytest.raises(CudaCallError, match="cudaSetDevice"), cuda.device(99):
        pass
    assert cuda.cudaGetDevice() == 1
    cuda.cudaSetDevice(0)


@pytest.mark.parametrize("flags", [(), ("-DFAKE_CUDART_OLD",)], ids=["since CUDA 12.5", "before"])
def test_an_address_is_traced_to_its_allocation(
    build_fake_cudart: Callable[..., Path], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A handle maps the whole allocation, so an address inside of it needs base and offset."""
    library = build_fake_cudart(tmp_path, *flags)
    cuda, fake = CudaRTLibrary(str(library)), ctypes.CDLL(str(library))
    fake.fake_skew(ctypes.c_size_t(512))
    pointer = cuda.cudaMalloc(1000).value
    assert pointer is not None
    assert cuda.memory_range(pointer + 3) == (pointer - 512, 1512)
    with pytest.raises(CudaCallError, match="cudaIpcGetMemHandle"):
        cuda.cudaIpcGetMemHandle(pointer)
    cuda.cudaIpcGetMemHandle(pointer - 512)
    cuda.cudaFree(pointer)
    with pytest.raises(CudaCallError, match="cuMemGetAddressRange failed with CUDA error 1"):
        cuda.memory_range(pointer)


@pytest.mark.parametrize(
    ("method", "arguments", "error", "words"),
    [
        ("cudaMalloc", (True,), ArgumentTypeError, "size must be an int, got True"),
        ("cudaMalloc", (0,), ArgumentValueError, "size must be at least 1, got 0"),
        ("cudaMalloc", (1.5,), ArgumentTypeError, "got 1.5"),
        ("cudaFree", (None,), ArgumentTypeError, "devPtr must be an int, got None"),
        ("cudaFree", (-1,), ArgumentValueError, "devPtr must be at least 0, got -1"),
        ("cudaFree", (1 << 64,), ArgumentValueError, "devPtr must be an address, got 0x10000000000000000"),
        ("cudaMemcpy", (1, 1, -1), ArgumentValueError, "count must be at least 0, got -1"),
        ("cudaSetDevice", ("0",), ArgumentTypeError, "device must be an int, got '0'"),
    ],
)
def test_a_wrong_argument_never_reaches_c(
    cuda: CudaRTLibrary, method: str, arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    """ctypes would truncate or wrap some of these silently."""
    with pytest.raises(error, match=words):
        getattr(cuda, method)(*arguments)


def _run(code: str, *path: Path) -> str:
    """Run `code` in a fresh process that finds packages in `path` first; return what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, path), *sys.path])}
    program = "from comm_core.memory.cudart import CudaRTLibrary\nimport ctypes, sys\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _packages(folder: Path) -> Path:
    """Return a folder with a torch and an nvidia package that bring no CUDA runtime, whatever is really installed."""
    for place in ("torch/lib", "nvidia/cuda_runtime/lib", "nvidia/cu13/lib"):
        (folder / place).mkdir(parents=True)
    for package in ("torch", "nvidia"):
        (folder / package / "__init__.py").touch()
    return folder


@pytest.mark.parametrize(
    "name", ["libcudart.so.13", "libcudart.so.12.8.90", "libcudart-d0da41ae.so.11.0", "libcudart.so"]
)
def test_the_loaded_library_is_preferred(so_file: Path, tmp_path: Path, name: str) -> None:
    """Another copy would have device and errors of its own."""
    packages = _packages(tmp_path / "site")
    shutil.copy(so_file, packages / "torch/lib/libcudart.so.13")
    loaded = tmp_path / "some where" / name
    loaded.parent.mkdir()
    shutil.copy(so_file, loaded)
    code = f"""
        ctypes.CDLL({str(loaded)!r})
        print(CudaRTLibrary().so_file, "torch" in sys.modules)
    """
    assert _run(code, packages) == f"{loaded} False"


@pytest.mark.parametrize("place", ["torch/lib", "nvidia/cuda_runtime/lib", "nvidia/cu13/lib"])
def test_else_torch_or_its_wheels_bring_it(so_file: Path, tmp_path: Path, place: str) -> None:
    """Before torch has touched CUDA nothing is loaded; the copy that it will load is the right one."""
    packages = _packages(tmp_path)
    wanted = packages / place / "libcudart.so.13"
    shutil.copy(so_file, wanted)
    for decoy in ("libcudart_static.so.13", "libcudart.so.13.bak", "mylibcudart.so"):
        (packages / place / decoy).write_text("not a library")
    assert _run("print(CudaRTLibrary().so_file)", packages) == str(wanted)


def test_a_machine_without_cuda_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    """And importing the module there is no error."""
    packages = _packages(tmp_path)
    code = """
        from comm_core.errors import UnsupportedError
        try:
            CudaRTLibrary()
        except UnsupportedError as error:
            print(error)
    """
    text = _run(code, packages)
    for word in (
        "torch with CUDA",
        "/proc/self/maps",
        *(str(packages / p) for p in ("torch/lib", "nvidia/cu13/lib")),
    ):
        assert word in text


def test_a_library_that_is_no_runtime_is_refused(tmp_path: Path) -> None:
    """The error names the file, and the function that it lacks."""
    with pytest.raises(UnsupportedError, match=r"missing.so.*can't be loaded"):
        CudaRTLibrary(str(tmp_path / "missing.so"))
    with pytest.raises(UnsupportedError, match=r"libc.so.6' is no CUDA runtime: it has no cudaSetDevice"):
        CudaRTLibrary("libc.so.6")
    with pytest.raises(ArgumentTypeError, match="PosixPath"):
        CudaRTLibrary(tmp_path)  # type: ignore[arg-type]
