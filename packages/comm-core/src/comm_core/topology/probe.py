"""The probe: what this process knows about its host, its device and that device's peers. Never raises.

A GPU is found in NVML by its UUID, never by an ordinal: CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER and NVML each number
the same GPUs differently. CUDA_VISIBLE_DEVICES is not parsed either (it may hold ordinals, UUIDs, prefixes of UUIDs
or MIG ids); CUDA is asked for the UUIDs of what it shows.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from comm_core import _cuda, _env, _nvml
from comm_core._version import __version__
from comm_core.topology import recorded
from comm_core.topology.facts import DeviceFacts, HostFacts, PairFacts, RankFacts
from comm_core.topology.pcie import pcie_path

if TYPE_CHECKING:
    import torch

__all__ = ["host_facts", "numa_node", "probe_machine", "probe_rank"]

_PROC = Path("/proc")
_SYSFS = Path("/sys")
_VETO_VARIABLES = ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL")
_MAX_TEXT = 300


@dataclass
class _Draft:
    """Facts being collected, so that a probe that fails half-way still hands over what it has found."""

    rank: int
    host: HostFacts = field(default_factory=HostFacts)
    device: DeviceFacts = field(default_factory=DeviceFacts)
    peers: dict[str, PairFacts] = field(default_factory=dict[str, PairFacts])
    versions: dict[str, str] = field(default_factory=dict[str, str])
    environment: dict[str, str] = field(default_factory=dict[str, str])
    notes: list[str] = field(default_factory=list[str])
    error: str | None = None

    def finish(self) -> RankFacts:
        return RankFacts(
            rank=self.rank,
            host=self.host,
            device=self.device,
            peers=self.peers,
            versions={key: value for key, value in self.versions.items() if value},
            environment=self.environment,
            notes=tuple(dict.fromkeys(self.notes)),
            error=self.error,
        )


def probe_rank(rank: int, device: torch.device, *, proc: Path = _PROC, sysfs: Path = _SYSFS) -> RankFacts:
    """Return what this process finds out for group rank `rank` on `device`. Never raises; local.

    For a CPU device neither CUDA nor NVML is touched. For a CUDA device CUDA is initialized in this process, and no
    context is made on any other device. ``COMM_TOPOLOGY_FILE`` replaces all of it by the record of `rank` in that
    file.

    Args:
        rank: group rank.
        device: the device that the rank is bound to, with an explicit ordinal.
        proc: root of procfs, for fixtures.
        sysfs: root of sysfs, for fixtures.

    Returns:
        Facts, with `error` set if the probe as a whole failed. A single fact that could not be established is
        unknown and has a note.
    """
    draft = _Draft(rank)
    from_file = None
    try:
        from_file = _env.topology_file()
        if from_file is not None:
            return recorded.read_rank(from_file, rank)
        _collect_process(draft, proc)
        if device.type == "cuda":
            _collect_cuda(draft, device, sysfs)
    except Exception as error:
        # One rank that raises here would leave the others waiting in the gather that follows.
        draft.error = _brief(error)
    facts = draft.finish()
    return facts if from_file is None else replace(facts, recorded=True)


def probe_machine(*, proc: Path = _PROC, sysfs: Path = _SYSFS) -> list[RankFacts]:
    """Return one record for each GPU of this machine, as if it had one rank each; or one CPU record. Never raises.

    Only NVML is asked: CUDA is not initialized and torch is not imported. What CUDA would say about peer access is
    therefore inferred from NVML's P2P status, and a note says so. ``COMM_TOPOLOGY_FILE`` replaces the machine by the
    recorded one.

    Args:
        proc: root of procfs, for fixtures.
        sysfs: root of sysfs, for fixtures.
    """
    common = _Draft(0)
    try:
        path = _env.topology_file()
        if path is not None:
            return [replace(facts, recorded=True) for facts in recorded.load(path)]
        _collect_process(common, proc)
        with _nvml.session() as nvml:
            devices = nvml.devices()
            drafts = [replace(common, rank=rank, device=DeviceFacts(kind="cuda")) for rank in range(len(devices))]
            for draft, own in zip(drafts, devices, strict=True):
                before = len(nvml.notes)
                draft.versions = {**common.versions, **_driver_versions(nvml)}
                draft.device = _from_nvml(draft.device, nvml, own, sysfs)
                draft.peers = {
                    peer.uuid: _infer_access(nvml.pair(own, peer)) for peer in devices if peer.uuid != own.uuid
                }
                draft.notes = [*nvml.notes[before:], "peer access was inferred from NVML: CUDA was not asked"]
            if not drafts:
                common.notes += nvml.notes if nvml.available else [nvml.reason]
        return [draft.finish() for draft in drafts] or [common.finish()]
    except Exception as error:
        common.error = _brief(error)
        return [common.finish()]


def host_facts(proc: Path = _PROC) -> HostFacts:
    """Return where this process runs; what can't be read is empty."""
    return HostFacts(
        hostname=socket.gethostname(),
        boot_id=_read(proc / "sys/kernel/random/boot_id"),
        pid_namespace=_read_link(proc / "self/ns/pid"),
        ipc_namespace=_read_link(proc / "self/ns/ipc"),
        mount_namespace=_read_link(proc / "self/ns/mnt"),
        uid=os.getuid(),
        network_namespace=_read_link(proc / "self/ns/net"),
    )


def numa_node(pci_bus_id: str, sysfs: Path = _SYSFS) -> int | None:
    """Return the NUMA node of a PCI device, None where the system does not say (-1, as in virtual machines)."""
    if not pci_bus_id:
        return None
    try:
        node = int(_read(sysfs / "bus/pci/devices" / pci_bus_id / "numa_node"))
    except ValueError:
        return None
    return node if node >= 0 else None


