"""Selection: what the group asks for, what its ranks know, and one decision that they all share."""

from __future__ import annotations

from comm_core.selection.decision import Considered, Decision
from comm_core.selection.resolve import Asked, resolve

__all__ = ["Asked", "Considered", "Decision", "resolve"]
