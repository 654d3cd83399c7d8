"""Routes over NICs, planned from recorded facts: NIC by distance, rules for GIDs, overrides, order of reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_core.testing import topologies as fake
from comm_core.topology.facts import RankFacts
from comm_core.topology.ulysses import UlyssesPciePlan
from comm_core.transport.interface import Request, Verdict
from comm_pcie import routes
from comm_pcie.rdma import planning
from comm_pcie.rdma.facts import ROCE_V2, GidEntry, NicFacts, RdmaFacts, natural
from comm_pcie.rdma.planning import (
    GIDS_VARIABLE,
    NICS_VARIABLE,
    Overrides,
    choose_gid,
    choose_nic,
    distance,
    plan_nics,
)
from comm_pcie.transport import PcieTransport

LINK_LOCAL = "fe80000000000000bace f6fffe000001".replace(" ", "")


def ipv4(last: int) -> str:
    return f"{0:020x}ffffc0a801{last:02x}"


def gids(*entries: tuple[int, str, str]) -> tuple[GidEntry, ...]:
    return tuple(GidEntry(index, gid, kind, "eth0") for index, gid, kind in entries)


USUAL = gids(
    (0, LINK_LOCAL, "IB/RoCE v1"), (1, LINK_LOCAL, ROCE_V2), (2, ipv4(1), "IB/RoCE v1"), (3, ipv4(1), ROCE_V2)
)


def nic(number: int, path: str = "", entries: Sequence[GidEntry] = USUAL, **changes: Any) -> NicFacts:
    found = NicFacts(f"mlx5_{number}", "ACTIVE", "Ethernet", tuple(entries), "eth0", 0, path)
    return replace(found, **changes)


def machine(size: int, *, nics: Sequence[NicFacts] | None = None, **changes: Any) -> list[RankFacts]:
    """A machine of `size` GPUs in switches of two, with a NIC beside each GPU."""
    facts = fake.pcie_switch_pairs(size)
    placed = [
        replace(
            record, device=replace(record.device, pcie_path=f"pci0000:{i // 2:02x}/0000:{i // 2:02x}:0{1 + i % 2}.0")
        )
        for i, record in enumerate(facts)
    ]
    own = [nic(i, f"{record.device.pcie_path}/0000:a{i}:00.0") for i, record in enumerate(placed)]
    rdma = RdmaFacts(tuple(own if nics is None else nics), "sysfs", **changes)
    return [replace(record, plugins={"pcie": {"rdma": rdma.to_json()}}) for record in placed]


def assess(facts: Sequence[RankFacts], route: str = "auto", **environment: str) -> Verdict:
    request = Request("pcie", len(facts), "cuda", environment={routes.VARIABLE: route, **environment})
    return PcieTransport().assess(request, facts)


def planned(facts: Sequence[RankFacts], route: str = "auto", **environment: str) -> UlyssesPciePlan:
    verdict = assess(facts, route, **environment)
    assert verdict.eligible, verdict.reason
    return UlyssesPciePlan.from_json(verdict.plan)


# Records


def test_records_come_back_equal_and_odd_ones_are_errors() -> None:
    facts = RdmaFacts((nic(0, "pci0000:00/0000:00:01.0"), NicFacts("mlx5_1", gid_error="x")), "pyverbs", "", "no lib")
    assert RdmaFacts.from_json(facts.to_json()) == facts
    for odd in (
        None,
        [],
        {"nics": 3},
        {"nics": [3]},
        {"nics": [{}]},
        {"nics": [{"name": "a", "gids": [{"gid": "ff"}]}]},
    ):
        found = RdmaFacts.from_json(odd)
        assert found.nics == () and "can't be read" in found.error


def test_devices_are_ordered_by_their_numbers() -> None:
    names = ["mlx5_10", "mlx5_9", "mlx5_bond", "mlx5_0"]
    assert sorted(names, key=natural) == ["mlx5_0", "mlx5_9", "mlx5_10", "mlx5_bond"]


# NICs


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:01.0/0000:02:00.0", 2),
        ("pci0000:00/0000:00:01.0/0000:01:00.0", "pci0000:00/0000:00:02.0/0000:02:00.0", 4),
        ("pci0000:00/0000:00:01.0", "pci0000:40/0000:40:01.0/0000:41:00.0", 5),
        ("pci0000:00/0000:00:01.0", "pci0000:00/0000:00:01.0", 0),
        ("", "pci0000:00/0000:00:01.0", None),
    ],
)
def test_distance_counts_what_is_not_shared(a: str, b: str, expected: int | None) -> None:
    assert distance(a, b) == distance(b, a) == expected


def test_the_nearest_nic_is_taken_and_the_bus_decides_among_equals() -> None:
    """Ordinals play no role: CUDA_VISIBLE_DEVICES changes them."""
    record = machine(8)[0]
    near = nic(7, f"{record.device.pcie_path}/0000:a7:00.0")
    far = nic(0, "pci0000:70/0000:70:01.0/0000:71:00.0")
    assert choose_nic(record, RdmaFacts((far, near))) == (near, "")
    root = "pci0000:00/0000:00:09.0"
    equal = tuple(nic(n, f"{root}/0000:b{n}:00.0") for n in (2, 10, 3))
    for bus in range(0x10, 0x16):
        moved = replace(record, device=replace(record.device, pci_bus_id=f"0000:{bus:02x}:00.0"))
        chosen, _ = choose_nic(moved, RdmaFacts(equal))
        assert chosen is not None and chosen.name == ("mlx5_2", "mlx5_3", "mlx5_10")[bus % 3]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"pcie_error": "/dev/infiniband/uverbs2 is missing"}, "uverbs2 is missing"),
        ({"port_state": "DOWN"}, "its port is DOWN"),
        ({"link_layer": "InfiniBand"}, "link layer is InfiniBand"),
        ({"name": "bnxt_re0"}, "no mlx5 device"),
    ],
)
def test_nics_that_can_not_be_used_are_passed_over(changes: dict[str, Any], word: str) -> None:
    """J7: a device that is shown and can't be opened; a port that is down. With nothing else, the reason says why."""
    record = machine(8)[0]
    near = replace(nic(0, f"{record.device.pcie_path}/0000:a0:00.0"), **changes)
    far = nic(5, "pci0000:70/0000:70:01.0/0000:71:00.0")
    assert choose_nic(record, RdmaFacts((near, far)))[0] == far
    chosen, why = choose_nic(record, RdmaFacts((near,)))
    assert chosen is None and word in why
    # By name it is not passed over but refused.
    chosen, why = choose_nic(record, RdmaFacts((near, far)), near.name)
    assert chosen is None and word in why and NICS_VARIABLE in why


