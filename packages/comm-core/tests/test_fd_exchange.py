"""File descriptors between ranks: from each rank its own, or one error on all ranks and nothing left open."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import resource
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comm_core.errors import CommError, JointError
from comm_core.group import Group, as_group
from comm_core.memory import fd_exchange
from comm_core.memory.fd_exchange import Exchange, exchange_descriptors
from comm_core.testing.ranks import RankPool, on_threads, run_threads
from comm_core.topology.facts import HostFacts
from comm_core.topology.probe import host_facts

HERE = host_facts()
NAMED = [HERE, HERE, HERE]
BY_PATH = [replace(HERE, network_namespace=f"net:[{rank}]") for rank in range(3)]


def open_descriptors() -> set[int]:
    found = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    return {item for item in found if is_open(item)}  # Without the one that listing them took.


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def content(descriptor: int) -> str:
    return os.pread(descriptor, 100, 0).decode()


def memory(text: str) -> int:
    descriptor = os.memfd_create("test")
    os.write(descriptor, text.encode())
    return descriptor


@pytest.fixture(autouse=True)
def nothing_stays(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test does, this process has no more descriptors, threads or sockets' folders than before."""
    if "ranks" in request.fixturenames:
        yield  # They look after themselves, and starting them opens what stays.
        return
    folder = tmp_path / "sockets"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    before, threads = open_descriptors(), set(threading.enumerate())
    yield
    assert open_descriptors() == before
    # None that is new: one that an earlier test left behind may end at any time.
    assert set(threading.enumerate()) <= threads
    assert list(folder.iterdir()) == []


# Between processes.


def swap(process_group: Any, hosts: str, times: int) -> list[Any]:
    group = as_group(process_group)
    network = f"net:[{group.rank}]" if hosts == "by path" else HERE.network_namespace
    fd_exchange.host_facts = lambda: replace(HERE, network_namespace=network)
    own = memory(f"rank {group.rank}")
    before = open_descriptors()
    threads = threading.active_count()
    try:
        for _ in range(times):
            got = exchange_descriptors(group, own)
            assert [content(item) for item in got] == [f"rank {rank}" for rank in range(group.size)]
            assert all(fcntl.fcntl(item, fcntl.F_GETFD) & fcntl.FD_CLOEXEC for item in got)
            # This rank's own is a duplicate, so that the caller closes what it got and nothing else.
            assert own not in got and os.path.sameopenfile(got[group.rank], own)
            for item in got:
                os.close(item)
        assert open_descriptors() == before
        return [threading.active_count() - threads, content(own)]
    finally:
        fd_exchange.host_facts = host_facts
        os.close(own)


@pytest.mark.parametrize("members", [2, 4, (1, 3, 6)], ids=str)
@pytest.mark.parametrize("hosts", ["named", "by path"])
def test_every_rank_gets_every_ranks_descriptor(ranks: RankPool, hosts: str, members: Any) -> None:
    """In rank order of the group, usable, closed on exec, and with no descriptor or thread left over."""
    results = ranks.run(swap, hosts, 1, ranks=members)
    assert results == [[0, f"rank {rank}"] for rank in range(len(results))]


def test_a_hundred_exchanges_leak_nothing(ranks: RankPool) -> None:
    """A descriptor an exchange would end a long job."""
    ranks.run(swap, "named", 100, ranks=3, timeout_s=60)


def swap_in_deep_folder(process_group: Any, folder: str) -> int:
    tempfile.tempdir = folder
    try:
        swap(process_group, "by path", 1)
    finally:
        tempfile.tempdir = None
    return len(list(Path(folder).iterdir()))


def test_a_long_temporary_folder_is_no_obstacle(ranks: RankPool, tmp_path: Path) -> None:
    """A socket's path may have 107 bytes, and batch systems set TMPDIR to more than that (I5)."""
    folder = tmp_path.joinpath(*["a-folder-with-a-long-name"] * 8)
    folder.mkdir(parents=True)
    assert len(str(folder)) > 200
    assert ranks.run(swap_in_deep_folder, str(folder), ranks=2) == [0, 0]


