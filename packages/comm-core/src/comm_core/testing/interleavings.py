"""An exhaustive search through everything that a small protocol between ranks can do, on memory that keeps no order.

A protocol whose accesses are all atomic has no data races, so ThreadSanitizer has nothing to say about it, and its
bugs show once in a billion calls. But with two or three ranks it is small enough to be tried completely. Each rank is
a list of steps; `explore` runs them in every order, delivers every store at every moment at which it may arrive, and
reports the shortest way to a wrong value or to a state that nothing leaves::

    memory = {"flag": 0, "data": 0}
    writer = Program("writer", [Store("data", 1), Store("flag", 1, release=True)])
    reader = Program("reader", [Wait("flag", {1}), Load("data", 1)])
    assert explore([writer, reader], memory).failure is None

What the memory does:

- A word has one home, where all ranks read it. A store is under way for a while, and stores of one rank to different
  words arrive in any order; those to one word arrive in the order in which they were made.
- A store that releases arrives after everything that its rank did before. It does not hold up what comes later.
- A load takes its value at any moment until the next thing that it must come before: a release, a store of its own
  rank to the same word, the end of a kernel. It sees its own rank's stores that are still under way.
- A load that follows a wait comes after it where the wait acquires. Where it does not, the load may have taken its
  value earlier, as far back as the last wait that did.

Programs may repeat for ever. Number the rounds modulo something (and compare as the protocol does): there are then
only finitely many states, and the result holds for any number of rounds. A state that is another one with the ranks
or the rounds renamed is not worth a second look; a `Symmetry` says what may be renamed, and is checked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TypeAlias

__all__ = [
    "Collect",
    "Complete",
    "Exploration",
    "Failure",
    "Load",
    "Program",
    "Step",
    "Store",
    "Symmetry",
    "Wait",
    "explore",
]


@dataclass(frozen=True)
class Store:
    """Write a word, anybody's."""

    word: str
    value: int
    release: bool = False
    """Whether everything that this rank did before arrives first."""


@dataclass(frozen=True)
class Load:
    """Read a word, which must hold `expected`."""

    word: str
    expected: int


@dataclass(frozen=True)
class Wait:
    """Read a word until it holds one of `values`."""

    word: str
    values: Set[int]
    acquire: bool = True
    """Whether the loads that follow really follow."""


@dataclass(frozen=True)
class Collect:
    """Read each of some words until it is not `empty`, in any order; what it is then must be `expected`. Relaxed."""

    words: Sequence[str]
    expected: int
    empty: int


@dataclass(frozen=True)
class Complete:
    """Wait until this rank's own stores to some words have arrived, as they have when a kernel has ended."""

    words: Sequence[str]


Step: TypeAlias = Store | Load | Wait | Collect | Complete


@dataclass(frozen=True)
class Program:
    """What one rank does.

    Attributes:
        name: name of the rank in traces.
        steps: what it does, in this order.
        repeat: whether it starts again after the last step. There must then be a step that waits for another rank.
    """

    name: str
    steps: Sequence[Step]
    repeat: bool = False


@dataclass(frozen=True)
class Symmetry:
    """Other names under which the programs are what they were.

    Attributes:
        ranks: rank i takes the part of rank ``ranks[i]``.
        words: new names; words that aren't there keep theirs.
        values: new values, in the same way.
        offset: step i takes the place of step ``i + offset`` (of a program that repeats).
    """

    ranks: Sequence[int]
    words: Mapping[str, str]
    values: Mapping[int, int]
    offset: int = 0


@dataclass(frozen=True)
class Failure:
    """What can go wrong.

    Attributes:
        reason: a wrong value, or a state that nothing leaves.
        trace: the shortest sequence of events that ends there.
    """

    reason: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        """The trace, one event a line, and the reason."""
        return "\n".join([*(f"{i:3} {event}" for i, event in enumerate(self.trace, 1)), f"=> {self.reason}"])


