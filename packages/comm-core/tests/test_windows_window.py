"""The set of windows: which one holds some memory, wherever the windows lie."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_core.group import thread_groups
from comm_core.windows import window
from comm_core.windows.window import WindowSet


@pytest.mark.parametrize("seed", range(5))
def test_memory_is_found_in_the_window_that_holds_all_of_it(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of any size, allocated in any order of their addresses, some of them next to each other."""
    chance = random.Random(seed)
    places: list[tuple[int, int]] = []
    end = 1000
    for _ in range(40):
        size = chance.randrange(1, 9)
        places.append((end, size))
        end += size + chance.choice((0, 0, 1, 5))
    chance.shuffle(places)
    addresses = iter([address for address, _ in places])
    monkeypatch.setattr(window, "map_jointly", lambda *_, **__: SimpleNamespace(addresses=(next(addresses),)))  # pyright: ignore
    windows = WindowSet(
        thread_groups(1)[0], torch.device("cpu"), "in_process", lambda address, nbytes: torch.empty(0)
    )
    stages: Any = None
    made = [windows.add_in(stages, size, "test") for _, size in places]
    assert list(windows) == made and [windows[number].number for number in range(40)] == list(range(40))
    for address in range(990, end + 10):
        for nbytes in range(1, 10):
            holding = [
                (item, address - start)
                for item, (start, size) in zip(made, places, strict=True)
                if start <= address and address + nbytes <= start + size
            ]
            found = windows.find(address, nbytes)
            assert ([] if found is None else [found]) == holding
