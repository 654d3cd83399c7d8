"""How a session of the routes over NICs is opened by the whole group: step by step, each ended by a joint outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from comm_core._json import JsonObject
from comm_core.errors import TransportError
from comm_core.transport.plan import Copy, Level, Plan
from comm_pcie import copies
from comm_pcie.rdma.abort import AbortWords
from comm_pcie.rdma.engine import LoadedVerbs, RdmaEngine, VerbsApi, require
from comm_pcie.rdma.outputs import RegisteredOutput, register
from comm_pcie.rdma.port import DevicePort
from comm_pcie.rdma.session import Parts, RdmaSession, quiesce_ns
from comm_pcie.rdma.transfers import geometry_of

if TYPE_CHECKING:
    import torch

    from comm_core.consensus import Transaction

__all__ = ["NicRoute", "open_nics", "pattern_plans", "peers_of"]

_ROW, _ROWS = 4099, 3
"""Bytes and number of the rows of the self-test; neither is a multiple of anything that a copy likes."""

MakePort = Callable[["Transaction", VerbsApi], DevicePort]
"""Opens the port of this rank's device as steps of a transaction."""


class NicRoute(NamedTuple):
    """What was decided for a route over NICs, in rank order.

    Attributes:
        route: ``"rdma"`` or ``"hybrid"``.
        nics: device of each rank.
        gid_indices: of each rank's device.
        gids: the 16 bytes of each rank's GID in hex digits, as they were when the route was planned.
        numa_nodes: of each rank's GPU.
    """

    route: str
    nics: tuple[str, ...]
    gid_indices: tuple[int, ...]
    gids: tuple[str, ...]
    numa_nodes: tuple[int | None, ...]

    @classmethod
    def of(cls, plan: JsonObject) -> NicRoute:
        """Read the plan of a verdict."""
        return cls(
            str(plan["transport"]),
            tuple(cast("Sequence[str]", plan["nic_names"])),
            tuple(cast("Sequence[int]", plan["gid_indices"])),
            tuple(cast("Sequence[str]", plan["gids"])),
            tuple(cast("Sequence[int | None]", plan["numa_nodes"])),
        )


