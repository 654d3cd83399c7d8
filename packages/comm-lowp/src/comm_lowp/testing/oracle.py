"""What tests compare with, written without the package and with torch only to read inputs: NumPy, group by group.

It follows the definitions (the amax of every group over its live rows of the *gathered* sequence, one element at a
time), and knows nothing of ranks, slots, payloads or boundaries. Only the mean's association takes (P, L).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import torch

__all__ = [
    "CONSUMERS",
    "Array",
    "amax_of",
    "assert_same_bytes",
    "e4m3",
    "encode",
    "heads_of",
    "int8",
    "mean_of",
    "numbers",
    "position",
    "raw",
    "rounded",
    "widths",
]

np: Any = numpy
"""numpy's annotations of what is used here are partial."""
F32 = np.float32
Array = Any
"""A NumPy array; the annotations of the functions that are used here are partial."""
EPS = F32(1e-7)


@dataclass(frozen=True)
class Consumer:
    """What the specification's table says about a layout."""

    gq: int
    gk: int
    qb: int
    vb: int
    vmax: float


CONSUMERS = {
    "sage2_sm90": Consumer(16, 128, 64, 128, 448.0),
    "sage2_sm89_sm120": Consumer(32, 64, 128, 64, 2.25),
}


def numbers(x: torch.Tensor) -> Array:
    """Return a tensor's values as fp32."""
    host: Any = x.detach().cpu().float()
    return host.numpy()


def widths(n: int, layout: str) -> tuple[int, int]:
    """Return the widths of the Q and K scales of `n` rows."""
    c = CONSUMERS[layout]
    return -(-n // c.qb) * 4, -(-n // c.gk)


def rounded(x: Array, dtype: torch.dtype) -> Array:
    """Return `x` rounded to the input dtype, as fp32. bf16 by its definition, on the bits."""
    if dtype == torch.float16:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(F32)
    bits = x.astype(F32).view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
    return bits.astype(np.uint32).view(F32)


def mean_of(k: torch.Tensor, ranks: int, used: int) -> Array:
    """Return the mean of the gathered K ``[B, S, H, D]`` by the fixed expression of (P, L), rounded; fp32."""
    x = numbers(k)
    rows = x.shape[1] // ranks
    total = None
    for rank in range(ranks):
        shard = x[:, rank * rows : (rank + 1) * rows]
        sums = None
        for at in range(0, rows, 256):
            lanes = [np.zeros_like(x[:, 0]) for _ in range(8)]
            for t in range(at, min(at + 256, rows)):
                lanes[t % 8] = lanes[t % 8] + shard[:, t]
            chunk = lanes[0]
            for lane in lanes[1:]:
                chunk = chunk + lane
            sums = chunk if sums is None else sums + chunk
        total = sums if total is None else total + sums
    assert total is not None
    return rounded(total / F32(used), k.dtype)


def amax_of(x: Array, group: int, used: int) -> Array:
    """Return ``[B, H, groups]``: max |x| over the live rows of each group, at least EPS."""
    b, s, h, _ = x.shape
    out = np.full((b, h, -(-s // group)), EPS, F32)
    for index in range(out.shape[2]):
        live = x[:, index * group : min((index + 1) * group, used)]
        if live.shape[1]:
            out[:, :, index] = np.maximum(np.abs(live).max(axis=(1, 3)), EPS)
    return out


def int8(x: Array, amax: Array, group: int) -> Array:
    """Return INT8 codes of ``[B, S, H, D]`` by the amax of their groups ``[B, H, groups]``."""
    inverse = F32(127) / amax
    factor = np.repeat(inverse, group, axis=2)[:, :, : x.shape[1]].transpose(0, 2, 1)[..., None]
    with np.errstate(over="ignore"):
        return np.clip(np.rint(x * factor), -128, 127).astype(np.int8)


def _e4m3_values() -> Array:
    """Return the 127 finite magnitudes of E4M3, by code."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))


E4M3 = _e4m3_values()


def e4m3(x: Array) -> Array:
    """Return E4M3 codes: the nearest value, ties to the even code, saturating."""
    magnitude = np.minimum(np.abs(x).astype(np.float64), 448.0)
    above = np.searchsorted(E4M3, magnitude).clip(0, 126)
    below = (above - 1).clip(0)
    up, down = E4M3[above] - magnitude, magnitude - E4M3[below]
    code = np.where(up < down, above, np.where(up > down, below, np.where(above % 2 == 0, above, below)))
    code = np.where(magnitude == E4M3[above], above, code)
    return (code | (np.signbit(x).astype(np.int64) << 7)).astype(np.uint8)


def position(row: int) -> int:
    """Return where row `row` is stored: blocks of 16 keep their place, rows within one are exchanged."""
    y = row % 16
    return row - y + 4 * (y % 8 // 2) + 2 * (y // 8) + y % 2


def encode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, used: int, mean: Array
) -> dict[str, Array]:
    """Return the consumer's operands of a gathered sequence, all heads, scales for `used` rows, as raw bytes."""
    c = CONSUMERS[layout]
    fq, fk, fv = numbers(q), numbers(k), numbers(v)
    centred = fk - mean[:, None]
    qa, ka = amax_of(fq, c.gq, used), amax_of(centred, c.gk, used)
    scales: list[Array] = []
    for amax, width in zip((qa, ka), widths(used, layout), strict=True):
        wide = np.full((*amax.shape[:2], max(width, amax.shape[2])), EPS, F32)
        wide[:, :, : amax.shape[2]] = amax
        scales.append(np.ascontiguousarray((wide / F32(127))[:, :, :width]))
    va = np.abs(fv).max(axis=1)
    with np.errstate(divide="ignore", over="ignore"):
        reciprocal = F32(c.vmax) / va
    dead = ~np.isfinite(reciprocal)
    codes = e4m3(fv * np.where(dead, F32(0), reciprocal)[:, None])
    codes[np.broadcast_to(dead[:, None], codes.shape)] = 0
    b, s, h, d = fv.shape
    v8 = np.zeros((b, d, h, -(-s // c.vb) * c.vb), np.uint8)
    for row in range(s):
        v8[..., position(row)] = codes[:, row].transpose(0, 2, 1)
    return {
        "q": int8(fq, qa, c.gq),
        "k": int8(centred, ka, c.gk),
        "v": v8,
        "q_scale": scales[0],
        "k_scale": scales[1],
        "v_scale": va / F32(c.vmax),
    }


def heads_of(name: str, x: Array, ranks: int, rank: int) -> Array:
    """Return the heads of one destination."""
    axis = {"q": 2, "k": 2, "v": 2, "q_scale": 1, "k_scale": 1, "v_scale": 1}[name]
    return np.split(x, ranks, axis=axis)[rank]


def raw(x: Any) -> Array:
    """Return the bytes of a tensor or an array."""
    if isinstance(x, torch.Tensor):
        host: Any = x.detach().cpu().contiguous().view(torch.uint8)
        x = host.numpy()
    return np.ascontiguousarray(x).view(np.uint8).ravel()


def assert_same_bytes(actual: Any, expected: Any, what: str) -> None:
    """Fail unless two tensors or arrays have the same bytes; name `what`, how many differ, and the first."""
    one, other = raw(actual), raw(expected)
    assert one.size == other.size, f"{what}: {one.size} bytes, expected {other.size}"
    bad = np.nonzero(one != other)[0]
    assert not bad.size, f"{what}: {bad.size} of {one.size} bytes differ, the first at {bad[0]}"
