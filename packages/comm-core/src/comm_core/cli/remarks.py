"""What the transports say of a machine, for people."""

from __future__ import annotations

from collections.abc import Sequence

from comm_core.plugins.discovery import Registry
from comm_core.topology.facts import RankFacts

__all__ = ["remarks"]


def remarks(plugins: Registry, facts: Sequence[RankFacts]) -> dict[str, list[str]]:
    """Return what each transport has to say of a machine, where it has anything to say.

    Args:
        plugins: the transports.
        facts: one record a rank, with the transports' own probes.
    """
    found: dict[str, list[str]] = {}
    for name, transport in plugins.transports.items():
        try:
            lines = [str(line) for line in transport.remarks(facts)]
        except Exception as error:
            # A plugin's code, and no reason to say nothing of the others.
            lines = [f"its remarks failed: {type(error).__name__}: {error}"]
        if lines:
            found[name] = lines
    return found
