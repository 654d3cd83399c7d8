"""How the ranks of a group pass each other memory: file descriptors on one host, fabric handles between hosts.

The group decides, never a rank. On one host nothing of a fabric is looked at: single machines with NVSwitch, and
virtual machines with passed-through GPUs, say that they support fabric handles and refuse them. Between hosts every
rank's GPU must have joined the same clique of the same cluster, and every rank must really have imported every other
rank's handle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, cast

from comm_core import _cuda, _nvml
from comm_core._driver import Device
from comm_core._json import Json, JsonObject
from comm_core.consensus import Transaction
from comm_core.errors import JointError, UnsupportedError
from comm_core.memory.fd_exchange import out_of_reach
from comm_core.memory.peer import FABRIC, map_jointly
from comm_core.topology.facts import FabricFacts, RankFacts
from comm_core.topology.predicates import fabric_clique, single_host
from comm_core.topology.probe import host_facts

if TYPE_CHECKING:
    import torch

__all__ = ["FORMS", "agree_form", "fabric_facts", "try_fabric"]

FORMS: Mapping[str, str] = {"posix_fd": "vmm_fd", "fabric": FABRIC}
"""Kind of handle -> the form of peer memory that uses it."""
_ATTRIBUTE = "HANDLE_TYPE_FABRIC_SUPPORTED"


def agree_form(stages: Transaction, device: torch.device) -> str:
    """Return the form of memory that the group can share, as steps of `stages`. Collective.

    Args:
        stages: the transaction.
        device: this rank's GPU, with an explicit ordinal.

    Raises:
        JointError: the ranks can't share memory: on one host they can't pass descriptors; between hosts a rank's GPU
            is in no fabric, or in another one, or a handle could not be imported. On every rank, with the reason.
        GroupTimeoutError: a rank did not come.
    """
    _, found = stages.step_shared("look at the hosts", host_facts, lambda host: cast("Json", asdict(host)))
    ranks = [RankFacts.from_json({"rank": rank, "host": host}) for rank, host in enumerate(found)]
    several = single_host([item for item in ranks if item.host.boot_id])
    if several is None:
        reason = out_of_reach(ranks, unknown_too=False)
        if reason is not None:
            raise JointError(f"symmetric memory: {reason}", _names(ranks))
        return FORMS["posix_fd"]
    _, fabrics = stages.step_shared("look at the fabric", lambda: fabric_facts(device), _same)
    ranks = [
        RankFacts.from_json({"rank": rank, "host": found[rank], "device": cast("JsonObject", device)})
        for rank, device in enumerate(fabrics)
    ]
    reason = fabric_clique(ranks)
    if reason is not None:
        raise JointError(f"symmetric memory: {several}, and there is {reason}", _names(ranks))
    try_fabric(stages, device)
    return FORMS["fabric"]


def fabric_facts(device: torch.device) -> JsonObject:
    """Return this rank's GPU and what NVML knows about its fabric, as JSON of `DeviceFacts`. Local.

    Raises:
        UnsupportedError: the device can't make fabric handles.
    """
    own = Device(device.index)
    if not own.attribute(_ATTRIBUTE):
        raise UnsupportedError(f"{device} has no fabric handles: CU_DEVICE_ATTRIBUTE_{_ATTRIBUTE} is 0")
    properties = _cuda.device_properties(device.index)
    with _nvml.session() as nvml:
        # By its UUID: CUDA and NVML number the same GPUs differently.
        found = nvml.find(properties.uuid, properties.pci_bus_id)
        fabric = FabricFacts() if found is None else nvml.fabric(found)
        uuid = properties.uuid if found is None else found.uuid
    return {"kind": "cuda", "uuid": uuid, "fabric": cast("Json", asdict(fabric))}


def try_fabric(stages: Transaction, device: torch.device) -> None:
    """Make a little memory, map it on all ranks and release it again. Collective.

    Importing one's own handle always works, so only this shows whether an IMEX channel is missing or a container is
    cut off from the fabric.

    Raises:
        JointError: a rank could not export its memory or import a peer's. On every rank.
        GroupTimeoutError: a rank did not come.
    """
    with Transaction(stages.group, "try fabric handles") as trial:
        map_jointly(trial, 1, device, form=FABRIC, what="a little memory")
        teardown = trial.commit()
    teardown.close()


def _same(value: JsonObject) -> Json:
    return value


def _names(ranks: list[RankFacts]) -> dict[int, str]:
    return {item.rank: f"host {item.host.hostname!r}" for item in ranks}
