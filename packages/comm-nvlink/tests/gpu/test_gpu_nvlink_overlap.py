"""Two communicators that overlap on real GPUs: head-chunk pipelines among copies and matrix products (G1, G2)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from comm_core import UlyssesCommunicator
from comm_core.testing.device_contract import DeviceCase
from comm_core.testing.gpu import plugin_of, shared_gpu_pool, sizes
from comm_core.testing.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.installed_plugins]

SIZES = sizes(at_most=4)
SOAK_S = float(os.environ.get("GPU_CHECK_SOAK_SECONDS", "8"))
ENGINES = {"COMM_NVLINK_ENGINE_BYTES": "0"}
HEADS, ROW, TOKENS = 14, 64, 96


def make_plugin() -> object:
    """Return the plugin, for ranks of a source tree that is not installed."""
    from comm_nvlink.plugin import NvlinkPlugin

    return NvlinkPlugin()


CASE = DeviceCase("nvlink", (), plugin_of("nvlink", make_plugin))


# Streams share one hardware queue, so that whatever is enqueued first also starts first.
ranks = shared_gpu_pool(4, CUDA_DEVICE_MAX_CONNECTIONS="1")


def mix(fused: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: of each head's query, key and value alone, so it is the same in bands."""
    query, key, value = fused.split(ROW, dim=-1)
    return query.mul(3).add_(key).sub_(value)


class Pipeline:
    """What a rank has for one run: two communicators, four streams, and memory that is used again in every round."""

    def __init__(self, inward: UlyssesCommunicator, outward: UlyssesCommunicator, bands: Sequence[int]) -> None:
        self.inward, self.outward = inward, outward
        self.size, device = inward.world_size, inward.device
        self.bands = [(sum(bands[:index]), count) for index, count in enumerate(bands)]
        shape = (1, TOKENS, HEADS * self.size, ROW)
        generator = torch.Generator().manual_seed(5 + inward.rank)
        self.base = torch.randint(-8, 8, (3, *shape), generator=generator).to(device, torch.bfloat16)
        self.qkv = torch.empty_like(self.base)
        self.fused = [
            torch.empty(1, TOKENS * self.size, count, 3 * ROW, dtype=torch.bfloat16, device=device)
            for _, count in self.bands
        ]
        # Written by the peers in place, and ordinary memory that is staged for.
        band = torch.empty(1, TOKENS * self.size, HEADS, ROW, dtype=torch.bfloat16, device=device)
        self.outs = [outward.allocate_output(band, "gather_heads"), torch.empty_like(self.base[0])]
        self.filler = torch.ones(1024, 1024, dtype=torch.bfloat16, device=device)
        self.copied = torch.zeros(2, 32 << 20, dtype=torch.uint8, device=device)
        self.streams = [torch.cuda.Stream() for _ in range(4)]
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def round(self, number: int) -> None:
        """Exchange in bands while others travel, and compare with whole exchanges one after the other."""
        main = torch.cuda.current_stream()
        into, compute, back, other = self.streams
        torch.add(self.base, number % 11 - 5, out=self.qkv)
        query, key, value = self.qkv
        out = self.outs[number % 2]
        out.fill_(float("nan"))
        for stream in self.streams:
            stream.wait_stream(main)
        with torch.cuda.stream(other):
            self.copied[0].copy_(self.copied[1])
        held: list[torch.Tensor] = []
        for (offset, count), fused in zip(self.bands, self.fused, strict=True):
            with torch.cuda.stream(into):
                self.inward.scatter_qkv_head_chunk(query, key, value, head_offset=offset, head_count=count, out=fused)
            compute.wait_stream(into)
            with torch.cuda.stream(compute):
                held.append(self.filler @ self.filler)
                held.append(mix(fused))
            back.wait_stream(compute)
            with torch.cuda.stream(back):
                self.outward.gather_output_head_chunk(held[-1], local_heads=HEADS, head_offset=offset, out=out)
        for stream in self.streams:
            main.wait_stream(stream)
        parts = [self.inward.scatter_heads(part) for part in self.qkv]
        whole = self.outward.gather_heads(mix(torch.cat(parts, dim=-1)))
        self.wrong += (whole.view(torch.int16) != out.view(torch.int16)).sum()


def overlapped(group: Any, case: DeviceCase, bands: Sequence[int], rounds: int, seconds: float, sms: int) -> int:
    """Run rounds until both limits are reached; return how many there were. The ranks stop together."""
    options = {"max_bytes": 16 << 20, "max_sms": sms}
    with case.open(group, **options) as inward, case.open(group, **options) as outward:
        pipeline = Pipeline(inward, outward, bands)
        done, started = 0, time.monotonic()
        while True:
            pipeline.round(done)
            done += 1
            if done % 50 == 0 or done == rounds:
                more = torch.tensor([done < rounds or time.monotonic() - started < seconds], dtype=torch.int32)
                cast("Any", group).allreduce([more]).wait()
                if not int(more):
                    break
        assert int(pipeline.wrong) == 0
        return done


@pytest.mark.parametrize("env", [{}, ENGINES], ids=["default", "engines"])
@pytest.mark.parametrize("bands", [(7, 7), (5, 5, 4)], ids=["7-7", "5-5-4"])
def test_overlapped_bands_are_those_of_whole_exchanges(
    ranks: RankPool, bands: tuple[int, ...], env: dict[str, str]
) -> None:
    """G2: 100 rounds of changing data into poisoned memory, among copies that have nothing to do with it."""
    for size in SIZES:
        # The ranks of one GPU share its SMs, and two communicators' blocks must all fit at once.
        sms = torch.cuda.get_device_properties(0).multi_processor_count // (4 * size)
        done = CASE.run(ranks, overlapped, list(bands), 100, 0.0, sms, size=size, env=env)
        assert done == [100] * size


def test_two_communicators_and_three_streams_go_on_for_long(ranks: RankPool) -> None:
    """G1: GPU_CHECK_SOAK_SECONDS of a pipeline in both directions, with matrix products on the same SMs."""
    size = SIZES[-1]
    sms = torch.cuda.get_device_properties(0).multi_processor_count // (4 * size)
    done = CASE.run(ranks, overlapped, [5, 5, 4], 100, SOAK_S, sms, size=size, timeout_s=110 + SOAK_S)
    print(f"{size} ranks: {done[0]} rounds in {SOAK_S:g} s")
    assert len(set(done)) == 1 and done[0] >= 100
