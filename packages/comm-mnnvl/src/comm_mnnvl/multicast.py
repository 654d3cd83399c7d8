"""A multicast address over symmetric memory: what is stored there arrives in every rank's memory.

Never made unless somebody asked for it, and not where a switch of NCCL, torch or NVSHMEM turns multicast off on any
rank: on hosts that are shared, objects are few, and a bind that fails can leave a device in a state that only a reset
mends. Where it can't be had, everything goes on with the ranks' own addresses.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

from comm_core import _cuda
from comm_core._driver import Device
from comm_core._json import Json, JsonObject
from comm_core.consensus import Transaction, joint
from comm_core.errors import JointError
from comm_core.memory.fd_exchange import exchange_descriptors
from comm_core.memory.peer import FABRIC
from comm_core.memory.vmm import VmmMemory

if TYPE_CHECKING:
    import torch

    from comm_core.group import Group
    from comm_core.memory.peer import Mapped

__all__ = ["SWITCHES", "Multicast", "open_multicast", "switched_off"]

SWITCHES: Mapping[str, str] = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""Variable of another library -> the value that turns multicast off there, and here as well."""


def switched_off() -> str:
    """Return the switch of this process that turns multicast off, or an empty text."""
    for name, value in SWITCHES.items():
        if os.environ.get(name, "").strip() == value:
            return f"{name}={value}"
    return ""


class Multicast:
    """This rank's part of a multicast object over memory that is mapped already.

    What releases something may be called again, and does nothing where there is nothing.

    Args:
        mapped: the memory.
        device: this rank's GPU.

    Attributes:
        address: where stores arrive on all ranks; 0 while there was none yet. It stays the same over a checkpoint.
    """

    def __init__(self, mapped: Mapped, device: torch.device) -> None:
        self.address = 0
        self._mapped = mapped
        self._device = Device(device.index)
        self._fabric = mapped.form == FABRIC
        self._nbytes = mapped.nbytes
        self._handle: int | None = None
        self._bound = False
        self._placed = False

    def attach(self, group: Group) -> None:
        """Make the object, share it, bind this rank's memory to it, and map it. Collective.

        Raises:
            JointError: a step failed on some rank. On every rank; `vacate` takes away what was made here.
            GroupTimeoutError: a rank did not come.
        """
        root = group.rank == 0

        def create() -> Json:
            if not root:
                return None
            self._handle = self._device.multicast_create(group.size, self._nbytes, fabric=self._fabric)
            return self._device.export_fabric(self._handle).hex() if self._fabric else None

        handles = joint(group, "multicast: create", create)
        if self._fabric:
            joint(group, "multicast: import", lambda: self._import_fabric(cast("str", handles[0]), root))
        else:
            self._share_descriptor(group, root)
        joint(group, "multicast: add", lambda: self._device.multicast_add(self._known()))
        # All devices are there, so memory may be bound; and all memory is bound before anybody stores.
        joint(group, "multicast: bind", self._bind)
        joint(group, "multicast: map", self._place)

    def detach(self, group: Group) -> None:
        """Wait for the devices, and take the object away; the address stays reserved. Collective; errors as above."""
        joint(group, "multicast: wait for the devices", self._device.synchronize)
        joint(group, "multicast: release", self.vacate)

    def settle(self) -> None:
        """Wait until this rank's device has done all work that was given to it."""
        self._device.synchronize()

    def vacate(self) -> None:
        """Unmap, unbind and release on this rank."""
        if self._placed:
            self._device.unmap(self.address, self._nbytes)
            self._placed = False
        if self._bound:
            self._device.multicast_unbind(self._known(), self._nbytes)
            self._bound = False
        if self._handle is not None:
            self._device.release(self._handle)
            self._handle = None

    def release(self) -> None:
        """Give everything back on this rank, the address included."""
        self.vacate()
        if self.address:
            self._device.free_reservation(self.address, self._nbytes)
            self.address = 0
        self._device.close()

    def _known(self) -> int:
        assert self._handle is not None
        return self._handle

    def _import_fabric(self, data: str, root: bool) -> None:
        if not root:
            self._handle = self._device.import_fabric(bytes.fromhex(data))

    def _share_descriptor(self, group: Group, root: bool) -> None:
        """Pass the first rank's object to the others: every rank sends a descriptor, and only one of them counts."""
        own = -1
        received: list[int] = []

        def export() -> None:
            nonlocal own
            own = self._device.export_descriptor(self._known()) if root else os.open(os.devnull, os.O_RDONLY)

        def take() -> None:
            if not root:
                self._handle = self._device.import_descriptor(received[0])

        try:
            joint(group, "multicast: export", export)
            received = exchange_descriptors(group, own)
            joint(group, "multicast: import", take)
        finally:
            for descriptor in (own, *received):
                if descriptor >= 0:
                    os.close(descriptor)

    def _bind(self) -> None:
        memory = self._mapped.memory
        assert isinstance(memory, VmmMemory)
        self._device.multicast_bind(self._known(), memory.handle, self._nbytes)
        self._bound = True

    def _place(self) -> None:
        if not self.address:
            self.address = self._device.reserve(self._nbytes, self._device.granularity(fabric=self._fabric))
        self._device.map(self.address, self._nbytes, self._known())
        self._placed = True
        self._device.allow_access(self.address, self._nbytes)


