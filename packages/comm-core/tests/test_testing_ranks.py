"""The rank pool: who runs what, what a failing rank leads to, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm_core.errors import ArgumentValueError, ClosedError, GroupTimeoutError, JointError
from comm_core.testing import _rank_process
from comm_core.testing.ranks import (
    FunctionRef,
    RankError,
    RankPool,
    RankTimeoutError,
    run_threads,
    run_threads_outcomes,
)

calls = 0


class LocalError(Exception):
    """Defined in a test module, which no other process can import by name."""

    def __init__(self, code, detail):
        super().__init__(f"{code}: {detail}")
        self.code = code


def who(group):
    global calls
    calls += 1
    seen = [None] * dist.get_world_size(group)
    dist.all_gather_object(seen, dist.get_rank(), group=group)
    return {"rank": dist.get_rank(group), "world": dist.get_rank(), "seen": seen, "calls": calls, "pid": os.getpid()}


def count_calls(group):
    return calls


def add(group, tensor, other):
    return tensor + other + dist.get_rank(group)


def environment(group, name):
    value = os.environ.get(name)
    os.environ["LEFT_BEHIND"] = "1"
    os.chdir("/")
    return value


def surroundings(group):
    return os.environ.get("LEFT_BEHIND"), os.environ.get("COMM_A"), str(Path.cwd())


def raise_on(group, rank, name):
    if dist.get_rank(group) in (rank, -1 if rank >= 0 else dist.get_rank(group)):
        errors = {
            "joint": JointError("the step", {1: "no"}, hint="do this"),
            "timeout": GroupTimeoutError("the step", (1, 2), "nobody came"),
            "local": LocalError(7, "seven"),
            "exit": SystemExit(3),
            "os": FileNotFoundError(2, "not there", "/nowhere"),
        }
        raise errors[name]
    return "fine"


def misbehave(group, rank, how):
    if dist.get_rank(group) != rank:
        return "fine"
    if how == "raise":
        raise ValueError("on purpose")
    if how == "system_exit":
        sys.exit(4)
    if how == "exit":
        os._exit(5)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "abort":
        os.abort()
    here_it_hangs()
    return None


def here_it_hangs():
    time.sleep(3600)


def raise_while_others_wait(group):
    if dist.get_rank(group) == 1:
        raise ValueError("the cause")
    dist.barrier(group)


def die_in_the_middle_of_an_answer(group):
    if dist.get_rank(group) == 0:
        return "fine"
    caller = sys._getframe()
    while not isinstance(caller.f_locals.get("self"), _rank_process._Rank):
        caller = caller.f_back
    caller.f_locals["self"]._channel.sendall((1000).to_bytes(8, "little") + b"half of it")
    os._exit(6)


class Untidy:
    def __del__(self):
        warnings.warn("was not closed", ResourceWarning, stacklevel=1)


def leave_untidy(group):
    cycle = [Untidy()]
    cycle.append(cycle)
    return "fine"


def fail_in_a_thread(group):
    thread = threading.Thread(target=here_it_raises)
    thread.start()
    thread.join()
    return "fine"


def here_it_raises():
    raise ValueError("in a thread")


def warn(group):
    warnings.warn("old", DeprecationWarning, stacklevel=1)


def leave_a_thread(group):
    threading.Thread(target=here_it_hangs, name="left").start()


def speak(group):
    print("hello")
    print("and from stderr", file=sys.stderr)


def destroy_own_group(group):
    dist.destroy_process_group(group)


def open_files(group):
    dist.barrier(group)
    return len(list(Path("/proc/self/fd").iterdir()))


def hash_of(group, text):
    return hash(text)


def first_leaves(group):
    if dist.get_rank(group) == 0:
        os._exit(0)
    time.sleep(0.5)
    store = dist.distributed_c10d._get_process_group_store(group)
    store.set("key", "value")
    return store.get("key").decode()


def children():
    """Return the process ids of this process's children, zombies included."""
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def test_a_group_has_exactly_the_ranks_that_were_asked_for(ranks):
    # WORLD, a group of non-consecutive ranks, overlapping ones, one without rank 0, and a single rank.
    for members in (tuple(range(8)), (0, 2), (1, 3), (1, 2), (3, 4, 6), (5,)):
        results = ranks.run(who, ranks=members)
        assert [result["rank"] for result in results] == list(range(len(members)))
        assert [result["world"] for result in results] == list(members)
        assert all(result["seen"] == list(members) for result in results)
    assert [result["world"] for result in ranks.run(who, ranks=3)] == [0, 1, 2]


