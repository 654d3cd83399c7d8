"""Whether an installed copy works at all: a release runs this file against the built wheel."""

from __future__ import annotations

import comm_core
from comm_core.plugins import report


def test_every_public_name_can_be_imported():
    """The package lists names that it imports when they are used; each must lead somewhere."""
    for name in comm_core.__all__:
        assert getattr(comm_core, name) is not None, name


def test_what_is_built_in_is_loaded():
    """Without any plugin there are still NCCL and gloo."""
    built_in = [item for item in report() if item.distribution == "comm-core"]
    assert [(item.state, item.error) for item in built_in] == [("loaded", None)] * len(built_in)
    assert {name for item in built_in for name in item.transports} >= {"gloo", "nccl"}
