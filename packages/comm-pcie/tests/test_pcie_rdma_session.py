"""Sessions of the routes over NICs, whole, between processes, with memory of the host and the emulator's NICs.

Every test asserts the route and that NICs have moved the bytes: a silent fallback would pass all the others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
import rdma_host as host
import torch

from comm_core.errors import ArgumentValueError, ClosedError, CommError, UnsupportedError
from comm_core.testing import reference
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input


def operand(seed: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return make_input(seed, rank, tuple(shape), dtype)


def shapes_of(size: int, s: int, heads: int, dim: int) -> dict[str, tuple[int, ...]]:
    return {
        "scatter_heads": (1, s, size * heads, dim),
        "gather_heads": (1, size * s, heads, dim),
        "exchange_chunks": (1, 1, size, s * heads * dim),
    }


# Calls


def operations(group: Any, names: Sequence[str], geometries: Sequence[tuple[int, int, int]]) -> dict[str, int]:
    """Make every call of every geometry, and compare with the reference and with the dist backend."""
    with host.installed(), host.communicator(group) as comm, host.communicator(group, backend="gloo") as dist:
        session = host.session_of(comm)
        rank, size = comm.rank, comm.world_size
        moved = session.counters.write_bytes
        expected_bytes = calls = 0
        for name in names:
            dtype = getattr(torch, name)
            for seed, geometry in enumerate(geometries):
                for operation, shape in shapes_of(size, *geometry).items():
                    every = [operand(seed, peer, shape, dtype) for peer in range(size)]
                    x = every[rank]
                    out = comm.allocate_output(x, operation, dtype=dtype)
                    for built in (False, True):
                        out.view(torch.uint8).fill_(0x5A)
                        source = x
                        if built:
                            # Nothing is copied: the operand is built where the NIC reads.
                            source = comm.input_buffer(out, x.shape)
                            source.copy_(x)
                        found = getattr(comm, operation)(source, out=out, dtype=dtype)
                        assert found is out
                        what = f"{operation} {shape} {name} of rank {rank}"
                        assert_same_bits(out, getattr(reference, operation)(every)[rank], what)
                        assert_same_bits(out, getattr(dist, operation)(x, dtype=dtype), f"{what}, as dist")
                        calls += 1
                        expected_bytes += x.numel() * dtype.itemsize * len(session.peers) // size
        counters = session.counters
        assert counters.write_bytes - moved == expected_bytes and counters.exchanges == calls + 2
        assert counters.writes and counters.receives_completed == counters.writes
        assert comm.bytes_sent == sum(
            2 * torch.Size(shape).numel() * getattr(torch, name).itemsize * (size - 1) // size
            for name in names
            for geometry in geometries
            for shape in shapes_of(size, *geometry).values()
        )
        return counters._asdict()


GEOMETRIES = [(3, 1, 5), (4, 2, 16), (1, 1, 1)]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_operations_equal_the_references_and_the_dist_backend(ranks: RankPool, fabric: Any, size: int) -> None:
    """T2: every operation, element sizes of 1, 2 and 4 bytes, with the operand anywhere and in the input buffer."""
    names = ("uint8", "bfloat16", "float32") if size < 8 else ("float16",)
    found = ranks.run(
        operations, names, GEOMETRIES if size < 8 else GEOMETRIES[:2], ranks=size, env=fabric.environment()
    )
    counters = fabric.world.counters()
    assert counters["write_imm"] == sum(item["writes"] for item in found) > 0
    assert counters["written_bytes"] == sum(item["write_bytes"] for item in found)
    assert counters["umrs"] == sum(item["rebinds"] for item in found) > 0


@pytest.mark.parametrize("nodes", [[0] * 4 + [1] * 4, [rank % 2 for rank in range(8)]], ids=["halves", "mixed"])
def test_the_hybrid_route_sends_across_nodes_by_nic_alone(ranks: RankPool, fabric: Any, nodes: list[int]) -> None:
    """Four peers by NIC, three by copies, in one call and the same bits."""
    env = fabric.environment(route="hybrid", numa_nodes=nodes)
    found = ranks.run(operations, ("bfloat16",), GEOMETRIES[:2], ranks=8, env=env)
    # The self-test's two rounds and twelve calls, with four peers each.
    assert [item["writes"] for item in found] == [4 * (12 + 2)] * 8
    assert fabric.world.counters()["write_imm"] == 8 * 4 * 14


def every_dtype(group: Any) -> int:
    """Chunks of every plain dtype of 1, 2 and 4 bytes."""
    done = 0
    with host.installed(), host.communicator(group) as comm:
        session, size = host.session_of(comm), comm.world_size
        for name in ("int8", "bool", "float8_e4m3fn", "float8_e5m2", "int16", "uint16", "float16", "int32", "uint32"):
            dtype = getattr(torch, name)
            every = [
                (torch.arange(size * 24, dtype=torch.uint8) * (peer + 3) % (2 if name == "bool" else 251)).view(dtype)
                for peer in range(size)
            ]
            every = [item.reshape(1, 1, size, -1) for item in every]
            out = comm.allocate_output(every[0], "exchange_chunks", dtype=dtype)
            comm.exchange_chunks(every[comm.rank], out=out, dtype=dtype)
            for peer in range(size):
                assert_same_bits(out[0, 0, peer], every[peer][0, 0, comm.rank])
            done += 1
        assert session.counters.exchanges == done + 2
    return done


def test_every_plain_dtype_is_moved_as_bytes(ranks: RankPool, fabric: Any) -> None:
    assert ranks.run(every_dtype, ranks=2, env=fabric.environment()) == [9, 9]


# Geometries


def rebinding(group: Any) -> dict[str, int]:
    """One output, many geometries, and back."""
    with host.installed(), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        out = comm.allocate_output(torch.zeros(1, 8, size * 4, 32, dtype=torch.uint8), "scatter_heads")
        registered = session.counters.registrations
        bound: list[int] = []
        for step, geometry in enumerate([(8, 4, 32), (8, 4, 32), (5, 2, 16), (1, 1, 3), (8, 4, 32), (3, 4, 7)]):
            before = session.counters.rebinds
            for operation, shape in shapes_of(size, *geometry).items():
                every = [operand(step, peer, shape, torch.uint8) for peer in range(size)]
                expected = getattr(reference, operation)(every)[rank]
                view = host.output_view(out, expected.shape, torch.uint8)
                view.fill_(0x5A)
                assert_same_bits(getattr(comm, operation)(every[rank], out=view), expected, f"{operation} {geometry}")
            bound.append(session.counters.rebinds - before)
        assert session.counters.registrations == registered
        # The same geometry again describes each side anew only where another was in between: scatter and gather
        # use keys of their own, and chunks none.
        assert bound[0] > 0 and bound[1] == 0 and bound[4] > 0
        return session.counters._asdict()


@pytest.mark.parametrize("size", [2, 4])
def test_a_new_geometry_is_described_and_not_registered(ranks: RankPool, fabric: Any, size: int) -> None:
    """Geometry changes without re-registration: the counters of the fabric say so."""
    found = ranks.run(rebinding, ranks=size, env=fabric.environment())
    assert fabric.world.counters()["umrs"] == sum(item["rebinds"] for item in found)
    # Two registrations of two regions a rank: the output and that of the self-test.
    assert fabric.world.counters()["reg_mr"] == size * 4


def at_the_edge(group: Any) -> list[str]:
    """Rows 65,535 bytes apart, and further."""
    texts: list[str] = []
    with host.installed(), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        # With three heads a rank, and two ranks: 6 * 10922 = 65,532 and 6 * 10923 = 65,538.
        for dim, good in ((10922, True), (10923, False)):
            for operation, shape in shapes_of(size, 2, 3, dim).items():
                every = [operand(dim, peer, shape, torch.uint8) for peer in range(size)]
                out = comm.allocate_output(every[rank], operation)
                if good or operation == "exchange_chunks":
                    getattr(comm, operation)(every[rank], out=out)
                    assert_same_bits(out, getattr(reference, operation)(every)[rank], f"{operation} {dim}")
                    continue
                out.fill_(0x5A)
                posted = session.counters.writes
                with pytest.raises(ArgumentValueError, match=r"65538 bytes apart.*65535") as refused:
                    getattr(comm, operation)(every[rank], out=out)
                texts.append(str(refused.value))
                assert session.counters.writes == posted and bool((out == 0x5A).all())
    return texts


def test_rows_too_far_apart_are_refused_on_all_ranks_and_nothing_is_sent(ranks: RankPool, fabric: Any) -> None:
    """C8: the emulator cuts a pitch to 16 bits as the hardware does: a missing guard would be wrong bytes."""
    found = ranks.run(at_the_edge, ranks=2, env=fabric.environment())
    # The same on both, but for whom each would have sent to.
    assert [text.partition(": rows")[2] for text in found[0]] == [text.partition(": rows")[2] for text in found[1]]
    assert len(found[0]) == 2


def capacity(group: Any) -> None:
    """An output takes what fits its bytes, and no more; the input buffer likewise."""
    with host.installed(), host.communicator(group) as comm:
        session, size = host.session_of(comm), comm.world_size
        x = torch.zeros(1, 4, size * 2, 8, dtype=torch.uint8)
        out = comm.allocate_output(x, "scatter_heads")
        bigger = torch.zeros(1, 8, size * 2, 8, dtype=torch.uint8)
        room = comm.allocate_output(bigger, "scatter_heads")
        small = comm.input_buffer(out, (1, 4, size * 2, 8))
        assert small.data_ptr() == comm.input_buffer(out, (1, 1, 1, 7)).data_ptr()
        for shape in ((1, 8, size * 2, 8), (0,), (1, -1), (True,)):
            with pytest.raises(ArgumentValueError, match="input_buffer"):
                comm.input_buffer(out, shape)
        with pytest.raises(ArgumentValueError, match="begin where it does"):
            comm.input_buffer(out.flatten()[1:], (1,))
        elsewhere = torch.zeros(1, 4 * size, 2, 8, dtype=torch.uint8)
        with pytest.raises(ArgumentValueError, match="ordinary memory"):
            comm.scatter_heads(x, out=elsewhere)
        moved = room.view(torch.uint8).flatten()[64:][: x.numel()].view(1, 4 * size, 2, 8)
        with pytest.raises(ArgumentValueError, match="does not begin where the output does"):
            comm.scatter_heads(x, out=moved)
        # A view of the buffer that begins elsewhere is refused: the NIC would read from its beginning.
        inside = comm.input_buffer(room, (x.numel() * 2,))[8 : 8 + x.numel()].view(x.shape)
        with pytest.raises(ArgumentValueError, match="8 bytes inside the input buffer"):
            comm.scatter_heads(inside, out=host.output_view(room, elsewhere.shape, torch.uint8))
        for batch in (torch.zeros(2, 2, size * 2, 8, dtype=torch.uint8),):
            two = comm.allocate_output(batch, "scatter_heads")
            with pytest.raises(ArgumentValueError, match="take one batch, got 2"):
                comm.scatter_heads(batch, out=two)
        with pytest.raises(UnsupportedError, match="no head-chunk calls"):
            comm.scatter_qkv_head_chunk(
                x, x, x, head_offset=0, head_count=1, out=torch.zeros(1, 4 * size, 1, 24, dtype=torch.uint8)
            )
        with pytest.raises(UnsupportedError, match="no staging buffers"):
            comm.create_workspace()
        # Nothing of that has broken anything.
        assert_same_bits(comm.scatter_heads(x, out=out), torch.zeros_like(out))
        assert session.counters.exchanges == 3
    with pytest.raises(ClosedError):
        comm.scatter_heads(x, out=out)


def test_refusals_send_nothing_and_break_nothing(ranks: RankPool, fabric: Any) -> None:
    """C8: one batch, buffers by exact address, capacity: refused by what is equal on all ranks, with nothing sent."""
    ranks.run(capacity, ranks=2, env=fabric.environment())


def captured(group: Any) -> None:
    from comm_core import _cuda

    with host.installed(), host.communicator(group) as comm:
        session = host.session_of(comm)
        x = torch.zeros(1, 1, comm.world_size, 8, dtype=torch.uint8)
        out = comm.allocate_output(x, "exchange_chunks")
        real = _cuda.is_capturing
        try:
            _cuda.is_capturing = lambda: True
            with pytest.raises(UnsupportedError, match="can't be captured in a CUDA graph: the host posts"):
                comm.exchange_chunks(x, out=out)
        finally:
            _cuda.is_capturing = real
        comm.exchange_chunks(x, out=out)
        assert session.counters.exchanges == 3


def test_a_capture_is_refused_with_the_reason(ranks: RankPool, fabric: Any) -> None:
    ranks.run(captured, ranks=2, env=fabric.environment())


def rounds(group: Any, count: int) -> int:
    """Calls in a row, ranks out of step, each with other data."""
    with host.installed(), host.communicator(group, dtype=torch.int32) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        outs = [
            comm.allocate_output(torch.zeros(1, 1, size, 3, dtype=torch.int32), "exchange_chunks") for _ in range(2)
        ]
        for round_ in range(count):
            x = torch.full((1, 1, size, 3), 100 * round_ + rank, dtype=torch.int32)
            out = comm.exchange_chunks(x, out=outs[round_ % 2])
            assert out[0, 0, :, 1].tolist() == [100 * round_ + peer for peer in range(size)]
            if round_ % 5 == rank % 5:
                time.sleep(0.001)
            if round_ % 7 == 0:
                session.barrier()
                gathered = torch.zeros(size, 1, dtype=torch.uint8)
                session.all_gather_small(torch.tensor([round_ + rank], dtype=torch.uint8), gathered)
                assert gathered.flatten().tolist() == [round_ + peer for peer in range(size)]
        stream, struct = session.launch_context()
        assert stream == 0 and struct > 0
        return session.counters.exchanges


def test_calls_follow_each_other(ranks: RankPool, fabric: Any) -> None:
    """G3: a rank that is ahead waits until outputs are free; no message comes before its receive."""
    assert ranks.run(rounds, 60, ranks=4, env=fabric.environment()) == [62] * 4


def two_at_once(group: Any) -> tuple[int, int]:
    """Calls of two communicators in turn, one with the other's buffers as operands; then one goes on alone."""
    with host.installed(), host.communicator(group) as comm:
        other = host.communicator(group)
        size, rank = comm.world_size, comm.rank
        every = [operand(5, peer, (1, 3, size, 8), torch.uint8) for peer in range(size)]
        expected = reference.scatter_heads(every)[rank]
        outs = [which.allocate_output(every[rank], "scatter_heads") for which in (comm, other)]
        for _ in range(3):
            built = comm.input_buffer(outs[0], every[rank].shape)
            built.copy_(every[rank])
            for which, out, x in ((other, outs[1], built), (comm, outs[0], every[rank]), (comm, outs[0], built)):
                out.fill_(0x5A)
                assert_same_bits(which.scatter_heads(x, out=out), expected)
        with pytest.raises(ArgumentValueError, match="ordinary memory"):
            comm.scatter_heads(every[rank], out=outs[1])
        counts = [host.session_of(which).counters.exchanges for which in (comm, other)]
        other.close()
        outs[0].fill_(0x5A)
        assert_same_bits(comm.scatter_heads(every[rank], out=outs[0]), expected)
        return counts[0], counts[1]


