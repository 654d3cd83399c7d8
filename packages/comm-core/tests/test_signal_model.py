"""The exchange and the barrier of barrier.cuh as models, in every interleaving, on memory that keeps no order.

ThreadSanitizer (test_signal_protocol.py) watches the code itself, but only as it happens to run on a processor that
reorders little. Here nothing is left to luck, and each of the orders that the code asks for is shown to be needed.
"""

from __future__ import annotations

import re

import pytest

from comm_core.testing.interleavings import Exploration, Load, Program, Step, Store, Symmetry, Wait, explore

EPOCHS = 4
"""Epochs count modulo this, so every run wraps around: the smallest number that tells one behind from one ahead."""
NOTHING = 9
PLACES = (20, 20, 21, 21)
"""Where an epoch's data goes: where it went last time, or elsewhere. Strict alternation would hide a missing wait."""

EXCHANGE_FLAWS = {
    "announcement not released": r"reads rank\d\.place",
    "announcement before its place": r"reads rank\d\.place",
    "announcement not acquired": r"sees rank\d\.ready",
    "announcement before the data was read": r"reads rank\d\.window",
    "no opening wait": r"reads rank\d\.window",
    "done not released": r"reads rank\d\.window",
    "done before the data": r"reads rank\d\.window",
    "done not acquired": r"sees rank\d\.done",
    "no closing wait": r"reads rank\d\.window",
}
"""What can be taken away from the exchange, and what then goes wrong (where a load was early, the wait shows it)."""
BARRIER_FLAWS = {
    "arrival not released": r"reads rank\d\.cell",
    "arrival not acquired": r"sees rank\d\.arrived",
    "one rank not waited for": r"reads rank\d\.cell",
}


def reached(epoch: int) -> set[int]:
    """Flags that count as `epoch` reached: that, and one ahead. (A rank can be no further ahead.)"""
    return {epoch % EPOCHS, (epoch + 1) % EPOCHS}


