"""What several test files of comm-core need: the CUDA runtime whose memory is shared memory of this host."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

_SOURCE = Path(__file__).with_name("fake_cudart.c")


def _build(folder: Path, *flags: str) -> Path:
    library = folder / "libcudart.so.13"
    command = ["gcc", "-std=gnu11", "-Wall", "-Wextra", "-Werror", "-O1", "-fPIC", "-shared", *flags]
    subprocess.run([*command, "-o", str(library), str(_SOURCE), "-lrt"], check=True, timeout=60)
    return library


@pytest.fixture(scope="session")
def build_fake_cudart() -> Callable[..., Path]:
    """Return what compiles the fake runtime into a folder, with further flags, and returns the library."""
    return _build


@pytest.fixture(scope="module")
def so_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake runtime in a folder of this module's own: its state lives in the library that is loaded."""
    return _build(tmp_path_factory.mktemp("a folder with spaces"))
