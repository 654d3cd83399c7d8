"""What the ranks ask for, merged into one request or refused on every rank. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from comm_core._json import Json, JsonObject, canonical
from comm_core.errors import JointValueError
from comm_core.selection.family import TRANSPORTS, Family
from comm_core.transport.interface import Request

__all__ = ["PROTOCOL", "RankRequest", "merge"]

PROTOCOL = 1
"""Number of the decision protocol; ranks with different numbers can't decide together."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Offer:
    """A transport as one rank has it: see `comm_core.transport.interface.Transport` for the fields."""

    version: str
    wire: int
    priority: int
    experimental: bool

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Offer:
        """Read the JSON form; unknown keys of a newer peer are ignored."""
        return cls(**{key: item for key, item in value.items() if key in cls.__dataclass_fields__})

    @property
    def fallback(self) -> bool:
        """Whether it comes after every transport that somebody installed on purpose."""
        return self.priority < 0

    def preference(self, name: str) -> tuple[bool, bool, int, str]:
        """Return the sort key of ``"auto"``: stable transports by priority, experimental ones, then fallbacks."""
        return (self.fallback, self.experimental, -self.priority, name)


@dataclass(frozen=True)
class RankRequest:
    """What one rank asks for, as it travels in the first gather.

    Attributes:
        backend: ``"auto"`` or a transport name, as the caller passed it (already known to be a `str`).
        device_type: ``"cuda"`` or ``"cpu"``.
        device: identity of the device for people and for finding two ranks on one GPU: its UUID, else empty.
        group_backends: device type -> torch.distributed backend.
        dtype: name of the element type.
        itemsize: its bytes.
        max_bytes: capacity in bytes.
        options: of transports and operations.
        environment: variables that must be equal on all ranks.
        plugins: transport name -> what is loaded here.
        missing: transport name -> why it is not loaded here, where the name is known or was asked for.
        versions: of comm-core and torch.
        protocol: number of the decision protocol.
        errors: what is wrong with this rank's own arguments; they travel, so that every rank raises.
    """

    backend: str
    device_type: str
    device: str = ""
    group_backends: Mapping[str, str] = field(default_factory=dict[str, str])
    dtype: str = "uint8"
    itemsize: int = 1
    max_bytes: int = 0
    options: Mapping[str, Json] = field(default_factory=dict[str, Json])
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    plugins: Mapping[str, Offer] = field(default_factory=dict[str, Offer])
    missing: Mapping[str, str] = field(default_factory=dict[str, str])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    protocol: int = PROTOCOL
    errors: tuple[str, ...] = ()

    def to_json(self) -> JsonObject:
        """Return the JSON form."""
        plugins = {name: vars(offer) for name, offer in self.plugins.items()}
        return cast("JsonObject", {**vars(self), "plugins": plugins, "errors": list(self.errors)})

    @classmethod
    def from_json(cls, value: Json) -> RankRequest:
        """Read the JSON form; unknown keys of a newer peer are ignored."""
        source = cast("Mapping[str, Any]", value)
        names = set(cls.__dataclass_fields__)
        parts = {key: item for key, item in source.items() if key in names}
        parts["errors"] = tuple(parts.get("errors", ()))
        parts["plugins"] = {name: Offer.from_json(offer) for name, offer in parts.get("plugins", {}).items()}
        return cls(**parts)


@dataclass(frozen=True)
class Merged:
    """The group's request, and which transports all ranks have.

    Attributes:
        request: as agreed.
        common: transports that every rank has with one wire number, in the order of preference.
        absent: transport -> why it is no candidate, naming ranks.
        offers: what rank 0 says of each transport. Two releases of a plugin may differ in priority, so the order of
            preference is taken from one rank for all.
    """

    request: Request
    common: tuple[str, ...]
    absent: Mapping[str, str]
    offers: Mapping[str, Offer]


