"""The all-reduce kernels without a GPU: ranks are threads, and the kernels run as they are (fiber_cuda.h)."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from comm_core.allreduce import launch as launches
from comm_core.allreduce.kernels import WindowAllReduceWorkspace
from comm_core.allreduce.launch import Settings
from comm_core.allreduce.session import ReduceSession
from comm_core.consensus import Transaction
from comm_core.jit.cache import Artifact
from comm_core.jit.loader import Module
from comm_core.testing.host_modules import compile_with_fibers

if TYPE_CHECKING:
    from comm_core.group import Group
    from comm_core.jit.spec import ModuleSpec

__all__ = ["CPU", "ONE_BLOCK", "build", "launched", "meetings", "opened", "set_deadline"]

_Workspace = TypeVar("_Workspace", bound=WindowAllReduceWorkspace)

CPU = torch.device("cpu")
ONE_BLOCK = Settings(1)
"""Blocks run one after the other there, and those of two shots wait for each other."""


def build(spec: ModuleSpec, folder: Path) -> Module:
    """Compile a plugin's module of the all-reduce for the host, and load it as every module is."""
    package = Path(str(importlib.import_module(spec.package).__file__)).parent
    library = compile_with_fibers(spec, package, folder)
    return Module(spec, Artifact(spec.name, "host", library, {"archs": []}, {}))


class _Kernel(ctypes.Structure):
    """Twin: include/comm_core/abi.h, comm_kernel_info."""

    _fields_ = (("name", ctypes.c_char_p), ("function", ctypes.c_void_p))


class _Info(ctypes.Structure):
    """Twin: include/comm_core/abi.h, comm_module_info."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("struct_size", "abi")),
        *((name, ctypes.c_char_p) for name in ("module", "archs")),
        ("structs", ctypes.c_void_p),
        ("kernels", ctypes.POINTER(_Kernel)),
        *((name, ctypes.c_uint32) for name in ("num_structs", "num_kernels")),
    )


def launched(module: Module) -> str:
    """Return the kernel that this thread has launched last, as in ``comm::reduce_kernel<comm::Float32, true>``."""
    library = ctypes.CDLL(str(module.artifact.path))
    library.comm_module_info_v1.restype = ctypes.POINTER(_Info)
    library.host_kernel.restype = ctypes.c_void_p
    info, function = library.comm_module_info_v1().contents, library.host_kernel()
    names = {info.kernels[i].function: info.kernels[i].name.decode() for i in range(info.num_kernels)}
    return names[function]


def meetings(module: Module) -> int:
    """Return how often the lanes of a warp have met in this thread's launches since it last asked."""
    ask = ctypes.CDLL(str(module.artifact.path)).host_meetings
    ask.restype = ctypes.c_uint64
    return int(ask())


@contextlib.contextmanager
def opened(
    cls: type[_Workspace],
    group: Group,
    module: Module,
    nbytes: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    force_oneshot: bool = True,
    settings: Settings = ONE_BLOCK,
    **changes: Any,
) -> Generator[_Workspace]:
    """Open a workspace for operands of `nbytes` on this rank's thread, and destroy it."""
    options: dict[str, Any] = {"form": "in_process", "timeout_s": 30.0, **changes}
    half_bytes = launches.capacity_bytes(group.size, nbytes, force_oneshot, settings.trade_bytes)
    with Transaction(group, "open an all-reduce workspace") as stages:
        session = ReduceSession(stages, module, CPU, half_bytes=half_bytes, settings=settings, **options)
        stages.commit()
    made = cls.around(session, group.size, group.rank, dtype, half_bytes)
    try:
        yield made
    finally:
        made.destroy(10)


def set_deadline(workspace: WindowAllReduceWorkspace, timeout_s: float) -> None:
    """Let this rank's later calls wait no longer than that: opening under a short deadline is another matter."""
    session: Any = workspace._session  # pyright: ignore[reportPrivateUsage]
    session._struct = replace(session._struct, timeout_ns=int(timeout_s * 1e9))
    session._pack()
