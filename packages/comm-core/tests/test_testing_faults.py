"""The transport with faults, and what the communicator makes of each of them."""

from __future__ import annotations

import gc
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from comm_core import UlyssesCommunicator
from comm_core.errors import ArgumentValueError, CommError, TransportError
from comm_core.testing.faults import (
    EXIT_CODE,
    KINDS,
    STAGES,
    Fault,
    InjectedError,
    Injector,
    Ledger,
    every_fault,
    installed,
)
from comm_core.testing.reference import bits, make_input
from comm_core.testing.reference import scatter_heads as expected_scatter


def test_only_faults_that_exist_can_be_asked_for():
    for bad in ({"stage": "nowhere"}, {"kind": "odd"}, {"stage": "close", "kind": "wrong_data"}, {"rank": -1}):
        with pytest.raises(ArgumentValueError):
            Fault(**{"stage": "map", "rank": 0, "kind": "raise", **bad})
    faults = every_fault(2)
    assert {fault.stage for fault in faults} == set(STAGES) and {fault.kind for fault in faults} == set(KINDS)
    assert len(faults) == len(set(faults)) == 2 * (len(STAGES) * len(KINDS) - 3)


def test_a_fault_spoils_the_passes_it_names():
    injector = Injector(1, [Fault("map", 1, "raise", after=2, times=2), Fault("map", 0, "raise")])
    outcomes = []
    for _ in range(6):
        try:
            injector.fire("map")
            outcomes.append(True)
        except InjectedError:
            outcomes.append(False)
    assert outcomes == [True, True, False, False, True, True]
    assert Fault("map", 1, "raise", after=1, times=0).hits(10**6)


def test_each_kind_does_what_it_says():
    def fire(kind, stage="build", **more):
        return Injector(0, [Fault(stage, 0, kind, **more)]).fire(stage)

    assert fire("wrong_data") is True
    started = time.monotonic()
    assert fire("late", delay_s=0.1) is False
    assert time.monotonic() - started >= 0.1
    with pytest.raises(SystemExit):
        fire("system_exit")
    with pytest.raises(InjectedError, match="at build on rank 0"):
        fire("raise")
    with pytest.raises(TransportError):
        fire("raise", stage="exchange")