def swap_with_few_descriptors(process_group: Any, victim: int, headroom: int) -> str:
    """Exchange on a rank that may open only `headroom` more descriptors; return what it came to."""
    group = as_group(process_group)
    own = memory("mine")
    before = open_descriptors()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if group.rank == victim:
        # Fill the gaps, so that the limit counts.
        filler = [os.dup(own) for _ in range(max(before) - len(before) + 1)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before | set(filler)) + 1 + headroom, hard))
    else:
        filler = []
    started = time.monotonic()
    try:
        for item in exchange_descriptors(group, own):
            os.close(item)
        result = "done"
    except JointError as error:
        assert victim in error.per_rank, error
        result = error.per_rank[victim]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for item in filler:
            os.close(item)
    assert time.monotonic() - started < 10, "the others must not wait for a rank that has failed"
    assert open_descriptors() == before
    os.close(own)
    return result


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_without_descriptors_left_fails_all_at_once(ranks: RankPool, victim: int) -> None:
    """Wherever its limit is hit: opening, connecting, accepting, receiving. Nobody waits out the deadline."""
    results: list[str] = []
    for headroom in range(12):
        outcome = ranks.run(swap_with_few_descriptors, victim, headroom, ranks=3)
        assert len(set(outcome)) == 1, outcome
        results.append(outcome[0])
    assert results[0] != "done" and results[-1] == "done", results
    for text in results[: results.index("done")]:
        assert "Too many open files" in text or "none is left" in text, text
    limited = [text for text in results if "ulimit -n" in text]
    assert len(limited) >= 3, results


def swap_while_one_is_late(process_group: Any, late: int) -> tuple[str, float]:
    group = as_group(process_group)
    own = memory("mine")
    before = open_descriptors()
    original = Exchange.run

    def run(self: Exchange, *arguments: Any, **keywords: Any) -> Any:
        time.sleep(1.5)
        return original(self, *arguments, **keywords)

    if group.rank == late:
        Exchange.run = run
    started = time.monotonic()
    try:
        exchange_descriptors(group, own, timeout_s=1.0)
    except CommError as error:
        text = f"{type(error).__name__}: {error}"
    finally:
        Exchange.run = original
    assert open_descriptors() == before
    os.close(own)
    return text, time.monotonic() - started


def test_a_slow_rank_is_named(ranks: RankPool) -> None:
    """It comes after the deadline, and all ranks are told that it was rank 1 (B4)."""
    outcome = ranks.run(swap_while_one_is_late, 1, ranks=3, env={"COMM_TIMEOUT_S": "10"})
    for text, seconds in outcome:
        assert "rank 0: no file descriptor from rank 1 within 1 s" in text, text
        assert "rank 2: no file descriptor from rank 1 within 1 s" in text, text
        assert seconds < 5


def die_half_way(process_group: Any, victim: int) -> str:
    group = as_group(process_group)
    own = memory("mine")
    if group.rank == victim:
        Exchange.run = lambda *_, **__: os._exit(3)
    before = open_descriptors()
    try:
        exchange_descriptors(group, own)
    except CommError as error:
        assert open_descriptors() <= before  # The connection of the process group to the dead rank closes by itself.
        os.close(own)
        return str(error)
    return ""


def test_a_rank_that_dies_half_way_is_named(ranks: RankPool) -> None:
    """Its peers notice it at its socket, not at the deadline of the exchange; nothing stays open."""
    started = time.monotonic()
    outcomes = ranks.run_outcomes(die_half_way, 1, ranks=3, env={"COMM_TIMEOUT_S": "2"}, timeout_s=20)
    assert [item.kind for item in outcomes] == ["value", "died", "value"], outcomes
    # One of them finds out first and gives up; then the other may see that one gone first.
    assert any(f"rank 1 {what}" in outcomes[rank].value for rank in (0, 2) for what in ("went away", "can't be"))
    assert time.monotonic() - started < 15


# Between threads, which are one process: the credentials fit, so that what is behind them is tested.


def exchange_on(group: Group, hosts: list[HostFacts], before_run: Callable[[list[Any]], None], seconds: float) -> Any:
    """Exchange one descriptor; rank 0 calls `before_run` with all invitations when all ranks listen."""
    own = memory(f"rank {group.rank}")
    exchange = Exchange(group.rank, hosts)
    invitations: Any = group.gather("listen", exchange.invitation)
    if group.rank == 0:
        before_run(invitations)
    group.barrier("go")
    try:
        got = exchange.run(invitations, dict.fromkeys(range(group.size), own), timeout_s=seconds)
        values = {rank: content(item) for rank, item in got.items()}
        for item in got.values():
            os.close(item)
        return values
    finally:
        os.close(own)


