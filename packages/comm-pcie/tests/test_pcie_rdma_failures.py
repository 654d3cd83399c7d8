"""Failures of sessions over NICs: each step of opening, calls and closing, on each rank, ends in a joint outcome.

Between processes, over the emulator. What a test does not say is said by the fixture `fabric`: afterwards no device,
region, key, queue pair is left, and every fault that was ordered has happened.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
import rdma_host as host
import torch

from comm_core.errors import (
    ClosedError,
    CommError,
    GroupTimeoutError,
    JointError,
    PeerStalledError,
    TransportError,
    UlyssesBackendError,
)
from comm_core.testing import reference
from comm_core.testing.ranks import RankPool
from comm_core.testing.reference import assert_same_bits, make_input

AT_ONCE_S = 6.0
"""Within this an abort reaches everybody, on a busy machine; the deadline of the group is five times that."""
BROKEN = "scatter_heads"


def example(comm: Any, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An operand, its output, and what belongs in it."""
    size = comm.world_size
    every = [make_input(seed, peer, (1, 4, 2 * size, 16), torch.uint8) for peer in range(size)]
    out = comm.allocate_output(every[comm.rank], BROKEN)
    return every[comm.rank], out, reference.scatter_heads(every)[comm.rank]


def exchanged(comm: Any, seed: int = 0) -> int:
    """Make a call and look at what came."""
    x, out, expected = example(comm, seed)
    session = host.session_of(comm)
    before = session.counters.write_bytes
    assert_same_bits(comm.scatter_heads(x, out=out), expected)
    moved = session.counters.write_bytes - before
    assert moved == x.numel() * len(session.peers) // comm.world_size
    return moved


# Opening


def opening(group: Any) -> tuple[str, bool]:
    """Fail, then do it again in the same processes."""
    with host.installed():
        try:
            with host.communicator(group) as comm:
                exchanged(comm)
            text = ""
        except UlyssesBackendError as error:
            text = str(error)
        # What was ordered has happened, so now it works; nothing of the first attempt is in the way.
        with host.communicator(group) as comm:
            return text, exchanged(comm) > 0


STEPS = {
    "open": "open the NIC",
    "alloc_pd": "open the NIC",
    "create_cq": "open the NIC",
    "create_qp": "open the NIC",
    "modify_qp": "connect",
    "reg_mr": "register self-test",
    "create_mkey": "register self-test",
    "umr": "self-test of the NICs",
    "write_imm": "self-test of the NICs",
    "post_recv": "connect",
}


@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize(("size", "rank"), [(2, 0), (2, 1), (4, 2)])
def test_each_step_of_the_opening_fails_on_all_ranks_or_on_none(
    ranks: RankPool, fabric: Any, verb: str, size: int, rank: int
) -> None:
    """C3: with the failing rank and the step in the text; nothing is left, and the next attempt works."""
    fabric.world.rule(f"fail verb={verb} nic=mlx5_{rank} value=12 count=1")
    found = ranks.run(opening, ranks=size, env=fabric.environment())
    assert len({text for text, _ in found}) == 1
    text, works = found[0]
    assert STEPS[verb] in text and f"rank {rank}" in text and works, text


def wrong_self_test(group: Any, culprit: int) -> str:
    """A rank whose payload is changed on its way: the NIC reads the wrong row."""
    from comm_pcie.rdma import opening as module

    real = module._operand

    def operand(seed: int, size: int, plan: Any, device: Any) -> torch.Tensor:
        found = real(seed, size, plan, device)
        frame = sys._getframe(1).f_code.co_name
        if frame == "self_test" and group.rank() == culprit:
            found[7] ^= 1
        return found

    module._operand = operand
    try:
        with host.installed(), pytest.raises(UlyssesBackendError) as refused:
            host.communicator(group)
        return str(refused.value)
    finally:
        module._operand = real


def test_a_wrong_byte_in_the_self_test_refuses_the_route_everywhere(ranks: RankPool, fabric: Any) -> None:
    """C4: what every peer has sent is compared, over the path of calls, by value."""
    found = ranks.run(wrong_self_test, 1, ranks=2, env=fabric.environment())
    assert (
        found[0] == found[1] and "bytes are wrong, the first at" in found[0] and "self-test of the NICs" in found[0]
    )


