"""Opening, connecting and registering of the RDMA engine: each step that can fail, and what is left of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
import rdma_ranks as ranks_of
from rdma_ranks import LONG, Ranks, Shape

from comm_core.errors import ArgumentValueError, TransportError, UnsupportedError
from comm_pcie.rdma.engine import Memory, RdmaEngine, Settings, VerbsApi

SHAPE = Shape("gather_heads", 3, 6, 32)
ENOMEM, EINVAL, EFAULT, EOPNOTSUPP = 12, 22, 14, 95


# -- Opening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "error", "kind"),
    [
        ("open", EINVAL, TransportError),
        ("alloc_pd", ENOMEM, TransportError),
        ("create_cq", ENOMEM, TransportError),
        ("create_qp", ENOMEM, TransportError),
        ("create_qp", EOPNOTSUPP, UnsupportedError),
    ],
)
@pytest.mark.parametrize("after", [0, 1])
def test_an_engine_that_can_not_be_opened_leaves_nothing(
    world: Any, api: VerbsApi, verb: str, error: int, kind: type[Exception], after: int
) -> None:
    after = after if verb == "create_qp" else 0
    world.rule(f"fail verb={verb} nic=mlx5_0 value={error} after={after}")
    with pytest.raises(kind, match=os.strerror(error)):
        RdmaEngine(api, nic="mlx5_0", gid_index=0, rank=0, world_size=3)
    assert not any(world.alive().values())
    RdmaEngine(api, nic="mlx5_0", gid_index=0, rank=0, world_size=3).close()


Entry = emulator.Entry


@pytest.mark.parametrize(
    ("changes", "index", "text"),
    [
        ({"state": emulator.DOWN}, 0, "is not active"),
        ({"link_layer": emulator.INFINIBAND}, 0, "RoCE needs Ethernet"),
        ({"max_message": 0}, 0, "largest message is 0"),
        ({"mlx5": False}, 0, "is no mlx5 device"),
        ({"interleaved": False}, 0, "no queue pair with interleaved keys"),
        ({}, 16, "has 16 GIDs"),
        ({}, 3, "is the entry empty"),
        ({"addresses": (Entry(0, "10.0.0.1", type=1),)}, 0, "no RoCE v2 entry"),
        ({"addresses": (Entry(0, "10.0.0.1", ifindex=0),)}, 0, "no RoCE v2 entry"),
        ({"addresses": (Entry(0, "fe80::1"),)}, 0, "no RoCE v2 entry"),
        ({"addresses": (Entry(0, "2001:db8::1"),)}, 0, "no RoCE v2 entry"),
        ({"addresses": (Entry(0, "0.0.0.0"),)}, 0, "no RoCE v2 entry"),
        ({"name": "mlx5_7"}, 0, "no RDMA device mlx5_0; there are: mlx5_7"),
    ],
)
def test_a_nic_that_can_not_be_used(
    library: Path, tmp_path: Path, api: VerbsApi, changes: dict[str, Any], index: int, text: str
) -> None:
    (nic,) = emulator.nics(1)
    world = emulator.World(library, tmp_path / "fabric", [nic._replace(**changes)])
    with world, pytest.raises(UnsupportedError, match=text):
        RdmaEngine(api, nic="mlx5_0", gid_index=index, rank=0, world_size=2)


def test_arguments_that_make_no_sense(world: Any, api: VerbsApi) -> None:
    common: dict[str, Any] = {"nic": "mlx5_0", "gid_index": 0, "rank": 0, "world_size": 3}
    for changes in (
        {"rank": 3},
        {"rank": -1},
        {"peers": [0]},
        {"peers": [3]},
        {"peers": [1, 1]},
        {"gid_index": 256},
        {"settings": Settings(receive_depth=1)},
        {"settings": Settings(send_depth=0)},
        {"settings": Settings(timeout=32)},
        {"settings": Settings(retry_count=8)},
        {"settings": Settings(traffic_class=256)},
    ):
        with pytest.raises(ArgumentValueError):
            RdmaEngine(api, **{**common, **changes})


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (lambda world: world.set_gid("mlx5_0", 0, "10.0.0.9"), "was 10.0.0.1 .* is 10.0.0.9 now"),
        (lambda world: world.set_gid("mlx5_0", 0, None), "is the entry empty"),
        (lambda world: world.set_gid("mlx5_0", 0, "10.0.0.1", 1), "no RoCE v2 entry"),
        (lambda world: world.set_port("mlx5_0", emulator.ACTIVE, 3), "MTU .* was 5 .* is 3 now"),
        (lambda world: world.set_port("mlx5_0", emulator.DOWN), "is not active"),
    ],
)
def test_what_changed_since_it_was_told_is_found(
    world: Any, api: VerbsApi, action: Callable[[Any], None], text: str
) -> None:
    members = ranks_of.engines(api, 3)
    for engine in members:
        engine.revalidate()
    action(world)
    with pytest.raises(TransportError, match=text):
        members[0].revalidate()
    members[1].revalidate()
    for engine in members:
        assert engine.quiesce(LONG).teardown_safe
        engine.close()


@pytest.mark.parametrize("step", range(6))
def test_connecting_fails_at_each_step(world: Any, api: VerbsApi, step: int) -> None:
    """INIT, RTR and RTS of the first and of the second peer; then everything is given back."""
    members = ranks_of.engines(api, 3)
    endpoints = [engine.endpoint() for engine in members]
    world.rule(f"fail verb=modify_qp nic=mlx5_0 value=22 after={step}")
    peer, state = 1 + step // 3, ("INIT", "RTR", "RTS")[step % 3]
    with pytest.raises(TransportError, match=f"queue pair for rank {peer} to {state}: Invalid argument"):
        members[0].connect(endpoints)
    for engine in members:
        assert engine.quiesce(LONG).teardown_safe
        engine.close()


def test_an_address_that_nobody_has(world: Any, api: VerbsApi) -> None:
    members = ranks_of.engines(api, 3)
    endpoints = [engine.endpoint() for engine in members]
    endpoints[2] = {**endpoints[2], "gid": emulator.gid("fe80::1").hex()}
    with pytest.raises(TransportError, match="rank 2 to RTR: Connection timed out: is the peer's address reachable"):
        members[0].connect(endpoints)
    for engine in members:
        assert engine.quiesce(LONG).teardown_safe
        engine.close()


def test_records_that_make_no_sense(world: Any, api: VerbsApi) -> None:
    """Each is refused before anything is changed, so that the right ones still work."""
    members = ranks_of.engines(api, 3)
    endpoints = [engine.endpoint() for engine in members]
    for change in (
        {"gid": "00"},
        {"gid": "zz" * 16},
        {"qps": []},
        {"qps": [None] * 3},
        {"qps": [[1 << 24, 0], None, None]},
        {"qps": [[5, -1], None, None]},
        {"mtu": 0},
        {"mtu": 6},
        {"max_message": 0},
        {"max_message": "many"},
    ):
        with pytest.raises(ArgumentValueError, match="rank 1's endpoint"):
            members[0].connect([endpoints[0], {**endpoints[1], **change}, endpoints[2]])
    with pytest.raises(ArgumentValueError, match="rank 2 is a peer, and its endpoint is missing"):
        members[0].connect(endpoints[:2])
    ranks_of.connect(members)
    with pytest.raises(ArgumentValueError, match="connected already"):
        members[0].connect(endpoints)
    for engine in members:
        assert engine.quiesce(LONG).teardown_safe
        engine.close()


# -- Registering --------------------------------------------------------------------------------------------------


def test_dma_buf_first_and_peer_memory_second(world: Any, api: VerbsApi) -> None:
    engine = RdmaEngine(api, nic="mlx5_0", gid_index=0, rank=0, world_size=2)
    file = os.memfd_create("dmabuf")
    os.ftruncate(file, 8192)
    page = 1 << 20
    plain, buffered = Memory(page, 4096), Memory(page, 4096, file, 4096)
    denied = Memory(page, 4096, None, 0, "the driver has no DMA-BUF")
    for output, landing, how in (
        (buffered, buffered, ("dmabuf", "dmabuf")),
        (plain, plain, ("host", "host")),
        (denied, plain, ("peermem", "host")),
        # Longer than the file: the kernel refuses it, and the other way is taken.
        (buffered._replace(dmabuf_offset=8192), buffered, ("peermem", "dmabuf")),
    ):
        pair = engine.register(output=output, landing=landing)
        assert pair.how == how
        pair.close()
    for memory, texts in (
        (buffered, ("By DMA-BUF: Cannot allocate memory. By peer memory: Bad address", "nvidia-peermem")),
        (denied, ("By DMA-BUF: none was made. By peer memory: Bad address", "the driver has no DMA-BUF")),
        (plain, ("can't be registered with mlx5_0: Bad address",)),
    ):
        world.rule(f"fail verb=reg_mr value={EFAULT}")
        if memory is buffered:
            world.rule(f"fail verb=reg_dmabuf value={ENOMEM}")
        with pytest.raises(TransportError) as caught:
            engine.register(output=plain if memory is plain else memory, landing=plain)
        assert all(text in str(caught.value) for text in texts), caught.value
        assert engine.counters.registrations == 0
    os.close(file)
    engine.close()


@pytest.mark.parametrize("after", range(4))
def test_a_registration_that_fails_leaves_nothing(world: Any, api: VerbsApi, after: int) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    before = world.alive()
    world.rule(f"fail verb=create_mkey nic=mlx5_0 value={ENOMEM} after={after}")
    with pytest.raises(TransportError, match="a key for a band can't be made: Cannot allocate"):
        ranks.engines[0].register(output=Memory(1 << 20, 64), landing=Memory(1 << 21, 64))
    assert world.alive() == before
    world.rule(f"fail verb=reg_mr nic=mlx5_0 value={EFAULT} after=1")
    with pytest.raises(TransportError, match="the landing buffer of 64 bytes"):
        ranks.engines[0].register(output=Memory(1 << 20, 64), landing=Memory(1 << 21, 64))
    assert world.alive() == before
    ranks.run(SHAPE)
    ranks.close()


def test_empty_buffers_are_refused(world: Any, api: VerbsApi) -> None:
    engine = RdmaEngine(api, nic="mlx5_0", gid_index=0, rank=0, world_size=2)
    for output, landing in ((Memory(0, 8), Memory(8, 8)), (Memory(8, 8), Memory(8, 0))):
        with pytest.raises(ArgumentValueError, match="is empty"):
            engine.register(output=output, landing=landing)
    engine.close()