@pytest.mark.parametrize(
    ("rdma", "word"),
    [
        (RdmaFacts(error="PermissionError: no"), "can't be listed: PermissionError"),
        (RdmaFacts(), "there is no RDMA device"),
        (RdmaFacts((nic(0),), library_error="libibverbs.so.1: cannot open shared object file"), "libibverbs.so.1"),
        (RdmaFacts((nic(0),)), "PCI path of mlx5_0 is unknown"),
    ],
)
def test_a_missing_library_or_device_is_a_reason_of_the_plan(rdma: RdmaFacts, word: str) -> None:
    """J7: nothing fails, p2p is used."""
    facts = [replace(r, plugins={"pcie": {"rdma": rdma.to_json()}}) for r in machine(4)]
    plan = planned(facts)
    assert plan.transport == "p2p" and plan.gid_indices == ()
    assert word in assess(facts).reason
    forced = assess(facts, "rdma")
    assert not forced.eligible and word in forced.reason and "ranks 0, 1, 2, 3" in forced.reason


def test_what_is_unknown_of_the_gpu_needs_the_override() -> None:
    facts = [replace(r, device=replace(r.device, pcie_path="")) for r in machine(4)]
    assert "PCI path of its GPU is unknown" in assess(facts, "rdma").reason
    plan = planned(facts, "rdma", **{NICS_VARIABLE: "mlx5_3,mlx5_2,mlx5_1,mlx5_0"})
    assert plan.nic_names == ("mlx5_3", "mlx5_2", "mlx5_1", "mlx5_0")


# GIDs


@pytest.mark.parametrize(
    ("table", "expected", "word"),
    [
        (USUAL, 3, ""),
        # The first usable one may come late, and the lowest is taken.
        (gids((7, ipv4(2), ROCE_V2), (4, ipv4(3), ROCE_V2)), 4, ""),
        (gids((0, LINK_LOCAL, "IB/RoCE v1"), (1, LINK_LOCAL, ROCE_V2)), None, "link-local only"),
        (gids((1, LINK_LOCAL, ROCE_V2), (3, "20010db8" + "0" * 23 + "1", ROCE_V2)), None, "IPv6 only"),
        (gids((2, ipv4(1), "IB/RoCE v1")), None, "no RoCE v2 GID"),
        # A type that can't be read, as in containers, proves nothing.
        (gids((3, ipv4(1), "")), None, "no RoCE v2 GID"),
        (gids((3, "0" * 20 + "ffff" + "0" * 8, ROCE_V2)), None, "IPv6 only"),
        ((), None, "GID table is empty"),
    ],
)  # fmt: skip
def test_rules_for_gids(table: tuple[GidEntry, ...], expected: int | None, word: str) -> None:
    """J1: RoCE v2 with an IPv4 address, the lowest index; everything else is refused with what it is."""
    index, why = choose_gid(nic(0, entries=table))
    assert index == expected and word in why and (why == "") == (expected is not None)