def test_two_communicators_do_not_disturb_each_other(ranks: RankPool, fabric: Any) -> None:
    """Over one NIC a rank: each has queue pairs, keys and epochs of its own."""
    assert ranks.run(two_at_once, ranks=3, env=fabric.environment()) == [(2 + 6, 2 + 3)] * 3


def one_is_slow(group: Any, step: str, culprit: int) -> tuple[float, float]:
    """A call in which one rank takes long for a step; returns when that was over, and when the call was."""
    with host.installed(), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        every = [operand(9, peer, (1, 3, size, 8), torch.uint8) for peer in range(size)]
        out = comm.allocate_output(every[rank], "scatter_heads")
        out.fill_(0x5A)
        port: Any = session._port
        real = getattr(port, step)
        over = [0.0]

        def slow(*arguments: Any) -> None:
            time.sleep(0.3)
            real(*arguments)
            over[0] = time.monotonic()

        if rank == culprit:
            setattr(port, step, slow)
        session.barrier()
        comm.scatter_heads(every[rank], out=out)
        end = time.monotonic()
        assert_same_bits(out, reference.scatter_heads(every)[rank])
        assert session.counters.writes == 3 * len(session.peers)
        return over[0], end


@pytest.mark.parametrize(("route", "size", "step"), [("rdma", 2, "flush"), ("hybrid", 8, "copy")])
def test_a_call_ends_when_everybody_has_everything(
    ranks: RankPool, fabric: Any, route: str, size: int, step: str
) -> None:
    """Above all what the copies of ranks of the same node write, of which no NIC tells."""
    found = ranks.run(one_is_slow, step, 1, ranks=size, env=fabric.environment(route=route))
    # One clock for all processes of a machine.
    assert all(end >= found[1][0] > 0 for _, end in found)


