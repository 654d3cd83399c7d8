"""The engine of the RDMA routes when things go wrong: what it says, whom it names, and that nothing is left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rdma_emulator as emulator
from rdma_ranks import LONG, Ranks, Shape

from comm_core.errors import ArgumentValueError, ClosedError, TransportError
from comm_pcie.rdma.engine import Kind, RdmaEngine, Settings, VerbsApi

SHORT = 300_000_000
"""For what must run out, and long enough for whoever must not."""
SHAPE = Shape("gather_heads", 3, 6, 32)
ENOMEM = 12
QP_FATAL, DEVICE_FATAL, PORT_ERR, SM_CHANGE = 1, 8, 10, 13


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)


# -- During an exchange -------------------------------------------------------------------------------------------

LATE = Kind.DEADLINE
GONE = (Kind.DEADLINE, Kind.COMPLETION)
"""How a peer ends whose writes come before or after the other's queue pair has stopped."""
# What is injected on the way from rank 0 to rank 1; how the ranks end; words of rank 0's text.
FAULTS = [
    ("drop verb=write_imm", (LATE, LATE, Kind.OK), "no acknowledgement of writes by rank 1"),
    ("hold verb=write_imm", (LATE, Kind.OK, Kind.OK), "no acknowledgement of writes by rank 1"),
    # What comes after it is not posted any more.
    ("fail verb=write_imm value=12", (Kind.POST, LATE, LATE), "write to rank 1 can't be posted"),
    ("not_ready verb=write_imm", (Kind.COMPLETION, GONE, Kind.OK), "RNR retry counter exceeded"),
    ("status verb=write_imm value=12", (Kind.COMPLETION, GONE, Kind.OK), "does not answer"),
    ("status verb=write_imm value=10", (Kind.COMPLETION, GONE, Kind.OK), "remote access error"),
    ("status verb=write_imm value=4", (Kind.COMPLETION, GONE, Kind.OK), "local protection error"),
    ("status verb=write_imm value=1", (Kind.COMPLETION, GONE, Kind.OK), "local length error"),
    ("delay verb=write_imm value=20", (Kind.OK, Kind.OK, Kind.OK), ""),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "kinds", "text"), FAULTS)
def test_a_fault_between_two_ranks(world: Any, api: VerbsApi, rule: str, kinds: tuple[Any, ...], text: str) -> None:
    """Both ends say so and name the other; the third rank is done; whoever failed takes no more work and closes."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    world.rule(f"{rule} nic=mlx5_0 peer=mlx5_1")
    operands = ranks.fill(SHAPE)
    outcomes = ranks.exchange(SHAPE, LONG if kinds[0] is Kind.OK else SHORT)
    for outcome, kind, peer in zip(outcomes, kinds, (1, 0, 0), strict=True):
        assert outcome.kind in (kind if isinstance(kind, tuple) else (kind,)), outcomes
        assert (outcome.peer, bool(outcome.reason)) == ((-1, False) if outcome.ok else (peer, True)), outcomes
        if outcome.kind is LATE and peer == 0:
            assert "no message from rank 0" in outcome.reason
    assert text in outcomes[0].reason
    ranks.check(SHAPE, operands, [rank for rank in range(3) if outcomes[rank].ok])
    for rank in range(3):
        engine, pair = ranks.engines[rank], ranks.pairs[rank]
        assert engine.problem == outcomes[rank].reason
        if outcomes[rank].ok:
            continue
        before = engine.counters
        for again in (pair.exchange(SHAPE.geometry(rank), 99, LONG), pair.rebind(SHAPE.geometry(rank), LONG)):
            assert (again.kind, again.reason, again.peer) == (
                Kind.BROKEN,
                outcomes[rank].reason,
                outcomes[rank].peer,
            )
        assert engine.counters == before
    ranks.close()


@pytest.mark.parametrize(
    ("rule", "kind", "text"),
    [
        ("fail verb=umr nic=mlx5_0 value=12", Kind.POST, "can't be posted: Cannot allocate memory"),
        ("drop verb=umr nic=mlx5_0", Kind.DEADLINE, "bands were not described"),
        ("hold verb=umr nic=mlx5_0", Kind.DEADLINE, "bands were not described"),
        ("status verb=umr nic=mlx5_0 value=4", Kind.COMPLETION, "description of a band for rank 1"),
        ("fail verb=poll nic=mlx5_0 value=5", Kind.COMPLETION, "ibv_poll_cq failed (-5)"),
        ("delay verb=umr nic=mlx5_0 value=10", Kind.OK, ""),
    ],
)
def test_a_fault_while_bands_are_described(world: Any, api: VerbsApi, rule: str, kind: Kind, text: str) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    world.rule(rule)
    outcome = ranks.pairs[0].rebind(SHAPE.geometry(0), LONG if kind is Kind.OK else SHORT)
    assert outcome.kind is kind and text in outcome.reason
    if kind is not Kind.OK:
        again = ranks.pairs[0].exchange(Shape("exchange_chunks", 3, 1, 8).geometry(0), 1, LONG)
        assert (again.kind, again.reason) == (Kind.BROKEN, outcome.reason)
    ranks.close()


def test_a_key_whose_description_failed_is_not_taken_for_bound(world: Any, api: VerbsApi) -> None:
    """Bound before, and then unknown: an exchange by it would write anywhere."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    world.rule("drop verb=umr nic=mlx5_0")
    other = Shape("gather_heads", 3, 5, 16)
    assert ranks.pairs[0].rebind(other.geometry(0), SHORT).kind is Kind.DEADLINE
    for shape in (other, SHAPE):
        with pytest.raises(ArgumentValueError, match="rebind first"):
            ranks.pairs[0].exchange(shape.geometry(0), 2, SHORT)
    ranks.close()


