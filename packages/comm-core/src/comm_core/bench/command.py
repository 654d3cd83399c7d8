"""``commctl bench ulysses``: what is measured in which order, and what becomes of what fails."""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comm_core.bench import floor, geometry, launch, plot, redact, report
from comm_core.bench.geometry import Geometry
from comm_core.bench.launch import Placement
from comm_core.bench.options import SharedOptions
from comm_core.errors import ArgumentValueError, CommError

__all__ = ["MODES", "Options", "geometries_of", "modes_of", "run"]

MODES = ("direct", "staged", "max_sms=0", "pool")
_NEEDS = {"max_sms=0": "max_sms", "pool": "pool_bytes"}
"""Mode -> argument of the communicator without which it can't be had."""
_REFUSALS = frozenset({"UlyssesBackendError", "UnsupportedError", "JointValueError", "ArgumentValueError"})
"""Classes of errors by which something that nobody asked for by name is left out, with the reason."""
_FLOOR_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Options(SharedOptions):
    """The options of the command line."""

    modes: tuple[str, ...] = ()
    geometries: tuple[str, ...] = ()
    cold: bool = False


@dataclass
class _Found:
    """What has been measured so far."""

    environment: Mapping[str, Any] = field(default_factory=dict[str, Any])
    floor: floor.Floor | None = None
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    left_out: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    errors: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    seconds: dict[str, float] = field(default_factory=dict[str, float])

    def leave_out(self, what: str, why: str) -> None:
        self.left_out.append({"what": what, "why": _line(why)})

    def fail(self, what: str, why: str) -> None:
        self.errors.append({"what": what, "why": _line(why)})


def _line(text: str) -> str:
    return " ".join(text.split())


def geometries_of(options: Options, placement: Placement) -> tuple[Geometry, ...]:
    """Return what is exchanged: as asked, or what suits the device.

    Raises:
        ArgumentValueError: what was asked for is no geometry.
    """
    if options.geometries:
        return tuple(dict.fromkeys(geometry.parse(text) for text in options.geometries))
    if placement.device == "cpu":
        return geometry.CPU_QUICK if options.quick else geometry.CPU
    return geometry.QUICK if options.quick else geometry.DEFAULT


def modes_of(asked: Sequence[str]) -> tuple[str, ...]:
    """Return the modes to measure: as asked, or all that this version's communicator has but the pool.

    Raises:
        ArgumentValueError: one that was asked for is unknown, or this version can't do it.
    """
    from comm_core.ulysses.communicator import UlyssesCommunicator

    arguments = inspect.signature(UlyssesCommunicator).parameters
    missing = [mode for mode, argument in _NEEDS.items() if argument not in arguments]
    for mode in asked:
        if mode not in MODES:
            raise ArgumentValueError(f"--mode must be one of {', '.join(MODES)}, got {mode!r}")
        if mode in missing:
            raise ArgumentValueError(f"--mode {mode}: this version's communicator has no argument {_NEEDS[mode]}")
    return tuple(dict.fromkeys(asked)) or tuple(mode for mode in MODES[:3] if mode not in missing)


def run(options: Options) -> int:
    """Measure, print, and write; return the exit code: 1 if something that was asked for failed.

    Raises:
        ArgumentValueError: the options make no sense here. Nothing was measured.
        CommError: the ranks could not be started.
    """
    placement = options.place()
    wanted = geometries_of(options, placement)
    modes = modes_of(options.modes)
    found = _Found()
    for unfit in [item for item in wanted if item.problem(placement.ranks)]:
        found.leave_out(unfit.name, str(unfit.problem(placement.ranks)))
    fit = tuple(item for item in wanted if not item.problem(placement.ranks))
    if not fit:
        raise ArgumentValueError(f"no geometry is left: {found.left_out[-1]['why']}; --geometry SxH gives another")
    preload = ("comm_core.bench.ulysses",)
    with launch.ranks(placement, timeout_s=options.timeout_s, preload=preload) as ranks:
        runner = _Runner(options, placement, ranks, found)
        try:
            runner.measure(fit, modes)
        finally:
            # Also after an interrupt: what was measured until then stands.
            runner.save()
            if ranks.leader:
                runner.show()
    return int(bool(found.errors) or not found.rows)


