"""Mapping: groups that partition the job, rules with values in their errors, and identity over every argument."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_core.errors import ArgumentTypeError, ArgumentValueError, CommError
from comm_core.mapping import Mapping

AXES = ("tp", "cp", "pp", "moe_tp", "moe_cluster", "moe_ep")

# Argument -> other arguments of an 8-rank job, which make that argument differ from what Mapping(8, tp_size=8) has.
DIFFERENT: dict[str, dict[str, Any]] = {
    "rank": {"rank": 3},
    "gpus_per_node": {"gpus_per_node": 4},
    "cp_size": {"cp_size": 2, "tp_size": 4},
    "cp_config": {"cp_config": {"block": [1, 2]}},
    "pp_size": {"pp_size": 2, "tp_size": 4},
    "tp_size": {"pp_size": 2, "tp_size": 4},
    "moe_cluster_size": {"moe_cluster_size": 2},
    "moe_ep_size": {"moe_ep_size": 2},
    "moe_tp_size": {"moe_ep_size": 2},
    "attn_tp_size": {"pp_size": 2, "tp_size": 4},
    "auto_parallel": {"auto_parallel": True, "tp_size": 1},
    "enable_attention_dp": {"enable_attention_dp": True},
}


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of a valid job of at most 288 ranks, without a rank."""
    size = st.integers(1, 4)
    expert = draw(size)
    cluster = draw(size) if expert == 1 else 1
    tensor = draw(st.integers(1, 3))
    context = draw(size) if expert == 1 else 1
    stages = draw(st.integers(1, 6))
    tp_size = expert * cluster * tensor
    # Of these two either can be derived from the other.
    both = [("moe_ep_size", expert), ("moe_tp_size", tensor)]
    return {
        "world_size": tp_size * context * stages,
        "tp_size": tp_size,
        "cp_size": context,
        "pp_size": stages,
        "gpus_per_node": draw(st.integers(1, 8)),
        "moe_cluster_size": cluster,
        **dict(draw(st.sampled_from([both, both[:1], both[1:]]))),
    }


@given(jobs())
def test_groups_partition_the_job_and_agree_across_ranks(job: dict[str, Any]) -> None:
    """A communicator made from these lists on every rank holds each rank once, at its own position, everywhere."""
    world = range(job["world_size"])
    mappings = [Mapping(rank=rank, **job) for rank in world]
    for axis in AXES:
        groups = getattr(mappings[0], f"{axis}_groups")
        assert sorted(rank for group in groups for rank in group) == list(world)
        assert groups == sorted(groups)
        for rank, mapping in zip(world, mappings, strict=True):
            group = getattr(mapping, f"{axis}_group")
            assert group in groups
            assert len(group) == getattr(mapping, f"{axis}_size")
            assert group[getattr(mapping, f"{axis}_rank")] == rank
        assert getattr(mappings[-1], f"{axis}_groups") == groups


@given(jobs())
def test_tensor_parallelism_is_fastest_then_context_then_pipeline(job: dict[str, Any]) -> None:
    """Launchers and checkpoints number ranks this way, so another order loads the wrong shards."""
    for rank in range(job["world_size"]):
        at = Mapping(rank=rank, **job)
        assert rank == at.tp_rank + at.tp_size * (at.cp_rank + at.cp_size * at.pp_rank)
        inside = at.moe_cluster_rank + at.moe_cluster_size * at.moe_tp_rank
        assert at.tp_rank == at.moe_ep_rank + at.moe_ep_size * inside
        assert at.node_rank * at.gpus_per_node + at.local_rank == rank
        assert (at.get_node_rank(rank), at.get_local_rank(rank)) == (at.node_rank, at.local_rank)


@given(jobs(), st.integers(0, 40))
def test_pipeline_stages_share_out_the_layers(job: dict[str, Any], layers: int) -> None:
    """Every layer is on one stage, in order, and the earlier stages take what does not divide."""
    first = Mapping(**job)
    stages = [Mapping(**{**job, "rank": rank}) for rank in first.pp_group]
    shares = [stage.pp_layers(layers) for stage in stages]
    assert [layer for share in shares for layer in share] == list(range(layers))
    assert sorted(map(len, shares), reverse=True) == list(map(len, shares))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for position, stage in enumerate(stages):
        assert stage.is_first_pp_rank() == (position == 0)
        assert stage.is_last_pp_rank() == (position == len(stages) - 1)
        assert stage.is_second_last_pp_rank() == (position == len(stages) - 2)
        assert stage.next_pp_rank() == first.pp_group[(position + 1) % len(stages)]
        assert stage.prev_pp_rank() == first.pp_group[position - 1]