def merge(what: str, asked: Sequence[RankRequest], timeout_s: float, family: Family = TRANSPORTS) -> Merged:
    """Merge the ranks' requests.

    Args:
        what: the step, for the error.
        asked: one request a rank, in rank order.
        timeout_s: the deadline that the ranks agreed on.
        family: what they choose among.

    Raises:
        JointValueError: some rank's own arguments are invalid, or the ranks ask for different things; the error has
            the per-rank values.
    """
    own = {rank: "; ".join(item.errors) for rank, item in enumerate(asked) if item.errors}
    if own:
        raise JointValueError(what, own)
    _same(what, "protocol", asked, lambda item: item.protocol, "install the same comm-core on all ranks")
    backend = _same(what, "backend", asked, lambda item: item.backend)
    device_type = _same(what, "device type", asked, lambda item: item.device_type, "pass device= on every rank")
    dtype = _same(what, "dtype", asked, lambda item: item.dtype)
    itemsize = _same(what, "itemsize", asked, lambda item: item.itemsize)
    # Before the capacity: where that follows from options, they say which of them differs.
    options = _same(what, "options", asked, lambda item: dict(item.options))
    max_bytes = _same(what, "max_bytes", asked, lambda item: item.max_bytes)
    environment = _same(
        what, "environment", asked, lambda item: dict(item.environment), "set these variables equally on every rank"
    )
    group_backends = _same(what, "process group backends", asked, lambda item: dict(item.group_backends))
    common, absent = _common(asked)
    _known_backend(what, backend, asked, absent, common, family)
    request = Request(
        backend=backend,
        world_size=len(asked),
        device_type=device_type,
        group_backends=group_backends,
        dtype=dtype,
        itemsize=itemsize,
        max_bytes=max_bytes,
        options=options,
        environment=environment,
        timeout_s=timeout_s,
    )
    _distinct_devices(what, request, asked)
    return Merged(request, common, absent, {name: asked[0].plugins[name] for name in common})


def _same(
    what: str, name: str, asked: Sequence[RankRequest], value: Callable[[RankRequest], _T], hint: str = ""
) -> _T:
    values = [value(item) for item in asked]
    if len({canonical(cast("Json", item)) for item in values}) > 1:
        texts = {rank: f"{name} {item!r}" for rank, item in enumerate(values)}
        raise JointValueError(f"{what}: the ranks disagree on {name}", texts, hint=hint)
    return values[0]


def _common(asked: Sequence[RankRequest]) -> tuple[tuple[str, ...], dict[str, str]]:
    names = sorted({name for item in asked for name in (*item.plugins, *item.missing)})
    common: list[str] = []
    absent: dict[str, str] = {}
    for name in names:
        lacking = [rank for rank, item in enumerate(asked) if name not in item.plugins]
        if lacking:
            why = asked[lacking[0]].missing.get(name) or f"no plugin provides {name!r}"
            where = "on any rank" if len(lacking) == len(asked) else f"on {_ranks(lacking)}"
            absent[name] = f"not available {where}: {why}"
            continue
        wires = [item.plugins[name].wire for item in asked]
        if len(set(wires)) > 1:
            versions = ", ".join(
                f"rank {rank} has {item.plugins[name].version} (wire {item.plugins[name].wire})"
                for rank, item in enumerate(asked)
            )
            absent[name] = f"the ranks speak different protocols: {versions}"
            continue
        common.append(name)
    common.sort(key=lambda name: asked[0].plugins[name].preference(name))
    return tuple(common), absent


def _known_backend(
    what: str,
    backend: str,
    asked: Sequence[RankRequest],
    absent: Mapping[str, str],
    common: Sequence[str],
    family: Family,
) -> None:
    if backend == "auto" or backend in family.known:
        return
    if any(backend in item.plugins for item in asked):
        return
    names = sorted({"auto", *family.known, *common})
    why = absent.get(backend)
    raise JointValueError(
        what,
        {rank: f"backend {backend!r}" for rank in range(len(asked))},
        hint=f"backend must be one of {names}" + (f"; {why}" if why else ""),
    )


def _distinct_devices(what: str, request: Request, asked: Sequence[RankRequest]) -> None:
    """Refuse two ranks on one GPU, the usual outcome of a forgotten ``torch.cuda.set_device``."""
    if request.device_type != "cuda" or request.allow_shared_gpu:
        return
    by_device: dict[str, list[int]] = {}
    for rank, item in enumerate(asked):
        if item.device:
            by_device.setdefault(item.device, []).append(rank)
    shared = {device: ranks for device, ranks in by_device.items() if len(ranks) > 1}
    if shared:
        raise JointValueError(
            f"{what}: ranks share a GPU",
            {rank: f"on {device}" for device, ranks in shared.items() for rank in ranks},
            hint="Call torch.cuda.set_device(local_rank) first or pass device=; for testing, COMM_ALLOW_SHARED_GPU=1 "
            "on every rank allows it",
        )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