class _Runner:
    """Goes through the parts, and keeps what each of them gave."""

    def __init__(self, options: Options, placement: Placement, ranks: launch.Ranks, found: _Found) -> None:
        self.options, self.placement, self.ranks, self.found = options, placement, ranks, found
        self.refused: set[str] = set()

    def measure(self, fit: tuple[Geometry, ...], modes: tuple[str, ...]) -> None:
        from comm_core.bench import ulysses

        batches = 3 if self.options.quick else 5
        self.part("floor", self.floor)
        for backend, own, options in self.jobs(modes):
            job = ulysses.Job(self.placement, backend, own, fit, batches, options=options, cold=self.options.cold)
            named = backend in self.options.backends and not set(own) & (set(_NEEDS) - set(self.options.modes))
            # What can't be opened at all need not be tried with further arguments.
            if backend not in self.refused:
                self.part(f"{backend}, {' and '.join(own)}", lambda job=job, named=named: self.contender(job, named))

    def part(self, name: str, work: Callable[[], None]) -> None:
        began = time.monotonic()
        try:
            work()
        except CommError as error:
            self.found.fail(name, f"{type(error).__name__}: {error}")
        self.found.seconds[name] = time.monotonic() - began
        if self.ranks.leader:
            print(f"{name}: {self.found.seconds[name]:.1f} s", file=sys.stderr, flush=True)
        self.save()

    def floor(self) -> None:
        from comm_core.bench import ulysses

        known = self.ranks.run(ulysses.facts, self.placement, timeout_s=_FLOOR_S)
        _raise_first(known)
        self.found.environment = known[0].value
        rates = self.ranks.run(floor.measure, self.placement, timeout_s=_FLOOR_S)
        _raise_first(rates)
        size = floor.HOST_COPY_BYTES if self.placement.kind == "host" else floor.COPY_BYTES
        self.found.floor = floor.Floor(self.placement.kind, min(result.value for result in rates), size)

    def jobs(self, modes: tuple[str, ...]) -> list[tuple[str, tuple[str, ...], dict[str, Any]]]:
        """Return (backend, modes, further arguments of the communicator) of each part, in order."""
        from comm_core.bench import ulysses
        from comm_core.plugins.discovery import registry
        from comm_core.transport.dist import DistTransport
        from comm_core.windows.transport import WindowTransport

        transports = registry().transports
        names = list(dict.fromkeys(self.options.backends)) or sorted(
            transports, key=lambda name: (-transports[name].priority, name)
        )
        jobs: list[tuple[str, tuple[str, ...], dict[str, Any]]] = []
        for name in names:
            if name in (ulysses.ALL_TO_ALL, ulysses.SYMMETRIC_MEMORY):
                continue
            if name == "gloo" and self.placement.kind == "device" and not self.options.backends:
                self.found.leave_out(name, "it takes seconds a call through the host; --backend gloo measures it")
                continue
            transport = transports.get(name)
            plain = isinstance(transport, DistTransport)
            # One opening for all modes that need no arguments of their own.
            together = tuple(mode for mode in modes if mode not in _NEEDS and not (plain and mode != "staged"))
            jobs += [(name, together, {})] if together else []
            if not plain:
                # Windows as they are take no notice of it, so the figure would be that of another mode.
                heeds = type(transport) is not WindowTransport
                jobs += [(name, ("max_sms=0",), {"max_sms": 0})] if heeds and "max_sms=0" in modes else []
                jobs += [(name, ("pool",), {})] if "pool" in modes else []
        for name, mode, why in self.comparators():
            if name in names or (self.options.compare and not why):
                jobs.append((name, (mode,), {}))
            elif self.options.compare:
                self.found.leave_out(name, why)
        return jobs

    def comparators(self) -> list[tuple[str, str, str]]:
        """Return (name, mode, why not) of what torch offers for the same job."""
        from comm_core.bench import ulysses

        kind = self.placement.kind
        nccl = "NCCL takes one rank a GPU" if kind == "device" else ""
        symmetric = "" if kind == "links" else "torch's symmetric memory needs a GPU for each rank"
        return [(ulysses.ALL_TO_ALL, "staged", nccl), (ulysses.SYMMETRIC_MEMORY, "direct", symmetric)]

    def contender(self, job: Any, named: bool) -> None:
        from comm_core.bench import ulysses

        what = f"{job.backend}, {' and '.join(job.modes)}"
        results = self.ranks.run(ulysses.measure, job, timeout_s=self.options.timeout_s)
        measured = [_rows(result) for result in results]
        for row in report.slowest(measured):
            self.found.rows.append(report.finished_row(job.backend, row, self.found.floor, self.placement))
        failed = {rank: result.error for rank, result in enumerate(results) if result.error is not None}
        if not failed:
            return
        refused = all(
            isinstance(error, ulysses.PartError) and not error.opened and error.kind in _REFUSALS
            for error in failed.values()
        )
        refused = refused and len(failed) == len(results)
        if refused and not job.options:
            self.refused.add(job.backend)
        if refused and not named:
            self.found.leave_out(what, getattr(failed[0], "reason", "") or str(getattr(failed[0], "text", failed[0])))
        else:
            self.found.fail(what, _story(failed, len(results)))
            # Where a refusal was raised says nothing that its text does not.
            if self.ranks.leader and not refused:
                for rank, error in failed.items():
                    print(f"rank {rank}: {getattr(error, 'trace', error)}", file=sys.stderr, flush=True)

    def save(self) -> None:
        """Write the JSON document, if that is asked for, as far as it goes."""
        if self.options.json is None or not self.ranks.leader:
            return
        file = self.options.json
        part = file.with_name(file.name + ".part")
        try:
            part.write_text(json.dumps(self.document(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            part.replace(file)
        except OSError as error:
            raise ArgumentValueError(f"can't write {str(file)!r}: {error.strerror or error}") from error

    def document(self) -> dict[str, Any]:
        found = self.found
        document = report.document(
            self.placement,
            quick=self.options.quick,
            environment=found.environment,
            floor=found.floor,
            rows=found.rows,
            left_out=found.left_out,
            errors=found.errors,
            seconds=found.seconds,
        )
        return redact.redact(document, redact.hosts())

    def show(self) -> None:
        from comm_core.cli import output

        document = self.document()
        report.show(document, self.placement, output.console())
        if self.options.plot is not None and document["rows"]:
            try:
                plot.draw(document, f"Ulysses exchange, {self.placement.text}", self.options.plot)
            except OSError as error:
                name = str(self.options.plot)
                raise ArgumentValueError(f"can't write {name!r}: {error.strerror or error}") from error


def _rows(result: launch.Result) -> Sequence[Mapping[str, Any]]:
    if result.error is None:
        return result.value
    return getattr(result.error, "rows", ())


def _raise_first(results: Sequence[launch.Result]) -> None:
    failed = {rank: result.error for rank, result in enumerate(results) if result.error is not None}
    if failed:
        raise CommError(_story(failed, len(results)))


def _story(failed: Mapping[int, BaseException], ranks: int) -> str:
    """Return what failed where; once where all ranks say the same."""
    texts: dict[str, list[int]] = {}
    for rank, error in failed.items():
        text = str(error) if isinstance(error, CommError) else f"{type(error).__name__}: {error}"
        texts.setdefault(text, []).append(rank)
    if len(texts) == 1 and len(failed) == ranks:
        return next(iter(texts))
    return "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
