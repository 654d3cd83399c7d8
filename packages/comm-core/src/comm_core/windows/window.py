"""Windows: jointly allocated, numbered memory that every rank of the group maps."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from comm_core.consensus import Teardown, Transaction, joint
from comm_core.errors import ArgumentValueError, GroupTimeoutError, JointValueError
from comm_core.group import Group
from comm_core.memory.peer import Mapped, map_jointly
from comm_core.transport.interface import Window
from comm_core.windows.launch import WindowStruct

if TYPE_CHECKING:
    import torch

__all__ = ["MAX_WINDOWS", "MappedWindow", "WindowSet"]

MAX_WINDOWS = 256
"""Windows of one session; the table on the device has room for so many."""


@dataclass(frozen=True)
class MappedWindow(Window):
    """A window of a session.

    Attributes:
        number: the same on all ranks; it travels with every announcement and is checked.
        nbytes: size on every rank.
        mapped: where it is, on all ranks.
        rank: this rank.
        view: makes a tensor of an address and a size.
    """

    number: int
    nbytes: int
    mapped: Mapped
    rank: int
    view: Callable[[int, int], torch.Tensor]

    @cached_property
    def address(self) -> int:
        """Address of this rank's memory."""
        return self.mapped.addresses[self.rank]

    @property
    def local(self) -> torch.Tensor:
        """See `Window.local`."""
        return self.view(self.address, self.nbytes)

    @property
    def peer_pointers(self) -> tuple[int, ...]:
        """See `Window.peer_pointers`."""
        return self.mapped.addresses

    def pack(self) -> bytes:
        """Return the device's form."""
        return WindowStruct.pack(self.nbytes, self.mapped.addresses)


class WindowSet:
    """The windows of one session, in the order in which the group allocated them."""

    def __init__(
        self, group: Group, device: torch.device, form: str, view: Callable[[int, int], torch.Tensor]
    ) -> None:
        self._group = group
        self._device = device
        self._form = form
        self._view = view
        self._windows: list[MappedWindow] = []
        # The same by address, and the addresses: `find` is part of every call, and there may be hundreds of windows.
        self._by_address: list[MappedWindow] = []
        self._addresses: list[int] = []
        self._teardowns: list[Teardown] = []

    def __len__(self) -> int:
        """Return how many windows there are."""
        return len(self._windows)

    def __iter__(self) -> Iterator[MappedWindow]:
        """Iterate in the order of allocation."""
        return iter(self._windows)

    def __getitem__(self, number: int) -> MappedWindow:
        """Return window `number`."""
        return self._windows[number]

    def add_in(self, stages: Transaction, nbytes: int, what: str) -> MappedWindow:
        """Allocate one window as part of a transaction, which then owns it. Collective."""
        number = len(self._windows)
        mapped = map_jointly(stages, nbytes, self._device, form=self._form, what=what, number=number)
        window = MappedWindow(number, nbytes, mapped, self._group.rank, self._view)
        self._windows.append(window)
        place = bisect_right(self._addresses, window.address)
        self._addresses.insert(place, window.address)
        self._by_address.insert(place, window)
        return window

    def add(self, nbytes: int) -> MappedWindow:
        """Allocate one more window. Collective.

        Raises:
            JointValueError: the ranks ask for different sizes, or for too many windows.
            JointError: a rank can't allocate or map it; nothing is left allocated.
        """
        what = f"window {len(self._windows)}"

        def own_size() -> int:
            if nbytes < 1:
                raise ArgumentValueError(f"a window must have at least 1 byte, got {nbytes}")
            if len(self._windows) >= MAX_WINDOWS:
                raise ArgumentValueError(
                    f"all {MAX_WINDOWS} windows of this session are in use: allocate outputs once and reuse them"
                )
            return nbytes

        sizes = cast("list[int]", joint(self._group, f"{what}: size", own_size, error=JointValueError))
        if len(set(sizes)) > 1:
            raise JointValueError(
                f"{what}: the ranks ask for different sizes",
                {rank: f"{size} bytes" for rank, size in enumerate(sizes)},
            )
        with Transaction(self._group, f"allocate {what}") as stages:
            window = self.add_in(stages, nbytes, what)
            self._teardowns.append(stages.commit())
        return window

    @property
    def closed(self) -> bool:
        """Whether the windows that were added later were all released, or given up, on this rank."""
        return not self._teardowns

    def find(self, address: int, nbytes: int) -> tuple[MappedWindow, int] | None:
        """Return the window that holds this rank's memory [address, address + nbytes) and the offset in it."""
        place = bisect_right(self._addresses, address)
        if place:
            window = self._by_address[place - 1]
            offset = address - window.address
            if offset + nbytes <= window.nbytes:
                return window, offset
        return None

    def regroup(self, group: Group) -> None:
        """Go on with another group of the same ranks."""
        self._group = group
        for teardown in self._teardowns:
            teardown.group = group

    def release_alone(self) -> None:
        """Release the windows that were added later on this rank alone; see `Teardown.release_alone`."""
        while self._teardowns:
            self._teardowns[-1].release_alone()
            self._teardowns.pop()

    def abandon(self) -> int:
        """Give up the windows that were added later; return the bytes that are kept. See `Teardown.abandon`."""
        kept = sum(teardown.abandon() for teardown in reversed(self._teardowns))
        self._teardowns.clear()
        return kept

    def close(self, timeout_s: float | None) -> None:
        """Release the windows that were added later, last one first. Collective; may be called again.

        Where a rank is missing, the windows that are left are kept too; errors as in `Teardown.close`.
        """
        while self._teardowns:
            try:
                self._teardowns[-1].close(timeout_s)
            except GroupTimeoutError as error:
                self._teardowns.pop()
                kept = self.abandon()
                if not kept:
                    raise
                text = f"{error}; so are {kept} bytes of other windows"
                raise GroupTimeoutError(error.what, error.missing, text) from error
            self._teardowns.pop()
