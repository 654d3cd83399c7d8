"""The self-test of links: every ordered pair of GPUs, by stores of a kernel and by copy engines, by value.

There are machines on which peer access is granted and what is written arrives late, wrong or never, by one of the two
ways or by both. So both are tried before anything is allocated, in a process of its own, which can be ended where it
hangs. The first rank of the group does it for all pairs: a process of each rank would put a CUDA context of each on
every GPU. A pair is tested once a process.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from comm_core.errors import TransportError
from comm_core.jit.abi import ABI
from comm_core.jit.spec import ModuleSpec

if TYPE_CHECKING:
    from comm_core.consensus import Transaction

__all__ = ["PLANES", "SELFTEST", "Outcome", "check_links", "forget", "run_tests"]

SELFTEST = ModuleSpec(
    name="comm_pcie_selftest",
    package="comm_pcie",
    sources=("csrc/selftest.cu",),
    structs={
        # from, to; words, timeout, result; plane, seed, spoil, unused
        "comm_pcie_selftest_args_v1": "II4Q2QP4I0Q",
        # wrong, first, came
        "comm_pcie_selftest_result_v1": "II3Q0Q",
    },
    entry_points={"comm_pcie_selftest_v1": "comm_pcie_selftest_args_v1"},
)
"""Twin: csrc/selftest.cu."""

PLANES = ("kernel stores", "copy engine")
"""What carries data, by its number in the module."""

_WORDS = (1024, 17 << 10, 1 << 20)
"""Sizes in words of 4 bytes: a page, one that is no power of two, and 4 MiB."""
_FLAG_S = 5.0
"""Seconds that the receiver waits on the device for the writer's flag."""
_QUIET_S = 20.0
"""Seconds without a word of the child after which it hangs; a first context on eight GPUs takes a few."""
_TOTAL_S = 180.0
_END_S = 5.0

_known: dict[tuple[str, str], str | None] = {}


@dataclass(frozen=True)
class Outcome:
    """What is wrong with a pair.

    Attributes:
        pair: UUIDs of writer and receiver.
        problem: what, with the plane; None where both planes work.
    """

    pair: tuple[str, str]
    problem: str | None


def check_links(
    stages: Transaction,
    library: Path,
    devices: Sequence[str],
    *,
    hints: Sequence[str] = (),
    timeout_s: float = 60.0,
) -> None:
    """Test every ordered pair of the group's GPUs, as a step of `stages`. Collective.

    Args:
        stages: the transaction of the opening.
        library: the compiled module.
        devices: UUID of each rank's GPU, in rank order.
        hints: settings that may be to blame, for the error.
        timeout_s: the group's deadline.

    Raises:
        JointError: a pair failed; the text names ranks, plane and pair.
    """
    total = max(_TOTAL_S, timeout_s)

    def test() -> None:
        if stages.group.rank != 0:
            return
        pairs = tuple(dict.fromkeys((a, b) for i, a in enumerate(devices) for j, b in enumerate(devices) if i != j))
        new = [pair for pair in pairs if pair not in _known]
        for outcome in run_tests(library, new, quiet_s=max(_QUIET_S, timeout_s / 3), total_s=total):
            _known[outcome.pair] = outcome.problem
        failed = [Outcome(pair, _known[pair]) for pair in pairs if _known.get(pair) is not None]
        if failed:
            raise TransportError(_text(failed, devices, hints))

    stages.step("self-test of the links", test, timeout_s=total + timeout_s)


def forget() -> None:
    """Forget all verdicts, so that the next opening tests again."""
    _known.clear()


def _text(failed: Sequence[Outcome], devices: Sequence[str], hints: Sequence[str]) -> str:
    parts: list[str] = []
    for outcome in failed[:6]:
        origin = devices.index(outcome.pair[0])
        target = next(rank for rank, uuid in enumerate(devices) if uuid == outcome.pair[1] and rank != origin)
        parts.append(f"ranks {origin}→{target}: {outcome.problem}")
    more = f" and {len(failed) - 6} more pairs" if len(failed) > 6 else ""
    advice = f". {'. '.join(hints)}" if hints else ""
    return f"peer memory does not work on this machine: {'; '.join(parts)}{more}{advice}"


