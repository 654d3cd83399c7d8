"""prepare_qkv and scatter_qkv of a communicator, over gloo processes: bytes, joint refusals, workspaces, accuracy.

A rank registers the codec itself, so that nothing here depends on what is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from comm_core import CommError, UlyssesCommunicator, _dist
from comm_core.errors import ArgumentTypeError, ArgumentValueError, ClosedError
from comm_core.group import Group, thread_groups
from comm_core.plugins import register, unregister
from comm_core.plugins.discovery import registry
from comm_core.testing.ranks import RankPool
from comm_lowp import UlyssesQKV, UlyssesQKVWorkspace, emulated_attention, reference_attention
from comm_lowp.plugin import LowpPlugin
from comm_lowp.testing import oracle
from comm_lowp.testing.cases import Case, make

BF16, F16 = torch.bfloat16, torch.float16
FIELDS = ("q", "k", "v", "q_scale", "k_scale", "v_scale")


@contextmanager
def codec(layout: str | None = None) -> Iterator[None]:
    """Register the codec in this process, once, and encode for `layout`."""
    if "sage2" not in registry().codecs:
        register("lowp-here", LowpPlugin())
    torch.set_num_threads(1)
    before = os.environ.pop("COMM_LOWP_LAYOUT", None)
    if layout is not None:
        os.environ["COMM_LOWP_LAYOUT"] = layout
    try:
        yield
    finally:
        os.environ.pop("COMM_LOWP_LAYOUT", None)
        if before is not None:
            os.environ["COMM_LOWP_LAYOUT"] = before


def communicator(group: Any, q: torch.Tensor, **changes: Any) -> UlyssesCommunicator:
    return UlyssesCommunicator(group, **{"max_bytes": 3 * q.nbytes, "dtype": q.dtype, "device": "cpu", **changes})


def shards(case: Case, rank: int) -> list[torch.Tensor]:
    return [x[:, rank * case.rows : (rank + 1) * case.rows].contiguous() for x in make(case)]


def arrays(encoded: UlyssesQKV) -> list[Any]:
    return [oracle.raw(x).copy() for x in encoded[:6]]


# Bytes


def exchange(group: Any, given: list[Case]) -> list[list[Any]]:
    """Encode every case: contiguous, from projection views into reused storage, and twice with one workspace."""
    results = []
    for case in given:
        with codec(case.layout):
            q, k, v = shards(case, group.rank())
            with communicator(group, q) as comm:
                workspace = comm.prepare_qkv(q.shape, used_sequence=case.used)
                before = [x.clone() for x in (q, k, v)]
                encoded = comm.scatter_qkv(q, k, v, workspace=workspace)
                first = arrays(encoded)
                assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))
                fused = torch.cat([q, k, v], dim=2)
                storage = [x.data_ptr() for x in (*workspace.scratch, *encoded[:6])]
                for x in encoded[:6]:
                    x.view(torch.uint8).fill_(0x5A)
                again = comm.scatter_qkv(*fused.chunk(3, dim=2), workspace=workspace, out=encoded)
                assert again is encoded
                assert storage == [x.data_ptr() for x in (*workspace.scratch, *encoded[:6])]
                for one, other, name in zip(first, arrays(encoded), FIELDS, strict=True):
                    oracle.assert_same_bytes(other, one, f"out= and views: {name}")
                # Results without out= stay as they are when the workspace is used again.
                kept = comm.scatter_qkv(q, k, v, workspace=workspace)
                comm.scatter_qkv(k, q, v, workspace=workspace)
                for one, other in zip(first, arrays(kept), strict=True):
                    oracle.assert_same_bytes(other, one, "an earlier result")
                metadata = (encoded.layout, encoded.logical_sequence, encoded.used_sequence, encoded.input_dtype)
                assert metadata == (case.layout, case.sequence, case.used, case.dtype)
                results.append(first)
    return results


@pytest.mark.parametrize("size", [1, 2, 4, 6, 8])
def test_ranks_have_the_bytes_of_one_device_with_the_whole_sequence(ranks: RankPool, size: int) -> None:
    """O1 and O6 over real ranks, both layouts and dtypes; padded ranks, several batches, shards below a group."""
    given = [
        Case(size, 2, 1, 65, size * 65 - 9, 64, BF16, "sage2_sm90", "zero_channels", 1),
        Case(size, 1, 2, 5, max(1, size * 5 - 6), 128, F16, "sage2_sm89_sm120", "biased", 2),
        Case(size, 1, 1, 130, 131 if size > 1 else 70, 64, BF16, "sage2_sm89_sm120", "graded", 3),
        Case(size, 1, 1, 1, 1, 64, F16, "sage2_sm90", "graded", 4),
        Case(size, 1, 1, 16, size * 16, 64, BF16, "sage2_sm90", "zero_v", 5),
    ]
    results = ranks.run(exchange, given, ranks=size)
    for number, case in enumerate(given):
        inputs = make(case)
        expected = oracle.encode(*inputs, case.layout, case.used, oracle.mean_of(inputs[1], size, case.used))
        for rank in range(size):
            for name, mine in zip(FIELDS, results[rank][number], strict=True):
                part = oracle.heads_of(name, expected[name], size, rank)
                oracle.assert_same_bytes(mine, part, f"case {number}, rank {rank}, {name}")


def collectives(group: Any, case: Case) -> tuple[list[str], int, int]:
    """Return what one call communicated, and the bytes that it says it sent."""
    seen: list[str] = []
    with codec(case.layout):
        q, k, v = shards(case, group.rank())
        with communicator(group, q, max_bytes=max(3 * q.nbytes, 1 << 16)) as comm:
            workspace = comm.prepare_qkv(q.shape)
            patch = pytest.MonkeyPatch()
            for name in ("all_to_all_bytes", "all_gather_bytes", "barrier"):
                original = getattr(_dist, name)

                def spy(*arguments: Any, _name: str = name, _original: Any = original) -> Any:
                    seen.append(_name)
                    return _original(*arguments)

                patch.setattr(_dist, name, spy)
            patch.setattr(comm._execution.group, "gather", lambda *_, **__: seen.append("gather"))
            before = comm.bytes_sent
            comm.scatter_qkv(q, k, v, workspace=workspace)
            sent = comm.bytes_sent - before
            patch.undo()
            spec = workspace.payload
            return seen, sent, (spec.world_size - 1) * (spec.chunk_bytes + workspace.statistics_bytes)


def test_a_call_makes_one_gather_and_one_exchange_and_nothing_else(ranks: RankPool) -> None:
    small = Case(2, 1, 2, 33, 66, 64)
    for seen, sent, expected in ranks.run(collectives, small, ranks=2):
        assert seen == ["all_gather_bytes", "all_to_all_bytes"]
        assert sent == expected
    # Statistics above what a small gather takes are an exchange of their own; still two.
    large = Case(2, 10, 34, 1, 2, 64)
    for seen, sent, expected in ranks.run(collectives, large, ranks=2):
        assert seen == ["all_to_all_bytes", "all_to_all_bytes"]
        assert sent == expected
    inputs = make(large)
    results = ranks.run(exchange, [replace(large, data="biased")], ranks=2)
    inputs = make(replace(large, data="biased"))
    whole = oracle.encode(*inputs, large.layout, large.used, oracle.mean_of(inputs[1], 2, large.used))
    for rank in range(2):
        for name, mine in zip(FIELDS, results[rank][0], strict=True):
            oracle.assert_same_bytes(mine, oracle.heads_of(name, whole[name], 2, rank), name)


# Preparation


def outcome(call: Any) -> tuple[str, str]:
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error)
    return "", ""


BAD_PREPARATIONS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((None,), {}, "sequence of four ints"),
    (("1234",), {}, "sequence of four ints"),
    (((1, 8, 4),), {}, "four ints"),
    (((1, 8, 4, 64.0),), {}, "four ints"),
    (((1, True, 4, 64),), {}, "four ints"),
    (((1, 0, 4, 64),), {}, "positive"),
    (((1, -8, 4, 64),), {}, "positive"),
    (((1, 8, 4, 96),), {}, "64 or 128"),
    (((1, 8, 3, 64),), {}, "divisible by the 2 ranks"),
    (((1, 8, 4, 64),), {"used_sequence": 0}, r"(0, 16]"),
    (((1, 8, 4, 64),), {"used_sequence": 17}, r"(0, 16]"),
    (((1, 8, 4, 64),), {"used_sequence": True}, "bool"),
    (((1, 8, 4, 64),), {"used_sequence": 8.0}, "float"),
    (((1, 1 << 20, 64, 64),), {}, "at most 2147483647"),
    (((1, 33554431 // 4, 4, 64),), {}, "at most 2147483647"),
    (((1, 64, 4, 64),), {}, "max_bytes="),
    (((1, 8, 4, 64),), {"quantization": "sage3"}, "sage3"),
    (((1, 8, 4, 64),), {"quantization": None}, "NoneType"),
]


def preparations(group: Any) -> list[tuple[tuple[str, str], tuple[str, str], bool]]:
    """Try every bad preparation, on all ranks and on rank 1 alone; the communicator must live on."""
    found = []
    with codec():
        with UlyssesCommunicator(group, max_bytes=40_000, dtype=BF16, device="cpu") as comm:
            kept = comm.prepare_qkv((1, 8, 4, 64))
            x = torch.ones(1, 8, 4, 64, dtype=BF16)
            for arguments, keywords, _ in BAD_PREPARATIONS:
                everywhere = outcome(lambda a=arguments, b=keywords: comm.prepare_qkv(*a, **b))
                alone = outcome(
                    lambda a=arguments, b=keywords: (
                        comm.prepare_qkv(*a, **b) if group.rank() == 1 else comm.prepare_qkv((1, 8, 4, 64))
                    )
                )
                encoded = comm.scatter_qkv(x, x, x, workspace=kept)
                found.append((everywhere, alone, bool((encoded.v_scale > 0).all())))
        with UlyssesCommunicator(group, max_bytes=40_000, dtype=torch.float32, device="cpu") as comm:
            everywhere = outcome(lambda: comm.prepare_qkv((1, 8, 4, 64)))
            found.append((everywhere, everywhere, True))
    return found


def test_a_bad_preparation_is_refused_on_every_rank_and_costs_nothing_else(ranks: RankPool) -> None:
    first, second = ranks.run(preparations, ranks=2)
    assert first == second  # the same error on every rank
    texts = [text for _, _, text in BAD_PREPARATIONS]
    for (everywhere, alone, usable), text in zip(first, [*texts, "float16 and bfloat16"], strict=True):
        assert everywhere[0] in ("JointValueError", "JointError"), (everywhere, text)
        assert text in everywhere[1] and "rank 0" in everywhere[1] and "rank 1" in everywhere[1]
        assert text in alone[1] or "differ" in alone[1]
        assert alone[0] in ("JointValueError", "JointError")
        assert usable


def exact_budget(group: Any) -> tuple[int, str]:
    with codec():
        shape = (2, 65, 16, 64)
        with UlyssesCommunicator(group, max_bytes=1 << 22, dtype=BF16, device="cpu") as comm:
            need = comm.prepare_qkv(shape).payload_bytes
        with UlyssesCommunicator(group, max_bytes=need, dtype=BF16, device="cpu") as comm:
            comm.prepare_qkv(shape)
        with UlyssesCommunicator(group, max_bytes=need - 1, dtype=BF16, device="cpu") as comm:
            return need, outcome(lambda: comm.prepare_qkv(shape))[1]


def test_the_budget_is_exact(ranks: RankPool) -> None:
    for need, text in ranks.run(exact_budget, ranks=2):
        assert (
            f"has {need} bytes" in text and f"max_bytes={need} or more" in text and f"max_bytes={need - 1}:" in text
        )


def differing(group: Any) -> list[tuple[str, str]]:
    """Ranks that prepare different things, and a rank whose layout is another."""
    rank = group.rank()
    with codec(), UlyssesCommunicator(group, max_bytes=1 << 20, dtype=BF16, device="cpu") as comm:
        found = [
            outcome(lambda: comm.prepare_qkv((1, 8 + rank, 4, 64))),
            outcome(lambda: comm.prepare_qkv((1, 8, 4, 64), used_sequence=8 + rank)),
        ]
        os.environ["COMM_LOWP_LAYOUT"] = ["sage2_sm90", "sage2_sm89_sm120"][rank]
        found.append(outcome(lambda: comm.prepare_qkv((1, 8, 4, 64))))
        os.environ["COMM_LOWP_LAYOUT"] = "sage2_sm80"
        found.append(outcome(lambda: comm.prepare_qkv((1, 8, 4, 64))))
        os.environ["COMM_LOWP_LAYOUT"] = ""
        os.environ["COMM_LOWP_KERNELS"] = "maybe" if rank else ""
        found.append(outcome(lambda: comm.prepare_qkv((1, 8, 4, 64))))
        del os.environ["COMM_LOWP_KERNELS"]
        comm.prepare_qkv((1, 8, 4, 64))
        return found


def test_ranks_that_prepare_different_things_are_told_so(ranks: RankPool) -> None:
    first, second = ranks.run(differing, ranks=2)
    assert first == second
    kinds, texts = zip(*first, strict=True)
    assert kinds[:3] == ("JointValueError",) * 3
    assert "[1,8,4,64]" in texts[0].replace(" ", "") and "[1,9,4,64]" in texts[0].replace(" ", "")
    assert "sage2_sm90" in texts[2] and "sage2_sm89_sm120" in texts[2]
    assert "sage2_sm80" in texts[3] and "rank 1" in texts[4] and "try, require or off" in texts[4]


# Calls


def refusals(group: Any) -> list[str]:
    """Wrong arguments of scatter_qkv: raised before anything is communicated; then a right call works."""
    case = Case(2, 1, 2, 40, 70, 64, BF16, "sage2_sm90")
    problems = []
    with codec(case.layout):
        q, k, v = shards(case, group.rank())
        with communicator(group, q) as comm, communicator(group, q) as other:
            workspace = comm.prepare_qkv(q.shape, used_sequence=70)
            good = comm.scatter_qkv(q, k, v, workspace=workspace)
            wide = torch.zeros(1, 40, 4, 72, dtype=BF16)
            flat = torch.empty(good.q.numel() + 1, dtype=torch.int8)
            overlapping = good._replace(k=good.q)
            inside = workspace.scratch[2].view(-1)[: good.q.numel()].view(torch.int8).view(good.q.shape)
            alias = q.view(torch.int8).view(-1)[: good.q.numel()].view(good.q.shape)
            value, kind = ArgumentValueError, ArgumentTypeError
            turned = good.q.mT.contiguous().mT
            operands: list[tuple[str, type[Exception], str, tuple[Any, ...]]] = [
                ("a list", kind, "list", ([1], k, v)),
                ("another dtype", value, "bfloat16", (q.half(), k, v)),
                ("another shape", value, "[1, 40, 4, 64]", (q[:, :-1], k, v)),
                ("a strided last dimension", value, "dense", (q, k.mT.contiguous().mT, v)),
                ("a misaligned view", value, "16-byte", (q, k, wide[..., 4:68])),
            ]
            outputs: list[tuple[str, type[Exception], str, Any]] = [
                ("a tuple", kind, "UlyssesQKV", tuple(good)),
                ("a field that is none", kind, "out.k", good._replace(k=None)),
                ("another width", value, "out.q_scale", good._replace(q_scale=good.q_scale[..., :4])),
                ("another dtype", value, "out.v", good._replace(v=good.v.view(torch.uint8))),
                ("strides", value, "contiguous", good._replace(q=turned)),
                ("a misaligned tensor", value, "aligned", good._replace(q=flat[1:].view(good.q.shape))),
                ("another layout", value, "out.layout", good._replace(layout="sage2_sm89_sm120")),
                ("another length", value, "used_sequence", good._replace(used_sequence=71)),
                ("another input dtype", value, "input_dtype", good._replace(input_dtype=F16)),
                ("metadata without a hash", value, "out.layout", good._replace(layout=["sage2_sm90"])),
                ("two outputs in one place", value, "overlap out.q", overlapping),
                ("the workspace's storage", value, "workspace", good._replace(q=inside)),
                ("an input's storage", value, "overlap q", good._replace(k=alias)),
            ]
            tries = [(name, error, text, comm, given, workspace, None) for name, error, text, given in operands]
            tries += [(f"out: {n}", error, text, comm, (q, k, v), workspace, out) for n, error, text, out in outputs]
            tries.append(("no workspace", kind, "prepare_qkv", comm, (q, k, v), object(), None))
            tries.append(("a foreign workspace", value, "another communicator", other, (q, k, v), workspace, None))
            # Storage that was found good once is remembered; what only shares its addresses is looked at again.
            comm.scatter_qkv(q, k, v, workspace=workspace, out=good)
            sent = comm.bytes_sent
            for name, error, text, host, given, space, out in tries:
                try:
                    host.scatter_qkv(*given, workspace=space, out=out)
                except error as caught:
                    if text not in str(caught):
                        problems.append(f"{name}: {caught}")
                except Exception as caught:
                    problems.append(f"{name}: {type(caught).__name__}: {caught}")
                else:
                    problems.append(f"{name}: accepted")
            assert comm.bytes_sent == sent and other.bytes_sent == 0
            again = comm.scatter_qkv(q, k, v, workspace=workspace, out=good)
            assert again is good
        with pytest.raises(ClosedError, match="closed"):
            comm.scatter_qkv(q, k, v, workspace=workspace)
    return problems


def test_wrong_arguments_are_refused_before_anything_is_communicated(ranks: RankPool) -> None:
    assert ranks.run(refusals, ranks=2) == [[], []]


def checked(group: Any) -> list[tuple[str, str]]:
    """Checked mode: bad values and different calls raise on every rank, and name rank, tensor and position."""
    rank = group.rank()
    found = []
    os.environ["COMM_CHECK"] = "1"
    try:
        with codec("sage2_sm90"):
            q, k, v = shards(Case(2, 1, 2, 40, 70, 64), rank)
            with communicator(group, q) as comm:
                workspace = comm.prepare_qkv(q.shape, used_sequence=70)
                other = comm.prepare_qkv(q.shape, used_sequence=75)

                def call(space: Any = workspace, **changes: torch.Tensor) -> tuple[str, str]:
                    operands = [changes.get(name, x) for name, x in (("q", q), ("k", k), ("v", v))]
                    return outcome(lambda: comm.scatter_qkv(*operands, workspace=space))

                bad_k, bad_v, tail = k.clone(), v.clone(), q.clone()
                if rank == 1:
                    bad_k[0, 3, 1, 7] = torch.nan
                    bad_v[0, 29, 0, 63] = -torch.inf
                    tail[0, 35, 2, 1] = 0.5
                found.append(call(k=bad_k))
                found.append(call(v=bad_v))
                found.append(call(q=tail))
                found.append(call(other if rank else workspace))
                late = q.clone()
                if rank == 1:
                    late[0, 30:] = torch.nan  # beyond the live rows: it is padding that is not zero
                found.append(call(q=late))
                found.append(call(object() if rank else workspace))
                found.append(call())
    finally:
        del os.environ["COMM_CHECK"]
    return found


def test_checked_mode_finds_values_that_would_spoil_everything(ranks: RankPool) -> None:
    first, second = ranks.run(checked, ranks=2)
    texts = ["k[0, 3, 1, 7] of rank 1 is nan", "v[0, 29, 0, 63] of rank 1 is -inf", "q[0, 35, 2, 1] of rank 1 is 0.5"]
    for number, text in enumerate(texts):
        assert text in first[number][1] and text in second[number][1]
        assert (first[number][0], second[number][0]) == ("JointValueError", "ArgumentValueError")
    assert "used_sequence=75" in first[3][1] and "used_sequence=70" in first[3][1] and first[3] == second[3]
    assert "of rank 1 is nan" in first[4][1] and "beyond used_sequence=70" in first[4][1]
    assert first[5][0] == "JointValueError" and second[5][0] == "ArgumentTypeError"
    assert "rank 1: workspace must come from prepare_qkv" in first[5][1]
    assert first[6] == second[6] == ("", "")


def half_prepared(group: Any, stage: str) -> tuple[list[tuple[str, str]], float]:
    """A stage fails on rank 1: everybody raises, and the next preparation and older workspaces work."""
    from comm_lowp import qkv

    with codec("sage2_sm90"):
        q, k, v = shards(Case(2, 1, 2, 40, 70, 64), group.rank())
        with communicator(group, q) as comm:
            older = comm.prepare_qkv(q.shape)
            patch = pytest.MonkeyPatch()
            if group.rank() == 1:

                def fail(*_: Any, **__: Any) -> Any:
                    raise MemoryError("there is no more")

                patch.setattr(qkv, stage, fail)
            found = [outcome(lambda: comm.prepare_qkv(q.shape))]
            patch.undo()
            one = comm.scatter_qkv(q, k, v, workspace=older)
            two = comm.scatter_qkv(q, k, v, workspace=comm.prepare_qkv(q.shape))
            return found, float((one.v_scale - two.v_scale).abs().max())


@pytest.mark.parametrize(
    ("stage", "text"),
    [("_check_geometry", "shape and configuration"), ("kernels_for", "kernels"), ("make_pipeline", "allocate")],
)
def test_a_stage_that_fails_on_one_rank_fails_on_all_and_harms_nothing_else(
    ranks: RankPool, stage: str, text: str
) -> None:
    results = ranks.run(half_prepared, stage, ranks=2)
    for found, difference in results:
        assert found[0][0] in ("JointError", "JointValueError")
        assert text in found[0][1] and "rank 1: MemoryError: there is no more" in found[0][1]
        assert difference == 0.0


# Without processes


def single(**changes: Any) -> tuple[Group, UlyssesCommunicator]:
    group = thread_groups(1)[0]
    arguments = {"max_bytes": 1 << 20, "dtype": BF16, "device": "cpu", **changes}
    return group, UlyssesCommunicator(group, **arguments)


@pytest.fixture
def installed() -> Iterator[None]:
    with codec("sage2_sm90"):
        yield
    unregister("lowp-here")


@pytest.mark.usefixtures("installed")
def test_a_workspace_says_what_was_prepared_and_can_not_be_changed_or_made() -> None:
    _, comm = single()
    with comm:
        workspace = comm.prepare_qkv([2, 40, 4, 64], used_sequence=33)
        assert isinstance(workspace, UlyssesQKVWorkspace)
        assert workspace.qkv_shape == (2, 40, 4, 64) and workspace.world_size == 1 and workspace.dtype == BF16
        assert workspace.device == torch.device("cpu") and workspace.quantization == "sage2"
        assert (workspace.used_sequence, workspace.logical_sequence) == (33, 40)
        assert workspace.layout == "sage2_sm90" and workspace.transport == comm.backend == "gloo"
        assert workspace.route == "exchange" and workspace.payload_bytes == workspace.payload.payload_bytes
        assert "used_sequence=33" in repr(workspace) and "gloo" in repr(workspace)
        for name in ("qkv_shape", "layout", "used_sequence", "transport", "dtype"):
            with pytest.raises(AttributeError):
                setattr(workspace, name, None)
    with pytest.raises(ArgumentTypeError, match="prepare_qkv"):
        UlyssesQKVWorkspace()


@pytest.mark.usefixtures("installed")
def test_one_rank_encodes_and_sends_nothing() -> None:
    case = Case(1, 2, 3, 70, 61, 128, F16, "sage2_sm90", "biased")
    inputs = make(case)
    _, comm = single(dtype=F16, max_bytes=3 * inputs[0].nbytes)
    with comm:
        encoded = comm.scatter_qkv(*inputs, workspace=comm.prepare_qkv(inputs[0].shape, used_sequence=61))
        assert comm.bytes_sent == 0
    expected = oracle.encode(*inputs, case.layout, 61, oracle.mean_of(inputs[1], 1, 61))
    for name, mine in zip(FIELDS, encoded[:6], strict=True):
        oracle.assert_same_bytes(mine, expected[name], name)


@pytest.mark.usefixtures("installed")
def test_autograd_learns_that_outputs_were_written() -> None:
    _, comm = single()
    with comm:
        workspace = comm.prepare_qkv((1, 8, 2, 64))
        x = torch.ones(1, 8, 2, 64, dtype=BF16)
        encoded = comm.scatter_qkv(x, x, x, workspace=workspace)
        version = encoded.v_scale._version
        comm.scatter_qkv(x, x, x, workspace=workspace, out=encoded)
        assert encoded.v_scale._version > version
        needs = x.clone().requires_grad_()
        assert not any(t.requires_grad for t in comm.scatter_qkv(needs, needs, needs, workspace=workspace)[:6])


def inference(group: Any) -> bool:
    """Storage of inference mode, used outside of it, and the other way round: the bytes are those of always."""
    case = Case(2, 1, 2, 40, 70, 64, BF16, "sage2_sm90")
    with codec(case.layout):
        q, k, v = shards(case, group.rank())
        with communicator(group, q) as comm:
            with torch.inference_mode():
                workspace = comm.prepare_qkv(q.shape, used_sequence=case.used)
                first = comm.scatter_qkv(q, k, v, workspace=workspace)
                assert first.q.is_inference()
            expected = arrays(comm.scatter_qkv(q, k, v, workspace=comm.prepare_qkv(q.shape, used_sequence=case.used)))
            plain = comm.scatter_qkv(q, k, v, workspace=workspace)
            for x in (*first[:6], *plain[:6]):
                with torch.inference_mode():
                    x.view(torch.uint8).fill_(0x5A)
            comm.scatter_qkv(q, k, v, workspace=workspace, out=first)
            with torch.inference_mode():
                comm.scatter_qkv(q, k, v, workspace=workspace, out=plain)
            for record in (first, plain):
                for mine, right, name in zip(arrays(record), expected, FIELDS, strict=True):
                    oracle.assert_same_bytes(mine, right, name)
    return True


def test_inference_mode_may_end_between_preparation_and_call(ranks: RankPool) -> None:
    assert ranks.run(inference, ranks=2) == [True, True]


def test_a_missing_codec_is_named_on_every_rank(ranks: RankPool) -> None:
    for kind, text in ranks.run(without_codec, ranks=2):
        assert kind == "JointError" and "rank 0" in text and "rank 1" in text and "comm-lowp" in text


def without_codec(group: Any) -> tuple[str, str]:
    unregister("lowp-here")
    with UlyssesCommunicator(group, max_bytes=64, dtype=BF16, device="cpu") as comm:
        return outcome(lambda: comm.prepare_qkv((1, 8, 4, 64)))


# To the end


def attention(group: Any, case: Case, emulated: bool) -> torch.Tensor:
    """Return this rank's rows after scatter_qkv, attention and gather_heads."""
    with codec(case.layout):
        q, k, v = shards(case, group.rank())
        with communicator(group, q) as comm:
            encoded = comm.scatter_qkv(q, k, v, workspace=comm.prepare_qkv(q.shape, used_sequence=case.used))
            attend = emulated_attention if emulated else reference_attention
            return comm.gather_heads(attend(encoded))


