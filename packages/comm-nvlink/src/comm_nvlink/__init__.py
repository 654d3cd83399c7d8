"""comm-nvlink: exchanges over NVLink between the GPUs of one host.

Users construct a `comm_core.UlyssesCommunicator` or an all-reduce workspace; what is here are the raw entry points
under the former, and the latter's class.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_nvlink._version import __version__

if TYPE_CHECKING:
    from comm_nvlink.allreduce_workspace import TRTLLMAllReduceFusionWorkspace
    from comm_nvlink.raw import dispose_ulysses_a2a, init_ulysses_a2a, ulysses_a2a, ulysses_signal_bytes

__all__ = [
    "TRTLLMAllReduceFusionWorkspace",
    "__version__",
    "dispose_ulysses_a2a",
    "init_ulysses_a2a",
    "ulysses_a2a",
    "ulysses_signal_bytes",
]

# Imported when they are first used: a plugin's import stays cheap.
_NAMES = dict.fromkeys(__all__[2:], "comm_nvlink.raw") | {
    "TRTLLMAllReduceFusionWorkspace": "comm_nvlink.allreduce_workspace"
}
__getattr__, __dir__ = attach(__name__, _NAMES)
