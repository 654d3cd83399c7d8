"""``commctl decide``: which transport a group would use, from this machine's topology or a recorded one."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import typer

from comm_core import _env
from comm_core._json import Json, JsonObject, canonical
from comm_core.cli import output
from comm_core.cli.topo import machine_or_file
from comm_core.errors import CommError
from comm_core.plugins.discovery import Registry, registry
from comm_core.selection.decision import Considered, Decision
from comm_core.selection.offline import Wanted, look
from comm_core.topology import predicates
from comm_core.topology.facts import RankFacts
from comm_core.topology.ulysses import rank_facts_to_ulysses
from comm_core.transport.interface import ProbeContext, Transport

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Options", "Outcome", "decide", "document", "imagined_ranks", "run", "show_considered", "with_probes"]

# A probe can hang in a driver; the ranks of a real group bound it as well.
_PROBE_S = 10.0
_CPU_RANKS = 2


@dataclass(frozen=True)
class Options:
    """What was asked on the command line; the fields are the options of ``commctl decide``."""

    backend: str = "auto"
    world_size: int | None = None
    ranks: str | None = None
    file: Path | None = None
    group_backend: str | None = None
    dtype: str = "bfloat16"
    experimental: bool = False


@dataclass(frozen=True)
class Outcome:
    """What is to be shown.

    Attributes:
        origin: where the facts come from, in words.
        facts: of the imagined ranks.
        wanted: what they ask for.
        admitted: what the topology alone says to every transport that has conditions, installed or not.
        topology: the backend that `decide_ulysses_backend` answers and its reason.
        considered: verdicts on the transports as they are installed.
        decision: the decision, or None where the ranks would raise.
        error: the error that every rank would raise, or None.
    """

    origin: str
    facts: tuple[RankFacts, ...]
    wanted: Wanted
    admitted: tuple[Considered, ...]
    topology: tuple[str, str]
    considered: tuple[Considered, ...]
    decision: Decision | None
    error: str | None


def run(options: Options, *, as_json: bool) -> int:
    """Decide and print; return the exit code: 1 where the ranks would raise."""
    with output.quiet_stdout():
        outcome = decide(options)
    if as_json:
        output.emit_json(document(outcome))
    else:
        _show(outcome, output.console())
    if outcome.error is None:
        return 0
    sys.stdout.flush()
    print(f"commctl: {outcome.error}", file=sys.stderr)
    return 1


def decide(options: Options) -> Outcome:
    """Return what ranks with the topology of this machine, or of a file, would decide.

    Raises:
        BadParameter: an option makes no sense (exit code 2).
        CommError: the topology can't be had, or an environment variable is invalid.
    """
    from comm_core.ulysses.decision import decide_ulysses_backend

    records, origin = machine_or_file(options.file)
    recorded = origin != "this machine"
    facts = imagined_ranks(records, options, recorded=recorded)
    plugins = registry()
    if not recorded:
        facts = with_probes(facts, plugins)
    wanted = _wanted(options, facts)
    shared = wanted.environment["COMM_ALLOW_SHARED_GPU"] == "1"
    experimental = wanted.environment["COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS"] == "1"
    admitted: list[Considered] = []
    for name, assess in predicates.KNOWN.items():
        verdict = assess(facts, allow_shared_gpu=shared)
        admitted.append(Considered(name, verdict.eligible, verdict.reason, verdict.plan))
    by_topology = decide_ulysses_backend(
        "auto", [rank_facts_to_ulysses(record) for record in facts], allow_experimental_auto=experimental
    )
    considered, decision, error = _conclude(facts, plugins, wanted)
    topology = (by_topology.backend, by_topology.reason)
    return Outcome(origin, tuple(facts), wanted, tuple(admitted), topology, considered, decision, error)


def _conclude(
    facts: Sequence[RankFacts], plugins: Registry, wanted: Wanted
) -> tuple[tuple[Considered, ...], Decision | None, str | None]:
    considered: tuple[Considered, ...] = ()
    try:
        if len(facts) == 1 and wanted.backend == "auto":
            decision = _passthrough(wanted, facts[0].device.kind)
            return decision.considered, decision, None
        outlook = look(facts, plugins, wanted, timeout_s=_env.timeout_s())
        considered = outlook.considered
        return considered, outlook.choose(), None
    except CommError as error:
        return considered, None, str(error)


def _passthrough(wanted: Wanted, device_type: str) -> Decision:
    import torch

    from comm_core.selection import Asked
    from comm_core.ulysses.decision import passthrough

    device = torch.device(device_type)
    return passthrough(Asked("commctl decide", wanted.backend, device, wanted.dtype, wanted.itemsize), device)


def _wanted(options: Options, facts: Sequence[RankFacts]) -> Wanted:
    name, itemsize = _element(options.dtype)
    all_cuda = all(record.device.kind == "cuda" for record in facts)
    backend = options.group_backend or ("nccl" if all_cuda else "gloo")
    # What torch.distributed configures for these names: NCCL serves CUDA tensors alone, gloo both.
    served = ("cuda",) if backend == "nccl" else ("cpu", "cuda")
    return Wanted(
        backend=options.backend,
        group_backends=dict.fromkeys(served, backend),
        dtype=name,
        itemsize=itemsize,
        environment={
            "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS": str(int(options.experimental or _env.allow_experimental_auto())),
            "COMM_ALLOW_SHARED_GPU": str(int(_env.allow_shared_gpu())),
            "COMM_ULYSSES_PCIE_ROUTE": _env.pcie_route(),
            "COMM_ULYSSES_PCIE_NICS": _env.pcie_nics(),
            "COMM_ULYSSES_PCIE_GID_INDICES": _env.pcie_gid_indices(),
        },
    )


def _element(text: str) -> tuple[str, int]:
    import torch

    from comm_core._dtypes import check_dtype, dtype_name

    try:
        dtype = check_dtype(getattr(torch, text.removeprefix("torch."), None))
    except CommError:
        raise typer.BadParameter(
            f"{text!r} is no plain torch dtype of 1, 2 or 4 bytes an element", param_hint="--dtype"
        ) from None
    return dtype_name(dtype), dtype.itemsize


def imagined_ranks(records: Sequence[RankFacts], options: Options, *, recorded: bool) -> list[RankFacts]:
    """Return the facts of the ranks that are asked about, numbered from 0.

    Args:
        records: of this machine (one a GPU, or one for the CPU) or of a file (one a rank).
        options: `world_size` or `ranks`, or neither for all of them.
        recorded: whether they come from a file. It can't be made to hold more ranks than it does; on a machine, more
            ranks than GPUs share them, and more than one can run on a CPU.

    Raises:
        BadParameter: there are no such ranks.
    """
    by_rank = {record.rank: record for record in records}
    known = sorted(by_rank)
    have = f"there {'is' if len(known) == 1 else 'are'} {output.ranks_text(known)}"
    if options.ranks is not None:
        if options.world_size is not None:
            raise typer.BadParameter("give --world-size or --ranks, not both", param_hint="--ranks")
        if not re.fullmatch(r"[0-9]+(,[0-9]+)*", options.ranks.strip(), re.ASCII):
            raise typer.BadParameter(f"expected ranks like 0,1,3, got {options.ranks!r}", param_hint="--ranks")
        chosen = [int(part) for part in options.ranks.split(",")]
        missing = [rank for rank in chosen if rank not in by_rank]
        if missing:
            raise typer.BadParameter(f"no rank {missing[0]} in the topology: {have}", param_hint="--ranks")
    elif options.world_size is not None:
        size = options.world_size
        if recorded and size > len(known):
            raise typer.BadParameter(f"the topology has fewer than {size} ranks: {have}", param_hint="--world-size")
        chosen = [known[i % len(known)] for i in range(size)]
    else:
        alone_on_cpu = not recorded and all(record.device.kind == "cpu" for record in records)
        chosen = known * _CPU_RANKS if alone_on_cpu else known
    return [replace(by_rank[old], rank=new) for new, old in enumerate(chosen)]


def with_probes(facts: Sequence[RankFacts], plugins: Registry) -> list[RankFacts]:
    """Return `facts` with what the transports' own probes say on this machine; one that fails or hangs says so."""
    result: list[RankFacts] = []
    for record in facts:
        own: dict[str, Json] = dict(record.plugins)
        for name, transport in plugins.transports.items():
            if type(transport).probe is not Transport.probe:
                own[name] = _probe(transport, record)
        result.append(replace(record, plugins=own))
    return result


