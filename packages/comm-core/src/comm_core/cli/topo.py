"""``commctl topo``: the devices, how they are linked, and the hosts; from this machine or from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from comm_core import _env
from comm_core._json import JsonObject
from comm_core.cli import output
from comm_core.errors import ArgumentValueError
from comm_core.topology import recorded
from comm_core.topology.facts import SCHEMA, PairFacts, RankFacts
from comm_core.topology.pcie import ancestor
from comm_core.topology.probe import probe_machine

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["document", "link", "machine_or_file", "run", "show"]

_DISTANCES = {
    "internal": ("DUAL", "two GPUs of one board"),
    "single": ("PIX", "one PCIe switch between"),
    "multiple": ("PXB", "several PCIe switches"),
    "hostbridge": ("PHB", "a PCIe host bridge"),
    "node": ("NODE", "one NUMA node"),
    "system": ("SYS", "across NUMA nodes"),
}
"""NVML's common ancestor of two GPUs -> its short name in nvidia-smi, and what it means."""


def machine_or_file(file: Path | None) -> tuple[list[RankFacts], str]:
    """Return the records of `file`, of COMM_TOPOLOGY_FILE or of this machine, and where they come from, in words.

    Raises:
        TopologyFileError: the file can't be used.
    """
    if file is not None:
        return recorded.load(file), f"recorded in {file}"
    path = _env.topology_file()
    if path is not None:
        # Not by way of the probe, which never raises: who has set the variable wants to know that it can't be used.
        return recorded.load(path), f"recorded in {path} (COMM_TOPOLOGY_FILE)"
    return probe_machine(), "this machine"


def document(facts: Sequence[RankFacts]) -> JsonObject:
    """Return the JSON form, which is that of a recorded topology."""
    return {"schema": SCHEMA, "ranks": [record.to_json() for record in facts]}


def run(*, file: Path | None, out: Path | None, anonymize: bool, as_json: bool) -> int:
    """Print, and write where that is asked for; return the exit code."""
    with output.quiet_stdout():
        facts, origin, notes = _looked_at(file)
    if anonymize:
        facts = recorded.anonymized(facts)
    if out is not None:
        try:
            recorded.dump(facts, out)
        except OSError as error:
            raise ArgumentValueError(f"can't write {str(out)!r}: {error.strerror or error}") from error
    if as_json:
        output.emit_json(document(facts))
        return 0
    console = output.console()
    show(facts, console, origin=origin)
    for name, lines in notes.items():
        output.paragraph(f"Transport {name}", lines, console)
    if out is not None:
        replay = f"COMM_TOPOLOGY_FILE={out}, or commctl decide --file {out}"
        console.print(f"Written to {out}; to replay it: {replay}", soft_wrap=True)
    return 0


def _looked_at(file: Path | None) -> tuple[list[RankFacts], str, dict[str, list[str]]]:
    """Return the records, with the transports' own probes where they are of this machine, and what those say."""
    from comm_core.cli.decide import with_probes
    from comm_core.cli.remarks import remarks
    from comm_core.errors import CommError
    from comm_core.plugins.discovery import Registry, added

    facts, origin = machine_or_file(file)
    try:
        # The built-in transports have nothing to say of a machine, and importing them takes a second.
        plugins = added()
    except CommError:
        # Doctor says what is wrong with them; the machine can be shown all the same.
        plugins = Registry()
    if origin == "this machine":
        facts = with_probes(facts, plugins)
    return facts, origin, remarks(plugins, facts)


def show(facts: Sequence[RankFacts], out: Console, *, origin: str, details: bool = True) -> None:
    """Print tables of `facts`.

    Args:
        facts: one record a rank.
        out: where to.
        origin: where they come from, in words.
        details: whether to print hosts, versions and identities as well.
    """
    out.print(f"Topology: {origin}\n", style="bold", soft_wrap=True)
    on_gpu = [record for record in facts if record.device.kind == "cuda"]
    if on_gpu:
        _devices(on_gpu, out)
        if len(on_gpu) > 1:
            _links(on_gpu, out)
    cpu = [record.rank for record in facts if record.device.kind != "cuda"]
    if cpu:
        out.print("  No GPU\n" if len(facts) == 1 else f"  On the CPU: {_ranks(cpu)}\n")
    if details:
        if on_gpu:
            _paths(on_gpu, out)
            _identities(on_gpu, out)
        _hosts(facts, out)
        _versions(facts, out)
    else:
        hosts: dict[tuple[str, str], list[int]] = {}
        for record in facts:
            hosts.setdefault((record.host.boot_id, record.host.hostname), []).append(record.rank)
        output.columns("Hosts", ((name or "?", _ranks(ranks)) for (_, name), ranks in hosts.items()), out)
    output.paragraph("What could not be established, and why", _unknown(facts), out)


def _devices(facts: Sequence[RankFacts], out: Console) -> None:
    table = output.Sheet(
        "Devices", "rank", "name", "PCI", "NUMA", "MIG", "sm", "memory", "NVLinks", fixed=("PCI", "memory")
    )
    for record in facts:
        device = record.device
        table.add(
            str(record.rank),
            device.name or "?",
            device.pci_bus_id or "?",
            "?" if device.numa_node is None else str(device.numa_node),
            output.yes_no(device.mig),
            device.compute_capability or "?",
            "?" if device.memory_bytes is None else f"{device.memory_bytes / 2**30:.1f} GiB",
            "?" if device.nvlinks is None else str(device.nvlinks),
        )
    table.print(out)


