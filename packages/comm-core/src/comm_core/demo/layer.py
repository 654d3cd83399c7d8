"""One attention layer in the manner of Wan2.1, in plain torch, cut where Ulysses exchanges.

Everything before and after the attention is per token, so a rank computes it for its own part of the sequence; RoPE
needs to know where in the whole sequence that part is. Attention is per head and needs the whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

__all__ = ["Layer", "Shape", "attend", "embed", "make_layer", "patches", "project_in", "project_out", "rotations"]

_EPS = 1e-6
# Scores as flat as those of random weights would average over all tokens, and an exchange that mixed them up would
# hardly be seen in the output. Trained layers have gains above one as well.
_GAIN = 1.5


@dataclass(frozen=True)
class Shape:
    """Sizes of the layer.

    Attributes:
        heads: H.
        head_dim: D, even.
        rows: of the picture in tokens.
        columns: of the picture in tokens; the sequence goes row by row.
        pixels: values of one token, ``3 * patch * patch``.
    """

    heads: int
    head_dim: int
    rows: int
    columns: int
    pixels: int

    @property
    def dim(self) -> int:
        """Width of a token."""
        return self.heads * self.head_dim


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: ``qkv [3 * dim, dim]``, ``out [dim, dim]``, gains ``[dim]`` of the norms of Q and K."""

    qkv: torch.Tensor
    out: torch.Tensor
    q_gain: torch.Tensor
    k_gain: torch.Tensor


def _random(rows: int, columns: int, seed: int) -> torch.Tensor:
    # On the CPU whatever the device, so that every rank and every machine has the same weights.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def make_layer(shape: Shape, seed: int, device: torch.device, dtype: torch.dtype) -> Layer:
    """Return seeded weights; the same on every rank."""
    weights = _random(4 * shape.dim, shape.dim, seed).to(device, dtype)
    gain = torch.full((shape.dim,), _GAIN, device=device, dtype=dtype)
    return Layer(weights[: 3 * shape.dim], weights[3 * shape.dim :], gain, gain)


def patches(pixels: torch.Tensor, patch: int, start: int, stop: int) -> torch.Tensor:
    """Return tokens `start` to `stop` of a picture, row by row.

    Args:
        pixels: uint8 ``[height, width, 3]``, both a multiple of `patch`.
        patch: pixels of a token's side.
        start: first token.
        stop: one past the last token.

    Returns:
        float32 ``[1, stop - start, 3 * patch * patch]`` in [-1, 1].
    """
    height, width, _ = pixels.shape
    grid = pixels.view(height // patch, patch, width // patch, patch, 3).permute(0, 2, 1, 3, 4)
    tokens = grid.reshape(1, -1, 3 * patch * patch)[:, start:stop]
    return tokens.to(torch.float32) / 127.5 - 1.0


def embed(tokens: torch.Tensor, shape: Shape, seed: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Return the patch embedding ``[1, S, dim]`` of `tokens` ``[1, S, pixels]``."""
    weight = _random(shape.dim, shape.pixels, seed)
    return (tokens @ weight.T).to(device, dtype)


def rotations(shape: Shape, start: int, stop: int, device: torch.device) -> torch.Tensor:
    """Return the RoPE rotations of tokens `start` to `stop` of the whole sequence, ``[stop - start, 1, D / 2]``.

    The head dimension is divided among frame, row and column, two sixths for each of the latter and the rest for the
    frame. A picture is one frame, so those pairs are not turned.
    """
    pairs = shape.head_dim // 2
    by_row = by_column = pairs // 3
    by_frame = pairs - by_row - by_column
    index = torch.arange(start, stop, dtype=torch.float64)
    parts: list[torch.Tensor] = []
    for count, position in (
        (by_frame, torch.zeros_like(index)),
        (by_row, index // shape.columns),
        (by_column, index % shape.columns),
    ):
        frequency = 10000.0 ** -(torch.arange(count, dtype=torch.float64) / max(count, 1))
        parts.append(torch.outer(position, frequency))
    angle = torch.cat(parts, dim=1)
    return torch.polar(torch.ones_like(angle), angle).to(device, torch.complex64).unsqueeze(1)


def project_in(
    x: torch.Tensor, layer: Layer, shape: Shape, turns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q, K and V, each contiguous ``[1, S, H, D]``, of tokens `x` ``[1, S, dim]`` with rotations `turns`."""
    normed = functional.layer_norm(x, (shape.dim,), eps=_EPS)
    q, k, v = functional.linear(normed, layer.qkv).chunk(3, dim=-1)
    heads = (1, x.shape[1], shape.heads, shape.head_dim)
    q = functional.rms_norm(q, (shape.dim,), layer.q_gain, _EPS)
    k = functional.rms_norm(k, (shape.dim,), layer.k_gain, _EPS)
    return _turn(q.view(heads), turns), _turn(k.view(heads), turns), v.contiguous().view(heads)


def _turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.to(torch.float32).reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return softmax attention of Q, K and V ``[1, S, H, D]``, contiguous in that layout."""
    out = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    return out.transpose(1, 2).contiguous()


def project_out(x: torch.Tensor, attended: torch.Tensor, layer: Layer) -> torch.Tensor:
    """Return the layer's output ``[1, S, dim]``: its input `x` plus the projection of ``[1, S, H, D]``."""
    return x + functional.linear(attended.flatten(2), layer.out)
