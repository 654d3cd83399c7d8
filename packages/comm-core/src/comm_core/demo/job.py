"""What one rank of the demo does, from meeting the others to comparing the result."""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch

from comm_core._json import Json, JsonObject
from comm_core.demo import layer as model
from comm_core.demo.ranks import Member
from comm_core.demo.setup import PATCH, cores, picture_rgb
from comm_core.errors import UnsupportedError
from comm_core.group import as_group
from comm_core.topology.probe import probe_rank
from comm_core.ulysses.communicator import UlyssesCommunicator
from comm_core.ulysses.workspace import UlyssesWorkspace

__all__ = ["PHASES", "run"]

PROJECT_IN = "norm, QKV, RoPE"
SCATTER = "exchange: scatter_heads of Q, K, V"
ATTEND = "attention"
GATHER = "exchange: gather_heads of the output"
PROJECT_OUT = "output projection"
WAIT = "waiting for the slowest rank"
PHASES = (PROJECT_IN, SCATTER, ATTEND, GATHER, PROJECT_OUT, WAIT)
"""Parts of a layer that are timed, in the order in which they are shown."""

_COPIES = 11


def run(member: Member) -> Json:
    """Run this rank; return what it found."""
    options = member.arguments
    torch.set_num_threads(int(options["threads"]))
    device = torch.device("cpu")
    if options["device"] == "cuda":
        device = torch.device("cuda", member.rank % int(options["gpus"]))
        torch.cuda.set_device(device)
    # torch's annotations of it are partial, and only a handful of its functions are used.
    dist: Any = importlib.import_module("torch.distributed")
    member.tell("progress", at="meeting the other ranks")
    timeout_s = float(options["timeout_s"])
    dist.init_process_group(
        options["group_backend"],
        store=member.store(timeout_s),
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=timeout_s),
    )
    with torch.inference_mode():
        result = _Job(member, dist, device).run()
    member.tell("progress", at="leaving")
    dist.destroy_process_group()
    return result


@dataclass
class _Clock:
    """Seconds by phase, one entry a layer, while it is running."""

    device: torch.device
    running: bool = False
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: list[float]() for phase in PHASES})

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def add(self, name: str, seconds: float) -> None:
        if self.running:
            self.seconds[name].append(seconds)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        started = self.now()
        yield
        self.add(name, self.now() - started)


