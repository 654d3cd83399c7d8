"""Data as its own flag (lamport.cuh, allreduce.cuh) as a model, in every interleaving, on memory that keeps no order.

All accesses of this protocol are atomic and none is ordered, so ThreadSanitizer has nothing to say about it. What it
stands on are two halves, words that are emptied once they have been read, and the ends of kernels. Each is taken away
here, and the search shows what happens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import comm_core
from comm_core.testing.interleavings import (
    Collect,
    Complete,
    Exploration,
    Load,
    Program,
    Step,
    Store,
    Symmetry,
    explore,
)

HEADER = Path(comm_core.__file__).parent / "include" / "comm_core" / "lamport.cuh"
CALLS = 4
"""Calls are numbered modulo this: two rounds of two halves, so that a leftover of the last is seen."""
EMPTY = -1
OWNER = 0
"""Who adds up in two shots."""


@dataclass(frozen=True)
class Protocol:
    """The protocol of allreduce.cuh, and the ways to get it wrong.

    Attributes:
        ranks: how many.
        words: how many words every rank sends to every other, call after call (and again from the first).
        shots: of each call in turn: 1, or 2 with everything owned by one rank.
        halves: which half a call fills.
        empties: when a call empties what it has been sent: ``"after"`` it has read it, ``"before"``, or ``"never"``.
        kernel_ends: whether a call's stores into its own rank's memory have arrived when the next call starts.
        awaited: how many of the words of a vector are waited for; the rest is read as it is.
    """

    ranks: int = 2
    words: Sequence[int] = (1,)
    shots: Sequence[int] = (1,)
    halves: Sequence[int] = (0, 1)
    empties: str = "after"
    kernel_ends: bool = True
    awaited: int = 99

    def word(self, home: int, half: int, sender: int | str, word: int) -> str:
        return f"rank{home}.half{half}.from{sender}.{word}"

    def explore(self, *, symmetric: bool = False) -> Exploration:
        """Explore any number of calls."""
        # As many calls as it takes until numbers, sizes, halves and algorithms all are back where they were.
        calls = next(
            n
            for n in range(CALLS, 1000, CALLS)
            if not any(n % len(cycle) for cycle in (self.words, self.halves, self.shots))
        )
        memory = {
            self.word(home, half, sender, word): EMPTY
            for home in range(self.ranks)
            for half in sorted(set(self.halves))
            for sender in [*range(self.ranks), *(["sum"] if 2 in self.shots else [])]
            if sender != home
            for word in range(max(self.words))
        }
        programs = [
            Program(
                f"rank {rank}", [step for call in range(calls) for step in self.call(rank, call, memory)], repeat=True
            )
            for rank in range(self.ranks)
        ]
        return explore(programs, memory, symmetries=self.symmetries(programs, memory, calls) if symmetric else [])

    def call(self, rank: int, call: int, memory: dict[str, int]) -> list[Step]:
        half = self.halves[call % len(self.halves)]
        words = range(self.words[call % len(self.words)])
        value = call % CALLS
        own = [word for word in memory if word.startswith(f"rank{rank}.")]
        end: list[Step] = [Complete(own)] if self.kernel_ends else []
        peers = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        if self.shots[call % len(self.shots)] == 1:
            send: list[Step] = [Store(self.word(peer, half, rank, w), value) for peer in peers for w in words]
            return [*send, *self.take(rank, half, peers, words, value), *end]
        if rank != OWNER:
            first: list[Step] = [Store(self.word(OWNER, half, rank, w), value) for w in words]
        else:
            first = self.take(rank, half, peers, words, value)
            first += [Store(self.word(home, half, "sum", w), value) for home in range(self.ranks) for w in words]
        return [*first, *self.take(rank, half, ["sum"], words, value), *end]

    def take(
        self, rank: int, half: int, senders: Sequence[int | str], words: Sequence[int], value: int
    ) -> list[Step]:
        """Read what was sent, and empty it."""
        places = [self.word(rank, half, sender, w) for sender in senders for w in words]
        awaited = [self.word(rank, half, sender, w) for sender in senders for w in words[: self.awaited]]
        rest: list[Step] = [Load(place, value) for place in places if place not in awaited]
        empty: list[Step] = [Store(place, EMPTY) for place in places]
        taken: list[Step] = [Collect(awaited, value, EMPTY), *rest]
        return {"after": [*taken, *empty], "before": [*empty, *taken], "never": taken}[self.empties]

    def symmetries(self, programs: Sequence[Program], memory: dict[str, int], calls: int) -> list[Symmetry]:
        """Any call may be called the first; and any rank, where none owns anything."""
        assert len(self.words) == 1
        assert len(self.shots) == 1
        count = len(self.halves)
        later = {word: re.sub(r"(?<=half)\d", lambda old: str((int(old[0]) + 1) % count), word) for word in memory}
        found = [
            Symmetry(
                range(self.ranks),
                later,
                {value: (value + 1) % CALLS for value in range(CALLS)},
                len(programs[0].steps) // calls,
            )
        ]
        if self.shots == (1,):
            turned = {
                word: re.sub(r"(?<=rank|from)\d", lambda rank: str((int(rank[0]) + 1) % self.ranks), word)
                for word in memory
            }
            found.append(Symmetry([(rank + 1) % self.ranks for rank in range(self.ranks)], turned, {}))
        return found


RIGHT = Protocol()


@pytest.mark.parametrize(
    ("protocol", "least"),
    [(RIGHT, 10), (replace(RIGHT, words=(2,)), 100), (replace(RIGHT, ranks=3), 1_000)],
    ids=["2 ranks", "2 words", "3 ranks"],
)
def test_one_shot_is_right_for_any_number_of_calls(protocol: Protocol, least: int) -> None:
    """Every rank reads exactly what was sent to it in that call, and none waits for ever, in every interleaving."""
    found = protocol.explore(symmetric=True)
    print(f"{found.states} states, {found.transitions} transitions")
    assert found.failure is None, str(found.failure)
    assert found.states > least


@pytest.mark.parametrize(
    ("protocol", "least"),
    [
        (replace(RIGHT, shots=(2,)), 30),
        (replace(RIGHT, shots=(2,), ranks=3), 300),
        (replace(RIGHT, shots=(1, 2, 2)), 300),
        (replace(RIGHT, shots=(1, 2), ranks=3), 3_000),
    ],
    ids=["2 ranks", "3 ranks", "in turn with one", "in turn with one, 3 ranks"],
)
def test_two_shots_are_right_for_any_number_of_calls(protocol: Protocol, least: int) -> None:
    """Also where a rank owns nothing, and never hears from some others directly; and with algorithms that change."""
    found = protocol.explore()
    print(f"{found.states} states, {found.transitions} transitions")
    assert found.failure is None, str(found.failure)
    assert found.states > least


def test_calls_may_differ_in_size() -> None:
    """A small call after a large one leaves nothing behind of the large one, and the other way round."""
    for protocol in (replace(RIGHT, words=(2, 1, 1, 2)), replace(RIGHT, words=(2, 1, 1), shots=(1, 2))):
        found = protocol.explore()
        assert found.failure is None, str(found.failure)
        assert found.states > 300


WRONG = {
    "one half": (replace(RIGHT, halves=(0,)), "expected|waits for ever"),
    "one half in two shots": (replace(RIGHT, halves=(0,), shots=(2,), ranks=3), "expected|waits for ever"),
    "empties before it has read": (replace(RIGHT, empties="before"), "waits for ever"),
    "empties nothing": (replace(RIGHT, empties="never"), "expected"),
    "starts before the previous call has ended": (replace(RIGHT, kernel_ends=False), "waits for ever"),
    "the same in two shots": (replace(RIGHT, kernel_ends=False, shots=(2,)), "waits for ever"),
    "waits for one word of two": (replace(RIGHT, words=(2,), awaited=1), "expected"),
    "the same half twice where a number wraps": (replace(RIGHT, halves=(0, 1, 0)), "expected|waits for ever"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_protocol_is_found(name: str) -> None:
    """Each planted bug ends in a wrong value or in a wait without end, and the search shows how."""
    protocol, reason = WRONG[name]
    found = protocol.explore()
    assert found.failure is not None
    print(found.failure)
    assert re.search(reason, found.failure.reason)


def test_the_model_is_of_this_header() -> None:
    """Another number of halves in the code wants another model."""
    assert f"kLamportHalves = {len(RIGHT.halves)};" in HEADER.read_text()