def test_a_gid_by_name_must_be_one_that_works() -> None:
    """J1: the override is honoured, or refused with what it names."""
    assert choose_gid(nic(0), 3) == (3, "")
    for index, word in ((1, "link-local"), (2, "RoCE v1"), (9, "empty or does not exist")):
        found, why = choose_gid(nic(0), index)
        assert found is None and GIDS_VARIABLE in why and word in why
    assert "GID table can't be read" in choose_gid(nic(0, gid_error="the GID table can't be read: EIO"))[1]


def test_ranks_may_need_different_indices() -> None:
    """J1: an index for each device."""
    facts = machine(4)
    rdma = routes.rdma_facts(facts[0], "pcie")
    shifted = [
        replace(item, gids=(*gids((0, LINK_LOCAL, ROCE_V2)), GidEntry(3 + i, ipv4(i + 1), ROCE_V2, "eth0")))
        for i, item in enumerate(rdma.nics)
    ]
    changed = replace(rdma, nics=tuple(shifted)).to_json()
    facts = [replace(record, plugins={"pcie": {"rdma": changed}}) for record in facts]
    plan = planned(facts)
    assert plan.gid_indices == (3, 4, 5, 6)
    assert (assess(facts).plan or {})["gids"] == [ipv4(i + 1) for i in range(4)]
    assert "names index 3" in assess(facts, "rdma", **{GIDS_VARIABLE: "3,3,5,6"}).reason


# Routes