def run_tests(
    library: Path,
    pairs: Sequence[tuple[str, str]],
    *,
    quiet_s: float = _QUIET_S,
    total_s: float = _TOTAL_S,
    spoil: int = 0,
) -> list[Outcome]:
    """Test `pairs` in a child process and return what was found, up to the first pair that hangs. Local.

    Args:
        library: the compiled module.
        pairs: UUIDs of writer and receiver.
        quiet_s: seconds without an answer after which the child is ended.
        total_s: seconds for all of it.
        spoil: number of a word that is changed on its way, for tests of this test; 0 changes none.

    Raises:
        TransportError: the child could not be started, or ended before it had tested anything.
    """
    if not pairs:
        return []
    request = {
        "library": str(library),
        "abi": ABI,
        "arguments": SELFTEST.structs["comm_pcie_selftest_args_v1"],
        "result": SELFTEST.structs["comm_pcie_selftest_result_v1"],
        "pairs": [[_bytes(a).hex(), _bytes(b).hex()] for a, b in pairs],
        "planes": list(range(len(PLANES))),
        "words": list(_WORDS),
        "timeout_s": _FLAG_S,
        "spoil": spoil,
    }
    problems: dict[int, str | None] = {}
    at: tuple[int, int] | None = None
    with _child(request) as (process, errors):
        over = False
        for message in _messages(process, quiet_s, total_s):
            over = "over" in message
            if "begin" in message:
                number, plane = cast("list[int]", message["begin"])
                at = (number, plane)
                problems.setdefault(number, None)
            elif "end" in message:
                number, plane = cast("list[int]", message["end"])
                found = _problem(message)
                if found is not None and problems.get(number) is None:
                    problems[number] = f"{PLANES[plane]}: {found}"
        if not over:
            why = _why(process, errors, quiet_s)
            if at is None:
                raise TransportError(f"the self-test of the links did not begin: {why}")
            problems[at[0]] = problems[at[0]] or f"{PLANES[at[1]]}: {why}"
    return [Outcome(pairs[number], problem) for number, problem in problems.items()]


def _problem(message: dict[str, Any]) -> str | None:
    """Return what is wrong with one test, or None."""
    if message["status"]:
        return f"it can't be tested: {message['error']}"
    if not message["came"]:
        return f"a flag that was written into the peer's memory was not seen there within {_FLAG_S:g} s"
    if message["wrong"]:
        return f"{message['wrong']} of {message['words']} words are wrong, the first at {message['first']}"
    return None


@contextlib.contextmanager
def _child(request: Mapping[str, object]) -> Generator[tuple[subprocess.Popen[bytes], Any]]:
    """Start the child with a request; at the end it is gone, or can't be ended and is left alone."""
    if not sys.executable:
        raise TransportError("the self-test of the links needs sys.executable, the Python to run it with")
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).with_name("selftest_child.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                # A signal for the terminal's processes is its parent's to handle.
                start_new_session=True,
            )
        except OSError as error:
            raise TransportError(f"the self-test of the links can't be started: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(request).encode())
                process.stdin.close()
            yield process, errors
        finally:
            process.kill()
            # A process that hangs in the driver may not die; nothing here depends on it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.stdout.close()


def _messages(process: subprocess.Popen[bytes], quiet_s: float, total_s: float) -> Iterator[dict[str, Any]]:
    """Yield the child's messages until it is over, ends, or is silent for too long."""
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    deadline = time.monotonic() + total_s
    text = b""
    while True:
        *lines, text = text.split(b"\n")
        for line in lines:
            # Libraries may print too.
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    yield cast("dict[str, Any]", message)
                    if "over" in message:
                        return
        seconds = min(quiet_s, deadline - time.monotonic())
        if seconds <= 0 or not select.select([descriptor], [], [], seconds)[0]:
            return
        more = os.read(descriptor, 1 << 16)
        if not more:
            return
        text += more


def _why(process: subprocess.Popen[bytes], errors: Any, quiet_s: float) -> str:
    try:
        # Its end of the pipe closes a moment before it ends.
        code = process.wait(0.5)
    except subprocess.TimeoutExpired:
        return f"no answer within {quiet_s:g} s, so the test was ended"
    errors.seek(0)
    tail = errors.read()[-300:].decode(errors="replace").strip()
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return f"the test ended with {ended}" + (f" ({tail.splitlines()[-1]})" if tail else "")


def _bytes(uuid: str) -> bytes:
    """Return the 16 bytes of a UUID as CUDA has them."""
    digits = uuid.removeprefix("GPU-").replace("-", "")
    try:
        raw = bytes.fromhex(digits)
    except ValueError:
        raw = b""
    if len(raw) != 16:
        raise TransportError(f"{uuid!r} is no UUID of a GPU")
    return raw