def test_idle_ranks_stay_idle_and_processes_are_reused(ranks):
    before = ranks.run(count_calls)
    first = ranks.run(who, ranks=(1, 4))
    second = ranks.run(who, ranks=(1, 4))
    assert [result["pid"] for result in first] == [result["pid"] for result in second]
    after = ranks.run(count_calls)
    assert [now - then for now, then in zip(after, before, strict=True)] == [0, 2, 0, 0, 2, 0, 0, 0]


def test_arguments_and_results_travel(ranks):
    results = ranks.run(add, torch.arange(4), 10, ranks=(2, 3))
    assert [result.tolist() for result in results] == [[10, 11, 12, 13], [11, 12, 13, 14]]


@pytest.mark.parametrize("bad", [(2, 0), (1, 1), (0, 8), (-1,), (), 0, 9])
def test_ranks_that_make_no_group_are_rejected(ranks, bad):
    starts = ranks.starts
    with pytest.raises(ArgumentValueError, match="ranks must be"):
        ranks.run(who, ranks=bad)
    assert ranks.starts == starts


def test_a_function_that_no_other_process_finds_is_rejected(ranks):
    def nested(group):
        return None

    for function in (lambda group: None, nested, "text".upper, LocalError(1, "").with_traceback):
        with pytest.raises(ArgumentValueError, match=r"module-level|loaded by another process"):
            ranks.run(function)


def test_environment_is_set_for_one_run_and_restored(ranks):
    values = ranks.run(environment, "COMM_A", ranks=2, env={"COMM_A": "all"}, rank_env={1: {"COMM_A": "one"}})
    assert values == ["all", "one"]
    assert ranks.run(environment, "PATH", ranks=2, env={"PATH": None}) == [None, None]
    assert ranks.run(environment, "PATH", ranks=2) == [os.environ["PATH"]] * 2
    # What the function itself changed is undone, too.
    assert ranks.run(surroundings, ranks=2) == [(None, None, str(Path.cwd()))] * 2


def test_exceptions_arrive_as_what_they_were(ranks):
    starts = ranks.start() or ranks.starts
    joint, timeout, local, leave, missing = (
        [outcome.exception for outcome in ranks.run_outcomes(raise_on, -1, name, ranks=2)]
        for name in ("joint", "timeout", "local", "exit", "os")
    )
    assert all(type(error) is JointError and error.per_rank == {1: "no"} for error in joint)
    assert all(type(error) is GroupTimeoutError and error.missing == (1, 2) for error in timeout)
    assert all(type(error) is LocalError and error.code == 7 and str(error) == "7: seven" for error in local)
    assert all(type(error) is SystemExit and error.code == 3 for error in leave)
    assert all(type(error) is FileNotFoundError and error.filename == "/nowhere" for error in missing)
    # All ranks did the same, so they can go on, on a new group.
    assert ranks.starts == starts
    assert len(ranks.run(who, ranks=2)) == 2


def test_run_raises_with_the_cause_and_its_traceback(ranks):
    with pytest.raises(RankError) as caught:
        ranks.run(raise_on, 1, "local", ranks=3)
    assert not isinstance(caught.value, RankTimeoutError)
    assert type(caught.value.__cause__) is LocalError
    assert [outcome.kind for outcome in caught.value.outcomes] == ["value", "exception", "value"]
    assert "1 of 3 ranks failed" in str(caught.value)
    assert "raise errors[name]" in str(caught.value)


