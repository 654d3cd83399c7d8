"""The adapter to an installed SageAttention 2: its attention kernels, called with operands that are encoded already.

What it takes care of, because the library does not:

- scales must have exactly the width that the kernel derives from the rows it is given (`check_encoded`);
- V is passed whole, with its padding, and typed as FP8;
- a misaligned pointer or stride ends the process inside the library, so both are checked before;
- the kernels run on the legacy default stream whatever the current stream is, so each waits for the other;
- in a graph capture they would run at once and not be recorded, so that is refused.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from comm_core import _cuda
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_lowp.consumer import check_encoded, softmax_scale
from comm_lowp.sage2.grid import Layout

if TYPE_CHECKING:
    from comm_lowp.qkv import UlyssesQKV

__all__ = ["find_kernel", "sage_attention"]

_PACKAGE = "sageattention"
_DEVICE_TYPE = "cuda"
_ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "sage2_sm90": (
        ("_qattn_sm90", "sm90_compile"),
        ("qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf",),
    ),
    "sage2_sm89_sm120": (
        ("_qattn_sm89", "sm89_compile"),
        (
            # The faster one, with an fp16 accumulator; older releases have only the other.
            "qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf",
            "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf",
        ),
    ),
}
"""Layout -> (modules of the library, entries by preference)."""
_NHD = 0
_NOT_CAUSAL = 0
_PER_WARP = 2
_NO_LSE = 0
_INSTALL = (
    "SageAttention 2 is installed from its sources, https://github.com/thu-ml/SageAttention, on the GPU machine"
)


def find_kernel(layout: Layout) -> Callable[..., Any]:
    """Return the library's attention kernel for `layout`.

    Raises:
        UnsupportedError: the library is absent, broken, or lacks the kernel; the text says which.
    """
    modules, entries = _ENTRIES[layout.name]
    try:
        importlib.import_module(_PACKAGE)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == _PACKAGE:
            raise UnsupportedError(
                f"sageattention is not installed: {_INSTALL}. reference_attention works without it"
            ) from error
        raise UnsupportedError(f"sageattention is installed and can't be imported: {error}. {_INSTALL}") from error
    except Exception as error:
        raise UnsupportedError(
            f"sageattention is installed and fails while it is imported: {type(error).__name__}: {error}. {_INSTALL}"
        ) from error
    reasons: list[str] = []
    for entry in entries:
        for name in modules:
            try:
                found = getattr(importlib.import_module(f"{_PACKAGE}.{name}"), entry, None)
            except Exception as error:
                reasons.append(f"{_PACKAGE}.{name}: {type(error).__name__}: {error}")
                continue
            if found is not None:
                return found
            reasons.append(f"{_PACKAGE}.{name} has no {entry}")
    raise UnsupportedError(
        f"the installed sageattention has no kernel for layout {layout.name} ({'; '.join(dict.fromkeys(reasons))}): "
        f"it is another major version, or it was built for other architectures. {_INSTALL}"
    )


def sage_attention(
    encoded: UlyssesQKV, sm_scale: float | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with SageAttention 2 over operands as `scatter_qkv` returns them. Local; on the current stream.

    Args:
        encoded: as `scatter_qkv` returns it, on a CUDA device.
        sm_scale: factor of the logits; None is ``D ** -0.5``. The encoding has no part of it.
        out: contiguous ``[B, S, H/P, D]`` in `encoded.input_dtype` to write instead of a new tensor.

    Returns:
        ``[B, S, H/P, D]`` in `encoded.input_dtype`, rows from U on zero: an operand of `gather_heads`.

    Raises:
        ArgumentTypeError: an argument is something else.
        ArgumentValueError: the parts of `encoded`, or `out`, don't fit, or are not aligned.
        UnsupportedError: the library or its kernel is missing, or a graph is being captured.
    """
    checked, layout = check_encoded(encoded)
    scale = softmax_scale(sm_scale, checked.q.shape[3])
    device = checked.q.device
    if device.type != _DEVICE_TYPE:
        raise UnsupportedError(f"SageAttention needs a CUDA device, not {device}; reference_attention runs there")
    if _cuda.is_capturing():
        raise UnsupportedError(
            "SageAttention can't be captured: its kernels run on the legacy default stream, at once, and the graph "
            "would not have them"
        )
    result = _output(checked, out)
    kernel = find_kernel(layout)
    used = checked.used_sequence
    live = result[:, :used]
    q, k = checked.q[:, :used], checked.k[:, :used]
    for x, name in ((q, "encoded.q"), (k, "encoded.k"), (checked.v, "encoded.v")):
        _check_alignment(x, name)
    with _cuda.device_guard(device), torch.no_grad():
        result[:, used:].zero_()
        _on_legacy_stream(
            device,
            lambda: kernel(
                q,
                k,
                checked.v,
                live,
                checked.q_scale,
                checked.k_scale,
                checked.v_scale,
                _NHD,
                _NOT_CAUSAL,
                _PER_WARP,
                scale,
                _NO_LSE,
            ),
        )
    return result


def _output(encoded: UlyssesQKV, out: torch.Tensor | None) -> torch.Tensor:
    shape, dtype, device = tuple(encoded.q.shape), encoded.input_dtype, encoded.q.device
    if out is None:
        return torch.empty(shape, dtype=dtype, device=device)
    if not isinstance(out, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ArgumentTypeError(f"out must be a torch.Tensor, got {type(out).__name__}")
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device or not out.is_contiguous():
        raise ArgumentValueError(
            f"out must be contiguous {dtype} {list(shape)} on {device}, got {out.dtype} {list(out.shape)} with "
            f"strides {out.stride()} on {out.device}"
        )
    if out.data_ptr() % 16:
        raise ArgumentValueError(f"out must begin at a 16-byte aligned address, got {out.data_ptr():#x}")
    return out


def _check_alignment(x: torch.Tensor, name: str) -> None:
    """Refuse what the library would end the process for: its copies need 16-byte aligned addresses and rows."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    strides = [stride * x.element_size() for size, stride in outer if size > 1]
    if x.data_ptr() % 16 or any(stride % 16 for stride in strides) or x.stride(-1) != 1:
        raise ArgumentValueError(
            f"{name} must have dense rows and 16-byte aligned addresses, got {x.data_ptr():#x} with strides "
            f"{x.stride()}"
        )


def _on_legacy_stream(device: torch.device, launch: Callable[[], object]) -> None:
    """Run `launch`, whose kernels go to the legacy default stream, in order with the current stream."""
    cuda: Any = _cuda.source().cuda
    current, legacy = cuda.current_stream(device), cuda.default_stream(device)
    if current == legacy:
        launch()
        return
    legacy.wait_stream(current)
    launch()
    current.wait_stream(legacy)