def late_bytes(group: Any, flushes: bool) -> tuple[bool, int]:
    """Whether the output is right where bytes that have arrived are shown only after a flush."""
    with host.installed(), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        every = [operand(3, peer, (1, 1, size, 64), torch.uint8) for peer in range(size)]
        out = comm.allocate_output(every[rank], "exchange_chunks")
        session.barrier()
        if rank == 0:
            library = emulator.bound(Path(host.told().emulator))
            why = bytes(256)
            assert library.emu_rule(b"late verb=write_imm value=32 count=0", why, 0) >= 0
        session.barrier()
        port: Any = session._port
        if not flushes:
            port._flush = lambda: 0
        comm.exchange_chunks(every[rank], out=out)
        same = torch.equal(out, reference.exchange_chunks(every)[rank])
        session.barrier()
        port._flush = emulator.bound(Path(host.told().emulator)).emu_flush
        port.flush()
        assert torch.equal(out, reference.exchange_chunks(every)[rank])
        return same, session.counters.exchanges


@pytest.mark.parametrize("flushes", [True, False])
def test_a_completion_is_not_yet_visibility(ranks: RankPool, fabric: Any, flushes: bool) -> None:
    """J5: bytes whose completion was reported are seen only after the flush; without it the output is wrong."""
    found = ranks.run(late_bytes, flushes, ranks=2, env=fabric.environment())
    assert [same for same, _ in found] == [flushes] * 2
    assert fabric.world.counters()["withheld"] > 0


