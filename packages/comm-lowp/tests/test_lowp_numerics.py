"""The kernels' arithmetic, element by element, over all bit patterns that matter; and their geometry."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import lowp_host
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_lowp import kernels
from comm_lowp.sage2 import grid as grids
from comm_lowp.sage2 import reference
from comm_lowp.sage2.grid import LAYOUTS, Grid

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(scope="module")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    library = tmp_path_factory.mktemp("numerics") / "numerics.so"
    lowp_host.compile_host(Path(__file__).with_name("lowp_numerics.cpp"), library, "-shared", "-Wextra")
    return ctypes.CDLL(str(library))


def at(x: torch.Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())


def count(n: int) -> ctypes.c_uint64:
    return ctypes.c_uint64(n)


def floats(step: int) -> torch.Tensor:
    """Return every `step`-th bit pattern of fp32 that is a finite number."""
    bits = torch.arange(0, 2**32, step, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    return x[x.isfinite()].contiguous()


def every(dtype: torch.dtype) -> torch.Tensor:
    """Return every finite value of a 16-bit type."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return x[x.isfinite()].contiguous()


def around(x: torch.Tensor) -> torch.Tensor:
    """Return fp32 values with the two neighbours of each, both signs."""
    bits = x.float().view(torch.int32)
    near = torch.cat([bits - 1, bits, bits + 1]).view(torch.float32)
    near = near[near.isfinite()]
    return torch.cat([near, -near]).contiguous()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    bad = (a.view(kind) != b.view(kind)).nonzero()
    assert not len(bad), f"{len(bad)} of {a.numel()} differ, the first at {bad[0]}"


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_16_bit_types_are_widened_and_rounded_as_torch_does(numerics: Any, dtype: torch.dtype) -> None:
    bf = int(dtype == BF16)
    values = every(dtype)
    wide = torch.empty(values.numel())
    numerics.widen(at(values), at(wide), count(values.numel()), bf)
    same_bits(wide, values.float())
    # The infinities stand for groups without a row.
    inf = torch.tensor([torch.inf, -torch.inf], dtype=dtype)
    numerics.widen(at(inf), at(wide), count(2), bf)
    same_bits(wide[:2].contiguous(), inf.float())
    halves = torch.empty(values.numel())
    even = values[: values.numel() // 2 * 2]
    numerics.halves(at(even), at(halves), count(even.numel() // 2), bf)
    same_bits(halves[: even.numel()], even.float())
    # All values, what lies half-way between neighbours, and their neighbours; then everywhere.
    ordered = values[values >= 0].float().sort().values
    midpoints = (ordered[1:].double() + ordered[:-1].double()).div(2).float()
    for x in (around(ordered), around(midpoints), floats(7919)):
        out = torch.empty(x.numel(), dtype=dtype)
        numerics.narrow(at(x), at(out), count(x.numel()), bf)
        same_bits(out, x.to(dtype))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_extremes_of_pairs(numerics: Any, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.cat([every(dtype), torch.tensor([torch.inf, -torch.inf], dtype=dtype)])
    a, b = (values[torch.randint(0, values.numel(), (2 * 100_000,), generator=generator)] for _ in range(2))
    out = torch.empty(100_000, 3, 2, dtype=dtype)
    numerics.extremes(at(a), at(b), at(out), count(100_000), int(dtype == BF16))
    x, y = a.view(-1, 2).float(), b.view(-1, 2).float()
    # Numbers, not bits: which zero it is means nothing.
    assert torch.equal(out[:, 0].float(), torch.maximum(x, y))
    assert torch.equal(out[:, 1].float(), torch.minimum(x, y))
    assert torch.equal(out[:, 2].float(), torch.maximum(x.abs(), y.abs()))


def test_e4m3_is_rounded_to_nearest_even_and_saturates(numerics: Any) -> None:
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    midpoints = (codes[1:].double() + codes[:-1].double()).div(2).float()
    for x in (around(codes), around(midpoints), around(torch.tensor([464.0, 480.0, 3e38, 1e-45])), floats(1_009)):
        out = torch.empty(x.numel(), dtype=torch.uint8)
        numerics.e4m3(at(x), at(out), count(x.numel()))
        same_bits(out, x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8))
        pairs = torch.empty(x.numel() // 2, dtype=torch.int16)
        numerics.e4m3_pairs(at(x), at(pairs), count(x.numel() // 2))
        same_bits(pairs.view(torch.uint8), out[: x.numel() // 2 * 2].clone())


def test_int8_is_rounded_to_nearest_even_and_saturates(numerics: Any) -> None:
    steps = torch.arange(-300, 301) / 2
    for x in (around(steps), floats(1_013), torch.tensor([torch.inf, -torch.inf, 0.0, -0.0])):
        out = torch.empty(x.numel(), dtype=torch.int8)
        numerics.int8(at(x), at(out), count(x.numel()))
        same_bits(out, x.round().clamp(-128, 127).to(torch.int8))


def test_scales_are_divisions(numerics: Any) -> None:
    eps = torch.tensor([grids.EPS], dtype=torch.float32)
    assert numerics.constant(0) == int(eps.view(torch.int32))
    amax = torch.cat([eps, *(x[x > grids.EPS].float() for x in (every(BF16), every(F16))), floats(9_973)])
    amax = amax[amax >= eps].contiguous()
    scale, inverse = torch.empty_like(amax), torch.empty_like(amax)
    numerics.scales(at(amax), at(scale), at(inverse), count(amax.numel()))
    x = amax.numpy()
    same_bits(scale, torch.from_numpy(x / np.float32(127)))
    same_bits(inverse, torch.from_numpy(np.float32(127) / x))
    assert numerics.constant(1) == int(scale[:1].view(torch.int32)) == grids.IDLE_SCALE_BITS
    assert (numerics.constant(2), numerics.constant(3)) == (0x7C00, 0x7F80)


@pytest.mark.parametrize("v_max", [448.0, 2.25])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_amax_of_v_is_found_again_in_its_scale(numerics: Any, dtype: torch.dtype, v_max: float) -> None:
    """For every value of the type: the factor is what the amax itself would have given, or 0 for a dead channel."""
    amax = every(dtype)
    amax = amax[amax >= 0].float().contiguous()
    scale = reference.final_v_scale(amax, v_max)
    out = torch.empty_like(amax)
    numerics.factors(at(scale), at(out), count(amax.numel()), ctypes.c_float(v_max), int(dtype == BF16))
    with np.errstate(divide="ignore", over="ignore"):
        expected = torch.from_numpy(np.float32(v_max) / amax.numpy())
    expected[~expected.isfinite()] = 0.0
    same_bits(out, expected)
    assert (out == 0).sum() >= 1


@pytest.mark.parametrize("used", [1, 3, 511, 16_777_215])
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_the_mean_is_one_division_and_one_rounding(numerics: Any, dtype: torch.dtype, used: int) -> None:
    sums = floats(30_011)
    out = torch.empty(sums.numel(), dtype=dtype)
    numerics.means(at(sums), at(out), count(sums.numel()), used, int(dtype == BF16))
    same_bits(out, torch.from_numpy(sums.numpy() / np.float32(used)).to(dtype))


def test_bytes_are_packed_and_transposed(numerics: Any) -> None:
    numerics.pack.restype = ctypes.c_uint32
    words = [0xAAAAAA01, 0x55555502, 0xFFFFFF83, 0x00000004]
    assert numerics.pack(*(ctypes.c_uint32(word) for word in words)) == 0x04830201
    matrix = torch.arange(16, dtype=torch.uint8).view(4, 4).clone()
    expected = matrix.t().contiguous()
    numerics.transpose(at(matrix))
    assert torch.equal(matrix, expected)
    assert tuple(numerics.v_row(x) for x in range(16)) == reference.V_SOURCE_ROWS


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_groups_and_ranks_are_where_python_has_them(numerics: Any, data: st.DataObject) -> None:
    log2 = data.draw(st.integers(4, 7))
    world, local = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 3000))
    rank = data.draw(st.integers(0, world - 1))
    group = data.draw(st.integers(0, (world * local - 1) >> log2))
    out = (ctypes.c_uint32 * 6)()
    numerics.grid(rank, local, world, log2, group, out)
    size = 1 << log2
    ranks = grids.touchers(group, local, size, world)
    assert list(out) == [
        grids.slots(local, size),
        grids.first_group(rank, local, size),
        grids.last_group(rank, local, size),
        grids.touched(rank, local, size),
        ranks[0],
        ranks[-1],
    ]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_payload_statistics_and_widths_are_where_python_has_them(numerics: Any, data: st.DataObject) -> None:
    world, local = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 40_000))
    heads, batch = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    grid = Grid(
        LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))],
        batch,
        local,
        heads * world,
        data.draw(st.sampled_from((64, 128))),
        data.draw(st.integers(0, world - 1)),
        world,
        data.draw(st.integers(1, world * local)),
    )
    sequence = data.draw(st.integers(1, grid.sequence))
    out = (ctypes.c_uint64 * 16)()
    numerics.geometry(kernels._geometry(grid, F16), sequence, out)
    spec = grid.payload
    offsets, offset = [], 0
    for _, shape in grid.statistics:
        offset += torch.Size(shape).numel()
        offsets.append(offset)
    assert list(out) == [
        spec.k_offset,
        spec.v_offset,
        spec.q_scale_offset,
        spec.k_scale_offset,
        spec.end,
        spec.chunk_bytes,
        spec.q_scale_slots,
        spec.k_scale_slots,
        grid.live_rows,
        *grid.layout.scale_widths(sequence),
        grid.padded_sequence,
        *offsets,
    ]
