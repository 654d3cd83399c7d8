"""Predicates and assessments over faked topologies: pure, tri-state, and with reasons that name ranks and pairs."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_core.testing import topologies as fake
from comm_core.topology import predicates
from comm_core.topology.facts import FabricFacts, PairFacts, RankFacts
from comm_core.topology.ulysses import UlyssesPciePlan

TRI = st.sampled_from([True, False, None])
ASSESSMENTS = {
    "nvlink": predicates.assess_nvlink,
    "pcie": predicates.assess_pcie,
    "mnnvl": predicates.assess_mnnvl,
}


@st.composite
def matrices(draw, values):
    """A group of 2 to 6 ranks whose ordered pairs each have drawn values, and those by pair."""
    size = draw(st.integers(2, 6))
    pairs = {pair: draw(values) for pair in itertools.permutations(range(size), 2)}
    return size, pairs


@settings(max_examples=200, deadline=None)
@given(
    matrices(st.builds(PairFacts, peer_access=TRI, p2p_read=TRI, p2p_write=TRI, error=st.sampled_from([None, "x"])))
)
def test_p2p_holds_iff_every_ordered_pair_holds(case):
    """A11: any missing or unknown direction refuses, NVML may only deny, and every bad pair is named."""
    size, pairs = case
    facts = fake.gpu_ranks(size, lambda i, j: pairs[i, j] if i != j else PairFacts())
    good = {
        pair: value.peer_access is True and value.p2p_read is not False and value.p2p_write is not False
        for pair, value in pairs.items()
    }
    reason = predicates.all_pairs_p2p(facts)
    assert (reason is None) == all(good.values())
    if reason is not None and " more" not in reason:
        for (i, j), fine in good.items():
            assert (f"{i}→{j}" in reason) == (not fine)


@settings(max_examples=200, deadline=None)
@given(matrices(st.builds(PairFacts, nvlink=TRI)))
def test_nvlink_holds_iff_every_ordered_pair_holds(case):
    """A1, A6, A11: unknown is not NVLink, and one direction is not enough."""
    size, pairs = case
    facts = fake.gpu_ranks(size, lambda i, j: pairs[i, j] if i != j else PairFacts())
    reason = predicates.all_pairs_nvlink(facts)
    assert (reason is None) == all(value.nvlink is True for value in pairs.values())
    if reason is not None and " more" not in reason:
        for (i, j), value in pairs.items():
            assert (f"{i}→{j}" in reason) == (value.nvlink is not True)


@settings(max_examples=150, deadline=None)
@given(
    matrices(
        st.builds(
            PairFacts,
            # Mostly good, or the interesting case (everything holds) would hardly ever be drawn.
            peer_access=st.sampled_from([True] * 30 + [False, None]),
            p2p_read=st.sampled_from([True] * 30 + [False, None]),
            p2p_write=st.sampled_from([True] * 30 + [False, None]),
            nvlink=st.sampled_from([True] * 30 + [False, None]),
            error=st.sampled_from([None] * 30 + ["NVML: Unknown Error"]),
        )
    ),
    st.randoms(use_true_random=False),
)
def test_assessments_are_the_conjunction_and_ignore_the_order_of_the_list(case, shuffler: random.Random):
    """C7: the same facts give the same verdict, however the list is ordered; NVLink implies what PCIe needs."""
    size, pairs = case
    facts = fake.gpu_ranks(size, lambda i, j: pairs[i, j] if i != j else PairFacts())
    every = range(1, 9)
    mapped = predicates.all_pairs_p2p(facts) is None
    linked = predicates.all_pairs_nvlink(facts) is None and predicates.no_pair_errors(facts) is None
    assert predicates.assess_pcie(facts, sizes=every).eligible == mapped
    assert predicates.assess_nvlink(facts, sizes=every).eligible == (mapped and linked)
    assert predicates.assess_mnnvl(facts).eligible == (mapped and linked)
    shuffled = list(facts)
    shuffler.shuffle(shuffled)
    for assess in ASSESSMENTS.values():
        assert assess(shuffled).eligible == assess(facts).eligible
        assert assess(shuffled).plan == assess(facts).plan


def test_reasons_follow_the_specified_order():
    """Each condition has its own reason, and the first that fails in the specified order is the one given."""
    facts = fake.asymmetric(4, missing=[(0, 1)])
    facts = fake.with_pair(facts, 2, 3, nvlink=None, error="nvlink: NVML: Unknown Error")
    facts = fake.with_pair(facts, 3, 2, nvlink=False)
    broken = fake.with_environment(facts, 0, NCCL_P2P_DISABLE="1")
    broken = fake.with_device(broken, 1, uuid=broken[0].device.uuid)
    broken = fake.with_device(broken, 2, mig=True)
    broken = fake.with_device(broken, 3, uuid="")
    broken = fake.with_host(broken, 3, pid_namespace="pid:[1]")
    broken = fake.with_host(broken, 2, boot_id="another")
    broken = fake.with_device(broken, 0, kind="cpu")
    broken = fake.with_rank(broken, 3, error="RuntimeError: no driver")
    broken = fake.with_rank(broken, 3, rank=7)
    mended = [
        ("ranks must be exactly 0 to 3", lambda f: fake.with_rank(f, 3, rank=3)),
        ("the topology probe failed on rank 3: RuntimeError: no driver", lambda f: fake.with_rank(f, 3, error=None)),
        ("world size 4 is not supported (only 2, 8)", None),
        ("rank 0 is not on a CUDA device", lambda f: fake.with_device(f, 0, kind="cuda")),
        ("the ranks span 2 hosts", lambda f: fake.with_host(f, 2, boot_id=f[0].host.boot_id)),
        ("2 PID namespaces", lambda f: fake.with_host(f, 3, pid_namespace=f[0].host.pid_namespace)),
        ("GPU of rank 3 is unknown", lambda f: fake.with_device(f, 3, uuid=facts[3].device.uuid)),
        ("rank 2 is on a MIG slice", lambda f: fake.with_device(f, 2, mig=False)),
        ("ranks share a GPU: ranks 0, 1 are on", lambda f: fake.with_device(f, 1, uuid=facts[1].device.uuid)),
        ("NCCL_P2P_DISABLE differs", lambda f: fake.with_environment(f, NCCL_P2P_DISABLE="1")),
        ("NCCL_P2P_DISABLE=1 on rank 0 forbids", lambda f: fake.with_environment(f, NCCL_P2P_DISABLE="0")),
        ("CUDA denies peer access for 0→1", lambda f: fake.with_pair(f, 0, 1, peer_access=True, p2p_read=True)),
        ("NVML denies peer access for 0→1", lambda f: fake.with_pair(f, 0, 1, p2p_write=True)),
        ("probe of pairs failed: 2→3 (nvlink: NVML: Unknown Error)", lambda f: fake.with_pair(f, 2, 3, error=None)),
        ("no NVLink between ranks 0→1, 3→2; NVLink unknown between ranks 2→3", None),
    ]
    sizes = (2, 8)
    for text, mend in mended:
        verdict = predicates.assess_nvlink(broken, sizes=sizes)
        assert not verdict.eligible
        assert text in verdict.reason
        if mend is None:
            sizes = (2, 4, 8)
        else:
            broken = mend(broken)
    for i, j in ((0, 1), (2, 3), (3, 2)):
        broken = fake.with_pair(broken, i, j, nvlink=True)
    verdict = predicates.assess_nvlink(broken, sizes=sizes)
    assert verdict.eligible
    assert verdict.reason == "4 ranks on host node0, distinct GPUs, all 12 ordered pairs have P2P and NVLink"


@pytest.mark.parametrize(
    ("ranks", "holds"), [([0], True), ([1, 0], True), ([2, 0, 1], True), ([], False), ([1], False), ([0, 0], False)]
)
def test_ranks_must_be_complete(ranks, holds):
    """A list with a rank twice, missing or out of range is no group."""
    facts = [RankFacts(rank=rank) for rank in ranks]
    assert (predicates.ranks_complete(facts) is None) == holds


@pytest.mark.parametrize("assess", ASSESSMENTS.values(), ids=ASSESSMENTS.keys())
def test_every_assessment_survives_nothing_and_nonsense(assess):
    """A pure function over gathered records must give a verdict whatever a broken rank has sent."""
    assert not assess([]).eligible
    assert not assess([RankFacts(rank=-1)]).eligible
    assert not assess([RankFacts(rank=0), RankFacts(rank=0)]).eligible
    assert not assess(fake.cpu_host(4)).eligible
    assert "CUDA device" in assess(fake.cpu_host(2)).reason


def test_pairwise_bridges():
    """A1: {0,1,2,3} is not NVLink and the reason names a missing pair; {0,1} is."""
    facts = fake.pairwise_bridges(4)
    verdict = predicates.assess_nvlink(facts)
    assert not verdict.eligible
    assert "0→2" in verdict.reason
    assert predicates.assess_nvlink(fake.select(facts, [0, 1])).eligible
    assert predicates.assess_nvlink(fake.select(facts, [3, 2])).eligible


def test_two_islands():
    """A8: eight and 2+2 are refused, both islands are accepted."""
    facts = fake.two_islands(8)
    assert not predicates.assess_nvlink(facts).eligible
    assert not predicates.assess_nvlink(fake.select(facts, [0, 1, 4, 5])).eligible
    assert predicates.assess_nvlink(fake.select(facts, [0, 1, 2, 3])).eligible
    assert predicates.assess_nvlink(fake.select(facts, [4, 5, 6, 7])).eligible


def test_asymmetric_matrix_lists_the_directed_pair():
    """A11: i→j yes and j→i no rejects P2P, and only the missing direction is listed."""
    facts = fake.asymmetric(4, missing=[(2, 1)])
    for assess in ASSESSMENTS.values():
        verdict = assess(facts)
        assert not verdict.eligible
        assert "2→1" in verdict.reason and "1→2" not in verdict.reason
    assert predicates.assess_pcie(fake.select(facts, [0, 1])).eligible


def test_long_lists_are_bounded():
    """Eight ranks have 56 ordered pairs: the reason lists a few and counts the rest."""
    reason = predicates.all_pairs_nvlink(fake.pcie_root_complex(8))
    assert reason is not None
    assert reason.count("→") == 6
    assert "and 50 more" in reason


def test_mig_is_refused_everywhere():
    """A9: slices are distinct devices, and no peer transport takes them; MIG in doubt is refused too."""
    facts = fake.mig_slices(2)
    assert predicates.unique_devices(facts) is None
    for assess in ASSESSMENTS.values():
        assert "MIG" in assess(facts).reason
        assert not assess(fake.without_nvml(fake.nvlink_mesh(2))).eligible
    assert "nvidia-ml-py" in (predicates.no_mig(fake.without_nvml(fake.nvlink_mesh(2))) or "")


def test_pcie_needs_no_nvlink_and_plans_p2p():
    """F16: eligibility is the P2P matrix, for 2, 4 and 8 GPUs; the plan has the P2P route and no GIDs."""
    for facts in (
        fake.pcie_root_complex(2),
        fake.pcie_root_complex(4),
        fake.pcie_switch_pairs(8),
        fake.nvlink_mesh(8),
    ):
        verdict = predicates.assess_pcie(facts)
        assert verdict.eligible
        plan = UlyssesPciePlan.from_json(verdict.plan)
        assert (plan.transport, plan.gid_indices, plan.requested_route) == ("p2p", (), "auto")
        assert plan.numa_nodes == tuple(record.device.numa_node for record in facts)
        assert plan.nic_names == (None,) * len(facts)
    assert "world size 6" in predicates.assess_pcie(fake.pcie_root_complex(6)).reason


def test_one_pcie_rank_needs_no_peers():
    """World size 1 is an identity: neither MIG nor a veto nor a missing NVML matters; a CPU does."""
    for facts in (fake.mig_slices(1), fake.without_nvml(fake.nvlink_mesh(1))):
        assert predicates.assess_pcie(fake.with_environment(facts, NCCL_P2P_DISABLE="1")).eligible
    assert not predicates.assess_pcie(fake.cpu_host(1)).eligible


@pytest.mark.parametrize(("route", "text"), [("rdma", "comm-pcie"), ("hybrid", "comm-pcie"), ("x", "must be one of")])
def test_pcie_routes_that_need_nics(route, text):
    """Only the P2P route can be planned without an RDMA probe."""
    verdict = predicates.assess_pcie(fake.pcie_root_complex(8), route=route)
    assert not verdict.eligible
    assert text in verdict.reason
    assert verdict.plan is None
    assert predicates.assess_pcie(fake.pcie_root_complex(8), route="p2p").plan["requested_route"] == "p2p"


@pytest.mark.parametrize(
    ("variables", "nvlink", "pcie"),
    [
        ({"NCCL_P2P_DISABLE": "1"}, False, False),
        ({"NCCL_P2P_DISABLE": "true"}, False, False),
        ({"NCCL_P2P_DISABLE": "0"}, True, True),
        ({"NCCL_P2P_DISABLE": ""}, True, True),
        ({"NCCL_P2P_LEVEL": "LOC"}, False, False),
        ({"NCCL_P2P_LEVEL": "0"}, False, False),
        ({"NCCL_P2P_LEVEL": "NVL"}, True, False),
        ({"NCCL_P2P_LEVEL": "PIX"}, True, False),
        ({"NCCL_P2P_LEVEL": "PXB"}, True, False),
        ({"NCCL_P2P_LEVEL": "2"}, True, False),
        ({"NCCL_P2P_LEVEL": "PHB"}, True, True),
        ({"NCCL_P2P_LEVEL": "3"}, True, True),
        ({"NCCL_P2P_LEVEL": "sys"}, True, True),
        ({"NCCL_P2P_LEVEL": "FAR"}, False, False),
    ],
)
def test_nccl_s_p2p_variables_are_heeded(variables, nvlink, pcie):
    """B6: who told NCCL not to use P2P did not mean only NCCL; a level limits the distance of pairs."""
    for assess, facts, expected in (
        (predicates.assess_nvlink, fake.nvlink_mesh(4), nvlink),
        (predicates.assess_mnnvl, fake.nvlink_mesh(4), nvlink),
        (predicates.assess_pcie, fake.pcie_root_complex(4), pcie),
    ):
        verdict = assess(fake.with_environment(facts, **variables))
        assert verdict.eligible == expected
        if not expected:
            assert f"{next(iter(variables))}=" in verdict.reason


def test_a_level_is_about_the_farthest_pair():
    """B6: PHB is enough inside a half of a two-socket machine and not across; an unknown distance is the farthest."""
    facts = fake.with_environment(fake.pcie_switch_pairs(8), NCCL_P2P_LEVEL="PHB")
    assert "0→4" in predicates.assess_pcie(facts).reason
    half = fake.select(facts, [0, 1, 2, 3])
    assert predicates.assess_pcie(half).eligible
    assert not predicates.assess_pcie(fake.with_pair(half, 3, 0, common_ancestor=None)).eligible
    pair = fake.with_environment(fake.select(facts, [2, 3]), NCCL_P2P_LEVEL="PIX")
    assert predicates.assess_pcie(pair).eligible


def test_a_variable_on_one_rank_only_is_detected():
    """B6: different values are a reason of their own that lists every rank's value."""
    facts = fake.with_environment(fake.nvlink_mesh(2), 1, NCCL_P2P_DISABLE="1")
    assert predicates.equal_environment(facts) == "NCCL_P2P_DISABLE differs between ranks (rank 0: unset, rank 1: 1)"
    for assess in ASSESSMENTS.values():
        assert assess(facts).reason == predicates.equal_environment(facts)
    assert predicates.equal_environment(fake.with_environment(facts, 0, CUDA_VISIBLE_DEVICES="set")) is not None
    assert predicates.equal_environment(fake.mask_per_rank(fake.nvlink_mesh(2))) is None