def link(record: RankFacts, peer: RankFacts) -> str:
    """Return how the device of `record` reaches that of `peer`, as one word of the matrix."""
    if record.device.uuid and record.device.uuid == peer.device.uuid:
        return "same"
    pair = record.peers.get(peer.device.uuid) or PairFacts()
    # As the predicates have it: CUDA must grant the access, NVML must not deny it.
    if False in (pair.peer_access, pair.p2p_read, pair.p2p_write):
        return "SYS"
    if pair.peer_access is None:
        return "?"
    return {True: "NVLink", False: "P2P", None: "P2P?"}[pair.nvlink]


def _links(facts: Sequence[RankFacts], out: Console) -> None:
    def matrix(title: str, cell: dict[tuple[int, int], str]) -> None:
        table = output.Sheet(title, "", *(str(record.rank) for record in facts))
        for i, record in enumerate(facts):
            cells = ["." if i == j else cell[i, j] for j in range(len(facts))]
            table.add(str(record.rank), *cells)
        table.print(out)

    pairs = {(i, j): (a, b) for i, a in enumerate(facts) for j, b in enumerate(facts) if i != j}
    links = {key: link(a, b) for key, (a, b) in pairs.items()}
    matrix("Links (row to column)", links)
    legend = {
        "NVLink": "NVLink peer access",
        "P2P": "peer access over PCIe",
        "P2P?": "peer access, NVLink or not is unknown",
        "SYS": "no peer access: through host memory",
        "same": "the same GPU",
        "?": "unknown",
    }
    found = set(links.values())
    _legend(((word, text) for word, text in legend.items() if word in found), out)
    ancestors = {key: _distance(a, b) for key, (a, b) in pairs.items()}
    seen = set(ancestors.values())
    if found - {"NVLink", "same"} and seen - {"?"}:
        matrix("PCIe distance (common ancestor)", ancestors)
        _legend((item for item in (*_DISTANCES.values(), ("?", "unknown")) if item[0] in seen), out)


def _paths(facts: Sequence[RankFacts], out: Console) -> None:
    rows = [(str(record.rank), record.device.pcie_path.replace("/", " ")) for record in facts]
    if any(path for _, path in rows):
        output.columns("PCIe path (bridges above each rank's device)", ((n, path or "?") for n, path in rows), out)


def _legend(items: Iterable[tuple[str, str]], out: Console) -> None:
    output.note("; ".join(f"{word} = {text}" for word, text in items), out)


def _distance(record: RankFacts, peer: RankFacts) -> str:
    found = ancestor(record, peer)
    return "?" if found is None else _DISTANCES.get(found, (found, ""))[0]


def _identities(facts: Sequence[RankFacts], out: Console) -> None:
    rows = ((str(record.rank), record.device.uuid or "?") for record in facts)
    output.columns("Identity (UUID) of each rank's device", rows, out)
    fabrics: dict[str, list[int]] = {}
    for record in facts:
        fabrics.setdefault(_fabric(record), []).append(record.rank)
    output.columns("Multi-node NVLink fabric", ((_ranks(ranks), text) for text, ranks in fabrics.items()), out)


def _fabric(record: RankFacts) -> str:
    fabric = record.device.fabric
    if fabric is None:
        return "?"
    if fabric.state != "completed":
        return "?" if fabric.state == "unknown" else fabric.state.replace("_", " ")
    cluster = f"cluster {fabric.cluster_uuid}" if fabric.cluster_uuid.strip("0") else "no cluster (a single node)"
    return f"completed with status {fabric.status}, {cluster}, clique {fabric.clique_id}"


def _hosts(facts: Sequence[RankFacts], out: Console) -> None:
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for record in facts:
        host = record.host
        rows = (
            ("host name", host.hostname or "?"),
            ("boot id", host.boot_id or "?"),
            ("PID namespace", host.pid_namespace or "?"),
            ("IPC namespace", host.ipc_namespace or "?"),
            ("mount namespace", host.mount_namespace or "?"),
            ("network namespace", host.network_namespace or "?"),
            ("user id", "?" if host.uid is None else str(host.uid)),
        )
        groups.setdefault(rows, []).append(record.rank)
    for rows, ranks in groups.items():
        output.columns("Host" if len(groups) == 1 else f"Host of {_ranks(ranks)}", rows, out)


def _versions(facts: Sequence[RankFacts], out: Console) -> None:
    groups: dict[tuple[tuple[str, str], ...], list[int]] = {}
    for record in facts:
        rows = (*record.versions.items(), *record.environment.items())
        groups.setdefault(rows, []).append(record.rank)
    for rows, ranks in groups.items():
        title = "Versions and environment" + ("" if len(groups) == 1 else f" of {_ranks(ranks)}")
        output.columns(title, rows, out)


def _unknown(facts: Sequence[RankFacts]) -> list[str]:
    """Return notes and errors, each once with the ranks that have it."""
    texts: dict[str, list[int]] = {}
    for record in facts:
        if record.error is not None:
            texts.setdefault(f"the probe failed: {record.error}", []).append(record.rank)
        for note in record.notes:
            texts.setdefault(note, []).append(record.rank)
        for uuid, pair in record.peers.items():
            if pair.error:
                texts.setdefault(f"{uuid}: {pair.error}", []).append(record.rank)
        for name, value in record.plugins.items():
            error = value.get("error") if isinstance(value, dict) else None
            if error:
                texts.setdefault(f"the probe of transport {name!r}: {error}", []).append(record.rank)
    every = len(facts)
    return [text if len(ranks) == every else f"{_ranks(ranks)}: {text}" for text, ranks in texts.items()]


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + output.ranks_text(ranks)
