"""comm-nvlink: exchanges over NVLink between the GPUs of one host.

Users construct a `comm_core.UlyssesCommunicator`; what is here are the raw entry points under it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_nvlink._version import __version__

if TYPE_CHECKING:
    from comm_nvlink.raw import dispose_ulysses_a2a, init_ulysses_a2a, ulysses_a2a, ulysses_signal_bytes

__all__ = ["__version__", "dispose_ulysses_a2a", "init_ulysses_a2a", "ulysses_a2a", "ulysses_signal_bytes"]

# Imported when they are first used: a plugin's import stays cheap.
__getattr__, __dir__ = attach(__name__, dict.fromkeys(__all__[1:], "comm_nvlink.raw"))
