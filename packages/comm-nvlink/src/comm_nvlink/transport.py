"""The NVLink transport: ``backend="nvlink"``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from comm_core import _env
from comm_core._json import JsonObject
from comm_core.errors import ArgumentValueError
from comm_core.memory.peer import AUTO
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.transport.interface import ProbeContext, Request, Transport, Verdict
from comm_nvlink import routes
from comm_nvlink._version import __version__
from comm_nvlink.routes import PER_SM, Settings

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction
    from comm_nvlink.session import NvlinkSession

__all__ = ["VARIABLES", "NvlinkTransport", "settings_of"]

VARIABLES = {
    "COMM_NVLINK_ENGINE_BYTES": "remote bytes from which on an exchange uses the copy engines, equal on all ranks",
}
"""Environment variable -> what it does."""


def _engine_bytes() -> int | None:
    text = os.environ.get("COMM_NVLINK_ENGINE_BYTES", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit():
        raise ArgumentValueError(f"COMM_NVLINK_ENGINE_BYTES must be a number of bytes, got {text!r}")
    return int(text)


def _said(record: RankFacts) -> JsonObject:
    """Return what a rank's probe has said."""
    return cast("JsonObject", record.plugins.get(NvlinkTransport.name, {}))


def settings_of(request: Request, facts: Sequence[RankFacts]) -> Settings:
    """Return how exchanges are divided: a function of what the group agreed on alone."""
    devices = [record.device.uuid for record in facts]
    sharing = max(devices.count(device) for device in devices)
    settings = routes.settings(len(facts), sharing, cast("int | None", request.options.get("max_sms")))
    own = _said(facts[0]).get("engine_bytes")
    return settings if own is None else settings.changed({"engine_bytes": own})


class NvlinkTransport(Transport):
    """Plans over NVLink between the GPUs of one host, by SMs and copy engines."""

    name = "nvlink"
    version = __version__
    wire = 1
    priority = 100
    verified_on = ("several ranks on one GPU", "two GPUs with NVLink")

    def probe(self, context: ProbeContext) -> JsonObject:
        """See `Transport.probe`."""
        return {"engine_bytes": _engine_bytes()}

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        """See `Transport.assess`."""
        if request.options.get("nvlink_kernel") == "cake":
            return Verdict(
                False,
                "nvlink_kernel='cake' asks for generated kernels, and this package has no generated export: use "
                "'auto' or 'portable'",
            )
        verdict = predicates.assess_nvlink(facts, allow_shared_gpu=request.allow_shared_gpu)
        if not verdict.eligible:
            return verdict
        wanted = cast("int | None", request.options.get("max_sms"))
        least = -(-request.world_size // PER_SM)
        if wanted is not None and 0 < wanted < least:
            return Verdict(
                False,
                f"max_sms={wanted}: an exchange of {request.world_size} ranks needs at least {least}: a block for "
                "each peer and one for a rank's own share; or 0, for the copy engines alone",
            )
        own = [_said(record) for record in facts]
        failed = {rank: item["error"] for rank, item in enumerate(own) if item.get("error")}
        if failed:
            return Verdict(False, "; ".join(f"rank {rank}: {error}" for rank, error in failed.items()))
        if len({str(item.get("engine_bytes")) for item in own}) > 1:
            values = ", ".join(f"rank {rank}: {item.get('engine_bytes')}" for rank, item in enumerate(own))
            return Verdict(False, f"COMM_NVLINK_ENGINE_BYTES differs between the ranks ({values})")
        return verdict._replace(plan=settings_of(request, facts).to_json())

    def open(
        self, stages: Transaction, request: Request, plan: JsonObject | None, device: torch.device
    ) -> NvlinkSession:
        """See `Transport.open`."""
        from comm_core import jit
        from comm_core.windows.launch import WINDOWS
        from comm_nvlink.launch import ULYSSES
        from comm_nvlink.pool import POOL
        from comm_nvlink.session import NvlinkSession

        # A cold build may take longer than a rank may be late.
        seconds = max(request.timeout_s, _env.jit_timeout_s())
        windows = stages.step("build windows", lambda: jit.load(WINDOWS, device), timeout_s=seconds)
        module = stages.step("build ulysses", lambda: jit.load(ULYSSES, device), timeout_s=seconds)
        pool_bytes = cast("int", request.options.get("pool_bytes") or 0)
        pool = None
        if pool_bytes:
            pool = stages.step("build pool", lambda: jit.load(POOL, device), timeout_s=seconds)
        agreed = cast("JsonObject", plan)
        return NvlinkSession(
            stages,
            windows,
            module,
            pool,
            device,
            settings=Settings(request.world_size, 0, 0).changed(agreed),
            form=request.environment.get("COMM_PEER_MEMORY", AUTO),
            staging_bytes=request.max_bytes,
            pool_bytes=pool_bytes,
            timeout_s=request.timeout_s,
            poison=_env.on_stall() == "poison",
        )