def falls_back(group: Any) -> tuple[str, str, list[str]]:
    """Open with a preference, and exchange by what is left."""
    from comm_pcie import RouteWarning
    from comm_pcie import warnings as given

    given._given.clear()
    with host.installed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with host.communicator(group) as comm:
            x, out, expected = example(comm)
            assert_same_bits(comm.scatter_heads(x, out=out), expected)
            told = [str(item.message) for item in caught if item.category is RouteWarning]
            return str(comm.transport), str(comm.fallback_reason), told


@pytest.mark.parametrize("requested", ["prefer-rdma", "auto"])
def test_a_preferred_route_that_can_not_be_opened_gives_way_to_copies(
    ranks: RankPool, fabric: Any, modules: Any, requested: str
) -> None:
    """On all ranks together, with a warning and the reason; what the attempt had opened is closed."""
    fabric.world.rule("fail verb=reg_mr nic=mlx5_1 value=95 count=1")
    env = fabric.environment(requested=requested, exchange=str(modules.exchange.artifact.path))
    found = ranks.run(falls_back, ranks=2, env=env)
    assert found[0] == found[1]
    transport, reason, warned = found[0]
    assert transport == "p2p" and "register self-test: rank 1" in reason and "Operation not supported" in reason
    assert len(warned) == 1 and "using route 'p2p'" in warned[0] and "rank 1" in warned[0]
    assert fabric.world.counters()["write_imm"] == 0


# Calls

PHASES = ("rebind", "landing", "opening", "copies", "post", "completion", "flush", "closing")


def inject(session: Any, out: torch.Tensor, phase: str) -> None:
    """Make one phase of the next call fail on this rank."""
    port, pair = session._port, session._outputs[out.data_ptr()].pair
    calls = {"barrier": 0}

    def fail(*_: Any) -> Any:
        raise RuntimeError(f"injected into {phase}")

    if phase in ("rebind", "post"):
        setattr(pair, "rebind" if phase == "rebind" else "exchange", fail)
    elif phase == "landing":
        session._words_before, session._steps_before = None, session._steps

        def steps(plan: Any, geometry: Any, source: Any, output: Any, operation: Any) -> None:
            session._require("never", output.pair.rebind(geometry, session._timeout_ns))
            fail()

        session._steps = steps
    elif phase in ("opening", "closing"):
        real = port.barrier

        def barrier(operation: Any) -> None:
            calls["barrier"] += 1
            if calls["barrier"] == (1 if phase == "opening" else 2):
                fail()
            real(operation)

        port.barrier = barrier
    elif phase == "copies":
        port.copy = fail
    elif phase == "flush":
        port.flush = fail
    else:
        assert phase == "completion"
        library = emulator.bound(Path(host.told().emulator))
        nic = host.told().nics or [f"mlx5_{rank}" for rank in range(8)]
        why = emulator.ctypes.create_string_buffer(256)
        rule = f"status verb=write_imm nic={nic[session._group.rank]} value=10 count=1"
        assert library.emu_rule(rule.encode(), why, 256) >= 0, why.value


def breaking(group: Any, phase: str, culprit: int) -> dict[str, Any]:
    with host.installed():
        comm = host.communicator(group)
        session = host.session_of(comm)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        if comm.rank == culprit:
            inject(session, out, phase)
        session.barrier()
        begin = time.monotonic()
        kinds: list[str] = []
        texts: list[str] = []
        # A call in which every rank but the culprit may already have all that it needs can end well for some; the
        # next one must not.
        for _ in range(2):
            try:
                comm.scatter_heads(x, out=out)
                kinds.append("ok")
            except TransportError as error:
                kinds.append(type(error).__name__)
                texts.append(str(error))
        seconds = time.monotonic() - begin
        poisoned = bool((out == 0xFF).all())
        safe = session.teardown_safe
        comm.close()
        return {"kinds": kinds, "texts": texts, "seconds": seconds, "poisoned": poisoned, "safe": safe}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("size", "culprit"), [(2, 0), (2, 1), (4, 3)])
