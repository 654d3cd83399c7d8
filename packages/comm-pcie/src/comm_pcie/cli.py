"""``commctl pcie``: what the PCIe transport would do on this machine or a recorded one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from comm_core import _env
from comm_core._json import Json, JsonObject
from comm_core.cli import output
from comm_core.cli.decide import Options, imagined_ranks
from comm_core.cli.topo import machine_or_file
from comm_core.errors import ArgumentValueError
from comm_core.topology.facts import RankFacts
from comm_core.topology.pcie import pcie_path
from comm_core.topology.predicates import PCIE_ROUTES
from comm_core.transport.interface import ProbeContext, Request, Verdict
from comm_pcie import routes
from comm_pcie.hints import hints
from comm_pcie.rdma.planning import GIDS_VARIABLE, NICS_VARIABLE
from comm_pcie.transport import PcieTransport, nic_lines

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["app", "document", "plan_of"]

app = typer.Typer(name="pcie", help="The PCIe transport: routes, paths and profile.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The PCIe transport: routes, paths and profile."""


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", metavar="FILE", help="A recorded topology instead of this machine."),
    ] = None,
    sysfs: Annotated[
        Path | None,
        typer.Option(
            "--sysfs", metavar="FOLDER", help="A recorded /sys to take PCIe paths, NUMA nodes and ACS from."
        ),
    ] = None,
    dev: Annotated[
        Path, typer.Option("--dev", metavar="FOLDER", help="With --sysfs: the /dev that goes with it.")
    ] = Path("/dev"),
    world_size: Annotated[
        int | None, typer.Option("--world-size", "-n", min=1, metavar="N", help="Plan for the first N GPUs.")
    ] = None,
    ranks: Annotated[
        str | None, typer.Option("--ranks", "-r", metavar="0,1,3", help="Plan for these GPUs, in this order.")
    ] = None,
    route: Annotated[
        str | None,
        typer.Option("--route", help=f"{', '.join(PCIE_ROUTES)}. [{routes.VARIABLE}, else auto]"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Show which route a group would take, and why; exits with 1 if it can take none.

    Opens nothing and tests no link: that is done when a communicator is made.
    """
    with output.quiet_stdout():
        records, origin = machine_or_file(file)
        chosen = Options(world_size=world_size, ranks=ranks, file=file)
        facts = imagined_ranks(records, chosen, recorded=origin != "this machine")
        if sysfs is not None:
            if not (sysfs / "bus/pci/devices").is_dir():
                raise ArgumentValueError(f"{str(sysfs)!r} is no sysfs: it has no bus/pci/devices")
            facts = with_sysfs(facts, sysfs, dev)
        elif origin == "this machine":
            facts = _probed(facts)
        asked = _env.pcie_route() if route is None else route
        verdict = plan_of(facts, asked)
    if json:
        output.emit_json(document(facts, asked, verdict))
    else:
        _show(facts, asked, verdict, origin, output.console())
    raise typer.Exit(0 if verdict.eligible else 1)


def with_sysfs(facts: Sequence[RankFacts], sysfs: Path, dev: Path) -> list[RankFacts]:
    """Return `facts` with what a recorded sysfs says about each GPU's place, and about NICs."""
    from comm_core.topology.probe import numa_node
    from comm_pcie.hints import read_hints
    from comm_pcie.rdma.probe import SysfsProbe

    # Whether the libraries are installed there is not recorded: they are taken to be.
    rdma = SysfsProbe(sysfs, dev).facts().to_json()
    found: list[RankFacts] = []
    for record in facts:
        address = record.device.pci_bus_id
        path = pcie_path(address, sysfs)
        device = replace(record.device, pcie_path=path, numa_node=numa_node(address, sysfs))
        probe: JsonObject = {**cast("JsonObject", read_hints(address, path, sysfs)), "rdma": rdma}
        found.append(replace(record, device=device, plugins={**record.plugins, PcieTransport.name: probe}))
    return found


def _probed(facts: Sequence[RankFacts]) -> list[RankFacts]:
    transport = PcieTransport()
    return [
        replace(
            record,
            plugins={
                **record.plugins,
                transport.name: transport.probe(ProbeContext(record.rank, record.device.kind, -1, record)),
            },
        )
        for record in facts
    ]


def plan_of(facts: Sequence[RankFacts], route: str) -> Verdict:
    """Return the verdict of the transport on a group of these ranks that asks for `route`."""
    environment = {
        routes.VARIABLE: route,
        NICS_VARIABLE: _env.pcie_nics(),
        GIDS_VARIABLE: _env.pcie_gid_indices(),
        "COMM_ALLOW_SHARED_GPU": str(int(_env.allow_shared_gpu())),
    }
    kind = facts[0].device.kind if facts else "cpu"
    request = Request(PcieTransport.name, len(facts), kind, environment=environment)
    return PcieTransport().assess(request, facts)


def document(facts: Sequence[RankFacts], route: str, verdict: Verdict) -> JsonObject:
    """Return the JSON form."""
    found = {f"{a}-{b}": level for (a, b), level in routes.pairs(facts).items()}
    devices: list[Json] = [
        {
            "rank": record.rank,
            "pci_bus_id": record.device.pci_bus_id,
            "numa_node": record.device.numa_node,
            "pcie_path": record.device.pcie_path,
        }
        for record in facts
    ]
    return {
        "requested_route": route,
        "eligible": verdict.eligible,
        "reason": verdict.reason,
        "plan": verdict.plan,
        "profile": routes.profile(facts),
        "devices": devices,
        "common_ancestors": cast("Json", found),
        "hints": cast("Json", hints(facts, PcieTransport.name)),
        "nics": list(nic_lines(facts, PcieTransport.name)),
    }


def _show(facts: Sequence[RankFacts], route: str, verdict: Verdict, origin: str, out: Console) -> None:
    plan = verdict.plan or {}
    rows = (
        ("asked for", route),
        ("route", str(plan.get("transport", "none"))),
        ("profile", routes.profile(facts)),
        ("reason" if verdict.eligible else "refused", verdict.reason),
    )
    output.columns(f"PCIe plan: {origin}", rows, out)
    table = output.Sheet("GPUs", "rank", "PCI", "NUMA", "bridges above it, the root first", fixed=("PCI",))
    for record in facts:
        device = record.device
        node = "?" if device.numa_node is None else str(device.numa_node)
        table.add(str(record.rank), device.pci_bus_id or "?", node, device.pcie_path.replace("/", " ") or "?")
    table.print(out)
    levels: dict[str, list[str]] = {}
    for (a, b), level in routes.pairs(facts).items():
        levels.setdefault(level or "unknown", []).append(f"{a}-{b}")
    output.columns("Common ancestors", ((level, output.listed(found)) for level, found in levels.items()), out)
    nics = cast("Sequence[str | None]", plan.get("nic_names") or ())
    if any(nics):
        indices = cast("Sequence[int]", plan["gid_indices"])
        table = output.Sheet("NICs of the ranks", "rank", "NIC", "GID index")
        for rank, (name, index) in enumerate(zip(nics, indices, strict=True)):
            table.add(str(rank), str(name), str(index))
        table.print(out)
    output.paragraph("NICs", nic_lines(facts, PcieTransport.name), out)
    output.paragraph("What may stand in the way", hints(facts, PcieTransport.name), out)
