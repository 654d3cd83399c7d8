"""How a group comes to ``pcie``: the opt-in, the variable, what each rank says; gloo ranks on recorded machines."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from comm_core import plugins, resolve_ulysses_backend
from comm_core.errors import JointValueError, UlyssesBackendError
from comm_core.testing import topologies as fake
from comm_core.testing.cli import topology_file
from comm_core.testing.ranks import RankPool
from comm_pcie import ExperimentalWarning


def decided(group: Any, backend: str) -> tuple[str, str, str]:
    from comm_pcie.plugin import PciePlugin

    plugins.register("pcie under test", PciePlugin())
    try:
        # A decision opens nothing, so it warns of nothing.
        with warnings.catch_warnings():
            warnings.simplefilter("error", ExperimentalWarning)
            found = resolve_ulysses_backend(backend, group, "cpu")
        transport = "" if found.pcie_plan is None else found.pcie_plan.transport
        reasons = {item.name: item.reason for item in found.considered}
        return found.backend, transport, reasons.get("pcie", "")
    except (JointValueError, UlyssesBackendError) as error:
        return type(error).__name__, "", str(error)
    finally:
        plugins.unregister("pcie under test")


def environment(file: Path, **more: str) -> dict[str, str]:
    return {"COMM_TOPOLOGY_FILE": str(file), **more}


MISSING = "can't be planned"
OPT_IN = {"COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS": "1"}


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    return Path(topology_file(tmp_path, fake.pcie_switch_pairs(4)))


def test_auto_takes_it_with_the_opt_in_of_all_alone(ranks: RankPool, machine: Path) -> None:
    """C2: by name it needs none; NVLink or not plays no role."""
    for backend, more, expected in (
        ("pcie", {}, "pcie"),
        ("auto", OPT_IN, "pcie"),
        ("auto", {}, "gloo"),
    ):
        outcomes = ranks.run(decided, backend, ranks=4, env=environment(machine, **more))
        assert {outcome[0] for outcome in outcomes} == {expected}
        assert outcomes[0][1] == ("p2p" if expected == "pcie" else "")
        assert expected == "pcie" or "COMM_ALLOW_EXPERIMENTAL_AUTO_BACKENDS" in outcomes[0][2]


def test_the_route_must_be_equal_on_all_ranks(ranks: RankPool, machine: Path) -> None:
    """C2: different values raise on every rank with each one's."""
    one = {1: environment(machine, COMM_ULYSSES_PCIE_ROUTE="p2p")}
    outcomes = ranks.run(decided, "pcie", ranks=4, env=environment(machine), rank_env=one)
    assert len(set(outcomes)) == 1 and outcomes[0][0] == "JointValueError"
    assert "COMM_ULYSSES_PCIE_ROUTE" in outcomes[0][2] and "'p2p'" in outcomes[0][2]
    wrong = environment(machine, COMM_ULYSSES_PCIE_ROUTE="fast")
    outcomes = ranks.run(decided, "pcie", ranks=2, env=wrong)
    assert outcomes[0][0] == "JointValueError" and "must be one of auto, p2p" in outcomes[0][2]


@pytest.mark.parametrize(
    ("name", "one", "others", "wrong"),
    [
        ("COMM_ULYSSES_PCIE_NICS", "mlx5_0,mlx5_1", "mlx5_1, mlx5_0", "mlx5_0;mlx5_1"),
        ("COMM_ULYSSES_PCIE_GID_INDICES", "3,3", "3,5", "3,x"),
    ],
)
def test_nics_and_gids_by_hand_must_be_equal_on_all_ranks(
    ranks: RankPool, machine: Path, name: str, one: str, others: str, wrong: str
) -> None:
    """C2: they are lists for all ranks, so that all know who uses what."""
    env = environment(machine, **{name: others})
    outcomes = ranks.run(decided, "pcie", ranks=2, env=env, rank_env={1: environment(machine, **{name: one})})
    assert len(set(outcomes)) == 1 and outcomes[0][0] == "JointValueError"
    assert name in outcomes[0][2] and one in outcomes[0][2] and others.replace(" ", "") in outcomes[0][2]
    outcomes = ranks.run(decided, "pcie", ranks=2, env=environment(machine, **{name: wrong}))
    assert outcomes[0][0] == "JointValueError" and f"{name} must be" in outcomes[0][2] and wrong in outcomes[0][2]


def test_a_route_that_can_not_be_planned_raises_and_a_preference_does_not(ranks: RankPool, machine: Path) -> None:
    for route in ("rdma", "hybrid"):
        outcomes = ranks.run(decided, "pcie", ranks=4, env=environment(machine, COMM_ULYSSES_PCIE_ROUTE=route))
        assert len(set(outcomes)) == 1 and outcomes[0][0] == "UlyssesBackendError" and MISSING in outcomes[0][2]
        env = environment(machine, COMM_ULYSSES_PCIE_ROUTE=f"prefer-{route}")
        assert ranks.run(decided, "pcie", ranks=4, env=env)[0][:2] == ("pcie", "p2p")
        env = environment(machine, COMM_ULYSSES_PCIE_ROUTE=route, **OPT_IN)
        backend, _, reason = ranks.run(decided, "auto", ranks=4, env=env)[0]
        assert backend != "pcie" and MISSING in reason


def test_one_rank_needs_no_links(ranks: RankPool, tmp_path: Path) -> None:
    """The specification's identity: nothing is opened, compiled or tested."""
    file = Path(topology_file(tmp_path, fake.without_nvml(fake.nvlink_mesh(1))))
    assert ranks.run(decided, "pcie", ranks=1, env=environment(file))[0][:2] == ("pcie", "p2p")
