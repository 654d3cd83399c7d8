"""Low-precision encodings for comm-core. Importing this touches neither a device nor the network.

`comm_lowp.sage2` has the primitives of the Sage2 encoding; users of a communicator call `prepare_qkv` and
`scatter_qkv` there and need only the names below.
"""

from __future__ import annotations

from comm_core._lazy import attach
from comm_lowp._version import __version__

_NAMES = {
    "UlyssesQKV": "comm_lowp.qkv",
    "UlyssesQKVWorkspace": "comm_lowp.qkv",
    "emulated_attention": "comm_lowp.consumer",
    "reference_attention": "comm_lowp.consumer",
    "sage_attention": "comm_lowp.sageattention",
}

__all__ = [  # noqa: RUF022 - the version first
    "__version__",
    "UlyssesQKV",  # pyright: ignore[reportUnsupportedDunderAll]
    "UlyssesQKVWorkspace",  # pyright: ignore[reportUnsupportedDunderAll]
    "emulated_attention",  # pyright: ignore[reportUnsupportedDunderAll]
    "reference_attention",  # pyright: ignore[reportUnsupportedDunderAll]
    "sage_attention",  # pyright: ignore[reportUnsupportedDunderAll]
]

__getattr__, __dir__ = attach(__name__, _NAMES)