def test_a_failure_in_each_phase_of_a_call_ends_it_everywhere(
    ranks: RankPool, fabric: Any, phase: str, size: int, culprit: int
) -> None:
    """C8: the abort reaches ranks in polls and in barriers at once; outputs are poisoned; close works after it."""
    found = ranks.run(breaking, phase, culprit, ranks=size, env=fabric.environment())
    for rank, outcome in enumerate(found):
        assert outcome["kinds"][1] != "ok" and outcome["seconds"] < AT_ONCE_S and outcome["safe"], outcome
        assert outcome["poisoned"], (rank, outcome)
        if rank != culprit:
            assert outcome["kinds"][1] in ("PeerStalledError", "TransportError"), outcome
            assert f"rank {culprit}" in outcome["texts"][0], outcome
    own = found[culprit]["texts"][0]
    assert ("injected into" in own) == (phase != "completion"), own
    if phase == "completion":
        # The write that failed stops the pair of queues at both ends: the peer may see its own write fail first, and
        # then its word reaches this rank before this rank has looked.
        told = f"rank {culprit} was told that rank" in own and f"gave up on rank {culprit}" in own
        assert f"rank {culprit}" in own
        assert found[culprit]["kinds"][0] == ("PeerStalledError" if told else "TransportError"), found[culprit]


@pytest.mark.parametrize("phase", ["copies", "completion", "closing"])
def test_a_failure_on_the_hybrid_route_reaches_both_sides(ranks: RankPool, fabric: Any, phase: str) -> None:
    """C8: ranks that a NIC writes to learn it in their polls, those of the same node by the kernels' signals."""
    culprit = 5
    found = ranks.run(breaking, phase, culprit, ranks=8, env=fabric.environment(route="hybrid"))
    for rank, outcome in enumerate(found):
        assert outcome["kinds"][1] != "ok" and outcome["poisoned"] and outcome["safe"], (rank, outcome)
        assert outcome["seconds"] < AT_ONCE_S and f"rank {culprit}" in outcome["texts"][0], (rank, outcome)


def stays_away(group: Any, culprit: int) -> tuple[str, int, float]:
    """A rank skips a call and makes it later."""
    with host.installed():
        comm = host.communicator(group)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        host.session_of(comm).barrier()
        begin = time.monotonic()
        if comm.rank == culprit:
            time.sleep(2.5)
        with pytest.raises(PeerStalledError) as stalled:
            comm.scatter_heads(x, out=out)
        seconds = time.monotonic() - begin
        comm.close(10)
        return str(stalled.value), stalled.value.waited_for, seconds


def test_a_rank_that_stays_away_is_named_at_the_deadline(ranks: RankPool, fabric: Any) -> None:
    """It is told when it comes, and close works after it."""
    found = ranks.run(stays_away, 1, ranks=4, env=fabric.environment(COMM_TIMEOUT_S="1"))
    assert [waited_for for _, waited_for, _ in found] == [1] * 4
    assert all("rank 1" in text for text, _, _ in found)
    assert all(1.0 <= seconds < AT_ONCE_S for _, _, seconds in found)


def numbers_differ(group: Any) -> tuple[str, str]:
    with host.installed():
        comm = host.communicator(group)
        session = host.session_of(comm)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        # As after a call that the other rank has not made.
        session._epoch += comm.rank
        with pytest.raises(TransportError) as broken:
            comm.scatter_heads(x, out=out)
        comm.close()
        return type(broken.value).__name__, str(broken.value)


def test_ranks_at_different_exchanges_are_told(ranks: RankPool, fabric: Any) -> None:
    """Two in the self-test and one before: the fourth of one rank is the fifth of the other."""
    found = ranks.run(numbers_differ, ranks=2, env=fabric.environment())
    texts = " ".join(text for _, text in found)
    assert "are the ranks at different calls?" in texts, found
    assert any(f"message 0x{0x80000000 | number:x}" in texts for number in (4, 5)), found


def loses_a_message(group: Any) -> tuple[str, str, bool]:
    with host.installed():
        comm = host.communicator(group)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        if comm.rank == 0:
            library = emulator.bound(Path(host.told().emulator))
            why = emulator.ctypes.create_string_buffer(256)
            assert library.emu_rule(b"drop verb=write_imm nic=mlx5_0 count=1", why, 256) >= 0
        host.session_of(comm).barrier()
        with pytest.raises(PeerStalledError) as stalled:
            comm.scatter_heads(x, out=out)
        comm.close()
        return type(stalled.value).__name__, str(stalled.value), host.emulator is not None


