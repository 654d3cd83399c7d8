"""The decision protocol: one decision on all ranks, whatever differs or fails on one of them.

The ranks are threads with gathers of their own; the topologies are recorded ones, so every decision here can be
replayed on any machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core import plugins
from comm_core._json import JsonObject
from comm_core.errors import GroupTimeoutError, JointValueError, UlyssesBackendError
from comm_core.group import StoreGroup, thread_groups
from comm_core.plugins.discovery import Registry
from comm_core.selection import Asked, Decision, decide, resolve
from comm_core.selection.request import Merged, Offer, RankRequest, merge
from comm_core.testing import topologies
from comm_core.testing.ranks import on_threads
from comm_core.topology import predicates, recorded
from comm_core.topology.facts import RankFacts
from comm_core.topology.ulysses import rank_facts_to_ulysses
from comm_core.transport.interface import ProbeContext, Request, Transport, Verdict
from comm_core.ulysses.decision import decide_ulysses_backend

CUDA = torch.device("cuda", 0)
NCCL = {"cpu": "gloo", "cuda": "nccl"}
BUILT_IN = ("windows", "windows-ce", "nccl", "gloo")


class Fast(Transport):
    """A stand-in for a plugin's transport; needs an NVLink mesh."""

    version = "1.0"
    wire = 1

    def __init__(self, name: str = "nvlink", priority: int = 100, experimental: bool = False) -> None:
        self.name = name
        self.priority = priority
        self.experimental = experimental

    def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
        return predicates.assess_nvlink(facts, allow_shared_gpu=request.allow_shared_gpu)

    def open(self, stages: Any, request: Request, plan: JsonObject | None, device: Any) -> Any:
        raise AssertionError("a decision opens nothing")


class Group(StoreGroup):
    """A thread rank that claims to have a process group with NCCL."""

    @property
    def backends(self) -> dict[str, str]:
        return NCCL


def groups(size: int, timeout_s: float = 20) -> list[StoreGroup]:
    made = thread_groups(size, timeout_s=timeout_s)
    return [
        Group(own._channel, own.rank, size, name="faked", timeout_s=timeout_s)  # pyright: ignore[reportPrivateUsage]
        for own in made
    ]


def registry(*extra: Transport) -> Registry:
    base = plugins.registry()
    return Registry(list(base.reports), {**base.transports, **{item.name: item for item in extra}})


def ask(backend: object = "auto", **changes: Any) -> Asked:
    return replace(Asked("resolve", backend, CUDA, "bfloat16", 2, 1 << 20), **changes)


@pytest.fixture
def replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[RankFacts]], None]:
    def use(facts: Sequence[RankFacts]) -> None:
        path = tmp_path / "topology.json"
        recorded.dump(facts, path)
        monkeypatch.setenv("COMM_TOPOLOGY_FILE", str(path))

    return use


def decided(size: int, body: Callable[[StoreGroup], Decision]) -> Decision:
    """Run `body` on all ranks and return the decision, which all of them must share."""
    results = on_threads(groups(size), body)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    outcomes = {(r.backend, r.reason, str(r.considered), str(r.plan)) for r in results}
    assert len(outcomes) == 1
    return results[0]


def raised(results: Sequence[Any]) -> BaseException:
    """Return the error that all ranks raised."""
    assert all(isinstance(result, BaseException) for result in results), results
    assert {(type(result), str(result)) for result in results} == {(type(results[0]), str(results[0]))}
    return results[0]


def test_a_mesh_takes_the_plugin_and_says_what_was_verified(replay: Any) -> None:
    replay(topologies.nvlink_mesh(4))
    decision = decided(4, lambda group: resolve(group, ask(), registry(Fast())))
    assert decision.backend == "nvlink" and "NVLink" in decision.reason and decision.recorded
    assert [item.name for item in decision.fallbacks] == ["nccl"]


def test_without_the_plugin_the_fallback_says_what_would_help(replay: Any) -> None:
    replay(topologies.nvlink_mesh(2))
    decision = decided(2, lambda group: resolve(group, ask(), registry()))
    assert decision.backend == "nccl"
    reasons = {item.name: item.reason for item in decision.passed_over}
    assert "comm-mnnvl" in reasons["mnnvl"] and "would admit it" in reasons["mnnvl"]