@dataclass(frozen=True)
class Exploration:
    """The result of `explore`.

    Attributes:
        states: how many different states there are (until the failure, if there is one).
        transitions: how many ways from one to another.
        failure: what can go wrong, or None.
    """

    states: int
    transitions: int
    failure: Failure | None


# A rank's state: where it is; what it has done of the step there (the words collected, as bits); the loads that were
# made early, as (step, value); and its accesses that are under way, in program order.
_Pending: TypeAlias = tuple[bool, int, int, bool]  # is a store, word, value (for a load: expected), release
_Early: TypeAlias = tuple[tuple[int, int], ...]
_Rank: TypeAlias = tuple[int, int, _Early, tuple[_Pending, ...]]
_Memory: TypeAlias = tuple[int, ...]
_State: TypeAlias = tuple[_Memory, tuple[_Rank, ...]]
_Event: TypeAlias = tuple[int, str, int, int]  # rank, what, word, value
_START: _Event = (0, "", 0, 0)


class _WrongValue(Exception):
    def __init__(self, expected: int) -> None:
        super().__init__()
        self.expected = expected


def _found(memory: _Memory, word: int, pending: tuple[_Pending, ...]) -> int:
    """What a rank reads: the last of its own stores that are under way, else what is in memory."""
    found = memory[word]
    for store, other, value, _ in pending:
        if store and other == word:
            found = value
    return found