def test_same_host_is_the_boot_id():
    """C10: equal names with different boots are two hosts, different names with one boot are one."""
    mesh = fake.nvlink_mesh(2)
    twin = fake.with_host(mesh, 1, boot_id="another")
    reason = predicates.single_host(twin)
    assert reason is not None and "span 2 hosts" in reason and "boot ids differ" in reason
    assert predicates.single_host(fake.containers(2)) is None
    unknown = predicates.single_host(fake.with_host(mesh, 1, boot_id=""))
    assert unknown is not None and "rank 1" in unknown
    assert "node0 (ranks 0, 1), node1 (ranks 2, 3)" in (predicates.single_host(fake.two_hosts(2)) or "")


@pytest.mark.parametrize(("share_pid", "share_network"), [*itertools.product([True, False], repeat=2)])
def test_what_containers_must_share(share_pid, share_network):
    """C10, V16: CUDA IPC needs one PID namespace, descriptors one network or mount namespace; IPC is not needed."""
    facts = fake.containers(2, share_pid=share_pid, share_network=share_network)
    assert (predicates.cuda_ipc_reachable(facts) is None) == share_pid
    assert (predicates.fd_passing_reachable(facts) is None) == share_network
    assert predicates.assess_nvlink(facts).eligible == share_pid
    assert predicates.assess_pcie(facts).eligible == share_pid
    assert predicates.assess_mnnvl(facts).eligible == share_network
    shared_files = fake.with_host(facts, mount_namespace="mnt:[1]")
    assert predicates.fd_passing_reachable(shared_files) is None