class _Job:
    """This rank's part of the sequence, its weights, and the steps around the layers."""

    def __init__(self, member: Member, dist: Any, device: torch.device) -> None:
        options = member.arguments
        self.member, self.dist, self.device = member, dist, device
        self.options = options
        self.dtype = cast("torch.dtype", getattr(torch, str(options["dtype"])))
        self.layers, self.steps = int(options["layers"]), int(options["steps"])
        self.total = 1 + self.layers * (1 + self.steps + 1)
        self.done = 0
        self.clock = _Clock(device)
        self.shape = model.Shape(
            int(options["heads"]),
            int(options["head_dim"]),
            int(options["rows"]),
            int(options["columns"]),
            3 * PATCH * PATCH,
        )
        self.tokens = self.shape.rows * self.shape.columns
        self.own = self.tokens // member.size
        self.start = member.rank * self.own
        self.progress("loading picture and weights")
        self.seed = int(options["seed"])
        self.pixels = self._pixels()
        self.weights = [
            model.make_layer(self.shape, self.seed + 1 + number, device, self.dtype) for number in range(self.layers)
        ]

    def progress(self, at: str, advance: int = 0) -> None:
        self.done += advance
        self.member.tell("progress", at=at, done=self.done, total=self.total)

    def _pixels(self) -> torch.Tensor:
        width, height = PATCH * self.shape.columns, PATCH * self.shape.rows
        data = picture_rgb(str(self.options["picture"]), width, height)
        return torch.frombuffer(data, dtype=torch.uint8).view(height, width, 3)

    def inputs(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embedding and rotations of tokens `start` to `stop` of the whole sequence."""
        tokens = model.patches(self.pixels, PATCH, start, stop)
        x = model.embed(tokens, self.shape, self.seed, self.device, self.dtype)
        return x, model.rotations(self.shape, start, stop, self.device)

    def run(self) -> Json:
        member = self.member
        self.progress("probing the topology")
        facts = as_group(self.dist.group.WORLD).gather("topology", probe_rank(member.rank, self.device).to_json())
        self.progress("deciding on a transport", 1)
        nbytes = self.own * self.shape.dim * self.dtype.itemsize
        with UlyssesCommunicator(
            max_bytes=nbytes, dtype=self.dtype, backend=str(self.options["backend"]), device=self.device
        ) as comm:
            if member.rank == 0:
                member.tell("opened", facts=facts, decision=_decision_json(comm))
            sharded = _Sharded(self, comm)
            y = sharded.all_layers(verify=True)
            before = comm.bytes_sent
            self.clock.running = True
            for _ in range(self.steps):
                sharded.all_layers(verify=False)
            sent = comm.bytes_sent
        remote = nbytes * (member.size - 1) // member.size
        result: dict[str, Json] = {
            "bytes_sent": sent,
            # Four exchanges a layer, each of which keeps 1/P of the operand.
            "bytes_expected": (1 + self.steps) * self.layers * 4 * remote,
            "bytes_timed": sent - before,
            "exchanges": sharded.verified,
            "exchanges_wrong": sharded.wrong,
            "phases": {
                phase: statistics.median(seconds) if seconds else 0.0 for phase, seconds in self.clock.seconds.items()
            },
            "memcpy_bytes_per_s": self._memcpy(remote or nbytes),
        }
        result.update(self._compare(y))
        return result

    def _memcpy(self, nbytes: int) -> float:
        """Return the rate at which this rank copies the bytes of one exchange while all the others do the same."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = torch.zeros_like(source)
        self.dist.barrier()
        rates: list[float] = []
        for _ in range(_COPIES):
            started = self.clock.now()
            target.copy_(source)
            rates.append(nbytes / (self.clock.now() - started))
        return statistics.median(rates)

    def _compare(self, y: torch.Tensor) -> JsonObject:
        """Compare the output of all ranks with the unsharded layers, which rank 0 computes."""
        whole = self.gathered(y, dim=1)
        if self.member.rank:
            self.progress("waiting for rank 0 to compute the unsharded layers")
            self.dist.barrier()
            return {}
        # The others wait, so all the cores are free.
        torch.set_num_threads(cores())
        first, turns = self.inputs(0, self.tokens)
        x = first
        for number, weights in enumerate(self.weights):
            self.progress(f"computing the unsharded layers, {number + 1} of {self.layers}")
            x = model.project_out(x, model.attend(*model.project_in(x, weights, self.shape, turns)), weights)
            self.progress("comparing", 1)
        self.dist.barrier()
        reference = x.to("cpu", torch.float64)
        error = (whole.to(torch.float64) - reference).abs()
        change = (reference - first.to("cpu", torch.float64)).abs()
        return {
            # A NaN would be no number in JSON, and `finite` tells of it.
            "max_abs_error": float(error.nan_to_num(torch.finfo(torch.float64).max).max()),
            "max_abs_output": float(reference.abs().max()),
            "max_abs_change": float(change.max()),
            "finite": bool(torch.isfinite(whole).all()),
        }

    def gathered(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the ranks' tensors behind each other, by way of the CPU and of torch.distributed alone."""
        own = x.to("cpu").contiguous()
        parts = [torch.empty_like(own) for _ in range(self.member.size)]
        self.dist.all_gather(parts, own)
        return torch.cat(parts, dim=dim)


class _Sharded:
    """The layers over this rank's part of the sequence."""

    def __init__(self, job: _Job, comm: UlyssesCommunicator) -> None:
        self.job = job
        self.comm = comm
        self.verified = 0
        self.wrong = 0
        self.sabotage = str(job.options["break"])
        self.last = job.member.rank == job.member.size - 1
        self.x0, self.turns = job.inputs(job.start, job.start + job.own)
        heads = self.x0.view(1, job.own, job.shape.heads, job.shape.head_dim)
        # Outputs and staging are allocated once; with them a call allocates nothing.
        self.scattered = [comm.allocate_output(heads, "scatter_heads") for _ in range(3)]
        self.gathered = comm.allocate_output(self.scattered[0], "gather_heads")
        self.workspace: UlyssesWorkspace | None = None
        # A transport with registered outputs has no staging.
        with suppress(UnsupportedError):
            self.workspace = comm.create_workspace()

    def all_layers(self, *, verify: bool) -> torch.Tensor:
        x = self.x0
        for number, weights in enumerate(self.job.weights):
            what = f"layer {number + 1} of {self.job.layers}"
            self.job.progress(f"{what}, checking every exchange" if verify else what)
            x = self._layer(x, weights, verify=verify, number=number)
            self.job.progress(what, 1)
        return x

    def _layer(self, x: torch.Tensor, weights: model.Layer, *, verify: bool, number: int) -> torch.Tensor:
        job, clock = self.job, self.job.clock
        with clock.phase(PROJECT_IN):
            qkv = model.project_in(x, weights, job.shape, self.turns)
        if self.sabotage == "skip":
            with clock.phase(ATTEND):
                return model.project_out(x, model.attend(*qkv), weights)
        waited = self._barrier()
        if self.last and number == 0:
            self._fail()
        with clock.phase(SCATTER):
            q, k, v = (
                self.comm.scatter_heads(part, out=out, workspace=self.workspace)
                for part, out in zip(qkv, self.scattered, strict=True)
            )
        if self.sabotage == "corrupt" and self.last and number == 0:
            # As if the pieces of two ranks had been swapped.
            k.copy_(k.roll(job.own if job.member.size > 1 else 1, dims=1))
        if verify:
            local = job.shape.heads // job.member.size
            first = job.member.rank * local
            for before, after in zip(qkv, (q, k, v), strict=True):
                self._check(after, job.gathered(before, dim=1)[:, :, first : first + local])
        with clock.phase(ATTEND):
            attended = model.attend(q, k, v)
        waited += self._barrier()
        with clock.phase(GATHER):
            own = self.comm.gather_heads(attended, out=self.gathered, workspace=self.workspace)
        if verify:
            self._check(own, job.gathered(attended, dim=2)[:, job.start : job.start + job.own])
        with clock.phase(PROJECT_OUT):
            y = model.project_out(x, own, weights)
        clock.add(WAIT, waited)
        return y

    def _barrier(self) -> float:
        """Wait for the other ranks, so that an exchange is timed by itself; return the seconds."""
        started = self.job.clock.now()
        self.job.dist.barrier()
        return self.job.clock.now() - started

    def _check(self, got: torch.Tensor, expected: torch.Tensor) -> None:
        # As bytes: equal NaNs must count as equal, and a zero that has lost its sign must not.
        same = torch.equal(got.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        self.verified += 1
        self.wrong += not same

    def _fail(self) -> None:
        """Do what ``--break`` asks for, while the other ranks are about to exchange with this one."""
        if self.sabotage == "die":
            os._exit(3)
        if self.sabotage == "hang":
            time.sleep(3600)


def _decision_json(comm: UlyssesCommunicator) -> JsonObject:
    decision = comm.decision
    return {
        "backend": comm.backend,
        "route": comm.transport,
        "reason": decision.reason,
        "fallback_reason": comm.fallback_reason,
        "considered": [cast("Json", asdict(item)) for item in decision.considered],
    }