def test_a_message_that_never_comes_ends_at_the_deadline(ranks: RankPool, fabric: Any) -> None:
    """Whoever waits for it names its sender; the sender is told."""
    found = ranks.run(loses_a_message, ranks=2, env=fabric.environment(COMM_TIMEOUT_S="1"))
    assert all("rank 0" in text or "rank 1" in text for _, text, _ in found)


def port_goes_down(group: Any, culprit: int) -> tuple[str, float]:
    with host.installed():
        comm = host.communicator(group)
        session = host.session_of(comm)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        session.barrier()
        begin = time.monotonic()
        if comm.rank == culprit:
            library = emulator.bound(Path(host.told().emulator))
            assert library.emu_set_port(f"mlx5_{culprit}".encode(), emulator.DOWN, 0) == 0
            while not session._engine.problem and time.monotonic() < begin + AT_ONCE_S:
                time.sleep(0.002)
        texts = []
        with pytest.raises(TransportError) as broken:
            # The others are in the call, or come to it.
            comm.scatter_heads(x, out=out)
        texts.append(str(broken.value))
        seconds = time.monotonic() - begin
        comm.close()
        return texts[0], seconds


def test_a_port_that_goes_down_ends_calls_at_once(ranks: RankPool, fabric: Any) -> None:
    """The event is noticed before anything is sent; nobody waits for a deadline."""
    found = ranks.run(port_goes_down, 1, ranks=2, env=fabric.environment())
    assert "its NIC failed" in found[1][0] and "port" in found[1][0]
    assert "rank 1" in found[0][0] and all(seconds < AT_ONCE_S for _, seconds in found)


# Outputs


def output_fails(group: Any, culprit: int) -> tuple[str, int]:
    with host.installed(), host.communicator(group) as comm:
        session = host.session_of(comm)
        exchanged(comm, 1)
        if comm.rank == 0:
            library = emulator.bound(Path(host.told().emulator))
            why = emulator.ctypes.create_string_buffer(256)
            assert library.emu_rule(f"fail verb=reg_mr nic=mlx5_{culprit} value=12 count=1".encode(), why, 256) >= 0
        session.barrier()
        with pytest.raises(JointError) as refused:
            example(comm)
        kept = len(session._outputs)
        exchanged(comm, 2)
        return str(refused.value), kept


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_output_that_can_not_be_registered_is_rolled_back(ranks: RankPool, fabric: Any, culprit: int) -> None:
    """J2, J3: decided by a real registration, on all ranks; with the limit of locked memory in the text."""
    found = ranks.run(output_fails, culprit, ranks=2, env=fabric.environment())
    assert found[0] == found[1] and found[0][1] == 1
    assert f"rank {culprit}" in found[0][0] and "register output" in found[0][0]
    assert "ulimit -l" in found[0][0] and "needs 131072" in found[0][0]


# Closing


def closes(group: Any, refused: bool) -> tuple[str, bool]:
    with host.installed():
        comm = host.communicator(group)
        exchanged(comm)
        operand, out, _ = example(comm)
        text = ""
        if refused:
            with pytest.raises(JointError) as error:
                comm.close()
            text = str(error.value)
            session = host.session_of(comm)
            x = torch.zeros(1, 1, 2, 1, dtype=torch.uint8)
            for call in (
                lambda: comm.scatter_heads(operand, out=out),
                lambda: comm.input_buffer(out, (1,)),
                lambda: comm.allocate_output(x, "exchange_chunks"),
                lambda: session.all_gather_small(x, x),
                lambda: session.window(1),
                session.launch_context,
                session.barrier,
                comm.check,
            ):
                with pytest.raises(ClosedError, match=f"rank {comm.rank}: .*call close on every rank again"):
                    call()
        comm.close()
        comm.close()
        with pytest.raises(CommError):
            comm.scatter_heads(torch.zeros(1, 1, 2, 1, dtype=torch.uint8))
        return text, True