@pytest.mark.parametrize(
    ("facts", "needle"),
    [
        (topologies.pairwise_bridges(4), "NVLink"),
        (topologies.two_islands(8), "NVLink"),
        (topologies.two_hosts(2), "host"),
        (topologies.mig_slices(2), "MIG"),
        (topologies.asymmetric(4), "2→1"),
        (topologies.without_nvml(topologies.nvlink_mesh(2)), "NVML"),
        (topologies.nvlink_mesh(3), "3"),
        (topologies.nvlink_mesh(8)[:7], "7"),
    ],
    ids=["bridges", "islands", "hosts", "mig", "asymmetric", "no-nvml", "three", "seven"],
)
def test_what_the_topology_does_not_admit_falls_back_or_raises_everywhere(
    replay: Any, facts: list[RankFacts], needle: str
) -> None:
    """A1, A8, A9, A11, C10, D15: auto falls back with the reason, a forced backend raises on every rank."""
    replay(facts)
    size = len(facts)
    decision = decided(size, lambda group: resolve(group, ask(), registry(Fast())))
    (passed_over,) = [item for item in decision.passed_over if item.name == "nvlink"]
    assert decision.backend == "nccl" and needle in passed_over.reason
    error = raised(on_threads(groups(size), lambda group: resolve(group, ask("nvlink"), registry(Fast()))))
    assert isinstance(error, UlyssesBackendError) and needle in str(error)
    assert error.reason == passed_over.reason, "the same words as where nobody named it"


def test_the_choice_does_not_depend_on_the_order_of_discovery(replay: Any) -> None:
    """C7: the same gathered record gives the same plan; dictionary orders and rank-local facts don't matter."""
    replay(topologies.nvlink_mesh(4))
    offers = [Fast("b", 5), Fast("a", 5), Fast("nvlink", 3), Fast("exp", 50, experimental=True)]

    def body(group: StoreGroup) -> Decision:
        mine = offers[:]
        random.Random(group.rank).shuffle(mine)
        return resolve(group, ask(), registry(*mine))

    decision = decided(4, body)
    order = [item.name for item in decision.considered if item.name not in ("mnnvl", "pcie")]
    assert decision.backend == "a" and order == [*("a", "b", "nvlink", "exp"), *BUILT_IN]