def peers_of(route: NicRoute, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the peers of a rank that are reached by NIC, and those that are reached by copies. Pure.

    Both in an order in which, at each step, all ranks write to different ones. On the hybrid route the NIC takes
    what crosses from one NUMA node to the other.
    """
    order = copies.peers(rank, len(route.nics))
    if route.route == "rdma":
        return order, ()
    own = route.numa_nodes[rank]
    return (
        tuple(peer for peer in order if route.numa_nodes[peer] != own),
        tuple(peer for peer in order if route.numa_nodes[peer] == own),
    )


def open_nics(
    stages: Transaction,
    route: NicRoute,
    make_port: MakePort,
    load: Callable[[], LoadedVerbs],
    *,
    timeout_s: float,
    build_s: float,
    poison: bool,
) -> RdmaSession:
    """Open the session of a route over NICs. Collective; every step fails on all ranks or on none.

    Before anything is reported, each rank has sent every peer bytes over the very path that calls use, with strides
    on either side, and every byte was compared.

    Args:
        stages: the transaction of the opening.
        route: what was decided.
        make_port: opens the port of this rank's device.
        load: loads the libraries of rdma-core and the module that calls them.
        timeout_s: deadline of an exchange.
        build_s: seconds that building the engine's module may take.
        poison: whether an aborted call fills its output with NaN bytes.
    """
    group = stages.group
    rank, size = group.rank, group.size
    peers, mapped = peers_of(route, rank)
    api = stages.step("load the verbs", lambda: require(load()), timeout_s=build_s)
    port = make_port(stages, api)
    words = AbortWords(stages)

    def open_nic() -> RdmaEngine:
        opened = RdmaEngine(
            api, nic=route.nics[rank], gid_index=route.gid_indices[rank], rank=rank, world_size=size, peers=peers
        )
        opened.heed(words.address)
        return opened

    engine, endpoints = stages.step_shared("open the NIC", open_nic, RdmaEngine.endpoint, RdmaEngine.close)
    stages.step("compare the GID", lambda: _check_gid(route, rank, engine.endpoint()))
    # Nobody connects to a GID that another rank has not found to be still its own.
    stages.step("look at the port again", engine.revalidate)

    def connect() -> None:
        engine.connect(cast("Sequence[JsonObject | None]", endpoints))

    # From here on there is work that must be retired before anything is given back. The undoing of a step that
    # failed is not called, so it belongs to one before.
    stages.step("prepare to connect", lambda: None, lambda _: _stop(engine, timeout_s))
    stages.step("connect", connect)
    parts = Parts(port, engine, words, route.route, peers, mapped, timeout_s, poison)
    session = RdmaSession(stages, parts)
    nbytes = size * _ROW * _ROWS
    output = register(stages, port, engine, nbytes, "self-test")
    stages.step("prepare to test", lambda: None, lambda _: _stop(engine, timeout_s))
    stages.step("self-test of the NICs", lambda: self_test(session, port, output, rank, size))
    return session


def _check_gid(route: NicRoute, rank: int, endpoint: JsonObject) -> None:
    """Refuse a GID that is not the one that the route was planned with: it may lead to another network."""
    found = str(endpoint["gid"])
    if found != route.gids[rank]:
        raise TransportError(
            f"GID {route.gid_indices[rank]} of {route.nics[rank]} has changed since the route was planned: it was "
            f"{route.gids[rank]}, it is {found}"
        )


def _stop(engine: RdmaEngine, timeout_s: float) -> None:
    found = engine.quiesce(quiesce_ns(timeout_s))
    if not found.teardown_safe:
        raise TransportError(f"the NIC holds on to memory: {found.reason}")


def self_test(session: RdmaSession, port: DevicePort, output: RegisteredOutput, rank: int, size: int) -> None:
    """Exchange patterns by the route, with strides at the sender and at the receiver, and compare every byte.

    Raises:
        TransportError: a byte is wrong; the text names the rank that it should have come from.
        PeerStalledError: a rank did not take part.
    """
    problem = ""
    for shift, plan in enumerate(pattern_plans(rank, size)):
        # Of what each rank sends, rows for all; the operand is built in the landing buffer, as the fastest call does.
        output.landing[: plan.target_bytes].copy_(_operand(rank + shift, size, plan, output.landing.device))
        output.output.fill_(0xEE)
        session.run(plan, geometry_of(plan, session.peers), output.landing, output)
        expected = _expected(shift, rank, size, plan, output.landing.device)
        wrong = (output.output[: plan.target_bytes] != expected).nonzero()
        if wrong.numel() and not problem:
            at = int(wrong[0])
            problem = f"{wrong.numel()} of {plan.target_bytes} bytes are wrong, the first at {at} ({plan.operation})"
    # Only now: a rank that left between the rounds would let the others wait for it until their deadline.
    if problem:
        raise TransportError(
            f"self-test of the NICs: {problem}: what they write into this rank's memory does not arrive as it was "
            "sent (IOMMU or ACS settings? GPUDirect RDMA?)"
        )
    port.settle()


def pattern_plans(rank: int, size: int) -> tuple[Plan, Plan]:
    """Return a scatter (rows apart at the sender) and a gather (rows apart at the receiver) of odd rows. Pure."""

    def pair(apart_at_sender: bool, sender: int, receiver: int, peer: int) -> Copy:
        apart, together = size * _ROW, _ROW
        if apart_at_sender:
            return Copy(peer, 0, receiver * _ROW, sender * _ROWS * _ROW, (Level(_ROWS, apart, together),), _ROW)
        return Copy(peer, 0, receiver * _ROWS * _ROW, sender * _ROW, (Level(_ROWS, together, apart),), _ROW)

    plans = [
        Plan(
            name,
            rank,
            size,
            tuple(pair(apart, rank, peer, peer) for peer in range(size)),
            tuple(pair(apart, peer, rank, peer) for peer in range(size)),
            1,
            size * _ROWS * _ROW,
        )
        for name, apart in (("self_test (scatter)", True), ("self_test (gather)", False))
    ]
    return plans[0], plans[1]


def _operand(seed: int, size: int, plan: Plan, device: torch.device) -> torch.Tensor:
    """Return the bytes that a rank sends; no two ranks' agree anywhere."""
    import torch

    at = torch.arange(plan.target_bytes, device=device, dtype=torch.int32)
    return ((at * 137 + seed * 19 + 3) % 251).to(torch.uint8)


def _expected(shift: int, rank: int, size: int, plan: Plan, device: torch.device) -> torch.Tensor:
    """Return what a rank must have got, by the plan of each sender and none of what moves bytes."""
    import torch

    out = torch.zeros(plan.target_bytes, dtype=torch.uint8, device=device)
    for sender in range(size):
        sent = _operand(sender + shift, size, plan, device)
        piece = pattern_plans(sender, size)[shift].sends[rank]
        for source, target in piece.rows():
            out[target : target + _ROW] = sent[source : source + _ROW]
    return out
