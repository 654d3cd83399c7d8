"""File descriptors between the ranks of one host: by SCM_RIGHTS over unix sockets, with the peers' identity checked.

The other way, `pidfd_getfd`, needs the right to trace the peer, which containers and hardened systems deny. A socket
needs no privilege, so it has to prove instead who is at the other end: the kernel's word on user and process
(SO_PEERCRED), and a secret that travelled through the group. What does not fit is turned away and named in the error
if the exchange fails later; it can neither take a rank's place nor end the exchange.

An exchange has two steps, and the caller ends each by a joint outcome. All ranks listen (`Exchange`); when all do,
each connects to all others, sends, and takes in what they send (`Exchange.run`). Because everybody listens before
anybody connects, a refused connection means a peer that has failed, and nobody waits for it. Everything happens on
the calling thread.
"""

from __future__ import annotations

import array
import errno
import os
import resource
import secrets
import selectors
import socket
import struct
import tempfile
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, cast

from comm_core._json import Json, JsonObject
from comm_core.consensus import Transaction
from comm_core.errors import ArgumentTypeError, ArgumentValueError, CommError, JointError
from comm_core.group import Group
from comm_core.topology.facts import HostFacts, RankFacts
from comm_core.topology.predicates import fd_passing_reachable, single_host
from comm_core.topology.probe import host_facts

__all__ = ["Exchange", "exchange_descriptors", "out_of_reach"]

_MESSAGE = struct.Struct("=8sI32s")
_MAGIC = b"comm-fd1"
_SECRET_BYTES = 32
_SLOTS = 4
"""Descriptors that a message may bring: one is right, and more are only taken in to be closed."""

_BACKLOG = 64
_SOCKET = "socket"
"""Name of the socket where it has a path."""
_SHOWN = 3
"""How many of those that were turned away an error names."""
_CREDENTIALS = struct.Struct("=3i")
_RETRY_S = 0.005
"""How soon a connection is tried again that did not fit the listener's queue."""


class _Credentials(NamedTuple):
    pid: int
    uid: int


class _Peer(NamedTuple):
    """What a rank says about itself, for the others to find and to recognize it."""

    name: str
    path: str
    secret: bytes
    pid: int
    pid_namespace: str
    uid: int

    @classmethod
    def read(cls, value: Json) -> _Peer:
        parts = cast("Mapping[str, Any]", value)
        secret = bytes.fromhex(parts["secret"])
        return cls(parts["name"], parts["path"], secret, parts["pid"], parts["pid_namespace"], parts["uid"])