class _Machine:
    """One rank's program with the words as numbers."""

    def __init__(self, rank: int, program: Program, words: Mapping[str, int]) -> None:
        self.rank = rank
        self.program = program
        self.words = words
        self.length = len(program.steps)
        if program.repeat and not any(isinstance(step, Wait | Collect) for step in program.steps):
            raise ValueError(f"{program.name} repeats and never waits for another rank")
        for step in program.steps:
            if isinstance(step, Collect) and not step.words:
                raise ValueError(f"{program.name} collects no words")
            for word in step.words if isinstance(step, Collect | Complete) else [step.word]:
                if word not in words:
                    raise ValueError(f"{program.name} uses {word!r}, which is not in memory")
        # For each step that doesn't acquire, the loads after it that may be made early.
        self.hoistable = [self._loads_after(at) for at in range(self.length)]

    def _loads_after(self, at: int) -> list[int]:
        step = self.program.steps[at]
        if not isinstance(step, Wait | Collect) or (isinstance(step, Wait) and step.acquire):
            return []
        loads: list[int] = []
        for i in range(at + 1, at + self.length):
            if i >= self.length and not self.program.repeat:
                break
            later = self.program.steps[i % self.length]
            if isinstance(later, Complete) or (isinstance(later, Wait) and later.acquire):
                break
            if isinstance(later, Load):
                loads.append(i % self.length)
        return loads

    def advance(self, pc: int, early: _Early, pending: tuple[_Pending, ...]) -> _Rank:
        """Go on to the next step that can be held up.

        Nothing is lost by going at once: what is made here is only under way, and has its effect later.
        """
        steps, words = self.program.steps, self.words
        while pc < self.length:
            step = steps[pc]
            if isinstance(step, Store):
                pending = (*pending, (True, words[step.word], step.value, step.release))
            elif isinstance(step, Load):
                taken = [value for at, value in early if at == pc]
                if not taken:
                    pending = (*pending, (False, words[step.word], step.expected, False))
                elif taken[0] != step.expected:
                    raise _WrongValue(step.expected)
                else:
                    early = tuple(item for item in early if item[0] != pc)
            elif isinstance(step, Complete):
                held_up = {words[word] for word in step.words}
                if any(not store or word in held_up for store, word, _, _ in pending):
                    break
            else:
                break
            pc += 1
            if pc == self.length and self.program.repeat:
                pc = 0
        return pc, 0, early, pending

    def moves(self, memory: _Memory, rank: _Rank) -> Iterator[tuple[_Event, _Memory, _Rank]]:
        """Everything that can happen next at this rank. Raises `_WrongValue` after the event that leads to it."""
        pc, collected, early, pending = rank
        for at, (store, word, value, release) in enumerate(pending):
            rest = (*pending[:at], *pending[at + 1 :])
            if store:
                if at > 0 and (release or any(word == other for _, other, _, _ in pending[:at])):
                    continue
                event = (self.rank, "has stored {}", word, value)
                after = (*memory[:word], value, *memory[word + 1 :])
            else:
                found = _found(memory, word, pending[:at])
                event = (self.rank, "reads {}", word, found)
                after = memory
                if found != value:
                    yield event, memory, rank
                    raise _WrongValue(value)
            if pc < self.length and isinstance(self.program.steps[pc], Complete):
                yield from self._go_on(event, after, pc, early, rest)
            else:
                yield event, after, (pc, collected, early, rest)
        if pc == self.length:
            return
        step = self.program.steps[pc]
        if isinstance(step, Wait):
            word = self.words[step.word]
            found = _found(memory, word, pending)
            if found in step.values:
                event = (self.rank, "sees {}", word, found)
                yield from self._go_on(event, memory, pc + 1, early, pending)
        elif isinstance(step, Collect):
            for bit, name in enumerate(step.words):
                word = self.words[name]
                found = _found(memory, word, pending)
                if collected >> bit & 1 or found == step.empty:
                    continue
                event = (self.rank, "collects {}", word, found)
                if found != step.expected:
                    yield event, memory, rank
                    raise _WrongValue(step.expected)
                now = collected | 1 << bit
                if now + 1 == 1 << len(step.words):
                    yield from self._go_on(event, memory, pc + 1, early, pending)
                else:
                    yield event, memory, (pc, now, early, pending)
        for load in self.hoistable[pc]:
            if all(at != load for at, _ in early):
                ahead = self.program.steps[load]
                assert isinstance(ahead, Load)
                word = self.words[ahead.word]
                found = _found(memory, word, pending)
                event = (self.rank, "reads {} early", word, found)
                yield event, memory, (pc, collected, tuple(sorted((*early, (load, found)))), pending)

    def waiting(self, memory: _Memory, rank: _Rank) -> _Event | None:
        """What a rank waits for when nothing can happen any more; None where it is at its end."""
        pc, collected, _, _ = rank
        if pc == self.length:
            return None
        step = self.program.steps[pc]
        assert isinstance(step, Wait | Collect)  # a store always arrives, so nobody waits for that
        missing = step.word if isinstance(step, Wait) else step.words[(~collected & collected + 1).bit_length() - 1]
        word = self.words[missing]
        return self.rank, "waits for ever: {}", word, memory[word]

    def _go_on(
        self, event: _Event, memory: _Memory, pc: int, early: _Early, pending: tuple[_Pending, ...]
    ) -> Iterator[tuple[_Event, _Memory, _Rank]]:
        if pc == self.length and self.program.repeat:
            pc = 0
        try:
            after = self.advance(pc, early, pending)
        except _WrongValue:
            yield event, memory, (pc, 0, early, pending)
            raise
        yield event, memory, after


class _Renaming:
    """A symmetry with the words as numbers."""

    def __init__(self, ranks: tuple[int, ...], words: tuple[int, ...], values: dict[int, int], offset: int) -> None:
        self.ranks, self.words, self.values, self.offset = ranks, words, values, offset
        self.key = (ranks, words, tuple(sorted(values.items())), offset)
        self.ranks_from = _inverse(ranks)
        self.words_from = _inverse(words)

    def then(self, other: _Renaming, length: int) -> _Renaming:
        return _Renaming(
            tuple(other.ranks[rank] for rank in self.ranks),
            tuple(other.words[word] for word in self.words),
            {value: other.values[after] for value, after in self.values.items()},
            (self.offset + other.offset) % length,
        )

    def inverse(self, length: int) -> _Renaming:
        values = {after: value for value, after in self.values.items()}
        return _Renaming(self.ranks_from, self.words_from, values, -self.offset % length)

    def event(self, event: _Event) -> _Event:
        rank, what, word, value = event
        return self.ranks[rank], what, self.words[word], self.values[value]

    def state(self, state: _State, length: int) -> _State:
        memory, ranks = state
        words, values, offset = self.words, self.values, self.offset
        moved: list[_Rank] = []
        for rank in self.ranks_from:
            pc, collected, early, pending = ranks[rank]
            if early:
                early = tuple(sorted([((at + offset) % length, values[value]) for at, value in early]))
            pending = tuple([(store, words[word], values[value], release) for store, word, value, release in pending])
            moved.append(((pc + offset) % length, collected, early, pending))
        return tuple([values[memory[word]] for word in self.words_from]), tuple(moved)


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


