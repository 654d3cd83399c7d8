"""The raw entry points on real GPUs, over memory that the test shares and owns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comm_nvlink
from comm_core.memory.shared_buffer import create_shared_buffer, free_shared_buffer
from comm_core.memory.strided import pack_strided_memory
from comm_core.testing import reference
from comm_core.testing.gpu import shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input

pytestmark = pytest.mark.gpu

SIZES = sizes()
STAGING = 1 << 20


ranks = shared_gpu_pool(8)


def exchange(group: Any, rounds: int) -> int:
    """Scatter and gather through the staging, eagerly and in a graph."""
    rank, size = group.rank(), group.size()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    nbytes = comm_nvlink.ulysses_signal_bytes()
    staging, signals = create_shared_buffer(STAGING, group), create_shared_buffer(nbytes, group)
    pack_strided_memory(signals[rank], nbytes, nbytes, 1, torch.uint8, device.index, owner=None)[0].zero_()
    torch.cuda.synchronize()
    group.barrier().wait()
    handle = comm_nvlink.init_ulysses_a2a(staging, signals, rank, size, True)
    sizes = (2, 8, 2 * size, 16)
    b, s, h, d = sizes
    x = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    y = torch.empty(b, s * size, h // size, d, dtype=torch.bfloat16, device=device)
    z = torch.empty_like(x)

    def both() -> None:
        comm_nvlink.ulysses_a2a(handle, x, y, *sizes, 0)
        comm_nvlink.ulysses_a2a(handle, y, z, *sizes, 1)

    both()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        both()
    for round_ in range(rounds):
        every = [make_input(round_, peer, sizes, torch.bfloat16) for peer in range(size)]
        x.copy_(every[rank])
        graph.replay() if round_ % 2 else both()
        assert_same_bits(y.cpu(), reference.scatter_heads(every)[rank])
        assert_same_bits(z.cpu(), every[rank])
    with pytest.raises(ValueError, match=r"do not fit the \d+ of out_ptrs"):
        large = torch.empty(1, 1 << 12, 2 * size, 256, device=device)
        out = torch.empty(1, size << 12, 2, 256, device=device)
        comm_nvlink.ulysses_a2a(handle, large, out, 1, 1 << 12, 2 * size, 256, 0)
    comm_nvlink.dispose_ulysses_a2a(handle)
    group.barrier().wait()
    free_shared_buffer(staging, group)
    free_shared_buffer(signals, group)
    return rounds


def test_memory_of_the_callers_own(ranks: RankPool) -> None:
    for size in SIZES:
        assert ranks.run(exchange, 20, ranks=size, timeout_s=60) == [20] * size