def payload(group: Any) -> dict[str, int]:
    with host.installed(), host.communicator(group) as comm:
        session, size, rank = host.session_of(comm), comm.world_size, comm.rank
        for operation, shape in shapes_of(size, 64, 2, 96).items():
            every = [operand(1, peer, shape, torch.uint8) for peer in range(size)]
            out = comm.allocate_output(every[rank], operation)
            getattr(comm, operation)(every[rank], out=out)
            assert_same_bits(out, getattr(reference, operation)(every)[rank], operation)
        return session.counters._asdict()


def test_payloads_above_the_ports_limit_are_split(
    ranks: RankPool, rdma_libraries: dict[str, str], tmp_path: Path
) -> None:
    """A NIC takes messages of 1 GiB; here of 4 KiB, so that it shows."""
    small = host.Fabric(rdma_libraries, tmp_path, max_message=4096)
    found = ranks.run(payload, ranks=2, env=small.environment())
    assert all(item["split_writes"] > 0 for item in found)
    small.world.close()


# The reasons that a rank has


def fallback(group: Any) -> tuple[str | None, str]:
    with host.installed():
        try:
            with host.communicator(group) as comm:
                return comm.transport, str(comm.fallback_reason)
        except CommError as error:
            return None, f"{type(error).__name__}: {error}"