class _Group:
    """All symmetries, and which of the states that they make of one to keep."""

    def __init__(
        self, symmetries: Sequence[Symmetry], programs: Sequence[Program], memory: Mapping[str, int]
    ) -> None:
        names = list(memory)
        numbers = {word: i for i, word in enumerate(names)}
        values = set(memory.values())
        for program in programs:
            for step in program.steps:
                values.update(step.values if isinstance(step, Wait) else [])
                values.update([step.value] if isinstance(step, Store) else [])
                values.update([step.expected] if isinstance(step, Load | Collect) else [])
        self.length = len(programs[0].steps)
        identity = _Renaming(tuple(range(len(programs))), tuple(range(len(names))), {v: v for v in values}, 0)
        generators: list[_Renaming] = []
        for symmetry in symmetries:
            renaming = _Renaming(
                tuple(symmetry.ranks),
                tuple(numbers[symmetry.words.get(name, name)] for name in names),
                {value: symmetry.values.get(value, value) for value in values},
                symmetry.offset % self.length,
            )
            for old, new in (
                (identity.ranks, renaming.ranks),
                (identity.words, renaming.words),
                (values, renaming.values.values()),
            ):
                if sorted(old) != sorted(new):
                    raise ValueError(f"not a symmetry: {sorted(old)} become {sorted(new)}")
            _check(symmetry, programs)
            generators.append(renaming)
        members = {identity.key: identity}
        fresh = [identity]
        while fresh:
            member = fresh.pop()
            for generator in generators:
                product = member.then(generator, self.length)
                if product.key not in members:
                    members[product.key] = product
                    fresh.append(product)
        self.identity = identity
        self.members = list(members.values())
        self._chosen: dict[tuple[tuple[int, int, int], ...], _Renaming] = {}

    def normal(self, state: _State) -> tuple[_State, _Renaming]:
        """A state that stands for this one, and the renaming that leads to it.

        Chosen by where the ranks are, which is quickly said. Where that leaves a choice, two states that are the same
        but for their names may both be kept, and cost time, no more.
        """
        if len(self.members) == 1:
            return state, self.identity
        where = tuple([(pc, collected, len(pending)) for pc, collected, _, pending in state[1]])
        member = self._chosen.get(where)
        if member is None:
            member = self._chosen[where] = min(self.members, key=lambda member: self._image(member, where))
        return (state if member is self.identity else member.state(state, self.length)), member

    def _image(self, member: _Renaming, where: tuple[tuple[int, int, int], ...]) -> list[tuple[int, int, int]]:
        return [
            ((pc + member.offset) % self.length, collected, pending)
            for pc, collected, pending in [where[rank] for rank in member.ranks_from]
        ]


def _check(symmetry: Symmetry, programs: Sequence[Program]) -> None:
    def renamed(step: Step) -> Step:
        if isinstance(step, Complete):
            return Complete(tuple(sorted(word(name) for name in step.words)))
        if isinstance(step, Collect):
            return Collect(tuple(word(name) for name in step.words), value(step.expected), value(step.empty))
        if isinstance(step, Wait):
            return Wait(word(step.word), frozenset(value(v) for v in step.values), step.acquire)
        if isinstance(step, Load):
            return Load(word(step.word), value(step.expected))
        return Store(word(step.word), value(step.value), step.release)

    def word(name: str) -> str:
        return symmetry.words.get(name, name)

    def value(number: int) -> int:
        return symmetry.values.get(number, number)

    def plain(step: Step) -> Step:
        if isinstance(step, Complete):
            return Complete(tuple(sorted(step.words)))
        if isinstance(step, Collect):
            return Collect(tuple(step.words), step.expected, step.empty)
        return Wait(step.word, frozenset(step.values), step.acquire) if isinstance(step, Wait) else step

    for program, rank in zip(programs, symmetry.ranks, strict=True):
        length = len(program.steps)
        if symmetry.offset % length and not program.repeat:
            raise ValueError(f"{program.name} does not repeat, so its steps can't change places")
        other = programs[rank].steps
        for at, step in enumerate(program.steps):
            there = (at + symmetry.offset) % length
            if len(other) != length or renamed(step) != plain(other[there]):
                raise ValueError(f"not a symmetry: step {at} of {program.name} is not step {there} of rank {rank}")


