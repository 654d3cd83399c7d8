"""The libraries of rdma-core, loaded when they are needed: functions to call, or the reason why there are none."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, NamedTuple

from comm_core.errors import CommError, JitBuildError, UnsupportedError
from comm_pcie.rdma.module import RDMA

if TYPE_CHECKING:
    import torch

    from comm_core.jit import Call, Module

__all__ = ["LIBRARY", "VARIABLES", "LoadedVerbs", "VerbsApi", "VerbsLibraries", "load_verbs"]

LIBRARY = "COMM_VERBS_LIBRARY"
"""Environment variable: a library that is loaded in place of libibverbs and libmlx5. For tests with an emulator."""

VARIABLES = {LIBRARY: "path of a library that stands in for libibverbs and libmlx5, for tests with an emulator"}
"""Name -> what it does."""

_ANY_ARCH = ("9.0a",)
"""What the module is built for where no device and no list says: it has no code for a GPU."""

_NAMES_BYTES = 1 << 16


class VerbsLibraries(NamedTuple):
    """Where the two libraries of rdma-core are loaded from; for tests an emulator's path, twice.

    Attributes:
        ibverbs: file name or path of libibverbs.
        mlx5: of libmlx5.
    """

    ibverbs: str = "libibverbs.so.1"
    mlx5: str = "libmlx5.so.1"

    @classmethod
    def default(cls) -> VerbsLibraries:
        """Return what ``COMM_VERBS_LIBRARY`` names (one path for both; for tests), else the system's."""
        path = os.environ.get(LIBRARY, "")
        return cls(path, path) if path else cls()


class VerbsApi:
    """The loaded functions of libibverbs and libmlx5, and the module that calls them. Never unloaded.

    Attributes:
        libraries: where they came from.
        call: name of an entry point without ``comm_pcie_rdma_`` and ``_v1`` -> the function.
    """

    def __init__(self, module: Module, libraries: VerbsLibraries) -> None:
        self.libraries = libraries
        self.call: dict[str, Call] = {
            name.removeprefix("comm_pcie_rdma_").removesuffix("_v1"): module.bind(name) for name in RDMA.entry_points
        }
        handle = ctypes.c_void_p()
        paths = [os.fsencode(path) + b"\0" for path in libraries]
        texts = [ctypes.create_string_buffer(path) for path in paths]
        self.call["load"](*map(ctypes.addressof, texts), ctypes.addressof(handle))
        self.handle = handle.value or 0

    def devices(self) -> tuple[str, ...]:
        """Return the names of the RDMA devices, as libibverbs lists them; empty where it finds none."""
        names = ctypes.create_string_buffer(_NAMES_BYTES)
        self.call["devices"](self.handle, ctypes.addressof(names), _NAMES_BYTES)
        return tuple(names.value.decode(errors="replace").split())


class LoadedVerbs(NamedTuple):
    """What `load_verbs` found.

    Attributes:
        api: the functions, or None.
        reason: why not: a missing header, library or symbol, with the Debian package that has it; else empty.
    """

    api: VerbsApi | None
    reason: str = ""


def load_verbs(
    libraries: VerbsLibraries | None = None,
    *,
    device: torch.device | None = None,
    module: Module | None = None,
    timeout_s: float | None = None,
) -> LoadedVerbs:
    """Load the module of the engine (built if need be) and the libraries. Raises nothing for what is missing.

    Args:
        libraries: None is `VerbsLibraries.default()`.
        device: for which architecture to look for the module in a cache; None without a GPU.
        module: the loaded module, where the caller has it.
        timeout_s: of building; None is ``COMM_JIT_TIMEOUT_S``.
    """
    try:
        loaded = _load_module(device, timeout_s) if module is None else module
        return LoadedVerbs(VerbsApi(loaded, VerbsLibraries.default() if libraries is None else libraries))
    except JitBuildError as error:
        lacking = " ".join(error.lacking)
        why = f"the headers of rdma-core are missing: apt-get install {lacking}" if lacking else str(error)
        return LoadedVerbs(None, why)
    except UnsupportedError as error:
        # The text of the C side names the library or symbol and its package.
        return LoadedVerbs(None, str(error).removeprefix("comm_pcie_rdma_load_v1: "))
    except CommError as error:
        return LoadedVerbs(None, str(error))


def _load_module(device: torch.device | None, timeout_s: float | None) -> Module:
    from comm_core import _env
    from comm_core.jit import load

    archs = _ANY_ARCH if device is None and _env.cuda_arch_list() is None else None
    return load(RDMA, device, archs=archs, timeout_s=timeout_s)
