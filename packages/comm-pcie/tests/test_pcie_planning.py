"""Planning: routes, PCIe paths, profiles and hints, from NVML's word and from trees of sysfs; verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pcie_sysfs as sysfs
import pytest

from comm_core.testing import topologies as fake
from comm_core.topology.facts import RankFacts
from comm_core.topology.pcie import SWITCH_LOCAL, ancestor, common_ancestor, pcie_path
from comm_core.topology.ulysses import UlyssesPciePlan
from comm_core.transport.interface import ProbeContext, Request, Verdict
from comm_pcie import hints, routes
from comm_pcie.transport import PcieTransport

GPUS = [f"0000:{0x10 + i:02x}:00.0" for i in range(8)]


def request(size: int, route: str = "auto", **changes: Any) -> Request:
    return Request("pcie", size, "cuda", environment={routes.VARIABLE: route, **changes})


def assess(facts: Sequence[RankFacts], route: str = "auto", **changes: Any) -> Verdict:
    return PcieTransport().assess(request(len(facts), route, **changes), facts)


def place(facts: Sequence[RankFacts], root: Path, *, nvml: bool = False) -> list[RankFacts]:
    """Return `facts` as the tree has them; without NVML's word on common ancestors, unless `nvml`."""
    found = []
    for record in facts:
        device = replace(record.device, pcie_path=pcie_path(record.device.pci_bus_id, root))
        peers = record.peers if nvml else {u: replace(p, common_ancestor=None) for u, p in record.peers.items()}
        found.append(replace(record, device=device, peers=peers))
    return found


# Paths


ROOT_COMPLEX = {gpu: f"pci0000:{0x10 + i:02x}/0000:{0x10 + i:02x}:01.0" for i, gpu in enumerate(GPUS)}
SWITCH_PAIRS = {
    gpu: f"pci0000:{i // 4:02x}/0000:{i // 4:02x}:0{1 + i // 2 % 2}.0/0000:8{i // 2}:00.0/0000:9{i // 2}:0{i % 2}.0"
    for i, gpu in enumerate(GPUS)
}


def test_a_path_is_read_from_the_tree(tmp_path: Path) -> None:
    root = sysfs.tree(tmp_path, SWITCH_PAIRS)
    assert pcie_path(GPUS[0], root) == "pci0000:00/0000:00:01.0/0000:80:00.0/0000:90:00.0"
    for nothing in ("", "0000:ff:00.0", "../../etc"):
        assert pcie_path(nothing, root) == ""
    # A device that hangs in the air (a virtual machine's own bus) has none.
    (tmp_path / "devices" / "vmbus" / "0000:77:00.0").mkdir(parents=True)
    (tmp_path / "bus/pci/devices/0000:77:00.0").symlink_to(tmp_path / "devices/vmbus/0000:77:00.0")
    assert pcie_path("0000:77:00.0", root) == ""
    loop = tmp_path / "bus/pci/devices/0000:78:00.0"
    loop.symlink_to(loop)
    assert pcie_path("0000:78:00.0", root) == ""


@pytest.mark.parametrize(
    ("a", "b", "numa", "expected"),
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0", "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0",
         (0, 0), "single"),
        # A switch below a switch on one side.
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:00.0",
         "pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0/0000:05:00.0/0000:06:00.0", (0, 0), "multiple"),
        ("pci0000:00/0000:00:01.0", "pci0000:00/0000:00:02.0", (0, 0), "hostbridge"),
        ("pci0000:00/0000:00:01.0", "pci0000:40/0000:40:01.0", (0, 0), "node"),
        ("pci0000:00/0000:00:01.0", "pci0000:40/0000:40:01.0", (0, 1), "system"),
        ("pci0000:00/0000:00:01.0", "pci0000:40/0000:40:01.0", (None, 1), None),
        ("", "pci0000:40/0000:40:01.0", (0, 0), None),
        ("pci0000:00", "pci0000:00", (0, 0), "hostbridge"),
    ],
)  # fmt: skip
def test_what_two_paths_have_in_common(a: str, b: str, numa: tuple[int | None, int | None], expected: str) -> None:
    """In NVML's words; what is not known is not made up."""
    assert common_ancestor(a, b, numa) == expected
    assert common_ancestor(b, a, numa[::-1]) == expected


def test_sysfs_is_asked_where_nvml_says_nothing(tmp_path: Path) -> None:
    """A6: without NVML the tree answers; NVML's word stands where it has one; other hosts are not compared."""
    root = sysfs.tree(tmp_path, SWITCH_PAIRS)
    facts = place(fake.pcie_root_complex(8), root)
    assert ancestor(facts[0], facts[1]) == "single"
    assert ancestor(facts[0], facts[2]) == "hostbridge"
    assert ancestor(facts[0], facts[7]) == "system"
    with_nvml = place(fake.pcie_root_complex(8), root, nvml=True)
    assert ancestor(with_nvml[0], with_nvml[1]) == "hostbridge"
    # One direction is enough: NVML's answer is symmetric.
    one_way = fake.with_pair(facts, 1, 0, common_ancestor="system")
    assert ancestor(one_way[0], one_way[1]) == "system"
    hosts = fake.two_hosts(1)
    assert ancestor(hosts[0], hosts[1]) is None
    same = fake.same_gpu(fake.pcie_root_complex(2))
    assert ancestor(same[0], same[1]) is None


