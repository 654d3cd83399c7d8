"""``python -m gpu.tune_allreduce``: go through the launches of the all-reduce kernels and print which are fast.

Two or more GPUs, a rank on each. For every number of tokens the sum alone and the sum with residual and RMSNorm are
timed with many launches, 20 calls in one graph, beside what the project chooses and NCCL; the slowest rank counts.
What comes out is material for `comm_core.allreduce.launch`, and changes nothing by itself.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import socket
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from comm_core import create_allreduce_fusion_workspace, plugins
from comm_core.allreduce import launch as launches
from comm_core.allreduce.launch import Launch, Settings, Shape
from comm_core.allreduce.module import NO_EPILOGUE, Epilogue

dist: Any = importlib.import_module("torch.distributed")

_CALLS = 20
_HIDDEN = 8192


def timed(work: Callable[[], None], batches: int) -> float:
    """Return microseconds a call of the slowest rank: the median of `batches` replays of 20 calls in a graph."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_CALLS):
            work()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    found: list[float] = []
    for _ in range(batches):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Brings the ranks together, on the device; the first replay is not counted.
        graph.replay()
        begin.record()
        graph.replay()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / (2 * _CALLS))
    value = torch.tensor([statistics.median(found)], device="cuda")
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def plain_launches(shape: Shape, sms: int) -> Iterator[Launch]:
    """Launches of a sum alone."""
    seen: set[Launch] = set()
    for threads, share in itertools.product((128, 256, 384), (0.25, 0.5, 1, 2)):
        made = Launch(min(-(-shape.vectors // threads), int(sms * share)), threads)
        if made in seen or shape.vectors > 64 * made.blocks * threads:
            continue
        seen.add(made)
        yield made


def fused_launches(rows: int, row_vectors: int, settings: Settings, two_shots: bool) -> Iterator[Launch]:
    """Launches of a sum with residual and norm."""
    sms = settings.sms
    whole = None if two_shots else launches.whole_rows(rows, row_vectors, settings)
    if whole is not None:
        yield whole
    seen: set[tuple[int, int, int]] = set()
    for team, more, share in itertools.product((1, 2, 4, 8), (0, 1, 2), (0.5, 1, 2, 3)):
        steps = -(-row_vectors // (team * launches.FUSED_THREADS)) + more
        threads = -(-row_vectors // (team * steps * 32)) * 32
        blocks = min(rows * team, int(sms * share) // team * team)
        if (team, threads, blocks) in seen or threads < 96 or rows * team > 16 * blocks:
            continue
        # What a multiprocessor has registers for.
        if blocks * threads > sms * launches.PER_SM * launches.FUSED_THREADS:
            continue
        seen.add((team, threads, blocks))
        yield Launch(blocks, threads, team, launches.shared_bytes(row_vectors, team, threads))


def rank_main(rank: int, ranks: int, port: int, options: argparse.Namespace) -> None:
    """Measure on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_NVLS_ENABLE="0")
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=rank, world_size=ranks)
    if not any(report.name == "nvlink" for report in plugins.report()):
        from comm_nvlink.plugin import NvlinkPlugin

        plugins.register("tune", NvlinkPlugin())
    device = torch.device("cuda", rank)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    rows: list[dict[str, Any]] = []
    most = max(options.tokens)
    workspace: Any = create_allreduce_fusion_workspace(
        "trtllm", max_token_num=most, hidden_dim=_HIDDEN, dtype=torch.bfloat16, device=device,
        force_oneshot_support=True,
    )  # fmt: skip
    session = workspace._session
    x = torch.randint(-3, 4, (most, _HIDDEN), device=device).to(torch.bfloat16)
    out, residual, norm = (torch.empty_like(x) for _ in range(3))
    residual.zero_()
    gamma = torch.ones(_HIDDEN, dtype=torch.bfloat16, device=device)
    row_vectors = _HIDDEN * 2 // 16
    for tokens in options.tokens:
        nbytes = tokens * _HIDDEN * 2
        nccl = timed(partial(dist.all_reduce, x[:tokens]), options.batches)
        x.copy_(torch.randint(-3, 4, (most, _HIDDEN), device=device))
        want = x[:tokens].float()
        dist.all_reduce(want)
        for one in (True, False) if ranks > 2 or options.two_shots else (True,):
            shape = launches.shape_of(ranks, nbytes, one)
            for kind in options.kinds:
                if kind == "plain":
                    ways = [launches.plain_launch(shape, session.settings), *plain_launches(shape, sms)]
                    epilogue = NO_EPILOGUE
                else:
                    chosen = launches.fused_launch(tokens, row_vectors, session.settings, two_shots=not one)
                    ways = [chosen, *fused_launches(tokens, row_vectors, session.settings, not one)]
                    epilogue = Epilogue(
                        residual_in=residual.data_ptr(), residual_out=out.data_ptr(), gamma=gamma.data_ptr(),
                        norm_out=norm.data_ptr(), eps=1e-6, rows=tokens, row_vectors=row_vectors, hidden=_HIDDEN,
                    )  # fmt: skip
                for number, way in enumerate(ways[:1] if options.chosen else ways):
                    for early, lead in ((False, False), (True, False), (True, True)):
                        if lead and number and not options.all:
                            continue

                        call = partial(session.reduce, x.data_ptr(), out.data_ptr(), "bfloat16", shape, way, epilogue)
                        out.zero_()
                        us = timed(partial(call, early=early, lead=lead), options.batches)
                        session.check()
                        good = bool((out[:tokens].float() == want).all())
                        rows.append(
                            {
                                "tokens": tokens, "kind": kind, "shots": 1 if one else 2, "us": us, "nccl": nccl,
                                "chosen": number == 0, "early": early, "lead": lead, "right": good, **way._asdict(),
                            }
                        )  # fmt: skip
        if rank == 0:
            show([row for row in rows if row["tokens"] == tokens])
    workspace.destroy()
    if rank == 0 and options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    dist.destroy_process_group()


def show(rows: list[dict[str, Any]]) -> None:
    """Print what was chosen and what was fastest."""
    for kind, shots in sorted({(row["kind"], row["shots"]) for row in rows}, reverse=True):
        mine = [row for row in rows if (row["kind"], row["shots"]) == (kind, shots)]
        wrong = sum(not row["right"] for row in mine)
        print(f"\n{mine[0]['tokens']} tokens, {kind}, {shots} shots; NCCL {mine[0]['nccl']:.1f} us; {wrong} wrong")
        best = sorted((row for row in mine if not row["chosen"]), key=lambda row: row["us"])[:6]
        for row in [row for row in mine if row["chosen"]] + best:
            way = " ".join(f"{name}={row[name]}" for name in ("blocks", "threads", "team"))
            mark = "chosen" if row["chosen"] else "      "
            pdl = "pdl+lead" if row["lead"] else "pdl" if row["early"] else ""
            print(f"  {mark} {row['us']:8.2f} us  x{row['us'] / row['nccl']:.3f}  {way} {pdl}", flush=True)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 32, 128, 512, 2048])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=("plain", "fused"), default=["plain", "fused"])
    parser.add_argument("--chosen", action="store_true", help="only what the project chooses")
    parser.add_argument("--two-shots", action="store_true", help="two shots at two ranks as well")
    parser.add_argument("--all", action="store_true", help="every launch with an early start of the next one, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    spawn: Any = importlib.import_module("torch.multiprocessing").spawn
    spawn(rank_main, (options.ranks, port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
