"""What will be run: how many ranks on what, and over which part of the picture."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comm_core.errors import ArgumentValueError, CommError

__all__ = [
    "PATCH",
    "Crop",
    "Placement",
    "cores",
    "crop",
    "find_picture",
    "gpu_count",
    "picture_rgb",
    "picture_size",
    "place",
]

PATCH = 16
"""Pixels of a token's side."""
DEFAULT_RANKS = 4
_PICTURE = Path("mpl-data/sample_data/grace_hopper.jpg")
_NVIDIA = (Path("/dev/nvidiactl"), Path("/proc/driver/nvidia"), Path("/dev/dxg"))


@dataclass(frozen=True)
class Placement:
    """Which ranks run where.

    Attributes:
        ranks: how many.
        device: ``"cpu"`` or ``"cuda"``; rank r takes GPU ``r % gpus``.
        gpus: GPUs that are used.
        group_backend: of torch.distributed.
        shared: whether ranks share a GPU.
        why: in words.
    """

    ranks: int
    device: str
    gpus: int
    group_backend: str
    shared: bool
    why: str


@dataclass(frozen=True)
class Crop:
    """The part of the picture that is used, from its upper left corner on: ``rows * columns`` tokens."""

    width: int
    height: int
    rows: int
    columns: int

    @property
    def tokens(self) -> int:
        """Length of the sequence."""
        return self.rows * self.columns


def crop(width: int, height: int, ranks: int) -> Crop:
    """Return the largest crop of a `width` by `height` picture whose tokens divide among `ranks`.

    Raises:
        ArgumentValueError: the picture is too small.
    """
    shapes = [
        (rows * columns, rows, columns)
        for rows in range(1, height // PATCH + 1)
        for columns in range(1, width // PATCH + 1)
        if rows * columns % ranks == 0
    ]
    if not shapes:
        raise ArgumentValueError(f"a picture of {width} by {height} pixels is too small for {ranks} ranks")
    _, rows, columns = max(shapes)
    return Crop(width, height, rows, columns)


def place(ranks: int | None, heads: int, gpus: int, device: str, backend: str) -> Placement:
    """Return how many ranks run on what.

    One rank a GPU where there are several, or what was asked for; on one GPU, and on a CPU, a few ranks share it, so
    that there is something to exchange.

    Args:
        ranks: as asked, or None.
        heads: of the attention; they must divide among the ranks.
        gpus: of this machine, as CUDA shows them.
        device: ``"auto"``, ``"cpu"`` or ``"cuda"``.
        backend: of the communicator, as asked.

    Raises:
        ArgumentValueError: it can't be done.
    """
    if device == "cuda" and not gpus:
        raise ArgumentValueError("--device cuda: torch sees no CUDA device here (`commctl doctor` says more)")
    if device == "cpu" or not gpus:
        count = _count(ranks, heads, DEFAULT_RANKS)
        why = f"{count} processes on the CPU" + ("" if gpus else ", because torch sees no GPU here")
        return Placement(count, "cpu", 0, "gloo", False, why)
    count = _count(ranks, heads, gpus if gpus > 1 else DEFAULT_RANKS)
    used = min(count, gpus)
    if count > gpus:
        why = (
            f"{count} ranks share {gpus} GPU{'s' * (gpus > 1)} over gloo, because NCCL takes one rank a GPU "
            "(COMM_ALLOW_SHARED_GPU=1)"
        )
        return Placement(count, "cuda", used, "gloo", True, why)
    why = f"one rank a GPU, {used} of {gpus}"
    if ranks is None and used < gpus:
        why += f", because {heads} heads don't divide among {gpus} ranks"
    return Placement(count, "cuda", used, "gloo" if backend == "gloo" else "cpu:gloo,cuda:nccl", False, why)


def _count(ranks: int | None, heads: int, most: int) -> int:
    if ranks is None:
        return max(count for count in range(1, most + 1) if heads % count == 0)
    if heads % ranks:
        good = ", ".join(str(count) for count in range(1, heads + 1) if heads % count == 0)
        raise ArgumentValueError(f"--ranks {ranks}: {heads} heads don't divide among them; these would do: {good}")
    return ranks


def find_picture() -> Path:
    """Return the picture, which ships inside matplotlib.

    Raises:
        CommError: matplotlib is not installed, or comes without it.
    """
    spec = importlib.util.find_spec("matplotlib")
    folders: Sequence[str] = () if spec is None else spec.submodule_search_locations or ()
    for folder in folders:
        if (Path(folder) / _PICTURE).is_file():
            return Path(folder) / _PICTURE
    if spec is None:
        raise CommError("the picture ships inside matplotlib, which is not installed: pip install comm-core[demo]")
    raise CommError(f"this matplotlib comes without its sample data ({_PICTURE}): pip install --force matplotlib")


def _image() -> Any:
    """Return Pillow's module; matplotlib brings it."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError as error:
        raise CommError(f"Pillow can't be imported ({error}): pip install comm-core[demo]") from error


def picture_size(path: Path) -> tuple[int, int]:
    """Return width and height of a picture in pixels."""
    with _image().open(path) as picture:
        return picture.size


def picture_rgb(path: str, width: int, height: int) -> bytearray:
    """Return the upper left `width` by `height` pixels of a picture, 3 bytes each, row by row."""
    with _image().open(path) as picture:
        return bytearray(picture.convert("RGB").crop((0, 0, width, height)).tobytes())


def gpu_count() -> int:
    """Return the number of GPUs that torch can use here.

    A process of its own is asked, so that the one that starts the ranks needs no torch; and none at all where the
    machine has no NVIDIA driver.
    """
    if not any(path.exists() for path in _NVIDIA):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise CommError(f"torch can't be imported: {last}")
    return int(done.stdout.split()[-1])


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))
