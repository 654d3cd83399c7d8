"""What the demo says: before the ranks run, and when they are done."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from comm_core._json import Json
from comm_core.cli import output
from comm_core.cli.topo import show as show_topology
from comm_core.demo.setup import PATCH, Crop, Placement
from comm_core.topology.facts import RankFacts

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TOLERANCE", "document", "finish", "start"]

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""Largest difference that counts as agreement, as a part of the largest change that the layers make.

Sharded and unsharded products are blocked differently, so that their sums round differently; the layers pass that on.
Measured on a CPU it is some 1e-6 in float32, and what one wrong exchange does is above 1e-1.
"""


def start(options: argparse.Namespace, placement: Placement, cut: Crop, threads: int) -> Console:
    """Print what will be run, and return the console."""
    out = output.console()
    out.print("Ulysses sequence parallelism over the tokens of a picture\n", style="bold")
    used = (cut.columns * PATCH, cut.rows * PATCH)
    cropped = "all of it" if used == (cut.width, cut.height) else f"cropped to {used[0]} by {used[1]}"
    each = cut.tokens // placement.ranks
    plural = "s" * (placement.ranks != 1)
    rows = [
        ("picture", f"grace_hopper.jpg of matplotlib, {cut.width} by {cut.height} pixels, {cropped}"),
        (
            "sequence",
            f"{cut.rows} by {cut.columns} patches of {PATCH} by {PATCH} pixels = {cut.tokens} tokens, {each} a rank, "
            f"so that they divide among {placement.ranks} rank{plural}",
        ),
        (
            "layers",
            f"{options.layers} attention layer{'s' * (options.layers != 1)} in the manner of Wan2.1, {options.heads} "
            f"heads of {options.head_dim}, {options.dtype}, weights from seed {options.seed}",
        ),
        ("operands", f"[B, S, H, D] = [1, {each}, {options.heads}, {options.head_dim}] on each rank"),
        (
            "ranks",
            f"{placement.why}; {threads} thread{'s' * (threads != 1)} each; process group {placement.group_backend}",
        ),
    ]
    if options.sabotage != "none":
        rows.append(("ON PURPOSE", f"--break {options.sabotage}: the results must not agree"))
    output.columns("Set-up", rows, out)
    return out


def document(
    options: argparse.Namespace,
    placement: Placement,
    cut: Crop,
    opened: Mapping[str, Any],
    results: Sequence[Mapping[str, Any]],
) -> dict[str, Json]:
    """Return everything that came out, as JSON."""
    first = results[0]
    rate = min(float(result["memcpy_bytes_per_s"]) for result in results)
    sent = [int(result["bytes_sent"]) for result in results]
    expected = [int(result["bytes_expected"]) for result in results]
    exchanges = sum(int(result["exchanges"]) for result in results)
    wrong = sum(int(result["exchanges_wrong"]) for result in results)
    layers = options.layers * options.steps
    per_layer = int(first["bytes_timed"]) // layers
    phases = {
        phase: max(float(result["phases"][phase]) for result in results)
        for phase in cast("dict[str, Any]", first["phases"])
    }
    scale = max(float(first["max_abs_change"]), 1e-30)
    error = float(first["max_abs_error"])
    agree = bool(first["finite"]) and error <= TOLERANCE[options.dtype] * scale
    counted = sent == expected
    exact = wrong == 0 and exchanges == placement.ranks * options.layers * 4
    return {
        "ok": agree and counted and exact,
        "placement": {
            "ranks": placement.ranks,
            "device": placement.device,
            "gpus": placement.gpus,
            "group_backend": placement.group_backend,
            "shared_gpu": placement.shared,
            "why": placement.why,
        },
        "sequence": {
            "picture": [cut.width, cut.height],
            "tokens": cut.tokens,
            "tokens_per_rank": cut.tokens // placement.ranks,
            "patches": [cut.rows, cut.columns],
        },
        "model": {
            "heads": options.heads,
            "head_dim": options.head_dim,
            "layers": options.layers,
            "dtype": options.dtype,
            "seed": options.seed,
        },
        "sabotage": options.sabotage,
        "topology": opened["facts"],
        "decision": opened["decision"],
        "exchange": {
            "bytes_sent": cast("Json", sent),
            "bytes_expected": cast("Json", expected),
            "counted": counted,
            "checked": exchanges,
            "wrong": wrong,
            "bit_exact": exact,
        },
        "seconds_per_layer": cast("Json", phases),
        "floor": {
            "bytes_per_layer": per_layer,
            "memcpy_bytes_per_s": rate,
            "seconds_per_layer": per_layer / rate,
        },
        "comparison": {
            "agree": agree,
            "max_abs_error": error,
            "max_abs_output": first["max_abs_output"],
            "max_abs_change": first["max_abs_change"],
            "tolerance": TOLERANCE[options.dtype] * scale,
        },
    }