def test_a_gid_that_has_changed_since_the_plan_is_refused_on_all_ranks(ranks: RankPool, fabric: Any) -> None:
    """The plan's GID and the one at the time of connecting must be the same bytes."""
    fabric.world.set_gid("mlx5_1", 0, "10.0.9.9")
    found = ranks.run(fallback, ranks=2, env=fabric.environment())
    assert len(set(found)) == 1 and found[0][0] is None
    assert "rank 1: GID 0 of mlx5_1 has changed since the route was planned" in found[0][1]


def gid_changes(group: Any, nic: str) -> str:
    """Change a GID between the records and the connection."""
    from comm_pcie.rdma.engine import RdmaEngine

    real = RdmaEngine.revalidate

    def revalidate(self: Any) -> None:
        if self.nic == nic:
            library = emulator.bound(Path(host.told().emulator))
            assert library.emu_set_gid(nic.encode(), 0, emulator.gid("10.0.9.9"), 2, 2) == 0
        real(self)

    RdmaEngine.revalidate = revalidate
    try:
        return fallback(group)[1]
    finally:
        RdmaEngine.revalidate = real


def test_a_gid_that_changes_while_connecting_is_refused_on_all_ranks(ranks: RankPool, fabric: Any) -> None:
    found = ranks.run(gid_changes, "mlx5_0", ranks=2, env=fabric.environment())
    assert len(set(found)) == 1 and "rank 0" in found[0] and "look at the port again" in found[0]


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ({"nics": ["mlx5_0", "mlx5_9"]}, "mlx5_9"),
        ({"gid_indices": [0, 5]}, "GID"),
        ({"emulator": "/nonexistent/libverbs.so", "COMM_VERBS_LIBRARY": "/nonexistent/libverbs.so"}, "libverbs.so"),
    ],
    ids=["nic", "gid", "library"],
)
def test_what_can_not_be_opened_is_refused_on_all_ranks(
    ranks: RankPool, fabric: Any, what: dict[str, Any], word: str
) -> None:
    """J7: a device that is gone, a GID that is none, a library that is missing: no import fails, all ranks refuse."""
    found = ranks.run(fallback, ranks=2, env=fabric.environment(**what))
    assert len(set(found)) == 1 and found[0][0] is None and word in found[0][1], found