@given(jobs(), st.data())
def test_round_trip_keeps_everything(job: dict[str, Any], data: st.DataObject) -> None:
    """A mapping sent to another process, copied or stored is equal to the one it came from."""
    config = data.draw(st.dictionaries(st.text(max_size=3), st.lists(st.integers(), max_size=2), max_size=2))
    rank = data.draw(st.integers(0, job["world_size"] - 1))
    one = Mapping(rank=rank, cp_config=config, enable_attention_dp=data.draw(st.booleans()), **job)
    copies = [Mapping.from_dict(one.to_dict()), copy.deepcopy(one), copy.copy(one), pickle.loads(pickle.dumps(one))]
    for two in copies:
        assert (two, hash(two), repr(two)) == (one, hash(one), repr(one))
    assert eval(repr(one), {"Mapping": Mapping}) == one


def test_the_examples_of_the_specification() -> None:
    """The groups that the public documentation lists."""
    pairs = [[0, 4], [1, 5], [2, 6], [3, 7]]
    fours = [[0, 1, 2, 3], [4, 5, 6, 7]]
    pipeline = Mapping(8, tp_size=4, pp_size=2)
    assert (pipeline.tp_groups, pipeline.pp_groups) == (fours, pairs)
    context = Mapping(8, tp_size=4, cp_size=2)
    assert (context.tp_groups, context.cp_groups) == (fours, pairs)
    experts = Mapping(8, tp_size=8, moe_tp_size=2, moe_ep_size=4)
    assert (experts.moe_tp_groups, experts.moe_ep_groups) == (pairs, fours)
    all_three = Mapping(8, tp_size=2, pp_size=2, cp_size=2)
    assert all_three.tp_groups == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert all_three.pp_groups == pairs
    assert all_three.cp_groups == [[0, 2], [1, 3], [4, 6], [5, 7]]
    two_nodes = Mapping(16, 9, tp_size=8, pp_size=2, moe_tp_size=2, moe_ep_size=4)
    assert two_nodes.moe_ep_groups == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]
    assert two_nodes.moe_tp_groups == [[r, r + 4] for r in (0, 1, 2, 3, 8, 9, 10, 11)]
    assert (two_nodes.node_rank, two_nodes.local_rank, two_nodes.is_multi_node()) == (1, 1, True)
    assert two_nodes.ep_experts(8) == [2, 3]


def test_sizes_are_derived() -> None:
    """-1 means: what the others leave."""
    assert Mapping(8, tp_size=8, moe_ep_size=4).moe_tp_size == 2
    assert Mapping(8, tp_size=8, moe_tp_size=4).moe_ep_size == 2
    assert Mapping(8, tp_size=8, moe_cluster_size=2).moe_tp_size == 4
    plain = Mapping(8, tp_size=4, cp_size=2)
    assert (plain.moe_tp_size, plain.moe_ep_size, plain.attn_tp_size, plain.attn_cp_size) == (4, 1, 8, 1)
    assert plain.has_tp() and plain.has_cp() and plain.has_moe_tp()
    assert not (plain.has_pp() or plain.has_moe_ep() or plain.has_moe_cluster() or plain.is_multi_node())


