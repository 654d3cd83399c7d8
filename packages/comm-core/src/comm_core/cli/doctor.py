"""``commctl doctor``: what is installed, what is usable here and why not, and what each route was verified on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from comm_core import _cuda, _env, _nvml, known
from comm_core._json import Json, JsonObject
from comm_core._version import __version__
from comm_core.cli import output
from comm_core.cli.decide import Options, imagined_ranks, with_probes
from comm_core.cli.remarks import remarks
from comm_core.cli.topo import machine_or_file
from comm_core.errors import CommError
from comm_core.plugins.discovery import Registry, registry
from comm_core.selection.offline import Wanted, look
from comm_core.topology.facts import RankFacts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Check", "document", "examine", "run"]

_PACKAGES = ("typer", "rich", "pluggy", "packaging", "nvidia-ml-py", "cuda-bindings")
_OTHER_VARIABLES = {
    "CUDA_MODULE_LOADING": "LAZY (CUDA's default): a kernel may be loaded while others spin, which can deadlock",
    "CUDA_VISIBLE_DEVICES": "which GPUs this process sees",
    "NCCL_P2P_DISABLE": "1: no peer-to-peer access, for any transport",
    "NCCL_P2P_LEVEL": "how far apart GPUs may be for peer-to-peer access",
}
_CHECKS: dict[str, Callable[[], object]] = {
    "COMM_TIMEOUT_S": _env.timeout_s,
    "COMM_CHECK": _env.check,
    "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS": _env.allow_experimental_auto,
    "COMM_ALLOW_SHARED_GPU": _env.allow_shared_gpu,
    "COMM_PEER_MEMORY": _env.peer_memory,
    "COMM_ULYSSES_PCIE_ROUTE": _env.pcie_route,
    "COMM_ULYSSES_PCIE_NICS": _env.pcie_nics,
    "COMM_ULYSSES_PCIE_GID_INDICES": _env.pcie_gid_indices,
    "COMM_TRACE_HOOKS": _env.trace_hooks,
}
_BROKEN = ("broken", "incompatible", "duplicate")


@dataclass
class Check:
    """What was found.

    Attributes:
        versions: name -> version; an empty one is not there.
        devices: in words.
        variables: name -> (value or None, what it does).
        transports: one row a transport that is installed or known: name, package, state, usable, reason,
            verified_on.
        missing: known names that are not installed -> how to get them.
        problems: what is broken.
        remarks: what is worth knowing and no fault.
        notes: transport -> what it says of this machine and of itself.
    """

    versions: dict[str, str] = field(default_factory=dict[str, str])
    devices: str = ""
    variables: dict[str, tuple[str | None, str]] = field(default_factory=dict[str, "tuple[str | None, str]"])
    transports: list[dict[str, Json]] = field(default_factory=list["dict[str, Json]"])
    missing: dict[str, str] = field(default_factory=dict[str, str])
    problems: list[str] = field(default_factory=list[str])
    remarks: list[str] = field(default_factory=list[str])
    notes: dict[str, list[str]] = field(default_factory=dict[str, "list[str]"])


def run(*, as_json: bool, strict: bool) -> int:
    """Examine and print; return the exit code."""
    with output.quiet_stdout():
        found = examine()
    if as_json:
        output.emit_json(document(found))
    else:
        _show(found, output.console())
    return int(strict and bool(found.problems))


def examine() -> Check:
    """Look at everything. What can't be found out is a problem or a remark, never an exception."""
    found = Check()
    _variables(found)
    plugins = _plugins(found)
    _versions(found)
    _transports(found, plugins)
    _missing(found, plugins)
    return found


def _plugins(found: Check) -> Registry:
    try:
        plugins = registry()
    except CommError as error:
        found.problems.append(f"plugin discovery failed: {error}")
        return Registry()
    for report in plugins.reports:
        where = f"plugin {report.name!r} ({report.distribution} {report.version})"
        if report.state in _BROKEN:
            found.problems.append(f"{where} is {report.state}: {report.error}")
        elif report.state != "loaded":
            found.remarks.append(f"{where} is {report.state}: {report.error}")
        found.remarks += [f"{where}: {warning}" for warning in report.warnings]
    return plugins


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _versions(found: Check) -> None:
    versions = found.versions
    versions["comm-core"] = __version__
    for name in sorted({item.distribution for item in (*known.TRANSPORTS.values(), *known.CODECS.values())}):
        if name != "comm-core":
            versions[name] = _version(name)
    versions["Python"] = platform.python_version()
    for name in _PACKAGES:
        versions[name] = _version(name)
    try:
        versions["torch"] = str(_cuda.source().__version__)
        versions["CUDA of torch"] = _cuda.runtime_version() or ""
        versions["NCCL of torch"] = _cuda.nccl_version() or ""
        count = _cuda.device_count()
    except Exception as error:
        found.problems.append(f"torch can't be used: {type(error).__name__}: {error}")
        count = 0
    with _nvml.session() as nvml:
        versions["NVIDIA driver"] = nvml.driver_version() or ""
        versions["CUDA of driver"] = nvml.cuda_driver_version() or ""
        gpus = len(nvml.devices())
        if not nvml.available:
            found.remarks.append(nvml.reason)
    found.devices = f"{gpus} by NVML, {count} by CUDA in this process"
    if gpus and not versions.get("CUDA of torch"):
        found.remarks.append("this machine has a GPU, and this torch was built without CUDA")
    elif gpus and not count:
        found.remarks.append("CUDA shows none of this machine's GPUs to this process (CUDA_VISIBLE_DEVICES? driver?)")


