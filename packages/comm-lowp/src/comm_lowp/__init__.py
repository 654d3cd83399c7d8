"""Low-precision encodings for comm-core. Importing this touches neither a device nor the network.

`comm_lowp.sage2` has the primitives of the Sage2 encoding; users of a communicator call `prepare_qkv` and
`scatter_qkv` there and need only the names below.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach
from comm_lowp._version import __version__

if TYPE_CHECKING:
    # For type checkers and editors only; a test keeps it equal to the table below.
    from comm_lowp.consumer import emulated_attention, reference_attention
    from comm_lowp.qkv import UlyssesQKV, UlyssesQKVWorkspace
    from comm_lowp.sageattention import sage_attention

__all__ = [
    "UlyssesQKV",
    "UlyssesQKVWorkspace",
    "__version__",
    "emulated_attention",
    "reference_attention",
    "sage_attention",
]

_NAMES = {
    "UlyssesQKV": "comm_lowp.qkv",
    "UlyssesQKVWorkspace": "comm_lowp.qkv",
    "emulated_attention": "comm_lowp.consumer",
    "reference_attention": "comm_lowp.consumer",
    "sage_attention": "comm_lowp.sageattention",
}
"""Public name -> module that defines it."""

__getattr__, __dir__ = attach(__name__, _NAMES)