def test_unknown_namespaces_are_not_shared():
    """C10: two processes whose namespaces nobody could read are not in the same one."""
    facts = fake.with_host(fake.nvlink_mesh(3), 1, 2, pid_namespace="", network_namespace="", mount_namespace="")
    assert "PID namespace of ranks 1, 2 is unknown" in (predicates.cuda_ipc_reachable(facts) or "")
    assert predicates.fd_passing_reachable(facts) is not None


def test_a_mask_for_each_rank():
    """E7: identities are by UUID and unique; peers are invisible, and the reason says which variable hides them."""
    facts = fake.mask_per_rank(fake.nvlink_mesh(2))
    assert predicates.unique_devices(facts) is None
    assert "CUDA_VISIBLE_DEVICES" in predicates.assess_nvlink(facts).reason
    assert "0→1" in predicates.assess_nvlink(facts).reason


def test_all_ranks_on_one_gpu_by_accident():
    """E7: the reason names the ranks, the GPU and the fix."""
    reason = predicates.assess_nvlink(fake.same_gpu(fake.nvlink_mesh(4))).reason
    assert "ranks 0, 1, 2, 3 are on GPU-00000000" in reason
    assert "set_device" in reason and "device=" in reason


def test_sharing_a_gpu_on_purpose():
    """COMM_ALLOW_SHARED_GPU: a pair on one device counts as connected; the others must still be, and it shows."""
    for facts in (fake.same_gpu(fake.nvlink_mesh(4)), [*fake.same_gpu(fake.nvlink_mesh(2))]):
        for assess in ASSESSMENTS.values():
            verdict = assess(facts, allow_shared_gpu=True)
            assert verdict.eligible
            assert "1 GPUs shared" in verdict.reason
    both = fake.nvlink_mesh(2)
    facts = fake.select([*both, *both], [0, 2, 1, 3])
    assert predicates.assess_nvlink(facts, allow_shared_gpu=True).eligible
    apart = fake.asymmetric(2, missing=[(1, 0)])
    facts = fake.select([*apart, *apart], [0, 2, 1, 3])
    verdict = predicates.assess_nvlink(facts, allow_shared_gpu=True)
    assert not verdict.eligible
    assert "2→0, 2→1, 3→0, 3→1" in verdict.reason