def _probe(transport: Transport, facts: RankFacts) -> Json:
    box: list[Json] = []

    def ask() -> None:
        try:
            value = transport.probe(ProbeContext(facts.rank, facts.device.kind, facts.device.index, facts))
            canonical(value)
            box.append(value)
        except BaseException as error:
            box.append({"error": f"{type(error).__name__}: {error}"})

    thread = threading.Thread(target=ask, name="commctl-probe", daemon=True)
    thread.start()
    thread.join(_PROBE_S)
    return box[0] if box else {"error": f"no answer within {_PROBE_S:g} s"}


def document(outcome: Outcome) -> JsonObject:
    """Return the JSON form."""
    decision = outcome.decision
    return {
        "origin": outcome.origin,
        "request": cast("Json", asdict(outcome.wanted)),
        "world_size": len(outcome.facts),
        "ranks": [
            {
                "rank": record.rank,
                "host": record.host.hostname,
                "device": record.device.kind,
                "name": record.device.name,
                "uuid": record.device.uuid,
            }
            for record in outcome.facts
        ],
        "topology": {
            "backend": outcome.topology[0],
            "reason": outcome.topology[1],
            "admits": _considered_json(outcome.admitted),
        },
        "considered": _considered_json(outcome.considered),
        "decision": None
        if decision is None
        else {
            "backend": decision.backend,
            "reason": decision.reason,
            "plan": decision.plan,
            "shared_gpu": decision.shared_gpu,
        },
        "error": outcome.error,
    }


