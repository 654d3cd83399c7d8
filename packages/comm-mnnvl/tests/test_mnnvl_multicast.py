"""Multicast: only where it was asked for, where no switch is against it, and where it works; else everything goes on.

Over a fake driver: nothing here, and no test on a GPU, makes a multicast object of a real one.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_core.comm_backend import TorchDistBackend
from comm_core.errors import ArgumentTypeError, ArgumentValueError, CheckpointError, UnsupportedError
from comm_core.group import Group
from comm_core.testing.ranks import run_threads
from comm_mnnvl import McastGPUBuffer
from comm_mnnvl.multicast import SWITCHES

CALLS = ("cuMulticastCreate", "cuMulticastAddDevice", "cuMulticastBindMem", "cuMulticastUnbind")


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SWITCHES:
        monkeypatch.delenv(name, raising=False)


def buffer(group: Group, cluster: Any, multicast: bool = True) -> McastGPUBuffer:
    cluster.enter(group.rank)
    device = torch.device("cuda", group.rank % 8)
    return McastGPUBuffer(5000, group.size, group.rank, device, TorchDistBackend(group), multicast)


def unicast(group: Group, made: McastGPUBuffer) -> None:
    """What every operation needs, with or without a multicast address."""
    for peer in range(group.size):
        made.get_unicast_buffer((2,), torch.int32, group.rank * 2, rank=peer).fill_(10 * peer + group.rank)
    group.barrier("stored")
    own = made.get_unicast_buffer((group.size, 2), torch.int32)
    assert own[:, 1].tolist() == [10 * group.rank + peer for peer in range(group.size)]
    group.barrier("seen")


def with_multicast(group: Group, cluster: Any) -> tuple[int, str]:
    made = buffer(group, cluster)
    memory = made.mcast_device_memory
    address = made.get_multicast_ptr()
    assert address and address not in memory.uc_ptrs
    # The fake has no switch that replicates stores; but the address is mapped, and stays what it is.
    made.get_multicast_buffer((4,), torch.int32, 3).fill_(7)
    assert ctypes.string_at(address + 12, 16) == b"\7\0\0\0" * 4
    unicast(group, made)
    for _ in range(2):
        memory.checkpoint_prepare()
        with pytest.raises(CheckpointError):
            made.get_multicast_buffer((4,), torch.int32)
        memory.checkpoint_restore(group)
        assert made.get_multicast_ptr() == address
        made.get_multicast_buffer((4,), torch.int32, 3).fill_(9)
        unicast(group, made)
    reason = memory.multicast_reason
    made.close()
    return len(memory.uc_ptrs), reason


@pytest.mark.parametrize(("hosts", "per_host"), [(1, 2), (1, 4), (2, 2)])
def test_who_asks_for_it_gets_an_address_that_stays(cluster: Any, hosts: int, per_host: int) -> None:
    """By descriptors and by fabric handles; over checkpoints; and nothing is left."""
    made = cluster(hosts, per_host)
    size = hosts * per_host
    assert run_threads(size, with_multicast, made) == [(size, "")] * size
    assert made.alive() == {}
    # One object, to which all add their device, once for the opening and once for each restore.
    calls = {name: sum(node.driver.calls[name] for node in made.nodes) for name in CALLS}
    assert calls == {
        "cuMulticastCreate": 3,
        "cuMulticastAddDevice": 3 * size,
        "cuMulticastBindMem": 3 * size,
        "cuMulticastUnbind": 3 * size,
    }


def in_step(group: Group, cluster: Any, log: list[str]) -> bool:
    """Rank 0's device is slow."""
    with buffer(group, cluster) as made:
        memory = made.mcast_device_memory
        multicast: Any = memory._multicast
        wait, vacate = multicast._device.synchronize, multicast.vacate

        def slow() -> None:
            if group.rank == 0:
                threading.Event().wait(0.2)
            wait()
            log.append("wait")

        def noted() -> None:
            log.append("vacate")
            vacate()

        multicast._device.synchronize, multicast.vacate = slow, noted
        memory.checkpoint_prepare()
        multicast._device.synchronize, multicast.vacate = wait, vacate
        memory.checkpoint_restore(group)
        return True