def test_sharing_does_not_excuse_an_unknown_device():
    """Two ranks without a UUID are not known to be on the same device."""
    facts = fake.with_device(fake.same_gpu(fake.nvlink_mesh(2)), uuid="")
    assert not predicates.assess_nvlink(facts, allow_shared_gpu=True).eligible
    assert predicates.all_pairs_p2p(facts, allow_shared_gpu=True) is not None


def test_a_virtual_machine_with_masked_ids():
    """The facts of real passed-through H200s: NVLink and one-host MNNVL yes; there is no fabric across hosts."""
    facts = fake.masked_vm(2)
    assert predicates.assess_nvlink(facts).eligible
    assert predicates.assess_mnnvl(facts).plan == {"handle": "posix_fd"}
    assert "UUID is zero" in (predicates.fabric_clique(facts) or "")


def test_mnnvl_across_hosts():
    """Two hosts in one clique use fabric handles; NVLink and PCIe stay on one host."""
    facts = fake.two_hosts(2)
    verdict = predicates.assess_mnnvl(facts)
    assert verdict.eligible
    assert verdict.plan == {"handle": "fabric"}
    assert not predicates.assess_nvlink(facts).eligible
    assert not predicates.assess_pcie(facts).eligible
    assert "not_supported" in predicates.assess_mnnvl(fake.two_hosts(2, fabric=False)).reason
    assert not predicates.assess_mnnvl(fake.nvlink_mesh(1)).eligible
    # One host never asks the fabric.
    assert predicates.assess_mnnvl(fake.nvlink_mesh(3)).plan == {"handle": "posix_fd"}


