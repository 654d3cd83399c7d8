"""Predicates: what must hold for a group, as pure functions of the ranks' facts.

Each returns None where it holds, and otherwise the reason as one sentence without a full stop that names the ranks or
pairs where it does not. Unknown never holds. The `assess_*` functions put them together for each backend that this
project knows, so that a decision can be made, and explained, whether or not its plugin is installed.

A pair is ordered: "0→2" is what the device of rank 0 can do with the device of rank 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from comm_core.topology.facts import PairFacts, RankFacts
from comm_core.topology.ulysses import UlyssesPciePlan
from comm_core.transport.interface import Verdict

__all__ = [
    "KNOWN",
    "MNNVL_MIN_RANKS",
    "NVLINK_SIZES",
    "PCIE_ROUTES",
    "PCIE_SIZES",
    "Assess",
    "Reason",
    "all_cuda",
    "all_pairs_nvlink",
    "all_pairs_p2p",
    "assess_mnnvl",
    "assess_nvlink",
    "assess_pcie",
    "assess_peers",
    "cuda_ipc_reachable",
    "equal_environment",
    "fabric_clique",
    "fd_passing_reachable",
    "known_uuids",
    "no_mig",
    "no_p2p_veto",
    "no_pair_errors",
    "no_probe_errors",
    "ordered_4plus4",
    "ranks_complete",
    "single_host",
    "unique_devices",
    "world_size_in",
]

Reason: TypeAlias = "str | None"
"""None: it holds. Otherwise why not."""

NVLINK_SIZES = (2, 4, 6, 8)
"""Group sizes of the NVLink backend."""
PCIE_SIZES = (1, 2, 4, 8)
"""Group sizes of the PCIe backend."""
PCIE_ROUTES = ("auto", "p2p", "rdma", "hybrid", "prefer-rdma", "prefer-hybrid")
"""Routes of the PCIe backend that can be asked for."""
MNNVL_MIN_RANKS = 2
"""Smallest group of the multi-node NVLink backend."""

_LISTED = 6

# NCCL_P2P_LEVEL as a distance; the numbers are NCCL's old spelling of it.
_LEVELS = {"LOC": 0, "NVL": 1, "PIX": 2, "PXB": 3, "PHB": 4, "SYS": 5}
_LEVEL_NUMBERS = {"0": "LOC", "1": "PIX", "2": "PXB", "3": "PHB", "4": "SYS", "5": "SYS"}
_ANCESTOR_LEVEL = {"internal": 2, "single": 2, "multiple": 3, "hostbridge": 4, "node": 4, "system": 5}


def ranks_complete(facts: Sequence[RankFacts]) -> Reason:
    """Require ranks to be exactly 0 to n-1, in any order."""
    ranks = [record.rank for record in facts]
    if not ranks:
        return "there are no ranks"
    if sorted(ranks) != list(range(len(ranks))):
        return f"the ranks must be exactly 0 to {len(ranks) - 1}, got {ranks}"
    return None


def no_probe_errors(facts: Sequence[RankFacts]) -> Reason:
    """Require that no rank's probe failed as a whole."""
    failed = [f"rank {record.rank}: {record.error}" for record in facts if record.error is not None]
    return f"the topology probe failed on {_listed(failed, '; ')}" if failed else None


def world_size_in(facts: Sequence[RankFacts], sizes: Sequence[int]) -> Reason:
    """Require the number of ranks to be one of `sizes`."""
    if len(facts) in sizes:
        return None
    return f"world size {len(facts)} is not supported (only {', '.join(map(str, sizes))})"


def all_cuda(facts: Sequence[RankFacts]) -> Reason:
    """Require every rank to be bound to a CUDA device."""
    others = [record.rank for record in facts if record.device.kind != "cuda"]
    return f"{_ranks(others)} not on a CUDA device" if others else None


def known_uuids(facts: Sequence[RankFacts]) -> Reason:
    """Require every device to have an identity."""
    unknown = [record.rank for record in facts if not record.device.uuid]
    if not unknown:
        return None
    return (
        f"the physical GPU of {_ranks(unknown, verb=False)} is unknown: no UUID "
        "(does this torch have torch.cuda.get_device_properties(...).uuid?)"
    )