@pytest.mark.parametrize("rule", ["fail verb=post_recv nic=mlx5_0 value=12", "fail verb=poll nic=mlx5_0 value=5"])
def test_a_fault_of_the_receiving_side(world: Any, api: VerbsApi, rule: str) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    assert all(outcome.ok for outcome in ranks.rebind(SHAPE))
    world.rule(rule)
    outcomes = ranks.exchange(SHAPE)
    assert outcomes[0].kind in (Kind.POST, Kind.COMPLETION)
    assert [outcome.kind for outcome in outcomes[1:]] == [Kind.OK, Kind.OK]
    ranks.close()


def test_what_has_arrived_may_be_seen_only_after_a_flush(world: Any, api: VerbsApi) -> None:
    """Every completion is a success, and the last bytes are not there: the caller's flush is no formality."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    assert all(outcome.ok for outcome in ranks.rebind(SHAPE))
    world.rule("late verb=write_imm nic=mlx5_0 value=40 count=2")
    operands = ranks.fill(SHAPE)
    assert all(outcome.ok for outcome in ranks.exchange(SHAPE))
    ranks.check(SHAPE, operands, [0])
    for rank in (1, 2):
        with pytest.raises(AssertionError, match="bytes are wrong"):
            ranks.check(SHAPE, operands, [rank])
    # The last 40 bytes are two pieces of rows of 32, twice.
    assert world.withheld() == 4 and world.flush() == 4 and world.withheld() == 0
    ranks.check(SHAPE, operands)
    ranks.close()


@pytest.mark.parametrize("position", [0, 1, 4])
def test_a_piece_of_a_split_payload_fails(library: Path, tmp_path: Path, api: VerbsApi, position: int) -> None:
    with emulator.World(library, tmp_path / "fabric", emulator.nics(2, max_message=100)) as world:
        shape = Shape("scatter_heads", 2, 25, 20)
        ranks = Ranks(api, 2, shape.nbytes, settings=Settings(send_depth=2))
        assert all(outcome.ok for outcome in ranks.rebind(shape))
        verb = "write_imm" if position == 4 else "write"
        world.rule(f"status verb={verb} nic=mlx5_0 value=12 after={position % 4}")
        outcomes = ranks.exchange(shape, SHORT)
        assert outcomes[0].kind is Kind.COMPLETION and outcomes[1].kind in GONE
        assert outcomes[0].sends == position and outcomes[1].peer == 0
        ranks.close()


@pytest.mark.parametrize("seed", range(24))
def test_whatever_goes_wrong_every_call_ends(library: Path, tmp_path: Path, api: VerbsApi, seed: int) -> None:
    """Faults at random on random ranks, in a split exchange: each rank ends well with the right bytes, or says why.

    Nothing hangs, the ledger is right to the last request, and everything is given back.
    """
    draw = random.Random(seed)
    with emulator.World(library, tmp_path / "fabric", emulator.nics(3, max_message=70)) as world:
        shape = Shape(draw.choice(("scatter_heads", "gather_heads", "exchange_chunks")), 3, 9, 24)
        ranks = Ranks(api, 3, shape.nbytes, settings=Settings(send_depth=draw.choice((1, 2, 16)), receive_depth=2))
        for _ in range(draw.randint(1, 3)):
            verb = draw.choice(("write", "write_imm"))
            action = draw.choice(("drop", "hold", "delay", "status", "fail", "late"))
            value = {"delay": 5, "status": draw.choice((1, 4, 10, 12)), "fail": ENOMEM, "late": 24}.get(action, 0)
            nic, after = draw.randrange(3), draw.randrange(4)
            world.rule(f"{action} verb={verb} nic=mlx5_{nic} value={value} after={after}")
        for call in range(3):
            if not all(outcome.ok for outcome in ranks.rebind(shape)):
                break
            operands = ranks.fill(shape, call)
            outcomes = ranks.exchange(shape, SHORT // 4)
            world.flush()
            done = [rank for rank, outcome in enumerate(outcomes) if outcome.ok]
            ranks.check(shape, operands, done)
            for rank, outcome in enumerate(outcomes):
                if outcome.ok:
                    assert all(posted == (0, 2) for posted in ranks.engines[rank].ledger.outstanding.values())
                else:
                    assert outcome.reason and outcome.peer in {0, 1, 2} - {rank}, outcome
        ranks.close()
        world.clear_rules()  # a fault that comes after the end of it all


def test_ranks_at_different_calls_say_so(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    shape = Shape("exchange_chunks", 3, 2, 8)
    geometry = shape.geometry
    outcomes = ranks.each(lambda rank: ranks.pairs[rank].exchange(geometry(rank), 7 if rank == 0 else 8, SHORT))
    assert outcomes[0].kind is Kind.PROTOCOL and "different calls" in outcomes[0].reason
    assert Kind.OK not in [outcome.kind for outcome in outcomes[1:]]
    ranks.close()


def test_ranks_with_different_shapes_say_so(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    shapes = [Shape("exchange_chunks", 3, 2 + (rank == 0), 8) for rank in range(3)]
    outcomes = ranks.each(lambda rank: ranks.pairs[rank].exchange(shapes[rank].geometry(rank), 1, SHORT))
    assert {outcome.kind for outcome in outcomes} == {Kind.PROTOCOL}
    assert "has 16 bytes, expected 24" in outcomes[0].reason and outcomes[1].peer == 0
    ranks.close()


def test_a_second_message_of_one_rank_is_not_taken_for_another_s(world: Any, api: VerbsApi) -> None:
    """Rank 1 makes the same exchange twice while rank 0 waits for rank 2, whose message is lost."""
    world.rule("drop verb=write_imm nic=mlx5_2 peer=mlx5_0")
    ranks = Ranks(api, 3, SHAPE.nbytes)
    geometry = Shape("exchange_chunks", 3, 2, 8).geometry

    def call(rank: int) -> list[Any]:
        first = ranks.pairs[rank].exchange(geometry(rank), 5, SHORT if rank == 2 else LONG)
        if rank != 1:
            return [first]
        return [first, ranks.pairs[1].exchange(geometry(1), 5, SHORT)]

    (waiting,), (first, _), _ = ranks.each(call)
    assert first.ok and waiting.kind is Kind.PROTOCOL and waiting.peer == 1, (waiting, first)
    assert "expected one message" in waiting.reason and waiting.receives == 1
    ranks.close()


def test_a_message_before_its_time_is_no_description(world: Any, api: VerbsApi) -> None:
    """Without the opening barrier a peer may write by a key that is being described: that is said, not survived."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    chunks = Shape("exchange_chunks", 3, 2, 8)
    assert ranks.pairs[1].exchange(chunks.geometry(1), 1, SHORT).kind is Kind.DEADLINE
    outcome = ranks.pairs[0].rebind(SHAPE.geometry(0), LONG)
    assert outcome.kind is Kind.PROTOCOL and "barrier before it is missing" in outcome.reason and outcome.peer == 1
    ranks.close()


