"""``commctl plugins``: what became of every plugin."""

from __future__ import annotations

from dataclasses import asdict
from typing import cast

from comm_core._json import JsonObject
from comm_core.cli import output
from comm_core.cli.commands import command_apps
from comm_core.plugins.discovery import PluginReport, Registry, registry

__all__ = ["document", "run", "show"]


def document(plugins: Registry) -> JsonObject:
    """Return the JSON form."""
    apps, wrong = command_apps(plugins)
    reports = [cast("JsonObject", asdict(report)) for report in plugins.reports]
    return {"plugins": reports, "commands": list(apps), "command_errors": wrong}


def run(*, as_json: bool, strict: bool) -> int:
    """Print the report; return the exit code."""
    with output.quiet_stdout():
        plugins = registry()
    if as_json:
        output.emit_json(document(plugins))
    else:
        show(plugins)
    return int(strict and any(report.state != "loaded" for report in plugins.reports))


def show(plugins: Registry) -> None:
    """Print the table of plugins, and below it what is wrong."""
    out = output.console()
    table = output.Sheet("Plugins", "plugin", "package", "api", "state", "provides", "load", fixed=("state", "load"))
    for report in plugins.reports:
        package = f"{report.distribution} {report.version}".strip() or "registered by code"
        load = f"{report.seconds * 1000:.0f} ms"
        table.add(report.name, package, report.api or "-", report.state, _provides(report), load)
    table.print(out)
    apps, wrong = command_apps(plugins)
    if apps:
        out.print(
            f"Commands of plugins: {output.listed(apps)} (`commctl NAME --help` explains one)\n", soft_wrap=True
        )
    problems = [f"{report.name}: {report.state}: {report.error}" for report in plugins.reports if report.error]
    problems += [f"{report.name}: {warning}" for report in plugins.reports for warning in report.warnings]
    output.paragraph("Problems", problems + wrong, out)


def _provides(report: PluginReport) -> str:
    kinds = (("transport", report.transports), ("codec", report.codecs), ("all-reduce", report.allreduce))
    return "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds if names) or "-"
