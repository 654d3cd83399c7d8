"""The primitives against the oracle, byte for byte (O1 to O6), and the recipes of single values, exhaustively."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from comm_core.errors import ArgumentTypeError, ArgumentValueError
from comm_lowp import sage2
from comm_lowp.sage2 import reference
from comm_lowp.sage2.grid import EPS, IDLE_SCALE_BITS, LAYOUTS, SM90, Grid, first_group, slots, touched, touchers
from comm_lowp.testing import oracle
from comm_lowp.testing.cases import DATA, Case, cases, check, make, simulate, unpack

BOTH = sorted(LAYOUTS)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
PUBLISHED = [
    # (P, B, H, L, U) of published runs of this exchange on SM90 and SM120.
    Case(8, 2, 2, 65, 511, 64, torch.bfloat16, data="zero_channels"),
    Case(4, 1, 7, 129, 257, 64, torch.float16, data="zero_channels"),
    Case(2, 1, 4, 257, 513, 64, torch.bfloat16, data="zero_v"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads cost more than they give, and the machine may have one core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# O1: every byte is that of one device with the whole sequence


@settings(quick, max_examples=60)
@given(case=cases())
def test_every_byte_is_that_of_one_device_with_the_whole_sequence(case):
    """O1, at the width of U and of S; inputs are left alone, and nothing but numbers comes out."""
    inputs = make(case)
    before = [x.clone() for x in inputs]
    run = simulate(case, inputs)
    check(run, inputs)
    for x, copy in zip(inputs, before, strict=True):
        assert torch.equal(x, copy)
    for rank, received in enumerate(run.received):
        q8, k8, v8, q_scale, k_scale, v_scale = run.outputs[rank]
        wide = unpack(case, received, None)
        for narrow, full, width in zip(
            (q_scale, k_scale), wide[3:], oracle.widths(case.used, case.layout), strict=True
        ):
            # The narrow width is the leading slots of the full one.
            assert torch.equal(narrow.view(torch.int32), full[..., :width].view(torch.int32))
        assert all(
            torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip((q8, k8, v8), wide, strict=False)
        )
        assert all(torch.isfinite(x).all() for x in (q_scale, k_scale, v_scale, v8.float()))
        # Live rows never saturate; only rows of padding in K may.
        assert k8[:, : case.used].min() >= -127 and q8.min() >= -127


@pytest.mark.parametrize("case", PUBLISHED, ids=lambda case: f"P{case.ranks}-L{case.rows}-U{case.used}")
@pytest.mark.parametrize("layout", BOTH)
def test_the_published_cases(case, layout):
    case = replace(case, layout=layout)
    inputs = make(case)
    run = simulate(case, inputs)
    check(run, inputs)
    if case.data == "zero_v":
        for outputs in run.outputs:
            assert not outputs[2].view(torch.uint8).any() and not outputs[5].any()


@pytest.mark.parametrize("data", DATA)
def test_several_chunks_of_the_sum(data):
    """More than 256 rows a rank, so that the sum has more than one chunk."""
    case = Case(2, 1, 1, 600, 1100, 64, torch.float16, "sage2_sm89_sm120", data)
    inputs = make(case)
    check(simulate(case, inputs), inputs)


@given(case=cases(ranks=(2, 4, 8)))
@quick
def test_the_single_device_quantizer_of_the_package_agrees(case):
    """`single_device` is what speed is compared with, so it must be the same encoding."""
    inputs = make(case)
    run = simulate(case, inputs)
    whole = sage2.single_device(*inputs, LAYOUTS[case.layout], used_sequence=case.used, mean=run.mean)
    for rank, outputs in enumerate(run.outputs):
        for name, mine, theirs in zip(("q", "k", "v", "q_scale", "k_scale", "v_scale"), outputs, whole, strict=True):
            values = theirs.view(torch.uint8 if theirs.itemsize == 1 else torch.int32).numpy()
            part = oracle.heads_of(name, values, case.ranks, rank)
            oracle.assert_same_bytes(mine, part, name)


# O2: the number of ranks does not matter


@pytest.mark.parametrize("used", [1, 100, 333, 480])
@pytest.mark.parametrize("layout", BOTH)
def test_the_partition_does_not_matter_once_the_mean_is_given(used, layout):
    """O2: 1 to 8 ranks, all bytes, padding included."""
    base = Case(1, 1, 24, 480, used, 64, torch.bfloat16, layout, "biased")
    inputs = make(base)
    mean = simulate(base, inputs).mean
    whole = simulate(base, inputs, mean=mean).outputs[0]
    for ranks in (2, 3, 4, 6, 8):
        case = replace(base, ranks=ranks, rows=480 // ranks, local_heads=24 // ranks)
        run = simulate(case, inputs, mean=mean)
        for position, dim in enumerate((2, 2, 2, 1, 1, 1)):
            joined = torch.cat([outputs[position] for outputs in run.outputs], dim=dim)
            oracle.assert_same_bytes(joined, whole[position], f"{ranks} ranks, output {position}")


# O3: rows beyond the live ones do not matter


@given(case=cases(ranks=(1, 2, 4)))
@quick
def test_live_rows_do_not_depend_on_padding(case):
    """O3: quantizing the live rows alone gives the same rows, scales and leading columns of V."""
    inputs = make(case)
    run = simulate(case, inputs)
    alone = replace(case, ranks=1, local_heads=case.heads, rows=case.used)
    short = (inputs[0][:, : case.used], inputs[1][:, : case.used], inputs[2][:, : case.used])
    expected = simulate(alone, short, mean=run.mean).outputs[0]
    whole_blocks = case.used // 16 * 16
    for rank, outputs in enumerate(run.outputs):
        heads = slice(rank * case.local_heads, (rank + 1) * case.local_heads)
        for position in range(2):
            assert torch.equal(outputs[position][:, : case.used], expected[position][:, :, heads])
        v8, want = outputs[2].view(torch.uint8), expected[2].view(torch.uint8)[:, :, heads]
        assert torch.equal(v8[..., :whole_blocks], want[..., :whole_blocks])
        for position in (3, 4, 5):
            assert torch.equal(outputs[position], expected[position][:, heads])


@pytest.mark.parametrize("layout", BOTH)
def test_padding_does_not_pollute_mean_or_scales(layout):
    """K1, K2: a mean over S, or |0 - mean| in the last live group, would change live codes."""
    case = Case(4, 1, 1, 65, 70, 64, torch.bfloat16, layout, "biased")
    inputs = make(case)
    run = simulate(case, inputs)
    live = inputs[1][:, :70].float()
    assert torch.allclose(run.mean.float(), live.mean(dim=1), rtol=1e-2, atol=1e-2)
    biggest = (live - run.mean.float().unsqueeze(1)).abs().amax()
    scales = torch.cat([outputs[4] for outputs in run.outputs])
    assert float(scales.max()) <= float(biggest) / 127 * 1.001
    assert float(run.mean.abs().max()) > 20 * float(biggest)  # else this case would not show it


# O4: duplicated slots


@given(case=cases(ranks=(2, 4, 6, 8)))
@quick
def test_duplicated_slots_are_equal_and_a_changed_bit_is_seen(case):
    """O4."""
    run = simulate(case, make(case))
    arguments = {
        "batch_size": case.batch,
        "local_sequence": case.rows,
        "local_heads": case.local_heads,
        "head_dim": case.head_dim,
        "world_size": case.ranks,
        "layout": case.layout,
    }
    received = run.received[-1]
    assert sage2.verify_duplicate_scale_slots(received, **arguments)
    spec = sage2.payload_spec(**arguments)
    for group, offset, count in (
        (LAYOUTS[case.layout].q_group, spec.q_scale_offset, spec.q_scale_slots),
        (LAYOUTS[case.layout].k_group, spec.k_scale_offset, spec.k_scale_slots),
    ):
        for index in range(math.ceil(case.sequence / group)):
            owners = touchers(index, case.rows, group, case.ranks)
            broken = received.clone()
            rank = owners[-1]
            slot = index - first_group(rank, case.rows, group)
            broken[rank, offset + 4 * slot] ^= 1
            assert sage2.verify_duplicate_scale_slots(broken, **arguments) == (len(owners) == 1)
        assert count == slots(case.rows, group)


# O5: derived boundary values


@given(case=cases(ranks=(2, 4, 6, 8)))
@quick
def test_derived_boundary_values_are_those_of_the_rows(case):
    """O5: from raw extremes, without a second gather; and the merge of Q's."""
    q, k, _ = make(case)
    mean = simulate(case, make(case)).mean
    layout, rows, size = LAYOUTS[case.layout], case.rows, case.ranks
    centred = (k.float() - mean.float().unsqueeze(1)).abs()[:, : case.used].amax(dim=-1)
    shards = [x.contiguous() for x in k.split(rows, dim=1)]
    q_shards = [x.contiguous() for x in q.split(rows, dim=1)]
    keywords = {"world_size": size, "layout": case.layout}
    extremes = torch.stack(
        [sage2.k_boundary_minmax(x, rank=r, used_sequence=case.used, **keywords) for r, x in enumerate(shards)]
    )
    parts = [sage2.q_grouped_amax(x, rank=r, **keywords) for r, x in enumerate(q_shards)]
    where = {"local_sequence": rows, "world_size": size}
    descriptors = torch.stack(
        [sage2.boundary_descriptors(x, rank=r, group=layout.q_group, **where) for r, x in enumerate(parts)]
    )
    for rank in range(size):
        own = sage2.k_grouped_amax(shards[rank], mean, rank=rank, used_sequence=case.used, **keywords)
        before = own.clone()
        derived = sage2.derive_k_boundary_amax(own, extremes, mean, rank=rank, layout=case.layout, **where)
        assert derived is own
        count = touched(rank, rows, layout.k_group)
        for slot in range(count):
            index = first_group(rank, rows, layout.k_group) + slot
            group = centred[:, index * layout.k_group : (index + 1) * layout.k_group]
            expected = group.amax(dim=1).clamp(min=EPS) if group.shape[1] else torch.full_like(own[:, :, 0], EPS)
            assert torch.equal(derived[:, :, slot], expected)
            if 0 < slot < count - 1:
                assert torch.equal(before[:, :, slot], expected)
        assert not derived[:, :, count:].any()
        merged = sage2.merge_boundary_amax(parts[rank], descriptors, rank=rank, group=layout.q_group, **where)
        for slot in range(touched(rank, rows, layout.q_group)):
            index = first_group(rank, rows, layout.q_group) + slot
            group = q.float().abs()[:, index * layout.q_group : (index + 1) * layout.q_group].amax(dim=(1, 3))
            assert torch.equal(merged[:, :, slot], group)