# -- Events and aborts --------------------------------------------------------------------------------------------


def while_waiting(ranks: Any, action: Callable[[], None], rank: int = 0) -> Any:
    """Return the outcome of `rank`'s exchange, in which no peer takes part, and how long it took after `action`."""
    outcomes: list[Any] = []
    chunks = Shape("exchange_chunks", 3, 2, 8)
    thread = threading.Thread(
        target=lambda: outcomes.append(ranks.pairs[rank].exchange(chunks.geometry(rank), 1, LONG))
    )
    thread.start()
    until(lambda: ranks.engines[rank].counters.polls > 100)
    action()
    thread.join(20)
    assert not thread.is_alive()
    return outcomes[0]


@pytest.mark.parametrize(
    ("action", "peer", "text"),
    [
        (lambda world: world.set_port("mlx5_0", emulator.DOWN), -1, "port error: the port went down"),
        (lambda world: world.set_gid("mlx5_0", 0, "10.0.0.77"), -1, "GID 0 was 10.0.0.1 and is 10.0.0.77"),
        (lambda world: world.set_gid("mlx5_0", 0, None), -1, "GID 0 was 10.0.0.1 and is gone"),
        (lambda world: world.event("mlx5_0", DEVICE_FATAL), -1, "local catastrophic error"),
        (lambda world: world.event("mlx5_0", QP_FATAL), 1, "the queue pair for rank 1"),
    ],
)
def test_an_event_ends_a_waiting_exchange(
    world: Any, api: VerbsApi, action: Callable[[Any], None], peer: int, text: str
) -> None:
    """At once, and not at its deadline."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    outcome = while_waiting(ranks, lambda: action(world))
    # The flushed receives of a stopped queue pair may be seen before the event.
    assert outcome.kind in (Kind.EVENT, Kind.COMPLETION) and outcome.elapsed_ns < 15e9
    if outcome.kind is Kind.EVENT:
        assert text in outcome.reason and outcome.peer == peer
    else:
        assert outcome.peer == 1 and peer == 1
    until(lambda: ranks.engines[0].counters.events == 1)
    assert ranks.engines[1].problem == ""
    ranks.close()


def test_an_event_between_calls_is_seen_without_a_call(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    world.set_port("mlx5_2", emulator.DOWN)
    until(lambda: ranks.engines[2].problem)
    assert "the port went down" in ranks.engines[2].problem and ranks.engines[0].problem == ""
    outcome = ranks.pairs[2].exchange(SHAPE.geometry(2), 2, LONG)
    assert outcome.kind is Kind.BROKEN and "the port went down" in outcome.reason
    ranks.close()


def test_events_that_end_nothing_are_counted(world: Any, api: VerbsApi) -> None:
    """Another interface's GID, a new subnet manager, another port that goes down."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    world.set_gid("mlx5_0", 5, "10.0.9.9")
    world.event("mlx5_0", SM_CHANGE)
    world.set_gid("mlx5_0", 5, None)
    world.event("mlx5_0", PORT_ERR, port=2)
    until(lambda: ranks.engines[0].counters.events == 4)
    ranks.run(SHAPE)
    assert [engine.problem for engine in ranks.engines] == ["", "", ""]
    ranks.close()