def symmetries(ranks: int, memory: dict[str, int], steps: int) -> list[Symmetry]:
    """Any rank may be called the first, and two epochs later all is the same with the places exchanged."""
    turned = {
        word: re.sub(r"(?<=rank|from)\d", lambda rank: str((int(rank[0]) + 1) % ranks), word) for word in memory
    }
    later = {word: re.sub(r"(?<=window)2\d", lambda place: str(41 - int(place[0])), word) for word in memory}
    values = {0: 2, 1: 3, 2: 0, 3: 1, 20: 21, 21: 20}
    return [
        Symmetry([(rank + 1) % ranks for rank in range(ranks)], turned, {}),
        Symmetry(range(ranks), later, values, steps // 2),
    ]


def exchange(ranks: int, *flaws: str) -> Exploration:
    """Explore the exchange with any number of epochs, less what `flaws` take away."""
    assert EXCHANGE_FLAWS.keys() >= set(flaws)
    ahead = "announcement before the data was read" in flaws
    memory: dict[str, int] = {}
    for rank in range(ranks):
        for peer in range(ranks):
            if peer != rank:
                memory |= {f"rank{rank}.ready.from{peer}": int(ahead), f"rank{rank}.place.from{peer}": PLACES[ahead]}
                memory |= {f"rank{rank}.done.from{peer}": 0}
                memory |= {f"rank{rank}.window{place}.from{peer}": NOTHING for place in sorted(set(PLACES))}

    def steps(rank: int, epoch: int) -> list[list[Step]]:
        place = PLACES[epoch]
        peers = [(rank + i) % ranks for i in range(1, ranks)]
        announce: list[Step] = []
        send: list[Step] = []
        for peer in peers:
            pair: list[Step] = [
                Store(f"rank{peer}.place.from{rank}", place),
                Store(f"rank{peer}.ready.from{rank}", epoch, release="announcement not released" not in flaws),
            ]
            announce += reversed(pair) if "announcement before its place" in flaws else pair
        for peer in peers:
            if "no opening wait" not in flaws:
                acquire = "announcement not acquired" not in flaws
                send += [
                    Wait(f"rank{rank}.ready.from{peer}", reached(epoch), acquire),
                    Load(f"rank{rank}.place.from{peer}", place),
                ]
            pair = [
                Store(f"rank{peer}.window{place}.from{rank}", epoch),
                Store(f"rank{peer}.done.from{rank}", epoch, release="done not released" not in flaws),
            ]
            send += reversed(pair) if "done before the data" in flaws else pair
        acquire = "done not acquired" not in flaws
        close: list[Step] = [Wait(f"rank{rank}.done.from{peer}", reached(epoch), acquire) for peer in peers]
        read: list[Step] = [Load(f"rank{rank}.window{place}.from{peer}", epoch) for peer in peers]
        return [announce, send, [] if "no closing wait" in flaws else close, read]

    programs: list[Program] = []
    for rank in range(ranks):
        order: list[Step] = []
        parts = [steps(rank, epoch % EPOCHS) for epoch in range(1, EPOCHS + 1)]
        for now, following in zip(parts, [*parts[1:], parts[0]], strict=True):
            if ahead:
                order += [*now[1], *now[2], *following[0], *now[3]]
            else:
                order += [step for part in now for step in part]
        programs.append(Program(f"rank {rank}", order, repeat=True))
    return explore(programs, memory, symmetries=symmetries(ranks, memory, len(programs[0].steps)))


def barrier(ranks: int, *flaws: str) -> Exploration:
    """Explore the barrier: every rank writes a cell before it and reads the others' after it."""
    assert BARRIER_FLAWS.keys() >= set(flaws)
    memory: dict[str, int] = {}
    for rank in range(ranks):
        memory |= {f"rank{rank}.cell{parity}": NOTHING for parity in (0, 1)}
        memory |= {f"rank{rank}.arrived.from{peer}": 0 for peer in range(ranks) if peer != rank}
    programs: list[Program] = []
    for rank in range(ranks):
        order: list[Step] = []
        peers = [(rank + i) % ranks for i in range(1, ranks)]
        for number in range(1, EPOCHS + 1):
            epoch = number % EPOCHS
            order.append(Store(f"rank{rank}.cell{epoch % 2}", epoch))
            release = "arrival not released" not in flaws
            order += [Store(f"rank{peer}.arrived.from{rank}", epoch, release) for peer in peers]
            awaited = peers[:-1] if "one rank not waited for" in flaws else peers
            acquire = "arrival not acquired" not in flaws
            order += [Wait(f"rank{rank}.arrived.from{peer}", reached(epoch), acquire) for peer in awaited]
            order += [Load(f"rank{peer}.cell{epoch % 2}", epoch) for peer in peers]
        programs.append(Program(f"rank {rank}", order, repeat=True))
    return explore(programs, memory, symmetries=symmetries(ranks, memory, len(programs[0].steps)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_exchange_is_right_for_any_number_of_epochs(ranks: int) -> None:
    """Every byte read is that epoch's, and no rank waits for ever, in every interleaving."""
    found = exchange(ranks)
    print(f"{found.states} states, {found.transitions} transitions")
    assert found.failure is None, str(found.failure)
    # A search that ends early finds nothing either.
    assert found.states > {2: 200, 3: 50_000}[ranks]


@pytest.mark.parametrize("flaw", EXCHANGE_FLAWS)
def test_everything_in_the_exchange_is_needed(flaw: str) -> None:
    """Each order and each wait that is taken away breaks it, and the search shows how."""
    found = exchange(2, flaw)
    assert found.failure is not None
    print(found.failure)
    assert re.search(EXCHANGE_FLAWS[flaw], found.failure.trace[-1])
    assert found.failure.reason.startswith("expected")


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_barrier_is_right_for_any_number_of_rounds(ranks: int) -> None:
    """What a rank wrote before is there for all after, and no rank waits for ever."""
    found = barrier(ranks)
    assert found.failure is None, str(found.failure)
    assert found.states > {2: 50, 3: 1_000}[ranks]


@pytest.mark.parametrize("flaw", BARRIER_FLAWS)
def test_everything_in_the_barrier_is_needed(flaw: str) -> None:
    """The same for the barrier."""
    # Two ranks have nobody else to wait for; and with three, the loads that may be early take minutes to try.
    found = barrier(3 if flaw == "one rank not waited for" else 2, flaw)
    assert found.failure is not None
    print(found.failure)
    assert re.search(BARRIER_FLAWS[flaw], found.failure.trace[-1])
    assert found.failure.reason.startswith("expected")