UUID = "00112233445566778899aabbccddeeff"


@pytest.mark.parametrize(
    ("fabric", "holds"),
    [
        (FabricFacts("completed", 0, UUID, 7), True),
        (FabricFacts("completed", 0, "0" * 31 + "1", 0), True),
        (FabricFacts("completed", 0, "0" * 32, 7), False),
        (FabricFacts("completed", 0, "", 7), False),
        (FabricFacts("completed", 999, UUID, 7), False),
        (FabricFacts("completed", None, UUID, 7), False),
        (FabricFacts("completed", 0, UUID, None), False),
        (FabricFacts("completed", 999, "0" * 32, 7), False),
        (FabricFacts("in_progress", 0, UUID, 7), False),
        (FabricFacts("not_started"), False),
        (FabricFacts("not_supported"), False),
        (FabricFacts(), False),
        (None, False),
    ],
)
def test_what_counts_as_a_fabric(fabric, holds):
    """I1: completed, without error, any byte of the UUID not zero, a known clique, on all ranks alike."""
    facts = fake.with_device(fake.two_hosts(1), fabric=fabric)
    assert (predicates.fabric_clique(facts) is None) == holds
    assert predicates.assess_mnnvl(facts).eligible == holds
    if not holds:
        reason = predicates.assess_mnnvl(fake.with_device(fake.two_hosts(1), 1, fabric=fabric)).reason
        assert "rank 1 (node1, GPU-" in reason and "rank 0" not in reason