def test_a_peer_s_port_that_is_down_is_a_rank_that_does_not_answer(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    assert all(outcome.ok for outcome in ranks.rebind(SHAPE))
    world.set_port("mlx5_2", emulator.DOWN)
    outcome = ranks.pairs[0].exchange(SHAPE.geometry(0), 1, SHORT)
    assert outcome.kind is Kind.COMPLETION and outcome.peer == 2 and "does not answer" in outcome.reason
    ranks.close()


def test_an_abort_ends_a_waiting_exchange(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    outcome = while_waiting(ranks, lambda: ranks.engines[0].abort("rank 2 gave up"))
    assert (outcome.kind, outcome.reason) == (Kind.ABORTED, "rank 2 gave up")
    # The first reason stays.
    ranks.engines[0].abort("something else")
    assert ranks.engines[0].problem == "rank 2 gave up"
    ranks.close()


# -- Stopping and closing -----------------------------------------------------------------------------------------


def test_what_the_nic_does_not_give_back_is_not_freed(world: Any, api: VerbsApi) -> None:
    """A write that is never completed, not even when its queue pair stops: the buffers may still be read."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    world.rule("lose verb=write_imm nic=mlx5_0 peer=mlx5_1")
    outcomes = ranks.exchange(SHAPE, SHORT)
    assert outcomes[0].kind is Kind.DEADLINE
    before = world.alive()
    for _ in range(2):
        quiesced = ranks.engines[0].quiesce(SHORT)
        assert not quiesced.teardown_safe and quiesced.outstanding == {1: (1, 0)}
        assert "1 sends and 0 receives of rank 1" in quiesced.reason and "must exit" in quiesced.reason
        with pytest.raises(TransportError, match="1 requests to rank 1 are outstanding"):
            ranks.pairs[0].close()
        with pytest.raises(TransportError, match="1 sends and 0 receives of rank 1 are outstanding"):
            ranks.engines[0].close()
    assert world.alive() == before
    ranks.close(ranks=[1, 2])
    world.expect_leaks = True


def test_a_queue_pair_that_can_not_be_stopped_is_not_safe_and_may_be_tried_again(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    world.rule("fail verb=modify_qp nic=mlx5_0 value=16")
    quiesced = ranks.engines[0].quiesce(SHORT)
    assert not quiesced.teardown_safe and "rank 1 can't be stopped" in quiesced.reason
    assert quiesced.outstanding == {1: (0, 4)}
    ranks.close()


def test_after_quiesce_there_is_no_more_work(world: Any, api: VerbsApi) -> None:
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    assert ranks.engines[0].quiesce(LONG).teardown_safe
    outcome = ranks.pairs[0].exchange(SHAPE.geometry(0), 2, LONG)
    assert outcome.kind is Kind.BROKEN and "was stopped" in outcome.reason
    ranks.close()


@pytest.mark.parametrize("verb", ["dereg_mr", "destroy_mkey", "destroy_qp", "destroy_cq", "dealloc_pd", "close"])
@pytest.mark.parametrize("after", [0, 1])
def test_closing_goes_on_where_it_failed(world: Any, api: VerbsApi, verb: str, after: int) -> None:
    """Each thing is given back once, whichever fails; the second call does the rest."""
    ranks = Ranks(api, 3, SHAPE.nbytes)
    ranks.run(SHAPE)
    many = verb in ("dereg_mr", "destroy_mkey", "destroy_qp")
    world.rule(f"fail verb={verb} nic=mlx5_0 value=16 after={after if many else 0} count=2")
    engine, pair = ranks.engines[0], ranks.pairs[0]
    assert engine.quiesce(LONG).teardown_safe
    with pytest.raises(TransportError, match="still registered"):
        engine.close()
    steps = (pair, engine) if verb in ("dereg_mr", "destroy_mkey") else (engine,)
    if steps == (engine,):
        pair.close()
    for _ in range(2):
        with pytest.raises(TransportError, match="busy"):
            steps[0].close()
    for step in (pair, engine, pair, engine):
        step.close()
    ranks.close(ranks=[1, 2])
    for call in (engine.endpoint, lambda: engine.problem, lambda: engine.abort("x"), lambda: engine.quiesce(1)):
        with pytest.raises(ClosedError):
            call()
    # Once each, and twice in vain: two regions, four keys, two queue pairs of rank 0; the same of the others.
    counted = {"dereg_mr": 6, "destroy_mkey": 12, "destroy_qp": 6, "destroy_cq": 3, "dealloc_pd": 3, "close": 3}
    done = world.counters()
    assert {name: done[name] for name in counted} == {**counted, verb: counted[verb] + 2}


def test_an_engine_that_is_not_closed_says_so(world: Any, api: VerbsApi) -> None:
    engine = RdmaEngine(api, nic="mlx5_0", gid_index=0, rank=0, world_size=2)
    handle = engine.handle
    with pytest.warns(ResourceWarning, match="mlx5_0 was not closed"):
        engine.__del__()
    assert engine.handle == handle
    engine.close()
