"""The raw entry points, without a GPU: what is refused before anything is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import comm_nvlink
from comm_core.errors import ArgumentTypeError, ArgumentValueError, UnsupportedError
from comm_core.windows.signals import SIGNAL_BYTES
from comm_nvlink.launch import FLAG_BYTES

GOOD: dict[str, Any] = {
    "out_ptrs": [1 << 20, 2 << 20],
    "signal_ptrs": [3 << 20, 4 << 20],
    "rank": 1,
    "world_size": 2,
    "full_nvlink": True,
}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rank": True}, ArgumentTypeError, "ints"),
        ({"rank": 2}, ArgumentValueError, "rank 2 of 2"),
        ({"rank": -1}, ArgumentValueError, "rank -1 of 2"),
        ({"world_size": 3}, ArgumentValueError, "world size"),
        ({"full_nvlink": False}, UnsupportedError, "full_nvlink"),
        ({"out_ptrs": [1 << 20]}, ArgumentTypeError, "out_ptrs must be 2 addresses"),
        ({"signal_ptrs": [3 << 20, "x"]}, ArgumentTypeError, "signal_ptrs must be 2 addresses"),
        ({"out_ptrs": [1 << 20, 0]}, ArgumentValueError, "out_ptrs must be aligned to 16 bytes and not 0"),
        ({"out_ptrs": [1 << 20, (2 << 20) + 8]}, ArgumentValueError, "aligned to 16 bytes"),
        ({"signal_ptrs": [3 << 20, (4 << 20) + 64]}, ArgumentValueError, "aligned to 128 bytes"),
    ],
)
def test_bad_arguments_of_init_are_named(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        comm_nvlink.init_ulysses_a2a(**{**GOOD, **change})


@pytest.mark.parametrize("handle", [0, 7, -1])
def test_handles_that_were_never_made_are_refused(handle: int) -> None:
    x = torch.empty(1, 2, 2, 4)
    with pytest.raises(ArgumentValueError, match=f"{handle} is no handle"):
        comm_nvlink.ulysses_a2a(handle, x, x, 1, 2, 2, 4, 0)
    with pytest.raises(ArgumentValueError, match=f"{handle} is no handle"):
        comm_nvlink.dispose_ulysses_a2a(handle)


def test_handles_are_ints() -> None:
    with pytest.raises(ArgumentTypeError, match="handle"):
        comm_nvlink.dispose_ulysses_a2a("1")  # pyright: ignore[reportArgumentType]


def test_signals_hold_the_block_and_the_flags() -> None:
    assert comm_nvlink.ulysses_signal_bytes() == SIGNAL_BYTES + FLAG_BYTES
    assert SIGNAL_BYTES % 128 == 0


def test_importing_the_package_imports_no_torch_cuda_code() -> None:
    """The names are there, and the module behind them is imported when one is used."""
    assert {"init_ulysses_a2a", "ulysses_a2a", "dispose_ulysses_a2a"} <= set(dir(comm_nvlink))
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = comm_nvlink.nothing_like_this  # pyright: ignore