def test_nobody_unbinds_what_a_device_may_still_store_through(cluster: Any) -> None:
    """E4: all devices are waited for first, on all ranks."""
    made, log = cluster(1, 2), list[str]()
    assert run_threads(2, in_step, made, log) == [True, True]
    assert log == ["wait"] * 2 + ["vacate"] * 2
    assert made.alive() == {}


def without(group: Group, cluster: Any, asked: bool) -> str:
    with buffer(group, cluster, asked) as made:
        assert made.get_multicast_ptr() == 0
        with pytest.raises(UnsupportedError, match="there is no multicast address"):
            made.get_multicast_buffer((4,), torch.int32)
        unicast(group, made)
        memory = made.mcast_device_memory
        memory.checkpoint_prepare()
        memory.checkpoint_restore(group)
        unicast(group, made)
        return memory.multicast_reason


def test_nobody_gets_it_without_asking(cluster: Any) -> None:
    """I6: the default, whatever the device can do."""
    made = cluster(1, 2)
    assert run_threads(2, without, made, False) == ["it was not asked for"] * 2
    assert all(node.driver.calls[name] == 0 for node in made.nodes for name in CALLS)
    assert made.alive() == {}


@pytest.mark.parametrize(("name", "value"), SWITCHES.items())
def test_the_usual_switches_turn_it_off(cluster: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """I6: whoever has turned it off in NCCL, torch or NVSHMEM has a reason."""
    monkeypatch.setenv(name, value)
    made = cluster(1, 2)
    reasons = run_threads(2, without, made, True)
    assert reasons[0] == reasons[1] and f"rank 0: {name}={value} turns multicast off" in reasons[0]
    assert all(node.driver.calls[call] == 0 for node in made.nodes for call in CALLS)
    assert made.alive() == {}


@pytest.mark.parametrize("value", ["", "other"])
def test_other_values_of_the_switches_do_not(cluster: Any, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    for name in SWITCHES:
        monkeypatch.setenv(name, value)
    made = cluster(1, 2)
    assert run_threads(2, with_multicast, made) == [(2, "")] * 2


def one_gpu(node: Any) -> None:
    machine = node.nvml.machine
    for position in range(8):
        machine.change(position, uuid="GPU-00000000-0000-0000-0000-000000000000")
    node.torch = type(node.torch)(machine)


def no_attribute(node: Any) -> None:
    node.driver.attributes["MULTICAST_SUPPORTED"] = 0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (no_attribute, "rank 1: cuda:1 can't do multicast: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0"),
        (lambda node: node.driver.fail("cuMulticastGetGranularity"), "rank 1: CudaCallError"),
    ],
    ids=["attribute", "granularity"],
)
def test_one_rank_that_can_not_is_enough(cluster: Any, spoil: Callable[[Any], None], words: str) -> None:
    """C2: all ranks have it or none; the reason is everybody's."""
    made = cluster(1, 3)
    spoil(made.nodes[1])
    reasons = run_threads(3, without, made, True)
    assert len(set(reasons)) == 1 and words.split(":")[1].strip() in reasons[0] and "rank 1" in reasons[0]
    assert all(node.driver.calls[call] == 0 for node in made.nodes for call in CALLS)
    assert made.alive() == {}


def test_ranks_of_one_gpu_do_without(cluster: Any) -> None:
    """A multicast object takes each GPU once; adding it again is an error of the driver that nobody provokes."""
    made = cluster(1, 2)
    for node in made.nodes:
        one_gpu(node)
    reasons = run_threads(2, without, made, True)
    assert "ranks share a GPU" in reasons[0] and reasons[0] == reasons[1]
    assert all(node.driver.calls[call] == 0 for node in made.nodes for call in CALLS)