def test_experimental_transports_need_the_opt_in_of_every_rank(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: and then come before the fallbacks."""
    replay(topologies.nvlink_mesh(2))
    body = lambda group: resolve(group, ask(), registry(Fast("exp", 5, experimental=True)))  # noqa: E731
    decision = decided(2, body)
    assert decision.backend == "nccl" and "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS=1" in decision.passed_over[-1].reason
    monkeypatch.setenv("COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS", "1")
    assert decided(2, body).backend == "exp"


def test_naming_an_experimental_transport_needs_no_opt_in(replay: Any) -> None:
    replay(topologies.nvlink_mesh(2))
    decision = decided(2, lambda group: resolve(group, ask("exp"), registry(Fast("exp", experimental=True))))
    assert decision.backend == "exp"


MIXED = [
    ("backend", lambda rank: ask("nccl" if rank else "auto")),
    ("max_bytes", lambda rank: ask(max_bytes=100 + rank)),
    ("dtype", lambda rank: ask(dtype="float16" if rank else "bfloat16")),
    ("options", lambda rank: ask(options={"nvlink_kernel": "auto" if rank else "portable"})),
    ("device type", lambda rank: ask(device=torch.device("cpu") if rank else CUDA)),
]


@pytest.mark.parametrize(("name", "asked"), MIXED, ids=[name for name, _ in MIXED])
def test_ranks_that_ask_for_different_things_raise_together(replay: Any, name: str, asked: Any) -> None:
    """C2: with the value of every rank."""
    replay(topologies.nvlink_mesh(3))
    error = raised(on_threads(groups(3), lambda group: resolve(group, asked(group.rank), registry(Fast()))))
    assert isinstance(error, JointValueError) and set(error.per_rank) == {0, 1, 2} and name in str(error)


def test_variables_that_differ_raise_with_the_values_of_every_rank() -> None:
    """B6, C2."""
    asked = [
        RankRequest("auto", "cuda", environment={"NCCL_P2P_DISABLE": "1" if rank == 1 else ""}) for rank in range(3)
    ]
    with pytest.raises(JointValueError, match=r"environment.*rank 1.*NCCL_P2P_DISABLE': '1'"):
        merge("resolve", asked, 60)


@pytest.mark.parametrize("backend", [None, 3, True, b"nccl", ["auto"]])
def test_a_backend_that_is_no_text_is_refused_everywhere(replay: Any, backend: object) -> None:
    replay(topologies.nvlink_mesh(2))
    results = on_threads(
        groups(2), lambda group: resolve(group, ask(backend if group.rank else "auto"), registry(Fast()))
    )
    error = raised(results)
    assert isinstance(error, JointValueError) and type(backend).__name__ in error.per_rank[1]


def test_an_unknown_backend_lists_the_known_ones(replay: Any) -> None:
    replay(topologies.nvlink_mesh(2))
    error = raised(on_threads(groups(2), lambda group: resolve(group, ask("warp"), registry())))
    assert isinstance(error, JointValueError) and "'nvlink'" in str(error) and "commctl plugins" in str(error)


def test_a_plugin_on_some_ranks_only_is_no_candidate_and_can_not_be_forced(replay: Any) -> None:
    """C3, M8: the error says where it is missing."""
    replay(topologies.nvlink_mesh(3))

    def body(backend: str) -> Callable[[StoreGroup], Decision]:
        return lambda group: resolve(group, ask(backend), registry(*([] if group.rank == 1 else [Fast()])))

    assert decided(3, body("auto")).backend == "nccl"
    error = raised(on_threads(groups(3), body("nvlink")))
    assert isinstance(error, UlyssesBackendError) and "on rank 1" in str(error) and "comm-nvlink" in str(error)


def test_ranks_with_different_protocols_of_a_plugin_do_not_use_it(replay: Any) -> None:
    replay(topologies.nvlink_mesh(2))

    def body(group: StoreGroup) -> Decision:
        fast = Fast()
        fast.wire = 1 + group.rank
        return resolve(group, ask(), registry(fast))

    decision = decided(2, body)
    reasons = {item.name: item.reason for item in decision.considered}
    assert decision.backend == "nccl" and "different protocols" in reasons["nvlink"]


def test_releases_that_differ_in_priority_still_decide_alike() -> None:
    """The order of preference is rank 0's for all; else each rank could prefer another transport."""
    asked = [
        RankRequest(
            "auto", "cpu", plugins={"a": Offer("1", 1, 5 + rank, False), "b": Offer("1", 1, 6 - rank, rank == 1)}
        )
        for rank in range(2)
    ]
    assert merge("resolve", asked, 60).common == ("b", "a")


@pytest.mark.parametrize("failure", ["raises", "hangs", "not json", "exits"])
def test_a_probe_that_fails_on_one_rank_is_a_fact_and_no_hang(replay: Any, failure: str) -> None:
    """C3, F13: the rank votes all the same."""
    replay(topologies.nvlink_mesh(2))

    class Probing(Fast):
        def probe(self, context: ProbeContext) -> JsonObject:
            if context.rank == 1:
                if failure == "raises":
                    raise OSError("no device file")
                if failure == "exits":
                    raise SystemExit(1)
                if failure == "hangs":
                    time.sleep(5)
                return {"value": object()}  # type: ignore[dict-item]
            return {"ok": True}

        def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
            errors = [
                f"rank {item.rank}: {item.plugins[self.name]}"
                for item in facts
                if "ok" not in str(item.plugins[self.name])
            ]
            return Verdict(not errors, "; ".join(errors) or "all probes answered")

    seconds = 1.0 if failure == "hangs" else 20
    results = on_threads(groups(2, seconds), lambda group: resolve(group, ask(), registry(Probing())))
    assert {result.backend for result in results} == {"nccl"}
    (passed_over,) = [item for item in results[0].passed_over if item.name == "nvlink"]
    assert "rank 1" in passed_over.reason


@pytest.mark.parametrize("failure", ["raises", "differs", "not json"])
def test_an_assessment_that_fails_or_differs_removes_the_transport(replay: Any, failure: str) -> None:
    """C4, C7: verdicts are compared; a transport on which the ranks differ is out, or raises where it was forced."""
    replay(topologies.nvlink_mesh(2))

    def body(backend: str) -> Callable[[StoreGroup], Decision]:
        def run(group: StoreGroup) -> Decision:
            class Odd(Fast):
                def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
                    if failure == "raises" and group.rank == 1:
                        raise KeyError("clique")
                    if failure == "not json":
                        return Verdict(True, "fine", {"set": {1}})  # type: ignore[dict-item]
                    return Verdict(True, "fine", {"rank": group.rank})

            return resolve(group, ask(backend), registry(Odd()))

        return run

    results = on_threads(groups(2), body("auto"))
    assert {result.backend for result in results} == {"nccl"}
    forced = on_threads(groups(2), body("nvlink"))
    assert all(isinstance(result, UlyssesBackendError) for result in forced)


def test_two_ranks_on_one_gpu_are_refused_with_the_fix() -> None:
    """E7: the usual outcome of a forgotten set_device; legal only for testing, and then it is shown."""
    asked = [RankRequest("nccl", "cuda", device="GPU-a", group_backends=NCCL) for _ in range(2)]
    with pytest.raises(JointValueError, match="set_device"):
        merge("resolve", asked, 60)
    shared = [replace(item, environment={"COMM_ALLOW_SHARED_GPU": "1"}) for item in asked]
    assert merge("resolve", shared, 60).request.allow_shared_gpu


def test_shared_gpus_are_shown_in_the_decision(replay: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    replay(topologies.same_gpu(topologies.nvlink_mesh(4)))
    body = lambda group: resolve(group, ask(), registry(Fast()))  # noqa: E731
    assert decided(4, body).backend == "nccl"
    monkeypatch.setenv("COMM_ALLOW_SHARED_GPU", "1")
    decision = decided(4, body)
    assert decision.backend == "nvlink" and decision.shared_gpu


def test_a_fallback_by_name_ends_after_one_gather_and_probes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> RankFacts:
        raise AssertionError("probed")

    monkeypatch.setattr("comm_core.topology.probe.probe_rank", never)
    made = groups(2)
    asked = ask("gloo", device=torch.device("cpu"))
    results = on_threads(made, lambda group: (resolve(group, asked, registry()), group.gather("after", None)))
    assert results[0][0].backend == "gloo" and results[0][0].facts == ()
    # Gathers are numbered: the one after the decision is the second of this group.
    keys = made[0].store.keys()  # type: ignore[attr-defined]
    assert {key.split("/")[2] for key in keys} == {"1"}


def test_nccl_by_name_needs_nccl_and_cuda(replay: Any) -> None:
    replay(topologies.nvlink_mesh(2))
    for asked, needle in (
        (ask("nccl", device=torch.device("cpu")), "moves cuda tensors"),
        (ask("nccl"), "has no nccl"),
    ):
        made = thread_groups(2)
        error = raised(on_threads(made, lambda group, asked=asked: resolve(group, asked, registry())))
        assert isinstance(error, UlyssesBackendError) and needle in str(error)


def test_a_device_that_can_not_be_asked_raises_everywhere() -> None:
    error = raised(on_threads(groups(2), lambda group: resolve(group, ask(), registry())))
    assert isinstance(error, JointValueError) and "cuda:0 can't be asked for its identity" in str(error)


def test_a_rank_that_does_not_come_is_named(replay: Any) -> None:
    """B4: at whichever of the three gathers it is missing."""

    replay(topologies.nvlink_mesh(2))

    def body(group: StoreGroup) -> Any:
        return None if group.rank == 1 else resolve(group, ask(), registry())

    result = on_threads(groups(2, 0.3), body)[0]
    assert isinstance(result, GroupTimeoutError) and result.missing == (1,) and "requests" in str(result)


def test_only_agreed_verdicts_count() -> None:
    considered = (decide.Considered("a", True, "x"), decide.Considered("b", True, "y"))
    digests = decide.considered_digests(considered)
    assert decide.agree(considered, [digests, digests]) == considered
    other = {**digests, "a": "0"}
    assert [item.eligible for item in decide.agree(considered, [digests, other])] == [False, True]
    for broken in ({}, None, []):
        assert not any(item.eligible for item in decide.agree(considered, [digests, broken]))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.data())
def test_the_specified_decision_agrees_with_the_predicates(
    size: int, experimental: bool, data: st.DataObject
) -> None:
    """`decide_ulysses_backend` answers from the same predicates, for any pattern of missing pairs."""
    facts = topologies.nvlink_mesh(size)
    for _ in range(data.draw(st.integers(0, 2))):
        i, j = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, size - 1))
        if i != j:
            facts = topologies.with_pair(
                facts, i, j, **{data.draw(st.sampled_from(["nvlink", "peer_access"])): False}
            )
    records = [rank_facts_to_ulysses(item) for item in facts]
    before = repr(records)
    decision = decide_ulysses_backend("auto", records, allow_experimental_auto=experimental)
    nvlink, pcie = predicates.assess_nvlink(facts), predicates.assess_pcie(facts)
    if nvlink.eligible:
        assert decision.backend == "nvlink" and decision.pcie_plan is None
    elif experimental and pcie.eligible:
        assert decision.backend == "pcie" and decision.pcie_plan is not None
        assert decision.pcie_plan.transport == "p2p"
    else:
        assert decision.backend == "nccl" and decision.reason
    assert decide_ulysses_backend("auto", records, allow_experimental_auto=experimental) == decision
    assert repr(records) == before
    if not nvlink.eligible:
        with pytest.raises(UlyssesBackendError, match="nvlink"):
            decide_ulysses_backend("nvlink", records)