def test_the_ledger_knows_what_is_held():
    ledger = Ledger()
    for resource in ("a", "b", "a"):
        ledger.acquire(resource)
    ledger.release("a")
    assert ledger.held() == ["b", "a"]
    ledger.release("a")
    with pytest.raises(AssertionError, match="'a' is released and not held"):
        ledger.release("a")
    assert ledger.held() == ["b"]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def use(group, faults, backend="fake"):
    """Open, exchange twice, close; return how far this rank came, what it saw, and what it still holds."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    xs = [make_input(0, peer, (1, 2, 2 * size, 3), torch.float16) for peer in range(size)]
    expected = expected_scatter(xs)[rank]
    result = {"step": "open", "error": "", "backend": backend, "wrong": 0}
    with installed(rank, faults) as injector:
        files, comm = open_files(), None
        try:
            comm = UlyssesCommunicator(group, max_bytes=1 << 12, dtype=torch.float16, backend=backend)
            result.update(step="exchange", backend=comm.backend)
            for _ in range(2):
                result["wrong"] += not torch.equal(bits(comm.scatter_heads(xs[rank])), bits(expected))
            result["step"] = "close"
            comm.close()
            result["step"] = "done"
        except (CommError, InjectedError, SystemExit) as caught:
            result["error"] = f"{type(caught).__name__}: {caught}"
        if result["step"] == "close":
            # It failed: what is left is released by another call, here alone where the others did not come.
            comm.close()
        del comm
        gc.collect()
        return {
            **result,
            "held": injector.ledger.held(),
            "files": open_files() - files,
            "events": injector.ledger.events,
        }


def use_after_each(group, faults):
    """Go through many faults on one group: each must leave the group usable for the next."""
    return [use(group, [fault]) for fault in faults] + [use(group, [])]


@pytest.mark.parametrize(
    ("kind", "size"),
    [("late", 2), *((kind, size) for kind in ("raise", "system_exit", "wrong_data") for size in (2, 4))],
)
def test_a_fault_on_one_rank_ends_the_same_way_on_all_and_leaves_nothing(ranks, kind, size):
    """E6: at every stage, on every rank; and the group can be used again at once."""
    stages = [stage for stage in STAGES if not (stage == "exchange" and kind in ("raise", "system_exit"))]
    faults = [replace(fault, delay_s=0.02) for fault in every_fault(size, stages=stages, kinds=[kind])]
    per_rank = ranks.run(use_after_each, faults, ranks=size, env={"COMM_TIMEOUT_S": "10"}, timeout_s=60)
    for fault, *results in zip([*faults, None], *per_rank, strict=True):
        assert [(result["held"], result["files"]) for result in results] == [([], 0)] * size, fault
        # A close that fails once is tried again; wrong bytes are seen by the rank that got them, and by it alone.
        fine = fault is None or kind == "late" or fault.stage in ("exchange", "close")
        assert [result["step"] for result in results] == ["done" if fine else "open"] * size, (fault, results)
        # One error for all, that names the rank; a rank that is waited for, or is elsewhere, would make another.
        # (Between two steps the others learn of it at their next one; the text then says "at different steps".)
        errors = {result["error"] for result in results}
        assert len(errors) == 1 or (fault is not None and fault.stage == "open"), (fault, results)
        assert fine or all(f"rank {fault.rank}" in error for error in errors), (fault, results)
        wrong = fault is not None and fault.stage == "exchange" and kind == "wrong_data"
        expected = [wrong and fault.rank == rank for rank in range(size)]
        assert [result["wrong"] for result in results] == expected, fault


@pytest.mark.parametrize(
    ("stage", "kind"),
    [(stage, "exit") for stage in STAGES if stage != "exchange"] + [(stage, "hang") for stage in ("map", "close")],
)
def test_a_rank_that_is_gone_is_named_by_the_others(ranks, stage, kind):
    """B4: nobody waits longer than the deadline for a rank that died or hangs, at any stage."""
    outcomes = ranks.run_outcomes(
        use, [Fault(stage, 1, kind)], ranks=3, env={"COMM_TIMEOUT_S": "1"}, timeout_s=5, fresh=True
    )
    assert outcomes[1].kind == {"exit": "died", "hang": "timeout"}[kind]
    assert kind == "hang" or outcomes[1].exit_code == EXIT_CODE
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "value", outcome.text
        assert "GroupTimeoutError" in outcome.value["error"]
        assert re.search(r"no word from ranks? 1\b", outcome.value["error"])


def test_a_probe_that_hangs_is_a_fact_and_not_a_missing_rank(ranks):
    """B2: the rank goes on without it, and the group refuses the transport together."""
    results = ranks.run(use, [Fault("probe", 1, "hang")], ranks=2, env={"COMM_TIMEOUT_S": "3"}, fresh=True)
    assert [result["step"] for result in results] == ["open", "open"]
    assert results[0]["error"] == results[1]["error"]
    assert "rank 1: the probe of 'fake' gave" in results[0]["error"]


def test_auto_falls_back_together_and_says_why(ranks):
    results = ranks.run(use, [Fault("selftest", 1, "raise")], "auto", ranks=2, timeout_s=30)
    assert [result["backend"] for result in results] == ["gloo", "gloo"]
    assert [(result["step"], result["held"]) for result in results] == [("done", [])] * 2


def test_no_memory_is_freed_while_a_peer_still_maps_it(ranks):
    """E4: every rank has given up its mappings before any rank frees what they map."""
    results = ranks.run(use, [], ranks=3, timeout_s=30)
    unmapped = [e.time_s for r in results for e in r["events"] if e.action == "release" and "mapping" in e.resource]
    freed = [e.time_s for r in results for e in r["events"] if e.action == "release" and e.resource == "window"]
    assert len(unmapped) == 6 and len(freed) == 3
    assert max(unmapped) < min(freed)


def close_needs_retries(group, times):
    with installed(dist.get_rank(group), [Fault("close", 0, "raise", times=times)]) as injector:
        comm = UlyssesCommunicator(group, max_bytes=1 << 12, dtype=torch.float16, backend="fake")
        try:
            comm.close()
            first = None
        except CommError as error:
            first = str(error)
        held = injector.ledger.held()
        comm.close()
        return first, held, injector.ledger.held()


def test_a_close_that_fails_may_be_called_again(ranks):
    assert ranks.run(close_needs_retries, 2, ranks=2, timeout_s=30) == [(None, [], [])] * 2
    first, second = ranks.run(close_needs_retries, 3, ranks=2, timeout_s=30)
    assert first[0] == second[0] and "rank 0: InjectedError" in first[0]
    assert first[1] == ["module", "window"] and first[2] == []
