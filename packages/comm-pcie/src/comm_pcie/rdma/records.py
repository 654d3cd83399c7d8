"""What the engine takes and tells: settings, memory, outcomes, counters. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

__all__ = ["Counters", "Kind", "Ledger", "Memory", "Outcome", "Quiesced", "Settings"]


class Settings(NamedTuple):
    """Numbers of the queue pairs. The defaults are for a fabric of one host; equal on all ranks.

    Attributes:
        send_depth: work requests in flight to one peer; larger payloads are posted as places become free.
        receive_depth: receives posted ahead to one peer, at least 2: a fast peer's next message finds one.
        timeout: of an unanswered packet, 4.096 us * 2**timeout.
        retry_count: how often it is sent again, at most 7.
        traffic_class: of the global route header, where the fabric has lossless classes.
    """

    send_depth: int = 16
    receive_depth: int = 4
    timeout: int = 18
    retry_count: int = 7
    traffic_class: int = 0


class Memory(NamedTuple):
    """A buffer to register, owned by the caller and kept until `RegisteredPair.close` succeeded.

    Attributes:
        address: as the NIC shall know it: of host memory or a device address.
        nbytes: its size.
        dmabuf_fd: a DMA-BUF that covers it, tried first; the caller closes it after `register`. None: there is none.
        dmabuf_offset: of `address` in that DMA-BUF.
        dmabuf_problem: why there is none for device memory, for the text of an error; empty for host memory.
    """

    address: int
    nbytes: int
    dmabuf_fd: int | None = None
    dmabuf_offset: int = 0
    dmabuf_problem: str = ""


class Kind(IntEnum):
    """How an exchange ended. Twin: include/comm_pcie/rdma_types.h, OutcomeKind."""

    OK = 0
    DEADLINE = 1  # a peer's message or acknowledgement did not come in time
    COMPLETION = 2  # a work request ended with an error of the NIC
    PROTOCOL = 3  # a message of another epoch, opcode or size
    POST = 4  # the library refused a work request
    EVENT = 5  # the port went down, the GID changed, a queue pair or the device failed
    ABORTED = 6  # `abort` was called
    BROKEN = 7  # an earlier call ended with another kind; nothing was posted


class Outcome(NamedTuple):
    """How a call that posts work ended.

    Attributes:
        kind: `Kind.OK` or why not.
        peer: the rank that it is about, or -1.
        reason: as a sentence; empty if ok.
        elapsed_ns: host time in the call.
        sends: work requests that were completed in it.
        receives: messages that came.
    """

    kind: Kind
    peer: int
    reason: str
    elapsed_ns: int
    sends: int
    receives: int

    @property
    def ok(self) -> bool:
        """Whether everything arrived."""
        return self.kind is Kind.OK


class Quiesced(NamedTuple):
    """Whether the NIC is done with the buffers.

    Attributes:
        teardown_safe: every work request was retired. If not, nothing may be deregistered or freed: the buffers must
            outlive the process's use of the NIC, and the process should exit.
        outstanding: peer -> (sends, receives) that were not.
        reason: as a sentence; empty if safe.
    """

    teardown_safe: bool
    outstanding: Mapping[int, tuple[int, int]]
    reason: str


class Ledger(NamedTuple):
    """What is in the NIC's hands now: peer -> (sends, receives) posted and not retired.

    Attributes:
        outstanding: of each peer of the engine.
    """

    outstanding: Mapping[int, tuple[int, int]]


class Counters(NamedTuple):
    """What the engine did since it was opened. Twin: include/comm_pcie/rdma_types.h, Counters.

    Attributes:
        exchanges: that ended well.
        writes: RDMA writes posted, each of them signalled.
        write_bytes: bytes of those.
        rebinds: keys configured (UMR work requests).
        receives_posted: receives posted.
        sends_completed: completions of writes and of UMRs.
        receives_completed: messages received.
        polls: calls of ibv_poll_cq.
        events: asynchronous events that were read.
        registrations: pairs registered and not closed.
        split_writes: writes beyond the first of a payload, for payloads above the port's message limit.
    """

    exchanges: int
    writes: int
    write_bytes: int
    rebinds: int
    receives_posted: int
    sends_completed: int
    receives_completed: int
    polls: int
    events: int
    registrations: int
    split_writes: int
