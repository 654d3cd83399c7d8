"""What a QKV encoding is to a communicator, and what it may use of one.

A codec never sees a communicator: it gets a `CodecHost`, the group and the transport session of one, and a way to
run calls that keeps the communicator's promises: one call at a time, joint checks in checked mode, broken after a
failure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch

from comm_core._json import Json, JsonObject, canonical
from comm_core.consensus import joint
from comm_core.errors import ArgumentTypeError, JointValueError, UnsupportedError
from comm_core.group import Group
from comm_core.plugins.discovery import registry
from comm_core.transport.interface import TransportSession

__all__ = ["Codec", "CodecHost", "CodecWorkspace", "EncodedCall", "find_codec"]


class EncodedCall(NamedTuple):
    """An encoded exchange whose arguments were found good on this rank.

    Attributes:
        geometry: everything that must be equal on all ranks, for the checked mode.
        execute: does it, on the current stream, and returns the result.
        outputs: tensors that it writes.
        sent_bytes: bytes that leave this rank.
    """

    geometry: JsonObject
    execute: Callable[[], object]
    outputs: Sequence[torch.Tensor] = ()
    sent_bytes: int = 0


@dataclass(eq=False)
class CodecHost:
    """A communicator as a codec sees it; its identity is the communicator's.

    Attributes:
        group: the ranks; another object after a checkpoint and restore.
        session: the opened transport, or None where there is one rank only.
        backend: the transport's name.
        device: of this rank.
        dtype: the communicator's element type.
        max_bytes: its capacity: of one payload.
        checked: whether it is in checked mode (``COMM_CHECK=1``).
        run: runs one call: ``run(operation, prepare, *arguments)`` lets `prepare` check this rank's arguments and
            return an `EncodedCall` (on which the ranks agree in checked mode), and executes that.
        launch: runs one call that is known: ``launch(operation, execute, outputs, sent_bytes)``, as of an
            `EncodedCall` that was found good before, with whatever its checks depend on unchanged. Cheaper than
            `run`; not in checked mode, and `execute` uses no autograd.
    """

    group: Group
    session: TransportSession | None
    backend: str
    device: torch.device
    dtype: torch.dtype
    max_bytes: int
    checked: bool
    run: Callable[..., object] = field(repr=False)
    launch: Callable[[str, Callable[[], None], Sequence[torch.Tensor], int], None] = field(repr=False)


class CodecWorkspace(ABC):
    """What a codec prepared for one geometry; owned by the communicator that it was prepared for."""

    @abstractmethod
    def scatter_qkv(
        self, host: CodecHost, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: object | None
    ) -> object:
        """Encode and exchange. Collective; refuses a `host` that is not its owner."""


class Codec(ABC):
    """A QKV encoding.

    Attributes:
        name: what users pass as ``quantization=``.
        version: of the package that provides it.
        wire: number of what it sends: ranks with different ones don't use it together.
    """

    name: str
    version: str
    wire: int

    @abstractmethod
    def prepare_qkv(self, host: CodecHost, qkv_shape: Sequence[int], used_sequence: int | None) -> CodecWorkspace:
        """Prepare the exchange of one geometry. Collective; every step that can fail ends in a joint outcome."""


def find_codec(group: Group, name: object) -> Codec:
    """Return the codec that all ranks ask for. Collective.

    Raises:
        JointError: some rank does not have it; the text says what to install.
        JointValueError: the ranks ask for different ones, or have different protocols of it.
    """

    def here() -> Json:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"quantization must be a str, got {type(name).__name__} {name!r}")
        found: Any = registry().codecs.get(name)
        if found is None:
            raise UnsupportedError(registry().why_missing(name))
        return [name, found.wire]

    what = "prepare_qkv: find the codec"
    asked = cast("list[list[Json]]", joint(group, what, here))
    if len({canonical(item) for item in asked}) > 1:
        raise JointValueError(
            f"{what}: the ranks differ",
            {rank: f"{codec!r} with protocol {wire}" for rank, (codec, wire) in enumerate(asked)},
        )
    return cast("Codec", registry().codecs[str(name)])
