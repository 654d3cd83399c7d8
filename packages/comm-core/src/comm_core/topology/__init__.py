"""Topology: facts (records), probe (never raises), predicates (pure)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comm_core._lazy import attach

if TYPE_CHECKING:
    from comm_core.topology.facts import DeviceFacts, FabricFacts, HostFacts, PairFacts, RankFacts
    from comm_core.topology.predicates import assess_mnnvl, assess_nvlink, assess_pcie
    from comm_core.topology.probe import probe_machine, probe_rank
    from comm_core.topology.recorded import anonymized, dump, load
    from comm_core.topology.ulysses import UlyssesPciePlan, UlyssesRankTopology, probe_ulysses_rank_topology

__all__ = [
    "DeviceFacts",
    "FabricFacts",
    "HostFacts",
    "PairFacts",
    "RankFacts",
    "UlyssesPciePlan",
    "UlyssesRankTopology",
    "anonymized",
    "assess_mnnvl",
    "assess_nvlink",
    "assess_pcie",
    "dump",
    "load",
    "probe_machine",
    "probe_rank",
    "probe_ulysses_rank_topology",
]

_MODULES = {
    "facts": ("DeviceFacts", "FabricFacts", "HostFacts", "PairFacts", "RankFacts"),
    "predicates": ("assess_mnnvl", "assess_nvlink", "assess_pcie"),
    "probe": ("probe_machine", "probe_rank"),
    "recorded": ("anonymized", "dump", "load"),
    "ulysses": ("UlyssesPciePlan", "UlyssesRankTopology", "probe_ulysses_rank_topology"),
}

__getattr__, __dir__ = attach(
    __name__, {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
)