def pretend(
    invitation: Any, *, magic: bytes = fd_exchange._MAGIC, rank: int = 1, secret: bytes | None = None, send: int = 1
) -> Callable[[], None]:
    """Connect to a rank's socket and send something like a rank's message; return what closes the connection."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stranger.connect("\0" + invitation["name"])
    own_secret = bytes.fromhex(invitation["secret"])
    message = fd_exchange._MESSAGE.pack(magic, rank, own_secret if secret is None else secret)
    descriptors = [memory("wrong") for _ in range(send)]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    stranger.sendmsg([message], rights)
    for item in descriptors:
        os.close(item)
    return stranger.close


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"secret": b"x" * 32}, "it does not know the secret of this exchange"),
        ({"magic": b"comm-fd2"}, "it speaks another protocol"),
        ({"rank": 7}, "it says that it is rank 7"),
        ({"rank": 0}, "it says that it is rank 0"),
        ({"send": 0}, "rank 1 sent 0 descriptors instead of one"),
        ({"send": 3}, "rank 1 sent 3 descriptors instead of one"),
        ({"send": 9}, "rank 1 sent"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_is_no_ranks_message_is_turned_away(what: dict[str, Any], words: str) -> None:
    """It neither takes the place of a rank nor ends the exchange, and what it brought is closed."""
    closers: list[Callable[[], None]] = []

    def intrude(invitations: list[Any]) -> None:
        closers.append(pretend(invitations[0], **what))

    got = run_threads(3, exchange_on, NAMED, intrude, 10.0)
    assert got[0] == {1: "rank 1", 2: "rank 2"}

    def run(group: Group) -> Any:
        # Nobody else comes, so that the error can say who did.
        if group.rank == 0:
            return exchange_on_alone(intrude)
        return None

    error = on_threads(1, run)[0]
    assert isinstance(error, CommError)
    assert "no file descriptor from rank 1 within" in str(error)
    assert f"Turned away: process {os.getpid()} of user {os.geteuid()} ({words}" in str(error)
    for close in closers:
        close()


def exchange_on_alone(intrude: Callable[[list[Any]], None], hosts: list[HostFacts] = NAMED) -> Any:
    """Run rank 0's end of an exchange of two, whose rank 1 listens and never sends."""
    own = memory("rank 0")
    exchange, silent = Exchange(0, hosts), Exchange(1, hosts)
    try:
        intrude([exchange.invitation])
        return exchange.run([exchange.invitation, silent.invitation], {1: own}, timeout_s=0.3)
    finally:
        silent.close()
        os.close(own)


