"""``python -m gpu.sanitizer_case``: ranks that use every kernel of a transport once, for compute-sanitizer.

The process that is started starts the ranks, with ``--under`` each under a program of its own: a list of words, of
which ``@N`` is a port and becomes another one for each rank. All compare what arrives and print ``rank N: ok``.
Without MPS the ranks take turns on the GPU, and a sanitizer makes kernels many times slower: the deadline is scaled
to that.

``--plant`` is the control: rank 1 stores past the end of its memory, which a sanitizer that sees it must report.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import warnings
from datetime import timedelta
from typing import Any

import torch

from comm_core import UlyssesCommunicator, allreduce_fusion, create_allreduce_fusion_workspace, jit, plugins
from comm_core.jit.selfcheck import SELFCHECK
from comm_core.testing import allreduce_cases, reference
from comm_core.testing.allreduce_cases import Case

# torch's annotations leave out its stores.
dist: Any = importlib.import_module("torch.distributed")

_TIMEOUT_S = "300"
_PORTS = 20
"""For one rank and what it starts."""


def device_of(rank: int) -> torch.device:
    """Make a rank's device current and return it."""
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def operand(rank: int, number: int, ranks: int) -> torch.Tensor:
    """Return an operand whose rows are no multiple of 16 bytes, for vectors of all widths; on the host."""
    return reference.make_input(number, rank, (2, 5, 3 * ranks, 7), torch.bfloat16)


def whole_heads(comm: UlyssesCommunicator, direct: bool) -> None:
    """Scatter and gather, into windows or through staging."""
    every = [operand(rank, 1, comm.world_size) for rank in range(comm.world_size)]
    scattered = reference.scatter_heads(every)[comm.rank]
    x = every[comm.rank].to(comm.device)
    y = comm.allocate_output(x, "scatter_heads") if direct else torch.empty_like(scattered, device=comm.device)
    # With one memory again and again a call becomes a graph, where a transport makes some.
    for _ in range(3 if comm.backend == "pcie" else 1):
        comm.scatter_heads(x, out=y)
        reference.assert_same_bits(y.cpu(), scattered)
    z = comm.allocate_output(y, "gather_heads") if direct else torch.empty_like(x)
    comm.gather_heads(y, out=z)
    reference.assert_same_bits(z.cpu(), every[comm.rank])


def head_chunk(comm: UlyssesCommunicator) -> None:
    """Exchange one band of heads: three sources into one output, and an output of which only a band is written."""
    ranks = range(comm.world_size)
    parts = [[operand(rank, number, comm.world_size) for rank in ranks] for number in (2, 3, 4)]
    query, key, value = (part[comm.rank].to(comm.device) for part in parts)
    out = comm.scatter_qkv_head_chunk(query, key, value, head_offset=1, head_count=2)
    expected = reference.scatter_qkv_head_chunk(*parts, head_offset=1, head_count=2)
    reference.assert_same_bits(out.cpu(), expected[comm.rank])
    shape = (2, 5 * comm.world_size, 2, 7)
    bands = [reference.make_input(5, rank, shape, torch.bfloat16) for rank in ranks]
    before = [operand(rank, 6, comm.world_size) for rank in ranks]
    whole = before[comm.rank].to(comm.device)
    comm.gather_output_head_chunk(bands[comm.rank].to(comm.device), local_heads=3, head_offset=1, out=whole)
    after = reference.gather_output_head_chunk(bands, before, local_heads=3, head_offset=1)
    reference.assert_same_bits(whole.cpu(), after[comm.rank])


def small_gather(comm: UlyssesCommunicator) -> None:
    """Gather a few bytes and meet at a barrier."""
    session: Any = comm._session
    value = torch.arange(37, dtype=torch.uint8, device=comm.device) + 27 * comm.rank
    out = torch.zeros(comm.world_size * 37, dtype=torch.uint8, device=comm.device)
    session.all_gather_small(value, out)
    session.barrier()
    torch.cuda.synchronize()
    session.check()
    expected = torch.cat([torch.arange(37, dtype=torch.uint8) + 27 * rank for rank in range(comm.world_size)])
    assert torch.equal(out.cpu(), expected), out