def _variables(found: Check) -> None:
    for name, meaning in {**_env.VARIABLES, **_OTHER_VARIABLES}.items():
        value = os.environ.get(name)
        if name == "CUDA_VISIBLE_DEVICES" and value is not None:
            # It may hold UUIDs, and what doctor prints ends up in issues.
            value = "(set)"
        found.variables[name] = (value, meaning)
        check = _CHECKS.get(name)
        if check is not None:
            try:
                check()
            except CommError as error:
                found.problems.append(str(error))
    if os.environ.get("COMM_ALLOW_SHARED_GPU") == "1":
        found.remarks.append("COMM_ALLOW_SHARED_GPU=1: ranks may share a GPU, which is for testing only")


def _transports(found: Check, plugins: Registry) -> None:
    facts = _facts(found, plugins)
    owners = {name: report for report in plugins.reports for name in report.transports}
    found.notes = remarks(plugins, facts)
    for name in [*plugins.transports, *(name for name in known.TRANSPORTS if name not in plugins.transports)]:
        transport = plugins.transports.get(name)
        usable, reason = None, "there is no topology to decide with"
        if transport is None:
            reason = plugins.why_missing(name)
        elif facts:
            usable, reason = _usable(name, facts, plugins, found)
        package = f"{owners[name].distribution} {owners[name].version}".strip() if name in owners else ""
        found.transports.append(
            {
                "name": name,
                "package": package or None,
                "installed": transport is not None,
                "usable": usable,
                "reason": reason,
                "verified_on": [] if transport is None else list(transport.verified_on),
            }
        )


def _facts(found: Check, plugins: Registry) -> list[RankFacts]:
    try:
        records, origin = machine_or_file(None)
    except CommError as error:
        found.problems.append(f"there is no topology to decide with: {error}")
        return []
    found.problems += [f"the probe of rank {item.rank} failed: {item.error}" for item in records if item.error]
    recorded = origin != "this machine"
    facts = imagined_ranks(records, Options(), recorded=recorded)
    return facts if recorded else with_probes(facts, plugins)


def _usable(name: str, facts: Sequence[RankFacts], plugins: Registry, found: Check) -> tuple[bool, str]:
    """Return whether a group with one rank a GPU, and a process group that suits, could use the transport `name`."""
    on_cuda = all(record.device.kind == "cuda" for record in facts)
    if name == "nccl" and not found.versions.get("NCCL of torch"):
        return False, "this torch was built without NCCL"
    control = {"cuda": "nccl"} if on_cuda and name != "gloo" else {"cpu": "gloo", "cuda": "gloo"}
    try:
        considered = look(facts, plugins, Wanted(name, control)).considered
    except CommError as error:
        return False, str(error)
    return considered[0].eligible, considered[0].reason


def _missing(found: Check, plugins: Registry) -> None:
    for name in known.TRANSPORTS:
        if name not in plugins.transports and known.install_hint(name):
            found.missing[name] = known.install_hint(name)
    for name in known.CODECS:
        if name not in plugins.codecs and known.install_hint(name):
            found.missing[name] = known.install_hint(name)


def document(found: Check) -> JsonObject:
    """Return the JSON form."""
    return {
        "versions": {name: version or None for name, version in found.versions.items()},
        "devices": found.devices,
        "environment": {
            name: {"value": value, "meaning": meaning} for name, (value, meaning) in found.variables.items()
        },
        "transports": list(found.transports),
        "missing": dict(found.missing),
        "problems": list(found.problems),
        "remarks": list(found.remarks),
        "notes": {name: list(lines) for name, lines in found.notes.items()},
    }


def _show(found: Check, out: Console) -> None:
    output.columns("Versions", [(name, version or "-") for name, version in found.versions.items()], out)
    out.print(f"GPUs: {found.devices}\n")
    table = output.Sheet("Transports", "name", "package", "usable here", "verified on", fixed=("name",))
    for row in found.transports:
        usable = output.yes_no(cast("bool | None", row["usable"])) if row["installed"] else "not installed"
        verified = ", ".join(cast("list[str]", row["verified_on"])) or "nothing yet"
        table.add(str(row["name"]), str(row["package"] or "-"), usable, verified if row["installed"] else "-")
    table.print(out)
    whys = [f"{row['name']}: {row['reason']}" for row in found.transports if row["installed"]]
    output.paragraph("Why", whys, out)
    for name, lines in found.notes.items():
        output.paragraph(f"Transport {name}", lines, out)
    output.columns("Known and not installed", found.missing.items(), out)
    table = output.Sheet("Environment", "variable", "value", "meaning", fixed=("variable",))
    for name, (value, meaning) in found.variables.items():
        table.add(name, "-" if value is None else value or "(empty)", meaning)
    table.print(out)
    output.paragraph("Remarks", found.remarks, out)
    output.paragraph("Problems", found.problems, out)
    if not found.problems:
        out.print("Nothing that is installed is broken.")