@pytest.mark.parametrize("data", [b"", b"x", b"x" * 200], ids=len)
def test_noise_is_turned_away(data: bytes) -> None:
    """Whatever its length; also a connection that is closed without a word."""

    def intrude(invitations: list[Any]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger:
            stranger.connect("\0" + invitations[0]["name"])
            if data:
                stranger.send(data)

    assert run_threads(3, exchange_on, NAMED, intrude, 10.0)[0] == {1: "rank 1", 2: "rank 2"}


def test_a_rank_counts_once() -> None:
    """A second descriptor in a rank's name does not replace the first, and is closed."""
    closers: list[Callable[[], None]] = []

    def intrude(invitations: list[Any]) -> None:
        closers.extend(pretend(invitations[0], rank=1) for _ in range(2))

    got = exchange_on_alone(intrude)
    assert content(got[1]) == "wrong"
    os.close(got[1])
    for close in closers:
        close()


FOREIGNER = """
    import array, os, socket, struct, sys
    name, message, uid, path = sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    if uid != os.geteuid():
        os.setgroups([]), os.setgid(uid), os.setuid(uid)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        try:
            s.connect(path + "/socket" if path else chr(0) + name)
        except PermissionError:
            print("not let in")
        else:
            s.sendmsg([message], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
            print("sent")
"""


def foreigner(invitation: Any, *, uid: int | None = None, secret: str | None = None) -> str:
    """Let another process send what rank 1 would; return what it says."""
    message = fd_exchange._MESSAGE.pack(fd_exchange._MAGIC, 1, bytes.fromhex(secret or invitation["secret"]))
    command = [sys.executable, "-c", textwrap.dedent(FOREIGNER), invitation["name"], message.hex()]
    command += [str(os.geteuid() if uid is None else uid), invitation["path"]]
    with Path("/dev/null").open() as nothing:
        done = subprocess.run(command, stdin=nothing, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.strip()


def refusal(hosts: list[HostFacts], **what: Any) -> str:
    with pytest.raises(CommError) as caught:
        exchange_on_alone(lambda invitations: foreign.append(foreigner(invitations[0], **what)), hosts)
    return str(caught.value)


foreign: list[str] = []


def test_another_process_is_turned_away_by_its_number() -> None:
    """Also where it knows the secret: only the processes that the group has named are ranks."""
    text = refusal(NAMED)
    assert "is process" not in text.split("Turned away")[0]
    assert f"and rank 1 is process {os.getpid()})" in text, text


def test_where_numbers_mean_nothing_the_secret_decides() -> None:
    """Ranks in several PID namespaces have other numbers here, or none; the secret is known to the group alone."""
    apart = [replace(HERE, pid_namespace=f"pid:[{rank}]") for rank in range(3)]
    assert "it does not know the secret of this exchange" in refusal(apart, secret="ab" * 32)
    got = exchange_on_alone_with_foreigner(apart)
    assert got == [1]


def exchange_on_alone_with_foreigner(hosts: list[HostFacts]) -> list[int]:
    got = exchange_on_alone(lambda invitations: foreign.append(foreigner(invitations[0])), hosts)
    for item in got.values():
        os.close(item)
    return list(got)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_user_is_turned_away() -> None:
    """Whatever it knows; and a socket with a path is in a folder that it can't even enter."""
    text = refusal(NAMED, uid=4321)
    assert f"a process of user 4321, and rank 1 runs as {os.geteuid()}" in text, text
    assert "Turned away" not in refusal(BY_PATH, uid=4321)
    assert foreign[-1] == "not let in"


@pytest.mark.parametrize(
    ("credentials", "words"),
    [
        ((os.getpid(), os.geteuid() + 1), f"is a process of user {os.geteuid() + 1}, and rank 1 runs as"),
        ((os.getpid() + 1, os.geteuid()), f"is process {os.getpid() + 1}, and rank 1 is process {os.getpid()}"),
    ],
)
def test_nothing_is_sent_to_who_is_not_the_peer(
    monkeypatch: pytest.MonkeyPatch, credentials: tuple[int, int], words: str
) -> None:
    """A descriptor is access to memory: what listens is checked before it is sent."""
    seen = fd_exchange._Credentials(*credentials)
    monkeypatch.setattr(fd_exchange, "_credentials", lambda _: seen)
    with pytest.raises(CommError, match=words):
        exchange_on_alone(lambda _: None)


def test_a_peer_that_has_failed_is_not_waited_for() -> None:
    """Before it was connected to it refuses; after that the end of the connection tells."""
    own = memory("rank 0")
    ends = [Exchange(rank, NAMED) for rank in range(3)]
    invitations = [end.invitation for end in ends]
    ends[2].close()
    started = time.monotonic()
    with pytest.raises(CommError, match=r"rank 2 can't be reached .*Connection refused. Did it fail\?"):
        ends[0].run(invitations, dict.fromkeys(range(3), own), timeout_s=30)
    ends[1].close()

    ends = [Exchange(rank, NAMED) for rank in range(2)]
    timer = threading.Timer(0.3, ends[1].close)
    timer.start()
    with pytest.raises(CommError, match="rank 1 went away before sending a file descriptor"):
        ends[0].run([end.invitation for end in ends], {1: own}, timeout_s=30)
    timer.join()
    assert time.monotonic() - started < 10
    os.close(own)


def test_a_peer_that_sends_and_leaves_has_sent() -> None:
    """One rank is done long before another looks; what it sent is still there."""
    own = memory("rank 0")
    ends = [Exchange(rank, NAMED) for rank in range(2)]
    invitations = [end.invitation for end in ends]
    closers = [pretend(invitations[0], rank=1)]
    closers[0]()
    timer = threading.Timer(0.2, ends[1].close)
    timer.start()
    got = ends[0].run(invitations, {1: own}, timeout_s=30)
    timer.join()
    assert content(got[1]) == "wrong"
    os.close(got[1])
    os.close(own)


def test_a_full_queue_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With more ranks than a listener's queue holds, connecting takes more than one attempt."""
    monkeypatch.setattr(fd_exchange, "_BACKLOG", 0)
    got = run_threads(12, exchange_on, [HERE] * 12, lambda _: None, 20.0, timeout_s=40)
    assert [sorted(item) for item in got] == [[r for r in range(12) if r != rank] for rank in range(12)]


def joint_error(change: Callable[[Group], tuple[Any, Any]], size: int = 3) -> JointError:
    def run(group: Group) -> Any:
        descriptors, facts = change(group)
        own[group.rank] = facts
        return exchange_descriptors(group, descriptors)

    own: dict[int, HostFacts] = {}
    errors = on_threads(size, run)
    assert all(type(error) is JointError for error in errors), errors
    assert len({str(error) for error in errors}) == 1
    return errors[0]


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (True, "must be an int, got True"),
        ("3", "must be an int, got '3'"),
        (-1, "is not open"),
        (1 << 40, "is not open"),
        ({0: 0, 1: 0}, "descriptors must be for the ranks 0 to 2, got them for \\[0, 1\\]"),
    ],
    ids=str,
)
def test_a_bad_descriptor_on_one_rank_is_everybodys_error(bad: Any, words: str) -> None:
    """Before anything is opened."""
    error = joint_error(lambda group: (bad if group.rank == 1 else 0, None))
    assert list(error.per_rank) == [1]
    with pytest.raises(JointError, match=words):
        raise error


