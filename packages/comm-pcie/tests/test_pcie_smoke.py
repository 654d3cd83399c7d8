"""Whether an installed copy works at all: a release runs this file against the built wheel."""

from __future__ import annotations

import pytest

import comm_pcie
from comm_core.plugins import registry, report
from comm_core.testing import topologies
from comm_core.transport.interface import Request


@pytest.mark.installed_plugins
def test_the_entry_point_leads_to_the_transport() -> None:
    """What is installed is found under its name, is loaded, and carries this package's version; no RDMA is needed."""
    (found,) = [item for item in report() if item.name == "pcie"]
    assert (found.state, found.error) == ("loaded", None)
    assert (found.distribution, found.transports) == ("comm-pcie", ("pcie",))
    transport = registry().transport("pcie")
    assert transport.version == comm_pcie.__version__ and transport.experimental
    assert transport.assess(Request("pcie", 4, "cuda"), topologies.pcie_root_complex(4)).eligible
    assert {"comm_pcie_exchange", "comm_pcie_selftest"} <= set(registry().modules)