# Profiles


def test_profiles_from_nvml_and_from_sysfs_agree(tmp_path: Path) -> None:
    by_nvml = {"complex": fake.pcie_root_complex(8), "pairs": fake.pcie_switch_pairs(8)}
    assert routes.profile(by_nvml["complex"]) == "rootcplx-noswitch"
    assert routes.profile(by_nvml["pairs"]) == "pcieswitch-pairs"
    for name, devices in (("complex", ROOT_COMPLEX), ("pairs", SWITCH_PAIRS)):
        root = sysfs.tree(tmp_path / name, devices, dict.fromkeys(GPUS, 0))
        facts = place(fake.pcie_root_complex(8), root)
        assert routes.profile(facts) == routes.profile(by_nvml[name])


def test_what_is_unknown_claims_less() -> None:
    """A6, C7: a machine that says nothing is taken for one without switches; the order of ranks does not matter."""
    bare = [replace(r, peers={u: replace(p, common_ancestor=None) for u, p in r.peers.items()})
            for r in fake.pcie_switch_pairs(8)]  # fmt: skip
    assert routes.profile(bare) == "rootcplx-noswitch"
    assert set(routes.pairs(bare).values()) == {None}
    one = fake.with_pair(bare, 2, 3, common_ancestor="single")
    assert routes.profile(one) == routes.profile(one[::-1]) == "pcieswitch-pairs"
    for level in ("internal", "single", "multiple", "hostbridge", "node", "system"):
        only = fake.with_pair(bare, 0, 1, common_ancestor=level)
        assert (routes.profile(only) == "pcieswitch-pairs") == (level in SWITCH_LOCAL)
    # Only the pairs of this group count.
    assert routes.profile(fake.select(fake.pcie_switch_pairs(8), (0, 2, 4, 6))) == "rootcplx-noswitch"


# Routes


@pytest.mark.parametrize("route", ["auto", "p2p", "prefer-rdma", "prefer-hybrid"])
def test_routes_that_can_be_had(route: str) -> None:
    verdict = assess(fake.pcie_switch_pairs(4), route)
    assert verdict.eligible
    plan = UlyssesPciePlan.from_json(verdict.plan)
    assert (plan.transport, plan.requested_route, plan.gid_indices) == ("p2p", route, ())
    assert plan.numa_nodes == (0, 0, 1, 1) and plan.nic_names == (None,) * 4
    assert (verdict.plan or {})["profile"] == "pcieswitch-pairs" and "pcieswitch-pairs" in verdict.reason
    # Of "auto" nobody is warned: most machines have no NIC for each GPU.
    assert ("can't be planned" in verdict.reason) == (route != "p2p")


@pytest.mark.parametrize("route", ["rdma", "hybrid", "nonsense", "prefer-p2p"])
def test_routes_that_can_not_be_had_are_refused_with_what_is_missing(route: str) -> None:
    """C3: asked for by name, so nothing else is taken."""
    verdict = assess(fake.pcie_switch_pairs(8), route)
    assert not verdict.eligible and verdict.plan is None and routes.VARIABLE in verdict.reason
    assert ("no RDMA device was looked for" in verdict.reason) == (route in ("rdma", "hybrid"))
    assert "must be one of auto, p2p" in verdict.reason or f"prefer-{route} work" in verdict.reason


def test_missing_peer_access_is_told_before_a_missing_nic() -> None:
    """Every route needs it."""
    assert "no peer-to-peer access" in assess(fake.asymmetric(4), "rdma").reason


# Who may use it


@pytest.mark.parametrize("size", range(1, 10))
def test_groups_of_one_two_four_and_eight(size: int) -> None:
    """F16: as many as the matrix of peer access allows, with or without NVLink."""
    for facts in (fake.pcie_root_complex(size), fake.nvlink_mesh(size)):
        verdict = assess(facts)
        assert verdict.eligible == (size in (1, 2, 4, 8)), verdict
        assert verdict.eligible or str(size) in verdict.reason


def test_islands_are_no_obstacle_and_missing_directions_are() -> None:
    """A8, A11: NVLink is not asked for; each ordered pair needs peer access; the reason lists those without."""
    assert assess(fake.two_islands(8)).eligible
    assert assess(fake.select(fake.two_islands(8), (0, 1, 4, 5))).eligible
    verdict = assess(fake.asymmetric(4))
    assert not verdict.eligible and "2→1" in verdict.reason
    gone = fake.with_pair(fake.pcie_root_complex(4), 3, 0, peer_access=False)
    assert "3→0" in assess(gone).reason and "0→3" not in assess(gone).reason


