"""The explorer: it finds what memory may do, nothing that it may not, and tells the way there.

The small programs are the usual litmus tests of memory models.
"""

from __future__ import annotations

import pytest

from comm_core.testing.interleavings import (
    Collect,
    Complete,
    Exploration,
    Load,
    Program,
    Step,
    Store,
    Symmetry,
    Wait,
    explore,
)


def run(*ranks: list[Step]) -> Exploration:
    """Explore ranks whose words all are 0 at the start."""
    words = {
        word
        for steps in ranks
        for step in steps
        for word in (step.words if isinstance(step, Collect | Complete) else [step.word])
    }
    return explore([Program(f"r{i}", steps) for i, steps in enumerate(ranks)], dict.fromkeys(sorted(words), 0))


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize("acquire", [True, False])
def test_a_message_needs_both_a_release_and_an_acquire(release: bool, acquire: bool) -> None:
    """Data and a flag for it: with either order missing, the flag can be seen before the data."""
    found = run(
        [Store("data", 1), Store("flag", 1, release=release)], [Wait("flag", {1}, acquire=acquire), Load("data", 1)]
    )
    assert (found.failure is None) == (release and acquire)


def test_the_trace_is_the_shortest_way() -> None:
    """The events in order, and what was expected at the end."""
    found = run([Store("data", 1), Store("flag", 1)], [Wait("flag", {1}), Load("data", 1)])
    assert found.failure is not None
    assert found.failure.trace == ("r0 has stored flag = 1", "r1 sees flag = 1", "r1 reads data = 0")
    assert str(found.failure).splitlines()[2:] == ["  3 r1 reads data = 0", "=> expected 1"]
    found = run([Wait("y", {1}), Store("x", 1, release=True)], [Wait("x", {1}), Store("y", 1, release=True)])
    assert found.failure is not None
    assert found.failure.reason == "r0 waits for ever: y = 0; r1 waits for ever: x = 0"


def test_a_release_holds_up_what_came_before_and_only_that() -> None:
    """A store after a release may arrive before it; one before it may not arrive after it."""
    later = run([Store("flag", 1, release=True), Store("data", 1)], [Wait("data", {1}), Load("flag", 1)])
    assert later.failure is not None
    chain = run(
        [Store("a", 1), Store("b", 1, release=True)],
        [Wait("b", {1}), Store("c", 1, release=True)],
        [Wait("c", {1}), Load("a", 1)],
    )
    assert chain.failure is None, "what was acquired is passed on by the next release"


def test_a_load_is_done_before_a_release_and_not_before_a_plain_store() -> None:
    """Permission to overwrite, given while the old data is still being read."""
    for release in (True, False):
        found = run([Load("data", 0), Store("ready", 1, release=release)], [Wait("ready", {1}), Store("data", 1)])
        assert (found.failure is None) == release


def test_stores_of_one_rank_to_one_word_keep_their_order() -> None:
    """Coherence: also for its own loads, which see them while they are under way."""
    assert run([Store("x", 1), Store("x", 2), Load("x", 2)]).failure is None
    found = run([Store("x", 1), Store("x", 2)], [Wait("x", {2}), Load("x", 2)])
    assert found.failure is None
    assert run([Store("x", 1)], [Store("x", 2), Wait("x", {2}), Load("x", 2)]).failure is not None


def test_a_wait_without_acquire_lets_loads_go_first_up_to_the_next_acquire() -> None:
    """In a chain of waits, one acquire after the last is enough for a load and one before it is not."""
    writer: list[Step] = [Store("data", 1), Store("flag", 1, release=True)]
    assert run(writer, [Wait("flag", {1}, acquire=False), Wait("flag", {1}), Load("data", 1)]).failure is None
    assert run(writer, [Wait("go", {0}), Wait("flag", {1}, acquire=False), Load("data", 1)]).failure is not None


def test_the_end_of_a_kernel_completes_its_own_stores() -> None:
    """And only those to the words that are named."""
    reader: list[Step] = [Wait("y", {1}), Load("x", 1)]
    assert run([Store("x", 1), Complete(["x"]), Store("y", 1)], reader).failure is None
    assert run([Store("x", 1), Complete(["z"]), Store("y", 1)], reader).failure is not None


