"""Families: what the decision protocol chooses among, and in which words it says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from comm_core import known
from comm_core.errors import AllReduceBackendError, BackendError, UlyssesBackendError
from comm_core.plugins.discovery import Registry
from comm_core.transport.interface import Candidate

__all__ = ["ALLREDUCE", "TRANSPORTS", "Family"]


@dataclass(frozen=True)
class Family:
    """Candidates that one decision is about.

    Attributes:
        noun: what one of them is, for texts.
        known: names that this project knows, asked for or not, and who provides them.
        error: raised on every rank where what was asked for can't be used, or nothing can.
        members: the candidates in a registry, by name.
    """

    noun: str
    known: Mapping[str, known.KnownName]
    error: type[BackendError]
    members: Callable[[Registry], Mapping[str, Candidate]]


def _transports(plugins: Registry) -> Mapping[str, Candidate]:
    return plugins.transports


def _allreduce(plugins: Registry) -> Mapping[str, Candidate]:
    return plugins.allreduce


TRANSPORTS = Family("transport", known.TRANSPORTS, UlyssesBackendError, _transports)
"""Transports."""
ALLREDUCE = Family("all-reduce backend", known.ALLREDUCE, AllReduceBackendError, _allreduce)
"""All-reduce backends."""