@pytest.mark.parametrize(
    ("how", "kind", "text"),
    [
        ("raise", "exception", "raised ValueError: on purpose"),
        ("system_exit", "exception", "raised SystemExit: 4"),
        ("exit", "died", "exited with code 5"),
        ("kill", "died", "was killed by SIGKILL"),
        ("abort", "died", "was killed by SIGABRT"),
        ("stop", "timeout", "did not return in time"),
        ("hang", "timeout", "did not return in time"),
    ],
)
def test_a_failing_rank_is_told_from_the_others(ranks, how, kind, text):
    # The last member of a sub-group, so that group rank and world rank differ.
    outcomes = ranks.run_outcomes(misbehave, 2, how, ranks=(0, 1, 5), timeout_s=1.0)
    assert [outcome.kind for outcome in outcomes] == ["value", "value", kind]
    assert str(outcomes[2]) == f"rank 2 {text}"
    assert outcomes[0].value == "fine"
    # Whatever it was, the next run has a full set of ranks.
    assert not ranks.running
    assert [result["seen"] for result in ranks.run(who)] == [list(range(8))] * 8
    if how == "abort":
        assert "Fatal Python error: Aborted" in outcomes[2].text
    if how == "stop":
        assert "stopped by a signal" in outcomes[2].text


def test_at_the_deadline_every_hanging_rank_shows_its_stacks(ranks):
    ranks.start()
    started = time.monotonic()
    with pytest.raises(RankTimeoutError) as caught:
        ranks.run(misbehave, 1, "hang", ranks=2, timeout_s=0.5)
    assert time.monotonic() - started < 10
    assert "rank 1 did not return in time" in str(caught.value)
    assert "in here_it_hangs" in str(caught.value)
    assert "in misbehave" in str(caught.value)


def test_a_failure_is_reported_long_before_the_collective_that_waits_for_it_ends(ranks):
    ranks.start()
    started = time.monotonic()
    with pytest.raises(RankError, match="the cause") as caught:
        ranks.run(raise_while_others_wait, ranks=3, timeout_s=60)
    assert time.monotonic() - started < 20
    # Those that wait for it are shown as well, once, after the cause.
    text = str(caught.value)
    assert (
        text.index("raised ValueError: the cause")
        < text.index("ranks 0, 2 did not return")
        < text.index("in barrier")
    )


def test_an_answer_that_is_cut_off_is_no_answer(ranks):
    outcomes = ranks.run_outcomes(die_in_the_middle_of_an_answer, ranks=2, timeout_s=10)
    assert [outcome.kind for outcome in outcomes] == ["value", "died"]
    assert outcomes[1].exit_code == 6


def test_ranks_restart_only_after_a_broken_run(ranks):
    ranks.run(who)
    starts = ranks.starts
    ranks.run_outcomes(raise_on, 1, "local", ranks=2, keep=True)
    # Kept, although the ranks differ; and the group that they may have left at different points is not used again.
    assert [result["seen"] for result in ranks.run(who, ranks=2)] == [[0, 1], [0, 1]]
    assert ranks.starts == starts
    ranks.run_outcomes(raise_on, 1, "local", ranks=2)
    ranks.run(who, ranks=2)
    assert ranks.starts == starts + 1


def test_a_fresh_group_may_be_destroyed_by_the_function(ranks):
    ranks.run(who, ranks=(0, 3))
    starts = ranks.starts
    for _ in range(2):
        ranks.run(destroy_own_group, ranks=(0, 3), fresh=True)
    assert len(ranks.run(who, ranks=(0, 3))) == 2
    assert ranks.starts == starts


def test_warnings_and_what_nobody_catches_fail_the_run(ranks):
    with pytest.raises(RankError, match="DeprecationWarning"):
        ranks.run(warn, ranks=2)
    with pytest.raises(RankError, match="ResourceWarning: was not closed"):
        ranks.run(leave_untidy, ranks=2)
    with pytest.raises(RankError, match="ValueError: in a thread"):
        ranks.run(fail_in_a_thread, ranks=2)
    # None of it is left for the next one.
    assert len(ranks.run(who, ranks=2)) == 2


def test_output_of_a_rank_is_shown_with_its_rank(ranks, capsys):
    ranks.run(speak, ranks=(1, 2))
    lines = capsys.readouterr().out.splitlines()
    assert {"[rank 1] hello", "[rank 2] hello", "[rank 2] and from stderr"} <= set(lines)


def test_ranks_have_different_hash_seeds(ranks):
    # A decision that depends on the order of a set of strings has to differ somewhere in the pool.
    assert len(set(ranks.run(hash_of, "text", ranks=2))) == 2