# O6: determinism, strides, out=


def strided(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Return `x` as a view into something larger: a projection, or heads first."""
    b, rows, h, d = x.shape
    if kind == "projection":
        return torch.cat([torch.full_like(x, 9.0), x, x], dim=2)[:, :, h : 2 * h]
    if kind == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.full((b, rows, h, d + 8), 7.0, dtype=x.dtype)
    wide[..., :d] = x
    return wide[..., :d]


@pytest.mark.parametrize("kind", ["projection", "heads_first", "wide_rows"])
@pytest.mark.parametrize("layout", BOTH)
def test_views_and_reused_storage_give_the_same_bytes(kind, layout):
    """O6."""
    case = Case(2, 2, 2, 70, 131, 64, torch.float16, layout)
    inputs = make(case)
    run = simulate(case, inputs)
    again = simulate(case, inputs)
    assert all(torch.equal(a, b) for a, b in zip(run.sent, again.sent, strict=True))
    for rank in range(2):
        views = [strided(x[:, rank * 70 : (rank + 1) * 70], kind) for x in inputs]
        flat, context = sage2.local_stats(*views, rank=rank, world_size=2, used_sequence=131, layout=layout)
        plain = [x[:, rank * 70 : (rank + 1) * 70].contiguous() for x in inputs]
        assert torch.equal(
            flat, sage2.local_stats(*plain, rank=rank, world_size=2, used_sequence=131, layout=layout)[0]
        )
        gathered = torch.stack(
            [
                sage2.local_stats(
                    *[x[:, r * 70 : (r + 1) * 70].contiguous() for x in inputs],
                    rank=r,
                    world_size=2,
                    used_sequence=131,
                    layout=layout,
                )[0]
                for r in range(2)
            ]
        )
        stats = sage2.finalize_stats(gathered, context, views[1])
        send = torch.full_like(run.sent[rank], 0xAB)
        assert sage2.quant_and_pack(views[0], views[1], views[2], stats, out=send) is send
        assert torch.equal(send, run.sent[rank])
        outs = tuple(
            torch.full_like(x, 3) if x.itemsize > 1 else x.clone() for x in unpack(case, run.received[rank], 131)
        )
        returned = sage2.unpack_for_sage(
            run.received[rank],
            batch_size=2,
            local_sequence=70,
            local_heads=2,
            head_dim=64,
            world_size=2,
            scale_sequence=131,
            layout=layout,
            out=outs,
        )
        assert returned is outs
        for one, other in zip(outs, run.outputs[rank], strict=False):
            oracle.assert_same_bytes(one, other, "out=")


def test_the_steps_make_the_same_payload_as_the_fused_call():
    case = Case(2, 1, 2, 33, 66, 64)
    inputs = make(case)
    run = simulate(case, inputs)
    q, k, v = (x[:, 33:].contiguous() for x in inputs)
    final = run.final[1]
    spec = final.grid.payload
    send = torch.full((2, spec.chunk_bytes), 0xEE, dtype=torch.uint8)
    where = {"rank": 1, "world_size": 2, "layout": case.layout}
    assert sage2.zero_scale_and_padding(send, spec) is send
    assert not send[:, spec.q_scale_offset :].any() and (send[:, : spec.q_scale_offset] == 0xEE).all()
    sage2.quant_q_into_payload(q, final.q_amax, send, spec, **where)
    sage2.quant_kv_into_payload(k, v, final.k_mean_global, final.k_amax, final.v_scale, send, spec, **where)
    assert torch.equal(send, run.sent[1])
    fused = sage2.quant_qkv_pack(q, k, v, final.k_mean_global, final.q_amax, final.k_amax, final.v_scale, **where)
    assert torch.equal(fused, run.sent[1])
    rows = sage2.quant_v_fp8_with_scale(v, final.v_scale, layout=case.layout)
    packed = reference.sections(run.sent[1], spec).v
    assert torch.equal(torch.cat(list(packed), dim=2), rows)
    sums, maxima = sage2.k_sum_v_amax(k, v)
    flat = sage2.local_stats(q, k, v, used_sequence=66, **where)[0]
    assert torch.equal(torch.cat([sums.flatten(), maxima.flatten()]), flat[: 2 * sums.numel()])
    out = (torch.empty_like(sums), torch.empty_like(maxima))
    assert sage2.k_sum_v_amax(k, v, out=out) is out and torch.equal(out[0], sums)


# Single values


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Return every positive finite value of a 16-bit type."""
    values = torch.arange(1, 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", BOTH)
def test_the_amax_of_v_is_recovered_from_its_scale_for_every_value(dtype, layout):
    """Else the reciprocal would differ from one of the amax, and with it single codes (K9)."""
    amax = every_value(dtype)
    v_max = LAYOUTS[layout].v_max
    scale = reference.final_v_scale(amax.float(), v_max)
    assert torch.equal((scale * torch.full_like(scale, v_max)).to(dtype), amax)
    # The largest code is reached and never exceeded; tiny channels, whose reciprocal is not finite, are zeros.
    v = amax.view(1, 1, 1, -1)
    codes = reference.quantize_v(v, scale.view(1, 1, -1), v_max).flatten().view(torch.float8_e4m3fn).float()
    with np.errstate(over="ignore"):
        alive = torch.from_numpy(np.isfinite(np.float32(v_max) / amax.float().numpy()))
    assert not codes[~alive].any() and torch.isfinite(codes).all()
    assert (codes[alive] == v_max).all()
    assert bool((~alive).any()) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_int8_codes_of_every_amax(dtype):
    """A group's largest value becomes 127 for every amax; the floor keeps small ones finite."""
    amax = every_value(dtype).float().clamp(min=EPS)
    inverse = torch.full_like(amax, 127.0) / amax
    assert torch.equal((amax * inverse).round(), torch.full_like(amax, 127.0))
    assert torch.equal((-amax * inverse).round(), torch.full_like(amax, -127.0))
    idle = reference.scale_of(torch.tensor([EPS]))
    assert idle.view(torch.int32).item() == IDLE_SCALE_BITS
    assert torch.tensor(EPS).view(torch.int32).item() == 0x33D6BF95


def test_e4m3_rounds_to_nearest_even_and_saturates():
    """Every value, every midpoint, and one step to either side of it; torch's cast against the definition."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middle = (values[1:] + values[:-1]) / 2
    points = torch.cat([values, middle, torch.nextafter(middle, values[1:]), torch.nextafter(middle, values[:-1])])
    points = torch.cat([points, -points, torch.tensor([448.00003, 464.0, 1e9, -1e9])])
    ours = points.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    oracle.assert_same_bytes(ours, oracle.e4m3(points.numpy()), "e4m3")


def test_the_order_of_rows_of_v():
    assert [oracle.position(row) for row in range(16)] == [0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15]
    assert all(oracle.position(source) == x for x, source in enumerate(reference.V_SOURCE_ROWS))


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 255, 256, 257, 511, 600])
def test_the_sum_of_k_has_the_documented_association(rows):
    """Element by element in Python floats of single precision."""
    k = make(Case(1, 1, 1, rows, rows, 64, torch.float16, data="graded"))[1]
    assert torch.equal(sage2.k_sum_v_amax(k, k)[0][0, 0], torch.from_numpy(_sum_by_hand(k[0, :, 0].float().numpy())))


def _sum_by_hand(x):
    total = None
    for start in range(0, len(x), 256):
        lanes = np.zeros((8, x.shape[1]), np.float32)
        for t in range(start, min(start + 256, len(x))):
            lanes[t % 8] += x[t]
        chunk = lanes[0]
        for lane in lanes[1:]:
            chunk = chunk + lane
        total = chunk if total is None else total + chunk
    return total


# Arguments


def operand(**changes):
    return torch.zeros(changes.get("shape", (1, 32, 4, 64)), dtype=changes.get("dtype", torch.bfloat16))


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (None, ArgumentTypeError, "torch.Tensor"),
        (operand(dtype=torch.float32), ArgumentValueError, "float16 or bfloat16"),
        (operand(shape=(1, 32, 64)), ArgumentValueError, r"\[B, L, H, D\]"),
        (operand(shape=(1, 0, 4, 64)), ArgumentValueError, "positive"),
        (operand(shape=(1, 32, 4, 96)), ArgumentValueError, "64 or 128"),
        (operand().transpose(2, 3).contiguous().transpose(2, 3), ArgumentValueError, "dense"),
        (operand(shape=(1, 32, 4, 68))[..., 4:], ArgumentValueError, "16-byte|multiples of 16"),
        (operand(shape=(1, 32, 4, 65))[..., :64], ArgumentValueError, "multiples of 16"),
        (operand(shape=(1, 1, 4, 64)).expand(1, 32, 4, 64), ArgumentValueError, "positive multiples"),
        (operand().to("meta"), ArgumentValueError, "meta"),
    ],
)
def test_operands_that_no_kernel_could_read_are_refused(x, error, text):
    good = operand()
    with pytest.raises(error, match=text):
        sage2.local_stats(x, good, good, rank=0, world_size=2)
    with pytest.raises(error, match=text):
        sage2.q_grouped_amax(x, rank=0, world_size=2)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"rank": 2}, ArgumentValueError, r"\[0, 2\)"),
        ({"rank": -1}, ArgumentValueError, "rank"),
        ({"rank": True}, ArgumentTypeError, "bool"),
        ({"world_size": 0}, ArgumentValueError, "world_size"),
        ({"world_size": 3}, ArgumentValueError, "divisible"),
        ({"used_sequence": 0}, ArgumentValueError, r"\(0, 64\]"),
        ({"used_sequence": 65}, ArgumentValueError, r"\(0, 64\]"),
        ({"used_sequence": 1.0}, ArgumentTypeError, "float"),
        ({"layout": "sage3"}, ArgumentValueError, "sage2_sm90"),
        ({"layout": 90}, ArgumentTypeError, "int"),
    ],
)
def test_arguments_of_the_statistics_are_checked(changes, error, text):
    x = operand()
    with pytest.raises(error, match=text):
        sage2.local_stats(x, x, x, **{"rank": 0, "world_size": 2, **changes})


def test_other_arguments_are_checked():
    x = operand()
    with pytest.raises(ArgumentValueError, match="one shape"):
        sage2.local_stats(x, operand(shape=(1, 33, 4, 64)), x, rank=0, world_size=2)
    with pytest.raises(ArgumentValueError, match="one dtype"):
        sage2.local_stats(x, x, x.half(), rank=0, world_size=2)
    with pytest.raises(ArgumentValueError, match="k_mean_global"):
        sage2.k_grouped_amax(x, torch.zeros(1, 4, 64), rank=0, world_size=2)
    with pytest.raises(ArgumentTypeError, match="local_stats"):
        sage2.finalize_stats(torch.zeros(1), object(), x)
    with pytest.raises(ArgumentTypeError, match="finalize_stats"):
        sage2.quant_and_pack(x, x, x, object())
    flat, context = sage2.local_stats(x, x, x, rank=0, world_size=2)
    with pytest.raises(ArgumentValueError, match="gathered"):
        sage2.finalize_stats(flat, context, x)
    with pytest.raises(ArgumentValueError, match="ctx was made from"):
        sage2.finalize_stats(torch.stack([flat, flat]), context, operand(shape=(1, 31, 4, 64)))
    stats = sage2.finalize_stats(torch.stack([flat, flat]), context, x)
    with pytest.raises(ArgumentValueError, match="out must be"):
        sage2.quant_and_pack(x, x, x, stats, out=torch.zeros(2, 5, dtype=torch.uint8))
    good = {"batch_size": 1, "local_sequence": 32, "local_heads": 2, "head_dim": 64, "world_size": 2}
    spec = sage2.payload_spec(**good)
    with pytest.raises(ArgumentValueError, match="spec is not"):
        other = sage2.payload_spec(**{**good, "local_heads": 1})
        send = torch.zeros(2, spec.chunk_bytes, dtype=torch.uint8)
        sage2.quant_q_into_payload(x, stats.q_amax, send, other, rank=0, world_size=2)
    received = torch.zeros(2, spec.chunk_bytes, dtype=torch.uint8)
    with pytest.raises(ArgumentValueError, match="divisible by 128"):
        sage2.unpack_for_sage(received, aligned=True, **good)
    with pytest.raises(ArgumentTypeError, match="aligned"):
        sage2.unpack_for_sage(received, aligned=1, **good)
    with pytest.raises(ArgumentTypeError, match="payload_spec"):
        sage2.zero_scale_and_padding(received, good)
    with pytest.raises(ArgumentTypeError, match="five"):
        sage2.unpack_for_sage(received, out=(received,), **good)
    with pytest.raises(ArgumentValueError, match="recv_u8"):
        sage2.unpack_for_sage(received[:, :-1], **good)
    with pytest.raises(ArgumentValueError, match="64 or 128"):
        sage2.payload_spec(**{**good, "head_dim": 96})
    with pytest.raises(ArgumentValueError, match="elements: at most 2147483647"):
        sage2.payload_spec(**{**good, "local_sequence": 1 << 24})
    with pytest.raises(ArgumentValueError, match="bytes: at most 2147483647"):
        sage2.payload_spec(**{**good, "local_sequence": 2_800_000})
    assert sage2.scale_widths(65, layout="sage2_sm90") == (8, 1)
    assert sage2.scale_widths(65) == (4, 2)
    assert sage2.slots(65, 16) == 5
    found = sage2.capability("cpu")
    assert found == {"available": True, "reason": None, "layout": "sage2_sm89_sm120", "compute_capability": None}


def test_the_public_names_are_there():
    """The lazy table and the names for type checkers."""
    for name in sage2.__all__:
        assert getattr(sage2, name) is not None
    assert set(sage2.__all__) <= set(dir(sage2))


def test_sections_are_views_of_the_payload():
    grid = Grid(SM90, 2, 33, 4, 64, 0, 2, 66)
    spec = grid.payload
    payload = torch.zeros(2, spec.chunk_bytes, dtype=torch.uint8)
    parts = reference.sections(payload, spec)
    parts.q_scale[1, 1, 1, 2] = 1.5
    at = spec.q_scale_offset + 4 * ((1 * 2 + 1) * spec.q_scale_slots + 2)
    assert payload[1, at : at + 4].view(torch.float32).item() == 1.5