_BACKENDS: dict[str, tuple[tuple[str, dict[str, Any], str], ...]] = {
    "windows": (("windows", {}, ""), ("windows-ce", {}, "")),
    # By the SMs, by both, and by the copy engines alone.
    "nvlink": (("nvlink", {}, ""), ("nvlink", {}, "0"), ("nvlink", {"max_sms": 0}, "")),
    # Outputs are registered, and there are no head chunks.
    "pcie": (("pcie", {}, ""),),
    "mnnvl": (("mnnvl", {}, ""),),
    "allreduce": (),
    "lowp": (),
}
"""Name of a case -> backend, arguments, and bytes from which on NVLink uses the copy engines."""
_PLUGINS: dict[str, tuple[str, ...]] = {"windows": (), "allreduce": ("nvlink",), "lowp": ("nvlink", "lowp")}
"""Name of a case -> what it needs, where that is not the plugin of its name."""


def reductions() -> list[Case]:
    """Return the all-reduces: by both algorithms, odd sizes alone, and rows with every encoding that follows.

    Rows of 2048 have a block each. Where there are clusters, the blocks of one share the row of 8192, with a vector
    for each thread, and those of 16384, with several.
    """
    every = [
        Case(pattern, tokens, 2048, torch.bfloat16, group_size=group, use_oneshot=one)
        for one in (True, False)
        for pattern, tokens, group in ((1, 3, 128), (5, 2, 128), (9, 3, 64), (9, 2, 512), (11, 5, 128))
    ]
    every += [Case(1, rows, hidden, torch.bfloat16, use_oneshot=True) for rows, hidden in ((1, 8192), (9, 16384))]
    every += [Case(0, 1, size, torch.bfloat16, use_oneshot=one) for size in (5, 4099) for one in (True, False)]
    return every


def all_reduces(backend: str, device: torch.device) -> None:
    """Reduce each of `reductions` once and compare."""
    with create_allreduce_fusion_workspace(
        backend, max_token_num=9, hidden_dim=16384, dtype=torch.bfloat16, device=device, force_oneshot_support=True
    ) as workspace:
        for seed, case in enumerate(reductions()):
            operands = allreduce_cases.make_operands(case, workspace.world_size, seed)
            made = allreduce_cases.make_outputs(case, device)
            given = {**allreduce_cases.arguments(case, operands, device), **made}
            allreduce_fusion(operands.parts[workspace.rank].to(device), workspace, case.pattern, **given)
            torch.cuda.synchronize()
            allreduce_cases.assert_right(case, operands, made)


def low_precision(backend: str, group: Any, device: torch.device) -> None:
    """Encode Q, K and V, store them into the peers' windows and compare every byte, in each layout."""
    from comm_lowp.sage2.grid import LAYOUTS
    from comm_lowp.testing import cases, oracle

    rank, ranks = group.rank(), group.size()
    for layout in sorted(LAYOUTS):
        # The last row is padding, and no rank's rows fill its groups.
        case = cases.Case(ranks=ranks, batch=2, used=ranks * 65 - 1, layout=layout)
        inputs = cases.make(case)
        mine = [x[:, rank * case.rows : (rank + 1) * case.rows].to(device) for x in inputs]
        os.environ |= {"COMM_LOWP_LAYOUT": layout, "COMM_LOWP_KERNELS": "require"}
        with UlyssesCommunicator(
            group, backend=backend, max_bytes=3 * mine[0].nbytes, dtype=case.dtype, device=device
        ) as comm:
            workspace = comm.prepare_qkv(mine[0].shape, used_sequence=case.used)
            encoded = comm.scatter_qkv(*mine, workspace=workspace)
            mean = oracle.mean_of(inputs[1], ranks, case.used)
            expected = oracle.encode(*inputs, layout, case.used, mean)
            for name in ("q", "k", "v", "q_scale", "k_scale", "v_scale"):
                want = oracle.heads_of(name, expected[name], ranks, rank)
                oracle.assert_same_bytes(getattr(encoded, name), want, f"{layout} {name}")