def no_mig(facts: Sequence[RankFacts]) -> Reason:
    """Require that no device is a MIG slice: slices have neither peer access nor CUDA IPC between them."""
    slices = [record.rank for record in facts if record.device.mig or record.device.uuid.startswith("MIG-")]
    if slices:
        return f"{_ranks(slices)} on a MIG slice, and MIG has no peer-to-peer access"
    unknown = [record.rank for record in facts if record.device.mig is None]
    if unknown:
        return f"whether {_ranks(unknown)} on a MIG slice is unknown (NVML: is nvidia-ml-py installed?)"
    return None


def unique_devices(facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Reason:
    """Require every rank to have a device of its own, unless several ranks may share one."""
    if allow_shared_gpu:
        return None
    by_uuid: dict[str, list[int]] = {}
    for record in facts:
        by_uuid.setdefault(record.device.uuid, []).append(record.rank)
    shared = [f"{_ranks(ranks)} on {uuid}" for uuid, ranks in by_uuid.items() if len(ranks) > 1]
    if not shared:
        return None
    return (
        f"ranks share a GPU: {_listed(shared, '; ')}. Bind each rank to its own, with "
        "torch.cuda.set_device(local_rank) before or with device= (COMM_ALLOW_SHARED_GPU=1 allows it for testing)"
    )


def single_host(facts: Sequence[RankFacts]) -> Reason:
    """Require one host: one boot id. Host names don't count, as containers of one host have different ones."""
    unknown = [record.rank for record in facts if not record.host.boot_id]
    if unknown:
        return f"the host of {_ranks(unknown, verb=False)} is unknown: no boot id (/proc/sys/kernel/random/boot_id)"
    hosts: dict[str, list[RankFacts]] = {}
    for record in facts:
        hosts.setdefault(record.host.boot_id, []).append(record)
    if len(hosts) == 1:
        return None
    parts = [
        f"{records[0].host.hostname or '?'} ({_ranks([record.rank for record in records], verb=False)})"
        for records in hosts.values()
    ]
    names = [{record.host.hostname for record in records} for records in hosts.values()]
    same = " (host names repeat, but the boot ids differ)" if len(set[str]().union(*names)) < len(hosts) else ""
    return f"the ranks span {len(hosts)} hosts: {_listed(parts)}{same}"


def cuda_ipc_reachable(facts: Sequence[RankFacts]) -> Reason:
    """Require that the ranks, on one host, can open each other's CUDA IPC handles.

    The driver finds the exporter by its process id, so the ranks must share a PID namespace: in containers with
    separate ones, opening a handle fails. The IPC namespace does not matter, because handles travel through the
    process group. This is necessary and not sufficient, so a transport still has to prove an open handle.
    """
    return _same_namespace(facts, "PID", [record.host.pid_namespace for record in facts])


def fd_passing_reachable(facts: Sequence[RankFacts]) -> Reason:
    """Require that the ranks, on one host, can pass file descriptors to each other over a unix socket.

    An abstract socket is found within one network namespace, one with a path within one file system tree; either
    will do. Process ids don't matter.
    """
    by_name = _same_namespace(facts, "network", [record.host.network_namespace for record in facts])
    if by_name is None:
        return None
    by_path = _same_namespace(facts, "mount", [record.host.mount_namespace for record in facts])
    return None if by_path is None else f"{by_name}, and {by_path}"


def equal_environment(facts: Sequence[RankFacts]) -> Reason:
    """Require NCCL_P2P_DISABLE and NCCL_P2P_LEVEL to be the same on all ranks."""
    for name in ("NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"):
        if len({record.environment.get(name) for record in facts}) > 1:
            values = [f"rank {record.rank}: {record.environment.get(name, 'unset')}" for record in facts]
            return f"{name} differs between ranks ({_listed(values, limit=8)})"
    return None


def no_p2p_veto(facts: Sequence[RankFacts], *, nvlink: bool = False) -> Reason:
    """Require that no rank's environment forbids peer-to-peer access.

    These variables are NCCL's, but who sets them has found peer-to-peer access broken on that machine, so the peer
    transports heed them: any NCCL_P2P_DISABLE but 0, and an NCCL_P2P_LEVEL that is nearer than the pairs of this
    group are. One rank is enough. Files (``nccl.conf``) are not read.

    Args:
        facts: the ranks.
        nvlink: whether the pairs are known to be connected by NVLink, which only the level LOC excludes.
    """
    for record in facts:
        value = record.environment.get("NCCL_P2P_DISABLE", "")
        if value not in ("", "0"):
            return f"NCCL_P2P_DISABLE={value} on rank {record.rank} forbids peer-to-peer access"
    for record in facts:
        value = record.environment.get("NCCL_P2P_LEVEL", "").strip().upper()
        if not value:
            continue
        text = f"NCCL_P2P_LEVEL={value} on rank {record.rank}"
        allowed = _LEVELS.get(_LEVEL_NUMBERS.get(value, value))
        if allowed is None:
            return f"{text} is none of {', '.join(_LEVELS)}, so what it forbids is unknown"
        if nvlink and allowed >= _LEVELS["NVL"]:
            continue
        too_far = [
            f"{a.rank}→{b.rank}"
            for a, b, pair in _ordered_pairs(facts, allow_shared_gpu=True)
            if _ANCESTOR_LEVEL.get((pair and pair.common_ancestor) or "system", 5) > allowed
        ]
        if allowed == 0 or too_far:
            pairs = f" between {_listed(too_far)}" if allowed and too_far else ""
            return f"{text} forbids peer-to-peer access{pairs}"
    return None


def all_pairs_p2p(facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Reason:
    """Require for every ordered pair that CUDA grants peer access and NVML denies neither reading nor writing.

    A pair on one device counts as connected where sharing is allowed.
    """
    causes: dict[str, list[str]] = {}
    for a, b, pair in _ordered_pairs(facts, allow_shared_gpu=allow_shared_gpu):
        if pair is None or (pair.peer_access is None and pair.error is None):
            cause = "the peer's GPU is not visible to this rank's process (CUDA_VISIBLE_DEVICES?) for"
        elif pair.peer_access is None:
            cause = "CUDA could not be asked about"
        elif pair.peer_access is False:
            cause = "CUDA denies peer access for"
        elif pair.p2p_read is False or pair.p2p_write is False:
            cause = "NVML denies peer access for"
        else:
            continue
        causes.setdefault(cause, []).append(f"{a.rank}→{b.rank}")
    if not causes:
        return None
    return "no peer-to-peer access: " + "; ".join(f"{cause} {_listed(pairs)}" for cause, pairs in causes.items())


def no_pair_errors(facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Reason:
    """Require that every deciding question about every ordered pair was answered."""
    failed = [
        f"{a.rank}→{b.rank} ({pair.error})"
        for a, b, pair in _ordered_pairs(facts, allow_shared_gpu=allow_shared_gpu)
        if pair is not None and pair.error is not None
    ]
    return f"the probe of pairs failed: {_listed(failed)}" if failed else None


def all_pairs_nvlink(facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Reason:
    """Require NVLink for every ordered pair. A pair on one device counts where sharing is allowed."""
    missing: list[str] = []
    unknown: list[str] = []
    for a, b, pair in _ordered_pairs(facts, allow_shared_gpu=allow_shared_gpu):
        if pair is None or pair.nvlink is None:
            unknown.append(f"{a.rank}→{b.rank}")
        elif not pair.nvlink:
            missing.append(f"{a.rank}→{b.rank}")
    parts = [f"no NVLink between ranks {_listed(missing)}"] if missing else []
    parts += [f"NVLink unknown between ranks {_listed(unknown)}"] if unknown else []
    return "; ".join(parts) or None


def ordered_4plus4(facts: Sequence[RankFacts]) -> Reason:
    """Require eight ranks, 0 to 3 on one side of the machine and 4 to 7 on the other.

    Either all NUMA nodes are known and equal within a side and different across, or NVML's common ancestor is known
    for every ordered pair; whatever is known must agree: across means ``"system"``, within means nearer.
    """
    if len(facts) != 8 or ranks_complete(facts) is not None:
        return f"needs exactly the ranks 0 to 7, got {[record.rank for record in facts]}"
    ordered = sorted(facts, key=lambda record: record.rank)
    nodes = [record.device.numa_node for record in ordered]
    numa_known = None not in nodes
    if numa_known and not (len(set(nodes[:4])) == len(set(nodes[4:])) == 1 and nodes[0] != nodes[4]):
        return f"the NUMA nodes of ranks 0 to 7 are {nodes}, not one for ranks 0 to 3 and another for ranks 4 to 7"
    wrong: list[str] = []
    unknown: list[str] = []
    for a, b, pair in _ordered_pairs(ordered, allow_shared_gpu=False):
        ancestor = None if pair is None else pair.common_ancestor
        if ancestor is None:
            unknown.append(f"{a.rank}→{b.rank}")
        elif (ancestor == "system") != ((a.rank < 4) != (b.rank < 4)):
            wrong.append(f"{a.rank}→{b.rank} ({ancestor})")
    if wrong:
        return f"the common ancestors do not split the ranks into 0 to 3 and 4 to 7: {_listed(wrong)}"
    if unknown and not numa_known:
        return f"neither NUMA nodes nor the common ancestors of {_listed(unknown)} are known"
    return None


def fabric_clique(facts: Sequence[RankFacts]) -> Reason:
    """Require one multi-node NVLink fabric: registered without error, one non-zero cluster UUID, one clique."""
    broken: list[str] = []
    keys: dict[tuple[str, int | None], list[RankFacts]] = {}
    for record in facts:
        fabric = record.device.fabric
        if fabric is None or fabric.state == "unknown":
            broken.append(f"{_where(record)}: fabric information is unknown")
        elif fabric.state != "completed":
            broken.append(f"{_where(record)}: fabric registration is {fabric.state}")
        elif fabric.status != 0:
            broken.append(f"{_where(record)}: fabric registration ended with NVML status {fabric.status}")
        elif not fabric.cluster_uuid.strip("0") or fabric.clique_id is None:
            broken.append(f"{_where(record)}: no fabric cluster (its UUID is zero, as on a single node)")
        else:
            keys.setdefault((fabric.cluster_uuid, fabric.clique_id), []).append(record)
    if broken:
        return f"no common NVLink fabric: {_listed(broken, '; ')}"
    if len(keys) > 1:
        parts = [
            f"{_where(records[0])} in clique {clique} of cluster {uuid[:8]}…"
            for (uuid, clique), records in keys.items()
        ]
        return f"no common NVLink fabric: {_listed(parts, '; ')}"
    return None


def assess_nvlink(
    facts: Sequence[RankFacts], *, sizes: Sequence[int] = NVLINK_SIZES, allow_shared_gpu: bool = False
) -> Verdict:
    """Return whether the group can use NVLink peer-to-peer access on one host.

    Args:
        facts: every rank's facts.
        sizes: group sizes that the kernels support.
        allow_shared_gpu: whether several ranks may be on one GPU; such a pair counts as connected.
    """
    return _verdict(
        _host_of(facts) + _sharing(facts) + f"all {_pair_count(facts)} ordered pairs have P2P and NVLink",
        lambda: ranks_complete(facts),
        lambda: no_probe_errors(facts),
        lambda: world_size_in(facts, sizes),
        lambda: all_cuda(facts),
        lambda: single_host(facts),
        lambda: cuda_ipc_reachable(facts),
        *_peer_checks(facts, allow_shared_gpu, nvlink=True),
    )


def assess_peers(facts: Sequence[RankFacts], *, sizes: Sequence[int], allow_shared_gpu: bool = False) -> Verdict:
    """Return whether all ranks' GPUs, on one host, have peer access to each other, over whatever link.

    Args:
        facts: every rank's facts.
        sizes: group sizes that are supported.
        allow_shared_gpu: whether several ranks may be on one GPU; such a pair counts as connected.
    """
    return _verdict(
        _host_of(facts) + _sharing(facts) + f"all {_pair_count(facts)} ordered pairs have P2P",
        lambda: ranks_complete(facts),
        lambda: no_probe_errors(facts),
        lambda: world_size_in(facts, sizes),
        lambda: all_cuda(facts),
        lambda: single_host(facts),
        *_peer_checks(facts, allow_shared_gpu, nvlink=False),
    )


def assess_pcie(
    facts: Sequence[RankFacts],
    *,
    sizes: Sequence[int] = PCIE_SIZES,
    allow_shared_gpu: bool = False,
    route: str = "auto",
) -> Verdict:
    """Return whether the group can use PCIe peer-to-peer access on one host, and the plan of the route.

    Full peer access of all pairs is required on every route. RDMA routes need NICs, which comm-pcie looks for.

    Args:
        facts: every rank's facts.
        sizes: group sizes that are supported; one rank is an identity that needs no peer.
        allow_shared_gpu: whether several ranks may be on one GPU; such a pair counts as connected.
        route: one of `PCIE_ROUTES`.

    Returns:
        The verdict; its plan is the JSON form of a `UlyssesPciePlan`.
    """
    ordered = sorted(facts, key=lambda record: record.rank)
    plan = UlyssesPciePlan(
        numa_nodes=tuple(record.device.numa_node for record in ordered),
        nic_names=(None,) * len(ordered),
        transport="p2p",
        requested_route=route,
    )
    peers: tuple[Callable[[], Reason], ...] = (
        lambda: single_host(facts),
        lambda: cuda_ipc_reachable(facts),
        *_peer_checks(facts, allow_shared_gpu, nvlink=False),
    )
    verdict = _verdict(
        _host_of(facts) + _sharing(facts) + f"all {_pair_count(facts)} ordered pairs have P2P; route p2p",
        lambda: ranks_complete(facts),
        lambda: no_probe_errors(facts),
        lambda: world_size_in(facts, sizes),
        lambda: all_cuda(facts),
        *(peers if len(facts) > 1 else ()),
        lambda: _p2p_route(route),
    )
    return verdict._replace(plan=plan.to_json()) if verdict.eligible else verdict


def assess_mnnvl(facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Verdict:
    """Return whether the group can map each other's memory over NVLink, on one host or several.

    On one host memory is shared by POSIX file descriptors and no fabric is needed; across hosts by fabric handles,
    which all ranks' GPUs must be able to open. Whether they really can (IMEX channels, containers) only an import
    of a peer's handle shows.

    Args:
        facts: every rank's facts.
        allow_shared_gpu: whether several ranks may be on one GPU; such a pair counts as connected.

    Returns:
        The verdict; its plan is ``{"handle": "posix_fd"}`` or ``{"handle": "fabric"}``.
    """
    first: tuple[Callable[[], Reason], ...] = (
        lambda: ranks_complete(facts),
        lambda: no_probe_errors(facts),
        lambda: (
            None if len(facts) >= MNNVL_MIN_RANKS else f"needs at least {MNNVL_MIN_RANKS} ranks, got {len(facts)}"
        ),
        lambda: all_cuda(facts),
    )
    boots = {record.host.boot_id for record in facts}
    if len(boots) <= 1 or "" in boots:
        verdict = _verdict(
            _host_of(facts) + _sharing(facts) + f"all {_pair_count(facts)} ordered pairs have P2P and NVLink",
            *first,
            lambda: single_host(facts),
            lambda: fd_passing_reachable(facts),
            *_peer_checks(facts, allow_shared_gpu, nvlink=True),
        )
        return verdict._replace(plan={"handle": "posix_fd"}) if verdict.eligible else verdict
    verdict = _verdict(
        f"{len(boots)} hosts, {_sharing(facts)}one NVLink fabric and clique",
        *first,
        lambda: known_uuids(facts),
        lambda: no_mig(facts),
        lambda: unique_devices(facts, allow_shared_gpu=allow_shared_gpu),
        lambda: equal_environment(facts),
        lambda: no_p2p_veto(facts, nvlink=True),
        lambda: fabric_clique(facts),
    )
    return verdict._replace(plan={"handle": "fabric"}) if verdict.eligible else verdict


class Assess(Protocol):
    """Pure assessment of a group for one kind of transport."""

    def __call__(self, facts: Sequence[RankFacts], *, allow_shared_gpu: bool = False) -> Verdict:
        """Return whether the group can use it."""
        ...


KNOWN: dict[str, Assess] = {"nvlink": assess_nvlink, "pcie": assess_pcie, "mnnvl": assess_mnnvl}
"""Transports whose conditions are known here, so that a decision can be explained before anything is installed."""


def _peer_checks(
    facts: Sequence[RankFacts], allow_shared_gpu: bool, *, nvlink: bool
) -> tuple[Callable[[], Reason], ...]:
    """Return the checks of devices and pairs on one host, in the order in which their reasons are given."""
    checks: list[Callable[[], Reason]] = [
        lambda: known_uuids(facts),
        lambda: no_mig(facts),
        lambda: unique_devices(facts, allow_shared_gpu=allow_shared_gpu),
        lambda: equal_environment(facts),
        lambda: no_p2p_veto(facts, nvlink=nvlink),
        lambda: all_pairs_p2p(facts, allow_shared_gpu=allow_shared_gpu),
    ]
    if nvlink:
        checks.append(lambda: no_pair_errors(facts, allow_shared_gpu=allow_shared_gpu))
        checks.append(lambda: all_pairs_nvlink(facts, allow_shared_gpu=allow_shared_gpu))
    return tuple(checks)


def _verdict(verified: str, *checks: Callable[[], Reason]) -> Verdict:
    """Return the first reason against, or what was verified. A later check may rely on the earlier ones."""
    for check in checks:
        reason = check()
        if reason is not None:
            return Verdict(False, reason)
    return Verdict(True, verified)


def _p2p_route(route: str) -> Reason:
    if route not in PCIE_ROUTES:
        return f"route must be one of {', '.join(PCIE_ROUTES)}, got {route!r}"
    # "prefer-…" takes peer-to-peer access where there are no NICs; who opens the transport warns.
    if route in ("rdma", "hybrid"):
        return f"route {route!r} needs NICs, and no rank has probed any (comm-pcie provides the probe)"
    return None


def _ordered_pairs(
    facts: Sequence[RankFacts], *, allow_shared_gpu: bool
) -> Iterator[tuple[RankFacts, RankFacts, PairFacts | None]]:
    """Yield every ordered pair of ranks with what the first knows about the second (None: nothing)."""
    for a in facts:
        for b in facts:
            if a is b or (allow_shared_gpu and a.device.uuid and a.device.uuid == b.device.uuid):
                continue
            yield a, b, a.peers.get(b.device.uuid)


def _same_namespace(facts: Sequence[RankFacts], kind: str, namespaces: Sequence[str]) -> Reason:
    unknown = [record.rank for record, namespace in zip(facts, namespaces, strict=True) if not namespace]
    if unknown:
        return f"the {kind} namespace of {_ranks(unknown, verb=False)} is unknown"
    groups: dict[str, list[int]] = {}
    for record, namespace in zip(facts, namespaces, strict=True):
        groups.setdefault(namespace, []).append(record.rank)
    if len(groups) <= 1:
        return None
    parts = [_ranks(ranks, verb=False) for ranks in groups.values()]
    return f"the ranks are in {len(groups)} {kind} namespaces (containers?): {_listed(parts, ' | ')}"


def _host_of(facts: Sequence[RankFacts]) -> str:
    return (
        f"{len(facts)} rank{'' if len(facts) == 1 else 's'} on host {facts[0].host.hostname or '?'}, "
        if facts
        else ""
    )


def _sharing(facts: Sequence[RankFacts]) -> str:
    devices = len({record.device.uuid for record in facts})
    return "distinct GPUs, " if devices == len(facts) else f"{devices} GPUs shared (COMM_ALLOW_SHARED_GPU), "


def _pair_count(facts: Sequence[RankFacts]) -> int:
    return len(facts) * (len(facts) - 1)


def _where(record: RankFacts) -> str:
    return f"rank {record.rank} ({record.host.hostname or '?'}, {record.device.uuid or 'unknown GPU'})"


def _ranks(ranks: Sequence[int], *, verb: bool = True) -> str:
    """Return "rank 1" or "ranks 0, 1", with "is" or "are" behind it where a sentence goes on."""
    one = len(ranks) == 1
    text = ("rank " if one else "ranks ") + _listed([str(rank) for rank in ranks], limit=16)
    return text + (" is" if one else " are") * verb


def _listed(items: Sequence[str], separator: str = ", ", *, limit: int = _LISTED) -> str:
    """Return the items, at most `limit` of them: eight ranks have 56 ordered pairs."""
    if len(items) <= limit:
        return separator.join(items)
    return f"{separator.join(items[:limit])} and {len(items) - limit} more"