def explore(
    programs: Sequence[Program],
    memory: Mapping[str, int],
    *,
    symmetries: Sequence[Symmetry] = (),
    limit: int = 2_000_000,
) -> Exploration:
    """Run the programs in every possible way.

    Args:
        programs: one a rank.
        memory: every word and its value at the start.
        symmetries: renamings under which the programs stay the same; combinations follow by themselves.
        limit: how many states to look at; a protocol that has more is too large for this.

    Returns:
        How many states there are, and the shortest way to one that is wrong: a load or a collected word with another
        value than expected, or a state in which a rank is not at its end and nothing can happen any more. Without a
        failure every run of programs that end does end, and every wait of those that repeat does.

    Raises:
        ValueError: a program uses a word that is not in `memory`, collects none, or repeats without ever waiting for
            another rank; a symmetry is none.
        RuntimeError: there are more than `limit` states.
    """
    names = list(memory)
    numbers = {word: i for i, word in enumerate(names)}
    machines = [_Machine(rank, program, numbers) for rank, program in enumerate(programs)]
    group = _Group(symmetries, programs, memory)
    start, turned = group.normal((tuple(memory.values()), tuple(machine.advance(0, (), ()) for machine in machines)))
    # For each state where it was found: the state before, what happened there, and how the result was renamed.
    came_from: dict[_State, tuple[_State, _Event, _Renaming]] = {start: (start, _START, turned)}
    queue = deque([start])
    transitions = 0

    def failed(
        state: _State, last: Sequence[_Event], expected: int | None, waiting: Sequence[_Event | None]
    ) -> Exploration:
        """Tell the story from the start, in the names of the start."""
        way: list[tuple[_Event, _Renaming]] = [(event, group.identity) for event in reversed(last)]
        while state is not start:
            state, event, renaming = came_from[state]
            way.append((event, renaming))
        back = turned.inverse(group.length)
        story: list[str] = []
        for event, renaming in reversed(way):
            story.append(told(back.event(event)))
            back = renaming.inverse(group.length).then(back, group.length)
        reason = "; ".join(told(back.event(event)) for event in waiting if event is not None)
        if expected is not None:
            reason = f"expected {back.values[expected]}"
        return Exploration(len(came_from), transitions, Failure(reason, tuple(story)))

    def told(event: _Event) -> str:
        rank, what, word, value = event
        return f"{programs[rank].name} {what.format(f'{names[word]} = {value}')}"

    while queue:
        state = queue.popleft()
        words, ranks = state
        stuck = True
        for machine in machines:
            at = machine.rank
            event = _START
            try:
                for event, after, rank in machine.moves(words, ranks[at]):
                    stuck = False
                    transitions += 1
                    following, renaming = group.normal((after, (*ranks[:at], rank, *ranks[at + 1 :])))
                    if following not in came_from:
                        came_from[following] = (state, event, renaming)
                        queue.append(following)
            except _WrongValue as wrong:
                return failed(state, [event], wrong.expected, [])
        if stuck:
            waiting = [machine.waiting(words, ranks[machine.rank]) for machine in machines]
            if any(waiting):
                return failed(state, [], None, waiting)
        if len(came_from) > limit:
            raise RuntimeError(f"more than {limit} states")
    return Exploration(len(came_from), transitions, None)
