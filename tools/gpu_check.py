"""Test and measure on whatever GPUs are here, and write one report.

    python tools/gpu_check.py                        everything; the report replaces that of this kind of machine
    python tools/gpu_check.py --quick                less of everything, in about a minute
    python tools/gpu_check.py --only tests bench     some parts
    python tools/gpu_check.py --out FOLDER           where the report goes

Needs a GPU, torch, nvcc, ninja and pytest, and runs from the source tree: none of this project needs installing.
With one GPU, ranks are processes that share it, under MPS where that is installed. The report has neither host names
nor paths nor identifiers.

Exit codes: 0, everything passed (a missed time is reported and no more); 1, something failed; 2, there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu import report, sections
from gpu.processes import ROOT, clean_environment, run

RESULTS = ROOT / "docs" / "results"
_NO_GPU = 2


def environment_facts(folder: Path) -> dict[str, Any]:
    """Return what this machine is, found out in a process of its own: this one must not hold a GPU."""
    out = folder / "facts.json"
    command = [sys.executable, "-m", "gpu.facts", str(out)]
    done = run(command, environment=clean_environment(folder), timeout_s=90, log=folder / "facts.log")
    if done.code != 0:
        raise SystemExit(f"gpu_check: this machine could not be looked at ({done.verdict}):\n{done.tail}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    for name, tool in (("MPS", sections.mps.CONTROL), ("compute-sanitizer", "compute-sanitizer")):
        found[name] = shutil.which(tool) is not None
    return found


def commit() -> str | None:
    """Return the commit of the source tree, with a ``+`` where files differ from it; None without git."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip() or None
    return None


def target(options: argparse.Namespace, facts: dict[str, Any]) -> Path | None:
    """Return the report's path without suffix; None where a partial report would replace a full one."""
    name = f"{report.slug(str(facts['GPU']))}-{facts['GPUs']}x"
    if options.out is not None:
        return Path(options.out) / name
    return None if options.quick or options.only or options.packages else RESULTS / name


def check(options: argparse.Namespace, folder: Path) -> int:
    """Run the parts and write the report; return the exit code."""
    facts = environment_facts(folder)
    if not facts["GPUs"]:
        print("gpu_check: torch sees no CUDA device here, so nothing was tested or measured", file=sys.stderr)
        return _NO_GPU
    print(", ".join(f"{key}: {value}" for key, value in facts.items()), flush=True)
    packages = tuple(options.packages)
    context = sections.Context(folder, clean_environment(folder), facts["GPUs"], options.quick, packages)
    done: list[report.Section] = []
    for name in sections.SECTIONS:
        if options.only and name not in options.only:
            continue
        started = time.monotonic()
        print(f"{name} ...", flush=True)
        section = sections.execute(name, context)
        section.seconds = time.monotonic() - started
        done.append(section)
        print(
            f"{name}: {section.status}, {section.seconds:.0f} s" + "".join(f"\n  {why}" for why in section.why),
            flush=True,
        )
        for goal in section.goals:
            print(f"  {goal.name}: {goal.value} {goal.unit} (at most {goal.limit:g}): {goal.verdict}", flush=True)
    words = ["python tools/gpu_check.py", *(["--quick"] if options.quick else [])]
    words += ["--only", *options.only] if options.only else []
    words += ["--packages", *options.packages] if options.packages else []
    document = {
        "command": " ".join(words),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
        "environment": {"commit": commit(), **facts},
        "sections": [section.to_json() for section in done],
    }
    names = report.hosts()
    stem = target(options, facts)
    if stem is None:
        print(report.markdown(report.redact(document, names)))
        print("A part of the check does not replace the kept report; --out FOLDER writes one.")
    else:
        for path in report.write(document, stem, names):
            print(f"wrote {path}")
    failed = [section.name for section in done if section.status == "failed"]
    print(f"gpu_check: {'failed: ' + ', '.join(failed) if failed else 'passed'}")
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(sections.SECTIONS), metavar="PART", default=[],
                        help=f"parts to run: {', '.join(sections.SECTIONS)}")  # fmt: skip
    parser.add_argument("--packages", nargs="+", choices=sorted(path.name for path in (ROOT / "packages").iterdir()),
                        metavar="PACKAGE", default=[], help="whose tests to run: folders of packages/")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="fewer sizes, geometries and repeats")
    parser.add_argument("--out", metavar="FOLDER", help="where the report goes; default: docs/results")
    parser.add_argument("--keep-logs", metavar="FOLDER", help="keep everything that the parts printed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="gpu-check-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        try:
            return check(options, folder)
        finally:
            if options.keep_logs:
                kept = Path(options.keep_logs)
                kept.mkdir(parents=True, exist_ok=True)
                for path in [*folder.glob("*.log"), *folder.glob("*.json"), *folder.glob("*.xml")]:
                    shutil.copy(path, kept / path.name)


if __name__ == "__main__":
    raise SystemExit(main())
