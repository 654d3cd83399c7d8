"""``commctl demo lowp``: its options, and what is printed."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, cast

import typer

from comm_core._json import JsonObject
from comm_core.errors import ArgumentValueError
from comm_lowp.sage2.grid import LAYOUTS, ceil_div

__all__ = ["GATES", "accuracy", "app", "run"]

GATES = {"normal": (0.999, 0.045), "biased": (0.999, 0.03)}
"""Data -> (least cosine, largest relative L2) that counts as agreement."""


class _Layout(str, Enum):
    sm90 = "sage2_sm90"
    sm89 = "sage2_sm89_sm120"


class _Dtype(str, Enum):
    bfloat16 = "bfloat16"
    float16 = "float16"


class _Data(str, Enum):
    biased = "biased"
    normal = "normal"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def lowp(
    ranks: Annotated[int, typer.Option("--ranks", "-n", min=1, max=64, help="Processes on the CPU.")] = 4,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Live rows; they are padded to divide.")] = 1001,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Attention heads; they must divide.")] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", help="64 or 128.")] = 128,
    layout: Annotated[_Layout, typer.Option("--layout", help="Of the consumer.")] = _Layout.sm90,
    dtype: Annotated[_Dtype, typer.Option("--dtype", help="Of Q, K and V.")] = _Dtype.bfloat16,
    data: Annotated[
        _Data, typer.Option("--data", help="normal: N(0, 1); biased: neighbours alike, K and V biased.")
    ] = _Data.biased,
    seed: Annotated[int, typer.Option("--seed", help="Of the data.")] = 0,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, metavar="S", help="Seconds for everything.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Exchange Q, K and V in low precision between CPU ranks, attend, and compare.

    Exits with 1 if a byte differs from what one device makes of the whole sequence, or if attention is less accurate
    than it must be.
    """
    options: JsonObject = {
        "ranks": ranks,
        "used": tokens,
        "rows": ceil_div(tokens, ranks),
        "heads": heads,
        "head_dim": head_dim,
        "layout": layout.value,
        "dtype": dtype.value,
        "data": data.value,
        "seed": seed,
    }
    try:
        document = run(options, timeout)
    except ArgumentValueError as error:
        print(f"commctl: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps(document, indent=2))
    else:
        _show(document)
    raise typer.Exit(0 if document["ok"] else 1)


def run(options: JsonObject, timeout_s: float) -> JsonObject:
    """Run the ranks and return what came out.

    Raises:
        ArgumentValueError: the options don't fit.
        CommError: a rank failed.
    """
    from comm_core.demo.ranks import run_ranks

    ranks, heads = int(str(options["ranks"])), int(str(options["heads"]))
    if heads % ranks:
        raise ArgumentValueError(f"--heads {heads} must divide among --ranks {ranks}")
    if options["head_dim"] not in (64, 128):
        raise ArgumentValueError(f"--head-dim must be 64 or 128, got {options['head_dim']}")
    threads = max(1, (os.cpu_count() or 1) // ranks)
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "COMM_LOWP_LAYOUT": str(options["layout"]),
        **({} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": "lo"}),
    }
    results = cast(
        "list[Mapping[str, Any]]",
        run_ranks(
            [sys.executable, "-m", "comm_lowp.demo.worker"],
            ranks,
            {**options, "threads": threads, "timeout_s": min(60.0, timeout_s / 2)},
            timeout_s=timeout_s,
            environment=environment,
        ),
    )
    return _document(options, results)


def accuracy(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return cosine, relative L1 and relative L2 from the ranks' sums."""
    total = {key: sum(part[key] for part in parts) for key in parts[0]}
    norm = math.sqrt(total["x2"] * total["y2"])
    return {
        "cosine": total["dot"] / norm if norm else float(total["d2"] == 0.0),
        "relative_l1": total["l1"] / total["y1"] if total["y1"] else total["l1"],
        "relative_l2": math.sqrt(total["d2"] / total["y2"]) if total["y2"] else math.sqrt(total["d2"]),
    }


def _document(options: JsonObject, results: Sequence[Mapping[str, Any]]) -> JsonObject:
    first = results[0]
    ranks = len(results)
    sums = {name: [result["sums"][name] for result in results] for name in first["sums"]}
    found = {name: accuracy(parts) for name, parts in sums.items()}
    clean = all(part["finite"] == 1.0 and part["tail"] == 0.0 for parts in sums.values() for part in parts)
    cosine, l2 = GATES[str(options["data"])]
    good = clean and all(item["cosine"] >= cosine and item["relative_l2"] <= l2 for item in found.values())
    identical = all(result["identical"] for result in results)
    away = ranks - 1
    chunk, codes, scales = (int(first[key]) for key in ("chunk_bytes", "code_bytes", "scale_bytes"))
    wire = {
        "codes": codes * away,
        "scales": scales * away,
        "padding": (chunk - codes - scales) * away,
        "statistics": int(first["statistics_bytes"]) * away,
        "all": int(first["bytes_sent"]),
        "sixteen_bit": 2 * codes * away,
    }
    counted = wire["all"] == sum(wire[key] for key in ("codes", "scales", "padding", "statistics"))
    return {
        "ok": good and identical and counted,
        "options": options,
        "identical_to_one_device": identical,
        "accuracy": cast("JsonObject", found),
        "accurate": good,
        "gate": {"cosine": cosine, "relative_l2": l2},
        "wire_bytes_per_rank": cast("JsonObject", wire),
        "layout": {
            key: first[key]
            for key in ("layout", "transport", "v_shape", "q_scale_shape", "k_scale_shape", "q_slots", "k_slots")
        },
    }


def _show(document: JsonObject) -> None:
    from comm_core.cli import output

    out = output.console()
    result = cast("dict[str, Any]", document)
    options, layout, wire = result["options"], result["layout"], result["wire_bytes_per_rank"]
    ranks, rows, used = options["ranks"], options["rows"], options["used"]
    consumer = LAYOUTS[layout["layout"]]
    out.print("Q, K and V in low precision\n", style="bold")
    output.columns(
        "Set-up",
        [
            ("ranks", f"{ranks} processes on the CPU over {layout['transport']}"),
            ("sequence", f"{used} live rows, {rows} a rank, {ranks * rows} with padding"),
            ("operands", f"[B, L, H, D] = [1, {rows}, {options['heads']}, {options['head_dim']}] {options['dtype']}"),
            ("data", f"{options['data']}, seed {options['seed']}"),
        ],
        out,
    )
    output.columns(
        f"Layout {layout['layout']}",
        [
            ("Q", f"int8, a scale for {consumer.q_group} rows: {layout['q_scale_shape']}; {layout['q_slots']} sent"),
            ("K", f"int8, a scale for {consumer.k_group} rows: {layout['k_scale_shape']}; {layout['k_slots']} sent"),
            ("V", f"e4m3, a scale for a channel, scaled to {consumer.v_max:g}: {layout['v_shape']}"),
        ],
        out,
    )
    sheet = output.Sheet("Bytes that leave a rank", "what", "bytes", "of 16 bit")
    whole = wire["sixteen_bit"]
    for key, text in (
        ("codes", "codes of Q, K and V"),
        ("scales", "scales"),
        ("padding", "padding"),
        ("statistics", "statistics"),
        ("all", "all"),
        ("sixteen_bit", f"Q, K and V in {options['dtype']}"),
    ):
        sheet.add(text, f"{wire[key]:,}", f"{wire[key] / whole:.1%}" if whole else "-")
    sheet.print(out)
    sheet = output.Sheet("Against fp64 attention of the inputs", "attention", "cosine", "relative L1", "relative L2")
    for name, found in result["accuracy"].items():
        sheet.add(name, f"{found['cosine']:.6f}", f"{found['relative_l1']:.4f}", f"{found['relative_l2']:.4f}")
    sheet.print(out)
    gate = result["gate"]
    same = "equal" if result["identical_to_one_device"] else "DIFFER FROM"
    good = "within" if result["accurate"] else "NOT WITHIN"
    output.columns(
        "Result",
        [
            ("bytes", f"the operands of all ranks {same} those of one device with the whole sequence"),
            ("accuracy", f"{good} cosine {gate['cosine']:g} and relative L2 {gate['relative_l2']:g}"),
        ],
        out,
    )