@pytest.mark.parametrize(
    ("size", "route", "expected"),
    [
        (1, "auto", "p2p"),
        (1, "rdma", "p2p"),
        (2, "auto", "p2p"),
        (2, "rdma", "rdma"),
        (4, "auto", "rdma"),
        (8, "auto", "rdma"),
        (8, "p2p", "p2p"),
        (4, "prefer-rdma", "rdma"),
        (8, "hybrid", "hybrid"),
        (8, "prefer-hybrid", "hybrid"),
    ],
)
def test_routes_of_a_machine_with_a_nic_for_each_gpu(size: int, route: str, expected: str) -> None:
    facts = machine(size)
    plan = planned(facts, route)
    assert (plan.transport, plan.requested_route) == (expected, route)
    over_nics = expected != "p2p"
    assert plan.nic_names == (tuple(f"mlx5_{i}" for i in range(size)) if over_nics else (None,) * size)
    assert plan.gid_indices == ((3,) * size if over_nics else ())
    assert plan.numa_nodes == tuple(2 * i // size for i in range(size))
    verdict = assess(facts, route)
    assert ("verified on an emulator only" in verdict.reason) == over_nics and f"route {expected}" in verdict.reason


def reasons() -> dict[str, tuple[list[RankFacts], str, dict[str, str]]]:
    """Everything that can be wrong, in the order in which it is told: each machine has all that come after it too."""
    shared = nic(0, "pci0000:00/0000:00:01.0/0000:a0:00.0")
    crowd = machine(8, nics=[shared])
    no_gid = machine(8, nics=[replace(shared, gids=())])
    one_node = [replace(r, device=replace(r.device, numa_node=0)) for r in crowd]
    few = {NICS_VARIABLE: "mlx5_0"}
    no_peers = [replace(r, peers={u: fake.APART for u in r.peers}) for r in machine(8, nics=[])]
    twins = [replace(r, device=replace(r.device, uuid="GPU-1")) for r in no_peers]
    hosts = [replace(r, host=replace(r.host, boot_id=str(r.rank // 4))) for r in twins]
    return {
        "hosts": (hosts, "span 2 hosts", few),
        "devices": (twins, "share a GPU", few),
        "peers": (no_peers, "no peer-to-peer access", few),
        "nic": (machine(8, nics=[]), "there is no RDMA device", few),
        "gid": (no_gid, "GID table is empty", few),
        "overrides": (crowd, "has 1 entries", few),
        "shared": (one_node, "each rank needs a NIC of its own", {}),
        "sides": ([replace(r, device=replace(r.device, numa_node=0)) for r in machine(8)], "two NUMA nodes", {}),
    }


@pytest.mark.parametrize("name", list(reasons()))
def test_reasons_come_in_order(name: str) -> None:
    """What stands in the way of every route is told before what stands in the way of some."""
    facts, word, environment = reasons()[name]
    verdict = assess(facts, "hybrid", **environment)
    assert not verdict.eligible and word in verdict.reason, verdict.reason
    if name in ("nic", "gid", "overrides", "shared", "sides"):
        assert "prefer-hybrid work" in verdict.reason
        fallback = assess(facts, "prefer-hybrid", **environment)
        assert fallback.eligible and word in fallback.reason
        assert UlyssesPciePlan.from_json(fallback.plan).transport == "p2p"
        assert word in str((fallback.plan or {})["route_reason"])


def test_a_route_is_agreed_before_it_is_planned() -> None:
    assert "must be one of auto, p2p" in assess(machine(4), "fast").reason
    assert "8 ranks, got 4" in assess(machine(4), "hybrid").reason
    unknown = [replace(r, device=replace(r.device, numa_node=None)) for r in machine(8)]
    assert "NUMA node of the GPU of ranks 0, 1" in assess(unknown, "hybrid").reason
    uneven = [replace(r, device=replace(r.device, numa_node=int(r.rank > 2))) for r in machine(8)]
    assert "four ranks on each of two NUMA nodes" in assess(uneven, "hybrid").reason
    # Which ranks are on which side does not matter.
    mixed = [replace(r, device=replace(r.device, numa_node=r.rank % 2)) for r in machine(8)]
    assert planned(mixed, "hybrid").transport == "hybrid"


def test_ranks_that_come_to_one_nic_are_found_on_the_whole_list_alone() -> None:
    shared = machine(4, nics=[nic(0, "pci0000:00/0000:00:01.0/0000:a0:00.0")])
    verdict = assess(shared, "rdma")
    assert "mlx5_0 by ranks 0, 1, 2, 3" in verdict.reason and NICS_VARIABLE in verdict.reason
    twice = assess(machine(4), "rdma", **{NICS_VARIABLE: "mlx5_0,mlx5_1,mlx5_1,mlx5_3"})
    assert "mlx5_1 by ranks 1, 2" in twice.reason
    assert "'mlx5_9'" in assess(machine(4), "rdma", **{NICS_VARIABLE: "mlx5_0,mlx5_9,mlx5_1,mlx5_3"}).reason


def test_old_or_failed_probes_have_no_nics() -> None:
    for plugins, word in (({}, "no RDMA device was looked for"), ({"pcie": {"error": "no answer"}}, "no answer")):
        facts = [replace(record, plugins=plugins) for record in machine(4)]
        assert planned(facts).transport == "p2p" and word in assess(facts, "rdma").reason


def test_the_verdict_depends_on_its_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: the order of the ranks and this process's environment change nothing."""
    first = assess(machine(8))
    monkeypatch.setenv(NICS_VARIABLE, "mlx5_1")
    monkeypatch.setenv(GIDS_VARIABLE, "1")
    assert assess(machine(8)[::-1]) == assess([RankFacts.from_json(r.to_json()) for r in machine(8)]) == first


@given(st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=4, max_size=4), st.data())
def test_a_plan_has_a_nic_for_each_rank_or_a_reason(sides: list[str], data: st.DataObject) -> None:
    """C7: whatever the facts are, NICs are different ones with an IPv4 RoCE v2 GID, or there is a reason."""
    paths = {"": "", "a": "pci0000:00/0000:00:01.0", "b": "pci0000:00/0000:00:02.0", "c": "pci0000:40/0000:40:01.0"}
    tables = [USUAL, (), gids((5, ipv4(9), ROCE_V2))]
    count = data.draw(st.integers(0, 5))
    nics = tuple(
        nic(n, f"{paths[data.draw(st.sampled_from('abc'))]}/0000:b{n}:00.0", data.draw(st.sampled_from(tables)))
        for n in range(count)
    )
    facts = [
        replace(record, device=replace(record.device, pcie_path=paths[side]))
        for record, side in zip(fake.pcie_root_complex(4), sides, strict=True)
    ]
    found = plan_nics(facts, [RdmaFacts(nics)] * 4)
    assert found == plan_nics(facts, [RdmaFacts(nics[::-1])] * 4)
    names = [choice.nic for choice in found.choices]
    if found.reason:
        bad = None in names or len(set(names)) < 4 or any(choice.gid_index is None for choice in found.choices)
        assert bad, found
        return
    by_name: Mapping[str, NicFacts] = {item.name: item for item in nics}
    assert len(set(names)) == 4
    for record, choice in zip(facts, found.choices, strict=True):
        entry = next(e for e in by_name[str(choice.nic)].gids if e.index == choice.gid_index)
        assert entry.type == ROCE_V2 and entry.ipv4 and entry.gid == choice.gid
        own = f"{record.device.pcie_path}/{record.device.pci_bus_id}"
        least = min(distance(own, item.pci_path) or 99 for item in nics)
        assert distance(own, by_name[str(choice.nic)].pci_path) == least


def test_overrides_are_read_once_for_all_ranks() -> None:
    environment = {NICS_VARIABLE: "mlx5_0,mlx5_2", GIDS_VARIABLE: "3,5"}
    assert Overrides.of(environment) == (("mlx5_0", "mlx5_2"), (3, 5))
    assert Overrides.of({}) == Overrides() and planning.Overrides().problem(4) == ""