@pytest.mark.parametrize("other", [FabricFacts("completed", 0, UUID, 8), FabricFacts("completed", 0, UUID[::-1], 7)])
def test_cliques_and_clusters_must_be_one(other):
    """E9, I8: equal cluster and different clique, and the reverse; the reason has rank, host, device and clique."""
    reason = predicates.assess_mnnvl(fake.with_device(fake.two_hosts(1), 1, fabric=other)).reason
    for text in ("rank 0 (node0, GPU-", "in clique 7", "rank 1 (node1, GPU-", f"in clique {other.clique_id}"):
        assert text in reason


def test_opaque_failures_are_named_before_any_rendezvous():
    """E9: no P2P, another host and another clique are each said with what a user needs to act."""
    apart = predicates.assess_mnnvl(fake.with_pair(fake.nvlink_mesh(2), 0, 1, peer_access=False)).reason
    assert "CUDA denies peer access for 0→1" in apart
    assert "node0 (rank 0), node1 (rank 1)" in predicates.assess_nvlink(fake.two_hosts(1)).reason


def test_ordered_4plus4_by_numa_nodes_and_by_ancestors():
    """Either evidence is enough when the other is unknown; together they must not disagree."""
    facts = fake.pcie_switch_pairs(8)
    assert predicates.ordered_4plus4(facts) is None
    assert predicates.ordered_4plus4(list(reversed(facts))) is None
    assert predicates.ordered_4plus4(fake.with_device(facts, numa_node=None)) is None
    forgotten = facts
    for i, j in itertools.permutations(range(8), 2):
        forgotten = fake.with_pair(forgotten, i, j, common_ancestor=None)
    assert predicates.ordered_4plus4(forgotten) is None
    assert "neither NUMA nodes" in (predicates.ordered_4plus4(fake.with_device(forgotten, numa_node=None)) or "")
    assert "neither" in (predicates.ordered_4plus4(fake.with_device(forgotten, 5, numa_node=None)) or "")