def _considered_json(items: Sequence[Considered]) -> list[Json]:
    return [cast("Json", asdict(item)) for item in items]


def _show(outcome: Outcome, out: Console) -> None:
    wanted = outcome.wanted
    size = len(outcome.facts)
    groups = ", ".join(f"{device}:{backend}" for device, backend in wanted.group_backends.items())
    out.print(
        f"{size} rank{'s' * (size != 1)} on {_devices(outcome.facts)} ({outcome.origin}), process group {groups}, "
        f"{wanted.dtype}, backend {wanted.backend!r}\n"
    )
    decision = outcome.decision
    if decision is None:
        out.print("Decision: none, every rank would raise\n", style="bold")
    else:
        out.print(f"Decision: {decision.backend}", style="bold")
        out.print(f"  because {decision.reason}")
        if decision.plan:
            out.print(f"  plan {canonical(decision.plan)}")
        if decision.shared_gpu:
            out.print("  ranks share a GPU (COMM_ALLOW_SHARED_GPU=1)")
        out.print()
    if outcome.considered:
        show_considered("Considered, in the order of preference", outcome.considered, decision, out)
    show_considered("What the topology alone admits, whatever is installed", outcome.admitted, None, out)
    out.print(
        f"From the topology alone, decide_ulysses_backend answers {outcome.topology[0]!r}: {outcome.topology[1]}"
    )


def _devices(facts: Sequence[RankFacts]) -> str:
    names = {record.device.name or "unnamed GPU" for record in facts if record.device.kind == "cuda"}
    parts = sorted(names) + (["the CPU"] if any(record.device.kind == "cpu" for record in facts) else [])
    hosts = len({record.host.boot_id or record.host.hostname for record in facts})
    return " and ".join(parts) + (f" of {hosts} hosts" if hosts > 1 else "")


def show_considered(title: str, items: Sequence[Considered], decision: Decision | None, out: Console) -> None:
    """Print what was considered and why; the chosen one is marked."""
    table = output.Sheet(title, "transport", "usable", "reason", fixed=("transport", "usable"))
    for item in items:
        chosen = decision is not None and item.name == decision.backend
        table.add(item.name, "chosen" if chosen else output.yes_no(item.eligible), item.reason)
    table.print(out)