def finish(result: Mapping[str, Any], opened: Mapping[str, Any], out: Console) -> None:
    """Print topology, decision, exchanges, times, and the comparison."""
    facts = [RankFacts.from_json(record) for record in opened["facts"]]
    show_topology(facts, out, origin=_origin(facts), details=False)
    decision = result["decision"]
    route = f" ({decision['route']})" if decision["route"] else ""
    out.print(f"Decision: {decision['backend']}{route}", style="bold")
    out.print(f"  because {decision['reason']}\n")
    table = output.Sheet(
        "Considered, in the order of preference", "transport", "usable", "reason", fixed=("transport",)
    )
    for item in decision["considered"]:
        chosen = item["name"] == decision["backend"]
        table.add(item["name"], "chosen" if chosen else output.yes_no(item["eligible"]), item["reason"])
    table.print(out)
    _exchange(result, out)
    _times(result, out)
    _comparison(result, out)


def _origin(facts: Sequence[RankFacts]) -> str:
    return "recorded (COMM_TOPOLOGY_FILE)" if any(record.recorded for record in facts) else "as the ranks found it"


def _exchange(result: Mapping[str, Any], out: Console) -> None:
    exchange = result["exchange"]
    sent, expected = exchange["bytes_sent"], exchange["bytes_expected"]
    if exchange["counted"]:
        text = f"{_bytes(sent[0])} left each rank, as it must be"
    else:
        texts = {f"{_bytes(a)} instead of {_bytes(b)}" for a, b in zip(sent, expected, strict=True) if a != b}
        text = f"WRONG: what left the ranks is {'; '.join(sorted(texts))}"
    if exchange["bit_exact"]:
        exact = f"all {exchange['checked']} that were compared with an all-gather are equal bit for bit"
    elif exchange["checked"]:
        exact = f"WRONG: {exchange['wrong']} of {exchange['checked']} differ from an all-gather of the operands"
    else:
        exact = "WRONG: there was none to compare"
    output.columns("Exchanges", [("bytes", text), ("results", exact)], out)


def _times(result: Mapping[str, Any], out: Console) -> None:
    phases: dict[str, float] = result["seconds_per_layer"]
    floor = result["floor"]
    table = output.Sheet(
        "Time a layer (median of each rank, slowest rank)", "phase", "ms", "share", fixed=("ms", "share")
    )
    total = sum(phases.values()) or 1.0
    for phase, seconds in phases.items():
        table.add(phase, f"{seconds * 1e3:.1f}", f"{100 * seconds / total:.0f} %")
    table.print(out)
    exchange = sum(seconds for phase, seconds in phases.items() if phase.startswith("exchange"))
    if exchange and floor["bytes_per_layer"]:
        text = (
            f"The exchanges take {exchange * 1e3:.1f} ms for {_bytes(floor['bytes_per_layer'])} a rank. Copying as "
            f"much in memory, on all ranks at once, takes {floor['seconds_per_layer'] * 1e3:.2f} ms "
            f"({floor['memcpy_bytes_per_s'] / 1e9:.1f} GB/s): no transport can be faster."
        )
        output.note(text, out)


def _comparison(result: Mapping[str, Any], out: Console) -> None:
    comparison = result["comparison"]
    rows = [
        ("largest difference", f"{comparison['max_abs_error']:.3g}"),
        ("may be", f"{comparison['tolerance']:.3g}, as sums round differently in pieces"),
        (
            "largest output",
            f"{comparison['max_abs_output']:.3g}, changed by the layers by {comparison['max_abs_change']:.3g}",
        ),
    ]
    output.columns("Compared with the unsharded layers", rows, out)
    if result["ok"]:
        verdict = "They agree."
    elif comparison["agree"]:
        verdict = "The results agree, but the exchanges are not what they must be."
    else:
        verdict = "They do NOT agree."
    out.print(f"{verdict} ({result['seconds']:.1f} s)", style="bold")


def _bytes(count: int) -> str:
    return f"{count} bytes" if count < 10**4 else f"{count / 1e6:.2f} MB"