def _collect_process(draft: _Draft, proc: Path) -> None:
    draft.host = host_facts(proc)
    draft.environment = {name: os.environ[name][:32] for name in _VETO_VARIABLES if name in os.environ}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        # Whether it is set explains why a GPU is invisible. What it says is nobody's business: it may hold UUIDs.
        draft.environment["CUDA_VISIBLE_DEVICES"] = "set"
    draft.versions = {
        "comm_core": __version__,
        "python": platform.python_version(),
        "torch": _distribution_version("torch"),
        "nvidia_ml_py": _distribution_version("nvidia-ml-py"),
    }


def _collect_cuda(draft: _Draft, device: torch.device, sysfs: Path) -> None:
    index = cast("int | None", device.index)
    draft.device = DeviceFacts(kind="cuda", index=-1 if index is None else index)
    draft.versions["cuda_runtime"] = _cuda.runtime_version() or ""
    draft.versions["nccl"] = _cuda.nccl_version() or ""
    if index is None:
        index = _cuda.current_device()
    own = _cuda.device_properties(index)
    draft.device = DeviceFacts(
        kind="cuda",
        index=index,
        uuid=own.uuid,
        name=own.name,
        pci_bus_id=own.pci_bus_id,
        numa_node=numa_node(own.pci_bus_id, sysfs),
        pcie_path=pcie_path(own.pci_bus_id, sysfs),
        mig=True if own.uuid.startswith("MIG-") else None,
        compute_capability=own.compute_capability,
        memory_bytes=own.memory_bytes,
    )
    if own.note:
        draft.notes.append(own.note)
    draft.peers = _peers_by_cuda(draft, own)
    with _nvml.session() as nvml:
        if nvml.available:
            draft.versions.update(_driver_versions(nvml))
            _add_nvml(draft, nvml, sysfs)
        draft.notes += nvml.notes if nvml.available else [nvml.reason]


def _peers_by_cuda(draft: _Draft, own: _cuda.DeviceProperties) -> dict[str, PairFacts]:
    """Return CUDA's answer for every other device that this process sees."""
    peers: dict[str, PairFacts] = {}
    for index in range(_cuda.device_count()):
        if index == own.index:
            continue
        try:
            uuid = _cuda.device_properties(index).uuid
        except Exception as error:
            draft.notes.append(f"CUDA device {index}: {_brief(error)}")
            continue
        if not uuid or uuid == own.uuid:
            continue
        try:
            peers[uuid] = PairFacts(peer_access=_cuda.can_access_peer(own.index, index))
        except Exception as error:
            peers[uuid] = PairFacts(error=f"peer_access: {_brief(error)}")
    return peers


def _add_nvml(draft: _Draft, nvml: _nvml.Nvml, sysfs: Path) -> None:
    """Add what NVML knows about the device and about its pairs, whether CUDA shows the other side or not."""
    own = nvml.find(draft.device.uuid, draft.device.pci_bus_id)
    if own is None:
        return
    draft.device = _from_nvml(draft.device, nvml, own, sysfs)
    if draft.device.mig:
        draft.notes.append("a MIG slice has no peers: its pairs were not probed")
        return
    hidden = 0
    for peer in nvml.devices():
        if peer.uuid == own.uuid:
            continue
        pair = nvml.pair(own, peer)
        known = draft.peers.get(peer.uuid)
        if known is None:
            hidden += 1
        else:
            errors = [text for text in (known.error, pair.error) if text]
            pair = replace(pair, peer_access=known.peer_access, error="; ".join(errors) or None)
        draft.peers[peer.uuid] = pair
    if hidden:
        draft.notes.append(f"this process does not see {hidden} of the machine's GPUs through CUDA")


def _from_nvml(device: DeviceFacts, nvml: _nvml.Nvml, own: _nvml.NvmlDevice, sysfs: Path) -> DeviceFacts:
    """Return `device` completed by NVML. What CUDA has said stands, but for the prefix of the UUID."""
    pci_bus_id = device.pci_bus_id or own.pci_bus_id
    # Where CUDA could not name the device it was found by its address, and which GPU that is stays unproven.
    same = device.uuid[4:] == own.uuid[4:] or device.index < 0
    return replace(
        device,
        uuid=own.uuid if same else device.uuid,
        name=device.name or nvml.name(own) or "",
        pci_bus_id=pci_bus_id,
        numa_node=numa_node(pci_bus_id, sysfs),
        pcie_path=pcie_path(pci_bus_id, sysfs),
        mig=True if device.mig else nvml.mig(own),
        compute_capability=device.compute_capability or nvml.compute_capability(own) or "",
        memory_bytes=nvml.memory_bytes(own) if device.memory_bytes is None else device.memory_bytes,
        nvlinks=nvml.nvlinks(own),
        fabric=nvml.fabric(own),
    )


def _infer_access(pair: PairFacts) -> PairFacts:
    both = (pair.p2p_read, pair.p2p_write)
    return replace(pair, peer_access=False if False in both else None if None in both else True)


def _driver_versions(nvml: _nvml.Nvml) -> dict[str, str]:
    return {"nvidia_driver": nvml.driver_version() or "", "cuda_driver": nvml.cuda_driver_version() or ""}


def _distribution_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _read_link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""


def _brief(error: Exception) -> str:
    """Return an error as one line: CUDA's own texts go on for paragraphs of advice."""
    first = (str(error).strip().splitlines() or [""])[0][:_MAX_TEXT]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
