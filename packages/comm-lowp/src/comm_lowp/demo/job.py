"""What one rank of the demo does."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch

from comm_core._json import Json, JsonObject
from comm_core.demo.ranks import Member
from comm_core.ulysses.communicator import UlyssesCommunicator
from comm_lowp.consumer import emulated_attention, reference_attention
from comm_lowp.qkv import UlyssesQKV, UlyssesQKVWorkspace
from comm_lowp.sage2 import reference
from comm_lowp.sage2.grid import LAYOUTS

__all__ = ["make_inputs", "run"]

_CONSUMERS: dict[str, Callable[[UlyssesQKV], torch.Tensor]] = {
    "exact attention over the encoded operands": reference_attention,
    "as the kernel of that layout computes it": emulated_attention,
}


def make_inputs(
    data: str, shape: tuple[int, int, int, int], used: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return Q, K and V of the whole sequence ``[B, S, H, D]``, rows from `used` on zero.

    ``"normal"`` is N(0, 1). ``"biased"`` is what video models look like: neighbours are alike, K has a large bias by
    channel, and some channels of V are larger than others.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random)

    q, k, v = (normal(*shape) for _ in range(3))
    if data == "biased":
        b, s, h, d = shape
        drift = normal(b, s // 16 + 1, h, d).repeat_interleave(16, dim=1)[:, :s]
        q, k = q * 0.5 + drift, k * 0.5 + drift + 6.0 * normal(b, 1, h, d)
        v = (v + normal(b, 1, h, d)) * torch.exp(normal(b, 1, h, d))
    for x in (q, k, v):
        x[:, used:] = 0.0
    return q.to(dtype), k.to(dtype), v.to(dtype)


def run(member: Member) -> Json:
    """Run this rank; return what it found."""
    options = member.arguments
    torch.set_num_threads(int(options["threads"]))
    # torch's annotations of it are partial, and only a handful of its functions are used.
    dist: Any = importlib.import_module("torch.distributed")
    member.tell("progress", at="meeting the other ranks")
    timeout_s = float(options["timeout_s"])
    dist.init_process_group(
        "gloo",
        store=member.store(timeout_s),
        rank=member.rank,
        world_size=member.size,
        timeout=timedelta(seconds=timeout_s),
    )
    with torch.inference_mode():
        result = _job(member)
    dist.destroy_process_group()
    return result


def _job(member: Member) -> JsonObject:
    options = member.arguments
    rows, used = int(options["rows"]), int(options["used"])
    dtype = cast("torch.dtype", getattr(torch, str(options["dtype"])))
    shape = (1, rows * member.size, int(options["heads"]), int(options["head_dim"]))
    inputs = make_inputs(str(options["data"]), shape, used, dtype, int(options["seed"]))
    own = slice(member.rank * rows, (member.rank + 1) * rows)
    q, k, v = (x[:, own].contiguous() for x in inputs)
    with UlyssesCommunicator(None, max_bytes=max(3 * q.nbytes, 1), dtype=dtype, device="cpu") as comm:
        member.tell("progress", at="prepare_qkv")
        workspace = cast("UlyssesQKVWorkspace", comm.prepare_qkv(q.shape, used_sequence=used))
        member.tell("progress", at="scatter_qkv")
        sent = comm.bytes_sent
        encoded = cast("UlyssesQKV", comm.scatter_qkv(q, k, v, workspace=workspace))
        sent = comm.bytes_sent - sent
        member.tell("progress", at="attention and gather_heads")
        outputs = {name: comm.gather_heads(attend(encoded)) for name, attend in _CONSUMERS.items()}
        sums = {name: _sums(output, _attend(inputs, own, used), own, used) for name, output in outputs.items()}
        spec = workspace.payload
        return {
            "identical": _identical(encoded, inputs, member),
            "sums": cast("Json", sums),
            "bytes_sent": sent,
            "layout": workspace.layout,
            "transport": workspace.transport,
            "statistics_bytes": workspace.statistics_bytes,
            "chunk_bytes": spec.chunk_bytes,
            "code_bytes": spec.q_scale_offset,
            "scale_bytes": 4 * spec.batch_size * spec.local_heads * (spec.q_scale_slots + spec.k_scale_slots),
            "v_shape": list(encoded.v.shape),
            "q_scale_shape": list(encoded.q_scale.shape),
            "k_scale_shape": list(encoded.k_scale.shape),
            "q_slots": spec.q_scale_slots,
            "k_slots": spec.k_scale_slots,
        }


def _identical(encoded: UlyssesQKV, inputs: tuple[torch.Tensor, ...], member: Member) -> bool:
    """Return whether the operands have the bytes that one device makes of the whole sequence."""
    q, k, v = inputs
    sums = torch.stack([reference.k_sum(part) for part in k.chunk(member.size, dim=1)])
    mean = reference.final_mean(sums, encoded.used_sequence, k.dtype)
    layout = LAYOUTS[encoded.layout]
    whole = reference.single_device(q, k, v, layout, used_sequence=encoded.used_sequence, mean=mean)
    for ours, theirs, dim in zip(encoded[:6], whole, (2, 2, 2, 1, 1, 1), strict=True):
        own = theirs.view(torch.uint8) if theirs.itemsize == 1 else theirs.view(torch.int32)
        part = own.chunk(member.size, dim=dim)[member.rank]
        if not torch.equal(ours.view(part.dtype), part):
            return False
    return True


def _attend(inputs: tuple[torch.Tensor, ...], own: slice, used: int) -> torch.Tensor:
    """Return attention of this rank's rows over the live ones, ``[1, H, rows, D]`` fp64, from the 16-bit inputs."""
    q, k, v = (x.transpose(1, 2).double() for x in inputs)
    logits = q[:, :, own] @ k[:, :, :used].transpose(2, 3) * q.shape[3] ** -0.5
    return torch.softmax(logits, dim=-1) @ v[:, :, :used]


def _sums(output: torch.Tensor, exact: torch.Tensor, own: slice, used: int) -> dict[str, float]:
    """Return what cosine and relative errors are made of, over this rank's live rows."""
    live = max(0, min(used, own.stop) - own.start)
    x = output.transpose(1, 2).double()[:, :, :live]
    y = exact[:, :, :live]
    return {
        "dot": float((x * y).sum()),
        "x2": float((x * x).sum()),
        "y2": float((y * y).sum()),
        "l1": float((x - y).abs().sum()),
        "y1": float(y.abs().sum()),
        "d2": float(((x - y) ** 2).sum()),
        "tail": float(output[:, live:].abs().sum()),
        "finite": float(bool(torch.isfinite(output).all())),
    }
