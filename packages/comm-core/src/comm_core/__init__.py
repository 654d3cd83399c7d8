"""comm-core decides and plans; plugins move bytes.

Names are imported when they are first used: importing this package touches neither CUDA, NVML, the network nor the
disk, and works without torch.distributed.
"""

from __future__ import annotations

from comm_core._lazy import attach
from comm_core._version import __version__

__all__ = [
    "__version__",
]

_NAMES: dict[str, str] = {}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