@pytest.mark.parametrize("code", [401, 802, 2, 1], ids=["illegal state", "not ready", "out of slots", "invalid"])
@pytest.mark.parametrize(
    ("call", "rank"),
    [("cuMulticastCreate", 0), ("cuMulticastAddDevice", 1), ("cuMulticastBindMem", 1), ("cuMemSetAccess", 0)],
)
def test_what_fails_on_the_way_leaves_everything_else(cluster: Any, call: str, rank: int, code: int) -> None:
    """I6: exhausted slots, a fabric manager that is not ready: unicast goes on, the reason says which call."""
    made = cluster(1, 2)
    # The access to the memory itself is set twice before: one's own and the peer's.
    made.nodes[rank].driver.fail(call, after=2 if call == "cuMemSetAccess" else 0, code=code)
    reasons = run_threads(2, without, made, True)
    assert reasons[0] == reasons[1]
    assert f"rank {rank}: {call} failed with CUDA error {code}" in reasons[0]
    assert made.alive() == {}


def test_a_failure_at_the_restore_is_final(cluster: Any) -> None:
    """Captured graphs hold the multicast address, so nothing can go on without it."""
    made = cluster(1, 2)

    def run(group: Group) -> str:
        opened = buffer(group, made)
        memory = opened.mcast_device_memory
        memory.checkpoint_prepare()
        if group.rank == 1:
            made.here.driver.fail("cuMulticastBindMem", code=802)
        with pytest.raises(CheckpointError) as caught:
            memory.checkpoint_restore(group)
        memory.close()
        return str(caught.value)

    texts = run_threads(2, run)
    assert texts[0] == texts[1] and "half-way" in texts[0] and "rank 1: cuMulticastBindMem failed" in texts[0]
    for node in made.nodes:
        node.driver.forget()


# Buffers as tensors


def parts(group: Group, cluster: Any) -> int:
    with buffer(group, cluster, False) as made:
        usable = made.buf_size
        assert made.get_unicast_ptr(1) == made.mcast_device_memory.uc_ptrs[1]
        assert made.get_unicast_buffer((2, 3), torch.bfloat16, 1).data_ptr() == made.get_unicast_ptr(group.rank) + 2
        assert made.get_unicast_buffer((usable // 4,), torch.float32).numel() == usable // 4
        for sizes, dtype, offset in (
            ((usable // 4 + 1,), torch.float32, 0),
            ((1,), torch.float32, usable // 4),
            ((1,), torch.float32, -1),
            ((0,), torch.float32, 0),
        ):
            with pytest.raises(ArgumentValueError, match="is no part of"):
                made.get_unicast_buffer(sizes, dtype, offset)
        with pytest.raises(ArgumentValueError, match="rank must be 0 to 1"):
            made.get_unicast_buffer((1,), torch.float32, rank=2)
        made.lamport_initialize(group.rank, torch.float32)
        assert bool((made.get_unicast_buffer((usable // 4,), torch.float32).view(torch.int32) == -(2**31)).all())
        view = made.get_unicast_buffer((8,), torch.int32)
        assert list((ctypes.c_uint64 * 2).from_address(made.get_buffer_ptrs_dev())) == [
            made.get_unicast_ptr(0),
            made.get_unicast_ptr(1),
        ]
        return view.numel()


def test_parts_of_a_buffer_are_tensors(cluster: Any) -> None:
    made = cluster(1, 2)
    assert run_threads(2, parts, made) == [8, 8]
    assert made.alive() == {}


@pytest.mark.parametrize("device", ["cuda:0", torch.device("cpu"), torch.device("cuda"), 0], ids=str)
def test_a_buffer_needs_a_gpu_by_its_ordinal(device: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=r"a CUDA torch\.device with an ordinal"):
        McastGPUBuffer(5, 1, 0, device)
