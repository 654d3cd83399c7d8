"""The options that every benchmark of exchanges between ranks has, and what follows from them before it starts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from comm_core.bench import launch, plot
from comm_core.bench.launch import Placement
from comm_core.errors import ArgumentValueError

__all__ = ["SharedOptions"]


@dataclass(frozen=True, kw_only=True)
class SharedOptions:
    """What is measured, where, and what becomes of it; see ``commctl bench ulysses --help``."""

    backends: tuple[str, ...] = ()
    where: str | None = None
    device: str = "auto"
    ranks: int | None = None
    quick: bool = False
    compare: bool = True
    json: Path | None = None
    plot: Path | None = None
    timeout_s: float = 120.0

    def place(self) -> Placement:
        """Return where the ranks run, if what is measured can be written where it was asked for.

        Raises:
            ArgumentValueError: a file can't be written, nothing can draw, or there are no such GPUs.
        """
        if self.plot is not None:
            plot.check(self.plot)
        for file in (self.json, self.plot):
            if file is not None and not file.absolute().parent.is_dir():
                raise ArgumentValueError(f"can't write {str(file)!r}: its folder does not exist")
        # torch is needed here for its store anyway; a CUDA context is made by the ranks alone.
        import torch

        gpus = 0 if self.device == "cpu" else torch.cuda.device_count()
        world = int(os.environ["WORLD_SIZE"]) if launch.under_torchrun() else None
        return launch.place(self.device, self.where, self.ranks, gpus=gpus, joined_ranks=world)