def test_unknown_and_absent_facts_never_admit() -> None:
    """A6: no NVML (MIG unknown), a pair that CUDA was not asked about."""
    assert not assess(fake.without_nvml(fake.pcie_root_complex(2))).eligible
    unknown = fake.with_pair(fake.pcie_root_complex(2), 0, 1, peer_access=None)
    assert not assess(unknown).eligible and "0→1" in assess(unknown).reason


@pytest.mark.parametrize("value", ["1", "true"])
def test_who_has_forbidden_peer_access_is_heeded(value: str) -> None:
    """B6: on any rank."""
    facts = fake.with_environment(fake.pcie_root_complex(2), NCCL_P2P_DISABLE=value)
    assert "NCCL_P2P_DISABLE" in assess(facts).reason and not assess(facts).eligible


def test_a_copy_that_works_proves_nothing() -> None:
    """B3: where CUDA denies the access, a framework's copy goes through the host; the answer is no."""
    denied = fake.with_pair(fake.pcie_root_complex(2), 0, 1, peer_access=False)
    assert "CUDA denies peer access for 0→1" in assess(denied).reason
    denied = fake.with_pair(fake.pcie_root_complex(2), 1, 0, p2p_write=False)
    assert "NVML denies peer access for 1→0" in assess(denied).reason


def test_ranks_on_one_gpu_need_the_opt_in() -> None:
    facts = [replace(record, rank=rank) for rank, record in enumerate(fake.same_gpu(fake.pcie_root_complex(8)))]
    assert not assess(facts).eligible
    verdict = assess(facts, COMM_ALLOW_SHARED_GPU="1")
    assert verdict.eligible and (verdict.plan or {})["blocks_per_peer"] == 4


def test_the_verdict_depends_on_its_arguments_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """C7."""
    facts = fake.pcie_switch_pairs(4)
    first = assess(facts)
    monkeypatch.setenv(routes.VARIABLE, "rdma")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert assess([RankFacts.from_json(record.to_json()) for record in facts]) == first


# Hints


def test_acs_and_iommu_are_told_and_decide_nothing(tmp_path: Path) -> None:
    """B2: a hint for people. What can't be read is said to be so."""
    root = sysfs.tree(tmp_path, SWITCH_PAIRS)
    path = pcie_path(GPUS[0], root)
    redirecting, plain, port = path.split("/")[1:]
    for address, content in (
        (redirecting, sysfs.acs_config(0b0001_1101)),
        (plain, sysfs.acs_config(0b0000_0001)),
        (port, sysfs.acs_config(0)[:64]),
    ):
        (root / "bus/pci/devices" / address / "config").write_bytes(content)
    found = hints.read_hints(GPUS[0], path, root)
    assert found == {
        "iommu": False,
        "acs": {redirecting: ["request redirect", "completion redirect"]},
        "acs_unread": [port],
    }
    assert hints.bridge_facts("0000:00:1f.0", root).redirects is None
    assert hints.bridge_facts(plain, root).redirects == ()
    (root / "bus/pci/devices" / GPUS[0] / "iommu_group").mkdir()
    facts = fake.pcie_switch_pairs(2)
    probed = [replace(facts[0], plugins={"pcie": hints.read_hints(GPUS[0], path, root)}), facts[1]]
    texts = hints.hints(probed, "pcie")
    assert len(texts) == 2 and redirecting in texts[0] and "request redirect" in texts[0] and "IOMMU" in texts[1]
    assert "ranks 0" in texts[1]
    verdict = assess(probed)
    assert verdict.eligible and (verdict.plan or {})["hints"] == texts
    unread = [replace(facts[0], plugins={"pcie": {"acs": {}, "acs_unread": [port]}}), facts[1]]
    assert "can't be read" in hints.hints(unread, "pcie")[0]
    for odd in ({"error": "no"}, {"acs": [1]}, None):
        assert hints.hints([replace(facts[0], plugins={"pcie": odd}), facts[1]], "pcie") == []


def test_a_list_of_capabilities_that_bites_its_tail_ends(tmp_path: Path) -> None:
    root = sysfs.tree(tmp_path, {GPUS[0]: "pci0000:00/0000:00:01.0"})
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | 0x100 << 20).to_bytes(4, "little")
    (root / "bus/pci/devices/0000:00:01.0/config").write_bytes(space)
    assert hints.bridge_facts("0000:00:01.0", root).redirects == ()


def test_the_probe_reads_the_facts_of_its_device() -> None:
    facts = fake.pcie_root_complex(1)[0]
    found = PcieTransport().probe(ProbeContext(0, "cuda", 0, facts))
    assert {key: found[key] for key in ("iommu", "acs", "acs_unread")} == {
        "iommu": False,
        "acs": {},
        "acs_unread": [],
    }
    assert set(found) == {"iommu", "acs", "acs_unread", "rdma", "nic"}
    assert PcieTransport().probe(ProbeContext(0, "cpu", -1, fake.cpu_host(1)[0])) == {}
