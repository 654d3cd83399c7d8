"""The encodings and patterns of the fused all-reduce once more, one Python float at a time.

Nothing here knows how fp32 is laid out but `struct`: codes are found by looking for the nearest value in exact
arithmetic, and an fp32 operation is Python's fp64 one, rounded. For +, -, *, / of two fp32 numbers that is the
correctly rounded result, as fp64 has more than twice as many digits and two.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction

import torch

__all__ = [
    "E2M1",
    "E4M3",
    "e2m1",
    "e4m3",
    "e4m3_value",
    "fp8_dynamic",
    "fp8_groups",
    "fp8_static",
    "fp32",
    "mxfp8",
    "norm",
    "nvfp4",
    "rounder",
    "ue8m0",
]

NAN, INFINITY = math.nan, math.inf

E4M3 = [m * 2.0**-9 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
"""The magnitudes of codes 0 to 0x7E."""
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
UE8M0 = [2.0 ** (code - 127) for code in range(255)]


def fp32(x: float) -> float:
    """Round to fp32."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        # `pack` refuses what rounds beyond the largest fp32.
        return math.copysign(INFINITY, x)


def divide(a: float, b: float) -> float:
    """Divide as IEEE has it: Python raises for zero."""
    if b == 0:
        return NAN if a == 0 or math.isnan(a) else math.copysign(INFINITY, a) * math.copysign(1, b)
    return fp32(a / b)


def nearest(values: Sequence[float], x: float) -> int:
    """Return the index of the value nearest to `x` >= 0; of two, the even one."""
    if math.isinf(x) or x >= values[-1]:
        return len(values) - 1
    upper = bisect.bisect_right(values, x)
    exact = Fraction(x)
    below, above = exact - Fraction(values[upper - 1]), Fraction(values[upper]) - exact
    if below == above:
        return upper - 1 if (upper - 1) % 2 == 0 else upper
    return upper - 1 if below < above else upper


def e4m3(x: float) -> int:
    """Return the E4M3 code."""
    if math.isnan(x):
        return 0x7F
    return nearest(E4M3, abs(x)) | (0x80 if math.copysign(1, x) < 0 else 0)


def e4m3_value(code: int) -> float:
    """Return the value of an E4M3 code."""
    magnitude = NAN if code & 0x7F == 0x7F else E4M3[code & 0x7F]
    return -magnitude if code & 0x80 else magnitude


def e2m1(x: float) -> int:
    """Return the E2M1 code."""
    if math.isnan(x):
        return 7
    return nearest(E2M1, abs(x)) | (8 if math.copysign(1, x) < 0 else 0)


def ue8m0(x: float) -> int:
    """Return the code of the smallest power of two that is not below `x`."""
    if math.isnan(x):
        return 255
    return min(bisect.bisect_left(UE8M0, x), 254)


def largest(values: Sequence[float]) -> float:
    """Return the largest magnitude, NaN left out."""
    return max((abs(x) for x in values if not math.isnan(x)), default=0.0)


def fp8_static(row: Sequence[float], scale: float) -> list[int]:
    """Return the codes of static FP8."""
    reciprocal = divide(1.0, fp32(scale))
    return [e4m3(fp32(x * reciprocal)) for x in row]


def fp8_dynamic(row: Sequence[float]) -> tuple[list[int], float]:
    """Return codes and scale of a token."""
    scale = max(fp32(largest(row) / 448), fp32(2**-9 / 448))
    return [e4m3(NAN if math.isinf(scale) and math.isinf(x) else fp32(x / scale)) for x in row], scale


def fp8_groups(row: Sequence[float], size: int) -> tuple[list[int], list[int]]:
    """Return codes and UE8M0 codes of a token."""
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), size):
        group = row[start : start + size]
        scales.append(ue8m0(max(fp32(largest(group) / 448), fp32(1e-10))))
        codes += [e4m3(fp32(x / 2.0 ** (scales[-1] - 127))) for x in group]
    return codes, scales


def mxfp8(row: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return codes and UE8M0 codes of a row."""
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), 32):
        block = row[start : start + 32]
        scales.append(ue8m0(fp32(largest(block) / 448)))
        codes += [e4m3(fp32(x / 2.0 ** (scales[-1] - 127))) for x in block]
    return codes, scales


def nvfp4(row: Sequence[float], scale: float) -> tuple[list[int], list[int]]:
    """Return bytes of two codes, and E4M3 codes, of a row."""
    codes: list[int] = []
    scales: list[int] = []
    scale = fp32(scale)
    for start in range(0, len(row), 16):
        block = row[start : start + 16]
        top = NAN if any(map(math.isnan, block)) else largest(block)
        scales.append(e4m3(fp32(scale * fp32(top * fp32(1 / 6)))))
        factor = e4m3_value(scales[-1])
        multiplier = 0.0 if factor == 0 else fp32(scale / factor)
        codes += [e2m1(fp32(x * multiplier)) for x in block]
    return [low | high << 4 for low, high in zip(codes[0::2], codes[1::2], strict=True)], scales


def rounder(dtype: torch.dtype) -> Callable[[float], float]:
    """Return the function that rounds an fp32 number to `dtype`: torch's cast, which is to nearest even."""
    if dtype is torch.float32:
        return fp32
    return lambda x: torch.tensor(x, dtype=torch.float32).to(dtype).item()


def norm(row: Sequence[float], gamma: Sequence[float], eps: float, bias: float, dtype: torch.dtype) -> list[float]:
    """Return the RMSNorm of a row, with an exact sum of squares."""
    mean = fp32(fp32(math.fsum(x * x for x in row)) / len(row))
    inverse = fp32(1 / math.sqrt(fp32(mean + fp32(eps))))
    to = rounder(dtype)
    return [to(fp32(fp32(x * inverse) * fp32(fp32(bias) + g))) for x, g in zip(row, gamma, strict=True)]
