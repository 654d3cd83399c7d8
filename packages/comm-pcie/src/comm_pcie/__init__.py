"""Transport plugin ``pcie`` for comm-core: GPUs of one host with peer access, over PCIe or any other link.

Importing it touches neither a device nor the network.
"""

from __future__ import annotations

from comm_pcie._version import __version__
from comm_pcie.warnings import ExperimentalWarning, RouteWarning

__all__ = ["ExperimentalWarning", "RouteWarning", "__version__"]