def test_words_are_collected_in_any_order() -> None:
    """What is collected first may be overwritten before the last is there."""
    collect = Collect(["x", "y"], 1, empty=0)
    assert run([Store("x", 1), Store("y", 1)], [collect]).failure is None
    found = run([Store("x", 1), Store("y", 1), Store("y", 2)], [collect])
    assert found.failure is not None
    assert found.failure.trace[-1] == "r1 collects y = 2"
    found = run([Store("x", 1)], [collect])
    assert found.failure is not None
    assert found.failure.reason == "r1 waits for ever: y = 0"


def ring(size: int, *, flawed: bool = False) -> tuple[list[Program], dict[str, int], list[Symmetry]]:
    """A token goes round for ever, four values in turn; the flawed ring forgets its data's order."""
    programs: list[Program] = []
    for rank in range(size):
        steps: list[Step] = []
        for turn in range(4):
            mine = turn if rank > 0 else (turn - 1) % 4
            steps += [Wait(f"token{rank}", {mine}), Load(f"data{rank}", mine)]
            following = (rank + 1) % size
            steps += [Store(f"data{following}", turn), Store(f"token{following}", turn, release=not flawed)]
        programs.append(Program(f"r{rank}", steps, repeat=True))
    memory = {f"{kind}{rank}": 3 for rank in range(size) for kind in ("data", "token")}
    return programs, memory, [Symmetry(range(size), {}, {turn: (turn + 1) % 4 for turn in range(4)}, 4)]


def test_a_symmetry_saves_states_and_changes_nothing_else() -> None:
    """The same verdict, and a shortest trace that happened from the start, in the names of the start."""
    for flawed in (False, True):
        programs, memory, symmetries = ring(3, flawed=flawed)
        plain = explore(programs, memory)
        less = explore(programs, memory, symmetries=symmetries)
        assert (plain.failure is None) == (less.failure is None) == (not flawed)
        if plain.failure is not None and less.failure is not None:
            assert less.failure == plain.failure
        else:
            assert plain.states == 4 * less.states


def test_a_failure_late_in_the_run_is_told_in_the_names_of_the_start() -> None:
    """The trace goes through renamed states and must not show it."""
    programs, memory, symmetries = ring(2)
    spoiled = [Program("r0", programs[0].steps, repeat=True), Program("r1", programs[1].steps, repeat=True)]
    # Rank 1 expects another value in each of its turns, one that never comes.
    spoiled[1] = Program(
        "r1",
        [Load(step.word, step.expected + 10) if isinstance(step, Load) else step for step in programs[1].steps],
        repeat=True,
    )
    shifted = Symmetry(
        range(2), {}, {**symmetries[0].values, **{turn + 10: (turn + 1) % 4 + 10 for turn in range(4)}}, 4
    )
    found = explore(spoiled, memory, symmetries=[shifted])
    assert found.failure == explore(spoiled, memory).failure
    assert found.failure is not None
    assert found.failure.reason == "expected 10"


def test_what_is_no_symmetry_is_refused() -> None:
    """A wrong one would hide states and with them bugs."""
    programs, memory, _ = ring(3)
    with pytest.raises(ValueError, match="not a symmetry: step 0 of r0 is not step 4 of rank 0"):
        explore(programs, memory, symmetries=[Symmetry(range(3), {}, {}, 4)])
    with pytest.raises(ValueError, match=r"not a symmetry: step . of r0 is not step . of rank 1"):
        names = {f"{kind}{rank}": f"{kind}{(rank + 1) % 3}" for rank in range(3) for kind in ("data", "token")}
        explore(programs, memory, symmetries=[Symmetry([1, 2, 0], names, {})])
    with pytest.raises(ValueError, match=r"not a symmetry: .* become"):
        explore(programs, memory, symmetries=[Symmetry([0, 0, 1], {}, {})])
    with pytest.raises(ValueError, match="r0 does not repeat"):
        explore([Program("r0", [Store("x", 1)] * 2)], {"x": 0}, symmetries=[Symmetry([0], {}, {}, 1)])


def test_programs_that_cannot_be_explored_are_refused() -> None:
    """Each with what is wrong with it, instead of a search that never ends."""
    with pytest.raises(ValueError, match="r0 uses 'y', which is not in memory"):
        explore([Program("r0", [Store("y", 1)])], {"x": 0})
    with pytest.raises(ValueError, match="r0 repeats and never waits"):
        explore([Program("r0", [Store("x", 1)], repeat=True)], {"x": 0})
    with pytest.raises(ValueError, match="r0 collects no words"):
        explore([Program("r0", [Collect([], 1, 0)])], {"x": 0})
    programs, memory, _ = ring(3)
    with pytest.raises(RuntimeError, match="more than 5 states"):
        explore(programs, memory, limit=5)