def test_nothing_leaks_over_many_runs(ranks):
    ranks.run(open_files, ranks=(0, 2))
    before = ranks.run(open_files, ranks=(0, 2)), len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        ranks.run(open_files, ranks=(0, 2), fresh=True)
    after = ranks.run(open_files, ranks=(0, 2)), len(list(Path("/proc/self/fd").iterdir()))
    assert after == before


def test_nothing_is_left_after_breaking_and_closing():
    threads, files, before = threading.active_count(), len(list(Path("/proc/self/fd").iterdir())), children()
    pool = RankPool(3)
    seen = set()
    for how in ("exit", "stop", "hang"):
        pool.start()
        seen.update(pool.pids)
        pool.run_outcomes(misbehave, 1, how, timeout_s=0.2)
    pool.start()
    seen.update(pool.pids)
    pool.close()
    pool.close()
    assert len(seen) == 12
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()]
    assert children() == before
    assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == (threads, files)
    with pytest.raises(ClosedError):
        pool.run(who)


def test_close_names_what_keeps_a_rank_from_ending():
    pool = RankPool(2)
    pool.run(leave_a_thread, ranks=1)
    pids = pool.pids
    with pytest.raises(RankError, match="here_it_hangs"):
        pool.close(timeout_s=1.0)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


SCRIPT = """
import json, os, signal, sys
from comm_core.testing.ranks import RankPool

def answer(group, x):
    return x + group.rank()

if __name__ == "__main__":
    pool = RankPool(2)
    print(json.dumps([pool.pids or pool.run(answer, 40), pool.pids]), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_ranks_end_with_the_process_that_started_them_and_run_functions_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join(path for path in sys.path if path)
    # A process that is killed leaves its temporary folder behind.
    environment = {**os.environ, "PYTHONPATH": paths, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "error", script], stdout=subprocess.PIPE, env=environment, timeout=60, text=True
    )
    assert done.returncode == -signal.SIGKILL
    results, pids = json.loads(done.stdout)
    assert results == [40, 41]
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.05)


def test_who_serves_the_store_decides_whether_it_survives_rank_0(ranks):
    outcomes = ranks.run_outcomes(first_leaves, ranks=2, timeout_s=20)
    assert [outcome.kind for outcome in outcomes] == ["died", "value"]
    with RankPool(2, store="rank0") as pool:
        outcomes = pool.run_outcomes(first_leaves, ranks=2, timeout_s=20)
        assert [outcome.kind for outcome in outcomes] == ["died", "exception"]


def test_a_nursery_that_can_not_fork_or_start_says_why(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "starts_a_thread.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    with pytest.raises(RankError, match="2 threads and can't fork safely"):
        RankPool(2, preload=["starts_a_thread"]).start()
    with pytest.raises(RankError, match="No module named 'not_there'"):
        RankPool(2, preload=["not_there"]).start()


def meet(group, values):
    return group.gather("meet", values[group.rank])


def fail_alone(group):
    if group.rank == 1:
        raise ValueError("alone")
    return group.gather("never complete", None)


def test_threads_run_and_gather():
    assert run_threads(3, meet, ["a", "b", "c"]) == [["a", "b", "c"]] * 3


def test_threads_report_each_rank():
    outcomes = run_threads_outcomes(3, fail_alone, group_timeout_s=0.2)
    assert [type(outcome.exception) for outcome in outcomes] == [GroupTimeoutError, ValueError, GroupTimeoutError]
    with pytest.raises(RankError, match="alone"):
        run_threads(3, fail_alone, group_timeout_s=0.2)


def test_threads_have_a_deadline_that_shows_stacks():
    release = threading.Event()

    def wait(group):
        return release.wait(60) if group.rank == 1 else "fine"

    try:
        with pytest.raises(RankTimeoutError, match="release"):
            run_threads(2, wait, timeout_s=0.2)
    finally:
        release.set()


def test_a_function_reference_loads_in_this_process_too():
    reference = FunctionRef.of(meet)
    assert reference.resolve() is meet
    assert str(reference).endswith("test_testing_ranks.meet")
