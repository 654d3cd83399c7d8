"""One family of errors: everything this project raises on purpose is a `CommError`.

Each child is also the builtin that a caller would expect (`ValueError`, `TypeError`, `RuntimeError`,
`TimeoutError`), so that code written against another library keeps catching what it caught.

A *joint* error was agreed by the group: every rank raises it, with the same text, and `per_rank` says what each
rank reported. A rank that is not in `per_rank` had nothing to complain about.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = [
    "AllReduceBackendError",
    "ArgumentTypeError",
    "ArgumentValueError",
    "BackendError",
    "CheckpointError",
    "ClosedError",
    "CommError",
    "CudaCallError",
    "GroupTimeoutError",
    "JitBuildError",
    "JitCacheError",
    "JitMissingError",
    "JointError",
    "JointValueError",
    "PeerStalledError",
    "PluginError",
    "TopologyFileError",
    "TransportError",
    "UlyssesBackendError",
    "UnsupportedError",
]


class CommError(Exception):
    """Base of every error that this project raises on purpose."""


class ArgumentValueError(CommError, ValueError):
    """An argument has the right type and a value that can't be used; nothing was communicated."""


class ArgumentTypeError(ArgumentValueError, TypeError):
    """An argument has the wrong type (a `bool` for an integer, a list for a tensor); nothing was communicated.

    It is a `ValueError` as well, because the specification answers most wrong types with `ValueError`.
    """


class ClosedError(CommError, RuntimeError):
    """The object was used after `close()`."""


class CheckpointError(CommError, RuntimeError):
    """Memory is detached for a checkpoint, or detaching or restoring it failed half-way, which is final."""


class UnsupportedError(CommError, RuntimeError):
    """What was asked for exists, but not on this transport, device or build; the text says what does offer it."""


class JointError(CommError, RuntimeError):
    """At least one rank failed in a collective step, and every rank of the group raises this same error.

    Attributes:
        what: the step, for example ``"open transport 'nccl'"``.
        per_rank: rank -> that rank's own failure as text. Ranks that succeeded are absent.
    """

    def __init__(self, what: str, per_rank: Mapping[int, str], *, hint: str = "") -> None:
        self.what = what
        self.per_rank = dict(sorted(per_rank.items()))
        causes = "; ".join(f"rank {rank}: {text}" for rank, text in self.per_rank.items())
        super().__init__(f"{what}: {causes}" + (f". {hint}" if hint else ""))


class JointValueError(JointError, ValueError):
    """The ranks asked for different things, or one of them for something invalid; every rank raises this."""


class GroupTimeoutError(CommError, TimeoutError):
    """A rank did not take part in a step before its deadline.

    Attributes:
        what: the step.
        missing: the group ranks that were waited for, in order.
    """

    def __init__(self, what: str, missing: tuple[int, ...], text: str) -> None:
        self.what = what
        self.missing = missing
        super().__init__(text)


class PluginError(CommError, RuntimeError):
    """A plugin is missing, broken, blocked or incompatible; the text has the stored cause."""


class TopologyFileError(ArgumentValueError):
    """The file named by ``COMM_TOPOLOGY_FILE`` can't be used."""


class BackendError(CommError, RuntimeError):
    """A backend can't be used by this group. Every rank raises it.

    Attributes:
        reason: what the backend lacks here, as a text that does not say who wanted it; empty where none was named, or
            where it could be used and could not be opened.
    """

    reason: str = ""


class UlyssesBackendError(BackendError):
    """A backend that was asked for by name can't be used by this group. Every rank raises it."""


class AllReduceBackendError(BackendError):
    """An all-reduce backend that was asked for by name can't be used, or none can. Every rank raises it."""


class TransportError(CommError, RuntimeError):
    """A transport failed in the middle of an operation; the communicator can't be used any more."""


class PeerStalledError(TransportError):
    """A kernel waited for another rank until its deadline, or was told that another rank's kernel did.

    Attributes:
        waited_for: the group rank that did not come.
        reporter: the group rank that gave up first.
    """

    def __init__(self, text: str, waited_for: int, reporter: int) -> None:
        self.waited_for = waited_for
        self.reporter = reporter
        super().__init__(text)


class CudaCallError(CommError, RuntimeError):
    """A call of the CUDA runtime or driver returned an error code."""

    def __init__(self, call: str, code: int, text: str) -> None:
        self.call = call
        self.code = code
        super().__init__(f"{call} failed with CUDA error {code}: {text}")


class JitBuildError(CommError, RuntimeError):
    """A module could not be built; the text has the first error, the command, the log and what to do.

    Attributes:
        command: the command that failed, or empty where no command had been run.
        log: path of the whole log, or empty.
        lacking: Debian packages whose headers the module needs and this machine lacks; empty for other failures.
    """

    def __init__(self, text: str, *, command: str = "", log: str = "", lacking: tuple[str, ...] = ()) -> None:
        self.command = command
        self.log = log
        self.lacking = lacking
        super().__init__(text)


class JitMissingError(CommError, RuntimeError):
    """A module is not built yet and must not be built now; the text has the command that builds it."""


class JitCacheError(CommError, RuntimeError):
    """The folder for compiled libraries can't be used or can't be trusted, or what is in it can't be loaded."""