def test_each_peer_can_get_another_descriptor() -> None:
    """By rank; this rank's own comes back as a duplicate."""

    def run(group: Group) -> list[str]:
        own = {rank: memory(f"{group.rank}→{rank}") for rank in range(group.size)}
        got = exchange_descriptors(group, own)
        texts = [content(item) for item in got]
        for item in [*own.values(), *got]:
            os.close(item)
        return texts

    assert run_threads(3, run) == [[f"{peer}→{rank}" for peer in range(3)] for rank in range(3)]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"boot_id": "another"}, "the ranks span 2 hosts"),
        ({"network_namespace": "net:[1]", "mount_namespace": "mnt:[1]"}, "2 network namespaces"),
        ({"uid": 4321}, "the ranks run as different users"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_ranks_out_of_reach_are_told_at_once(
    monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], words: str
) -> None:
    """Trying would end in a refused connection, or in thirty seconds of silence (C10)."""
    names = threading.local()

    def run(group: Group) -> None:
        names.rank = group.rank
        exchange_descriptors(group, 0)

    monkeypatch.setattr(fd_exchange, "host_facts", lambda: replace(HERE, **facts) if names.rank == 1 else HERE)
    errors = on_threads(2, run)
    assert all(isinstance(error, JointError) and words in str(error) for error in errors), errors


def test_a_folder_that_can_not_be_made_is_everybodys_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system, where a path is needed (I5)."""
    names = threading.local()

    def run(group: Group) -> None:
        names.rank = group.rank
        exchange_descriptors(group, 0)

    def make(**_: Any) -> str:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(fd_exchange, "host_facts", lambda: BY_PATH[names.rank])
    monkeypatch.setattr(tempfile, "mkdtemp", make)
    errors = on_threads(2, run)
    assert all("can't be opened: Read-only file system" in str(error) for error in errors), errors


UNPRIVILEGED = """
    import ctypes, os, sys
    from dataclasses import replace
    from comm_core.memory import fd_exchange
    from comm_core.testing.ranks import run_threads
    from comm_core.topology.probe import host_facts
    if os.geteuid() == 0:
        os.setgroups([]), os.setgid(4321), os.setuid(4321)
    assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: nobody may trace this process
    number = iter(range(2))
    if sys.argv[1] == "by path":
        fd_exchange.host_facts = lambda: replace(host_facts(), network_namespace=f"net:[{next(number)}]")

    def run(group):
        return [os.pread(item, 9, 0) for item in fd_exchange.exchange_descriptors(group, own[group.rank])]

    own = [os.memfd_create("own") for _ in range(2)]
    for rank in range(2):
        os.write(own[rank], f"rank {rank}".encode())
    assert run_threads(2, run) == [[b"rank 0", b"rank 1"]] * 2
    print("exchanged")
"""


@pytest.mark.parametrize("hosts", ["named", "by path"])
def test_it_needs_no_privilege(hosts: str) -> None:
    """Where tracing is denied, taking a peer's descriptor by pidfd_getfd fails; being given it does not (V10, I5)."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", textwrap.dedent(UNPRIVILEGED), hosts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.stdout.strip() == "exchanged", done.stderr


def test_closing_twice_is_fine() -> None:
    """Every path out of an exchange closes it, and some of them meet."""
    for hosts in (NAMED, BY_PATH):
        exchange = Exchange(0, hosts)
        with contextlib.closing(exchange):
            exchange.close()
