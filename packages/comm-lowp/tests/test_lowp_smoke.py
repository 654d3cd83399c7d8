"""Whether an installed copy works at all: a release runs this file against the built wheel."""

from __future__ import annotations

import pytest

import comm_lowp
from comm_core.plugins import registry, report


@pytest.mark.installed_plugins
def test_the_entry_point_leads_to_the_codec():
    """What is installed is found under its name, is loaded, and carries this package's version."""
    (found,) = [item for item in report() if item.name == "sage2"]
    assert (found.state, found.error) == ("loaded", None)
    assert (found.distribution, found.codecs) == ("comm-lowp", ("sage2",))
    assert registry().codecs["sage2"].version == comm_lowp.__version__