def test_auto_parallel_leaves_every_rank_alone() -> None:
    """Before the sizes are known, a rank must not find itself in somebody else's group."""
    at = Mapping(8, 5, auto_parallel=True)
    assert (at.tp_rank, at.cp_rank, at.pp_rank) == (0, 0, 0)
    assert at.tp_group == at.pp_group == at.cp_group == at.moe_ep_group == [5]
    assert at.next_pp_rank() == at.prev_pp_rank() == 5


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"world_size": 8, "tp_size": 4}, ValueError, ["4 * 1 * 1 = 4", "world_size=8"]),
        ({"world_size": 4, "tp_size": 4, "rank": 4}, ValueError, ["0..3", "world_size=4", "got 4"]),
        ({"rank": -1}, ValueError, ["0..0", "got -1"]),
        ({"world_size": 4, "tp_size": 4, "enable_attention_dp": True, "rank": 9}, ValueError, ["got 9"]),
        ({"world_size": 0, "tp_size": 0}, ValueError, ["world_size", "at least 1", "got 0"]),
        ({"gpus_per_node": 0}, ValueError, ["gpus_per_node", "got 0"]),
        ({"moe_ep_size": 0}, ValueError, ["moe_ep_size", "at least 1 or -1", "got 0"]),
        ({"pp_size": -1}, ValueError, ["pp_size", "at least 1, got -1"]),
        ({"world_size": 8, "auto_parallel": True, "cp_size": 8}, ValueError, ["tp_size=1, cp_size=8, pp_size=1"]),
        ({"world_size": 8, "auto_parallel": True, "pp_size": 8}, ValueError, ["pp_size=8"]),
        ({"world_size": 6, "tp_size": 6, "moe_ep_size": 4}, ValueError, ["1 * 4 * 1 = 4", "tp_size=6"]),
        ({"world_size": 4, "tp_size": 4, "moe_tp_size": 8}, ValueError, ["8 * 1 * 1 = 8", "tp_size=4"]),
        (
            {"world_size": 4, "tp_size": 4, "moe_cluster_size": 2, "moe_ep_size": 2},
            ValueError,
            ["moe_cluster_size=2", "moe_ep_size=2"],
        ),
        ({"world_size": 4, "tp_size": 4, "attn_tp_size": 2}, ValueError, ["attn_cp_size=2", "attn_tp_size=2"]),
        ({"world_size": 4, "tp_size": 4, "attn_cp_size": 4}, ValueError, ["attn_cp_size=4"]),
        ({"world_size": 4, "tp_size": 4, "attn_cp_size": 1, "attn_tp_size": 3}, ValueError, ["3 * 1 and 4"]),
        (
            {"world_size": 4, "tp_size": 2, "cp_size": 2, "moe_ep_size": 2},
            NotImplementedError,
            ["moe_ep_size=2", "cp_size=2"],
        ),
        ({"tp_size": True}, TypeError, ["tp_size", "True", "bool"]),
        ({"rank": False}, TypeError, ["rank", "False", "bool"]),
        ({"world_size": 1.0}, TypeError, ["world_size", "1.0", "float"]),
        ({"auto_parallel": 1}, TypeError, ["auto_parallel", "1", "int"]),
        ({"cp_config": [1]}, TypeError, ["cp_config", "list"]),
    ],
)
def test_rules(arguments: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    """Each rule is enforced, by an error of the project that names the values."""
    with pytest.raises(error) as caught:
        Mapping(**arguments)
    assert isinstance(caught.value, CommError)
    for word in words:
        assert word in str(caught.value)


def test_what_can_not_be_shared_out_is_refused() -> None:
    """Rounding down would drop experts without a word."""
    with pytest.raises(ArgumentValueError, match=r"moe_ep_size=4 must divide num_experts, got 10: 2 of them"):
        Mapping(4, tp_size=4, moe_ep_size=4).ep_experts(10)
    with pytest.raises(ArgumentTypeError, match="num_layers"):
        Mapping().pp_layers(True)
    with pytest.raises(ArgumentValueError, match=r"rank must be in 0\.\.3"):
        Mapping(4, tp_size=4).get_node_rank(4)


@pytest.mark.parametrize("name", DIFFERENT)
def test_every_argument_is_part_of_identity(name: str) -> None:
    """Two mappings that differ in anything must not share a cached communicator."""
    one, two = Mapping(8, tp_size=8), Mapping(**{"world_size": 8, "tp_size": 8, **DIFFERENT[name]})
    assert one.to_dict()[name] != two.to_dict()[name]
    assert one != two
    assert hash(one) != hash(two)


def test_only_the_rank_can_be_assigned() -> None:
    """Anything else would leave groups that nobody validated."""
    mapping = Mapping(4, tp_size=2, pp_size=2, cp_config={"a": [1]})
    mapping.rank = 3
    assert (mapping.pp_rank, mapping.tp_group, mapping.pp_group) == (1, [2, 3], [1, 3])
    with pytest.raises(ArgumentValueError, match="got 4"):
        mapping.rank = 4
    assert mapping.rank == 3
    with pytest.raises(AttributeError, match="tp_size"):
        mapping.tp_size = 4
    with pytest.raises(TypeError):
        mapping.cp_config["a"] = 2  # type: ignore[index]
    with pytest.raises(ArgumentValueError, match="has no tp_sizes"):
        Mapping.from_dict({"tp_sizes": 4})