def open_multicast(stages: Transaction, mapped: Mapped, device: torch.device) -> tuple[Multicast | None, str]:
    """Return a multicast address over memory, or None and the reason why there is none. Collective.

    It is the same on all ranks: all have it, or none.

    Args:
        stages: the transaction that the memory was made in; it owns the address as well.
        mapped: the memory.
        device: this rank's GPU.

    Raises:
        GroupTimeoutError: a rank did not come.
    """
    group = stages.group
    records = joint(group, "multicast: look", lambda: _look(mapped, device, group.size))
    reason = _against(cast("list[Mapping[str, Json]]", records))
    if reason:
        return None, reason
    try:
        # A transaction of its own: what fails here is taken down on all ranks, and nothing else is.
        with Transaction(group, "try multicast") as attempt:
            made = attempt.step("begin", lambda: Multicast(mapped, device), Multicast.release)
            made.attach(group)
            attempt.commit()
    except JointError as error:
        return None, str(error)
    # Not counted as bytes of its own; but what a late peer may still store through is not taken away either.
    stages.step("multicast", lambda: made, Multicast.release, shared_bytes=1)
    # Taken down first: nobody unbinds what a device may still store through.
    stages.step("use multicast", lambda: made, Multicast.settle)
    return made, ""


def _look(mapped: Mapped, device: torch.device, ranks: int) -> JsonObject:
    """Return why this rank can't have a multicast address, and which GPU it is on. Never raises."""
    try:
        reason = switched_off() and f"{switched_off()} turns multicast off"
        reason = reason or _unable(mapped, device, ranks)
        return {"reason": reason, "device": "" if reason else _cuda.device_properties(device.index).uuid}
    except Exception as error:
        return {"reason": f"{type(error).__name__}: {error}", "device": ""}


def _unable(mapped: Mapped, device: torch.device, ranks: int) -> str:
    own = Device(device.index)
    if not own.attribute("MULTICAST_SUPPORTED"):
        return f"{device} can't do multicast: CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED is 0"
    try:
        granule = own.multicast_granularity(ranks, mapped.nbytes, fabric=mapped.form == FABRIC)
    finally:
        own.close()
    return f"{mapped.nbytes} bytes are no multiple of the {granule} that it takes" if mapped.nbytes % granule else ""


def _against(records: list[Mapping[str, Json]]) -> str:
    """Return why the group can't have a multicast address, or an empty text. Pure."""
    reasons = [f"rank {rank}: {record['reason']}" for rank, record in enumerate(records) if record["reason"]]
    if reasons:
        return "; ".join(reasons)
    devices = [str(record["device"]) for record in records]
    shared = len(set(devices)) < len(devices) or "" in devices
    return "ranks share a GPU, or don't know theirs, and a multicast object takes each once" if shared else ""
