"""The codec ``"sage2"``: what a communicator asks for a prepared exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_lowp._version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from comm_core.ulysses.codec import CodecHost
    from comm_lowp.qkv import UlyssesQKVWorkspace

__all__ = ["Sage2Codec"]


class Sage2Codec:
    """INT8 Q and K in groups of rows, FP8 E4M3 V by channel, as SageAttention2 reads them."""

    name = "sage2"
    version = __version__
    wire = 1
    """Number of the payload and of the arithmetic: ranks with different ones can't exchange."""

    def prepare_qkv(
        self, host: CodecHost, qkv_shape: Sequence[int], used_sequence: int | None
    ) -> UlyssesQKVWorkspace:
        """See `comm_core.ulysses.codec.Codec.prepare_qkv`."""
        # Imported here: discovery asks every plugin for its codecs, and must not pay for torch.
        from comm_lowp.qkv import prepare

        return prepare(host, qkv_shape, used_sequence)
