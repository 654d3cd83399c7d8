"""Data as its own flag (lamport.cuh) as a model, in every interleaving, on memory that keeps no order.

All accesses of this protocol are atomic and none is ordered, so ThreadSanitizer has nothing to say about it. What it
stands on are three generations and the ends of kernels. Each is taken away here, and the search shows what happens.
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
CALLS = 6
"""Calls are numbered modulo this: two rounds of three generations, so that a leftover of the last is seen."""
EMPTY = -1


@dataclass(frozen=True)
class Protocol:
    """The protocol of lamport.cuh, and the ways to get it wrong.

    Attributes:
        ranks: how many.
        words: how many words every rank sends to every other, call after call (and again from the first).
        generations: which generation a call fills.
        rearms: whether it re-arms anything.
        rearmed: what a call re-arms: the generation of this many calls ago.
        rearmed_words: whose size it re-arms: that of this many calls ago.
        rearm_first: whether a call re-arms before it stores for the others.
        ordered: whether its stores for the others arrive after the re-arms that were made before.
        kernel_ends: whether a call's stores into its own rank's memory have arrived when the next call starts.
        awaited: how many of the words of a vector are waited for; the rest is read as it is.
    """

    ranks: int = 2
    words: Sequence[int] = (1,)
    generations: Sequence[int] = (0, 1, 2)
    rearms: bool = True
    rearmed: int = 1
    rearmed_words: int = 1
    rearm_first: bool = True
    ordered: bool = False
    kernel_ends: bool = True
    awaited: int = 99

    def word(self, home: int, generation: int, sender: int, word: int) -> str:
        return f"rank{home}.generation{generation}.from{sender}.{word}"

    def explore(self, *, symmetric: bool = False) -> Exploration:
        """Explore any number of calls."""
        # As many calls as it takes until numbers, sizes and generations all are back where they were.
        calls = next(
            n for n in range(CALLS, 1000, CALLS) if n % len(self.words) == 0 and n % len(self.generations) == 0
        )
        memory = {
            self.word(home, generation, sender, word): EMPTY
            for home in range(self.ranks)
            for generation in sorted(set(self.generations))
            for sender in range(self.ranks)
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
        peers = [(rank + i) % self.ranks for i in range(1, self.ranks)]
        generation = self.generations[call % len(self.generations)]
        previous = self.generations[(call - self.rearmed) % len(self.generations)]
        words = range(self.words[call % len(self.words)])
        old_words = range(self.words[(call - self.rearmed_words) % len(self.words)] if self.rearms else 0)
        value = call % CALLS
        rearm: list[Step] = [Store(self.word(rank, previous, peer, w), EMPTY) for peer in peers for w in old_words]
        publish: list[Step] = [
            Store(self.word(peer, generation, rank, w), value, release=self.ordered) for peer in peers for w in words
        ]
        awaited = [self.word(rank, generation, peer, w) for peer in peers for w in words[: self.awaited]]
        collect: list[Step] = [Collect(awaited, value, EMPTY)]
        collect += [
            Load(self.word(rank, generation, peer, w), value) for peer in peers for w in words[self.awaited :]
        ]
        own = [word for word in memory if word.startswith(f"rank{rank}.")]
        end: list[Step] = [Complete(own)] if self.kernel_ends else []
        return [*(rearm + publish if self.rearm_first else publish + rearm), *collect, *end]

    def symmetries(self, programs: Sequence[Program], memory: dict[str, int], calls: int) -> list[Symmetry]:
        """Any rank may be called the first, and any call too."""
        assert len(self.words) == 1
        count = len(self.generations)
        turned = {
            word: re.sub(r"(?<=rank|from)\d", lambda rank: str((int(rank[0]) + 1) % self.ranks), word)
            for word in memory
        }
        later = {
            word: re.sub(r"(?<=generation)\d", lambda old: str((int(old[0]) + 1) % count), word) for word in memory
        }
        return [
            Symmetry([(rank + 1) % self.ranks for rank in range(self.ranks)], turned, {}),
            Symmetry(
                range(self.ranks),
                later,
                {value: (value + 1) % CALLS for value in range(CALLS)},
                len(programs[0].steps) // calls,
            ),
        ]


RIGHT = Protocol()


@pytest.mark.parametrize(
    ("protocol", "least"),
    [
        (RIGHT, 50),
        (replace(RIGHT, rearm_first=False), 50),
        (replace(RIGHT, words=(2,)), 2_000),
        (replace(RIGHT, ranks=3), 50_000),
    ],
    ids=["2 ranks", "re-armed last", "2 words", "3 ranks"],
)
def test_the_protocol_is_right_for_any_number_of_calls(protocol: Protocol, least: int) -> None:
    """Every rank reads exactly what was sent to it in that call, and none waits for ever, in every interleaving."""
    found = protocol.explore(symmetric=True)
    print(f"{found.states} states, {found.transitions} transitions")
    assert found.failure is None, str(found.failure)
    assert found.states > least


def test_calls_may_differ_in_size() -> None:
    """A small call after a large one leaves nothing behind of the large one, and the other way round."""
    found = replace(RIGHT, words=(2, 1, 1, 2)).explore()
    assert found.failure is None, str(found.failure)
    assert found.states > 5_000


def test_what_the_third_generation_is_for() -> None:
    """Two would do if every store for a peer had to wait until the re-arms before it have arrived. None has to."""
    two = replace(RIGHT, generations=(0, 1), ordered=True)
    assert two.explore().failure is None
    assert replace(two, ordered=False).explore().failure is not None
    # Then the order of the two would matter as well; with three generations it does not (see above).
    assert replace(two, rearm_first=False).explore().failure is not None


WRONG = {
    "two generations": (replace(RIGHT, generations=(0, 1)), "waits for ever"),
    "two generations, re-armed last": (replace(RIGHT, generations=(0, 1), rearm_first=False), "waits for ever"),
    "re-arms what this call fills": (replace(RIGHT, rearmed=0), "waits for ever"),
    "re-arms what the next call fills": (replace(RIGHT, rearmed=-1), "waits for ever"),
    "re-arms nothing": (replace(RIGHT, rearms=False), "expected"),
    "re-arms as much as this call fills": (replace(RIGHT, rearmed_words=0, words=(2, 1, 1, 2)), "expected"),
    "starts before the previous call has ended": (replace(RIGHT, kernel_ends=False), "waits for ever"),
    "waits for one word of two": (replace(RIGHT, words=(2,), awaited=1), "expected"),
    "takes the generation from a number that wraps": (
        replace(RIGHT, generations=(0, 1, 2, 0, 1, 2, 0)),
        "waits for ever",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_protocol_is_found(name: str) -> None:
    """Each planted bug ends in a wrong value or in a wait without end, and the search shows how."""
    protocol, reason = WRONG[name]
    found = protocol.explore()
    assert found.failure is not None
    print(found.failure)
    assert reason in found.failure.reason


def test_the_model_is_of_this_header() -> None:
    """Another number of generations in the code wants another model."""
    assert f"kLamportGenerations = {len(RIGHT.generations)};" in HEADER.read_text()