class Exchange:
    """This rank's end of one exchange: a listening socket and the secret to be let in by.

    Args:
        rank: this rank.
        hosts: where each rank runs, in rank order; equal on all ranks. They decide whether sockets are found by an
            abstract name, which one network namespace shares, or by a path.

    Raises:
        CommError: a socket or a folder for it can't be made.
    """

    def __init__(self, rank: int, hosts: Sequence[HostFacts]) -> None:
        self.rank = rank
        self._folder = ""
        self._connections: set[socket.socket] = set()
        secret = secrets.token_bytes(_SECRET_BYTES)
        # A namespace that is unknown is left to the attempt: whoever must not rely on it has asked the predicates.
        by_path = len({host.network_namespace for host in hosts if host.network_namespace}) > 1
        self._me = _Peer(
            "" if by_path else f"comm-{secrets.token_hex(16)}",
            "",
            secret,
            os.getpid(),
            hosts[rank].pid_namespace,
            os.geteuid(),
        )
        try:
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                self._listen(by_path)
            except BaseException:
                self.close()
                raise
        except OSError as error:
            raise _explained("a socket for file descriptors can't be opened", error) from error

    def _listen(self, by_path: bool) -> None:
        if by_path:
            # The folder has mode 0700, and the socket is bound through the open folder: the path of a socket may have
            # 107 bytes, which a long TMPDIR alone can fill.
            self._folder = tempfile.mkdtemp(prefix="comm-")
            self._me = self._me._replace(path=self._folder)
            with _address_in(self._folder) as address:
                self._listener.bind(address)
        else:
            self._listener.bind("\0" + self._me.name)
        self._listener.setblocking(False)
        self._listener.listen(_BACKLOG)

    @property
    def invitation(self) -> JsonObject:
        """What the other ranks need to connect; for their eyes only, because it holds the secret."""
        return {**self._me._asdict(), "secret": self._me.secret.hex()}

    def close(self) -> None:
        """Stop listening and forget all connections. May be called again."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._listener.close()
        if self._folder:
            Path(self._folder, _SOCKET).unlink(missing_ok=True)
            Path(self._folder).rmdir()
            self._folder = ""

    def run(
        self, invitations: Sequence[JsonObject], descriptors: Mapping[int, int], *, timeout_s: float
    ) -> dict[int, int]:
        """Send a descriptor to every other rank and return what each of them sent. To be called once, on all ranks.

        A rank that can't call it must `close` instead, or the others wait for it.

        Args:
            invitations: every rank's, in rank order.
            descriptors: the one to send to each other rank; they stay the caller's.
            timeout_s: seconds that it may take.

        Returns:
            One new descriptor of each other rank, with close-on-exec set; the caller closes them.

        Raises:
            CommError: a rank did not send in time (it is named), could not be reached, or is not who it should be; or
                this process can't have more descriptors. Everything that was received is closed.
        """
        run = _Run(self.rank, self._listener, self._connections, [_Peer.read(item) for item in invitations])
        try:
            return run.complete(descriptors, time.monotonic() + timeout_s, timeout_s)
        except BaseException as error:
            for descriptor in run.received.values():
                os.close(descriptor)
            if isinstance(error, OSError) and not isinstance(error, CommError):
                raise _explained("file descriptors can't be exchanged", error) from error
            raise
        finally:
            self.close()


class _Run:
    """The second step of an exchange."""

    def __init__(
        self, rank: int, listener: socket.socket, connections: set[socket.socket], peers: Sequence[_Peer]
    ) -> None:
        self.received: dict[int, int] = {}
        self._rank = rank
        self._peers = peers
        self._listener = listener
        self._connections = connections
        self._unsent = {peer: "it was not tried" for peer in range(len(peers)) if peer != rank}
        self._gone: set[int] = set()
        self._strangers: list[str] = []
        self._turned_away = 0
        # Not the default selector: it needs a descriptor of its own.
        self._poll = selectors.PollSelector()

    def complete(self, descriptors: Mapping[int, int], deadline: float, timeout_s: float) -> dict[int, int]:
        """Send and receive everything."""
        self._poll.register(self._listener, selectors.EVENT_READ)
        while True:
            for peer in list(self._unsent):
                self._send(peer, descriptors[peer])
            missing = [peer for peer in range(len(self._peers)) if peer not in (self._rank, *self.received)]
            if not missing and not self._unsent:
                return self.received
            left = deadline - time.monotonic()
            if left <= 0:
                raise CommError(self._late(missing, timeout_s))
            # A peer sends before it closes anything, so what it sent was there when it was seen to be gone: this pass
            # over everything that is readable finds it, or it will never come.
            gone = sorted(self._gone.difference(self.received))
            for key, _ in self._poll.select(0 if gone else min(left, _RETRY_S) if self._unsent else left):
                self._handle(cast("socket.socket", key.fileobj), cast("int | None", key.data))
            gone = [peer for peer in gone if peer not in self.received]
            if gone:
                raise CommError(f"{_ranks(gone)} went away before sending a file descriptor{self._refused()}")

    def _handle(self, ready: socket.socket, sent_to: int | None) -> None:
        if ready is self._listener:
            self._accept_all()
        elif sent_to is None:
            self._receive(ready)
        else:
            # Nothing is ever answered, so this is the end of the connection: the peer has all it needs, or is gone.
            self._gone.add(sent_to)
            self._drop(ready)

    def _send(self, peer: int, descriptor: int) -> None:
        """Connect to `peer` and send, unless its queue is full at the moment."""
        to = self._peers[peer]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connections.add(connection)
        connection.setblocking(False)
        try:
            if to.path:
                with _address_in(to.path) as address:
                    connection.connect(address)
            else:
                connection.connect("\0" + to.name)
            self._vet(peer, connection)
            message = _MESSAGE.pack(_MAGIC, self._rank, to.secret)
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
            connection.sendmsg([message], [rights])
        except BlockingIOError:
            self._unsent[peer] = "it does not take connections"
            self._drop(connection)
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.EBADF, errno.ETOOMANYREFS):
                raise
            raise CommError(
                f"rank {peer} can't be reached for its file descriptor ({_where(to)}): {error.strerror}. Did it fail?"
            ) from error
        del self._unsent[peer]
        self._poll.register(connection, selectors.EVENT_READ, peer)

    def _vet(self, peer: int, connection: socket.socket) -> None:
        reason = self._unlike(peer, _credentials(connection))
        if reason:
            raise CommError(f"what listens at the address of rank {peer} ({_where(self._peers[peer])}) is {reason}")

    def _unlike(self, peer: int, seen: _Credentials) -> str:
        """Return why a process with these credentials is not the peer's, or an empty text."""
        expected = self._peers[peer]
        if seen.uid != expected.uid:
            return f"a process of user {seen.uid}, and rank {peer} runs as {expected.uid}"
        # A process of another PID namespace has another number here, or none.
        same = expected.pid_namespace and expected.pid_namespace == self._peers[self._rank].pid_namespace
        if same and seen.pid != expected.pid:
            return f"process {seen.pid}, and rank {peer} is process {expected.pid}"
        return ""

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            self._connections.add(connection)
            connection.setblocking(False)
            seen = _credentials(connection)
            reasons = [self._unlike(peer, seen) for peer in range(len(self._peers)) if peer != self._rank]
            if all(reasons):
                self._turn_away(connection, reasons[0] if len(reasons) == 1 else f"process {seen.pid} is no rank")
                continue
            self._poll.register(connection, selectors.EVENT_READ)
            # It sends right after it has connected, so what it sends is usually here.
            self._receive(connection)

    def _receive(self, connection: socket.socket) -> None:
        slots = socket.CMSG_SPACE(_SLOTS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = connection.recvmsg(_MESSAGE.size + 1, slots, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except ConnectionResetError:
            data, ancillary, flags = b"", [], 0
        descriptors = list(_descriptors(ancillary))
        try:
            peer, reason = self._sender(connection, data)
            if reason:
                self._turn_away(connection, reason)
            elif flags & socket.MSG_CTRUNC and not descriptors:
                # The kernel drops what does not fit the process's table, and says it in this way only.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            elif len(descriptors) != 1 or flags & socket.MSG_CTRUNC:
                self._turn_away(connection, f"rank {peer} sent {len(descriptors)} descriptors instead of one")
            else:
                self.received[peer] = descriptors.pop()
                # It stays open: its end would tell the peer that this rank is gone, which may not have sent yet.
                self._forget(connection)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _sender(self, connection: socket.socket, data: bytes) -> tuple[int, str]:
        """Return the rank that sent `data`, or why it can't be one's."""
        if len(data) != _MESSAGE.size:
            return -1, f"it sent {len(data)} bytes" if data else "it sent nothing"
        magic, peer, secret = cast("tuple[bytes, int, bytes]", _MESSAGE.unpack(data))
        if magic != _MAGIC:
            return -1, "it speaks another protocol"
        if not secrets.compare_digest(secret, self._peers[self._rank].secret):
            return -1, "it does not know the secret of this exchange"
        if peer == self._rank or peer >= len(self._peers):
            return -1, f"it says that it is rank {peer}"
        if peer in self.received:
            return -1, f"rank {peer} has sent already"
        return peer, self._unlike(peer, _credentials(connection))

    def _turn_away(self, connection: socket.socket, reason: str) -> None:
        seen = _credentials(connection)
        self._turned_away += 1
        if self._turned_away <= _SHOWN:
            self._strangers.append(f"process {seen.pid} of user {seen.uid} ({reason})")
        self._drop(connection)

    def _forget(self, connection: socket.socket) -> None:
        if connection in {key.fileobj for key in self._poll.get_map().values()}:
            self._poll.unregister(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        self._connections.discard(connection)
        connection.close()

    def _late(self, missing: Sequence[int], timeout_s: float) -> str:
        parts = [f"no file descriptor from {_ranks(missing)}"] if missing else []
        parts += [f"none could be sent to rank {peer} ({reason})" for peer, reason in self._unsent.items()]
        return f"{'; '.join(parts)} within {timeout_s:g} s{self._refused()}"

    def _refused(self) -> str:
        if not self._strangers:
            return ""
        more = f" and {self._turned_away - _SHOWN} more" if self._turned_away > _SHOWN else ""
        return f". Turned away: {'; '.join(self._strangers)}{more}"


def out_of_reach(facts: Sequence[RankFacts], *, unknown_too: bool = True) -> str | None:
    """Return why the ranks can't pass each other file descriptors, or None. Pure.

    Args:
        facts: the ranks; only `rank` and `host` are looked at.
        unknown_too: whether what is unknown about a host counts as a reason.
    """

    def known(*names: str) -> list[RankFacts]:
        return [item for item in facts if unknown_too or all(getattr(item.host, name) for name in names)]

    reason = single_host(known("boot_id")) or fd_passing_reachable(known("network_namespace", "mount_namespace"))
    users = {item.host.uid for item in facts}
    if reason is None and len(users) > 1:
        named = ", ".join(f"rank {item.rank}: {item.host.uid}" for item in facts)
        reason = f"the ranks run as different users ({named}), and descriptors are taken from one's own only"
    return reason


def exchange_descriptors(
    group: Group, descriptors: Mapping[int, int] | int, *, timeout_s: float | None = None
) -> list[int]:
    """Send file descriptors to all ranks and return what they sent. Collective; all ranks on one host.

    Args:
        group: the ranks.
        descriptors: one for everybody, or one for each rank of the group, this one included. They stay the caller's.
        timeout_s: seconds that each step may take; None is the group's `timeout_s`.

    Returns:
        One new descriptor of each rank in rank order, close-on-exec; that of this rank is a duplicate of its own. The
        caller closes all of them.

    Raises:
        JointError: the exchange failed on some rank. On every rank; nothing stays open.
        GroupTimeoutError: a rank did not come. Nothing stays open.
    """
    seconds = group.timeout_s if timeout_s is None else timeout_s
    with Transaction(group, "exchange file descriptors", timeout_s=timeout_s) as stages:
        own, found = stages.step_shared("look", lambda: _own(group, descriptors), lambda _: asdict(host_facts()))
        hosts = [RankFacts.from_json({"rank": rank, "host": host}) for rank, host in enumerate(found)]
        reason = out_of_reach(hosts, unknown_too=False)
        if reason is not None:
            names = {host.rank: f"host {host.host.hostname!r}" for host in hosts}
            raise JointError(f"exchange file descriptors: {reason}", names)
        exchange, invitations = stages.step_shared(
            "listen",
            lambda: Exchange(group.rank, [host.host for host in hosts]),
            lambda item: item.invitation,
            Exchange.close,
        )

        def run() -> list[int]:
            received = exchange.run(cast("list[JsonObject]", invitations), own, timeout_s=seconds)
            try:
                received[group.rank] = os.dup(own[group.rank])
            except OSError as error:
                _close_all(received.values())
                raise _explained("the own file descriptor can't be duplicated", error) from error
            return [received[rank] for rank in range(group.size)]

        result = stages.step("exchange", run, _close_all)
        stages.commit()
    return result


def _own(group: Group, descriptors: object) -> dict[int, int]:
    """Return the descriptor for each rank, all of them open."""
    if isinstance(descriptors, Mapping):
        given = dict(cast("Mapping[object, object]", descriptors))
    else:
        given = cast("dict[object, object]", dict.fromkeys(range(group.size), descriptors))
    if set(given) != set(range(group.size)):
        raise ArgumentValueError(
            f"descriptors must be for the ranks 0 to {group.size - 1}, got them for {list(given)}"
        )
    for rank, descriptor in given.items():
        if not isinstance(descriptor, int) or isinstance(descriptor, bool):
            raise ArgumentTypeError(f"the descriptor for rank {rank} must be an int, got {descriptor!r}")
        try:
            os.fstat(descriptor)
        except (OSError, OverflowError) as error:
            raise ArgumentValueError(f"the descriptor {descriptor} for rank {rank} is not open: {error}") from error
    return cast("dict[int, int]", given)


def _close_all(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


@contextmanager
def _address_in(folder: str) -> Generator[str, None, None]:
    """Yield an address for a socket in `folder` that is short whatever the folder's path; good inside the block."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{_SOCKET}"
    finally:
        os.close(descriptor)


def _credentials(connection: socket.socket) -> _Credentials:
    """Return who is at the other end: who connected, or who listens, as the kernel noted it then."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return _Credentials(pid, uid)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> Iterable[int]:
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found = array.array("i")
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
            yield from found


def _explained(what: str, error: OSError) -> CommError:
    text = f"{what}: {error.strerror or error}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        text += f". This process may have {limit} descriptors (ulimit -n), and none is left"
    return CommError(text)


def _where(peer: _Peer) -> str:
    return f"process {peer.pid}, socket {peer.path or '@' + peer.name}"


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
