"""Whether an installed copy works at all: a release runs this file against the built wheel."""

from __future__ import annotations

import subprocess
import sys

import pytest

import comm_mnnvl
from comm_core.plugins import registry, report
from comm_core.testing import topologies
from comm_core.transport.interface import Request


@pytest.mark.installed_plugins
def test_the_entry_point_leads_to_the_transport() -> None:
    """What is installed is found under its name, is loaded, and carries this package's version."""
    (found,) = [item for item in report() if item.name == "mnnvl"]
    assert (found.state, found.error) == ("loaded", None)
    assert (found.distribution, found.transports) == ("comm-mnnvl", ("mnnvl",))
    transport = registry().transport("mnnvl")
    assert transport.version == comm_mnnvl.__version__ and transport.experimental
    assert transport.assess(Request("mnnvl", 4, "cuda"), topologies.nvlink_mesh(4)).eligible


def test_importing_touches_neither_cuda_nor_torch_nor_mpi() -> None:
    """L13: names are imported when they are used; and all of them are there."""
    code = (
        "import sys, comm_mnnvl, comm_mnnvl.plugin\n"
        "assert not {'torch', 'cuda', 'pynvml', 'mpi4py'} & set(sys.modules), sorted(sys.modules)\n"
        "assert all(getattr(comm_mnnvl, name) is not None for name in comm_mnnvl.__all__)\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized() and 'mpi4py' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