@pytest.mark.parametrize(
    "facts",
    [
        fake.pcie_switch_pairs(4),
        fake.pcie_root_complex(8),
        fake.select(fake.pcie_switch_pairs(8), [4, 1, 2, 3, 0, 5, 6, 7]),
        fake.with_device(fake.pcie_switch_pairs(8), numa_node=0),
        fake.with_device(fake.pcie_switch_pairs(8), 7, numa_node=2),
        fake.with_pair(fake.pcie_switch_pairs(8), 6, 1, common_ancestor="node"),
        fake.with_pair(fake.pcie_switch_pairs(8), 2, 1, common_ancestor="system"),
        fake.with_rank(fake.pcie_switch_pairs(8), 7, rank=8),
    ],
    ids=["four", "one side", "crossed", "one node", "three nodes", "near across", "far within", "ranks"],
)
def test_not_ordered_4plus4(facts):
    """A split that is not exactly 0 to 3 against 4 to 7, or evidence that disagrees in one direction, is refused."""
    assert predicates.ordered_4plus4(facts) is not None


def test_swapped_sides_are_still_4plus4():
    """Which side comes first does not matter."""
    assert predicates.ordered_4plus4(fake.select(fake.pcie_switch_pairs(8), [4, 5, 6, 7, 0, 1, 2, 3])) is None


def test_the_sizes_are_the_caller_s():
    """NVLink: 2, 4, 6 and 8 by default; a kernel that supports others says so."""
    eligible = [size for size in range(1, 10) if predicates.assess_nvlink(fake.nvlink_mesh(size)).eligible]
    assert eligible == [2, 4, 6, 8]
    assert predicates.assess_nvlink(fake.nvlink_mesh(3), sizes=[3]).eligible
    eligible = [size for size in range(1, 10) if predicates.assess_pcie(fake.nvlink_mesh(size)).eligible]
    assert eligible == [1, 2, 4, 8]


def test_facts_are_not_changed():
    """The builders' changes make copies, so that one topology can serve many cases."""
    facts = fake.nvlink_mesh(2)
    before = [record.to_json() for record in facts]
    fake.with_pair(facts, 0, 1, both=True, nvlink=False)
    fake.with_pair(facts, 0, 1, remove=True)
    fake.with_device(facts, mig=True)
    fake.with_host(facts, 0, boot_id="x")
    predicates.assess_nvlink([replace(record) for record in facts])
    assert [record.to_json() for record in facts] == before
