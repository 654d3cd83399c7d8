"""Peer memory on real GPUs: ranks are processes, on one GPU and, where there are more, each on its own.

Every rank stores into every rank's memory with a kernel and with a copy engine, and all of it arrives.
"""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core._driver import Device
from comm_core.consensus import Teardown, Transaction
from comm_core.errors import CudaCallError, JointError, UnsupportedError
from comm_core.group import Group, as_group
from comm_core.memory import export_pointer, import_pointer, pack_strided_memory
from comm_core.memory.cudart import CudaRTLibrary
from comm_core.memory.peer import Mapped, choose_form, map_jointly, probe_memory
from comm_core.testing.ranks import RankPool, run_threads

GPUS = torch.cuda.device_count()
PLACES = ["one GPU", "a GPU each"] if GPUS > 1 else ["one GPU"]
SLACK = 8 << 20
"""Bytes by which a GPU's free memory may move by itself."""

pytestmark = [pytest.mark.gpu, pytest.mark.deadline(300)]


def bind(group: Group, place: str) -> torch.device:
    """Make this rank's device current and return it."""
    device = torch.device("cuda", 0 if place == "one GPU" else group.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.cuda.init()
    return device


def make(group: Group, device: torch.device, form: str, nbytes: int) -> tuple[Mapped, Teardown]:
    with Transaction(group, "open transport 'x'") as stages:
        mapped = map_jointly(stages, nbytes, device, form=form, number=1)
        return mapped, stages.commit()


def view(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return pack_strided_memory(address, nbytes, nbytes, 1, torch.uint8, device.index).view(-1)


def settle(group: Group) -> None:
    torch.cuda.synchronize()
    group.barrier("settled")


def write_and_read(group: Group, mapped: Mapped, device: torch.device, salt: int = 0) -> None:
    """Half of each rank's part is stored by a kernel, half copied; then everybody looks at everything."""
    part = mapped.nbytes // group.size // 2
    runtime = CudaRTLibrary()
    value = [
        [(31 * salt + 16 * owner + writer) % 251 + 1 for writer in range(group.size)] for owner in range(group.size)
    ]
    for owner, address in enumerate(mapped.addresses):
        whole = view(address, mapped.nbytes, device)
        first = 2 * part * group.rank
        whole[first : first + part].fill_(value[owner][group.rank])
        source = torch.full((part,), value[owner][group.rank], dtype=torch.uint8, device=device)
        torch.cuda.synchronize()
        runtime.cudaMemcpy(address + first + part, source.data_ptr(), part)
    settle(group)
    for owner, address in enumerate(mapped.addresses):
        whole = view(address, mapped.nbytes, device)
        for writer in range(group.size):
            there = whole[2 * part * writer : 2 * part * (writer + 1)]
            assert bool((there == value[owner][writer]).all()), (owner, writer)
    settle(group)


def free_bytes(group: Group) -> int:
    """Return the device's free memory while nobody allocates."""
    settle(group)
    gc.collect()
    torch.cuda.empty_cache()
    group.barrier("emptied")
    free = torch.cuda.mem_get_info()[0]
    group.barrier("counted")
    return free


def share(process_group: Any, place: str, form: str) -> list[Any]:
    group = as_group(process_group)
    device = bind(group, place)
    outcome: list[Any] = []
    for nbytes in (1, (2 << 20) + 1, 64 << 20):
        mapped, teardown = make(group, device, form, nbytes)
        assert torch.cuda.current_device() == device.index
        write_and_read(group, mapped, device, nbytes % 7)
        teardown.close()
        assert torch.cuda.current_device() == device.index
        outcome.append([mapped.nbytes >= nbytes, mapped.nbytes % (2 << 20), len(set(mapped.addresses))])
    return outcome


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
@pytest.mark.parametrize("place", PLACES)
def test_every_rank_stores_into_every_ranks_memory(ranks: RankPool, place: str, form: str, size: int) -> None:
    """By kernels and by copy engines, at the right addresses, for small and for large memory."""
    for outcome in ranks.run(share, place, form, ranks=size, timeout_s=120):
        assert outcome == [[True, 0, size]] * 3


def cycle_and_count(process_group: Any, place: str, form: str, times: int) -> list[tuple[int, int]]:
    group = as_group(process_group)
    device = bind(group, place)
    seen: list[tuple[int, int]] = []
    for number in range(times):
        mapped, teardown = make(group, device, form, 16 << 20)
        write_and_read(group, mapped, device, number)
        teardown.close()
        if number in (4, times - 1):
            seen.append((free_bytes(group), len(list(Path("/proc/self/fd").iterdir()))))
    return seen


@pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
@pytest.mark.parametrize("place", PLACES)
def test_fifty_cycles_leak_nothing(ranks: RankPool, place: str, form: str) -> None:
    """Neither memory of the device nor descriptors."""
    for (free, files), (free_later, files_later) in ranks.run(
        cycle_and_count, place, form, 50, ranks=4, timeout_s=200
    ):
        assert free_later >= free - SLACK
        assert files_later == files


def fail_once(process_group: Any, place: str, form: str, owner: str, name: str) -> None:
    group = as_group(process_group)
    device = bind(group, place)
    kind: Any = {"Device": Device, "CudaRTLibrary": CudaRTLibrary}[owner]
    original = getattr(kind, name)

    def fail(*_: Any, **__: Any) -> Any:
        raise CudaCallError(name, 2, "injected")

    make(group, device, form, 1)[1].close()
    before = free_bytes(group)
    if group.rank == 1:
        setattr(kind, name, fail)
    with pytest.raises(JointError) as caught:
        make(group, device, form, 64 << 20)
    setattr(kind, name, original)
    assert list(caught.value.per_rank) == [1] and "injected" in caught.value.per_rank[1]
    assert free_bytes(group) >= before - SLACK
    mapped, teardown = make(group, device, form, 1 << 20)
    write_and_read(group, mapped, device)
    teardown.close()


@pytest.mark.parametrize(
    ("form", "owner", "name"),
    [
        ("vmm_fd", "Device", "create"),
        ("vmm_fd", "Device", "export_descriptor"),
        ("vmm_fd", "Device", "import_descriptor"),
        ("vmm_fd", "Device", "allow_access"),
        ("cuda_ipc", "CudaRTLibrary", "cudaMalloc"),
        ("cuda_ipc", "CudaRTLibrary", "cudaIpcGetMemHandle"),
        ("cuda_ipc", "CudaRTLibrary", "cudaIpcOpenMemHandle"),
    ],
)
def test_a_failure_on_one_rank_leaves_nothing_on_any(ranks: RankPool, form: str, owner: str, name: str) -> None:
    """The memory of all ranks is back, and the next attempt works."""
    ranks.run(fail_once, PLACES[-1], form, owner, name, ranks=2, timeout_s=120)


def choose(process_group: Any) -> list[Any]:
    group = as_group(process_group)
    device = bind(group, PLACES[-1])
    facts = [probe_memory(rank, device, trial=True) for rank in range(group.size)]
    mapped, teardown = make(group, device, "auto", 1)
    write_and_read(group, mapped, device)
    teardown.close()
    return [facts[0].granules, dict(facts[0].refusals), choose_form(facts[:1]).form, mapped.form, mapped.reason]


def test_the_form_is_chosen_by_trying(ranks: RankPool) -> None:
    """Descriptors where the driver really lets them be passed; legacy IPC is the other form that works here."""
    outcome = ranks.run(choose, ranks=2, timeout_s=120)
    granules, refusals, alone, form, reason = outcome[0]
    assert all(item == outcome[0] for item in outcome)
    assert set(granules) == {"in_process", "vmm_fd", "cuda_ipc"} and not refusals
    assert alone == form == "vmm_fd", reason


def allocate_by(setting: str) -> None:
    """Change torch's allocator; the function has moved."""
    set_it: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (set_it or torch.cuda.memory._set_allocator_settings)(setting)


def share_tensors(process_group: Any) -> None:
    group = as_group(process_group)
    device = bind(group, PLACES[-1])
    allocate_by("expandable_segments:False")
    torch.cuda.empty_cache()
    tensors = [torch.full((1024,), 100 * group.rank + place, dtype=torch.int32, device=device) for place in range(3)]
    torch.cuda.synchronize()
    # Small tensors come from one block, so that at least one of them is not at its beginning.
    exports = [export_pointer(item.data_ptr(), 4096, device) for item in tensors]
    assert any(export["offset"] for export in exports)
    theirs: Any = group.gather("exports", exports)[1 - group.rank]
    imported = [import_pointer(export, device) for export in theirs]
    for place, item in enumerate(imported):
        got = torch.empty(1024, dtype=torch.int32, device=device)
        CudaRTLibrary().cudaMemcpy(got.data_ptr(), item.address, 4096)
        assert bool((got == 100 * (1 - group.rank) + place).all())
    for item in imported:
        item.close()
    group.barrier("closed")


def test_small_tensors_of_one_block_arrive_where_they_point(ranks: RankPool) -> None:
    """A handle maps the block, and without the offset the peer reads the tensor beside it (E2)."""
    ranks.run(share_tensors, ranks=2, timeout_s=120)


def export_expandable(process_group: Any) -> str:
    group = as_group(process_group)
    device = bind(group, "one GPU")
    torch.cuda.empty_cache()
    allocate_by("expandable_segments:True")
    try:
        tensor = torch.empty(64 << 20, dtype=torch.uint8, device=device)
        with pytest.raises(UnsupportedError) as caught:
            export_pointer(tensor.data_ptr(), 4096, device)
        # The refusal is not an error of CUDA's that would come back at the next call.
        torch.ones(8, device=device).sum().item()
        mapped, teardown = make(group, device, "cuda_ipc", 1 << 20)
        write_and_read(group, mapped, device)
        teardown.close()
        del tensor
        return str(caught.value)
    finally:
        torch.cuda.empty_cache()
        allocate_by("expandable_segments:False")


def test_expandable_segments_are_refused_and_disturb_nothing(ranks: RankPool) -> None:
    """Memory for sharing is allocated apart from torch's, so its settings don't matter (E1)."""
    for text in ranks.run(export_expandable, ranks=2, timeout_s=120):
        assert "does not come from cudaMalloc (torch's expandable_segments:True" in text


def share_between_threads(process_group: Any) -> None:
    device = bind(as_group(process_group), "one GPU")

    def run(group: Group) -> None:
        torch.cuda.set_device(device)
        mapped, teardown = make(group, device, "auto", 1 << 20)
        assert mapped.form == "in_process"
        write_and_read(group, mapped, device)
        teardown.close()

    run_threads(2, run, timeout_s=60)


def test_threads_of_one_process_share_one_gpu(ranks: RankPool) -> None:
    """Plain addresses of one device, without a handle."""
    ranks.run(share_between_threads, ranks=1, timeout_s=120)


def map_elsewhere(process_group: Any, form: str) -> list[bool]:
    group = as_group(process_group)
    own = bind(group, "a GPU each")
    other = torch.device("cuda", 1 - own.index)
    torch.cuda.set_device(other)
    mapped, teardown = make(group, own, form, 1 << 20)
    assert torch.cuda.current_device() == other.index
    teardown.close()
    assert torch.cuda.current_device() == other.index
    torch.cuda.set_device(own)
    return [len(set(mapped.addresses)) == 2]


if GPUS > 1:

    @pytest.mark.parametrize("form", ["vmm_fd", "cuda_ipc"])
    def test_the_callers_device_stays_current(ranks: RankPool, form: str) -> None:
        """Memory is made on the device that was named, whatever is current, and that is current afterwards."""
        assert ranks.run(map_elsewhere, form, ranks=2, timeout_s=120) == [[True]] * 2


def test_ranks_of_this_file_are_processes(ranks: RankPool) -> None:
    """Otherwise nothing above says anything about peers."""
    assert len(set(ranks.run(process_id, ranks=4))) == 4


def process_id(process_group: Any) -> int:
    return os.getpid()