def test_cpu_ranks_decide_for_gloo() -> None:
    records = [rank_facts_to_ulysses(item) for item in topologies.cpu_host(4)]
    assert decide_ulysses_backend("auto", records).backend == "gloo"


@pytest.mark.parametrize(("requested", "error"), [("warp", ValueError), (1, ValueError), (True, TypeError)])
def test_the_specified_decision_refuses_what_it_does_not_know(requested: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        decide_ulysses_backend(requested, [rank_facts_to_ulysses(item) for item in topologies.cpu_host(2)])
    with pytest.raises(ValueError, match="one record a rank"):
        decide_ulysses_backend("auto", [])


def test_requests_of_a_newer_peer_are_read() -> None:
    value = {**RankRequest("auto", "cpu").to_json(), "novelty": 1}
    assert RankRequest.from_json(value) == RankRequest("auto", "cpu")
    assert Merged.__dataclass_fields__.keys() == {"request", "common", "absent", "offers"}


def test_probes_that_hang_take_no_more_than_half_of_the_deadline_together(replay: Any) -> None:
    """B2: and one that works is still heard."""

    class Probing(Fast):
        def __init__(self, name: str, hangs: Sequence[int] = ()) -> None:
            super().__init__(name)
            self.hangs = hangs

        def probe(self, context: ProbeContext) -> JsonObject:
            if context.rank in self.hangs:
                time.sleep(4)
            return {"fine": True}

    replay(topologies.nvlink_mesh(2))
    found = registry(Probing("a", [1]), Probing("b", [1]), Probing("c"))
    results = on_threads(groups(2, timeout_s=2), lambda group: resolve(group, ask(), found))
    decisions = [result for result in results if isinstance(result, Decision)]
    assert len(decisions) == 2, results
    facts = decisions[0].facts[1].plugins
    assert facts["c"] == {"fine": True}
    assert "error" in str(facts["a"]) and "error" in str(facts["b"])


def test_groups_with_different_backends_do_not_decide_together() -> None:
    asked = [RankRequest("auto", "cpu", group_backends={"cpu": "gloo" if rank else "mpi"}) for rank in range(2)]
    with pytest.raises(JointValueError, match="process group backends"):
        merge("resolve", asked, 60)


def test_an_offer_of_a_newer_peer_is_read() -> None:
    offer = {"version": "1", "wire": 1, "priority": 2, "experimental": False, "novelty": 3}
    assert Offer.from_json(offer) == Offer("1", 1, 2, False)


def test_a_plugin_can_not_change_the_request(replay: Any) -> None:
    """What one assessment does to its argument must not reach the others, nor what core goes by."""
    replay(topologies.nvlink_mesh(2))

    class Meddling(Fast):
        def assess(self, request: Request, facts: Sequence[RankFacts]) -> Verdict:
            request.environment["COMM_CHECK"] = "1"  # type: ignore[index]
            request.options["nvlink_kernel"] = "cake"  # type: ignore[index]
            return super().assess(request, facts)

    decision = decided(2, lambda group: resolve(group, ask(options={"nvlink_kernel": "auto"}), registry(Meddling())))
    assert decision.request.environment["COMM_CHECK"] == "0"
    assert decision.request.options == {"nvlink_kernel": "auto"}