@pytest.mark.parametrize("emulated", [False, True])
@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        (Case(2, 1, 1, 260, 511, 128, BF16, "sage2_sm90", "normal"), 0.999, 0.045),
        (Case(4, 1, 1, 65, 257, 64, F16, "sage2_sm89_sm120", "normal"), 0.999, 0.045),
        (Case(2, 1, 1, 100, 90, 64, BF16, "sage2_sm89_sm120", "biased"), 0.999, 0.045),
        (Case(2, 1, 1, 70, 131, 64, F16, "sage2_sm90", "zero_v"), 1.0, 0.0),
    ],
    ids=["sm90", "sm89", "biased", "zero_v"],
)
def test_attention_over_ranks_is_that_of_one_process(
    ranks: RankPool, case: Case, least: float, most: float, emulated: bool
) -> None:
    """The gates, from inputs to gathered heads; rows of padding come out as zeros."""
    out = torch.cat(ranks.run(attention, case, emulated, ranks=case.ranks), dim=1)
    assert out.shape == (case.batch, case.sequence, case.heads, case.head_dim) and out.dtype == case.dtype
    assert torch.isfinite(out).all() and not out[:, case.used :].any()
    q, k, v = (x[:, : case.used].transpose(1, 2).double() for x in make(case))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    live = out[:, : case.used].double()
    if case.data == "zero_v":
        assert not live.any()
        return
    cosine = torch.nn.functional.cosine_similarity(live.flatten(), exact.flatten(), dim=0)
    assert cosine >= least
    assert (live - exact).norm() / exact.norm() <= most