@pytest.mark.parametrize("verb", ["dereg_mr", "destroy_mkey", "destroy_qp", "destroy_cq", "dealloc_pd", "close"])
@pytest.mark.parametrize("count", [1, 3])
def test_what_can_not_be_released_is_tried_again(ranks: RankPool, fabric: Any, verb: str, count: int) -> None:
    """Three attempts of the group; after that close raises on all ranks, and the next one does the rest."""
    fabric.world.rule(f"fail verb={verb} nic=mlx5_1 value=16 count={count}")
    found = ranks.run(closes, count == 3, ranks=2, env=fabric.environment())
    assert found[0] == found[1]
    assert ("rank 1" in found[0][0]) == (count == 3)


def leaks(group: Any) -> dict[str, Any]:
    """A NIC that never retires a work request: nothing may be released."""
    from comm_pcie.rdma import session as module

    module.QUIESCE_S = 0.2
    with host.installed():
        comm = host.communicator(group)
        session = host.session_of(comm)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        if comm.rank == 0:
            library = emulator.bound(Path(host.told().emulator))
            why = emulator.ctypes.create_string_buffer(256)
            assert library.emu_rule(b"lose verb=write_imm nic=mlx5_1 count=1", why, 256) >= 0
        session.barrier()
        with pytest.raises(TransportError) as broken:
            comm.scatter_heads(x, out=out)
        texts = []
        for _ in range(2):
            with pytest.raises(JointError) as refused:
                comm.close()
            texts.append(str(refused.value))
        # The memory is there, and so are the registrations.
        out.view(torch.uint8).fill_(1)
        return {
            "call": str(broken.value),
            "close": texts,
            "safe": session.teardown_safe,
            "registered": session.counters.registrations,
            "held": session in module._leaked,
        }


def test_memory_that_a_nic_holds_on_to_is_leaked_on_purpose(
    ranks: RankPool, rdma_libraries: dict[str, str], tmp_path: Path
) -> None:
    """No rank releases anything unless every NIC is done; close says so, each time; the process must exit."""
    fabric = host.Fabric(rdma_libraries, tmp_path)
    fabric.world.expect_leaks = True
    found = ranks.run(leaks, ranks=2, env=fabric.environment(COMM_TIMEOUT_S="1"))
    assert [outcome["safe"] for outcome in found] == [True, False]
    assert all(outcome["held"] and outcome["registered"] > 0 for outcome in found)
    assert found[0]["close"] == found[1]["close"] and "must exit" in found[0]["close"][0]
    assert "rank 1" in found[0]["close"][0] and "nothing was released on any rank" in found[0]["close"][0]
    assert "should end" in found[1]["call"]
    alive = fabric.world.alive()
    assert alive["regions"] > 0 and alive["queue_pairs"] > 0
    # As a caller must: these processes go, and with them what they hold.
    ranks.kill()
    fabric.world.reap()
    fabric.world.close()


def dies(group: Any, culprit: int) -> tuple[str, int, str]:
    with host.installed():
        comm = host.communicator(group)
        session = host.session_of(comm)
        x, out, _ = example(comm)
        exchanged(comm, 1)
        session.barrier()
        if comm.rank == culprit:
            session._port.flush = lambda: os._exit(7)
        with pytest.raises(PeerStalledError) as stalled:
            comm.scatter_heads(x, out=out)
        with pytest.raises(GroupTimeoutError) as missing:
            comm.close(1)
        assert session.teardown_safe and comm._execution.closed
        return str(stalled.value), stalled.value.waited_for, str(missing.value)


def test_a_process_that_dies_is_named_and_what_it_may_write_is_kept(
    ranks: RankPool, rdma_libraries: dict[str, str], tmp_path: Path
) -> None:
    """After its bytes had arrived: the others wait for it at the closing barrier, then close by themselves."""
    fabric = host.Fabric(rdma_libraries, tmp_path)
    env = fabric.environment(COMM_TIMEOUT_S="1")
    outcomes = ranks.run_outcomes(dies, 1, ranks=4, env=env)
    assert [outcome.kind for outcome in outcomes] == ["value", "died", "value", "value"], outcomes
    for outcome in (outcomes[0], outcomes[2], outcomes[3]):
        text, waited_for, closing = outcome.value
        assert waited_for == 1 and "rank 1" in text and "no word from rank 1" in closing and "are kept" in closing
    # The queue pairs and registrations of those that are left are gone; the kernel takes those of the dead one.
    assert fabric.world.reap() == 1
    fabric.world.close()