def register(name: str) -> None:
    """Register the plugin of a source tree that is not installed."""
    from importlib.metadata import entry_points

    if not entry_points(group="comm_core.v1", name=name):
        plugins.register(f"sanitizer case, {name}", importlib.import_module(f"comm_{name}.plugin").plugin)


def run_rank(rank: int, ranks: int, store: Any, case: str) -> None:
    """Run everything once, by each of the case's routes."""
    for name in _PLUGINS.get(case, (case,)):
        register(name)
    # Transports may say that they are experimental.
    warnings.simplefilter("ignore", UserWarning)
    device = device_of(rank)
    timeout = timedelta(seconds=float(_TIMEOUT_S))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    arguments: dict[str, Any] = {"max_bytes": 1 << 16, "dtype": torch.bfloat16, "device": device}
    for backend, more, engine_bytes in _BACKENDS[case]:
        os.environ["COMM_NVLINK_ENGINE_BYTES"] = engine_bytes
        with UlyssesCommunicator(backend=backend, **arguments, **more) as comm:
            whole_heads(comm, direct=True)
            if backend != "pcie":
                whole_heads(comm, direct=False)
                head_chunk(comm)
            small_gather(comm)
            torch.cuda.synchronize()
            if backend == "mnnvl":
                # The same memory at the same addresses, but none that was there before.
                comm.checkpoint_prepare()
                comm.checkpoint_restore(None)
                whole_heads(comm, direct=True)
                small_gather(comm)
    if case == "allreduce":
        all_reduces("trtllm", device)
    if case == "lowp":
        low_precision("nvlink", dist.group.WORLD, device)
    dist.destroy_process_group()
    print(f"rank {rank}: ok", flush=True)


def plant(rank: int) -> None:
    """Store one word past the end of an allocation, on rank 1."""
    device = device_of(rank)
    memory = torch.zeros(64, dtype=torch.int32, device=device)
    fill = jit.load(SELFCHECK, device).bind("comm_core_fill_v1")
    fill(torch.cuda.current_stream().cuda_stream, memory.data_ptr(), 64 + rank, 7)
    torch.cuda.synchronize()


def start(ranks: int, under: list[str], arguments: list[str]) -> int:
    """Start the ranks, each under a sanitizer of its own, and return the worst exit code.

    One sanitizer that follows eight ranks and what they start crashes.
    """
    timeout = timedelta(seconds=float(_TIMEOUT_S))
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            # Programs under a sanitizer are reached by ports from a given one on, which no other may use.
            prefix = [str(int(word[1:]) + _PORTS * rank) if word.startswith("@") else word for word in under]
            command = [*prefix, sys.executable, "-m", "gpu.sanitizer_case", *arguments]
            command += ["--port", str(store.port), "--rank", str(rank)]
            started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        return max(abs(process.wait(float(_TIMEOUT_S))) for process in started)
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plant", action="store_true")
    parser.add_argument("--backend", choices=sorted(_BACKENDS), default="windows")
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4, 6, 8))
    parser.add_argument("--under", type=json.loads, default=[], metavar="JSON", help="what each rank runs under")
    parser.add_argument("--port", type=int, help="of the store: be a rank")
    parser.add_argument("--rank", type=int, default=0)
    options = parser.parse_args()
    os.environ |= {"COMM_ALLOW_SHARED_GPU": "1", "COMM_TIMEOUT_S": _TIMEOUT_S, "GLOO_SOCKET_IFNAME": "lo"}
    if options.port is None:
        arguments = ["--backend", options.backend, "--ranks", str(options.ranks), *["--plant"][: options.plant]]
        raise SystemExit(start(options.ranks, options.under, arguments))
    timeout = timedelta(seconds=float(_TIMEOUT_S))
    store: Any = dist.TCPStore("127.0.0.1", options.port, None, False, timeout)
    if options.plant:
        plant(options.rank)
    else:
        run_rank(options.rank, options.ranks, store, options.backend)


if __name__ == "__main__":
    main()
