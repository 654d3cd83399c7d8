"""The demo's command line: places the ranks, runs them, and reports."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, cast

from comm_core import _env
from comm_core._json import Json, JsonObject
from comm_core.demo import report, setup
from comm_core.demo.ranks import Event, run_ranks
from comm_core.errors import ArgumentValueError, CommError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "parse", "run"]

_DTYPES = ("float32", "bfloat16", "float16")
_BREAKS = {
    "none": "nothing",
    "corrupt": "the last rank swaps pieces of K after an exchange",
    "skip": "nobody exchanges anything",
    "die": "the last rank ends in the middle",
    "hang": "the last rank stops in the middle",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options; exits with 2 where they can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m comm_core.demo",
        description="Run attention layers in the manner of Wan2.1 over the tokens of a picture, with the sequence "
        "shared by several ranks, and compare with the unsharded layers. Exits with 0 if they agree.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--ranks", type=_positive, metavar="N", help="processes; default: one a GPU, or 4 on one GPU or the CPU")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: CUDA where torch sees a GPU")
    add(
        "--backend",
        default="auto",
        help="transport of the communicator: auto, or a name that is then used or refused",
    )
    add("--heads", type=_positive, default=12, help="attention heads (default 12, as Wan2.1 1.3B; 14B has 40)")
    add("--head-dim", type=_positive, default=128, help="their size (default 128)")
    add("--layers", type=_positive, default=3, help="layers (default 3)")
    add("--steps", type=_positive, default=2, help="timed passes through all layers, after a checked one (default 2)")
    add("--dtype", choices=_DTYPES, default="float32", help="default float32")
    add("--seed", type=int, default=0, help="of the weights (default 0)")
    add("--timeout", type=_seconds, default=300.0, metavar="S", help="seconds that everything may take (default 300)")
    add("--json", action="store_true", help="print one JSON document and nothing else")
    add(
        "--break",
        dest="sabotage",
        choices=tuple(_BREAKS),
        default="none",
        help="do something wrong on purpose, to see that it is noticed: "
        + ", ".join(f"{name} ({text})" for name, text in _BREAKS.items() if name != "none"),
    )
    options = parser.parse_args(arguments)
    if options.head_dim % 2:
        parser.error(f"--head-dim must be even for RoPE, got {options.head_dim}")
    return options


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"must be in (0, 86400], got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the demo and exit."""
    options = parse(arguments)
    try:
        document = run(options)
    except ArgumentValueError as error:
        _fail(options, str(error), 2)
    except CommError as error:
        _fail(options, str(error), 1)
    except KeyboardInterrupt:
        _fail(options, "interrupted; the ranks were ended", 130)
    if options.json:
        print(json.dumps(document, indent=2))
    sys.exit(0 if document["ok"] else 1)


def _fail(options: argparse.Namespace, text: str, code: int) -> NoReturn:
    if options.json:
        print(json.dumps({"ok": False, "error": text}, indent=2))
    print(f"demo: {text}", file=sys.stderr)
    sys.exit(code)


def run(options: argparse.Namespace) -> JsonObject:
    """Run the ranks and return what came out; prints the report on the way unless ``--json``.

    Raises:
        ArgumentValueError: the options make no sense on this machine.
        CommError: the picture is missing, or a rank failed.
    """
    began = time.monotonic()
    gpus = 0 if options.device == "cpu" else setup.gpu_count()
    placement = setup.place(options.ranks, options.heads, gpus, options.device, options.backend)
    picture = setup.find_picture()
    width, height = setup.picture_size(picture)
    cut = setup.crop(width, height, placement.ranks)
    threads = max(1, setup.cores() // placement.ranks)
    out = None if options.json else report.start(options, placement, cut, threads)
    opened: dict[str, Any] = {}

    with _progress(options) as show:

        def on_event(rank: int, event: Event) -> None:
            if event["event"] == "opened":
                opened.update(event)
            elif rank == 0 and "done" in event:
                show(str(event["at"]), int(event["done"]), int(event["total"]))

        results = run_ranks(
            [sys.executable, "-m", "comm_core.demo.worker"],
            placement.ranks,
            _arguments(options, placement, cut, str(picture), threads),
            timeout_s=options.timeout,
            environment=_environment(options, placement, threads),
            on_event=on_event,
        )
    document = report.document(options, placement, cut, opened, cast("list[dict[str, Any]]", results))
    document["seconds"] = round(time.monotonic() - began, 3)
    if out is not None:
        report.finish(document, opened, out)
    return document


def _arguments(
    options: argparse.Namespace, placement: setup.Placement, cut: setup.Crop, picture: str, threads: int
) -> dict[str, Json]:
    return {
        "picture": picture,
        "rows": cut.rows,
        "columns": cut.columns,
        "threads": threads,
        "device": placement.device,
        "gpus": placement.gpus,
        "group_backend": placement.group_backend,
        "timeout_s": _step_timeout_s(options),
        "backend": options.backend,
        "heads": options.heads,
        "head_dim": options.head_dim,
        "layers": options.layers,
        "steps": options.steps,
        "dtype": options.dtype,
        "seed": options.seed,
        "break": options.sabotage,
    }


def _step_timeout_s(options: argparse.Namespace) -> float:
    """Return the deadline of a step: sooner than the hard one, so that the ranks can say who is missing."""
    return _env.timeout_s() if "COMM_TIMEOUT_S" in os.environ else min(60.0, options.timeout / 2)


def _environment(options: argparse.Namespace, placement: setup.Placement, threads: int) -> dict[str, str]:
    values = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # All ranks are on this machine, and its host name need not resolve to anything that gloo can listen on.
        values["GLOO_SOCKET_IFNAME"] = "lo"
    if "COMM_TIMEOUT_S" not in os.environ:
        values["COMM_TIMEOUT_S"] = f"{_step_timeout_s(options):g}"
    if placement.shared:
        values["COMM_ALLOW_SHARED_GPU"] = "1"
    return values


@contextmanager
def _progress(options: argparse.Namespace) -> Generator[Callable[[str, int, int], None]]:
    """Show a bar on standard error while that is a terminal; it goes away at the end."""
    if options.json or not sys.stderr.isatty():
        yield lambda what, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    parts = (BarColumn(bar_width=24), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*parts, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting the ranks", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
